"""Greedy answers of a model during its training, to watch it learn. evaluate.py measures it."""

from typing import TYPE_CHECKING

import torch

from nanokv.cache import make_cache
from nanokv.inference import decode, prefill
from nanokv.school.training.data import render

if TYPE_CHECKING:
    from nanokv.school.training.trainer import Trainer

QUESTIONS = (
    "What is a KV cache?",
    "Repeat: moon, blorf, chair",
    "What is 27 + 48?",
    "Reverse: apple, drum, zink",
    "Count from 4 to 9.",
)


def reply(trainer: "Trainer", question: str, limit: int = 40) -> str:
    """The greedy answer to a first message, of at most `limit` tokens, with the present weights."""
    tokenizer = trainer.tokenizer
    model = trainer.model
    end = tokenizer.token_to_id("<|im_end|>")
    asked = render([{"role": "user", "content": question}])
    ids = tokenizer.encode(f"{asked}<|im_start|>assistant\n").ids
    cache = make_cache("dict", model.config)
    answer: list[int] = []
    logits = prefill(model, torch.tensor([ids]), cache)
    while len(answer) < limit:
        token = int(logits.argmax())
        if token == end:
            break
        answer.append(token)
        logits = decode(model, torch.tensor([[token]]), cache, start_pos=cache.length)
    return tokenizer.decode(answer)
