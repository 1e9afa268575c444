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
    chat template            the token that it puts after what the assistant says

transformers reads the first of these that is there, and no other. Where a checkpoint is complete,
as Qwen3's are, both end at the same tokens.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanokv.config import eos_token_ids, optional_fields
from nanokv.errors import TemplateError
from nanokv.text.tokenizer import SPOKEN, Tokenizer
from weights_loader.control_texts import FILL_IN_ENDS, turn_ends

GENERATION, CONFIG = "generation_config.json", "config.json"
NAMES = tuple(f"{name}_token" for name in ("eos", "eot", "eom", *FILL_IN_ENDS))  # tokenizer_config.json
BEGINNINGS = {  # of a turn, in the templates that most models have; none of these ends one
    *SPOKEN, "<|im_start|>", "<tool_response>", "</tool_response>", "<|begin_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>",
}  # fmt: skip
PIECES = re.compile(r"""<\|?['"]""")  # a token that a template puts together: '<|' + role + '|>'
ASKED, ANSWERED = "Question7", "Answer7"  # what stands for the contents when a template is tried


@dataclass(frozen=True)
class End:
    """A token that ends an answer, and where that is said."""

    id: int
    text: str
    sources: tuple[str, ...]


def of_folder(folder: str | os.PathLike, tokenizer: Tokenizer) -> tuple[End, ...]:
    """The ends of a checkpoint, those of generation_config.json first. ConfigError: an eos_token_id is
    no id."""
    said = (eos_token_ids(optional_fields(Path(folder) / name)) for name in (GENERATION, CONFIG))
    return ends(tokenizer, *said)


def ends(tokenizer: Tokenizer, generation: Sequence[int] | None = None,
         config: Sequence[int] | None = None) -> tuple[End, ...]:  # fmt: skip
    """From the two files' eos_token_id (None: it is not there) and all that the tokenizer knows.

    A word of the vocabulary is an end only where the first file that names an end says so:
    config.json often keeps the id of another model.
    """
    if generation is not None and not generation:
        return ()
    texts = tokenizer.special_tokens
    added = set(texts.values())
    found: dict[int, list[str]] = {}
    _add(found, GENERATION, generation or ())
    _add(found, CONFIG, (id for id in config or () if not generation or id in added))
    for name in NAMES:
        _add(found, f"tokenizer's {name}", _named(tokenizer, name))
    _add(found, "known text", (texts[text] for text in sorted(turn_ends(texts))))
    _add(found, "chat template", _of_template(tokenizer, set(found)))
    return tuple(End(id, _text(tokenizer, id), tuple(sources)) for id, sources in found.items())


def _add(found: dict[int, list[str]], source: str, ids: Iterable[int]) -> None:
    for id in ids:
        sources = found.setdefault(id, [])
        if source not in sources:
            sources.append(source)


def _text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.decode([id]) if id < tokenizer.rows else ""


def _named(tokenizer: Tokenizer, name: str) -> list[int]:
    text = tokenizer.config.get(name) or tokenizer.names.get(name)
    text = text.get("content") if isinstance(text, dict) else text
    id = tokenizer.backend.token_to_id(text) if isinstance(text, str) else None
    return [] if id is None else [id]


# --- the template -------------------------------------------------------------------------------


def _of_template(tokenizer: Tokenizer, known: set[int]) -> list[int]:
    """The token after an answer, [] if there is none or if it begins a turn."""
    if tokenizer.chat_template is None:
        return []
    present = {text for text in tokenizer.special_tokens if text in tokenizer.chat_template}
    written = [tokenizer.special_tokens[text] for text in present - BEGINNINGS]
    complete = written and not PIECES.search(tokenizer.chat_template)
    if complete and known.issuperset(written):  # rendering it would say nothing new
        return written if len(written) == 1 else []
    end = turn_end(tokenizer)
    return [] if end is None else [end]


def turn_end(tokenizer: Tokenizer) -> int | None:
    """The first token after what the assistant said, as the template renders it at the end of a
    conversation and before another message. None: it is no added token, the two differ, it begins a
    turn, or the template fails."""
    asked, answered = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}
    try:
        question = tokenizer.render([asked], add_generation_prompt=False)
        prompt = tokenizer.render([asked])
    except TemplateError:
        return None
    last, before_another = [asked, answered], [asked, answered, asked]
    firsts = {_after(tokenizer, last), _after(tokenizer, before_another)} - {None}
    begin = _beginnings(tokenizer, question, prompt)
    return firsts.pop() if len(firsts) == 1 and not firsts & begin else None


def _after(tokenizer: Tokenizer, messages: list[dict]) -> int | None:
    try:
        text = tokenizer.render(messages, add_generation_prompt=False)
    except TemplateError:
        return None
    _, found, rest = text.partition(ANSWERED)
    ids = tokenizer.encode(rest.lstrip()) if found else []
    return ids[0] if ids and ids[0] in tokenizer.special_tokens.values() else None


def _beginnings(tokenizer: Tokenizer, question: str, prompt: str) -> set[int]:
    """The added tokens that begin a prompt, stand before what the user says, or ask for an answer."""
    added = set(tokenizer.special_tokens.values())
    before = [id for id in tokenizer.encode(question.partition(ASKED)[0]) if id in added]
    opening = tokenizer.encode(prompt.removeprefix(question))
    return {*before[:1], *before[-1:], *opening} & added
