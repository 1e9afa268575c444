"""SentencePiece's BPE from a GGUF file: ids by hand and by llama.cpp's rule, bytes, streams, and what is refused."""

import itertools
import json
import random
from pathlib import Path

import pytest
from transformers import GemmaTokenizer

from nanokv.errors import TokenizerError
from nanokv.text.tokenizer import StreamDecoder, Tokenizer
from nanokv.text.tokenizer_file import check_fields
from weights_loader import CheckpointError
from weights_loader.gguf_file import GgufFile
from weights_loader.gguf_spaced import BYTES, SPACE
from weights_loader.gguf_tokenizer import BYTE, CONTROL, NORMAL, USER_DEFINED, tokenizer_files
from weights_loader.gguf_vocabulary import Vocabulary, metadata

WORDS = ["▁t", "he", "▁the", "in", "ing", "ab", "aba", "▁a", "bab", "ba", "aa", "aaa"]
LETTERS = list("▁abcdefghint")
TOKENS = ["<pad>", "<eos>", "<bos>", "\n", "\n\n", "  ", "<b>", *BYTES, *WORDS, *LETTERS]
CONTROLS = 3
KINDS = [CONTROL] * CONTROLS + [USER_DEFINED] * 4 + [BYTE] * 256 + [NORMAL] * 24
SCORES = [-1000.0] * 7 + [0.0] * 256 + [-float(rank) for rank in range(24)]
KEYS = {
    "model": "llama",
    "pre": "default",
    "tokens": TOKENS,
    "scores": SCORES,
    "token_type": KINDS,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "padding_token_id": 0,
    "add_bos_token": True,
    "add_space_prefix": False,
}


def gguf(**changes) -> GgufFile:
    keys = {f"tokenizer.ggml.{key}": value for key, value in (KEYS | changes).items()}
    return GgufFile(Path("x.gguf"), keys, {}, 0)


def files(**changes) -> dict:
    return tokenizer_files(gguf(**changes))["tokenizer.json"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("spaced")
    for name, fields in tokenizer_files(gguf()).items():
        (folder / name).write_text(json.dumps(fields), encoding="utf-8")
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        (" the", ["▁the"]),
        ("the", ["t", "he"]),
        ("a  b\n\n\n", ["a", "  ", "b", "\n\n", "\n"]),
        ("<b> thing<eos>", ["<b>", "▁t", "h", "ing", "<eos>"]),
        ("▁the", ["▁the"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("ababa", ["ab", "aba"]),  # "ab" has the best score, so it joins twice; then "aba"
    ],
)
def test_ids_by_hand(tokenizer, text, tokens):
    assert [TOKENS[id] for id in tokenizer.encode(text)] == tokens


def by_rule(text: str) -> list[str]:
    """llama.cpp's rule, step by step, for a text without added tokens."""
    symbols = list(text.replace(" ", SPACE))
    scores = dict(zip(TOKENS, SCORES, strict=True))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        known = [i for i, pair in enumerate(pairs) if pair in scores]
        if not known:
            return symbols
        best = max(known, key=lambda i: (scores[pairs[i]], -i))
        symbols[best : best + 2] = [pairs[best]]


def test_ids_are_those_of_the_rule(tokenizer):
    draw = random.Random(0)
    for _ in range(500):
        pieces = draw.choices(
            ["a", "b", "ab", "in", "g", "the", "n", "t", "ha"], k=draw.randrange(30)
        )
        text = "".join(pieces)
        assert [TOKENS[id] for id in tokenizer.encode(text)] == by_rule(text), text


def test_texts_come_back_whole_and_as_a_stream(tokenizer):
    for text in ("a  b\n\n\n the 🙂 é\x00", " the  the", "<b>x</b>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        decoder = StreamDecoder(tokenizer)
        assert "".join(map(decoder.put, ids)) + decoder.flush() == text
        assert tokenizer.fewest_tokens(text) <= len(ids)
        library = tokenizer.backend.decode(ids, skip_special_tokens=False)
        assert library == text
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 2
    assert tokenizer.fewest_tokens("the " * 100) >= 100  # no token has more bytes than ▁the


def test_the_files_survive_writing(tokenizer, tmp_path):
    tokenizer.write_files(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.encode(" the é\n") == tokenizer.encode(" the é\n")


def test_the_file_that_transformers_writes_is_read(tmp_path):
    """GemmaTokenizer's, which has a Split at spaces and an unknown token too."""
    model = files()["model"]
    vocab = model["vocab"] | {"<unk>": len(TOKENS), "<mask>": len(TOKENS) + 1}
    theirs = GemmaTokenizer(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]])
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    for text in ("a b ab", " the thing", "é 🙂 xyz", "<bos>in<eos>", "aba " * 9):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.fewest_tokens(text) <= len(ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_space_prefix": True}, "add_space_prefix"),
        ({"pre": "qwen2"}, "pre"),
        ({"scores": SCORES[:-1]}, "286 scores for 287 tokens"),
        ({"scores": [0.0] * len(SCORES)}, "one score for several tokens"),
        ({"scores": [1] * len(SCORES)}, "scores is no list of float"),
        ({"tokens": TOKENS[:-1] + ["ab!"]}, "is in a token and is no token"),
        ({"tokens": [token.replace("<0x0A>", "<0xff>") for token in TOKENS]}, "<0x0A>"),
        ({"model": "t5"}, "tokenizer.ggml.model"),
    ],
)
def test_what_merges_cannot_express_is_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        tokenizer_files(gguf(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalizer": None}, "normalizer"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "  "}}, "Repla"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer"),
        ({"decoder": {"type": "Sequence", "decoders": []}}, "decoder"),
    ],
)
def test_other_steps_are_refused(changes, words):
    fields = files()
    check_fields(Path("x"), fields)
    with pytest.raises(TokenizerError, match=words):
        check_fields(Path("x"), fields | changes)


def test_a_gguf_file_is_not_written_with_it():
    fields = files()
    with pytest.raises(CheckpointError, match="Replace") as caught:
        metadata(Vocabulary(fields), len(TOKENS))
    assert "folder" in caught.value.hint
