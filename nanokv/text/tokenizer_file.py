"""tokenizer.json → a tokenizer of the `tokenizers` library, after a check that every step is cheap.

The file is a program: its normalizers and pre-tokenizers run over each text. Nested Replace steps
can double the text, a regex can take exponential time, and a bad table panics in Rust. So only the
steps of published byte-level BPE tokenizers (GPT-2, Llama 3 and 4, Qwen2 to 3.5, SmolLM2, Mistral)
and of Gemma's BPE with byte fallback are accepted. Each of them is linear in the text. The meaning of ids is in
nanokv.text.tokenizer.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from nanokv.errors import TokenizerError, foreign
from nanokv.text.chat_templates import DEFAULT, FILE, templates_in
from weights_loader import gguf_rules
from weights_loader.gguf_spaced import BYTES, DECODER, NORMALIZER, SPACE
from weights_loader.strict import collector_paused, parse_object, quote, read_bytes

MOST_STEPS = 8  # in a Sequence; the longest published Sequence (DeepSeek-V3) has 4
MOST_ADDED = 10_000  # added tokens; Gemma 3 has 6,415
LONGEST_ADDED = 1_000  # characters of an added token
NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
PRE_TOKENIZERS = {"ByteLevel", "Digits", "Punctuation", "Split"}
# These add nothing when encoding without special tokens.
POST_PROCESSORS = {"ByteLevel", "TemplateProcessing"}
SPACE_SPLIT = {  # of Gemma's tokenizer.json; it finds nothing after the normalizer
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
BPE_OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
REGEXES = {  # accepted in Split; the cost of an unknown regex cannot be determined
    "GPT-2": gguf_rules.GPT2_REGEX,
    "Llama 3": gguf_rules.LLAMA3,
    "Qwen2, Qwen3": gguf_rules.QWEN2,
    "Qwen3.5": gguf_rules.QWEN35,
    "GPT-4o, Llama 4": gguf_rules.GPT4O,
    "Mistral": gguf_rules.TEKKEN,
    "Seed-Coder": gguf_rules.SEED_CODER,
    "digits in threes": r"\p{N}{1,3}",
}


def read_backend(path: Path) -> tuple[tokenizers.Tokenizer, int]:
    """(tokenizer of the library, largest id or −1) from a checked tokenizer.json.

    Raises TokenizerError for a file that is missing, malformed or not accepted. The file (11 MB for
    Qwen3) is read and parsed once, by Python.
    """
    if not path.is_file():
        raise TokenizerError(
            f"{path.parent} has no {path.name}", "the folder of a checkpoint holds one"
        )
    data = read_bytes(path, TokenizerError)
    fields = parse_object(data, str(path), TokenizerError)
    check_fields(path, fields)
    # Among 100,000 new lists and tuples the garbage collector takes as long as the rest.
    with foreign(f"{path} cannot be read", TokenizerError), collector_paused():
        backend = backend_of(path, fields)
    added = fields.get("added_tokens") or []
    for token in added:  # the library gives a new token the next free id
        if (id := backend.token_to_id(token["content"])) != token.get("id"):
            raise TokenizerError(
                f"{path}: added token {quote(token['content'])} says id {quote(token.get('id'))}, "
                f"but gets id {id:,}: ids before it are missing"
            )
    ids = itertools.chain(fields["model"]["vocab"].values(), (token["id"] for token in added))
    return backend, max(ids, default=-1)


def backend_of(path: Path, fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer with these fields of a tokenizer.json.

    The library parses all of them but the vocabulary and the merges, which it takes as they are: in
    60 % of the time in which it parses the file once more.
    """
    small = {**fields, "model": {**fields["model"], "vocab": {}, "merges": []}}
    added = tokenizers.Tokenizer.from_str(json.dumps(small)).get_added_tokens_decoder()
    backend = tokenizers.Tokenizer.from_str(json.dumps({**small, "added_tokens": []}))
    options = {name: getattr(backend.model, name) for name in BPE_OPTIONS}
    given = {name: value for name, value in options.items() if value is not None}
    backend.model = tokenizers.models.BPE(*vocabulary(path, fields["model"]), **given)
    backend.add_tokens([token for _, token in sorted(added.items())])
    return backend


def vocabulary(path: Path, model: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(token → id, pairs in the order in which they merge)."""
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not {int}.issuperset(map(type, vocab.values())):
        raise TokenizerError(f"{path}: model.vocab is no object of whole numbers")
    if vocab and not 0 <= min(vocab.values()) <= max(vocab.values()) < 1 << 32:
        raise TokenizerError(f"{path}: model.vocab has an id below 0 or above 4,294,967,295")
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{path}: model.merges is no list")
    if {str}.issuperset(map(type, merges)):
        merges = old_pairs(merges)
    texts = {list}.issuperset(map(type, merges)) and {2}.issuperset(map(len, merges))
    if not texts or not {str}.issuperset(map(type, itertools.chain.from_iterable(merges))):
        raise TokenizerError(f"{path}: model.merges is no list of pairs of texts")
    return vocab, list(map(tuple, merges))


def old_pairs(merges: list[str]) -> list[list[str]]:
    """ "a b", as in files before 2024, → ["a", "b"]. Like the library without "#version: 0.2"."""
    return [merge.split(" ") for merge in merges if not merge.startswith("#version")]


def write_tokenizer(
    folder: Path,
    backend: tokenizers.Tokenizer,
    config: dict[str, Any],
    templates: Mapping[str, str] | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json in Hugging Face's form.

    templates: {name: source}. If they are not in `config` already, a single default template goes
    into chat_template.jinja, and several go into the config as a list.
    """
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    if templates is not None and templates != templates_in(config, folder):
        config = {name: value for name, value in config.items() if name != "chat_template"}
        if list(templates) == [DEFAULT]:
            (folder / FILE).write_text(templates[DEFAULT], encoding="utf-8", newline="")
        elif templates:
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in templates.items()
            ]
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def check_fields(path: Path, fields: dict[str, Any]) -> None:
    """TokenizerError unless every step is known and the model is a deterministic BPE over bytes."""
    if (kind := _kind(fields.get("model"))) != "BPE":
        raise TokenizerError(f"{path}: model {quote(kind)}, only BPE is implemented")
    dropout = fields["model"].get("dropout")
    if dropout is not None and (type(dropout) not in (int, float) or dropout != 0):
        raise TokenizerError(
            f"{path}: model.dropout is {quote(dropout)}: "
            "the same text would get other ids each time",
            hint="dropout is for training: set it to null",
        )
    # Other kinds of BPE have these affixes. A long affix makes the library panic.
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if text := fields["model"].get(affix):
            raise TokenizerError(f"{path}: model.{affix} is {quote(text)}, byte-level BPE has none")
    for step in check_steps(path, "post_processor", "processors", fields, POST_PROCESSORS):
        if _kind(step) == "TemplateProcessing":
            _check_template(path, step.get("single"))
    if fields.get("decoder") == DECODER:
        check_spaced(path, fields)
    else:
        check_byte_level(path, fields)
    _check_added(path, fields.get("added_tokens") or [])


def check_spaced(path: Path, fields: dict[str, Any]) -> None:
    """TokenizerError unless the steps are Gemma's: ▁ for a space, bytes for other characters."""
    if fields.get("normalizer") != NORMALIZER:
        raise TokenizerError(
            f"{path}: normalizer {quote(fields.get('normalizer'))}, with this decoder only a "
            f"Replace of the space by {SPACE} is implemented"
        )
    if fields.get("pre_tokenizer") not in (None, SPACE_SPLIT):
        raise TokenizerError(
            f"{path}: pre_tokenizer {quote(fields['pre_tokenizer'])}, with this decoder only none "
            "or a Split at spaces is implemented"
        )
    model = fields["model"]
    vocab = model.get("vocab")
    whole = isinstance(vocab, dict) and vocab.keys() >= set(BYTES)
    if model.get("byte_fallback") is not True or not whole:
        raise TokenizerError(
            f"{path}: model.byte_fallback is {quote(model.get('byte_fallback'))} or a byte is no "
            "token; with this decoder every character must have tokens"
        )


def check_byte_level(path: Path, fields: dict[str, Any]) -> None:
    """TokenizerError unless the steps are those of byte-level BPE."""
    if (kind := _kind(fields.get("decoder"))) != "ByteLevel":
        raise TokenizerError(f"{path}: decoder {quote(kind)}, only ByteLevel is implemented")
    check_steps(path, "normalizer", "normalizers", fields, NORMALIZERS)
    steps = check_steps(path, "pre_tokenizer", "pretokenizers", fields, PRE_TOKENIZERS)
    for step in steps:
        if _kind(step) == "Split":
            _check_split(path, step.get("pattern"))
    # A second ByteLevel step would encode the bytes twice.
    if (count := [_kind(step) for step in steps].count("ByteLevel")) != 1:
        raise TokenizerError(
            f"{path}: pre_tokenizer has {count} ByteLevel steps, byte-level BPE has exactly 1"
        )


def check_steps(
    path: Path, part: str, inner: str, fields: dict[str, Any], known: set
) -> list[dict[str, Any]]:
    """The steps of one part of the pipeline, each of a known type, with Sequences unpacked."""
    waiting = []
    if fields.get(part) is not None:
        waiting.append(fields[part])
    steps: list[dict[str, Any]] = []
    while waiting:
        step = waiting.pop()
        if _kind(step) == "Sequence" and isinstance(step.get(inner), list):
            waiting += reversed(step[inner])
            continue
        if _kind(step) not in known:
            accepted = ", ".join(sorted(known))
            raise TokenizerError(
                f"{path}: {part} {quote(_kind(step))} is not accepted: {accepted} are, "
                f"alone or in a Sequence of at most {MOST_STEPS}"
            )
        steps.append(step)
        count = len(steps) + len(waiting)
        if count > MOST_STEPS:
            raise TokenizerError(f"{path}: {part} has {count:,} steps, at most {MOST_STEPS}")
    return steps


def _check_split(path: Path, pattern: Any) -> None:
    regex = pattern
    if isinstance(pattern, dict) and len(pattern) == 1:
        text = pattern.get("String")
        if isinstance(text, str) and text:  # a literal text, found in linear time
            return
        regex = pattern.get("Regex")
    if regex not in REGEXES.values():
        raise TokenizerError(
            f"{path}: pre_tokenizer Split has an unknown regex of {len(str(regex)):,} characters: "
            f"{quote(regex)}",
            hint=f"a regex can take exponential time; known are those of {', '.join(REGEXES)}",
        )


def _check_template(path: Path, single: Any) -> None:
    """TokenizerError unless the template contains the text itself exactly once.

    Otherwise the ids of the text would be missing or repeated.
    """
    if not isinstance(single, list):
        single = []
    pieces = [piece.get("Sequence") for piece in single if isinstance(piece, dict)]
    texts = [piece for piece in pieces if piece is not None]
    if len(texts) != 1 or not isinstance(texts[0], dict) or texts[0].get("id") != "A":
        raise TokenizerError(
            f"{path}: post_processor TemplateProcessing names the text {len(texts):,} times, "
            "not once"
        )


def _check_added(path: Path, added: Any) -> None:
    if not isinstance(added, list) or len(added) > MOST_ADDED:
        raise TokenizerError(f"{path}: added_tokens is no list of at most {MOST_ADDED:,} tokens")
    for token in added:
        text = _field(token, "content")
        if not isinstance(text, str) or not 0 < len(text) <= LONGEST_ADDED:
            raise TokenizerError(
                f"{path}: added token {quote(token)}: its content must have 1 to {LONGEST_ADDED:,} "
                "characters"
            )


def _kind(step: Any) -> str | None:
    kind = _field(step, "type")
    return kind if isinstance(kind, str) else None


def _field(value: Any, name: str) -> Any:
    """A field of an object; None if it is absent or `value` is not an object."""
    if not isinstance(value, dict):
        return None
    return value.get(name)
