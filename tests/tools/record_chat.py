"""Records docs/chat.svg: a conversation with the real program in a real pseudo-terminal, drawn by rich.

    python tests/tools/record_chat.py          writes docs/chat.svg, and docs/chat.txt for those who cannot see it
Timings differ from run to run; tests/project/test_record_chat.py compares everything else, so the picture cannot lie.
"""

import io
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nanokv.fast import building, native

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
os.environ.setdefault("NANOKV_KERNELS", "explicit")  # as tests/conftest.py

from chat_terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "chat.svg"
MESSAGES = (
    "My name is Zorbla and I have a cat called Miso.",
    "Reverse: moon, kettle, blorf",
    "What is my name?",
    "What is my cat called?",
    "Does the cache grow?",
)
COLUMNS, LINES = 80, 32


def record() -> list[Text]:
    """The screen after the conversation and a /cache, line by line, with its colours."""
    with tempfile.TemporaryDirectory() as home:
        argv = (sys.executable, "-m", "nanokv", "chat", "--no-save")
        native.library()  # kernels are built, as after a user's first start
        kept = str(building.folder().parent)
        env = {"XDG_STATE_HOME": home, "HOME": home, "PYTHONPATH": str(ROOT), "NANOKV_CACHE": kept}
        env |= {"NANOKV_NO_HISTORY": "1", "NANOKV_THREADS": "2"}
        terminal = Terminal(argv, env, COLUMNS, LINES + 20)
        terminal.raw_mode()
        for count, message in enumerate(MESSAGES, 1):
            terminal.send(message + "\r")
            terminal.see(rf"(?s)(first token.*){{{count}}}^> *$")
        terminal.send("/cache\r")
        terminal.see(r"(?s)measured.*^> *$")
        lines = [styled(terminal.screen, row) for row in range(terminal.screen.lines)]
        terminal.send("/exit\r")
        terminal.pump(1)
    while lines[-1].plain != ">":  # the toolbar under the prompt, which may be drawn already or not
        lines.pop()
    return lines


def styled(screen, row: int) -> Text:
    """One line of pyte's screen as rich text."""
    text = Text()
    for column in range(screen.columns):
        cell = screen.buffer[row][column]
        names = [cell.fg] if cell.fg != "default" else []
        names += ["bold"] * cell.bold + ["reverse"] * cell.reverse
        text.append(cell.data, " ".join(names).replace("bright", "bright_"))
    text.rstrip()
    return text


def draw(lines: list[Text]) -> str:
    """The SVG."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    return console.export_svg(title="nanokv chat", unique_id="nanokv")


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    recorded = record()
    PICTURE.write_text(draw(recorded), encoding="utf-8")
    PICTURE.with_suffix(".txt").write_text(
        "\n".join(line.plain for line in recorded) + "\n", encoding="utf-8"
    )
    print(PICTURE.relative_to(ROOT))
