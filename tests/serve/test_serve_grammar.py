"""`nanokv serve`: answers that must be JSON of a schema, or a tool call. The model has random weights: whatever it says
that has the right form was forced to have it.
"""

import contextlib
import json
import sys
from typing import Literal

import jsonschema
import pytest
import tokenizers
import torch
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

import nanokv
from asking import asked
from nanokv.apps.serve.api import grammar, schemas
from nanokv.apps.serve.api.answer import AnswerText
from nanokv.apps.serve.api.calls import ToolCalls
from nanokv.decoding.draw import Step
from nanokv.errors import GenerationError
from nanokv.text.thinking import ThinkSplitter
from nanokv.text.tokenizer import Tokenizer
from serving import CHAT, TEXT, Serving, ask, chunks, error, strict
from tool_calls import HERMES, WEATHER, said, tool, with_template

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["colour", "n", "ok", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 3}},
}
LIGHT = tool(
    "light",
    parameters={
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
)
TIME = tool("time", parameters={"type": "object", "properties": {}, "additionalProperties": False})


def of(schema, **more) -> dict:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema} | more,
        }
    }


@pytest.fixture(scope="module")
def server(loaded):
    with Serving(loaded[0], with_template(loaded[1], HERMES)) as server:
        yield server
        server.wait(lambda: server.free)


@pytest.mark.parametrize("seed", range(2))
def test_a_schema_is_kept(server, seed):
    """At a high temperature, in a stream and as a whole, several answers at once."""
    request = ask(temperature=3.0, seed=seed, n=2, max_tokens=80, **of(SCHEMA, strict=True))
    _, whole = server.post(CHAT, request)
    assert strict(ChatCompletion, whole)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    for choice, text in zip(whole["choices"], texts, strict=True):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    streamed = ["", ""]
    for one in chunks(server.stream(CHAT, request)):
        streamed[one["choices"][0]["index"]] += one["choices"][0]["delta"].get("content", "")
    assert streamed == texts


def test_json_object_is_an_object(server):
    for seed in range(3):
        _, found = server.post(
            CHAT,
            ask(temperature=2.0, seed=seed, max_tokens=60, response_format={"type": "json_object"}),
        )
        (choice,) = found["choices"]
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_others_are_not_constrained_and_log_probabilities_are_the_raw_ones(server):
    """In one batch with one that is."""
    plain = ask(max_tokens=8, logprobs=True)
    _, alone = server.post(CHAT, plain)
    with asked(server, ask(n=2, max_tokens=40, temperature=2.0, **of(SCHEMA))) as found:
        beside = server.post(CHAT, plain)[1]["choices"][0]
        assert beside["message"] == alone["choices"][0]["message"]
    assert found[0][0] == 200
    _, forced = server.post(CHAT, ask(max_tokens=5, logprobs=True, top_logprobs=1, **of(SCHEMA)))
    first = forced["choices"][0]["logprobs"]["content"][0]
    assert first["top_logprobs"][0] == {
        k: alone["choices"][0]["logprobs"]["content"][0][k] for k in ("token", "logprob", "bytes")
    }
    assert first["logprob"] < first["top_logprobs"][0]["logprob"]


def test_the_official_client_parses_into_its_own_types(server):
    class Light(BaseModel):
        colour: Literal["red", "green"]
        on: bool

    with server.client() as client:
        found = client.chat.completions.parse(
            model="tiny", response_format=Light, **ask(temperature=2, seed=1)
        )
        assert isinstance(found.choices[0].message.parsed, Light)
        request = ask(model="tiny", response_format=Light, temperature=2, seed=1)
        with client.chat.completions.stream(**request) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == found.choices[0].message.parsed


def test_an_answer_that_has_no_room_ends_by_length(server):
    _, found = server.post(CHAT, ask(max_tokens=6, **of(SCHEMA)))
    assert (
        found["choices"][0]["finish_reason"] == "length"
        and found["usage"]["completion_tokens"] == 6
    )
    assert found["choices"][0]["message"]["content"].startswith('{"c')


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"light", "time"}),
        ({"type": "function", "function": {"name": "light"}}, {"light"}),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_is_forced(server, choice, names, parallel):
    seen = set()
    for seed in (0, 6, 8):  # which draw different names
        request = ask(
            tools=[LIGHT, TIME], tool_choice=choice, temperature=100.0, seed=seed, max_tokens=80
        )
        _, found = server.post(CHAT, request | {"parallel_tool_calls": parallel})
        content, calls, reason = said(found["choices"][0])
        assert (
            calls
            and (reason == "tool_calls" or parallel)
            and (content is None or reason == "length")
        )
        assert len(calls) == 1 or (parallel and len(names) == 2)
        for name, arguments in calls:
            jsonschema.validate(
                arguments, {"light": LIGHT, "time": TIME}[name]["function"]["parameters"]
            )
        seen |= {name for name, _ in calls}
    assert seen == names


@pytest.mark.parametrize("name", ["light", "time"])
def test_a_call_among_the_allowed_functions_is_forced(server, name):
    functions = [{"type": "function", "function": {"name": name}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": functions}}
    request = ask(tools=[LIGHT, TIME], tool_choice=choice, parallel_tool_calls=False)
    for seed in (0, 6, 8):
        _, found = server.post(
            CHAT, request | {"temperature": 100.0, "seed": seed, "max_tokens": 80}
        )
        assert [called for called, _ in said(found["choices"][0])[1]] == [name]


def test_a_call_or_the_schema_may_be_the_answer(server, scripted):
    """A tool that may be called stands beside a response_format: the mask allows either."""
    for text in (
        '<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>',
        '{"on": false}',
    ):
        scripted(text)
        _, found = server.post(CHAT, ask(tools=[LIGHT], **of(LIGHT["function"]["parameters"])))
        content, calls, reason = said(found["choices"][0])
        expected = (
            (None, [("light", {"on": True})], "tool_calls")
            if "call" in text
            else (text, [], "stop")
        )
        assert (content, calls, reason) == expected
    scripted("Neither.")
    assert server.post(CHAT, ask(tools=[LIGHT], **of(SCHEMA)))[0] == 400, (
        "the script ignores the mask"
    )


def test_a_schema_that_needs_too_much_is_told_before_the_first_token(server):
    many = {
        "type": "object",
        "properties": {f"p{number}": {"type": "integer"} for number in range(1_000)},
    }
    for stream in (False, True):
        status, found = server.post(
            CHAT, ask(temperature=1, seed=1, max_tokens=20, stream=stream, **of(many))
        )
        assert (status, error(found)["code"], error(found)["param"]) == (
            400,
            "unsupported",
            "response_format",
        )
        assert "limits" in found["error"]["message"]
    few = {
        "type": "object",
        "properties": {f"p{number}": {"type": "integer"} for number in range(100)},
    }
    assert server.post(CHAT, ask(temperature=1, seed=1, max_tokens=20, **of(few)))[0] == 200


def test_a_pattern_whose_states_explode_ends_alone(server):
    """(.|a)*a.{200}b: every character may begin another count of 200; sixteen answers walk through other states."""
    bomb = of({"type": "string", "pattern": "(.|a)*a.{200}b"})
    with asked(server, ask(temperature=1, seed=1, n=16, max_tokens=150, **bomb)) as found:
        status, other = server.post(CHAT, ask(max_tokens=20))
    assert status == 200 and other["usage"]["completion_tokens"] > 3
    assert found[0][0] == 400 and "too many states: 20000" in found[0][1]["error"]["message"]
    assert found[0][1]["error"]["param"] == "response_format"


def test_a_schema_that_takes_too_long_is_told(server, monkeypatch):
    monkeypatch.setattr(grammar, "MASKS_S", 0.0)
    status, found = server.post(CHAT, ask(max_tokens=20, **of(SCHEMA)))
    assert (status, error(found)["code"]) == (400, "unsupported") and "too slow: 0 tokens" in found[
        "error"
    ]["message"]


@pytest.mark.parametrize(
    ("text", "thought", "follows"),
    [
        ("", "none", "{"),
        ("", "optional", "{<"),
        ("<think>\nHm {", "optional", None),
        ("Hm", "open", None),
        ("<think>x</think>\n\n", "optional", "{"),
        ("x</think>", "open", "\n{"),
        ('{"on": true}', "none", ""),
        ('{"on": ', "none", "tf"),
    ],
)
def test_thoughts_come_first_and_are_free(loaded, text, thought, follows):
    """`follows`: the characters with which a token may begin now; None: any text, but not the end."""
    _, tokenizer = loaded
    words = grammar.vocabulary(tokenizer, tokenizer.rows, [2, 0])
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    rules = grammar.compiled(
        grammar.source(schema, [], True, False, thought), words, "response_format"
    )
    constraint, logits = grammar.Constraint(rules), torch.zeros(1, tokenizer.rows)
    for _ in range(2):  # a draw that was cut short is repeated
        allowed = (
            (constraint(logits, tokenizer.encode(text))[0] > -torch.inf).nonzero()[:, 0].tolist()
        )
    begins = {
        tokenizer.token_bytes(id)[:1].decode("latin-1") for id in allowed if id not in (0, 1, 2)
    }
    if follows is None:
        assert len(begins) > 150 and not {0, 1, 2} & set(allowed)
    else:
        assert begins - {"\n"} == set(follows) - {"\n"} and ({0, 2} <= set(allowed)) == (
            follows == ""
        )


def test_whether_thoughts_are_expected(loaded, qwen3_files):
    qwen = Tokenizer.from_folder(qwen3_files / "tokenizer")
    assert grammar.thoughts(qwen, qwen.encode("assistant\n"), False) == "optional"
    assert grammar.thoughts(qwen, qwen.encode("<think>\n\n</think>\n\n"), False) == "none"
    assert grammar.thoughts(qwen, qwen.encode("<think>\n"), True) == "open"
    assert grammar.thoughts(loaded[1], loaded[1].encode("assistant\n"), False) == "none"


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ("json", "response_format"),
        ({"type": "json_object", "schema": []}, "schema"),
        ({"type": "xml"}, "response_format"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema"),
        (of([])["response_format"], "schema"),
        (of({"type": "sock"})["response_format"], "response_format"),
        (of({"$ref": "https://example.com/x.json"})["response_format"], "response_format"),
        (of({"type": "string", "pattern": "("})["response_format"], "response_format"),
        (of({"not": {"type": "string"}})["response_format"], "response_format"),
        (of({"enum": ["x" * 99] * 1100})["response_format"], "response_format"),
        (of({"type": "array", "minItems": 3, "maxItems": 2})["response_format"], "response_format"),
    ],
)
def test_a_format_that_cannot_be_kept_is_400(server, format, param):
    status, found = server.post(CHAT, ask(response_format=format))
    assert (
        status == 400
        and error(found)["param"].endswith(param)
        and len(found["error"]["message"]) < 2_100
    )
    assert error(found)["param"].startswith("response_format")


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"unevaluatedProperties": False},
        {"format": "password"},
        {"format": "int64"},
        {"format": []},
        {"if": {}},
        {"$schema": "https://json-schema.org/schema#"},
        {"then": False},
        {"not": False},
        {"minContains": 3},
        {"contains": {"type": "null"}, "minContains": 0},
        {"dependentRequired": {}},
        {"title": "T", "description": "d", "$comment": "c", "examples": [1], "default": {}},
        {
            "readOnly": True,
            "deprecated": False,
            "x-order": 1,
            "discriminator": {"propertyName": "on"},
            "nullable": False,
        },
        {
            "$id": "https://example.com/a.json",
            "contentEncoding": "base64",
            "contentMediaType": "text/plain",
        },
    ],
)
def test_keywords_that_say_nothing_are_left_out(server, keywords):
    inner = {
        "type": "object",
        "properties": {"on": {"type": "boolean"} | keywords},
        "required": ["on"],
        "additionalProperties": False,
    } | keywords
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [inner]}},
        "required": ["a"],
        "additionalProperties": False,
        **keywords,
    }
    status, found = server.post(CHAT, ask(temperature=2, seed=1, max_tokens=40, **of(schema)))
    assert status == 200, found
    assert json.loads(found["choices"][0]["message"]["content"]) in [
        {"a": {"on": on}} for on in (True, False)
    ]


@pytest.mark.parametrize("name", ["password", "int64", "idn-email", "regex", "x-colour"])
def test_an_unknown_format_is_an_annotation(server, name):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 2, "format": name}},
        "required": ["a"],
        "additionalProperties": False,
    }
    status, found = server.post(CHAT, ask(temperature=2, seed=1, max_tokens=40, **of(schema)))
    assert status == 200, found
    jsonschema.validate(json.loads(found["choices"][0]["message"]["content"]), schema)


def test_a_format_that_is_known_is_kept(loaded):
    words = grammar.vocabulary(loaded[1], loaded[1].rows, [2, 0])
    for name in schemas.FORMATS:
        source = grammar.source({"type": "string", "format": name}, [], True, False, "none")
        matcher, ids = grammar.compiled(source, words, "x").matcher, loaded[1].encode('"!"')
        assert matcher.validate_tokens(ids) < len(ids), name


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"$ref": "https://example.com/x.json"}, "$ref https://example.com/x.json is not fetched"),
        ({"$ref": "#/$defs/x"}, "$ref #/$defs/x names nothing in the schema"),
        ({"allOf": [{"$ref": "#/properties/a"}]}, "a $ref that leads back to itself"),
        ({"not": {"type": "null"}}, "not is not supported"),
        ({"if": {"type": "null"}, "then": False}, "if"),
        ({"contains": {"type": "null"}, "type": "array"}, "contains is not supported"),
        ({"pattern": "a(?=b)"}, "look-around"),
        ({"propertyNames": {"pattern": "^a"}, "type": "object"}, "propertyNames is not supported"),
        ({"oneOf": [{"maxLength": 3}, {"maxLength": 2}]}, "oneOf is supported only if"),
    ],
)
def test_keywords_that_are_not_done_are_named_in_one_line(server, keywords, said):
    parameters = {"type": "object", "properties": {"a": {"type": "string"} | keywords}}
    forced = {"tools": [tool("f", parameters=parameters)], "tool_choice": "required"}
    for fields, param in ((of(parameters), "response_format"), (forced, "tools")):
        status, found = server.post(CHAT, ask(**fields))
        wrong = error(found)
        assert (status, wrong["code"], wrong["param"]) == (400, "unsupported", param)
        message = wrong["message"]
        assert said in message and "\n" not in message and len(message) < 200
        assert not any(ours in message for ours in ("%", "start:", "call0", "guidance")), message


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_reference_to_itself_is_refused(server, schema):
    status, found = server.post(CHAT, ask(**of(schema)))
    words = "response_format has a $ref that leads back to itself, so it describes no JSON"
    assert (status, error(found)["message"]) == (400, words)


NEXT = {"anyOf": [{"type": "null"}, {"$ref": "REF"}]}


@pytest.mark.parametrize("inside", [False, True])
def test_a_schema_may_contain_itself(server, inside):
    """A list of nodes, by {"$ref": "#"} or by a definition."""
    node = {
        "type": "object",
        "properties": {"n": {"enum": [0, 1]}, "next": NEXT},
        "required": ["n", "next"],
        "additionalProperties": False,
    }
    schema = json.loads(json.dumps(node).replace("REF", "#/$defs/node" if inside else "#"))
    if inside:
        schema = {"$ref": "#/$defs/node", "$defs": {"node": schema}}
    deep = 0
    for seed in range(4):
        request = ask(temperature=100.0, seed=seed, max_tokens=120, **of(schema))
        text = server.post(CHAT, request)[1]["choices"][0]["message"]["content"]
        deep = max(deep, text.count("next"))
        if text.endswith("null" + "}" * text.count("{")):
            jsonschema.validate(json.loads(text), schema)
    assert deep > 1


def test_unique_items_are_not_enforced_and_the_log_says_so(server, caplog):
    """As pydantic describes a set, which drops repeats when it reads the answer."""
    caplog.set_level("INFO", "nanokv.apps.serve")
    items = {"type": "array", "items": {"enum": ["a"]}, "minItems": 2, "maxItems": 2}
    _, found = server.post(CHAT, ask(max_tokens=20, **of(items | {"uniqueItems": True})))
    assert json.loads(found["choices"][0]["message"]["content"]) == ["a", "a"]
    assert caplog.text.count("not enforced: uniqueItems in response_format") == 1
    caplog.clear()
    assert server.post(CHAT, ask(max_tokens=20, **of(items | {"uniqueItems": False})))[0] == 200
    assert "not enforced" not in caplog.text


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "minimum": 2, "exclusiveMinimum": True, "maximum": 3}, 3, 2),
        ({"type": "integer", "minimum": 2, "exclusiveMinimum": False, "maximum": 2}, 2, 3),
        ({"type": "integer", "maximum": 3, "exclusiveMaximum": True, "minimum": 2}, 2, 3),
        (
            {
                "properties": {"uniqueItems": {"const": False}},
                "required": ["uniqueItems"],
                "type": "object",
                "additionalProperties": False,
            },
            {"uniqueItems": False},
            {},
        ),
        ({"enum": [{"uniqueItems": False}]}, {"uniqueItems": False}, {}),
    ],
)
def test_limits_of_draft_4_and_names_like_keywords_keep_their_meaning(loaded, schema, right, wrong):
    _, tokenizer = loaded
    words = grammar.vocabulary(tokenizer, tokenizer.rows, [2, 0])
    rules = grammar.compiled(
        grammar.source(schema, [], True, False, "none"), words, "response_format"
    )
    for value, taken in ((right, True), (wrong, False)):
        matcher, ids = rules.matcher.deep_copy(), tokenizer.encode(json.dumps(value))
        assert (
            matcher.validate_tokens(ids) == len(ids)
            and matcher.try_consume_tokens(ids) == len(ids)
            and matcher.is_accepting()
        ) == taken


def test_a_json_object_obeys_its_schema(server):
    """As llama.cpp, llama-cpp-python and Together take it."""
    schema = {key: value for key, value in LIGHT["function"]["parameters"].items() if key != "type"}
    answers = {
        key: server.post(CHAT, ask(temperature=2, seed=3, max_tokens=40, response_format=form))[1]
        for key, form in (
            ("object", {"type": "json_object", "schema": schema}),
            ("schema", of(schema | {"type": "object"})["response_format"]),
        )
    }
    texts = {key: one["choices"][0]["message"]["content"] for key, one in answers.items()}
    assert texts["object"] == texts["schema"] and set(json.loads(texts["object"])) == {"on"}


def test_what_does_not_go_together_is_400(server):
    assert error(server.post(CHAT, ask(ignore_eos=True, **of(SCHEMA)))[1])["param"] == "ignore_eos"
    assert (
        error(server.post(TEXT, {"prompt": "Once"} | of(SCHEMA))[1])["param"] == "response_format"
    )
    bad = tool("bad", parameters={"type": "object", "properties": {"x": {"type": "sock"}}})
    assert error(server.post(CHAT, ask(tools=[bad], tool_choice="required"))[1])["param"] == "tools"
    assert server.post(CHAT, ask(tools=[bad], max_tokens=1))[0] == 200, (
        "what is only offered is not compiled"
    )


def test_without_llguidance_the_install_line_is_told(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for fields, param in (
        (of(SCHEMA), "response_format"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
    ):
        status, found = server.post(CHAT, ask(**fields))
        assert (status, error(found)["param"], found["error"]["code"]) == (
            400,
            param,
            "unsupported",
        )
        hint = found["hint"]
        assert hint.startswith("install llguidance") and sys.prefix not in hint, (
            "who asks need not know our folders"
        )
    assert server.post(CHAT, ask(max_tokens=1, response_format={"type": "text"}))[0] == 200


def test_a_model_without_an_end_is_told(endless_folder):
    with Serving(*nanokv.load(endless_folder)) as server:
        status, found = server.post(CHAT, ask(**of(SCHEMA)))
        assert status == 400 and "no token that ends" in error(found)["message"]


def test_a_client_that_leaves_a_constrained_answer_frees_it(server):
    request = ask(
        stream=True,
        temperature=2.0,
        **of({"type": "array", "items": {"type": "integer"}, "minItems": 300}),
    )
    with contextlib.closing(server.send("POST", CHAT, request)):
        server.wait(lambda: server.tickets)
    server.wait(lambda: server.free)


def test_the_engine_asks_before_each_token(loaded):
    """Engine.submit(constrain=…): with the tokens so far; the others of the batch are left alone."""
    model, _ = loaded
    engine, seen = nanokv.Engine(model, pages=64), []

    def only(logits, tokens):
        seen.append(list(tokens))
        return torch.full_like(logits, -torch.inf).index_fill(
            1, torch.tensor([7 + len(tokens)]), 0.0
        )

    plain = engine.submit([5, 6], max_new_tokens=3, eos_token_ids=[])
    forced = engine.submit([5, 6], max_new_tokens=3, eos_token_ids=[], constrain=only)
    engine.run()
    assert forced.tokens == [7, 8, 9] and seen == [[], [7], [7, 8]]
    assert plain.tokens == list(nanokv.generate(model, [5, 6], max_new_tokens=3, eos_token_ids=[]))
    with pytest.raises(GenerationError, match="constrain is 5"):
        engine.submit([5], constrain=5)


@pytest.mark.parametrize("special", [True, False])
def test_tags_may_follow_whatever_they_are_marked(special, tiny_folder):
    """The token of a tag is its text to a grammar, and a call that was forced can be read."""
    tokens = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer = with_tokens(tiny_folder, special, tokens)
    ids = tokenizer.encode(f"<think>\nHm.\n</think>\n\n{CALL}")
    assert {tokenizer.special_tokens[token] for token in tokens} < set(ids)
    words = grammar.vocabulary(tokenizer, tokenizer.vocab_size, [2])
    rules = grammar.source(
        None, [LIGHT["function"]], False, True, grammar.thoughts(tokenizer, [5], False)
    )
    matcher = grammar.compiled(rules, words, "tools").matcher
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    answer = AnswerText(tokenizer, [], ThinkSplitter(), ToolCalls(["light"]), [2])
    pieces = [piece for id in [*ids, 2] for piece in answer.put(Step(id, 0.0), id == 2)]
    assert "".join(piece.text for piece in pieces) == "\nHm.\n" and [
        piece.call.name for piece in pieces if piece.call
    ]


def test_an_end_cannot_stand_inside_of_a_string(tiny_folder):
    """An added token that is not marked special has text, but it would end the answer there."""
    tokenizer = with_tokens(tiny_folder, False, ("<|turn_end|>", "<|word|>"))
    end, word = (tokenizer.special_tokens[token] for token in ("<|turn_end|>", "<|word|>"))
    words = grammar.vocabulary(tokenizer, tokenizer.vocab_size, [2, end])
    matcher = grammar.compiled(
        grammar.source({"type": "string"}, [], False, False, "none"), words, "x"
    ).matcher
    assert matcher.try_consume_tokens(tokenizer.encode('"a')) == len(tokenizer.encode('"a'))
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    allowed = [bool(bits[id // 8] >> id % 8 & 1) for id in (word, end, 2)]
    assert allowed == [True, False, False]


def with_tokens(folder, special, tokens):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (backend.add_special_tokens if special else backend.add_tokens)(list(tokens))
    return Tokenizer(backend)


CALL = '<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>'
