"""The kinds of facts that a user can mention and ask for later; their phrasings are in facts.toml.

A kind has statements and their answers, statements that change the fact, questions, questions for
yes or no, the answer when the fact is known, and the answer when the user has not mentioned it. {v}
is the value.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from random import Random

from nanokv.school.training import words
from nanokv.school.training.phrases import phrases

Draw = Callable[[Random, bool], str]  # (rng, held_out) → a value

_TEXTS = phrases("nearby") | phrases("strangers") | phrases("facts")
PET = _TEXTS["pet"]
OWNER = _TEXTS["owner"]
BELONGING = _TEXTS["belonging"]
HOME = _TEXTS["home"]
OBJECT = _TEXTS["object"]
EVERYTHING = _TEXTS["everything"]
CHANGED = _TEXTS["changed"]["told"]
OPENINGS = _TEXTS["openings"]["told"]


@dataclass(frozen=True)
class Fact:
    """One kind of fact: how a value is drawn, and the phrasings around it."""

    value: Draw
    told: list[str]  # "My name is {v}."
    noted: list[str]  # "Nice to meet you, {v}."
    changed: list[str]  # "Call me {v} instead."
    asked: list[str]  # "What is my name?"
    confirm: list[str]  # "Is my name {v}?"
    recalled: list[str]  # "Your name is {v}."
    missing: list[str]  # the answer when the user has not mentioned it


def _fact(section: str, value: Draw, **filled: str) -> Fact:
    """The fact of a section of the file, with its {thing} and {note} filled in."""
    texts = {}
    for field in fields(Fact):
        if field.name == "value":
            continue
        lines = _TEXTS[section][field.name]
        for name, text in filled.items():
            lines = [line.replace(f"{{{name}}}", text) for line in lines]
        texts[field.name] = lines
    return Fact(value, **texts)


def _from(pool: Sequence[str], known: float = 0.55) -> Draw:
    """Draws a word of the pool, or with probability 1 - `known` a word that no pool contains.

    With words of the pool alone, a model would learn to answer from the pool.
    """

    def draw_value(rng: Random, held_out: bool) -> str:
        if rng.random() < known:
            return rng.choice(pool)
        return words.strange(rng, held_out)

    return draw_value


def _city(rng: Random, held_out: bool) -> str:
    """A city, or a name as the name of a town."""
    if rng.random() < 0.5:
        return rng.choice(words.CITIES)
    return words.name(rng, held_out)


def _title(rng: Random, held_out: bool) -> str:
    """The title of a song, a book, a film or a band: one or two capitalised words."""
    count = rng.choice((1, 1, 2))
    parts = words.distinct(rng, count, lambda: words.varied_word(rng, held_out).capitalize())
    return " ".join(parts)


def _names(rng: Random, held_out: bool) -> str:
    """Two or three names: Ada, Leo and Mia."""
    count = rng.choice((2, 2, 3))
    *first, last = words.distinct(rng, count, lambda: words.name(rng, held_out))
    return f"{', '.join(first)} and {last}"


def _age(rng: Random, held_out: bool) -> str:
    """5 to 99."""
    return str(rng.randint(5, 99))


def _number(rng: Random, held_out: bool) -> str:
    """One to six digits, mostly one to four."""
    digits = rng.choice((1, 2, 2, 3, 3, 4, 4, 4, 5, 6))
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def _code(rng: Random, held_out: bool) -> str:
    """Three to six digits, mostly four."""
    digits = rng.choice((3, 4, 4, 4, 4, 4, 4, 5, 6))
    return "".join(rng.choices("0123456789", k=digits))


def _login(rng: Random, held_out: bool) -> str:
    """A password: digits, a word, or a word with a number behind it."""
    kind = rng.random()
    if kind < 0.4:
        return _code(rng, held_out)
    word = words.varied_word(rng, held_out)
    if kind < 0.7:
        return word
    return f"{word}{rng.randint(1, 99)}"


def _favourite(thing: str, value: Draw, note: str = "Noted: {v}.") -> Fact:
    """All favourites have the same phrasings; `note` is one of the answers to a statement."""
    return _fact("favourite", value, thing=thing, note=note)


def _secret(code: str) -> Fact:
    """A code: digits, or a password if that is its name."""
    value = _code
    if code.endswith("password"):
        value = _login
    return _fact("code", value, thing=code)


FACTS = {
    "name": _fact("name", words.name),
    "city": _fact("city", _city),
    "job": _fact("job", _from(words.JOBS)),
    "hobby": _fact("hobby", _from(words.HOBBIES)),
    "friend": _fact("friend", words.name),
    "friends": _fact("friends", _names),
    "age": _fact("age", _age),
    "number": _fact("number", _number),
    "word": _fact("word", words.list_word),
    "colour": _favourite("colour", _from(words.COLOURS), "{v} is a lovely colour."),
    "food": _favourite("food", _from(words.FOODS), "Mmm, {v}."),
    "drink": _favourite("drink", _from(words.DRINKS), "{v} is good."),
    "animal": _favourite("animal", _from(words.ANIMALS), "I like that: {v}."),
    "sport": _favourite("sport", _from(words.SPORTS)),
    "season": _favourite("season", _from(words.SEASONS, 1.0)),
    "fruit": _favourite("fruit", _from(words.FRUITS)),
    "flower": _favourite("flower", _from(words.FLOWERS)),
    "instrument": _favourite("instrument", _from(words.INSTRUMENTS)),
    "game": _favourite("game", _from(words.GAMES)),
    "subject": _favourite("subject", _from(words.SUBJECTS)),
} | {thing: _favourite(thing, _title) for thing in ("song", "book", "film", "band")}
FACTS |= {who: _fact("sibling", words.name, thing=who) for who in words.RELATIVES}
# Kinds that resemble others: from the second stage of the training on.
LATE = {
    "birthplace": _fact("birthplace", _city),
    "childhood": _fact("childhood", _city),
    "workplace": _fact("workplace", _city),
    "password": _fact("password", words.varied_word),
    "played": _fact("played", _from(words.INSTRUMENTS)),
    "language": _fact("language", _from(words.LANGUAGES)),
} | {thing: _favourite(thing, words.strange) for thing in words.FAVOURITES}
CODES = {code: _secret(code) for code in words.CODES}  # also from the second stage on
FACTS |= LATE | CODES

# Kind → how often it is drawn, relative to 1: a brother more often than a colleague, a colour more
# often than a flower.
WEIGHTS = dict.fromkeys(FACTS, 1.0)
_CLOSEST = ("sister", "brother", "mother", "son", "daughter")
WEIGHTS |= {kind: 0.5 for kind in words.RELATIVES if kind not in _CLOSEST}
WEIGHTS |= dict.fromkeys(("season", "fruit", "flower", "instrument", "subject"), 0.5)
WEIGHTS |= dict.fromkeys(("song", "book", "film", "band"), 0.5)
WEIGHTS |= {
    "name": 5.0,
    "city": 3.0,
    "job": 2.0,
    "colour": 2.0,
    "food": 1.5,
    "number": 2.5,
    "word": 2.0,
    "hobby": 1.5,
    "friend": 1.5,
    "age": 1.5,
    "friends": 0.5,
}
WEIGHTS |= dict.fromkeys((*LATE, *CODES), 0)  # drawn by name alone


def draw(rng: Random, but: Collection[str] = ()) -> str:
    """A kind of fact that is not in `but`."""
    kinds = [kind for kind in FACTS if kind not in but]
    return rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
