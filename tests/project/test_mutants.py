"""The planted faults: every kind is made, each changes the source, and each file knows the tests that are about it."""

import ast
import json
import shutil
import subprocess
import sys

import pytest

import mutants

EMPTY = {f"nanokv/{room}/__init__.py" for room in ("decoding", "ranks", "remote")}  # a docstring
SOURCE = '''"""A file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import json


def f(x: int = 1, y=True) -> int:
    """Not a statement to remove."""
    if x < 2 and y:
        raise ValueError(f"x is {x + 1}")
    x += g(x, y)
    return x * 3 if y else None
'''


def made(source: str) -> list[tuple[str, str]]:
    """[(operator, before → after)] of every mutant."""
    count = len(list(mutants.sites(ast.parse(source))))
    found = [mutants.mutate(source, number) for number in range(count)]
    assert (
        len({text for text, _, _ in found} | {ast.unparse(ast.parse(source)) + "\n"}) == count + 1
    ), "one is no fault"
    return [(place.partition(": ")[2], what) for _, place, what in found]


def test_every_kind_of_fault_is_made_once_and_texts_are_left_alone():
    assert made(SOURCE) == [
        ("constant", "1 → 2"),
        ("constant", "1 → 0"),
        ("constant", "True → False"),
        ("negation", "if x < 2 and y: → if not (x < 2 and y):"),
        ("and/or", "x < 2 and y → x < 2 or y"),
        ("comparison", "x < 2 → x <= 2"),
        ("constant", "2 → 3"),
        ("constant", "2 → 1"),
        ("removed", "raise ValueError(f'x is {x + 1}') → pass"),
        ("removed", "x += g(x, y) → pass"),
        ("swapped", "g(x, y) → g(y, x)"),
        ("return None", "return x * 3 if y else None → return None"),
        ("negation", "x * 3 if y else None → x * 3 if not y else None"),
        ("arithmetic", "x * 3 → x + 3"),
        ("constant", "3 → 4"),
        ("constant", "3 → 2"),
    ]


@pytest.mark.slow
def test_the_list_depends_on_the_seed_alone_and_holds_every_file_with_its_tests():
    first = mutants.all_mutants(1)
    assert (
        first == mutants.all_mutants(1) and sorted(first) == sorted(mutants.all_mutants(2)) != first
    )
    core = {
        str(path.relative_to(mutants.ROOT))
        for folder in ("cache", "decoding", "engine", "fast", "ranks", "remote")
        for path in (mutants.ROOT / "nanokv" / folder).glob("*.py")
    }
    assert (
        core | {"nanokv/attention.py", "nanokv/inference.py"} == {path for path, _ in first} | EMPTY
    )
    tests = {name for path, _ in first for name in mutants.tests_of(path)}
    assert {name for name in tests if not (mutants.ROOT / name).is_file()} == set()


def test_a_mutant_meets_the_tests_that_run_its_line_quick_and_close_ones_first():
    quick = "tests/test_matrix.py::a"
    close, slow = (f"tests/model/test_model_parity.py::{name}" for name in "bc")
    lines = {
        slow: {"s": 0.6, "lines": {"nanokv/attention.py": [7, 8]}},
        quick: {"s": 0.1, "lines": {"nanokv/attention.py": [8]}},
        close: {"s": 0.2, "lines": {"nanokv/attention.py": [8, 9]}},
        "tests/decoding/test_beam.py::d": {"s": 0.1, "lines": {}},
    }
    assert mutants.covering(lines, "nanokv/attention.py", 8) == [close, quick, slow]
    assert mutants.covering(lines, "nanokv/attention.py", 7) == [slow]
    # A default: nobody runs the line.
    assert mutants.covering(lines, "nanokv/attention.py", 1) == [close, quick, slow]
    assert mutants.covering(lines, "nanokv/inference.py", 8) == [quick]


CODE = """
def double(x):
    return x * 2


def nobody_asks(x):
    return x - 1
"""
ASKED = """
import pytest
from nanokv.attention import double

@pytest.fixture(scope="module")
def four():
    return double(2)

def test_first(four): assert four

def test_second(four): assert four == 4

def test_alone(): pass
"""


@pytest.mark.slow
def test_it_says_which_faults_the_tests_do_not_notice(tmp_path):
    """A tree of one function: 2 · 2 is 2 + 2, and a line that no test runs can be anything."""
    for path in (*mutants.TESTS, "weights_loader/", "docs/", "tests/tools/", "nanokv/decoding/"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).mkdir(exist_ok=True) if path.endswith("/") else (tmp_path / path).touch()
    for path in ("nanokv/__init__.py", *mutants.tests_of("nanokv/attention.py")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "nanokv/attention.py").write_text(CODE)
    (tmp_path / "tests/model/test_model_parity.py").write_text(ASKED)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']\n")
    program = shutil.copy2(mutants.__file__, tmp_path / "tests/tools")
    done = subprocess.run(
        [sys.executable, program, "--out", tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    survived = {(each["place"], each["what"]) for each in found if each["outcome"] != "failed"}
    assert survived == {
        ("3: arithmetic", "x * 2 → x + 2"),
        ("7: return None", "return x - 1 → return None"),
        ("7: arithmetic", "x - 1 → x + 1"),
        ("7: constant", "1 → 2"),
        ("7: constant", "1 → 0"),
    }
    # A fixture's line is both tests'.
    assert {each["tests"] for each in found if each["place"].startswith("3")} == {2}
    assert "3 of 8 mutants were noticed" in done.stdout
