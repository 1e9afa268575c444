"""The interactive chat: read a line, run a command or stream an answer, save the turn, repeat.

During an answer Ctrl-C sets a flag, which is read between tokens and prefill chunks; the partial
answer stays in the history and on disk. After an error in a turn the chat goes on, and the message
is back in the input line.
"""

import contextlib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.chat import commands as chat_commands
from nanokv.apps.cli.chat import transcript
from nanokv.apps.cli.chat.options import ChatOptions
from nanokv.apps.cli.chat.resume import resuming
from nanokv.apps.cli.chat.start import make_session
from nanokv.apps.cli.chat.view import Progress, View
from nanokv.apps.cli.common import layout
from nanokv.apps.cli.common.files import confirm
from nanokv.apps.cli.common.loading import load_model
from nanokv.apps.cli.common.plan import Loaded, Plan
from nanokv.apps.cli.common.terminal import Interrupt, sanitize, sanitize_line, write_err
from nanokv.apps.cli.common.text import find_special
from nanokv.errors import NanoKVError
from nanokv.parallel.group import Ranks

if TYPE_CHECKING:
    from nanokv.apps.cli.chat.contract import MakeAnswer
    from nanokv.apps.cli.chat.keyboard import Keyboard
    from nanokv.chat.session import Session


def run(given: ChatOptions, ranks: Ranks) -> int:
    """Load the model, run the chat, and return the exit code."""
    view = View(given.output, given.template.thinking, given.stats, given.markdown)
    folder = transcript.state_folder() / "sessions"
    path = None
    head: dict = {}
    keyboard: Keyboard | None = None
    messages: list[dict] = []
    if given.resume is not None:
        path = transcript.find(folder, given.resume)
        head, messages, _, notices = transcript.read(path, repair=True)
        for text in notices:
            view.say(sanitize_line(text))

    with contextlib.ExitStack() as stack:

        def announce(plan: Plan) -> None:
            nonlocal keyboard
            if not given.output.quiet:
                view.say(layout.joined([*plan.banner(), "/help"], view.width()))
            # Imported after the banner, because the import takes 0.2 s.
            from nanokv.apps.cli.chat.keyboard import open_keyboard

            keyboard = stack.enter_context(open_keyboard())

        loaded = load_model(given.model, given.cache, given.output, ranks, announce)
        assert keyboard is not None
        chat = Chat(given, view, keyboard, loaded, make_session(given, loaded, head))
        if path:
            chat.take_up(path, head, messages)
        elif not given.no_save:
            chat.start_file(folder)
        return chat.talk()


class Chat:
    """The state that the loop and the commands share."""

    def __init__(
        self,
        given: ChatOptions,
        view: View,
        keyboard: "Keyboard",
        loaded: Loaded,
        session: "Session",
    ):
        from nanokv.apps.cli.chat.input import Input

        self.given = given
        self.view = view
        self.keyboard = keyboard
        self.loaded = loaded
        self.session = session
        self.draft = ""  # text for the next input line
        self.recorded: list[dict] = []  # the messages that are saved
        self.file: transcript.Transcript | None = None
        # If false, lines typed ahead wait in the input line.
        self.went_well = True
        self.marks = loaded.fingerprints()
        self.input = Input(
            keyboard,
            chat_commands.COMMANDS,
            lambda text: len(session.tokenizer.encode(text)),
            self.toolbar,
            transcript.state_folder() / "history",
            view.say,
            view.out.enabled,
        )

    # --- the loop ---------------------------------------------------------------------------------

    def talk(self) -> int:
        """Run the loop; returns 0 after Ctrl-D or /exit, 130 after Ctrl-C twice.

        SIGTERM and a hang-up raise Terminated.
        """
        from nanokv.apps.cli.chat.input import Leave

        try:
            while True:
                self.carry_out(self.read())
        except (EOFError, chat_commands.Goodbye):
            return 0
        except Leave:
            return 130
        finally:
            self.leave()

    def read(self) -> str:
        """The next line. Raises EOFError for Ctrl-D, and Leave for Ctrl-C twice."""
        draft = self.draft
        self.draft = ""
        if draft or not self.went_well:
            self.keyboard.hold(draft)
        try:
            # A held-back Enter may be at the end.
            return self.input.read(draft).rstrip("\n")
        # A signal before prompt_toolkit handles signals, or after it.
        except KeyboardInterrupt:
            self.draft = self.input.lost
            self.view.say("interrupted")
            return ""

    def carry_out(self, text: str) -> None:
        """Handle one line of input. An error is shown, finished work is saved, the chat goes on."""
        self.went_well = False
        try:
            try:
                self.went_well = self.turn(text)
            finally:
                self.save()
        except KeyboardInterrupt:
            self.view.say("interrupted")
        except (chat_commands.Goodbye, BrokenPipeError):
            raise
        except Exception as error:
            if self.given.output.debug:
                write_err(sanitize("".join(traceback.format_exception(error))))
            self.view.problem(error)
            if self.draft == text:
                self.view.say(
                    "the message is back in the input line: "
                    "Ctrl-C clears it, then a command can be typed"
                )

    def turn(self, text: str) -> bool:
        """Handle a command, a message, or an empty line; returns whether it was completed."""
        if not text.strip():
            return True
        command = chat_commands.parse(text)
        if command:
            make = chat_commands.run(self, *command)
            if make is None:
                return True
            return self.answer(make)
        if self.command_refused(text) or self.control_token_refused(text):
            self.draft = text
            return False
        # The message stays in the input line until an answer begins.
        self.draft = text
        return self.answer(lambda stop: self.session.stream(text, stop))

    def answer(self, make: "MakeAnswer") -> bool:
        """Stream one answer, while signals only set a flag; False after Ctrl-C."""
        with Interrupt() as stop:
            progress = Progress(stop, self.session, self.view)

            def between_tokens() -> bool:
                self.keyboard.poll()
                return progress()

            try:
                self.view.answer(self.session, make(between_tokens), progress)
            finally:
                progress.clear()
        if self.session.last and self.session.last.out:
            self.draft = ""
        if stop.terminated:
            self.save()
        stop.finish()
        return not stop.requested

    def command_refused(self, text: str) -> bool:
        """Ask before sending a message that contains a command, as lines typed ahead may do."""
        found = chat_commands.command_line(text)
        if found is None:
            return False
        number, name = found
        with self.keyboard.lend():
            return not confirm(f"line {number} is {name}, a command. Send it to the model as text?")

    def control_token_refused(self, text: str) -> bool:
        """Ask before a typed <|im_end|> becomes a control token; on No the message is not sent."""
        if self.given.template.allow_special:
            return False
        token = find_special(text, self.session.tokenizer)
        if token is None:
            return False
        with self.keyboard.lend():
            return not confirm(
                f"message contains {sanitize_line(token)}, a control token. Send it as one?"
            )

    def toolbar(self) -> str:
        """context ▕▏      ▏ 1 %"""
        share = self.session.cache.length / self.session.context
        eighths = round(share * 64) or (share > 0)
        bar = "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
        return f"context ▕{bar:<8}▏ {share:.0%}".replace("%", " %")

    def write(self, text: str) -> None:
        """Write the text of /cache or /tokens, to stderr because it is not an answer."""
        write_err(text + "\n")

    def width(self) -> int:
        return self.view.width() or 80

    # --- on the disk ------------------------------------------------------------------------------

    def start_file(self, folder: Path) -> None:
        """Choose a new session file, which is created after the first turn."""
        head = transcript.header(self.loaded.name, self.marks[0])
        self.file = transcript.Transcript(folder / f"{transcript.new_id()}.jsonl", head)

    def take_up(self, path: Path, head: dict, messages: list[dict]) -> None:
        """Continue a saved session with its text and settings. One prefill rebuilds its cache."""
        self.session.replace(messages)
        self.recorded = list(messages)
        if not self.given.no_save:
            self.file = transcript.Transcript.reopen(path)
        text = f"resumed {path.stem} · {transcript.turns_text(messages)}"
        if head.get("fingerprint") not in self.marks:
            model = sanitize_line(str(head.get("model")))
            text += f" · saved with model {model}, whose weights differ from these"
        self.view.say(text)
        if not self.given.output.quiet:
            self.view.recall(self.session.system, messages[-2:])

    def save(self) -> None:
        """Append the changes since the last save: one turn, or the whole history after an edit."""
        messages = self.session.messages
        if self.file is None or messages == self.recorded:
            return
        common = {"settings": self.session.params, "system": self.session.system}
        if messages[:-2] == self.recorded:
            turn = self.session.last
            assert turn is not None
            line = {
                "user": messages[-2]["content"],
                "answer": messages[-1]["content"],
                "finish_reason": turn.finish_reason,
                "tokens": turn.out,
                "new": turn.new,
                "reused": turn.reused,
                "seed": turn.seed,
            }
        else:
            line = {"history": messages}
        self.recorded = list(messages)
        try:
            self.file.append(line | common)
        except NanoKVError as error:
            self.view.problem(error)

    def leave(self) -> None:
        """Try once more to write lines that a full disk held back; show how to resume."""
        if self.file and self.file.pending and self.recorded:
            try:
                self.file.flush()
            except NanoKVError as error:
                self.view.problem(error)
        if self.file and self.file.saved and self.recorded:
            self.view.say(f"session saved · {resuming(self.given)}")
