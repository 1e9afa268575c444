"""Every claim of five articles and two papers: the registry is complete, its numbers are what nanokv computes."""

import re
from collections import Counter
from pathlib import Path

import pytest

from nanokv import costs
from nanokv.errors import CourseError
from nanokv.school import course
from nanokv.school.course import checking
from nanokv.school.course.answers import same
from nanokv.school.course.claims import ARTICLES, CLAIMS, SOURCES, VERDICTS, Claim, page, table
from nanokv.school.course.claims.article1 import TABLE, kib_a_token, profiled_rate
from nanokv.school.course.claims.shapes import QWEN

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
COUNTS = {0: 19, 1: 24, 2: 15, 3: 20, 4: 14, 5: 3, 6: 2}
TRUE = {  # worked out by hand, apart from the code that computes them
    "0.4": 128,
    "0.5": 114_688,
    "0.8": 64,
    "0.14": 1_244_659_712,
    "0.15": 469_762_048,
    "0.16": 961_837_793_280,
    "0.18": 14,
    "1.1": 1,
    "1.6": 10_395,
    "1.7": 25.0,
    "1.8": 30_064_771_072,
    "1.9": 85_899_345_920,
    "1.10": 687_194_767_360,
    "1.15": 12,
    "1.17": 1.88235,
    "1.18": 4,
    "1.19": 98.2422,
    "1.20": 36,
    "2.1": 1.6129,
    "2.8": 23_040,
    "3.4": 36,
    "3.6": 21,
    "3.12": 1_610_612_736,
    "3.13": 3.9406,
    "3.14": 8.0,
    "3.20": 2,
    "4.9": 60,
    "4.13": 40,
    "5.1": 0.009501 * 256,  # the error of 16 levels, times 4^4
}
# Digits that stand in the text.
PRINTED = {"0.4", "0.5", "0.15", "1.1", "1.9", "1.10", "1.18", "1.19", "1.20", "4.9"}


def test_every_claim_has_one_record():
    wanted = [f"{a}.{i}" for a, count in COUNTS.items() for i in range(1, count + 1)]
    assert list(CLAIMS) == wanted and COUNTS.keys() == SOURCES.keys()


def test_the_readme_says_what_the_table_says():
    """The counts of claims by verdict, and the rows of its table: what is printed, what is true."""
    readme = (NOTEBOOKS.parent / "README.md").read_text(encoding="utf-8")
    said = [claim for claim in CLAIMS.values() if int(claim.id.split(".")[0]) in ARTICLES]
    verdicts = Counter(claim.verdict for claim in said)
    sentence = (
        f"began with five articles. Of their {len(said)} claims {verdicts['wrong']} are false "
        f"and {verdicts['misleading']} misleading"
    )
    assert len(ARTICLES) == 5
    assert sentence in " ".join(readme.split())
    table = readme.split("| an article says | nanokv computes |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert len(rows) == 3
    for (says, truth), id in zip(rows, ("1.9", "0.5", "0.15"), strict=True):
        assert CLAIMS[id].verdict == "wrong"
        assert number_in(says.rpartition(" bytes of")[0] or says) == CLAIMS[id].printed
        assert number_in(truth) == pytest.approx(TRUE[id], rel=2e-3)


def number_in(text: str) -> float:
    """The last number of a cell, with its unit: 8.6 GB, 225 MB, 57,344."""
    units = {"": 1, "MB": 1e6, "GB": 1e9}
    *_, (digits, unit) = re.findall(r"\b(\d[\d,.]*\d)(?: (MB|GB)\b)?", text)
    return float(digits.replace(",", "")) * units[unit]


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda c: c.id)
def test_a_record_is_complete(claim):
    assert claim.verdict in VERDICTS and len(claim.says) > 20 and len(claim.truth) > 10
    assert claim.where in checking.numbers()[1:]
    assert claim.printed is None or claim.value is not None


@pytest.mark.parametrize("id", [c.id for c in CLAIMS.values() if c.value])
def test_the_corrected_number(id):
    """nanokv computes what was worked out by hand; a right claim printed it, a wrong one did not."""
    claim = CLAIMS[id]
    exact = isinstance(TRUE[id], int)  # counts are, and so are ratios that come out even
    assert claim.value() == (TRUE[id] if exact else pytest.approx(TRUE[id], rel=2e-4))
    if claim.printed is not None:
        assert same(claim.printed, claim.value(), rel=1e-3) == (claim.verdict == "right")


def test_no_number_is_left_unproven():
    assert set(TRUE) == {c.id for c in CLAIMS.values() if c.value}


def test_all_rows_of_the_printed_table_are_wrong():
    """Claim 1.20: what its own code prints for its own four shapes."""
    assert [kib_a_token(*row) for row in TABLE] == [36, 9, 64, 3]
    assert all(kib_a_token(*row) != printed for row, printed in TABLE.items())


def test_the_profiler_of_claim_1_7_approaches_the_truth_without_a_prompt():
    assert profiled_rate(0.020, 0.020) == pytest.approx(50)


def test_a_notebook_executes_its_claims():
    """A claim filed under a notebook that exists is called there, once: shown, or confirmed in silence."""
    for path in sorted((NOTEBOOKS / "source").glob("*.py")):
        called = re.findall(r'course\.(?:claim|confirm)\(\s*"([\d.]+)"', path.read_text())
        assert sorted(called) == sorted(
            c.id for c in CLAIMS.values() if c.where == path.stem[:2]
        ), path.name


@pytest.mark.parametrize(
    "path", sorted((NOTEBOOKS / "source").glob("*.py")), ids=lambda p: p.stem[:2]
)
def test_a_page_shows_three_claims_at_most_none_of_them_right_and_links_to_the_others(path):
    text = path.read_text()
    shown = re.findall(r'course\.claim\(\s*"([\d.]+)", "(\w+)"', text)
    assert len(shown) <= 3 and "right" not in dict(shown).values()
    assert "course.confirm(" not in text or "(claims.md)" in text


def test_a_claim_that_is_confirmed_in_silence_is_confirmed_all_the_same(capsys):
    with pytest.raises(CourseError, match="filed as right"):
        course.confirm("0.1", "wrong")
    assert course.confirm("0.1", "right") is None and capsys.readouterr().out == ""
    course.claim("2.11", "wrong")
    assert capsys.readouterr().out.startswith("claim 2.11: ")


def test_the_page_of_claims_is_what_the_registry_gives():
    """`nanokv course build` writes it."""
    assert (NOTEBOOKS / "claims.md").read_text("utf-8") == page()
    rows = [line.count("|") for line in page().splitlines() if line.startswith("|")]
    assert len(rows) == len(CLAIMS) + 2 * len(SOURCES) and set(rows) == {6}, (
        "a | in a claim would tear its row"
    )


def test_an_article_is_linked_where_its_claims_are():
    """Above its table and in the list; one without a lasting address says so."""
    parts = re.split(r"^## ", page(), flags=re.MULTILINE)[1:]
    for article, part in zip(SOURCES.values(), parts, strict=True):
        above = part.split("| No. |")[0]
        assert part.startswith(article.title) and article.where in above
        assert (f"<{article.address}>" in above) == bool(article.address)
        assert not article.address or f"\n  {article.address}\n" in table()
        assert "address" in above or article.address.startswith("https://")
    assert sum(bool(article.address) for article in ARTICLES.values()) >= 3


def test_confirm_refuses_another_verdict_and_another_number():
    claim = Claim("9.9", "wrong", "it is 64", "it is 128", "05", lambda: 128, 64)
    claim.confirm("wrong", 128)
    claim.confirm("wrong", "in words")
    with pytest.raises(CourseError, match="filed as wrong"):
        claim.confirm("right", 128)
    with pytest.raises(CourseError, match="found 64"):
        claim.confirm("wrong", 64)


def test_1_6_is_the_first_length_at_which_the_cache_is_not_the_smaller_one():
    weights, tokens = costs.weight_bytes(QWEN, 2), CLAIMS["1.6"].value()
    assert costs.kv_bytes(QWEN, tokens - 1, 1, 2) < weights <= costs.kv_bytes(QWEN, tokens, 1, 2)
    assert f"from {tokens:,} tokens on" in CLAIMS["1.6"].truth


def test_the_table_says_printed_only_of_what_an_article_prints():
    """The rest follows from what the article says, and the table says so."""
    numbers = {id for id, claim in CLAIMS.items() if claim.printed is not None}
    assert {id for id in numbers if not CLAIMS[id].implied} == PRINTED
    assert not any(claim.implied and claim.printed is None for claim in CLAIMS.values())
    text, pages = table(), page()
    assert (
        "printed 64, computed 128 values per head" in text
        and "implied 69,120, computed 23,040 B per token" in text
    )
    lines = [
        len(re.findall(rf"^ +{word} [\d.,]+, computed", text, re.MULTILINE))
        for word in ("printed", "implied")
    ]
    assert lines == [len(PRINTED), len(numbers - PRINTED)]
    assert "printed 57,344" in pages and "implied 30,064,771,072" in pages


def test_the_table_names_every_claim():
    text = table()
    assert all(re.search(rf"^  {re.escape(id)} ", text, re.MULTILINE) for id in CLAIMS)
    assert text.splitlines()[-1].startswith(f"{len(CLAIMS)} claims: ")
