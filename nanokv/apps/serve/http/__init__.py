"""Routes, security, streams and the page: what stands between a socket and the engine's thread."""
