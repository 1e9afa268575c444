"""How easy source and docs are to read, in numbers: python tests/tools/reading.py [-v] [PATH ...]

Without a path: nanokv and weights_loader. With -v each place is printed.

    conditional expressions   `a if b else c`, per 1,000 lines
    several names             `a, b = x, y`, per 1,000 lines
    wide                      lines of more than 100 columns, in percent
    marks                     comments that switch the formatter off
    phrases                   wordings of comments, docstrings and Markdown files (without their code)
                              that stop a native reader, per 10,000 words

tests/project/test_reading.py holds the limits. Measured the same way, nanochat has 8.2 conditional
expressions, 5.9 assignments of several names and 3.3 % wide lines; mini-sglang has 5.7, 1.4 and 0.2 %.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100
PHRASES = {
    "a clause with 'what' as subject": (
        r"(?:^|[.:;,] )[Ww]hat (?:\w+ ){1,8}"
        r"(?:is|are|goes|comes|stays|has|does|raises|would|must|cannot|can|fails|stands|leads|lies)\b"
    ),
    "a clause with 'who' as subject": r"(?:^|[.:;] )[Ww]ho(?:ever)? (?!is\b|are\b|am\b)\w+",
    "nobody, somebody": r"\b(?:nobody|somebody|whoever|no one)\b",
    "stands": r"\bstands?\b",
    "so many": r"\bso many\b",
    "all the same": r"\ball the same\b",
    "a stranger": r"\bstrangers?(?:'s)?\b",
    "can be had": r"\b(?:be had|can be had)\b",
    "of its own": r"\bof (?:its|their|his|the caller's) own\b",
    "code that tells, hears or speaks": r"\b(?:is told|are told|hears?|speaks?|says so|told)\b",
    "in the place of": r"\bin the place of\b",
    "those that": r"\bthose that\b",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Reading:
    """Counts of one or more files, and where each was found."""

    lines: int = 0
    words: int = 0
    conditionals: list[str] = field(default_factory=list)
    several: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    phrases: list[str] = field(default_factory=list)

    def rates(self) -> dict[str, float]:
        """The numbers of the module's docstring."""
        lines = max(1, self.lines)
        return {
            "conditional expressions": 1000 * len(self.conditionals) / lines,
            "several names": 1000 * len(self.several) / lines,
            "wide": 100 * len(self.wide) / lines,
            "marks": len(self.marks),
            "phrases": 10_000 * len(self.phrases) / max(1, self.words),
        }

    def add(self, name: str, source: str) -> None:
        """Count one file: Markdown if its name ends with .md, else Python."""
        if name.endswith(".md"):
            self.add_prose(name, markdown(source))
            return
        tree = ast.parse(source)
        for number, line in enumerate(source.splitlines(), 1):
            self.lines += 1
            if len(line) > WIDTH:
                self.wide.append(f"{name}:{number}: {len(line)} columns")
            if "# fmt: skip" in line or "# fmt: off" in line:
                self.marks.append(f"{name}:{number}: {line.strip()}")
        for node in ast.walk(tree):
            if isinstance(node, ast.IfExp):
                self.conditionals.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.Assign) and assigns_several(node):
                self.several.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
        self.add_prose(name, prose(source, tree))

    def add_prose(self, name: str, texts: Iterable[tuple[int, str]]) -> None:
        """Count the words and phrases of (line, text)."""
        for number, text in texts:
            self.words += len(text.split())
            for phrase, pattern in PHRASES.items():
                for _ in re.finditer(pattern, text):
                    self.phrases.append(f"{name}:{number}: {phrase}: {text}")


def assigns_several(node: ast.Assign) -> bool:
    """`a, b = x, y`; unpacking a call is something else."""
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def prose(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and docstring."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(tree):
        if not isinstance(node, DOCUMENTED):
            continue
        text = ast.get_docstring(node)
        if text:
            yield node.body[0].lineno, " ".join(text.split())


def markdown(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, list item and table row; fenced code is left out."""
    line = 1
    source = re.sub(r"^ *```.*?^ *```", blank, source, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n(?=\s*\n| *[-|#])", source):
        yield line, " ".join(block.split())
        line += block.count("\n") + 1


def blank(code: re.Match[str]) -> str:
    """As many empty lines as the code has."""
    return "\n" * code[0].count("\n")


def read(paths: list[Path]) -> Reading:
    """The counts of these files, and of all Python files in these folders."""
    found = Reading()
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(path.rglob("*.py"))
        for file in files:
            found.add(str(file), file.read_text(encoding="utf-8"))
    return found


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "-v"]
    paths = [Path(name) for name in names]
    if not paths:
        paths = [ROOT / "nanokv", ROOT / "weights_loader"]
    found = read(paths)
    if "-v" in arguments:
        places = (found.conditionals, found.several, found.wide, found.marks, found.phrases)
        for place in places:
            print("\n".join(place))
    print(f"{found.lines:,} lines, {found.words:,} words of prose")
    for name, rate in found.rates().items():
        print(f"{rate:8.1f}  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
