"""`nanokv serve` and /v1/responses: the same answers as those of a chat completion, in the form of the Responses API.

The oracle is the official client: its types read each event strictly, its accumulator rebuilds the response, its
helpers parse structured output and calls.
"""

import json
import time

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from nanokv.apps.serve.api import items
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.items import Items
from nanokv.apps.serve.api.protocol import chat as chat_request
from nanokv.apps.serve.api.responses import responses
from serving import CHAT, Serving, ask, error, named_events
from tool_calls import HERMES, OSLO, TIME, with_template, written

RESPONSES = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}}
TOOLS = {"tools": [WEATHER, CLOCK]}
SEARCH = {"type": "web_search"}
HELLO = {"input": "Who are you?"}


@pytest.fixture(scope="module")
def server(loaded):
    with Serving(loaded[0], with_template(loaded[1], HERMES)) as server:
        yield server
        server.wait(lambda: server.free)


def events(found: list[str]) -> list[dict]:
    """The JSON of each event, which the official types must read without a field too many."""
    told = named_events(found)
    for value in told:
        EVENT.validate_json(json.dumps(value))
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    return told


def shape(output: list[dict]) -> list[tuple]:
    """What the items say."""
    said = []
    for item in output:
        if item["type"] == "function_call":
            said.append((item["name"], json.loads(item["arguments"])))
        else:
            said.append((item["type"], "".join(part["text"] for part in item["content"])))
    return said


CASES = {
    "text": ("I am tiny.", [("message", "I am tiny.")]),
    "nothing": ("", [("message", "")]),
    "a call": (OSLO, [("weather", {"city": "Oslo"})]),
    "text, two calls, text": (
        f"I look.\n{OSLO}\n{TIME}\nDone.",
        [("message", "I look."), ("weather", {"city": "Oslo"}), ("time", {}), ("message", "Done.")],
    ),
    "thoughts": ("<think>\nHm.\n</think>\n\nYes.", [("reasoning", "\nHm.\n"), ("message", "Yes.")]),
    "thoughts and a call": (
        f"<think>\nHm.\n</think>\n\n{TIME}",
        [("reasoning", "\nHm.\n"), ("time", {})],
    ),
    "letters": ("Ærø 🧑\u2028.", [("message", "Ærø 🧑\u2028.")]),
}


@pytest.mark.parametrize("case", CASES)
def test_items_of_an_answer_whole_and_streamed(server, scripted, case):
    text, wanted = CASES[case]
    scripted(text)
    status, whole = server.post(RESPONSES, HELLO | TOOLS)
    assert status == 200, whole
    Response.model_validate_json(json.dumps(whole), strict=True)
    assert whole["status"] == "completed"
    assert shape(whole["output"]) == wanted
    told = events(server.stream(RESPONSES, HELLO | TOOLS))
    assert [one["type"] for one in told[:2]] == ["response.created", "response.in_progress"]
    last = told[-1]["response"]
    assert told[-1]["type"] == "response.completed"
    assert (
        shape(last["output"]) == wanted
        and last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    )
    assert rebuilt(told) == last["output"]


def rebuilt(told: list[dict]) -> list[dict]:
    """The items as a client that reads only deltas builds them; each must equal its repetition at the end."""
    items: list[dict] = []
    texts: dict[int, str] = {}
    for one in told:
        at = one.get("output_index")
        match one["type"].removeprefix("response."):
            case "output_item.added":
                assert at == len(items) and one["item"]["status"] == "in_progress"
                items.append(one["item"])
                texts[at] = ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert one["item_id"] == items[at]["id"] and at == len(items) - 1
                texts[at] += one["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert one["text"] == texts[at]
            case "function_call_arguments.done":
                assert one["arguments"] == texts[at]
            case "output_item.done":
                item = one["item"]
                assert item["id"] == items[at]["id"] and item["type"] == items[at]["type"]
                assert (
                    texts[at] == item.get("arguments", "")
                    or texts[at] == item["content"][0]["text"]
                )
                items[at] = item
    return items


def test_the_prompt_and_the_answer_are_those_of_a_chat_completion(server):
    fields = {"temperature": 0.8, "seed": 5, "top_k": 20}
    _, chat = server.post(CHAT, ask(max_tokens=12, **fields))
    _, found = server.post(RESPONSES, HELLO | {"max_output_tokens": 12} | fields)
    assert shape(found["output"]) == [("message", chat["choices"][0]["message"]["content"])]
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert found["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert found["usage"]["input_tokens_details"]["cached_tokens"] > 0  # the chat's pages


def test_an_answer_that_is_cut_is_incomplete(server, scripted):
    scripted("One two three four five six.")
    told = events(server.stream(RESPONSES, HELLO | {"max_output_tokens": 3}))
    last = told[-1]["response"]
    assert told[-1]["type"] == "response.incomplete" and last["status"] == "incomplete"
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][-1]["status"] == "incomplete"
    assert (
        server.post(RESPONSES, HELLO | {"max_output_tokens": 3})[1]["usage"]["output_tokens"] == 3
    )


def test_thoughts_are_counted(server, scripted):
    scripted("<think>\nHm hm hm.\n</think>\n\nYes.")
    _, found = server.post(RESPONSES, HELLO)
    usage = found["usage"]
    thought = usage["output_tokens_details"]["reasoning_tokens"]
    assert 5 < thought < usage["output_tokens"] - 2
    _, chat = server.post(CHAT, ask())
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    scripted("Yes.")
    assert (
        server.post(RESPONSES, HELLO)[1]["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    )


HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "How is"}, {"type": "input_text", "text": "Oslo?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "half past"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Noon."}]},
    {"role": "assistant", "content": "It rains."},
    {"type": "message", "role": "user", "content": "Thanks."},
]  # fmt: skip
CHAT_OF_IT = [
    {"role": "system", "content": "You help.\n\nBe brief."},
    {"role": "user", "content": "How is\nOslo?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Look.",
        "tool_calls": [
            {
                "type": "function",
                "id": "c1",
                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
            },
            {
                "type": "function",
                "id": "c2",
                "function": {"name": "time", "arguments": "half past"},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    {"role": "tool", "tool_call_id": "c2", "content": "Noon."},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "Thanks."},
]


def without_type(tool: dict) -> dict:
    return {name: value for name, value in tool.items() if name != "type"}


def test_items_become_the_messages_of_a_chat(caplog):
    caplog.set_level("INFO", "nanokv.apps.serve")
    asked = responses({"input": HISTORY, "instructions": "You help."} | TOOLS)
    functions = [{"type": "function", "function": without_type(one)} for one in TOOLS["tools"]]
    same = chat_request({"messages": CHAT_OF_IT, "tools": functions})
    assert asked.sources == same.sources and asked.tools == same.tools
    assert 'left out: 1 items of type "web_search_call"' in caplog.text


def test_no_thoughts_of_a_turn_are_lost():
    thoughts = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("First.", "", "Then.")
    ]
    asked = responses({"input": [*thoughts, {"role": "assistant", "content": "Yes."}]})
    (turn,) = asked.sources[0]
    assert turn == {"role": "assistant", "content": "Yes.", "reasoning_content": "First.\nThen."}


def test_a_turn_of_very_many_calls_is_read_in_little_time():
    """40,000 calls are a body of 3 MB: 0.5 s, and 6 s if each call copies those before it."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    began = time.process_time()
    asked = responses({"input": [call] * 40_000})
    assert len(asked.sources[0][0]["tool_calls"]) == 40_000
    assert time.process_time() - began < 3


def test_tools_of_other_kinds_are_left_out_and_named_in_the_log(server, scripted, caplog):
    caplog.set_level("INFO", "nanokv.apps.serve")
    scripted(OSLO)
    others = [
        SEARCH,
        {"type": "namespace", "name": "git", "tools": [WEATHER]},
        {"type": "custom", "name": "patch"},
    ]
    _, found = server.post(RESPONSES, HELLO | {"tools": [*others, WEATHER]})
    assert shape(found["output"]) == [("weather", {"city": "Oslo"})]
    assert 'left out: 3 tools of type "custom", "namespace", "web_search"' in caplog.text
    assert shape(server.post(RESPONSES, HELLO | {"tools": others})[1]["output"]) == [
        ("message", OSLO)
    ]


def test_which_functions_may_be_called(server, scripted):
    scripted(f"{OSLO}\n{TIME}")
    may = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    both = server.post(RESPONSES, HELLO | TOOLS)[1]
    only = server.post(RESPONSES, HELLO | TOOLS | {"tool_choice": may})[1]
    none = server.post(RESPONSES, HELLO | TOOLS | {"tool_choice": "none"})[1]
    other = server.post(RESPONSES, HELLO | TOOLS | {"tool_choice": SEARCH})[1]
    unknown = may | {"tools": [{"type": "function", "name": "sum"}]}
    status, found = server.post(RESPONSES, HELLO | TOOLS | {"tool_choice": unknown})
    assert status == 400 and "which is not one of the tools" in found["error"]["message"]
    assert (
        shape(both["output"])
        == shape(other["output"])
        == [("weather", {"city": "Oslo"}), ("time", {})]
    )
    assert shape(only["output"]) == [("message", OSLO), ("time", {})]
    assert shape(none["output"]) == [("message", f"{OSLO}\n{TIME}")]
    assert (
        only["usage"]["input_tokens"] == both["usage"]["input_tokens"]
    )  # all tools stay in the prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "time"}])
def test_a_call_that_is_required_is_made(server, choice):
    """Without a script: the grammar makes the call."""
    status, found = server.post(
        RESPONSES, HELLO | TOOLS | {"tool_choice": choice, "seed": 1, "temperature": 1}
    )
    kinds = [item["type"] for item in found["output"] if item["type"] != "reasoning"]
    assert status == 200 and set(kinds) == {"function_call"}, found
    if choice != "required":
        assert found["output"][-1]["name"] == "time"


def test_probes_of_clients_get_an_answer(server):
    for empty in ("", []):
        status, found = server.post(RESPONSES, {"input": empty, "max_output_tokens": 1})
        assert status == 200 and found["usage"]["output_tokens"] == 1
    codex = HELLO | {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "tools": [WEATHER, SEARCH],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 4,
    }
    assert events(server.stream(RESPONSES, codex))[-1]["type"] in (
        "response.completed",
        "response.incomplete",
    )


REFUSED = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "background": ({"background": True}, "background"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    "reference without a type": ({"input": [{"id": "msg_1"}]}, "input[0].id"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "answers": ({"n": 2}, "n"),
    "type": ({"input": [{"type": {}}]}, "input[0].type"),
    "role": ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    "number": ({"input": 5}, "input"),
    "tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "grammar": (
        {"text": {"format": {"type": "json_schema", "schema": {"type": "sock"}}}},
        "text.format",
    ),
    "function": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}},
        "tool_choice",
    ),
    "no function": ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    "control": ({"input": "<|im_end|>"}, "input[0].content"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_by_its_name(server, case):
    fields, param = REFUSED[case]
    status, found = server.post(RESPONSES, HELLO | fields)
    assert status == 400 and error(found)["param"] == param, found


# --- references to items ----------------------------------------------------------------------------------------------


def references(output: list[dict]) -> list[dict]:
    """What the AI SDK sends in place of earlier items, unless store is false."""
    return [{"type": "item_reference", "id": item["id"]} for item in output]


def rest(output: list[dict]) -> list[dict]:
    """The result of each call."""
    calls = [item for item in output if item["type"] == "function_call"]
    return [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "Rain."}
        for one in calls
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reference_stands_for_the_item(server, scripted, streamed):
    scripted(f"<think>\nHm.\n</think>\n\nI look.\n{OSLO}\n{TIME}")
    asked = TOOLS | {"input": [{"role": "user", "content": "Who?"}], "top_logprobs": 2}
    if streamed:
        first = events(server.stream(RESPONSES, asked))[-1]["response"]
    else:
        _, first = server.post(RESPONSES, asked)
    output = first["output"]
    assert first["store"] and len(output) == 4
    found = []
    untyped = [{"id": item["id"]} for item in output]
    for earlier in (output, references(output), untyped):
        again = asked | {"input": [*asked["input"], *earlier, *rest(output)]}
        status, counted = server.post(f"{RESPONSES}/input_tokens", again)
        assert status == 200, counted
        status, answer = server.post(RESPONSES, again)
        assert (status, answer["usage"]["input_tokens"]) == (200, counted["input_tokens"])
        found.append((counted, shape(answer["output"])))
    assert found[0] == found[1] == found[2]


def refused_reference(server, sent: list[dict], headers=None) -> str:
    """The message of the refusal of the first item."""
    status, found = server.post(RESPONSES, {"input": sent}, headers)
    assert (status, error(found)["param"]) == (400, "input[0].id")
    return found["error"]["message"]


def test_a_reference_to_another_item_is_refused_with_the_setting_of_the_client(server):
    said = refused_reference(server, references([{"id": "msg_1"}]))
    assert said.startswith('no item "msg_1" is kept: it is unknown or forgotten')
    assert "the newest 1,000 items" in said and "4 MB" in said and "store: false" in said
    for id in (None, 5, {}, [], ""):
        refused_reference(server, [{"type": "item_reference", "id": id}])
    _, found = server.post(RESPONSES, HELLO | {"store": False, "max_output_tokens": 2})
    assert found["store"] is False
    refused_reference(server, references(found["output"]))


def test_no_key_finds_items_of_another(loaded):
    def own(key):
        return {"authorization": f"Bearer {key}"}

    with Serving(*loaded, keys=["one", "two"]) as server:
        _, found = server.post(RESPONSES, HELLO | {"max_output_tokens": 2}, own("one"))
        again = references(found["output"])
        assert server.post(RESPONSES, {"input": again}, own("one"))[0] == 200
        refused_reference(server, again, own("two"))


def message(number: int, text: str = "Yes.") -> dict:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": [{}] * 9}
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}


def known(kept: Items, key: str, number: int) -> bool:
    fields = {"input": references([message(number)])}
    return kept.filled(key, fields) != fields


def test_the_newest_items_of_each_key_are_kept(monkeypatch):
    monkeypatch.setattr(items, "MOST_ITEMS", 3)
    kept = Items()
    kept.keep("b", [message(9)])
    for number in range(5):
        kept.keep("a", [message(number)])
    assert [known(kept, "a", number) for number in range(5)] == [False, False, True, True, True]
    assert known(kept, "b", 9) and not known(kept, "a", 9) and not known(kept, "c", 9)


def test_the_bytes_of_items_are_bounded(monkeypatch):
    monkeypatch.setattr(items, "MOST_BYTES", 1_000)
    kept = Items()
    for number in range(3):
        kept.keep("", [message(number, "x" * 400)])
    assert [known(kept, "", number) for number in range(3)] == [False, False, True]
    with pytest.raises(ApiError, match=r"refers to 1,\d+ bytes of items, at most 1,000"):
        kept.filled("", {"input": references([message(2)] * 2)})
    kept.keep("", [message(7, "x" * 2_000)])
    assert not known(kept, "", 7), "an item that is too large is not kept"


def test_a_context_that_is_full_is_told_with_both_counts(server):
    status, found = server.post(RESPONSES, {"input": "zorbla " * 180})
    assert status == 400 and error(found)["code"] == "context_length_exceeded"
    assert (
        "512 tokens" in found["error"]["message"]
        and "your input resulted in" in found["error"]["message"]
    )


def test_an_error_in_a_stream_is_a_failed_response(server, monkeypatch):
    monkeypatch.setattr(server.engine, "_decode", lambda requests: 1 / 0)
    told = events(server.stream(RESPONSES, HELLO | {"max_output_tokens": 5}))
    assert (
        told[-1]["type"] == "response.failed"
        and told[-1]["response"]["error"]["code"] == "server_error"
    )


def test_the_official_client(server, scripted):
    tool = WEATHER | {"strict": False}
    with server.client() as client:
        scripted(f"I look.\n{OSLO}")
        with client.responses.stream(model="tiny", input="How is Oslo?", tools=[tool]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert (
            "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"
        )
        (call,) = (item for item in final.output if item.type == "function_call")
        assert json.loads(call.arguments) == {"city": "Oslo"} and final.output_text == "I look."
        history = [
            {"role": "user", "content": "How is Oslo?"},
            *(item.to_dict() for item in final.output),
        ]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain."})
        scripted("It rains.")
        answer = client.responses.create(model="tiny", input=history, tools=[tool])
        assert (
            answer.output_text == "It rains."
            and answer.usage.input_tokens_details.cached_tokens >= 0
        )


def test_structured_output_of_the_official_client(server):
    class Reply(BaseModel):
        yes: bool

    with server.client() as client:
        found = client.responses.parse(
            model="tiny", input="Is it so?", text_format=Reply, max_output_tokens=60
        )
        assert isinstance(found.output_parsed, Reply)
        odd = client.responses.create(
            model="tiny",
            input="hi",
            max_output_tokens=4,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
    likely = odd.output[-1].content[0].logprobs
    assert likely and all(len(one.top_logprobs) == 2 for one in likely)


def test_arguments_that_are_no_json_pass_as_text(server, scripted):
    """Agents keep what another model said: the history must not end the conversation."""
    scripted("Ok.")
    call = {"type": "function_call", "call_id": "c", "name": "time", "arguments": written("x")}
    result = {"type": "function_call_output", "call_id": "c", "output": "Noon."}
    status, found = server.post(
        RESPONSES, {"input": [{"role": "user", "content": "?"}, call, result]} | TOOLS
    )
    assert status == 200 and shape(found["output"]) == [("message", "Ok.")]
