"""A conversation over one cache: how much of the cache each turn keeps, and why not more."""
