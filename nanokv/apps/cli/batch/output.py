"""The output of `nanokv batch`: answers to stdout or to a resumable file, progress to stderr.

stdout gets the answers in the input's order. A file gets them in any order while the run goes on,
each line flushed when its answer is complete; at the end the file is replaced by one in the input's
order. On resuming, a last line that was cut off is dropped, and lines that failed are tried again. A
finished line is recognised by a digest of its prompt, settings and weights rather than by its
number, so lines may be inserted into the input.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanokv.apps.cli.common import terminal
from nanokv.apps.cli.common.progress import ProgressLine
from nanokv.apps.cli.common.text import to_json
from nanokv.errors import NanoKVError
from weights_loader.strict import loads

if TYPE_CHECKING:
    from nanokv.engine import Engine

# The fields of an answer that version 0.1.0 wrote.
FIRST_RELEASE = ("text", "ids", "finish_reason", "seed", "metrics")
OPENAI = "batch_req_"  # the beginning of the id of a result in OpenAI's form
SHOWN = 5  # errors on stderr; the output has all of them


class OrderedOutput:
    """stdout: a line is printed once all lines before it are; a run cannot be resumed."""

    resumable = False

    def __init__(self) -> None:
        self.wanted: list[int] = []
        self.results: dict[int, dict] = {}
        self.kept = self.printed = 0

    def begin(self) -> None:
        """The model is loaded: writing may begin."""

    @property
    def stale(self) -> int:
        """The number of old answers that no line of this input asks for."""
        return 0

    def want(self, line: int) -> None:
        """Announce a line that will get a result."""
        self.wanted.append(line)

    def find(self, request: str) -> dict | None:
        """An unused answer of an earlier run to this request."""
        return None

    def keep(self, line: int, result: dict) -> None:
        """Use the answer of an earlier run for this line."""
        if "line" in result:
            result = result | {"line": line}
        self.results[line] = result
        self.kept += 1

    def put(self, line: int, result: dict) -> None:
        """Add a result; results may come in any order."""
        self.results[line] = result
        self.write(result)

    def write(self, result: dict) -> None:
        """Print all results whose turn has come."""
        while self.printed < len(self.wanted) and self.wanted[self.printed] in self.results:
            terminal.write_out(to_json(self.results[self.wanted[self.printed]]) + "\n")
            self.printed += 1

    def close(self, done: bool) -> None:
        """Print the remaining results after an interruption, with gaps."""
        for line in self.wanted[self.printed :]:
            if line in self.results:
                terminal.write_out(to_json(self.results[line]) + "\n")

    @property
    def failed(self) -> int:
        """Lines whose result is an error."""
        return sum(is_error(result) for result in self.results.values())

    @property
    def finished(self) -> int:
        """Lines whose result is an answer."""
        return len(self.results) - self.failed


class ResumableOutput(OrderedOutput):
    """A file that a later run can resume; `old` holds the answers of an earlier run."""

    resumable = True

    def __init__(self, path: Path):
        """Read the file; nothing is written before `begin`."""
        super().__init__()
        self.path = Path(os.path.realpath(path))  # the target, so that a link stays a link
        if self.path.exists() and not self.path.is_file():
            raise NanoKVError(
                f"{path} is not a regular file",
                "choose another file, or omit -o and redirect stdout",
            )
        if not self.path.parent.is_dir():
            raise NanoKVError(f"{self.path.parent} is not a folder", "create it first")
        answers = read_output(self.path)
        if answers is None:
            raise NanoKVError(
                f"{path} is not an output of nanokv batch", "choose another file, or remove it"
            )
        # Request → its answers: several if the input has the same line more than once.
        self.old: defaultdict[str | None, list[dict]] = defaultdict(list)
        for answer in answers:
            self.old[request_of(answer)].append(answer)

    def begin(self) -> None:
        # Drops a torn last line and the errors of the earlier run.
        replace(self.path, [*self.results.values(), *chain(*self.old.values())])
        self.file = open(self.path, "a", encoding="utf-8")

    @property
    def stale(self) -> int:
        return sum(map(len, self.old.values()))

    def find(self, request: str) -> dict | None:
        if not self.old[request]:
            return None
        return self.old[request].pop(0)

    def write(self, result: dict) -> None:
        line = to_json(result) + "\n"
        with terminal.writing(self.path, len(line)):
            self.file.write(line)
            self.file.flush()

    def close(self, done: bool) -> None:
        """Put the lines into the input's order; after an interruption they stay as they are."""
        self.file.close()
        if done:
            replace(self.path, [self.results[line] for line in self.wanted if line in self.results])


def read_output(path: Path) -> list[dict] | None:
    """The answers in a file; None if it is not an output of `nanokv batch`.

    The last line may be torn: by a kill, or by a power loss, which can leave zeros at the end.
    """
    if not path.exists():
        return []
    answers: list[dict] = []
    lines = [line.strip() for line in path.read_bytes().rstrip(b"\0").split(b"\n")]
    for number, data in enumerate(lines, 1):
        if not data:
            continue
        try:
            result = loads(data)
        except ValueError:
            if number == len(lines) and torn(data):
                break
            return None
        if not is_result(result):
            return None
        if not is_error(result):
            answers.append(result)
    return answers


def torn(data: bytes) -> bool:
    """Whether these bytes can be the beginning of a result."""
    starts = (b'{"line":', f'{{"id": "{OPENAI}'.encode())
    return any(data.startswith(start) or start.startswith(data) for start in starts)


def openai_line(request: str, custom_id: Any, status: int, body: dict) -> dict:
    """A result in the form of OpenAI's batches. Its id carries the digest of the request."""
    response = {"status_code": status, "request_id": f"req_{request}", "body": body}
    id = f"{OPENAI}{request}"
    return {"id": id, "custom_id": custom_id, "response": response, "error": None}


def request_of(result: dict) -> str | None:
    """The digest of the request that this result answers."""
    if "response" in result:
        return result["id"].removeprefix(OPENAI)
    return result.get("request")


def is_openai_result(value: Any) -> bool:
    """Whether a JSON value is a result of openai_line."""
    if not isinstance(value, dict) or not isinstance(value.get("response"), dict):
        return False
    return str(value.get("id")).startswith(OPENAI) and "custom_id" in value


def is_error(result: dict) -> bool:
    """Whether a result is an error."""
    if "response" in result:
        return result["response"].get("status_code") != 200
    return "error" in result


def is_first_release(result: dict) -> bool:
    """Whether a result is an answer of version 0.1.0."""
    return all(name in result for name in FIRST_RELEASE)


def is_result(value: Any) -> bool:
    """Whether a JSON value is a result: an error, a completion, or an answer of version 0.1.0."""
    if is_openai_result(value):
        return True
    if not isinstance(value, dict) or type(value.get("line")) is not int:
        return False
    if "error" in value or "choices" in value:
        return True
    return is_first_release(value)


def replace(path: Path, results: Iterable[dict]) -> None:
    """Replace a file in one step, by a temporary file beside it; on a full disk the old one stays.

    The new file keeps the old file's mode.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with terminal.writing(path), open(temporary, "x", encoding="utf-8") as file:
            if path.exists():
                shutil.copymode(path, temporary)  # before the data is in it
            file.writelines(to_json(result) + "\n" for result in results)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --- stderr ---------------------------------------------------------------------------------------


class Progress:
    """A bar on a terminal, a line every ten seconds elsewhere, nothing with --quiet."""

    def __init__(self, quiet: bool, total: int):
        self.total = total
        self.done = 0
        self.line = ProgressLine(quiet)

    def show(self, engine: "Engine") -> None:
        """Update the progress after a step of the engine."""
        if not self.line.due():
            return
        metrics = engine.metrics
        running = len(engine.scheduler.running)
        rate = (metrics.prefill_tokens + metrics.decode_tokens) / max(self.line.seconds, 1e-9)
        text = f"{self.done:,}/{self.total:,} · {running} running · {rate:,.0f} tok/s"
        text += f" · {metrics.page_use:.0%} of the pages"
        begin = " "
        if self.line.tty:
            bar = "#" * (20 * self.done // self.total)
            begin = f"[{bar:<20}]"
        self.line.show(f"{begin} {text}")

    def end(self) -> None:
        """Remove the bar."""
        self.line.clear()


class Refusals:
    """Warns about the first SHOWN lines that failed and counts the others."""

    def __init__(self, file: str):
        self.file = "stdin" if file == "-" else file
        self.count = 0

    def add(self, line: int, error: Exception) -> None:
        """Count a line."""
        self.count += 1
        if self.count <= SHOWN:
            terminal.warning(f"{self.file}:{line}: {error}")

    def end(self) -> None:
        """Name the number of lines that were not shown."""
        more = self.count - SHOWN
        if more > 0:
            lines = "1 more line" if more == 1 else f"{more:,} more lines"
            terminal.warning(f"{lines} failed; the output has each error")


def summary(output: OrderedOutput, total: int, done: bool) -> str:
    """The last line on stderr."""
    parts = [f"{output.finished:,} of {total:,} lines answered"]
    if output.kept:
        parts.append(f"{output.kept:,} of them earlier")
    if output.failed:
        parts.append(f"{output.failed:,} failed")
    if not done and output.resumable:
        parts.append("interrupted: the same command resumes it")
    return "  " + " · ".join(parts)
