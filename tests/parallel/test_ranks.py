"""Who leads and who follows, as two threads that hold the whole model: what is said, not how it travels.

Ranks that are processes, each with its part of a model, are in test_parallel.py.
"""

import json
import queue
import signal

import pytest
import torch

import parallel_work
from engines import all_free, alone
from nanokv.cache import make_cache
from nanokv.decoding.draw import SamplingParams
from nanokv.decoding.generation import Generation
from nanokv.errors import CacheError, GenerationError
from nanokv.inference import prefill
from nanokv.parallel.group import LAUNCHED, Alone
from nanokv.ranks.engine import LeadingEngine
from nanokv.ranks.generation import Following, Leading
from nanokv.ranks.roles import Follower, leave_interrupts
from oracle import SHAPES, pair, random_ids
from thread_ranks import on_ranks

PROMPTS = [ids.tolist() for ids in (*random_ids(1, 3, 9), random_ids(2, 1, 4)[0])]
SIZES = {"pages": 6, "page_size": 4, "step_tokens": 8}


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-tied"])[1]


class Spoken:
    """A Group of two: words go through a queue, as JSON."""

    size = 2

    def __init__(self, group, words):
        self.rank, self.group, self.words = group.rank, group, words

    def hear(self, value=None):
        if self.rank:
            return json.loads(self.words.get(timeout=20))
        self.words.put(json.dumps(value))
        return value

    def reports(self, text):
        self.group.board[self.rank] = text
        self.group.wait()
        found = list(self.group.board)
        self.group.wait()
        return found


def on_two(lead, follow) -> list:
    """[lead(rank 0), follow(rank 1)]"""
    words = queue.Queue()
    return on_ranks(2, lambda group: (follow if group.rank else lead)(Spoken(group, words)))


def test_an_engine_that_follows_computes_what_the_leading_one_computes(model):
    """Drawn tokens, a request that is cancelled, and too few pages for all."""

    def lead(ranks):
        engine = LeadingEngine(ranks, model, **SIZES)
        requests = [
            engine.submit(ids, max_new_tokens=8, eos_token_ids=[], temperature=1.0, seed=seed)
            for seed, ids in enumerate(PROMPTS)
        ]
        while len(requests[1].tokens) < 3:
            engine.step()
        engine.cancel(requests[1])
        engine.run()
        engine.step()  # what has happened in the last one is told with the next
        ranks.hear(["end", 3])
        return engine, requests

    def follow(ranks):
        cache = make_cache("dict", model.config)
        follower = Follower(ranks, model, Following(ranks, model, cache, Generation))
        return follower.run(), follower.engine

    (leading, requests), (code, following) = on_two(lead, follow)
    whole = [
        alone(model, ids, max_new_tokens=8, eos_token_ids=[], temperature=1.0, seed=seed)
        for seed, ids in enumerate(PROMPTS)
    ]
    whole[1] = whole[1][: len(requests[1].tokens)]
    assert [request.tokens for request in requests] == whole and code == 3
    assert following.metrics == leading.metrics and leading.metrics.preemptions
    assert not following.requests and all_free(leading) and all_free(following)


def test_the_other_ranks_feed_as_many_prompt_tokens_as_rank_0_has_measured(model):
    """By a clock of rank 0 that ticks at every reading: prompts seem to take no time."""
    sizes = SIZES | {"pages": 40, "step_tokens": 64}
    long = random_ids(4, 1, 100)[0].tolist()

    def lead(ranks):
        times = iter(range(1_000))
        engine = LeadingEngine(ranks, model, **sizes, paced=True)
        engine.clock = lambda: next(times)
        fed = []
        for ids in PROMPTS:
            engine.submit(ids, max_new_tokens=30, eos_token_ids=[])
        while not engine.idle:
            if engine.metrics.steps == 3:
                engine.submit(long, max_new_tokens=2, eos_token_ids=[])
            before = engine.metrics.prefill_tokens
            engine.step()
            fed.append(engine.metrics.prefill_tokens - before)
        engine.step()  # what has happened in the last one is told with the next
        ranks.hear(["end", 0])
        return engine, fed

    def follow(ranks):
        cache = make_cache("dict", model.config)
        follower = Follower(ranks, model, Following(ranks, model, cache, Generation))
        follower.run()
        return follower.engine

    (leading, fed), following = on_two(lead, follow)
    assert fed[3] == 2 * SIZES["page_size"] and max(fed[4:]) > fed[3]
    assert following.metrics == leading.metrics and following.budget is None


def test_a_conversation_is_followed_saved_and_loaded_by_all(model, monkeypatch, tmp_path):
    monkeypatch.setattr(parallel_work, "model_of", lambda group, folder: model)
    path = str(tmp_path / "talk.kv")
    first, other = on_two(*[lambda group: parallel_work.kept(group, "", PROMPTS, path)] * 2)
    assert first[2] == first[4] != first[3] and first[5].startswith("rank 1 of 2: ")
    assert [said[0] for said in first[:5]] == other[:5]


def test_a_cache_that_only_rank_0_has_is_refused(model):
    cache = make_cache("dict", model.config)
    prefill(model, [PROMPTS[0]], cache)
    leading = Leading(Alone(), Generation)
    with pytest.raises(CacheError, match="this cache of 9 tokens is on rank 0 only"):
        leading(model, torch.tensor([PROMPTS[1]]), cache, SamplingParams(), 8)
    with pytest.raises(CacheError, match="this cache of 9 tokens is on rank 0 only"):
        leading.save(cache, "nowhere", PROMPTS[0], "")


def test_what_needs_one_process_is_refused_on_several(model):
    said = []

    class Two(Alone):
        size = 2
        hear = staticmethod(said.append)

    engine = LeadingEngine(Two(), model, **SIZES)
    with pytest.raises(GenerationError, match="need one process, but this model is on 2 ranks"):
        engine.aside(lambda model: pytest.fail("computed on rank 0 alone"))
    assert said == [["engine", [6, 4, 8, 32, "hash"]]]


def test_a_rank_of_torchrun_leaves_ctrl_c_to_rank_0(monkeypatch):
    monkeypatch.delenv(LAUNCHED, raising=False)
    before = signal.getsignal(signal.SIGINT)
    try:
        leave_interrupts()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
