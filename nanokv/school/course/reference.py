"""References of notebook 04: transformers, or stored numbers of it; and checkpoints with one fault.

python -m nanokv.school.course.reference        # writes the stored numbers; needs transformers
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import weights_loader
from nanokv.cache import make_cache
from nanokv.cache.saving import fingerprint
from nanokv.inference import decode
from nanokv.lab.study.debug import record, watch
from nanokv.lab.verify import oracle
from nanokv.loading import build, load

if TYPE_CHECKING:
    from nanokv.model import Transformer

STORED = Path(__file__).with_name("reference.safetensors")
QUESTION = "My name is Zorbla. What is my name?"


def in_transformers(
    source: str | Path, dtype: torch.dtype = torch.float32
) -> torch.nn.Module | None:
    """The same checkpoint loaded by transformers; None if transformers is not installed."""
    if oracle.version() is None:
        return None
    with warnings.catch_warnings():
        # tqdm warns in a notebook without ipywidgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
        with oracle.readable(weights_loader.resolve(source)) as folder:  # a copy of a GGUF file
            return oracle.load(folder, dtype)[0]


def stored(model: "Transformer") -> tuple[torch.Tensor, dict, str] | None:
    """(ids (1,T), record of their last token, its author); None if `model` has other weights.

    The record is as from nanokv.debug.record: {(layer or None, operation): (1,1,…) fp32}.
    """
    with safe_open(STORED, framework="pt") as file:
        if file.metadata()["model"] != fingerprint(model):
            return None
        kept = {key: file.get_tensor(key) for key in file.keys()}
        author = file.metadata()["author"]
    ids = kept.pop("ids")
    found = {}
    for key, value in kept.items():
        layer, name = key.split(" ")
        found[None if layer == "-" else int(layer), name] = value
    return ids, found, author


def last_token(record: dict) -> dict:
    """The last token's values of a record: (B,T,…) → (B,1,…)."""
    return {key: value[:, -1:] for key, value in record.items()}


def prompt(model: "Transformer") -> torch.Tensor:
    """The stored ids (1,T), modulo the vocabulary size of `model`, which may be smaller."""
    with safe_open(STORED, framework="pt") as file:
        return file.get_tensor("ids") % model.config.vocab_size


def write() -> None:
    """Store the last token's record of QUESTION: transformers, fp32, the bundled model."""
    model, tokenizer = load("tiny", dtype="float32", device="cpu")
    ids = torch.tensor(
        [tokenizer.encode(tokenizer.render([{"role": "user", "content": QUESTION}]))]
    )
    theirs = last_token(record(in_transformers("tiny"), ids))
    tensors = {
        f"{'-' if layer is None else layer} {name}": x.contiguous()
        for (layer, name), x in theirs.items()
    }
    about = {"model": fingerprint(model), "author": f"transformers {oracle.version()}"}
    save_file(tensors | {"ids": ids}, STORED, about)


@torch.inference_mode()
def one_by_one(model: "Transformer", ids: torch.Tensor) -> dict:
    """As study.debug.record, but with the ids (1,T) fed one at a time through a cache.

    The values are the same up to rounding: the multiplications have other shapes.
    """
    cache = make_cache("dict", model.config)
    with watch(model) as passes:
        for at in range(ids.shape[1]):
            decode(model, ids[:, at : at + 1], cache, start_pos=at)
    return {key: torch.cat([one.values[key] for one in passes], dim=1) for key in passes[0].values}


def sabotaged(model: "Transformer") -> dict:
    """Copies of a model with one fault each, by name; they share its other weights.

    "theta", "eps": a wrong number in config.json. "head": a randomly initialised lm_head, as after
    a loader that does not tie the head to the embeddings and finds no weights for it in the file.
    """
    weights = {
        name: value for name, value in model.state_dict().items() if name != "lm_head.weight"
    }
    if not model.config.tie_word_embeddings:
        weights["lm_head.weight"] = model.lm_head.weight
    right = model.lm_head.weight  # (V,C)
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(right.shape, generator=generator).mul(right.float().std()).to(right.dtype)
    wrong = {
        "theta": build(replace(model.config, rope_theta=model.config.rope_theta / 100), weights),
        "eps": build(replace(model.config, rms_norm_eps=model.config.rms_norm_eps * 10), weights),
        "head": build(
            replace(model.config, tie_word_embeddings=False), weights | {"lm_head.weight": head}
        ),
    }
    for one in wrong.values():
        one.generation_config = model.generation_config
    return wrong


if __name__ == "__main__":
    write()
