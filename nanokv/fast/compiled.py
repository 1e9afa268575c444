"""The plain model through torch.compile with static shapes: one compilation serves all positions.

    model = Compiled(plain, capacity=1024)
    for token in nanokv.generate(model, ids, cache=model.make_cache()): ...

Everything that changes between calls is passed as tensor values, never as a shape or a Python
number: the positions (T,) and the whole slabs (B,Hk,N,D) of a static cache. The new keys and values
are written at these positions, and later slots are masked. A prompt is padded to the next of a few
widths by repeating its last token at the same position. The copies compute the same values as that
token and write them to the same slot, so the padding changes nothing in the cache.

The cost: every step reads all N slots of the slabs, however few are in use. On a GPU the decode
step is recorded as a CUDA graph and replayed, one launch for all layers. References:
transformers' StaticCache, gpt-fast.
"""

import os
import shutil
import sys
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

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

# Default widths of a prefill in tokens: the powers of two between these.
NARROWEST = 16
WIDEST = 2048


class Slab:
    """The cache of one layer as a block sees it: keys and values (B,Hk,N,D).

    `append` writes at `positions` (T,), and attention reads all N slots.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor):
        self.keys = keys
        self.values = values
        self.positions = positions

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B,Hk,T,D) into T slots and return the whole slabs (B,Hk,N,D) ×2."""
        self.keys.index_copy_(2, self.positions, k)
        self.values.index_copy_(2, self.positions, v)
        return self.keys, self.values


@torch.compiler.nested_compile_region
def block(
    layer: nn.Module,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    visible: Tensor,
) -> Tensor:
    """One layer, (B,T,C) → (B,T,C). A nested region is compiled once for all layers.

    Without it the compile time would grow with the number of layers.
    """
    attend: Attend = Masked(visible)
    if x.shape[1] == 1:
        attend = Decode(visible)
    return layer(x, rope, Slab(keys, values, positions), attend)


def hidden_states(
    model: Transformer, tokens: Tensor, positions: Tensor, slabs: Sequence[KeysValues]
) -> Tensor:
    """The function to compile: tokens (B,T) at positions (T,), slabs of each layer → (B,T,C)."""
    x = model.embed_tokens(tokens)  # (B,T,C)
    rope = rope_angles(model.config, positions, x.dtype)  # cos, sin (T,D)
    slots = torch.arange(slabs[0][0].shape[2], device=tokens.device)  # (N,)
    visible = slots <= positions[:, None]  # (T,N)
    for layer, (keys, values) in zip(model.layers, slabs, strict=True):
        x = block(layer, x, rope, keys, values, positions, visible)
    return model.norm(x)


class Compiled(nn.Module):
    """A model for prefill, decode and generate, compiled for `batch_size` rows of `capacity` slots.

    Calls with a static cache of exactly that size (`make_cache()`) run compiled. Decode takes one
    compilation, and so does each width of `buckets` that is used (default: powers of two from 16 to
    2,048); `compiles` lists them. A longer prompt runs in parts. Every other call (another kind or
    size of cache, another attention, a wrong start_pos) is passed unchanged to the plain model,
    which runs it or raises its own error. `backend` is torch.compile's.

    Raises ConfigError or CapacityError for unsuitable arguments, before anything is compiled.
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
        # The width of each compilation. A width is compiled again if, say, the thread count
        # changes.
        self.compiles: list[int] = []
        self.regions = {width: self.region(width) for width in self.widths}
        # Layer of a cache → its keys, once the unused slots of the slab have been zeroed.
        self.cleared: MutableMapping[LayerCache, Tensor] = weakref.WeakKeyDictionary()
        # First layer of a cache → its decode step as a CUDA graph.
        self.recorded: MutableMapping[LayerCache, Recorded] = weakref.WeakKeyDictionary()

    config = property(lambda self: self.model.config)
    device = property(lambda self: self.model.device)
    embed_tokens = property(lambda self: self.model.embed_tokens)
    lm_head = property(lambda self: self.model.lm_head)
    generation_config = property(lambda self: self.model.generation_config)

    def __repr__(self) -> str:
        size = f"{self.batch_size} × {self.capacity}"
        return f"<Compiled for {size} tokens, {self.backend}; {self.device}>"

    def make_cache(self) -> KVCache:
        """An empty static cache of the compiled size."""
        return make_cache("static", self.config, self.batch_size, self.capacity)

    def region(self, width: int) -> Callable[..., Tensor]:
        """hidden_states for `width` tokens, compiled as one graph at the first call."""

        def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
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
            # Only after the last write: a forward that failed leaves the cache as it was.
            for layer in cache:
                layer.length = start_pos
            return torch.cat(parts, dim=1)  # (B,T,C)

    def takes(self, tokens: Tensor, cache: KVCache, start_pos: int, attend: Attend) -> bool:
        """Whether the compiled regions can run this call."""
        if not has_pages(cache):
            return False
        if any(reserve_of(layer) is None for layer in cache):  # a custom `append`
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
        """All slots of every layer, (keys, values) (B,Hk,N,D) each; None if there are no pages.

        Unused slots are zeroed once. They are masked, but must still be finite: 0 times NaN is NaN.
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
            layer.length = length  # `pages` has counted a token, which `forward` does itself
            if self.cleared.get(layer) is not one.keys:
                one.keys[:, :, length:] = 0
                one.values[:, :, length:] = 0
                self.cleared[layer] = one.keys
        return [(one.keys, one.values) for one in pages]

    def run(
        self, tokens: Tensor, start_pos: int, cache: KVCache, slabs: list[KeysValues]
    ) -> Tensor:
        """tokens (B,T), T at most the widest width → (B,T,C). Writes the slabs, not the lengths."""
        T = tokens.shape[1]
        width = next(width for width in self.widths if width >= T)
        positions = torch.arange(start_pos, start_pos + width, device=tokens.device)
        positions.clamp_(max=start_pos + T - 1)
        tokens = tokens[:, positions - start_pos]  # (B,width): the last token repeated
        if width == 1 and tokens.is_cuda:
            return self.replay(tokens, positions, cache[0], slabs)
        return self.regions[width](self.model, tokens, positions, slabs)[:, :T]

    def replay(
        self, tokens: Tensor, positions: Tensor, layer: LayerCache, slabs: list[KeysValues]
    ) -> Tensor:
        """The decode step as a CUDA graph, recorded again if the cache has moved its slabs."""
        recorded = self.recorded.get(layer)
        if recorded is None or recorded.slabs[0][0] is not slabs[0][0]:
            recorded = Recorded(partial(self.regions[1], self.model), tokens, positions, slabs)
            self.recorded[layer] = recorded
        return recorded(tokens, positions)


class Recorded:
    """A decode step as a CUDA graph, with inputs and output at fixed addresses."""

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
        return self.hidden.clone()  # the next step overwrites it


def cuda_graph(
    step: Callable[[], Tensor], device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    """Record `step` on `device` → (function that replays it, the tensor that holds its result).

    `step` runs twice before the recording, because the first call compiles. Repeating a decode step
    is harmless, since it writes the same slot. Other threads may use the GPU during the recording.
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
    """Whether `attend` is causal attention of T queries over all S keys, as in a region."""
    if type(attend) is Decode:
        return T == 1 and attend.mask is None
    return type(attend) is Causal and attend.keys in (None, S)


def check_sizes(config: Config, capacity: int, batch_size: int, buckets: Sequence[int]) -> None:
    """ConfigError unless all are whole numbers ≥ 1; CapacityError above the model's positions."""
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
    """ConfigError for an unknown backend, or if inductor finds no C++ compiler for a CPU."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"backend {backend!r} is not one of {', '.join(known)}")
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX", usual)  # the same lookup as in inductor
    if backend == "inductor" and device.type == "cpu" and not shutil.which(compiler):
        raise ConfigError(
            f"torch.compile needs a C++ compiler, and there is no {compiler}",
            hint="install g++ or set CXX",
        )
