"""`nanokv serve`: binds the address, loads the model and runs the server (nanokv/apps/serve).

The address is bound before the model is loaded, so that a port in use is reported at once. After
the first Ctrl-C or SIGTERM, running answers have --grace seconds to finish; a second one ends them.
This file is imported before arguments are parsed: no torch, no starlette.
"""

import argparse
import logging
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import arguments, options, pool, terminal
from nanokv.apps.cli.common.loading import load_model
from nanokv.apps.cli.common.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    TemplateOptions,
)
from nanokv.apps.cli.common.plan import Loaded, Plan
from nanokv.apps.cli.common.pool import PoolOptions
from nanokv.errors import NanoKVError
from nanokv.parallel.group import ALONE, Ranks
from nanokv.support import installing

if TYPE_CHECKING:
    from types import FrameType

    from nanokv.apps.serve.api.prompts import Served
    from nanokv.apps.serve.http.server import Server
    from nanokv.apps.serve.run.prefill import Elsewhere, Here
    from nanokv.engine import Engine
    from nanokv.model import Transformer

EXAMPLES = (
    "nanokv serve",
    "nanokv serve -m Qwen/Qwen3-0.6B --context 8192 --quantize int8",
    "nanokv serve --host 0.0.0.0 --port 8080 --api-key SECRET",
)
DESCRIPTION = (
    "Serve OpenAI's chat completions, completions and embeddings over HTTP. Many clients share one "
    "engine, and requests with equal beginnings share their pages. docs/serve.md lists the "
    "supported and the refused fields.\n"
    "Flags set the defaults; a value in a request overrides them."
)
NEEDED = ("starlette", "uvicorn", "prometheus_client", "pydantic")  # of the extra `serve`
RANKS = "led"  # the other ranks follow rank 0
ONE_PROCESS = "embeddings need one process, and --tensor-parallel spreads a model over several"
POOLINGS = ("auto", "last", "mean")  # auto: what the model's folder names, else last


@dataclass(frozen=True)
class ServeOptions:
    """The options of this command."""

    host: str
    port: int
    api_keys: tuple[str, ...]
    allow_hosts: tuple[str, ...]
    allow_origins: tuple[str, ...]
    aliases: tuple[str, ...]
    queue: int
    timeout: float
    prefill_worker: bool
    embeddings: str | None  # one of POOLINGS
    grace: float
    pool: PoolOptions
    template: TemplateOptions
    model: ModelOptions
    cache: CacheOptions
    sampling: SamplingOptions
    output: OutputOptions


def add_arguments(parser: ArgumentParser) -> None:
    """Address, keys, limits; then the shared flags, which are the defaults of a request."""
    _add_address(parser)
    _add_limits(parser)
    short = pool.SHORT_STEPS
    steps = (
        f"{short['cpu']}, on a GPU {short['cuda']:,}, and fewer of prompts beside streams: "
        "a stream waits for at most about three of its steps"
    )
    pool.add_arguments(parser, steps)


def _add_address(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--host", metavar="NAME", default="127.0.0.1", help="listen here (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=arguments.integer(0, 65535),
        default=8000,
        help="0 = a free one (default: 8000)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        type=key,
        help="refuse requests without this key (repeatable; default: $NANOKV_API_KEY, else none "
        "is needed)",
    )
    _add_names(parser)


def _add_names(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="answer requests to this host name too (repeatable)",
    )
    parser.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        type=origin,
        help="let web pages of this origin ask, as in http://localhost:3000 (repeatable)",
    )
    parser.add_argument(
        "--alias",
        metavar="NAME",
        action="append",
        default=[],
        help="another name of the model, for clients that ask for gpt-4o; '*': any (repeatable)",
    )


def _add_limits(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--pages", metavar="N", type=arguments.integer(1), help="pages in the pool of the cache"
    )
    parser.add_argument(
        "--queue",
        metavar="N",
        type=arguments.integer(0, 100_000),
        default=64,
        help="requests that may wait; one more is refused with 429 (default: 64)",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=arguments.real(0, above=True),
        default=600.0,
        help="seconds for one answer, its wait in the queue included (default: 600)",
    )
    parser.add_argument(
        "--prefill-worker",
        action="store_true",
        help="prefill in a separate process, which loads the weights a second time; the "
        "server's own process only decodes",
    )
    parser.add_argument(
        "--embeddings",
        nargs="?",
        const="auto",
        choices=POOLINGS,
        metavar="POOLING",
        help="answer /v1/embeddings too: auto, last or mean of the tokens; auto: what the model's "
        "folder names, else last (default: off, unless the folder names one)",
    )
    parser.add_argument(
        "--grace",
        metavar="S",
        type=arguments.real(0),
        default=10.0,
        help="seconds for running answers when the server is ended (default: 10)",
    )


def key(text: str) -> str:
    """An argparse type: an API key, which must be a valid HTTP header value."""
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError("a key is made of visible ASCII characters without blanks")
    return text


def origin(text: str) -> str:
    """An argparse type: the origin of web pages, as a browser writes it. '*' is refused.

    Any page that the user opens could then use the model, and read what it answers.
    """
    if text == "*":
        raise argparse.ArgumentTypeError("every page on the web could ask: name each origin")
    if not re.fullmatch(r"https?://[a-z0-9.-]+(:[0-9]+)?|https?://\[[0-9a-f:]+\](:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(
            "an origin is a scheme, a host in lower case and perhaps a port, "
            "as in http://localhost:3000"
        )
    return text


def command_options(args: Namespace) -> ServeOptions:
    """The options of the flags of add_arguments; NanoKVError if they contradict each other."""
    cache = with_pages(pool.sized(options.cache_options(args), "serve"), args.pages)
    template = options.template_options(args)
    keys = tuple(args.api_key) or environment_keys()
    return ServeOptions(
        args.host,
        args.port,
        keys,
        tuple(args.allow_host),
        tuple(args.allow_origin),
        tuple(args.alias),
        args.queue,
        args.timeout,
        args.prefill_worker,
        args.embeddings,
        args.grace,
        pool.pool_options(args, pool.SHORT_STEPS),
        template,
        options.model_options(args, options.speed_options(args), template),
        cache,
        options.sampling_options(args),
        options.output_options(args),
    )


def run(args: Namespace, ranks: Ranks = ALONE) -> int:
    """Bind, load, serve until a signal; returns 130, or raises Terminated after SIGTERM."""
    check_installed()
    given = command_options(args)
    with terminal.loading():
        from nanokv.apps.serve.http.connections import allowed
        from nanokv.apps.serve.http.server import listen, share_the_interpreter, url
    connections = allowed()
    bound = listen(given.host, given.port)

    def banner(plan: Plan) -> None:
        terminal.notice(" · ".join(plan.banner()), given.output)

    loaded = load_model(given.model, given.cache, given.output, ranks, banner)
    with bound, Stop() as stop:
        logs = Log(given.output)
        ready = partial(announce, given, url(bound))
        server = make_server(given, loaded, stop, ready, connections)
        share_the_interpreter()
        try:
            server.run(sockets=[bound])
        finally:
            server.client.thread.prefills.close()
        logs.close()
        if server.client.lost is not None:
            raise server.client.lost
        stop.finish()
    return 130


def check_installed() -> None:
    """NanoKVError if packages of the extra `serve` are missing, before anything else is done."""
    import importlib.util

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NanoKVError(f"nanokv serve needs {', '.join(missing)}", installing.hint(NEEDED))


def check_ranks(given: ServeOptions, ranks: int) -> None:
    """NanoKVError for flags that do not work with several ranks."""
    if given.prefill_worker:
        raise NanoKVError(
            "--prefill-worker sends the pages of a whole model, and with --tensor-parallel each "
            "rank has pages for its own heads",
            "leave one of them out",
        )
    if given.embeddings:
        raise NanoKVError(ONE_PROCESS, "leave out --embeddings or --tensor-parallel")


def with_pages(cache: CacheOptions, pages: int | None) -> CacheOptions:
    """Apply --pages N, which means --cache prefix:pages=N."""
    if pages is None:
        return cache
    if cache.options.get("pages", pages) != pages:
        both = f"--pages {pages} and --cache prefix:pages={cache.options['pages']}"
        raise NanoKVError(f"{both} contradict each other", "leave one of them out")
    return replace(cache, options=cache.options | {"pages": pages})


def make_server(
    given: ServeOptions,
    loaded: Loaded,
    stop: "Stop",
    ready: "Callable[[Served], None]",
    connections: int,
) -> "Server":
    """The Server, with its engine, its limits and the ASGI app."""
    from nanokv.apps.serve.http.app import make_app
    from nanokv.apps.serve.http.response import Limits
    from nanokv.apps.serve.http.security import Hosts, Keys, is_loopback
    from nanokv.apps.serve.http.server import Server
    from nanokv.apps.serve.run.engine_client import EngineClient

    engine = make_engine(given, loaded)
    served = make_served(given, loaded, engine)
    if not given.api_keys and not is_loopback(given.host):
        terminal.warning(
            f"--host {given.host} without --api-key: anyone who reaches this machine can use the "
            "model"
        )
    client = EngineClient(engine, given.queue, prefills(given, loaded, engine, served.context))
    hosts = Hosts(given.host, given.allow_hosts, given.allow_origins)
    keys = Keys(given.api_keys)
    app = make_app(served, client, hosts, keys, Limits(answer_s=given.timeout))
    announced = partial(ready, served)
    return Server(app, client, stop, stop.twice, given.grace, announced, connections)


def make_engine(given: ServeOptions, loaded: Loaded) -> "Engine":
    """The engine with its pool."""
    page = given.cache.options["page"]
    sizes = given.pool.on(loaded.device)
    pages = given.cache.options.get("pages") or pool_pages(sizes.running, loaded, page)
    paced = given.pool.step_tokens is None
    engine = loaded.make_engine(
        pages, page, sizes.step_tokens, sizes.running, paced, index_of(given.cache)
    )
    record(loaded.model, sizes.running, given)
    return engine


def index_of(cache: CacheOptions) -> str:
    """What finds the pages of earlier prompts, here and in the prefill process."""
    return cache.options.get("index", "hash")


def make_served(given: ServeOptions, loaded: Loaded, engine: "Engine") -> "Served":
    """The engine and the settings, for the API. Warns if the pool holds less than a context."""
    from nanokv.apps.serve.api.prompts import Served

    pooling, answers = abilities(given, loaded)
    page = given.cache.options["page"]
    pages = len(engine.pool.references)
    context = min(loaded.context, pages * page)
    if context < loaded.context:
        terminal.warning(
            f"{pages:,} pages hold {pages * page:,} tokens: that is the context, "
            f"not {loaded.context:,}"
        )
    return Served(
        engine,
        loaded.tokenizer,
        model_names(given, loaded),
        context,
        given.sampling.resolve(loaded.model.generation_config),
        given.sampling.max_new_tokens,
        given.sampling.stop,
        given.template.values(),
        given.template.allow_special,
        pooling=pooling,
        answers=answers,
    )


def abilities(given: ServeOptions, loaded: Loaded) -> tuple[str | None, bool]:
    """(the pooling of embeddings or None, whether the model answers).

    NanoKVError if the flag contradicts the model's folder, or if the model can do neither.
    """
    from weights_loader.pooling import read_pooling

    said = read_pooling(loaded.folder)
    wanted = given.embeddings
    if said and wanted not in (None, "auto", said):
        raise NanoKVError(
            f"--embeddings {wanted} contradicts the model's folder, whose pooling is {said}",
            "leave it out",
        )
    if said and loaded.ranks.size > 1:
        raise NanoKVError(ONE_PROCESS, "leave out --tensor-parallel")
    pooling = said or wanted
    if pooling == "auto":
        pooling = "last"
    answers = said is None and has_head(loaded.fields)
    if pooling is None and not answers:
        raise NanoKVError(
            f"{loaded.name} has no head (architectures {loaded.fields['architectures']}), so it "
            "writes no answers",
            "--embeddings last, or mean: as it was trained",
        )
    return pooling, answers


def has_head(fields: dict) -> bool:
    """Whether the model of this config.json has a head: its own, or the embedding.

    A backbone that was saved alone names another architecture, Qwen3Model.
    """
    names = fields.get("architectures") or ["ForCausalLM"]
    whole = any(str(name).endswith("ForCausalLM") for name in names)
    return whole or fields.get("tie_word_embeddings") is not False


def record(model: "Transformer", running: int, given: ServeOptions) -> None:
    """On a GPU, record the decode steps of all batch sizes before the first request."""
    prepare = getattr(model, "prepare", None)
    if prepare is not None:
        terminal.notice(f"recording the decode steps of 1 to {running} requests", given.output)
        prepare(running)


def model_names(given: ServeOptions, loaded: Loaded) -> tuple[str, ...]:
    """The names of the model that a request may use: its name, the value of -m, each --alias."""
    source = given.model.source
    names = [loaded.name, source]
    if Path(source).exists():
        names.append(Path(source).name)
    return tuple(dict.fromkeys([*names, *given.aliases]))


def prefills(
    given: ServeOptions, loaded: Loaded, engine: "Engine", context: int
) -> "Here | Elsewhere":
    """Where prompts are prefilled: here, or in another process (--prefill-worker).

    That process has pages for AHEAD prompts of full context, the most that are in flight.
    """
    from nanokv.apps.serve.run.prefill import AHEAD, Elsewhere, Here

    if not given.prefill_worker:
        return Here()
    page = engine.pool.page_size
    pages = len(engine.pool.references)
    limits = given.pool.on(loaded.device)
    sizes = {
        "pages": min(pages, AHEAD * (-(-context // page) + 1)),
        "page_size": page,
        "step_tokens": limits.step_tokens,
        "max_running": limits.running,
        "prefix": index_of(given.cache),
    }
    elsewhere = Elsewhere(engine, partial(load_again, given), sizes, loaded.fingerprints()[0])
    elsewhere.load()
    return elsewhere


def load_again(given: ServeOptions) -> "tuple[Transformer, str]":
    """(model, fingerprint), loaded in the prefill process."""
    loaded = load_model(given.model, given.cache, given.output, announce=lambda plan: None)
    return loaded.model, loaded.fingerprints()[0]


def environment_keys() -> tuple[str, ...]:
    """The key of $NANOKV_API_KEY, used if no --api-key is given."""
    value = arguments.environment("NANOKV_API_KEY")
    if value is None:
        return ()
    try:
        return (key(value),)
    except argparse.ArgumentTypeError as error:
        raise NanoKVError(
            f"NANOKV_API_KEY: {error}", "a file's last line break may be in it"
        ) from None


def pool_pages(running: int, loaded: Loaded, page: int) -> int:
    """Pages for a full context per running request; at most half of the free memory."""
    wanted = running * (-(-loaded.context // page) + 1)
    most = pool.affordable(loaded, page)
    if most is None:
        return wanted
    return min(wanted, most)


def announce(given: ServeOptions, address: str, served: "Served") -> None:
    """Print that the server is ready, with its addresses and an example call."""
    path = "/v1/chat/completions"
    body = '{"messages": [{"role": "user", "content": "Hi"}]}'
    if not served.answers:
        path = "/v1/embeddings"
        body = '{"input": "Hi"}'
    call = f"curl {address}{path}"
    if given.api_keys:
        call += " -H 'Authorization: Bearer KEY'"
    call += f" -d '{body}'"
    terminal.notice(f"ready: {address}/v1 · page {address} · {call}", given.output)


class Stop(terminal.Interrupt):
    """After the first signal the server finishes running answers; after the second it ends."""

    def __init__(self):
        super().__init__()
        self.since = 0.0  # when the first signal came, monotonic seconds
        self.again = False

    def _note(self, signum: int, frame: "FrameType | None") -> None:
        now = time.monotonic()
        if not self.requested:
            self.since = now
        # A wrapper may send the signal of one key press twice.
        self.again = self.again or now - self.since >= terminal.SWALLOW_S
        super()._note(signum, frame)

    def twice(self) -> bool:
        """Has a second signal come?"""
        return self.again


class Log(logging.Handler):
    """Prints log records of the server and its libraries on stderr, one sanitized line each.

    A library's logger writes at most one line per second, because clients can cause such lines.
    """

    OURS = "nanokv.apps.serve"
    LIBRARIES = ("asyncio", "uvicorn.error")

    def __init__(self, output: OutputOptions):
        from nanokv.apps.serve.http.connections import Seldom

        super().__init__(logging.DEBUG if output.debug else logging.INFO)
        self.output = output
        self.filters_of = {name: Seldom() for name in self.LIBRARIES}
        for name, seldom in self.filters_of.items():
            logging.getLogger(name).addFilter(seldom)
            logging.getLogger(name).setLevel(logging.WARNING)
        for name in (self.OURS, *self.LIBRARIES):
            logging.getLogger(name).addHandler(self)
        logging.getLogger(self.OURS).setLevel(self.level)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            terminal.warning(text)
        else:
            terminal.notice(text, self.output)

    def close(self) -> None:
        for name in (self.OURS, *self.LIBRARIES):
            logging.getLogger(name).removeHandler(self)
        for name, seldom in self.filters_of.items():
            logging.getLogger(name).removeFilter(seldom)
        super().close()
