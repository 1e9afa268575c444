"""What one layer keeps, by its kind and the fields of config.json.

One function per kind of layer; table.py says which architecture has which. The bytes are those of
transformers 5.23's caches.
"""

from dataclasses import replace

from nanokv.config_file import shown
from nanokv.costs.other import kinds
from nanokv.costs.other.fields import Fields
from nanokv.costs.other.kinds import FP32, Compressed, Last, LastGroup, Layer, Part, State, Waiting
from nanokv.errors import ConfigError


def kv_sizes(f: Fields) -> tuple[int, int, int]:
    """(KV heads, numbers of a key, numbers of a value)."""
    heads = f.size("num_attention_heads")
    head = f.size("head_dim", f.size("hidden_size") // heads)
    return f.size("num_key_value_heads", heads), head, head


def full(f: Fields) -> Layer:
    return kinds.attention(*kv_sizes(f))


def sliding(f: Fields) -> Layer:
    return kinds.window(*kv_sizes(f), f.size("sliding_window"), "window")


def chunked(f: Fields) -> Layer:
    """Llama 4: tokens see their own chunk; transformers keeps a window of the chunk's size."""
    return kinds.window(*kv_sizes(f), f.size("attention_chunk_size"), "chunk")


def nothing(f: Fields) -> Layer:
    return kinds.NOTHING


def every_head(f: Fields) -> Layer:
    """Models older than grouped-query attention: a KV head for each query head, D = C / H."""
    heads = f.size("num_attention_heads")
    head = f.size("hidden_size") // heads
    return kinds.attention(heads, head, head)


def gpt_neo_local(f: Fields) -> Layer:
    """transformers keeps all tokens, also where the mask sees the last 256."""
    kept = every_head(f)
    seen = Part("keys and values", kept.parts[0].values, Last(f.size("window_size") - 1))
    why = "local layers cut to their window"
    return replace(kept, kind="local attention", otherwise=kinds.Otherwise(why, (seen,)))


def one_head_if_multi_query(f: Fields) -> Layer:
    """GPT-BigCode and Falcon. Falcon's newer layers are kept after KV heads are repeated."""
    heads = f.size("num_attention_heads")
    head = f.size("hidden_size") // heads
    if f.get("new_decoder_architecture"):
        once = Part("keys and values", 2 * f.size("num_kv_heads", heads) * head)
        kept = kinds.attention(heads, head, head)
        return replace(kept, otherwise=kinds.Otherwise("KV heads that are not repeated", (once,)))
    if f.get("multi_query"):
        heads = 1
    return kinds.attention(heads, head, head)


def inner(f: Fields, name: str) -> Fields:
    """The fields of an object inside config.json, without defaults."""
    value = f.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {shown(value)}: an object was expected")
    return Fields("", value)


def mimo_sizes(f: Fields) -> tuple[int, int, int]:
    return f.size("num_key_value_heads"), f.size("head_dim"), f.size("v_head_dim")


def mimo_full(f: Fields) -> Layer:
    return kinds.attention(*mimo_sizes(f))


def mimo_sliding(f: Fields) -> Layer:
    """MiMo-V2: twice the KV heads; `sliding_window_size` counts the tokens before this one."""
    heads, key, value = mimo_sizes(f)
    size = f.size("sliding_window")
    if f.get("sliding_window_size") is not None:
        size = f.size("sliding_window_size") + 1
    return kinds.window(2 * heads, key, value, size, "window")


def half_window(f: Fields) -> Layer:
    """ModernBERT's decoder: `local_attention` counts both directions."""
    return kinds.window(*kv_sizes(f), f.size("local_attention") // 2, "window")


def gemma_sliding(f: Fields) -> Layer:
    """A model that attends in both directions has half of the window on each side."""
    size = f.size("sliding_window")
    if f.get("use_bidirectional_attention") in (True, "all"):
        size = size // 2 + 1
    return kinds.window(*kv_sizes(f), size, "window")


def gemma4_full(f: Fields) -> Layer:
    """Gemma 4: layers without a window have wider heads, and fewer where keys serve as values."""
    if f.get("per_layer_config"):
        return full(f)
    heads, _, _ = kv_sizes(f)
    fewer = f.size("num_global_key_value_heads", heads)
    if f.get("attention_k_eq_v", True):
        heads = fewer
    head = f.size("global_head_dim", 512)
    return kinds.attention(heads, head, head)


def latent(f: Fields) -> Layer:
    """DeepSeek's MLA."""
    heads, rope = f.size("num_attention_heads"), f.size("qk_rope_head_dim")
    each = f.size("qk_nope_head_dim") + rope + f.size("v_head_dim", value_of_minicpm3(f))
    return kinds.latent(f.size("kv_lora_rank"), rope, heads * each)


def value_of_minicpm3(f: Fields) -> int:
    return f.size("hidden_size") // f.size("num_attention_heads")


def indexed(f: Fields) -> Layer:
    """DeepSeek-V3.2's sparse attention: MLA, and one key of the indexer per token."""
    kept = latent(f)
    keys = Part("indexer key", f.size("index_head_dim"))
    other = kept.otherwise and replace(kept.otherwise, parts=(*kept.otherwise.parts, keys))
    return Layer("latent attention + indexer", (*kept.parts, keys), other)


def indexed_shared(f: Fields) -> Layer:
    """A layer that uses the choice of an earlier layer's indexer."""
    return replace(latent(f), kind="latent attention, shared indexer")


def minimax_sparse(f: Fields) -> Layer:
    """MiniMax-M3: keys and values, and one key of the indexer per token."""
    keys = Part("indexer key", f.size("index_head_dim"))
    return Layer("attention + indexer", (*full(f).parts, keys))


def delta_net(f: Fields) -> Layer:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo hybrid): a matrix per value head."""
    heads = f.size("num_attention_heads")
    key_heads, value_heads = (
        f.size("linear_num_key_heads", heads),
        f.size("linear_num_value_heads", heads),
    )
    key = f.size("linear_key_head_dim", 3 * f.size("hidden_size") // (4 * key_heads))
    value = f.size("linear_value_head_dim", 2 * key)
    channels = 2 * key_heads * key + value_heads * value
    kernel = f.size("linear_conv_kernel_dim")
    return kinds.recurrent("Gated DeltaNet", channels, kernel, value_heads * key * value)


def kimi_delta(f: Fields) -> Layer:
    """Kimi Delta Attention: keys and values have the same size."""
    old = inner(f, "linear_attn_config")
    heads = old.size("num_heads", f.get("linear_num_heads"))
    head = old.size("head_dim", f.get("linear_head_dim"))
    kernel = old.size("short_conv_kernel_size", f.get("linear_conv_kernel_dim"))
    return kinds.recurrent("Kimi Delta", 3 * heads * head, kernel, heads * head * head)


def bailing_delta(f: Fields) -> Layer:
    heads, head = f.size("num_attention_heads"), f.size("head_dim")
    kernel = f.size("short_conv_kernel_size")
    return kinds.recurrent("Kimi Delta", 3 * heads * head, kernel, heads * head * head)


def lightning(f: Fields) -> Layer:
    """MiniMax's lightning attention: a D × D matrix per head, in the model's dtype."""
    heads = f.size("num_attention_heads")
    head = f.size("head_dim", f.size("hidden_size") // heads)
    return Layer("lightning attention", (Part("recurrent state", heads * head * head, State()),))


def mamba(f: Fields) -> Layer:
    """Mamba: `state_size` numbers per channel."""
    channels = f.size("expand") * f.size("hidden_size")
    return kinds.recurrent(
        "Mamba", channels, f.size("conv_kernel"), channels * f.size("state_size")
    )


def jamba_mamba(f: Fields) -> Layer:
    channels = f.size("mamba_expand") * f.size("hidden_size")
    state = channels * f.size("mamba_d_state")
    return kinds.recurrent("Mamba", channels, f.size("mamba_d_conv"), state)


def mamba2_of(channels: int, groups: int, state: int, kernel: int) -> Layer:
    """Mamba 2: heads share their B and C in groups, which go through the convolution too."""
    return kinds.recurrent("Mamba 2", channels + 2 * groups * state, kernel, channels * state)


def mamba2(f: Fields) -> Layer:
    channels = f.size("expand") * f.size("hidden_size")
    return mamba2_of(channels, f.size("n_groups"), f.size("state_size"), f.size("conv_kernel"))


def bamba_mamba(f: Fields) -> Layer:
    """Bamba, Granite 4, Falcon-H1."""
    channels = f.size("mamba_d_ssm", f.size("mamba_expand") * f.size("hidden_size"))
    state = f.size("mamba_d_state")
    return mamba2_of(channels, f.size("mamba_n_groups"), state, f.size("mamba_d_conv"))


def zamba2_mamba(f: Fields) -> Layer:
    channels = f.size("mamba_expand") * f.size("hidden_size")
    state = f.size("mamba_d_state")
    return mamba2_of(channels, f.size("mamba_ngroups"), state, f.size("mamba_d_conv"))


def nemotron_mamba(f: Fields) -> Layer:
    channels = f.size("mamba_num_heads") * f.size("mamba_head_dim")
    return mamba2_of(channels, f.size("n_groups"), f.size("ssm_state_size"), f.size("conv_kernel"))


def falcon_h1(f: Fields) -> Layer:
    return kinds.both(bamba_mamba(f), full(f))


def zamba_full(f: Fields) -> Layer:
    """Zamba's shared attention reads the embedding beside the hidden state: twice as wide."""
    heads = f.size("num_attention_heads")
    head = f.get("attention_head_dim") or 2 * f.size("hidden_size") // heads
    return kinds.attention(f.size("num_key_value_heads", heads), head, head)


def zamba2_full(f: Fields) -> Layer:
    heads = f.size("num_attention_heads")
    head = 2 * f.size("hidden_size") // heads
    return kinds.attention(f.size("num_key_value_heads", heads), head, head)


def zamba_hybrid(f: Fields) -> Layer:
    return kinds.both(jamba_mamba(f), zamba_full(f))


def zamba2_hybrid(f: Fields) -> Layer:
    return kinds.both(zamba2_mamba(f), zamba2_full(f))


def short_conv(f: Fields) -> Layer:
    """LFM2: a gated convolution over `conv_L_cache` tokens and nothing else."""
    kept, needed = kinds.convolution(f.size("hidden_size"), f.size("conv_L_cache"))
    return Layer("short convolution", (kept,), kinds.Otherwise(kinds.COLUMNS, (needed,)))


def inkling(f: Fields, attended: Layer, width: int) -> Layer:
    """Inkling: four convolutions in fp32 beside attention, on keys, values and two outputs."""
    channels = 2 * width + 2 * f.size("hidden_size")
    kept, needed = kinds.convolution(channels, f.size("conv_kernel_size"), FP32)
    other = kinds.Otherwise(kinds.COLUMNS, (*attended.parts, needed))
    return Layer(f"{attended.kind} + convolutions", (*attended.parts, kept), other)


def inkling_full(f: Fields) -> Layer:
    heads, head, _ = kv_sizes(f)
    return inkling(f, kinds.attention(heads, head, head), heads * head)


def inkling_sliding(f: Fields) -> Layer:
    heads, head = f.size("swa_num_key_value_heads"), f.size("swa_head_dim")
    attended = kinds.window(heads, head, head, f.size("sliding_window_size"), "window")
    return inkling(f, attended, heads * head)


def deepseek_v4_window(f: Fields) -> Part:
    """DeepSeek-V4's keys serve as values too, and are kept once."""
    return Part("keys", f.size("head_dim"), Last(f.size("sliding_window") - 1))


def deepseek_v4_sliding(f: Fields) -> Layer:
    """transformers keeps the keys of a layer without compression twice, as keys and as values."""
    once = deepseek_v4_window(f)
    other = kinds.Otherwise("keys that serve as values kept once", (once,))
    return Layer(f"window of {f.size('sliding_window'):,}", (once, once), other)


def deepseek_v4_rate(f: Fields, kind: str, default: int) -> int:
    old = "compress_rate_csa" if kind.startswith("compressed") else "compress_rate_hca"
    return inner(f, "compress_rates").size(kind, f.get(old, default))


def heavily_compressed(f: Fields) -> Layer:
    """One entry per 128 tokens, beside the window; tokens wait until an entry is complete."""
    rate = deepseek_v4_rate(f, "heavily_compressed_attention", 128)
    D = f.size("head_dim")
    parts = (Part("entries", D, Compressed(rate)), Part("waiting tokens", 2 * D, Waiting(rate)))
    return Layer(f"compressed {rate} ×", (deepseek_v4_window(f), *parts))


def compressed_sparse(f: Fields) -> Layer:
    """One entry and one indexer key per 4 tokens; groups overlap, so the last one is kept too."""
    rate = deepseek_v4_rate(f, "compressed_sparse_attention", 4)
    width = f.size("head_dim") + f.size("index_head_dim")
    parts = (
        Part("entries and indexer keys", width, Compressed(rate)),
        Part("waiting tokens", 4 * width, Waiting(rate)),
        Part("last group", 2 * width, LastGroup(rate)),
    )
    return Layer(f"compressed {rate} × + indexer", (deepseek_v4_window(f), *parts))
