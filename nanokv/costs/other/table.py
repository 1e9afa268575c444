"""From the fields of a config.json to the layers of a model, for the text models of transformers.

An architecture is an order of layer kinds and a function per kind. `layer_types` in config.json
wins over the order. The numbers are those of transformers 5.23: tests/costs/test_other_models.py
fills its caches on the meta device, where tensors have shapes and no memory, and compares bytes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nanokv.config_file import shown
from nanokv.costs.other import keeps, kinds, orders
from nanokv.costs.other.fields import Fields
from nanokv.costs.other.kinds import Layer
from nanokv.costs.other.orders import CHUNKED, CONV, FULL, HYBRID, INDEXED, LINEAR, SLIDING
from nanokv.errors import ConfigError

OLD_NAMES = {  # names in older files
    "mamba": LINEAR,
    "attention": FULL,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
}

# --- layers that use another layer's cache --------------------------------------------------------


def shared_at_the_end(f: Fields, layers: list[Layer]) -> list[Layer]:
    """Gemma 3n, Gemma 4: the last layers read the keys and values of earlier ones."""
    shared = f.get("num_kv_shared_layers", 0)
    if type(shared) is not int or not 0 <= shared < len(layers):
        raise ConfigError(
            f"num_kv_shared_layers is {shown(shared)}: 0 to {len(layers) - 1} was expected"
        )
    return layers[: len(layers) - shared] + [kinds.SHARED] * shared


def shared_indexers(f: Fields, layers: list[Layer]) -> list[Layer]:
    """GLM-5, HunYuan 4: an indexer serves the next layers too."""
    types = f.names("indexer_types") or glm_indexers(f, len(layers))
    shared = keeps.indexed_shared(f)
    return [
        shared if kind == "shared" else layer for kind, layer in zip(types, layers, strict=True)
    ]


def glm_indexers(f: Fields, L: int) -> list[str]:
    pattern = f.get("index_topk_pattern")
    if isinstance(pattern, str):
        return [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if isinstance(pattern, list):
        return pattern
    every = max(f.get("index_topk_freq", 1), 1)
    offset = f.get("index_skip_topk_offset", 2)
    return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(L)]


def hunyuan_indexers(f: Fields, layers: list[Layer]) -> list[Layer]:
    types = f.names("indexer_types")
    if types is None:
        types = ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(len(layers))]
    shared = keeps.indexed_shared(f)
    return [
        shared if kind == "shared" else layer for kind, layer in zip(types, layers, strict=True)
    ]


def own(f: Fields, layers: list[Layer]) -> list[Layer]:
    """Each layer has its own."""
    return layers


# --- the architectures ----------------------------------------------------------------------------

Kinds = dict[str, Callable[[Fields], Layer]]
ATTENTION: Kinds = {FULL: keeps.full, SLIDING: keeps.sliding, CHUNKED: keeps.chunked}
LATENT: Kinds = {FULL: keeps.latent}
DSA: Kinds = {INDEXED: keeps.indexed, FULL: keeps.latent}
DELTA: Kinds = {FULL: keeps.full, LINEAR: keeps.delta_net}
GRANITE: Kinds = {FULL: keeps.full, LINEAR: keeps.bamba_mamba}
LFM: Kinds = {FULL: keeps.full, CONV: keeps.short_conv, SLIDING: keeps.sliding}
GEMMA: Kinds = {FULL: keeps.full, SLIDING: keeps.gemma_sliding}
GEMMA4: Kinds = {FULL: keeps.gemma4_full, SLIDING: keeps.gemma_sliding}
INKLING: Kinds = {HYBRID: keeps.inkling_full, "hybrid_sliding": keeps.inkling_sliding}


@dataclass(frozen=True)
class Architecture:
    """How to read one `model_type`."""

    kinds: Kinds = field(default_factory=lambda: ATTENTION)
    order: Callable[[Fields], list[str]] = orders.of_cache
    sharing: Callable[[Fields, list[Layer]], list[Layer]] = own
    fixed_order: bool = False  # layer_types in config.json does not count


def rows(names: str, architecture: Architecture) -> dict[str, Architecture]:
    return dict.fromkeys(names.split(), architecture)


PLAIN = """
apertus arcee aria_text bitnet cohere diffllama doge ernie4_5 ernie4_5_moe flex_olmo gemma glm glm4
glm4_moe glm_ocr_text granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
hy_v3 hyperclovax internlm3 iquestcoder jais2 llama minimax_m2 ministral3 mistral mixtral nanochat
nemotron olmo olmo2 olmoe phi phi3 phi4_multimodal phimoe qwen3_vl_text qwen3_vl_moe_text seed_oss
solar_open stablelm starcoder2 persimmon ministral
"""
OLD = "bloom gpt2 gptj gpt_neox gpt_neox_japanese codegen ctrl opt biogpt xglm mpt"
ARCHITECTURES: dict[str, Architecture] = {
    **rows(PLAIN, Architecture()),
    **rows(OLD, Architecture({FULL: keeps.every_head}, orders.All(FULL), fixed_order=True)),
    "gpt_neo": Architecture(
        {FULL: keeps.every_head, "local": keeps.gpt_neo_local}, orders.All(FULL)
    ),
    **rows(
        "falcon gpt_bigcode", Architecture({FULL: keeps.one_head_if_multi_query}, orders.All(FULL))
    ),
    **rows("laguna mellum", Architecture(order=orders.All(FULL))),
    # windows
    **rows(
        "qwen2 qwen3 qwen2_vl_text qwen2_5_vl_text",
        Architecture(order=orders.qwen2),
    ),
    "qwen2_moe": Architecture(order=orders.qwen2_moe),
    "qwen3_moe": Architecture(order=orders.qwen3_moe),
    "afmoe": Architecture(order=orders.Every(4, "global_attn_every_n_layers")),
    "cohere2": Architecture(order=orders.Every(4, "sliding_window_pattern")),
    "cohere2_moe": Architecture(order=orders.cohere2_moe),
    "cwm": Architecture(order=orders.Nth(4)),
    **rows("granite_swa granitemoe_swa", Architecture(order=orders.Nth(4))),
    "beam": Architecture(order=orders.beam),
    "flint": Architecture(order=orders.flint),
    "kolibri1": Architecture(order=orders.Every(5)),
    "olmo3": Architecture(order=orders.Every(4)),
    **rows("exaone4 exaone_moe", Architecture(order=orders.exaone)),
    "gpt_oss": Architecture(order=orders.Every(2)),
    "smollm3": Architecture(order=orders.smollm3),
    "llama4_text": Architecture(order=orders.llama4),
    "gemma2": Architecture(GEMMA, orders.Every(2)),
    "vaultgemma": Architecture(order=orders.Every(2)),
    "gemma3_text": Architecture(GEMMA, orders.Every(6, "sliding_window_pattern")),
    "gemma3n_text": Architecture(GEMMA, orders.Every(5), shared_at_the_end),
    **rows(
        "gemma4_text gemma4_unified_text",
        Architecture(GEMMA4, orders.gemma4, shared_at_the_end, fixed_order=True),
    ),
    "mimo_v2_flash": Architecture(
        {FULL: keeps.mimo_full, SLIDING: keeps.mimo_sliding}, orders.mimo
    ),
    "modernbert-decoder": Architecture(
        {FULL: keeps.full, SLIDING: keeps.half_window},
        orders.Nth(3, name="global_attn_every_n_layers"),
    ),
    # latent attention
    **rows(
        "deepseek_v2 deepseek_v3 axk1 glm4_moe_lite minicpm3 youtu",
        Architecture(LATENT, orders.All(FULL)),
    ),
    **rows("deepseek_v32 axk2", Architecture(DSA, orders.All(INDEXED))),
    "glm_moe_dsa": Architecture(DSA, orders.All(INDEXED), shared_indexers),
    "hy_v4": Architecture(DSA, orders.All(INDEXED), hunyuan_indexers),
    "minimax_m3_vl_text": Architecture(
        {FULL: keeps.full, "minimax_m3_sparse": keeps.minimax_sparse}, orders.minimax_m3
    ),
    "deepseek_v4": Architecture(
        {
            SLIDING: keeps.deepseek_v4_sliding,
            "heavily_compressed_attention": keeps.heavily_compressed,
            "compressed_sparse_attention": keeps.compressed_sparse,
        },
        orders.deepseek_v4,
    ),
    # states
    **rows(
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
        Architecture(DELTA, orders.Every(4, "full_attention_interval", first=LINEAR)),
    ),
    "olmo_hybrid": Architecture(DELTA, orders.olmo_hybrid),
    "kimi_linear": Architecture({FULL: keeps.latent, LINEAR: keeps.kimi_delta}, orders.kimi),
    "bailing_hybrid": Architecture(
        {FULL: keeps.latent, LINEAR: keeps.bailing_delta},
        orders.Every(6, "layer_group_size", first=LINEAR),
    ),
    "minimax": Architecture(
        {FULL: keeps.full, LINEAR: keeps.lightning}, orders.Every(2, first=FULL, last=LINEAR)
    ),
    **rows(
        "mamba falcon_mamba",
        Architecture({LINEAR: keeps.mamba}, orders.All(LINEAR), fixed_order=True),
    ),
    "mamba2": Architecture({LINEAR: keeps.mamba2}, orders.All(LINEAR), fixed_order=True),
    "bamba": Architecture(
        GRANITE, orders.Listed("attn_layer_indices", FULL, LINEAR, LINEAR), fixed_order=True
    ),
    "granitemoehybrid": Architecture(GRANITE, orders.All(LINEAR)),
    "falcon_h1": Architecture({HYBRID: keeps.falcon_h1}, orders.All(HYBRID), fixed_order=True),
    "jamba": Architecture(
        {FULL: keeps.full, LINEAR: keeps.jamba_mamba}, orders.jamba, fixed_order=True
    ),
    "nemotron_h": Architecture(
        {
            FULL: keeps.full,
            LINEAR: keeps.nemotron_mamba,
            "moe": keeps.nothing,
            "mlp": keeps.nothing,
        },
        orders.nemotron_h,
    ),
    "zamba": Architecture({HYBRID: keeps.zamba_hybrid, LINEAR: keeps.jamba_mamba}, orders.zamba),
    "zamba2": Architecture(
        {HYBRID: keeps.zamba2_hybrid, LINEAR: keeps.zamba2_mamba}, orders.zamba2
    ),
    **rows("lfm2 lfm2_moe", Architecture(LFM, orders.Listed("full_attn_idxs", FULL, CONV, FULL))),
    "lfm3": Architecture(LFM, orders.lfm3),
    **rows("inkling_text inkling2_text", Architecture(INKLING, orders.inkling_order)),
}


def layers_of(f: Fields) -> list[Layer]:
    """What each layer of the model keeps.

    Raises ConfigError for a size that is absent or no size, a layer kind that the architecture does
    not have, and a field that transformers does not know and that may change the cache.
    """
    architecture = ARCHITECTURES[f.architecture]
    f.check_unknown()
    if f.get("add_cross_attention"):
        raise ConfigError(
            "add_cross_attention True: the cache of the encoder's keys is not counted"
        )
    listed = f.names("layer_types")
    if listed is None or architecture.fixed_order:
        listed = architecture.order(f)
    order = [OLD_NAMES.get(kind, kind) for kind in listed]
    expected = len(order) if f.get("num_hidden_layers") is None else f.size("num_hidden_layers")
    if f.architecture != "nemotron_h" and len(order) != expected:
        raise ConfigError(f"layer_types has {len(order)} entries for {expected} layers")
    unknown = sorted(set(order) - set(architecture.kinds))
    if unknown:
        raise ConfigError(
            f"layer_types has {', '.join(unknown)}: {f.architecture} has no such layer"
        )
    layers = [
        architecture.kinds[kind](each)
        for kind, each in zip(order, per_layer(f, len(order)), strict=True)
    ]
    return architecture.sharing(f, layers)


def per_layer(f: Fields, L: int) -> Iterable[Fields]:
    """The fields of each layer: `per_layer_config` of transformers 5 overrides some of them."""
    overrides: Any = f.get("per_layer_config", {})
    if not isinstance(overrides, dict) or not all(isinstance(x, dict) for x in overrides.values()):
        raise ConfigError(f"per_layer_config is {shown(overrides)}: objects were expected")
    if not overrides:
        return [f] * L
    return [replace(f, given=f.given | overrides.get(str(i), {})) for i in range(L)]
