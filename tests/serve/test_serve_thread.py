"""The door between event loop and engine: frozen messages in, frozen messages out, no server around it."""

import asyncio
import dataclasses
import queue
import typing

import pytest

from nanokv.apps.serve.api import prompts, protocol
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.run import engine_thread, messages
from nanokv.apps.serve.run.engine_client import EngineClient
from nanokv.apps.serve.run.engine_thread import EngineThread
from nanokv.apps.serve.run.messages import (
    Cancel,
    Count,
    End,
    Ended,
    Failed,
    Pieces,
    Snapshot,
    Stopped,
    Submit,
    Taken,
)
from nanokv.apps.serve.run.metrics import Metrics
from nanokv.apps.serve.run.prefill import Here
from nanokv.decoding.draw import SamplingParams
from nanokv.engine import Engine

PATIENCE_S = 20


class Loop:
    """In the place of the event loop: what it is told lies in `said`."""

    def __init__(self):
        self.said = queue.SimpleQueue()

    def call_soon_threadsafe(self, function, told):
        function(told)

    def hear(self, told):
        for message in told:
            self.said.put(message)

    def until(self, kind) -> list:
        """All that is said, up to the first message of this kind."""
        found = []
        while not found or not isinstance(found[-1], kind):
            found.append(self.said.get(timeout=PATIENCE_S))
        return found


@pytest.fixture
def door(loaded):
    """(thread, loop, submit): `submit(ticket, **fields)` gives the thread a chat's job."""
    model, tokenizer = loaded
    engine, loop = Engine(model, pages=100, page_size=4), Loop()
    served = prompts.Served(engine, tokenizer, ("tiny",), 300, SamplingParams())
    thread = EngineThread(engine, Here(), Metrics())

    def submit(ticket, **fields):
        fields = {"messages": [{"role": "user", "content": "Who are you?"}]} | fields
        (job,) = prompts.prepare(served, protocol.chat(fields), "").jobs
        thread.put(Submit(ticket, job, "messages", "a-tab", 0.0))
        return job

    thread.start(loop, loop.hear)
    yield thread, loop, submit
    thread.put(End())
    thread.join()


def test_what_passes_is_a_frozen_value_that_can_be_printed():
    kinds = [*typing.get_args(messages.ToEngine), *typing.get_args(messages.FromEngine)]
    assert len(kinds) == 12
    for kind in kinds:
        assert kind.__dataclass_params__.frozen, kind
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        assert not [n for n in names if "Callable" in str(hints[n])]
    assert repr(Cancel(3)) == "Cancel(ticket=3)"


def test_an_answer_is_pieces_and_then_its_end(door, loaded):
    thread, loop, submit = door
    job = submit(7, max_tokens=9, ignore_eos=True)
    *pieces, end = loop.until(Ended)
    assert {message.ticket for message in pieces} == {7} and end.ticket == 7
    assert [message.usage.new for message in pieces] == list(range(1, 10))
    assert (end.reason, end.stop, end.calls, end.metrics["new_tokens"]) == ("length", None, 0, 9)
    assert pieces[-1].usage.prompt == len(job.ids) == end.metrics["prompt_tokens"]
    text = "".join(piece.text for message in pieces for piece in message.pieces)
    assert text and text in loaded[1].decode(
        [step.token for m in pieces for p in m.pieces for step, _ in p.tokens]
    )
    assert thread.running == {} and len(thread.departed) == 1


def test_a_cancel_is_carried_out_between_two_steps_and_the_neighbour_goes_on(door):
    thread, loop, submit = door
    submit(1, max_tokens=250, ignore_eos=True)
    loop.until(Pieces)
    submit(2, max_tokens=5, ignore_eos=True)
    thread.put(Cancel(1))
    thread.put(Count(0))
    loop.until(Taken)
    later = loop.until(Ended)
    assert {message.ticket for message in later} == {2}
    thread.put(Count(1))
    counts = loop.until(Taken)[-1].found
    assert (counts["requests_running"], counts["pages_free"]) == (0, counts["pages"])


def test_questions_are_answered_also_while_nothing_runs(door, monkeypatch):
    thread, loop, _ = door
    thread.put(Snapshot(5))
    (taken,) = loop.until(Taken)
    assert taken.question == 5 and taken.found["requests"] == []
    monkeypatch.setattr(engine_thread, "engine_counts", lambda engine: 1 / 0)
    thread.put(Count(6))
    (taken,) = loop.until(Taken)
    assert taken.question == 6 and isinstance(taken.found, ZeroDivisionError)


def test_a_refusal_of_the_engine_names_the_field(door, monkeypatch):
    thread, loop, submit = door
    room = thread.engine._room
    monkeypatch.setattr(thread.engine, "_room", lambda prompt, new: room(prompt, 10_000))
    submit(4, max_tokens=5)
    (failed,) = loop.until(Failed)
    assert (failed.ticket, failed.error.status, failed.error.param) == (4, 400, "messages")
    assert "pages" in str(failed.error)


def test_the_end_is_the_last_that_is_said(door):
    thread, loop, submit = door
    submit(1, max_tokens=250, ignore_eos=True)
    loop.until(Pieces)
    thread.put(End())
    *_, stopped = loop.until(Stopped)
    thread.join()
    assert stopped.lost is None and loop.said.empty()


def test_who_asks_a_thread_that_dies_is_told(loaded):
    """They would wait for ever."""

    async def asks():
        client = EngineClient(Engine(loaded[0], pages=4), 1, Here())  # its thread is not started
        asked = asyncio.create_task(client.ask(Count))
        (ticket,) = client.admission.open()
        await asyncio.sleep(0)
        client._receive([Stopped(None)])
        with pytest.raises(ApiError, match="its log says why"):
            await asked
        assert ticket.events.get_nowait() == ticket.end and ticket.end.error.status == 500
        with pytest.raises(ApiError, match="engine has failed"):
            await client.ask(Snapshot)

    asyncio.run(asks())
