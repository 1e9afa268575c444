"""The `nanokv` command, also as `python -m nanokv`.

While the command is being imported there is no work to save, so Ctrl-C keeps the system's default
action and ends the program. After that, apps/cli/common/terminal.py handles Ctrl-C.
"""

import atexit
import os
import signal
import sys


def main() -> int:
    """Run the command line and return its exit code.

    After Ctrl-C the process exits without torch's teardown, which takes 0.3 s or more.
    """
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
