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


class Thought(Reply):
    """Tokens of the answer that are thoughts."""

    reasoning_tokens: Count


class Usage(Reply):
    """Counts of tokens."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: Cached
    completion_tokens_details: Thought


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


class InputDetails(Reply):
    """Input tokens that were found in the cache; none is written at a price."""

    cached_tokens: Count
    cache_write_tokens: Literal[0]


class ResponseUsage(Reply):
    """Counts of tokens, under the names of the Responses API."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: Thought
    total_tokens: Count


class OutputText(Reply):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list, Field(max_length=0)]
    logprobs: list[Drawn]


class ReasoningText(Reply):
    """The text of thoughts."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Reply):
    """A message of the assistant."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: Annotated[list[OutputText], Field(min_length=1, max_length=1)]


class FunctionCall(Reply):
    """A call of a function; `arguments` is a JSON object as text."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed"]


class Thoughts(Reply):
    """The model's thoughts; they are not summarized."""

    type: Literal["reasoning"]
    id: str
    status: Literal["completed", "incomplete"]
    summary: Annotated[list, Field(max_length=0)]
    content: Annotated[list[ReasoningText], Field(min_length=1, max_length=1)]


class Incomplete(Reply):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """The answer of /v1/responses. It repeats fields of the request, which are not listed here."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: Incomplete | None
    model: str
    output: Annotated[list[OutputMessage | FunctionCall | Thoughts], Field(min_length=1)]
    previous_response_id: None
    store: bool
    usage: ResponseUsage


class ResponseTokens(Reply):
    """The response of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class MessageTokens(Reply):
    """The response of /v1/messages/count_tokens."""

    input_tokens: Count


class TextBlock(Reply):
    """Text of a message in Anthropic's form."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Reply):
    """Thoughts; they are not signed."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseBlock(Reply):
    """A call of a function."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict


class ThinkingTokens(Reply):
    """Tokens of the answer that are thoughts."""

    thinking_tokens: Count


class MessageUsage(Reply):
    """Counts of tokens, under Anthropic's names: input_tokens are those that were computed."""

    input_tokens: Count
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: ThinkingTokens


class Message(Reply):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class EmbeddingUsage(Reply):
    """Counts of tokens of all inputs."""

    prompt_tokens: Count
    total_tokens: Count


class Vector(Reply):
    """The embedding of one input: numbers, or the base64 of little-endian fp32."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(Reply):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: Annotated[list[Vector], Field(min_length=1)]
    model: str
    usage: EmbeddingUsage


class ShortModel(Reply):
    """One name of the model, as Codex reads it."""

    name: str
    model: str


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
    models: Annotated[list[ShortModel], Field(min_length=1)]


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


class MessagesTold(Reply):
    """The cause of an error in Anthropic's form. A hint is a part of the message."""

    type: str
    message: str


class MessagesError(Reply):
    """Anthropic's error object."""

    type: Literal["error"]
    error: MessagesTold
