"""Files that the user names: nothing that exists is replaced unasked, by any command."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from nanokv.apps.cli import COMMANDS, main, make_parser
from nanokv.apps.cli.common import files
from nanokv.errors import NanoKVError

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
OUTPUTS = {"--out", "--output", "--plot"}  # flags that name something to write
WRITERS = {  # command with OUT for the folder → the files in it that it would replace
    "trace -p Once -n 1 --no-uncached --repeat 1 -o OUT/page.html": ["page.html"],
    "live -o OUT/page.html": ["page.html"],
    "memory Qwen/Qwen3-0.6B --plot OUT/memory.svg": ["memory.svg"],
    "bench --contexts 16 --weights plain --steps 1 --repeat 1 --plot OUT/bench.svg": ["bench.svg"],
    "course exam 05 --folder NOTEBOOKS -o OUT": ["A.md", "key.md"],
    "course variants 05 --students OUT/names.txt --folder NOTEBOOKS -o OUT": [
        "key.csv",
        "05_the_waste/Ada.ipynb",
    ],
    "course build 05 --folder OUT": ["05_the_waste.ipynb"],
    "course record 05 --folder NOTEBOOKS -o OUT": ["recorded-05.json"],
    "course book --folder NOTEBOOKS -o OUT": ["style.css", "05_the_waste.html"],
    "course site --folder NOTEBOOKS -o OUT": ["index.html"],
    "course slides 05 --folder NOTEBOOKS -o OUT": ["05_the_waste.html"],
    "course gift 05 --folder NOTEBOOKS -o OUT/questions.gift": ["questions.gift"],
    "course nbgrader 05 --folder NOTEBOOKS -o OUT": ["source/05_the_waste/05_the_waste.ipynb"],
    "course grade OUT/handed_in -o OUT/results.csv": ["results.csv"],
}
SLOW = (  # writing takes long: only the question is tried
    "bench",
    "course record",
    "course book",
    "course site",
    "course slides",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with what the commands read; stdin is no terminal and holds nothing."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    (tmp_path / "names.txt").write_text("Ada\n")
    (tmp_path / "handed_in").mkdir()
    (tmp_path / "handed_in" / "Ada.ipynb").write_text("{}")
    (tmp_path / "source").mkdir()
    shutil.copy(NOTEBOOKS / "source" / "05_the_waste.py", tmp_path / "source")
    return tmp_path


def argv(line, place):
    return [
        word.replace("OUT", str(place)).replace("NOTEBOOKS", str(NOTEBOOKS))
        for word in line.split()
    ]


def write_old(place, names):
    for name in names:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("old")


@pytest.mark.parametrize("line", WRITERS)
def test_what_exists_is_refused_and_stays(line, place, capsys):
    for name in WRITERS[line]:
        write_old(place, [name])
        before = sorted(place.rglob("*"))
        assert main(argv(line, place)) == 2
        out, err = capsys.readouterr()
        assert (
            f"{name} would be replaced; nothing was written" in err
            and "--force" in err.split("hint:")[1]
        )
        assert (
            out == "" and (place / name).read_text() == "old" and sorted(place.rglob("*")) == before
        )
        (place / name).unlink()


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in WRITERS if not line.startswith(SLOW)])
def test_force_replaces_it(line, place, capsys):
    write_old(place, WRITERS[line])
    assert main([*argv(line, place), "--force"]) == 0, capsys.readouterr().err
    assert all((place / name).read_text("utf-8") != "old" for name in WRITERS[line])


def test_every_command_that_writes_has_the_flag_and_is_tried_here():
    """A new command with an output is noticed. `train` has a --force of its own, `chat` writes by /save."""
    import importlib

    writers = set()
    for name, (module, _) in COMMANDS.items():
        flags = set(make_parser(name, importlib.import_module(module)).flags())
        if flags & OUTPUTS:
            writers.add(name)
            assert "--force" in flags, f"nanokv {name} has {flags & OUTPUTS} and no --force"
    assert writers == {line.split()[0] for line in WRITERS} | {"batch", "train"}
    tried = {line.split()[1] for line in WRITERS if line.startswith("course ")}
    from nanokv.apps.cli.commands.course import ACTIONS

    reading = {"run", "claims", "seal", "mistakes", "progress"}
    assert set(ACTIONS) - tried == reading, "does the new action write anything?"


class Tty(io.StringIO):
    def isatty(self):
        return True


ANSWERS = [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]


@pytest.mark.parametrize(("said", "allowed"), ANSWERS)
def test_on_a_terminal_it_is_a_question(said, allowed, tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(sys, "stdin", Tty(said))
    monkeypatch.setattr(sys, "stderr", err := Tty())
    if allowed:
        files.ask_to_replace(False, tmp_path / "a")
    else:
        with pytest.raises(NanoKVError, match="nothing was written"):
            files.ask_to_replace(False, tmp_path / "a")
    # Ctrl-D: the error stands on a line of its own.
    ended = "" if said else "\n"
    assert err.getvalue() == f"{tmp_path}/a would be replaced. Go on? y/N {ended}"


def test_only_files_count_and_links_to_them(tmp_path):
    files.ask_to_replace(False, tmp_path / "new", "/dev/null", tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NanoKVError, match="link would be replaced"):
        files.ask_to_replace(False, tmp_path / "link")
    (tmp_path / "a").write_text("")
    with pytest.raises(NanoKVError, match="link and 1 more would be replaced"):
        files.ask_to_replace(False, tmp_path / "link", tmp_path / "new", tmp_path / "a")
    files.ask_to_replace(True, tmp_path / "a")


def test_a_batch_with_other_settings_drops_no_answer_unasked(
    tmp_path, tiny_folder, capsys, monkeypatch
):
    """The same command goes on; another -n, another prompt or a missing line would lose answers."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": text}) + "\n" for text in ("Once", "upon", "a time")]
    source.write_text("".join(lines))
    batch = ["batch", str(source), "-o", str(out), "-m", str(tiny_folder), "-t", "0", "-q"]
    assert main([*batch, "-n", "3"]) == 0 and main([*batch, "-n", "3"]) == 0
    before = out.read_bytes()
    capsys.readouterr()
    assert main([*batch, "-n", "4"]) == 2
    assert (
        "3 answers in" in (err := capsys.readouterr().err)
        and "--force" in err
        and out.read_bytes() == before
    )
    source.write_text("not JSON\n" + lines[0] + lines[2])
    assert main([*batch, "-n", "3"]) == 2
    err = capsys.readouterr().err
    assert (
        "1 answers in" in err
        and "would be dropped; nothing was written" in err
        and out.read_bytes() == before
    )
    source.write_text("".join(lines))
    assert main([*batch, "-n", "4", "--force"]) == 0
    assert [
        json.loads(line)["usage"]["completion_tokens"] for line in out.read_text().splitlines()
    ] == [4, 4, 4]


@pytest.mark.parametrize(
    ("name", "told"), [("~nosuchuser/x", "there is no user 'nosuchuser'"), ("a\0b", "NUL")]
)
def test_a_name_that_is_no_path_is_an_error(name, told):
    with pytest.raises(NanoKVError, match=told):
        files.user_path(name)


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.user_path("~/x") == tmp_path / "x" and files.user_path("x~") == Path("x~")
