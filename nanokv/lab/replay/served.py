"""The requests of a talk through a real engine: what its pool of pages had, and the seconds of the
next prefill."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from nanokv.checkpoint import Model
from nanokv.engine import Engine
from nanokv.errors import ContextError
from nanokv.lab.replay.changes import Requests


@dataclass
class Served:
    """The next prompt after one change, in one engine."""

    reused: int  # tokens that the pool had
    seconds: list[float] = field(default_factory=list)  # until the first token of the answer

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Server:
    """An engine with pages for the requests of one change."""

    def __init__(self, model: Model, pages: int, page: int, index: str):
        self.engine = Engine(model, pages, page, prefix=index)
        self.turns = 0

    def turn(self, requests: Requests) -> tuple[int, float]:
        """Compute what is held, then the prompt: the tokens that were found, and the seconds.

        Each turn has a salt of its own, so that it finds only what it has computed itself.
        """
        self.turns += 1
        for ids in requests.held:
            self.first_token(ids)
        began = perf_counter()
        reused = self.first_token(requests.prompt)
        return reused, perf_counter() - began

    def first_token(self, ids: list[int]) -> int:
        """Compute a prompt and one token; the tokens of the prompt that were found."""
        request = self.engine.submit(ids, 1, eos_token_ids=(), salt=str(self.turns))
        self.engine.run()
        return request.reused_tokens


def measure(
    model: Model, requests: dict[str, Requests], page: int, indexes: Sequence[str], repeat: int
) -> dict[str, dict[str, Served]]:
    """{name: {index: Served}}, after `repeat` rounds and one to warm up.

    In each round every change and index has its turn, so that a busy moment slows all of them.
    ContextError for a talk that is too long.
    """
    pages = pages_for(model, requests, page)
    servers = {index: Server(model, pages, page, index) for index in indexes}
    found: dict[str, dict[str, Served]] = {}
    for number in range(repeat + 1):
        for name, one in requests.items():
            for index, server in servers.items():
                reused, seconds = server.turn(one)
                served = found.setdefault(name, {}).setdefault(index, Served(reused))
                if number:
                    served.seconds.append(seconds)
    return found


def pages_for(model: Model, requests: dict[str, Requests], page: int) -> int:
    """Pages that hold every request of a change; ContextError for one that is too long."""
    longest = max(len(ids) for one in requests.values() for ids in (*one.held, one.prompt))
    context = model.config.max_position_embeddings
    if longest >= context:
        raise ContextError(
            f"a request of {longest:,} tokens, and the context has {context:,}",
            "a shorter talk, or -m NAME of another model",
        )
    return max(
        sum(-(-(len(ids) + 1) // page) for ids in (*one.held, one.prompt))
        for one in requests.values()
    )
