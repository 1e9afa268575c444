"""The page of `nanokv live` in a real Chromium, opened as a file: what a reader types, presses, predicts and sees."""

import re

import pytest

import nanokv
from browser import find, look, press, requests, tab_through, tab_to
from live_talks import hold_in
from nanokv.lab import live
from nanokv.lab.live.page import SENTENCE
from waiting import until

pytestmark = pytest.mark.slow

FIRST_MS = 300  # from Enter to the first token


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("live") / "live.html"
    path.write_text(live.build(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(driver, address):
    """The page, freshly opened, 1000 wide and light; afterwards the console must be empty."""
    look(driver, 1000)
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get(address)
    until(driver, lambda driver: driver.execute_script("return times.warm > 0"))
    yield driver
    assert driver.get_log("browser") == []


def words(driver) -> str:
    return find(driver, "#words").text


def answered(driver) -> str:
    """The answer, once it has ended and the lane without a cache has computed it too."""
    until(driver, lambda driver: driver.execute_script("return !chat.running && caughtUp()"))
    return words(driver)


def hurry(driver):
    """Full pace, chosen as a reader does."""
    tab_to(driver, "#pace")
    press(driver, "END")


@pytest.fixture(scope="module")
def expected():
    model, tokenizer = nanokv.load("tiny")

    def answer(*texts):
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        ids = tokenizer.encode(tokenizer.render(messages))
        return ids, list(nanokv.generate(model, ids, max_new_tokens=60)), tokenizer

    return answer


def test_one_press_of_enter_shows_an_answer(page, address, expected):
    """The sentence stands there and has the focus; nothing but the file itself is asked for."""
    assert page.switch_to.active_element.get_attribute("id") == "sentence"
    assert find(page, "#sentence").get_attribute("value") == SENTENCE
    press(page, "ENTER")
    ids, answer, tokenizer = expected(SENTENCE)
    until(page, lambda page: words(page) == tokenizer.text_of(answer))
    assert answered(page) == find(page, "#said").text.removeprefix("The model answers: ")
    assert page.execute_script("return chat.lane.ids") == ids + answer[:-1]
    assert requests(page) == [address]


def test_both_counters_say_what_was_computed(page, expected):
    hurry(page)
    tab_back(page)
    press(page, "ENTER")
    answered(page)
    ids, answer, _ = expected(SENTENCE)
    once, again = len(ids) + len(answer) - 1, sum(len(ids) + n for n in range(len(answer)))
    until(page, lambda page: find(page, "#rows-without").text == str(again))
    assert find(page, "#rows-with").text == str(once)
    assert find(page, "#same").text.endswith(
        f"The same token, {len(answer)} of {len(answer)} times."
    )
    assert find(page, "#held").text.startswith(f"{once} tokens, ")


def tab_back(driver):
    """To the sentence, by the keyboard."""
    find(driver, "#sentence").click()


@pytest.mark.serial
def test_the_first_token_comes_at_once_and_frames_go_on(page):
    press(page, "ENTER")
    assert 0 < page.execute_script("return times.first") < FIRST_MS
    until(page, lambda page: page.execute_script("return times.frames.length > 90"))
    gaps = page.execute_script("return times.frames.slice(1).map((t, i) => t - times.frames[i])")
    assert sorted(gaps)[len(gaps) // 2] < 20  # 60 a second; a busy machine drops a few


def test_a_column_is_painted_once(page):
    """Steps go back and forth over it, and it stays as it is."""
    page.execute_script(
        """
        window.puts = 0;
        const put = CanvasRenderingContext2D.prototype.putImageData;
        CanvasRenderingContext2D.prototype.putImageData = function (...of) {
          if (this.canvas === stage.keys.canvas) window.puts += 1;
          return put.apply(this, of);
        };
    """
    )
    press(page, "ENTER")
    answered(page)
    tab_to(page, "#stage")
    press(page, *["ARROW_LEFT"] * 3, "ARROW_RIGHT")
    page.execute_script("draw()")
    assert page.execute_script("return [window.puts, chat.lane.ids.length]") == [32, 32]


def test_the_table_holds_the_weights_of_the_step(page, expected):
    """Which layer and head the page begins with, and that its numbers are the model's."""
    from nanokv.lab import trace

    ids, _, tokenizer = expected(SENTENCE)
    press(page, "ENTER")
    answered(page)
    tab_to(page, "#twin")
    press(page, "ENTER")
    page.execute_script("chat.rest = null; chat.position = arguments[0]; draw()", len(ids) + 2)
    rows = page.execute_script(
        "return [...document.querySelectorAll('#numbers tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    model, _ = nanokv.load("tiny")
    layer, head = (int(find(page, f"#{name}").get_attribute("value")) for name in ("layer", "head"))
    weights = trace.record(model, ids, 9).steps[3].attention[layer][head, 0].tolist()
    assert [float(row[3]) for row in rows] == pytest.approx(weights, rel=1e-3, abs=1e-6)
    top = weights.index(max(weights))
    assert tokenizer.pieces(ids)[top] == " Z" and weights[top] > 0.9
    share = f"{100 * weights[top]:.0f} %"
    said = f"“␣is” takes {share} of its mix from “␣Z”, and the model writes “␣Z”."
    assert said in find(page, "#readout").text


def test_a_second_turn_reads_only_what_is_new(page, expected):
    """And a new chat begins with an empty cache."""
    hurry(page)
    for sentence in ("My name is Zorbla.", "What is my name?"):
        field = find(page, "#sentence")
        field.clear()
        field.send_keys(sentence)
        press(page, "ENTER")
        answered(page)
    assert words(page) == "Your name is Zorbla."
    assert page.execute_script("return chat.lane.rows === chat.lane.ids.length")
    find(page, "#clear").click()
    assert find(page, "#held").text == "empty" and "empty again" in words(page)
    find(page, "#sentence").click()
    press(page, "ENTER")
    assert answered(page) != "Your name is Zorbla."


def test_keys_pause_and_step(page):
    """Space on the picture, arrows token by token; the buttons do the same."""
    press(page, "ENTER")
    tab_to(page, "#stage")
    press(page, "SPACE")
    assert find(page, "#play").text == "Go on"
    before = page.execute_script("return chat.lane.ids.length")
    press(page, "ARROW_LEFT")
    assert page.execute_script("return chat.position") == before - 2
    press(page, "ARROW_RIGHT", "ARROW_RIGHT")
    assert page.execute_script("return [chat.position, chat.lane.ids.length]") == [
        before,
        before + 1,
    ]
    tab_to(page, "#play")
    press(page, "ENTER")
    assert answered(page) == "Your name is Zorbla."


def test_what_is_too_long_is_refused(page):
    page.execute_script("$('sentence').value = 'moon '.repeat(500)")
    press(page, "ENTER")
    assert re.fullmatch(
        r"That makes 1,\d+ tokens, and this page shows at most 400: .*", words(page)
    )


def test_the_focus_can_be_seen_everywhere(page):
    seen = {
        element.get_attribute("id") or element.get_attribute("name")
        for element in tab_through(page, 14)
    }
    assert {
        "stage",
        "back",
        "on",
        "pace",
        "layer",
        "head",
        "twin",
        "change",
        "turns",
        "guess",
    } <= seen


def test_everything_that_is_used_has_a_name(page):
    nameless = page.execute_script(
        """
        const named = (e) => e.labels?.[0]?.textContent.trim() || e.ariaLabel || e.textContent.trim();
        return [...document.querySelectorAll("input, select, textarea, button, canvas, [role]")]
          .filter((e) => !named(e) && e.role !== "status").map((e) => e.outerHTML.slice(0, 80));
    """
    )
    assert nameless == []


# --- experiments --------------------------------------------------------------------------------------------------


def experiment(driver, title, variant=0):
    """Chosen, with a prediction, run: (verdict, answer of the changed side, what is said about it)."""
    (chip,) = [c for c in driver.find_elements("css selector", "#choices label") if c.text == title]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", chip)
    chip.click()
    if find(driver, "#variants").is_displayed():
        driver.find_elements("css selector", "#variants input")[variant].click()
    assert not find(driver, "#run").is_enabled() and not find(driver, "#outcome").is_displayed()
    driver.find_elements("css selector", "#guesses input")[0].click()
    button = find(driver, "#run")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    until(driver, lambda driver: find(driver, "#outcome").is_displayed())
    answers = driver.find_elements("css selector", "#wrong p:not(.user)")
    return find(driver, "#verdict").text, answers[-1].text, find(driver, "#why").text


NOTHING, NUMBERS, WORDS = "nothing", "the numbers, but not the words.", "the words."


def test_each_change_shows_what_it_does_beside_the_right_answer(page):
    """The prediction comes first; the verdict and the answer are what the package gives."""
    loaded = nanokv.load("tiny")

    def texts(name, turns):
        talk, _ = hold_in(loaded, name, turns, most=40)
        return [loaded[1].text_of(ids) for ids, _, _ in talk]

    experiments = page.execute_script(
        "return EXPERIMENTS.map(({title, turns, ways}) => [title, turns, ways])"
    )
    seen = set()
    for title, turns, ways in experiments:
        right = texts("right", turns)
        for variant, (_, name) in enumerate(ways):
            wrong = texts(name, turns)
            same = NOTHING if name == "off" or name.startswith("paged") else NUMBERS
            changed = WORDS if wrong != right else same
            verdict, found, why = experiment(page, title, variant)
            assert f"What changed: {changed}" in verdict and found == wrong[-1], (title, variant)
            assert verdict.startswith("You predicted it.") == (changed == NOTHING)
            assert len(why) > 60
            seen.add(changed)
    assert len(experiments) == 8 and seen == {NOTHING, NUMBERS, WORDS}


def test_a_conversation_of_the_readers_own(page):
    """What is said is computed, not written."""
    chip = page.find_elements("css selector", "#choices input")[5]
    page.execute_script("arguments[0].click()", chip)
    field = find(page, "#turns")
    field.clear()
    field.send_keys("What is 27 + 48?")
    page.execute_script("document.querySelectorAll('#guesses input')[0].click(); $('run').click()")
    until(page, lambda page: find(page, "#outcome").is_displayed())
    assert find(page, "#verdict").text.startswith("You predicted it. What changed: nothing")
    assert find(page, "#why").text.startswith("The whole conversation fits in the window.")


# --- widths, themes, motion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1000])
def test_no_sideways_scrolling_and_colours_of_the_system(page, width, dark):
    look(page, width, dark)
    page.execute_script(
        "$('pace').value = 0; $('ask').requestSubmit(); chosen.guess = 2; compare()"
    )
    answered(page)
    root = "document.documentElement"
    wide, room, window = page.execute_script(
        f"return [{root}.scrollWidth, {root}.clientWidth, innerWidth]"
    )
    assert wide <= room <= window == width
    paper = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 28)" if dark else "rgb(251, 251, 250)")


def test_the_story_is_on_the_first_screen(page):
    """Sentence, answer, picture and both counters, at the sizes of a small laptop and of a phone."""
    for width, height in ((1000, 657), (390, 844)):
        look(page, width)
        press(page, "ENTER")
        answered(page)
        bottom = page.execute_script("return $('rows-without').getBoundingClientRect().bottom")
        assert bottom <= height, (width, bottom)


def test_who_wants_no_motion_gets_none(page):
    reduced = {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", reduced)
    assert page.execute_script("return movement()") == 0
    press(page, "ENTER")
    assert answered(page) == "Your name is Zorbla."
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert page.execute_script("return movement()") > 0


def test_the_page_around_it_may_choose_the_colours(page):
    """As the site's switch does for what stands in a frame."""
    press(page, "ENTER")
    answered(page)
    pixels = "return $('stage').toDataURL()"
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script("draw();" + pixels)
    page.execute_script("postMessage({theme: 'blue'}, '*'); postMessage({theme: 'dark'}, '*')")
    until(page, lambda page: page.execute_script(background) == "rgb(20, 24, 28)")
    until(page, lambda page: page.execute_script(pixels) != light)
    assert page.execute_script("return ink('--k')") == "#7cbcf5"
