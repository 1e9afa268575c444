"""What a cache may offer beyond the contract of base.py, and the defaults for caches that do not.

    kernels   pages: where keys and values lie, so that a decode step copies nothing
    masks     causal_keys: whether a mask is the plain causal one and need not be built
    batches   sizes, capacity: rows, keys and bytes held, and how much fits
    beams     reorder
    files     state and restore per layer; save, load, `tokens` and `made` for the whole cache

Each default is either right for every cache or raises UnsupportedError. Names with an underscore
are hooks for the caches in this folder; your own class works without them.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import contains
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from nanokv.cache import saving
from nanokv.cache.checks import ANYTHING, Expected, check_index
from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError

Index: TypeAlias = Sequence[int] | torch.Tensor  # of rows
Mask = TypeVar("Mask", bound=Callable[..., Any])  # a method `mask`, whose type a decorator keeps
Append = TypeVar("Append", bound=Callable[..., Any])


@dataclass(eq=False)
class Pages:
    """Where the keys and values of every row lie, for an attention that reads them in place.

    Row b holds `lengths[b]` tokens in pages `table[b]`, oldest first. Without a table, row b is
    page b. With `sequence`, several rows are adjacent tokens of one sequence: row b has the pages
    `table[sequence[b]]`.
    """

    keys: torch.Tensor  # (P,Hk,page,D)
    values: torch.Tensor
    lengths: torch.Tensor  # (B,) int32; a list is converted
    table: torch.Tensor | None = None  # (B,n) int32
    sequence: torch.Tensor | None = None  # (B,) int32

    def __post_init__(self):
        if isinstance(self.lengths, torch.Tensor) and self.lengths.dtype == torch.int32:
            return
        device = getattr(self.lengths, "device", "cpu")
        with torch.inference_mode(False):  # steps outside of that mode write to it too
            self.lengths = torch.as_tensor(self.lengths, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Sizes:
    """How much a layer, or a whole cache, holds now."""

    batch_size: int | None  # rows stored; None before the first append if any number may come
    held: int  # keys of the longest row: fewer than `length` if the cache has dropped some
    used_nbytes: int  # the part of `nbytes` that tokens take; the rest is reserved for later tokens
    max_rollback: int | None = None  # tokens that truncate can undo exactly; None = any number
    snapshots: tuple[int, ...] = ()  # shorter lengths that truncate can go back to as well


@dataclass(frozen=True)
class Made:
    """The arguments that make_cache was called with."""

    name: str = "dict"
    options: dict[str, Any] = field(default_factory=dict)  # all but the sizes below
    capacity: int | None = None
    batch_size: int = 1


# append → reserve(layer, like), which a kernel may call instead.
RESERVES: dict[Callable[..., Any], Callable[..., Any]] = {}
# reserve → reserve(layers, like) for all layers in one call. It returns None if each layer must be
# asked by itself.
AT_ONCE: dict[Callable[..., Any], Callable[..., Any]] = {}


def in_place(
    reserve: Callable[..., Any], at_once: Callable[..., Any] | None = None
) -> Callable[[Append], Append]:
    """Decorator of an `append` that writes in place; `reserve` returns the `pages` it would write
    to.

    The entry is for this function object. An append that replaces it, in a subclass, in the class
    or on one object, has no pages, so kernels call that append instead of bypassing it.
    """

    def known(append: Append) -> Append:
        RESERVES[append] = reserve
        if at_once:
            AT_ONCE[reserve] = at_once
        return append

    return known


def reserve_of_all(layers: Sequence[Any]) -> Callable[..., Any] | None:
    """The `reserve_of` that all layers share, found in a tenth of the time; None if not known.

    Known for layers of one class whose instances do not override append.
    """
    kinds = set(map(type, layers))
    kind: Any = kinds.pop() if len(kinds) == 1 else None
    if kind is None or kind.__getattribute__ is not object.__getattribute__:
        return None
    append: Any = getattr(kind, "append", None)
    reserve = RESERVES.get(append)
    if reserve is None or any(map(contains, map(vars, layers), repeat("append"))):
        return None
    return reserve


def reserve_of(layer: Any) -> Callable[..., Any] | None:
    """The function that a kernel may call instead of the current `layer.append`, or None.

    Changes nothing. Accepts layers of any class: a user's class may use the name `pages` for
    something else, so the decision is by append.
    """
    append = layer.append
    if getattr(append, "__self__", None) is not layer:  # a function, or another layer's append
        return None
    return RESERVES.get(append.__func__)


# mask → keys(cache, T): the number of keys, if the mask would be plain causal; else None.
CAUSAL_MASKS: dict[Callable[..., Any], Callable[..., Any]] = {}
# mask → rows(cache): (B,) keys that the next token of each row sees; None: call the mask.
ROW_MASKS: dict[Callable[..., Any], Callable[..., Any]] = {}


def causal(
    keys: Callable[..., Any], rows: Callable[..., Any] | None = None
) -> Callable[[Mask], Mask]:
    """Decorator of a `mask` that is often plain causal: keys(cache, T) detects that without
    building it.

    Like `in_place`, the entry is for this function object: a mask that overrides it is called.
    """

    def known(mask: Mask) -> Mask:
        CAUSAL_MASKS[mask] = keys
        if rows:
            ROW_MASKS[mask] = rows
        return mask

    return known


def row_lengths(cache: Any) -> torch.Tensor | None:
    """(B,) keys per row, if `cache.mask(1)` would hide the rows' left padding and nothing else."""
    mask = cache.mask
    rows = ROW_MASKS.get(getattr(mask, "__func__", mask))
    if rows is None or mask.__self__ is not cache:
        return None
    return rows(cache)


def causal_keys(cache: Any, T: int) -> int | None:
    """S, if T > 1 and `cache.mask(T)` would be the plain causal mask over S keys; None: call it.

    A mask has T·S bytes, and inspecting one waits for the device that holds it.
    """
    mask = cache.mask
    if T == 1 or getattr(mask, "__self__", None) is not cache:
        return None
    keys = CAUSAL_MASKS.get(mask.__func__)
    if keys is None:
        return None
    return keys(cache, T)


def has_pages(cache: Any) -> bool:
    """Does the class of the cache define `pages`? A wrapper's __getattr__ does not count."""
    return callable(getattr(type(cache), "pages", None)) and len(cache) > 0


def common_length(layers: Sequence["LayerCapabilities"], n: int) -> int:
    """The largest length ≤ n that all of these layers can go back to; n itself without layers."""
    found = n
    while (reached := min((layer._nearest(found) for layer in layers), default=n)) < found:
        found = reached
    return found


class LayerCapabilities:
    """What one layer may offer."""

    append: Callable[..., Any]  # LayerCache defines these five
    truncate: Callable[[int], None]
    fork: Callable[[], Any]
    nbytes: int
    length: int
    capacity: int | None = None  # the most tokens that fit; None = as memory allows
    _windowed = False  # keeps only the newest positions, as the model's layer sees only them
    lossless = True  # append returns every key and value, bit for bit as it was appended
    _expected: Expected = ANYTHING

    @property
    def sizes(self) -> Sizes:
        """Rows, keys and bytes held."""
        length = self.length
        if not isinstance(length, int):  # one per row
            length = int(max(length))
        return Sizes(None, length, self.nbytes)

    def pages(self, like: torch.Tensor) -> Pages | None:
        """Where a kernel may read this layer and write one more token; None: call `append`.

        Pages belong to an append (see `in_place`), so a layer that wraps another one has none.
        Each row gets a slot for one more token, and `length` already counts that token. The caller
        writes its key and value (B,Hk,1,D), in the shape and dtype of `like`, at the last position
        of each row, lengths − 1. No mask is needed: the pages hold each row's length.
        """
        reserve = reserve_of(self)
        if reserve is None:
            return None
        return reserve(self, like)

    def reorder(self, index: Index) -> None:
        """Row b becomes old row index[b] (beam search); the batch may grow or shrink."""
        raise UnsupportedError(f"{type(self).__name__} cannot reorder")

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that `restore` needs to rebuild this layer: {name: tensor}."""
        raise UnsupportedError(f"{type(self).__name__} cannot be saved")

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Replace this layer's contents by what `state` returned."""
        raise UnsupportedError(f"{type(self).__name__} cannot be loaded")

    def _check_truncate(self, n: int) -> None:
        """Raise what truncate(n) would; changes nothing, so all layers can be checked first."""
        if type(n) is not int or n < 0:
            raise CacheError(f"truncate({n!r}): a number of tokens ≥ 0 was expected")

    def _nearest(self, n: int) -> int:
        """The largest length ≤ n that truncate can go back to."""
        try:
            self._check_truncate(n)
        except UnsupportedError:
            return 0
        return n

    def _keep_snapshot(self) -> None:
        """Keys and values of earlier tokens are there anyway; a state is kept now or lost."""

    def _pad(self, pads: torch.Tensor) -> None:
        """Rows begin with pads (B,) tokens of padding. A mask hides their keys."""

    def _snapshot(self) -> Any:
        """What `_rollback` needs to undo the next append; references only, no copy."""
        return self.length

    def _rollback(self, snapshot: Any) -> None:
        """Undo the append since `snapshot`."""
        self.truncate(snapshot)

    def _reordered(self, index: Index) -> Any:
        """A copy in which row b is row index[b] of this layer."""
        copy = self.fork()
        copy.reorder(index)
        return copy


class NoState:
    """The state of a recurrent layer before the first token, which stays so (recurrent.State)."""

    def read(self, T: int) -> tuple[None, None, None]:
        return None, None, None

    def keep(self, written: Any, S: Any) -> None:
        pass


Layer = TypeVar("Layer", bound=LayerCapabilities)


class CacheCapabilities(list[Layer], Generic[Layer]):
    """What the whole cache, a list of layers, may offer."""

    fork: Callable[[], Any]  # defined by KVCache
    # A list of ids, or one list per row: the ids saved with a cache that was loaded from a file.
    tokens: Sequence[Any] = ()
    made: Made = Made()
    page_size: int | None = None  # tokens of a page; None = keys of a row lie end to end

    @property
    def _widest(self) -> Layer:
        """The first layer that keeps all positions, else the first: masks count its keys."""
        return next((layer for layer in self if not getattr(layer, "_windowed", False)), self[0])

    @property
    def capacity(self) -> int | None:
        """The most tokens this cache can hold; None = as memory allows."""
        return self._widest.capacity if self else None

    @property
    def sizes(self) -> Sizes:
        """Rows (of an empty cache: as made), keys of the widest layer, bytes of all layers.

        The layer that can take back the fewest tokens decides for all.
        """
        if not self:
            return Sizes(self.made.batch_size, 0, 0)
        layers = [layer.sizes for layer in self]
        used = sum(sizes.used_nbytes for sizes in layers)
        rows = layers[0].batch_size or self.made.batch_size
        limits = [sizes.max_rollback for sizes in layers if sizes.max_rollback is not None]
        kept = max((sizes.snapshots for sizes in layers), key=len)
        return Sizes(rows, self._widest.sizes.held, used, min(limits, default=None), kept)

    def snapshot(self) -> None:
        """Make sure that truncate can come back to this length, as at the end of a message.

        Recurrent layers keep a copy of their state, others need nothing (cache/state.py).
        """
        for layer in self:
            layer._keep_snapshot()

    def nearest(self, n: int) -> int:
        """The largest length ≤ n that truncate can go back to; the tokens from there to n must be
        prefilled again. n itself, if the cache has keys and values of all positions."""
        return common_length(self, n)

    def pages(self, like: torch.Tensor) -> list[Pages] | None:
        """`pages` of every layer, for a kernel that runs all layers in one call.

        If any layer has none, returns None and changes nothing.
        """
        at_once = AT_ONCE.get(reserve_of_all(self))  # type: ignore[arg-type]  # None is no key
        if at_once and (pages := at_once(self, like)):
            return pages
        reserves = list(filter(None, map(reserve_of, self)))
        if len(reserves) < len(self):
            return None
        found = []
        before: list[Any] = []  # a snapshot of each layer that has reserved
        for layer, reserve in zip(self, reserves, strict=True):
            snapshot = layer._snapshot()
            pages = reserve(layer, like)
            if pages is None:
                for done, earlier in zip(self, before, strict=False):
                    done._rollback(earlier)
                return None
            found.append(pages)
            before.append(snapshot)
        return found

    def _causal_keys(self, T: int) -> int | None:
        """`causal_keys` of the widest layer, which holds for all layers."""
        return causal_keys(self._widest, T) if self else None

    def copy(self) -> Any:
        return self.fork()

    def __copy__(self) -> Any:
        # A shallow copy would append to the same layers and release pages that it never took.
        return self.fork()

    def __deepcopy__(self, memo: object) -> Any:
        return self.fork()

    def _made_like(self, other: "CacheCapabilities") -> Any:
        """Copy from another cache what make_cache recorded on it, and the ids saved with it."""
        self.made = other.made
        self.tokens = other.tokens
        for mine, theirs in zip(self, other, strict=False):
            mine._expected = theirs._expected
        return self

    def reorder(self, index: Index) -> None:
        """Row b of every layer becomes old row index[b]. Rows may repeat; the batch may grow or
        shrink.

        All layers change or none: old and new rows are both in memory until the last layer is made.
        """
        index = check_index(index, self.sizes.batch_size)
        layers = []
        for layer in self:
            copy = layer._reordered(index)
            copy._expected = layer._expected
            layers.append(copy)
        # One statement, so an interrupt never leaves new layers beside the old batch size.
        self[:], self.made = layers, replace(self.made, batch_size=len(index))

    def save(
        self,
        path: str | os.PathLike[str],
        tokens: Sequence[Any] = (),
        model_fingerprint: str = "",
        rank: tuple[int, int] = saving.ALONE,
    ) -> None:
        """Write keys and values as safetensors, with the config, the tokens and a checksum.

        Replaces `path` atomically. `tokens` are the ids in the cache: for several rows one list
        for all, or one each. `load` returns them, and refuses a file with another
        `model_fingerprint`. `rank` is (rank, number of ranks) of a cache that holds only the heads
        of one rank.
        """
        self._check_save()
        saving.save(self, path, tokens, model_fingerprint, rank)

    def _check_save(self) -> None:
        """UnsupportedError if a file cannot hold this cache."""

    def _check_padding(self) -> None:
        """UnsupportedError if rows cannot begin with padding."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: Config,
        model_fingerprint: str = "",
        device: str | torch.device | None = None,
        rank: tuple[int, int] = saving.ALONE,
        **options: Any,
    ) -> Any:
        """Rebuild a saved cache; the ids that were saved with it are in `.tokens`.

        Raises CacheError for another config, other weights, an edited or truncated file, and a
        file of another rank; the message names the cause. `device` is where the model now runs; the
        default is where `pool` is, else the CPU. `options` may choose where the bytes are stored
        (a page pool, a folder, another capacity); options that would change the meaning of the
        stored tokens are refused.
        """
        # By name, to avoid an import cycle: every cache in the registry inherits from this module.
        registry = importlib.import_module("nanokv.cache.registry")
        _, place = registry.check_target(None, device)
        return saving.load(
            path, config, registry.make_cache, model_fingerprint, place, options, rank
        )
