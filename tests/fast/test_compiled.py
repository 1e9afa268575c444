"""nanokv.fast.compiled: torch.compile over static shapes gives what the plain model gives, and compiles nothing twice.

Most tests trace with a backend that writes no code ("aot_eager", "eager"): what is traced, functionalised and counted
is the same for all. The default backend writes C++ and takes seconds for each width; it has tests of its own.
"""

import copy
import json
import shutil
import time
from importlib.util import find_spec

import pytest
import torch

import nanokv
from nanokv.attention import decode_attention
from nanokv.cache import CACHES, make_cache
from nanokv.errors import CapacityError, ConfigError
from nanokv.fast import compiled
from nanokv.fast.compiled import Compiled, Recorded
from nanokv.inference import decode, prefill, score, verify_draft
from nanokv.lab.bench import gpu, gpu_ranks, serving
from oracle import SHAPES, gap, pair, random_ids

CAPACITY = 100
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs g++, which is not here"
)


def small(**changes):
    """A random model of 3 layers, norms that are not 1, and 100 ids."""
    return pair(**SHAPES["G2-tied"] | changes)[1], random_ids(1, 1, CAPACITY)


@pytest.fixture(scope="module")
def traced():
    """(plain model, ids, the compiled one): shared, because a trace takes a second."""
    model, ids = small()
    return model, ids, Compiled(model, CAPACITY, backend="aot_eager")


def beside(model, fast, cache, ids, lengths, start=0):
    """Prefill parts of so many tokens (a decode for 1), each compared with the plain model over all of them."""
    expected, worst = score(model, ids[:, : start + sum(lengths)]), 0.0
    for n in lengths:
        part, path = ids[:, start : start + n], decode if n == 1 else prefill
        start += n
        worst = max(worst, gap(path(fast, part, cache, start - n), expected[:, start - 1]))
    assert cache.length == start
    return worst


# --- equal, and compiled once ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prompts_of_many_lengths_compile_once_a_width():
    model, ids = small()
    fast = Compiled(model, CAPACITY, backend="eager")
    for n in (*range(1, 41), 64):
        cache = fast.make_cache()
        assert gap(prefill(fast, ids[:, :n], cache), score(model, ids[:, :n])[:, -1]) <= 1e-5
        assert (
            gap(decode(fast, ids[:, n : n + 1], cache, n), score(model, ids[:, : n + 1])[:, -1])
            <= 1e-5
        )
    assert sorted(fast.compiles) == [1, 16, 32, 64]


@pytest.mark.slow
def test_parts_of_any_length_up_to_the_last_slot(traced):
    """The last part is filled up to 16 though only 3 slots are left: the filling goes nowhere."""
    model, ids, fast = traced
    cache = fast.make_cache()
    assert beside(model, fast, cache, ids, (5, 1, 1, 17, 2, 30, 1, 30, 10, 3)) <= 1e-5
    assert cache.length == CAPACITY
    assert len(fast.compiles) == len(set(fast.compiles))


def test_only_the_slots_of_real_tokens_are_written(traced):
    """Keys and values are those of a plain static cache, and nothing lies behind them."""
    model, ids, fast = traced
    cache, plain = fast.make_cache(), make_cache("static", model.config, capacity=CAPACITY)
    for n, start in ((19, 0), (1, 19)):
        (prefill if n > 1 else decode)(fast, ids[:, start : start + n], cache, start)
        prefill(model, ids[:, start : start + n], plain, start)
    for mine, theirs in zip(cache, plain, strict=True):
        assert gap(mine.keys[:, :, :20], theirs.keys[:, :, :20]) <= 1e-5
        assert gap(mine.values[:, :, :20], theirs.values[:, :, :20]) <= 1e-5
        assert not mine.keys[:, :, 20:].any() and not mine.values[:, :, 20:].any()


def test_slots_that_nobody_wrote_may_hold_anything(traced):
    """A slab filled by the plain model, NaN behind its tokens: 0 · NaN would be NaN."""
    model, ids, fast = traced
    cache = fast.make_cache()
    prefill(model, ids[:, :9], cache)
    for layer in cache:
        layer.keys[:, :, 9:], layer.values[:, :, 9:] = torch.nan, torch.nan
    assert beside(model, fast, cache, ids, (1, 4, 1), start=9) <= 1e-5


def test_plain_and_compiled_take_turns_on_one_cache(traced):
    model, ids, fast = traced
    cache = fast.make_cache()
    for start, who in ((0, fast), (10, model), (20, fast)):
        assert beside(model, who, cache, ids, (9, 1), start=start) <= 1e-5


def test_truncate_fork_and_verify(traced):
    model, ids, fast = traced
    cache = fast.make_cache()
    prefill(fast, ids[:, :30], cache)
    cache.truncate(12)
    copy = cache.fork()
    assert (
        gap(verify_draft(fast, ids[:, 12:17], cache, 12), score(model, ids[:, :17])[:, 12:]) <= 1e-5
    )
    assert beside(model, fast, copy, ids, (1, 20, 1), start=12) <= 1e-5
    assert len(fast.compiles) == len(set(fast.compiles))


def test_a_prompt_wider_than_the_widest_goes_in_parts():
    model, ids = small()
    fast = Compiled(model, CAPACITY, buckets=(8,), backend="eager")
    assert beside(model, fast, fast.make_cache(), ids, (37, 1, 9)) <= 1e-5
    assert sorted(fast.compiles) == [1, 8]
    assert (
        gap(verify_draft(fast, ids[:, :20], fast.make_cache(), 0), score(model, ids[:, :20]))
        <= 1e-5
    )


@pytest.mark.parametrize("shape", [name for name in SHAPES if not name.startswith("moe")])
def test_every_shape_of_model_and_two_rows(shape):
    """One layer: a trace takes as long as there are layers, and all have one shape."""
    model = pair(**SHAPES[shape] | {"num_hidden_layers": 1})[1]
    ids, fast = random_ids(2, 2, 30), Compiled(model, 40, batch_size=2, backend="eager")
    assert beside(model, fast, fast.make_cache(), ids, (20, 1, 5, 1)) <= 1e-5
    assert sorted(fast.compiles) == [1, 16, 32]


def test_generate_and_beams_run_on_it(traced):
    model, ids, fast = traced
    prompt = ids[0, :21].tolist()
    expected = list(nanokv.generate(model, prompt, max_new_tokens=30, eos_token_ids=[]))
    assert (
        list(
            nanokv.generate(
                fast, prompt, cache=fast.make_cache(), max_new_tokens=30, eos_token_ids=[]
            )
        )
        == expected
    )
    # A dict cache.
    assert list(nanokv.generate(fast, prompt, max_new_tokens=30, eos_token_ids=[])) == expected
    caches = make_cache("static", model.config, capacity=CAPACITY), fast.make_cache()
    beams = [
        nanokv.beam_search(m, prompt, 3, 6, eos_token_ids=[], cache=c)[0]
        for m, c in zip((model, fast), caches, strict=True)
    ]
    assert beams[0].ids == beams[1].ids and len(beams[0].ids) == 6
    assert len(fast.compiles) == len(set(fast.compiles))


# --- what it was not compiled for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", nanokv.CACHES)
def test_other_caches_run_on_the_plain_model(name):
    """Of another kind, or another size: right, and not compiled."""
    model, ids = small()
    fast = Compiled(model, CAPACITY, backend="eager")
    assert beside(model, fast, make_cache(name, model.config, capacity=50), ids, (11, 1, 5)) <= 1e-5
    assert fast.compiles == []


def test_another_attention_is_not_replaced(traced):
    model, ids, fast = traced
    cache, calls = fast.make_cache(), []

    def attend(q, k, v):
        calls.append(k.shape[2])
        return decode_attention(q, k, v)

    fast(ids[:, :1], cache, 0, attend)
    assert calls == [1] * model.config.num_hidden_layers


def test_overflow_is_refused_before_anything_is_written(traced):
    _, ids, fast = traced
    cache = fast.make_cache()
    prefill(fast, ids[:, :98], cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache]
    with pytest.raises(CapacityError, match="holds 98 of 100 tokens: 3 more do not fit"):
        prefill(fast, ids[:, :3], cache, 98)
    assert cache.length == 98
    assert all(
        torch.equal(layer.keys, k) and torch.equal(layer.values, v)
        for layer, (k, v) in zip(cache, before, strict=True)
    )


@pytest.mark.parametrize("start_pos", [0, 4, 6])
def test_a_wrong_start_pos_raises(traced, start_pos):
    _, ids, fast = traced
    cache = fast.make_cache()
    prefill(fast, ids[:, :5], cache)
    with pytest.raises(ValueError, match=f"start_pos is {start_pos}, but the cache holds 5"):
        decode(fast, ids[:, 5:6], cache, start_pos)


def test_a_cache_of_another_model_raises(traced):
    other = pair(**SHAPES["G4-bias"])[1]
    with pytest.raises(ValueError, match="made for another model"):
        prefill(traced[2], traced[1][:, :5], make_cache("static", other.config, capacity=CAPACITY))


def test_a_step_that_fails_counts_nothing(traced, monkeypatch):
    model, ids, fast = traced
    cache = fast.make_cache()
    prefill(fast, ids[:, :5], cache)

    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(fast.regions, 1, broken)
        with pytest.raises(KeyboardInterrupt):
            decode(fast, ids[:, 5:6], cache, 5)
    assert beside(model, fast, cache, ids, (1, 3), start=5) <= 1e-5


@needs_compiler
def test_optimize_offers_it():
    fast = nanokv.optimize(small()[0], compile=CAPACITY)
    assert isinstance(fast, Compiled) and fast.make_cache().capacity == CAPACITY


def test_optimize_refuses_both_at_once():
    with pytest.raises(ConfigError, match="choose one"):
        nanokv.optimize(small()[0], "int8", compile=CAPACITY)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 1.5}, "capacity is 1.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"buckets": ()}, "buckets is empty"),
        ({"buckets": (16, -1)}, "a bucket is -1"),
        ({"capacity": 100_000}, "more than the model's 512 positions"),
        ({"backend": "inducter"}, "'inducter' is not one"),
    ],
)
def test_sizes_are_checked(sizes, says):
    with pytest.raises((ConfigError, CapacityError), match=says):
        Compiled(small()[0], **{"capacity": 10, "backend": "eager"} | sizes)


@pytest.mark.parametrize(("capacity", "widest"), [(100, [64, 100]), (4096, [1024, 2048])])
def test_who_names_no_buckets_gets_powers_of_two(capacity, widest):
    fast = Compiled(small(max_position_embeddings=4096)[0], capacity, backend="eager")
    assert fast.widths[:3] == [1, 16, 32] and fast.widths[-2:] == widest


def test_without_a_compiler_the_error_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        Compiled(small()[0], capacity=10)


# --- recording ------------------------------------------------------------------------------------------------------


def repeated(step, device):
    """In place of a CUDA graph: `play` runs the step again, into the tensor of the first time."""
    output = step()
    return lambda: output.copy_(step()), output


def test_a_recorded_step_reads_its_inputs_and_keeps_no_result(monkeypatch):
    monkeypatch.setattr(compiled, "cuda_graph", repeated)
    slab = torch.zeros(4)
    step = Recorded(
        lambda tokens, positions, slabs: tokens * 10 + positions + slabs[0],
        torch.tensor(1),
        torch.tensor(2),
        [slab],
    )
    first = step(torch.tensor(3), torch.tensor(4))
    slab += 0.5
    assert step(torch.tensor(5), torch.tensor(6)).tolist() == [56.5] * 4
    assert first.tolist() == [34.0] * 4


def test_each_cache_has_a_recording_of_its_own(traced, monkeypatch):
    """Two caches in turn; one gets new slabs on the way; a recording goes with its cache."""
    model, ids, fast = traced
    recordings = []
    monkeypatch.setattr(
        compiled, "cuda_graph", lambda *asked: recordings.append(asked) or repeated(*asked)
    )
    monkeypatch.setattr(
        Compiled,
        "run",
        lambda self, tokens, start, cache, slabs: self.replay(
            tokens.clone(), torch.arange(start, start + 1), cache[0], slabs
        ),
    )
    caches = [fast.make_cache(), fast.make_cache()]
    for start in range(4):
        for cache in caches:
            assert beside(model, fast, cache, ids, (1,), start=start) <= 1e-5
    assert len(recordings) == 2
    caches[0].reorder([0])  # the same tokens in a new slab
    assert beside(model, fast, caches[0], ids, (1, 1), start=4) <= 1e-5
    assert len(recordings) == 3 and len(fast.recorded) == 2
    del cache, caches
    assert len(fast.recorded) == 0


class OnGpu(torch.Tensor):
    is_cuda = True


def test_only_the_decode_step_of_a_gpu_is_recorded(monkeypatch):
    """Which way is taken, on a machine without one: no width is compiled here, and no graph recorded."""
    fast = Compiled(small()[0], CAPACITY, backend="eager")
    fast.regions = {width: lambda model, tokens, positions, slabs: tokens for width in fast.widths}
    monkeypatch.setattr(Compiled, "replay", lambda self, *args: "recorded")
    tokens = torch.arange(5)[None]
    for T, gpu_too in ((1, True), (1, False), (2, True), (5, True), (5, False)):
        part = tokens[:, :T].as_subclass(OnGpu) if gpu_too else tokens[:, :T]
        found = fast.run(part, 0, fast.make_cache(), [])
        assert (
            found == "recorded" if (T, gpu_too) == (1, True) else found.tolist() == [list(range(T))]
        )


# --- the default backend --------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_compiler
def test_generated_code_is_equal_and_writes_in_place():
    """Decode alone: one compile of a few seconds."""
    model, ids = small()
    fast = Compiled(model, CAPACITY)
    cache = fast.make_cache()
    prefill(model, ids[:, :20], cache)
    slabs = [layer.keys.data_ptr() for layer in cache]
    assert beside(model, fast, cache, ids, [1] * 20, start=20) <= 1e-5
    assert [layer.keys.data_ptr() for layer in cache] == slabs
    assert fast.compiles == [1]


@pytest.mark.night
@needs_compiler
def test_generated_code_of_every_width():
    model, ids = small()
    fast = Compiled(model, CAPACITY)
    assert beside(model, fast, fast.make_cache(), ids, (5, 1, 17, 1, 33, 1, 1)) <= 1e-5
    assert sorted(fast.compiles) == [1, 16, 32, 64]


@pytest.mark.slow
@needs_compiler
def test_bf16_is_as_near_to_fp32_as_the_plain_model():
    """Fused operations round less often than single ones: other numbers than the plain model's, not worse ones."""
    model, ids = small()
    half = model.to(torch.bfloat16)
    exact, fast, logits = copy.deepcopy(half).float(), Compiled(half, CAPACITY), []
    for who, cache in (
        (fast, fast.make_cache()),
        (half, make_cache("static", half.config, capacity=CAPACITY)),
    ):
        steps = [
            prefill(who, ids[:, :20], cache),
            *(decode(who, ids[:, i : i + 1], cache, i) for i in range(20, 60)),
        ]
        logits.append(torch.cat(steps).float())
    expected = score(exact, ids[:, :60])[0, 19:]  # (41,V)
    compiled_error, plain_error = ((x - expected).square().mean().sqrt() for x in logits)
    assert 0 < compiled_error <= 1.2 * plain_error
    assert gap(*logits) <= 4e-2 * float(expected.abs().max())
    assert sorted(fast.compiles) == [1, 32]


# --- the GPU script -------------------------------------------------------------------------------------------------


HOST = [
    ("decode", 1),
    ("decode", 1),
    ("generate", 1),
    ("generate", 1),
    ("engine", 1),
    ("engine", 256),
]


@pytest.mark.slow
def test_the_gpu_script_runs_dry(tmp_path, capsys):
    assert gpu.main(["--dry-run", "--out", str(tmp_path / "dry")]) == 0
    report = json.loads((tmp_path / "dry.json").read_text())
    assert report["dry_run"] and report["faults"] == [] and report["cut"] == {}
    assert set(report["rows"]) == set(report["seconds"]) == set(gpu.PARTS)
    rows = report["rows"]
    checked = [row["check"] for row in rows["equality"]]
    kinds = [*sorted(CACHES), *(f"{n} rows of their own lengths" for n in (3, 9))]
    each = [f"{how}, {kind}" for how in ("plain", "optimize") for kind in kinds]
    assert checked == [*each, "draw"]
    assert all(row["gap"] <= row["most"] for row in rows["equality"])
    equality, *compiled = rows["compiled"]
    assert 0 < equality["gap"] <= 1e-4 and sorted(equality["compiles"]) == [1, 16]
    for part, count in (("decode", 6), ("prefill", 3), ("generate", 2), ("engine", 3)):
        assert len(rows[part]) == count == len({row["runner"] for row in rows[part]})
        assert all(row["tok_s"] > 0 for row in rows[part])
    assert all(row["step_bytes"] > 0 and row["share"] > 0 for row in rows["decode"] + compiled)
    assert all(row["equal"] for row in rows["offload"])
    if find_spec("triton"):
        assert [(row["path"], row["rows"]) for row in rows["host"]] == HOST
        assert all(0 < row["host_s"] <= row["slow_s"] for row in rows["host"])
    assert report["versions"]["torch"] == torch.__version__
    one, two = rows["ranks"]
    assert (one["ranks"], two["ranks"]) == (1, 2) and two["tok_s"] > 0 and 0 < two["gap"] <= 1e-5
    assert (two["sums"], two["summed_bytes"], two["gathered_bytes"]) == (
        2 * 3 + 1,
        7 * 2 * 64 * 2,
        2 * 49 * 2,
    )
    assert two["step_bytes"] < 0.6 * one["step_bytes"]
    text = (tmp_path / "dry.md").read_text()
    assert text.startswith("# Dry run on a CPU: no figures") and "nanokv compiled static" in text
    assert text.strip() in capsys.readouterr().out


def test_the_gpu_script_without_a_gpu_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "sees no GPU" in err


def test_the_gpu_script_has_a_shorter_name_and_ends_within_four_minutes():
    from nanokv.bench.gpu import main

    assert main is gpu.main
    assert sum(part.seconds for part in gpu.PARTS.values() if not part.long) <= 240


def dry(tmp_path, monkeypatch, parts):
    """The report of these parts, and what was on the disk when the last row of the first one came."""
    seen = []

    def watched(name, part):
        def rows(bench):
            for row in part(bench):
                yield row
                seen.append(json.loads((tmp_path / "dry.json").read_text())["rows"][name])

        return gpu.Part(rows, 1)

    monkeypatch.setattr(gpu, "LONGER", 1)
    monkeypatch.setattr(gpu, "gemm_peak", lambda *_: 1e12)
    monkeypatch.setattr(gpu.Bandwidth, "probe", lambda *_: 1e9)
    monkeypatch.setattr(gpu, "PARTS", {n: watched(n, part) for n, part in parts.items()})
    code = gpu.main(["--dry-run", "--out", str(tmp_path / "dry")])
    return code, json.loads((tmp_path / "dry.json").read_text()), seen


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_cut_and_keeps_what_it_has(tmp_path, monkeypatch):
    def slow(bench):
        yield {"check": "first", "gap": 0.0, "most": 1.0}
        try:
            time.sleep(30)
        except Exception:  # of a library that catches all of them
            pytest.fail("caught")

    def broken(bench):
        yield {"check": "second", "gap": 0.0, "most": 1.0}
        raise RuntimeError("no such kernel\nand more")

    started = time.monotonic()
    code, report, seen = dry(tmp_path, monkeypatch, {"equality": slow, "compiled": broken})
    assert time.monotonic() - started < 10
    assert [rows[-1]["check"] for rows in seen] == ["first", "second"]
    assert [row["check"] for row in report["rows"]["equality"]] == ["first"]
    assert report["cut"] == {
        "equality": "cut after 1 s",
        "compiled": "RuntimeError: no such kernel",
    }
    # Time is no fault, an error is.
    assert code == 1 and report["faults"] == ["compiled: RuntimeError: no such kernel"]
    assert "cut after 1 s" in (tmp_path / "dry.md").read_text()
    assert not list(tmp_path.glob("*.tmp"))


def test_only_the_parts_that_are_asked_for_run(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--dry-run", "--parts", "decode,nonsense"])
    assert "nonsense is not one of equality, attention, decode" in capsys.readouterr().err


RANKS = {"ranks": 2, "gap": 1e-6, "summed_bytes": 8, "expected_bytes": 8}


def test_the_gpu_script_finds_every_fault():
    good = {
        "equality": [
            {"check": "x", "gap": 1e-6, "most": 1e-4},
            {"check": "y", "skipped": "no GPU"},
        ],
        "attention": [{"call": "x", "kernel": "flash", "gap": 1e-3}],
        "offload": [{"context": 8, "equal": True}],
        "decode": [{"runner": "nanokv plain static", "tok_s": 1.0}],
        "compiled": [{"check": "z", "gap": 1e-6, "most": 1e-4, "compiles": [16, 1]}],
        "engine": [{"runner": "transformers", "failed": "theirs"}],
        "ranks": [{"ranks": 1}, dict(RANKS, ranks=2)],
    }

    def found(rows, cut=()):
        return gpu.faults({"rows": rows, "cut": dict(cut)})

    assert found(good, {"decode": "cut after 9 s"}) == []
    assert found(good | {"ranks": [{"skipped": "1 GPU here"}]}) == []
    wrong = {"check": "x", "gap": 1e-2, "most": 1e-4}
    broken = {"runner": "nanokv compiled static", "failed": "an illegal memory access"}
    for name, value, says in (
        ("equality", wrong, "off by"),
        ("equality", wrong | {"gap": float("nan")}, "nan"),
        ("compiled", wrong | {"gap": 0.0, "compiles": [1, 1]}, "compiled twice"),
        ("decode", broken, "illegal memory access"),
        ("engine", broken, "illegal memory access"),
        ("attention", {"call": "x", "kernel": "attention_math", "gap": 1e-3}, "no fused kernel"),
        ("attention", {"call": "x", "kernel": "flash", "gap": 0.5}, "off by"),
        ("offload", {"context": 8, "equal": False}, "offload differs"),
        ("ranks", dict(RANKS, gap=float("nan")), "2 ranks: off by nan"),
        ("ranks", dict(RANKS, summed_bytes=9), "9 bytes in all_reduce, by formula 8"),
        ("ranks", {"ranks": 4, "failed": "NCCL: unhandled system error"}, "4 ranks: NCCL: unhand"),
    ):
        (fault,) = found(good | {name: [value]})
        assert says in fault


@pytest.mark.parametrize("page", ["page_size", "block_size"])
def test_continuous_batching_is_told_in_the_words_that_it_has(page):
    """transformers 5.17 calls a page a block."""
    names = [page, "num_blocks", "max_batch_tokens", "use_cuda_graph"]
    kind = type("Config", (), {"__init__": eval(f"lambda self, {', '.join(names)}: None")})
    told = serving.batching(kind, [[1] * 20], 13, "cpu")
    assert told.pop(page) == 16 and told == {
        "num_blocks": 4,
        "max_batch_tokens": 256,
        "use_cuda_graph": False,
    }
    assert serving.batching(kind, [[1] * 20], 13, "cuda") == {page: 16}  # its own defaults


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the ranks would find their GPUs")
def test_ranks_that_cannot_start_are_a_row():
    (row,) = gpu_ranks.on_ranks(2, gpu.FULL)
    assert row["ranks"] == 2 and len(row["failed"]) > 10 and "rank 0 ended" not in row["failed"]
    assert gpu_ranks.faults([row])


def test_a_runner_that_fails_is_a_row(monkeypatch):
    """Out of memory, or a compiler that gives up: the rest goes on."""
    model = gpu.random_model(gpu.TINY, torch.bfloat16, "cpu")
    runner = gpu.Nano(model, "static", 1)
    monkeypatch.setattr(
        runner, "step", lambda: (_ for _ in ()).throw(RuntimeError("out of memory\nand more"))
    )
    row = gpu.decode_row(runner, 8, gpu.SMALL, bandwidth=None)
    assert row == {
        "runner": "nanokv plain static",
        "batch": 1,
        "context": 8,
        "failed": "out of memory",
    }
