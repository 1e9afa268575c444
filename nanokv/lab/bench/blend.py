"""What it costs to reuse parts that are no prefix: errors by layer, and told facts.

A talk tells six facts. It is cut into parts between the facts ("whole"), or inside each, before its
value ("cut"): then a part begins with " Oslo." and only the part before says of what. A perplexity
of the second half would not need the first; these answers do.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nanokv.cache import KVCache
from nanokv.errors import NanoKVError
from nanokv.inference import verify_draft
from nanokv.lab.bench.facts import (
    ACKNOWLEDGED,
    OTHER,
    SYSTEM,
    Question,
    drawn,
    exchange,
    question,
)
from nanokv.lab.study.blend import CHECKED, CHOICES, Joined, alone, check_blocks, join
from nanokv.lab.study.quality import relative_error
from nanokv.model import Transformer
from nanokv.text.tokenizer import Tokenizer

CUTS = ("whole", "cut")
FULL, TURNED, FAULT = "full prefill", "rotated", "not rotated"


@dataclass(frozen=True)
class Told:
    """A talk as ids, in parts that are cut in both ways."""

    parts: dict[str, list[list[int]]]
    questions: list[Question]


def told(tokenizer: Tokenizer, seed: int) -> Told:
    """A talk of six facts in an order and with values that the seed draws."""
    facts = drawn(random.Random(seed))
    messages = [SYSTEM]
    for fact in facts:
        messages += exchange(fact.told, ACKNOWLEDGED)
    context, questions = "", []
    for fact in facts:
        text = tokenizer.render([*messages, {"role": "user", "content": fact.asked}])
        context = text[: text.rindex(fact.asked)].removesuffix(" ")  # a space is part of a word
        questions.append(question(tokenizer, text[len(context) :] + fact.opening, fact))
    places = [context.index(fact.told) for fact in facts]
    values_at = [at + len(fact.begin) for at, fact in zip(places, facts, strict=True)]
    begins = [at - (context[at - 1] == " ") for at in places]
    return Told(pieces(tokenizer, context, begins, values_at), questions)


def pieces(
    tokenizer: Tokenizer, text: str, begins: list[int], values: list[int]
) -> dict[str, list[list[int]]]:
    """The text cut at `begins`, and cut at `values`; equal ids in the same order."""
    found: dict[str, list[list[int]]] = {cut: [[]] for cut in CUTS}
    places = sorted([0, *begins, *values])
    for start, end in zip(places, [*places[1:], len(text)], strict=True):
        ids = tokenizer.encode(text[start:end])
        for cut, bounds in zip(CUTS, (begins, values), strict=True):
            if start in bounds:
                found[cut].append([])
            found[cut][-1] += ids
    return found


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A way to get the cache of a talk that was cut in one way, over all talks.

    computed: token-layers behind the first part that were computed, of all. keys, values: relative
    root mean square error by layer, behind the first part. known: answers whose value is the
    likeliest of six, of `asked`. nats: mean log p of the first token of the right value.
    """

    cut: str
    way: str
    computed: float
    keys: list[float]
    values: list[float]
    known: int
    asked: int
    nats: float


def rows(model: Transformer, tokenizer: Tokenizer, share: float, talks: int) -> Iterator[Row]:
    """Every cut and way. NanoKVError for a model of one layer, or with layers of its own."""
    check_blocks(model.config)
    layers = len(model.layers)
    if layers <= CHECKED:
        raise NanoKVError(
            f"a model with {layers} layer: keys and values depend on other tokens from the second "
            "layer on",
            OTHER,
        )
    texts = [told(tokenizer, seed) for seed in range(talks)]
    for cut in CUTS:
        for way in (FULL, FAULT, TURNED, *CHOICES):
            yield row(model, texts, cut, way, share)


def row(model: Transformer, texts: Sequence[Told], cut: str, way: str, share: float) -> Row:
    """One way over all talks."""
    keys, values, answers = [], [], []
    for text in texts:
        parts = text.parts[cut]
        ids = [token for part in parts for token in part]
        full = alone(model, ids)
        cache = full if way == FULL else blended(model, parts, way, share).cache
        behind = len(parts[0])
        keys.append(errors(cache, full, "key", behind))
        values.append(errors(cache, full, "value", behind))
        answers += [answer(model, cache, len(ids), one) for one in text.questions]
    known, nats = zip(*answers, strict=True)
    return Row(
        cut,
        way,
        computed(way, share, len(model.layers)),
        mean_of(keys),
        mean_of(values),
        sum(known),
        len(known),
        sum(nats) / len(nats),
    )


def blended(model: Transformer, parts: list[list[int]], way: str, share: float) -> Joined:
    """The parts in one cache."""
    joined = join(model, parts, rotate=way != FAULT)
    if way in CHOICES:
        CHOICES[way](model, joined, share)
    return joined


def computed(way: str, share: float, layers: int) -> float:
    """The part of all token-layers behind the first part that is computed."""
    if way == FULL:
        return 1.0
    if way not in CHOICES:
        return 0.0
    if CHOICES[way] is CHOICES["most changed"]:
        return (CHECKED + share * (layers - CHECKED)) / layers
    return share


def errors(cache: KVCache, full: KVCache, name: str, behind: int) -> list[float]:
    """The relative error of each layer's keys or values behind the first part."""
    pairs: Iterable = zip(cache, full, strict=True)
    return [
        relative_error(one[name][:, :, behind:], all_[name][:, :, behind:]) for one, all_ in pairs
    ]


def mean_of(lists: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*lists, strict=True)]


def answer(model: Transformer, cache: KVCache, length: int, asked: Question) -> tuple[bool, float]:
    """`Question.answered` over a fork of the cache."""
    logits = verify_draft(model, torch.tensor([asked.ids]), cache.fork(), length)  # (1,t,V)
    return asked.answered(logits[0, -1])
