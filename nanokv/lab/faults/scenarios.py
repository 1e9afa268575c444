"""Situations in which cache bugs show. Each is a few calls of public functions and returns the
results to compare.

A scenario is a function (model, prompts, forced=None) → Outcome. `prompts` are at least three
lists of ids; the logits of the first one are compared. Answers are greedy. With `forced`, the
given tokens are fed instead, so that the logits of two runs can be compared position by position
even after their answers differ.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanokv.cache import KVCache, make_cache
from nanokv.decoding.batching import generate_padded
from nanokv.decoding.beam import beam_search
from nanokv.inference import decode, prefill, prefill_chunks
from nanokv.lab.faults.sinks import SinkCache
from nanokv.lab.faults.twins import itself, sharing_keys, with_states
from nanokv.model import Transformer

LONGEST = 40  # tokens of an answer
PAGE = 4  # tokens of a page that requests share
SIZE = 0.3  # of an adapter's update, relative to the weights


@dataclass(frozen=True)
class Outcome:
    """The results of a scenario: `logits` (N,V) of the compared positions, one answer (one per
    row in a batch), bytes of the cache, and the tokens that the model computed, in all requests."""

    logits: torch.Tensor
    answers: list[list[int]]
    bytes: int
    computed: int = 0  # set by SCENARIOS


Scenario = Callable[..., Outcome]


# --- one cache ---------------------------------------------------------------------------------


def solo(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """One prompt, one cache: prefill, then decode."""
    cache = make_cache("dict", model.config)
    logits = prefill(model, [prompts[0]], cache, start_pos=0)  # (1,V)
    return go_on(model, cache, logits, forced)


def long(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """As solo, with the longest of the prompts, to reach positions of 32 and more."""
    return solo(model, [max(prompts, key=len)], forced)


def chunked(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """The prompt in chunks of 8 tokens, like a long prompt or the next turn of a chat."""
    cache = make_cache("dict", model.config)
    logits = prefill_chunks(model, [prompts[0]], cache, start_pos=0, chunk=8)
    return go_on(model, cache, logits, forced)


def two_requests(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """Another request is answered first; this one has a new cache."""
    solo(model, prompts[1:])
    return solo(model, prompts, forced)


def interleaved(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """Two requests at the same time: the prompt of the second is read between the prompt and the
    answer of the first."""
    cache = make_cache("dict", model.config)
    other = make_cache("dict", model.config)
    logits = prefill(model, [prompts[0]], cache, start_pos=0)
    prefill(model, [prompts[1]], other, start_pos=0)
    return go_on(model, cache, logits, forced)


def undo(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """Six guessed tokens are fed after the prompt and removed with truncate."""
    prompt = prompts[0]
    cache = make_cache("dict", model.config)
    logits = prefill(model, [prompt], cache, start_pos=0)
    prefill(model, [prompts[1][:6]], cache, start_pos=len(prompt))
    cache.truncate(len(prompt))
    return go_on(model, cache, logits, forced)


def overflow(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """A static cache with room for the prompt and 4 tokens. Correct code raises CapacityError."""
    cache = make_cache("static", model.config, capacity=len(prompts[0]) + 4)
    logits = prefill(model, [prompts[0]], cache, start_pos=0)
    return go_on(model, cache, logits, forced)


def evicted(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """A cache that keeps three quarters as many tokens as the prompt has, at true positions."""
    prompt = prompts[0]
    cache = make_cache("evicting", model.config, budget=len(prompt) * 3 // 4)
    logits = prefill(model, [prompt], cache, start_pos=0)
    return go_on(model, cache, logits, forced)


def split(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """Attention over four parts of the keys and a learned sink, then a merge."""
    cache = SinkCache(make_cache("dict", model.config), model.config)
    logits = prefill(model, [prompts[0]], cache, start_pos=0)
    return go_on(model, cache, logits, forced)


# --- parts that the bundled model lacks ---------------------------------------------------------


def rejected(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """As undo, in a model whose other layers have a recurrent state: a rejected draft."""
    return undo(model, prompts, forced)


def resumed(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """As chunked, in a model whose other layers have a recurrent state."""
    return chunked(model, prompts, forced)


def shared_keys(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """As solo, in a model whose other layers read the keys of the layer before them."""
    return solo(model, prompts, forced)


TWINS = {"rejected": with_states, "resumed": with_states, "shared_keys": sharing_keys}


def model_of(scenario: str, model: Transformer) -> Transformer:
    """The model that a scenario runs: this one, or its twin with the parts that the scenario needs."""
    return TWINS.get(scenario, itself)(model)


# --- several rows ------------------------------------------------------------------------------


def batch(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """Prompts of different lengths in one padded batch; `logits` (B,V) follow the prompts."""
    cache = make_cache("dict", model.config, len(prompts))
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits))
    try:
        answers = generate_padded(model, prompts, cache, max_new_tokens=LONGEST)
    finally:
        hook.remove()
    return Outcome(seen[0], answers, cache.nbytes)


def beams(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """The best of four beams. `logits` (2,V) are of one more token after two rows are swapped."""
    first = prompts[0][:9]
    second = prompts[1][:9]
    cache = make_cache("dict", model.config, 2)
    prefill(model, [first[:8], second[:8]], cache, start_pos=0)
    cache.reorder([1, 0])
    logits = decode(model, [second[8:], first[8:]], cache, start_pos=8)
    best = beam_search(model, prompts[0], beams=4, max_new_tokens=LONGEST)[0]
    return Outcome(logits, [list(best.ids)], cache.nbytes)


# --- several requests, and pages that outlive them ---------------------------------------------


def again(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """The same prompt again: its pages are stored, with those of the first answer behind them."""
    first: Any = make_cache("prefix", model.config, page=PAGE)
    second = make_cache("prefix", model.config, pool=first.pool)
    request(model, first, prompts[0])
    return request(model, second, prompts[0], forced)


def adapters(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """The same prompt again, after a request to an adapter of the model. The salt is its name."""
    theirs: Any = make_cache("prefix", model.config, page=PAGE, salt="adapter")
    mine = make_cache("prefix", model.config, pool=theirs.pool)
    request(adapted(model), theirs, prompts[0])
    return request(model, mine, prompts[0], forced)


def twins(
    model: Transformer, prompts: list[list[int]], forced: list[list[int]] | None = None
) -> Outcome:
    """One prompt in two requests at the same time, so both compute it. A third request then takes
    free pages, before the second answers."""
    prompt = prompts[0]
    first: Any = make_cache("prefix", model.config, page=PAGE)
    second: Any = make_cache("prefix", model.config, pool=first.pool)
    third = make_cache("prefix", model.config, pool=first.pool)
    for cache in (first, second):
        logits = prefill(model, [prompt], cache, start_pos=0)
    for cache in (first, second):
        cache.remember(prompt)
    prefill(model, [prompts[1]], third, start_pos=0)
    return go_on(model, second, logits, forced)


def counted(scenario: Scenario) -> Scenario:
    """The scenario with its own model, and with `computed` in its Outcome."""

    @functools.wraps(scenario)
    def run(model, prompts, forced=None):
        model = model_of(scenario.__name__, model)
        tokens: list[int] = []
        hook = model.register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
        try:
            outcome = scenario(model, prompts, forced)
        finally:
            hook.remove()
        return replace(outcome, computed=sum(tokens))

    return run


SCENARIOS = {
    scenario.__name__: counted(scenario)
    for scenario in (
        solo,
        long,
        chunked,
        two_requests,
        interleaved,
        undo,
        overflow,
        evicted,
        split,
        rejected,
        resumed,
        shared_keys,
        batch,
        beams,
        again,
        adapters,
        twins,
    )
}


# --- parts of the scenarios --------------------------------------------------------------------


def request(
    model: Transformer, cache: Any, prompt: list[int], forced: list[list[int]] | None = None
) -> Outcome:
    """One request to a prefix cache: reuse, prefill the rest, decode, remember."""
    known = cache.reuse(prompt)
    logits = prefill(model, [prompt[known:]], cache, start_pos=known)  # (1,V)
    outcome = go_on(model, cache, logits, forced)
    cache.remember(prompt + outcome.answers[0][:-1])
    return outcome


@torch.no_grad()
def adapted(model: Transformer) -> Transformer:
    """A copy of the model with an adapter: a random update of rank 1 for the keys and values of
    every layer (LoRA, Hu et al. 2021, arXiv 2106.09685)."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for layer in other.layers:
        attention: Any = layer.self_attn
        for weight in (attention.k_proj.weight, attention.v_proj.weight):  # (Hk·D,C)
            rows, columns = weight.shape
            up = torch.randn(rows, 1, generator=generator)
            down = torch.randn(1, columns, generator=generator)
            update = (up @ down).to(weight)  # (Hk·D,C)
            weight += SIZE * weight.norm() / update.norm() * update
    return other


def go_on(
    model: Transformer, cache: KVCache, logits: Tensor, forced: list[list[int]] | None = None
) -> Outcome:
    """Continue from logits (1,V) of the prompt: greedily until an end token or LONGEST tokens, or
    with the tokens of the forced answer."""
    rows = [logits]
    if forced is not None:
        answer = forced[0]
        for token in answer[:-1]:  # the last token is never fed
            rows.append(decode(model, [[token]], cache, start_pos=cache.length))
        return Outcome(torch.cat(rows), [answer], cache.nbytes)
    answer = [int(logits.argmax())]
    while len(answer) < LONGEST and answer[-1] not in model.generation_config.eos_token_ids:
        rows.append(decode(model, [answer[-1:]], cache, start_pos=cache.length))
        answer.append(int(rows[-1].argmax()))
    return Outcome(torch.cat(rows), [answer], cache.nbytes)
