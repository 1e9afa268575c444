"""The flags that commands share, each next to the frozen dataclass that it fills.

A command's `run(args)` turns argparse's Namespace into these dataclasses; no other function takes
a Namespace. A flag that was not given is None, so that the checkpoint's generation_config can
apply. Order: flag > environment > checkpoint > built-in.
"""

import argparse
import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanokv.apps.cli.common.arguments import (
    SETTINGS,
    cache_name,
    environment,
    integer,
    nearest,
    real,
    setting,
)
from nanokv.decoding.ranges import RANGES
from nanokv.errors import NanoKVError

if TYPE_CHECKING:
    from argparse import _ActionsContainer, _ArgumentGroup

    from nanokv.config import GenerationConfig
    from nanokv.decoding.draw import SamplingParams

DEFAULT_NEW_TOKENS = 1024
CACHE = "growing"  # equal to the dict cache, which copies all keys and values at every step
DTYPES = ("auto", "float32", "bfloat16", "float16")
THREADS = "CPU threads (default: $NANOKV_THREADS, else the cores, at most one for 2 MB of weights)"
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


# --- which code runs the model --------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedOptions:
    """Which code runs the model (speed.py), and which draft speculates (speculation.py)."""

    fast: bool = False
    plain: bool = False
    quantize: str | None = None
    dequantize: bool = False
    invariant: bool = False
    speculate: tuple[str, int | str] | None = None  # (kind, value)


def add_speed_arguments(parser: ArgumentParser) -> None:
    """--fast, --plain, --quantize, --dequantize and --batch-invariant."""
    about = (
        "Default: native kernels, as soon as they are built in the background; on a GPU a decode "
        "step is a recorded graph."
    )
    group = parser.add_argument_group("speed", about)
    group.add_argument(
        "--fast", action="store_true", help="wait until the kernels are built, and name what runs"
    )
    group.add_argument(
        "--plain", action="store_true", help="the plain model, without fused weights and kernels"
    )
    group.add_argument(
        "--quantize",
        choices=("int8", "int4"),
        metavar="TYPE",
        help="weights in int8 or int4, on a CPU; implies --fast",
    )
    group.add_argument(
        "--dequantize",
        action="store_true",
        help="turn the blocks of a GGUF file into plain numbers; by default kernels read them as "
        "stored",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same answer whoever else is in the batch, and in chunks of any size; slower, on a "
        "CPU, with caches that keep exact values (docs/batch-invariance.md); implies --fast",
    )


def speed_options(args: Namespace) -> SpeedOptions:
    """The options of the flags of add_speed_arguments."""
    return SpeedOptions(args.fast, args.plain, args.quantize, args.dequantize, args.batch_invariant)


GUESSES = {"ngram": "ngram[:N]", "early-exit": "early-exit:K", "draft": "draft:MODEL"}


def add_speculate_argument(group: "_ActionsContainer") -> None:
    """--speculate, which fills SpeedOptions.speculate."""
    group.add_argument(
        "--speculate",
        metavar="HOW",
        type=guess,
        help="guess tokens and check them together: ngram[:N] copies what followed the same N "
        "words (default 2), early-exit:K uses the first K layers, draft:MODEL a smaller model of "
        "the same vocabulary",
    )


def guess(text: str) -> tuple[str, int | str]:
    """An argparse type: `KIND[:VALUE]` → (kind, value)."""
    kind, _, value = text.partition(":")
    if kind not in GUESSES:
        close = nearest(kind, GUESSES)
        hint = f"; did you mean {GUESSES[close]}?" if close else ""
        known = ", ".join(GUESSES.values())
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}{hint}")
    if not value and kind != "ngram":
        raise argparse.ArgumentTypeError(f"{kind} needs a value: {GUESSES[kind]}")
    if kind == "draft":
        return kind, value
    return kind, integer(1, 1000)(value or "2")


# --- how messages become a prompt -----------------------------------------------------------------


@dataclass(frozen=True)
class TemplateOptions:
    """The chat template and its inputs."""

    choice: str | None = None  # a template of the checkpoint by name, or a file; None: its default
    thinking: str | None = None  # one of THINKING; None: the template's default
    allow_special: bool = False  # typed control tokens become control tokens
    system: str | None = None

    def values(self) -> dict:
        """The variables of the template beside the messages."""
        if self.thinking is None:
            return {}
        return {"enable_thinking": self.thinking != "off"}


THINKING = ("show", "fold", "off")
WORDS = "show: dim, on stderr (default); fold: one line; off: ask the model not to think"


def add_template_argument(parser: "_ActionsContainer") -> None:
    """--chat-template."""
    parser.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help="one of the checkpoint's templates by its name, or a file with one",
    )


def add_thinking_argument(parser: "_ActionsContainer", words: str = WORDS) -> None:
    """--thinking: how thoughts are written. "on" means show.

    The default is None: then the template decides whether the model thinks, and thoughts are shown.
    """
    parser.add_argument(
        "--thinking",
        choices=THINKING,
        type=lambda word: {"on": "show"}.get(word, word),
        metavar="{show,fold,off}",
        help=words,
    )


def add_special_argument(parser: "_ActionsContainer", words: str) -> None:
    """--allow-special: text that spells out a control token becomes that token."""
    parser.add_argument("--allow-special", action="store_true", help=words)


def template_options(args: Namespace) -> TemplateOptions:
    """The options of --chat-template, --thinking and --allow-special."""
    return TemplateOptions(args.chat_template, args.thinking, args.allow_special)


def add_system_argument(parser: "_ActionsContainer") -> None:
    """--system, the first message; fills TemplateOptions.system."""
    parser.add_argument("-s", "--system", metavar="TEXT", help="system prompt")


# --- model, cache, ranks --------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """Which model, how its weights are held, and which code computes."""

    source: str = "tiny"  # as typed
    revision: str | None = None
    dtype: str = "auto"  # one of DTYPES
    device: str = "auto"
    threads: int | None = None
    offline: bool = False
    check_finite: bool = False
    speed: SpeedOptions | None = None  # None: the plain model, even if kernels are built
    template: TemplateOptions | None = None  # None: the command renders no messages

    @property
    def speculate(self) -> tuple[str, int | str] | None:
        """The draft of --speculate: (kind, value)."""
        if self.speed is None:
            return None
        return self.speed.speculate


@dataclass(frozen=True)
class CacheOptions:
    """Which cache, and its capacity in tokens."""

    name: str = "dict"
    options: dict = field(default_factory=dict)
    context: int | None = None  # None: the model's limit


@dataclass(frozen=True)
class RankOptions:
    """The number of processes over which each layer is split."""

    tensor_parallel: int | None = None


def add_model_arguments(parser: ArgumentParser, cache: str = "dict") -> None:
    """The flags of ModelOptions, CacheOptions and RankOptions. `cache`: the default of --cache."""
    group = parser.add_argument_group("model")
    _add_weight_arguments(group)
    _add_cache_arguments(group, cache)
    group.add_argument("--offline", action="store_true", help="never use the network")
    group.add_argument(
        "--check-finite",
        action="store_true",
        help="refuse weights with NaN or infinity: reads all weights first, 0.1 to 0.2 s per GB "
        "in memory",
    )


def _add_weight_arguments(group: "_ActionsContainer") -> None:
    group.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        default=environment("NANOKV_MODEL") or "tiny",
        help="tiny (bundled), a folder, FILE.gguf, a short name (nanokv models), or a hub name: "
        "Qwen/Qwen3-0.6B, owner/name:FILE.gguf (default: $NANOKV_MODEL, else tiny)",
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub model")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        metavar="TYPE",
        type=dtype_name,
        help="float32, bfloat16, float16, or auto: the checkpoint's own (default)",
    )
    group.add_argument(
        "--device",
        metavar="NAME",
        default="auto",
        help="cpu, cuda, cuda:1 (default: cuda if there is one)",
    )
    group.add_argument(
        "--threads",
        metavar="N",
        type=integer(1, 4096),
        help=THREADS,
    )


def _add_cache_arguments(group: "_ActionsContainer", cache: str) -> None:
    group.add_argument(
        "--cache",
        metavar="KIND",
        type=cache_name,
        default=(cache, {}),
        help="NAME or NAME:option=value, as quantized:bits=4 (default: "
        f"{cache}; docs/quantization.md and docs/eviction.md list options; "
        "an unknown NAME or option names those that exist)",
    )
    group.add_argument(
        "--context",
        metavar="N",
        type=integer(2, 100_000_000),
        help="at most N tokens in the cache (default: the model's limit)",
    )
    group.add_argument(
        "--tensor-parallel",
        metavar="N",
        type=integer(1, 1024),
        help="split each layer over N processes of this machine (torchrun starts them on several; "
        "docs/parallel.md)",
    )


def dtype_name(text: str) -> str:
    """An argparse type: fp32 is another name of float32."""
    return DTYPE_NAMES.get(text, text)


def model_options(
    args: Namespace, speed: SpeedOptions | None = None, template: TemplateOptions | None = None
) -> ModelOptions:
    """The ModelOptions of add_model_arguments' flags, with the command's other options."""
    return ModelOptions(
        args.model,
        args.revision,
        args.dtype,
        args.device,
        args.threads,
        args.offline,
        args.check_finite,
        speed,
        template,
    )


def cache_options(args: Namespace) -> CacheOptions:
    """The CacheOptions of add_model_arguments' flags."""
    name, how = args.cache
    return CacheOptions(name, how, args.context)


def rank_options(args: Namespace) -> RankOptions:
    """The RankOptions of add_model_arguments' flags."""
    return RankOptions(args.tensor_parallel)


# --- how tokens are chosen ------------------------------------------------------------------------


@dataclass(frozen=True)
class BeamOptions:
    """The number of beams, and the exponent of the length by which scores are divided."""

    count: int
    length_penalty: float = 1.0


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, and when the answer ends. None: the flag was not given."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    beams: BeamOptions | None = None

    @property
    def most(self) -> int:
        """The limit of new tokens: --max-new-tokens, else the default."""
        return self.max_new_tokens or DEFAULT_NEW_TOKENS

    def resolve(self, generation_config: "GenerationConfig") -> "SamplingParams":
        """The SamplingParams that apply: flag > checkpoint > built-in."""
        from nanokv.decoding.draw import SamplingParams  # imports torch, which --help must not

        given = {name: getattr(self, name) for name in SETTINGS if name != "max_new_tokens"}
        return SamplingParams.from_checkpoint(generation_config, **given)


def add_sampling_arguments(parser: ArgumentParser) -> None:
    """The flags of SamplingOptions, except for beams."""
    about = "Default: the checkpoint's generation_config."
    group = parser.add_argument_group("sampling", about)
    short = {"temperature": ["-t"], "max_new_tokens": ["-n"]}
    default = {"max_new_tokens": f" (default {DEFAULT_NEW_TOKENS:,})"}
    for name in SETTINGS:
        flags = [*short.get(name, []), "--" + name.replace("_", "-")]
        group.add_argument(
            *flags,
            metavar="T" if name == "temperature" else "N",
            type=setting(name),
            help=RANGES[name].help + default.get(name, ""),
        )
    group.add_argument(
        "--stop",
        metavar="STR",
        action="append",
        default=[],
        type=_stop,
        help="end the answer before STR (repeatable)",
    )


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty string would stop at once")
    return text


def sampling_options(args: Namespace, beams: BeamOptions | None = None) -> SamplingOptions:
    """The options of the flags of add_sampling_arguments."""
    return SamplingOptions(
        args.temperature,
        args.top_k,
        args.top_p,
        args.min_p,
        args.repetition_penalty,
        args.max_new_tokens,
        args.seed,
        tuple(args.stop),
        beams,
    )


def add_beam_arguments(parser: ArgumentParser) -> None:
    """The flags of beam search (beams.py)."""
    group = parser.add_argument_group("beam search")
    group.add_argument(
        "--beams",
        metavar="K",
        type=integer(1, 1000),
        help="keep the K likeliest answers, print the best",
    )
    group.add_argument(
        "--length-penalty",
        metavar="X",
        type=real(-5, 5),
        help="divide log-probabilities by length^X: above 0 favours long answers (default: 1)",
    )


def beam_options(args: Namespace) -> BeamOptions | None:
    """The options of beam search; None without --beams. NanoKVError for flags that exclude it."""
    if args.beams is None:
        if args.length_penalty is not None:
            raise NanoKVError(
                "--length-penalty is part of beam search", "add --beams 4, or leave it out"
            )
        return None
    sampling = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
    }
    for name, value in sampling.items():
        refuse_draw(name, value, "--" + name.replace("_", "-"))
    for flag, given in (("--stop", args.stop), ("--speculate", args.speculate)):
        if given:
            raise NanoKVError(
                f"{flag} works on a stream of tokens, and beams have none", f"leave out {flag}"
            )
    if args.length_penalty is None:
        return BeamOptions(args.beams)
    return BeamOptions(args.beams, args.length_penalty)


NO_DRAW: dict[str, tuple] = {  # a setting of sampling → the values with which nothing is sampled
    "temperature": (0,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "seed": (),
}


def refuse_draw(name: str, value: float | None, flag: str) -> None:
    """NanoKVError for a sampling setting beside --beams, unless its value turns sampling off."""
    if name in NO_DRAW and value not in (None, *NO_DRAW[name]):
        raise NanoKVError(
            f"--beams finds the likeliest answer and draws nothing: {flag} has no effect",
            f"leave out {flag}, or leave out --beams",
        )


def new_seed() -> int:
    """A random seed of 31 bits, short enough to type again."""
    return int.from_bytes(os.urandom(4)) >> 1


# --- output ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputOptions:
    """What is printed beside the result, and whether in colour."""

    quiet: bool = False
    color: str = "auto"
    debug: bool = False


def add_common_arguments(parser: ArgumentParser) -> "_ArgumentGroup":
    """Add the flags of every command, as a group, which is returned."""
    group = parser.add_argument_group("general")
    group.add_argument(
        "-q", "--quiet", action="store_true", help="no banner and no status on stderr"
    )
    debug = environment("NANOKV_DEBUG") not in (None, "0")
    group.add_argument("--debug", action="store_true", default=debug, help="tracebacks")
    group.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="default: auto"
    )
    group.add_argument("-h", "--help", action="help", help="this text")
    return group


def output_options(args: Namespace) -> OutputOptions:
    """The options of the flags of add_common_arguments."""
    return OutputOptions(args.quiet, args.color, args.debug)
