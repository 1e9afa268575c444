"""`nanokv trace` without a browser: what is recorded equals what the public functions give, the page holds exactly
that, and nothing that a stranger can type becomes markup. tests/lab/test_trace_browser.py uses the page.
"""

import base64
import copy
import errno
import hashlib
import json
import os
import re
import shlex
import tomllib
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import nanokv
import nanokv.apps.cli.commands.trace
from cli_helpers import run_cli
from nanokv.apps.cli import main, make_parser
from nanokv.apps.cli.commands.trace import SCENARIOS, choose_layers, find_fault, replace
from nanokv.costs import kv_bytes
from nanokv.errors import NanoKVError
from nanokv.lab import faults, trace
from nanokv.lab.trace.difference import divergence, last_rows, places, top_logits, weight_gap
from nanokv.lab.trace.page import SCRIPTS, STYLES, pack, spans, visible
from nanokv.lab.trace.recorder import CacheLog, angle_positions

PROMPT = "My name is Zorbla. What is my name?"
POSSIBLE = [fault.name for fault in faults.FAULTS.values() if fault.scenario in SCENARIOS]


@pytest.fixture(autouse=True)
def _no_stdin(monkeypatch):
    """Nothing is piped in: the command would put it after the prompt."""
    monkeypatch.setattr("sys.stdin", None)


@pytest.fixture(scope="module")
def loaded():
    return nanokv.load("tiny")


@pytest.fixture(scope="module")
def ids(loaded):
    tokenizer = loaded[1]
    return tokenizer.encode(tokenizer.render([{"role": "user", "content": PROMPT}]))


@pytest.fixture(scope="module")
def run(loaded, ids):
    return trace.record(loaded[0], ids, max_new_tokens=24)


@pytest.fixture(scope="module")
def page(loaded, run):
    costs = trace.measure(loaded[0], run, repeat=1)
    return trace.build(*loaded, run, costs, name="tiny", prompt=PROMPT)


def data_of(page: str) -> dict:
    """The JSON block, found as a browser finds it."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    )


def numbers(array: dict) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(array["data"]), "<" + array["kind"]).astype(np.float32)
    return values * np.float32(array["scale"])


# --- the recording ------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_generate(loaded, ids, run):
    assert run.tokens == ids + list(nanokv.generate(loaded[0], ids, max_new_tokens=24))
    assert len(run.steps) > 4 and run.stopped == ""


def test_logits_are_those_of_prefill_and_decode(loaded, ids, run):
    """Bit for bit: looking on changes nothing."""
    model, cache = loaded[0], nanokv.make_cache("dict", loaded[0].config)
    logits = nanokv.prefill(model, torch.tensor([ids]), cache)
    for n, step in enumerate(run.steps):
        assert torch.equal(step.logits, logits[0])
        assert step.start_pos == (cache.length - 1 if n else 0)
        logits = nanokv.decode(model, torch.tensor([[step.chosen]]), cache, start_pos=cache.length)


def test_rows_and_bytes_are_those_of_the_real_cache(loaded, ids, run):
    """After every step, in every layer; and the measured bytes are the formula's."""
    model, cache = loaded[0], nanokv.make_cache("dict", loaded[0].config)
    nanokv.prefill(model, torch.tensor([ids]), cache)
    for n, step in enumerate(run.steps):
        assert step.nbytes == cache.nbytes == kv_bytes(model.config, cache.length, 1, 4)
        for layer, log in run.caches.items():
            rows = log.at(n)  # (S,2,Hk,D)
            for part, name in enumerate(("key", "value")):
                real = cache[layer][name][0].transpose(0, 1)  # (S,Hk,D)
                assert torch.equal(rows[:, part], real)
                assert torch.equal(rows[:, part].norm(dim=-1), real.norm(dim=-1))
        nanokv.decode(model, torch.tensor([[step.chosen]]), cache, start_pos=cache.length)


def test_attention_weights_reproduce_the_output_of_attention(loaded, ids, run):
    """Weights times the recorded values, heads merged, is what o_proj is given in a run that nobody watches."""
    model, seen = loaded[0], []
    hooks = [
        block.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for block in model.layers
    ]
    try:
        list(nanokv.generate(model, ids, max_new_tokens=24))
    finally:
        for hook in hooks:
            hook.remove()
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    outputs = iter(seen)
    for n, step in enumerate(run.steps):
        for layer in run.layers:
            weights = step.attention[layer]  # (H,T,S)
            values = (
                run.caches[layer].at(n)[:, 1].transpose(0, 1).repeat_interleave(groups, 0)
            )  # (H,S,D)
            merged = (weights @ values).transpose(0, 1).flatten(1)  # (T,H·D)
            torch.testing.assert_close(merged, next(outputs)[0].float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
            future = torch.ones(weights.shape[1:], dtype=torch.bool).triu(
                weights.shape[2] - weights.shape[1] + 1
            )
            assert not weights[:, future].any()
    assert max(step.error for step in run.steps) < 1e-4


def test_angles_are_those_of_the_positions(loaded, run):
    fed = 0
    for step in run.steps:
        assert angle_positions(loaded[0], step) == list(range(fed, fed + len(step.fed)))
        fed += len(step.fed)


def test_nothing_stays_attached(loaded, ids):
    """Neither after a run nor after one that fails."""
    model = loaded[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace.record(model, ids, 2)
    with faults.inject("wrong_axis"), pytest.raises(RuntimeError, match="Sizes of tensors"):
        trace.record(model, ids, 4)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_row_is_kept_once_unless_it_changes():
    log, rows = CacheLog(), torch.arange(24.0).reshape(4, 2, 1, 3)
    for now in (rows[:2], rows[:3], torch.cat((rows[:1] + 1, rows[1:])), rows[2:]):
        log.note(now)
    assert log.steps == [(2, [0, 1]), (3, [2]), (4, [0, 3]), (2, [0, 1])]
    assert torch.equal(log.at(1), rows[:3]) and torch.equal(log.at(3), rows[2:])
    assert log.at(2)[0, 0, 0, 0] == 1


def test_layers_limit_what_is_kept_not_what_runs(loaded, ids, run):
    few = trace.record(loaded[0], ids, 3, layers=[0, 5])
    assert list(few.caches) == [0, 5] == list(few.steps[1].attention)
    assert few.steps[1].nbytes == run.steps[1].nbytes and torch.equal(
        few.steps[2].logits, run.steps[2].logits
    )


def test_measured_times_have_one_entry_a_step(loaded, run):
    costs = trace.measure(loaded[0], run, repeat=2)
    assert (
        len(costs.cached) == len(costs.uncached) == len(run.steps)
        and min(costs.cached + costs.uncached) > 0
    )
    assert costs.difference < 1e-3
    assert trace.measure(loaded[0], run, repeat=1, uncached=False).uncached == []


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POSSIBLE)
def test_every_fault_that_a_trace_offers_can_be_recorded_and_shown(name, loaded, ids, run):
    model, tokenizer = loaded
    with faults.inject(name):
        if faults.FAULTS[name].scenario == "two_requests":
            list(nanokv.generate(model, ids[:7], max_new_tokens=2))
        wrong = trace.record(model, ids, 12, may_fail=True)
    fault = trace.Fault(name, "about", wrong)
    costs = trace.Costs(1, [0.0] * len(run.steps), [])
    data = data_of(trace.build(model, tokenizer, run, costs, name="tiny", prompt="", fault=fault))
    assert data["fault"]["name"] == name and len(data["runs"]) == 2
    assert len(data["runs"][1]["steps"]) == len(wrong.steps) > 0
    # Also of what a fault handed to the kernel.
    assert max(step.error for step in wrong.steps) < 1e-4


def test_the_step_where_a_fault_shows(loaded, ids, run):
    def parted(name):
        with faults.inject(name):
            return divergence(run, trace.record(loaded[0], ids, 24, may_fail=True), 1e-4)

    restarts, rounded = parted("start_pos_restarts"), parted("rounded_to_bf16")
    assert (
        restarts["logitsStep"] == 1 and restarts["wordsStep"] >= 1 and restarts["bytesStep"] is None
    )
    assert rounded["logitsStep"] == 0 and rounded["wordsStep"] is None
    queries = parted("cached_queries")
    assert queries["logitsStep"] is queries["wordsStep"] is None and queries["bytesStep"] == 0
    assert parted("wrong_axis")["wordsStep"] == 1  # where it broke off
    assert divergence(run, run, 1e-4)["logitsStep"] is None


def test_wrong_angles_are_seen_as_the_positions_that_they_are(loaded, ids):
    with faults.inject("start_pos_restarts"):
        wrong = trace.record(loaded[0], ids, 4)
    assert [angle_positions(loaded[0], step) for step in wrong.steps[1:]] == [[0]] * 3
    assert [step.start_pos for step in wrong.steps[1:]] == [len(ids), len(ids) + 1, len(ids) + 2]


def test_rows_left_behind_are_recorded(loaded, ids):
    with faults.inject("not_cleared"):
        list(nanokv.generate(loaded[0], ids[:7], max_new_tokens=1))
        wrong = trace.record(loaded[0], ids, 2)
    assert wrong.caches[0].steps[0][0] == len(ids) + 7
    assert wrong.steps[0].attention[0].shape[-1] == len(ids) + 7


# --- right minus wrong --------------------------------------------------------------------------------------------


def cached(model, run, name=None):
    """Keys and values (L,2,S,Hk,D) after each step of a recorded run's tokens, out of a cache that nobody watched."""
    with faults.inject(name) if name else nullcontext():
        cache, found = nanokv.make_cache("dict", model.config), []
        for step in run.steps:
            if step.start_pos:
                nanokv.decode(model, torch.tensor([step.fed]), cache, start_pos=cache.length)
            else:
                nanokv.prefill(model, torch.tensor([step.fed]), cache)
            rows = [
                torch.cat((layer["key"], layer["value"])).transpose(1, 2) for layer in cache
            ]  # (2,S,Hk,D)
            found.append(torch.stack(rows))
    return found


def known_after(listed, step: int, layers: int, rows: int) -> torch.Tensor:
    """(L,S,3): the newest amounts of each place, as the page reads the list."""
    table = torch.zeros(layers, rows, 3)
    for n, layer, position, *amounts in listed:
        if n <= step:
            table[layer, position] = torch.tensor(amounts)
    return table


@pytest.fixture(scope="module")
def restarted(loaded, ids):
    with faults.inject("start_pos_restarts"):
        return trace.record(loaded[0], ids, 6)


def test_differences_are_keys_and_values_of_the_right_cache_minus_those_of_the_wrong(
    loaded, ids, run, restarted
):
    model, listed = loaded[0], places(run, restarted, torch.float32)
    assert listed == sorted(listed)
    rights, wrongs = cached(model, run), cached(model, restarted, "start_pos_restarts")
    rounding = 1e-4 * rights[-1].abs().amax((2, 3, 4))[:, None]  # (L,1,2): what counts as equal
    for n, (right, wrong) in enumerate(zip(rights, wrongs, strict=False)):
        expected = (right - wrong).abs().amax((-1, -2)).transpose(1, 2)  # (L,S,2)
        table = known_after(listed, n, *expected.shape[:2])[..., :2]
        torch.testing.assert_close(table, expected.where(expected > rounding, 0.0))


def test_the_first_difference_of_restarting_positions_is_the_first_key_of_the_answer(
    ids, run, restarted
):
    step, layer, position, key, value, weight = places(run, restarted, torch.float32)[0]
    # The prompt is right, and so is the value: it is not rotated.
    assert (step, layer, position) == (1, 0, len(ids))
    assert key > 0.1 and value == 0 and weight > 0
    gap = (run.steps[1].attention[0] - restarted.steps[1].attention[0]).abs().max().item()
    assert weight == pytest.approx(gap)


def test_rows_left_behind_are_compared_by_token(loaded, ids, run):
    """Layer 0 computes the same keys behind older rows; only its attention differs."""
    with faults.inject("not_cleared"):
        list(nanokv.generate(loaded[0], ids[:7], max_new_tokens=1))
        wrong = trace.record(loaded[0], ids, 2)
    listed = places(run, wrong, torch.float32)
    first = [place for place in listed if place[:2] == (0, 0)]
    assert listed[0][:3] == (0, 0, 0) and {place[3:5] for place in first} == {(0, 0)}
    # Query 0 gives it to older rows, not to itself.
    stale = wrong.steps[0].attention[0][:, 0, :7].sum(-1).max().item()
    assert listed[0][5] == pytest.approx(stale, abs=1e-5)


@pytest.mark.parametrize("name", ["cached_queries", "repeated_before_caching"])
def test_a_fault_of_memory_only_differs_nowhere(name, loaded, ids, run):
    with faults.inject(name):
        wrong = trace.record(loaded[0], ids, 4)
    assert places(run, wrong, torch.float32) == []


def test_top_logits_are_those_of_both_runs(run, restarted):
    for step, a, b in zip(top_logits(run, restarted), run.steps, restarted.steps, strict=False):
        assert {i for i, _, _ in step} == {
            *a.logits.topk(5).indices.tolist(),
            *b.logits.topk(5).indices.tolist(),
        }
        assert all((x, y) == (a.logits[i].item(), b.logits[i].item()) for i, x, y in step)


def test_the_page_has_the_differences_with_four_digits_and_null_for_what_is_no_number(
    loaded, run, restarted
):
    broken = copy.deepcopy(restarted)
    broken.caches[0].rows[-1][0, 0, 0, 0] = torch.nan
    fault = trace.Fault("x", "about", broken)
    costs = trace.Costs(1, [0.0] * len(run.steps), [])
    data = data_of(trace.build(*loaded, run, costs, name="", prompt="", fault=fault))["fault"]
    exact = places(run, broken, torch.float32)
    shown = [tuple(place) for place in data["places"]]
    assert [place[:3] for place in shown] == [place[:3] for place in exact]
    for a, b in zip(
        (x for place in shown for x in place[3:]),
        (x for place in exact for x in place[3:]),
        strict=True,
    ):
        assert a is None if b == np.inf else a == pytest.approx(b, rel=1e-3)
    assert [None in place for place in shown].count(True) == 1
    logits = [one.steps[1].logits[run.steps[1].chosen].item() for one in (run, broken)]
    assert data["logits"][1][0][2:] == logits


def test_rows_and_weights_of_other_lengths_end_with_the_newest_token():
    rows = torch.arange(6.0).reshape(3, 2)
    assert last_rows(rows, 2).tolist() == [[2, 3], [4, 5]]
    assert last_rows(rows, 4)[0].isnan().all() and torch.equal(last_rows(rows, 4)[1:], rows)
    assert weight_gap(torch.tensor([[[1.0]]]), torch.tensor([[[0.25, 0.75]]])).tolist() == [
        [[-0.25, 0.25]]
    ]


# --- the page -----------------------------------------------------------------------------------------------------


def test_page_holds_what_was_recorded(run, page):
    data = data_of(page)["runs"][0]
    norms = numbers(data["arrays"]["norms"])
    real = np.concatenate(
        [torch.cat(run.caches[layer].rows).norm(dim=-1).flatten() for layer in run.layers]
    )
    assert np.abs(norms - real).max() <= data["arrays"]["norms"]["error"] * (1 + 1e-6)
    assert [t[0] for t in data["tokens"]] == run.tokens
    for n, step in enumerate(run.steps):
        top = step.logits.topk(10)
        assert [i for i, _ in data["steps"][n]["top"]] == top.indices.tolist()
        assert np.array_equal(
            numbers(data["arrays"]["logits"])[10 * n : 10 * n + 10], top.values.numpy()
        )
    weights = numbers(data["arrays"]["attention"])
    kept = [n for step in data["seen"] for layer in step for n in layer[1:]]
    assert len(weights) == 6 * sum(kept) and kept[: len(run.ids)] == list(
        range(1, len(run.ids) + 1)
    )
    last = run.steps[-1].attention[5][-1, 0]  # (S,), what lies at the very end
    assert np.abs(weights[-len(last) :] - last.numpy()).max() <= data["arrays"]["attention"][
        "error"
    ] * (1 + 1e-6)


def test_rounding_is_stated_and_nothing_overflows():
    x = torch.tensor([1e6, -3.0, 0.1, float("inf"), float("nan")])
    packed = pack([x])
    back = numbers(packed)
    assert packed["scale"] == 32 and np.isinf(back[3]) and np.isnan(back[4])
    assert packed["error"] == pytest.approx(np.abs(back[:3] - x[:3].numpy()).max())
    assert pack([x[1:3]], "f4")["error"] == 0 and pack([])["count"] == 0
    assert spans([4, 5, 6, 9]) == [[4, 3], [9, 1]]


class Tags(HTMLParser):
    """Counts start tags, as a browser would see them."""

    def __init__(self, page):
        super().__init__()
        self.found, self.title, self._inside = [], "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data):
        self.title += data if self._inside == "title" else ""

    def handle_endtag(self, tag):
        self._inside = ""


HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>{{data}} ]]> \x00\x1b[2J\u202egnp.\u2028\x7f\x9b & é 日"


def test_a_hostile_prompt_stays_text(loaded, page):
    model, tokenizer = loaded
    run = trace.record(model, tokenizer.encode(HOSTILE), 2)
    costs = trace.Costs(1, [0.0, 0.0], [])
    hostile = trace.build(model, tokenizer, run, costs, name="</title><b>", prompt=HOSTILE)
    tags, usual = Tags(hostile), Tags(page)
    assert [tag for tag, _ in tags.found] == [tag for tag, _ in usual.found]
    assert "{{data}}" in tags.title and "</script><img src=x onerror=alert(1)>" in tags.title
    assert data_of(hostile)["prompt"] == visible(HOSTILE)
    hidden = [c for c in hostile if not c.isprintable() and c != "\n"]
    assert hidden == []
    assert "\\u001b[2J\\u202egnp" in visible(HOSTILE) and "é 日" in visible(HOSTILE)
    assert visible("a\tb\nc") == "a⇥b↵c"


def test_page_asks_for_nothing_and_runs_only_its_own_script(page):
    tags = Tags(page).found
    assert [
        attrs for tag, attrs in tags if tag in ("img", "iframe", "object", "embed", "form", "base")
    ] == []
    assert [attrs["href"] for tag, attrs in tags if "href" in attrs] == ["data:,", "#step"]
    assert [
        attrs
        for tag, attrs in tags
        if "src" in attrs or any(name.startswith("on") for name in attrs)
    ] == []
    # The name of a kind of element.
    assert set(re.findall(r"\w+://[^\"\s]+", page)) == {"http://www.w3.org/2000/svg"}
    policy = next(
        attrs["content"]
        for _, attrs in tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    for tag in ("style", "script"):
        text = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(text) == 1
        assert (
            f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(text[0].encode()).digest()).decode()}'"
            in policy
        )
    assert "default-src 'none'" in policy


def test_title_says_what_it_is(page):
    title = Tags(page).title
    assert all(part in title for part in ("tiny", PROMPT, nanokv.__version__, "recorded"))
    assert "recorded, not simulated" in page


def test_a_page_of_64_tokens_is_small_and_its_size_is_known_before(loaded, ids):
    model, tokenizer = loaded
    new = 64 - len(ids)
    run = trace.record(model, ids, new, eos_token_ids=[])
    costs = trace.Costs(1, [0.0] * new, [0.0] * new)
    for fault, runs in ((None, 1), (trace.Fault("x", "", run), 2)):
        size = len(
            trace.build(model, tokenizer, run, costs, name="tiny", prompt=PROMPT, fault=fault)
        )
        assert size < 3_000_000
        assert trace.page_bytes(model.config, len(ids), new, 6, runs) == pytest.approx(
            size, rel=0.1
        )


# --- the command --------------------------------------------------------------------------------------------------


def test_stdout_is_the_path_and_nothing_else(tmp_path):
    done = run_cli(
        "trace",
        "--chat",
        PROMPT,
        "-n",
        "6",
        "-o",
        tmp_path / "a.html",
        "--fault",
        "start_pos_restarts",
        "--layers",
        "5,0",
        "--repeat",
        "1",
        stdin=None,
    )
    assert (done.returncode, done.stdout.decode()) == (0, f"{tmp_path / 'a.html'}\n"), done.stderr
    data = data_of((tmp_path / "a.html").read_text())
    assert data["layers"] == [0, 5] and data["fault"]["name"] == "start_pos_restarts"
    assert {role for _, _, role in data["runs"][0]["tokens"]} == {"u", "a"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        (
            ["-n", "600"],
            r"\d+ \+ 600 tokens would be a page of about [\d.]+ MB; a trace has at most 512",
            "-n 49",
        ),
        (["-o", "{tmp}/none/a.html"], "there is no folder", "mkdir -p"),
        (["-o", "{tmp}"], "is not a file", "--out"),
        (["--layers", "0,6"], "'6' is not a layer from 0 to 5", "--layers 0"),
        (["--layers", ""], "is not a layer", "--layers 0"),
        (["--cache", "paged"], "only the dict cache can be traced", "--cache"),
        (
            ["--fault", "start_pos_restart"],
            "no fault is called 'start_pos_restart'",
            "did you mean start_pos_restarts",
        ),
        (["--fault", "top_left_mask"], "shows only in another situation", "one of"),
        (["--context", "8"], "the context of 8", "smaller -n"),
        (["--prompt", ""], "the prompt is empty", 'nanokv trace "What'),
    ],
)
def test_refusals_say_why_and_leave_with_2(flags, message, hint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [flag.replace("{tmp}", str(tmp_path)) for flag in flags]
    assert main(["trace", "--prompt", "Once upon a time", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 2
    assert re.search(message, err) and hint in err.splitlines()[1]
    assert list(tmp_path.iterdir()) == []


def test_a_fault_that_breaks_the_prefill_is_told(tmp_path, monkeypatch, capsys):
    record = trace.record
    monkeypatch.setattr(
        trace,
        "record",
        lambda *args, may_fail=False: (
            trace.Run(args[1], args[3], stopped="RuntimeError: shapes")
            if may_fail
            else record(*args)
        ),
    )
    assert (
        main(
            [
                "trace",
                "-p",
                "Once",
                "-n",
                "1",
                "--fault",
                "wrong_axis",
                "-o",
                str(tmp_path / "a.html"),
            ]
        )
        == 2
    )
    assert "broke the first step" in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_page(tmp_path, monkeypatch, capsys):
    place = tmp_path / "a.html"
    place.write_text("old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert (
        main(
            [
                "trace",
                "-p",
                "Once",
                "-n",
                "1",
                "--no-uncached",
                "--repeat",
                "1",
                "-o",
                str(place),
                "--force",
            ]
        )
        == 2
    )
    assert "No space left" in capsys.readouterr().err
    assert place.read_text() == "old" and list(tmp_path.iterdir()) == [place]


def test_the_page_changes_in_one_step(tmp_path):
    """Who has the old page open goes on reading the old one."""
    place = tmp_path / "a.html"
    place.write_text("old")
    with open(place) as reader:
        replace(place, "new")
        assert reader.read() == "old" and place.read_text() == "new"


def test_open_starts_the_browser_with_the_file(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    place = tmp_path / "a b.html"
    assert (
        main(
            [
                "trace",
                "-p",
                "Once",
                "-n",
                "1",
                "--no-uncached",
                "--repeat",
                "1",
                "-o",
                str(place),
                "--open",
            ]
        )
        == 0
    )
    assert opened == [place.as_uri()] and capsys.readouterr().out == f"{place}\n"


@pytest.mark.parametrize("number", ["05", "06", "07"])
def test_the_command_of_a_notebook_is_one(number):
    """As it stands in the text: it is parsed, and its fault can be recorded."""
    (source,) = (Path(trace.__file__).parents[3] / "notebooks" / "source").glob(f"{number}_*.py")
    (command,) = re.findall(r"^# \.venv/bin/nanokv (trace .*)$", source.read_text(), re.MULTILINE)
    args = make_parser("trace", nanokv.apps.cli.commands.trace).parse_args(shlex.split(command)[1:])
    assert (
        args.open
        and args.out.suffix == ".html"
        and (number == "07") == (find_fault(args.fault) is not None)
    )


def test_layers_are_a_list_of_numbers(loaded):
    config = loaded[0].config
    assert choose_layers(None, config) == [0, 1, 2, 3, 4, 5] and choose_layers(
        "5, 0,5", config
    ) == [0, 5]
    with pytest.raises(NanoKVError, match="²"):
        choose_layers("²", config)


def test_the_parts_of_the_page_are_package_data():
    """setuptools takes .py files by itself; what the page is made of has to be named."""
    folder = Path(trace.__file__).parent
    project = tomllib.loads((folder.parents[2] / "pyproject.toml").read_text())
    declared = {
        path
        for pattern in project["tool"]["setuptools"]["package-data"]["nanokv.lab.trace"]
        for path in folder.glob(pattern)
    }
    parts = {path for path in folder.rglob("*") if path.suffix in (".html", ".css", ".js")}
    assert parts == declared and {*SCRIPTS, *STYLES, "page.html"} == {path.name for path in parts}
