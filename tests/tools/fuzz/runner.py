"""Fuzzing: `make fuzz`, or `python tests/tools/fuzz/runner.py [--seconds 30] [--target NAME ...] [--out DIR]`.

Every target is run for so many seconds with inputs that grow out of its seeds (made from the bundled checkpoint). Those
in pure Python run under atheris, which keeps an input when it reaches new code; those that end in Rust or shall not
take the fuzzer with them run in a worker process with limits. Only a NanoKVError and its kin may come out, within 5 s
and 500 MB above the idle process. What breaks this is written to DIR/findings (default: runs/fuzz): put a small one
into tests/tools/fuzz/regressions/TARGET/ and it is replayed by `make test` for ever.

Exit code 1 if there were findings, 2 if atheris is missing.
"""

import argparse
import ast
import importlib
import importlib.util
import random
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "support"), str(HERE.parents[2])]

import common  # noqa: E402
from worker import MEMORY, SECONDS, Worker, finding  # noqa: E402

LARGEST = 65_536  # bytes of an input


class Findings:
    """Inputs that went wrong, one for each error at each place."""

    def __init__(self, folder: Path):
        self.folder, self.seen = folder, set()

    def add(self, data: bytes, error: str) -> None:
        kind = re.sub(r"[^\w.]+", "-", error.split(": ")[0])[:80]
        if error and kind not in self.seen:
            self.seen.add(kind)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / kind).write_bytes(data)
            (self.folder / f"{kind}.txt").write_text(error + "\n")
            print(f"FINDING {error}", file=sys.stderr, flush=True)


def in_worker(name: str, seconds: float, out: Path, seed: int) -> dict:
    """Seeds, then mutations of seeds and of earlier mutations, in a process with limits."""
    target, rng, findings = (
        importlib.import_module(f"target_{name}"),
        random.Random(seed),
        Findings(out / name),
    )
    pool, count, end = list(target.seeds().values()), 0, time.monotonic() + seconds
    begun = list(pool)
    with Worker(name) as worker:
        while time.monotonic() < end:
            data = begun.pop() if begun else target.mutate(rng.choice(pool), rng)[:LARGEST]
            findings.add(data, worker.run(name, data))
            if rng.random() < 0.02 and len(pool) < 500:
                pool.append(data)
            count += 1
    return {"executions": count}


def under_atheris(name: str, seconds: float, out: Path, seed: int) -> dict:
    """A process of its own, again after each hang, crash or excess of memory, until the time is over."""
    begin, rows, corpus = time.monotonic(), [], out / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    while (left := seconds - (time.monotonic() - begin)) > 1 or not rows:
        command = [
            sys.executable,
            __file__,
            "--inside",
            name,
            "--seconds",
            str(int(left) + 1),
            "--out",
            str(out),
            "--seed",
            str(seed + len(rows)),
        ]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        rows.append(statistics(done.stderr))
        for line in done.stderr.splitlines():
            if re.search(r"^FINDING|ERROR: libFuzzer|Error:", line):
                print(f"  {line[:300]}", file=sys.stderr)
        if done.returncode not in (0, 70, 71, 77):
            print(done.stderr[-2000:], file=sys.stderr)
            break
    return {
        "executions": sum(row["executions"] for row in rows),
        "covered": max(row["covered"] for row in rows),
        "at first": rows[0]["at first"],
        "corpus": max(row["corpus"] for row in rows),
    }


def statistics(text: str) -> dict:
    """What libFuzzer prints: '#1234 DONE cov: 56 ft: 78 corp: 9/10b …'."""
    found = [
        (int(n), int(cov), int(corp))
        for n, cov, corp in re.findall(
            r"^#(\d+)\s+\w+\s+cov: (\d+) ft: \d+ corp: (\d+)", text, re.MULTILINE
        )
    ]
    if not found:
        return {"executions": 0, "covered": 0, "at first": 0, "corpus": 0}
    return {
        "executions": found[-1][0],
        "covered": found[-1][1],
        "at first": found[0][1],
        "corpus": found[-1][2],
    }


def inside(name: str, seconds: int, out: Path, seed: int) -> None:
    """The process that atheris takes over."""
    import atheris

    instrumented = _instrumented(name)
    with atheris.instrument_imports(include=instrumented, enable_loader_override=False):
        target = importlib.import_module(f"target_{name}")
    findings = Findings(out / name)
    seeds = out / name / "corpus"
    for key, data in target.seeds().items():
        (seeds / f"seed-{re.sub(r'[^a-z0-9]+', '-', key.lower())}").write_bytes(data)
        finding(target, data)

    def one_input(data: bytes) -> None:
        findings.add(data, finding(target, data))

    def mutator(data: bytes, largest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return atheris.Mutate(data, largest)
        return getattr(target, "mutate", common.byte_mutator)(data, rng)[:largest]

    idle = (
        int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        if sys.platform == "linux"
        else 10**9
    )
    atheris.Setup(
        [
            sys.argv[0],
            str(seeds),
            f"-max_total_time={seconds}",
            f"-timeout={int(SECONDS)}",
            f"-seed={seed + 1}",
            f"-rss_limit_mb={(idle + MEMORY) >> 20}",
            f"-max_len={LARGEST}",
            f"-artifact_prefix={out / name}/",
        ],
        one_input,
        custom_mutator=mutator,
    )
    atheris.Fuzz()


def _instrumented(name: str) -> list[str]:
    """The list stands in the target, which must not be imported before atheris looks."""
    body = ast.parse((HERE / f"target_{name}.py").read_text()).body
    lists = {ast.unparse(n.targets[0]): n.value for n in body if isinstance(n, ast.Assign)}
    return ast.literal_eval(lists["INSTRUMENT"])


def table(rows: list[dict]) -> str:
    head = ("target", "seconds", "executions", "coverage", "corpus", "findings")
    lines = [head] + [tuple(str(row.get(name, "")) for name in head) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def fuzz(names: list[str], seconds: float, out: Path, seed: int) -> int:
    rows, started = [], time.time()
    for name in names:
        print(f"{name}: {seconds:g} s", file=sys.stderr, flush=True)
        text = (HERE / f"target_{name}.py").read_text()
        run, begin = in_worker if "IN_PROCESS = False" in text else under_atheris, time.monotonic()
        row = run(name, seconds, out, seed)
        found = [
            p
            for p in (out / name).glob("*")
            if p.stat().st_mtime >= started
            and (
                p.suffix == ".txt"
                or p.name.startswith(("crash-", "timeout-", "oom-", "slow-unit-"))
            )
        ]
        coverage = f"{row['at first']} → {row['covered']}" if "covered" in row else "outside"
        rows.append(
            row
            | {
                "target": name,
                "seconds": round(time.monotonic() - begin),
                "coverage": coverage,
                "findings": len(found),
            }
        )
    print(table(rows))
    found = sum(row["findings"] for row in rows)
    if found:
        print(f"{found} findings in {out}", file=sys.stderr)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="fuzz what nanokv reads")
    parser.add_argument(
        "--seconds", type=int, default=30, help="for each target (default 30: five minutes in all)"
    )
    parser.add_argument(
        "--target",
        nargs="*",
        default=common.TARGETS,
        choices=common.TARGETS,
        metavar="NAME",
        help=", ".join(common.TARGETS),
    )
    parser.add_argument(
        "--out", type=Path, default=common.ROOT / "runs" / "fuzz", help="corpus and findings"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print(
            "fuzz: error: atheris is not installed (Linux on x86-64, Python 3.11 to 3.13)\n"
            "hint: make fuzz PYTHON=python3.11, or pip install -e '.[fuzz]'; "
            "the replay of seeds and past findings needs nothing: make test ARGS=tests/weights/test_fuzz.py",
            file=sys.stderr,
        )
        return 2
    if args.inside:
        inside(args.inside, args.seconds, args.out, args.seed)
    return fuzz(args.target, args.seconds, args.out, args.seed)


if __name__ == "__main__":
    sys.exit(main())
