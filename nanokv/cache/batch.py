"""Rows of different lengths in one batch; each row is a cache of any kind.

Every row keeps its own positions: `length` is a tensor (B,), and so is start_pos. Keys are padded
on the left to the longest row, the mask hides the padding, and the last T columns are the new
tokens, as in every cache. The padded copy costs 2·B·Hk·S·D values per layer and step. A call
takes one token per row (decode) or T per row (verifying a draft). Prompts of unequal length are
prefilled one by one and joined here.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import Index, Made, Sizes, causal, causal_keys, common_length
from nanokv.cache.checks import check_append, check_index
from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError


class BatchLayer(LayerCache):
    """Layer i of every row."""

    def __init__(self, parts: list[Any]):
        self.parts = parts  # LayerCaches of batch size 1
        self.lossless = all(part.lossless for part in parts)
        self._windowed = all(part._windowed for part in parts)
        self._expected = parts[0]._expected

    @property
    def length(self) -> Any:  # type: ignore[override]  # read-only
        """An int while all rows agree, else (B,) int64."""
        return one_or_each([row.length for row in self.parts])

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, expected=self._expected)
        if k.shape[0] != len(self.parts):
            raise CacheError(f"cannot append keys {tuple(k.shape)} to {len(self.parts)} rows")
        with all_or_none(self.parts):
            # Each pair is (1,Hk,S_b,D) ×2.
            pairs = [row.append(k[b : b + 1], v[b : b + 1]) for b, row in enumerate(self.parts)]
            longest = max(key.shape[2] for key, _ in pairs)
            keys, values = zip(*pairs, strict=True)
            return _pad_left(keys, longest), _pad_left(values, longest)  # (B,Hk,S,D) ×2

    def read(self, T: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The states of all rows, for a recurrent layer (recurrent.State)."""
        conv, S, real = zip(*[row.read(T) for row in self.parts], strict=True)
        return _stacked(conv), _stacked(S), _all_real(real, T)

    def keep(self, written: Any, S: Tensor | None) -> None:
        """Each row keeps its part of the state."""
        for b, row in enumerate(self.parts):
            own = slice(b, b + 1)
            row.keep(written.rows(own), None if S is None else S[own])

    def _pad(self, pads: Tensor) -> None:
        for b, row in enumerate(self.parts):
            row._pad(pads[b : b + 1])

    def _keep_snapshot(self) -> None:
        for row in self.parts:
            row._keep_snapshot()

    def _nearest(self, n: int) -> int:
        return common_length(self.parts, n)

    @property
    def sizes(self) -> Sizes:
        rows = [row.sizes for row in self.parts]
        common = set(rows[0].snapshots).intersection(*(row.snapshots for row in rows))
        limits = [row.max_rollback for row in rows if row.max_rollback is not None]
        return Sizes(
            batch_size=len(rows),
            held=max(row.held for row in rows),
            used_nbytes=sum(row.used_nbytes for row in rows),
            max_rollback=min(limits, default=None),
            snapshots=tuple(sorted(common)),
        )

    def _check_truncate(self, n: int):
        for row in self.parts:
            row._check_truncate(n)

    def _snapshot(self):
        return [row._snapshot() for row in self.parts]

    def _rollback(self, snapshot):
        for row, its in zip(self.parts, snapshot, strict=True):
            row._rollback(its)

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        for row in self.parts:
            row.truncate(n)

    def state(self) -> dict[str, Tensor]:
        state = {}
        for b, row in enumerate(self.parts):
            for name, tensor in row.state().items():
                state[f"{b}.{name}"] = tensor
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        for b, row in enumerate(self.parts):
            prefix = f"{b}."
            its = {key: tensor for key, tensor in state.items() if key.startswith(prefix)}
            row.restore({key.removeprefix(prefix): tensor for key, tensor in its.items()})

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        return sum(row.nbytes for row in self.parts)


class BatchCache(KVCache):
    """`rows[b]` is a KVCache of one sequence.

    `length` is (B,) int64, or an int while all rows are equally long.
    """

    def __init__(self, rows: Iterable[KVCache], config: Config | None):
        self.rows: list[Any] = list(rows)
        check_rows(self.rows, config)
        check_plain_attention(self.rows)
        row = self.rows[0].made
        self.made = Made("batch", {"of": row.name} | row.options, row.capacity, len(self.rows))
        super().__init__(self.layers(self.rows), config)

    def layers(self, rows: Sequence[KVCache]) -> list[LayerCache]:
        """Layer i of all rows, for every i."""
        return [BatchLayer(list(parts)) for parts in zip(*rows, strict=True)]

    @property
    def length(self) -> Any:
        return one_or_each([row.length for row in self.rows])

    @property
    def capacity(self) -> int | None:
        """The smallest capacity of any row; None if no row has a limit."""
        return min((row.capacity for row in self.rows if row.capacity is not None), default=None)

    def alike(self, T: int) -> int | None:
        """S, if every row's mask for T queries is the plain causal one over S keys; else None."""
        keys = {causal_keys(row, T) for row in self.rows}
        return keys.pop() if len(keys) == 1 else None

    @causal(alike)
    def mask(self, T: int) -> Tensor | None:
        """(B,1,T,S): each row's own mask behind its padding.

        None or (T,S) while all rows are alike.
        """
        masks = [row.mask(T) for row in self.rows]
        widths = [width(row._widest, T, mask) for row, mask in zip(self.rows, masks, strict=True)]
        longest = max(widths)
        if min(widths) == longest and (T == 1 or all(torch.equal(m, masks[0]) for m in masks)):
            return masks[0]
        padded = []
        for S, mask in zip(widths, masks, strict=True):
            if mask is None:
                mask = torch.ones(T, S, dtype=torch.bool)
            padded.append(F.pad(mask, (longest - S, 0)))  # padding is False
        return torch.stack(padded)[:, None]

    def truncate(self, n: int) -> None:
        """Truncate to one length for all rows, or to one per row.

        If one row cannot go back so far, no row is truncated.
        """
        lengths = self._row_lengths(n)
        for row, length in zip(self.rows, lengths, strict=True):
            for layer in row:
                layer._check_truncate(length)
        for row, length in zip(self.rows, lengths, strict=True):
            row.truncate(length)

    def nearest(self, n: int) -> Any:
        """One length for all rows, or for one n per row the nearest of each."""
        if isinstance(n, int):
            return super().nearest(n)
        lengths = self._row_lengths(n)
        return one_or_each([row.nearest(m) for row, m in zip(self.rows, lengths, strict=True)])

    def _row_lengths(self, n: Any) -> list[int]:
        """The length of each row that `n` asks for; CacheError if they are none."""
        if isinstance(n, Tensor | list | tuple):
            lengths = torch.as_tensor(n).tolist()
        else:
            lengths = [n] * len(self.rows)
        valid = all(type(length) is int and length >= 0 for length in lengths)
        if len(lengths) != len(self.rows) or not valid:
            raise CacheError(
                f"truncate({n!r}): a number of tokens ≥ 0 for each of {len(self.rows)} rows "
                "was expected"
            )
        return lengths

    def fork(self) -> "BatchCache":
        return type(self)([row.fork() for row in self.rows], self.config)._made_like(self)

    def reorder(self, index: Index) -> None:
        rows = [self.rows[i].fork() for i in check_index(index, rows=len(self.rows)).tolist()]
        # One statement, so an interrupt never leaves new rows beside old layers.
        self.rows, self[:] = rows, self.layers(rows)

    def _check_save(self) -> None:
        if any(row.made != self.rows[0].made for row in self.rows):
            raise UnsupportedError(
                "rows of mixed kinds cannot be saved in one file", hint="save each of cache.rows"
            )


def check_rows(rows: Sequence[KVCache], config: Config | None) -> None:
    """CacheError unless `rows` are distinct caches made for a model of this config."""
    if not rows:
        raise CacheError("a batch of no rows: at least one cache was expected")
    if len({id(row) for row in rows}) < len(rows):
        raise CacheError(
            "one cache is given as two rows, which would append to each other",
            hint="pass row.fork()",
        )
    if wrong := [row.config for row in rows if row.config not in (None, config)]:
        raise CacheError(f"a row was made for another model than the batch: {wrong[0]}")


def check_plain_attention(rows: Sequence[Any]) -> None:
    """UnsupportedError for rows with an attention of their own, which the padding would hide."""
    for row in rows:
        if hasattr(row, "attention") and row.attention(1) is not None:
            how = ":".join(f"{key}={value}" for key, value in row.made.options.items())
            raise UnsupportedError(
                f"a row of {row.made.name}:{how} computes attention itself, so it cannot be padded "
                "to a batch",
                hint="run such rows one by one",
            )


@contextmanager
def all_or_none(parts: Sequence[LayerCache]) -> Iterator[None]:
    """Roll every row back if an append inside fails (one row is full, Ctrl-C)."""
    snapshots = [part._snapshot() for part in parts]
    try:
        yield
    except BaseException:
        for part, snapshot in zip(parts, snapshots, strict=True):
            part._rollback(snapshot)
        raise


def width(layer: KVCache | LayerCache, T: int, mask: Tensor | None) -> int:
    """S: how many keys the layer's append of T tokens will return; `mask` is layer.mask(T)."""
    if mask is None:
        return layer.sizes.held + T
    return mask.shape[-1]


def one_or_each(lengths: list[int]) -> Any:
    """An int if all are equal, else (B,) int64."""
    if len(set(lengths)) == 1:
        return lengths[0]
    return torch.from_numpy(numpy.array(lengths))


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """(1,…) each → (B,…); zeros where a row has none yet. None if no row has one."""
    like = next((tensor for tensor in tensors if tensor is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(like.shape) if x is None else x for x in tensors])


def _all_real(real: Sequence[Tensor | None], T: int) -> Tensor | None:
    """(1,T) each → (B,T) bool; a row without padding has None. None if no row has any."""
    if all(row is None for row in real):
        return None
    whole = torch.ones(1, T, dtype=torch.bool)
    return torch.cat([whole if row is None else row for row in real])


def _pad_left(tensors, longest: int):
    """(1,Hk,S_b,D) each → (B,Hk,longest,D), padded with zeros in front.

    The mask hides the padding, but it must be finite: NaN times an attention weight of 0 is NaN.
    """
    return torch.cat([F.pad(x, (0, 0, longest - x.shape[2], 0)) for x in tensors])
