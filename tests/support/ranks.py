"""Several processes that form one group, started once, and given work: a function of parallel_work.py and arguments.

    with Ranks(2) as ranks:
        ranks.call("logits", folder=…)      # what the function returned on every rank, or RankError

Importing torch takes a rank over a second, so a module shares its ranks. Run as a program this file is one rank.
"""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0


class RankError(Exception):
    """What a rank raised: the type and the text of each."""


class Ranks:
    """`size` processes on the loopback."""

    def __init__(self, size: int, timeout: float = 20.0):
        sys.path.insert(0, str(HERE.parents[1]))
        from nanokv.parallel.group import environment, free_port

        port = free_port()
        common = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}",
        }
        command = [sys.executable, __file__, str(timeout)]
        self.processes = [
            subprocess.Popen(
                command,
                env=common | environment(rank, size, port),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(size)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def send(self, function: str, **arguments) -> None:
        """Give all of them work."""
        for process in self.processes:
            process.stdin.write(json.dumps([function, arguments]).encode() + b"\n")
            process.stdin.flush()

    def answer(self, rank: int, patience: float = PATIENCE_S):
        """["value", …] or ["error", type, text] of one rank; None if it has ended without an answer."""
        out = self.processes[rank].stdout
        if not select.select([out], [], [], patience)[0]:
            raise TimeoutError(f"rank {rank} has not answered for {patience} s")
        line = out.readline()
        return json.loads(line) if line else None

    def call(self, function: str, **arguments) -> list:
        """The values of all ranks; RankError if one raised."""
        self.send(function, **arguments)
        answers = [self.answer(rank) for rank in range(len(self.processes))]
        if wrong := [answer for answer in answers if answer is None or answer[0] == "error"]:
            raise RankError(wrong)
        return [answer[1] for answer in answers]

    def close(self) -> None:
        """End them; whoever does not end by itself is killed."""
        for process in self.processes:
            process.stdin.close()
        until = time.monotonic() + 10
        for process in self.processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def main() -> None:
    """One rank: join, then work until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    import parallel_work
    from nanokv.parallel.group import start

    group = start(float(sys.argv[1]))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = ["value", getattr(parallel_work, name)(group, **arguments)]
        except Exception as error:
            answer = ["error", type(error).__name__, str(error)]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    group.close()


if __name__ == "__main__":
    main()
