"""What a program gets that imports nanokv: ids in every form, errors that name the right call, text in and text out.

Each refused argument is looked at for its type, for what it names, and for the call that would have been right.
"""

import re
from functools import partial

import numpy
import pytest
import torch

import nanokv
import weights_loader
from nanokv.errors import CacheError, GenerationError, NanoKVError, SessionError, TokenIdsError, TokenizerError
from nanokv.inference import token_ids

LIST = [5, 6, 7]
ONE = {  # one sequence
    "list": LIST, "tuple": (5, 6, 7), "range": range(5, 8), "int32 array": numpy.array(LIST, numpy.int32),
    "array (1,T)": numpy.array([LIST]), "tensor": torch.tensor(LIST), "tensor (1,T)": torch.tensor([LIST]),
    "int32 tensor": torch.tensor(LIST, dtype=torch.int32), "list of list": [LIST],
    "list of numpy ints": list(numpy.array(LIST)), "list of tensors": list(torch.tensor(LIST)),
}  # fmt: skip
ROWS = {  # a batch
    "lists": [LIST, LIST], "array": numpy.array([LIST, LIST]), "uint8 array": numpy.array([LIST, LIST], numpy.uint8),
    "tensor": torch.tensor([LIST, LIST]), "list of arrays": [numpy.array(LIST)] * 2,
    "list of tensors": [torch.tensor(LIST)] * 2,
}  # fmt: skip
NO_IDS = {  # what → (value, what the message says, what its hint says)
    "text": ("hi", "got the text 'hi'", "tokenizer.encode(text)"),
    "bytes": (b"hi", "got the text b'hi'", "tokenizer.encode(text)"),
    "texts": (["hi"], "id 'hi' at position 0 is of type str", "tokenizer.encode(text)"),
    "float list": ([[1.5]], "id 1.5 at position 0 is of type float", "ids.long()"),
    "float tensor": (torch.ones(1, 3), "token ids are whole numbers, these are torch.float32", "ids.long()"),
    "float array": (numpy.ones((1, 3)), "token ids are whole numbers, these are float64", "ids.long()"),
    "bool list": ([[True]], "id True at position 0 is of type bool", "ids.long()"),
    "bool tensor": (torch.tensor([[True]]), "token ids are whole numbers, these are torch.bool", "ids.long()"),
    "too large": ([[3, 10**6]], "id 1000000 at position 1 is outside the vocabulary 0 … 2047", ""),
    "negative": (torch.tensor([[3, 4, -1]]), "id -1 at position 2 is outside the vocabulary 0 … 2047", ""),
    "3-D": (torch.ones(1, 1, 1).long(), "more than two dimensions", "(B,T)"),
    "none": (None, "got NoneType None", "tokenizer.encode(text)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    return nanokv.load("tiny")


def answers(loaded, ids) -> list:
    """Three tokens of everything that takes one prompt."""
    model, tokenizer = loaded
    engine = nanokv.Engine(model, pages=8)
    request = engine.submit(ids, max_new_tokens=3)
    engine.run()
    draft = nanokv.speculative.PromptLookup()
    return [
        list(nanokv.generate(model, ids, max_new_tokens=3)),
        list(nanokv.speculate(model, ids, draft, max_new_tokens=3)),
        nanokv.beam_search(model, ids, beams=1, max_new_tokens=3)[0].ids, request.tokens, tokenizer.decode(ids),
    ]  # fmt: skip


@pytest.mark.parametrize("form", ONE)
def test_one_sequence_may_have_any_form(loaded, form):
    assert answers(loaded, ONE[form]) == answers(loaded, LIST)


@pytest.mark.parametrize("form", ROWS)
def test_a_batch_may_have_any_form(loaded, form):
    model, _ = loaded
    expected, ids = nanokv.score(model, torch.tensor([LIST] * 2)), ROWS[form]
    assert torch.equal(nanokv.score(model, ids), expected)
    cache = nanokv.make_cache("dict", model.config, batch_size=2)
    assert torch.equal(nanokv.prefill(model, ids, cache), nanokv.prefill_chunks(
        model, torch.tensor([LIST] * 2), nanokv.make_cache("dict", model.config, batch_size=2)))  # fmt: skip
    assert nanokv.decode(model, numpy.array([[3], [4]]), cache, start_pos=3).shape == (2, model.config.vocab_size)
    alone = list(nanokv.generate(model, LIST, max_new_tokens=3))
    for way in (nanokv.generate_padded, nanokv.generate_ragged):
        assert way(model, ids, max_new_tokens=3) == [alone, alone]


@pytest.mark.parametrize("what", NO_IDS)
def test_what_are_no_ids_says_so_everywhere(loaded, what):
    model, tokenizer = loaded
    ids, words, hint = NO_IDS[what]
    calls = [
        partial(nanokv.score, model), partial(nanokv.generate, model), partial(nanokv.beam_search, model),
        lambda ids: nanokv.prefill(model, ids, nanokv.make_cache("dict", model.config)),
        lambda ids: nanokv.decode(model, ids, nanokv.make_cache("dict", model.config), start_pos=0),
        lambda ids: nanokv.speculate(model, ids, nanokv.speculative.PromptLookup()),
        nanokv.Engine(model, pages=8).submit,
    ]  # fmt: skip
    for call in [*calls, tokenizer.decode]:
        with pytest.raises(TokenIdsError, match=re.escape(words)) as caught:
            call(ids)
        assert hint in caught.value.hint
        assert isinstance(caught.value, GenerationError) and isinstance(caught.value, TokenizerError)


def test_forms_that_are_no_batch_are_named(loaded):
    model, _ = loaded
    for ids, words, hint in (
        (LIST, "got 3 without a batch dimension", "[ids]"), ([], "got 0 without a batch dimension", "[ids]"),
        ([[1, 2], [3]], "got rows of 1 to 2 ids", "generate_padded"), ([[], []], "got (2,0)", "tokenizer.encode"),
    ):  # fmt: skip
        with pytest.raises(TokenIdsError, match=re.escape(words)) as caught:
            nanokv.score(model, ids)
        assert hint in caught.value.hint and "(B,T) integer" in str(caught.value)
    with pytest.raises(TokenIdsError, match=r"one sequence was expected, got a batch \(2, 2\)"):
        nanokv.generate(model, [[1, 2], [3, 4]])
    assert _decoded_nothing(loaded)


def _decoded_nothing(loaded) -> bool:
    return loaded[1].decode([]) == "" == loaded[1].decode(torch.tensor([]).long())


def test_ids_that_are_right_are_handed_on_as_they_are(loaded):
    """The step's own token: no copy, no look at every value in Python."""
    token = torch.tensor([[5]])
    assert token_ids(loaded[0], token) is token


def test_skip_special_tokens_leaves_out_what_controls(loaded):
    tokenizer = loaded[1]
    ids = tokenizer.encode("<|im_start|>Hello<|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>Hello<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello" == tokenizer.text_of(torch.tensor([ids]))


# --- other arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache", "right"), [("static", '"static"'), (None, '"dict"'), ({}, '"dict"')])
def test_a_name_is_no_cache(loaded, cache, right):
    model = loaded[0]
    calls = [
        lambda: nanokv.prefill(model, [LIST], cache), lambda: nanokv.decode(model, [[5]], cache, start_pos=0),
        lambda: nanokv.inference.verify(model, [LIST], cache, start_pos=0),
    ]  # fmt: skip
    if cache is not None:  # there it means a new one
        calls.append(lambda: nanokv.generate(model, LIST, cache=cache))
    for call in calls:
        with pytest.raises(CacheError, match="a KVCache was expected") as caught:
            call()
        assert caught.value.hint == f"make_cache({right}, model.config)"


@pytest.mark.parametrize(("arguments", "words", "hint"), [
    ({"dtype": "fp16"}, "dtype 'fp16' is not a floating-point", "dtype=torch.float16"),
    ({"dtype": "bfloat16"}, "dtype 'bfloat16' is not a floating-point", "dtype=torch.bfloat16"),
    ({"dtype": torch.int8}, "dtype torch.int8 is not a floating-point", "dtype=torch.float32"),
    ({"device": "gpu"}, "device is 'gpu', which torch does not know", "cuda"),
    ({"device": "cuda:99"}, "device is 'cuda:99', but torch", 'device="cpu"'),
])  # fmt: skip
def test_a_wrong_dtype_or_device_is_named_before_any_download(monkeypatch, arguments, words, hint):
    monkeypatch.setattr(weights_loader, "resolve", lambda *_, **__: pytest.fail("looked for the model first"))
    for load in (nanokv.load, weights_loader.load):
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            load("Qwen/Qwen3-0.6B", **arguments)
        assert hint in caught.value.hint


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(weights_loader.CheckpointError, match=r"device is 'cuda', but torch .* sees 0 of its kind"):
        nanokv.load("tiny", device="cuda")


def test_options_of_a_session_that_do_not_exist(loaded):
    for option in ({"overflow": "foo"}, {"loop_guard": True}):
        with pytest.raises(SessionError, match=f"{next(iter(option))} is .*: it must be '"):
            nanokv.Session(*loaded, **option)
    assert issubclass(SessionError, NanoKVError)
