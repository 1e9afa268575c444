"""Told facts and two questions about them: what a mean over all tokens can hide.

A prompt is read in one append, but for its last token: it ends with a first question, so a cache
that evicts by the newest queries knows what is asked. The second question is the one that it did
not know. facts.py says what is counted.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from nanokv.cache import KVCache
from nanokv.checkpoint import Model
from nanokv.errors import NanoKVError
from nanokv.inference import decode, prefill
from nanokv.lab.bench.facts import (
    ACKNOWLEDGED,
    OTHER,
    SYSTEM,
    Question,
    drawn,
    exchange,
    question,
)
from nanokv.text.tokenizer import Tokenizer

SMALL_TALK = (
    "It rained a little before noon.",
    "A train stopped and nobody got out.",
    "The shop on the corner sells bread.",
    "Somebody left a window open.",
    "The streets are quiet in the morning.",
    "The bus was late again.",
)
HEARD = "I see."


@dataclass(frozen=True)
class Talk:
    """A prompt that ends with a question, and a second question that begins with the answer."""

    first: Question
    second: Question


def talk(tokenizer: Tokenizer, seed: int) -> Talk:
    """Two facts, other words after each, and a question about either, drawn by the seed."""
    draw = random.Random(seed)
    facts = drawn(draw, 2)
    others = draw.sample(SMALL_TALK, 2)
    told = [exchange(fact.told, ACKNOWLEDGED) for fact in facts]
    heard = [exchange(other, HEARD) for other in others]
    messages = [SYSTEM, *chain(*(a + b for a, b in zip(told, heard, strict=True)))]
    draw.shuffle(facts)
    one, two = facts
    first = asked(tokenizer, messages, one.asked) + one.opening
    messages += exchange(one.asked, one.answer)
    second = asked(tokenizer, messages, two.asked) + two.opening
    if not second.startswith(first):
        raise NanoKVError("the chat template changes earlier turns, so no cache can go on", OTHER)
    return Talk(
        question(tokenizer, first, one), question(tokenizer, second.removeprefix(first), two)
    )


def asked(tokenizer: Tokenizer, messages: Sequence[dict], said: str) -> str:
    """The prompt with one more message of the user."""
    return tokenizer.render([*messages, {"role": "user", "content": said}])


def recalled(
    model: Model, talks: Sequence[Talk], new: Callable[[], KVCache]
) -> tuple[int, int, list[KVCache]]:
    """(facts known at the first question, at the second, the caches), a new cache per talk."""
    first = second = 0
    caches = []
    for one in talks:
        cache = new()
        first += knows_at_once(model, one.first, cache)
        second += knows(model, one.second, cache)
        caches.append(cache)
    return first, second, caches


def knows_at_once(model: Model, asked: Question, cache: KVCache) -> bool:
    """Reads all but the last token in one append: what follows it reads what the cache kept."""
    ids = torch.tensor([asked.ids], device=model.embed_tokens.weight.device)  # (1,t)
    prefill(model, ids[:, :-1], cache)
    logits = decode(model, ids[:, -1:], cache, cache.length)[0]  # (V,)
    return asked.answered(logits)[0]


def knows(model: Model, asked: Question, cache: KVCache) -> bool:
    """Appends the question to what the cache holds."""
    ids = torch.tensor([asked.ids], device=model.embed_tokens.weight.device)  # (1,t)
    return asked.answered(prefill(model, ids, cache, cache.length)[0])[0]
