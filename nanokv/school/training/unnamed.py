"""Exchanges of the third stage with facts that have no name: "I have a cat."

The name of that cat is then unknown, and the cat is known.
"""

import re
from random import Random

from nanokv.school.training import about_user, lists, small_talk, sums, words
from nanokv.school.training.about_user import asked
from nanokv.school.training.conversation import Conversation, lower_first, upper_first
from nanokv.school.training.facts import EVERYTHING, FACTS, PET
from nanokv.school.training.phrases import phrases

TEXTS = phrases("unnamed")
ANIMAL = TEXTS["animal"]
HOME_ASKED = phrases("strangers")["relative_home"]["asked"]
NUMBERS = ("two", "three", "four", "five", "2", "3")
PLURALS = {"mouse": "mice", "pony": "ponies", "goldfish": "goldfish", "canary": "canaries"}
LIKED = (
    words.FOODS,
    words.DRINKS,
    words.HOBBIES,
    words.SPORTS,
    words.FRUITS,
    words.SEASONS,
)
# A question whether there is one, for its name, for a place.
HAVE = re.compile(
    r"\b(do i have|have i got|do i own|did i say i have|is there an?) |right\?", re.IGNORECASE
)
CALLED = re.compile(r"\b(name|called|call|who)\b", re.IGNORECASE)
WHERE = re.compile(r"\b(where|city|town|home)\b", re.IGNORECASE)
OTHERS = (sums.add, sums.count, small_talk.cache_question, small_talk.small_talk, lists.repeat)


def plural(kind: str) -> str:
    """Cats, mice."""
    return PLURALS.get(kind, f"{kind}s")


def a(kind: str) -> str:
    """A cat, an owl."""
    if kind[0] in "aeiou":
        return f"an {kind}"
    return f"a {kind}"


def many(talk: Conversation, kind: str) -> bool:
    """Does the user have several of this kind?"""
    return talk.unnamed[kind] != a(kind)


def no_name(talk: Conversation, kind: str) -> str:
    """You have not told me what your cat is called."""
    if many(talk, kind):
        return ANIMAL["names_missing"][0].replace("{k}s", plural(kind))
    return ANIMAL["missing"][0].format(k=kind)


def _tell(talk: Conversation, section: str, step: tuple, half: str = "told", **values: str) -> None:
    texts = TEXTS[section]
    told = talk.rng.choice(texts[half])
    if half == "told" and section in ("thing", "animal", "relative") and talk.rng.random() < 0.5:
        told = talked(talk.rng, told)
    told = told.format(**values)
    noted = texts["noted"][0].format(**values)
    talk.say(upper_first(told), upper_first(noted), step)


def talked(rng: Random, told: str) -> str:
    """The sentence with a few words more at its beginning or its end.

    "Well, I have a cat." "I have a cat, you see."
    """
    around = TEXTS["thing"]
    if rng.random() < 0.3:
        return f"{rng.choice(around['starts'])} {lower_first(told)}"
    comma = rng.choice(("", "", ","))
    return f"{told[:-1]}{comma} {rng.choice(around['tails'])}{told[-1]}"


def _others(talk: Conversation) -> None:
    for _ in range(talk.rng.randint(0, 1)):
        talk.rng.choice(OTHERS)(talk)


# --- pets -----------------------------------------------------------------------------------------


def tell_animal(talk: Conversation, half: str = "told") -> str:
    """I have a cat, two cats, a cat and a dog. Returns a kind of them."""
    rng = talk.rng
    kinds = [kind for kind in words.ANIMALS if kind not in talk.pets and kind not in talk.unnamed]
    kind, other = rng.sample(kinds, 2)
    dice = rng.random()
    if dice < 0.15 and half == "told":
        _tell_two(talk, kind, other)
        return kind
    what = a(kind)
    if dice < 0.3:
        what = f"{rng.choice(NUMBERS)} {plural(kind)}"
    talk.unnamed[kind] = what
    _tell(talk, "animal", ("have", kind, what), half, a=what)
    return kind


def _tell_two(talk: Conversation, kind: str, other: str) -> None:
    one, two = a(kind), a(other)
    talk.unnamed[kind] = one
    talk.unnamed[other] = two
    told = talk.rng.choice(ANIMAL["both"]).format(a=one, b=two)
    steps = (("have", kind, one), ("have", other, two))
    talk.say(told, f"So you have {one} and {two}.", *steps)


def ask_name(talk: Conversation, kind: str) -> None:
    """What is my cat called? The user never said."""
    questions = ANIMAL["names_asked" if many(talk, kind) else "name_asked"]
    if [step[:2] for step in talk.log[-1]] != [("have", kind)]:  # then "its" is no word for it
        questions = [text for text in questions if "{k}" in text]
    question = talk.rng.choice(questions).replace("{k}s", plural(kind)).format(k=kind)
    talk.say(asked(talk, question), no_name(talk, kind), ("no name", kind))


def animal(talk: Conversation) -> None:
    """A pet without a name, then up to two questions about it; in some talks its name follows."""
    rng = talk.rng
    kind = tell_animal(talk)
    if rng.random() < 0.3:
        _others(talk)
    several = many(talk, kind)
    for how in rng.sample(("name", "name", "have", "which", "how many"), rng.choice((0, 1, 1, 2))):
        if how == "name":
            ask_name(talk, kind)
        elif how == "have":
            _ask_have(talk, kind)
        elif how == "which":
            _ask_which(talk)
        elif several:
            question = rng.choice(ANIMAL["count_asked"]).replace("{k}s", plural(kind))
            talk.say(question, f"You have {talk.unnamed[kind]}.", ("how many", kind))
    if not several and rng.random() < 0.3:
        _name(talk, kind)


def _ask_have(talk: Conversation, kind: str) -> None:
    if talk.rng.random() < 0.3:
        kind = talk.rng.choice(words.ANIMALS)
    question = talk.rng.choice(ANIMAL["have_asked"]).format(k=kind)
    answer = PET["kind_missing"][0].format(k=kind)
    if kind in talk.unnamed:
        answer = f"You have {talk.unnamed[kind]}."
    if kind in talk.pets:
        answer = PET["recalled"].format(k=kind, v=talk.pets[kind])
    talk.say(asked(talk, question), answer, ("ask have", kind))


def animals(talk: Conversation) -> str:
    """The latest two pets without a name: "a cat and two dogs"."""
    found = [
        what
        for kind, what in talk.unnamed.items()
        if kind in words.ANIMALS and kind not in talk.pets
    ]
    return " and ".join(found[-2:])


def _ask_which(talk: Conversation) -> None:
    if talk.pets or not animals(talk):
        return
    question = asked(talk, talk.rng.choice(ANIMAL["asked"]))
    talk.say(question, f"You have {animals(talk)}.", ("which pet",))


def _name(talk: Conversation, kind: str) -> None:
    """Its name is Miso. Then, in most talks, the question for it."""
    rng, name = talk.rng, talk.name()
    texts = ANIMAL["named_later"]
    latest = talk.log[-1][-1][-1] in (kind, talk.unnamed[kind])
    if len(animals(talk).split(" and ")) > 1 or not latest:
        texts = [text for text in texts if "{k}" in text]
    about_user.keep_pet(talk, kind, name)
    talk.unnamed.pop(kind)
    told = upper_first(rng.choice(texts).format(k=kind, v=name))
    talk.say(told, "?", ("pet", kind, name))
    if rng.random() < 0.6:
        question = talk.one_of(PET["name_asked"], k=kind)
        answer = PET["name_recalled"].format(k=kind, v=name)
        talk.say(asked(talk, question), answer, ("ask pet", kind))


# --- relatives, things, likes ---------------------------------------------------------------------


def relative(talk: Conversation) -> None:
    """I have a sister. My sister lives in Oslo."""
    rng = talk.rng
    kinds = [
        kind for kind in words.RELATIVES if kind not in talk.facts and kind not in talk.unnamed
    ]
    if not kinds:
        return
    kind = rng.choice(kinds)
    if rng.random() < 0.4:
        _relative_home(talk, kind)
        return
    talk.unnamed[kind] = a(kind)
    _tell(talk, "relative", ("have relative", kind, a(kind)), r=kind)
    _others(talk)
    if rng.random() < 0.6:
        about_user.recall(talk, kind)
    elif rng.random() < 0.5:
        question = rng.choice(TEXTS["relative"]["asked"]).format(r=kind)
        talk.say(asked(talk, question), f"You have {a(kind)}.", ("ask have", kind))


def tell_relative_home(talk: Conversation, kind: str, half: str = "told") -> str:
    """My sister lives in Oslo. Returns the city."""
    city = talk.cased(FACTS["city"].value(talk.rng, talk.held_out))
    talk.relative_homes[kind] = city
    talk.unnamed[kind] = a(kind)
    _tell(talk, "home", ("home of", kind, city), half, r=kind, c=city)
    return city


def _relative_home(talk: Conversation, kind: str) -> None:
    rng = talk.rng
    city = tell_relative_home(talk, kind)
    _others(talk)
    if rng.random() < 0.6:
        question = talk.one_of(HOME_ASKED, r=kind)
        talk.say(asked(talk, question), f"Your {kind} lives in {city}.", ("ask home of", kind))
    if rng.random() < 0.5:
        about_user.recall(talk, rng.choice((kind, "city", "name")))


def liked(talk: Conversation) -> str:
    """A word for something that people like: music, dogs, Oslo, pizza."""
    rng = talk.rng
    dice = rng.random()
    if dice < 0.25:
        return talk.cased(words.strange(rng, talk.held_out))
    if dice < 0.5:
        return rng.choice(TEXTS["like"]["values"])
    if dice < 0.65:
        return plural(rng.choice(words.ANIMALS))
    if dice < 0.75:
        return talk.cased(FACTS["city"].value(rng, talk.held_out))
    return rng.choice(rng.choice(LIKED))


def like(talk: Conversation) -> None:
    """I like pizza: neither a favourite nor a hobby."""
    value = liked(talk)
    talk.unnamed["like"] = value
    _tell(talk, "like", ("like", value), v=value)
    _others(talk)
    if talk.rng.random() < 0.6:
        question = talk.rng.choice(TEXTS["like"]["asked"])
        talk.say(asked(talk, question), f"You like {value}.", ("ask like",))


def thing(talk: Conversation) -> None:
    """I have a boat."""
    what = a(about_user.new_thing(talk, ()))
    talk.unnamed["thing"] = what
    _tell(talk, "thing", ("have", "thing", what), a=what)
    _others(talk)
    if talk.rng.random() < 0.6:
        question = talk.rng.choice(TEXTS["thing"]["asked"])
        talk.say(asked(talk, question), f"You have {what}.", ("ask thing",))


def never(talk: Conversation) -> None:
    """What do I like? What do I have? The user never said."""
    what = talk.rng.choice(("like", "thing"))
    if what in talk.unnamed:
        return
    question = talk.rng.choice(TEXTS[what]["asked"])
    talk.say(asked(talk, question), TEXTS[what]["missing"][0], ("never", what))


# --- answers of the other exchanges ---------------------------------------------------------------


def completed(talk: Conversation, user: str, answer: str) -> str:
    """An answer that calls something unknown, changed where the user has it without a name."""
    for kind in talk.unnamed:
        if kind in talk.facts or kind in talk.pets or kind in ("like", "thing"):
            continue
        missing = [text.format(k=kind) for text in PET["kind_missing"]]
        if kind in FACTS:
            missing = FACTS[kind].missing
        answer = _replaced(answer, missing, _known(talk, user, kind))
    if not animals(talk) or talk.pets:
        return answer
    known = f"You have {animals(talk)}."
    if CALLED.search(user):
        latest = [kind for kind in talk.unnamed if kind in words.ANIMALS][-1]
        known = no_name(talk, latest)
    return _replaced(answer, (*PET["missing"], EVERYTHING["nothing"]), known)


def _known(talk: Conversation, user: str, kind: str) -> str:
    if kind in talk.relative_homes and WHERE.search(user):
        return f"Your {kind} lives in {talk.relative_homes[kind]}."
    if HAVE.search(user):
        return f"You have {talk.unnamed[kind]}."
    return no_name(talk, kind)


def _replaced(answer: str, missing: list[str] | tuple[str, ...], known: str) -> str:
    for text in missing:
        answer = answer.replace(text, known)
    return answer
