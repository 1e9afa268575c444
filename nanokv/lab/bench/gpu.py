"""Check and measure a GPU in one run of four minutes: python -m nanokv.bench.gpu --out gpu

    equality    each cache gives the same logits on the GPU as on the CPU, plain and by optimize()
    attention   which of torch's attention kernels runs for each of our calls, and its error
    decode      Qwen3-0.6B shapes in bf16, random weights: by optimize() and plain, beside
                transformers' dynamic and static cache and the memory bandwidth of the same run
    prefill     the same, prompts of 128, 1,024 and 8,192 tokens
    generate    the bundled model, from the prompt to the last token
    offload     a cache in host memory: bitwise equal logits, and how much of the transfer overlaps
                with computation
    compiled    torch.compile of our model and of transformers'
    engine      many requests at once, beside transformers' continuous batching
    host        Python's time per step: the same code without the GPU's work (gpu_host.py)
    ranks       only with --long: tensor parallelism on the GPUs of this machine (gpu_ranks.py)

Every part has a time limit, after which it is cut off; `--long` measures more rows and allows ten
times as long. gpu.json and gpu.md are rewritten after every row, so a run that is killed keeps
its rows. The exit code is 1 if a check failed and 2 if torch sees no GPU. `--dry-run` runs the
same code on a CPU with a tiny model, to show that it works; its times mean nothing.
"""

import argparse
import functools
import json
import os
import platform
import re
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from nanokv import costs
from nanokv.attention import (
    Attend,
    causal_attention,
    causal_mask,
    decode_attention,
    prefill_attention,
)
from nanokv.cache import CACHES, KVCache, make_cache
from nanokv.cache.paged_batch import PagedBatch
from nanokv.checkpoint import Model
from nanokv.decoding.counter import draw_rows
from nanokv.decoding.draw import drawing
from nanokv.decoding.generation import generate
from nanokv.errors import NanoKVError
from nanokv.fast import optimize
from nanokv.fast.compiled import Compiled
from nanokv.inference import decode, prefill, prefill_chunk, prefill_chunks, verify_draft
from nanokv.lab.bench import gpu_ranks, serving
from nanokv.lab.bench.gpu_steps import (
    FULL,
    QUICK,
    SMALL,
    TINY,
    Nano,
    Peer,
    Plan,
    add_share,
    decode_row,
    gap,
    let_go,
    prefill_row,
    random_ids,
    why,
)
from nanokv.lab.bench.machine import Bandwidth, gemm_peak, now, timed
from nanokv.lab.bench.runners import Ours
from nanokv.loading import load, random_model
from nanokv.model import Transformer

EXACT = 1e-4  # largest gap that passes in fp32, relative to the largest value
ROUNDED = 2e-2  # largest gap that passes in bf16, relative to the largest value
LONGER = 10  # factor of --long on the time limit of each part
QUESTION = "My name is Zorbla. What is my name?"


class OutOfTime(BaseException):
    """The time limit of a part has passed. Derives from BaseException, so that `except Exception`
    in the measured code does not catch it."""


class Bench:
    """The plan, the models and the bandwidth that all parts share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.dtype = torch.bfloat16
        self.bandwidth = Bandwidth(plan.device)

    @functools.cached_property
    def model(self) -> Transformer:
        return random_model(self.plan.config, self.dtype, self.plan.device)

    @functools.cached_property
    def fast(self) -> Transformer:
        """The model by optimize(); NanoKVError if optimize() has no kernels for this machine."""
        return optimize(self.model)


@dataclass(frozen=True)
class Part:
    """A generator of rows, and its time limit in seconds."""

    rows: Callable[[Bench], Iterator[dict]]
    seconds: int
    long: bool = False  # runs only with --long


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanokv.bench.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", default="gpu", metavar="NAME", help="NAME.json and NAME.md (default: %(default)s)"
    )
    parser.add_argument("--long", action="store_true", help="more rows, and ten times as long")
    parser.add_argument(
        "--parts", metavar="NAME,NAME", help=f"only these of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="the same code, tiny, on a CPU: no figures"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run all parts, write both files, print the tables."""
    parser = arguments()
    args = parser.parse_args(argv)
    wanted = list(PARTS)
    if args.parts:
        wanted = args.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--parts {min(unknown)} is not one of {', '.join(PARTS)}")
    if not args.dry_run and not torch.cuda.is_available():
        print(
            "nanokv.bench.gpu: torch sees no GPU here (--dry-run runs the code on a CPU)",
            file=sys.stderr,
        )
        return 2
    plan = plan_of(args)
    parts = {name: part for name, part in PARTS.items() if name in wanted}
    longer = LONGER
    if plan is QUICK:
        parts = {name: part for name, part in parts.items() if not part.long}
        longer = 1
    report = measure(plan, parts, longer, partial(write, args.out))
    print(markdown(report))
    return int(bool(report["faults"]))


def plan_of(args: argparse.Namespace) -> Plan:
    if args.dry_run:
        return SMALL
    if args.long:
        return FULL
    return QUICK


def write(out: str, report: dict) -> None:
    """Replace both files atomically, so that a reader never sees half of one."""
    for name, text in (("json", json.dumps(report, indent=1) + "\n"), ("md", markdown(report))):
        path = Path(f"{out}.{name}")
        path.with_suffix(f".{name}.tmp").write_text(text)
        os.replace(path.with_suffix(f".{name}.tmp"), path)


def measure(plan: Plan, parts: dict[str, Part], longer: int, save: Callable) -> dict:
    """The whole report as JSON values. Calls `save(report)` after every row."""
    report: dict = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dry_run": plan.device == "cpu",
        "machine": machine(plan.device),
        "versions": versions(),
    }
    bench = Bench(plan)
    report |= {"bandwidth": bench.bandwidth.probe(), "seconds": {}, "cut": {}}
    report |= {"gemm_flops": gemm_peak(bench.dtype, plan.device), "rows": {}, "faults": []}
    for name, part in parts.items():
        rows = report["rows"].setdefault(name, [])
        began = time.perf_counter()
        try:
            with at_most(part.seconds * longer):
                for row in part.rows(bench):
                    rows.append(row)
                    save(finished(report, bench))
        except OutOfTime:
            report["cut"][name] = f"cut after {part.seconds * longer} s"
        except Exception as error:  # the other parts go on
            report["cut"][name] = f"{type(error).__name__}: {why(error)}"
        report["seconds"][name] = round(time.perf_counter() - began, 1)
        let_go(plan)
        save(finished(report, bench))
    return report


def finished(report: dict, bench: Bench) -> dict:
    """The report with bandwidth, shares and faults computed from its rows so far."""
    report["bandwidth"] = bench.bandwidth.best()
    for row in [*report["rows"].get("decode", ()), *report["rows"].get("compiled", ())]:
        add_share(row, bench.bandwidth)
    report["faults"] = faults(report)
    return report


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise OutOfTime inside the block after `seconds`. If a call into C blocks for 30 s more, the
    process exits with code 3. Without SIGALRM (Windows, other threads) there is no limit."""

    def stop(*_):
        raise OutOfTime

    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    last = threading.Timer(seconds + 30, os._exit, [3])
    last.daemon = True
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    last.start()
    try:
        yield
    finally:
        last.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- machine -----------------------------------------------------------------------------------


def machine(device: str) -> dict:
    """System, processor and GPU that the figures belong to."""
    facts: dict = {"system": platform.platform(), "processor": platform.machine()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": gpu.name,
            "gpu_bytes": gpu.total_memory,
            "capability": f"{gpu.major}.{gpu.minor}",
        }
    return facts


def versions() -> dict:
    """Versions of Python, CUDA and the libraries compared; None for one that is not installed."""
    own = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    for name in ("nanokv", "torch", "triton", "transformers"):
        try:
            own[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            own[name] = None
    return own


# --- equality ----------------------------------------------------------------------------------


def equality(bench: Bench) -> Iterator[dict]:
    """Every kind of cache in fp32, all logits: the plain model on the CPU against the plain and the
    optimized model on this device."""
    here, there = (random_model(TINY, torch.float32, "cpu") for _ in "ab")
    here = here.to(bench.plan.device)  # drawn on the CPU: every device type has its own generator
    models = {"plain": lambda: here, "optimize": lambda: optimize(here)}
    for how, make in models.items():
        try:
            model = make()
        except NanoKVError as error:
            yield {"check": how, "skipped": why(error)}
            continue
        for kind in sorted(CACHES):
            right = walk(there, kind, "cpu")
            mine = walk(model, kind, bench.plan.device)
            most = ROUNDED if kind == "quantized" else EXACT
            yield {"check": f"{how}, {kind}", "gap": gap(mine.cpu(), right), "most": most}
        # Graphs are recorded for 4 rows, with our kernels, and for 16 rows, with torch's.
        for rows in (3, 9):
            right = together(there, rows, "cpu")
            mine = together(model, rows, bench.plan.device)
            check = f"{how}, {rows} rows of their own lengths"
            yield {"check": check, "gap": gap(mine.cpu(), right), "most": EXACT}
    yield {"check": "draw", "gap": draws(bench.plan.device), "most": EXACT}


def together(model: Model, rows: int, device: str) -> Tensor:
    """Three decode steps of `rows` rows of 3 to 13 tokens over one pool → all logits (3·rows,V)."""
    ids = random_ids(TINY, rows, 20, device)
    first: Any = make_cache("paged", TINY, page=4)
    pool = first.pool
    caches = [make_cache("paged", TINY, pool=pool) for _ in range(rows)]
    for b, cache in enumerate(caches):
        prefill(model, ids[b : b + 1, : 3 + 5 * b % 11], cache)
    batch = PagedBatch(caches, TINY)
    return torch.cat([decode(model, ids[:, t : t + 1], batch, batch.length) for t in range(17, 20)])


def draws(device: str) -> float:
    """Gap between the log-probabilities of the drawing kernel and of the plain draw; inf if a drawn
    token differs."""
    V = 151_936
    rows = 6
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(0)).to(device)
    temperature = torch.tensor([0, 0.7, 1, 1, 1.5, 2]).to(device)
    seeds = torch.tensor([0, 1, -1, 2**40, 7, 7]).to(device)
    how = logits, temperature, seeds, torch.arange(rows).to(device)
    mine, ours, _ = drawing(logits.device)(*how)
    right, theirs, _ = draw_rows(*how)
    if not torch.equal(mine, right):
        return float("inf")
    return gap(ours, theirs)


def walk(model: Model, kind: str, device: str) -> Tensor:
    """A prompt in two chunks, three steps, a draft that is truncated, one more step → logits
    (n,V)."""
    ids = random_ids(TINY, 1, 40, device)
    cache = make_cache(kind, TINY, capacity=64)
    out = [prefill(model, ids[:, :9], cache), prefill(model, ids[:, 9:20], cache, 9)]
    for t in range(20, 23):
        out.append(decode(model, ids[:, t : t + 1], cache, t))
    out.append(verify_draft(model, ids[:, 23:27], cache, 23)[0])
    cache.truncate(24)
    out.append(decode(model, ids[:, 24:25], cache, 24))
    return torch.cat(out)


def compiled_equality(bench: "Bench") -> Iterator[dict]:
    """The compiled and recorded model against the plain one in fp32: two caches take turns, and one
    of them is truncated."""
    plan = bench.plan
    model = random_model(TINY, torch.float32, plan.device)
    compiled = Compiled(model, capacity=64, buckets=(16,), backend=plan.backend)
    pairs = [(compiled.make_cache(), make_cache("dict", TINY)) for _ in range(2)]
    ids = random_ids(TINY, 1, 40, plan.device)
    worst = 0.0
    for turn in range(8):
        for i, (mine, plain) in enumerate(pairs):
            T = 5 + 6 * i if turn == 0 else 1
            path = prefill if turn == 0 else decode
            part = ids[:, turn + i : turn + i + T]
            ours = path(compiled, part, mine, mine.length)
            theirs = path(model, part, plain, plain.length)
            worst = max(worst, gap(ours, theirs))
        if turn == 4:
            for cache in pairs[0]:
                cache.truncate(6)
    yield {"check": "torch.compile", "gap": worst, "most": EXACT, "compiles": compiled.compiles}


# --- attention ---------------------------------------------------------------------------------


def attention_kernels(bench: "Bench") -> Iterator[dict]:
    """For each way in which attention is called: the kernel that torch chose, and its gap to
    attention by the formula in fp64."""
    config = bench.plan.config
    device = bench.plan.device
    H, Hk, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    T, S = 64, 256
    slab = torch.arange(S, device=device)[None] < S // 2  # (1,S): half of the slots in use
    calls: dict[str, tuple[Attend, int, int]] = {  # name: (function, queries, keys)
        "prefill, empty cache": (causal_attention, T, T),
        "a later chunk": (causal_attention, T, S),
        "behind a mask": (partial(prefill_attention, mask=causal_mask(T, S, device)), T, S),
        "decode": (decode_attention, 1, S),
        "decode over a slab": (partial(decode_attention, mask=slab), 1, S),
    }
    for name, (attend, queries, keys) in calls.items():
        q = torch.randn(1, H, queries, D, dtype=bench.dtype, device=device)
        k = torch.randn(1, Hk, keys, D, dtype=bench.dtype, device=device)
        v = torch.randn(1, Hk, keys, D, dtype=bench.dtype, device=device)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            y = attend(q, k, v)
        with sdpa_kernel(SDPBackend.MATH):
            exact = attend(q.double(), k.double(), v.double())
        yield {"call": name, "kernel": chosen(profiler), "gap": gap(y, exact)}


def chosen(profiler: profile) -> str:
    """The kernel's name: flash_attention, efficient_attention, cudnn_attention, …. attention_math
    is torch's fallback, which stores all T·S scores."""
    for event in profiler.key_averages():
        name = re.sub("^aten::_(scaled_dot_product_)?", "", event.key)
        if "attention" in event.key and not name.startswith("aten::"):
            return name
    return "none seen"


# --- decode, prefill, generate -----------------------------------------------------------------


def runners(bench: Bench, batch: int) -> Iterator[Callable]:
    """Functions that make a runner, the most important runner first."""
    plain = bench.model
    # No dict cache: its tensors move in every step, so no graph can be recorded over it.
    for cache in ("growing", "paged"):
        yield lambda cache=cache: Ours(bench.fast, "optimize", cache, {}, batch, bench.dtype)
    yield lambda: Peer(plain, "dynamic", batch)
    if batch == bench.plan.batches[0]:
        yield lambda: Ours(plain, "plain", "dict", {}, batch, bench.dtype)
        yield lambda: Ours(plain, "plain", "static", {}, batch, bench.dtype)
        yield lambda: Peer(plain, "static", batch)


def decode_rows(bench: Bench) -> Iterator[dict]:
    """One runner at a time, so that each can use the whole memory. A failure becomes a row."""
    for batch in bench.plan.batches:
        for context in bench.plan.contexts:
            for make in runners(bench, batch):
                bench.bandwidth.probe()
                yield row_of(make, decode_row, context, bench.plan, bench.bandwidth)
                let_go(bench.plan)


def prefill_rows(bench: Bench) -> Iterator[dict]:
    """Every prompt length of the plan, at batch 1."""
    for tokens in bench.plan.prompts:
        for make in runners(bench, 1):
            yield row_of(make, prefill_row, tokens, bench.plan)
            let_go(bench.plan)


def row_of(make: Callable, measure: Callable, *how: Any) -> dict:
    """The row of a runner, or the reason why it cannot be made here."""
    try:
        runner = make()
    except (NanoKVError, ImportError) as error:
        return {"runner": "none", "failed": why(error)}
    return measure(runner, *how)


def generate_rows(bench: Bench) -> Iterator[dict]:
    """The bundled model answers a question through `generate`. The second answer is the one timed;
    the first warms up."""
    device = bench.plan.device
    new = 8 if device == "cpu" else 512
    began = now(device)
    plain, tokenizer = load("tiny", device=device)
    load_s = now(device) - began
    ids = tokenizer.encode(QUESTION)
    for how, make in (("optimize", lambda: optimize(plain)), ("plain", lambda: plain)):
        try:
            model = make()
        except NanoKVError as error:
            yield {"runner": how, "failed": why(error)}
            continue
        first = answer(model, ids, new, device)
        second, rest = answer(model, ids, new, device)
        row = {"runner": how, "load_s": load_s, "first_s": sum(first), "ttft_s": second}
        yield row | {"new_tokens": new, "tok_s": (new - 1) / rest}


def answer(model: Model, ids: list[int], new: int, device: str) -> tuple[float, float]:
    """(seconds until the first token, seconds for all others)."""
    began = now(device)
    tokens = generate(model, ids, max_new_tokens=new, eos_token_ids=[])
    next(tokens)
    first = now(device)
    list(tokens)
    return first - began, now(device) - first


def compiled_rows(bench: Bench) -> Iterator[dict]:
    """torch.compile of the plain models. It takes long, so this part runs late. A model from
    optimize() cannot be compiled."""
    yield from compiled_equality(bench)
    plan = bench.plan
    model = random_model(plan.config, bench.dtype, plan.device)
    for kind in (Peer, Nano):
        make = partial(kind, model, "static", 1, plan.backend)
        yield row_of(make, decode_row, plan.contexts[0], plan, bench.bandwidth)
        let_go(plan)


# --- engine ------------------------------------------------------------------------------------


def engine_rows(bench: Bench) -> Iterator[dict]:
    """The same requests all at once, through each engine, after a warm-up."""
    asked = bench.plan.requests
    new = asked.new
    prompts = serving.requests_of(
        bench.plan.config.vocab_size, asked.count, asked.longest, shortest=asked.shortest
    )
    makers = {
        "nanokv optimize": lambda prompts: serving.engine(bench.fast, prompts, new),
        "nanokv plain": lambda prompts: serving.engine(bench.model, prompts, new),
        "transformers continuous batching": lambda prompts: serving.generate_batch(
            Peer(bench.model, "dynamic", 1).model, prompts, new
        ),
    }
    # Every batch size compiles and records a graph once. A server that has run for a while has done
    # so for all of them, so ours warms up with all prompts.
    warm_up = dict.fromkeys(makers, prompts[:2]) | {"nanokv optimize": prompts}
    for name, make in makers.items():
        row = {"runner": name, "requests": asked.count, "prompt_tokens": sum(map(len, prompts))}
        try:
            make(warm_up[name])()
            seconds, tokens = serving.timed(make(prompts))
            yield row | {"seconds": seconds, "new_tokens": tokens, "tok_s": tokens / seconds}
        except Exception as error:  # transformers may raise anything
            yield row | {"failed": why(error)}
        let_go(bench.plan)


def host(bench: Bench) -> Iterator[dict]:
    """Python's time per step, without the GPU's work."""
    if find_spec("triton") is None:
        yield {"skipped": "there is no Triton"}
        return
    from nanokv.lab.bench import gpu_host

    yield from gpu_host.host_rows(TINY, bench.plan.device)


# --- offload, ranks ----------------------------------------------------------------------------


def offload(bench: "Bench") -> Iterator[dict]:
    """A cache in host memory beside one on the device: equal logits, seconds per step, bytes
    moved."""
    plan = bench.plan
    pinned = transfer_rate(plan.device, pin=plan.device == "cuda")
    pageable = transfer_rate(plan.device, pin=False)
    for context in sorted(plan.contexts)[:3]:
        ids = random_ids(plan.config, 1, context, plan.device)
        here, near = decoded(bench.model, ids, make_cache("dict", plan.config), plan)
        offloaded = make_cache("offloaded", plan.config, to="host")
        there, far = decoded(bench.model, ids, offloaded, plan)
        moved = costs.kv_bytes(plan.config, context, 1, 2)
        yield {
            "context": context,
            "equal": torch.equal(here, there),
            "near_s": near,
            "far_s": far,
            "moved_bytes": moved,
            "transfer_s": moved / pinned,
            "pinned_rate": pinned,
            "pageable_rate": pageable,
        }


def decoded(model: Model, ids: Tensor, cache: KVCache, plan: Plan) -> tuple[Tensor, float]:
    """(logits of a prefill and the steps after it, median seconds per step)."""
    logits = [prefill_chunks(model, ids, cache, chunk=prefill_chunk(model))]
    times = []
    for _ in range(plan.rounds + 1):
        began = now(plan.device)
        logits.append(decode(model, ids[:, :1], cache, cache.length))
        times.append(now(plan.device) - began)
    return torch.stack(logits), statistics.median(times[1:])


def transfer_rate(device: str, pin: bool, size: int = 1 << 28) -> float:
    """Bytes per second from host memory to the device, median of 5."""
    source = torch.ones(size, dtype=torch.uint8, pin_memory=pin)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / statistics.median(
        timed(lambda: target.copy_(source, non_blocking=True), 5, device)
    )


def rank_rows(bench: Bench) -> Iterator[dict]:
    """The rows of gpu_ranks.py, or the reason why there are none."""
    rows, reason = gpu_ranks.tensor_parallel(bench.model, bench.plan, bench.bandwidth)
    yield from rows or [{"skipped": reason}]


PARTS = {  # without `ranks` the limits add up to 4 minutes
    "equality": Part(equality, 30),
    "attention": Part(attention_kernels, 10),
    "decode": Part(decode_rows, 60),
    "prefill": Part(prefill_rows, 20),
    "generate": Part(generate_rows, 20),
    "engine": Part(engine_rows, 50),
    "host": Part(host, 5),
    "offload": Part(offload, 10),
    "compiled": Part(compiled_rows, 35),
    "ranks": Part(rank_rows, 60, long=True),
}


# --- the report --------------------------------------------------------------------------------


def faults(report: dict) -> list[str]:
    """One line per fault: a wrong answer, attention without a fused kernel, a second compilation,
    an offload that differs, a part or a runner of ours that failed. Running out of time or of
    memory is not a fault."""
    rows = defaultdict(list, report["rows"])
    found = [f"{name}: {text}" for name, text in report["cut"].items() if "cut after" not in text]
    for row in [*rows["equality"], *rows["compiled"]]:
        if "gap" in row and not row["gap"] <= row["most"]:
            found.append(f"{row['check']}: off by {row['gap']:.1e} of the largest logit")
        if len(row.get("compiles", [])) != len(set(row.get("compiles", []))):
            found.append(f"a width was compiled twice: {row['compiles']}")
    for row in rows["attention"]:
        if not row["gap"] <= ROUNDED:
            found.append(f"attention, {row['call']}: off by {row['gap']:.1e}")
        if row["kernel"] in ("attention_math", "none seen"):
            found.append(f"attention, {row['call']}: no fused kernel ({row['kernel']})")
    found += [
        f"offload differs at context {row['context']:,}"
        for row in rows["offload"]
        if not row["equal"]
    ]
    for name in ("decode", "prefill", "compiled", "engine"):
        found += [
            f"{name}, {row['runner']}: {row['failed']}"
            for row in rows[name]
            if "failed" in row
            and row["runner"].startswith("nanokv")
            and "need" not in row["failed"]
        ]
    return found + gpu_ranks.faults([row for row in rows["ranks"] if "skipped" not in row])


def markdown(report: dict) -> str:
    """The report as Markdown."""
    names = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    where = ", ".join(str(value) for value in report["machine"].values())
    lines = ["# Dry run on a CPU: no figures" if report["dry_run"] else "# On a GPU", ""]
    lines += [f"{report['date']} · {where} · {names}", ""]
    rate = report["bandwidth"] / 1e9
    flops = report["gemm_flops"] / 1e12
    lines += [
        f"Read bandwidth {rate:,.0f} GB/s, bf16 products {flops:,.1f} TFLOP/s, "
        "measured in this run.",
        "",
        "Faults: " + ("; ".join(report["faults"]) or "none"),
        "",
    ]
    for name, rows in report["rows"].items():
        head = [f"## {name}", "running"]
        if name in report["seconds"]:
            head[1] = f"{report['seconds'][name]:.0f} s"
        if name in report["cut"]:
            head.append(report["cut"][name])
        lines += [" · ".join(head), ""]
        lines += rank_lines(rows) if name == "ranks" else plain_table(rows)
    return "\n".join(lines)


def plain_table(rows: list[dict]) -> list[str]:
    """A table with a column per name in the rows, in order of first appearance."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row if name not in HIDDEN))
    cells = [[cell(name, row.get(name)) for name in names] for row in rows]
    return table([HEADS.get(name, name.replace("_", " ")) for name in names], cells)


HIDDEN = ("most", "compiles", "step_bytes", "moved_bytes")
HEADS = {
    "decode_s": "ms per step",
    "first_s": "ms of the first",
    "prefill_s": "ms of the prompt",
    "ttft_s": "ms to the first token",
    "host_s": "ms of Python",
    "slow_s": "ms, one step of ten",
    "tok_s": "tok/s",
    "share": "of the limit",
    "spread": "±",
    "near_s": "ms near",
    "far_s": "ms in host memory",
    "transfer_s": "ms of transfer",
    "pinned_rate": "GB/s pinned",
    "pageable_rate": "GB/s pageable",
}


def cell(name: str, value: Any) -> str:
    """A value as text, by the unit of its column."""
    if value is None:
        return ""
    if name == "gap":
        return f"{value:.1e}"
    if name == "share":
        return f"{value:.0%}"
    if name == "spread":  # ± half of it
        return f"{value / 2:.0%}"
    if name.endswith("_rate"):
        return f"{value / 1e9:.1f}"
    if name in HEADS and name.endswith("_s") and name != "tok_s":
        return f"{value * 1e3:,.2f}"
    if isinstance(value, float) and value >= 100:
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:.2f}"
    if type(value) is int:
        return f"{value:,}"
    return str(value)


def decode_cells(row: dict) -> tuple:
    """Milliseconds, tokens per second, share of the limit and half of the spread; or the reason why
    there are none."""
    if "failed" in row:
        return row["failed"], "", "", ""
    return (
        f"{row['decode_s'] * 1e3:.2f}",
        f"{row['tok_s']:,.0f}",
        f"{row['share']:.0%}",
        f"{row['spread'] / 2:.0%}",
    )


def rank_lines(rows: list[dict]) -> list[str]:
    """The table of tensor parallelism. Bytes are what one rank contributes to all_reduce per
    step."""
    if any("skipped" in row for row in rows):
        return [f"No tensor parallel: {rows[0]['skipped']}.", ""]
    cells = [
        (
            row["ranks"],
            row.get("batch", ""),
            cell("context", row.get("context")),
            *decode_cells(row),
            cell("summed_bytes", row.get("summed_bytes")),
            cell("gap", row.get("gap")),
        )
        for row in rows
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
    return table(head, cells)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table, and an empty line after it."""
    cells = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells), ""]


if __name__ == "__main__":
    sys.exit(main())
