"""One shape for an answer, OpenAI's, whichever command prints it; and what 0.1.0 wrote is still read."""

import json
import math
import shutil

import pytest

from api_schema import schema_errors
from cli_helpers import choice, text_of
from nanokv.decoding import completion
from nanokv.errors import ContextError, NanoKVError
from nanokv.text.tokenizer import Tokenizer

QUESTION = "My name is Zorbla."
CHAT = {"messages": [{"role": "user", "content": QUESTION}]}
COMMANDS = {  # name → arguments, stdin
    "chat": (["chat", "--jsonl"], QUESTION.encode()),
    "generate": (["generate", QUESTION, "--json"], b""),
    "generate --raw": (["generate", QUESTION, "--json", "--raw"], b""),
    "beams": (["generate", QUESTION, "--json", "--beams", "2"], b""),
    "batch": (["batch", "-"], json.dumps(CHAT).encode()),
    "batch, a prompt": (["batch", "-"], json.dumps({"prompt": QUESTION}).encode()),
}
MESSAGES = ("chat", "generate", "beams", "batch")


@pytest.fixture
def answers(cli, tiny_folder):
    """answers(name, *flags) → the object that a command of COMMANDS prints."""

    def call(name, *flags, folder=tiny_folder):
        argv, stdin = COMMANDS[name]
        code, out, err = cli(*argv, "-m", folder, "-n", "6", "-q", *flags, stdin=stdin)
        assert code == 0, err
        return json.loads(out)

    return call


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return Tokenizer.from_folder(tiny_folder)


# --- the shape --------------------------------------------------------------------------------------------------------

TOP = ["id", "object", "created", "model", "choices", "usage"]
OWN = {
    "chat": ["turn", "timings", "cache", "seed"],
    "generate": ["timings", "cache", "seed"],
    "generate --raw": ["timings", "cache", "seed"],
    "beams": ["timings", "cache", "seed"],
    "batch": ["timings", "seed", "request"],
    "batch, a prompt": ["timings", "seed", "request"],
}
TIMINGS = {
    "chat": [],
    "generate": ["load_s"],
    "generate --raw": ["load_s"],
    "beams": ["load_s", "total_s"],
    "batch": ["queue_s", "total_s", "preemptions"],
    "batch, a prompt": ["queue_s", "total_s", "preemptions"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_keys_of_every_command(answers, tiny_folder, name):
    found = answers(name)
    assert list(found) == ["line"] * name.startswith("batch") + TOP + OWN[name]
    assert list(found["timings"]) == ["ttft_s", "prefill_tok_s", "decode_tok_s", *TIMINGS[name]]
    assert list(found["usage"]) == [
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
    ]
    said = "message" if name in MESSAGES else "text"
    keys = ["index", said, "finish_reason", "stop_reason", "logprobs", "token_ids"] + ["score"] * (
        name == "beams"
    )
    assert [list(one) for one in found["choices"]] == [keys] * (2 if name == "beams" else 1)
    kind, prefix = (
        ("chat.completion", "chatcmpl-") if said == "message" else ("text_completion", "cmpl-")
    )
    assert (
        found["object"] == kind
        and found["id"].startswith(prefix)
        and found["model"] == str(tiny_folder)
    )
    assert type(found["created"]) is int and found["created"] > 1_700_000_000
    if said == "message":
        assert list(found["choices"][0]["message"]) == ["role", "content", "refusal"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_answer_is_what_openai_describes(answers, api, name):
    schema = "CreateChatCompletionResponse" if name in MESSAGES else "CreateCompletionResponse"
    found = answers(name)
    assert schema_errors(api, schema, found) == []
    del found["choices"][0]["logprobs"]
    assert schema_errors(api, schema, found) != [], "the check can fail"


def test_a_failed_line_is_what_openai_describes(cli, api, tiny_folder):
    code, out, _ = cli("batch", "-", "-m", tiny_folder, stdin=b'{"prompt": "Hi", "stopp": "x"}\n')
    found = json.loads(out)
    assert (code, list(found), found["hint"]) == (
        2,
        ["line", "error", "hint"],
        "did you mean stop?",
    )
    assert schema_errors(api, "ErrorResponse", found) == []


@pytest.fixture
def thinking_folder(tiny_folder, tmp_path):
    """The checkpoint with a template that opens <think> itself, as those of models that always think do."""
    folder = shutil.copytree(tiny_folder, tmp_path / "thinks")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config["chat_template"].removesuffix("{% endif %}{% endif %}")
    assert template != config["chat_template"]
    config["chat_template"] = template + "{% else %}<think>{% endif %}{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "case", ["length", "a stop string", "no stop string", "context", "thinking", "no thinking"]
)
def test_the_same_question_has_the_same_answer_in_every_command(
    answers, tiny_folder, thinking_folder, case
):
    """Text, thoughts, tokens, reasons and usage; what is not the same is when and how fast."""
    folder = thinking_folder if "thinking" in case else tiny_folder
    whole = answers("chat", folder=folder)
    flags = {
        "a stop string": ["--stop", text_of(whole)[3:5]],
        "no stop string": ["--stop", "zz"],
        "context": ["--context", whole["usage"]["prompt_tokens"] + 3],
        "no thinking": ["--thinking", "off"],
    }.get(case, [])
    chat, generate, batch = (
        answers(name, *flags, folder=folder) for name in ("chat", "generate", "batch")
    )
    assert len(choice(generate)["logprobs"]["content"]) == chat["usage"]["completion_tokens"]
    generate["choices"][0]["logprobs"] = None  # the others keep none
    assert chat["choices"] == generate["choices"] == batch["choices"]
    assert chat["usage"] == generate["usage"] == batch["usage"]
    assert (
        chat["cache"] == generate["cache"]
        and chat["seed"] is generate["seed"] is batch["seed"] is None
    )
    reasons = {"a stop string": ("stop", text_of(whole)[3:5]), "context": ("length", "context")}
    assert (choice(chat)["finish_reason"], choice(chat)["stop_reason"]) == reasons.get(
        case, ("length", None)
    )
    assert bool(choice(chat)["message"].get("reasoning_content")) == (case == "thinking")


def test_what_was_drawn_has_its_seed(answers):
    flags = ("-t", "1", "--seed", "5")
    assert [answers(name, *flags)["seed"] for name in ("chat", "generate", "batch")] == [5] * 3


# --- its parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "stop_string", "expected"),
    [
        ("stop", "", ("stop", None)),
        ("stop_string", "\n", ("stop", "\n")),
        ("length", "\n", ("stop", "\n")),
        ("length", "", ("length", None)),
        ("context", "", ("length", "context")),
        ("loop", "", ("length", "loop")),
        ("interrupted", "", ("length", "interrupted")),
        ("cancelled", "", ("length", "cancelled")),
    ],
)
def test_reasons_are_openais_with_ours_beside_them(reason, stop_string, expected):
    found = completion.choice({"text": "x"}, [1], reason, stop_string)
    assert (found["finish_reason"], found["stop_reason"]) == expected


def test_a_rate_of_nothing_and_in_no_time_is_none():
    assert completion.rate(6, 1.5) == 4
    assert [completion.rate(*x) for x in ((0, 1.5), (6, None), (6, 0.0), (6, -1.0))] == [None] * 4


def test_thoughts_are_set_apart():
    said = completion.message("<think>\nhm\n</think>\n\nYes.")["message"]
    assert said == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "\nhm\n",
    }
    assert completion.message("hm</think>Yes.", opened=True)["message"]["reasoning_content"] == "hm"
    assert "reasoning_content" not in completion.message("Yes.")["message"]


def test_an_answer_that_was_guessed_says_what_it_saved(answers):
    assert list(answers("generate", "--speculate", "ngram"))[-1] == "speculation"
    assert list(answers("chat", "--speculate", "ngram"))[-1] == "speculation"


def test_logprobs_of_half_characters_control_tokens_and_what_is_no_number(tokenizer):
    """The euro sign is three byte tokens; the text was cut after two characters by a stop string."""
    ids = [*tokenizer.encode("a€"), 1, *tokenizer.encode("zz")]
    assert len(ids) == 7
    values = [-1.0, -2.0, -3.0, -math.inf, math.nan, -0.5, -0.25]
    found = completion.logprobs({"text": "a€z"}, ids, values, tokenizer)
    assert found["tokens"] == ["a", *"���", "<|im_start|>", "z", "z"] and found["text_offset"] == [
        0,
        1,
        1,
        1,
        2,
        2,
        3,
    ]
    assert (
        found["token_logprobs"] == [-1, -2, -3, None, None, -0.5, -0.25]
        and found["top_logprobs"] == []
    )
    assert completion.logprobs({"text": "a"}, ids, values, tokenizer)["text_offset"] == [
        0,
        1,
        1,
        1,
        1,
        1,
        1,
    ]
    content = completion.logprobs(completion.message("a€zz"), ids, values, tokenizer)["content"]
    assert content[1] == {"token": "�", "logprob": -2.0, "bytes": [0xE2], "top_logprobs": []}


@pytest.mark.parametrize(
    ("reason", "kind", "code"),
    [
        (NanoKVError("no", "yes"), "invalid_request_error", None),
        (ContextError("no", "yes"), "invalid_request_error", "context_length_exceeded"),
        (ZeroDivisionError("no"), "server_error", None),
    ],
)
def test_errors(reason, kind, code):
    found = completion.error(reason)
    assert found["error"] == {"message": "no", "type": kind, "param": None, "code": code}
    assert found.get("hint") == getattr(reason, "hint", None)


# --- batch: ids, and the outputs of 0.1.0 -----------------------------------------------------------------------------

# What the code of 0.1.0 wrote for REQUESTS with -n 3, its digests with "weights" for the fingerprint of the model.
REQUESTS = (
    {"prompt": "Once upon a time"},
    {"messages": [{"role": "user", "content": "Who are you?"}], "id": "mine"},
    {"prompt": "system", "temperature": 0.7, "top_k": 9, "seed": 5, "max_new_tokens": 2},
)
OLD = r"""
{"line": 1, "text": "\u0019\ufffd\ufffd", "finish_reason": "length", "seed": null, "ids": [216, 116, 107], "metrics": \
{"queue_s": 0.000452, "ttft_s": 0.008317, "token_s": 0.002958, "total_s": 0.014233, "prompt_tokens": 9, "new_tokens": \
3, "reused_tokens": 0, "preemptions": 0}, "request": "27c04ae5155c76a3ccafe8e47459ff87"}
{"line": 2, "id": "mine", "text": "<think>a</think>b", "finish_reason": "length", "seed": null, "ids": [304, 72, 24], \
"metrics": {"queue_s": 0.000367, "ttft_s": 0.00836, "token_s": 0.002961, "total_s": 0.014282, "prompt_tokens": 21, \
"new_tokens": 3, "reused_tokens": 16, "preemptions": 0}, "request": "bbc3e76f6613ab54ce6a3805c7647992"}
{"line": 3, "error": "x"}
{"line": 3, "text": "\ufffd\ufffd", "finish_reason": "length", "seed": 5, "ids": [181, 181], "metrics": {"queue_s": \
0.00032, "ttft_s": 0.00869, "token_s": 0.003068, "total_s": 0.011758, "prompt_tokens": 5, "new_tokens": 2, \
"reused_tokens": 0, "preemptions": 0}, "request": "51cb75eb38c0ee2e814b6a16558c7f73"}
{"line": 4, "te""".lstrip().replace("\\\n", "")


def test_an_output_of_the_first_release_is_resumed_in_one_shape(
    cli, monkeypatch, tiny_folder, tmp_path
):
    """No line is computed again, and the answers keep what they said (line 2 was edited: it thinks)."""
    monkeypatch.setattr("nanokv.cache.saving.fingerprint", lambda model: "weights")
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in REQUESTS))
    out.write_text(OLD)
    code, _, err = cli("batch", source, "-o", out, "-m", tiny_folder, "-n", "3")
    assert code == 0 and "3 of 3 lines answered · 3 of them earlier" in err
    first, second, third = rows = [json.loads(line) for line in out.read_text().splitlines()]
    said = {"role": "assistant", "content": "b", "refusal": None, "reasoning_content": "a"}
    assert (second["id"], choice(second)["message"]) == ("mine", said)
    assert [text_of(row) for row in (first, third)] == ["\x19��", "��"]
    assert [choice(row)["token_ids"] for row in rows] == [
        [216, 116, 107],
        [304, 72, 24],
        [181, 181],
    ]
    assert second["usage"] == completion.usage(21, 3, cached=16) and [
        row["seed"] for row in rows
    ] == [None, None, 5]
    assert first["timings"] == {
        "ttft_s": 0.008317,
        "prefill_tok_s": 1144.31,
        "decode_tok_s": 338.07,
        "queue_s": 0.000452,
        "total_s": 0.014233,
        "preemptions": 0,
    }
    before = out.read_bytes()
    code, _, err = cli("batch", source, "-o", out, "-m", tiny_folder, "-n", "3")
    assert code == 0 and "3 of them earlier" in err and out.read_bytes() == before
    cli("batch", source, "-o", tmp_path / "fresh", "-m", tiny_folder, "-n", "3")
    fresh = [json.loads(line) for line in (tmp_path / "fresh").read_text().splitlines()]
    assert [list(row) for row in rows] == [list(row) for row in fresh]
    assert [row["request"] for row in rows] == [row["request"] for row in fresh]


def test_a_run_that_ends_early_leaves_no_old_line(cli, monkeypatch, tiny_folder, tmp_path):
    """What was found is converted before the first new answer; what nobody asked for any more stays until the end."""
    monkeypatch.setattr("nanokv.cache.saving.fingerprint", lambda model: "weights")
    monkeypatch.setattr(
        "nanokv.apps.cli.commands.batch.answer_all",
        lambda *args: (_ for _ in ()).throw(NanoKVError("cut")),
    )
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(json.dumps(line) + "\n" for line in (*REQUESTS[:2], {"prompt": "new"}))
    )
    out.write_text(OLD)
    assert cli("batch", source, "-o", out, "-m", tiny_folder, "-n", "3", "--force")[0] == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert ["choices" in row for row in rows] == [True, True, False] and rows[2]["ids"] == [
        181,
        181,
    ]


def test_a_line_of_batch_keeps_its_id_and_an_unnamed_one_gets_one(cli, tiny_folder):
    lines = ({"id": "mine"}, {"id": 7}, {"id": None}, {}, {})
    data = "".join(
        json.dumps({"prompt": "Hi", "max_new_tokens": 1} | line) + "\n" for line in lines
    )
    ids = [
        json.loads(line)["id"]
        for line in cli("batch", "-", "-m", tiny_folder, stdin=data.encode())[1].splitlines()
    ]
    assert (
        ids[:2] == ["mine", 7]
        and all(id.startswith("cmpl-") for id in ids[2:])
        and len(set(ids)) == 5
    )
