"""Tensor parallelism on the GPUs of one machine, checked and measured for the report of gpu.py.

    rows, why = tensor_parallel(model, FULL, bandwidth)

Runs 2, 4 and 8 ranks, as far as the machine has that many GPUs and the model can be split. Each
rank is a process with one GPU; the ranks communicate over NCCL. Each rank first builds the whole
model in fp32 and compares the logits of the split model with it. Then each rank makes its shard
of random bf16 weights, and the steps are timed. This file, run as a program, is one rank. A dry
run has 2 ranks, gloo and no GPU.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.errors import NanoKVError
from nanokv.inference import decode, prefill
from nanokv.lab.bench.gpu_steps import (
    FULL,
    SMALL,
    Nano,
    Plan,
    add_share,
    decode_row,
    gap,
    random_ids,
)
from nanokv.lab.bench.machine import Bandwidth
from nanokv.loading import random_model
from nanokv.model import Transformer
from nanokv.parallel import group
from nanokv.parallel.launch import launch
from nanokv.parallel.shards import random_shard, split
from nanokv.parallel.sizes import misfits

SIZES = (2, 4, 8)
BATCHES = (1, 16)  # measured if the plan has them
CONTEXTS = (128, 8192)  # measured if the plan has them
PROMPT = 24  # tokens of the prompt for the comparison with one process
STEPS = 8  # decode steps of that comparison


def tensor_parallel(model: Transformer, plan: Plan, bandwidth: Bandwidth) -> tuple[list[dict], str]:
    """(rows, why there are none): one process for comparison, then each number of ranks. A number
    of ranks that fails is a row with the reason."""
    plan = selected(plan)
    count = 2
    if plan.device == "cuda":
        count = torch.cuda.device_count()
    sizes = [size for size in SIZES if size <= count and not misfits(plan.config, size)]
    if not sizes:
        return [], f"{count} GPU here: a model is cut for 2 at least"
    rows = [
        {"ranks": 1} | decode_row(Nano(model, "static", batch), context, plan, bandwidth)
        for batch in plan.batches
        for context in plan.contexts
    ]
    for row in rows:
        add_share(row, bandwidth)
    return rows + [row for size in sizes for row in on_ranks(size, plan)], ""


def selected(plan: Plan) -> Plan:
    """The plan with BATCHES and CONTEXTS only, to save time. Keeps all if none of them matches."""
    batches = tuple(batch for batch in plan.batches if batch in BATCHES) or plan.batches
    contexts = tuple(context for context in plan.contexts if context in CONTEXTS) or plan.contexts
    return replace(plan, batches=batches, contexts=contexts)


def on_ranks(size: int, plan: Plan) -> list[dict]:
    """The rows measured by `size` ranks, or one row with the reason why they failed."""
    with tempfile.TemporaryDirectory(prefix="nanokv-gpu-ranks-") as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "nanokv.lab.bench.gpu_ranks", str(out)]
        try:
            code = launch(command + ["--dry-run"] * (plan.device == "cpu"), size, keep_errors=True)
            if code == 0:
                return [{"ranks": size} | row for row in json.loads(out.read_text())]
            reason = f"rank 0 ended with exit code {code}"
        except NanoKVError as error:
            reason = str(error)
        said = out.read_text() if out.exists() else ""
        return [{"ranks": size, "failed": (said or reason)[:200]}]


def faults(rows: list[dict]) -> list[str]:
    """Logits that differ from those of one process, bytes in all_reduce that differ from the
    formula, and numbers of ranks that failed. Too little memory is not a fault."""
    found = []
    for row in rows:
        where = f"{row['ranks']} ranks"
        if "failed" in row:
            if "need" not in row["failed"]:
                found.append(f"{where}: {row['failed']}")
        elif row["ranks"] > 1:
            if not row["gap"] <= 1e-4:
                found.append(f"{where}: off by {row['gap']:.1e} of the largest logit")
            if row["summed_bytes"] != row["expected_bytes"]:
                found.append(
                    f"{where}: {row['summed_bytes']:,} bytes in all_reduce, by formula "
                    f"{row['expected_bytes']:,}"
                )
    return found


# --- one rank ----------------------------------------------------------------------------------


class Counted:
    """A group that counts the bytes that its collectives move."""

    def __init__(self, ranks: group.Group) -> None:
        self.ranks = ranks
        self.rank = ranks.rank
        self.size = ranks.size
        self.clear()

    def clear(self) -> None:
        """Set all counts to 0."""
        self.sums = self.summed = self.gathered = 0

    def sum(self, x: Tensor) -> Tensor:
        """Group.sum; counts the bytes that this rank contributes."""
        self.sums += 1
        self.summed += x.nbytes
        return self.ranks.sum(x)

    def gather(self, x: Tensor) -> Tensor:
        """Group.gather; counts the bytes that this rank receives."""
        self.gathered += (self.size - 1) * x.nbytes
        return self.ranks.gather(x)


def main(argv: list[str] | None = None) -> int:
    """Join the group and measure. Rank 0 writes the rows, or the reason why there are none."""
    parser = argparse.ArgumentParser(
        prog="python -m nanokv.lab.bench.gpu_ranks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    plan = FULL
    backend = "nccl"
    if args.dry_run:
        plan = SMALL
        backend = "gloo"
    plan = selected(plan)
    group.end_with_parent()
    try:
        if plan.device == "cuda":
            torch.cuda.set_device(group.number("LOCAL_RANK"))
        ranks = group.start(backend=backend)
        rows = measure(plan, ranks)
    except Exception as error:
        if group.number("RANK"):
            raise  # the traceback goes to stderr
        args.out.write_text(str(error).partition("\n")[0] or type(error).__name__)
        return 2
    if ranks.rank == 0:
        args.out.write_text(json.dumps(rows))
    ranks.meet()
    ranks.close()
    return 0


def measure(plan: Plan, ranks: group.Group) -> list[dict]:
    """One row per batch and context."""
    counted: Any = Counted(ranks)  # has the methods of Group that a model calls
    bandwidth = Bandwidth(plan.device)
    rows = []
    distance = compared(plan, counted)
    model = random_shard(plan.config, counted, torch.bfloat16, plan.device)
    for batch in plan.batches:
        for context in plan.contexts:
            runner = Nano(model, "static", batch)
            row = decode_row(runner, context, plan, bandwidth)
            if "decode_s" in row:
                row |= {"gap": distance} | sent(counted, plan.config, runner)
            rows.append(row)
    for row in rows:
        add_share(row, bandwidth)
    return rows


def compared(plan: Plan, ranks: Counted) -> float:
    """Largest gap in fp32 between the logits of the split and of the whole model, over a prefill
    and STEPS decode steps."""
    whole = random_model(plan.config, torch.float32, plan.device)
    ids = random_ids(plan.config, 1, PROMPT + STEPS, plan.device)
    logits = []
    split_ranks: Any = ranks  # as in `measure`
    for model in (whole, split(whole, split_ranks)):
        cache = make_cache("dict", model.config)
        said = [prefill(model, ids[:, :PROMPT], cache)]
        said += [decode(model, ids[:, i : i + 1], cache, i) for i in range(PROMPT, PROMPT + STEPS)]
        logits.append(torch.stack(said))
    return gap(logits[1], logits[0])


def sent(ranks: Counted, config: Config, runner: Nano) -> dict:
    """Bytes that one decode step sums and gathers, beside the formula for the sums: 2·L + 1 times
    B·C values of 2 bytes."""
    ranks.clear()
    runner.step()
    expected = (2 * config.num_hidden_layers + 1) * runner.batch * config.hidden_size * 2
    return {
        "sums": ranks.sums,
        "summed_bytes": ranks.summed,
        "expected_bytes": expected,
        "gathered_bytes": ranks.gathered,
    }


if __name__ == "__main__":
    sys.exit(main())
