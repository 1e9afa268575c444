"""`nanokv memory` for a model that nanokv does not run: its cache by layers, as text and as JSON."""

import sys
from pathlib import Path

from nanokv.apps.cli.common import layout, terminal
from nanokv.costs.memory import SHORT, binary, decimal
from nanokv.costs.other.estimate import Counted
from nanokv.costs.other.fields import table as known
from nanokv.costs.other.kinds import Layer
from nanokv.errors import NanoKVError


def weight_bytes(folder: Path) -> int | None:
    """Bytes of the safetensors files in a folder; None if there are none."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def refuse(flags: list[str], counted: Counted, reason: str) -> None:
    """NanoKVError for flags whose numbers need a model that nanokv runs."""
    if flags:
        names = " and ".join(flags)
        raise NanoKVError(
            f"{names}: {counted.architecture} is counted, not run: {reason}", f"leave out {names}"
        )


def text(counted: Counted, reason: str, memory: int | None, style: terminal.Style) -> str:
    """The layers by kind, then what the numbers mean."""
    width = layout.columns(sys.stdout)
    about = (
        f"{counted.architecture}, {SHORT[counted.dtype]}, transformers' cache, "
        f"{counted.batch:,} × {counted.context:,} tokens"
    )
    head = ("layers", "per token", "stops at", "a sequence", "all")
    rows = [
        cells(counted, f"{number:>3} {layer.kind}", layer, number)
        for layer, number in counted.groups()
    ]
    notes = [f"counted, not run: {reason}", *meaning(counted)]
    if memory is not None:
        notes.append(fits(counted, memory))
    lines = [
        style.dim(layout.paragraph(about, width)),
        *layout.table(head, [*rows, together(counted)], width),
        "",
        *(layout.paragraph(note, width, rest="  ") for note in notes),
    ]
    return "\n".join(lines) + "\n"


def cells(counted: Counted, name: str, layer: Layer, number: int) -> tuple[str, ...]:
    """One row of the table: the `number` layers that equal `layer`."""
    size = counted.itemsize
    sequence = number * layer.bytes(counted.context, size)
    return (
        name,
        amount(number * layer.per_token(size)),
        amount(number * layer.most(size)),
        binary(sequence),
        binary(counted.batch * sequence),
    )


def together(counted: Counted) -> tuple[str, ...]:
    """The last row: the sum."""
    most = sum(layer.most(counted.itemsize) for layer in counted.layers)
    one = counted.cached(counted.context, 1)
    all_rows = binary(counted.cached(counted.context, counted.batch))
    return (
        f"{len(counted.layers):>3} together",
        amount(counted.per_token),
        amount(most),
        binary(one),
        all_rows,
    )


def amount(count: float) -> str:
    return decimal(round(count)) if count else "–"


def meaning(counted: Counted) -> list[str]:
    """Sentences beside the table: snapshots, other runtimes, weights."""
    notes = []
    tokens = counted.snapshot_tokens()
    if tokens is not None:
        notes.append(
            f"{counted.state:,} B of states per sequence do not grow; a copy of them, to return to, "
            f"weighs as much as {tokens:,} tokens"
        )
    held = counted.cached(counted.context, counted.batch)
    for why, size in counted.elsewhere().items():
        notes.append(f"with {why}: {decimal(size)} ({binary(size)}) instead of {decimal(held)}")
    if counted.weights is None:
        notes.append("weights: not counted, there are no weight files beside config.json")
    else:
        notes.append(f"weights: {decimal(counted.weights)}, the files beside config.json")
    return notes


def fits(counted: Counted, memory: int) -> str:
    """`24.00 GiB hold …`; without weight files, of the cache alone."""
    if counted.weights is not None and counted.weights > memory:
        missing = counted.weights - memory
        return f"{binary(memory)} does not hold the weights: {decimal(missing)} are missing"
    what = "" if counted.weights is None else "the weights and "
    rows = counted.max_batch(memory)
    context = counted.max_context(memory)
    sequences = "any number of" if rows is None else f"{rows:,}"
    longest = "any context" if context is None else f"a context of {context:,}"
    if counted.limit and (context is None or context > counted.limit):
        longest += f" (the model is made for {counted.limit:,})"
    end = "" if counted.weights is not None else "; the weights come on top"
    return (
        f"{binary(memory)} hold {what}{sequences} sequences of {counted.context:,} tokens, or "
        f"{counted.batch:,} of {longest}{end}"
    )


def report(counted: Counted, reason: str, memory: int | None) -> dict:
    """The same numbers as `text`, in bytes and tokens."""
    size = counted.itemsize
    found: dict = {
        "model": counted.name,
        "architecture": counted.architecture,
        "runs": False,
        "reason": reason,
        "transformers": known()["transformers"],
        "dtype": counted.dtype,
        "context": counted.context,
        "batch": counted.batch,
        "weights_bytes": counted.weights,
        "kv_bytes_per_token": counted.per_token,
        "state_bytes_per_sequence": counted.state,
        "kv_bytes_per_sequence": counted.cached(counted.context, 1),
        "kv_bytes": counted.cached(counted.context, counted.batch),
        "layers": [
            {
                "kind": layer.kind,
                "count": number,
                "bytes_per_token": layer.per_token(size),
                "most_bytes": layer.most(size),
                "bytes_per_sequence": layer.bytes(counted.context, size),
            }
            for layer, number in counted.groups()
        ],
        "elsewhere": counted.elsewhere(),
    }
    if memory is not None:
        found["fits"] = {
            "bytes": memory,
            "max_batch": counted.max_batch(memory),
            "max_context": counted.max_context(memory),
        }
    return found
