"""The flags that commands share, each beside the field that it fills, and the options made of them.

A command's `run(args)` turns the Namespace of argparse into frozen dataclasses; below it only these
travel. A flag that was not given is None: only then can the checkpoint's generation_config apply.
Order: flag > environment > checkpoint > built-in.
"""

import argparse
import os
from dataclasses import dataclass, field

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

DEFAULT_NEW_TOKENS = 1024
CACHE = "growing"  # holds what the dict cache holds, which copies every key and value at every step
DTYPES = ("auto", "float32", "bfloat16", "float16")
THREADS = "CPU threads (default: $NANOKV_THREADS, else the cores, at most one for 2 MB of weights)"
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


# --- which code computes --------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedOptions:
    """Which code computes (speed.py), and what guesses ahead (speculation.py)."""

    fast: bool = False
    plain: bool = False
    quantize: str | None = None
    speculate: tuple[str, int | str] | None = None  # (kind, value)


def add_speed_arguments(parser) -> None:
    """For the commands that answer."""
    about = (
        "Default: native kernels, as soon as they are built in the background; on a GPU a decode "
        "step is a recorded graph."
    )
    group = parser.add_argument_group("speed", about)
    group.add_argument(
        "--fast", action="store_true", help="wait until the kernels are built, and say what runs"
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


def speed_options(args) -> SpeedOptions:
    """Of add_speed_arguments."""
    return SpeedOptions(args.fast, args.plain, args.quantize)


GUESSES = {"ngram": "ngram[:N]", "early-exit": "early-exit:K", "draft": "draft:MODEL"}


def add_speculate_argument(group) -> None:
    """What guesses ahead; fills SpeedOptions.speculate."""
    group.add_argument(
        "--speculate",
        metavar="HOW",
        type=guess,
        help="guess tokens and check them together: ngram[:N] copies what followed the same N "
        "words (default 2), early-exit:K asks the first K layers, draft:MODEL a smaller model of "
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
    return kind, value if kind == "draft" else integer(1, 1000)(value or "2")


# --- how messages become a prompt -----------------------------------------------------------------


@dataclass(frozen=True)
class TemplateOptions:
    """The chat template, and what it is given."""

    choice: str | None = None  # one of the checkpoint's by its name, or a file; None: its own
    thinking: str | None = None  # one of THINKING; None: as the template does by itself
    allow_special: bool = False  # control tokens that somebody typed are meant
    system: str | None = None

    def values(self) -> dict:
        """What the template is given beside the messages."""
        return {"enable_thinking": self.thinking != "off"} if self.thinking else {}


THINKING = ("show", "fold", "off")
WORDS = "show: dim, on stderr (default); fold: one line; off: ask the model not to think"


def add_template_argument(parser) -> None:
    """Which template."""
    parser.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help="one of the checkpoint's templates by its name, or a file with one",
    )


def add_thinking_argument(parser, words: str = WORDS) -> None:
    """What becomes of thoughts. None where it is not given: then the template decides, and they are
    shown. "on" is another word for show."""
    parser.add_argument(
        "--thinking",
        choices=THINKING,
        type=lambda word: {"on": "show"}.get(word, word),
        metavar="{show,fold,off}",
        help=words,
    )


def add_special_argument(parser, words: str) -> None:
    """Whether control tokens that are spelled out are taken for them."""
    parser.add_argument("--allow-special", action="store_true", help=words)


def template_options(args) -> TemplateOptions:
    """Of the three above."""
    return TemplateOptions(args.chat_template, args.thinking, args.allow_special)


def add_system_argument(parser) -> None:
    """The first message; fills TemplateOptions.system."""
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
    speed: SpeedOptions | None = None  # None: the plain model, whatever is built
    template: TemplateOptions | None = None  # None: the command renders no messages


@dataclass(frozen=True)
class CacheOptions:
    """Which cache, with room for how many tokens."""

    name: str = "dict"
    options: dict = field(default_factory=dict)
    context: int | None = None  # None: the model's limit


@dataclass(frozen=True)
class RankOptions:
    """Over how many processes each layer is split."""

    tensor_parallel: int | None = None


def add_model_arguments(parser, cache: str = "dict") -> None:
    """Which model, how it is held, which cache, how many ranks."""
    group = parser.add_argument_group("model")
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
    group.add_argument(
        "--cache",
        metavar="KIND",
        type=cache_name,
        default=(cache, {}),
        help=f"NAME or NAME:option=value (default: {cache})",
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
    group.add_argument("--offline", action="store_true", help="never ask the network")
    group.add_argument(
        "--check-finite",
        action="store_true",
        help="refuse weights that hold NaN or infinity: reads them all first, 0.1 to 0.2 s per GB "
        "in memory",
    )


def dtype_name(text: str) -> str:
    """An argparse type: fp32 is another name of float32."""
    return DTYPE_NAMES.get(text, text)


def model_options(
    args, speed: SpeedOptions | None = None, template: TemplateOptions | None = None
) -> ModelOptions:
    """Of add_model_arguments, with what else the command knows of."""
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


def cache_options(args) -> CacheOptions:
    """Of the same."""
    return CacheOptions(*args.cache, args.context)


def rank_options(args) -> RankOptions:
    """Of the same."""
    return RankOptions(args.tensor_parallel)


# --- how tokens are chosen ------------------------------------------------------------------------


@dataclass(frozen=True)
class BeamOptions:
    """The beams that are kept, and the exponent of their length."""

    count: int
    length_penalty: float = 1.0


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen and when the answer ends; None: not given."""

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
        """New tokens at most, also where nobody has said how many."""
        return self.max_new_tokens or DEFAULT_NEW_TOKENS

    def resolve(self, generation_config):
        """The SamplingParams that apply: flag > checkpoint > built-in."""
        from nanokv.decoding.draw import SamplingParams  # needs torch, which --help does not

        given = {name: getattr(self, name) for name in SETTINGS if name != "max_new_tokens"}
        return SamplingParams.from_checkpoint(generation_config, **given)


def add_sampling_arguments(parser) -> None:
    """How the next token is chosen and when the answer ends."""
    about = "Default: the checkpoint's generation_config."
    group = parser.add_argument_group("sampling", about)
    short = {"temperature": ["-t"], "max_new_tokens": ["-n"]}
    default = {"max_new_tokens": f" (default {DEFAULT_NEW_TOKENS:,})"}
    for name in SETTINGS:
        flags = [*short.get(name, []), "--" + name.replace("_", "-")]
        group.add_argument(
            *flags,
            metavar="N" if name != "temperature" else "T",
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


def sampling_options(args, beams: BeamOptions | None = None) -> SamplingOptions:
    """Of add_sampling_arguments."""
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


def add_beam_arguments(parser) -> None:
    """Beam search (beams.py)."""
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


def beam_options(args) -> BeamOptions | None:
    """None without --beams. Flags that contradict it are refused, before anything is loaded."""
    if args.beams is None:
        if args.length_penalty is not None:
            raise NanoKVError(
                "--length-penalty is part of beam search", "add --beams 4, or leave it out"
            )
        return None
    shaping = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
    }
    for name, value in shaping.items():
        refuse_draw(name, value, "--" + name.replace("_", "-"))
    for flag, given in (("--stop", args.stop), ("--speculate", args.speculate)):
        if given:
            raise NanoKVError(
                f"{flag} works on a stream of tokens, and beams have none", f"leave out {flag}"
            )
    return BeamOptions(args.beams, 1.0 if args.length_penalty is None else args.length_penalty)


NO_DRAW: dict[str, tuple] = {  # settings of a draw → values with which there is none anyway
    "temperature": (0,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "seed": (),
}


def refuse_draw(name: str, value, flag: str) -> None:
    """A setting that shapes a draw, at a value that would."""
    if name in NO_DRAW and value not in (None, *NO_DRAW[name]):
        raise NanoKVError(
            f"--beams looks for the likeliest answer and draws nothing: {flag} has no part in it",
            f"leave out {flag}, or leave out --beams",
        )


def new_seed() -> int:
    """31 random bits: short enough to type again."""
    return int.from_bytes(os.urandom(4)) >> 1


# --- what is said ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputOptions:
    """What is said beside the result, and in which colours."""

    quiet: bool = False
    color: str = "auto"
    debug: bool = False


def add_common_arguments(parser):
    """What main adds to every command; returns the group."""
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


def output_options(args) -> OutputOptions:
    """Of add_common_arguments."""
    return OutputOptions(args.quiet, args.color, args.debug)
