"""Fuzz target: a saved conversation (/load, --resume) with its settings, taken over by a session."""

import functools
import json
from types import SimpleNamespace

import common

from nanokv.apps.cli.chat import files as chat_files
from nanokv.apps.cli.chat import transcript
from nanokv.errors import NanoKVError
from nanokv.parallel.group import Alone

INSTRUMENT = [
    "nanokv.apps.cli.chat.transcript",
    "nanokv.apps.cli.chat.files",
    "nanokv.chat.session",
]
ALLOWED = (NanoKVError,)


def seeds() -> dict[str, bytes]:
    head = transcript.header("tiny", "0" * 16, kv="a.kv")
    turn = {"user": "hi", "answer": "Hello!", "finish_reason": "stop", "seconds": 0.1}
    history = {
        "history": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "system": "s",
        "settings": {"temperature": 0.5, "stop": ["x"], "seed": 1},
    }
    lines = {"turns": [head, turn, turn], "history": [head, history, turn], "head": [head]}
    return {
        name: "".join(json.dumps(line) + "\n" for line in each).encode()
        for name, each in lines.items()
    }


def mutate(data: bytes, rng) -> bytes:
    lines = data.split(b"\n")
    if rng.random() < 0.8:
        at = rng.randrange(len(lines))
        lines[at] = common.json_mutator(lines[at], rng)
        return b"\n".join(lines)
    return common.byte_mutator(data, rng)


@functools.cache
def loaded():
    from nanokv.loading import load

    return load("tiny")


def run(data: bytes) -> None:
    from nanokv.chat.session import Session

    path = common.scratch() / "session.jsonl"
    path.write_bytes(data)
    common.expect(ALLOWED, transcript.listing, path.parent)
    model = SimpleNamespace(name="tiny", fingerprints=lambda: ["1" * 16], ranks=Alone())
    chat = SimpleNamespace(session=Session(*loaded()), loaded=model)
    assert isinstance(chat_files.load(chat, path), str)
