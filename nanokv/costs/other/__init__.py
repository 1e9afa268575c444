"""Bytes of the caches of models that nanokv does not run, from config.json alone."""
