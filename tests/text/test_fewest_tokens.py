"""The bound of tokens by bytes: never above the number of tokens, and 0 where bytes can be dropped."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from nanokv.text.fewest_tokens import SHRINKS
from nanokv.text.token_bytes import BYTE_OF
from nanokv.text.tokenizer import Tokenizer

FORMS = {form: getattr(normalizers, form) for form in ("NFC", "NFD", "NFKC", "NFKD")}
PIECES = [
    *(
        "7",
        "x",
        "A",
        " ",
        "\n",
        "grandmother",
        " grandmother",
        "  " * 9,
        "12345",
        "<|a|>",
        "<|b|>b",
    ),
    *("e\u0301", "\u212b", "\u1fef", "\u0390", "\u03b9\u0308\u0301", "각", "\u1100\u1161\u11a8"),
    *("\U0001d7ce", "\U0001d7ce" * 9, "<\u0338", "é", "\ufdfa", "\u2126"),
]


def byte_level(normalizer=None, more=(), removed=False, added=()) -> Tokenizer:
    """Bytes, a few words, and two digits."""
    words = ["12", "gr", "gra", "ĠĠ", "ĠĠĠĠ", *more]
    vocab = {token: id for id, token in enumerate([*BYTE_OF, *words])}
    merges = [("1", "2"), ("g", "r"), ("gr", "a"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if removed:
        steps.insert(0, pre_tokenizers.Split(Regex("x"), "removed"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<|a|>", normalized=False), *added])
    return Tokenizer(backend)


def texts(seed: int):
    draw = random.Random(seed)
    for _ in range(300):
        yield "".join(draw.choice(PIECES) for _ in range(draw.randrange(12))) * draw.choice([1, 9])


@pytest.mark.parametrize("form", [None, *FORMS])
def test_the_bound_is_never_above_the_number_of_tokens(form):
    tokenizer = byte_level(form and FORMS[form]())
    best = 0.0
    for text in texts(3):
        tokens = len(tokenizer.encode(text))
        assert tokenizer.fewest_tokens(text) <= tokens, text
        best = max(best, tokenizer.fewest_tokens(text) / max(1, tokens))
    assert best > 0.5, "and it says something"


def test_of_the_bundled_model(loaded):
    tokenizer = loaded[1]
    for text in texts(4):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text)), text
    assert tokenizer.fewest_tokens("1" * 5_000) == 5_000


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_normalization_shrinks_a_text_more(form):
    """One character, or the characters that compose one: the bytes that a byte of the result can come from."""
    import unicodedata

    parts = "NFKD" if "K" in form else "NFD"
    widest: dict[str, int] = {}
    several = []
    every = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for one in every:
        whole = unicodedata.normalize(parts, one)
        if len(whole) == 1:
            widest[whole] = max(widest.get(whole, 0), len(one.encode()))
        else:
            several.append((one, whole))
    for one, whole in several:
        assert len(one.encode()) <= sum(widest[part] for part in whole)
    for one in every:
        if unicodedata.is_normalized(form, one):
            whole = unicodedata.normalize(parts, one)
            assert sum(widest[part] for part in whole) <= SHRINKS * len(one.encode())


def test_there_is_no_bound_where_bytes_can_be_dropped():
    assert byte_level().fewest_tokens("x" * 900) == 300, "of three letters: gra"
    assert byte_level().fewest_tokens("x" * 901) == 301
    assert byte_level(removed=True).fewest_tokens("x" * 900) == 0
    blanks = AddedToken("<|b|>", lstrip=True)
    assert byte_level(added=[blanks]).fewest_tokens("x" * 900) == 0
    backend = byte_level().backend
    lacking = models.BPE(vocab={"a": 0, "b": 1}, merges=[])
    backend.model = lacking
    assert Tokenizer(backend).fewest_tokens("x" * 900) == 0


def test_control_tokens_are_found_by_their_places(loaded):
    """As in the whole text: single words, overlaps, longer ones first."""
    added = [
        AddedToken("<|b|>", normalized=False, single_word=True),
        AddedToken("|><|", normalized=False),
        AddedToken("<|a|><|b|>", normalized=False),
    ]
    for tokenizer in (byte_level(added=added), loaded[1]):
        draw = random.Random(5)
        pieces = [*tokenizer.special_tokens, "x", "<|", "|>", " ", "_"]
        for _ in range(500):
            text = "".join(draw.choice(pieces) for _ in range(draw.randrange(8)))
            ids = dict.fromkeys(id for id in tokenizer.encode(text) if id in tokenizer._added_ids)
            named = [tokenizer.backend.id_to_token(id) for id in ids]
            assert tokenizer.special_tokens_in(text) == named, text
