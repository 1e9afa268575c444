"""The soak of `nanokv serve` (soak.py): what it judges, and a third of a minute of it."""

import collections
import dataclasses
import random
import subprocess
import sys

import anyio
import pytest
import torch

import nanokv
import soak
from serving import CHAT, Serving, ask

QUIET = {
    "pages": 8.0,
    "pages_free": 8.0,
    "requests_running": 0.0,
    "requests_waiting": 0.0,
    "preemptions_total": 0.0,
    "generated_tokens_total": 1.0,
    "prefix_hit_tokens_total": 0.0,
}


def result(outcomes=(), **more):
    """Of a soak that passes, but for what is given."""
    tallies = {kind: collections.Counter({soak.FINE: 1}) for kind in soak.ANSWERED}
    tallies["half"] = collections.Counter(
        {soak.LEFT: 3, soak.BUSY: 2, soak.CUT: 1, **dict(outcomes)}
    )
    facts = {
        "memory": [90, 110, 130, 100, 101, 99, 100, 101, 100],
        "metrics": QUIET,
        "exit_code": 143,
        "log": "fine\n",
        "restart_s": 1.0,
        "seconds": 9.0,
        "answers": 2,
        "flat": 0.02,
    }
    return soak.Result(tallies, **facts | more)


def test_a_soak_passes_where_nothing_went_wrong():
    found = result()
    assert found.failures() == []
    half = found.table().splitlines()[1 + len(soak.ANSWERED)]
    assert half.split() == ["half", "6", "0", "3", "2", "1", "0", "0", "0"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"outcomes": {soak.WRONG: 1}}, "1 wrong"),
        ({"outcomes": {soak.LOST: 2}}, "2 lost"),
        ({"outcomes": {soak.HUNG: 1}}, "1 hung"),
        ({"metrics": QUIET | {"pages_free": 5.0}}, "3 pages leaked"),
        ({"metrics": QUIET | {"requests_running": 1.0}}, "1 requests left in the engine"),
        ({"memory": [100] * 6 + [103] * 3}, r"memory changed by +3.0%"),
        ({"memory": [100] * 6 + [97] * 3}, r"memory changed by -3.0%"),
        ({"exit_code": -9}, "exit code -9 after SIGTERM"),
        ({"log": "fine\nException in ASGI application\n"}, "log: Exception in ASGI application"),
    ],
)
def test_a_soak_fails_for_each_fault(more, said):
    assert result(**more).failures() == [said]


def test_a_soak_without_an_answer_is_none():
    found = result()
    found.tallies["stream"].clear()
    assert found.failures() == ["no client stream fared as expected"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "minutes", ["0.33", pytest.param("2", marks=[pytest.mark.night, pytest.mark.serial])]
)
def test_every_kind_of_client(minutes):
    """Memory needs more minutes to settle: here it may only not multiply."""
    command = [sys.executable, soak.__file__, "--minutes", minutes, "--flat", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout + done.stderr


@pytest.fixture(scope="module")
def asked():
    """(the port of a server of the bundled model, a question with its right answer)"""
    model, tokenizer = nanokv.load("tiny", dtype=torch.float32)
    known = ask("What is 2 + 3?", max_tokens=40)
    with Serving(model, tokenizer, keys=soak.KEYS) as server:
        _, found = server.post(CHAT, known, {"Authorization": f"Bearer {soak.KEYS[0]}"})
        (choice,) = found["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        yield server.port, soak.Question(known, text, reason, found["usage"]["prompt_tokens"])


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *[(kind, {"text": "x"}) for kind in ("whole", "long", "stream", "absolute")],
        *[(kind, {"text": "x"}) for kind in ("responses", "messages")],
        ("whole", {"prompt": 3}),
        ("responses", {"reason": "?"}),
        ("messages", {"prompt": 3}),
    ],
    ids=str,
)
def test_a_wrong_answer_is_found(asked, kind, wrong):
    """The comparison itself: the right answer is made wrong."""
    port, question = asked

    async def come(question, seed):
        clients = soak.Clients(port, [question])
        clients.lengthy = [question]
        async with clients.http:
            return await getattr(clients, kind)(random.Random(seed))

    for seed in (1, 2):  # whole, and as a stream
        assert anyio.run(come, question, seed) == soak.FINE
        with pytest.raises(soak.Unexpected):
            anyio.run(come, dataclasses.replace(question, **wrong), seed)
