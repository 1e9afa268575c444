"""The tools of notebook 16: Triton, launchers, an attention kernel, an imitation of a CUDA graph.

The launchers fill in grids and strides. The attention kernel calls two functions that the learner
writes, `place` and `fold`.

Kernels run on the CPU, one program after the other (TRITON_INTERPRET=1, set before Triton is
imported). Where Triton is not installed (macOS, Windows), `here` is False, and `triton` and `tl`
are placeholders, so that cells which define kernels still run.

The kernels of nanokv.fast.gpu do more per launch: they read the pages of any cache, and multiply
matrices.
"""

import importlib
import os
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

os.environ.setdefault("TRITON_INTERPRET", "1")
here = find_spec("triton") is not None
WHY_NOT = "Triton is not here: it has no wheel for this system. Read on; these cells do nothing."
triton: Any = SimpleNamespace(jit=lambda function: function)
tl: Any = SimpleNamespace(constexpr=object)
if here:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")


# --- nanokv's answers to the exercises ------------------------------------------------------------


@triton.jit
def norm_kernel(x, weight, y, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < C
    numbers = tl.load(x + row * C + column, inside, 0)  # (BLOCK,)
    scale = 1 / tl.sqrt(tl.sum(numbers * numbers) / C + eps)
    w = tl.load(weight + column, inside, 0)
    tl.store(y + row * C + column, w * numbers * scale, inside)


@triton.jit
def place(table, token, seen, SIZE: tl.constexpr):
    page = tl.load(table + token // SIZE, seen, 0)
    return page, token % SIZE


@triton.jit
def fold(highest, total, mixed, scores, v):
    higher = tl.maximum(highest, tl.max(scores, 0))
    shrink = tl.exp(highest - higher)
    share = tl.exp(scores - higher)  # (BLOCK,)
    total = total * shrink + tl.sum(share, 0)
    mixed = mixed * shrink + tl.sum(share[:, None] * v, 0)  # (WIDTH,)
    return higher, total, mixed


@triton.jit
def merge_kernel(parts, sums, y, D, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    lse = tl.load(sums + row * SPLITS + s)  # (SPLITS,)
    share = tl.exp(lse - tl.max(lse, 0))
    share = share / tl.sum(share, 0)
    at = parts + (row * SPLITS + s[:, None]) * D + d[None, :]  # (SPLITS,WIDTH)
    part = tl.load(at, d[None, :] < D, 0)
    tl.store(y + row * D + d, tl.sum(part * share[:, None], 0), d < D)


# --- attention over pages, with a learner's place and fold ----------------------------------------


@triton.jit
def attention_kernel(
    q, keys, values, table, lengths, parts, sums, scale, PAGES, Hk, G, D,
    place: tl.constexpr, fold: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attention of one query head of one row over one part of the row's tokens, BLOCK at a time."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + b)
    part = tl.cdiv(length, SPLITS)
    start = split * part
    end = tl.minimum(start + part, length)

    d = tl.arange(0, WIDTH)
    row = b * Hk * G + h
    query = tl.load(q + row * D + d, d < D, 0) * scale  # (WIDTH,)
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros((WIDTH,), tl.float32)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        seen = token < end
        page, slot = place(table + b * PAGES, token, seen, SIZE)
        at = ((page * Hk + h // G) * SIZE + slot) * D  # (BLOCK,)
        here = seen[:, None] & (d < D)[None, :]
        k = tl.load(keys + at[:, None] + d[None, :], here, 0)  # (BLOCK,WIDTH)
        scores = tl.where(seen, tl.sum(k * query[None, :], 1), float("-inf"))
        v = tl.load(values + at[:, None] + d[None, :], here, 0)
        highest, total, mixed = fold(highest, total, mixed, scores, v)
    total = tl.where(total > 0, total, 1.0)  # a part without tokens gives 0, log-sum-exp −inf
    tl.store(parts + (row * SPLITS + split) * D + d, mixed / total, d < D)
    tl.store(sums + row * SPLITS + split, highest + tl.log(total))


# --- kernels that the checks launch ---------------------------------------------------------------


@triton.jit
def place_kernel(
    table, tokens, pages, slots, end,
    place: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the (page, slot) that `place` gives for BLOCK tokens."""
    i = tl.arange(0, BLOCK)
    token = tl.load(tokens + i)
    page, slot = place(table, token, token < end, SIZE)
    tl.store(pages + i, page)
    tl.store(slots + i, slot)


@triton.jit
def fold_kernel(
    scores,
    values,
    found,
    mixed_out,
    blocks,
    fold: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the state of `fold` after `blocks` blocks: scores (BLOCK,), values (BLOCK,WIDTH)."""
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros((WIDTH,), tl.float32)
    for block in range(blocks):
        row = block * BLOCK + i
        v = tl.load(values + row[:, None] * WIDTH + d[None, :])
        highest, total, mixed = fold(highest, total, mixed, tl.load(scores + row), v)
    tl.store(found, highest)
    tl.store(found + 1, total)
    tl.store(mixed_out + d, mixed)


# --- launchers ------------------------------------------------------------------------------------


def norm(
    kernel: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Run a norm_kernel over x (…,C), one program per row → the same shape."""
    C = x.shape[-1]
    if out is None:
        out = torch.empty_like(x)
    launch(
        kernel, (x.numel() // C,), x.contiguous(), weight, out, C, eps, triton.next_power_of_2(C)
    )
    return out


def attention(
    place: Any,
    fold: Any,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    splits: int = 1,
    block: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run attention_kernel over pages, one program per row, query head and part of the tokens.

    q (B,H,D), keys and values (P,Hk,SIZE,D), table (B,n) and lengths (B,) int32 → per part the
    output (B,H,splits,D) and its log-sum-exp (B,H,splits).
    """
    B, H, D = q.shape
    _, Hk, SIZE, _ = keys.shape
    parts = q.new_empty(B, H, splits, D)
    sums = q.new_empty(B, H, splits)
    launch(
        attention_kernel, (B, H, splits), q.contiguous(), keys, values, table, lengths, parts, sums,
        D**-0.5, table.shape[1], Hk, H // Hk, D, place, fold, SIZE, block,
        triton.next_power_of_2(D), splits,
    )  # fmt: skip
    return parts, sums


def merge(kernel: Any, parts: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Merge the two results of `attention` with a merge_kernel → (B,H,D).

    One program per row and query head.
    """
    B, H, splits, D = parts.shape
    out = parts.new_empty(B, H, D)
    launch(kernel, (B * H,), parts, sums, out, D, splits, triton.next_power_of_2(D))
    return out


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Launch a kernel, and add the launch to the current Recording, if there is one.

    Triton's interpreter uses torch operations itself: they are kept out of the recording.
    """
    try:
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, about NaN and infinity
            kernel[grid](*arguments)
    except Exception as error:
        raise _cause(error) from None
    if Recording.current is not None:
        Recording.current.starts.append((launch, (kernel, grid, *arguments), {}, None))


def _cause(error: BaseException) -> BaseException:
    """The original error of a kernel; the interpreter wraps it once per function called."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# --- an imitation of a CUDA graph -----------------------------------------------------------------


class Recording(TorchDispatchMode):
    """Records every operation that starts inside it: tensors by address, numbers by value.

    `replay` starts the same operations again, and writes their results to the addresses of the
    first time. A CUDA graph does the same with a single command; here Python starts each operation.
    """

    current: "Recording | None" = None

    def __init__(self):
        super().__init__()
        self.starts: list[tuple] = []  # (function, arguments, options, results)

    def __enter__(self):
        Recording.current = self
        return super().__enter__()

    def __exit__(self, *error: object):
        Recording.current = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        if not isinstance(result, torch.Tensor | tuple | list):
            raise RuntimeError(
                f"{operation} gives Python a {type(result).__name__}: "
                "a recording cannot wait for the GPU"
            )
        self.starts.append((operation, arguments, options or {}, result))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for function, arguments, options, results in self.starts:
                self._put(results, function(*arguments, **options))

    def _put(self, before, now) -> None:
        """Copy new results to the old addresses; views and in-place results are there already."""
        if isinstance(before, tuple | list):
            for pair in zip(before, now, strict=True):
                self._put(*pair)
        elif isinstance(before, torch.Tensor) and before.data_ptr() != now.data_ptr():
            before.copy_(now)
