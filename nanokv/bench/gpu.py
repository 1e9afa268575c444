"""python -m nanokv.bench.gpu, a shorter name for nanokv/lab/bench/gpu.py."""

import sys

from nanokv.lab.bench.gpu import main

if __name__ == "__main__":
    sys.exit(main())
