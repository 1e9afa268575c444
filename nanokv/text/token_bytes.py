"""The bytes that a token of a vocabulary stands for, by the two spellings of published BPE tokenizers.

    ByteLevel   a character per byte, by GPT-2's table: "Ġthe" is b" the"
    Spaced      text with ▁ for a space, and <0x0A> for a byte (SentencePiece): "▁the" is b" the"

In both, a text can be decoded token by token.
"""

import json
import re

import tokenizers

from weights_loader.gguf_spaced import BYTES, SPACE

BYTE = re.compile("<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character → byte: GPT-2's table, which gives every byte a visible character.

    Radford et al. 2019.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    found = {chr(byte): byte for byte in visible}
    return found | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
TABLE = {ord(character): byte for character, byte in BYTE_OF.items()}


class ByteLevel:
    """GPT-2 and relatives: every token of the vocabulary is a run of bytes."""

    single = tuple(BYTE_OF)  # the tokens that stand for one byte each
    split = True  # a step of the pre-tokenizer turns a text into bytes

    def of(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary."""
        try:
            return bytes([BYTE_OF[character] for character in token])
        except KeyError:  # a word with characters outside the byte table
            return token.encode()

    def added(self, token: str) -> bytes:
        """The bytes of an added token: its own text, even if the table has all its characters."""
        return token.encode()

    def most(self, token: str) -> bytes:
        """As many bytes of each kind as `of`, faster. One beyond the table occurs in no text."""
        return token.translate(TABLE).encode("latin-1", "replace")


class Spaced:
    """SentencePiece: a token is text, with ▁ for a space, or one byte."""

    single = BYTES
    split = False

    def of(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary."""
        byte = BYTE.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        return token.replace(SPACE, " ").encode()

    def added(self, token: str) -> bytes:
        """The bytes of an added token."""
        return token.replace(SPACE, " ").encode()

    most = of


def spelling(backend: tokenizers.Tokenizer) -> ByteLevel | Spaced:
    """The spelling of this tokenizer's tokens, by its decoder."""
    decoder = backend.decoder
    if decoder is not None and json.loads(decoder.__getstate__())["type"] == "Sequence":
        return Spaced()
    return ByteLevel()
