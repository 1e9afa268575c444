"""The peer processes of `nanokv bench` (--against and --through), and the files that they read."""

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanokv.apps.cli.common.plan import Loaded

if TYPE_CHECKING:
    from nanokv.lab.bench.remote import Process


class Peers:
    """Starts peer processes. Leaving the context ends them and removes their files."""

    processes: "list[Process]"

    def __init__(self, loaded: Loaded, needed: bool, timeout: float | None = None):
        """`needed`: whether peers will start. If so, `self.loaded` maps the weights of `loaded`."""
        self.loaded = loaded
        self.timeout = timeout
        self.stack = ExitStack()
        self.processes = []
        if needed:
            folder = tempfile.TemporaryDirectory(prefix="nanokv-bench-")
            self.folder = Path(self.stack.enter_context(folder))
            self.weights, self.loaded = mapped(loaded, self.folder / "checkpoint")

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()

    def checkpoint(self) -> dict:
        """The checkpoint and the settings with which a peer loads it."""
        loaded = self.loaded
        return {
            "folder": str(self.weights),
            "dtype": loaded.dtype_name,
            "device": str(loaded.device),
            "threads": loaded.threads,
        }

    def start(self, name: str, facts: dict) -> "Process":
        """Start a peer process, which loads what `facts` say."""
        from nanokv.lab.bench.remote import PEERS, Process

        process = Process(PEERS[name], facts, self.timeout)
        self.stack.callback(process.end)
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        """The peers' process ids, so that their load is not taken for other programs' load."""
        return [process.child.pid for process in self.processes]

    def commands(self, ours: Iterable[Any], context: int | None) -> list:
        """A `nanokv generate` for each of our variants that decodes one row with a cache."""
        from nanokv.lab.bench.command import FLAGS, Command, endless

        loaded = self.loaded
        folder = endless(self.weights, self.folder / "endless", loaded.config.vocab_size)
        shared = [
            "--dtype",
            loaded.dtype_name,
            "--threads",
            str(loaded.threads),
            "--device",
            str(loaded.device),
        ]
        if context:
            shared += ["--context", str(context)]
        cached = [one for one in ours if one.batch == 1 and one.cache != "none"]
        cached = [one for one in cached if one.weights in FLAGS]  # no file of the others is kept
        return [Command(one, folder, [*shared, "--cache", one.cache]) for one in cached]

    def runners(self, against: Iterable[str], room: int) -> list:
        """One runner per name in `against`."""
        from nanokv.lab.bench import gguf
        from nanokv.lab.bench.remote import Remote

        found = []
        for name in against:
            engine, _, variant = name.partition(":")
            if engine == "transformers":
                weights = self.loaded.dtype_name
                cache = variant or "dynamic"
                facts: dict = {"cache": cache}
            else:
                weights = variant or "bf16"
                cache = "fp16"
                path = self.folder / "model.gguf"
                if weights == "stored":
                    path = gguf.file_of(self.loaded.folder)
                facts = {"path": str(path), "variant": weights, "context": room}
            found.append(
                Remote(engine, weights, cache, self.start(engine, self.checkpoint() | facts))
            )
        return found


def mapped(loaded: Loaded, folder: Path) -> tuple[Path, Loaded]:
    """A checkpoint with exactly these weights, and the model on it.

    This process and its peers map the same file, so memory holds the weights once.
    """
    is_checkpoint = loaded.tokenizer is not None and loaded.folder.is_dir()
    if is_checkpoint and loaded.config.torch_dtype == loaded.dtype_name:
        return loaded.folder, loaded
    from nanokv.lab.bench.peer import model_of

    loaded.model.save(folder, loaded.tokenizer)
    model = model_of(str(folder), loaded.dtype_name, str(loaded.device), loaded.threads)
    return folder, replace(loaded, model=model)
