"""States of a model's recurrent layers at ends of pages: companions of the pages of an index.

Pages hold keys and values, and a prompt may continue after any of them. A recurrent layer continues
only where its state is known, so a prompt with a known beginning resumes at its last page with a
snapshot, and computes the rest again. A snapshot leaves together with its page.

In Qwen3.5's default text config in bf16 a token's keys and values take 8 layers × 4,096 B = 32,768 B.
A snapshot takes 24 layers × 2,146,304 B = 51,511,296 B, as much as 1,572 tokens (transformers' state,
which keeps one more input of the convolution: 51,904,512 B, 1,584 tokens). So there are few: one
every `every` tokens of a prompt, one at its last full page, one where it parts from a known prompt
(as in Marconi, arXiv 2411.19379), and one at the end of a request. Beyond `most`, the least recently
used goes first.

A prompt's chunks end at these places, unless they have at most SPARE tokens: a StateLayer gives the
state after each of those without the model.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nanokv.cache.options import SPARE
from nanokv.cache.state import Mark, StateLayer

EVERY = 512  # tokens
MOST = 32
Marks = tuple[Mark, ...]  # of the recurrent layers, in order, all of one length


class Stops(NamedTuple):
    """Ends of pages where a prompt leaves a snapshot, besides the multiples of `every`."""

    branch: int = 0  # tokens that the index knew; 0: none
    last: int = 0  # the last page's end that a later request with this prompt can use


class NoSnapshots:
    """Of a model without recurrent layers: every page is a place to continue."""

    most = 0
    hits = 0
    nbytes = 0
    bytes_each = 0

    def __len__(self) -> int:
        return 0

    def usable(self, pages: list[int]) -> list[int]:
        """The pages up to the last one where a sequence can continue."""
        return pages

    def resume(self, states: Sequence[StateLayer], pages: list[int]) -> None:
        """Give each recurrent layer its state after these pages."""

    def chunk(self, start: int, end: int, stops: Stops) -> int:
        """Where the chunk from token `start` ends, at most at `end`."""
        return end

    def due(self, length: int, stops: Stops) -> list[int]:
        """Where a prompt of which `length` tokens are computed leaves snapshots, in order."""
        return []

    def reach(self, alike: int, length: int, stops: Stops) -> int:
        """Tokens that another prompt can reuse of this one, if full pages of `alike` are equal."""
        return alike

    def put(self, page: int, length: int, states: Sequence[StateLayer]) -> None:
        """Keep the states after `length` tokens, which end `page`, if the layers still have them."""

    def drop(self, pages: Iterable[int]) -> None:
        """These pages have left the index."""

    def retain(self, pages: Iterable[int]) -> None:
        """No other page is in the index."""


class Snapshots(NoSnapshots):
    """At most `most` snapshots by page, least recently used first."""

    def __init__(self, page_size: int, every: int = EVERY, most: int = MOST):
        self.page_size = page_size
        self.every = max(page_size, every // page_size * page_size)
        self.most = most
        self.marks: OrderedDict[int, Marks] = OrderedDict()
        self.hits = 0  # requests that resumed at one; the scheduler counts

    def __len__(self) -> int:
        return len(self.marks)

    def usable(self, pages: list[int]) -> list[int]:
        ends = [i for i, page in enumerate(pages) if page in self.marks]
        return pages[: ends[-1] + 1] if ends else []

    def resume(self, states: Sequence[StateLayer], pages: list[int]) -> None:
        if not pages:
            return
        for state, mark in zip(states, self.marks[pages[-1]], strict=True):
            state.resume(mark)
        self.marks.move_to_end(pages[-1])

    def chunk(self, start: int, end: int, stops: Stops) -> int:
        if end - start <= SPARE:
            return end
        multiple = (start // self.every + 1) * self.every
        return min(stop for stop in (multiple, *stops, end) if start < stop <= end)

    def due(self, length: int, stops: Stops) -> list[int]:
        ends = {length // self.every * self.every, *stops}
        return sorted(end for end in ends if 0 < end <= length)

    def reach(self, alike: int, length: int, stops: Stops) -> int:
        return max((end for end in self.due(length, stops) if end <= alike), default=0)

    def put(self, page: int, length: int, states: Sequence[StateLayer]) -> None:
        if page in self.marks:
            self.marks.move_to_end(page)
            return
        marks = [state.mark_at(length) for state in states]
        known = tuple(mark.alone() for mark in marks if mark is not None)
        if len(known) == len(marks):
            self.marks[page] = known
        while len(self.marks) > self.most:
            self.marks.popitem(last=False)

    def drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.marks.pop(page, None)

    def retain(self, pages: Iterable[int]) -> None:
        self.drop(self.marks.keys() - set(pages))

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        """Bytes of all snapshots."""
        return sum(x.nbytes for marks in self.marks.values() for m in marks for x in m.tensors())

    @property
    def bytes_each(self) -> int:  # type: ignore[override]  # read-only
        """Bytes of one snapshot; 0 before the first."""
        return self.nbytes // max(1, len(self.marks))
