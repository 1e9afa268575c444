"""`nanokv blend`: keys turned to another place are those of a full prefill in layer 0, all tokens computed again are a
full prefill, and keys that are not turned are the fault that it looks like."""

import dataclasses
import json

import pytest
import torch

import nanokv
from nanokv.config import Yarn
from nanokv.errors import NanoKVError, UnsupportedError
from nanokv.inference import verify_draft
from nanokv.lab.bench.blend import CUTS, FAULT, FULL, TURNED, rows, told
from nanokv.lab.bench.facts import TELLS
from nanokv.lab.study.blend import CHOICES, Joined, alone, join, moved
from nanokv.lab.study.quality import relative_error
from oracle import HYBRID, pair
from real_model import smollm2
from small_model import small

PARTS = ((0, 9), (9, 22), (22, 40))


@pytest.fixture(scope="module")
def model():
    return small()[0]


@pytest.fixture(scope="module")
def parts():
    ids = small()[1][0].tolist()
    return [ids[start:end] for start, end in PARTS]


def whole(parts) -> list[int]:
    return [token for part in parts for token in part]


def worst(joined: Joined, full, layer: int) -> float:
    """The largest difference of a key or value of a layer, beside the largest value."""
    pairs = [(joined.cache[layer][name], full[layer][name]) for name in ("key", "value")]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def test_turned_keys_of_layer_0_are_those_of_a_full_prefill(model, parts):
    full = alone(model, whole(parts))
    joined = join(model, parts)
    assert worst(joined, full, 0) < 1e-5
    assert worst(join(model, parts, rotate=False), full, 0) > 0.1
    # Above, they were computed from another text, but for those of the first part.
    assert worst(joined, full, 1) > 0.01 and joined.prefix == 9
    for one, other in zip(joined.cache, full, strict=True):
        torch.testing.assert_close(one["key"][:, :, :9], other["key"][:, :, :9])


def test_keys_are_turned_with_yarn_too():
    """Its factor on cos and sin must not count twice."""
    yarn = Yarn(factor=4.0, original_max_position_embeddings=64)
    model = small(yarn=yarn)[0]
    assert yarn.scale != 1
    ids = [[1, 2, 3], [4, 5, 6]]
    assert worst(join(model, ids), alone(model, whole(ids)), 0) < 1e-5


def test_turning_adds_up(model):
    key = torch.randn(1, 2, 5, 32)
    twice = moved(model.config, moved(model.config, key, 3), 14)
    torch.testing.assert_close(twice, moved(model.config, key, 17), atol=1e-5, rtol=1e-5)
    assert moved(model.config, key, 0).equal(key)


@pytest.mark.parametrize("choice", CHOICES)
def test_all_tokens_computed_again_are_a_full_prefill(model, parts, choice):
    full = alone(model, whole(parts))
    joined = join(model, parts)
    computed = CHOICES[choice](model, joined, 1.0)
    assert computed.tolist() == list(range(9, 40))
    for layer in range(len(full)):
        assert worst(joined, full, layer) < 1e-5
    question = torch.tensor([[3, 1, 4]])
    found, wanted = (verify_draft(model, question, one.fork(), 40) for one in (joined.cache, full))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_computed_again_is_what_was_joined(model, parts, choice):
    """Except that the choice of CacheBlend has computed keys and values of layer 1."""
    joined = join(model, parts)
    assert len(CHOICES[choice](model, joined, 0.0)) == 0
    exact = 2 if choice == "most changed" else 0
    full, before = alone(model, whole(parts)), join(model, parts)
    for layer in range(exact):
        assert worst(joined, full, layer) < 1e-5
    for layer in range(exact, len(full)):
        assert worst(joined, before.cache, layer) < 1e-5


def test_which_tokens_are_computed_again(model, parts):
    """Parts of 9, 13 and 18 tokens: 31 behind the first."""
    assert CHOICES["first of each part"](model, join(model, parts), 0.2).tolist() == [
        *range(9, 12),
        *range(22, 26),
    ]
    assert CHOICES["evenly"](model, join(model, parts), 4 / 31).tolist() == [9, 19, 29, 39]
    # By hand: the change of keys and values of layer 1, once all tokens have gone through layer 0.
    joined, full = join(model, parts), alone(model, whole(parts))
    off = torch.zeros(40)
    for name in ("key", "value"):
        new, old = full[1][name], joined.cache[1][name]
        off += (new - old).pow(2).mean((0, 1, 3)) / new.pow(2).mean()
    wanted = sorted(off[9:].topk(6).indices.add(9).tolist())
    assert CHOICES["most changed"](model, joined, 6 / 31).tolist() == wanted
    # A row that is computed again has what the rows before it had when it was computed.
    row, before = wanted[0], wanted[0]
    assert relative_error(joined.cache[2]["key"][:, :, row], full[2]["key"][:, :, row]) < (
        relative_error(join(model, parts).cache[2]["key"][:, :, before], full[2]["key"][:, :, row])
    )


# --- told facts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled():
    return nanokv.load("tiny", dtype="float32")


def test_both_cuts_have_the_same_ids_and_values_that_can_be_told_apart(bundled):
    _, tokenizer = bundled
    talk = told(tokenizer, 0)
    ids = {cut: whole(talk.parts[cut]) for cut in CUTS}
    assert ids["whole"] == ids["cut"] and len(talk.parts["cut"]) == len(TELLS) + 1
    for question in talk.questions:
        assert len(set(question.values)) == 6
    values = {values for *_, values in TELLS}
    for part in talk.parts["cut"][1:]:
        text = tokenizer.decode(part)
        assert any(text.startswith(f" {value}.") for some in values for value in some.split())


def test_a_fact_that_is_cut_needs_the_part_before(bundled):
    """The bundled model, two talks: rotated keys alone know what chance knows (2 of 12)."""
    found = {(row.cut, row.way): row for row in rows(*bundled, 0.15, 2)}
    assert found["cut", FULL].known >= 10 and found["cut", FULL].keys == [0.0] * 6
    for way in (FAULT, TURNED):
        assert found["cut", way].known <= 6 and found["cut", way].computed == 0
    for way in ("most changed", "first of each part"):
        assert found["cut", way].known >= 9
        assert found["cut", way].keys[5] > 0.1, "known facts are not equal keys"
    assert found["cut", FAULT].keys[0] > 1 > 1e-4 > found["cut", TURNED].keys[0]
    assert found["cut", "most changed"].computed == pytest.approx((1 + 0.15 * 5) / 6)
    assert found["whole", TURNED].known >= 10


@pytest.mark.slow
def test_a_real_model_is_joined_exactly_in_layer_0_and_computed_exactly_in_all():
    """SmolLM2: one talk, 30 layers, sinks at the first token of each part."""
    model, tokenizer = nanokv.load(smollm2(), dtype="float32")
    parts = told(tokenizer, 0).parts["cut"]
    full = alone(model, whole(parts))
    joined = join(model, parts)
    assert worst(joined, full, 0) < 1e-5 and worst(joined, full, 29) > 0.1
    for choice in ("most changed", "first of each part"):
        joined = join(model, parts)
        CHOICES[choice](model, joined, 1.0)
        assert max(worst(joined, full, layer) for layer in range(30)) < 1e-4


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_tables_of_80_columns_and_json(cli):
    code, out, err = cli("blend", "--talks", "1")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) == 2 * 9 + 1
    code, out, err = cli("blend", "--talks", "1", "--share", "40", "--json")
    found = json.loads(out)
    assert (code, err, found["share"], len(found["rows"])) == (0, "", 0.4, 12)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--share", "101"], "--share: "),
        (["--talks", "0"], "--talks: "),
        (["-m", "nosuch"], "nosuch"),
    ],
)
def test_a_wrong_flag_is_one_line_and_a_hint(cli, words, told):
    code, out, err = cli("blend", *words)
    assert (code, out) == (2, "") and told in err and len(err.splitlines()) <= 2


def test_a_model_of_one_layer_is_refused(bundled):
    config = dataclasses.replace(small()[0].config, num_hidden_layers=1)
    model = type(small()[0])(config)
    with pytest.raises(NanoKVError, match="a model with 1 layer"):
        next(rows(model, bundled[1], 0.15, 1))


def test_a_model_with_states_is_refused():
    """Its layers have no keys that could be turned."""
    model = pair(**HYBRID["lfm2-G2"])[1]
    with pytest.raises(UnsupportedError, match="LFM2 has layers of its own"):
        next(rows(model, None, 0.15, 1))
    with pytest.raises(UnsupportedError, match="LFM2 has layers of its own"):
        join(model, [[1, 2], [3, 4]])
