"""Which pages hold the beginning of a prompt: the contract of an index, and the index by hashes.

An index lists pages of a pool by the tokens in them and before them. It holds no tensors and counts
no owners: the pool (prefix.py) does. `HashIndex` is the default; `RadixIndex` (radix.py) is a tree.

A page is found by a chain of sha256 hashes: each hash covers the hash of the page before and the
tokens of this page, so equal tokens after different beginnings get different hashes. The index
also stores and compares the tokens and the parent: a hash collision costs a recomputation, never a
wrong answer. Reference: vLLM's prefix caching (which compares no tokens), nano-vllm's block manager
(which does).
"""

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Idle = Callable[[int], bool]  # page → whether only the index holds it


class Change(NamedTuple):
    """The pages that an index has begun and ceased to hold."""

    added: list[int]
    dropped: list[int]


class PrefixIndex(ABC):
    """Full pages of `page_size` tokens. A salt separates tenants: they find only their own pages.

    Ctrl-C can come at any line, so an index is valid at each: every page that it lists holds the
    tokens under which it is found. The pool counts the pages again after an interrupted change.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size

    @abstractmethod
    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Pages of the longest stored prefix of `tokens`, which now count as used."""

    @abstractmethod
    def insert(self, tokens: Sequence[int], table: Sequence[int], salt: str) -> Change:
        """Index the full pages of a sequence, `table` lists them; pages already indexed are kept."""

    @abstractmethod
    def evict(self, count: int, idle: Idle) -> list[int]:
        """Drop pages until `count` idle ones are dropped, which must exist → all dropped pages.

        Least recently used pages first, and of one sequence its end before its beginning.
        """

    @abstractmethod
    def pages(self) -> Iterator[int]:
        """Every page that is held, once."""

    @abstractmethod
    def names(self, tokens: Sequence[int], salt: str) -> list[Hashable]:
        """A name for each full page of a sequence, without its tokens; for `holds`."""

    @abstractmethod
    def holds(self, name: Hashable) -> bool:
        """Whether the page of this name is held."""

    def __len__(self) -> int:
        return sum(1 for _ in self.pages())

    def parts(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The tokens of every full page."""
        size = self.page_size
        starts = range(0, len(tokens) - size + 1, size)
        return [tuple(tokens[start : start + size]) for start in starts]


@dataclass(frozen=True, eq=False)
class Entry:
    """A stored page, its tokens, and the entry before it (for the first page: the salt)."""

    page: int
    parent: "Entry | str"  # an entry is compared by identity, so an equal hash is not enough
    tokens: tuple[int, ...]


class HashIndex(PrefixIndex):
    """Entries by hash, least recently used first."""

    def __init__(self, page_size: int):
        super().__init__(page_size)
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()

    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        found: dict[bytes, Entry] = {}
        parent: Entry | str = salt
        for key, part in self.chain(tokens, salt):
            entry = self.entries.get(key)
            if entry is None or entry.tokens != part or entry.parent != parent:
                break
            found[key] = parent = entry
        self.touch(found)
        return [entry.page for entry in found.values()]

    def insert(self, tokens: Sequence[int], table: Sequence[int], salt: str) -> Change:
        """On a hash collision the new page replaces the old one."""
        found: dict[bytes, Entry] = {}
        change = Change([], [])
        parent: Entry | str = salt
        for (key, part), page in zip(self.chain(tokens, salt), table, strict=False):
            entry = self.entries.get(key)
            if entry is None or entry.tokens != part or entry.parent != parent:
                change.added.append(page)
                if entry is not None:
                    change.dropped.append(entry.page)
                entry = self.entries[key] = Entry(page, parent, part)
            found[key] = parent = entry
        self.touch(found)
        return change

    def evict(self, count: int, idle: Idle) -> list[int]:
        keys = [key for key, entry in self.entries.items() if idle(entry.page)][:count]
        return [self.entries.pop(key).page for key in keys]

    def pages(self) -> Iterator[int]:
        return (entry.page for entry in self.entries.values())

    def names(self, tokens: Sequence[int], salt: str) -> list[Hashable]:
        return [key for key, _ in self.chain(tokens, salt)]

    def holds(self, name: Hashable) -> bool:
        return name in self.entries

    def touch(self, keys: dict[bytes, Entry]) -> None:
        """Mark `keys` (root first) as most recently used; a leaf is evicted before its root."""
        for key in reversed(keys):
            self.entries.move_to_end(key)

    def chain(self, tokens: Sequence[int], salt: str) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """(hash, tokens) of every full page of a sequence."""
        key = hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
        for part in self.parts(tokens):
            key = self.hash(key, part)
            yield key, part

    @staticmethod
    def hash(parent: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + b",".join(b"%d" % token for token in tokens)).digest()
