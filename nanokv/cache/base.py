"""The cache contract: one LayerCache per layer, and KVCache, the thin sequence that owns what concerns them all.

A cache is plugged into the model from outside. What `append` returns goes straight to the attention function; what
`mask` returns says which of those keys each new query may see. A new kind of cache overrides `append` and whatever
else it can do; what it cannot do raises UnsupportedError.
"""

from dataclasses import dataclass

import torch

from nanokv.attention import causal_mask
from nanokv.cache import saving
from nanokv.cache.checks import check_index
from nanokv.errors import CacheError, UnsupportedError


@dataclass
class Pages:
    """Where the keys and values of every row lie, for an attention that reads them there instead of from a copy.

    Row b holds `lengths[b]` tokens, in pages `table[b]`, oldest first; without a table in page b, one for each row.
    """

    keys: torch.Tensor  # (P,Hk,page,D)
    values: torch.Tensor
    lengths: torch.Tensor  # (B,) int32; a list will do
    table: torch.Tensor | None = None  # (B,n) int32
    struct: object = None  # the same for a kernel in C, made by the first that asks

    def __post_init__(self):
        self.lengths = torch.as_tensor(self.lengths, dtype=torch.int32)


class LayerCache:
    """Keys and values of one layer. `length`, the number of tokens seen, is the next call's only legal start_pos."""

    length: int = 0
    capacity: int | None = None  # the most tokens that fit; None = as memory allows
    in_place = False  # can `room` be asked? Then a decode step needs no mask either: the pages say each row's length
    rollback: int | None = None  # tokens that one append may bring and truncate take back without a trace; None = any
    expects = (None, None, None, None)  # (Hk, D, dtype, device) that make_cache was told; None = whatever comes first

    def __init_subclass__(cls, **options):
        """A class with an `append` of its own is asked for that: `room` and `place` of a class above would pass it by.
        """
        super().__init_subclass__(**options)
        defined = {n: [n in vars(c) for c in cls.__mro__].index(True) for n in ("append", "place", "room")}
        if defined["append"] < defined["room"]:
            cls.in_place = False
        if defined["append"] < defined["place"]:
            cls.place = LayerCache.place
        cls.written_for = cls.append

    @property
    def as_written(self) -> bool:
        """Is `append` still the one that `room` and `place` know? Not if a caller has put a wrapper in its place."""
        return getattr(self.append, "__func__", None) is type(self).written_for

    def append(self, k, v):
        """(B,Hk,T,D) ×2, keys already rotated → (B,Hk,S,D) ×2, oldest first; the last T rows are the new ones."""
        raise NotImplementedError

    def place(self, k, v) -> Pages:
        """`append` for an attention that reads keys and values where they are. One token a row."""
        keys, values = self.append(k, v)
        return Pages(keys, values, [keys.shape[2]] * keys.shape[0])

    def room(self, like) -> Pages:
        """Room for one more token a row, counted as seen: the caller writes its key and value (B,Hk,1,D), in the shape
        and dtype of `like`, at the last place of each row, lengths − 1."""
        raise UnsupportedError(f"{type(self).__name__} does not store in place")

    def mask(self, T: int):
        """Which keys the next T queries see: None = all, else bool (T,S), bottom-right causal. Changes nothing."""
        return causal_mask(T, self.length + T)

    def width(self, T: int) -> int:
        """S: how many keys the append of T tokens will return."""
        return self.length + T

    @property
    def rows(self) -> int | None:
        """Rows of the batch; None while any number may come."""
        return None

    def truncate(self, n: int):
        """Forget positions ≥ n (a rejected draft, an edited turn). Absolute, and harmless when repeated."""
        raise UnsupportedError(f"{type(self).__name__} cannot truncate")

    def check_truncate(self, n: int):
        """Raise what truncate(n) would, and change nothing: asked of all layers and rows before the first is cut."""
        if type(n) is not int or n < 0:
            raise CacheError(f"truncate({n!r}): a number of tokens ≥ 0 was expected")

    def mark(self):
        """What `back` needs to take the next append back, even if truncate could not. Copies nothing."""
        return self.length

    def back(self, mark):
        """As if the append since `mark` had never been."""
        self.truncate(mark)

    def fork(self) -> "LayerCache":
        """An independent copy: appending to it leaves this one as it is."""
        raise UnsupportedError(f"{type(self).__name__} cannot fork")

    def reorder(self, index):
        """Row b becomes old row index[b] (beam search); the batch may grow or shrink."""
        raise UnsupportedError(f"{type(self).__name__} cannot reorder")

    def reordered(self, index) -> "LayerCache":
        """A copy in which row b is this one's row index[b]."""
        copy = self.fork()
        copy.reorder(index)
        return copy

    def state(self) -> dict:
        """The tensors that `restore` needs to rebuild this layer: {name: tensor}."""
        raise UnsupportedError(f"{type(self).__name__} cannot be saved")

    def restore(self, state: dict):
        """Take over what `state` returned."""
        raise UnsupportedError(f"{type(self).__name__} cannot be loaded")

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values."""
        return 0


class KVCache(list):
    """One LayerCache per layer. Made by `nanokv.make_cache(name, config)`."""

    name = "dict"
    options: dict = {}  # what make_cache was called with, besides sizes
    asked: int | None = None  # the capacity that make_cache was called with
    asked_rows = 1  # its batch_size
    tokens: tuple | list = ()  # of a loaded cache: the ids that were saved with it

    def __init__(self, layers=(), config=None):
        super().__init__(layers)
        self.config = config

    def __repr__(self):
        tokens = self[0].length if self else 0
        return f"<{type(self).__name__} {self.name!r}: {len(self)} layers × {tokens} tokens, {self.nbytes:,} B>"

    @property
    def length(self) -> int:
        """Tokens held, the same in every layer; a failed forward leaves them unequal, which raises until mended."""
        lengths = {layer.length for layer in self}
        if len(lengths) > 1:
            raise CacheError(
                f"layers hold between {min(lengths)} and {max(lengths)} tokens: a forward pass failed half-way",
                hint="truncate(n) with n at most the smaller number mends it",
            )
        return lengths.pop() if lengths else 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in all layers."""
        return sum(layer.nbytes for layer in self)

    @property
    def capacity(self) -> int | None:
        """The most tokens this cache can hold; None = as memory allows."""
        return self[0].capacity if self else None

    @property
    def rollback(self) -> int | None:
        """The longest guess that can be appended and taken back as if it had never been there; None = any."""
        return self[0].rollback if self else None

    def mask(self, T: int):
        """The mask that all layers share, asked once per forward, before any layer appends."""
        if not self:
            raise CacheError("this cache has no layers: make_cache(name, config) gives it one for each of the model's")
        return self[0].mask(T)

    def truncate(self, n: int):
        """Forget positions ≥ n in every layer; also mends layers of unequal length after a failed forward."""
        for layer in self:
            layer.check_truncate(n)
        for layer in self:
            layer.truncate(n)

    def reuse(self, tokens) -> int:
        """How many leading tokens of a prompt this empty cache already knows; a cache that shares nothing: none."""
        return 0

    def remember(self, tokens):
        """These tokens are in the cache now; a cache that shares prefixes takes note."""

    def fork(self) -> "KVCache":
        """An independent copy of the whole cache."""
        copy = type(self)((layer.fork() for layer in self), self.config)
        return copy.made_like(self)

    def copy(self):
        return self.fork()

    def __copy__(self):
        return self.fork()  # a shallow copy would append to the same layers, and give pages back that it never took

    def __deepcopy__(self, memo):
        return self.fork()

    def made_like(self, other) -> "KVCache":
        """Take over what make_cache wrote on another cache, and the ids it was saved with."""
        for name in ("name", "options", "asked", "asked_rows", "tokens"):
            setattr(self, name, getattr(other, name))
        for mine, theirs in zip(self, other, strict=False):
            mine.expects = theirs.expects
        return self

    @property
    def batch_size(self) -> int:
        """Rows held; of an empty cache, rows that it was made for."""
        return self.rows_held() or self.asked_rows

    def rows_held(self) -> int | None:
        """Rows of the batch; None while nothing is stored."""
        return self[0].rows if self else None

    def reorder(self, index):
        """Row b of every layer becomes old row index[b]; the rows may repeat, and the batch may grow or shrink.

        All layers or none: until the last one is made, old and new rows are both in memory.
        """
        index, layers = check_index(index, self.batch_size), []
        for layer in self:
            layers.append(layer.reordered(index))
            layers[-1].expects = layer.expects
        self[:], self.asked_rows = layers, len(index)  # in one line: no layer is ahead of another

    def save(self, path, tokens=(), model_fingerprint: str = ""):
        """Write keys and values as safetensors, with the config, the tokens and a checksum; replaces `path` atomically.

        `tokens` (the ids that are in the cache; for several rows one list for all, or one each) and
        `model_fingerprint` are stored so that `load` can refuse a file of other text or other weights.
        """
        saving.save(self, path, tokens, model_fingerprint)

    @classmethod
    def load(cls, path, config, model_fingerprint: str = "", device="cpu", **options) -> "KVCache":
        """Rebuild a saved cache. Refuses another config, other weights, an edited or a truncated file, saying which.

        The ids that were saved with it are in `.tokens` of the result. `options` may say where the bytes go (a page
        pool, a folder, another capacity); what would change the stored tokens' meaning is refused.
        """
        return saving.load(path, config, cls.maker, model_fingerprint, device, options)

    maker = None  # make_cache, put here by registry.py, which knows the kinds; this file does not


class NoCache(KVCache):
    """The null object: keeps nothing, `append` returns its input. So there is no `if cache is None` anywhere."""

    def __init__(self, num_layers: int):
        super().__init__(_KeepNothing() for _ in range(num_layers))

    def fork(self):
        return self

    def reorder(self, index):
        check_index(index)


class _KeepNothing(LayerCache):
    capacity = 0  # so that generating with it is refused: every decode would see one token and no past

    def append(self, k, v):
        return k, v

    def truncate(self, n: int):
        pass
