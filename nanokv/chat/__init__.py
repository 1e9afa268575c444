"""A conversation over one cache: what of the cache each turn can keep, and why not more."""
