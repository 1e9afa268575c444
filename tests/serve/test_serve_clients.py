"""`nanokv serve` and the clients that people use: each is installed as they install it, and asks a real server.

A client is a script in clients/ that asks for an answer, a stream and a stop string, and is refused for a model and for
a key; what it prints is compared with what the server says to a plain request. Clients of /v1/responses and of
/v1/messages also answer ten calls of a scripted model, one after the other. The calls of docs/serve.md run as they
stand. OpenAI's own client for Python is in test_serve.py too.
"""

import json
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

import client_environment
import nanokv
from serving import CHAT, TEXT, Serving, ask, chunks
from tool_calls import HERMES, with_template, written

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


# --- /v1/responses and /v1/messages: ten calls in a row ---------------------------------------------------------------

CALLS = 10


@pytest.fixture(scope="module")
def roomy(tiny_folder, tmp_path_factory):
    """The model with 4,096 positions, and its tokenizer with a template for calls."""
    folder = tmp_path_factory.mktemp("checkpoints") / "roomy"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    model, tokenizer = nanokv.load(folder)
    return model, with_template(tokenizer, HERMES)


@pytest.fixture
def looking(roomy, scripted):
    """A server whose model calls look ten times where it is offered, the number being that of the results so far."""

    def said(prompt: str) -> str:
        results = prompt.count("<|im_start|>tool")
        if "Call by <tool_call>" not in prompt:
            return "I am tiny."
        if results < CALLS:
            return f"I look.\n{written('look', number=results)}"
        return "All was found."

    scripted(said)
    with Serving(*roomy, keys=["secret"], pages=600, context=2000) as server:
        yield server


@pytest.mark.parametrize(
    ("client", "more"),
    [
        ("openai_responses.mjs", []),
        ("anthropic_node.mjs", []),
        ("ai_sdk_vendors.mjs", ["openai"]),
        ("ai_sdk_vendors.mjs", ["openai", "whole items"]),
        ("ai_sdk_vendors.mjs", ["anthropic"]),
        ("agents_client.py", []),
        ("litellm_forms.py", ["responses"]),
        ("litellm_forms.py", ["messages"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_a_client_answers_ten_calls_in_a_row(looking, run, client, more):
    script = (client_environment.HERE / client).read_text(encoding="utf-8")
    language = "js" if client.endswith(".mjs") else "python"
    found = json.loads(run(language, script, looking.url, "secret", *more))
    assert found == ten_calls(looking)


def ten_calls(server) -> dict:
    usage = server.post(CHAT, ask(), KEY)[1]["usage"]
    counts = [usage["prompt_tokens"], usage["completion_tokens"]]
    return {
        "whole": "I am tiny.",
        "usage": counts,
        "streamed": "I am tiny.",
        "stream_usage": counts,
        "numbers": list(range(CALLS)),
        "end": "All was found.",
        "no_model": 404,
        "no_key": 401,
    }


NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}}


def test_openai_for_python_answers_ten_calls_in_a_row(looking):
    event_type = TypeAdapter(ResponseStreamEvent)
    tool = {"type": "function", "name": "look", "parameters": NUMBER, "strict": False}
    items, numbers, calls = [{"role": "user", "content": "Look."}], [], True
    with looking.client("secret") as client:
        while calls:
            with client.responses.stream(model="tiny", input=items, tools=[tool]) as stream:
                for event in stream:
                    event_type.validate_python(event.to_dict())
                answer = stream.get_final_response()
            calls = [item for item in answer.output if item.type == "function_call"]
            items += [item.to_dict() for item in answer.output]
            for call in calls:
                numbers.append(json.loads(call.arguments)["number"])
                result = {"call_id": call.call_id, "output": "Found."}
                items.append({"type": "function_call_output"} | result)
    assert numbers == list(range(CALLS)) and answer.output_text == "All was found."


def test_anthropic_for_python_answers_ten_calls_in_a_row(looking):
    event_type = TypeAdapter(RawMessageStreamEvent)
    request = {"model": "tiny", "max_tokens": 100}
    request |= {"tools": [{"name": "look", "input_schema": NUMBER}]}
    turns, numbers, calls = [{"role": "user", "content": "Look."}], [], True
    client = anthropic.Anthropic(base_url=looking.url, api_key="secret", max_retries=0, timeout=20)
    with client:
        while calls:
            for event in client.messages.create(**request, messages=turns, stream=True):
                event_type.validate_python(event.to_dict())
            with client.messages.stream(**request, messages=turns) as stream:
                answer = stream.get_final_message()
            calls = [block for block in answer.content if block.type == "tool_use"]
            numbers += [call.input["number"] for call in calls]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "Found."}
                for call in calls
            ]
            turns += [answer.to_param(), {"role": "user", "content": results}]
    assert numbers == list(range(CALLS)) and answer.content[0].text == "All was found."


# --- lm-eval ----------------------------------------------------------------------------------------------------------


DOCUMENTS = {
    "generate_until": [("Who are you?", ""), ("Once upon", "")],
    "loglikelihood": [("Who are you?", " I am"), ("Once upon", " a time")],
}


def test_lm_eval_scores_the_model(server, loaded, tiny_folder, run):
    """Both in one process, whose imports take longer than the tasks."""
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

    script = (client_environment.HERE / "lm_eval_client.py").read_text(encoding="utf-8")
    found = json.loads(run("python", script, server.url, str(tiny_folder), json.dumps(DOCUMENTS)))
    expected = {"generate_until": text, "loglikelihood": score}
    assert found == {
        name: [expected[name](*document) for document in documents]
        for name, documents in DOCUMENTS.items()
    }


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


# --- embeddings -------------------------------------------------------------------------------------------------------

EMBEDDERS = {
    "openai for Node": """
        import OpenAI from "openai";
        const client = new OpenAI({baseURL: "SERVER/v1", apiKey: "any"});
        const found = await client.embeddings.create({model: "tiny", input: TEXTS});
        console.log(JSON.stringify(found.data.map((one) => one.embedding)));""",
    "AI SDK": """
        import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
        import { embedMany } from "ai";
        const client = createOpenAICompatible({ name: "nanokv", baseURL: "SERVER/v1", apiKey: "any" });
        const found = await embedMany({ model: client.embeddingModel("tiny"), values: TEXTS });
        console.log(JSON.stringify(found.embeddings));""",
    "langchain": """
        from langchain_openai import OpenAIEmbeddings
        model = OpenAIEmbeddings(
            base_url="SERVER/v1", api_key="any", model="tiny", check_embedding_ctx_length=False
        )
        print(model.embed_documents(TEXTS))""",
    "litellm": """
        import litellm
        found = litellm.embedding("openai/tiny", TEXTS, api_base="SERVER/v1", api_key="any")
        print([one["embedding"] for one in found.data])""",
}


@pytest.mark.parametrize("client", EMBEDDERS)
def test_a_client_gets_the_embeddings_that_a_plain_request_gets(client, loaded, run):
    texts = ["Once upon", "a time"]
    with Serving(*loaded, pooling="last") as server:
        _, found = server.post("/v1/embeddings", {"input": texts})
        code = textwrap.dedent(EMBEDDERS[client]).replace("SERVER", server.url)
        language = "js" if "console.log" in code else "python"
        said = run(language, code.replace("TEXTS", json.dumps(texts)))
    assert json.loads(said) == [entry["embedding"] for entry in found["data"]]


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
