"""The flags of `nanokv chat`, and the options that they set."""

import argparse
from dataclasses import dataclass, replace

from nanokv.apps.cli.common import options
from nanokv.apps.cli.common.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    RankOptions,
    SamplingOptions,
    SpeedOptions,
    TemplateOptions,
)


@dataclass(frozen=True)
class ChatOptions:
    """The options of `nanokv chat`."""

    model: ModelOptions
    cache: CacheOptions
    sampling: SamplingOptions
    output: OutputOptions
    ranks: RankOptions
    resume: str | None = None  # id of a session; "": the newest one
    no_save: bool = False
    overflow: str = "stop"
    stats: str = "on"
    markdown: bool = False
    jsonl: bool = False
    no_loop_guard: bool = False

    @property
    def speed(self) -> SpeedOptions:
        """The model's speed options, which chat always sets."""
        assert self.model.speed is not None
        return self.model.speed

    @property
    def template(self) -> TemplateOptions:
        """The model's template options, which chat always sets."""
        assert self.model.template is not None
        return self.model.template


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of chat beyond the general ones."""
    options.add_model_arguments(parser, options.CACHE)
    options.add_speed_arguments(parser)
    options.add_sampling_arguments(parser)
    options.add_system_argument(parser)
    group = parser.add_argument_group("chat")
    options.add_speculate_argument(group)
    options.add_beam_arguments(parser)
    _add_session_arguments(group)
    options.add_template_argument(group)
    options.add_thinking_argument(group)
    _add_display_arguments(group)
    options.add_special_argument(group, "typed control tokens become control tokens")
    group.add_argument(
        "--no-loop-guard", action="store_true", help="do not stop an answer that repeats itself"
    )


def _add_session_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--resume",
        metavar="ID",
        nargs="?",
        const="",
        help="continue the last session, or the one with this ID",
    )
    group.add_argument("--list", action="store_true", help="saved sessions, newest first")
    group.add_argument(
        "--no-save", action="store_true", help="do not write this conversation to disk"
    )
    group.add_argument(
        "--overflow",
        choices=("stop", "drop"),
        default="stop",
        help="context full: refuse the message (default), or drop the oldest turns",
    )


def _add_display_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stats",
        choices=("on", "off"),
        default="on",
        help="the line after each answer, in a terminal (default on)",
    )
    group.add_argument(
        "--markdown", action="store_true", help="format finished blocks of an answer"
    )
    group.add_argument(
        "--jsonl",
        "--json",
        action="store_true",
        help="one OpenAI chat.completion per turn, lossless",
    )


def command_options(args: argparse.Namespace) -> ChatOptions:
    """The options from the parsed flags. Flags that contradict each other are refused."""
    sampling = options.sampling_options(args, options.beam_options(args))
    speed = replace(options.speed_options(args), speculate=args.speculate)
    template = replace(options.template_options(args), system=args.system)
    return ChatOptions(
        options.model_options(args, speed, template),
        options.cache_options(args),
        sampling,
        options.output_options(args),
        options.rank_options(args),
        args.resume,
        args.no_save,
        args.overflow,
        args.stats,
        args.markdown,
        args.jsonl,
        args.no_loop_guard,
    )
