"""What notebook 15 gives to a learner: requests, pages and one forward. The rest of an engine, who computes what and
when, is what they write.

    engine = Engine(model, step, pages=32, budget=64)     step: theirs, called by engine.step()
    request = engine.submit(ids, most=20)

The requests are answered greedily. Nothing is shared between them but the pool; nanokv.Engine does that and more.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from nanokv.cache.paged import PagedCache
from nanokv.cache.paged_batch import PagedBatch
from nanokv.cache.pool import PagePool
from nanokv.engine.packed import prefill_packed
from nanokv.errors import CapacityError
from nanokv.inference import decode

MARKS = {"queued": ".", "prefill": "P", "decode": "d", "waits": "-", "no pages": "x"}


@dataclass(eq=False)
class Request:
    """One question. `number`: its place in the order of arrival. `most`: the longest answer, in tokens."""

    number: int
    prompt: list[int]
    most: int
    answer: list[int] = field(default_factory=list)
    cache: PagedCache | None = None  # of its own, as long as it runs
    done: bool = False

    @property
    def known(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt + self.answer

    @property
    def fed(self) -> int:
        """Known tokens that the cache holds, the first ones."""
        return self.cache.length if self.cache is not None else 0

    @property
    def pending(self) -> int:
        """Known tokens that the cache does not hold: 1 where only the newest token is to be fed."""
        return len(self.known) - self.fed


class Engine:
    """`waiting` and `running` are in order of arrival. At most `budget` tokens are fed per step, and at most `most`
    requests run at once, over `pages` pages of `size` tokens.
    """

    def __init__(
        self,
        model,
        step: Callable,
        pages: int = 32,
        size: int = 16,
        budget: int = 64,
        most: int = 8,
    ):
        self.model, self.size, self.budget, self.most = model, size, budget, most
        self.pool = PagePool(model.config, pages, size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.stop = tuple(model.generation_config.eos_token_ids)
        self.steps: list[dict[int, str]] = []  # per step {number of a request: what it did}
        self._step = step
        self._submitted = 0
        self._fed: Counter[int] = Counter()  # by request

    def submit(self, ids, most: int) -> Request:
        """One more that waits. CapacityError where the whole pool could not hold it."""
        pages = -(-(len(ids) + most - 1) // self.size)  # the last token is never fed
        if pages > len(self.pool.references):
            raise CapacityError(
                f"it needs {pages} pages, and the pool has {len(self.pool.references)}",
                "a shorter answer, or more pages",
            )
        request = Request(self._submitted, list(ids), most)
        self._submitted += 1
        self.waiting.append(request)
        return request

    def step(self):
        """The learner's step: [(request, token)] of all that got a token; of nobody where nothing is to do."""
        return self._step(self) if self.waiting or self.running else []

    def run(self) -> None:
        """Until every request is answered."""
        while self.waiting or self.running:
            self.step()

    # --- what a step is made of ---------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self.pool.free)

    @property
    def promised(self) -> int:
        """Pages that the running will still take: for all they know, and one ahead for each."""
        return sum(self.pages_of(len(r.known)) + 1 - len(r.cache.tables[0]) for r in self.running)

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self.size)

    def start(self) -> None:
        """The first that waits runs now, with an empty cache."""
        request = self.waiting.pop(0)
        request.cache = PagedCache(self.pool)
        self.running.append(request)

    def finish(self, request: Request) -> None:
        """It is answered: its pages are free again."""
        self.running.remove(request)
        request.cache.free()
        request.cache, request.done = None, True

    def feed(self, work: Iterable[tuple[Request, int]]) -> torch.Tensor:
        """(request, n): its next n pending tokens, of all requests in one forward → the logits that follow the last
        token of each, (requests,V).
        """
        work = list(work)  # it may be a generator, and is read several times
        self._note(work)
        parts = [request.known[request.fed : request.fed + n] for request, n in work]
        caches = [request.cache for request, _ in work]
        if all(
            n == 1 for _, n in work
        ):  # rows of one token each share their products and their attention
            batch = PagedBatch(caches, self.model.config)
            return decode(self.model, torch.tensor(parts), batch, batch.length)
        return prefill_packed(self.model, parts, caches, [request.fed for request, _ in work])

    def _note(self, work) -> None:
        """What this step does with each request, for a picture of it."""
        fed = {
            r.number: "decode" if r.pending == 1 and r.fed >= len(r.prompt) else "prefill"
            for r, _ in work
        }
        self._fed.update({request.number: n for request, n in work})
        rest = {request.number: "waits" for request in self.running}
        rest |= {r.number: "no pages" if self._fed[r.number] else "queued" for r in self.waiting}
        self.steps.append(rest | fed)

    @property
    def computed(self) -> int:
        """Tokens that were fed, those of preempted requests again."""
        return self._fed.total()

    def timeline(self) -> str:
        """A row per request, a column per step; MARKS has the letters."""
        columns = [
            [MARKS[step[n]] if n in step else " " for n in range(self._submitted)]
            for step in self.steps
        ]
        return "\n".join(
            f"{n:>3}  {''.join(row)}" for n, row in enumerate(zip(*columns, strict=True))
        )
