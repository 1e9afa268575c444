"""What a cache may offer besides the contract of base.py, and what it answers if it does not.

    kernels   pages: where keys and values lie, so that a decode step copies nothing
    masks     causal_keys: that a mask would be the plain causal one, so that nobody makes it
    batches   sizes, capacity: rows, keys and bytes held, and how much fits
    beams     reorder
    files     state, restore of a layer; save, load of all, `tokens`, and what the cache was `made` with

Each default is either right for every cache or raises UnsupportedError. Names with an underscore
are hooks for the caches of this folder: a class of your own works without them.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import contains
from typing import Any, TypeAlias

import torch

from nanokv.cache import saving
from nanokv.cache.checks import check_index
from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError

Index: TypeAlias = Sequence[int] | torch.Tensor  # of rows


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
        if isinstance(self.lengths, torch.Tensor) and self.lengths.dtype == torch.int32:
            return
        device = getattr(self.lengths, "device", "cpu")
        with torch.inference_mode(False):  # steps outside of that mode write to it too
            self.lengths = torch.as_tensor(self.lengths, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Sizes:
    """How much a layer, or a whole cache, holds just now."""

    batch_size: int | None  # rows stored; None while any number may come
    held: int  # keys of the longest row: fewer than `length` where some were forgotten
    used_nbytes: int  # of `nbytes`, what the tokens take; the rest is reserved for later ones
    max_rollback: int | None = None  # tokens that truncate undoes without a trace; None = any


@dataclass(frozen=True)
class Made:
    """What make_cache was called with."""

    name: str = "dict"
    options: dict = field(default_factory=dict)  # besides sizes
    capacity: int | None = None
    batch_size: int = 1


# For each append: reserve(layer, like), what a kernel may call instead.
RESERVES: dict[Callable, Callable] = {}
# For some of these: reserve(layers, like) of all layers in one call; None where it must be one by one.
AT_ONCE: dict[Callable, Callable] = {}


def in_place(reserve: Callable, at_once: Callable | None = None) -> Callable:
    """Decorator of an `append` that writes where its keys stay: `reserve` gives `pages` for it.

    It does so for this very function. An append that takes its place, in a subclass, in the class
    or on one object, has no pages, so no kernel can pass it by.
    """

    def known(append: Callable) -> Callable:
        RESERVES[append] = reserve
        if at_once:
            AT_ONCE[reserve] = at_once
        return append

    return known


def reserve_of_all(layers: Sequence) -> Callable | None:
    """`reserve_of` of many layers in a tenth of the time, if it is one for all; None says nothing.

    Layers of one class, none of which has an append of its own.
    """
    kinds = set(map(type, layers))
    kind: Any = kinds.pop() if len(kinds) == 1 else None
    if kind is None or kind.__getattribute__ is not object.__getattribute__:
        return None
    reserve = RESERVES.get(getattr(kind, "append", None))  # type: ignore[arg-type]
    if reserve is None or any(map(contains, map(vars, layers), repeat("append"))):
        return None
    return reserve


def reserve_of(layer: Any) -> Callable | None:
    """What a kernel may call in the place of `layer.append`, as that is now; None: nothing.

    Changes nothing, and takes any class: one of the caller's may call something else `pages`.
    """
    append = layer.append
    if getattr(append, "__self__", None) is not layer:  # a function, or another layer's append
        return None
    return RESERVES.get(append.__func__)


# For each mask: keys(cache, T), how many it would say are seen, if causally.
CAUSAL_MASKS: dict[Callable, Callable] = {}
# For some of these: rows(cache), how many keys the next token of each row sees, (B,); None: ask the mask.
ROW_MASKS: dict[Callable, Callable] = {}


def causal(keys: Callable, rows: Callable | None = None) -> Callable:
    """Decorator of a `mask` that is often the plain causal one: keys(cache, T) says when, without making it.

    As `in_place`, for this very function: a mask that takes its place is asked itself.
    """

    def known(mask: Callable) -> Callable:
        CAUSAL_MASKS[mask] = keys
        if rows:
            ROW_MASKS[mask] = rows
        return mask

    return known


def row_lengths(cache: Any) -> torch.Tensor | None:
    """(B,) keys, if `cache.mask(1)` would hide the padding on the left of rows of so many keys and nothing else."""
    mask = cache.mask
    rows = ROW_MASKS.get(getattr(mask, "__func__", mask))
    return None if rows is None or mask.__self__ is not cache else rows(cache)


def causal_keys(cache: Any, T: int) -> int | None:
    """S, if `cache.mask(T)` would be the plain causal mask over S keys, 1 < T; None: ask it.

    The mask has T·S bytes, and to look at one is to wait for the device that holds it.
    """
    mask = cache.mask
    if T == 1 or getattr(mask, "__self__", None) is not cache:
        return None
    keys = CAUSAL_MASKS.get(mask.__func__)
    return None if keys is None else keys(cache, T)


def has_pages(cache: Any) -> bool:
    """Does its class say where keys and values lie? Not one that passes on what it is asked."""
    return callable(getattr(type(cache), "pages", None)) and len(cache) > 0


class LayerCapabilities:
    """Of one layer."""

    append: Callable  # LayerCache has these four
    truncate: Callable
    fork: Callable
    nbytes: int
    length: int
    capacity: int | None = None  # the most tokens that fit; None = as memory allows
    _expected = (None, None, None, None)  # (Hk, D, dtype, device) of make_cache; None = what comes

    @property
    def sizes(self) -> Sizes:
        """Rows, keys and bytes held."""
        length = self.length
        return Sizes(None, length if isinstance(length, int) else int(max(length)), self.nbytes)

    def pages(self, like: torch.Tensor) -> Pages | None:
        """All that a kernel may use of this layer. None: nothing, call `append`.

        Pages belong to an append (see `in_place`): a layer that wraps another one has none.
        Otherwise there is a slot for one more token per row, counted as seen. The caller writes
        its key and value (B,Hk,1,D), in the shape and dtype of `like`, at the last place of each
        row, lengths − 1. No mask is needed: the pages say each row's length.
        """
        reserve = reserve_of(self)
        return None if reserve is None else reserve(self, like)

    def reorder(self, index: Index) -> None:
        """Row b becomes old row index[b] (beam search); the batch may grow or shrink."""
        raise UnsupportedError(f"{type(self).__name__} cannot reorder")

    def state(self) -> dict:
        """The tensors that `restore` needs to rebuild this layer: {name: tensor}."""
        raise UnsupportedError(f"{type(self).__name__} cannot be saved")

    def restore(self, state: dict) -> None:
        """Take over what `state` returned."""
        raise UnsupportedError(f"{type(self).__name__} cannot be loaded")

    def _check_truncate(self, n: int) -> None:
        """Raise what truncate(n) would, and change nothing: asked of all before the first is cut."""
        if type(n) is not int or n < 0:
            raise CacheError(f"truncate({n!r}): a number of tokens ≥ 0 was expected")

    def _snapshot(self) -> Any:
        """What `_rollback` needs to undo the next append, where truncate could not too. No copy."""
        return self.length

    def _rollback(self, snapshot: Any) -> None:
        """As if the append since `snapshot` had never been."""
        self.truncate(snapshot)

    def _reordered(self, index: Index) -> Any:
        """A copy in which row b is this one's row index[b]."""
        copy = self.fork()
        copy.reorder(index)
        return copy


class CacheCapabilities(list):
    """Of the whole cache, a list of layers."""

    fork: Callable  # KVCache has it
    tokens: tuple | list = ()  # of a loaded cache: the ids that were saved with it
    made = Made()

    @property
    def capacity(self) -> int | None:
        """The most tokens this cache can hold; None = as memory allows."""
        return self[0].capacity if self else None

    @property
    def sizes(self) -> Sizes:
        """Rows (of an empty cache: those it was made for), keys of a layer, bytes of all layers."""
        if not self:
            return Sizes(self.made.batch_size, 0, 0)
        first, *rest = (layer.sizes for layer in self)
        used = first.used_nbytes + sum(sizes.used_nbytes for sizes in rest)
        return Sizes(first.batch_size or self.made.batch_size, first.held, used, first.max_rollback)

    def pages(self, like: torch.Tensor) -> list[Pages] | None:
        """`pages` of every layer, for a kernel that goes through all of them in one call.

        None, and nothing is changed, if one of them has none.
        """
        at_once = AT_ONCE.get(reserve_of_all(self))  # type: ignore[arg-type]
        if at_once and (pages := at_once(self, like)):
            return pages
        reserves = list(filter(None, map(reserve_of, self)))
        if len(reserves) < len(self):
            return None
        found, before = [], []
        for layer, reserve in zip(self, reserves, strict=True):
            before.append(layer._snapshot())
            pages = reserve(layer, like)
            if pages is None:
                for asked, snapshot in zip(self, before[:-1], strict=False):
                    asked._rollback(snapshot)
                return None
            found.append(pages)
        return found

    def _causal_keys(self, T: int) -> int | None:
        """`causal_keys` of all layers is that of the first."""
        return causal_keys(self[0], T) if self else None

    def copy(self) -> Any:
        return self.fork()

    def __copy__(self):
        # A shallow copy would append to the same layers, and give pages back that it never took.
        return self.fork()

    def __deepcopy__(self, memo):
        return self.fork()

    def _made_like(self, other: "CacheCapabilities") -> Any:
        """Take over what make_cache wrote on another cache, and the ids it was saved with."""
        self.made, self.tokens = other.made, other.tokens
        for mine, theirs in zip(self, other, strict=False):
            mine._expected = theirs._expected
        return self

    def reorder(self, index: Index) -> None:
        """Row b of every layer becomes old row index[b]; the rows may repeat, and the batch may grow or shrink.

        All layers or none: until the last one is made, old and new rows are both in memory.
        """
        index, layers = check_index(index, self.sizes.batch_size), []
        for layer in self:
            layers.append(layer._reordered(index))
            layers[-1]._expected = layer._expected
        # In one line: no layer is ahead.
        self[:], self.made = layers, replace(self.made, batch_size=len(index))

    def save(
        self,
        path: str | os.PathLike,
        tokens: Sequence = (),
        model_fingerprint: str = "",
        rank: tuple[int, int] = saving.ALONE,
    ) -> None:
        """Write keys and values as safetensors, with the config, the tokens and a checksum; replaces `path` atomically.

        `tokens` (the ids that are in the cache; for several rows one list for all, or one each) and
        `model_fingerprint` are stored so that `load` can refuse a file of other text or other weights. `rank`: which
        rank of how many, of a cache that holds the heads of a rank.
        """
        saving.save(self, path, tokens, model_fingerprint, rank)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: Config,
        model_fingerprint: str = "",
        device: str | torch.device | None = None,
        rank: tuple[int, int] = saving.ALONE,
        **options: Any,
    ) -> Any:
        """Rebuild a saved cache. Refuses another config, other weights, an edited or a truncated file, and that of
        another rank, saying which.

        The ids that were saved with it are in `.tokens` of the result. `device`: that of the model that goes on, which
        need not be the one that began (default: where the `pool` is, else the CPU). `options` may say where the bytes
        go (a page pool, a folder, another capacity); what would change the stored tokens' meaning is refused.
        """
        # By name: all kinds in it are made of this file.
        registry = importlib.import_module("nanokv.cache.registry")
        _, place = registry.check_target(None, device)
        return saving.load(
            path, config, registry.make_cache, model_fingerprint, place, options, rank
        )
