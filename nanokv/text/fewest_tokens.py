"""A lower bound of the number of tokens of a text, without tokenizing it.

A token is a run of the text's bytes. So a text of B bytes has at least B / L
tokens, where L is the number of bytes of the longest token. The same holds for the bytes of one
class: a text of digits has at least as many tokens as it has digits, if no token has two of them.
The largest of these bounds is used. It is never too high.

The bound is 0 for a tokenizer that can drop bytes: a byte that is not in the vocabulary, a
pre-tokenizer that removes what it finds, an added token that swallows the blanks around it.
"""

import json
import string
from typing import Any, NamedTuple

import tokenizers

from nanokv.text.token_bytes import ByteLevel, Spaced

# Unicode normalization makes a text at most this many times shorter in UTF-8 (NFKC: 𝟎, 4 bytes,
# becomes 0).
SHRINKS = 4
# ASCII digits keep their bytes in every normalization. Letters and < = > can be composed with the
# accent that follows.
DIGITS = string.digits.encode()
LETTERS = string.ascii_letters.encode()
BLANKS = b" \t\n\r"


class Counts(NamedTuple):
    """Bytes of a text or, as a maximum, of one token."""

    digits: int
    letters: int
    blanks: int
    all: int

    @classmethod
    def of(cls, data: bytes) -> "Counts":
        """The counts of a text in UTF-8."""
        digits, letters, blanks = (
            len(data) - len(data.translate(None, one)) for one in (DIGITS, LETTERS, BLANKS)
        )
        return cls(digits, letters, blanks, len(data))


class FewestTokens:
    """The bound for one tokenizer. `longest` is None if there is none."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: ByteLevel | Spaced):
        self.normalizes = backend.normalizer is not None
        self.longest: Counts | None = None
        if keeps_all_bytes(backend, spelling):
            self.longest = longest(backend, spelling)

    def of(self, text: str) -> int:
        """At least so many ids has this text."""
        if self.longest is None:
            return 0
        data = text.encode("utf-8", "surrogatepass")
        found = Counts.of(data)
        if self.normalizes and not text.isascii():
            found = found._replace(letters=0, blanks=0, all=-(-found.all // SHRINKS))
        pairs = zip(found, self.longest, strict=True)
        return max(-(-count // max(1, most)) for count, most in pairs)


def keeps_all_bytes(backend: tokenizers.Tokenizer, spelling: ByteLevel | Spaced) -> bool:
    """Whether every byte of a normalized text belongs to a token."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return False
    if any(backend.token_to_id(token) is None for token in spelling.single):
        return False
    if backend.pre_tokenizer is None:
        return not spelling.split
    return not removes(json.loads(backend.pre_tokenizer.__getstate__()))


def removes(step: Any) -> bool:
    """Whether a step of the pre-tokenizer, or one inside it, drops the text that it finds."""
    if isinstance(step, dict):
        return step.get("behavior") == "Removed" or any(map(removes, step.values()))
    if isinstance(step, list):
        return any(map(removes, step))
    return False


def longest(backend: tokenizers.Tokenizer, spelling: ByteLevel | Spaced) -> Counts:
    """The most bytes of each class in one token."""
    added = backend.get_added_tokens_decoder()
    most = [0, 0, 0, 0]
    for token, id in backend.get_vocab(with_added_tokens=True).items():
        data = spelling.added(token) if id in added else spelling.most(token)
        most = list(map(max, most, Counts.of(data)))
    return Counts(*most)
