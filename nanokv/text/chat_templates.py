"""The chat templates of a checkpoint by name, and the choice of one for a conversation.

Files, names and choice follow transformers (5.23: tokenization_utils_base.py, `from_pretrained` and
`get_chat_template`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanokv.errors import TemplateError, TokenizerError
from weights_loader.strict import quote, read_bytes

DEFAULT = "default"
TOOL_USE = "tool_use"
FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
MOST = 32  # templates of one checkpoint; Command R+ has 3


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{name: source} from chat_template.jinja and additional_chat_templates/.

    If there are no such files, from tokenizer_config.json.
    """
    paths = {}
    if (folder / FILE).is_file():
        paths[DEFAULT] = folder / FILE
    paths |= {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if len(paths) > MOST:
        raise TokenizerError(f"{folder} has {len(paths):,} chat templates, at most {MOST} are read")
    if not paths:
        return templates_in(config, folder)
    return {name: read_template(path) for name, path in paths.items()}


def read_template(path: Path) -> str:
    """The source of the template in a file."""
    try:
        return read_bytes(path, TokenizerError, FILE).decode("utf-8")
    except UnicodeError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def templates_in(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """{name: source} from tokenizer_config.json.

    `chat_template` is a text, or a list of {"name": …, "template": …}.
    """
    found = config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    if isinstance(found, list):
        named = [entry for entry in found if _has_name(entry)]
        found = {entry["name"]: entry.get("template") for entry in named[:MOST]}
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise TokenizerError(f"chat_template in {folder} is a {type(found).__name__}, not text")
    return found


def _has_name(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def pick(templates: Mapping[str, str], choice: str | None = None, tools: Any = None) -> str:
    """The source of a template. `choice` is a name or a source.

    Without a choice: "tool_use" if there are tools and such a template, else "default".
    """
    if choice is not None:
        return chosen(templates, choice)
    if not templates:
        raise TemplateError(
            "this tokenizer has no chat template: it belongs to a base model",
            "encode plain text instead, or use a chat checkpoint",
        )
    if tools is not None and TOOL_USE in templates:
        return templates[TOOL_USE]
    if DEFAULT not in templates:
        raise TemplateError(
            f"none of this tokenizer's chat templates is the default: {names(templates)}",
            "choose one by its name: chat_template=…, --chat-template",
        )
    return templates[DEFAULT]


def chosen(templates: Mapping[str, str], choice: str) -> str:
    """The source of the template named `choice`, or `choice` itself if it contains "{"."""
    if choice in templates:
        return templates[choice]
    if "{" not in choice:
        raise TemplateError(
            f"no chat template {quote(choice)}: there is {names(templates) or 'none'}"
        )
    return choice


def names(templates: Mapping[str, str]) -> str:
    """The quoted names, for an error message."""
    return ", ".join(map(quote, templates))
