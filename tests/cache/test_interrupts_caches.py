"""An exception at any line of a cache: append is mended by truncate, the rest is as before or as after.

For every kind of cache and every operation: once for each line of nanokv that it executes (slow), and for a few of
them drawn by lot (every time). See interrupts.py.
"""

import pytest
import torch

from interrupts import last, some, survives
from nanokv.cache import CACHES, KVCache, make_cache
from nanokv.config import Config
from nanokv.errors import UnsupportedError

CAPACITY, B = 24, 2
CONFIG = Config.from_dict(
    {
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": CAPACITY,
    }
)
# Small enough that all of them copy, grow, round and forget on the way.
KINDS = {kind: {} for kind in CACHES} | {
    "paged page=3": {"page": 3},
    "paged page=4 pages=20": {"page": 4, "pages": 20},
    "prefix page=4 pages=20": {"page": 4, "pages": 20},
    "sliding window=4": {"window": 4},
    "sliding window=5 sinks=2": {"window": 5, "sinks": 2},
    "quantized residual=3": {"residual": 3, "group": 4, "bits": 4},
    "quantized rotate": {"residual": 0, "group": 4, "k_bits": 8, "v_bits": 4, "rotate": "hadamard"},
    "offloaded host": {"to": "host"},
    "batch static": {"of": "static"},
    "batch paged": {"of": "paged", "page": 3},
    "batch sliding": {"of": "sliding", "window": 4},
    "batch quantized": {"of": "quantized", "residual": 3, "group": 4},
    "batch offloaded": {"of": "offloaded"},
}


def fill(cache, T: int, seed: int) -> list:
    """Append T tokens in all layers → what attention would get to see."""
    generator, seen = torch.Generator().manual_seed(seed), []
    for layer in cache:
        k, v = (torch.randn(B, 2, T, 4, generator=generator) for _ in "kv")
        seen.append([x.tolist() for x in layer.append(k, v)])
    return seen


def contents(cache) -> list:
    """What every layer stores."""
    return [{key: x.tolist() for key, x in layer.state().items()} for layer in cache]


def settled(cache):
    """No page has another number of owners than tables hold it."""
    parts = [part for part in (cache, *getattr(cache, "rows", ())) if hasattr(part, "pool")]
    for pool in {id(part.pool): part.pool for part in parts}.values():
        pool.settle()
        owned = pool.owned()
        assert pool.references == [owned[page] for page in range(len(pool.references))]
        assert sorted(pool.free) == [
            page for page in range(len(pool.references)) if not owned[page]
        ]


class Operation:
    """On a cache that holds 8 + 5 tokens in each of two rows."""

    def __init__(self, kind: str, folder):
        self.kind, self.path = kind, folder / "cache"

    def fresh(self):
        cache = make_cache(
            self.kind.split()[0], CONFIG, batch_size=B, capacity=CAPACITY, **KINDS[self.kind]
        )
        fill(cache, 8, 1)
        fill(cache, 5, 2)
        return [cache]

    def go_on(self, state):
        """What a user does next; then what the cache holds, and what an append gives."""
        answer = self.again(state)
        settled(state[0])
        return answer, contents(state[0]), state[0].length, fill(state[0], 3, 4), state[0].nbytes


class Append(Operation):
    """Mended by truncate; where too much is forgotten for that, by beginning anew."""

    def call(self, state):
        fill(state[0], 4, 3)

    def again(self, state):
        try:
            state[0].truncate(13)
            return fill(state[0], 4, 3)
        except UnsupportedError:
            assert "sliding" in self.kind
            state[0].truncate(0)
            fill(state[0], 8, 1)
            fill(state[0], 5, 2)
            return fill(state[0], 4, 3)


class Truncate(Operation):
    """Called again."""

    def call(self, state):
        state[0].truncate(6)

    again = call


class Forget(Operation):
    """Everything."""

    def call(self, state):
        state[0].truncate(0)

    again = call


class Fork(Operation):
    """Of the fork nothing is left, the parent has not changed."""

    def call(self, state):
        state.append(state[0].fork())

    def again(self, state):
        fork = state[0].fork()
        answer = fill(fork, 2, 5), contents(fork)
        settled(fork)
        return answer


class Reorder(Operation):
    """Before or after, in all layers."""

    def call(self, state):
        state[0].reorder([1, 0])

    def again(self, state):
        before = self.fresh()[0]
        if contents(state[0]) == contents(before):
            state[0].reorder([1, 0])


class Save(Operation):
    """The file is the old one or the new one, and nothing lies beside it."""

    def fresh(self):
        state = super().fresh()
        state[0].truncate(0)
        fill(state[0], 2, 6)
        state[0].save(self.path)
        self.old = contents(state[0])
        return super().fresh()

    def call(self, state):
        state[0].save(self.path)

    def again(self, state):
        assert [path.name for path in self.path.parent.iterdir()] == ["cache"]
        assert contents(KVCache.load(self.path, CONFIG)) in (self.old, contents(state[0]))
        state[0].save(self.path)
        return contents(KVCache.load(self.path, CONFIG))


class Load(Operation):
    """A file is only read."""

    def fresh(self):
        state = super().fresh()
        state[0].save(self.path)
        return state

    def call(self, state):
        state.append(KVCache.load(self.path, CONFIG))

    def again(self, state):
        cache = KVCache.load(self.path, CONFIG)
        return fill(cache, 2, 5)


OPERATIONS = {each.__name__.lower(): each for each in Operation.__subclasses__()}
EACH = pytest.mark.parametrize("kind", sorted(KINDS))


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def operations(kind, folder):
    """All that this kind can do."""
    for name, operation in OPERATIONS.items():
        if name != "truncate" or kind not in (
            "batch sliding",
            "sliding window=4",
            "sliding window=5 sinks=2",
        ):
            (folder / name).mkdir()
            yield operation(kind, folder / name)


@EACH
def test_ctrl_c_at_some_lines_of_a_cache_is_survived(kind, tmp_path):
    for seed, operation in enumerate(operations(kind, tmp_path)):
        survives(operation, some(2, seed))


@pytest.mark.night
@EACH
def test_ctrl_c_at_any_line_of_a_cache_is_survived(kind, tmp_path):
    for operation in operations(kind, tmp_path):
        survives(operation)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(CACHES))
def test_no_memory_at_any_line_of_a_cache_is_survived(kind, tmp_path):
    for operation in operations(kind, tmp_path):
        survives(operation, last, MemoryError)
