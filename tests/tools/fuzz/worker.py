"""A process that runs inputs of some targets for another process, under limits: `worker.py TARGET ...`.

On stdin: a line of JSON, {"target": name, "size": bytes}, then the input. Answer: a line, {"error": ""} or what went
wrong. `Worker` is the other side: it kills a worker that has not answered after 5 s.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path

SECONDS = 5.0  # for one input
MEMORY = 500_000_000  # bytes of address space above the idle process


def finding(target, data: bytes) -> str:
    """Run one input: "" if it gave a value or an allowed error, else what and where."""
    try:
        target.run(data)
    except target.ALLOWED:
        return ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pyo3's PanicException is no Exception
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if "/fuzz/" not in f.filename
        ]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
        return f"{type(error).__name__} in {where}: {error}"[:300]
    return ""


def limit_memory() -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Worker:
    """`run` gives what went wrong with an input, "" if nothing did; a worker that has died is replaced."""

    def __init__(self, *targets: str):
        self.targets, self.process = targets, None

    def run(self, target: str, data: bytes) -> str:
        if self.process is None:
            self._start()
        try:
            self.process.stdin.write(
                json.dumps({"target": target, "size": len(data)}).encode() + b"\n" + data
            )
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer(SECONDS)

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *self.targets],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if problem := self._answer(120):
            raise RuntimeError(f"the worker for {self.targets} did not start: {problem}")

    def _answer(self, seconds: float) -> str:
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if readable else b""
        if line:
            return json.loads(line)["error"]
        process, self.process = self.process, None
        if readable:
            code = process.wait()
            return f"died with {signal.Signals(-code).name if code < 0 else code}"
        process.kill()
        process.wait()
        return f"no answer after {seconds:g} s"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def main() -> None:
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parent), str(here.parents[2] / "support"), str(here.parents[3])]
    targets = {name: importlib.import_module(f"target_{name}") for name in sys.argv[1:]}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a target prints is not an answer
    for target in targets.values():
        for data in target.seeds().values():
            finding(target, data)  # what is loaded on first use is no finding
    if sys.platform == "linux":
        limit_memory()
    print(json.dumps({"error": ""}), file=answers, flush=True)  # ready
    while header := sys.stdin.buffer.readline():
        asked = json.loads(header)
        error = finding(targets[asked["target"]], sys.stdin.buffer.read(asked["size"]))
        print(json.dumps({"error": error}), file=answers, flush=True)


if __name__ == "__main__":
    main()
