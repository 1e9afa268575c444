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

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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

    count, full, open = 0, False, False

    def __init__(self) -> None:
        self._at = 0

    def put(self, text: str) -> list[Part]:
        self._at += len(text)
        return [Part(text, self._at - len(text))] if text else []

    def flush(self) -> list[Part]:
        return []


class ToolCalls:
    """Splits the text of an answer, as it arrives, into text and calls of the functions `names`."""

    def __init__(self, names: Iterable[str], parallel: bool = True):
        self.names, self.parallel = frozenset(names), parallel
        self.count = 0
        # What may become a call, with the blanks before it, and where it begins.
        self._held, self._at = "", 0
        self._body = 0  # where the body of a call begins in what is held; 0: there is none
        self._search = 0  # and where its end is looked for
        self._blank = False  # a call was the last thing

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
        while not self.full and (self._close(found) if self._body else self._open(found)):
            pass
        return [part for part in found if part.text or part.call]

    def flush(self) -> list[Part]:
        """Release the held text, at the end or at a control token. A call may lack its last tag."""
        call = self._call(self._held[self._body :]) if self._body else None
        shown = not self.full and (self._held.strip() or not self._blank)
        part, self._body = self._take(len(self._held), call), 0
        return [part] if (part.text and shown) or call else []

    def _open(self, found: list[Part]) -> bool:
        """Take the text up to the next call; returns whether there is a call."""
        if self._blank:
            self._take(len(self._held) - len(self._held.lstrip()))
        at = self._held.find(OPEN)
        end = at if at >= 0 else len(self._held) - overlap(self._held, OPEN)
        found.append(self._take(len(self._held[:end].rstrip())))
        self._blank = self._blank and not found[-1].text
        self._search = self._body = self._held.find(OPEN) + len(OPEN) if at >= 0 else 0
        return at >= 0

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
        self._body, self._blank = 0, call is not None
        return True

    def _take(self, length: int, call: Call | None = None) -> Part:
        """Take the first `length` characters of the held text."""
        part = Part("" if call else self._held[:length], self._at, call)
        self._held, self._at = self._held[length:], self._at + length
        self.count += call is not None
        return part

    def _call(self, body: str) -> Call | None:
        try:
            said = loads(body)
            name, arguments = said["name"], said.get("arguments", said.get("parameters")) or {}
            arguments = loads(arguments) if isinstance(arguments, str) else arguments
            if name not in self.names or not isinstance(arguments, dict):
                return None
        except (ValueError, TypeError, KeyError, AttributeError):  # not JSON, no object, no name
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return Call(self.count, f"call_{uuid.uuid4().hex[:24]}", name, text)


def in_string(text: str) -> bool:
    """Whether a JSON string has begun in the text and not ended."""
    inside = escaped = False
    for character in text:
        escaped, quoted = (
            character == "\\" and not escaped and inside,
            character == '"' and not escaped,
        )
        inside ^= quoted
    return inside
