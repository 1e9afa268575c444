"""What people start: the command line and the HTTP server. They use the library; nothing in it knows them."""
