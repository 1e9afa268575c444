"""Tool calls in the text of an answer, in the Hermes format that Qwen3 uses.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Two variants are read as well: Llama's `parameters` for `arguments`, and arguments given as a
string of JSON. The text of a call is held back until the call is complete. Text that is not JSON,
names a function that was not offered, or is cut off by the end of the answer stays text.
Whitespace around a call is dropped.
"""

import json
import uuid
from collections.abc import Iterable
from typing import NamedTuple

from nanokv.text.thinking import overlap
from weights_loader.strict import loads

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class Call(NamedTuple):
    """One call of an answer; `arguments` is a JSON object as text."""

    place: int  # index among the calls of the answer
    id: str
    name: str
    arguments: str

    @property
    def message(self) -> dict:
        """The call in a message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    @property
    def deltas(self) -> list[dict]:
        """The call in a stream: first the function's name, then its arguments."""
        head = self.message | {
            "index": self.place,
            "function": {"name": self.name, "arguments": ""},
        }
        return [head, {"index": self.place, "function": {"arguments": self.arguments}}]


class Part(NamedTuple):
    """Text of an answer, or a call (then without text), and its position in the answer."""

    text: str
    at: int
    call: Call | None = None


class NoCalls:
    """No tool was offered: everything is text."""

    count = 0
    full = False
    open = False

    def __init__(self) -> None:
        self._at = 0

    def put(self, text: str) -> list[Part]:
        begin = self._at
        self._at += len(text)
        if not text:
            return []
        return [Part(text, begin)]

    def flush(self) -> list[Part]:
        return []


class ToolCalls:
    """Splits the text of an answer, as it arrives, into text and calls of the functions `names`."""

    def __init__(self, names: Iterable[str], parallel: bool = True):
        self.names = frozenset(names)
        self.parallel = parallel
        self.count = 0
        # Text that may become a call, with the whitespace before it, and its position.
        self._held = ""
        self._at = 0
        self._body = 0  # start of a call's body within the held text; 0: no call is open
        self._search = 0  # where the search for its end resumes
        self._blank = False  # the last part was a call

    @property
    def full(self) -> bool:
        """Whether no further call is allowed."""
        return self.count > 0 and not self.parallel

    @property
    def open(self) -> bool:
        """Whether a call has begun and not yet ended."""
        return self._body > 0

    def put(self, text: str) -> list[Part]:
        """The parts that can be shown now."""
        self._held += text
        found: list[Part] = []
        found_one = True
        while found_one and not self.full:
            if self._body:
                found_one = self._close(found)
            else:
                found_one = self._open(found)
        return [part for part in found if part.text or part.call]

    def flush(self) -> list[Part]:
        """Release the held text, at the end or at a control token. A call may lack its last tag."""
        call = None
        if self._body:
            call = self._call(self._held[self._body :])
        shown = not self.full and (self._held.strip() or not self._blank)
        part = self._take(len(self._held), call)
        self._body = 0
        if call or (part.text and shown):
            return [part]
        return []

    def _open(self, found: list[Part]) -> bool:
        """Take the text up to the next call; returns whether there is a call."""
        if self._blank:
            self._take(len(self._held) - len(self._held.lstrip()))
        at = self._held.find(OPEN)
        opened = at >= 0
        end = at
        if not opened:
            end = len(self._held) - overlap(self._held, OPEN)
        found.append(self._take(len(self._held[:end].rstrip())))
        self._blank = self._blank and not found[-1].text
        self._body = 0
        if opened:  # the text before the tag has been taken, so the tag has moved
            self._body = self._held.find(OPEN) + len(OPEN)
        self._search = self._body
        return opened

    def _close(self, found: list[Part]) -> bool:
        """Take a call, or text that turns out not to be one; returns whether its end was found."""
        end = self._held.find(CLOSE, self._search)
        # A closing tag inside a JSON string belongs to an argument.
        while end >= 0 and in_string(self._held[self._body : end]):
            self._search = end + 1
            end = self._held.find(CLOSE, self._search)
        if end < 0:
            return False
        call = self._call(self._held[self._body : end])
        found.append(self._take(end + len(CLOSE), call))
        self._body = 0
        self._blank = call is not None
        return True

    def _take(self, length: int, call: Call | None = None) -> Part:
        """Take the first `length` characters of the held text."""
        text = ""
        if call is None:
            text = self._held[:length]
        part = Part(text, self._at, call)
        self._held = self._held[length:]
        self._at += length
        self.count += call is not None
        return part

    def _call(self, body: str) -> Call | None:
        try:
            said = loads(body)
            name = said["name"]
            arguments = said.get("arguments", said.get("parameters")) or {}
            if isinstance(arguments, str):
                arguments = loads(arguments)
            if name not in self.names or not isinstance(arguments, dict):
                return None
        except (ValueError, TypeError, KeyError, AttributeError):  # not JSON, no object, no name
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return Call(self.count, f"call_{uuid.uuid4().hex[:24]}", name, text)


def in_string(text: str) -> bool:
    """Whether a JSON string has begun in the text and not ended."""
    inside = False
    escaped = False
    for character in text:
        quoted = character == '"' and not escaped
        escaped = character == "\\" and not escaped and inside
        inside ^= quoted
    return inside
