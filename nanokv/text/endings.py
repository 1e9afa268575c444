"""Which tokens end an answer: all that a checkpoint says about it, in one place.

    of_folder(folder, tokenizer)     (End(151645, "<|im_end|>", ("config.json", …)), …)

The files of one checkpoint often disagree: a fine-tune changes the template and keeps its base
model's generation_config.json, a converter loses a token's type. An answer that does not end there
goes on with the user's next turn. So the ends are the union of five sources:

    generation_config.json   eos_token_id, an id or a list. [] says that nothing ends an answer.
    config.json              eos_token_id
    tokenizer                eos_token, eot_token, eom_token; of a GGUF file the tokens after which
                             another file would begin, too (fim_pad, fim_rep, fim_sep)
    known text               added tokens that end a turn in published models
                             (weights_loader/control_texts.py)
    chat templates           the token that each of them puts after what the assistant says

transformers reads the first of these that is there, and no other. Where a checkpoint is complete,
as Qwen3's are, both end at the same tokens.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanokv.config_file import eos_token_ids, optional
from nanokv.errors import TemplateError, TemplateStopped
from nanokv.text.token_names import content
from nanokv.text.tokenizer import SPOKEN, Tokenizer
from weights_loader.control_texts import FILL_IN_ENDS, TURN_ENDS, turn_ends

GENERATION, CONFIG = "generation_config.json", "config.json"
NAMES = tuple(f"{name}_token" for name in ("eos", "eot", "eom", *FILL_IN_ENDS))
BEGINNINGS = {  # of a turn, in the templates that most models have; none of these ends one
    *SPOKEN,
    "<|im_start|>",
    "<tool_response>",
    "</tool_response>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
}
ASKED, ANSWERED = "Question7", "Answer7"  # what stands for the contents when a template is tried
SYSTEM = {"role": "system", "content": "System7"}
USER, ASSISTANT = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}


@dataclass(frozen=True)
class End:
    """A token that ends an answer, and where that is said."""

    id: int
    text: str
    sources: tuple[str, ...]


def of_folder(folder: str | os.PathLike, tokenizer: Tokenizer) -> tuple[End, ...]:
    """The ends of a checkpoint, those of generation_config.json first. ConfigError: an eos_token_id
    is no id."""
    said = (eos_token_ids(optional(Path(folder) / name)) for name in (GENERATION, CONFIG))
    return ends(tokenizer, *said)


def ends(
    tokenizer: Tokenizer,
    generation: Sequence[int] | None = None,
    config: Sequence[int] | None = None,
    templates: Iterable[str] | None = None,
) -> tuple[End, ...]:
    """From the two files' eos_token_id (None: it is not there) and all that the tokenizer knows.
    templates: the sources of those that a conversation may get; by default the tokenizer's.

    A word of the vocabulary, or a token that begins a turn, is an end only where the first file
    that names an end says so: config.json often keeps the id of another model.
    """
    if generation is not None and not generation:
        return ()
    texts = tokenizer.special_tokens
    likely = {id for text, id in texts.items() if text not in BEGINNINGS}
    templates = tokenizer.chat_templates.values() if templates is None else templates
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
    return tokenizer.decode([id]) if id < tokenizer.rows else ""


def _named(tokenizer: Tokenizer, name: str) -> list[int]:
    texts = content(tokenizer.config.get(name)), tokenizer.names.get(name)
    ids = (tokenizer.backend.token_to_id(text) for text in texts if text)
    return [id for id in ids if id is not None]


# --- the templates ------------------------------------------------------------------------------


def _of_templates(tokenizer: Tokenizer, sources: Iterable[str], known: set[int]) -> list[int]:
    """What comes after an answer in any of them."""
    sources = tuple(dict.fromkeys(sources))
    texts = tokenizer.special_tokens
    others = {id for text, id in texts.items() if text not in BEGINNINGS}
    if others <= known:  # rendering could not find another one
        written = {id for id in others if any(_text(tokenizer, id) in source for source in sources)}
        return list(written) if len(written) == 1 else []
    found: dict[int, None] = {}
    with contextlib.suppress(TemplateStopped):  # each further render would take its seconds too
        for source in sources:
            found |= dict.fromkeys(answer_ends(tokenizer, source))
    return list(found)


def answer_ends(tokenizer: Tokenizer, source: str) -> list[int]:
    """The first token after what the assistant said, as this template renders it: at the end of a
    conversation, and before another message. Only added tokens, and none that begins a turn or is
    known to end a message of several (`turn_ends`). TemplateStopped: a render took too much."""

    def render(*messages: dict, asks: bool = False) -> str:
        try:
            return tokenizer.render(list(messages), None, asks, source)
        except TemplateStopped:
            raise
        except TemplateError:  # it refuses this conversation, but another one may be right
            return ""

    texts = tokenizer.special_tokens
    for start in (), (SYSTEM,):  # some templates demand a system message
        asked = *start, USER
        answers = render(*asked, ASSISTANT), render(*asked, ASSISTANT, USER)
        shown = [text for text in answers if ANSWERED in text]
        if shown:
            question, prompt = render(*asked), render(*asked, asks=True)
            opening = prompt.removeprefix(question) if question else ""
            others = BEGINNINGS | (TURN_ENDS - turn_ends(texts))
            no_ends = {texts[text] for text in others if text in texts}
            no_ends |= _beginnings(tokenizer, shown[0], asked[0]["content"], opening)
            firsts = dict.fromkeys(id for text in shown for id in _after(tokenizer, text))
            return [id for id in firsts if id not in no_ends]
    return []


def _after(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token after the answer, if it is an added one."""
    ids = tokenizer.encode(text.partition(ANSWERED)[2].lstrip())[:1]
    return [id for id in ids if id in tokenizer.special_tokens.values()]


def _beginnings(tokenizer: Tokenizer, text: str, first: str, opening: str) -> set[int]:
    """The added tokens that begin a message. text: a conversation. first: the content of its first
    message. opening: what asks for an answer.

    An end stands after a message, a beginning before the first one. What stands before the question
    alone, not before the answer, begins it.
    """
    added = set(tokenizer.special_tokens.values())
    parts = text.partition(ANSWERED)[0].partition(ASKED)
    start, _, between = parts[0].partition(first)
    before, question, answer, asks = (
        [id for id in tokenizer.encode(part) if id in added]
        for part in (start, between, parts[2], opening)
    )
    return {*before[:1], *before[-1:], *set(question[-1:]) - set(answer), *set(asks) & set(before)}
