"""An OpenAI-compatible server on the engine: `nanokv serve`.

A request passes through three folders, from the socket to the engine and back.
docs/life-of-a-token.md follows one request along this path.

    http/   server.py: uvicorn, deadlines for clients, and a graceful shutdown
            connections.py: how many connections are open, in all and per address
            security.py: checks Host, Origin and API key before the body is read
            app.py: the routes, and a request from its body to a place in the queue
            lanes.py: threads for JSON, templates and tokenizers, by the size of a body
            response.py: an answer in one response or as a stream, while the client is watched
            live.py, page.py: the page at /, and the snapshots that it draws
            openapi.py: /openapi.json
    api/    protocol.py: JSON to a checked request
            requests.py, fields.py, messages.py: its fields, defined once for the checks and for
            /openapi.json
            known.py: fields of other servers; tools.py: which functions may be called
            prompts.py: messages or text to token ids
            grammar.py, schemas.py: which tokens may follow
            answer.py: tokens to text; calls.py: tool calls in that text; logprobs.py
            forms.py, replies.py: OpenAI's objects and chunks; errors.py: its error object
    run/    admission.py: places for requests; ticket.py: one such place
            engine_client.py: the event loop's side of the engine
            engine_thread.py: the engine's side, in a thread; messages.py: what the two exchange
            prefill.py: prefill in that thread, or in a second process
            snapshot.py: requests and pages as numbers
            metrics.py: /metrics for Prometheus

The event loop never waits for a forward. Messages reach the engine's thread through a queue, and
the results of one step come back in one call. starlette routes requests and uvicorn handles HTTP:
together they add two packages to the dependencies of huggingface_hub. pydantic checks requests.
FastAPI is not used because it would add opentelemetry-api.
"""
