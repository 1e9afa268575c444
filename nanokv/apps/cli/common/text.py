"""Text in and out: bytes to text, checks of arguments and of typed control tokens, JSON.

Nothing is guessed or dropped silently: invalid UTF-8 is an error with its position. A byte order
mark is removed, and CRLF becomes LF. NUL is an ordinary character here (a byte-level tokenizer has
a token for it).
"""

import json
import math
import re
import sys
from typing import TYPE_CHECKING, BinaryIO

from nanokv.apps.cli.common.terminal import sanitize_line
from nanokv.errors import NanoKVError

if TYPE_CHECKING:
    from nanokv.text.tokenizer import Tokenizer

SURROGATE = re.compile("[\ud800-\udfff]")


def read_prompt_bytes(data: bytes, where: str) -> str:
    """Strict UTF-8 → text without BOM, with \\n line ends. NanoKVError: `where`, and the byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "save it as UTF-8, for example: iconv -t utf-8"
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            hint = "it looks like UTF-16: iconv -f utf-16 -t utf-8"
        raise NanoKVError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}", hint
        ) from None
    return clean(text)


def stdin() -> BinaryIO:
    """stdin as a binary file; NanoKVError if it is closed (`<&-`)."""
    if sys.stdin is None:
        raise NanoKVError("stdin is closed", "give it something to read: < FILE, or < /dev/null")
    return sys.stdin.buffer


def clean(text: str) -> str:
    """The text without a byte order mark, CRLF → LF."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def check_argument(text: str, where: str) -> str:
    """The argument itself; NanoKVError if its bytes were not UTF-8.

    Python passes such bytes as surrogates (PEP 383); tokenizers would raise a TypeError later.
    """
    found = SURROGATE.search(text)
    if found is None:
        return text
    before = text[: found.start()]
    position = len(before.encode())
    code = ord(found[0])
    byte = "a lone surrogate"
    if code >= 0xDC80:
        byte = f"byte 0x{code - 0xDC00:02x}"
    raise NanoKVError(
        f"{where} is not UTF-8: {byte} at position {position}, "
        f"after {sanitize_line(before[-20:])!r}",
        "pass it through --file or a pipe in UTF-8",
    )


def find_special(text: str, tokenizer: "Tokenizer") -> str | None:
    """The first control token that is spelled out in `text`, or None."""
    return next(iter(tokenizer.special_tokens_in(text)), None)


def refuse_special(text: str, tokenizer: "Tokenizer", allow: bool) -> None:
    """NanoKVError if the text spells out a control token such as <|im_end|>, unless `allow`."""
    if allow:
        return
    token = find_special(text, tokenizer)
    if token is not None:
        raise NanoKVError(
            f"message contains {token}, a control token",
            "--allow-special sends it to the model as that token",
        )


# JSON escapes C0. These are DEL, C1, bidi marks and overrides, separators, BOM, lone surrogates.
UNSEEN = re.compile(
    "[\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def to_json(value: object) -> str:
    """One line of JSON for a terminal or a program.

    Ordinary text stays readable; characters that control a terminal or hide text are escaped. NaN
    and infinity, which JSON lacks, become null.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
