"""A real server on a free port of 127.0.0.1, in a thread of the test: engine, uvicorn and sockets are what a user has.

with Serving(model, tokenizer) as server:
    server.post("/v1/chat/completions", {...})      (status, JSON)
    server.client()                                 the official openai client
    with server.held(): ...                         the engine computes nothing meanwhile
"""

import asyncio
import contextlib
import http.client
import json
import threading
import time

import openai

from nanokv.apps.serve.api.prompts import Served
from nanokv.apps.serve.http.app import make_app
from nanokv.apps.serve.http.security import Hosts, Keys
from nanokv.apps.serve.http.server import Server, listen, url
from nanokv.apps.serve.run.engine_client import EngineClient
from nanokv.apps.serve.run.prefill import Here
from nanokv.decoding.draw import SamplingParams
from nanokv.engine import Engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATIENCE_S = 20
FIELDS = {  # ours beside OpenAI's
    "stop_reason",
    "timings",
    "seed",
    "reasoning_content",
    "max_model_len",
    "hint",
}


class Serving:
    """`with Serving(model, tokenizer, …) as server`; `options` are those of Served and of the engine."""

    def __init__(
        self,
        model,
        tokenizer,
        keys=(),
        queue=64,
        limits=None,
        grace=5.0,
        pages=200,
        page_size=4,
        running=8,
        context=512,
        sampling=None,
        names=("tiny", "alias"),
        hosts=(),
        origins=(),
        connections=1_000,
        step_tokens=256,
        prefix="hash",
        prefills=lambda engine: Here(),
        **served,
    ):
        self.engine = Engine(model, pages, page_size, step_tokens, running, prefix=prefix)
        self.bound = listen("127.0.0.1", 0)
        self.url, self.port = url(self.bound), self.bound.getsockname()[1]
        self.served = Served(
            self.engine, tokenizer, names, context, sampling or SamplingParams(), **served
        )
        self.prefills = prefills(self.engine)
        self.engine_client = EngineClient(self.engine, queue, self.prefills)
        self.admission = self.engine_client.admission
        self.app = make_app(
            self.served, self.engine_client, Hosts("127.0.0.1", hosts, origins), Keys(keys), limits
        )
        self.stop, self.hurry = threading.Event(), threading.Event()
        self.ready, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.server = Server(
            self.app,
            self.engine_client,
            self.stop.is_set,
            self.hurry.is_set,
            grace,
            self.ready.set,
            connections,
        )
        self.steps, step = 0, self.engine.step

        def gated():
            assert self.gate.wait(PATIENCE_S), "nobody has opened the gate"
            self.steps += 1
            return step()

        self.engine.step = gated
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        asyncio.run(self.server.serve(sockets=[self.bound]))

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *exception):
        self.gate.set()
        self.stop.set()
        self.hurry.set()
        self.thread.join(PATIENCE_S)
        self.bound.close()
        assert not self.thread.is_alive(), "the server does not end"

    @contextlib.contextmanager
    def held(self):
        """The engine waits before its next step."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def wait(self, condition):
        """Until condition() is true."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, "waited in vain"
            time.sleep(0.005)

    @property
    def tickets(self) -> list:
        """Of all answers that have a place."""
        return list(self.admission.tickets.values())

    @property
    def requests(self) -> list:
        """What the engine has of them."""
        return [answer.request for answer in self.engine_client.thread.running.copy().values()]

    @property
    def entered(self) -> bool:
        """Some answers have a place, and the engine has all of them."""
        return 0 < len(self.tickets) == len(self.requests)

    @property
    def free(self) -> bool:
        """No request has a place, and all pages can be had."""
        pool = self.engine.pool
        thread = self.engine_client.thread
        idle = self.engine.idle and not (self.tickets or thread.running or thread.asides)
        return idle and pool.available() == len(pool.references)

    def client(self, key="any", **options) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S, **options
        )

    def send(self, method, path, body=None, headers=None) -> http.client.HTTPConnection:
        """The connection after the request has gone out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        return connection

    def raw(self, method, path, body=None, headers=None):
        """(status, headers, body)"""
        connection = self.send(method, path, body, headers)
        with contextlib.closing(connection):
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def get(self, path, headers=None):
        status, _, data = self.raw("GET", path, headers=headers)
        return status, json.loads(data)

    def post(self, path, body, headers=None):
        status, _, data = self.raw("POST", path, body, headers)
        return status, json.loads(data)

    def stream(self, path, body, headers=None) -> list[str]:
        """What stands between the blank lines of the whole stream."""
        status, found, data = self.raw("POST", path, body | {"stream": True}, headers)
        assert status == 200 and found["content-type"] == "text/event-stream; charset=utf-8", data
        *events, end = data.decode().split("\n\n")
        assert end == ""
        return events


def chunks(events: list[str]) -> list[dict]:
    """The JSON of the events, without comments; the last one must be [DONE]."""
    said = [event.removeprefix("data: ") for event in events if not event.startswith(":")]
    assert said[-1] == "[DONE]" and said.count("[DONE]") == 1
    return [json.loads(event) for event in said[:-1]]


def ask(text="Who are you?", **fields) -> dict:
    """A request of one message."""
    return {"messages": [{"role": "user", "content": text}]} | fields


def named_events(found: list[str]) -> list[dict]:
    """The JSON of events whose type is also their name; comments are left out."""
    told = []
    for event in found:
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def error(found: dict) -> dict:
    """The error of a body, which must have OpenAI's form."""
    assert set(found) <= {"error", "hint"} and list(found["error"]) == [
        "message",
        "type",
        "param",
        "code",
    ], found
    told = found["error"]
    assert isinstance(told["message"], str) and told["message"] and isinstance(told["type"], str)
    assert all(told[name] is None or isinstance(told[name], str) for name in ("param", "code"))
    return told


def extras(value) -> set[str]:
    """Fields that the openai package does not know, at any depth."""
    found = set(value.model_extra or {})
    for name in type(value).model_fields:
        inner = getattr(value, name)
        for part in inner if isinstance(inner, list) else [inner]:
            found |= extras(part) if hasattr(part, "model_extra") else set()
    return found


def strict(kind, value: dict):
    """Validated by the openai package's own types, which take a text for no number and miss no field."""
    found = kind.model_validate_json(json.dumps(value), strict=True)
    assert extras(found) <= FIELDS
    return found
