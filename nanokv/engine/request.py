"""One request of the engine: its tokens, how they are drawn, where it stands, and when things happened to it.

`known` is prompt + answer so far; the cache holds the first `cache.length` of them and `pending` are the rest. A new
request has its whole prompt pending, a running one its newest token, a preempted one everything: the engine feeds
what is pending and draws a token when nothing is. So a preempted request needs no state of its own.
"""

from dataclasses import dataclass, field

import torch

from nanokv.generation import SamplingParams, Step
from nanokv.sample import logprob, sample

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


@dataclass(eq=False)
class Request:
    """Made by Engine.submit. `finish_reason`: stop, length, context, cancelled, error (then `error` says which)."""

    number: int  # order of arrival: a smaller one goes first
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int  # of which `room` fit into the model's context
    room: int
    eos_token_ids: tuple[int, ...]
    salt: str = ""
    on_token: object = None  # on_token(request, step), for every token
    device: object = "cpu"
    arrived: float = 0.0
    state: str = WAITING
    cache: object = None  # a PrefixCache while it runs
    logits: object = None  # (1,V) that no token was drawn from yet
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    preemptions: int = 0
    reused_tokens: int = 0  # found in the index at the first admission, so never computed
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self):
        self.generator = self.params.generator(self.device)
        self.seed = self.generator.initial_seed()

    @property
    def known(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.tokens

    @property
    def pending(self) -> int:
        """Known tokens that are not in the cache."""
        return len(self.prompt) + len(self.tokens) - (self.cache.length if self.cache is not None else 0)

    def pages_needed(self, page_size: int) -> int:
        """Pages still missing to hold all known tokens."""
        held = len(self.cache.tables[0]) if self.cache is not None else 0
        return max(0, -(-(len(self.prompt) + len(self.tokens)) // page_size) - held)

    def step_at(self, i: int) -> Step:
        """Token i of the answer."""
        return Step(self.tokens[i], self.logprobs[i])

    def draw(self) -> Step:
        """A token from `logits`, with this request's own generator; says in `finish_reason` if it was the last one."""
        logits, previous = self.logits, None
        if self.params.repetition_penalty != 1:
            previous = torch.tensor([self.known], device=logits.device)  # (1,N)
        token = sample(logits, **self.params.values(), previous=previous, generator=self.generator)  # (1,)
        step = Step(int(token), float(logprob(logits, token)))
        self.logits = None
        self.tokens.append(step.token)
        self.logprobs.append(step.logprob)
        if step.token in self.eos_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_new_tokens:
            self.finish_reason = "length"
        elif len(self.tokens) == self.room:
            self.finish_reason = "context"
        return step

    def metrics(self) -> dict:
        """Seconds and counts; None for what has not happened."""
        produced = len(self.tokens)
        return {
            "queue_s": _between(self.arrived, self.admitted),
            "ttft_s": _between(self.arrived, self.first_token),
            "token_s": None if produced < 2 or self.finished is None
            else (self.finished - self.first_token) / (produced - 1),
            "total_s": _between(self.arrived, self.finished),
            "prompt_tokens": len(self.prompt),
            "new_tokens": produced,
            "reused_tokens": self.reused_tokens,
            "preemptions": self.preemptions,
        }  # fmt: skip


def _between(start, end):
    return None if end is None else end - start
