"""The parts of a chat that its slash commands use; Chat in repl.py has them."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nanokv.apps.cli.chat.keyboard import Keyboard
    from nanokv.apps.cli.chat.options import ChatOptions
    from nanokv.apps.cli.chat.view import View
    from nanokv.apps.cli.common.plan import Loaded
    from nanokv.chat.session import Session

# make(should_stop) → the pieces of an answer
MakeAnswer = Callable[[Callable[[], bool]], Iterator[str]]


class Chat(Protocol):
    """What a command may read and change."""

    given: "ChatOptions"
    view: "View"
    keyboard: "Keyboard"
    loaded: "Loaded"
    session: "Session"
    draft: str  # text for the next input line

    def control_token_refused(self, text: str) -> bool: ...
    def write(self, text: str) -> None: ...
    def width(self) -> int: ...
