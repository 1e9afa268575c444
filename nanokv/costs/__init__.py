"""What things cost before they are run: formulas.py in bytes and FLOPs, memory.py as the table of `nanokv memory`."""

from nanokv.costs.formulas import (
    ITEMSIZE,
    attention_parameters,
    cache_bytes,
    cache_slots,
    decode_flops,
    kv_bytes,
    kv_bytes_per_token,
    layer_parameters,
    parameters,
    prefill_flops,
    quantized_bytes,
    quantized_parts,
    weight_bytes,
)

__all__ = [
    "ITEMSIZE",
    "attention_parameters",
    "cache_bytes",
    "cache_slots",
    "decode_flops",
    "kv_bytes",
    "kv_bytes_per_token",
    "layer_parameters",
    "parameters",
    "prefill_flops",
    "quantized_bytes",
    "quantized_parts",
    "weight_bytes",
]
