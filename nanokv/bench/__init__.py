"""The commands `python -m nanokv.bench.…`, whose code is in nanokv/lab/bench."""
