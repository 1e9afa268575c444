"""Speculative decoding: the same greedy text on every cache, the same distribution when sampling, and honest counts.

The oracles are plain decoding (itself equal to transformers), transformers' PromptLookupCandidateGenerator and
_speculative_sampling, and for the distribution an enumeration of every continuation. The chi-square tests have fixed
seeds; under other seeds each would fail by chance once in a million runs (FALSE_ALARM).
"""

import copy
import itertools
from functools import partial

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.utils import _speculative_sampling

import nanokv.decoding.speculative as module
from nanokv.apps.cli import main
from nanokv.cache import CACHES, PagePool, make_cache
from nanokv.chat.session import Session
from nanokv.decoding.generation import Generation, SamplingParams, TextStream, generate
from nanokv.decoding.sample import probabilities
from nanokv.decoding.speculative import (
    Draft,
    DraftModel,
    EarlyExit,
    PromptLookup,
    Speculation,
    first_layers,
    speculate,
)
from nanokv.errors import CapacityError, ContextError, GenerationError
from nanokv.inference import prefill, score, verify_draft
from nanokv.loading import load
from oracle import ANSWER, SAMPLING, TOLERANCE, defaults, gap, pair, random_ids, reference_logits

pytestmark = pytest.mark.sampled

V = 151
FALSE_ALARM = 1e-6
CAPACITY = 64
TIGHT = {  # caches that go on losing something: small enough that it happens in a short test
    "sliding": {"window": 20},
    "quantized": {"bits": 4, "group": 4, "residual": 6},
    "paged": {"page": 4},
    "prefix": {"page": 4},
}


@pytest.fixture(scope="module")
def models():
    return pair(seed=3)


@pytest.fixture
def model(models):
    return models[1]


def prompt(seed, length):
    return random_ids(seed, 1, length)[0].tolist()


class Scripted(Draft):
    """Knows what comes, and is wrong at random with the given chance: runs of every accepted length."""

    def __init__(self, text, wrong=0.3, tokens=5, seed=0):
        self.text, self.wrong, self.tokens = text, wrong, tokens
        self.random, self.asked = torch.Generator().manual_seed(seed), []

    def propose(self, ids, count, distribution, generator):
        self.asked.append(count)
        assert ids == self.text[: len(ids)], (
            "the draft is told another text than what was generated"
        )
        guesses = self.text[len(ids) : len(ids) + min(count, self.tokens)]
        lies = torch.rand(len(guesses), generator=self.random) < self.wrong
        return [
            (x + 1) % V if lie else x for x, lie in zip(guesses, lies.tolist(), strict=True)
        ], None


def contents(cache):
    return [{name: x.clone() for name, x in layer.state().items()} for layer in cache]


def close_contents(a, b):
    return all(
        x.keys() == y.keys() and all(alike(x[k], y[k]) for k in x)
        for x, y in zip(a, b, strict=True)
    )


def alike(x, y):
    """Equal to the last bits; one of these may decide how a value is rounded to a code, so a few codes may differ."""
    if x.dtype == torch.uint8:
        return x.shape == y.shape and (x != y).float().mean() < 0.005
    return x.shape == y.shape and torch.allclose(x.float(), y.float(), atol=2e-3)


# --- the parts ------------------------------------------------------------------------------------------------------


def test_lookup_equals_transformers():
    """Leftmost match, long n-grams first, the last words are no match of themselves, the guess may be cut short."""
    generator = torch.Generator().manual_seed(0)
    found = 0
    for case in range(300):
        length = int(torch.randint(1, 40, (1,), generator=generator))
        ids = torch.randint(0, 3 + case % 9, (1, length), generator=generator)
        size, tokens = 1 + case % 4, 1 + case % 7
        theirs = PromptLookupCandidateGenerator(
            None, tokens, size, max_length=10_000
        ).get_candidates(ids)[0]
        guesses, q = PromptLookup(max_ngram=size, tokens=tokens).propose(ids[0].tolist(), 100)
        assert ids[0].tolist() + guesses == theirs[0].tolist() and q is None, (case, size, tokens)
        found += bool(guesses)
    assert found > 150


@pytest.mark.parametrize("name", CACHES)
def test_verify_gives_the_logits_of_every_position(model, name):
    ids, cache = random_ids(1, 1, 15), make_cache(name, model.config, capacity=CAPACITY)
    expected = score(model, ids)
    assert gap(verify_draft(model, ids[:, :6], cache, 0), expected[:, :6]) <= TOLERANCE
    assert gap(verify_draft(model, ids[:, 6:7], cache, 6), expected[:, 6:7]) <= TOLERANCE
    assert (
        gap(verify_draft(model, ids[:, 7:], cache, 7), expected[:, 7:]) <= TOLERANCE
        and cache.length == 15
    )
    with pytest.raises(ValueError, match="start_pos"):
        verify_draft(model, ids, cache, 3)


@pytest.mark.parametrize("layers", [1, 2])
def test_an_early_exit_is_the_shallow_model_on_the_same_tensors(models, layers):
    reference, ours = models
    shallow = copy.deepcopy(reference)
    shallow.model.layers = shallow.model.layers[:layers]
    view, ids = first_layers(ours, layers), random_ids(2, 2, 9)
    assert gap(score(view, ids), reference_logits(shallow, ids)) <= TOLERANCE
    mine = {x.data_ptr() for x in ours.parameters()}
    assert {x.data_ptr() for x in view.parameters()} < mine, "a copy was made"
    assert view.config.num_hidden_layers == len(view.layers) == layers and len(ours.layers) == 3


def test_the_rule_equals_transformers():
    """Same random stream, same verdict and same token, from all accepted to none."""
    kept = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        n = 1 + seed % 5
        p = torch.randn(1, n + 1, 11, generator=generator) * 2
        q = p[:, :n] + torch.randn(1, n, 11, generator=generator)
        guesses = torch.multinomial(q[0].softmax(-1), 1, generator=generator).T  # (1,n)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            tokens, matches = _speculative_sampling(guesses, q, n, p)
        ours = module.speculative_sample(
            guesses[0].tolist(),
            q[0].softmax(-1),
            p[0].softmax(-1),
            torch.Generator().manual_seed(seed),
        )
        assert ours == (int(matches), int(tokens[0, -1])), seed
        kept.append(ours[0] == n)
    assert 20 < sum(kept) < 180


# --- greedy: the same text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("options", ["default", "tight"])
def test_greedy_is_plain_decoding_on_every_cache(model, name, options):
    """Token for token; afterwards the cache holds what plain decoding leaves in it, quantized codes included."""
    values = TIGHT.get(name, {}) if options == "tight" else {}
    for ids in (prompt(5, 1), prompt(6, 14)):
        expected_cache = make_cache(name, model.config, capacity=CAPACITY, **values)
        expected = list(generate(model, ids, expected_cache, max_new_tokens=45))
        lookup, early = PromptLookup(tokens=4), EarlyExit(model, 2, tokens=3)
        for draft in (lookup, early, Scripted(ids + expected, seed=len(ids))):
            cache = make_cache(name, model.config, capacity=CAPACITY, **values)
            tokens = speculate(model, ids, draft, cache, max_new_tokens=45)
            assert list(tokens) == expected, type(draft).__name__
            assert {layer.length for layer in cache} == {expected_cache.length}
            assert close_contents(contents(cache), contents(expected_cache)), type(draft).__name__
            assert draft is early or tokens.report.forwards_saved > 0


def test_a_quantized_cache_is_guessed_for_only_until_its_next_block(model):
    """A longer guess would quantize its own rejected tokens, or let the first of them see what should be codes."""
    cache = make_cache("quantized", model.config, group=8, residual=4)
    assert cache.sizes.max_rollback == 12
    prefill(model, [prompt(1, 9)], cache)
    assert cache.sizes.max_rollback == 3
    prefill(model, [prompt(1, 9)], cache, 9)
    assert cache.sizes.max_rollback == 12 - 18 + 8
    assert len(cache[0].blocks) == 0  # the next append finds a block to quantize
    window = make_cache("sliding", model.config, window=8, sinks=2)
    prefill(model, [prompt(1, 6)], window)
    assert window.sizes.max_rollback == 3
    verify_draft(model, [prompt(2, 3)], window, 6)
    window.truncate(6)
    verify_draft(model, [prompt(2, 4)], window, 6)
    assert (
        window.sizes.max_rollback == 0
        and make_cache("dict", model.config).sizes.max_rollback is None
    )


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_the_penalty_counts_the_guesses_before(model, penalty):
    """Also within a run: the third guess is judged with the first two already counted."""
    ids = prompt(8, 6)
    expected = list(generate(model, ids, max_new_tokens=40, repetition_penalty=penalty))
    for draft in (
        Scripted(ids + expected),
        Scripted(ids + expected, wrong=0),
        DraftModel(model),
        PromptLookup(1),
    ):
        tokens = speculate(model, ids, draft, max_new_tokens=40, repetition_penalty=penalty)
        assert list(tokens) == expected
        if isinstance(draft, DraftModel):
            assert tokens.report.acceptance_rate == 1, "the draft was not penalised in the same way"


def test_an_eos_in_the_middle_of_a_run_ends_it_there(model):
    ids = prompt(7, 5)
    free = list(generate(model, ids, max_new_tokens=20, eos_token_ids=[]))
    for eos in sorted(set(free)):
        cut, cache = free[: free.index(eos) + 1], make_cache("static", model.config, capacity=40)
        tokens = speculate(
            model, ids, Scripted(ids + free, wrong=0, tokens=6), cache, 20, eos_token_ids=[eos]
        )
        assert list(tokens) == cut and tokens.report.finish_reason == "stop"
        assert {layer.length for layer in cache} == {len(ids) + len(cut) - 1}
        assert list(generate(model, cut[-1:], cache, 5, eos_token_ids=[])) == list(
            generate(model, ids + cut, max_new_tokens=5, eos_token_ids=[])
        )


class Fixed(Draft):
    """Guesses the same words whatever was said."""

    def __init__(self, words):
        self.words = words

    def propose(self, ids, count, distribution, generator):
        return self.words[:count], None


def test_guesses_after_an_eos_are_not_even_checked(model):
    """They could not be used: the forward feeds them for nothing, and they would count as refused."""
    ids = prompt(7, 5)
    free = list(generate(model, ids, max_new_tokens=4, eos_token_ids=[]))
    eos = next(id for id in range(V) if id not in free)
    for words in ([free[1], eos, 3, 4, 5], [eos, eos, eos, eos, eos]):
        tokens = speculate(model, ids, Fixed(words), max_new_tokens=8, eos_token_ids=[eos])
        next(tokens), next(tokens)
        assert tokens.report.rounds == [(words.index(eos) + 1, words.index(eos))]


def test_a_long_prompt_is_prefilled_in_parts(model, monkeypatch):
    """One forward for all of it would need a T×S mask and T rows of the MLP at once."""
    monkeypatch.setattr("nanokv.decoding.generation.prefill_chunk", lambda model: 4)
    shapes, ids = [], prompt(7, 11)
    hook = model.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape[1]))
    try:
        assert next(speculate(model, ids, PromptLookup())) == next(generate(model, ids))
    finally:
        hook.remove()
    assert shapes[:3] == [4, 4, 3]


@pytest.mark.parametrize("n", range(1, 14))
def test_no_more_than_max_new_tokens_and_no_guess_that_could_not_be_used(model, n):
    ids = prompt(9, 4)
    expected = list(generate(model, ids, max_new_tokens=30))
    draft, cache = Scripted(ids + expected, wrong=0, tokens=6), make_cache("dict", model.config)
    tokens = speculate(model, ids, draft, cache, max_new_tokens=n)
    assert list(tokens) == expected[:n] and tokens.report.finish_reason == "length"
    assert (
        cache.length == 4 + n - 1
        and sum(proposed + 1 for proposed, _ in tokens.report.rounds) == n - 1
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("static", {}),
        ("paged", {"page": 4, "pages": 5}),
        ("prefix", {"page": 4, "pages": 5}),
    ],
)
def test_guesses_never_overflow_the_cache(model, name, options):
    for length in (1, 5, 18, 19, 20):
        ids = prompt(10, length)
        plain = Generation(
            model, ids, make_cache(name, model.config, capacity=20, **options), max_new_tokens=50
        )
        expected = [step.token for step in plain]
        script = list(generate(model, ids, max_new_tokens=40))
        cache = make_cache(name, model.config, capacity=20, **options)
        tokens = speculate(
            model, ids, Scripted(ids + script, wrong=0.2, tokens=9), cache, max_new_tokens=50
        )
        assert list(tokens) == expected and len(expected) == 21 - length
        assert tokens.report.finish_reason == "context" and cache.length == 20
    with pytest.raises(ContextError, match="needs 21 of 20"):
        speculate(
            model, [1] * 21, PromptLookup(), make_cache(name, model.config, capacity=20, **options)
        )


def test_the_models_context_is_a_limit_for_target_and_draft():
    _, model = pair(seed=1, max_position_embeddings=24)
    _, short = pair(seed=1, max_position_embeddings=16)
    ids = prompt(1, 5)
    expected = list(generate(model, ids, max_new_tokens=50))
    assert len(expected) == 24 - 5 + 1
    little = make_cache("static", model.config, capacity=9)
    for draft in (DraftModel(model, tokens=7), DraftModel(short), DraftModel(model, little)):
        tokens = speculate(model, ids, draft, max_new_tokens=50)
        assert list(tokens) == expected and tokens.report.accepted > 0
        assert draft.cache.length <= 24


def test_a_pool_that_others_emptied_still_gives_its_last_page(model):
    """Plain decoding fits; the guesses would not: they are given up, not the answer."""
    ids = prompt(11, 7)
    expected = list(generate(model, ids, max_new_tokens=9))
    pool = PagePool(model.config, 8, 4)
    other, cache = (make_cache("paged", model.config, pool=pool) for _ in "ab")
    prefill(model, [prompt(1, 16)], other)
    tokens = speculate(
        model, ids, Scripted(ids + expected, wrong=0, tokens=12), cache, max_new_tokens=9
    )
    got = [next(tokens)]
    # 6 pages of 8 are gone now, and the cache has the other two.
    prefill(model, [prompt(1, 5)], other, 16)
    assert len(pool.free) == 0
    got.append(next(tokens))
    assert got == expected[:2] and tokens.report.rounds == [(0, 0)] and cache.length == 8
    with pytest.raises(CapacityError, match="exhausted"):
        next(tokens)
    assert {layer.length for layer in cache} == {8}
    other.free()
    assert got + list(generate(model, got[-1:], cache, max_new_tokens=7)) == expected


# --- what can go wrong on the way -----------------------------------------------------------------------------------


class Boom(Exception):
    """An injected failure."""


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("call", [2, 4])
def test_a_failed_check_leaves_a_cache_that_can_be_continued(
    model, monkeypatch, layer, call, error
):
    ids, cache = prompt(12, 6), make_cache("static", model.config, capacity=CAPACITY)
    expected = list(generate(model, ids, max_new_tokens=25))
    real, seen, got = model.layers[layer].forward, [], []

    def forward(*args):
        seen.append(1)
        if len(seen) == call:
            raise error("injected")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(model.layers[layer], "forward", forward)
        with pytest.raises(error, match="injected"):
            for token in speculate(model, ids, Scripted(ids + expected), cache, max_new_tokens=25):
                got.append(token)
    assert got == expected[: len(got)] and {layer.length for layer in cache} == {6 + len(got) - 1}
    assert got + list(generate(model, got[-1:], cache, max_new_tokens=25 - len(got))) == expected


@pytest.mark.parametrize("call", [1, 2, 9])
def test_a_failed_draft_can_be_asked_again(model, monkeypatch, call):
    """Its own layers are of unequal length then; the target's cache is as after the last whole token."""
    _, small = pair(seed=8, num_hidden_layers=2)
    ids, cache, draft, got = (
        prompt(13, 6),
        make_cache("dict", model.config),
        DraftModel(small, tokens=3),
        [],
    )
    expected = list(generate(model, ids, max_new_tokens=20))
    real, seen = small.layers[1].forward, []

    def forward(*args):
        seen.append(1)
        if len(seen) == call:
            raise Boom("injected")
        return real(*args)

    monkeypatch.setattr(small.layers[1], "forward", forward)
    with pytest.raises(Boom):
        for token in speculate(model, ids, draft, cache, max_new_tokens=20):
            got.append(token)
    assert {layer.length for layer in cache} == {6 + len(got) - 1}
    rest = Speculation(
        model, got[-1:], cache, max_new_tokens=20 - len(got), draft=draft, history=(ids + got)[:-1]
    )
    assert got + [step.token for step in rest] == expected
    assert {layer.length for layer in draft.cache} == {len(draft.fed)}


@pytest.mark.parametrize("taken", range(1, 9))
def test_closing_in_the_middle_of_a_run_forgets_what_nobody_took(model, taken):
    ids, cache = prompt(14, 6), make_cache("growing", model.config)
    expected = list(generate(model, ids, max_new_tokens=15))
    tokens = speculate(
        model, ids, Scripted(ids + expected, wrong=0, tokens=5), cache, max_new_tokens=15
    )
    got = list(itertools.islice(tokens, taken))
    tokens.close()
    assert {layer.length for layer in cache} == {6 + taken - 1} and list(tokens) == []
    assert got + list(generate(model, got[-1:], cache, max_new_tokens=15 - taken)) == expected


def test_should_stop_is_read_between_the_tokens_of_a_run(model):
    ids, cache, seen = prompt(15, 6), make_cache("dict", model.config), []
    draft = Scripted(ids + list(generate(model, ids, max_new_tokens=15)), wrong=0)
    for step in Speculation(
        model, ids, cache, max_new_tokens=15, draft=draft, should_stop=lambda: len(seen) == 3
    ):
        seen.append(step.token)
    assert len(seen) == 3 and cache.length == 6 + 3 - 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: PromptLookup(max_ngram=0), "max_ngram is 0"),
        (lambda m: PromptLookup(tokens=1.5), "tokens is 1.5"),
        (lambda m: EarlyExit(m, 3), "after 3 of 3 layers: 1 to 2"),
        (lambda m: EarlyExit(m, 0), "layers is 0"),
        (
            lambda m: speculate(m, [1], DraftModel(pair(vocab_size=60)[1])),
            "has 60 tokens, the model's 151",
        ),
        (lambda m: speculate(m, [], PromptLookup()), "empty"),
        (lambda m: speculate(m, [1], PromptLookup(), top_p=3.0), "top_p is 3.0"),
    ],
)
def test_wrong_values_raise_at_the_call(model, make, words):
    with pytest.raises(GenerationError, match=words):
        make(model)


def test_who_says_nothing_gets_the_guesses_of_the_documentation():
    assert defaults(speculate) == ANSWER | SAMPLING | {"seed": None, "cache": None}
    assert defaults(PromptLookup) == {"max_ngram": 2, "tokens": 10}
    assert defaults(DraftModel) == defaults(EarlyExit) == {"cache": None, "tokens": 4}


# --- the counts -----------------------------------------------------------------------------------------------------


def test_the_counts_are_those_of_the_forwards(model, monkeypatch):
    ids, forwards = prompt(16, 6), []
    expected = list(generate(model, ids, max_new_tokens=31))
    for name in ("verify_draft", "decode"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda m, x, c, start_pos, real=real: (
                forwards.append(x.shape[1]),
                real(m, x, c, start_pos),
            )[1],
        )
    tokens = speculate(model, ids, Scripted(ids + expected, wrong=0.4), max_new_tokens=31)
    report = tokens.report
    assert list(tokens) == expected and forwards == [proposed + 1 for proposed, _ in report.rounds]
    assert report.forwards_saved == 30 - len(forwards) == report.accepted > 5
    assert report.proposed == sum(forwards) - len(forwards) and 0 < report.acceptance_rate < 1
    assert (
        report.acceptance_rate
        == report.accepted / report.proposed
        == report.speculation["acceptance_rate"]
    )


def test_a_draft_model_computes_what_its_cache_does_not_hold(model, monkeypatch):
    """One decode per guess; the prompt, and what the check added, once."""
    ids, fed = prompt(16, 6), []
    for name in ("prefill_chunks", "decode"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda m, x, c, start_pos, real=real, **more: (
                fed.append((start_pos, len(x[0]))),
                real(m, x, c, start_pos=start_pos, **more),
            )[1],
        )
    draft = DraftModel(model, tokens=3)

    def guess(ids, count):
        return draft.propose(
            ids, count, lambda logits, guesses: probabilities(logits, temperature=0), None
        )[0]

    first = guess(ids, 3)
    assert fed == [(0, 6), (6, 1), (7, 1)]
    # The second guess was wrong, and a token came with the check.
    guess(ids + first[:1] + [first[1] ^ 1, 5], 2)
    assert fed[3:] == [(7, 2), (9, 1)]


def test_steps_carry_the_raw_logprobs(model):
    ids = prompt(17, 6)
    plain = list(Generation(model, ids, make_cache("dict", model.config), max_new_tokens=20))
    draft = Scripted(ids + [step.token for step in plain])
    ours = list(
        Speculation(model, ids, make_cache("dict", model.config), max_new_tokens=20, draft=draft)
    )
    assert [step.token for step in ours] == [step.token for step in plain]
    assert torch.allclose(
        torch.tensor([s.logprob for s in ours]), torch.tensor([s.logprob for s in plain]), atol=1e-4
    )


# --- sampling: the same distribution --------------------------------------------------------------------------------


def chi_square(counts, expected):
    """Probability of counts this far from `expected` (probabilities) or farther; rare cells are thrown together."""
    expected = expected.double() * counts.sum()
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    distance = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), distance / 2)
    )


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_two_tokens_of_the_rule_follow_the_target(certain):
    """Tables for p and q, 4,000 pairs: first token and, from the table of the first, the second."""
    generator, size, n = torch.Generator().manual_seed(1), 5, 4_000
    p1, p2, p3 = (
        torch.randn(*shape, size, generator=generator).mul(1.5).softmax(-1)
        for shape in ((), (5,), (5, 5))
    )
    q1, q2 = (torch.randn(*shape, size, generator=generator).softmax(-1) for shape in ((), (5,)))
    counts, accepted = torch.zeros(size, size), [0, 0, 0]
    for _ in range(n):
        a = int(p1.argmax() if certain else torch.multinomial(q1, 1, generator=generator))
        b = int(p2[a].argmax() if certain else torch.multinomial(q2[a], 1, generator=generator))
        q, p = None if certain else torch.stack((q1, q2[a])), torch.stack((p1, p2[a], p3[a, b]))
        kept, token = module.speculative_sample([a, b], q, p, generator)
        accepted[kept] += 1
        pair_ = [*[a, b][:kept], token]
        if len(pair_) == 1:  # the second comes from the next round; here, from the target itself
            pair_.append(int(torch.multinomial(p2[token], 1, generator=generator)))
        counts[pair_[0], pair_[1]] += 1
    assert min(accepted) > 100
    joint = p1[:, None] * p2
    assert chi_square(counts.flatten(), joint.flatten()) > FALSE_ALARM
    assert chi_square(counts.flatten(), (0.8 * joint + 0.2 / size**2).flatten()) < FALSE_ALARM, (
        "no power"
    )


@pytest.fixture(scope="module")
def four_words():
    """Target, and a smaller draft: a vocabulary of 4, so that every continuation can be enumerated."""
    shape = {
        "vocab_size": 4,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "initializer_range": 0.5,
    }
    return pair(seed=2, num_hidden_layers=2, **shape)[1], pair(
        seed=9, num_hidden_layers=1, **shape
    )[1]


def joint_of_tokens_2_to_4(model, ids, values):
    """Exact (4,4,4), summed over the first token, from a forward without a cache over all 256 continuations."""
    paths = torch.tensor(list(itertools.product(range(4), repeat=4)))  # (256,4)
    text = torch.cat((torch.tensor(ids).expand(256, -1), paths), 1)
    logits, chance = score(model, text), torch.ones(256)
    for i in range(4):
        at = len(ids) + i
        p = probabilities(logits[:, at - 1], **values, previous=text[:, :at])
        chance = chance * p.gather(1, paths[:, i : i + 1])[:, 0]
    return chance.view(4, 64).sum(0)


FILTERS = {"temperature": 1.4, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.5}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("draft", {"temperature": 1.0}),
        ("early-exit", FILTERS),
        ("lookup", FILTERS),
    ],
    ids=["draft", "early-exit", "lookup"],
)
@pytest.mark.slow
def test_whole_answers_follow_the_target(four_words, kind, values):
    """600 answers of four tokens each through models, cache, filters and rule, against the enumeration."""
    target, small = four_words
    draft = {
        "draft": lambda: DraftModel(small),
        "early-exit": lambda: EarlyExit(target, 1),
        "lookup": lambda: PromptLookup(max_ngram=1),
    }[kind]()
    ids, counts, accepted, proposed = [0, 1, 2, 3, 0], torch.zeros(64), 0, 0
    for seed in range(600):
        tokens = speculate(
            target, ids, draft, max_new_tokens=4, seed=seed, eos_token_ids=[], **values
        )
        _, a, b, c = tokens
        counts[16 * a + 4 * b + c] += 1
        accepted, proposed = accepted + tokens.report.accepted, proposed + tokens.report.proposed
    assert min(accepted, proposed - accepted) > 100, (
        "both branches of the rule must have been taken"
    )
    exact = joint_of_tokens_2_to_4(target, ids, values)
    assert chi_square(counts, exact) > FALSE_ALARM
    assert counts[exact == 0].sum() == 0, "a token that the filters forbid"


def test_the_same_seed_repeats(model):
    ids, values = prompt(18, 6), {"max_new_tokens": 20, "temperature": 1.0}
    first = list(speculate(model, ids, EarlyExit(model, 1), seed=4, **values))
    assert first == list(speculate(model, ids, EarlyExit(model, 1), seed=4, **values))
    assert first != list(speculate(model, ids, EarlyExit(model, 1), seed=5, **values))


# --- text, chat and command line ------------------------------------------------------------------------------------


def test_a_stop_string_inside_a_run_and_a_second_turn(tiny_folder):
    model, tokenizer = load(tiny_folder)
    plain = Session(model, tokenizer, params={"max_new_tokens": 24})
    ours = Session(
        model,
        tokenizer,
        params={"max_new_tokens": 24},
        make_generation=partial(Speculation, draft=DraftModel(model)),
    )
    for words in ("Once upon a time", "And then?"):
        assert plain.ask(words) == ours.ask(words) and plain.last.ids == ours.last.ids
        assert plain.cached_ids == ours.cached_ids and ours.cache.length == len(ours.cached_ids)
    assert ours.last.speculation["acceptance_rate"] == 1 and plain.last.speculation == {}
    ids, cache = tokenizer.encode("Once upon a time"), make_cache("dict", model.config)
    text = tokenizer.decode(list(generate(model, ids, max_new_tokens=24)))
    generation = Speculation(
        model, ids, cache, SamplingParams(), 24, draft=DraftModel(model, tokens=9)
    )
    stream = TextStream(generation, tokenizer, stop=text[5:7])
    assert text.startswith("".join(stream)) and stream.finish_reason == "stop_string"
    assert {layer.length for layer in cache} == {len(ids) + len(generation.tokens) - 1}


@pytest.fixture
def cli(monkeypatch, capsys, tiny_folder):
    for name in ("NANOKV_MODEL", "NANOKV_THREADS", "NANOKV_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.stdin", None)

    def call(*argv):
        code = main(
            [
                "generate",
                "-m",
                str(tiny_folder),
                "--prompt",
                "once upon a time once upon",
                "-n",
                "20",
                *argv,
            ]
        )
        return code, *capsys.readouterr()

    return call


def test_the_flag_changes_the_work_and_not_the_text(cli, tiny_folder):
    code, plain, status = cli()
    assert code == 0 and "guesses" not in status
    for how in ("ngram", "ngram:3", "early-exit:1", f"draft:{tiny_folder}"):
        code, out, status = cli("--speculate", how, "--cache", "static")
        assert (
            (code, out) == (0, plain) and "guesses right" in status and "forwards saved" in status
        ), how
    assert "(100%), " in status, "the model guesses itself"
    assert '"speculation": {"proposed": ' in cli("--speculate", "ngram", "--json")[1]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("medusa", "is not one of ngram[:N], early-exit:K, draft:MODEL"),
        ("early-exit", "early-exit:K"),
        ("ngarm", "did you mean ngram[:N]?"),
        ("ngram:0", "whole number"),
        ("early-exit:x", "'x' is not a whole number"),
        ("early-exit:99", "an early exit after 99 of"),
        ("draft:/nowhere/model", "/nowhere/model"),
        ("draft:", "draft:MODEL"),
    ],
)
def test_a_wrong_flag_is_named(cli, how, words):
    code, out, err = cli("--speculate", how)
    assert (code, out) == (2, "") and err.startswith("nanokv: error: ") and words in err
