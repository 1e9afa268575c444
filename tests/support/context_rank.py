"""One rank of test_context_processes.py, a process of its own: `python context_rank.py WORK FOLDER`, one line of JSON.

Rank, size and port come from the environment, as torchrun sets them. An error of nanokv ends it with exit code 2 and
its message on stderr.
"""

import json
import os
import signal
import sys
import time

import torch

import nanokv
from nanokv.costs import kv_bytes_per_token
from nanokv.errors import NanoKVError
from nanokv.parallel.context import ContextCache
from nanokv.parallel.group import start


def resident() -> int:
    """Bytes of this process in memory, without code and files."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def answer(group, folder) -> dict:
    """A prompt in chunks, tokens, a second turn after an edit; then a drawn answer. The logits of every stage."""
    model, _ = nanokv.load(folder)
    ids = torch.randint(
        model.config.vocab_size, (1, 90), generator=torch.Generator().manual_seed(1)
    )
    cache, out = ContextCache(nanokv.make_cache("paged", model.config, page=8), group, page=8), []
    out.append(nanokv.prefill_chunks(model, ids[:, :70], cache, chunk=33))
    for t in range(70, 80):
        out.append(nanokv.decode(model, ids[:, t : t + 1], cache, t))
    cache.truncate(20)
    out.append(nanokv.prefill(model, ids[:, 20:], cache, 20))
    drawn = list(
        nanokv.generate(
            model, [5], cache, max_new_tokens=30, temperature=1.0, seed=7, eos_token_ids=[]
        )
    )
    return {
        "logits": torch.cat(out).tolist(),
        "drawn": drawn,
        "nbytes": cache.nbytes,
        "length": cache.length,
    }


def memory(group, folder) -> dict:
    """512 MiB over two ranks: what a process really takes for its share of 4,096 tokens.

    MALLOC_MMAP_THRESHOLD_ is set: what `cat` frees goes back. Left to itself glibc keeps some of it, a quarter more.
    """
    config = nanokv.Config(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        max_position_embeddings=32768,
    )
    cache, before = ContextCache(nanokv.make_cache("dict", config), group, page=16), resident()
    for _ in range(8):
        for layer in cache:
            k, v = torch.ones(2, 1, 8, 512, 256)
            layer.append(k, v)
    del k, v
    return {
        "taken": resident() - before,
        "nbytes": cache.nbytes,
        "each": kv_bytes_per_token(config, 4),
        "length": cache.length,
    }


def decode_for_ever(group, folder) -> None:
    """Rank 1 does to itself what the last word of its command line says, at the 20th token."""
    model, _ = nanokv.load(folder)
    cache = ContextCache(nanokv.make_cache("dict", model.config), group, page=4)
    nanokv.prefill(model, [list(range(9))], cache)
    for t in range(9, 100_000):
        if group.rank == 1 and t == 20:
            print("now", time.time(), flush=True)
            os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[sys.argv[3]])
        cache.truncate(9 + t % 50) if cache.length > 200 else None
        nanokv.decode(model, [[t % 50]], cache, cache.length)


if __name__ == "__main__":
    work = {"answer": answer, "memory": memory, "decode": decode_for_ever}[sys.argv[1]]
    group = start(timeout=float(os.environ.get("TIMEOUT_S", "20")))
    try:
        print(json.dumps(work(group, sys.argv[2])))
    except NanoKVError as error:
        sys.exit(f"{type(error).__name__}: {error}, at {time.time()}")
    group.close()
