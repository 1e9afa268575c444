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
import importlib.util
import sys
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers: the names in _HOME and _MODULES
    from nanokv import attention as attention
    from nanokv import cache as cache
    from nanokv import config as config
    from nanokv import costs as costs
    from nanokv import engine as engine
    from nanokv import errors as errors
    from nanokv import inference as inference
    from nanokv import model as model
    from nanokv.cache import CACHES, KVCache, NoCache, make_cache
    from nanokv.chat import session as session
    from nanokv.chat.session import Session
    from nanokv.config import Config, GenerationConfig
    from nanokv.decoding import batching as batching
    from nanokv.decoding import beam as beam
    from nanokv.decoding import generation as generation
    from nanokv.decoding import sample as sample
    from nanokv.decoding import speculative as speculative
    from nanokv.decoding.batching import generate_padded, generate_ragged
    from nanokv.decoding.beam import beam_search
    from nanokv.decoding.generation import generate
    from nanokv.decoding.speculative import speculate
    from nanokv.embeddings import embed
    from nanokv.engine import Engine
    from nanokv.fast import batch_invariant, optimize
    from nanokv.inference import decode, prefill, prefill_chunks, score
    from nanokv.lab import faults as faults
    from nanokv.lab import study as study
    from nanokv.lab.study import debug as debug
    from nanokv.lab.study import equality as equality
    from nanokv.loading import load
    from nanokv.model import Qwen3
    from nanokv.school import course as course
    from nanokv.text import tokenizer as tokenizer
    from nanokv.text.tokenizer import Tokenizer

__version__ = "0.2.0"

_NAMES = {  # module → the names that `nanokv` exports from that module
    "cache": "CACHES KVCache NoCache make_cache",
    "chat.session": "Session",
    "config": "Config GenerationConfig",
    "decoding.batching": "generate_padded generate_ragged",
    "decoding.beam": "beam_search",
    "decoding.generation": "generate",
    "decoding.speculative": "speculate",
    "embeddings": "embed",
    "engine": "Engine",
    "fast": "batch_invariant optimize",
    "inference": "decode prefill prefill_chunks score",
    "loading": "load",
    "model": "Qwen3",
    "text.tokenizer": "Tokenizer",
}
_HOME = {name: f"nanokv.{module}" for module, names in _NAMES.items() for name in names.split()}
_ENTRANCES = {  # short name nanokv.NAME → full module path
    "batching": "nanokv.decoding.batching",
    "beam": "nanokv.decoding.beam",
    "generation": "nanokv.decoding.generation",
    "sample": "nanokv.decoding.sample",
    "speculative": "nanokv.decoding.speculative",
    "session": "nanokv.chat.session",
    "tokenizer": "nanokv.text.tokenizer",
    "faults": "nanokv.lab.faults",
    "study": "nanokv.lab.study",
    "debug": "nanokv.lab.study.debug",
    "equality": "nanokv.lab.study.equality",
    "course": "nanokv.school.course",
}
_MODULES = _ENTRANCES | {
    name: f"nanokv.{name}"
    for name in ("attention", "cache", "config", "costs", "engine", "errors", "inference", "model")
}

__all__ = [
    "CACHES",
    "Config",
    "Engine",
    "GenerationConfig",
    "KVCache",
    "NoCache",
    "Qwen3",
    "Session",
    "Tokenizer",
    "__version__",
    "batch_invariant",
    "beam_search",
    "decode",
    "embed",
    "generate",
    "generate_padded",
    "generate_ragged",
    "load",
    "make_cache",
    "optimize",
    "prefill",
    "prefill_chunks",
    "score",
    "speculate",
]


if not TYPE_CHECKING:  # a type checker would accept any misspelled name

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
        elif name in _MODULES:
            value = importlib.import_module(_MODULES[name])
        else:
            habits = importlib.import_module("nanokv.support.habits")
            raise habits.unknown_name(sys.modules[__name__], name, habits.MODULE)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


class _Entrance(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Import finder for the short names: `import nanokv.faults` gives the module nanokv.lab.faults.

    Both names are the same module object, so `from nanokv.faults import inject` works too.
    """

    @staticmethod
    def home(name: str) -> str:
        """nanokv.faults.catalogue → nanokv.lab.faults.catalogue; "" for any other module."""
        package, _, rest = name.partition(".")
        entrance, _, inside = rest.partition(".")
        if package != "nanokv" or entrance not in _ENTRANCES:
            return ""
        home = _ENTRANCES[entrance]
        return f"{home}.{inside}" if inside else home

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        home = self.home(name)
        if not home:
            return None
        found = importlib.util.find_spec(home)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(
            name, self, origin=found.origin, is_package=is_package
        )

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(self.home(name))

    def is_package(self, name: str) -> bool:
        return self.loader(name).is_package(self.home(name))

    def get_code(self, name: str) -> CodeType | None:
        return self.loader(name).get_code(self.home(name))

    def get_source(self, name: str) -> str | None:
        return self.loader(name).get_source(self.home(name))

    def loader(self, name: str) -> Any:
        found = importlib.util.find_spec(self.home(name))
        return found and found.loader


# First in the list: the path finder would load a second copy of the module.
# By class name, because a reload of nanokv defines the class again.
if not any(type(finder).__name__ == _Entrance.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Entrance())
