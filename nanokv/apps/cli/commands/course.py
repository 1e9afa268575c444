"""`nanokv course`: builds, executes, renders and grades the notebooks of the course.

nanokv/school/course does the work; this file reads flags and prints. `claims` and `seal` need no
notebook.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.arguments import environment, integer, real
from nanokv.apps.cli.common.files import add_force, ask_to_replace
from nanokv.apps.cli.common.options import OutputOptions, output_options
from nanokv.errors import CourseError

ACTIONS = {
    "build": "write the student notebooks from notebooks/source",
    "run": "execute the solution of each NOTEBOOK (05), or of all, offline",
    "record": "keep what the notebooks print on the model of NANOKV_MODEL, for readers who cannot load one",
    "book": "execute the solution of each NOTEBOOK (06), or of all, and write them as web pages",
    "site": "write the book, the docs, the API and recorded runs as one static site with a search",
    "slides": "execute solutions and write a deck of slides for each: slides 05 -o slides",
    "claims": "print what the articles say and what is true",
    "seal": "the hash of a right answer: seal 05.q1 b",
    "variants": "write one notebook per student, with other numbers, and a key",
    "exam": "write a paper exam in two variants and its key: exam 05 06.1 open.1 --seed 7 -o exam",
    "gift": "write the same questions for Moodle: gift 05 06.1 open.1 --seed 7 -o questions.gift",
    "nbgrader": "write notebooks as assignments of nbgrader: nbgrader 05 06 -o FOLDER",
    "progress": "print how many exercises are right: progress 05, or of all notebooks",
    "mistakes": "print the wrong answers that the checks know, as a table",
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
    "The notebooks of the course. They are in the folder of the clone, not in an installed package: run this there. "
    "claims and seal work anywhere.\n\n"
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
    there, marks = Path("notebooks"), ("source", "progress.jsonl")
    return Path() if not there.exists() and any(Path(mark).exists() for mark in marks) else there


def add_arguments(parser) -> None:
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
        help="the notebooks (default: notebooks, or this folder inside of it)",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="PATH", help="where the result goes")
    add_force(parser)
    parser.add_argument(
        "--limit", type=real(1, 3600), default=180.0, metavar="S", help="seconds per notebook (180)"
    )
    parser.add_argument(
        "--seed", type=integer(0, 2**31), default=0, metavar="N", help="of variants, exam and gift"
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


def command_options(args) -> CourseOptions:
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


def run(args) -> int:
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
        bad = [id for id, states in done.states("check").items() if states[-1] != "right"]
        problem = done.error or (f"on stderr: {done.stderr.strip()[:200]}" if done.stderr else "")
        problem = problem or (f"not right: {', '.join(bad)}" if bad else "")
        failed += bool(problem)
        line = f"{path.stem:<28} {done.processor:6.1f} s  {done.peak / 2**30:5.2f} GiB  {problem or 'ok'}\n"
        write(line)
    return 2 if failed else 0


def _record(given: CourseOptions) -> None:
    from nanokv.school.course import recorded, twins

    chosen = twins.chosen(given.folder, given.words)
    paths = {path: recorded.path_of(path.stem[:2], given.out or recorded.FOLDER) for path in chosen}
    ask_to_replace(given.force, *paths.values())
    model = environment("NANOKV_MODEL") or "tiny"
    if model == "tiny":
        raise CourseError(
            "record needs another model than the bundled one", "NANOKV_MODEL=smollm2.gguf"
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

    chosen, out = twins.chosen(given.folder, given.words), given.out or Path("slides")
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
    chosen, out = twins.chosen(given.folder, given.words), given.out or Path("handout")
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

    chosen, out = twins.chosen(given.folder, given.words), given.out or Path("nbgrader")
    ask_to_replace(given.force, *nbgrader.files(given.folder, chosen, out))
    for path in nbgrader.write(given.folder, chosen, out):
        terminal.write_out(f"{path}\n")


def _progress(given: CourseOptions) -> None:
    from nanokv.school.course import checking, log, scores

    kept, known = given.folder / log.PROGRESS, checking.numbers()
    wanted = {word.partition("_")[0] for word in given.words}
    if wanted - set(known):
        raise CourseError(f"no notebook {', '.join(sorted(wanted - set(known)))}", ", ".join(known))
    if not kept.exists():
        raise CourseError(
            f"no answers yet: there is no {kept}",
            "a notebook keeps them beside it when its checks run",
        )
    write(scores.table([number for number in known if number in (wanted or known)], log.read(kept)))


def _mistakes(given: CourseOptions) -> None:
    from nanokv.school.course import mistakes, twins

    notebooks = [path.stem[:2] for path in twins.chosen(given.folder, given.words)]
    written, width = given.folder / "teach" / "mistakes.md", layout.columns(sys.stdout, None)
    if width is None:  # a pipe or a file gets Markdown
        return terminal.write_out(mistakes.table(notebooks, written))
    rows = mistakes.rows(notebooks, written)
    terminal.write_out("\n".join(layout.table(mistakes.HEAD, rows, width, left=range(4))) + "\n")


def _grade(given: CourseOptions) -> None:
    from nanokv.school.course import grading

    if len(given.words) != 1:
        raise CourseError(
            "grade takes one folder of notebooks", "nanokv course grade submissions -o results.csv"
        )
    out, rows = given.out or Path("results.csv"), []
    graded = grading.grade(Path(given.words[0]), given.limit, given.key)
    if not out.parent.is_dir() or out.is_dir():  # checked now, not after an hour of work
        raise CourseError(
            f"{out} cannot be written: {out.parent} is no folder, or {out} is one", "-o results.csv"
        )
    ask_to_replace(given.force, out)
    grading.write(rows, out)
    try:
        for row in graded:
            rows.append(row)
            grading.write(rows, out)
            terminal.notice(
                f"{row['file']}: {row['score']} of {row['of']}  {row['error']}".rstrip(),
                given.output,
            )
    finally:
        grading.write(rows, out)  # again: an interrupt may have cut the last write short
    write(grading.tally(rows) + f"{out}\n")
    terminal.notice(
        f"{len(rows)} submissions, {sum(bool(row['error']) for row in rows)} with an error",
        given.output,
    )


def write(text: str) -> None:
    """Write to stdout; on a terminal, long lines break between words."""
    terminal.write_out(
        layout.wrapped(terminal.sanitize(text), layout.columns(sys.stdout, None), " " * 8)
    )


def _no_words(given: CourseOptions) -> None:
    """CourseError if words follow an action that is about the whole course."""
    if given.words:
        raise CourseError(
            f"{given.action} takes no names; here is {given.words[0]!r}",
            f"nanokv course {given.action}",
        )
