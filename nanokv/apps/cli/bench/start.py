"""`nanokv profile --start`: the time from the command to its first token, part by part.

The command runs several times in a separate process, which records a time stamp after each part
(nanokv/support/clock.py). Between two runs the floors are measured, each in a new process: an empty
Python, `import torch`, and one read of the weights' files from the system's file cache. Parts
without a floor are nanokv's own work. Fused weights are read while torch is imported: without an
idle core the import takes longer; with one, the part `weights` can be shorter than its floor.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.plan import Plan
from nanokv.apps.cli.common.text import to_json
from nanokv.cache.options import kind_text
from nanokv.errors import NanoKVError
from nanokv.fast import native

PROMPT = "one two three four five six seven eight nine ten eleven twelve"
WEIGHTS = {
    "plain": ["--plain"],
    "fast": [],
    "int8": ["--quantize", "int8"],
    "int4": ["--quantize", "int4"],
}
PARTS = {  # stamp → the work that precedes it
    "plan": "Python, flags, config.json, banner",
    "torch": "import torch",
    "code": "import the model's code",
    "tokenizer": "tokenizer",
    "weights": "weights",
    "kernels": "kernels, fusing",
    "prompt": "prompt to ids",
    "token": "prefill, first token",
}
FLOORS = {  # stamp → the least work that it requires
    "plan": "pass",
    "torch": "import torch",
    "weights": """for path in sys.argv[1:]:
    with open(path, "rb", 0) as file:
        part = bytearray(1 << 20)
        while file.readinto(part):
            pass""",
}
CLOCK = "import sys, time\nstart = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"


def run(plan: Plan, device: str, weights: str, repeat: int, json: bool) -> int:
    """Print one table of medians in ms. `weights`: a key of WEIGHTS."""
    if weights != "plain":
        native.library()  # built before the first start rather than during it
    files = [str(path) for path in sorted(plan.folder.glob("*.safetensors"))]
    floors: dict[str, list[float]] = {name: [] for name in FLOORS}
    taken: dict[str, list[float]] = {name: [] for name in PARTS}
    for _ in range(repeat):
        for name, seconds in one_start(plan, device, weights).items():
            taken[name].append(seconds)
        for name, code in FLOORS.items():
            floors[name].append(floor_seconds(name, code, files))
    rows = [(PARTS[name], median(taken[name]), median(floors.get(name, []))) for name in PARTS]
    rows.append(("together", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    if json:
        parts = [
            {"part": name, "seconds": took, "floor_seconds": floor} for name, took, floor in rows
        ]
        terminal.write_out(to_json(parts) + "\n")
        return 0
    cells = [
        (name, f"{1e3 * took:,.0f}", f"{1e3 * floor:,.0f}" if floor else "")
        for name, took, floor in rows
    ]
    terminal.write_out(
        f"{plan.name} {plan.dtype_name} {weights} · {len(PROMPT.split())} words, first token\n"
    )
    lines = layout.table(
        ("median of " + str(repeat), "ms", "floor ms"), cells, layout.columns(sys.stdout)
    )
    terminal.write_out("\n".join(lines) + "\n")
    return 0


def one_start(plan: Plan, device: str, weights: str) -> dict[str, float]:
    """Part → seconds, for one `nanokv generate` with the flags of this command."""
    flags = ["-m", str(plan.folder), "--dtype", plan.dtype_name, "--context", str(plan.context)]
    flags += ["--cache", kind_text(plan.cache_name, plan.cache_options)]
    flags += ["--device", device, "--threads", str(plan.threads)]
    flags += WEIGHTS[weights]
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "stamps"
        env = os.environ | {"NANOKV_STAMPS": str(log)}
        last = time.time()
        command = [sys.executable, "-m", "nanokv", "generate", PROMPT, "-n", "1", "-t", "0", *flags]
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            error = next((line for line in said if "error:" in line), said[-1])
            raise NanoKVError(f"nanokv generate ended with {done.returncode}: {error}")
        found = {}
        for line in log.read_text(encoding="utf-8").splitlines():
            stamp, _, part = line.partition(" ")
            when = float(stamp)
            found[part] = when - last
            last = when
    return found


def floor_seconds(name: str, code: str, files: list[str]) -> float:
    """Seconds that a new process measures for this work; for an empty one, its lifetime."""
    start = time.perf_counter()
    command = [sys.executable, "-c", CLOCK.format(code), *files]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    if name == "plan":
        return time.perf_counter() - start
    return float(done.stdout)


def median(values: list[float]) -> float:
    """The median; 0 if nothing was measured."""
    return statistics.median(values) if values else 0.0
