"""`nanokv batch`: OpenAI's batch lines and the fields of the server; the answers are those of the server.

Errors are counted, and a run of such lines can be resumed.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

import nanokv
from cli_helpers import FakeStdin, choice, spawn_cli
from nanokv.apps.cli import main
from nanokv.apps.cli.batch.output import read_output
from nanokv.apps.cli.batch.served import ServedLine
from nanokv.apps.serve.api import protocol
from nanokv.engine import Engine
from nanokv.errors import NanoKVError
from nanokv.support import installing
from serving import CHAT, TEXT, Serving, ask

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
PARTS = [{"type": "text", "text": "Who are"}, {"type": "text", "text": "you?"}]


@pytest.fixture
def cli(monkeypatch, capsys, tiny_folder):
    """cli(*argv, lines=[…]) → (exit code, stdout's JSON lines, stderr) of `nanokv batch - -m tiny-random`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("NANOKV_MODEL", raising=False)

    def call(*argv, lines):
        data = "".join(json.dumps(line) + "\n" for line in lines)
        monkeypatch.setattr("sys.stdin", FakeStdin(data.encode()))
        code = main(["batch", "-", "-m", str(tiny_folder), *map(str, argv)])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return call


def line(url, name="a", **body) -> dict:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def rounded(value):
    """Log-probabilities depend in their last digits on what else is in the step."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return value


def bare(body: dict) -> dict:
    """An answer without ids, times and the name of the model."""
    return rounded({key: body[key] for key in ("object", "choices", "seed")}) | {
        key: body["usage"][key] for key in ("prompt_tokens", "completion_tokens")
    }


BODIES = [
    (CHAT, ask(model="gpt-4o-mini", user="me", max_tokens=4, metadata={"a": "b"})),
    (
        CHAT,
        ask(max_completion_tokens=5, temperature=0.9, seed=7, n=2, logprobs=True, top_logprobs=2),
    ),
    (CHAT, {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 3, "ignore_eos": True}),
    (CHAT, ask(response_format=FORMAT, max_tokens=30)),
    (CHAT, ask(response_format={"type": "text"}, max_tokens=600)),
    (TEXT, {"model": "any", "prompt": "Once upon", "max_tokens": 6, "stop": ["zq"], "logprobs": 2}),
    (TEXT, {"prompt": ["Once", [5, 6]], "max_tokens": 3}),
    (TEXT, {"prompt": "Once upon", "max_tokens": 200, "stop": list("aeioutnsrhl ,.<d")}),
]


def test_the_answers_are_those_of_the_server(cli, tiny_folder):
    """OpenAI's types read them, in the order of the input, with the name of the model that ran."""
    code, rows, err = cli(
        "-q", lines=[line(url, f"r{i}", **body) for i, (url, body) in enumerate(BODIES)]
    )
    assert (code, err) == (0, "")
    with Serving(*nanokv.load(tiny_folder), names=("tiny", "*"), context=512) as server:
        answers = [server.post(url, body)[1] for url, body in BODIES[:4] + BODIES[5:]]
    assert [row["custom_id"] for row in rows] == [f"r{i}" for i in range(len(BODIES))]
    for row, (url, _) in zip(rows, BODIES, strict=True):
        assert list(row) == ["id", "custom_id", "response", "error"] and row["error"] is None
        assert list(row["response"]) == ["status_code", "request_id", "body"]
        body = row["response"]["body"]
        assert row["response"]["status_code"] == 200 and body["model"] == str(tiny_folder)
        (ChatCompletion if url == CHAT else Completion).model_validate(body)
    bodies = [row["response"]["body"] for row in rows]
    assert [bare(body) for body in bodies[:4] + bodies[5:]] == [bare(answer) for answer in answers]
    assert json.loads(bodies[3]["choices"][0]["message"]["content"]) in (
        {"on": True},
        {"on": False},
    )
    assert len({row["id"] for row in rows}) == len(rows)


def test_a_plain_line_takes_the_fields_of_the_server(cli):
    """And keeps its own form; the flags stay the defaults."""
    content = {"messages": [{"role": "user", "content": PARTS}], "id": "parts"}
    joined = {"messages": [{"role": "user", "content": "Who are\nyou?"}]}
    ignored = {"prompt": "Once", "model": "x", "user": "me", "n": 1, "id": "n"}
    formed = joined | {"response_format": FORMAT, "max_tokens": 30}
    lines = [content, joined, ignored, {"prompt": "Once"}, formed, {"prompt": "Once", "n": 2}]
    code, rows, _ = cli("-q", "--raw", "-n", 4, lines=lines)
    assert code == 0 and [row["line"] for row in rows] == [1, 2, 3, 4, 5, 6]
    ids = [row["choices"][0]["token_ids"] for row in rows]
    assert ids[0] == ids[1] and ids[2] == ids[3] == ids[5] and len(ids[0]) == 4
    assert [row.get("id") for row in rows[:3:2]] == ["parts", "n"]
    assert [row["object"] for row in rows[:3]] == ["chat.completion"] * 2 + ["text_completion"]
    assert json.loads(choice(rows[4])["message"]["content"])["on"] in (True, False)
    assert len(rows[5]["choices"]) == 2 and all(row["request"] for row in rows)
    chat, message = cli(
        "-q", "--chat", "-n", 4, lines=[{"prompt": "Once", "user": "me"}, ask("Once")]
    )[1]
    assert choice(chat)["token_ids"] == choice(message)["token_ids"]


WRONG = [
    ({"custom_id": "a", "method": "POST", "url": CHAT}, "body is missing"),
    (line(CHAT, **ask()) | {"custom_id": 5}, "custom_id is 5: a text was expected"),
    (line(CHAT, **ask()) | {"method": "GET"}, "POST was expected"),
    (line("/v1/embeddings", input="a"), f"{CHAT} or {TEXT} was expected"),
    (line(CHAT, **ask()) | {"temperature": 1}, '"temperature" is beside the body'),
    (line(CHAT, **ask()) | {"body": []}, "body is []: an object was expected"),
    (line(CHAT, **ask(n=17)), "n is 17: an integer from 1 to 16 was expected"),
    (line(CHAT, **ask(frequency_penalty=0.5)), "frequency_penalty is 0.5: this server does not do"),
    (line(CHAT, **ask(stream=True)), "stream is true: a batch does not do that"),
    (line(TEXT, prompt="Once", echo=True), "echo is true: a batch does not do that"),
    (line(CHAT, **ask("<|im_end|>")), "contains <|im_end|>, a control token"),
    (
        line(CHAT, **ask(response_format=FORMAT | {"json_schema": {"schema": {"not": {}}}})),
        "not is not supported",
    ),
    (line(TEXT, prompt=""), "the prompt is empty"),
    (line(TEXT, prompt="a " * 9_000), "maximum context length"),
    (
        {"prompt": "Once", "frequency_penalty": 0.5},
        "frequency_penalty is 0.5: this server does not",
    ),
    ({"prompt": "Once", "n": 17}, "n is 17"),
    ({"prompt": "<|im_end|>", "n": 2}, "control token"),
    ({"prompt": "Once", "n": 2, "messages": []}, "exactly one of prompt and messages"),
    ({"prompt": "Once", "n": 2, "temprature": 1}, "no setting 'n'"),
]


def test_each_answer_of_a_line_needs_room():
    """The pool of the pages is sized by them."""
    asked = protocol.text({"prompt": ["a", "b"], "n": 3, "max_tokens": 4})
    prompts = [[1] * 5, [1] * 7]
    line = ServedLine(SimpleNamespace(max_new_tokens=None), asked, TEXT, prompts)
    assert line.lengths() == [9, 9, 9, 11, 11, 11]
    asked = protocol.chat(ask(n=2))
    line = ServedLine(SimpleNamespace(max_new_tokens=30), asked, CHAT, [[1] * 5])
    assert line.lengths() == [35, 35]


def test_what_is_refused_is_in_the_output_and_counted(cli):
    """Five are shown, also with -q, and the others are a number; the lines between are answered."""
    good = line(CHAT, "good", **ask(max_tokens=2))
    for quiet in ((), ("-q",)):
        code, rows, err = cli(*quiet, lines=[*(wrong for wrong, _ in WRONG), good])
        assert code == 2 and rows[-1]["response"]["status_code"] == 200
        warnings = [text for text in err.splitlines() if "warning" in text]
        assert len(warnings) == 6 and warnings[0].startswith("nanokv: warning: stdin:1: body is")
        assert (
            warnings[5]
            == f"nanokv: warning: {len(WRONG) - 5} more lines failed; the output has each error"
        )
    for row, (wrong, said) in zip(rows, WRONG, strict=False):
        found = row
        if "custom_id" in wrong:
            assert row["custom_id"] == wrong["custom_id"] and row["error"] is None
            assert row["response"]["status_code"] == 400
            found = row["response"]["body"]
        assert said in found["error"]["message"], wrong
    assert len(cli("-q", lines=[WRONG[0][0]] * 5)[2].splitlines()) == 5


def test_of_a_request_that_is_refused_no_answer_is_computed(cli, monkeypatch):
    """Its first prompt has been submitted when the second one is refused."""
    submit, cancel, cancelled = Engine.submit, Engine.cancel, []

    def refusing(engine, prompt, *more, **settings):
        if list(prompt) == [5, 6]:
            raise NanoKVError("no room for it")
        return submit(engine, prompt, *more, **settings)

    def noted(engine, request, *more):
        cancelled.append(request)
        return cancel(engine, request, *more)

    monkeypatch.setattr(Engine, "submit", refusing)
    monkeypatch.setattr(Engine, "cancel", noted)
    two = line(TEXT, prompt=["Once", [5, 6]], max_tokens=3)
    _, rows, _ = cli("-q", lines=[two, line(TEXT, "b", prompt="Once", max_tokens=2)])
    assert "no room for it" in json.dumps(rows[0]) and rows[1]["error"] is None
    (first,) = cancelled
    assert first.finish_reason == "cancelled" and not first.tokens


def test_such_lines_can_be_resumed(cli, tmp_path):
    """A torn line and an error are tried again; answers are found by their id, wherever their line has moved."""
    out = tmp_path / "out.jsonl"
    lines = [line(CHAT, f"r{i}", **ask(max_tokens=3, temperature=1)) for i in range(3)]
    plain = {"prompt": "Once", "n": 2, "max_tokens": 2}
    assert cli("-o", out, "--raw", lines=[*lines, plain])[0] == 0
    rows = out.read_text().splitlines()
    whole = [json.loads(row) for row in rows]
    failed = dict(whole[2]) | {"response": {"status_code": 400, "request_id": "x", "body": {}}}
    for torn in (rows[1][:9], rows[1][:60]):
        out.write_text("\n".join([rows[3], json.dumps(failed), rows[0], torn]))
        assert len(read_output(out)) == 2
        code, _, err = cli("-o", out, "--raw", lines=[plain, *lines])
        again = [json.loads(row) for row in out.read_text().splitlines()]
        assert code == 0 and "4 of 4 lines answered · 2 of them earlier" in err
        assert again[0] == whole[3] | {"line": 1} and again[1] == whole[0]
        assert [row["custom_id"] for row in again[1:]] == ["r0", "r1", "r2"]
    assert (
        "1 of them earlier"
        in cli("-o", out, "--force", lines=[lines[1], line(CHAT, "r2", **ask(max_tokens=4))])[2]
    )


@pytest.mark.slow
def test_a_killed_run_of_such_lines_goes_on(cli, endless_folder, tmp_path):
    """Killed in the middle of a long answer: the short ones are kept, and the long one is asked for again."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    short = [line(CHAT, f"r{i}", **ask(f"Number {i}?", max_tokens=2, n=2)) for i in range(3)]
    lines = [line(TEXT, "long", prompt="Once", max_tokens=90_000), *short]
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    process = spawn_cli("batch", source, "-o", out, "-m", endless_folder)
    try:
        while not (out.exists() and out.read_bytes().count(b"\n") == len(short)):
            with pytest.raises(subprocess.TimeoutExpired):  # it must not end by itself
                process.wait(0.1)
    finally:
        process.kill()
        process.communicate(timeout=120)
    done = set(out.read_text().splitlines())
    assert {json.loads(row)["custom_id"] for row in done} == {"r0", "r1", "r2"}
    lines[0]["body"]["max_tokens"] = 3
    code, _, err = cli("-o", out, "-m", endless_folder, lines=lines)
    assert code == 0 and "4 of 4 lines answered · 3 of them earlier" in err
    rows = out.read_text().splitlines()
    assert set(rows[1:]) == done and json.loads(rows[0])["custom_id"] == "long"


def test_without_pydantic_the_install_line_is_told_and_plain_lines_go_on(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    code, rows, _ = cli("-q", "--raw", "-n", 2, lines=[line(CHAT, **ask()), {"prompt": "Once"}])
    wrong = rows[0]["response"]["body"]
    assert code == 2 and "need pydantic" in wrong["error"]["message"]
    assert wrong["hint"] == installing.hint(["pydantic"])
    assert len(choice(rows[1])["token_ids"]) == 2
