"""Facts at the start of a text, each asked for at its end: what a mean over all tokens can hide.

`recalled` asks after the facts were read in small parts. `asked_with_the_facts` reads them with a
first question in one append, as a prompt is: a cache that evicts by the newest queries then knows
what will be asked. The second question is the one that it did not know.
"""

import itertools
import random
from collections.abc import Callable

import torch
from torch import Tensor

from nanokv.cache import KVCache
from nanokv.checkpoint import Model
from nanokv.errors import NanoKVError
from nanokv.inference import verify_draft
from nanokv.text.tokenizer import Tokenizer

COLOURS = ("red", "blue", "green", "white", "black", "yellow", "grey", "brown")
THINGS = ("house", "boat", "tree", "door", "book", "horse", "bridge", "stone", "lamp", "chair")
MOST = len(COLOURS) * len(THINGS)


def check_count(count: int) -> None:
    """NanoKVError for more facts than there are names."""
    if count > MOST:
        raise NanoKVError(f"--recall {count}: there are {MOST} names", f"--recall {MOST}")


def facts(count: int) -> list[tuple[str, str]]:
    """`count` pairs (a beginning such as "The number of the red house is", its end " 4731.")."""
    draw = random.Random(0)
    names = list(itertools.product(COLOURS, THINGS))
    draw.shuffle(names)
    return [
        (f"The number of the {colour} {thing} is", f" {draw.randint(1000, 9999)}.")
        for colour, thing in names[:count]
    ]


def recalled(model: Model, tokenizer: Tokenizer, cache: KVCache, count: int, chunk: int = 8) -> int:
    """How many of `count` facts the model completes, all tokens right, after it has read all of
    them through an empty cache, `chunk` tokens at a time. Each question is asked on a fork.
    """
    asked = facts(count)
    ids = text_ids(model, tokenizer, asked)
    for start in range(0, ids.shape[1], chunk):
        verify_draft(model, ids[:, start : start + chunk], cache, start)
    right = 0
    for begin, end in asked:
        question, answer = tokenizer.encode(begin), tokenizer.encode(end)
        right += completes(model, cache.fork(), question, answer)
    return right


def text_ids(model: Model, tokenizer: Tokenizer, asked: list[tuple[str, str]]) -> Tensor:
    """(1,T): all facts, a line each."""
    text = "\n".join(begin + end for begin, end in asked) + "\n"
    ids = tokenizer.encode(text, add_special_tokens=True)
    return torch.tensor([ids], device=model.embed_tokens.weight.device)


def completes(model: Model, cache: KVCache, question: list[int], answer: list[int]) -> bool:
    """Does the model give all tokens of the answer after the question? Appends both, but for the
    last token."""
    device = model.embed_tokens.weight.device
    both = torch.tensor([question + answer[:-1]], device=device)  # (1,t)
    logits = verify_draft(model, both, cache, cache.length)  # (1,t,V)
    return logits[0, len(question) - 1 :].argmax(-1).tolist() == answer


def asked_with_the_facts(
    model: Model, tokenizer: Tokenizer, new: Callable[[], KVCache], count: int
) -> tuple[int, int]:
    """How many of `count` facts the model completes (as first question, as second question).

    For each fact, an empty cache reads all facts and the question, but for its last token, in one
    append. The second question is for the fact half a list away, with the same cache.
    """
    asked = facts(count)
    ids = text_ids(model, tokenizer, asked)
    coded = [(tokenizer.encode(begin), tokenizer.encode(end)) for begin, end in asked]
    newline = tokenizer.encode("\n")
    first = second = 0
    for i, (question, answer) in enumerate(coded):
        cache = new()
        start = torch.tensor([question[:-1]], device=ids.device)  # (1,t)
        verify_draft(model, torch.cat((ids, start), 1), cache, 0)
        first += completes(model, cache, question[-1:], answer)
        later, its_answer = coded[(i + count // 2) % count]
        second += completes(model, cache, answer[-1:] + newline + later, its_answer)
    return first, second
