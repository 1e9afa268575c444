"""Bytes and FLOPs from the config alone: the arithmetic behind every table and every benchmark row.

Nothing is measured here. `itemsize` is bytes per value: 4 for fp32, 2 for bf16 and fp16.
"""

from typing import Any

from nanokv.cache.options import QUEST_PAGE, SPARE, Half, check_options, growing_slots, halves
from nanokv.config import Config
from nanokv.errors import CacheError, CapacityError

__all__ = [
    "EVERY_POSITION",
    "ITEMSIZE",
    "active_weights",
    "attention_parameters",
    "break_even_flops",
    "cache_bytes",
    "cache_slots",
    "decode_flops",
    "evicting_bytes",
    "evicting_parts",
    "fixed_bytes",
    "forward_bytes",
    "full_layers",
    "held_states",
    "keys_seen",
    "kv_bytes",
    "kv_bytes_per_token",
    "layer_parameters",
    "parameters",
    "position_bytes",
    "prefill_flops",
    "quantized_bytes",
    "quantized_parts",
    "rollback_bytes",
    "state_bytes",
    "weight_bytes",
    "window_bytes",
]
FP16 = 2  # bytes of a scale, an offset or a norm of a quantized cache
INT32 = 4  # bytes of a position in an evicting cache
FP32 = 4  # bytes of a number that a policy notes per entry
NOTES = {
    "window": 0,
    "norms": 0,
    "h2o": 1,
    "snapkv": 1,
    "matching": 2,
    "quest": 0,
}  # policy → numbers per entry
EVERY_POSITION = ("paged", "prefix", "offloaded")  # caches that keep windows whole
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def attention_parameters(config: Config, layer: int = 0) -> int:
    """q, k, v and o projections of a layer, with biases, head norms and sinks of the family."""
    C, D = config.hidden_size, config.head_dim
    H = config.num_attention_heads
    Hk = 0 if config.shares_kv(layer) else config.num_key_value_heads
    biases = (H + 2 * Hk) * D * config.qkv_bias + C * config.output_bias
    if config.linear is not None:  # a gate per value
        biases += C * H * D + H * D * config.qkv_bias
    norms = (D + D * (Hk > 0)) * config.qk_norm
    if config.family.whole_norm:
        norms = (H + Hk) * D
    sinks = H * config.family.sinks
    return 2 * C * H * D + 2 * C * Hk * D + norms + biases + sinks


def linear_parameters(config: Config) -> int:
    """A layer with the gated delta rule: its matrices, convolution, decay and norm."""
    sizes = config.linear
    if sizes is None:
        return 0
    H = sizes.linear_num_value_heads
    conv = sizes.channels * sizes.linear_conv_kernel_dim
    return linear_weights(config) + conv + 2 * H + sizes.linear_value_head_dim


def linear_weights(config: Config) -> int:
    """The matrices of a layer with the gated delta rule: q, k, v; z, beta, decay; output."""
    sizes = config.linear
    if sizes is None:
        return 0
    H = sizes.linear_num_value_heads
    values = H * sizes.linear_value_head_dim
    return config.hidden_size * (sizes.channels + 2 * values + 2 * H)


def conv_parameters(config: Config) -> int:
    """A layer with a short convolution: its matrices, the convolution and the biases."""
    sizes = config.conv
    if sizes is None:
        return 0
    C = config.hidden_size
    return 4 * C * C + C * sizes.conv_L_cache + 5 * C * sizes.conv_bias


def state_weights(config: Config) -> int:
    """The matrices of a layer without keys and values."""
    if config.conv is not None:
        return 4 * config.hidden_size**2  # two gates and the input; the output
    return linear_weights(config)


def mlp_parameters(config: Config, layer: int = 0) -> int:
    """The three SwiGLU matrices; with experts, those of all experts and the router."""
    C = config.hidden_size
    experts = config.experts_of(layer)
    if experts is None:
        return 3 * C * config.intermediate_size
    width = experts.moe_intermediate_size
    biases = (2 * width + C + 1) * config.family.stacked
    return experts.num_experts * (3 * C * width + C + biases)


def layer_parameters(config: Config, layer: int = 0) -> int:
    """Attention, MLP or experts, and the layer norms."""
    norms = len(config.family.norms) * config.hidden_size
    mixer = attention_parameters(config, layer)
    if config.has_state(layer):
        mixer = linear_parameters(config) + conv_parameters(config)  # one of them is 0
    return mixer + mlp_parameters(config, layer) + norms


def parameters(config: Config) -> int:
    """All parameters; a tied head counts once. Qwen3-0.6B: 596,049,920."""
    tables = config.vocab_size * config.hidden_size
    if not config.tie_word_embeddings:
        tables *= 2
    layers = sum(layer_parameters(config, layer) for layer in range(config.num_hidden_layers))
    return tables + layers + config.hidden_size


def active_weights(config: Config) -> int:
    """Weights of the layers' matrices that one token is multiplied with.

    With experts, the router and the experts that the token is sent to.
    """
    C, D, L = config.hidden_size, config.head_dim, config.num_hidden_layers
    full = L - config.states
    own = config.num_kv_layers - config.states  # with keys and values of their own
    heads = full * config.num_attention_heads + own * config.num_key_value_heads
    total = 2 * C * D * heads + config.states * state_weights(config)
    if config.linear is not None:  # a gate per value
        total += full * C * D * config.num_attention_heads
    for experts in map(config.experts_of, range(L)):
        if experts is None:
            total += 3 * C * config.intermediate_size
        else:
            total += 3 * C * experts.moe_intermediate_size * experts.num_experts_per_tok
            total += C * experts.num_experts
    return total


def weight_bytes(config: Config, itemsize: int) -> int:
    """Bytes of the weights in memory."""
    return parameters(config) * itemsize


def forward_bytes(config: Config, itemsize: int) -> int:
    """The most bytes per token that a forward holds besides weights and cache, rounded up.

    Gate, up and their product, the residual stream, and the tensors of attention, with an fp32 copy
    for each norm and rotation.
    """
    C, D = config.hidden_size, config.head_dim
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * D
    return 3 * config.intermediate_size * itemsize + (3 * C + heads) * (itemsize + 4)


def kv_bytes_per_token(config: Config, itemsize: int) -> int:
    """2 (K and V) × L × Hk × D × itemsize. Qwen3-0.6B in bf16: 114,688.

    Without the layers that have a window: once it is full, a token adds nothing there.
    """
    return full_layers(config) * position_bytes(config, itemsize)


def full_layers(config: Config) -> int:
    """Layers that keep keys and values of all positions."""
    return config.windows[:: config.kv_sharing_factor].count(None)


def position_bytes(config: Config, itemsize: int) -> int:
    """Bytes of the keys and values of one position in one layer."""
    return 2 * config.num_key_value_heads * config.head_dim * itemsize


def window_bytes(config: Config, tokens: int, itemsize: int) -> int:
    """Bytes of a row in the layers with a window: at most window − 1 + SPARE positions each."""
    kept = config.windows[:: config.kv_sharing_factor]
    held = sum(min(tokens, window - 1 + SPARE) for window in kept if window)
    return held * position_bytes(config, itemsize)


def state_bytes(config: Config, itemsize: int) -> int:
    """Bytes of a row in the layers with a recurrent state, whatever the number of tokens.

    S in fp32, and K−1 inputs of the convolution. A snapshot of all layers weighs as much.
    """
    S = 0
    if config.linear is not None:
        sizes = config.linear
        S = sizes.linear_num_value_heads * sizes.linear_key_head_dim * sizes.linear_value_head_dim
    channels, K = conv_sizes(config)
    return config.states * (FP32 * S + itemsize * channels * (K - 1))


def conv_sizes(config: Config) -> tuple[int, int]:
    """(channels, K) of the convolution in the layers with a state; (0, 1) if there are none."""
    if config.conv is not None:
        return config.hidden_size, config.conv.conv_L_cache
    if config.linear is not None:
        return config.linear.channels, config.linear.linear_conv_kernel_dim
    return 0, 1


def rollback_bytes(config: Config, tokens: int, itemsize: int) -> int:
    """Bytes of a row in the layers with a state, by which its last tokens can be taken back.

    After a prompt: the state before its last SPARE tokens and what they have written
    (cache/state.py). While decoding up to 2·SPARE tokens: in Qwen3.5 up to 2.2 times as much.
    """
    back = min(tokens, SPARE)
    if not config.states or not tokens:
        return 0
    channels, K = conv_sizes(config)
    written = itemsize * channels * (K - 1 + back)
    if config.linear is not None:
        sizes = config.linear
        widths = sizes.linear_key_head_dim + sizes.linear_value_head_dim + 2  # k, v, g and beta
        written += FP32 * back * sizes.linear_num_value_heads * widths
    mark = state_bytes(config, itemsize) if tokens > SPARE else 0
    return config.states * written + mark


def held_states(config: Config, tokens: int, itemsize: int) -> int:
    """Bytes of a row in the layers with a state after a prompt, without snapshots."""
    if not tokens:
        return 0
    return state_bytes(config, itemsize) + rollback_bytes(config, tokens, itemsize)


def kv_bytes(config: Config, tokens: int, batch_size: int, itemsize: int) -> int:
    """Bytes that an exact cache holds for `tokens` tokens in each of batch_size rows."""
    row = kv_bytes_per_token(config, itemsize) * tokens + fixed_bytes(config, tokens, itemsize)
    return batch_size * row


def fixed_bytes(config: Config, tokens: int, itemsize: int) -> int:
    """Bytes of a row that stop growing: full windows, states, and what takes tokens back."""
    return window_bytes(config, tokens, itemsize) + held_states(config, tokens, itemsize)


def decode_flops(config: Config, context: int) -> int:
    """2 FLOPs per weight of every matrix, and 4·H·D per visible key (scores and mix) and layer."""
    D, H = config.head_dim, config.num_attention_heads
    matrices = active_weights(config) + config.vocab_size * config.hidden_size
    keys = sum(context if seen is None else min(context, seen) for seen in config.windows)
    return 2 * matrices + 4 * H * D * keys + rule_flops(config)


def prefill_flops(config: Config, tokens: int, start_pos: int = 0) -> int:
    """T rows through every layer with causal attention, and one row through the head."""
    D, H = config.head_dim, config.num_attention_heads
    seen = sum(keys_seen(tokens, start_pos, window) for window in config.windows)
    head = 2 * config.vocab_size * config.hidden_size
    rule = rule_flops(config) * tokens
    return 2 * active_weights(config) * tokens + 4 * H * D * seen + rule + head


def rule_flops(config: Config) -> int:
    """FLOPs per token of the gated delta rule: decay, two products with S and the update."""
    if config.linear is None:
        return 0
    sizes = config.linear
    S = sizes.linear_num_value_heads * sizes.linear_key_head_dim * sizes.linear_value_head_dim
    return 7 * S * config.states


def keys_seen(tokens: int, start_pos: int, window: int | None) -> int:
    """Keys that `tokens` queries from start_pos on see in one layer, all together."""
    if window is None:
        return tokens * start_pos + tokens * (tokens + 1) // 2
    grows = max(0, min(tokens, window - start_pos))  # queries that see all positions up to theirs
    return keys_seen(grows, start_pos, None) + (tokens - grows) * window


def break_even_flops(config: Config, tokens: int, sent: int, link: float) -> float:
    """FLOP/s at which a prefill takes as long as sending its KV.

    `sent`: bytes of the keys and values of `tokens` tokens. `link`: bytes per second. A slower
    machine gains by receiving them, a faster one by prefilling again.

    Apart from attention's quadratic part, both costs grow linearly with the tokens: 2 FLOPs per
    active weight, against 2·L·Hk·D values. Large models have more weights per KV head, so sending
    pays off for them first.
    """
    return prefill_flops(config, tokens) * link / max(1, sent)


def cache_bytes(
    name: str,
    config: Config,
    tokens: int,
    batch_size: int = 1,
    itemsize: int = 2,
    capacity: int | None = None,
    last: int = 1,
    **options: Any,
) -> int:
    """Bytes that a cache of this kind holds after `tokens` tokens per row, exactly its `nbytes`.

    `last`: how many tokens came in the last append (a decode: 1); only for a quantized cache, which
    keeps them exact. Raises CacheError for an unknown kind or option, or a negative number.
    """
    check_options(name, options, objects=True)
    for what, value in (("tokens", tokens), ("batch_size", batch_size), ("last", last)):
        if type(value) is not int or value < 0:
            raise CacheError(f"{what} is {value!r}: a whole number ≥ 0 was expected")
    if name == "batch":
        name = options.pop("of", "dict")
    if name == "evicting":
        whole = capacity or config.max_position_embeddings
        return batch_size * evicting_bytes(config, tokens, itemsize, whole, **options)
    if name == "quantized":
        return quantized_bytes(config, tokens, batch_size, itemsize, last=last, **options)
    slots = cache_slots(name, config, tokens, capacity, **options)
    if name in EVERY_POSITION:
        pages = slots * (config.num_kv_layers - config.states) * position_bytes(config, itemsize)
        return batch_size * (pages + held_states(config, tokens, itemsize))
    row = kv_bytes_per_token(config, itemsize) * slots + fixed_bytes(config, tokens, itemsize)
    return batch_size * row


def cache_slots(
    name: str,
    config: Config,
    tokens: int,
    capacity: int | None = None,
    *,
    page: int = 16,
    window: int = 0,
    sinks: int = 0,
    **_: Any,
) -> int:
    """Slots of K and V per row that a cache has allocated for `tokens` tokens."""
    whole = capacity or config.max_position_embeddings
    if name == "static":
        if tokens > whole:
            raise CapacityError(f"{tokens} tokens do not fit into a static cache of {whole}")
        return whole if tokens else 0
    if name == "growing":
        return growing_slots(tokens, capacity)
    if name in ("paged", "prefix"):
        return -(-tokens // page) * page
    if name == "sliding":
        return min(tokens, sinks + (window or whole) - 1)
    return tokens


def evicting_bytes(config: Config, tokens: int, itemsize: int, whole: int, **options: Any) -> int:
    """The sum of `evicting_parts` over all layers and KV heads of one row."""
    entries, each, bounds = evicting_parts(config, tokens, itemsize, whole, **options)
    return config.num_kv_layers * config.num_key_value_heads * (entries * each + bounds)


def evicting_parts(
    config: Config,
    tokens: int,
    itemsize: int,
    whole: int,
    *,
    policy: str = "window",
    budget: int = 0,
    page: int = QUEST_PAGE,
    **_: Any,
) -> tuple[int, int, int]:
    """Of one layer, KV head and row: (entries, bytes of each, bytes of Quest's bounds).

    An entry has a key, a value, a position and what the policy notes. `whole`: the budget, unless
    one is given. Quest keeps all entries, and two keys per full page.
    """
    each = 2 * config.head_dim * itemsize + INT32 + FP32 * NOTES[policy]
    if policy == "quest":
        return tokens, each, tokens // page * 2 * config.head_dim * itemsize
    return min(tokens, budget or whole), each, 0


def quantized_bytes(
    config: Config, tokens: int, batch_size: int, itemsize: int, **options: Any
) -> int:
    """The sum of `quantized_parts` over all layers, KV heads and rows."""
    parts = quantized_parts(config, tokens, itemsize, **options)
    quantized = full_layers(config) * config.num_key_value_heads * sum(parts)
    return batch_size * (quantized + fixed_bytes(config, tokens, itemsize))


def quantized_parts(
    config: Config,
    tokens: int,
    itemsize: int,
    *,
    group: int = 32,
    residual: int = 32,
    first: int = 0,
    outliers: int = 0,
    last: int = 1,
    **options: Any,
) -> tuple[int, int, int]:
    """Bytes of one layer, KV head and row: (quantized keys, quantized values, exact tokens).

    `outliers` channels of the keys have 8 bits more, and per block two fp16 numbers and a channel
    number of 2 bytes.
    """
    later = max(0, tokens - first)
    # Quantized by the last append.
    old = max(0, (later - min(last, later) - residual) // group * group)
    D = config.head_dim
    keys, values = (
        old * per_token + old // group * per_block
        for per_token, per_block in (scheme_bytes(half, D, itemsize) for half in halves(options))
    )
    keys += old * outliers + old // group * outliers * 3 * FP16
    return keys, values, 2 * (tokens - old) * D * itemsize


def scheme_bytes(half: Half, D: int, itemsize: int) -> tuple[int, int]:
    """Bytes of packed codes and scales of one KV head: (per token, per block).

    fp16 are: scale and offset, of a token or of a channel; the norm of lloyd; for qjl also the norm
    of the rest.
    """
    packed = D * half.bits // 8
    return {
        "channel": (packed, 2 * FP16 * D),
        "token": (packed + 2 * FP16, 0),
        "lloyd": (packed + FP16, 0),
        "qjl": (packed + 2 * FP16, 0),
        "exact": (D * itemsize, 0),
    }[half.scheme]
