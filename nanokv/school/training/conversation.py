"""A conversation that grows by one exchange at a time: what was said, how this user types, and what he has told so far.

`log` holds the meaning of every exchange beside its words, such as ("ask", "city"): a reader that works from the
meaning alone can check every answer (tests/support/corpus_checker.py).
"""

import re

from nanokv.school.training import words

STYLES = {  # how users type → how often
    "written": 58,
    "no mark": 12,
    "casual": 20,
    "small": 10,
}
SLIPS = {  # how some spell the commonest words
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
AN = re.compile(r"\b([Aa])(?= (?!uni|one\b|eu|use)[aeiou])")  # "a engineer", not "a unicorn"


class Conversation:
    """Messages and what they mean. `stage` says what words are drawn from and how lists are answered."""

    def __init__(self, rng, held_out: bool = False, stage=None):
        self.rng, self.held_out, self.stage = rng, held_out, stage
        self.style, self.american = (
            rng.choices(list(STYLES), list(STYLES.values()))[0],
            rng.random() < 0.3,
        )
        self.messages: list[dict] = []
        # Said in the same message as the next request, with its meaning.
        self.before: tuple[str, tuple] | None = None
        self.log: list[list[tuple]] = []  # of every exchange: what it means, in one or more steps
        # Words of names and cities, which a casual user still begins with a capital.
        self.capitals: set[str] = set()
        self.facts: dict[str, str] = {}  # kind → value, in the order of telling
        self.pets: dict[str, str] = {}  # kind → name
        self.owners: dict[str, tuple[str, str]] = {}  # person → (colour or nothing, thing)
        self.homes: dict[str, str] = {}  # person → city
        self.objects: dict[str, str] = {}  # thing → place
        self.list: list[str] = []

    def say(self, user: str, assistant: str, *meaning: tuple):
        """One exchange, typed in this user's style; the answer is always written in full."""
        if self.before:
            (sentence, step), self.before = self.before, None
            user, meaning = f"{sentence} {user}", (step, *meaning)
        if self.stage and self.stage.noted:
            assistant = self.stage.noted(meaning) or assistant
        self.log.append(list(meaning))
        user, assistant = (AN.sub(r"\1n", text) for text in (user, assistant))
        self.messages += [
            {"role": "user", "content": self.typed(user)},
            {"role": "assistant", "content": assistant},
        ]

    def typed(self, text: str) -> str:
        """Full sentences; without the last mark; small letters and few marks, names kept; or everything small."""
        if self.american:
            text = text.replace("colour", "color").replace("avourite", "avorite")
        if self.style == "written":
            return text.rstrip(".?! ") if self.rng.random() < 0.08 else text
        if self.style == "no mark":
            return text.rstrip(".?! ")
        if self.rng.random() < 0.7:
            text = text.rstrip(".?! ")
        if self.rng.random() < 0.5:
            text = re.sub(r"(?<=\w)'(?=(s|m|re|t|ll|ve|d)\b)", "", text)  # whats, im, dont
        keep = self.capitals if self.style == "casual" else ()
        return re.sub(
            r"[^\W\d_]+",
            lambda word: word[0] if word[0] in keep else self.slip(word[0].lower()),
            text,
        )

    def slip(self, word: str) -> str:
        """A common word, now and then in a spelling that is not in the dictionary."""
        return SLIPS.get(word, word) if self.rng.random() < 0.04 else word

    def cased(self, value: str) -> str:
        """A value as this user types it, now and in all later turns."""
        if self.style == "small":
            return value.lower()
        self.capitals |= {word for word in re.findall(r"[^\W\d_]+", value) if word[0].isupper()}
        return value

    def word(self) -> str:
        """A word for a list."""
        return self.cased(self.stage.word(self.rng, self.held_out))

    def name(self) -> str:
        """A first name."""
        return self.cased(words.name(self.rng, self.held_out))

    def one_of(self, texts, **values) -> str:
        """A phrasing with its values filled in; of a long list the first three are the usual ones."""
        usual = len(texts) > 8 and self.rng.random() < 0.25
        return self.rng.choice(texts[:3] if usual else texts).format(**values)


def upper_first(sentence: str) -> str:
    """A sentence that may begin with a value."""
    return sentence[0].upper() + sentence[1:]


def lower_first(sentence: str, keep=()) -> str:
    """A sentence after a lead-in: "Hey, what is my name?". Names and I keep their capital."""
    word = re.match(r"[^\W\d_]*", sentence)[0]
    return (
        sentence
        if word in keep or word == "I" or word[:2].isupper()
        else sentence[0].lower() + sentence[1:]
    )
