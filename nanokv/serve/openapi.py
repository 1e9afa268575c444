"""GET /openapi.json: every address, field and answer of this server as an OpenAPI 3.1 document.

Ranges and lists come from the code that checks them (sample.RANGES, protocol.py), the rest is written by hand.
tests/test_serve_schema.py compares it with what is served: addresses, fields, answers, and generated requests.
"""

from typing import Any

from nanokv.decoding.sample import RANGES
from nanokv.serve.messages import ROLES
from nanokv.serve.protocol import LONGEST_STOP, MOST_STOPS, NOT_DONE, RESERVED, SAMPLING

TEXT, COUNT, YES_NO = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NUMBER, OBJECT, NULL = {"type": "number"}, {"type": "object"}, {"type": "null"}
IDS = {"type": "array", "items": COUNT}
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
            "schemas": {"Message": message(), "Usage": usage(), "Timings": timings(), "Model": model()},
        },
    }  # fmt: skip


def operations() -> dict[str, tuple[str, dict, dict]]:
    """path → (verb, operation, answer)"""
    name = {"name": "name", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}
    models = closed({"object": {"const": "list"}, "data": {"type": "array", "items": ref("Model"), "minItems": 1}})
    status = closed({"status": {"enum": ["ok", "unavailable"]}})
    tokens = closed({"tokens": IDS, "count": COUNT, "max_model_len": COUNT})
    stream: dict[str, Any] = {"text/event-stream": {}}
    return {
        "/v1/chat/completions": ("post", body(chat_request()), json_of(answer("chat.completion", said()), **stream)),
        "/v1/completions": (
            "post", body(text_request()), json_of(answer("text_completion", {"text": TEXT}), **stream)),
        "/v1/models": ("get", {}, json_of(models)),
        "/v1/models/{name}": ("get", {"parameters": [name]}, json_of(ref("Model"))),
        "/tokenize": ("post", body({"anyOf": [fields(**chat_only()), fields({"prompt": TEXT}, **special())]}),
                      json_of(tokens)),
        "/detokenize": ("post", body(fields({"tokens": IDS})), json_of(closed({"prompt": TEXT}))),
        "/health": ("get", {"security": []}, json_of(status)),
        "/metrics": ("get", {}, {"description": "for Prometheus", "content": {"text/plain": {"schema": TEXT}}}),
        "/openapi.json": ("get", {}, json_of(OBJECT)),
    }  # fmt: skip


# --- requests ---------------------------------------------------------------------------------------------------------


def chat_request() -> dict:
    """Of /v1/chat/completions."""
    return fields(**chat_only() | common())


def chat_only() -> dict:
    """What makes a prompt of messages."""
    template = OBJECT | {"propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": list(RESERVED)}}}
    messages = {"type": "array", "items": ref("Message"), "minItems": 1}
    return {"needed": {"messages": messages}, "chat_template_kwargs": template}


def text_request() -> dict:
    """Of /v1/completions: a text, token ids, or a list of one of them."""
    several = [{"type": "array", "items": one, "minItems": 1, "maxItems": 1} for one in PROMPT]
    return fields({"prompt": {"anyOf": [*PROMPT, *several]}}, **special(), **common())


def special() -> dict:
    """What the checkpoint puts around a text."""
    return {"add_special_tokens": YES_NO}


def common() -> dict:
    """What both kinds have. A field that is not done takes the values that ask for nothing."""
    stop = TEXT | {"minLength": 1, "maxLength": LONGEST_STOP}
    return {
        "model": TEXT, "stream": YES_NO, "ignore_eos": YES_NO,
        "stream_options": OBJECT | {"properties": {"include_usage": nullable(YES_NO)}},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MOST_STOPS}]},
        "max_tokens": ranged("max_new_tokens"), "max_completion_tokens": ranged("max_new_tokens"),
        **{name: ranged(name) for name in SAMPLING}, "seed": ranged("seed") | {"minimum": -(2**63)},
        **{name: {"enum": list(nothing)} if nothing else NULL for name, nothing in NOT_DONE.items()},
    }  # fmt: skip


def ranged(name: str) -> dict:
    """The range in which a number is accepted."""
    kind, low, high, words = RANGES[name]
    return {"type": "integer" if kind is int else "number", "minimum": low, "maximum": high, "description": words}


def message() -> dict:
    """One message; an assistant may have said nothing."""
    part = {"anyOf": [closed({"type": {"const": name}, name: TEXT}, True) for name in ("text", "refusal")]}
    content = {"anyOf": [TEXT, {"type": "array", "items": part}]}
    roles = {"enum": [role for role in ROLES if role != "assistant"]}
    assistant = fields({"role": {"const": "assistant"}}, content=content, reasoning_content=TEXT)
    return {"anyOf": [fields({"role": roles, "content": content}, reasoning_content=TEXT), assistant]}


# --- answers ----------------------------------------------------------------------------------------------------------


def answer(kind: str, said: dict) -> dict:
    """Not streamed."""
    ended = {"finish_reason": {"enum": ["stop", "length"]}, "stop_reason": nullable(TEXT)}
    choice = closed({"index": {"const": 0}, **said, "logprobs": NULL, **ended})
    return closed({
        "id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT,
        "choices": {"type": "array", "items": choice, "minItems": 1, "maxItems": 1},
        "usage": ref("Usage"), "timings": ref("Timings"), "seed": nullable(COUNT),
    })  # fmt: skip


def said() -> dict:
    """The message of an answer."""
    texts = {"role": {"const": "assistant"}, "content": TEXT, "refusal": NULL}
    return {"message": closed(texts) | {"properties": texts | {"reasoning_content": TEXT}}}


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
    return closed({"error": closed(told)}) | {"properties": {"error": closed(told), "hint": TEXT}}


# --- words ------------------------------------------------------------------------------------------------------------


def fields(needed: dict, **others: dict) -> dict:
    """Of a request: those that must be there; others may be null or absent, and unknown ones are ignored."""
    properties = needed | {name: nullable(schema) for name, schema in others.items()}
    return OBJECT | {"properties": properties, "required": list(needed)}


def closed(properties: dict, more: bool = False) -> dict:
    """Of an answer: all of these, and `more` or nothing else."""
    return OBJECT | {"properties": properties, "required": list(properties), "additionalProperties": more}


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
    """A response."""
    return {"description": text, "content": {"application/json": {"schema": schema}} | others}
