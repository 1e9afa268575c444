"""Reuse of a text that is not a prefix: keys and values that were computed elsewhere, put together.

A part (a document, a turn) was computed alone, from position 0 on. Behind other parts its positions
are others, and so is the text before it. Positions can be repaired exactly: a key that is turned by
the difference is the key of the new place, because rotations add up. The text before it cannot: in
layer 0 keys and values depend on their token alone, above it on all tokens before. So a share of
the tokens is computed again, over keys and values of which the others stay as they are.

    most changed   CacheBlend (Yao et al. 2024, arXiv 2405.16444): layer 0 is computed for all
                   tokens, then those whose keys and values of layer 1 have changed most. The
                   paper narrows its choice from layer to layer; here, as in LMCache, it is made
                   once.
    first          EPIC (Hu et al. 2024, arXiv 2410.15332): the first tokens of each part
    evenly         every n-th token, for comparison

The first part is a prefix, and exact. 100 % is a full prefill, 0 % costs nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nanokv.attention import Attend, Causal, Masked
from nanokv.cache import KVCache, make_cache
from nanokv.cache.base import LayerCache
from nanokv.cache.dict_cache import DictCache
from nanokv.config import Config
from nanokv.errors import UnsupportedError
from nanokv.inference import prefill
from nanokv.model import Transformer
from nanokv.rope import apply_rope, rope_angles, rope_frequencies, turned

CHECKED = 1  # the first layer in which keys and values depend on other tokens


@dataclass(frozen=True)
class Joined:
    """Parts in one cache of plain tensors. `starts` has the position of each part."""

    ids: Tensor  # (1,S)
    starts: list[int]
    cache: KVCache  # DictCaches

    @property
    def prefix(self) -> int:
        """Tokens of the first part, which are exact."""
        return [*self.starts, self.ids.shape[1]][1]


def alone(model: Transformer, ids: Sequence[int]) -> KVCache:
    """The cache of a text that was read alone. Costs a prefill."""
    cache = make_cache("dict", model.config)
    prefill(model, [list(ids)], cache)
    return cache


def plain(cache: KVCache) -> list[DictCache]:
    """The layers of a dict cache, for type checkers."""
    return cast("list[DictCache]", list(cache))


def join(model: Transformer, parts: Sequence[Sequence[int]], rotate: bool = True) -> Joined:
    """Parts that were read alone, one behind the other. Without `rotate` their keys keep the
    positions at which they were read: the fault. UnsupportedError for a family with layers of its
    own."""
    check_blocks(model.config)
    cache = make_cache("dict", model.config)
    starts: list[int] = []
    start = 0
    for part in parts:
        starts.append(start)
        for layer, read in zip(cache, plain(alone(model, part)), strict=True):
            key = read["key"]  # (1,Hk,T,D)
            if rotate:
                key = moved(model.config, key, start)
            layer.append(key, read["value"])
        start += len(part)
    ids = torch.tensor([[token for part in parts for token in part]])  # (1,S)
    return Joined(ids, starts, cache)


def check_blocks(config: Config) -> None:
    """UnsupportedError for a family whose layers do not all keep keys that RoPE has turned."""
    if config.family.own_parts:
        raise UnsupportedError(
            f"caches are joined by turning the keys of every layer, and {config.family.title} has "
            "layers of its own: windows, states or keys without RoPE",
            hint="a model of plain blocks, such as Qwen3, Qwen2 or Llama 3",
        )


def moved(config: Config, key: Tensor, by: int) -> Tensor:
    """Keys (1,Hk,T,D) as they are `by` positions later, in fp32 and rounded once."""
    speed, _ = rope_frequencies(config, key.device)  # keys have the factor of YaRN already
    angle = turned(speed, 1.0, torch.tensor([by]), torch.float32)  # (1,D) ×2
    return apply_rope(key.float(), angle).to(key.dtype)


# --- computing again ------------------------------------------------------------------------------


class Replaced(LayerCache):
    """A layer in which new keys and values replace those of some rows."""

    def __init__(self, layer: DictCache, rows: Tensor):
        self.layer = layer
        self.rows = rows

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.layer["key"] = self.layer["key"].index_copy(2, self.rows, k)  # (1,Hk,S,D)
        self.layer["value"] = self.layer["value"].index_copy(2, self.rows, v)  # (1,Hk,S,D)
        return self.layer["key"], self.layer["value"]


class Compared(LayerCache):
    """A layer that replaces all its keys and values, and notes how far each token's were off."""

    def __init__(self, layer: DictCache):
        self.layer = layer

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.change = off(k, self.layer["key"]) + off(v, self.layer["value"])  # (S,)
        self.layer["key"], self.layer["value"] = k, v
        return k, v


def off(new: Tensor, old: Tensor) -> Tensor:
    """Squared difference of each token, as a part of the mean square. (1,Hk,S,D) ×2 → (S,)."""
    return (new - old).pow(2).mean((0, 1, 3)) / new.pow(2).mean()


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An attention that is not computed, where only keys and values are wanted."""
    return torch.zeros_like(q)


def visible(rows: Tensor, S: int) -> Attend:
    """Each of these rows sees the keys up to its own position."""
    return Masked(torch.arange(S) <= rows[:, None])  # (t,S)


@torch.inference_mode()
def most_changed(model: Transformer, joined: Joined, share: float) -> Tensor:
    """Compute layer 0 for all tokens, then the most changed ones in all layers above → their rows.

    Keys and values of layer 1 are computed for all tokens, and replaced.
    """
    S = joined.ids.shape[1]
    every = torch.arange(S)
    x = model.embed_tokens(joined.ids)  # (1,S,C)
    rope = rope_angles(model.config, every, x.dtype)
    layers = plain(joined.cache)
    for block, held in zip(model.layers[:CHECKED], layers, strict=False):
        x = block(x, rope, Replaced(held, every), Causal())
    compared = Compared(layers[CHECKED])
    checked: Any = model.layers[CHECKED]  # a Block
    checked.self_attn(checked.input_layernorm(x), rope, compared, nothing)
    change = compared.change[joined.prefix :]  # (S−prefix,)
    rows = change.topk(count(joined, share)).indices.sort().values + joined.prefix  # (t,)
    compute(model, joined, rows, x[:, rows], CHECKED)
    return rows


@torch.inference_mode()
def first(model: Transformer, joined: Joined, share: float) -> Tensor:
    """Compute the first tokens of each part in all layers → their rows."""
    ends = [*joined.starts[2:], joined.ids.shape[1]]
    spans = zip(joined.starts[1:], ends, strict=True)
    rows = [torch.arange(start, start + round(share * (end - start))) for start, end in spans]
    return from_below(model, joined, torch.cat(rows))


@torch.inference_mode()
def evenly(model: Transformer, joined: Joined, share: float) -> Tensor:
    """Compute every n-th token in all layers → their rows."""
    S = joined.ids.shape[1]
    rows = torch.linspace(joined.prefix, S - 1, count(joined, share)).round().long()
    return from_below(model, joined, rows)


CHOICES: dict[str, Callable[[Transformer, Joined, float], Tensor]] = {
    "most changed": most_changed,
    "first of each part": first,
    "evenly": evenly,
}


def count(joined: Joined, share: float) -> int:
    """A share of the tokens behind the first part."""
    return round(share * (joined.ids.shape[1] - joined.prefix))


def from_below(model: Transformer, joined: Joined, rows: Tensor) -> Tensor:
    """Compute these rows in all layers."""
    compute(model, joined, rows, model.embed_tokens(joined.ids[:, rows]), 0)
    return rows


def compute(model: Transformer, joined: Joined, rows: Tensor, x: Tensor, layer: int) -> None:
    """Hidden states x (1,t,C) of these rows, through the layers from `layer` on."""
    if not len(rows):
        return
    rope = rope_angles(model.config, rows, x.dtype)
    attend = visible(rows, joined.ids.shape[1])
    for block, held in zip(model.layers[layer:], plain(joined.cache)[layer:], strict=True):
        x = block(x, rope, Replaced(held, rows), attend)
