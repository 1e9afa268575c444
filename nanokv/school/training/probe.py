"""One greedy answer from a model in training: enough to see it learn. The real measurement is evaluate.py."""

import torch

from nanokv.cache import make_cache
from nanokv.inference import decode, prefill
from nanokv.school.training.data import render

QUESTIONS = (
    "What is a KV cache?",
    "Repeat: moon, blorf, chair",
    "What is 27 + 48?",
    "Reverse: apple, drum, zink",
    "Count from 4 to 9.",
)


def reply(trainer, question: str, limit: int = 40) -> str:
    """The answer to a first message, greedy, on the weights as they are."""
    tokenizer, model = trainer.tokenizer, trainer.model
    asked = render([{"role": "user", "content": question}])
    ids = tokenizer.encode(f"{asked}<|im_start|>assistant\n").ids
    cache, answer = make_cache("dict", model.config), []
    logits = prefill(model, torch.tensor([ids]), cache)
    while (token := int(logits.argmax())) != tokenizer.token_to_id("<|im_end|>") and len(
        answer
    ) < limit:
        answer.append(token)
        logits = decode(model, torch.tensor([[token]]), cache, start_pos=cache.length)
    return tokenizer.decode(answer)
