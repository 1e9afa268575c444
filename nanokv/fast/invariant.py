"""batch_invariant(model): a fast model that gives a row the same bits alone and in any company.

The fast model adds in the order that is fastest for the number of rows: one row of bf16 weights has
other sums than eight, and a prompt has torch's. Sums of floats depend on their order, so a row's
logits depend on who else is in the batch, and a near tie between two tokens falls the other way.
Here every token is a row, and every row has one order:

    products    FIXED in kernels/products.h, for any number of rows
    attention   a task per row, over 256 keys at a time, in runs of 16
    rotation    angles from a table, which is made in equal parts
    the rest    norms, gates and sums of one row never meet another row

So the logits do not depend on the batch, on its order, on chunks of the prompt, on pages reused, or
on the number of threads. They do depend on the kernels: another processor adds in another order.
The price is in docs/batch-invariance.md.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nanokv.attention import Attend, Causal, Decode
from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import Pages, has_pages, reserve_of
from nanokv.cache.packed import Packed
from nanokv.config import Config
from nanokv.errors import CacheError, ConfigError
from nanokv.fast import native
from nanokv.fast.checks import is_whole, sees_its_row, sees_its_sequence
from nanokv.fast.model import KINDS, Block, FastTransformer, Norm, Rope
from nanokv.fast.weights import Addressed, Matrix
from nanokv.inference import Position
from nanokv.model import Transformer
from nanokv.rope import rope_frequencies, turned

RUN = 16  # tokens that attention reads at once: FIXED_RUN of kernels/decode.cpp
ROWS = 64  # of a kernel call: their activations fit into the second-level cache
POSITIONS = 256  # of a part of the table of angles


def batch_invariant(model: Transformer) -> "InvariantTransformer":
    """The same model, over the same weights, whose rows do not depend on other rows.

    Takes a model from `optimize`, or one with the blocks of a GGUF file. Logits (torch.equal) are
    the same for any batch, chunk, page reuse and number of threads, with the caches that return
    every key as it was appended: all but "quantized", "sliding" and "evicting". Rows of different
    lengths need pages. Another processor gives other bits.

    ConfigError for the plain model, whose products torch chooses by shape, and where there are no
    kernels: on a GPU, for experts, without a compiler.
    """
    if not isinstance(model, FastTransformer):
        raise ConfigError(
            f"{type(model).__name__} cannot be batch-invariant: "
            "torch chooses the order of its sums by the number of rows",
            hint="nanokv.batch_invariant(nanokv.optimize(model)), on a CPU",
        )
    if native.kernels() is None:
        raise ConfigError(
            f"batch invariance needs the native kernels, and this process has "
            f"{native.library()[1]}",
            hint="see nanokv env",
        )
    check_whole(model)
    return InvariantTransformer(model)


def check_whole(model: Transformer) -> None:
    """ConfigError unless the kernels compute every module of this model, on the CPU."""
    if model.norm.weight.device.type != "cpu":
        raise ConfigError(
            f"batch invariance is for CPUs, this model is on {model.norm.weight.device}",
            hint='load it with device="cpu"',
        )
    if not is_whole(model, KINDS):
        raise ConfigError(
            "batch invariance needs kernels for every module: this model has experts, hooks, or a "
            "module that was replaced",
            hint="remove the hooks, or use the model as it is",
        )


class Head(Addressed):
    """x (…,K) → logits (…,N), in one order for any number of rows."""

    def __init__(self, matrix: Matrix):
        super().__init__()
        self.matrix = matrix

    @property
    def weight(self) -> Tensor:
        return self.matrix.weight

    def forward(self, x: Tensor) -> Tensor:
        N, K = self.matrix.N, self.matrix.K
        struct = ctypes.byref(self.matrix.struct)
        rows = x.float().reshape(-1, K).contiguous()  # (M,K)
        y = rows.new_empty(len(rows), N)
        for first, end in blocks(len(rows), N * K):
            kernels().linear_fixed(address(y, first), address(rows, first), end - first, struct)
        return y.view(*x.shape[:-1], N)


class InvariantTransformer(FastTransformer):
    """The fast model with FIXED sums. Its tokens (B,T) are B·T rows of one token each."""

    angles_of: tuple[Config, Tensor, Tensor] | None = None  # cos and sin of each position, (n,D)

    def __init__(self, model: FastTransformer):
        """Shares the modules of `model`."""
        table: Any = model.embed_tokens.table
        head: Any = model.lm_head
        if isinstance(head, Head):  # of another InvariantTransformer
            head = head.matrix
        layers = cast(list[Block], list(model.layers))
        super().__init__(model.config, table, layers, cast(Norm, model.norm), head, model.weights)
        own: Any = self
        own.lm_head = Head(head)
        self.generation_config = model.generation_config

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,  # type: ignore[override]  # it reads pages too
        start_pos: Any,
        attend: Attend,
    ) -> Tensor:
        """As Transformer.forward. CacheError for a cache or a mask that one order cannot serve."""
        self.check(cache, start_pos)
        check_whole(self)
        check_runs(cache)
        B, T = tokens.shape
        if T == 1 and type(attend) is Causal:
            attend = Decode()
        positions = positions_of(start_pos, B, T)  # (N,) with N = B·T
        rope = self.angles_at(positions)  # (N,D) ×2
        x = self.embed_tokens(tokens)  # (B,T,C) fp32
        pages = None
        if T == 1 and reads_pages(cache, attend):
            pages = type(cache).pages(cache, self.blocks[0].token_like(B))
        if pages is not None:
            run_pages(self.blocks, x, rope, pages)
        else:
            check_seen(cache, attend)
            for block, layer in zip(self.blocks, cache, strict=True):
                run_layer(block, x, rope, layer, attend, positions)
        return self.norm(x)

    @property
    def blocks(self) -> list[Block]:
        """The layers, by the class that check_whole has found."""
        return cast(list[Block], list(self.layers))

    def angles_at(self, positions: Tensor) -> Rope:
        """cos and sin of positions (N,): (N,D) ×2.

        From a table that is made in equal parts, so that torch computes an angle in one way. It
        takes 8·D bytes per position up to the last.
        """
        if self.angles_of is None or self.angles_of[0] is not self.config:
            empty = torch.empty(0, self.config.head_dim)
            self.angles_of = self.config, empty, empty
        _, cos, sin = self.angles_of
        while len(cos) <= positions.max():
            part = torch.arange(len(cos), len(cos) + POSITIONS)
            speed, scale = rope_frequencies(self.config)
            more = turned(speed, scale, part, torch.float32)  # (POSITIONS,D) ×2
            cos, sin = torch.cat((cos, more[0])), torch.cat((sin, more[1]))
            self.angles_of = self.config, cos, sin
        return cos[positions], sin[positions]


def positions_of(start_pos: Position, B: int, T: int) -> Tensor:
    """(B·T,) int64: the position of each token; `start_pos` an int, or (B,)."""
    start = torch.as_tensor(start_pos)[..., None]  # (1,) or (B,1)
    return (start + torch.arange(T)).expand(B, T).reshape(-1)


def blocks(rows: int, weights: int) -> list[tuple[int, int]]:
    """(first, end) of the rows of each kernel call, which multiplies with so many weights.

    A call does at most 2³² multiplications, so that Ctrl-C takes effect soon, but has 32 rows.
    """
    step = min(ROWS, max(32, 2**32 // weights))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def weights_of(layers: Sequence[Block]) -> int:
    """The number of weights with which these layers multiply a token."""
    return sum(matrix.N * matrix.K for layer in layers for matrix in layer.matrices())


# --- over pages -----------------------------------------------------------------------------------


def reads_pages(cache: KVCache, attend: Attend) -> bool:
    """Whether the kernels may read this cache in place: each row sees its tokens and no others."""
    if not has_pages(cache):
        return False
    if type(attend) is Packed:
        return sees_its_sequence(attend, cache)
    return reserve_of(cache[0]) is not None and sees_its_row(attend, cache[0])


def run_pages(layers: Sequence[Block], x: Tensor, rope: Rope, pages: Sequence[Pages]) -> None:
    """All layers for rows with a slot in their pages; overwrites x (N,1,C).

    A long prompt goes through all layers in parts: a token needs no later one.
    """
    cos, sin = rope
    N, D = cos.shape
    parts = [(0, N)]
    if pages[0].sequence is not None:
        parts = blocks(N, weights_of(layers))
    structs = native.addresses([layer.struct for layer in layers])
    for first, end in parts:
        angles = address(cos, first), address(sin, first), D
        places = [rows_of(each, first) for each in pages]  # kept until the call returns
        kernels().steps_fixed(
            structs, len(layers), address(x, first), end - first, *angles, native.addresses(places)
        )


def rows_of(pages: Pages, first: int) -> native.Pages:
    """The struct of these pages, for the rows from `first` on."""
    struct = native.pages_struct(pages)
    if first == 0:
        return struct
    assert pages.sequence is not None
    rest = native.Pages.from_buffer_copy(struct)
    rest.lengths = address(pages.lengths, first)
    rest.sequence = address(pages.sequence, first)
    return rest


# --- around the cache's append --------------------------------------------------------------------


def run_layer(
    layer: Block, x: Tensor, rope: Rope, cache: LayerCache, attend: Attend, positions: Tensor
) -> None:
    """One layer; overwrites x (B,T,C). positions (N,) with N = B·T."""
    B, T, _ = x.shape
    H, Hk, D = layer.heads
    N = B * T
    cos, sin = rope
    struct = ctypes.byref(layer.struct)
    rows = x.view(N, -1)  # (N,C)
    q = x.new_empty(N, H, D)
    k, v = x.new_empty(2, N, Hk, D, dtype=layer.dtype)
    for first, end in blocks(N, weights_of([layer])):
        angles = address(cos, first), address(sin, first), D
        outputs = address(q, first), address(k, first), address(v, first)
        kernels().before_cache_fixed(struct, address(rows, first), end - first, *angles, *outputs)
    k, v = (new.view(B, T, Hk, D).transpose(1, 2) for new in (k, v))  # (B,Hk,T,D) ×2
    first = 0
    for count, keys, values in groups(N, attend, *cache.append(k, v)):  # (b,Hk,S,D) ×2
        seen = positions[first : first + count].int() + 1  # (count,)
        check_keys(k, keys, values, int(seen.max()))
        sequence = torch.arange(len(keys), dtype=torch.int32).repeat_interleave(count // len(keys))
        places = Pages(keys, values, seen, sequence=sequence)
        for a, b in blocks(count, weights_of([layer])):
            at = first + a
            pages = ctypes.byref(rows_of(places, a))
            kernels().after_cache_fixed(struct, address(rows, at), b - a, address(q, at), pages)
        first += count


def groups(N: int, attend: Attend, keys: Any, values: Any) -> list[tuple[int, Tensor, Tensor]]:
    """(rows, keys, values) of all N rows, or of each sequence of a packed forward."""
    if type(attend) is not Packed:
        return [(N, keys, values)]
    counts = [count for count, _ in attend.parts]
    return list(zip(counts, keys, values, strict=True))


def address(tensor: Tensor, first: int) -> int:
    """Of row `first` of a contiguous tensor."""
    return tensor.data_ptr() + first * tensor.stride(0) * tensor.element_size()


def kernels() -> ctypes.CDLL:
    """The kernels, which batch_invariant has found."""
    found = native.kernels()
    assert found is not None
    return found


# --- what one order cannot serve ------------------------------------------------------------------


def check_runs(cache: KVCache) -> None:
    """CacheError for pages that attention cannot read in runs of 16 tokens."""
    size = cache.page_size
    if size is not None and size % RUN:
        raise CacheError(
            f"pages of {size} tokens: batch invariance reads keys {RUN} at a time",
            hint=f"a page size that is a multiple of {RUN}",
        )


def check_seen(cache: KVCache, attend: Attend) -> None:
    """CacheError unless the cache returns every key, and each query sees its past and itself."""
    if not all(layer.lossless for layer in cache):
        raise CacheError(
            f"the {cache.made.name} cache changes or drops keys, at times that depend on the chunk: "
            "it is not batch-invariant",
            hint="the growing, static, paged, prefix, dict and offloaded caches are",
        )
    parts = [own for _, own in attend.parts] if type(attend) is Packed else [attend]
    for own in parts:
        if type(own) is not Causal and not (type(own) is Decode and own.mask is None):
            raise CacheError(
                "batch invariance has no mask: rows of different lengths need pages",
                hint='make_cache("batch", config, B, of="paged"), generate_ragged or the Engine',
            )


def check_keys(new: Tensor, keys: Tensor, values: Tensor, count: int) -> None:
    """CacheError unless an append of `new` (B,Hk,T,D) returned `count` keys of its kind."""
    _, Hk, _, D = new.shape
    for name, found in ("keys", keys), ("values", values):
        expected = len(keys), Hk, count, D
        if found.shape != expected or found.dtype != new.dtype:
            raise CacheError(
                f"batch invariance needs {name} {expected} in {new.dtype}, the cache returned "
                f"{tuple(found.shape)} in {found.dtype}"
            )
