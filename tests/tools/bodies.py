"""What others wait for beside bodies of 4 MB: `.venv/bin/python tests/tools/bodies.py [--rounds 5] [--seconds 4]`.

A real server of the bundled model. One process asks /health every 20 ms, one streams an answer, and every other phase
a third one sends bodies of 4 MB, which are refused, one after another. The table has the least figure of all rounds:
other programs of the machine make a round slower, never faster.
"""

import argparse
import http.client
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "a b c d " * 490_000
USER = {"role": "user", "content": "a"}
BODIES = {  # name → (address, body)
    "a chat of one text": (CHAT, {"messages": [USER | {"content": WORDS}]}),
    "a completion": (TEXT, {"prompt": WORDS}),
    "100,000 messages": (CHAT, {"messages": [USER] * 100_000}),
    "an unknown list": (TEXT, {"prompt": "Hi", "max_tokens": 1, "x": ["a"] * 700_000}),
}


def health(port: int) -> Iterator[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        yield time.perf_counter() - began
        time.sleep(0.02)


def tokens(port: int) -> Iterator[float]:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        asked = {"messages": [USER], "max_tokens": 400, "ignore_eos": True, "stream": True}
        connection.request("POST", CHAT, json.dumps(asked))
        before = 0.0
        for line in connection.getresponse():
            now = time.perf_counter()
            if before and line.startswith(b"data: {"):
                yield now - before
            before = now * line.startswith(b"data: {") or before
        connection.close()


def sent(port: int, path: str, body: bytes) -> Iterator[float]:
    while True:
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", path, body)
        connection.getresponse().read()
        connection.close()
        yield time.perf_counter() - began


def collect(pipe, seconds: float, source: Callable[..., Iterator[float]], *more) -> None:
    """Send the milliseconds that `source` gives in so many seconds."""
    until = time.perf_counter() + seconds
    found = []
    for one in source(*more):
        found.append(1_000 * one)
        if time.perf_counter() > until:
            break
    pipe.send(found)


def phase(seconds: float, sources: list[tuple]) -> list[list[float]]:
    """The milliseconds of each source, all at once, each in a process."""
    running = []
    for source in sources:
        ours, theirs = multiprocessing.Pipe()
        one = multiprocessing.Process(target=collect, args=(theirs, seconds, *source))
        one.start()
        running.append((ours, one))
    found = [pipe.recv() for pipe, _ in running]
    for _, one in running:
        one.join()
    return found


def p50_p99(times: list[float]) -> tuple[float, float]:
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def shown(rounds: list[tuple[float, float]]) -> str:
    """The least p50 and the least p99 of the rounds."""
    return ", ".join(f"{min(column):.0f}" for column in zip(*rounds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    command = [sys.executable, "-m", "nanokv", "serve", "-m", "tiny", "--port", "0"]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root) as server:
        port = next(
            int(found[1])
            for line in server.stderr
            if (found := re.search(r"ready: \S+:(\d+)/v1", line))
        )
        try:
            measure(port, given.rounds, given.seconds)
        finally:
            server.terminate()


def measure(port: int, rounds: int, seconds: float) -> None:
    others = [(health, port), (tokens, port)]
    print(f"{'ms: p50, p99':20} {'/health':>9} {'a stream':>9} {'the body':>9}")
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for _ in range(rounds):
        alone = phase(seconds, others)
        found.setdefault("nothing", [[], []])
        for name, times in zip(found["nothing"], alone, strict=True):
            name.append(p50_p99(times))
        for name, (path, body) in BODIES.items():
            data = json.dumps(body).encode()
            beside = phase(seconds, [*others, (sent, port, path, data)])
            kept = found.setdefault(name, [[], [], []])
            for one, times in zip(kept, beside, strict=True):
                one.append(p50_p99([*times, *times[:1]]))
    for name, columns in found.items():
        print(f"{name:20} " + " ".join(f"{shown(column):>9}" for column in columns))


if __name__ == "__main__":
    main()
