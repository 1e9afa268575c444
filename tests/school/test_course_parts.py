"""The thread of the course: what a right answer keeps, what a later notebook takes, and when that is the reference."""

import ast
import functools
import linecache
import os
import re
import time
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import nanokv
import notebook_slices
from nanokv.errors import CourseError
from nanokv.school import course
from nanokv.school.course import alone, checking, exam, log, mistakes, parts, session, twins

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CELLS = count()

ATTEND = """
def attend(q, k, v):
    visible = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1) @ v
"""
HELPED = """
import math
import torch.nn.functional as F
from torch import Tensor
LOW = -math.inf
SIZES = {"causal": (1, 0)}

def visible(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril(SIZES["causal"][1])

class Mask:
    @staticmethod
    def on(scores):
        return scores.masked_fill(~visible(len(scores)), LOW)

@torch.inference_mode()
def attend(q, k, v):
    F = torch.nn.functional
    table = q @ k.T
    return F.softmax(Mask.on(table / math.sqrt(q.shape[-1])), -1) @ v
"""


def cells(*texts: str) -> dict:
    """The names of a notebook after these cells, whose texts Jupyter leaves in linecache."""
    names = {"__name__": "__main__", "torch": torch, "nanokv": nanokv, "table": torch.ones(3)}
    names["keep"] = parts.reference("prefix")  # as a cell of notebook 12 has it
    for name in ("preempt", "admit", "share", "reserve"):  # and those of notebook 15
        names[name] = parts.reference(name)
    for text in texts:
        file = f"/tmp/ipykernel_7/{next(CELLS)}.py"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), names)
    return names


def kept(folder, text: str, name: str = "attend", id: str = "02.2") -> str:
    return parts.keep(id, cells(text)[name], folder)


@pytest.fixture
def working(tmp_path, monkeypatch):
    """Somebody works in a notebook in this folder."""
    monkeypatch.setattr(log, "_own", None)
    monkeypatch.delenv(log.VARIABLE, raising=False)
    monkeypatch.setattr(session, "_PARTS", {})
    log.keep(tmp_path)
    return tmp_path


# --- what is kept -------------------------------------------------------------------------------------------------


def test_a_right_answer_is_kept_and_a_later_notebook_takes_it(working, capsys):
    wrong = cells("def attend(q, k, v):\n    return v")["attend"]
    assert not session.check("02.2", wrong) and not (working / "my").exists()
    assert session.check("02.2", cells(ATTEND)["attend"])
    assert capsys.readouterr().out.endswith(
        "02.2: right.\n02.2: kept as my/attention.py, for later notebooks.\n"
    )
    q = torch.randn(4, 6)
    assert torch.allclose(session.mine("attention")(q, q, q), cells(ATTEND)["attend"](q, q, q))
    assert capsys.readouterr().out == "attention: yours (my/attention.py)\n"
    assert [path.name for path in (working / "my").iterdir()] == ["attention.py"]
    assert session.check("05.1", (26, 8)) and "kept" not in capsys.readouterr().out, (
        "it makes no part"
    )


def test_a_part_takes_along_what_it_uses_and_nothing_else(tmp_path):
    assert kept(tmp_path, HELPED).startswith("02.2: kept")
    text = (tmp_path / "my" / "attention.py").read_text()
    order = (
        "import math\n",
        "LOW = float",
        "def visible",
        "class Mask",
        "@torch.inference_mode()\ndef attend",
    )
    assert sorted(map(text.index, order)) == list(map(text.index, order))
    assert "import torch.nn.functional" not in text and "nanokv" not in text, (
        "F is a name of the function's own"
    )
    assert parts.find("attention", tmp_path).yours


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "def attend(q, k, v):\n    return table * q",
            "it uses `table` of another cell, which is of type ",
        ),
        (
            "def make():\n    def attend(q, k, v):\n        return v\n    return attend\nattend = make()",
            "left margin",
        ),
        ("if True:\n    def attend(q, k, v):\n        return v", "left margin"),
        (
            "class Attend:\n    def __call__(self, q, k, v):\n        return v\nattend = Attend()",
            "left margin",
        ),
        (
            "def helper(q):\n    return model(q)\nmodel = open\ndef attend(q, k, v):\n    return helper(q)",
            "",
        ),
    ],
)
def test_what_does_not_run_alone_is_not_kept_and_told(tmp_path, text, words):
    told = kept(tmp_path, text)
    assert told.startswith("02.2: right, but not kept for later notebooks: ") and words in told
    assert not list(tmp_path.glob("my/*"))


@pytest.mark.parametrize(
    ("cell", "old", "new", "words"),
    [
        (
            "P = namedtuple('P', 'x')\np = P(0.5)",
            "** 0.5",
            "** p.x",
            "it uses `p` of another cell, which is of type P",
        ),
        (
            "low = [-math.inf]",
            "-torch.inf",
            "low[0]",
            "it uses `low` of another cell, which is of type list",
        ),
        (
            "class Half:\n    p = 0.5",
            "** 0.5",
            "** Half.p",
            "`Half` is not made by a `def`, or a `class` with methods",
        ),
    ],
)
def test_why_a_part_is_not_kept_names_what_it_uses(tmp_path, cell, old, new, words):
    first = "import math\nfrom collections import namedtuple\n" + cell
    assert words in kept(tmp_path, first + ATTEND.replace(old, new)) and not list(
        tmp_path.glob("my/*")
    )


def test_a_name_of_python_that_a_cell_defines_and_a_counter_are_taken_along(tmp_path):
    counts = ATTEND.replace("    visible", "    global calls\n    calls += 1\n    visible", 1)
    assert "kept as" in kept(tmp_path, "calls = 0\ndef len(x):\n    return x.shape[0]\n" + counts)
    text = (tmp_path / "my" / "attention.py").read_text()
    assert "def len(x)" in text and "calls = 0" in text


def test_a_statement_beside_a_lambda_is_not_kept(tmp_path):
    text = ATTEND + "own = lambda q, k, v: attend(q, k, v); tried = own(*torch.ones(3, 2, 2))"
    assert "kept as" in parts.keep("02.2", cells(text)["own"], tmp_path)
    assert "tried" not in (tmp_path / "my" / "attention.py").read_text()


def test_two_things_of_one_name_are_told(tmp_path):
    """A kept part has names of its own: a file has room for one `sign`."""
    names = cells(
        "def sign():\n    return -1",
        "def both(q, k, v):\n    return sign() * sign() * attend(q, k, v)",
    )
    names["attend"] = cells("def sign():\n    return 1\n" + ATTEND.rstrip() + " * sign()")["attend"]
    told = parts.keep("02.2", names["both"], tmp_path)
    assert "it uses two different things named `sign`" in told and not list(tmp_path.glob("my/*"))


def test_a_partial_a_reference_and_a_lambda(tmp_path):
    names = cells(ATTEND + "own = lambda q, k, v: attend(q, k, v)")
    assert "not kept" in parts.keep("02.2", partial(names["attend"]), tmp_path)
    assert "not written in a cell" in parts.keep("02.2", parts.reference("attention"), tmp_path)
    assert (
        "kept as" in parts.keep("02.2", names["own"], tmp_path)
        and parts.find("attention", tmp_path).yours
    )


def test_the_file_of_before_is_not_lost(tmp_path):
    assert "before" not in kept(tmp_path, ATTEND) and "before" not in kept(tmp_path, ATTEND)
    edited = (tmp_path / "my" / "attention.py").read_text().replace("visible", "seen")
    (tmp_path / "my" / "attention.py").write_text(edited)
    assert kept(tmp_path, ATTEND).endswith("The one before is my/attention.old.py.")
    assert (tmp_path / "my" / "attention.old.py").read_text() == edited
    assert sorted(path.name for path in (tmp_path / "my").iterdir()) == [
        "attention.old.py",
        "attention.py",
    ]


def test_a_disk_that_fills_leaves_the_old_file_and_the_check_right(working, monkeypatch, capsys):
    kept(working, ATTEND)
    before = (working / "my" / "attention.py").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert session.check("02.2", cells(HELPED)["attend"])
    assert "not kept for later notebooks: [Errno 28] No space left" in capsys.readouterr().out
    assert [path.read_bytes() for path in (working / "my").iterdir()] == [before]


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "my").write_text("mine")
    assert "not kept" in kept(tmp_path, ATTEND) and (tmp_path / "my").read_text() == "mine"
    assert "cannot be read" in parts.find("attention", tmp_path).why


# --- what is taken ------------------------------------------------------------------------------------------------


def edited(folder, text: str) -> parts.Found:
    (folder / "my").mkdir(exist_ok=True)
    (folder / "my" / "attention.py").write_text(text)
    return parts.find("attention", folder)


RIGHT = "import torch\n" + ATTEND + '\n__all__ = ["attend"]\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Cut off.
        (RIGHT[: RIGHT.index("** 0.5")], "my/attention.py, line 5: '(' was never closed"),
        (RIGHT.replace(".tril()", ""), "does not pass 02.2: There is no mask"),
        (RIGHT.replace("visible = ", "visible = missing or "), "in attend: visible = missing or"),
        (RIGHT.replace("len(q), len(q)", "1 // 0"), "stopped with ZeroDivisionError"),
        (
            "1 / 0",
            "my/attention.py: it stopped with ZeroDivisionError: division by zero\n    line 1 of attention.py",
        ),
        ("import sys\nsys.exit(3)", "SystemExit"),
        (RIGHT[13:], "NameError: name 'torch'"),
        ("import torch\n" + ATTEND, "has no attribute '__all__'"),
        ("__all__ = []", "IndexError"),
        ("__all__ = ['x']\nx = 7", "hand in the function itself"),
        ("", "__all__"),
        ("\0", "null byte"),
        ("__all__ = ['x']\ndef x(q, k, v):\n    return ...", "there is only the stub"),
        ("x" * 200_000, "larger than"),
        ("__all__ = ['x']\nx = print", "returned None"),
    ],
)
def test_a_part_that_was_spoiled_is_told_and_the_reference_taken(tmp_path, text, words):
    assert edited(tmp_path, RIGHT).yours
    found = edited(tmp_path, text)
    assert not found.yours and found.made is parts.reference("attention")
    assert words in found.why


@pytest.mark.parametrize(
    "text",
    [
        "while True: pass",
        RIGHT.replace("visible =", "while True: pass\n    visible ="),
        "import time\ntime.sleep(9)",
        "try:\n    while True: pass\nexcept: pass\nwhile True: pass",
    ],
)
def test_an_endless_part_is_interrupted(tmp_path, monkeypatch, text):
    monkeypatch.setattr(parts, "SECONDS", 1.0)
    begin = time.monotonic()
    found = edited(tmp_path, text)
    assert (
        found.why == "my/attention.py: it ran for longer than 1 s" and time.monotonic() - begin < 8
    )


def test_who_interrupts_is_not_taken_for_the_clock(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        edited(tmp_path, "raise KeyboardInterrupt")


def test_what_a_part_prints_while_it_is_checked_is_not_shown(tmp_path, capfd):
    assert edited(
        tmp_path, RIGHT.replace("visible =", "print('noise')\n    visible =") + "print('loud')"
    ).yours
    assert capfd.readouterr().out == ""


def test_the_text_is_run_and_no_compiled_file(tmp_path):
    """Two edits within one second, of one length: Python's own import would take the first one's bytecode."""
    first, second = (RIGHT + f"answer = {n}\n" for n in (1, 2))
    for text in (first, second):
        assert edited(tmp_path, text).made.__globals__["answer"] == int(text[-2])
    assert not (tmp_path / "my" / "__pycache__").exists()


def test_a_link_and_the_file_of_somebody_else_are_not_run(tmp_path, monkeypatch):
    other = tmp_path / "other.py"
    other.write_text(RIGHT)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "attention.py").symlink_to(other)
    assert "not a regular file" in parts.find("attention", tmp_path).why
    assert "kept as" in kept(tmp_path, ATTEND), "the link is replaced, and not followed"
    assert other.read_text() == RIGHT and not (tmp_path / "my" / "attention.py").is_symlink()
    assert edited(tmp_path, RIGHT).yours
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert "belongs to another user" in parts.find("attention", tmp_path).why


def test_two_students_have_two_folders(tmp_path):
    for name in ("ada", "bo"):
        (tmp_path / name).mkdir()
    kept(tmp_path / "ada", ATTEND)
    assert parts.find("attention", tmp_path / "ada").yours
    assert (
        parts.find("attention", tmp_path / "bo").why
        == "02.2 is not done yet: there is no my/attention.py"
    )


def test_who_grades_takes_and_keeps_no_part(working, monkeypatch, capsys):
    kept(working, ATTEND)
    monkeypatch.setenv(log.VARIABLE, str(working / "log"))
    assert session.mine("attention") is parts.reference("attention")
    assert "the reference (no answers are kept in this run)" in capsys.readouterr().out
    assert session.check("02.2", cells(HELPED)["attend"]) and "kept" not in capsys.readouterr().out
    assert [event["event"] for event in log.read(working / "log")] == ["part", "check"]


def test_the_table_of_parts_says_whose_each_is(working, capsys):
    kept(working, ATTEND)
    session.mine("attention"), session.mine("cache")
    capsys.readouterr()
    session.whose()
    assert capsys.readouterr().out.splitlines() == [
        "part       exercise  whose",
        "attention  02.2      yours",
        "cache      06.3      reference",
    ]
    with pytest.raises(CourseError, match="no part 'atention'"):
        session.mine("atention")


# --- the parts of this course -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", parts.PARTS)
def test_the_reference_of_a_part_passes_its_check(name):
    part = parts.PARTS[name]
    check = checking.find(part.id)
    outcome = (part.judge or check.judge)(parts.reference(name), check.case())
    assert (outcome.state, outcome.mistake) == (
        ("wrong", "borrowed") if name == "loop" else ("right", "")
    )


def solution(id: str) -> str:
    """The imports of a notebook and the solution that is checked under this id."""
    cells = twins.read(next((NOTEBOOKS / "source").glob(f"{id[:2]}_*.py"))).cells
    at = next(i for i, cell in enumerate(cells) if f'course.check("{id}"' in cell.text)
    first = next(cell.text for cell in cells if cell.kind == "code")
    imports = [
        ast.unparse(n) for n in ast.parse(first).body if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    return "\n".join([*imports, cells[at - 1].text])


@pytest.mark.parametrize("name", parts.PARTS)
def test_every_solution_is_kept_and_taken(tmp_path, name):
    id = parts.PARTS[name].id
    text = solution(id)
    own = re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)[-1]
    assert "kept as" in kept(tmp_path, text, own, id)
    assert parts.find(name, tmp_path).yours


def test_a_part_takes_along_a_kept_part_that_it_uses(tmp_path):
    assert "kept as" in kept(tmp_path, solution("11.4"), "keep", "11.4")
    names = cells(TURN)
    names["keep"] = parts.find("prefix", tmp_path).made
    assert "kept as" in parts.keep("12.4", names["turn"], tmp_path)
    text = (tmp_path / "my" / "turn.py").read_text()
    assert (
        "def keep(cached, new):" in text
        and "nanokv" not in text.replace("# ", "")
        and '["turn"]' in text
    )
    assert parts.find("turn", tmp_path).yours


CACHE = solution("06.3")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return k, v", "return k[:, :, -1:], v[:, :, -1:]"),
        ("(self.key, k)", "(k, self.key)"),
        ("dim=2)", "dim=0)"),
        ("k.shape[2]", "1"),
        ("return k, v", "return v, k"),
        ("return k, v", "return k + 1e-2, v"),
        ("return k, v", "pass"),
        ("self.length = 0", "self.length = 1"),
    ],
)
def test_a_cache_that_was_spoiled_is_noticed_quickly(old, new):
    check, names = checking.find("06.3"), cells(CACHE.replace(old, new))
    begin = time.process_time()
    outcome = parts.PARTS["cache"].judge(names["MyCache"], check.case())
    assert outcome.state == "wrong" and outcome.message and time.process_time() - begin < 2


def test_a_class_without_functions_has_no_cell():
    with pytest.raises(alone.NotAlone):
        alone.source(cells("class Mine(nanokv.cache.LayerCache):\n    length = 0")["Mine"])


# --- the form of a part -------------------------------------------------------------------------------------------


def items(value, change):
    """The same list, tuple or set with other items; another number where it is one."""
    if isinstance(value, list | tuple | set):
        return type(value)(change(item) for item in value)
    return change(value)


FORMS = {
    "as it is": lambda value: value,
    "list": lambda value: value.tolist() if isinstance(value, torch.Tensor) else list(value),
    "tuple": lambda value: tuple(value),
    "set": lambda value: set(value),
    "frozenset": lambda value: frozenset(value),
    "numpy": lambda value: np.asarray(list(value) if isinstance(value, set) else value),
    "tensor": lambda value: torch.as_tensor(list(value) if isinstance(value, set) else value),
    "float64": lambda value: value.double(),
    "with a gradient": lambda value: value.clone().requires_grad_(),
    "floats": lambda value: items(value, float),
    "numbers of numpy": lambda value: items(value, np.int64),
    "numbers of torch": lambda value: items(value, torch.as_tensor),
    "bools": lambda value: items(value, lambda one: bool(one) if one in (0, 1) else one),
    "generator": lambda value: (one for one in value),
}
KERNELS = {"row_norm", "place", "fold", "merge"}  # of Triton: they return nothing to Python
FUNCTIONS = sorted(set(parts.PARTS) - KERNELS - {"cache"})


def loop(model, ids, n):
    """nanokv's own is refused by 06.4: it is borrowed."""
    cache = nanokv.make_cache("dict", model.config)
    tokens = [nanokv.prefill(model, ids, cache).argmax(-1, keepdim=True)]
    while len(tokens) < n:
        logits = nanokv.decode(model, tokens[-1], cache, start_pos=cache.length)
        tokens.append(logits.argmax(-1, keepdim=True))
    return [int(token) for token in tokens]


def formed(name: str, form: str):
    """nanokv's part, with results in another form."""
    own = loop if name == "loop" else parts.reference(name)

    def part(*arguments):
        return FORMS[form](own(*arguments))

    return part


@functools.cache
def accepted(name: str, form: str):
    """The judgement of a part whose results have this form."""
    part = parts.PARTS[name]
    check = checking.find(part.id)
    return (part.judge or check.judge)(formed(name, form), check.case())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_numbers_in_a_form_that_nobody_can_use_are_told_at_once(name):
    check = checking.find(parts.PARTS[name].id)
    assert bool(check.use) == bool(check.reference)  # the others are judged by being run
    states = {form: accepted(name, form) for form in FORMS}
    assert states["as it is"].state == "right"
    for form, outcome in states.items():
        told = outcome.mistake == "type" and outcome.message.startswith("right numbers; return ")
        assert outcome.state == "right" or told or not check.use or outcome.mistake != "type", form
    if check.use:
        assert states["numpy"].state == "wrong" and states["floats"].state == "wrong"


@pytest.mark.parametrize(
    ("name", "made", "told"),
    [
        (
            "heads",
            lambda h, H, Hk: h // (H / Hk),
            "return an int: it will index a tensor. This is a float",
        ),
        (
            "page",
            lambda t, i, p: (t[i // p], float(i % p)),
            "return two ints: they will index a tensor",
        ),
        (
            "prefix",
            lambda a, b: float(parts.reference("prefix")(a, b)),
            "return an int: it is where",
        ),
        (
            "sampler",
            lambda c, p: torch.tensor(list(parts.reference("sampler")(c, p))),
            "a set of ints",
        ),
        (
            "attention",
            lambda q, k, v: parts.reference("attention")(q, k, v).tolist(),
            "This is a list",
        ),
        (
            "attention",
            lambda q, k, v: parts.reference("attention")(q, k, v).numpy(),
            "This is a numpy ndarray of float32",
        ),
        (
            "attention",
            lambda *qkv: parts.reference("attention")(*(x.double() for x in qkv)),
            "float64",
        ),
        ("rotation", lambda *x: parts.reference("rotation")(*x).tolist(), "it is computed with"),
    ],
)
def test_the_form_is_told_with_a_call_that_shows_it(name, made, told):
    check = checking.find(parts.PARTS[name].id)
    outcome = check.judge(made, check.case())
    assert outcome.state == "wrong" and outcome.mistake == "type" and told in outcome.message
    assert all(f"\n    {word:<9} " in outcome.message for word in ("try", "gives", "expected"))


@functools.cache
def once(number: str) -> notebook_slices.Ran:
    return notebook_slices.run(number)


# The cache is taken by three notebooks; behind these parts of 15 and 16 whole engines and steps run again.
LONG = ("cache", "admit", "share", "reserve", "step", "fill")
BY_NIGHT = {name: [pytest.mark.night] for name in LONG}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=BY_NIGHT.get(name, []))
        for name in parts.PARTS
        if name not in KERNELS
    ],
)
def test_each_accepted_form_of_a_part_runs_through_every_cell_that_uses_it(
    name, monkeypatch, tmp_path
):
    """`norm` is taken nowhere so far; every other part is."""
    monkeypatch.chdir(tmp_path)
    texts = {path.stem[:2]: path.read_text("utf-8") for path in twins.sources(NOTEBOOKS)}
    numbers = [number for number, text in texts.items() if f'course.mine("{name}")' in text]
    assert numbers or name == "norm"
    forms = [form for form in FORMS if name != "cache" and accepted(name, form).state == "right"]
    made = [formed(name, form) for form in forms] if name != "cache" else [Listed]
    for number in numbers:
        ran = once(number)
        for one in made:
            with monkeypatch.context() as patched:
                taken = {known: parts.reference(known) for known in parts.PARTS} | {name: one}
                patched.setattr(course, "mine", taken.get)
                assert notebook_slices.run_again(ran, name) >= 1


class Listed(parts.reference("cache")):
    """A cache that hands keys and values out as a list."""

    def append(self, k, v):
        return list(super().append(k, v))


# --- 12.4, a turn -------------------------------------------------------------------------------------------------

TURN = exam.solution(twins.read(NOTEBOOKS / "source" / "12_batches_and_an_engine.py"), "12.4")


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("", "", ""),
        ("return said", "return torch.tensor(said)", ""),
        ("engine.clear()\n        n = 0", "pass", "not cleared"),
        ("        n = 0\n", "", "start_pos"),
        ("len(engine.held))))", "len(engine.held) + 1)))", "start_pos"),
        ("(engine.held))))", "(ids))))", "start_pos"),
        ("ids[n:], n)", "ids[n:], 0)", "start_pos"),
        (" and said[-1] not in engine.stop", "", "stop ignored"),
        ("said[-1] not in engine.stop", "said[-1] != engine.stop[0]", "one stop id"),
        ("len(said) < most and", "", "last token fed"),
        ("len(said) < most", "len(said) <= most", "last token fed"),
        ("return said", "return ids + said", "with prompt"),
        ("return said", "return said[:-1]", "no end"),
        ("return said", "return said[::-1]", "tokens"),
        ("n < len(engine.held)", "engine.held", "nothing kept"),
        ("n = keep(engine.held, ids)", "n = len(engine.held)", "not cleared"),
        (
            "engine.feed(ids[n:], n)",
            "[engine.feed([i], n + j) for j, i in enumerate(ids[n:])][-1]",
            "rows",
        ),
        ("return said", "return said + [7]", "tokens"),
        ("return said", "return 7", "form"),
        ("return said", "pass", "None"),
        (
            "n = keep(engine.held, ids)",
            "n = min(len(engine.held), len(ids)) if engine.held[:len(ids)] == ids[:"
            # All of a prompt that is held whole.
            "len(engine.held)] else keep(engine.held, ids)",
            "nothing fed",
        ),
        ("said[-1:]", "[]", "nothing fed"),
        ("while len", "while True or len", "stop ignored"),
    ],
)
def test_a_typical_turn_is_told_what_is_wrong_with_it(old, new, mistake):
    check = checking.find("12.4")
    answer = cells(TURN.replace(old, new) if old else TURN)["turn"]
    outcome = check.judge(answer, check.case())
    assert (outcome.state, outcome.mistake) == ("wrong" if mistake else "right", mistake), (
        outcome.message
    )
    named = {known.name for known in mistakes.registered("12") if known.id == "12.4"}
    assert mistake in named | {"", "form", "None"}


@pytest.mark.parametrize(
    "odd", [..., None, 7, "turn", print, lambda *a: exit(3), lambda e, i, m: 1 / 0, type]
)
def test_an_absurd_turn_never_raises(odd):
    check = checking.find("12.4")
    assert check.judge(odd, check.case()).state == ("unanswered" if odd in (..., None) else "wrong")


def test_the_engine_of_the_notebook_is_read_on_one_screen():
    cells = twins.read(NOTEBOOKS / "source" / "12_batches_and_an_engine.py").cells
    (engine,) = (cell.text for cell in cells if "class Engine:" in cell.text)
    assert len(engine.splitlines()) <= 40 and "class MyAttention" in engine


# --- letters ------------------------------------------------------------------------------------------------------

SHAPE = re.compile(r"\((\w+(?:[·+−-]\w+)*(?:,\w+(?:[·+−-]\w+)*)+)\)")  # (B,T,H·D)


@pytest.mark.parametrize("path", twins.sources(NOTEBOOKS)[1:], ids=lambda path: path.stem[:2])
def test_the_letters_of_a_notebook_are_defined_before_its_first_shape(path):
    cells = [cell for cell in twins.read(path).cells if cell.role != "solution"]
    line = cells[0].text.split("\nLetters: ")[1]
    defined = set(re.findall(r"`(\w+)`\s\w", line))
    texts = [
        cell.text if cell.kind == "markdown" else "\n".join(re.findall(r"#.*", cell.text))
        for cell in cells
    ]
    used = {
        letter
        for text in texts
        for shape in SHAPE.findall(text)
        for letter in re.findall(r"[A-Z]k?\b", shape)
    }
    assert used <= defined and "glossary.md#letters" in line
    glossary = (NOTEBOOKS / "glossary.md").read_text("utf-8")
    assert all(f"| `{letter}` |" in glossary for letter in defined)
