"""The prompt of `nanokv generate` and `nanokv trace`: its sources, and its token ids.

The prompt is an argument, a file, stdin, or several of these in that order. It is one user message
in the model's chat template. With --raw, or without a template, the model continues the text. One
trailing newline of a file or of stdin is dropped, as the shell's $(…) does, so
`echo hi | nanokv generate -` and `nanokv generate hi` are the same prompt.
"""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import terminal
from nanokv.apps.cli.common.options import (
    OutputOptions,
    TemplateOptions,
    add_special_argument,
    add_system_argument,
    add_template_argument,
    add_thinking_argument,
    template_options,
)
from nanokv.apps.cli.common.plan import Loaded
from nanokv.apps.cli.common.text import clean, read_prompt_bytes, refuse_special, stdin
from nanokv.decoding import completion
from nanokv.errors import ContextError, NanoKVError
from nanokv.text.thinking import opens_thinking

if TYPE_CHECKING:
    from nanokv.text.tokenizer import Tokenizer

PATIENCE_S = 2.0  # after this long without input, a notice says that stdin is read


@dataclass(frozen=True)
class PromptOptions:
    """The sources of the prompt, and the form in which it is sent."""

    argument: str | None = None
    flag: str | None = None  # the value of -p
    file: Path | None = None
    raw: bool = False
    chat: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)


def add_prompt_arguments(parser: ArgumentParser) -> None:
    """PROMPT, -p, --file, and the flags for the form in which they are sent."""
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text; - reads stdin; piped stdin is put after it, with a blank line between",
    )
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "-p", "--prompt", dest="prompt_flag", metavar="TEXT", help="the same as PROMPT"
    )
    group.add_argument(
        "--file",
        metavar="FILE",
        type=Path,
        help="read the prompt from FILE (after PROMPT, if both)",
    )
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--raw",
        action="store_true",
        help="continue the text as it is; otherwise it is a message in the chat template of a "
        "model that has one",
    )
    form.add_argument(
        "--chat",
        action="store_true",
        help="require the chat template: an error if the model has none",
    )
    add_system_argument(group)
    add_template_argument(group)
    add_thinking_argument(group)
    add_special_argument(group, "control tokens written in the prompt become control tokens")


def prompt_options(args: Namespace) -> PromptOptions:
    """The options of the flags of add_prompt_arguments."""
    template = replace(template_options(args), system=args.system)
    return PromptOptions(args.prompt, args.prompt_flag, args.file, args.raw, args.chat, template)


def read_prompt(options: PromptOptions, output: OutputOptions, example: str) -> str:
    """The texts of argument, file and stdin, in that order, separated by a blank line.

    Raises NanoKVError, with `example` in the hint, if there is no prompt or an empty one.
    """
    if options.argument not in (None, "-") and options.flag is not None:
        raise NanoKVError(
            "the prompt is given twice: as an argument and with -p", "leave one of them out"
        )
    wants_stdin = options.argument == "-"
    parts = []
    text = options.flag
    if text is None:
        text = options.argument
    if text is not None and text != "-":
        parts.append(clean(text))
    if options.file is not None:
        name = terminal.sanitize_line(str(options.file))
        parts.append(read_prompt_bytes(options.file.read_bytes(), name).removesuffix("\n"))
    piped = (sys.stdin is not None or wants_stdin) and not terminal.is_tty(sys.stdin)
    if piped and (wants_stdin or options.file is None):
        parts.append(read_stdin(output).removesuffix("\n"))
    if not parts:
        command = " ".join(example.split()[:2])
        raise NanoKVError("no prompt", f"{example}, or pipe it: cat notes.txt | {command} -")
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt or (options.chat and not prompt.strip()):
        raise NanoKVError("the prompt is empty", example)
    return prompt


def read_stdin(output: OutputOptions) -> str:
    """Read stdin to its end. If no input comes, a notice explains the wait after PATIENCE_S."""
    source = stdin()
    try:
        import select

        if not select.select([source], [], [], PATIENCE_S)[0]:
            terminal.notice("waiting for stdin (if there is no input: … < /dev/null)", output)
    except (OSError, ValueError):  # on Windows, select takes sockets only
        pass
    return read_prompt_bytes(source.read(), "stdin")


def encode(options: PromptOptions, loaded: Loaded, prompt: str) -> list[int]:
    """Prompt → ids, through the template or raw. NanoKVError for a typed control token."""
    tokenizer = loaded.tokenizer
    template = options.template
    for text in (prompt, template.system or ""):
        refuse_special(text, tokenizer, template.allow_special)
    if not templated(options, tokenizer):
        refuse_template_flags(options, loaded)
        return tokenizer.encode(prompt, add_special_tokens=True)
    if not prompt.strip():
        raise NanoKVError("the prompt is empty", "--raw accepts a prompt of blanks")
    said = messages(options, prompt)
    return tokenizer.encode(tokenizer.render(said, add_generation_prompt=True, **template.values()))


def refuse_template_flags(options: PromptOptions, loaded: Loaded) -> None:
    """NanoKVError if a flag needs the chat template, which this prompt does not use."""
    remedy = f"{loaded.name} has none"
    if options.raw:
        remedy = "leave out --raw"
    flags = {
        "--system": options.template.system,
        "--thinking": options.template.thinking,
        "--chat-template": options.template.choice,
    }
    for flag, value in flags.items():
        if value:
            raise NanoKVError(f"{flag} needs a chat template", f"{remedy}, or leave {flag} out")


def templated(options: PromptOptions, tokenizer: "Tokenizer") -> bool:
    """Does the prompt go through the chat template? --chat and --raw decide, else the model."""
    return options.chat or (not options.raw and tokenizer.chat_template is not None)


def form(options: PromptOptions, tokenizer: "Tokenizer") -> str:
    """The form of the prompt, for the status line."""
    if templated(options, tokenizer):
        return "chat template"
    return "raw text"


def answer(options: PromptOptions, loaded: Loaded, ids: list[int], text: str) -> dict:
    """The model's output after these ids: a message if the prompt was one, else {"text": …}."""
    if not templated(options, loaded.tokenizer):
        return {"text": text}
    return completion.message(text, opens_thinking(loaded.tokenizer, ids))


def messages(options: PromptOptions, prompt: str) -> list[dict]:
    """The messages for the template: the system prompt, if there is one, and the prompt."""
    found = []
    if options.template.system:
        found.append({"role": "system", "content": clean(options.template.system)})
    found.append({"role": "user", "content": prompt})
    return found


def room(wanted: int, loaded: Loaded, ids: list[int]) -> int:
    """How many of the wanted tokens fit into the context; ContextError if none fits."""
    # The last token is never fed, so it needs no slot in the cache.
    left = loaded.context - len(ids) + 1
    if left < 1:
        limit = loaded.config.max_position_embeddings
        hint = "shorten the prompt"
        if loaded.context < limit:
            hint = f"--context {limit} allows more"
        raise ContextError(
            f"the prompt has {len(ids):,} tokens, the context {loaded.context:,}", hint
        )
    return min(wanted, left)
