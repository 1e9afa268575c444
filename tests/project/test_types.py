"""What editors and type checkers see: every public function has its types, mypy agrees, and jedi completes.

mypy itself runs over both packages in `make lint` (its settings are in pyproject.toml); here
it is asked what a program sees that only writes `import nanokv`.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nanokv

ROOT = Path(__file__).resolve().parents[2]
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
FILES = sorted(file for name in MYPY["files"] for file in (ROOT / name).rglob("*.py"))
UNTYPED = (  # signatures here are not complete; mypy checks the bodies
    "nanokv/model.py",  # shapes are in comments, for readers who learn
    "nanokv/rope.py",  # as model.py
    "nanokv/fast/gpu/",  # Triton reads annotations of kernels
    "nanokv/school/course/checks/nb15.py",
    "nanokv/school/course/own_kernels.py",
    "nanokv/school/training/card.py",
    "nanokv/school/training/corpus.py",
    "nanokv/school/training/evaluate.py",
    "nanokv/school/training/trainer.py",
)
TYPED = [path for path in FILES if not str(path.relative_to(ROOT)).startswith(UNTYPED)]
PROGRAM = """
import nanokv
model, tokenizer = nanokv.load("tiny")
session = nanokv.Session.from_pretrained("tiny")
cache = nanokv.make_cache("dict", model.config)
reveal_type(model)
reveal_type(tokenizer)
reveal_type(model.device)
reveal_type(cache)
reveal_type(cache.nbytes)
reveal_type(nanokv.prefill(model, [tokenizer.encode("hi")], cache))
reveal_type(nanokv.generate(model, [1, 2]))
reveal_type(nanokv.Session)
reveal_type(session.ask("hi"))
reveal_type(session.stream("hi"))
reveal_type(nanokv.Engine(model).submit([1]).tokens)
reveal_type(nanokv.__version__)
nanokv.generate(model, 5)
nanokv.lod("tiny")
"""
SEEN = [
    "nanokv.model.Transformer",
    "nanokv.text.tokenizer.Tokenizer",
    "torch._C.device",
    "nanokv.cache.base.KVCache",
    "int",
    "torch._tensor.Tensor",
    "nanokv.decoding.generation.Tokens[",
    "nanokv.chat.session.Session",
    "str",
    "typing.Iterator[str]",
    "list[int]",
    "str",
]


def untyped(source: str) -> list[str]:
    """Public functions and methods that lack the type of an argument or of what they return, as "line: name"."""
    bad = []
    for node in ast.parse(source).body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        for f in (node.body if isinstance(node, ast.ClassDef) else [node]) if public else ():
            if not isinstance(f, ast.FunctionDef) or (
                f.name.startswith("_") and f.name != "__init__"
            ):
                continue
            arguments = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
            # Self.
            arguments = arguments[
                isinstance(node, ast.ClassDef) and "staticmethod" not in ast.unparse(f) :
            ]
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


@pytest.mark.slow
def test_mypy_sees_the_types_of_the_public_names(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        "--follow-imports=silent",
        f"--cache-dir={ROOT / '.mypy_cache' / 'program'}",  # what torch's files say, seen once
        "program.py",
    ]
    options = {
        "cwd": tmp_path,
        "env": {"MYPYPATH": str(ROOT)},
        "capture_output": True,
        "text": True,
        "timeout": 300,
    }
    done = subprocess.run(command, **options)
    told = [
        line.split('Revealed type is "')[1].rstrip('"')
        for line in done.stdout.splitlines()
        if "Revealed" in line
    ]
    assert [found.replace("builtins.", "") for found in told] != [], done.stdout + done.stderr
    for found, expected in zip(told, SEEN, strict=True):
        assert expected in found.replace("builtins.", "")
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert (
        len(errors) == 2
        and 'Argument 2 to "generate"' in errors[0]
        and 'has no attribute "lod"' in errors[1]
    )
