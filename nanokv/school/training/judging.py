"""A case of the evaluation: the user's turns and the judge of the last answer."""

import re
from dataclasses import dataclass
from functools import cache

from nanokv.school.training import words
from nanokv.school.training.phrases import phrases

NOT_TOLD = "not told|don't know"
FILES = (  # with sentences of the assistant
    "facts",
    "strangers",
    "nearby",
    "stories",
    "cache_questions",
    "firsts",
    "unnamed",
    "scripts",
)
# The entries of those files that the assistant says.
SAID = re.compile("answer|noted|recalled|missing|nothing|by_name|unreadable")
# Words of answers that the code of the exchanges makes.
OWN = "yes no so your list is now you said reversed the there are one after before comes and have"
WORDS = r"[^\W_]+"
POOLS = (words.NAMES, words.CITIES, words.FOODS, words.COLOURS, words.ANIMALS, words.JOBS)


@dataclass(frozen=True)
class Case:
    """The user's turns and the words of the right answer to the last one.

    With `frame` the answer is the expected words and nothing else, except for what that regular
    expression allows before them: counting on too far is wrong. Without it, the answer has to hold
    the words and none of `others`: an answer with every value of the conversation is no recall.
    """

    turns: tuple[str, ...]
    expected: str
    frame: str | None = None
    others: tuple[str, ...] = ()
    group: str = ""  # the line of the report that counts it apart
    said: tuple[str, ...] = ()  # answers of another assistant to the first turns

    def accepts(self, answer: str) -> bool:
        """Is it right? Capitals, spaces around it and the last full stop do not matter."""
        if self.frame is not None:
            whole = rf"(?:{self.frame})?{re.escape(self.expected)}\.?"
            return re.fullmatch(whole, answer.strip(), re.IGNORECASE) is not None
        if any(holds(answer, other) for other in self.others):
            return False
        return holds(answer, self.expected)


@dataclass(frozen=True)
class Judged:
    """The user's turns and patterns for the last answer.

    Authors who did not know the corpus wrote the conversations and patterns of the two files. With
    `invents_nothing` each value in the answer has to be in the conversation.
    """

    turns: tuple[str, ...]
    right: tuple[str, ...]  # regular expressions: the answer holds all of them
    wrong: tuple[str, ...] = ()  # and none of these
    group: str = ""
    said: tuple[str, ...] = ()  # answers of another assistant to the first turns
    invents_nothing: bool = False

    @property
    def expected(self) -> str:
        """The patterns, for reports."""
        return " and ".join(self.right)

    def accepts(self, answer: str) -> bool:
        """Does the answer hold all that is right and nothing wrong? Capitals do not matter."""
        if self.invents_nothing and invented(answer, (*self.turns, *self.said)):
            return False
        if any(re.search(pattern, answer, re.IGNORECASE) for pattern in self.wrong):
            return False
        return all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.right)


def holds(answer: str, expected: str) -> bool:
    """Are the expected words in the answer, as words? `Tor` is not in `Torsten`, 4 not in 14."""
    return re.search(word(expected), answer, re.IGNORECASE) is not None


def word(value: str) -> str:
    """A regular expression for a value between spaces or marks."""
    return rf"(?<!\w){re.escape(value)}(?!\w)"


def invented(answer: str, talk: tuple[str, ...]) -> set[str]:
    """The values of an answer that are not in the talk: a name, a place, a number.

    A value is a word that the assistant's own sentences do not have. A last s does not count.
    """
    known = {stem(text) for text in words_of(" ".join(talk))} | assistant_words()
    return {text for text in words_of(answer) if stem(text) not in known}


def words_of(text: str) -> list[str]:
    """Words and numbers in small letters."""
    return re.findall(WORDS, text.casefold())


def stem(text: str) -> str:
    """Cat, of cats."""
    return text.removesuffix("s")


@cache
def assistant_words() -> frozenset[str]:
    """The words of the assistant's own sentences, without those of the pools of the users.

    Will is a name of the pools, will is not.
    """
    texts = " ".join(text for name in FILES for text in said_in(phrases(name)))
    sentences = re.sub(r"\{\w*\}", " ", texts)
    values = {stem(value) for pool in POOLS for value in pool}
    found = {stem(text) for text in re.findall(WORDS, f"{sentences} {OWN}")}
    return frozenset(text.casefold() for text in found - values)


def said_in(texts: str | list | dict, says: bool = False) -> list[str]:
    """The sentences below the entries that the assistant says."""
    if isinstance(texts, str):
        if says:
            return [texts]
        return []
    if isinstance(texts, list):
        return [text for part in texts for text in said_in(part, says)]
    return [
        text for key, part in texts.items() for text in said_in(part, says or bool(SAID.match(key)))
    ]
