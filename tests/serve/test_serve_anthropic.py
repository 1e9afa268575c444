"""`nanokv serve` and /v1/messages: the same answers as those of a chat completion, in Anthropic's form.

The oracle is the vendor's client: its types read each event, its accumulator rebuilds the message.
"""

import json

import anthropic
import pytest
from anthropic.types import (
    ErrorResponse,
    Message,
    MessageTokensCount,
    ModelInfo,
    RawMessageStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from nanokv.apps.serve.api.anthropic import messages as messages_request
from nanokv.apps.serve.api.protocol import chat as chat_request
from serving import CHAT, Serving, ask, error, named_events
from tool_calls import HERMES, OSLO, TIME, with_template

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
EVENT = TypeAdapter(RawMessageStreamEvent)
VERSION = {"anthropic-version": "2023-06-01"}
WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
TOOLS = {"tools": [WEATHER, CLOCK]}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
HELLO = ask(max_tokens=200)


@pytest.fixture(scope="module")
def server(loaded):
    with Serving(loaded[0], with_template(loaded[1], HERMES), names=("tiny", "*")) as server:
        yield server
        server.wait(lambda: server.free)


def events(found: list[str]) -> list[dict]:
    """The JSON of each event, which the vendor's types must read."""
    told = [value for value in named_events(found) if value["type"] not in ("ping", "error")]
    for value in told:
        EVENT.validate_json(json.dumps(value))
    return told


def shape(content: list[dict]) -> list[tuple]:
    """What the blocks say."""
    said = []
    for block in content:
        if block["type"] == "tool_use":
            said.append((block["name"], block["input"]))
        else:
            said.append((block["type"], block.get("text", block.get("thinking"))))
    return said


def rebuilt(told: list[dict]) -> list[tuple]:
    """The blocks as a client builds them; each ends before the next one begins."""
    blocks: list[dict] = []
    ended = 0
    for one in told:
        match one["type"]:
            case "content_block_start":
                assert one["index"] == len(blocks) == ended
                blocks.append(dict(one["content_block"], json=""))
            case "content_block_delta":
                assert one["index"] == ended == len(blocks) - 1
                delta, block = one["delta"], blocks[-1]
                if delta["type"] == "input_json_delta":
                    block["json"] += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                assert one["index"] == ended
                ended += 1
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(blocks[-1]["json"])
    assert ended == len(blocks)
    return shape(blocks)


CASES = {
    "text": ("I am tiny.", [("text", "I am tiny.")], "end_turn"),
    "nothing": ("", [], "end_turn"),
    "a call": (OSLO, [("weather", {"city": "Oslo"})], "tool_use"),
    "text and two calls": (
        f"I look.\n{OSLO}\n{TIME}",
        [("text", "I look."), ("weather", {"city": "Oslo"}), ("time", {})],
        "tool_use",
    ),
    "thoughts": (
        "<think>\nHm.\n</think>\n\nYes.",
        [("thinking", "\nHm.\n"), ("text", "Yes.")],
        "end_turn",
    ),
    "thoughts and a call": (
        f"<think>\nHm.\n</think>\n\n{TIME}",
        [("thinking", "\nHm.\n"), ("time", {})],
        "tool_use",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_an_answer_whole_and_streamed(server, scripted, case):
    text, wanted, reason = CASES[case]
    scripted(text)
    status, whole = server.post(MESSAGES, HELLO | TOOLS)
    assert status == 200, whole
    Message.model_validate_json(json.dumps(whole), strict=True)
    assert shape(whole["content"]) == wanted and whole["stop_reason"] == reason
    told = events(server.stream(MESSAGES, HELLO | TOOLS))
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"
    assert rebuilt(told) == wanted
    end = told[-2]
    assert end["type"] == "message_delta" and end["delta"]["stop_reason"] == reason
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_prompt_the_answer_and_the_reuse_are_those_of_a_chat_completion(server):
    fields = {"temperature": 0.8, "seed": 5, "top_k": 20, "max_tokens": 12}
    question = "Which words does nobody else ask here?"
    _, chat = server.post(CHAT, ask(question, **fields))
    _, found = server.post(MESSAGES, ask(question, **fields))
    assert shape(found["content"]) == [("text", chat["choices"][0]["message"]["content"])]
    used = found["usage"]
    reused = used["cache_read_input_tokens"]
    assert reused > 0 and used["input_tokens"] + reused == chat["usage"]["prompt_tokens"]
    assert used["output_tokens"] == chat["usage"]["completion_tokens"]
    (start, *_) = events(server.stream(MESSAGES, ask(question, **fields)))
    assert start["message"]["usage"]["cache_read_input_tokens"] == reused


def test_why_an_answer_ended(server, scripted):
    scripted("One two three four five six.")
    cut = server.post(MESSAGES, ask(max_tokens=3))[1]
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 3)
    stopped = server.post(MESSAGES, HELLO | {"stop_sequences": ["three"]})[1]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")
    assert shape(stopped["content"]) == [("text", "One two ")]


HISTORY = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "How is", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Oslo?"},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look.", "signature": "abc"},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "c2", "name": "time", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "Rain."},
            {
                "type": "tool_result",
                "tool_use_id": "c2",
                "content": [{"type": "text", "text": "Noon."}],
                "is_error": False,
            },
            {"type": "text", "text": "And?"},
        ],
    },
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Well?"},
]
CHAT_OF_IT = [
    {"role": "system", "content": "You help.\nBe brief."},
    {"role": "user", "content": "How is\nOslo?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Look.",
        "tool_calls": [
            {
                "type": "function",
                "id": "c1",
                "function": {"name": "weather", "arguments": {"city": "Oslo"}},
            },
            {"type": "function", "id": "c2", "function": {"name": "time", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    {"role": "tool", "tool_call_id": "c2", "content": "Noon."},
    {"role": "user", "content": "And?\nBe kind.\nWell?"},
]


def test_blocks_become_the_messages_of_a_chat(caplog):
    caplog.set_level("INFO", "nanokv.apps.serve")
    system = [{"type": "text", "text": "You help."}, {"type": "text", "text": "Be brief."}]
    asked = messages_request({"max_tokens": 5, "messages": HISTORY, "system": system} | TOOLS)
    functions = [
        {"type": "function", "function": {"name": one["name"], "parameters": one["input_schema"]}}
        for one in TOOLS["tools"]
    ]
    same = chat_request({"messages": CHAT_OF_IT, "tools": functions})
    assert asked.sources == same.sources and asked.tools == same.tools
    assert 'left out: 1 blocks of type "redacted_thinking"' in caplog.text


def test_tools_that_run_elsewhere_are_left_out(server, scripted, caplog):
    caplog.set_level("INFO", "nanokv.apps.serve")
    scripted(OSLO)
    _, found = server.post(MESSAGES, HELLO | {"tools": [SEARCH, WEATHER]})
    assert shape(found["content"]) == [("weather", {"city": "Oslo"})]
    assert 'left out: 1 tools of type "web_search_20250305"' in caplog.text


def test_tool_choice(server, scripted):
    for choice, names in (
        ({"type": "any"}, {"weather", "time"}),
        ({"type": "tool", "name": "time"}, {"time"}),
    ):
        status, found = server.post(MESSAGES, HELLO | TOOLS | {"tool_choice": choice})
        assert status == 200 and found["stop_reason"] == "tool_use", found
        assert {block["name"] for block in found["content"] if block["type"] == "tool_use"} <= names
    scripted(f"{OSLO}\n{TIME}")
    none = server.post(MESSAGES, HELLO | TOOLS | {"tool_choice": {"type": "none"}})[1]
    assert shape(none["content"]) == [("text", f"{OSLO}\n{TIME}")]
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert shape(server.post(MESSAGES, HELLO | TOOLS | {"tool_choice": one})[1]["content"]) == [
        ("weather", {"city": "Oslo"})
    ]


def test_count_tokens_counts_the_prompt(server):
    fields = ask("Count me.") | TOOLS | {"system": "You count."}
    status, counted = server.post(COUNT, fields)
    MessageTokensCount.model_validate_json(json.dumps(counted), strict=True)
    _, found = server.post(MESSAGES, fields | {"max_tokens": 1})
    used = found["usage"]
    assert status == 200
    assert counted["input_tokens"] == used["input_tokens"] + used["cache_read_input_tokens"]


def test_what_claude_code_sends_gets_an_answer(server):
    sent = {
        "model": "claude-sonnet-5",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [WEATHER | {"description": "d", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": []},
        "stream": True,
    }
    told = events(server.stream(f"{MESSAGES}?beta=true", sent))
    assert told[0]["message"]["model"] == "claude-sonnet-5" and told[-1]["type"] == "message_stop"


UNHASHABLE = [{"role": "user", "content": [{"type": {}}]}]
PREFILL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
SOCK = {"format": {"type": "json_schema", "schema": {"type": "sock"}}}
ABSENT = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}
REFUSED = {
    "no messages": ({"messages": []}, "a list of at least 1 was expected"),
    "prefill": ({"messages": PREFILL}, "the last message"),
    "image": ({"messages": IMAGE}, "only blocks of text"),
    "type": ({"messages": UNHASHABLE}, "messages[0].content[0].type"),
    "tool": (ABSENT, "not one of the tools"),
    "name": ({"tools": [{"name": "a b"}]}, "tools[0].name"),
    "tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "schema": ({"output_config": SOCK}, "output_config.format cannot be turned into a grammar"),
    "older schema": ({"output_format": SOCK["format"]}, "output_format cannot be turned"),
    "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "answers": ({"n": 2}, "n is 2"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_have_anthropics_form(server, case):
    fields, words = REFUSED[case]
    status, found = server.post(MESSAGES, HELLO | fields)
    ErrorResponse.model_validate_json(json.dumps(found))
    assert status == 400 and found["error"]["type"] == "invalid_request_error"
    assert words in found["error"]["message"]


def test_an_error_in_a_stream(server, monkeypatch):
    monkeypatch.setattr(server.engine, "_decode", lambda requests: 1 / 0)
    *_, last = server.stream(MESSAGES, HELLO)
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_models_in_both_forms(server):
    _, found = server.get("/v1/models", VERSION)
    assert [ModelInfo.model_validate_json(json.dumps(one)).id for one in found["data"]] == ["tiny"]
    assert (found["first_id"], found["has_more"]) == ("tiny", False)
    _, other = server.get("/v1/models")
    assert other["data"][0]["object"] == "model" and other["models"] == [
        {"name": "tiny", "model": "tiny"}
    ]


def test_a_key_is_read_from_anthropics_header(loaded):
    with Serving(*loaded, keys=["secret"]) as server:
        status, found = server.post(MESSAGES, HELLO, {"x-api-key": "wrong"})
        assert (status, found["error"]["type"]) == (401, "authentication_error")
        assert server.post(MESSAGES, HELLO | {"max_tokens": 1}, {"x-api-key": "secret"})[0] == 200
        status, found = server.post(CHAT, ask(), {"x-api-key": "wrong"})
        assert status == 401 and error(found)["code"] == "invalid_api_key"


def test_the_official_client(server, scripted):
    class Weather(BaseModel):
        city: str

    client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=20)
    with client:
        scripted(f"<think>\nHm.\n</think>\n\nI look.\n{OSLO}")
        history = [{"role": "user", "content": "How is Oslo?"}]
        with client.messages.stream(
            model="tiny", max_tokens=200, messages=history, tools=[WEATHER]
        ) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        call = final.content[-1]
        assert text == "I look." and final.stop_reason == "tool_use"
        assert Weather.model_validate(call.input) == Weather(city="Oslo")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
        history += [final.to_param(), {"role": "user", "content": [result]}]
        scripted("It rains.")
        answer = client.messages.create(
            model="tiny", max_tokens=20, messages=history, tools=[WEATHER]
        )
        assert answer.content[0].text == "It rains."
        assert client.messages.count_tokens(model="tiny", messages=history).input_tokens > 20
        assert [one.id for one in client.models.list()] == ["tiny"]


def test_structured_output_of_the_official_client(server):
    class Reply(BaseModel):
        yes: bool

    client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=20)
    with client:
        found = client.messages.parse(
            model="tiny", max_tokens=60, messages=ask("Is it so?")["messages"], output_format=Reply
        )
    assert isinstance(found.parsed_output, Reply)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/chat", "/v1/chat/completions"),
        ("/v1/files", "nanokv batch"),
        ("/chat/completions", "/v1"),
    ],
)
def test_known_addresses_that_are_not_served_say_what_is(server, path, words):
    status, found = server.post(path, {})
    assert status == 404 and words in found["hint"]
