"""What of each weight a rank holds, and the model that computes with it: model.py itself, with fewer heads.

    q, k, v, gate, up      rows: a rank has whole heads, and whole columns of the MLP        nothing is sent
    o, down                columns: what a rank computes is a summand                        all_reduce behind each
    embedding              rows: a rank knows some of the words, the others are zeros to it  all_reduce
    head                   rows: a rank has some of the logits                               all_gather
    experts                whole ones: a rank's tokens to others' experts add zeros          the all_reduce of the block
    norms, router          whole, on every rank

A rank's Config has its own H, Hk and intermediate_size, and everything that is made from a config, caches above all, is
a rank's share without knowing it. Where there are more ranks than KV heads, a KV head lies on several ranks (as in
vLLM): its cache is stored as often. After Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanokv.config import Config
from nanokv.loading import fill, skeleton
from nanokv.model import Transformer
from nanokv.parallel.group import Ranks
from nanokv.parallel.sizes import check_sizes, has_mlp
from weights_loader.shards import Slice

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Shard:
    """The part of rank `rank` of `size`; ParallelError, naming the sizes, if the model cannot be cut so."""

    config: Config  # of the whole model
    rank: int
    size: int

    def __post_init__(self) -> None:
        check_sizes(self.config, self.size)

    @property
    def kv_heads(self) -> int:
        """On this rank: Hk/n, or one that other ranks have too."""
        return max(1, self.config.num_key_value_heads // self.size)

    @property
    def local(self) -> Config:
        """The config of this rank's model. head_dim is a field of its own, so nothing else changes."""
        config = self.config
        width = config.intermediate_size
        if has_mlp(config):
            width //= self.size
        return replace(
            config,
            num_attention_heads=config.num_attention_heads // self.size,
            num_key_value_heads=self.kv_heads,
            intermediate_size=width,
        )

    def words(self) -> Slice:
        """Rows of embedding and head: V/n, rounded up; the last ranks may have fewer."""
        count = self.config.vocab_size
        each = -(-count // self.size)
        first = min(self.rank * each, count)
        return Slice(0, first, min(first + each, count))

    def experts(self) -> range:
        """Numbers of the experts that this rank has: E/n, or one more."""
        count = 0
        if self.config.experts:
            count = self.config.experts.num_experts
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def part(self, name: str, shape: tuple[int, ...]) -> Slice:
        """What of the tensor "layers.0.self_attn.q_proj.weight", whole (4096,1024), lies here; size 0: nothing."""
        path = name.split(".")
        module, kind = path[-2:]
        if module in ("embed_tokens", "lm_head"):
            return self.words()
        whole = Slice(0, 0, shape[0])
        if "experts" in path:
            number = int(path[path.index("experts") + 1])
            return whole if number in self.experts() else Slice(0, 0, 0)
        if module in ("k_proj", "v_proj"):
            D = self.config.head_dim
            head = self.rank * self.config.num_key_value_heads // self.size
            return Slice(0, head * D, (head + self.kv_heads) * D)
        if module in ROWS:
            return self._share(0, shape)
        if module in COLUMNS and kind == "weight":
            return self._share(1, shape)
        return whole

    def _share(self, dim: int, shape: tuple[int, ...]) -> Slice:
        each = shape[dim] // self.size
        return Slice(dim, self.rank * each, (self.rank + 1) * each)


# --- the modules of a rank --------------------------------------------------------------------------------------------


class VocabularyEmbedding(nn.Embedding):
    """Some rows of the embedding. A token of another rank's rows gives zeros here, and the sum over the ranks its row:
    B·T·C values in one all_reduce, exact in every dtype."""

    def __init__(self, words: Slice, width: int, ranks: Ranks):
        super().__init__(words.size, width)
        self.words = words
        self.ranks = ranks

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens - self.words.first  # (B,T)
        mine = (row >= 0) & (row < self.words.size)
        x = F.embedding(row.where(mine, 0), self.weight) * mine[..., None]  # (B,T,C)
        return self.ranks.sum(x)


class VocabularyHead(nn.Linear):
    """Some rows of the head: V/n logits here, and those of the others by one all_gather of as many values."""

    def __init__(self, words: Slice, width: int, vocabulary: int, ranks: Ranks):
        super().__init__(width, words.size, bias=False)
        self.vocabulary = vocabulary
        self.ranks = ranks

    def forward(self, hidden: Tensor) -> Tensor:
        each = -(-self.vocabulary // self.ranks.size)
        logits = F.linear(hidden, self.weight)  # (…,V/n)
        logits = F.pad(logits, (0, each - logits.shape[-1]))  # the last ranks may have fewer
        parts = self.ranks.gather(logits)  # (n,…,V/n)
        return torch.cat(parts.unbind(0), -1)[..., : self.vocabulary]  # (…,V)


class Elsewhere(nn.Module):
    """An expert of another rank: here its output is zero, and costs nothing but the zeros."""

    def forward(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)  # (n,C)


def build_shard(shard: Shard, state: dict[str, Tensor], ranks: Ranks) -> Transformer:
    """The model of one rank from its parts of the weights, in eval mode."""
    config = shard.local
    C = shard.config.hidden_size
    words = shard.words()
    model = skeleton(config)
    with torch.device("meta"):
        model.embed_tokens = VocabularyEmbedding(words, C, ranks)
        model.lm_head = VocabularyHead(words, C, config.vocab_size, ranks)
    layers: list[Any] = list(model.layers)
    for layer in layers:
        experts = getattr(layer.mlp, "experts", [])
        for number in range(len(experts)):
            if number not in shard.experts():
                experts[number] = Elsewhere()
    for name, tensor in state.items():
        if name.endswith("o_proj.bias") and shard.rank:  # added once, not by every rank
            state[name] = torch.zeros_like(tensor)
    fill(model, state)

    def sum_over_ranks(module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
        return ranks.sum(y)  # (B,T,C)

    for layer in layers:
        layer.self_attn.register_forward_hook(sum_over_ranks)
        layer.mlp.register_forward_hook(sum_over_ranks)
    return model


def random_shard(
    config: Config, ranks: Ranks, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Transformer:
    """This rank's part of a model with random weights, for timing and memory; no rank has the whole. What lies on
    several ranks has the same values there."""
    shard = Shard(config, ranks.rank, ranks.size)
    state = {}
    for number, (name, whole) in enumerate(skeleton(config).named_parameters()):
        part = shard.part(name, tuple(whole.shape))
        if not part.size:
            continue
        shape = [part.size if dim == part.dim else size for dim, size in enumerate(whole.shape)]
        matrix = torch.empty(shape, dtype=dtype, device=device)
        if whole.dim() > 1:
            generator = torch.Generator(device).manual_seed(number << 32 | part.first)
            matrix.normal_(0, 0.02, generator=generator)
        else:
            matrix.fill_(1)
        state[name] = matrix
    return build_shard(shard, state, ranks)


def split(model: Transformer, ranks: Ranks) -> Transformer:
    """This rank's part of a model that every rank has whole: views of it where rows are cut, copies of columns."""
    shard = Shard(model.config, ranks.rank, ranks.size)
    state = {}
    for name, tensor in model.state_dict().items():
        part = shard.part(name, tuple(tensor.shape))
        if part.size:
            state[name] = tensor.narrow(part.dim, part.first, part.size).contiguous()
    found = build_shard(shard, state, ranks)
    found.generation_config = model.generation_config
    return found
