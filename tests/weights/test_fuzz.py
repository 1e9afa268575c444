"""The fuzz targets without a fuzzer: seeds, past findings and some hundred mutations of each, in a process with limits.

`make fuzz` goes on from here for minutes or hours (tests/tools/fuzz/runner.py). A finding is put into
tests/tools/fuzz/regressions/TARGET/ as a small file; the code that it found is mended, and this file keeps it so.
"""

import importlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "tools" / "fuzz"
sys.path.append(str(FUZZ))

import common  # noqa: E402
import runner  # noqa: E402
from worker import Worker  # noqa: E402

REGRESSIONS = sorted(path for path in common.REGRESSIONS.glob("*/*") if path.is_file())
MUTATIONS = 200


@pytest.fixture(scope="module")
def worker():
    with Worker(*common.TARGETS) as worker:
        yield worker


@pytest.mark.parametrize("name", common.TARGETS)
def test_seeds_are_read(worker, name):
    """Some of them without an error: a target that refuses everything tests nothing."""
    target = importlib.import_module(f"target_{name}")
    seeds = target.seeds()
    assert seeds and {key: worker.run(name, data) for key, data in seeds.items()} == dict.fromkeys(
        seeds, ""
    )
    refused = 0
    for data in seeds.values():
        try:
            target.run(data)
        except target.ALLOWED:
            refused += 1
    assert refused < len(seeds)


@pytest.mark.parametrize("name", common.TARGETS)
def test_mutations_of_the_seeds_give_named_errors_only(worker, name):
    target, rng = importlib.import_module(f"target_{name}"), random.Random(7)
    pool, wrong = list(target.seeds().values()), {}
    for _ in range(MUTATIONS):
        data = target.mutate(rng.choice(pool), rng)
        if error := worker.run(name, data):
            wrong.setdefault(error, data[:200])
        pool.append(data)
    assert wrong == {}


@pytest.mark.parametrize("path", [f"{path.parent.name}/{path.name}" for path in REGRESSIONS])
def test_what_was_found_once_is_mended(worker, path):
    assert worker.run(path.split("/")[0], (common.REGRESSIONS / path).read_bytes()) == ""


BAD = """
import sys, os
class Wanted(Exception): pass
ALLOWED, INSTRUMENT = (Wanted,), []
kept = []
def seeds(): return {}
def run(data):
    if data == b"allowed": raise Wanted
    if data == b"error": raise KeyError("x")
    if data == b"exit": sys.exit(3)
    if data == b"panic": raise BaseException("as of pyo3")
    if data == b"abort": os.abort()
    if data == b"hang":
        while True: pass
    if data == b"memory": kept.append(bytearray(600_000_000))
    if data == b"print": print("{}", flush=True)
"""


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("fine", ""),
        ("allowed", ""),
        ("print", ""),
        ("error", "KeyError in target_bad.py:run: 'x'"),
        ("exit", "SystemExit in target_bad.py:run: 3"),
        ("panic", "BaseException in target_bad.py:run"),
        ("abort", "died with SIGABRT"),
        ("hang", "no answer after 0.5 s"),
        pytest.param(
            "memory",
            "MemoryError",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS"),
        ),
    ],
)
def test_the_harness_can_fail(tmp_path, monkeypatch, data, told):
    (tmp_path / "target_bad.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Worker("bad") as worker:
        assert worker.run("bad", b"fine") == ""
        monkeypatch.setattr("worker.SECONDS", 0.5)
        found = worker.run("bad", data.encode())
        assert found.startswith(told) and bool(found) == bool(told)
        monkeypatch.setattr("worker.SECONDS", 60)
        assert worker.run("bad", b"fine") == "", (
            "the next input is run, by another process if need be"
        )


def test_the_figures_of_libfuzzer_are_read():
    text = "#2\tINITED cov: 33 ft: 40 corp: 4/9b exec/s: 0\nx\n#900\tDONE   cov: 52 ft: 99 corp: 23/1Kb lim: 4\n"
    assert runner.statistics(text) == {
        "executions": 900,
        "covered": 52,
        "at first": 33,
        "corpus": 23,
    }
    assert runner.statistics("nothing")["executions"] == 0


def test_every_target_says_what_it_instruments():
    for name in common.TARGETS:
        target = importlib.import_module(f"target_{name}")
        assert (
            runner._instrumented(name) == target.INSTRUMENT
            and target.ALLOWED
            and callable(target.mutate)
        )


def test_without_atheris_it_says_what_to_do(tmp_path):
    code = (
        "import importlib.util, runpy, sys\nimportlib.util.find_spec = lambda name: None\n"
        f"sys.argv = ['runner.py']; runpy.run_path({str(FUZZ / 'runner.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert (
        done.returncode == 2
        and "atheris is not installed" in done.stderr
        and "Traceback" not in done.stderr
    )
