"""Fuzz target: a line of the JSONL that `nanokv batch` reads."""

import common

from nanokv.apps.cli.batch import lines as batch_lines
from nanokv.errors import NanoKVError

INSTRUMENT = ["nanokv.apps.cli.batch.lines", "nanokv.apps.cli.common.arguments"]
ALLOWED = (NanoKVError,)
mutate = common.json_mutator


def seeds() -> dict[str, bytes]:
    return {
        "prompt": b'{"prompt": "hi", "max_new_tokens": 3, "stop": "x", "id": 1}',
        "messages": b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "seed": 1, "stop": ["a"]}',
    }


def run(data: bytes) -> None:
    path = common.scratch() / "in.jsonl"
    path.write_bytes(data)
    for _, line in batch_lines.read_lines(str(path)):
        fields = batch_lines.parse_line(line)
        batch_lines.check_fields(fields)
        assert len(batch_lines.digest(fields)) == 32 and all(
            isinstance(t, str) for t in batch_lines.texts(fields)
        )
