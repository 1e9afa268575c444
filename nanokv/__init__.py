"""nanokv: how a modern LLM really runs, and what a KV cache is.

    model, tokenizer = nanokv.load("tiny")
    cache = nanokv.make_cache("dict", model.config)
    logits = nanokv.prefill(model, ids, cache, start_pos=0)
    logits = nanokv.decode(model, next_id, cache, start_pos=cache.length)

Names are imported on first use, so `import nanokv` is light and `nanokv --help` never loads torch.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "CACHES": "nanokv.cache",
    "Config": "nanokv.config",
    "Engine": "nanokv.engine",
    "GenerationConfig": "nanokv.config",
    "KVCache": "nanokv.cache",
    "NoCache": "nanokv.cache",
    "Qwen3": "nanokv.model",
    "Session": "nanokv.chat.session",
    "Tokenizer": "nanokv.text.tokenizer",
    "beam_search": "nanokv.decoding.beam",
    "decode": "nanokv.inference",
    "generate": "nanokv.decoding.generation",
    "optimize": "nanokv.fast",
    "generate_padded": "nanokv.decoding.batching",
    "generate_ragged": "nanokv.decoding.batching",
    "load": "nanokv.loading",
    "make_cache": "nanokv.cache",
    "prefill": "nanokv.inference",
    "prefill_chunks": "nanokv.inference",
    "score": "nanokv.inference",
    "speculate": "nanokv.decoding.speculative",
}
_MODULES = (
    "attention", "batching", "beam", "cache", "config", "costs", "course", "debug", "engine", "equality", "errors",
    "faults", "generation", "inference", "model", "sample", "session", "speculative", "tokenizer",
)  # fmt: skip

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"nanokv.{name}")
    else:
        raise AttributeError(f"module 'nanokv' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted([*__all__, *_MODULES])
