"""nanokv bench --through cli: the command that a user starts, timed from outside, beside the bench's own rows."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import nanokv
from nanokv.apps.cli.common import random_model
from nanokv.lab.bench import command
from nanokv.lab.bench.command import Command, comparison, endless, prompt_text
from nanokv.lab.bench.remote import PeerError
from nanokv.lab.bench.runners import Ours
from nanokv.text.tokenizer import Tokenizer
from small_model import small


@pytest.mark.parametrize("tokens", [1, 40, 333])
def test_a_prompt_has_about_the_tokens_that_are_asked_for(tokens):
    for tokenizer in (nanokv.load("tiny")[1], command.stand_in(600)):
        assert abs(len(tokenizer.encode(prompt_text(tokenizer, tokens, 1))) - tokens) <= 2
        assert tokens == 1 or prompt_text(tokenizer, tokens, 1) != prompt_text(tokenizer, tokens, 2)


def test_random_weights_get_a_tokenizer_with_an_id_for_every_row_and_never_end(tmp_path):
    model, _ = small()
    model.save(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 5}')
    folder = endless(tmp_path / "model", tmp_path / "endless", 97)
    assert Tokenizer.from_folder(folder).vocab_size == 97
    assert nanokv.GenerationConfig.from_folder(folder).eos_token_ids == ()
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text()) == {
        "eos_token_id": 5
    }
    assert torch.equal(nanokv.load(folder)[0].embed_tokens.weight, model.embed_tokens.weight)


@pytest.fixture
def endless_small(tmp_path):
    model, _ = small(vocab_size=300)
    model.save(tmp_path / "model")
    ours = Ours(model, "plain", "dict", {}, 1, torch.float32)
    return ours, endless(tmp_path / "model", tmp_path / "endless", 300)


def test_what_the_command_says_becomes_a_measurement(endless_small, monkeypatch):
    """Load = all until the object came, without what its own clocks say of the answer."""
    runner = Command(*endless_small, [])
    answer = {
        "timings": {"ttft_s": 0.5, "prefill_tok_s": 40.0, "decode_tok_s": 20.0},
        "usage": {"prompt_tokens": 19, "completion_tokens": 5},
    }
    asked = []
    monkeypatch.setattr(
        runner, "answered", lambda prompt, words, began: asked.append(words) or (answer, 3.0)
    )
    for seed in range(3):
        assert runner.measure(300, 20, 4, seed) == (20 / 40, 1 / 20)
    assert runner.waited(20) == {"prompt_tokens": 19, "load_s": 3.0 - 0.5 - 4 / 20, "ttft_s": 0.5}
    assert asked[0][-2:] == ["-n", "5"] and len(runner.waits[20]) == 3
    answer["usage"]["completion_tokens"] = 3
    with pytest.raises(PeerError, match="3 tokens came back, not 5"):
        runner.measure(300, 20, 4, 0)


def test_a_command_that_fails_is_told_in_its_own_words(endless_small):
    runner = Command(*endless_small, ["--threads", "0"])
    with pytest.raises(
        PeerError, match="ended with 2: nanokv: error: --threads: 0 is not a whole number"
    ):
        runner.measure(300, 20, 4, 0)


def test_a_command_that_ends_before_it_reads_a_long_prompt_is_told_as_well(endless_small):
    runner = Command(*endless_small, [])
    with pytest.raises(PeerError, match="no memory"):
        runner.answered("x" * 300_000, [sys.executable, "-c", "raise SystemExit('no memory')"], 0.0)


def test_a_row_whose_own_row_has_no_round_yet_is_left_out(endless_small):
    row = SimpleNamespace(runner=Command(*endless_small, []), context=8)
    assert comparison([row]) == []


def test_ctrl_c_during_the_command_is_no_failure_of_it(endless_small, monkeypatch):
    runner = Command(*endless_small, [])
    runner.words = [sys.executable, "-c", "raise SystemExit(130)"]
    with pytest.raises(KeyboardInterrupt):
        runner.measure(300, 20, 4, 0)


@pytest.mark.slow
def test_through_the_command_stands_beside_the_rows_of_the_bench(cli, monkeypatch):
    monkeypatch.setitem(random_model.RANDOM, "small-random", small(vocab_size=300)[0].config)
    code, out, err = cli(
        "bench",
        "-m",
        "small-random",
        "--dtype",
        "fp32",
        "--contexts",
        "24",
        "--steps",
        "3",
        "--repeat",
        "1",
        "--weights",
        "fast",
        "--caches",
        "static",
        "--threads",
        "1",
        "--through",
        "cli",
        "--json",
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(row["engine"], row["weights"], row["cache"]) for row in found["rows"]] == [
        ("nanokv", "fast", "static"),
        ("nanokv generate", "fast", "static"),
    ]
    own, through = found["rows"]
    (beside,) = found["through"]
    assert beside["prompt_tokens"] == 24 and beside["load_s"] > 0.1 > 0 < beside["ttft_s"]
    for name in ("prefill", "decode"):
        assert beside[f"{name}_ratio"] == pytest.approx(
            through[f"{name}_tok_s"] / own[f"{name}_tok_s"]
        )
