"""The cache of a model that nanokv counts and does not run, from its config.json."""

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanokv import config_file
from nanokv.costs import formulas
from nanokv.costs.memory import most_tokens
from nanokv.costs.other.fields import Fields, table
from nanokv.costs.other.kinds import Layer
from nanokv.costs.other.table import ARCHITECTURES, layers_of
from nanokv.errors import ConfigError


@dataclass(frozen=True)
class Counted:
    """One model's layers, dtype, context and batch; its properties are the numbers of the report."""

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    dtype: str  # a key of formulas.ITEMSIZE
    context: int
    limit: int | None  # positions that config.json names
    batch: int = 1
    weights: int | None = None  # bytes of the weight files beside config.json, if they are there

    @property
    def itemsize(self) -> int:
        return formulas.ITEMSIZE[self.dtype]

    @property
    def per_token(self) -> float:
        """Bytes that each further token of one sequence adds, after every window is full."""
        return sum(layer.per_token(self.itemsize) for layer in self.layers)

    @property
    def state(self) -> int:
        """Bytes of one sequence's states, whatever its length."""
        return sum(layer.state(self.itemsize) for layer in self.layers)

    def cached(self, tokens: int, batch: int) -> int:
        """Bytes that transformers' cache holds after `tokens` tokens in each of `batch` rows."""
        return batch * sum(layer.bytes(tokens, self.itemsize) for layer in self.layers)

    def elsewhere(self) -> dict[str, int]:
        """What another runtime does → bytes of the whole cache there."""
        reasons = dict.fromkeys(x.otherwise.reason for x in self.layers if x.otherwise)
        return {
            reason: self.batch
            * sum(layer.bytes_if(reason, self.context, self.itemsize) for layer in self.layers)
            for reason in reasons
        }

    def groups(self) -> list[tuple[Layer, int]]:
        """Equal layers with their number, in the order of the first."""
        return list(Counter(self.layers).items())

    def snapshot_tokens(self) -> int | None:
        """How many tokens weigh as much as one copy of the states; None without both."""
        if not self.state or not self.per_token:
            return None
        return round(self.state / self.per_token)

    def max_batch(self, memory: int) -> int | None:
        """Sequences of this context that fit beside the weights; None: no limit."""
        each = self.cached(self.context, 1)
        return max(0, memory - (self.weights or 0)) // each if each else None

    def max_context(self, memory: int) -> int | None:
        """Tokens per sequence that fit beside the weights with this batch; None: no limit."""
        room = memory - (self.weights or 0)
        return most_tokens(lambda tokens: self.cached(tokens, self.batch) <= room)


def text_part(config: Mapping[str, Any]) -> Fields:
    """The architecture and fields of the language model in a config.json.

    A multimodal config keeps them in an object of its own. Raises ConfigError for an architecture
    that is not in table.py, and for a cache that the config asks to quantize.
    """
    fields = dict(config)
    kind = fields.get("model_type")
    while isinstance(kind, str) and kind in table()["wrappers"]:
        place, inside = table()["wrappers"][kind]
        found = fields.get(place) or {}
        if not isinstance(found, dict):
            raise ConfigError(f"{place} is {config_file.shown(found)}: an object was expected")
        fields = {"model_type": inside} | found
        kind = fields["model_type"]
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(unknown(kind), hint=close_to(kind))
    quantized = config.get("quantization_config") or {}
    if isinstance(quantized, dict) and quantized.get("kv_cache_scheme"):
        scheme = config_file.shown(quantized["kv_cache_scheme"])
        raise ConfigError(f"kv_cache_scheme {scheme} quantizes the cache: its bytes are not known")
    fields.pop("model_type")
    return Fields(kind, fields)


def known() -> set[str]:
    """The model types whose caches can be counted."""
    return ARCHITECTURES.keys() | table()["wrappers"].keys()


def unknown(kind: object) -> str:
    return f"model_type {config_file.shown(kind)} is not known: its cache cannot be counted"


def close_to(kind: object) -> str:
    """Architectures with a similar name, or how many there are."""
    close = difflib.get_close_matches(str(kind), sorted(known()))
    if close:
        return f"known are {', '.join(close)}"
    return f"{len(known())} model types of transformers {table()['transformers']} are known"


def count(
    name: str,
    config: Mapping[str, Any],
    dtype: str = "auto",
    context: int | None = None,
    batch: int = 1,
    weights: int | None = None,
) -> Counted:
    """Read a config.json. `dtype`: a key of ITEMSIZE, or "auto" for that of config.json.

    Raises ConfigError as `text_part` and `layers_of` do, and without a context.
    """
    fields = text_part(config)
    limit = fields.get("max_position_embeddings")
    if limit is not None:
        limit = fields.size("max_position_embeddings")
    if context is None and limit is None:
        raise ConfigError("config.json names no context", hint="--context 4096")
    if dtype == "auto":
        dtype = config_file.dtype_of({**config, **fields.given})
    layers = tuple(layers_of(fields))
    length = context or limit or 1
    return Counted(name, fields.architecture, layers, dtype, length, limit, batch, weights)
