"""Values with which an unknown field of config.json, or key of a GGUF file, has no effect.

Checkpoints contain fields of other families, switched off: `qkv_bias: false`,
`num_nextn_predict_layers: 0`. A complete list of names is impossible, so the value decides. Two
kinds of names have a separate rule: ALWAYS and MULTIPLIERS.
"""

import re

# Parts that every supported family has: RoPE, causal attention, RMSNorm, SwiGLU. They must be true.
ALWAYS = re.compile(
    "(use_|is_|apply_|has_)?(rope|rotary|rotary_(pos_|position_)?emb(edding)?s?|"
    "causal(_mask|_attention)?|rms_?norm|swiglu|glu|gated_mlp|yarn_scaling)"
)
# Numbers that multiply something: only 1 changes nothing.
MULTIPLIERS = re.compile(
    "(.*_)?(multiplier|scale|scaling|factor|pct|percent|percentage|fraction|temperature)"
)


def is_off(name: str, value: object) -> bool:
    """Whether the field has no effect: its value is false, 0, null or empty.

    For names of ALWAYS the value must be true or null; for a number of MULTIPLIERS it must be 1.
    """
    if value is None:
        return True
    if ALWAYS.fullmatch(name):
        return value is True
    if MULTIPLIERS.fullmatch(name) and type(value) in (int, float):
        return value == 1
    return not value
