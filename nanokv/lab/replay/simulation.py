"""One run of a trace over an index, and what it found.

A hit counts from the beginning of a prompt up to the first page that is missing. A recurrent model
can go on only from a position whose state was kept, a snapshot: there a hit counts up to the last
snapshot before its end.
"""

from dataclasses import dataclass, replace

from nanokv.errors import NanoKVError
from nanokv.lab.replay.indexes import INDEXES
from nanokv.lab.replay.order import arrival, longest_prefix
from nanokv.lab.replay.policies import POLICIES
from nanokv.lab.replay.traces import Request, Trace


@dataclass(frozen=True)
class Setup:
    """One server: how it stores pages, and how many."""

    page: int  # tokens
    pages: int | None = None  # that fit into its memory; None = unlimited
    index: str = "flat"
    policy: str = "lru"
    window: int = 1  # waiting requests of which the longest cached prefix is next
    snapshot: int = 0  # tokens between two snapshots of a recurrent state; 0 = attention only
    weight: int = 0  # tokens whose keys and values take as many bytes as a snapshot

    @property
    def capacity(self) -> int | None:
        """Pages that fit beside their snapshots into the memory of `pages` pages."""
        if self.pages is None or not self.snapshot:
            return self.pages
        return self.pages * self.snapshot // (self.snapshot + self.weight)


@dataclass
class Result:
    """The sums over all requests."""

    setup: Setup
    requests: int = 0
    pages: int = 0  # of all prompts
    tokens: int = 0
    hit_requests: int = 0  # with at least one page
    hit_pages: int = 0
    hit_tokens: int = 0

    def count(self, request: Request, found: int) -> None:
        """Add a request, of which `found` pages were held."""
        page, snapshot = self.setup.page, self.setup.snapshot
        tokens = min(found * page, request.tokens)
        if snapshot:
            tokens = tokens // snapshot * snapshot
            found = tokens // page
        self.pages += request.pages
        self.tokens += request.tokens
        self.hit_requests += tokens > 0
        self.hit_pages += found
        self.hit_tokens += tokens

    @property
    def rate(self) -> float:
        """Reused pages per page of the prompts."""
        return self.hit_pages / max(1, self.pages)

    @property
    def token_rate(self) -> float:
        """Reused tokens per token of the prompts."""
        return self.hit_tokens / max(1, self.tokens)


class Replay:
    """Runs setups over one trace. What several of them share is computed once."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.requests: dict[int, list[Request]] = {}  # by page size
        self.done: dict[Setup, Result] = {}

    def __call__(self, setup: Setup) -> Result:
        """Raises NanoKVError for a page size that the trace lacks, and for Belady's bound with
        requests in another order than that of the trace."""
        if setup.window > 1 and setup.policy == "belady":
            raise NanoKVError(
                f"Belady's bound with {setup.window:,} waiting requests: it knows the future only "
                "of requests in a fixed order",
                "another policy, or requests as they came",
            )
        same = setup
        if setup.policy == "belady":
            same = replace(setup, index="flat")  # where any page can go: the bound of all indexes
        if setup.pages is None:  # nothing is ever evicted
            same = replace(setup, index="flat", policy="lru")
        if same not in self.done:
            self.done[same] = self.run(same)
        return replace(self.done[same], setup=setup)

    def run(self, setup: Setup) -> Result:
        """All requests, one after the other."""
        if setup.page not in self.requests:
            self.requests[setup.page] = self.trace.requests(setup.page)
        requests = self.requests[setup.page]
        policy = POLICIES[setup.policy]()
        policy.start(requests)
        index = INDEXES[setup.index](policy, setup.capacity)
        order = longest_prefix if setup.window > 1 else arrival
        result = Result(setup, len(requests))
        for now, request in enumerate(order(requests, index, setup.window)):
            found = index.match(request.keys[: request.sought])
            index.store(request, found, now)
            result.count(request, found)
        return result


def replay(trace: Trace, setup: Setup) -> Result:
    """One setup over a trace; errors as for Replay."""
    return Replay(trace)(setup)
