"""Mutants: one small fault at a time is planted in a copy of the package, and the tests of that file must notice.

By hand, `make mutants`: 400 seeded mutants of the core take an hour; ARGS="--count 40" takes the first 40 of the same
list. A mutant that survives is equivalent (no answer can differ) or shows a missing assertion. One run without a fault
records which test runs which line, and how long it takes; then each mutant meets the tests that run its line, quick
ones first, up to the first that fails. The parent imports torch and transformers once and forks for each mutant; the
working tree is only read.
"""

import argparse
import ast
import collections
import functools
import inspect
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED
# Seconds. Who waited longer for a processor, or for a deadline, may have failed because the machine was busy: the fault
# is noticed if it happens twice. What fails without a fault is never asked.
PATIENCE = 8.0
COPIED = ("nanokv", "weights_loader", "tests", "docs", "pyproject.toml")
CONTRACT = "cache_contract caches_refusals matrix"
# A file, or the longest folder that holds it → the test files that are about it, quick and close ones first.
TESTS = {
    "nanokv/attention.py": "model_parity merge matrix fast generation latent caches_window batching",
    "nanokv/inference.py": "cache_contract cache_base generation matrix caches_window caches_rows batching session",
    "nanokv/cache/": CONTRACT,
    "nanokv/cache/base.py": f"cache_base {CONTRACT} caches_rows interrupts_caches generation caches_window session",
    "nanokv/cache/batch.py": f"{CONTRACT} caches_rows batching interrupts_caches caches_place",
    "nanokv/cache/capabilities.py": f"cache_base {CONTRACT} caches_place caches_rows interrupts_caches",
    "nanokv/cache/codes.py": f"caches_quantized {CONTRACT}",
    "nanokv/cache/ferry.py": "ferry caches_place",
    "nanokv/cache/offloaded.py": f"caches_place ferry {CONTRACT}",
    "nanokv/cache/options.py": f"{CONTRACT} caches_window caches_quantized caches_rows memory cli",
    "nanokv/cache/packed.py": f"engine_packed {CONTRACT}",
    "nanokv/cache/padded.py": f"batching {CONTRACT}",
    "nanokv/cache/paged.py": f"caches_paged {CONTRACT} interrupts_caches engine",
    "nanokv/cache/paged_batch.py": f"engine caches_place caches_paged interrupts_caches {CONTRACT}",
    "nanokv/cache/paged_pack.py": f"engine_packed {CONTRACT}",
    "nanokv/cache/pool.py": f"caches_paged caches_place interrupts_caches interrupts engine {CONTRACT}",
    "nanokv/cache/prefix.py": f"caches_paged interrupts_caches interrupts engine {CONTRACT}",
    "nanokv/cache/quantized.py": f"caches_quantized {CONTRACT} caches_place",
    "nanokv/cache/registry.py": f"{CONTRACT} cli caches_quantized memory library",
    "nanokv/cache/saving.py": f"{CONTRACT} hostile_files caches_quantized caches_window session fingerprint "
    "handover device_memory",
    "nanokv/cache/sliding.py": f"caches_window {CONTRACT} interrupts_caches",
    "nanokv/cache/static.py": f"{CONTRACT} compiled fast caches_place",
    "nanokv/cache/stores.py": f"caches_place ferry caches_quantized caches_rows {CONTRACT}",
    "nanokv/cache/view.py": f"caches_place caches_paged {CONTRACT} engine",
    "nanokv/decoding/batching.py": "batching batch_command beam gpu_model generation",
    "nanokv/decoding/beam.py": "beam gpu_model",
    "nanokv/decoding/completion.py": "completion cli session",
    "nanokv/decoding/counter.py": "counter gpu_model",
    "nanokv/decoding/draw.py": "gpu_model generation speculative engine batching session",
    "nanokv/decoding/generation.py": "generation session speculative beam interrupts cli batching",
    "nanokv/decoding/ranges.py": "sample transcripts serve_fields cli",
    "nanokv/decoding/sample.py": "sample generation beam speculative gpu_model",
    "nanokv/decoding/speculative.py": "speculative generation session interrupts gpu_model",
    "nanokv/engine/": "engine engine_packed batch_command interrupts handover_engine serve_thread serve_live gpu_model",
    "nanokv/engine/prefilled.py": "handover_engine serve_prefill interrupts",
    "nanokv/fast/": "fast matrix",
    "nanokv/fast/__init__.py": "fast compiled names",
    "nanokv/fast/building.py": "fast speed",
    "nanokv/fast/checks.py": "fast matrix speed",
    "nanokv/fast/choice.py": "fast speed cli",
    "nanokv/fast/compiled.py": "compiled matrix backends",
    "nanokv/fast/model.py": "fast matrix speed neighbours",
    "nanokv/fast/native.py": "fast speed",
    "nanokv/fast/optimizing.py": "fast neighbours speed",
    "nanokv/fast/private.py": "fast speed hostile_files",
    "nanokv/ranks/": "ranks parallel",
    "nanokv/remote/": "handover_engine serve_prefill",
    "nanokv/remote/handover.py": "handover",
    "nanokv/remote/link.py": "handover handover_engine",
}

# --- which mutants there are ----------------------------------------------------------------------------------------

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
REMOVED = ast.Assign | ast.AugAssign | ast.Raise | ast.Expr


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(operator, the node that takes this one's place)."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        swapped = [COMPARED[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", ast.Compare(node.left, swapped, node.comparators)
    if (
        isinstance(node, ast.BinOp)
        and type(node.op) in COMPUTED
        and not (is_text(node.left) or is_text(node.right))
    ):
        yield "arithmetic", ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant", ast.Constant(node.value + 1)
        yield "constant", ast.Constant(node.value - 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "constant", ast.Constant(not node.value)
    if isinstance(node, ast.BoolOp):
        yield (
            "and/or",
            ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values),
        )
    if isinstance(node, ast.If | ast.While):
        kind = type(node)
        yield "negation", kind(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.IfExp):
        yield "negation", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        yield "return None", ast.Return(ast.Constant(None))
    if isinstance(node, REMOVED) and not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
        yield "removed", ast.Pass()
    if (
        isinstance(node, ast.Call)
        and len(node.args) >= 2
        and not isinstance(node.args[0], ast.Starred)
    ):
        first, second, *rest = node.args
        yield "swapped", ast.Call(node.func, [second, first, *rest], node.keywords)


def sites(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Every place that can be mutated, top down; not annotations, decorators, texts, or the wording of errors."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
        return
    yield from ((node, operator, new) for operator, new in replacements(node))
    if isinstance(node, ast.Raise | ast.JoinedStr):  # the raise itself is tried, not its words
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from sites(child)


class Put(ast.NodeTransformer):
    """One node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def mutate(source: str, number: int) -> tuple[str, str, str]:
    """(the source with its mutant of this number, "line: operator", "before → after")."""
    tree = ast.parse(source)
    old, operator, new = list(sites(tree))[number]
    place = f"{old.lineno}: {operator}"
    what = " → ".join(ast.unparse(ast.fix_missing_locations(x)).split("\n")[0] for x in (old, new))
    return ast.unparse(ast.fix_missing_locations(Put(old, new).visit(tree))) + "\n", place, what


def tests_of(path: str) -> list[str]:
    key = max(
        (key for key in TESTS if path == key or (key.endswith("/") and path.startswith(key))),
        key=len,
    )
    found = {path.stem.removeprefix("test_"): path for path in (ROOT / "tests").rglob("test_*.py")}
    return [found[name].relative_to(ROOT).as_posix() for name in TESTS[key].split()]


@functools.cache
def sizes() -> dict[str, int]:
    """How many mutants each file has."""
    folders = [key for key in TESTS if key.endswith("/")] + ["nanokv/decoding/"]
    files = {key for key in TESTS if not key.endswith("/")}
    files |= {
        str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).glob("*.py")
    }
    counts = {path: len(list(sites(ast.parse(read(path))))) for path in sorted(files)}
    return {path: count for path, count in counts.items() if count}


def all_mutants(seed: int) -> list[tuple[str, int]]:
    """(file, number) in an order drawn by the seed."""
    found = [(path, number) for path, count in sizes().items() for number in range(count)]
    random.Random(seed).shuffle(found)
    return found


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


# --- which tests run a line -----------------------------------------------------------------------------------------


class Recorder:
    """A plugin of pytest that writes, for each test that passed, its seconds and the lines of the core that it ran. A
    fixture's lines belong to each test that asks for it, not only to the first."""

    def __init__(self, copy: Path, out: Path):
        self.paths = {str(copy / path): path for path in sizes()}
        self.out, self.lines, self.tests, self.failed = out, set(), {}, set()
        self.fixtures = collections.defaultdict(set)

    def trace(self, frame: types.FrameType, event: str, arg: object):
        code = frame.f_code
        # A module, or a class body.
        if code.co_filename not in self.paths or not code.co_flags & inspect.CO_OPTIMIZED:
            return None
        if event == "line":
            self.lines.add((code.co_filename, frame.f_lineno))
        return self.trace

    def pytest_collection_finish(self):
        sys.settrace(self.trace)
        threading.settrace(self.trace)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        outer, self.lines = self.lines, self.fixtures[fixturedef]
        try:
            return (yield)
        finally:
            self.lines = outer | self.lines

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.lines, began = set(), time.process_time()
        result = yield
        for name in item.fixturenames:
            for fixture in item._fixtureinfo.name2fixturedefs.get(name, ()):
                self.lines |= self.fixtures[fixture]
        by_file = collections.defaultdict(list)
        for name, line in sorted(self.lines):
            by_file[self.paths[name]].append(line)
        if item.nodeid not in self.failed:
            self.tests[item.nodeid] = {"s": round(time.process_time() - began, 2), "lines": by_file}
        return result

    def pytest_runtest_logreport(self, report):
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        sys.settrace(None)
        self.out.write_text(json.dumps(self.tests))


class InOrder:
    """A plugin of pytest: these tests and no others, in this order."""

    def __init__(self, tests: list[str]):
        self.rank = {test: rank for rank, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.rank),
            key=lambda item: self.rank[item.nodeid],
        )


def covering(lines: dict, path: str, line: int) -> list[str]:
    """The tests that run this line, those of less than half a second first; all that are about the file for a line that
    runs while it is imported: a default, a table."""
    files = tests_of(path)
    about = [test for test in lines if test.partition("::")[0] in files]
    chosen = [test for test in about if line in lines[test]["lines"].get(path, ())] or about
    rank = {
        test: (lines[test]["s"] > 0.5, files.index(test.partition("::")[0]), lines[test]["s"])
        for test in chosen
    }
    return sorted(chosen, key=rank.get)


# --- running one ----------------------------------------------------------------------------------------------------


def warm_up() -> None:
    """What takes seconds to import and is never mutated; forked processes share it."""
    import hypothesis.stateful
    import torch
    import transformers.models.qwen3.modeling_qwen3

    assert all((hypothesis, torch, transformers)) and "nanokv" not in sys.modules
    torch.set_num_threads(1)


def pytest_in_child(
    copy: Path, argv: list[str], plugin: object, seconds: float
) -> tuple[str, float]:
    """("passed", "failed" or "timeout", seconds without a processor) of pytest in a forked process, in the copy. The
    limit is on the processor's seconds, so a busy machine stops nothing early; who only waits is stopped after ten
    times as long."""
    import resource  # not on Windows, nor is fork

    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        resource.setrlimit(resource.RLIMIT_CPU, (round(seconds), round(seconds) + 5))
        log = os.open(copy / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.path[:0] = [str(copy), str(copy / "tests/support"), str(copy / "tests/tools")]
        os.environ["PYTHONPATH"] = str(copy)
        code = 99
        try:
            import nanokv

            assert Path(nanokv.__file__).is_relative_to(copy), nanokv.__file__
            code = int(pytest.main(["-q", "-p", "no:cacheprovider", *argv], plugins=[plugin]))
        finally:
            os._exit(code)
    began = time.monotonic()
    while time.monotonic() < began + 10 * seconds:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            kill_group(child)
            code = os.waitstatus_to_exitcode(status)
            ends = {0: "passed", NO_TESTS: "passed", -signal.SIGXCPU: "timeout"}
            waited = time.monotonic() - began - used.ru_utime - used.ru_stime
            return ends.get(code, "failed"), waited
        time.sleep(0.05)
    kill_group(child)
    os.waitpid(child, 0)
    return "timeout", 10 * seconds


def kill_group(leader: int) -> None:
    """What a test left running too."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def reason(copy: Path) -> str:
    """The first failed test of the last run, as pytest's summary names it."""
    lines = (copy / "log.txt").read_text("utf-8", "replace").splitlines()
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (named or lines[-1:] or [""])[0][:160]


def one(copy: Path, path: str, number: int, lines: dict, argv: list[str], stamp: int) -> dict:
    """Plant it, run, take it out. The file's time differs for every mutant, so no stale bytecode is used."""
    source, place, what = mutate(read(path), number)
    (copy / path).write_text(source, "utf-8")
    os.utime(copy / path, (stamp, stamp))
    chosen = covering(lines, path, int(place.partition(":")[0]))
    expected = sum(lines[test]["s"] for test in chosen)
    began = time.monotonic()
    files = sorted({test.partition("::")[0] for test in chosen}) or tests_of(path)
    run = functools.partial(
        pytest_in_child, copy, ["-x", *argv, *files], InOrder(chosen), 30 + 2 * expected
    )
    outcome, waited = run()
    if outcome == "failed" and waited > PATIENCE:
        outcome, _ = run()
    seconds = round(time.monotonic() - began, 1)
    shutil.copy2(ROOT / path, copy / path)
    by = reason(copy) if outcome == "failed" else ""
    return {
        "file": path,
        "number": number,
        "place": place,
        "what": what,
        "outcome": outcome,
        "s": seconds,
        "by": by,
        "tests": len(chosen),
        "expected": round(expected, 1),
    }


def recorded(copy: Path, paths: list[str], argv: list[str], out: Path) -> dict:
    """Which test of these files runs which lines, from one run without a fault."""
    if not out.exists():
        files = sorted({file for path in paths for file in tests_of(path)})
        pytest_in_child(copy, [*argv, *files], Recorder(copy, out), 7200)
        # What fails by itself tells nothing.
        print((copy / "log.txt").read_text("utf-8", "replace").splitlines()[-1])
    return json.loads(out.read_text("utf-8")) or sys.exit("no test passes without a fault")


def report(results: list[dict]) -> None:
    """A mutant over its time hangs, or its tests were slow: one to look at, not one that was noticed."""
    failed = [result for result in results if result["outcome"] == "failed"]
    print(f"{len(failed)} of {len(results)} mutants were noticed; the others:")
    for result in results:
        if result not in failed:
            print(f"  {result['outcome']}: {result['file']}:{result['place']}: {result['what']}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=400, help="how many of the list, from its beginning (400)"
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="pass over so many first, to go on with a list"
    )
    parser.add_argument("--seed", type=int, default=1, help="another list (1)")
    parser.add_argument("--only", default="", help="mutants of files whose path holds this")
    parser.add_argument(
        "--marks", default="not slow", help="pytest's -m; an empty text runs the slow tests too"
    )
    parser.add_argument(
        "--lines", type=Path, help="a file for the lines that each test runs: the next run reads it"
    )
    parser.add_argument(
        "--out", type=Path, help="a file for the results, a JSON line for each mutant"
    )
    args = parser.parse_args()
    chosen = [m for m in all_mutants(args.seed) if args.only in m[0]][args.skip :][: args.count]
    results = []
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / ROOT.name
        copy.mkdir()
        (copy.parent / "shared").symlink_to(ROOT.parent / "shared")  # test data that lies beside
        for name in COPIED:
            duplicate = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            duplicate(ROOT / name, copy / name)
        warm_up()
        argv = ["-m", args.marks] if args.marks else []
        lines = recorded(
            copy, [path for path, _ in chosen], argv, args.lines or copy / "lines.json"
        )
        for n, (path, number) in enumerate(chosen):
            result = one(copy, path, number, lines, argv, 1_000_000_000 + n)
            print(
                f"{n + args.skip:4} {result['outcome']:8}{result['s']:6} s  {path}:{result['place']}: "
                f"{result['what'][:90]}  {result['by']}",
                flush=True,
            )
            results.append(result)
            if args.out:
                with args.out.open("a") as out:
                    out.write(json.dumps(result) + "\n")
    report(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
