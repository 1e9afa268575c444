"""Facts at the start of a text, each asked for at its end: what a mean over all tokens can hide."""

import itertools
import random

import torch

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
    device = model.embed_tokens.weight.device
    asked = facts(count)
    text = "\n".join(begin + end for begin, end in asked) + "\n"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=True)], device=device)  # (1,T)
    for start in range(0, ids.shape[1], chunk):
        verify_draft(model, ids[:, start : start + chunk], cache, start)
    right = 0
    for begin, end in asked:
        question, answer = tokenizer.encode(begin), tokenizer.encode(end)
        both = torch.tensor([question + answer[:-1]], device=device)  # (1,t)
        logits = verify_draft(model, both, cache.fork(), ids.shape[1])  # (1,t,V)
        right += logits[0, len(question) - 1 :].argmax(-1).tolist() == answer
    return right
