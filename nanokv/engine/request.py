"""One request of the engine: its tokens, how they are drawn, its state and its times.

`known` is prompt + answer so far: the first `fed` tokens are in the cache, the rest is `pending`. A
new request has its whole prompt pending, a running one its newest token, a preempted one all of
`known`. The engine feeds the pending tokens and draws a token when none is pending, so a preempted
request needs no extra state.

Ctrl-C can come at any line. Each change is one assignment or one append, marked "commit": all work
before it can be repeated, and the next step derives all consequences again.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nanokv.decoding.draw import Sampler, SamplingParams, Step, next_steps, reason_to_end
from nanokv.errors import GenerationError

if TYPE_CHECKING:
    from nanokv.engine.prefilled import Prefilled

WAITING = "waiting"
RUNNING = "running"
FINISHED = "finished"


class LogitsRow(NamedTuple):
    """One row of the logits of a forward."""

    logits: Tensor  # (B,V)
    row: int


class Drawn(NamedTuple):
    """The token at place `at` of the answer, or the error instead of it, before it is committed."""

    at: int
    step: Step | GenerationError


class Random(NamedTuple):
    """The state of the generator before it drew place `at` of the answer."""

    at: int
    state: Tensor


@dataclass(eq=False)
class Request:
    """Made by Engine.submit. `finish_reason` is stop, length, context, cancelled or error."""

    number: int  # order of arrival: a smaller number goes first
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    room: int  # tokens that the context leaves for the answer
    eos_token_ids: tuple[int, ...]
    salt: str = ""
    client: str = ""  # who asks; clients take turns
    on_token: Any = None  # on_token(request, step), for every token
    device: torch.device | str = "cpu"
    arrived: float = 0.0
    constrain: Any = None  # constrain(logits, tokens) → logits, before each token is drawn
    top_logprobs: int = 0  # how many of the likeliest tokens each Step lists
    prefilled: "Prefilled | None" = None  # until its rows are in the pages
    state: str = WAITING
    cache: Any = None  # a PrefixCache while it runs
    fed: int = 0  # known tokens that every layer of the cache certainly holds
    after: LogitsRow | None = None  # follows all known tokens, once all are fed
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[Any, ...]] = field(default_factory=list)  # Step.top of each token
    handed: int = 0  # tokens that were queued for the caller of Engine.step
    finish_reason: str | None = None
    error: Exception | None = None  # the cause of finish_reason "error"
    preemptions: int = 0
    charged: tuple[int, int] = (0, 0)  # tokens of prompt and answer in its client's counter
    reused_tokens: int = 0  # found in the index at the first admission, so never computed
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self):
        self.prompt_tokens = len(self.prompt)
        self.generator = self.params.generator(self.device)
        self.seed = self.generator.initial_seed()
        self.sampler = Sampler(
            self.params,
            self.generator,
            self.prompt,
            self.tokens,
            self.constrain,
            self.top_logprobs,
        )
        self.drawn: Drawn | None = None
        self.untold: dict[int, Step] = {}  # place → Step, for which on_token has not been called
        self.random: Random | None = None

    @property
    def known(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.tokens

    @property
    def logits(self) -> Any:
        """(1,V) after all known tokens; None until all are fed."""
        if self.after is None:
            return None
        whole, row = self.after
        return whole[row : row + 1]

    @logits.setter
    def logits(self, logits: Tensor | None) -> None:
        self.after = None if logits is None else LogitsRow(logits, 0)

    @property
    def newest(self) -> int:
        """The last known token."""
        return (self.tokens or self.prompt)[-1]

    @property
    def pending(self) -> int:
        """The number of known tokens that are not in the cache."""
        return self.prompt_tokens + len(self.tokens) - self.fed

    def pages_needed(self, page_size: int) -> int:
        """Pages still missing to hold all known tokens."""
        held = 0
        if self.cache is not None:
            held = len(self.cache.tables[0])
        needed = -(-(len(self.prompt) + len(self.tokens)) // page_size)
        return max(0, needed - held)

    def take(self, cache: Any) -> None:
        """Become the owner of a cache that may hold the beginning, and append prefilled rows to it.

        If pages were evicted that the prefilled rows must follow, the prompt is prefilled here.
        """
        given = self.prefilled
        after = None
        if given is not None and given.logits is not None and given.start <= cache.length:
            given.extend(cache, self.device)
            cache.remember(self.prompt)
            after = LogitsRow(given.logits.to(self.device), 0)  # (1,V)
        # One statement, so that an interrupt never leaves the cache of another length than `fed`.
        self.cache, self.fed, self.after, self.prefilled = cache, cache.length, after, None

    def settle(self) -> None:
        """Truncate the tokens that an interrupted forward left in some of the layers."""
        if self.cache.even() == self.fed:
            return
        lengths = {layer.length for layer in self.cache}
        # The layers hold fewer than `fed` tokens only if `Scheduler.reuse` was interrupted.
        self.fed = min(self.fed, *lengths)
        if lengths != {self.fed}:
            self._go_back()

    def _go_back(self) -> None:
        """Truncate to `fed`, or to the nearest state that recurrent layers still have."""
        self.fed = self.cache.nearest(self.fed)
        self.cache.truncate(self.fed)

    def feed(self, logits: Tensor, row: int) -> None:
        """Record a complete forward: this row of `logits` (B,V) follows the cache's last token."""
        self.fed, self.after = self.cache.length, LogitsRow(logits, row)  # commit

    def step_at(self, i: int) -> Step:
        """Token i of the answer."""
        drawn = self.drawn
        if drawn is not None and drawn.at == i and isinstance(drawn.step, Step):
            return drawn.step
        return Step(self.tokens[i], self.logprobs[i], self.tops[i])

    def draw(self) -> None:
        """Add the token drawn for all requests together, or draw one from `logits`.

        Repeated after an interrupt, it draws the same token. Raises GenerationError (NaN logits).
        """
        if self.drawn is None or self.drawn.at != len(self.tokens):
            if self.params.temperature:
                self._rewind()
            self.drawn = Drawn(len(self.tokens), *next_steps(self.logits, [self.sampler]))
        step = self.drawn.step
        if isinstance(step, GenerationError):
            raise step
        self.logprobs[len(self.tokens) :] = [step.logprob]
        self.tops[len(self.tokens) :] = [step.top]
        self.tokens.append(step.token)  # commit
        self.after = None

    def _rewind(self) -> None:
        """Set the generator to its state right after the newest token was drawn."""
        if self.random is None or self.random.at != len(self.tokens):
            self.random = Random(len(self.tokens), self.generator.get_state())
        self.generator.set_state(self.random.state)

    def reason_to_end(self) -> str | None:
        """Why the newest token is the last one; None if it is not."""
        if not self.tokens:
            return None
        return reason_to_end(self.tokens, self.eos_token_ids, self.max_new_tokens, self.room)

    def metrics(self) -> dict[str, float | int | None]:
        """Seconds and counts; None for events that have not happened."""
        produced = len(self.tokens)
        decoding = _between(self.first_token, self.finished)
        return {
            "queue_s": _between(self.arrived, self.admitted),
            "ttft_s": _between(self.arrived, self.first_token),
            "token_s": None if decoding is None or produced < 2 else decoding / (produced - 1),
            "total_s": _between(self.arrived, self.finished),
            "prompt_tokens": len(self.prompt),
            "new_tokens": produced,
            "reused_tokens": self.reused_tokens,
            "preemptions": self.preemptions,
        }


def logits_of(requests: list[Request]) -> Tensor:
    """(B,V), a row per fed request; not copied if they are all rows of one forward in order."""
    after = [request.after for request in requests if request.after is not None]  # all are fed
    whole = after[0].logits
    rows = [row for logits, row in after if logits is whole]
    if rows == list(range(len(whole))) and len(rows) == len(requests):
        return whole
    return torch.cat([request.logits for request in requests])


def _between(start: float | None, end: float | None) -> float | None:
    """Seconds; None if one of the events has not happened."""
    if start is None or end is None:
        return None
    return end - start
