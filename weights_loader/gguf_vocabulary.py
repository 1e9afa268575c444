"""tokenizer.json and the names of its tokens → the `tokenizer.*` keys of a GGUF file.

The inverse of gguf_tokenizer.py. A GGUF file has a place for a byte-level BPE whose pre-tokenizer
has a name (gguf_rules.py), for bos before a text, and for a few named tokens. A tokenizer with
anything more is refused by name: with a default in its place, llama.cpp and nanokv would split
texts differently from the original, without an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .control_texts import FILL_IN_ENDS, TURN_ENDS
from .gguf_rules import GPT2_REGEX, RULES, Rule, byte_level, split
from .gguf_tokenizer import CONTROL, NORMAL, SPECIAL, UNUSED, USER_DEFINED
from .strict import CheckpointError, quote

HINT = "a Hugging Face folder can hold every tokenizer: give a folder instead of FILE.gguf"
NAMES = SPECIAL | {key: key for key in FILL_IN_ENDS}  # key of the file → name of the token


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file records of a tokenizer.

    `fields` is the content of tokenizer.json; `names` maps "eos_token" to a token's text; `ends`
    are the ids that end an answer.
    """

    fields: dict[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)
    ends: Sequence[int] = ()


def metadata(vocabulary: Vocabulary, rows: int) -> dict[str, Any]:
    """Key → value, for an embedding of `rows` rows. CheckpointError for what has no place."""
    fields = vocabulary.fields
    model = fields["model"]
    pre = rule_name(fields)
    added = {token["id"]: token for token in fields.get("added_tokens") or ()}
    check_added(fields, added.values())
    check_names(vocabulary)
    ids = model["vocab"] | {token["content"]: id for id, token in added.items()}
    texts = {id: text for text, id in ids.items()}
    tokens = [texts.get(id, f"[PAD{id}]") for id in range(rows)]
    kinds = [NORMAL if id in texts else UNUSED for id in range(rows)]
    for id, token in added.items():
        kinds[id] = CONTROL if token.get("special") else USER_DEFINED
    special = special_ids(vocabulary, ids)
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [merge_text(merge) for merge in model["merges"]],
        "add_bos_token": begins_with_bos(fields, vocabulary.names),
    }
    if not found["merges"]:  # the `gguf` package writes no empty list
        raise CheckpointError("tokenizer.json has no merges, and a GGUF file needs some", HINT)
    found |= {f"{key}_token_id": id for key, id in special.items()}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()} | templates(vocabulary)


# --- the pre-tokenizer ----------------------------------------------------------------------------


def rule_name(fields: dict[str, Any]) -> str:
    """The value of tokenizer.ggml.pre; CheckpointError if the steps have no name."""
    kinds = [step.get("type") for step in steps_of(fields.get("normalizer"), "normalizers")]
    nfc = kinds == ["NFC"]
    steps = tuple(map(plain, steps_of(fields.get("pre_tokenizer"), "pretokenizers")))
    if steps == (split(GPT2_REGEX), byte_level(False)):
        steps = (byte_level(True),)
    whole_words = bool(fields["model"].get("ignore_merges"))
    for name, rule in RULES.items():
        if kinds in ([], ["NFC"]) and same(rule, steps, nfc, whole_words):
            return name
    shown = ", ".join(map(describe, steps)) or "none"
    raise CheckpointError(
        f"tokenizer.json: no name of tokenizer.ggml.pre stands for the pre-tokenizer {shown} with "
        f"normalizer {', '.join(map(str, kinds)) or 'none'} and ignore_merges {whole_words}",
        HINT,
    )


def same(rule: Rule, steps: tuple[dict, ...], nfc: bool, whole_words: bool) -> bool:
    """Whether the rule does the same as these steps."""
    if (rule.nfc, rule.whole_words) != (nfc, whole_words):
        return False
    return tuple(map(plain, rule.steps)) == steps


def steps_of(step: dict | None, inner: str) -> Iterator[dict]:
    """The steps of one part of tokenizer.json, with Sequences unpacked."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for part in step.get(inner, ()):
        yield from steps_of(part, inner)


def plain(step: dict) -> dict:
    """The step without the fields that change no ids, and in one of its spellings.

    "Removed" with `invert` keeps each match as a piece. That is "Isolated", because the regexes of
    all rules match every character of a text.
    """
    if step.get("type") == "ByteLevel":
        prefix = step.get("add_prefix_space", True)
        return byte_level(step.get("use_regex", True)) | {"add_prefix_space": prefix}
    if step.get("type") == "Split" and step.get("behavior") == "Removed" and step.get("invert"):
        return step | {"behavior": "Isolated", "invert": False}
    return step


def describe(step: dict) -> str:
    """A step for a message: Split "\\p{N}{1,3}"."""
    if step.get("type") == "Split":
        return f"Split {quote(next(iter(step.get('pattern', {}).values()), ''))[:60]}"
    return str(step.get("type"))


# --- tokens ---------------------------------------------------------------------------------------


def merge_text(merge: str | list[str]) -> str:
    """["Ġ", "t"] → "Ġ t"."""
    if isinstance(merge, str):
        return merge
    return " ".join(merge)


def check_added(fields: dict[str, Any], added: Any) -> None:
    """CheckpointError for an added token that takes the spaces beside it, or needs a whole word."""
    for token in added:
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        if token.get("normalized") and fields.get("normalizer"):
            flags.append("normalized")
        if flags:
            raise CheckpointError(
                f"tokenizer.json: the added token {quote(token['content'])} has {flags[0]}, for "
                "which a GGUF file has no place",
                HINT,
            )


def begins_with_bos(fields: dict[str, Any], names: Mapping[str, str]) -> bool:
    """Whether the post-processor puts bos, and nothing else, before a text."""
    pieces: list[Any] = []
    for step in steps_of(fields.get("post_processor"), "processors"):
        if step.get("type") == "TemplateProcessing":
            pieces = step["single"]
    added = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    if not added:
        return False
    if added == [names.get("bos_token")] and "SpecialToken" in pieces[0]:
        return True
    raise CheckpointError(
        f"tokenizer.json: the post-processor adds {quote(', '.join(added))} to a text; a GGUF file "
        f"has a place for bos_token {quote(names.get('bos_token'))} before it only",
        HINT,
    )


def special_ids(vocabulary: Vocabulary, ids: Mapping[str, int]) -> dict[str, int]:
    """Key → id: bos, eos, … by their names, then the other ends of an answer as eot and eom.

    llama.cpp and nanokv recognise some ends by their text. The others need one of the keys.
    """
    names = vocabulary.names
    named = {key: ids.get(names.get(f"{name}_token", "")) for key, name in NAMES.items()}
    found = {key: id for key, id in named.items() if id is not None}
    texts = {id: text for text, id in ids.items()}
    ends = [key for key in ("eos", "eot", "eom") if key not in found]
    for id in vocabulary.ends:
        known = texts.get(id) in TURN_ENDS or id in found.values()
        if known and "eos" in found:
            continue
        if not ends:
            raise CheckpointError(
                f"{len(vocabulary.ends)} tokens end an answer: a GGUF file has places for three, "
                f"and none is left for {quote(texts.get(id))} ({id:,})",
                HINT,
            )
        found[ends.pop(0)] = id
    return found


def check_names(vocabulary: Vocabulary) -> None:
    """CheckpointError for a named token that a template uses and a GGUF file cannot name."""
    known = {f"{name}_token" for name in NAMES.values()}
    for name, text in vocabulary.names.items():
        if name in known or text is None:
            continue
        for template in vocabulary.templates.values():
            if name in template:
                raise CheckpointError(
                    f"the chat template uses {name}, which a GGUF file has no key for", HINT
                )


def templates(vocabulary: Vocabulary) -> dict[str, Any]:
    """The keys of the chat templates; the one named default has no name in its key."""
    key = "tokenizer.chat_template"
    found: dict[str, Any] = {}
    named = [name for name in vocabulary.templates if name != "default"]
    for name, text in vocabulary.templates.items():
        place = f"{key}.{name}"
        if name == "default":
            place = key
        found[place] = text
    if named:
        found["tokenizer.chat_templates"] = named
    return found
