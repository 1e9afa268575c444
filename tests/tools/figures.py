"""Renews the marked figures in notebooks and teaching plans: the step after new weights.

    python tests/tools/figures.py [03 07 …] [--dry-run] [--again]

Executes each solution on one thread, writes the figures that differ into notebooks/source and notebooks/teach in the
form in which they stood there, and writes the student twins. A figure within the tolerance of its mark stays. A run is
kept in runs/figures/ and used again until its code, the weights or nanokv change (--again: never used).

Printed are the changes, each with its sentence, and why a reader has to look at some. Not decided are bounds, figures
without a measurement, and answers that are not right. If a run with other weights is kept, the words that the text
quotes from its outputs are searched for in the new ones: so run it once before the weights change.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import floor, log10
from pathlib import Path

import weights_loader
from nanokv.school.course import prose, reference, running, twins

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
KEPT = ROOT / "runs" / "figures"
WALL = 900  # seconds
WIDEST = 120  # columns of a line of text
# As the tests run it, but on one thread, which a busy machine gives too.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NANOKV_KERNELS": "explicit",
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
}
NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:e([+-]?\d+))?")
PARAGRAPH = re.compile(r"(?:^(?!#?\s*$|# %%).+\n?)+", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z`*(\[])")
# Words that say something about the size of a figure beside them.
COMPARING = re.compile(
    r"\b(more|less|fewer|than|least|most|only|hardly|almost|nearly|about half|half|third|twice|double|times as|"
    r"all|none|no|both|neither|every|same|equal|different|rises?|falls?|higher|lower|larger|smaller|"
    r"two|three|four|five|six|seven|eight|nine|ten|hundred|thousand)\b",
    re.IGNORECASE,
)
AT_LEAST = re.compile(r"\b(at\s+least|more\s+than|above|or\s+more)\b", re.IGNORECASE)
AT_MOST = re.compile(r"\b(at\s+most|less\s+than|fewer\s+than|up\s+to|below)\b", re.IGNORECASE)
QUOTED = re.compile(r"`([^`\n]{4,})`|\"([^\"\n]{4,})\"|“([^”\n]{4,})”")
TURNED = 1.5  # a factor from which the words beside a figure are in doubt
EDGE = 0.01  # of the last digit: so close to the next digit that rounding may decide


@dataclass(frozen=True)
class Kept:
    """What is used of one execution. `failures`: errors of cells, answers that are not right."""

    weights: str
    figures: dict[str, float]
    failures: list[str]
    printed: str
    seconds: float


@dataclass(frozen=True)
class Place:
    """A figure that changed, or that was not decided: then `new` is ""."""

    where: str  # file:line
    id: str
    old: str
    new: str
    measured: float | None
    sentence: str  # as it stands now
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        change = f"{self.old} → {self.new}" if self.new else f"{self.old}, measured {self.measured}"
        return f"{self.id}: {change}{''.join(f'; {doubt}' for doubt in self.doubts)}"


# --- running ----------------------------------------------------------------------------------------------------------


def digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()[:12]


def weights() -> str:
    return digest((weights_loader.resolve("tiny") / "model.safetensors").read_bytes())


def code(number: str) -> str:
    """A hash of everything but the weights and the text that a notebook's figures may follow from."""
    packages = sorted(
        p for name in ("nanokv", "weights_loader") for p in (ROOT / name).rglob("*.py")
    )
    others = [p for p in packages if p.parent.name != "checks"] + [reference.STORED]
    checks = sorted((ROOT / "nanokv/school/course/checks").glob(f"nb{number}.*"))
    (source,) = (NOTEBOOKS / "source").glob(f"{number}_*.py")
    cells = twins.read(source).code()
    return digest(cells.encode(), *(p.read_bytes() for p in [*others, *checks]))


def executed(source: twins.Source) -> Kept:
    """Run a solution to its end, also after an error."""
    done = running.run(source.solution(), WALL, keep_going=True, env=ENVIRONMENT)
    failures = [done.error] if done.error else []
    outputs = [o for c in (done.notebook or {"cells": []})["cells"] for o in c.get("outputs", [])]
    failures += [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]
    for event in ("check", "answer"):
        for id, states in done.states(event).items():
            failures += [f"{event} {id} is {state}" for state in states if state != "right"]
    printed = "\n".join(
        str(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in outputs
    )
    failures = list(dict.fromkeys(failures))
    return Kept(weights(), done.figures(), failures, printed, done.seconds)


def kept(source: twins.Source, again: bool) -> Kept:
    """The run with these weights and this code, from the folder KEPT if it is there."""
    path = KEPT / f"{source.number}-{code(source.number)}-{weights()}.json"
    if path.exists() and not again:
        return Kept(**json.loads(path.read_text("utf-8")))
    found = executed(source)
    KEPT.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), ensure_ascii=False, indent=1), encoding="utf-8")
    return found


def before(number: str) -> Kept | None:
    """The newest kept run of a notebook with other weights."""
    paths = sorted(KEPT.glob(f"{number}-*.json"), key=lambda path: path.stat().st_mtime)
    others = [path for path in paths if not path.stem.endswith(weights())]
    return Kept(**json.loads(others[-1].read_text("utf-8"))) if others else None


# --- one figure -------------------------------------------------------------------------------------------------------


def value(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def significant(digits: str) -> int:
    """Digits of a number without the zeros that only give its size: 2 of 13,000 and of 0.0091."""
    shown = digits.replace(".", "").lstrip("0") if "." in digits else digits.strip("0")
    return max(1, len(shown))


def written(measured: float, quoted: str, allowed: str = "") -> str:
    """A measured number in the form of the quoted one: its decimals, commas, exponent and minus; "" if it has no form.

    With a factor as tolerance it has as many significant digits as the quoted one.
    """
    clean = quoted.replace(",", "").replace("−", "-").strip()
    found = NUMBER.fullmatch(clean)
    if not found:
        return ""
    decimals = len(found[3] or "")
    if found[4]:
        mantissa, exponent = f"{measured:.{decimals}e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    else:
        if measured and (allowed or abs(measured) < 0.5 * 10.0**-decimals):
            digits = significant(clean.lstrip("-"))
            decimals = digits - 1 - floor(log10(abs(float(f"{measured:.{digits - 1}e}"))))
        commas = "" if re.search(r"\d{4}", quoted.split(".")[0]) else ","
        text = f"{round(measured, decimals) + 0.0:{commas}.{max(0, decimals)}f}"
    return text.replace("-", "−") if "−" in quoted else text


def decided(mark: re.Match, recorded: dict[str, float]) -> str:
    """What has to stand in a mark: as before where it agrees, "" where that takes a reader."""
    id, allowed, quoted = mark[1], mark[2] or "", mark[3]
    if id not in recorded:
        return ""
    if prose.agrees(quoted, recorded[id], allowed):
        return quoted
    new = "" if allowed in ("above", "below") else written(recorded[id], quoted, allowed)
    return new if new and prose.agrees(new, recorded[id], allowed) else ""


def doubts(old: str, new: str, measured: float, sentence: str) -> list[str]:
    """Why the words beside a changed figure may no longer be true."""
    a, b = value(old), value(new)
    found = []
    if (a == 0) != (b == 0) or a * b < 0:
        found.append("zero or its sign changed")
    elif a and max(a / b, b / a) >= TURNED:
        found.append(f"a factor of {b / a:.2g}")
    if (abs(a) == 1) != (abs(b) == 1):
        found.append("one or several")
    if (a == 100) != (b == 100):
        found.append("a hundred")
    digits = len(new.partition(".")[2])
    if "e" not in new and abs(abs(measured * 10**digits) % 1 - 0.5) < EDGE:
        found.append(f"close to the next digit ({measured:.6g}): rounding may decide it")
    if (AT_LEAST.search(sentence) and b > measured) or (AT_MOST.search(sentence) and b < measured):
        found.append(f"rounded past the bound that the words give ({measured:.6g})")
    if words := sorted({word.lower() for word in COMPARING.findall(sentence)}):
        found.append("says " + ", ".join(words))
    return found


# --- one file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spot:
    """A mark, what now stands in it ("" if not decided), its paragraph (a number) and its sentence."""

    mark: re.Match
    new: str
    paragraph: int
    sentence: str

    @property
    def subject(self) -> str:
        """Figures of one subject are comparable: 02.loss of 02.loss and 02.loss.half."""
        return ".".join(self.mark[1].split(".")[:2])


def turned(spot: Spot, spots: list[Spot]) -> list[str]:
    """Figures of its paragraph or subject that it was below, above or equal to, and is no more."""
    found = set()
    for other in spots:
        near = other.paragraph == spot.paragraph or other.subject == spot.subject
        if near and spot.new and other.new:
            was = value(spot.mark[3]) - value(other.mark[3])
            now = value(spot.new) - value(other.new)
            if (was > 0, was < 0) != (now > 0, now < 0):
                found.add(f"{other.mark[1]} ({other.new})")
    return sorted(found)


def plain(text: str) -> str:
    """Text without marks, line breaks and the `#` of a source."""
    bare = re.sub(r"<!--.*?-->", "", re.sub(r"^# ?", "", text, flags=re.MULTILINE))
    return re.sub(r"\s+", " ", bare).strip()


def sentence_at(text: str, at: int) -> tuple[int, str]:
    """(where its paragraph begins, the plain sentence) around position `at`."""
    paragraph = next(p for p in PARAGRAPH.finditer(text) if p.start() <= at < p.end())
    ends = [end for found in SENTENCE.finditer(paragraph[0]) for end in found.span()]
    bounds = [0, *ends, len(paragraph[0])]
    begin = max(bound for bound in bounds if paragraph.start() + bound <= at)
    end = min(bound for bound in bounds if paragraph.start() + bound > at)
    return paragraph.start(), plain(paragraph[0][begin:end])


def renewed(text: str, recorded: dict[str, float], name: str) -> tuple[str, list[Place]]:
    """(the text with its figures renewed, the places that changed or were not decided).

    Figures of notebooks that were not run are left alone.
    """
    numbers = {id[:2] for id in recorded}
    marks = [mark for mark in prose.FIGURE.finditer(text) if mark[1][:2] in numbers]
    news = [decided(mark, recorded) for mark in marks]
    made, begins, end = "", [], 0
    for mark, new in zip(marks, news, strict=True):
        begins.append(len(made) + mark.start() - end)
        made += text[end : mark.start(3)] + (new or mark[3])
        end = mark.end(3)
    made += text[end:]
    found = zip(marks, news, begins, strict=True)
    spots = [Spot(mark, new, *sentence_at(made, at)) for mark, new, at in found]
    places = []
    for spot, at in zip(spots, begins, strict=True):
        id, old, measured = spot.mark[1], spot.mark[3], recorded.get(spot.mark[1])
        if spot.new == old:
            continue
        why = doubts(old, spot.new, measured, spot.sentence) if spot.new else [spot.mark[2] or "?"]
        why += [
            f"the order changed with {', '.join(found)}" for found in [turned(spot, spots)] if found
        ]
        line = made.count("\n", 0, at) + 1
        places.append(
            Place(f"{name}:{line}", id, old, spot.new, measured, spot.sentence, tuple(why))
        )
    return made, places


def lost_words(text: str, old: str, new: str) -> Iterator[str]:
    """What a text quotes that the old outputs had and the new ones have not."""
    old, new = (re.sub(r"\s+", " ", printed) for printed in (old, new))
    for found in QUOTED.finditer(text):
        words = re.sub(r"\s+", " ", next(filter(None, found.groups())))
        if words in old and words not in new:
            yield words


# --- the command ------------------------------------------------------------------------------------------------------


def run_all(sources: list[twins.Source], again: bool) -> dict[str, Kept]:
    runs = {}
    for source in sources:
        began = time.monotonic()
        runs[source.number] = done = kept(source, again)
        taken = time.monotonic() - began
        print(f"{source.name}: {len(done.figures)} figures, {taken:.0f} s", flush=True)
    return runs


def renew(
    paths: list[Path], recorded: dict[str, float], dry: bool
) -> tuple[list[Place], list[str]]:
    """Renew files in their place (`dry`: only say what would change) → (places, lines too wide)."""
    places, wide = [], []
    for path in paths:
        name, old = str(path.relative_to(ROOT)), path.read_text("utf-8")
        new, found = renewed(old, recorded, name)
        places += found
        pairs = enumerate(zip(old.splitlines(), new.splitlines(), strict=True), 1)
        wide += [
            f"{name}:{n}: {len(b)} columns" for n, (a, b) in pairs if len(b) > max(WIDEST, len(a))
        ]
        if new != old and not dry:
            path.write_text(new, encoding="utf-8")
    return places, wide


def gone(sources: list[twins.Source], runs: dict[str, Kept]) -> list[str]:
    """What the texts quote from the outputs with other weights, and is no longer there."""
    return [
        f"{source.name}: {words}"
        for source in sources
        if (old := before(source.number))
        for words in lost_words(source.prose(), old.printed, runs[source.number].printed)
    ]


def by_sentence(places: list[Place]) -> list[str]:
    """Each sentence once, after its place, with its figures below it."""
    found: dict[tuple[str, str], list[Place]] = {}
    for place in places:
        found.setdefault((place.where.partition(":")[0], place.sentence), []).append(place)
    return [
        "\n    ".join([f"{them[0].where}: {sentence}", *map(str, them)])
        for (_, sentence), them in found.items()
    ]


def show(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}", *lines, sep="\n  ")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("notebooks", nargs="*", metavar="NN", help="only these (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--again", action="store_true", help="execute them though a run is kept")
    options = parser.parse_args(argv)
    chosen = twins.chosen(NOTEBOOKS, options.notebooks)
    sources = [twins.read(path) for path in chosen]
    runs = run_all(sources, options.again)
    recorded = {id: number for done in runs.values() for id, number in done.figures.items()}
    texts = [*chosen, *sorted((NOTEBOOKS / "teach").glob("*.md"))]
    places, wide = renew(texts, recorded, options.dry_run)
    if not options.dry_run:
        for path, text in twins.outdated(NOTEBOOKS, options.notebooks).items():
            path.write_text(text, encoding="utf-8")
    failures = [f"{number}: {line}" for number, done in runs.items() for line in done.failures]
    undecided = [place for place in places if not place.new]
    show("Changed:", by_sentence([p for p in places if p.new and not p.doubts]))
    show("Changed, and to be read:", by_sentence([p for p in places if p.new and p.doubts]))
    show("Not decided:", by_sentence(undecided))
    show("Failed in the notebooks:", failures)
    show("Quoted, but no longer printed:", gone(sources, runs))
    show(f"Now longer than {WIDEST} columns:", wide)
    print(
        f"\n{len(places) - len(undecided)} changed, {len(undecided)} not decided, {len(failures)} failed"
    )
    return 1 if undecided or failures else 0


if __name__ == "__main__":
    sys.exit(main())
