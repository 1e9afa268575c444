"""JSON to a checked request. Each field is checked here, once, and a refusal names it.

A field that nobody knows is ignored and logged, as OpenAI's clients expect. A field that would change the answer and is
not done yet is refused, unless its value asks for nothing. null is the same as absent everywhere.
"""

import json
import logging
from dataclasses import dataclass, field

from nanokv.decoding.ranges import check_sampling
from nanokv.errors import GenerationError
from nanokv.serve.errors import ApiError
from nanokv.serve.fields import equal, integer, kind, needed, say, whole_numbers
from nanokv.serve.messages import Tools, messages, tools
from weights_loader.strict import loads, quote

logger = logging.getLogger(__name__)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
MOST_BRACKETS = 200_000  # of lists and objects in one request, about 100 bytes of memory each
MOST_STOPS, LONGEST_STOP = 16, 1_000  # each token is compared with all of them
MOST_ANSWERS, MOST_PROMPTS = 16, 256  # `n`; and prompts of a request, all of which have a place in the queue
MOST_LIKELY = {"messages": 20, "prompt": 5}  # OpenAI's limits of top_logprobs, and of a completion's logprobs
RESERVED = (  # of the template's own variables, and what the checkpoint sets
    "self", "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token",
    "unk_token",
)
COLDEST = 1e-30  # logits divided by less leave fp32's range
KNOWN = {
    "model", "messages", "prompt", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens",
    "ignore_eos", "chat_template_kwargs", "add_special_tokens", "n", "logprobs", "top_logprobs", "echo", "tools",
    "tool_choice", "parallel_tool_calls", "response_format", "stop_token_ids", "include_stop_str_in_output", *SAMPLING,
}  # fmt: skip
NOT_DONE: dict[str, tuple] = {  # field → the values that ask for nothing
    "best_of": (1,), "prompt_logprobs": (0,), "suffix": ("",),
    "functions": ([],), "function_call": ("none", "auto"), "logit_bias": ({},),
    "presence_penalty": (0,), "frequency_penalty": (0,), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "structured_outputs": ({},), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "grammar": ("",), "json_schema": ({},), "min_tokens": (0,),
    "continue_final_message": (False,), "use_beam_search": (False,),
}  # fmt: skip

ELSEWHERE: dict[str, dict[str, tuple]] = {  # the same of what only the other address knows
    "messages": {"echo": (False,)},
    "prompt": {"top_logprobs": (0,), "tools": ([],), "tool_choice": ("none", "auto"),
               "response_format": ({"type": "text"},)},
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request whose fields are of the right kind and in their ranges."""

    sources: list  # of a chat its messages; or prompts, each a text or token ids to continue
    param: str  # the field that they came from
    model: str | None = None
    sampling: dict = field(default_factory=dict)  # what the request says itself
    stop: list[str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # the stop string is part of the answer
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    n: int = 1  # answers to each
    logprobs: int | None = None  # None: not asked for; else so many of the likeliest tokens at each place
    echo: bool = False  # the prompt before its continuation
    special: bool = True  # what the checkpoint puts around a text, as in `encode`
    template: dict = field(default_factory=dict)
    tools: Tools = field(default_factory=Tools)
    schema: dict | None = None  # of the JSON that the answer must be

    @property
    def constrained(self) -> bool:
        """Whether not every text may be the answer."""
        return self.schema is not None or self.tools.forced


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
    logprobs = (likely or 0) if wanted else None
    asked = Asked([messages(fields)], template=template, logprobs=logprobs, tools=tools(fields),
                  schema=schema(fields), **found)  # fmt: skip
    if asked.constrained and asked.ignore_eos:
        raise ApiError(400, "ignore_eos does not go together with an answer that has an end", "ignore_eos")
    return asked


def schema(fields: dict) -> dict | None:
    """`response_format` as a JSON schema; None: any text."""
    wanted = kind(fields, "response_format", dict, {"type": "text"})
    if wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_object":
        return {"type": "object"}
    if wanted.get("type") != "json_schema":
        words = "text, json_object or json_schema was expected"
        raise ApiError(400, f"response_format.type is {say(wanted.get('type'))}: {words}", "response_format")
    described = needed(wanted, "json_schema", dict, "response_format.json_schema")
    return needed(described, "schema", dict, "response_format.json_schema.schema")


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
    for one in found:
        whole_numbers(one if isinstance(one, list) else [], "prompt")
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
        "stop_token_ids": tuple(whole_numbers(kind(fields, "stop_token_ids", list, []), "stop_token_ids")),
        "include_stop": kind(fields, "include_stop_str_in_output", bool, False),
        "include_usage": bool(kind(options, "include_usage", bool, False, "stream_options.include_usage")),
    }  # fmt: skip


def refuse_not_done(fields: dict, param: str) -> None:
    """What would change the answer and is not done; then the log names what nobody knows."""
    for name, nothing in (NOT_DONE | ELSEWHERE[param]).items():
        if name in fields and not any(equal(fields[name], value) for value in nothing):
            raise ApiError(400, f"{name} is {say(fields[name])}: this server does not do that yet", name, "unsupported")
    if unknown := [name for name in fields if name not in KNOWN and name not in NOT_DONE]:
        more = f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else ""
        logger.info("ignored: %s%s", ", ".join(map(quote, unknown[:5])), more)


def sampling(fields: dict) -> dict:
    """How tokens are drawn, as far as the request says it."""
    found = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    for name, value in unsigned(found).items():
        try:
            check_sampling(**{name: value})
        except GenerationError as error:
            message = str(error).replace("from 0 to 2^64 - 1", "from -2^63 to 2^64 - 1")
            raise ApiError(400, message, name) from None
    if 0 < found.get("temperature", 0) < COLDEST:
        message = f"temperature is {found['temperature']:g}: it must be 0 or at least {COLDEST:g}"
        raise ApiError(400, message, "temperature", hint="0 is greedy")
    return found


def unsigned(found: dict) -> dict:
    """OpenAI's seed may be negative; that of a generator is the same 64 bits without a sign."""
    seed = found.get("seed")
    return found | {"seed": seed + 2**64} if type(seed) is int and -(2**63) <= seed < 0 else found


def most_tokens(fields: dict, least: int = 1) -> int | None:
    """max_completion_tokens, or its older name; both are checked. 0 where a prompt is repeated and nothing is to
    follow it."""
    found = None
    for name in ("max_tokens", "max_completion_tokens"):
        if (value := fields.get(name)) is not None:
            if not (type(value) is int and value == least):
                try:
                    check_sampling(max_new_tokens=value)
                except GenerationError as error:
                    raise ApiError(400, str(error).replace("max_new_tokens", name), name) from None
            found = value
    return found


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
