"""Published figures of real weights, and the checks that use them. They do not need transformers.

The logits and a continuation of Qwen3-0.6B-Base are from transformers' tests (tests/models/qwen3
at 0a0a9ea, Apache-2.0). The continuations and template ids of Qwen3-0.6B are of revision c1899de.
A model is recognised by the sha256 of its weights, or by its name and its shape. Most figures
were made in bf16, so they reveal a wrong formula or a wrong tensor but no rounding error: two
steps of bf16 at logits of 16 to 32 are 0.25.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch

from nanokv.config import Config
from nanokv.inference import score
from nanokv.lab.verify.checks import Check, verdict, within
from nanokv.model import Transformer
from nanokv.text.tokenizer import Tokenizer

BF16_STEPS = 0.25
SHAPE_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
FIGURES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B-Base": {
        "shape": SHAPE_06B,
        "logits": {
            "ids": [1, 306, 4658, 278, 6593, 310, 2834, 338],
            # mean over the vocabulary, per position
            "mean": [-1.4577, 1.3261, 3.8498, 3.4229, 2.9009, 1.8813, 2.1530, 2.1431],
            "first": [
                5.9062,
                6.0938,
                5.5625,
                3.8594,
                2.6094,
                1.9531,
                4.3125,
                4.9375,
                3.8906,
                3.1094,
                3.6719,
                5.1562,
                6.9062,
                5.7500,
                5.4062,
                7.0625,
                8.7500,
                8.7500,
                8.1250,
                7.9375,
                8.0625,
                7.5312,
                7.3750,
                7.2188,
                7.2500,
                5.8750,
                2.8750,
                4.3438,
                2.3438,
                2.2500,
            ],  # position 0, the first 30 of V
        },
        "greedy": [
            {
                "prompt": "My favourite condiment is ",
                "text": "100% plain, unflavoured, and unadulterated. It is",
                "tolerance": BF16_STEPS,
            }
        ],
    },
    "Qwen/Qwen3-0.6B": {
        "shape": SHAPE_06B,
        "weights_bytes": 1_503_300_328,
        "weights_sha256": "f47f71177f32bcd101b7573ec9171e6a57f4f4d31148d38e382306f42996874b",
        "greedy": [
            # bf16 weights, fp32 compute.
            {"prompt": "LifeAI is", "new_ids": [264, 5339, 429, 5707], "tolerance": 1e-2},
            {
                "prompt": "The capital of France is",
                "text": " Paris. The capital of France is also the capital",
                "tolerance": BF16_STEPS,
            },
        ],
        "template": {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "enable_thinking": False,
            "ids": [
                151644,
                872,
                198,
                3838,
                374,
                279,
                6722,
                315,
                9625,
                30,
                151645,
                198,
                151644,
                77091,
                198,
                151667,
                271,
                151668,
                271,
            ],
        },
    },
}
QWEN3_TOKENS: dict[str, Any] = {
    "size": 151669,
    "special": ("<|im_end|>", 151645),
    "text": "Hello world",
    "ids": [9707, 1879],
}


def published_checks(
    source: str, folder: Path, model: Transformer, tokenizer: Tokenizer
) -> list[Check]:
    """Checks against the published figures of this model; one skipped check if there are none."""
    checks = check_qwen3_tokens(tokenizer)
    name, why = recognise(source, folder, model.config)
    if name is None:
        return [*checks, Check("published figures", "skipped", why)]
    figures = FIGURES[name]
    checks.append(verdict("published model", True, f"{name}, recognised by its {why}"))
    if "logits" in figures:
        checks += check_logits(name, model, figures["logits"])
    checks += [
        check_continuation(name, model, tokenizer, figure) for figure in figures.get("greedy", ())
    ]
    if "template" in figures:
        checks.append(check_template_ids(tokenizer, **figures["template"]))
    return checks


def recognise(source: str, folder: Path, config: Config) -> tuple[str | None, str]:
    """(name, how it was recognised) of the published model, or (None, why not). Weights are hashed
    only if their size matches."""
    weights = Path(folder) / "model.safetensors"
    for name, figures in FIGURES.items():
        size = figures.get("weights_bytes")
        if weights.is_file() and weights.stat().st_size == size:
            if sha256(weights) == figures["weights_sha256"]:
                return name, "weights' sha256"
    parts = (str(source), *Path(source).parts[-1:], *Path(folder).resolve().parts[-3:])
    names = {part.casefold() for part in parts}
    for name, figures in FIGURES.items():
        spellings = {name, name.split("/")[-1], "models--" + name.replace("/", "--")}
        if names & {spelling.casefold() for spelling in spellings}:
            other = {k: v for k, v in figures["shape"].items() if getattr(config, k) != v}
            if other:
                return None, f"named like {name}, but with another {', '.join(other)}"
            return name, "name and shape"
    return None, f"none are known for this model, only for {' and '.join(FIGURES)}"


def sha256(path: Path) -> str:
    """The sha256 of a file in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_logits(name: str, model: Transformer, figure: dict) -> list[Check]:
    """Check the mean over the vocabulary at each position, and the first 30 logits of position
    0."""
    logits = score(model, torch.tensor([figure["ids"]]))[0].float().cpu()  # (T,V)
    rows = (
        ("mean", logits.mean(-1), 0.05),
        ("first", logits[0, : len(figure["first"])], BF16_STEPS),
    )
    detail = f"{name}, published in bf16"
    checks = []
    for key, ours, tolerance in rows:
        difference = (ours - torch.tensor(figure[key])).abs().max().item()
        checks.append(within(f"published logits, {key}", difference, tolerance, detail))
    return checks


def check_continuation(name: str, model: Transformer, tokenizer: Tokenizer, figure: dict) -> Check:
    """Every published greedy token has our highest logit, within the tolerance."""
    prompt = tokenizer.encode(figure["prompt"])
    new = figure.get("new_ids")
    if new is None:
        new = tokenizer.encode(figure["prompt"] + figure["text"])[len(prompt) :]
    logits = score(model, torch.tensor([prompt + new]))[0]  # (T+N,V)
    rows = logits[len(prompt) - 1 : -1].float().cpu()  # (N,V)
    chosen = rows.gather(-1, torch.tensor(new)[:, None])[:, 0]  # (N,)
    gap = (rows.max(-1).values - chosen).max().item()
    tolerance = figure["tolerance"]
    if model.embed_tokens.weight.dtype != torch.float32:
        tolerance = max(tolerance, BF16_STEPS)
    detail = f"{figure['prompt']!r} + {len(new)} tokens, {name}"
    return within("published continuation", gap, tolerance, detail)


def check_template_ids(
    tokenizer: Tokenizer, messages: list[dict], ids: list[int], **kwargs: Any
) -> Check:
    """Check the ids of a rendered conversation: template and tokenizer together."""
    ours = []
    if tokenizer.chat_template:
        ours = tokenizer.encode(tokenizer.render(messages, **kwargs))
    if ours == ids:
        return verdict("published template ids", True, f"{len(ids)} ids")
    return verdict("published template ids", False, f"{ours} against {ids}")


def check_qwen3_tokens(tokenizer: Tokenizer) -> list[Check]:
    """Check a known encoding, if this is the tokenizer of the Qwen3 family."""
    token, id = QWEN3_TOKENS["special"]
    if tokenizer.vocab_size != QWEN3_TOKENS["size"] or tokenizer.special_tokens.get(token) != id:
        return []
    ours = tokenizer.encode(QWEN3_TOKENS["text"])
    equal = ours == QWEN3_TOKENS["ids"]
    return [verdict("published token ids", equal, f"{QWEN3_TOKENS['text']!r} → {ours}")]
