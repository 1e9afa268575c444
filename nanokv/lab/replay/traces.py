"""Files of requests: one JSON object per line, plain or gzipped.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, …]}
    {"tokens": [5, 7, …], "output": [9, …], "salt": "…"}
    {"messages": [{"role": "user", "content": "…"}], "tools": […], "salt": "…"}

The first form is that of Mooncake (FAST'25; github.com/kvcache-ai/Mooncake): an id names a block of
512 tokens and everything before it. In the others only the prompt is needed. `output` are tokens
that the server computed after it, without the last one, whose keys are not computed. Requests with
different salts share nothing.
"""

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanokv.errors import NanoKVError
from weights_loader.strict import LIMITS, loads

BLOCK = 512  # tokens per id of Mooncake's traces
Encode = Callable[[list[dict], list[dict] | None], list[int]]
FORMS = '{"hash_ids": …, "input_length": …}, {"tokens": …} or {"messages": …}'


class Request(NamedTuple):
    """One request as pages. A key stands for a page and for all pages before it."""

    keys: list[int]  # all pages that the server holds after the request
    sought: int  # the first pages of `keys` that may be reused
    taken: int  # pages that it takes while it is computed, also one that is not full
    pages: int  # of the prompt, also one that is not full
    tokens: int  # of the prompt


class Trace(ABC):
    """Requests in the order of the file."""

    unit: str  # what the hit rate of this trace is usually given in

    @abstractmethod
    def requests(self, page: int) -> list[Request]:
        """The requests in pages of `page` tokens. NanoKVError if the file is coarser than that."""

    @abstractmethod
    def __len__(self) -> int: ...


class Blocks(NamedTuple):
    """A line of Mooncake's form."""

    ids: list[int]
    tokens: int


class BlockTrace(Trace):
    """Blocks of `block` tokens by id. The last block of a request counts, even if it is not full,
    as in the figures that are published for these traces."""

    unit = "pages"

    def __init__(self, rows: Sequence[Blocks], block: int = BLOCK):
        self.rows = rows
        self.block = block

    def __len__(self) -> int:
        return len(self.rows)

    def requests(self, page: int) -> list[Request]:
        if page % self.block:
            raise NanoKVError(
                f"pages of {page:,} tokens, but an id of this trace stands for {self.block:,}",
                f"--page {self.block}, or a multiple of it",
            )
        step = page // self.block
        found = []
        for ids, tokens in self.rows:
            # The last id of a page names all that is before it.
            keys = [ids[min(end, len(ids)) - 1] for end in range(step, len(ids) + step, step)]
            found.append(Request(keys, len(keys), len(keys), len(keys), tokens))
        return found


class Tokens(NamedTuple):
    """A line with token ids."""

    prompt: list[int]
    output: list[int]
    salt: str


class TokenTrace(Trace):
    """Token ids. Only full pages are held, and the last token of a prompt is always computed."""

    unit = "tokens"

    def __init__(self, rows: Sequence[Tokens]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def requests(self, page: int) -> list[Request]:
        names: dict[tuple[int | str, tuple[int, ...]], int] = {}
        found = []
        for prompt, output, salt in self.rows:
            keys: list[int] = []
            before: int | str = salt
            tokens = prompt + output
            for start in range(0, len(tokens) - page + 1, page):
                part = before, tuple(tokens[start : start + page])
                keys.append(names.setdefault(part, len(names)))
                before = keys[-1]
            sought = (len(prompt) - 1) // page
            taken, pages = -(-len(tokens) // page), -(-len(prompt) // page)
            found.append(Request(keys, sought, taken, pages, len(prompt)))
        return found


def read(path: str | Path, block: int = BLOCK, encode: Encode | None = None) -> Trace:
    """The trace in a file. `encode(messages, tools)` gives the ids of a conversation.

    Raises NanoKVError with the number of the first line that is not a request, and for a file with
    two forms of lines.
    """
    rows: list[Blocks | Tokens] = []
    reader = Reader(block, encode)
    for number, data in lines(Path(path)):
        try:
            row = reader.row(data)
            if rows and type(row) is not type(rows[0]):
                raise NanoKVError("another form than the lines before", f"all lines {FORMS}")
            rows.append(row)
        except NanoKVError as error:
            raise NanoKVError(f"{path}, line {number:,}: {error}", error.hint) from None
    if not rows:
        raise NanoKVError(f"{path} has no requests", f"one JSON object per line: {FORMS}")
    if isinstance(rows[0], Blocks):
        return BlockTrace(rows, block)  # type: ignore[arg-type]  # all of one form
    return TokenTrace(rows)  # type: ignore[arg-type]


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of every line that is not blank."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            most = LIMITS["batch line"]
            for number, line in enumerate(iter(lambda: file.readline(most + 1), b""), 1):
                if len(line) > most:
                    raise NanoKVError(f"{path}, line {number:,}: more than {most:,} bytes")
                if line.strip():
                    yield number, line.strip()
    except (EOFError, zlib.error) as error:
        raise NanoKVError(f"{path} is damaged: {error}", "copy it again") from None


class Reader:
    """Lines to rows, checked. It remembers which id followed which."""

    def __init__(self, block: int, encode: Encode | None):
        self.block = block
        self.encode = encode
        self.before: dict[int, int | None] = {}

    def row(self, data: bytes) -> Blocks | Tokens:
        """The request of one line; NanoKVError says what is wrong with it."""
        try:
            fields = loads(data)
        except ValueError as error:  # also bytes that are not UTF-8
            raise NanoKVError(f"not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise NanoKVError(f"a JSON {type(fields).__name__}, not an object", FORMS)
        forms = [name for name in ("hash_ids", "tokens", "messages") if name in fields]
        if len(forms) != 1:
            raise NanoKVError("exactly one of hash_ids, tokens and messages is needed", FORMS)
        if forms == ["hash_ids"]:
            return self.blocks(fields)
        salt = fields.get("salt", "")
        if not isinstance(salt, str):
            raise NanoKVError(f"salt is {salt!r}: a text was expected")
        prompt = self.prompt(fields)
        return Tokens(prompt, numbers(fields, "output") if "output" in fields else [], salt)

    def blocks(self, fields: dict) -> Blocks:
        ids = numbers(fields, "hash_ids")
        tokens = fields.get("input_length")
        if tokens is None:
            raise NanoKVError("input_length is missing: the tokens of the prompt", FORMS)
        if type(tokens) is not int or tokens < 1:
            raise NanoKVError(f"input_length is {tokens!r}: a whole number ≥ 1 was expected")
        needed = -(-tokens // self.block)
        if len(ids) != needed:
            raise NanoKVError(
                f"{len(ids):,} hash_ids for {tokens:,} tokens: blocks of {self.block:,} are "
                f"{needed:,}",
                "--block N names the tokens of a block",
            )
        before: int | None = None
        for number in ids:
            other = self.before.setdefault(number, before)
            if other != before:
                raise NanoKVError(
                    f"block {number} follows {name(before)} here and {name(other)} before",
                    "an id must stand for a block and for everything before it",
                )
            before = number
        return Blocks(ids, tokens)

    def prompt(self, fields: dict) -> list[int]:
        """The ids of `tokens`, or of `messages`."""
        if "tokens" in fields:
            found = numbers(fields, "tokens")
        elif self.encode is None:
            raise NanoKVError("messages need a tokenizer", "-m NAME names a model")
        else:
            found = self.encode(fields["messages"], fields.get("tools"))
        if not found:
            raise NanoKVError("a prompt of 0 tokens")
        return found


def numbers(fields: dict, key: str) -> list[int]:
    """A list of whole numbers ≥ 0; NanoKVError names the first value that is none."""
    values: Any = fields[key]
    if not isinstance(values, list):
        raise NanoKVError(f"{key} is {values!r}: a list of whole numbers was expected")
    for place, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise NanoKVError(f"{key}[{place}] is {value!r}: a whole number ≥ 0 was expected")
    return values


def name(number: int | None) -> str:
    """A block in a message."""
    return "no block" if number is None else f"block {number}"
