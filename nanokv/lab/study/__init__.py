"""Instruments: find where two models differ, check a cache, measure what rounding costs; and latent
attention (MLA)."""
