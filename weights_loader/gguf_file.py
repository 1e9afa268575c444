"""Read a GGUF file's header: metadata and tensor positions, checked against the file's size.

gguf.GGUFReader is not used for two reasons. It makes an array for every token and merge: 12 s for
SmolLM2's 98,000 on a slow core, 0.2 s here. And it trusts the counts in a hostile file. The sizes
of the types and their dequantization come from the `gguf` package. No torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (magic, version, counts, key-value
pairs, tensor infos, padding, tensors).
"""

import functools
import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .strict import CheckpointError, quote

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_KEYS = 4_096
MOST_TENSORS = 50_000
MOST_ITEMS = 2_000_000  # in one list; Gemma 3 has 262,144 tokens and 514,906 merges
LONGEST_KEY = 1_024  # bytes
LONGEST_TEXT = 4_000_000  # bytes; the longest published chat templates have 20,000
USUAL_TEXT = 32  # bytes of a token or a merge with its length; SmolLM2's have 15 on average
MOST_DIMENSIONS = 4
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TEXT = 8
LIST = 9
DAMAGED = "the file is incomplete or damaged: fetch it again"
Data = bytes | mmap.mmap


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its name in the file, its shape (largest stride first), and its bytes."""

    name: str
    shape: tuple[int, ...]
    type: Any  # gguf.GGMLQuantizationType
    start: int  # byte position in the file
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed header. `metadata` maps a key to a number, a bool, a text or a list of these."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    header: int  # bytes before the first tensor


def is_gguf(path: Path) -> bool:
    """Whether this is a regular file that begins with GGUF or is named .gguf.

    The content counts because ollama's blobs are named sha256-…. The name counts so that reading a
    damaged .gguf file raises an error about its content.
    """
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            return path.suffix == ".gguf" or file.read(4) == MAGIC
    except OSError:
        return path.suffix == ".gguf"


def read_gguf(path: Path) -> GgufFile:
    """The checked header; CheckpointError if it is malformed. No tensor is read.

    The header that was read last is kept, because loading a model asks for it several times.
    """
    status = path.stat()
    return read_version(path, (status.st_size, status.st_mtime_ns, status.st_ino))


@functools.lru_cache(maxsize=1)
def read_version(path: Path, version: tuple[int, ...]) -> GgufFile:
    """`read_gguf` for one version of the file: its size, time of change and inode."""
    with open(path, "rb") as file:
        size = version[0]
        if size < 24 or file.read(4) != MAGIC:
            raise CheckpointError(
                f"{path} is no GGUF file: it does not begin with GGUF and a header", DAMAGED
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse(path, data)


def parse(path: Path, data: Data) -> GgufFile:
    """Parse the header at the beginning of `data`."""
    header = Header(path, data)
    version = header.number("I")
    if version not in VERSIONS:
        swapped = ", or its bytes are in the other order" if version > 0xFFFF else ""
        raise CheckpointError(
            f"{path} has GGUF version {version}{swapped}; 2 and 3 are read",
            "convert it again with a current llama.cpp",
        )
    count, keys = header.numbers("2Q")
    for what, number, most in (("tensors", count, MOST_TENSORS), ("keys", keys, MOST_KEYS)):
        if number > most:
            raise header.damaged(f"says that it has {number:,} {what}, at most {most:,} are read")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = header.text(LONGEST_KEY)
        if key in metadata:
            raise header.damaged(f"has the key {quote(key)} twice")
        metadata[key] = header.value(key)
    return GgufFile(path, metadata, *tensors(header, count, metadata))


class Header:
    """A reader with a position. Every read is checked against the end of the file."""

    def __init__(self, path: Path, data: Data):
        self.path = path
        self.data = data
        self.position = len(MAGIC)

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {what} (byte {self.position:,} of {len(self.data):,})", DAMAGED
        )

    def take(self, count: int) -> int:
        """The start of the next `count` bytes; moves the position behind them."""
        if count > len(self.data) - self.position:
            raise self.damaged(f"ends inside its header: {count:,} more bytes were announced")
        self.position += count
        return self.position - count

    def numbers(self, form: str) -> tuple:
        form = "<" + form  # without padding
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def text(self, longest: int = LONGEST_TEXT) -> str:
        length = self.number("Q")
        if length > longest:
            raise self.damaged(f"has a text of {length:,} bytes, at most {longest:,} are read")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"has a text that is not UTF-8: {error.reason}") from None

    def value(self, key: str) -> Any:
        """The value of a key: a scalar, a text, or a list of either. Nested lists are refused."""
        kind = self.number("I")
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self.items(key)
        return self.scalars(key, kind, 1)[0]

    def items(self, key: str) -> Sequence:
        """A list of scalars or of texts."""
        kind = self.number("I")
        count = self.number("Q")
        if count > MOST_ITEMS:
            raise self.damaged(
                f"key {quote(key)} has a list of {count:,} values, at most {MOST_ITEMS:,} are read"
            )
        if kind != TEXT:
            return list(self.scalars(key, kind, count))
        if count * 8 > len(self.data) - self.position:  # each text begins with 8 bytes of length
            raise self.damaged(
                f"ends inside its header: key {quote(key)} announces {count:,} texts"
            )
        found = plain_texts(self.path, self.data, self.position, count)
        if found is None:
            return [self.text() for _ in range(count)]
        self.position += len(found.data)
        return found

    def scalars(self, key: str, kind: int, count: int) -> tuple:
        if kind not in SCALARS:
            raise self.damaged(f"key {quote(key)} has a value of the unknown type {kind}")
        return self.numbers(f"{count}{SCALARS[kind]}")


class Texts(Sequence[str]):
    """A list of texts, decoded when the first one is asked for.

    The weights are read without it. Decoding takes half the time of SmolLM2's header.
    """

    def __init__(self, path: Path, data: bytes, count: int):
        """data: each text behind 8 zero bytes, and no other zero byte."""
        self.path = path
        self.data = data
        self.length = count

    @functools.cached_property
    def decoded(self) -> list[str]:
        try:
            return self.data.decode("utf-8").split("\0" * 8)[1:]
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path} has a text that is not UTF-8: {error.reason}", DAMAGED
            ) from None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.decoded[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.decoded == list(other)


def plain_texts(path: Path, data: Data, start: int, count: int) -> Texts | None:
    """The `count` texts from byte `start` on; None if they are not plain.

    Plain: 1 to 65,535 bytes without a zero byte, as in every published vocabulary. So the length
    before a text ends with 6 zero bytes, and no text has them: they show where the texts begin, in
    a tenth of the time of going from one to the next. Then each length must lead to the next text.
    """
    import numpy

    size = min(USUAL_TEXT * count, len(data) - start)
    if size < 8:
        return None
    window = numpy.frombuffer(data, numpy.uint8, size, start)
    zero = window == 0
    behind_zeros = ~zero[6:]
    for i in range(6):
        behind_zeros &= zero[i : i - 6]
    first = numpy.flatnonzero(behind_zeros)[:count] + 6  # byte of each text
    if len(first) < count or first[0] != 8:
        return None
    lengths = window[first - 8] + 256 * window[first - 7].astype(numpy.int64)
    ends = first + lengths
    if (first[1:] != ends[:-1] + 8).any() or ends[-1] > size:
        return None
    whole = window[: ends[-1]].copy()
    whole[first - 8] = 0
    whole[first - 7] = 0
    if numpy.count_nonzero(whole) != lengths.sum():
        return None
    return Texts(path, whole.tobytes(), count)


def tensors(header: Header, count: int, metadata: dict) -> tuple[dict[str, TensorInfo], int]:
    """(name → tensor, bytes of the header).

    Each tensor must begin where the one before it ends, as in llama.cpp.
    """
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
        raise header.damaged(
            f"has general.alignment {alignment!r}, no power of two from 8 to 65,536"
        )
    infos = [tensor_info(header) for _ in range(count)]
    base = rounded_up(header.position, alignment)
    found: dict[str, TensorInfo] = {}
    end = 0
    for name, shape, type_, offset, nbytes in infos:
        if name in found:
            raise header.damaged(f"has the tensor {quote(name)} twice")
        if offset != end:
            raise header.damaged(
                f"puts tensor {quote(name)} at byte {offset:,} of its data, expected {end:,}"
            )
        last = base + offset + nbytes
        if last > len(header.data):
            raise header.damaged(
                f"has {len(header.data):,} bytes, but tensor {quote(name)} ends at byte {last:,}"
            )
        found[name] = TensorInfo(name, shape, type_, base + offset, nbytes)
        end = rounded_up(offset + nbytes, alignment)
    return found, base


def rounded_up(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def tensor_info(header: Header) -> tuple:
    """(name, shape, type, offset in the data, bytes) of the next tensor in the header."""
    import gguf

    name = header.text(LONGEST_KEY)
    dimensions = header.number("I")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise header.damaged(
            f"gives tensor {quote(name)} {dimensions:,} dimensions, 1 to {MOST_DIMENSIONS} are read"
        )
    *sizes, kind, offset = header.numbers(f"{dimensions}QIQ")
    shape = tuple(reversed(sizes))
    try:
        type_ = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise header.damaged(f"gives tensor {quote(name)} the unknown type {kind}") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    if not all(shape) or shape[-1] % block:
        raise header.damaged(
            f"gives tensor {quote(name)} the shape {list(shape)}, no whole blocks of {block}"
        )
    return name, shape, type_, offset, math.prod(shape) // block * block_bytes
