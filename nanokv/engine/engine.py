"""The engine: feeds what the scheduler planned, draws a token for every request that has none pending, and reports.

A step runs one packed forward for all prefill chunks and one ragged forward for all decodes. Which requests share a
step changes nothing but the rounding of sums: greedy answers are those of nanokv.generate, sampled ones too, because
every request has a generator of its own. Single-threaded: callbacks run between two forwards and may submit and cancel.
"""

from time import perf_counter

import torch

from nanokv.cache import PrefixPool
from nanokv.cache.paged_batch import PagedBatch
from nanokv.engine.metrics import Metrics
from nanokv.engine.packed import prefill_packed
from nanokv.engine.request import FINISHED, Request
from nanokv.engine.scheduler import Scheduler
from nanokv.errors import CapacityError, ContextError, GenerationError
from nanokv.generation import SamplingParams, eos_ids, prompt_ids
from nanokv.inference import decode
from nanokv.sample import check_sampling


class Engine:
    """Requests over `pages` pages of `page_size` tokens; at most `step_tokens` tokens are fed in one step.

    Iterating yields (request, Step) as tokens are drawn, until nothing is left to do. `clock` is for tests.
    """

    def __init__(self, model, pages=256, page_size=16, step_tokens=256, max_running=32, clock=perf_counter):
        sizes = {"pages": pages, "page_size": page_size, "step_tokens": step_tokens, "max_running": max_running}
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise GenerationError(f"{name} is {value!r}: it must be an integer ≥ 1")
        self.model, self.config, self.clock = model, model.config, clock
        self.device = model.embed_tokens.weight.device
        self.pool = PrefixPool(model.config, pages, page_size)
        self.scheduler = Scheduler(model.config, self.pool, step_tokens, max_running)
        self.metrics = Metrics()
        self._submitted, self._drawn = 0, []  # (request, Step) that no step has handed out yet

    # --- in and out -----------------------------------------------------------------------------------------------

    def submit(self, ids, max_new_tokens=64, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
               seed=None, eos_token_ids=None, salt="", on_token=None) -> Request:  # fmt: skip
        """Queue a request; the arguments mean what they mean in nanokv.generate.

        Refused at once: ContextError if the prompt is longer than the context, CapacityError if prompt and answer
        could not be held even by the whole pool, GenerationError for any other bad value. Requests share the pages of
        equal beginnings only under the same `salt`.
        """
        check_sampling(max_new_tokens=max_new_tokens)
        if not isinstance(salt, str) or salt.encode("utf-8", "ignore").decode() != salt:  # half a character
            raise GenerationError(f"salt is {salt!r}: a string was expected", 'salt="" shares with all that have none')
        if on_token is not None and not callable(on_token):
            raise GenerationError(f"on_token is {on_token!r}: a function of (request, step), or None, was expected")
        params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        prompt = prompt_ids(ids, self.config.vocab_size)
        eos = eos_ids(self.model.generation_config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        room = self._room(len(prompt), max_new_tokens)
        request = Request(
            self._submitted, prompt, params, max_new_tokens, room, eos, salt, on_token, self.device, self.clock()
        )
        self._submitted += 1
        self.scheduler.waiting.append(request)
        return request

    def _room(self, prompt: int, new: int) -> int:
        """Tokens that the context leaves for the answer (the last one is never fed); refuses what can never fit."""
        context = self.config.max_position_embeddings
        if prompt > context:
            raise ContextError(f"needs {prompt:,} of {context:,} tokens", "shorten the prompt")
        room = context - prompt + 1
        new = min(new, room)
        pages, size = len(self.pool.references), self.pool.page_size
        needed = -(-(prompt + new - 1) // size)
        if needed > pages:
            fits = pages * size - prompt + 1
            raise CapacityError(
                f"the request needs {needed:,} pages ({prompt:,} tokens + {new:,} new, {size} a page), "
                f"the pool has {pages:,}",
                f"max_new_tokens={fits} fits" if fits >= 1 else "a shorter prompt, or a larger pool",
            )
        return room

    def cancel(self, request: Request, reason: str = "cancelled"):
        """End a request now, whatever it is doing; its tokens stay, its pages are free. Nothing if it is finished."""
        if request.state == FINISHED:
            return
        request.finish_reason = reason
        self._finish(request)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not (self.scheduler.waiting or self.scheduler.running)

    def __iter__(self):
        while self._drawn or not self.idle:
            yield from self.step()

    def run(self):
        """Until all requests are finished; for those who use callbacks or look at the requests afterwards."""
        while not self.idle:
            self.step()

    def stream(self, request: Request):
        """The Steps of one request, while all others go on as well."""
        sent = 0
        while True:
            while sent < len(request.tokens):
                sent += 1
                yield request.step_at(sent - 1)
            if request.state == FINISHED:
                return
            self.step()

    # --- one step -------------------------------------------------------------------------------------------------

    def step(self) -> list:
        """Plan, run the forwards, draw the tokens: [(request, Step)]. After an exception it can simply be called again:
        every cache is as it was before the forward that failed, logits that were computed are not lost, and tokens
        that were drawn are handed out then."""
        self._draw()  # of a step that was interrupted
        work = self.scheduler.plan()
        if not work and self.scheduler.waiting:
            raise self._stuck()
        now = self.clock()
        for request, _ in work:
            request.admitted = now if request.admitted is None else request.admitted
        decodes = [request for request, _ in work if request.pending == 1]
        chunks = [(request, tokens) for request, tokens in work if request.pending > 1]
        while chunks:
            chunks = self._prefill(chunks)
        self._decode(decodes)
        self.metrics.note_step(self.pool, self.scheduler)
        self._draw()
        drawn, self._drawn = self._drawn, []
        return drawn

    def _prefill(self, chunks) -> list:
        """The next chunk of each request in one forward; the last chunk gives the logits. Returns the chunks that have
        to wait, because their beginning is computed here, for another request, and can be reused then."""
        now, later = [], []
        for request, tokens in chunks:
            self.scheduler.reuse(request)  # who came with it may have computed its beginning since it was admitted
            tokens = min(tokens, request.pending)
            waits = any(self.scheduler.shares(request, other, more) for other, more in now)
            (later if waits else now).append((request, tokens))
        requests = [request for request, _ in now]
        starts = [request.cache.length for request in requests]
        parts = [request.known[start : start + n] for (request, n), start in zip(now, starts, strict=True)]
        caches = [request.cache for request in requests]
        logits = self._forward(requests, prefill_packed, parts, caches, starts)  # (B,V)
        for row, (request, tokens) in enumerate(now):
            self.metrics.prefill_tokens += tokens
            request.cache.remember(request.known)
            if request.pending == 0:
                request.logits = logits[row : row + 1]
        return later

    def _decode(self, requests):
        """One token of each, rows of any length."""
        if not requests:
            return
        cache = PagedBatch([request.cache for request in requests], self.config)
        newest = torch.tensor([request.known[-1:] for request in requests], device=self.device)  # (B,1)
        logits = self._forward(requests, decode, newest, cache, cache.length)  # (B,V)
        self.metrics.decode_tokens += len(requests)
        for row, request in enumerate(requests):
            request.logits = logits[row : row + 1]

    def _forward(self, requests, path, *arguments):
        before = [request.cache.length for request in requests]
        try:
            self.metrics.forwards += 1
            return path(self.model, *arguments)
        except BaseException:  # KeyboardInterrupt too: some layers have the new tokens, others do not
            for request, length in zip(requests, before, strict=True):
                request.cache.truncate(length)
            raise

    def _draw(self):
        """A token for every request whose logits are there. One that cannot go on ends alone, the others go on."""
        for request in list(self.scheduler.running):
            try:
                if request.logits is not None:
                    self._draw_one(request)
            except Exception as error:  # NaN logits, or a callback that failed
                request.finish_reason, request.error = "error", error
            finally:  # also when Ctrl-C leaves through the callback of the last token: no other may follow it
                if request.finish_reason is not None and request.state != FINISHED:
                    self._finish(request)

    def _draw_one(self, request: Request):
        step = request.draw()
        request.first_token = self.clock() if request.first_token is None else request.first_token
        self._drawn.append((request, step))
        if request.on_token is not None:
            request.on_token(request, step)

    def _finish(self, request: Request):
        self.scheduler.finish(request)
        request.finished = self.clock()
        self.metrics.finished += 1

    def _stuck(self) -> CapacityError:
        request, pool = self.scheduler.waiting[0], self.pool
        return CapacityError(
            f"request {request.number} needs {request.pages_needed(pool.page_size):,} pages, but "
            f"{self.scheduler.available():,} of {len(pool.references):,} can be had and no request of the engine runs",
            "something else holds pages of its pool",
        )
