"""The files of a training run: complete checkpoints, metrics, and the files --force may delete.

    checkpoint-STEP/   weights, optimizer, state.json; the last two are kept
    metrics.jsonl      one line per step
    loss.png           the plot of the loss
    model/             the finished model

A checkpoint is written to a temporary folder and then renamed, so all checkpoints are complete
whenever a run is killed. This module does not import torch, so a wrong --out is refused at once.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nanokv.errors import NanoKVError

OWN = ("checkpoint-*", "checkpoint.tmp", "metrics.jsonl", "metrics.jsonl.tmp", "loss.png", "model")


def checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [path for path in Path(folder).glob("checkpoint-*") if (path / "state.json").is_file()]
    found = [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def read_state(checkpoint: Path) -> dict:
    """The state.json of a checkpoint: step, recipe, config. NanoKVError if it cannot be read."""
    try:
        return json.loads((checkpoint / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception) -> NanoKVError:
    """The error for a checkpoint whose files were damaged after it was complete."""
    return NanoKVError(
        f"{checkpoint} is damaged: {error}",
        hint="remove that folder: --resume then continues from the one before it",
    )


@contextmanager
def new_checkpoint(folder: Path, name: str) -> Iterator[Path]:
    """Yields an empty folder to write into. At the end its files are flushed to the disk, and it is
    renamed to folder/name."""
    temporary = folder / "checkpoint.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with saving(folder / name):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for path in temporary.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            # Only an incomplete one can be here: save() does not replace a complete checkpoint.
            shutil.rmtree(folder / name, ignore_errors=True)
            os.replace(temporary, folder / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def saving(target: Path) -> Iterator[None]:
    """Turns a full disk, a quota or a missing permission into a NanoKVError with the free space."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        place = next(path for path in (target, *target.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(place).free / 1e6
        raise NanoKVError(
            f"{target} was not saved: {error} ({free:,.0f} MB are free there)",
            hint="older checkpoints are whole: make room, then --resume",
        ) from error


def drop_old(folder: Path, keep: int = 2) -> None:
    """Remove all checkpoints but the `keep` newest, and the rest of any half-removed one."""
    kept = checkpoints(folder)[-keep:]
    for path in folder.glob("checkpoint-*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def refuse_foreign(folder: Path) -> None:
    """NanoKVError if the folder has files that no run writes.

    So `--out ~ --force` does not delete a home directory.
    """
    foreign = sorted(
        path.name for path in folder.iterdir() if not any(path.match(pattern) for pattern in OWN)
    )
    if foreign:
        more = ""
        if len(foreign) > 3:
            more = f" and {len(foreign) - 3} more"
        raise NanoKVError(
            f"{folder} holds {', '.join(foreign[:3])}{more}: not part of a training run",
            hint="another --out",
        )


def clear(folder: Path) -> None:
    """Delete the files of a run. NanoKVError, and nothing is deleted, if there are others."""
    refuse_foreign(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def records(metrics: Path) -> list[dict]:
    """The records of metrics.jsonl, but for a line that was cut off when the run was killed."""
    if not metrics.exists():
        return []
    found = []
    for line in metrics.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def keep_until(metrics: Path, step: int) -> None:
    """Drop the records after `step`: a resumed run does these steps again."""
    kept = [record for record in records(metrics) if record["step"] <= step]
    if kept or metrics.exists():
        temporary = metrics.with_name(metrics.name + ".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(temporary, metrics)
