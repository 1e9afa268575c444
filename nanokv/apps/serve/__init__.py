"""An OpenAI-compatible server on the engine: `nanokv serve`.

A request goes through three folders, from the socket to the engine and back (docs/life-of-a-token.md walks with one):

    http/   server.py: uvicorn, with deadlines for clients and an end that running answers are told about;
            security.py: who may ask, by Host, Origin and API key, before anything of the body is read;
            app.py: the addresses, and the way of a request to its place; response.py: an answer as a whole or as a
            stream, while the client is watched; live.py, page.py: the page at / and what it draws; openapi.py
    api/    protocol.py: JSON to a checked request; requests.py, fields.py, messages.py: its fields, one definition for
            checks and for /openapi.json; known.py: fields of other servers; prompts.py: messages or text to token ids;
            grammar.py, schemas.py: which tokens may follow; answer.py: token by token to text; calls.py: tool calls in
            that text; logprobs.py; forms.py, replies.py: OpenAI's objects and chunks; errors.py: its error object
    run/    admission.py: who gets a place; ticket.py: that place; engine_client.py: the event loop's side of the
            engine; messages.py: what passes between it and the other side, engine_thread.py; prefill.py: where prompts
            are computed, in that thread or by a process of its own; snapshot.py: requests and pages as numbers;
            metrics.py: what Prometheus reads

The event loop never waits for a forward: messages go to the engine's thread through a queue, and those of a step come
back with one call. starlette routes and uvicorn speaks HTTP: together two packages beside those that the hub client
brings. pydantic checks requests. FastAPI would add opentelemetry-api.
"""
