"""Decoding on a GPU, measured and checked in one run: python -m nanokv.lab.bench.gpu --out gpu

    parity      the recorded CUDA graph gives what the plain model gives, also for a second cache and after a truncate
    attention   which of torch's attention kernels runs for each of our calls, and its distance from the exact one
    decode      Qwen3-0.6B shapes in bf16, random weights: ours with CUDA graphs and without, transformers' dynamic and
                static cache; batch 1 … 64, context up to 32k; beside the memory bandwidth measured in the same run
    offload     a cache in host memory: equal bit by bit, and how much of the transfer hides behind the arithmetic
    ranks       tensor parallel on the GPUs of this machine (gpu_ranks.py): logits of one process, bytes of all_reduce

Writes gpu.json and gpu.md. Leaves with 1 if a check failed, with 2 where torch sees no GPU. `--dry-run` runs the same
code on a CPU with a tiny model, to show that it runs: its times mean nothing.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from nanokv import costs
from nanokv.attention import causal_attention, causal_mask, decode_attention, prefill_attention
from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.fast import torch_ops
from nanokv.fast.compiled import Compiled
from nanokv.inference import decode, prefill, prefill_chunk, prefill_chunks
from nanokv.lab.bench import gpu_ranks
from nanokv.lab.bench.gpu_steps import (
    FULL,
    SMALL,
    TINY,
    Nano,
    Plan,
    add_share,
    decode_row,
    gap,
    part_of,
    random_ids,
)
from nanokv.lab.bench.machine import Bandwidth, gemm_peak, now, timed
from nanokv.lab.bench.runners import Transformers
from nanokv.loading import random_model

EXACT, ROUNDED = 1e-4, 2e-2  # largest gap that passes, fp32 and bf16, of the largest value


def main(argv=None) -> int:
    """Run all parts, write both files, print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m nanokv.lab.bench.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", default="gpu", metavar="NAME", help="NAME.json and NAME.md (default: %(default)s)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="the same code, tiny, on a CPU: no figures"
    )
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print(
            "nanokv.lab.bench.gpu: torch sees no GPU here (--dry-run runs the code on a CPU)",
            file=sys.stderr,
        )
        return 2
    report = measure(SMALL if args.dry_run else FULL)
    Path(f"{args.out}.json").write_text(json.dumps(report, indent=1) + "\n")
    Path(f"{args.out}.md").write_text(markdown(report))
    print(markdown(report))
    return 1 if report["faults"] else 0


def measure(plan: Plan) -> dict:
    """The whole report as one object of plain values."""
    dtype = torch.bfloat16
    model = random_model(plan.config, dtype, plan.device)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry_run": plan.device == "cpu",
    }
    report |= {"machine": machine(plan.device), "versions": versions(), "parity": parity(plan)}
    report["attention"] = attention_kernels(plan.config, dtype, plan.device)
    bandwidth = Bandwidth(plan.device)
    report["gemm_flops"], report["rows"] = (
        gemm_peak(dtype, plan.device),
        decode_rows(model, plan, bandwidth),
    )
    report["bandwidth"] = bandwidth.best()
    for row in report["rows"]:
        add_share(row, bandwidth)
    report["offload"] = offload(model, plan)
    report["ranks"], report["no_ranks"] = gpu_ranks.tensor_parallel(model, plan, bandwidth)
    return report | {"faults": faults(report)}


# --- what it runs on ------------------------------------------------------------------------------------------------


def machine(device: str) -> dict:
    """The names that a figure is worth nothing without."""
    facts = {"system": platform.platform(), "processor": platform.machine()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": gpu.name,
            "gpu_bytes": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
        }
    return facts


def versions() -> dict:
    """Of everything that is compared."""
    own = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    return own | {name: metadata.version(name) for name in ("nanokv", "torch", "transformers")}


# --- parity ---------------------------------------------------------------------------------------------------------


def parity(plan: Plan) -> dict:
    """Compiled and recorded against the plain model, fp32: two caches in turn, and one of them cut back."""
    model = random_model(TINY, torch.float32, plan.device)
    compiled = Compiled(model, capacity=64, buckets=(16,), backend=plan.backend)
    pairs = [(compiled.make_cache(), make_cache("dict", TINY)) for _ in range(2)]
    ids, worst = random_ids(TINY, 1, 40, plan.device), 0.0
    for turn in range(8):
        for i, (mine, plain) in enumerate(pairs):
            T = 5 + 6 * i if turn == 0 else 1
            part, path = ids[:, turn + i : turn + i + T], prefill if turn == 0 else decode
            worst = max(
                worst,
                gap(
                    path(compiled, part, mine, mine.length), path(model, part, plain, plain.length)
                ),
            )
        if turn == 4:
            for cache in pairs[0]:
                cache.truncate(6)
    return {"gap": worst, "compiles": compiled.compiles}


# --- attention ------------------------------------------------------------------------------------------------------


def attention_kernels(config: Config, dtype, device: str) -> list[dict]:
    """For each way in which attention is called: the kernel that torch chose, and its gap from the plain formula."""
    H, Hk, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    T, S = 64, 256
    slab = torch.arange(S, device=device)[None] < S // 2  # (1,S): half of the slots in use
    calls = {  # name: (function, queries, keys)
        "prefill, empty cache": (causal_attention, T, T),
        "prefill over a cache": (partial(prefill_attention, mask=causal_mask(T, S, device)), T, S),
        "decode": (decode_attention, 1, S),
        "decode over a slab": (partial(decode_attention, mask=slab), 1, S),
    }
    rows = []
    for name, (attend, queries, keys) in calls.items():
        q, k, v = (
            torch.randn(1, heads, n, D, dtype=dtype, device=device)
            for heads, n in ((H, queries), (Hk, keys), (Hk, keys))
        )
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            y = attend(q, k, v)
        with sdpa_kernel(SDPBackend.MATH):
            exact = attend(q.double(), k.double(), v.double())
        rows.append({"call": name, "kernel": chosen(profiler), "gap": gap(y, exact)})
    return rows


def chosen(profiler) -> str:
    """flash_attention, efficient_attention, cudnn_attention, …; attention_math multiplies out all T·S scores."""
    prefix = "aten::_scaled_dot_product_"
    names = (event.key for event in profiler.key_averages() if event.key.startswith(prefix))
    return next((name.removeprefix(prefix) for name in names), "none seen")


# --- decode ---------------------------------------------------------------------------------------------------------


class Peer(Transformers):
    """transformers, with a prefill in parts; `backend` given: decode compiled as its documentation advises."""

    def __init__(self, model, cache: str, batch: int, backend: str | None = None):
        super().__init__(model, cache, batch)
        self.part, self.compiled = part_of(model, batch), None
        if backend:
            self.weights += " compiled"
            how = {"mode": "reduce-overhead"} if backend == "inductor" else {"backend": backend}
            self.compiled = torch_ops.compile_alone(self.model.forward, fullgraph=True, **how)

    def forward(self, ids):
        if self.compiled is None or ids.shape[1] > 1:
            for part in ids.split(self.part, dim=1):
                super().forward(part)
            return
        torch.compiler.cudagraph_mark_step_begin()
        logits = self.compiled(  # (B,1,V)
            ids, past_key_values=self.store, use_cache=True, logits_to_keep=1
        ).logits
        self.token = logits[:, -1].argmax(-1, keepdim=True)


def decode_rows(model, plan: Plan, bandwidth: Bandwidth) -> list[dict]:
    """One runner at a time, so that each has the whole memory; every row says what came of it."""
    kinds = (  # (whose, cache, backend of torch.compile)
        (Nano, "static", plan.backend),
        (Nano, "static", None),
        (Nano, "dict", None),
        (Peer, "static", plan.backend),
        (Peer, "static", None),
        (Peer, "dynamic", None),
    )
    rows = []
    for batch in plan.batches:
        for context in plan.contexts:
            for kind, cache, backend in kinds:
                bandwidth.probe()
                rows.append(
                    decode_row(kind(model, cache, batch, backend), context, plan, bandwidth)
                )
                gc.collect()  # the runner and its cache are gone
                if plan.device == "cuda":
                    torch.cuda.empty_cache()
    return rows


# --- offload --------------------------------------------------------------------------------------------------------


def offload(model, plan: Plan) -> list[dict]:
    """A cache in host memory beside one in place: the same logits, the seconds of a step, the bytes that moved."""
    pinned, pageable = (transfer_rate(plan.device, pin) for pin in (plan.device == "cuda", False))
    rows = []
    for context in plan.contexts[:3]:
        ids, logits, seconds = random_ids(plan.config, 1, context, plan.device), [], []
        for name, options in (("dict", {}), ("offloaded", {"to": "host"})):
            cache, times = make_cache(name, model.config, **options), []
            out = [prefill_chunks(model, ids, cache, chunk=prefill_chunk(model))]
            for _ in range(plan.rounds + 1):
                began = now(plan.device)
                out.append(decode(model, ids[:, :1], cache, cache.length))
                times.append(now(plan.device) - began)
            logits.append(torch.stack(out))
            seconds.append(statistics.median(times[1:]))
        moved = costs.kv_bytes(plan.config, context, 1, 2)
        rows.append(
            {
                "context": context,
                "equal": torch.equal(*logits),
                "near_s": seconds[0],
                "far_s": seconds[1],
                "moved_bytes": moved,
                "transfer_s": moved / pinned,
                "pinned_rate": pinned,
                "pageable_rate": pageable,
            }
        )
    return rows


def transfer_rate(device: str, pin: bool, size: int = 1 << 28) -> float:
    """Bytes per second from host memory to the device, median of 5."""
    source = torch.ones(size, dtype=torch.uint8, pin_memory=pin)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / statistics.median(
        timed(lambda: target.copy_(source, non_blocking=True), 5, device)
    )


# --- the report -----------------------------------------------------------------------------------------------------


def faults(report: dict) -> list[str]:
    """What must not be: a wrong answer, attention without a fused kernel, a second compile, an offload that differs."""
    parity, found = report["parity"], gpu_ranks.faults(report["ranks"])
    if not parity["gap"] <= EXACT:
        found.append(f"compiled decode is off by {parity['gap']:.1e} of the largest logit")
    if len(parity["compiles"]) != len(set(parity["compiles"])):
        found.append(f"a width was compiled twice: {parity['compiles']}")
    for row in report["attention"]:
        if not row["gap"] <= ROUNDED:
            found.append(f"attention, {row['call']}: off by {row['gap']:.1e}")
        if row["kernel"] in ("attention_math", "none seen"):
            found.append(f"attention, {row['call']}: no fused kernel ({row['kernel']})")
    found += [
        f"offload differs at context {row['context']:,}"
        for row in report["offload"]
        if not row["equal"]
    ]
    found += [
        f"{row['runner']}, batch {row['batch']}, context {row['context']:,}: {row['failed']}"
        for row in report["rows"]
        if "failed" in row
        and row["runner"].startswith("nanokv compiled")
        and "need" not in row["failed"]
    ]
    return found


def markdown(report: dict) -> str:
    """The report for people."""
    names = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    where = ", ".join(str(value) for value in report["machine"].values())
    lines = ["# Dry run on a CPU: no figures" if report["dry_run"] else "# Decoding on a GPU", ""]
    lines += [f"{report['date']} · {where} · {names}", ""]
    rate, flops = report["bandwidth"] / 1e9, report["gemm_flops"] / 1e12
    lines += [
        f"Read bandwidth {rate:,.0f} GB/s, bf16 products {flops:,.1f} TFLOP/s, measured in this run. "
        f"Compiled against plain, fp32: {report['parity']['gap']:.1e}.",
        "",
    ]
    lines += ["Faults: " + ("; ".join(report["faults"]) or "none"), ""]
    rows = [
        (row["runner"], row["batch"], f"{row['context']:,}", *decode_cells(row))
        for row in report["rows"]
    ]
    lines += table(
        ("runner", "batch", "context", "ms per step", "tok/s", "of the limit", "±"), rows
    )
    rows = [(row["call"], row["kernel"], f"{row['gap']:.1e}") for row in report["attention"]]
    lines += table(("attention", "kernel", "gap"), rows)
    rows = [
        (
            f"{row['context']:,}",
            row["equal"],
            f"{row['near_s'] * 1e3:.2f}",
            f"{row['far_s'] * 1e3:.2f}",
            f"{row['transfer_s'] * 1e3:.2f}",
            f"{row['pinned_rate'] / 1e9:.1f} / {row['pageable_rate'] / 1e9:.1f}",
        )
        for row in report["offload"]
    ]
    head = (
        "context",
        "offload equal",
        "ms near",
        "ms in host memory",
        "ms of transfer",
        "GB/s pinned / pageable",
    )
    return "\n".join(lines + table(head, rows) + ranks_table(report))


def decode_cells(row: dict) -> tuple:
    """Milliseconds, tokens per second, share of the limit and half of the spread; or why there are none."""
    if "failed" in row:
        return row["failed"], "", "", ""
    return (
        f"{row['decode_s'] * 1e3:.2f}",
        f"{row['tok_s']:,.0f}",
        f"{row['share']:.0%}",
        f"{row['spread'] / 2:.0%}",
    )


def ranks_table(report: dict) -> list[str]:
    """Tensor parallel: bytes are those that a rank gives to all_reduce in a step."""
    if not report["ranks"]:
        return [f"No tensor parallel: {report['no_ranks']}.", ""]
    rows = [
        (
            row["ranks"],
            row.get("batch", ""),
            f"{row['context']:,}" if "context" in row else "",
            *decode_cells(row),
            f"{row['summed_bytes']:,}" if "summed_bytes" in row else "",
            f"{row['gap']:.1e}" if "gap" in row else "",
        )
        for row in report["ranks"]
    ]
    head = (
        "ranks",
        "batch",
        "context",
        "ms per step",
        "tok/s",
        "of the limit",
        "±",
        "all_reduce bytes",
        "gap",
    )
    return table(head, rows)


def table(head, rows) -> list[str]:
    """Markdown rows and an empty line."""
    cells = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells), ""]


if __name__ == "__main__":
    sys.exit(main())
