"""What the server answers, for /openapi.json and the tests. forms.py builds the same objects as plain dicts."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanokv.apps.serve.api.logprobs import UNLIKELIEST
from nanokv.apps.serve.api.requests import MOST_LIKELY
from nanokv.decoding.ranges import RANGES

Count = Annotated[int, Field(ge=0)]
LogProb = Annotated[float, Field(ge=UNLIKELIEST, le=0)]
Seed = Annotated[int, Field(ge=RANGES["seed"].low, le=RANGES["seed"].high)]


class Reply(BaseModel):
    """All of these fields and no others; one with a default may be absent."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


# --- parts ----------------------------------------------------------------------------------------


class Cached(Reply):
    """Tokens of the prompt that were in the cache."""

    cached_tokens: Count


class Usage(Reply):
    """Tokens."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: Cached


class Timings(Reply):
    """Seconds and rates; null where nothing was computed."""

    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    queue_s: float | None
    total_s: float | None
    preemptions: Count


class Likely(Reply):
    """A token, and how likely it was."""

    token: str
    logprob: LogProb
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class Drawn(Likely):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: Annotated[list[Likely], Field(max_length=MOST_LIKELY["messages"])]


class ChatLogProbs(Reply):
    """Of a chat: each token of the content."""

    content: list[Drawn]
    refusal: None


class TextLogProbs(Reply):
    """Of a completion: lists of one length. The first token of a prompt that is repeated has null."""

    tokens: list[str]
    token_logprobs: list[LogProb | None]
    top_logprobs: list[dict[str, LogProb] | None]
    text_offset: list[Count]


class Called(Reply):
    """The function that is called; `arguments` is the JSON of an object."""

    name: str
    arguments: str


class Call(Reply):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: Called


class Said(Reply):
    """A message in words."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str = ""


class SaidAndCalled(Said):
    """A message with calls, and perhaps words."""

    content: str | None  # type: ignore[assignment]
    tool_calls: Annotated[list[Call], Field(min_length=1)]


class Choice(Reply):
    """One answer, and what ended it."""

    index: Count
    stop_reason: str | int | None


class ChatChoice(Choice):
    """One answer of a chat."""

    message: Said | SaidAndCalled
    logprobs: ChatLogProbs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextChoice(Choice):
    """One continuation."""

    text: str
    logprobs: TextLogProbs | None
    finish_reason: Literal["stop", "length"]


# --- answers --------------------------------------------------------------------------------------


class Answer(Reply):
    """Not streamed."""

    id: str
    created: Count
    model: str
    usage: Usage
    seed: Seed | None


class ChatCompletion(Answer):
    """One answer to messages."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1, max_length=1)]
    timings: Timings


class ChatCompletions(Answer):
    """Several answers to messages. `timings` are those of one answer, so several have none."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=2)]


class TextCompletion(Answer):
    """One continuation."""

    object: Literal["text_completion"]
    choices: Annotated[list[TextChoice], Field(min_length=1, max_length=1)]
    timings: Timings


class TextCompletions(Answer):
    """Several continuations."""

    object: Literal["text_completion"]
    choices: Annotated[list[TextChoice], Field(min_length=2)]


class Model(Reply):
    """One name of the model."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count


class Models(Reply):
    """The model, under each of its names."""

    object: Literal["list"]
    data: Annotated[list[Model], Field(min_length=1)]


class Tokens(Reply):
    """Of /tokenize."""

    tokens: list[Count]
    count: Count
    max_model_len: Count


class Detokenized(Reply):
    """Of /detokenize."""

    prompt: str


class Status(Reply):
    """Of /health."""

    status: Literal["ok", "unavailable"]


class Told(Reply):
    """Why something was refused or failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Reply):
    """OpenAI's object, and a hint where there is one."""

    error: Told
    hint: str = ""
