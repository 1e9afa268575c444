"""Records a decode step as a CUDA graph and replays it: one launch for all layers and rows.

A CUDA graph repeats the same kernels on the same addresses. Therefore everything that changes
between steps is the value of a tensor at a fixed address: the tokens, their positions, and how many
keys each row sees. The location of the cache is such a value too: the kernels read addresses,
strides and page tables from `places` (kernels.py). One recording serves every cache, and caches may
grow and change between two steps.

There is a recording for each of a few batch sizes. Padded rows see 0 keys, and nothing is written
for them. Without a GPU the step is called directly. References: gpt-fast; nano-vllm's
model_runner.py, mini-sglang's graph.py.
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

# Rows of the recordings; a batch takes the next larger one. From 16 rows on, at most a third of the
# rows are padding.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTHS = attrgetter("lengths")
# tokens (B,), positions (B,), places (L,PLACE), lengths (L,B) → hidden states (B,C)
Step = Callable[..., torch.Tensor]


class Inputs:
    """The inputs of a step of `rows` rows, in one block of memory that one copy to the GPU fills.

    The host has a block of the same layout. A step writes only what changes: its numbers, and the
    addresses if the cache has grown or is another cache.
    """

    def __init__(self, layers: int, rows: int, device: torch.device | str):
        on_gpu = torch.device(device).type == "cuda"
        # Sizes of the parts in int64; two lengths share one int64.
        self.counts = rows, layers * PLACE, -(-layers * rows // 2)
        self.layers = layers
        self.rows = rows
        self.packed = torch.zeros(sum(self.counts), dtype=torch.int64, device=device)
        self.positions, self.places, self.lengths = self.parts(self.packed)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.host = torch.zeros(sum(self.counts), dtype=torch.int64, pin_memory=on_gpu)
        self.numbers = [part.numpy() for part in self.parts(self.host)]
        # A copy from pinned memory returns before it is done.
        self.copied = torch.cuda.Event() if on_gpu else None
        self.written: list[list[int]] = []  # the places now in the host's block

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the block: positions (B,) and places (L,PLACE) int64, lengths (L,B) int32."""
        positions, places, lengths = packed.split(self.counts)
        lengths = lengths.view(torch.int32)[: self.layers * self.rows]
        return positions, places.view(self.layers, PLACE), lengths.view(self.layers, self.rows)

    def fill(self, tokens: torch.Tensor, positions: Position, pages: list[Pages]) -> None:
        """Set the inputs: tokens (b,) on the device, positions () or (b,) on the host.

        b ≤ B; the remaining rows are padding and see 0 keys.
        """
        b = len(tokens)
        at, places, lengths = self.numbers
        found = list(map(place_of, pages))
        if self.copied is not None:
            self.copied.synchronize()
        if found != self.written:
            self.written = []  # an interrupt in the next line must not leave the old value
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
    """(b,) if all layers share their lengths, else (L,b)."""
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
    """The row of `places` for a layer, made once and stored on the Pages object."""
    made = vars(pages).get("place")
    if made is None:
        made = kernels.place(pages)
        vars(pages)["place"] = made
    return made


class Recorded:
    """A step of `rows` rows, recorded at the first call on a GPU, and called directly elsewhere."""

    def __init__(
        self, step: Step, layers: int, rows: int, device: torch.device, space: "Space | None"
    ):
        self.inputs = Inputs(layers, rows, device)
        self.step = step
        self.device = device
        self.space = space
        self.graph: torch.cuda.CUDAGraph | None = None
        self.hidden: torch.Tensor  # set by the first call

    def __call__(
        self, tokens: torch.Tensor, positions: Position, pages: list[Pages]
    ) -> torch.Tensor:
        """tokens (b,) → hidden states (b,C), which the next step of the model overwrites."""
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
        """Record the step, after two runs that compile the kernels and select product algorithms.

        Repeating a step is harmless, since it writes the same keys to the same place.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        space.trying.wait_stream(current)
        # The context restores the current stream, also after an error.
        with torch.cuda.stream(space.trying):
            for _ in range(2):
                self.run()
            # thread_local: other threads may use the GPU during the recording.
            with torch.cuda.graph(
                graph, space.memory, space.recording, capture_error_mode="thread_local"
            ):
                hidden = self.run()
        current.wait_stream(space.trying)
        self.hidden = hidden
        self.graph = graph


class Space:
    """Scratch memory and two streams for the recordings of one model, of which one runs at a time.

    torch keeps 32 MB of scratch memory for cuBLAS per stream that has run a product. For
    `recording` it is allocated while the first graph is recorded, so it lies in `memory` and stays
    there.
    """

    def __init__(self, device: torch.device):
        self.memory = torch.cuda.graph_pool_handle()
        self.trying = torch.cuda.Stream(device)
        self.recording = torch.cuda.Stream(device)


class Steps:
    """The decode steps of one model, with a recording per number of rows."""

    def __init__(self, step: Step, layers: int, device: torch.device):
        self.step = step
        self.layers = layers
        self.device = device
        self.space = Space(device) if device.type == "cuda" else None  # None: no recordings
        self.recorded: dict[int, Recorded] = {}
        self.turn = threading.Lock()  # threads that share a model share its inputs

    def __call__(
        self, tokens: torch.Tensor, positions: Position, pages: list[Pages]
    ) -> torch.Tensor:
        """tokens (b,), positions () or (b,) → hidden states (b,C). Any number of rows."""
        if not torch.is_inference_mode_enabled():  # entering it a second time takes 5 µs
            with torch.inference_mode():
                return self(tokens, positions, pages)
        if len(tokens) > SIZES[-1]:
            return self.in_parts(tokens, positions, pages)
        rows = SIZES[bisect_left(SIZES, len(tokens))]
        with self.turn:
            # A copy, because the next step overwrites the result.
            return self.recording(rows)(tokens, positions, pages).clone()

    def in_parts(
        self, tokens: torch.Tensor, positions: Position, pages: list[Pages]
    ) -> torch.Tensor:
        """A step of more rows than the largest recording, split into several replays."""
        most = SIZES[-1]
        positions = torch.as_tensor(positions).expand(len(tokens))
        parts = []
        for a in range(0, len(tokens), most):
            layers = [rows_of(layer, a, a + most) for layer in pages]
            parts.append(self(tokens[a : a + most], positions[a : a + most], layers))
        return torch.cat(parts)

    def recording(self, rows: int) -> Recorded:
        """The recording of `rows` rows, made on first use."""
        if rows not in self.recorded:
            self.recorded[rows] = Recorded(self.step, self.layers, rows, self.device, self.space)
        return self.recorded[rows]
