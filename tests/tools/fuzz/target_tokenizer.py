"""Fuzz target: tokenizer.json, in a process with limits: coverage does not see Rust, and Rust may abort."""

import json

import common

from nanokv.errors import NanoKVError
from nanokv.text.tokenizer import Tokenizer

IN_PROCESS = False
INSTRUMENT = []
ALLOWED = (NanoKVError,)
mutate = common.json_mutator
TEXT = "Hello, wörld! 12345   don't <|im_start|> \U0001f600\n\n" + "a" * 200 + "!"


def seeds() -> dict[str, bytes]:
    """The bundled one, cut down: 256 bytes and the first merges, so that a mutation hits something that matters."""
    whole = common.json_of(common.TINY / "tokenizer.json")
    model = whole["model"]
    small = dict(sorted(model["vocab"].items(), key=lambda item: item[1])[:300])
    merges = [
        m
        for m in model["merges"]
        if all(p in small for p in (m if isinstance(m, list) else m.split(" ")))
    ]
    merges = [m for m in merges if "".join(m if isinstance(m, list) else m.split(" ")) in small]
    whole["model"] = model | {"vocab": small, "merges": merges}
    for id, token in enumerate(whole["added_tokens"], len(small)):
        token["id"] = id
    more = whole | {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFC"},
                {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
            ],
        }
    }
    split = whole | {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": r"\p{N}| ?\p{L}+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        }
    }
    return {
        name: json.dumps(value).encode()
        for name, value in {"tiny": whole, "normalizer": more, "split": split}.items()
    }


def run(data: bytes) -> None:
    folder = common.scratch()
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = Tokenizer.from_folder(folder)
    assert isinstance(tokenizer.decode(tokenizer.encode(TEXT)), str)
