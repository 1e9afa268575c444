"""Notebook 01, text and tokens: joining bytes, cutting characters, choosing a token, stopping."""

import itertools

from nanokv.school.course import forms
from nanokv.school.course.checking import Mistake, function, questions, value

RULES = (("a", "n"), ("b", "a"), ("n", "a"))


def _pieces(word):
    """The pieces into which the tokenizers library cuts a word, with RULES."""
    from tokenizers import Tokenizer, models

    entries = [*"abcn", *(a + b for a, b in RULES)]
    backend = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, list(RULES)))
    return backend.encode(word).tokens


def _longest_first(word):
    """Pieces from the left, each the longest entry that fits."""
    entries = {a + b for a, b in RULES}
    found = []
    while word:
        size = 2 if word[:2] in entries else 1
        found.append(word[:size])
        word = word[size:]
    return tuple(found)


# --- 01.2: bytes to text --------------------------------------------------------------------------


def _cut_text(rng):
    """(pieces,): the bytes of a short text, cut at random; sometimes the end is incomplete."""
    text = "".join(rng.choice("aé ß🙂むz") for _ in range(rng.randint(0, 8))) + "🙂"
    data = text.encode()
    if rng.random() < 0.3:
        data = data[:-1]
    pieces = []
    at = 0
    while at < len(data):
        size = rng.randint(1, 3)
        pieces.append(data[at : at + size])
        at += size
    return (pieces,)


def _text_of(pieces):
    """The text, decoded piece by piece as in a stream."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return "".join(decoder.decode(piece) for piece in pieces) + decoder.decode(b"", final=True)


# --- 01.3: top-p ----------------------------------------------------------------------------------


def _chances(rng):
    """(chances, p): different chances in twentieths, and a p that is not a sum of them."""
    cuts: list[int] = []
    parts: list[int] = []
    while len(set(parts)) < len(cuts) + 1:
        cuts = sorted(rng.sample(range(1, 20), rng.randint(1, 4)))
        parts = [b - a for a, b in itertools.pairwise((0, *cuts, 20))]
    return [part / 20 for part in parts], (2 * rng.randrange(6, 18) + 1) / 40


def _top_p(chances, p):
    import torch

    from nanokv.decoding.sample import top_p

    return set(top_p(torch.tensor([chances]).log(), p)[0].isfinite().nonzero()[:, 0].tolist())


def _below(chances, p):
    """The likeliest tokens whose sum stays below p, without the one that crosses it."""
    kept = set()
    total = 0.0
    for index in sorted(range(len(chances)), key=lambda i: -chances[i]):
        total += chances[index]
        if total > p:
            break
        kept.add(index)
    return kept


def _unsorted(chances, p):
    kept = set()
    total = 0.0
    for index, chance in enumerate(chances):
        if total >= p:
            break
        kept.add(index)
        total += chance
    return kept


# --- 01.4 and 01.5 --------------------------------------------------------------------------------


def _times_as_likely(d, T):
    import torch

    from nanokv.decoding.sample import probabilities

    p = probabilities(torch.tensor([[d, 0.0]]), T)[0]
    return float(p[0] / p[1])


def _stream(rng):
    stop = rng.sample(range(10), rng.randint(2, 3))
    stream = [rng.randrange(10) for _ in range(rng.randint(1, 20))]
    return [*stream, stop[0], stop[1], rng.randrange(10)], stop


def _until(stream, stop):
    end = min(stream.index(token) for token in stop if token in stream)
    return stream[:end]


CHECKS = (
    value(
        "01.1",
        right=lambda case: _pieces(case.word),
        parameters={"word": ("banana", "cabana", "nabana")},
        wrong=(
            Mistake(
                "longest first",
                lambda c: _longest_first(c.word),
                "You went from the left and took whatever fits. The order of the rules comes "
                "first: apply rule 1 to the whole word, then rule 2 to the result.",
            ),
            Mistake("letters", lambda c: tuple(c.word), "Those are the letters, before any rule."),
        ),
        otherwise="Join a+n everywhere, then b+a, then n+a, each on the pieces that are left.",
    ),
    function(
        "01.2",
        right=_text_of,
        inputs=_cut_text,
        wrong=(
            Mistake(
                "piece by piece",
                lambda pieces: "".join(p.decode("utf-8", "replace") for p in pieces),
                "You decoded each piece on its own, so a character that was cut is lost. Join the "
                "bytes first.",
            ),
            Mistake(
                "dropped",
                lambda pieces: b"".join(pieces).decode("utf-8", "ignore"),
                "Show bytes that are no character as U+FFFD. If you drop them, the reader does "
                "not notice that something is missing.",
            ),
            Mistake(
                "Latin-1", lambda pieces: b"".join(pieces).decode("latin-1"), "The bytes are UTF-8."
            ),
        ),
    ),
    function(
        "01.3",
        right=_top_p,
        inputs=_chances,
        use=forms.INDICES,
        wrong=(
            Mistake(
                "stays below",
                _below,
                "You stop before p is reached. The token that crosses it stays: otherwise a token "
                "with more than p would leave nothing.",
            ),
            Mistake("not sorted", _unsorted, "Begin with the likeliest, not with index 0."),
            Mistake(
                "a threshold",
                lambda chances, p: {i for i, chance in enumerate(chances) if chance >= p},
                "p is a share of the sum of all chances, not a threshold for each token.",
            ),
        ),
    ),
    value(
        "01.4",
        right=lambda case: _times_as_likely(case.d, case.T),
        parameters={"d": (3.0, 2.0, 4.0), "T": (0.5, 2.0)},
        wrong=(
            Mistake(
                "temperature ignored",
                lambda c: _times_as_likely(c.d, 1.0),
                "That is at temperature 1.",
            ),
            Mistake(
                "times",
                lambda c: _times_as_likely(c.d * c.T, 1.0),
                "Logits are divided by the temperature, not multiplied.",
            ),
            Mistake(
                "no softmax",
                lambda c: c.d / c.T,
                "That is the difference of the scaled logits: now take e to that power.",
            ),
        ),
        otherwise="Softmax of two numbers: only their difference counts.",
        rel=5e-3,
    ),
    function(
        "01.5",
        right=_until,
        inputs=_stream,
        use=forms.IDS,
        wrong=(
            Mistake(
                "first stop id only",
                lambda stream, stop: stream[: stream.index(stop[0])],
                "You look at one stop id only. The set may hold several, and each of them ends the "
                "answer.",
            ),
            Mistake(
                "end included",
                lambda stream, stop: stream[: len(_until(stream, stop)) + 1],
                "The token that ends the answer does not belong to it.",
            ),
            Mistake(
                "filtered",
                lambda stream, stop: [token for token in stream if token not in stop],
                "You left the stop ids out and went on. The tokens after the first stop id do not "
                "belong to the answer.",
            ),
        ),
    ),
)

QUESTIONS = questions("01")
