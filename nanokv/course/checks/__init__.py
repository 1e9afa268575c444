"""The exercises, one module a notebook: CHECKS and QUESTIONS. Right answers are computed or sealed, never written."""
