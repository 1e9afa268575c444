"""Records tests/facts/smollm2.json: the ids and the prompts that llama.cpp makes of the cases in smollm2_cases.py.

    python -m venv v && v/bin/pip install xllamacpp==2026.10.11549      llama.cpp, built; not needed by the tests
    v/bin/python tests/tools/record_llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf
real_model.py says where the file comes from. Of most cases a checksum is kept, of the handwritten ones every id.
"""

import importlib
import json
import sys
import urllib.request
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from smollm2_cases import SPELLED, conversations, texts

FACTS = Path(__file__).parents[1] / "facts" / "smollm2.json"


def checksum(thing) -> str:
    """Of ids or of a text."""
    return f"{zlib.crc32(json.dumps(thing).encode()):08x}"


def serve(path: str):
    """ask(place, question) → answer of llama.cpp's own server."""
    # Not by an import statement: it is nothing that this project needs.
    llama = importlib.import_module("xllamacpp")
    parameters = llama.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.cpuparams.n_threads = path, 512, 1
    server = llama.Server(parameters)

    def ask(place: str, question: dict) -> dict:
        body, head = json.dumps(question).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(server.listening_address + place, body, head)
        ) as reply:
            return json.load(reply)

    return ask


def record(path: str) -> dict:
    """Everything that the tests compare with."""
    ask = serve(path)

    def ids(text: str) -> list[int]:
        return ask("/tokenize", {"content": text, "add_special": False, "parse_special": True})[
            "tokens"
        ]

    prompts = [
        ask("/apply-template", {"messages": messages})["prompt"] for messages in conversations()
    ]
    return {
        "llama.cpp": "xllamacpp 2026.10.11549",
        "spelled": [ids(text) for text in SPELLED],
        "texts": " ".join(checksum(ids(text)) for text in texts()),
        "prompts": " ".join(checksum(prompt) for prompt in prompts),
        "prompt_ids": " ".join(checksum(ids(prompt)) for prompt in prompts),
        "first_prompts": prompts[:4],
    }


if __name__ == "__main__":
    FACTS.parent.mkdir(exist_ok=True)
    FACTS.write_text(
        json.dumps(record(sys.argv[1]), separators=(",", ":")) + "\n", encoding="utf-8"
    )
    print(FACTS)
