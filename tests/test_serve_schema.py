"""/openapi.json and the server that it describes: the same addresses and fields, and answers that conform to it.

schemathesis makes requests of it, right ones and wrong ones: nothing wrong is accepted, nothing ends in 5xx.
"""

import collections
import logging

import jsonschema
import pytest

import client_environment
from nanokv.serve import openapi, protocol
from serving import CHAT, TEXT, Serving, ask

KEY = "Bearer secret"


def described(status: int, path: str, verb: str) -> dict:
    """The schema of a response, with the components that it refers to."""
    document = openapi.document()
    responses = document["paths"][path][verb]["responses"]
    response = responses["200"] if status == 200 else document["components"]["responses"]["Error"]
    return response["content"]["application/json"]["schema"] | {"components": document["components"]}


def conforms(found: dict, status: int, path: str, verb: str) -> bool:
    return jsonschema.Draft202012Validator(described(status, path, verb)).is_valid(found)


def test_the_document_has_the_addresses_of_the_server(server):
    routes = {route.path.replace(":path", ""): route.methods - {"HEAD"} for route in server.app.app.routes}
    document = server.get("/openapi.json")[1]
    assert document == openapi.document()
    assert {path: {verb.upper() for verb in verbs} for path, verbs in document["paths"].items()} == routes


def test_the_document_has_the_fields_that_are_read():
    chat, text = (set(request["properties"]) for request in (openapi.chat_request(), openapi.text_request()))
    assert chat | text == protocol.KNOWN | set(protocol.NOT_DONE)
    assert chat ^ text == {"messages", "chat_template_kwargs", "prompt", "add_special_tokens"}


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, ask(max_tokens=3)), (CHAT, ask(max_tokens=3, temperature=1)), (TEXT, {"prompt": "Once", "max_tokens": 3}),
    ("/tokenize", {"prompt": "Once"}), ("/detokenize", {"tokens": [5]}), ("/v1/models", None), ("/health", None),
    (CHAT, ask(n=2)), (TEXT, {}), (CHAT, ask("a<|im_end|>")),
])  # fmt: skip
def test_every_answer_is_the_one_of_the_document(server, path, body):
    verb = "get" if body is None else "post"
    status, found = server.get(path) if body is None else server.post(path, body)
    assert conforms(found, status, path, verb)
    for name in found.keys() - {"hint"}:
        without = {other: value for other, value in found.items() if other != name}
        assert not conforms(without, status, path, verb) and not conforms(found | {name: 1.5}, status, path, verb)


@pytest.mark.parametrize(("path", "body"), [
    ("/detokenize", {"tokens": [{}]}), ("/detokenize", {"tokens": [[]]}), ("/detokenize", {"tokens": [[1]]}),
    (TEXT, {"prompt": [[[1]]]}), (TEXT, {"prompt": "Once", "max_tokens": 0, "max_completion_tokens": 1}),
])  # fmt: skip
def test_wrong_values_that_generated_requests_found(server, path, body):
    """They were accepted: lists within a list of ids, and the older of two names."""
    status, found = server.post(path, body)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    assert found["error"]["param"] == ("max_tokens" if "max_tokens" in body else next(iter(body)))


@pytest.mark.slow
def test_generated_requests_find_no_fault(loaded, tmp_path, caplog):
    """With a fixed seed. The document cannot say what is too long, nor which ids there are: that may be 400."""
    command = [
        client_environment.python_clients() / "bin" / "schemathesis", "run", "-H", f"Authorization: {KEY}", "--seed=1",
        "--max-examples=20", "--phases=coverage,fuzzing", "--exclude-checks=positive_data_acceptance", "--workers=2",
        "--suppress-health-check=all", "--continue-on-failure",
    ]  # fmt: skip
    caplog.set_level(logging.INFO, "nanokv.serve.security")
    with Serving(*loaded, keys=["secret"], context=48, max_new_tokens=4) as server:
        said = client_environment.run([*command, f"{server.url}/openapi.json"], cwd=tmp_path)
        server.wait(lambda: server.free)
    assert "No issues found" in said
    answered = collections.Counter(tuple(record.getMessage().split()[1:3]) for record in caplog.records)
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        assert answered[path, "200"] >= 5 and answered[path, "400"] >= 20, answered
