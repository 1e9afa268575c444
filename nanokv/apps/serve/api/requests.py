"""The fields of requests, defined once for the checks, the known names, and /openapi.json.

Unsupported fields of other servers are listed in known.py and become fields of these models too.
"""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, create_model

from nanokv.apps.serve.api.fields import (
    Between,
    Checked,
    Expected,
    Fields,
    Nothing,
    Object,
    Ranged,
    Text,
    YesNo,
    expected,
    invalid,
    not_done,
    say,
)
from nanokv.apps.serve.api.known import CHAT_ONLY, HARMLESS, NOT_DONE, TEXT_ONLY, refused
from nanokv.apps.serve.api.messages import Messages
from nanokv.apps.serve.api.tools import OtherTool, kind_of_tool
from weights_loader.strict import quote

MOST_STOPS = 16  # stop strings; each new token is compared with all of them
LONGEST_STOP = 1_000  # characters
MOST_STOP_IDS = 1_000
MOST_ANSWERS = 16  # `n`
MOST_PROMPTS = 256  # per request; each answer takes a place in the queue
# OpenAI's limits for `top_logprobs` of a chat and `logprobs` of a completion.
MOST_LIKELY = {"messages": 20, "prompt": 5}
MOST_TOOLS = 128
RESERVED = (  # template variables that are set by the renderer or the checkpoint
    "self",
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "chat_template",
)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
SCHEMA = "a JSON schema comes with the type json_schema, or as schema with json_object"
NAME = re.compile("[A-Za-z0-9_-]{1,64}")  # of a function
FunctionName = Annotated[
    str,
    Field(pattern=f"^{NAME.pattern}$"),
    Expected("a name of 1 to 64 letters, digits, _ and -"),
]
IDS: dict = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPT: list[dict] = [{"type": "string", "minLength": 1}, IDS | {"minItems": 1}]
ENDLESS = -1  # llama.cpp's and Ollama's number of tokens for an answer without a limit
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS = ", ".join(get_args(Effort))
CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": …}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}'
)


# --- checks that are more than a type -------------------------------------------------------------


def variables(value: Any) -> dict:
    """Check `chat_template_kwargs`."""
    if not isinstance(value, dict):
        raise expected("an object")
    for name in value:
        if name in RESERVED or not name.isidentifier():
            raise invalid(f"chat_template_kwargs cannot set {quote(name)}")
    return value


def template_name(value: Any) -> str:
    """Check `chat_template`: the name of one of the model's templates. Source code is refused."""
    if isinstance(value, str) and re.search(r"\{[{%#]", value):
        raise not_done("chat_template takes the name of one of the model's own templates")
    if not isinstance(value, str) or not value:
        raise expected("the name of one of the model's chat templates")
    return value


def each_source(value: Any, name: str, most: int) -> list:
    """Check `prompt` or `input`; returns a list of texts and lists of token ids."""
    if not isinstance(value, str | list):
        raise expected("a text or a list")
    found: list[Any]
    if isinstance(value, str):
        found = [value]
    elif not value or type(value[0]) is int:  # one prompt as token ids
        found = [value]
    else:
        found = value
    if not all(isinstance(one, str | list) for one in found):
        raise expected("a list of texts or lists of token ids")
    if len(found) > most:
        raise invalid(f"{len(found):,} {name}s in one request, at most {most:,} are answered")
    for one in found:
        if isinstance(one, list):
            whole_numbers(one, name)
    if "" in found or [] in found:
        raise invalid(f"the {name} is empty: the model needs at least one token")
    return found


def sources(most: int) -> dict:
    """The JSON schema of what `each_source` accepts."""
    several = {"type": "array", "items": {"anyOf": PROMPT}, "minItems": 1, "maxItems": most}
    return {"anyOf": [*PROMPT, several]}


def whole_numbers(found: list, name: str) -> list[int]:
    """Check a list of token ids, which may hold nothing but integers."""
    for one in found:
        if type(one) is not int:
            raise invalid(f"{name} holds {say(one)}: whole numbers were expected")
    return found


def token_ids(value: Any) -> list:
    """Check `tokens`."""
    if not isinstance(value, list):
        raise expected("a list")
    return whole_numbers(value, "tokens")


# --- parts ----------------------------------------------------------------------------------------


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: YesNo = None
    # Ignored: usage is sent once, at the end. The field changes no token of an answer.
    continuous_usage_stats: YesNo = None


class Function(Fields):
    """A function that the model may call. Its `parameters` are a JSON schema."""

    name: FunctionName
    description: Text = None
    parameters: Object = None
    strict: YesNo = None


class Tool(Fields):
    """A tool that the model may call: a function."""

    type: Literal["function"]
    function: Function


AnyTool = Annotated[
    Annotated[Tool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(kind_of_tool),
]


class Named(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """A `tool_choice` that names one function."""

    type: Literal["function"]
    function: Named


class AllowedTool(Fields):
    """A tool that may be called. Only functions have a name here."""

    type: str
    function: Named | None = None


class Allowed(Fields):
    """The tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedTools(Fields):
    """A `tool_choice` among some of the tools; the prompt keeps all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class JsonSchema(Fields):
    """OpenAI's wrapper around a JSON schema."""

    schema_: Annotated[dict[str, Any], Expected("an object")] = Field(alias="schema")


class AnyText(Fields):
    """Plain text: no schema applies."""

    type: Literal["text"]
    schema_: Annotated[Any, Nothing(hint=SCHEMA)] = Field(None, alias="schema")
    json_schema: Annotated[Any, Nothing(hint=SCHEMA)] = None


class AnyObject(Fields):
    """Any JSON object, or the objects of a schema given without OpenAI's wrapper."""

    type: Literal["json_object"]
    schema_: Object = Field(None, alias="schema")
    json_schema: Annotated[Any, Nothing(hint=SCHEMA)] = None


class OfSchema(Fields):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def form(value: Any) -> str | None:
    """The discriminator's tag of a `response_format`."""
    if not isinstance(value, dict):
        return None
    tags = {"text": "<text>", "json_object": "<object>", "json_schema": "<schema>"}
    return tags.get(str(value.get("type")))


Format = Annotated[
    Annotated[AnyText, Tag("<text>")]
    | Annotated[AnyObject, Tag("<object>")]
    | Annotated[OfSchema, Tag("<schema>")],
    Discriminator(form, "expected", "an object with the type text, json_object or json_schema"),
]


class Reasoning(Fields):
    """How long the model thinks, in the format of OpenRouter, Ollama and the Responses API."""

    effort: Annotated[Effort | None, Expected(EFFORTS)] = None
    enabled: YesNo = None
    exclude: Annotated[Any, Nothing(False)] = None
    max_tokens: Annotated[Any, Nothing()] = None


class Thinking(Fields):
    """Whether the model thinks at all, in the format of DeepSeek, GLM and Anthropic."""

    type: Annotated[Literal["enabled", "disabled"], Expected("enabled or disabled")]
    budget_tokens: Annotated[Any, Nothing()] = None


class ChatPrompt(Fields):
    """The fields that make the prompt of a chat; /tokenize reads no others."""

    messages: Messages
    tools: Annotated[list[AnyTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
        Expected(CHOICES),
    ] = None
    parallel_tool_calls: YesNo = None
    chat_template: Annotated[
        str | None, Checked(template_name, {"type": "string", "pattern": "^[^{]+$"})
    ] = None
    chat_template_kwargs: Annotated[
        dict | None,
        Checked(
            variables,
            {
                "type": "object",
                "propertyNames": {
                    "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
                    "not": {"enum": list(RESERVED)},
                },
            },
        ),
    ] = None
    enable_thinking: YesNo = None
    think: Annotated[bool | Effort | None, Expected(f"true, false, {EFFORTS}")] = None
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Annotated[Effort | None, Expected(EFFORTS)] = None


# --- requests -------------------------------------------------------------------------------------

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[int | None, Ranged("max_new_tokens")]
MaybeNoTokens = Annotated[int | None, Ranged("max_new_tokens", 0)]
MaybeEndless = Annotated[int | None, Ranged("max_new_tokens", ENDLESS)]


class Common(Fields):
    """The fields that both endpoints support."""

    model: Text = None
    stream: YesNo = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Between(1, MOST_ANSWERS)] = None
    temperature: Annotated[float | None, Ranged("temperature")] = None
    top_k: Annotated[int | None, Ranged("top_k")] = None
    top_p: Annotated[float | None, Ranged("top_p")] = None
    min_p: Annotated[float | None, Ranged("min_p")] = None
    repetition_penalty: Annotated[float | None, Ranged("repetition_penalty")] = None
    seed: Annotated[int | None, Ranged("seed")] = None
    repeat_penalty: Annotated[float | None, Ranged("repetition_penalty")] = None
    """llama.cpp's name of repetition_penalty. llama.cpp applies it to the last `repeat_last_n`
    tokens, by default 64; this server applies it to all tokens, as with `repeat_last_n`: -1."""
    repeat_last_n: Annotated[int | None, Between(-1, 2**31 - 1)] = None
    penalty_last_n: Annotated[int | None, Between(-1, 2**31 - 1)] = None
    stop: Annotated[
        Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None,
        Expected(f"a list of at most {MOST_STOPS} texts of 1 to {LONGEST_STOP:,} characters"),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_STOP_IDS)] | None,
        Expected(f"a list of at most {MOST_STOP_IDS:,} token ids"),
    ] = None
    include_stop_str_in_output: YesNo = None
    ignore_eos: YesNo = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    max_new_tokens: Tokens = None
    n_predict: MaybeEndless = None
    num_predict: MaybeEndless = None


_Chat: Any = create_model("_Chat", __base__=Common, **refused(NOT_DONE, TEXT_ONLY), **HARMLESS)
_Text: Any = create_model("_Text", __base__=Common, **refused(NOT_DONE, CHAT_ONLY), **HARMLESS)


class ChatRequest(_Chat, ChatPrompt):
    """The body of /v1/chat/completions."""

    response_format: Format | None = None
    logprobs: YesNo = None
    top_logprobs: Annotated[int | None, Between(0, MOST_LIKELY["messages"])] = None


class TextRequest(_Text):
    """The body of /v1/completions: a text, token ids, or a list of them.

    With `echo`, max_tokens may be 0: the prompt is repeated and nothing follows.
    """

    prompt: Annotated[
        list,
        Checked(
            lambda value: each_source(value, "prompt", MOST_PROMPTS),
            sources(MOST_PROMPTS),
            needed=True,
        ),
    ]
    echo: YesNo = None
    logprobs: Annotated[Any, Between(0, MOST_LIKELY["prompt"], False)] = None
    add_special_tokens: YesNo = None
    max_tokens: MaybeNoTokens = None
    max_completion_tokens: MaybeNoTokens = None


class TokenizeText(Fields):
    """The body of /tokenize, which accepts a ChatPrompt as well."""

    prompt: Annotated[str, Expected("a text")]
    add_special_tokens: YesNo = None


class Detokenize(Fields):
    """The body of /detokenize."""

    tokens: Annotated[list, Checked(token_ids, IDS, needed=True)]
