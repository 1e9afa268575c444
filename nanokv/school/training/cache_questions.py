"""Questions about KV caches that the bundled model knows by heart: one answer, many phrasings.

The answers are short and true for models like Qwen3. The last phrasing of each question is never
used in training: the evaluation asks it, to see whether the model understands the question or has
only learnt the string.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

from nanokv.school.training.conversation import Conversation
from nanokv.school.training.phrases import phrases

_TEXTS = phrases("cache_questions")
QUESTIONS = tuple((question["answer"], question["asked"]) for question in _TEXTS["question"])
# Words in front that ask for "Do" instead of "Does".
PLURAL = ("more ", "fewer ", "many ", "twice ", "half ", "larger heads", "smaller heads")
WRAPPERS, LATER_WRAPPERS, HELD_OUT_WRAPPERS = map(tuple, _TEXTS["wrappers"].values())

ARTICLE = re.compile(r" (?:an?|the)(?= )")


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


def _plain(text: str) -> str:
    """The words of the text between spaces, without capitals and marks."""
    return " ".join(("", *re.findall(r"\w+", text.lower()), ""))


def _pattern(group: Sequence[str], start: str = r"(?<![\w-])") -> re.Pattern:
    """Finds the words of the group, the longest first."""
    longest_first = sorted(group, key=len, reverse=True)
    return re.compile(f"{start}(?:{'|'.join(map(re.escape, longest_first))})(?![\\w-])")


EXCHANGED = [(_pattern(group, "^"), group) for group in _TEXTS["synonyms"]["begin"]]
EXCHANGED += [(_pattern(group), group) for group in _TEXTS["synonyms"]["words"]]


def _core(phrasing: str) -> str:
    """The same text for two phrasings that differ only in words that mean the same."""
    for words, group in EXCHANGED:
        phrasing = words.sub(group[0], phrasing)
    return _plain(ARTICLE.sub("", phrasing)).replace(" kv cache", " cache")


def _ambiguous() -> set[str]:
    """The cores that two questions have."""
    answers: dict[str, set[str]] = defaultdict(set)
    for answer, asked in QUESTIONS + YES_OR_NO:
        for phrasing in asked:
            answers[_core(phrasing)].add(answer)
    return {core for core, found in answers.items() if len(found) > 1}


AMBIGUOUS = _ambiguous()
HELD_OUT = [_plain(asked[-1]) for _, asked in QUESTIONS + YES_OR_NO]


def ask_in(talk: Conversation, phrasing: str) -> str:
    """The phrasing as the user of this conversation asks it, with the stage's words around it."""
    reworded_share = talk.stage.reworded  # at 0 nothing is drawn: earlier stages stay as they are
    if reworded_share and talk.rng.random() < reworded_share:
        phrasing = reworded(talk.rng, phrasing)
    return ask(talk.rng, phrasing, talk.stage.wrappers)


def reworded(rng: Random, phrasing: str) -> str:
    """The phrasing with some of its words exchanged for others that mean the same.

    "Explain the KV cache." → "Can you explain the key-value cache." A model that reads one wording
    of a question only learns the string. No held-out phrasing is made, and none that another
    question may have too.
    """
    if _core(phrasing) in AMBIGUOUS:
        return phrasing
    text = phrasing
    for words, group in EXCHANGED:
        found = words.search(text)
        if found and rng.random() < 0.6:
            text = text[: found.start()] + rng.choice(group) + text[found.end() :]
    if rng.random() < 0.15:
        text = ARTICLE.sub("", text, count=1)
    if any(held_out in _plain(text) for held_out in HELD_OUT):
        return phrasing
    return text


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
