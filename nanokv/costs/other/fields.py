"""The fields of another model's config.json, with the defaults of transformers 5.23.

Published files leave fields out: Gemma 3's names neither heads nor head size. transformers_fields.json
has, for each architecture, every field that decides the cache with its default, other names of these
fields, and the fields whose names look as if they did but that change no byte. tests/costs/
test_other_models.py compares the table with transformers.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanokv import config_file
from nanokv.errors import ConfigError
from weights_loader.neutral import is_off
from weights_loader.strict import read_object

LARGEST = 1 << 40  # no size of a model is larger
# A field with such a name may change what a layer keeps. One that transformers does not know is
# refused, unless it is off.
SUSPICIOUS = re.compile(
    r"(.*_)?(kv|cache|window|sliding|swa|layer_types|layers_block_type|conv|ssm|mamba|states?|latent|"
    r"lora_rank|indexer?|indices|share[ds]?|linear|recurrent|heads?|compress\w*|chunk|hybrid|global|local|"
    r"per_layer)(_.*)?"
)
# Of these, the ones that the generation, the loss or a kernel reads.
HARMLESS = re.compile(
    r"(use_)?cache(_implementation|_config)?|.*_token_(id|index)|lm_head.*|.*_(bias|init|dropout)|"
    r"num_local_experts|shared_experts?.*|.*_(shared_)?experts?(_.*)?|use_mamba_kernels|.*_multipliers?"
)


def is_suspicious(name: str) -> bool:
    """Whether a field of this name may change what a layer keeps."""
    harmless = HARMLESS.fullmatch(name) or config_file.is_harmless(name)
    return SUSPICIOUS.fullmatch(name) is not None and not harmless


@functools.cache
def table() -> dict[str, Any]:
    """transformers_fields.json: "architectures" and "wrappers", the multimodal configs."""
    return read_object(Path(__file__).parent / "transformers_fields.json", ConfigError)


@dataclass(frozen=True)
class Fields:
    """One architecture's fields: those of config.json before the defaults."""

    architecture: str
    given: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, under any of its names; `default` if it is null.

        A null in config.json counts, whatever transformers' default is: Mistral's later files
        switch the window off in this way.
        """
        row = table()["architectures"].get(self.architecture, {})
        names = (name, *row.get("names", {}).get(name, ()))
        for spelled in names:
            if spelled in self.given:
                value = self.given[spelled]
                return default if value is None else value
        found = [row["reads"].get(spelled) for spelled in names] if row else []
        return next((value for value in found if value is not None), default)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0. Raises ConfigError if it is absent, or not such a number."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"config.json of {self.architecture} lacks {name}")
        if type(value) is not int or not 0 < value <= LARGEST:
            raise ConfigError(
                f"{name} is {config_file.shown(value)}: a whole number above 0 was expected"
            )
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of words, one per layer; None if it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ConfigError(f"{name} is {config_file.shown(value)}: a list of words was expected")
        return value

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers; None if it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise ConfigError(
                f"{name} is {config_file.shown(value)}: a list of whole numbers was expected"
            )
        return value

    def check_unknown(self) -> None:
        """ConfigError for a field that transformers does not know and that may change the cache."""
        row = table()["architectures"].get(self.architecture, {})
        known = {*row["reads"], *row["others"]}.union(*row["names"].values())
        for name, value in self.given.items():
            if name not in known and is_suspicious(name) and not is_off(name, value):
                label = config_file.shown(name)[1:-1]
                raise ConfigError(
                    f"{label} {config_file.shown(value)} is no field of {self.architecture} in "
                    "transformers 5.23 and may change the bytes of the cache",
                    hint=f"where it does not, remove {label} from config.json",
                )
