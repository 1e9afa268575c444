"""A conversation held by the package, in every way in which the page of `nanokv live` holds it."""

from contextlib import nullcontext

import torch

import nanokv
from nanokv.lab import faults

MOST = 24  # tokens of an answer
FAULTS = {  # way of the page → fault of the package
    "oneTooFar": "start_pos_off_by_one",
    "restarts": "start_pos_restarts",
    "notCleared": "not_cleared",
}
BEFORE = ["My name is Ada. I have a dog called Rex."]


def prompt(tokenizer, *texts: str) -> list[int]:
    """User and assistant in turn, up to where the next answer begins."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return tokenizer.encode(tokenizer.render(messages))


def multiplied(q, k, v):
    """Attention whose mask multiplies the scores, as a reader of one of the articles would write it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    T, S = q.shape[2], k.shape[2]
    visible = torch.ones(T, S).tril(S - T)
    return (q @ k.mT / q.shape[-1] ** 0.5 * visible).softmax(-1) @ v


@torch.inference_mode()
def forward(model, ids, cache, attend):
    """Logits after these ids; `attend` None is the package's own attention."""
    if attend is None:
        return nanokv.prefill(model, [ids], cache, start_pos=cache.length)[0]
    hidden = model(torch.tensor([ids]), cache, cache.length, attend)
    return model.lm_head(hidden[0, -1])


def hold(loaded, cache, turns, most=MOST, attend=None):
    """As `talk` in answer.js: [(ids of the answer, logits of its first token, and of its last)]."""
    model, tokenizer = loaded
    texts, held, answers = [], [], []
    for text in turns:
        ids = prompt(tokenizer, *texts, text)
        logits = first = forward(model, ids[cache.length :], cache, attend)
        answer = [int(first.argmax())]
        while len(answer) < most and answer[-1] not in model.generation_config.eos_token_ids:
            logits = forward(model, answer[-1:], cache, attend)
            answer.append(int(logits.argmax()))
        assert held == ids[: len(held)]
        held = ids + answer[:-1]
        answers.append((answer, first, logits))
        texts += [text, tokenizer.text_of(answer)]
    return answers


def make(kind, loaded):
    return nanokv.make_cache(kind, loaded[0].config)


def hold_in(loaded, name, turns, most=MOST):
    """As `way(name)` in experiments.js: (what `hold` gives, the cache at the end)."""
    fault = FAULTS.get(name)
    cache = make("dict" if fault or name in ("multiplied", "off", "right") else name, loaded)
    with faults.inject(fault) if fault else nullcontext():
        if name == "notCleared":
            hold(loaded, make("dict", loaded), BEFORE, most)
        attend = multiplied if name == "multiplied" else None
        return hold(loaded, cache, turns, most, attend), cache
