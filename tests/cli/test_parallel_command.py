"""`--tensor-parallel N` and torchrun as a user types them: the same words, one line for an error, no process left.

Each command starts ranks of its own, which import torch: seconds each.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx2
import psutil
import pytest

import nanokv
from cli_helpers import environment, run_cli, spawn_cli
from nanokv.apps.cli import main, make_parser
from nanokv.apps.cli.commands import generate
from nanokv.apps.cli.common import loading, options, ranks
from nanokv.errors import NanoKVError
from nanokv.parallel.group import Alone, free_port
from nanokv.parallel.group import environment as rank_environment

QUESTION = "My name is Ada. What is my name?"
GREEDY = ("generate", QUESTION, "-q", "-t", "0", "--plain")


def ranks_of(process) -> list[psutil.Process]:
    """The two that the command starts, once they are there."""
    until = time.monotonic() + 30
    while len(found := psutil.Process(process.pid).children()) < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    return found


def ended(processes) -> bool:
    return not psutil.wait_procs(processes, timeout=10)[1]


@pytest.fixture(scope="module")
def greedy():
    """What one process says."""
    return run_cli(*GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-t", "1", "--seed", "7")], ids=["greedy", "sampled"])
def test_two_ranks_say_what_one_process_says(flags, greedy):
    two = run_cli(*GREEDY, *flags, "--tensor-parallel", "2")
    one = run_cli(*GREEDY, *flags) if flags else greedy
    assert (two.returncode, two.stdout, two.stderr) == (
        0,
        one.stdout,
        one.stderr,
    ) and one.stdout.strip()


@pytest.mark.slow
def test_torchrun_says_it_too(greedy):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
        "-m",
        "nanokv",
        *GREEDY,
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout == greedy.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate", "Hi", "--tensor-parallel", "4"), b"4"),
        (("generate", "Hi", "--tensor-parallel", "2", "--fast"), b"--fast with --tensor-parallel"),
        (("profile", "--tensor-parallel", "2"), b"runs in one process"),
        (
            ("bench", "--tensor-parallel", "2", "--against", "transformers"),
            b"--against with --tensor-parallel",
        ),
        (("serve", "--tensor-parallel", "2", "--prefill-worker"), b"leave one of them out"),
        (("generate", "Hi", "--tensor-parallel", "0"), b"--tensor-parallel"),
    ],
)
def test_what_does_not_go_is_refused_before_anything_starts(words, said):
    began = time.monotonic()
    done = run_cli(*words)
    assert (
        done.returncode == 2
        and said in done.stderr
        and b"Traceback" not in done.stderr
        and not done.stdout
    )
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("number", "waits"), [("0", []), ("1", [ranks.FIRST_S])])
def test_rank_0_speaks_before_torchrun_ends_it(number, waits, monkeypatch, capsys):
    """The agent ends all ranks when the first one fails, and only rank 0 is heard."""
    for name, value in {
        "RANK": number,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }.items():
        monkeypatch.setenv(name, value)
    slept = []
    monkeypatch.setattr(ranks.time, "sleep", slept.append)
    for words in (
        ["generate", "Hi", "--no-such-flag"],
        ["generate", "Hi", "--tensor-parallel", "3"],
    ):
        slept.clear()
        assert main(words) == 2 and slept == waits
    assert "--tensor-parallel 3, but 2 ranks were started" in capsys.readouterr().err


class Said(Alone):
    """Keeps what a rank would compare with the others."""

    def __init__(self):
        self.found = {}

    def check_alike(self, what, value, hint=""):
        self.found[what] = value


def said_with(*flags) -> dict:
    args, said = make_parser("generate", generate).parse(["Hi", *flags]), Said()
    ranks.compare_flags(said, args)
    loading.load_model(
        options.model_options(args, options.speed_options(args)),
        options.cache_options(args),
        options.output_options(args),
        said,
    )
    return said.found


@pytest.mark.parametrize(
    ("flags", "differ"),
    [
        (("--cache", "sliding:window=8"), ["--cache"]),
        (("--dtype", "bfloat16"), ["--dtype", "the dtype"]),
        (("--context", "64"), ["--context"]),
        (("--speculate", "ngram"), ["--speculate"]),
        (("--beams", "2"), ["--beams"]),
        (("--length-penalty", "0"), ["--length-penalty"]),
        (("--temperature", "1"), []),
        (("--threads", "2"), []),
    ],
    ids=lambda flags: flags[0] if flags else "",
)
def test_flags_that_change_what_a_rank_computes_are_compared(flags, differ):
    """A rank with another cache gave fluent answers that were wrong."""
    one, two = said_with(), said_with(*flags)
    assert [what for what in one if one[what] != two[what]] == differ and "config.json" in one


@pytest.mark.parametrize(
    "flags",
    [
        ("--requests", "4"),
        ("--quality",),
        ("--through", "cli"),
        ("--weights", "plain,int8"),
        ("--contexts", "8,x"),
        ("-m", "smollm2-135m-random"),
    ],
)
def test_what_bench_measures_in_one_process_is_refused_by_name(flags, cli):
    code, out, err = cli("bench", "--tensor-parallel", "2", *flags)
    assert (code, out) == (2, "") and (flags[0] in err or "num_attention_heads 9" in err)


@pytest.mark.slow
def test_bench_on_two_ranks_reads_half_of_the_bytes_on_each_and_prints_once():
    words = (
        "bench",
        "--contexts",
        "24",
        "--steps",
        "4",
        "--repeat",
        "2",
        "--weights",
        "plain",
        "--json",
    )
    one, two = (
        json.loads(run_cli(*words, *more).stdout) for more in ((), ("--tensor-parallel", "2"))
    )
    assert (one["ranks"], two["ranks"]) == (1, 2) and two["code"] == "plain"
    (whole,), (part,) = one["rows"], two["rows"]
    norms = sum(
        weight.nbytes for weight in nanokv.load("tiny")[0].parameters() if weight.dim() == 1
    )
    assert part["step_bytes"] == (whole["step_bytes"] + norms) / 2
    assert part["decode_tok_s"] > 0 and part["rounds"] == 2 and part["share"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.2, pytest.param(1.5, marks=pytest.mark.night), 4.0])
def test_a_rank_that_is_killed_ends_the_command(after):
    # Waits for its user.
    process = spawn_cli("chat", "-q", "--tensor-parallel", "2", stdin=subprocess.PIPE)
    ranks = ranks_of(process)
    time.sleep(after)
    ranks[-1].send_signal(signal.SIGKILL)
    assert process.wait(45) == 2
    stderr = process.stderr.read()
    assert b"rank" in stderr and b"Traceback" not in stderr and ended(ranks)


@pytest.fixture
def spawn():
    """spawn_cli in a session of its own; what still runs after the test is killed."""
    started = []
    yield (
        lambda *words, **popen: (
            started.append(spawn_cli(*words, start_new_session=True, **popen)) or started[-1]
        )
    )
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


TALKS = {"generate": ("Hi", "-q"), "chat": ("-q", "--no-loop-guard")}


def begin(spawn, command, folder, *flags, **popen):
    """An answer without end, of which something has been printed."""
    stdin = subprocess.PIPE if command == "chat" else subprocess.DEVNULL
    words = (command, *TALKS[command], "-m", folder, "-n", "50000", *flags)
    process = spawn(*words, stdin=stdin, **popen)
    if command == "chat":
        process.stdin.write(b"Hi\nAnd then?\n")
        process.stdin.flush()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("command", TALKS)
@pytest.mark.parametrize("who", [1, "all"])
def test_ctrl_c_to_one_rank_or_to_all_ends_all(command, who, endless_folder, spawn):
    """A rank that is not told by a terminal but by its number passes it on."""
    process = begin(spawn, command, endless_folder, "--tensor-parallel", "2")
    assert process.stdout.read(20)
    ranks, began = ranks_of(process), time.monotonic()
    ranks[who].send_signal(signal.SIGINT) if who == 1 else os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"") and ended(ranks)
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_ctrl_c_to_ranks_that_nobody_has_started_ends_each_with_130(endless_folder, spawn):
    """Also in a chat, where rank 0 leaves with an exception: the other one is told why."""
    port = free_port()
    both = [
        begin(spawn, "chat", endless_folder, env=rank_environment(rank, 2, port))
        for rank in range(2)
    ]
    assert both[0].stdout.read(20)
    for process in both:
        process.send_signal(signal.SIGINT)
    assert [(process.communicate(timeout=20)[1], process.returncode) for process in both] == [
        (b"", 130)
    ] * 2


@pytest.mark.slow
def test_a_port_that_is_in_use_is_one_line_on_every_rank(spawn):
    """The program there accepts and says nothing: rank 1 would wait for its first word for ever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, began = taken.getsockname()[1], time.monotonic()
        flags = ("generate", "Hi", "--debug")  # rank 1 is heard with --debug only
        both = [spawn(*flags, env=rank_environment(rank, 2, port)) for rank in range(2)]
        said = [process.communicate(timeout=60)[1].decode() for process in both]
    assert [process.returncode for process in both] == [2, 2] and time.monotonic() - began < 30
    for text, reason in zip(
        said, (f"port {port} of 127.0.0.1 is in use", "another program"), strict=True
    ):
        *_, error, hint = text.splitlines()
        assert error.startswith("nanokv: error: ") and reason in error and str(port) in error
        assert hint == "hint: another MASTER_PORT (torchrun --master-port)"


@pytest.mark.slow
def test_a_server_of_two_ranks_answers_and_ends_when_one_is_lost(greedy):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = spawn_cli("serve", "--tensor-parallel", "2", "--port", port, "-q")
    address, body = (
        f"http://127.0.0.1:{port}",
        {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0},
    )
    until = time.monotonic() + 60
    while True:
        try:
            assert httpx2.get(f"{address}/health").status_code == 200
            break
        except httpx2.TransportError:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.2)
    ranks = ranks_of(process)
    answer = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
    text = answer["choices"][0]["message"]["content"]
    assert text.strip() and text == greedy.stdout.decode().strip("\n")
    os.kill(ranks[-1].pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert (
        process.returncode == 2
        and b"rank" in stderr
        and b"Traceback" not in stderr
        and ended(ranks)
    )


def test_a_machine_needs_room_for_the_ranks_that_it_has():
    """Of four ranks on two machines each machine holds half, whatever the whole takes."""
    plan = loading.plan_model(
        options.ModelOptions("tiny"), options.CacheOptions(), options.OutputOptions()
    )
    whole = loading.weight_bytes(plan.config, 4) + loading.cache_memory(plan)
    with pytest.raises(NanoKVError, match="for weights"):
        loading.check_memory(plan, whole // 2)
    plan = replace(plan, ranks=SimpleNamespace(size=4, local=2))
    loading.check_memory(plan, whole // 2)
    with pytest.raises(NanoKVError, match="for weights"):
        loading.check_memory(plan, whole // 2 - 10)
