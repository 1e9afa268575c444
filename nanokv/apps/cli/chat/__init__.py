"""The chat on a terminal or in a pipe: the loop, its commands, its view and its files."""
