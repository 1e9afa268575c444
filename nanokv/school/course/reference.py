"""What notebook 04 compares with: transformers where it is installed, else numbers of it that are kept in a file; and
checkpoints that are wrong in one place.

    python -m nanokv.school.course.reference        # writes the file again; needs transformers
"""

import warnings
from dataclasses import replace
from pathlib import Path

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

STORED = Path(__file__).with_name("reference.safetensors")
QUESTION = "My name is Zorbla. What is my name?"


def in_transformers(source, dtype=torch.float32):
    """The same checkpoint as transformers' model of its family; None where transformers is not installed."""
    if oracle.version() is None:
        return None
    with warnings.catch_warnings():
        # Tqdm misses widgets in a notebook.
        warnings.filterwarnings("ignore", message="IProgress not found")
        with oracle.readable(weights_loader.resolve(source)) as folder:  # of a GGUF file a copy
            return oracle.load(folder, dtype)[0]


def stored(model) -> tuple[torch.Tensor, dict, str] | None:
    """(ids (1,T), record of their last token, who computed it); None if it was computed with other weights.

    The record has what nanokv.debug.record has, {(layer or None, operation): (1,1,…) fp32}.
    """
    with safe_open(STORED, framework="pt") as file:
        if file.metadata()["model"] != fingerprint(model):
            return None
        kept = {key: file.get_tensor(key) for key in file.keys()}
        author = file.metadata()["author"]
    ids = kept.pop("ids")
    names = ((key, *key.split(" ")) for key in kept)
    return (
        ids,
        {(None if layer == "-" else int(layer), name): kept[key] for key, layer, name in names},
        author,
    )


def last_token(record: dict) -> dict:
    """The part of a record that belongs to the last token: (B,T,…) → (B,1,…)."""
    return {key: value[:, -1:] for key, value in record.items()}


def prompt(model) -> torch.Tensor:
    """The stored ids (1,T), for a model that may have a smaller vocabulary."""
    with safe_open(STORED, framework="pt") as file:
        return file.get_tensor("ids") % model.config.vocab_size


def write() -> None:
    """Ask transformers for the last token's record of QUESTION, in fp32, with the bundled model."""
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
def one_by_one(model, ids) -> dict:
    """As study.debug.record, but of ids (1,T) that are fed one at a time through a cache: the same values, computed
    by multiplications of another shape."""
    cache = make_cache("dict", model.config)
    with watch(model) as passes:
        for at in range(ids.shape[1]):
            decode(model, ids[:, at : at + 1], cache, start_pos=at)
    return {key: torch.cat([one.values[key] for one in passes], dim=1) for key in passes[0].values}


def sabotaged(model) -> dict:
    """{"theta", "eps", "head": the same model with one thing wrong}; what is right is shared, not copied.

    theta and eps stand in config.json. The head is what a loader leaves that takes embeddings and head for two
    parameters where the file has one: as it was initialized.
    """
    weights = {
        name: value for name, value in model.state_dict().items() if name != "lm_head.weight"
    }
    if not model.config.tie_word_embeddings:
        weights["lm_head.weight"] = model.lm_head.weight
    right, generator = model.lm_head.weight, torch.Generator().manual_seed(0)  # (V,C)
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
