"""An entrance: python -m nanokv.bench.gpu. What is behind it is in nanokv/lab/bench."""
