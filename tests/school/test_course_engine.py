"""Notebook 15: each typical slip in a learner's engine is told by its name; what is given serves several readers."""

import linecache
import re
from itertools import count
from pathlib import Path
from threading import Thread
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import torch

import nanokv
from nanokv.errors import CapacityError
from nanokv.lab.study.equality import small_model
from nanokv.school.course import checking, exam, mistakes, twins
from nanokv.school.course.checks import nb15
from nanokv.school.course.own_engine import Engine
from nanokv.school.course.own_server import Server

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCE = twins.read(next((NOTEBOOKS / "source").glob("15_*.py")))
CELLS = count()
GIVEN = {name: getattr(nb15, name) for name in ("admit", "share", "preempt", "reserve", "step")}
NAMED = {(known.id, known.name) for known in mistakes.registered("15")}


def spoiled(id: str, name: str, old: str, new: str):
    """The solution of an exercise with a slip in it, as a cell of the notebook makes it."""
    text = exam.solution(SOURCE, id)
    assert not old or old in text, old
    file = f"/tmp/ipykernel_15/{next(CELLS)}.py"
    text = text.replace(old, new) if old else text
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = {"__name__": "__main__", "torch": torch, "CapacityError": CapacityError, **GIVEN}
    exec(compile(text, file, "exec"), names)
    return names[name]


def judged(id: str, name: str, old: str, new: str, mistake: str):
    check = checking.find(id)
    outcome = check.judge(spoiled(id, name, old, new), check.case())
    assert (outcome.state, outcome.mistake) == ("wrong" if mistake else "right", mistake), (
        outcome.message
    )
    assert not mistake or (id, mistake) in NAMED
    return outcome


ROOM, PAGES = "promised + pages > free", "-(-tokens // size)"
OVERDRAWN = """
def share(pending, budget):
    given = [int(tokens == 1) for tokens in pending]
    budget -= sum(given)
    for i, tokens in enumerate(pending):
        if tokens > 1:
            given[i] = min(tokens, budget)
            budget -= given[i]
    return given
"""


@pytest.mark.parametrize(
    ("id", "name", "old", "new", "mistake"),
    [
        ("15.1", "admit", "promised += pages + 1", "promised += -(-(tokens + 1) // size)", "token ahead"),
        ("15.1", "admit", PAGES, "tokens // size + 1", "rounded too far"),
        ("15.1", "admit", ROOM, "promised + pages + 1 > free", "one page spare"),
        ("15.2", "share", "(True, False)", "(False, True)", "prompts first"),
        ("15.2", "share", "return given", "return [n for n in given if n]", "zeros left out"),
        ("15.2", "share", "", OVERDRAWN, "overdrawn"),
        ("15.2", "share", "", OVERDRAWN.replace("return given", "return [max(0, n) for n in given]"),
         "overdrawn, cut at 0"),
    ],
)  # fmt: skip
def test_a_typical_plan_is_told_what_is_wrong_with_it(id, name, old, new, mistake):
    judged(id, name, old or exam.solution(SOURCE, id), new, mistake)


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("", "", ""),
        ("request.cache.free()\n", "pass\n", ""),  # a cache that nobody holds gives its pages back
        ("request.cache = None", "pass", "cache stays"),
        ("request.cache.free()\n    request.cache = None", "pass", "pages kept"),
        ("engine.running.remove(request)", "pass", "still runs"),
        ("engine.running.remove(request)", "engine.running.clear()", "running"),
        ("engine.running.remove(request)", "engine.running.pop()", "still runs"),
        ("engine.waiting.insert", "request.done = True\n    engine.waiting.insert", "done"),
        (
            "engine.waiting.insert",
            "request.prompt = request.known\n    engine.waiting.insert",
            "prompt",
        ),
        ("engine.waiting.insert(0, request)", "engine.submit(request.known, 4)", "another request"),
        ("request.cache.free()", "engine.pool.free += request.cache.tables[0]", "free twice"),
        (
            "engine.waiting.insert(0, request)",
            "from collections import deque\n    engine.waiting = deque([request, *engine.waiting])",
            "lists",
        ),
        ("engine.waiting.insert(0, request)", "engine.waiting.append(request)", "end of the queue"),
        ("engine.waiting.insert(0, request)", "pass", "lost"),
        ("engine.waiting.insert", "request.answer = []\n    engine.waiting.insert", "answer"),
        ("request.cache.free()", "return", "nothing done"),
        (
            "engine.waiting.insert(0, request)",
            "engine.waiting.append(request)\n    engine.waiting.sort(key=lambda r: r.number)",
            "",
        ),
    ],
)
def test_a_typical_preemption_is_told_what_is_wrong_with_it(old, new, mistake):
    old = old.rstrip("\n")
    judged("15.3", "preempt", old, new.rstrip("\n"), mistake)


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("", "", ""),
        ("engine.running[-1]", "engine.running[0]", "oldest"),
        ("preempt(engine, engine.running[-1])", "return False", "waits"),
        ("preempt(engine, engine.running[-1])", "preempt(engine, request)", "itself first"),
        ("preempt(engine, engine.running[-1])", "pass", "endless"),
        (
            "engine.running[-1]",
            "[r for r in engine.running if r is not request or len(engine.running) == 1][-1]",
            "others only",
        ),
        ("        try", "        preempt(engine, engine.running[-1])\n        try", "too early"),
        ("preempt(engine, engine.running[-1])", "engine.finish(engine.running[-1])", "lost"),
        ("preempt(engine, engine.running[-1])", "engine.running[-1].cache.free()", "pages only"),
        ("request.fed, request.fed + tokens", "request.fed, tokens", "not taken"),
        ("request.fed + tokens)", "request.fed + tokens + 1)", "not taken"),
        ("return True", "return", "None"),
        ("return False", "return True", "returned"),
        (
            "request.cache.reserve(request.fed, request.fed + tokens)",
            "if engine.pages_of(request.fed + tokens) - len(request.cache.tables[0]) > engine.free:"
            "\n                raise CapacityError('no')",
            "not taken",
        ),
        (
            "while request in engine.running:",
            "for _ in 'ab'[: 1 + (request in engine.running)]:",
            "no second try",
        ),
    ],
)
def test_a_typical_reservation_is_told_what_is_wrong_with_it(old, new, mistake):
    if mistake == "None":
        check = checking.find("15.4")
        outcome = check.judge(spoiled("15.4", "reserve", old, new), check.case())
        assert "is a return missing?" in outcome.message
        return
    judged("15.4", "reserve", old, new, mistake)


EARLY = "        if request.pending == 0:\n            token"
ENDED = "if token in engine.stop or len(request.answer) == request.most:"


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("", "", ""),
        ("return drawn", "return tuple(drawn)", ""),
        ("engine.start()", "pass", "not admitted"),
        (
            "admit(known, engine.promised, engine.free, engine.size, room)",
            "len(known)",
            "too many admitted",
        ),
        ("for _ in range(admit", "for _ in range(0 * admit", "not admitted"),
        (" and reserve(engine, request, tokens)", "", "not reserved"),
        (
            "reserve(engine, request, tokens)",
            "reserve(engine, request, request.pending)",
            "reserved too much",
        ),
        ("len(request.known)", "len(request.prompt)", "too many admitted"),
        ("return drawn", "yield from drawn", "generator"),
        ("engine.feed(work)", "engine.feed(pair for pair in work)", ""),
        ("request in engine.running and tokens", "tokens", ""),  # reserve says it as well
        ("engine.budget)", "2 * engine.budget)", "budget"),
        (
            "zip(running, sizes):\n",
            "zip(running, sizes):\n        tokens = request.pending\n",
            "budget",
        ),
        (EARLY, EARLY.replace("request.pending == 0", "True"), "drawn early"),
        ("request.answer.append(token)", "pass", "not drawn"),
        ("int(row.argmax())", "row.argmax()", "no int"),
        ("int(row.argmax())", "int(row.argmin())", "wrong row"),
        (
            "for (request, _), row in zip(work,",
            "for (request, _), row in zip(work[::-1],",
            "wrong row",
        ),
        (ENDED, "if len(request.answer) == request.most:", "stop ignored"),
        (ENDED, "if token in engine.stop:", "goes on"),
        (ENDED, "if token in engine.stop or len(request.answer) > request.most:", "goes on"),
        (ENDED, "if True:", "finished early"),
        (
            "engine.finish(request)",
            "engine.finish(request)\n                engine.finish(request)",
            "finished twice",
        ),
        ("drawn.append((request, token))", "drawn.append(token)", "returned"),
        ("return drawn", "return drawn[::-1]", "returned"),
        ("return drawn", "pass", "None"),
        ("engine.feed(work)", "[engine.feed([one])[0] for one in work]", "two forwards"),
        (
            "if request in engine.running and tokens",
            "if request.pending > 1 and tokens",
            "decode left out",
        ),
        ("engine.feed(work)", "engine.feed([])", "nothing fed"),
        ("engine.feed(work)", "[]", "no forward"),
        (
            "request in engine.running and tokens and reserve(engine, request, tokens)",
            "tokens and (reserve(engine, request, tokens) or True)",
            "preempted",
        ),
        ("engine.budget)", "max(1, engine.budget - 6))", "more steps"),
        ("work.append((request, tokens))", "work.append((request, tokens + 1))", "pending"),
    ],
)
def test_a_typical_step_is_told_what_is_wrong_with_it(old, new, mistake):
    if mistake == "None":
        check = checking.find("15.5")
        assert (
            "is a return missing?"
            in check.judge(spoiled("15.5", "step", old, new), check.case()).message
        )
        return
    judged("15.5", "step", old, new, mistake)


OWN = """
def stream(engine, request):
    while not request.done:
        for other, token in engine.step():
            if other is request:
                yield token
"""
LATE = """
def stream(engine, request):
    while not request.done:
        engine.step()
    yield from request.answer
"""

TAKEN = """
def stream(engine, request):
    while request.answer or not request.done:
        if request.answer:
            yield request.answer.pop(0)
        else:
            engine.step()
"""


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("", "", ""),
        (None, OWN, "own steps only"),
        (None, LATE, "all at the end"),
        (None, "def stream(engine, request):\n    return request.answer", "ends early"),
        (None, "def stream(engine, request):\n    return 7", "no generator"),
        (None, "def stream(engine, request):\n    print(request.answer)", "no generator"),
        (None, TAKEN, "taken out"),
        ("sent < len(request.answer) or ", "", "rest lost"),
        ("yield request.answer[sent]", "yield request, request.answer[sent]", "no token"),
        (None, "def stream(engine, request):\n    yield from []", "ends early"),
        (" or not request.done", "", "ends early"),
        ("sent += 1", "engine.step()", "endless"),
        ("yield request.answer[sent]", "yield request.answer[-1 - sent]", "tokens"),
        ("            yield request", "            yield 1\n            yield request", "twice"),
    ],
)
def test_a_typical_stream_is_told_what_is_wrong_with_it(old, new, mistake):
    if old is None:
        text = exam.solution(SOURCE, "15.6")
        old = text
    judged("15.6", "stream", old, new, mistake)


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("", "", ""),
        ("split(size", "split(-(-products.shape[1] // len(products))", "order by rows"),
        ("split(size", "split(products.shape[1]", "no blocks"),
        ("products.split(size, dim=1)", "products.split(size, dim=1)[::-1]", "another order"),
        ("products.split(size, dim=1)", "products.unfold(1, size, size).unbind(1)", "last block"),
        ("return total", "return total / products.shape[1]", "terms"),
        ("return total", "return total.flip(0)", "terms"),
        ("return total", "return total * float('nan')", "terms"),
        ("return total", "return total * (len(products) > 1)", "terms"),
        ("products.split", "products.double().split", "dtype"),
    ],
)
def test_a_typical_sum_is_told_what_is_wrong_with_it(old, new, mistake):
    judged("15.7", "sums", old, new, mistake)


@pytest.mark.parametrize(
    "add",
    [
        lambda products, size: products.sum(1),
        lambda products, size: products @ torch.ones(products.shape[1]),
        lambda products, size: sum(block.sum(1) for block in products.split(size, dim=1)),
    ],
)
def test_a_sum_of_torch_has_an_order_of_its_own(add):
    """Which one depends on the machine."""
    check = checking.find("15.7")
    assert check.judge(add, check.case()).mistake in {"another order", "order by rows"}


def test_the_first_difference_is_told_by_its_digits():
    """Nine digits tell any two fp32 numbers apart; allclose calls these equal."""
    outcome = judged("15.7", "sums", "split(size", "split(-(-64 // len(products))", "order by rows")
    here, there = re.findall(r"-?\d+\.\d{9}", outcome.message)
    assert here != there and float(here) == pytest.approx(float(there), rel=1e-4)


@pytest.mark.parametrize("id", [f"15.{n}" for n in range(1, 8)])
@pytest.mark.parametrize("odd", [..., None, 7, "step", print, lambda *a: exit(3), type])
def test_an_absurd_answer_never_raises(id, odd):
    check = checking.find(id)
    assert check.judge(odd, check.case()).state == ("unanswered" if odd in (..., None) else "wrong")


@pytest.mark.parametrize("id", [f"15.{n}" for n in range(1, 8)])
def test_a_stub_is_not_answered(id):
    check = checking.find(id)
    assert check.judge(lambda *_: ..., check.case()).state == "unanswered"


# --- what is given ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pages", "budget"), [(64, 64), (9, 12)])
def test_the_given_engine_answers_as_each_request_alone_and_as_nanokvs(pages, budget):
    model = small_model()
    prompts = [[(7 * i + j) % 61 for j in range(n)] for i, n in enumerate((5, 21, 2, 13, 9))]
    own = Engine(model, nb15.step, pages=pages, size=4, budget=budget, most=4)
    own.stop = ()
    asked = [own.submit(prompt, 9) for prompt in prompts]
    own.run()
    theirs = nanokv.Engine(model, pages=pages, page_size=4, step_tokens=budget, max_running=4)
    others = [theirs.submit(p, max_new_tokens=9, eos_token_ids=[]) for p in prompts]
    theirs.run()
    alone = [list(nanokv.generate(model, p, max_new_tokens=9, eos_token_ids=[])) for p in prompts]
    assert [r.answer for r in asked] == [r.tokens for r in others] == alone
    assert own.free == pages and all(request.done for request in asked)
    assert ("x" in own.timeline()) == (theirs.metrics.preemptions > 0) == (pages == 9)


def test_the_work_of_a_forward_may_be_read_only_once():
    lazy = spoiled("15.5", "step", "engine.feed(work)", "engine.feed(pair for pair in work)")
    answers = []
    for one in (lazy, nb15.step):
        own = Engine(small_model(), one, pages=9, size=4, budget=12)
        asked = [own.submit([n] * n, 6) for n in (5, 12)]
        own.run()
        answers.append([request.answer for request in asked])
    assert answers[0] == answers[1]


def test_a_request_that_can_never_fit_is_refused():
    own = Engine(small_model(), nb15.step, pages=2, size=4)
    with pytest.raises(CapacityError, match="needs 3 pages, and the pool has 2"):
        own.submit([1] * 6, 4)
    assert own.step() == [] and own.timeline() == ""


def test_the_server_streams_to_several_readers_and_shows_the_steps():
    model, tokenizer = nanokv.load("tiny", device="cpu")
    engine = Engine(model, nb15.step, pages=6, budget=24)
    server = Server(engine, nb15.stream, tokenizer.encode, tokenizer.text_of, most=8)
    got = {}

    def read(question):
        with urlopen(f"{server.address}ask?q={quote(question)}") as answer:
            got[question] = answer.read().decode()

    questions = ["What is a cache?", "Owls and 日本", "x" * 400]
    readers = [Thread(target=read, args=(question,)) for question in questions]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    for question in questions[:2]:
        ids = tokenizer.encode(question)
        alone = list(nanokv.generate(model, ids, max_new_tokens=8))
        assert got[question] == tokenizer.text_of(alone)
    assert "pages, and the pool has 6" in got[questions[2]]
    with urlopen(f"{server.address}steps") as steps:
        assert steps.read().decode().splitlines() == engine.timeline().splitlines()
    with urlopen(server.address) as page:
        assert "<h1>My engine</h1>" in page.read().decode()
    server.close()


@pytest.mark.slow
def test_the_page_shows_the_last_steps_each_row_with_its_number(driver):
    """Rows of long ago are not drawn, and those that are keep their numbers, also on a narrow screen."""
    from selenium.webdriver.support.ui import WebDriverWait

    from browser import find, look

    model, tokenizer = nanokv.load("tiny", device="cpu")
    engine = Engine(model, nb15.step, pages=16, budget=24)
    server = Server(engine, nb15.stream, tokenizer.encode, tokenizer.text_of, most=70)
    engine.stop = ()
    for question in ("one", "two", "three"):
        list(server.pieces(question))
    look(driver, 390)
    driver.get(server.address)
    drawn = WebDriverWait(driver, 10).until(lambda d: find(d, "#steps").text)
    assert [line.split()[0] for line in drawn.splitlines()] == ["1", "2"]
    assert max(map(len, drawn.splitlines())) == 5 + 120
    label = find(driver, "#steps span")
    assert label.rect["x"] >= find(driver, "#steps").rect["x"]
    field = find(driver, "input")
    field.send_keys("What is a cache?")
    field.submit()
    WebDriverWait(driver, 20).until(lambda d: "Pd" in find(d, "#steps").text.splitlines()[-1])
    assert find(driver, "#answers").get_attribute("start") == "3"
    server.close()
