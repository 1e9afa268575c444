"""`python -m nanokv` is the `nanokv` command."""

import sys

from nanokv.cli import main

if __name__ == "__main__":
    sys.exit(main())
