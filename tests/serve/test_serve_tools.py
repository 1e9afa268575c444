"""`nanokv serve`: tools. What the model is told about them, its calls in OpenAI's form, and what is not a call.

The model says a given text (the fixture `scripted`), so that every way to cut a call into tokens and to spoil it is
tried. The official client reads the answers.
"""

import contextlib
import json

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

import nanokv
from api_schema import schema_errors
from nanokv.apps.serve.api.calls import ToolCalls, in_string
from serving import CHAT, TEXT, Serving, ask, chunks, error, strict
from tiny_checkpoint import CHATML, write_tiny_checkpoint
from tool_calls import HERMES, OSLO, TIME, TOOLS, WEATHER, said, tool, with_template, written


@pytest.fixture(scope="module")
def server(loaded):
    with Serving(loaded[0], with_template(loaded[1], HERMES)) as server:
        yield server
        server.wait(lambda: server.free)


CASES = {
    "one": (OSLO, (None, [("weather", {"city": "Oslo"})], "tool_calls")),
    "two": (f"{OSLO}\n{TIME}", (None, [("weather", {"city": "Oslo"}), ("time", {})], "tool_calls")),
    "text before": (f"I look.\n{OSLO}", ("I look.", [("weather", {"city": "Oslo"})], "tool_calls")),
    "text after": (f"{TIME}\nThat was it. So.", ("That was it. So.", [("time", {})], "tool_calls")),
    "thought before": (
        f"<think>\nHm {OSLO}\n</think>\n\n{TIME}",
        (None, [("time", {})], "tool_calls"),
    ),
    "the tag in an argument": (
        written(city='</tool_call>\\"'),
        (None, [("weather", {"city": '</tool_call>\\"'})], "tool_calls"),
    ),
    "letters": (
        written(city="Ærøskøbing 🧑"),
        (None, [("weather", {"city": "Ærøskøbing 🧑"})], "tool_calls"),
    ),
    "no last tag": (
        OSLO.removesuffix("\n</tool_call>"),
        (None, [("weather", {"city": "Oslo"})], "tool_calls"),
    ),
    "no arguments": (
        '<tool_call>{"name": "time"}</tool_call>',
        (None, [("time", {})], "tool_calls"),
    ),
    "parameters": (
        OSLO.replace('"arguments"', '"parameters"'),
        (None, [("weather", {"city": "Oslo"})], "tool_calls"),
    ),
    "arguments as text": (
        OSLO.replace('{"city": "Oslo"}', json.dumps('{"city": "Oslo"}')),
        (None, [("weather", {"city": "Oslo"})], "tool_calls"),
    ),
    "no arguments as text": (
        '<tool_call>{"name": "time", "arguments": ""}</tool_call>',
        (None, [("time", {})], "tool_calls"),
    ),
    "a list as text": (
        OSLO.replace('{"city": "Oslo"}', '"[1]"'),
        (OSLO.replace('{"city": "Oslo"}', '"[1]"'), [], "stop"),
    ),
    "no JSON": (
        "a\n<tool_call>\nno\n</tool_call> b",
        ("a\n<tool_call>\nno\n</tool_call> b", [], "stop"),
    ),
    "a list": ("<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [], "stop")),
    "an unknown function": (written("sum"), (written("sum"), [], "stop")),
    "NaN": (OSLO.replace('"Oslo"', "NaN"), (OSLO.replace('"Oslo"', "NaN"), [], "stop")),
    "arguments no object": (
        OSLO.replace('{"city": "Oslo"}', '"x"'),
        (OSLO.replace('{"city": "Oslo"}', '"x"'), [], "stop"),
    ),
    "no JSON, then a call": (
        f"<tool_call>x</tool_call>{TIME}",
        ("<tool_call>x</tool_call>", [("time", {})], "tool_calls"),
    ),
    "half a tag": ("<tool_ca", ("<tool_ca", [], "stop")),
    "blanks stay": ("a \n b\n", ("a \n b\n", [], "stop")),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_a_call_is_a_call_and_what_is_none_stays_text(server, scripted, api, text, expected):
    scripted(text)
    _, whole = server.post(CHAT, ask(**TOOLS))
    (choice,) = whole["choices"]
    assert said(choice) == expected and strict(ChatCompletion, whole)
    assert schema_errors(api, "CreateChatCompletionResponse", whole) == []
    found = chunks(server.stream(CHAT, ask(**TOOLS)))
    assert all(strict(ChatCompletionChunk, one) for one in found)
    assert all(schema_errors(api, "CreateChatCompletionStreamResponse", one) == [] for one in found)
    deltas = [one["choices"][0]["delta"] for one in found]
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    calls = [
        [part["function"] for part in parts if part["index"] == i] for i in range(len(expected[1]))
    ]
    assert ["".join(one.get("name", "") for one in call) for call in calls] == [
        name for name, _ in expected[1]
    ]
    assert [json.loads("".join(one["arguments"] for one in call)) for call in calls] == [
        a for _, a in expected[1]
    ]
    assert all(
        part["type"] == "function" and part["id"] for part in parts if "name" in part["function"]
    )
    assert "".join(delta.get("content", "") for delta in deltas) == (expected[0] or "")
    assert found[-1]["choices"][0]["finish_reason"] == expected[2]


@pytest.mark.parametrize("text", [text for text, _ in CASES.values() if "think" not in text])
def test_a_call_is_found_however_it_is_cut(text):
    """Into two pieces at every place, and into single characters."""

    def split(*pieces):
        calls = ToolCalls(["weather", "time"])
        parts = [part for piece in pieces for part in calls.put(piece)] + calls.flush()
        at = [part.at for part in parts]
        assert at == sorted(at) and all(
            text[p.at : p.at + len(p.text)] == p.text for p in parts if not p.call
        )
        return "".join(p.text for p in parts), [
            (p.call.place, p.call.name, p.call.arguments) for p in parts if p.call
        ]

    whole = split(text)
    assert (
        all(split(text[:at], text[at:]) == whole for at in range(len(text)))
        and split(*text) == whole
    )


def test_inside_of_a_json_string():
    assert (
        in_string('{"a')
        and in_string('"\\"')
        and not in_string('"\\\\"')
        and not in_string('{"a": 1}')
    )


def test_a_call_that_is_cut_off_ends_by_length(server, scripted, loaded):
    scripted(OSLO)
    cut = loaded[1].encode(OSLO)[:12]
    _, found = server.post(CHAT, ask(max_tokens=12, **TOOLS))
    assert said(found["choices"][0]) == (loaded[1].decode(cut), [], "length")
    streamed = chunks(server.stream(CHAT, ask(max_tokens=12, **TOOLS)))
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in streamed) == loaded[
        1
    ].decode(cut)
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_does_not_reach_into_a_call(server, scripted):
    scripted(f"One. {OSLO}")
    assert said(server.post(CHAT, ask(stop="Oslo", **TOOLS))[1]["choices"][0])[1:] == (
        [("weather", {"city": "Oslo"})],
        "tool_calls",
    )
    assert said(server.post(CHAT, ask(stop="ne", **TOOLS))[1]["choices"][0]) == ("O", [], "stop")


def test_one_call_at_a_time(server, scripted):
    scripted(f"{OSLO}\n{TIME}")
    _, found = server.post(CHAT, ask(parallel_tool_calls=False, **TOOLS))
    assert said(found["choices"][0]) == (None, [("weather", {"city": "Oslo"})], "tool_calls")


def test_the_log_probabilities_are_those_of_the_content(server, scripted):
    scripted(f"I look.\n{OSLO}\nDone")
    _, found = server.post(CHAT, ask(logprobs=True, **TOOLS))
    content = b"".join(bytes(one["bytes"]) for one in found["choices"][0]["logprobs"]["content"])
    assert b"I look." in content and b"Done" in content and b"Oslo" not in content


def test_tools_that_may_not_be_called_are_neither_shown_nor_read(server, scripted):
    scripted(OSLO)
    plain, told = (server.post("/tokenize", ask(**fields))[1] for fields in ({}, TOOLS))
    assert told["count"] > plain["count"]
    assert server.post("/tokenize", ask(tool_choice="none", **TOOLS))[1] == plain
    for fields in ({}, {"tools": []}, TOOLS | {"tool_choice": "none"}):
        assert said(server.post(CHAT, ask(**fields))[1]["choices"][0]) == (OSLO, [], "stop")


def test_the_official_client_calls_and_answers(server, scripted):
    """A whole round: the call, what came of it, and the answer."""

    class Weather(BaseModel):
        city: str

    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    with server.client() as client:
        scripted(f"I look.\n{OSLO}")
        messages = ask("How is Oslo?")["messages"]
        with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        (call,) = final.message.tool_calls
        assert final.finish_reason == "tool_calls" and call.function.parsed_arguments == Weather(
            city="Oslo"
        )
        assert "tool_calls.function.arguments.done" in events
        parsed = (
            client.chat.completions.parse(model="tiny", messages=messages, tools=tools)
            .choices[0]
            .message
        )
        assert parsed.tool_calls[0].function.parsed_arguments == Weather(city="Oslo")
        messages = [
            *messages,
            parsed.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
        ]
        scripted("It rains.")
        answer = (
            client.chat.completions.create(model="tiny", messages=messages, tools=tools)
            .choices[0]
            .message
        )
        assert answer.content == "It rains." and answer.tool_calls is None


def test_qwen3s_own_template_has_calls_and_results_where_it_wants_them(
    tmp_path, qwen3_files, scripted
):
    """The prompt is what transformers makes of the same conversation."""
    model, tokenizer = nanokv.load(write_tiny_checkpoint(tmp_path, max_position_embeddings=4096))
    template = json.loads((qwen3_files / "tokenizer" / "tokenizer_config.json").read_text())[
        "chat_template"
    ]
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    messages = [
        *ask("Oslo?")["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain."}]},
    ]
    with Serving(model, with_template(tokenizer, template), context=4096, pages=1200) as server:
        _, found = server.post("/tokenize", {"messages": messages} | TOOLS)
        prompt = server.post("/detokenize", {"tokens": found["tokens"]})[1]["prompt"]
        assert (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
            in prompt
        )
        assert (
            "<tool_response>\nRain.\n</tool_response>" in prompt and json.dumps(WEATHER) in prompt
        )
        scripted(TIME)
        _, found = server.post(CHAT, {"messages": messages} | TOOLS)
        assert said(found["choices"][0]) == (None, [("time", {})], "tool_calls")


NAMED = {"default": CHATML, "tool_use": HERMES, "rag": "rag {{ messages[-1].content }}"}


@pytest.fixture
def prompted(loaded):
    """prompted(template, …fields) → the prompt of a request, or the error. One server per template: each takes 0.2 s
    to end."""
    servers = {}
    with contextlib.ExitStack() as ends:

        def server_of(template):
            tokenizer = with_template(loaded[1], template)
            return ends.enter_context(Serving(loaded[0], tokenizer, context=2000, pages=200))

        def prompted(template, **fields):
            name = repr(template)
            server = servers[name] = servers.get(name) or server_of(template)
            status, found = server.post("/tokenize", fields)
            if status != 200:
                return error(found)
            return server.post("/detokenize", {"tokens": found["tokens"]})[1]["prompt"]

        yield prompted


def test_the_template_for_tools_is_taken_with_tools_and_another_by_its_name(prompted):
    asked = ask("Tide?")
    assert "Call by <tool_call>" in prompted(NAMED, **asked, **TOOLS)
    assert prompted(NAMED, **asked) == prompted(CHATML, **asked)
    assert prompted(NAMED, **asked, chat_template="rag") == "rag Tide?"
    assert prompted(NAMED, **asked, chat_template="default", **TOOLS)["param"] == "tools"
    found = prompted(NAMED, **asked, chat_template="tool use")
    assert found["param"] == "chat_template" and '"default", "tool_use", "rag"' in found["message"]
    assert prompted(NAMED, **asked, chat_template="{{ messages }}")["param"] == "chat_template"
    hidden = prompted(NAMED, **asked, chat_template_kwargs={"chat_template": "{{ messages }}"})
    assert hidden["param"] == "chat_template_kwargs"


SHOWN = (
    "{% for m in messages %}{{ m.role }}[{{ m.reasoning_content }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ ARGUMENTS }}{% endfor %};{% endfor %}"
)


def replayed(arguments='{"city": "Oslo"}', content="", **more):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    said = {"role": "assistant", "content": content, "tool_calls": [call]} | more
    return [
        {"role": "user", "content": "Oslo?"},
        said,
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("c.function.arguments|tojson", '{"city": "Oslo"}'),
        ("'=' + c.function.arguments", '={"city": "Oslo"}'),
        ("c.function.arguments.items()|list", "[('city', 'Oslo')]"),
    ],
)
def test_a_replayed_call_has_the_form_that_the_template_takes(prompted, arguments, shown):
    """Text or object, from the client and for the template; the thoughts before it under the names that others use."""
    template = SHOWN.replace("ARGUMENTS", arguments)
    expected = f"user[]Oslo?;assistant[hm]{shown};tool[]Rain.;"
    for given in ('{"city": "Oslo"}', '{"city":"Oslo"}', {"city": "Oslo"}):
        for name in ("reasoning_content", "reasoning", "thinking"):
            for content in ("", None):
                assert (
                    prompted(template, messages=replayed(given, content, **{name: "hm"}))
                    == expected
                )
    assert prompted(template, messages=replayed(reasoning=5))["param"] == "messages[1].reasoning"


@pytest.mark.parametrize("broken", ['{"city": "Os', "Oslo", '["Oslo"]', "5", "null", '"Oslo"', " "])
def test_a_replayed_call_whose_arguments_are_broken_is_shown_as_the_model_wrote_it(
    prompted, broken
):
    """Agents replay what small models have written, and the model is to see what was wrong."""
    template = SHOWN.replace(
        "ARGUMENTS",
        "c.function.arguments if c.function.arguments is string else c.function.arguments|tojson",
    )
    assert (
        prompted(template, messages=replayed(broken))
        == f"user[]Oslo?;assistant[]{broken};tool[]Rain.;"
    )


def test_names_in_messages_reach_the_template(prompted):
    """Templates of tools read the name of the function in its answer."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.name }} {% endfor %}{% for t in tools or [] %}{% endfor %}"
    said = [
        {"role": "user", "content": "a", "name": "ada"},
        {"role": "tool", "content": "b", "name": "time", "tool_call_id": "1"},
    ]
    assert prompted(template, messages=said) == "user:ada tool:time "
    assert prompted(template, messages=[said[0] | {"name": 5}])["param"] == "messages[0].name"
    assert (
        prompted(template, messages=[said[0] | {"prefix": False, "partial": None}]) == "user:ada "
    )
    for name in ("prefix", "partial"):
        found = prompted(
            template, messages=[said[0], {"role": "assistant", "content": "b", name: True}]
        )
        assert (found["param"], found["code"]) == (f"messages[1].{name}", "unsupported")


def test_null_is_null_where_the_template_asks_for_it(prompted):
    """DeepSeek-R1's shows a call only where the content is none; Qwen3's first one could not read such a content."""
    calls = "{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}{% endfor %}"
    where = (
        "{% for m in messages %}{% if m.content is none %}"
        + calls
        + "{% else %}{{ '-' + m.content }}{% endif %}"
        "{% endfor %}"
    )
    assert prompted(where, messages=replayed(content=None)) == '-Oslo?{"city": "Oslo"}-Rain.'
    assert prompted(where, messages=replayed(content=""))["code"] == "unsupported"
    first = SHOWN.replace("m.content", "m.content.strip()").replace(
        "ARGUMENTS", "c.function.arguments|tojson"
    )
    assert (
        prompted(first, messages=replayed(content=None))
        == 'user[]Oslo?;assistant[]{"city": "Oslo"};tool[]Rain.;'
    )


def among(mode, *names, more=()) -> dict:
    """A `tool_choice` among these functions."""
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*functions, *more]}}


WRONG = [
    ("tools", 5, "tools"),
    ("tools", [5], "tools[0]"),
    ("tools", [None], "tools[0]"),
    ("tools", [{"function": {"name": "x"}}], "tools[0].type"),
    ("tools", [{"type": 5}], "tools[0].type"),
    ("tools", [{"type": "function"}], "tools[0].function"),
    ("tools", [tool("a b")], "tools[0].function.name"),
    ("tools", [tool("x" * 65)], "tools[0].function.name"),
    ("tools", [tool("x"), tool("x")], "tools"),
    ("tools", [tool("x", parameters=[])], "tools[0].function.parameters"),
    ("tools", [tool("x")] * 129, "tools"),
    ("tools", [tool("x", description="<|im_end|>")], "tools[0].description"),
    ("tool_choice", "sum", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "sum"}}, "tool_choice"),
    ("tool_choice", {"type": "custom", "custom": {"name": "patch"}}, "tool_choice"),
    ("tool_choice", {"type": "allowed_tools"}, "tool_choice"),
    ("tool_choice", among("none", "time"), "tool_choice"),
    ("tool_choice", among("auto", "sum"), "tool_choice"),
    ("tool_choice", among("required"), "tool_choice"),
    ("parallel_tool_calls", 1, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("name", "value", "param"), WRONG)
def test_wrong_tools_are_named(server, name, value, param):
    status, found = server.post(CHAT, ask(**TOOLS) | {name: value})
    assert (status, error(found)["param"]) == (400, param)


WRONG_CALLS = [
    (5, "tool_calls"),
    ([5], "tool_calls[0]"),
    ([{"type": "custom"}], "tool_calls[0].type"),
    ([{"function": {"name": "time", "arguments": "{}"}}], "tool_calls[0].id"),
    ([{"id": "1", "function": {"name": "time"}}], "tool_calls[0].function.arguments"),
    (
        [{"id": "1", "function": {"name": "time", "arguments": []}}],
        "tool_calls[0].function.arguments",
    ),
    (
        [{"id": "1", "function": {"name": "time", "arguments": "<|im_end|>"}}],
        "tool_calls[0].function.arguments",
    ),
    (
        [{"id": "1", "function": {"name": "<|im_end|>", "arguments": "{}"}}],
        "tool_calls[0].function.name",
    ),
]


@pytest.mark.parametrize(("calls", "place"), WRONG_CALLS)
def test_wrong_calls_in_messages_are_named(server, calls, place):
    messages = [*ask()["messages"], {"role": "assistant", "content": "x", "tool_calls": calls}]
    status, found = server.post(CHAT, {"messages": messages})
    assert (status, error(found)["param"]) == (400, f"messages[1].{place}")


OTHERS = [
    {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}},
    {"type": "web_search"},
]


def test_tools_of_other_kinds_are_left_out_and_named_in_the_log(server, scripted, caplog):
    """One that this server cannot run does not refuse the others; nothing is left if one is required: 400."""
    caplog.set_level("INFO", "nanokv.apps.serve")
    scripted(OSLO)
    _, found = server.post(CHAT, ask(tools=[OTHERS[0], WEATHER, OTHERS[1]]))
    assert said(found["choices"][0]) == (None, [("weather", {"city": "Oslo"})], "tool_calls")
    assert 'left out: 2 tools of type "custom", "web_search"' in caplog.text
    for fields in ({"tools": OTHERS}, {"tools": OTHERS, "tool_choice": "auto"}):
        assert said(server.post(CHAT, ask(**fields))[1]["choices"][0]) == (OSLO, [], "stop")
    plain, told = (
        server.post("/tokenize", ask(**fields))[1]
        for fields in (TOOLS, {"tools": [*OTHERS, *TOOLS["tools"]]})
    )
    assert plain == told
    for choice in ("required", among("required", more=[{"type": "web_search"}])):
        status, found = server.post(CHAT, ask(tools=OTHERS, tool_choice=choice))
        assert (status, error(found)["param"]) == (400, "tool_choice")


def test_only_the_allowed_functions_are_calls(server, scripted):
    """The prompt keeps all of them, so that its cached part stays."""
    scripted(f"{OSLO}\n{TIME}")
    both, only, none = (
        server.post(CHAT, ask(**TOOLS, **fields))[1]
        for fields in (
            {},
            {"tool_choice": among("auto", "time", more=OTHERS)},
            {"tool_choice": among("auto")},
        )
    )
    assert said(both["choices"][0])[1] == [("weather", {"city": "Oslo"}), ("time", {})]
    assert said(only["choices"][0]) == (OSLO, [("time", {})], "tool_calls")
    assert said(none["choices"][0]) == (f"{OSLO}\n{TIME}", [], "stop")
    prompts = [found["usage"]["prompt_tokens"] for found in (both, only, none)]
    assert prompts[0] == prompts[1] > prompts[2]


def test_required_without_tools_and_tools_of_a_completion_are_refused(server):
    assert error(server.post(CHAT, ask(tool_choice="required"))[1])["param"] == "tool_choice"
    assert error(server.post(TEXT, {"prompt": "Once"} | TOOLS)[1])["param"] == "tools"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, "no place for tools"),
        (HERMES.replace("tool_call>", "call>"), "does not write calls"),
        (HERMES + "<function=", "does not write calls"),
    ],
)
def test_templates_without_tools_are_told(loaded, template, said):
    with Serving(loaded[0], with_template(loaded[1], template)) as server:
        status, found = server.post(CHAT, ask(**TOOLS))
        assert (status, error(found)["param"], found["error"]["code"]) == (
            400,
            "tools",
            "unsupported",
        )
        assert said in found["error"]["message"] and server.post(CHAT, ask(max_tokens=1))[0] == 200


def test_calls_that_the_template_would_leave_out_are_told(loaded):
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [*ask()["messages"], {"role": "assistant", "tool_calls": [call]}]
    with Serving(*loaded) as server:
        status, found = server.post(CHAT, {"messages": messages})
        assert (status, error(found)["code"]) == (400, "unsupported") and "tool_calls" in found[
            "error"
        ]["message"]
