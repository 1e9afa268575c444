"""The pre-tokenizers that `tokenizer.ggml.pre` of a GGUF file names.

A pre-tokenizer splits a text before the merges. The names, and which of them are equivalent, are
llama.cpp's (src/llama-vocab.cpp). Names with the same regex can differ in three points: whether a
piece that is a token stays whole, whether texts begin with bos, and NFC. llama.cpp never normalizes
text, but the tokenizer.json of Qwen's vocabularies does. Only rules that the `tokenizers` library
can express exactly are listed.
"""

from dataclasses import dataclass, replace

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + REST
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + REST
LLAMA3 = WORDS % "{1,3}"
QWEN2 = WORDS % ""
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + REST
)
GPT4O = CASED % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"|\p{N}{1,3}" + SYMBOLS
TEKKEN = CASED % ("", "") + r"|\p{N}" + SYMBOLS
SEED_CODER = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + REST


@dataclass(frozen=True)
class Rule:
    """The steps of a pre-tokenizer, and the other properties of its name."""

    steps: tuple[dict, ...]
    nfc: bool = False
    whole_words: bool = False  # a piece that is a token is used whole, without merging
    bos: bool = False  # texts begin with bos if the file does not specify it


def split(regex: str) -> dict:
    """A Split step of the `tokenizers` library: each match of the regex is one piece."""
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool) -> dict:
    """A ByteLevel step: bytes as printable characters, after GPT-2's regex if use_regex."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def pieces(regex: str) -> Rule:
    """A rule that splits by one regex."""
    return Rule((split(regex), byte_level(False)))


def whole_words_and_bos(regex: str) -> Rule:
    """`pieces`, where a piece that is a token stays whole and texts begin with bos."""
    return replace(pieces(regex), whole_words=True, bos=True)


DIGITS = {"type": "Digits", "individual_digits": True}
GPT2 = Rule((byte_level(True),))
# The regex that a ByteLevel step with use_regex applies.
GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_FIRST = Rule((DIGITS, byte_level(True)))
# The first name of each rule is the one that is written: the oldest, which every llama.cpp knows.
RULES = {
    name: rule
    for names, rule in (
        (
            "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert",
            GPT2,
        ),
        ("mpt olmo jais trillion granite-docling exaone4", GPT2),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", DIGITS_FIRST),
        ("qwen2 deepseek-r1-qwen f2llmv2", replace(pieces(QWEN2), nfc=True)),
        ("stablelm2 kormo megrez hunyuan solar-open grok-2", pieces(QWEN2)),
        ("qwen35", replace(pieces(QWEN35), nfc=True)),
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
            whole_words_and_bos(LLAMA3),
        ),
        ("dbrx smaug-bpe glm4 chatglm-bpe", pieces(LLAMA3)),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", pieces(GPT4O)),
        ("tekken", whole_words_and_bos(TEKKEN)),
        ("seed-coder", pieces(SEED_CODER)),
    )
    for name in names.split()
}
