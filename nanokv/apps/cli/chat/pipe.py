"""`nanokv chat` in a pipe: each line of stdin is one turn, each answer one line of stdout.

Newlines in an answer are written as the two characters \\n; `--jsonl` is lossless. There is no
banner and no status line, and nothing is saved. Each line is answered as it arrives, so another
program can hold a conversation through two pipes.
"""

import sys
from typing import TYPE_CHECKING

from nanokv.apps.cli.chat.options import ChatOptions
from nanokv.apps.cli.chat.start import make_session
from nanokv.apps.cli.common.answer import AnswerWriter, thoughts
from nanokv.apps.cli.common.loading import load_model
from nanokv.apps.cli.common.terminal import Interrupt, Style, warning, write_out
from nanokv.apps.cli.common.text import read_prompt_bytes, refuse_special, stdin, to_json
from nanokv.decoding import completion
from nanokv.parallel.group import Ranks

if TYPE_CHECKING:
    from nanokv.chat.session import Session


def run(given: ChatOptions, ranks: Ranks) -> int:
    """Answer one turn per line until stdin ends, or until the context is full (exit code 2)."""
    source = stdin()
    head, messages = _resumed(given.resume)
    loaded = load_model(given.model, given.cache, given.output, ranks)
    session = make_session(given, loaded, head)
    session.replace(messages)
    for number, raw in enumerate(iter(source.readline, b""), 1):
        text = read_prompt_bytes(raw.rstrip(b"\r\n"), f"line {number} of stdin")
        if not text.strip():
            continue
        refuse_special(text, session.tokenizer, given.template.allow_special)
        with Interrupt() as stop:
            if given.jsonl:
                _json_turn(session, text, stop, loaded.source)
            else:
                _text_turn(session, text, stop, given)
        stop.finish()
        if stop.requested:
            raise KeyboardInterrupt
        if not given.output.quiet:
            _say_why_it_stopped(session, number)
    return 0


def _resumed(wanted: str | None) -> tuple[dict | None, list[dict]]:
    if wanted is None:
        return None, []
    from nanokv.apps.cli.chat.transcript import find, read, state_folder

    head, messages, _, notices = read(find(state_folder() / "sessions", wanted))
    for text in notices:
        warning(text)
    return head, messages


def _text_turn(session: "Session", text: str, stop: Interrupt, given: ChatOptions) -> None:
    """Stream the answer. If the reader has gone, BrokenPipeError stops the generation."""
    thinking = thoughts(given.template.thinking, given.output.quiet)
    style = Style(sys.stderr, given.output.color)
    writer = AnswerWriter(thinking, style, lambda text: write_out(one_line(text)))
    pieces = session.stream(text, stop)
    try:
        for piece in pieces:
            writer.begin(session.thinking_opened)
            writer.put(piece)
        writer.finish()
    finally:
        pieces.close()  # type: ignore[attr-defined]  # Session.stream returns a generator
    write_out("\n")


def one_line(text: str) -> str:
    """Escape newlines, and the two Unicode line separators at which some readers split lines."""
    return text.replace("\n", "\\n").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _json_turn(session: "Session", text: str, stop: Interrupt, model: str) -> None:
    for _ in session.stream(text, stop):
        pass
    write_out(to_json(record(session, model)) + "\n")


def record(session: "Session", model: str) -> dict:
    """The last turn for --jsonl. Its text is raw; to_json escapes dangerous characters."""
    turn = session.last
    assert turn is not None
    answer = completion.message(turn.text, session.thinking_opened)
    speed = completion.rate(turn.new, turn.prefill_s)
    return completion.completion(
        model,
        [completion.choice(answer, turn.ids, turn.finish_reason, turn.stop_string)],
        completion.usage(turn.new + turn.reused, turn.out, turn.reused),
        turn=len(session.messages) // 2,
        timings=completion.timings(turn.ttft or None, speed, turn.tok_s or None),
        cache=completion.cache(session.cache),
        seed=turn.seed if session.params["temperature"] else None,
        speculation=turn.speculation,
    )


def _say_why_it_stopped(session: "Session", number: int) -> None:
    """Warn about a limit that cut the answer, unless the user set it."""
    turn = session.last
    assert turn is not None
    reasons = {
        "context": "the context is full",
        "loop": "it repeated itself (--no-loop-guard)",
    }
    if session.params.get("max_new_tokens") is None:
        reasons["length"] = f"{turn.out:,} tokens (--max-new-tokens)"
    if turn.finish_reason in reasons:
        warning(f"line {number}: answer stopped: {reasons[turn.finish_reason]}")
