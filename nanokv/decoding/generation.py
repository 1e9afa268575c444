"""The loop: one prefill, N−1 decodes, N tokens. The last token is never fed: no wasted forward.

    for token in nanokv.generate(model, ids): ...        ids only
    Generation      one Step at a time, with log-probabilities, timings and the finish reason
    TextStream      a Generation as text: whole characters, stop strings, loop guard

The cache always holds exactly (tokens before + ids + generated)[:cache.length], in all layers, even
after an exception or Ctrl-C: a failed forward leaves layers of different lengths, and they are
truncated before the exception leaves. If Ctrl-C interrupts that too, the first `sure` tokens are
still right, and truncate(sure) repairs the cache.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import compress
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from nanokv.cache import KVCache, make_cache
from nanokv.checkpoint import Model
from nanokv.decoding.draw import (
    GREEDY,
    Sampler,
    SamplingParams,
    Step,
    next_steps,
    reason_to_end,
    sent,
)
from nanokv.decoding.ranges import check_sampling
from nanokv.errors import ContextError, GenerationError, TokenIdsError, UnsupportedError
from nanokv.inference import check_cache, decode, prefill, prefill_chunk
from nanokv.support.habits import hinted
from nanokv.text.ids import Ids, id_list
from nanokv.text.thinking import overlap
from nanokv.text.tokenizer import StreamDecoder, Tokenizer

EosIds = int | Iterable[int] | None  # None = the checkpoint's


def never(*_: object) -> bool:
    return False


@dataclass
class Timings:
    """Seconds of model work, without the time that the caller takes between two tokens."""

    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0


@hinted
def generate(
    model: Model,
    ids: Ids,
    cache: KVCache | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    eos_token_ids: EosIds = None,
) -> "Tokens[Generation]":
    """Iterator over up to max_new_tokens ids that continue `ids`.

    ids: the tokens that are not yet in the cache, as a list, an array or a tensor, (T,) or (1,T).
    An eos token ends the answer and is yielded, as in transformers' output. eos_token_ids: None =
    the checkpoint's, [] = never stop. The repetition penalty covers ids and the generated tokens.

    The arguments are checked at the call, before any work: ContextError if the prompt does not fit,
    GenerationError for anything else.
    """
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    if cache is None:
        # Holds the same as the dict cache, but does not copy the past at each step.
        cache = make_cache("growing", model.config)
    generation = Generation(model, ids, cache, params, max_new_tokens, eos_token_ids)
    return Tokens(generation)


def context_limit(model: Model, cache: KVCache) -> int:
    """Tokens that model and cache can hold together."""
    capacity = getattr(cache, "capacity", None)
    longest = model.config.max_position_embeddings
    if capacity is None:
        return longest
    return min(longest, capacity)


class Generation:
    """One answer: an iterator of Steps, which ends with a `finish_reason`.

    `should_stop` is called before each prefill chunk and each decode; finished chunks stay in the
    cache. If it has a context manager `raising`, forwards run inside it: a KeyboardInterrupt raised
    there while should_stop() is true ends the answer between two operators instead of after the
    forward. `chunk`: tokens per prefill forward (default: inference.prefill_chunk). `history`: the
    ids already in the cache, for the repetition penalty only; without it the penalty covers ids and
    the generated tokens. The constructor checks everything, before any work.
    """

    def __init__(
        self,
        model: Model,
        ids: Ids,
        cache: KVCache,
        params: SamplingParams = GREEDY,
        max_new_tokens: int = 64,
        eos_token_ids: EosIds = None,
        history: Sequence[int] | None = None,
        should_stop: Callable[[], bool] = never,
        chunk: int | None = None,
    ):
        check_sampling(max_new_tokens=max_new_tokens)
        check_cache(cache)
        if chunk is None:
            chunk = prefill_chunk(model)
        self.model = model
        self.cache = cache
        self.params = params
        self.should_stop = should_stop
        self.ids = prompt_ids(ids, model.config.vocab_size)
        self.max_new_tokens = max_new_tokens
        self.chunk = chunk
        self.eos_token_ids = eos_ids(eos_token_ids, model)
        self.prompt_tokens = len(self.ids)
        self.cached_tokens = cache.length
        self.context = context_limit(model, cache)
        self._check(history)
        self.values = params.values()
        self.generator = params.generator(model.embed_tokens.weight.device)
        self.seed: int | None = self.generator.initial_seed()
        # Only the repetition penalty reads it.
        self._history = list(history or ()) if params.repetition_penalty != 1 else []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.sampler = Sampler(params, self.generator, self._history + self.ids, self.tokens)
        self.timings = Timings()
        self.finish_reason: str | None = None
        self.prefilled = cache.length
        self._steps = self._run()

    def _check(self, history: Sequence[int] | None) -> None:
        """GenerationError or ContextError for arguments that cannot work together."""
        cached = self.cached_tokens
        if type(self.chunk) is not int or self.chunk < 1:
            raise GenerationError(f"chunk is {self.chunk!r}: it must be an integer ≥ 1")
        if history is not None and len(history) != cached:
            raise GenerationError(
                f"history has {len(history)} tokens, but the cache holds {cached}"
            )
        if cached + self.prompt_tokens <= self.context:
            return
        if cached:
            hint = "start with an empty cache, or shorten the prompt"
        elif self.context == self.model.config.max_position_embeddings:
            hint = "shorten the prompt"
        else:
            hint = "shorten the prompt, or make a larger cache (capacity, pages)"
        raise ContextError(
            f"needs {cached + self.prompt_tokens:,} of {self.context:,} tokens "
            f"({cached:,} in the cache + {self.prompt_tokens:,} new)",
            hint,
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        try:  # _stopping(), without the cost of a generator at each token
            return next(self._steps)
        except KeyboardInterrupt:
            self._check_asked()
        raise StopIteration

    @property
    def speculation(self) -> dict[str, Any]:
        """Counts of speculative decoding; empty here."""
        return {}

    def finish(self, reason: str) -> None:
        """End the answer here; tokens that were produced stay."""
        self.finish_reason = reason
        self._steps.close()

    def _run(self) -> Generator[Step, None, None]:
        began = perf_counter()
        logits = self._prefill()
        self.timings.prefill_seconds = perf_counter() - began
        if logits is not None:  # None if interrupted
            self.cache.snapshot()
            yield from self._answer(logits, began)

    def _answer(self, logits: Tensor, began: float) -> Iterator[Step]:
        """The Steps that follow the prompt, whose logits are (1,V)."""
        steps = self._choose(logits)
        self.timings.first_token_seconds = perf_counter() - began
        while True:
            for step in steps:
                self.tokens.append(step.token)
                self.logprobs.append(step.logprob)
                self.finish_reason = self._reason_to_end()
                yield step
                if self.finish_reason is None and self.should_stop():
                    self.finish_reason = "interrupted"
                if self.finish_reason is not None:
                    return
            began = perf_counter()
            steps = self._round()
            self.timings.decode_seconds += perf_counter() - began

    def _round(self) -> list[Step]:
        """One forward for the newest token → its Steps: one here, more with speculation."""
        token = sent([self.tokens[-1:]], self.generator.device)  # (1,1)
        return self._choose(self._forward(decode, token, back_to=self.cache.length))

    def _prefill(self) -> Tensor | None:
        """Prefill chunk by chunk → logits (1,V) after the last token; None if interrupted."""
        logits = None
        for start in range(0, len(self.ids), self.chunk):
            if self.should_stop():
                self.finish_reason = "interrupted"
                return None
            ids = self.ids[start : start + self.chunk]
            part = torch.tensor([ids], device=self.generator.device)  # (1,t)
            logits = self._forward(prefill, part, back_to=self.cached_tokens)
            self.prefilled = self.cached_tokens + min(start + self.chunk, len(self.ids))
        return logits

    def _forward(self, path: Callable[..., Tensor], tokens: Tensor, back_to: int) -> Tensor:
        """path(model, tokens, cache); truncates the cache after an exception.

        A requested stop keeps the tokens before this forward; any other exception truncates to
        `back_to`, which for a prefill is before its first chunk.
        """
        start = self.cache.length
        try:
            with self._listening():
                return path(self.model, tokens, self.cache, start_pos=start)
        except BaseException as error:  # only some layers have the new tokens
            self._go_back(start)
            if not (isinstance(error, KeyboardInterrupt) and self.should_stop()):
                self._go_back(back_to)
            raise

    def _listening(self) -> AbstractContextManager[Any]:
        """should_stop.raising(), inside which Ctrl-C may interrupt a forward; else no effect."""
        return getattr(self.should_stop, "raising", nullcontext)()

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """End the answer, without an error, at a KeyboardInterrupt that should_stop explains."""
        try:
            yield
        except KeyboardInterrupt:
            self._check_asked()

    def _check_asked(self) -> None:
        """End the answer if should_stop() explains the current KeyboardInterrupt; else re-raise."""
        if not self.should_stop():
            raise
        self.finish_reason = "interrupted"

    def _go_back(self, n: int) -> None:
        try:
            self.cache.truncate(self.cache.nearest(n))  # a window that has moved is emptied
        except UnsupportedError:  # a cache of one's own may go back to the start only
            self.cache.truncate(0)

    def _choose(self, logits: Tensor) -> list[Step]:
        """logits (1,V) → [Step]"""
        (step,) = next_steps(logits, [self.sampler])
        if isinstance(step, GenerationError):
            raise step
        return [step]

    def _reason_to_end(self) -> str | None:
        return reason_to_end(self.tokens, self.eos_token_ids, self.max_new_tokens, self.room)

    @property
    def room(self) -> int:
        """Tokens that the context leaves for the answer; its last token is never fed."""
        return self.context - self.cached_tokens - self.prompt_tokens + 1

    @property
    def fed(self) -> int:
        """Tokens that the cache should hold: all but the newest, which the next forward feeds."""
        return self.cached_tokens + self.prompt_tokens + len(self.tokens) - 1

    @property
    def sure(self) -> int:
        """How many of (tokens before + ids + generated) every layer holds, even if interrupted."""
        known = self.fed if self.tokens else self.prefilled
        return min([known, *(layer.length for layer in self.cache)])


Report = TypeVar("Report", bound=Generation)


class Tokens(Iterator[int], Generic[Report]):
    """The ids of the Generation `report`, each computed when it is requested."""

    def __init__(self, report: Report):
        self.report = report

    def __next__(self) -> int:
        return next(self.report).token

    def __repr__(self) -> str:
        state = self.report.finish_reason or "not ended"
        so_far = f"{len(self.report.tokens):,} so far"
        return f"<Tokens: an iterator over ids, {so_far}, {state}; list(…) takes the rest>"

    def close(self) -> None:
        """End here and cut the cache back to the ids that were taken. May be called repeatedly."""
        self.report.finish(self.report.finish_reason or "closed")


class TextStream:
    """A Generation as text: iterate over non-empty chunks. Control tokens and eos have no text.

    Text that may become a stop string is held back, so no part of a stop string is ever shown. A
    stop string may be or contain a control token. `is_loop(token)` is called for every token; a
    chat passes LoopGuard(). After the end `.text` is all text that was shown.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        is_loop: Callable[[int], bool] = never,
    ):
        self.generation = generation
        self.is_loop = is_loop
        self.text = ""
        self._shown = ShownText(tokenizer, stop, generation.eos_token_ids)
        self._chunks = self._run()

    @property
    def finish_reason(self) -> str | None:
        return self.generation.finish_reason

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text, or ""."""
        return self._shown.stop_string

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return next(self._chunks)

    def _run(self) -> Iterator[str]:
        for step in self.generation:
            yield from self._deliver(self._shown.put(step.token))
            if self.generation.finish_reason is None and self.is_loop(step.token):
                self.generation.finish("loop")
        yield from self._deliver(self._shown.flush())

    def _deliver(self, text: str) -> Iterator[str]:
        if self.stop_string:
            self.generation.finish("stop_string")
        if text:
            self.text += text
            yield text


class ShownText:
    """Token ids → the text that a reader sees, up to the first stop string.

    Control tokens and `ends` are not shown, but they are matched against the stop strings.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), ends: Iterable[int] = ()
    ):
        self._stops = StopStrings(stop)
        self._decoder = StreamDecoder(tokenizer, skip=tokenizer.control_ids | set(ends))

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text, or ""."""
        return self._stops.found

    def put(self, id: int) -> str:
        """Add a token; returns the text that can be shown now."""
        text = self._decoder.put(id)
        hidden = self._decoder.hidden(id)
        return self._stops.put(text) + self._stops.put(hidden, shown=False)

    def flush(self) -> str:
        """The text that was held back; call at the end."""
        return self._stops.put(self._decoder.flush()) + self._stops.flush()


class StopStrings:
    """Text in pieces, up to the first complete stop string, however the tokens split the text.

    The text of a control token is a piece with `shown=False`: it is matched like any other, as in
    transformers' StopStringCriteria, but not shown. `include`: the stop string itself is shown in
    full.
    """

    def __init__(self, stop: str | Sequence[str] = (), include: bool = False):
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise GenerationError(f"stop strings must be non-empty texts, got {list(stop)!r}")
        self.stop = stop
        self.include = include
        self.found = ""  # the stop string that was met
        self._held = ""  # may be the beginning of a stop string
        self._shown: list[bool] = []  # for each character of _held

    @property
    def held(self) -> str:
        """The possible beginning of a stop string, without its hidden characters."""
        return "".join(compress(self._held, self._shown))

    def meets(self, text: str) -> bool:
        """True if a stop string could contain this piece, begin in it or end in it."""
        return any(
            text in stop or stop in text or overlap(text, stop) or overlap(stop, text)
            for stop in self.stop
        )

    def inside(self, text: str) -> bool:
        """True if this piece alone contains a stop string."""
        return any(stop in text for stop in self.stop)

    def put(self, text: str, shown: bool = True) -> str:
        """Add a piece; returns the text that can be shown now.

        Once a stop string is complete, `found` is that string and every later call returns "".
        """
        if self.found or not text:
            return ""
        self._held += text
        self._shown += [shown] * len(text)
        ends = [(at + len(stop), at) for stop in self.stop if (at := self._held.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            self.found = self._held[at:end]
            text = self._take(at)
            self._held = ""
            return text + self.found if self.include else text
        keep = max((overlap(self._held, stop) for stop in self.stop), default=0)
        return self._take(len(self._held) - keep)

    def flush(self) -> str:
        """The text that was held back; call at the end."""
        return self._take(len(self._held))

    def _take(self, length: int) -> str:
        text = "".join(compress(self._held[:length], self._shown))
        self._held = self._held[length:]
        self._shown = self._shown[length:]
        return text


class LoopGuard:
    """True once the same run of at most `period` tokens has come `times` times in a row.

    Compares each token with the `period` tokens before it.
    """

    def __init__(self, period: int = 16, times: int = 20):
        self.times = times
        self._recent: list[int] = []
        # _same[p]: how many tokens in a row equal the token p places before.
        self._same = [0] * (period + 1)

    def __call__(self, token: int) -> bool:
        self._recent.append(token)
        del self._recent[: -len(self._same)]
        for p in range(1, len(self._same)):
            repeats = len(self._recent) > p and self._recent[-1 - p] == token
            self._same[p] = self._same[p] + 1 if repeats else 0
        return any(count >= p * (self.times - 1) for p, count in enumerate(self._same) if p)


def prompt_ids(ids: Ids, vocab_size: int) -> list[int]:
    """A prompt as a list of at least one int, each in the vocabulary; else TokenIdsError."""
    found = id_list(ids, vocab_size)
    if not found:
        raise TokenIdsError("the prompt is empty: the model needs at least one token to continue")
    return found


def eos_ids(ids: EosIds, model: Model) -> tuple[int, ...]:
    """The tokens that end an answer as a tuple: one id, several or none; None = the checkpoint's.

    Raises GenerationError unless each is an integer ≥ 0.
    """
    if ids is None:
        ids = model.generation_config.eos_token_ids
    each = (ids,) if isinstance(ids, int) or not isinstance(ids, Iterable) else tuple(ids)
    if not all(type(id) is int and id >= 0 for id in each):
        raise GenerationError(f"eos_token_ids is {ids!r}: an id or a list of ids ≥ 0 was expected")
    return each
