"""The cache of a recurrent layer: a state of fixed size, and the way back by some tokens.

A state is the sum of all tokens so far, so nothing of it can be cut off. The layer keeps the state
at a mark, and what the tokens since that mark have written: the state after any of them is computed
from these (recurrent.Written), without the model. There are two marks, SPARE tokens apart or more,
so at least SPARE tokens can be taken back, as with a window; less right after a prompt, whose last
chunk has more than SPARE tokens and leaves one mark at its end.

Bytes per row: S and conv of the newest token and of both marks, and what up to 2·SPARE tokens have
written. In Qwen3.5 64 tokens of a layer have written as much as its state takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Index, Sizes
from nanokv.cache.options import SPARE
from nanokv.errors import UnsupportedError
from nanokv.recurrent import Written


@dataclass(frozen=True)
class Mark:
    """The state after `length` tokens; None: before the first."""

    length: int = 0
    conv: Tensor | None = None  # (B,C,K−1)
    S: Tensor | None = None  # (B,H,Dk,Dv) fp32

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.conv, self.S) if tensor is not None]


@dataclass(frozen=True)
class History:
    """Marks, oldest first, and what was written since the first of them, append by append."""

    now: Mark = Mark()
    marks: tuple[Mark, ...] = (Mark(),)
    written: tuple[Written, ...] = field(default=())


def between(start: int, written: Sequence[Written], n: int) -> tuple[Written, ...]:
    """What the tokens before token n have written; the first of them is token `start`."""
    kept = []
    for each in written:
        count = min(each.T, n - start)
        if count <= 0:
            break
        kept.append(each.first(count))
        start += count
    return tuple(kept)


def state_after(mark: Mark, written: Sequence[Written]) -> Mark:
    """The state after what follows a mark, in one pass over all of its tokens."""
    if not written:
        return mark
    last = written[-1]
    T = sum(each.T for each in written)
    parts = [each.tensors() for each in written]
    joined = {
        name: torch.cat([part[name] for part in parts], 2) for name in parts[0] if name != "window"
    }
    S = last._replace(T=T, **joined).state(T, mark.S)
    return Mark(mark.length + T, last.conv(last.T), S)


class StateLayer(LayerCache):
    """`read` and `keep` take the place of `append` (recurrent.State). Tensors are never changed."""

    _windowed = True  # it has no keys for a mask to count

    def __init__(self) -> None:
        self.history = History()
        self.pads: Tensor | None = None  # (B,) tokens of padding that the rows begin with

    @property
    def length(self) -> int:  # type: ignore[override]  # read-only
        return self.history.now.length

    def _pad(self, pads: Tensor) -> None:
        self.pads = pads  # a state has no mask: padding must not change it

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise UnsupportedError("a recurrent layer keeps a state, not keys and values")

    def read(self, T: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """conv, S and which of the next T tokens are real (recurrent.State)."""
        now = self.history.now
        real = None
        if self.pads is not None and now.length < int(self.pads.max()):
            column = torch.arange(now.length, now.length + T)  # (T,)
            real = column >= self.pads[:, None]  # (B,T)
        return now.conv, now.S, real

    def keep(self, written: Written, S: Tensor | None) -> None:
        """The state after these tokens, and a new mark if the last one is SPARE tokens old."""
        old = self.history
        length = old.now.length + written.T
        now = Mark(length, written.conv(written.T), S)
        if written.T > SPARE:
            self.history = History(now, (now,), ())
            return
        marks = old.marks
        since = (*old.written, written)
        if length - marks[-1].length >= SPARE:
            marks = (*marks, now)
        if len(marks) > 2:  # the second mark is far enough back
            gone = marks[1].length - marks[0].length
            while gone > 0:
                gone -= since[0].T
                since = since[1:]
            marks = marks[1:]
        self.history = History(now, marks, since)

    @property
    def sizes(self) -> Sizes:
        now = self.history.now
        rows = None if now.conv is None else now.conv.shape[0]
        return Sizes(rows, 0, self.nbytes, self.spare)

    @property
    def spare(self) -> int | None:
        """Tokens that truncate can take back; None: all."""
        first = self.history.marks[0].length
        return None if first == 0 else self.length - first

    def _check_truncate(self, n: int):
        super()._check_truncate(n)
        first = self.history.marks[0].length
        if 0 < n < first:
            raise UnsupportedError(
                f"a recurrent layer cannot go back from {self.length} tokens to {n}: its oldest "
                f"state is that after {first}",
                hint=f"truncate({first}), or truncate(0) and prefill again",
            )

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        if n == 0:
            self.history = History()
        elif n < self.length:
            self.history = self.before(n)

    def before(self, n: int) -> History:
        """The history up to n tokens; n is not before the first mark."""
        old = self.history
        marks = tuple(mark for mark in old.marks if mark.length <= n)
        kept = between(old.marks[0].length, old.written, n)
        since = between(old.marks[0].length, old.written, marks[-1].length)
        now = state_after(marks[-1], kept[len(since) :])
        return History(now, marks, kept)

    def mark_at(self, n: int) -> Mark | None:
        """The state after n tokens; None if the layer does not hold it any more."""
        if not self.history.marks[0].length <= n <= self.length:
            return None
        if n == self.length:
            return self.history.now
        return self.before(n).now

    def resume(self, mark: Mark) -> None:
        """Continue from a state; it cannot go back further."""
        self.history = History(mark, (mark,), ())

    def _snapshot(self) -> Any:
        return self.history  # tensors are replaced, never changed

    def _rollback(self, snapshot: Any) -> None:
        self.history = snapshot

    def fork(self) -> Self:
        copy = type(self)()
        copy.history = self.history
        copy.pads = self.pads
        return copy

    def reorder(self, index: Index) -> None:
        def rows(mark: Mark) -> Mark:
            if mark.conv is None:
                return mark
            return Mark(mark.length, mark.conv[index], None if mark.S is None else mark.S[index])

        old = self.history
        written = tuple(each.rows(index) for each in old.written)
        self.history = History(rows(old.now), tuple(map(rows, old.marks)), written)
        if self.pads is not None:
            self.pads = self.pads[index]

    def state(self) -> dict[str, Tensor]:
        now = self.history.now
        if now.conv is None:
            return {}
        found = {"conv": now.conv, "length": torch.tensor(now.length)}
        return found if now.S is None else found | {"S": now.S}

    def restore(self, state: dict[str, Tensor]) -> None:
        if not state:
            self.history = History()
            return
        self.resume(Mark(int(state["length"]), state["conv"], state.get("S")))

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        """Bytes of all states and of what was written, each tensor once."""
        old = self.history
        tensors = [tensor for mark in (old.now, *old.marks) for tensor in mark.tensors()]
        tensors += [x for each in old.written for x in each.tensors().values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
