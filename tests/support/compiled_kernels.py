"""The kernels compiled for a GPU on a machine without one: registers, spills, shared memory, how
wide the loads are.

`python compiled_kernels.py 90` starts every launcher on tensors of Qwen3-0.6B's shapes, which have
no memory, and takes what it would launch: so the compiler gets exactly the constants, warps and
hints of a real run. Prints JSON lines.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

FILES = ("kernels", "attention", "products", "draw")
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
WIDE = [["tt.divisibility", 16]]


class Compiled:
    """Stands for a kernel in its file: a launch compiles it and writes down what came out."""

    def __init__(self, kernel: JITFunction, target: GPUTarget, results: list):
        self.kernel, self.target, self.results = kernel, target, results

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launch(grid, arguments, options)

    def launch(self, grid, arguments, options):
        names = self.kernel.arg_names
        named = {name: options.pop(name) for name in names if name in options}
        named = dict(zip(names, arguments, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value, fixed = named[parameter.name], parameter.do_not_specialize
            one = type(value) is int and value == 1 and not fixed
            if parameter.is_constexpr or value is None or one:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], attributes[i,] = TYPES[value.dtype], WIDE
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if type(value) is int and value % 16 == 0 and not fixed:
                    attributes[i,] = WIDE
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=self.target, options=options)
        self.results.append(
            {"kernel": self.kernel.__name__, "grid": grid, **figures(compiled), **options}
        )


def figures(compiled) -> dict:
    """Registers per thread, bytes of spilled ones, shared memory, and loads by their bytes."""
    # cuobjdump reads a file.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run(
            [tool, "-res-usage", path], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))
    loads: dict[int, int] = {}
    ptx = compiled.asm["ptx"]
    for count, bits in re.findall(r"ld\.global\.(?:[\w:]+\.)*?(?:v(\d)\.)?[bfus](\d+)", ptx):
        width = int(count or 1) * int(bits) // 8
        loads[width] = loads.get(width, 0) + 1
    for width in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+|\d+)", ptx):
        loads[int(width, 0)] = loads.get(int(width, 0), 0) + 1
    return {
        "registers": registers, "spilled": stack,
        "shared": compiled.metadata.shared, "loads": loads,
    }  # fmt: skip


def compile_all(arch: int) -> list[dict]:
    """Every launcher of FILES at the shapes of a decode step of Qwen3-0.6B, and a prefill of 512
    tokens.
    """
    results: list[dict] = []
    modules = {}
    for file in FILES:
        try:
            modules[file] = import_module(f"nanokv.fast.gpu.{file}")
        except ModuleNotFoundError:
            print("no", file, file=sys.stderr)
    jitted = {
        (module, name): value
        for module in modules.values()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    for (module, name), kernel in jitted.items():
        setattr(module, name, Compiled(kernel, GPUTarget("cuda", arch, 32), results))
    for dtype in (torch.bfloat16, torch.float32):
        start = len(results)
        launch_all(modules, dtype)
        for result in results[start:]:
            result["dtype"] = str(dtype).removeprefix("torch.")
    return results


def launch_all(modules, dtype):
    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    C, width, V, layers = 1024, 3072, 151_936, 28
    heads = H, Hk, D = 16, 8, 128
    kernels = modules["kernels"]
    B, T = 4, 512
    kernels.rms_norm(new(B, C), new(C), 1e-6, new(B, C))
    kernels.swiglu(new(B, 2 * width))
    norms = new(D), new(D), 1e-6
    kernels.split_heads(new(T, (H + 2 * Hk) * D), heads, *norms, new(T, D), new(T, D), T)
    places, lengths = new(layers, 8, dtype=torch.int64), new(layers, B, dtype=torch.int32)
    qkv, angles = new(B, (H + 2 * Hk) * D), new(B, D)
    kernels.split_heads_into_pages(qkv, heads, *norms, angles, angles, places, 5, lengths)
    if "attention" in modules:
        attention = modules["attention"]
        for splits in (1, 16):
            attention.paged_attention(new(B, H, D), places, 5, lengths, splits, Hk)
    if "products" in modules:
        product = modules["products"].product
        for rows in (1, 8):
            x, norm = new(rows, C), (new(C), 1e-6)
            product(x, new((H + 2 * Hk) * D, C), new((H + 2 * Hk) * D), norm=norm)
            product(new(rows, H * D), new(C, H * D), add=x)
            product(x, new(2 * width, C), norm=norm, swiglu=True)
            product(new(rows, width), new(C, width), add=x)
            product(x, new(V, C), norm=norm)
        product(new(1, 4096), new(4096, 4096))  # of a model of 8B
        product(new(1, 12288), new(4096, 12288))
    if "draw" in modules:
        rows = (new(B, dtype=torch.float32), *(new(B, dtype=torch.int64) for _ in range(2)))
        modules["draw"].draw(new(B, V), *rows)
        modules["draw"].draw(new(B, V), *rows, new(B, V, dtype=torch.float32))


if __name__ == "__main__":
    for line in compile_all(int(sys.argv[1])):
        print(json.dumps(line))
