"""Which code answers: the kernels where they are built, the plain model elsewhere, and never a wait for a compiler."""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli_helpers import run_cli
from nanokv.apps.cli import COMMANDS, make_parser
from nanokv.apps.cli.commands import bench, env
from nanokv.apps.cli.common import random_model, speed
from nanokv.apps.cli.common.loading import load_model
from nanokv.config import Config
from nanokv.errors import NanoKVError
from nanokv.fast import building, gpu, native, private
from nanokv.fast.model import FastTransformer
from nanokv.lab.bench import machine
from nanokv.parallel.group import ALONE
from oracle import tiny_config
from small_model import needs_kernels
from weights_loader.families import FAMILIES

PROMPT = "My name is Zorbla. What is my name?"


def parsed(*argv, command="generate"):
    """The options of that command."""
    module = importlib.import_module(COMMANDS[command][0])
    return module.command_options(make_parser(command, module).parse([str(word) for word in argv]))


def loaded_of(given):
    return load_model(given.model, given.cache, given.output)


@pytest.fixture
def steps(monkeypatch):
    """Forwards of the fast model."""
    seen, real = [], FastTransformer.forward
    monkeypatch.setattr(
        FastTransformer, "forward", lambda self, *rest: (seen.append(1), real(self, *rest))[1]
    )
    return seen


# --- both paths, through the commands ------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(
    "argv",
    [
        ["generate", PROMPT, "-n", "8", "-t", "0"],
        ["generate", PROMPT, "-n", "8", "-t", "1", "--seed", "3"],
        ["generate", PROMPT, "-n", "6", "--beams", "3"],
        ["generate", PROMPT, "-n", "8", "-t", "0", "--speculate", "ngram"],
        ["generate", PROMPT, "-n", "8", "-t", "0", "--speculate", "early-exit:1"],
        ["generate", PROMPT, "-n", "8", "-t", "0", "--speculate", "draft:tiny", "-m", "tiny"],
        ["generate", PROMPT, "-n", "8", "-t", "0", "--cache", "paged"],
        ["chat", "-n", "6", "-t", "0"],
        ["batch", "-", "-n", "6", "-t", "0"],
    ],
    ids=" ".join,
)
def test_kernels_are_what_runs_and_answer_as_the_plain_model_does(cli, steps, tiny_folder, argv):
    lines = {
        "chat": b"Who are you?\nAnd I?\n",
        "batch": b'{"prompt": "Once"}\n{"prompt": "My name"}\n',
    }
    model = [] if "-m" in argv else ["-m", tiny_folder]
    said = {}
    for flags in ([], ["--plain"], ["--fast"]):
        before = len(steps)
        code, said[" ".join(flags)], err = cli(*argv, *model, *flags, stdin=lines.get(argv[0], b""))
        assert code == 0, err
        assert (len(steps) > before) == (flags != ["--plain"]) and ("fast: " in err) == (
            flags == ["--fast"]
        )
    if argv[0] == "batch":
        said = {
            flag: [json.loads(line)["choices"] for line in text.splitlines()]
            for flag, text in said.items()
        }
    assert said[""] and said[""] == said["--plain"] == said["--fast"]


@pytest.mark.parametrize(
    "flags", [["--fast"], ["--quantize", "int8"], ["--fast", "--quantize", "int4"]]
)
@pytest.mark.parametrize("command", ["generate", "chat", "batch"])
def test_plain_contradicts_the_flags_that_ask_for_kernels(cli, tmp_path, command, flags):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    words = {"generate": ["hi"], "chat": [], "batch": [tmp_path / "in.jsonl"]}[command]
    code, out, err = cli(command, *words, "--plain", *flags)
    assert (code, out) == (2, "") and f"--plain and {flags[0]} contradict each other" in err
    assert len(err.splitlines()) == 2


@needs_kernels
@pytest.mark.parametrize("flags", [[], ["--quantize", "int8"]], ids=" ".join)
def test_batch_invariant_answers_are_the_same_alone_and_together(cli, tmp_path, flags):
    """A line alone and in a batch of four, and the same prompt by generate."""
    ask = [f"My name is {name}. What is my name?" for name in ("Zorbla", "Bo", "Ines", "Anna")]
    words = ["-n", "12", "-t", "0", "--batch-invariant", "--dtype", "bfloat16", *flags]

    def answers(*prompts):
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        code, out, err = cli("batch", "-", "--chat", *words, stdin=lines.encode())
        assert code == 0 and "batch-invariant: " in err
        return [json.loads(line)["choices"][0]["message"]["content"] for line in out.splitlines()]

    together = answers(*ask)
    assert [answers(prompt)[0] for prompt in ask[:2]] == together[:2]
    code, out, _ = cli("generate", ask[0], *words, "--cache", "growing")
    assert (code, out.strip()) == (0, together[0].strip())


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--cache", "quantized"], "which keys it rounds or drops depends on the chunks"),
        (["--cache", "sliding:window=8"], "--batch-invariant over --cache sliding"),
        (["--cache", "paged:page=24"], "pages of 24 tokens"),
        (["--plain"], "--plain and --batch-invariant contradict each other"),
        (["--dtype", "float16"], "no kernels for float16"),
    ],
    ids=str,
)
def test_what_cannot_be_batch_invariant_is_refused_in_one_line(cli, flags, cause):
    code, out, err = cli("generate", "x", "--batch-invariant", *flags)
    assert (code, out) == (2, "") and cause in err and len(err.splitlines()) == 2


def test_batch_invariance_is_refused_without_kernels(cli, monkeypatch):
    monkeypatch.setenv("NANOKV_KERNELS", "off")
    code, out, err = cli("generate", "x", "--batch-invariant")
    assert (code, out) == (2, "") and "--batch-invariant: NANOKV_KERNELS=off" in err


@needs_kernels
def test_a_batch_that_the_plain_model_began_is_finished_by_the_kernels(
    cli, steps, tiny_folder, tmp_path
):
    """The name of the weights in a half-finished output is that of the checkpoint, whatever computes."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Once"}\n')
    assert (
        cli("batch", source, "-o", out, "-m", tiny_folder, "-n", 3, "--plain")[0] == 0 and not steps
    )
    source.write_text('{"prompt": "Once"}\n{"prompt": "Then"}\n')
    code, _, err = cli("batch", source, "-o", out, "-m", tiny_folder, "-n", 3)
    assert code == 0 and "2 of 2 lines answered · 1 of them earlier" in err and steps
    plain, fast = (loaded_of(parsed("x", "-m", tiny_folder, *flags)) for flags in (["--plain"], []))
    assert plain.fingerprints() == fast.fingerprints()[:1]
    assert (
        loaded_of(parsed("x", "-m", tiny_folder, "--quantize", "int8")).fingerprints()
        != plain.fingerprints()
    )


# --- what decides ---------------------------------------------------------------------------------------------------


def plan(**changes):
    config = Config.from_folder(
        Path(__file__).parents[2] / "weights_loader" / "checkpoints" / "tiny"
    )
    return SimpleNamespace(
        **{
            "device": "cpu",
            "dtype_name": "float32",
            "config": config,
            "ranks": ALONE,
            "stored": None,
        }
        | changes
    )


SMOLLM3 = Config.from_dict(tiny_config("smollm3").to_dict())


@pytest.mark.parametrize(
    ("flags", "changes", "state", "text"),
    [
        ([], {}, building.State(True), "fast kernels"),
        (["--plain"], {}, building.State(True), "plain (--plain)"),
        (["--fast"], {}, building.State(False, "no C++ compiler"), "fast"),
        (["--quantize", "int4"], {}, building.State(True), "fast int4"),
        (
            [],
            {"device": "mps"},
            building.State(True),
            "plain (kernels are for CPUs, this is mps)",
        ),
        ([], {"dtype_name": "float16"}, building.State(True), "plain (no kernels for float16)"),
        (
            [],
            {"config": SimpleNamespace(experts=True, family=FAMILIES["qwen3_moe"])},
            building.State(True),
            "plain (no kernels for experts)",
        ),
        ([], {"config": SMOLLM3}, building.State(True), "fast products"),
        (["--fast"], {"config": SMOLLM3}, building.State(True), "fast"),
        ([], {}, building.State(False, "no C++ compiler"), "plain (no C++ compiler)"),
        (
            [],
            {},
            building.State(False, "kernels are not built", missing=True),
            "plain (kernels are not built)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_banner_says_what_runs_and_why(monkeypatch, flags, changes, state, text):
    monkeypatch.setattr(building, "state", lambda: state)
    monkeypatch.setattr(
        building,
        "begin",
        lambda: pytest.fail("NANOKV_KERNELS=explicit: no build in the background"),
    )
    choice = speed.choose(plan(**changes), parsed("x", *flags).model.speed, lambda fusing: True)
    assert choice.text == text and choice.fast == text.startswith("fast")


def test_fusing_takes_one_layer_more_and_is_left_out_where_that_is_not_free(monkeypatch):
    monkeypatch.setattr(building, "state", lambda: building.State(True))
    asked = []
    choice = speed.choose(plan(), parsed("x").model.speed, lambda fusing: asked.append(fusing))
    config = plan().config
    assert asked == [2 * config.intermediate_size * config.hidden_size * 4]
    assert choice.text == "plain (no memory to fuse weights)"


def test_commands_without_the_flags_keep_the_plain_model(tiny_folder):
    loaded = loaded_of(parsed("x", "-m", tiny_folder, command="trace"))
    assert loaded.code.text == "" and not hasattr(loaded.model, "weights")


def test_env_says_what_runs(cli, monkeypatch):
    for state, value, origin in (
        (building.State(True), "native kernels", "NANOKV_KERNELS=explicit: built for --fast"),
        (
            building.State(False, "no C++ compiler", building.NO_COMPILER),
            "plain",
            "install g++ or clang++",
        ),
    ):
        monkeypatch.setattr(building, "state", lambda state=state: state)
        shown = json.loads(cli("env", "--json")[1])["settings"]["kernels"]
        assert shown[0] == value and origin in shown[1]


def test_env_shows_a_setting_that_every_other_command_refuses(cli, monkeypatch):
    monkeypatch.setenv("NANOKV_KERNELS", "yes")
    code, out, _ = cli("env", "--json")
    assert code == 0 and "NANOKV_KERNELS is 'yes'" in json.loads(out)["settings"]["kernels"][1]
    assert cli("generate", PROMPT, "-n", "1")[0] == 2


# --- building in the background ---------------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch, tmp_path):
    """An empty cache folder, and a compiler that hands out the library that is there already; place.script(text) makes
    another. place.env is for commands."""
    ready = private.kept(building.stem_of(building.find_compiler() or ["c++"]))
    script = tmp_path / "cxx"
    env = {"NANOKV_CACHE": str(tmp_path), "NANOKV_KERNELS": "on", "CXX": str(script)}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    made = SimpleNamespace(
        env=env, log=tmp_path / "log", go=tmp_path / "go", folder=tmp_path / "nanokv"
    )
    made.copy = f'for last; do :; done; cp {ready[0] if ready else "/dev/null"} "$last"'
    made.wait = f"while [ ! -e {made.go} ]; do sleep 0.02; done; "

    def write(text):
        script.write_text(f"#!/bin/sh\ncat /proc/$$/stat >> {made.log}\n{text}\n")
        script.chmod(0o755)

    made.script, made.runs = (
        write,
        lambda: made.log.read_text().splitlines() if made.log.exists() else [],
    )
    write(made.copy)
    native.library.cache_clear()
    yield made
    made.go.touch()  # whatever still waits ends
    native.library.cache_clear()


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.02)


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


@linux
@needs_kernels
def test_a_start_without_kernels_runs_plain_and_the_next_one_finds_them(
    place, cli, steps, tiny_folder
):
    """The compiler waits until it is told to go on: a start that waited for it would never end."""
    place.script(place.wait + place.copy)
    argv = ("generate", PROMPT, "-m", tiny_folder, "-n", "4")
    first = run_cli(*argv, env=place.env, timeout=60)
    assert first.returncode == 0 and first.stderr.decode().count(speed.NEXT_START) == 1
    until(place.runs)
    assert building.state().missing
    place.go.touch()
    until(lambda: building.state().ready)
    code, out, err = cli(*argv)
    assert (code, out) == (0, first.stdout.decode()) and speed.NEXT_START not in err
    assert steps and len(place.runs()) == 1


@linux
@needs_kernels
def test_a_build_is_of_this_package_and_for_this_folder(place, monkeypatch, tmp_path):
    """Another nanokv comes first on the path, and the name of the cache folder is a relative one."""
    (tmp_path / "other" / "nanokv").mkdir(parents=True)
    (tmp_path / "other" / "nanokv" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    monkeypatch.setenv("NANOKV_CACHE", "kept")
    monkeypatch.chdir(tmp_path)
    building.begin()
    until(lambda: building.state().ready)
    assert (
        private.kept(building.stem_of(building.find_compiler()))[0].parent
        == tmp_path / "kept" / "nanokv"
    )


@pytest.mark.slow
@linux
@needs_kernels
def test_starts_during_a_build_that_fails_do_not_build_again(place):
    place.script(place.wait + "exit 1")
    building.begin()
    until(place.runs)
    for _ in range(3):
        building.begin()
    time.sleep(1)
    place.go.touch()
    until(lambda: building.state().detail)
    time.sleep(0.5)
    assert len(place.runs()) == 2  # with OpenMP and without


@linux
@needs_kernels
def test_starts_at_the_same_time_build_once_out_of_sight_and_leave_no_zombie(place):
    place.script(place.wait + place.copy)
    for _ in range(4):
        building.begin()
    until(place.runs)
    time.sleep(0.3)
    (line,) = place.runs()
    fields = line.rsplit(")", 1)[1].split()  # from the third of proc(5) on
    session, terminal, nice = int(fields[3]), int(fields[4]), int(fields[16])
    assert session != os.getsid(0) and terminal == 0 and nice == 19
    place.go.touch()
    until(lambda: building.state().ready)
    # The library has its name before the folder goes.
    until(lambda: not list(place.folder.glob("building-*")))
    assert len(place.runs()) == 1

    def no_child():
        try:
            return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return True

    until(no_child)


@linux
@needs_kernels
def test_a_build_that_is_killed_leaves_nothing_half(place):
    place.script(f'for last; do :; done; echo half > "$last"; {place.wait}{place.copy}')
    building.begin()
    until(place.runs)
    # The parent of the compiler.
    os.kill(int(place.runs()[0].rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    assert not list(place.folder.glob("*.so")) and building.state().missing
    place.script(place.copy)
    until(lambda: building.begin() or building.state().ready)
    # The library has its name before the folder goes.
    until(lambda: not list(place.folder.glob("building-*")))
    assert native.built()


@linux
def test_a_failed_build_is_remembered_until_somebody_asks(place, monkeypatch, capsys):
    place.script("echo 'a.cpp:2: error: no such luck' >&2; exit 1")
    building.begin()
    until(lambda: not building.state().missing)
    found, tried = building.state(), len(place.runs())
    assert found.why == "kernels did not build" and "error: no such luck" in found.detail and tried
    assert "no such luck" in speed.setting()[1]
    monkeypatch.setattr(building, "begin", lambda: pytest.fail("it was tried, and failed"))
    assert (
        speed.choose(plan(), parsed("x").model.speed, lambda fusing: True).text
        == "plain (kernels did not build)"
    )
    place.script(place.copy)
    if native.library()[0]:  # asked for, as by --fast
        assert building.state().ready and not list(place.folder.glob("*.failed"))


@needs_kernels
def test_who_asks_is_told_that_it_takes_a_while_once(place, cli, tiny_folder):
    argv = ("generate", PROMPT, "-m", tiny_folder, "-n", "2", "--fast")
    code, _, err = cli(*argv)
    assert (
        code == 0 and f"building the native kernels, once: about {building.SECONDS} seconds" in err
    )
    assert "fast: fp32 weights, native kernels" in err and "building" not in cli(*argv)[2]


def test_no_compiler_no_place_and_off_start_nothing(place, monkeypatch, tmp_path):
    monkeypatch.setattr(
        building, "begin", lambda: pytest.fail("nothing to build with, or no wish to")
    )
    for name, value, why in (
        ("CXX", "no-such-compiler", "no C++ compiler"),
        ("CXX", "g++ 'oops", "no kernels"),
        ("NANOKV_KERNELS", "off", "NANOKV_KERNELS=off"),
        ("NANOKV_KERNELS", "explicit", "kernels are not built"),
        ("NANOKV_CACHE", str(tmp_path / "cxx"), "no place to keep kernels"),
    ):
        with monkeypatch.context() as here:
            here.setenv(name, value)
            assert (
                speed.choose(plan(), parsed("x").model.speed, lambda fusing: True).text
                == f"plain ({why})"
            )
            assert building.state()[:2] == (False, why)
    monkeypatch.setenv("NANOKV_KERNELS", "maybe")
    with pytest.raises(NanoKVError, match="on, explicit, off"):
        building.state()


@needs_kernels
def test_a_kept_library_that_does_not_load_is_no_reason_to_wait(place, cli, tiny_folder, steps):
    """Whole, as its name says, but no library: plain, without a compiler."""
    place.folder.mkdir(mode=0o700)
    file = private.named(building.stem_of(building.find_compiler()), b"no library")
    file.write_bytes(b"no library")
    file.chmod(0o600)
    code, _, err = cli("generate", PROMPT, "-m", tiny_folder, "-n", "2")
    assert (
        code == 0
        and "cannot be loaded; --fast builds them again" in err
        and not steps
        and not place.runs()
    )


@pytest.fixture
def h200(monkeypatch):
    """What torch says where there is one GPU."""
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("get_device_name", "NVIDIA H200"),
        ("mem_get_info", (130_000_000_000, 151_000_000_000)),
        ("max_memory_allocated", 2_000_000_000),
        ("memory_reserved", 0),
        ("memory_allocated", 0),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


# What Triton and torch say where a GPU has its kernels, and the one thing that is missing → what is told.
ABILITIES = {"find_spec": "there", "hip": None, "capability": (9, 0), "trial": ""}
LACKS = {
    "": {},
    "there is no Triton: pip install triton": {"find_spec": None},
    "the kernels were never tried on ROCm": {"hip": "6.4"},
    "the kernels need compute capability 8.0, this GPU has 7.5": {"capability": (7, 5)},
    "Triton does not run here: RuntimeError no cc": {"trial": RuntimeError("\nno cc\nat all")},
}


@pytest.fixture(params=LACKS)
def lack(request, monkeypatch, h200):
    """Why this GPU has no recorded steps, or ""."""
    able = ABILITIES | LACKS[request.param]
    kernels = types.ModuleType("nanokv.fast.gpu.kernels")

    def swiglu(x):
        if able["trial"]:
            raise able["trial"]
        return x

    kernels.swiglu = swiglu
    monkeypatch.setitem(sys.modules, "nanokv.fast.gpu.kernels", kernels)
    monkeypatch.setattr(gpu, "find_spec", lambda name: able["find_spec"])
    monkeypatch.setattr(torch.version, "hip", able["hip"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: able["capability"])
    monkeypatch.setattr(gpu, "on", lambda device: contextlib.nullcontext())
    right = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None: right(*shape))
    gpu.trial.cache_clear()
    yield request.param
    gpu.trial.cache_clear()


def test_a_gpu_records_steps_by_default_or_says_why_not(lack):
    """No flag is needed, --plain turns it off, and who asks for what is not there is told before weights are read."""

    def choose(*flags, **changes):
        return speed.choose(plan(device="cuda", **changes), parsed("x", *flags).model.speed, fits)

    def fits(fusing):
        return True

    choice = choose()
    assert (choice.fast, choice.text) == (not lack, f"plain ({lack})" if lack else "CUDA graphs")
    assert choose("--plain").text == "plain (--plain)"
    assert not choose(config=SimpleNamespace(experts=True, family=FAMILIES["qwen3_moe"])).fast
    with pytest.raises(NanoKVError, match=r"--quantize int8 on cuda: .* for CPUs"):
        choose("--quantize", "int8")
    if lack:
        with pytest.raises(NanoKVError, match=f"--fast on cuda: {lack}"):
            choose("--fast")
        assert env.gpu_kernels("cuda:0") == ("torch's", f"plain: {lack}")
    else:
        assert choose("--fast").fast
        assert env.gpu_kernels("cuda:0")[0] == "CUDA graphs"


def test_env_on_a_gpu_names_it_and_no_kernels_of_a_cpu(cli, monkeypatch, h200):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(building, "state", lambda: building.State(True))
    for flags in ([], ["--device", "cuda"], ["--device", "cuda:0"]):
        shown = json.loads(cli("env", "--json", *flags)[1])["settings"]
        assert shown["device"] == [flags[-1] if flags else "cuda", "NVIDIA H200"]
        assert shown["kernels"] == ["torch's", "plain: there is no Triton: pip install triton"]
        assert shown["GPU memory"] == ["130 GB", "of 151 GB"]
    shown = json.loads(cli("env", "--json", "--device", "cpu")[1])["settings"]
    assert shown["kernels"][0] == "native kernels" and "GPU memory" not in shown


def test_env_says_of_a_gpu_that_is_not_there_that_it_is_not(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = json.loads(cli("env", "--json", "--device", "cuda:1")[1])["settings"]
    assert shown["device"] == ["cuda:1", "torch sees no GPU of this number"]


def test_bench_on_a_gpu_names_it_and_whose_kernels_compute(h200):
    loaded = SimpleNamespace(
        name="tiny", dtype_name="bfloat16", device="cuda:0", threads=16, ranks=ALONE
    )
    assert bench.where_text(loaded) == "NVIDIA H200"
    facts = bench.facts_of(loaded)
    assert (facts["device"], facts["device_name"]) == ("cuda:0", "NVIDIA H200")
    code = bench.code_of(loaded, lambda: pytest.fail("kernels of the CPU"))
    assert code.startswith(f"torch {torch.__version__}")
    assert machine.peak_memory("cuda:0") == 2_000_000_000
    loaded.device = "cpu"
    assert (
        bench.where_text(loaded) == "16 threads" and bench.facts_of(loaded)["device_name"] is None
    )
    assert bench.code_of(loaded, lambda: "native") == "native"


def test_the_bandwidth_of_a_gpu_is_read_from_a_buffer_that_is_large_there(monkeypatch, h200):
    """512 MB are 0.1 ms of an H200, near to what a launch takes; a small GPU has not 4 GB to spare."""
    assert machine.buffer_bytes("cpu") == machine.BUFFER
    assert machine.buffer_bytes("cuda") == machine.GPU_BUFFER
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (8_000_000_000, 8_000_000_000))
    assert machine.buffer_bytes("cuda:0") == 2_000_000_000


def test_random_weights_are_made_on_the_device_that_is_asked_for(monkeypatch, h200):
    """It measured the CPU on a machine with a GPU, whatever --device said."""
    made = []
    monkeypatch.setattr("nanokv.loading.random_model", lambda *how: made.append(how))
    monkeypatch.setattr(random_model, "Loaded", lambda **known: SimpleNamespace(**known))
    for flags, device in (
        ([], "cuda"),
        (["--device", "cuda:0"], "cuda:0"),
        (["--device", "cpu"], "cpu"),
    ):
        given = parsed("-m", "qwen3-0.6b-random", *flags, command="bench")
        with contextlib.suppress(AttributeError):  # there is no model
            random_model.load_random(given.model, given.cache)
        assert made[-1][2] == device
    given = parsed("-m", "qwen3-0.6b-random", "--device", "cuda:7", command="bench")
    with pytest.raises(NanoKVError, match="--device cuda:7: there are 1 cuda devices here"):
        random_model.load_random(given.model, given.cache)
