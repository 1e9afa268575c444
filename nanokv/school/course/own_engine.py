"""The engine of notebook 15: requests, pages and one forward. Learners write the scheduling.

    engine = Engine(model, step, pages=32, budget=64)     # step: the learner's function
    request = engine.submit(ids, most=20)

Decoding is greedy. Requests share the pool, but no pages; nanokv.Engine also shares prefixes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nanokv.cache.paged import PagedCache
from nanokv.cache.paged_batch import PagedBatch
from nanokv.cache.pool import PagePool
from nanokv.engine.packed import prefill_packed
from nanokv.errors import CapacityError
from nanokv.inference import decode

if TYPE_CHECKING:
    from nanokv.model import Transformer

MARKS = {"queued": ".", "prefill": "P", "decode": "d", "waits": "-", "no pages": "x"}


@dataclass(eq=False)
class Request:
    """One request. `number`: its place in the order of arrival. `most`: the most answer tokens."""

    number: int
    prompt: list[int]
    most: int
    answer: list[int] = field(default_factory=list)
    cache: PagedCache | None = None  # only while the request runs
    done: bool = False

    @property
    def known(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt + self.answer

    @property
    def fed(self) -> int:
        """How many of the known tokens are in the cache; they are the first ones."""
        if self.cache is None:
            return 0
        return self.cache.length

    @property
    def pending(self) -> int:
        """How many known tokens are not in the cache yet; 1 while the request decodes."""
        return len(self.known) - self.fed


class Engine:
    """A batch of running requests and a queue, `running` and `waiting`, in order of arrival.

    At most `budget` tokens are fed per step, and at most `most` requests run at once, over a pool
    of `pages` pages of `size` tokens each.
    """

    def __init__(
        self,
        model: "Transformer",
        step: Callable,
        pages: int = 32,
        size: int = 16,
        budget: int = 64,
        most: int = 8,
    ):
        self.model = model
        self.size = size
        self.budget = budget
        self.most = most
        self.pool = PagePool(model.config, pages, size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.stop = tuple(model.generation_config.eos_token_ids)
        self.steps: list[dict[int, str]] = []  # per step {number of a request: key of MARKS}
        self._step = step
        self._submitted = 0
        self._fed: Counter[int] = Counter()  # tokens fed, by number of the request

    def submit(self, ids: Sequence[int], most: int) -> Request:
        """Add a request to the queue. CapacityError if it needs more pages than the pool has."""
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

    def step(self) -> list[tuple[Request, int]]:
        """Run the learner's step → [(request, token)] of all requests that got a token."""
        if not self.waiting and not self.running:
            return []
        return self._step(self)

    def run(self) -> None:
        """Step until every request is answered."""
        while self.waiting or self.running:
            self.step()

    # --- the building blocks of a step ------------------------------------------------------------

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self.pool.free)

    @property
    def promised(self) -> int:
        """Pages that running requests will still take: for all known tokens, and one more each."""
        missing = 0
        for request in self.running:
            taken = len(request.cache.tables[0])  # type: ignore[union-attr]  # it has a cache
            missing += self.pages_of(len(request.known)) + 1 - taken
        return missing

    def pages_of(self, tokens: int) -> int:
        """The number of pages that hold `tokens` tokens."""
        return -(-tokens // self.size)

    def start(self) -> None:
        """Move the first waiting request to `running`, with an empty cache."""
        request = self.waiting.pop(0)
        request.cache = PagedCache(self.pool)
        self.running.append(request)

    def finish(self, request: Request) -> None:
        """End an answered request and free its pages."""
        self.running.remove(request)
        request.cache.free()  # type: ignore[union-attr]  # a running request has a cache
        request.cache = None
        request.done = True

    def feed(self, work: Iterable[tuple[Request, int]]) -> torch.Tensor:
        """Feed the next n pending tokens of each (request, n), all in one forward.

        Returns the logits after the last token fed of each request, (requests,V).
        """
        work = list(work)  # may be a generator, and is read several times
        self._note(work)
        parts = [request.known[request.fed : request.fed + n] for request, n in work]
        # A request gets its cache when it is admitted, before it is fed.
        caches: list[Any] = [request.cache for request, _ in work]
        if all(n == 1 for _, n in work):  # single tokens share one matrix product and one attention
            batch = PagedBatch(caches, self.model.config)
            return decode(self.model, torch.tensor(parts), batch, batch.length)
        starts = [request.fed for request, _ in work]
        return prefill_packed(self.model, parts, caches, starts)

    def _note(self, work) -> None:
        """Record what this step does with each request, for the timeline."""
        self._fed.update({request.number: n for request, n in work})
        doing = {request.number: "waits" for request in self.running}
        for request in self.waiting:
            preempted = self._fed[request.number] > 0
            doing[request.number] = "no pages" if preempted else "queued"
        for request, _ in work:
            decodes = request.pending == 1 and request.fed >= len(request.prompt)
            doing[request.number] = "decode" if decodes else "prefill"
        self.steps.append(doing)

    @property
    def computed(self) -> int:
        """Tokens fed so far; the tokens of a preempted request count each time they are fed."""
        return self._fed.total()

    def timeline(self) -> str:
        """The steps as text: a row per request, a column per step, with the letters of MARKS."""
        marks = MARKS | {"": " "}
        columns = [
            [marks[step.get(number, "")] for number in range(self._submitted)]
            for step in self.steps
        ]
        rows = zip(*columns, strict=True)
        return "\n".join(f"{number:>3}  {''.join(row)}" for number, row in enumerate(rows))
