"""Questions about KV caches that the bundled model knows by heart: one answer, many phrasings.

The answers are short and true for models like Qwen3. The last phrasing of each question is never
used in training: the evaluation asks it, to see whether the model understands the question or has
only learnt the string.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from nanokv.school.training.phrases import phrases

_TEXTS = phrases("cache_questions")
QUESTIONS = tuple((question["answer"], question["asked"]) for question in _TEXTS["question"])
# Words in front that ask for "Do" instead of "Does".
PLURAL = ("more ", "fewer ", "many ", "twice ", "half ", "larger heads", "smaller heads")
WRAPPERS, LATER_WRAPPERS, HELD_OUT_WRAPPERS = map(tuple, _TEXTS["wrappers"].values())


def depending() -> dict[str, list[str]]:
    """The questions about what the size of the cache depends on, as answer → phrasings.

    Does it depend on the batch size? Is it larger with more of that, and smaller with less?
    """
    depends = phrases("nearby")["depends"]
    return {thing["answer"]: _ways(depends, thing) for thing in depends["thing"]}


def _ways(depends: dict[str, Any], thing: dict[str, Any]) -> list[str]:
    """The phrasings for one thing: `x` names it, `m` more of it, `l` less of it."""
    found = []
    for letter, ways in (("x", depends["on"]), ("m", depends["more"]), ("l", depends["less"])):
        for value in thing[letter]:
            do = "Does"
            if value.startswith(PLURAL):
                do = "Do"
            found += [way.format(**{letter: value, "do": do}) for way in ways]
    return found


def yes_or_no() -> tuple[tuple[str, list[str]], ...]:
    """The questions of the second stage, as (answer, phrasings).

    The phrasings of `depending` come before the last phrasing of the file, so that the held-out one
    stays last.
    """
    written = {question["answer"]: question["asked"] for question in phrases("nearby")["question"]}
    taken = {way.lower() for _, ways in (*QUESTIONS, *written.items()) for way in ways}
    for answer, ways in depending().items():
        new = [way for way in dict.fromkeys(ways) if way.lower() not in taken]
        old = written.get(answer, [])
        written[answer] = [*old[:-1], *new, *old[-1:]]
    return tuple(written.items())


YES_OR_NO = yes_or_no()


def ask(rng: Random, phrasing: str, wrappers: Sequence[str] = WRAPPERS) -> str:
    """The phrasing as a user types it, with the words of one wrapper around it."""
    lowered = phrasing
    if not _is_abbreviation(phrasing.split()[0]):
        lowered = phrasing[0].lower() + phrasing[1:]
    if phrasing.endswith(".") and rng.random() < 0.5:
        lowered = lowered[:-1]
    return rng.choice(wrappers).format(q=phrasing, l=lowered)


def _is_abbreviation(word: str) -> bool:
    """Whether a word keeps its capitals inside of a sentence: RoPE, KV, GQA, K."""
    return sum(letter.isupper() for letter in word) > 1 or word == "K"
