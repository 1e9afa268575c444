"""Which values of an unknown field of config.json, or key of a GGUF file, leave the maths as they are.

Checkpoints carry fields of other families, switched off: `qkv_bias: false`,
`num_nextn_predict_layers: 0`. Other programs load them, and a list of all names has no end, so the
value decides. Two kinds of names have a rule of their own.
"""

import re

# What every family here has: RoPE, causal attention, RMSNorm, SwiGLU. False would take it away.
ALWAYS = re.compile(
    "(use_|is_|apply_|has_)?(rope|rotary|rotary_(pos_|position_)?emb(edding)?s?|"
    "causal(_mask|_attention)?|rms_?norm|swiglu|glu|gated_mlp|yarn_scaling)"
)
# Numbers that multiply something: 1 changes nothing, and 0 does.
MULTIPLIERS = re.compile(
    "(.*_)?(multiplier|scale|scaling|factor|pct|percent|percentage|fraction|temperature)"
)


def is_off(name: str, value: object) -> bool:
    """False, 0, null and what is empty switch nothing on. A number that multiplies must be 1, and what
    every family has must be true."""
    if value is None:
        return True
    if ALWAYS.fullmatch(name):
        return value is True
    if MULTIPLIERS.fullmatch(name) and type(value) in (int, float):
        return value == 1
    return not value
