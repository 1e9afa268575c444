"""The command that resumes a conversation, with the flags that the session file does not hold."""

import shlex

from nanokv.apps.cli.chat.options import ChatOptions
from nanokv.apps.cli.common.arguments import environment
from nanokv.apps.cli.common.options import CACHE, BeamOptions
from nanokv.cache.options import kind_text


def resuming(given: ChatOptions) -> str:
    """The command, as in `nanokv chat -m smollm2 --resume`."""
    words = ["nanokv", "chat"]
    for flag, value, default in kept(given):
        if value == default:
            continue
        words.append(flag)
        if value is not True:
            words.append(str(value))
    return shlex.join([*words, "--resume"])


def kept(given: ChatOptions) -> list[tuple]:
    """(flag, value, default): a flag is written if its value is not the default."""
    model = given.model
    cache = given.cache
    beams = given.sampling.beams or BeamOptions(0)
    speed = given.speed
    template = given.template
    guess = speed.speculate and ":".join(map(str, speed.speculate))
    return [
        ("-m", model.source, _model_without_flag()),
        ("--revision", model.revision, None),
        ("--dtype", model.dtype, "auto"),
        ("--device", model.device, "auto"),
        ("--cache", kind_text(cache.name, cache.options), kind_text(CACHE, {})),
        ("--context", cache.context, None),
        ("--tensor-parallel", given.ranks.tensor_parallel, None),
        ("--offline", model.offline, False),
        ("--fast", speed.fast, False),
        ("--plain", speed.plain, False),
        ("--quantize", speed.quantize, None),
        ("--dequantize", speed.dequantize, False),
        ("--batch-invariant", speed.invariant, False),
        ("--speculate", guess, None),
        ("--beams", beams.count, 0),
        ("--chat-template", template.choice, None),
        ("--overflow", given.overflow, "stop"),
        ("--thinking", template.thinking, None),
        ("--allow-special", template.allow_special, False),
        ("--no-loop-guard", given.no_loop_guard, False),
    ]


def _model_without_flag() -> str | None:
    """The model for which `-m` can be omitted: tiny, and none while NANOKV_MODEL is set.

    `-m` is also written for the model of NANOKV_MODEL, as the variable may change.
    """
    if environment("NANOKV_MODEL"):
        return None
    return "tiny"
