"""sample.py against transformers' logits processors (5.23), on random logits, ties and edge values."""

import itertools
import math
import re
from functools import partial

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanokv.apps.cli.common.arguments import SETTINGS, parse_setting
from nanokv.apps.serve.api import protocol
from nanokv.apps.serve.api.errors import ApiError
from nanokv.cache import make_cache
from nanokv.decoding import sample as module
from nanokv.decoding.draw import SamplingParams, signed
from nanokv.decoding.generation import Generation
from nanokv.decoding.ranges import RANGES, chosen_seed
from nanokv.decoding.sample import logprob, sample
from nanokv.errors import GenerationError, NanoKVError
from oracle import SAMPLING, defaults
from small_model import small

pytestmark = pytest.mark.sampled

V = 97
KINDS = ("normal", "ties", "peaked", "flat", "masked", "huge")


def logits_of(kind, seed=0, rows=4):
    x = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3
    match kind:
        case "ties":
            x = x.round()  # about 15 different values: ties at every border
        case "peaked":
            x[:, 5] = 60.0
        case "flat":
            x = torch.zeros_like(x)
        case "masked":
            x[:, ::3] = -torch.inf
        case "huge":
            x = x * 1e4
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "values", "reference"),
    [
        ("temperature", [0.01, 0.6, 1.0, 1.7, 100.0], TemperatureLogitsWarper),
        ("top_k", [1, 2, 20, V - 1, V, V + 1, 10**9], TopKLogitsWarper),
        ("top_p", [0.0, 1e-9, 0.1, 0.5, 0.95, 0.999999, 1.0], TopPLogitsWarper),
        ("min_p", [0.0, 1e-9, 0.05, 0.5, 0.999, 1.0], MinPLogitsWarper),
    ],
)
def test_each_step_equals_transformers(kind, name, values, reference):
    for value, seed in itertools.product(values, range(5)):
        x = logits_of(kind, seed)
        kept = x.clone()
        assert torch.equal(getattr(module, name)(x, value), reference(value)(None, x.clone())), (
            value,
            seed,
        )
        assert torch.equal(x, kept), "the caller's logits were changed"


@pytest.mark.parametrize("kind", ["normal", "ties", "flat"])
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 7.0])
def test_repetition_penalty_equals_transformers(kind, penalty):
    """Once per distinct token: id 3 occurs three times here and must not be divided three times."""
    x = logits_of(kind)
    ids = torch.tensor([[3, 3, 9, 3, 0, 96]] * 4)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, x.clone())
    assert torch.equal(module.repetition_penalty(x, ids, penalty), theirs)


@pytest.mark.parametrize("kind", ["normal", "ties", "peaked", "flat", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_whole_chain_draws_what_transformers_draws(kind, dtype):
    """Same order of steps, same fp32, same use of the random stream: equal tokens for 200 seeded draws."""
    steps = {
        "temperature": 0.7,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.4,
    }
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    generator = torch.Generator().manual_seed(11)
    ours, theirs, previous = [], [], torch.tensor([[1, 2, 2, 50]] * 4)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        for seed in range(200):
            x = logits_of(kind, seed).to(dtype)
            ours.append(sample(x, **steps, previous=previous, generator=generator))
            scores = chain(previous, x.to(copy=True, dtype=torch.float32))
            theirs.append(torch.multinomial(scores.softmax(-1), 1).squeeze(1))
    assert torch.equal(torch.stack(ours), torch.stack(theirs))
    assert len(torch.unique(torch.stack(ours))) > 1 or kind == "peaked"


def test_temperature_zero_is_argmax_and_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    x = logits_of("ties")
    assert torch.equal(sample(x, top_k=5, top_p=0.5, generator=generator), x.argmax(-1))
    assert torch.equal(generator.get_state(), before)


def test_greedy_obeys_the_penalty():
    x = torch.tensor([[2.0, 1.9, -1.0]])
    assert sample(x, repetition_penalty=1.5, previous=torch.tensor([[0]])).item() == 1


def test_the_global_random_state_is_not_touched():
    """A second library that draws between two tokens must not change the answer, nor the other way round."""
    before = torch.get_rng_state()
    sample(logits_of("normal"), temperature=1.0, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_frequencies_follow_the_distribution():
    x = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20_000, 1)
    drawn = (
        sample(x, temperature=1.0, generator=torch.Generator().manual_seed(5)).bincount(minlength=3)
        / 20_000
    )
    assert torch.allclose(drawn, x[0].softmax(0), atol=0.015)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 1e-31),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("top_p", float("nan")),
        ("min_p", 1.1),
        ("min_p", -1e-9),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("top_p", None),
        ("repetition_penalty", float("inf")),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(GenerationError) as caught:
        sample(logits_of("normal"), **{name: value})
    assert (
        name in str(caught.value)
        and repr(value) in str(caught.value)
        and "must be" in str(caught.value)
    )


EDGES = {
    "temperature": (1e-30, 1e6),
    "top_k": (-1, 2**63 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "seed": (-(2**63), 2**64 - 1),
    "max_new_tokens": (1, 2**63 - 1),
    "max_ngram": (1, 2**63 - 1),
    "tokens": (1, 2**63 - 1),
    "layers": (1, 2**63 - 1),
    "top_logprobs": (0, 2**63 - 1),
}


@pytest.mark.parametrize("name", sorted(RANGES))
def test_both_ends_of_a_range_are_in_it_and_the_next_values_are_not(name):
    """2^63 − 1 and 2^64 − 1 are the largest that torch takes."""
    for edge, beyond in zip(EDGES[name], (-math.inf, math.inf), strict=True):
        module.check_sampling(**{name: edge})
        outside = (
            math.nextafter(edge, beyond)
            if type(edge) is float
            else edge + int(math.copysign(1, beyond))
        )
        with pytest.raises(
            GenerationError, match=rf"^{name} is {re.escape(repr(outside))}: it must be "
        ):
            module.check_sampling(**{name: outside})


@pytest.mark.parametrize("name", SETTINGS)
def test_the_command_line_and_the_server_take_what_the_library_takes(name):
    """`nanokv batch` gives its lines' values to the engine, which is the library."""
    asked = {"max_new_tokens": "max_tokens"}.get(name, name)
    low, high = EDGES[name]
    values = [
        low,
        high,
        0,
        1,
        -1,
        20,
        2**64 - 1,
        2**64,
        -(2**63),
        -(2**63) - 1,
        0.5,
        1e-31,
        1e7,
        1.5,
    ]
    right = [value for value in values if RANGES[name].holds(value)]
    assert 2 < len(right) < len(values)
    for value in values:
        check = (
            partial(SamplingParams, **{name: value})
            if asked == name
            else partial(check_max_new_tokens, value)
        )
        assert accepts(check) == (value in right), value
        assert accepts(partial(parse_setting, name, repr(value))) == (value in right), value
        request = {"messages": [{"role": "user", "content": "Hi"}], asked: value}
        assert accepts(partial(protocol.chat, request)) == (value in right), value


def check_max_new_tokens(value):
    module.check_sampling(max_new_tokens=value)


def accepts(check) -> bool:
    try:
        check()
    except (NanoKVError, ApiError):
        return False
    return True


@pytest.mark.parametrize("k", [0, -1])
def test_no_top_k_keeps_all(k):
    x = logits_of("ties")
    assert torch.equal(module.top_k(x, k), x)
    assert torch.equal(
        module.probabilities(x, temperature=1.0, top_k=k), module.probabilities(x, temperature=1.0)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unusable_logits_are_an_error_and_not_token_zero(temperature, bad):
    x = logits_of("normal")
    x[2, 40] = bad
    with pytest.raises(GenerationError, match="cannot be sampled"):
        sample(x, temperature=temperature)
    with pytest.raises(GenerationError, match="cannot be sampled"):
        sample(torch.full((1, 5), -torch.inf), temperature=temperature)


def test_a_temperature_beyond_fp32_is_named():
    with pytest.raises(GenerationError, match="too small"):
        sample(logits_of("huge") * 1e6, temperature=1e-30)


def test_the_likeliest_tokens_have_exactly_the_log_probabilities_of_logprob():
    x = logits_of("normal").bfloat16()
    rows = module.likeliest(x, 3)
    assert [[token for token, _ in row] for row in rows] == x.float().topk(3).indices.tolist()
    for place in range(3):
        tokens = torch.tensor([row[place][0] for row in rows])
        assert [row[place][1] for row in rows] == module.logprob(x, tokens).tolist()
    assert len(module.likeliest(x, 10_000)[0]) == x.shape[1]


def test_logprob_is_that_of_the_raw_logits():
    x = logits_of("normal").bfloat16()
    token = torch.tensor([0, 5, 9, 96])
    assert torch.allclose(
        logprob(x, token), x.float().log_softmax(-1)[torch.arange(4), token], atol=1e-6
    )


def test_temperature_zero_scales_nothing():
    with pytest.raises(GenerationError, match="temperature 0 is argmax and has no scaled logits"):
        module.temperature(logits_of("normal"), 0)


def test_a_seed_is_64_bits_with_or_without_a_sign():
    """A negative one is the same bits as a large one; -1 asks for a drawn one."""
    seeds = [0, 5, 2**63 - 1, 2**63, 2**64 - 2]
    assert [chosen_seed(seed) for seed in seeds] == seeds
    assert [signed(seed) for seed in seeds] == [0, 5, 2**63 - 1, -(2**63), -2]
    assert [chosen_seed(signed(seed)) for seed in seeds] == seeds
    assert chosen_seed(-1) is chosen_seed(None) is None


def test_who_says_nothing_gets_the_likeliest_token():
    assert defaults(sample) == SAMPLING | {"previous": None, "generator": None}
    assert defaults(module.probabilities) == SAMPLING | {"previous": None}


def test_top_p_of_a_few_is_top_p_of_all(monkeypatch):
    """After top-k only what is left is sorted: the same tokens stay as when all are, ties and thin margins included."""
    generator, rows = torch.Generator().manual_seed(1), []
    for i in range(600):
        logits = torch.randn(1, 5 + i * 3, generator=generator) * (1 + i % 5)
        logits = (logits * 2).round() / 2 if i % 3 == 0 else logits  # many equals
        p = (0.0, 0.5, 0.9, 0.95, 1.0, float(torch.rand(1, generator=generator)))[i % 6]
        rows.append((module.top_k(logits, 1 + i % 40), p))
    short = [module.top_p(*row) for row in rows]
    taken = sum(module._nucleus_of_few(*row) is not None for row in rows)
    monkeypatch.setattr(module, "_nucleus_of_few", lambda logits, p: None)
    assert all(torch.equal(few, module.top_p(*row)) for few, row in zip(short, rows, strict=True))
    assert 300 < taken < 600  # both ways were gone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ranges_are_checked_where_values_enter_and_not_at_every_token(temperature, monkeypatch):
    """Twice per token and once more in each filter, before."""
    model, _ = small()
    params = SamplingParams(temperature, 5, 0.9, 0.1, 1.2, seed=1)
    generation = Generation(
        model, [1, 2, 3], make_cache("dict", model.config), params, max_new_tokens=4
    )
    checked = []
    monkeypatch.setattr(module, "check_sampling", lambda **values: checked.append(values))
    assert len(list(generation)) == 4 and checked == []
    sample(torch.zeros(1, 5), temperature, 5, 0.9)
    assert len(checked) == 1
