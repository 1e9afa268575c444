"""What a cache may offer besides the contract of base.py, and what it answers if it does not.

    kernels   in_place, reserve, patched: where keys and values lie, so that a decode step copies nothing
    batches   batch_size, width, check_truncate, snapshot, rollback: rows of different lengths, all or none
    guesses   max_rollback: how many tokens speculative decoding may append and take back
    beams     reorder, reordered
    files     state, restore; save, load
    prefixes  reuse, remember
    ranks     attention: for keys that a mask cannot speak of, because other processes hold them

Each default is either right for every cache or raises UnsupportedError.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from nanokv.cache import saving
from nanokv.cache.checks import check_index
from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError

Index: TypeAlias = Sequence[int] | torch.Tensor  # of rows


class FirstNames:
    """`renamed`: names of the first release, which a class written for it may define or ask for; each use warns."""

    renamed: dict = {}

    def __getattr__(self, name: str):
        if name not in self.renamed:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        new = self.renamed[name]
        warnings.warn(f"{type(self).__name__}.{name} is called {new} now", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        for old, new in cls.renamed.items():
            number = old == "rollback" and not callable(vars(cls).get(old))  # a method of this name is today's
            if old in vars(cls) and new not in vars(cls) and (number or old != "rollback"):
                warnings.warn(f"{cls.__name__}.{old} is called {new} now", DeprecationWarning, stacklevel=3)
                setattr(cls, new, vars(cls)[old])
                delattr(cls, old)


@dataclass(eq=False)
class Pages:
    """Where the keys and values of every row lie, for an attention that reads them there instead of from a copy.

    Row b holds `lengths[b]` tokens, in pages `table[b]`, oldest first; without a table in page b, one for each row.
    """

    keys: torch.Tensor  # (P,Hk,page,D)
    values: torch.Tensor
    lengths: torch.Tensor  # (B,) int32; a list will do
    table: torch.Tensor | None = None  # (B,n) int32

    def __post_init__(self):
        device = getattr(self.lengths, "device", "cpu")
        with torch.inference_mode(False):  # steps outside of that mode write to it too
            self.lengths = torch.as_tensor(self.lengths, dtype=torch.int32, device=device)


class LayerCapabilities(FirstNames):
    """Of one layer."""

    append: Callable  # LayerCache has it, and nbytes
    nbytes: int
    own_append: Callable  # the one that the class was written with
    renamed = {"rollback": "max_rollback", "room": "reserve", "mark": "snapshot", "back": "rollback",
               "rows": "batch_size", "expects": "expected"}  # fmt: skip
    capacity: int | None = None  # the most tokens that fit; None = as memory allows
    sinks: int = 0  # first tokens that stay when later ones leave the cache
    batch_size: int | None = None  # rows stored; None while any number may come
    in_place = False  # can `reserve` be asked? Then a decode step needs no mask either: the pages say each row's length
    max_rollback: int | None = None  # tokens that one append may bring and truncate undo without a trace; None = any
    expected = (None, None, None, None)  # (Hk, D, dtype, device) that make_cache was told; None = whatever comes first

    def __init_subclass__(cls, **options):
        """A class with an `append` of its own is asked for that: `reserve` of a class above would pass it by."""
        super().__init_subclass__(**options)
        defined = {name: [name in vars(c) for c in cls.__mro__].index(True) for name in ("append", "reserve")}
        if defined["append"] < defined["reserve"]:
            cls.in_place = False
        cls.own_append = cls.append

    @property
    def patched(self) -> bool:
        """Has a caller put another function in the place of the class's `append`? `reserve` would pass it by."""
        return getattr(self.append, "__func__", None) is not type(self).own_append

    @property
    def used_nbytes(self) -> int:
        """Of `nbytes`, what the tokens take; a cache that reserves room overrides it."""
        return self.nbytes

    def reserve(self, like: torch.Tensor) -> Pages:
        """A slot for one more token per row, counted as seen: the caller writes its key and value (B,Hk,1,D), in the
        shape and dtype of `like`, at the last place of each row, lengths − 1."""
        raise UnsupportedError(f"{type(self).__name__} does not store in place")

    def place(self, k: torch.Tensor, v: torch.Tensor) -> Pages:
        """`append` of one token per row for a reader of pages: k and v (B,Hk,1,D) go where `reserve` says, no copy."""
        if not self.in_place:
            keys, values = self.append(k, v)  # (B,Hk,S,D) ×2
            return Pages(keys, values, torch.full((keys.shape[0],), keys.shape[2]))
        pages = self.reserve(k)
        size = pages.keys.shape[2]
        for b, last in enumerate((pages.lengths - 1).tolist()):
            page = b if pages.table is None else int(pages.table[b, last // size])
            pages.keys[page, :, last % size], pages.values[page, :, last % size] = k[b, :, 0], v[b, :, 0]
        return pages

    def width(self, T: int) -> int:
        """S: how many keys the append of T tokens will return."""
        return self.length + T

    def check_truncate(self, n: int) -> None:
        """Raise what truncate(n) would, and change nothing: asked of all layers and rows before the first is cut."""
        if type(n) is not int or n < 0:
            raise CacheError(f"truncate({n!r}): a number of tokens ≥ 0 was expected")

    def snapshot(self) -> Any:
        """What `rollback` needs to undo the next append, even where truncate could not. Copies nothing."""
        return self.length

    def rollback(self, snapshot: Any) -> None:
        """As if the append since `snapshot` had never been."""
        self.truncate(snapshot)

    def reorder(self, index: Index) -> None:
        """Row b becomes old row index[b] (beam search); the batch may grow or shrink."""
        raise UnsupportedError(f"{type(self).__name__} cannot reorder")

    def reordered(self, index: Index) -> Any:
        """A copy in which row b is this one's row index[b]."""
        copy = self.fork()
        copy.reorder(index)
        return copy

    def state(self) -> dict:
        """The tensors that `restore` needs to rebuild this layer: {name: tensor}."""
        raise UnsupportedError(f"{type(self).__name__} cannot be saved")

    def restore(self, state: dict) -> None:
        """Take over what `state` returned."""
        raise UnsupportedError(f"{type(self).__name__} cannot be loaded")


class CacheCapabilities(FirstNames, list):
    """Of the whole cache, a list of layers."""

    renamed = {"rollback": "max_rollback", "asked": "requested_capacity", "asked_rows": "requested_rows"}
    name = "dict"
    options: dict = {}  # what make_cache was called with, besides sizes
    requested_capacity: int | None = None  # the capacity that make_cache was called with
    requested_rows = 1  # its batch_size
    tokens: tuple | list = ()  # of a loaded cache: the ids that were saved with it
    maker: Callable  # make_cache, put here by registry.py, which knows the kinds; this file does not

    def __repr__(self):
        tokens = self[0].length if self else 0
        if not isinstance(tokens, int):  # rows of their own lengths
            tokens = f"{int(min(tokens))} to {int(max(tokens))}"
        return f"<{type(self).__name__} {self.name!r}: {len(self)} layers × {tokens} tokens, {self.nbytes:,} B>"

    @property
    def capacity(self) -> int | None:
        """The most tokens this cache can hold; None = as memory allows."""
        return self[0].capacity if self else None

    @property
    def batch_size(self) -> int:
        """Rows held; of an empty cache, rows that it was made for."""
        return (self[0].batch_size if self else None) or self.requested_rows

    @property
    def max_rollback(self) -> int | None:
        """The longest guess that can be appended and truncated as if it had never been there; None = any."""
        return self[0].max_rollback if self else None

    @property
    def used_nbytes(self) -> int:
        """Of `nbytes`, what the tokens take; the rest is reserved for later ones."""
        return sum(layer.used_nbytes for layer in self)

    def reserve_layers(self, like: torch.Tensor) -> list[Pages]:
        """`reserve` of every layer, for a kernel that goes through all of them in one call."""
        return [layer.reserve(like) for layer in self]

    def reuse(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt this empty cache already knows; a cache that shares nothing: none."""
        return 0

    def remember(self, tokens: Sequence[int]) -> None:
        """These tokens are in the cache now; a cache that shares prefixes takes note."""

    def attention(self, T: int) -> Callable | None:
        """attend(q, k, v) for the next T queries, asked in the place of `mask`; None: ask `mask`."""
        return None

    def copy(self) -> Any:
        return self.fork()

    def __copy__(self):
        return self.fork()  # a shallow copy would append to the same layers, and give pages back that it never took

    def __deepcopy__(self, memo):
        return self.fork()

    def made_like(self, other: "CacheCapabilities") -> Any:
        """Take over what make_cache wrote on another cache, and the ids it was saved with."""
        for name in ("name", "options", "requested_capacity", "requested_rows", "tokens"):
            setattr(self, name, getattr(other, name))
        for mine, theirs in zip(self, other, strict=False):
            mine.expected = theirs.expected
        return self

    def reorder(self, index: Index) -> None:
        """Row b of every layer becomes old row index[b]; the rows may repeat, and the batch may grow or shrink.

        All layers or none: until the last one is made, old and new rows are both in memory.
        """
        index, layers = check_index(index, self.batch_size), []
        for layer in self:
            layers.append(layer.reordered(index))
            layers[-1].expected = layer.expected
        self[:], self.requested_rows = layers, len(index)  # in one line: no layer is ahead of another

    def save(self, path: str | os.PathLike, tokens: Sequence = (), model_fingerprint: str = "",
             rank: tuple[int, int] = saving.ALONE) -> None:  # fmt: skip
        """Write keys and values as safetensors, with the config, the tokens and a checksum; replaces `path` atomically.

        `tokens` (the ids that are in the cache; for several rows one list for all, or one each) and
        `model_fingerprint` are stored so that `load` can refuse a file of other text or other weights. `rank`: which
        rank of how many, of a cache that holds the heads of a rank.
        """
        saving.save(self, path, tokens, model_fingerprint, rank)

    @classmethod
    def load(cls, path: str | os.PathLike, config: Config, model_fingerprint: str = "",
             device: str | torch.device = "cpu", rank: tuple[int, int] = saving.ALONE,
             **options: Any) -> Any:  # fmt: skip
        """Rebuild a saved cache. Refuses another config, other weights, an edited or a truncated file, and that of
        another rank, saying which.

        The ids that were saved with it are in `.tokens` of the result. `options` may say where the bytes go (a page
        pool, a folder, another capacity); what would change the stored tokens' meaning is refused.
        """
        return saving.load(path, config, cls.maker, model_fingerprint, device, options, rank)
