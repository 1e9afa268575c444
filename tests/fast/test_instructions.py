"""The kernels for processors that are not this one: with fewer instructions, with matrix tiles, on Arm.

The compiler is told to leave instructions out, or to call functions in the place of tiles; test_fast.py,
test_blocks.py, test_invariant.py and test_recurrent_step.py then run over what it made. Arm code runs in an emulator.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from blocks import matrix, widths
from nanokv.attention import Causal, Decode, causal_mask
from nanokv.cache import make_cache
from nanokv.cache.packed import Packed
from nanokv.cache.paged_batch import PagedBatch
from nanokv.cache.paged_pack import pack
from nanokv.fast import building, native, optimize, weights
from nanokv.fast.blocks import SIZES, dequantized
from nanokv.inference import prefill
from nanokv.recurrent import gated_delta_steps
from nanokv.rope import apply_rope
from small_model import needs_kernels, small

pytestmark = [pytest.mark.slow, needs_kernels]

KERNEL_TESTS = (
    "products_with or flash or decode_attention or equal_on_every or chunks or ragged or gates or nan "
    "or invariant or delta_step"
)


def macros() -> str:
    """What the compiler knows of this processor."""
    command = [building.find_compiler()[0], "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("flags", "needs", "expected"),
    [
        ("-mno-avx", "__AVX__", "portable"),
        ("-mno-avx512f", "__AVX2__", "AVX2"),
        pytest.param("-mno-avx512bf16", "__AVX512F__", "AVX-512", marks=pytest.mark.night),
        # Where there are no tiles, test_fast.py itself runs on this.
        pytest.param("-mno-amx-bf16", "__AMX_BF16__", "AVX-512 bf16", marks=pytest.mark.night),
        pytest.param(
            "-mamx-tile -mamx-bf16",
            "__AVX512BF16__",
            "AVX-512 bf16, tiles( refused by the system)?",
            marks=pytest.mark.night,
        ),
        ("-DNANOKV_TILES=emulated", "__AVX512BF16__", "AVX-512 bf16, emulated tiles"),
    ],
)
def test_kernels_compiled_for_another_processor(tmp_path, flags, needs, expected):
    if needs not in macros():
        pytest.skip(f"this processor and compiler have no {needs}")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-k",
            f"({KERNEL_TESTS}) and not torch",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("test_fast.py")),
            str(Path(__file__).with_name("test_blocks.py")),
            str(Path(__file__).with_name("test_invariant.py")),
            str(Path(__file__).with_name("test_recurrent_step.py")),
        ],
        env=os.environ
        | {"CXX": f"{building.find_compiler()[0]} {flags}", "NANOKV_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("does not multiply bf16" in line for line in skipped) and ("bf16" in expected) == (
        not skipped
    )
    (library,) = tmp_path.glob("nanokv/kernels-*.so")
    kernels = ctypes.CDLL(str(library))
    kernels.instructions.restype = ctypes.c_char_p
    assert re.fullmatch(expected, kernels.instructions().decode())
    assert native.multiplies_bf16(kernels) is (expected not in ("AVX2", "AVX-512"))


# --- recorded inputs, for a program without Python --------------------------------------------------------------------


class Cases:
    """The file that kernels_driver.cpp reads."""

    def __init__(self, path):
        self.path, self.count, self.generator = path, 0, torch.Generator().manual_seed(0)
        path.write_bytes(b"")

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def whole(self, *shape, most=9):
        return torch.randint(-most, most + 1, shape, generator=self.generator).float()

    def add(self, name, sizes, bound, expected, *inputs):
        """`bound`: largest difference, as a part of the largest value."""
        form = [native.FORMATS[expected.dtype]]
        parts = [
            name.encode(),
            torch.tensor(sizes),
            torch.tensor([bound]),
            expected,
            torch.tensor(form),
            *inputs,
        ]
        with self.path.open("ab") as file:
            for part in parts:
                data = part if isinstance(part, bytes) else raw(part)
                file.write(len(data).to_bytes(8, "little") + data)
        self.count += 1


def raw(tensor) -> bytes:
    return (
        b"" if tensor is None else tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    )


def parts(matrix):
    form = native.FORMATS[matrix.format]
    return torch.tensor([matrix.N, matrix.K, form]), matrix.weight, matrix.scale, matrix.bias


def record(path) -> int:
    """How many cases there are. Whole numbers up to 127 are their own codes in 8 bits, so products are exact."""
    cases = Cases(path)
    for name, dtype in (
        (None, torch.float32),
        (None, torch.bfloat16),
        ("int8", None),
        ("int4", None),
    ):
        for rows, N, K in ((1, 37, 96), (5, 48, 288), (20, 70, 64)):
            make = weights.Dense if name is None else weights.FORMATS[name]
            matrix = make(cases.whole(N, K).to(dtype or torch.float32), cases.whole(N))
            x = cases.whole(rows, K, most=127)
            x[:, ::32] = 127
            expected = (x.double() @ matrix.dense().double().T + matrix.bias).float()
            # of more than 8 rows codes become bf16, where the processor multiplies it
            cases.add(
                "linear", [rows], 5e-3 if name and rows > 8 else 2e-6, expected, *parts(matrix), x
            )
    for type_ in SIZES:
        record_blocks(cases, type_)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        record_step(cases, dtype, bound)
        record_chunks(cases, dtype, bound)
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 0.008)):
        record_rows(cases, dtype, bound)
    for heads, Dk, Dv in ((6, 32, 48), (3, 10, 21)):
        record_delta(cases, heads, Dk, Dv)
    cases.add("exp16", [100_000], 3e-7, torch.ones(100_000), torch.linspace(-86.9, 88.3, 100_000))
    for B, H, Hk, T, S, D in ((1, 4, 2, 70, 70, 64), (2, 2, 1, 33, 100, 48)):
        q, k, v = (cases.random(B, *shape, D).bfloat16() for shape in ((H, T), (Hk, S), (Hk, S)))
        y = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), attn_mask=causal_mask(T, S), enable_gqa=True
        )
        cases.add(
            "flash_attention", [B, H, Hk, T, S, D], 0.01, y.transpose(1, 2).bfloat16(), q, k, v
        )
    return cases.count


def record_blocks(cases, type_):
    """As for int8 and int4. The address sanitizer sees a byte that is read behind the last block."""
    for rows, K in ((1, widths(type_)[-1]), (5, widths(type_)[0]), (20, widths(type_)[-1])):
        found = matrix(type_, 37, K, bias=cases.whole(37))
        x = cases.whole(rows, K, most=127)
        x[:, ::32] = 127
        numbers = dequantized(found.weight, type_).double()
        expected = (x.double() @ numbers.T + found.bias).float()
        cases.add("linear", [rows], 5e-3 if rows > 8 else 2e-6, expected, *parts(found), x)


def record_step(cases, dtype, bound):
    """One layer over pages that three rows of 5, 17 and 33 tokens share, and what torch's operators make of it."""
    model, ids = small(dtype)
    fast = optimize(model)

    def batch():
        pool = make_cache("paged", model.config, page=4).pool
        rows = [make_cache("paged", model.config, pool=pool) for _ in range(3)]
        for row, n in zip(rows, (5, 17, 33), strict=True):
            prefill(model, ids[:, :n], row)
        return PagedBatch(rows, model.config)

    block, one, other = fast.layers[0], batch(), batch()
    D, x = block.heads[2], cases.random(3, 1, 64)
    angles = cases.random(3, 1, D // 2).repeat(1, 1, 2)
    rope = angles.cos(), angles.sin()
    expected = block.torch_path(x, [angle[:, None] for angle in rope], one[0], Decode(one.mask(1)))
    pages = other[0].pages(block.like.expand(3, -1, -1, -1))
    add_step(cases, block, bound, expected, rope, pages, x)


def record_chunks(cases, dtype, bound):
    """As record_step, for chunks of 1, 2 and 17 tokens: the last one has several queries per key."""
    model, ids = small(dtype)
    fast, counts = optimize(model), [1, 2, 17]

    def chunks():
        pool = make_cache("paged", model.config, page=4).pool
        caches = [make_cache("paged", model.config, pool=pool) for _ in counts]
        for cache, n in zip(caches, (5, 17, 33), strict=True):
            prefill(model, ids[:, :n], cache)
        return pack(caches, counts, model.config)

    block, one, other = fast.layers[0], chunks(), chunks()
    D, x = block.heads[2], cases.random(20, 1, 64)
    angles = cases.random(20, 1, D // 2).repeat(1, 1, 2)
    rope = angles.cos(), angles.sin()
    attend = Packed((n, Causal()) for n in counts)
    expected = block.torch_path(x, [angle[:, None] for angle in rope], one[0], attend)
    pages = other.pages(block.like.expand(20, -1, -1, -1))[0]
    add_step(cases, block, bound, expected, rope, pages, x)


def add_step(cases, block, bound, expected, rope, pages, x):
    """What one layer makes of x (B,1,C) over these pages."""
    (H, Hk, D), form = block.heads, native.FORMATS[block.dtype]
    sizes = [len(x), H, Hk, D, form, Hk * 4 * D, 4 * D, 4, pages.table.shape[1]]
    matrices = [
        part for matrix in (block.qkv, block.o, block.gate_up, block.down) for part in parts(matrix)
    ]
    cases.add(
        "steps",
        sizes,
        bound,
        expected,
        *matrices,
        block.norm,
        block.q_norm,
        block.k_norm,
        block.mlp_norm,
        *rope,
        pages.keys,
        pages.values,
        pages.table,
        pages.lengths,
        pages.sequence,
        x,
    )


def record_rows(cases, dtype, bound):
    """What stands between the products of a prefill; 40 and 100 are no multiples of 16."""
    form, x, weight = native.FORMATS[dtype], cases.random(5, 100), cases.random(100)
    cases.add(
        "norm_rows", [5, 100, form], bound, F.rms_norm(x, (100,), weight, 1e-6).to(dtype), x, weight
    )
    both = cases.random(5, 200).to(dtype)
    gate, up = both.float().chunk(2, 1)
    cases.add("gate_rows", [5, 100, form], bound, (F.silu(gate) * up).to(dtype), both)
    B, T, H, Hk, D = 2, 5, 4, 2, 40
    qkv, norms, angles = (
        cases.random(B, T, H + 2 * Hk, D).to(dtype),
        cases.random(2, D),
        cases.random(T, D // 2),
    )
    angles = angles.repeat(1, 2)
    rope = angles.cos(), angles.sin()
    q, k, v = qkv.float().transpose(1, 2).split((H, Hk, Hk), 1)
    q, k = (
        apply_rope(F.rms_norm(x, (D,), norm, 1e-6), rope)
        for x, norm in ((q, norms[0]), (k, norms[1]))
    )
    expected = torch.cat([part.flatten() for part in (q, k, v)])
    cases.add(
        "split_rows", [B, T, H, Hk, D, form, form], bound, expected.to(dtype), qkv, *norms, *rope
    )
    if dtype == torch.float32:  # after a product of the kernels
        to = native.FORMATS[torch.bfloat16]
        cases.add(
            "split_rows", [B, T, H, Hk, D, form, to], 0.008, expected.bfloat16(), qkv, *norms, *rope
        )


def record_delta(cases, heads, Dk, Dv):
    """One token through recurrent heads: y, then the new state."""
    q, k = cases.random(2, 1, heads, 1, Dk) * Dk**-0.5
    v, S = cases.random(1, heads, 1, Dv), cases.random(1, heads, Dk, Dv)
    g, beta = -cases.random(1, heads, 1).abs(), cases.random(1, heads, 1).sigmoid()
    y, new = gated_delta_steps(q, k, v, g, beta, S)
    expected = torch.cat((y.flatten(), new.flatten()))
    cases.add("gated_delta_step", [heads, Dk, Dv], 1e-6, expected, q, k, v, g, beta, S)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(file, how many cases it has)."""
    path = tmp_path_factory.mktemp("recorded") / "cases"
    return path, record(path)


SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.mark.parametrize(
    ("compiler", "flags", "runner", "expected"),
    [
        (
            "g++",
            [*SANITIZED, "-march=native", "-DNANOKV_TILES=emulated"],
            [],
            "AVX-512 bf16, emulated tiles|(?!.*bf16).*",
        ),
        pytest.param(
            "g++",
            [*SANITIZED, "-march=native", "-mno-amx-bf16"],
            [],
            "AVX-512 bf16|(?!.*bf16).*",
            marks=pytest.mark.night,
        ),
        ("g++", [*SANITIZED, "-march=native", "-mno-avx512f"], [], "AVX2"),
        ("aarch64-linux-gnu-g++", ["-O3", "-static"], ["qemu-aarch64"], "portable"),
    ],
)
def test_kernels_over_recorded_inputs(tmp_path, recorded, compiler, flags, runner, expected):
    """Within stated bounds of torch, on Arm too; and here no byte beyond an array is read."""
    for name in (compiler, *runner):
        if not shutil.which(name):
            pytest.skip(f"{name} is not installed: apt install g++-aarch64-linux-gnu qemu-user")
    program, (cases, count) = tmp_path / "driver", recorded
    source = str(Path(__file__).parents[1] / "support" / "kernels_driver.cpp")
    subprocess.run(
        [
            compiler,
            *flags,
            *building.MATH,
            "-std=c++17",
            f"-I{building.FOLDER}",
            source,
            "-o",
            program,
        ],
        check=True,
    )
    done = subprocess.run([*runner, program, cases], capture_output=True, text=True, check=False)
    first, *lines = done.stdout.splitlines()
    assert done.returncode == 0 and re.fullmatch(expected, first), done.stdout + done.stderr
    assert len(lines) == count and not [line for line in lines if "BAD" in line], done.stdout
    absent = sum("absent" in line for line in lines)
    assert absent == (0 if "bf16" in first else 2)
