"""How the bundled model was made: synthetic corpus, byte-level BPE, training loop and evaluation.

Everything is seeded: two runs of `nanokv train` on one machine end in the same weights.
"""
