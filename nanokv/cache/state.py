"""The cache of a recurrent layer: a state of fixed size, and the way back by some tokens.

A state is the sum of all tokens so far, so nothing of it can be cut off. The layer keeps the state
at a mark, and what the tokens since that mark have written: the state after any of them is computed
from these (recurrent.Written), without the model. There are two marks, SPARE tokens apart or more,
so at least SPARE tokens can be taken back, as with a window.

Older states are kept as snapshots: where `snapshot` is called (the end of a message), and after
each `every` tokens. `truncate` goes back to one of them and nowhere between; the tokens that follow
it are prefilled again. A layer keeps the first snapshot and the newest others.

Bytes per row: S and conv of the newest token, of both marks and of each snapshot, and what up to
2·SPARE tokens have written: in Qwen3.5 in bf16, 64 tokens of a layer 1.5 times its state. A
snapshot of all layers takes as much as keys and values of 1,572 tokens. A layer with a short
convolution alone (LFM2) has no S: its state is the last K−1 inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Index, Sizes
from nanokv.cache.options import SNAPSHOTS, SPARE
from nanokv.errors import UnsupportedError
from nanokv.recurrent import Written

JOINED = 16  # tokens of appends that are kept as one


@dataclass(frozen=True)
class Mark:
    """The state after `length` tokens; None: before the first."""

    length: int = 0
    conv: Tensor | None = None  # (B,C,K−1)
    S: Tensor | None = None  # (B,H,Dk,Dv) fp32

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.conv, self.S) if tensor is not None]

    def alone(self) -> "Mark":
        """The mark without the memory of other rows, which views of a batch would keep."""
        return Mark(self.length, own(self.conv), own(self.S))


def own(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()


@dataclass(frozen=True)
class Plan:
    """Which states a layer keeps: at most `snapshots`, one after each `every` tokens (0: none)."""

    snapshots: int = SNAPSHOTS
    every: int = 0

    def chosen(self, snapshots: tuple[Mark, ...]) -> tuple[Mark, ...]:
        """Those that stay, oldest first: the first one, which many texts share, and the newest."""
        if len(snapshots) <= self.snapshots:
            return snapshots
        if self.snapshots < 2:
            return snapshots[len(snapshots) - self.snapshots :]
        return (snapshots[0], *snapshots[1 - self.snapshots :])


PLAN = Plan()


@dataclass(frozen=True)
class History:
    """Marks, oldest first, and what was written since the first of them, append by append."""

    now: Mark = Mark()
    marks: tuple[Mark, ...] = (Mark(),)
    written: tuple[Written, ...] = field(default=())
    snapshots: tuple[Mark, ...] = field(default=())  # oldest first


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


def joined(written: tuple[Written, ...], since: int) -> tuple[Written, ...]:
    """The same with the last appends as one, once they have JOINED tokens.

    Each append has K−1 inputs of the convolution from the one before, so tokens that come one by
    one weigh twice as much. A mark, `since` tokens from the end, stays between two appends.
    """
    T = 0
    first = len(written)
    while first and written[first - 1].T < JOINED and T + written[first - 1].T <= since:
        first -= 1
        T += written[first].T
    if T < JOINED:
        return written
    return (*written[:first], Written.joined(written[first:]))


def state_after(mark: Mark, written: Sequence[Written]) -> Mark:
    """The state after what follows a mark, in one pass over all of its tokens."""
    if not written:
        return mark
    last = written[-1]
    whole = Written.joined(written)
    return Mark(mark.length + whole.T, last.conv(last.T), whole.state(whole.T, mark.S))


class StateLayer(LayerCache):
    """`read` and `keep` take the place of `append` (recurrent.State). Tensors are never changed."""

    _windowed = True  # it has no keys for a mask to count

    def __init__(self, plan: Plan = PLAN, keeps: str = "a recurrent state") -> None:
        self.plan = plan
        self.keeps = keeps  # Config.state_name, for errors
        self.history = History()
        self.pads: Tensor | None = None  # (B,) tokens of padding that the rows begin with

    @property
    def length(self) -> int:  # type: ignore[override]  # read-only
        return self.history.now.length

    def _pad(self, pads: Tensor) -> None:
        self.pads = pads  # a state has no mask: padding must not change it

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise UnsupportedError(f"a layer with {self.keeps} has no keys and values")

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
        snapshots = self.plan.chosen((*old.snapshots, *self.passed(written, now)))
        if written.T > SPARE:
            first = after(written, written.T - SPARE, old.now)
            self.history = History(now, (first,), (written.last(SPARE),), snapshots)
            return
        marks = old.marks
        since = joined((*old.written, written), length - marks[-1].length)
        if length - marks[-1].length >= SPARE:
            marks = (*marks, now.alone())
        if len(marks) > 2:  # the second mark is far enough back
            gone = marks[1].length - marks[0].length
            while gone > 0:
                gone -= since[0].T
                since = since[1:]
            marks = marks[1:]
        self.history = History(now, marks, since, snapshots)

    def passed(self, written: Written, now: Mark) -> list[Mark]:
        """The states after each multiple of `every` tokens up to `now`."""
        every, old = self.plan.every, self.history.now
        if not every or not self.plan.snapshots:
            return []
        lengths = range(old.length // every * every + every, now.length + 1, every)
        return [
            now.alone() if length == now.length else after(written, length - old.length, old)
            for length in lengths
        ]

    def _keep_snapshot(self) -> None:
        old = self.history
        others = tuple(mark for mark in old.snapshots if mark.length < self.length)
        if self.length:
            kept = self.plan.chosen((*others, old.now.alone()))
            self.history = replace(old, snapshots=kept)

    @property
    def sizes(self) -> Sizes:
        now = self.history.now
        rows = None if now.conv is None else now.conv.shape[0]
        kept = tuple(mark.length for mark in self.snapshots)
        return Sizes(rows, 0, self.nbytes, self.spare, kept)

    @property
    def spare(self) -> int | None:
        """Tokens that truncate can take back; None: all."""
        first = self.history.marks[0].length
        return None if first == 0 else self.length - first

    def _nearest(self, n: int) -> int:
        if n >= self.history.marks[0].length:
            return n
        return max((mark.length for mark in self.snapshots if mark.length <= n), default=0)

    @property
    def snapshots(self) -> tuple[Mark, ...]:
        """The states that are kept apart, oldest first."""
        return self.history.snapshots

    def _check_truncate(self, n: int):
        super()._check_truncate(n)
        nearest = self._nearest(n)
        if n != nearest:
            first = self.history.marks[0].length
            raise UnsupportedError(
                f"a layer with {self.keeps} cannot go back from {self.length} tokens to {n}: it "
                f"has the states from {first} tokens on{self._listed()}",
                hint=f"truncate({nearest}) and prefill the rest again",
            )

    def _listed(self) -> str:
        """The snapshots in an error."""
        if not self.snapshots:
            return ""
        return " and after " + ", ".join(str(mark.length) for mark in self.snapshots)

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        if n == 0:
            self.history = History()
        elif n < self.length:
            self.history = self.before(n)

    def before(self, n: int) -> History:
        """The history up to n tokens, which `_check_truncate` has allowed."""
        old = self.history
        snapshots = tuple(mark for mark in old.snapshots if mark.length <= n)
        if n < old.marks[0].length:
            now = snapshots[-1]
            return History(now, (now,), (), snapshots)
        marks = tuple(mark for mark in old.marks if mark.length <= n)
        kept = between(old.marks[0].length, old.written, n)
        since = between(old.marks[0].length, old.written, marks[-1].length)
        now = state_after(marks[-1], kept[len(since) :])
        return History(now, marks, kept, snapshots)

    def mark_at(self, n: int) -> Mark | None:
        """The state after n tokens; None if the layer does not hold it any more."""
        if n > self.length or n != self._nearest(n):
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
        copy = type(self)(self.plan, self.keeps)
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
        marks = tuple(map(rows, old.marks))
        self.history = History(rows(old.now), marks, written, tuple(map(rows, old.snapshots)))
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
        marks = (old.now, *old.marks, *old.snapshots)
        tensors = [tensor for mark in marks for tensor in mark.tensors()]
        tensors += [x for each in old.written for x in each.tensors().values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def after(written: Written, n: int, start: Mark) -> Mark:
    """The state after n ≥ 1 of the tokens; `start` is the state before them."""
    return Mark(start.length + n, written.conv(n), written.state(n, start.S))
