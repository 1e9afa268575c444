"""`nanokv serve`: OpenAI's protocol over real sockets, answers equal to `nanokv generate`, alone and among others.

The official client and its types judge the form. Who may ask, and what happens to a client that leaves, is in
test_serve_guard.py.
"""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import openai
import pytest
import torch
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import nanokv
from api_schema import schema_errors
from cli_helpers import choice
from nanokv.apps.serve.api import prompts
from nanokv.apps.serve.api.answer import AnswerText
from nanokv.apps.serve.api.calls import NoCalls, ToolCalls
from nanokv.apps.serve.http.response import Limits
from nanokv.decoding.draw import Step
from nanokv.text.thinking import ThinkSplitter
from serving import CHAT, TEXT, Serving, ask, chunks, error, strict

pytestmark = pytest.mark.usefixtures("nothing_is_left")

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = [
    "Who are you?",
    "My name is Zorbla.",
    "What is my name?",
    "Once upon a time",
    "The cache holds one key",
]
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 7}


# --- equal to nanokv generate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_an_answer_is_the_one_of_nanokv_generate(cli, server, tiny_folder, sampling):
    flags = [
        part for name, value in sampling.items() for part in (f"--{name.replace('_', '-')}", value)
    ]
    _, out, _ = cli(
        "generate", QUESTIONS[0], "-m", tiny_folder, "-n", 12, "--json", "--plain", *flags
    )
    theirs = json.loads(out)
    status, ours = server.post(CHAT, ask(QUESTIONS[0], max_tokens=12, **sampling))
    assert status == 200 and ours["choices"][0]["message"] == choice(theirs)["message"]
    assert ours["choices"][0]["finish_reason"] == choice(theirs)["finish_reason"]
    counted = dict(ours["usage"])
    assert counted.pop("completion_tokens_details") == {"reasoning_tokens": 0}
    assert counted | {"prompt_tokens_details": None} == theirs["usage"] | {
        "prompt_tokens_details": None
    }
    _, out, _ = cli(
        "generate", QUESTIONS[0], "-m", tiny_folder, "-n", 12, "--json", "--plain", "--raw", *flags
    )
    _, ours = server.post(TEXT, {"prompt": QUESTIONS[0], "max_tokens": 12} | sampling)
    assert ours["choices"][0]["text"] == choice(json.loads(out))["text"]


def test_answers_among_64_concurrent_requests_are_those_of_each_alone(loaded, server):
    """Greedy and seeded, streamed and not, in fp32; more than run at a time."""
    model, tokenizer = loaded
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)

    def fields(i):
        return {"temperature": 0.9, "seed": i} if i % 2 else {}

    def alone(i):
        messages = [{"role": "user", "content": f"{i} {QUESTIONS[i % 5]}"}]
        ids = tokenizer.encode(tokenizer.render(messages))
        tokens = list(nanokv.generate(model, ids, max_new_tokens=6, **fields(i)))
        return tokenizer.decode(
            tokens[:-1] if tokens[-1] in (0, 2) else tokens, skip_special_tokens=True
        )

    async def asked(i):
        request = ask(f"{i} {QUESTIONS[i % 5]}", model="tiny", max_tokens=6, **fields(i))
        if i % 3:
            return (await client.chat.completions.create(**request)).choices[0].message.content
        stream = await client.chat.completions.create(**request, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with client:
            return await asyncio.gather(*map(asked, range(64)))

    assert asyncio.run(all_of_them()) == [alone(i) for i in range(64)]


@pytest.mark.slow
def test_in_bf16_an_answer_among_64_leaves_the_one_alone_only_at_a_tie(tiny_folder):
    """Products of other sizes round otherwise, and a token can change where the best logits are closer than rounding.

    Rounding is measured: the largest distance from the logits of the same weights in fp32. Each of two computations may
    be off by that much. Seen: 5 to 7 of 64 answers leave, by at most 0.03 where 0.06 to 0.15 is allowed.
    """
    model, tokenizer = nanokv.load(tiny_folder, dtype=torch.bfloat16)
    exact = nanokv.load(tiny_folder, dtype=torch.bfloat16)[0].float()
    requests = asked_at_once(model, tokenizer)
    left, decided = [], []
    for request in requests:
        alone, among = (
            list(nanokv.generate(model, request.prompt, max_new_tokens=12)),
            list(request.tokens),
        )
        true = nanokv.score(exact, [request.prompt + alone])[0, len(request.prompt) - 1 :]
        rounding = (
            (nanokv.score(model, [request.prompt + alone])[0, len(request.prompt) - 1 :] - true)
            .abs()
            .amax(-1)
        )
        best = true.topk(2).values
        decided += (best[:, 0] - best[:, 1] > 2 * rounding).tolist()
        if alone != among:
            at = next(
                i for i, (one, other) in enumerate(zip(alone, among, strict=False)) if one != other
            )
            left.append(at)
            assert best[at, 0] - true[at, [alone[at], among[at]]].min() <= 2 * rounding[at]
    assert len(requests) == 64 and len(left) <= 16 and sum(decided) > len(decided) / 2, (
        left,
        sum(decided),
    )


def asked_at_once(model, tokenizer) -> list:
    """The engine's requests of 64 answers of 12 tokens that came over HTTP together."""
    with Serving(model, tokenizer, pages=400, running=16) as server:
        requests, submit = [], server.engine.submit
        server.engine.submit = lambda *args, **fields: (
            requests.append(submit(*args, **fields)) or requests[-1]
        )
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)

        async def all_of_them():
            async with client:
                asked = [
                    ask(f"{i} {QUESTIONS[i % 5]}", model="tiny", max_tokens=12) for i in range(64)
                ]
                await asyncio.gather(*(client.chat.completions.create(**one) for one in asked))

        asyncio.run(all_of_them())
    return requests


def test_the_seed_that_was_drawn_repeats_the_answer(server):
    _, first = server.post(CHAT, ask(max_tokens=8, temperature=1.5))
    _, again = server.post(CHAT, ask(max_tokens=8, temperature=1.5, seed=first["seed"]))
    assert first["choices"] == again["choices"] and first["seed"] == again["seed"]
    assert server.post(CHAT, ask(max_tokens=1, temperature=1.5, seed=-2))[1]["seed"] == -2


# --- the form ---------------------------------------------------------------------------------------------------------


def test_the_official_client_gets_an_answer_and_a_stream(server):
    with server.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
        assert client.models.retrieve("alias").owned_by == "nanokv"
        request = ask(model="tiny", max_tokens=9, extra_body={"top_k": 5})
        whole = client.chat.completions.create(**request)
        streamed = list(client.chat.completions.create(**request, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert (
            text == whole.choices[0].message.content
            and streamed[-1].choices[0].finish_reason == "length"
        )
        raw = client.completions.create(model="tiny", prompt="Once", max_tokens=9)
        parts = client.completions.create(model="tiny", prompt="Once", max_tokens=9, stream=True)
        assert "".join(part.choices[0].text for part in parts) == raw.choices[0].text


@pytest.mark.slow
@pytest.mark.parametrize(("language", "begin"), [("python", "from openai"), ("", "curl ")])
def test_the_calls_of_the_docs_run_as_they_stand(server, capfd, language, begin):
    text = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8").partition("\n## Clients")[0]
    blocks = re.findall(rf"^```{language}\n({begin}.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (code,) = (block.replace("http://127.0.0.1:8000", server.url) for block in blocks)
    said = server.post(CHAT, ask())[1]["choices"][0]["message"]
    if language:
        exec(code, {})
        assert capfd.readouterr().out == said["content"]
    else:
        if not shutil.which("curl"):
            pytest.skip("needs curl")
        subprocess.run(["bash", "-c", code.replace("curl ", "curl -sS --fail ")], check=True)
        assert json.loads(capfd.readouterr().out)["choices"][0]["message"] == said


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "CreateChatCompletionResponse"),
        (TEXT, "CreateCompletionResponse"),
    ],
)
def test_every_answer_is_what_openai_describes(server, api, path, name):
    body = ask(max_tokens=5) if path == CHAT else {"prompt": "Once", "max_tokens": 5}
    status, found = server.post(path, body)
    assert status == 200 and schema_errors(api, name, found) == []
    del found["choices"][0]["logprobs"]
    assert schema_errors(api, name, found) != [], "the check can fail"


def test_every_error_is_what_openai_describes(server, api):
    for path, body in (
        (CHAT, ask(n=0)),
        (CHAT, {}),
        (CHAT, b"{"),
        ("/nothing", {}),
        (CHAT, ask(model="x")),
    ):
        assert schema_errors(api, "ErrorResponse", server.post(path, body)[1]) == []
    assert schema_errors(api, "ErrorResponse", {"error": "a text"}) != [], "the check can fail"


def test_every_answer_and_chunk_is_of_the_clients_types(server):
    """Where OpenAI's description is not at hand, too."""
    strict(ChatCompletion, server.post(CHAT, ask(max_tokens=2))[1])
    strict(Completion, server.post(TEXT, {"prompt": "Once", "max_tokens": 2})[1])
    for options in (
        {},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ):
        assert [
            strict(ChatCompletionChunk, one)
            for one in chunks(server.stream(CHAT, ask(max_tokens=5) | options))
        ]
    *texts, last = chunks(server.stream(TEXT, {"prompt": "Once", "max_tokens": 3}))
    for chunk in texts:  # OpenAI sends null here, and its description and types leave that out
        assert chunk["choices"][0].pop("finish_reason") is None
        chunk["choices"][0]["finish_reason"] = "stop"
    assert texts and all(
        strict(Completion, one).object == "text_completion" for one in [*texts, last]
    )
    assert strict(Model, server.get("/v1/models/tiny")[1]).id == "tiny"


def test_every_chunk_is_what_openai_describes(server, api):
    for options in ({}, {"stream_options": {"include_usage": True}}):
        for chunk in chunks(server.stream(CHAT, ask(max_tokens=5) | options)):
            assert schema_errors(api, "CreateChatCompletionStreamResponse", chunk) == []


def test_the_chunks_of_a_stream_in_their_order(server):
    first, *middle, last = found = chunks(server.stream(CHAT, ask(max_tokens=5)))
    assert len({(one["id"], one["created"], one["object"], one["model"]) for one in found}) == 1
    assert found[0]["object"] == "chat.completion.chunk" and found[0]["model"] == "tiny"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [list(one["choices"][0]["delta"]) for one in middle] == [["content"]] * len(
        middle
    ) and middle
    assert all(one["choices"][0]["finish_reason"] is None for one in found[:-1])
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"


def test_the_usage_chunk_comes_when_asked_for_and_has_no_choices(server):
    plain = chunks(server.stream(CHAT, ask(max_tokens=3)))
    assert all(one["choices"] and "usage" not in one for one in plain)
    *others, last = chunks(
        server.stream(CHAT, ask(max_tokens=3, stream_options={"include_usage": True}))
    )
    assert all(len(one["choices"]) == 1 and one["usage"] is None for one in others)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3


def test_the_reason_is_right_when_streaming_and_when_not(server, scripted):
    scripted("Hi.")
    for tokens, reason in ((1, "length"), (50, "stop")):
        _, whole = server.post(CHAT, ask(max_completion_tokens=tokens))
        streamed = chunks(server.stream(CHAT, ask(max_tokens=tokens)))
        assert (
            whole["choices"][0]["finish_reason"]
            == streamed[-1]["choices"][0]["finish_reason"]
            == reason
        )


def test_whole_characters_only_and_none_is_lost(server, scripted):
    """🧑 is four byte tokens here; half of one at the end is shown as U+FFFD."""
    scripted("a🧑é")
    deltas = [
        one["choices"][0]["delta"].get("content", "") for one in chunks(server.stream(CHAT, ask()))
    ]
    assert [text for text in deltas if text] == ["a", "🧑", "é"]
    _, cut = server.post(CHAT, ask(max_tokens=3))
    assert cut["choices"][0]["message"]["content"] == "a�"


def test_a_stop_string_cut_across_chunks_never_shows(server, scripted):
    scripted("one two three")
    for stop in ("two", ["zz", "wo t"]):
        cut = "one " if stop == "two" else "one t"
        _, whole = server.post(CHAT, ask(stop=stop))
        assert (
            whole["choices"][0]["message"]["content"] == cut
            and whole["choices"][0]["finish_reason"] == "stop"
        )
        streamed = chunks(server.stream(CHAT, ask(stop=stop)))
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in streamed) == cut
        assert (
            streamed[-1]["choices"][0]["stop_reason"]
            == whole["choices"][0]["stop_reason"]
            in ("two", "wo t")
        )


def test_thoughts_stand_apart_and_stop_strings_do_not_touch_them(server, scripted):
    scripted("<think>\nHm. Stop here?\n</think>\n\nYes. Stop here.")
    _, whole = server.post(CHAT, ask(stop=" Stop"))
    said = whole["choices"][0]["message"]
    assert (said["reasoning_content"], said["content"]) == ("\nHm. Stop here?\n", "Yes.")
    streamed = chunks(server.stream(CHAT, ask(stop=" Stop")))
    for field in ("reasoning_content", "content"):
        assert "".join(one["choices"][0]["delta"].get(field, "") for one in streamed) == said[field]


def test_a_stop_string_is_found_in_the_answer_however_it_is_cut(loaded):
    """Every way to cut a text into two pieces between thought and answer."""
    text = "<think>ab</think>cdabef"
    for at in range(1, len(text)):
        answer = AnswerText(loaded[1], ["ab"], ThinkSplitter(), NoCalls())
        answer.decoder.put, answer.decoder.flush = lambda part: part, lambda: ""
        found = answer.put(Step(text[:at], 0.0), False) + answer.put(Step(text[at:], 0.0), True)
        texts = [
            "".join(piece.text for piece in found if piece.kind == kind)
            for kind in ("think", "answer")
        ]
        assert texts == ["ab", "cd"]


CONTROL = [  # text, fields, content, stop_reason; <|im_start|> is a control token, and no end
    ("One.<|im_start|>two", {"stop": "<|im_start|>"}, "One.", "<|im_start|>"),
    ("One.\n<|im_start|>two", {"stop": ["x", "\n<|im_start|>t"]}, "One.", "\n<|im_start|>t"),
    ("One.<|im_start|>two", {"stop": ["<|im_start|>x"]}, "One.two", None),
    (
        "One. <|im_start|>two",
        {"stop": ". <|im_start|>", "include_stop_str_in_output": True},
        "One. <|im_start|>",
        ". <|im_start|>",
    ),
    (
        "One.<|im_start|>two three",
        {"stop": "three", "include_stop_str_in_output": True},
        "One.two three",
        "three",
    ),
    # A thought that was never closed.
    ("<think>\nHm.<|im_start|>", {"stop": "<|im_start|>"}, "", "<|im_start|>"),
    ("<think>\nHm. a<|im_start|>\n</think>\n\nYes", {"stop": "a<|im_start|>"}, "Yes", None),
    ("<think>\nHm.\n</think>\n\n<|im_start|>", {"stop": "<|im_start|>"}, "", "<|im_start|>"),
    ("<|im_start|>One", {"stop": "<|im_start|>"}, "", "<|im_start|>"),
    # No stop string jumps over it.
    ("One.<|im_start|>user", {"stop": [".user", "x"]}, "One.user", None),
    ("One<|im_end|>two", {"stop": "<|im_end|>"}, "One", "<|im_end|>"),  # the model's own end, named
    ("One<|im_end|>two", {}, "One", None),
    ("One<|im_end|>two", {"stop_token_ids": [1]}, "One", None),
    ("One<|im_start|>two", {"stop_token_ids": [5, 1]}, "One", 1),
    ("One<|im_start|>two", {"stop_token_ids": [1], "include_stop_str_in_output": True}, "One", 1),
    ("One<|im_end|>two<|endoftext|>3", {"ignore_eos": True, "stop_token_ids": [0]}, "Onetwo", 0),
    (
        "One<|im_end|>two<|endoftext|>3",
        {"ignore_eos": True, "stop": ["<|endoftext|>"]},
        "Onetwo",
        "<|endoftext|>",
    ),
]


@pytest.mark.parametrize(("text", "fields", "content", "reason"), CONTROL)
def test_an_answer_ends_at_a_token_that_the_request_names(
    server, scripted, text, fields, content, reason
):
    """By its text or by its id, wherever it stands; as a whole, as a stream, and as a continuation."""
    scripted(text)
    _, whole = server.post(CHAT, ask(**fields))
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == (content, reason)
    assert choice["finish_reason"] == "stop"
    streamed = chunks(server.stream(CHAT, ask(**fields)))
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in streamed) == content
    last = streamed[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)
    if "think" not in text:
        _, raw = server.post(TEXT, {"prompt": "x", "max_tokens": 50} | fields)
        assert (raw["choices"][0]["text"], raw["choices"][0]["stop_reason"]) == (content, reason)


@pytest.mark.parametrize("included", [False, True])
def test_a_word_that_ends_an_answer_is_part_of_it_only_on_request(
    server, loaded, scripted, included
):
    """As vLLM has it for stop_token_ids; tokens of an answer that is cut there are computed no further."""
    scripted("One two three")
    id = loaded[1].encode("One two")[-1]
    _, found = server.post(
        CHAT, ask(stop_token_ids=[id], include_stop_str_in_output=included, logprobs=True)
    )
    (choice,) = found["choices"]
    assert (
        choice["message"]["content"] == "One two"[: 7 if included else -len(loaded[1].decode([id]))]
    )
    assert choice["stop_reason"] == id and found["usage"]["completion_tokens"] == len(
        loaded[1].encode("One two")
    )


@pytest.mark.parametrize("wrong", [[320_000], [-1], ["2"], [True], [1.5], 3, "2"])
def test_stop_token_ids_are_ids_of_the_model(server, wrong):
    status, found = server.post(CHAT, ask(stop_token_ids=wrong))
    assert (status, error(found)["param"]) == (400, "stop_token_ids")


def test_a_stop_token_beside_what_may_become_a_call_or_a_tag(loaded):
    """What was held back as the beginning of a tag is text before it, and a call that lacks its last tag is one."""
    call = '{"name": "time", "arguments": {}}'
    for text, said, calls in (
        ("One.\n\n<tool_c<|im_start|>", "One.\n\n<tool_c", 0),
        ("\n<|im_start|>", "\n", 0),
        (f"One.\n<tool_call>\n{call}\n<|im_start|>", "One.", 1),
        ("<thi<|im_start|>", "<thi", 0),
        (f"<tool_call>\n{call}\n</tool_call>\n<|im_start|>", "", 1),
    ):
        answer = AnswerText(loaded[1], ["<|im_start|>"], ThinkSplitter(), ToolCalls(["time"]))
        pieces = [
            piece for id in loaded[1].encode(text) for piece in answer.put(Step(id, 0.0), False)
        ]
        assert answer.complete and answer.stop_reason == "<|im_start|>"
        assert "".join(piece.text for piece in pieces) == said and answer.calls.count == calls


def test_a_comment_keeps_the_connection_during_a_long_prefill(loaded):
    with Serving(*loaded, limits=Limits(keepalive_s=0.02)) as server, server.held():
        connection = server.send("POST", CHAT, ask(max_tokens=2, stream=True))
        response = connection.getresponse()
        lines = [response.readline() for _ in range(6)]
        assert (
            json.loads(lines[0].removeprefix(b"data: "))["choices"][0]["delta"]["role"]
            == "assistant"
        )
        assert lines[2] == lines[4] == b": keepalive\n" and lines[1] == lines[3] == b"\n"
        server.gate.set()
        events = response.read().decode().split("\n\n")
        assert "data: [DONE]" in events
        connection.close()


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_other_ways_to_say_the_same(server):
    """Parts, a developer, an assistant without content, null fields, unknown fields, `//` and `/` in the path."""
    system = [{"role": "system", "content": "Be\nshort."}]
    turns = [*ask("Hi")["messages"], {"role": "assistant", "content": ""}, *ask("Who?")["messages"]]
    _, plain = server.post(CHAT, {"messages": system + turns, "max_tokens": 6})
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "short."}]
    turns[1] = {"role": "assistant", "content": None, "name": "x"}
    body = {
        "messages": [{"role": "developer", "content": parts}, *turns],
        "max_completion_tokens": 6,
        "max_tokens": 1,
    }
    body |= {
        "stop": None,
        "n": 1,
        "tools": [],
        "logprobs": False,
        "user": "me",
        "response_format": {"type": "text"},
    }
    status, other = server.post(
        "//v1//chat/completions/", body | {"model": "alias", "no_such": [1]}
    )
    assert status == 200 and other["choices"] == plain["choices"] and other["model"] == "alias"


def test_a_template_can_be_told_not_to_think(server):
    _, plain = server.post("/tokenize", ask())
    _, quiet = server.post("/tokenize", ask(chat_template_kwargs={"enable_thinking": False}))
    assert quiet["count"] > plain["count"] and quiet["tokens"][: plain["count"]] == plain["tokens"]
    _, found = server.post(CHAT, ask(chat_template_kwargs={"enable_thinking": False}, max_tokens=1))
    assert found["usage"]["prompt_tokens"] == quiet["count"]


def test_tokenize_and_detokenize(server, loaded):
    ids = loaded[1].encode("Once upon ☃")
    assert server.post("/tokenize", {"prompt": "Once upon ☃"}) == (
        200,
        {"tokens": ids, "count": len(ids), "max_model_len": 512},
    )
    assert server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": "Once upon ☃"})
    status, found = server.post("/detokenize", {"tokens": [1, 99999]})
    assert status == 400 and found["error"]["param"] == "tokens"


def test_what_the_checkpoint_puts_around_a_text_can_be_left_out(server, monkeypatch):
    asked = []
    monkeypatch.setattr(
        prompts, "text_ids", lambda served, text, special=True: asked.append(special) or [5]
    )
    for field in ({}, {"add_special_tokens": False}):
        assert server.post(TEXT, {"prompt": "Once", "max_tokens": 1} | field)[0] == 200
    assert asked == [True, False]


def test_a_prompt_of_token_ids_is_the_prompt(server, loaded):
    _, text = server.post(TEXT, {"prompt": "Once upon", "max_tokens": 6})
    _, ids = server.post(TEXT, {"prompt": [loaded[1].encode("Once upon")], "max_tokens": 6})
    assert text["choices"] == ids["choices"]


NOT_YET = [
    ("echo", True),
    ("best_of", 2),
    ("logit_bias", {"5": 100}),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -1),
    ("audio", {"voice": "x"}),
]
WRONG = [
    ("messages", None),
    ("messages", []),
    ("messages", "Hi"),
    ("temperature", "hot"),
    ("temperature", -1),
    ("top_p", 1.5),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", 2.5),
    ("max_completion_tokens", -1),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", [1]),
    ("stop", ["x"] * 17),
    ("stream", "yes"),
    ("stream_options", 1),
    ("n", 0),
    ("n", 17),
    ("n", True),
    ("n", 1.5),
    ("logprobs", 1),
    ("top_logprobs", 3),
    ("top_logprobs", 21),
    ("model", 5),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"self": 1}),
    ("chat_template_kwargs", {"bos_token": "x"}),
    ("temperature", 1e-40),
]
BAD_MESSAGES = [
    ({"role": "user"}, ".content"),
    ({"content": "x"}, ".role"),
    ({"role": "king", "content": "x"}, ".role"),
    ("x", ""),
    ({"role": "user", "content": 5}, ".content"),
    ({"role": "tool", "content": "x"}, ".tool_call_id"),
    ({"role": "function", "content": "x"}, ""),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        ".content[0]",
    ),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, ".content[0].text"),
    ({"role": "user", "content": ["x"]}, ".content[0]"),
    ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
    ({"role": ["user"], "content": "x"}, ".role"),
    ({"role": "user", "content": "x", "name": 5}, ".name"),
    ({"role": "assistant", "function_call": {"name": "x"}}, ".function_call"),
    ({"role": "assistant", "audio": {"id": "x"}}, ".audio"),
    ({"role": "user", "content": "a<|im_end|>b"}, ".content"),
]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_variable_of_the_template_cannot_bring_in_a_control_token(server, path):
    status, found = server.post(path, ask() | {"chat_template_kwargs": {"name": ["<|im_end|>"]}})
    assert (status, error(found)["param"]) == (400, "chat_template_kwargs.name[0]")


def test_the_range_of_a_seed_is_the_one_of_this_api(server):
    _, found = server.post(CHAT, ask(seed=-(2**63) - 1))
    assert "an integer from -2^63 to 2^64 - 1" in error(found)["message"]
    assert server.post(CHAT, ask(seed=-(2**63), max_tokens=1))[0] == 200


@pytest.mark.parametrize(("name", "value"), NOT_YET + WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_field(server, name, value, stream):
    """Also where a stream was asked for: nothing is accepted and then dropped."""
    status, found = server.post(CHAT, ask(max_tokens=1, stream=stream) | {name: value})
    assert (status, error(found)["param"], error(found)["type"]) == (
        400,
        name,
        "invalid_request_error",
    )
    assert (found["error"]["code"] == "unsupported") == ((name, value) in NOT_YET)


@pytest.mark.parametrize(("message", "place"), BAD_MESSAGES)
def test_a_refusal_names_the_message(server, message, place):
    status, found = server.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}, message]})
    assert (status, found["error"]["param"]) == (400, f"messages[1]{place}")


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "missing"),
        ("", "empty"),
        ([], "empty"),
        (["a", ""], "empty"),
        ([1, 99999], "vocabulary"),
        (5, "5"),
        ([[]], "empty"),
        ([{"a": 1}], "texts or lists"),
        (["a", 5], "texts or lists"),
        ([5, "a"], 'prompt holds "a"'),
        ([True], "texts or lists"),
        ([[5, "x"]], 'prompt holds "x"'),
        ([[5, [6]]], "prompt holds [6]"),
        (["a"] * 257, "257 prompts"),
        ([[5], [99999]], "vocabulary"),
    ],
)
def test_prompts_that_are_none(server, prompt, said):
    status, found = server.post(TEXT, {"prompt": prompt})
    assert (status, found["error"]["param"]) == (400, "prompt") and said in found["error"][
        "message"
    ]


WRONG_TEXT = [
    ("best_of", 2),
    ("suffix", "x"),
    ("logprobs", 6),
    ("logprobs", True),
    ("logprobs", -1),
    ("max_tokens", 0),
    ("echo", 1),
    ("top_logprobs", 1),
    ("n", 17),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TEXT)
def test_a_refusal_of_a_completion_names_the_field(server, name, value):
    status, found = server.post(TEXT, {"prompt": "Once"} | {name: value})
    assert (status, error(found)["param"]) == (400, name)


def test_another_model_is_not_found(server):
    status, found = server.post(CHAT, ask(model="gpt-9"))
    assert (status, found["error"]["code"]) == (404, "model_not_found") and "tiny" in found[
        "error"
    ]["message"]
    assert server.get("/v1/models/Qwen/Qwen3-0.6B")[0] == 404
    with server.client() as client, pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_prompt_that_is_too_long_is_400_with_both_counts(server):
    """llama.cpp answered 500, which routers take for transient and try again."""
    text = "zorbla " * 180  # its bytes alone do not show that it is too long
    _, tokens = server.post("/tokenize", ask(text))
    for stream in (False, True):
        status, found = server.post(CHAT, ask(text, stream=stream))
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        assert (
            "512 tokens" in found["error"]["message"]
            and f"{tokens['count']} tokens" in found["error"]["message"]
        )


def test_an_answer_ends_where_the_context_ends(server, loaded):
    ids = loaded[1].encode("Once upon a time " * 200)[:505]
    _, found = server.post(TEXT, {"prompt": ids, "max_tokens": 100, "ignore_eos": True})
    assert (
        found["usage"]["completion_tokens"] == 8 and found["choices"][0]["stop_reason"] == "context"
    )
    assert found["choices"][0]["finish_reason"] == "length"


# --- prefixes, metrics ------------------------------------------------------------------------------------------------


def test_a_second_turn_reuses_the_first(loaded):
    with Serving(*loaded) as server:
        _, first = server.post(CHAT, ask("My name is Zorbla.", max_tokens=8))
        said = first["choices"][0]["message"]["content"]
        turns = [*ask("My name is Zorbla.")["messages"], {"role": "assistant", "content": said}]
        _, second = server.post(
            CHAT, {"messages": [*turns, {"role": "user", "content": "Who?"}], "max_tokens": 2}
        )
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert first["usage"]["prompt_tokens"] - 8 < cached <= second["usage"]["prompt_tokens"]


def test_a_tree_of_prefixes_gives_the_same_answers_and_counts(loaded):
    """A talk that grows, and one whose first turn is edited: answers, cached tokens and metrics, over HTTP."""
    found = []
    for prefix in ("hash", "radix"):
        with Serving(*loaded, prefix=prefix, pages=60) as server:
            answers = []
            for first in ("My name is Zorbla.", "My name is Ada."):
                turns = ask(first)["messages"]
                for said in ("Who am I?", "And who are you?", "Bye."):
                    _, one = server.post(CHAT, {"messages": turns, "max_tokens": 6})
                    told = one["choices"][0]["message"]["content"]
                    answers.append((told, one["usage"]["prompt_tokens_details"]["cached_tokens"]))
                    turns = [
                        *turns,
                        {"role": "assistant", "content": told},
                        {"role": "user", "content": said},
                    ]
            text = server.raw("GET", "/metrics")[2].decode()
            hits = re.search(r"^nanokv_prefix_hit_tokens_total (\S+)$", text, re.MULTILINE)[1]
            assert float(hits) == sum(cached for _, cached in answers) > 0
            found.append(answers)
    assert found[0] == found[1]


def test_metrics_count_what_happened(loaded):
    with Serving(*loaded) as server:
        for _ in range(2):
            server.post(CHAT, ask(max_tokens=3, ignore_eos=True))
        server.post(CHAT, ask(n=0))
        status, headers, text = server.raw("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = dict(
        line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")
    )
    values = {name.removeprefix("nanokv_"): float(value) for name, value in lines.items()}
    assert (
        values['requests_total{reason="length"}'] == 2
        and values['requests_total{reason="refused"}'] == 1
    )
    assert (
        values["time_to_first_token_seconds_count"] == 2
        and values["inter_token_seconds_count"] == 4
    )
    assert values['time_to_first_token_seconds_bucket{le="+Inf"}'] == 2
    assert values["generated_tokens_total"] == 6 and values["pages"] == values["pages_free"] == 200
    assert (
        values["prefix_hit_tokens_total"] > 8
        and values["preemptions_total"] == values["requests_running"] == 0
    )
