"""The part of each weight that a rank holds, and its model: that of model.py, with fewer heads.

    weight             part of a rank                                      message
    q, k, v, gate, up  rows: whole heads, and some columns of the MLP      none
    o, down            columns: a rank computes a summand of the result    all_reduce after each
    embedding          rows: some of the vocabulary, zeros for the rest    all_reduce
    head               rows: some of the logits                            all_gather
    experts            some of them, zeros for the experts of other ranks  all_reduce of the block
    norms, router      whole, on every rank                                none

The Config of a rank has the rank's own H, Hk and intermediate_size, so everything that is made
from a config, such as a cache, has the size of the rank's share. If there are more ranks than KV
heads, a KV head is on several ranks, and its cache is stored on each of them (as in vLLM). After
Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053).
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
    """The part of rank `rank` of `size`. ParallelError if the model's sizes are not divisible."""

    config: Config  # of the whole model
    rank: int
    size: int

    def __post_init__(self) -> None:
        check_sizes(self.config, self.size)

    @property
    def kv_heads(self) -> int:
        """The number of KV heads on this rank: Hk/n, or 1 that other ranks hold too."""
        return max(1, self.config.num_key_value_heads // self.size)

    @property
    def local(self) -> Config:
        """The config of this rank's model. head_dim is a separate field and does not change."""
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
        """The rows of embedding and head: V/n rounded up. The last ranks may have fewer."""
        count = self.config.vocab_size
        each = -(-count // self.size)
        first = min(self.rank * each, count)
        return Slice(0, first, min(first + each, count))

    def experts(self) -> range:
        """The numbers of the experts on this rank: E/n of them, or one more."""
        count = 0
        if self.config.experts:
            count = self.config.experts.num_experts
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def part(self, name: str, shape: tuple[int, ...]) -> Slice:
        """The part of a tensor on this rank; size 0 for none.

        name: such as "layers.0.self_attn.q_proj.weight". shape: of the whole tensor, (4096,1024).
        """
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


# --- the modules of a rank ------------------------------------------------------------------------


class VocabularyEmbedding(nn.Embedding):
    """Some rows of the embedding. Tokens of other ranks' rows give zeros.

    The sum over the ranks is the row of each token: B·T·C values in one all_reduce, exact in every
    dtype.
    """

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
    """Some rows of the head. Computes V/n logits and gathers those of the other ranks."""

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
    """Replaces an expert of another rank; its output is zeros."""

    def forward(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)  # (n,C)


def build_shard(shard: Shard, state: dict[str, Tensor], ranks: Ranks) -> Transformer:
    """The model of one rank, in eval mode, from its parts of the weights."""
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
        if name.endswith("o_proj.bias") and shard.rank:  # only rank 0 adds the bias to the sum
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
    """This rank's part of a model with random weights, to measure time and memory.

    No rank holds the whole model. A part that is on several ranks has the same values on all of
    them.
    """
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
    """This rank's part of a model that every rank holds whole: views of rows, copies of columns."""
    shard = Shard(model.config, ranks.rank, ranks.size)
    state = {}
    for name, tensor in model.state_dict().items():
        part = shard.part(name, tuple(tensor.shape))
        if part.size:
            state[name] = tensor.narrow(part.dim, part.first, part.size).contiguous()
    found = build_shard(shard, state, ranks)
    found.generation_config = model.generation_config
    return found
