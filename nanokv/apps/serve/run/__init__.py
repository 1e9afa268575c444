"""The engine's thread and what it works on: requests in, pieces of answers out."""
