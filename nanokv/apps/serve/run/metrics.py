"""/metrics for Prometheus: requests, seconds to the first and between tokens, pages, reuse, keys."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanokv.engine import Engine
from nanokv.engine.turns import Client

# Upper bounds of the histograms' buckets, in seconds.
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
GAUGES = {
    "requests_running": "Requests that hold pages",
    "requests_waiting": "Requests that wait for pages",
    "pages": "Pages of the pool",
    "pages_free": "Pages that are empty or hold an unused prefix",
    "snapshots": "Snapshots of recurrent layers that a prompt can resume at",
    "snapshot_bytes": "Bytes of these snapshots, besides the pages",
    "prefill_worker_up": "1 while a separate process prefills",
    "prefills_waiting": "Requests whose prompts wait for that process or are computed by it",
    "prefill_worker_pages": "Pages of its pool",
    "prefill_worker_pages_free": "Pages of its pool that were free when it was last idle",
}
COUNTERS = {
    "prefill_tokens": "Prompt tokens computed",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache",
    "snapshot_hits": "Times that a prompt resumed at a snapshot",
    "generated_tokens": "Tokens generated",
    "preemptions": "Requests that lost their pages and had to wait again",
    "handover_prompts": "Prompts that the prefill process has computed and sent",
    "handover_bytes": "Bytes of their keys, values and logits",
    "handover_seconds": "Seconds that these took to arrive",
    "handover_lost": "Prompts that the engine prefilled because that process had ended",
}


class KeyCounts(NamedTuple):
    """What an API key has and had. `number` is its place among the --api-key flags, from 1."""

    number: str
    places: int
    served: Client


def engine_counts(engine: Engine) -> dict[str, float]:
    """Counts of the engine, in its thread, because the pool recounts its pages."""
    counts = engine.metrics
    scheduler = engine.scheduler
    return {
        "requests_running": len(scheduler.running),
        "requests_waiting": len(scheduler.waiting),
        "pages": len(engine.pool.references),
        "pages_free": engine.pool.available(),
        "snapshots": len(engine.pool.snapshots),
        "snapshot_bytes": engine.pool.snapshots.nbytes,
        "snapshot_hits": engine.pool.snapshots.hits,
        "prefill_tokens": counts.prefill_tokens,
        "prefix_hit_tokens": counts.reused_tokens,
        "preemptions": counts.preemptions,
    }


class Metrics:
    """Counters and histograms of the server; may be used from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "nanokv_requests", "Requests by how they ended", ["reason"], registry=self.registry
        )
        self._first = self._histogram(
            "time_to_first_token", "Seconds from arrival to the first token", FIRST
        )
        self._between = self._histogram(
            "inter_token", "Seconds between two tokens of a request", BETWEEN
        )
        self._state: dict[str, float] = {}
        self._keys: Sequence[KeyCounts] = ()
        self._generated = 0
        # Any object with `collect` works, whatever the stub says.
        self.registry.register(self)  # type: ignore[arg-type]

    def _histogram(self, name: str, text: str, buckets: tuple) -> Histogram:
        return Histogram(f"nanokv_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def token(self, seconds: float, first: bool) -> None:
        """Count one token, `seconds` after the token before it, or after the request's arrival."""
        if first:
            self._first.observe(seconds)
        else:
            self._between.observe(seconds)
        self._generated += 1

    def count(self, reason: str) -> None:
        """Count a request that has ended or was refused."""
        self._requests.labels(reason).inc()

    def collect(self) -> Iterator[Metric]:
        """The engine's counts; prometheus_client calls this for each scrape."""
        for table, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, text in table.items():
                if name in self._state:
                    yield family(f"nanokv_{name}", text, value=self._state[name])
        if self._keys:
            yield from self._by_key()

    def _by_key(self) -> Iterator[Metric]:
        places = GaugeMetricFamily(
            "nanokv_key_places", "Answers of an API key that run or wait", labels=["key"]
        )
        prompt = CounterMetricFamily(
            "nanokv_key_prompt_tokens", "Prompt tokens that count for its turns", labels=["key"]
        )
        new = CounterMetricFamily(
            "nanokv_key_generated_tokens", "Tokens generated for it", labels=["key"]
        )
        for number, taken, served in self._keys:
            places.add_metric([number], taken)
            prompt.add_metric([number], served.prompt_tokens)
            new.add_metric([number], served.new_tokens)
        yield from (places, prompt, new)

    def text(self, state: dict[str, float], keys: Sequence[KeyCounts] = ()) -> bytes:
        """All metrics in Prometheus' format. `state`: the engine's counts by name."""
        self._keys = keys
        self._state = state | {"generated_tokens": self._generated}
        return generate_latest(self.registry)
