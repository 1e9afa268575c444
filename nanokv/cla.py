"""Cross-layer attention: neighbouring layers use the same keys and values.

    layers of the model     0  1  2  3  4  5      kv_sharing_factor 2
    entries of the cache    0     1     2         half of the bytes

The first layer of a group projects, rotates and caches keys and values. The others project queries
alone and read what the first one's append returned in the same forward. A cache has one entry per
group, so every kind of cache and every operation on it stays as it is. Source: Brandon et al. 2024,
arXiv 2405.12981 (CLA2 and CLA3 in the paper: sharing factors of 2 and 3).
"""

from collections.abc import Iterator

from torch import Tensor

from nanokv.checkpoint import Attend, Cache, Layer
from nanokv.config import Config
from nanokv.model import Attention, Block
from nanokv.rope import Rotation, apply_rope


class SharedEntry:
    """An entry of a cache in one forward: the first layer of a group appends, the others read."""

    held: tuple[Tensor, Tensor]  # keys and values (B,Hk,S,D) ×2, after the append

    def __init__(self, entry: Layer):
        self.entry = entry

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As the entry's own."""
        self.held = self.entry.append(k, v)
        return self.held


def shared_entries(cache: Cache, config: Config) -> Iterator[SharedEntry]:
    """For each layer of the model, the entry of its group."""
    entries = map(SharedEntry, cache)
    for layer in range(config.num_hidden_layers):
        if not config.shares_kv(layer):
            entry = next(entries)
        yield entry


class SharingAttention(Attention):
    """Queries of this layer over the keys and values of an earlier one."""

    def __init__(self, config: Config):
        super().__init__(config)
        del self.k_proj, self.v_proj, self.k_norm

    def forward(self, x: Tensor, rope: Rotation | None, cache: Layer, attend: Attend) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim)  # (B,T,H,D)
        q = self.q_norm(q).transpose(1, 2)  # (B,H,T,D)
        q = apply_rope(q, rope)
        k, v = cache.held  # type: ignore[attr-defined]  # (B,Hk,S,D) ×2, keys rotated; a SharedEntry
        y = attend(q, k, v)  # (B,H,T,D)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B,T,H·D)
        return self.o_proj(y)  # (B,T,C)


class SharingBlock(Block):
    """Block, whose attention may have no keys and values of its own."""

    def __init__(self, config: Config, layer: int):
        super().__init__(config, layer)
        if config.shares_kv(layer):
            self.self_attn = SharingAttention(config)
