"""The server's routes, and a request from its body to its place in the queue."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nanokv.apps.serve.api import anthropic, embeddings, prompts, protocol, responses
from nanokv.apps.serve.api.anthropic_form import anthropic_model, messages_form
from nanokv.apps.serve.api.errors import ApiError, ClientGone, internal, named
from nanokv.apps.serve.api.fields import read
from nanokv.apps.serve.api.forms import Form, chat_form, text_form
from nanokv.apps.serve.api.items import Items
from nanokv.apps.serve.api.prompts import Prepared, Served
from nanokv.apps.serve.api.protocol import Asked
from nanokv.apps.serve.api.requests import Detokenize, TokenizeText
from nanokv.apps.serve.api.responses_form import ResponsesForm, responses_form
from nanokv.apps.serve.http import openapi, page
from nanokv.apps.serve.http.lanes import Lanes
from nanokv.apps.serve.http.live import Live, Watching, tab_of
from nanokv.apps.serve.http.response import Answer, Large, Limits, Watch, news
from nanokv.apps.serve.http.security import Guard, Hosts, Keys, respond
from nanokv.apps.serve.run.engine_client import EngineClient
from nanokv.apps.serve.run.messages import Count
from nanokv.apps.serve.run.metrics import KeyCounts
from nanokv.apps.serve.run.ticket import Ticket
from nanokv.engine.turns import Client
from nanokv.text.tokenizer import Tokenizer

# Bytes of an oversized body that are read and dropped, so that the client sees the refusal.
DRAINED = 64_000_000


class Reading(NamedTuple):
    """How the body of an address becomes a request."""

    read: Callable[[dict], Asked]  # its fields → the checked request
    chat: str  # the field that lists messages or items; "" if there is none


READINGS = {  # address → how its bodies are read
    "/v1/chat/completions": Reading(protocol.chat, "messages"),
    "/v1/completions": Reading(protocol.text, ""),
    "/v1/responses": Reading(responses.responses, "input"),
    "/v1/responses/input_tokens": Reading(responses.responses, "input"),
    "/v1/messages": Reading(anthropic.messages, "messages"),
    "/v1/messages/count_tokens": Reading(anthropic.count_tokens, "messages"),
}
FORMS: dict[str, Callable[[Prepared, Tokenizer], Form]] = {  # address → form of its answers
    "/v1/chat/completions": chat_form,
    "/v1/completions": text_form,
    "/v1/responses": responses_form,
    "/v1/messages": messages_form,
}
COUNTS = {  # address that counts the tokens of a prompt → more fields of its answer
    "/v1/messages/count_tokens": {},
    "/v1/responses/input_tokens": {"object": "response.input_tokens"},
}


CHATS = "this server answers at /v1/chat/completions, /v1/responses and /v1/messages"
UNSERVED = {  # address of another API → the hint beside its 404
    "/api/chat": f"{CHATS}; Ollama's own API is not served",
    "/api/generate": f"{CHATS}; Ollama's own API is not served",
    "/api/tags": "GET /v1/models lists the models; Ollama's own API is not served",
    "/chat/completions": f"{CHATS}: the base URL ends in /v1",
    "/completions": f"{CHATS}: the base URL ends in /v1",
    "/responses": f"{CHATS}: the base URL ends in /v1",
    "/messages": f"{CHATS}: the base URL of Anthropic's clients ends before /v1",
    "/v1/v1/messages": f"{CHATS}: the base URL of Anthropic's clients ends before /v1",
    "/models": "GET /v1/models lists the models",
    "/embeddings": "POST /v1/embeddings makes embeddings: the base URL ends in /v1",
    "/api/embed": "POST /v1/embeddings makes embeddings; Ollama's own API is not served",
    "/api/embeddings": "POST /v1/embeddings makes embeddings; Ollama's own API is not served",
    "/v1/assistants": f"{CHATS}; assistants and threads are not served",
    "/v1/threads": f"{CHATS}; assistants and threads are not served",
    "/v1/audio/speech": f"{CHATS}; audio is not served",
    "/v1/audio/transcriptions": f"{CHATS}; audio is not served",
    "/v1/images/generations": f"{CHATS}; images are not served",
    "/v1/moderations": f"{CHATS}; moderation is not served",
    "/v1/rerank": f"{CHATS}; reranking is not served",
    "/v1/files": "nanokv batch FILE.jsonl answers a file of requests",
    "/v1/batches": "nanokv batch FILE.jsonl answers a file of requests",
    "/v1/complete": f"{CHATS}; Anthropic's text completions are not served",
}
VERSION = "anthropic-version"  # the header of Anthropic's clients


class Application:
    """The state that the endpoints share."""

    def __init__(self, served: Served, client: EngineClient, keys: Keys, limits: Limits):
        self.served = served
        self.client = client
        self.keys = keys
        self.limits = limits
        self.admission = client.admission
        self.watched = Live(client, served)
        self.prompts = Lanes("prompt")  # JSON, templates and tokenizers
        self.items = Items()
        self.beside = Lanes("tokenize")  # /tokenize delays no chat

    def routes(self) -> list[Route]:
        """Every route of the server."""
        return [
            Route("/", self.page),
            Route("/live", self.live),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.described),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            *[Route(path, self.answer, methods=["POST"]) for path in FORMS],
            *[Route(path, self.count, methods=["POST"]) for path in COUNTS],
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    # --- what is here -----------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """The page: a chat beside a picture of the cache."""
        return Response(page.html(), media_type="text/html", headers=page.headers())

    async def live(self, request: Request) -> Response:
        """The page's data: a stream of snapshots."""
        return Watching(self.watched, request.scope["salt"], tab_of(request), self.limits)

    async def health(self, request: Request) -> Response:
        """Whether the server accepts requests."""
        if self.admission.closed is not None:
            return JSONResponse({"status": "unavailable"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """The metrics in Prometheus' format."""
        state = await self.client.ask(Count)
        served = state.pop("clients")
        keys = [
            KeyCounts(number, self.admission.share(salt).taken, served.get(salt, Client()))
            for salt, number in self.keys.numbers.items()
        ]
        return Response(
            self.client.metrics.text(state, keys), media_type="text/plain; version=0.0.4"
        )

    async def described(self, request: Request) -> Response:
        """The OpenAPI document of the server."""
        return JSONResponse(openapi.document())

    async def models(self, request: Request) -> Response:
        """The model under each of its names.

        Codex reads the names in `models`. Anthropic's clients send their version.
        """
        names = self.served.listed
        found = [self._model(name, request) for name in names]
        if VERSION in request.headers:
            ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
            return JSONResponse({"data": found} | ends)
        short = [{"name": name, "model": name} for name in names]
        return JSONResponse({"object": "list", "data": found, "models": short})

    async def model(self, request: Request) -> Response:
        """The model under one of its names."""
        return JSONResponse(self._model(self.served.name(request.path_params["name"]), request))

    def _model(self, name: str, request: Request) -> dict:
        if VERSION in request.headers:
            return anthropic_model(self.served, name)
        return {
            "id": name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "nanokv",
            "max_model_len": self.served.context,
        }

    async def tokenize(self, request: Request) -> Response:
        """{"prompt": text} or {"messages": […]} → {"tokens": […], "count": N}."""
        return await self._beside(request, self._tokens)

    async def detokenize(self, request: Request) -> Response:
        """{"tokens": […]} → {"prompt": text}."""
        return await self._beside(request, self._text)

    async def count(self, request: Request) -> Response:
        """The tokens of the prompt that a request of the same fields would have."""
        path = request.scope["path"]
        most = prompts.COUNTED * self.served.context

        def counted(body: bytes) -> Response:
            asked = self._asked(body, path, request.scope["salt"], most)
            self.served.name(asked.model)
            ids = named(asked.param, prompts.chat_ids, self.served, asked)
            return JSONResponse(COUNTS[path] | {"input_tokens": len(ids)})

        return await self._beside(request, counted)

    def _tokens(self, body: bytes) -> Response:
        ids = self._ids(body)
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": self.served.context}
        )

    def _ids(self, body: bytes) -> list[int]:
        fields = protocol.parse_object(body)
        if "messages" in fields:
            most = prompts.COUNTED * self.served.context
            self.served.check_parts(fields["messages"], "messages", most)
            asked = protocol.tokenize(fields)
            return named(asked.param, prompts.chat_ids, self.served, asked)
        request = read(TokenizeText, fields)
        self.served.check_counted(request.prompt, "prompt")
        special = request.add_special_tokens is not False
        return named("prompt", prompts.text_ids, self.served, request.prompt, special)

    def _text(self, body: bytes) -> Response:
        request = read(Detokenize, protocol.parse_object(body))
        return JSONResponse(
            {"prompt": named("tokens", self.served.tokenizer.decode, request.tokens)}
        )

    async def _beside(self, request: Request, function: Callable[[bytes], Response]) -> Response:
        """Run function(body) in a thread, for endpoints that need no engine.

        JSON is built there too: 4 MB of text become 15 MB of JSON.
        """
        async with self._body(request) as body:
            with self.admission.thread(self.limits.beside):
                return await self.beside.run(function, body)

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, within limits of bytes and seconds; counted by admission until used."""
        body = bytearray()
        whole = b""
        try:
            await self._arrive(request, body)
            whole = bytes(body)
            body.clear()
            yield whole
        finally:
            self.admission.read(len(body) + len(whole))

    async def _arrive(self, request: Request, body: bytearray) -> None:
        try:
            async with self.admission.wait(self.limits.body_s):
                await self._read(request, body)
        except TimeoutError:
            raise ApiError(
                408, f"the body took more than {self.limits.body_s:g} seconds", code="timeout"
            ) from None
        except ClientDisconnect:
            raise ClientGone from None

    async def _read(self, request: Request, body: bytearray) -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= self.limits.body:
                body += part
                self.admission.arrive(len(part), self.limits.bodies)
            if size > DRAINED:
                break
        if size > self.limits.body:
            raise ApiError(
                413, f"the body has more than {self.limits.body:,} bytes", code="body_too_large"
            )

    # --- answers ----------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Response:
        """The model's answers to a request of one of the FORMS."""
        async with self._body(request) as body:
            tickets, prepared = await self._prepared(body, request)
        asked = prepared.asked
        try:
            for ticket, job in zip(tickets, prepared.jobs, strict=True):
                self.client.submit(ticket, job, asked.param)
            form = FORMS[request.scope["path"]](prepared, self.served.tokenizer)
            if isinstance(form, ResponsesForm):
                form.keep = partial(self.items.keep, request.scope["salt"])
            answer = Answer(self.client, tickets, prepared, form, self.limits)
            if asked.stream:
                return answer  # its __call__ closes the tickets
            with answer.watched(request.receive):
                response = await answer.whole(request.scope["note"])
        except BaseException:
            self.client.close(tickets)
            raise
        self.client.close(tickets)
        return response

    async def _prepared(self, body: bytes, request: Request) -> tuple[list[Ticket], Prepared]:
        tab = tab_of(request)
        # One place is taken before any work is done; then one for each answer.
        salt = request.scope["salt"]
        tickets = self.admission.open(tab, key=salt)
        try:
            prepared = await self.prompts.run(self._prepare, body, request.scope["path"], salt)
            return self.admission.open(tab, len(prepared.jobs), tickets, salt), prepared
        except BaseException:
            self.client.close(tickets)
            raise

    async def embed(self, request: Request) -> Response:
        """The embeddings of texts. The request has one place, however many texts it has."""
        tickets: list[Ticket] = []
        try:
            async with self._body(request) as body:
                tickets = self.admission.open(key=request.scope["salt"])
                embedding = await self.prompts.run(self._embedding, body)
            self.client.embed(tickets[0], embedding)
            with Watch(self.client, tickets, request.receive, self.limits.answer_s):
                async for _ in news(tickets):  # only of the end
                    pass
            request.scope["note"].append(
                f"{embedding.tokens:,} tokens → {len(embedding.inputs):,} embeddings"
            )
            return Large(self.client, tickets, await asyncio.to_thread(embedding.written))
        except BaseException:
            self.client.close(tickets)
            raise

    def _embedding(self, body: bytes) -> embeddings.Embedding:
        return embeddings.prepare(self.served, protocol.parse_object(body))

    def _prepare(self, body: bytes, path: str, salt: str) -> Prepared:
        asked = self._asked(body, path, salt, self.served.context)
        return prompts.prepare(self.served, asked, salt)

    def _asked(self, body: bytes, path: str, salt: str, most: int) -> Asked:
        """The checked request, with the items that it refers to; `most` messages and parts."""
        reading = READINGS[path]
        fields = protocol.parse_object(body)
        for name in (reading.chat, "system"):  # Anthropic's system prompt may be a list of parts
            self.served.check_parts(fields.get(name), name, most)
        if reading.chat == "input":
            fields = self.items.filled(salt, fields)
        return reading.read(fields)


def make_app(
    served: Served, client: EngineClient, hosts: Hosts, keys: Keys, limits: Limits | None = None
) -> Guard:
    """The ASGI application."""

    async def refused(request: Request, error: Any) -> Response:
        if error.code == "queue_full":
            client.metrics.count("rejected")
        return respond(error, request.scope["path"])

    async def unknown(request: Request, error: Any) -> Response:
        path = request.scope["path"]
        message = f"{request.method} {path}: {error.detail}"
        headers = dict(error.headers or {})
        hint = UNSERVED.get(path, "")
        return respond(ApiError(error.status_code, message, headers=headers, hint=hint), path)

    async def failed(request: Request, error: Exception) -> Response:
        return respond(internal(), request.scope["path"])  # Guard logs the error

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has gone and reads nothing

    routes = Application(served, client, keys, limits or Limits()).routes()
    handlers: dict[Any, Callable] = {
        ApiError: refused,
        HTTPException: unknown,
        ClientGone: gone,
        Exception: failed,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, hosts, keys)
