"""The cache of a layer with a short convolution: its newest inputs, as a window has its positions.

The next token needs the last K−1 inputs. The cache keeps `SPARE` more, so that as many tokens can
be taken back exactly: the inputs before them are still there. Bytes per row and layer: at most
C·(K−1+SPARE) values; in LFM2-1.2B in bf16 2,048·66·2 = 270,336, of which 8,192 are the last two.
Reference: transformers keeps K inputs and cannot go back.
"""

from typing import Self

import torch
from torch import Tensor

from nanokv.cache.capabilities import Index, Sizes
from nanokv.cache.options import SPARE
from nanokv.cache.state import Recurrent
from nanokv.errors import CacheError, UnsupportedError
from nanokv.recurrent import Written


class ConvLayer(Recurrent):
    """`inputs` (B,C,K−1+n): those of the newest n of `length` tokens, n ≤ SPARE, and those before.

    Before the first token they are zeros. Tensors are never changed.
    """

    kind = "a layer with a short convolution keeps its last inputs"
    inputs: Tensor | None  # None until the first token

    def __init__(self, K: int):
        super().__init__()
        self.before = K - 1
        self._rollback((0, None))

    @property
    def spare(self) -> int:
        """Tokens that truncate can take back, besides all of them."""
        return 0 if self.inputs is None else self.inputs.shape[2] - self.before

    def read(self, T: int) -> tuple[Tensor | None, None, Tensor | None]:
        """The inputs (B,C,K−1) before the next T tokens, and which of these are real."""
        past = None if self.inputs is None else self.inputs[:, :, self.spare :]
        return past, None, self.real(T)

    def keep(self, written: Written, S: Tensor | None) -> None:
        """The inputs of these tokens, and of SPARE − T tokens before them."""
        window = written.window[:, :, -(self.before + SPARE) :]  # (B,C,K−1+min(T,SPARE))
        older = window[:, :, :0]
        if self.inputs is not None:
            first = max(0, self.spare + written.T - SPARE)
            older = self.inputs[:, :, first : self.spare]  # its last K−1 are in the window, too
        # A copy: a view would keep the inputs of a whole prompt alive.
        self._rollback((self.length + written.T, torch.cat((older, window), 2)))

    @property
    def sizes(self) -> Sizes:
        rows = None if self.inputs is None else self.inputs.shape[0]
        limit = None if self.spare == self.length else self.spare
        return Sizes(rows, 0, self.nbytes, limit)

    def _check_truncate(self, n: int):
        super()._check_truncate(n)
        if 0 < n < self.length - self.spare:
            raise UnsupportedError(
                f"a layer with a short convolution cannot go back from {self.length} tokens to "
                f"{n}: it can take back {self.spare}, older inputs are gone",
                hint=f"truncate({self.length - self.spare}), or truncate(0) and prefill again",
            )

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        if n == 0:
            self._rollback((0, None))
        elif n < self.length and self.inputs is not None:
            left = self.inputs.shape[2] - (self.length - n)
            self._rollback((n, self.inputs[:, :, :left].clone()))

    def _snapshot(self):
        return self.length, self.inputs

    def _rollback(self, snapshot):
        # One statement, so an interrupt never leaves inputs and length of different steps.
        self.length, self.inputs = snapshot

    def fork(self) -> Self:
        copy = type(self)(self.before + 1)
        copy._rollback(self._snapshot())
        copy.pads = self.pads
        return copy

    def reorder(self, index: Index) -> None:
        super().reorder(index)
        if self.inputs is not None:
            self._rollback((self.length, self.inputs[index]))

    def state(self) -> dict[str, Tensor]:
        if self.inputs is None:
            return {}
        return {"inputs": self.inputs, "length": torch.tensor(self.length)}

    def restore(self, state: dict[str, Tensor]) -> None:
        self._rollback((int(state.get("length", 0)), state.get("inputs")))
        if not 0 <= self.spare <= self.length:
            raise CacheError(
                f"a convolution over {self.before + 1} inputs needs {self.before} to "
                f"{self.before + self.length} of {self.length} tokens, and "
                f"{self.spare + self.before} came"
            )

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        return 0 if self.inputs is None else self.inputs.nbytes
