"""Renewing figures: the form of a number stays, tolerances are respected, and what takes a reader is named."""

from dataclasses import replace

import pytest

import figures
from nanokv.school.course import prose, twins

TEXT = """# %% [markdown]
# It is <!--fig 03.a-->61<!--/fig--> of <!--fig 03.b-->60<!--/fig-->, and
# about <!--fig 03.noise x4-->1e-5<!--/fig-->. It is more than <!--fig 03.ratio above-->4<!--/fig--> times as fast.
#
# Elsewhere: <!--fig 05.c-->7<!--/fig-->. It writes "a wrong name".
"""
MEASURED = {"03.a": 48.2, "03.b": 60.0, "03.noise": 2e-5, "03.ratio": 5.0}


@pytest.mark.parametrize(
    ("quoted", "measured", "allowed", "new"),
    [
        ("98", 97.6, "", "98"),
        ("1,789", 912.0, "", "912"),
        ("912", 12_345.0, "", "12,345"),
        ("-2.9", -4.14, "x1.3", "-4.1"),
        ("−3.1", -2.26, "", "−2.3"),
        ("2e-4", 9.1e-4, "x2", "9e-4"),
        ("13,000", 94_823.0, "x5", "95,000"),
        ("0.3", 0.0123, "", "0.01"),
        ("6.5", 10.23, "x1.5", "10"),
        ("7", -0.0, "", "0"),
        ("many", 3.0, "", ""),
    ],
)
def test_a_number_keeps_the_form_in_which_it_was_quoted(quoted, measured, allowed, new):
    assert figures.written(measured, quoted, allowed) == new
    assert not new or prose.agrees(new, measured, allowed)


def test_only_what_differs_is_written():
    new, places = figures.renewed(TEXT, MEASURED, "03.py")
    assert new == TEXT.replace("-->61<", "-->48<")
    (place,) = places
    assert (place.where, place.id, place.old, place.new) == ("03.py:2", "03.a", "61", "48")
    assert place.doubts == ("the order changed with 03.b (60)",)
    assert place.sentence == "It is 48 of 60, and about 1e-5."


def test_a_bound_and_what_was_not_measured_take_a_reader():
    less = {id: number for id, number in MEASURED.items() if id != "03.b"} | {"03.ratio": 3.2}
    new, places = figures.renewed(TEXT, less | {"03.a": 61.0}, "03.py")
    assert new == TEXT
    assert [(p.id, p.new, p.measured) for p in places] == [
        ("03.b", "", None),
        ("03.ratio", "", 3.2),
    ]


@pytest.mark.parametrize(
    ("old", "new", "measured", "sentence", "doubt"),
    [
        ("0", "2", 2.0, "", "zero or its sign changed"),
        ("1", "2", 2.0, "", "one or several"),
        ("100", "97", 97.0, "", "a hundred"),
        ("8", "20", 20.0, "", "a factor of 2.5"),
        ("8", "9", 8.501, "", "close to the next digit (8.501): rounding may decide it"),
        ("8", "10", 9.6, "At least 10.", "rounded past the bound that the words give (9.6)"),
        ("8", "10", 10.4, "Up to 10.", "rounded past the bound that the words give (10.4)"),
        ("8", "9", 9.0, "Only 8 of them are hardly right.", "says hardly, only"),
    ],
)
def test_words_beside_a_figure_may_no_longer_be_true(old, new, measured, sentence, doubt):
    assert doubt in figures.doubts(old, new, measured, sentence)
    assert figures.doubts("8", "9", 9.0, "It takes 8 tokens.") == []


def test_words_that_the_model_no_longer_writes_are_found():
    assert list(figures.lost_words(TEXT, "It says: a  wrong\nname", "right")) == ["a wrong name"]
    assert list(figures.lost_words(TEXT, "a wrong name", "a wrong name")) == []
    assert list(figures.lost_words(TEXT, "right", "right")) == []


def test_a_run_is_kept_until_code_or_weights_change(monkeypatch, tmp_path):
    runs = []
    now = figures.Kept("w1", {"03.a": 1.0}, [], "", 2.0)

    def execute(source):
        runs.append(source.number)
        return replace(now, weights=figures.weights())

    monkeypatch.setattr(figures, "KEPT", tmp_path)
    monkeypatch.setattr(figures, "executed", execute)
    monkeypatch.setattr(figures, "weights", lambda: "w1")
    source = twins.read(*twins.chosen(figures.NOTEBOOKS, ["03"]))
    assert figures.kept(source, again=False) == figures.kept(source, again=False) == now
    assert runs == ["03"] and figures.before("03") is None
    assert figures.kept(source, again=True) == now and len(runs) == 2
    monkeypatch.setattr(figures, "weights", lambda: "w2")
    assert figures.kept(source, again=False).weights == "w2" and len(runs) == 3
    assert figures.before("03") == now
    monkeypatch.setattr(figures, "code", lambda number: "changed")
    figures.kept(source, again=False)
    assert len(runs) == 4


def test_a_dry_run_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    path = tmp_path / "03.py"
    path.write_text(TEXT, encoding="utf-8")
    for dry in (True, False):
        places, wide = figures.renew([path], MEASURED, dry)
        assert len(places) == 1 and wide == []
        assert (path.read_text("utf-8") == TEXT) == dry


def test_the_text_of_this_course_is_read_completely():
    """Each mark is in a paragraph: with figures that none agrees with, all are named."""
    for path in twins.sources(figures.NOTEBOOKS):
        text = path.read_text("utf-8")
        marks = [id for id, _, _ in prose.figures(text) if id[:2] == path.stem[:2]]
        _, places = figures.renewed(text, {f"{path.stem[:2]}.none": 0.0}, path.name)
        assert [place.id for place in places] == marks
