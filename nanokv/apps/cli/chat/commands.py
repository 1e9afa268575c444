"""The slash commands of `nanokv chat`: one small function each, listed by name in COMMANDS.

A command gets the chat and the rest of its line. To stream an answer it returns a function
`make(should_stop)` that makes an iterator of text. To prepare the next input line it sets
`chat.draft`. Mistakes of the user raise NanoKVError.
"""

import base64
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nanokv.apps.cli.chat import files as chat_files
from nanokv.apps.cli.chat import inspector
from nanokv.apps.cli.common import layout
from nanokv.apps.cli.common.arguments import SETTINGS, nearest, parse_setting
from nanokv.apps.cli.common.files import ask_to_replace, user_path
from nanokv.apps.cli.common.options import DEFAULT_NEW_TOKENS, refuse_draw
from nanokv.apps.cli.common.terminal import bytes_text, is_tty, sanitize, sanitize_line, write_err
from nanokv.apps.cli.common.text import read_prompt_bytes
from nanokv.errors import NanoKVError, SessionError

if TYPE_CHECKING:
    from nanokv.apps.cli.chat.contract import Chat, MakeAnswer
    from nanokv.apps.cli.chat.view import View
    from nanokv.chat.session import Session
    from nanokv.text.tokenizer import Tokenizer

CHOICES = {
    "overflow": ("stop", "drop"),
    "thinking": ("show", "fold", "off"),
    "loop_guard": ("on", "off"),
    "markdown": ("on", "off"),
}
OFF = {  # setting → (the value that turns it off, the meaning of this value)
    "temperature": (0, "greedy"),
    "top_k": (0, "all"),
    "top_p": (1, "all"),
    "min_p": (0, "none"),
    "repetition_penalty": (1, "off"),
}
OF_SESSION = ("overflow", "loop_guard")  # settings of the session; the others are the view's
LONGEST_FILE = 16_000_000  # bytes of a file that /read accepts
KEYS = (
    "Enter send",
    "Alt-Enter, Ctrl-J newline",
    '""" block',
    "Ctrl-R search",
    "Ctrl-X Ctrl-E editor",
    "Ctrl-D leave",
)
WHOLE_TEXT = ("/system", "/edit")  # commands whose argument may have several lines


class Goodbye(Exception):
    """Raised by /exit."""


def parse(text: str) -> tuple[str, str] | None:
    """(name, rest) of a command, or None if the text is a message.

    A text is a message if it has no slash, begins with a path or `//`, or has several lines. Case
    does not matter. `/ cache` counts as a mistyped command, which `run` reports.
    """
    if text.strip().lower() in ("exit", "quit"):
        return "/exit", ""
    first, _, rest = text.strip().partition(" ")
    if first == "/" and "\n" not in rest:
        return _mistyped(rest)
    if not first.startswith("/") or first == "/" or "/" in first[1:] or "\n" in first:
        return None
    first = first.lower()
    if "\n" in rest and first not in WHOLE_TEXT:
        return None
    return first, rest.strip()


def _mistyped(rest: str) -> tuple[str, str] | None:
    """The command of `/ cache`, with its blank; None if the first word is not a command's name."""
    words = rest.split()
    if not words:
        return "/", ""
    word = words[0].lower()
    if f"/{word}" not in COMMANDS:
        return None
    return f"/ {word}", ""


def command_line(text: str) -> tuple[int, str] | None:
    """(number, name) of the first line of a message that looks like a command, or None."""
    for number, line in enumerate(text.split("\n"), 1):
        name = line.strip().partition(" ")[0].lower()
        if name in COMMANDS:
            return number, name
    return None


def run(chat: "Chat", name: str, rest: str) -> "MakeAnswer | None":
    """Run one command. An unknown one is never sent to the model; the hint has the nearest name."""
    if name not in COMMANDS:
        raise NanoKVError(f"no command {name}", suggestion(name))
    function = COMMANDS[name].run
    if rest and function in ALONE:
        raise NanoKVError(
            f"{name} takes no argument, not {sanitize_line(rest[:20])!r}", f"{name}, alone"
        )
    return function(chat, rest)


def suggestion(name: str) -> str:
    """A hint for an unknown command. Names are compared without the slash, which they all share."""
    word = name.strip("/ ").replace("-", "_")
    if word in ELSEWHERE:
        return ELSEWHERE[word]
    if word in (*SETTINGS, *CHOICES):
        return f"did you mean /set {word}?"
    close = nearest(word, [known[1:] for known in COMMANDS])
    if close:
        return f"did you mean /{close}?"
    return "/help lists them"


def show_help(chat: "Chat", rest: str) -> None:
    names: dict[Callable, list[str]] = {}  # function → its command and aliases
    for name, command in COMMANDS.items():
        names.setdefault(command.run, []).append(name)
    shown = []
    for command in COMMANDS.values():
        if command.text:
            head = f"{', '.join(names[command.run])} {command.takes}".rstrip()
            shown.append((head, command.text))
    width = chat.width()
    chat.view.say("\n".join([*layout.definitions(shown, width, ""), layout.joined(KEYS, width)]))


def clear(chat: "Chat", rest: str) -> None:
    chat.session.clear()
    text = "history and cache are empty"
    if chat.session.system:
        text += " (the system prompt stays)"
    chat.view.say(text)


def system(chat: "Chat", rest: str) -> None:
    if not rest:
        chat.view.say(f"system: {sanitize(chat.session.system or 'none')}")
        return
    if chat.control_token_refused(rest):
        return
    chat.session.set_system("" if rest in ('""', "''") else rest)
    done = "set" if chat.session.system else "removed"
    chat.view.say(f"system prompt {done}; the cache is computed again from there")


def think(chat: "Chat", rest: str) -> None:
    _check_thinking(chat)
    chat.session.template_kwargs["enable_thinking"] = True
    if chat.view.thinking == "off":
        chat.view.thinking = "show"
    chat.view.say("thinking on")


def _check_thinking(chat: "Chat") -> None:
    if not can_think(chat.session.tokenizer):
        raise NanoKVError(
            "this model cannot be asked to think", "its chat template has no enable_thinking"
        )


def can_think(tokenizer: "Tokenizer") -> bool:
    """Whether the chat template reads `enable_thinking`, so that its prompt changes."""
    hello = [{"role": "user", "content": "Hi"}]
    said = {
        tokenizer.render(hello, add_generation_prompt=True, enable_thinking=flag)
        for flag in (True, False)
    }
    return len(said) == 2


def no_think(chat: "Chat", rest: str) -> None:
    _check_thinking(chat)
    chat.session.template_kwargs["enable_thinking"] = False
    chat.view.say("thinking off")


def _owner(chat: "Chat", name: str) -> "Session | View":
    """The object that has a setting of CHOICES as an attribute."""
    if name in OF_SESSION:
        return chat.session
    return chat.view


def _setting(chat: "Chat", name: str) -> int | float | str | None:
    """The current value for /set; a value that turns the setting off is explained in brackets."""
    if name in CHOICES:
        return getattr(_owner(chat, name), name)
    params = chat.session.params
    value = params.get(name)
    if name == "max_new_tokens":
        return value or DEFAULT_NEW_TOKENS
    if name == "seed" and not params.get("temperature"):
        return f"{value} (not used: greedy)"
    if name == "seed":
        return value
    off, meaning = OFF[name]
    if value is None or value == off:
        return f"{off} ({meaning})"
    if value == int(value):
        return int(value)  # 0 rather than 0.0
    return value


def set_value(chat: "Chat", rest: str) -> None:
    """Show settings, or set one: numbers in the session's parameters, words as attributes."""
    name, _, value = rest.partition(" ")
    name = name.replace("-", "_")
    value = value.strip()
    if not value and (not rest or name in (*SETTINGS, *CHOICES)):
        shown = [name] if rest else [*SETTINGS, *CHOICES]
        texts = [f"{key} {_setting(chat, key)}" for key in shown]
        chat.view.say(layout.joined(texts, chat.width()))
    elif name in CHOICES:
        _choose(chat, name, value)
        chat.view.say(f"{name} {value}")
    elif name in SETTINGS:
        new = parse_setting(name, value)
        if chat.given.sampling.beams:
            refuse_draw(name, new, name)
        chat.session.params[name] = new
        chat.view.say(f"{name} {_setting(chat, name)}")
    else:
        raise NanoKVError(f"no setting {sanitize_line(name[:40])!r}", setting_hint(name, value))


def _choose(chat: "Chat", name: str, value: str) -> None:
    """Set one of CHOICES."""
    if value not in CHOICES[name]:
        raise NanoKVError(f"{name} {value!r} is not {' or '.join(CHOICES[name])}")
    setattr(_owner(chat, name), name, value)
    if name == "thinking":
        chat.session.template_kwargs["enable_thinking"] = value != "off"


def setting_hint(name: str, value: str) -> str:
    """A hint for an unknown setting; the settings of ollama's chat are known."""
    if name == "parameter" and value:
        name, _, value = value.partition(" ")
        name = name.replace("-", "_")
        value = value.strip()
        if name in SETTINGS:
            return f"did you mean /set {name} {sanitize_line(value[:40])}?".replace(" ?", "?")
    if name in OLLAMA:
        return OLLAMA[name].format(sanitize_line(value.strip("\"'")[:200])).rstrip()
    known = [*SETTINGS, *CHOICES]
    close = nearest(name, known)
    if close:
        return f"did you mean {close}?"
    return f"one of {', '.join(known)}"


def stats(chat: "Chat", rest: str) -> None:
    if rest not in ("", "on", "off"):
        raise NanoKVError(f"/stats {sanitize_line(rest)!r} is not on or off")
    if not rest:
        rest = "off" if chat.view.stats == "on" else "on"
    chat.view.stats = rest
    chat.view.say(f"status line {chat.view.stats}")


def show_cache(chat: "Chat", rest: str) -> None:
    chat.write(inspector.draw(chat.session, chat.view.err, chat.width()))


def show_tokens(chat: "Chat", rest: str) -> None:
    chat.write(inspector.tokens_text(chat.session, chat.view.err, chat.width()))


def save(chat: "Chat", rest: str) -> None:
    name, flags = _split_flags(rest, "--kv", "--force")
    if not name:
        raise SessionError(
            "/save needs a file name", "/save notes.jsonl, or /save notes.jsonl --kv"
        )
    path = user_path(name)
    caches: list[Path] = []
    if "--kv" in flags:
        caches = chat_files.cache_paths(path, chat.loaded.ranks.size)
    with chat.keyboard.lend():
        ask_to_replace("--force" in flags, path, *caches)
    chat.view.say(chat_files.save(chat, path, caches[0] if caches else None))


def load(chat: "Chat", rest: str) -> None:
    if not rest:
        raise SessionError("/load needs a file name", "/load notes.jsonl")
    name, _ = _split_flags(rest, "--kv")
    chat.view.say(chat_files.load(chat, user_path(name)))


def _split_flags(rest: str, *flags: str) -> tuple[str, set[str]]:
    """(the other words as one text, the `flags` that occur)."""
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise SessionError(f"{sanitize_line(rest)}: {error}") from None
    name = " ".join(word for word in words if word not in flags)
    return name, {word for word in words if word in flags}


def undo(chat: "Chat", rest: str) -> None:
    chat.session.undo()
    chat.view.say(f"forgot the last turn; {len(chat.session.messages) // 2} left")


def retry(chat: "Chat", rest: str) -> "MakeAnswer":
    return chat.session.retry


def resume(chat: "Chat", rest: str) -> "MakeAnswer":
    return chat.session.resume


def drop(chat: "Chat", rest: str) -> None:
    if not rest.isdecimal() or len(rest) > 9:
        raise SessionError(
            f"/drop needs a number of turns, not {sanitize_line(rest[:20])!r}", "/drop 1"
        )
    turns = int(rest)
    chat.session.drop(turns)
    what = "the oldest turn" if turns == 1 else f"the {turns} oldest turns"
    text = f"dropped {what}; the cache keeps {chat.session.cache.length:,} tokens"
    if chat.session.messages:
        text += " · the turns left get new positions and are computed again"
    chat.view.say(text)


def read(chat: "Chat", rest: str) -> None:
    if not rest:
        raise SessionError("/read needs a file name", "/read notes.txt")
    path = user_path(rest)
    shown = sanitize_line(str(path))
    try:
        with open(path, "rb") as file:
            data = file.read(LONGEST_FILE + 1)  # bounded: a device may never end
    except OSError as error:
        raise NanoKVError(f"cannot read {shown}: {error.strerror or error}") from error
    if len(data) > LONGEST_FILE:
        raise NanoKVError(
            f"{shown} has more than {bytes_text(LONGEST_FILE)}, too much for an input line"
        )
    chat.draft = read_prompt_bytes(data, shown)


def edit(chat: "Chat", rest: str) -> None:
    """Run $VISUAL or $EDITOR on a temporary file; its saved text becomes the input line.

    If the editor fails, the input line keeps its text.
    """
    chat.draft = rest
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        words = shlex.split(editor)
    except ValueError as error:
        raise NanoKVError(f"cannot start the editor {editor!r}: {error}", "set EDITOR") from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "message.md"
        path.write_text(rest, encoding="utf-8")
        try:
            with chat.keyboard.lend():
                code = subprocess.call([*words, str(path)])
        except OSError as error:
            raise NanoKVError(
                f"cannot start the editor {editor!r}: {error.strerror}", "set EDITOR"
            ) from error
        if code:
            raise NanoKVError(
                f"the editor {editor!r} ended with exit code {code}: message unchanged",
                "set EDITOR",
            )
        chat.draft = read_prompt_bytes(path.read_bytes(), "the edited message").rstrip("\n")


def copy(chat: "Chat", rest: str) -> None:
    """Copy the last answer to the clipboard by OSC 52, which works over ssh without a program."""
    if not chat.session.messages:
        raise SessionError("nothing to copy: no answer yet")
    import sys

    text = chat.session.messages[-1]["content"]
    if not is_tty(sys.stderr) or os.environ.get("TERM") == "dumb":
        raise NanoKVError("this terminal gives programs no access to a clipboard")
    data = text.encode("utf-8", "replace")
    if len(data) > 74_000:
        raise NanoKVError(
            f"{bytes_text(len(data))} is more than terminals accept (74 kB)", "/save FILE"
        )
    write_err(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
    chat.view.say(f"sent {len(text):,} characters to the terminal's clipboard")


def leave(chat: "Chat", rest: str) -> None:
    raise Goodbye


class Command(NamedTuple):
    """A slash command: its function, its description, its argument. An alias has no description."""

    run: Callable
    text: str = ""
    takes: str = ""


COMMANDS = {
    "/help": Command(show_help, "this list"),
    "/?": Command(show_help),
    "/clear": Command(clear, "forget the conversation, empty the cache"),
    "/reset": Command(clear),
    "/system": Command(system, 'set the system prompt ("" removes it); alone: show it', "TEXT"),
    "/think": Command(think, "ask the model to think"),
    "/nothink": Command(no_think, "ask the model not to think"),
    "/set": Command(
        set_value,
        "temperature, top_k, seed, max_new_tokens, overflow ...; alone: show them",
        "NAME VALUE",
    ),
    "/stats": Command(stats, "status line on or off"),
    "/cache": Command(show_cache, "draw the KV cache: a row per layer, roles, bytes, formula"),
    "/tokens": Command(show_tokens, "pieces and ids of the last prompt and its answer"),
    "/save": Command(
        save, "write the conversation, with its cache if asked", "FILE [--kv] [--force]"
    ),
    "/load": Command(load, "a saved conversation, with its cache if it fits", "FILE"),
    "/undo": Command(undo, "forget the last turn"),
    "/retry": Command(retry, "answer the last message again"),
    "/regen": Command(retry),
    "/continue": Command(resume, "go on with the last answer"),
    "/drop": Command(drop, "forget the oldest N turns", "N"),
    "/read": Command(read, "put a file into the input line", "FILE"),
    "/edit": Command(edit, "write the message in $EDITOR"),
    "/copy": Command(copy, "last answer to the clipboard"),
    "/exit": Command(leave, "leave (also exit, quit, Ctrl-D)"),
    "/bye": Command(leave),
    "/quit": Command(leave),
}
OLLAMA = {  # settings of ollama's chat → the equivalent here; {} is the value
    "system": "/system {}",
    "num_ctx": "a chat keeps its context: /exit, then nanokv chat --context {}",
    "num_predict": "/set max_new_tokens {}",
    "repeat_penalty": "/set repetition_penalty {}",
    "think": "/think",
    "nothink": "/nothink",
    "verbose": "/stats on",
    "quiet": "/stats off",
    "stop": "a chat keeps its stop strings: /exit, then nanokv chat --stop STR",
}
_MODEL = "a chat keeps its model: /exit, then nanokv chat -m NAME (nanokv models lists names)"
ELSEWHERE = {  # commands of other programs → the equivalent here
    "model": _MODEL,
    "models": _MODEL,
    "new": "did you mean /clear?",
    "redo": "did you mean /retry?",
    "history": "/tokens shows the last prompt, /save FILE writes the conversation",
    "show": "/set shows the settings, /system the system prompt, /cache the cache; "
    "nanokv memory the model's sizes",
}
ALONE = (
    show_help,
    clear,
    think,
    no_think,
    show_cache,
    show_tokens,
    undo,
    retry,
    resume,
    copy,
    leave,
)
