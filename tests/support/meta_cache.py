"""The oracle of `nanokv memory` for other models: transformers' own cache, filled on the meta device.

A meta tensor has a shape, a dtype and no memory, so that a model of any size is built and run in a second.
"""

import warnings
from typing import Any

import torch


def model_of(config: dict[str, Any], dtype: str) -> torch.nn.Module:
    """The language model of a config.json, or the model around it, without weights."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from transformers_fields import classes

    made = classes()[config["model_type"]]
    fields = {name: value for name, value in config.items() if name != "model_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = made.from_dict(fields)
        read._attn_implementation = "eager"
        auto = (
            AutoModelForCausalLM
            if read.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            else AutoModel
        )
        with torch.device("meta"):
            return auto.from_config(read).to(getattr(torch, dtype)).eval()


def cached_bytes(model: torch.nn.Module, tokens: list[int], batch: int) -> int:
    """Bytes of the cache after forwards of this many tokens each; `use_cache` is on."""
    cache = None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for count in tokens:
            ids = torch.zeros(batch, count, dtype=torch.long, device="meta")  # (B,T)
            named = {"past_key_values": cache} if cache is not None else {}
            answer = model(ids, use_cache=True, **named)
            cache = answer.get("past_key_values", answer.get("cache_params"))
    return sum(t.numel() * t.element_size() for t in tensors(cache))


def tensors(cache: Any) -> list[torch.Tensor]:
    """The tensors of a cache, each once; lengths are no rows of anything."""
    found: dict[int, torch.Tensor] = {}
    todo = [vars(layer) for layer in cache.layers] + [getattr(cache, "linear_cache", [])]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif torch.is_tensor(value) and value.ndim > 1:
            found[id(value)] = value
    return list(found.values())
