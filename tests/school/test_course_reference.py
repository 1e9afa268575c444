"""What notebook 04 compares with: stored numbers are transformers', and a wrong checkpoint is wrong where it says."""

from dataclasses import replace

import pytest
import torch

import nanokv
from nanokv.lab.study import debug
from nanokv.school.course import checking, reference
from nanokv.school.course.checks import nb04

FIRST = {  # what is wrong → the first operation that reads it
    "theta": (0, "rope_k"),
    "eps": (0, "input_layernorm"),
    "head": (None, "lm_head"),
    "a": "gate_proj",
    "b": "q_norm",
    "c": "q_proj",
    "d": "down_proj",
    "e": "o_proj",
    "f": "input_layernorm",
}


@pytest.fixture(scope="module")
def model():
    return nanokv.load("tiny")[0]


def first(wrong, right):
    return next(step for step in debug.compare(wrong, right) if not step.ok)


def test_the_stored_numbers_are_those_of_transformers(model):
    ids, kept, author = reference.stored(model)
    assert (
        author.startswith("transformers 5.")
        and torch.equal(ids, reference.prompt(model))
        and ids.shape[1] > 10
    )
    theirs = reference.last_token(debug.record(reference.in_transformers("tiny"), ids))
    assert theirs.keys() == kept.keys()
    assert all(step.ok for step in debug.compare(theirs, kept))
    assert all(
        step.ok for step in debug.compare(reference.last_token(debug.record(model, ids)), kept)
    )


def test_numbers_of_other_weights_are_not_handed_out(model):
    assert reference.stored(reference.sabotaged(model)["eps"]) is None


def test_without_transformers_there_is_no_other_model(monkeypatch):
    monkeypatch.setattr(reference.oracle, "version", lambda: None)
    assert reference.in_transformers("tiny") is None


@pytest.mark.parametrize("name", ["theta", "eps", "head"])
def test_a_wrong_checkpoint_is_wrong_where_it_says(name, model):
    step = debug.first_divergence(reference.sabotaged(model)[name], model, reference.prompt(model))
    assert (step.layer, step.operation) == FIRST[name]


@pytest.mark.parametrize("cause", nb04.CAUSES)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_mystery_begins_in_its_layer_and_at_its_cause(cause, place, model):
    ids = reference.prompt(model)
    case = checking.Case({"place": place, "cause": cause}, model)
    step = first(nb04.mystery(case, ids), debug.record(model, ids))
    assert (step.layer, step.operation) == (place, FIRST[cause])


def test_a_family_without_norms_of_its_heads_gets_another_cause(model):
    """The norms of random weights are all 1, so one is made another."""
    plain = nanokv.loading.random_model(replace(model.config, model_type="llama"), torch.float32)
    plain.layers[1].input_layernorm.weight.fill_(2.0)
    check, ids = checking.find("04.4"), reference.prompt(plain)
    case = checking.Case({"place": 1, "cause": "b"}, plain)
    step = first(nb04.mystery(case, ids), debug.record(plain, ids))
    assert (step.layer, step.operation) == (1, "input_layernorm") and check.judge(
        (1, "f"), case
    ).state == "right"


def test_one_by_one_gives_the_same_values_but_not_the_same_bits(model):
    ids = reference.prompt(model)
    steps = debug.compare(reference.one_by_one(model, ids), debug.record(model, ids))
    assert all(step.ok for step in steps) and 0 < max(step.difference for step in steps) < 1e-3


@pytest.mark.parametrize(
    ("atol", "mistake"),
    [
        (1e-4, ""),
        (1e-3, ""),
        ("0.0005", ""),
        (0, "zero"),
        (-1, "zero"),
        (1e-8, "below rounding"),
        (0.1, "too loose"),
        (100, "too loose"),
        ("small", ""),
    ],
)
def test_a_tolerance_is_judged_by_what_it_lets_through(atol, mistake, model):
    check = checking.find("04.3")
    outcome = check.judge(atol, check.case(model=model))
    assert (outcome.state, outcome.mistake) == (
        "right" if not mistake and atol != "small" else "wrong",
        mistake,
    )


def test_a_reader_is_judged_by_the_tensors_that_it_reads(model):
    import json
    from pathlib import Path

    def read(path, name, skip=True, whole=True):
        data = Path(path).read_bytes()
        n = int.from_bytes(data[:8], "little")
        entry = json.loads(data[8 : 8 + n])[name]
        begin, end = (
            (8 + n) * skip + entry["data_offsets"][0],
            (8 + n) * skip + entry["data_offsets"][1],
        )
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[entry["dtype"]]
        flat = torch.frombuffer(bytearray(data[begin:end]), dtype=dtype)
        return flat.view(entry["shape"]) if whole else flat

    answers = {
        "": read,
        "offset": lambda path, name: read(path, name, skip=False),
        "no tensor": lambda path, name: [1.0],
        "shape": lambda path, name: read(path, name, whole=False),
        "dtype": lambda path, name: read(path, name).double(),
        "size": lambda path, name: read(path, name)[:1],
    }
    check = checking.find("04.2")
    for mistake, answer in answers.items():
        outcome = check.judge(answer, check.case(model=model))
        assert (outcome.state, outcome.mistake) == ("wrong" if mistake else "right", mistake)
