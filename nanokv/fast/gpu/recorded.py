"""A decode step that is recorded once and replayed: one launch for all layers of all rows.

A CUDA graph repeats the very same kernels on the very same addresses. So whatever changes from step to step is the
value of a tensor at a fixed address: the tokens, their positions, how many keys each row sees. Where the cache keeps
those are numbers as well: kernels.py reads addresses, strides and page tables from `places`. One recording therefore
serves every cache, and caches may grow and change between two steps.

There is one recording for each of a few batch sizes. Rows that are not there see 0 keys: nothing is written for them.
Without a GPU the step is simply called. References: gpt-fast; nano-vllm's model_runner.py, mini-sglang's graph.py.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable
from itertools import repeat
from operator import attrgetter, is_

import numpy
import torch

from nanokv.cache.capabilities import Pages
from nanokv.fast.gpu import kernels
from nanokv.fast.gpu.kernels import PLACE
from nanokv.inference import Position

# Rows of a recording; a batch takes the next larger one. From 16 on at most a third of the rows are padding.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTHS = attrgetter("lengths")
# tokens (B,), positions (B,), places (L,PLACE), lengths (L,B) → hidden states (B,C)
Step = Callable[..., torch.Tensor]


class Inputs:
    """What a step of `rows` rows reads, in one piece of memory: one copy to the GPU fills all of it.

    The host has the same piece. Only what changes is written there: numbers of a step, and addresses where a cache has
    grown or is another one.
    """

    def __init__(self, layers: int, rows: int, device: torch.device | str):
        on_gpu = torch.device(device).type == "cuda"
        # As int64; two lengths share one.
        self.counts = rows, layers * PLACE, -(-layers * rows // 2)
        self.layers = layers
        self.rows = rows
        self.packed = torch.zeros(sum(self.counts), dtype=torch.int64, device=device)
        self.positions, self.places, self.lengths = self.parts(self.packed)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.host = torch.zeros(sum(self.counts), dtype=torch.int64, pin_memory=on_gpu)
        self.numbers = [part.numpy() for part in self.parts(self.host)]
        # A copy from pinned memory goes on when it has returned.
        self.copied = torch.cuda.Event() if on_gpu else None
        self.written: list[list[int]] = []  # the places on the host

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """positions (B,) and places (L,PLACE) int64, lengths (L,B) int32: views."""
        positions, places, lengths = packed.split(self.counts)
        lengths = lengths.view(torch.int32)[: self.layers * self.rows]
        return positions, places.view(self.layers, PLACE), lengths.view(self.layers, self.rows)

    def fill(self, tokens: torch.Tensor, positions: Position, pages: list[Pages]) -> None:
        """tokens (b,) on the device, positions () or (b,) on the host; b ≤ B, the other rows see nothing."""
        b = len(tokens)
        at, places, lengths = self.numbers
        found = list(map(place_of, pages))
        if self.copied is not None:
            self.copied.synchronize()
        if found != self.written:
            self.written = []
            places[:] = found
            self.written = found
        if type(positions) is not int:
            positions = torch.as_tensor(positions, device="cpu")
        at[:b] = positions
        lengths[:, :b] = lengths_of(pages)
        if b < self.rows:
            at[b:] = 0
            lengths[:, b:] = 0
        self.packed.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        own = self.tokens
        if b < self.rows:
            own = own[:b]
        own.copy_(tokens)


def lengths_of(pages: list[Pages]) -> numpy.ndarray:
    """(b,) where all layers share theirs, else (L,b)."""
    first = pages[0].lengths
    if all(map(is_, map(LENGTHS, pages), repeat(first))):
        return first.numpy()
    return numpy.stack([page.lengths.numpy() for page in pages])


def rows_of(pages: Pages, a: int, b: int) -> Pages:
    """Rows a … b−1 of a layer."""
    if pages.table is None:
        return Pages(pages.keys[a:b], pages.values[a:b], pages.lengths[a:b])
    return Pages(pages.keys, pages.values, pages.lengths[a:b], pages.table[a:b])


def place_of(pages: Pages) -> list[int]:
    """Where a layer lies, as the kernels read it; made once for each Pages, and kept on it."""
    made = vars(pages).get("place")
    if made is None:
        made = kernels.place(pages)
        vars(pages)["place"] = made
    return made


class Recorded:
    """One step, for `rows` rows. On a GPU it is recorded at its first call, elsewhere it is called each time."""

    def __init__(
        self, step: Step, layers: int, rows: int, device: torch.device, space: "Space | None"
    ):
        self.inputs = Inputs(layers, rows, device)
        self.step = step
        self.device = device
        self.space = space
        self.graph: torch.cuda.CUDAGraph | None = None
        self.hidden: torch.Tensor  # of the first call on

    def __call__(
        self, tokens: torch.Tensor, positions: Position, pages: list[Pages]
    ) -> torch.Tensor:
        """tokens (b,) → hidden states (b,C), valid until the next step of the model."""
        self.inputs.fill(tokens, positions, pages)
        if self.space is None:
            self.hidden = self.run()
        elif self.graph is None:
            self.record(self.space)
        if self.graph is not None:
            self.graph.replay()
        b = len(tokens)
        if b == self.inputs.rows:
            return self.hidden
        return self.hidden[:b]

    def run(self) -> torch.Tensor:
        inputs = self.inputs
        return self.step(inputs.tokens, inputs.positions, inputs.places, inputs.lengths)

    def record(self, space: "Space") -> None:
        """The first runs compile the kernels and choose the products' algorithms. To repeat a step is harmless: it
        writes the same keys to the same place."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        space.trying.wait_stream(current)
        # Whatever fails inside, the stream of before is the current one again.
        with torch.cuda.stream(space.trying):
            for _ in range(2):
                self.run()
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, space.memory, space.recording, capture_error_mode="thread_local"
            ):
                hidden = self.run()
        current.wait_stream(space.trying)
        self.hidden = hidden
        self.graph = graph


class Space:
    """What the recordings of one model share, because no two run at a time: scratch memory and two streams.

    torch keeps 32 MB of scratch for cuBLAS on each stream that has multiplied. That of `recording` is taken while the
    first graph is recorded, so it lies in `memory` and stays.
    """

    def __init__(self, device: torch.device):
        self.memory = torch.cuda.graph_pool_handle()
        self.trying = torch.cuda.Stream(device)
        self.recording = torch.cuda.Stream(device)


class Steps:
    """The decode steps of one model, each of its own number of rows."""

    def __init__(self, step: Step, layers: int, device: torch.device):
        self.step = step
        self.layers = layers
        self.device = device
        self.space = Space(device) if device.type == "cuda" else None  # None: no recordings
        self.recorded: dict[int, Recorded] = {}
        self.turn = threading.Lock()  # threads that share a model would write each other's inputs

    def __call__(
        self, tokens: torch.Tensor, positions: Position, pages: list[Pages]
    ) -> torch.Tensor:
        """tokens (b,), positions () or (b,) → hidden states (b,C). More rows than a recording has go one part after the
        other."""
        if not torch.is_inference_mode_enabled():  # to enter it once more takes 5 µs
            with torch.inference_mode():
                return self(tokens, positions, pages)
        if len(tokens) > SIZES[-1]:
            return self.in_parts(tokens, positions, pages)
        rows = SIZES[bisect_left(SIZES, len(tokens))]
        with self.turn:
            return self.recording(rows)(tokens, positions, pages).clone()  # it is written again

    def in_parts(
        self, tokens: torch.Tensor, positions: Position, pages: list[Pages]
    ) -> torch.Tensor:
        """A step of more rows than a recording has: one part of the rows after the other."""
        most = SIZES[-1]
        positions = torch.as_tensor(positions).expand(len(tokens))
        parts = []
        for a in range(0, len(tokens), most):
            layers = [rows_of(layer, a, a + most) for layer in pages]
            parts.append(self(tokens[a : a + most], positions[a : a + most], layers))
        return torch.cat(parts)

    def recording(self, rows: int) -> Recorded:
        """For so many rows, made when it is first asked for."""
        if rows not in self.recorded:
            self.recorded[rows] = Recorded(self.step, self.layers, rows, self.device, self.space)
        return self.recorded[rows]
