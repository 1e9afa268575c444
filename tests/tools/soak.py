"""A soak of `nanokv serve`: `make soak`, or `python tests/tools/soak.py [--minutes 30] [--clients 24] [--seed 0]`.

A real server process of the bundled model in fp32, and clients that come one after another without a pause. Some ask,
in each of the server's APIs, and compare the answer with the one of `nanokv.generate`, computed beforehand. Others
leave at any byte, read slowly or not at all, send half a request, 10 MB, a text that no context holds, bytes that are
no HTTP, or a wrong key. One of three keys has most of the clients. After a quarter of the time the server is killed
(SIGKILL) and started again at the same port. At the end the clients stop and the server is asked to end.

The table counts how each kind of client fared; below it stand memory, pages and restart. Exit code 1 if an answer was
wrong, lost or late, if pages are still taken, or if the memory of the second server has changed by more than 2 %
(`--flat`) between the middle and the last third of its time.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.abc
import httpx2
import psutil

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
KEYS = ("soak-one", "soak-two", "soak-three")
SHARES = (6, 1, 1)  # of the clients
MOST_COUNTED = 1_600  # characters: at most 2,304 tokens of a text are counted in this pool
PATIENCE_S = 60.0  # the longest that any client may wait; a body may take 30
BODY_S = 35.0  # after which the server has sent away who does not send its body
START_S = 120.0
SAMPLES = 9  # of the memory, at least
LONGER_S = 180.0  # so long may a soak go on beyond its time
# One place fewer than clients, so that few of them are refused; fewer pages than 16 answers need.
FLAGS = ("--dtype", "float32", "--running", "16", "--queue", "7", "--pages", "36", "--port")
BROKEN = (
    httpx2.TransportError,
    OSError,
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
)
# The last three are failures.
OUTCOMES = ("as expected", "left", "busy", "cut", "wrong", "lost", "hung")
FINE, LEFT, BUSY, CUT, WRONG, LOST, HUNG = OUTCOMES


class Unexpected(Exception):
    """An answer that is not the right one."""


def expect(right: bool, found: object) -> None:
    if not right:
        raise Unexpected(str(found)[:300])


# --- the right answers ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Question:
    """Fields of a request, and what its answer must be."""

    fields: dict
    text: str
    reason: str
    prompt: int  # tokens

    def body(self, path: str, stream: bool = False) -> dict:
        """The request in the form of this API."""
        fields = self.fields
        if path == RESPONSES:
            fields = {
                "input": fields["messages"],
                "max_output_tokens": fields["max_tokens"],
            }
        return fields | {"stream": stream}


LONG_TOKENS = 500  # of a prompt


def questions() -> list[Question]:
    """Facts, sums, long talks, and stories that a seed draws; so that answers of others are told apart."""
    import torch

    import nanokv

    torch.set_num_threads(1)
    model, tokenizer = nanokv.load("tiny", dtype=torch.float32)
    names = ("Zorbla", "Mira", "Tom", "Anna", "Otto", "Lena", "Ben", "Ida")
    talk = [
        f"My name is {names[0]}.",
        "Nice to meet you.",
        "Tell me a story about a cat.",
        "The cat sat by the bag.",
    ]
    asked: list[tuple[list[str], dict]] = [
        ([f"My name is {name}. What is my name?"], {}) for name in names
    ]
    asked += [([f"What is {number} + {number + 2}?"], {}) for number in range(8)]
    asked += [([*talk * (1 + number), f"What is {number} + 1?"], {}) for number in range(6)]
    asked += [(["Tell me a story."], {"temperature": 1.0, "seed": seed}) for seed in range(10)]
    asked += [
        ([f"My name is {name}.", "Hello.", *talk[2:] * 16, f"What is {number} + 2?"], {})
        for number, name in enumerate(names)
    ]
    found = []
    for turns, sampling in asked:
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)
        ]
        ids = tokenizer.encode(tokenizer.render(messages))
        tokens = list(nanokv.generate(model, ids, max_new_tokens=40, **sampling))
        ended = tokens[-1] in model.generation_config.eos_token_ids
        text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
        fields = {"messages": messages, "max_tokens": 40} | sampling
        found.append(Question(fields, text, "stop" if ended else "length", len(ids)))
    return found


# --- the server -------------------------------------------------------------------------------------------------------


class Server:
    """`nanokv serve` as a process; `log` is its stderr."""

    def __init__(self, log: Path, port: int = 0):
        self.log = log
        flags = [part for key in KEYS for part in ("--api-key", key)]
        command = [sys.executable, "-m", "nanokv", "serve", "-m", "tiny", *flags, *FLAGS, str(port)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # The same code from the first request to the last.
        environment |= {"NANOKV_KERNELS": "explicit"}
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                command, stderr=errors, stdout=subprocess.DEVNULL, env=environment
            )
        self.port = self._ready()

    def _ready(self) -> int:
        until = time.monotonic() + START_S
        while not (
            found := re.search(
                r"ready: http://127\.0\.0\.1:(\d+)/v1", self.log.read_text(errors="replace")
            )
        ):
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(
                    f"the server did not start:\n{self.log.read_text(errors='replace')}"
                )
            time.sleep(0.05)
        return int(found[1])

    def memory(self) -> int:
        """Bytes: the proportional set size where the system knows it."""
        process = psutil.Process(self.process.pid)
        return getattr(process.memory_full_info(), "pss", 0) or process.memory_info().rss

    def metrics(self) -> dict[str, float]:
        """What /metrics says."""
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        text = httpx2.get(
            f"http://127.0.0.1:{self.port}/metrics", headers=headers, timeout=PATIENCE_S
        ).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("nanokv_"): float(value) for name, value in lines}


# --- clients: each returns how it fared, or raises --------------------------------------------------------------------


class Clients:
    """What they share: the address, the questions, and a generator of their own each."""

    def __init__(self, port: int, known: list[Question]):
        self.port, self.until = port, 0.0
        self.lengthy = [question for question in known if question.prompt >= LONG_TOKENS]
        self.known = [question for question in known if question.prompt < LONG_TOKENS]
        # The form of the other APIs has no seed.
        self.greedy = [question for question in self.known if "seed" not in question.fields]
        self.http = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=None, trust_env=False
        )

    def post(self, rng: random.Random, path: str, body: dict, **more):
        headers = {"Authorization": f"Bearer {key(rng)}"}
        return self.http.stream("POST", path, json=body, headers=headers, **more)

    def raw(self, rng: random.Random, path: str, body: bytes, length: int | None = None) -> bytes:
        """A whole request in bytes; `length`: what its header says instead of the truth."""
        length = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key(rng)}\r\n"
        return f"{head}Content-Length: {length}\r\n\r\n".encode() + body

    async def connect(self) -> anyio.abc.SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def whole(self, rng: random.Random) -> str:
        """Asks and compares."""
        return await self.compared(rng, rng.choice(self.known))

    async def long(self, rng: random.Random) -> str:
        """A prompt of many steps, while others stream."""
        return await self.compared(rng, rng.choice(self.lengthy))

    async def compared(self, rng: random.Random, question: Question) -> str:
        async with self.post(rng, CHAT, question.fields) as response:
            found = json.loads(await response.aread())
        if response.status_code == 429:
            return busy(response)
        expect(response.status_code == 200, found)
        (choice,) = found["choices"]
        same = (choice["message"]["content"], choice["finish_reason"]) == (
            question.text,
            question.reason,
        )
        expect(same and found["usage"]["prompt_tokens"] == question.prompt, (question, found))
        return FINE

    async def responses(self, rng: random.Random) -> str:
        """Asks in the form of OpenAI's Responses, whole or as a stream, and compares."""
        return await self.formed(rng, RESPONSES, response_of, said_by_response)

    async def messages(self, rng: random.Random) -> str:
        """Asks in Anthropic's form, whole or as a stream, and compares."""
        return await self.formed(rng, MESSAGES, message_of, said_by_message)

    async def formed(
        self,
        rng: random.Random,
        path: str,
        joined: Callable[[list[dict]], dict],
        said: Callable[[dict], tuple[str, str, int]],
    ) -> str:
        """`joined`: the events of a stream → the whole answer; `said`: what that says."""
        question, stream = rng.choice(self.greedy), rng.random() < 0.5
        async with self.post(rng, path, question.body(path, stream)) as response:
            if response.status_code == 429:
                return busy(response)
            if stream:
                found = joined(await data_of(response))
            else:
                found = json.loads(await response.aread())
        expect(response.status_code == 200, found)
        right = (question.text, question.reason, question.prompt)
        expect(said(found) == right, (question, found))
        return FINE

    async def counts(self, rng: random.Random) -> str:
        """Asks how many tokens a prompt has, in both forms."""
        question = rng.choice(self.known)
        path, form = rng.choice(
            ((f"{MESSAGES}/count_tokens", MESSAGES), (f"{RESPONSES}/input_tokens", RESPONSES))
        )
        body = question.body(form)
        del body["stream"]
        async with self.post(rng, path, body) as response:
            found = json.loads(await response.aread())
        if response.status_code == 429:
            return busy(response)
        expect(found.get("input_tokens") == question.prompt, (path, question, found))
        return FINE

    async def absolute(self, rng: random.Random) -> str:
        """The target is a whole URL, and the Host header another one's, as a proxy's clients may write it."""
        question = rng.choice(self.known)
        target = f"http://127.0.0.1:{self.port}{CHAT}"
        data = self.raw(rng, target, json.dumps(question.fields).encode())
        data = data.replace(b"Host: localhost", b"Host: example.com\r\nConnection: close", 1)
        found = b""
        async with await self.connect() as connection:
            await connection.send(data)
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    found += await connection.receive()
        head, _, body = found.partition(b"\r\n\r\n")
        if not body:
            raise httpx2.ReadError("no answer")
        if b" 429 " in head.split(b"\r\n")[0]:
            expect(b"retry-after: " in head.lower(), head)
            return BUSY
        expect(b" 200 " in head.split(b"\r\n")[0], found)
        text = json.loads(body)["choices"][0]["message"]["content"]
        expect(text == question.text, (question, text))
        return FINE

    async def overlong(self, rng: random.Random) -> str:
        """A body of nearly 4 MB: its bytes say that no context holds it, so nothing tokenizes it."""
        text = rng.choice("abcdefgh") * 3_900_000
        path = rng.choice((CHAT, MESSAGES, RESPONSES))
        asked = Question(
            {"messages": [{"role": "user", "content": text}], "max_tokens": 4}, "", "", 0
        )
        async with self.post(rng, path, asked.body(path, rng.random() < 0.5)) as response:
            found = await response.aread()
        if response.status_code == 429:
            return busy(response)
        expect(response.status_code == 400 and b" bytes, which are at least " in found, found)
        return FINE

    async def stream(self, rng: random.Random) -> str:
        """Reads a stream, every other one slowly, and compares."""
        question, nap = rng.choice(self.known), rng.choice((0, rng.random() / 20))
        text, reason, events = "", None, []
        async with self.post(rng, CHAT, question.fields | {"stream": True}) as response:
            if response.status_code == 429:
                return busy(response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    expect("error" not in event, event)
                    (choice,) = event["choices"]
                    text, reason = (
                        text + (choice["delta"].get("content") or ""),
                        choice["finish_reason"],
                    )
                    await anyio.sleep(nap)
                events += [line] if line else []
        if not events or events[-1] != "data: [DONE]":
            raise httpx2.ReadError("the stream ended too early")
        expect((text, reason) == (question.text, question.reason), (question, text, reason))
        return FINE

    async def cancels(self, rng: random.Random) -> str:
        """Leaves after a few events of an answer that would go on."""
        path = rng.choice((CHAT, CHAT, RESPONSES, MESSAGES))
        fields = rng.choice(self.greedy).body(path, stream=True)
        if path == CHAT:
            fields |= {"ignore_eos": True, "max_tokens": 300}
        count = rng.randrange(12)
        async with self.post(rng, path, fields) as response:
            if response.status_code == 429:
                return busy(response)
            async for line in response.aiter_lines():
                count -= bool(line)
                if count < 0:
                    break
        return LEFT

    async def leaves(self, rng: random.Random) -> str:
        """Closes after any byte of its request, or of the answer."""
        path = rng.choice((CHAT, CHAT, RESPONSES, MESSAGES))
        body = rng.choice(self.greedy).body(path, rng.random() < 0.5)
        data = self.raw(rng, path, json.dumps(body).encode())
        at = rng.choice((rng.randrange(len(data)), len(data)))
        async with await self.connect() as connection:
            await connection.send(data[:at])
            await anyio.sleep(rng.random() / 10)
            if at == len(data) and rng.random() < 0.5:
                await connection.receive(rng.randrange(1, 1_000))
        return LEFT

    async def half(self, rng: random.Random) -> str:
        """Sends half a body and waits: most go, some stay until they are sent away."""
        data = self.raw(rng, rng.choice((CHAT, "/tokenize")), b'{"prompt": "', 100)
        async with await self.connect() as connection:
            await connection.send(data)
            if rng.random() < 0.9 or time.monotonic() + BODY_S > self.until:
                await anyio.sleep(rng.random() * 2)
                return LEFT
            expect(b" 408 " in (found := await connection.receive()), found)
            return FINE

    async def garbage(self, rng: random.Random) -> str:
        """Bytes that are no HTTP, or a request with a few wrong bytes."""
        data = bytearray(self.raw(rng, CHAT, b'{"messages": []}'))
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.5:
            data = bytearray(rng.randbytes(rng.randrange(1, 3_000)) + b"\r\n\r\n")
        async with await self.connect() as connection:
            await connection.send(bytes(data))
            with anyio.move_on_after(2):
                found = await connection.receive()
                expect(re.match(rb"HTTP/1\.1 (4\d\d|503) ", found), found)
                return FINE
        return LEFT  # a wrong length: the server waits for the rest

    async def large(self, rng: random.Random) -> str:
        """A body of 10 MB."""
        async with self.post(rng, CHAT, {"prompt": "x" * 10_000_000}) as response:
            expect(response.status_code == 413, response)
            await response.aread()
        return FINE

    async def stranger(self, rng: random.Random) -> str:
        """Has no right key."""
        headers = {"Authorization": f"Bearer {rng.choice(('wrong', 'soak', 'soak-one1'))}"}
        response = await self.http.post(CHAT, json=rng.choice(self.known).fields, headers=headers)
        expect(response.status_code == 401, response)
        return FINE

    async def tokenizes(self, rng: random.Random) -> str:
        """There and back, for a text of any length that is counted."""
        text = "".join(
            rng.choice("The cat sat by the bag. Ünïcödé ☃ 🧑")
            for _ in range(rng.randrange(1, MOST_COUNTED))
        )
        body: dict = {"prompt": text}
        for path, name in (("/tokenize", "tokens"), ("/detokenize", "prompt")):
            async with self.post(rng, path, body) as response:
                found = json.loads(await response.aread())
            if response.status_code == 429:
                return busy(response)
            expect(response.status_code == 200, found)
            body = {name: found[name]}
        expect(body["prompt"] == text, "another text")
        return FINE

    async def unread(self, rng: random.Random) -> str:
        """Asks for 500 KB and reads none of it, then goes."""
        data = self.raw(rng, "/tokenize", json.dumps({"prompt": "cat " * 50_000}).encode())
        async with await self.connect() as connection:
            await connection.send(data)
            await anyio.sleep(rng.random() * 3)
        return LEFT


def key(rng: random.Random) -> str:
    """One of the keys, by its share of the clients."""
    return rng.choices(KEYS, SHARES)[0]


async def data_of(response: httpx2.Response) -> list[dict]:
    """The events of a stream."""
    events = [
        json.loads(line.removeprefix("data: "))
        async for line in response.aiter_lines()
        if line.startswith("data: {")
    ]
    expect(not any(event["type"] == "error" for event in events), events)
    return events


def response_of(events: list[dict]) -> dict:
    """The response of the last event, whose text the deltas before it must have."""
    if not events or events[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise httpx2.ReadError("the stream ended too early")
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    whole = [event["text"] for event in events if event["type"] == "response.output_text.done"]
    expect("".join(deltas) == "".join(whole), (deltas, whole))
    return events[-1]["response"]


def message_of(events: list[dict]) -> dict:
    """The message that the events of a stream build."""
    if not events or events[-1]["type"] != "message_stop":
        raise httpx2.ReadError("the stream ended too early")
    found: dict = {}
    for event in events:
        match event["type"]:
            case "message_start":
                found = event["message"]
            case "content_block_delta":
                found["content"].append(event["delta"])
            case "message_delta":
                found |= event["delta"]
    return found


def said_by_response(found: dict) -> tuple[str, str, int]:
    """(text, the chat's word for why it ended, tokens of the prompt)"""
    parts = [part for item in found["output"] for part in item["content"]]
    text = "".join(part["text"] for part in parts if part["type"] == "output_text")
    reason = {"completed": "stop", "incomplete": "length"}[found["status"]]
    return text, reason, found["usage"]["input_tokens"]


def said_by_message(found: dict) -> tuple[str, str, int]:
    """(text, the chat's word for why it ended, tokens of the prompt)"""
    text = "".join(block["text"] for block in found["content"])
    reason = {"end_turn": "stop", "max_tokens": "length"}[found["stop_reason"]]
    usage = found["usage"]
    return text, reason, usage["input_tokens"] + usage["cache_read_input_tokens"]


def busy(response) -> str:
    """A 429 that says when to come back."""
    expect(int(response.headers["retry-after"]) >= 1, response.headers)
    return BUSY


KINDS = {  # how often each comes
    Clients.whole: 60,
    Clients.stream: 60,
    Clients.long: 6,
    Clients.responses: 30,
    Clients.messages: 30,
    Clients.absolute: 10,
    Clients.counts: 10,
    Clients.overlong: 2,
    Clients.cancels: 30,
    Clients.leaves: 40,
    Clients.half: 6,
    Clients.garbage: 20,
    Clients.large: 2,
    Clients.stranger: 10,
    Clients.tokenizes: 10,
    Clients.unread: 4,
}
ANSWERED = ("whole", "stream", "long", "responses", "messages", "absolute", "counts")
Kind = Callable[[Clients, random.Random], Awaitable[str]]


# --- the soak ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What is judged."""

    tallies: dict[str, collections.Counter]
    memory: list[int]  # of the second server, one a second
    metrics: dict[str, float]  # of the second server, at the end
    exit_code: int
    log: str
    restart_s: float
    seconds: float
    answers: int  # different ones
    flat: float = 0.02  # by how much the memory may change
    notes: list[str] = dataclasses.field(default_factory=list)  # of failures

    def thirds(self) -> list[float]:
        """Bytes of memory: the medians of the middle and the last third of the time. The first one warms up."""
        third = len(self.memory) // 3
        return [
            statistics.median(part)
            for part in (self.memory[third : 2 * third], self.memory[2 * third :])
        ]

    def growth(self) -> float:
        """Of the memory."""
        middle, last = self.thirds()
        return last / middle - 1

    def failures(self) -> list[str]:
        """In words; none is a pass."""
        total = sum(self.tallies.values(), collections.Counter())
        found = [
            f"{total[outcome]:,} {outcome}" for outcome in (WRONG, LOST, HUNG) if total[outcome]
        ]
        found += [
            f"no client {kind} fared as expected"
            for kind in ANSWERED
            if not self.tallies[kind][FINE]
        ]
        if taken := int(self.metrics["pages"] - self.metrics["pages_free"]):
            found.append(f"{taken:,} pages leaked")
        if left := int(self.metrics["requests_running"] + self.metrics["requests_waiting"]):
            found.append(f"{left:,} requests left in the engine")
        if abs(self.growth()) > self.flat:
            found.append(f"memory changed by {self.growth():+.1%}")
        if self.exit_code != 143:
            found.append(f"exit code {self.exit_code} after SIGTERM")
        words = ("Traceback", "Exception", "failed", "Fatal", "was never")
        found += [
            f"log: {line}" for line in self.log.splitlines() if any(word in line for word in words)
        ][:5]
        return found + self.notes

    def table(self) -> str:
        """Kinds of clients by outcome, then the figures."""
        rows = [["client", "came", *OUTCOMES]]
        for name, tally in [
            *self.tallies.items(),
            ("all", sum(self.tallies.values(), collections.Counter())),
        ]:
            rows.append(
                [name, f"{tally.total():,}", *(f"{tally[outcome]:,}" for outcome in OUTCOMES)]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))])
            for row in rows
        ]
        middle, last = (size / 1e6 for size in self.thirds())
        names = (
            "pages",
            "pages_free",
            "preemptions_total",
            "generated_tokens_total",
            "prefix_hit_tokens_total",
        )
        pages, free, preempted, generated, reused = (int(self.metrics[name]) for name in names)
        return "\n".join(
            [
                *lines,
                "",
                f"{self.seconds:,.0f} s; {self.answers} different right answers; after SIGKILL ready again in "
                f"{self.restart_s:.1f} s",
                f"memory of the second server: {middle:.1f} MB in its middle third, {last:.1f} MB in its last, "
                f"{self.growth():+.2%}",
                f"pages: {pages:,}, leaked: {pages - free:,}, preemptions: {preempted:,}",
                f"tokens: {generated:,} generated, {reused:,} reused",
            ]
        )


class Soak:
    """Clients, the server, and when it was down."""

    def __init__(self, known: list[Question], folder: Path, seed: int):
        self.folder, self.seed = folder, seed
        self.server = Server(folder / "first.log")
        self.clients = Clients(self.server.port, known)
        self.tallies: dict[str, collections.Counter] = {
            kind.__name__: collections.Counter() for kind in KINDS
        }
        self.memory: list[int] = []
        self.notes: list[str] = []
        self.down, self.up, self.over = float("inf"), float("inf"), False

    async def one(self, kind: Kind, rng: random.Random) -> str:
        """A client of this kind; how it fared."""
        began, outcome = time.monotonic(), HUNG
        try:
            with anyio.move_on_after(PATIENCE_S):
                outcome = await kind(self.clients, rng)
        except Unexpected as error:
            outcome = WRONG
            self.notes.append(f"{kind.__name__}: {error}")
        except BROKEN as error:
            outcome = CUT if began < self.up and time.monotonic() > self.down else LOST
            if outcome == LOST:
                self.notes.append(f"{kind.__name__}: {type(error).__name__} {error}")
        self.tallies[kind.__name__][outcome] += 1
        return outcome

    async def visitor(self, number: int) -> None:
        """One client after another, until the time is over."""
        rng = random.Random(f"{self.seed} {number}")
        while not self.over:
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            if await self.one(kind, rng) in (BUSY, CUT):
                await anyio.sleep(1 + rng.random())  # as Retry-After says, and tries again
            while self.down < time.monotonic() < self.up and not self.over:
                await anyio.sleep(0.1)

    async def kill(self) -> float:
        """SIGKILL, and a new server at the same port → seconds until it was ready."""
        self.down = time.monotonic()
        self.server.process.kill()
        await anyio.to_thread.run_sync(self.server.process.wait)
        self.server = await anyio.to_thread.run_sync(
            Server, self.folder / "second.log", self.server.port
        )
        self.up = time.monotonic()
        return self.up - self.down

    async def run(self, seconds: float, count: int) -> Result:
        """All of it."""
        began = time.monotonic()
        self.clients.until = began + seconds
        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(self.visitor, number)
            await anyio.sleep(seconds / 4)
            restart_s = await self.kill()
            while self.goes_on(began + seconds):
                self.memory.append(await anyio.to_thread.run_sync(self.server.memory))
                await anyio.sleep(1 if seconds > 100 else 0.25)
            self.over = True
        await self.clients.http.aclose()
        metrics = await anyio.to_thread.run_sync(self.quiet)
        self.server.process.terminate()
        exit_code = await anyio.to_thread.run_sync(self.server.process.wait)
        known = self.clients.known + self.clients.lengthy
        answers = len({question.text for question in known})
        log = "".join(
            (self.folder / name).read_text(errors="replace") for name in ("first.log", "second.log")
        )
        return Result(
            self.tallies,
            self.memory,
            metrics,
            exit_code,
            log,
            restart_s,
            time.monotonic() - began,
            answers,
            notes=self.notes[:5],
        )

    def goes_on(self, until: float) -> bool:
        """Until the time is over; on a busy machine until each kind was answered, for LONGER_S at most."""
        now = time.monotonic()
        missing = not all(self.tallies[kind][FINE] for kind in ANSWERED)
        few = missing and now < until + LONGER_S
        return now < until or len(self.memory) < SAMPLES or few

    def quiet(self) -> dict[str, float]:
        """The metrics, once nothing runs any more; those of a request that never ends show it."""
        until = time.monotonic() + 10
        while (found := self.server.metrics())["requests_running"] and time.monotonic() < until:
            time.sleep(0.1)
        return found


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--flat",
        type=float,
        default=2.0,
        help="percent by which the memory may change (default: 2)",
    )
    args = parser.parse_args(arguments)
    known = questions()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        soak = Soak(known, Path(folder), args.seed)
        stack.callback(lambda: soak.server.process.kill())
        result = anyio.run(soak.run, args.minutes * 60, args.clients)
    result.flat = args.flat / 100
    failures = result.failures()
    print(result.table())
    print(
        "".join(f"FAILED {line}\n" for line in failures) or "passed", end="" if failures else "\n"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
