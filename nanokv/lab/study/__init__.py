"""Instruments: where two models differ, whether a cache is right, what rounding costs, and latent attention (MLA)."""
