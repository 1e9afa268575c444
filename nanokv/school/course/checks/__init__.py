"""The exercises, one module per notebook with CHECKS, and QUESTIONS from the TOML file beside it.

Right answers are computed or sealed, never written.
"""
