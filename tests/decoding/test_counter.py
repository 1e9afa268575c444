"""Draws by a counter: known random words, frequencies of softmax, and no trace of the batch."""

import math

import pytest
import torch

from nanokv.decoding.counter import draw_rows, gumbel, philox, random_words

N = 20_000  # draws of a test of frequencies


def column(*numbers):
    return tuple(torch.tensor([number]) for number in numbers)


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_words_are_those_of_random123(counter, key, words):
    """The known answers of philox4x32 with 10 rounds, from the library of its authors
    (kat_vectors).
    """
    assert tuple(map(int, philox(column(*counter), column(*key)))) == words


def test_a_word_per_token_from_seed_and_position_alone():
    seeds, positions = torch.tensor([5, -1, 5, 2**40 + 5]), torch.tensor([7, 7, 8, 7])
    words = random_words(seeds, positions, 103)
    assert words.shape == (4, 103)
    assert words.min() >= 0 and words.max() < 2**32
    assert len(words.unique()) == words.numel()
    assert torch.equal(random_words(seeds[1:2], positions[1:2], 50), words[1:2, :50])


def draws(logits, seeds, positions, temperature=1.0):
    rows = logits.expand(len(seeds), -1)
    return draw_rows(rows, torch.full((len(seeds),), temperature), seeds, positions)[0]


def chi_square(counts, chances):
    """In standard deviations of its own distribution."""
    expected = chances * counts.sum()
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_are_those_of_softmax(vary, temperature):
    logits = torch.linspace(0, 4, 30)[torch.randperm(30, generator=torch.manual_seed(1))]
    numbers, fixed = torch.arange(N), torch.full((N,), 3)
    seeds, positions = (numbers, fixed) if vary == "seeds" else (fixed, numbers)
    counts = draws(logits, seeds, positions, temperature).bincount(minlength=30)
    assert abs(chi_square(counts, (logits / temperature).softmax(-1))) < 4


@pytest.mark.parametrize("step", [(0, 1), (1, 0)], ids=["position", "seed"])
def test_neighbours_are_independent(step):
    """Pairs of draws at a place and the next one: the table of 6 × 6 is that of two draws by
    themselves.
    """
    logits = torch.tensor([0.0, 0.5, 1.0, 1.0, 1.5, 2.0])
    places = torch.arange(0, 2 * N, 2)
    fixed = torch.full((N,), 11)
    first = (fixed, places) if step == (0, 1) else (places, fixed)
    second = tuple(part + more for part, more in zip(first, step, strict=True))
    pairs = draws(logits, *first) * 6 + draws(logits, *second)
    chances = torch.outer(logits.softmax(-1), logits.softmax(-1)).flatten()  # (36,)
    assert abs(chi_square(pairs.bincount(minlength=36), chances)) < 4


def test_noise_is_gumbels_up_to_its_tail():
    noise = gumbel(torch.arange(8), torch.arange(8), 150_001)
    assert noise.isfinite().all()
    for high in (0.0, 2.0, 6.0, 9.0):
        chance = 1 - math.exp(-math.exp(-high))
        expected = chance * noise.numel()
        found = (noise > high).sum()
        assert abs(found - expected) < 4 * math.sqrt(expected), high


def test_temperature_zero_takes_the_first_of_the_highest_and_inf_is_never_drawn():
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf]] * 500)
    seeds, positions = torch.arange(500), torch.arange(500)
    tokens, logprobs, highest = draw_rows(logits, torch.zeros(500), seeds, positions)
    assert (tokens == 1).all()
    assert (highest == 3).all()
    assert torch.equal(logprobs, logits.log_softmax(-1)[:, 1])
    assert set(draws(logits[0], seeds, positions, 50.0).tolist()) == {0, 1, 2}


def test_filtered_is_drawn_from_and_raw_is_reported():
    raw = torch.randn(200, 40, generator=torch.manual_seed(2))
    filtered = raw.masked_fill(torch.arange(40) % 8 > 0, -torch.inf)
    places = torch.arange(200)
    tokens, logprobs, highest = draw_rows(raw, torch.ones(200), places, places, filtered)
    assert set(tokens.tolist()) == {0, 8, 16, 24, 32}
    assert torch.equal(logprobs, raw.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])
    assert torch.equal(highest, filtered.amax(-1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_highest_shows_what_cannot_be_drawn(bad):
    logits = torch.zeros(1, 50)
    logits[0, 20] = bad
    one = torch.ones(1, dtype=torch.int64)
    highest = draw_rows(logits, torch.ones(1), one, one)[2]
    assert not highest.isfinite().any()
