"""Models of the responses, for /openapi.json and the tests. forms.py builds them as dicts."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanokv.apps.serve.api.logprobs import UNLIKELIEST
from nanokv.apps.serve.api.requests import MOST_LIKELY
from nanokv.decoding.ranges import RANGES

Count = Annotated[int, Field(ge=0)]
LogProb = Annotated[float, Field(ge=UNLIKELIEST, le=0)]
Seed = Annotated[int, Field(ge=RANGES["seed"].low, le=RANGES["seed"].high)]


class Reply(BaseModel):
    """Exactly these fields; a field with a default may be absent."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


# --- parts ----------------------------------------------------------------------------------------


class Cached(Reply):
    """Prompt tokens that were found in the cache."""

    cached_tokens: Count


class Usage(Reply):
    """Counts of tokens."""

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
    """A token and its log-probability."""

    token: str
    logprob: LogProb
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class Drawn(Likely):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: Annotated[list[Likely], Field(max_length=MOST_LIKELY["messages"])]


class ChatLogProbs(Reply):
    """Log-probabilities of a chat: the tokens of the content."""

    content: list[Drawn]
    refusal: None


class TextLogProbs(Reply):
    """Log-probabilities of a completion: lists of one length, null for the prompt's first token."""

    tokens: list[str]
    token_logprobs: list[LogProb | None]
    top_logprobs: list[dict[str, LogProb] | None]
    text_offset: list[Count]


class Called(Reply):
    """The called function; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class Call(Reply):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: Called


class Said(Reply):
    """A message without calls."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str = ""


class SaidAndCalled(Said):
    """A message with calls; its content may be null."""

    content: str | None  # type: ignore[assignment]
    tool_calls: Annotated[list[Call], Field(min_length=1)]


class Choice(Reply):
    """One answer; `stop_reason` is the stop string or token id that ended it."""

    index: Count
    stop_reason: str | int | None


class ChatChoice(Choice):
    """One answer of a chat."""

    message: Said | SaidAndCalled
    logprobs: ChatLogProbs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextChoice(Choice):
    """One continuation of a prompt."""

    text: str
    logprobs: TextLogProbs | None
    finish_reason: Literal["stop", "length"]


# --- answers --------------------------------------------------------------------------------------


class Answer(Reply):
    """Fields of every answer that is not streamed."""

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
    """Several answers to messages, without `timings`, which belong to a single answer."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=2)]


class TextCompletion(Answer):
    """One continuation."""

    object: Literal["text_completion"]
    choices: Annotated[list[TextChoice], Field(min_length=1, max_length=1)]
    timings: Timings


class TextCompletions(Answer):
    """Several continuations, without `timings`."""

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
    """The model under each of its names."""

    object: Literal["list"]
    data: Annotated[list[Model], Field(min_length=1)]


class Tokens(Reply):
    """The response of /tokenize."""

    tokens: list[Count]
    count: Count
    max_model_len: Count


class Detokenized(Reply):
    """The response of /detokenize."""

    prompt: str


class Status(Reply):
    """The response of /health."""

    status: Literal["ok", "unavailable"]


class Told(Reply):
    """The cause of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Reply):
    """OpenAI's error object, with a hint where a fix is known."""

    error: Told
    hint: str = ""
