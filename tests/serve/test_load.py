"""The load command: its arithmetic on reports that are made by hand; by the slow test, a real run against nanokv."""

import json
import re

import pytest

import load

TIMES = {
    "request_start_time": 10.0,
    "request_end_time": 12.0,
    "time_to_first_token_ms": 50.0,
    "inter_token_latency_ms": 4.0,
    "prompt_tokens": 9,
    "output_tokens": 32,
}


def report(*answers, errored=(), incomplete=()) -> dict:
    """As guidellm writes it; each answer: what differs from TIMES."""
    return {
        "requests": {
            "successful": [TIMES | answer for answer in answers],
            "errored": list(errored),
            "incomplete": list(incomplete),
        }
    }


def test_tokens_per_second_are_those_of_all_answers_together():
    later = {"request_start_time": 11.0, "request_end_time": 14.0, "time_to_first_token_ms": 150.0}
    found = load.figures(report({}, later, errored=[{}], incomplete=[{}, {}]), 32)
    assert (found["ok"], found["failed"], found["unfinished"]) == (2, 1, 2)
    assert found["tokens_per_s"] == 64 / 4 and found["prompt_tokens"] == 18
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == (50, 150)


def test_an_answer_that_is_too_short_counts_as_failed():
    found = load.figures(report({}, {"output_tokens": 31}), 32)
    assert (found["ok"], found["failed"]) == (1, 1) and found["tokens_per_s"] == 32 / 2


def test_without_an_answer_the_row_says_why():
    assert (
        "queue full"
        in load.figures(report(errored=[{"info": {"error": "queue full"}}]), 32)["error"]
    )
    assert "time was over" in load.figures(report(incomplete=[{}]), 32)["error"]
    assert "31 tokens, and 32" in load.figures(report({"output_tokens": 31}), 32)["error"]


@pytest.mark.parametrize("part, value", [(0.5, 50), (0.99, 99), (0.01, 1), (1.0, 100)])
def test_a_quantile_is_a_value_that_was_measured(part, value):
    assert load.quantile([float(number) for number in range(100, 0, -1)], part) == value
    assert load.quantile([7.0], part) == 7


def test_prompts_are_the_same_for_a_seed_and_half_of_them_share_a_beginning():
    found = load.texts(64, "0-8")
    assert found == load.texts(64, "0-8") and len(set(found)) == 64
    assert not set(found) & {*load.texts(64, "0-32"), *load.texts(64, "1-8")}
    beginnings = [" ".join(text.split()[: load.PREFIX_WORDS]) for text in found]
    shared = [beginning for beginning in beginnings if beginnings.count(beginning) > 1]
    assert len(shared) == 32 and len(set(shared)) == load.PREFIXES
    assert {len(text.split()) for text in found} == {
        *load.LENGTHS,
        *(load.PREFIX_WORDS + n for n in load.LENGTHS),
    }


def test_the_table_compares_at_each_number_of_clients_and_says_why_a_row_is_missing():
    rows = [
        {"server": "nanokv", "clients": 8, "tokens_per_s": 90.0},
        {"server": "nanokv", "clients": 1, "error": "x"},
        {"server": "transformers", "clients": 8, "tokens_per_s": 60.0},
        {"server": "llama.cpp", "error": "no | it"},
        {"server": "transformers", "clients": 1, "tokens_per_s": 5.0},
    ]
    assert [row.get("ratio") for row in load.with_ratios(rows)] == [1.0, None, 1.5, None, None]
    text = load.table(load.with_ratios(rows), "clients")
    assert "no / it" in text and "| transformers | 8 |  |  |  | 60.0 |" in text and "1.50" in text


def test_only_nanokv_can_fail_the_command():
    slow = {"server": "nanokv", "p99_over_alone": 4.1}
    lost = {"server": "nanokv", "lost": 1, "mixed_up": 0, "other": 0}
    fine = [
        {"server": "nanokv", "failed": 0, "p99_over_alone": 3.9},
        {"server": "llama.cpp", "error": "missing"},
    ]
    assert load.failed([*fine, slow, lost]) == [slow, lost]


def test_a_server_that_ends_while_it_loads_is_a_row_that_says_so(tmp_path, monkeypatch):
    dead = load.Server("nanokv", "0", ["sh", "-c", "echo no such weights; exit 3"], "load", {})
    monkeypatch.setitem(load.MAKERS, "nanokv", lambda *_: dead)
    monkeypatch.setattr(load, "folder_of", lambda source: tmp_path)
    # No generator is installed for a server that answers nothing.
    monkeypatch.setattr(load, "environment", lambda: None)
    rows = load.measure(load.parse([]), lambda line: None)
    assert rows == [{"server": "nanokv", "error": "ended with exit code 3: no such weights"}]


def test_a_peer_that_is_not_there_is_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "folder_of", lambda source: tmp_path)
    monkeypatch.setattr(load, "environment", lambda: None)
    rows = load.measure(
        load.parse(["--servers", "llama.cpp", "--llama-server", str(tmp_path / "none")]), print
    )
    assert len(rows) == 1 and "docs/serve.md" in rows[0]["error"]


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--servers", "vllm"], "no server vllm"),
        (["--clients", "0"], "at least 1"),
        (["--scenario", "many", "--model", "smollm2"], "bundled model"),
    ],
)
def test_wrong_flags_are_refused(flags, word, capsys):
    with pytest.raises(SystemExit):
        load.parse(flags)
    assert word in capsys.readouterr().err


@pytest.mark.night
def test_nanokv_under_load(tmp_path, capsys):
    try:
        load.environment()
    except load.Unavailable as error:
        pytest.skip(f"no load generator: {error}")
    file = tmp_path / "rows.json"
    assert (
        load.main(
            [
                "--clients",
                "8,32",
                "--rounds",
                "6",
                "--seconds",
                "90",
                "--threads",
                "1",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    for row, requests in zip(json.loads(file.read_text())["rows"], (48, 192), strict=True):
        assert (row["ok"], row["failed"], row["unfinished"], row["ratio"]) == (requests, 0, 0, 1.0)
        assert (
            row["prompt_tokens"] > requests * min(load.LENGTHS)
            and 0 < row["itl_p50_ms"] <= row["itl_p99_ms"]
        )
        assert row["tokens_per_s"] == pytest.approx(requests * 32 / row["seconds"])
        assert row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    said = capsys.readouterr().out
    assert "nanokv serve -m" in said and all(
        f"| nanokv | {row} | 0 | 0 |" in said for row in ("8 | 48", "32 | 192")
    )


@pytest.mark.slow
@pytest.mark.parametrize("requests", [500, pytest.param(5_000, marks=pytest.mark.night)])
def test_no_answer_is_lost_or_mixed_up(capsys, requests):
    assert load.main(["--scenario", "many", "--requests", str(requests), "--threads", "1"]) == 0
    row = rf"nanokv \| 32 \| {requests} \| (\d+) \| {requests} \| 0 \| 0 \| 0 \|"
    found = re.search(row, capsys.readouterr().out)
    assert found and int(found[1]) > 0.99 * requests, "nearly all answers are different"
