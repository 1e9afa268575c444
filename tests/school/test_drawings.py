"""The schematic drawings of the course: well-formed, with words, inside their frame, readable, and still on paper."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from browser import look
from nanokv.school.course import drawings, outline, show
from nanokv.school.course.drawings.canvas import FILLS, WIDTH, Canvas
from nanokv.school.course.figures import COLORS
from waiting import until

SVG = "{http://www.w3.org/2000/svg}"
WIDE = 0.6, 0.64  # of a letter in a wide font, usual and bold, as a share of the font size


def each_drawing(test):
    return pytest.mark.parametrize(
        "make", drawings.ALL, ids=[make.__name__ for make in drawings.ALL]
    )(test)


def frame(text) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of a line of text, estimated from its letters."""
    size = float(text.get("font-size"))
    width = len(text.text) * size * WIDE["font-weight" in text.attrib]
    x, y = float(text.get("x")), float(text.get("y"))
    left = x - {"start": 0, "middle": width / 2}[text.get("text-anchor")]
    return left, y - 0.8 * size, left + width, y + 0.25 * size


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def faults(svg: str) -> list[str]:
    """Text that leaves the frame or its box, meets other text, or can hardly be read on what lies under it."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    found, seen, rects = [], [], [root.find(f"{SVG}rect")]  # the ground is under everything
    for shape in root.iter():
        if shape.tag == f"{SVG}rect":
            rects.append(shape)
        if shape.tag != f"{SVG}text":
            continue
        left, top, right, bottom = box = frame(shape)
        if left < 0 or top < 0 or right > width or bottom > height:
            found.append(f"{shape.text}: leaves the frame")
        x, y = (left + right) / 2, (top + bottom) / 2
        under = [r for r in rects if r is rects[0] or inside(r, x, y)][-1]
        if contrast(shape.get("fill"), under.get("fill")) < 4.5:
            found.append(
                f"{shape.text}: contrast {contrast(shape.get('fill'), under.get('fill')):.1f}"
            )
        if not (inside(under, left, y) and inside(under, right, y)):
            found.append(f"{shape.text}: wider than its box")
        found += [f"{shape.text} over {words}" for words, other in seen if meet(box, other)]
        seen.append((shape.text, box))
    return found


def inside(rect, x, y) -> bool:
    left, top = float(rect.get("x", 0)), float(rect.get("y", 0))
    return left <= x <= left + float(rect.get("width")) and top <= y <= top + float(
        rect.get("height")
    )


def meet(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@each_drawing
def test_a_drawing_has_a_title_and_a_description(make):
    drawing = make()
    root = ET.fromstring(drawing.svg)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    assert [part.tag for part in root][:2] == [f"{SVG}title", f"{SVG}desc"] and root[0].text
    assert root[1].text == drawing.alt and len(drawing.alt.split()) >= 30
    assert ET.fromstring(make(alt="Other <words> & more.").svg)[1].text == "Other <words> & more."


@each_drawing
def test_text_is_inside_its_frame_and_can_be_read(make):
    assert faults(make().svg) == []


@each_drawing
def test_nothing_is_fetched_and_the_same_call_gives_the_same_bytes(make):
    svg = make().svg
    assert svg == make().svg and "data:" not in svg
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|<image|<use|href|url\(|@import|\bid=", svg)


@each_drawing
def test_a_drawing_by_itself_hides_nothing(make):
    """Where no script runs, on paper and in a slide all steps are there."""
    assert not re.search(r"<style|<animate|@keyframes|opacity|visibility", make().svg)


def test_only_the_arriving_token_has_steps():
    assert [make().steps for make in drawings.ALL if make().steps] == [4]
    drawing = drawings.token_arrives()
    steps = set(re.findall(r'class="([\w-]+)"', drawing.svg))
    assert steps == {f"{drawing.name}-{i}" for i in (1, 2, 3, 4)}
    assert "<button" not in drawings.block()._repr_mimebundle_()[0]["text/html"]


@pytest.mark.slow
def test_a_drawing_starts_when_it_is_seen_and_goes_on_by_its_button(driver, tmp_path):
    html = drawings.token_arrives()._repr_mimebundle_()[0]["text/html"]
    page = f'<!doctype html><meta charset="utf-8"><div style="height:3000px">above</div>{html}'
    (tmp_path / "page.html").write_text(page, "utf-8")
    look(driver, 1000, height=657)
    driver.get((tmp_path / "page.html").as_uri())
    at = "return document.querySelector('[data-steps]').dataset.at"
    assert driver.execute_script(at) == "4"  # it waits, and hides nothing
    driver.execute_script("document.querySelector('img').scrollIntoView()")
    until(driver, lambda page: page.execute_script(at) == "0")
    until(driver, lambda page: page.execute_script(at) == "1")
    step, _ = driver.find_elements("css selector", "button")
    seen = []
    for _ in range(4):
        step.click()
        seen.append(driver.execute_script(at))
    assert seen == ["2", "3", "4", "0"]
    hidden = driver.execute_script("return decodeURIComponent(document.querySelector('img').src)")
    assert ".arrives-1{visibility:hidden}.arrives-2{visibility:hidden}" in hidden
    assert driver.execute_script("return document.querySelector('img').naturalWidth") > 0
    assert driver.get_log("browser") == []


def test_colours_are_those_of_the_plots_or_grey():
    greys = {
        color for color, _ in FILLS.values() if len({color[i : i + 2] for i in (1, 3, 5)}) == 1
    }
    assert {color for color, _ in FILLS.values()} - greys <= set(COLORS) and len(greys) == 2
    kinds = [fill for name, (fill, _) in FILLS.items() if name not in ("plain", "work")]
    assert len(set(kinds)) == len(kinds)
    used = {
        color
        for make in drawings.ALL
        for color in re.findall(r'<rect[^>]* fill="([^"]+)"', make().svg)
    }
    assert used == set(dict(FILLS.values()))


def test_the_rules_can_fail():
    canvas = Canvas("x", "Title", 100)
    canvas.box(10, 50, 30, 20, "far too long for it", "cached")
    canvas.text(WIDTH - 20, 90, "outside")
    canvas.text(12, 28, "over the title")
    canvas.box(300, 40, 60, 30, "pale", "new")
    svg = canvas.drawing("words").svg.replace('fill="#000000">pale', 'fill="#FFFFFF">pale')
    kinds = [line.split(": ")[-1] for line in faults(svg)]
    assert kinds == [
        "leaves the frame",
        "wider than its box",
        "leaves the frame",
        "wider than its box",
        "over the title over Title",
        "contrast 2.3",
    ]


@each_drawing
def test_a_drawing_is_shown_with_its_words(make, capsys):
    show(make())
    printed = capsys.readouterr().out
    assert " ".join(printed.split()) == " ".join(f"In words: {make().alt}".split())
    assert max(map(len, printed.splitlines())) <= 84
    data, metadata = make()._repr_mimebundle_()
    assert (
        data["image/svg+xml"] == make()._repr_svg_() == make().svg
        and metadata["image/svg+xml"]["alt"] == make().alt
    )
    assert data["text/html"].count("<img alt=") == 1 and 'src="http' not in data["text/html"]
    (piece,) = outline._pictures({"data": data, "metadata": metadata})
    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', make().svg)
    assert piece.image == drawings.address(make().svg) and piece.text == make().alt
    assert outline.aspect(piece) == int(box[1]) / int(box[2])


def test_a_page_shows_the_picture_with_its_words():
    """As nbconvert renders an executed notebook: one image with its alt text, no SVG whose style would leak."""
    import nbformat.v4 as nbformat

    from nanokv.school.course import book

    data, metadata = drawings.token_arrives()._repr_mimebundle_()
    cell = nbformat.new_code_cell(
        "", outputs=[nbformat.new_output("display_data", data, metadata=metadata)]
    )
    page = book.render(nbformat.new_notebook(cells=[cell]))
    assert (
        page.count("<img") == page.count("alt=") == 1
        and "<svg" not in page
        and "Four columns" in page
    )


def test_drawings_need_neither_torch_nor_matplotlib():
    code = "import sys; from nanokv import course; course.drawings.block(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib"} & {*done.stdout.split()}


def test_the_positions_of_the_ruler_are_those_that_the_model_takes():
    """The right row continues the cached positions; neither of the wrong rows does."""
    texts = [text.text for text in ET.fromstring(drawings.ruler().svg).iter(f"{SVG}text")]
    numbers = [int(text) for text in texts if text.isdecimal()]
    rows = [numbers[i : i + 3] for i in range(10, len(numbers), 3)]
    assert numbers[:10] == list(range(10)) and rows == [[6, 7, 8], [0, 1, 2], [7, 8, 9]]
