"""The fast model for a CPU: the same model with blocks that decode at the speed of the memory.

Changes, in order of gain: a row of activations goes through kernels that read every weight once,
in its stored format. Keys and values are read once, in place. q, k and v are one product, and so
are gate and up. Activations and logits are fp32, so the fast model rounds less often than the
plain bf16 model. Prefill uses the kernels' products for few rows and torch's for many, over the
same fused weights.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanokv.attention import Attend, Causal, Decode, row_blocks
from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import Pages, reserve_of
from nanokv.cache.packed import Packed
from nanokv.config import Config
from nanokv.errors import CacheError
from nanokv.fast import choice, native
from nanokv.fast.checks import is_one_call, is_one_packed_call, sees_its_row
from nanokv.fast.fusing import fused
from nanokv.fast.weights import Addressed, MakeMatrix, Matrix, formats
from nanokv.inference import Position
from nanokv.model import MLP, Transformer
from nanokv.model import Block as PlainBlock
from nanokv.rope import apply_rope, rope_frequencies

Rope = tuple[Tensor, Tensor]  # cos, sin
# The dtype of activations between products, and the product of a matrix with them.
Way = tuple[torch.dtype, Callable[[Matrix, Tensor], Tensor]]


class Layer(Addressed):
    """One layer of the plain model over fused weights: attention, then what a subclass has as MLP.

    `norms`: the weights, or None, of "norm", "q_norm", "k_norm" and "mlp_norm".
    """

    norm: Tensor
    q_norm: Tensor | None  # not every family norms q and k
    k_norm: Tensor | None
    mlp_norm: Tensor

    def __init__(self, config: Config, qkv: Matrix, o: Matrix, norms: dict[str, Tensor | None]):
        super().__init__()
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps = config.rms_norm_eps
        self.dtype = qkv.dtype  # of cached keys and values
        _, Hk, D = self.heads
        # Shape and dtype of the keys that one token adds to a cache.
        self.like = torch.empty(1, Hk, 1, D, dtype=self.dtype, device="cpu")
        self.qkv = qkv
        self.o = o
        for name, weight in norms.items():
            if weight is not None:
                weight = weight.detach().float().contiguous()
            self.register_buffer(name, weight)

    def matrices(self) -> list[Matrix]:
        """The matrices with which every token is multiplied."""
        return [self.qkv, self.o]

    def one_token(
        self, kernels: ctypes.CDLL, x: Tensor, rope: Rope, cache: LayerCache, attend: Decode
    ) -> Tensor | None:
        """One token per row, in kernels of its own; None if there are none, and x is unchanged."""
        return None

    def add_mlp(self, kernels: ctypes.CDLL, x: Tensor, way: Way) -> None:
        """Add the MLP of x (B,T,C) to x, by kernels."""
        raise NotImplementedError

    def mlp_path(self, x: Tensor) -> Tensor:
        """The MLP by torch: x (B,T,C), which is normed, → (B,T,C)."""
        raise NotImplementedError

    @property
    def most_rows(self) -> int:
        """The most rows of activations for the kernels' products."""
        return min(matrix.most_rows for matrix in self.matrices())

    def forward(self, x: Tensor, rope: Rope, cache: LayerCache, attend: Attend) -> Tensor:
        """x (B,T,C) fp32 → (B,T,C)."""
        kernels = None
        if x.device.type == "cpu":
            kernels = native.kernels()
        if kernels is None:
            return self.torch_path(x, rope, cache, attend)
        if x.shape[1] == 1 and sees_its_row(attend, cache):
            y = self.one_token(kernels, x, rope, cache, attend)
            if y is not None:
                return y
        # `many` overwrites its input, and a hook may have kept x: pass a copy.
        own = x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return self.many(kernels, own, rope, cache, attend)

    def many(
        self, kernels: ctypes.CDLL, x: Tensor, rope: Rope, cache: LayerCache, attend: Attend
    ) -> Tensor:
        """Any number of tokens; overwrites x.

        The products are the kernels' or torch's, whichever is faster for this number of rows.
        Everything between them is done by kernels. Activations between torch's products have the
        weights' dtype, between the kernels' products fp32.
        """
        way = self.qkv.product_dtype, many_rows
        if x.shape[0] * x.shape[1] <= self.most_rows:
            way = torch.float32, few_rows
        self.add_attention(kernels, x, rope, cache, attend, way)
        self.add_mlp(kernels, x, way)
        return x

    def add_attention(
        self,
        kernels: ctypes.CDLL,
        x: Tensor,
        rope: Rope,
        cache: LayerCache,
        attend: Attend,
        way: Way,
    ) -> None:
        """Add the attention of x (B,T,C) to x."""
        dtype, product = way
        B, T, _ = x.shape
        H, Hk, D = self.heads
        form = native.FORMATS[dtype]
        qkv = product(self.qkv, self.rows_normed(kernels, x, self.norm, dtype))  # (B,T,(H+2Hk)·D)
        q, k, v = (x.new_empty(B, heads, T, D, dtype=self.dtype) for heads in (H, Hk, Hk))
        cos, sin = (angle.contiguous() for angle in rope)
        norms = native.pointer(self.q_norm), native.pointer(self.k_norm), self.eps
        angles = cos.data_ptr(), sin.data_ptr(), stride(cos, B, T * D)
        outputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
        formats = form, native.FORMATS[self.dtype]
        kernels.split_rows(qkv.data_ptr(), B, T, H, Hk, D, *norms, *angles, *outputs, *formats)
        y = self.attended(kernels, attend, q, *cache.append(k, v))  # (B,H,T,D)
        y = product(self.o, y.transpose(1, 2).reshape(B, T, H * D))  # (B,T,C)
        kernels.add_rows(x.data_ptr(), y.data_ptr(), x.numel(), form)

    def rows_normed(
        self, kernels: ctypes.CDLL, x: Tensor, weight: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """RMSNorm by a kernel: (B,T,C) fp32 → (B,T,C) in `dtype`."""
        B, T, C = x.shape
        y = torch.empty_like(x, dtype=dtype)
        norm = weight.data_ptr(), self.eps
        kernels.norm_rows(y.data_ptr(), x.data_ptr(), B * T, C, *norm, native.FORMATS[dtype])
        return y

    def attended(
        self, kernels: ctypes.CDLL, attend: Attend, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D). Packed sequences are attended to one by one.

        The kernel computes causal attention in bf16; everything else is left to `attend`.
        """
        if type(attend) is Packed:
            parts = [(T, functools.partial(self.attended, kernels, own)) for T, own in attend.parts]
            return Packed(parts)(q, k, v)
        if type(attend) is not Causal or q.dtype != torch.bfloat16:
            return attend(q, k, v)
        _, H, T, D = q.shape
        Hk, S = k.shape[1:3]
        strides = k.stride()
        if H % Hk or not kernels.has_flash(D):
            return attend(q, k, v)
        if strides != v.stride() or strides[2:] != (D, 1) or not alike(q[:, :Hk], k, v):
            return attend(q, k, v)
        attend.check(T, S)
        if T < choice.LONG or not native.has_tiles(kernels):
            return flash(kernels, q, k, v)
        # torch's attention uses matrix tiles too, and may be faster.
        ways = functools.partial(flash, kernels), Causal()
        chosen = choice.attention().pick(ways, q, k, v)
        return ways[chosen](q, k, v)

    def torch_path(self, x: Tensor, rope: Rope, cache: LayerCache, attend: Attend) -> Tensor:
        """The layer without kernels: any number of tokens, any mask, any device.

        Norms are in fp32, products and attention in the weights' dtype.
        """
        B, T, _ = x.shape
        H, Hk, D = self.heads
        qkv = self.qkv(self.normed(x, self.norm)).view(B, T, H + 2 * Hk, D)  # (B,T,H+2Hk,D)
        q, k, v = qkv.split((H, Hk, Hk), dim=2)
        q = self.normed(q, self.q_norm).transpose(1, 2)  # (B,H,T,D)
        k = self.normed(k, self.k_norm).transpose(1, 2)  # (B,Hk,T,D)
        q = apply_rope(q, rope)
        k = apply_rope(k, rope)
        k, v = cache.append(k.to(self.dtype), v.transpose(1, 2).to(self.dtype))  # (B,Hk,S,D) ×2
        return self.rest(x, attend(q.to(self.dtype), k, v))

    def rest(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer after attention, by torch: x (B,T,C), y (B,H,T,D) → (B,T,C)."""
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp_path(self.normed(x, self.mlp_norm))

    def normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMSNorm of x, or x itself if the family has no such norm."""
        if weight is None:
            return x
        return F.rms_norm(x, weight.shape, weight, self.eps)


class Block(Layer):
    """A layer with a dense MLP, whose decode step is one kernel call."""

    def __init__(
        self,
        config: Config,
        qkv: Matrix,
        o: Matrix,
        gate_up: Matrix,
        down: Matrix,
        norms: dict[str, Tensor | None],
    ):
        super().__init__(config, qkv, o, norms)
        self.gate_up = gate_up
        self.down = down

    @classmethod
    def of(cls, plain: PlainBlock, config: Config, make_matrix: MakeMatrix) -> "Block":
        """The layer of a plain model, with the weights of q, k and v and of gate and up fused."""
        attention = plain.self_attn
        mlp = cast(MLP, plain.mlp)  # check_plain has checked the class
        norms = {
            "norm": plain.input_layernorm,
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
            "mlp_norm": plain.post_attention_layernorm,
        }
        return cls(
            config,
            make_matrix(*fused(attention.q_proj, attention.k_proj, attention.v_proj)),
            make_matrix(attention.o_proj.weight, attention.o_proj.bias),
            make_matrix(*fused(mlp.gate_proj, mlp.up_proj)),
            make_matrix(mlp.down_proj.weight),
            {name: getattr(norm, "weight", None) for name, norm in norms.items()},
        )

    @functools.cached_property
    def struct(self) -> native.Layer:
        """The layer as the kernels read it, made once."""
        matrices = (matrix.struct for matrix in self.matrices())
        norms = map(native.pointer, (self.norm, self.q_norm, self.k_norm, self.mlp_norm))
        return native.Layer(*matrices, *norms, *self.heads, self.eps, native.FORMATS[self.dtype])

    def matrices(self) -> list[Matrix]:
        return [self.qkv, self.o, self.gate_up, self.down]

    def one_token(
        self, kernels: ctypes.CDLL, x: Tensor, rope: Rope, cache: LayerCache, attend: Decode
    ) -> Tensor | None:
        reserve = reserve_of(cache)
        pages = None
        if reserve is not None:
            pages = reserve(cache, self.token_like(len(x)))
        if pages is not None:
            return self.step(kernels, x, rope, pages)
        if attend.mask is None:
            return self.step_around(kernels, x, rope, cache)
        return None

    def token_like(self, rows: int) -> Tensor:
        """(B,Hk,1,D): the shape and dtype of the keys that one token per row adds to a cache."""
        if rows == 1:
            return self.like
        return self.like.expand(rows, -1, -1, -1)

    def step(self, kernels: ctypes.CDLL, x: Tensor, rope: Rope, pages: Pages) -> Tensor:
        """One token per row; overwrites x. The kernel writes k and v into the pages."""
        B = x.shape[0]
        cos, sin = rope
        angles = cos.data_ptr(), sin.data_ptr(), stride(cos, B, self.heads[2])
        layers = native.addresses([self.struct])
        places = native.addresses([native.pages_struct(pages)])
        kernels.steps(layers, 1, x.data_ptr(), B, *angles, places)
        return x

    def step_around(self, kernels: ctypes.CDLL, x: Tensor, rope: Rope, cache: LayerCache) -> Tensor:
        """One token per row; overwrites x. Two kernels, with the cache's `append` between them."""
        B = x.shape[0]
        cos, sin = rope
        H, Hk, D = self.heads
        layer = ctypes.byref(self.struct)
        angles = cos.data_ptr(), sin.data_ptr(), stride(cos, B, D)
        q = x.new_empty(B, H, D)
        k, v = x.new_empty(2, B, Hk, 1, D, dtype=self.dtype)
        outputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
        kernels.before_cache(layer, x.data_ptr(), B, *angles, *outputs)
        keys, values = cache.append(k, v)  # (B,Hk,S,D) ×2
        if not alike(k, keys, values):  # possible with a custom `append`
            return self.rest(x, Decode()(q[:, :, None].to(self.dtype), keys, values))
        lengths: Any = [keys.shape[2]] * B  # Pages makes a tensor of it
        pages = Pages(keys, values, lengths)
        where = ctypes.byref(native.pages_struct(pages))
        kernels.after_cache(layer, x.data_ptr(), B, q.data_ptr(), where)
        return x

    def add_mlp(self, kernels: ctypes.CDLL, x: Tensor, way: Way) -> None:
        dtype, product = way
        B, T, _ = x.shape
        form = native.FORMATS[dtype]
        both = product(self.gate_up, self.rows_normed(kernels, x, self.mlp_norm, dtype))  # (B,T,2I)
        hidden = both.new_empty(B, T, both.shape[-1] // 2)
        kernels.gate_rows(hidden.data_ptr(), both.data_ptr(), B * T, hidden.shape[-1], form)
        y = product(self.down, hidden)
        kernels.add_rows(x.data_ptr(), y.data_ptr(), x.numel(), form)

    def mlp_path(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B,T,I) ×2
        return self.down(F.silu(gate) * up)


def few_rows(matrix: Matrix, x: Tensor) -> Tensor:
    """The product by the kernels."""
    return matrix.forward(x)


def many_rows(matrix: Matrix, x: Tensor) -> Tensor:
    """The product by torch."""
    return matrix.product(x)


def flash(kernels: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal()(q, k, v) by the kernel, for bf16 tensors whose tokens are D values apart."""
    B, H, T, D = q.shape
    Hk, S = k.shape[1:3]
    strides = k.stride()[:2]
    parts = []
    for a, b in row_blocks(q, S):
        rows = q[:, :, a:b].contiguous()
        y = q.new_empty(B, b - a, H, D)
        inputs = rows.data_ptr(), k.data_ptr(), v.data_ptr()
        kernels.flash_attention(y.data_ptr(), *inputs, B, H, Hk, b - a, S - T + b, D, *strides)
        parts.append(y)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # (B,T,H,D)
    return whole.transpose(1, 2)


def stride(cos: Tensor, rows: int, each: int) -> int:
    """Distance in numbers between the angles of two rows; 0 if all rows share theirs.

    CacheError for any other size, because the kernels would read past the end of the tensor.
    """
    count = cos.numel()
    if count == each:
        return 0
    if count == rows * each:
        return each
    raise CacheError(
        f"start_pos has a position for each of {count // each} rows, and the tokens have {rows}",
        hint="give one for all rows, or one for each",
    )


def alike(new: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether keys and values (B,Hk,S,D) have the B, Hk, D and dtype of `new` (B,Hk,T,D).

    The kernels rely on it. torch broadcasts missing rows and heads, and raises for the rest.
    """
    B, Hk, _, D = new.shape
    expected = B, Hk, keys.shape[2], D
    if keys.shape != expected or values.shape != expected:
        return False
    return keys.dtype == values.dtype == new.dtype


class Embedding(nn.Module):
    """Looks up rows of the table and returns them in fp32. A tied head is the same matrix."""

    def __init__(self, table: Matrix):
        super().__init__()
        self.table = table
        self.num_embeddings = table.N

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table.rows(tokens)  # (B,T,C)


class Norm(Addressed):
    """The final norm, in fp32."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.register_buffer("weight", weight.detach().float().contiguous())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        kernels = None
        if x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous():
            kernels = native.kernels()
        if kernels is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        C = x.shape[-1]
        y = torch.empty_like(x)
        norm = self.weight.data_ptr(), self.eps
        kernels.norm_rows(
            y.data_ptr(), x.data_ptr(), x.numel() // C, C, *norm, native.FORMATS[x.dtype]
        )
        return y


class FastTransformer(Transformer):
    """The plain model with a faster forward.

    If every module and the cache allow it, a decode step is one kernel call from the embedding to
    the final norm. Otherwise the step runs module by module, which costs 10 to 50 µs of Python
    and torch per module: 0.1 of 0.5 ms in the bundled model, 1.5 of 10 ms in a model of 30 small
    layers.
    """

    # (config, (D,) radians per position, factor of cos and sin)
    speeds: tuple[Config, Tensor, float] | None = None

    def __init__(
        self,
        config: Config,
        table: Matrix,
        layers: Iterable[Layer],
        norm: Norm,
        head: Matrix,
        weights: str,
    ):
        """table (V,C), head (V,C), the same object if they are tied. `weights`: their formats."""
        super(Transformer, self).__init__()  # of the plain modules none is made
        own: Any = self  # its modules are of other classes
        self.config = config
        own.embed_tokens = Embedding(table)
        self.layers = nn.ModuleList(layers)
        own.norm = norm
        own.lm_head = head
        self.weights = weights
        self.eval()  # no module has parameters

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,  # type: ignore[override]  # it reads pages too
        start_pos: Any,
        attend: Attend,
    ) -> Tensor:
        """As Transformer.forward; `start_pos` an int, or (B,) int64."""
        norm = self.norm
        kernels = None
        if tokens.shape[1] == 1 and tokens.device.type == norm.weight.device.type == "cpu":
            kernels = native.kernels()
        if kernels is None or not self.in_one_call(tokens, cache, attend):
            return super().forward(tokens, cache, start_pos, attend)
        self.check(cache, start_pos)
        B = len(tokens)
        C = self.config.hidden_size
        D = self.config.head_dim
        cos, sin = self.angles(start_pos)  # (D,) or (B,D) ×2
        angles = cos.data_ptr(), sin.data_ptr(), stride(cos, B, D)
        blocks: list[Any] = list(self.layers)
        found = type(cache).pages(cache, blocks[0].token_like(B))
        if found is None:  # and the cache is unchanged
            return super().forward(tokens, cache, start_pos, attend)
        tokens = tokens.contiguous()
        x = tokens.new_empty(B, 1, C, dtype=torch.float32)
        layers = native.addresses([block.struct for block in blocks])
        pages = native.addresses([native.pages_struct(pages) for pages in found])
        table: Any = self.embed_tokens.table
        rows = ctypes.byref(table.struct), tokens.data_ptr()
        last = norm.weight.data_ptr(), norm.eps
        kernels.forward_step(*rows, layers, len(blocks), x.data_ptr(), B, *angles, pages, *last)
        return x

    def in_one_call(self, tokens: Tensor, cache: KVCache, attend: Attend) -> bool:
        """Whether one kernel call computes the same as this forward, and sooner."""
        if type(attend) is not Packed:
            return is_one_call(self, KINDS, cache, attend) and self.knows(tokens)
        if not is_one_packed_call(self, KINDS, cache, attend):
            return False
        return len(tokens) <= self.most_packed and self.knows(tokens)

    @property
    def most_packed(self) -> int:
        """The most rows of a packed forward that one kernel call computes; 0 without kernels.

        As many as the kernels' products are faster for (`Matrix.most_rows`): attention over pages
        gains at any length. Layer by layer, keys are gathered first. One call takes 0.34 to 0.50 of
        that time for 16 rows behind 16 to 1,900 tokens and 0.64 to 0.98 for 128 (bundled model in
        bf16, one thread, AVX-512); SmolLM2-135M 0.54 to 0.58 for 16.

        A call does at most 2³² multiplications with weights, so that Ctrl-C takes effect soon, but
        it has at least 32 rows, as in `Matrix.at_once`.
        """
        if self.norm.weight.device.type != "cpu" or native.kernels() is None:
            return 0
        first: Any = self.layers[0]  # the others are alike
        if type(first) is not Block:  # a layer of experts is no kernel call
            return 0
        weights = len(self.layers) * sum(matrix.N * matrix.K for matrix in first.matrices())
        return min(first.most_rows, max(32, 2**32 // weights))

    @property
    def any_threads(self) -> bool:
        """Whether a decode step of one row gives the same bits with any number of threads.

        A kernel computes each row of a matrix in one thread; torch does not, and attends in layers
        of experts.
        """
        if any(type(layer) is not Block for layer in self.layers):
            return False
        return self.norm.weight.device.type == "cpu" and native.kernels() is not None

    def knows(self, tokens: Tensor) -> bool:
        """Whether all ids are int64 and in the vocabulary. The kernels rely on it; torch raises."""
        if tokens.dtype != torch.int64:
            return False
        N = self.embed_tokens.num_embeddings
        return all(0 <= id < N for (id,) in tokens.tolist())

    def angles(self, start_pos: Position) -> Rope:
        """`rope_angles` of one position for all rows, (D,) ×2, or of one per row, (B,D) ×2.

        The radians per position are computed once per config.
        """
        if self.speeds is None or self.speeds[0] is not self.config:
            speed, scale = rope_frequencies(self.config, self.norm.weight.device)
            self.speeds = self.config, torch.cat((speed, speed)), scale
        _, speed, scale = self.speeds
        if type(start_pos) is not int:
            start_pos = torch.as_tensor(start_pos, device=speed.device)  # () or (B,)
            start_pos = start_pos[..., None].float()  # (1) or (B,1)
        angle = start_pos * speed
        cos = angle.cos()
        sin = angle.sin()
        if scale == 1:
            return cos, sin
        return cos * scale, sin * scale


# The classes of embedding, norm and layers; a replaced module is of another class.
KINDS = Embedding, Norm, Block


def fuse(model: Transformer, weights: str | None) -> FastTransformer:
    """The fast model that `optimize` returns for a CPU.

    ConfigError for a dtype or a format of weights that these blocks do not read.
    """
    weights, make_matrix, make_table = formats(model.dtype, weights)
    table = make_table(model.embed_tokens.weight)
    tied = model.lm_head.weight is model.embed_tokens.weight
    head = table if tied else make_table(model.lm_head.weight)
    plain: list[Any] = list(model.layers)
    layers = [Block.of(layer, model.config, make_matrix) for layer in plain]
    norm = Norm(model.norm.weight, model.norm.eps)
    fast = FastTransformer(model.config, table, layers, norm, head, weights)
    fast.generation_config = model.generation_config
    return fast
