"""The tokenizer in a GGUF file → tokenizer.json and tokenizer_config.json.

tokenizer_config.json also names the tokens that end an answer. Byte-level BPE, and SentencePiece's
BPE as Gemma has it (gguf_spaced.py). A file does not contain the pre-tokenizer of byte-level BPE:
`tokenizer.ggml.pre` only names a rule of gguf_rules.py. An unknown name raises. A default rule
would split digits and spaces differently and make the model worse without an error.
"""

from typing import Any

from .control_texts import CONTROL_TEXTS, FILL_IN, FILL_IN_ENDS
from .gguf_file import GgufFile, Texts
from .gguf_rules import RULES, Rule, byte_level
from .gguf_spaced import DECODER, NORMALIZER, check_spaced, scored_merges
from .pooling import gguf_pooling
from .strict import CheckpointError, quote

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "unknown": "unk",
    "padding": "pad",
}


def tokenizer_files(found: GgufFile) -> dict[str, dict]:
    """The contents of tokenizer.json and tokenizer_config.json by file name."""
    if found.metadata.get("tokenizer.ggml.model") == "llama":
        return spaced_files(found)
    pre = rule(found)
    tokens = listed(found, "tokens", str)
    merges = listed(found, "merges", str)
    kinds = token_types(found, tokens, merges)
    vocabulary = vocabulary_of(found, tokens, kinds)
    pairs = [pair(found, merge, vocabulary) for merge in merges]
    steps = {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "decoder": byte_level(True),
        "model": bpe(vocabulary, pairs) | {"ignore_merges": pre.whole_words},
    }
    return files(found, tokens, kinds, steps, pre.bos)


def spaced_files(found: GgufFile) -> dict[str, dict]:
    """`tokenizer_files` of a SentencePiece tokenizer."""
    check_spaced(found)
    tokens = listed(found, "tokens", str)
    scores = listed(found, "scores", float)
    kinds = token_types(found, tokens, [])
    if len(scores) != len(tokens):
        raise CheckpointError(f"{found.path}: {len(scores):,} scores for {len(tokens):,} tokens")
    vocabulary = vocabulary_of(found, tokens, kinds)
    scored = {token: scores[id] for token, id in vocabulary.items() if kinds[id] == NORMAL}
    merges = scored_merges(found, scored, set(vocabulary))
    steps = {
        "normalizer": NORMALIZER,
        "pre_tokenizer": None,
        "decoder": DECODER,
        "model": bpe(vocabulary, merges) | {"byte_fallback": True},
    }
    return files(found, tokens, kinds, steps, True)


def files(
    found: GgufFile, tokens: list[str], kinds: list[int], steps: dict[str, Any], bos: bool
) -> dict[str, dict]:
    """tokenizer.json with these steps, and tokenizer_config.json; bos: the default of the rule."""
    bos = added(found, "add_bos_token", bos)
    config = token_names(found, tokens, kinds)
    first = config["bos_token"] if bos else None
    last = config["eos_token"] if ends_texts(found) else None
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added_tokens(tokens, kinds),
            "post_processor": around(first, last, tokens),
        }
        | steps,
        "tokenizer_config.json": config
        | {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bos},
    }


def vocabulary_of(found: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Token → id, without UNUSED tokens; CheckpointError if a token has two ids."""
    vocabulary: dict[str, int] = {}
    for id, token in enumerate(tokens):
        if kinds[id] == UNUSED:
            continue
        if token in vocabulary:
            raise CheckpointError(f"{found.path}: the token {quote(token)} has two ids")
        vocabulary[token] = id
    return vocabulary


def added_tokens(tokens: list[str], kinds: list[int]) -> list[dict]:
    """`added_tokens` of tokenizer.json: CONTROL and USER_DEFINED tokens."""
    return [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[id] == CONTROL,
        }
        for id, token in enumerate(tokens)
        if kinds[id] in (CONTROL, USER_DEFINED)
    ]


def bpe(vocabulary: dict[str, int], pairs: list[list[str]]) -> dict:
    """`model` of tokenizer.json."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": pairs,
    }


def token_types(found: GgufFile, tokens: list[str], merges: list[str]) -> list[int]:
    """The type of each token (NORMAL, CONTROL, …) in the file, with one correction.

    A token with the text of a control token is CONTROL, as in llama.cpp ("control-looking token was
    not control-type"). Unlike there, a token that merges can produce keeps its type: Qwen's
    vocabulary has `</s>` as a word, for HTML.
    """
    kinds = listed(found, "token_type", int)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{found.path}: {len(kinds):,} token types for {len(tokens):,} tokens"
        )
    wrong = {
        id for id, token in enumerate(tokens) if token in CONTROL_TEXTS and kinds[id] != CONTROL
    }
    if not wrong:
        return kinds
    words = {merge.replace(" ", "", 1) for merge in merges}
    corrected = list(kinds)
    for id in wrong:
        if tokens[id] not in words:
            corrected[id] = CONTROL
    return corrected


def rule(found: GgufFile) -> Rule:
    """The rule that splits texts before the merges."""
    kind = found.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{found.path}: tokenizer.ggml.model is {quote(kind)}: byte-level BPE (gpt2) and "
            "SentencePiece's BPE without a space in front (llama) are implemented",
        )
    pre = found.metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in RULES:
        raise CheckpointError(
            f"{found.path}: tokenizer.ggml.pre is {quote(pre)}, which is not a known pre-tokenizer",
            f"known: {', '.join(RULES)}",
        )
    return RULES[pre]


def added(found: GgufFile, key: str, default: bool) -> bool:
    """Whether texts get bos or eos: the file's value, else the default."""
    value = found.metadata.get(f"tokenizer.ggml.{key}", default)
    if type(value) is not bool:
        raise CheckpointError(
            f"{found.path}: tokenizer.ggml.{key} is {quote(value)}, not true or false"
        )
    return value


def ends_texts(found: GgufFile) -> bool:
    """Whether texts end with eos: only those of an embedding model, which continues no text."""
    if gguf_pooling(found.metadata) is None:
        return False
    return added(found, "add_eos_token", False)


def listed(found: GgufFile, key: str, kind: type) -> list:
    """A list in the tokenizer's metadata, checked to hold only values of one type."""
    value = found.metadata.get(f"tokenizer.ggml.{key}")
    if isinstance(value, Texts):
        value = value.decoded
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise CheckpointError(f"{found.path}: tokenizer.ggml.{key} is no list of {kind.__name__}")
    return value


def pair(found: GgufFile, merge: str, vocabulary: dict) -> list[str]:
    """ "Ġ t" → ["Ġ", "t"].

    CheckpointError unless both and their concatenation are tokens: the `tokenizers` library would
    panic.
    """
    left, _, right = merge.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise CheckpointError(f"{found.path}: the merge {quote(merge)} is not made of tokens")
    return [left, right]


def token_names(found: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """bos_token, eos_token, … and the chat template.

    Also fim_pad_token, fim_rep_token and fim_sep_token of code models, at which llama.cpp ends an
    answer.
    """
    names: dict[str, Any] = {"bos_token": None}
    control = {token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL}
    for key in FILL_IN_ENDS:
        texts = [text for text in FILL_IN[key] if text in control]
        if texts:
            names[f"{key}_token"] = texts[0]
    for key, name in (SPECIAL | {key: key for key in FILL_IN_ENDS}).items():
        id = token_id(found, key, len(tokens))
        if id is not None:
            names[f"{name}_token"] = tokens[id]
    templates = chat_templates(found)
    if templates:
        names["chat_template"] = templates
    return names


def chat_templates(found: GgufFile) -> str | list[dict]:
    """tokenizer.chat_template and named ones such as tokenizer.chat_template.tool_use.

    In the form of tokenizer_config.json: a text, or a list if there are named templates.
    """
    key = "tokenizer.chat_template"
    default = ""
    named = {}
    for name, value in found.metadata.items():
        if name != key and not name.startswith(f"{key}."):
            continue
        if not isinstance(value, str):
            raise CheckpointError(f"{found.path}: {quote(name)} is no text")
        if name == key:
            default = value
        else:
            named[name.removeprefix(f"{key}.")] = value
    if not named:
        return default
    if default:
        named = {"default": default} | named
    return [{"name": name, "template": text} for name, text in named.items()]


def token_id(found: GgufFile, key: str, count: int) -> int | None:
    """The id of a special token; None if absent, CheckpointError if out of range."""
    field = f"tokenizer.ggml.{key}_token_id"
    id = found.metadata.get(field)
    if id is not None and (type(id) is not int or not 0 <= id < count):
        raise CheckpointError(f"{found.path}: {field} is {quote(id)}, there are {count:,} tokens")
    return id


def around(first: str | None, last: str | None, tokens: list[str]) -> dict | None:
    """The post-processor that puts bos before a text, and eos behind it, with special tokens."""
    special = [token for token in (first, last) if token is not None]
    if not special:
        return None
    single: list[dict] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if first is not None:
        single.insert(0, {"SpecialToken": {"id": first, "type_id": 0}})
    if last is not None:
        single.append({"SpecialToken": {"id": last, "type_id": 0}})
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in special
        },
    }
