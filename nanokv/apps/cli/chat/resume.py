"""The command that goes on with a conversation: the model and what else the session file does not hold."""

import shlex

from nanokv.apps.cli.common.arguments import CACHE
from nanokv.cache.options import kind_text

KEPT = {  # flag → its default. A model is named unless it is tiny: NANOKV_MODEL may be another one the next time
    "model": "tiny", "revision": None, "dtype": "auto", "device": "auto", "cache": (CACHE, {}), "context": None,
    "tensor_parallel": None, "offline": False, "fast": False, "plain": False, "quantize": None, "speculate": None,
    "beams": None, "chat_template": None, "overflow": "stop", "thinking": None, "allow_special": False,
    "no_loop_guard": False,
}  # fmt: skip


def resuming(args) -> str:
    """`nanokv chat -m smollm2 --resume`."""
    words = ["nanokv", "chat"]
    for name, default in KEPT.items():
        value = getattr(args, name)
        if value != default:
            flag = "-m" if name == "model" else "--" + name.replace("_", "-")
            words += [flag] if value is True else [flag, text_of(value)]
    return shlex.join([*words, "--resume"])


def text_of(value) -> str:
    """A flag's value as it is typed; --cache and --speculate were read into a name and what follows it."""
    if not isinstance(value, tuple):
        return str(value)
    name, rest = value
    return kind_text(name, rest) if isinstance(rest, dict) else f"{name}:{rest}"
