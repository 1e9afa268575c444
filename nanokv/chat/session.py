"""A conversation whose KV cache lives across turns, for the chat, training and notebooks.

    session = nanokv.Session.from_pretrained("tiny")     # or Session(model, tokenizer)
    session.ask("My name is Zorbla.")              # blocking; greedy by default for piece in
    session.stream("What is my name?"): print(piece, end="") session.last
    # new and reused tokens, time to first token, bytes, ...

Every turn renders the whole conversation, keeps the longest common prefix of the cached ids and the
new ids (`cache.truncate(n)`), and prefills the rest from start_pos n. Printing and files are in
nanokv/apps/cli.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import torch

from nanokv.cache import KVCache, make_cache
from nanokv.cache.options import check_options, read_kind
from nanokv.chat.history import Role, token_roles, why_broken
from nanokv.checkpoint import Model
from nanokv.decoding.generation import (
    Generation,
    LoopGuard,
    SamplingParams,
    StopStrings,
    TextStream,
    context_limit,
    never,
)
from nanokv.decoding.ranges import check_sampling, chosen_seed
from nanokv.errors import ContextError, SessionError, UnknownArgument, UnsupportedError
from nanokv.inference import check_cache
from nanokv.loading import load
from nanokv.support.habits import SESSION, refuse, unknown_name
from nanokv.text.ids import common_prefix
from nanokv.text.thinking import incomplete_bytes, inside_thinking, split_thinking
from nanokv.text.tokenizer import Tokenizer
from weights_loader import Device, Dtype

DEFAULT_NEW_TOKENS = 1024
SETTINGS = (*(field.name for field in fields(SamplingParams)), "max_new_tokens", "stop")


class Dropped(NamedTuple):
    """What overflow="drop" has removed from the conversation."""

    turns: int = 0
    tokens: int = 0


NOTHING = Dropped()


@dataclass
class Turn:
    """The facts of one answer."""

    new: int  # prompt tokens that were prefilled
    reused: int  # prompt tokens that were already in the cache
    out: int = 0  # sampled tokens, eos included; the last one is never fed to the model
    ttft: float = 0.0  # seconds from the call to the first token
    tok_s: float = 0.0  # decode speed without the first token; 0 = too few tokens to measure
    finish_reason: str = ""  # stop, length, context, interrupted, stop_string, loop or error
    stop_string: str = ""  # the stop string that ended the answer
    kv_bytes: int = 0  # measured, of the whole cache
    kv_used: int = 0  # the part of kv_bytes that the tokens take
    cached: int = 0  # tokens in the cache afterwards
    text: str = ""  # the answer as the model wrote it, <think> included
    why: str = ""  # where and why the prefix broke; "" if it did not
    seed: int | None = None
    dropped: Dropped = NOTHING
    prefill_s: float = 0.0
    ids: list[int] = field(default_factory=list)  # the sampled tokens
    # Counts of speculative decoding; else empty.
    speculation: dict[str, Any] = field(default_factory=dict)


def checked_settings(
    where: str, settings: dict[str, Any], others: Iterable[str] = ()
) -> dict[str, Any]:
    """A copy of the settings. `others` are further argument names that an error lists.

    Raises UnknownArgument for a name that does not exist, GenerationError for a value out of range.
    """
    if unknown := settings.keys() - set(SETTINGS):
        known = [name for name in (*others, *SETTINGS) if name not in ("params", "settings")]
        refuse(where, unknown, known)
    given = {name: value for name, value in settings.items() if value is not None}
    StopStrings(given.pop("stop", ()))
    check_sampling(max_new_tokens=given.pop("max_new_tokens", 1))
    SamplingParams(**given)
    return dict(settings)


class Session:
    """Messages (always alternating user, assistant) and the one cache that holds them.

    Settings are keywords: temperature, top_k, top_p, min_p, repetition_penalty, seed,
    max_new_tokens, stop (strings). Given here they apply to all answers; given to `ask`,
    `stream`, `retry` or `resume`, to one answer. `params`: the same settings as a dict. `cache`:
    a cache, or the name of a kind with its options, "quantized:bits=4". `make_generation` makes
    the Generation of each answer: another class, or one with a Draft (speculative.py).
    `overflow`: "stop" raises ContextError before any work; "drop" removes the oldest whole turns
    and keeps the system prompt.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        cache: KVCache | str | None = None,
        params: dict[str, Any] | None = None,
        system: str | None = None,
        context: int | None = None,
        template_kwargs: dict[str, Any] | None = None,
        overflow: str = "stop",
        loop_guard: str = "off",
        make_generation: Callable[..., Generation] = Generation,
        **settings: Any,
    ):
        self.model = model
        self.tokenizer = _with_model(tokenizer, model)
        given = (params or {}) | settings
        self.params = checked_settings("Session()", given, inspect.signature(Session).parameters)
        self.overflow = _choice("overflow", overflow, ("stop", "drop"))
        self.loop_guard = _choice("loop_guard", loop_guard, ("on", "off"))
        self.cache = _cache_for(model, cache, context)
        limit = context_limit(model, self.cache)
        self.context = min(context or limit, limit)
        self.make_generation = make_generation
        self.template_kwargs = dict(template_kwargs or {})
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.prompt_ids: list[int] = []
        self.last: Turn | None = None
        self.why = ""  # where and why the last prefix broke
        self.answers = 0
        self.thinking_opened = False  # True if the last prompt ended inside <think>
        self._generation: Generation | None = None
        self._labelled: list[dict[str, Any]] = []  # the messages of prompt_ids
        self._reply_ids: list[int] | None = None  # of the last answer, without its eos
        self._edited = False  # a broken prefix needs no explanation then
        self._room = 0  # tokens that the context leaves for the last answer
        self.cache.truncate(0)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str] = "tiny",
        *,
        dtype: Dtype = "auto",
        device: Device = "auto",
        revision: str | None = None,
        **options: Any,
    ) -> Self:
        """A conversation with the model that nanokv.load finds; `options` are those of Session."""
        own = inspect.signature(Session).parameters
        checked_settings(
            "Session.from_pretrained()", {k: v for k, v in options.items() if k not in own}, own
        )
        if isinstance(options.get("cache"), str):  # an error here saves a download
            check_options(*read_kind(options["cache"]), objects=True)
        return cls(*load(source, dtype=dtype, device=device, revision=revision), **options)

    if not TYPE_CHECKING:  # a type checker that sees it accepts mistyped names

        def __getattr__(self, name: str) -> NoReturn:
            raise unknown_name(self, name, SESSION)

    def __repr__(self) -> str:
        tokens = f"{len(self.cached_ids):,} of {self.context:,} tokens"
        turns = len(self.messages) // 2
        held = f"{self.cache.nbytes:,} B in {self.cache.made.name!r}"
        return f"<Session: {turns} turn{'s' * (turns != 1)}, {tokens}, {held}>"

    # --- asking ---------------------------------------------------------------------------------

    def ask(self, text: str, **settings: Any) -> str:
        """The whole answer to one message, without thoughts. settings: for this answer only."""
        reply = "".join(self.stream(text, **settings))
        return split_thinking(reply, self.thinking_opened)[1]

    def stream(
        self, text: str, should_stop: Callable[[], bool] = never, **settings: Any
    ) -> Iterator[str]:
        """Iterator over the answer's text, in whole characters.

        `should_stop()` is called between tokens and between prefill chunks.
        """
        message = {"role": "user", "content": text}
        return self._with(settings, self._answer([*self.messages, message], [], should_stop))

    def retry(self, should_stop: Callable[[], bool] = never, **settings: Any) -> Iterator[str]:
        """Answer the last message again, with the same prompt and another seed."""
        if not self.messages:
            raise SessionError("nothing to retry: no message yet")
        return self._with(settings, self._answer(self.messages[:-1], [], should_stop))

    def resume(self, should_stop: Callable[[], bool] = never, **settings: Any) -> Iterator[str]:
        """Continue the last answer without computing any of its tokens again."""
        if not self.messages:
            raise SessionError("nothing to continue: no answer yet")
        answer = self._answer(self.messages[:-1], self._open_reply(), should_stop)
        return self._with(settings, answer)

    def _with(self, settings: dict[str, Any], answer: Iterator[str]) -> Iterator[str]:
        """An answer with these settings, checked now; afterwards the session's settings return."""
        if not settings:
            return answer
        return self._under(checked_settings("an answer", settings), answer)

    def _under(self, settings: dict[str, Any], answer: Iterator[str]) -> Iterator[str]:
        before = self.params
        self.params = before | settings
        try:
            yield from answer
        finally:
            self.params = before

    def _open_reply(self) -> list[int]:
        """Ids of the last answer, without the eos and without an incomplete last character."""
        if self._reply_ids is None:
            ids = self.tokenizer.encode(self.messages[-1]["content"])
        else:
            ids = list(self._reply_ids)
        held = incomplete_bytes(b"".join(map(self.tokenizer.token_bytes, ids)))
        while ids and held > 0:
            held -= len(self.tokenizer.token_bytes(ids.pop()))
        return ids

    def _answer(
        self, messages: list[dict[str, Any]], reply: list[int], should_stop: Callable[[], bool]
    ) -> Iterator[str]:
        """Answer the messages, the last of which is the user's; `reply` begins the answer."""
        messages, ids, dropped = self._fit(messages, reply)
        self._edited |= bool(dropped.turns)
        n = self._keep_prefix(ids)
        # One statement, so that an interrupt never leaves the ids of other messages.
        self.prompt_ids, self._labelled = ids, messages
        generation = self._generation = self._make_generation(ids, n, should_stop)
        turn = Turn(new=len(ids) - n, reused=n, why=self.why, seed=generation.seed, dropped=dropped)
        is_loop = LoopGuard() if self.loop_guard == "on" else never
        stop = tuple(self.params.get("stop") or ())
        stream = TextStream(generation, self.tokenizer, stop, is_loop)
        before = self.tokenizer.text_of(reply)
        self.thinking_opened = inside_thinking(self.tokenizer.decode(ids[-8:]), before)
        try:
            yield from stream
        except BaseException as error:
            # Finish now: an open Generation would truncate the cache when it is garbage collected.
            stopped = "interrupted" if isinstance(error, GeneratorExit) else "error"
            # A Generation may have a finish reason before it has ended.
            generation.finish(generation.finish_reason or stopped)
            raise
        finally:
            self._record(turn, generation, stream, messages, reply, before)

    def _make_generation(
        self, ids: list[int], n: int, should_stop: Callable[[], bool]
    ) -> Generation:
        """A Generation for ids[n:]; checks now, and prefills when its first token is requested."""
        sampling = {
            k: v
            for k, v in self.params.items()
            if k not in ("max_new_tokens", "stop") and v is not None
        }
        if (seed := chosen_seed(sampling.get("seed"))) is not None:
            sampling["seed"] = (seed + self.answers) % 2**64  # each answer differs, repeatably
        # + 1, because the last token is never fed.
        room = self.context - len(ids) + 1
        self._room = room
        return self.make_generation(
            self.model,
            torch.tensor([ids[n:]]),
            self.cache,
            SamplingParams(**sampling),
            max_new_tokens=min(self.params.get("max_new_tokens") or DEFAULT_NEW_TOKENS, room),
            history=self.cached_ids,
            should_stop=should_stop,
        )

    def _record(
        self,
        turn: Turn,
        generation: Generation,
        stream: TextStream,
        messages: list[dict[str, Any]],
        reply: list[int],
        before: str,
    ) -> None:
        """Make messages agree with the cache, however the answer ended; no token, no message."""
        tokens = list(generation.tokens)
        self._measure(turn, generation, tokens)
        turn.text = stream.text
        turn.stop_string = stream.stop_string
        self.last = turn
        if not tokens:
            return
        message: dict[str, Any] = {"role": "assistant", "content": before + stream.text}
        if turn.finish_reason in ("interrupted", "error"):
            message["interrupted"] = True
        kept: list[int] | None = reply + tokens
        if turn.finish_reason == "stop_string":
            kept = None  # the ids include the stop string, the message does not
        elif tokens[-1] in generation.eos_token_ids:
            kept = reply + tokens[:-1]
        # One statement, so that an interrupt never leaves the ids of another message.
        self.messages, self._reply_ids, self.answers = [*messages, message], kept, self.answers + 1
        self.cache.snapshot()

    def _measure(self, turn: Turn, generation: Generation, tokens: list[int]) -> None:
        """Write counts, times and sizes into `turn`."""
        timings = generation.timings
        turn.speculation = generation.speculation
        turn.finish_reason = generation.finish_reason or "error"
        if turn.finish_reason == "length" and len(tokens) >= self._room:
            turn.finish_reason = "context"
        turn.out = len(tokens)
        turn.ids = tokens
        turn.ttft = timings.first_token_seconds or 0.0
        turn.prefill_s = timings.prefill_seconds or 0.0
        if len(tokens) > 1 and timings.decode_seconds:
            turn.tok_s = (len(tokens) - 1) / timings.decode_seconds
        turn.kv_bytes = self.cache.nbytes
        turn.kv_used = self.cache.sizes.used_nbytes
        turn.cached = self.cache.length

    # --- prompt and prefix ----------------------------------------------------------------------

    @property
    def cached_ids(self) -> list[int]:
        """Ids of prompt and answer that the cache holds; computed, so never out of date."""
        if self._generation is None:
            return self.prompt_ids[: self.cache.length]
        return (self.prompt_ids + self._generation.tokens)[: self._generation.sure]

    def prompt(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of these messages in the model's template, system prompt first."""
        if not messages and not self.system:
            return []
        plain = [{"role": m["role"], "content": m["content"]} for m in messages]
        text = self.tokenizer.render(
            self._system_message() + plain,
            add_generation_prompt=add_generation_prompt,
            **self.template_kwargs,
        )
        return self.tokenizer.encode(text)

    def _system_message(self) -> list[dict[str, Any]]:
        """A list of one message, or of none without a system prompt."""
        if not self.system:
            return []
        return [{"role": "system", "content": self.system}]

    def _fit(
        self, messages: list[dict[str, Any]], reply: list[int]
    ) -> tuple[list[dict[str, Any]], list[int], Dropped]:
        """(messages, ids, what was dropped) that fit the context; ContextError with the numbers."""
        ids = first = self.prompt(messages) + reply
        kept = messages
        turns = 0
        limit = self.context - self._reserve()
        while self.overflow == "drop" and len(ids) > limit and len(kept) > 2:
            kept = kept[2:]
            turns += 1
            ids = self.prompt(kept) + reply
        if len(ids) > self.context:
            raise self._too_long(messages, len(first))
        return kept, ids, Dropped(turns, len(first) - len(ids))

    def _too_long(self, messages: list[dict[str, Any]], needed: int) -> ContextError:
        """The error for messages of `needed` tokens."""
        history = len(self.prompt(messages[:-1], add_generation_prompt=False))
        message = needed - history
        turns = len(messages) // 2
        wider = self.context < context_limit(self.model, self.cache)
        hint = "a shorter message" + ", or a larger --context N" * wider
        if turns and message <= self.context:
            hint = f"/drop {min(turns, 3)}, /clear,{' --context N' * wider} or --overflow drop"
        return ContextError(
            f"needs {needed:,} of {self.context:,} tokens "
            f"(history {history:,} + message {message:,})",
            hint=hint,
        )

    def _reserve(self) -> int:
        """Tokens that dropping frees for an answer: max_new_tokens or an eighth of the context."""
        return min(self.params.get("max_new_tokens") or DEFAULT_NEW_TOKENS, self.context // 8)

    def _keep_prefix(self, ids: list[int]) -> int:
        """Truncate to the longest common prefix; at least one id must be fed to get logits."""
        cached = self.cached_ids
        n = min(common_prefix(cached, ids), len(ids) - 1)
        broken = n < min(len(cached), len(ids) - 1) and not self._edited
        self.why = why_broken(self.tokenizer, cached, ids, self.roles(), n) if broken else ""
        self._edited = False
        return self._truncate(n)

    def _truncate(self, n: int) -> int:
        """Truncate the cache to n tokens, or to the nearest it can go back to; returns which."""
        if any(layer.length != n for layer in self.cache):
            try:
                self.cache.truncate(n)
            except UnsupportedError as error:  # a window has moved, a state has gone on
                nearest = self.cache.nearest(n)
                n = nearest if nearest < n else 0  # a cache of one's own may just refuse
                self.cache.truncate(n)
                since = f"token {n:,} on" if n else "the start"
                self.why = f"{error}: prefilled from {since}"
        return n

    def roles(self) -> list[Role]:
        """The role of each cached token: s(ystem), u(ser) or a(ssistant), and its turn."""
        messages = self._system_message() + self._labelled
        roles = token_roles(self.tokenizer, self.prompt_ids, messages)
        answer = Role("a", roles[-1].turn if roles else 1)
        cached = len(self.cached_ids)
        return (roles + [answer] * cached)[:cached]

    # --- editing history ------------------------------------------------------------------------

    def undo(self) -> str:
        """Remove the last message and its answer; returns the message."""
        if not self.messages:
            raise SessionError("nothing to undo: no message yet")
        text = self.messages[-2]["content"]
        self.replace(self.messages[:-2])
        return text

    def drop(self, turns: int) -> None:
        """Remove the oldest turns; the later ones must be prefilled again."""
        have = len(self.messages) // 2
        if not 1 <= turns <= have:
            raise SessionError(f"cannot drop {turns} of {have} turns")
        self.replace(self.messages[2 * turns :])

    def clear(self) -> None:
        """Remove all messages and empty the cache; the system prompt stays."""
        self.replace([])

    def set_system(self, text: str | None) -> None:
        """Replace the system prompt; as it comes first, the whole cache must be computed again."""
        self.system = text or None
        self.replace(self.messages)

    def replace(self, messages: list[dict[str, Any]]) -> None:
        """Replace all messages; the cache keeps the common prefix."""
        roles = [m["role"] for m in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise SessionError(
                f"a conversation alternates user and assistant, this one has {', '.join(roles[:6])}"
            )
        # One statement, so that an interrupt never leaves the ids of another answer.
        self.messages, self._reply_ids, self._edited = list(messages), None, True
        ids = self.prompt(messages, add_generation_prompt=False)
        self._truncate(common_prefix(self.cached_ids, ids))

    def adopt_cache(self, cache: KVCache, ids: list[int]) -> None:
        """Take over a loaded cache that holds exactly these ids."""
        if cache.length != len(ids):
            raise SessionError(
                f"the saved cache holds {cache.length:,} tokens, its list of ids {len(ids):,}"
            )
        # One statement, so that an interrupt never leaves the ids of another cache.
        self.cache, self.prompt_ids, self._generation = cache, list(ids), None
        self._labelled = self.messages
        self._edited = True


def _with_model(tokenizer: Tokenizer | None, model: object) -> Tokenizer:
    """The tokenizer. UnknownArgument if it is missing, or if the model is only a name."""
    named = isinstance(model, str | os.PathLike)
    if tokenizer is not None and not named:
        return tokenizer
    source = "tiny"
    if named:
        source = str(model)
    raise UnknownArgument(
        f"a Session needs a model and its tokenizer, got {model!r}",
        f"nanokv.Session.from_pretrained({source!r}) loads both",
    )


def _cache_for(model: Model, cache: KVCache | str | None, context: int | None) -> KVCache:
    """The cache itself, or a new one of the named kind (default: dict) for `context` tokens."""
    if cache is None:
        cache = "dict"
    if isinstance(cache, str):
        cache = make_cache(cache, model.config, capacity=context)
    check_cache(cache)
    return cache


def _choice(name: str, value: str, known: tuple[str, ...]) -> str:
    """The value. SessionError unless it is one of `known`."""
    if value not in known:
        raise SessionError(f"{name} is {value!r}: it must be {' or '.join(map(repr, known))}")
    return value
