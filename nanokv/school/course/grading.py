"""Grades a folder of submissions: a table with one row per notebook and one column per exercise.

Every submission runs in a separate process without a network and within a time limit. If it
crashes or never ends, only its own row is affected, and the processes that it started are ended.
It is still untrusted code. The checks run in the submission's own process, so a determined author
can forge their results, and only a container keeps it from reading files. The table says which
submissions need a look; it cannot prove that the others are honest.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nanokv.errors import CourseError
from nanokv.school.course import checking, log, running
from nanokv.school.course.scores import results

LARGEST = 20_000_000  # bytes of a submission, with its outputs
# Names that no answer needs: of the judging, of its log, and of process control.
INSIDE = re.compile(
    r"NANOKV_COURSE\w*|course\.log\b|course import log\b|\blog\.note\b|\b_tell\b|\bchecking\b|"
    r"course\.session\b|setsid|PR_SET_\w+|os\.kill\b"
)
# Columns before those of the exercises.
FIXED = ("student", "file", "notebook", "score", "of", "error", "seconds")


def grade(
    folder: Path, limit: float = running.TIME_LIMIT, key: Path | None = None
) -> Iterator[dict]:
    """Yield one row per notebook below a folder, as soon as the notebook is graded.

    `limit`: seconds per notebook. `key`: the key.csv that `nanokv course variants` wrote.
    """
    folder = Path(folder)
    files = submissions(folder)
    if not files:
        raise CourseError(f"{folder} holds no *.ipynb")
    seeds = read_seeds(key) if key else None
    return (
        row(path, limit, seeds, folder) | {"file": path.relative_to(folder).as_posix()}
        for path in files
    )


def submissions(folder: Path) -> list[Path]:
    """All *.ipynb below a folder; a learning platform makes a subfolder per student.

    Hidden files and folders are skipped: Jupyter's checkpoints, and what macOS adds to archives.
    """
    found = (path for path in folder.rglob("*") if path.suffix.lower() == ".ipynb")
    return sorted(
        path for path in found if not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )


def row(path: Path, limit: float, seeds: dict | None, folder: Path | None = None) -> dict:
    """student, file, notebook, score, of, error, seconds, and the state of every exercise.

    A submission that cannot be graded gives a row with an error. `folder`: the folder of all
    submissions; a file in a subfolder may take the student's name from that.
    """
    names = [path.stem]
    if folder not in (None, path.parent):
        names.append(path.parent.name)
    fixed = dict.fromkeys(FIXED, "") | {"file": path.name, "score": 0, "of": 0, "seconds": 0.0}
    fixed["student"] = path.stem
    try:
        notebook = load(path)
        number = notebook["metadata"]["nanokv"]["notebook"]
        fixed["student"] = student(names, number, seeds)
        seed = (seeds or {}).get((fixed["student"], number))
        done = running.run(notebook, limit, keep_going=True)
        states = results(number, done.events, seed)
    except CourseError as error:
        return fixed | {"error": str(error)}
    except Exception as error:
        return fixed | {"error": f"cannot be graded: {type(error).__name__}: {error}"}
    found = [done.error, done.doubt]
    if seeds is not None and seed is None:
        found.append("not in the key, so it is unknown which numbers are theirs")
    found.append(doubts(notebook, done.events))
    graded = {
        "notebook": number,
        "score": sum(state == "right" for state in states.values()),
        "of": len(states),
        "error": "; ".join(filter(None, found)),
        "seconds": round(done.seconds, 1),
    }
    return fixed | graded | states


def doubts(notebook: dict, events: list[dict]) -> str:
    """Reasons for a closer look: no course.start in the log, or code that names grader parts."""
    code = "\n".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    inside = sorted(set(INSIDE.findall(code)))
    found = []
    if not any(event["event"] == "start" for event in events):
        found.append("no cell of it has called course.start")
    if inside:
        found.append(f"its code names {', '.join(inside)[:80]}: look at it")
    return "; ".join(found)


def student(names: list[str], number: str, seeds: dict | None) -> str:
    """The student: the first of `names` in the key.

    If the key has none, it is the file's name; or its folder's, if the file is named after the
    notebook (05_the_waste), as learning platforms deliver it.
    """
    for name in names:
        if seeds and (name, number) in seeds:
            return name
    if names[0].startswith(f"{number}_"):
        return names[-1]
    return names[0]


def load(path: Path) -> dict:
    """A submission without its outputs; CourseError if it is not a notebook of this course."""
    data = log.contents(path, LARGEST)
    try:
        notebook = json.loads(data)
        number = notebook["metadata"]["nanokv"]["notebook"]
        checking.exercises(number)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = []
                cell["execution_count"] = None
                cell["source"] = "".join(cell["source"])
    except (ValueError, KeyError, TypeError, RecursionError, CourseError) as error:
        raise CourseError(f"not a notebook of this course ({type(error).__name__})") from error
    return notebook


def tally(rows: list[dict]) -> str:
    """The answers of the class: one line per exercise, its most common states first."""
    ids = sorted({name for row in rows for name in row} - set(FIXED))
    lines = []
    for id in ids:
        counts = Counter(row[id] for row in rows if row.get(id))
        states = ", ".join(f"{number} {state}" for state, number in counts.most_common())
        lines.append(f"{id:<7} {states}\n")
    return "".join(lines)


def read_seeds(key: Path) -> dict[tuple[str, str], int]:
    """{(student, notebook): seed} from a key, even if a spreadsheet program has saved it again."""
    text = read_text(key)
    head = text.split("\n")[0]
    lines = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count))
    missing = {"student", "notebook", "seed"} - set(lines.fieldnames or ())
    if missing:
        raise CourseError(
            f"{key}: no column {', '.join(sorted(missing))}",
            "nanokv course variants writes such a file",
        )
    seeds = {}
    for line in lines:
        try:
            # A spreadsheet turns 05 into 5.
            seeds[line["student"], line["notebook"].zfill(2)] = int(line["seed"])
        except (ValueError, TypeError, AttributeError) as error:
            message = (
                f"{key}, line {lines.line_num}, column seed: {line['seed']!r} is no whole number"
            )
            raise CourseError(
                message, "a spreadsheet may have rounded it: use the file as it was written"
            ) from error
    return seeds


def read_text(path: Path) -> str:
    """A text file of the teacher's: UTF-8, with or without a byte order mark. Else CourseError."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CourseError(
            f"{path}: not UTF-8 at byte {error.start}", "save it as UTF-8 text"
        ) from error


def write(rows: Iterable[dict], path: Path) -> None:
    """Write a CSV file with the union of all columns.

    A text that a spreadsheet would take for a formula gets an apostrophe in front. Characters of
    file names that UTF-8 cannot encode are written as escapes.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row)) or FIXED
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        out = csv.DictWriter(file, names, restval="")
        out.writeheader()
        out.writerows({name: harmless(value) for name, value in row.items()} for row in rows)


def harmless(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = " ".join(value.split())[:300]
    if text[:1] in ("=", "+", "-", "@"):
        return f"'{text}"
    return text
