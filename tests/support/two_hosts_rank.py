"""What torchrun starts on each of two hosts: `two_hosts_rank.py WORK FOLDER`, one line of JSON on stdout.

A rank is root of its own network namespace, so it can slow its end of the cable down, and read how many bytes left it.
"""

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

import nanokv
from nanokv.errors import NanoKVError
from nanokv.parallel.context import ContextCache
from nanokv.parallel.group import start

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
SPEED = 40_000_000  # bits per second of the slow cable


def slow_down() -> None:
    words = f"tc qdisc add dev eth0 root tbf rate {SPEED}bit burst 64kb latency 1s"
    subprocess.run(words.split(), check=True)


def timed_sums(group, values: int, times: int) -> dict:
    """Seconds and bytes that left this host, per sum of so many fp32 values; `best`: the seconds of the shortest."""
    x = torch.ones(values)
    group.sum(x)
    sent, clock = int(SENT.read_text()), [time.perf_counter()]
    for _ in range(times):
        group.sum(x)
        clock.append(time.perf_counter())
    seconds, best = (
        (clock[-1] - clock[0]) / times,
        min(end - begin for begin, end in pairwise(clock)),
    )
    group.meet()
    sent = (int(SENT.read_text()) - sent) / times
    return {"seconds": seconds, "best": best, "sent": sent, "bytes": x.nbytes}


def measure(group, folder) -> dict:
    """Is a sum right, what does context parallelism send per token, and how long do sums take over a slow cable?"""
    right = group.sum(torch.tensor([group.rank + 1.0])).item()
    model, _ = nanokv.load(folder)
    ids = torch.randint(
        model.config.vocab_size, (1, 420), generator=torch.Generator().manual_seed(1)
    )
    cache = ContextCache(nanokv.make_cache("dict", model.config), group, page=8)
    group.meet()
    sent = int(SENT.read_text())
    logits = [nanokv.prefill(model, ids[:, :400], cache)[0].tolist()]
    group.meet()
    sent = (int(SENT.read_text()) - sent) / 400
    logits += [
        nanokv.decode(model, ids[:, t : t + 1], cache, t)[0].tolist() for t in range(400, 420)
    ]
    fast = timed_sums(group, 1 << 18, 10)
    slow_down()
    slow = [timed_sums(group, 1 << power, 4) for power in (16, 18)]
    return {
        "sum": right,
        "logits": logits,
        "sent": sent,
        "fast": fast,
        "slow": slow,
        "rank": group.rank,
    }


def for_ever(group, folder) -> None:
    """Until the cable is cut."""
    while True:
        group.sum(torch.ones(1000))
        print("summed", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    try:
        group = start(timeout=3 if sys.argv[1] == "for_ever" else 20)
        print(
            json.dumps({"measure": measure, "for_ever": for_ever}[sys.argv[1]](group, sys.argv[2]))
        )
        group.close()
    except NanoKVError as error:
        sys.exit(f"{type(error).__name__}: {error}")
