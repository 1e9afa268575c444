"""python -m nanokv.bench.gpu: nanokv/lab/bench/gpu.py by a shorter name."""

import sys

from nanokv.lab.bench.gpu import main

if __name__ == "__main__":
    sys.exit(main())
