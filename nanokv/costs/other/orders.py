"""In which order the kinds of layers follow, for a config.json without `layer_types`.

The rules are those of transformers 5.23's config classes.
"""

from dataclasses import dataclass

from nanokv.config_file import shown
from nanokv.costs.other.fields import Fields
from nanokv.costs.other.keeps import inner
from nanokv.errors import ConfigError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV, INDEXED, HYBRID = "linear_attention", "conv", "indexed_attention", "hybrid"


def layer_count(f: Fields) -> int:
    return f.size("num_hidden_layers")


def of_cache(f: Fields) -> list[str]:
    """transformers' rule for a model without an order: all layers slide if there is a window."""
    kind = FULL
    if f.get("sliding_window") is not None:
        kind = SLIDING
    elif f.get("attention_chunk_size") is not None:
        kind = CHUNKED
    return [kind] * layer_count(f)


@dataclass(frozen=True)
class All:
    """Layers of one kind."""

    kind: str

    def __call__(self, f: Fields) -> list[str]:
        return [self.kind] * layer_count(f)


@dataclass(frozen=True)
class Every:
    """Each n-th layer is `last`, the others are `first`. `name`: the field that may say n."""

    n: int
    name: str = ""
    first: str = SLIDING
    last: str = FULL

    def __call__(self, f: Fields) -> list[str]:
        n = f.size(self.name, self.n) if self.name else self.n
        return [self.first if (i + 1) % n else self.last for i in range(layer_count(f))]


@dataclass(frozen=True)
class Nth:
    """Layer 0, n, 2n … is `kind`, the others are `other`."""

    n: int
    kind: str = FULL
    other: str = SLIDING
    name: str = ""

    def __call__(self, f: Fields) -> list[str]:
        n = f.size(self.name, self.n) if self.name else self.n
        return [self.other if i % n else self.kind for i in range(layer_count(f))]


@dataclass(frozen=True)
class Listed:
    """The layers that a field lists are `kind`; a missing list means `absent` for all."""

    name: str
    kind: str
    other: str
    absent: str

    def __call__(self, f: Fields) -> list[str]:
        listed = f.numbers(self.name)
        if listed is None:
            return [self.absent] * layer_count(f)
        return [self.kind if i in listed else self.other for i in range(layer_count(f))]


def qwen2(f: Fields) -> list[str]:
    """The last layers slide, from max_window_layers on, if use_sliding_window is on."""
    L = layer_count(f)
    if not f.get("use_sliding_window") or f.get("sliding_window") is None:
        return [FULL] * L
    return [SLIDING if i >= f.get("max_window_layers", 0) else FULL for i in range(L)]


def qwen2_moe(f: Fields) -> list[str]:
    first = f.get("max_window_layers", 0) if f.get("use_sliding_window") else 0
    return [SLIDING if i % 2 == 0 and i < first else FULL for i in range(layer_count(f))]


def qwen3_moe(f: Fields) -> list[str]:
    if f.get("use_sliding_window") and f.get("sliding_window") is not None:
        return [SLIDING] * layer_count(f)
    return [FULL] * layer_count(f)


def exaone(f: Fields) -> list[str]:
    if f.get("sliding_window") is None:
        raise ConfigError(f"config.json of {f.architecture} lacks sliding_window")
    return Every(4, "sliding_window_pattern")(f)


def with_last_full(order: list[str]) -> list[str]:
    return [*order[:-1], FULL]


def gemma4(f: Fields) -> list[str]:
    return with_last_full(f.names("layer_types") or Every(6)(f))


def beam(f: Fields) -> list[str]:
    return with_last_full(Every(6)(f))


def cohere2_moe(f: Fields) -> list[str]:
    """The first layers, which have no experts, follow a pattern of their own."""
    L = layer_count(f)
    dense = f.get("first_k_dense_replace", 0)
    first = Every(1, "prefix_dense_sliding_window_pattern")(f)[:dense]
    return first + Every(4, "sliding_window_pattern")(f)[: L - dense]


def flint(f: Fields) -> list[str]:
    L = layer_count(f)
    return [FULL if i < 2 or i % 4 == 1 or i == L - 1 else SLIDING for i in range(L)]


def mimo(f: Fields) -> list[str]:
    return [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(layer_count(f))]


def from_the_last(f: Fields) -> list[str]:
    """Each fourth layer is full, counted from the last one."""
    L = layer_count(f)
    return [SLIDING if (L - 1 - i) % 4 else FULL for i in range(L)]


def smollm3(f: Fields) -> list[str]:
    """Layers without RoPE slide, if use_sliding_window is on."""
    if not f.get("use_sliding_window") or f.get("sliding_window") is None:
        return [FULL] * layer_count(f)
    return [FULL if rotated else SLIDING for rotated in rotated_layers(f)]


def llama4(f: Fields) -> list[str]:
    return [CHUNKED if rotated else FULL for rotated in rotated_layers(f)]


def rotated_layers(f: Fields) -> list[int]:
    """`no_rope_layers`: 1 for each layer with RoPE."""
    n = f.size("no_rope_layer_interval")
    return f.numbers("no_rope_layers") or [int((i + 1) % n != 0) for i in range(layer_count(f))]


def lfm3(f: Fields) -> list[str]:
    order = {0: SLIDING, 2: FULL}
    return [order.get(i % 4, CONV) if i else CONV for i in range(layer_count(f))]


def kimi(f: Fields) -> list[str]:
    """The lists of the published file count from 1."""
    L = layer_count(f)
    listed = inner(f, "linear_attn_config").numbers("full_attn_layers")
    if listed is not None:
        return [FULL if i + 1 in listed else LINEAR for i in range(L)]
    return [FULL if i and i % 4 == 0 else LINEAR for i in range(L)]


def olmo_hybrid(f: Fields) -> list[str]:
    order = Every(4, first=LINEAR)(f)
    return order if FULL in order else with_last_full(order)


def jamba(f: Fields) -> list[str]:
    period, offset = f.size("attn_layer_period"), f.get("attn_layer_offset", 0)
    return [FULL if i % period == offset else LINEAR for i in range(layer_count(f))]


def nemotron_h(f: Fields) -> list[str]:
    """`hybrid_override_pattern`: M Mamba, * attention, - MLP, E experts."""
    letters = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    pattern = f.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(letters):
        raise ConfigError(
            f"hybrid_override_pattern is {shown(pattern)}: letters of {''.join(letters)} were expected"
        )
    return [letters[letter] for letter in pattern]


def zamba(f: Fields) -> list[str]:
    period, offset = f.size("attn_layer_period"), f.get("attn_layer_offset", 0)
    rest = range(layer_count(f) - 3)
    return [LINEAR, LINEAR, HYBRID, *(HYBRID if i % period == offset else LINEAR for i in rest)]


def zamba2(f: Fields) -> list[str]:
    """The 54 layers of the published models; another number of layers has to list its kinds."""
    order = [LINEAR, *([LINEAR] * 5 + [HYBRID]) * 7, *[LINEAR] * 4, HYBRID, *[LINEAR] * 3, HYBRID]
    return [*order, LINEAR, LINEAR]


def inkling_order(f: Fields) -> list[str]:
    L = layer_count(f)
    local = f.numbers("local_layer_ids") or [i for i in range(L) if (i + 1) % 6]
    return ["hybrid_sliding" if i in local else HYBRID for i in range(L)]


def deepseek_v4(f: Fields) -> list[str]:
    L = layer_count(f)
    heavy, sparse = "heavily_compressed_attention", "compressed_sparse_attention"
    ratios = f.numbers("compress_ratios")
    if ratios is not None:
        return [{0: SLIDING, 4: sparse, 128: heavy}.get(ratio, str(ratio)) for ratio in ratios][:L]
    return [heavy if i < 2 or i % 2 == 0 else sparse for i in range(L)]


def minimax_m3(f: Fields) -> list[str]:
    chosen = inner(f, "sparse_attention_config").numbers("sparse_attention_freq")
    if chosen is None:
        return [FULL] * layer_count(f)
    return ["minimax_m3_sparse" if on else FULL for on in chosen]
