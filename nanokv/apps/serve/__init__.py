"""An OpenAI-compatible server on the engine: `nanokv serve`.

A request goes through these files, from the socket to the engine and back:

    server.py      uvicorn, with deadlines for clients and an end that running answers are told about
    security.py    who may ask: Host, Origin and API key, before anything of the body is read
    app.py         the addresses, and the way of a request to its place in the queue
    protocol.py    JSON to a checked request, with the field's name in every refusal
    requests.py    the fields of a request: one definition for checks and for /openapi.json (fields.py: their types)
    known.py       fields of other servers, and what becomes of them here
    messages.py    the messages of a chat, and the tools that its model may call
    openapi.py     the description of all of that, at /openapi.json;  replies.py: of the answers
    prompts.py     messages or text to token ids: the chat template and the tokenizer
    grammar.py     which tokens may follow, where the answer must be JSON or a call (schemas.py: JSON schemas)
    worker.py      the one thread that runs the engine; a request's place in its queue
    prefill.py     where prompts are computed: in that thread, or by a process of its own
    answer.py      token by token to text: whole characters, thoughts apart, stop strings
    calls.py       tool calls in that text
    logprobs.py    what the model thinks of each token, of a repeated prompt's too
    forms.py       that text in OpenAI's objects and chunks
    response.py    an answer as a whole or as a stream, while the client is watched
    metrics.py     what Prometheus reads;  errors.py: OpenAI's error object

The event loop never waits for a forward: requests go to the engine's thread through a queue, and text comes back with
one call per step. starlette routes and uvicorn speaks HTTP: together two packages beside those that the hub client
brings. pydantic checks requests. FastAPI would add opentelemetry-api.
"""
