"""Decoding on a GPU, measured and checked in one run: python -m nanokv.bench.gpu --out gpu

    parity      the recorded CUDA graph gives what the plain model gives, also for a second cache and after a truncate
    attention   which of torch's attention kernels runs for each of our calls, and its distance from the exact one
    decode      Qwen3-0.6B shapes in bf16, random weights: ours with CUDA graphs and without, transformers' dynamic and
                static cache; batch 1 … 64, context up to 32k; beside the memory bandwidth measured in the same run
    offload     a cache in host memory: equal bit by bit, and how much of the transfer hides behind the arithmetic

Writes gpu.json and gpu.md. Leaves with 1 if a check failed, with 2 where torch sees no GPU. `--dry-run` runs the same
code on a CPU with a tiny model, to show that it runs: its times mean nothing.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from nanokv import costs
from nanokv.attention import causal_attention, causal_mask, decode_attention, prefill_attention
from nanokv.bench.machine import Bandwidth, gemm_peak, now, timed
from nanokv.bench.runners import Ours, Transformers
from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.costs.memory import FAMILY
from nanokv.errors import NanoKVError
from nanokv.fast.compiled import Compiled
from nanokv.inference import decode, prefill, prefill_chunk, prefill_chunks
from nanokv.loading import random_model

TINY = Config(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
)  # fmt: skip
WARM_UP = 3  # steps before the clock runs: the first compiles and records
ALIGNED = 64  # slots of a slab come in multiples of this
SPARE = 6 << 30  # bytes of the GPU that are left for activations and the allocator
EXACT, ROUNDED = 1e-4, 2e-2  # largest gap that passes, fp32 and bf16, of the largest value


@dataclass(frozen=True)
class Plan:
    """What is run."""

    config: Config
    device: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int  # decode steps a round
    rounds: int
    backend: str = "inductor"

    @property
    def room(self) -> int:
        """Tokens that follow the prompt."""
        return WARM_UP + self.steps * self.rounds


FULL = Plan(FAMILY["Qwen/Qwen3-0.6B"], "cuda", (1, 4, 16, 64), (128, 1024, 8192, 32_768), steps=32, rounds=5)
SMALL = Plan(TINY, "cpu", (2,), (24,), steps=2, rounds=2, backend="eager")


def main(argv=None) -> int:
    """Run all four parts, write both files, print the tables."""
    parser = argparse.ArgumentParser(prog="python -m nanokv.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="gpu", metavar="NAME", help="NAME.json and NAME.md (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="the same code, tiny, on a CPU: no figures")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print("nanokv.bench.gpu: torch sees no GPU here (--dry-run runs the code on a CPU)", file=sys.stderr)
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
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "dry_run": plan.device == "cpu"}
    report |= {"machine": machine(plan.device), "versions": versions(), "parity": parity(plan)}
    report["attention"] = attention_kernels(plan.config, dtype, plan.device)
    bandwidth = Bandwidth(plan.device)
    report["gemm_flops"], report["rows"] = gemm_peak(dtype, plan.device), decode_rows(model, plan, bandwidth)
    report["bandwidth"] = bandwidth.best()
    for row in report["rows"]:
        if "decode_s" in row:
            row["share"] = row["step_bytes"] / bandwidth.best(row["step_bytes"]) / row["decode_s"]
    report["offload"] = offload(model, plan)
    return report | {"faults": faults(report)}


# --- what it runs on ------------------------------------------------------------------------------------------------


def machine(device: str) -> dict:
    """The names that a figure is worth nothing without."""
    facts = {"system": platform.platform(), "processor": platform.machine()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts |= {"gpu": gpu.name, "gpu_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
    return facts


def versions() -> dict:
    """Of everything that is compared."""
    own = {"python": platform.python_version(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return own | {name: metadata.version(name) for name in ("nanokv", "torch", "transformers")}


def random_ids(config: Config, batch: int, tokens: int, device: str):
    """(B,T) int64, the same on every device."""
    ids = torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    return ids.to(device)


def gap(a, b) -> float:
    """Largest difference, of the largest value; nan if there is one."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


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
            worst = max(worst, gap(path(compiled, part, mine, mine.length), path(model, part, plain, plain.length)))
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
        q, k, v = (torch.randn(1, heads, n, D, dtype=dtype, device=device)
                   for heads, n in ((H, queries), (Hk, keys), (Hk, keys)))  # fmt: skip
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


class Nano(Ours):
    """Ours; `backend` given: compiled, and on a GPU a step is one replay of a CUDA graph. The plain model prefills."""

    def __init__(self, model, cache: str, batch: int, backend: str | None = None):
        dtype = model.embed_tokens.weight.dtype
        super().__init__(model, "compiled" if backend else "plain", cache, {}, batch, dtype)
        self.plain, self.backend = model, backend

    def start(self, ids, room: int):
        capacity = -(-(ids.shape[1] + room) // ALIGNED) * ALIGNED
        if self.backend:
            self.model = Compiled(self.plain, capacity, self.batch, backend=self.backend)
        self.store = make_cache(self.cache, self.plain.config, self.batch, capacity)
        logits = prefill_chunks(self.plain, ids, self.store, chunk=part_of(self.plain, self.batch))
        self.token = logits.argmax(-1, keepdim=True)  # (B,1)


class Peer(Transformers):
    """transformers, with a prefill in parts; `backend` given: decode compiled as its documentation advises."""

    def __init__(self, model, cache: str, batch: int, backend: str | None = None):
        super().__init__(model, cache, batch)
        self.part, self.compiled = part_of(model, batch), None
        if backend:
            self.weights += " compiled"
            how = {"mode": "reduce-overhead"} if backend == "inductor" else {"backend": backend}
            self.compiled = torch.compile(self.model.forward, fullgraph=True, isolate_recompiles=True, **how)

    def forward(self, ids):
        if self.compiled is None or ids.shape[1] > 1:
            for part in ids.split(self.part, dim=1):
                super().forward(part)
            return
        torch.compiler.cudagraph_mark_step_begin()
        logits = self.compiled(ids, past_key_values=self.store, use_cache=True, logits_to_keep=1).logits  # (B,1,V)
        self.token = logits[:, -1].argmax(-1, keepdim=True)


def part_of(model, batch: int) -> int:
    """Tokens per row in one forward of a prefill: what is in flight stays the same for every batch."""
    return max(1, prefill_chunk(model) // batch)


def decode_rows(model, plan: Plan, bandwidth: Bandwidth) -> list[dict]:
    """One runner at a time, so that each has the whole memory; every row says what came of it."""
    kinds = (  # (whose, cache, backend of torch.compile)
        (Nano, "static", plan.backend), (Nano, "static", None), (Nano, "dict", None),
        (Peer, "static", plan.backend), (Peer, "static", None), (Peer, "dynamic", None),
    )  # fmt: skip
    rows = []
    for batch in plan.batches:
        for context in plan.contexts:
            for kind, cache, backend in kinds:
                bandwidth.probe()
                rows.append(decode_row(kind(model, cache, batch, backend), context, plan, bandwidth))
                gc.collect()  # the runner and its cache are gone
                if plan.device == "cuda":
                    torch.cuda.empty_cache()
    return rows


def decode_row(runner, context: int, plan: Plan, bandwidth: Bandwidth) -> dict:
    """Seconds per step, median of the rounds, or why there are none. The context grows by a token per step."""
    row = {"runner": f"{runner.engine} {runner.weights} {runner.cache}", "batch": runner.batch, "context": context}
    wanted = costs.kv_bytes(plan.config, context + plan.room, runner.batch, 2) * 5 // 4 + SPARE
    if plan.device == "cuda" and wanted > torch.cuda.mem_get_info()[0]:
        return row | {"failed": f"the cache and its working memory need {wanted / 1e9:,.0f} GB"}
    try:
        began = now(plan.device)
        runner.start(random_ids(plan.config, runner.batch, context, plan.device), plan.room)
        prefill_s, times = now(plan.device) - began, []
        steps(runner, WARM_UP, plan.device)
        for _ in range(plan.rounds):
            times.append(steps(runner, plan.steps, plan.device) / plan.steps)
    except (RuntimeError, NanoKVError) as error:  # out of memory, a compiler that gives up: a row of its own
        return row | {"failed": (str(error).splitlines() or [type(error).__name__])[0][:200]}
    seconds, read = statistics.median(times), runner.step_bytes(context + plan.room // 2)
    bandwidth.probe(read)
    return row | {
        "prefill_s": prefill_s, "decode_s": seconds, "spread": (max(times) - min(times)) / seconds,
        "tok_s": runner.batch / seconds, "step_bytes": read,
    }  # fmt: skip


def steps(runner, count: int, device: str) -> float:
    """Seconds of so many decode steps."""
    began = now(device)
    for _ in range(count):
        runner.step()
    return now(device) - began


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
        rows.append({
            "context": context, "equal": torch.equal(*logits), "near_s": seconds[0], "far_s": seconds[1],
            "moved_bytes": moved, "transfer_s": moved / pinned, "pinned_rate": pinned, "pageable_rate": pageable,
        })  # fmt: skip
    return rows


def transfer_rate(device: str, pin: bool, size: int = 1 << 28) -> float:
    """Bytes per second from host memory to the device, median of 5."""
    source = torch.ones(size, dtype=torch.uint8, pin_memory=pin)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / statistics.median(timed(lambda: target.copy_(source, non_blocking=True), 5, device))


# --- the report -----------------------------------------------------------------------------------------------------


def faults(report: dict) -> list[str]:
    """What must not be: a wrong answer, attention without a fused kernel, a second compile, an offload that differs."""
    parity, found = report["parity"], []
    if not parity["gap"] <= EXACT:
        found.append(f"compiled decode is off by {parity['gap']:.1e} of the largest logit")
    if len(parity["compiles"]) != len(set(parity["compiles"])):
        found.append(f"a width was compiled twice: {parity['compiles']}")
    for row in report["attention"]:
        if not row["gap"] <= ROUNDED:
            found.append(f"attention, {row['call']}: off by {row['gap']:.1e}")
        if row["kernel"] in ("attention_math", "none seen"):
            found.append(f"attention, {row['call']}: no fused kernel ({row['kernel']})")
    found += [f"offload differs at context {row['context']:,}" for row in report["offload"] if not row["equal"]]
    found += [f"{row['runner']}, batch {row['batch']}, context {row['context']:,}: {row['failed']}"
              for row in report["rows"] if "failed" in row and row["runner"].startswith("nanokv compiled")
              and "need" not in row["failed"]]  # fmt: skip
    return found


def markdown(report: dict) -> str:
    """The report for people."""
    names = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    where = ", ".join(str(value) for value in report["machine"].values())
    lines = ["# Dry run on a CPU: no figures" if report["dry_run"] else "# Decoding on a GPU", ""]
    lines += [f"{report['date']} · {where} · {names}", ""]
    rate, flops = report["bandwidth"] / 1e9, report["gemm_flops"] / 1e12
    lines += [f"Read bandwidth {rate:,.0f} GB/s, bf16 products {flops:,.1f} TFLOP/s, measured in this run. "
              f"Compiled against plain, fp32: {report['parity']['gap']:.1e}.", ""]  # fmt: skip
    lines += ["Faults: " + ("; ".join(report["faults"]) or "none"), ""]
    rows = [
        (row["runner"], row["batch"], f"{row['context']:,}", *(
            (row["failed"], "", "", "") if "failed" in row else
            (f"{row['decode_s'] * 1e3:.2f}", f"{row['tok_s']:,.0f}", f"{row['share']:.0%}", f"{row['spread'] / 2:.0%}")
        )) for row in report["rows"]
    ]  # fmt: skip
    lines += table(("runner", "batch", "context", "ms per step", "tok/s", "of the limit", "±"), rows)
    rows = [(row["call"], row["kernel"], f"{row['gap']:.1e}") for row in report["attention"]]
    lines += table(("attention", "kernel", "gap"), rows)
    rows = [(f"{row['context']:,}", row["equal"], f"{row['near_s'] * 1e3:.2f}", f"{row['far_s'] * 1e3:.2f}",
             f"{row['transfer_s'] * 1e3:.2f}", f"{row['pinned_rate'] / 1e9:.1f} / {row['pageable_rate'] / 1e9:.1f}")
            for row in report["offload"]]  # fmt: skip
    head = ("context", "offload equal", "ms near", "ms in host memory", "ms of transfer", "GB/s pinned / pageable")
    return "\n".join(lines + table(head, rows))


def table(head, rows) -> list[str]:
    """Markdown rows and an empty line."""
    cells = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells), ""]


if __name__ == "__main__":
    sys.exit(main())
