"""Parts: functions that a learner builds in one notebook and that later notebooks run.

When its check is right, a part is saved as source text in the folder `my` beside the notebooks,
one file each, which the learner may edit. A later notebook uses that file if it still passes the
check; otherwise it uses nanokv's reference and prints why. A run by the grader or for the book
neither saves nor reads parts: it uses the references.
"""

import contextlib
import importlib.abc
import importlib.util
import linecache
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanokv.errors import CourseError
from nanokv.school.course import alone, checking, feedback, log

if TYPE_CHECKING:
    from nanokv.model import Transformer

FOLDER = "my"
LARGEST = 100_000  # bytes of a part
SECONDS = 20.0  # for reading and checking a kept part: an edit may have made it endless


def _dict_cache() -> type:
    from nanokv.cache.dict_cache import DictCache

    return DictCache


def _judge_cache(answer, case):
    return checking.exercises("06").judge_quickly(answer, case)


def _loop(model, ids, n):
    from nanokv.decoding.generation import generate

    return list(generate(model, ids, max_new_tokens=n, eos_token_ids=[]))


def _turn(engine, ids, most):
    from nanokv.text.ids import common_prefix

    kept = min(common_prefix(engine.held, ids), len(ids) - 1)
    if kept < len(engine.held):
        engine.clear()
        kept = 0
    answer = [engine.draw(engine.feed(ids[kept:], kept))]
    while len(answer) < most and answer[-1] not in engine.stop:
        answer.append(engine.draw(engine.feed(answer[-1:], len(engine.held))))
    return answer


def _free(table, owners, free_pages):
    for page in table:
        owners[page] -= 1
    free_pages += [page for page in table if owners[page] == 0]
    table.clear()
    return free_pages


def _of(notebook: str, name: str) -> Callable:
    """A loader of a reference function from a notebook's checks."""
    return lambda: getattr(checking.exercises(notebook), name)


def _kernel(name: str) -> Callable:
    """A loader of a kernel of notebook 16. Imported late: Triton takes a second to import."""
    return lambda: getattr(importlib.import_module("nanokv.school.course.own_kernels"), name)


@dataclass(frozen=True)
class Part:
    """A kind of part.

    `id`: the exercise that builds it. `own`: () → nanokv's part; None: the exercise's reference.
    `judge`: (answer, case) → Outcome, a quick one where the exercise's own judge takes seconds.
    """

    id: str
    own: Callable | None = None
    judge: Callable | None = None


PARTS = {
    "sampler": Part("01.3"),  # (chances, p) → indices kept
    "stop": Part("01.5"),  # (stream, stop ids) → the answer
    "attention": Part("02.2"),  # (q, k, v), each (T,D) → (T,D)
    "rotation": Part("03.2"),  # (x, cos, sin) → x rotated
    "norm": Part("03.3"),  # (x, weight, eps) → x normed
    "heads": Part("03.4"),  # (h, H, Hk) → KV head
    "cache": Part("06.3", _dict_cache, _judge_cache),  # class of one layer's cache
    "loop": Part("06.4", lambda: _loop),  # (model, ids, n) → n tokens
    "page": Part("10.4"),  # (table, i, page) → (number of the page, slot)
    "free": Part("10.5", lambda: _free),  # (table, owners, free pages) → free pages
    "prefix": Part("11.4"),  # (cached, new) → tokens to keep
    "turn": Part("12.4", lambda: _turn),  # (engine, ids, most) → answer
    "admit": Part("15.1"),  # (known, promised, free, size, room) → how many move in
    "share": Part("15.2"),  # (pending, budget) → tokens for each
    "preempt": Part("15.3", _of("15", "preempt")),  # (engine, request)
    "reserve": Part("15.4", _of("15", "reserve")),  # (engine, request, tokens) → has it the pages?
    "step": Part("15.5", _of("15", "step")),  # engine → [(request, token)]
    "stream": Part("15.6", _of("15", "stream")),  # (engine, request) → its tokens
    "row_norm": Part("16.1", _kernel("norm_kernel")),  # one program per row
    "place": Part("16.3", _kernel("place")),  # (table, token, seen, SIZE) → (page, slot)
    "fold": Part("16.4", _kernel("fold")),  # (highest, total, mixed, scores, v) → the first three
    "merge": Part("16.5", _kernel("merge_kernel")),  # one program per row and query head
    "fill": Part("16.6", _of("16", "fill")),  # (inputs, tokens, positions, tables)
}
NAMES = {part.id: name for name, part in PARTS.items()}


@dataclass(frozen=True)
class Found:
    """A part that was found. `yours`: the learner built it; if not, `why` gives the reason."""

    name: str
    made: object
    yours: bool
    why: str = ""

    def __str__(self):
        if self.yours:
            return f"{self.name}: yours ({FOLDER}/{self.name}.py)"
        return f"{self.name}: the reference ({self.why})"


class Unusable(Exception):
    """Why a learner's part cannot be used, as the end of a sentence."""


# --- using a part ---------------------------------------------------------------------------------


def find(name: str, folder: Path | None, model: "Transformer | None" = None) -> Found:
    """The learner's part, if folder/my has it and it passes its check; otherwise nanokv's.

    Without a folder, nanokv's. CourseError for an unknown name.
    """
    if name not in PARTS:
        raise CourseError(f"no part {name!r}", f"known: {', '.join(PARTS)}")
    if folder is None:
        return Found(name, reference(name), False, "no answers are kept in this run")
    try:
        return Found(name, taken(name, folder / FOLDER / f"{name}.py", model), True)
    except Unusable as error:
        return Found(name, reference(name), False, str(error))


def reference(name: str) -> Any:
    """nanokv's part of this name."""
    part = PARTS[name]
    if part.own is None:
        return checking.find(part.id).reference
    return part.own()


def taken(name: str, path: Path, model: "Transformer | None" = None) -> Any:
    """The part in a file, read and checked. Raises Unusable, also if that takes over SECONDS."""
    part = PARTS[name]
    shown = f"{FOLDER}/{path.name}"
    try:
        text = _own_text(path)
    except FileNotFoundError:
        raise Unusable(f"{part.id} is not done yet: there is no {shown}") from None
    except (OSError, ValueError, CourseError) as error:
        raise Unusable(f"{shown} cannot be read: {error}") from None
    try:
        return _within(SECONDS, lambda: _checked(text, path, part, model))
    except TimeoutError as error:
        raise Unusable(f"{shown}: {error}") from None


def _own_text(path: Path) -> str:
    """The text of a regular file of this user, not a link: a class may share a folder."""
    text = log.contents(path, LARGEST).decode("utf-8-sig")
    if hasattr(os, "getuid") and os.lstat(path).st_uid != os.getuid():
        raise CourseError("it belongs to another user")
    return text


def _checked(text: str, path: Path, part: Part, model):
    """Run the text without output, judge the part in it and return that. Raises Unusable."""
    check = checking.find(part.id)
    linecache.checkcache(str(path))
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        made = _run(text, path)
        outcome = (part.judge or check.judge)(made, check.case(None, model))
    if outcome.state != "right":
        said = "there is only the stub"
        if outcome.state == "wrong":
            said = outcome.message
        raise Unusable(f"{FOLDER}/{path.name} does not pass {part.id}: {said}")
    return made


def _run(text: str, path: Path):
    """Run the text as a module → the value that its `__all__` names. Raises Unusable."""
    loader = _Text(text, path)
    spec = importlib.util.spec_from_loader(path.stem, loader)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # it is not None
    try:
        loader.exec_module(module)
        return getattr(module, module.__all__[0])
    except SyntaxError as error:
        raise Unusable(f"{FOLDER}/{path.name}, line {error.lineno}: {error.msg}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit
        raise Unusable(f"{FOLDER}/{path.name}: {feedback.stopped(error)}") from None


class _Text(importlib.abc.ExecutionLoader):
    """Runs the text that was read, never an older compiled file."""

    def __init__(self, text: str, path: Path):
        self.text = text
        self.path = path

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_filename(self, fullname: str) -> str:
        return str(self.path)


def _within(seconds: float, call):
    """call(), interrupted as by Ctrl-C after `seconds`, which raises TimeoutError.

    Where the system has no alarm signal, there is no limit.
    """
    from nanokv.lab.faults.grading import alarm

    rung = threading.Event()

    def late(*_):
        rung.set()
        raise KeyboardInterrupt

    try:
        with alarm(seconds, late):
            return call()
    except KeyboardInterrupt:
        if rung.is_set():
            raise TimeoutError(f"it ran for longer than {seconds:g} s") from None
        raise


# --- saving a part --------------------------------------------------------------------------------


def keep(id: str, answer: Any, folder: Path, model: "Transformer | None" = None) -> str:
    """Save the part that exercise `id` builds to folder/my.

    Returns the message for the learner; "" if the exercise builds no part.
    """
    if id not in NAMES:
        return ""
    name = NAMES[id]
    path = folder / FOLDER / f"{name}.py"
    try:
        text = _text(name, id, answer)
        _within(SECONDS, lambda: _checked(text, path, PARTS[name], model))
        before = _write(path, text)
    except Exception as error:  # the answer stays right, even if it cannot be saved
        return f"{id}: right, but not kept for later notebooks: {error}"
    said = f"{id}: kept as {FOLDER}/{name}.py, for later notebooks."
    if before:
        said += f" The one before is {before}."
    return said


def _text(name: str, id: str, answer) -> str:
    source, own = alone.source(answer)
    return (
        f"# Your {name}, kept when {id} was right. "
        f"Later notebooks take it with course.mine({name!r}).\n"
        f"# Edit it as you like: if it no longer passes {id}, "
        "they say so and take the reference.\n\n"
        f'{source}\n\n__all__ = ["{own}"]  # what they take\n'
    )


def _write(path: Path, text: str) -> str:
    """Replace a file atomically. Returns the new name of the old file; "" if nothing changed."""
    old = path.with_suffix(".old.py")
    data = text.encode()
    path.parent.mkdir(exist_ok=True)
    try:
        before = log.contents(path, LARGEST)
    except (FileNotFoundError, CourseError):  # a link or a pipe is replaced, not read
        before = data
    if before == data:
        _replace(path, data)
        return ""
    _replace(old, before)
    _replace(path, data)
    return f"{FOLDER}/{old.name}"


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
