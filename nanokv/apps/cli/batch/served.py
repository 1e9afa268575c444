"""Lines of `nanokv batch` with the fields of the server: OpenAI's batch lines and richer plain ones.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
    {"prompt": "…", "n": 2, "logprobs": 3}

The server's own definitions (nanokv/apps/serve/api) check the fields, make the prompts and write
the answers, so both take the same fields and refuse others in the same words. They need pydantic.
A line's `model` chooses nothing: -m does. Streams and `echo` are refused.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanokv.apps.cli.batch.lines import KNOWN
from nanokv.apps.serve.api.errors import ApiError
from nanokv.decoding import completion
from nanokv.errors import NanoKVError
from nanokv.support import installing
from weights_loader.strict import quote

if TYPE_CHECKING:
    from nanokv.apps.serve.api.answer import Piece
    from nanokv.apps.serve.api.prompts import Job, Prepared, Served
    from nanokv.apps.serve.api.protocol import Asked
    from nanokv.decoding.draw import Step
    from nanokv.engine import Engine
    from nanokv.engine.request import Request

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EXAMPLE = f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "body": {{…}}}}'
ENVELOPE = ("custom_id", "method", "url", "body")


def is_openai(fields: dict) -> bool:
    """Whether this is one of OpenAI's batch lines."""
    return "custom_id" in fields or "body" in fields


def is_richer(fields: dict) -> bool:
    """Whether a plain line needs the server's definitions: for a field, or for a list of parts."""
    richer = any(name not in KNOWN for name in fields) or has_parts(fields.get("messages"))
    if not richer or importlib.util.find_spec("pydantic") is None:
        return False
    from nanokv.apps.serve.api.requests import ChatRequest, TextRequest

    names = {*KNOWN, *ChatRequest.model_fields, *TextRequest.model_fields}
    return all(name in names for name in fields)


def has_parts(messages: Any) -> bool:
    """Whether a message has a list of typed parts as its content."""
    if not isinstance(messages, list):
        return False
    contents = [one.get("content") for one in messages if isinstance(one, dict)]
    parts = [part for one in contents if isinstance(one, list) for part in one]
    return any(isinstance(part, dict) and "type" in part for part in parts)


def opened(fields: dict) -> tuple[str, dict]:
    """(address, body) of one of OpenAI's lines; NanoKVError if the line is not complete."""
    if missing := [name for name in ENVELOPE if name not in fields]:
        raise NanoKVError(f"{missing[0]} is missing in an OpenAI batch line", EXAMPLE)
    if unknown := [name for name in fields if name not in ENVELOPE]:
        words = f"{quote(unknown[0])} is beside the body of an OpenAI batch line, not in it"
        raise NanoKVError(words, EXAMPLE)
    if not isinstance(fields["custom_id"], str):
        raise NanoKVError(f"custom_id is {fields['custom_id']!r}: a text was expected", EXAMPLE)
    if fields["method"] != "POST":
        raise NanoKVError(f"method is {fields['method']!r}: POST was expected", EXAMPLE)
    if fields["url"] not in (CHAT, TEXT):
        raise NanoKVError(f"url is {fields['url']!r}: {CHAT} or {TEXT} was expected", EXAMPLE)
    if not isinstance(fields["body"], dict):
        raise NanoKVError(f"body is {fields['body']!r}: an object was expected", EXAMPLE)
    return fields["url"], fields["body"]


def check_installed() -> None:
    """NanoKVError if pydantic is missing."""
    if importlib.util.find_spec("pydantic") is None:
        words = "OpenAI's batch lines need pydantic, which is not installed"
        raise NanoKVError(words, installing.hint(["pydantic"]))


@dataclass
class ServedLine:
    """One request as the server would answer it: one or several prompts, one or several answers."""

    served: "Served"
    asked: "Asked"
    address: str
    prompts: list[list[int]]  # the ids of each
    prepared: "Prepared" = field(init=False, repr=False)
    answers: list["OneAnswer"] = field(default_factory=list)

    def lengths(self) -> list[int]:
        """The tokens of each answer with its prompt, at most."""
        most = self.asked.max_new_tokens
        if most is None:
            most = self.served.max_new_tokens or 0
        return [len(ids) + most for ids in self.prompts for _ in range(self.asked.n)]

    def submit(self, engine: "Engine") -> None:
        """Give all answers to the engine, or none and raise."""
        from nanokv.apps.serve.api.prompts import prepare

        self.prepared = prepare(self.served, self.asked, "")
        try:
            for job in self.prepared.jobs:
                self.answers.append(OneAnswer(engine, job))
        except NanoKVError:
            for answer in self.answers:
                engine.cancel(answer.request)
            raise

    @property
    def requests(self) -> list["Request"]:
        """The engine's requests."""
        return [answer.request for answer in self.answers]

    def body(self, model: str) -> dict:
        """The answers as the server would send them; `model` is the name of the one that ran."""
        from nanokv.apps.serve.api.forms import chat_form, text_form

        write = chat_form if self.address == CHAT else text_form
        form = write(self.prepared, self.served.tokenizer)
        form.model = model
        facts: dict[str, Any] = {"seed": self.prepared.seed}
        if len(self.answers) == 1:
            facts["timings"] = completion.engine_timings(self.requests[0].metrics())
        answers = [(answer.pieces, answer.ended()) for answer in self.answers]
        return form.whole(answers, usage(self.answers), **facts)


class OneAnswer:
    """One answer of a line, token by token."""

    def __init__(self, engine: "Engine", job: "Job"):
        self.engine = engine
        self.job = job
        self.pieces: list[Piece] = []
        self.request = engine.submit(job.ids, on_token=self.put, **job.settings)

    def put(self, request: "Request", step: "Step") -> None:
        """The engine's callback for each token."""
        text = self.job.text
        self.pieces += text.put(step, last=request.finish_reason is not None)
        if text.complete:
            self.engine.cancel(request, "stop")

    def ended(self) -> dict:
        """The finish_reason and the stop_reason."""
        from nanokv.apps.serve.api.forms import ending

        text = self.job.text
        new = len(self.request.tokens)
        reason = self.request.finish_reason or ""
        return ending(self.job.wanted, reason, new, text.stop_reason, text.calls.count)


def usage(answers: Sequence[OneAnswer]) -> dict:
    """Token counts. A prompt counts once, however many answers it has."""
    firsts = [answer.request for answer in answers if answer.job.first]
    prompt = sum(len(request.prompt) for request in firsts)
    reused = sum(request.reused_tokens for request in firsts)
    new = sum(len(answer.request.tokens) for answer in answers)
    return completion.usage(prompt, new, reused, sum(answer.job.text.thought for answer in answers))


def served_line(served: "Served", address: str, body: dict) -> ServedLine:
    """A checked request to this address; ApiError or NanoKVError names what is wrong with it."""
    from nanokv.apps.serve.api import prompts, protocol

    read = protocol.chat if address == CHAT else protocol.text
    asked = read({name: value for name, value in body.items() if value is not None})
    for name, on in (("stream", asked.stream), ("echo", asked.echo)):
        if on:
            raise ApiError(400, f"{name} is true: a batch does not do that", name, "unsupported")
    ids = [prompts.prompt(served, asked, number) for number in range(len(asked.sources))]
    return ServedLine(served, asked, address, ids)
