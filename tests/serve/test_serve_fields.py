"""`nanokv serve`: log-probabilities, repeated prompts, several answers and several prompts in one request,
and the fields of other servers.

Log-probabilities are those of transformers on the same weights, and stand with the text that they belong to. Several
answers are those of as many requests.
"""

import contextlib
import json
import logging
import re
from pathlib import Path

import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from api_schema import schema_errors
from asking import ENDLESS, LONG, asked
from nanokv.apps.serve.api import known, logprobs, protocol, requests
from nanokv.apps.serve.api.errors import ApiError
from serving import CHAT, TEXT, Serving, ask, chunks, error, strict
from tool_calls import HERMES, with_template

pytestmark = pytest.mark.usefixtures("nothing_is_left")

NEAR = 1e-5
PROMPTS = ["Once upon a time", "My name is Zorbla.", "☃ é"]


@pytest.fixture(scope="module")
def theirs(tiny_folder):
    """theirs(ids) → log_softmax of transformers' logits (T,V)."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logs(ids):
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logs


def entry_text(entries) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


# --- of chats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.3, "top_k": 20, "seed": 3}], ids=["greedy", "sampled"]
)
def test_the_log_probabilities_of_a_chat_are_those_of_the_raw_logits(
    server, loaded, theirs, api, sampling
):
    request = ask(max_tokens=9, logprobs=True, top_logprobs=4, ignore_eos=True, **sampling)
    _, whole = server.post(CHAT, request)
    (choice,) = strict(ChatCompletion, whole).choices
    assert schema_errors(api, "CreateChatCompletionResponse", whole) == []
    entries = whole["choices"][0]["logprobs"]["content"]
    assert (
        entry_text(entries).decode("utf-8", "replace") == choice.message.content
        and len(entries) > 5
    )
    prompt = server.post("/tokenize", ask())[1]["tokens"]
    text, rows = list(prompt), None
    for entry in entries:
        rows = theirs(text)[-1]
        values, ids = rows.topk(4)
        token = next(
            id for id in range(len(rows)) if loaded[1].token_bytes(id) == bytes(entry["bytes"])
        )
        assert entry["logprob"] == pytest.approx(rows[token].item(), abs=NEAR)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(
            values.tolist(), abs=NEAR
        )
        assert [bytes(one["bytes"]) for one in entry["top_logprobs"]] == [
            *map(loaded[1].token_bytes, ids.tolist())
        ]
        text.append(token)


def test_a_stream_has_the_same_log_probabilities_with_the_text_they_belong_to(server, api):
    request = ask(max_tokens=9, logprobs=True, top_logprobs=2)
    _, whole = server.post(CHAT, request)
    found = chunks(server.stream(CHAT, request))
    assert all(schema_errors(api, "CreateChatCompletionStreamResponse", one) == [] for one in found)
    assert all(strict(ChatCompletionChunk, one) for one in found)
    with_text = [one["choices"][0] for one in found if one["choices"][0]["delta"].get("content")]
    entries = [entry for choice in with_text for entry in choice["logprobs"]["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]
    with server.client() as client:
        parts = list(client.chat.completions.create(model="tiny", stream=True, **request))
        tokens = [
            one.token
            for part in parts
            if part.choices[0].logprobs
            for one in part.choices[0].logprobs.content
        ]
    assert tokens == [entry["token"] for entry in entries]


def test_without_top_logprobs_the_lists_are_empty_and_without_logprobs_there_are_none(server):
    _, found = server.post(CHAT, ask(max_tokens=2, logprobs=True))
    assert [entry["top_logprobs"] for entry in found["choices"][0]["logprobs"]["content"]] == [
        [],
        [],
    ]
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        assert server.post(CHAT, ask(max_tokens=2, **fields))[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("<think>\nHm.\n</think>\n\nOne🧑 two three", "two t", "One🧑 "),
        ("a🧑é", None, "a🧑é"),
        ("one two", "tw", "one "),
        ("one two", "zzz", "one two"),
        ("My name is", "ame", "My n"),
    ],
)
def test_held_back_tokens_come_with_their_text(server, scripted, text, stop, shown):
    """A token that a stop string cuts is there if some of it is shown; thoughts and stop strings are not."""
    scripted(text)
    request = ask(logprobs=True, stop=stop)
    _, whole = server.post(CHAT, request)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert whole["choices"][0]["message"]["content"] == shown
    assert entry_text(entries).startswith(shown.encode()) and not entry_text(
        entries[:-1]
    ).startswith(shown.encode())
    seen, told = b"", []
    for one in chunks(server.stream(CHAT, request)):
        choice = one["choices"][0]
        if choice["delta"].get("content"):
            told += choice["logprobs"]["content"]
            seen += choice["delta"]["content"].encode()
            assert entry_text(told).startswith(seen), "text came before its tokens"
        else:
            assert choice["logprobs"] is None
    assert told == entries


# --- of completions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 3])
def test_the_log_probabilities_of_a_completion(server, loaded, theirs, api, top):
    request = {
        "prompt": "Once",
        "max_tokens": 8,
        "logprobs": top,
        "temperature": 1.5,
        "seed": 2,
        "ignore_eos": True,
    }
    _, found = server.post(TEXT, request)
    assert strict(Completion, found) and schema_errors(api, "CreateCompletionResponse", found) == []
    text, lists = found["choices"][0]["text"], found["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == pytest.approx(
        expected(theirs, loaded[1], "Once", lists["tokens"]), abs=NEAR
    )
    for token, value, row in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert row[token] == value and top <= len(row) <= top + 1 and max(row.values()) >= value
    assert_offsets(text, lists)
    streamed = [one["choices"][0] for one in chunks(server.stream(TEXT, request))]
    joined = {
        name: [x for one in streamed if one["logprobs"] for x in one["logprobs"][name]]
        for name in lists
    }
    assert joined == lists and "".join(one["text"] for one in streamed) == text


def expected(theirs, tokenizer, prompt, names) -> list[float]:
    """transformers' log-probability of each of these tokens after the prompt."""
    ids = [*tokenizer.encode(prompt), *map(named_id(tokenizer), names)]
    logs, begin = theirs(ids), len(ids) - len(names)
    return [logs[at - 1, ids[at]].item() for at in range(begin, len(ids))]


def named_id(tokenizer):
    name = logprobs.Legacy(tokenizer, 0)._name
    ids = {name(id): id for id in range(tokenizer.vocab_size)}
    return ids.__getitem__


def assert_offsets(text, lists):
    for token, at in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[at : at + len(token)] == token


@pytest.mark.parametrize("chunk", [8_000_000, 320 * 3], ids=["at once", "3 rows a chunk"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_repeated_prompt_has_its_own_log_probabilities(
    server, loaded, theirs, monkeypatch, chunk, tokens
):
    """As lm-eval's local-completions asks for several prompts as token ids, and reads them."""
    monkeypatch.setattr(logprobs, "LOGITS", chunk)
    prompts = [loaded[1].encode(text) for text in PROMPTS]
    request = {
        "prompt": prompts,
        "echo": True,
        "logprobs": 1,
        "max_tokens": tokens,
        "temperature": 0,
        "seed": 1234,
    }
    status, found = server.post(TEXT, request)
    assert status == 200 and [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    for text, ids, choice in zip(PROMPTS, prompts, found["choices"], strict=True):
        lists, logs = choice["logprobs"], theirs(ids)
        assert choice["text"].startswith(text) and (tokens or choice["text"] == text)
        assert len(lists["tokens"]) == len(ids) + tokens and choice["finish_reason"] in (
            "length",
            "stop",
        )
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        values = [logs[at, id].item() for at, id in enumerate(ids[1:])]
        assert lists["token_logprobs"][1 : len(ids)] == pytest.approx(values, abs=NEAR)
        best = [max(row.values()) for row in lists["top_logprobs"][1 : len(ids)]]
        assert best == pytest.approx(logs[:-1].amax(-1).tolist(), abs=NEAR)
        greedy = [
            value == high for value, high in zip(lists["token_logprobs"][1:], best, strict=False)
        ]
        assert greedy == [bool(id == logs[at].argmax()) for at, id in enumerate(ids[1:])]
        assert_offsets(choice["text"], lists)
    assert found["usage"]["completion_tokens"] == tokens * 3
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_repeated_prompt_without_log_probabilities(server):
    _, plain = server.post(TEXT, {"prompt": "Once upon", "max_tokens": 4})
    _, found = server.post(TEXT, {"prompt": "Once upon", "max_tokens": 4, "echo": True})
    assert found["choices"][0]["text"] == "Once upon" + plain["choices"][0]["text"]
    _, nothing = server.post(TEXT, {"prompt": "Once upon", "max_tokens": 0, "echo": True})
    assert (
        nothing["choices"][0]["text"] == "Once upon" and nothing["usage"]["completion_tokens"] == 0
    )
    streamed = chunks(
        server.stream(TEXT, {"prompt": "Once upon", "max_tokens": 4, "echo": True, "logprobs": 2})
    )
    assert "".join(one["choices"][0]["text"] for one in streamed) == found["choices"][0]["text"]
    assert streamed[0]["choices"][0]["text"] == "Once upon"
    offsets = [
        at
        for one in streamed
        if one["choices"][0]["logprobs"]
        for at in one["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets[0] == 0 and offsets == sorted(offsets) and len("Once upon") in offsets


def test_the_token_that_ends_a_completion_is_listed(server, scripted, loaded):
    """lm-eval leaves the last token out: it must be there, also where it has no text."""
    scripted("Hi.")
    _, found = server.post(TEXT, {"prompt": "Once", "logprobs": 0})
    lists = found["choices"][0]["logprobs"]
    assert "".join(lists["tokens"]) == f"Hi.{loaded[1].eos_token}" and lists["text_offset"][-1] == 3
    _, found = server.post(TEXT, {"prompt": "Once", "logprobs": 0, "stop": "i."})
    assert found["choices"][0]["text"] == "H"
    assert "".join(found["choices"][0]["logprobs"]["tokens"]) in ("H", "Hi", "Hi.")


def test_others_go_on_while_a_prompt_is_scored_and_a_client_that_leaves_ends_it(
    loaded, monkeypatch
):
    """The prompt is scored a chunk at a time, between the steps of the engine."""
    monkeypatch.setattr(logprobs, "LOGITS", 1)
    advanced, advance = [], logprobs.Echo.advance
    with Serving(*loaded) as server:
        monkeypatch.setattr(
            logprobs.Echo, "advance", lambda *a: advanced.append(server.steps) or advance(*a)
        )
        ids = loaded[1].encode(LONG * 3)[:500]
        with asked(server, ask(max_tokens=30, ignore_eos=True)):
            server.wait(lambda: server.steps > 1)
            connection = server.send(
                "POST", TEXT, {"prompt": ids, "echo": True, "logprobs": 5, "max_tokens": 0}
            )
            server.wait(lambda: len(advanced) > 5)
            connection.close()
        server.wait(lambda: server.free)
        assert len(advanced) < 500, "it was scored for nobody"
        assert len(set(advanced)) > 3, "the engine waited for the whole prompt"


def test_a_prompt_that_cannot_be_scored_fails_alone(loaded, monkeypatch):
    monkeypatch.setattr(logprobs, "verify_draft", lambda *args: 1 / 0)
    with Serving(*loaded) as server:
        request = {"prompt": "Once", "echo": True, "logprobs": 1, "max_tokens": 1}
        status, found = server.post(TEXT, request)
        assert (status, error(found)["code"]) == (500, "internal_error")
        assert server.post(CHAT, ask(max_tokens=2))[0] == 200
        server.wait(lambda: server.free)


def test_too_many_prompt_tokens_to_score_are_refused(server, monkeypatch):
    monkeypatch.setattr("nanokv.apps.serve.api.prompts.ECHOED", 3)
    request = {"prompt": PROMPTS, "echo": True, "max_tokens": 1}
    status, found = server.post(TEXT, request | {"logprobs": 1})
    assert (status, error(found)["param"]) == (400, "logprobs") and server.post(TEXT, request)[
        0
    ] == 200


# --- several answers, several prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_several_answers_are_those_of_the_seeds_that_follow(server, api, path):
    body = ask() if path == CHAT else {"prompt": "Once upon"}
    body |= {"max_tokens": 6, "temperature": 1.2, "seed": 11}
    _, found = server.post(path, body | {"n": 3})
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2] and found["seed"] == 11
    name = "CreateChatCompletionResponse" if path == CHAT else "CreateCompletionResponse"
    assert schema_errors(api, name, found) == [] and strict(
        ChatCompletion if path == CHAT else Completion, found
    )
    alone = [server.post(path, body | {"seed": 11 + i})[1] for i in range(3)]
    for i, choice in enumerate(found["choices"]):
        assert choice | {"index": 0} == alone[i]["choices"][0]
    assert (
        len(
            {
                json.dumps(choice["message" if path == CHAT else "text"])
                for choice in found["choices"]
            }
        )
        > 1
    )
    assert found["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == sum(
        one["usage"]["completion_tokens"] for one in alone
    )


def test_several_answers_without_a_seed_can_be_repeated(server):
    _, first = server.post(CHAT, ask(max_tokens=5, temperature=1.5, n=2))
    _, again = server.post(CHAT, ask(max_tokens=5, temperature=1.5, n=2, seed=first["seed"]))
    assert first["choices"] == again["choices"]
    _, last = server.post(CHAT, ask(max_tokens=1, temperature=1.5, n=2, seed=2**64 - 1))
    assert last["seed"] == 2**64 - 1 and len(last["choices"]) == 2, (
        "the one after the greatest seed is 0"
    )


def test_a_seed_of_minus_one_is_drawn(server):
    """As in vLLM, llama.cpp and Ollama; other negative ones are the same 64 bits without a sign."""
    request = ask(max_tokens=8, temperature=1.5)
    drawn = [server.post(CHAT, request | {"seed": -1})[1]["seed"] for _ in range(3)]
    assert len(set(drawn)) == 3 and min(drawn) >= 0
    one, other = (server.post(CHAT, request | {"seed": seed})[1] for seed in (-2, 2**64 - 2))
    assert one["seed"] == -2 and one["choices"] == other["choices"]


def test_a_stream_of_several_answers_carries_their_indices(server, api):
    request = ask(
        max_tokens=6, temperature=1.2, seed=5, n=3, stream_options={"include_usage": True}
    )
    _, whole = server.post(CHAT, request)
    *found, last = chunks(server.stream(CHAT, request))
    assert all(schema_errors(api, "CreateChatCompletionStreamResponse", one) == [] for one in found)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(len(one["choices"]) == 1 for one in found)
    order = [one["choices"][0]["index"] for one in found]
    assert set(order) == {0, 1, 2} and order != sorted(order), "they come as they are made"
    for i, choice in enumerate(whole["choices"]):
        mine = [one["choices"][0] for one in found if one["choices"][0]["index"] == i]
        assert (
            mine[0]["delta"] == {"role": "assistant", "content": ""} and mine[-1]["finish_reason"]
        )
        assert [one["finish_reason"] for one in mine[:-1]] == [None] * (len(mine) - 1)
        assert (
            "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
        )
    with server.client() as client:
        with client.chat.completions.stream(
            model="tiny",
            messages=request["messages"],
            max_tokens=6,
            n=3,
            seed=5,
            temperature=1.2,
            logprobs=True,
        ) as stream:
            final = (
                stream.get_final_completion()
                if not [*stream]
                else stream.current_completion_snapshot
            )
    assert [one.message.content for one in final.choices] == [
        one["message"]["content"] for one in whole["choices"]
    ]


def test_several_prompts_are_answered_each_as_if_it_were_alone(server, loaded):
    alone = [server.post(TEXT, {"prompt": text, "max_tokens": 5})[1] for text in PROMPTS]
    for prompts in (PROMPTS, [loaded[1].encode(text) for text in PROMPTS]):
        _, found = server.post(
            TEXT, {"prompt": prompts, "max_tokens": 5, "n": 2, "echo": True, "logprobs": 1}
        )
        assert [choice["index"] for choice in found["choices"]] == [*range(6)]
        for i, choice in enumerate(found["choices"]):
            assert choice["text"] == PROMPTS[i // 2] + alone[i // 2]["choices"][0]["text"]
            assert_offsets(choice["text"], choice["logprobs"])
        for name, times in (("prompt_tokens", 1), ("completion_tokens", 2)):
            assert found["usage"][name] == times * sum(one["usage"][name] for one in alone)


def test_several_answers_compute_their_prompt_once(loaded):
    with Serving(*loaded) as server:
        _, found = server.post(CHAT, ask(LONG, max_tokens=2, n=4))
        prompt, computed = found["usage"]["prompt_tokens"], server.engine.metrics.prefill_tokens
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert prompt <= computed <= prompt + 3 * 4, (
            "the pages of 4 tokens are shared, the rest is not"
        )


def test_all_answers_have_a_place_or_none_has(loaded):
    with Serving(*loaded, running=1, queue=3) as server, contextlib.ExitStack() as stack:
        stack.enter_context(server.held())
        first = stack.enter_context(asked(server, ask(max_tokens=2, n=2)))
        server.wait(lambda: len(server.tickets) == 2)
        status, headers, data = server.raw("POST", CHAT, ask(n=3))
        assert (
            status == 429
            and headers["retry-after"]
            and error(json.loads(data))["code"] == "queue_full"
        )
        server.wait(lambda: len(server.tickets) == 2)
        status, found = server.post(TEXT, {"prompt": ["a", "b"], "n": 3})
        assert (status, error(found)["param"]) == (400, "n") and "6 answers" in found["error"][
            "message"
        ]
        with server.client() as client, pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", n=5, **ask())
        second = stack.enter_context(asked(server, ask(max_tokens=2, n=2)))
        server.wait(lambda: len(server.tickets) == 4)
        server.gate.set()
        server.wait(lambda: first and second)
        assert [len(one[0][1]["choices"]) for one in (first, second)] == [2, 2]
        server.wait(lambda: server.free)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_all_of_its_places(loaded, stream):
    with Serving(*loaded, context=500) as server:
        connection = server.send("POST", CHAT, ask(stream=stream, n=4, **ENDLESS))
        server.wait(lambda: len(server.requests) == 4)
        requests = server.requests
        server.wait(lambda: all(one.tokens for one in requests))
        connection.close()
        server.wait(lambda: server.free)
        assert {one.finish_reason for one in requests} == {"cancelled"}


def test_one_answer_that_fails_ends_the_request(server, monkeypatch):
    from nanokv.decoding import draw as drawing

    draw = drawing.draw

    def fail(logits, values, generator, prompt, tokens):
        return (
            draw(logits, values, generator, prompt, tokens)
            if generator.initial_seed() != 12
            else 1 / 0
        )

    monkeypatch.setattr(drawing, "draw", fail)
    status, found = server.post(CHAT, ask(seed=11, n=3, temperature=1, **ENDLESS))
    assert (status, error(found)["code"]) == (500, "internal_error")
    events = server.stream(CHAT, ask(seed=11, n=3, temperature=1, **ENDLESS))
    assert error(json.loads(events[-1].removeprefix("data: ")))["code"] == "internal_error"


# --- fields of other servers ------------------------------------------------------------------------------------------

NOT_DONE = {CHAT: known.NOT_DONE | known.TEXT_ONLY, TEXT: known.NOT_DONE | known.CHAT_ONLY}
BODIES = {CHAT: ask("Hi"), TEXT: {"prompt": "Hi"}}
CHECKS = {CHAT: protocol.chat, TEXT: protocol.text}


def refusal(path, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        CHECKS[path](BODIES[path] | fields)
    return caught.value


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_is_not_done_is_refused_by_name_unless_it_asks_for_nothing(path):
    plain = CHECKS[path](BODIES[path])
    for name, off in NOT_DONE[path].items():
        for value in off.values:
            assert CHECKS[path](BODIES[path] | {name: value}) == plain, (name, value)
        for value in (0, 1, -7, 0.5, False, True, "x", ["x"], {"x": 1}):
            if not any(value == one and type(value) is type(one) for one in off.values):
                found = refusal(path, **{name: value})
                assert (found.status, found.param, found.code, found.hint) == (
                    400,
                    name,
                    "unsupported",
                    off.hint,
                )
                assert str(found) == f"{name} is {json.dumps(value)}: this server does not do that"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_changes_no_answer_is_taken_silently_and_what_nobody_knows_is_logged(path, caplog):
    caplog.set_level(logging.INFO, "nanokv.apps.serve.api.protocol")
    plain = CHECKS[path](BODIES[path])
    for name in known.HARMLESS:
        assert CHECKS[path](BODIES[path] | {name: {"any": ["thing"]}}) == plain
    assert caplog.messages == []
    assert CHECKS[path](BODIES[path] | {"nobody": 1, "knows\n": 2}) == plain
    assert caplog.messages == ['ignored: "nobody", "knows\\n"']


def test_every_field_of_openai_has_a_place(api):
    schemas = api["components"]["schemas"]

    def names(part):
        inner = schemas[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        return set(inner.get("properties", ())).union(*map(names, inner.get("allOf", ())))

    for name, model in (
        ("CreateChatCompletionRequest", requests.ChatRequest),
        ("CreateCompletionRequest", requests.TextRequest),
    ):
        assert len(names(schemas[name])) > 15 and names(schemas[name]) <= set(model.model_fields)


def test_the_documentation_has_every_field_and_what_becomes_of_it():
    """The rows of docs/serve.md, which a person may read without the code."""
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    rows = dict(re.findall(r"^\| ((?:done|taken|refused)[^|]*) \| (.*) \|$", text, re.MULTILINE))
    chat, completion = requests.ChatRequest.model_fields, requests.TextRequest.model_fields
    own = [name for name in chat if name not in (known.HARMLESS | NOT_DONE[CHAT])]
    text_own = [name for name in completion if name not in (known.HARMLESS | NOT_DONE[TEXT])]
    expected = {
        "done": [name for name in own if name in text_own],
        "done, of a chat": [name for name in own if name not in text_own],
        "done, of a completion": [name for name in text_own if name not in own],
        "taken, without effect on the answer": known.HARMLESS,
    }
    tables = {f"refused: {about}": table for about, table in known.REFUSED.items()}
    tables |= {"refused, of a chat": known.TEXT_ONLY, "refused, of a completion": known.CHAT_ONLY}
    assert rows == {
        about: ", ".join(f"`{name}`" for name in names) for about, names in expected.items()
    } | {
        about: ", ".join(f"`{name}`{bracketed(off.values)}" for name, off in table.items())
        for about, table in tables.items()
    }


def bracketed(values) -> str:
    return f" ({', '.join(f'`{json.dumps(value)}`' for value in values)})" if values else ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"temperature": "hot"},
            'temperature is "hot": 0 (always the likeliest token) or a number from 1e-30',
        ),
        ({"n": 1.0}, "n is 1.0: an integer from 1 to 16 was expected"),
        ({"n": True}, "n is true: an integer"),
        ({"stop": [None, "é\n\u2028"]}, 'stop is [null, "é\\n\\u2028"]: a list of'),
        ({"max_tokens": {"a": [1] * 10**6}}, 'max_tokens is {"a": [1, 1, 1, 1, 1, 1,'),
        ({"stream": "yes"}, 'stream is "yes": true or false was expected'),
        ({"model": 5}, "model is 5: a text was"),
        ({"stream_options": 1}, "stream_options is 1: an object was expected"),
        (
            {"stream_options": {"include_usage": 1}},
            "stream_options.include_usage is 1: true or false was expected",
        ),
        (
            {"stop": [""]},
            'stop is [""]: a list of at most 16 texts of 1 to 1,000 characters was expected',
        ),
        (
            {"stop_token_ids": [1.5]},
            "stop_token_ids is [1.5]: a list of at most 1,000 token ids was expected",
        ),
        (
            {"seed": 2**64},
            f"seed is {2**64}: an integer from -2^63 to 2^64 - 1 (-1: drawn) was expected",
        ),
        ({"max_tokens": -1}, "max_tokens is -1: an integer ≥ 1 was expected"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            'tools[0].function.name is "a b": a name of 1 to',
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        ({"tools": {}}, "tools is {}: a list was"),
        (
            {"tools": [{"type": "function", "function": {"name": "a"}}] * 129},
            "a list of at most 128 was expected",
        ),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema is {}: this server does not do that",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {}}},
            "response_format.json_schema is {}: this server",
        ),
        (
            {"response_format": {"type": "xml"}},
            "an object with the type text, json_object or json_schema was expected",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema is missing",
        ),
        (
            {"tool_choice": "sum"},
            'tool_choice is "sum": none, auto, required, {"type": "function"',
        ),
        (
            {"reasoning_effort": "hot"},
            'reasoning_effort is "hot": none, minimal, low, medium, high, xhigh, max was',
        ),
        ({"messages": 5}, "messages is 5: a list was expected"),
        ({"messages": []}, "a list of at least 1 was expected"),
        *[
            ({"messages": [{"role": "user", "content": "a"}, message]}, f"messages[1]{said}")
            for message, said in [
                (5, " is 5: an object was"),
                ({"content": "a"}, ".role is missing"),
                ({"role": "user"}, ".content is missing"),
                (
                    {"role": "king"},
                    '.role is "king": system, developer, user, assistant or tool was expected',
                ),
                (
                    {"role": "tool", "content": 5},
                    ".content is 5: a text or a list of parts was expected",
                ),
                (
                    {"role": "user", "content": [{"type": "text", "text": 5}]},
                    ".content[0].text is 5: a text was expected",
                ),
                (
                    {"role": "assistant", "tool_calls": [5]},
                    ".tool_calls[0] is 5: an object was expected",
                ),
                (
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": 5}}],
                    },
                    ".tool_calls[0].function.arguments is 5: a text or an object was expected",
                ),
            ]
        ],
    ],
)
def test_a_refusal_says_what_was_expected(fields, said):
    found = refusal(CHAT, **fields)
    assert (
        said in str(found)
        and "pydantic" not in str(found)
        and str(found).startswith(f"{found.param} ")
    )


@pytest.mark.parametrize(
    ("message", "place", "hint"),
    [
        ({"role": "function", "name": "a", "content": "b"}, "", "the role tool"),
        ({"role": "assistant", "function_call": {"name": "a"}}, ".function_call", "tool_calls"),
        ({"role": "assistant", "content": "a", "prefix": True}, ".prefix", "/v1/completions"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]},
            ".tool_calls[0].type",
            "functions",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            ".content[0]",
            "type text",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            ".content[0]",
            "type text",
        ),
    ],
)
def test_what_is_not_done_in_a_message_is_refused_with_what_is(message, place, hint):
    found = refusal(CHAT, messages=[message])
    assert (found.param, found.code) == (
        f"messages[0]{place}",
        "unsupported",
    ) and hint in found.hint


def test_templates_get_of_messages_what_they_know():
    call = {"id": "1", "function": {"name": "time", "arguments": '{"zone": null}'}, "index": 0}
    given = [
        {
            "role": "developer",
            "content": [
                {"type": "text", "text": "a", "cache_control": {}},
                {"type": "text", "text": "b"},
            ],
        },
        {"role": "user", "content": "", "name": None, "prefix": False, "metadata": {}},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "audio": None,
            "partial": False,
        },
        {"role": "tool", "content": [], "tool_call_id": "1"},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}],
            "tool_calls": [],
            "reasoning": "hm",
        },
    ]
    function = {"name": "time", "arguments": {"zone": None}}
    assert protocol.chat({"messages": given}).sources == [
        [
            {"role": "system", "content": "a\nb"},
            {"role": "user", "content": ""},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": function, "id": "1"}],
            },
            {"role": "tool", "content": "", "tool_call_id": "1"},
            {"role": "assistant", "content": "no", "reasoning": "hm"},
        ]
    ]


def test_null_is_the_same_as_absent():
    body = BODIES[CHAT] | dict.fromkeys(set(requests.ChatRequest.model_fields) - {"messages"})
    assert protocol.chat(protocol.parse_object(json.dumps(body).encode())) == protocol.chat(
        BODIES[CHAT]
    )
    assert protocol.chat(body) == protocol.chat(BODIES[CHAT])


@pytest.mark.parametrize(
    ("fields", "penalty"),
    [
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, 1.5),
        ({"repeat_penalty": 1.5, "penalty_last_n": -1}, 1.5),
        ({"repeat_penalty": 1}, 1.0),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, 1.0),
        ({"repeat_last_n": 64}, None),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1, "repetition_penalty": 1.5}, 1.5),
    ],
)
def test_llama_cpps_penalty_is_ours_where_it_looks_at_all_tokens(fields, penalty):
    assert protocol.chat(BODIES[CHAT] | fields).sampling.get("repetition_penalty") == penalty


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"repeat_penalty": 1.5}, "unsupported"),
        ({"repeat_penalty": 1.5, "repeat_last_n": 64}, "unsupported"),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1, "repetition_penalty": 1.2}, None),
        ({"repeat_penalty": 0}, None),
    ],
)
def test_a_penalty_of_the_last_tokens_is_refused(fields, code):
    found = refusal(CHAT, **fields)
    assert (found.param, found.code) == ("repeat_penalty", code)
    assert "repetition_penalty" in found.hint + str(found) or fields["repeat_penalty"] == 0


@pytest.mark.parametrize("name", ["n_predict", "num_predict", "max_new_tokens"])
def test_the_number_of_tokens_has_the_names_of_other_servers(server, name):
    _, found = server.post(TEXT, {"prompt": "Once upon", name: 3, "ignore_eos": True})
    assert found["usage"]["completion_tokens"] == 3
    assert protocol.chat(ask(max_tokens=3) | {name: 3}).max_new_tokens == 3
    found = refusal(CHAT, max_tokens=5, **{name: 3})
    assert (
        found.param == name and str(found) == f"{name} is 3 and max_tokens is 5: they mean the same"
    )
    assert refusal(CHAT, **{name: -2}).param == name


def test_a_completion_without_a_limit_reaches_the_end_of_the_context(server, loaded):
    ids = loaded[1].encode("Once upon a time " * 200)[:480]
    _, found = server.post(TEXT, {"prompt": ids, "n_predict": -1, "ignore_eos": True})
    assert (
        found["usage"]["completion_tokens"] == 512 - 480 + 1
        and found["choices"][0]["stop_reason"] == "context"
    )


def test_what_includes_the_stop_string_needs_one():
    assert refusal(CHAT, include_stop_str_in_output=True).param == "include_stop_str_in_output"
    assert protocol.chat(BODIES[CHAT] | {"include_stop_str_in_output": False}) == protocol.chat(
        BODIES[CHAT]
    )
    for end in ({"stop": "x"}, {"stop_token_ids": [5]}):
        assert protocol.chat(BODIES[CHAT] | {"include_stop_str_in_output": True} | end).include_stop
    assert protocol.chat(BODIES[CHAT] | {"stop_token_ids": [5, 6]}).stop_token_ids == (5, 6)


THINKER = HERMES + "{% if not enable_thinking | default(true) %}<think>\n\n</think>\n\n{% endif %}"
EFFORT = "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}\n{% endif %}" + HERMES
OFF = [
    {"enable_thinking": False},
    {"think": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
]
ON = [
    {"enable_thinking": True},
    {"think": True},
    {"thinking": {"type": "enabled"}},
    {"reasoning": {"enabled": True}},
]
LEVELS = [{"reasoning_effort": "high"}, {"think": "high"}, {"reasoning": {"effort": "high"}}]


def prompts_of(tokenizer, template, model, asked) -> list:
    """The prompt of each request, or the field that refuses it."""
    with Serving(model, with_template(tokenizer, template)) as server:
        answers = [server.post("/tokenize", ask() | fields) for fields in asked]
    return [
        found["tokens"] if status == 200 else (error(found)["param"], found["error"]["code"])
        for status, found in answers
    ]


def refused(asked) -> list:
    names = [next(iter(one)) for one in asked]
    inner = [
        next(iter(one[name])) if name == "reasoning" else ""
        for name, one in zip(names, asked, strict=True)
    ]
    return [
        (f"{name}.{part}" if part else name, "unsupported")
        for name, part in zip(names, inner, strict=True)
    ]


def test_thinking_has_the_names_of_all_servers_where_the_template_knows_it(loaded):
    kwargs = [{"chat_template_kwargs": {"enable_thinking": on}} for on in (False, True)]
    off, on, *found = prompts_of(loaded[1], THINKER, loaded[0], [*kwargs, *OFF, *ON, *LEVELS])
    assert off != on and found == [off] * len(OFF) + [on] * len(ON) + refused(LEVELS)


def test_an_effort_goes_to_a_template_that_reads_it(loaded):
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    high, *found = prompts_of(loaded[1], EFFORT, loaded[0], [kwargs, *LEVELS, *OFF, *ON])
    assert found == [high] * len(LEVELS) + refused(OFF) + refused(ON)


def test_a_template_that_knows_nothing_of_thinking_is_told(loaded):
    assert prompts_of(loaded[1], HERMES, loaded[0], [*OFF, *ON, *LEVELS]) == refused(
        [*OFF, *ON, *LEVELS]
    )


def test_wishes_that_contradict_each_other_are_refused():
    assert refusal(CHAT, enable_thinking=False, reasoning_effort="high").param == "reasoning_effort"
    assert refusal(TEXT, enable_thinking=False).param == "enable_thinking"


@pytest.mark.parametrize("name", ["{{ messages }}", "{% if a %}{% endif %}", "", 5])
def test_a_template_is_chosen_by_its_name_alone(name):
    assert refusal(CHAT, chat_template=name).param == "chat_template"
    assert protocol.chat(BODIES[CHAT] | {"chat_template": "tool_use"}).chat_template == "tool_use"
