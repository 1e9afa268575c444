"""The `nanokv` command, also as `python -m nanokv`.

Until the command is imported there is nothing to keep: Ctrl-C ends the program as the system does it. Then
apps/cli/common/terminal.py decides.
"""

import atexit
import os
import signal
import sys


def main() -> int:
    """Run the command line → exit code; after Ctrl-C do not wait until torch has taken itself apart (0.3 s or more)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from nanokv.apps.cli import main

    code = main()
    if code == 130:
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
