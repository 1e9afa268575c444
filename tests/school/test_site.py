"""The static site: what becomes of links, what the search holds, what the checker refuses, and the pages in a browser.

A small site stands in for the whole one: a notebook of two cells, the real docs, four modules, one recording. Only the
last test builds everything, from the notebooks that the session has executed for the book.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nanokv.errors import CourseError
from nanokv.school.course import book, checking, running, site, twins
from nanokv.school.course.site import api, links, recordings, search
from nanokv.school.course.site.pages import PARTS, Page, markdown, write
from waiting import drawn, leave, until

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
MODULES = [
    "nanokv",
    "nanokv.cache",
    "nanokv.cache.base",
    "nanokv.cache.dict_cache",
    "nanokv.inference",
]
ONE = recordings.RECORDINGS[:1]
LIGHT, DARK = "rgb(251, 251, 250)", "rgb(20, 24, 28)"  # paper of a recording


def course() -> list[Page]:
    """The pages of a book of one notebook."""
    import nbformat

    top = "# 05 · The waste\n\nSee [RoPE](glossary.md#rope).\n\n" + "## Same\n\nx\n\n" * 4
    cells = (
        twins.Cell("markdown", top),
        twins.Cell("code", "nanokv.decode(model, token, cache, start_pos=4)"),
        twins.Cell("markdown", "## Quiz"),
        twins.Cell("code", 'course.quiz("05")'),
        twins.Cell("code", 'q1 = "b"', "solution"),
        twins.Cell("code", "\n".join(f'course.answer("05.q{n}", q1)' for n in (1, 2, 3))),
        twins.Cell("markdown", "## Next"),
    )
    source = twins.Source("05_the_waste", cells)
    notebook = nbformat.reads(twins.to_text(source.solution()), as_version=4)
    printed = nbformat.v4.new_output("stream", name="stdout", text="secret_output")
    notebook.cells[1].outputs = [printed]
    made = book.anchored(book.page(source, running.Run(notebook))).replace(".md", ".html")
    glossary = book.anchored(book.markdown((NOTEBOOKS / "glossary.md").read_text(encoding="utf-8")))
    contents = '<h1>The course</h1><ul><li><a href="05_the_waste.html">05</a></li></ul>'
    return [
        Page(
            "book/05_the_waste.html",
            "05 · The waste",
            made,
            "Course",
            "notebooks/05_the_waste.ipynb",
        ),
        Page("book/glossary.html", "Glossary", glossary, "Glossary", "notebooks/glossary.md"),
        Page(
            "book/claims.html",
            "What the articles say",
            "<h1>Claims</h1>",
            "Course",
            "notebooks/claims.md",
        ),
        Page("book/index.html", "The course", contents, "Course", "notebooks"),
        site.paths(NOTEBOOKS),
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a small site."""
    out = tmp_path_factory.mktemp("site")
    (out / "traces").mkdir()
    (out / "traces" / f"{ONE[0].name}-alone.html").write_text("<p>recorded</p>")
    traces = [
        Page("traces/index.html", "Recordings", recordings.listing(ONE), "Recordings"),
        recordings.page(ONE[0]),
    ]
    texts = [*site.documents(ROOT), *site.for_teachers(NOTEBOOKS)]
    shown = [recordings.live_page(out), *traces]
    site.assemble([*course(), *texts, *api.pages(MODULES), *shown], ROOT, out)
    return out


def rows(out: Path) -> list:
    """The rows of the search: address, part, page, heading, text."""
    text = (out / "search-index.js").read_text(encoding="utf-8")
    return json.loads(re.fullmatch(r"const INDEX = (.*);\n", text, re.DOTALL)[1])


def check_pages(out: Path) -> None:
    """What holds of every page of a site."""
    pages = [path for path in links.pages_of(out) if not path.name.endswith("-alone.html")]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert '<html lang="en">' in text and re.search(r"<title>[^<]{3,}</title>", text), path
        assert text.count("<h1") == 1 and 'class="skip" href="#main-text"' in text, path
        # Of a tag: code may hold such letters too.
        names = re.findall(r'<[a-z][^<>]* id="([^"]*)"', text)
        assert "main-text" in names and len(names) == len(set(names)), path
        assert (
            re.findall(r'<nav aria-label="Parts">.*?</nav>', text)[0].count("<a ") == len(PARTS) + 1
        )
        assert text.count("<img") == len(re.findall(r'<img[^>]* alt="[^"]+', text)), path
        fetched = re.findall(
            r'<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)="([^"]*)"', text
        )
        assert (
            len(fetched) >= 3 and [a for a in fetched if re.match(r"(?!data:)\w+:|/", a)] == []
        ), path
        assert str(ROOT) not in text, path
    assert links.problems(out) == []


# --- the pages ----------------------------------------------------------------------------------------------------


def test_every_page_of_a_small_site(small):
    check_pages(small)
    assert len(links.pages_of(small)) > 20


def test_what_the_hub_reads_of_a_model_card_is_not_on_its_page(small):
    """Markdown takes lines of YAML before a rule for a heading."""
    card = (small / "docs/model-card.html").read_text(encoding="utf-8")
    assert "pipeline_tag" not in card and re.search(r"<main.*?<h(\d)", card, re.DOTALL)[1] == "1"
    for text in ("---\na: b\n---\n# One\n\nTwo\n\n---\n", "# One\n\nTwo\n\n---\n"):
        body = markdown("one.html", text, "Docs", "one.md").body
        assert re.match(r"\s*<h1", body) and "Two" in body and body.count("<hr") == 1


def test_a_table_is_a_table_inside_a_list_too():
    """As on GitHub: no row of a text is left with its bars."""
    body = markdown(
        "a.html", "# A\n\n- b:\n\n  | c | d |\n  |---|---|\n  | 1 | 2 |\n", "Docs", "a.md"
    ).body
    assert re.search(r"<li>.*<table>.*<td>2</td>.*</li>", body, re.DOTALL)
    for page in [*site.documents(ROOT), *site.for_teachers(NOTEBOOKS)]:
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", page.body, flags=re.DOTALL)
        assert re.findall(r"^ *\|.*\|$", text, re.MULTILINE) == [], page.path


def test_a_link_into_the_repository_leads_to_the_page_that_shows_the_file(small):
    code, readme = (
        (small / f"docs/{name}.html").read_text(encoding="utf-8") for name in ("code", "readme")
    )
    assert '<a href="../api/nanokv/inference.html">inference.py</a>' in code
    assert '<a href="contributing.html#a-cache">' in code, "with its anchor"
    assert (
        '<span class="file" title="nanokv/model.py, in the repository">nanokv/model.py</span>'
        in code
    )
    assert '<a href="../book/index.html">notebooks</a>' in readme and ".md" not in re.findall(
        r'href="([^"]*)"', readme
    )
    waste = (small / "book/05_the_waste.html").read_text(encoding="utf-8")
    assert '<a href="glossary.html#rope">' in waste and '<a href="#same">Same</a>' in waste, (
        "a list of headings"
    )
    assert '<h2 id="same-3">' in waste, "each has a place of its own"


def test_the_paths_and_the_teachers_texts_are_reached_from_the_front_page_and_from_each_other(
    small,
):
    front, way, teach = (
        (small / f"{name}.html").read_text("utf-8")
        for name in ("index", "book/paths", "teach/index")
    )
    assert '<a href="book/paths.html">' in front and '<a href="teach/pilot.html">' in front
    assert '<a href="live/live-alone.html">' in front
    assert '<a href="../teach/index.html">Teachers</a>' in way, "in the header"
    assert '<a href="05_the_waste.html">05' in way and '<a href="../docs/authoring.html">' in way
    assert '<a href="07_plan.html">07</a>' in teach and '<a href="../book/glossary.html">' in teach
    assert '<a href="00_plan.html">' in (small / "teach/pilot.html").read_text("utf-8")
    assert '<a href="../teach/index.html">notebooks/teach/</a>' in (
        small / "docs/readme.html"
    ).read_text("utf-8")
    parts = {row[0]: row[1] for row in rows(small)}
    assert (parts["book/paths.html#another-model"], parts["teach/pilot.html#the-hour"]) == (
        "Course",
        "Teachers",
    )


def test_a_picture_is_copied_without_fonts_from_elsewhere(small):
    assert '<img src="../files/docs/chat.svg"' in (small / "docs/readme.html").read_text(
        encoding="utf-8"
    )
    copy, there = (
        (folder / "docs/chat.svg").read_text(encoding="utf-8") for folder in (small / "files", ROOT)
    )
    assert "@font-face" in there and "@font-face" not in copy and "Zorbla" in copy


def test_the_api_has_each_name_with_its_line_and_no_guesses(small):
    page = (small / "api/nanokv/cache/dict_cache.html").read_text(encoding="utf-8")
    line = re.search(
        r'<section id="DictCache">.*?<a class="line" href="#L-(\d+)">', page, re.DOTALL
    )[1]
    lines = (ROOT / "nanokv/cache/dict_cache.py").read_text().splitlines()
    assert lines[int(line) - 1].startswith("class DictCache")
    assert page.count("<details") >= 1 and "View Source" not in page and "Edit on" not in page
    base = (small / "api/nanokv/cache/base.html").read_text(encoding="utf-8")
    assert "#NoCache.append" not in base and '<a href="#NoCache">NoCache</a>' in base


def test_the_modules_of_the_api():
    names = api.modules()
    assert {"nanokv", "nanokv.cache.paged", "weights_loader", "nanokv.lab.faults"} <= set(
        names
    ) and len(names) > 100
    assert [name for name in names if re.search(r"course\.checks|\.cli|__main__", name)] == [], (
        "answers and commands"
    )


def test_a_recording_stands_below_the_command_that_makes_it(tmp_path):
    """In the book: every such command of the notebooks has one, and what nobody recorded has none."""
    found = []
    for source in map(twins.read, twins.sources(NOTEBOOKS)):
        for cell in source.solution()["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown" and "nanokv trace " in text:
                body = recordings.in_place(book.markdown(text))
                found += re.findall(r'<iframe src="../traces/(.*)-alone.html" loading="lazy"', body)
                assert body.index("</pre>") < body.index("<iframe")
    assert found == ["answer", "recall", "restart"]
    other = book.markdown("```bash\nnanokv trace 'Who are you?' -o a.html\n```")
    assert "</pre>" in other and recordings.in_place(other) == other
    here = recordings.in_place(book.markdown("Type `nanokv live --open`."))
    assert '<a href="../live/live-alone.html"><code>nanokv live --open</code></a>' in here


# --- the search ---------------------------------------------------------------------------------------------------


def test_the_search_has_names_terms_headings_and_code(small):
    found = rows(small)
    assert len(found) > 200 and len({row[0] for row in found}) == len(found)
    heads = {(part, heading): address for address, part, page, heading, text in found}
    assert heads["API", "DictCache.append"] == "api/nanokv/cache/dict_cache.html#DictCache.append"
    assert heads["Glossary", "RoPE"] == "book/glossary.html#rope"
    assert heads["Docs", "The alphabet"] == "docs/code.html#the-alphabet"
    texts = {part: " ".join(row[4] for row in found if row[1] == part) for part in PARTS}
    assert (
        ("Glossary", "start_pos") in heads
        and "start_pos" in texts["Course"]
        and "start_pos" in texts["API"]
    )
    assert "secret_output" not in texts["Course"] and "Kept as" not in texts["Recordings"]
    source = " ".join(
        row[4] for row in found if row[0].startswith("api/nanokv/cache/dict_cache.html")
    )
    assert "torch.cat(" not in source, (
        "the source of a module stands on its page and not in the search"
    )


def test_sections_are_cut_at_headings_and_members():
    body = (
        'before<h1 id="a">One <code>x</code></h1><p>first</p><script>no()</script><p>line</p>'
        '<section id="K"><div class="attr">class K</div><div id="K.f" class="classattr">says</div></section>'
        '<details class="source"><details>inner</details>hidden</details>after'
    )
    assert search.sections(body) == [
        (0, "", "", "before"),
        (1, "a", "One x", "first line"),
        (2, "K", "K", "class K"),
        (3, "K.f", "K.f", "says after"),
    ]


# --- the checker --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markup", "why"),
    [
        (
            '<a href="b.html#here">b</a><a href="https://example.com/x">x</a><img src="data:,"><a href="#me" id="me">',
            "",
        ),
        ('<a href="c.html">c</a>', "a.html: c.html: there is no such file"),
        ('<a href="b.html#gone">b</a>', "a.html: b.html#gone: b.html has no such anchor"),
        ('<a href="#gone">b</a>', "a.html: #gone: a.html has no such anchor"),
        ('<img src="b.png">', "a.html: b.png: there is no such file"),
        ('<a href="/b.html">b</a>', "a.html: /b.html: an absolute path"),
        ('<a href="sub">b</a>', "a.html: sub: there is no such file"),
        (
            '<a href="javascript:alert()">b</a>',
            "a.html: javascript:alert(): is not a link with http, https or mailto",
        ),
        (
            '<script src="https://cdn.example/x.js"></script>',
            "a.html: https://cdn.example/x.js: is on another site",
        ),
        ('<img src="//cdn.example/x.png">', "a.html: //cdn.example/x.png: is on another site"),
        (
            "<style>p { background: url(http://cdn.example/) }</style>",
            "a.html: http://cdn.example/: is on another site",
        ),
        ('<p style="background: url(x.png)">', "a.html: x.png: there is no such file"),
        ('<a href="http://[x">b</a>', "a.html: http://[x: not a valid address: Invalid IPv6 URL"),
        (
            '<svg><a xlink:href="https://example.com/x"/><use xlink:href="#me"/><g id="me"/></svg>',
            "",
        ),
        ('<svg><a xlink:href="gone.html"/></svg>', "a.html: gone.html: there is no such file"),
        ('<svg><use xlink:href="#gone"/></svg>', "a.html: #gone: a.html has no such anchor"),
        (
            '<svg><image xlink:href="https://x.example/a.png"/></svg>',
            "a.html: https://x.example/a.png: is on another site",
        ),
        (
            '<meta http-equiv="refresh" content="5"><meta http-equiv="Refresh" content="0; url=b.html#here">',
            "",
        ),
        (
            '<meta http-equiv="refresh" content="0; url=gone.html">',
            "a.html: gone.html: there is no such file",
        ),
        (
            '<meta http-equiv="REFRESH" content="0,URL = \'/b.html\'">',
            "a.html: /b.html: an absolute path",
        ),
        (
            '<meta http-equiv="refresh" content="1.5 https://x.example">',
            "a.html: https://x.example: is on another site",
        ),
    ],
)
def test_an_address_that_leads_nowhere_or_elsewhere_is_named(tmp_path, markup, why):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(markup)
    assert links.problems(tmp_path) == [why] * bool(why)


def test_style_sheets_and_pictures_are_checked_too(tmp_path):
    (tmp_path / "a.css").write_text(
        '@import "https://x.example/a.css"; p { background: url(gone.png) }'
    )
    (tmp_path / "a.svg").write_text(
        "<svg><style>@font-face { src: url('https://x.example/f.woff') }</style><g id='g' style='fill: url(#g)'/>"
        "<image xlink:href='lost.png'/><image href='data:,'/></svg>"
    )
    assert [line.split(": ")[1] for line in links.problems(tmp_path)] == [
        "https://x.example/a.css",
        "gone.png",
        "https://x.example/f.woff",
        "lost.png",
    ]


def test_a_file_of_this_machine_is_no_file_of_the_repository(tmp_path):
    secret, out = tmp_path / "secret.png", tmp_path / "out"
    secret.write_bytes(b"secret")
    (tmp_path / "root" / "docs").mkdir(parents=True)
    body = f'<img alt="" src="{secret}"><a href="{secret}">x</a>'
    write([Page("docs/a.html", "a", body, "Docs", "docs/a.md")], tmp_path / "root", out)
    assert not (out / "files").exists() and body in (out / "docs" / "a.html").read_text()
    assert f"docs/a.html: {secret}: an absolute path" in links.problems(out)


def test_a_broken_link_ends_the_build_with_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "SHOWN", 99)  # the front page has links to all that is missing here
    bad = Page("docs/x.html", "X", '<h1>X</h1><a href="nowhere.md">x</a>', "Docs", "docs/x.md")
    with pytest.raises(
        CourseError, match=r"broken links: .*docs/x\.html: nowhere\.md: there is no such file"
    ):
        site.assemble([bad], ROOT, tmp_path)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_book_that_lacks_a_page_is_refused_before_any_work(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "pages", None)
    (tmp_path / "book").mkdir()
    argv = [
        "course",
        "site",
        "--folder",
        NOTEBOOKS,
        "-o",
        tmp_path / "out",
        "--book",
        tmp_path / "book",
    ]
    code, out, err = cli(*argv)
    assert code == 2 and "has no 00_the_bridge.html" in err and "nanokv course book -o" in err
    assert out == "" and not (tmp_path / "out").exists()
    code, _, err = cli("course", "site", "--folder", tmp_path / "notebooks", "-o", tmp_path / "out")
    assert code == 2 and "has no README.md and docs" in err


def test_a_page_that_is_older_than_its_notebook_is_told(tmp_path):
    import os

    source = NOTEBOOKS / "source" / "05_the_waste.py"
    for name, seconds in (("05_the_waste", -1), ("06_build_the_cache", 1)):
        (tmp_path / f"{name}.html").write_text("")
        when = (NOTEBOOKS / "source" / f"{name}.py").stat().st_mtime + seconds
        os.utime(tmp_path / f"{name}.html", (when, when))
    assert site.outdated(NOTEBOOKS, tmp_path) == [(tmp_path / "05_the_waste.html", source)]
    assert site.outdated(NOTEBOOKS, None) == []


def test_a_recording_that_fails_says_why(tmp_path):
    bad = recordings.Recording("bad", "Bad", "Nothing.", "x", "no_such_fault")
    with pytest.raises(
        CourseError, match=r"the recording bad: .*no fault is called 'no_such_fault'"
    ):
        recordings.record(bad, tmp_path / "bad.html")
    faults = {one.fault for one in recordings.RECORDINGS} - {""}
    assert len(recordings.RECORDINGS) == 4 and len(faults) == 2


# --- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture
def page(driver, small):
    """open(path, width, dark): a page of the small site; nothing was asked for but files of it, and nothing failed."""

    def open_page(path, width=1200, dark=False):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        name, mark, rest = path.partition("?")
        driver.get((small / name).as_uri() + mark + rest)
        return driver

    driver.get((small / "index.html").as_uri())
    driver.execute_script("localStorage.clear()")
    for kind in ("browser", "performance"):  # what the browser's own first page asked for, among it
        driver.get_log(kind)
    yield open_page
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    assert asked and [url for url in asked if not url.startswith((small.as_uri(), "data:"))] == []
    assert (
        [m for m in messages if m["method"] == "Network.loadingFailed"]
        == []
        == driver.get_log("browser")
    )


def results(driver) -> list[tuple[str, str]]:
    """(heading, address within the site) of what was found."""
    found = driver.find_elements("css selector", "#results a")
    return [
        (link.text, link.get_attribute("href").partition("/site")[2].partition("/")[2])
        for link in found
    ]


def press(driver, *keys):
    from selenium.webdriver.common.keys import Keys

    for key in keys:
        driver.switch_to.active_element.send_keys(getattr(Keys, key, key))


@pytest.mark.slow
def test_the_search_finds_terms_and_names_from_any_page(page):
    driver = page("docs/code.html")
    press(driver, "/")
    leave(driver)
    press(driver, "start_pos", "ENTER")
    until(driver, drawn)
    assert (
        driver.current_url.endswith("search.html?q=start_pos")
        and "for “start_pos”" in driver.page_source
    )
    assert results(driver)[0] == ("start_pos", "book/glossary.html#start_pos")
    assert {"api", "docs", "book"} <= {address.split("/")[0] for _, address in results(driver)}
    for question, first in (
        ("DictCache.append", "api/nanokv/cache/dict_cache.html#DictCache.append"),
        ("dictcache", "api/nanokv/cache/dict_cache.html#DictCache"),
        ("kv cache", "book/glossary.html#kv-cache"),
        ("alphabet", "docs/code.html#the-alphabet"),
        ("waste", "book/05_the_waste.html#05--the-waste"),
    ):
        page(f"search.html?q={question}")
        assert first in [address for _, address in results(driver)][:3], question
    for question, typed in (
        ("kv cache", "kv-cache"),
        ("quantized", "quantised"),
        ("rope", "positional encoding"),
    ):
        page(f"search.html?q={question}")
        wanted = results(driver)[0]
        page(f"search.html?q={typed}")
        assert results(driver)[0] == wanted, typed
    for question, most in (
        ("kv cache", 0),
        ("prefill", 0),
        ("attention", 0),
        ("quantized", 2),
        ("temperature", 2),
    ):
        page(f"search.html?q={question}")
        assert sum(address.startswith("api/") for _, address in results(driver)[:3]) <= most, (
            question
        )
    page("search.html?q=--prefill-worker")
    said = [row.text for row in driver.find_elements("css selector", "#results li")]
    assert said and all("--prefill-worker" in text for text in said)
    page("search.html?q=zzzqq")
    assert results(driver) == [] and "Nothing found" in driver.find_element("id", "found").text
    page("search.html?q=<img src=x onerror=alert(1)>[(")
    assert driver.find_elements("css selector", "main img") == []


@pytest.mark.slow
def test_a_quiz_is_judged_at_once_and_kept(page):
    driver = page("book/05_the_waste.html")
    question = checking.exercises("05").QUESTIONS[1]
    name = question.id

    def choose(letter):
        option = driver.find_element("css selector", f'[name="{name}"][value="{letter}"]')
        option.find_element("xpath", "..").click()
        return option.find_element("xpath", "../..").find_element("css selector", "p").text

    for letter, (_, comment) in question.options.items():
        word = {"right": "Right.", "wrong": "Not yet."}[question.judge(letter).state]
        assert choose(letter) == f"{word} {comment}"
    driver = page("book/05_the_waste.html")
    said = [p.text for p in driver.find_elements("css selector", ".asked p")]
    assert said == ["", f"{word} {comment}", ""], "one was answered"


@pytest.mark.slow
def test_the_dark_switch_is_remembered_on_every_page(page):
    driver = page("index.html")
    colour = "return getComputedStyle(document.body).backgroundColor"
    assert driver.execute_script(colour) == "rgb(255, 255, 255)"
    driver.find_element("id", "theme-switch").click()
    dark = driver.execute_script(colour)
    assert dark == "rgb(21, 23, 26)"
    page("docs/code.html")
    assert driver.execute_script(colour) == dark
    assert driver.find_element("id", "theme-switch").get_attribute("aria-pressed") == "true"
    page("index.html", dark=True)
    driver.find_element("id", "theme-switch").click()
    page("api/nanokv/cache/dict_cache.html", dark=True)
    assert driver.execute_script(colour) == "rgb(255, 255, 255)", (
        "light was chosen, whatever the system says"
    )
    code = "return getComputedStyle(document.querySelector('.highlight .k, .pdoc-code .k, .attr')).color"
    assert driver.execute_script(code) != "rgb(255, 123, 114)", "and the colours of code go with it"


@pytest.mark.slow
def test_the_dark_switch_reaches_a_recording_which_alone_follows_the_system(page, small):
    alone = small / "traces" / f"{ONE[0].name}-alone.html"
    alone.unlink()  # the stand-in
    recordings.record(replace(ONE[0], tokens=4), alone)
    driver = page(f"traces/{ONE[0].name}.html")

    def frame(code):
        driver.switch_to.frame(0)
        try:
            return driver.execute_script(code)
        finally:
            driver.switch_to.default_content()

    def colour(theme):
        until(driver, lambda _: frame(background) == theme)
        return frame("return document.querySelector('canvas.map').toDataURL()")

    background = "return getComputedStyle(document.body).backgroundColor"
    light = colour(LIGHT)
    frame("goTo(2)")
    driver.find_element("id", "theme-switch").click()
    assert colour(DARK) != light and frame("return view.step") == 2, (
        "pictures too, and nothing is begun again"
    )
    page("index.html")
    page(f"traces/{ONE[0].name}.html")
    dark = colour(DARK)
    driver.find_element("id", "theme-switch").click()
    assert dark != light == colour(LIGHT)
    frame("postMessage({theme: 'blue'}, '*'); postMessage(null, '*')")
    for system, theme in ((True, DARK), (False, LIGHT)):
        page(f"traces/{ONE[0].name}-alone.html", dark=system)
        assert driver.execute_script(background) == theme, "light was chosen for the site only"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_no_page_scrolls_sideways_and_the_keyboard_skips_the_header(page, width):
    for path in (
        "index.html",
        "docs/readme.html",
        "docs/code.html",
        "docs/real-models.html",
        "book/05_the_waste.html",
        "book/paths.html",
        "teach/index.html",
        "teach/mistakes.html",
        "teach/00_plan.html",
        "api/nanokv/inference.html",
        "api/index.html",
        "traces/answer.html",
        "search.html?q=a",
    ):
        driver = page(path, width)
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
            path
        )
    driver = page("docs/model-card.html", width)
    table = driver.find_element("css selector", ".rows")
    assert driver.execute_script(
        "return arguments[0].scrollWidth <= arguments[0].clientWidth", table
    )
    assert table.find_element("tag name", "th").is_displayed() == (width > 600)
    head = "return getComputedStyle(arguments[0].querySelector('td'), '::before').content"
    assert driver.execute_script(head, table) == ('"task: "' if width < 600 else "none")
    page("docs/code.html", width)
    press(driver, "TAB")
    assert driver.switch_to.active_element.text == "Skip to the text"
    press(driver, "ENTER")
    assert driver.switch_to.active_element.get_attribute("id") == "main-text"


# --- all of it ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_site(tmp_path, monkeypatch):
    """The notebooks were executed for the tests of the book; recordings and the API are made here."""
    from solved_notebooks import solved

    paths = {path.stem[:2]: path for path in twins.sources(NOTEBOOKS)}
    monkeypatch.setattr(
        running, "run", lambda made, limit: solved(paths[made["metadata"]["nanokv"]["notebook"]])
    )
    built = site.build(NOTEBOOKS, tmp_path)
    check_pages(tmp_path)
    assert built.pages > 180 and built.size < 48e6
    found = rows(tmp_path)
    heads = {(part, heading) for _, part, _, heading, _ in found}
    assert {
        ("API", "PagedCache"),
        ("API", "prefill"),
        ("Glossary", "start_pos"),
        ("Glossary", "RoPE"),
    } <= heads
    assert {row[0].partition("#")[0] for row in found if "start_pos" in row[4]} >= {
        "book/06_build_the_cache.html",
        "docs/life-of-a-token.html",
        "api/nanokv/inference.html",
    }
    assert {path.stem for path in (tmp_path / "traces").glob("*-alone.html")} == {
        f"{one.name}-alone" for one in recordings.RECORDINGS
    }
