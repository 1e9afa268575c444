"""The loop: equal to transformers' generate, no wasted forward, and a cache that survives what can go wrong."""

from types import SimpleNamespace

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast, set_seed
from transformers.generation.stopping_criteria import StopStringCriteria

import nanokv.decoding.generation as module
from nanokv.cache import make_cache
from nanokv.config import GenerationConfig
from nanokv.decoding import batching
from nanokv.decoding.generation import (
    Generation,
    LoopGuard,
    SamplingParams,
    StopStrings,
    TextStream,
    generate,
)
from nanokv.errors import CapacityError, ContextError, GenerationError
from nanokv.inference import prefill_chunk
from nanokv.text.tokenizer import Tokenizer
from oracle import ANSWER, SAMPLING, Clock, Press, defaults, pair

pytestmark = pytest.mark.sampled

V = 151


@pytest.fixture(scope="module")
def models():
    return pair(seed=3)


@pytest.fixture
def model(models):
    return models[1]


def prompt(seed, length=None):
    generator = torch.Generator().manual_seed(seed)
    length = length or int(torch.randint(1, 24, (1,), generator=generator))
    return torch.randint(0, V, (length,), generator=generator).tolist()


def reference_tokens(reference, ids, n, **kwargs):
    x = torch.tensor([ids])
    out = reference.generate(
        x, attention_mask=torch.ones_like(x), max_new_tokens=n, pad_token_id=0, **kwargs
    )
    return out[0, len(ids) :].tolist()


def new_cache(model, capacity=None):
    return make_cache("dict", model.config, capacity=capacity)


class Counter:
    """Stands in for prefill and decode and counts."""

    def __init__(self, monkeypatch):
        self.prefills, self.decodes = [], []
        real_prefill, real_decode = module.prefill, module.decode
        monkeypatch.setattr(
            module,
            "prefill",
            lambda m, x, c, start_pos: (
                self.prefills.append(x.shape[1]),
                real_prefill(m, x, c, start_pos),
            )[1],
        )
        monkeypatch.setattr(
            module,
            "decode",
            lambda m, x, c, start_pos: (
                self.decodes.append(start_pos),
                real_decode(m, x, c, start_pos),
            )[1],
        )


@pytest.mark.parametrize("seed", range(32))
def test_greedy_equals_transformers(models, seed):
    """64 tokens on 32 random prompts, token for token."""
    reference, ours = models
    ids = prompt(seed)
    assert list(generate(ours, ids)) == reference_tokens(reference, ids, 64, do_sample=False)


SAMPLERS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("values", SAMPLERS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_sampling_equals_transformers(models, values, seed):
    """The same seed draws the same 48 tokens as set_seed + generate(do_sample=True)."""
    reference, ours = models
    ids = prompt(seed + 100)
    with torch.random.fork_rng():
        set_seed(seed)
        theirs = reference_tokens(
            reference, ids, 48, do_sample=True, **{"top_k": 0, "top_p": 1.0} | values
        )
    assert list(generate(ours, ids, max_new_tokens=48, seed=seed, **values)) == theirs


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_greedy_with_repetition_penalty_equals_transformers(models, penalty):
    """The penalty counts the prompt and what was generated."""
    reference, ours = models
    for seed in range(6):
        ids = prompt(seed)
        theirs = reference_tokens(reference, ids, 40, do_sample=False, repetition_penalty=penalty)
        assert list(generate(ours, ids, max_new_tokens=40, repetition_penalty=penalty)) == theirs


def test_history_feeds_the_penalty(model):
    """Second turn: with the first turn's ids as history, the penalty is that of one long prompt."""
    ids, params = prompt(1, 20), SamplingParams(repetition_penalty=1.5)
    whole = [step.token for step in Generation(model, ids, new_cache(model), params, 16)]
    cache = new_cache(model)
    module.prefill(model, torch.tensor([ids[:12]]), cache, 0)
    assert [
        s.token for s in Generation(model, ids[12:], cache, params, 16, history=ids[:12])
    ] == whole
    with pytest.raises(GenerationError, match="history has 3 tokens, but the cache holds"):
        Generation(model, ids, cache, params, history=[1, 2, 3])


@pytest.mark.parametrize("n", [1, 2, 7])
def test_n_tokens_cost_one_prefill_and_n_minus_1_decodes(model, monkeypatch, n):
    """The last token is never fed: a forward for it would be thrown away."""
    counter, cache, ids = Counter(monkeypatch), new_cache(model), prompt(1, 9)
    assert len(list(generate(model, ids, cache, max_new_tokens=n))) == n
    assert counter.prefills == [9] and counter.decodes == list(range(9, 9 + n - 1))
    assert cache.length == 9 + n - 1


def test_a_long_prompt_is_one_prefill_for_generate_and_chunks_for_the_cli(model, monkeypatch):
    counter, ids = Counter(monkeypatch), prompt(2, 300)
    whole = list(generate(model, ids, max_new_tokens=5))
    assert counter.prefills == [300]
    for chunk in (1, 7, 256, 300, 1000):
        counter.prefills.clear()
        generation = Generation(model, ids, new_cache(model), max_new_tokens=5, chunk=chunk)
        assert [step.token for step in generation] == whole
        assert sum(counter.prefills) == 300 and max(counter.prefills) == min(chunk, 300)


def test_second_turn_continues_from_the_cache(models):
    """ids are only the new tokens; start_pos is the cache's length; the last yielded token was not fed."""
    reference, ours = models
    first, second, cache = prompt(5, 8), prompt(6, 6), new_cache(ours)
    answer = list(generate(ours, first, cache, max_new_tokens=10))
    again = list(generate(ours, [answer[-1], *second], cache, max_new_tokens=10))
    assert again == reference_tokens(reference, first + answer + second, 10, do_sample=False)


def test_the_eos_token_ends_it_and_is_yielded(models):
    reference, ours = models
    ids = prompt(7)
    free = list(generate(ours, ids, max_new_tokens=30))
    eos = free[10]
    cut = free[: free.index(eos) + 1]
    assert cut == reference_tokens(reference, ids, 30, do_sample=False, eos_token_id=eos)
    for eos_ids in ([eos], (140, eos), {eos}, eos):
        assert list(generate(ours, ids, max_new_tokens=30, eos_token_ids=eos_ids)) == cut
    ours.generation_config = GenerationConfig(eos_token_ids=(eos,))
    try:
        assert list(generate(ours, ids, max_new_tokens=30)) == cut
        assert list(generate(ours, ids, max_new_tokens=30, eos_token_ids=[])) == free
        generation = Generation(ours, ids, new_cache(ours), max_new_tokens=30)
        assert [s.token for s in generation] == cut and generation.finish_reason == "stop"
    finally:
        del ours.generation_config


def test_seconds_are_those_of_the_forwards(model, monkeypatch):
    """Two chunks, four decodes; how long the caller looks at a token is not in them."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(module, "perf_counter", clock)
    clock.slow(module, "prefill", 10), clock.slow(module, "decode", 1)
    generation = Generation(model, prompt(8, 11), new_cache(model), max_new_tokens=5, chunk=6)
    for _ in generation:
        clock.now += 100
    t = generation.timings
    assert (t.prefill_seconds, t.first_token_seconds, t.decode_seconds) == (20, 20, 4)


def test_steps_carry_raw_logprobs_and_counts(models):
    reference, ours = models
    ids, cache = prompt(8, 11), new_cache(ours)
    generation = Generation(
        ours, ids, cache, SamplingParams(temperature=2.0, seed=4), max_new_tokens=6
    )
    steps = list(generation)
    with torch.no_grad():
        raw = reference(torch.tensor([ids + generation.tokens])).logits[0, 10:-1].log_softmax(-1)
    expected = raw.gather(1, torch.tensor(generation.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor([s.logprob for s in steps]), expected, atol=1e-5)
    assert (generation.prompt_tokens, generation.cached_tokens, generation.finish_reason) == (
        11,
        0,
        "length",
    )
    assert generation.seed == 4 and generation.logprobs == [s.logprob for s in steps]
    t = generation.timings
    assert 0 < t.prefill_seconds <= t.first_token_seconds and t.decode_seconds > 0


def test_ids_may_be_a_list_or_a_tensor(model):
    ids = prompt(3, 5)
    expected = list(generate(model, ids, max_new_tokens=4))
    for form in (
        tuple(ids),
        torch.tensor(ids),
        torch.tensor([ids]),
        torch.tensor(ids, dtype=torch.int32),
    ):
        assert list(generate(model, form, max_new_tokens=4)) == expected
    assert all(type(token) is int for token in expected)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "empty"),
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        ([1, V], "id 151 at position 1 .* 0 … 150"),
        ([-1], "id -1 at position 0"),
        ([1.0], "position 0 .* float"),
        ([True], "position 0 .* bool"),
        (torch.zeros(2, 3, dtype=torch.long), r"\(2, 3\)"),
        (torch.zeros(3), "float32"),
    ],
)
def test_prompts_that_cannot_be_fed(model, ids, words):
    """At the call, not at the first token."""
    with pytest.raises(GenerationError, match=words):
        generate(model, ids)


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"max_new_tokens": 2.5},
        {"seed": 2**64},
        {"seed": 1.5},
        {"temperature": -1},
        {"top_p": 2.0},
        {"top_k": -2},
    ],
)
def test_bad_values_raise_at_the_call(model, values):
    with pytest.raises(
        GenerationError, match=f"{next(iter(values))} is {next(iter(values.values()))!r}"
    ):
        generate(model, [1], **values)


def test_a_prompt_beyond_the_context_is_refused_before_any_work(model, monkeypatch):
    counter, cache = Counter(monkeypatch), new_cache(model)
    with pytest.raises(
        ContextError, match=r"needs 513 of 512 tokens \(0 in the cache \+ 513 new\)"
    ):
        generate(model, [1] * 513, cache)
    assert counter.prefills == [] and cache.length == 0


def test_the_context_may_be_filled_to_the_last_token(model):
    """Prompt of exactly 512: one token comes out, and it has no place to be fed to."""
    generation = Generation(model, [1] * 512, new_cache(model), max_new_tokens=5)
    assert len(list(generation)) == 1 and generation.finish_reason == "context"
    generation = Generation(model, [1] * 508, new_cache(model), max_new_tokens=50)
    assert (
        len(list(generation)) == 5
        and generation.finish_reason == "context"
        and generation.cache.length == 512
    )
    generation = Generation(model, [1] * 508, new_cache(model), max_new_tokens=5)
    assert len(list(generation)) == 5 and generation.finish_reason == "length"


def test_the_caches_capacity_is_a_limit_too(model):
    class Bounded(type(new_cache(model))):
        capacity = 20

    cache = Bounded(new_cache(model), model.config)
    with pytest.raises(ContextError, match="needs 21 of 20"):
        generate(model, [1] * 21, cache)
    generation = Generation(model, [1] * 15, cache, max_new_tokens=50)
    assert (
        len(list(generation)) == 6 and generation.finish_reason == "context" and cache.length == 20
    )


def test_the_same_seed_repeats_and_the_global_random_state_stays(model):
    before = torch.get_rng_state()
    kwargs = {"temperature": 1.0, "max_new_tokens": 20}
    one = list(generate(model, [1, 2], seed=9, **kwargs))
    torch.rand(5)  # a stranger's draw in between
    torch.set_rng_state(before)
    assert (
        one
        == list(generate(model, [1, 2], seed=9, **kwargs))
        != list(generate(model, [1, 2], seed=10, **kwargs))
    )
    list(generate(model, [1, 2], **kwargs))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_negative_seed_is_its_64_bits_and_minus_one_is_drawn():
    assert SamplingParams(seed=-2).generator("cpu").initial_seed() == 2**64 - 2
    assert len({SamplingParams(seed=-1).generator("cpu").initial_seed() for _ in range(3)}) == 3


def test_a_drawn_seed_is_reported_and_repeats(model):
    free = SamplingParams(temperature=1.0)
    first = Generation(model, [1, 2], new_cache(model), free, 12)
    tokens = [s.token for s in first]
    assert first.seed != Generation(model, [1, 2], new_cache(model), free).seed
    assert tokens == list(
        generate(model, [1, 2], max_new_tokens=12, temperature=1.0, seed=first.seed)
    )
    seeds = {free.generator("cpu").initial_seed() for _ in range(64)}  # of 32 bits, the highest too
    assert len(seeds) > 60 and 2**31 <= max(seeds) < 2**32


class Boom(Exception):
    """An injected failure."""


def fail_in_layer(monkeypatch, model, layer, call, error):
    """Layer `layer` raises at its `call`-th use: the layers before it already have the new tokens."""
    real, seen = model.layers[layer].forward, []

    def forward(*args):
        seen.append(1)
        if len(seen) == call:
            raise error("injected")
        return real(*args)

    monkeypatch.setattr(model.layers[layer], "forward", forward)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_failed_forward_leaves_a_cache_that_can_be_continued(
    models, monkeypatch, layer, call, error
):
    """Call 1 is the prefill, the others decodes. Then all layers are equally long, and going on gives the truth."""
    reference, ours = models
    ids, cache, before = prompt(9, 7), new_cache(ours), prompt(10, 5)
    module.prefill(ours, torch.tensor([before]), cache, 0)
    expected = reference_tokens(reference, before + ids, 10, do_sample=False)
    with monkeypatch.context() as patch:
        fail_in_layer(patch, ours, layer, call, error)
        got = []
        with pytest.raises(error, match="injected"):
            for token in generate(ours, ids, cache, max_new_tokens=10):
                got.append(token)  # extend() would lose them with the exception
    assert {layer.length for layer in cache} == {5 if call == 1 else 5 + 7 + call - 2}
    assert got == expected[: call - 1]
    rest = ids if call == 1 else got[-1:]  # what is not in the cache yet
    assert got + list(generate(ours, rest, cache, max_new_tokens=10 - len(got))) == expected


def test_a_failure_in_a_later_chunk_goes_back_to_the_start(models, monkeypatch):
    """Otherwise a retry with the same ids would feed the first chunk twice and be silently wrong."""
    reference, ours = models
    ids, cache = prompt(11, 30), new_cache(ours)
    with monkeypatch.context() as patch:
        fail_in_layer(patch, ours, 1, 3, Boom)
        with pytest.raises(Boom):
            list(Generation(ours, ids, cache, chunk=8))
    assert {layer.length for layer in cache} == {0}
    assert list(generate(ours, ids, cache, max_new_tokens=9)) == reference_tokens(
        reference, ids, 9, do_sample=False
    )


@pytest.mark.parametrize(
    ("call", "held", "out"), [(1, 0, 0), (3, 16, 0), (4, 24, 0), (5, 30, 1), (7, 32, 3)]
)
def test_ctrl_c_inside_a_forward_ends_the_answer_and_is_no_failure(
    models, monkeypatch, call, held, out
):
    """Calls 1 to 4 are the chunks of the prompt: those that were finished stay, where a failure forgets them all."""
    reference, ours = models
    ids, cache, press = prompt(11, 30), new_cache(ours), Press()
    with monkeypatch.context() as patch:
        press.inside(patch, ours.layers[1], call)
        generation = Generation(ours, ids, cache, max_new_tokens=9, chunk=8, should_stop=press)
        got = [step.token for step in generation]
    assert (generation.finish_reason, len(got), generation.sure) == ("interrupted", out, held)
    assert {layer.length for layer in cache} == {held} and not torch.is_inference_mode_enabled()
    rest = (ids + got)[held:]
    assert got + list(generate(ours, rest, cache, max_new_tokens=9 - out)) == reference_tokens(
        reference, ids, 9, do_sample=False
    )


def test_a_keyboard_interrupt_that_should_stop_knows_nothing_of_is_raised(models, monkeypatch):
    with monkeypatch.context() as patch:
        fail_in_layer(patch, models[1], 1, 2, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt, match="injected"):
            list(
                Generation(
                    models[1], prompt(11, 30), new_cache(models[1]), chunk=8, should_stop=Press()
                )
            )


def test_a_window_that_has_moved_on_is_emptied_and_the_error_stays_what_it_was(models, monkeypatch):
    """A sliding cache cannot go back; UnsupportedError in place of Ctrl-C would hide the cause."""
    _, ours = models
    ids, cache = prompt(12, 20), make_cache("sliding", ours.config, window=8)
    expected = list(
        generate(ours, ids, make_cache("sliding", ours.config, window=8), max_new_tokens=6)
    )
    with monkeypatch.context() as patch:
        fail_in_layer(patch, ours, 1, 3, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt, match="injected"):
            list(generate(ours, ids, cache, max_new_tokens=6))
    assert {layer.length for layer in cache} == {0}
    assert list(generate(ours, ids, cache, max_new_tokens=6)) == expected


def test_a_capacity_error_mid_way_is_repaired_too(model, monkeypatch):
    """A cache that did not announce its limit refuses in its second layer."""
    cache = new_cache(model)

    def refuse(k, v):
        raise CapacityError("full")

    monkeypatch.setattr(cache[1], "append", refuse)
    with pytest.raises(CapacityError):
        list(generate(model, [1, 2, 3], cache))
    assert {layer.length for layer in cache} == {0}


def test_closing_the_generator_leaves_the_cache_usable(models):
    reference, ours = models
    ids, cache = prompt(12, 6), new_cache(ours)
    tokens = generate(ours, ids, cache, max_new_tokens=20)
    got = [next(tokens) for _ in range(5)]
    tokens.close()
    assert {layer.length for layer in cache} == {6 + 4}
    rest = list(generate(ours, got[-1:], cache, max_new_tokens=5))
    assert got + rest == reference_tokens(reference, ids, 10, do_sample=False)


def test_should_stop_is_read_between_tokens_and_between_chunks(model):
    ids, cache = prompt(13, 40), new_cache(model)
    flags = iter([False, False, True])
    generation = Generation(model, ids, cache, chunk=10, should_stop=lambda: next(flags))
    assert list(generation) == [] and generation.finish_reason == "interrupted"
    assert {layer.length for layer in cache} == {20}, "finished chunks are kept"
    seen = []
    generation = Generation(model, ids[20:], cache, chunk=100, should_stop=lambda: len(seen) == 3)
    for step in generation:
        seen.append(step.token)
    assert generation.tokens == seen and generation.finish_reason == "interrupted"
    assert cache.length == 40 + 2 and generation.tokens == list(
        generate(model, ids, max_new_tokens=3)
    )


def test_sampling_params_take_the_checkpoints_values():
    config = GenerationConfig(eos_token_ids=(1,), temperature=0.6, top_k=20, top_p=0.95)
    params = SamplingParams.from_checkpoint(config, temperature=None, top_p=0.5, seed=3)
    assert params == SamplingParams(temperature=0.6, top_k=20, top_p=0.5, seed=3)
    with pytest.raises(GenerationError, match="top_p is 7"):
        SamplingParams.from_checkpoint(config, top_p=7)
    with pytest.raises(GenerationError, match="min_p is -1"):
        SamplingParams(min_p=-1)


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level, no merges: id = byte in GPT-2's order, so that every character border falls between tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.add_tokens(["hello world"])  # one token that completes two stop strings at once
    return Tokenizer(backend)


class Script:
    """Plays a fixed list of tokens through a real Generation's text layer."""

    def __init__(self, tokens, reason="length", eos_token_ids=()):
        self.tokens, self.finish_reason, self.eos_token_ids, self.fed = (
            tokens,
            None,
            eos_token_ids,
            0,
        )
        self.reason, self.ended = reason, False

    def __iter__(self):
        for token in self.tokens:
            if self.ended:
                return
            self.fed += 1
            if self.fed == len(self.tokens):
                self.finish_reason = self.reason
            yield module.Step(token, 0.0)

    def finish(self, reason):
        self.finish_reason, self.ended = reason, True


def shown(tokenizer, text, stop=(), **kwargs):
    script = Script(tokenizer.encode(text))
    stream = TextStream(script, tokenizer, stop, **kwargs)
    chunks = list(stream)
    assert "".join(chunks) == stream.text and all(chunks)
    return stream, chunks, script


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("one EN", ["END"], "one EN"),
        ("EEND", ["END"], "E"),
        ("aaab", ["aab"], "a"),
        ("hello world", ["hello world", "lo"], "hel"),
        ("hello-world", ["hello-world", "lo"], "hel"),
        ("xab", ["b", "ab"], "x"),
        ("日本語です", ["語"], "日本"),
        ("a🧑‍🚀b", ["🚀"], "a🧑\u200d"),
        ("x\n\nUser: y", ["\nUser:", "\n\nUser:"], "x"),
        ("END", "END", ""),
        ("abc", [], "abc"),
    ],
)
def test_stop_strings_across_tokens_never_show(tokenizer, text, stop, expected):
    """Every byte is a token here, so each stop string spans several."""
    stream, _, script = shown(tokenizer, text, stop)
    assert stream.text == expected
    cut = expected != text
    assert stream.finish_reason == ("stop_string" if cut else "length")
    assert bool(stream.stop_string) == cut and text[len(expected) :].startswith(stream.stop_string)
    assert script.ended == cut


def test_only_what_may_become_a_stop_string_is_held_back(tokenizer):
    _, chunks, _ = shown(tokenizer, "ab<|c", ["<|x|>"])
    assert chunks == ["a", "b", "<|c"]


def test_a_cut_character_is_shown_once_at_the_end(tokenizer):
    script = Script(tokenizer.encode("ok🦙")[:-1])
    assert "".join(TextStream(script, tokenizer)) == "ok\ufffd"


def test_eos_and_control_tokens_have_no_text(tokenizer):
    special = tokenizer.special_tokens["<eos>"]
    z = tokenizer.encode("z")[0]
    script = Script(
        [*tokenizer.encode("hi"), special, *tokenizer.encode("!"), z], "stop", eos_token_ids=(z,)
    )
    assert "".join(TextStream(script, tokenizer)) == "hi!"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one<eos>two", ["<eos>"], "one"),
        ("one<eos>two", ["<eos>tw"], "one"),
        ("one<eos>two", ["ne<eos>"], "o"),
        ("one<eos>two", ["x", "e<eos>t"], "on"),
        ("a<eos>\n<eos>b", ["<eos><eos>", "<eos>\n<eos>"], "a"),
        ("a<eos>b", ["os>b"], "a"),
        ("a<eo<eos>b", ["<eos>"], "a<eo"),
        ("a<eo<eos>b<eos>", ["o<eos>b"], "a<e"),
        ("<eos>b", ["<eos>"], ""),
        ("日<eos>本", ["日<eos>"], ""),
        ("hello world<eos>", ["world<eos>"], "hello "),
        ("ab<eos>cd", ["bc"], "abcd"),
        ("a<eos>b", ["<eos>c"], "ab"),
        ("a<eos>", ["<eos>c"], "a"),
    ],
)
def test_a_stop_string_may_name_control_tokens(tokenizer, text, stop, expected):
    """Where transformers' generate(stop_strings=…) stops, at the same token; the control tokens are not shown."""
    stream, _, script = shown(tokenizer, text, stop)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    criterion = StopStringCriteria(theirs, stop)
    ids = torch.tensor([script.tokens])
    ends = [n for n in range(1, ids.shape[1] + 1) if criterion(ids[:, :n], None).item()]
    assert (stream.text, bool(stream.stop_string)) == (expected, bool(ends))
    assert script.fed == (ends or [ids.shape[1]])[0] and stream.stop_string in ["", *stop]


def test_an_eos_is_named_by_a_stop_string_too(tokenizer):
    z = tokenizer.encode("z")[0]
    for stop, text in ((["z"], "hi"), (["iz"], "h"), (["q"], "hi")):
        stream = TextStream(
            Script([*tokenizer.encode("hi"), z], "stop", eos_token_ids=(z,)), tokenizer, stop
        )
        assert "".join(stream) == text and stream.stop_string == (stop[0] if stop != ["q"] else "")


def test_a_stop_string_can_be_part_of_the_text():
    """All of it, with the control tokens in it; others are not shown."""
    stops = StopStrings(["b<x>c"], include=True)
    pieces = [("a", True), ("<x>", False), ("b", True), ("<x>", False), ("cd", True), ("e", True)]
    assert "".join(stops.put(text, shown) for text, shown in pieces) + stops.flush() == "ab<x>c"
    assert stops.found == "b<x>c" and stops.held == ""


@pytest.mark.parametrize("stop", [[""], [1], ["a", ""]])
def test_empty_stop_strings_are_refused(tokenizer, stop):
    with pytest.raises(GenerationError, match="stop strings"):
        TextStream(Script([1]), tokenizer, stop)


def test_text_of_a_real_generation(model, tokenizer):
    """Ended by a stop string, the generation is over: no decode after it, the cache without the last token."""
    cache = new_cache(model)
    params = SamplingParams(temperature=3.0, seed=1)
    free = Generation(model, [5, 6], new_cache(model), params, max_new_tokens=30)
    text = "".join(TextStream(free, tokenizer))
    assert text == tokenizer.text_of(free.tokens) and free.finish_reason == "length"
    stop = next(
        character for character in text[3:] if character.isascii() and character.isprintable()
    )
    generation = Generation(model, [5, 6], cache, params, max_new_tokens=30)
    stream = TextStream(generation, tokenizer, [stop])
    assert "".join(stream) == text[: text.index(stop)] and stream.finish_reason == "stop_string"
    assert cache.length == 2 + len(generation.tokens) - 1 and list(generation) == []


@pytest.mark.parametrize("period", [1, 2, 16])
def test_loop_guard_fires_at_the_20th_repeat(period):
    guard = LoopGuard()
    run = list(range(period))
    fired = [guard(token) for token in [99, 98, *run * 21]]
    assert fired.index(True) == 2 + 20 * period - 1


def test_loop_guard_lets_longer_runs_and_fewer_repeats_pass():
    guard = LoopGuard()
    assert not any(map(guard, list(range(17)) * 40))
    guard = LoopGuard()
    assert not any(map(guard, ([1, 2, 3] * 19 + [4]) * 3))


def test_a_loop_ends_the_stream(tokenizer):
    stream, _, script = shown(tokenizer, "ab" * 100, is_loop=LoopGuard())
    assert stream.finish_reason == "loop" and stream.text == "ab" * 20 and script.ended


@pytest.mark.parametrize("wrong", [1.5, "2", [1.5], [True], -1, True, {"a": 1}])
def test_eos_ids_are_ids(model, wrong):
    with pytest.raises(GenerationError, match="eos_token_ids is"):
        generate(model, [1, 2], eos_token_ids=wrong)


def test_pieces_that_a_stop_string_could_contain_begin_in_or_end_in():
    stops = StopStrings(["abcd"])
    assert all(map(stops.meets, ["bc", "abcd", "xabcdx", "xa", "xabc", "dx", "bcdx"]))
    assert not any(map(stops.meets, ["x", "ac", "xb", "cx", "axd"]))
    assert not StopStrings().meets("a")


@pytest.mark.parametrize("cut", [1, 2, 3, 50])
def test_stop_strings_cut_the_same_text_however_it_is_split(cut):
    """The first stop string to be complete decides; text that may begin one is held back, never more."""
    text, shown = "an ab abc abcd xyz", []
    stops = StopStrings(["abcd", "abc ", "cd"])
    for start in range(0, len(text), cut):
        if not stops.found:
            shown.append(stops.put(text[start : start + cut]))
    assert stops.found == "abc " and "".join(shown) + stops.flush() == "an ab "
    stops = StopStrings("abcd")
    shown = [stops.put(piece) for piece in ("x a", "b", "c", "abc")]
    assert (
        shown == ["x ", "", "", "abc"]
        and not stops.found
        and stops.flush() == "abc"
        and stops.flush() == ""
    )
    for wrong in ([""], [3]):
        with pytest.raises(GenerationError, match="non-empty"):
            StopStrings(wrong)


def test_who_says_nothing_gets_64_greedy_tokens():
    assert defaults(generate) == ANSWER | SAMPLING | {"seed": None, "cache": None}
    assert defaults(Generation) == ANSWER | {
        "params": SamplingParams(),
        "history": None,
        "chunk": None,
    }
    assert defaults(SamplingParams) == SAMPLING | {"seed": None}
    assert defaults(LoopGuard) == {"period": 16, "times": 20}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("Qwen/Qwen3-0.6B", 512),
        ("Qwen/Qwen3-1.7B", 128),
        ("Qwen/Qwen3-32B", 64),
    ],
)
def test_a_chunk_is_as_long_as_one_product_may_take(name, tokens):
    """At most 8 GFLOP for gate and up together, but never so few rows that reading the weights decides."""
    from nanokv.costs.memory import FAMILY
    from nanokv.loading import skeleton

    config = FAMILY[name]
    model = skeleton(config)
    model.embed_tokens.weight = torch.nn.Parameter(torch.empty(1, 1))  # on the CPU
    assert prefill_chunk(model) == tokens
    flops = 4 * tokens * config.hidden_size * config.intermediate_size
    assert flops <= 8e9 or tokens == 64


@pytest.mark.parametrize(
    ("name", "free", "rows", "tokens"),
    [
        ("Qwen/Qwen3-0.6B", 100e9, 1, 16_384),
        ("Qwen/Qwen3-0.6B", None, 1, 16_384),  # not known
        ("Qwen/Qwen3-0.6B", 100e9, 8, 2048),
        ("Qwen/Qwen3-0.6B", 3e9, 1, 8192),
        ("Qwen/Qwen3-8B", 6e9, 1, 4096),
        ("Qwen/Qwen3-8B", 1e6, 1, 512),
        ("Qwen/Qwen3-8B", 1e6, 64, 64),
    ],
)
def test_a_chunk_on_a_gpu_is_as_long_as_memory_allows(monkeypatch, name, free, rows, tokens):
    """A power of two, a quarter of what is free, so that it is the same tomorrow."""
    from nanokv import inference
    from nanokv.costs.formulas import forward_bytes
    from nanokv.costs.memory import FAMILY
    from nanokv.loading import skeleton

    asked, model = [], skeleton(FAMILY[name])
    weight = SimpleNamespace(device=torch.device("cuda:1"), element_size=lambda: 2)
    monkeypatch.setattr(
        inference, "available_memory", lambda device: asked.append(device) or (free and int(free))
    )
    model = SimpleNamespace(config=model.config, embed_tokens=SimpleNamespace(weight=weight))
    assert prefill_chunk(model, rows) == tokens and asked == ["cuda:1"]
    if free and tokens > 512:
        assert tokens * rows * forward_bytes(model.config, 2) <= free / 4


def test_the_chunk_of_an_answer_is_that_of_the_one_policy(model):
    generation = Generation(model, prompt(1), make_cache("dict", model.config))
    assert generation.chunk == prefill_chunk(model) == 512


def test_every_path_prefills_in_the_same_chunks(model, monkeypatch):
    """The Python API took 2,048 tokens where the commands took 512, and batches always 512."""
    for place in ("generation", "batching"):
        monkeypatch.setattr(f"nanokv.decoding.{place}.prefill_chunk", lambda model, rows=1: 4)
    sizes, forward, ids = [], model.forward, [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    monkeypatch.setattr(
        model, "forward", lambda ids, *rest: sizes.append(ids.shape[1]) or forward(ids, *rest)
    )
    next(generate(model, ids))
    batching.generate_padded(model, [ids], max_new_tokens=1)
    batching.generate_ragged(model, [ids], max_new_tokens=1)
    assert sizes == [4, 4, 2] * 3
