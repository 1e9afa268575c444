"""An index of prefixes as a radix tree: RadixAttention (Zheng et al. 2024, arXiv:2312.07104).

An edge holds the pages that its sequences share; where two sequences part, the edge is split. A
walk compares tokens, so there is no hash that could collide. Every salt has a tree of its own.
Leaves are evicted first, the least recently used leaf from its end on.

The tree branches at whole pages, as SGLang's does with pages: a page of the kernels has one owner
of each slot, so two sequences that part inside a page would need a copy of it. With pages of one
token (`page=1`) it branches anywhere.
"""

from collections.abc import Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from nanokv.cache.prefix_index import Change, Idle, PrefixIndex

Part = tuple[int, ...]  # the tokens of one page


class Entry:
    """A page and its tokens. Compared by identity; `held` is False once it was evicted."""

    __slots__ = ("held", "page", "tokens")

    def __init__(self, page: int, tokens: Part):
        self.page = page
        self.tokens = tokens
        self.held = True


class Node:
    """The pages of an edge, and the edges that follow it by the tokens of their first page."""

    __slots__ = ("children", "entries", "used")

    def __init__(self, entries: list[Entry], children: "dict[Part, Node]", used: int):
        self.entries = entries  # empty in a root only
        self.children = children
        self.used = used

    def common(self, parts: Sequence[Part]) -> int:
        """How many pages of the edge are those of `parts`, from the beginning on."""
        for i, (entry, part) in enumerate(zip(self.entries, parts, strict=False)):
            if entry.tokens != part:
                return i
        return min(len(self.entries), len(parts))


class Leaf(NamedTuple):
    """A candidate for eviction; the lowest goes first."""

    live: bool  # another owner than the index has the last page
    used: int
    order: int  # makes leaves comparable
    node: Node


class RadixIndex(PrefixIndex):
    """A tree for each salt. `clock` counts the uses."""

    def __init__(self, page_size: int):
        super().__init__(page_size)
        self.roots: dict[str, Node] = {}
        self.clock = 0

    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        path = self.path(self.parts(tokens), salt)
        self.touch(path)
        return [entry.page for node in path for entry in node.entries]

    def insert(self, tokens: Sequence[int], table: Sequence[int], salt: str) -> Change:
        parts = self.parts(tokens)[: len(table)]
        path = self.path(parts, salt)
        known = sum(len(node.entries) for node in path)
        added = list(table[known : len(parts)])
        self.touch(path)
        if added:
            above = path[-1] if path else self.roots.setdefault(salt, Node([], {}, 0))
            entries = [Entry(*pair) for pair in zip(added, parts[known:], strict=True)]
            above.children[parts[known]] = Node(entries, {}, self.clock)
        return Change(added, [])

    def path(self, parts: Sequence[Part], salt: str) -> list[Node]:
        """The edges of the longest stored prefix; the last one is split where the prefix ends."""
        node = self.roots.get(salt)
        path: list[Node] = []
        done = 0
        while node is not None and done < len(parts):
            above = node
            node = above.children.get(parts[done])
            if node is not None:
                common = node.common(parts[done:])
                if common < len(node.entries):
                    node = self.split(above, node, common)
                path.append(node)
                done += common
        return path

    @staticmethod
    def split(above: Node, node: Node, place: int) -> Node:
        """Two edges in place of one, which ends before its entry `place` → the first of them."""
        lower = Node(node.entries[place:], node.children, node.used)
        upper = Node(node.entries[:place], {lower.entries[0].tokens: lower}, node.used)
        above.children[upper.entries[0].tokens] = upper  # one statement: never a half split
        return upper

    def touch(self, path: Sequence[Node]) -> None:
        """Mark a path as most recently used."""
        self.clock += 1
        for node in path:
            node.used = self.clock

    def evict(self, count: int, idle: Idle) -> list[int]:
        """A leaf with another owner goes only if all have one: its own pages stay, what is before
        it can be evicted then."""
        above = {id(node): parent for parent, node in self.edges()}
        leaves = [self.leaf(node, idle) for _, node in self.edges() if not node.children]
        heapify(leaves)
        dropped: list[int] = []
        while count > 0:
            live, *_, node = heappop(leaves)
            entry = node.entries[-1]
            parent = above[id(node)]
            if len(node.entries) == 1:
                del parent.children[entry.tokens]
                if parent.entries and not parent.children:
                    heappush(leaves, self.leaf(parent, idle))
            else:
                node.entries.pop()
                heappush(leaves, self.leaf(node, idle))
            entry.held = False
            dropped.append(entry.page)
            count -= not live
        for salt in [salt for salt, root in self.roots.items() if not root.children]:
            del self.roots[salt]
        return dropped

    @staticmethod
    def leaf(node: Node, idle: Idle) -> Leaf:
        return Leaf(not idle(node.entries[-1].page), node.used, id(node), node)

    def edges(self) -> Iterator[tuple[Node, Node]]:
        """(parent, node) of every edge."""
        waiting = list(self.roots.values())
        while waiting:
            parent = waiting.pop()
            for node in parent.children.values():
                yield parent, node
                waiting.append(node)

    def pages(self) -> Iterator[int]:
        return (entry.page for _, node in self.edges() for entry in node.entries)

    def names(self, tokens: Sequence[int], salt: str) -> list[Hashable]:
        path = self.path(self.parts(tokens), salt)
        return [entry for node in path for entry in node.entries]

    def holds(self, name: Hashable) -> bool:
        return getattr(name, "held", False)
