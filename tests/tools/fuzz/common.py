"""What the targets share: a scratch folder, mutations of bytes and of JSON, and which exceptions are an answer."""

import copy
import functools
import json
import random
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "weights_loader" / "checkpoints" / "tiny"
REGRESSIONS = Path(__file__).with_name("regressions")
TARGETS = sorted(
    path.stem.removeprefix("target_") for path in Path(__file__).parent.glob("target_*.py")
)
ODD = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**25,
    1.5,
    -0.0,
    1e308,
    "",
    "a",
    "\x00",
    "\ud800",
    "../x",
    [],
    {},
    [[]],
    "\u202e",
    "9" * 5000,
    {"type": "x"},
)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="nanokv-fuzz-")


def scratch() -> Path:
    """A folder of this process, with whatever the last input left there."""
    return Path(_folder().name)


def json_of(path) -> dict:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def expect(allowed, function, *arguments):
    """Call it; an allowed exception is an answer."""
    try:
        return function(*arguments)
    except allowed:
        return None


def byte_mutator(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed, doubled or put in."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 64))
        kind = rng.randrange(4)
        if kind == 0:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 50))
        else:
            data[at:at] = rng.choice(
                (b"{", b"}", b"[", b'"', b"\\u0000", b"9" * 20, b"\xff", b"NaN", b"1e999", b"%}")
            )
    return bytes(data)


def json_mutator(data: bytes, rng: random.Random) -> bytes:
    """A value of the tree replaced, removed, copied elsewhere or nested; sometimes bytes, which may break it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, (dict, list)) or rng.random() < 0.15:
        return byte_mutator(data, rng)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            break
        holder, key = rng.choice(places)
        _, other = rng.choice([(h, h[k]) for h, k in places])
        kind = rng.randrange(6)
        if kind == 0 and isinstance(holder, dict):
            holder[rng.choice(("a", "", "type", "\x00", key + "x"))] = holder.pop(key)
        elif kind == 1:
            del holder[key]
        elif kind == 2:
            holder[key] = copy.deepcopy(other)
        elif kind == 3:
            holder[key] = rng.choice(([holder[key]], {"type": holder[key]}, [holder[key]] * 9))
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    text = json.dumps(value)
    if rng.random() < 0.05:  # a key twice
        text = text.replace("{", '{"type": 1, "type": 2, ', 1)
    return text.encode()


def _places(value, depth=0):
    """(dict or list, key or index) of everything in a JSON value; of long lists the beginning."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(min(len(value), 20))
        if isinstance(value, list)
        else ()
    )
    for key in list(keys)[:200]:
        yield value, key
        if depth < 12:
            yield from _places(value[key], depth + 1)
