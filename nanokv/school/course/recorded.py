"""Recorded outputs of a larger model, SmolLM2-135M, for readers who cannot run one themselves.

`nanokv course record` runs each solution twice, on the bundled model and on that of NANOKV_MODEL.
It keeps the printed output of cells where the two differ, one file per notebook in assets/. A
recording is found by the code of its cell, so a changed cell has none, and a test asks for a new
one. Exercises, solutions and lines about a reader's own answers are left out. Pictures are left out
too; their text alternatives stay.
"""

import copy
import hashlib
import html
import json
import os
import re
import shlex
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from nanokv.errors import CourseError
from nanokv.school.course import figures, running, twins

FOLDER = Path(__file__).parent / "assets"
# Lines about a reader's own work ("05.a: you predicted 3", "cache: the reference …"), and the lines
# that `course.start` prints for another model.
OWN = re.compile(
    r"^(?:\d\d\.\w+: |\w+: (?:yours|the reference) \(|"
    r"The figures in|Too slow\?|It takes the bundled|Or read on)"
    r".*\n?(?: {4}.*\n?)*",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Recording:
    """The recorded outputs of one notebook. `cells`: {hash of a cell's code: text}."""

    model: str  # the name of its file
    date: str
    command: str
    cells: dict[str, str]

    def output(self, code: str) -> dict:
        """The recording of a cell as Jupyter's output data; {} if it has none."""
        text = self.cells.get(key(code))
        if text is None:
            return {}
        mark = f"Recorded with {self.model.removesuffix('.gguf')}, {self.date}"
        text = f"$ {self.command}\n{text}"
        folded = f"<summary>{html.escape(mark)}</summary><pre>{html.escape(text)}</pre>"
        return {
            "text/plain": f"{mark}\n{text}",
            "text/html": f'<details class="recorded">{folded}</details>',
        }


def path_of(number: str, folder: str | Path = FOLDER) -> Path:
    return Path(folder) / f"recorded-{number}.json"


def read(number: str) -> Recording | None:
    """The recording of a notebook, if there is one."""
    path = path_of(number)
    if not path.exists():
        return None
    return Recording(**json.loads(path.read_text(encoding="utf-8")))


def key(code: str) -> str:
    """A hash of a cell's code, the same in the source, in a student's notebook and in the book."""
    return hashlib.sha256(code.strip().encode()).hexdigest()[:12]


# --- recording ------------------------------------------------------------------------------------


def record(source: twins.Source, model: str, limit: float) -> Recording:
    """Run the solution on both models; CourseError names the model on which it failed."""
    theirs = printed(source, model, limit)
    ours = printed(source, "tiny", limit)
    name = Path(model).name
    cells = {
        code: text.replace(os.path.abspath(model), name)
        for code, text in theirs.items()
        if text and text != ours[code]
    }
    command = shlex.join([f"NANOKV_MODEL={name}", "nanokv", "course", "record", source.number])
    return Recording(name, date.today().isoformat(), command, cells)


def printed(source: twins.Source, model: str, limit: float) -> dict[str, str]:
    """{hash: printed text} of the code cells that are in both twins, after a run on `model`."""
    done = running.run(source.solution(), limit, env={"NANOKV_MODEL": model})
    if done.error or done.notebook is None:
        raise CourseError(
            f"{source.name} on {model}: {done.error}", f"nanokv course run {source.number}"
        )
    cells = [cell for cell in source.cells if cell.role != "exercise"]
    return {
        key(cell.text): words(made)
        for cell, made in zip(cells, done.notebook["cells"], strict=True)
        if cell.kind == "code" and cell.role == "both"
    }


def words(cell: dict) -> str:
    """The printed output of a cell, and the value of its last line."""
    texts = []
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            texts.append(output["text"])
        elif output["output_type"] == "execute_result":
            texts.append(output["data"].get("text/plain", "") + "\n")
    return OWN.sub("", "".join(texts))


def write(recording: Recording, path: Path) -> None:
    path.write_text(
        json.dumps(asdict(recording), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


# --- showing --------------------------------------------------------------------------------------

_shown: Recording | None = None


def follow(shell: Any, recording: Recording | None) -> None:
    """From now on, show the recording of each cell after it runs; None: show nothing."""
    global _shown
    _shown = recording
    if shell and recording:
        # Registering the same function again has no effect.
        shell.events.register("post_run_cell", _below)


def _below(result) -> None:
    if _shown and (data := _shown.output(result.info.raw_cell)):
        figures.display(data, {})


def beneath(notebook: Any, recording: Recording | None) -> Any:
    """A copy of an executed notebook, with the recordings added to the outputs of its cells."""
    from nbformat.v4 import new_output

    notebook = copy.deepcopy(notebook)
    if recording is None:
        return notebook
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        data = recording.output(cell["source"])
        if data:
            cell["outputs"].append(new_output("display_data", data=data))
    return notebook
