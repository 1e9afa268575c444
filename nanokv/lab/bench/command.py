"""The time a user waits: `nanokv generate --json`, started as a new process for every measurement.

The same weights and cache are also measured inside the bench process, in the same rotation, and the
two speeds must agree. The bench leaves out starting, loading and the first touch of memory; users
wait for these too, so they are reported here.
"""

import contextlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from nanokv.lab.bench.remote import LEAST, PeerError, environment
from nanokv.lab.bench.rotation import Row
from nanokv.lab.bench.runners import Ours, Runner
from nanokv.text.tokenizer import Tokenizer

# value of `bench --weights` → flags of `generate` for the same weights
FLAGS = {
    "plain": ["--plain"],
    "fast": ["--dequantize"],
    "invariant": ["--dequantize", "--batch-invariant"],
    "int8": ["--quantize", "int8"],
    "int4": ["--quantize", "int4"],
    "stored": ["--fast"],
}
WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have "
    "from or one had by"
).split()


class Command(Runner):
    """One `nanokv generate` command line; the prompt goes to stdin."""

    def __init__(self, ours: Ours, folder: Path, flags: list[str]) -> None:
        super().__init__(
            "nanokv generate", ours.weights, ours.cache, 1, ours.weight_bytes, ours.kv_bytes
        )
        self.tokenizer = Tokenizer.from_folder(folder)
        self.words = [
            sys.executable,
            "-m",
            "nanokv",
            "generate",
            "-",
            "--raw",
            "--json",
            "--quiet",
            "-m",
            str(folder),
            "-t",
            "0",
            *FLAGS[ours.weights],
            *flags,
        ]
        # context → per round: tokens of the prompt, seconds to load, seconds to the first token.
        # Round 0 is the warm-up.
        self.waits: dict[int, list[dict]] = {}

    def measure(self, vocab_size: int, context: int, steps: int, seed: int) -> tuple[float, float]:
        prompt = prompt_text(self.tokenizer, context, seed)
        began = time.perf_counter()
        answer, arrived = self.answered(prompt, [*self.words, "-n", str(steps + 1)], began)
        speed = answer["timings"]
        tokens = answer["usage"]
        if tokens["completion_tokens"] != steps + 1:
            raise PeerError(f"{tokens['completion_tokens']} tokens came back, not {steps + 1}")
        decoding = steps / speed["decode_tok_s"]
        self.waits.setdefault(context, []).append(
            {
                "prompt_tokens": tokens["prompt_tokens"],
                "load_s": arrived - speed["ttft_s"] - decoding,
                "ttft_s": speed["ttft_s"],
            }
        )
        return context / speed["prefill_tok_s"], decoding / steps

    def answered(self, prompt: str, words: list[str], began: float) -> tuple[dict, float]:
        """(the JSON object printed, seconds until its first byte). PeerError with the command's
        stderr if the command fails."""
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
            ) as child,
        ):
            assert child.stdin is not None and child.stdout is not None  # both are pipes
            guard = threading.Timer(max(LEAST, self.patience), child.kill)
            guard.start()
            try:
                with contextlib.suppress(BrokenPipeError):  # ended early: see its exit code
                    child.stdin.write(prompt.encode())
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
                first = child.stdout.read(1)
                arrived = time.perf_counter() - began
                text = first + child.stdout.read()
                code = child.wait()
            finally:
                guard.cancel()
                child.kill()
            if code == 0:
                return json.loads(text), arrived
            if code == 130:  # Ctrl-C reached both processes
                raise KeyboardInterrupt
            errors.seek(0)
            said = errors.read()[:300].decode("utf-8", "replace").strip().splitlines()
            raise PeerError(f"nanokv generate ended with {code}: {' '.join(said)}")

    def waited(self, context: int) -> dict:
        """Medians over the rounds after the warm-up: seconds from the start of the process to the
        loaded model, seconds from there to the first token, and tokens of the prompt."""
        rounds = self.waits[context][1:]
        return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def prompt_text(tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """Random words that encode to about `tokens` tokens."""
    words = " ".join(random.Random(seed).choices(WORDS, k=tokens))
    return tokenizer.decode(tokenizer.encode(words)[:tokens])


def endless(checkpoint: Path, folder: Path, vocab_size: int) -> Path:
    """A linked copy of the checkpoint in `folder` that has no end-of-sequence token, so that an
    answer always has the requested length. Adds a stand-in tokenizer if the checkpoint has none."""
    folder.mkdir()
    for file in filter(Path.is_file, checkpoint.iterdir()):
        try:
            (folder / file.name).symlink_to(file.resolve())
        except OSError:  # on Windows, links need a privilege
            shutil.copy(file, folder / file.name)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}) + "\n")
    if not (folder / "tokenizer.json").exists():
        stand_in(vocab_size).write_files(folder)
    return folder


def stand_in(vocab_size: int) -> Tokenizer:
    """A tokenizer for random weights: `vocab_size` ids, and every byte of a text is one token."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"t{i}" for i in range(len(names), vocab_size)]
    backend = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names[:vocab_size])}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, rows=vocab_size)


def comparison(rows: Sequence[Row]) -> list[dict]:
    """One row per Command: load time, time to the first token, and its speeds divided by the speeds
    that the bench measured in its own process."""
    own = {
        (row.runner.weights, row.runner.cache, row.context): row
        for row in rows
        if isinstance(row.runner, Ours) and row.runner.batch == 1
    }
    found = []
    for row in rows:
        command = row.runner
        key = command.weights, command.cache, row.context
        # A missing key: Ctrl-C came before the bench measured this row itself.
        if not isinstance(command, Command) or key not in own:
            continue
        theirs = row.figures()
        ours = own[key].figures()
        speeds = {name: theirs[name] for name in ("prefill_tok_s", "decode_tok_s")}
        found.append(
            {"weights": theirs["weights"], "cache": theirs["cache"], "context": row.context}
            | command.waited(row.context)
            | speeds
            | {f"bench_{name}": ours[name] for name in speeds}
            | {
                "prefill_ratio": speeds["prefill_tok_s"] / ours["prefill_tok_s"],
                "decode_ratio": speeds["decode_tok_s"] / ours["decode_tok_s"],
            }
        )
    return found
