"""The engine on several ranks: rank 0 has the requests and draws, the others repeat its steps.

Each step of rank 0 begins with a message to the other ranks: the events since the last step, which
are new requests, drawn tokens and finished requests. The other ranks apply the events in the same
order, so they hold the same pages for the same tokens and plan the same forwards. The message also
has the number of prompt tokens that may share the step with decodes, which rank 0 measures. The
other ranks draw nothing: sampling, grammars, stop strings, clients and clocks exist on rank 0 only.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from nanokv.checkpoint import Model
from nanokv.engine.engine import Engine
from nanokv.engine.request import Request
from nanokv.errors import GenerationError
from nanokv.parallel.group import Ranks


class LeadingEngine(Engine):
    """The engine of rank 0, used like any other Engine. A step first sends the events."""

    def __init__(
        self,
        ranks: Ranks,
        model: Model,
        pages: int = 256,
        page_size: int = 16,
        step_tokens: int | None = None,
        max_running: int = 32,
        paced: bool | None = None,
        prefix: str = "hash",
    ):
        super().__init__(
            model, pages, page_size, step_tokens, max_running, paced=paced, prefix=prefix
        )
        self.ranks = ranks
        self.events: list[list[Any]] = []
        # Not `step_tokens`: a default depends on the free memory of rank 0.
        steps = self.scheduler.step_tokens
        ranks.hear(["engine", [pages, page_size, steps, max_running, prefix]])

    def submit(self, ids: Any, *args: Any, **options: Any) -> Request:
        """Same as Engine.submit."""
        request = super().submit(ids, *args, **options)
        new = request.max_new_tokens
        self.events.append(["submit", request.prompt, new, request.salt, request.client])
        return request

    def _step(self) -> None:
        self._settle()  # draws the tokens of the last step
        events = self.events
        self.events = []
        self.ranks.hear(["step", events, self.scheduler.beside])
        super()._step()

    def aside(self, function: Callable[[Model], Any]) -> NoReturn:
        """GenerationError: the other ranks take part in requests only."""
        n = self.ranks.size
        raise GenerationError(
            f"log-probabilities of a prompt need one process, but this model is on {n} ranks",
            "leave out echo, or start without --tensor-parallel",
        )

    def _hand_out(self, request: Request) -> None:
        new = request.tokens[request.handed :]
        self.events += [["token", request.number, token] for token in new]
        super()._hand_out(request)

    def _finish(self, request: Request) -> None:
        self.events.append(["finish", request.number, request.finish_reason])
        super()._finish(request)


class FollowingEngine(Engine):
    """The engine of another rank, which applies the events of rank 0."""

    def __init__(
        self,
        model: Model,
        pages: int,
        page_size: int,
        step_tokens: int,
        max_running: int,
        prefix: str,
    ):
        super().__init__(model, pages, page_size, step_tokens, max_running, prefix=prefix)
        self.requests: dict[int, Request] = {}

    def follow(self, events: list, beside: int | None) -> None:
        """Apply the events of rank 0 since the last step, then run the next step.

        `beside`: the most prompt tokens of this step if it also decodes; None: all that fit.
        """
        apply: dict[str, Callable[..., None]] = {
            "submit": self._apply_submit,
            "token": self._apply_token,
            "finish": self._apply_finish,
        }
        for kind, *values in events:
            apply[kind](*values)
        self.scheduler.beside = beside
        self._step()

    def _apply_submit(self, prompt: list[int], max_new_tokens: int, salt: str, client: str) -> None:
        request = self.submit(prompt, max_new_tokens, eos_token_ids=[], salt=salt, client=client)
        self.requests[request.number] = request

    def _apply_token(self, number: int, token: int) -> None:
        request = self.requests[number]
        request.tokens.append(token)
        request.logits = None

    def _apply_finish(self, number: int, reason: str | None) -> None:
        request = self.requests.pop(number, None)  # the event may come twice
        if request is not None:
            self.cancel(request, reason or "cancelled")

    def _draw(self) -> None:
        """Nothing to do: rank 0 draws."""
