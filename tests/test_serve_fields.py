"""`nanokv serve`: log-probabilities, repeated prompts, several answers and several prompts in one request.

Log-probabilities are those of transformers on the same weights, and stand with the text that they belong to. Several
answers are those of as many requests.
"""

import contextlib
import json

import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from api_schema import schema_errors
from nanokv.serve import logprobs
from serving import CHAT, TEXT, Serving, ask, chunks, error, strict
from test_serve_guard import ENDLESS, LONG, asked

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


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_k": 20, "seed": 3}], ids=["greedy", "sampled"])
def test_the_log_probabilities_of_a_chat_are_those_of_the_raw_logits(server, loaded, theirs, api, sampling):
    request = ask(max_tokens=9, logprobs=True, top_logprobs=4, ignore_eos=True, **sampling)
    _, whole = server.post(CHAT, request)
    (choice,) = strict(ChatCompletion, whole).choices
    assert schema_errors(api, "CreateChatCompletionResponse", whole) == []
    entries = whole["choices"][0]["logprobs"]["content"]
    assert entry_text(entries).decode("utf-8", "replace") == choice.message.content and len(entries) > 5
    prompt = server.post("/tokenize", ask())[1]["tokens"]
    text, rows = list(prompt), None
    for entry in entries:
        rows = theirs(text)[-1]
        values, ids = rows.topk(4)
        token = next(id for id in range(len(rows)) if loaded[1].token_bytes(id) == bytes(entry["bytes"]))
        assert entry["logprob"] == pytest.approx(rows[token].item(), abs=NEAR)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(values.tolist(), abs=NEAR)
        assert [bytes(one["bytes"]) for one in entry["top_logprobs"]] == [*map(loaded[1].token_bytes, ids.tolist())]
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
        tokens = [one.token for part in parts if part.choices[0].logprobs for one in part.choices[0].logprobs.content]
    assert tokens == [entry["token"] for entry in entries]


def test_without_top_logprobs_the_lists_are_empty_and_without_logprobs_there_are_none(server):
    _, found = server.post(CHAT, ask(max_tokens=2, logprobs=True))
    assert [entry["top_logprobs"] for entry in found["choices"][0]["logprobs"]["content"]] == [[], []]
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        assert server.post(CHAT, ask(max_tokens=2, **fields))[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(("text", "stop", "shown"), [
    ("<think>\nHm.\n</think>\n\nOne🧑 two three", "two t", "One🧑 "), ("a🧑é", None, "a🧑é"), ("one two", "tw", "one "),
    ("one two", "zzz", "one two"), ("My name is", "ame", "My n"),
])  # fmt: skip
def test_held_back_tokens_come_with_their_text(server, scripted, text, stop, shown):
    """A token that a stop string cuts is there if some of it is shown; thoughts and stop strings are not."""
    scripted(text)
    request = ask(logprobs=True, stop=stop)
    _, whole = server.post(CHAT, request)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert whole["choices"][0]["message"]["content"] == shown
    assert entry_text(entries).startswith(shown.encode()) and not entry_text(entries[:-1]).startswith(shown.encode())
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
    request = {"prompt": "Once", "max_tokens": 8, "logprobs": top, "temperature": 1.5, "seed": 2, "ignore_eos": True}
    _, found = server.post(TEXT, request)
    assert strict(Completion, found) and schema_errors(api, "CreateCompletionResponse", found) == []
    text, lists = found["choices"][0]["text"], found["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == pytest.approx(expected(theirs, loaded[1], "Once", lists["tokens"]), abs=NEAR)
    for token, value, row in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert row[token] == value and top <= len(row) <= top + 1 and max(row.values()) >= value
    assert_offsets(text, lists)
    streamed = [one["choices"][0] for one in chunks(server.stream(TEXT, request))]
    joined = {name: [x for one in streamed if one["logprobs"] for x in one["logprobs"][name]] for name in lists}
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
def test_a_repeated_prompt_has_its_own_log_probabilities(server, loaded, theirs, monkeypatch, chunk, tokens):
    """As lm-eval's local-completions asks for several prompts as token ids, and reads them."""
    monkeypatch.setattr(logprobs, "LOGITS", chunk)
    prompts = [loaded[1].encode(text) for text in PROMPTS]
    request = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": tokens, "temperature": 0, "seed": 1234}
    status, found = server.post(TEXT, request)
    assert status == 200 and [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    for text, ids, choice in zip(PROMPTS, prompts, found["choices"], strict=True):
        lists, logs = choice["logprobs"], theirs(ids)
        assert choice["text"].startswith(text) and (tokens or choice["text"] == text)
        assert len(lists["tokens"]) == len(ids) + tokens and choice["finish_reason"] in ("length", "stop")
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        values = [logs[at, id].item() for at, id in enumerate(ids[1:])]
        assert lists["token_logprobs"][1 : len(ids)] == pytest.approx(values, abs=NEAR)
        best = [max(row.values()) for row in lists["top_logprobs"][1 : len(ids)]]
        assert best == pytest.approx(logs[:-1].amax(-1).tolist(), abs=NEAR)
        greedy = [value == high for value, high in zip(lists["token_logprobs"][1:], best, strict=False)]
        assert greedy == [bool(id == logs[at].argmax()) for at, id in enumerate(ids[1:])]
        assert_offsets(choice["text"], lists)
    assert found["usage"]["completion_tokens"] == tokens * 3
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_repeated_prompt_without_log_probabilities(server):
    _, plain = server.post(TEXT, {"prompt": "Once upon", "max_tokens": 4})
    _, found = server.post(TEXT, {"prompt": "Once upon", "max_tokens": 4, "echo": True})
    assert found["choices"][0]["text"] == "Once upon" + plain["choices"][0]["text"]
    _, nothing = server.post(TEXT, {"prompt": "Once upon", "max_tokens": 0, "echo": True})
    assert nothing["choices"][0]["text"] == "Once upon" and nothing["usage"]["completion_tokens"] == 0
    streamed = chunks(server.stream(TEXT, {"prompt": "Once upon", "max_tokens": 4, "echo": True, "logprobs": 2}))
    assert "".join(one["choices"][0]["text"] for one in streamed) == found["choices"][0]["text"]
    assert streamed[0]["choices"][0]["text"] == "Once upon"
    offsets = [at for one in streamed if one["choices"][0]["logprobs"]
               for at in one["choices"][0]["logprobs"]["text_offset"]]  # fmt: skip
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


def test_others_go_on_while_a_prompt_is_scored_and_a_client_that_leaves_ends_it(loaded, monkeypatch):
    """The prompt is scored a chunk at a time, between the steps of the engine."""
    monkeypatch.setattr(logprobs, "LOGITS", 1)
    advanced, advance = [], logprobs.Echo.advance
    with Serving(*loaded) as server:
        monkeypatch.setattr(logprobs.Echo, "advance", lambda *a: advanced.append(server.steps) or advance(*a))
        ids = loaded[1].encode(LONG * 3)[:500]
        with asked(server, ask(max_tokens=30, ignore_eos=True)):
            server.wait(lambda: server.steps > 1)
            connection = server.send("POST", TEXT, {"prompt": ids, "echo": True, "logprobs": 5, "max_tokens": 0})
            server.wait(lambda: len(advanced) > 5)
            connection.close()
        server.wait(lambda: server.free and not server.worker._echoing)
        assert len(advanced) < 500, "it was scored for nobody"
        assert len(set(advanced)) > 3, "the engine waited for the whole prompt"


def test_a_prompt_that_cannot_be_scored_fails_alone(loaded, monkeypatch):
    monkeypatch.setattr(logprobs, "verify_draft", lambda *args: 1 / 0)
    with Serving(*loaded) as server:
        request = {"prompt": "Once", "echo": True, "logprobs": 1, "max_tokens": 1}
        status, found = server.post(TEXT, request)
        assert (status, error(found)["code"]) == (500, "internal_error")
        assert server.post(CHAT, ask(max_tokens=2))[0] == 200
        server.wait(lambda: server.free and not server.worker._echoing)


def test_too_many_prompt_tokens_to_score_are_refused(server, monkeypatch):
    monkeypatch.setattr("nanokv.serve.prompts.ECHOED", 3)
    request = {"prompt": PROMPTS, "echo": True, "max_tokens": 1}
    status, found = server.post(TEXT, request | {"logprobs": 1})
    assert (status, error(found)["param"]) == (400, "logprobs") and server.post(TEXT, request)[0] == 200


# --- several answers, several prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_several_answers_are_those_of_the_seeds_that_follow(server, api, path):
    body = ask() if path == CHAT else {"prompt": "Once upon"}
    body |= {"max_tokens": 6, "temperature": 1.2, "seed": 11}
    _, found = server.post(path, body | {"n": 3})
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2] and found["seed"] == 11
    name = "CreateChatCompletionResponse" if path == CHAT else "CreateCompletionResponse"
    assert schema_errors(api, name, found) == [] and strict(ChatCompletion if path == CHAT else Completion, found)
    alone = [server.post(path, body | {"seed": 11 + i})[1] for i in range(3)]
    for i, choice in enumerate(found["choices"]):
        assert choice | {"index": 0} == alone[i]["choices"][0]
    assert len({json.dumps(choice["message" if path == CHAT else "text"]) for choice in found["choices"]}) > 1
    assert found["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)


def test_several_answers_without_a_seed_can_be_repeated(server):
    _, first = server.post(CHAT, ask(max_tokens=5, temperature=1.5, n=2))
    _, again = server.post(CHAT, ask(max_tokens=5, temperature=1.5, n=2, seed=first["seed"]))
    assert first["choices"] == again["choices"]
    _, last = server.post(CHAT, ask(max_tokens=1, temperature=1.5, n=2, seed=2**64 - 1))
    assert last["seed"] == 2**64 - 1 and len(last["choices"]) == 2, "the one after the greatest seed is 0"


def test_a_seed_of_minus_one_is_drawn(server):
    """As in vLLM, llama.cpp and Ollama; other negative ones are the same 64 bits without a sign."""
    request = ask(max_tokens=8, temperature=1.5)
    drawn = [server.post(CHAT, request | {"seed": -1})[1]["seed"] for _ in range(3)]
    assert len(set(drawn)) == 3 and min(drawn) >= 0
    one, other = (server.post(CHAT, request | {"seed": seed})[1] for seed in (-2, 2**64 - 2))
    assert one["seed"] == -2 and one["choices"] == other["choices"]


def test_a_stream_of_several_answers_carries_their_indices(server, api):
    request = ask(max_tokens=6, temperature=1.2, seed=5, n=3, stream_options={"include_usage": True})
    _, whole = server.post(CHAT, request)
    *found, last = chunks(server.stream(CHAT, request))
    assert all(schema_errors(api, "CreateChatCompletionStreamResponse", one) == [] for one in found)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(len(one["choices"]) == 1 for one in found)
    order = [one["choices"][0]["index"] for one in found]
    assert set(order) == {0, 1, 2} and order != sorted(order), "they come as they are made"
    for i, choice in enumerate(whole["choices"]):
        mine = [one["choices"][0] for one in found if one["choices"][0]["index"] == i]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""} and mine[-1]["finish_reason"]
        assert [one["finish_reason"] for one in mine[:-1]] == [None] * (len(mine) - 1)
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
    with server.client() as client:
        with client.chat.completions.stream(model="tiny", messages=request["messages"], max_tokens=6, n=3, seed=5,
                                            temperature=1.2, logprobs=True) as stream:  # fmt: skip
            final = stream.get_final_completion() if not [*stream] else stream.current_completion_snapshot
    assert [one.message.content for one in final.choices] == [one["message"]["content"] for one in whole["choices"]]


def test_several_prompts_are_answered_each_as_if_it_were_alone(server, loaded):
    alone = [server.post(TEXT, {"prompt": text, "max_tokens": 5})[1] for text in PROMPTS]
    for prompts in (PROMPTS, [loaded[1].encode(text) for text in PROMPTS]):
        _, found = server.post(TEXT, {"prompt": prompts, "max_tokens": 5, "n": 2, "echo": True, "logprobs": 1})
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
        assert prompt <= computed <= prompt + 3 * 4, "the pages of 4 tokens are shared, the rest is not"


def test_all_answers_have_a_place_or_none_has(loaded):
    with Serving(*loaded, running=1, queue=3) as server, contextlib.ExitStack() as stack:
        stack.enter_context(server.held())
        first = stack.enter_context(asked(server, ask(max_tokens=2, n=2)))
        server.wait(lambda: len(server.worker.tickets) == 2)
        status, headers, data = server.raw("POST", CHAT, ask(n=3))
        assert status == 429 and headers["retry-after"] and error(json.loads(data))["code"] == "queue_full"
        server.wait(lambda: len(server.worker.tickets) == 2)
        status, found = server.post(TEXT, {"prompt": ["a", "b"], "n": 3})
        assert (status, error(found)["param"]) == (400, "n") and "6 answers" in found["error"]["message"]
        with server.client() as client, pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", n=5, **ask())
        second = stack.enter_context(asked(server, ask(max_tokens=2, n=2)))
        server.wait(lambda: len(server.worker.tickets) == 4)
        server.gate.set()
        server.wait(lambda: first and second)
        assert [len(one[0][1]["choices"]) for one in (first, second)] == [2, 2]
        server.wait(lambda: server.free)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_all_of_its_places(loaded, stream):
    with Serving(*loaded, context=500) as server:
        connection = server.send("POST", CHAT, ask(stream=stream, n=4, **ENDLESS))
        server.wait(lambda: len(server.worker.tickets) == 4 and all(one.request for one in server.worker.tickets))
        tickets = list(server.worker.tickets)
        server.wait(lambda: all(one.request.tokens for one in tickets))
        connection.close()
        server.wait(lambda: server.free)
        assert {one.request.finish_reason for one in tickets} == {"cancelled"}


def test_one_answer_that_fails_ends_the_request(server, monkeypatch):
    from nanokv.engine import request

    draw = request.draw

    def fail(logits, values, generator, prompt, tokens):
        return draw(logits, values, generator, prompt, tokens) if generator.initial_seed() != 12 else 1 / 0

    monkeypatch.setattr(request, "draw", fail)
    status, found = server.post(CHAT, ask(seed=11, n=3, temperature=1, **ENDLESS))
    assert (status, error(found)["code"]) == (500, "internal_error")
    events = server.stream(CHAT, ask(seed=11, n=3, temperature=1, **ENDLESS))
    assert error(json.loads(events[-1].removeprefix("data: ")))["code"] == "internal_error"
