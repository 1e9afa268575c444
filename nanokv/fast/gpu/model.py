"""The fast model for a GPU: the plain model's products, with one fused kernel between each two.

A decode step over a cache with pages is one recorded graph (recorded.py) of `Block.step` or
`Block.step_of_few`. Everything else (prefill, caches without pages) runs layer by layer in
`Block.forward`, with the same kernels around the cache's `append` and the caller's `attend`.
Activations have the model's dtype, as in the plain model.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanokv.attention import Attend
from nanokv.cache import KVCache, make_cache
from nanokv.cache.base import LayerCache
from nanokv.config import Config
from nanokv.fast.checks import is_one_call
from nanokv.fast.fusing import fused
from nanokv.fast.gpu import kernels, on
from nanokv.fast.gpu.attention import PROCESSORS, paged_attention, splits_for
from nanokv.fast.gpu.products import MOST_ROWS, product
from nanokv.fast.gpu.recorded import SIZES, Steps
from nanokv.fast.weights import check_dense
from nanokv.inference import decode
from nanokv.loading import skeleton
from nanokv.model import MLP, RMSNorm, Transformer
from nanokv.model import Block as PlainBlock
from nanokv.rope import rope_frequencies, turned

M = TypeVar("M", bound=nn.Module)


class Block(nn.Module):
    """One layer of the plain model with fused weights: qkv is one product, gate and up another."""

    qkv: Tensor  # ((H+2Hk)·D,C)
    qkv_bias: Tensor | None
    o: Tensor  # (C,H·D)
    o_bias: Tensor | None
    gate_up: Tensor  # (2I,C)
    down: Tensor  # (C,I)
    norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None  # not every family norms q and k
    k_norm: Tensor | None

    def __init__(self, plain: PlainBlock, config: Config):
        super().__init__()
        attention = plain.self_attn
        mlp = cast(MLP, plain.mlp)  # check_dense has excluded experts
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps = config.rms_norm_eps
        self.processors = processors_of(attention.q_proj.weight.device)
        qkv, qkv_bias = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, _ = fused(mlp.gate_proj, mlp.up_proj)
        tensors = {
            "qkv": qkv,
            "qkv_bias": qkv_bias,
            "o": attention.o_proj.weight,
            "o_bias": attention.o_proj.bias,
            "gate_up": gate_up,
            "down": mlp.down_proj.weight,
            "norm": plain.input_layernorm.weight,
            "mlp_norm": plain.post_attention_layernorm.weight,
            "q_norm": getattr(attention.q_norm, "weight", None),
            "k_norm": getattr(attention.k_norm, "weight", None),
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.detach())

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: LayerCache, attend: Attend
    ) -> Tensor:
        """x (B,T,C) → (B,T,C), as in the plain Block."""
        with on(x.device):
            return self.whole(x, *rope, cache, attend)

    def whole(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, attend: Attend
    ) -> Tensor:
        """`forward`, with the device of x as the current one."""
        B, T, C = x.shape
        rows = x.reshape(B * T, C)
        y = kernels.rms_norm(rows, self.norm, self.eps)
        qkv = F.linear(y, self.qkv, self.qkv_bias)  # (B·T,(H+2Hk)·D)
        q, k, v = kernels.split_heads(
            qkv, self.heads, self.q_norm, self.k_norm, self.eps, cos, sin, T
        )  # (B,H,T,D), (B,Hk,T,D) ×2
        k, v = cache.append(k, v)  # (B,Hk,S,D) ×2
        y = attend(q, k, v)  # (B,H,T,D)
        y = y.transpose(1, 2).reshape(B * T, -1)  # (B·T,H·D)
        rows = rows + F.linear(y, self.o, self.o_bias)
        y = kernels.rms_norm(rows, self.mlp_norm, self.eps)
        return (rows + self.mlp(y)).view(B, T, C)

    def mlp(self, y: Tensor) -> Tensor:
        """(N,C) → (N,C): SwiGLU."""
        return F.linear(kernels.swiglu(F.linear(y, self.gate_up)), self.down)

    def step(self, x: Tensor, new: Tensor | None, *where: Any) -> Tensor:
        """One token per row. x (B,C): the residual stream, which is overwritten.

        new: the output (B,C) of the previous layer's MLP, which is added to x first, or None.
        Returns the output (B,C) of this layer's MLP. Keys and values are written to the cache.
        `where`: the arguments of `attention`.
        """
        y = kernels.rms_norm(x, self.norm, self.eps, add=new)
        y = self.attention(F.linear(y, self.qkv, self.qkv_bias), *where)
        new = F.linear(y, self.o, self.o_bias)  # (B,C)
        y = kernels.rms_norm(x, self.mlp_norm, self.eps, add=new)
        return self.mlp(y)

    def step_of_few(self, x: Tensor, *where: Any) -> None:
        """`step` for few rows, with norm and residual inside the products; adds everything to x.

        With few rows, kernel launches and reads take most of the time. This has fewer launches.
        """
        y = product(x, self.qkv, self.qkv_bias, norm=(self.norm, self.eps))  # (B,(H+2Hk)·D)
        y = self.attention(y, *where)
        product(y, self.o, self.o_bias, add=x, out=x)
        y = product(x, self.gate_up, norm=(self.mlp_norm, self.eps), swiglu=True)  # (B,I)
        product(y, self.down, add=x, out=x)

    def attention(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, places: Tensor, layer: int, lengths: Tensor
    ) -> Tensor:
        """qkv (B,(H+2Hk)·D) of one token per row → (B,H·D). First writes k and v to the pages."""
        norms = self.q_norm, self.k_norm, self.eps
        q = kernels.split_heads_into_pages(
            qkv, self.heads, *norms, cos, sin, places, layer, lengths
        )  # (B,H,D)
        _, Hk, _ = self.heads
        splits = splits_for(len(q), Hk, self.processors)
        return paged_attention(q, places, layer, lengths, splits, Hk).flatten(1)


class GpuTransformer(Transformer):
    """The plain model, with decode steps as recordings if every module and the cache allow it."""

    weights: str

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,  # type: ignore[override]  # it reads pages too
        start_pos: Any,
        attend: Attend,
    ) -> Tensor:
        """As Transformer.forward; `start_pos` an int, or (B,) int64."""
        kinds = nn.Embedding, RMSNorm, Block
        if tokens.shape[1] == 1 and is_one_call(self, kinds, cache, attend):
            self.check(cache, start_pos)
            pages = type(cache).pages(cache, self.token_like(len(tokens)))
            if pages is not None:  # otherwise the cache is unchanged
                with on(tokens.device):
                    hidden = self.steps(tokens[:, 0], start_pos, pages)  # (B,C)
                return hidden[:, None]  # (B,1,C)
        return super().forward(tokens, cache, start_pos, attend)

    @functools.cached_property
    def steps(self) -> Steps:
        """The recordings of this model."""
        return Steps(self.step, len(self.layers), self.device)

    @functools.cached_property
    def speeds(self) -> tuple[Tensor, float]:
        """(D/2,) radians per position, and the factor of cos and sin."""
        return rope_frequencies(self.config, self.device)

    def prepare(self, rows: int) -> None:
        """Record the steps of up to `rows` rows now, so that no answer has to wait for it.

        This takes seconds, plus the compile time of the kernels on their first use on a machine.
        """
        for size in SIZES:
            cache = make_cache("static", self.config, size, 1)
            decode(self, torch.zeros(size, 1, dtype=torch.int64), cache, 0)
            if size >= rows:
                return

    def step(self, tokens: Tensor, positions: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        """The step to record: tokens (B,) at positions (B,) → hidden states (B,C).

        places (L,8) and lengths (L,B): see kernels.py.
        """
        x = self.embed_tokens(tokens)  # (B,C)
        cos, sin = turned(*self.speeds, positions, x.dtype)  # (B,D) ×2
        blocks: list[Any] = list(self.layers)
        if len(x) <= MOST_ROWS:
            for layer, block in enumerate(blocks):
                block.step_of_few(x, cos, sin, places, layer, lengths)
            return kernels.rms_norm(x, self.norm.weight, self.norm.eps)
        new = None
        for layer, block in enumerate(blocks):
            new = block.step(x, new, cos, sin, places, layer, lengths)
        return kernels.rms_norm(x, self.norm.weight, self.norm.eps, add=new)

    # Called by .to(), .half() and the like.
    def _apply(
        self, function: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "GpuTransformer":
        self.forget()
        return super()._apply(function, recurse)

    def __getstate__(self) -> Any:  # for copy and pickle
        self.forget()
        return super().__getstate__()

    def forget(self) -> None:
        """Drop the recordings, which contain addresses of tensors."""
        for name in ("steps", "speeds", "likes"):
            self.__dict__.pop(name, None)

    def token_like(self, rows: int) -> Tensor:
        """(B,Hk,1,D): shape, dtype and device of the keys of one token per row."""
        if rows not in self.likes:
            config = self.config
            weight = self.embed_tokens.weight
            like = weight.new_empty(1, config.num_key_value_heads, 1, config.head_dim)
            self.likes[rows] = like.expand(rows, -1, -1, -1)
        return self.likes[rows]

    @functools.cached_property
    def likes(self) -> dict[int, torch.Tensor]:
        """Number of rows → its `token_like`."""
        return {}


def processors_of(device: torch.device) -> int:
    """The number of multiprocessors of this GPU; for other devices, that of an H100."""
    if device.type != "cuda":
        return PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def recorded(model: Transformer) -> GpuTransformer:
    """A model with recorded decode steps. The weights of `model` become views of its fused ones."""
    check_dense(model.config)
    fast = cast(GpuTransformer, skeleton(model.config, GpuTransformer))
    fast.embed_tokens = sharing(model.embed_tokens)
    fast.norm = sharing(model.norm)
    fast.lm_head = sharing(model.lm_head)
    if model.lm_head.weight is model.embed_tokens.weight:
        fast.lm_head.weight = fast.embed_tokens.weight
    plain: list[Any] = list(model.layers)
    fast.layers = nn.ModuleList(Block(layer, model.config) for layer in plain)
    fast.generation_config = model.generation_config
    fast.weights = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    return fast.eval()


def sharing(module: M) -> M:
    """A module of the same class over the same memory. `.to()` of one does not change the other."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    for name, own in module._parameters.items():
        if own is not None:
            twin._parameters[name] = nn.Parameter(own.detach(), requires_grad=False)
    return twin
