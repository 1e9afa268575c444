"""Writes a notebook for every student, with different numbers, and a key for the teacher.

Each variant has a seed, from which `course.start("05", seed=…)` draws the parameters of the
exercises. It is computed from the teacher's number and the student's name, so the same call writes
the same files.
"""

import csv
import hashlib
import re
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.school.course import checking, twins
from nanokv.school.course.answers import plain

# Names of devices on Windows, reserved with any suffix.
RESERVED = re.compile(r"CON|PRN|AUX|NUL|(COM|LPT)[0-9]", re.IGNORECASE)


def seed_of(number: int, notebook: str, student: str) -> int:
    """A student's seed: 31 bits of a SHA-256 hash."""
    digest = hashlib.sha256(f"{number} {notebook} {student}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def write(sources: list[Path], students: list[str], number: int, out: Path) -> Path:
    """Write out/NN_name/STUDENT.ipynb for each student and notebook, and out/key.csv.

    The key's columns: student, notebook, seed, and per exercise the parameters and the right
    answer. Returns the path of the key.
    """
    files = file_names(students)
    lines = []
    for path in sources:
        source = twins.read(path)
        folder = out / source.name
        folder.mkdir(parents=True, exist_ok=True)
        for student in files:
            seed = seed_of(number, source.number, student)
            (folder / f"{student}.ipynb").write_text(
                twins.to_text(variant(source, seed)), encoding="utf-8"
            )
            lines.append(
                {"student": student, "notebook": source.number, "seed": seed}
                | answers(source.number, seed)
            )
    names = list(dict.fromkeys(name for line in lines for name in line))
    with open(out / "key.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(lines)
    return out / "key.csv"


def file_names(students: list[str]) -> list[str]:
    """A file name per student; CourseError if two are the same or there are no students."""
    files = [file_name(name.strip()) for name in students if name.strip()]
    # Some file systems ignore case.
    if len({file.casefold() for file in files}) != len(files) or not files:
        raise CourseError("the names are not all different, or there is none", "one name per line")
    return files


def targets(sources: list[Path], students: list[str], out: Path) -> list[Path]:
    """The files that `write` would write."""
    files = [
        out / path.stem / f"{student}.ipynb" for path in sources for student in file_names(students)
    ]
    return [out / "key.csv", *files]


def variant(source: twins.Source, seed: int) -> dict:
    """The student notebook with the seed in its call of course.start."""
    notebook = source.student()
    call = f'course.start("{source.number}"'
    if source.code().count(call) != 1:
        raise CourseError(
            f"{source.name}: {call}) must be in exactly one cell", "the seed is inserted there"
        )
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["source"] = [line.replace(call, f"{call}, seed={seed}") for line in cell["source"]]
    return notebook


def answers(notebook: str, seed: int) -> dict[str, str]:
    """{id: "parameters → right answer"}; "judged" for exercises without a single right answer."""
    found = {}
    for check in checking.exercises(notebook).CHECKS:
        case = check.case(seed)
        given = ", ".join(f"{name} = {getattr(case, name)}" for name in check.parameters)
        right = "judged"
        if check.key is not None:
            right = str(plain(check.key(case)))
        found[check.id] = f"{given} → {right}" if given else right
    return found


def file_name(student: str) -> str:
    """The student's name made safe as a file name on every system and as a spreadsheet cell."""
    name = re.sub(r"[^\w.-]+", "_", student)[:80].strip("._-") or "student"
    return f"{name}_" if RESERVED.fullmatch(name.split(".")[0]) else name
