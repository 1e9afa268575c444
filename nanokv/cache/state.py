"""The cache of a recurrent layer: a state of fixed size, and the way back by some tokens.

A state is the sum of all tokens so far, so nothing of it can be cut off. The layer keeps the state
at a mark, and what the tokens since that mark have written: the state after any of them is computed
from these (recurrent.Written), without the model. There are two marks, SPARE tokens apart or more,
so at least SPARE tokens can be taken back, as with a window; less right after a prompt, whose last
chunk has more than SPARE tokens and leaves one mark at its end.

Bytes per row: S and conv of the newest token and of both marks, and what up to 2·SPARE tokens have
written. In Qwen3.5 64 tokens of a layer have written as much as its state takes.
"""

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


class Recurrent(LayerCache):
    """A layer without keys: `read` and `keep` take the place of `append` (recurrent.State)."""

    _windowed = True  # it has no keys for a mask to count
    kind = ""  # what it keeps, for an error
    pads: Tensor | None = None  # (B,) tokens of padding that the rows begin with

    def _pad(self, pads: Tensor) -> None:
        self.pads = pads  # it has no mask: padding must not change what it keeps

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise UnsupportedError(f"{self.kind}, not keys and values")

    def real(self, T: int) -> Tensor | None:
        """Which of the next T tokens are no padding, bool (B,T); None: all."""
        if self.pads is None or self.length >= int(self.pads.max()):
            return None
        column = torch.arange(self.length, self.length + T)  # (T,)
        return column >= self.pads[:, None]  # (B,T)

    def reorder(self, index: Index) -> None:
        if self.pads is not None:
            self.pads = self.pads[index]


class StateLayer(Recurrent):
    """The state of a layer with a recurrence. Tensors are never changed."""

    kind = "a recurrent layer keeps a state"

    def __init__(self) -> None:
        self.history = History()

    @property
    def length(self) -> int:  # type: ignore[override]  # read-only
        return self.history.now.length

    def read(self, T: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """conv, S and which of the next T tokens are real (recurrent.State)."""
        now = self.history.now
        return now.conv, now.S, self.real(T)

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
        now = marks[0]
        kept = []
        for written in old.written:
            count = min(written.T, n - now.length)
            if count <= 0:
                break
            now = Mark(now.length + count, written.conv(count), written.state(count, now.S))
            kept.append(written.first(count))
        return History(now, marks, tuple(kept))

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
        super().reorder(index)

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
        now = Mark(int(state["length"]), state["conv"], state.get("S"))
        self.history = History(now, (now,), ())

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        """Bytes of all states and of what was written, each tensor once."""
        old = self.history
        tensors = [tensor for mark in (old.now, *old.marks) for tensor in mark.tensors()]
        tensors += [x for each in old.written for x in each.tensors().values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
