"""GET /openapi.json: every address, field and answer of this server as an OpenAPI 3.1 document.

Ranges and lists come from the code that checks them (sample.RANGES, protocol.py), the rest is written by hand.
tests/test_serve_schema.py compares it with what is served: addresses, fields, answers, and generated requests.
"""

from typing import Any

from nanokv.decoding.ranges import RANGES
from nanokv.serve.live import TAB, TABS
from nanokv.serve.logprobs import UNLIKELIEST
from nanokv.serve.messages import MOST_TOOLS, NAME, ROLES
from nanokv.serve.protocol import (
    ELSEWHERE,
    LONGEST_STOP,
    MOST_ANSWERS,
    MOST_LIKELY,
    MOST_PROMPTS,
    MOST_STOPS,
    NOT_DONE,
    RESERVED,
    SAMPLING,
)

TEXT, COUNT, YES_NO = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NUMBER, OBJECT, NULL = {"type": "number"}, {"type": "object"}, {"type": "null"}
IDS = {"type": "array", "items": COUNT}
LOGPROB = NUMBER | {"minimum": UNLIKELIEST, "maximum": 0}
PROMPT = {"type": "string", "minLength": 1}, IDS | {"minItems": 1}


def document() -> dict:
    """All of it, as a JSON object."""
    refusals = {"4XX": {"$ref": "#/components/responses/Error"}, "5XX": {"$ref": "#/components/responses/Error"}}
    return {
        "openapi": "3.1.0", "info": {"title": "nanokv serve", "version": "1"},
        "security": [{"key": []}, {}],
        "paths": {path: {verb: operation | {"responses": {"200": answer} | refusals}}
                  for path, (verb, operation, answer) in operations().items()},
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "responses": {"Error": json_of(error(), "OpenAI's object, and a hint where there is one")},
            "schemas": {"Message": message(), "Tool": tool(), "Usage": usage(), "Timings": timings(),
                        "Model": model()},
        },
    }  # fmt: skip


def operations() -> dict[str, tuple[str, dict, dict]]:
    """path → (verb, operation, answer)"""
    name = {"name": "name", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}
    models = closed({"object": {"const": "list"}, "data": {"type": "array", "items": ref("Model"), "minItems": 1}})
    status = closed({"status": {"enum": ["ok", "unavailable"]}})
    tokens = closed({"tokens": IDS, "count": COUNT, "max_model_len": COUNT})
    stream: dict[str, Any] = {"text/event-stream": {}}
    tab = {"parameters": [{"name": TAB, "in": "header", "schema": TEXT | {"pattern": f"^{TABS}$"}}]}
    chat, text = answer("chat.completion", message_choice()), answer("text_completion", text_choice())
    return {
        "/": ("get", {"security": []}, content("text/html", TEXT, "a chat beside the cache")),
        "/live": ("get", tab, content("text/event-stream", TEXT, "the engine, whenever it has changed; without end")),
        "/v1/chat/completions": ("post", tab | body(chat_request()), json_of(chat, **stream)),
        "/v1/completions": ("post", tab | body(text_request()), json_of(text, **stream)),
        "/v1/models": ("get", {}, json_of(models)),
        "/v1/models/{name}": ("get", {"parameters": [name]}, json_of(ref("Model"))),
        "/tokenize": ("post", body({"anyOf": [fields(**chat_only()), fields({"prompt": TEXT}, **special())]}),
                      json_of(tokens)),
        "/detokenize": ("post", body(fields({"tokens": IDS})), json_of(closed({"prompt": TEXT}))),
        "/health": ("get", {"security": []}, json_of(status)),
        "/metrics": ("get", {}, content("text/plain", TEXT, "for Prometheus")),
        "/openapi.json": ("get", {}, json_of(OBJECT)),
    }  # fmt: skip


# --- requests ---------------------------------------------------------------------------------------------------------


def chat_request() -> dict:
    """Of /v1/chat/completions."""
    most = {"logprobs": YES_NO, "top_logprobs": integer(0, MOST_LIKELY["messages"])}
    return fields(**chat_only(), **common(), **most, response_format=response_format(), **elsewhere("messages"))


def chat_only() -> dict:
    """What makes a prompt of messages."""
    template = OBJECT | {"propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": list(RESERVED)}}}
    messages = {"type": "array", "items": ref("Message"), "minItems": 1}
    tools = {"type": "array", "items": ref("Tool"), "maxItems": MOST_TOOLS}
    one = fields({"type": {"const": "function"}, "function": fields({"name": TEXT})})
    choice = {"anyOf": [{"enum": ["none", "auto", "required"]}, one]}
    return {"needed": {"messages": messages}, "chat_template_kwargs": template, "tools": tools,
            "tool_choice": choice, "parallel_tool_calls": YES_NO}  # fmt: skip


def response_format() -> dict:
    """Of what form the answer must be."""
    schema = {"type": {"const": "json_schema"}, "json_schema": fields({"schema": OBJECT})}
    return {"anyOf": [fields({"type": {"enum": ["text", "json_object"]}}), fields(schema)]}


def text_request() -> dict:
    """Of /v1/completions: a text, token ids, or a list of them. Where the prompt is repeated, nothing need follow."""
    several = {"type": "array", "items": {"anyOf": [*PROMPT]}, "minItems": 1, "maxItems": MOST_PROMPTS}
    likely = {"anyOf": [{"const": False}, integer(0, MOST_LIKELY["prompt"])]}
    most = {name: ranged("max_new_tokens") | {"minimum": 0} for name in ("max_tokens", "max_completion_tokens")}
    shared = common() | most | special() | elsewhere("prompt")
    return fields({"prompt": {"anyOf": [*PROMPT, several]}}, echo=YES_NO, logprobs=likely, **shared)


def special() -> dict:
    """What the checkpoint puts around a text."""
    return {"add_special_tokens": YES_NO}


def common() -> dict:
    """What both kinds have. A field that is not done takes the values that ask for nothing."""
    stop = TEXT | {"minLength": 1, "maxLength": LONGEST_STOP}
    return {
        "model": TEXT, "stream": YES_NO, "ignore_eos": YES_NO, "n": integer(1, MOST_ANSWERS),
        "stream_options": OBJECT | {"properties": {"include_usage": nullable(YES_NO)}},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MOST_STOPS}]},
        "stop_token_ids": {"type": "array", "items": {"type": "integer"}}, "include_stop_str_in_output": YES_NO,
        "max_tokens": ranged("max_new_tokens"), "max_completion_tokens": ranged("max_new_tokens"),
        **{name: ranged(name) for name in SAMPLING}, "seed": seed(),
        **{name: only(nothing) for name, nothing in NOT_DONE.items()},
    }  # fmt: skip


def elsewhere(param: str) -> dict:
    """What only the other address does."""
    return {name: only(nothing) for name, nothing in ELSEWHERE[param].items()}


def only(nothing: tuple) -> dict:
    """The values that ask for nothing."""
    return {"enum": list(nothing)} if nothing else NULL


def ranged(name: str) -> dict:
    """The range in which a number is accepted."""
    wanted = RANGES[name]
    least = wanted.low if wanted.also is None else min(wanted.low, wanted.also)
    kind = "integer" if wanted.kind is int else "number"
    return {"type": kind, "minimum": least, "maximum": wanted.high, "description": wanted.words}


def seed() -> dict:
    """64 bits, with a sign or without."""
    return ranged("seed") | {"minimum": -(2**63)}


def message() -> dict:
    """One message; an assistant may have said nothing, and a tool says which call it answers."""
    part = {"anyOf": [closed({"type": {"const": name}, name: TEXT}, True) for name in ("text", "refusal")]}
    content = {"anyOf": [TEXT, {"type": "array", "items": part}]}
    asks = {"role": {"enum": [role for role in ROLES if role not in ("assistant", "tool")]}, "content": content}
    tool = {"role": {"const": "tool"}, "content": content, "tool_call_id": TEXT}
    calls = {"type": "array", "items": made_call()}
    assistant = fields({"role": {"const": "assistant"}}, content=content, reasoning_content=TEXT, tool_calls=calls)
    return {"anyOf": [fields(asks, reasoning_content=TEXT), fields(tool), assistant]}


def made_call() -> dict:
    """A call that the assistant has made. `arguments` are the JSON of an object, or empty."""
    needed = {"id": TEXT, "function": fields({"name": TEXT, "arguments": TEXT})}
    return OBJECT | {"properties": needed | {"type": {"const": "function"}}, "required": list(needed)}


def tool() -> dict:
    """A function that the model may call; `parameters` is a JSON schema."""
    name = {"name": TEXT | {"pattern": f"^{NAME.pattern}$"}}
    function = fields(name, description=TEXT, parameters=OBJECT, strict=YES_NO)
    return fields({"type": {"const": "function"}, "function": function})


# --- answers ----------------------------------------------------------------------------------------------------------


def answer(kind: str, choice: dict) -> dict:
    """Not streamed. `timings` are those of one answer, so several have none."""
    whole = {
        "id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT,
        "choices": {"type": "array", "items": choice, "minItems": 2},
        "usage": ref("Usage"), "seed": nullable(seed()),
    }  # fmt: skip
    one = {"choices": {"type": "array", "items": choice, "minItems": 1, "maxItems": 1}, "timings": ref("Timings")}
    return {"anyOf": [closed(whole | one), closed(whole)]}


def message_choice() -> dict:
    """One answer of a chat: a message, which may be calls only."""
    texts = {"role": {"const": "assistant"}, "content": TEXT, "refusal": NULL}
    called = texts | {"content": nullable(TEXT), "tool_calls": {"type": "array", "items": call(), "minItems": 1}}
    messages = [closed(said, optional={"reasoning_content": TEXT}) for said in (texts, called)]
    return choice({"message": {"anyOf": messages}}, content_logprobs(), "tool_calls")


def text_choice() -> dict:
    """One continuation."""
    return choice({"text": TEXT}, text_logprobs())


def choice(said: dict, logprobs: dict, *reasons: str) -> dict:
    """One answer, and what ended it."""
    ended = {"finish_reason": {"enum": ["stop", "length", *reasons]}, "stop_reason": nullable(TEXT)}
    return closed({"index": COUNT, **said, "logprobs": nullable(logprobs), **ended})


def call() -> dict:
    """A call in an answer."""
    function = closed({"name": TEXT, "arguments": TEXT})
    return closed({"id": TEXT, "type": {"const": "function"}, "function": function})


def content_logprobs() -> dict:
    """Of a chat: each token of the content, and the likeliest in its place."""
    token = {"token": TEXT, "logprob": LOGPROB, "bytes": {"type": "array", "items": integer(0, 255)}}
    top = {"type": "array", "items": closed(token), "maxItems": MOST_LIKELY["messages"]}
    return closed({"content": {"type": "array", "items": closed(token | {"top_logprobs": top})}, "refusal": NULL})


def text_logprobs() -> dict:
    """Of a completion: lists of one length. The first token of a prompt that is repeated has null."""
    top = nullable(OBJECT | {"additionalProperties": LOGPROB})
    each = {"tokens": TEXT, "token_logprobs": nullable(LOGPROB), "top_logprobs": top, "text_offset": COUNT}
    return closed({name: {"type": "array", "items": one} for name, one in each.items()})


def usage() -> dict:
    """Tokens."""
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT)
    return closed(counts | {"prompt_tokens_details": closed({"cached_tokens": COUNT})})


def timings() -> dict:
    """Seconds and rates; null where nothing was computed."""
    names = ("ttft_s", "prefill_tok_s", "decode_tok_s", "queue_s", "total_s")
    return closed({name: nullable(NUMBER) for name in names} | {"preemptions": COUNT})


def model() -> dict:
    """One name of the model."""
    return closed({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT,
                   "max_model_len": COUNT})  # fmt: skip


def error() -> dict:
    """Of a refusal or a failure."""
    told = {"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)}
    return closed({"error": closed(told)}, optional={"hint": TEXT})


# --- words ------------------------------------------------------------------------------------------------------------


def fields(needed: dict, **others: dict) -> dict:
    """Of a request: those that must be there; others may be null or absent, and unknown ones are ignored."""
    properties = needed | {name: nullable(schema) for name, schema in others.items()}
    return OBJECT | {"properties": properties, "required": list(needed)}


def closed(properties: dict, more: bool = False, optional: dict | None = None) -> dict:
    """Of an answer: all of these, some of the optional ones, and `more` or nothing else."""
    known = properties | (optional or {})
    return OBJECT | {"properties": known, "required": list(properties), "additionalProperties": more}


def integer(low: int, high: int) -> dict:
    """From low to high."""
    return {"type": "integer", "minimum": low, "maximum": high}


def nullable(schema: dict) -> dict:
    """Or null."""
    return {"anyOf": [schema, NULL]}


def ref(name: str) -> dict:
    """A schema of the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def body(schema: dict) -> dict:
    """A request's body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def json_of(schema: dict, text: str = "the answer", **others: Any) -> dict:
    """A response in JSON, and other forms of it."""
    found = content("application/json", schema, text)
    return found | {"content": found["content"] | others}


def content(media_type: str, schema: dict, text: str) -> dict:
    """A response."""
    return {"description": text, "content": {media_type: {"schema": schema}}}
