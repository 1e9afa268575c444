"""What a user can tell about himself and ask back later; the phrasings of every kind of fact are in facts.toml.

Each kind has statements and the answers to them, questions and the answers to those, and what an honest model says
when it was never told. {v} is the value.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanokv.training import words
from nanokv.training.phrases import phrases

_TEXTS = phrases("facts")
PET, CHANGED = _TEXTS["pet"], _TEXTS["changed"]["told"]


@dataclass(frozen=True)
class Fact:
    """One kind of fact: how it is drawn, told, confirmed, asked for, recalled, and missed."""

    value: Callable  # (rng, held_out) → str
    told: list[str]
    noted: list[str]
    asked: list[str]
    recalled: list[str]
    missing: list[str]


def _fact(section: str, value: Callable, **filled: str) -> Fact:
    """A section of the file, its {thing} and {note} filled in."""
    texts = {key: list(lines) for key, lines in _TEXTS[section].items()}
    for name, text in filled.items():
        texts = {key: [line.replace(f"{{{name}}}", text) for line in lines] for key, lines in texts.items()}
    return Fact(value, **texts)


def _from(pool):
    return lambda rng, held_out: rng.choice(pool)


def _city(rng, held_out):
    return rng.choice(words.CITIES) if rng.random() < 0.6 else words.invent(rng, held_out).capitalize()


def _number(first, last):
    return lambda rng, held_out: str(rng.randint(first, last))


def _favourite(thing, pool, note):
    """Favourite colours, foods, drinks and animals are told in the same words; American spelling now and then."""
    return _fact("favourite", _from(pool), thing=thing, note=note)


def _both_spellings(fact):
    """A user may write color; the answer says colour."""
    told, asked = ([text.replace("colour", "color") for text in texts] for texts in (fact.told, fact.asked))
    return replace(fact, told=fact.told + told, asked=fact.asked + asked)


FACTS = {
    "name": _fact("name", words.name),
    "city": _fact("city", _city),
    "colour": _both_spellings(_favourite("colour", words.COLOURS, "{v} is a lovely colour.")),
    "food": _favourite("food", words.FOODS, "Mmm, {v}."),
    "drink": _favourite("drink", words.DRINKS, "{v} is good."),
    "animal": _favourite("animal", words.ANIMALS, "I like that: {v}."),
    "job": _fact("job", _from(words.JOBS)),
    "hobby": _fact("hobby", _from(words.HOBBIES)),
    "friend": _fact("friend", words.name),
    "sister": _fact("sibling", words.name, thing="sister"),
    "brother": _fact("sibling", words.name, thing="brother"),
    "age": _fact("age", _number(5, 99)),
    "number": _fact("number", _number(1, 999)),
    "word": _fact("word", words.invent),
}
