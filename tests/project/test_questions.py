"""docs/questions.md: each question has an answer of a few sentences, a command that runs, a notebook and a source."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]


def commands(text: str) -> list[str]:
    """The command of each block, on one line."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [" ".join(block.replace("\\\n", " ").split()) for block in blocks]


COMMANDS = list(dict.fromkeys(commands(PAGE)))
SLOW = ("bench", "trace")  # `make check` runs these


def is_slow(command: str) -> bool:
    return command.split()[1] in SLOW


def test_every_question_is_answered_in_full():
    names = {line[2:] for line in re.findall(r"^\[.+?\]: ", PAGE, re.MULTILINE)}
    assert len(SECTIONS) >= 43 and names
    for section in SECTIONS:
        question, answer, *_ = section.split("\n\n")
        assert question.endswith("?") and 2 <= len(re.findall(r"[.?!:]( |$)|\.\n", answer)) <= 4, (
            question
        )
        assert len(commands(section)) == 1, question
        assert len(re.findall(r"\]\(\.\./notebooks/", section)) == 1, question
        label = re.search(r"(?:Asked\s+in|Paper:)\s+\[([^\]]+)\]", section)
        assert label and f"\n[{label[1]}]: https://" in PAGE, question


def test_its_links_lead_to_files():
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] if is_slow(c) else []) for c in COMMANDS],
)
def test_its_commands_run(cli, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(command)
    code, out, err = cli(*words)
    assert (program, code) == ("nanokv", 0), err
    assert (out.strip() and max(map(len, out.splitlines())) <= 80) or "--json" in words
