"""Cached keys and values that travel between machines: the link, the hand-over, the prefill process."""
