"""A part of `nanokv memory`: the report of models that are counted and not run."""
