"""The budget of prompt tokens beside decodes, by a clock that the tests turn: nothing here is timed."""

import pytest

from engines import all_free, alone
from nanokv.engine import Engine
from nanokv.engine.budget import FIRST_PAGES, IN_A_ROW, StepBudget, power_of_two
from nanokv.engine.engine import decode, prefill_packed
from oracle import SHAPES, pair, random_ids

PAGE, STEP = 4, 256
SAMPLED = {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-tied"])[1]


def prompt(seed: int, tokens: int) -> list[int]:
    return random_ids(seed, 1, tokens)[0].tolist()


# --- the numbers --------------------------------------------------------------------------------------------------


def learnt(decode_s: float, token_s: float, tokens: int = 64, most: int = STEP) -> StepBudget:
    budget = StepBudget(PAGE, most)
    budget.note(decode_s, 0, 8)
    budget.note(decode_s + token_s * tokens, tokens, 8)
    return budget


def test_the_first_step_only_decodes_and_the_first_chunk_has_two_pages():
    budget = StepBudget(PAGE, STEP)
    assert budget.prompt_tokens == 0
    budget.note(5.0, 40, 0)  # no stream has waited for this step
    budget.note(5.0, 40, 3)  # d is not known
    assert budget.prompt_tokens == 0
    budget.note(1.0, 0, 3)
    assert budget.prompt_tokens == FIRST_PAGES * PAGE == 8


@pytest.mark.parametrize(
    ("token_s", "tokens"),
    [
        (1 / 24, 32),  # 1.5·d / c is 36, rounded down
        (1 / 42, 32),
        (1 / 43, 64),
        (2.0, PAGE // 2),  # a token costs two decodes: half a page all the same
        (1 / 1000, STEP),
        (0.0, STEP),  # too short to be seen
    ],
)
def test_prompts_make_a_step_longer_by_one_and_a_half_decodes(token_s, tokens):
    assert learnt(1.0, token_s).prompt_tokens == tokens
    assert learnt(0.01, token_s / 100).prompt_tokens == tokens


def test_a_small_step_is_the_bound():
    assert learnt(1.0, 0.0, most=100).prompt_tokens == 64
    assert learnt(1.0, 9.0, most=3).prompt_tokens == 2


@pytest.mark.parametrize(
    ("number", "power"), [(1, 1), (2, 2), (3, 2), (63, 32), (64, 64), (600, 512)]
)
def test_power_of_two(number, power):
    assert power_of_two(number) == power


def test_a_chunk_of_few_tokens_has_little_weight():
    """The last three tokens of a prompt take as long as a page: c must not follow them."""
    budget = learnt(1.0, 1 / 32)
    budget.note(1.5, 3, 8)
    assert budget.prompt_tokens == 32 and 1.5 / (0.5 / 3) < 16


def test_means_follow_what_has_changed():
    budget = learnt(1.0, 1 / 32)
    for _ in range(12):
        budget.note(4.0, 0, 30)
    assert budget.prompt_tokens == 128  # d is nearly 4: 2·d / c is just below 256
    for _ in range(12):
        budget.note(4.0 + 64 / 4, 64, 30)
    assert budget.prompt_tokens == 16  # c is nearly ¼ now: just below 32


def test_after_many_steps_with_prompts_one_only_decodes():
    budget = learnt(1.0, 1 / 24)
    for _ in range(IN_A_ROW - 1):
        assert budget.prompt_tokens == 32
        budget.note(1 + 32 / 24, 32, 8)
    assert budget.prompt_tokens == 0
    budget.note(1.0, 0, 8)
    assert budget.prompt_tokens == 32


# --- the engine ---------------------------------------------------------------------------------------------------


class Clock:
    """Its time goes on by the work: 1 per decode step, 1/24 per token of a prompt."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.chunks: list[list[int]] = []  # tokens per prompt, of each step that prefills
        monkeypatch.setattr("nanokv.engine.engine.decode", self.decode)
        monkeypatch.setattr("nanokv.engine.engine.prefill_packed", self.prefill)

    def __call__(self) -> float:
        return self.now

    def decode(self, *arguments):
        self.now += 1.0
        return decode(*arguments)

    def prefill(self, model, parts, *arguments):
        self.chunks.append([len(part) for part in parts])
        self.now += sum(self.chunks[-1]) / 24
        return prefill_packed(model, parts, *arguments)


def beside_streams(model, clock, **sizes):
    """(longest step, requests) of three streams, beside which prompts of 230 and 150 tokens come."""
    engine = Engine(model, pages=300, page_size=PAGE, max_running=8, clock=clock, **sizes)
    requests = [
        engine.submit(prompt(seed, 5), max_new_tokens=70, seed=seed, **SAMPLED) for seed in range(3)
    ]
    engine.step()
    clock.chunks.clear()
    requests += [
        engine.submit(prompt(9, 230), max_new_tokens=5),
        engine.submit(prompt(8, 150), max_new_tokens=5),
    ]
    longest = 0.0
    while not engine.idle:
        before = clock.now
        engine.step()
        longest = max(longest, clock.now - before)
    assert all_free(engine)
    return longest, requests


def test_long_prompts_beside_streams_leave_steps_short_and_answers_equal(model, monkeypatch):
    clock = Clock(monkeypatch)
    longest, requests = beside_streams(model, clock)
    assert longest == pytest.approx(1 + 32 / 24)  # a decode, and 32 tokens of a prompt
    assert clock.chunks[0] == [FIRST_PAGES * PAGE]
    assert clock.chunks[1:7] == [[32]] * 6
    assert max(map(sum, clock.chunks)) == 32
    for seed, request in enumerate(requests[:3]):
        assert request.tokens == alone(
            model, prompt(seed, 5), max_new_tokens=70, seed=seed, **SAMPLED
        )
    for request in requests[3:]:
        assert request.tokens == alone(model, request.prompt, max_new_tokens=5)


def test_a_given_step_stays_as_it_is(model, monkeypatch):
    """Also for `nanokv batch`, whose engine is not paced."""
    clock = Clock(monkeypatch)
    longest, _ = beside_streams(model, clock, step_tokens=STEP)
    assert clock.chunks[0] == [230, STEP - 3 - 230] and longest == pytest.approx(1 + 253 / 24)
    clock.chunks.clear()
    longest, _ = beside_streams(model, clock, paced=False)
    assert clock.chunks[0] == [230, 150] and longest == pytest.approx(1 + 380 / 24)


def test_a_given_step_bounds_a_paced_engine(model, monkeypatch):
    clock = Clock(monkeypatch)
    beside_streams(model, clock, step_tokens=16, paced=True)
    assert max(map(sum, clock.chunks)) == 16 - 3  # three are for decodes


def test_prompts_without_a_stream_get_the_whole_step(model, monkeypatch):
    clock = Clock(monkeypatch)
    engine = Engine(model, pages=300, page_size=PAGE, clock=clock)
    requests = [engine.submit(prompt(seed, 240), max_new_tokens=2) for seed in range(2)]
    engine.run()
    assert clock.chunks[0] == [240, 240]
    assert [request.tokens for request in requests] == [
        alone(model, request.prompt, max_new_tokens=2) for request in requests
    ]


def test_a_forward_between_two_steps_has_the_budget_of_prompts(model, monkeypatch):
    clock = Clock(monkeypatch)
    engine = Engine(model, pages=300, page_size=PAGE, clock=clock)
    assert engine.aside_tokens == engine.scheduler.step_tokens
    engine.submit(prompt(0, 5), max_new_tokens=20)
    engine.step()
    assert engine.aside_tokens == PAGE, "no step has been measured"
    engine.submit(prompt(9, 230), max_new_tokens=5)
    for _ in range(5):
        engine.step()
    assert engine.aside_tokens == 32
