"""JSON to a checked request. requests.py checks single fields; the checks across fields are here.

An unknown field is ignored and logged, as OpenAI's clients expect. A field that would change the
answer and is not supported is refused, unless its value leaves it off. null always means absent.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.fields import Fields, read, say, unsupported
from nanokv.apps.serve.api.messages import Tools, for_template
from nanokv.apps.serve.api.requests import (
    ENDLESS,
    SAMPLING,
    AllowedTools,
    ChatPrompt,
    ChatRequest,
    Common,
    NamedTool,
    OfSchema,
    TextRequest,
)
from nanokv.apps.serve.api.tools import Wish, sent_functions, tools_of
from nanokv.decoding.ranges import RANGES
from weights_loader.strict import loads, quote

logger = logging.getLogger(__name__)
MOST_BRACKETS = 200_000  # lists and objects in one request, about 100 bytes of memory each


@dataclass(frozen=True)
class Asked:
    """A request whose fields have the right types and ranges."""

    sources: list  # the messages of one chat, or prompts, each a text or token ids
    param: str  # the field that holds the sources: "messages", "input" or "prompt"
    model: str | None = None
    sampling: dict = field(default_factory=dict)  # only the settings that the request contains
    stop: list[str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # the stop string or stop id is part of the answer
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    n: int = 1  # answers per prompt
    # None: not requested; otherwise the number of likeliest tokens at each position.
    logprobs: int | None = None
    echo: bool = False  # the answer begins with the prompt
    special: bool = True  # add the checkpoint's special tokens around a text, as `encode` does
    template: dict = field(default_factory=dict)
    chat_template: str | None = None  # name of one of the model's templates; None: the default
    # Field → other values of template variables, which must change the prompt.
    contrast: dict[str, dict] = field(default_factory=dict)
    tools: Tools = field(default_factory=Tools)
    schema: dict | None = None  # JSON schema of the answer
    schema_field: str = "response_format"  # the field that has it
    repeated: dict = field(default_factory=dict)  # fields that the answer repeats

    @property
    def chat(self) -> bool:
        """Whether the source is the messages of a chat, which the chat template renders."""
        return self.param != "prompt"

    @property
    def constrained(self) -> bool:
        """Whether a grammar restricts the answer."""
        return self.schema is not None or self.tools.forced


def parse_object(data: bytes) -> dict:
    """The JSON object in a body, without its null fields.

    Raises ApiError beyond the limits of depth and size, and for NaN, repeated names and lone
    surrogates.
    """
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > MOST_BRACKETS:
        raise ApiError(
            400, f"the body has {brackets:,} lists and objects, at most {MOST_BRACKETS:,} are read"
        )
    try:
        value = loads(data)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ApiError(400, f"the body holds U+{half:04X}, which is half a character") from None
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise ApiError(
            400, f"the body is not UTF-8: byte 0x{bad:02x} at position {error.start:,}"
        ) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {say(value)}: an object was expected")
    return {name: item for name, item in value.items() if item is not None}


def chat(fields: dict) -> Asked:
    """A request to /v1/chat/completions."""
    request = read(ChatRequest, fields)
    note_unknown(fields, ChatRequest)
    likely = request.top_logprobs or 0
    if likely and not request.logprobs:
        raise ApiError(400, f"top_logprobs is {likely}: it needs logprobs: true", "top_logprobs")
    asked = replace(
        chat_prompt(request, fields),
        logprobs=likely if request.logprobs else None,
        schema=schema(request),
        **common(request),
    )
    return with_end(asked)


def with_end(asked: Asked) -> Asked:
    """The request; ApiError if its grammar has an end that `ignore_eos` would forbid."""
    if asked.constrained and asked.ignore_eos:
        raise ApiError(
            400, "ignore_eos does not go together with an answer that has an end", "ignore_eos"
        )
    return asked


def tokenize(fields: dict) -> Asked:
    """A request to /tokenize with messages: only the fields that make the prompt."""
    return chat_prompt(read(ChatPrompt, fields), fields)


def text(fields: dict) -> Asked:
    """A request to /v1/completions."""
    request = read(TextRequest, fields)
    note_unknown(fields, TextRequest)
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(request, name) == 0 and not request.echo:
            raise ApiError(
                400, f"{name} is 0: {RANGES['max_new_tokens'].words} was expected, or echo", name
            )
    logprobs = request.logprobs
    if logprobs is False:
        logprobs = None
    return Asked(
        request.prompt,
        "prompt",
        logprobs=logprobs,
        echo=bool(request.echo),
        special=request.add_special_tokens is not False,
        **common(request),
    )


def common(request: Common) -> dict:
    """The fields that both endpoints share."""
    stop = request.stop
    if isinstance(stop, str):
        stop = [stop]
    include = bool(request.include_stop_str_in_output)
    if include and not (stop or request.stop_token_ids):
        name = "include_stop_str_in_output"
        raise ApiError(400, f"{name} is true: it needs stop or stop_token_ids", name)
    return {
        "model": request.model,
        "n": request.n or 1,
        "sampling": sampling(request),
        "stop": stop,
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "include_stop": include,
        "max_new_tokens": most_tokens(request),
        "ignore_eos": bool(request.ignore_eos),
        "stream": bool(request.stream),
        "include_usage": bool(request.stream_options and request.stream_options.include_usage),
    }


def note_unknown(fields: dict, model: type[Fields]) -> None:
    """Log the names of unknown fields."""
    if unknown := [name for name in fields if name not in model.model_fields]:
        more = f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else ""
        logger.info("ignored: %s%s", ", ".join(map(quote, unknown[:5])), more)


def sampling(request: Common) -> dict:
    """The sampling settings that the request contains."""
    found = {name: getattr(request, name) for name in SAMPLING}
    if request.repeat_penalty is not None:
        found["repetition_penalty"] = same(
            "repetition_penalty", found["repetition_penalty"], "repeat_penalty", penalty(request)
        )
    return {name: value for name, value in found.items() if value is not None}


def penalty(request: Common) -> float:
    """`repeat_penalty` as a repetition_penalty over all tokens; ApiError for a shorter window."""
    window = request.repeat_last_n
    if window is None:
        window = request.penalty_last_n
    if request.repeat_penalty == 1 or window == 0:
        return 1.0
    if window != -1:
        hint = 'repetition_penalty looks at all tokens; so does "repeat_last_n": -1'
        raise unsupported("repeat_penalty", request.repeat_penalty, hint)
    return request.repeat_penalty or 1.0


def same(name: str, value: float | None, other: str, wanted: float) -> float:
    """The value of a field with two names; ApiError if they contradict each other."""
    if value not in (None, wanted):
        raise ApiError(
            400, f"{other} is {say(wanted)} and {name} is {say(value)}: they mean the same", other
        )
    return wanted


def most_tokens(request: Common) -> int | None:
    """max_completion_tokens, its older name max_tokens, or the name that another server uses.

    0 is valid with `echo`: the prompt is repeated and nothing follows.
    """
    found = request.max_completion_tokens
    if found is None:
        found = request.max_tokens
    for name in ("max_new_tokens", "n_predict", "num_predict"):
        value = getattr(request, name)
        if value is None:
            continue
        if value == ENDLESS:
            value = int(RANGES["max_new_tokens"].high)
        found = int(same("max_tokens", found, name, value))
    return found


# --- of chats -------------------------------------------------------------------------------------


def chat_prompt(request: ChatPrompt, fields: dict) -> Asked:
    """The fields that make the prompt of a chat."""
    own, contrast = thinking(request)
    return Asked(
        [for_template(request.messages)],
        "messages",
        template=own | (request.chat_template_kwargs or {}),
        contrast=contrast,
        chat_template=request.chat_template,
        tools=tools(request, fields),
    )


def thinking(request: ChatPrompt) -> tuple[dict, dict[str, dict]]:
    """(template variables, field → other values of them that must change the prompt).

    The second part detects a template that does not read the variables: it would ignore the field
    silently. `enable_thinking` is the variable of Qwen3, GLM and others, `thinking` that of
    DeepSeek, `reasoning_effort` that of gpt-oss. The effort "none" turns thinking off, as in vLLM
    and SGLang. Every other effort needs a template that reads it.
    """
    variables: dict = {}
    contrast: dict[str, dict] = {}
    for name, value in wishes(request):
        on = value not in (False, "none")
        if variables.get("enable_thinking", on) != on:
            raise ApiError(
                400, f"{name} is {say(value)}, and {next(iter(contrast))} says the opposite", name
            )
        variables |= {"enable_thinking": on, "thinking": on}
        contrast[name] = {"enable_thinking": not on, "thinking": not on}
        if on and value is not True:
            variables["reasoning_effort"] = value
            contrast[name] = {"reasoning_effort": "low" if value != "low" else "high"}
    return variables, contrast


def wishes(request: ChatPrompt) -> Iterator[tuple[str, bool | str]]:
    """Yield (field, true, false or an effort) for every field about thinking in the request."""
    reasoning = request.reasoning
    said: dict[str, Any] = {
        "enable_thinking": request.enable_thinking,
        "think": request.think,
        "thinking": request.thinking and request.thinking.type == "enabled",
        "reasoning.enabled": reasoning and reasoning.enabled,
        "reasoning.effort": reasoning and reasoning.effort,
        "reasoning_effort": request.reasoning_effort,
    }
    return ((name, value) for name, value in said.items() if value is not None)


def schema(request: ChatRequest) -> dict | None:
    """`response_format` as a JSON schema; None allows any text."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if isinstance(wanted, OfSchema):
        return wanted.json_schema.schema_
    return {"type": "object"} | (wanted.schema_ or {})


def tools(request: ChatPrompt, fields: dict) -> Tools:
    """`tools`, `tool_choice`, `parallel_tool_calls`. Functions stay as the client sent them."""
    functions = sent_functions(request.tools, fields.get("tools"), itemgetter("function"))
    return tools_of(functions, wish(request.tool_choice), request.parallel_tool_calls is not False)


def wish(choice: str | NamedTool | AllowedTools | None) -> Wish:
    """`tool_choice`."""
    if isinstance(choice, NamedTool):
        return Wish(function=choice.function.name)
    if isinstance(choice, AllowedTools):
        among = choice.allowed_tools
        functions = [tool.function for tool in among.tools if tool.type == "function"]
        return Wish(among.mode, allowed=tuple(one.name if one else "" for one in functions))
    return Wish(choice or "auto")
