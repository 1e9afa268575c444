"""A GPU whose memory is full: a named error with the numbers and what helps, and everything as it was before."""

import json

import pytest
import torch

import nanokv
from nanokv.cache import KVCache, make_cache
from nanokv.decoding import completion
from nanokv.engine import Engine
from nanokv.errors import DeviceMemoryError
from nanokv.inference import decode, prefill, score, verify_draft
from nanokv.support.device_memory import full_memory
from oracle import SHAPES, pair, random_ids

# torch 2.11
TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 5.00 GiB is "
    "free. Including non-PyTorch memory, this process has 74.15 GiB memory in use. Of the allocated memory 70.00 GiB "
    "is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated."
)


def full(*_, **__):
    raise torch.OutOfMemoryError(TEXT)


@pytest.fixture
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


@pytest.fixture
def loaded():
    return nanokv.load("tiny", device="cpu")


def test_the_error_has_what_was_asked_what_is_free_and_who_holds_the_rest(model):
    cache = make_cache("static", model.config, capacity=64)
    prefill(model, random_ids(1, 1, 5), cache)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    error = full_memory(torch.OutOfMemoryError(TEXT), model, cache)
    assert str(error) == (
        "the memory of the GPU is full: 21.47 GB asked, 5.37 GB free of 84.99 GB, "
        f"weights {weights / 1e6:.1f} MB, cache {cache.nbytes / 1e6:.1f} MB"
    )
    assert error.hint.startswith("--dtype bfloat16; a smaller --context; --cache quantized")
    assert isinstance(error, MemoryError)
    assert str(full_memory(torch.OutOfMemoryError("hm"))) == "the memory of the GPU is full"


def test_weights_in_bf16_are_not_told_to_be_in_bf16(model):
    assert "--dtype" not in full_memory(torch.OutOfMemoryError(TEXT), model.bfloat16()).hint


@pytest.mark.parametrize("where", ["layers", "lm_head"])
def test_every_forward_names_it(model, monkeypatch, where):
    cache, ids = make_cache("dict", model.config), random_ids(1, 1, 9)
    prefill(model, ids[:, :5], cache)
    target = model.layers[-1] if where == "layers" else model.lm_head
    monkeypatch.setattr(target, "forward", full)
    calls = {
        "score": lambda: score(model, ids),
        "verify": lambda: verify_draft(model, ids[:, 5:], cache, 5),
        "decode": lambda: decode(model, ids[:, 5:6], cache, 5),
        "prefill": lambda: prefill(model, ids[:, 5:], cache, 5),
    }
    for name, call in calls.items():
        if (name, where) == ("prefill", "lm_head"):
            continue  # one row
        with pytest.raises(DeviceMemoryError, match=r"21\.47 GB asked") as caught:
            call()
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        cache.truncate(5)
        assert cache.length == 5


def test_a_session_goes_on_when_there_is_memory_again(loaded, monkeypatch):
    session = nanokv.Session(*loaded)
    session.ask("My name is Zorbla.", max_new_tokens=8)
    before, messages = session.cache.length, list(session.messages)
    with monkeypatch.context() as patch:
        patch.setattr(session.model.layers[1], "forward", full)
        with pytest.raises(DeviceMemoryError, match="cache"):
            session.ask("What is my name?", max_new_tokens=8)
    assert session.messages == messages and session.cache.length <= before
    other = nanokv.Session(*loaded)
    other.ask("My name is Zorbla.", max_new_tokens=8)
    assert session.ask("What is my name?", max_new_tokens=8) == other.ask(
        "What is my name?", max_new_tokens=8
    )


def test_an_engine_gives_the_pages_back_and_goes_on(loaded, monkeypatch):
    model, tokenizer = loaded
    engine = Engine(model, pages=64)
    request = engine.submit(tokenizer.encode("Once upon a time"), max_new_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1], "forward", full)
        with pytest.raises(DeviceMemoryError):
            engine.step()
    while not engine.idle:
        engine.step()
    assert request.finish_reason == "length" and len(request.tokens) == 4


def test_a_file_that_does_not_fit_onto_the_device_is_no_damaged_file(model, tmp_path, monkeypatch):
    cache = make_cache("dict", model.config)
    prefill(model, random_ids(1, 1, 5), cache)
    cache.save(tmp_path / "c")
    monkeypatch.setattr("nanokv.cache.dict_cache.DictCache.restore", full)
    with pytest.raises(DeviceMemoryError, match=r"21\.47 GB asked"):
        KVCache.load(tmp_path / "c", model.config)


def test_a_command_prints_two_lines_and_leaves_with_2(cli, monkeypatch):
    """While it answers, and while the weights are on their way."""
    monkeypatch.setattr("nanokv.model.Block.forward", full)
    code, out, err = cli("generate", "Once", "--plain", "-q")
    assert (code, out) == (2, "")
    assert "error: the memory of the GPU is full: 21.47 GB asked, 5.37 GB free of 84.99 GB" in err
    assert "hint: --dtype bfloat16; a smaller --context" in err and "Traceback" not in err
    monkeypatch.setattr("nanokv.loading.load_folder", full)
    code, out, err = cli("generate", "Once", "--plain", "-q")
    assert code == 2 and "21.47 GB asked" in err and "hint: " in err


def test_a_saved_cache_that_does_not_fit_is_no_broken_file(model, monkeypatch, tmp_path):
    cache = make_cache("dict", model.config)
    prefill(model, random_ids(1, 1, 5), cache)
    cache.save(tmp_path / "cache")
    monkeypatch.setattr("nanokv.cache.dict_cache.DictCache.restore", full)
    with pytest.raises(DeviceMemoryError, match="the memory of the GPU is full: 21"):
        KVCache.load(tmp_path / "cache", model.config)


def test_it_is_no_fault_of_the_request(cli, monkeypatch, tmp_path):
    error = full_memory(torch.OutOfMemoryError(TEXT))
    assert completion.error(error)["error"]["type"] == "server_error"
    from nanokv.apps.serve.run.engine_thread import client_error

    answer = client_error(error, "messages")
    assert answer.status == 503 and answer.body["error"]["code"] == "out_of_memory"
    assert answer.body["error"]["type"] == "server_error" and "--context" in answer.body["hint"]
    assert json.dumps(answer.body)
