"""`nanokv course`: builds, executes, renders and grades the notebooks of the course.

nanokv/school/course does the work; this file reads flags and prints. `claims` and `seal` need no
notebook.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.arguments import Parser, environment, integer, real
from nanokv.apps.cli.common.files import add_force, ask_to_replace
from nanokv.apps.cli.common.options import OutputOptions, output_options
from nanokv.errors import CourseError

if TYPE_CHECKING:
    from nanokv.school.course.running import Run

ACTIONS = {
    "build": "write the student notebooks from notebooks/source",
    "run": "execute the solution of each NOTEBOOK (05), or of all, offline",
    "record": "save the output of the notebooks with the model of NANOKV_MODEL, for readers who "
    "cannot load one",
    "book": "execute the solution of each NOTEBOOK (06), or of all, and write them as web pages",
    "site": "write the book, the docs, the API and recorded runs as one static site with a search",
    "slides": "execute solutions and write a deck of slides for each: slides 05 -o slides",
    "claims": "print the claims of the articles, each with the true value",
    "seal": "print the hash of a right answer: seal 05.q1 b",
    "variants": "write one notebook per student, with other numbers, and a key",
    "exam": "write a paper exam in two variants and its key: exam 05 06.1 open.1 --seed 7 -o exam",
    "gift": "write exam questions for Moodle: gift 05 06.1 open.1 --seed 7 -o questions.gift",
    "nbgrader": "write notebooks as assignments of nbgrader: nbgrader 05 06 -o FOLDER",
    "progress": "print how many exercises are right: progress 05, or of all notebooks",
    "mistakes": "print a table of the wrong answers that the checks recognise",
    "grade": "execute a folder of submissions and write a table of results",
}
EXAMPLES = (
    "nanokv course build",
    "nanokv course run 05",
    "nanokv course grade submissions -o results.csv",
    "nanokv course site --book book -o site",
    "nanokv course variants 05 --students names.txt --seed 7 -o handout",
)
DESCRIPTION = (
    "The notebooks of the course. They are in the folder of the clone, not in an installed "
    "package: run this there. claims and seal work anywhere.\n\n"
) + "\n".join(f"  {name:<9} {text}" for name, text in ACTIONS.items())


@dataclass(frozen=True)
class CourseOptions:
    """The options of this command."""

    action: str
    words: tuple[str, ...]
    folder: Path
    out: Path | None
    force: bool
    limit: float
    seed: int
    students: Path | None
    book: Path | None
    key: Path | None
    output: OutputOptions


def folder() -> Path:
    """The folder of notebooks: ./notebooks, or the working folder if it is that folder itself."""
    inside = Path("source").exists() or Path("progress.jsonl").exists()
    if inside and not Path("notebooks").exists():
        return Path()
    return Path("notebooks")


def add_arguments(parser: Parser) -> None:
    """The action, its arguments, and the flags of all actions."""
    parser.intermixed = True
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument(
        "words", nargs="*", metavar="WHAT", help="notebooks, a folder, or an id and an answer"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=folder(),
        help="folder of the notebooks (default: ./notebooks, or . inside that folder)",
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="PATH", help="file or folder of the result"
    )
    add_force(parser)
    parser.add_argument(
        "--limit", type=real(1, 3600), default=180.0, metavar="S", help="seconds per notebook (180)"
    )
    parser.add_argument(
        "--seed",
        type=integer(0, 2**31),
        default=0,
        metavar="N",
        help="for variants, exam and gift (0)",
    )
    parser.add_argument(
        "--students", type=Path, metavar="FILE", help="one name per line, for variants"
    )
    parser.add_argument(
        "--book", type=Path, metavar="FOLDER", help="for site: a book that is already written"
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="the key of the variants, for grade"
    )


def command_options(args: Namespace) -> CourseOptions:
    """The options of the flags of add_arguments."""
    return CourseOptions(
        args.action,
        tuple(args.words),
        args.folder,
        args.out,
        args.force,
        args.limit,
        args.seed,
        args.students,
        args.book,
        args.key,
        output_options(args),
    )


def run(args: Namespace) -> int:
    """Run the function of the action."""
    return globals()[f"_{args.action}"](command_options(args)) or 0


def _build(given: CourseOptions) -> None:
    from nanokv.school.course import twins

    outdated = twins.outdated(given.folder, given.words)
    ask_to_replace(given.force, *outdated)  # a student may have worked in them
    for path, text in outdated.items():
        path.write_text(text, encoding="utf-8")
        terminal.write_out(f"{path}\n")
    terminal.notice(f"{len(outdated)} written, the others are up to date", given.output)


def _run(given: CourseOptions) -> int:
    from nanokv.school.course import running, twins

    failed = 0
    for path in twins.chosen(given.folder, given.words):
        done = running.run(twins.read(path).solution(), given.limit)
        problem = problem_of(done)
        failed += bool(problem)
        cost = f"{done.processor:6.1f} s  {done.peak / 2**30:5.2f} GiB"
        write(f"{path.stem:<28} {cost}  {problem or 'ok'}\n")
    return 2 if failed else 0


def problem_of(done: "Run") -> str:
    """The first problem of an executed notebook, or ""."""
    wrong = [id for id, states in done.states("check").items() if states[-1] != "right"]
    if done.error:
        return done.error
    if done.stderr:
        return f"on stderr: {done.stderr.strip()[:200]}"
    if wrong:
        return f"not right: {', '.join(wrong)}"
    return ""


def _record(given: CourseOptions) -> None:
    from nanokv.school.course import recorded, twins

    chosen = twins.chosen(given.folder, given.words)
    paths = {path: recorded.path_of(path.stem[:2], given.out or recorded.FOLDER) for path in chosen}
    ask_to_replace(given.force, *paths.values())
    model = environment("NANOKV_MODEL") or "tiny"
    if model == "tiny":
        raise CourseError(
            "record needs a model other than the bundled one", "NANOKV_MODEL=smollm2.gguf"
        )
    for source, path in paths.items():
        recorded.write(recorded.record(twins.read(source), model, given.limit), path)
        terminal.write_out(f"{path}\n")


def _book(given: CourseOptions) -> None:
    from nanokv.school.course import book

    out = given.out or Path("book")
    ask_to_replace(
        given.force, *(out / name for name in book.file_names(given.folder, given.words))
    )
    for page in book.build(given.folder, out, given.limit, given.words):
        terminal.write_out(f"{page}\n")


def _site(given: CourseOptions) -> None:
    from nanokv.school.course import site

    _no_words(given)
    out = given.out or Path("site")
    ask_to_replace(given.force, out / "index.html")
    for page, source in site.outdated(given.folder, given.book):
        terminal.warning(f"{page} is older than {source}")
    built = site.build(given.folder, out, given.book, given.limit)
    terminal.write_out(f"{out / 'index.html'}\n")
    size = terminal.bytes_text(built.size)
    said = f"{built.pages} pages, {built.entries:,} entries in the search, {size}, no broken link"
    terminal.notice(said, given.output)


def _slides(given: CourseOptions) -> None:
    from nanokv.school.course import slides, twins

    chosen = twins.chosen(given.folder, given.words)
    out = given.out or Path("slides")
    ask_to_replace(given.force, *(out / f"{path.stem}.html" for path in chosen))
    for deck in slides.build(chosen, out, given.limit):
        terminal.write_out(f"{deck}\n")


def _claims(given: CourseOptions) -> None:
    from nanokv.school.course import claims

    _no_words(given)
    write(claims.table())


def _seal(given: CourseOptions) -> None:
    from nanokv.school.course.answers import seal

    if len(given.words) != 2:
        raise CourseError("seal takes an id and an answer", "nanokv course seal 05.q1 b")
    terminal.write_out(seal(*given.words) + "\n")


def _variants(given: CourseOptions) -> None:
    from nanokv.school.course import grading, twins, variants

    if not given.students:
        raise CourseError("variants needs the names", "--students names.txt, one name per line")
    names = grading.read_text(given.students).splitlines()
    chosen = twins.chosen(given.folder, given.words)
    out = given.out or Path("handout")
    ask_to_replace(given.force, *variants.targets(chosen, names, out))
    terminal.write_out(f"{variants.write(chosen, names, given.seed, out)}\n")


def _exam(given: CourseOptions) -> None:
    from nanokv.school.course import exam

    out = given.out or Path("exam")
    ask_to_replace(given.force, *(out / name for name in exam.FILES))
    for path in exam.write(given.folder, list(given.words), given.seed, out):
        terminal.write_out(f"{path}\n")


def _gift(given: CourseOptions) -> None:
    from nanokv.school.course import gift

    out = given.out or Path("questions.gift")
    ask_to_replace(given.force, out)
    left = gift.write(given.folder, list(given.words), given.seed, out)
    terminal.write_out(f"{out}\n")
    if left:
        terminal.notice(
            f"left out, because the answer is not made of numbers: {', '.join(left)}", given.output
        )


def _nbgrader(given: CourseOptions) -> None:
    from nanokv.school.course import nbgrader, twins

    chosen = twins.chosen(given.folder, given.words)
    out = given.out or Path("nbgrader")
    ask_to_replace(given.force, *nbgrader.files(given.folder, chosen, out))
    for path in nbgrader.write(given.folder, chosen, out):
        terminal.write_out(f"{path}\n")


def _progress(given: CourseOptions) -> None:
    from nanokv.school.course import checking, log, scores

    answers = given.folder / log.PROGRESS
    known = checking.numbers()
    wanted = {word.partition("_")[0] for word in given.words}
    unknown = sorted(wanted - set(known))
    if unknown:
        raise CourseError(f"no notebook {', '.join(unknown)}", ", ".join(known))
    if not answers.exists():
        raise CourseError(
            f"no answers yet: there is no {answers}",
            "running the checks of a notebook saves them next to it",
        )
    chosen = [number for number in known if number in (wanted or known)]
    write(scores.table(chosen, log.read(answers)))


def _mistakes(given: CourseOptions) -> None:
    from nanokv.school.course import mistakes, twins

    notebooks = [path.stem[:2] for path in twins.chosen(given.folder, given.words)]
    written = given.folder / "teach" / "mistakes.md"
    width = layout.columns(sys.stdout, None)
    if width is None:  # a pipe or a file gets Markdown
        terminal.write_out(mistakes.table(notebooks, written))
        return
    rows = mistakes.rows(notebooks, written)
    lines = layout.table(mistakes.HEAD, rows, width, left=(0, 1, 2, 3))
    terminal.write_out("\n".join(lines) + "\n")


def _grade(given: CourseOptions) -> None:
    from nanokv.school.course import grading

    if len(given.words) != 1:
        raise CourseError(
            "grade takes one folder of notebooks", "nanokv course grade submissions -o results.csv"
        )
    out = given.out or Path("results.csv")
    rows: list[dict] = []
    graded = grading.grade(Path(given.words[0]), given.limit, given.key)
    if not out.parent.is_dir() or out.is_dir():  # checked now, not after an hour of work
        raise CourseError(
            f"{out} cannot be written: it is a folder, or {out.parent} is not one", "-o results.csv"
        )
    ask_to_replace(given.force, out)
    grading.write(rows, out)
    try:
        for row in graded:
            rows.append(row)
            grading.write(rows, out)
            result = f"{row['file']}: {row['score']} of {row['of']}  {row['error']}"
            terminal.notice(result.rstrip(), given.output)
    finally:
        grading.write(rows, out)  # again: an interrupt may have cut the last write short
    write(grading.tally(rows) + f"{out}\n")
    failed = sum(bool(row["error"]) for row in rows)
    terminal.notice(f"{len(rows)} submissions, {failed} with an error", given.output)


def write(text: str) -> None:
    """Write to stdout; on a terminal, long lines break between words."""
    width = layout.columns(sys.stdout, None)
    terminal.write_out(layout.wrapped(terminal.sanitize(text), width, " " * 8))


def _no_words(given: CourseOptions) -> None:
    """CourseError if words follow an action that is about the whole course."""
    if given.words:
        raise CourseError(
            f"{given.action} takes no names, but {given.words[0]!r} was given",
            f"nanokv course {given.action}",
        )
