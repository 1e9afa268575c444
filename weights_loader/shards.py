"""safetensors files → tensors: model.safetensors, or model.safetensors.index.json with its shards.

Every header is checked against the file's size, the index and the config before the first tensor is
made. The tensors are views of the mapped file (no copy), or converted 16 MiB at a time. The headers
are parsed here and not by the safetensors package, because errors must name file, tensor and
numbers. Pickles are never opened.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, raw
little-endian values).
"""

import functools
import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import numpy
import torch

from .gguf_forms import Form
from .gguf_model import POINTER, Rows, places
from .gguf_stacks import Stack
from .names import HEAD, INDEX, SINGLE, read_weight_map
from .prefetch import Prefetch
from .strict import LIMITS, CheckpointError, parse_object, quote

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # in a GGUF file
CPU = torch.device("cpu")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
CHUNK = 1 << 24  # bytes of the file that a conversion maps at once, its only temporary memory
WINDOW = 1 << 30  # bytes of the file in the mapping that the tensors there share
MOST_MAPPINGS = 500  # of one load, half of the files that a process may usually open
MOST_TENSORS = 50_000  # in one file; a shard of a large mixture of experts has some hundreds
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FORMAT_HINT = "the file is incomplete or damaged: fetch it again"


@dataclass(frozen=True)
class Slice:
    """Indices first … end−1 of one dimension of a tensor. An empty Slice skips the tensor."""

    dim: int
    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


# nanokv's name and the shape of a tensor → the Slice to read.
Part = Callable[[str, tuple[int, ...]], Slice]


class Mappings:
    """A mapping for each tensor. With the tensor its pages leave the process."""

    def around(self, path: Path, start: int, end: int) -> tuple[mmap.mmap, int]:
        """A mapping that holds bytes [start, end), and its first byte's place in the file."""
        first = start - start % mmap.ALLOCATIONGRANULARITY  # a mapping must begin at a page
        with open(path, "rb") as file:
            check_size(file, path, end)
            pages = mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
        return pages, first


class Windows(Mappings):
    """The mappings that the tensors of one load share, each alive while a tensor is a view of it.

    Each mapping keeps a file open. A mixture of experts has more tensors than a process may open
    files: 18,867 in Qwen3-30B-A3B, and 1,024 files is the usual limit.
    """

    def __init__(self) -> None:
        self.alive: WeakValueDictionary[tuple[Path, int, int], mmap.mmap] = WeakValueDictionary()

    def around(self, path: Path, start: int, end: int) -> tuple[mmap.mmap, int]:
        first = start // WINDOW
        last = max(first, (end - 1) // WINDOW)
        pages = self.alive.get((path, first, last))
        if pages is None:
            with open(path, "rb") as file:
                size = check_size(file, path, end)
                length = min(size, (last + 1) * WINDOW) - first * WINDOW
                pages = mmap.mmap(
                    file.fileno(), length, access=mmap.ACCESS_COPY, offset=first * WINDOW
                )
            self.alive[path, first, last] = pages
        return pages, first * WINDOW


def check_size(file: BinaryIO, path: Path, end: int) -> int:
    """The bytes of a file. CheckpointError if it ends before byte `end`."""
    size = os.fstat(file.fileno()).st_size
    if size < end:
        raise CheckpointError(
            f"{path} has {size:,} bytes and its header lists {end:,}: it was cut while it was read",
            FORMAT_HINT,
        )
    return size


def with_mappings(entries: "dict[str, Entry]") -> "dict[str, Entry]":
    """The same entries; more than MOST_MAPPINGS of them share windows."""
    if len(entries) <= MOST_MAPPINGS:
        return entries
    return in_windows(entries)


def in_windows(entries: "dict[str, Entry]") -> "dict[str, Entry]":
    """The same entries, with mappings that they share."""
    windows = Windows()
    return {name: replace(entry, mappings=windows) for name, entry in entries.items()}


@dataclass(frozen=True)
class Entry:
    """The place of one tensor: `nbytes` bytes from byte `start` of the file `path`."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int
    mappings: Mappings = field(default_factory=Mappings, kw_only=True, compare=False, repr=False)

    as_stored = True  # the file holds the values in this dtype and order

    def view(self) -> torch.Tensor:
        """The tensor, without a copy."""
        return self.typed(0, self.raw()).view(self.shape)

    def raw(self) -> torch.Tensor:
        """The tensor's bytes (nbytes,) uint8, without a copy."""
        end = self.start + self.nbytes
        pages, first = self.mappings.around(self.path, self.start, end)
        place = self.start - first
        # The tensor keeps the mapping alive.
        return torch.frombuffer(pages, dtype=torch.uint8, count=self.nbytes, offset=place)

    def typed(self, offset: int, raw: torch.Tensor) -> torch.Tensor:
        """Bytes (nbytes,) from byte `offset` of this tensor on → (n,) of its dtype."""
        # Legal in the file, but a view must be aligned.
        if (self.start + offset) % self.dtype.itemsize:
            raw = raw.clone()
        return raw.view(self.dtype)

    def mapped(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes [offset, offset + nbytes) → (n,) of its dtype, in a mapping of their own."""
        start = self.start + offset
        skip = start % mmap.ALLOCATIONGRANULARITY  # a mapping must begin at a page
        with open(self.path, "rb") as file:
            pages = mmap.mmap(
                file.fileno(), nbytes + skip, access=mmap.ACCESS_COPY, offset=start - skip
            )
        raw = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=skip)
        return self.typed(offset, raw)

    def rows(self, first: int, end: int) -> "Entry":
        """Rows first … end−1 of dimension 0, which are contiguous in the file."""
        each = self.nbytes // self.shape[0]
        return replace(
            self,
            shape=(end - first, *self.shape[1:]),
            start=self.start + first * each,
            nbytes=(end - first) * each,
        )

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, (n,) values) for each part of the tensor, with one mapping at a time."""
        for offset in range(0, self.nbytes, CHUNK):
            nbytes = min(CHUNK, self.nbytes - offset)
            yield offset // self.dtype.itemsize, self.mapped(offset, nbytes)


@dataclass(frozen=True)
class GgufEntry(Entry):
    """Rows of a tensor in a GGUF file that are quantized, permuted or in another form.

    llama.cpp permutes the rows of Llama's q and k so that the pairs that RoPE rotates are adjacent.
    The other forms are in gguf_forms.py.
    """

    type: Any = None  # gguf.GGMLQuantizationType
    heads: int = 0  # number of heads if the rows are permuted, else 0
    forms: tuple[Form, ...] = ()

    @classmethod
    def of(cls, path: Path, name: str, place: Rows) -> Entry:
        """The rows at `place`. An Entry if they are as the model has them."""
        info, first, rows, heads, forms = place
        dtype = STORED.get(info.type.name, torch.float32)
        shape = info.shape
        row_bytes = info.nbytes // rows
        if len(info.shape) > 1:
            shape = (rows, info.shape[-1])
            row_bytes = info.nbytes // math.prod(info.shape[:-1])
        start = info.start + first * row_bytes
        nbytes = rows * row_bytes
        if heads and rows % (2 * heads):
            raise CheckpointError(
                f"{path}: tensor {quote(name)} has {rows:,} rows, no pairs for {heads} heads"
            )
        for form in reversed(forms):
            shape = form.shape(shape)
        if info.type.name in STORED and not heads and not forms:
            return Entry(path, name, dtype, shape, start, nbytes)
        if not dequantizes(info.type):
            raise CheckpointError(
                f"{path}: tensor {quote(name)} has type {info.type.name}, which the gguf package "
                "does not turn into numbers",
                "take a file with other quantization",
            )
        return cls(path, name, dtype, shape, start, nbytes, info.type, heads, forms)

    as_stored = False

    def rows(self, first: int, end: int) -> "GgufEntry":
        """As in Entry. Permuted rows must be whole heads."""
        part = super().rows(first, end)
        assert isinstance(part, GgufEntry)
        return replace(part, heads=self.heads * (end - first) // self.shape[0])

    def blocks(self) -> torch.Tensor:
        """The rows as stored, uint8 (rows, bytes of a row).

        A view of the file; permuted rows are copied into their order.
        """
        count = self.shape[0]
        if not self.heads:
            return self.raw().view(count, -1)
        # Read, not mapped, and permuted by numpy: no page enters the process only to be copied, and
        # torch would wait for its threads at each of many small copies.
        with open(self.path, "rb") as file:
            raw = numpy.fromfile(file, numpy.uint8, self.nbytes, offset=self.start)
            check_size(file, self.path, self.start + self.nbytes)
        pairs = raw.reshape(self.heads, -1, 2, self.nbytes // count)  # (heads,D/2,2,bytes)
        return torch.from_numpy(pairs.swapaxes(1, 2).reshape(count, -1))

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, (n,) fp32 values) for each part, in whole rows or whole heads.

        A tensor in another form is one part: its rows, or parts of them, may change places.
        """
        import gguf

        rows = self.shape[0]
        width = math.prod(self.shape[1:])
        unit = rows // self.heads if self.heads else 1
        step = max(1, CHUNK // (4 * width * unit)) * unit
        if self.forms:
            step = rows
        blocks = numpy.memmap(self.path, numpy.uint8, "r", self.start, (rows, self.nbytes // rows))
        for first in range(0, rows, step):
            numbers = gguf.quants.dequantize(blocks[first : first + step], self.type)
            writable = numpy.require(numbers, requirements="W")  # no view of the file
            values = torch.from_numpy(writable)
            for form in reversed(self.forms):
                values = form.read(values, self.name)
            if self.heads:  # (heads,D/2,2,K) → (heads,2,D/2,K)
                values = values.view(-1, unit // 2, 2, width).transpose(1, 2)
            yield first * width, values.reshape(-1)


@dataclass(frozen=True)
class StackEntry(Entry):
    """A tensor of all experts of a layer, gpt-oss's, whose parts in a GGUF file are (out,in).

    It is converted one expert at a time: 66 MB in fp32 for gpt-oss-20b's gate and up, and a copy.
    """

    parts: tuple[Entry, ...] = ()  # the rows of all experts of each part; ours has them in turn

    @classmethod
    def of(cls, path: Path, name: str, place: Stack) -> "StackEntry":
        """The tensor at `place`. Its dtype is that of the parts, fp32 if they differ."""
        parts = tuple(
            GgufEntry.of(path, info.name, Rows(info, 0, math.prod(info.shape[:-1])))
            for info in place.parts
        )
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        nbytes = sum(part.nbytes for part in parts)
        return cls(path, name, dtype, place.shape, parts[0].start, nbytes, parts=parts)

    as_stored = False

    def rows(self, first: int, end: int) -> "StackEntry":
        """Experts first … end−1."""
        experts = self.shape[0]
        parts = []
        for part in self.parts:
            each = part.shape[0] // experts
            parts.append(part.rows(first * each, end * each))
        return replace(
            self,
            shape=(end - first, *self.shape[1:]),
            nbytes=sum(part.nbytes for part in parts),
            parts=tuple(parts),
        )

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, (n,) values) for each expert."""
        size = math.prod(self.shape[1:])
        for expert in range(self.shape[0]):
            held = self.rows(expert, expert + 1).parts
            columns = [materialize(part, self.dtype, CPU).T for part in held]  # (in,out) each
            yield expert * size, torch.stack(columns, -1).reshape(size)


def gguf_entry(path: Path, name: str, place: Rows | Stack) -> Entry:
    """The entry of one tensor of a GGUF file."""
    if isinstance(place, Stack):
        return StackEntry.of(path, name, place)
    return GgufEntry.of(path, name, place)


@functools.cache
def dequantizes(type_: Any) -> bool:
    """Whether the gguf package can dequantize this type. Tried with a block of zeros."""
    import gguf

    _, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    try:
        gguf.quants.dequantize(numpy.zeros((1, block_bytes), numpy.uint8), type_)
    except NotImplementedError:
        return False
    return True


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """(file names, weight map of the index or {}).

    A single file takes precedence over an index, as in transformers.
    """
    if os.path.lexists(folder / SINGLE):
        return [SINGLE], {}
    if os.path.lexists(folder / INDEX):
        weight_map = read_weight_map(folder / INDEX)
        return sorted(set(weight_map.values())), weight_map
    found = ""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        found = f"; {pickles[0]} is a pickle, which can run any program and is never opened"
    raise CheckpointError(
        f"{folder} has neither {SINGLE} nor {INDEX}{found}",
        hint="save the model as safetensors: model.save_pretrained(folder) in transformers does",
    )


def read_entries(folder: Path, tied: bool = True) -> dict[str, Entry]:
    """Every tensor of the checkpoint by its stored name, from the headers alone.

    The index names the shards. As in transformers, all tensors in the shards count, even if the
    index omits one. A tensor in the index must exist, except a `tied` head, which some writers list
    and do not store.
    """
    if (folder / POINTER).is_file():
        path, tensors = places(folder)
        found: dict[str, Entry] = {
            name: gguf_entry(path, name, place) for name, place in tensors.items()
        }
        return with_mappings(found)
    files, weight_map = weight_files(folder)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(files)} weight files are missing "
            f"or not regular files: {missing[0]}",
            hint="the download or copy is incomplete: fetch it again",
        )
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(folder / file).items():
            if name in entries:
                raise CheckpointError(
                    f"tensor {quote(name)} is in {entries[name].path.name} and in {file}"
                )
            listed = weight_map.get(name, file)
            if listed != file:
                raise CheckpointError(
                    f"{folder / file} holds {quote(name)}, which {INDEX} puts in {listed}"
                )
            entries[name] = entry
    _check_index(folder, weight_map, entries, tied)
    return with_mappings(entries)


def _check_index(
    folder: Path, weight_map: dict[str, str], entries: dict[str, Entry], tied: bool
) -> None:
    """CheckpointError if a tensor of the index is in no file. A tied head may be absent."""
    absent = [name for name in weight_map if name not in entries]
    if tied:
        absent = [name for name in absent if name != HEAD]
    if absent:
        first = absent[0]
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise CheckpointError(
            f"{folder / weight_map[first]} lacks {quote(first)}, which {INDEX} puts there{more}"
        )


def read_header(path: Path) -> dict[str, Entry]:
    """The checked header of one file.

    Checks JSON, dtypes and shapes, that offsets have no gap or overlap, and the exact file size.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LIMITS["safetensors header"]):
            raise CheckpointError(
                f"{path}: header of {length:,} bytes does not fit in a file of {size:,} bytes "
                f"(limit {LIMITS['safetensors header']:,})",
                FORMAT_HINT,
            )
        header = parse_object(file.read(length), f"header of {path}")
    _check_metadata(path, header.pop("__metadata__", {}))
    if len(header) > MOST_TENSORS:
        raise CheckpointError(
            f"{path} has {len(header):,} tensors; at most {MOST_TENSORS:,} are read of one file",
            FORMAT_HINT,
        )
    entries = [_entry(path, name, fields, 8 + length) for name, fields in header.items()]
    _check_places(path, entries, 8 + length, size)
    return {entry.name: entry for entry in entries}


def _check_places(path: Path, entries: list[Entry], start: int, size: int) -> None:
    """CheckpointError unless the tensors fill the file from `start` on, without gap or overlap."""
    end = start
    last = ""
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != end:
            problem = "overlaps the one" if entry.start < end else "leaves a hole"
            raise CheckpointError(
                f"{path}: tensor {quote(entry.name)} begins at byte {entry.start:,}, "
                f"expected {end:,}: it {problem} before it",
                FORMAT_HINT,
            )
        end += entry.nbytes
        last = f", last tensor {quote(entry.name)}"
    if end != size:
        raise CheckpointError(
            f"{path}: its header describes {end:,} bytes, the file has {size:,}{last}", FORMAT_HINT
        )


def _check_metadata(path: Path, metadata: Any) -> None:
    """CheckpointError unless __metadata__ maps names to texts, as the format requires."""
    if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        return
    raise CheckpointError(
        f"header of {path}: __metadata__ is {str(metadata)[:80]}, not texts by name", FORMAT_HINT
    )


def _entry(path: Path, name: str, fields: Any, data_start: int) -> Entry:
    """One header field → Entry. Checks dtype and shape, and that the offsets agree with both."""
    where = f"{path}: tensor {quote(name)}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: expected dtype, shape and data_offsets, found {str(fields)[:80]}"
        )
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{where} has dtype {quote(dtype)}; known are {', '.join(DTYPES)}",
            hint="quantized checkpoints are not supported: take the bf16 original",
        )
    shape = fields["shape"]
    if not _naturals(shape) or len(shape) > 8:
        raise CheckpointError(f"{where} has shape {str(shape)[:80]}, not a list of sizes")
    offsets = fields["data_offsets"]
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {str(offsets)[:80]}, not [begin, end]")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise CheckpointError(
            f"{where}: {dtype} {shape} takes {nbytes:,} bytes, its data_offsets {offsets} "
            f"span {end - begin:,}",
            FORMAT_HINT,
        )
    return Entry(path, name, DTYPES[dtype], tuple(shape), data_start + begin, nbytes)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def materialize(
    entry: Entry,
    dtype: torch.dtype | None,
    device: torch.device,
    prefetched: Prefetch | None = None,
) -> torch.Tensor:
    """The tensor: a view of the file or of `prefetched` memory, or a conversion in chunks.

    A view if the tensor stays on the CPU in its stored dtype.
    """
    if entry.as_stored and dtype in (None, entry.dtype) and device.type == "cpu":
        at = None
        if prefetched is not None:
            at = prefetched.taken(entry.path, entry.start, entry.nbytes)
        if prefetched is None or at is None:
            # Takes no memory yet: pages are read on first access.
            return entry.view()
        whole = torch.frombuffer(prefetched.memory, dtype=torch.uint8)  # one storage for all
        return whole[at : at + entry.nbytes].view(entry.dtype).view(entry.shape)
    result = torch.empty(entry.shape, dtype=dtype or entry.dtype, device=device)
    flat = result.view(-1)
    for first, values in entry.chunks():
        part = flat[first : first + len(values)].copy_(values)
        # The largest fp16 value is 65,504.
        if dtype == torch.float16 and entry.dtype != dtype and not part.isfinite().all():
            largest = values.float().abs().max().item()
            raise CheckpointError(
                f"{entry.path}: tensor {quote(entry.name)} has a value that does not fit "
                f"in float16 (largest stored {largest:.6g}, limit 65,504)",
                hint="load it as bfloat16 or float32",
            )
    return result


def materialize_slice(
    entry: Entry, part: Slice, dtype: torch.dtype | None, device: torch.device
) -> torch.Tensor:
    """`materialize` for part of a tensor.

    Rows can be a view of the file. Columns are copied, CHUNK bytes of the file at a time, because a
    view of columns would keep all of the file's pages in memory.
    """
    if part.dim == 0:
        return materialize(entry.rows(part.first, part.end), dtype, device)
    rows = entry.shape[0]
    result = torch.empty((rows, part.size), dtype=dtype or entry.dtype, device=device)
    step = max(1, CHUNK * rows // entry.nbytes)
    for first in range(0, rows, step):
        end = min(rows, first + step)
        block = materialize(entry.rows(first, end), dtype, device)  # (≤ step,width)
        result[first:end] = block[:, part.first : part.end]
    return result


def equal(a: Entry, b: Entry) -> bool:
    """Whether both tensors have the same values. Reads both, 16 MiB at a time."""
    if a.shape != b.shape or a.dtype != b.dtype or type(a) is not type(b):
        return False
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(a.chunks(), b.chunks(), strict=True))
