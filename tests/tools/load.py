"""Load: `nanokv serve` beside `transformers serve` and llama.cpp's llama-server, on the same weights.

By hand, `make load`; minutes. The servers take turns, each in a process of its own, and one runs at a time.

    make load                                                 nanokv alone, on the bundled model
    make load ARGS="--model smollm2 --servers nanokv,transformers,llama.cpp --llama-server PATH"
    make load ARGS="--scenario long"                          8 clients decode while one sends long prompts
    make load ARGS="--scenario long --flags='--step-tokens 256'"    the same with flags of `nanokv serve`
    make load ARGS="--scenario many"                          10,000 small requests, each answer known beforehand

The scenario `clients` is driven by guidellm, which lives in an environment of its own in the user's cache. That one
sees this environment's packages, so torch is there once. The other two look at every token or every answer, which
guidellm does not report, so they ask through the official client. All is greedy, and no answer ends early: an answer
that does not have all its tokens counts as failed. docs/serve.md says how llama-server is built.

Exit code 1 if nanokv failed a request, lost one or mixed two up, or broke the bound of `long`.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai

import nanokv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import real_model

# The generator; what transformers serve asks for.
PINS = ("guidellm==0.8.1", "fastapi==0.165.0", "accelerate==1.15.0")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanokv-tests"
TINY = Path(nanokv.__file__).resolve().parents[1] / "weights_loader" / "checkpoints" / "tiny"
SERVERS = ("nanokv", "transformers", "llama.cpp")
WORDS = "time way year day thing world life hand part child eye place week case point number group fact".split()
LENGTHS = (8, 24, 48, 96)  # words of a prompt
PREFIXES, PREFIX_WORDS = 4, 48  # half of the prompts begin with one of four texts
LOADING_S = 300.0  # for a server to read its weights and answer once
# Of `long`: clients, and their tokens before the first long prompt.
DECODERS, ALONE = 8, 150
MOST_GAP = 4.0  # the 99th percentile beside long prompts, over that of the streams alone
# The bundled model repeats the number.
QUESTION, ANSWER_TOKENS = "I am {} years old. How old am I?", 12


class Unavailable(Exception):
    """Why a server has no row: one line."""


@dataclasses.dataclass(frozen=True)
class Server:
    """How one is started and asked. In `command`, {port} stands for the port."""

    name: str
    version: str
    command: list[str]
    model: str  # its name in a request
    extra: dict  # fields that only it knows
    environment: dict = dataclasses.field(default_factory=dict)

    def shown(self) -> str:
        """The command line, as it can be typed."""
        return " ".join(
            [*(f"{name}={value}" for name, value in self.environment.items()), *self.command]
        )


# --- what is installed and converted, once --------------------------------------------------------------------------


@contextlib.contextmanager
def made(path: Path) -> Iterator[Path | None]:
    """A place to make `path`, which then appears as a whole; None where it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f"{path.name}.lock", "w") as lock:  # of several processes one makes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            yield Path(folder) / path.name
            os.replace(Path(folder) / path.name, path)


def environment() -> Path:
    """The Python that has the generator: an environment that sees this one's packages and adds PINS."""
    here = sysconfig.get_paths()["purelib"]
    name = hashlib.sha256("\n".join([*PINS, here, sys.version]).encode()).hexdigest()[:12]
    python, ready = CACHE / f"load-{name}" / "bin" / "python", CACHE / f"load-{name}.ready"
    with made(ready) as new:
        if new:
            print(f"installing {', '.join(PINS)} into {python.parents[1]}", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", python.parents[1]], check=True)
            (site,) = python.parents[1].glob("lib/python*/site-packages")
            (site / "project.pth").write_text(here + "\n")
            pip = (
                python,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "install",
                "-q",
                "--no-input",
                *PINS,
            )
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                raise Unavailable(
                    f"pip install {' '.join(PINS)}: {done.stderr.strip().splitlines()[-1]}"
                )
            new.touch()
    return python


def source_of(model: str) -> Path:
    """tiny, smollm2, a GGUF file or a Hugging Face folder → where it lies."""
    if model == "smollm2":
        path, why = real_model.fetched(CACHE)
        if why:
            raise SystemExit(f"{real_model.NAME} cannot be fetched: {why}")
        return path
    path = TINY if model == "tiny" else Path(model).expanduser().resolve()
    if not path.exists():
        raise SystemExit(f"no model {model}: tiny, smollm2, a GGUF file or a Hugging Face folder")
    return path


def folder_of(source: Path) -> Path:
    """A Hugging Face folder of the model that names no end token, so that no answer ends early."""
    key = hashlib.sha256(f"{source}:{source.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    with made(CACHE / "load-weights" / f"{source.stem}-{key}") as new:
        if new and source.is_dir():
            shutil.copytree(source, new)
        elif new:
            command = [sys.executable, "-m", "nanokv", "convert", source, new, "--quiet"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for name in ("config.json", "generation_config.json") if new else ():
            file = new / name
            fields = json.loads(file.read_text()) if file.exists() else {}
            fields.pop("eos_token_id", None)
            file.write_text(json.dumps(fields, indent=2))
    return CACHE / "load-weights" / f"{source.stem}-{key}"


def bf16_gguf(source: Path, folder: Path) -> Path:
    """The same model as the folder for llama.cpp: its matrices in bf16."""
    path = folder.with_name(f"{folder.name}.BF16.gguf")
    with made(path) as new:
        if new:
            command = [sys.executable, "-m", "nanokv", "convert", source, new, "--quiet"]
            subprocess.run([*command, "--type", "bf16"], check=True, stdout=subprocess.DEVNULL)
    return path


# --- the servers ----------------------------------------------------------------------------------------------------


def nanokv_server(folder: Path, source: Path, options: argparse.Namespace) -> Server:
    """With room for every client at once."""
    pages = options.most * -(-options.context // 16)
    command = [
        sys.executable,
        "-m",
        "nanokv",
        "serve",
        "-m",
        str(folder),
        "--alias",
        "load",
        "--port",
        "{port}",
        "--dtype",
        options.dtype,
        "--threads",
        str(options.threads),
        "--context",
        str(options.context),
        "--running",
        str(options.most),
        "--queue",
        str(options.most),
        "--pages",
        str(pages),
        "--fast",
        "--quiet",
        *options.flags.split(),
    ]
    return Server("nanokv", nanokv.__version__, command, "load", {"ignore_eos": True})


def transformers_server(folder: Path, source: Path, options: argparse.Namespace) -> Server:
    """With continuous batching. It knows no ignore_eos and refuses the field; the folder names no end token."""
    import transformers

    blocks = options.most * -(-options.context // 32)
    command = [
        str(environment()),
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(folder),
        "--port",
        "{port}",
        "--device",
        "cpu",
        "--dtype",
        options.dtype,
        "--continuous-batching",
        "--cb-block-size",
        "32",
        "--cb-num-blocks",
        str(blocks),
    ]
    threads = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    return Server("transformers", transformers.__version__, command, str(folder), {}, threads)


def llama_server(folder: Path, source: Path, options: argparse.Namespace) -> Server:
    """One slot for every client, each with its own context."""
    program = shutil.which(options.llama_server)
    if program is None:
        raise Unavailable(
            f"no {options.llama_server}: --llama-server PATH, docs/serve.md says how it is built"
        )
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    found = re.search(r"version: (.+)", said.stdout + said.stderr)
    if options.dtype != "bfloat16":
        raise Unavailable(f"its weights are bfloat16 here, not {options.dtype}")
    command = [
        program,
        "-m",
        str(bf16_gguf(source, folder)),
        "--alias",
        "load",
        "--port",
        "{port}",
        "--threads",
        str(options.threads),
        "--threads-batch",
        str(options.threads),
        "--parallel",
        str(options.most),
        "-c",
        str(options.most * options.context),
    ]
    return Server(
        "llama.cpp",
        found[1] if found else "?",
        command,
        "load",
        {"ignore_eos": True, "cache_prompt": True},
    )


MAKERS = {"nanokv": nanokv_server, "transformers": transformers_server, "llama.cpp": llama_server}


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[str]:
    """Its address, while it runs: it is healthy and has answered once. Unavailable where it does not get so far."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, command = f"http://127.0.0.1:{port}", [part.format(port=port) for part in server.command]
    with open(log, "w") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
            env=os.environ | server.environment,
        )
    try:
        wait_until_healthy(url, child, log)
        warm(server, url)
        yield url
    finally:
        end(child)


def wait_until_healthy(url: str, child: subprocess.Popen, log: Path) -> None:
    """Until /health says 200."""
    until = time.monotonic() + LOADING_S
    while time.monotonic() < until:
        if child.poll() is not None:
            said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise Unavailable(f"ended with exit code {child.returncode}: {said[-1]}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{url}/health", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise Unavailable(f"not healthy after {LOADING_S:g} s")


def warm(server: Server, url: str) -> None:
    """One answer: what is made at the first request is none of the load."""
    body = {"model": server.model, "prompt": "time way", "max_tokens": 4, "temperature": 0}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=LOADING_S, max_retries=0)
    try:
        said = client.completions.create(**body, extra_body=server.extra)
    except openai.OpenAIError as error:
        raise Unavailable(f"the first answer did not come: {error}") from None
    if said.usage.completion_tokens != 4:
        raise Unavailable(f"4 tokens were asked for, {said.usage.completion_tokens} came")


def end(child: subprocess.Popen) -> None:
    """Politely, then for good; with what it has started."""
    for sent, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)


# --- the scenario `clients` -----------------------------------------------------------------------------------------


def texts(count: int, seed: str) -> list[str]:
    """Prompts of mixed lengths; half of them begin with one of four texts, the others share nothing."""
    prefixes = [words(PREFIX_WORDS, f"{seed}-prefix-{number}") for number in range(PREFIXES)]
    found = [
        words(LENGTHS[number // 2 % len(LENGTHS)], f"{seed}-{number}") for number in range(count)
    ]
    for number in range(1, count, 2):
        found[number] = f"{prefixes[number // 2 % PREFIXES]} {found[number]}"
    random.Random(seed).shuffle(found)
    return found


def words(count: int, seed: str) -> str:
    """Always the same ones for a seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def clients(server: Server, url: str, options: argparse.Namespace, work: Path) -> list[dict]:
    """A row for each number of clients."""
    return [point(server, url, count, options, work) for count in options.clients]


def point(server: Server, url: str, count: int, options: argparse.Namespace, work: Path) -> dict:
    """What guidellm measures with so many clients."""
    requests, data, report = (
        max(options.least, options.rounds * count),
        work / "prompts.jsonl",
        work / "report.json",
    )
    lines = [
        json.dumps({"prompt": text}) + "\n" for text in texts(requests, f"{options.seed}-{count}")
    ]
    data.write_text("".join(lines))
    report.unlink(missing_ok=True)
    backend = {
        "kind": "openai_http",
        "target": url,
        "model": server.model,
        "request_format": "/v1/completions",
        "http2": False,
        "max_tokens": options.tokens,
        "extras": {"body": {"temperature": 0} | server.extra},
    }
    parts = {
        "--backend": backend,
        "--profile": {"kind": "concurrent", "streams": count},
        "--data": {"kind": "json_file", "path": str(data)},
        "--output": {"kind": "json", "path": str(report)},
    }
    command = [environment(), "-m", "guidellm", "run", "--disable-console"]
    command += [part for name, value in parts.items() for part in (name, json.dumps(value))]
    for limit in (
        {"kind": "max_requests", "count": requests},
        {"kind": "max_duration", "seconds": options.seconds},
    ):
        command += ["--constraint", json.dumps(limit)]
    quiet = {
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    row = {"server": server.name, "clients": count, "requests": requests}
    try:
        done = subprocess.run(
            command,
            env=os.environ | quiet,
            capture_output=True,
            text=True,
            cwd=work,
            timeout=options.seconds + LOADING_S,
        )
    except subprocess.TimeoutExpired:
        return row | {
            "error": f"the generator did not end within {options.seconds + LOADING_S:g} s"
        }
    if not report.exists():
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        return row | {"error": f"the generator ended with exit code {done.returncode}: {said[-1]}"}
    return row | figures(json.loads(report.read_text())["benchmarks"][0], options.tokens)


def figures(found: dict, tokens: int) -> dict:
    """Of guidellm's report: tokens per second of all complete answers together, quantiles over them."""
    answers = found["requests"]["successful"]
    whole = [one for one in answers if one["output_tokens"] == tokens]
    counts = {
        "ok": len(whole),
        "failed": len(answers) - len(whole) + len(found["requests"]["errored"]),
        "unfinished": len(found["requests"]["incomplete"]),
    }
    if not whole:
        return counts | {"error": f"no complete answer: {reason(found['requests'], tokens)}"}
    seconds = max(one["request_end_time"] for one in whole) - min(
        one["request_start_time"] for one in whole
    )
    first = [one["time_to_first_token_ms"] for one in whole]
    between = [one["inter_token_latency_ms"] for one in whole]
    return counts | {
        "seconds": seconds,
        "prompt_tokens": sum(one["prompt_tokens"] for one in whole),
        "tokens_per_s": tokens * len(whole) / seconds,
        "ttft_p50_ms": quantile(first, 0.5),
        "ttft_p99_ms": quantile(first, 0.99),
        "itl_p50_ms": quantile(between, 0.5),
        "itl_p99_ms": quantile(between, 0.99),
    }


def reason(requests: dict, tokens: int) -> str:
    """Why no answer is complete."""
    if requests["successful"]:
        return f"one has {requests['successful'][0]['output_tokens']} tokens, and {tokens} were asked for"
    return (
        str(requests["errored"][0]["info"].get("error"))
        if requests["errored"]
        else "the time was over"
    )


def quantile(values: list[float], part: float) -> float:
    """The smallest value that so large a part of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(part * 1000) * len(ordered) // 1000) - 1)]


# --- the scenario `long` --------------------------------------------------------------------------------------------


def long(server: Server, url: str, options: argparse.Namespace, work: Path) -> list[dict]:
    """Clients decode while one sends long prompts: does a token have to wait for a whole prompt?"""
    row = {"server": server.name, "clients": DECODERS}
    try:
        return [
            row
            | asyncio.run(
                asyncio.wait_for(beside_long_prompts(server, url, options), 4 * options.seconds)
            )
        ]
    except (openai.OpenAIError, TimeoutError) as error:
        return [row | {"error": f"{type(error).__name__}: {error}".removesuffix(": ")}]


async def beside_long_prompts(server: Server, url: str, options: argparse.Namespace) -> dict:
    """Gaps between tokens before and while long prompts come, one after another."""
    client = openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="any", timeout=LOADING_S, max_retries=0
    )
    asked = functools.partial(
        client.completions.create, model=server.model, temperature=0, extra_body=server.extra
    )
    seen: list[list[float]] = [[] for _ in range(DECODERS)]
    until, waits, sizes = time.perf_counter() + options.seconds, [], []
    async with (
        client,
        together(
            decode(asked, times, f"{options.seed}-decode-{number}", until)
            for number, times in enumerate(seen)
        ) as decoding,
    ):
        while min(map(len, seen)) < ALONE and not any(task.done() for task in decoding):
            await asyncio.sleep(0.01)
        begun = time.perf_counter()
        while not any(task.done() for task in decoding):
            started = time.perf_counter()
            text = words(options.long_words, f"{options.seed}-long-{len(waits)}")
            found = await asked(prompt=text, max_tokens=1)
            waits.append(time.perf_counter() - started)
            sizes.append(found.usage.prompt_tokens)
        ended = time.perf_counter()
    gaps = [
        (after, after - before) for times in seen for before, after in itertools.pairwise(times)
    ]
    alone = [gap * 1e3 for at, gap in gaps if at <= begun]
    beside = [gap * 1e3 for at, gap in gaps if begun < at <= ended]
    if not waits or not beside:
        raise TimeoutError("no long prompt was answered while the others decoded")
    p99, before = quantile(beside, 0.99), quantile(alone, 0.99)
    return {
        "tokens": len(beside),
        "long_prompts": len(waits),
        "long_tokens": round(statistics.median(sizes)),
        "long_ttft_p50_ms": statistics.median(waits) * 1e3,
        "alone_p50_ms": quantile(alone, 0.5),
        "alone_p99_ms": before,
        "itl_p50_ms": quantile(beside, 0.5),
        "itl_p99_ms": p99,
        "p99_over_alone": p99 / before,
    }


@contextlib.asynccontextmanager
async def together(coroutines):
    """Tasks that end well with the block, or are cancelled where it fails."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        yield tasks
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def decode(asked, seen: list[float], seed: str, until: float) -> None:
    """One client: a long answer, token by token; the time of each that brings text."""
    stream = await asked(prompt=words(8, seed), max_tokens=1_500, stream=True)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            seen.append(time.perf_counter())
        if time.perf_counter() > until:
            await stream.close()
            break


# --- the scenario `many` --------------------------------------------------------------------------------------------


def many(server: Server, url: str, options: argparse.Namespace, work: Path) -> list[dict]:
    """Small requests, each with its own number, on the bundled model: none is lost, no two are mixed up."""
    wanted = known_answers(options.requests, options.dtype)
    started = time.perf_counter()
    said = asyncio.run(ask_all(server, url, options))
    seconds = time.perf_counter() - started
    others = set(wanted)
    wrong = [text for text, right in zip(said, wanted, strict=True) if text != right]
    lost = [text for text in wrong if isinstance(text, Exception)]
    mixed = [text for text in wrong if text in others]
    row = {
        "server": server.name,
        "clients": options.most,
        "requests": len(wanted),
        "distinct": len(others),
        "ok": len(wanted) - len(wrong),
        "lost": len(lost),
        "mixed_up": len(mixed),
        "other": len(wrong) - len(lost) - len(mixed),
        "seconds": seconds,
        "requests_per_s": len(wanted) / seconds,
    }
    return [row | ({"first_wrong": str(wrong[0])} if wrong else {})]


def known_answers(count: int, dtype: str) -> list[str]:
    """What nanokv answers without a server, by another path than the engine: padded batches, greedy."""
    import torch

    model, tokenizer = nanokv.load(TINY, dtype=getattr(torch, dtype))
    prompts = [
        tokenizer.encode(tokenizer.render(message(number), add_generation_prompt=True))
        for number in range(count)
    ]
    answers = []
    for first in range(0, count, 128):
        rows = nanokv.generate_padded(
            model, prompts[first : first + 128], max_new_tokens=ANSWER_TOKENS
        )
        answers += [
            tokenizer.decode([token for token in row if token not in tokenizer.control_ids])
            for row in rows
        ]
    return answers


def message(number: int) -> list[dict]:
    return [{"role": "user", "content": QUESTION.format(number)}]


async def ask_all(server: Server, url: str, options: argparse.Namespace) -> list:
    """The answer to each number, or the error; `most` clients share the numbers, half of them stream."""
    answers: list = [None] * options.requests
    numbers = iter(range(options.requests))

    async def ask(client: openai.AsyncOpenAI, stream: bool) -> None:
        for number in numbers:
            try:
                said = await client.chat.completions.create(
                    model=server.model,
                    messages=message(number),
                    max_tokens=ANSWER_TOKENS,
                    temperature=0,
                    stream=stream,
                )
                parts = (
                    [part.choices[0].delta.content or "" async for part in said] if stream else []
                )
                answers[number] = "".join(parts) if stream else said.choices[0].message.content
            except openai.OpenAIError as error:
                answers[number] = error

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="any", timeout=60, max_retries=0
    ) as client:
        await asyncio.gather(
            *(ask(client, stream=worker % 2 == 0) for worker in range(options.most))
        )
    return answers


# --- the command ----------------------------------------------------------------------------------------------------

SCENARIOS = {"clients": clients, "long": long, "many": many}
COLUMNS = {  # scenario → field → heading, digits
    "clients": {
        "server": ("server",),
        "clients": ("clients",),
        "ok": ("ok",),
        "failed": ("failed",),
        "unfinished": ("unfinished",),
        "tokens_per_s": ("tokens/s", 1),
        "ttft_p50_ms": ("first p50 ms", 0),
        "ttft_p99_ms": ("first p99 ms", 0),
        "itl_p50_ms": ("between p50 ms", 1),
        "itl_p99_ms": ("between p99 ms", 1),
        "ratio": ("nanokv is", 2),
    },
    "long": {
        "server": ("server",),
        "clients": ("clients",),
        "tokens": ("tokens",),
        "alone_p50_ms": ("alone p50 ms", 1),
        "alone_p99_ms": ("alone p99 ms", 1),
        "itl_p50_ms": ("p50 ms", 1),
        "itl_p99_ms": ("p99 ms", 1),
        "p99_over_alone": ("p99 / alone", 2),
        "long_prompts": ("long prompts",),
        "long_tokens": ("their tokens",),
        "long_ttft_p50_ms": ("their first p50 ms", 0),
    },
    "many": {
        "server": ("server",),
        "clients": ("clients",),
        "requests": ("requests",),
        "distinct": ("distinct",),
        "ok": ("ok",),
        "lost": ("lost",),
        "mixed_up": ("mixed up",),
        "other": ("other",),
        "seconds": ("seconds", 1),
        "requests_per_s": ("requests/s", 1),
    },
}


def with_ratios(rows: list[dict]) -> list[dict]:
    """How many times as many tokens per second nanokv has, at each number of clients."""
    ours = {
        row["clients"]: row["tokens_per_s"]
        for row in rows
        if row["server"] == "nanokv" and "tokens_per_s" in row
    }
    return [
        row | {"ratio": ours[row["clients"]] / row["tokens_per_s"]}
        if "tokens_per_s" in row and row.get("clients") in ours
        else row
        for row in rows
    ]


def table(rows: list[dict], scenario: str) -> str:
    """In Markdown; a row that has no figures says why."""
    columns = COLUMNS[scenario]
    lines = [[heading for heading, *_ in columns.values()], ["---"] * len(columns)]
    for row in rows:
        cells = [cell(row.get(field), *digits) for field, (_, *digits) in columns.items()]
        lines.append(cells if "error" not in row else [*cells[:2], row["error"].replace("|", "/")])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value, digits: int | None = None) -> str:
    if value is None:
        return ""
    return str(value) if digits is None else f"{value:,.{digits}f}"


def measure(options: argparse.Namespace, report=print) -> list[dict]:
    """The servers one after another; the rows of the table."""
    source, rows = source_of(options.model), []
    folder = TINY if options.scenario == "many" else folder_of(source)
    for name in options.servers:
        with tempfile.TemporaryDirectory() as work:
            log = Path(work) / "server.log"
            try:
                if options.scenario == "clients":
                    environment()
                server = MAKERS[name](folder, source, options)
                report(f"{name} {server.version}: {server.shown()}")
                with running(server, log) as url:
                    rows += SCENARIOS[options.scenario](server, url, options, Path(work))
            except (Unavailable, subprocess.SubprocessError, OSError) as error:
                rows.append({"server": name, "error": str(error)})
    return with_ratios(rows)


def failed(rows: list[dict]) -> list[dict]:
    """Rows of nanokv that are not as they have to be."""
    ours = [row for row in rows if row["server"] == "nanokv"]
    wrong = ("error", "failed", "lost", "mixed_up", "other")
    return [
        row
        for row in ours
        if any(row.get(name) for name in wrong) or row.get("p99_over_alone", 0) > MOST_GAP
    ]


def names(text: str) -> list[str]:
    """nanokv,transformers → a list."""
    if unknown := set(text.split(",")) - set(SERVERS):
        raise argparse.ArgumentTypeError(f"no server {min(unknown)}: {', '.join(SERVERS)}")
    return text.split(",")


def counts(text: str) -> list[int]:
    """1,8 → [1, 8]"""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{min(found)} clients: at least 1")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Flags, and what follows from them: `most` clients at a time, `context` tokens for each."""
    parser = argparse.ArgumentParser(prog="make load", description=__doc__.split("\n\n")[0])
    parser.add_argument("--scenario", choices=SCENARIOS, default="clients")
    parser.add_argument(
        "--model", default="tiny", help="tiny, smollm2, a GGUF file or a folder (default: tiny)"
    )
    parser.add_argument(
        "--servers",
        type=names,
        default=["nanokv"],
        help=f"of {','.join(SERVERS)} (default: nanokv)",
    )
    parser.add_argument("--llama-server", metavar="PATH", default="llama-server")
    parser.add_argument(
        "--clients", type=counts, default=[1, 8, 32, 128], help="(default: 1,8,32,128)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="requests of each client (default: 1) ..."
    )
    parser.add_argument(
        "--least", type=int, default=16, help="... but at least so many in all (default: 16)"
    )
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: 32)")
    parser.add_argument(
        "--long-words", type=int, default=1_000, help="of a prompt of `long` (default: 1,000)"
    )
    parser.add_argument(
        "--flags", default="", help="more flags of nanokv serve, as --flags='--step-tokens 256'"
    )
    parser.add_argument("--requests", type=int, default=10_000, help="of `many` (default: 10,000)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="at most, for each row (default: 60)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of each server (default: all cores)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="(default: bfloat16; `many`: float32)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows, and what was run")
    options = parser.parse_args(argv)
    if options.scenario == "many" and (options.model != "tiny" or options.servers != ["nanokv"]):
        parser.error("many asks nanokv with the bundled model, whose answers are known")
    options.most = {"clients": max(options.clients), "long": DECODERS + 1, "many": 32}[
        options.scenario
    ]
    options.context = 512 if options.scenario != "long" else 2_048
    options.dtype = options.dtype or ("float32" if options.scenario == "many" else "bfloat16")
    return options


def main(argv: list[str] | None = None) -> int:
    options, started = parse(argv), time.time()
    lines: list[str] = []
    rows = measure(options, lambda line: (lines.append(line), print(line, flush=True)))
    print("", table(rows, options.scenario), "", sep="\n")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        found = {"started": started, "options": settings, "servers": lines, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for row in failed(rows):
        print(f"FAILED {row}")
    return 1 if failed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
