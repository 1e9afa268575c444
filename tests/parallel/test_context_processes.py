"""Context parallel over processes and gloo: the logits of one process, a rank's real memory, ranks that die or hang.

The same over threads, and everything that is refused, is in test_context.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import nanokv
from nanokv.parallel.group import environment, free_port
from oracle import TOLERANCE

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "context_rank.py"


def begin(size: int, *words, timeout: float = 20) -> list[subprocess.Popen]:
    """So many ranks of context_rank.py with these words."""
    port, pipes = free_port(), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # See `memory`.
    more = {"OMP_NUM_THREADS": "1", "TIMEOUT_S": str(timeout), "MALLOC_MMAP_THRESHOLD_": "1000000"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, words)],
            env=os.environ | environment(rank, size, port) | more,
            **pipes,
        )
        for rank in range(size)
    ]


def results(size: int, *words) -> list[dict]:
    ranks = begin(size, *words)
    try:
        ended = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [(rank.returncode, err) for rank, (_, err) in zip(ranks, ended, strict=True)] == [
        (0, "")
    ] * size
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def test_three_processes_give_the_logits_of_one(tiny_folder):
    model, _ = nanokv.load(tiny_folder)
    ids = torch.randint(
        model.config.vocab_size, (1, 90), generator=torch.Generator().manual_seed(1)
    )
    right = nanokv.score(model, ids)[0, [*range(69, 80), 89]]
    one = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids, one)
    drawn = list(
        nanokv.generate(
            model, [5], one, max_new_tokens=30, temperature=1.0, seed=7, eos_token_ids=[]
        )
    )
    ranks = results(3, "answer", tiny_folder)
    for rank in ranks:
        assert float((torch.tensor(rank["logits"]) - right).abs().max()) <= TOLERANCE
        assert rank["drawn"] == drawn and rank["length"] == 120
        assert rank["logits"] == ranks[0]["logits"]  # to the bit: no rank may choose another token
    assert sum(rank["nbytes"] for rank in ranks) == one.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.serial
def test_a_process_takes_its_share_and_a_page_at_most(tiny_folder):
    """512 MiB of keys and values over two processes."""
    for rank in results(2, "memory", tiny_folder):
        share = rank["length"] * rank["each"] / 2
        assert rank["length"] * rank["each"] == 2**29
        assert share <= rank["nbytes"] <= share + 16 * rank["each"]  # a page of 16 positions
        assert 0.98 * share <= rank["taken"] <= 1.02 * share + 16 * rank["each"]


@pytest.mark.parametrize(
    ("how", "seconds", "words"), [("dies", 4, "ended"), ("stops", 8, "did not answer within 3 s")]
)
def test_a_rank_that_is_gone_ends_the_other_within_seconds(tiny_folder, how, seconds, words):
    ranks = begin(2, "decode", tiny_folder, how, timeout=3)
    try:
        at = float(ranks[1].stdout.readline().split()[1])
        _, err = ranks[0].communicate(timeout=30)
        assert (
            ranks[0].returncode == 1 and re.search(words, err) and err.startswith("ParallelError")
        ), err
        # The clock of this test, ends included.
        assert "Traceback" not in err and time.time() - at < seconds + 3
        assert float(err.split(", at ")[1]) - at < seconds
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()
