"""Prefill for the server, in its own engine or in a separate process.

`Here` and `Elsewhere` have the same methods, which all run in the engine's thread except `start`
and `close`. `Elsewhere` asks the process only for what the engine's pages do not hold. An answer is
ready once its keys and values have arrived. At most AHEAD prompts are being computed or wait for
pages after their arrival, which bounds the memory used besides the pool. Answers to one prompt
(`n`) share one result. If the process ends, the engine prefills all prompts, including those under
way.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanokv.apps.serve.run.messages import Arrived, Submit
from nanokv.engine import Engine
from nanokv.engine.prefilled import Prefilled
from nanokv.errors import NanoKVError
from nanokv.remote.prefill_process import Load, PrefillProcess, received

logger = logging.getLogger(__name__)
AHEAD = 4
Ready = list[tuple[Submit, Prefilled | None]]


class Here:
    """The engine prefills, between its decode steps."""

    def __init__(self) -> None:
        self._ready: Ready = []

    def start(self, put: Callable[[Arrived], None]) -> None:
        """`put(message)` hands a message to `take` in the engine's thread."""

    def begin(self, submit: Submit) -> None:
        """Prefill an answer's prompt."""
        self._ready.append((submit, None))

    def forget(self, ticket: int) -> None:
        """Drop an answer that is no longer wanted."""

    def take(self, message: Arrived) -> None:
        """Handle a message from the prefill process."""

    def ready(self) -> Ready:
        """The answers that can enter the engine now, with their results. Requests more prompts."""
        ready = self._ready
        self._ready = []
        return ready

    def counts(self) -> dict[str, float]:
        """Counts for /metrics."""
        return {}

    def close(self) -> None:
        """End the prefill process, if there is one."""


class Elsewhere(Here):
    """A separate process prefills. Its model must have the fingerprint `weights`.

    load, sizes: what the process loads, and the sizes of its pool.
    """

    def __init__(self, engine: Engine, load: Load, sizes: dict, weights: str):
        super().__init__()
        self.engine = engine
        self.weights = weights
        self.process = PrefillProcess(load, sizes, self._news)
        # (salt, ids) → answers to that prompt.
        self.waiting: OrderedDict[Any, list[Submit]] = OrderedDict()
        self.asked: dict[int, tuple[Any, list[Submit]]] = {}  # number → (key in `waiting`, answers)
        names = ("prompts", "bytes", "seconds", "lost")
        self.state = {f"handover_{name}": 0.0 for name in names}
        self._put: Callable[[Arrived], None] | None = None
        self._number = 0

    def load(self) -> None:
        """Start the process; NanoKVError if it cannot start or has loaded another model."""
        facts = self.process.start()
        pages = self.process.sizes["pages"]
        self.state |= {"prefill_worker_pages": pages, "prefill_worker_pages_free": pages}
        mine = {"config": self.engine.config.to_dict(), "weights": self.weights}
        differ = [name for name, value in mine.items() if facts[name] != value]
        if differ:
            self.process.close()
            raise NanoKVError(
                f"the prefill process has loaded another model: its {' and '.join(differ)} differ",
                "do not change the files of the model while a server starts",
            )

    def start(self, put: Callable[[Arrived], None]) -> None:
        self._put = put

    def begin(self, submit: Submit) -> None:
        if not self.process.alive:
            super().begin(submit)
            return
        key = submit.job.settings["salt"], tuple(submit.job.ids)
        for other, submits in self.asked.values():
            if other == key:
                submits.append(submit)
                return
        self.waiting.setdefault(key, []).append(submit)

    def forget(self, ticket: int) -> None:
        for key, submits in list(self.waiting.items()):
            submits[:] = [other for other in submits if other.ticket != ticket]
            if not submits:
                del self.waiting[key]
        for number, (_, submits) in list(self.asked.items()):
            submits[:] = [other for other in submits if other.ticket != ticket]
            if not submits:
                del self.asked[number]
                self.process.cancel(number)

    def ready(self) -> Ready:
        while self.waiting and self.under_way() < AHEAD:
            salt, ids = min(self.waiting, key=self._turn)
            submits = self.waiting.pop((salt, ids))
            self._number += 1
            self.asked[self._number] = ((salt, ids), submits)
            pool = self.engine.pool
            held = len(pool.snapshots.usable(pool.find(ids[:-1], salt))) * pool.page_size
            self.process.ask(self._number, ids, salt, held)
        return super().ready()

    def _turn(self, key: Any) -> int:
        """The counter of the client that asks; the least one goes first, then the oldest prompt."""
        client = self.waiting[key][0].job.settings["client"]
        return self.engine.scheduler.turns.counter(client)

    def under_way(self) -> int:
        """Prompts that were asked for, and results that wait for the engine or for its pages."""
        waiting = sum(request.prefilled is not None for request in self.engine.scheduler.waiting)
        return len(self.asked) + len(self._ready) + waiting

    def counts(self) -> dict[str, float]:
        waiting = [*self.waiting.values(), *(submits for _, submits in self.asked.values())]
        counts = {
            "prefill_worker_up": self.process.alive,
            "prefills_waiting": sum(map(len, waiting)),
        }
        return self.state | counts

    def close(self) -> None:
        self.process.close()

    def take(self, message: Arrived) -> None:
        meta = message.meta
        if "lost" in meta:
            self._lose(meta["lost"])
            return
        if "idle" in meta:
            self.state |= {
                "prefill_worker_pages": meta["idle"]["pages"],
                "prefill_worker_pages_free": meta["idle"]["free"],
            }
            return
        try:
            done = "done" in meta
            number = meta["done"] if done else meta["failed"]
            (_, ids), submits = self.asked.get(number, (("", ()), []))
            found: list[Prefilled | None] = [None] * len(submits)
            if done:
                found = [self._checked(message, ids, submit) for submit in submits]
        except (KeyError, TypeError, NanoKVError) as error:  # not reported to a client
            self._lose(f"it has sent an unexpected message: {type(error).__name__}: {error}")
            return
        self.asked.pop(number, None)
        if done and submits:
            self.state["handover_prompts"] += 1
            self.state["handover_bytes"] += message.size
            self.state["handover_seconds"] += message.seconds
        self._ready += zip(submits, found, strict=True)

    def _news(self, meta: dict, tensors: dict[str, Tensor], size: int, seconds: float) -> None:
        """Receive a message, in the thread that reads from the process."""
        if not all(map(finite, tensors.values())):  # other requests would read them from the pages
            meta = {"lost": "it has sent NaN or infinity"}
        if self._put is not None:  # before `start` it can only have ended, which `begin` notices
            self._put(Arrived(meta, tensors, size, seconds))

    def _checked(self, message: Arrived, ids: Sequence[int], submit: Submit) -> Prefilled:
        """The result for one answer; NanoKVError unless its shapes and dtypes match the engine."""
        found = received(message.meta, message.tensors, ids, submit.opened)
        self.engine.check_prefilled(found, list(ids))
        return found

    def _lose(self, reason: str) -> None:
        """Kill the process, and let the engine prefill every prompt that waits for it."""
        self.process.kill()
        logger.warning(
            "the prefill process is lost, prompts are prefilled here from now on: %s", reason
        )
        lost = [submit for submits in self.waiting.values() for submit in submits]
        lost += [submit for _, submits in self.asked.values() for submit in submits]
        self.waiting.clear()
        self.asked.clear()
        self.state["handover_lost"] += len(lost)
        self._ready += [(submit, None) for submit in sorted(lost, key=lambda submit: submit.opened)]


def finite(x: Tensor) -> bool:
    """Whether x, of any shape, has no NaN and no infinity; either would show in its min or max."""
    if not x.numel() or not x.is_floating_point():
        return True
    return bool(torch.stack(x.aminmax()).isfinite().all())
