"""How the bundled model was made: synthetic corpus, byte-level BPE, training loop and evaluation.

Everything is seeded: `nanokv train` reproduces the same model from scratch.
"""
