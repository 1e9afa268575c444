"""Every command that the README shows must work: `make` targets exist, `nanokv` lines are parsed, cheap ones are run.

A fenced block marked bash, sh, shell or console is a promise. In a console block only lines that begin with `$ ` are
commands, the rest is output. What may not be run here (a download, hours of training, an install) has its reason in
NOT_RUN; a command of a new kind fails until someone decides how it is checked.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
NOT_RUN = {
    "needs a network": r"\bQwen/|^nanokv (chat|generate|verify) .*(-m|--model) [\w.-]+/|\bsmollm2\b",
    "trains for minutes or hours": r"^nanokv train\b",
    "is interactive": r"^nanokv chat$",
}
# Not ours to test.
FOREIGN = "git cd pip uv python python3 export source apt echo printf cat".split()


def commands(text: str) -> list[str]:
    """Command lines of all fenced shell blocks, continuation lines joined, comments dropped."""
    found = []
    for language, body in re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language not in ("bash", "sh", "shell", "console"):
            continue
        lines = body.replace("\\\n", " ").splitlines()
        if language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found += [
            re.sub(r"\s+#\s.*$", "", line).strip()
            for line in lines
            if line.strip() and line.strip()[0] != "#"
        ]
    return found


def parts(command: str) -> list[list[str]]:
    """The single commands of `a && b | c`, as words; leading VAR=value words are dropped."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    single, all_parts = [], []
    for word in [*lexer, ";"]:
        if not re.fullmatch(r"[|&;]+", word):
            single.append(word)
            continue
        while single and re.fullmatch(r"[A-Z_]+=.*", single[0]):
            single.pop(0)
        all_parts.append(single)
        single = []
    return [part for part in all_parts if part]


def readme() -> str:
    return README.read_text()


def reason_not_to_run(command: str) -> str | None:
    command = command.removeprefix(".venv/bin/")
    return next(
        (reason for reason, pattern in NOT_RUN.items() if re.search(pattern, command)), None
    )


def runnable() -> list[str]:
    """Commands made of nanokv (and echo, printf, cat before a pipe) alone."""
    ours = [c for c in commands(readme()) if "nanokv" in {Path(part[0]).name for part in parts(c)}]
    return [c for c in ours if reason_not_to_run(c) is None]


def test_readme_shows_commands():
    shown = commands(readme())
    assert "make chat" in " ".join(shown) and "make test" in " ".join(shown)


def test_every_command_of_the_readme_is_known():
    """Each word that begins a command is make, nanokv, or one of the few foreign tools."""
    known = {"make", "nanokv", *FOREIGN}
    first = {
        Path(part[0]).name: command for command in commands(readme()) for part in parts(command)
    }
    assert {word: command for word, command in first.items() if word not in known} == {}


def test_make_targets_of_the_readme_exist():
    """Also those in running text, between backticks."""
    text = readme()
    targets = set(re.findall(r"^\.PHONY: (\w+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for c in commands(text)
        for p in parts(c)
        if p[0] == "make"
        for word in p[1:]
        if "=" not in word
    }
    named |= set(re.findall(r"`make (\w+)", text))
    assert named - targets == set()


def test_nanokv_commands_of_the_readme_parse():
    """Unknown commands and flags are found without running anything."""
    import importlib

    from nanokv.apps import cli

    bad = {}
    for command in commands(readme()):
        for part in parts(command):
            if Path(part[0]).name != "nanokv" or part[1:2] in (["--help"], ["--version"], []):
                continue
            try:
                module = importlib.import_module(cli.COMMANDS[part[1]][0])
                cli.make_parser(part[1], module).parse([w for w in part[2:] if w not in (">", "<")])
            except SystemExit:
                pass  # --help
            except Exception as error:
                bad[command] = repr(error)
    assert bad == {}


def test_every_install_is_of_this_folder():
    """`pip install nanokv` would fetch somebody else's. With constraints.txt pip would take a user's own torch away, so
    the exact versions are offered and not asked for."""
    blocks = re.findall(r"^```bash\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)
    lines = [
        line.split(" #")[0].strip()
        for block in blocks
        for line in block.splitlines()
        if "pip install" in line
    ]
    assert lines == ["pip install .", "pip install . -c constraints.txt"]
    assert set(re.findall(r"https?://\S+", readme())) == set(), "an address that may not exist"


def test_files_of_the_readme_exist():
    """Links and pictures that point into the repository."""
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", readme())
    links += re.findall(r'src="(?!https?:)([^"]+)"', readme())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_is_short():
    """What is longer belongs into docs/."""
    text = readme()
    assert len(text.splitlines()) <= 200
    assert sum(any(letter.isalnum() for letter in word) for word in text.split()) <= 1000


def test_prose_of_the_readme_is_80_columns_wide():
    """Headings, pictures, tables and code may be wider."""
    prose = re.sub(r"^```.*?^```$", "", readme(), flags=re.MULTILINE | re.DOTALL)
    assert [
        line
        for line in prose.splitlines()
        if len(line) > 80 and not line.startswith(("#", "!", "|"))
    ] == []


def test_the_example_of_a_smaller_cache_takes_half_the_bytes(cli):
    """As the status line shows it, beside the same command without --cache."""
    (line,) = [
        line
        for line in readme().splitlines()
        if "--cache quantized" in line and "half the bytes" in line
    ]
    (words,) = parts(commands(f"```bash\n{line}\n```")[0])
    sizes = [bytes_shown(cli(*given)) for given in (words[1:], words[1 : words.index("--cache")])]
    assert 0 < sizes[0] <= 0.55 * sizes[1]


def bytes_shown(done) -> float:
    """The size of the cache in the status line of (exit code, stdout, stderr)."""
    number, unit, _ = re.search(
        r" ([\d.,]+) ([kM])B( \([\d.]+ [kM]B reserved\))? · ", done[2]
    ).groups()
    return float(number.replace(",", "")) * {"k": 1e3, "M": 1e6}[unit]


def test_the_map_of_the_code_is_whole():
    """docs/code.md names every module and every package of nanokv."""
    text = (ROOT / "docs" / "code.md").read_text()
    parts = [
        path
        for path in (ROOT / "nanokv").iterdir()
        if path.suffix in ("", ".py") and path.name[:2] != "__"
    ]
    names = {f"{path.name}/" if path.is_dir() else path.name for path in parts}
    assert [name for name in sorted(names) if name not in text] == []
    assert [
        name for name in re.findall(r"^  (\w+(?:\.py|/))", text, re.MULTILINE) if name not in names
    ] == []


def test_proofs_name_tests_and_commands_that_exist():
    """docs/proofs.md: every test file between its backticks, every make target, every nanokv command."""
    from nanokv.apps import cli

    text = (ROOT / "docs" / "proofs.md").read_text()
    files = re.findall(r"tests/[\w/]+\.py", text)
    assert len(files) > 10 and [name for name in files if not (ROOT / name).exists()] == []
    targets = set(re.findall(r"^\.PHONY: (\w+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make (\w+)", text)) <= targets
    assert set(re.findall(r"`\.venv/bin/nanokv (\w+)", text)) <= set(cli.COMMANDS)


def by_day() -> list:
    """As printed, but for the large random model: by day the bundled one stands for it."""
    found = []
    for command in runnable():
        large = "qwen3-0.6b-random" in command
        found += [command.replace("qwen3-0.6b-random", "tiny")] if large else []
        found.append(pytest.param(command, marks=pytest.mark.night) if large else command)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", by_day())
def test_readme_command_runs(command, tmp_path):
    """As printed, through a shell, from the checkout, with `nanokv` on the path, no terminal and no network."""
    program = tmp_path / "bin" / "nanokv"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nanokv "$@"\n')
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    line = re.sub(r"(^|\s)\.venv/bin/nanokv\b", r"\1nanokv", command)
    options = {
        "cwd": ROOT,
        "env": env,
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
    }
    written = [
        path
        for path in (ROOT / name for name in re.findall(r"-o (\S+)", line))
        if not path.exists()
    ]
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], timeout=300, **options)
    for path in written:  # the next run would be asked whether it may replace them
        path.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or ">" in line


SAMPLE = """
```bash
make chat      # talk
echo hi | X=1 nanokv chat -q && make \\
    test
```
```console
$ nanokv env
nothing here is a command
```
```python
not_a_command()
```
"""


def test_the_extraction_can_fail():
    """What the other tests rely on: languages, comments, continuation lines, prompts, pipes."""
    found = commands(SAMPLE)
    assert found == ["make chat", "echo hi | X=1 nanokv chat -q && make      test", "nanokv env"]
    assert parts(found[1]) == [["echo", "hi"], ["nanokv", "chat", "-q"], ["make", "test"]]
    assert reason_not_to_run("nanokv chat -m Qwen/Qwen3-0.6B") == "needs a network"
    assert reason_not_to_run("nanokv chat") == "is interactive"
    assert reason_not_to_run("echo hi | nanokv chat") is None


def test_commands_of_the_docs_parse():
    """docs/*.md: the same promise as the README's, for the nanokv commands in their blocks."""
    import importlib

    from nanokv.apps import cli

    bad, seen = {}, 0
    for page in sorted((ROOT / "docs").glob("*.md")):
        for command in commands(page.read_text()):
            for part in parts(command):
                if Path(part[0]).name == "nanokv":
                    seen += 1
                    try:
                        cli.make_parser(
                            part[1], importlib.import_module(cli.COMMANDS[part[1]][0])
                        ).parse(part[2:])
                    except Exception as error:
                        bad[command] = repr(error)
    assert bad == {} and seen > 4


# --- docs/coming-from.md ----------------------------------------------------------------------------------------------

HABITS = ROOT / "docs" / "coming-from.md"
ROWS = re.findall(r"^\| (`.+) \| `(.+)` \|$", HABITS.read_text(encoding="utf-8"), re.MULTILINE)


def test_each_program_has_its_rows():
    tables = re.split(r"^## ", HABITS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    rows = {
        table.split("\n")[0]: len(re.findall(r"^\| `", table, re.MULTILINE)) for table in tables
    }
    assert list(rows) == ["transformers", "llama.cpp", "ollama"] and min(rows.values()) >= 10
    assert sum(rows.values()) == len(ROWS)


def test_the_flags_that_are_said_to_be_accepted_are_those():
    from nanokv.apps.cli.common.arguments import ALIASES

    (said,) = re.findall(
        r"Four flags .* accepted,[^:]*:\s(.*?)\.\s", HABITS.read_text(encoding="utf-8"), re.DOTALL
    )
    assert set(re.findall(r"`(--[a-z-]+)`", said)) == set(ALIASES) and len(ALIASES) == 4


@pytest.mark.parametrize(
    "ours", dict.fromkeys(one for _, ours in ROWS for one in ours.split("`, or `"))
)
def test_what_the_table_of_habits_says_works(ours, tmp_path):
    """Python runs as it stands, after the page's own first block; a command is parsed, its flags checked."""
    import importlib

    from nanokv.apps import cli
    from nanokv.apps.cli.chat import commands as chat_commands
    from nanokv.apps.cli.common import arguments

    if ours.startswith("nanokv "):
        _, name, *words = shlex.split(ours)
        args = cli.make_parser(name, importlib.import_module(cli.COMMANDS[name][0])).parse(words)
        if getattr(args, "model", "") == "tiny":
            import nanokv

            assert (args.context or 0) <= nanokv.load("tiny")[0].config.max_position_embeddings
        return
    if ours.startswith("/"):
        name, rest = chat_commands.parse(ours)
        assert name in chat_commands.COMMANDS and (
            name != "/set" or arguments.parse_setting(*rest.split()) is not None
        )
        return
    (before,) = re.findall(
        r"^```python\n(.*?)^```", HABITS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    names = {"folder": tmp_path / "saved"}
    exec(before, names)
    exec(ours, names)


def test_what_people_would_type_is_refused_with_a_hint():
    """The table is needed: the Python of its left column does not run here."""
    from nanokv.support import habits

    theirs = " ".join(left for left, _ in ROWS)
    known = {*habits.MODEL, *habits.TOKENIZER, *habits.MODULE, *habits.ARGUMENTS}
    assert len([name for name in known if re.search(rf"\b{name}\b", theirs)]) >= 12


def quotes(page: str) -> list[tuple[str, str]]:
    """(file, quoted line) of a page on which `path` stands alone above its code blocks."""
    found, file, code = [], "", False
    for line in page.splitlines():
        if line.startswith("```"):
            code = not code and line in ("```python", "```cpp")
        elif code:
            found.append((file, line))
        elif re.fullmatch(r"`\S+/\S+`", line):
            file = line.strip("`")
    return found


def blocks(page: str) -> list[tuple[str, str]]:
    """(file, code) of every block of `quotes`, its lines together."""
    file, found = "", []
    for name, code in re.findall(
        r"^`(\S+/\S+)`$|^```(?:python|cpp)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    ):
        file = name or file
        found += [(file, code)] if code else []
    return found


def test_the_life_of_a_token_quotes_lines_that_exist():
    """docs/life-of-a-token.md: each quoted line stands in its file, word for word, and the tables' files exist."""
    page = (ROOT / "docs/life-of-a-token.md").read_text(encoding="utf-8")
    found = quotes(page)
    assert len({file for file, _ in found}) >= 12, "from the command line to the kernel"
    served = {file for file, _ in quotes(page.split("## A request through the server")[1])}
    assert 8 <= len(served) <= 12, (
        "from the socket to the engine and back, in so few files that a reader follows"
    )
    lines = {file: (ROOT / file).read_text(encoding="utf-8").splitlines() for file, _ in found}
    assert [(file, line) for file, line in found if line not in lines[file]] == []
    gaps = [
        block
        for file, block in blocks(page)
        if block not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert gaps == [], "lines with others between them would read as one statement"
    assert [
        file
        for file in re.findall(r"`(nanokv/[\w/]+\.py)` \|", page)
        if not (ROOT / file).is_file()
    ] == []
    assert quotes("`a/b.py`\n```python\nx = 1\n```\n```console\ny\n```\n") == [("a/b.py", "x = 1")]
