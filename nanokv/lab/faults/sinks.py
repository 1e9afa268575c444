"""Attention over parts of the keys with a learned sink, for the fault that counts it too often.

A learned sink is a logit per head that no key belongs to (gpt-oss): it takes a share of the softmax
and adds no value. The bundled model has none, so the lab adds the same one to every head.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from nanokv.cache import KVCache, LayerCache
from nanokv.config import Config
from nanokv.parallel.merge import Split, merge

SINK = 2.0  # the logit; with it the bundled model's answers stay as they are
PARTS = 4


class SinkCache(KVCache):
    """A cache of any layers whose attention is computed in `parts` of the keys, with a sink."""

    def __init__(self, layers: Iterable[LayerCache], config: Config | None, parts: int = PARTS):
        super().__init__(layers, config)
        self.parts = parts

    def attention(self, T: int) -> "SplitWithSink":
        """The attention of the next T queries."""
        return SplitWithSink(self.mask(T), self.parts)


class SplitWithSink(Split):
    """`Split` whose softmax has one more logit, SINK, in its divisor."""

    def merged(self, outputs: Tensor, lse: Tensor) -> Tensor:
        """outputs (n,B,H,T,D), lse (n,B,H,T) of the parts → (B,H,T,D).

        The sink is one more part: its log-sum-exp is the logit, and its output is 0.
        """
        nothing = torch.zeros_like(outputs[:1])  # (1,B,H,T,D)
        sink = torch.full_like(lse[:1], SINK)  # (1,B,H,T)
        return merge(torch.cat((outputs, nothing)), torch.cat((lse, sink)))
