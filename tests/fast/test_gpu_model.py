"""The model of a GPU, where there is none: kernels in Triton's interpreter or as torch's operators, and a step that is
called where it would be replayed. tests/test_matrix.py compares it over every cache and kind of batch."""

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanokv
from matrix import copied
from nanokv.cache import make_cache
from nanokv.cache.capabilities import Pages
from nanokv.cache.paged_batch import PagedBatch
from nanokv.decoding import draw, sample
from nanokv.decoding.batching import generate_ragged
from nanokv.decoding.beam import beam_search
from nanokv.decoding.draw import SamplingParams
from nanokv.decoding.speculative import EarlyExit, PromptLookup, speculate
from nanokv.engine import Engine
from nanokv.engine import engine as engine_module
from nanokv.errors import GenerationError
from nanokv.inference import decode, prefill
from nanokv.model import Transformer
from oracle import pair, random_ids

pytest.importorskip("triton", reason="no Triton here: pip install triton")

import plain_kernels
from nanokv.fast.gpu import model as gpu_model
from nanokv.fast.gpu import products
from nanokv.fast.gpu import recorded as recording
from nanokv.fast.gpu.model import recorded
from nanokv.fast.gpu.products import MOST_ROWS

SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7)


@pytest.fixture
def kernels(monkeypatch):
    """As torch's operators."""
    with plain_kernels.in_place():
        yield


@pytest.fixture
def counted_draws(monkeypatch):
    """Tokens are drawn as on a GPU: by a counter, all rows at once."""
    monkeypatch.setattr(draw, "together", lambda device: True)
    monkeypatch.setattr(engine_module, "together", lambda device: True)


@functools.cache
def models():
    """(the plain one, that of a GPU)."""
    return copied(torch.float32), recorded(copied(torch.float32))


def batch_of(model, lengths, ids):
    """A paged batch whose row b holds the first lengths[b] ids of row b."""
    pool = make_cache("paged", model.config, page=3).pool
    rows = [make_cache("paged", model.config, pool=pool) for _ in lengths]
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        prefill(model, ids[b : b + 1, :length], row)
    return PagedBatch(rows, model.config)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS + 1])
def test_the_kernels_themselves_give_what_the_plain_model_gives(rows, monkeypatch):
    """In Triton's interpreter: products of few rows, torch's for more, rows of a recording that are not there."""
    monkeypatch.setattr(products, "PROGRAMS", 8)  # each takes a millisecond
    monkeypatch.setattr(gpu_model, "PROCESSORS", 4)
    (_, plain), ids = pair(num_hidden_layers=2), random_ids(1, rows, 20)
    tried = recorded(pair(num_hidden_layers=2)[1])
    lengths = [3 + (5 * b) % 11 for b in range(rows)]
    ours, theirs = (batch_of(plain, lengths, ids) for _ in "ab")
    token = torch.stack([ids[b, n : n + 1] for b, n in enumerate(lengths)])
    got = decode(tried, token, ours, ours.length)
    right = decode(plain, token, theirs, theirs.length)
    assert (got - right).abs().max() < 1e-5 * right.abs().max()
    assert list(tried.steps.recorded) == [next(n for n in recording.SIZES if n >= rows)]


def test_one_recording_serves_every_cache(kernels):
    """Caches of several kinds, that grow and end, in turn: the step is made once for each batch size."""
    plain, tried = models()
    ids = random_ids(2, 2, 30)
    pairs = [
        [make_cache(name, plain.config, rows, 64) for _ in "ab"]
        for name in ("growing", "static", "paged", "prefix")
        for rows in (1, 2)
    ]
    for ours, theirs in pairs:
        for model, cache in ((tried, ours), (plain, theirs)):
            prefill(model, ids[: cache.made.batch_size, :5], cache)
    for t in range(5, 25):  # round and round: each step has another cache
        for ours, theirs in pairs:
            token = ids[: ours.made.batch_size, t : t + 1]
            got = decode(tried, token, ours, ours.length)
            assert (got - decode(plain, token, theirs, theirs.length)).abs().max() < 1e-4
    assert set(tried.steps.recorded) == {1, 2}


def test_a_step_goes_by_the_recording_only_where_nobody_listens(kernels, monkeypatch):
    plain, _ = models()
    tried, ids, layers = recorded(copied(torch.float32)), random_ids(3, 1, 12), []
    run_layers = Transformer.run_layers
    monkeypatch.setattr(
        Transformer, "run_layers", lambda *args: layers.append(1) or run_layers(*args)
    )
    cache = make_cache("growing", plain.config)
    prefill(tried, ids[:, :5], cache)
    assert len(layers) == 1
    decode(tried, ids[:, 5:6], cache, 5)
    assert len(layers) == 1
    hook = tried.layers[0].register_forward_hook(lambda *_: None)
    decode(tried, ids[:, 6:7], cache, 6)
    assert len(layers) == 2
    hook.remove()
    decode(tried, ids[:, 7:8], cache, 7)
    assert len(layers) == 2
    with pytest.raises(ValueError, match="start_pos is 3, but the cache holds 8"):
        decode(tried, ids[:, 8:9], cache, 3)
    assert cache.length == 8


# --- recording ------------------------------------------------------------------------------------------------------


def test_a_step_is_recorded_at_its_first_call_and_then_replayed(monkeypatch):
    """With a stand-in for CUDA: two runs that warm up, one that is recorded, then replays alone."""
    told, plain = [], models()[0]

    class Graph:
        def __enter__(self):
            told.append("record")

        def __exit__(self, *_):
            told.append("end")

        def replay(self):
            told.append("replay")

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

        def __enter__(self):
            told.append(self.name)

        def __exit__(self, *_):
            told.append(f"{self.name} ends")

    streams = {name: Stream(name) for name in ("current", "trying", "recording")}
    graph, space = Graph(), SimpleNamespace(memory="memory", **streams)
    del space.current
    for name, value in {
        "current_stream": lambda device: streams["current"],
        "CUDAGraph": lambda: graph,
        "stream": lambda stream: stream,
        "graph": lambda made, *where, capture_error_mode: told.append(where) or made,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def step(tokens, positions, places, lengths):
        told.append("run")
        return torch.zeros(len(tokens), 4) + lengths[:, :, None].sum(0)

    steps = recording.Steps(step, plain.config.num_hidden_layers, torch.device("cpu"))
    cache = make_cache("static", plain.config, 3, 16)
    like = torch.zeros(3, plain.config.num_key_value_heads, 1, plain.config.head_dim)
    steps.recorded[4] = recording.Recorded(step, len(cache), 4, torch.device("cpu"), space)
    steps.recorded[4].device = SimpleNamespace(type="cuda")
    for _ in range(2):
        hidden = steps(torch.zeros(3, dtype=torch.int64), torch.tensor(0), cache.pages(like))
        assert hidden.shape == (3, 4)
    first = ["trying waits for current", "trying", "run", "run", ("memory", streams["recording"])]
    recorded_on = ["record", "run", "end", "trying ends", "current waits for trying"]
    assert told == [*first, *recorded_on, "replay", "replay"]


def test_threads_that_share_a_model_take_turns():
    """A step reads its inputs where the next one writes its own."""
    inside, most = [], []

    def step(tokens, positions, places, lengths):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        hidden = tokens[:, None] + torch.zeros(4)
        inside.pop()
        return hidden

    steps = recording.Steps(step, 1, torch.device("cpu"))
    pages = [Pages(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4), [1])]

    def asked(number):
        return [
            steps(torch.tensor([number]), torch.tensor(0), pages).unique().tolist()
            for _ in range(5)
        ]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(asked, range(4))) == [[[n]] * 5 for n in range(4)]
    assert max(most) == 1


def test_the_rows_that_are_not_there_see_nothing():
    plain, device = models()[0], torch.device("cpu")
    cache = make_cache("static", plain.config, 3, 16)
    like = torch.zeros(3, plain.config.num_key_value_heads, 1, plain.config.head_dim)
    inputs = recording.Inputs(len(cache), 8, device)
    inputs.fill(torch.tensor([4, 5, 6]), torch.tensor([7, 8, 9]), cache.pages(like))
    assert inputs.lengths.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * len(cache)
    assert inputs.positions.tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert inputs.tokens.tolist() == [4, 5, 6, 0, 0, 0, 0, 0]
    addresses = [[layer.keys.data_ptr(), layer.values.data_ptr()] for layer in cache]
    assert inputs.places[:, :2].tolist() == addresses


# --- what a step costs ----------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Counts what would be launched: torch's operators that compute, and the kernels."""

    FREE = (
        "view",
        "unsqueeze",
        "flatten",
        "split",
        "detach",
        "slice",
        "select",
        "alias",
        "expand",
        "t.",
        "empty",
        "as_strided",
    )

    def __init__(self):
        super().__init__()
        self.launches, self.inside = [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        if not self.inside and not any(part in name for part in self.FREE):
            self.launches.append(name)
        return function(*args, **(kwargs or {}))

    def kernel(self, name, times, right):
        def counted(*args, **kwargs):
            self.launches += [name] * times
            self.inside = True
            try:
                return right(*args, **kwargs)
            finally:
                self.inside = False

        return counted


@pytest.mark.parametrize("rows, each", [(1, 7), (MOST_ROWS, 7), (MOST_ROWS + 1, 10)])
def test_launches_of_a_recorded_step(kernels, monkeypatch, rows, each):
    """7 a layer for few rows, 10 for more; embedding, rotation and last norm are eleven more. (A merge is a launch.)"""
    _, tried = models()
    L, ids = len(tried.layers), random_ids(4, rows, 6)
    cache = make_cache("static", tried.config, rows, 16)
    prefill(tried, ids[:, :5], cache)
    counter = Operators()
    names = {"rms_norm": 1, "swiglu": 1, "split_heads_into_pages": 1}
    for name, times in names.items():
        right = getattr(gpu_model.kernels, name)
        monkeypatch.setattr(gpu_model.kernels, name, counter.kernel(name, times, right))
    for name, times in {"product": 1, "paged_attention": 2}.items():
        right = getattr(gpu_model, name)
        monkeypatch.setattr(gpu_model, name, counter.kernel(name, times, right))
    pages = cache.pages(tried.token_like(rows))
    tried.steps(ids[:, 5], torch.tensor(5), pages)
    inputs = tried.steps.recorded[next(n for n in recording.SIZES if n >= rows)].inputs
    counter.launches.clear()
    with torch.inference_mode(), counter:
        tried.step(inputs.tokens, inputs.positions, inputs.places, inputs.lengths)
    assert each * L < len(counter.launches) <= each * L + 11


@pytest.fixture
def waits(monkeypatch):
    """What would wait for a GPU: a tensor that is asked for its values, or a list that goes straight to a device."""
    found, made, to, cpu = [], torch.tensor, torch.Tensor.to, torch.Tensor.cpu

    def tensor(*args, **kwargs):  # straight to a device: a copy that is waited for
        found.extend(["tensor"] * ("device" in kwargs))
        return made(*args, **kwargs)

    def moved(self, *args, non_blocking=False, **kwargs):
        # The ids of a step are there already.
        device = list(map(type, args)) == [torch.device] or "device" in kwargs
        found.extend(["to"] * (device and not non_blocking))
        return to(self, *args, non_blocking=non_blocking, **kwargs)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: found.append("cpu") or cpu(self))
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda self: found.append("nonzero"))
    return found


@pytest.mark.parametrize("top", [0, 3])
def test_a_token_is_one_wait_for_the_device(kernels, counted_draws, waits, top):
    """The draw alone waits: once for all rows of a step, and for the likeliest tokens of those that ask for them."""
    _, tried = models()
    engine = Engine(tried, pages=64)
    for b in range(5):
        values = {"temperature": 1.0, "seed": b, "top_k": 5 * (b % 2), "repetition_penalty": 1.1}
        values["top_logprobs"] = top * (b % 3)
        engine.submit(random_ids(b, 1, 6)[0].tolist(), 8, **values, eos_token_ids=[])
    engine.step()
    waits.clear()
    steps = engine.step()
    assert waits == ["cpu"]
    assert [len(step.top) for _, step in steps] == [top * (b % 3) for b in range(5)]


def test_the_likeliest_tokens_come_with_the_draw(kernels, counted_draws):
    """Of each row as many as it asks for: those of a request alone."""
    _, tried = models()
    ids, found = prompts(3)[1], {}
    for asked in ([0, 1, 4], [4], [1]):
        engine = Engine(tried, pages=64)
        requests = [
            engine.submit(ids, 5, top_logprobs=top, eos_token_ids=[], seed=1) for top in asked
        ]
        engine.run()
        for top, request in zip(asked, requests, strict=True):
            assert [len(pairs) for pairs in request.tops] == [top] * 5
            tokens = [[token for token, _ in pairs] for pairs in request.tops]
            assert found.setdefault(top, tokens) == tokens
            for token, value, pairs in zip(
                request.tokens, request.logprobs, request.tops, strict=True
            ):
                assert not pairs or pairs[0] == (token, pytest.approx(value, abs=1e-5))


def small(kind, config):
    """A cache, one row of which holds what is decoded: two rows of their own lengths where it is a batch."""
    if kind != "batch":
        return make_cache(kind, config, capacity=64)
    pool = make_cache("paged", config, page=3).pool
    return PagedBatch([make_cache("paged", config, pool=pool) for _ in "ab"], config)


def layer_of(cache, i):
    return cache.rows[-1][i] if hasattr(cache, "rows") else cache[i]


def wrapped(cache, told):
    layer = layer_of(cache, 1)
    layer.append = lambda k, v, right=layer.append: told.append(1) or right(k, v)


def borrowed(cache, told):
    """The layer of a fork, which holds the same."""
    told.append(cache.fork())
    cache[1] = told[-1][1]


def moved(cache, told):
    """Its memory lies elsewhere, and where it lay is nonsense."""
    layer = layer_of(cache, 1)
    pool = getattr(getattr(layer, "parent", None), "pool", None)
    owner = layer if pool is None else pool
    owner.keys, before = owner.keys.clone(), owner.keys
    before.fill_(torch.nan)
    told.append(1)


def cut(cache, told):
    """One layer alone: a failed forward leaves it so, and truncate mends it."""
    layer = layer_of(cache, 1)
    layer.truncate(layer.length - 2)
    row = cache.rows[-1] if hasattr(cache, "rows") else cache
    row.truncate(layer.length)
    told.append(1)


@pytest.mark.parametrize(
    "kind, change",
    [
        *product(("growing", "static", "paged"), (wrapped, borrowed, moved, cut)),
        *product(["batch"], (wrapped, moved, cut)),  # its layers are those that it was made of
    ],
)
def test_what_is_kept_from_step_to_step_is_still_true(kernels, kind, change):
    """Between two steps a caller changes a layer: the next one gives what the plain model gives."""
    plain, tried = models()
    ids, caches = random_ids(8, 2, 24), [small(kind, plain.config) for _ in "ab"]
    rows = 2 if kind == "batch" else 1
    for model, cache in zip((tried, plain), caches, strict=True):
        for b, row in enumerate(cache.rows if kind == "batch" else [cache]):
            prefill(model, ids[b : b + 1, : 5 + 2 * b], row)
    told, others = [], []
    for t in range(10, 20):
        if t == 14:
            change(caches[0], told)
            change(caches[1], others)
        token = ids[:rows, t : t + 1]
        right = decode(plain, token, caches[1], caches[1].length)
        got = decode(tried, token, caches[0], caches[0].length)
        assert (got - right).abs().max() < 1e-5 * right.abs().max(), t
    assert told


def test_the_hosts_work_in_a_step_does_not_grow_with_the_layers(kernels, monkeypatch):
    """Operators of torch, views too: inputs, their copy and the head, but nothing for each layer."""
    counts = []
    for layers in (3, 9):
        tried = recorded(pair(num_hidden_layers=layers)[1])
        hidden = torch.zeros(1, tried.config.hidden_size)
        monkeypatch.setattr(type(tried), "step", lambda *_, hidden=hidden: hidden)
        for kind in ("growing", "paged"):
            cache, counter = make_cache(kind, tried.config), Operators()
            prefill(tried, random_ids(9, 1, 5), cache)
            token = torch.zeros(1, 1, dtype=torch.int64)
            for _ in range(3):
                decode(tried, token, cache, cache.length)
            monkeypatch.setattr(Operators, "FREE", ())
            with counter:
                decode(tried, token, cache, cache.length)
            counts.append(len(counter.launches))
    assert counts[:2] == counts[2:] and max(counts) <= 18


def test_a_step_takes_pages_for_the_rows_alone_that_need_one(kernels, counted_draws, monkeypatch):
    _, tried = models()
    engine, asked = Engine(tried, pages=64, page_size=4), []
    for b in range(6):
        engine.submit(random_ids(b, 1, 4 + b)[0].tolist(), 12, eos_token_ids=[])
    engine.step()
    real = type(engine.scheduler).reserve
    monkeypatch.setattr(
        type(engine.scheduler),
        "reserve",
        lambda self, request, tokens: asked.append(request.number) or real(self, request, tokens),
    )
    for _ in range(8):
        full = [one.number for one in engine.scheduler.running if one.fed % 4 == 0]
        engine.step()
        assert asked == full
        asked.clear()


def test_kernels_are_launched_on_the_device_of_their_tensors(kernels, counted_draws, monkeypatch):
    """Triton takes the current device, which is another one where the model is on cuda:1."""
    _, tried = models()
    current, launched = [], []

    @contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    def watched(name, launch):
        return lambda *args, **kwargs: launched.append((name, *current)) or launch(*args, **kwargs)

    monkeypatch.setattr(gpu_model, "on", on)
    monkeypatch.setattr(draw.gpu, "on", on)
    names = "rms_norm", "swiglu", "split_heads", "split_heads_into_pages"
    for name in names:
        monkeypatch.setattr(
            gpu_model.kernels, name, watched(name, getattr(gpu_model.kernels, name))
        )
    for name in ("product", "paged_attention"):
        monkeypatch.setattr(gpu_model, name, watched(name, getattr(gpu_model, name)))
    rows = watched("draw", draw.drawing(tried.device))
    monkeypatch.setattr(draw, "drawing", lambda device: rows)
    answer = speculate(tried, prompts(2)[1] * 3, EarlyExit(tried, 1), None, 3, eos_token_ids=[])
    assert list(answer) and alone(tried, prompts(1)[0], n=3)
    assert {name for name, *_ in launched} == {*names, "product", "paged_attention", "draw"}
    assert all(device == [tried.device] for _, *device in launched)


# --- the ways to answer ---------------------------------------------------------------------------------------------


def prompts(count: int):
    return [random_ids(b, 1, 4 + 3 * b % 7)[0].tolist() for b in range(count)]


def alone(model, ids, params=SAMPLED, n=12, **changes):
    values = params.values() | {"seed": params.seed} | changes
    cache = make_cache("growing", model.config)
    return list(nanokv.generate(model, ids, cache, n, **values, eos_token_ids=[]))


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED, SamplingParams(0.7, seed=3)])
def test_a_row_draws_alone_what_it_draws_in_any_batch(kernels, counted_draws, params):
    """By seed and position: generate, a ragged batch, and an engine that is short of pages."""
    _, tried = models()
    texts = prompts(6)
    right = [alone(tried, ids, params) for ids in texts]
    assert len(set(map(tuple, right))) > 1
    assert generate_ragged(tried, texts, None, 12, params, []) == right
    engine = Engine(tried, pages=9, page_size=4)
    values = params.values() | {"seed": params.seed}
    asked = [engine.submit(ids, 12, **values, eos_token_ids=[]) for ids in texts]
    engine.run()
    assert [request.tokens for request in asked] == right
    assert sum(request.preemptions for request in asked) > 0


def test_a_counter_draws_on_cuda_alone():
    assert [*map(draw.together, map(torch.device, ("cuda", "cuda:1", "cpu", "mps")))] == [
        1,
        1,
        0,
        0,
    ]


def test_filters_penalty_and_grammar_are_each_rows_own(kernels, counted_draws):
    _, tried = models()
    values = [
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 5, "seed": 1},
        {"temperature": 1.2, "top_k": 5, "seed": 2},
        {"temperature": 0.8, "min_p": 0.1, "seed": 3},
        {"temperature": 1.0, "repetition_penalty": 1.7, "seed": 4},
        {"temperature": 0.0, "repetition_penalty": 1.7},
    ]
    engine, texts = Engine(tried, pages=64), prompts(len(values))
    even = torch.arange(tried.config.vocab_size) % 2 == 0
    asked = [
        engine.submit(ids, 10, **one, eos_token_ids=[])
        for ids, one in zip(texts, values, strict=True)
    ]
    ruled = engine.submit(
        texts[0],
        10,
        temperature=1.0,
        seed=9,
        eos_token_ids=[],
        constrain=lambda logits, tokens: logits.masked_fill(~even, -torch.inf),
    )
    engine.run()
    for request, ids, one in zip(asked, texts, values, strict=True):
        cache = make_cache("growing", tried.config)
        right = list(nanokv.generate(tried, ids, cache, 10, **one, eos_token_ids=[]))
        assert request.tokens == right
    assert all(token % 2 == 0 for token in ruled.tokens) and len(ruled.tokens) == 10


def test_a_row_without_a_token_ends_alone(kernels, counted_draws):
    logits = torch.randn(3, 50)
    logits[1] = torch.nan
    samplers = [
        draw.Sampler(SAMPLED, SAMPLED.generator("cpu"), [1], tokens) for tokens in ([], [], [])
    ]
    first, second, third = draw.next_steps(logits, samplers)
    assert isinstance(second, GenerationError) and "highest is nan" in str(second)
    assert first.logprob == pytest.approx(float(logits[0].log_softmax(-1)[first.token]), abs=1e-5)
    assert third.logprob == pytest.approx(float(logits[2].log_softmax(-1)[third.token]), abs=1e-5)


def test_beams_and_guesses_give_what_the_plain_model_gives(kernels):
    plain, tried = models()
    ids = prompts(2)[1] * 3
    beams, guessed = [], []
    for model in (plain, tried):
        caches = [make_cache("growing", plain.config) for _ in "ab"]
        found = beam_search(model, ids, beams=3, max_new_tokens=8, cache=caches[0])
        beams.append([beam.ids for beam in found])
        answer = speculate(model, ids, PromptLookup(), caches[1], 12, eos_token_ids=[])
        guessed.append(list(answer))
    assert beams[0] == beams[1]
    assert guessed[0] == guessed[1] == alone(plain, ids, SamplingParams())


@pytest.mark.parametrize("at", range(3))
def test_ctrl_c_in_a_replay_leaves_cache_and_text_whole(kernels, monkeypatch, at):
    """Before the step, after it, and in the middle of what fills its inputs: the answer goes on as if nothing was."""
    _, tried = models()
    ids, cache = prompts(2)[1], make_cache("growing", tried.config)
    right = alone(tried, ids, SamplingParams(), 10)
    answer = nanokv.generate(tried, ids, cache, 10, eos_token_ids=[])
    got = [next(answer) for _ in range(4)]
    where = (
        (recording.Inputs, "fill"),
        (recording.Recorded, "run"),
        (recording.Recorded, "__call__"),
    )
    owner, name = where[at]
    real = getattr(owner, name)

    def pressed(self, *args):
        if at != 1:
            real(self, *args)
        monkeypatch.setattr(owner, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, pressed)
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    text = ids + got
    assert cache.length <= len(text) and {layer.length for layer in cache} == {cache.length}
    rest = nanokv.generate(tried, text[cache.length :], cache, 6, eos_token_ids=[])
    assert got + list(rest) == right


@pytest.mark.parametrize("of", ["paged", "prefix"])
def test_rows_of_a_ragged_batch_share_a_recording(kernels, of):
    """The batch that make_cache gives has one pool, so every step of all rows is one replay."""
    plain, tried = models()
    texts = prompts(5)
    tried.steps.recorded.clear()
    cache = make_cache("batch", plain.config, 5, of=of)
    answers = generate_ragged(tried, texts, cache, 9, SamplingParams(), [])
    assert answers == [alone(plain, ids, SamplingParams(), 9) for ids in texts]
    assert set(tried.steps.recorded) == {8}
    tried.steps.recorded.clear()
    assert generate_ragged(tried, texts, None, 9, SamplingParams(), []) == answers
    assert set(tried.steps.recorded) == {8}


def test_more_rows_than_a_recording_has_go_in_parts(kernels, monkeypatch):
    """Of a slab and of pages; the answers of each row alone."""
    plain, tried = models()
    monkeypatch.setattr(recording, "SIZES", (1, 2))
    ids = random_ids(6, 5, 12)
    lengths = [3, 7, 5, 4, 6]
    right = [batch_of(plain, lengths, ids), make_cache("static", plain.config, 5, 16)]
    found = [batch_of(plain, lengths, ids), make_cache("static", plain.config, 5, 16)]
    for cache in (right[1], found[1]):
        prefill(plain, ids[:, :4], cache)
    tried.steps.recorded.clear()
    for theirs, ours in zip(right, found, strict=True):
        got = decode(tried, ids[:, 8:9], ours, ours.length)
        wanted = decode(plain, ids[:, 8:9], theirs, theirs.length)
        assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert set(tried.steps.recorded) == {1, 2}
    tried.steps.recorded.clear()


def test_a_server_has_its_steps_recorded_before_the_first_request(kernels):
    _, tried = models()
    tried.steps.recorded.clear()
    tried.prepare(20)
    assert list(tried.steps.recorded) == [1, 2, 4, 8, 16, 24]


@pytest.mark.parametrize("k, p", [(1, 0.9), (20, 0.95), (20, 0.3), (1000, 0.8), (5, 1e-9)])
def test_of_few_the_nucleus_is_found_without_a_sort_of_all(k, p):
    logits = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    right = sample._nucleus(sample._highest(logits, k), p)
    assert torch.equal(sample._nucleus_of_highest(logits, k, p), right)
