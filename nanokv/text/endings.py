"""The tokens that end an answer, collected from all files of a checkpoint.

    of_folder(folder, tokenizer)     (End(151645, "<|im_end|>", ("config.json", …)), …)

The files of one checkpoint often disagree: a fine-tune changes the template and keeps its base
model's generation_config.json, or a converter loses a token's type. If an end is missed, the model
continues with the user's next turn. So the ends are the union of five sources:

    generation_config.json   eos_token_id, an id or a list; [] means that no token ends an answer
    config.json              eos_token_id
    tokenizer                eos_token, eot_token, eom_token; in a GGUF file also the tokens after
                             which another file would begin (fim_pad, fim_rep, fim_sep)
    known text               added tokens that end a turn in published models
                             (weights_loader/control_texts.py)
    chat templates           the token that each template puts after the assistant's message

transformers uses only the first source that is present. For a complete checkpoint, such as Qwen3's,
both give the same tokens.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanokv.config_file import eos_token_ids, optional
from nanokv.errors import TemplateError, TemplateStopped
from nanokv.text.token_names import content
from nanokv.text.tokenizer import SPOKEN, Tokenizer
from weights_loader.control_texts import FILL_IN_ENDS, TURN_ENDS, turn_ends

GENERATION = "generation_config.json"
CONFIG = "config.json"
NAMES = tuple(f"{name}_token" for name in ("eos", "eot", "eom", *FILL_IN_ENDS))
BEGINNINGS = {  # tokens that begin a turn in common templates; they never end one
    *SPOKEN,
    "<|im_start|>",
    "<tool_response>",
    "</tool_response>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
}
# The messages with which a template is probed.
ASKED = "Question7"
ANSWERED = "Answer7"
SYSTEM = {"role": "system", "content": "System7"}
USER = {"role": "user", "content": ASKED}
ASSISTANT = {"role": "assistant", "content": ANSWERED}


@dataclass(frozen=True)
class End:
    """A token that ends an answer, and the sources that name it."""

    id: int
    text: str
    sources: tuple[str, ...]


def of_folder(folder: str | os.PathLike[str], tokenizer: Tokenizer) -> tuple[End, ...]:
    """The ends of a checkpoint, those of generation_config.json first.

    Raises ConfigError if an eos_token_id is not an id.
    """
    generation = optional(Path(folder) / GENERATION)
    config = optional(Path(folder) / CONFIG)
    return ends(tokenizer, eos_token_ids(generation), eos_token_ids(config))


def ends(
    tokenizer: Tokenizer,
    generation: Sequence[int] | None = None,
    config: Sequence[int] | None = None,
    templates: Iterable[str] | None = None,
) -> tuple[End, ...]:
    """The ends from the eos_token_id of both files (None if absent) and from the tokenizer.

    templates: sources of the chat templates that may be used, by default the tokenizer's.

    config.json often keeps the id of another model. So, where generation_config.json names an end,
    an id of config.json counts only if it is an added token that does not begin a turn.
    """
    if generation is not None and not generation:
        return ()
    texts = tokenizer.special_tokens
    likely = {id for text, id in texts.items() if text not in BEGINNINGS}
    if templates is None:
        templates = tokenizer.chat_templates.values()
    found: dict[int, list[str]] = {}
    _add(found, GENERATION, generation or ())
    _add(found, CONFIG, (id for id in config or () if not generation or id in likely))
    for name in NAMES:
        _add(found, f"tokenizer's {name}", _named(tokenizer, name))
    _add(found, "known text", (texts[text] for text in sorted(turn_ends(texts))))
    _add(found, "chat template", _of_templates(tokenizer, templates, set(found)))
    return tuple(End(id, _text(tokenizer, id), tuple(sources)) for id, sources in found.items())


def _add(found: dict[int, list[str]], source: str, ids: Iterable[int]) -> None:
    for id in ids:
        sources = found.setdefault(id, [])
        if source not in sources:
            sources.append(source)


def _text(tokenizer: Tokenizer, id: int) -> str:
    if id >= tokenizer.rows:
        return ""
    return tokenizer.decode([id])


def _named(tokenizer: Tokenizer, name: str) -> list[int]:
    texts = content(tokenizer.config.get(name)), tokenizer.names.get(name)
    ids = (tokenizer.backend.token_to_id(text) for text in texts if text)
    return [id for id in ids if id is not None]


# --- the templates -------------------------------------------------------------------------------


def _of_templates(tokenizer: Tokenizer, sources: Iterable[str], known: set[int]) -> list[int]:
    """The ids that any of these templates puts after an answer."""
    sources = tuple(dict.fromkeys(sources))
    texts = tokenizer.special_tokens
    others = {id for text, id in texts.items() if text not in BEGINNINGS}
    if others <= known:  # rendering could not find a further id
        written = [id for id in others if any(_text(tokenizer, id) in source for source in sources)]
        return written if len(written) == 1 else []
    found: dict[int, None] = {}
    with contextlib.suppress(TemplateStopped):  # further renders would run into the limit too
        for source in sources:
            found |= dict.fromkeys(answer_ends(tokenizer, source))
    return list(found)


def answer_ends(tokenizer: Tokenizer, source: str) -> list[int]:
    """The first tokens after the assistant's message, as this template renders them.

    Rendered twice: at the end of a conversation, and before another message. Only added tokens
    count, except tokens that begin a turn or end one of several messages of a turn (`turn_ends`).
    Raises TemplateStopped if a render exceeds its limits.
    """

    def render(*messages: dict[str, Any], asks: bool = False) -> str:
        try:
            return tokenizer.render(list(messages), None, asks, source)
        except TemplateStopped:
            raise
        except TemplateError:  # the template rejects this conversation; another may work
            return ""

    for start in (), (SYSTEM,):  # some templates require a system message
        asked = (*start, USER)
        answers = [render(*asked, ASSISTANT), render(*asked, ASSISTANT, USER)]
        shown = [text for text in answers if ANSWERED in text]
        if not shown:
            continue
        question = render(*asked)
        prompt = render(*asked, asks=True)
        opening = prompt.removeprefix(question) if question else ""
        no_ends = _known_beginnings(tokenizer)
        no_ends |= _beginnings(tokenizer, shown[0], asked[0]["content"], opening)
        firsts = dict.fromkeys(id for text in shown for id in _after(tokenizer, text))
        return [id for id in firsts if id not in no_ends]
    return []


def _known_beginnings(tokenizer: Tokenizer) -> set[int]:
    """Added tokens that begin a turn, or end a message within a turn, in published models."""
    texts = tokenizer.special_tokens
    others = BEGINNINGS | (TURN_ENDS - turn_ends(texts))
    return {texts[text] for text in others if text in texts}


def _after(tokenizer: Tokenizer, text: str) -> list[int]:
    """[the token after the answer] if it is an added token, else []."""
    ids = tokenizer.encode(text.partition(ANSWERED)[2].lstrip())[:1]
    return [id for id in ids if id in tokenizer.special_tokens.values()]


def _beginnings(tokenizer: Tokenizer, text: str, first: str, opening: str) -> set[int]:
    """The added tokens that begin a message.

    text: a rendered conversation. first: the content of its first message. opening: the text that
    the template adds to ask for an answer.

    An end follows a message; a beginning precedes the first message. The token directly before the
    question is a beginning too, unless it also appears between question and answer.
    """
    added = set(tokenizer.special_tokens.values())

    def added_ids(part: str) -> list[int]:
        return [id for id in tokenizer.encode(part) if id in added]

    to_answer, _, _ = text.partition(ANSWERED)
    to_question, _, before_answer = to_answer.partition(ASKED)
    start, _, before_question = to_question.partition(first)
    before = added_ids(start)
    question = set(added_ids(before_question)[-1:]) - set(added_ids(before_answer))
    return {*before[:1], *before[-1:], *question, *set(added_ids(opening)) & set(before)}
