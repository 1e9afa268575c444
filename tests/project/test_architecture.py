"""The shape of the source tree, read with `ast`: who may import whom, and the few rules that keep files readable.

Nothing is imported here, so a broken module cannot hide a broken rule. Each rule is a function from source text to a
list of complaints; the last tests feed every rule a bad example, so that a rule which never complains is noticed.
"""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    p for package in ("nanokv", "weights_loader") for p in (ROOT / package).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LONGEST_FUNCTION = 40  # lines with its signature, without its docstring: one screen
LONGER = {"paged_attention_kernel"}  # one loop, compiled as one program
LONGEST_MODEL = 230  # one thing per line; and no file beside it but rope.py and recurrent.py
FLAGS = re.compile("add_(.*_)?arguments")  # of a command: a list, one flag after another
MARKS = 25  # of which five are this file's own examples

# Strictly downward: a module may import its own room and any row below it. A name stands for all modules below it that
# have no row of their own.
LAYERS = [
    {"nanokv.__main__"},
    # apps: what people start
    {"nanokv.apps.cli"},
    {"nanokv.apps.cli.commands"},
    {
        "nanokv.apps.cli.chat",
        "nanokv.apps.cli.batch",
        "nanokv.apps.cli.bench",
        "nanokv.apps.cli.memory",
        "nanokv.apps.cli.train",
    },
    {"nanokv.apps.cli.common"},
    {"nanokv.bench"},  # an entrance
    {"nanokv.apps.serve", "nanokv.apps.serve.http"},
    {"nanokv.apps.serve.run"},
    {"nanokv.apps.serve.api"},
    # school: what the notebooks and the bundled model are made with
    {"nanokv.school.course"},
    {"nanokv.school.training"},
    # lab: instruments
    {"nanokv.lab.live"},
    {"nanokv.lab.verify", "nanokv.lab.bench", "nanokv.lab.trace", "nanokv.lab.replay"},
    {"nanokv.lab.faults"},
    {"nanokv.lab.study"},
    # the library
    {"nanokv.ranks", "nanokv.remote", "nanokv.embeddings"},
    {"nanokv.engine", "nanokv.chat"},
    {"nanokv.decoding"},
    {"nanokv.fast", "nanokv.parallel", "nanokv.export"},
    {"nanokv.inference", "nanokv.loading"},
    {"nanokv.cache"},
    {"nanokv.other_families"},  # nanokv.model imports it by name, for the families that need it
    {"nanokv.hybrid"},
    {"nanokv.layer_kinds"},
    {"nanokv.stacked_experts", "nanokv.cla"},
    {"nanokv.model", "nanokv.costs"},
    {"nanokv.checkpoint", "nanokv.sinks"},
    {"nanokv.windows"},
    {
        "nanokv.rope",
        "nanokv.recurrent",
        "nanokv.text",
        "nanokv.attention",
        "nanokv.cache.options",
    },
    {"nanokv.backends"},
    {"nanokv.config"},
    {"nanokv.config_file"},
    {"nanokv.config_layers"},
    {"nanokv.support"},
    {"nanokv.errors"},
    {"weights_loader"},
]
# They use the library; only their names stand in LAYERS.
NEIGHBOURS = {"nanokv.apps", "nanokv.bench", "nanokv.lab", "nanokv.school"}
# May use the public names.
PROGRAMS = {"nanokv.apps.cli", "nanokv.lab.faults", "nanokv.school.training"}
# Narrower than the layers: all that these may import of the project, as (module, name) or a whole module.
ONLY = {
    "nanokv.model": {"nanokv.config", "nanokv.checkpoint", "nanokv.rope"},
    "nanokv.attention": {"nanokv.errors", "nanokv.backends"},
    "nanokv.recurrent": set(),
    "nanokv.backends": set(),
    "nanokv.errors": {"weights_loader"},
    "nanokv.inference": {
        "nanokv.attention",
        "nanokv.errors",
        "nanokv.text.ids",
        "nanokv.checkpoint",
        "nanokv.support.neighbours",
        "nanokv.support.device_memory",
        ("nanokv.costs.formulas", "forward_bytes"),
        ("nanokv.costs.free_memory", "available_memory"),
        ("nanokv.cache.capabilities", "causal_keys"),
        ("nanokv.cache.capabilities", "row_lengths"),
        *(
            (room, name)
            for room in ("nanokv.cache.base", "nanokv.cache")
            for name in ("KVCache", "NoCache")
        ),
    },
    "nanokv.cache": {
        "nanokv.errors",
        "nanokv.config",
        "nanokv.cache",
        "nanokv.cache.options",
        "weights_loader",
        ("nanokv.support.device_memory", "full_memory"),
        ("nanokv.attention", "causal_mask"),
        # A policy of an evicting cache may compute attention itself.
        *(("nanokv.attention", name) for name in ("Causal", "Decode", "Masked", "is_causal")),
        ("nanokv.windows", "within"),
        ("nanokv.sinks", "with_sinks"),
        ("nanokv.recurrent", "Written"),  # what tokens write to a state, so that they can go back
        # Sinks move: their keys are turned on.
        ("nanokv.rope", "apply_rope"),
        ("nanokv.rope", "rope_frequencies"),
    },
    "weights_loader": {"weights_loader"},
}
# Who may hold the Namespace of argparse: a command's `run`, whatever reads flags into options
# (`model_options(args)`), and the frame above `run`.
COMMAND_LINE, READER = "nanokv.apps.cli", re.compile(r"\w+_options")
FRAME = {
    "nanokv.apps.cli": {"dispatch"},
    "nanokv.apps.cli.common.arguments": {"parse"},
    "nanokv.apps.cli.common.ranks": {"run", "options_of", "compare_flags"},
}
FROZEN = re.compile(r"\w*Options|Plan|Loaded|Choice")  # classes of values that travel


@functools.cache
def tree(source: str) -> ast.Module:
    """Each file is parsed once, for all rules."""
    return ast.parse(source)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit(module: str) -> str:
    """nanokv.cache.base → nanokv.cache; the thing that has a place in LAYERS."""
    known = set().union(*LAYERS)
    parts = module.split(".")
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((name for name in names if name in known), ".".join(parts[:2]))


def imports(source: str, module: str = "") -> set[tuple[str, str]]:
    """Every import, also those inside functions, as (module, name); `import a.b` gives ("a.b", "")."""
    found = set()
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [base])])
            # Not __version__.
            names = [a.name for a in node.names if base != "nanokv" or not a.name.startswith("__")]
            floors = {"nanokv", *NEIGHBOURS}
            found |= {(f"{base}.{name}", "") if base in floors else (base, name) for name in names}
    return found


def without_type_imports(source: str) -> str:
    """What is imported for type checkers only is never run."""
    return re.sub(r"^if TYPE_CHECKING:.*?(?=^\S)", "", source, flags=re.MULTILINE | re.DOTALL)


def ours(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(m, n) for m, n in found if m.split(".")[0] in ("nanokv", "weights_loader")}


def upward_imports(module: str, source: str) -> list[str]:
    """Imports that climb, go sideways, or leave the narrower list of ONLY."""
    place = {name: row for row, names in enumerate(LAYERS) for name in names}
    here, bad = unit(module), []
    if here == "nanokv":  # the package itself imports by name, on first use
        found = ours(imports(without_type_imports(source), module))
        return [f"{module} imports {m}: nanokv/__init__.py stays lazy" for m, _ in found]
    if module in NEIGHBOURS and not ours(imports(source)):
        return []
    if here not in place:
        return [f"{module}: {here} has no place in LAYERS of {Path(__file__).name}, give it one"]
    for target, name in sorted(ours(imports(source, module))):
        there = unit(target)
        if target == "nanokv" and here.startswith(tuple(PROGRAMS)):
            continue
        allowed = ONLY.get(here)
        if allowed is not None and not any(a in (target, there, (target, name)) for a in allowed):
            bad.append(
                f"{module} imports {name or 'all'} of {target}; allowed: {sorted(map(str, allowed))}"
            )
        elif there != here and place.get(there, -1) <= place[here]:
            bad.append(f"{module} imports {target}, which is not below it")
    return bad


def circles(sources: dict[str, str]) -> list[str]:
    """Files that import each other, as "a b c", those for type checkers too; the package itself imports by name, on
    first use."""
    graph = {}
    for module, source in sources.items():
        found = imports(source, module)
        found = {f"{m}.{name}" if f"{m}.{name}" in sources else m for m, name in found}
        graph[module] = found & set(sources) - {module, "nanokv"}
    reach = {module: set(targets) for module, targets in graph.items()}
    for middle in reach:  # Warshall's closure
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    together = {
        module: " ".join(sorted(m for m in reach[module] if module in reach[m])) for module in reach
    }
    return sorted({names for module, names in together.items() if module in reach[module]})


WORDS = {
    ast.Name: lambda n: [n.id],
    ast.Attribute: lambda n: [n.attr],
    ast.ImportFrom: lambda n: [n.module or "", *(a.name for a in n.names)],
    ast.Import: lambda n: [a.name for a in n.names],
}


@functools.cache
def names_used(source: str) -> list[tuple[int, set[str]]]:
    """(line, names) of each identifier, attribute and import; a dotted name counts as its parts."""
    return [
        (node.lineno, {part for word in WORDS[type(node)](node) for part in word.split(".")})
        for node in ast.walk(tree(source))
        if type(node) in WORDS
    ]


def mentions(source: str, name: str) -> list[int]:
    """Lines that use a name as an identifier, attribute or import (comments and docstrings are free)."""
    return [line for line, names in names_used(source) if name in names]


def long_functions(source: str, limit: int = LONGEST_FUNCTION) -> list[str]:
    functions = (
        n for n in ast.walk(tree(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    functions = (f for f in functions if f.name not in LONGER and not FLAGS.fullmatch(f.name))
    sizes = ((f.name, length(f), f.lineno) for f in functions)
    return [
        f"line {line}: {name} has {size} lines, limit {limit}"
        for name, size, line in sizes
        if size > limit
    ]


def length(function) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function):
        said = function.body[0]
        lines -= said.end_lineno - said.lineno + 1
    return lines


def marks_against_the_formatter(source: str) -> list[int]:
    """Lines that ask `ruff format` to leave them alone."""
    return [
        n for n, line in enumerate(source.splitlines(), 1) if re.search(r"# fmt: (skip|off)", line)
    ]


def defined_twice(source: str) -> list[str]:
    """A second `def` of a name takes the place of the first, also where the first was meant."""
    bodies = [
        tree(source).body,
        *(n.body for n in ast.walk(tree(source)) if isinstance(n, ast.ClassDef)),
    ]
    again = []
    for body in bodies:
        plain = [
            n
            for n in body
            if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.decorator_list
        ]
        names = [n.name for n in plain]
        again += [
            f"line {n.lineno}: {n.name} again" for i, n in enumerate(plain) if n.name in names[:i]
        ]
    return again


def namespaces(module: str, source: str) -> list[str]:
    """Where a Namespace of argparse travels below a command's `run`, or is asked or written like a bag."""
    bad = []
    for function in functions_of(tree(source)):
        name = getattr(function, "name", "lambda")
        framed = name in FRAME.get(module, ())
        commands = module.startswith(f"{COMMAND_LINE}.commands.")
        reads = framed or READER.fullmatch(name) or (commands and name == "run")
        given = function.args
        taken = [a for a in [*given.posonlyargs, *given.args, *given.kwonlyargs] if is_namespace(a)]
        where = f"line {function.lineno}: {name}"
        bad += [f"{where} takes the Namespace {a.arg}" for a in taken if not reads]
        if not framed:
            bad += [f"{where} passes args on to {other}" for other in sorted(receivers(function))]
    written = [
        n
        for n in ast.walk(tree(source))
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    ]
    return bad + [
        f"line {n.lineno}: writes {ast.unparse(n)}"
        for n in written
        if ast.unparse(n.value) == "args"
    ]


def is_namespace(parameter: ast.arg) -> bool:
    """By its name, or by its annotation."""
    return parameter.arg == "args" or "Namespace" in ast.unparse(
        parameter.annotation or ast.Constant("")
    )


def functions_of(node: ast.AST) -> list:
    """Also those without a name."""
    return [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]


def receivers(function: ast.AST) -> set[str]:
    """What a function does with `args` but read its fields or have them read: the calls, or "another name"."""
    fields = {id(n.value) for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    calls = {
        id(a): ast.unparse(n.func)
        for n in ast.walk(function)
        if isinstance(n, ast.Call)
        for a in n.args
    }
    used = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == "args"]
    given = {calls.get(id(n), "another name") for n in used if id(n) not in fields}
    return {name for name in given if not READER.fullmatch(name.rpartition(".")[2])}


def thawed(source: str) -> list[str]:
    """Options and plans that are no frozen dataclass."""
    classes = [
        n
        for n in ast.walk(tree(source))
        if isinstance(n, ast.ClassDef) and FROZEN.fullmatch(n.name)
    ]
    marks = {n: [ast.unparse(d) for d in n.decorator_list] for n in classes}
    return [
        f"line {n.lineno}: {n.name} is not frozen"
        for n in classes
        if marks[n] != ["dataclass(frozen=True)"]
    ]


def late_patching(source: str) -> list[str]:
    """What a file puts on a class or a module of ours: nobody who reads that one knows of it."""
    # What they do when called is their own business.
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = [
        n for part in tree(source).body if not isinstance(part, functions) for n in ast.walk(part)
    ]
    named = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    ours = [n for n in named if "nanokv" in ast.unparse(n) or "weights_loader" in ast.unparse(n)]
    imported = {(alias.asname or alias.name).split(".")[0] for n in ours for alias in n.names}
    set_here = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    set_here += [
        n.args[0]
        for n in nodes
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "setattr"
    ]
    return [
        f"line {n.lineno}: {ast.unparse(n)}"
        for n in set_here
        if ast.unparse(n).split(".")[0] in imported
    ]


def missing_docstring(source: str) -> list[str]:
    said = len(ast.get_docstring(tree(source)) or "")
    return (
        [] if said >= 40 else [f"its docstring of {said} characters does not say what the file is"]
    )


def cache_kind_questions(source: str) -> list[str]:
    """isinstance(x, SomethingCache): the fork that the contract exists to prevent."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree(source))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "isinstance"
        and len(node.args) == 2
        and re.search(r"Cache\b", ast.unparse(node.args[1]))
    ]


def unsafe_loading(source: str) -> list[str]:
    """Anything that can run code from a weight file."""
    words = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
    lines = [f"line {line}: {word}" for word in words for line in mentions(source, word)]
    for node in ast.walk(tree(source)):
        call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if call in ("torch.load", "torch.save", "eval", "exec") or call.endswith(
            ("numpy.load", "np.load")
        ):
            lines.append(f"line {node.lineno}: {call}")
    return lines


def concrete_caches() -> set[str]:
    """Names that would tie a file to one cache variant: all classes of nanokv/cache but the contract itself."""
    names = {"CACHES", "make_cache"}
    for path in (ROOT / "nanokv" / "cache").glob("*.py"):
        names |= {n.name for n in tree(path.read_text()).body if isinstance(n, ast.ClassDef)}
    return names - {"KVCache", "NoCache"}  # the contract and the null object


def imported_tests(source: str) -> list[str]:
    """Test files that this one imports: what two of them need stands in tests/support."""
    found = sorted(
        {module for module, _ in imports(source)} | {name for _, name in imports(source)}
    )
    return [f"imports {name}" for name in found if name.split(".")[-1].startswith("test_")]


def complaints(rule, paths) -> list[str]:
    """All that a rule from source text to complaints finds in these files, each with its file."""
    return [
        f"{path.relative_to(ROOT)}: {line}" for path in paths for line in rule(path.read_text())
    ]


def test_imports_point_downward():
    """cli → generation → inference → attention; model → config; caches → causal_mask; weights_loader → nothing."""
    assert [
        bad for path in SOURCES for bad in upward_imports(module_name(path), path.read_text())
    ] == []


def test_no_circle_between_files():
    """Not even inside a room, and not by an import inside a function or for type checkers: each file can be read after
    those it imports."""
    sources = {module_name(path): path.read_text() for path in SOURCES}
    assert circles(sources) == []
    typed = "if TYPE_CHECKING:\n    import a"
    circle = {"a": "import b", "b": "def f():\n    from c import x", "c": typed, "d": "import a"}
    assert circles(circle) == ["a b c"]


def test_admission_metrics_and_prefill_of_the_server_name_none_of_each_other():
    """Each is understood alone; what they share are the messages."""
    room, names = (
        "nanokv.apps.serve.run",
        ("admission", "metrics", "prefill", "engine_thread", "engine_client"),
    )
    for name in names[:3]:
        found = imports(
            (ROOT / room.replace(".", "/") / f"{name}.py").read_text(), f"{room}.{name}"
        )
        assert {m.removeprefix(f"{room}.") for m, _ in found} & set(names) == set(), name


def test_model_imports_torch_and_config_only():
    """A cache or a kernel in model.py is how copies of the model begin."""
    outside = {
        m.split(".")[0] for m, _ in imports((ROOT / "nanokv/model.py").read_text(), "nanokv.model")
    }
    assert outside - set(sys.stdlib_module_names) == {"torch", "nanokv"}


def test_model_is_read_in_one_sitting():
    assert len((ROOT / "nanokv/model.py").read_text().splitlines()) <= LONGEST_MODEL


def test_only_attention_calls_sdpa():
    users = {p.name for p in SOURCES if mentions(p.read_text(), "scaled_dot_product_attention")}
    assert users == {"attention.py"}


def test_only_one_file_draws_tokens():
    """The loop, the engine and batches call `draw` and `reason_to_end`: a second copy would end
    answers in its own way.
    """
    found = {path: imports(path.read_text(), module_name(path)) for path in SOURCES}
    users = {
        path.name
        for path, names in found.items()
        for how in ("sample", "choose")
        if ("nanokv.decoding.sample", how) in names
    }
    assert users == {"draw.py"}


@pytest.mark.parametrize("name", ["model", "attention", "inference"])
def test_model_and_paths_know_no_cache_variant(name):
    """The two paths are functions of any cache; only the null object may be named (by score)."""
    source = (ROOT / f"nanokv/{name}.py").read_text()
    found = {cache: mentions(source, cache) for cache in concrete_caches()}
    assert {cache: lines for cache, lines in found.items() if lines} == {}
    assert cache_kind_questions(source) == []


def test_nobody_asks_what_kind_of_cache_it_is():
    assert complaints(cache_kind_questions, SOURCES) == []


def test_no_pickle():
    """Weights are safetensors; optimiser states too. A pickle runs the code of whoever wrote it."""
    assert complaints(unsafe_loading, SOURCES) == []


def test_no_file_patches_another():
    """A class is whole where it is written; what it needs from above is passed to it, or imported by name."""
    assert complaints(late_patching, SOURCES) == []


def test_every_file_says_what_it_is():
    assert complaints(missing_docstring, SOURCES + TESTS) == []


def test_a_function_fits_on_a_screen():
    assert complaints(long_functions, SOURCES) == []


def test_no_test_imports_a_test():
    assert complaints(imported_tests, TESTS) == []
    assert imported_tests("from test_cli import x") == ["imports test_cli"]
    assert imported_tests("def f():\n    import project.test_make") == ["imports project.test_make"]


def test_options_travel_below_a_command_and_never_its_namespace():
    """Frozen dataclasses that can be printed, not a bag that each function asks for what it may hold."""
    files = [path for path in SOURCES if module_name(path).startswith(COMMAND_LINE)]
    assert [
        f"{path.name}: {line}"
        for path in files
        for line in namespaces(module_name(path), path.read_text())
    ] == []
    assert complaints(thawed, files) == []
    assert sum("Options:" in path.read_text() for path in files) > 9, "there are such classes"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def plan(args): return args.model", "line 1: plan takes the Namespace args"),
        (
            "def plan(given: argparse.Namespace): return given.model",
            "line 1: plan takes the Namespace given",
        ),
        (
            "def run(args): return getattr(args, 'fast', False)",
            "line 1: run passes args on to getattr",
        ),
        ("def run(args): load(1, args)", "line 1: run passes args on to load"),
        ("plan = lambda args: args.model", "line 1: lambda takes the Namespace args"),
        ("def run(args):\n    given = args", "line 1: run passes args on to another name"),
        ("def run(args):\n    args.cache = 1", "line 2: writes args.cache"),
        ("def run(args):\n    args.threads += 1", "line 2: writes args.threads"),
        ("def run(args):\n    def load(): return plan(args)", "line 1: run passes args on to plan"),
    ],
)
def test_the_rule_about_namespaces_can_fail(source, complaint):
    assert complaint in namespaces("nanokv.apps.cli.commands.x", source)
    assert (
        namespaces(
            "nanokv.apps.cli.commands.x", "def run(args):\n    load(model_options(args), args.out)"
        )
        == []
    )
    assert namespaces("nanokv.apps.cli.common.x", "def run(args): ...") == [
        "line 1: run takes the Namespace args"
    ]
    assert thawed(
        "class AOptions: ...\n@dataclass\nclass Plan: ...\n@dataclass(frozen=True)\nclass Loaded: ..."
    ) == [
        "line 1: AOptions is not frozen",
        "line 3: Plan is not frozen",
    ]


def test_the_formatter_formats():
    """A few tables may keep their form; each says why."""
    assert (
        sum(len(marks_against_the_formatter(path.read_text())) for path in SOURCES + TESTS) <= MARKS
    )


def test_no_name_is_defined_twice():
    assert complaints(defined_twice, SOURCES + TESTS) == []


def test_lines_fit_in_120_columns():
    files = {path.relative_to(ROOT): path.read_text().splitlines() for path in SOURCES + TESTS}
    assert [
        f"{path}:{n}"
        for path, lines in files.items()
        for n, line in enumerate(lines, 1)
        if len(line) > 120
    ] == []


def test_text_files_end_cleanly():
    """One newline at the end, no trailing blanks, no carriage returns: diffs stay about content."""
    files = [
        *SOURCES,
        *TESTS,
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.txt"),
        ROOT / "Makefile",
    ]
    files += [ROOT / ".ci" / "run", ROOT / ".gitignore"]
    bad = []
    for path in files:
        text = path.read_bytes().decode("utf-8")
        if text and (
            not text.endswith("\n")
            or text.endswith("\n\n")
            or re.search(r"[ \t]+$|\r", text, re.MULTILINE)
        ):
            bad.append(str(path.relative_to(ROOT)))
    assert bad == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nanokv.model", "from nanokv.cache import KVCache"),
        ("nanokv.model", "def f():\n    import nanokv.attention"),
        ("nanokv.cache.paged", "from nanokv.attention import decode_attention"),
        ("nanokv.cache.paged", "from ..attention import prefill_attention"),
        ("nanokv.inference", "from nanokv.cache import DictCache"),
        ("nanokv.inference", "from nanokv.decoding import generation"),
        ("nanokv.decoding.generation", "from nanokv.chat.session import Session"),
        ("nanokv.chat.session", "from nanokv.apps.cli import text"),
        ("weights_loader.shards", "from nanokv.errors import NanoKVError"),
        ("nanokv.decoding.generation", "import nanokv"),
        ("nanokv.newcomer", "import json"),
        ("nanokv", "from nanokv.model import Qwen3"),
    ],
)
def test_the_import_rule_can_fail(module, source):
    assert len(upward_imports(module, source)) == 1


def test_the_other_rules_can_fail():
    assert mentions(
        "import F\nF.scaled_dot_product_attention(q)", "scaled_dot_product_attention"
    ) == [2]
    assert mentions("from a import make_cache", "make_cache") == [1]
    assert cache_kind_questions("if isinstance(c, (NoCache, x.PagedCache)): pass") != []
    assert unsafe_loading("import torch\nw = torch.load('w.bin')") == ["line 2: torch.load"]
    assert unsafe_loading("from pickle import loads") == ["line 1: pickle"]
    long = 'def f():\n    """Docstring,\n    not counted."""\n' + "    x = 1\n" * 39
    assert long_functions(long) == []
    assert long_functions(long + "    x = 1\n") == ["line 1: f has 41 lines, limit 40"]
    assert marks_against_the_formatter("x = 1  # fmt: skip\ny = 2  # fmt\n# fmt: off") == [1, 3]
    assert defined_twice(
        "def f(): ...\nx = f\ndef f(): ...\nclass A:\n    def g(self): ...\n    def g(self): ..."
    ) == [
        "line 3: f again",
        "line 6: g again",
    ]
    for patch in (
        "A.maker = staticmethod(f)",
        "a.B.c += 1",
        "setattr(A, 'maker', f)",
        "if f:\n    A.maker, x = f, 1",
    ):
        assert len(late_patching(f"import nanokv.a as a\nfrom nanokv.a import A\n{patch}")) == 1, (
            patch
        )
    here = (
        "class B: ...\nB.maker = f",
        "def g():\n    A.maker = f",
        "table = A.maker",
        "import sys\nsys.path += [A]",
    )
    for own in here:
        assert late_patching(f"from nanokv.a import A\n{own}") == [], own
    assert missing_docstring('"""A file."""') == [
        "its docstring of 7 characters does not say what the file is"
    ]
    assert missing_docstring("import json") and not missing_docstring(f'"""{"x" * 40}"""')
    assert {"PagedCache", "DictCache", "make_cache"} <= concrete_caches()
