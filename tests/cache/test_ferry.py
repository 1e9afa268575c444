"""An offloaded cache beside a GPU, with streams that stand in for it: copies happen as late as their events allow.

The stream that computes runs at once, as a CPU does. The copying one keeps what it is asked for until somebody waits:
a wait that is missing reads what a buffer held before. That a buffer is not written too early is seen by the order of
events. What only a GPU shows is the time that is won.
"""

import threading
from types import SimpleNamespace

import pytest
import torch

from nanokv.cache import KVCache, ferry, make_cache, stores
from nanokv.inference import decode, prefill, verify_draft
from oracle import SHAPES, gap, pair, random_ids


class Event:
    def __init__(self):
        self.stream, self.place = None, 0

    def record(self, stream):
        self.stream, self.place = stream, len(stream.work)


class Stream:
    """Work is done in order, when somebody waits for it."""

    lock = threading.RLock()

    def __init__(self, device=None):
        self.work, self.finished, self.host_waits = [], 0, 0

    def ask(self, work):
        self.work.append(work)

    def run(self, end):
        with self.lock:
            while self.finished < end:
                self.work[self.finished]()
                self.finished += 1

    def wait_event(self, event):
        if event.stream is not None:
            self.ask(lambda: event.stream.run(event.place))

    def wait_stream(self, other):
        place = len(other.work)
        self.ask(lambda: other.run(place))

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def synchronize(self):
        self.host_waits += 1
        self.run(len(self.work))


class Computing(Stream):
    """As far as it was asked."""

    def ask(self, work):
        super().ask(work)
        self.run(len(self.work))


@pytest.fixture
def gpu(monkeypatch):
    """Every cache is far from what computes."""
    computing, current = Computing(), threading.local()

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            current.stream = self.stream

        def __exit__(self, *_):
            current.stream = computing

    seen = SimpleNamespace(computing=computing, ferries=[], asked=[], busy=set())

    class Watched(ferry.Ferry):
        def __init__(self, device):
            super().__init__(device)
            seen.ferries.append(self)

        def near(self, rows):
            assert self.turn not in {slot for owner, slot in seen.busy if owner is self}
            seen.asked.append("near")
            return super().near(rows)

        def away(self, rows, new):
            seen.asked.append("away")
            super().away(rows, new)

    def use(arriving):
        seen.busy.add((arriving.ferry, arriving.slot))
        seen.asked.append("use")
        return real_use(arriving)

    def done(arriving):
        seen.busy.discard((arriving.ferry, arriving.slot))
        real_done(arriving)

    real_use, real_done = ferry.Arriving.use, ferry.Arriving.done
    monkeypatch.setattr(ferry.Arriving, "use", use)
    monkeypatch.setattr(ferry.Arriving, "done", done)
    monkeypatch.setattr("nanokv.cache.offloaded.ferry_for", Watched)
    monkeypatch.setattr(
        ferry, "copy", lambda target, source: current.stream.ask(lambda: target.copy_(source))
    )
    host_rows = lambda shape, dtype, pinned: ferry_rows(shape, dtype, False)  # noqa: E731
    ferry_rows = ferry.host_rows
    monkeypatch.setattr(stores, "host_rows", host_rows)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name, fake in (
        ("Stream", Stream),
        ("Event", Event),
        ("stream", On),
        ("current_stream", lambda device: computing),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    return seen


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


def steps(model, cache, path):
    """Chunks, steps, a draft that is partly taken back, a fork, beams, a file: all logits."""
    ids = random_ids(3, 2, 100)
    out = [prefill(model, ids[:, :70], cache), prefill(model, ids[:, 70:80], cache, 70)]
    for t in range(80, 84):
        out.append(decode(model, ids[:, t : t + 1], cache, t))
    out.append(verify_draft(model, ids[:, 84:90], cache, 84).flatten(0, 1))
    cache.truncate(86)
    out.append(decode(model, ids[:, 86:87], cache, 86))
    other = cache.fork()
    for each in (cache, other, cache):
        out.append(decode(model, ids[:, 87:88], each, each.length))
    cache.reorder([1, 0])
    out.append(decode(model, ids[:, 88:89], cache, 89))
    cache.save(path)
    loaded = KVCache.load(path, model.config)
    out.append(decode(model, ids[:, 90:91], loaded, 90))
    cache.truncate(0)
    out.append(prefill(model, ids[:, :65], cache))
    return torch.cat(out)


@pytest.mark.parametrize("to", ["host", "disk"])
def test_rows_arrive_before_they_are_used(model, gpu, tmp_path, to):
    right = steps(model, make_cache("dict", model.config, 2), tmp_path / "near")
    far = steps(model, make_cache("offloaded", model.config, 2, to=to), tmp_path / "far")
    assert gap(far, right) == 0
    assert gpu.ferries and gpu.asked.count("use") > 40


@pytest.mark.parametrize("missing", ["arrived", "written"])
def test_without_its_events_the_result_would_be_wrong(model, gpu, monkeypatch, tmp_path, missing):
    """The stand-in can fail."""
    if missing == "arrived":
        monkeypatch.setattr(ferry.Arriving, "use", lambda arriving: arriving.rows)
    else:
        monkeypatch.setattr(ferry.Ferry, "wait", lambda self: None)  # before the store grows
    right = steps(model, make_cache("dict", model.config, 2), tmp_path / "near")
    far = steps(model, make_cache("offloaded", model.config, 2, to="host"), tmp_path / "far")
    assert not gap(far, right) == 0


def test_the_next_layer_is_asked_for_before_this_one_computes(model, gpu):
    """And the host waits for nobody."""
    cache, ids = make_cache("offloaded", model.config, to="host"), random_ids(3, 1, 40)
    prefill(model, ids[:, :30], cache)
    decode(model, ids[:, 30:31], cache, 30)
    (carrier,) = gpu.ferries
    waits = carrier.stream.host_waits
    gpu.asked.clear()
    decode(model, ids[:, 31:32], cache, 31)
    assert gpu.asked == ["away", "near", "use"] * len(model.layers)
    assert carrier.stream.host_waits == waits


def test_two_buffers_serve_all_layers_and_all_steps(model, gpu):
    """Memory for every copy would be memory for all layers: the host is far ahead of a GPU."""
    cache, ids = make_cache("offloaded", model.config, to="host"), random_ids(3, 1, 100)
    prefill(model, ids[:, :80], cache)
    decode(model, ids[:, 80:81], cache, 80)
    (carrier,) = gpu.ferries
    places = [buffer.data_ptr() for buffer in carrier.buffers]
    for t in range(81, 95):
        decode(model, ids[:, t : t + 1], cache, t)
    assert [buffer.data_ptr() for buffer in carrier.buffers] == places
    decode(model, ids[:, 95:96], cache, 95)
    for _ in range(8):
        decode(model, ids[:, 96:97], cache, cache.length)
    assert all(len(buffer) <= cache.length * 5 // 4 for buffer in carrier.buffers)


def test_a_buffer_is_written_after_its_last_use_only(gpu):
    """Its copy waits for the event that the last use recorded."""
    carrier = ferry.Ferry(torch.device("cpu"))
    rows = torch.zeros(4, 2, 1, 1, 2)
    first = carrier.near(rows)
    used = carrier.used[first.slot]
    first.use()
    assert used.stream is None
    first.done()
    assert used.stream is gpu.computing
    carrier.near(rows)  # the other buffer
    waited, wait = [], carrier.stream.wait_event
    carrier.stream.wait_event = lambda event: waited.append(event) or wait(event)
    assert carrier.near(rows).slot == first.slot and waited == [used]


def test_rows_leave_after_they_were_computed_and_stay_until_then(gpu, monkeypatch):
    carrier, events = ferry.Ferry(torch.device("cpu")), []
    monkeypatch.setattr(carrier.stream, "wait_stream", lambda other: events.append(other))
    monkeypatch.setattr(carrier.stream, "ask", lambda work: events.append("copy"))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: events.append((len(x), stream))
    )
    carrier.away(torch.zeros(4, 2), torch.zeros(4, 2))
    assert events == [gpu.computing, "copy", (4, carrier.stream)]


def test_on_a_cpu_nothing_is_carried():
    cache = make_cache("offloaded", pair(**SHAPES["G2-untied-bias"])[1].config, to="host")
    assert cache.ferry(torch.device("cpu")) is None and cache.ferry(torch.device("meta")) is None
