"""Build one HTML file with the bundled model, its tokenizer and the scripts that run it. The file
needs no server, no network and no library.

The weights are the bytes of model.safetensors in base64. They are bf16, and the page widens them
to float32, which loses nothing. The tokenizer is the part of tokenizer.json that byte-level BPE
needs. The page's content security policy has the hashes of its scripts and styles; it forbids all
other code and every request.
"""

import base64
import html
import json
import re
from importlib.resources import files
from pathlib import Path

import weights_loader
from nanokv import __version__
from nanokv.costs import parameters
from nanokv.errors import NanoKVError
from nanokv.lab.trace.page import digest, joined, json_block, put_into
from nanokv.lab.trace.recorder import record
from nanokv.loading import load
from nanokv.model import Transformer
from nanokv.text.tokenizer import Tokenizer

ENGINE = (  # in this order; tests run the same files in Node
    "tokenizer.js",
    "weights.js",
    "arithmetic.js",
    "attention.js",
    "model.js",
    "caches.js",
    "answer.js",
    "experiments.js",
)
SHOWN = ("looks.js", "stage.js", "triangles.js", "page.js", "predict.js")
BORROWED = ("text.js", "figure.js")  # from the page of `nanokv trace`
ASSETS = files("nanokv.lab.live") / "assets"
SENTENCE = "My name is Zorbla. What is my name?"  # the text in the input field at the start
WORD = re.compile(r" \w")  # matches a token that begins a word
LARGEST = 10_000_000  # bytes: a larger page loads slowly and is hard to share


def build() -> str:
    """The page. NanoKVError if the model makes it larger than LARGEST."""
    folder = weights_loader.resolve("tiny")
    style = joined(("base.css",)) + joined(("page.css",), ASSETS)
    engine = joined(ENGINE, ASSETS)
    script = joined(BORROWED) + joined(SHOWN, ASSETS)
    page = put_into(
        (ASSETS / "page.html").read_text("utf-8"),
        {
            "policy": policy([style], [engine, script]),
            "version": __version__,
            "style": style,
            "engine": engine,
            "script": script,
            "sentence": html.escape(SENTENCE),
            "data": json_block(data_of(folder)),
            "weights": base64.b64encode((folder / "model.safetensors").read_bytes()).decode(),
        },
    )
    if len(page) > LARGEST:
        raise NanoKVError(
            f"the page would have {len(page):,} bytes, and the limit is {LARGEST:,}",
            "a smaller bundled model, or weights in fewer bits",
        )
    return page


def policy(styles: list[str], scripts: list[str]) -> str:
    """The content security policy: only these scripts and styles, and no requests."""
    style = " ".join(f"'sha256-{digest(text)}'" for text in styles)
    script = " ".join(f"'sha256-{digest(text)}'" for text in scripts)
    return (
        f"default-src 'none'; img-src data:; style-src {style}; script-src {script}; "
        "base-uri 'none'; form-action 'none'"
    )


def data_of(folder: Path) -> dict:
    """All data that the scripts need, except the weights."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    generation = json.loads((folder / "generation_config.json").read_text("utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    bpe = {name: tokenizer["model"][name] for name in ("vocab", "merges")}
    model, words = load(folder, dtype="float32", device="cpu")
    layer, head = clearest_look(model, words)
    return {
        "config": config,
        "ends": generation["eos_token_id"],
        "look": {"layer": layer, "head": head},
        "parameters": parameters(model.config),
        "tokenizer": {"added_tokens": tokenizer["added_tokens"], "model": bpe},
    }


def clearest_look(model: Transformer, tokenizer: Tokenizer) -> tuple[int, int]:
    """(layer, head) with the largest attention weight on one word of SENTENCE while the model
    answers it."""
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": SENTENCE}]))
    words = [bool(WORD.match(piece)) for piece in tokenizer.pieces(ids)]
    looks = [
        (share, layer, head)
        for step in record(model, ids, max_new_tokens=24).steps[1:]
        for layer, weights in step.attention.items()  # (H,1,S)
        for head, row in enumerate(weights[:, -1, : len(ids)].tolist())
        for share, word in zip(row, words, strict=True)
        if word
    ]
    _, layer, head = max(looks)
    return layer, head
