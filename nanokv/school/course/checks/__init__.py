"""The exercises: one module per notebook, with CHECKS, and QUESTIONS from the TOML file beside it.

Right answers are computed by nanokv or sealed (a hash), never written in the source.
"""
