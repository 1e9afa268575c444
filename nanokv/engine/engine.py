"""The engine: feeds the tokens that the scheduler planned, then draws a token per fed request.

A step runs one packed forward for all prefill chunks and one ragged forward for all decodes, or one
for both if they have few tokens. The other requests of a step change only the rounding of sums:
greedy and sampled answers are those of nanokv.generate, because every request has its generator.
Single-threaded: callbacks run between two forwards and may submit and cancel.

Ctrl-C can come at any line. Nothing is undone then: the next step first completes the interrupted
changes (`_settle`).
"""

import gc
import operator
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from nanokv.cache import KVCache, PrefixPool, make_cache
from nanokv.cache.paged_batch import PagedBatch
from nanokv.cache.prefix import INDEXES
from nanokv.cache.snapshots import EVERY, MOST
from nanokv.checkpoint import Model
from nanokv.decoding.draw import SamplingParams, Step, next_steps, sent, together
from nanokv.decoding.generation import EosIds, eos_ids, prompt_ids
from nanokv.decoding.ranges import check_sampling
from nanokv.engine.budget import StepBudget
from nanokv.engine.metrics import Metrics
from nanokv.engine.packed import prefill_packed
from nanokv.engine.prefilled import Prefilled, taken, whole_pages
from nanokv.engine.request import FINISHED, RUNNING, Drawn, Request, logits_of
from nanokv.engine.scheduler import Scheduler
from nanokv.errors import CapacityError, ContextError, GenerationError, HandoverError
from nanokv.inference import decode, prefill_chunk
from nanokv.text.ids import Ids


class Engine:
    """Requests over a pool of `pages` pages of `page_size` tokens; at most `max_running` run.

    A step feeds at most `step_tokens` tokens; the default is that of one forward of a long prompt
    (inference.prefill_chunk). If the engine is `paced`, prompts beside decodes get only so many of
    them that a step stays short (budget.py); by default it is, unless `step_tokens` is given.
    `prefix` names the index that finds the pages of earlier prompts: "hash", or "radix" (a tree).
    Of a model with recurrent layers at most `snapshots` snapshots are kept, one every
    `snapshot_every` tokens of a prompt besides those of cache/snapshots.py.
    Iterating yields (request, Step) as tokens are drawn, until no request is left. `clock` is for
    tests.
    """

    def __init__(
        self,
        model: Model,
        pages: int = 256,
        page_size: int = 16,
        step_tokens: int | None = None,
        max_running: int = 32,
        clock: Callable[[], float] = perf_counter,
        paced: bool | None = None,
        prefix: str = "hash",
        snapshots: int = MOST,
        snapshot_every: int = EVERY,
    ):
        sizes = {"pages": pages, "page_size": page_size, "max_running": max_running}
        sizes |= {"snapshots": snapshots, "snapshot_every": snapshot_every}
        if step_tokens is not None:
            sizes["step_tokens"] = step_tokens
        check_sizes(sizes)
        if paced is None:
            paced = step_tokens is None
        if step_tokens is None:
            # At least one token per running request.
            step_tokens = max(prefill_chunk(model), max_running)
        self.model = model
        self.config = model.config
        self.clock = clock
        self.device = model.embed_tokens.weight.device
        self.pool = PrefixPool(model.config, pages, page_size, checked_index(prefix))
        self.pool.keep_snapshots(snapshot_every, snapshots)
        self.metrics = Metrics()
        self.scheduler = Scheduler(model.config, self.pool, step_tokens, max_running, self.metrics)
        self.budget: StepBudget | None = None
        if paced:
            self.budget = StepBudget(page_size, step_tokens)
            self.scheduler.beside = self.budget.prompt_tokens
        self._submitted = 0
        self._batch: PagedBatch | None = None
        self._whole = True  # False while a step runs, and after one that was interrupted
        # (request number, place) → (request, Step) that no call of `step` has returned yet.
        self._drawn: dict[tuple[int, int], tuple[Request, Step]] = {}

    def __repr__(self) -> str:
        pool = self.pool
        requests = f"{len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting"
        free = f"{pool.available():,} of {len(pool.references):,}"
        pages = f"{free} pages of {pool.page_size} tokens free"
        return f"<Engine: {requests}, {pages}, {pool.nbytes:,} B>"

    # --- requests in, tokens out ----------------------------------------------------------------

    def submit(
        self,
        ids: Ids,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        eos_token_ids: EosIds = None,
        salt: str = "",
        top_logprobs: int = 0,
        constrain: Callable[[torch.Tensor, list[int]], torch.Tensor] | None = None,
        on_token: Callable[[Request, Step], object] | None = None,
        prefilled: Prefilled | None = None,
        client: str = "",
    ) -> Request:
        """Queue a request; the arguments mean the same as in nanokv.generate.

        `top_logprobs`: how many of the likeliest tokens each Step lists.
        `constrain(logits (1,V), tokens so far)` returns the logits to draw from, −∞ for forbidden
        tokens; log-probabilities stay those of the raw logits. `prefilled`: another process has
        prefilled the prompt, and this engine only decodes. Requests share the pages of equal
        beginnings only if they have the same `salt`. `client`: who asks; clients take turns, so
        that many requests of one do not delay those of another (turns.py).

        Raises ContextError if the prompt is longer than the context, CapacityError if the whole
        pool could not hold prompt and answer, GenerationError for any other bad value.
        """
        check_sampling(max_new_tokens=max_new_tokens, top_logprobs=top_logprobs)
        check_given(salt, client, on_token, constrain)
        prompt = prompt_ids(ids, self.config.vocab_size)
        request = Request(
            number=self._submitted,
            prompt=prompt,
            params=SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed),
            max_new_tokens=max_new_tokens,
            room=self._room(len(prompt), max_new_tokens),
            eos_token_ids=eos_ids(eos_token_ids, self.model),
            salt=salt,
            client=client,
            on_token=on_token,
            device=self.device,
            arrived=self._arrival(prefilled, prompt),
            constrain=constrain,
            top_logprobs=top_logprobs,
            prefilled=prefilled,
        )
        self._submitted += 1
        self.scheduler.add(request)
        return request

    def _arrival(self, prefilled: Prefilled | None, prompt: list[int]) -> float:
        """The time from which a request counts: when its prefill was asked for, or now.

        Raises HandoverError if `prefilled` cannot continue this prompt.
        """
        if prefilled is None:
            return self.clock()
        self.check_prompt(prefilled, prompt)
        return prefilled.asked

    def add_prefix(self, cache: KVCache, salt: str = "") -> int:
        """Copy the full pages of a cache, from another process or a file, into the pool.

        A request that begins with `cache.tokens` then computes only the rest. Returns the number of
        tokens copied, a multiple of the page size. The pages are evicted like all idle ones: least
        recently used first.

        Raises, and changes nothing: HandoverError for a cache without its ids, with several rows or
        with inexact values; CapacityError if too few pages are free or idle.
        """
        check_salt(salt)
        if cache.tokens:
            cache = whole_pages(cache, self.pool.page_size)
            if not cache.length:
                return 0
        prefix = taken(cache, prompt_ids(list(cache.tokens), self.config.vocab_size))
        self.check_prefilled(prefix, list(prefix.tokens))
        tokens = prefix.tokens[: len(prefix.tokens) // self.pool.page_size * self.pool.page_size]
        if tokens:
            mine: Any = make_cache("prefix", self.config, pool=self.pool, salt=salt)
            mine.reuse(tokens)
            prefix.extend(mine, self.device)
            mine.remember(prefix.tokens)
            mine.free()
        return len(tokens)

    def check_prefilled(self, prefilled: Prefilled, prompt: list[int]) -> None:
        """HandoverError unless `prefilled` belongs to this prompt and fits this model."""
        if list(prefilled.tokens) != prompt:
            raise HandoverError(
                f"{len(prefilled.tokens):,} tokens were prefilled, "
                f"which are not the {len(prompt):,} of the prompt",
                "prefill the very ids that are submitted",
            )
        prefilled.check(self.config, self._key_dtype())

    def check_prompt(self, prefilled: Prefilled, prompt: list[int]) -> None:
        """`check_prefilled`, and HandoverError if the logits after the prompt are missing."""
        self.check_prefilled(prefilled, prompt)
        if prefilled.logits is None:
            raise HandoverError(
                f"no logits follow the {len(prompt):,} tokens that were prefilled",
                "Engine.add_prefix takes what has none",
            )

    def _key_dtype(self) -> torch.dtype | None:
        """The dtype of the pool's keys; None if it is not known yet, as with int8 weights."""
        if self.pool.keys is not None:
            return self.pool.keys.dtype
        weight = self.model.embed_tokens.weight.dtype
        return weight if weight.is_floating_point else None

    def _room(self, prompt: int, new: int) -> int:
        """Tokens that the context leaves for the answer, whose last token is never fed.

        Raises ContextError or CapacityError for a request that can never fit.
        """
        context = self.config.max_position_embeddings
        if prompt > context:
            raise ContextError(f"needs {prompt:,} of {context:,} tokens", "shorten the prompt")
        room = context - prompt + 1
        new = min(new, room)
        pages = len(self.pool.references)
        size = self.pool.page_size
        needed = -(-(prompt + new - 1) // size)
        if needed > pages:
            fits = pages * size - prompt + 1
            hint = "a shorter prompt, or a larger pool"
            if fits >= 1:
                hint = f"max_new_tokens={fits} fits"
            raise CapacityError(
                f"the request needs {needed:,} pages "
                f"({prompt:,} tokens + {new:,} new, {size} a page), the pool has {pages:,}",
                hint,
            )
        return room

    def cancel(self, request: Request, reason: str = "cancelled") -> None:
        """End a request now and free its pages; its tokens stay. A finished one is not changed."""
        whole = self._whole
        self._whole = False
        if request.state != FINISHED:
            request.finish_reason = reason  # commit
        # Also for a finished request, which Ctrl-C may have left in a list or with its pages.
        self._finish(request)
        self._whole = whole

    @property
    def aside_tokens(self) -> int:
        """The most tokens of a forward between two steps, which running streams wait for."""
        scheduler = self.scheduler
        if self.budget is None or not scheduler.running:
            return scheduler.step_tokens
        return max(self.pool.page_size, scheduler.beside or 0)

    def aside(self, function: Callable[[Model], Any]) -> Any:
        """function(model), between two steps: for forwards without a request and its cache."""
        return function(self.model)

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not (self.scheduler.waiting or self.scheduler.running)

    def __iter__(self) -> Iterator[tuple[Request, Step]]:
        self._settle()
        while True:
            for key in list(self._drawn):
                yield self._drawn.pop(key)
            if self.idle:
                return
            self._step()

    def run(self) -> None:
        """Step until all requests are finished; read their tokens by callback or afterwards."""
        while not self.idle:
            self.step()

    def stream(self, request: Request) -> Iterator[Step]:
        """The Steps of one request; the other requests advance too."""
        sent = 0
        while True:
            while sent < len(request.tokens):
                sent += 1
                yield request.step_at(sent - 1)
            if request.state == FINISHED:
                # Free its pages now: the caller may never call step() again.
                return self.cancel(request)
            self.step()

    # --- one step -------------------------------------------------------------------------------

    def step(self) -> list[tuple[Request, Step]]:
        """Plan, run the forwards, draw the tokens: [(request, Step)].

        After an exception, call it again: it repeats the failed forward, and returns tokens that
        were drawn but not returned.
        """
        self._step()
        drawn = self._drawn
        # One statement, so that an interrupt neither loses a token nor returns one twice.
        return (list(drawn.values()), drawn.clear())[0]  # type: ignore[func-returns-value]

    def _step(self) -> None:
        self._settle()
        self._whole = False
        prefilled = self.metrics.prefill_tokens
        work = self.scheduler.plan() or self._plan_again()
        now = self.clock()
        fed = {id(request) for request, _ in work}
        for request in self.scheduler.running:
            # A prefilled request has nothing to feed.
            if request.admitted is None and (id(request) in fed or request.pending == 0):
                request.admitted = now
        pending = [(request.pending, request, tokens) for request, tokens in work]
        decodes = [request for n, request, _ in pending if n == 1]
        chunks = [(request, tokens) for n, request, tokens in pending if n > 1]
        streams = len(decodes)
        while chunks:
            chunks, decodes = self._prefill(chunks, decodes)
        self._decode(decodes)
        self.metrics.note_step(self.pool, self.scheduler.running)
        self._draw()
        if self.budget is not None:
            prefilled = self.metrics.prefill_tokens - prefilled
            self.budget.note(self.clock() - now, prefilled, streams)
            self.scheduler.beside = self.budget.prompt_tokens
        self._whole = True

    def _plan_again(self) -> list[tuple[Request, int]]:
        """Collect garbage and plan again; CapacityError if no request can advance.

        The frames of an interrupted step may still hold a cache, and with it pages.
        """
        if self.scheduler.waiting:
            gc.collect()
        work = self.scheduler.plan()
        # A running request may have nothing to feed: its prompt came prefilled.
        if not work and self.scheduler.waiting and not self.scheduler.running:
            raise self._stuck()
        return work

    def _settle(self) -> None:
        """Complete the changes of an interrupted step."""
        self.pool.settle()
        if not self._whole:
            self.scheduler.mend()
            self._draw()

    def _prefill(
        self, chunks: list[tuple[Request, int]], decodes: list[Request]
    ) -> tuple[list[tuple[Request, int]], list[Request]]:
        """Feed the next chunk of each request in one forward; the last chunk gives the logits.

        The decodes join, if the model computes so many rows in one call: it then reads the weights
        once for all. Returns the chunks and decodes that are left. A chunk must wait if this
        forward computes its beginning for another request: it can reuse the pages afterwards.
        """
        now: list[tuple[Request, int]] = []
        later: list[tuple[Request, int]] = []
        for request, tokens in chunks:
            # Since it was admitted, another request may have computed its beginning.
            self.scheduler.reuse(request)
            tokens = min(tokens, request.pending)
            waits = any(self.scheduler.shares(request, other, more) for other, more in now)
            if waits:
                later.append((request, tokens))
                continue
            first = self.scheduler.first_part(request, tokens)
            now.append((request, first))
            if first < tokens:
                later.append((request, tokens - first))
        joining: list[Request] = []
        rows = sum(tokens for _, tokens in now) + len(decodes)
        if rows <= getattr(self.model, "most_packed", 0):
            joining, decodes = decodes, []
        requests = [request for request, _ in now] + joining
        starts = [request.fed for request in requests]
        parts = [request.known[request.fed : request.fed + n] for request, n in now]
        parts += [[request.newest] for request in joining]
        caches = [request.cache for request in requests]
        self.metrics.forwards += 1
        logits = prefill_packed(self.model, parts, caches, starts)  # (B,V)
        for row, request in enumerate(requests):
            request.feed(logits, row)
        self.metrics.decode_tokens += len(joining)
        for request, tokens in now:
            self.metrics.prefill_tokens += tokens
            request.cache.remember_chunk(request.known)
        return later, decodes

    def _decode(self, requests: list[Request]) -> None:
        """Feed the newest token of each request in one forward; rows may differ in length."""
        if not requests:
            self._batch = None
            return
        cache = self._batch_of([request.cache for request in requests])
        newest = sent([[request.newest] for request in requests], self.device)  # (B,1)
        self.metrics.forwards += 1
        logits = decode(self.model, newest, cache, cache.length)  # (B,V)
        self.metrics.decode_tokens += len(requests)
        for row, request in enumerate(requests):
            request.feed(logits, row)

    def _batch_of(self, caches: list[KVCache]) -> PagedBatch:
        """The batch of the last step if it has the same rows, so that only new pages are copied."""
        batch = self._batch
        same = batch is not None and len(batch.rows) == len(caches)
        if batch is None or not same or any(map(operator.is_not, batch.rows, caches)):
            batch = self._batch = PagedBatch(caches, self.config)
        return batch

    def _draw(self) -> None:
        """Draw a token for every fed request; an error ends only the request that it concerns."""
        self._draw_together()
        for request in list(self.scheduler.running):
            if request.state != RUNNING:  # a callback has cancelled it
                continue
            try:
                if request.pending == 0:
                    request.draw()
                request.finish_reason = request.finish_reason or request.reason_to_end()
                self._hand_out(request)
            except MemoryError:  # not caused by this request, and the step can be repeated
                raise
            except Exception as error:  # NaN logits, or a callback that failed
                request.finish_reason, request.error = "error", error  # commit
                request.untold.clear()
            finally:
                # Also when Ctrl-C leaves through the callback of the last token, so that no token
                # follows the last one.
                handed_out = request.handed == len(request.tokens) and not request.untold
                if request.finish_reason is not None and handed_out:
                    self._finish(request)

    def _draw_together(self) -> None:
        """On a GPU, draw for all fed requests with one synchronisation.

        A request with a grammar (`constrain`, which is a Python function) is drawn alone.
        """
        if not together(self.device):
            return
        fed = [
            request
            for request in self.scheduler.running
            if request.state == RUNNING and request.pending == 0 and not request.constrain
        ]
        if fed:
            steps = next_steps(logits_of(fed), [request.sampler for request in fed])
            for request, step in zip(fed, steps, strict=True):
                request.drawn = Drawn(len(request.tokens), step)

    def _hand_out(self, request: Request) -> None:
        """Pass drawn tokens to the caller of `step` and to the callback.

        Both queues are dicts, so that repeating this after an interrupt adds no token twice.
        """
        if request.first_token is None and request.tokens:
            request.first_token = self.clock()
        for i in range(request.handed, len(request.tokens)):
            step = request.step_at(i)
            self._drawn[request.number, i] = request, step
            if request.on_token is not None:
                request.untold[i] = step
            request.handed = i + 1
        for i in list(request.untold):
            # One statement, so that an interrupt never repeats a callback.
            request.on_token(request, request.untold.pop(i))

    def _finish(self, request: Request) -> None:
        if request.finished is None:
            request.finished = self.clock()
        self.scheduler.finish(request)

    def _stuck(self) -> CapacityError:
        request = self.scheduler.turns.first(self.scheduler.waiting)
        pool = self.pool
        return CapacityError(
            f"request {request.number} needs {request.pages_needed(pool.page_size):,} pages, but "
            f"{pool.available():,} of {len(pool.references):,} can be had "
            "and no request of the engine runs",
            "something else holds pages of its pool",
        )


def check_sizes(sizes: dict[str, int]) -> None:
    """GenerationError unless all are whole numbers of at least 1."""
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise GenerationError(f"{name} is {value!r}: it must be an integer ≥ 1")


def checked_index(name: str) -> str:
    """The name itself; GenerationError unless an index has it."""
    if name not in INDEXES:
        raise GenerationError(f"prefix is {name!r}: {' or '.join(INDEXES)} was expected")
    return name


def check_given(salt: object, client: object, on_token: object, constrain: object) -> None:
    """GenerationError unless these arguments of `submit` have their types."""
    check_salt(salt)
    check_client(client)
    check_callables(on_token, constrain)


def check_callables(on_token: object, constrain: object) -> None:
    """GenerationError unless each is None or a function."""
    for name, value, arguments in (
        ("on_token", on_token, "(request, step)"),
        ("constrain", constrain, "(logits, tokens)"),
    ):
        if value is not None and not callable(value):
            raise GenerationError(
                f"{name} is {value!r}: a function of {arguments}, or None, was expected"
            )


def check_client(client: object) -> None:
    """GenerationError unless `client` is text."""
    if not isinstance(client, str):
        raise GenerationError(
            f"client is {client!r}: a string was expected", 'client="" is for all without a name'
        )


def check_salt(salt: object) -> None:
    """GenerationError unless `salt` is text without lone surrogates."""
    if not isinstance(salt, str) or salt.encode("utf-8", "ignore").decode() != salt:
        raise GenerationError(
            f"salt is {salt!r}: a string was expected", 'salt="" shares with all that have none'
        )
