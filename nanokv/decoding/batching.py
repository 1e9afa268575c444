"""Many prompts of different lengths, answered together: one decode reads the weights for all rows.

    generate_padded   one rectangle: shorter prompts get left padding, which is computed and masked
    generate_ragged   one cache per row: prefilled one by one, joined, decoded together

Both give every row the answer that it would get alone; the cheaper one depends on how much the
lengths differ. A row that has ended leaves the batch and costs no more time. All rows start
together; nanokv.engine serves requests that come and go.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanokv.cache import BatchCache, KVCache, make_cache
from nanokv.cache.padded import PaddedCache
from nanokv.checkpoint import Model
from nanokv.decoding.draw import GREEDY, Sampler, SamplingParams, Step, next_steps, reason_to_end
from nanokv.decoding.generation import EosIds, Generation
from nanokv.errors import CacheError, CapacityError, GenerationError
from nanokv.inference import decode, prefill_chunk, prefill_chunks
from nanokv.text.ids import Ids


def generate_padded(
    model: Model,
    prompts: Iterable[Ids],
    cache: KVCache | None = None,
    max_new_tokens: int = 64,
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    eos_token_ids: EosIds = None,
    chunk: int | None = None,
) -> list[list[int]]:
    """New ids of every prompt, in order; an eos token ends a row and is part of it.

    prompts: lists of ids. cache: empty, of any kind, made for len(prompts) rows; not usable
    afterwards. params: one for all rows, or a list with one per row, each with its seed, so that a
    row draws what it would draw alone. The prefill costs B·(longest prompt) tokens. Raises
    CapacityError if padding would take slots that an answer may need.
    """
    prompts = _prompts(prompts)
    if cache is None:
        cache = make_cache("dict", model.config, len(prompts))
    if not isinstance(cache.length, int) or cache.length:
        raise CacheError(
            f"the cache holds {cache.length} tokens already", hint="pass an empty one, or none"
        )
    if chunk is None:
        chunk = prefill_chunk(model, len(prompts))
    rows = _rows(
        model, prompts, [cache] * len(prompts), params, max_new_tokens, eos_token_ids, chunk
    )
    longest = max(len(row.ids) for row in rows)
    pads = [longest - len(row.ids) for row in rows]
    _refuse_padding_that_cuts(cache.capacity, longest, rows)
    ids = torch.tensor([[0] * pad + row.ids for row, pad in zip(rows, pads, strict=True)])  # (B,P)
    padded = PaddedCache(cache, pads)
    logits = prefill_chunks(model, ids, padded, start_pos=padded.length, chunk=chunk)  # (B,V)
    return _decode(model, padded, rows, logits, _drop_rows)


def generate_ragged(
    model: Model,
    prompts: Iterable[Ids],
    cache: KVCache | None = None,
    max_new_tokens: int = 64,
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    eos_token_ids: EosIds = None,
    chunk: int | None = None,
) -> list[list[int]]:
    """Like generate_padded, without padding. cache: make_cache("batch", config, len(prompts), …).

    Rows may already hold a beginning: prompts are the tokens that are not yet in the cache.
    Afterwards each row holds its prompt and its answer except the last token. After an exception,
    each row holds what it held before.
    """
    prompts = _prompts(prompts)
    if cache is None:
        cache = make_cache("batch", model.config, len(prompts), of="paged")
    caches: list[KVCache] = list(getattr(cache, "rows", ()))
    if len(caches) != len(prompts):
        raise CacheError(
            f"{len(prompts)} prompts need a batch cache of as many rows",
            'make_cache("batch", config, B)',
        )
    if chunk is None:
        chunk = prefill_chunk(model)
    rows = _rows(model, prompts, caches, params, max_new_tokens, eos_token_ids, chunk)
    before = [own.length for own in caches]
    try:
        logits = [
            prefill_chunks(model, [row.ids], own, start_pos=own.length, chunk=chunk)  # (1,V)
            for row, own in zip(rows, caches, strict=True)
        ]
        return _decode(model, cache, rows, torch.cat(logits), _some_rows)
    except BaseException:  # Ctrl-C too: only some rows and layers have the new tokens
        for own, length in zip(caches, before, strict=True):
            own.truncate(length)
        raise


class Row:
    """One prompt of the batch and its answer so far."""

    def __init__(self, alone: Generation):
        """`alone`: a Generation for this prompt only, which has checked the arguments and the seed.

        It is not run: its ids, limits and random generator are used here.
        """
        self.ids = alone.ids
        self.eos = alone.eos_token_ids
        self.tokens: list[int] = []
        self.room = min(alone.max_new_tokens, alone.room)
        self.sampler = Sampler(alone.params, alone.generator, self.ids, self.tokens)

    def take(self, step: Step | GenerationError) -> bool:
        """Add a token; returns False when the answer is complete."""
        if isinstance(step, GenerationError):
            raise step
        self.tokens.append(step.token)
        return reason_to_end(self.tokens, self.eos, self.room, self.room) is None


def _decode(
    model: Model,
    cache: KVCache,
    rows: list[Row],
    logits: Tensor,
    narrow: Callable[[Any, list[int]], KVCache],
) -> list[list[int]]:
    """One decode per step for all unfinished rows; logits (B,V) follow the prompts.

    `narrow(cache, keep)` returns a cache of the rows `keep`.
    """
    going = rows
    while True:
        steps = next_steps(logits, [row.sampler for row in going])
        keep = [b for b, row in enumerate(going) if row.take(steps[b])]
        if not keep:
            return [row.tokens for row in rows]
        if len(keep) < len(going):
            cache = narrow(cache, keep)
            going = [going[b] for b in keep]
        token = torch.tensor([row.tokens[-1:] for row in going])  # (B',1)
        logits = decode(model, token, cache, start_pos=cache.length)  # (B',V)


def _drop_rows(cache: KVCache, keep: list[int]) -> KVCache:
    """Drop the other rows of a rectangle."""
    cache.reorder(keep)
    return cache


def _some_rows(cache: BatchCache, keep: list[int]) -> KVCache:
    """A batch of some rows, not copied; the caller's batch still has all rows."""
    return type(cache)([cache.rows[i] for i in keep], cache.config)


def _refuse_padding_that_cuts(capacity: int | None, longest: int, rows: list[Row]) -> None:
    """CapacityError if padding would take slots that a row needs for its answer.

    All rows fill up together, so the answer of that row would be cut short silently.
    """
    if capacity is None:
        return
    left = capacity - longest + 1
    for b, row in enumerate(rows):
        if left < row.room:
            raise CapacityError(
                f"prompt {b} ({len(row.ids):,} tokens) may get {row.room:,} new tokens, but a cache "
                f"of {capacity:,} slots has room for {left:,} after "
                f"{longest - len(row.ids):,} columns of padding",
                f"a capacity of {longest + row.room - 1:,}, max_new_tokens={left}, "
                "or generate_ragged",
            )


def _prompts(prompts: Iterable[Ids]) -> list[Ids]:
    prompts = list(prompts)
    if not prompts:
        raise GenerationError("no prompts")
    return prompts


def _rows(
    model: Model,
    prompts: list[Ids],
    caches: Sequence[KVCache],
    params: SamplingParams | Sequence[SamplingParams],
    max_new_tokens: int,
    eos_token_ids: EosIds,
    chunk: int,
) -> list[Row]:
    """Check everything before any work; an error names the row."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    params = list(params)
    if len(params) != len(prompts):
        raise GenerationError(f"{len(params)} sampling params for {len(prompts)} prompts")
    rows = []
    for b, (prompt, own, values) in enumerate(zip(prompts, caches, params, strict=True)):
        try:
            alone = Generation(
                model, prompt, own, values, max_new_tokens, eos_token_ids, chunk=chunk
            )
        except GenerationError as error:
            raise type(error)(f"prompt {b}: {error}", error.hint) from error
        rows.append(Row(alone))
    return rows
