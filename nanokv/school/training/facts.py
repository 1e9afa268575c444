"""What a user can tell about himself and ask back later; the phrasings of every kind of fact are in facts.toml.

Each kind has statements and the answers to them, statements that change it, questions and the answers to those,
questions for yes or no, and what an honest model says when it was never told. {v} is the value.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from nanokv.school.training import words
from nanokv.school.training.phrases import phrases

_TEXTS = phrases("nearby") | phrases("strangers") | phrases("facts")
PET, OWNER, BELONGING, HOME, OBJECT, EVERYTHING = (
    _TEXTS[name] for name in ("pet", "owner", "belonging", "home", "object", "everything")
)
CHANGED, OPENINGS = _TEXTS["changed"]["told"], _TEXTS["openings"]["told"]


@dataclass(frozen=True)
class Fact:
    """One kind of fact: how it is drawn, told, confirmed, changed, asked for, recalled, and missed."""

    value: Callable  # (rng, held_out) → str
    told: list[str]
    noted: list[str]
    changed: list[str]
    asked: list[str]
    confirm: list[str]
    recalled: list[str]
    missing: list[str]


def _fact(section: str, value: Callable, **filled: str) -> Fact:
    """A section of the file, its {thing} and {note} filled in."""
    texts = {
        field.name: _TEXTS[section][field.name] for field in fields(Fact) if field.name != "value"
    }
    for name, text in filled.items():
        texts = {
            key: [line.replace(f"{{{name}}}", text) for line in lines]
            for key, lines in texts.items()
        }
    return Fact(value, **texts)


def _from(pool, known: float = 0.55):
    """A word of the pool, or one that no pool has: a model that only knew the pool would answer from it."""
    return lambda rng, held_out: (
        rng.choice(pool) if rng.random() < known else words.strange(rng, held_out)
    )


def _city(rng, held_out):
    return rng.choice(words.CITIES) if rng.random() < 0.5 else words.name(rng, held_out)


def _title(rng, held_out):
    """A song, a book, a band: one or two words that mean nothing."""
    count = rng.choice((1, 1, 2))
    return " ".join(
        words.distinct(rng, count, lambda: words.varied_word(rng, held_out).capitalize())
    )


def _names(rng, held_out):
    """Two or three names."""
    *first, last = words.distinct(rng, rng.choice((2, 2, 3)), lambda: words.name(rng, held_out))
    return f"{', '.join(first)} and {last}"


def _age(rng, held_out):
    return str(rng.randint(5, 99))


def _number(rng, held_out):
    """One to six digits, mostly one to four."""
    digits = rng.choice((1, 2, 2, 3, 3, 4, 4, 4, 5, 6))
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def _code(rng, held_out):
    """Three to six digits, mostly four."""
    digits = rng.choice((3, 4, 4, 4, 4, 4, 4, 5, 6))
    return "".join(rng.choices("0123456789", k=digits))


def _login(rng, held_out):
    """A word, digits, or a word with digits behind it."""
    kind = rng.random()
    if kind < 0.4:
        return _code(rng, held_out)
    word = words.varied_word(rng, held_out)
    return word if kind < 0.7 else f"{word}{rng.randint(1, 99)}"


def _favourite(thing: str, value: Callable, note: str = "Noted: {v}.") -> Fact:
    """Favourites are told in the same words, favorites too."""
    return _fact("favourite", value, thing=thing, note=note)


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
LATE = {  # kinds that resemble others: in the second stage of the training
    "birthplace": _fact("birthplace", _city),
    "childhood": _fact("childhood", _city),
    "workplace": _fact("workplace", _city),
    "password": _fact("password", words.varied_word),
    "played": _fact("played", _from(words.INSTRUMENTS)),
    "language": _fact("language", _from(words.LANGUAGES)),
} | {thing: _favourite(thing, words.strange) for thing in words.FAVOURITES}
CODES = {  # in the second stage
    code: _fact("code", _login if code.endswith("password") else _code, thing=code)
    for code in words.CODES
}
FACTS |= LATE | CODES

# how often a kind comes up; brothers and sisters more than colleagues, colours more than flowers
WEIGHTS = dict.fromkeys(FACTS, 1.0)
WEIGHTS |= {
    kind: 0.5
    for kind in words.RELATIVES
    if kind not in ("sister", "brother", "mother", "son", "daughter")
}
WEIGHTS |= dict.fromkeys(
    ("season", "fruit", "flower", "instrument", "subject", "song", "book", "film", "band"), 0.5
)
WEIGHTS |= {
    "name": 5.0,
    "city": 3.0,
    "job": 2.0,
    "colour": 2.0,
    "food": 1.5,
    "number": 2.5,
    "word": 2.0,
    "hobby": 1.5,
}
WEIGHTS |= {"friend": 1.5, "age": 1.5, "friends": 0.5}
WEIGHTS |= dict.fromkeys((*LATE, *CODES), 0)


def draw(rng, but=()) -> str:
    """A kind of fact, none of `but`."""
    kinds = [kind for kind in FACTS if kind not in but]
    return rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
