"""Where the prompts of a server are prefilled: by its own engine, or by a process that only prefills.

`Here` and `Elsewhere` have the same methods, all for the engine's thread but for `start` and `close`. Elsewhere asks
the process for what the engine's pages do not hold, and submits the request when keys and values have arrived. At most
AHEAD prompts are under way, or have arrived and wait for pages; so much memory is taken besides the pool. Answers to
one prompt (`n`) share what is sent. When the process has ended, prompts are prefilled here, those under way as well.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanokv.engine import Engine
from nanokv.engine.prefilled import Prefilled
from nanokv.errors import NanoKVError
from nanokv.remote.prefill_process import Load, PrefillProcess, received

if TYPE_CHECKING:
    from nanokv.apps.serve.run.worker import Ticket

logger = logging.getLogger(__name__)
AHEAD = 4
Command = Callable[[], None]


class Here:
    """The engine prefills, between its decodes."""

    def start(self, put: Callable[[Command], None]) -> None:
        """`put(command)`: a command is run in the engine's thread."""

    def begin(self, ticket: "Ticket") -> None:
        """An answer is to be begun."""
        ticket.enter(None)

    def forget(self, ticket: "Ticket") -> None:
        """It is not wanted any more."""

    def pump(self) -> None:
        """After each step: ask for more."""

    def counts(self) -> dict[str, float]:
        """For /metrics."""
        return {}

    def close(self) -> None:
        """The end."""


HERE = Here()


class Elsewhere(Here):
    """`load`, `sizes`: of the process; `weights`: the fingerprint that its model must have."""

    def __init__(self, engine: Engine, load: Load, sizes: dict, weights: str):
        self.engine, self.weights = engine, weights
        self.process = PrefillProcess(load, sizes, self._news)
        self.waiting: OrderedDict[Any, list[Ticket]] = OrderedDict()  # (salt, ids) → answers to that prompt
        self.asked: dict[int, tuple[Any, list[Ticket]]] = {}  # number → (its key, answers)
        names = "prompts", "bytes", "seconds", "lost"
        self.state = {f"handover_{name}": 0.0 for name in names}
        self._put: Callable[[Command], None] | None = None
        self._number = 0

    def load(self) -> None:
        """Start the process; NanoKVError where it cannot, or has loaded another model."""
        facts = self.process.start()
        pages = self.process.sizes["pages"]
        self.state |= {"prefill_worker_pages": pages, "prefill_worker_pages_free": pages}
        mine = {"config": self.engine.config.to_dict(), "weights": self.weights}
        differ = [name for name, value in mine.items() if facts[name] != value]
        if differ:
            self.process.close()
            raise NanoKVError(f"the prefill process has loaded another model: its {' and '.join(differ)} differ",
                              "do not change the files of the model while a server starts")  # fmt: skip

    def start(self, put: Callable[[Command], None]) -> None:
        self._put = put

    def begin(self, ticket: "Ticket") -> None:
        if not self.process.alive:
            return ticket.enter(None)
        key = ticket.job.settings["salt"], tuple(ticket.job.ids)
        same = [tickets for other, tickets in self.asked.values() if other == key]
        (same[0] if same else self.waiting.setdefault(key, [])).append(ticket)
        self.pump()

    def forget(self, ticket: "Ticket") -> None:
        for key, tickets in list(self.waiting.items()):
            tickets[:] = [other for other in tickets if other is not ticket]
            if not tickets:
                del self.waiting[key]
        for number, (_, tickets) in list(self.asked.items()):
            tickets[:] = [other for other in tickets if other is not ticket]
            if not tickets:
                del self.asked[number]
                self.process.cancel(number)
        self.pump()

    def pump(self) -> None:
        while self.waiting and self.under_way() < AHEAD:
            (salt, ids), tickets = self.waiting.popitem(last=False)
            self._number += 1
            self.asked[self._number] = (salt, ids), tickets
            held = len(self.engine.pool.find(ids[:-1], salt)) * self.engine.pool.page_size
            self.process.ask(self._number, ids, salt, held)

    def under_way(self) -> int:
        """Prompts that were asked for, and those whose rows wait for pages."""
        return len(self.asked) + sum(request.prefilled is not None for request in self.engine.scheduler.waiting)

    def counts(self) -> dict[str, float]:
        tickets = [*self.waiting.values(), *(tickets for _, tickets in self.asked.values())]
        return self.state | {"prefill_worker_up": self.process.alive, "prefills_waiting": sum(map(len, tickets))}

    def close(self) -> None:
        self.process.close()

    def _news(self, meta: dict, tensors: dict[str, Tensor], count: int, seconds: float) -> None:
        """In the thread that reads."""
        if not all(map(finite, tensors.values())):  # in the pages others would find it
            meta = {"lost": "it has sent NaN or infinity"}
        if self._put is not None:  # before the start it can only have ended, which `begin` sees
            self._put(lambda: self._take(meta, tensors, count, seconds))

    def _take(self, meta: dict, tensors: dict[str, Tensor], count: int, seconds: float) -> None:
        if "lost" in meta:
            return self._lose(meta["lost"])
        if "idle" in meta:
            self.state |= {"prefill_worker_pages": meta["idle"]["pages"],
                           "prefill_worker_pages_free": meta["idle"]["free"]}  # fmt: skip
            return
        try:
            number = meta["done"] if "done" in meta else meta["failed"]
            (_, ids), tickets = self.asked.get(number, (("", ()), []))
            found = [self._believed(meta, tensors, ids, ticket) if "done" in meta else None for ticket in tickets]
        except (KeyError, TypeError, NanoKVError) as error:  # a client is not told of it
            return self._lose(f"it has sent what nobody has asked for: {type(error).__name__}: {error}")
        self.asked.pop(number, None)
        if "done" in meta and tickets:
            self.state["handover_prompts"] += 1
            self.state["handover_bytes"] += count
            self.state["handover_seconds"] += seconds
        for ticket, prefilled in zip(tickets, found, strict=True):
            ticket.enter(prefilled)
        self.pump()

    def _believed(self, meta: dict, tensors: dict[str, Tensor], ids: Sequence[int], ticket: "Ticket") -> Prefilled:
        """For this ticket, if shapes and dtypes are those of the engine."""
        found = received(meta, tensors, ids, ticket.opened)
        self.engine.check_prefilled(found, list(ids))
        return found

    def _lose(self, reason: str) -> None:
        """Whatever was under way is prefilled here."""
        self.process.kill()
        logger.warning("the prefill process is lost, prompts are prefilled here from now on: %s", reason)
        lost = [ticket for tickets in self.waiting.values() for ticket in tickets]
        lost += [ticket for _, tickets in self.asked.values() for ticket in tickets]
        self.waiting.clear()
        self.asked.clear()
        self.state["handover_lost"] += len(lost)
        for ticket in sorted(lost, key=lambda ticket: ticket.opened):
            ticket.enter(None)


def finite(x: Tensor) -> bool:
    """No NaN and no infinity in x of any shape: the smallest and the largest value tell."""
    return not x.numel() or not x.is_floating_point() or bool(torch.stack(x.aminmax()).isfinite().all())
