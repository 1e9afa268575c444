"""Programs beside this one: when they are noticed, what changes then, and that answers do not."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import nanokv
from nanokv.fast import optimize
from nanokv.lab.study import debug
from nanokv.support import neighbours
from nanokv.support.neighbours import Crowd, ShortWaits, Usage, Watch, fewer_threads, watch
from small_model import needs_kernels, small

# A model whose steps need no particular number of threads.
KERNELS_ALONE = SimpleNamespace(any_threads=True)
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/stat is Linux's")


class Waits:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def hold(self, threads):
        self.told.append(threads)

    def release(self):
        self.told.append("release")


class Machine:
    """Its clock and its processor times go on as they are told."""

    def __init__(self):
        self.usage = Usage(100, 2000, 30)

    def __call__(self):
        return self.usage

    def goes_on(self, others, own, seconds=0.1):
        clock, busy, mine = self.usage
        self.usage = Usage(clock + seconds, busy + seconds * (others + own), mine + seconds * own)
        return self.usage


def crowd_of(cores, threads):
    machine = Machine()
    return Crowd(cores, threads, machine()), machine


@pytest.fixture
def two_threads(monkeypatch):
    """Nobody watches yet, and the user has chosen nothing."""
    for name in neighbours.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(neighbours, "WATCH", None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def crowded(two_threads, monkeypatch):
    """Another program keeps one of two cores busy."""
    crowd, machine = crowd_of(2, 2)
    crowd.look(machine.goes_on(others=1, own=1))
    monkeypatch.setattr(neighbours, "WATCH", Watch(crowd, Waits(), machine))


# --- when a neighbour is noticed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "threads", "others", "crowded", "free"),
    [
        (2, 2, 0, False, 2),
        (2, 2, 0.3, False, 2),  # a moment now and then
        (2, 2, 0.5, True, 1),  # what a busy program gets of a core beside one that spins
        (2, 2, 1, True, 1),
        (2, 2, 2, True, 1),  # one thread at least
        (16, 16, 1, True, 15),
        (16, 16, 1.3, True, 15),
        (16, 16, 1.5, True, 14),
        (16, 8, 1, False, 16),
        (16, 8, 9, True, 7),  # only cores that our threads would use
    ],
)
def test_a_core_that_others_keep_busy_is_noticed(cores, threads, others, crowded, free):
    crowd, machine = crowd_of(cores, threads)
    crowd.look(machine.goes_on(others, own=threads))
    assert (crowd.crowded, crowd.free) == (crowded, free)


def test_our_own_work_is_nobody_elses():
    crowd, machine = crowd_of(2, 2)
    crowd.look(machine.goes_on(others=0, own=2))
    assert not crowd.crowded


def test_between_the_two_limits_it_stays_what_it_was():
    crowd, machine = crowd_of(2, 2)
    found = []
    for others in (0.3, 0.5, 0.3, 0.1, 0.3):
        crowd.look(machine.goes_on(others, own=1))
        found.append(crowd.crowded)
    assert found == [False, True, True, False, False]


def test_only_the_time_since_the_last_look_counts():
    crowd, machine = crowd_of(2, 2)
    crowd.look(machine.goes_on(others=2, own=0, seconds=60))
    crowd.look(machine.goes_on(others=0, own=2))
    assert not crowd.crowded and crowd.free == 2


def test_waits_are_short_while_it_is_crowded():
    crowd, machine = crowd_of(2, 2)
    waits = Waits()
    watched = Watch(crowd, waits, machine)
    for others in (0, 1, 1, 0):
        machine.goes_on(others, own=1)
        watched.look()
    assert waits.told == ["release", 2, 2, "release"]


# --- whether anybody watches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_chosen_stays(two_threads, monkeypatch, name):
    monkeypatch.setenv(name, "1000")
    watch(2)
    assert neighbours.WATCH is None


def test_one_thread_waits_for_nobody(two_threads):
    watch(1)
    assert neighbours.WATCH is None


def no_processor_times():
    raise FileNotFoundError("/proc/stat")


def test_a_system_that_does_not_say_who_computes_changes_nothing(two_threads, monkeypatch):
    monkeypatch.setattr(neighbours, "ProcessorTimes", no_processor_times)
    watch(2)
    assert neighbours.WATCH is None
    with fewer_threads(KERNELS_ALONE, 1):
        assert torch.get_num_threads() == 2


@linux
def test_a_process_is_watched_once(two_threads, monkeypatch):
    monkeypatch.setattr(neighbours.Watch, "run", lambda watched: ended.wait())
    ended = threading.Event()
    watch(2)
    first = neighbours.WATCH
    watch(3)
    assert neighbours.WATCH is first and first.crowd.threads == 3 and first.daemon
    ended.set()
    first.join()


@linux
def test_loading_and_optimizing_begin_to_watch(two_threads, monkeypatch):
    for module in (nanokv.loading, nanokv.fast.optimizing):
        monkeypatch.setattr(module, "watch", told := [].append)
        nanokv.load("tiny") if module is nanokv.loading else optimize(small()[0])
        assert told.__self__ == [2], module


@linux
def test_processor_times_are_those_of_the_cores_of_this_process(tmp_path, monkeypatch):
    read = neighbours.ProcessorTimes()
    assert len(read.cores) == len(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 4 500 600 8 16 32 7 7\ncpu1 9 9 9 9 9 9 9 9 9 9\nintr 5 5\n"
    )
    read.file, read.cores = stat.open(), {"cpu0"}
    assert read.busy() == 1 + 2 + 4 + 8 + 16 + 32
    assert read().busy == 63 / os.sysconf("SC_CLK_TCK") == read().busy


# --- what changes -----------------------------------------------------------------------------------------------------


def test_a_step_of_one_row_has_the_free_cores(crowded):
    with fewer_threads(KERNELS_ALONE, 2):
        assert torch.get_num_threads() == 2
    with pytest.raises(RuntimeError, match="in the step"), fewer_threads(KERNELS_ALONE, 1):
        assert torch.get_num_threads() == 1
        raise RuntimeError("in the step")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    neighbours.WATCH.crowd.free = 8
    with fewer_threads(KERNELS_ALONE, 1):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_decode_takes_them_and_prefill_does_not(crowded, rows, alike, monkeypatch):
    """Decode of one row does, where torch attends with the same bits."""
    monkeypatch.setattr(neighbours, "attends_alike", lambda *_: alike)
    model, ids = small(vocab_size=128)
    used = []
    model.register_forward_pre_hook(lambda *call: used.append(torch.get_num_threads()))
    cache = nanokv.make_cache("dict", model.config, batch_size=rows)
    nanokv.prefill(model, ids.expand(rows, -1), cache)
    nanokv.decode(model, ids[:, :1].expand(rows, -1), cache, cache.length)
    assert used == [2, 1 if rows == 1 and alike else 2]
    assert torch.get_num_threads() == 2


def test_who_watches_a_decode_does_not_see_the_trial(crowded):
    """A recorded forward on a busy processor has the calls of the model and no others."""
    neighbours.attends_alike.cache_clear()
    model, ids = small(vocab_size=128)
    cache = nanokv.make_cache("dict", model.config)
    with debug.watch(model) as passes:
        nanokv.decode(model, ids[:, :1], cache, 0)
    assert neighbours.attends_alike.cache_info().misses == 1
    assert [one.calls for one in passes] == [model.config.num_hidden_layers]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("changes", "threads", "free", "expected"),
    [
        ({}, 2, 1, 1),
        ({}, 2, 2, 2),
        ({}, 4, 3, 2),
        ({}, 4, 1, 1),
        ({}, 3, 2, 3),
        ({"vocab_size": 97}, 2, 1, 2),
        ({"intermediate_size": 144}, 2, 1, 2),
        ({"intermediate_size": 160}, 4, 3, 4),
    ],
)
def test_a_plain_model_takes_a_number_of_threads_that_rounds_alike(
    changes, threads, free, expected
):
    config = small(**{"vocab_size": 128, "intermediate_size": 256} | changes)[0].config
    assert neighbours.same_bits(config, threads, free) == expected


FORMATS = [
    "plain",
    pytest.param(None, marks=needs_kernels),
    pytest.param("int4", marks=needs_kernels),
]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [97, 160])
@pytest.mark.parametrize("weights", FORMATS)
def test_an_answer_is_the_same_to_the_last_bit(crowded, dtype, vocab_size, weights):
    """Large enough for two threads: they share the products of 2.6 MB."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1280,
        "num_hidden_layers": 2,
        "vocab_size": vocab_size,
    }
    model, ids = small(dtype, **sizes)
    model = model if weights == "plain" else optimize(model, weights)
    found = []
    for free in (1, 2):
        neighbours.WATCH.crowd.free = free
        cache = nanokv.make_cache("dict", model.config)
        nanokv.prefill(model, ids, cache)
        found.append(
            torch.stack([nanokv.decode(model, ids[:, t : t + 1], cache, 40 + t) for t in range(20)])
        )
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [128, 192, 576, 1024])
def test_torch_rounds_alike_in_any_number_of_threads_that_divides_a_matrix(two_threads, rows):
    x, weight = torch.randn(1, 640), torch.randn(rows, 640)
    found = []
    for threads in (n for n in (1, 2, 3, 4, 8) if rows % (16 * n) == 0):
        torch.set_num_threads(threads)
        found.append(torch.nn.functional.linear(x, weight))
    assert len(found) > 2 and all(torch.equal(found[0], one) for one in found)


SLEEPS = """
import resource, time, torch
from nanokv.support.neighbours import ShortWaits, libgomp
def sleeps():
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
torch.set_num_threads(cores := 2)
x, waits, found = torch.ones(1 << 18), ShortWaits(cores), []
for hold in (False, True, False):
    waits.hold(cores) if hold else waits.release()
    time.sleep(0.1)
    before = sleeps()
    for _ in range(200):
        x.add_(1)
        began = time.perf_counter()
        while time.perf_counter() - began < 0.0003: pass
    found.append(sleeps() - before)
print(libgomp() is not None, *found)
"""


@pytest.mark.slow
@linux
@pytest.mark.serial
@pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: [0])(0)) != 2, reason="libgomp counts cores"
)
def test_threads_sleep_while_short_waits_are_held():
    """The second thread sleeps between two operators of torch that are 0.3 ms apart, or it spins."""
    env = {name: value for name, value in os.environ.items() if name not in neighbours.CHOSEN}
    env["OMP_NUM_THREADS"] = "2"
    run = subprocess.run([sys.executable, "-c", SLEEPS], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    runtime, before, held, after = run.stdout.split()
    if runtime == "False":
        pytest.skip("torch has another OpenMP")
    assert int(held) >= 100 and int(held) > int(before) + int(after), run.stdout


def test_short_waits_are_held_once_and_end(monkeypatch):
    waits, teams = ShortWaits(2), []
    monkeypatch.setattr(neighbours, "libgomp", lambda: "runtime")
    monkeypatch.setattr(neighbours, "_keep_team", lambda *team: teams.append(team))
    for _ in range(2):
        waits.hold(2)
    assert [(runtime, size) for runtime, size, _ in teams] == [("runtime", 2)]
    (over,) = {over for _, _, over in teams}
    waits.release()
    waits.release()
    assert over.is_set()
    ShortWaits(16).hold(4)
    assert teams[-1][1] == 14  # with the four of ours, where one is in both: 17 of 16


def test_without_libgomp_waits_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(neighbours, "libgomp", lambda: None)
    waits = ShortWaits(2)
    waits.hold(2)
    assert waits.over is None
    waits.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_begins_anew(crowded):
    child = os.fork()
    if child == 0:
        os._exit(0 if neighbours.WATCH is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert neighbours.WATCH is not None
