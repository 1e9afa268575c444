"""`nanokv memory`: published numbers, the built-in table against published files, formulas against nbytes."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cli_helpers import environment, run_cli
from nanokv import costs
from nanokv.cache.options import KINDS
from nanokv.config import Config
from nanokv.costs.memory import (
    FAMILY,
    MIXTURES,
    Estimate,
    binary,
    decimal,
    most_tokens,
    parse_rate,
    parse_size,
)
from nanokv.errors import CacheError, NanoKVError

pytestmark = pytest.mark.sampled

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 99,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def small(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def test_the_published_rows(cli):
    """Formula with numbers, GB and GiB; the cache of 0.6B is as large as its weights at 10,394 tokens."""
    code, out, err = cli("memory", "Qwen/Qwen3-0.6B", "--context", 32768, "--batch", 4)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[:4]]
    assert " ".join(rows[0]) == "weights 596,049,920 × 2 B (bf16) 1.192 GB 1.110 GiB"
    assert (
        " ".join(rows[1]) == "KV / token 2 × 28 layers × 8 KV heads × 128 × 2 B 114,688 B 112 KiB"
    )
    assert " ".join(rows[2]) == "KV total 114,688 × 32,768 × 4 15.03 GB 14.00 GiB"
    assert " ".join(rows[3]) == "equals the weights at 10,394 tokens"


@pytest.mark.parametrize("name", FAMILY | MIXTURES)
def test_the_built_in_table_equals_the_published_configs(qwen3_files, name):
    assert (FAMILY | MIXTURES)[name] == Config.from_folder(
        qwen3_files / name.removeprefix("Qwen/Qwen3-")
    )


def test_the_family_needs_neither_torch_nor_network():
    """A config-only question must answer at once, and on a plane."""
    code = (
        "import sys; sys.modules['socket'] = None; from nanokv.apps.cli import main; "
        "assert main(['memory', 'Qwen/Qwen3-14B', '--json']) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), check=True
    )
    assert json.loads(done.stdout)["parameters"] == 14_768_307_200


@pytest.mark.parametrize("where", ["", "config.json"])
def test_a_folder_and_a_file(cli, small, where):
    code, out, _ = cli("memory", small / where, "--context", 64, "--json")
    report = json.loads(out)
    config = Config.from_dict(SMALL)
    assert code == 0 and report["weights_bytes"] == 2 * costs.parameters(config)
    assert report["kv_bytes"] == 2 * 2 * 2 * 8 * 2 * 64 == report["cache"]["bytes"]
    assert [row["model"] for row in report["family"]][1:] == list(FAMILY)


YARN = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
}


def test_the_context_that_yarn_extends(cli, small):
    """factor × original, where that is more than config.json says: the default, and what --context may be."""
    (small / "config.json").write_text(json.dumps(SMALL | YARN))
    assert json.loads(cli("memory", small, "--json")[1])["context"] == 400
    code, _, err = cli("memory", small, "--context", 400)
    assert (code, err) == (0, "")
    assert (
        "--context 401 is more than the model's 400 positions"
        in cli("memory", small, "--context", 401)[2]
    )


def test_bf16_or_fp32_halves_or_doubles(cli, small):
    half, whole = (
        json.loads(cli("memory", small, "--dtype", d, "--json")[1]) for d in ("bf16", "fp32")
    )
    for key in ("weights_bytes", "kv_bytes_per_token", "kv_bytes"):
        assert 2 * half[key] == whole[key]
    assert half["crossover_tokens"] == whole["crossover_tokens"]


def test_check_allocates_every_cache(cli, small):
    from nanokv.cache import CACHES

    code, out, _ = cli("memory", small, "--context", 100, "--batch", 3, "--check", "--json")
    check = json.loads(out)["check"]
    assert (
        code == 0
        and set(check["caches"]) == set(CACHES)
        and (check["tokens"], check["batch"]) == (100, 3)
    )


@pytest.mark.parametrize(
    "cache",
    [
        "paged:page=7",
        "quantized:k_bits=8:v_bits=4:group=16:residual=0",
        "sliding:window=9:sinks=2",
        "quantized:bits=3:keys=lloyd:values=qjl:first=5:outliers=2",
        "batch:of=quantized:bits=2",
        "static",
    ],
)
def test_check_with_options(cli, small, cache):
    assert cli("memory", small, "--context", 75, "--batch", 2, "--cache", cache, "--check")[0] == 0


def test_a_wrong_formula_is_our_bug(cli, small, monkeypatch):
    monkeypatch.setattr("nanokv.costs.formulas.position_bytes", lambda *_: 0)
    code, _, err = cli("memory", small, "--check")
    assert code == 1 and "the formula says 0" in err


def test_the_names_and_options_are_those_of_make_cache():
    from nanokv.cache import CACHES

    assert list(KINDS) == list(CACHES)
    for name, known in KINDS.items():
        parameters = inspect.signature(CACHES[name]).parameters.values()
        assert list(known) == [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]


@pytest.mark.parametrize(
    "text",
    [
        "paged:pool=3",
        "prefix:pool=none",
        "batch:of=5",
        "batch:of=batch",
        "batch:of=paged:pool=1",
        "prefix:salt=5",
        "offloaded:folder=5",
        "quantized:bits=8.0",
        "quantized:k_bits=false",
        "sliding:window=-1",
        "paged:pages=1.5",
        "offloaded:to=tape",
        "batch:of=static:page=3",
        "quantized:rotate=2",
        "paged:page=true",
    ],
)
@pytest.mark.parametrize("command", ["memory", "generate"])
def test_both_commands_refuse_the_same_options_before_any_work(
    cli, monkeypatch, small, command, text
):
    """`small` has no weights: a `generate` that did not look first would complain about them."""
    monkeypatch.setattr("sys.stdin", None)
    argv = ["memory", small] if command == "memory" else ["generate", "x", "-m", small]
    code, out, err = cli(*argv, "--cache", text)
    assert (code, out) == (2, "") and len(err.splitlines()) <= 2
    option = text.split(":")[-1].split("=")[0]
    assert re.search(rf"{option} is |has no option {option}: its options are ", err), err


def test_a_program_may_pass_a_pool_but_nothing_else_as_one():
    from nanokv.cache import PagePool, PrefixPool, make_cache

    config = Config.from_dict(SMALL)
    make_cache("batch", config, of="paged", pool=PagePool(config, 4, 4))
    for name, pool in (
        ("paged", 3),
        ("prefix", PagePool(config, 4, 4)),
        ("batch", PrefixPool(config, 4, 4)),
    ):
        with pytest.raises(CacheError, match="pool"):
            make_cache(name, config, pool=pool)


@given(
    st.sampled_from(list(FAMILY)),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(1, 9),
    st.integers(1, 50_000),
    st.integers(0, 1 << 38),
    st.sampled_from(["dict", "static", "growing", "paged", "sliding"]),
)
@settings(max_examples=60, deadline=None)
def test_what_fits_fits_and_one_more_does_not(name, dtype, batch, context, size, kind):
    estimate = Estimate(name, FAMILY[name], dtype, context, batch, kind)
    # A window of one token keeps nothing, and any number fits.
    assume(estimate.cached(context, 1) > 0)
    rows, tokens = estimate.max_batch(size), estimate.max_context(size)
    room = size - estimate.weights
    assert rows == 0 or estimate.cached(context, rows) <= room
    assert estimate.cached(context, rows + 1) > room
    assert tokens == 0 or estimate.cached(tokens, batch) <= room
    assert estimate.cached(tokens + 1, batch) > room


def test_crossover():
    estimate = Estimate("x", FAMILY["Qwen/Qwen3-0.6B"], "bfloat16", 32768)
    assert estimate.crossover == 10_394
    assert estimate.cached(10_394, 1) <= estimate.weights < estimate.cached(10_395, 1)
    window = Estimate("x", estimate.config, "bfloat16", 32768, 1, "sliding", {"window": 100})
    assert window.crossover is None


def test_a_link_by_hand(cli):
    """Qwen3-0.6B, 8,192 tokens: 2 FLOPs per weight of the layers, 4·H·D·L for each visible key, one row of the head."""
    code, out, err = cli(
        "memory", "Qwen/Qwen3-0.6B", "--context", 8192, "--link", "10Gb/s", "--json"
    )
    found = json.loads(out)["link"]
    weights = 28 * (1024 * 2048 * 2 + 1024 * 1024 * 2 + 3 * 1024 * 3072)
    flops = 2 * weights * 8192 + 4 * 28 * 2048 * (8192 * 8193 // 2) + 2 * 151_936 * 1024
    assert (code, err) == (0, "") and found["bytes_per_second"] == 1.25e9
    assert found["bytes"] == 114_688 * 8192 and found["seconds"] == pytest.approx(
        0.751619, rel=1e-5
    )
    assert found["prefill_flops"] == flops == 14_913_377_140_736
    assert found["break_even_flops_per_second"] == pytest.approx(flops / found["seconds"])
    assert [row["model"] for row in found["family"]] == list(FAMILY | MIXTURES)
    mixture = found["family"][-1]
    # 8 of 128, and the router.
    experts = 48 * (2048 * 128 * (32 + 4) * 2 + 8 * 3 * 2048 * 768 + 2048 * 128)
    assert mixture["prefill_flops"] == (
        2 * experts * 8192 + 4 * 48 * 32 * 128 * (8192 * 8193 // 2) + 2 * 151_936 * 2048
    )
    assert mixture["bytes"] == 2 * 48 * 4 * 128 * 2 * 8192


def test_the_link_text(cli):
    code, out, _ = cli("memory", "Qwen/Qwen3-8B", "--context", 8192, "--link", "10 Gbit/s")
    told = " ".join(out.split())
    assert (
        code == 0 and "8,192 tokens prefilled elsewhere are 1.208 GB, 966 ms at 1.250 GB/s" in told
    )
    assert (
        "to prefill them here takes 133.6 TFLOP. A machine of 138.2 TFLOP/s takes as long for both"
        in told
    )
    assert "▸ Qwen3-8B 1.208 GB 966 ms 133.6 TFLOP 138.2 TFLOP/s" in told
    assert "Qwen3-30B-A3B 805.3 MB 644 ms 71.13 TFLOP 110.4 TFLOP/s" in told
    code, out, _ = cli("memory", "Qwen/Qwen3-30B-A3B", "--link", "1GB/s")
    assert code == 0 and "▸ Qwen3-30B-A3B" in out


def test_the_figures_of_the_docs_are_those_of_the_command(cli):
    text = (Path(__file__).parents[2] / "docs/handover.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| (Qwen3-.*) \|$", text, re.MULTILINE)
    out = cli("memory", "Qwen/Qwen3-8B", "--context", 8192, "--link", "10Gb/s")[1]
    assert len(quoted) == 7
    for row in quoted:
        assert " ".join(row.replace("|", "").split()) in " ".join(out.split())
    for flags, figures in (
        (["--cache", "quantized:bits=4"], ("355.9 MB", "469.2 TFLOP/s")),
        (["--link", "400Gb/s"], ("1.208 GB", "5.530 PFLOP/s")),
    ):
        out = cli("memory", "Qwen/Qwen3-8B", "--context", 8192, "--link", "10Gb/s", *flags)[1]
        assert all(figure in out and figure in text for figure in figures)


@pytest.mark.parametrize(
    "cache",
    ["quantized:bits=4", "sliding:window=100", "paged:page=7", "static", "sliding:window=1"],
)
def test_what_is_sent_is_what_the_cache_holds(cli, cache):
    """Codes as codes, a window as a window; no empty slot, and no division by nothing."""
    _, out, _ = cli(
        "memory",
        "Qwen/Qwen3-0.6B",
        "--context",
        1000,
        "--cache",
        cache,
        "--link",
        "1GB/s",
        "--json",
    )
    report = json.loads(out)
    sent, exact = report["link"]["bytes"], 114_688 * 1000
    held = report["cache"]["bytes_per_sequence"]
    assert (
        sent == (exact if cache in ("paged:page=7", "static") else held)
        and report["link"]["prefill_flops"] > 0
    )
    assert sent < exact or cache in ("paged:page=7", "static")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10Gb/s", 1.25e9),
        ("10 Gbit/s", 1.25e9),
        ("100Gbps", 1.25e10),
        ("1.25GB/s", 1.25e9),
        ("900MB/s", 9e8),
        ("64b/s", 8.0),
    ],
)
def test_rates(text, rate):
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    "text", ["10", "10G", "10GB", "Gb/s", "-1Gb/s", "0Gb/s", "1e9b/s", "10gb/s", "9" * 400 + "Gb/s"]
)
def test_speeds_that_are_none_are_refused(text):
    with pytest.raises(NanoKVError, match="is not the speed of a link") as raised:
        parse_rate(text)
    assert "10Gb/s" in raised.value.hint


def test_fits_text(cli):
    code, out, _ = cli("memory", "Qwen/Qwen3-8B", "--fits", "24GiB", "--context", 4096)
    room = 24 * 2**30 - 2 * 8_190_735_360
    assert code == 0 and f"{room // (147_456 * 4096)} sequences of 4,096 tokens" in out
    assert f"1 of a context of {room // 147_456:,} (the model is made for 40,960)" in " ".join(
        out.split()
    )
    code, out, _ = cli("memory", "Qwen/Qwen3-32B", "--fits", "24GiB")
    assert code == 0 and "does not hold the weights: 39.75 GB" in out


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * 2**30), ("24 gb", 24 * 10**9), ("1.5MiB", 3 * 2**19)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "24",
        "24G",
        "GiB",
        "-1GB",
        "0GiB",
        "1e9B",
        "24Gib/s",
        "9" * 400 + "GB",
        "9e9TB",
        "9" * 30 + "B",
    ],
)
def test_ambiguous_sizes_are_refused(text):
    with pytest.raises(NanoKVError, match="is not an amount of memory"):
        parse_size(text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-model"], "no model"),
        (["Qwen/Qwen3-0.6B", "--cache", "pagd"], "no cache is called 'pagd'"),
        (["Qwen/Qwen3-0.6B", "--cache", "paged:page=0"], "page is 0"),
        (["tiny", "--batch", "0"], "--batch"),
        (["Qwen/Qwen3-0.6B", "--cache", "dict:page=4"], "no option page"),
        (["Qwen/Qwen3-0.6B", "--cache", "quantized:bits=3"], "bits is 3"),
        (["Qwen/Qwen3-0.6B", "--fits", "lots"], "'lots' is not an amount"),
        (["Qwen/Qwen3-0.6B", "--link", "10G"], "'10G' is not the speed of a link"),
    ],
)
def test_refusals(cli, argv, message):
    code, out, err = cli("memory", *argv, "--offline")
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) <= 2


def test_more_context_than_the_model_has_is_said(cli):
    code, out, err = cli("memory", "Qwen/Qwen3-0.6B", "--context", 131072)
    assert code == 0 and "more than the model's 40,960 positions" in err and "131,072" in out


def test_plot(cli, tmp_path):
    code, _, err = cli("memory", "Qwen/Qwen3-0.6B", "--plot", tmp_path / "memory.svg")
    assert code == 0 and "memory.svg" in err and "Qwen3-32B" not in err
    assert (tmp_path / "memory.svg").read_text().startswith("<?xml")
    assert cli("memory", "Qwen/Qwen3-0.6B", "--plot", tmp_path / "memory.exe")[0] == 2


@pytest.mark.parametrize(
    ("count", "ten", "two"),
    [
        (114_688, "114,688 B", "112 KiB"),
        (1_192_099_840, "1.192 GB", "1.110 GiB"),
        (0, "0 B", "0 B"),
        (15_032_385_536, "15.03 GB", "14.00 GiB"),
        (999_999, "999,999 B", "976.6 KiB"),
        (10**15, "1.000 PB", "909.5 TiB"),
        (9_999_600_000, "10.00 GB", "9.313 GiB"),
        (2**30, "1.074 GB", "1.000 GiB"),
    ],
)
def test_number_texts(count, ten, two):
    assert (decimal(count), binary(count)) == (ten, two)


def test_bisection_ends():
    assert most_tokens(lambda n: n <= 7) == 7 and most_tokens(lambda n: False) == 0
    assert most_tokens(lambda n: True) is None


def test_a_pool_that_is_too_small_is_not_shown_as_one_that_fits():
    result = run_cli(
        "memory", "tiny", "--cache", "paged:pages=4", "--batch", "2", "--context", "64"
    )
    assert result.returncode == 2 and result.stdout == b""
    assert b"4 pages of 16 hold 64 tokens, not 2 \xc3\x97 64" in result.stderr
    assert b"pages=8, or --context 32" in result.stderr
    assert (
        run_cli(
            "memory", "tiny", "--cache", "paged:pages=8", "--batch", "2", "--context", "64"
        ).returncode
        == 0
    )
