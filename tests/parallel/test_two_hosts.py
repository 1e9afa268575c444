"""Two hosts, each with one torchrun, joined by a cable that can be slow and can be cut (two_hosts.py).

A host is a network namespace of Linux, so addresses, routes and the cable are real, and the processors are shared.
"""

import functools
import json

import pytest
import torch

import nanokv
from oracle import TOLERANCE
from two_hosts import in_two_hosts, missing
from two_hosts_rank import SPEED

pytestmark = [pytest.mark.slow, pytest.mark.serial]


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if reason := missing():
        pytest.skip(reason)


@functools.cache
def measured(folder) -> list[dict]:
    """By rank."""
    done = in_two_hosts("measure", folder)
    assert done["codes"] == [0, 0], done
    ranks = [json.loads(out.splitlines()[-1]) for out in done["stdout"]]
    assert done["left"] == [] and sorted(rank["rank"] for rank in ranks) == [0, 1]
    return ranks


def test_a_sequence_over_two_hosts_gives_the_logits_of_one(tiny_folder):
    model, _ = nanokv.load(tiny_folder)
    ids = torch.randint(
        model.config.vocab_size, (1, 420), generator=torch.Generator().manual_seed(1)
    )
    right = nanokv.score(model, ids)[0, 399:]
    for rank in measured(tiny_folder):
        assert rank["sum"] == 3
        assert float((torch.tensor(rank["logits"]) - right).abs().max()) <= TOLERANCE


def test_what_leaves_a_host_is_what_was_computed(tiny_folder):
    """Per token 4·H·(D+1) bytes in each layer and 4·H for the check, as context.py says; TCP and gloo add their own."""
    c = nanokv.load(tiny_folder)[0].config
    payload = 4 * c.num_attention_heads * ((c.head_dim + 1) * c.num_hidden_layers + 1)
    for rank in measured(tiny_folder):
        assert payload < rank["sent"] < 1.1 * payload


def test_a_sum_over_two_hosts_sends_its_bytes_once(tiny_folder):
    """A ring of n ranks sends 2·(n−1)/n of the bytes from each: all of them for two. 66 of 1,514 bytes are headers."""
    for rank in measured(tiny_folder):
        assert 1 <= rank["fast"]["sent"] / rank["fast"]["bytes"] <= 1.1


def test_a_slow_cable_takes_bytes_over_speed(tiny_folder):
    """Within a third, of 262,144 and 1,048,576 bytes at 40 Mbit/s; at full speed the same sum takes a tenth at most.
    Other programs only make sums longer, so the shortest one must be short enough."""
    for rank in measured(tiny_folder):
        for slow in rank["slow"]:
            expected = 8 * slow["bytes"] / SPEED
            assert 0.75 * expected <= slow["seconds"] and slow["best"] <= 1.33 * expected
        assert rank["fast"]["best"] < 0.1 * rank["slow"][-1]["seconds"]


def test_a_cable_that_is_cut_ends_both_hosts_within_seconds(tiny_folder):
    """The connection is not closed, it is silent: each rank gives the other its 3 s. No process is left on either."""
    done = in_two_hosts("cut", tiny_folder)
    assert done["seconds"] < 12 and done["left"] == [] and 0 not in done["codes"]
    for errors in done["stderr"]:
        assert "ParallelError: a rank of 2 did not answer within 3 s" in errors


def test_one_model_over_two_hosts_answers_as_on_one(tiny_folder, cli):
    """`torchrun --nnodes 2 … -m nanokv generate --tensor-parallel 2`: rank 0 prints, the other host prints nothing."""
    words = [
        "generate",
        "Hello",
        "-m",
        str(tiny_folder),
        "-n",
        "12",
        "--raw",
        "--plain",
        "--tensor-parallel",
        "2",
    ]
    code, alone, _ = cli(*words[:-2])
    done = in_two_hosts("command", *words)
    assert code == 0 and done["codes"] == [0, 0] and done["left"] == [], done
    assert sorted(done["stdout"]) == sorted([alone, ""])
