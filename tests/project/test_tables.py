"""Tables of docs/ are written as their commands measure, and nothing beside them changes."""

import re

import pytest

import tables


@pytest.mark.parametrize(
    ("page", "begin"),
    [("real-models.md", "nanokv bench --quality -m tiny"), ("reuse.md", "nanokv blend --talks 10")],
)
def test_the_output_of_a_command_replaces_the_old_one(page, begin):
    asked = []

    def run(command):
        asked.append(command)
        return "a table\n"

    old = (tables.DOCS / page).read_text("utf-8")
    new = tables.with_output(old, begin, run)
    (command,) = asked
    assert " ".join(["nanokv", *command[3:]]).startswith(begin) and "\\" not in command
    before, after = new.split("a table\n```")
    assert old.startswith(before) and old.endswith(after) and len(new) < len(old) - 100
    assert f"$ {begin}" in before


def test_a_command_that_no_page_shows_is_named():
    with pytest.raises(SystemExit, match="nanokv nonsense"):
        tables.with_output("text", "nanokv nonsense")


def test_the_columns_of_the_bundled_model_are_written_and_no_others():
    old = (tables.DOCS / "eviction.md").read_text("utf-8")
    cache = "evicting:policy=h2o:budget=32"
    row = {"share": 0.104, "perplexity": 9.876, "recall_share": 0.2, "first": 3, "second": 2}
    new = tables.with_columns(old, {cache: row})
    (change,) = tables.changed(old, new)
    was, now = (line.split(" | ") for line in change[2:].split("\n+ "))
    assert now[:6] == ["| `h2o:budget=32`", "10%", "9.88", "20%", "3", "2"] and was[6:] == now[6:]


def test_facts_are_counted_in_as_many_talks_as_the_page_says(monkeypatch):
    text = (tables.DOCS / "eviction.md").read_text("utf-8")
    asked = []

    def run(command):
        asked.extend(command)
        return '{"rows": []}'

    monkeypatch.setattr(tables, "printed", run)
    monkeypatch.setattr(tables, "with_columns", lambda page, rows: page)
    tables.eviction()
    talks = asked[asked.index("--recall") + 1]
    assert f"1st of {talks} | 2nd of {talks} |" in text


def test_every_row_of_the_table_is_a_cache_of_its_command():
    text = (tables.DOCS / "eviction.md").read_text("utf-8")
    rows = tables.ROW.findall(text)
    command = re.search(r"^P=(\S+)\nC=.*?^nanokv bench", text, re.DOTALL | re.MULTILINE)
    said = command[0].replace("$P", command[1])
    loop = [said.replace("$n", n) for n in ("32", "64", "128")]
    assert len(rows) == 20
    assert all(any(tables.cache_of(row) in one for one in loop) for row in rows)
