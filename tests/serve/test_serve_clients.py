"""`nanokv serve` and the clients that people use: each is installed as they install it, and asks a real server.

A client is a script in clients/ that asks for an answer, a stream and a stop string, and is refused for a model and for
a key; what it prints is compared with what the server says to a plain request. The calls of docs/serve.md run as they
stand. OpenAI's own client for Python is in test_serve.py.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import client_environment
import nanokv
from serving import CHAT, TEXT, Serving, ask, chunks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KEY = {"Authorization": "Bearer secret"}
SHORT = ask(model="tiny", max_tokens=12)


@pytest.fixture(scope="module")
def locked(loaded):
    with Serving(*loaded, keys=["secret"]) as server:
        yield server


@pytest.fixture(scope="module")
def python_clients():
    return client_environment.python_clients()


@pytest.fixture(scope="module")
def node_clients(python_clients):
    return client_environment.node_clients(python_clients)


@pytest.fixture
def run(request, tmp_path, python_clients):
    """run("python", code, …): what code prints that is read from the standard input, where the clients are installed"""
    programs = python_clients / "bin"
    interpreters = {
        "python": [programs / "python", "-"],
        "bash": ["bash", "-es", "-"],
        "js": [programs / "node", "--input-type=module", "-"],
    }
    variables = {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "LLM_USER_PATH": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "any",
    }

    def call(language: str, code: str, *arguments: str) -> str:
        folder = request.getfixturevalue("node_clients") if language == "js" else tmp_path
        return client_environment.run(
            [*interpreters[language], *arguments], code, folder, **variables
        )

    return call


@pytest.mark.parametrize(
    "client",
    [
        "openai_node.mjs",
        "ai_sdk.mjs",
        "litellm_client.py",
        "langchain_client.py",
        "llm_client.py",
    ],
)
def test_a_client_is_told_what_the_server_says(locked, run, client):
    def said(**fields):
        status, found = locked.post(CHAT, SHORT | fields, KEY)
        assert status == 200
        return (
            found["choices"][0]["message"]["content"],
            found["choices"][0]["finish_reason"],
            found["usage"],
        )

    text, reason, usage = said()
    stop = text[4:6]
    cut, why, _ = said(stop=stop)
    assert cut == text[:4] and (reason, why) == ("length", "stop")
    script = (client_environment.HERE / client).read_text(encoding="utf-8")
    language = "js" if client.endswith(".mjs") else "python"
    counts = [usage["prompt_tokens"], usage["completion_tokens"]]
    assert json.loads(run(language, script, locked.url, "secret", stop)) == {
        "whole": text,
        "reason": reason,
        "usage": counts,
        "streamed": text,
        "stream_reason": reason,
        "stream_usage": counts,
        "stopped": cut,
        "stop_reason": why,
        "no_model": 404,
        "no_key": 401,
    }


@pytest.mark.parametrize(
    ("output_type", "documents"),
    [
        ("generate_until", [("Who are you?", ""), ("Once upon", "")]),
        ("loglikelihood", [("Who are you?", " I am"), ("Once upon", " a time")]),
    ],
)
def test_lm_eval_scores_the_model(server, loaded, tiny_folder, run, output_type, documents):
    model, tokenizer = loaded

    def score(context: str, answer: str) -> list:
        """[log-probability of the answer's tokens after the context, whether each is the most probable]"""
        ids, known = tokenizer.encode(context + answer), len(tokenizer.encode(context))
        logprobs = nanokv.score(model, [ids]).log_softmax(-1)[0, known - 1 : -1]
        taken = logprobs[range(len(ids) - known), ids[known:]]
        return [
            pytest.approx(taken.sum().item(), abs=1e-3),
            bool((taken == logprobs.amax(-1)).all()),
        ]

    def text(context: str, _: str) -> str:
        return server.post(TEXT, {"prompt": context, "max_tokens": 12})[1]["choices"][0]["text"]

    lines = [json.dumps({"question": context, "answer": answer}) for context, answer in documents]
    script = (client_environment.HERE / "lm_eval_client.py").read_text(encoding="utf-8")
    found = json.loads(run("python", script, server.url, str(tiny_folder), output_type, *lines))
    expected = {"generate_until": text, "loglikelihood": score}[output_type]
    assert found == [expected(*document) for document in documents]


# --- curl -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def curl():
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    return ["curl", "-sS", "--noproxy", "*", "-H", f"Authorization: {KEY['Authorization']}"]


def test_curl_shows_a_stream_while_it_comes(locked, curl):
    """The first event before the first token is computed."""
    body = json.dumps(SHORT | {"stream": True})
    with locked.held():
        process = subprocess.Popen(
            [*curl, "-N", locked.url + CHAT, "-d", body], stdout=subprocess.PIPE, text=True
        )
        first = process.stdout.readline()
        assert (
            json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        )
    *events, end = (first + process.stdout.read()).split("\n\n")
    process.stdout.close()
    assert process.wait(60) == 0
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in chunks(events))
    assert (
        end == "" and text == locked.post(CHAT, SHORT, KEY)[1]["choices"][0]["message"]["content"]
    )


@pytest.mark.parametrize(
    ("fields", "header", "status"),
    [
        ({}, [], "200"),
        ({"model": "gpt-9"}, [], "404"),
        ({}, ["-H", "Authorization: Bearer wrong"], "401"),
    ],
)
def test_curl_is_told_what_went_wrong(locked, curl, fields, header, status):
    command = [
        *(curl[:4] if header else curl),
        *header,
        locked.url + CHAT,
        "-d",
        json.dumps(SHORT | fields),
    ]
    done = subprocess.run(
        [*command, "-w", "\n%{http_code}"], capture_output=True, text=True, timeout=60, check=True
    )
    body, _, code = done.stdout.rpartition("\n")
    assert code == status and ("error" in json.loads(body)) == (status != "200")


# --- the docs ---------------------------------------------------------------------------------------------------------

DOCS = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8").partition("\n## Clients")[2]
BLOCKS = re.findall(r"^```(python|bash|js)\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=["litellm", "langchain", "llm", "ai"])
def test_the_calls_of_the_docs_run_as_they_stand(server, run, language, code):
    said = server.post(CHAT, ask())[1]["choices"][0]["message"]["content"]
    assert run(language, code.replace("http://127.0.0.1:8000", server.url)).strip() == said.strip()


# --- the environment --------------------------------------------------------------------------------------------------


def test_where_no_index_answers_the_reason_is_given(tmp_path, monkeypatch):
    for name, value in (
        ("XDG_CACHE_HOME", str(tmp_path)),
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        pytest.skip.Exception, match=r"no Python package can be fetched: .*uv==0\.13\.9"
    ):
        client_environment.python_clients()


def test_what_was_left_half_installed_or_has_other_versions_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pins, made = ("package.json",), []

    def fails(folder):
        folder.mkdir()
        raise AssertionError("no space left")

    with pytest.raises(AssertionError, match="no space left"):
        client_environment.installed("x", pins, fails)
    for _ in range(2):
        folder = client_environment.installed("x", pins, lambda folder: made.append(folder.mkdir()))
    assert len(made) == 1, "the second time it is complete"
    (folder / "complete").write_text("other versions")
    client_environment.installed("x", pins, lambda folder: made.append(folder.mkdir()))
    assert len(made) == 2
