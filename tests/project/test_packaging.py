"""What pip sees: declared dependencies, exact pins, import cost, the installed program, and the built wheel.

The wheel is installed into a new environment outside the checkout and holds a chat there. That environment borrows
the already installed dependencies (a path file), because torch alone is a gigabyte; nanokv itself comes from the wheel.
"""

import ast
import functools
import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import compat
import compat_paths
import nanokv

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(text) for text in texts]
    for name, texts in PROJECT["optional-dependencies"].items()
}
OPTIONAL = {  # imported inside a function that says what to install when it is absent
    "transformers",
    "matplotlib",
    "gguf",
    "llama_cpp",
    "IPython",
    "jupytext",
    "nbclient",
    "nbconvert",
    "nbformat",
    "pdoc",
    "psutil",
    "pygments",
}
HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
)
BUNDLED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
MEGABYTE = 1_000_000


def python(*args: str, **options) -> subprocess.CompletedProcess:
    """This interpreter on this checkout, from any folder."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, timeout=120, **options
    )


# --- declared dependencies ----------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    found = [re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.]*)", line) for line in lines]
    # x==1.0+cpu is on one index.
    assert None not in found, f"not an exact public version: {lines[found.index(None)]}"
    names = [canonicalize_name(match[1]) for match in found]
    assert len(set(names)) == len(names), "a package is pinned twice"
    return {name: match[2] for name, match in zip(names, found, strict=True)}


PINNED = [*RUNTIME, *EXTRAS["course"], *EXTRAS["serve"], *EXTRAS["smollm2"], *EXTRAS["dev"]]


@pytest.mark.parametrize("requirement", PINNED, ids=str)
def test_pin_lies_inside_the_declared_range(requirement):
    """A pin outside its range makes `pip install -c` unsolvable; a dependency without one drifts."""
    pin = pins().get(canonicalize_name(requirement.name))
    assert pin is not None, f"{requirement.name} has no pin in constraints.txt"
    assert requirement.specifier.contains(pin)


def test_everything_that_is_installed_with_us_is_pinned():
    """Dependencies of dependencies too: an unpinned one is the update that breaks a clone a year from now."""
    todo, seen = [*RUNTIME, *EXTRAS["dev"], *EXTRAS["course"], *EXTRAS["serve"]], set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        if name not in seen:
            seen.add(name)
            extras = requirement.extras or {""}
            needed = (Requirement(text) for text in needs)
            todo += [
                r
                for r in needed
                if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)
            ]
    assert {"torch", "sympy", "pluggy"} <= seen
    assert seen - set(pins()) == set()


def test_what_people_have_installed_is_left_as_it_is():
    """An upper bound would take a newer torch away, gigabytes; `make compat` tries the oldest and the newest."""
    bounds = {
        requirement.name: [one.operator for one in requirement.specifier] for requirement in RUNTIME
    }
    assert {name: found for name, found in bounds.items() if found != [">="]} == {}
    (torch,) = (requirement.specifier for requirement in RUNTIME if requirement.name == "torch")
    assert torch.contains("2.9.0") and torch.contains("3.1.0") and not torch.contains("2.8.0")


def test_make_compat_takes_the_lower_bound_of_every_dependency():
    oldest = {
        Requirement(text).name: Requirement(text).specifier
        for text in compat.requirements("oldest")
    }
    assert list(oldest) == [requirement.name for requirement in RUNTIME]
    for requirement in RUNTIME:
        (bound,) = (one.version for one in requirement.specifier)
        assert oldest[requirement.name].contains(bound) and not oldest[requirement.name].contains(
            "999"
        )
    assert compat.requirements("newest") == [] and compat.requirements("2.12.0") == [
        "torch==2.12.0"
    ]


@pytest.mark.night
def test_what_make_compat_runs_passes_here_and_can_fail(monkeypatch, capsys):
    """Every path, with this environment's torch; the model that the short name means need not be installed."""
    monkeypatch.chdir(ROOT)
    assert compat_paths.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("python 3") and len(lines) > 14
    assert all(re.fullmatch(r"\w+ +(ok|not here: .+)", line) for line in lines[1:])
    for name in dir(compat_paths.Paths):
        if name.startswith("try_") and name != "try_caches":
            monkeypatch.delattr(compat_paths.Paths, name)
    monkeypatch.setattr(nanokv.cache.DictCache, "append", lambda self, k, v: (k, v))
    assert compat_paths.main() == 1
    assert "caches       FAILED\nTraceback" in capsys.readouterr().out


@functools.cache
def ours() -> frozenset[str]:
    """Names of our packages and of the files of the tests."""
    return frozenset(
        {"nanokv", "weights_loader", *(p.stem for p in (ROOT / "tests").rglob("*.py"))}
    )


def imported(path: Path, top_level_only: bool) -> set[str]:
    """Third-party packages that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    return (
        {name.split(".")[0] for name in names}
        - set(sys.stdlib_module_names)
        - ours()
        - {"__future__"}
    )


def distributions(requirements) -> set[str]:
    """Import names of declared packages; here they all equal the package's name, in lower case."""
    return {canonicalize_name(r.name).replace("-", "_") for r in requirements}


def test_every_runtime_import_is_declared():
    """`pip install nanokv` without extras must import everything, but for what stands inside a function in OPTIONAL,
    and the server, which is its own extra as a whole, and kernels that are imported on a GPU alone."""
    files = [p for package in ("nanokv", "weights_loader") for p in (ROOT / package).rglob("*.py")]
    declared, server = distributions(RUNTIME), ROOT / "nanokv" / "apps" / "serve"
    gpu = ROOT / "nanokv" / "fast" / "gpu"
    extra = {
        path: distributions(EXTRAS["serve"])
        if server in path.parents
        # A CUDA build of torch brings it.
        else {"triton"}
        if gpu in path.parents
        else set()
        for path in files
    }
    wrong = {str(p.relative_to(ROOT)): imported(p, True) - declared - extra[p] for p in files}
    assert {path: names for path, names in wrong.items() if names} == {}
    wrong = {
        str(p.relative_to(ROOT)): imported(p, False) - declared - extra[p] - OPTIONAL for p in files
    }
    assert {path: names for path, names in wrong.items() if names} == {}


def test_every_import_of_the_tests_is_declared():
    """Those of clients/ run in an environment of their own."""
    lines = (ROOT / "tests" / "support" / "clients" / "requirements.txt").read_text().splitlines()
    clients = distributions(Requirement(line) for line in lines if not line.startswith("#"))
    declared = distributions([*RUNTIME, *EXTRAS["dev"], *EXTRAS["fuzz"]])
    wrong = {}
    for path in (ROOT / "tests").rglob("*.py"):
        known = clients if path.parent.name == "clients" else declared
        wrong[path.name] = {name for name in imported(path, False) if name.lower() not in known}
    assert {name: names for name, names in wrong.items() if names} == {}


def test_a_missing_package_is_asked_for_in_the_range_that_was_tested(monkeypatch):
    """`pip install torch` alone could bring a release that nobody has tried."""
    from nanokv.apps.cli.common.ways_out import describe

    extras = [f'{text}; extra == "{name}"' for name, texts in EXTRAS.items() for text in texts]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [*map(str, RUNTIME), *extras])
    monkeypatch.setattr("sys.prefix", "/any")
    monkeypatch.setattr("sys.executable", "/any/bin/python")
    for name in ("torch", "numpy", "safetensors"):
        (declared,) = (text for text in PROJECT["dependencies"] if Requirement(text).name == name)
        message, hint = describe(
            ModuleNotFoundError(f"No module named {name!r}", name=f"{name}.nn")
        )
        assert message == f"the package {name}.nn is not installed"
        asked = Requirement(re.fullmatch(r'/any/bin/python -m pip install "(.+)"', hint)[1])
        assert (asked.name, asked.specifier) == (name, Requirement(declared).specifier)
    line = "/any/bin/python -m pip install"
    assert (
        describe(ModuleNotFoundError("x", name="transformers"))[1]
        == f'{line} "transformers==5.23.0"'
    )
    assert describe(ModuleNotFoundError("x", name="nosuch"))[1] == f"{line} nosuch"


def test_in_the_environment_that_make_made_it_is_make_that_installs(monkeypatch, tmp_path):
    """Elsewhere the interpreter is named; nanokv itself, which is on no index, never."""
    from nanokv.support import installing

    declared = [
        "numpy>=1.26",
        *(f'uvicorn<1,>=0.54; extra == "{name}"' for name in ("serve", "dev")),
    ]
    declared += ['llama-cpp-python<0.4,>=0.3.16; extra == "bench"']
    monkeypatch.setattr("sys.executable", "/a b/python")
    monkeypatch.setattr("sys.prefix", str(ROOT / ".venv"))
    monkeypatch.chdir(ROOT)
    assert installing.hint(["uvicorn"]) == "make setup"
    (extras,) = re.findall(
        r'\$\(VENV\)/\.course:.*?"\.\[(.+?)\]"', (ROOT / "Makefile").read_text(), re.DOTALL
    )
    assert extras.split(",") == list(installing.BY_MAKE)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: declared)
    assert installing.hint(["uvicorn.config", "numpy"]) == "make setup"
    llama = '\'/a b/python\' -m pip install "llama-cpp-python<0.4,>=0.3.16" "numpy>=1.26"'
    assert installing.hint(["llama-cpp-python", "numpy"]) == llama, "make setup would not bring it"
    monkeypatch.chdir(tmp_path)
    assert installing.hint(["uvicorn"]) == f"make -C {ROOT} setup"
    monkeypatch.setattr("sys.prefix", "/usr")
    assert (
        installing.hint(["uvicorn", "nosuch"])
        == "'/a b/python' -m pip install \"uvicorn<1,>=0.54\" nosuch"
    )


def test_no_install_of_make_and_ci_is_free_to_choose():
    """A range in pyproject.toml must never bring another torch into a clone: constraints.txt decides for all."""
    lines = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "$(PIP) install" in line
    ]
    assert len(lines) == 6 and all("-c constraints.txt" in line for line in lines)
    assert "pip install" not in (ROOT / ".ci" / "run").read_text()
    assert Version(pins()["torch"]).release == (2, 13, 0)


def test_version_and_licence_agree():
    assert nanokv.__version__ == PROJECT["version"]
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["requires-python"] == ">=3.11"
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence


# --- import cost --------------------------------------------------------------------------------------------------


def loaded_after(statement: str) -> set[str]:
    """Heavy packages in sys.modules after a statement in a fresh interpreter (its own output is thrown away)."""
    code = f"import io, sys, json\nreal, sys.stdout = sys.stdout, io.StringIO()\n{statement}\n"
    code += f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]), file=real)"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_a_first_token_does_not_load_the_compiler():
    """torch._dynamo takes longer to import than all else together; torch asks for it to initialise an embedding."""
    statement = "import nanokv, sys; model, _ = nanokv.load('tiny'); list(nanokv.generate(model, [1], None, 2));"
    done = python("-c", statement + "nanokv.optimize(model); print('torch._dynamo' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def cheapest(statement: str, goal: float, tries: int = 10) -> float:
    """Seconds of processor time of a fresh interpreter, best of some; stops at the goal.

    Nothing here waits for a disk or a network, so on a free core this is the wall time; unlike the wall time it does
    not count the other work on a busy machine.
    """
    best = float("inf")
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python("-c", statement)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best < goal:
            break
    return best


def test_import_nanokv_loads_nothing_heavy():
    assert loaded_after("import nanokv, weights_loader") == set()


@pytest.mark.slow
@pytest.mark.serial
def test_import_nanokv_is_cheap_beside_torch():
    """Under 1.5 × import torch, also when every public name is used, so that laziness hides nothing."""
    torch = cheapest("import torch", goal=0, tries=3)
    assert cheapest("import nanokv", goal=1.5 * torch) < 1.5 * torch
    everything = "import nanokv; [getattr(nanokv, name) for name in nanokv.__all__]"
    assert cheapest(everything, goal=1.5 * torch) < 1.5 * torch


def test_every_public_name_resolves():
    for name in dir(nanokv):
        assert getattr(nanokv, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = nanokv.no_such_name


def commands() -> list[str]:
    from nanokv.apps import cli

    return sorted(cli.COMMANDS)


HELP = [
    [],
    ["batch"],
    ["bench"],
    ["blend"],
    ["chat"],
    ["convert"],
    ["course"],
    ["env"],
    ["generate"],
    ["live"],
    ["memory"],
    ["models"],
    ["profile"],
    ["replay"],
    ["reuse"],
    ["serve"],
    ["trace"],
    ["train"],
    ["verify"],
]


def run_help(command: list[str]) -> str:
    argv = [*command, "--help"]
    return f"from nanokv.apps.cli import main\nassert main({argv}) == 0"


def test_every_command_is_asked_for_help():
    assert [[], *([name] for name in commands())] == HELP


@pytest.mark.parametrize("command", HELP, ids=lambda c: "nanokv " + " ".join(c))
def test_help_imports_nothing_heavy(command):
    """torch takes a second to import; --help has 0.3 s."""
    assert loaded_after(run_help(command)) == set()


@pytest.mark.parametrize("command", HELP, ids=lambda c: "nanokv " + " ".join(c))
def test_help_answers_in_300_ms(command):
    assert cheapest(run_help(command), goal=0.3) < 0.3


# --- the release: an sdist from the tree, a wheel from the sdist --------------------------------------------------


def build(kind: str, source: Path, folder: Path) -> Path:
    """The sdist or wheel of a source tree, in `folder`; with the setuptools that is installed here."""
    code = f"import sys; from setuptools.build_meta import build_{kind}; print(build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, folder], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """From a copy of the whole tree, tests and notebooks too: a build folder left in the checkout would leak."""
    folder = tmp_path_factory.mktemp("sdist")
    skip = shutil.ignore_patterns(
        ".venv",
        ".git",
        "__pycache__",
        "build",
        "dist",
        "runs",
        "*.egg-info",
        ".*_cache",
        ".hypothesis",
    )
    shutil.copytree(ROOT, folder / "source", ignore=skip)
    return build("sdist", folder / "source", folder)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """From the unpacked sdist, as an installer without a wheel would do it."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / f"nanokv-{PROJECT['version']}", folder)


@pytest.mark.slow
def test_sdist_holds_what_the_wheel_needs_and_nothing_else(sdist):
    assert (
        sdist.name == f"nanokv-{PROJECT['version']}.tar.gz" and sdist.stat().st_size < 10 * MEGABYTE
    )
    with tarfile.open(sdist) as archive:
        sizes = {m.name.split("/", 1)[1]: m.size for m in archive.getmembers() if m.isfile()}
    assert {name.split("/")[0] for name in sizes} == {
        "nanokv",
        "weights_loader",
        "nanokv.egg-info",
        "pyproject.toml",
        "setup.cfg",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "LICENSE",
    }
    large = {name for name, size in sizes.items() if size > MEGABYTE}
    assert large == {"weights_loader/checkpoints/tiny/model.safetensors"}
    typed = {str(p.relative_to(ROOT)) for p in ROOT.glob("nanokv/**/py.typed")}
    assert typed <= set(sizes)


@pytest.mark.slow
def test_wheel_holds_the_two_packages_and_the_model(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"nanokv-{PROJECT['version']}.dist-info/METADATA").decode()
    assert wheel.name == f"nanokv-{PROJECT['version']}-py3-none-any.whl"
    top = {"nanokv", "weights_loader", f"nanokv-{PROJECT['version']}.dist-info"}
    assert {name.split("/")[0] for name in names} == top
    model = {
        n.removeprefix("weights_loader/checkpoints/tiny/")
        for n in names
        if "/checkpoints/tiny/" in n
    }
    assert {*BUNDLED, "README.md"} <= model
    files = [p for d in ("nanokv", "weights_loader") for p in (ROOT / d).rglob("*.*")]
    sources = {
        str(p.relative_to(ROOT))
        for p in files
        if p.suffix in (".py", ".toml", ".css", ".js", ".html", ".cpp")
    }
    assert sources | {"nanokv/py.typed", "weights_loader/py.typed"} <= set(names)
    assert [n for n in names if n.endswith((".pyc", ".bin", ".pt", ".pth")) or "test" in n] == []
    assert any(n.endswith("licenses/LICENSE") for n in names)
    declared = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)
    assert {str(Requirement(text)) for text in declared} == {str(r) for r in RUNTIME}
    assert wheel.stat().st_size < 12 * MEGABYTE + MEGABYTE  # the model's 12 MB and the code


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """bin folder of a new environment with the wheel, and this one's site-packages behind it for the dependencies."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, capture_output=True)
    pip = [venv / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    site = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def outside(tmp_path: Path) -> dict[str, str]:
    """An environment without a trace of this checkout, network or home."""
    keep = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PYTHON", "NANOKV", "HF_", "VIRTUAL_ENV"))
    }
    return keep | {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_installed_wheel_chats_outside_the_checkout(installed, tmp_path):
    """The bundled model ships in the wheel, is found there, and recalls a name from an earlier line of the pipe."""
    env = outside(tmp_path)
    where = "import nanokv, weights_loader; print(nanokv.__file__); print(weights_loader.BUNDLED['tiny'])"
    run = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 120}
    found = subprocess.run([installed / "python", "-c", where], **run).stdout.split()
    assert len(found) == 2 and all(str(installed.parent) in path for path in found), found
    talk = "My name is Zorbla.\nWhat is my name?\n"
    done = subprocess.run([installed / "nanokv", "chat"], input=talk, **run)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 2 and "Zorbla" in answers[1]
    assert not (tmp_path / "hf").exists(), "the bundled model needs no download cache"


@pytest.mark.slow
def test_installed_commands_answer(installed, tmp_path):
    """The console script exists and every command's help works where no test extra is on the path of the checkout."""
    run = {
        "cwd": tmp_path,
        "env": outside(tmp_path),
        "capture_output": True,
        "text": True,
        "timeout": 60,
    }
    version = subprocess.run([installed / "nanokv", "--version"], **run)
    assert Version(version.stdout.split()[1]) == Version(PROJECT["version"])
    answer = subprocess.run(
        [installed / "nanokv", "generate", "Hello", "-n", "1", "--json"], input="", **run
    )
    assert (
        answer.returncode == 0 and json.loads(answer.stdout)["usage"]["completion_tokens"] == 1
    ), answer.stderr
    for name in commands():
        done = subprocess.run([installed / "nanokv", name, "--help"], **run)
        assert done.returncode == 0 and f"nanokv {name}" in done.stdout, (name, done.stderr)
