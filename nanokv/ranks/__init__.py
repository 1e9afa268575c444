"""Several processes that generate together: rank 0 leads, the others follow its steps."""
