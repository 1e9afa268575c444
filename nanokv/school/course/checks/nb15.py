"""Notebook 15, the learner's engine: admission, budget, preemption, a step, a stream, a sum."""

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from nanokv.errors import CapacityError
from nanokv.school.course.answers import plain
from nanokv.school.course.checking import (
    RIGHT,
    Mistake,
    Outcome,
    Told,
    function,
    judged,
    questions,
    result_of,
    wrong,
)
from nanokv.school.course.forms import COUNTS, TIMES
from nanokv.school.course.own_engine import Engine, Request

if TYPE_CHECKING:
    import torch

    from nanokv.model import Transformer

# --- 15.1: admission ------------------------------------------------------------------------------


def admit(known: list[int], promised: int, free: int, size: int, room: int) -> int:
    """nanokv's answer: how many waiting requests are admitted."""
    return _admitted(known, promised, free, size, room)


def _admitted(
    known, promised, free, size, room, ahead=1, counted=True, overtake=False, spare=0, unit="page",
    limit=True, others=True,
):  # fmt: skip
    """`admit`, with arguments that introduce mistakes."""
    pages_of = {
        "page": lambda n: -(-n // size),
        "begun": lambda n: n // size,
        "over": lambda n: n // size + 1,
        "token": lambda n: n,
    }
    moved = 0
    promised *= others
    if limit:
        known = known[:room]
    for tokens in known:
        pages = pages_of[unit](tokens)
        if promised + pages + spare > free:
            if overtake:
                continue
            break
        if ahead == "token":
            grown = -(-(tokens + 1) // size)
        else:
            grown = pages + ahead
        promised += grown * counted
        moved += 1
    return moved


def _admit_with(**slip):
    return partial(_admitted, **slip)


def _admission(name, message, **slip):
    return Mistake(name, _admit_with(**slip), message, slip)


def _pool(rng):
    """(known, promised, free, size, room)"""
    size = rng.choice((4, 8, 16))
    known = [rng.randint(1, 6 * size) for _ in range(rng.randint(1, 5))]
    return known, rng.randint(0, 9), rng.randint(0, 24), size, rng.randint(0, 6)


# --- 15.2: the budget of a step -------------------------------------------------------------------


def share(pending: list[int], budget: int) -> list[int]:
    """nanokv's answer: how many pending tokens of each request are fed, decodes first."""
    return _shared(pending, budget, lambda i: pending[i] > 1)


def _shared(pending, budget, rank, whole=False):
    given = [0] * len(pending)
    for i in sorted(range(len(pending)), key=rank):  # a stable sort: the older request first
        tokens = min(pending[i], budget)
        if whole and tokens < pending[i]:
            continue
        given[i] = tokens
        budget -= tokens
    return given


def _overdrawn(pending, budget):
    """Every decode gets a token, even beyond the budget."""
    given = [int(tokens == 1) for tokens in pending]
    budget -= sum(given)
    for i, tokens in enumerate(pending):
        if tokens > 1:
            given[i] = min(tokens, budget)
            budget -= given[i]
    return given


def _first_prompt(pending, budget):
    """Tokens for the decodes and for one prompt only."""
    first = next((i for i, tokens in enumerate(pending) if tokens > 1), None)
    return [n * (pending[i] == 1 or i == first) for i, n in enumerate(share(pending, budget))]


def _equally(pending, budget):
    return [min(tokens, budget // len(pending)) for tokens in pending]


def _sorted(pending, budget):
    return sorted(share(pending, budget))


def _pending(rng):
    """(pending, budget): decodes and prompts in any order, budget ≥ 1."""
    pending = [rng.choice((1, 1, rng.randint(2, 40))) for _ in range(rng.randint(1, 6))]
    return pending, rng.randint(1, 48)


# --- 15.3 and 15.4: preemption --------------------------------------------------------------------


def preempt(engine: Engine, request: Request) -> None:
    """nanokv's answer: free the pages, and let the request wait first in line, with its answer."""
    request.cache.free()  # type: ignore[union-attr]  # a running request has a cache
    request.cache = None
    engine.running.remove(request)
    engine.waiting.insert(0, request)


def reserve(engine: Engine, request: Request, tokens: int) -> bool:
    """nanokv's answer: reserve pages for the next tokens; preempt the youngest until they fit."""
    while request in engine.running:
        try:
            end = request.fed + tokens
            request.cache.reserve(request.fed, end)  # type: ignore[union-attr]  # it runs
            return True
        except CapacityError:
            preempt(engine, engine.running[-1])
    return False


SIZE = 4
WAITING = 2
PATIENCE = 50  # refusals of the pool; a loop that ends gets fewer


class Desk(Engine):
    """An engine with running and waiting requests. Caches hold zeros: only pages matter."""

    def __init__(self, model: "Transformer", fed: Sequence[int], pages: int):
        # A desk never steps.
        super().__init__(model, None, pages=pages, size=SIZE)  # type: ignore[arg-type]
        for number, tokens in enumerate([*fed, *[6] * WAITING]):
            self.submit([number + 1] * (tokens + 3), 4)
        for tokens in fed:
            self.start()
            self._fill(self.running[-1], tokens)
        self.everybody = [*self.running, *self.waiting]
        self.refusals = 0
        self.pool.exhausted = self._refused  # type: ignore[method-assign]  # counts refusals

    def _fill(self, request, tokens):
        import torch

        request.answer = [7, 8]
        c = self.model.config
        k = torch.zeros(1, c.num_key_value_heads, tokens, c.head_dim)
        for layer in request.cache:
            layer.append(k, k)

    def _refused(self, count):
        self.refusals += 1
        if self.refusals > PATIENCE:
            raise Told(
                wrong(
                    "Pages were refused again and again, and your loop does not end: each time a "
                    "request has to be preempted",
                    "endless",
                )
            )
        raise CapacityError(f"{count} pages wanted, {len(self.pool.free)} free")

    def names(self, requests: Iterable[Request]) -> str:
        return ", ".join(str(request.number) for request in requests) or "none"


def _model():
    from nanokv.lab.study.equality import small_model

    return small_model()


def _judge_preempt(answer, case):
    model = _model()
    for fed, who in (((5, 9, 6), 2), ((4, 1), 1), ((12,), 0), ((5, 9, 6), 1)):
        desk = Desk(model, fed, pages=12)
        request = desk.running[who]
        held = len(request.cache.tables[0])  # type: ignore[union-attr]  # it runs: it has a cache
        before = desk.free
        others = [one for one in desk.running if one is not request]
        kept = list(request.prompt), list(request.answer)
        if answer(desk, request) is ...:
            raise NotImplementedError
        outcome = (
            _preempted(desk, request, others, before + held)
            or _waits(desk, request)
            or _freed(desk, request, before + held)
            or _kept(request, *kept)
        )
        if outcome is not None:
            return outcome
    return RIGHT


def _preempted(desk, request, others, free):
    """An Outcome where the running requests are not as they should be after a preemption."""
    for name in ("running", "waiting"):
        queue = getattr(desk, name)
        if not isinstance(queue, list):
            return wrong(
                f"engine.{name} is a {type(queue).__name__} now, and the engine needs a list",
                "lists",
            )
    runs = request in desk.running
    if runs and request not in desk.waiting and desk.free < free:
        return wrong("The request runs on with all its pages", "nothing done")
    if runs:
        return wrong("It is in engine.running still: take it out", "still runs")
    if desk.running != others:
        return wrong(
            f"Running now: {desk.names(desk.running)}; it should be {desk.names(others)}", "running"
        )
    return None


def _waits(desk, request):
    """An Outcome where the preempted request does not wait, or at the wrong place."""
    waits = request in desk.waiting
    if not waits and any(one not in desk.everybody for one in desk.waiting):
        return wrong(
            "Another request waits in its place. The reader of this one would wait forever: let "
            "`request` itself wait",
            "another request",
        )
    if not waits:
        return wrong("It neither runs nor waits, so it will never be answered", "lost")
    order = [one.number for one in desk.waiting]
    if order != sorted(order):
        return wrong(
            f"Waiting now: {desk.names(desk.waiting)}. It came before those, so it waits in front "
            "of them again",
            "end of the queue",
        )
    return None


def _freed(desk, request, free):
    """An Outcome where the pages of the preempted request are not free, or are free twice."""
    if desk.free < free:
        return wrong(
            f"{desk.free} pages are free, and {free} should be: give them back with "
            "request.cache.free()",
            "pages kept",
        )
    if desk.free > free:
        return wrong(
            f"{desk.free} pages are free, and {free} should be: some are free twice. "
            "request.cache.free() does all of it",
            "free twice",
        )
    if request.cache is not None:
        return wrong("Its pages are free, but request.cache is not None", "cache stays")
    return None


def _kept(request, prompt, answered):
    """An Outcome where the preempted request itself was changed."""
    if request.done:
        return wrong("It is `done` now, and its answer is not complete: it only waits", "done")
    if request.answer != answered:
        return wrong(
            "Its answer is gone. The tokens were streamed already, and would be streamed twice",
            "answer",
        )
    if request.prompt != prompt:
        return wrong(
            "Its prompt has changed. `request.known` is prompt and answer, so the answer "
            "would be fed twice",
            "prompt",
        )
    return None


# (tokens fed of each request, pages of the pool, index of the request, tokens to reserve)
RESERVATIONS = (
    ((5, 6), 8, 0, 3),  # its last page has room
    ((5, 6), 8, 0, 8),  # pages are free
    ((9, 8, 5), 7, 1, 1),  # the youngest is preempted
    ((8, 9, 5), 7, 0, 1),
    ((8, 9, 5), 7, 0, 17),  # two are preempted
    ((4, 8, 8), 5, 2, 1),  # the request is the youngest: it is preempted itself
    ((8, 8, 4, 4), 6, 1, 9),  # the younger ones are preempted, then the request itself
)


def _judge_reserve(answer, case):
    model = _model()
    for fed, pages, who, tokens in RESERVATIONS:
        desk = Desk(model, fed, pages)
        request = desk.running[who]
        right = Desk(model, fed, pages)  # the same for nanokv's reserve
        twin = right.running[who]
        given = result_of(answer, desk, request, tokens)
        reserve(right, twin, tokens)
        outcome = _wrong_ones(desk, right, request, tokens)
        outcome = outcome or _reserved(request, twin, given, tokens)
        if outcome is not None:
            return outcome
    return RIGHT


def _wrong_ones(desk, right, request, tokens):
    """An Outcome where other requests were preempted than by nanokv's `reserve`."""
    for one in desk.everybody:
        if one not in desk.running and one not in desk.waiting:
            return wrong(
                f"Request {one.number} neither runs nor waits: `preempt` does all that giving way "
                "takes",
                "lost",
            )
        if one in desk.running and one is not request and not one.cache.tables[0]:
            return wrong(
                f"Request {one.number} has lost its pages, and still runs: `preempt` does all that "
                "giving way takes",
                "pages only",
            )
    running = desk.names(desk.running)
    wanted = desk.names(right.running)
    if running == wanted:
        return None
    case = (
        f"Request {request.number} needs pages for {tokens} more tokens. Running now: {running}. "
    )
    case += f"It should be: {wanted}"
    if len(desk.running) == len(right.everybody) - WAITING:
        return wrong(
            f"{case}. No request was preempted, so the next step cannot get further than this one",
            "waits",
        )
    if len(desk.running) > len(right.running):
        return wrong(f"{case}. One was not enough: go on until there are pages", "only one")
    if request not in desk.running:
        return wrong(f"{case}. Later requests are preempted first", "itself first")
    if len(desk.running) < len(right.running):
        return wrong(f"{case}. No request may be preempted while there are free pages", "too early")
    if right.running[-1:] != [] and right.everybody[request.number] in right.running:
        return wrong(f"{case}. The youngest request is preempted", "oldest")
    return wrong(f"{case}. It is the youngest one left, so it is preempted itself", "others only")


def _reserved(request, twin, given, tokens):
    """An Outcome for a wrong result, or wrong pages of the request."""
    expected = twin.cache is not None
    pages = len(request.cache.tables[0]) if expected else 0
    taken = expected and pages == len(twin.cache.tables[0])
    if expected and given is False and not taken:
        return wrong(
            f"Another request was preempted for request {request.number}, but you did not try again",
            "no second try",
        )
    if given is not expected:
        state = "has its pages" if expected else "was preempted itself"
        said = f"Request {request.number} {state}, and you return {given!r:.40}: return {expected}"
        return wrong(said, "returned")
    if expected and not taken:
        return wrong(
            f"The next {tokens} tokens of request {request.number} have the positions "
            f"{request.fed} to {request.fed + tokens - 1}: in pages of {SIZE} these are "
            f"{len(twin.cache.tables[0])} pages from its first token on. It has {pages}",
            "not taken",
        )
    return None


# --- 15.5: a step ---------------------------------------------------------------------------------


def step(engine: Engine) -> list[tuple[Request, int]]:
    """nanokv's answer: one forward for all requests with pages → [(request, token)]."""
    known = [len(request.known) for request in engine.waiting]
    room = engine.most - len(engine.running)
    for _ in range(admit(known, engine.promised, engine.free, engine.size, room)):
        engine.start()
    sizes = share([request.pending for request in engine.running], engine.budget)
    pairs = list(zip(engine.running, sizes, strict=True))
    work = [(request, n) for request, n in pairs if n and reserve(engine, request, n)]
    drawn = []
    for (request, _), row in zip(work, engine.feed(work), strict=True):
        if request.pending == 0:
            token = int(row.argmax())
            request.answer.append(token)
            drawn.append((request, token))
            if token in engine.stop or len(request.answer) == request.most:
                engine.finish(request)
    return drawn


def _pair(item):
    if isinstance(item, list):
        return tuple(item)
    return item


class Watched(Engine):
    """An engine that raises Told at the first mistake of a step."""

    def begin(self) -> None:
        """Before a step: note which requests it should admit."""
        known = [len(request.known) for request in self.waiting]
        room = self.most - len(self.running)
        self.entering = self.waiting[: admit(known, self.promised, self.free, self.size, room)]
        self.forwards = 0
        self.rows: dict[Request, int] = {}  # the likeliest next token of each row
        self.lengths: dict[Request, int] = {}  # of the answers, before the step draws
        self.begun: list[Request] = []
        self.ended: list[Request] = []

    def feed(self, work: Iterable[tuple[Request, int]]) -> "torch.Tensor":
        work = list(work)
        slip = self._order_slip(work) or self._work_slip(work) or self._pages_slip(work)
        if slip:
            raise Told(slip)
        self.forwards += 1
        logits = super().feed(work)
        self.rows = {
            request: int(row.argmax())
            for (request, _), row in zip(work, logits, strict=True)
            if request.pending == 0
        }
        self.lengths = {request: len(request.answer) for request, _ in work}
        return logits

    def start(self) -> None:
        super().start()
        self.begun.append(self.running[-1])
        if self.running[-1] not in self.entering:
            number = self.running[-1].number
            raise Told(
                wrong(
                    f"Request {number} was started, but there is no room for it",
                    "too many admitted",
                )
            )

    def finish(self, request: Request) -> None:
        if request not in self.running:
            raise Told(
                wrong(f"Request {request.number} was finished and does not run", "finished twice")
            )
        self.ended.append(request)
        super().finish(request)

    def _order_slip(self, work):
        if self.forwards:
            return wrong(
                "Two forwards in one step: all weights are read twice. Chunks and decodes go into "
                "one",
                "two forwards",
            )
        missed = [request for request in self.entering if request not in self.begun]
        if missed:
            return wrong(
                f"Request {missed[0].number} could start, but still waits: call engine.start() "
                "as often as admit says",
                "not admitted",
            )
        return None

    def _work_slip(self, work):
        gone = [request.number for request, _ in work if request.cache is None]
        if gone:
            return wrong(
                f"Request {gone[0]} is in the work, and has lost its pages in this very step: "
                "leave it out",
                "preempted",
            )
        for request, n in work:
            if not 1 <= n <= request.pending:
                return wrong(
                    f"{n} tokens of request {request.number} are fed, and it has {request.pending} "
                    "pending",
                    "pending",
                )
        total = sum(n for _, n in work)
        if total > self.budget:
            return wrong(f"{total} tokens are fed, and the budget is {self.budget}", "budget")
        return None

    def _pages_slip(self, work):
        for request, n in work:
            if len(request.cache.tables[0]) < self.pages_of(request.fed + n):
                return wrong(
                    f"Request {request.number} has no pages for its next {n} tokens: reserve them "
                    "first",
                    "not reserved",
                )
            if len(request.cache.tables[0]) > self.pages_of(request.fed + n):
                return wrong(
                    f"Request {request.number} has pages for more than its next {n} tokens, which "
                    "others may need: reserve for those that this step feeds",
                    "reserved too much",
                )
        shares = share([request.pending for request in self.running], self.budget)
        for request, n in zip(self.running, shares, strict=True):
            if n and request.pending == 1 and request not in dict(work):
                return wrong(
                    f"Request {request.number} has its pages and waits for one token, and is left "
                    "out",
                    "decode left out",
                )
        if not work:
            return wrong("Nothing was fed: the work is empty", "nothing fed")
        return None

    def end(self, given: object) -> Outcome | None:
        """After a step: an Outcome for the state that it left; None if that is right."""
        if isinstance(given, Iterator):
            return wrong(
                "With `yield` the code runs only when the result is iterated, which does not "
                "happen: return a list",
                "generator",
            )
        if not self.forwards:
            return wrong("No forward: engine.feed was not called", "no forward")
        for request, before in self.lengths.items():
            outcome = self._drawn_slip(request, request.answer[before:])
            if outcome is not None:
                return outcome
        pairs = given
        if isinstance(given, list | tuple):
            pairs = list(map(_pair, given))
        expected = [(request, request.answer[-1]) for request in self.rows]
        if pairs != expected:
            return wrong(
                "Return [(request, token)] of the requests that got a token, in the order of the "
                "work",
                "returned",
            )
        return None

    def _drawn_slip(self, request, new):
        name = f"Request {request.number}"
        token = self.rows.get(request)
        if token is None and new:
            return wrong(
                f"{name} got a token, and a part of its prompt is still to be fed: the logits of a "
                "chunk in the middle follow nothing that was asked",
                "drawn early",
            )
        if token is not None and not new:
            return wrong(f"{name} is fed, and no token was appended to its answer", "not drawn")
        if token is not None and [plain(one) for one in new] != [token]:
            return wrong(
                f"{name} got {new}, and the likeliest token after its own row of logits is {token}",
                "wrong row",
            )
        if any(type(one) is not int for one in new):
            return wrong("A token is an int: it is fed as one, and compared", "no int")
        full = len(request.answer) >= request.most
        stopped = token in self.stop
        left = token is not None and request not in self.ended
        if left and stopped:
            return wrong(
                f"{name} got {token}, an end token, and engine.finish was not called for it",
                "stop ignored",
            )
        if left and full:
            return wrong(
                f"{name} has all {request.most} tokens, and engine.finish was not called for it",
                "goes on",
            )
        if request in self.ended and not (full or stopped):
            return wrong(f"{name} was finished and is not at its end", "finished early")
        return None


# (tokens of each prompt, pages, budget, most at once)
LOADS = (
    ((5, 9, 3), 20, 16, 8),  # all at once
    ((30, 4, 6, 5), 30, 12, 3),  # a prompt in chunks, and more requests than may run
    ((2, 8, 8, 11), 7, 16, 8),  # too few pages: preempted requests keep their answers
    ((20, 2, 17, 3, 9), 8, 8, 8),
)
MOST = 9


def _judge_step(answer, case):
    model = _model()
    rng = random.Random("15.5")
    for lengths, pages, budget, most in LOADS:
        prompts = [[rng.randrange(61) for _ in range(n)] for n in lengths]
        outcome = _one_load(answer, model, prompts, pages, budget, most)
        if outcome is not None:
            return outcome
    return RIGHT


def _one_load(answer, model, prompts, pages, budget, most):
    """Serve the prompts with the learner's step; compare the answers with each prompt alone."""
    from nanokv.decoding.generation import generate

    stop = tuple(generate(model, prompts[0], max_new_tokens=MOST - 2, eos_token_ids=[]))[-1:]
    sizes = {"pages": pages, "size": SIZE, "budget": budget, "most": most}
    right = Engine(model, step, **sizes)
    engine = Watched(model, step, **sizes)
    for one in (right, engine):
        one.stop = stop
        for prompt in prompts:
            one.submit(prompt, MOST)
    right.run()
    requests = list(engine.waiting)
    while engine.waiting or engine.running:
        engine.begin()
        given = result_of(answer, engine)
        outcome = engine.end(given)
        if outcome is not None:
            return outcome
        if len(engine.steps) > 2 * len(right.steps):
            return wrong("No request is finished: nanokv needs half as many steps", "endless")
    answers = [[plain(token) for token in request.answer] for request in requests]
    expected = [list(generate(model, p, max_new_tokens=MOST, eos_token_ids=stop)) for p in prompts]
    for number, (mine, theirs) in enumerate(zip(answers, expected, strict=True)):
        if mine != theirs:
            return wrong(f"Request {number} is answered {mine}, and alone {theirs}", "tokens")
    if len(engine.steps) > len(right.steps):
        return wrong(
            f"Right tokens, in {len(engine.steps)} steps; {len(right.steps)} are enough: share "
            "says how many tokens each gets",
            "more steps",
        )
    return None


# --- 15.6: a stream -------------------------------------------------------------------------------


def stream(engine: Engine, request: Request) -> Iterator[int]:
    """nanokv's answer: the tokens of one request as they come, while other requests go on."""
    sent = 0
    while True:
        while sent < len(request.answer):
            sent += 1
            yield request.answer[sent - 1]
        if request.done:
            return
        engine.step()


class Read(Engine):
    """An engine that raises Told if a stream removes tokens from an answer."""

    def __init__(self, model: "Transformer", **sizes: int):
        super().__init__(model, step, **sizes)
        self.stop = ()
        self.asked: list[Request] = []
        self.grown: dict[Request, int] = {}  # length of each answer after the last step

    def step(self) -> list[tuple[Request, int]]:
        self.complete()
        drawn = super().step()
        self.grown = {request: len(request.answer) for request in self.asked}
        return drawn

    def complete(self) -> None:
        """Raise Told if an answer has become shorter since the last step."""
        if any(len(request.answer) < n for request, n in self.grown.items()):
            raise Told(
                wrong(
                    "You took tokens out of request.answer. They are fed again from there: leave "
                    "them, and count how many you gave",
                    "taken out",
                )
            )


def _streamed(kind, readers, model):
    """Read the streams of some requests in turn, one token at a time.

    Returns (all requests, {reader: tokens}, {reader: number of steps at its first token}).
    """
    engine = Read(model, pages=12, size=SIZE, budget=8, most=4)
    rng = random.Random("15.6")
    prompts = [[rng.randrange(61) for _ in range(n)] for n in (6, 3, 9)]
    requests = [engine.submit(prompt, 5 + i) for i, prompt in enumerate(prompts)]
    engine.asked = requests
    streams = {i: iter(result_of(kind, engine, requests[i])) for i in readers}
    got: dict[int, list] = {i: [] for i in readers}
    first: dict[int, int] = {}
    open_ = list(readers)
    while open_:
        for i in list(open_):
            for token in streams[i]:
                got[i].append(plain(token))
                first.setdefault(i, len(engine.steps))
                break
            else:
                open_.remove(i)
            if len(engine.steps) > 200 or len(got[i]) > 50:
                raise Told(
                    wrong("The stream does not end: request.done says when to stop", "endless")
                )
    engine.complete()
    return requests, got, first


def _judge_stream(answer, case):
    model = _model()
    made = answer(*_idle(model))
    if made is ...:
        raise NotImplementedError
    if not isinstance(made, Iterable):
        return wrong(
            "A stream is read with `for token in stream(…)`: write `yield token`; this returned "
            f"{made!r:.40}",
            "no generator",
        )
    for readers in ((0,), (2,), (0, 1, 2)):
        requests, got, first = _streamed(answer, readers, model)
        outcome = _stream_outcome(requests, got, first, readers)
        if outcome is not None:
            return outcome
    return RIGHT


def _idle(model):
    """An engine, and a request in it that is answered already."""
    engine = Engine(model, step, pages=12, size=SIZE, budget=8)
    request = engine.submit([1, 2, 3], 2)
    engine.run()
    return engine, request


def _stream_outcome(requests, got, first, readers):
    """An Outcome where a reader did not get the answer of its request as it came."""
    for i in readers:
        wanted = requests[i].answer
        if not requests[i].done and got[i] == wanted[: len(got[i])]:
            return wrong(
                f"The stream ended after {len(got[i])} tokens, and the request goes on. A step may "
                "draw nothing for it: look at request.done",
                "ends early",
            )
        if got[i] == wanted and first[i] > _first_step(i, readers):
            return wrong(
                "All tokens came at the end: yield each one when it is there", "all at the end"
            )
        if got[i] == wanted:
            continue
        strange = next((one for one in got[i] if type(one) is not int), None)
        if strange is not None:
            return wrong(f"{strange!r:.40} came: yield the token itself, an int", "no token")
        if len(readers) == 1 and got[i] == wanted[: len(got[i])]:
            return wrong(
                f"The stream ended after {len(got[i])} of {len(wanted)} tokens. When a request is "
                "done, its last tokens may still be unread",
                "rest lost",
            )
        if len(got[i]) > len(wanted):
            return wrong(f"{len(got[i])} tokens came, and the answer has {len(wanted)}", "twice")
        if len(readers) > 1:
            return wrong(
                f"With three readers, {len(got[i])} of {len(wanted)} tokens came. While one reader "
                "has a token in hand, the step of another draws for this request too: count what "
                "you gave, and give all that is in request.answer",
                "own steps only",
            )
        return wrong(f"{got[i]} came, and the answer is {wanted}", "tokens")
    return None


def _first_step(i, readers):
    """The number of steps after which nanokv's own stream gives the first token."""
    return _streamed(stream, readers, _model())[2][i]


# --- 15.7: one order of sums ----------------------------------------------------------------------

# (rows, numbers per row, size of a block)
SUMS = ((8, 64, 8), (5, 203, 32), (4, 6, 4), (2, 96, 200))
ROUNDED = 1e-3  # a sum that differs by more has other terms


def sums(products: "torch.Tensor", size: int) -> "torch.Tensor":
    """nanokv's answer: the sums (B,) of the rows (B,n), by blocks, each from left to right."""
    # Python's sum adds from left to right, all rows at once.
    return sum(sum(block.unbind(1)) for block in products.split(size, dim=1))  # type: ignore[return-value]


def _judge_sums(answer, case):
    import torch

    for B, n, size in SUMS:
        products = _products(B, n)
        together = _sums_of(answer, products, size)
        rows = [_sums_of(answer, row[None], size) for row in products]  # (1,) each
        alone = torch.cat(rows)  # (B,)
        outcome = (
            _terms(together, products, size)
            or _terms(alone, products, size)
            or _company(together, alone, size)
            or _order(together, products, size)
        )
        if outcome is not None:
            return outcome
    return RIGHT


def _products(B, n):
    """(B,n) in fp32, the same on every machine."""
    import torch

    rng = random.Random(f"15.7 {B} {n}")
    return torch.tensor([[rng.uniform(-1, 1) for _ in range(n)] for _ in range(B)])


def _sums_of(answer, products, size):
    """The answer's sums (B,); raises Told if they are not fp32, or of another shape."""
    import torch

    given = result_of(answer, products.clone(), size, like=torch.zeros(len(products)))
    if given.dtype != torch.float32:
        raise Told(
            wrong(
                f"The sums are {given.dtype}. Add in the dtype of the products, fp32: a longer "
                "dtype rounds later, and a kernel would need more time for it",
                "dtype",
            )
        )
    return given


def _terms(given, products, size):
    """An Outcome where numbers are missing or counted twice."""
    exact = products.double().sum(1)  # (B,)
    near = (given.double() - exact).abs() <= ROUNDED  # (B,); NaN is not near
    if near.all():
        return None
    B, n = products.shape
    whole = products[:, : n // size * size].double().sum(1)  # (B,)
    if n % size and (given.double() - whole).abs().max() <= ROUNDED:
        return wrong(
            f"{n} numbers in blocks of {size}: the last block is shorter, and yours leaves it out",
            "last block",
        )
    i = int((~near).nonzero()[0])
    return wrong(
        f"Row {i} of {B} rows of {n} numbers: yours gives {given[i]:.6f}, and its sum is "
        f"{exact[i]:.6f}. Each row is added up by itself",
        "terms",
    )


def _company(together, alone, size):
    """An Outcome where a row has other bits in company than alone."""
    for i, (here, there) in enumerate(zip(together, alone, strict=True)):
        if here != there:
            return wrong(
                f"Row {i} is {here:.9f} as one of {len(alone)} rows, and {there:.9f} alone. "
                "torch.allclose calls them equal, and the bits differ: the order of additions "
                f"depends on the number of rows. It may depend on `size` only, here {size}",
                "order by rows",
            )
    return None


def _order(given, products, size):
    """An Outcome where each row has one order of additions, and it is not that of the blocks."""
    import torch

    expected = sums(products, size)
    if torch.equal(given, expected):
        return None
    n = products.shape[1]
    if torch.equal(given, sums(products, n)):
        return wrong(
            "Your rows are added from left to right without blocks. That is one order too, but "
            f"only one core can work at a row. Add {size} numbers at a time, then these sums",
            "no blocks",
        )
    return wrong(
        f"Each row has the same bits alone and in company, but not in the order that was asked "
        f"for: blocks of {size}, each from left to right, then their sums from left to right. "
        "torch.sum and @ have other orders, which may be others on another machine",
        "another order",
    )


CHECKS = (
    function(
        "15.1",
        right=admit,
        inputs=_pool,
        use=TIMES,
        made=_admit_with,
        wrong=(
            _admission(
                "overtakes",
                "A later request starts before an earlier one. A long prompt would wait as long "
                "as short ones arrive: stop at the first request that does not fit.",
                overtake=True,
            ),
            _admission(
                "not counted",
                "A request that starts takes pages: count them as promised before you look at "
                "the next.",
                counted=False,
            ),
            _admission(
                "no page ahead",
                "Each running request will soon need one more page: promise it one page in "
                "advance.",
                ahead=0,
            ),
            _admission(
                "one page spare",
                "One page too careful: a request that takes exactly the remaining pages may start.",
                spare=1,
            ),
            _admission(
                "token ahead",
                "Promise a whole page ahead, also to one whose last page has room.",
                ahead="token",
            ),
            _admission(
                "rounded too far",
                "Tokens that fill their pages exactly need no page more: round up.",
                unit="over",
            ),
            _admission("rounded down", "A page that is begun is a page: round up.", unit="begun"),
            _admission(
                "tokens, not pages", "Those are tokens. A page holds `size` of them.", unit="token"
            ),
            _admission("no limit", "At most `room` more may run.", limit=False),
            _admission(
                "nothing promised",
                "Some of the free pages are promised to those that run.",
                others=False,
            ),
        ),
    ),
    function(
        "15.2",
        right=share,
        inputs=_pending,
        use=COUNTS,
        wrong=(
            Mistake(
                "in order",
                lambda pending, budget: _shared(pending, budget, lambda i: 0),
                "If only age counts, one long prompt stops every answer. A request with one "
                "pending token is in the middle of its answer: those first.",
            ),
            Mistake(
                "shortest first",
                lambda pending, budget: _shared(pending, budget, lambda i: pending[i]),
                "Decodes first is right. Among the prompts the older one comes first, however long "
                "it is.",
                alone=True,
            ),
            Mistake(
                "prompts first",
                lambda pending, budget: _shared(pending, budget, lambda i: pending[i] == 1),
                "The other way round: a request in the middle of its answer comes first, and "
                "prompts get what is left.",
            ),
            Mistake(
                "youngest first",
                lambda pending, budget: _shared(pending, budget, lambda i: (pending[i] > 1, -i)),
                "The older one comes first: `pending` begins with the oldest.",
            ),
            Mistake(
                "overdrawn",
                _overdrawn,
                "There may be more decodes than the budget has tokens: the last ones get 0, and "
                "none gets less than 0.",
            ),
            Mistake(
                "overdrawn, cut at 0",
                lambda pending, budget: [max(0, n) for n in _overdrawn(pending, budget)],
                "There may be more decodes than the budget has tokens: the last ones get 0.",
            ),
            Mistake(
                "first prompt only",
                _first_prompt,
                "The budget that the first prompt leaves goes to the next one.",
            ),
            Mistake(
                "zeros left out",
                lambda pending, budget: [n for n in share(pending, budget) if n],
                "A request that gets none has a 0 in the list: item i belongs to request i.",
            ),
            Mistake(
                "whole prompts only",
                lambda pending, budget: _shared(
                    pending, budget, lambda i: pending[i] > 1, whole=True
                ),
                "A prompt may be cut: feed as much of it as the budget leaves. That is a chunk.",
            ),
            Mistake(
                "budget for each",
                lambda pending, budget: [min(tokens, budget) for tokens in pending],
                "The budget is for the whole step: subtract the tokens that you have given.",
            ),
            Mistake(
                "equal parts",
                _equally,
                "Equal parts were not asked for: prompts in chunks of a few tokens take many "
                "steps. Decodes first, then the oldest prompt gets what is left.",
            ),
            Mistake(
                "sorted",
                _sorted,
                "Right numbers in another order: item i belongs to request i.",
                alone=True,
            ),
            Mistake(
                "decodes only",
                lambda pending, budget: [
                    n * (n == 1) for n in _shared(pending, budget, lambda i: pending[i] > 1)
                ],
                "Prompts get what the decodes leave. They would never be fed.",
            ),
        ),
    ),
    judged("15.3", _judge_preempt),
    judged("15.4", _judge_reserve),
    judged("15.5", _judge_step),
    judged("15.6", _judge_stream),
    judged("15.7", _judge_sums),
)

QUESTIONS = questions("15")
