"""The form of the source: one thing per line, and English that a native reader does not stop at."""

import pytest

from reading import ROOT, Reading, read

LIMITS = {  # units: tests/tools/reading.py
    "conditional expressions": 12,
    "several names": 7,
    "wide": 0.5,
    "marks": 20,
    "phrases": 10,
}
# The log of old versions, and the glossary.
NOT_HELD = ("CHANGELOG.md", "glossary.md")


@pytest.fixture(scope="module")
def found() -> Reading:
    return read([ROOT / "nanokv", ROOT / "weights_loader"])


def test_the_source_is_easy_to_read(found):
    rates = found.rates()
    too_high = {name: rate for name, rate in rates.items() if rate > LIMITS[name]}
    assert too_high == {}, "python tests/tools/reading.py -v shows each place"


def test_the_docs_are_easy_to_read():
    folders = ("", "docs", "notebooks")
    pages = [page for folder in folders for page in sorted((ROOT / folder).glob("*.md"))]
    held = [page for page in pages if page.name not in NOT_HELD]
    found = read(held)
    assert found.words > 20_000
    assert found.rates()["phrases"] <= LIMITS["phrases"], "\n".join(found.phrases)


ONE_OF_EACH = '''"""What was written here is what goes to the file."""
a = 1 if b else 2
c, d = 3, 4
e = 5  # fmt: skip
f = "{wide}"
'''


def test_each_kind_is_counted():
    """A ruler that counts nothing would pass every file."""
    found = Reading()
    found.add("one.py", ONE_OF_EACH.format(wide="x" * 100))
    places = (found.conditionals, found.several, found.wide, found.marks, found.phrases)
    assert [len(place) for place in places] == [1, 1, 1, 1, 1]
    assert found.rates() == {
        "conditional expressions": 200,
        "several names": 200,
        "wide": 20,
        "marks": 1,
        "phrases": 10_000 / found.words,
    }


def test_markdown_is_read_without_its_code():
    found = Reading()
    found.add(
        "one.md", "# A\n\nThe kernel\nis told so.\n\n```\nis told\n```\n- is told\n| is told |\n"
    )
    assert found.words == 14
    assert [place.split(":")[1] for place in found.phrases] == ["2", "9", "10"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("What a pool does that is too small: this one refuses.", 1),
        ("Whoever comes late waits.", 1),
        ("Each row has a cache of its own.", 1),
        ("The kernel is told so.", 1),
        ("Those that fit stay.", 0),
        ("It keeps those that fit.", 1),
        ("Called when the pool is full. PagePool raises CapacityError.", 0),
        ("Decode reads every cached key once.", 0),
    ],
)
def test_phrases(text, count):
    found = Reading()
    found.add("one.py", f'"""{text}"""\n')
    assert len(found.phrases) == count, found.phrases
