"""Beam search against transformers': the same sequences, the same scores, with one prefill instead of k.

The model is tiny and random with 31 tokens and a flat distribution; up to three tokens of what the beams would say are
made eos, so that beams end early and often: there length penalty, early stopping and the spare candidates decide.
"""

import io
import json
import sys
from functools import partial

import pytest
import torch

import nanokv.decoding.beam as beam_module
import nanokv.decoding.generation as generation_module
from cli_helpers import choice, run_cli, text_of
from nanokv.cache import CACHES, make_cache
from nanokv.decoding.beam import REPLAY, BeamGeneration, beam_search
from nanokv.decoding.generation import generate
from nanokv.errors import ContextError, GenerationError
from nanokv.inference import prefill
from nanokv.text.ids import common_prefix
from oracle import ANSWER, SHAPES, Clock, defaults, log_probability, pair, random_ids

pytestmark = pytest.mark.sampled

V = 31
EOS = [3, 17]


@pytest.fixture(scope="module")
def models():
    reference, model = pair(seed=5, vocab_size=V, **SHAPES["G2-untied-bias"])
    model.lm_head.weight.mul_(0.3)  # the tensor is the reference's too
    assert torch.equal(reference.lm_head.weight, model.lm_head.weight)
    return reference, model


def likely_eos(model, ids, count):
    """Tokens that the beams would say at different places."""
    free = beam_search(model, ids, 4, 12, eos_token_ids=[], num_return=4)
    return list(dict.fromkeys([free[0].ids[2], free[1].ids[4], free[2].ids[7], *range(V)]))[:count]


def reference_beams(reference, ids, beams, new, eos, **options):
    """[(new ids up to and with eos, score)] of transformers."""
    with torch.inference_mode():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    answers = []
    for row, value in zip(
        out.sequences[:, ids.shape[1] :].tolist(), out.sequences_scores.tolist(), strict=True
    ):
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        answers.append((row[:end], value))
    return answers


def assert_equal(ours, theirs):
    assert [beam.ids for beam in ours] == [ids for ids, _ in theirs]
    assert [beam.score for beam in ours] == pytest.approx(
        [value for _, value in theirs], abs=1e-5, rel=1e-6
    )


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0, 5, -5])
@pytest.mark.parametrize(("beams", "eos_ids"), [(2, 2), (4, 3)])
def test_sequences_and_scores_equal_transformers(
    models, beams, eos_ids, length_penalty, early_stopping
):
    compare(models, beams, eos_ids, length_penalty=length_penalty, early_stopping=early_stopping)


@pytest.mark.parametrize(("beams", "eos_ids"), [(2, 0), (2, 1), (4, 0), (4, 1)])
def test_no_eos_and_one_eos_equal_transformers(models, beams, eos_ids):
    compare(models, beams, eos_ids)


def compare(models, beams, eos_ids, **options):
    """On a prompt of its own for every number of eos ids."""
    reference, model = models
    ids = random_ids(eos_ids, 1, 5 + eos_ids, V)
    eos = likely_eos(model, ids, eos_ids)
    ours = beam_search(model, ids, beams, 12, eos_token_ids=eos, num_return=beams, **options)
    assert_equal(ours, reference_beams(reference, ids, beams, 12, eos, **options))


def test_the_options_change_the_answer(models):
    """If the penalty and the stopping rule made no difference here, the test above could not see them."""
    _, model = models
    ids = random_ids(2, 1, 7, V)
    eos = likely_eos(model, ids, 2)

    def lengths(penalty, early_stopping):
        found = beam_search(
            model, ids, 2, 12, penalty, early_stopping, eos_token_ids=eos, num_return=2
        )
        return [len(beam.ids) for beam in found]

    assert lengths(1.0, True) == lengths(1.0, False) == [1, 2] and lengths(1.0, "never") == [1, 3]
    assert lengths(2.0, True) == [2, 1] and lengths(2.0, False) == [12, 12]


def test_repetition_penalty_equals_transformers(models):
    reference, model = models
    ids = random_ids(4, 1, 7, V)
    ours = beam_search(model, ids, 3, 10, eos_token_ids=EOS, num_return=3, repetition_penalty=1.3)
    assert_equal(ours, reference_beams(reference, ids, 3, 10, EOS, repetition_penalty=1.3))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_one_beam_equals_transformers_for_every_penalty(models, penalty, early_stopping):
    """num_beams=1 is greedy decoding in transformers: the penalty falls on the logits, the first eos is the end."""
    reference, model = models
    for seed in range(8):
        ids = random_ids(seed, 1, 7, V)
        options = {"repetition_penalty": penalty, "early_stopping": early_stopping}
        eos = EOS if seed % 2 else []
        with torch.inference_mode():
            out = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=1,
                do_sample=False,
                max_new_tokens=16,
                eos_token_id=eos or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                repetition_penalty=penalty,
            )
            steps = reference.compute_transition_scores(
                out.sequences, out.scores, normalize_logits=True
            )
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        (beam,) = beam_search(model, ids, 1, 16, eos_token_ids=eos, **options)
        assert (
            beam.ids
            == tokens
            == list(
                generate(
                    model, ids, max_new_tokens=16, repetition_penalty=penalty, eos_token_ids=eos
                )
            )
        )
        assert beam.score == pytest.approx(steps.sum().item() / len(tokens), abs=1e-5)


def test_more_candidates_than_the_first_beam_has(models):
    """4 beams and 3 eos ids look at 16 candidates; with 7 tokens most of them are continuations of no beam."""
    reference, model = pair(seed=1, vocab_size=7)
    ids = random_ids(0, 1, 4, 7)
    ours = beam_search(model, ids, 4, 6, eos_token_ids=[1, 2, 3], num_return=4)
    assert_equal(ours, reference_beams(reference, ids, 4, 6, [1, 2, 3]))


@pytest.mark.parametrize("eos", [[], [1], [1, 2, 3]])
def test_all_beams_go_on_though_every_eos_of_every_beam_is_likelier(eos):
    """The beams' eos are all the best candidates: only as many more again hold one that each beam goes on with."""
    search = beam_module.Search(4, 9, 1.0, "never", torch.tensor(eos))
    search.tokens, search.running = torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4)
    log_probs = torch.full((4, 7), -50.0)  # (k,V)
    log_probs[:, eos], log_probs[:, 5] = -1.0, torch.tensor([-2.0, -3.0, -4.0, -5.0])
    assert search.step(log_probs).tolist() == [0, 1, 2, 3]
    assert search.tokens.tolist() == [[0, 5]] * 4 and not search.ended
    assert search.running.tolist() == [-2, -3, -4, -5]


def test_a_score_is_the_log_probability_of_its_tokens(models):
    _, model = models
    ids = random_ids(6, 1, 6, V)
    for beam in beam_search(model, ids, 3, 8, eos_token_ids=EOS, num_return=3, length_penalty=1.0):
        total = log_probability(model, ids, beam.ids)
        assert beam.score == pytest.approx(total / len(beam.ids), abs=1e-5)


@pytest.mark.parametrize("name", sorted(CACHES))
def test_every_cache_gives_the_same_beams_and_keeps_only_the_prompt(models, name):
    _, model = models
    ids = random_ids(7, 1, 9, V)
    options = {
        "quantized": {"residual": 64},  # nothing is quantized yet: exact
        "paged": {"pages": 24},  # four beams on top of the prompt
    }.get(name, {})
    cache = make_cache(name, model.config, capacity=96, **options)
    prefill(model, ids[:, :3], cache, 0)  # a beginning that is cached already
    expected = beam_search(model, ids, 4, 10, eos_token_ids=EOS, num_return=4)
    for _ in range(2):  # the second time from the same cache: the beams have left nothing behind
        ours = beam_search(model, ids[:, 3:], 4, 10, eos_token_ids=EOS, num_return=4, cache=cache)
        assert_equal(ours, expected)
        assert cache.length == 9 and cache.sizes.batch_size == 1
        cache.truncate(3)


def test_pages_of_beams_go_back_to_the_pool(models):
    _, model = models
    cache = make_cache("paged", model.config, capacity=64, page=4)
    beam_search(model, random_ids(7, 1, 9, V), 4, 10, eos_token_ids=[], cache=cache)
    assert len(cache.pool.references) - len(cache.pool.free) == 3


def test_the_prompt_is_prefilled_once_as_one_row(models):
    """transformers runs k copies of the prompt; here they are copies of the cache."""
    _, model = models
    calls = []
    hook = model.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape)))
    try:
        beam_search(model, random_ids(8, 1, 20, V), 4, 6, eos_token_ids=[])
    finally:
        hook.remove()
    assert calls == [(1, 20)] + [(4, 1)] * 5  # the sixth token is never fed


def test_one_beam_is_greedy(models):
    _, model = models
    ids = random_ids(9, 1, 6, V)
    greedy = list(generate(model, ids, max_new_tokens=9, eos_token_ids=[]))
    assert beam_search(model, ids, 1, 9, eos_token_ids=[])[0].ids == greedy


def test_a_full_context_ends_the_beams(models):
    """Like generate: the last token needs no place in the cache."""
    _, model = models
    ids = random_ids(9, 1, 6, V)
    cache = make_cache("static", model.config, capacity=8)
    assert len(beam_search(model, ids, 2, 50, eos_token_ids=[], cache=cache)[0].ids) == 3
    with pytest.raises(ContextError, match="needs 9 of 8 tokens"):
        beam_search(
            model, random_ids(9, 1, 9, V), 2, cache=make_cache("static", model.config, capacity=8)
        )


def test_a_failed_prefill_leaves_the_cache_as_it_was(models, monkeypatch):
    _, model = models
    cache = make_cache("dict", model.config)
    prefill(model, random_ids(1, 1, 4, V), cache, 0)
    monkeypatch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        beam_search(model, random_ids(9, 1, 6, V), 2, cache=cache)
    assert cache.length == 4


def test_who_says_nothing_gets_four_beams_of_64_tokens():
    search = {"beams": 4, "length_penalty": 1.0, "early_stopping": False}
    assert defaults(BeamGeneration) == search
    assert defaults(beam_search) == ANSWER | search | {
        "num_return": 1,
        "cache": None,
        "repetition_penalty": 1.0,
        "chunk": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 0}, "beams is 0"),
        ({"beams": 2, "num_return": 3}, "num_return is 3"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": 5.001}, r"length_penalty is 5.001: it must be a number from -5 to 5"),
        ({"length_penalty": -5.001}, "length_penalty is -5.001"),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
        ({"eos_token_ids": list(range(V))}, "leave no token"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
    ],
)
def test_wrong_values_are_refused_before_any_work(models, options, message):
    _, model = models
    cache = make_cache("dict", model.config)
    with pytest.raises(GenerationError, match=message):
        beam_search(model, [1, 2, 3], cache=cache, **options)
    assert cache.length == 0


def test_nan_logits_are_an_error_and_not_an_answer(models, monkeypatch):
    _, model = models
    monkeypatch.setattr(
        model.lm_head, "forward", lambda hidden: torch.full((len(hidden), V), torch.nan)
    )
    with pytest.raises(GenerationError, match="cannot be searched"):
        beam_search(model, [1, 2, 3], 2)


def test_a_model_that_can_say_one_thing_only_is_searched(models, monkeypatch):
    """All other words are impossible, not unlikely: candidates of −∞ are no error while the best one is finite."""
    _, model = models
    only = torch.full((V,), -torch.inf).index_fill(0, torch.tensor([7]), 0.0)
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: only.expand(*hidden.shape[:-1], V))
    for beams in (1, 2):
        assert beam_search(model, [1, 2, 3], beams, 4, eos_token_ids=[]) == [([7] * 4, 0.0)]


# --- stopping, and one answer of a conversation -----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_stopped_search_returns_the_best_so_far(models, steps):
    """`should_stop` is read before the prefill and each decode; beams that still grow are compared at their length."""
    _, model = models
    ids, calls = random_ids(7, 1, 9, V), []
    cache = make_cache("dict", model.config)

    def should_stop():
        calls.append(1)
        return len(calls) > steps

    found = beam_search(
        model, ids, 3, 12, eos_token_ids=EOS, num_return=3, cache=cache, should_stop=should_stop
    )
    assert cache.length == (9 if steps else 0) and len(calls) == steps + 1
    assert [beam.score for beam in found] == sorted((beam.score for beam in found), reverse=True)
    assert (
        len(found) == (3 if steps else 0)
        and max((len(beam.ids) for beam in found), default=0) == steps
    )
    for beam in found:
        total = log_probability(model, ids, beam.ids)
        assert beam.score == pytest.approx(total / len(beam.ids), abs=1e-5)


def test_a_stopped_search_returns_no_beam_that_is_not_there_yet():
    """Seven words make seven beams of one token, whatever the width."""
    _, model = pair(seed=1, vocab_size=7)
    stops = iter([False, True])
    found = beam_search(
        model,
        random_ids(7, 1, 9, 7),
        9,
        12,
        eos_token_ids=[],
        num_return=9,
        should_stop=lambda: next(stops),
    )
    assert sorted(beam.ids for beam in found) == [[token] for token in range(7)]


@pytest.mark.parametrize("name", sorted(CACHES))
def test_a_beam_as_a_generation_leaves_the_cache_as_decoding_would(models, name):
    """The winner of beam_search, with the raw log-probabilities; the cache holds it all but its last token."""
    _, model = models
    ids = random_ids(7, 1, 9, V)
    cache = make_cache(
        name, model.config, capacity=96, **{"quantized": {"residual": 64}}.get(name, {})
    )
    expected = beam_search(model, ids, 3, 40, eos_token_ids=[], length_penalty=0.7)[0]
    answer = BeamGeneration(
        model, ids, cache, max_new_tokens=40, eos_token_ids=[], beams=3, length_penalty=0.7
    )
    steps = list(answer)
    assert [step.token for step in steps] == answer.tokens == expected.ids and len(
        expected.ids
    ) > REPLAY
    assert (answer.finish_reason, answer.seed) == ("length", None)
    assert sum(step.logprob for step in steps) / 40**0.7 == pytest.approx(expected.score, abs=1e-4)
    assert {layer.length for layer in cache} == {9 + 39} and cache.sizes.batch_size == 1
    after = list(generate(model, expected.ids[-1:], cache, 4, eos_token_ids=[]))
    assert after == list(
        generate(model, ids[0].tolist() + expected.ids, max_new_tokens=4, eos_token_ids=[])
    )


def test_a_beam_that_nobody_takes_to_its_end_is_forgotten(models):
    _, model = models
    ids, cache = random_ids(7, 1, 9, V), make_cache("static", model.config, capacity=60)
    answer = BeamGeneration(model, ids, cache, max_new_tokens=12, eos_token_ids=[], beams=3)
    taken = [next(answer).token for _ in range(4)]
    answer.finish("loop")
    assert (
        list(answer) == []
        and answer.tokens == taken
        and {layer.length for layer in cache} == {9 + 3}
    )
    # Cannot go back: empty rather than another text.
    window = make_cache("sliding", model.config, window=4)
    answer = BeamGeneration(model, ids, window, max_new_tokens=12, eos_token_ids=[], beams=3)
    next(answer)
    answer.finish("loop")
    assert window.length == 0


def test_the_first_token_of_a_beam_comes_after_the_whole_search(models, monkeypatch):
    """One prefill, four decodes, and the winner once more."""
    _, model = models
    clock = Clock(monkeypatch)
    monkeypatch.setattr(beam_module, "perf_counter", clock)
    monkeypatch.setattr(generation_module, "perf_counter", clock)
    clock.slow(beam_module, "decode", 1), clock.slow(beam_module, "verify_draft", 3)
    clock.slow(generation_module, "prefill", 10)
    cache = make_cache("dict", model.config)
    generation = BeamGeneration(
        model, random_ids(9, 1, 6, V), cache, max_new_tokens=5, eos_token_ids=[], beams=2
    )
    for _ in generation:
        clock.now += 100
    t = generation.timings
    assert (t.prefill_seconds, t.first_token_seconds, t.decode_seconds) == (10, 17, 7)


def test_a_stopped_generation_of_beams_says_so(models):
    _, model = models
    ids, cache, calls = random_ids(7, 1, 9, V), make_cache("dict", model.config), []

    def should_stop():
        calls.append(1)
        return len(calls) == 4

    answer = BeamGeneration(
        model, ids, cache, max_new_tokens=12, eos_token_ids=[], beams=3, should_stop=should_stop
    )
    assert (
        len(list(answer)) == 3 and answer.finish_reason == "interrupted" and cache.length == 9 + 2
    )


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failure_while_the_winner_is_fed_leaves_the_prompt(models, monkeypatch, error):
    _, model = models
    ids, cache = random_ids(7, 1, 9, V), make_cache("dict", model.config)
    answer = BeamGeneration(model, ids, cache, max_new_tokens=12, eos_token_ids=[], beams=2)

    def fail(*args, **options):
        verify(*args, **options)
        cache[0].truncate(10)
        raise error

    verify = beam_module.verify_draft
    monkeypatch.setattr(beam_module, "verify_draft", fail)
    with pytest.raises(error):
        next(answer)
    assert {layer.length for layer in cache} == {9}


# --- nanokv generate --beams ----------------------------------------------------------------------------------------

PROMPT = "Once upon a time there was a"


def test_the_command_prints_the_best_beam_of_transformers(tiny_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    expected = reference_beams(reference, ids, 3, 8, [2, 0], length_penalty=0.5)
    flags = ("-m", tiny_folder, "-n", "8", "--beams", "3", "--length-penalty", "0.5")
    done = run_cli("generate", "--raw", PROMPT, *flags, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [beam["token_ids"] for beam in answer["choices"]] == [ids for ids, _ in expected]
    assert [beam["score"] for beam in answer["choices"]] == pytest.approx(
        [value for _, value in expected], abs=1e-5
    )
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in expected]
    assert [(beam["index"], beam["text"]) for beam in answer["choices"]] == list(enumerate(texts))
    reasons = ["stop" if ids[-1] in (0, 2) else "length" for ids, _ in expected]
    assert [beam["finish_reason"] for beam in answer["choices"]] == reasons
    assert answer["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in expected)
    assert (
        f"{ids.shape[1]} prompt → {len(expected[0][0])} out · best of 3 beams, score".encode()
        in done.stderr
    )
    from nanokv.apps.cli.common.terminal import sanitize

    text = sanitize(texts[0])
    done = run_cli("generate", "--raw", PROMPT, *flags, "-q")
    assert (done.stdout.decode(), done.stderr) == (text + "\n" * (not text.endswith("\n")), b"")


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        (["--beams", "2", "-t", "0.7"], "draws nothing: --temperature", "leave out --temperature"),
        (["--beams", "2", "--top-k", "5"], "draws nothing: --top-k", "leave out --top-k"),
        (["--beams", "2", "--seed", "1"], "draws nothing: --seed", "leave out --seed"),
        (["--beams", "2", "--stop", "x"], "--stop works on a stream", "leave out --stop"),
        (
            ["--beams", "2", "--speculate", "ngram"],
            "--speculate works on a stream",
            "leave out --speculate",
        ),
        (["--length-penalty", "2"], "--length-penalty is part of beam search", "--beams 4"),
        (["--beams", "0"], "--beams: 0 is not a whole number", ""),
    ],
)
@pytest.mark.parametrize("words", [["generate", "x"], ["chat"]])
def test_flags_that_beams_would_ignore_are_refused(capsys, words, flags, message, hint):
    from nanokv.apps.cli import main

    assert main([*words, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and hint in err


def no_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


def test_beams_that_do_not_fit_into_memory_are_refused(capsys, monkeypatch, tiny_folder):
    from nanokv.apps.cli import main
    from nanokv.apps.cli.common import loading

    no_stdin(monkeypatch)
    # 2 layers · 2 (K, V) · 2 heads · 16 · 4 bytes at least: 40 tokens are more than 20 kB.
    each = 512
    monkeypatch.setattr(loading, "available_memory", lambda device: 100 * each)
    monkeypatch.setattr(loading, "check_memory", lambda plan, available, flags=None: None)
    assert main(["generate", "x", "-m", str(tiny_folder), "-n", "40", "--beams", "9"]) == 2
    err = capsys.readouterr().err
    assert "--beams 9 needs" in err and "51.2 kB are free" in err and "--max-new-tokens" in err


def test_greedy_temperature_goes_with_beams(monkeypatch, tiny_folder):
    """-t 0 says what beam search does anyway."""
    from nanokv.apps.cli import main

    no_stdin(monkeypatch)
    assert (
        main(
            [
                "generate",
                "x",
                "-m",
                str(tiny_folder),
                "-n",
                "2",
                "--beams",
                "2",
                "-t",
                "0",
                "--top-p",
                "1",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    "flags", [["-n", "300"], [], ["-n", "9"], ["--cache", "paged:page=4:pages=12"]]
)
def test_the_reason_to_end_is_that_of_plain_generate(capsys, monkeypatch, endless_folder, flags):
    """No eos: both end at the length that was asked for, or at the end of context or pool, and say which it was."""
    from nanokv.apps.cli import main

    reasons = []
    for beams in ([], ["--beams", "2"]):
        no_stdin(monkeypatch)
        where = ["-m", str(endless_folder), "--context", "24"]
        assert main(["generate", "--raw", PROMPT, *where, *flags, *beams, "--json", "-q"]) == 0
        best = json.loads(capsys.readouterr().out)["choices"][0]
        reasons.append((best["finish_reason"], best["stop_reason"]))
    assert reasons == [("length", None if "9" in flags else "context")] * 2


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("form", ["json", "text"])
def test_ctrl_c_prints_the_best_beam_so_far(capsys, monkeypatch, endless_folder, at, form):
    """Without it, a search of 90,000 tokens could not be left; before the first token there is nothing to print."""
    import os
    import signal

    from nanokv.apps.cli import main

    decodes = []

    def press(step):
        def call(*args, **options):
            decodes.append(1)
            if len(decodes) == max(1, at):
                os.kill(os.getpid(), signal.SIGINT)
            return step(*args, **options)

        return call

    no_stdin(monkeypatch)
    monkeypatch.setattr("nanokv.apps.cli.common.terminal.SWALLOW_S", 0)
    name = "nanokv.decoding.beam.decode" if at else "nanokv.decoding.generation.prefill"
    monkeypatch.setattr(name, press(beam_module.decode if at else prefill))
    words = "name " * 600 if at == 0 else PROMPT
    argv = ["generate", words, "-m", str(endless_folder), "--beams", "3", "-n", "90000"]
    assert main([*argv, *(["--json"] if form == "json" else [])]) == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err and len(decodes) == max(1, at)
    if form == "json":
        answer = json.loads(out)
        best, *others = answer["choices"]
        assert (best["finish_reason"], best["stop_reason"], len(best["token_ids"])) == (
            "length",
            "interrupted",
            at,
        )
        assert (best["score"] is None, len(others)) == ((False, 2) if at else (True, 0))
    else:
        assert bool(out) == bool(at)


# --- nanokv chat --beams ----------------------------------------------------------------------------------------------


def chat(monkeypatch, capsys, folder, data, *flags):
    from nanokv.apps.cli import main

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    code = main(["chat", "-m", str(folder), *flags])
    return code, *capsys.readouterr()


def test_each_answer_of_a_chat_is_the_best_beam_and_the_next_turn_reuses_it(
    monkeypatch, capsys, tiny_folder
):
    from nanokv.loading import load

    model, tokenizer = load(tiny_folder)
    flags = ("--beams", "3", "--length-penalty", "0.5", "-n", "8", "--jsonl")
    code, out, err = chat(
        monkeypatch, capsys, tiny_folder, b"My name is Zorbla.\nWho am I?\n", *flags
    )
    turns, messages, held = [json.loads(line) for line in out.splitlines()], [], []
    assert (code, err, len(turns)) == (0, "", 2)
    for text, turn in zip(("My name is Zorbla.", "Who am I?"), turns, strict=True):
        messages.append({"role": "user", "content": text})
        ids = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True))
        best = beam_search(model, ids, 3, 8, length_penalty=0.5)[0]
        assert choice(turn)["token_ids"] == best.ids and turn["seed"] is None
        assert turn["usage"]["prompt_tokens"] == len(ids)
        assert turn["cache"]["tokens"] == len(ids) + len(best.ids) - 1
        assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == common_prefix(held, ids)
        messages.append({"role": "assistant", "content": text_of(turn)})
        held = ids + best.ids[:-1]


def test_the_winner_is_not_computed_again(tiny_folder):
    """/continue feeds one token, the last of what it keeps (a character that was cut in the middle is left out)."""
    from nanokv.chat.session import Session
    from nanokv.loading import load

    make = partial(BeamGeneration, beams=3)
    session = Session(*load(tiny_folder), params={"max_new_tokens": 8}, make_generation=make)
    session.ask("My name is Zorbla.")
    assert (
        session.last.out == 8 and session.cached_ids == session.prompt_ids + session.last.ids[:-1]
    )
    held = len(session.cached_ids)
    for _ in session.resume():
        pass
    assert session.last.new == 1 and session.last.reused > held - 4
    assert session.cache.length == len(session.cached_ids)


def test_a_chat_looks_at_the_memory_of_its_beams(monkeypatch, capsys, tiny_folder):
    from nanokv.apps.cli.common import loading

    monkeypatch.setattr(loading, "check_memory", lambda plan, available, flags=None: None)
    monkeypatch.setattr(loading, "available_memory", lambda device: 50_000)
    code, out, err = chat(monkeypatch, capsys, tiny_folder, b"Hi\n", "--beams", "9", "-n", "8")
    assert (code, out) == (2, "") and "--beams 9 needs" in err and "50.0 kB are free" in err


def test_settings_that_beams_would_ignore_cannot_be_set_in_a_chat():
    from types import SimpleNamespace

    from nanokv.apps.cli.chat import commands as chat_commands
    from nanokv.apps.cli.common.options import BeamOptions, SamplingOptions
    from nanokv.errors import NanoKVError

    said = []
    given = SimpleNamespace(sampling=SamplingOptions(beams=BeamOptions(3)))
    session, view = SimpleNamespace(params={}), SimpleNamespace(say=said.append)
    talk = SimpleNamespace(given=given, session=session, view=view)
    with pytest.raises(NanoKVError, match="draws nothing: temperature"):
        chat_commands.set_value(talk, "temperature 0.5")
    chat_commands.set_value(talk, "temperature 0")
    chat_commands.set_value(talk, "max_new_tokens 5")
    talk.given.sampling = SamplingOptions()
    chat_commands.set_value(talk, "seed 5")
    assert (
        talk.session.params == {"temperature": 0, "max_new_tokens": 5, "seed": 5} and len(said) == 3
    )
