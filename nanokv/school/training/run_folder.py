"""The files of a training run: which checkpoints are whole, the metrics up to a step, and what --force may delete.

    checkpoint-STEP/   weights, optimizer, state.json; the last two are kept
    metrics.jsonl      one line per step        loss.png           model/          the finished model

A checkpoint is written beside its place and renamed: a run that is killed at any moment leaves whole ones only.
No torch in here, so a wrong --out is refused at once.
"""

import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nanokv.errors import NanoKVError

OWN = ("checkpoint-*", "checkpoint.tmp", "metrics.jsonl", "metrics.jsonl.tmp", "loss.png", "model")


def checkpoints(folder) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [path for path in Path(folder).glob("checkpoint-*") if (path / "state.json").is_file()]
    found = [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def read_state(checkpoint: Path) -> dict:
    """state.json of a checkpoint: step, recipe, config."""
    try:
        return json.loads((checkpoint / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error) -> NanoKVError:
    """The error for a checkpoint that was whole once: the disk or a hand changed it."""
    return NanoKVError(
        f"{checkpoint} is damaged: {error}",
        hint="remove that folder: --resume then continues from the one before it",
    )


@contextmanager
def new_checkpoint(folder: Path, name: str):
    """Yields an empty folder to write into; it becomes folder/name when everything in it is on the disk."""
    temporary = folder / "checkpoint.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with saving(folder / name):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for path in temporary.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            # An incomplete one: save() leaves a whole one alone.
            shutil.rmtree(folder / name, ignore_errors=True)
            os.replace(temporary, folder / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def saving(target: Path):
    """A full disk, a quota, a missing right: one error that says what is lost, which is nothing older."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        place = next(path for path in (target, *target.absolute().parents) if path.is_dir())
        raise NanoKVError(
            f"{target} was not saved: {error} ({shutil.disk_usage(place).free / 1e6:,.0f} MB are free there)",
            hint="older checkpoints are whole: make room, then --resume",
        ) from error


def drop_old(folder: Path, keep: int = 2):
    """Remove all but the newest checkpoints, and what is left of half removed ones."""
    kept = checkpoints(folder)[-keep:]
    for path in folder.glob("checkpoint-*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def refuse_foreign(folder: Path):
    """`--out ~ --force` must not cost a home directory: a folder with other files in it is not a run."""
    foreign = sorted(
        path.name for path in folder.iterdir() if not any(path.match(pattern) for pattern in OWN)
    )
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise NanoKVError(
            f"{folder} holds {', '.join(foreign[:3])}{more}: not part of a training run",
            hint="another --out",
        )


def clear(folder: Path):
    """Delete a run, and nothing that is not part of one."""
    refuse_foreign(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def records(metrics: Path) -> list[dict]:
    """The lines of metrics.jsonl; one that a kill has cut is left out."""
    found = []
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def keep_until(metrics: Path, step: int):
    """Drop the records of steps that a resumed run does again, so that every step stands there once."""
    kept = [record for record in records(metrics) if record["step"] <= step]
    if kept or metrics.exists():
        temporary = metrics.with_name(metrics.name + ".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(temporary, metrics)
