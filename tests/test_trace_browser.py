"""The page of `nanokv trace` in a real Chromium: keyboard, tables, hover, themes, widths, and not one request.

Needs the programs chromium and chromedriver (Debian: apt-get install chromium chromium-driver); skipped where they are
not. Selenium is told where they are, so that it downloads nothing.
"""

import json
import statistics

import pytest
import torch

import nanokv
from nanokv import faults, trace

pytestmark = pytest.mark.slow

PROMPT = "My name is Zorbla. What is my name?"
TABS = ["Cache", "Attention", "Positions", "Logits", "Cost"]


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
    fault = trace.Fault("start_pos_restarts", "Every call counts positions from 0.", wrong) if fault else None
    roles = ["u"] * (len(right.ids) - 4) + ["a"] * 4
    page = trace.build(model, tokenizer, right, costs, name="tiny", prompt=prompt, roles=roles, fault=fault)
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def address(runs, tmp_path_factory):
    return write(tmp_path_factory.mktemp("page") / "trace.html", runs)


@pytest.fixture
def page(driver, address):
    """The page, freshly opened, 1280 wide and light; afterwards the console must be empty."""
    look(driver, 1280)
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get(address)
    yield driver
    assert driver.get_log("browser") == []


def look(driver, width, dark=False):
    """Another window width and colour scheme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def find(driver, selector):
    return driver.find_element("css selector", selector)


def press(driver, *keys):
    """Keys go to whatever has the focus, as a person's do."""
    from selenium.webdriver.common.keys import Keys

    for key in keys:
        driver.switch_to.active_element.send_keys(getattr(Keys, key, key))


def tab_to(driver, selector, most=40):
    """Press Tab until the element has the focus: it can be reached with the keyboard alone."""
    wanted = find(driver, selector)
    for _ in range(most):
        if driver.switch_to.active_element == wanted:
            return wanted
        press(driver, "TAB")
    raise AssertionError(f"Tab does not reach {selector}")


def state(driver):
    return driver.execute_script("return {step: view.step, run: view.run, tab: PANELS[tab].name, playing: !!timer}")


def painted(driver, canvas="canvas"):
    """The pixels of a picture, as one text."""
    return driver.execute_script(f"return document.querySelector('{canvas}').toDataURL()")


def table(driver, figure):
    """(caption, head, rows) of a figure's table twin, opened by its button if it is not open."""
    button = figure.find_element("css selector", "button.twin")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    return driver.execute_script("""
        const table = arguments[0].querySelector("table"), texts = (row) => [...row.cells].map((c) => c.textContent);
        return [table.caption.textContent, texts(table.tHead.rows[0]), [...table.tBodies[0].rows].map(texts)];
    """, figure)  # fmt: skip


def visible_figures(driver):
    return [figure for figure in driver.find_elements("css selector", "main figure") if figure.is_displayed()]


# --- what it must not do ------------------------------------------------------------------------------------------


def requests(driver):
    """Addresses that the browser was asked for, since the log was last read."""
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def test_no_request_but_the_file_itself(page, address):
    for n in range(len(TABS)):
        page.execute_script(f"openTab({n}); goTo(2)")
    assert [url for url in requests(page) if not url.startswith("data:")] == [address]
    page.execute_script("fetch('http://127.0.0.1:9/').catch(() => {})")  # forbidden, and this test would notice it
    complaints = [entry["message"] for entry in page.get_log("browser")]
    assert complaints and all("Content Security Policy" in text for text in complaints)


def test_a_hostile_prompt_runs_nothing(driver, runs, tmp_path):
    hostile = "</script><img src=x onerror=\"window.hit=1\"><script>window.hit=1</script>\x1b[2J\u202e<b>"
    model, tokenizer = runs[:2]
    right = trace.record(model, tokenizer.encode(hostile), 3)
    driver.get_log("browser")
    driver.get(write(tmp_path / "hostile.html", runs, hostile, right, fault=False))
    assert driver.execute_script("return window.hit") is None
    assert driver.find_elements("css selector", "img, b:not(.role b)") == []
    shown = find(driver, "#prompt").text
    assert shown.startswith('</script><img src=x onerror="window.hit=1">') and "\\u001b[2J\\u202e<b>" in shown
    assert driver.title.count("</script>") == 2
    assert not find(driver, "#runs").is_displayed() and driver.get_log("browser") == []


# --- steps and tabs -----------------------------------------------------------------------------------------------


def test_the_slider_moves_the_cache_by_keyboard(page, runs):
    right = runs[2]
    slider = tab_to(page, "#step")
    before = painted(page)
    press(page, "ARROW_RIGHT")
    assert state(page)["step"] == 1 and painted(page) != before
    assert "Step 1 of 8 · decode" in slider.get_attribute("aria-valuetext") == find(page, "#now").text
    assert f"{right.steps[1].nbytes:,} B measured" in find(page, "#panel-0 .fact").text
    press(page, "END")
    assert state(page)["step"] == len(right.steps) - 1
    press(page, "ARROW_RIGHT", "ARROW_LEFT", "ARROW_LEFT")
    assert state(page)["step"] == len(right.steps) - 3
    press(page, "HOME", "SPACE")
    assert state(page)["playing"] and find(page, "#play").text == "Pause"
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page, 20).until(lambda page: state(page)["step"] >= 2)
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
    assert page.execute_script("return document.querySelectorAll('.token.in').length") == 24  # prefill: one block


def test_ids_on_demand_and_letters_always(page, runs):
    chip = page.find_elements("css selector", ".token")[4]
    assert chip.text.split() == ["My", "u"]
    tab_to(page, "#show-ids")
    press(page, "SPACE")
    assert chip.text.split() == ["My", "u", str(runs[2].ids[4])]


def test_tabs_by_keyboard(page):
    tab_to(page, "#tab-0")
    for name in [*TABS[1:], TABS[0]]:
        press(page, "ARROW_RIGHT")
        chosen = find(page, '[role="tab"][aria-selected="true"]')
        assert chosen.text == name == state(page)["tab"] and page.switch_to.active_element == chosen
        panel = find(page, f"#{chosen.get_attribute('aria-controls')}")
        assert panel.is_displayed() and panel.get_attribute("aria-labelledby") == chosen.get_attribute("id")
    press(page, "END")
    assert state(page)["tab"] == "Cost"
    press(page, "HOME")
    assert state(page)["tab"] == "Cache"
    assert len([p for p in page.find_elements("css selector", '[role="tabpanel"]') if p.is_displayed()]) == 1


def test_the_focus_can_be_seen_everywhere(page):
    seen = set()
    for _ in range(30):
        press(page, "TAB")
        element = page.switch_to.active_element
        outline = [element.value_of_css_property(f"outline-{part}") for part in ("style", "width")]
        if element.tag_name != "body":
            assert outline[0] != "none" and outline[1] != "0px", element.get_attribute("outerHTML")[:80]
            seen.add(element.get_attribute("id") or element.tag_name)
    assert {"play", "step", "show-ids", "tab-0", "canvas"} <= seen


# --- values -------------------------------------------------------------------------------------------------------


def close(text, value):
    return float(text) == pytest.approx(float(value), rel=2e-3, abs=2e-3)


def test_the_key_norms_table_is_what_was_recorded(page, runs):
    page.execute_script("goTo(3)")
    caption, head, rows = table(page, visible_figures(page)[1])
    right = runs[2]
    expected = [right.caches[layer].at(3)[:, 0].flatten(1).norm(dim=-1) for layer in range(6)]
    assert "Keys" in caption and "step 3" in caption and head == ["row", "token", *(f"layer {i}" for i in range(6))]
    assert len(rows) == len(right.ids) + 3
    assert all(close(row[2 + layer], expected[layer][p]) for p, row in enumerate(rows) for layer in range(6))
    press(page, "HOME")  # an open table follows the step
    page.execute_script("goTo(4)")
    assert len(table(page, visible_figures(page)[1])[2]) == len(right.ids) + 4


def test_the_attention_table_is_what_was_recorded(page, runs):
    page.execute_script("openTab(1); goTo(2); view.layer = 3; view.head = 4; refreshTab()")
    caption, head, rows = table(page, visible_figures(page)[1])
    weights = runs[2].steps[2].attention[3][4, 0]
    assert "layer 3, query head 4, step 2" in caption and head == ["key", "token", f"query {len(runs[2].ids) + 1}"]
    assert len(rows) == len(weights) and all(close(row[2], w) for row, w in zip(rows, weights, strict=True))
    ranked = table(page, visible_figures(page)[2])[2]
    assert [int(row[0]) for row in ranked[:5]] == weights.topk(5).indices.tolist()


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
    assert [int(row[2].replace(",", "")) for row in work] == [sum(fed[: n + 1]) for n in range(len(fed))]
    page.execute_script("openTab(0)")
    rows = table(page, visible_figures(page)[4])[2]
    assert [row[2] for row in rows] == [row[3] for row in rows] == [f"{step.nbytes:,}" for step in right.steps]


def test_every_picture_has_a_table(page):
    for n in range(len(TABS)):
        page.execute_script(f"openTab({n})")
        for figure in visible_figures(page):
            caption, head, rows = table(page, figure)
            assert caption and rows and all(len(row) == len(head) for row in rows)
            scopes = page.execute_script(
                "return [...arguments[0].querySelectorAll('th')].map((th) => th.scope)", figure)  # fmt: skip
            assert scopes == ["col"] * len(head) + ["row"] * len(rows)


def test_hover_and_keyboard_tell_the_same_value(page, runs):
    from selenium.webdriver import ActionChains

    page.execute_script("goTo(2)")
    norm = runs[2].caches[2].at(2)[7, 0].norm()
    figure = visible_figures(page)[1]
    canvas, readout = (figure.find_element("css selector", name) for name in ("canvas", ".readout"))
    x, y = page.execute_script("""
        const {left, top, cell, height} = cachePanel.maps[0].layout, box = arguments[0].getBoundingClientRect();
        arguments[0].scrollIntoView({block: "center"});
        return [left + 7.5 * cell - box.width / 2, top + 2.5 * height - box.height / 2];
    """, canvas)  # fmt: skip
    ActionChains(page).move_to_element_with_offset(canvas, round(x), round(y)).perform()
    by_hand = readout.text
    assert "layer 2, position 7" in by_hand and close(by_hand.split()[-1], norm)
    page.refresh()
    page.execute_script("goTo(2)")
    tab_to(page, "#panel-0 canvas")
    press(page, "HOME", "ARROW_DOWN", "ARROW_DOWN", *["ARROW_RIGHT"] * 7)
    assert find(page, "#panel-0 .readout").text == by_hand
    assert find(page, "#panel-0 .readout").get_attribute("role") == "status"
    assert state(page)["step"] == 2  # arrows in a picture leave the slider alone


def test_rounding_is_on_the_page(page):
    find(page, "#about summary").click()
    rows = page.execute_script("return [...document.querySelectorAll('#about tbody tr')].map((r) => r.innerText)")
    assert len(rows) == 14 and "float16" in rows[0]
    assert "rounded to float16" in find(page, "#about").text


# --- the fault ----------------------------------------------------------------------------------------------------


def test_the_fault_toggle_marks_where_the_runs_part(page, runs):
    right, wrong = runs[2:]
    first = next(n for n, (a, b) in enumerate(zip(right.steps, wrong.steps, strict=False)) if a.chosen != b.chosen)
    note = find(page, "#fault-note").text
    assert "The logits part at step 1" in note and f"The words part at step {first}" in note
    assert [mark.text for mark in page.find_elements("css selector", "#marks span")] == ["≠ logits", "≠ words"]
    page.execute_script(f"goTo({first})")
    assert "logits and words part here" in find(page, "#now").text
    chosen = find(page, ".token.out .piece").text
    tab_to(page, "#runs input")
    press(page, "ARROW_RIGHT")
    assert state(page)["run"] == 1 and find(page, ".token.out .piece").text != chosen
    assert find(page, ".token.differs") == find(page, ".token.out")
    page.execute_script("openTab(2)")
    assert "these angles are wrong" in find(page, "#panel-2 .fact").text
    find(page, "#fault-note button").click()
    assert state(page)["step"] == 1


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
        wide, room, window = page.execute_script(f"return [{root}.scrollWidth, {root}.clientWidth, innerWidth]")
        assert wide <= room <= window == width, TABS[n]
    paper = page.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
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
        parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for name in set(colours) - {"paper", "card"}:
        for ground in ("paper", "card"):
            light, low = sorted((luminance(colours[name]), luminance(colours[ground])), reverse=True)
            assert (light + 0.05) / (low + 0.05) >= 4.5, (name, ground)


def test_a_step_of_64_tokens_is_drawn_in_50_ms(driver, runs, tmp_path):
    """The median over all steps of each tab, tables closed."""
    model, _, right, _ = runs
    long = trace.record(model, right.ids, 64 - len(right.ids), eos_token_ids=[])
    driver.get(write(tmp_path / "long.html", runs, right=long, fault=False))
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
