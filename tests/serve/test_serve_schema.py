"""/openapi.json and the server that it describes: the same addresses and fields, and answers that conform to it.

schemathesis makes requests of it, right ones and wrong ones: nothing wrong is accepted, nothing ends in 5xx.
"""

import collections
import copy
import json
import logging

import jsonschema
import pytest

import client_environment
from nanokv.apps.serve.api import known, protocol, requests
from nanokv.apps.serve.api.embeddings import EmbeddingRequest
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.fields import read
from nanokv.apps.serve.http import openapi
from serving import CHAT, MESSAGES, RESPONSES, TEXT, Serving, ask
from tool_calls import HERMES, OSLO, TIME, TOOLS, tool, with_template

KEY = "Bearer secret"


def described(status: int, path: str, verb: str) -> dict:
    """The schema of a response, with the components that it refers to."""
    document = openapi.document()
    responses = document["paths"][path][verb]["responses"]
    response = responses["200"]
    if status != 200:
        name = responses["4XX"]["$ref"].rpartition("/")[2]
        response = document["components"]["responses"][name]
    return response["content"]["application/json"]["schema"] | {
        "components": document["components"]
    }


def schema(name: str) -> dict:
    return openapi.document()["components"]["schemas"][name]


def conforms(found: dict, status: int, path: str, verb: str) -> bool:
    return jsonschema.Draft202012Validator(described(status, path, verb)).is_valid(found)


def test_the_document_has_the_addresses_of_the_server(server):
    routes = {
        route.path.replace(":path", ""): route.methods - {"HEAD"} for route in server.app.app.routes
    }
    document = server.get("/openapi.json")[1]
    assert document == openapi.document()
    assert {
        path: {verb.upper() for verb in verbs} for path, verbs in document["paths"].items()
    } == routes


def test_the_document_has_the_fields_that_are_read():
    chat, text = (set(schema(name)["properties"]) for name in ("ChatRequest", "TextRequest"))
    assert chat == set(requests.ChatRequest.model_fields) and text == set(
        requests.TextRequest.model_fields
    )
    assert chat - text == {"parallel_tool_calls"} and text - chat == set(), (
        "each knows what only the other does"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ask(max_tokens=3)),
        (CHAT, ask(max_tokens=3, temperature=1)),
        (TEXT, {"prompt": "Once", "max_tokens": 3}),
        ("/tokenize", {"prompt": "Once"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/models", None),
        ("/health", None),
        (CHAT, ask(n=2, max_tokens=3)),
        (CHAT, ask(max_tokens=3, logprobs=True, top_logprobs=2)),
        (TEXT, {"prompt": ["Once", [5, 6]], "max_tokens": 3, "logprobs": 2, "echo": True}),
        (CHAT, ask(n=17)),
        (TEXT, {}),
        (CHAT, ask("a<|im_end|>")),
        (RESPONSES, {"input": 5}),
        (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        (MESSAGES, {}),
        (f"{MESSAGES}/count_tokens", {}),
    ],
)
def test_every_answer_is_the_one_of_the_document(server, path, body):
    verb = "get" if body is None else "post"
    status, found = server.get(path) if body is None else server.post(path, body)
    assert conforms(found, status, path, verb)
    for name in found.keys() - {"hint"}:
        without = {other: value for other, value in found.items() if other != name}
        assert not conforms(without, status, path, verb) and not conforms(
            found | {name: 1.5}, status, path, verb
        )


def test_a_call_is_the_one_of_the_document(loaded, scripted):
    scripted(f"I look.\n{OSLO}\n{TIME}")
    with Serving(loaded[0], with_template(loaded[1], HERMES)) as server:
        status, found = server.post(CHAT, ask(**TOOLS))
    assert found["choices"][0]["finish_reason"] == "tool_calls" and conforms(
        found, status, CHAT, "post"
    )
    found["choices"][0]["message"]["tool_calls"][1]["function"]["arguments"] = {}
    assert not conforms(found, status, CHAT, "post")


USER, CALL = ask()["messages"][0], {"id": "c", "function": {"name": "time", "arguments": "{}"}}
ASSISTANT, RESULT = {"role": "assistant"}, {"role": "tool", "content": "12", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"n": 16}, True),
        ({"n": 0}, False),
        ({"n": 17}, False),
        ({"n": 1.5}, False),
        ({"logprobs": True, "top_logprobs": 20}, True),
        ({"top_logprobs": 21}, False),
        ({"logprobs": 1}, False),
        ({"echo": False}, True),
        ({"echo": True}, False),
        (TOOLS, True),
        ({"tools": [{"type": "function"}]}, False),
        ({"tools": [tool("a b")]}, False),
        ({"tools": [None]}, False),
        ({"tools": [tool("time", parameters=[])]}, False),
        ({"tools": [tool("time", strict=None)]}, True),
        ({"tools": [{"type": "custom", "custom": {"name": "time"}}]}, True),
        ({"tools": [{"type": 5}]}, False),
        (TOOLS | {"tool_choice": "required", "parallel_tool_calls": False}, True),
        ({"parallel_tool_calls": 1}, False),
        (TOOLS | {"tool_choice": {"type": "function", "function": {"name": "time"}}}, True),
        (TOOLS | {"tool_choice": "time"}, False),
        (TOOLS | {"tool_choice": {"type": "allowed_tools"}}, False),
        (
            TOOLS
            | {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "time"}}],
                    },
                }
            },
            True,
        ),
        (TOOLS | {"tool_choice": {"type": "function"}}, False),
        *[
            ({"response_format": {"type": kind}}, kind in ("text", "json_object"))
            for kind in ("text", "json_object", "json_schema", "xml", None)
        ],
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}},
                }
            },
            True,
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, False),
        ({"messages": [USER, ASSISTANT | {"tool_calls": [CALL]}, RESULT]}, True),
        ({"messages": [USER, ASSISTANT | {"tool_calls": [CALL | {"type": "custom"}]}]}, False),
        ({"messages": [USER, ASSISTANT | {"tool_calls": [{"id": "c"}]}]}, False),
        ({"messages": [USER, {"role": "tool", "content": "12"}]}, False),
        ({"messages": []}, False),
        ({"messages": [USER | {"role": "function"}]}, False),
        (
            {
                "messages": [
                    USER | {"role": "developer", "name": None, "prefix": False, "metadata": {}}
                ]
            },
            True,
        ),
        *[
            ({"messages": [USER | {"content": content}]}, right)
            for content, right in [
                ([], True),
                ([{"type": "text", "text": "a"}], True),
                (None, False),
                (["a"], False),
                ([{"type": "text"}], False),
                ([{"type": "image_url", "image_url": {"url": "a"}}], False),
            ]
        ],
        *[
            ({"messages": [USER, ASSISTANT | said]}, right)
            for said, right in [
                ({"content": None, "reasoning": "a", "tool_calls": None}, True),
                ({"reasoning": 5}, False),
                ({"partial": True}, False),
                ({"function_call": {"name": "a"}}, False),
                ({"audio": {"id": "a"}}, False),
                ({"tool_calls": [{"id": "c", "function": {"name": "a", "arguments": {}}}]}, True),
                ({"tool_calls": [{"id": "c", "function": {"name": "a", "arguments": []}}]}, False),
            ]
        ],
    ],
)
def test_the_document_takes_what_is_taken_of_a_chat(fields, right):
    assert is_taken(protocol.chat, ask() | fields) == right
    assert is_valid(schema("ChatRequest"), ask() | fields) == right


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"prompt": ["a", "b", [1, 2]]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": ["a"] * 257}, False),
        ({"prompt": ["a", ""]}, False),
        ({"prompt": [[1], 2]}, False),
        ({"prompt": []}, False),
        ({"logprobs": 5}, True),
        ({"logprobs": False}, True),
        ({"logprobs": True}, False),
        ({"logprobs": 6}, False),
        ({"echo": True, "max_tokens": 0}, True),
        ({"max_tokens": -1}, False),
        ({"n": 16}, True),
        ({"n": 17}, False),
        (TOOLS, False),
        ({"tool_choice": "required"}, False),
        ({"response_format": {"type": "json_object"}}, False),
        (
            {
                "tools": [],
                "tool_choice": "auto",
                "response_format": {"type": "text"},
                "top_logprobs": 0,
            },
            True,
        ),
    ],
)
def test_the_document_takes_what_is_taken_of_a_completion(fields, right):
    assert is_taken(protocol.text, {"prompt": "a"} | fields) == right
    assert is_valid(schema("TextRequest"), {"prompt": "a"} | fields) == right


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"input": ["a", "b", [1, 2]]}, True),
        ({"input": [[1], [2]]}, True),
        ({"input": ["a"] * 2048}, True),
        ({"input": ["a"] * 2049}, False),
        ({"input": ["a", ""]}, False),
        ({"input": []}, False),
        ({"input": 5}, False),
        ({"dimensions": 64}, True),
        ({"dimensions": 0}, False),
        ({"dimensions": 1.5}, False),
        ({"encoding_format": "base64", "user": "me", "normalize": True}, True),
        ({"encoding_format": "int8"}, False),
        ({"normalize": False}, False),
        ({"truncate": True}, False),
        ({"input_type": "query"}, False),
    ],
)
def test_the_document_takes_what_is_taken_of_embeddings(fields, right):
    fields = {"input": "a"} | fields
    assert is_taken(lambda given: read(EmbeddingRequest, given), fields) == right
    assert is_valid(schema("EmbeddingRequest"), fields) == right


def is_taken(check, fields: dict) -> bool:
    try:
        check(protocol.parse_object(json.dumps(fields).encode()))
    except ApiError:
        return False
    return True


def is_valid(schema: dict, fields: dict) -> bool:
    whole = schema | {"components": openapi.document()["components"]}
    return jsonschema.Draft202012Validator(whole).is_valid(fields)


def test_the_page_and_the_stream_have_their_types_and_the_header_of_a_tab(server):
    paths = openapi.document()["paths"]
    types = [list(paths[path]["get"]["responses"]["200"]["content"]) for path in ("/", "/live")]
    assert types == [["text/html"], ["text/event-stream"]]
    assert server.raw("GET", "/")[1].get_content_type() == "text/html"
    for path, verb in (("/live", "get"), (CHAT, "post"), (TEXT, "post")):
        (tab,) = paths[path][verb]["parameters"]
        assert is_valid(tab["schema"], "a-Z_9") and not is_valid(tab["schema"], "a b")
        status, _, said = server.raw(verb.upper(), path, {}, {tab["name"]: "a b"})
        assert (status, json.loads(said)["error"]["param"]) == (400, tab["name"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [{}]}),
        ("/detokenize", {"tokens": [[]]}),
        ("/detokenize", {"tokens": [[1]]}),
        (TEXT, {"prompt": [[[1]]]}),
        (TEXT, {"prompt": "Once", "max_tokens": 0, "max_completion_tokens": 1}),
    ],
)
def test_wrong_values_that_generated_requests_found(server, path, body):
    """They were accepted: lists within a list of ids, and the older of two names."""
    status, found = server.post(path, body)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    assert found["error"]["param"] == ("max_tokens" if "max_tokens" in body else next(iter(body)))


def sampled_document(share: int) -> dict:
    """The document with one of `share` of the fields that are not done or without effect: schemathesis tries many
    values of each, and test_serve_fields.py tries all of these."""
    document = copy.deepcopy(openapi.document())
    for name in ("ChatRequest", "TextRequest", "ResponsesRequest", "MessagesRequest"):
        fields = document["components"]["schemas"][name]["properties"]
        others = [field for field in fields if field in known.HARMLESS | known.NOT_DONE]
        for field in set(others) - set(others[::share]):
            del fields[field]
    return document


@pytest.mark.slow
@pytest.mark.parametrize(
    ("examples", "share"), [(5, 100), pytest.param(20, 20, marks=pytest.mark.night)]
)
def test_generated_requests_find_no_fault(loaded, tmp_path, caplog, examples, share):
    """With a fixed seed. The document cannot say what is too long, nor which ids there are: that may be 400."""
    command = [
        client_environment.python_clients() / "bin" / "schemathesis",
        "run",
        "-H",
        f"Authorization: {KEY}",
        "--seed=1",
        f"--max-examples={examples}",
        "--phases=coverage,fuzzing",
        "--exclude-checks=positive_data_acceptance",
        "--workers=1",
        "--exclude-path=/live",  # it has no end
        "--suppress-health-check=all",
        "--continue-on-failure",
    ]
    caplog.set_level(logging.INFO, "nanokv.apps.serve.http.security")
    model, tokenizer = loaded[0], with_template(loaded[1], HERMES)
    with Serving(
        model,
        tokenizer,
        keys=["secret"],
        context=256,
        pages=400,
        max_new_tokens=4,
        pooling="mean",
    ) as server:
        (tmp_path / "openapi.json").write_text(json.dumps(sampled_document(share)))
        said = client_environment.run(
            [*command, f"--url={server.url}", "openapi.json"], cwd=tmp_path
        )
        server.wait(lambda: server.free)
    assert "No issues found" in said
    answered = collections.Counter(
        tuple(record.getMessage().split()[1:3]) for record in caplog.records
    )
    for path in (CHAT, TEXT, "/v1/embeddings", "/tokenize", "/detokenize"):
        assert answered[path, "200"] >= 5 and answered[path, "400"] >= 20, answered
