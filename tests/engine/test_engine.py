"""The engine against nanokv.generate, request by request: whatever shares a step, an answer is the one it has alone.

The random runs use fp64 weights, so that two sums in another order cannot turn a near-tie of two logits around, and
pools that are far too small. After every run all pages are free, but for those that only the index holds.
"""

import gc
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanokv
from engines import all_free, alone
from nanokv.cache import make_cache
from nanokv.engine import Engine
from nanokv.errors import CapacityError, ContextError, GenerationError
from nanokv.inference import prefill_chunk
from oracle import ANSWER, SAMPLING, SHAPES, defaults, interrupt_at, pair, random_ids

SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def models():
    """(reference, ours), fp32."""
    return pair(**SHAPES["G2-tied"])


@pytest.fixture(scope="module")
def model(models):
    return models[1]


@pytest.fixture(scope="module")
def exact_model():
    return pair(seed=3, num_hidden_layers=2, max_position_embeddings=64)[1].double()


@pytest.fixture(autouse=True)
def every_run_ends(monkeypatch):
    """An engine that goes on without a token fails its test; it would hang."""
    step, steps = Engine._step, itertools.count(1)

    def counted(self):
        assert next(steps) < 20_000, "the engine does not come to an end"
        return step(self)

    monkeypatch.setattr(Engine, "_step", counted)


def prompt(seed: int, tokens: int) -> list[int]:
    return random_ids(seed, 1, tokens)[0].tolist()


# --- equal to a run alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [1, 3, 16, 256])
def test_each_answer_equals_its_solo_run(model, step_tokens):
    engine = Engine(model, pages=40, page_size=4, step_tokens=step_tokens)
    prompts = [prompt(i, n) for i, n in enumerate((1, 17, 5, 30, 2))]
    requests = [engine.submit(ids, max_new_tokens=9) for ids in prompts]
    engine.run()
    for ids, request in zip(prompts, requests, strict=True):
        assert (
            request.tokens == alone(model, ids, max_new_tokens=9)
            and request.finish_reason == "length"
        )
    assert all_free(engine)


def test_sampled_answers_equal_their_solo_runs(model):
    """A generator a request: neighbours in a batch must not shift each other's random numbers."""
    engine = Engine(model, pages=14, page_size=4, step_tokens=7)
    requests = [
        engine.submit(prompt(i, 6 + i), max_new_tokens=14, seed=i, **SAMPLED) for i in range(4)
    ]
    engine.run()
    for i, request in enumerate(requests):
        assert request.tokens == alone(
            model, prompt(i, 6 + i), max_new_tokens=14, seed=i, **SAMPLED
        )
    # A preempted one continues its own random numbers.
    assert engine.metrics.preemptions > 0 and all_free(engine)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step in which it arrives
        st.integers(1, 20),  # prompt tokens
        st.integers(1, 12),  # new tokens
        st.sampled_from(["shared", "own"]),  # where the prompt comes from
        st.one_of(st.none(), st.none(), st.integers(0, 15)),  # the step in which it is cancelled
    ),
    min_size=1,
    max_size=6,
)


@given(
    REQUESTS,
    st.integers(8, 16),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from(["hash", "radix"]),
)
@settings(max_examples=25, deadline=None)
def test_random_arrivals_in_tiny_pools(
    exact_model, plan, slots, page_size, step_tokens, max_running, prefix
):
    """Every greedy answer is the solo one, or a beginning of it when it was cancelled; no page is lost."""
    # 18 … 36 slots: a request may need 31, so at most one or two fit at a time.
    pages = 2 * slots // page_size + 2
    engine = Engine(
        exact_model,
        pages=pages,
        page_size=page_size,
        step_tokens=step_tokens,
        max_running=max_running,
        prefix=prefix,
    )
    arrivals, step = sorted(enumerate(plan), key=lambda item: item[1][0]), 0
    requests = {}
    while arrivals or not engine.idle:
        while arrivals and arrivals[0][1][0] <= step:
            i, (_, tokens, new, source, _) = arrivals.pop(0)
            ids = prompt(99 if source == "shared" else i, 20)[:tokens]
            if -(-(tokens + new - 1) // page_size) > pages:
                with pytest.raises(CapacityError, match="the pool has"):
                    engine.submit(ids, max_new_tokens=new)
            else:
                requests[i] = engine.submit(ids, max_new_tokens=new)
        for i, request in requests.items():
            if plan[i][4] == step:
                engine.cancel(request)
        engine.step()
        step += 1
        assert step < 2000, "the engine does not come to an end"
    for request in requests.values():
        solo = alone(exact_model, request.prompt, max_new_tokens=request.max_new_tokens)
        if request.finish_reason == "cancelled":
            assert request.tokens == solo[: len(request.tokens)]
        else:
            assert (request.tokens, request.finish_reason) == (solo, "length")
    assert all_free(engine)


def test_a_tree_of_prefixes_reuses_what_the_hashes_do(model):
    """Requests that begin alike in a pool that is too small: preempted, evicted, shared; the same steps for both."""
    found = []
    for prefix in ("hash", "radix"):
        engine = Engine(model, pages=13, page_size=4, step_tokens=16, prefix=prefix)
        shared = prompt(7, 16)
        prompts = [shared[: 8 + i] + prompt(i, 2 * i) for i in range(7)]
        for at in range(0, len(prompts), 3):
            requests = [engine.submit(ids, max_new_tokens=12) for ids in prompts[at : at + 3]]
            engine.run()
            for request in requests:
                assert request.tokens == alone(model, request.prompt, max_new_tokens=12)
        counts = engine.metrics
        found.append((counts.reused_tokens, counts.preemptions, counts.prefill_tokens))
        assert all_free(engine)
    assert found[0] == found[1] and min(found[0]) > 0
    with pytest.raises(GenerationError, match="prefix is 'tree': hash or radix was expected"):
        Engine(model, prefix="tree")


def test_transformers_continuous_batching_gives_the_same_tokens(models):
    from transformers import ContinuousBatchingConfig, GenerationConfig

    reference, model = models
    shared = prompt(7, 12)
    prompts = [shared, [*shared, 5, 9], prompt(8, 9), [*shared[:8], 3]]
    theirs = reference.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=4,
            num_blocks=64,
            max_batch_tokens=64,
            max_requests_per_batch=2,
            use_cuda_graph=False,
        ),
        progress_bar=False,
    )
    engine = Engine(model, pages=64, page_size=4, step_tokens=64)
    ours = [engine.submit(ids, max_new_tokens=5).tokens for ids in prompts]
    engine.run()
    found = {tuple(output.prompt_ids): list(output.generated_tokens) for output in theirs.values()}
    assert ours == [found[tuple(ids)] for ids in prompts]


# --- ends ---------------------------------------------------------------------------------------------------------


def test_reasons_to_end(model):
    """stop at an eos token (which is part of the answer), context when it is full, as generate does."""
    ids = prompt(1, 6)
    solo = alone(model, ids, max_new_tokens=8)
    engine = Engine(model, pages=200, page_size=4)
    stopped = engine.submit(ids, max_new_tokens=8, eos_token_ids=[solo[3]])
    full = engine.submit(prompt(2, 509), max_new_tokens=8)
    engine.run()
    assert stopped.tokens == solo[: solo.index(solo[3]) + 1] and stopped.finish_reason == "stop"
    assert (len(full.tokens), full.finish_reason) == (4, "context")
    assert full.tokens == alone(model, prompt(2, 509), max_new_tokens=8)
    assert stopped.logprobs[0] == pytest.approx(
        float(nanokv.score(model, torch.tensor([ids]))[0, -1].log_softmax(-1)[solo[0]]), abs=1e-5
    )


def test_what_can_never_fit_is_refused_with_numbers(model):
    engine = Engine(model, pages=4, page_size=4)
    with pytest.raises(
        CapacityError, match=r"needs 5 pages \(10 tokens \+ 8 new, 4 a page\), the pool has 4"
    ) as error:
        engine.submit(prompt(0, 10), max_new_tokens=8)
    assert error.value.hint == "max_new_tokens=7 fits"
    request = engine.submit(prompt(0, 10), max_new_tokens=7)
    engine.run()
    assert len(request.tokens) == 7
    with pytest.raises(ContextError, match="needs 513 of 512"):
        engine.submit(prompt(0, 513))
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1}, {"seed": 2**64}):
        with pytest.raises(GenerationError):
            engine.submit(prompt(0, 3), **wrong)
    with pytest.raises(GenerationError, match="empty"):
        engine.submit([])
    assert engine.idle
    with pytest.raises(GenerationError, match="page_size is 0"):
        Engine(model, page_size=0)


def test_who_says_nothing_gets_64_greedy_tokens_of_a_pool_of_256_pages():
    assert defaults(Engine) == {
        "pages": 256,
        "page_size": 16,
        "step_tokens": None,
        "max_running": 32,
        "paced": None,
        "prefix": "hash",
        "snapshots": 32,
        "snapshot_every": 512,
    }
    assert defaults(Engine.submit) == ANSWER | SAMPLING | {
        "seed": None,
        "salt": "",
        "top_logprobs": 0,
        "constrain": None,
        "on_token": None,
        "prefilled": None,
        "client": "",
    }


def test_a_step_feeds_as_many_tokens_as_a_long_prompts_chunk(model):
    """One prefill policy; `nanokv serve` alone has another."""
    assert Engine(model).scheduler.step_tokens == prefill_chunk(model) == 512
    # And never fewer than requests run.
    assert Engine(model, max_running=600).scheduler.max_running == 600


def test_an_answer_that_the_context_ends_needs_no_pages_for_more(model):
    """The pages of the context are enough, whatever max_new_tokens says."""
    context = model.config.max_position_embeddings
    request = Engine(model, pages=context // 4, page_size=4).submit(
        prompt(0, 6), max_new_tokens=10**9
    )
    assert request.room == context - 6 + 1


def test_foreign_pages_are_reported_instead_of_waiting_for_ever(model):
    engine = Engine(model, pages=4, page_size=4)
    taken = engine.pool.take(3)
    request, later = (
        engine.submit(prompt(0, 6), max_new_tokens=2),
        engine.submit(prompt(1, 9), max_new_tokens=2),
    )
    with pytest.raises(
        CapacityError, match=f"request {request.number} needs 2 pages, but 1 of 4 can be had"
    ):
        engine.run()
    engine.cancel(later)
    engine.pool.release(taken)
    engine.run()
    assert request.tokens == alone(model, prompt(0, 6), max_new_tokens=2)


def test_pages_of_a_cache_that_waits_for_the_garbage_collector_are_found(model):
    """A step that was cut short can leave one among the frames of its exception."""
    engine = Engine(model, pages=4, page_size=4)
    request, ours = engine.submit(prompt(0, 6), max_new_tokens=2), gc.isenabled()
    gc.disable()
    try:
        lost = make_cache("prefix", model.config, pool=engine.pool)
        lost.reserve(0, 12)
        lost.itself = lost
        del lost
        engine.run()
    finally:
        if ours:
            gc.enable()
    assert request.tokens == alone(model, prompt(0, 6), max_new_tokens=2)


# --- sharing and preemption ---------------------------------------------------------------------------------------


def test_the_oldest_is_never_preempted_and_the_youngest_first(model):
    engine = Engine(model, pages=8, page_size=2, step_tokens=64)
    requests = [engine.submit(prompt(i, 4), max_new_tokens=8) for i in range(3)]
    engine.run()
    assert requests[0].preemptions == 0 and requests[2].preemptions >= 1
    assert engine.metrics.preemptions == sum(request.preemptions for request in requests)
    finished = [request.finished for request in requests]
    assert finished == sorted(finished)


def test_a_shared_beginning_is_computed_once(model):
    engine = Engine(model, pages=64, page_size=4)
    system = prompt(5, 22)
    first = engine.submit([*system, 1], max_new_tokens=3)
    engine.run()
    computed = engine.metrics.prefill_tokens
    second, other = (
        engine.submit([*system, 2, 3], max_new_tokens=3),
        engine.submit([*system, 2], salt="tenant"),
    )
    engine.run()
    assert (first.reused_tokens, second.reused_tokens, other.reused_tokens) == (0, 20, 0)
    assert engine.metrics.prefill_tokens == computed + 4 + 23 and engine.metrics.reused_tokens == 20
    assert second.tokens == alone(model, [*system, 2, 3], max_new_tokens=3)


def test_an_equal_prompt_computes_exactly_one_token(model):
    """Cache == prompt is the edge where transformers feeds the prompt twice."""
    engine = Engine(model, pages=64, page_size=4)
    ids = prompt(5, 9)
    answers = []
    for _ in range(2):
        request = engine.submit(ids, max_new_tokens=4)
        engine.run()
        answers.append(request.tokens)
    assert request.reused_tokens == 8 and answers[0] == answers[1] == alone(
        model, ids, max_new_tokens=4
    )


# --- streaming, cancelling, failing -------------------------------------------------------------------------------


def test_streaming_three_ways(model):
    engine = Engine(model, pages=64, page_size=4)
    seen = []
    one = engine.submit(
        prompt(0, 5), max_new_tokens=6, on_token=lambda request, step: seen.append(step.token)
    )
    two = engine.submit(prompt(1, 5), max_new_tokens=9)
    assert [step.token for step in engine.stream(one)] == one.tokens == seen
    assert 6 <= len(two.tokens) < 9  # went on meanwhile
    rest = [(request, step.token) for request, step in engine]
    assert rest == [(two, token) for token in two.tokens[-len(rest) :]] and len(two.tokens) == 9


def test_a_cancelled_request_waits_no_more(model):
    engine = Engine(model, pages=64, page_size=4)
    requests = [engine.submit(prompt(seed, 5), max_new_tokens=2) for seed in range(3)]
    engine.cancel(requests[1])
    assert engine.scheduler.waiting == [requests[0], requests[2]]


def test_cancel_from_a_callback_and_submit_from_a_callback(model):
    engine, added = Engine(model, pages=64, page_size=4), []

    def third_token(request, step):
        if len(request.tokens) == 3:
            engine.cancel(request)
            engine.cancel(other)
            added.append(engine.submit(prompt(3, 4), max_new_tokens=2))

    request = engine.submit(prompt(0, 5), max_new_tokens=6, on_token=third_token)
    other = engine.submit(prompt(1, 5), max_new_tokens=6)
    engine.run()
    assert (len(request.tokens), request.finish_reason, other.finish_reason) == (
        3,
        "cancelled",
        "cancelled",
    )
    assert added[0].tokens == alone(model, prompt(3, 4), max_new_tokens=2)
    engine.cancel(request)  # harmless
    assert engine.metrics.finished == 3 and all_free(engine)


def test_a_failing_callback_ends_only_its_request(model):
    engine = Engine(model, pages=64, page_size=4)
    bad = engine.submit(prompt(0, 5), max_new_tokens=6, on_token=lambda *_: 1 / 0)
    good = engine.submit(prompt(1, 5), max_new_tokens=6)
    engine.run()
    assert bad.finish_reason == "error" and isinstance(bad.error, ZeroDivisionError)
    assert good.tokens == alone(model, prompt(1, 5), max_new_tokens=6) and all_free(engine)


@pytest.mark.parametrize("at", range(1, 9))
def test_an_interrupt_in_any_forward_loses_nothing(model, monkeypatch, at):
    """Ctrl-C in the second layer of the at-th forward: the layers differ in length; the engine mends it and goes on."""
    engine = Engine(model, pages=20, page_size=4, step_tokens=6)
    prompts = [prompt(i, 9) for i in range(3)]
    requests = [engine.submit(ids, max_new_tokens=5) for ids in prompts]
    interrupt_at(monkeypatch, model.layers[1], at)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    monkeypatch.undo()
    assert [request.tokens for request in requests] == [
        alone(model, ids, max_new_tokens=5) for ids in prompts
    ]
    assert all_free(engine)


def test_an_interrupt_between_forward_and_token_loses_nothing(model):
    engine = Engine(model, pages=20, page_size=4)

    def interrupt_once(request, step):
        if len(request.tokens) == 2 and not hit:
            hit.append(1)
            raise KeyboardInterrupt

    hit = []
    requests = [
        engine.submit(prompt(i, 6), max_new_tokens=5, on_token=interrupt_once) for i in range(3)
    ]
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert [r.tokens for r in requests] == [
        alone(model, prompt(i, 6), max_new_tokens=5) for i in range(3)
    ]


def test_an_interrupted_search_for_known_pages_loses_nothing(model, monkeypatch):
    """The layers are empty again, and the request still says that the pages it had found are fed."""
    engine, ids = Engine(model, pages=20, page_size=4), prompt(0, 9)
    engine.submit(ids, max_new_tokens=1)
    engine.run()
    request = engine.submit([*ids, 1, 2], max_new_tokens=3)
    find, calls = engine.pool.find, []

    def interrupted(tokens, salt):
        calls.append(request.fed)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return find(tokens, salt)

    monkeypatch.setattr(engine.pool, "find", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert calls == [0, 8] and request.cache.length == 0
    engine.run()
    assert request.tokens == alone(model, [*ids, 1, 2], max_new_tokens=3) and all_free(engine)


# --- metrics ------------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_clock(model):
    """One request, one tick a reading: arrived 0, step 1 (admitted, first token), then a token per step."""
    ticks = iter(range(100))
    engine = Engine(model, pages=8, page_size=4, clock=lambda: next(ticks))
    request = engine.submit(prompt(0, 5), max_new_tokens=4)
    engine.run()
    metrics = request.metrics()
    # Step 2, 3 and 4 read the clock once each, the end once.
    assert metrics["queue_s"] == 1 and metrics["ttft_s"] == 2
    assert metrics["total_s"] == request.finished and math.isclose(
        metrics["token_s"], (request.finished - 2) / 3
    )
    assert (metrics["prompt_tokens"], metrics["new_tokens"], metrics["preemptions"]) == (5, 4, 0)


def test_page_use_and_waste(model):
    """5 tokens in 2 pages of 4 waste 3 slots; then 6, 7 tokens in 2 pages waste 2 and 1."""
    engine = Engine(model, pages=8, page_size=4)
    engine.submit(prompt(0, 5), max_new_tokens=3)
    engine.run()
    metrics = engine.metrics.as_dict()
    assert (
        metrics["waste"] == (3 + 2 + 1) / 24
        and metrics["page_use"] == 2 / 8
        and metrics["peak_pages"] == 2
    )
    assert (metrics["steps"], metrics["forwards"]) == (3, 3)
    assert (metrics["prefill_tokens"], metrics["decode_tokens"]) == (5, 2)


def test_a_step_never_feeds_more_than_its_budget(model):
    engine = Engine(model, pages=200, page_size=4, step_tokens=11, max_running=5)
    for i in range(8):
        engine.submit(prompt(i, 3 + 7 * i), max_new_tokens=6)
    done = 0
    while not engine.idle:
        engine.step()
        fed = engine.metrics.prefill_tokens + engine.metrics.decode_tokens
        assert fed - done <= 11 and len(engine.scheduler.running) <= 5
        done = fed


# --- who computes what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [16, 50, 256])
def test_a_beginning_of_requests_that_arrive_together_is_computed_once(model, step_tokens):
    """All are admitted while nothing is in the index yet; whoever is fed later finds what the first has computed."""
    engine = Engine(model, pages=200, page_size=4, step_tokens=step_tokens)
    shared = prompt(3, 40)
    requests = [engine.submit([*shared, i, i + 1], max_new_tokens=4) for i in range(5)]
    engine.run()
    assert engine.metrics.prefill_tokens == 40 + 5 * 2 and engine.metrics.reused_tokens == 4 * 40
    assert [request.reused_tokens for request in requests] == [0, 40, 40, 40, 40]
    for request in requests:
        assert request.tokens == alone(model, request.prompt, max_new_tokens=4)
    assert all_free(engine)


def test_a_longer_beginning_that_was_computed_meanwhile_is_found(model):
    """At admission the index held 8 tokens of it, by its first chunk 20."""
    engine = Engine(model, pages=200, page_size=4)
    shared = prompt(3, 21)
    engine.submit(shared[:9], max_new_tokens=1)
    engine.run()
    first, second = (engine.submit([*shared, i], max_new_tokens=3) for i in range(2))
    engine.run()
    assert (first.reused_tokens, second.reused_tokens) == (8, 20)
    assert engine.metrics.prefill_tokens == 9 + 14 + 2 and engine.metrics.reused_tokens == 28
    assert second.tokens == alone(model, second.prompt, max_new_tokens=3) and all_free(engine)


def test_a_running_request_gets_a_token_in_every_step_of_a_long_prefill(model):
    """Decodes come first: a long prompt fills what they leave of the budget."""
    engine = Engine(model, pages=200, page_size=4, step_tokens=6)
    long, short = prompt(1, 60), prompt(0, 3)
    one = engine.submit(short, max_new_tokens=30)
    engine.step()
    two = engine.submit(long, max_new_tokens=2)
    for tokens in range(2, 14):
        engine.step()
        assert len(one.tokens) == tokens
    assert len(two.tokens) == 1  # 60 tokens, 5 a step


def test_the_oldest_prefill_leaves_the_decodes_their_place(model):
    """The preempted older one is fed again, in chunks, while the younger decodes."""
    engine, seen = Engine(model, pages=200, page_size=4, step_tokens=4), []
    young = engine.submit(prompt(0, 2), max_new_tokens=12)
    engine.step()
    old = engine.submit(prompt(1, 30), max_new_tokens=3)
    old.number = -1  # arrived before
    while old.cache is None or old.pending > 1 or not old.tokens:
        before = len(young.tokens)
        engine.step()
        seen.append(len(young.tokens) - before)
    assert seen == [1] * len(seen) and len(seen) >= 10


def test_nobody_is_admitted_into_the_page_that_a_running_request_takes_next(model):
    """Two prompts of two full pages fit into four; but the first needs a third page for its answer."""
    engine = Engine(model, pages=4, page_size=4)
    requests = [engine.submit(prompt(i, 8), max_new_tokens=4) for i in range(2)]
    engine.run()
    assert engine.metrics.preemptions == 0
    assert [request.tokens for request in requests] == [
        alone(model, prompt(i, 8), max_new_tokens=4) for i in range(2)
    ]


def test_the_pages_of_an_answer_are_found_by_the_next_turn(model):
    """What a request leaves behind includes its answer, whether it ended or was preempted."""
    engine = Engine(model, pages=64, page_size=4)
    ids = prompt(6, 6)
    first = engine.submit(ids, max_new_tokens=10)
    engine.run()
    second = engine.submit([*ids, *first.tokens, 7], max_new_tokens=2)
    engine.run()
    assert second.reused_tokens == 12  # of 15 that were in the cache
    ids = prompt(8, 6)
    third = engine.submit(ids, max_new_tokens=16)
    while len(third.tokens) < 11:
        engine.step()
    computed, reused = engine.metrics.prefill_tokens, engine.metrics.reused_tokens
    engine.scheduler.preempt(third)
    engine.run()
    assert (
        engine.metrics.reused_tokens == reused + 16
        and engine.metrics.prefill_tokens <= computed + 1
    )
    assert (
        third.tokens == alone(model, ids, max_new_tokens=16)
        and third.reused_tokens == 0
        and all_free(engine)
    )


# --- interrupts in callbacks, and what ends one request only ------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_in_a_callback_neither_adds_nor_loses_tokens(model, at):
    """At the last token too: the request is finished then, and what was drawn comes with the next step."""
    engine, hit = Engine(model, pages=20, page_size=4), []

    def interrupt_once(request, step):
        if len(request.tokens) == at and request is requests[1] and not hit:
            hit.append(1)
            raise KeyboardInterrupt

    requests = [
        engine.submit(prompt(i, 6), max_new_tokens=3, on_token=interrupt_once) for i in range(3)
    ]
    seen = {request: [] for request in requests}
    with pytest.raises(KeyboardInterrupt):
        for request, step in engine:
            seen[request].append(step.token)
    for request, step in engine:
        seen[request].append(step.token)
    for i, request in enumerate(requests):
        assert request.tokens == seen[request] == alone(model, prompt(i, 6), max_new_tokens=3)
        assert request.finish_reason == "length"
    assert engine.metrics.finished == 3 and all_free(engine)


def test_tokens_of_an_interrupted_last_step_are_still_handed_out(model):
    engine, hit = Engine(model, pages=20, page_size=4), []

    def interrupt(request, step):
        hit.append(step.token)
        raise KeyboardInterrupt

    request = engine.submit(prompt(0, 6), max_new_tokens=1, on_token=interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(engine)
    assert (
        engine.idle
        and [(r, step.token) for r, step in engine] == [(request, hit[0])]
        and list(engine) == []
    )


def test_an_interrupt_before_the_end_is_noticed_does_not_add_a_token(model):
    """The request says that it is over, but the engine was interrupted before it could let it go."""
    engine = Engine(model, pages=20, page_size=4)
    request = engine.submit(prompt(0, 6), max_new_tokens=2)
    finish, hit = engine._finish, []

    def interrupted(request):
        if not hit:
            hit.append(1)
            raise KeyboardInterrupt
        finish(request)

    engine._finish = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert request.tokens == alone(model, prompt(0, 6), max_new_tokens=2) and all_free(engine)


@pytest.mark.parametrize("wrong", ["callback", "nan"])
def test_any_error_of_one_request_ends_only_that_one(model, monkeypatch, wrong):
    def fail(request, step):
        raise ValueError("injected")

    engine = Engine(model, pages=64, page_size=4)
    bad = engine.submit(
        prompt(0, 5), max_new_tokens=6, on_token=fail if wrong == "callback" else None
    )
    good = engine.submit(prompt(1, 5), max_new_tokens=6)
    if wrong == "nan":
        draw = type(bad).draw

        def poisoned(request):
            if request is bad and len(request.tokens) == 2:
                request.logits = request.logits * torch.nan
            return draw(request)

        monkeypatch.setattr(type(bad), "draw", poisoned)
    engine.run()
    assert bad.finish_reason == "error" and isinstance(bad.error, ValueError)
    assert (
        "injected" in str(bad.error)
        if wrong == "callback"
        else "cannot be sampled" in str(bad.error)
    )
    assert (
        good.tokens == alone(model, prompt(1, 5), max_new_tokens=6)
        and good.finish_reason == "length"
    )
    assert all_free(engine)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"salt": None}, "salt is None"),
        ({"salt": 5}, "salt is 5"),
        ({"on_token": "print"}, "on_token is 'print'"),
        ({"eos_token_ids": 1.5}, "eos_token_ids is 1.5"),
        ({"eos_token_ids": [1.5]}, "eos_token_ids is"),
        ({"eos_token_ids": "2"}, "eos_token_ids is '2'"),
        ({"salt": "\ud800"}, "salt is"),
    ],
)
def test_a_wrong_argument_is_refused_at_submit_and_poisons_nothing(model, wrong, message):
    engine = Engine(model, pages=64, page_size=4)
    with pytest.raises(GenerationError, match=message):
        engine.submit(prompt(0, 5), **wrong)
    good = engine.submit(prompt(1, 5), max_new_tokens=3)
    engine.run()
    assert good.tokens == alone(model, prompt(1, 5), max_new_tokens=3)
