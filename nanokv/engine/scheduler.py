"""What to compute in the next step: admission, the token budget, and preemption when pages run out.

The requests of a client are admitted in order of arrival, and clients take turns (turns.py). Decodes
cost one token each and come first, prefill chunks share the rest of the step's tokens, or the
smaller `beside` (budget.py), so that no stream waits long for its next token. A request is
admitted when the pool has room for all its known tokens. When pages run out later, the youngest
running request is preempted, whoever its client is: it releases its pages, keeps its tokens and
waits. The oldest running request can therefore always advance, and it fits alone (checked at
submit), so the engine never stalls. A preempted request is recomputed, not swapped, as in vLLM's V1
engine.

A move from one list to the other has three parts: insert into the new list, change `state`, remove
from the old list. An interrupted move (Ctrl-C can come at any line) may leave the request in a list
that contradicts its state, but never in none. `mend` and `admit` remove such entries.
"""

from bisect import insort
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from nanokv.cache import make_cache
from nanokv.engine.request import FINISHED, RUNNING, WAITING, Request
from nanokv.engine.turns import Turns
from nanokv.errors import CapacityError

if TYPE_CHECKING:
    from nanokv.cache import PrefixPool
    from nanokv.config import Config
    from nanokv.engine.metrics import Metrics


class Scheduler:
    """`waiting` and `running` are in order of arrival; pages are reserved before the forwards."""

    def __init__(
        self,
        config: "Config",
        pool: "PrefixPool",
        step_tokens: int,
        max_running: int,
        metrics: "Metrics",
    ):
        self.config = config
        self.pool = pool
        self.step_tokens = step_tokens
        self.beside: int | None = None  # most prompt tokens beside decodes; None: all that fit
        self.max_running = min(max_running, step_tokens)  # so that all decodes fit into a step
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.turns = Turns()
        self.metrics = metrics

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.turns.arrive(request, self.waiting)
        self.waiting.append(request)

    def plan(self) -> list[tuple[Request, int]]:
        """(request, how many of its pending tokens to feed), with pages reserved; oldest first."""
        for request in self.running:
            self.turns.charge(request)
        self.admit()
        pending = [(request, request.pending) for request in self.running]
        work = self.plan_decodes([request for request, n in pending if n == 1])
        budget = self.step_tokens - len(work)
        if work and self.beside is not None:
            budget = min(budget, self.beside)
        for request, n in pending:
            tokens = min(budget, n)
            chunk = n > 1 and tokens and request.state == RUNNING
            if chunk and self.reserve(request, tokens):
                work.append((request, tokens))
                budget -= tokens
        # `reserve` may have preempted a request that was in `work` already.
        return [(request, tokens) for request, tokens in work if request.state == RUNNING]

    def plan_decodes(self, requests: list[Request]) -> list[tuple[Request, int]]:
        """One token of each request that gets a page for it."""
        lacking = set(self.lacking(requests))
        work = []
        for i, request in enumerate(requests):
            held = request.state == RUNNING and i not in lacking
            if held or self.reserve(request, 1):
                work.append((request, 1))
        return [(request, 1) for request, _ in work if request.state == RUNNING]

    def lacking(self, decodes: list[Request]) -> list[int]:
        """Indices of the requests without a slot for the next token; found in one pass over all."""
        tables = [request.cache.tables[0] for request in decodes]
        starts = [request.fed for request in decodes]
        return self.pool.lacking(tables, starts, [1] * len(decodes))

    def mend(self) -> None:
        """Complete interrupted moves out of `running`, and undo interrupted forwards."""
        for request in list(self.running):
            if request.state == RUNNING:
                request.settle()
            else:
                self.leave(request)

    def admit(self) -> None:
        """Admit waiting requests while the pool has room for their known tokens.

        The pages that running requests still need are set aside first.
        """
        size = self.pool.page_size
        while self.waiting and len(self.running) < self.max_running:
            request = self.turns.first(self.waiting)
            if request.state != WAITING:  # an interrupted move has left it here
                self.waiting.remove(request)
                continue
            cache: Any = make_cache("prefix", self.config, pool=self.pool, salt=request.salt)
            # Reuse first: reused pages cannot be evicted and are no longer available.
            cache.reuse(request.known)
            # The known tokens of running requests, and one page ahead for each.
            promised = sum(other.pages_needed(size) for other in self.running) + len(self.running)
            if request.pages_needed(size) - len(cache.tables[0]) + promised > self.pool.available():
                cache.free()
                return
            reused = cache.hits
            if request.prefilled is not None:
                reused = max(reused, request.prefilled.reused)
            request.take(cache)
            insort(self.running, request, key=lambda other: other.number)
            request.state = RUNNING  # commit
            self.waiting.remove(request)
            self.turns.charge(request)
            self.turns.last = request.client
            self.count_reused(request, reused)

    def reuse(self, request: Request) -> None:
        """Look for known pages again, while the request holds only pages from the index."""
        cache = request.cache
        before = cache.hits
        if request.fed <= before:
            cache.truncate(0)
            cache.reuse(request.known)
            request.fed = cache.length
            self.count_reused(request, cache.hits - before)

    def shares(self, request: Request, other: Request, tokens: int) -> bool:
        """True if feeding `tokens` to `other` completes a page that `request` could reuse."""
        held = request.fed
        size = self.pool.page_size
        if request.salt != other.salt or held > request.cache.hits:
            return False
        mine = request.known[:-1]  # the last token is always computed
        theirs = other.known[: other.fed + tokens]
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False))
        pages = sum(1 for _ in alike) // size * size
        return self.pool.snapshots.reach(pages, other.fed + tokens, other.cache.stops) > held

    def first_part(self, request: Request, tokens: int) -> int:
        """How many of the next tokens to feed at once, so that a snapshot can be taken after it."""
        start = request.fed
        end = self.pool.snapshots.chunk(start, start + tokens, request.cache.stops)
        return end - start

    def count_reused(self, request: Request, tokens: int) -> None:
        """Count tokens found in the index; a preempted request counts only in the engine's sum."""
        self.metrics.reused_tokens += tokens
        # A request may look several times before it is fed: only a find that is new counts.
        self.pool.snapshots.hits += bool(tokens and self.pool.snapshots.most)
        if request.preemptions == 0:
            request.reused_tokens += tokens

    def reserve(self, request: Request, tokens: int) -> bool:
        """Reserve pages for the next tokens, preempting the youngest requests if necessary.

        Returns False if `request` itself was preempted.
        """
        start = request.fed
        while request.state == RUNNING:
            try:
                request.cache.reserve(start, start + tokens)
                return True
            except CapacityError:
                self.preempt(self.running[-1])
        return False

    def preempt(self, request: Request) -> None:
        """Move back to the queue, in order of arrival; full pages stay in the index."""
        insort(self.waiting, request, key=lambda other: other.number)
        request.state, request.preemptions = WAITING, request.preemptions + 1  # commit
        self.metrics.preemptions += 1
        self.leave(request)

    def finish(self, request: Request) -> None:
        """Remove from both lists."""
        if request.state != FINISHED:
            request.state, self.metrics.finished = FINISHED, self.metrics.finished + 1  # commit
        if request in self.running:
            self.leave(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def leave(self, request: Request) -> None:
        """Remove from `running` and release the pages; full pages stay in the index."""
        self.turns.charge(request)
        if request.cache is not None:
            request.settle()
            request.cache.remember(request.known)
            request.cache.free()
        # One statement, so that an interrupt never leaves `fed` without a cache.
        request.cache, request.after, request.fed = None, None, 0
        self.running.remove(request)
