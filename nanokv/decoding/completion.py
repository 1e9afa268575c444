"""Answers as plain dicts in the format of OpenAI's API: for chat, generate, batch and serve.

    answer = message(text) or {"text": text}       an assistant's message, or the continuation of
    a text completion(model, [choice(answer, ids, "stop")], usage(14, 8, cached=6), timings=…,
    seed=…)

Names are OpenAI's if it has one. Added are `reasoning_content`, `stop_reason` and `token_ids`, as
other servers of open models send them, and nanokv's timings, cache, seed and speculation.
"""

import codecs
import math
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanokv.errors import ContextError, NanoKVError
from nanokv.text.thinking import split_thinking

if TYPE_CHECKING:
    from nanokv.cache import KVCache
    from nanokv.text.tokenizer import Tokenizer


def completion(
    model: str,
    choices: Sequence[dict[str, Any]],
    usage: dict[str, Any],
    id: Any = None,
    **facts: Any,
) -> dict[str, Any]:
    """The object of one answer, or of several to one prompt. A fact equal to {} is left out."""
    if "message" in choices[0]:
        kind = "chat.completion"
        prefix = "chatcmpl"
    else:
        kind = "text_completion"
        prefix = "cmpl"
    if id is None:
        id = f"{prefix}-{uuid.uuid4().hex}"
    body = {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        "usage": usage,
    }
    return body | {name: fact for name, fact in facts.items() if fact != {}}


def message(text: str, opened: bool = False) -> dict[str, Any]:
    """The assistant's message with thoughts set apart. `opened`: the prompt ended in <think>."""
    thinking, content = split_thinking(text, opened)
    return assistant(content, thinking)


def assistant(content: str, thinking: str) -> dict[str, Any]:
    """The assistant's message from content and thoughts."""
    said = {"role": "assistant", "content": content, "refusal": None}
    if thinking:
        said["reasoning_content"] = thinking
    return {"message": said}


def choice(
    answer: dict[str, Any],
    ids: Sequence[int],
    reason: str,
    stop_string: str = "",
    index: int = 0,
    logprobs: dict[str, Any] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """One answer (`message` or {"text": …}), its ids with the eos, and the reason why it ended."""
    ended = end(reason, stop_string)
    return (
        {"index": index} | answer | ended | {"logprobs": logprobs, "token_ids": list(ids)} | facts
    )


def end(reason: str, stop: str | int | None = None) -> dict[str, Any]:
    """OpenAI's finish_reason ("stop" or "length"), and the cause in stop_reason.

    stop: the stop string or token id of the request that ended the answer, as vLLM reports it; None
    or "" if the model ended it. Any other reason that cut the answer is finish_reason "length".
    """
    named = None if stop == "" else stop
    if named is not None or reason == "stop":
        return {"finish_reason": "stop", "stop_reason": named}
    cause = None if reason == "length" else reason
    return {"finish_reason": "length", "stop_reason": cause}


def usage(prompt: int, new: int, cached: int = 0, thought: int | None = None) -> dict[str, Any]:
    """Token counts; `cached` tokens of the prompt were already in the cache.

    thought: those of the new tokens that are thoughts; None if they were not counted.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if thought is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": thought}
    return counts


def logprobs(
    answer: dict[str, Any], ids: Sequence[int], values: Sequence[float], tokenizer: "Tokenizer"
) -> dict[str, Any]:
    """Log-probabilities in the format of this kind of answer; null for infinity and NaN."""
    pieces = [tokenizer.token_bytes(id) for id in ids]
    tokens = [piece.decode("utf-8", "replace") for piece in pieces]
    finite = [value if math.isfinite(value) else None for value in values]
    if "message" in answer:
        rows = zip(tokens, finite, map(list, pieces), strict=True)
        content = [{"token": t, "logprob": x, "bytes": b, "top_logprobs": []} for t, x, b in rows]
        return {"content": content, "refusal": None}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = []
    at = 0
    for id, piece in zip(ids, pieces, strict=True):
        offsets.append(min(at, len(answer["text"])))  # the text may lack a stop string
        if id not in tokenizer.control_ids:
            at += len(decoder.decode(piece))
    return {"tokens": tokens, "token_logprobs": finite, "text_offset": offsets, "top_logprobs": []}


def timings(
    ttft_s: float | None = None,
    prefill_tok_s: float | None = None,
    decode_tok_s: float | None = None,
    **more: float | None,
) -> dict[str, Any]:
    """Seconds to the first token, tokens per second, and `more`; null if not measured."""
    measured = {
        "ttft_s": ttft_s,
        "prefill_tok_s": prefill_tok_s,
        "decode_tok_s": decode_tok_s,
    } | more
    rounded: dict[str, float | None] = {}
    for name, value in measured.items():
        digits = 2 if name.endswith("tok_s") else 6
        rounded[name] = value and round(value, digits)
    return rounded


def engine_timings(metrics: dict[str, Any]) -> dict[str, Any]:
    """`timings` of an engine's request, from its metrics()."""
    first = metrics["ttft_s"]
    computed = metrics["prompt_tokens"] - metrics["reused_tokens"]
    prefilling = None if first is None else first - metrics["queue_s"]
    more = {name: metrics[name] for name in ("queue_s", "total_s", "preemptions")}
    return timings(first, rate(computed, prefilling), rate(1, metrics["token_s"]), **more)


def rate(tokens: int, seconds: float | None) -> float | None:
    """Tokens per second; None without tokens or without time."""
    if tokens > 0 and seconds and seconds > 0:
        return tokens / seconds
    return None


def cache(cache: "KVCache") -> dict[str, Any]:
    """The state of the cache afterwards: it holds prompt and answer except the last token.

    `used_bytes` is the part of `bytes` that these tokens take; the rest is reserved.
    """
    return {
        "kind": cache.made.name,
        "tokens": cache.length,
        "used_bytes": cache.sizes.used_nbytes,
        "bytes": cache.nbytes,
    }


def seed(run: Any) -> int | None:
    """The seed that repeats a Generation or a Request; None if nothing was drawn."""
    return run.seed if run.params.temperature else None


def error(reason: Exception) -> dict[str, Any]:
    """OpenAI's error object, and beside it a `hint` how to fix the cause."""
    full = isinstance(reason, MemoryError)
    refused = isinstance(reason, NanoKVError) and not full
    kind = "invalid_request_error" if refused else "server_error"
    code = "context_length_exceeded" if isinstance(reason, ContextError) else None
    body: dict[str, Any] = {
        "error": {"message": str(reason), "type": kind, "param": None, "code": code}
    }
    if hint := getattr(reason, "hint", ""):
        body["hint"] = hint
    return body
