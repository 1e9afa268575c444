"""Between a socket and the engine's thread: routes, security, streams, and the page at /."""
