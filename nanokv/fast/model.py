"""The same model, caches and functions, with blocks whose decode step runs at the memory's speed: a CPU's.

What changes, in order of gain: one row of activations goes through kernels that read every weight once, in the format
it is stored in; keys and values are read once, where the cache keeps them; q, k and v are one product, gate and up are
another. Activations and logits are fp32, so sums are rounded less often than in the plain bf16 model, not more.
Prefill takes the kernels' products for few rows and torch's for many, over the same fused weights.
"""

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import nn

from nanokv.attention import Causal, Decode, row_blocks
from nanokv.cache.capabilities import Pages, reserve_of
from nanokv.cache.packed import Packed
from nanokv.errors import CacheError, ConfigError
from nanokv.fast import choice, native
from nanokv.fast.checks import is_one_call, sees_its_row
from nanokv.fast.fusing import fused
from nanokv.fast.weights import FORMATS, Addressed, Dense, Int8, Matrix
from nanokv.loading import skeleton
from nanokv.model import Transformer
from nanokv.rope import apply_rope, rope_frequencies


class Block(Addressed):
    """One layer of `plain`, two halves in one: attention and MLP, each with its norm, its weights fused."""

    def __init__(self, plain, config, make_matrix):
        super().__init__()
        attention, mlp = plain.self_attn, plain.mlp
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        # Dtype of cached keys and values.
        self.eps, self.dtype = config.rms_norm_eps, attention.q_proj.weight.dtype
        _, Hk, D = self.heads
        # What one token adds to a cache.
        self.like = torch.empty(1, Hk, 1, D, dtype=self.dtype, device="cpu")
        self.qkv = make_matrix(*fused(attention.q_proj, attention.k_proj, attention.v_proj))
        self.o = make_matrix(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_up = make_matrix(*fused(mlp.gate_proj, mlp.up_proj))
        self.down = make_matrix(mlp.down_proj.weight)
        norms = (
            plain.input_layernorm,
            attention.q_norm,
            attention.k_norm,
            plain.post_attention_layernorm,
        )
        for name, norm in zip(("norm", "q_norm", "k_norm", "mlp_norm"), norms, strict=True):
            weight = getattr(norm, "weight", None)  # not every family norms q and k
            self.register_buffer(
                name, None if weight is None else weight.detach().float().contiguous()
            )

    @functools.cached_property
    def struct(self):
        """The layer as the kernels take it; made once."""
        matrices = (matrix.struct for matrix in (self.qkv, self.o, self.gate_up, self.down))
        norms = map(native.pointer, (self.norm, self.q_norm, self.k_norm, self.mlp_norm))
        return native.Layer(*matrices, *norms, *self.heads, self.eps, native.FORMATS[self.dtype])

    def forward(self, x, rope, cache, attend):
        """x (B,T,C) fp32 → (B,T,C)."""
        kernels = native.kernels() if x.device.type == "cpu" else None
        if kernels and x.shape[1] == 1 and sees_its_row(attend, cache):
            like = self.token_like(len(x))
            reserve = reserve_of(cache)
            pages = None if reserve is None else reserve(cache, like)
            if pages is not None:
                return self.step(kernels, x, rope, pages)
            if attend.mask is None:
                return self.step_around(kernels, x, rope, cache)
        # A copy, which is written over: whoever kept x, a hook for one, still has what it was.
        if kernels:
            own = x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            return self.many(kernels, own, rope, cache, attend)
        return self.torch_path(x, rope, cache, attend)

    def token_like(self, rows: int):
        """(B,Hk,1,D): what one token per row adds to a cache, for its shape and dtype."""
        return self.like if rows == 1 else self.like.expand(rows, -1, -1, -1)

    def step(self, kernels, x, rope, pages):
        """One token per row; x is written over. The kernel writes k and v where the pages say."""
        struct, B, (cos, sin) = self.struct, x.shape[0], rope
        angles = cos.data_ptr(), sin.data_ptr(), stride(cos, B, self.heads[2])
        pointers = native.addresses([struct]), native.addresses([native.pages_struct(pages)])
        kernels.steps(pointers[0], 1, x.data_ptr(), B, *angles, pointers[1])
        return x

    def step_around(self, kernels, x, rope, cache):
        """One token per row; x is written over. `append` stands between two kernels."""
        B, (cos, sin), (H, Hk, D) = x.shape[0], rope, self.heads
        layer = ctypes.byref(self.struct)
        angles = cos.data_ptr(), sin.data_ptr(), stride(cos, B, D)
        q = x.new_empty(B, H, D)
        k, v = x.new_empty(2, B, Hk, 1, D, dtype=self.dtype)
        kernels.before_cache(
            layer, x.data_ptr(), B, *angles, q.data_ptr(), k.data_ptr(), v.data_ptr()
        )
        keys, values = cache.append(k, v)  # (B,Hk,S,D) ×2
        if not alike(k, keys, values):  # an `append` of the caller's own
            return self.rest(x, Decode()(q[:, :, None].to(self.dtype), keys, values))
        pages = Pages(keys, values, [keys.shape[2]] * B)
        kernels.after_cache(
            layer, x.data_ptr(), B, q.data_ptr(), ctypes.byref(native.pages_struct(pages))
        )
        return x

    def many(self, kernels, x, rope, cache, attend):
        """Any number of tokens: products by the kernels or by torch, whichever is faster for so many rows, and kernels
        for all that is between them; x is written over. Between torch's products stands the weights' dtype, between the
        kernels' fp32."""
        (B, T, _), (H, Hk, D) = x.shape, self.heads
        few = B * T <= min(
            matrix.most_rows for matrix in (self.qkv, self.o, self.gate_up, self.down)
        )
        dtype, product = (
            (torch.float32, Matrix.forward) if few else (self.qkv.product_dtype, Matrix.product)
        )
        q, k, v = (x.new_empty(B, heads, T, D, dtype=self.dtype) for heads in (H, Hk, Hk))
        (cos, sin), form = (angle.contiguous() for angle in rope), native.FORMATS[dtype]
        qkv = product(self.qkv, self.rows_normed(kernels, x, self.norm, dtype))  # (B,T,(H+2Hk)·D)
        kernels.split_rows(
            qkv.data_ptr(),
            B,
            T,
            H,
            Hk,
            D,
            native.pointer(self.q_norm),
            native.pointer(self.k_norm),
            self.eps,
            cos.data_ptr(),
            sin.data_ptr(),
            stride(cos, B, T * D),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            form,
            native.FORMATS[self.dtype],
        )
        y = self.attended(kernels, attend, q, *cache.append(k, v))  # (B,H,T,D)
        y = product(self.o, y.transpose(1, 2).reshape(B, T, H * D))  # (B,T,C)
        kernels.add_rows(x.data_ptr(), y.data_ptr(), x.numel(), form)
        both = product(self.gate_up, self.rows_normed(kernels, x, self.mlp_norm, dtype))  # (B,T,2I)
        hidden = both.new_empty(B, T, both.shape[-1] // 2)
        kernels.gate_rows(hidden.data_ptr(), both.data_ptr(), B * T, hidden.shape[-1], form)
        y = product(self.down, hidden)
        kernels.add_rows(x.data_ptr(), y.data_ptr(), x.numel(), form)
        return x

    def rows_normed(self, kernels, x, weight, dtype):
        """(B,T,C) fp32 → the same in `dtype`."""
        y, (B, T, C) = torch.empty_like(x, dtype=dtype), x.shape
        kernels.norm_rows(
            y.data_ptr(), x.data_ptr(), B * T, C, weight.data_ptr(), self.eps, native.FORMATS[dtype]
        )
        return y

    def attended(self, kernels, attend, q, k, v):
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D); of packed sequences each by itself."""
        if type(attend) is Packed:
            parts = [(T, functools.partial(self.attended, kernels, own)) for T, own in attend.parts]
            return Packed(parts)(q, k, v)
        if (
            type(attend) is not Causal
            or q.dtype != torch.bfloat16
            or not kernels.has_flash(q.shape[-1])
        ):
            return attend(q, k, v)
        (_, H, T, D), (Hk, S), strides = q.shape, k.shape[1:3], k.stride()
        if strides != v.stride() or strides[2:] != (D, 1) or H % Hk or not alike(q[:, :Hk], k, v):
            return attend(q, k, v)
        attend.check(T, S)
        # torch's attention uses matrix tiles too.
        ways = functools.partial(flash, kernels), Causal()
        measured = native.has_tiles(kernels) and T >= choice.LONG
        return ways[choice.attention().pick(ways, q, k, v) if measured else 0](q, k, v)

    def torch_path(self, x, rope, cache, attend):
        """Any number of tokens, any mask, any device; norms in fp32, products and attention in the weights' dtype."""
        (B, T, _), (H, Hk, D) = x.shape, self.heads
        qkv = self.qkv(self.normed(x, self.norm)).view(B, T, H + 2 * Hk, D)  # (B,T,H+2Hk,D)
        q, k, v = qkv.split((H, Hk, Hk), dim=2)
        q, k = self.normed(q, self.q_norm), self.normed(k, self.k_norm)
        q, k = (
            apply_rope(q.transpose(1, 2), rope),
            apply_rope(k.transpose(1, 2), rope),
        )  # (B,H,T,D), (B,Hk,T,D)
        k, v = cache.append(k.to(self.dtype), v.transpose(1, 2).to(self.dtype))  # (B,Hk,S,D) ×2
        return self.rest(x, attend(q.to(self.dtype), k, v))

    def rest(self, x, y):
        """What follows attention: x (B,T,C), y (B,H,T,D) → (B,T,C)."""
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.normed(x, self.mlp_norm)).chunk(2, dim=-1)  # (B,T,I) ×2
        return x + self.down(F.silu(gate) * up)

    def normed(self, x, weight):
        """As it is where the family has no such norm."""
        return x if weight is None else F.rms_norm(x, weight.shape, weight, self.eps)


def flash(kernels, q, k, v):
    """Causal()(q, k, v) by the kernel, for bf16 whose tokens lie D apart."""
    (B, H, T, D), (Hk, S), strides, parts = q.shape, k.shape[1:3], k.stride(), []
    for a, b in row_blocks(q, S):
        rows, y = q[:, :, a:b].contiguous(), q.new_empty(B, b - a, H, D)
        kernels.flash_attention(
            y.data_ptr(),
            rows.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            B,
            H,
            Hk,
            b - a,
            S - T + b,
            D,
            *strides[:2],
        )
        parts.append(y)
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).transpose(1, 2)


def stride(cos, rows: int, each: int) -> int:
    """Numbers between two rows' angles; 0 where all rows share theirs. Kernels would read behind the end of others."""
    if cos.numel() not in (each, rows * each):
        raise CacheError(
            f"start_pos has a position for each of {cos.numel() // each} rows, and the tokens have {rows}",
            hint="give one for all rows, or one for each",
        )
    return 0 if cos.numel() == each else each


def alike(new, keys, values) -> bool:
    """Are these (B,Hk,S,D) keys and values of the rows, heads and dtype of `new` (B,Hk,T,D)? Kernels take that on
    trust. torch repeats rows and heads that are missing, and refuses the rest."""
    B, Hk, S, D = *new.shape[:2], keys.shape[2], new.shape[3]
    return keys.shape == values.shape == (B, Hk, S, D) and keys.dtype == values.dtype == new.dtype


class Embedding(nn.Module):
    """Rows of the table, fp32; a tied head is the same matrix."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    @property
    def weight(self):
        return self.table.weight

    def forward(self, tokens):
        return self.table.rows(tokens)  # (B,T,C)


class Norm(Addressed):
    """The last norm, fp32."""

    def __init__(self, plain):
        super().__init__()
        self.register_buffer("weight", plain.weight.detach().float().contiguous())
        self.eps = plain.eps

    def forward(self, x):
        kernels = native.kernels() if x.device.type == "cpu" else None
        if kernels is None or x.dtype != torch.float32 or not x.is_contiguous():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        y, C = torch.empty_like(x), x.shape[-1]
        kernels.norm_rows(
            y.data_ptr(),
            x.data_ptr(),
            x.numel() // C,
            C,
            self.weight.data_ptr(),
            self.eps,
            native.FORMATS[x.dtype],
        )
        return y


class FastTransformer(Transformer):
    """The plain model's forward. A decode step is one call from the embedding to the last norm, where every module and
    the cache allow it. From module to module Python and torch take 10 to 50 µs each: 0.1 of the 0.5 ms of the bundled
    model, 1.5 of the 10 ms of a model of 30 small layers."""

    speeds: tuple | None = None  # (config, (D,) radians per position, factor of cos and sin)

    def forward(self, tokens, cache, start_pos, attend):
        norm = self.norm
        on_cpu = tokens.device.type == norm.weight.device.type == "cpu"
        kernels = native.kernels() if on_cpu and tokens.shape[1] == 1 else None
        if not kernels or not is_one_call(self, KINDS, cache, attend) or not self.knows(tokens):
            return super().forward(tokens, cache, start_pos, attend)
        self.check(cache, start_pos)
        B, C, D = len(tokens), self.config.hidden_size, self.config.head_dim
        cos, sin = self.angles(start_pos)  # (D,) or (B,D) ×2
        angles = cos.data_ptr(), sin.data_ptr(), stride(cos, B, D)
        blocks = list(self.layers)
        found = type(cache).pages(cache, blocks[0].token_like(B))
        if found is None:  # nothing has changed so far
            return super().forward(tokens, cache, start_pos, attend)
        tokens, x = tokens.contiguous(), tokens.new_empty(B, 1, C, dtype=torch.float32)
        layers = native.addresses([block.struct for block in blocks])
        pages = native.addresses([native.pages_struct(pages) for pages in found])
        rows = ctypes.byref(self.embed_tokens.table.struct), tokens.data_ptr()
        last = norm.weight.data_ptr(), norm.eps
        kernels.forward_step(*rows, layers, len(blocks), x.data_ptr(), B, *angles, pages, *last)
        return x

    @property
    def any_threads(self) -> bool:
        """Does a decode step of one row give the same bits in any number of threads? A kernel computes each row of a
        matrix in one thread; torch does not."""
        return self.norm.weight.device.type == "cpu" and native.kernels() is not None

    def knows(self, tokens) -> bool:
        """Are these ids of its vocabulary? Kernels take that on trust; torch refuses what is not."""
        return tokens.dtype == torch.int64 and all(
            0 <= id < self.embed_tokens.table.N for (id,) in tokens.tolist()
        )

    def angles(self, start_pos):
        """`rope_angles` of one position for all rows, (D,) ×2, or of one for each, (B,D) ×2. The speeds are kept."""
        if self.speeds is None or self.speeds[0] is not self.config:
            speed, scale = rope_frequencies(self.config, self.norm.weight.device)
            self.speeds = self.config, torch.cat((speed, speed)), scale
        _, speed, scale = self.speeds
        if type(start_pos) is not int:
            start_pos = torch.as_tensor(start_pos, device=speed.device)  # () or (B,)
            start_pos = start_pos[..., None].float()  # (1) or (B,1)
        angle = start_pos * speed
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


# Of embedding, norm and layers, where nobody has put another in their place.
KINDS = Embedding, Norm, Block


def fuse(model: Transformer, weights: str | None) -> FastTransformer:
    """What `optimize` gives for a CPU; ConfigError for weights in another format than these blocks read."""
    dtype = model.embed_tokens.weight.dtype
    own = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    name = str(dtype).removeprefix("torch.")
    if dtype not in own:
        raise ConfigError(
            f"there are no kernels for a model in {name}", hint="load it in bfloat16 or float32"
        )
    weights = own[dtype] if weights is None else weights
    known = own[dtype], "int8", "int4"
    if weights not in known:
        raise ConfigError(
            f"weights={weights!r} is not a format for a model in {name}",
            hint=f"one of: {', '.join(known)}; load the model in another dtype for the rest",
        )
    make_matrix = FORMATS[weights]
    fast = skeleton(model.config, FastTransformer)
    make_table = Int8 if weights in ("int8", "int4") else Dense
    table = make_table(model.embed_tokens.weight)
    tied = model.lm_head.weight is model.embed_tokens.weight
    fast.embed_tokens, fast.norm = Embedding(table), Norm(model.norm)
    fast.lm_head = table if tied else make_table(model.lm_head.weight)
    fast.layers = nn.ModuleList(Block(layer, model.config, make_matrix) for layer in model.layers)
    fast.generation_config, fast.weights = model.generation_config, weights
    return fast.requires_grad_(False).eval()
