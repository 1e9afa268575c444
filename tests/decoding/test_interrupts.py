"""An exception at any line leaves everything usable: Ctrl-C, or no memory, in the engine, in a session, in a cache.

Every scenario is run once for each line of nanokv below the call, at the line's first and at its last execution (at
night), and for some of them, drawn by lot (every time, and many of them in `make check`). See interrupts.py.
"""

import inspect
import random
import signal
from types import SimpleNamespace

import pytest
import torch

import nanokv
from interrupts import last, leave_inference_mode, some, survives
from nanokv.decoding.speculative import EarlyExit, PromptLookup
from nanokv.engine import Engine
from nanokv.engine.prefilled import taken
from oracle import pair, random_ids

# Points of each scenario in `make test` and in `make check`; all in `make night`.
SAMPLE, MANY = 12, 25


@pytest.fixture(scope="module")
def model():
    """fp64: a forward that is repeated with other neighbours must not turn a near-tie around."""
    return pair(
        seed=3,
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=16,
        head_dim=8,
        vocab_size=31,
        max_position_embeddings=64,
    )[1].double()


def prompt(seed: int, tokens: int) -> list[int]:
    return random_ids(seed, 1, tokens, 31)[0].tolist()


# --- the engine -----------------------------------------------------------------------------------------------------


class EngineSteps:
    """Prompts with a shared beginning in a pool that is too small, greedy and sampled; one is cancelled half-way."""

    def __init__(self, model):
        self.model = model

    def fresh(self):
        engine = Engine(self.model, pages=9, page_size=4, step_tokens=9, max_running=3)
        told, handed = [], []

        def on_token(request, step):
            told.append((request.number, step.token))

        shared = prompt(9, 9)
        prompts = [[*shared, 1], prompt(1, 3), [*shared, 2, 3], [*shared, 1], prompt(2, 6)]
        drawn = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3}
        values = [{}, drawn, {}, {"temperature": 1.2, "seed": 1}, {}]
        for i, (ids, how) in enumerate(zip(prompts, values, strict=True)):
            stop = {"eos_token_ids": list(range(31))} if i == 4 else {"eos_token_ids": []}
            engine.submit(
                ids,
                max_new_tokens=5,
                on_token=None if i == 1 else on_token,
                **how,
                **stop,
                **self.more(ids),
            )
        return engine, list(engine.scheduler.waiting), told, handed

    def more(self, ids):
        """What else is submitted."""
        return {}

    def call(self, state):
        engine, requests, _, handed = state
        for _ in range(200):
            # Three, where a step that was interrupted had drawn one.
            if len(requests[2].tokens) >= 2:
                engine.cancel(requests[2])
            if engine.idle:
                return
            handed += [(request.number, step.token) for request, step in engine.step()]
        raise AssertionError("the engine spins")

    def go_on(self, state):
        self.call(state)
        engine, requests, told, handed = state
        handed += [(request.number, step.token) for request, step in engine]
        for request in requests:
            assert (
                request.cache is None
                and request.logits is None
                and len(request.logprobs) == len(request.tokens)
            )
            for seen in (handed, told) if request.on_token else (handed,):
                self.check_news(
                    [token for number, token in seen if number == request.number], request.tokens
                )
        all_free(engine.pool)
        del requests[2].tokens[2:]
        answers = [(request.tokens, request.finish_reason) for request in requests]
        return answers, [request.error for request in requests], engine.metrics.finished

    def check_news(self, seen, tokens):
        """Every token was handed out, once."""
        assert seen == tokens


class EnginePrefilled(EngineSteps):
    """The same, and another process has prefilled the prompts."""

    def __init__(self, model):
        super().__init__(model)
        self.done = {}

    def more(self, ids):
        if tuple(ids) not in self.done:
            cache = nanokv.make_cache("dict", self.model.config)
            logits = nanokv.prefill(self.model, [ids], cache)
            self.done[tuple(ids)] = taken(cache, ids, logits=logits)
        return {"prefilled": self.done[tuple(ids)]}


class EngineStepsBetweenBytecodes(EngineSteps):
    """A signal may also come between the call that takes a token out of the queue and the one that passes it on."""

    def check_news(self, seen, tokens):
        """No token was handed out twice; one that was lost on its way is in request.tokens all the same."""
        rest = iter(tokens)
        assert all(token in rest for token in seen) and len(seen) >= len(tokens) - 3


def all_free(pool):
    """Nobody but the index owns a page, and the counts say so."""
    pool.settle()
    owned = pool.owned()
    assert not pool.lent and not any(
        table for cache in pool.owners.values() for table in cache.tables
    )
    assert pool.references == [owned[page] for page in range(len(pool.references))]
    assert sorted(pool.free) == [page for page in range(len(pool.references)) if not owned[page]]


class EngineStream(EngineSteps):
    """Who streams one request makes no step after its last token: all of it must be given back by then."""

    def call(self, state):
        engine, requests, _, handed = state
        del engine.scheduler.waiting[1:]
        handed += [step.token for step in engine.stream(requests[0])]

    def go_on(self, state):
        engine, requests, _, _ = state
        list(engine.stream(requests[0]))
        assert engine.idle
        all_free(engine.pool)
        return requests[0].tokens, requests[0].finish_reason, engine.metrics.finished


class EngineCancel(EngineStream):
    """The same of one that is cancelled, and cancelled again when that was cut short."""

    def fresh(self):
        state = super().fresh()
        del state[0].scheduler.waiting[1:]
        state[0].step()
        return state

    def call(self, state):
        state[0].cancel(state[1][0])

    def go_on(self, state):
        engine, requests, _, _ = state
        engine.cancel(requests[0])
        assert engine.idle
        all_free(engine.pool)
        return requests[0].finish_reason, engine.metrics.finished


# --- one answer -----------------------------------------------------------------------------------------------------


class Answer:
    """Tokens one by one; after an interrupt the user feeds what the cache does not hold, as the documentation says."""

    kind, options = "dict", {}

    def __init__(self, model):
        self.model = model

    def start(self, ids, cache, new):
        """The iterator under test, for so many new tokens."""
        return nanokv.generate(self.model, ids, cache, max_new_tokens=new)

    def fresh(self):
        cache = nanokv.make_cache(self.kind, self.model.config, **self.options)
        return SimpleNamespace(cache=cache, got=[], tokens=None)

    def call(self, state):
        state.tokens = self.start(prompt(0, 7), state.cache, 8)
        for token in state.tokens:
            state.got.append(token)

    def go_on(self, state):
        if hasattr(state.tokens, "close") and len(state.got) < 8:
            state.tokens.close()
        known = prompt(0, 7) + state.got
        if len(state.got) < 8:
            keep = min(state.cache.length, len(known) - 1)
            state.cache.truncate(keep)
            state.got += self.start(known[keep:], state.cache, 8 - len(state.got))
        state.cache.truncate(14)
        assert sorted(state.got) and state.cache.length == 14
        return state.got, list(
            nanokv.generate(self.model, state.got[-1:] + [3], state.cache, max_new_tokens=3)
        )


class AnswerOnPages(Answer):
    """The same on pages."""

    kind, options = "paged", {"page": 4}


class Lookup(Answer):
    """Guesses from the text itself."""

    def start(self, ids, cache, new):
        return nanokv.decoding.speculative.speculate(
            self.model, ids, PromptLookup(), cache, max_new_tokens=new
        )


class Drafted(Answer):
    """Guesses from the model's first layer; the drafter and its cache are used again after the interrupt. The pool is
    so small that a check of several tokens fails, and one token is fed instead."""

    kind, options = "paged", {"page": 2, "pages": 8}

    def fresh(self):
        self.draft = EarlyExit(self.model, 1)
        return super().fresh()

    def start(self, ids, cache, new):
        return nanokv.decoding.speculative.speculate(
            self.model, ids, self.draft, cache, max_new_tokens=new
        )


class Beams:
    """A search; the caller's cache holds the prompt, or a beginning of it."""

    def __init__(self, model):
        self.model = model

    def fresh(self):
        return SimpleNamespace(
            cache=nanokv.make_cache("paged", self.model.config, page=4), found=None
        )

    def search(self, cache, ids):
        return nanokv.beam_search(
            self.model, ids, beams=3, max_new_tokens=5, cache=cache, chunk=3, eos_token_ids=[]
        )

    def call(self, state):
        state.found = self.search(state.cache, prompt(0, 7))

    def go_on(self, state):
        if state.found is None:
            keep = min(*(layer.length for layer in state.cache), 6)
            state.cache.truncate(keep)
            state.found = self.search(state.cache, prompt(0, 7)[keep:])
        pool = state.cache.pool
        pool.settle()
        assert len(pool.references) - len(pool.free) == 2, "pages of beams"
        return [beam.ids for beam in state.found]


class Letters:
    """A tokenizer whose ids are letters: that of a checkpoint would be most of what is traced, and keeps no state."""

    control_ids, special_tokens = frozenset(), {}

    def encode(self, text):
        return [ord(letter) % 31 for letter in text]

    def decode(self, ids):
        return "".join(chr(65 + id) for id in ids)

    text_of = decode

    def render(self, messages, add_generation_prompt=True):
        return (
            "".join(message["role"][0] + message["content"] for message in messages)
            + "a" * add_generation_prompt
        )


class LetterStream:
    """What StreamDecoder is to a real tokenizer."""

    def __init__(self, tokenizer, skip=()):
        self.tokenizer = tokenizer

    def put(self, token):
        return self.tokenizer.decode([token])

    def hidden(self, token):
        return ""

    def flush(self):
        return ""


class Conversation:
    """The second of three messages; what was answered in part is taken back and asked again."""

    make_generation = nanokv.decoding.generation.Generation

    def __init__(self, model):
        self.model = model

    def fresh(self):
        session = nanokv.Session(
            self.model,
            Letters(),
            params={"max_new_tokens": 3},
            system="B",
            make_generation=self.make_generation,
        )
        session.ask("One")
        return session

    def call(self, session):
        session.ask("Twotwo")

    def go_on(self, session):
        state = inspect.getgeneratorstate(session._generation._steps)
        assert state != inspect.GEN_SUSPENDED, (
            "an answer is left open, which cuts the cache when it is collected"
        )
        if len(session.messages) == 4:
            session.undo()
        answers = [session.ask("Twotwo"), session.ask("Three")]
        assert session.cache.length == len(session.cached_ids) == session.last.cached
        return answers, session.messages, session.cached_ids


class GuessedConversation(Conversation):
    """The cache is ahead of the answer now and then."""

    @staticmethod
    def make_generation(*args, **options):
        return nanokv.decoding.speculative.Speculation(*args, draft=PromptLookup(), **options)


SCENARIOS = {
    "engine": EngineSteps,
    "prefilled": EnginePrefilled,
    "stream": EngineStream,
    "cancel": EngineCancel,
    "generate": Answer,
    "generate on pages": AnswerOnPages,
    "prompt lookup": Lookup,
    "draft model": Drafted,
    "beams": Beams,
    "session": Conversation,
    "session with guesses": GuessedConversation,
}
NAMES = pytest.mark.parametrize("name", SCENARIOS)


@pytest.fixture(autouse=True)
def _letters(monkeypatch):
    monkeypatch.setattr("nanokv.decoding.generation.StreamDecoder", LetterStream)
    monkeypatch.setattr("nanokv.text.tokenizer.StreamDecoder", LetterStream)


def scenario(name, model):
    return SCENARIOS[name](model)


@NAMES
def test_ctrl_c_at_some_lines_is_survived(model, name):
    survives(scenario(name, model), some(SAMPLE))


@pytest.mark.slow
@NAMES
def test_ctrl_c_at_many_lines_is_survived(model, name):
    survives(scenario(name, model), some(MANY))


@pytest.mark.night
@NAMES
def test_ctrl_c_at_any_line_is_survived(model, name):
    survives(scenario(name, model))


@pytest.mark.slow
@NAMES
def test_no_memory_at_many_lines_is_survived(model, name):
    """A MemoryError is an Exception, so that handlers may take it for something else."""
    survives(scenario(name, model), some(MANY, 1), MemoryError)


@pytest.mark.night
@NAMES
def test_no_memory_at_any_line_is_survived(model, name):
    survives(scenario(name, model), last, MemoryError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # inside a __del__
def test_real_signals_at_any_moment(model):
    """A timer presses Ctrl-C again and again while the engine works: between any two operators, also while it mends."""
    steps = EngineStepsBetweenBytecodes(model)
    undisturbed, presses, runs = steps.go_on(steps.fresh()), 0, 0

    def press(_, frame):
        # What the test itself holds in its hands would be lost.
        if armed and frame.f_code.co_filename != __file__:
            raise KeyboardInterrupt

    before, moments = signal.signal(signal.SIGALRM, press), random.Random(0)
    try:
        while presses < 300:
            state, runs = steps.fresh(), runs + 1
            for _ in range(3):
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, 0.06))
                    steps.call(state)
                except KeyboardInterrupt:
                    presses += 1
                finally:
                    armed = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
            assert steps.go_on(state) == undisturbed, f"run {runs}, after {presses} presses"
    finally:
        signal.signal(signal.SIGALRM, before)
        leave_inference_mode()
    assert not torch.is_inference_mode_enabled()
