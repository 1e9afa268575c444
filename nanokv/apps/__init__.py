"""The two programs: the command line and the HTTP server.

They use the library. No module of the library imports them.
"""
