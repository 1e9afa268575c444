"""The page of `nanokv trace` in a real Chromium: keyboard, tables, hover, themes, widths, and not one request.

Needs the programs chromium and chromedriver (Debian: apt-get install chromium chromium-driver); skipped where they are
not. Selenium is told where they are, so that it downloads nothing.
"""

import math
import re
import statistics

import pytest
import torch

import nanokv
from browser import find, look, press, requests, tab_through, tab_to
from nanokv.lab import faults, trace
from nanokv.lab.trace import difference
from waiting import until

pytestmark = pytest.mark.slow

PROMPT = "My name is Zorbla. What is my name?"
TABS = ["Cache", "Attention", "Positions", "Logits", "Cost", "Right − wrong"]
BACK = "\ue008\ue004"  # Shift + Tab


@pytest.fixture(scope="module")
def runs():
    """(model, tokenizer, right run, run with a fault) of 24 + 9 tokens; the fault changes the words."""
    model, tokenizer = nanokv.load("tiny")
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": PROMPT}]))
    right = trace.record(model, ids, 24)
    with faults.inject("start_pos_restarts"):
        wrong = trace.record(model, ids, 24)
    return model, tokenizer, right, wrong


def write(path, runs, prompt=PROMPT, right=None, fault=True):
    model, tokenizer, usual, wrong = runs
    right = right or usual
    costs = trace.measure(model, right, repeat=1)
    fault = (
        trace.Fault("start_pos_restarts", "Every call counts positions from 0.", wrong)
        if fault
        else None
    )
    roles = ["u"] * (len(right.ids) - 4) + ["a"] * 4
    page = trace.build(
        model, tokenizer, right, costs, name="tiny", prompt=prompt, roles=roles, fault=fault
    )
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def address(runs, tmp_path_factory):
    return write(tmp_path_factory.mktemp("page") / "trace.html", runs)


@pytest.fixture
def opened(driver, address):
    """The page, freshly opened, 1280 wide and light; afterwards the console must be empty."""
    look(driver, 1280)
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get(address)
    yield driver
    assert driver.get_log("browser") == []


@pytest.fixture
def page(opened):
    """The same at the first step, with the cache open, where a page without a fault begins."""
    opened.execute_script("openTab(0); goTo(0)")
    return opened


def state(driver):
    return driver.execute_script(
        "return {step: view.step, run: view.run, tab: PANELS[tab].name, playing: !!timer}"
    )


def painted(driver, canvas="canvas.map"):
    """The pixels of a picture, as one text."""
    return driver.execute_script(f"return document.querySelector('{canvas}').toDataURL()")


def table(driver, figure):
    """(caption, head, rows) of a figure's table twin, opened by its button if it is not open."""
    button = figure.find_element("css selector", "button.twin")
    if button.get_attribute("aria-expanded") == "false":
        # Not under the sticky bar.
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()
    return driver.execute_script(
        """
        const table = arguments[0].querySelector("table"), texts = (row) => [...row.cells].map((c) => c.textContent);
        return [table.caption.textContent, texts(table.tHead.rows[0]), [...table.tBodies[0].rows].map(texts)];
    """,
        figure,
    )


def visible_figures(driver):
    """The time line, then those of the tab."""
    found = (
        driver.find_elements("css selector", f"{host} figure") for host in ("#timeline", "#panels")
    )
    return [figure for figures in found for figure in figures if figure.is_displayed()]


# --- what it must not do ------------------------------------------------------------------------------------------


def test_no_request_but_the_file_itself(page, address):
    for n in range(len(TABS)):
        page.execute_script(f"openTab({n}); goTo(2)")
    assert requests(page) == [address]
    # Forbidden, and this test would notice it.
    page.execute_script("fetch('http://127.0.0.1:9/').catch(() => {})")
    complaints = [entry["message"] for entry in page.get_log("browser")]
    assert complaints and all("Content Security Policy" in text for text in complaints)


def test_a_hostile_prompt_runs_nothing(driver, runs, tmp_path):
    hostile = (
        '</script><img src=x onerror="window.hit=1"><script>window.hit=1</script>\x1b[2J\u202e<b>'
    )
    model, tokenizer = runs[:2]
    right = trace.record(model, tokenizer.encode(hostile), 3)
    driver.get_log("browser")
    driver.get(write(tmp_path / "hostile.html", runs, hostile, right, fault=False))
    assert driver.execute_script("return window.hit") is None
    assert driver.find_elements("css selector", "img, b:not(.role b)") == []
    shown = find(driver, "#prompt").text
    assert (
        shown.startswith('</script><img src=x onerror="window.hit=1">')
        and "\\u001b[2J\\u202e<b>" in shown
    )
    assert driver.title.count("</script>") == 2
    assert not find(driver, "#runs").is_displayed() and driver.get_log("browser") == []


# --- steps and tabs -----------------------------------------------------------------------------------------------


def test_the_slider_moves_the_cache_by_keyboard(page, runs):
    right = runs[2]
    slider = tab_to(page, "#step")
    before = painted(page)
    press(page, "ARROW_RIGHT")
    assert state(page)["step"] == 1 and painted(page) != before
    assert (
        "Step 1 of 8 · decode" in slider.get_attribute("aria-valuetext") == find(page, "#now").text
    )
    assert f"{right.steps[1].nbytes:,} B measured" in find(page, "#panel-0 .fact").text
    press(page, "END")
    assert state(page)["step"] == len(right.steps) - 1
    press(page, "ARROW_RIGHT", "ARROW_LEFT", "ARROW_LEFT")
    assert state(page)["step"] == len(right.steps) - 3
    press(page, "HOME", "SPACE")
    assert state(page)["playing"] and find(page, "#play").text == "Pause"
    until(page, lambda page: state(page)["step"] >= 2)
    press(page, "SPACE")
    assert not state(page)["playing"]


def test_steps_move_from_the_page_itself(page):
    press(page, "ARROW_RIGHT", "ARROW_RIGHT")  # nothing has the focus yet
    assert state(page)["step"] == 2


def test_a_click_on_a_token_goes_to_its_step(page):
    page.find_elements("css selector", ".token")[26].click()
    assert state(page)["step"] == 3
    assert page.execute_script("return document.querySelectorAll('.token.in').length") == 1
    page.find_elements("css selector", ".token")[3].click()
    assert state(page)["step"] == 0
    # Prefill: one block.
    assert page.execute_script("return document.querySelectorAll('.token.in').length") == 24


def test_ids_on_demand_and_letters_always(page, runs):
    chip = page.find_elements("css selector", ".token")[4]
    assert chip.text.split() == ["␣My", "u"]
    tab_to(page, "#show-ids")
    press(page, "SPACE")
    assert chip.text.split() == ["␣My", "u", str(runs[2].ids[4])]


def test_tabs_by_keyboard(page):
    tab_to(page, "#tab-0")
    for name in [*TABS[1:], TABS[0]]:
        press(page, "ARROW_RIGHT")
        chosen = find(page, '[role="tab"][aria-selected="true"]')
        assert chosen.text == name == state(page)["tab"] and page.switch_to.active_element == chosen
        panel = find(page, f"#{chosen.get_attribute('aria-controls')}")
        assert panel.is_displayed() and panel.get_attribute(
            "aria-labelledby"
        ) == chosen.get_attribute("id")
    press(page, "END")
    assert state(page)["tab"] == TABS[-1]
    press(page, "HOME")
    assert state(page)["tab"] == "Cache"
    assert (
        len(
            [p for p in page.find_elements("css selector", '[role="tabpanel"]') if p.is_displayed()]
        )
        == 1
    )


def test_the_focus_can_be_seen_everywhere(page):
    seen = {element.get_attribute("id") or element.tag_name for element in tab_through(page, 30)}
    assert {"play", "step", "show-ids", "tab-0", "canvas"} <= seen


# --- values -------------------------------------------------------------------------------------------------------


def close(text, value):
    return float(text) == pytest.approx(float(value), rel=2e-3, abs=2e-3)


def test_the_key_norms_table_is_what_was_recorded(page, runs):
    page.execute_script("goTo(3)")
    caption, head, rows = table(page, visible_figures(page)[1])
    right = runs[2]
    expected = [right.caches[layer].at(3)[:, 0].flatten(1).norm(dim=-1) for layer in range(6)]
    assert (
        "Keys" in caption
        and "step 3" in caption
        and head == ["row", "token", *(f"layer {i}" for i in range(6))]
    )
    assert len(rows) == len(right.ids) + 3
    assert all(
        close(row[2 + layer], expected[layer][p])
        for p, row in enumerate(rows)
        for layer in range(6)
    )
    press(page, "HOME")  # an open table follows the step
    page.execute_script("goTo(4)")
    assert len(table(page, visible_figures(page)[1])[2]) == len(right.ids) + 4


def test_the_attention_table_is_what_was_recorded(page, runs):
    page.execute_script("openTab(1); goTo(2); view.layer = 3; view.head = 4; refreshTab()")
    caption, head, rows = table(page, visible_figures(page)[1])
    weights = runs[2].steps[2].attention[3][4, 0]
    assert "layer 3, query head 4, step 2" in caption and head == [
        "key",
        "token",
        f"query {len(runs[2].ids) + 1}",
    ]
    assert len(rows) == len(weights) and all(
        close(row[2], w) for row, w in zip(rows, weights, strict=True)
    )
    ranked = table(page, visible_figures(page)[2])[2]
    # Two weights may be equal in the half precision of a page.
    first = weights[[int(row[0]) for row in ranked[:5]]]
    assert torch.allclose(first, weights.topk(5).values, rtol=1e-3, atol=1e-6)


def test_logits_and_angles_tables_are_what_was_recorded(page, runs):
    model, tokenizer, right, _ = runs
    page.execute_script("openTab(3); goTo(5)")
    rows = table(page, visible_figures(page)[1])[2]
    top = right.steps[5].logits.topk(10)
    assert [int(row[1]) for row in rows] == top.indices.tolist()
    assert all(close(row[3], value) for row, value in zip(rows, top.values, strict=True))
    assert rows[0][5] == "yes" and rows[0][2] == tokenizer.pieces([right.steps[5].chosen])[0]
    page.execute_script("openTab(2)")
    rows = table(page, visible_figures(page)[1])[2]
    assert len(rows) == model.config.head_dim // 2
    angle = torch.atan2(right.steps[5].sin, right.steps[5].cos)[0]
    assert all(close(row[5], value) for row, value in zip(rows, angle, strict=True))


def test_the_cost_tables_and_the_byte_table_add_up(page, runs):
    right = runs[2]
    page.execute_script("openTab(4)")
    work = table(page, visible_figures(page)[2])[2]
    fed = [len(right.ids) + n for n in range(len(right.steps))]
    assert [row[1] for row in work] == [str(n) for n in fed]
    assert [int(row[2].replace(",", "")) for row in work] == [
        sum(fed[: n + 1]) for n in range(len(fed))
    ]
    whole = find(page, "p.whole").text
    assert whole.startswith(
        f"The whole run, {len(fed)} steps: {fed[-1]} tokens through the model in "
    )
    assert f"with the cache, {sum(fed):,} tokens in " in whole and whole.endswith(" times as long.")
    page.execute_script("openTab(0)")
    rows = table(page, visible_figures(page)[4])[2]
    assert (
        [row[2] for row in rows]
        == [row[3] for row in rows]
        == [f"{step.nbytes:,}" for step in right.steps]
    )


def test_every_picture_has_a_table(page):
    for n in range(len(TABS)):
        page.execute_script(f"openTab({n})")
        for figure in visible_figures(page):
            caption, head, rows = table(page, figure)
            assert caption and rows and all(len(row) == len(head) for row in rows)
            scopes = page.execute_script(
                "return [...arguments[0].querySelectorAll('th')].map((th) => th.scope)", figure
            )
            assert scopes == ["col"] * len(head) + ["row"] * len(rows)


def test_hover_and_keyboard_tell_the_same_value(page, runs):
    from selenium.webdriver import ActionChains

    page.execute_script("goTo(2)")
    norm = runs[2].caches[2].at(2)[7, 0].norm()
    figure = visible_figures(page)[1]
    canvas, readout = (
        figure.find_element("css selector", name) for name in ("canvas.map", ".readout")
    )
    x, y = page.execute_script(
        """
        const {left, top, cell, height} = cachePanel.maps[0].layout, box = arguments[0].getBoundingClientRect();
        arguments[0].scrollIntoView({block: "center"});
        return [left + 7.5 * cell - box.width / 2, top + 2.5 * height - box.height / 2];
    """,
        canvas,
    )
    ActionChains(page).move_to_element_with_offset(canvas, round(x), round(y)).perform()
    by_hand = readout.text
    assert "layer 2, position 7" in by_hand and close(by_hand.split()[-1], norm)
    page.refresh()
    page.execute_script("openTab(0); goTo(2)")
    tab_to(page, "#panel-0 canvas.map")
    press(page, "HOME", "ARROW_DOWN", "ARROW_DOWN", *["ARROW_RIGHT"] * 7)
    assert find(page, "#panel-0 .readout").text == by_hand
    assert find(page, "#panel-0 .readout").get_attribute("role") == "status"
    assert state(page)["step"] == 2  # arrows in a picture leave the slider alone


def test_rounding_is_on_the_page(page):
    find(page, "#about summary").click()
    rows = page.execute_script(
        "return [...document.querySelectorAll('#about tbody tr')].map((r) => r.innerText)"
    )
    assert len(rows) == 14 and "float16" in rows[0]
    assert "rounded to float16" in find(page, "#about").text


# --- the fault ----------------------------------------------------------------------------------------------------


def test_the_fault_toggle_marks_where_the_runs_part(page, runs):
    right, wrong = runs[2:]
    first = next(
        n
        for n, (a, b) in enumerate(zip(right.steps, wrong.steps, strict=False))
        if a.chosen != b.chosen
    )
    note = find(page, "#fault-note").text
    assert (
        "The logits differ from step 1 on" in note
        and f"The words differ from step {first} on." in note
    )
    assert [mark.text for mark in page.find_elements("css selector", "#marks span")] == [
        "≠ logits",
        "≠ words",
    ]
    page.execute_script(f"goTo({first})")
    here = find(page, "#now").text
    assert here.endswith(
        "logits and words differ from here on" if first == 1 else " · words differ from here on"
    )
    chosen = find(page, ".token.out .piece").text
    tab_to(page, "#runs input")
    press(page, "ARROW_RIGHT")
    assert state(page)["run"] == 1 and find(page, ".token.out .piece").text != chosen
    assert find(page, ".token.differs") == find(page, ".token.out")
    page.execute_script("openTab(2)")
    assert "these angles are wrong" in find(page, "#panel-2 .fact").text
    find(page, "#fault-note button").click()
    assert state(page)["step"] == 1


# --- right minus wrong --------------------------------------------------------------------------------------------


def test_a_page_with_a_fault_opens_at_the_first_difference(opened, runs):
    right, wrong = runs[2:]
    key = (right.caches[0].at(1)[-1, 0] - wrong.caches[0].at(1)[-1, 0]).abs().max().item()
    assert state(opened) == {"step": 1, "run": 0, "tab": "Right − wrong", "playing": False}
    said = find(opened, "#panel-5 .fact").text
    assert (
        said.startswith(f"First difference: step 1, layer 0, position {len(right.ids)} “")
        and "of " in said
    )
    assert float(re.search(r"key differs by ([\d.]+)", said)[1]) == pytest.approx(key, rel=0.06)
    assert "First difference" in find(opened, "#fault-note").text
    gaps = [
        (right.steps[1].attention[0][h, 0] - wrong.steps[1].attention[0][h, 0]).abs().max()
        for h in range(6)
    ]
    assert opened.execute_script("return other.head") == int(torch.stack(gaps).argmax())


@pytest.mark.parametrize("width", [390, 1200])
def test_differences_by_keyboard(opened, runs, width):
    look(opened, width)
    places = difference.places(runs[2], runs[3], torch.float32)
    count = f"{len(places):,}"
    tab_to(opened, "#panel-5 button:nth-of-type(3)", most=60)  # next
    press(opened, "ENTER", "ENTER")
    step, layer, position = places[2][:3]
    said = find(opened, "#panel-5 .fact").text
    assert said.startswith(
        f"Difference 3 of {count}: step {step}, layer {layer}, position {position} “"
    )
    press(opened, BACK, "ENTER")  # previous
    assert find(opened, "#panel-5 .fact").text.startswith(f"Difference 2 of {count}")
    press(opened, BACK, "ENTER")  # the first
    assert find(opened, "#panel-5 .fact").text.startswith("First difference: step 1")
    canvas = tab_to(opened, "#panel-5 canvas.map")
    press(opened, "ARROW_DOWN")
    readout = find(opened, "#panel-5 .readout").text
    assert f"layer 1, position {len(runs[2].ids)} “" in readout and "key differs by" in readout
    assert opened.execute_script(
        """  // the column is in sight, in a box that scrolls by itself
        const box = arguments[0].parentNode, {left, cell} = differencePanel.map.layout, x = left + arguments[1] * cell;
        return x >= box.scrollLeft && x + cell <= box.scrollLeft + box.clientWidth;
    """,
        canvas,
        len(runs[2].ids),
    )
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width


def test_the_difference_tables_are_right_minus_wrong(opened, runs):
    right, wrong = runs[2:]
    rows, vector, weights, logits = [
        table(opened, figure)[2] for figure in visible_figures(opened)[1:]
    ]
    good, bad = (run.caches[0].at(1)[-1] for run in (right, wrong))  # (2,Hk,D)
    gap = good - bad
    shown = torch.tensor([[float(row[1 + i]) for row in vector] for i in range(4)])  # (2·Hk,D)
    # The page has each of the two in float16, and shows four digits of their difference.
    rounding = 2**-11 * (good.abs() + bad.abs()) + 1e-3 * gap.abs() + 1e-5
    assert ((shown - gap.flatten(0, 1)).abs() <= rounding.flatten(0, 1)).all()
    assert [row[0] for row in rows] == [str(p) for p in range(len(right.ids) + 1)]
    assert {row[2] for row in rows[:-1]} == {"0"} and close(rows[-1][2], gap[0].abs().max())
    head = opened.execute_script("return other.head")
    a, b = (run.steps[1].attention[0][head, 0] for run in (right, wrong))
    assert all(close(row[4], x) for row, x in zip(weights, a - b, strict=True))
    a, b = right.steps[1].logits, wrong.steps[1].logits
    assert {int(row[0]) for row in logits} == {
        *a.topk(5).indices.tolist(),
        *b.topk(5).indices.tolist(),
    }
    assert all(close(row[4], a[int(row[0])] - b[int(row[0])]) for row in logits)
    chosen = {row[5]: int(row[0]) for row in logits if row[5]}
    assert chosen in (
        {"both": right.steps[1].chosen},
        {"right": right.steps[1].chosen, "wrong": wrong.steps[1].chosen},
    )


@pytest.mark.parametrize(("kind", "name"), list(enumerate(("key", "value", "attention"))))
def test_show_goes_to_the_first_difference_of_its_kind(opened, runs, kind, name):
    places = difference.places(runs[2], runs[3], torch.float32)
    step, layer, position = next(place[:3] for place in places if place[3 + kind] != 0)
    opened.execute_script(
        "goTo(1); other.layer = other.position = 0; other.kind = -1; refreshTab()"
    )
    opened.execute_script(
        """
        const [select, kind] = arguments;
        select.value = kind;
        select.dispatchEvent(new Event("change"));
    """,
        find(opened, "#panel-5 select"),
        kind,
    )
    said = find(opened, "#panel-5 .fact").text
    assert f"step {step}, layer {layer}, position {position} “" in said and name in said


def test_the_largest_logit_difference_is_said(opened, runs):
    right, wrong = (run.steps[1].logits for run in runs[2:])
    shown = sorted({*right.topk(5).indices.tolist(), *wrong.topk(5).indices.tolist()})
    gap = max((right[id] - wrong[id]).abs().item() for id in shown)
    said = opened.execute_script("return differencePanel.logits.title.textContent")
    number = abs(
        float(re.search(r"The largest difference is that of “.*”: (−?-?[\d.e-]+)\.", said)[1])
    )
    # Three digits are printed: off by at most half of the last one.
    half = 10 ** (math.floor(math.log10(gap)) - 2) / 2
    assert number == pytest.approx(gap, rel=0, abs=half * 1.001)


def test_keys_are_named_by_position_also_behind_rows_that_were_left(driver, runs, tmp_path):
    model, _, right, _ = runs
    with faults.inject("not_cleared"):
        list(nanokv.generate(model, right.ids[:7], max_new_tokens=1))
        wrong = trace.record(model, right.ids, 3)
    driver.get(write(tmp_path / "left.html", (*runs[:3], wrong)))
    driver.execute_script(
        "document.querySelectorAll('#runs input')[1].click(); openTab(1); goTo(1)"
    )
    left = driver.execute_script("return now().looks[1][0].S") - len(right.ids) - 1
    assert left > 0
    keys = driver.execute_script("return attentionTable().rows.map((row) => row[0])")
    assert keys == [*(f"row {n}" for n in range(left)), *map(str, range(len(right.ids) + 1))]
    labels = driver.execute_script("return weightBars().items.map(({label}) => label)")
    assert all(re.match(r"row \d+ left over$|\d+ ", label) for label in labels)
    assert all(
        int(label.split()[0]) <= len(right.ids) for label in labels if not label.startswith("row")
    )
    said = driver.execute_script(
        "return attentionGrid().describe(newest(), now().looks[1][0].S - 1)"
    )
    assert f"key {len(right.ids)} “" in said


def test_a_fault_that_changes_no_value_says_so(driver, runs, tmp_path):
    model, _, right, _ = runs
    with faults.inject("cached_queries"):
        wrong = trace.record(model, right.ids, 3)
    driver.get(write(tmp_path / "bytes.html", (*runs[:3], wrong)))
    said = find(driver, "#panel-5 .fact").text
    assert (
        said.startswith("Nothing differs under")
        and f"{wrong.steps[0].nbytes:,} B instead of" in said
    )
    buttons = driver.find_elements("css selector", "#panel-5 .controls button")
    assert [button.get_attribute("aria-disabled") for button in buttons] == ["true"] * 3
    buttons[0].click()
    assert state(driver)["step"] == 0 and driver.get_log("browser") == []


# --- the tour -----------------------------------------------------------------------------------------------------


def stop(driver):
    """(number, title, text) of the tour."""
    assert driver.switch_to.active_element.get_attribute("id") in ("tour", "tour-next", "tour-back")
    return [find(driver, f"#tour-{part}").text for part in ("count", "title", "text")]


def in_sight(driver, element):
    """In the window, at least in part, and nothing of it behind the card of the tour."""
    return driver.execute_script(
        """
        const [box, card] = [arguments[0], document.getElementById("tour")].map((one) => one.getBoundingClientRect());
        const beside = card.right <= box.left || card.left >= box.right;
        const apart = beside || card.bottom <= box.top || card.top >= box.bottom;
        return apart && box.bottom > 0 && box.top < innerHeight;
    """,
        element,
    )


@pytest.mark.parametrize(("width", "height"), [(1000, 657), (390, 844)])
def test_play_keeps_the_map_on_the_screen(driver, address, width, height):
    """Directly under the slider at first, and still there when it is played from further down; a second per step."""
    look(driver, width, height=height)
    driver.get(address)
    driver.execute_script("openTab(0); goTo(0)")
    place = """
        const map = cachePanel.maps[0].canvas.getBoundingClientRect(), bar = document.querySelector(".bar");
        return [Math.round(bar.getBoundingClientRect().bottom), Math.round(map.top), Math.round(map.bottom)];
    """
    for scrolled in (0, 1200):
        driver.execute_script(f"play(false); goTo(0); scrollTo(0, {scrolled}); play(true)")
        bar, top, bottom = driver.execute_script(place)
        assert bar <= top and bottom <= height, (scrolled, bar, top, bottom)
    assert driver.execute_script("return SPEED") == 1000
    driver.execute_script("play(false)")


@pytest.mark.parametrize(("width", "height"), [(1000, 657), (390, 844)])
def test_a_page_with_a_fault_shows_both_answers_first(driver, address, runs, width, height):
    look(driver, width, height=height)
    driver.get(address)
    answers = driver.find_elements("css selector", ".answer")
    said = [answer.find_elements("css selector", "p")[1].text for answer in answers]
    _, tokenizer, *both = runs
    assert said == [tokenizer.text_of(run.tokens[len(run.ids) :]).strip() for run in both]
    assert said[0] != said[1] and all(
        answer.find_element("css selector", "mark").text for answer in answers
    )
    boxes = [answer.rect for answer in answers]
    assert all(box["y"] + box["height"] < height / 2 for box in boxes)
    assert (boxes[0]["y"] == boxes[1]["y"]) == (
        width == 1000
    )  # beside each other, where there is room


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("fault", [True, False])
def test_the_tour_by_keyboard(driver, runs, tmp_path, width, fault):
    look(driver, width)
    driver.get_log("browser")
    driver.get_log("performance")
    address = write(tmp_path / "tour.html", runs, fault=fault)
    driver.get(address)
    driver.execute_script("try { localStorage.clear() } catch {}")
    driver.refresh()
    assert not find(driver, "#tour").is_displayed() and "stops" in find(driver, "#tour-offer").text
    tab_to(driver, "#tour-start")
    press(driver, "ENTER")
    right, seen = runs[2], {}
    live = find(driver, "#tour [aria-live]")
    assert (
        live.get_attribute("aria-live") == "polite" and live.get_attribute("aria-atomic") == "true"
    )
    press(driver, "ENTER")
    assert stop(driver)[0] == "2 of 8", "the card has the focus"
    press(driver, "ARROW_LEFT")
    tab_to(driver, "#tour-next")
    for n in range(8):
        number, title, text = stop(driver)
        assert number == f"{n + 1} of 8" and 2 <= len(re.findall(r"[.?](?= |$)", text)) <= 5
        lit = driver.find_elements("css selector", ".lit")
        assert lit and all(element.is_displayed() for element in lit)
        assert in_sight(driver, driver.execute_script("return tour.lit[0]"))
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        seen[title] = text, state(driver)
        press(driver, "ENTER" if n % 2 else "ARROW_RIGHT")
    check_figures(seen, right, fault, runs[1].pieces(right.tokens))
    assert not find(driver, "#tour").is_displayed()
    assert driver.switch_to.active_element.get_attribute("id") == "tour-start"
    assert (
        driver.find_elements("css selector", ".lit") == []
        and find(driver, "#tour-start").text == "Tour again"
    )
    press(driver, "ENTER", "ARROW_RIGHT", "ARROW_LEFT", "ARROW_LEFT")
    assert stop(driver)[0] == "1 of 8"
    press(driver, "ESCAPE")
    assert not find(driver, "#tour").is_displayed()
    driver.refresh()
    assert find(driver, "#tour-start").text == "Tour again"  # this file may keep it
    assert set(requests(driver)) == {address}
    assert driver.get_log("browser") == []


def clearest_look(right, pieces):
    """(weight, position, key): the answer's hardest look at a word of the prompt, a copied token among them."""
    prompt, word = len(right.ids), re.compile(r"[^\W_]")
    keys = [
        k
        for k in range(1, prompt - 4)
        if word.search(pieces[k]) and pieces[k - 1] != "<|im_start|>"
    ]
    asking = [n for n in range(1, len(right.steps)) if word.search(pieces[prompt + n - 1])]
    return max(
        (right.steps[n].attention[layer][:, -1, k].max().item(), prompt + n - 1, k)
        for n in asking
        for layer in right.layers
        for k in keys
    )


def check_figures(seen, right, fault, pieces):
    """The numbers of the stops, from the recording."""
    fed, last = len(right.ids) + len(right.steps) - 1, len(right.steps) - 1
    texts = {title: text for title, (text, _) in seen.items()}
    states = {title: (one["tab"], one["step"]) for title, (_, one) in seen.items()}
    assert f"holds {fed} tokens in 6 layers" in texts["What a KV cache is"]
    norm = max(
        log.at(last)[:, 0].flatten(1).norm(dim=-1).max().item() for log in right.caches.values()
    )
    assert close(re.search(r"here ([\d.]+),", texts["Why a norm is drawn"])[1], norm)
    assert f"{len(right.ids)} tokens of the prompt" in texts["Prefill"] and states["Prefill"] == (
        "Cache",
        0,
    )
    assert f"reads {len(right.ids) + 1} columns, {len(right.ids)} of them" in texts["Decode"]
    assert states["Decode"] == ("Cache", 1)
    assert (
        f"{right.steps[0].nbytes:,} B after step 0 and {right.steps[-1].nbytes:,} B"
        in texts["What each token adds"]
    )
    again = sum(len(right.ids) + n for n in range(len(right.steps)))
    assert (
        f"{again:,} tokens" in texts["What reuse saves"]
        and f"{fed} tokens" in texts["What reuse saves"]
    )
    tab, t = states["Attention reads the cache"]
    weight, position, key = clearest_look(right, pieces)
    said = texts["Attention reads the cache"]
    assert tab == "Attention" and t > 0 and weight > 0.3
    assert f"position {position} “" in said and f"Position {key} “" in said
    assert ("the same token" in said) == (right.tokens[position + 1] == right.tokens[key])
    assert close(re.search(r"gets ([\d.e-]+)\.(?: |$)", said)[1], weight)
    assert states["A fault"] == (("Right − wrong", 1) if fault else ("Logits", last))
    assert (
        "First difference: step 1, layer 0" if fault else "--fault start_pos_restarts"
    ) in texts["A fault"]


# --- tokens on the axes -------------------------------------------------------------------------------------------


def test_tokens_are_written_on_the_axes(page, runs):
    pieces = ["a", " name", "↵", " " * 8, "\\xf0\\x9f", "internationalization", ""]
    texts = page.execute_script("return arguments[0].map((piece) => short(piece))", pieces)
    assert texts == ["a", "␣name", "↵", "␣×8", "‹f0 9f›", "internati…", "∅"]
    right = runs[2]
    for panel, grid in ((0, "normGrid(0)"), (1, "attentionGrid()"), (5, "offGrid()")):
        page.execute_script(f"openTab({panel}); goTo(2)")
        shown = page.execute_script(
            f"return [5, 6].map((c) => [{grid}.colName(c), {grid}.colText(c)])"
        )
        assert shown == [["5", "␣name"], ["6", "␣is"]]
    assert page.execute_script("return attentionGrid().rowName(5)") == "␣name 5"
    page.execute_script("openTab(1); goTo(2)")
    tab_to(page, "#panel-1 canvas.map", most=60)
    press(page, "HOME")
    readout = find(page, "#panel-1 .readout").text
    assert re.search(
        rf"position {len(right.ids) + 1} “.*”, key 0 “<\|im_start\|>”: weight [\d.e-]+$", readout
    )


# --- widths, themes, speed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_no_sideways_scrolling_and_colours_of_the_system(page, width, dark):
    look(page, width, dark)
    for n in range(len(TABS)):
        page.execute_script(f"openTab({n})")
        for figure in visible_figures(page):
            table(page, figure)
        root = "document.documentElement"
        wide, room, window = page.execute_script(
            f"return [{root}.scrollWidth, {root}.clientWidth, innerWidth]"
        )
        assert wide <= room <= window == width, TABS[n]
    paper = page.execute_script(
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (max(paper) < 60) if dark else (min(paper) > 200)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast(page, dark):
    """WCAG AA: 4.5 : 1 for every colour that text is written in, on both backgrounds."""
    look(page, 1280, dark)
    colours = page.execute_script("""
        return Object.fromEntries(["paper", "card", "ink", "soft", "accent", "s", "u", "a", "p", "mark"]
            .map((name) => [name, rgb("--" + name)]));
    """)

    def luminance(rgb):
        parts = [
            c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4
            for c in rgb
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for name in set(colours) - {"paper", "card"}:
        for ground in ("paper", "card"):
            light, low = sorted(
                (luminance(colours[name]), luminance(colours[ground])), reverse=True
            )
            assert (light + 0.05) / (low + 0.05) >= 4.5, (name, ground)


def test_a_step_of_64_tokens_is_drawn_in_50_ms(driver, runs, tmp_path):
    """The median over all steps of each tab, tables closed."""
    model, _, right, _ = runs
    long = trace.record(model, right.ids, 64 - len(right.ids), eos_token_ids=[])
    with faults.inject("start_pos_restarts"):
        wrong = trace.record(model, right.ids, 64 - len(right.ids), eos_token_ids=[])
    driver.get(write(tmp_path / "long.html", (*runs[:3], wrong), right=long))
    for n, name in enumerate(TABS):
        times = driver.execute_script(f"""
            openTab({n});
            return now().steps.map((_, i) => {{
                const began = performance.now();
                goTo(i);
                document.body.offsetHeight;
                return performance.now() - began;
            }});
        """)
        assert statistics.median(times) < 50, name
