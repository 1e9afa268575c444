"""The index of prefixes as a tree: the same answers as the index by hashes, edges that are split, leaves that go first.

Pages are numbers here; the pool and the model meet the tree in the tests of the caches and of the engine.
"""

import random

import pytest

from nanokv.cache.prefix_index import HashIndex
from nanokv.cache.radix import RadixIndex


def everything(page: int) -> bool:
    return True


def shape(index: RadixIndex, salt: str = "") -> list:
    """The edges in depth-first order, as (depth, pages)."""
    found = []

    def visit(node, depth):
        for child in node.children.values():
            found.append((depth, [entry.page for entry in child.entries]))
            visit(child, depth + 1)

    if salt in index.roots:
        visit(index.roots[salt], 0)
    return found


def test_an_edge_is_split_where_two_sequences_part():
    tree = RadixIndex(2)
    assert tree.insert([1, 1, 2, 2, 3, 3, 4], [10, 11, 12, 13], "") == ([10, 11, 12], [])
    assert shape(tree) == [(0, [10, 11, 12])]
    assert tree.insert([1, 1, 2, 2, 9, 9], [10, 11, 20], "") == ([20], [])
    assert shape(tree) == [(0, [10, 11]), (1, [12]), (1, [20])]
    # A match splits too, so that what was used can be told from what was not.
    assert tree.match([1, 1, 2, 3], "") == [10]
    assert shape(tree) == [(0, [10]), (1, [11]), (2, [12]), (2, [20])]
    assert sorted(tree.pages()) == [10, 11, 12, 20] and len(tree) == 4


def test_pages_already_indexed_are_kept_and_salts_have_trees_of_their_own():
    tree = RadixIndex(1)
    tree.insert([1, 2], [10, 11], "")
    assert tree.insert([1, 2, 3], [20, 21, 22], "") == ([22], [])
    assert tree.match([1, 2, 3, 4], "") == [10, 11, 22]
    assert tree.match([1, 2], "other") == [] == tree.match([2], "")
    assert tree.insert([1], [30], "other") == ([30], [])
    assert tree.match([1, 2], "other") == [30]
    assert tree.evict(4, everything) == [22, 11, 10, 30]
    assert tree.roots == {}


def test_leaves_go_first_the_least_recently_used_from_its_end():
    tree = RadixIndex(1)
    tree.insert([1, 2, 3], [10, 11, 12], "")
    tree.insert([1, 5], [10, 20], "")
    tree.insert([7], [30], "")
    assert tree.match([1, 2], "") == [10, 11]
    names = tree.names([1, 2, 3], "")
    assert all(map(tree.holds, names))
    assert tree.evict(1, everything) == [12]
    assert [tree.holds(name) for name in names] == [True, True, False]
    assert tree.evict(2, everything) == [20, 30]
    assert tree.evict(2, everything) == [11, 10] and len(tree) == 0


def test_what_others_hold_goes_last_and_frees_what_is_before_it():
    """Page 11 belongs to a running request as well, page 10 only to the tree: 10 can be had."""
    tree = RadixIndex(1)
    tree.insert([1, 2], [10, 11], "")
    tree.insert([5], [20], "")
    assert tree.evict(1, lambda page: page != 11) == [20]
    assert tree.evict(1, lambda page: page != 11) == [11, 10]
    assert list(tree.pages()) == []


@pytest.mark.parametrize("page", [1, 2])
def test_the_tree_finds_and_evicts_what_the_hashes_do(page):
    """Under equal use the least recently used pages are leaves, so both evict the same pages."""
    for seed in range(30):
        draw = random.Random(seed)
        tree, table = RadixIndex(page), HashIndex(page)
        fresh = iter(range(10_000))
        for _ in range(60):
            tokens = draw.choices((1, 2), k=draw.randint(1, 9))
            salt = draw.choice(["", "", "a"])
            found = table.match(tokens, salt)
            assert tree.match(tokens, salt) == found
            rest = [next(fresh) for _ in range(len(tokens) // page - len(found))]
            assert tree.insert(tokens, found + rest, salt) == table.insert(
                tokens, found + rest, salt
            )
            assert sorted(tree.pages()) == sorted(table.pages())
            names = tree.names(tokens, salt), table.names(tokens, salt)
            assert len(names[0]) == len(names[1]) == len(tokens) // page
            if len(tree) > 12:
                count = draw.randint(1, len(tree))
                assert tree.evict(count, everything) == table.evict(count, everything)
                for index, name in zip((tree, table), names, strict=True):
                    assert [index.holds(one) for one in name] == [
                        page in set(index.pages()) for page in found + rest
                    ]


def test_an_interrupted_split_leaves_a_valid_tree(monkeypatch):
    """Ctrl-C after the new edges were made and before they are in place."""
    tree = RadixIndex(1)
    tree.insert([1, 2, 3], [10, 11, 12], "")
    before = shape(tree)

    def interrupted(above, node, place):
        above = type("Above", (), {"children": {}})
        RadixIndex.split(above, node, place)
        raise KeyboardInterrupt

    monkeypatch.setattr(tree, "split", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tree.match([1, 2, 9], "")
    assert shape(tree) == before
    monkeypatch.undo()
    assert tree.match([1, 2, 9], "") == [10, 11]
    assert tree.match([1, 2, 3], "") == [10, 11, 12]
