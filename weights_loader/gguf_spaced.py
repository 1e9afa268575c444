"""SentencePiece's BPE, `tokenizer.ggml.model` "llama" in a GGUF file → the parts of tokenizer.json.

A token is text with ▁ for a space; a character without a token becomes its bytes, <0xE2> and so on.
The file has a score per token and no merges. llama.cpp joins the two neighbours whose text together
is the token with the highest score, the leftmost first. So the merges are all ways to split a token
into two tokens, by falling score. Sources: llama.cpp's src/llama-vocab.cpp (llm_tokenizer_spm);
Sennrich et al. 2016; Kudo and Richardson 2018, arXiv 1808.06226.
"""

from .gguf_file import GgufFile
from .strict import CheckpointError, quote

SPACE = "▁"  # U+2581
NORMALIZER = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def check_spaced(found: GgufFile) -> None:
    """CheckpointError for a file whose texts get a space in front (Llama 2, Mistral)."""
    key = "tokenizer.ggml.add_space_prefix"
    prefix = found.metadata.get(key, True)  # llama.cpp's default
    if prefix is not False:
        raise CheckpointError(
            f"{found.path}: {key} is {quote(prefix)}; of the SentencePiece tokenizers only those "
            "that put no space before a text are implemented",
            "Gemma's are, those of Llama 2 and Mistral are not",
        )
    pre = found.metadata.get("tokenizer.ggml.pre", "default")
    if pre != "default":
        raise CheckpointError(
            f"{found.path}: tokenizer.ggml.pre is {quote(pre)}, a SentencePiece tokenizer has "
            '"default" only'
        )


def scored_merges(found: GgufFile, scores: dict[str, float], every: set[str]) -> list[list[str]]:
    """The merges of these tokens with their scores; `every` has the tokens of all types.

    CheckpointError if merges cannot give the ids of llama.cpp: two tokens with one score, a missing
    byte, or a character of a token that is no token itself.
    """
    missing = [byte for byte in BYTES if byte not in every]
    if missing:
        raise CheckpointError(f"{found.path}: the byte {missing[0]} is no token of the vocabulary")
    if len(set(scores.values())) < len(scores):
        raise CheckpointError(
            f"{found.path}: tokenizer.ggml.scores has one score for several tokens, so the order "
            "of the merges is not known"
        )
    alone = set().union(*scores) - every
    if alone:
        raise CheckpointError(
            f"{found.path}: {quote(min(alone))} is in a token and is no token of the vocabulary"
        )
    merges = []
    for token in sorted(scores, key=scores.__getitem__, reverse=True):
        for end in range(1, len(token)):
            if token[:end] in scores and token[end:] in scores:
                merges.append([token[:end], token[end:]])
    return merges
