"""CONTRIBUTING.md is right: the cache, the command and the notebook of its examples are made from its own blocks, and
work; CHANGELOG.md speaks of the version that is built.
"""

import re
import sys
import types
from pathlib import Path

import pytest

import nanokv
import nanokv.apps.cli

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
CACHE, ENTRIES, COMMAND, LINE, NOTEBOOK = BLOCKS


@pytest.fixture
def counted():
    """The cache of the example, registered; CACHES and KINDS are as before after the test."""
    from nanokv.cache import CACHES, KVCache
    from nanokv.cache.options import KINDS

    names = {"CACHES": CACHES, "KINDS": KINDS, "KVCache": KVCache}
    exec(CACHE + ENTRIES, names)
    yield names["CountedCache"]
    for table in (CACHES, KINDS):
        del table["counted"]


def test_the_cache_is_equal_to_no_cache(counted):
    from nanokv.lab.study import equality

    report = equality.check("counted")
    assert [case for case in report.cases if case.status == "failed"] == [] and len(
        report.cases
    ) > 10


def test_the_cache_counts_what_it_says(counted):
    import torch

    cache = counted()
    for _ in range(3):
        cache.append(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    assert cache.copied == (1 + 2) * 2 * 2 * 8 * 4


def test_the_cache_is_known_to_the_command_line(counted, tiny_folder, capsys, monkeypatch):
    import io

    from nanokv.apps.cli import main

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    answers = []
    for kind in ("dict", "counted"):
        assert (
            main(
                [
                    "generate",
                    "Hi",
                    "-m",
                    str(tiny_folder),
                    "-n",
                    "4",
                    "-q",
                    "-t",
                    "0",
                    "--cache",
                    kind,
                ]
            )
            == 0
        )
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_the_command_runs(monkeypatch, capsys):
    from nanokv.apps.cli import COMMANDS, main

    module = types.ModuleType("nanokv.apps.cli.commands.tokens")
    exec(COMMAND, module.__dict__)
    monkeypatch.setitem(sys.modules, "nanokv.apps.cli.commands.tokens", module)
    monkeypatch.setattr("nanokv.apps.cli.COMMANDS", dict(COMMANDS))
    exec(LINE, {"COMMANDS": nanokv.apps.cli.COMMANDS})
    assert main(["tokens", "Hello\x1b there"]) == 0
    lines = capsys.readouterr().out.splitlines()
    _, tokenizer = nanokv.load("tiny")
    assert [int(line.split()[0]) for line in lines] == tokenizer.encode("Hello\x1b there")
    assert not any("\x1b" in line for line in lines)
    assert (
        main(["tokens", "--help"]) == 0 and "nanokv tokens [flags] TEXT" in capsys.readouterr().out
    )


def test_the_notebook_is_accepted(tmp_path):
    from nanokv.errors import CourseError
    from nanokv.school.course import twins

    path = tmp_path / "14_one_token.py"
    path.write_text(NOTEBOOK)
    source = twins.read(path)
    assert [cell.role for cell in source.cells if cell.role != "both"] == ["exercise", "solution"]
    path.write_text(NOTEBOOK.replace("# ## Quiz\n", ""))
    with pytest.raises(CourseError, match="the sections are not"):
        twins.read(path)


def test_files_of_the_guides_exist():
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", TEXT)
    assert len(links) > 6 and [link for link in links if not (ROOT / link).exists()] == []
    assert [name for name in re.findall(r"tests/\w+\.py", TEXT) if not (ROOT / name).exists()] == []
    targets = set(re.findall(r"^\.PHONY: (\w+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", TEXT, re.MULTILINE)) <= targets


def test_the_changelog_begins_with_what_comes_and_knows_this_version():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" and nanokv.__version__ in headings
