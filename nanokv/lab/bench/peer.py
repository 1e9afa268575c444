"""The program that runs another library's runtime: remote.py starts `python -m
nanokv.lab.bench.peer` and sends it requests.

Requests are JSON lines on stdin: first {"make": "module:function", "facts": {…}}, then the
arguments of `measure`, one object per line. The reply to each is one line on stdout, {"answer":
…} or {"error": …}. Anything a library prints goes to stderr.
"""

import dataclasses
import functools
import importlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nanokv.errors import NanoKVError
from nanokv.support import installing

if TYPE_CHECKING:
    from nanokv.lab.bench.runners import LlamaCpp, Transformers
    from nanokv.model import Transformer

DEATH = 1  # PR_SET_PDEATHSIG of prctl(2)


def main() -> None:
    """Make the peer, then answer requests until stdin ends."""
    end_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    questions: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=listen, args=(questions,), daemon=True).start()
    setup = questions.get()
    name, _, function = setup["make"].partition(":")
    peer = reply(
        out, lambda: getattr(importlib.import_module(name), function)(**setup["facts"]), bytes_of
    )
    while peer is not None:
        reply(out, functools.partial(peer.measure, **questions.get()))


def listen(questions: queue.SimpleQueue) -> None:
    """Queue the parent's requests. When the parent ends, this process exits at once, even in the
    middle of an answer."""
    for line in sys.stdin:
        questions.put(json.loads(line))
    os._exit(0)


def end_with_parent() -> None:
    """Let Linux kill this process when its parent ends, even while a library holds Python's GIL."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(DEATH, signal.SIGKILL, 0, 0, 0)


def reply(
    out: TextIO, run: Callable[[], Any], shown: Callable[[Any], object] = lambda value: value
) -> Any:
    """Write the result of `run`, or its error, to `out` as one line of JSON.

    Returns the result, None after an error. `shown` turns the result into what is sent.
    """
    value = None
    try:
        value = run()
        line = {"answer": shown(value)}
    except Exception as error:  # another library may raise anything; the bench shows it as a row
        text = (str(error).strip().splitlines() or [""])[0]
        if not isinstance(error, NanoKVError):
            text = f"{type(error).__name__}: {text}".removesuffix(": ")
        elif error.hint:
            text += f" ({error.hint})"
        line = {"error": text[:300]}
    out.write(json.dumps(line) + "\n")
    out.flush()
    return value


def bytes_of(peer: object) -> list[int]:
    """[weight_bytes, kv_bytes] that the peer reads in a decode step."""
    return [getattr(peer, "weight_bytes", 0), getattr(peer, "kv_bytes", 0)]


# --- peers -------------------------------------------------------------------------------------


def model_of(folder: str, dtype: str, device: str, threads: int) -> "Transformer":
    """The checkpoint, with its weights memory-mapped. The bench maps the same file, so the weights
    are in memory once."""
    import torch

    from nanokv.config import Config
    from nanokv.loading import build
    from weights_loader import load

    torch.set_num_threads(threads)
    fields, state = load(folder, getattr(torch, dtype), device)
    return build(Config.from_dict(fields), state)


def transformers(cache: str, **checkpoint: Any) -> "Transformers":
    """transformers' model over the same tensors, with its dynamic or static cache."""
    from nanokv.lab.bench.runners import Transformers

    return Transformers(model_of(**checkpoint), cache, 1)


def llama_cpp(path: str, variant: str, context: int, **checkpoint: Any) -> "LlamaCpp":
    """llama.cpp over the GGUF file at `path`, written by the first peer that needs it. A `variant`
    of gguf.QUANTIZED is made of it by llama.cpp's own tool."""
    try:
        # fails before a file is written
        import llama_cpp as _  # type: ignore[import-not-found]  # noqa: F401

        from nanokv.lab.bench import gguf
    except ImportError:
        raise NanoKVError(
            "llama.cpp is not installed", installing.hint(["llama-cpp-python", "gguf"])
        ) from None
    from nanokv.config import Config
    from nanokv.lab.bench.runners import LlamaCpp

    file = Path(path)
    if not file.exists():
        gguf.write(model_of(**checkpoint), file.with_suffix(".half")).rename(file)
    if variant in gguf.QUANTIZED:
        file = gguf.quantize(file, variant)
    return LlamaCpp(
        Config.from_folder(checkpoint["folder"]), file, variant, context, checkpoint["threads"]
    )


@dataclasses.dataclass
class GenerateBatch:
    """transformers' generate_batch over a fixed list of prompts."""

    serve: Callable[[], list]

    def measure(self) -> tuple[float, int]:
        """(seconds, generated tokens) of all prompts together."""
        from nanokv.lab.bench.serving import timed

        return timed(self.serve)


def generate_batch(prompts: list, tokens: int, **checkpoint: Any) -> GenerateBatch:
    """A peer that answers every prompt with `tokens` new tokens."""
    from nanokv.lab.bench.runners import Transformers
    from nanokv.lab.bench.serving import generate_batch

    return GenerateBatch(
        generate_batch(Transformers(model_of(**checkpoint), "dynamic", 1).model, prompts, tokens)
    )


if __name__ == "__main__":
    main()
