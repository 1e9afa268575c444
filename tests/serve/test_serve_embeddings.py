"""`nanokv serve`: /v1/embeddings, of a folder as Qwen3-Embedding's is: no `model.` before the names of its weights, a
tokenizer that ends each text with <|endoftext|>, and sentence-transformers' files. The truth is transformers'
AutoModel.
"""

import base64
import contextlib
import http.client
import json
import logging
import struct
import threading
import types

import jsonschema
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import nanokv
from nanokv.apps.cli.commands.serve import abilities, has_head
from nanokv.apps.serve.api import embeddings
from nanokv.apps.serve.http import openapi
from nanokv.apps.serve.http.response import Limits
from nanokv.errors import NanoKVError
from serving import CHAT, TEXT, Serving, ask, error, strict
from tiny_checkpoint import write_tiny_checkpoint

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["Who are you?", "The cache holds one key and one value per token", "Once", "a" * 90]
END = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
APPEND = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, END],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, END, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As Qwen/Qwen3-Embedding-0.6B's."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-embedding")
    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": APPEND}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def embedder(folder):
    return nanokv.load(folder)


@pytest.fixture(scope="module")
def server(embedder):
    """It answers too, so that its answers can be watched beside embeddings."""
    with Serving(*embedder, pooling="last", step_tokens=16, keys=["a", "b"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client("a")


pytestmark = pytest.mark.usefixtures("nothing_is_left")
KEY = {"Authorization": "Bearer a"}


def post(server, key="a", **fields):
    return server.post(EMBEDDINGS, fields, {"Authorization": f"Bearer {key}"})


def vectors(found: dict) -> torch.Tensor:
    """(B,C); the indices must be in order."""
    assert [entry["index"] for entry in found["data"]] == list(range(len(found["data"])))
    return torch.tensor([entry["embedding"] for entry in found["data"]])


@pytest.fixture(scope="module")
def truth(folder, embedder):
    """truth(list of ids) → (B,C), each text alone through transformers; the last token's state, normalized."""
    model = AutoModel.from_pretrained(folder).eval()

    def compute(ids):
        with torch.inference_mode():
            states = [model(torch.tensor([one])).last_hidden_state[0, -1] for one in ids]
        return torch.stack([state / state.norm() for state in states])

    return compute


def test_the_vectors_are_those_of_transformers_and_end_with_the_end_token(client, truth, embedder):
    found = client.embeddings.create(model="tiny", input=TEXTS)
    ids = [[*embedder[1].encode(text), 0] for text in TEXTS]
    assert max(map(len, ids)) > 2 * 16, "one text needs three forwards"
    got = torch.tensor([entry.embedding for entry in found.data])
    assert (got - truth(ids)).abs().max() <= 1e-6
    assert found.object == "list" and found.model == "tiny"
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))


@pytest.mark.parametrize("several", [False, True])
def test_ids_are_taken_as_they_are_and_a_text_may_go_without_the_end_token(
    several, server, truth, embedder
):
    ids = [embedder[1].encode(text) for text in TEXTS[: 3 if several else 1]]
    source = ids if several else ids[0]
    assert (vectors(post(server, input=source)[1]) - truth(ids)).abs().max() <= 1e-6
    _, found = post(server, input=TEXTS[: len(ids)], add_special_tokens=False)
    assert (vectors(found) - truth(ids)).abs().max() <= 1e-6


def test_base64_holds_the_same_numbers(server):
    plain = post(server, input=TEXTS)[1]
    packed = post(server, input=TEXTS, encoding_format="base64")[1]
    for one, other in zip(plain["data"], packed["data"], strict=True):
        data = base64.b64decode(other["embedding"])
        assert list(struct.unpack("<64f", data)) == one["embedding"]


def test_fewer_dimensions_are_normalized_again(server):
    whole = vectors(post(server, input=TEXTS)[1])
    first = vectors(post(server, input=TEXTS, dimensions=10)[1])
    assert (first - whole[:, :10] / whole[:, :10].norm(dim=1, keepdim=True)).abs().max() <= 1e-6


def test_the_answer_is_openais_and_the_one_of_the_document(server):
    for encoding in ("float", "base64"):
        found = post(server, input="Once", encoding_format=encoding, user="me")[1]
        if encoding == "float":
            strict(openai.types.CreateEmbeddingResponse, found)
        document = openapi.document()
        operation = document["paths"][EMBEDDINGS]["post"]["responses"]["200"]
        schema = operation["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(
            found
        )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "input is missing"),
        ({"input": ""}, "input", "the input is empty"),
        ({"input": []}, "input", "the input is empty"),
        ({"input": ["a", ""]}, "input", "the input is empty"),
        ({"input": [[1], 2]}, "input", "a list of texts or lists of token ids was expected"),
        ({"input": {"text": "a"}}, "input", "a text or a list was expected"),
        ({"input": ["a"] * 2049}, "input", "2,049 inputs in one request, at most 2,048"),
        ({"input": ["a", [320]]}, "input[1]", "id 320 at position 0"),
        ({"input": [1] * 600}, "input", "512 tokens. However, your input resulted in 600"),
        ({"input": ["a", "a" * 9999]}, "input[1]", "your input[1] has 9,999 bytes"),
        ({"input": [[1] * 500] * 601}, "input", "more than 300,000 tokens in all"),
        ({"input": "a", "dimensions": 65}, "dimensions", "65: the model has 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "an integer from 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "a", "model": "other"}, "model", 'no model "other"'),
        ({"input": "a", "truncate_prompt_tokens": 8}, "truncate_prompt_tokens", "does not do that"),
        ({"input": "a", "normalize": False}, "normalize", "does not do that"),
    ],
)
def test_refusals(fields, param, words, server):
    status, found = post(server, **fields)
    assert status == (404 if param == "model" else 400)
    assert error(found)["param"] == param and words in error(found)["message"], found


def test_unknown_fields_are_logged(server, caplog):
    caplog.set_level(logging.INFO, "nanokv.apps.serve")
    assert post(server, input="a", dtype="float32")[0] == 200
    server.wait(lambda: "2 tokens → 1 embeddings" in caplog.text)
    assert 'ignored: "dtype"' in caplog.text


# --- with answers and other clients ---------------------------------------------------------------------------------


def test_answers_go_on_between_the_forwards_of_embeddings(server):
    """48 texts of 40 tokens are 120 forwards of 16 tokens; an answer that comes later ends long before them."""
    order = []

    def run(name, path, body):
        assert server.post(path, body, KEY)[0] == 200
        order.append(name)

    long = threading.Thread(target=run, args=("embeddings", EMBEDDINGS, {"input": [[5] * 40] * 48}))
    long.start()
    server.wait(lambda: server.engine_client.thread.asides)
    run("answer", TEXT, {"prompt": "Once", "max_tokens": 8, "ignore_eos": True})
    long.join()
    assert order == ["answer", "embeddings"]


def test_keys_take_turns(server):
    """A request of the second key does not wait for the two long ones of the first, and counts as its tokens."""
    order = []

    def run(name, key, texts):
        assert post(server, key, input=texts)[0] == 200
        order.append(name)

    many = [[5] * 40] * 24
    busy = [threading.Thread(target=run, args=("busy", "a", many)) for _ in range(2)]
    for thread in busy:
        thread.start()
    server.wait(lambda: len(server.engine_client.thread.asides) == 2)
    run("quiet", "b", [[5] * 40])
    for thread in busy:
        thread.join()
    assert order == ["quiet", "busy", "busy"]
    clients = server.engine.scheduler.turns.clients
    salts = list(server.app.keys.numbers)
    assert clients[salts[1]].prompt_tokens == 40
    assert clients[salts[0]].prompt_tokens >= 2 * 24 * 40


def test_echoes_and_embeddings_of_a_key_come_in_order(server):
    body = {"prompt": [5] * 60, "echo": True, "logprobs": 1, "max_tokens": 0}
    assert server.post(TEXT, body, KEY)[0] == 200


def test_a_client_that_leaves_ends_its_embeddings_and_pays_for_what_was_computed(embedder):
    thread = None
    with Serving(*embedder, pooling="mean", step_tokens=16) as server:
        thread, turns = server.engine_client.thread, server.engine.scheduler.turns
        with contextlib.closing(server.send("POST", EMBEDDINGS, {"input": [[5] * 40] * 2000})):
            server.wait(lambda: thread.asides and thread.asides[0].embedding.computed > 100)
            (message,) = thread.asides
        server.wait(lambda: server.free)
        computed = message.embedding.computed
        assert 100 < computed < message.embedding.tokens == 80_000
        assert turns.clients[message.client].prompt_tokens == computed


def test_a_key_that_was_served_less_comes_first(server):
    """Two requests of a key for one of another: each forward is that of the key with fewer tokens."""
    order = []
    advance = embeddings.Embedding.advance

    def noted(self, model, chunk):
        order.append(self.tokens)
        return advance(self, model, chunk)

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(embeddings.Embedding, "advance", noted)
        gate = threading.Event()
        patch.setattr(server.engine, "aside", lambda f: (gate.wait(20), f(server.engine.model))[1])
        for number, (key, length) in enumerate((("a", 64), ("a", 65), ("b", 33), ("b", 34)), 1):
            headers = {"Authorization": f"Bearer {key}"}
            sent = server.send("POST", EMBEDDINGS, {"input": [[5] * length]}, headers)
            stack.enter_context(contextlib.closing(sent))
            server.wait(lambda: sum(ticket.submitted for ticket in server.tickets) == number)  # noqa: B023
        gate.set()
        server.wait(lambda: server.free)
    assert sorted(order[1:7]) == [33] * 3 + [64] * 3, "16 tokens each, in turns"
    assert [length for length in order if length in (64, 65)] == [64] * 4 + [65] * 5
    assert [length for length in order if length in (33, 34)] == [33] * 3 + [34] * 3


def test_a_request_keeps_its_place_until_its_answer_is_read(embedder, monkeypatch):
    monkeypatch.setattr(embeddings.Embedding, "written", lambda self: b'"' + b"x" * 12_000_000)
    with Serving(*embedder, pooling="mean", running=1, queue=0) as server:
        assert len(server.raw("POST", EMBEDDINGS, {"input": "a"})[2]) == 12_000_001
        monkeypatch.setattr("nanokv.apps.serve.http.server.READER_S", 1.0)
        with contextlib.closing(server.send("POST", EMBEDDINGS, {"input": "a"})):
            ended = b'reason="embedded"} 1.0'
            server.wait(lambda: server.tickets and server.tickets[0].end is not None)
            assert server.post(EMBEDDINGS, {"input": "a"})[0] == 429
            assert ended in server.engine_client.metrics.text({}), "only the first one is counted"
            server.wait(lambda: server.free)


def test_a_request_that_takes_too_long_and_one_without_a_place(embedder):
    with Serving(
        *embedder, pooling="mean", step_tokens=4, running=1, queue=0, limits=Limits(answer_s=0.5)
    ) as server:
        late = threading.Thread(
            target=lambda: server.found.append(post(server, input=[[5] * 40] * 2000))
        )
        server.found = []
        late.start()
        server.wait(lambda: server.engine_client.thread.asides)
        status, found = post(server, input="a")
        assert status == 429 and error(found)["code"] == "queue_full"
        late.join()
        assert server.found[0][0] == 504
        server.wait(lambda: server.free)


def test_weights_that_give_nan_are_an_error_for_their_client_only(server, monkeypatch):
    monkeypatch.setattr(
        "nanokv.embeddings.forward_packed",
        lambda model, parts, *_: torch.full((sum(map(len, parts)), 64), torch.nan),
    )
    status, found = post(server, input="a")
    assert status == 500 and error(found)["code"] == "internal_error"
    monkeypatch.undo()
    assert post(server, input="a")[0] == 200


# --- what a model is for --------------------------------------------------------------------------------------------


def test_a_model_for_chats_names_the_flag(loaded):
    with Serving(*loaded) as server:
        status, found = server.post(EMBEDDINGS, {"input": "a"})
    assert status == 400 and "--embeddings" in found["hint"]
    assert error(found)["param"] == "model" and "not for embeddings" in error(found)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ask()),
        (TEXT, {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", ask(max_tokens=5)),
    ],
)
def test_a_model_of_embeddings_writes_no_answers(path, body, embedder):
    with Serving(*embedder, pooling="last", answers=False) as server:
        status, found = server.post(path, body)
    assert status == 400 and "a model of embeddings" in found["error"]["message"]


def given(embeddings=None):
    return types.SimpleNamespace(embeddings=embeddings)


def model_in(folder, ranks=1, **fields):
    fields = json.loads((folder / "config.json").read_text()) | fields
    ranks = types.SimpleNamespace(size=ranks)
    return types.SimpleNamespace(folder=folder, fields=fields, name="tiny", ranks=ranks)


def test_what_a_folder_and_the_flag_make_of_a_server(folder, tiny_folder):
    assert abilities(given(), model_in(folder)) == ("last", False)
    assert abilities(given("auto"), model_in(folder)) == ("last", False)
    assert abilities(given("last"), model_in(folder)) == ("last", False)
    assert abilities(given(), model_in(tiny_folder)) == (None, True)
    assert abilities(given("auto"), model_in(tiny_folder)) == ("last", True)
    assert abilities(given("mean"), model_in(tiny_folder)) == ("mean", True)
    alone = model_in(tiny_folder, architectures=["Qwen3Model"], tie_word_embeddings=False)
    assert abilities(given("mean"), alone) == ("mean", False)
    assert has_head({"architectures": ["Qwen3Model"], "tie_word_embeddings": True})
    assert has_head({})
    for wrong, words in (
        ((given("mean"), model_in(folder)), "contradicts the model's folder"),
        ((given(), alone), "has no head"),
        ((given(), model_in(folder, ranks=2)), "embeddings need one process"),
    ):
        with pytest.raises(NanoKVError, match=words):
            abilities(*wrong)


@pytest.mark.slow
def test_a_server_of_the_folder_is_one_of_embeddings(folder, cli):
    from served_command import ended, serving

    with serving(folder) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", EMBEDDINGS, json.dumps({"input": "Once"}))
        assert len(json.loads(connection.getresponse().read())["data"][0]["embedding"]) == 64
        connection.request("POST", CHAT, json.dumps(ask()))
        assert connection.getresponse().status == 400
        process.terminate()
        ended(process)
