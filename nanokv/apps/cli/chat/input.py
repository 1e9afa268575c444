"""The input line of `nanokv chat`, on prompt_toolkit: keys, history, completion, pastes, toolbar.

Enter sends, Alt-Enter or Ctrl-J starts a new line, three double quotes open and close a block. A
paste of more than 20 lines is shown as `[pasted 2,632 lines, 48,210 tokens]` and sent in full
(Alt-P unfolds it). Keys typed before the prompt appears are kept (keyboard.py). This module is
imported only on a terminal. It does not use the model: the caller passes a function that counts
tokens.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_searching
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.history import History as ToolkitHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth, Output, create_output
from prompt_toolkit.styles import Style as ToolkitStyle

from nanokv.apps.cli.chat.keyboard import Keyboard
from nanokv.apps.cli.common.terminal import interrupt_at_prompt, sanitize

FOLD_LINES = 20
LEAVE_S = 2.0
LEAVING = "Ctrl-C again or Ctrl-D to leave"
PATH_COMMANDS = ("/read", "/save", "/load")
BLOCK = '"""'


class Leave(Exception):
    """Ctrl-C twice at an empty prompt."""


class ControlC(Exception):
    """Ctrl-C in the prompt of TERM=dumb, whose own key bindings come before these."""


class Folds:
    """Long pastes by the placeholders that are shown for them."""

    def __init__(self, count_tokens: Callable[[str], int]):
        self.texts: dict[str, str] = {}
        self.count_tokens = count_tokens

    def fold(self, text: str) -> str:
        """The text itself if it is short, otherwise a placeholder for it."""
        lines = text.count("\n") + 1
        if lines <= FOLD_LINES:
            return text
        mark = f"[pasted {lines:,} lines, {self.count_tokens(text):,} tokens]"
        while self.texts.get(mark, text) != text:  # another paste has the same size
            mark = mark.removesuffix("]") + "']"
        self.texts[mark] = text
        return mark

    def unfold(self, text: str) -> str:
        for mark, full in self.texts.items():
            text = text.replace(mark, full)
        return text


class History(FileHistory):
    """A history file with mode 0600. It stores pastes in full, and a full disk is not an error."""

    def __init__(self, path: Path, folds: Folds):
        self.folds = folds
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        super().__init__(str(path))

    def store_string(self, string: str) -> None:
        text = self.folds.unfold(string)
        if len(text) <= 100_000:
            try:
                super().store_string(text)
            except OSError:
                pass


def make_history(path: Path, folds: Folds) -> ToolkitHistory:
    """The history file; one in memory if NANOKV_NO_HISTORY is set or the file is not writable."""
    if os.environ.get("NANOKV_NO_HISTORY"):
        return InMemoryHistory()
    try:
        return History(path, folds)
    except OSError:
        return InMemoryHistory()


class CommandCompleter(Completer):
    """Completes commands at the start of the line, and paths after /read, /save and /load.

    Elsewhere it completes words that look like paths.
    """

    def __init__(self, names: Iterable[str]):
        self.names = sorted(names)
        self.paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        text = document.text_before_cursor
        word = ""
        if text and not text[-1].isspace():
            word = text.rsplit(None, 1)[-1]
        if text.startswith("/") and " " not in text and "/" not in text[1:]:
            for name in self.names:
                if name.startswith(text):
                    yield Completion(name, start_position=-len(text))
        elif text.split(" ", 1)[0] in PATH_COMMANDS or word.startswith(("./", "../", "~/", "/")):
            yield from self.paths.get_completions(Document(word, len(word)), complete_event)


class Input:
    """One prompt at a time.

    `read(default)` returns the message. It raises EOFError for Ctrl-D, and Leave for Ctrl-C twice.
    """

    def __init__(
        self,
        keyboard: Keyboard,
        names: Iterable[str],
        count_tokens: Callable[[str], int],
        toolbar: Callable[[], str],
        history_path: Path,
        say: Callable[[str], None],
        color: bool,
    ):
        self.keyboard = keyboard
        self.folds = Folds(count_tokens)
        self.say = say
        self.names = names
        self.pressed = -LEAVE_S  # time of the last Ctrl-C in an empty line
        self.lost = ""  # the line that a signal interrupted
        self.history = make_history(history_path, self.folds)
        self.toolbar = toolbar
        bar = "noreverse"
        depth: ColorDepth | None = ColorDepth.DEPTH_1_BIT
        if color:
            bar += " ansibrightblack"
            depth = None
        output = None
        if os.environ.get("TERM") == "dumb":
            output = plain_output()
        with create_app_session(output=output):
            self.session = self._prompt_session(depth, bar)
        # Simple terminals would print a warning line.
        self.session.app.renderer.cpr_not_supported_callback = lambda: None

    def _prompt_session(self, depth: ColorDepth | None, bar: str) -> PromptSession:
        return PromptSession(
            input=self.keyboard.input,
            history=self.history,
            completer=CommandCompleter(self.names),
            key_bindings=self._keys(),
            style=ToolkitStyle.from_dict({"bottom-toolbar": bar}),
            color_depth=depth,
            multiline=True,
            complete_while_typing=False,
            enable_suspend=True,
            interrupt_exception=ControlC,
            bottom_toolbar=self._toolbar,
            prompt_continuation="  ",
        )

    def read(self, default: str = "") -> str:
        default = self.folds.fold(default)
        # The prompt of TERM=dumb does not show the text that is already in the line.
        if default and os.environ.get("TERM") == "dumb":
            self.say("in the input line: " + sanitize(default))
        self.lost = ""
        try:
            with self.keyboard.prompt():
                text = self.session.prompt("> ", default=default)
        except ControlC:
            text = self.session.default_buffer.text
            if self._is_second(text):
                raise Leave from None
            if not text:
                self.say(LEAVING)
            return ""
        # A signal before prompt_toolkit handles signals, or after it.
        except KeyboardInterrupt:
            self.lost = self.folds.unfold(self.session.default_buffer.text)
            raise
        text = self.folds.unfold(text).replace("\r\n", "\n")
        return strip_block(text)

    def _toolbar(self) -> str:
        text = self.session.default_buffer.text
        hint = "Alt-Enter newline"
        if any(mark in text for mark in self.folds.texts):
            hint = "Alt-P unfolds the paste"
        return f"{self.toolbar()}  ·  {hint}"

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        typing = ~is_searching
        whole = typing & Condition(lambda: not self._block_open())
        keys.add("enter", filter=whole)(lambda e: e.current_buffer.validate_and_handle())
        keys.add("c-j", filter=typing)(lambda e: e.current_buffer.insert_text("\n"))
        keys.add("escape", "enter", filter=typing)(lambda e: e.current_buffer.insert_text("\n"))
        keys.add("c-x", "c-e", filter=typing)(self._edit)
        keys.add("escape", "p", filter=typing)(self._unfold)
        keys.add(Keys.BracketedPaste)(self._paste)
        keys.add("c-c", filter=typing)(self._interrupt)
        keys.add("<sigint>", filter=typing)(self._interrupt)
        return keys

    def _edit(self, event: KeyPressEvent) -> None:
        """Send /edit with the line's text: prompt_toolkit's editor key fails on a wrong $EDITOR."""
        event.app.exit(result="/edit " + event.current_buffer.text)

    def _block_open(self) -> bool:
        text = self.session.default_buffer.text
        return text.startswith(BLOCK) and text.count(BLOCK) < 2

    def _paste(self, event: KeyPressEvent) -> None:
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(self.folds.fold(text))

    def _unfold(self, event: KeyPressEvent) -> None:
        text = self.folds.unfold(event.current_buffer.text)
        event.current_buffer.document = Document(text, len(text))

    def _interrupt(self, event: KeyPressEvent) -> None:
        """Clear the line. If it is empty, show how to leave; a second press within 2 s leaves."""
        try:
            # Returns normally if this Ctrl-C is the one that stopped the answer.
            interrupt_at_prompt(None, None)
            return
        except KeyboardInterrupt:
            pass
        text = event.current_buffer.text
        event.current_buffer.reset()
        if self._is_second(text):
            event.app.exit(exception=Leave)
        elif not text:
            run_in_terminal(lambda: self.say(LEAVING))

    def _is_second(self, text: str) -> bool:
        """Whether this Ctrl-C is the second one in an empty line within LEAVE_S seconds."""
        before = self.pressed
        if text:
            self.pressed = -LEAVE_S
            return False
        self.pressed = time.monotonic()
        return self.pressed - before < LEAVE_S


def plain_output() -> Output:
    """Output for TERM=dumb without escape sequences: prompt_toolkit sends one at the start."""
    output = create_output()
    write_raw = output.write_raw

    def write_plain(data: str) -> None:
        if "\x1b" not in data:
            write_raw(data)

    output.write_raw = write_plain  # type: ignore[method-assign]  # of this object only
    return output


def strip_block(text: str) -> str:
    """The inside of a block in triple quotes; any other text is returned unchanged."""
    inner = text.strip()
    if len(inner) >= 6 and inner.startswith(BLOCK) and inner.endswith(BLOCK):
        return inner[3:-3].strip("\n")
    return text
