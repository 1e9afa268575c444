"""nanokv: how a modern LLM really runs, and what a KV cache is.

    model, tokenizer = nanokv.load("tiny")
    cache = nanokv.make_cache("dict", model.config)
    logits = nanokv.prefill(model, ids, cache, start_pos=0)
    logits = nanokv.decode(model, next_id, cache, start_pos=cache.length)

Names are imported on first use, so `import nanokv` is light and `nanokv --help` never loads torch.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings

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
_MODULES = {  # nanokv.NAME → the module, for `import nanokv` alone
    name: f"nanokv.{name}"
    for name in ("attention", "cache", "config", "costs", "course", "engine", "errors", "faults", "inference", "model")
} | {
    "batching": "nanokv.decoding.batching", "beam": "nanokv.decoding.beam", "generation": "nanokv.decoding.generation",
    "sample": "nanokv.decoding.sample", "speculative": "nanokv.decoding.speculative",
    "debug": "nanokv.study.debug", "equality": "nanokv.study.equality",
    "session": "nanokv.chat.session", "tokenizer": "nanokv.text.tokenizer",
}  # fmt: skip
_MOVED = {  # modules of version 0.1.0 that are imported by their old paths → where they are now
    name: home for name, home in _MODULES.items() if home != f"nanokv.{name}"
} | {
    "kinds": "nanokv.cache.options", "fingerprint": "nanokv.cache.saving", "latent": "nanokv.study.mla",
    "memory": "nanokv.costs.memory", "prefix": "nanokv.chat.history", "quality": "nanokv.study.quality",
    "sandbox": "nanokv.text.sandbox", "skeleton": "nanokv.loading", "template": "nanokv.text.template",
}  # fmt: skip

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'nanokv' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted([*__all__, *_MODULES])


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import nanokv.kinds` goes on working: the old name becomes another name of the module itself, with a warning."""

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.rpartition(".")
        if package == "nanokv" and module in _MOVED:
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def exec_module(self, module):
        old = module.__name__
        new = _MOVED[old.rpartition(".")[2]]
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


sys.meta_path.append(_Moved())
