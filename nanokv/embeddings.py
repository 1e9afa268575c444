"""Embeddings: one vector (C,) per text, so that texts of similar meaning have similar vectors.

    texts = ["a cache of keys and values", "Instruct: find an answer\\nQuery:What is a KV cache?"]
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    vectors = embed(model, ids, "last")     (B,C), each of length 1
    vectors @ vectors.T                     (B,B) cosine similarities

The model is an ordinary language model without its head. A text has T hidden states behind the last
norm, and its pooling makes one vector of them:

    last   the hidden state of the last token, the only one that has seen the whole text. Qwen3
           Embedding (Zhang et al. 2025, arXiv 2506.05176), whose tokenizer ends each text with
           <|endoftext|> as a special token
    mean   the mean of all T. Sentence-BERT (Reimers & Gurevych 2019, arXiv 1908.10084)

A model works with the pooling that it was trained with. The vectors of a model that was trained for
chats only compare texts badly. An instruction is part of the text.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv.cache import KVCache, make_cache
from nanokv.checkpoint import Model
from nanokv.engine.packed import forward_packed
from nanokv.errors import ContextError, GenerationError, TokenIdsError
from nanokv.inference import prefill_chunk
from nanokv.text.ids import Ids, id_list

POOLINGS = ("last", "mean")


def embed(
    model: Model,
    texts: Iterable[Ids],
    pooling: str = "last",
    normalize: bool = True,
    dimensions: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The ids of B texts → their embeddings (B,C), fp32 on the model's device.

    The texts may have any lengths and share no state. With `normalize` each vector is divided by
    its L2 norm. `dimensions` keeps only the first values, before that (Matryoshka embeddings,
    Kusupati et al. 2022, arXiv 2205.13147). A forward computes at most `chunk` tokens; the default
    is that of a long prompt. Raises TokenIdsError, ContextError or GenerationError.
    """
    if chunk is None:
        chunk = prefill_chunk(model)
    found: list[Tensor] = []
    for part in embed_steps(model, texts, repeat(chunk), pooling, normalize, dimensions):
        found += part
    return torch.stack(found)


@torch.inference_mode()
def embed_steps(
    model: Model,
    texts: Iterable[Ids],
    chunks: Iterator[int],
    pooling: str = "last",
    normalize: bool = True,
    dimensions: int | None = None,
) -> Iterator[list[Tensor]]:
    """`embed` forward by forward: yields the embeddings (C,) of the texts that each one completes.

    Each forward takes the most tokens that it computes from `chunks`. Keys and values are kept only
    for the text that goes on in the next forward.
    """
    ids = checked_texts(model, texts)
    check_settings(model, pooling, dimensions)
    kept = make_cache("dict", model.config)
    total = torch.zeros(model.config.hidden_size, device=model.embed_tokens.weight.device)
    for pieces in laid_end_to_end([*map(len, ids)], chunks):
        caches = [kept if piece.start else new_cache(model, piece) for piece in pieces]
        parts = [ids[piece.text][piece.start : piece.end] for piece in pieces]
        hidden = forward_packed(model, parts, caches, [piece.start for piece in pieces])  # (N,C)
        complete = []
        states = hidden.split([*map(len, parts)])  # (T_b,C) each
        for piece, rows, cache in zip(pieces, states, caches, strict=True):
            if pooling == "last":
                pooled = rows[-1].float()  # (C,)
            elif piece.start == 0:
                pooled = rows.float().sum(0)  # (C,)
            else:
                pooled = total + rows.float().sum(0)  # (C,)
            if piece.end < piece.length:
                kept = cache
                total = pooled
                continue
            if pooling == "mean":
                pooled = pooled / piece.length
            complete.append(finished(pooled, normalize, dimensions))
        yield complete


class Piece(NamedTuple):
    """Tokens start … end−1 of a text of `length` tokens."""

    text: int  # its place in the list
    start: int
    end: int
    length: int


def laid_end_to_end(lengths: Sequence[int], chunks: Iterator[int]) -> Iterator[list[Piece]]:
    """The texts laid end to end and cut after each of the `chunks`: the pieces of each forward.

    lengths [3, 4], chunks 5, 5: tokens 0 to 2 of the first text and 0 to 1 of the second, then 2
    to 3.
    """
    pieces: list[Piece] = []
    room = next_of(chunks)
    for text, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            pieces.append(Piece(text, start, end, length))
            room -= end - start
            start = end
            if room == 0:
                yield pieces
                pieces = []
                room = next_of(chunks)
    if pieces:
        yield pieces


def next_of(chunks: Iterator[int]) -> int:
    """The size of the next forward; GenerationError if it is no number of tokens."""
    chunk = next(chunks)
    if type(chunk) is not int or chunk < 1:
        raise GenerationError(f"chunk is {chunk!r}: it must be an integer ≥ 1")
    return chunk


def new_cache(model: Model, piece: Piece) -> KVCache:
    """A cache for the text of a piece. Only a text that is cut gets memory for all its tokens."""
    if piece.end == piece.length:
        return make_cache("dict", model.config)
    return make_cache("static", model.config, capacity=piece.length)


def finished(pooled: Tensor, normalize: bool, dimensions: int | None) -> Tensor:
    """A pooled vector (C,) → the embedding (C,), or its first `dimensions` values."""
    vector = pooled[:dimensions]  # (C,)
    if normalize:
        vector = F.normalize(vector, dim=0)  # (C,)
    if not vector.isfinite().all():
        raise GenerationError(
            "an embedding holds NaN or infinity", "nanokv verify finds damaged weights"
        )
    return vector


def checked_texts(model: Model, texts: Iterable[Ids]) -> list[list[int]]:
    """The ids of each text; an error names the text."""
    found = []
    context = model.config.max_position_embeddings
    for number, text in enumerate(texts):
        ids = id_list(text, model.config.vocab_size)
        if not ids:
            raise TokenIdsError(f"text {number} has no tokens: an embedding needs at least one")
        if len(ids) > context:
            raise ContextError(
                f"text {number} has {len(ids):,} tokens, the model's context {context:,}",
                "cut the text into parts",
            )
        found.append(ids)
    if not found:
        raise GenerationError("no texts")
    return found


def check_settings(model: Model, pooling: str, dimensions: int | None) -> None:
    """GenerationError for an unknown pooling, or a number that is out of its range."""
    if pooling not in POOLINGS:
        raise GenerationError(f"pooling is {pooling!r}: {' or '.join(POOLINGS)} was expected")
    size = model.config.hidden_size
    if dimensions is not None and not 1 <= dimensions <= size:
        raise GenerationError(
            f"dimensions is {dimensions!r}: an integer from 1 to {size:,} was expected"
        )
