"""A folder of submissions to a table: one row a notebook, one column an exercise.

Every submission runs in a process of its own, without a network and for a limited time; a broken, endless or crashing
one costs its own row and nothing else. It is code of somebody else all the same: what it reports about itself can be
forged, and only a container keeps it from reading files. The table says what to look at, not whom to trust.
"""

import csv
import json
from pathlib import Path

from nanokv.course import checking, running
from nanokv.errors import CourseError

LARGEST = 20_000_000  # bytes of a submission; outputs count


def grade(folder: Path, limit: float = running.TIME_LIMIT, key: Path | None = None) -> list[dict]:
    """One row for each *.ipynb of a folder, by name. `key`: the file that `nanokv course variants` wrote."""
    files = sorted(Path(folder).glob("*.ipynb"))
    if not files:
        raise CourseError(f"{folder} holds no *.ipynb")
    seeds = read_seeds(key) if key else {}
    return [row(path, limit, seeds) for path in files]


def row(path: Path, limit: float, seeds: dict) -> dict:
    """student, notebook, score, of, error, seconds, and the state of every exercise."""
    try:
        notebook = load(path)
    except CourseError as error:
        return {"student": path.stem, "notebook": "", "score": 0, "of": 0, "error": str(error), "seconds": 0.0}
    number = notebook["metadata"]["nanokv"]["notebook"]
    done = running.run(notebook, limit, keep_going=True)
    states = results(number, done.events, seeds.get((path.stem, number)))
    score = sum(state == "right" for state in states.values())
    fixed = {"student": path.stem, "notebook": number, "score": score, "of": len(states)}
    return fixed | {"error": done.error, "seconds": round(done.seconds, 1)} | states


def load(path: Path) -> dict:
    """A submission, cleaned of outputs; CourseError if it is no notebook of this course."""
    if path.stat().st_size > LARGEST:
        raise CourseError(f"larger than {LARGEST:,} bytes")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        number = notebook["metadata"]["nanokv"]["notebook"]
        checking.exercises(number)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"], cell["execution_count"] = [], None
    except (ValueError, KeyError, TypeError, RecursionError, CourseError) as error:
        raise CourseError(f"not a notebook of this course ({type(error).__name__})") from error
    return notebook


def results(number: str, events: list[dict], seed: int | None) -> dict[str, str]:
    """{id: right, wrong, wrong: mistake, unanswered, missing or other variant}; the last answer of each counts."""
    module = checking.exercises(number)
    found = {item.id: "missing" for item in (*module.CHECKS, *module.QUESTIONS)}
    for event in events:
        if event["event"] not in ("check", "answer") or event.get("id") not in found:
            continue
        state, mistake = str(event.get("state")), str(event.get("mistake") or "")
        if event["event"] == "check" and seed is not None and event.get("seed") != seed:
            state, mistake = "other variant", ""
        found[event["id"]] = f"{state}: {mistake}" if mistake else state
    return found


def read_seeds(key: Path) -> dict[tuple[str, str], int]:
    """{(student, notebook): seed} from a key."""
    with open(key, newline="", encoding="utf-8") as file:
        return {(line["student"], line["notebook"]): int(line["seed"]) for line in csv.DictReader(file)}


def write(rows: list[dict], path: Path) -> None:
    """CSV with the union of all columns. A text that a spreadsheet would take for a formula gets an apostrophe."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, names, restval="")
        out.writeheader()
        out.writerows({name: harmless(value) for name, value in row.items()} for row in rows)


def harmless(value):
    text = " ".join(value.split())[:300] if isinstance(value, str) else value
    return f"'{text}" if isinstance(text, str) and text[:1] in ("=", "+", "-", "@") else text
