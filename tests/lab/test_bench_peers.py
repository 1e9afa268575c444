"""Peers of nanokv bench in processes of their own: each may fail in its own way, and no row of anybody is lost.

The peers are those of fake_peers.py, in the place of the real ones.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli_helpers import environment
from nanokv.apps.cli.common import random_model
from nanokv.lab.bench import peer, remote, rotation
from nanokv.lab.bench.remote import PeerError, Process, Remote
from nanokv.lab.bench.rotation import Rotation
from nanokv.lab.bench.runners import Ours, Runner
from nanokv.support import installing
from small_model import needs_kernels, small

BENCH = (
    "bench",
    "--contexts",
    "16,20",
    "--steps",
    "2",
    "--repeat",
    "2",
    "--threads",
    "1",
    "--weights",
    "fast",
)


@pytest.fixture
def fake(monkeypatch):
    """fake(name): this is what --against transformers means."""

    def put(name):
        for peer_name in ("transformers", "generate_batch"):
            monkeypatch.setitem(remote.PEERS, peer_name, f"fake_peers:{name}")

    return put


def gone(pid: int, seconds: float = 10) -> bool:
    """Has it ended? One that nobody has waited for yet has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("crashing", "ended by SIGILL"),
        ("killed", "ended by SIGKILL, as the system does when memory runs out"),
        ("leaving", "ended with exit code 3: the library says so"),
        ("raising", "RuntimeError: no room for"),
        ("hanging", "no answer after 2 s: ended"),
    ],
)
def test_a_peer_that_fails_is_a_row_that_says_so(cli, fake, name, why):
    """Its finished rounds and all of ours are there, and nothing went wrong."""
    fake(name)
    code, out, err = cli(*BENCH, "--against", "transformers", "--peer-timeout", "2", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    rounds = [(row["engine"], row["context"], row["rounds"]) for row in found["rows"]]
    assert rounds == [
        ("nanokv", 16, 2),
        ("transformers", 16, 1),
        ("nanokv", 20, 2),
        ("transformers", 20, 1),
    ]
    assert found["rows"][1]["decode_s"] == 0.25 and found["rows"][1]["step_bytes"] == 1000 + 17 * 10
    assert [(row["context"], row["rounds"], row["error"]) for row in found["failed"]] == [
        (16, 1, why),
        (20, 1, why),
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("crashing_at_once", "ended by SIGSEGV"),
    ],
)
def test_a_peer_that_never_begins_says_so_once_in_the_table(cli, fake, name, why):
    fake(name)
    code, out, _ = cli(*BENCH, "--against", "transformers")
    assert code == 0 and out.count("nanokv fast growing") == 2
    assert " ".join(out.split()).endswith(f"transformers float32 dynamic, context 16, 20: {why}")


@pytest.mark.slow
def test_many_requests_survive_a_peer_as_well(cli, fake):
    fake("hanging_batch")
    code, out, _ = cli(
        "bench",
        "--requests",
        "2",
        "--contexts",
        "16",
        "--steps",
        "2",
        "--repeat",
        "2",
        "--weights",
        "fast",
        "--against",
        "transformers",
        "--peer-timeout",
        "2",
        "--json",
    )
    found = json.loads(out)
    assert code == 0 and [(row["label"], row["rounds"]) for row in found["rows"]] == [
        ("nanokv fast engine", 2),
        ("transformers generate_batch", 1),
    ]
    (failed,) = found["failed"]
    assert failed["error"] == "no answer after 2 s: ended" and failed["rounds"] == 1


class Slow(Runner):
    """Takes 20 ms."""

    def __init__(self):
        super().__init__("stub", "slow", "none", 1, 1000, 10)

    def measure(self, *question, seed):
        time.sleep(0.02)
        return 0.01, 0.01


def test_a_peer_may_take_twenty_times_as_long_as_the_slowest_but_a_minute_always(monkeypatch):
    waits = Rotation([Slow(), Slow()], [5], 97, repeat=1, steps=1)
    list(waits.run())
    assert waits.runners[1].patience == 60
    monkeypatch.setattr(rotation, "LEAST", 0.01)
    list(waits.run())
    assert 0.4 <= waits.runners[1].patience < 60


# --- nothing stays behind ---------------------------------------------------------------------------------------------


@pytest.fixture
def bench_with_a_hanging_peer(tmp_path):
    """start(name) → (the bench, the process of its peer, which has begun to hang in round 2 of 2)."""
    started = []

    def start(name):
        where = tmp_path / "peer"
        script = (
            "import sys; from nanokv.lab.bench import remote; "
            f"remote.PEERS['transformers'] = 'fake_peers:{name}'; "
            "from nanokv.__main__ import main; sys.exit(main())"
        )
        path = os.pathsep.join(
            [str(Path(__file__).parents[1] / "support"), environment()["PYTHONPATH"]]
        )
        bench = subprocess.Popen(
            [sys.executable, "-c", script, *BENCH, "--against", "transformers", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment({"FAKE_PEER": str(where), "PYTHONPATH": path}),
        )
        started.append(bench)
        end = time.monotonic() + 60
        while (
            not (where.exists() and where.read_text())
            and time.monotonic() < end
            and bench.poll() is None
        ):
            time.sleep(0.05)
        return bench, int(where.read_text())

    yield start
    for bench in started:
        bench.kill()
        bench.communicate()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
@pytest.mark.parametrize(
    "name",
    [
        "hanging",
        pytest.param(
            "hanging_with_the_lock",
            marks=pytest.mark.skipif(
                sys.platform != "linux", reason="only Linux ends a process with its parent"
            ),
        ),
    ],
)
def test_a_bench_that_is_killed_leaves_no_peer(bench_with_a_hanging_peer, name):
    bench, pid = bench_with_a_hanging_peer(name)
    bench.kill()
    assert gone(pid)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_ctrl_c_ends_a_peer_that_hangs_and_shows_the_finished_rounds(bench_with_a_hanging_peer):
    bench, pid = bench_with_a_hanging_peer("hanging")
    bench.send_signal(signal.SIGINT)
    out, err = bench.communicate(timeout=20)
    assert bench.returncode == 130 and b"Traceback" not in err and gone(pid)
    assert {(row["engine"], row["context"]) for row in json.loads(out)["rows"]} == {
        (engine, context) for engine in ("nanokv", "transformers") for context in (16, 20)
    }


def test_what_peers_compute_is_not_the_work_of_others(monkeypatch):
    """A peer computes for a tenth of a second, however long that takes here. The machine is made up: it was busy for
    exactly that time, and ten seconds have passed.
    """
    from nanokv.lab.bench import machine

    if not os.path.exists("/proc/stat"):
        pytest.skip("needs /proc")
    ticks = os.sysconf("SC_CLK_TCK")
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    stat = SimpleNamespace(busy=0)

    def proc(path):
        if path == "/proc/stat":
            return io.StringIO(f"cpu {stat.busy} 0 0 0 0 0 0 0 0 0")
        return open(path)

    monkeypatch.setattr(machine, "time", clock)
    monkeypatch.setattr(machine, "open", proc, raising=False)
    monkeypatch.setattr(machine.os, "times", lambda: (0.0,) * 5)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with_it = machine.Others([busy.pid])
        without = machine.Others()
        before = machine._ticks(busy.pid)
        while machine._ticks(busy.pid) < before + ticks / 10 and busy.poll() is None:
            time.sleep(0.02)
        busy.send_signal(signal.SIGSTOP)
        stat.busy = machine._ticks(busy.pid)
        clock.perf_counter = lambda: 10.0
        spent = stat.busy / ticks / 10  # cores, on average
        assert spent >= 0.01
        assert without.cores() == pytest.approx(spent)
        assert with_it.cores() < spent / 2
    finally:
        busy.kill()
        busy.wait()


# --- the real ones ----------------------------------------------------------------------------------------------------


def checkpoint(folder):
    model, _ = small(torch.bfloat16)
    model.save(folder)
    return {"folder": str(folder), "dtype": "bfloat16", "device": "cpu", "threads": 1}


def test_a_peer_maps_the_file_that_the_bench_maps(tmp_path):
    """Nothing is copied: the tensors lie in the file."""
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs /proc")
    model = peer.model_of(**checkpoint(tmp_path / "model"))
    address = model.layers[1].mlp.up_proj.weight.data_ptr()
    with open("/proc/self/maps") as file:
        held = [line for line in file if line.rstrip().endswith("model.safetensors")]
    spans = [[int(number, 16) for number in line.split()[0].split("-")] for line in held]
    assert any(low <= address < high for low, high in spans)


@pytest.mark.slow
def test_transformers_in_its_own_process_reads_the_same_weights(tmp_path):
    model, _ = small(torch.bfloat16)
    process = Process(
        remote.PEERS["transformers"], checkpoint(tmp_path / "model") | {"cache": "dynamic"}
    )
    try:
        runner = Remote("transformers", "bfloat16", "dynamic", process)
        prefill, decode = runner.measure(97, 12, 2, seed=1)
        assert 0 < decode and 0 < prefill < 60
        assert runner.step_bytes(20) == Ours(
            model, "plain", "dict", {}, 1, torch.bfloat16
        ).step_bytes(20)
        # Ids that the model does not have.
        with pytest.raises(PeerError, match="IndexError: index out of range"):
            runner.measure(1 << 20, 12, 2, seed=1)
        assert len(runner.measure(97, 12, 2, seed=1)) == 2, "it goes on after an error"
    finally:
        process.end()


FAKE_LLAMA = """
import ctypes, os, signal

class Llama:
    def __init__(self, path, **settings):
        self.size = os.path.getsize(path)
        self._ctx, self.seen = self, 0
    def reset(self):
        self.seen = 0
    def eval(self, ids):
        self.seen += len(ids)
    def get_logits(self):
        return ctypes.cast((ctypes.c_float * 97)(), ctypes.POINTER(ctypes.c_float))

LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_Q4_0 = 7, 2

def llama_model_quantize_default_params():
    import types
    return types.SimpleNamespace()

def llama_model_quantize(source, target, params):
    if params.ftype == LLAMA_FTYPE_MOSTLY_Q4_0:
        os.kill(os.getpid(), signal.SIGILL)
    with open(source, "rb") as old, open(target, "wb") as new:
        new.write(old.read()[::2])
    return 0
"""


@pytest.mark.slow
def test_llama_cpp_reads_a_file_of_the_same_weights_and_one_variant_may_crash(
    cli, tmp_path, monkeypatch
):
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.syspath_prepend(tmp_path)
    model, _ = small(torch.bfloat16)
    monkeypatch.setitem(random_model.RANDOM, "small-random", model.config)
    code, out, _ = cli(
        "bench",
        "-m",
        "small-random",
        "--dtype",
        "bf16",
        "--contexts",
        "16",
        "--steps",
        "1",
        "--repeat",
        "1",
        "--weights",
        "plain",
        "--against",
        "llama.cpp,llama.cpp:q4_0,llama.cpp:q8_0",
        "--json",
    )
    found = json.loads(out)
    assert code == 0 and [(row["engine"], row["weights"]) for row in found["rows"]] == [
        ("nanokv", "plain"),
        ("llama.cpp", "bf16"),
        ("llama.cpp", "q8_0"),
    ]
    assert [(row["weights"], row["error"]) for row in found["failed"]] == [
        ("q4_0", "ended by SIGILL")
    ]
    full, half = (row["step_bytes"] for row in found["rows"][1:])
    assert half < full < 2 * half


@needs_kernels
def test_a_gguf_file_runs_as_stored_and_llama_cpp_reads_the_same_file(cli, tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "model.gguf"
    assert cli("convert", "tiny", str(path), "--type", "q8_0")[0] == 0
    few = "--contexts", "16", "--steps", "1", "--repeat", "1", "--json"
    code, out, err = cli("bench", "-m", str(path), *few, "--against", "llama.cpp:stored")
    assert code == 0, err
    stored, fast, theirs = json.loads(out)["rows"]
    assert (stored["weights"], fast["weights"]) == ("stored", "fast")
    assert stored["step_bytes"] < 0.6 * fast["step_bytes"]
    assert (theirs["engine"], theirs["weights"]) == ("llama.cpp", "stored")
    assert 0 <= theirs["step_bytes"] - path.stat().st_size < 1_000_000  # the file, and 17 tokens


def test_llama_cpp_that_is_not_installed_is_named(cli, tmp_path, monkeypatch):
    """A module of that name that cannot be imported stands in its way, installed or not."""
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = cli(
        "bench", "--against", "llama.cpp", "--contexts", "16", "--steps", "1", "--repeat", "1"
    )
    assert code == 0 and err == "" and "nanokv plain growing" in out
    hint = installing.hint(["llama-cpp-python", "gguf"])
    assert f"llama.cpp bf16 fp16, context 16: llama.cpp is not installed ({hint})" in " ".join(
        out.split()
    )
