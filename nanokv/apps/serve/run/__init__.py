"""The engine's thread and its client: requests go in, pieces of answers come out."""
