"""A conversation that grows by one exchange at a time.

It knows the messages so far, how this user types, and the facts that the user has mentioned.

An exchange is a message of the user and its answer. `log` holds the meaning of each exchange beside
its words, as steps such as ("ask", "city"). From the meaning alone a second program can work out
every answer and compare (tests/support/corpus_checker.py).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from nanokv.school.training import words

Step = tuple[Any, ...]  # one part of a meaning: its name, then its values

STYLES = {  # how a user types → weight
    "written": 58,
    "no mark": 12,
    "casual": 20,
    "small": 10,
}
SLIPS = {  # word → how some users misspell it
    "you": "u",
    "your": "ur",
    "are": "r",
    "please": "pls",
    "thanks": "thx",
    "what": "waht",
    "the": "teh",
    "remember": "remeber",
    "which": "wich",
    "favourite": "favorit",
    "favorite": "favrite",
    "because": "cuz",
    "tomorrow": "tmrw",
    "people": "ppl",
    "does": "dose",
    "called": "caled",
    "name": "nmae",
    "want": "wanna",
    "and": "n",
    "again": "agian",
    "friend": "freind",
    "number": "nubmer",
    "where": "were",
    "list": "lsit",
    "is": "si",
    "tell": "tel",
}
# "a engineer" becomes "an engineer"; "a unicorn" stays.
AN = re.compile(r"\b([Aa])(?= (?!uni|one\b|eu|use)[aeiou])")
WORD = r"[^\W\d_]+"  # letters only


Exchange = Callable[["Conversation"], object]


@dataclass(frozen=True)
class Stage:
    """The source of the conversations of a part of the training."""

    segments: Mapping[Exchange, float]  # exchange → how often
    word: Callable[[Random, bool], str]  # a word of a list
    wrappers: tuple[str, ...]  # words around questions about caches
    again: str = "{}."  # the answer that repeats a list
    backwards: str = "{}."  # the answer that reverses one
    # The answer to a statement; without it, the exchange has its own.
    noted: Callable[[tuple], str] | None = None
    # (talk, message, answer) → the answer that respects facts without a name.
    completed: Callable[["Conversation", str, str], str] | None = None
    foreign: float = 0  # share of the conversations with another assistant
    otherwise: Callable[["Conversation", tuple, dict], dict] | None = None  # its answers
    opened: float = 0  # share of the conversations that begin with one of the openings
    openings: Mapping[Exchange, float] = field(default_factory=dict)
    lengths: tuple[tuple[int, float], ...] = ()  # as data.ROW_LENGTHS, which an empty one means
    reworded: float = 0  # share of the questions about caches with words of the same meaning
    user_share: float = 0.1  # share of the user's tokens that count in the loss


class Conversation:
    """Messages, their meaning, and all that the user has mentioned.

    `held_out` chooses the half of the vocabulary (words.py). `stage` chooses the words of lists,
    the words around questions, and how lists are answered.
    """

    def __init__(self, rng: Random, held_out: bool, stage: Stage):
        self.rng = rng
        self.held_out = held_out
        self.stage = stage
        self.style = rng.choices(list(STYLES), list(STYLES.values()))[0]
        self.american = rng.random() < 0.3  # writes "color", "favorite"
        self.messages: list[dict] = []
        # A sentence that the next message begins with, and its meaning.
        self.before: tuple[str, Step] | None = None
        self.log: list[list[Step]] = []  # the steps of each exchange
        # Words of names and cities: a casual user writes these with a capital, and no others.
        self.capitals: set[str] = set()
        self.facts: dict[str, str] = {}  # kind → value, the newest last
        self.pets: dict[str, str] = {}  # kind → name
        self.owners: dict[str, tuple[str, str]] = {}  # person → (colour or "", thing)
        self.homes: dict[str, str] = {}  # person → city
        self.objects: dict[str, str] = {}  # thing → place
        self.list: list[str] = []
        self.unnamed: dict[str, str] = {}  # kind without a name → words: "two cats"
        self.relative_homes: dict[str, str] = {}  # relative without a name → city
        self.foreign = False  # does another assistant give a part of the answers?

    def say(self, user: str, assistant: str, *meaning: Step) -> None:
        """Add one exchange: the user's message in their style, the answer in full sentences."""
        if self.before:
            sentence, step = self.before
            self.before = None
            user = f"{sentence} {user}"
            meaning = (step, *meaning)
        if self.stage.noted:
            assistant = self.stage.noted(meaning) or assistant
        if self.stage.completed:
            assistant = self.stage.completed(self, user, assistant)
        self.log.append(list(meaning))
        user = AN.sub(r"\1n", user)
        reply: dict[str, Any] = {"role": "assistant", "content": AN.sub(r"\1n", assistant)}
        if self.foreign and self.stage.otherwise:
            reply = self.stage.otherwise(self, meaning, reply)
        self.messages.append({"role": "user", "content": self.typed(user)})
        self.messages.append(reply)

    def typed(self, text: str) -> str:
        """The text as this user types it.

        written: full sentences.
        no mark: without the last punctuation mark.
        casual: lower case but for names, fewer marks, some misspelt words.
        small: as casual, and names in lower case too.
        """
        if self.american:
            text = text.replace("colour", "color").replace("avourite", "avorite")
        if self.style == "written":
            if self.rng.random() < 0.08:
                return without_mark(text)
            return text
        if self.style == "no mark":
            return without_mark(text)
        if self.rng.random() < 0.7:
            text = without_mark(text)
        if self.rng.random() < 0.5:
            text = re.sub(r"(?<=\w)'(?=(s|m|re|t|ll|ve|d)\b)", "", text)  # whats, im, dont
        return re.sub(WORD, lambda match: self._small(match[0]), text)

    def _small(self, word: str) -> str:
        """A word of a user who writes lower case."""
        if self.style == "casual" and word in self.capitals:
            return word
        return self.slip(word.lower())

    def slip(self, word: str) -> str:
        """The word, in one case of 25 misspelt if it is a common one."""
        if self.rng.random() < 0.04:
            return SLIPS.get(word, word)
        return word

    def cased(self, value: str) -> str:
        """A value as this user types it, now and in all later messages."""
        if self.style == "small":
            return value.lower()
        self.capitals |= {word for word in re.findall(WORD, value) if word[0].isupper()}
        return value

    def word(self) -> str:
        """A word for a list."""
        return self.cased(self.stage.word(self.rng, self.held_out))

    def name(self) -> str:
        """A first name."""
        return self.cased(words.name(self.rng, self.held_out))

    def one_of(self, texts: Sequence[str], **values: object) -> str:
        """One of the phrasings with its values filled in.

        The first three phrasings of a long list are the usual ones, and drawn more often.
        """
        if len(texts) > 8 and self.rng.random() < 0.25:
            texts = texts[:3]
        return self.rng.choice(texts).format(**values)


def without_mark(text: str) -> str:
    """The text without the marks and spaces at its end."""
    return text.rstrip(".?! ")


def upper_first(sentence: str) -> str:
    """The sentence with a capital: it may begin with a value."""
    return sentence[0].upper() + sentence[1:]


def lower_first(sentence: str, keep: Collection[str] = ()) -> str:
    """The sentence as it follows a lead-in: "Hey, what is my name?".

    Words in `keep`, "I" and words of capitals stay as they are.
    """
    match = re.match(r"[^\W\d_]*", sentence)
    assert match is not None  # the pattern matches an empty string too
    word = match[0]
    if word in keep or word == "I" or word[:2].isupper():
        return sentence
    return sentence[0].lower() + sentence[1:]
