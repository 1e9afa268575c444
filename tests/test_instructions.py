"""The kernels for processors that are not this one: with fewer instructions, with matrix tiles, on Arm.

The compiler is told to leave instructions out, or to call functions in the place of tiles; test_fast.py then runs over
what it made. Arm code runs in an emulator.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanokv.fast import native
from small_model import needs_kernels

pytestmark = [pytest.mark.slow, needs_kernels]

KERNEL_TESTS = "products_with or flash or decode_attention or equal_on_every or chunks or ragged or gates or nan"


def macros() -> str:
    """What the compiler knows of this processor."""
    command = [native.find_compiler()[0], "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("flags", "needs", "expected"), [
    ("-mno-avx", "__AVX__", "portable"),
    ("-mno-avx512f", "__AVX2__", "AVX2"),
    ("-mno-avx512bf16", "__AVX512F__", "AVX-512"),
    ("-mno-amx-bf16", "__AMX_BF16__", "AVX-512 bf16"),  # where there are no tiles, test_fast.py itself runs on this
    ("-mamx-tile -mamx-bf16", "__AVX512BF16__", "AVX-512 bf16, tiles( refused by the system)?"),
    ("-DNANOKV_TILES=emulated", "__AVX512BF16__", "AVX-512 bf16, emulated tiles"),
])  # fmt: skip
def test_kernels_compiled_for_another_processor(tmp_path, flags, needs, expected):
    if needs not in macros():
        pytest.skip(f"this processor and compiler have no {needs}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-k", f"({KERNEL_TESTS}) and not torch", "-p", "no:cacheprovider",
         str(Path(__file__).with_name("test_fast.py"))],
        env=os.environ | {"CXX": f"{native.find_compiler()[0]} {flags}", "NANOKV_CACHE": str(tmp_path)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("does not multiply bf16" in line for line in skipped) and ("bf16" in expected) == (not skipped)
    library, = tmp_path.glob("nanokv/kernels-*.so")
    instructions = ctypes.CDLL(str(library)).instructions
    instructions.restype = ctypes.c_char_p
    assert re.fullmatch(expected, instructions().decode())
