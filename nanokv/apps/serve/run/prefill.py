"""Where the prompts of a server are prefilled: by its own engine, or by a process that only prefills.

`Here` and `Elsewhere` have the same methods, all for the engine's thread but for `start` and `close`. Elsewhere asks
the process for what the engine's pages do not hold; the answer is ready when keys and values have arrived. At most
AHEAD prompts are under way, or have arrived and wait for pages; so much memory is taken besides the pool. Answers to
one prompt (`n`) share what is sent. When the process has ended, prompts are prefilled here, those under way as well.
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
    """The engine prefills, between its decodes."""

    def __init__(self) -> None:
        self._ready: Ready = []

    def start(self, put: Callable[[Arrived], None]) -> None:
        """`put(message)`: it is given to `take` in the engine's thread."""

    def begin(self, submit: Submit) -> None:
        """An answer is to be begun."""
        self._ready.append((submit, None))

    def forget(self, ticket: int) -> None:
        """It is not wanted any more."""

    def take(self, message: Arrived) -> None:
        """What the process has said."""

    def ready(self) -> Ready:
        """What the engine is to be given now, with what was prefilled for it. Asks for more."""
        ready, self._ready = self._ready, []
        return ready

    def counts(self) -> dict[str, float]:
        """For /metrics."""
        return {}

    def close(self) -> None:
        """The end."""


class Elsewhere(Here):
    """`load`, `sizes`: of the process; `weights`: the fingerprint that its model must have."""

    def __init__(self, engine: Engine, load: Load, sizes: dict, weights: str):
        super().__init__()
        self.engine, self.weights = engine, weights
        self.process = PrefillProcess(load, sizes, self._news)
        # (salt, ids) → answers to that prompt.
        self.waiting: OrderedDict[Any, list[Submit]] = OrderedDict()
        self.asked: dict[int, tuple[Any, list[Submit]]] = {}  # number → (its key, answers)
        names = "prompts", "bytes", "seconds", "lost"
        self.state = {f"handover_{name}": 0.0 for name in names}
        self._put: Callable[[Arrived], None] | None = None
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
            raise NanoKVError(
                f"the prefill process has loaded another model: its {' and '.join(differ)} differ",
                "do not change the files of the model while a server starts",
            )

    def start(self, put: Callable[[Arrived], None]) -> None:
        self._put = put

    def begin(self, submit: Submit) -> None:
        if not self.process.alive:
            return super().begin(submit)
        key = submit.job.settings["salt"], tuple(submit.job.ids)
        same = [submits for other, submits in self.asked.values() if other == key]
        (same[0] if same else self.waiting.setdefault(key, [])).append(submit)

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
            (salt, ids), submits = self.waiting.popitem(last=False)
            self._number += 1
            self.asked[self._number] = (salt, ids), submits
            held = len(self.engine.pool.find(ids[:-1], salt)) * self.engine.pool.page_size
            self.process.ask(self._number, ids, salt, held)
        return super().ready()

    def under_way(self) -> int:
        """Prompts that were asked for, and those whose rows wait for the engine or for pages."""
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
            return self._lose(meta["lost"])
        if "idle" in meta:
            self.state |= {
                "prefill_worker_pages": meta["idle"]["pages"],
                "prefill_worker_pages_free": meta["idle"]["free"],
            }
            return
        try:
            number = meta["done"] if "done" in meta else meta["failed"]
            (_, ids), submits = self.asked.get(number, (("", ()), []))
            done = "done" in meta
            found = [self._believed(message, ids, one) if done else None for one in submits]
        except (KeyError, TypeError, NanoKVError) as error:  # a client is not told of it
            return self._lose(
                f"it has sent what nobody has asked for: {type(error).__name__}: {error}"
            )
        self.asked.pop(number, None)
        if done and submits:
            self.state["handover_prompts"] += 1
            self.state["handover_bytes"] += message.size
            self.state["handover_seconds"] += message.seconds
        self._ready += zip(submits, found, strict=True)

    def _news(self, meta: dict, tensors: dict[str, Tensor], size: int, seconds: float) -> None:
        """In the thread that reads."""
        if not all(map(finite, tensors.values())):  # in the pages others would find it
            meta = {"lost": "it has sent NaN or infinity"}
        if self._put is not None:  # before the start it can only have ended, which `begin` sees
            self._put(Arrived(meta, tensors, size, seconds))

    def _believed(self, message: Arrived, ids: Sequence[int], submit: Submit) -> Prefilled:
        """For this answer, if shapes and dtypes are those of the engine."""
        found = received(message.meta, message.tensors, ids, submit.opened)
        self.engine.check_prefilled(found, list(ids))
        return found

    def _lose(self, reason: str) -> None:
        """Whatever was under way is prefilled here."""
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
    """No NaN and no infinity in x of any shape: the smallest and the largest value tell."""
    return (
        not x.numel()
        or not x.is_floating_point()
        or bool(torch.stack(x.aminmax()).isfinite().all())
    )
