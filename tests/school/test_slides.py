"""Decks of slides: one sentence and one picture each, a prediction and what was measured, no answers, nothing cut.

Fast tests make decks of outputs that nobody ran. The slow ones look at the decks of the solved notebooks in a browser.
"""

import base64
import hashlib
import html
import json
import re
from pathlib import Path

import pytest

from nanokv.errors import CourseError
from nanokv.school.course import checking, claims, outline, slides, twins
from solved_notebooks import solved

pytestmark = pytest.mark.sampled

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = {path.stem[:2]: path for path in sorted((NOTEBOOKS / "source").glob("*.py"))}
INLINE = re.compile(r"</?(?:code|em|strong|a|span)\b[^>]*>")


def png(width: int, height: int) -> str:
    """The head of a PNG: its size is all that a deck reads."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + size).decode()


def pretend(source, shape=(900, 300)) -> dict:
    """An executed solution: each cell prints a line, reveals 48 of what it measures and shows its plots."""
    notebook = source.solution()
    for i, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            lines = [f"output {i}.", "In words: twice", "    and thrice"]
            for id in outline.REVEAL.findall(code):
                lines += [f"{id}: you predicted 2 rows, it is 48 rows: 24 times too", "    low."]
            cell["outputs"] = [{"output_type": "stream", "text": "\n".join(lines) + "\n"}]
            if "course.show" in code:
                alt = {"image/png": {"alt": f'plot <{i}> "x". It ends.'}}
                cell["outputs"].append({"data": {"image/png": png(*shape)}, "metadata": alt})
    return notebook


def lesson(tmp_path, *cells, number="05"):
    """A source with these cells between its sections, as a notebook that is written later will have."""
    marks = "".join(f"# ## {name}\n#\n" for name in twins.SECTIONS)
    text = f"# %% [markdown]\n# # {number} · Title\n#\n# A hook.\n#\n{marks}\n"
    text += f'# %%\ncourse.start("{number}")\n\n' + "\n\n".join(cells) + "\n"
    path = tmp_path / f"{number}_name.py"
    path.write_text(text, "utf-8")
    return twins.read(path)


def words(slide) -> int:
    """All that a reader sees on it."""
    shown = INLINE.sub("", f"{slide.title} {' '.join(slide.body)}")
    return len(re.sub(r"<[^>]*>", " ", shown).split())


def check_form(source, deck):
    """What holds for every deck, made of real outputs or not."""
    kinds = [slide.kind for slide in deck]
    assert kinds[0] == "title" and deck[0].title == source.title and len(deck) <= slides.PAGES
    asked = re.findall(r'course\.predict\(\s*"([\w.]+)"', source.code())
    assert sorted(slide.id for slide in deck if slide.kind == "ask") == sorted(asked) and asked
    for slide, following in zip(deck, [*deck[1:], None], strict=True):
        assert words(slide) <= slides.WORDS, (slide.title, words(slide))
        assert "".join(slide.body).count("<img") <= 1, "one picture a slide"
        if slide.kind == "ask":
            assert (following.kind, following.id) == ("reveal", slide.id)
            question = re.sub(r"<[^>]*>", "", slide.body[-1]).strip()
            assert question.rstrip(")").endswith("?") and "<figure" not in "".join(slide.body)


@pytest.mark.parametrize("number", sorted(SOURCES))
def test_a_deck_has_its_predictions_pictures_and_tasks_and_no_answers(number):
    source = twins.read(SOURCES[number])
    deck = slides.deck(source, pretend(source))
    check_form(source, deck)
    page, module = slides.page(source.title, deck), checking.exercises(number)
    assert {slide.id for slide in deck if slide.kind == "task"} == {c.id for c in module.CHECKS}
    assert {slide.id for slide in deck if slide.kind == "quiz"} == {q.id for q in module.QUESTIONS}
    assert page.count("<img") == page.count("<figure") == source.code().count("course.show(")
    assert "In words" not in page and "thrice" not in page and "<!--fig" not in page
    assert 'src="http' not in page and page.count("<script") == 1
    assert not re.search(r'href="(?!https://)', page)
    for question in module.QUESTIONS:
        comments = [comment for _, comment in question.options.values()]
        assert not [comment for comment in comments if html.escape(comment) in page]
    printed = set(re.findall(r"output \d+\.", page))
    for i, cell in enumerate(cell for cell in source.cells if cell.role != "exercise"):
        if cell.role == "solution" or re.search(r"course\.(check|answer|predict)\(", cell.text):
            assert f"output {i}." not in printed, cell.text
        if cell.role == "solution" and cell.kind == "code":
            lines = [line.strip() for line in cell.text.splitlines() if len(line.strip()) > 25]
            assert not [line for line in lines if html.escape(line) in page]


def test_the_pages_own_script_is_the_only_one_that_may_run():
    page = slides.page("<T>", [slides.Slide("<T>", ["<p>x</p>"], ["<p>y</p>"])])
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-"
    assert f"{policy}{digest}'" in page
    assert "&lt;T&gt;" in page and "<aside><p>y</p></aside>" in page and "{css}" not in page


ASKED = """# %% [markdown]
# ## Ask
#
# A box has `3` rows. How many columns has it? Write down a number.
#
# Another one is open. How wide is it?

# %%
course.predict("05.a", 1, unit="columns")
course.predict("05.b", 1)"""
SEEN = """# %% [markdown]
# ## See
#
# Now we look.

# %%
course.reveal("05.b", 2)
course.reveal("05.a", 48)

# %% [markdown]
# It has more. There are <!--fig 05.x-->7<!--/fig--> in all. It has <!--fig 05.y-->48<!--/fig--> columns.

# %% tags=["hide-input"]
course.show(fig, alt="one two")

# %% [markdown]
# Bars rise. After 5 rows <!--fig 05.z-->12<!--/fig--> are left.

# %% tags=["hide-input"]
course.show(fig, alt="three four")"""


def test_a_question_is_asked_where_it_is_answered_and_its_figure_and_plot_come_next(tmp_path):
    source = lesson(tmp_path, ASKED, SEEN)
    deck = slides.deck(source, pretend(source))
    titles = [slide.title for slide in deck if not slide.kind == "quiz"]
    assert titles == [source.title, "Predict 05.b", "Measured 05.b"] + [
        "Predict 05.a",
        "Measured 05.a",
        "See",
    ]
    ask, seen = deck[3], deck[4]
    assert "A box has" in ask.body[0] and "How many columns has it?" in ask.body[1]
    assert "Another one" not in "".join(ask.body) and "Write down" not in "".join(ask.body)
    assert ">48 rows<" in seen.body[0] and "<!--" not in seen.body[1]
    assert "48 columns" in seen.body[1], "the sentence with the figure that was measured"
    assert 'class="wide"' in seen.body[2] and "<img" in seen.body[2]
    assert "After 5 rows" in deck[5].body[0], "the sentence with a figure"


def test_the_first_sentence_stands_beside_a_picture_if_none_has_a_figure(tmp_path):
    text = "After 5 rows <!--fig 05.z-->12<!--/fig--> are left."
    assert text in SEEN
    source = lesson(tmp_path, ASKED, SEEN.replace(text, "There are two."))
    assert "Bars rise." in slides.deck(source, pretend(source))[5].body[0]
    source = lesson(
        tmp_path, ASKED, SEEN.replace(f"Bars rise. {text}", "Both rise. Nothing falls.")
    )
    assert "Both rise." in slides.deck(source, pretend(source))[5].body[0]


def test_a_question_keeps_as_much_of_what_leads_to_it_as_a_slide_holds():
    leading = [f"Sentence {i} leads to it slowly." for i in range(20)]
    slide = slides.of_ask("05.a", " ".join([*leading, "How many are there?"]))
    assert slides.WORDS - 6 <= words(slide) <= slides.WORDS
    assert "Sentence 19" in slide.body[0] and "Sentence 0 " not in slide.body[0]
    assert "Sentence 0 " in slide.notes[1] and "How many are there?" in slide.body[1]


@pytest.mark.parametrize("count", ["Two questions. First: ", "Second: ", "Second prediction. "])
def test_a_question_alone_on_its_slide_is_not_counted(count):
    slide = slides.of_ask("05.a", f"{count}a box is open. How wide is it?")
    assert slide.body[0] == '<div class="setting"><p>A box is open.</p>\n</div>'


def test_the_sizes_of_the_model_are_shown_where_the_question_needs_them():
    sizes = outline.Piece("sizes", "tiny: 6 layers.")
    body = slides.of_ask("05.a", "The line at the top has the sizes. How many?", sizes).body
    assert "6 layers" in body[0] and "How many?" in body[-1]
    assert "6 layers" not in "".join(slides.of_ask("05.a", "How many?", sizes).body)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ([ASKED.replace("How wide is it?", "It is wide."), SEEN], "no question"),
        ([ASKED], "no reveal of the prediction 05.a, 05.b"),
    ],
)
def test_a_prediction_without_question_or_reveal_is_named(tmp_path, cells, why):
    source = lesson(tmp_path, *cells)
    with pytest.raises(CourseError, match=why):
        slides.deck(source, pretend(source))


def test_a_long_deck_leaves_out_what_is_spared_first_and_keeps_its_predictions(tmp_path):
    plot = """# %% [markdown]
# ## Part {0}

# %% tags=["hide-input"]
course.show(fig, alt="one two")"""
    source = lesson(tmp_path, *(plot.format(i) for i in range(40)), ASKED, SEEN)
    deck = slides.deck(source, pretend(source))
    check_form(source, deck)
    assert len(deck) == slides.PAGES and "Part 39" in deck[0].notes[-1]
    assert "Part 0" in [slide.title for slide in deck] and "Part 0," not in deck[0].notes[-1]


def test_a_picture_stands_beside_its_sentence_if_it_is_upright(tmp_path):
    source = lesson(tmp_path, ASKED, SEEN)
    for shape, kind in (((900, 300), "wide"), ((400, 500), "upright")):
        page = slides.page("T", slides.deck(source, pretend(source, shape)))
        assert set(re.findall('<figure class="(.+?)"', page)) == {kind}


def test_what_is_said_to_one_learner_is_not_shown_and_long_output_goes_to_the_notes(tmp_path):
    source = lesson(tmp_path, SEEN.replace("See", "Show"), ASKED.replace("Ask", "Then"))
    assert not outline.UNSHOWN.sub("", "rotation: the reference (none)\n    is kept\n")
    short, long = "x\n" * slides.LINES, "y\n" * (slides.LINES + 1)
    assert slides._short(outline.Piece("printed", short))
    assert not slides._short(outline.Piece("printed", long))
    notes = "".join(note for slide in slides.deck(source, pretend(source)) for note in slide.notes)
    assert "output" in notes and "you predicted" not in notes


@pytest.mark.parametrize(
    ("text", "shown", "hidden"),
    [
        ("Count them. How many are there?", "Count them.", "whole exercise"),
        ("Look. " + "It is so. " * 24 + "Give a pair.", "Look.", "whole exercise"),
        ("Look. " + "It is so. " * 25 + "Give a pair.", "pair", "Look."),
        ("Look. " * 7 + "Give " + "many " * 70 + "numbers.", "numbers", "Look."),
        (
            "Why? " + "Because it is so. " * 30 + "Write a test. Answer with a pair.",
            "Write a",
            "Why",
        ),
        ("Do this:\n\n- one\n- two", "Do this:", "two"),
    ],
)
def test_a_long_exercise_shows_what_it_asks(text, shown, hidden):
    slide = slides.of_task("05.1", text)
    assert shown in slide.body[0] and hidden not in "".join(slide.body) and "05.1" in slide.title
    assert words(slide) <= slides.WORDS and len(slide.notes) == 1


def test_a_claim_has_its_verdict_and_leads_to_its_article():
    for id, claim in claims.CLAIMS.items():
        article, slide = claims.SOURCES[int(id.split(".")[0])], slides.of_claim(id)
        assert claim.verdict in slide.body[1] and words(slide) <= slides.WORDS
        assert (f'href="{article.address}"' in slide.body[2]) == bool(article.address)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two? Three", 3),
        ("Use `a. B` here. Done.", 2),
        ("**Bold. Still.** Then.", 2),
        ("See [a. B](c.d). E.", 2),
        ("3.5 ms, e.g. nothing.", 1),
        ("One. (Two.) Three.", 2),
    ],
)
def test_a_paragraph_is_cut_between_sentences_only(text, parts):
    assert len(outline.sentences(text)) == parts and " ".join(outline.sentences(text)) == text


def test_authors_can_show_code_and_leave_cells_out(tmp_path):
    text = SOURCES["05"].read_text("utf-8")
    path = tmp_path / SOURCES["05"].name
    shown = text.replace("# %%\nclass RowCounter", '# %% tags=["slide"]\nclass RowCounter').replace(
        "# %% [markdown]\n# ## Experiment 2", '# %% [markdown] tags=["skip"]\n# ## Experiment 2'
    )
    path.write_text(shown, "utf-8")
    source = twins.read(path)
    assert source.student() == twins.read(SOURCES["05"]).student()
    deck = slides.deck(source, pretend(source))
    assert any("RowCounter" in "".join(slide.body) for slide in deck if slide.kind == "code")
    assert not any(slide.title.startswith("Experiment 2") for slide in deck)
    path.write_text(shown.replace('["skip"]', '["skipp"]'), "utf-8")
    with pytest.raises(CourseError, match="skipp"):
        twins.read(path)


# --- with a run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(driver, tmp_path):
    """Opens the deck of a solved notebook → its slides."""

    def open_deck(number):
        source = twins.read(SOURCES[number])
        deck = slides.deck(source, solved(SOURCES[number]).notebook)
        path = tmp_path / f"{number}.html"
        path.write_text(slides.page(source.title, deck), "utf-8")
        driver.get(path.as_uri())
        return source, deck

    return open_deck


# What is cut, shrunk or too small: everything that stands on a slide lies inside it, at full size.
FAULTS = """
const faults = [], say = (slide, what) => faults.push(slide.getAttribute('aria-label') + ': ' + what);
const least = arguments[0], paper = arguments[1];
document.querySelectorAll('section').forEach((slide, i) => {
  if (!paper) show(i);
  const box = slide.getBoundingClientRect();
  if (slide.style.zoom && !paper) say(slide, 'set smaller');
  if (slide.scrollHeight > slide.clientHeight + 1) say(slide, 'too high');
  if (slide.scrollWidth > slide.clientWidth + 1) say(slide, 'too wide');
  for (const part of slide.querySelectorAll('h1, h2, .shown *')) {
    const own = part.getBoundingClientRect();
    if (own.right > box.right + 1 || own.bottom > box.bottom + 1) say(slide, part.tagName + ' is cut');
    const letters = parseFloat(getComputedStyle(part).fontSize);
    if (part.innerText && letters < least * box.height) say(slide, part.tagName + ' is small: ' + letters);
  }
  const picture = slide.querySelector('img');
  if (picture && (!picture.complete || !picture.naturalWidth)) say(slide, 'a broken picture');
  if (picture) {
    const own = picture.getBoundingClientRect();
    const scale = Math.min(own.width / picture.naturalWidth, own.height / picture.naturalHeight);
    const [width, height] = [scale * picture.naturalWidth, scale * picture.naturalHeight];
    const filled = Math.max(width / box.width, height / box.height);
    if (filled < 0.55) say(slide, 'the picture fills only ' + filled.toFixed(2));
  }
});
return faults;
"""
SMALLEST = (
    0.02  # letters beside the height of the slide: what a line of print is from three arms' lengths
)


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(SOURCES))
def test_nothing_of_a_deck_is_cut_or_small(driver, opened, number):
    from browser import look

    source, deck = opened(number)
    check_form(source, deck)
    for size in ((1280, 720), (1024, 768), (1920, 1080)):
        look(driver, size[0], height=size[1])
        assert driver.execute_script(FAULTS, SMALLEST, False) == [], size
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert driver.execute_script(FAULTS, SMALLEST, True) == [], "on paper"
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.slow
def test_a_slide_that_holds_too_much_is_seen(driver, tmp_path):
    """The measure of the test above: each fault is found where it was made."""
    from browser import look

    look(driver, 1280, height=720)
    bad = {
        "too high|set smaller": ["<p>word</p>" * 60],
        "too wide|cut": [f"<p style='white-space:nowrap'>{'word ' * 60}</p>"],
        "small": ["<p style='font-size:9px'>word</p>"],
        "broken": ['<figure class="wide"><img alt="x" src="data:image/png;base64,eA=="></figure>'],
    }
    for fault, body in bad.items():
        path = tmp_path / "bad.html"
        path.write_text(slides.page("T", [slides.Slide("T", body)]), "utf-8")
        driver.get(path.as_uri())
        assert re.search(fault, " ".join(driver.execute_script(FAULTS, SMALLEST, False))), fault


@pytest.mark.slow
def test_a_deck_is_used_with_the_keyboard(driver, opened):
    from selenium.webdriver.common.keys import Keys

    from browser import look

    look(driver, 1280, height=720)
    driver.get_log("performance")
    opened("05")
    body, shown = (
        driver.find_element("tag name", "body"),
        lambda: driver.find_elements("css selector", "section.now"),
    )
    last = len(driver.find_elements("tag name", "section"))
    for key, number in (
        (Keys.ARROW_RIGHT, 2),
        (Keys.SPACE, 3),
        (Keys.ARROW_LEFT, 2),
        (Keys.END, last),
        (Keys.HOME, 1),
        (Keys.PAGE_UP, 1),
    ):
        driver.switch_to.active_element.send_keys(key)
        assert len(shown()) == 1 and shown()[0].get_attribute("aria-label").startswith(
            f"{number} of {last}: "
        )
        assert driver.switch_to.active_element == shown()[0], "a screen reader is taken along"
    assert not [note for note in driver.find_elements("tag name", "aside") if note.is_displayed()]
    driver.execute_script("show(slides.findIndex((slide) => slide.querySelector('aside')))")
    body.send_keys("n")
    assert [note for note in driver.find_elements("tag name", "aside") if note.is_displayed()]
    body.send_keys("n")
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if url.startswith(("http", "ws"))] == []
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
