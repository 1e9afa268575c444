"""How the bundled model was made: a synthetic corpus, a byte-level BPE, a training loop, an evaluation.

Everything is seeded: `nanokv train` writes the same model again from nothing.
"""
