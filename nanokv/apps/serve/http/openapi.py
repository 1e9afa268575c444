"""GET /openapi.json: every path, field and answer of this server as an OpenAPI 3.1 document.

Requests and answers are the models of requests.py and replies.py. A test compares the document with
the running server: its paths, fields and answers, also for generated requests.
"""

import functools
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from nanokv.apps.serve.api import anthropic, embeddings, replies, requests, responses
from nanokv.apps.serve.http.live import TAB, TABS
from nanokv.apps.serve.http.security import ANTHROPIC

TEXT: dict = {"type": "string"}


class Operation(NamedTuple):
    """The operation at one path."""

    verb: str
    asked: tuple[type[BaseModel], ...]  # the body is any of these; (): there is no body
    answers: tuple[type[BaseModel], ...]
    more: dict = {}  # further fields of the operation in the document


TABBED = {"parameters": [{"name": TAB, "in": "header", "schema": TEXT | {"pattern": f"^{TABS}$"}}]}
NAMED = {
    "parameters": [
        {"name": "name", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}
    ]
}
FREE: dict = {"security": []}  # needs no key
OPERATIONS = {
    "/v1/chat/completions": Operation(
        "post", (requests.ChatRequest,), (replies.ChatCompletion, replies.ChatCompletions), TABBED
    ),
    "/v1/completions": Operation(
        "post", (requests.TextRequest,), (replies.TextCompletion, replies.TextCompletions), TABBED
    ),
    "/v1/responses": Operation(
        "post", (responses.ResponsesRequest,), (replies.ResponseObject,), TABBED
    ),
    "/v1/responses/input_tokens": Operation(
        "post", (responses.ResponsesRequest,), (replies.ResponseTokens,)
    ),
    "/v1/messages": Operation("post", (anthropic.MessagesRequest,), (replies.Message,), TABBED),
    "/v1/messages/count_tokens": Operation("post", (anthropic.Prompt,), (replies.MessageTokens,)),
    "/v1/embeddings": Operation("post", (embeddings.EmbeddingRequest,), (replies.Embeddings,)),
    "/v1/models": Operation("get", (), (replies.Models,)),
    "/v1/models/{name}": Operation("get", (), (replies.Model,), NAMED),
    "/tokenize": Operation("post", (requests.ChatPrompt, requests.TokenizeText), (replies.Tokens,)),
    "/detokenize": Operation("post", (requests.Detokenize,), (replies.Detokenized,)),
    "/health": Operation("get", (), (replies.Status,), FREE),
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
OTHERS = {  # paths without models → (further fields, media type, its schema, description)
    "/": (FREE, "text/html", TEXT, "a chat beside a picture of the cache"),
    "/live": (
        TABBED,
        "text/event-stream",
        TEXT,
        "a snapshot of the engine on every change; an endless stream",
    ),
    "/metrics": ({}, "text/plain", TEXT, "metrics in Prometheus' format"),
    "/openapi.json": ({}, "application/json", {"type": "object"}, "this document"),
}


class Plain(GenerateJsonSchema):
    """Generates schemas without titles and without null defaults."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict:
        return self.generate_inner(schema["schema"])


@functools.cache
def document() -> dict:
    """The whole document as a JSON object."""
    models = {model for one in OPERATIONS.values() for model in (*one.asked, *one.answers)}
    models |= {replies.Error, replies.MessagesError}
    ordered = sorted(models, key=lambda model: model.__name__)
    inputs: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (one, "validation") for one in ordered
    ]
    _, found = models_json_schema(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=Plain
    )
    paths = {path: operation(path, one) for path, one in OPERATIONS.items()}
    for path, (more, media_type, schema, text) in OTHERS.items():
        found_at = {"200": content(text, {media_type: schema})}
        paths[path] = {"get": more | {"responses": found_at | refusals(path)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanokv serve", "version": "1"},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "responses": {
                model.__name__: content("an error", {"application/json": any_of((model,))})
                for model in (replies.Error, replies.MessagesError)
            },
            "schemas": found["$defs"],
        },
    }


def refusals(path: str) -> dict:
    """The errors at a path, in the form of its API."""
    model = replies.MessagesError if path.startswith(ANTHROPIC) else replies.Error
    error = {"$ref": f"#/components/responses/{model.__name__}"}
    return {"4XX": error, "5XX": error}


def operation(path: str, one: Operation) -> dict:
    """One operation in the document's format."""
    forms: dict = {"application/json": any_of(one.answers)}
    if path in STREAMS:
        forms["text/event-stream"] = None
    found = one.more | {"responses": {"200": content("the answer", forms)} | refusals(path)}
    if one.asked:
        asked = {"application/json": {"schema": any_of(one.asked)}}
        found = found | {"requestBody": {"required": True, "content": asked}}
    return {one.verb: found}


def any_of(models: tuple[type[BaseModel], ...]) -> dict:
    """The schema of any one of these components."""
    refs = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    if len(refs) == 1:
        return refs[0]
    return {"anyOf": refs}


def content(text: str, forms: dict[str, dict | None]) -> dict:
    """A response. `forms`: media type → schema, or None for any."""
    said = {
        media_type: {} if schema is None else {"schema": schema}
        for media_type, schema in forms.items()
    }
    return {"description": text, "content": said}
