"""The memory that paged caches share: pages of a few tokens, reference counts, and a free list.

A pool holds the keys of one model. make_cache checks the config of each cache that joins; the
weights cannot be checked, because two checkpoints may have the same config.

The tables of the caches are the source of truth for who owns a page. `references` and `free` are
derived from them, and every change updates both. If an exception interrupts a change (Ctrl-C can
come at any line), the next change counts again from the tables.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nanokv.config import Config
from nanokv.errors import CacheError, CapacityError, UnsupportedError

Table = list[int]  # the pages of one row, oldest first


class Owner(Protocol):
    """A paged cache, which owns the pages in its tables."""

    tables: list[Table]


class SharedPage(NamedTuple):
    """Entry `place` of a table: a page that other tables hold too."""

    table: Table
    place: int


class PagePool:
    """`pages` pages of `page_size` tokens for the layers with keys, each with a count of owners."""

    # (L,P,Hk,page,D), L without recurrent layers. None until the first append, which decides dtype
    # and device.
    keys: Tensor
    values: Tensor

    def __init__(self, config: Config, pages: int, page_size: int):
        self.config = config
        self.layers = config.num_kv_layers - config.states  # with keys and values
        if not self.layers:
            raise UnsupportedError(
                f"pages hold keys and values, and all {config.states} layers of "
                f"{config.family.title} have {config.state_name}",
                hint="growing, dict, static or quantized",
            )
        self.page_size = page_size
        self.references = [0] * pages
        # A stack: the page that was freed last is still in the CPU's cache.
        self.free = list(range(pages - 1, -1, -1))
        self.keys = self.values = None  # type: ignore[assignment]  # `storage` comes first
        # By id, because a cache is a list and has no hash.
        self.owners: MutableMapping[int, Owner] = weakref.WeakValueDictionary()
        self.members = 0  # owners that have joined and not left
        self.lent: Counter[int] = Counter()  # pages that `take` gave out; no table lists them
        self.unsettled = 0  # changes that have begun and not ended

    # --- ownership ------------------------------------------------------------------------------

    def owned(self) -> Counter[int]:
        """How many owners each page has: O(pages in use)."""
        listed = Counter(
            page for owner in self.owners.values() for table in owner.tables for page in table
        )
        return listed + self.lent

    def settle(self) -> None:
        """Count again if a change was interrupted, or if an owner was deleted without `leave`."""
        if self.unsettled or len(self.owners) != self.members:
            changes = self.unsettled
            self.members = len(self.owners)
            self.count()
            self.unsettled -= changes  # a change that began meanwhile, in a __del__, remains

    def count(self) -> None:
        """Set `references` and `free` from the tables."""
        owned = self.owned()
        self.references = [owned[page] for page in range(len(self.references))]
        self.free = [page for page in reversed(range(len(self.references))) if not owned[page]]

    @contextmanager
    def change(self) -> Iterator[None]:
        """Wraps every change of tables and counts; an interrupted one is repaired by the next."""
        self.settle()
        self.unsettled += 1
        try:
            yield
        except CapacityError:  # refused before anything was changed
            self.unsettled -= 1
            raise
        self.unsettled -= 1

    def hold(self, owner: Owner, tables: list[Table]) -> None:
        """Replace `owner.tables`: share the pages of the new tables, release those of the old."""
        with self.change():
            self._share(page for table in tables for page in table)
            # The swap is one statement, so that an interrupt leaves either the old or new tables.
            before, owner.tables = owner.tables, tables
            self._release([page for table in before for page in table])

    def join(self, owner: Owner) -> None:
        """Add an owner of the pages in its `tables`."""
        self.owners[id(owner)] = owner
        self.members += 1

    def leave(self, owner: Owner) -> None:
        """Remove an owner; called by its __del__, so at any moment.

        In the middle of a change its pages are counted later. Python swallows exceptions in a
        __del__, Ctrl-C too; `settle` then notices by the number of owners.
        """
        self.unsettled += 1
        if self.unsettled == 1:
            self._release([page for table in owner.tables for page in table])
            self.unsettled = 0
        owner.tables = []
        self.owners.pop(id(owner), None)
        self.members -= 1

    # --- memory ---------------------------------------------------------------------------------

    def storage(self, like: Tensor) -> None:
        """Allocate P · page · 2·L·Hk·D values at the first append, and check later keys."""
        if self.keys is None:
            self.keys, self.values = (self.empty(len(self.references), like) for _ in "kv")
        held = self.keys
        same_sizes = (held.shape[2], held.shape[4]) == (like.shape[1], like.shape[3])
        # A write of another shape could broadcast without an error.
        if not same_sizes or held.dtype != like.dtype or held.device != like.device:
            have, new = (f"{tuple(x.shape[-4:])} {x.dtype}" for x in (held, like))
            where = "" if held.device == like.device else f": on {like.device}, not {held.device}"
            raise CacheError(
                f"cannot append keys {new} to a cache of {have} (pages,Hk,page,D){where}"
            )

    def empty(self, pages: int, like: Tensor) -> Tensor:
        """(L,pages,Hk,page,D), uninitialised. Usable outside inference mode too."""
        c = self.config
        shape = self.layers, pages, c.num_key_value_heads, self.page_size, c.head_dim
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def reserve(self, tables: list[Table], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Give row b unshared pages for counts[b] tokens from starts[b] on, or no row any.

        A page that is shared is copied before it is written (copy on write). Raises CapacityError.
        """
        if not self.lacking(tables, starts, counts):
            return
        with self.change():
            shared, missing = self._wanted(tables, starts, counts)
            fresh = self._take(len(shared) + len(missing))
            # Each table changes last, so that the pages it lists are valid at every line.
            for table, i in shared:
                old = table[i]
                new = fresh.pop()
                self.keys[:, new] = self.keys[:, old]
                self.values[:, new] = self.values[:, old]
                table[i] = new
                self._release([old])
            for table in missing:
                table.append(fresh.pop())

    def _wanted(
        self, tables: list[Table], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[SharedPage], list[Table]]:
        """(pages to copy, tables that lack a page, once per page) before tokens are written."""
        size = self.page_size
        shared: list[SharedPage] = []
        missing: list[Table] = []
        seen: Counter[int] = Counter()
        for table, start, count in zip(tables, starts, counts, strict=True):
            last = -(-(start + count) // size)  # pages start // size … last − 1 will be written
            for i in range(start // size, min(last, len(table))):
                page = table[i]
                seen[page] += 1
                # The last table that holds a page keeps it, the others get a copy.
                if self.references[page] > seen[page]:
                    shared.append(SharedPage(table, i))
            missing += [table] * (last - len(table))
        return shared, missing

    def lacking(
        self, tables: list[Table], starts: Sequence[int], counts: Sequence[int]
    ) -> list[int]:
        """Rows that may need a page; any other row has an unshared page with counts[b] free slots."""
        self.settle()
        size = self.page_size
        references = self.references
        rows = []
        for b, (table, start, count) in enumerate(zip(tables, starts, counts, strict=True)):
            i = start // size
            if i >= len(table) or references[table[i]] != 1 or start + count > (i + 1) * size:
                rows.append(b)
        return rows

    def take(self, count: int) -> list[int]:
        """`count` free pages, which belong to the caller until `release`.

        Raises CapacityError, and changes nothing, if there are not enough.
        """
        with self.change():
            taken = self._take(count)
            self.lent.update(taken)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Give back pages from `take`."""
        with self.change():
            self._release(pages)
            self.lent.subtract(pages)

    def _take(self, count: int) -> list[int]:
        self.make_room(count)
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.references[page] = 1
        return taken

    def make_room(self, count: int) -> None:
        """Make sure that `count` pages are free, or raise CapacityError."""
        if count > len(self.free):
            self.exhausted(count)

    def exhausted(self, count: int) -> None:
        """Called when fewer than `count` pages are free. PagePool raises, ElasticPool grows."""
        raise CapacityError(
            f"the page pool is exhausted: {count} pages of {self.page_size} tokens wanted, "
            f"{len(self.free)} of {len(self.references)} free",
            hint="free a sequence, or make the pool larger",
        )

    @property
    def limit(self) -> int | None:
        """The most tokens that fit; None = as memory allows."""
        return len(self.references) * self.page_size

    def _share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            # A table that still lists the page would soon read another sequence's tokens.
            if self.references[page] < 1:
                raise CacheError(f"page {page} was given back twice: two caches hold one table")
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)

    @property
    def bytes_per_page(self) -> int:
        """2 (K and V) · L · Hk · page · D · itemsize; 0 before the first append."""
        if self.keys is None:
            return 0
        return 2 * self.keys[:, 0].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return len(self.references) * self.bytes_per_page


class ElasticPool(PagePool):
    """A pool that at least doubles when it is full, so N pages cost fewer than 2N page copies."""

    limit = None

    def exhausted(self, count: int) -> None:
        held = len(self.references)
        more = max(count - len(self.free), held)
        if self.keys is not None:
            keys = self.empty(held + more, like=self.keys)
            values = self.empty(held + more, like=self.values)
            keys[:, :held] = self.keys[:, :held]
            values[:, :held] = self.values[:, :held]
            # One statement, so an interrupt never leaves keys and values of different sizes.
            self.keys, self.values = keys, values
        self.references += [0] * more
        self.free = list(range(held + more - 1, held - 1, -1)) + self.free
