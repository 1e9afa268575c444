"""Several prompts concatenated in one forward pass: no padding, and large matmuls.

The model sees N rows of one token, (N,1), each with its position. Only attention knows which rows
belong to one sequence: `append` returns the keys and values per sequence, and `Packed` attends to
them per sequence.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.batch import all_or_none, check_rows
from nanokv.cache.capabilities import Made
from nanokv.cache.checks import check_append, refuse_states
from nanokv.config import Config
from nanokv.errors import CacheError
from nanokv.sinks import with_sinks
from nanokv.windows import within


class PackedLayer(LayerCache):
    """Layer i of every sequence; `counts[b]` of the next N tokens belong to sequence b."""

    def __init__(self, parts: Sequence[LayerCache], counts: Sequence[int]):
        self.parts = parts
        self.lossless = all(part.lossless for part in parts)
        self.counts = counts
        self._expected = parts[0]._expected

    def append(self, k: Tensor, v: Tensor) -> Any:
        """(N,Hk,1,D) ×2 → two lists of (1,Hk,S_b,D), one per sequence; writes to all or none."""
        check_append(k, v, expected=self._expected)
        if k.shape[0] != sum(self.counts):
            raise CacheError(
                f"cannot append keys {tuple(k.shape)} to sequences of {self.counts} tokens"
            )
        keys = [rows.transpose(0, 2) for rows in k.split(self.counts)]  # (1,Hk,T_b,D) each
        values = [rows.transpose(0, 2) for rows in v.split(self.counts)]  # (1,Hk,T_b,D) each
        with all_or_none(self.parts):
            # Each pair is (1,Hk,S_b,D) ×2.
            pairs = [part.append(*new) for part, *new in zip(self.parts, keys, values, strict=True)]
        all_keys, all_values = zip(*pairs, strict=True)
        return list(all_keys), list(all_values)


class PackedCache(KVCache):
    """The view that one forward pass has of `caches`; sequence b gets counts[b] ≥ 1 tokens.

    Each cache holds one sequence, and an append here writes into it. To undo a failed forward pass,
    truncate every cache.
    """

    made = Made("packed")

    def __init__(self, caches: Sequence[KVCache], counts: Sequence[int], config: Config | None):
        check_rows(caches, config)
        if config is not None:
            refuse_states(config, "packed")  # rows of one token: a state needs whole sequences
        if len(counts) != len(caches) or any(cache.sizes.batch_size != 1 for cache in caches):
            raise CacheError(
                f"{len(counts)} prompts for {len(caches)} caches: one each, of one sequence each"
            )
        self.caches = list(caches)
        self.counts = list(counts)
        super().__init__(
            (PackedLayer(parts, self.counts) for parts in zip(*caches, strict=True)), config
        )

    @property
    def sequences(self) -> list[tuple[KVCache, int]]:
        """(cache, tokens of this forward) of each sequence."""
        return list(zip(self.caches, self.counts, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences; a page that several sequences share counts once for each."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def length(self) -> Any:
        """(N,) int64: the position of each row in its sequence."""
        return positions([cache.length for cache in self.caches], self.counts)


def positions(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """(N,) int64: starts[b] … starts[b] + counts[b] − 1 of every sequence, end to end."""
    pairs = zip(starts, counts, strict=True)
    return torch.from_numpy(
        numpy.concatenate([numpy.arange(start, start + n) for start, n in pairs])
    )


class Packed:
    """Attention over concatenated sequences: the queries of a sequence see only its keys.

    parts[b] is (T_b, attend) of sequence b.
    """

    def __init__(self, parts: Iterable[tuple[int, Callable[..., Tensor]]]):
        self.parts = list(parts)

    def __call__(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """q (N,H,1,D) with N = ΣT_b → (N,H,1,D).

        keys and values are lists of (1,Hk,S_b,D), with the T_b new tokens last.
        """
        queries = q.split([size for size, _ in self.parts])  # (T_b,H,1,D) each
        outputs = []
        for rows, k, v, (_, attend) in zip(queries, keys, values, self.parts, strict=True):
            y = attend(rows.transpose(0, 2), k, v)  # (1,H,T_b,D)
            outputs.append(y.transpose(0, 2))
        return torch.cat(outputs)

    def with_sinks(self, sinks: Tensor) -> "Packed":
        """The same sequences with a score (H,) beside the keys' of each query."""
        return Packed((size, with_sinks(attend, sinks)) for size, attend in self.parts)

    def within(self, width: int) -> "Packed":
        """The same sequences in a layer with a window of `width` positions."""
        return Packed((size, within(attend, width)) for size, attend in self.parts)
