"""What editors and type checkers see: public functions have types, mypy and pyright agree, jedi completes.

mypy itself runs over both packages in `make lint` (its settings are in pyproject.toml). Here mypy
and pyright, the checker inside VS Code, are asked what a program sees that only imports nanokv.
basedpyright is pyright in a wheel, with the Node that it needs; the package `pyright` downloads both.
"""

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nanokv

ROOT = Path(__file__).resolve().parents[2]
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
FILES = sorted(file for name in MYPY["files"] for file in (ROOT / name).rglob("*.py"))
UNTYPED = tuple(  # not complete; mypy leaves these files out too
    f"nanokv/school/training/{name}.py" for name in ("card", "corpus", "evaluate", "trainer")
)
KERNEL = "triton.jit"  # Triton gives an argument its type at the launch, and takes an annotation for an order
TYPED = [path for path in FILES if not str(path.relative_to(ROOT)).startswith(UNTYPED)]
PROGRAM = ROOT / "tests" / "project" / "typed_program.py"
MISTAKE = "  # a mistake"


def untyped(source: str) -> list[str]:
    """Public functions and methods that lack the type of an argument or of what they return, as "line: name"."""
    bad = []
    for node in ast.parse(source).body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        for f in (node.body if isinstance(node, ast.ClassDef) else [node]) if public else ():
            if not isinstance(f, ast.FunctionDef) or (
                f.name.startswith("_") and f.name not in ("__init__", "__call__")
            ):
                continue
            if any(ast.unparse(each).startswith(KERNEL) for each in f.decorator_list):
                continue
            arguments = [*f.args.posonlyargs, *f.args.args]
            # Self.
            arguments = arguments[
                isinstance(node, ast.ClassDef) and "staticmethod" not in ast.unparse(f) :
            ]
            arguments += [*f.args.kwonlyargs, *filter(None, (f.args.vararg, f.args.kwarg))]
            if not all(a.annotation for a in arguments) or not (f.returns or f.name == "__init__"):
                bad.append(f"{f.lineno}: {f.name}")
    return bad


@pytest.mark.parametrize("path", TYPED, ids=[str(path.relative_to(ROOT)) for path in TYPED])
def test_public_functions_have_types(path):
    assert untyped(path.read_text()) == []


def test_the_rule_can_fail():
    source = "def f(x): pass\ndef _g(x): pass\nclass A:\n  def h(self, x: int): pass\n  def __init__(self): pass"
    assert untyped(source) == ["1: f", "4: h"]
    assert untyped("def f(x: int, *, y: str = '') -> None: pass") == []
    assert untyped("def f(*x, **y: int) -> None: pass") == ["1: f"]
    assert untyped("@triton.jit\ndef f(x, SIZE: tl.constexpr): pass") == []


def test_every_public_name_lies_in_a_checked_file():
    files = {str(path.relative_to(ROOT)) for path in FILES}
    homes = {home.replace(".", "/") for home in nanokv._HOME.values()}
    assert [
        home for home in sorted(homes) if not {f"{home}.py", f"{home}/__init__.py"} & files
    ] == []


def test_type_checkers_import_what_is_imported_on_first_use():
    """The names beside `__getattr__` are the names that it knows, from the same modules."""
    for package in ("nanokv", "nanokv/cache", "nanokv/school/course"):
        tree = ast.parse((ROOT / package / "__init__.py").read_text())
        (block,) = (
            n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
        )
        seen = {
            alias.asname or alias.name: node.module for node in block.body for alias in node.names
        }
        module = __import__(package.replace("/", "."), fromlist=["_"])
        assert set(module.__all__) - {"__version__"} <= set(seen)
        assert list(module.__all__) == sorted(module.__all__) or package == "nanokv/cache"
        assert set(getattr(module, "_HOME", module.__all__)) == set(module.__all__) - {
            "__version__"
        }
        for name, home in seen.items():
            if name in module.__all__:
                assert getattr(__import__(home, fromlist=["_"]), name) is getattr(module, name)
        modules = getattr(module, "_MODULES", {})
        assert {seen.get(name) for name in modules} == {
            home.rpartition(".")[0] for home in modules.values()
        }


def test_jedi_completes_names_and_knows_their_types():
    import jedi

    def names(code):
        return {
            found.name: found for found in jedi.Script(code, project=jedi.Project(ROOT)).complete()
        }

    found = names("import nanokv\nnanokv.")
    assert set(nanokv.__all__) <= set(found)
    (signature,) = jedi.Script(
        "import nanokv\nnanokv.load(", project=jedi.Project(ROOT)
    ).get_signatures()
    assert [p.name for p in signature.params][:4] == ["source", "dtype", "device", "revision"]
    assert {"ask", "stream", "from_pretrained", "undo"} <= set(
        names("import nanokv\nnanokv.Session(1, 2).")
    )
    assert {"save", "device", "nbytes"} <= set(
        names("import nanokv\nmodel, tokenizer = nanokv.load()\nmodel.")
    )


def mistakes() -> set[int]:
    """The numbers of the lines of the program that a type checker has to refuse."""
    return {
        n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith(MISTAKE)
    }


@pytest.mark.slow
def test_mypy_sees_the_types_of_the_public_names(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        "--strict",
        "--follow-imports=silent",
        f"--cache-dir={ROOT / '.mypy_cache' / 'program'}",  # what torch's files say, seen once
        str(PROGRAM),
    ]
    options = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, **options)
    errors = [line.split(":", 2) for line in done.stdout.splitlines() if ": error:" in line]
    assert {int(line) for _, line, _ in errors} == mistakes(), done.stdout + done.stderr


@pytest.mark.slow
def test_pyright_sees_the_types_of_the_public_names(tmp_path):
    """Strict: a name whose type is unknown, wholly or in part, is an error."""
    found = pyright(tmp_path, "--project", str(tmp_path))
    errors = {
        entry["range"]["start"]["line"] + 1: entry["message"]
        for entry in found["generalDiagnostics"]
        if entry["severity"] == "error"
    }
    assert set(errors) == mistakes(), errors


def pyright(folder: Path, *arguments: str) -> dict:
    """What pyright says as JSON, with the settings of a user who wants all types known."""
    tool = Path(sys.executable).with_name("basedpyright")
    if not tool.exists():
        pytest.skip("basedpyright is not installed: pip install -c constraints.txt -e '.[dev]'")
    settings = {
        "typeCheckingMode": "strict",
        "include": [str(PROGRAM)],
        "extraPaths": [str(ROOT)],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    environment = {
        **os.environ,
        "PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}",  # its python knows where torch is
        "PYTHONPATH": str(ROOT),
    }
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([tool, "--outputjson", *arguments], timeout=600, **options)
    head, brace, rest = done.stdout.partition("{")  # a first line may be about the program itself
    assert brace, head + done.stderr
    return json.loads(brace + rest)
