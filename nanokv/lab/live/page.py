"""The bundled model, its tokenizer and the scripts that run it → one HTML file: no server, no network, no library.

The weights are the file model.safetensors, byte for byte, in base64: bf16, which the page widens to float32 and so
rounds nowhere. The tokenizer is tokenizer.json without what byte-level BPE does not need. A content security policy
with the hashes of the page's own scripts and style forbids everything else to run and every request.
"""

import base64
import json
from importlib.resources import files
from pathlib import Path

import weights_loader
from nanokv import __version__
from nanokv.errors import NanoKVError
from nanokv.lab.trace.page import digest, joined, json_block, put_into

ENGINE = (  # in this order; node runs them as they are
    "tokenizer.js",
    "weights.js",
    "arithmetic.js",
    "attention.js",
    "model.js",
    "caches.js",
    "answer.js",
    "experiments.js",
)
SHOWN = ()
STYLES = ()
ASSETS = files("nanokv.lab.live") / "assets"
LARGEST = 10_000_000  # bytes of a page that people wait for and send on


def build() -> str:
    """The page. NanoKVError if the model makes it larger than LARGEST."""
    folder = weights_loader.resolve("tiny")
    style = joined(STYLES, ASSETS)
    engine, script = joined(ENGINE, ASSETS), joined(SHOWN, ASSETS)
    page = put_into(
        (ASSETS / "page.html").read_text("utf-8"),
        {
            "policy": policy([style], [engine, script]),
            "version": __version__,
            "style": style,
            "engine": engine,
            "script": script,
            "data": json_block(data_of(folder)),
            "weights": base64.b64encode((folder / "model.safetensors").read_bytes()).decode(),
        },
    )
    if len(page) > LARGEST:
        raise NanoKVError(
            f"the page would have {len(page):,} bytes, at most {LARGEST:,} are sent on gladly",
            "a smaller bundled model, or weights in fewer bits",
        )
    return page


def policy(styles: list[str], scripts: list[str]) -> str:
    """What the page may do: run these scripts, wear these styles, and ask nobody for anything."""
    style, script = (
        " ".join(f"'sha256-{digest(text)}'" for text in texts) for texts in (styles, scripts)
    )
    return (
        f"default-src 'none'; img-src data:; style-src {style}; script-src {script}; "
        "base-uri 'none'; form-action 'none'"
    )


def data_of(folder: Path) -> dict:
    """What the scripts read beside the weights."""
    config, generation, tokenizer = (
        json.loads((folder / name).read_text("utf-8"))
        for name in ("config.json", "generation_config.json", "tokenizer.json")
    )
    model = {name: tokenizer["model"][name] for name in ("vocab", "merges")}
    return {
        "config": config,
        "ends": generation["eos_token_id"],
        "tokenizer": {"added_tokens": tokenizer["added_tokens"], "model": model},
    }
