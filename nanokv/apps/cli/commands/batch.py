"""`nanokv batch`: one JSON request per line in, one answer per line out, all in one engine.

    {"prompt": "Once upon a time"}                                  raw text; with --chat a message
    {"messages": [{"role": "user", "content": "Who are you?"}]}     through the chat template
    {"prompt": "…", "max_new_tokens": 8, "temperature": 0.7, "stop": ["\\n"], "id": "mine"}
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}

An answer is {"line": N, …} with the fields of an OpenAI completion
(nanokv/decoding/completion.py). A line that cannot be answered gets {"line": N, "error": {…}} and
keeps its "id"; the other lines continue. One of OpenAI's batch lines, the last form, gets OpenAI's
{"id", "custom_id", "response", "error"}. Further fields are those of the server (batch/served.py).
With -o, each finished line is appended at once, so a run
that was killed resumes where it stopped; at the end the file is sorted in the order of the input.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.batch.lines import (
    SAMPLING,
    check_fields,
    check_source,
    digest,
    parse_line,
    read_lines,
    texts,
)
from nanokv.apps.cli.batch.output import (
    FIRST_RELEASE,
    OrderedOutput,
    Progress,
    Refusals,
    ResumableOutput,
    is_first_release,
    openai_line,
    summary,
)
from nanokv.apps.cli.batch.served import (
    CHAT,
    TEXT,
    ServedLine,
    check_installed,
    is_openai,
    is_richer,
    opened,
    served_line,
)
from nanokv.apps.cli.common import options, pool, terminal
from nanokv.apps.cli.common.files import add_force, ask_to_lose
from nanokv.apps.cli.common.loading import load_model
from nanokv.apps.cli.common.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    TemplateOptions,
)
from nanokv.apps.cli.common.plan import Loaded
from nanokv.apps.cli.common.pool import PoolOptions
from nanokv.apps.cli.common.prompt import room
from nanokv.apps.cli.common.text import refuse_special
from nanokv.apps.serve.api.errors import ApiError
from nanokv.decoding import completion
from nanokv.errors import NanoKVError
from nanokv.parallel.group import ALONE, Ranks
from nanokv.text.call_forms import fitted
from nanokv.text.template import LeftOut
from nanokv.text.thinking import opens_thinking

if TYPE_CHECKING:
    from nanokv.apps.serve.api.prompts import Served
    from nanokv.decoding.draw import Step
    from nanokv.engine import Engine
    from nanokv.engine.request import Request
    from nanokv.text.tokenizer import Tokenizer

    MakeServed = Callable[[], Served]

EXAMPLES = (
    "nanokv batch prompts.jsonl -o answers.jsonl",
    "nanokv batch prompts.jsonl -n 64 --cache prefix:page=16:pages=512 > answers.jsonl",
    """echo '{"prompt": "Who are you?"}' | nanokv batch - --chat""",
)
DESCRIPTION = (
    'Answer every line of a JSONL file: {"prompt": …} or {"messages": […]}, each with its own '
    "settings, or OpenAI's batch lines, "
    '{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}, also with '
    "/v1/completions. The settings are those of nanokv serve. Messages go through the model's chat "
    "template. A prompt is raw text, which the model continues, as in OpenAI's API; with --chat it "
    "is one user message, as for nanokv generate.\n"
    "An answer is an OpenAI text_completion or chat.completion on one line; to an OpenAI batch "
    "line it is OpenAI's custom_id, response and error. A line's model is not read: -m names it."
)
RANKS = "led"  # the other ranks follow rank 0


@dataclass(frozen=True)
class BatchOptions:
    """The options of this command."""

    file: str  # - is stdin
    out: Path | None  # None: stdout
    force: bool
    chat: bool
    raw: bool
    pool: PoolOptions
    template: TemplateOptions
    model: ModelOptions
    cache: CacheOptions
    sampling: SamplingOptions
    output: OutputOptions


def add_arguments(parser: ArgumentParser) -> None:
    """Input, output and engine limits; then the shared flags, which are the defaults of a line."""
    parser.add_argument(
        "file", metavar="FILE.jsonl", help="the requests, one JSON object per line; - reads stdin"
    )
    parser.add_argument(
        "-o", "--output", metavar="OUT", type=Path, help="write (and resume) OUT (default: stdout)"
    )
    add_force(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="each prompt is one user message in the chat template"
    )
    form.add_argument(
        "--raw",
        action="store_true",
        help="each prompt is raw text (the default, with a warning if the model is a chat model)",
    )
    pool.add_arguments(parser, "a long prompt's chunk: 64 to 512, on a GPU up to 16,384")


def command_options(args: Namespace) -> BatchOptions:
    """The options of the flags of add_arguments."""
    template = options.template_options(args)
    return BatchOptions(
        args.file,
        args.output,
        args.force,
        args.chat,
        args.raw,
        pool.pool_options(args),
        template,
        options.model_options(args, options.speed_options(args), template),
        pool.sized(options.cache_options(args), "batch"),
        options.sampling_options(args),
        options.output_options(args),
    )


@dataclass
class Job:
    """One line of the input."""

    line: int
    fields: dict = field(default_factory=dict)
    digest: str = ""
    ids: list = field(default_factory=list)
    left_out: bool = False  # the template leaves out its tool_calls
    wanted: int = 0  # max_new_tokens as requested
    served: ServedLine | None = None  # a line with the fields of the server
    # Set by `submit`.
    requests: list["Request"] = field(default_factory=list, repr=False, compare=False)
    answer: "Answer" = field(init=False, repr=False, compare=False)

    @property
    def openai(self) -> bool:
        """Whether this is one of OpenAI's batch lines."""
        return is_openai(self.fields)

    @property
    def finished(self) -> bool:
        """Whether the engine has ended all answers, or one of them with an error."""
        ended = all(request.finish_reason is not None for request in self.requests)
        return ended or self.error is not None

    @property
    def error(self) -> Exception | None:
        """The first error of an answer."""
        return next((request.error for request in self.requests if request.error), None)


def run(args: Namespace, ranks: Ranks = ALONE) -> int:
    """Read, load, answer, sort. Exit code 2 if a line failed; all other lines are answered."""
    given = command_options(args)
    lines = read_lines(given.file)
    output = open_output(given)
    # Before anything is written: a wrong -m must not change OUT.
    loaded = load_model(given.model, given.cache, given.output, ranks)
    check_form(given, loaded)
    jobs, wrong = prepare(given, loaded, lines, output)
    refusals = Refusals(given.file)
    warn_of_raw_prompts(given, loaded, jobs)
    warn_of_calls(jobs)
    if output.stale:
        name = terminal.sanitize_line(str(given.out))
        loss = f"{output.stale:,} answers in {name} are to other requests or settings"
        ask_to_lose(given.force, f"{loss} and would be dropped", "another -o")
    output.begin()
    for job, error in wrong:
        fail(refusals, output, job, error)
    with terminal.Interrupt() as stop:
        if jobs:
            answer_all(given, loaded, jobs, output, refusals, stop)
        done = not stop.requested
        refusals.end()
        output.close(done)
        terminal.notice(summary(output, len(output.wanted), done), given.output)
        stop.finish()
    if not done:
        return 130
    if output.failed:
        return 2
    return 0


def open_output(given: BatchOptions) -> OrderedOutput | ResumableOutput:
    """stdout, or the file of -o; NanoKVError if that file is the input."""
    if given.out is None:
        return OrderedOutput()
    if given.file != "-" and given.out.exists() and given.out.samefile(given.file):
        raise NanoKVError(
            f"-o {given.out} is the input itself", "choose another file for the answers"
        )
    return ResumableOutput(given.out)


# --- the lines ------------------------------------------------------------------------------------


def prepare(
    given: BatchOptions, loaded: Loaded, lines: Iterable[tuple[int, bytes]], output: OrderedOutput
) -> tuple[list[Job], list]:
    """The jobs that are still to do, and (job, error) of each line that is not a valid request."""
    jobs = []
    wrong = []
    eos = list(loaded.model.generation_config.eos_token_ids)
    common = [eos, loaded.context, common_settings(given, loaded)]
    fingerprints = loaded.fingerprints()
    served = cache(partial(settings_of, given, loaded))
    for number, data in lines:
        output.want(number)
        job = Job(number)
        try:
            read_request(given, loaded, served, job, data)
        except (NanoKVError, ApiError) as error:
            job.digest = digest([number, job.fields])
            wrong.append((job, error))
            continue
        ids = job.served.prompts if job.served else job.ids
        digests = [digest([name, *common, job.fields, ids]) for name in fingerprints]
        job.digest = digests[0]
        found = next(filter(None, map(output.find, digests)), None)
        if found is None:
            jobs.append(job)
        elif is_first_release(found):
            output.keep(number, first_release(loaded, job, found))
        else:
            output.keep(number, found)
    return jobs, wrong


def read_request(
    given: BatchOptions, loaded: Loaded, served: "MakeServed", job: Job, data: bytes
) -> None:
    """Fill the job's fields and ids from its line; NanoKVError if the line is not a request."""
    job.fields = parse_line(data)
    if job.openai:
        check_installed()
        job.served = served_line(served(), *opened(job.fields))
        return
    if is_richer(job.fields):
        read_richer(given, loaded, served, job)
        return
    check_fields(job.fields)
    if given.chat:
        job.fields = as_messages(job.fields)
    job.ids = encode(given.template, loaded.tokenizer, job)


def read_richer(given: BatchOptions, loaded: Loaded, served: "MakeServed", job: Job) -> None:
    """Fill a plain line that has more of the server's fields."""
    check_source(job.fields)
    if given.chat:
        job.fields = as_messages(job.fields)
    if isinstance(job.fields.get("prompt"), str):
        refuse_special(job.fields["prompt"], loaded.tokenizer, given.template.allow_special)
    address = CHAT if "messages" in job.fields else TEXT
    body = {name: value for name, value in job.fields.items() if name != "id"}
    job.served = served_line(served(), address, body)


def settings_of(given: BatchOptions, loaded: Loaded) -> "Served":
    """The model and the defaults of a line, for the server's definitions. Any name is its name."""
    from nanokv.apps.serve.api.prompts import ANY, Served

    return Served(
        loaded,
        loaded.tokenizer,
        (loaded.source, ANY),
        loaded.context,
        given.sampling.resolve(loaded.model.generation_config),
        given.sampling.most,
        given.sampling.stop,
        given.template.values(),
        given.template.allow_special,
    )


def check_form(given: BatchOptions, loaded: Loaded) -> None:
    """NanoKVError for --chat if the model has no template."""
    if given.chat and loaded.tokenizer.chat_template is None:
        hint = "leave out --chat: prompts are raw text"
        raise NanoKVError(f"--chat: {loaded.name} has no chat template", hint)


def as_messages(fields: dict) -> dict:
    """The fields of a line, its prompt replaced by one user message."""
    if "prompt" not in fields:
        return fields
    others = {name: value for name, value in fields.items() if name != "prompt"}
    return others | {"messages": [{"role": "user", "content": fields["prompt"]}]}


def warn_of_raw_prompts(given: BatchOptions, loaded: Loaded, jobs: Sequence[Job]) -> None:
    """Warn about raw prompts to a chat model, which often answers them with nothing."""
    count = sum("prompt" in job.fields for job in jobs)
    if count and not given.raw and loaded.tokenizer.chat_template is not None:
        prompts = "1 prompt is" if count == 1 else f"{count:,} prompts are"
        advice = "use messages, or --chat (--raw: it is meant)"
        terminal.warning(f"{prompts} sent as raw text to a chat model: {advice}")


def common_settings(given: BatchOptions, loaded: Loaded) -> dict:
    """The settings of a line that gives none."""
    params = given.sampling.resolve(loaded.model.generation_config)
    return asdict(params) | {
        "max_new_tokens": given.sampling.most,
        "stop": list(given.sampling.stop),
    }


def encode(template: TemplateOptions, tokenizer: "Tokenizer", job: Job) -> list[int]:
    """Prompt or rendered messages → ids; NanoKVError for a typed control token."""
    fields = job.fields
    if "prompt" in fields:
        refuse_special(fields["prompt"], tokenizer, template.allow_special)
        return tokenizer.encode(fields["prompt"], add_special_tokens=True)
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise NanoKVError(
            "messages is not a list of messages", '[{"role": "user", "content": "…"}]'
        )
    messages = fitted(tokenizer.template(), messages)
    for text in texts(messages):
        refuse_special(text, tokenizer, template.allow_special)
    try:
        text = tokenizer.render(messages, add_generation_prompt=True, **template.values())
    except LeftOut:  # warn_of_calls prints one warning for all lines
        job.left_out = True
        text = tokenizer.template().render(
            messages, add_generation_prompt=True, **template.values()
        )
    return tokenizer.encode(text)


def warn_of_calls(jobs: Sequence[Job]) -> None:
    """Warn about tool_calls that the template leaves out; the lines are answered without them."""
    if count := sum(job.left_out for job in jobs):
        lines = "1 line" if count == 1 else f"{count:,} lines"
        terminal.warning(f"the chat template of this model leaves out the tool_calls of {lines}")


def fail(refusals: Refusals, output: OrderedOutput, job: Job, error: Exception) -> None:
    """Write an error to the output, with the line's number and id, and count it."""
    status = 400
    body = completion.error(error)
    if isinstance(error, ApiError):
        status = error.status
        body = error.body
    answer = {"line": job.line}
    if job.fields.get("id") is not None:
        answer["id"] = job.fields["id"]
    if job.openai:
        output.put(job.line, openai_line(job.digest, job.fields.get("custom_id"), status, body))
    else:
        output.put(job.line, answer | body)
    refusals.add(job.line, error)


# --- the engine -----------------------------------------------------------------------------------


def make_engine(given: BatchOptions, loaded: Loaded, jobs: Sequence[Job]) -> "Engine":
    """The engine with its pool."""
    page = given.cache.options["page"]
    sizes = given.pool.on(loaded.device)
    pages = given.cache.options.get("pages") or pool_pages(given, loaded, jobs, page)
    # Nobody reads the tokens one by one: whole steps are faster.
    return loaded.make_engine(
        pages,
        page,
        sizes.step_tokens,
        sizes.running,
        paced=False,
        prefix=given.cache.options.get("index", "hash"),
    )


def answer_all(
    given: BatchOptions,
    loaded: Loaded,
    jobs: Sequence[Job],
    output: OrderedOutput,
    refusals: Refusals,
    stop: terminal.Interrupt,
) -> None:
    """Run all jobs through the engine and write each answer when it is done.

    Only a few requests are submitted ahead, so that a long file costs no memory.
    """
    engine = make_engine(given, loaded, jobs)
    ahead = 2 * given.pool.on(loaded.device).running
    progress = Progress(given.output.quiet, len(jobs))
    waiting = list(reversed(jobs))
    active: list[Job] = []
    while (waiting or active) and not stop.requested:
        while waiting and len(active) < ahead:
            job = waiting.pop()
            try:
                submit(given, loaded, engine, job)
                active.append(job)
            except (NanoKVError, ApiError) as error:
                fail(refusals, output, job, error)
                progress.done += 1
        engine.step()
        for job in [job for job in active if job.finished]:
            active.remove(job)
            progress.done += 1
            if job.error is not None:
                for request in job.requests:
                    engine.cancel(request)
                fail(refusals, output, job, job.error)
            else:
                output.put(job.line, result(loaded, job))
            job.served = None  # its pieces are no longer needed
        progress.show(engine)
    progress.end()


def pool_pages(given: BatchOptions, loaded: Loaded, jobs: Sequence[Job], page: int) -> int:
    """Twice the pages that the `running` longest requests need, so that prefixes stay cached.

    At most the pages that fit into half of the free memory.
    """
    running = given.pool.on(loaded.device).running
    needed = []
    for job in jobs:
        lengths = [len(job.ids) + new_tokens(job, given.sampling.most)]
        if job.served:
            lengths = job.served.lengths()
        needed += [-(-min(loaded.context, length) // page) for length in lengths]
    needed.sort(reverse=True)
    wanted = 2 * sum(needed[:running]) + running
    most = pool.affordable(loaded, page)
    if most is None:
        return wanted
    return min(wanted, most)


def new_tokens(job: Job, common: int) -> int:
    """The line's limit if it is valid, else the common one. `submit` reports an invalid limit."""
    limit = job.fields.get("max_new_tokens")
    if type(limit) is int and limit > 0:
        return limit
    return common


def submit(given: BatchOptions, loaded: Loaded, engine: "Engine", job: Job) -> None:
    """Submit a job: the settings of its line override the common ones."""
    if job.served:
        job.served.submit(engine)
        job.requests = job.served.requests
        return
    settings = common_settings(given, loaded)
    for name in (*SAMPLING, "max_new_tokens"):
        if job.fields.get(name) is not None:
            settings[name] = job.fields[name]
    stop = job.fields["stop"] or settings["stop"]
    del settings["stop"]
    job.wanted = settings["max_new_tokens"]
    if type(job.wanted) is int and job.wanted > 0:
        settings["max_new_tokens"] = room(job.wanted, loaded, job.ids)
    eos = loaded.model.generation_config.eos_token_ids
    job.answer = Answer(engine, loaded.tokenizer, stop, eos)
    job.requests = [engine.submit(job.ids, on_token=job.answer.put, **settings)]


class Answer:
    """The text of one request, token by token; ends the request at a stop string."""

    def __init__(
        self, engine: "Engine", tokenizer: "Tokenizer", stop: Sequence[str], ends: Iterable[int]
    ):
        from nanokv.decoding.generation import ShownText

        self.engine = engine
        self.shown = ShownText(tokenizer, stop, ends)
        self.pieces: list[str] = []

    def put(self, request: "Request", step: "Step") -> None:
        """The engine's callback for each token."""
        self.pieces.append(self.shown.put(step.token))
        if request.finish_reason is not None:
            self.pieces.append(self.shown.flush())
        if self.shown.stop_string:
            self.engine.cancel(request, "stop")

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


def result(loaded: Loaded, job: Job) -> dict:
    """The output line of a finished job."""
    if job.served:
        return served_result(loaded, job, job.served)
    (request,) = job.requests
    reason = request.finish_reason
    assert reason is not None  # the request is finished
    if reason == "length" and len(request.tokens) < job.wanted:  # `room` allowed fewer tokens
        reason = "context"
    return line_of(
        loaded,
        job,
        job.answer.text,
        request.tokens,
        reason,
        completion.seed(request),
        request.metrics(),
        job.answer.shown.stop_string,
    )


def served_result(loaded: Loaded, job: Job, served: ServedLine) -> dict:
    """The output line of a job that the server's definitions answered."""
    body = served.body(loaded.source)
    if job.openai:
        return openai_line(job.digest, job.fields["custom_id"], 200, body)
    for choice, request in zip(body["choices"], job.requests, strict=True):
        choice["token_ids"] = list(request.tokens)
    if job.fields.get("id") is not None:
        body["id"] = job.fields["id"]
    return {"line": job.line} | body | {"request": job.digest}


def line_of(
    loaded: Loaded,
    job: Job,
    text: str,
    ids: Sequence[int],
    finish_reason: str,
    seed: int | None,
    metrics: dict,
    stop_string: str = "",
) -> dict:
    """The answer of a line, as a completion. `line` comes first: it identifies a torn line."""
    said = {"text": text}
    if "messages" in job.fields:
        said = completion.message(text, opens_thinking(loaded.tokenizer, job.ids))
    usage = completion.usage(
        metrics["prompt_tokens"], metrics["new_tokens"], metrics["reused_tokens"]
    )
    return {"line": job.line} | completion.completion(
        loaded.source,
        [completion.choice(said, ids, finish_reason, stop_string)],
        usage,
        job.fields.get("id"),
        timings=completion.engine_timings(metrics),
        seed=seed,
        request=job.digest,
    )


def first_release(loaded: Loaded, job: Job, old: dict) -> dict:
    """An answer that version 0.1.0 wrote, in the current format."""
    return line_of(loaded, job, *(old[name] for name in FIRST_RELEASE))
