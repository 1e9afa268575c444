"""The same model through torch.compile: every shape is static, so what was compiled once serves all positions.

    model = Compiled(plain, capacity=1024)
    for token in nanokv.generate(model, ids, cache=model.make_cache()): ...

What changes from call to call goes in as the values of tensors, never as a shape or a Python number: positions (T,),
and the whole slab of a static cache, (B,Hk,N,D), which is written at those positions and masked behind them. A prompt
is filled up to the next of a few widths by repeating its last token at its own position: the copies compute what that
token computes and write it to the same slot, so nothing else is written and nothing more is counted.

The price: every step reads all N slots of the slab, however few are in use. On a GPU the decode step is recorded once
as a CUDA graph and replayed: one launch for all layers. References: transformers' StaticCache, gpt-fast.
"""

import os
import shutil
import sys
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nanokv.attention import Attend, Causal, Decode, Masked
from nanokv.cache import KVCache, make_cache
from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import has_pages, reserve_of
from nanokv.config import Config
from nanokv.errors import CapacityError, ConfigError
from nanokv.fast import torch_ops
from nanokv.fast.weights import check_dense
from nanokv.model import Transformer
from nanokv.rope import rope_angles

KeysValues = tuple[Tensor, Tensor]  # the slabs of one layer, (B,Hk,N,D) each

# Tokens of a prefill: powers of two between these, unless asked otherwise.
NARROWEST = 16
WIDEST = 2048


class Slab:
    """What a block takes for its layer's cache: keys and values (B,Hk,N,D), written at `positions` (T,), read whole."""

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor):
        self.keys = keys
        self.values = values
        self.positions = positions

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(B,Hk,T,D) ×2 → (B,Hk,N,D) ×2: the slabs themselves, T slots of them new."""
        self.keys.index_copy_(2, self.positions, k)
        self.values.index_copy_(2, self.positions, v)
        return self.keys, self.values


@torch.compiler.nested_compile_region
def block(layer, x, rope, keys, values, positions, visible):
    """One layer; compiled once and called for each, or the compile time would grow with the number of layers."""
    attend: Attend = Masked(visible)
    if x.shape[1] == 1:
        attend = Decode(visible)
    return layer(x, rope, Slab(keys, values, positions), attend)


def hidden_states(
    model: Transformer, tokens: Tensor, positions: Tensor, slabs: Sequence[KeysValues]
) -> Tensor:
    """What is compiled: tokens (B,T) at positions (T,), one (keys, values) a layer → (B,T,C)."""
    x = model.embed_tokens(tokens)  # (B,T,C)
    rope = rope_angles(model.config, positions, x.dtype)  # cos, sin (T,D)
    slots = torch.arange(slabs[0][0].shape[2], device=tokens.device)  # (N,)
    visible = slots <= positions[:, None]  # (T,N)
    for layer, (keys, values) in zip(model.layers, slabs, strict=True):
        x = block(layer, x, rope, keys, values, positions, visible)
    return model.norm(x)


class Compiled(nn.Module):
    """A model for prefill, decode and generate, compiled for `batch_size` rows over a slab of `capacity` slots.

    Static caches of exactly that size, `make_cache()`, run compiled: one compile for decode and one for each width of
    `buckets` that is used (default: powers of two from 16 to 2,048), listed in `compiles`; a longer prompt goes in
    parts. All the rest (other caches or sizes, another attention, a wrong start_pos) goes to the plain model as it is,
    which runs it or says what is wrong. `backend` is torch.compile's. Raises ConfigError before anything is compiled.
    """

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        batch_size: int = 1,
        buckets: Sequence[int] | None = None,
        backend: str = "inductor",
    ):
        super().__init__()
        if buckets is None:
            buckets = [NARROWEST << i for i in range((WIDEST // NARROWEST).bit_length())]
        check_dense(model.config)
        check_sizes(model.config, capacity, batch_size, buckets)
        check_backend(backend, model.embed_tokens.weight.device)
        self.model = model
        self.capacity = capacity
        self.batch_size = batch_size
        self.backend = backend
        self.widths = sorted({1, *(min(width, capacity) for width in buckets)})  # 1 is decode
        # The width of each; one comes twice if the number of threads changes, say.
        self.compiles: list[int] = []
        self.regions = {width: self.region(width) for width in self.widths}
        # Layer of a cache → its keys, where unused slots are zero.
        self.cleared: MutableMapping[LayerCache, Tensor] = weakref.WeakKeyDictionary()
        # First layer of a cache → its decode step as a CUDA graph.
        self.recorded: MutableMapping[LayerCache, Recorded] = weakref.WeakKeyDictionary()

    config = property(lambda self: self.model.config)
    device = property(lambda self: self.model.device)
    embed_tokens = property(lambda self: self.model.embed_tokens)
    lm_head = property(lambda self: self.model.lm_head)
    generation_config = property(lambda self: self.model.generation_config)

    def __repr__(self) -> str:
        return f"<Compiled for {self.batch_size} × {self.capacity} tokens, {self.backend}; {self.device}>"

    def make_cache(self) -> KVCache:
        """An empty static cache of the size that was compiled for."""
        return make_cache("static", self.config, self.batch_size, self.capacity)

    def region(self, width: int) -> Callable[..., Tensor]:
        """hidden_states for prompts of `width` tokens, compiled at its first call; whole, or not at all."""

        def counted(graph, inputs):
            self.compiles.append(width)
            return torch._dynamo.lookup_backend(self.backend)(graph, inputs)

        return torch_ops.compile_alone(
            hidden_states, fullgraph=True, dynamic=False, backend=counted
        )

    def forward(self, tokens: Tensor, cache: KVCache, start_pos: int, attend: Attend) -> Tensor:
        """As Transformer.forward: tokens (B,T) → (B,T,C)."""
        slabs = None
        if self.takes(tokens, cache, start_pos, attend):
            slabs = self.slabs(cache)
        if slabs is None:
            return self.model(tokens, cache, start_pos, attend)
        with torch.inference_mode():
            parts = []
            for part in tokens.split(self.widths[-1], dim=1):  # (B,t)
                parts.append(self.run(part, start_pos, cache, slabs))
                start_pos += part.shape[1]
            # All at once, after the last write: a forward that failed leaves no trace.
            for layer in cache:
                layer.length = start_pos
            return torch.cat(parts, dim=1)  # (B,T,C)

    def takes(self, tokens: Tensor, cache: KVCache, start_pos: int, attend: Attend) -> bool:
        """Is this what was compiled for?"""
        if not has_pages(cache):
            return False
        if any(reserve_of(layer) is None for layer in cache):  # the caller's
            return False
        B, T = tokens.shape
        config = self.config
        sizes = cache.made.name, B, cache.capacity, len(cache), cache.config
        compiled = "static", self.batch_size, self.capacity, config.num_hidden_layers, config
        if sizes != compiled or cache.sizes.batch_size != B:
            return False
        if type(start_pos) is not int or start_pos != cache.length:
            return False
        return start_pos + T <= self.capacity and is_plain(attend, T, start_pos + T)

    @torch.inference_mode()
    def slabs(self, cache: KVCache) -> list[KeysValues] | None:
        """All slots of every layer, (keys, values) (B,Hk,N,D) each; None where nobody may see them.

        What is masked must be finite all the same: a weight of 0 times NaN is NaN. So slots that
        are not in use are cleared, once.
        """
        config = self.config
        length = cache.length
        like = self.embed_tokens.weight.new_empty(
            self.batch_size, config.num_key_value_heads, 1, config.head_dim
        )
        pages = type(cache).pages(cache, like)
        if pages is None:
            return None
        for layer, one in zip(cache, pages, strict=True):
            layer.length = length  # counted when all is written
            if self.cleared.get(layer) is not one.keys:
                one.keys[:, :, length:] = 0
                one.values[:, :, length:] = 0
                self.cleared[layer] = one.keys
        return [(one.keys, one.values) for one in pages]

    def run(
        self, tokens: Tensor, start_pos: int, cache: KVCache, slabs: list[KeysValues]
    ) -> Tensor:
        """tokens (B,T), T at most the widest → (B,T,C). The slabs are written; nothing is counted yet."""
        T = tokens.shape[1]
        width = next(width for width in self.widths if width >= T)
        positions = torch.arange(start_pos, start_pos + width, device=tokens.device)
        positions.clamp_(max=start_pos + T - 1)
        tokens = tokens[:, positions - start_pos]  # (B,width): the last one repeated
        if width == 1 and tokens.is_cuda:
            return self.replay(tokens, positions, cache[0], slabs)
        return self.regions[width](self.model, tokens, positions, slabs)[:, :T]

    def replay(
        self, tokens: Tensor, positions: Tensor, layer: LayerCache, slabs: list[KeysValues]
    ) -> Tensor:
        """The decode step of this cache as a recording; made anew when its slabs are others than last time."""
        recorded = self.recorded.get(layer)
        if recorded is None or recorded.slabs[0][0] is not slabs[0][0]:
            recorded = Recorded(partial(self.regions[1], self.model), tokens, positions, slabs)
            self.recorded[layer] = recorded
        return recorded(tokens, positions)


class Recorded:
    """A step with inputs and an output at addresses that never change, recorded once and replayed."""

    def __init__(
        self,
        step: Callable[..., Tensor],
        tokens: Tensor,
        positions: Tensor,
        slabs: list[KeysValues],
    ):
        self.tokens = tokens.clone()
        self.positions = positions.clone()
        self.slabs = slabs
        self.play, self.hidden = cuda_graph(
            lambda: step(self.tokens, self.positions, self.slabs), tokens.device
        )

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.play()
        return self.hidden.clone()  # the next step writes over it


def cuda_graph(
    step: Callable[[], Tensor], device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    """(function that replays what `step` launches on `device`, the tensor that it then has written).

    It runs before it is recorded, because the first call compiles. To repeat a decode step is harmless: it writes the
    same slot. Another thread may go on with the GPU meanwhile.
    """
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = step()
    return graph.replay, output


def is_plain(attend: Attend, T: int, S: int) -> bool:
    """Is it causal attention of T queries over all S keys, which is what the compiled region computes itself?"""
    if type(attend) is Decode:
        return T == 1 and attend.mask is None
    return type(attend) is Causal and attend.keys in (None, S)


def check_sizes(config: Config, capacity: int, batch_size: int, buckets: Sequence[int]) -> None:
    """Whole numbers ≥ 1, and no more slots than the model has positions."""
    sizes = [("capacity", capacity), ("batch_size", batch_size)]
    sizes += [("a bucket", width) for width in buckets]
    for name, value in sizes:
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}: a whole number ≥ 1 was expected")
    if not buckets:
        raise ConfigError("buckets is empty: prompts need at least one width")
    if capacity > config.max_position_embeddings:
        positions = config.max_position_embeddings
        raise CapacityError(
            f"capacity {capacity:,} is more than the model's {positions:,} positions"
        )


def check_backend(backend: str, device: torch.device) -> None:
    """torch.compile's default backend writes C++ for a CPU."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"backend {backend!r} is not one of {', '.join(known)}")
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX", usual)  # as inductor looks for it
    if backend == "inductor" and device.type == "cpu" and not shutil.which(compiler):
        raise ConfigError(
            f"torch.compile needs a C++ compiler, and there is no {compiler}",
            hint="install g++ or set CXX",
        )
