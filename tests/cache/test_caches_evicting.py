"""Evicting caches: against full attention by hand in fp64, against kvpress, and what they refuse.

tests/facts/kvpress.json has what kvpress keeps of a prompt, written by tests/tools/record_kvpress.py.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from nanokv import costs
from nanokv.attention import causal_attention
from nanokv.cache import BatchCache, KVCache, make_cache
from nanokv.cache.evicting import EvictingCache, EvictingLayer
from nanokv.cache.padded import PaddedCache
from nanokv.cache.policies import Held, make_policy
from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError
from nanokv.inference import decode, prefill, verify_draft
from nanokv.loading import build
from nanokv.model import Transformer
from oracle import SHAPES, gap, pair, random_ids

B, HK, G, D = 2, 2, 3, 8
SPECS = {
    "window": {"policy": "window", "budget": 7, "sinks": 2},
    "norms": {"policy": "norms", "budget": 7, "sinks": 1, "recent": 2},
    "h2o": {"policy": "h2o", "budget": 7, "sinks": 0, "recent": 3},
    "snapkv": {"policy": "snapkv", "budget": 9, "sinks": 1, "recent": 4},
}
OWN = {
    "matching": {"policy": "matching", "budget": 9, "recent": 4},
    "quest": {"policy": "quest", "budget": 9, "page": 4},
}
CHUNKS = [(24,), (11, 6, 1, 1, 5), (3, 3, 3, 3, 3, 3, 3, 3), (1,) * 24]


@pytest.fixture(scope="module")
def model():
    """G = 2, no key norms."""
    return pair(**SHAPES["llama-G2"])[1]


# --- by hand --------------------------------------------------------------------------------------------------------


class ByHand:
    """One KV head of one row: Python lists, and attention over all tokens with those that are gone hidden."""

    def __init__(self, policy, budget, sinks, recent=0):
        self.policy, self.budget, self.sinks, self.recent = policy, budget, sinks, recent
        self.keys, self.values, self.kept, self.score = [], [], [], {}

    def append(self, q, k, v):
        """q (G,T,D), k and v (T,D) → (G,T,D)."""
        start, T = len(self.keys), k.shape[0]
        self.keys += list(k)
        self.values += list(v)
        keys, values = torch.stack(self.keys), torch.stack(self.values)
        out, seen = torch.zeros_like(q), torch.zeros(T, len(self.keys), dtype=q.dtype)
        for t in range(T):
            visible = torch.zeros(len(self.keys), dtype=torch.bool)
            visible[self.kept + list(range(start, start + t + 1))] = True
            for g in range(len(q)):
                scores = (keys @ q[g, t] / math.sqrt(D)).masked_fill(~visible, -torch.inf)
                p = scores.softmax(0)
                out[g, t] = p @ values
                seen[t] += p / len(q)
        self.kept += range(start, start + T)
        self.count(seen)
        if len(self.kept) > self.budget:
            self.evict()
        return out

    def count(self, seen):
        T, w = len(seen), max(1, self.recent)
        for i in self.kept:
            old = self.score.get(i, 0.0)
            if self.policy == "h2o":
                self.score[i] = old + float(seen[:, i].sum())
            if self.policy == "snapkv":
                share = min(T, w) / w
                self.score[i] = old * (1 - share) + float(seen[-w:, i].sum()) / w

    def evict(self):
        always = [i for i in self.kept if i < self.sinks]
        newest = self.kept[len(self.kept) - self.recent :] if self.recent else []
        rest = [i for i in self.kept if i not in always and i not in newest]
        rest.sort(key=self.rank, reverse=True)
        stays = {*always, *newest}
        for i in rest:
            if len(stays) < self.budget:
                stays.add(i)
        self.kept = sorted(stays)

    def rank(self, i):
        if self.policy == "window":
            return i
        if self.policy == "norms":
            return -float(self.keys[i].norm())
        if self.policy == "h2o":
            return self.score[i]
        old = self.kept[: len(self.kept) - self.recent]
        at = old.index(i)
        return sum(self.score[old[j]] for j in range(at - 2, at + 3) if 0 <= j < len(old)) / 5


@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: f"{len(chunks)} appends")
@pytest.mark.parametrize("name", SPECS)
def test_outputs_are_those_of_full_attention_over_what_stays(name, chunks):
    """In fp64, with G = 3 query heads per KV head: outputs, and which true positions stay in which head."""
    options = SPECS[name]
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(B, HK * G, 24, D, generator=draw, dtype=torch.float64)
    k, v = (torch.randn(B, HK, 24, D, generator=draw, dtype=torch.float64) for _ in "kv")
    hands = [[ByHand(**options) for _ in range(HK)] for _ in range(B)]
    policy = make_policy(**({"recent": None, "page": 0} | options))
    cache = EvictingCache([EvictingLayer(policy)])
    start = 0
    for T in chunks:
        part = slice(start, start + T)
        attend = cache.attention(T) or causal_attention
        keys, values = cache[0].append(k[:, :, part], v[:, :, part])
        y = attend(q[:, :, part], keys, values)
        for b in range(B):
            for h in range(HK):
                heads = slice(h * G, (h + 1) * G)
                right = hands[b][h].append(q[b, heads, part], k[b, h, part], v[b, h, part])
                assert (y[b, heads] - right).abs().max() <= 1e-6, (start, b, h)
                assert cache[0].held.positions[b, h].tolist() == hands[b][h].kept
        start += T
        assert cache.length == start and cache[0].entries <= options["budget"]
    if name == "norms":  # heads choose for themselves
        assert hands[0][0].kept != hands[0][1].kept


def drawn(n, seed=3):
    """q of 40 queries, keys and values of n entries, in fp64."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(1, HK * G, 40, D, generator=draw, dtype=torch.float64)
    k, v = (torch.randn(1, HK, n, D, generator=draw, dtype=torch.float64) for _ in "kv")
    return q, k, v


def held_of(policy, k, v):
    held = Held(k, v, torch.arange(k.shape[2]).int().expand(k.shape[:3]))
    return held._replace(notes=policy.noted(held, k.shape[2]))


def test_matching_finds_that_an_entry_stands_for_two():
    """Every key and value twice; one of each stays: its bias is log 2, and any query gets what it got."""
    q, k, v = drawn(6)
    policy = make_policy("matching", 6, 0, 0, 0)
    held = held_of(policy, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))
    fitted = policy.fitted(held, torch.arange(6).expand(1, HK, 6), q)
    assert (policy.bias(fitted) - math.log(2)).abs().max() <= 1e-6
    assert (fitted.values - v).abs().max() <= 1e-6
    others, *_ = drawn(6, seed=9)
    right = causal_attention(others[:, :, :1], *held[:2])
    assert (policy.attend(fitted, others[:, :, :1], None) - right).abs().max() <= 1e-6


def test_matching_changes_old_values_by_least_squares():
    """Against torch.linalg.lstsq with the ridge as further rows; the newest entries are as they were."""
    q, k, v = drawn(20)
    policy = make_policy("matching", 12, 0, 4, 0)
    held = held_of(policy, k, v)
    index = torch.cat((torch.arange(8), torch.arange(16, 20))).expand(1, HK, 12)
    fitted = policy.fitted(held, index, q[:, :, -3:])
    assert torch.equal(fitted.values[:, :, 8:], v[:, :, 16:])
    assert not policy.bias(fitted)[:, :, 8:].any() and policy.bias(fitted)[:, :, :8].all()
    for h in range(HK):
        rows = q[0, h * G : (h + 1) * G, -3:].flatten(0, 1)  # (9,D)
        whole = (rows @ k[0, h].T / math.sqrt(D)).softmax(1)
        scores = rows @ k[0, h, index[0, h]].T / math.sqrt(D) + policy.bias(fitted)[0, h]
        part = scores.softmax(1)
        kept, new = v[0, h, index[0, h]], fitted.values[0, h]
        ridge = policy.ridge * part[:, :8].pow(2).sum(1).mean()
        left = torch.cat((part[:, :8], ridge.sqrt() * torch.eye(8)))
        missing = whole @ v[0, h] - part @ kept
        right = torch.linalg.lstsq(left, torch.cat((missing, missing.new_zeros(8, D)))).solution
        assert (new[:8] - kept[:8] - right).abs().max() <= 1e-5
        assert (part @ new - whole @ v[0, h]).norm() < 0.25 * missing.norm()
        mass = (whole[:, index[0, h]] * policy.bias(fitted)[0, h].exp()).sum(1)
        assert (mass - 1).norm() < 0.5 * (whole[:, index[0, h]].sum(1) - 1).norm()


@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: f"{len(chunks)} appends")
def test_quest_reads_the_pages_with_the_largest_bounds(chunks):
    """By hand: of each query, its own page and the two others whose keys could give the largest score."""
    q, k, v = drawn(24)
    q, page = q[:, :, :24], 4
    cache = EvictingCache([EvictingLayer(make_policy("quest", 14, 0, None, page))])
    start = 0
    for T in chunks:
        part = slice(start, start + T)
        attend = cache.attention(T)
        y = attend(q[:, :, part], *cache[0].append(k[:, :, part], v[:, :, part]))
        for t in range(T):
            p = start + t
            for h in range(HK):
                group = q[0, h * G : (h + 1) * G, p]  # (G,D)
                bounds = []
                for i in range(p // page):
                    keys = k[0, h, i * page : (i + 1) * page]
                    corners = torch.maximum(group * keys.amin(0), group * keys.amax(0))
                    bounds.append((float(corners.sum(1).max()), i))
                chosen = [i for _, i in sorted(bounds)[-2:]] + [p // page]
                read = [j for j in range(p + 1) if j // page in chosen]
                weights = (group @ k[0, h, read].T / math.sqrt(D)).softmax(1)
                right = weights @ v[0, h, read]
                assert (y[0, h * G : (h + 1) * G, t] - right).abs().max() <= 1e-6, (p, h)
        start += T
        assert cache[0].entries == start and cache.sizes.max_rollback is None


# --- against kvpress ------------------------------------------------------------------------------------------------

FACTS = json.loads((Path(__file__).parents[1] / "facts" / "kvpress.json").read_text())


@pytest.fixture(scope="module")
def recorded():
    """The model that kvpress was recorded with."""
    config = Config.from_dict(FACTS["config"])
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in Transformer(config).state_dict().items()}
    draw, state = torch.Generator().manual_seed(0), {}
    for name in sorted(n if n == "lm_head.weight" else f"model.{n}" for n in shapes):
        plain = name.removeprefix("model.")
        scale = 1 if "norm" in name else 0.3
        state[plain] = torch.randn(shapes[plain], generator=draw) * scale
    return build(config, state)


@pytest.mark.parametrize("options", FACTS["found"])
def test_the_entries_that_stay_are_those_of_kvpress(options, recorded):
    right = FACTS["found"][options]
    cache = make_cache(f"evicting:{options}", recorded.config)
    ids = torch.tensor([FACTS["ids"]])
    prefill(recorded, ids[:, :-1], cache)
    assert [layer.held.positions[0].tolist() for layer in cache] == right["kept"]
    logits = decode(recorded, ids[:, -1:], cache, cache.length)
    assert gap(logits[0], torch.tensor(right["logits"])) <= 1e-4


# --- the contract ---------------------------------------------------------------------------------------------------


def test_a_window_without_sinks_is_the_sliding_cache(model):
    """Step by step: the query sees `budget` entries and itself."""
    ids = random_ids(0, 1, 30)
    mine = make_cache("evicting:budget=9", model.config)
    theirs = make_cache("sliding:window=10", model.config)
    for t in range(30):
        new = ids[:, t : t + 1]
        assert gap(decode(model, new, mine, t), decode(model, new, theirs, t)) <= 1e-5


@pytest.mark.parametrize("name", SPECS | OWN)
def test_bytes_and_saved_files_of_every_policy(name, model, tmp_path):
    ids, options = random_ids(1, 2, 31), (SPECS | OWN)[name]
    cache = make_cache("evicting", model.config, 2, **options)
    for start, end in ((0, 5), (5, 20)):
        prefill(model, ids[:, start:end], cache, start)
        expected = costs.cache_bytes("evicting", model.config, end, 2, 4, **options)
        assert cache.nbytes == cache.sizes.used_nbytes == expected
        stays = end if name == "quest" else min(end, options["budget"])
        assert cache.sizes.held == stays and cache.length == end
    cache.save(tmp_path / "cache")
    loaded, forked = KVCache.load(tmp_path / "cache", model.config), cache.fork()
    cache.reorder([1, 0])
    for t in range(20, 30):
        new = ids[:, t : t + 1]
        right = decode(model, new.flip(0), cache, t).flip(0)
        assert gap(decode(model, new, loaded, t), right) <= 1e-6
        assert gap(decode(model, new, forked, t), right) <= 1e-6


def test_what_was_evicted_cannot_come_back(model):
    cache = make_cache("evicting:budget=8", model.config)
    ids = random_ids(2, 1, 12)
    prefill(model, ids[:, :6], cache)
    assert cache.sizes.max_rollback == 2
    cache.truncate(3)
    prefill(model, ids[:, 3:], cache, 3)
    with pytest.raises(UnsupportedError, match="cannot go back to 11: 4 of its 12 tokens"):
        cache.truncate(11)
    cache.truncate(12)
    cache.truncate(0)
    assert cache.length == cache.nbytes == 0


def test_scores_of_queries_cannot_be_taken_back(model):
    cache = make_cache("evicting:policy=h2o:budget=64", model.config)
    prefill(model, random_ids(2, 1, 6), cache)
    assert cache.sizes.max_rollback == 0
    with pytest.raises(UnsupportedError, match="its scores count the attention of all 6 tokens"):
        cache.truncate(5)


def test_quest_can_go_back(model):
    """Nothing is gone; pages that are no longer full have no bounds."""
    ids = random_ids(4, 1, 40)
    cache, whole = (make_cache("evicting:policy=quest:budget=8:page=4", model.config) for _ in "ab")
    prefill(model, ids[:, :30], cache)
    cache.truncate(18)
    prefill(model, ids[:, 18:39], cache, 18)
    prefill(model, ids[:, :39], whole)
    right = decode(model, ids[:, 39:], whole, 39)
    assert gap(decode(model, ids[:, 39:], cache, 39), right) <= 1e-5
    exact = make_cache("dict", model.config)
    prefill(model, ids[:, :39], exact)
    assert gap(decode(model, ids[:, 39:], exact, 39), right) > 0.01


def test_a_policy_that_was_shown_no_queries_says_so(model):
    cache = make_cache("evicting:policy=snapkv:budget=8", model.config)
    ids = random_ids(2, 1, 6)
    with torch.inference_mode():
        model(ids, cache, 0, causal_attention)
        with pytest.raises(CacheError, match="snapkv was not shown the queries of the last append"):
            model(ids, cache, 6, causal_attention)
        cache.truncate(0)
        attend = cache.attention(6)
        with pytest.raises(CacheError, match="not those that an append of this cache returned"):
            model(ids, cache, 0, lambda q, k, v: attend(q, k.clone(), v))


def test_rows_are_refused_where_padding_would_be_an_entry(model):
    with pytest.raises(UnsupportedError, match="cannot hold padding"):
        PaddedCache(make_cache("evicting:budget=8:sinks=1", model.config, 2), [0, 3])
    row = make_cache("evicting:policy=h2o:budget=8", model.config)
    with pytest.raises(UnsupportedError, match=r"policy=h2o.* computes attention itself"):
        BatchCache([row], model.config)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("policy=lru", "policy is 'lru': window, h2o, "),
        ("policy=window:recent=4", "recent means nothing to policy=window"),
        ("budget=4:sinks=4", "budget=4 leaves no entry to choose: 4 always stay"),
        ("policy=h2o:budget=8:recent=6:sinks=2", "budget=8 leaves no entry to choose"),
        ("window=4", "has no option window"),
        ("policy=quest:sinks=4", "sinks means nothing to policy=quest"),
        ("policy=quest:budget=20", "budget=20 is less than two pages of 16"),
    ],
)
def test_options_are_checked(spec, message, model):
    with pytest.raises(CacheError, match=message):
        make_cache(f"evicting:{spec}", model.config)


def test_a_default_budget_is_checked_too(model):
    with pytest.raises(CacheError, match="budget=8 leaves no entry to choose: 9 always stay"):
        make_cache("evicting:sinks=9", model.config, capacity=8)


def test_a_prompt_that_is_read_at_once_is_attended_to_in_full(model):
    """So its logits are exact, and in parts of 4 they are not."""
    ids = random_ids(3, 1, 20)
    exact = verify_draft(model, ids, make_cache("dict", model.config), 0)
    for chunk, same in ((20, True), (4, False)):
        cache = make_cache("evicting:policy=h2o:budget=6", model.config)
        parts = [verify_draft(model, part, cache, cache.length) for part in ids.split(chunk, dim=1)]
        assert (gap(torch.cat(parts, 1), exact) <= 1e-5) == same
