"""The tokens that a checkpoint names, which its chat template can write by name: {{ eos_token }}.

Files and order are those of transformers' `special_tokens_map` (5.23: tokenization_utils_base.py,
`_from_pretrained` and `__init__`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanokv.errors import TokenizerError
from weights_loader.strict import quote, read_object

MAP = "special_tokens_map.json"
STANDARD = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
OLD, EXTRA = "additional_special_tokens", "extra_special_tokens"  # a list, or names and tokens
OWN = "model_specific_special_tokens"  # names and tokens
NAMING = (EXTRA, OLD, OWN)


def read_names(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{"eos_token": "<|im_end|>", …} of tokenizer_config.json and, where that holds no
    added_tokens_decoder (files of before 2023), of special_tokens_map.json."""
    path = folder / MAP
    if "added_tokens_decoder" in config or not path.is_file():
        return token_names(config)
    return token_names(config, read_object(path, TokenizerError))


def token_names(config: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Of tokenizer_config.json and special_tokens_map.json (`old`). A name that is null is left
    out, so that the template sees it as undefined."""
    old = old or {}
    standard = {name: token for name, token in {**config, **old}.items() if name in STANDARD}
    written = {name: token for name, token in config.items() if _is_own(name)}
    typed = {name: token for name, token in written.items() if _is_typed(token)}
    plain = {name: token for name, token in written.items() if isinstance(token, str)}
    extra = (config.get(EXTRA) or config.get(OLD)), old.get(EXTRA)
    first, last = (tokens if isinstance(tokens, dict) else {} for tokens in extra)
    explicit = plain | first or config.get(OWN)
    tokens = standard | typed | {name: token for name, token in old.items() if _is_own(name)}
    tokens |= (explicit if isinstance(explicit, dict) else {}) | last
    return {name: text for name, token in tokens.items() if (text := content(token)) is not None}


def with_names(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer_config.json of which `token_names` are these; unchanged where they are already,
    but for the form of the standard ones."""
    standard = {name: text for name, text in names.items() if name in STANDARD}
    if token_names({**config, **standard}) == names:
        return {**config, **standard}
    kept = {name: value for name, value in config.items() if not _names_tokens(name, value)}
    own = {name: text for name, text in names.items() if name not in standard}
    return kept | standard | {OWN: own}


def content(token: Any) -> str | None:
    """The text of a token: itself, or in {"content": …}."""
    text = token.get("content") if isinstance(token, dict) else token
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
    """add_bos_token is a field of another kind: a bool."""
    if field in NAMING:
        return isinstance(value, dict)
    return field.endswith("_token") and not isinstance(value, bool)


def _is_own(name: str) -> bool:
    return name.endswith("_token") and name not in STANDARD


def _is_typed(token: Any) -> bool:
    """Is it an AddedToken by its own words? Other objects under an own name are no tokens."""
    return isinstance(token, dict) and token.get("__type") == "AddedToken"
