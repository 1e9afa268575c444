"""The named tokens of a checkpoint, which its chat template can use: {{ eos_token }}.

Files and precedence follow transformers' `special_tokens_map` (5.23: tokenization_utils_base.py,
`_from_pretrained` and `__init__`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanokv.errors import TokenizerError
from weights_loader.strict import quote, read_object

MAP = "special_tokens_map.json"
STANDARD = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
OLD = "additional_special_tokens"  # a list, or {name: token}
EXTRA = "extra_special_tokens"  # the same, under its new name
OWN = "model_specific_special_tokens"  # {name: token}
NAMING = (EXTRA, OLD, OWN)


def read_names(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{"eos_token": "<|im_end|>", …} from tokenizer_config.json.

    special_tokens_map.json counts too if the config has no added_tokens_decoder (before 2023).
    """
    path = folder / MAP
    if "added_tokens_decoder" in config or not path.is_file():
        return token_names(config)
    return token_names(config, read_object(path, TokenizerError))


def token_names(config: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The names in tokenizer_config.json and special_tokens_map.json (`old`).

    A name that is null is left out, so that it is undefined in the template.
    """
    old = old or {}
    standard = {name: token for name, token in {**config, **old}.items() if name in STANDARD}
    written = {name: token for name, token in config.items() if _is_own(name)}
    typed = {name: token for name, token in written.items() if _is_typed(token)}
    plain = {name: token for name, token in written.items() if isinstance(token, str)}
    old_own = {name: token for name, token in old.items() if _is_own(name)}
    extra = _dict(config.get(EXTRA) or config.get(OLD))
    explicit = _dict(plain | extra or config.get(OWN))
    tokens = standard | typed | old_own | explicit | _dict(old.get(EXTRA))
    texts = {name: content(token) for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def with_names(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer_config.json whose `token_names` are `names`.

    If the config has these names already, only the form of the standard ones changes.
    """
    standard = {name: text for name, text in names.items() if name in STANDARD}
    if token_names({**config, **standard}) == names:
        return {**config, **standard}
    kept = {name: value for name, value in config.items() if not _names_tokens(name, value)}
    own = {name: text for name, text in names.items() if name not in standard}
    return kept | standard | {OWN: own}


def content(token: Any) -> str | None:
    """The text of a token, which is a string or {"content": …}; None for any other value."""
    text = token
    if isinstance(token, dict):
        text = token.get("content")
    if not isinstance(text, str):
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TokenizerError(
            f"a token is named {quote(text)}, which holds half a character"
        ) from None
    return text


def _names_tokens(field: str, value: Any) -> bool:
    """Whether the field names tokens. add_bos_token does not: its value is a bool."""
    if field in NAMING:
        return isinstance(value, dict)
    return field.endswith("_token") and not isinstance(value, bool)


def _is_own(name: str) -> bool:
    return name.endswith("_token") and name not in STANDARD


def _is_typed(token: Any) -> bool:
    """Whether the object is marked as an AddedToken. Other objects are not tokens."""
    return isinstance(token, dict) and token.get("__type") == "AddedToken"
