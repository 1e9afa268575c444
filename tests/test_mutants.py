"""The planted faults: every kind is made, each changes the source, and each file knows the tests that are about it."""

import ast

import mutants

EMPTY = {"nanokv/decoding/__init__.py"}  # a docstring
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
    assert len({text for text, _, _ in found} | {ast.unparse(ast.parse(source)) + "\n"}) == count + 1, "one is no fault"
    return [(place.partition(": ")[2], what) for _, place, what in found]


def test_every_kind_of_fault_is_made_once_and_texts_are_left_alone():
    assert made(SOURCE) == [
        ("constant", "1 → 2"), ("constant", "1 → 0"), ("constant", "True → False"),
        ("negation", "if x < 2 and y: → if not (x < 2 and y):"), ("and/or", "x < 2 and y → x < 2 or y"),
        ("comparison", "x < 2 → x <= 2"), ("constant", "2 → 3"), ("constant", "2 → 1"),
        ("removed", "raise ValueError(f'x is {x + 1}') → pass"),
        ("removed", "x += g(x, y) → pass"), ("swapped", "g(x, y) → g(y, x)"),
        ("return None", "return x * 3 if y else None → return None"),
        ("negation", "x * 3 if y else None → x * 3 if not y else None"),
        ("arithmetic", "x * 3 → x + 3"), ("constant", "3 → 4"), ("constant", "3 → 2"),
    ]  # fmt: skip


def test_the_list_depends_on_the_seed_alone_and_holds_every_file_with_its_tests():
    first = mutants.all_mutants(1)
    assert first == mutants.all_mutants(1) and sorted(first) == sorted(mutants.all_mutants(2)) != first
    core = {str(path.relative_to(mutants.ROOT)) for folder in ("cache", "decoding", "engine", "fast")
            for path in (mutants.ROOT / "nanokv" / folder).glob("*.py")}  # fmt: skip
    assert core | {"nanokv/attention.py", "nanokv/inference.py"} == {path for path, _ in first} | EMPTY
    tests = {name for path, _ in first for name in mutants.tests_of(path)}
    assert {name for name in tests if not (mutants.ROOT / name).is_file()} == set()
