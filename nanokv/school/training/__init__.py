"""How the bundled model was made: synthetic corpus, byte-level BPE, training loop and evaluation.

Everything is seeded: `nanokv train` writes the same model again from nothing.
"""
