"""Write recorded runs as one HTML file, which needs no server, no network and no library.

Numbers are little-endian float16 (the top-10 logits float32) in base64 inside a JSON block. The
largest rounding error of each array is stored beside it and shown. Texts (prompt, tokens, names)
are in the same JSON and are shown as text only. The page's content security policy has the hashes
of its script and style; it forbids all other code and every request.
"""

import base64
import hashlib
import html
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

import numpy as np
import torch

from nanokv import __version__
from nanokv.cache.saving import fingerprint
from nanokv.config import Config
from nanokv.costs import kv_bytes_per_token, parameters
from nanokv.lab.trace.difference import TOLERANCE, divergence, highest, places, top_logits
from nanokv.lab.trace.recorder import Costs, Run, Step, angle_positions
from nanokv.model import Transformer
from nanokv.rope import rope_frequencies
from nanokv.text.tokenizer import Tokenizer

# One tab per file.
VIEWS = ("cache.js", "attention.js", "positions.js", "logits.js", "cost.js", "difference.js")
SCRIPTS = (
    "text.js",
    "data.js",
    "figure.js",
    "pictures.js",
    "view.js",
    *VIEWS,
    "tour.js",
    "page.js",
)
STYLES = ("base.css", "page.css")
ASSETS = files("nanokv.lab.trace") / "assets"
TOP = 10


@dataclass
class Fault:
    """The same prompt run under a fault: the fault's name, its description, and the recorded
    run."""

    name: str
    about: str
    run: Run


def build(
    model: Transformer,
    tokenizer: Tokenizer,
    run: Run,
    costs: Costs,
    *,
    name: str,
    prompt: str,
    roles: Iterable[str] | None = None,
    fault: Fault | None = None,
    threads: int = 1,
) -> str:
    """The page as HTML.

    name, prompt: shown as text, whatever characters they contain. roles: one letter per token of
    the prompt, s(ystem), u(ser), a(ssistant) or p(rompt), the default.
    """
    roles = "".join(roles or "p" * len(run.ids))
    runs = [pack_run(model, tokenizer, run, roles)]
    difference = None
    if fault is not None:
        runs.append(pack_run(model, tokenizer, fault.run, roles))
        difference = pack_fault(tokenizer, run, fault, model.embed_tokens.weight.dtype)
    data = {
        "model": pack_model(model, name),
        "version": __version__,
        "machine": machine(threads),
        "prompt": visible(prompt),
        "layers": run.layers,
        "costs": pack_costs(costs),
        "runs": runs,
        "fault": difference,
    }
    title = f"nanokv trace of {visible(name)}: {visible(prompt)} (nanokv {__version__}, recorded)"
    return fill(title, data)


def machine(threads: int) -> str:
    """What the run was recorded on: torch, the processor's architecture, the threads."""
    cores = f"{threads} threads"
    if threads == 1:
        cores = "1 thread"
    return f"torch {torch.__version__}, {platform.machine()}, {cores}"


def pack_costs(costs: Costs) -> dict:
    """The times of the run with and without a cache, in milliseconds."""
    return {
        "repeat": costs.repeat,
        "cached": milliseconds(costs.cached),
        "uncached": milliseconds(costs.uncached),
        "difference": number(costs.difference),
    }


def pack_model(model: Transformer, name: str) -> dict:
    """The model's name and sizes."""
    config = model.config
    dtype = model.embed_tokens.weight.dtype
    return {
        "name": visible(name),
        "parameters": parameters(config),
        "dtype": str(dtype).removeprefix("torch."),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kvHeads": config.num_key_value_heads,
        "headDim": config.head_dim,
        "vocabulary": config.vocab_size,
        "ropeTheta": config.rope_theta,
        "fingerprint": fingerprint(model),
        "itemsize": dtype.itemsize,
        "bytesPerToken": kv_bytes_per_token(config, dtype.itemsize),
        "weightBytes": parameters(config) * dtype.itemsize,
        "context": config.max_position_embeddings,
        "ropeSpeeds": rope_frequencies(config)[0].tolist(),  # radians per position
    }


def fill(title: str, data: dict) -> str:
    """The page's template with title, policy, style, script and data filled in."""
    style = joined(STYLES)
    script = joined(SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest(style)}'; "
        f"script-src 'sha256-{digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(title),
        "policy": policy,
        "style": style,
        "script": script,
        "data": json_block(data),
    }
    return put_into((ASSETS / "page.html").read_text("utf-8"), parts)


def json_block(data: dict) -> str:
    """JSON for a script element, with <, > and & escaped so that no tag or comment can begin or
    end."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def joined(names: Iterable[str], folder: Traversable = ASSETS) -> str:
    """Style sheets or scripts, concatenated. nanokv.apps.serve and nanokv.lab.live use some of
    them for their pages."""
    return "\n".join((folder / name).read_text("utf-8") for name in names)


def put_into(template: str, parts: dict[str, str]) -> str:
    """The template with each {{name}} replaced by parts["name"]."""
    head, *pieces = template.split("{{")  # one pass, so that {{ inside a part is not replaced
    page = [head]
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        page += [parts[name], rest]
    return "".join(page)


def digest(text: str) -> str:
    """sha256 in base64, as in a content security policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def visible(text: str) -> str:
    """Text with every character visible: newline as ↵, tab as ⇥, control characters, bidi marks and
    surrogates as \\u001b."""
    return "".join(map(visible_character, str(text)))


def visible_character(c: str) -> str:
    if c.isprintable():
        return c
    if c == "\n":
        return "↵"
    if c == "\t":
        return "⇥"
    return f"\\u{ord(c):04x}"


def number(value: float) -> float | None:
    """The value, or None for nan and infinity, which JSON does not have."""
    return value if np.isfinite(value) else None


def milliseconds(seconds: Iterable[float]) -> list[float]:
    return [round(1e3 * s, 4) for s in seconds]


# --- one run -----------------------------------------------------------------------------------


def pack_run(model: Transformer, tokenizer: Tokenizer, run: Run, roles: str) -> dict:
    """All data of one run for the page."""
    tokens = run.tokens
    texts = map(visible, tokenizer.pieces(tokens))
    letters = roles + "a" * (len(tokens) - len(run.ids))
    logits = []
    probabilities = []
    for step in run.steps:
        ids = highest(step.logits, TOP)
        logits.append(step.logits[ids])
        probabilities.append((step.logits - step.logits.logsumexp(0)).exp()[ids])
    logs = [run.caches[layer] for layer in run.layers]
    rows = [torch.cat(log.rows) for log in logs]  # each (n,2,Hk,D)
    counts, weights = pack_attention(run)
    return {
        "promptLength": len(run.ids),
        "stopped": visible(run.stopped),
        "tokens": list(zip(tokens, texts, letters, strict=True)),
        "steps": [pack_step(model, tokenizer, step) for step in run.steps],
        "cache": [[[length, spans(changed)] for length, changed in log.steps] for log in logs],
        "rowCounts": [len(layer) for layer in rows],
        "seen": counts,
        "arrays": {
            "rows": pack(rows),
            # of the exact keys and values
            "norms": pack([layer.norm(dim=-1) for layer in rows if layer.numel()]),  # (n,2,Hk)
            "attention": pack(weights),
            "cos": pack([step.cos for step in run.steps]),
            "sin": pack([step.sin for step in run.steps]),
            "logits": pack(logits, "f4"),
            "probabilities": pack(probabilities, "f4"),
        },
    }


def pack_step(model: Transformer, tokenizer: Tokenizer, step: Step) -> dict:
    ids = highest(step.logits, TOP)
    pieces = map(visible, tokenizer.pieces(ids))
    return {
        "kind": step.kind,
        "fed": len(step.fed),
        "start": step.start_pos,
        "nbytes": step.nbytes,
        "chosen": step.chosen,
        "positions": angle_positions(model, step),
        "error": number(step.error),
        "top": list(zip(ids, pieces, strict=True)),
    }


def pack_attention(run: Run) -> tuple[list, list[torch.Tensor]]:
    """The attention weights without trailing zeros: (counts, weights), where counts[step][layer] is
    [S, keys kept for query 0, for query 1, …].

    The weights are ordered by step, layer, query, head, key. Only weights of exactly 0 are cut off,
    those of the keys that a causal mask hides. Where a wrong mask shows such keys, they are kept.
    """
    counts: list[list[list[int]]] = []
    pieces: list[torch.Tensor] = []
    for step in run.steps:
        counts.append([])
        for layer in run.layers:
            weights = step.attention.get(layer, torch.zeros(0, 0, 0))  # (H,T,S)
            seen = keys_seen(weights)
            pieces += [weights[:, t, :n] for t, n in enumerate(seen)]
            counts[-1].append([weights.shape[-1], *seen])
    return counts, pieces


def keys_seen(weights: torch.Tensor) -> list[int]:
    """For each of the T queries of weights (H,T,S): the number of keys up to the last one with a
    nonzero weight."""
    if not weights.numel():
        return []
    places = torch.arange(1, weights.shape[-1] + 1)
    return ((weights != 0).any(0) * places).amax(-1).tolist()


def spans(positions: list[int]) -> list[list[int]]:
    """[4, 5, 6, 9] → [[4, 3], [9, 1]]."""
    found: list[list[int]] = []
    for position in positions:
        if found and sum(found[-1]) == position:
            found[-1][1] += 1
        else:
            found.append([position, 1])
    return found


def pack(tensors: list[torch.Tensor], kind: str = "f2") -> dict:
    """Tensors, concatenated, as base64. The values are divided by `scale`, a power of two that
    keeps float16 from overflowing."""
    values = np.concatenate([x.reshape(-1).numpy() for x in tensors] or [np.zeros(0, np.float32)])
    finite = np.isfinite(values)
    largest = float(np.abs(values[finite]).max(initial=0))
    scale = 1.0
    if kind == "f2" and largest > 32768:
        scale = 2.0 ** int(np.ceil(np.log2(largest / 32768)))
    stored = (values / scale).astype("<" + kind)
    moved = np.abs(stored[finite].astype(np.float32) * np.float32(scale) - values[finite])
    return {
        "kind": kind,
        "count": len(values),
        "scale": scale,
        "largest": largest,
        "error": float(moved.max(initial=0)),
        "data": base64.b64encode(stored.tobytes()).decode(),
    }


def pack_fault(tokenizer: Tokenizer, right: Run, fault: Fault, dtype: torch.dtype) -> dict:
    """Where the two runs differ. Differences have four digits; nan and infinity are null."""
    parted = divergence(right, fault.run, TOLERANCE[dtype])
    return {
        "name": fault.name,
        "about": visible(fault.about),
        **parted,
        "deltas": [number(delta) for delta in parted["deltas"]],
        "share": TOLERANCE[dtype],
        "places": [
            [*where, short(key), short(value), short(weight)]
            for *where, key, value, weight in places(right, fault.run, dtype)
        ],
        "logits": [pack_logits(tokenizer, step) for step in top_logits(right, fault.run)],
    }


def pack_logits(tokenizer: Tokenizer, step: list[tuple]) -> list[list]:
    """[id, text, logit right, logit wrong] of each logit of a step."""
    return [[i, visible(tokenizer.pieces([i])[0]), number(a), number(b)] for i, a, b in step]


def short(value: float) -> float | None:
    if not np.isfinite(value):
        return None
    return float(f"{value:.4g}")


# --- size --------------------------------------------------------------------------------------


def page_bytes(config: Config, prompt: int, new: int, layers: int, runs: int = 1) -> int:
    """About how many bytes a page has: 2 bytes per number, times 4/3 in base64.

    prompt, new: tokens. layers: number of recorded layers. runs: 2 with a fault.
    """
    S = prompt + new - 1
    D = config.head_dim
    cached = S * layers * 2 * config.num_key_value_heads * (D + 1)
    weights = S * (S + 1) // 2 * layers * config.num_attention_heads
    numbers = cached + weights + S * D
    # the top logits of both runs, and the positions that differ
    compared = (runs - 1) * (450 * new + 35 * S * layers)
    return len(fill("", {})) + runs * (numbers * 2 * 4 // 3 + 700 * new + 40 * S) + compared
