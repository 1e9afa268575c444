"""JSON to a checked request. Each field is checked here, once, and a refusal names it.

A field that nobody knows is ignored and logged, as OpenAI's clients expect. A field that would change the answer and is
not done yet is refused, unless its value asks for nothing. null is the same as absent everywhere.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from nanokv.decoding.sample import check_sampling
from nanokv.errors import GenerationError
from nanokv.serve.errors import ApiError
from weights_loader.strict import loads, quote

logger = logging.getLogger(__name__)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
MOST_BRACKETS = 200_000  # of lists and objects in one request, about 100 bytes of memory each
MOST_STOPS, LONGEST_STOP = 16, 1_000  # each token is compared with all of them
MOST_ANSWERS, MOST_PROMPTS = 16, 256  # `n`; and prompts of a request, all of which have a place in the queue
MOST_LIKELY = {"messages": 20, "prompt": 5}  # OpenAI's limits of top_logprobs, and of a completion's logprobs
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # of the template's own variables
KNOWN = {
    "model", "messages", "prompt", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens",
    "ignore_eos", "chat_template_kwargs", "add_special_tokens", "n", "logprobs", "top_logprobs", "echo", *SAMPLING,
}  # fmt: skip
NOT_DONE: dict[str, tuple] = {  # field → the values that ask for nothing
    "best_of": (1,), "prompt_logprobs": (0,), "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"),
    "functions": ([],), "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "logit_bias": ({},),
    "presence_penalty": (0,), "frequency_penalty": (0,), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "structured_outputs": ({},), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "grammar": ("",), "json_schema": ({},), "min_tokens": (0,), "stop_token_ids": ([],),
    "continue_final_message": (False,), "use_beam_search": (False,),
}  # fmt: skip

ELSEWHERE: dict[str, dict[str, tuple]] = {  # the same of what only the other address knows
    "messages": {"echo": (False,)}, "prompt": {"top_logprobs": (0,)},
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request whose fields are of the right kind and in their ranges."""

    sources: list  # of a chat its messages; or prompts, each a text or token ids to continue
    param: str  # the field that they came from
    model: str | None = None
    sampling: dict = field(default_factory=dict)  # what the request says itself
    stop: list[str] | None = None
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    n: int = 1  # answers to each
    logprobs: int | None = None  # None: not asked for; else so many of the likeliest tokens at each place
    echo: bool = False  # the prompt before its continuation
    special: bool = True  # what the checkpoint puts around a text, as in `encode`
    template: dict = field(default_factory=dict)


def parse_object(data: bytes) -> dict:
    """The JSON object in a body, bounded in depth and size; no NaN, no repeated names, no half characters."""
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > MOST_BRACKETS:
        raise ApiError(400, f"the body has {brackets:,} lists and objects, at most {MOST_BRACKETS:,} are read")
    try:
        value = loads(data)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ApiError(400, f"the body holds U+{half:04X}, which is half a character") from None
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise ApiError(400, f"the body is not UTF-8: byte 0x{bad:02x} at position {error.start:,}") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}, not an object")
    return {name: item for name, item in value.items() if item is not None}


def chat(fields: dict) -> Asked:
    """Of /v1/chat/completions."""
    template = kind(fields, "chat_template_kwargs", dict, {})
    if wrong := [name for name in template if name in RESERVED or not name.isidentifier()]:
        raise ApiError(400, f"chat_template_kwargs cannot set {quote(wrong[0])}", "chat_template_kwargs")
    found = common(fields, "messages")
    likely, wanted = integer(fields, "top_logprobs", 0, MOST_LIKELY["messages"]), kind(fields, "logprobs", bool, False)
    if likely and not wanted:
        raise ApiError(400, f"top_logprobs is {likely}: it needs logprobs: true", "top_logprobs")
    return Asked([messages(fields)], template=template, logprobs=(likely or 0) if wanted else None, **found)


def text(fields: dict) -> Asked:
    """Of /v1/completions."""
    echo = kind(fields, "echo", bool, False)
    found = common(fields, "prompt", least=0 if echo else 1)
    if equal(fields.get("logprobs"), False):
        del fields["logprobs"]
    logprobs = integer(fields, "logprobs", 0, MOST_LIKELY["prompt"])
    special = kind(fields, "add_special_tokens", bool, True)
    return Asked(each_prompt(fields), logprobs=logprobs, echo=echo, special=special, **found)


def each_prompt(fields: dict) -> list:
    """`prompt` as a list of texts and lists of token ids."""
    prompt = needed(fields, "prompt", (str, list))
    is_one = isinstance(prompt, str) or not prompt or type(prompt[0]) is int
    found = [prompt] if is_one else prompt
    if not all(isinstance(one, str | list) for one in found):
        raise ApiError(400, f"prompt is {say(prompt)}: texts or lists of token ids were expected", "prompt")
    if len(found) > MOST_PROMPTS:
        raise ApiError(400, f"{len(found):,} prompts in one request, at most {MOST_PROMPTS} are answered", "prompt")
    if "" in found or [] in found:
        raise ApiError(400, "the prompt is empty: the model needs at least one token to continue", "prompt")
    return found


def common(fields: dict, param: str, least: int = 1) -> dict:
    """What both have."""
    refuse_not_done(fields, param)
    options = kind(fields, "stream_options", dict, {})
    return {
        "param": param, "n": integer(fields, "n", 1, MOST_ANSWERS) or 1,
        "model": kind(fields, "model", str, None), "stop": stops(fields), "sampling": sampling(fields),
        "max_new_tokens": most_tokens(fields, least), "ignore_eos": kind(fields, "ignore_eos", bool, False),
        "stream": kind(fields, "stream", bool, False),
        "include_usage": bool(kind(options, "include_usage", bool, False, "stream_options.include_usage")),
    }  # fmt: skip


def kind(fields: dict, name: str, wanted: type | tuple, default: Any, shown: str | None = None) -> Any:
    """A field of the type wanted, or the default where it is absent."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, wanted):
        names = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
        words = " or ".join(names[one] for one in (wanted if isinstance(wanted, tuple) else (wanted,)))
        raise ApiError(400, f"{shown or name} is {say(value)}: {words} was expected", shown or name)
    return value


def needed(fields: dict, name: str, wanted: type | tuple) -> Any:
    """The same of a field that must be there."""
    if fields.get(name) is None:
        raise ApiError(400, f"{name} is missing", name)
    return kind(fields, name, wanted, None)


def say(value: Any) -> str:
    """A value in a message, short."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def integer(fields: dict, name: str, low: int, high: int) -> int | None:
    """A field from low to high, or None where it is absent."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise ApiError(400, f"{name} is {say(value)}: an integer from {low} to {high} was expected", name)
    return value


def refuse_not_done(fields: dict, param: str) -> None:
    """What would change the answer and is not done; then the log names what nobody knows."""
    for name, nothing in (NOT_DONE | ELSEWHERE[param]).items():
        if name in fields and not any(equal(fields[name], value) for value in nothing):
            raise ApiError(400, f"{name} is {say(fields[name])}: this server does not do that yet", name, "unsupported")
    if unknown := [name for name in fields if name not in KNOWN and name not in NOT_DONE]:
        more = f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else ""
        logger.info("ignored: %s%s", ", ".join(map(quote, unknown[:5])), more)


def equal(one: Any, other: Any) -> bool:
    """To JSON, 0 is not false."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def sampling(fields: dict) -> dict:
    """How tokens are drawn, as far as the request says it; OpenAI's seed may be negative."""
    found = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    if type(found.get("seed")) is int and -(2**63) <= found["seed"] < 0:
        found["seed"] += 2**64
    for name, value in found.items():
        try:
            check_sampling(**{name: value})
        except GenerationError as error:
            raise ApiError(400, str(error), name) from None
    return found


def most_tokens(fields: dict, least: int = 1) -> int | None:
    """max_completion_tokens, or its older name. 0 where a prompt is repeated and nothing is to follow it."""
    name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    value = fields.get(name)
    if value is not None and not (type(value) is int and value == least):
        try:
            check_sampling(max_new_tokens=value)
        except GenerationError as error:
            raise ApiError(400, str(error).replace("max_new_tokens", name), name) from None
    return value


def stops(fields: dict) -> list[str] | None:
    """`stop` as a list; None where the request does not say."""
    value = kind(fields, "stop", (str, list), None)
    if value is None:
        return None
    found = [value] if isinstance(value, str) else value
    if len(found) > MOST_STOPS or not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in found):
        words = f"at most {MOST_STOPS} texts of 1 to {LONGEST_STOP:,} characters were expected"
        raise ApiError(400, f"stop is {say(value)}: {words}", "stop")
    return found


# --- messages -------------------------------------------------------------------------------------------------------


def messages(fields: dict) -> list[dict]:
    """Roles and texts, as the chat template takes them."""
    found = needed(fields, "messages", list)
    if not found:
        raise ApiError(400, "messages is empty: at least one is needed", "messages")
    return [message(value, f"messages[{number}]") for number, value in enumerate(found)]


def message(value: Any, place: str) -> dict:
    """One of them, without what the template has no use for."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{place} is {say(value)}: an object with role and content was expected", place)
    role = value.get("role")
    if role in ("tool", "function") or value.get("tool_calls") or value.get("function_call"):
        raise ApiError(400, f"{place} belongs to a tool call: this server does not do that yet", place, "unsupported")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{place}.role is {say(role)}, not one of {', '.join(ROLES)}", f"{place}.role")
    content = value.get("content")
    if content is None and role != "assistant":
        raise ApiError(400, f"{place}.content is missing", f"{place}.content")
    said = {"role": ROLES[role], "content": content_text(content, f"{place}.content")}
    thought = kind(value, "reasoning_content", str, None, f"{place}.reasoning_content")
    return said if thought is None else said | {"reasoning_content": thought}


def content_text(content: Any, place: str) -> str:
    """A text, or text parts, with a line break between them as llama.cpp and vLLM have it."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"{place} is {say(content)}: a text or a list of parts was expected", place)
    return "\n".join(part_text(part, f"{place}[{number}]") for number, part in enumerate(content))


def part_text(part: Any, place: str) -> str:
    """The text of one part; pictures and sound are refused."""
    name = part.get("type") if isinstance(part, dict) else None
    if name not in ("text", "refusal"):
        raise ApiError(400, f"{place} is {say(part)}: only parts of type text are read", place, "unsupported")
    found = part.get(name)
    if not isinstance(found, str):
        raise ApiError(400, f"{place}.{name} is {say(found)}: a text was expected", f"{place}.{name}")
    return found
