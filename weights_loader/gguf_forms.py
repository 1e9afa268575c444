"""How a GGUF file holds the values of a tensor, where it differs from the model.

    Shifted(1.0)       norms of Gemma and Qwen3.5: 1 + w for w
    Exponential()      decay of Qwen3.5: −exp(A_log) for A_log
    Squeezed()         weights of a convolution: (C,K) for (C,1,K)
    Tiled(…)           value heads of Qwen3.5 in another order

`stored` turns the model's values into the file's, `read` turns them back. Both get whole tensors in
fp32.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .strict import CheckpointError, quote

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """The file has the values of the model."""

    def stored(self, x: "torch.Tensor") -> "torch.Tensor":
        """The model's values → the file's."""
        return x

    def read(self, x: "torch.Tensor", name: str) -> "torch.Tensor":
        """The file's values → the model's. CheckpointError, with the tensor's name, for others."""
        return x

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape in the model → the one in the file."""
        return shape

    def shape(self, stored: Shape) -> Shape:
        """The shape in the file → the one in the model."""
        return stored


@dataclass(frozen=True)
class Shifted(Form):
    """Each value is larger by `shift`."""

    shift: float

    def stored(self, x: "torch.Tensor") -> "torch.Tensor":
        return x + self.shift

    def read(self, x: "torch.Tensor", name: str) -> "torch.Tensor":
        return x - self.shift


@dataclass(frozen=True)
class Exponential(Form):
    """−exp(x), computed in fp64: a value comes back to 1.2e-7, or to the bit if it is bf16."""

    def stored(self, x: "torch.Tensor") -> "torch.Tensor":
        return -x.double().exp().float()

    def read(self, x: "torch.Tensor", name: str) -> "torch.Tensor":
        if not (x < 0).all():
            raise CheckpointError(
                f"tensor {quote(name)} has the value {float(x.max()):g}: −exp(A_log) is below 0"
            )
        return (-x.double()).log().float()


@dataclass(frozen=True)
class Squeezed(Form):
    """(C,K) for the weights (C,1,K) of a convolution per channel."""

    def stored(self, x: "torch.Tensor") -> "torch.Tensor":
        return x.squeeze(1)  # (C,K)

    def read(self, x: "torch.Tensor", name: str) -> "torch.Tensor":
        return x.unsqueeze(1)  # (C,1,K)

    def stored_shape(self, shape: Shape) -> Shape:
        return shape[0], shape[2]

    def shape(self, stored: Shape) -> Shape:
        return stored[0], 1, *stored[1:]


@dataclass(frozen=True)
class Tiled(Form):
    """H value heads of `width` numbers each, from number `first` of dimension `dim` on.

    The model has the H/Hk heads of a key head beside each other: head h has key head h // (H/Hk).
    ggml repeats a tensor as a whole, so that in the file head h has key head h mod Hk.
    """

    Hk: int
    H: int
    width: int = 1
    first: int = 0
    dim: int = 0

    def stored(self, x: "torch.Tensor") -> "torch.Tensor":
        return self.swapped(x, self.Hk, self.H // self.Hk)

    def read(self, x: "torch.Tensor", name: str) -> "torch.Tensor":
        return self.swapped(x, self.H // self.Hk, self.Hk)

    def swapped(self, x: "torch.Tensor", a: int, b: int) -> "torch.Tensor":
        """Head i·b + j becomes head j·a + i, for i < a and j < b."""
        y = x.clone()
        heads = y.narrow(self.dim, self.first, self.H * self.width)
        grid = heads.unflatten(self.dim, (a, b, self.width))
        heads.copy_(grid.transpose(self.dim, self.dim + 1).flatten(self.dim, self.dim + 2))
        return y
