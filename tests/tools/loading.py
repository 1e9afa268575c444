"""Loading a GGUF file beside reading it: `.venv/bin/python tests/tools/loading.py FILE.gguf [--rounds 15]`.

The file is in the page cache, and its folder of small files exists. Each round does everything once; the table has
medians. What nanokv remembers of a header is forgotten before each row.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import nanokv
import weights_loader
from nanokv.fast import stored
from nanokv.model import Transformer
from nanokv.text.tokenizer import Tokenizer
from weights_loader import gguf_file

PAGE = 4096
CPU = torch.device("cpu")


class Loading:
    """The rows of the table, each a method without arguments."""

    def __init__(self, path: Path):
        self.path = path
        self.folder = weights_loader.resolve(path)
        self.fields = json.loads((self.folder / "config.json").read_text())
        self.memory = bytearray(os.path.getsize(path))

    def read_into(self) -> None:
        """readinto() memory that the process has already"""
        with open(self.path, "rb", buffering=0) as file:
            rest = memoryview(self.memory)
            while rest:
                rest = rest[file.readinto(rest) :]

    def read(self) -> None:
        """open(FILE).read(), into new memory"""
        with open(self.path, "rb") as file:
            file.read()

    def header(self) -> None:
        """the header, and where its small files are"""
        weights_loader.resolve(self.path)

    def weights(self) -> Transformer:
        """header and weights"""
        weights_loader.resolve(self.path)
        return stored.read(self.folder, self.fields, torch.bfloat16, CPU)

    def touched(self) -> None:
        """header and weights, and every page of them touched"""
        for tensor in self.weights().buffers():
            tensor.view(-1).view(torch.uint8)[::PAGE].max()

    def tokenizer(self) -> None:
        """the tokenizer"""
        Tokenizer.from_folder(self.folder, rows=self.fields["vocab_size"])

    def whole(self) -> None:
        """nanokv.load(FILE, read=stored.read)"""
        nanokv.load(self.path, "bfloat16", "cpu", read=stored.read)


def seconds(action: Callable) -> tuple[float, float]:
    """(by the clock, of the processor)"""
    gguf_file.read_version.cache_clear()
    began, used = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    one = Loading(given.file)
    names = "read_into", "read", "header", "weights", "touched", "tokenizer", "whole"
    actions = [getattr(one, name) for name in names]
    for action in actions:
        action()
    rounds = [[seconds(action) for action in actions] for _ in range(given.rounds)]
    load = os.getloadavg()[0]
    print(
        f"{given.file.name}, {len(one.memory) / 1e6:.1f} MB, load {load:.1f}, ms: clock, processor"
    )
    for action, times in zip(actions, zip(*rounds, strict=True), strict=True):
        clock, used = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        print(f"{action.__doc__:52} {clock:7.1f} {used:7.1f}")


if __name__ == "__main__":
    main()
