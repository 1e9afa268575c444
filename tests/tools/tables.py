"""Renews the tables of docs/ that measure the bundled model and are the same at each run: after new weights.

    python tests/tools/tables.py [quality] [blend] [eviction] [flips]

quality   docs/real-models.md: the loss of each GGUF type
blend     docs/reuse.md: joined caches
eviction  docs/eviction.md and docs/eviction.svg: perplexity and recall of each cache
flips     docs/batch-invariance.md: answers that depend on the batch

The command of `quality` and `blend` is the one that the page shows. What the text says of a table takes a reader: the
lines that changed are printed. Dates in the text stay as they are.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NANOKV = (sys.executable, "-m", "nanokv")
INVARIANCE = (sys.executable, str(ROOT / "tests" / "tools" / "invariance.py"), "flips")

ROW = re.compile(r"^\| `(\S+)` \| \d+% \|", re.MULTILINE)  # of docs/eviction.md: a cache, its bytes


def printed(command: list[str]) -> str:
    """What a command prints, on one thread and with the kernels, without a terminal."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def with_output(page: str, begin: str, run=printed) -> str:
    """A page with the output of its command `$ begin …` as that prints it today."""
    block = re.compile(rf"(?<=\n)\$ {re.escape(begin)}(?:[^\n]*\\\n)*[^\n]*\n")
    found = block.search(page)
    if found is None:
        raise SystemExit(f"no page has a block that begins with $ {begin}")
    command = shlex.split(found[0].removeprefix("$ ").replace("\\\n", " "))
    end = page.index("```", found.end())
    return page[: found.end()] + run([*NANOKV, *command[1:]]).rstrip("\n") + "\n" + page[end:]


def talks_of(page: str) -> str:
    """How many talks the columns of docs/eviction.md count facts in."""
    return re.search(r"--recall (\d+)", page)[1]


def cache_of(row: str) -> str:
    """The cache of --caches that a row of docs/eviction.md names."""
    if row.startswith(("dict", "quantized")):
        return row
    return f"evicting:{row}" if row.startswith("budget") else f"evicting:policy={row}"


def with_columns(page: str, measured: dict[str, dict]) -> str:
    """docs/eviction.md with the five columns of the bundled model; the others stay."""
    lines = page.split("\n")
    for at, line in enumerate(lines):
        cells = line.split(" | ")
        name = cells[0].removeprefix("| ").strip("`")
        row = measured.get(cache_of(name)) if ROW.match(line) else None
        if row:
            bytes_, told = f"{row['share']:.0%}", f"{row['recall_share']:.0%}"
            counts = [str(row["first"]), str(row["second"])]
            cells[1:6] = [bytes_, f"{row['perplexity']:.2f}", told, *counts]
            lines[at] = " | ".join(cells)
    return "\n".join(lines)


def quality() -> dict[Path, str]:
    page = DOCS / "real-models.md"
    return {page: with_output(page.read_text("utf-8"), "nanokv bench --quality -m tiny")}


def blend() -> dict[Path, str]:
    page = DOCS / "reuse.md"
    return {page: with_output(page.read_text("utf-8"), "nanokv blend --talks 10")}


def eviction() -> dict[Path, str]:
    page = DOCS / "eviction.md"
    text = page.read_text("utf-8")
    caches = [cache_of(row) for row in ROW.findall(text)]
    what = ["bench", "--quality", "--dtype", "float32", "--weights", "plain", "--context", "320"]
    what += ["--recall", talks_of(text), "--caches", ",".join(caches)]
    what += ["--plot", str(DOCS / "eviction.svg")]
    rows = json.loads(printed([*NANOKV, *what, "--force", "--json"]))["rows"]
    return {page: with_columns(text, {row["cache"]: row for row in rows})}


def flips() -> dict[Path, str]:
    page = DOCS / "batch-invariance.md"
    text = page.read_text("utf-8")
    for name, flags in (("bf16", []), ("int8", ["--quantize", "int8"])):
        said = printed([*INVARIANCE, *flags])
        ordinary, total = re.search(r"^ordinary: (\d+) of (\d+)", said, re.MULTILINE).groups()
        (ours,) = re.findall(r"^batch-invariant: (\d+) of", said, re.MULTILINE)
        row = f"| {name} | {ordinary} of {total} | {ours} |"
        text = re.sub(rf"^\| {name} \| \d+ of \d+ \| \d+ \|$", row, text, flags=re.MULTILINE)
    return {page: text}


TABLES = {"quality": quality, "blend": blend, "eviction": eviction, "flips": flips}


def changed(old: str, new: str) -> list[str]:
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    return [f"- {a}\n+ {b}" for a, b in pairs if a != b]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)} (all)")
    chosen = parser.parse_args(argv).tables or list(TABLES)
    if unknown := set(chosen) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}: {', '.join(TABLES)}")
    for name in chosen:
        for page, text in TABLES[name]().items():
            lines = changed(page.read_text("utf-8"), text)
            page.write_text(text, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: {len(lines)} lines changed", *lines, sep="\n")


if __name__ == "__main__":
    main()
