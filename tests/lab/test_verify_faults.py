"""`nanokv verify` against wrong code and wrong figures: each fault is put in, and the check that must find it named."""

import json
import sys

import pytest
import torch

import nanokv.lab.verify
import nanokv.model
from nanokv.cache import DictCache
from nanokv.config import Config
from nanokv.lab.verify import checks, evidence, figures, oracle
from nanokv.support import installing
from nanokv.text.tokenizer import Tokenizer
from verify_helpers import report_of, rows, verify_command  # noqa: F401 (the fixture `verify`)

# --- wrong code against transformers ----------------------------------------------------------------------------------


def interleaved(x, rope):
    """RoPE that pairs dimensions 2i and 2i+1, as the paper draws it and Qwen3 does not."""
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in rope)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def shifted_append(self, k, v):
    """A cache whose values slip by one position at every later append."""
    if self:
        k, v = torch.cat((self["key"], k), 2), torch.cat((self["value"].roll(1, 2), v), 2)
    self["key"], self["value"] = k, v
    return k, v


def test_rope_with_the_wrong_pairs_is_found(verify, tiny_folder, monkeypatch):
    monkeypatch.setattr(nanokv.model, "apply_rope", interleaved)
    report = report_of(verify, tiny_folder)
    assert (report["first_divergence"]["layer"], report["first_divergence"]["operation"]) == (
        0,
        "rope_k",
    )
    assert (
        report["status"]["rope"] == "ok" and report["status"]["cached = uncached, logits"] == "ok"
    )
    assert report["status"]["greedy tokens"] == "differs"


def test_a_wrong_cache_is_found_even_without_transformers(verify, tiny_folder, monkeypatch):
    """One pass is right, the steps are wrong: only cached against uncached can tell."""
    monkeypatch.setattr(DictCache, "append", shifted_append)
    report = report_of(verify, tiny_folder, "--alone")
    failed = {name for name, status in report["status"].items() if status == "differs"}
    assert failed == {"cached = uncached, logits", "cached = uncached, keys and values"}
    report = report_of(verify, tiny_folder)
    failed = {name for name, status in report["status"].items() if status == "differs"}
    assert (
        failed > {"keys and values, in steps", "greedy tokens"}
        and report["first_divergence"] is None
    )


def test_wrong_angles_at_far_positions_are_found(verify, tiny_folder, monkeypatch):
    """A table that stops at position 256 is right for every short prompt."""
    angles = nanokv.model.rope_angles
    monkeypatch.setattr(
        evidence, "rope_angles", lambda config, p, dtype: angles(config, p.clamp(max=256), dtype)
    )
    report = report_of(verify, tiny_folder)
    assert [name for name, status in report["status"].items() if status == "differs"] == ["rope"]


@pytest.mark.parametrize(
    ("method", "wrong", "check"),
    [
        ("encode", lambda right, self, text: right(self, text.strip()), "tokenizer encode"),
        (
            "decode",
            lambda right, self, ids: right(self, ids).replace("\ufffd", "?"),
            "tokenizer decode",
        ),
        ("render", lambda right, self, *a, **k: right(self, *a, **k) + "\n", "chat template"),
    ],
)
def test_a_wrong_tokenizer_is_found(verify, tiny_folder, monkeypatch, method, wrong, check):
    right = getattr(Tokenizer, method)
    monkeypatch.setattr(Tokenizer, method, lambda self, *a, **k: wrong(right, self, *a, **k))
    report = report_of(verify, tiny_folder)
    assert [name for name, status in report["status"].items() if status == "differs"] == [check]


def test_a_template_that_only_one_side_refuses_is_a_difference():
    both = ["refused: a"], ["refused: b"]
    sides = [evidence.Evidence("x", None, None, [], [], [], [], templates) for templates in both]
    questions = evidence.Questions([], 0, [], [], [{"messages": []}], None)
    assert checks.check_template(*sides, questions).status == "ok"
    sides[1].templates = ["text"]
    assert checks.check_template(*sides, questions).status == "differs"
    sides[1].templates = None
    assert checks.check_template(*sides, questions).status == "differs"


def test_greedy_tokens_may_differ_only_where_two_logits_tie():
    record = {(None, "embed_tokens"): torch.zeros(1, 1, 1)}
    row = torch.tensor([[1.0, 0.5, 0.5], [0.1, 1.0, 1.0 - 1e-6], [0, 0, 9.0]])

    def side(tokens):
        return evidence.Evidence("x", None, None, [record], [tokens], [], [], None, None, [row])

    assert checks.check_greedy(side([0, 1, 2]), side([0, 1, 2])).status == "ok"
    tie = checks.check_greedy(side([0, 1, 2]), side([0, 2, 0]))
    assert tie.status == "ok" and "1 prompts up to a tie" in tie.detail
    decode_erred = checks.check_greedy(side([0, 0, 2]), side([0, 1, 2]))
    assert decode_erred.status == "differs", (
        "the uncached logits prefer the reference's token: that is no tie"
    )
    wrong = checks.check_greedy(side([0, 1, 2]), side([0, 0, 2]))
    assert (
        wrong.status == "differs"
        and "new token 2" in wrong.detail
        and wrong.difference == pytest.approx(0.9)
    )
    assert checks.check_greedy(side([0, 1, 2]), side([0, 1, 99])).status == "differs", (
        "an id beyond the vocabulary"
    )


# --- without transformers, published figures --------------------------------------------------------------------------


def test_without_transformers_it_checks_what_it_can_and_says_what_it_skipped(
    verify, tiny_folder, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    assert oracle.version() is None
    code, out, _ = verify(tiny_folder)
    found = rows(out)
    assert code == 0 and found["files"] == found["cached = uncached, logits"] == "ok"
    needed = nanokv.lab.verify.NEEDS_REFERENCE
    assert {found[name] for name in needed} == {"skipped"}
    assert out.count(f"transformers is not installed: {installing.hint(['transformers'])}") == len(
        needed
    )
    assert (
        "no difference in 4 checks, but nothing to compare with" in out
        and "equal" not in out.splitlines()[-1]
    )


@pytest.fixture
def figure_of_tiny(tiny_folder, monkeypatch):
    """Published figures of the random checkpoint, made with transformers; recognised by the weights' sha256."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    model, tokenizer = (
        Qwen3ForCausalLM.from_pretrained(tiny_folder),
        AutoTokenizer.from_pretrained(tiny_folder),
    )
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7, 8]])).logits[0]
    prompt = tokenizer("My name is", return_tensors="pt")
    start = prompt["input_ids"].shape[1]
    new = model.generate(**prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, start:]
    messages = [{"role": "user", "content": "hi"}]
    weights = tiny_folder / "model.safetensors"
    figure = {
        "shape": {"hidden_size": 64},
        "weights_bytes": weights.stat().st_size,
        "weights_sha256": figures.sha256(weights),
        "logits": {
            "ids": [5, 6, 7, 8],
            "mean": logits.mean(-1).tolist(),
            "first": logits[0, :30].tolist(),
        },
        "greedy": [{"prompt": "My name is", "new_ids": new.tolist(), "tolerance": 1e-2}],
        "template": {
            "messages": messages,
            "ids": tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            ),
        },
    }
    monkeypatch.setattr(figures, "FIGURES", {"Acme/Tiny": figure})
    return figure


def test_published_figures_are_checked_and_can_fail(verify, tiny_folder, figure_of_tiny):
    report = report_of(verify, tiny_folder, "--alone")
    names = [
        "published logits, mean",
        "published logits, first",
        "published continuation",
        "published template ids",
    ]
    assert {report["status"][name] for name in [*names, "published model"]} == {"ok"}
    figure_of_tiny["logits"]["mean"][2] += 0.1
    figure_of_tiny["logits"]["first"][29] -= 0.5
    figure_of_tiny["greedy"][0]["new_ids"][5] ^= 1
    figure_of_tiny["template"]["ids"].pop()
    report = report_of(verify, tiny_folder, "--alone")
    assert [name for name, status in report["status"].items() if status == "differs"] == names


def test_a_model_is_recognised_by_weights_or_by_name_and_shape(
    tiny_folder, figure_of_tiny, tmp_path
):
    config = Config.from_folder(tiny_folder)
    assert figures.recognise("x", tiny_folder, config) == ("Acme/Tiny", "weights' sha256")
    hub = tmp_path / "models--Acme--Tiny" / "snapshots" / "abc"
    for source, folder in (("Acme/Tiny", tmp_path), ("x", tmp_path / "tiny"), ("x", hub)):
        assert figures.recognise(source, folder, config) == ("Acme/Tiny", "name and shape")
    assert figures.recognise("Tiny-2", tmp_path, config)[0] is None
    figure_of_tiny["shape"] = {"hidden_size": 65}
    assert figures.recognise("Acme/Tiny", tmp_path, config) == (
        None,
        "named like Acme/Tiny, but with another hidden_size",
    )


def test_the_figures_are_the_published_ones(qwen3_files):
    published = json.loads((qwen3_files / "goldens.json").read_text())
    base, chat = published["Qwen/Qwen3-0.6B-Base"], published["Qwen/Qwen3-0.6B"]
    ours = figures.FIGURES["Qwen/Qwen3-0.6B-Base"]
    assert ours["logits"]["ids"] == base["logits_test"]["input_ids"]
    assert ours["logits"]["mean"] == base["logits_test"]["logits_mean_dim_last"]
    assert ours["logits"]["first"] == base["logits_test"]["logits_0_0_first30"]
    assert (
        ours["greedy"][0]["prompt"] + ours["greedy"][0]["text"]
        == base["greedy_text"]["completion_full"]
    )
    ours = figures.FIGURES["Qwen/Qwen3-0.6B"]
    assert (ours["weights_bytes"], ours["weights_sha256"]) == (
        chat["weights_bytes"],
        chat["weights_sha256"],
    )
    assert ours["greedy"][0]["new_ids"] == chat["greedy"][0]["new_ids"]
    assert ours["greedy"][1]["text"] == chat["greedy"][1]["text_prefix"]
    assert ours["template"]["ids"] == chat["template_ids_no_thinking"]["ids"]
    config = json.loads((qwen3_files / "0.6B" / "config.json").read_text())
    assert figures.SHAPE_06B.items() <= config.items()


def test_published_tokens_and_template_hold_for_the_published_tokenizer(qwen3_files):
    tokenizer = Tokenizer.from_folder(qwen3_files / "tokenizer")
    assert [check.status for check in figures.check_qwen3_tokens(tokenizer)] == ["ok"]
    figure = figures.FIGURES["Qwen/Qwen3-0.6B"]["template"]
    assert figures.check_template_ids(tokenizer, **figure).status == "ok"
    assert (
        figures.check_template_ids(tokenizer, **figure | {"enable_thinking": True}).status
        == "differs"
    )
    for figure in figures.FIGURES["Qwen/Qwen3-0.6B-Base"]["greedy"]:
        prompt = tokenizer.encode(figure["prompt"])
        assert tokenizer.encode(figure["prompt"] + figure["text"])[: len(prompt)] == prompt, (
            "no merge over the border"
        )
