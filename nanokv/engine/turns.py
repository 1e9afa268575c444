"""Turns between clients: which waiting request is admitted next, by virtual token counters (VTC).

In order of arrival, a client with 90 requests in the queue makes all other clients wait for all 90.
With a counter per client, each of n busy clients gets 1/n of the work, however many requests it
has queued. A counter holds the tokens that its client was served:

    admission of a request              counter += INPUT × tokens of its prompt
    a token of its answer               counter += OUTPUT
    the first request in the queue      counter = max(counter, the least one of those who wait)
    whose turn is it?                   the least counter; within a client the order of arrival

A token of an answer counts double, as in the paper: it takes a decode step, while the tokens of a
prompt share a forward. Counting as tokens are drawn needs no guess of an answer's length. The third
line is the lift: without it, a client that was idle for a day could then fill the engine for a day.
If no one waits, the lift is to the counter of the client that was admitted last. Reused tokens of a
prompt count like computed ones, and recomputing a preempted request counts nothing.

While two clients always have a request waiting, the tokens that they are served, so weighted,
differ by at most 2 · max(INPUT · L, OUTPUT · M) over any time: L is the longest prompt, and M the
number of tokens that fit into the running requests. No turn is wasted: if anyone waits and fits,
someone is admitted. The counters decide only between clients, so with one client all requests go in
order of arrival. Preemption does not look at them (scheduler.py).

Forwards without a request of the engine, such as those of embeddings, take turns by the same
counters (apps/serve/run/engine_thread.py). Each counts its tokens when it is computed.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (arXiv:2401.00588).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from nanokv.engine.request import Request

INPUT = 1  # the paper's w_p, weight of a prompt's token
OUTPUT = 2  # w_q, of an answer's token


class Asking(Protocol):
    """Anything that waits for its turn."""

    @property
    def client(self) -> str: ...


Waiting = TypeVar("Waiting", bound=Asking)


class Client(NamedTuple):
    """The counter of a client, and the tokens that it was served since the engine was made."""

    counter: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0


class Turns:
    """Counters by the name of the client (`Request.client`); a name is kept for good."""

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self.last = ""  # the client that was admitted last

    def counter(self, name: str) -> int:
        """Weighted tokens; 0 for a client that is not known yet."""
        return self.clients.get(name, Client()).counter

    def arrive(self, request: Asking, waiting: Sequence[Asking]) -> None:
        """Lift the counter of a client that had no request in `waiting`; before it is added."""
        name = request.client
        if any(other.client == name for other in waiting):
            return
        others = {other.client for other in waiting} or {self.last}
        least = min(self.counter(other) for other in others)
        client = self.clients.get(name, Client())
        self.clients[name] = client._replace(counter=max(client.counter, least))

    def first(self, waiting: Sequence[Waiting]) -> Waiting:
        """The one whose turn it is; `waiting` is not empty and in order of arrival."""
        if len(self.clients) == 1:
            return waiting[0]
        return min(waiting, key=lambda request: self.counter(request.client))

    def count(self, name: str, tokens: int) -> None:
        """Count prompt tokens that were computed without a request, such as those of embeddings."""
        self.last = name
        client = self.clients.get(name, Client())
        self.clients[name] = client._replace(
            counter=client.counter + INPUT * tokens, prompt_tokens=client.prompt_tokens + tokens
        )

    def charge(self, request: "Request") -> None:
        """Count what an admitted request was served since the last call; repeating it is safe."""
        client = self.clients.get(request.client, Client())
        served = request.prompt_tokens, len(request.tokens)
        prompt = served[0] - request.charged[0]
        new = served[1] - request.charged[1]
        client = Client(
            client.counter + INPUT * prompt + OUTPUT * new,
            client.prompt_tokens + prompt,
            client.new_tokens + new,
        )
        # One statement, so that an interrupt never leaves tokens that count twice.
        self.clients[request.client], request.charged = client, served
