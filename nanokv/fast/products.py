"""Fast products in a model whose blocks no kernel computes whole.

A family's own blocks stay as they are: norms, rotation and residual streams are the plain model's,
in its dtype. What reads most bytes in a decode step goes through kernels, which read each byte
once: the matrices, in their stored format, attention (attention.py) and states (recurrent.py).
"""

import copy
from typing import Any

from torch import Tensor, nn

from nanokv.checkpoint import Attend, Cache
from nanokv.errors import ConfigError
from nanokv.fast.attention import by_kernel
from nanokv.fast.checks import check_one_dtype, has_own_forward
from nanokv.fast.recurrent import delta_steps
from nanokv.fast.weights import Dense, MakeMatrix, Matrix, formats
from nanokv.model import Transformer
from nanokv.recurrent import GatedDeltaNet
from nanokv.rope import Rotation
from nanokv.stacked_experts import Stack, clamped_swiglu

# Small matrices that choose experts or forget a state. A rounded choice is another answer, and the
# bytes are few: they keep their dtype in every format.
KEPT = "router", "gate", "in_proj_a", "in_proj_b"


class Product(nn.Module):
    """nn.Linear over a matrix of any format: x (…,K) → (…,N) in the dtype of x."""

    def __init__(self, matrix: Matrix):
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.matrix.K
        product = self.matrix if rows <= self.matrix.most_rows else self.matrix.product
        return product(x).to(x.dtype)  # (…,N)


class StackProducts(nn.Module):
    """A layer's experts of stacked_experts.Stack, with two matrices each."""

    def __init__(self, plain: Stack, make_matrix: MakeMatrix):
        super().__init__()
        self.gate_up = products(plain.gate_up_proj, plain.gate_up_proj_bias, make_matrix)
        self.down = products(plain.down_proj, plain.down_proj_bias, make_matrix)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """x (n,C) through one expert → (n,C)."""
        both = self.gate_up[expert](x)  # (n,2·width)
        return self.down[expert](clamped_swiglu(both))


def products(weight: nn.Parameter, bias: Tensor, make_matrix: MakeMatrix) -> nn.ModuleList:
    """A Product per expert of weight (E,K,N) and bias (E,N).

    The kernels read a matrix by its rows (N,K). The plain weight becomes a transposed view of such
    matrices, so that nothing is stored twice.
    """
    rows = weight.detach().mT.contiguous()  # (E,N,K)
    weight.data = rows.mT
    return nn.ModuleList(Product(make_matrix(*pair)) for pair in zip(rows, bias, strict=True))


class ProductTransformer(Transformer):
    """The plain model with fast products. Its parameters are those of the plain model."""

    def __init__(self, plain: Transformer, head: Matrix, weights: str):
        """`plain` is a copy, which gives its modules away. `weights`: the format of the matrices."""
        super(Transformer, self).__init__()  # no new modules
        own: Any = self  # the head is of another class
        self.config = plain.config
        self.embed_tokens = plain.embed_tokens
        self.layers = plain.layers
        self.norm = plain.norm
        own.lm_head = head
        self.weights = weights
        self.generation_config = plain.generation_config
        self.eval()

    def run_layers(self, x: Tensor, rope: Rotation, cache: Cache, attend: Attend) -> Tensor:
        """As Transformer.run_layers; the attention of a decode step is a kernel."""
        return super().run_layers(x, rope, cache, by_kernel(attend))


def with_products(model: Transformer, weights: str | None) -> ProductTransformer:
    """The fast model that `optimize` returns for a family with blocks of its own, on a CPU.

    The embedding, of which a step reads a row, stays as loaded. ConfigError for a model with hooks
    or several dtypes, for one that is optimized already, and for an unknown format of weights.
    """
    check_copyable(model)
    weights, make_matrix, make_table = formats(model.dtype, weights)
    shared: dict[int, Any] = {id(model.config): model.config}
    for tensor in (*model.parameters(), *model.buffers()):
        shared[id(tensor)] = tensor
    fast = copy.deepcopy(model, shared)  # new modules over the same tensors
    head = make_table(fast.lm_head.weight)
    for parent in list(fast.layers.modules()):
        if type(parent) is GatedDeltaNet:
            parent.one_token = delta_steps
        for name, part in list(parent.named_children()):
            make = Dense if name in KEPT else make_matrix
            if type(part) is nn.Linear:
                setattr(parent, name, Product(make(part.weight, part.bias)))
            if type(part) is Stack:
                setattr(parent, name, StackProducts(part, make))
    return ProductTransformer(fast, head, weights)


def check_copyable(model: Transformer) -> None:
    """ConfigError if a copy of the modules would not compute what the model computes."""
    if type(model) is not Transformer:
        raise ConfigError(
            f"{type(model).__name__} has no plain products to replace: "
            "it is optimized already, or not a Transformer",
            hint="optimize the model that nanokv.load returns",
        )
    for name, part in model.named_modules():
        if has_own_forward(part):
            raise ConfigError(
                f"{name or 'the model'} is a {type(part).__name__} with a custom forward or hooks: "
                "a copy of the model would skip them",
                hint="use the plain model; hooks that only listen can be put on the optimized one",
            )
    check_one_dtype(model)
