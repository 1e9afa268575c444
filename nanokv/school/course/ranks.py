"""Runs a notebook's function on several processes of this machine, the ranks of torch.distributed.

Another process cannot import a function of a notebook, so its source is copied into a program that
every rank runs. torch and nanokv are imported there; the function imports everything else itself.
A rank takes seconds to import torch.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanokv.errors import CourseError
from nanokv.parallel.group import environment, free_port

LIMIT_S = 120.0  # for each rank to end, after the one before it
PROGRAM = """\
import json
import sys

import torch

import nanokv
from nanokv.parallel.group import start

{source}

group = start(timeout={timeout})
with torch.inference_mode():
    result = {name}(group, **json.loads(sys.argv[1]))
print(json.dumps(result))
group.close()
"""


def on_ranks(work: Callable, size: int = 2, timeout: float = 30.0, **arguments: Any) -> list:
    """Call work(group, **arguments) on `size` processes → the results, by rank.

    Arguments and results are passed as JSON. `group` is a nanokv.parallel.group.Group; if a rank
    keeps the others waiting for more than `timeout` seconds, all end. Raises CourseError with the
    reason of the rank that caused the failure.
    """
    source = textwrap.dedent(inspect.getsource(work))
    with tempfile.TemporaryDirectory(prefix="nanokv-ranks-") as folder:
        path = Path(folder) / "rank.py"
        path.write_text(
            PROGRAM.format(source=source, name=work.__name__, timeout=timeout), encoding="utf-8"
        )
        ranks = _started([sys.executable, str(path), json.dumps(arguments)], size)
        try:
            said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise CourseError(
                f"{work.__name__} did not end within {LIMIT_S:g} s on {size} ranks"
            ) from error
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    reasons = {
        number: _reason(errors, rank.returncode)
        for number, (rank, (_, errors)) in enumerate(zip(ranks, said, strict=True))
        if rank.returncode
    }
    if reasons:  # ranks that waited for the failed one report ParallelError: prefer another reason
        number = min(reasons, key=lambda number: "ParallelError" in reasons[number])
        raise CourseError(f"{work.__name__} failed on rank {number}: {reasons[number]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def _started(command: list[str], size: int) -> list[subprocess.Popen]:
    """One process per rank, each with the environment variables of torch.distributed."""
    port = free_port()
    common = os.environ | {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env=common | environment(rank, size, port),
            text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]


def _reason(errors: str, code: int) -> str:
    """The last line of a traceback, without torch's "[rank0]: " and without a hint below it."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in errors.splitlines()]
    lines = [line for line in lines if line.strip() and not line.startswith("hint: ")]
    if not lines:
        return f"exit code {code}"
    return lines[-1]
