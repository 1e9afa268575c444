"""A decode step on a GPU: kernels in Triton, and a step that is recorded once and replayed.

Nothing here is imported before a model is on such a device, and this file imports nothing.
"""
