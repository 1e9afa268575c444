"""The bundled model in the site: `nanokv live`, and runs recorded with `nanokv trace`.

Both commands write complete pages that load nothing. The site shows each in a frame below its
header, with a link that opens it alone. The page of a recording names the command that makes it.
"""

import html
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.lab import live
from nanokv.school.course.site.pages import Page, plain

BLOCK = re.compile(r"<pre>.*?</pre>(?:\s*</div>)?", re.DOTALL)  # of code
LIVE = "<code>nanokv live --open</code>"


@dataclass(frozen=True)
class Recording:
    """A run to record: its name and title, where to look, the prompt, and a fault or none."""

    name: str
    title: str
    look: str
    prompt: str
    fault: str = ""
    tokens: int = 32

    def command(self, out: str) -> list[str]:
        fault = ["--fault", self.fault] if self.fault else []
        return [
            "nanokv",
            "trace",
            self.prompt,
            "-n",
            str(self.tokens),
            *fault,
            "-m",
            "tiny",
            "-o",
            out,
        ]


RECORDINGS = (
    Recording(
        "answer",
        "A question and its answer",
        "The first step feeds the whole prompt. Each later step feeds one token, and the cache "
        "grows by one row.",
        "What is a KV cache?",
        tokens=40,
    ),
    Recording(
        "recall",
        "A name is recalled",
        "When the answer names Zorbla, the attention of some heads goes back to the name in the "
        "prompt.",
        "My name is Zorbla. What is my name?",
        tokens=24,
    ),
    Recording(
        "restart",
        "Fault: every call counts positions from 0",
        "The cache has the right size, and its keys are rotated to the wrong positions.",
        "My name is Zorbla. What is my name?",
        "start_pos_restarts",
        tokens=24,
    ),
    Recording(
        "not-cleared",
        "Fault: the cache is not cleared between requests",
        "The keys of an earlier request are still there, and the new tokens attend to them.",
        "My name is Zorbla. What is my name?",
        "not_cleared",
        tokens=24,
    ),
)


def live_page(out: Path) -> Page:
    """`nanokv live` in out/live, in a frame."""
    (out / "live").mkdir(parents=True, exist_ok=True)
    (out / "live" / "live-alone.html").write_text(live.build(), encoding="utf-8")
    body = (
        "<h1>Live: the model in your browser</h1>"
        "<p>The bundled model answers in this page, and its KV cache grows token by token. Change "
        "one thing, predict what becomes of the answer, and see both answers. "
        '<a href="live-alone.html">Open it alone</a>.</p>'
        '<iframe src="live-alone.html" title="The model, its cache, and what it computes"></iframe>'
    )
    return Page("live/index.html", "Live", body, "Live")


def pages(out: Path, recordings: Sequence[Recording] = RECORDINGS) -> list[Page]:
    """Record every run into out/traces; return their list and a page for each."""
    (out / "traces").mkdir(parents=True, exist_ok=True)
    for one in recordings:
        record(one, out / "traces" / f"{one.name}-alone.html")
    return [
        Page("traces/index.html", "Recordings", listing(recordings), "Recordings"),
        *map(page, recordings),
    ]


def record(recording: Recording, path: Path) -> None:
    """Run the command; CourseError quotes its error."""
    command = [sys.executable, "-m", *recording.command(str(path))]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CourseError(
            f"the recording {recording.name}: {said[0]}",
            shlex.join(recording.command("trace.html")),
        )


def page(recording: Recording) -> Page:
    """The recording in a frame, with the command that makes it."""
    alone = f"{recording.name}-alone.html"
    title = html.escape(recording.title)
    body = (
        f"<h1>{title}</h1><p>{html.escape(recording.look)} "
        f'<a href="{alone}">Open it alone</a>.</p>'
        f"<pre>{html.escape(shlex.join(recording.command('trace.html')))}</pre>"
        f'<iframe src="{alone}" title="The recording: {title}"></iframe>'
    )
    return Page(f"traces/{recording.name}.html", recording.title, body, "Recordings")


def listing(recordings: Sequence[Recording]) -> str:
    items = "".join(
        f'<li><a href="{one.name}.html">{html.escape(one.title)}</a><br>'
        f"{html.escape(one.look)}</li>"
        for one in recordings
    )
    return (
        "<h1>Recordings</h1>\n<p>Each page holds one run of the bundled model, recorded tensor by "
        "tensor: the cache, the attention, the positions, the logits and the time of every step. A "
        f"recording of a fault shows the right run beside the wrong one.</p>\n<ul>{items}</ul>"
    )


def in_place(body: str, recordings: Sequence[Recording] = RECORDINGS) -> str:
    """A page of the book with each recording of the site below the command that makes it."""
    body = body.replace(LIVE, f'<a href="../live/live-alone.html">{LIVE}</a>')
    return BLOCK.sub(lambda found: found[0] + beneath(plain(found[0]), recordings), body)


def beneath(command: str, recordings: Sequence[Recording]) -> str:
    """The recording that a command makes, in a frame that loads lazily; "" if the site has none."""
    if not re.match(r"\S*nanokv trace ", command):
        return ""
    words = shlex.split(command)
    prompt = words[2]
    fault = ""
    if "--fault" in words:
        fault = words[words.index("--fault") + 1]
    for one in recordings:
        if (one.prompt, one.fault) == (prompt, fault):
            address = f"../traces/{one.name}-alone.html"
            title = html.escape(one.title)
            return (
                f'<p>This run is recorded: <a href="{address}">{title}</a>.</p>'
                f'<iframe src="{address}" loading="lazy" title="The recording: {title}"></iframe>'
            )
    return ""
