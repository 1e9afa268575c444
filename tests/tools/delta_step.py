"""How near the gated delta step comes to the memory: python tests/tools/delta_step.py [threads]

States of 24 layers of Qwen3.5's default text config, 50 MB, one step each: kernel, and the plain
rule in torch. The limit is 2 · bytes of the states over the read bandwidth of the same run. With
one thread its processor time is measured, which other programs lengthen less than the clock.
"""

import functools
import statistics
import sys
import time

import torch

from nanokv.fast import native
from nanokv.fast.recurrent import gated_delta_step
from nanokv.lab.bench.machine import BUFFER, Others
from nanokv.recurrent import gated_delta_steps

LAYERS, H, D, ROUNDS = 24, 32, 128, 9


def plain(q, k, v, g, beta, S):
    S.copy_(gated_delta_steps(*(x[:, :, None] for x in (q, k, v, g, beta)), S)[1])


def every_layer(step, inputs, states):
    for S in states:
        step(*inputs, S)


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    q, k, v = torch.randn(3, 1, H, D) * D**-0.5
    inputs = q, k, v, -torch.rand(1, H), torch.rand(1, H)
    states = [torch.randn(1, H, D, D) for _ in range(LAYERS)]
    buffer, moved = torch.ones(BUFFER // 4), 2 * sum(S.nbytes for S in states)
    runs = {
        "read": (buffer.sum, buffer.nbytes),
        "kernel": (functools.partial(every_layer, gated_delta_step, inputs, states), moved),
        "torch": (functools.partial(every_layer, plain, inputs, states), moved),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    others = Others()
    for _ in range(ROUNDS):
        for name, (run, size) in runs.items():
            began = clock()
            run()
            rates[name].append(size / (clock() - began))
    print(f"{native.library()[1]}; {threads} threads, others used {others.cores():.1f} cores")
    limit = statistics.median(rates["read"])
    for name, found in rates.items():
        rate = statistics.median(found)
        print(f"{name:8}{rate / 1e9:8.1f} GB/s{rate / limit:8.2f} of the limit")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1)
