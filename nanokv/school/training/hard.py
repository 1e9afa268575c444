"""Exchanges of the second stage, more of what is hard: values that a message begins with, before the reader knows what
they are; many facts at once; who the user is and more in one sentence; facts that change and are asked for after other
talk; long lists.
"""

import re

from nanokv.school.training import about_user, lists, small_talk, sums, words
from nanokv.school.training.conversation import Conversation, lower_first, upper_first
from nanokv.school.training.facts import CODES, FACTS, PET, draw
from nanokv.school.training.phrases import phrases

SENTENCES = " ".join(str(phrases(name)) for name in ("facts", "requests", "nearby"))
# "withme" begins with a token that no list has.
EVERY_WORD = sorted(set(re.findall("[a-z]{4,}", SENTENCES.lower())))
ASKED_LATER = phrases("requests")["remembered"]["nth"]
OTHERS = (
    sums.add,
    sums.count,
    small_talk.cache_question,
    lists.repeat,
    small_talk.small_talk,
    small_talk.unknown,
)
LENGTHS = (3, 4, 5, 5, 6, 6, 7, 7, 8, 8)
FIRST = 0.55  # how often a statement begins with its value, where it can
FIRST_TEXTS = {
    kind: [text for text in (*fact.told, *fact.changed) if text.startswith("{v}")]
    for kind, fact in FACTS.items()
    if kind not in CODES
}  # kind → the phrasings that begin with the value
INTRODUCTION = phrases("introductions")
UNKNOWN = 0.25  # how often something that was not told is asked for, among what was
PET_FIRST = [text for text in PET["told"] if text.startswith("{v}")]
INTRODUCED = ["This is {v}.", "It's {v} here, by the way.", *FIRST_TEXTS["name"]]
PROPER = {  # kinds whose values have a capital
    "name",
    "friend",
    "city",
    "song",
    "book",
    "film",
    "band",
    "birthplace",
    "childhood",
    "workplace",
    *words.RELATIVES,
}
POOLED = ("age", "number", "friends", "season")
BEGINNING = [kind for kind, texts in FIRST_TEXTS.items() if texts and kind not in POOLED]


def remember(talk: Conversation):
    """Facts and pets in one to three messages, other talk, then questions about some of them, now and then about one
    that was not told.
    """
    rng, before = talk.rng, dict(talk.pets)
    kinds = [kind for _ in range(rng.randint(1, 3)) for kind in _tell(talk, pets=0.3)]
    _others(talk, 2)
    kinds = list(dict.fromkeys(kinds))
    questions = rng.sample(kinds, min(len(kinds), rng.choice((1, 2, 2, 3))))
    if rng.random() < UNKNOWN:
        questions.insert(rng.randrange(len(questions) + 1), draw(rng, talk.facts))
    for kind in questions:
        about_user.recall(talk, kind)
    pets = [kind for kind, name in talk.pets.items() if before.get(kind) != name]
    if pets:
        unknown = rng.random() < UNKNOWN
        _ask_pet(
            talk,
            rng.choice(
                [kind for kind in words.ANIMALS if kind not in talk.pets] if unknown else pets
            ),
        )


def begin(talk: Conversation):
    """One fact that begins with a value that nobody has used before, now and then asked for at once."""
    rng = talk.rng
    if rng.random() < 0.25:
        kind, name = about_user.animal(talk), talk.cased(_new_value(talk).title())
        about_user.keep_pet(talk, kind, name)
        talk.say(
            upper_first(talk.one_of(PET_FIRST, k=kind, v=name)),
            f"{name} the {kind}.",
            ("pet", kind, name),
        )
        return
    kind, value = rng.choice(BEGINNING), _new_value(talk)
    value = talk.cased(value.title() if kind in PROPER else value)
    talk.say(*about_user.statement(talk, kind, FIRST_TEXTS[kind], value))
    if rng.random() < 0.3:
        about_user.recall(talk, kind)


def introduce(talk: Conversation):
    """This is Ada, or Ada here: by itself or in a longer message. Then, after other talk, who it is."""
    rng, told = talk.rng, [about_user.statement(talk, "name", INTRODUCED)]
    if rng.random() < 0.5:
        told.insert(rng.randrange(2), _statement(talk, draw(rng, ("name",))))
    talk.say(
        about_user.joined(talk, [sentence for sentence, _, _ in told]),
        told[0][1],
        *(step for _, _, step in told),
    )
    _others(talk, 1)
    about_user.recall(talk, "name")


def introduce_at_once(talk: Conversation):
    """I'm Ada, 29, a nurse from Oslo: a name and what else there is to say in one message, often asked for at once."""
    told = tell_at_once(talk)
    _others(talk, 1)
    for kind in talk.rng.sample(told, min(len(told), talk.rng.choice((0, 1, 1, 2)))):
        about_user.recall(talk, kind)


def tell_at_once(talk: Conversation) -> list[str]:
    """The message of an introduction, and its answer. Returns the kinds of facts that it tells."""
    sentence = talk.rng.choice(INTRODUCTION["told"])
    clauses = {place: _clause(talk, place) for place in re.findall(r"{(\w+)}", sentence)}
    steps = [step for _, step in clauses.values()]
    sentence = sentence.format(**{place: text for place, (text, _) in clauses.items()})
    said = re.sub(
        r"(?:^|[.!] )\w",
        lambda first: first[0].upper(),
        talk.rng.choice(INTRODUCTION["hello"]) + sentence,
    )
    talk.say(said, "Thank you, I will remember that.", *steps)
    return [kind for name, kind, _ in steps if name == "tell"]


def _clause(talk: Conversation, place: str) -> tuple[str, tuple]:
    """What stands in a place of an introduction, and what it means."""
    if place == "pet":
        kind, name = about_user.animal(talk), talk.name()
        about_user.keep_pet(talk, kind, name)
        return talk.one_of(INTRODUCTION["pet"], k=kind, v=name), ("pet", kind, name)
    kind = draw(talk.rng, ("name", "city", "age", "job", "friends")) if place == "other" else place
    value = about_user.told_value(talk, kind)
    about_user.keep(talk, kind, value)
    texts = {"name": INTRODUCTION["name"], "other": FACTS[kind].told[:3]}.get(place, ["{v}"])
    text = talk.one_of(texts, v=value).rstrip(".")
    return lower_first(text, talk.capitals) if place == "other" else text, ("tell", kind, value)


def friends(talk: Conversation):
    """Several friends, a list of words, and then who the friends are."""
    talk.say(*about_user.statement(talk, "friends"))
    talk.rng.choice((lists.repeat, lists.reverse, lists.nth, lists.remember))(talk)
    about_user.recall(talk, "friends")


def _new_value(talk: Conversation) -> str:
    """One word or two, of all the pieces that words have."""
    rng, make = talk.rng, talk.rng.choice((words.splice, of_any_pieces, words.invent))
    values = words.distinct(rng, rng.choice((1, 1, 1, 2)), lambda: make(rng, talk.held_out))
    return " ".join(values)


def of_any_pieces(rng, held_out: bool) -> str:
    """A word of pieces of any words: secrai, withme, favouton."""
    return words.splice(rng, held_out, EVERY_WORD)


def word(rng, held_out: bool) -> str:
    """A word of a list, now and then of pieces that nouns do not have."""
    return of_any_pieces(rng, held_out) if rng.random() < 0.15 else words.varied_word(rng, held_out)


def change(talk: Conversation):
    """A fact, others, then a change of the first, once or twice; between all of them may be talk about other things."""
    kind = draw(talk.rng)
    _tell(talk, kind)
    kept = _tell(talk) if talk.rng.random() < 0.5 else []
    for _ in range(talk.rng.choice((1, 1, 1, 2))):
        _others(talk, 1)
        sentence, noted, step = _statement(talk, kind)
        talk.say(sentence, noted, step)
    _others(talk, 1)
    about_user.recall(talk, kind)
    if kept and talk.rng.random() < 0.5:
        about_user.recall(talk, talk.rng.choice(kept))


def places(talk: Conversation):
    """One word of a long list by its place, then others of it."""
    lists.new_list(talk, LENGTHS)
    lists.ask_place(talk)
    for _ in range(talk.rng.choice((0, 1, 2))):
        where, item = lists.position(talk.rng, talk.list)
        question = talk.one_of(ASKED_LATER, o=lists.digits(talk.rng, where))
        talk.say(question, f"The {where} is {item}.", ("nth", where))


def backwards(talk: Conversation):
    """A long list backwards."""
    lists.new_list(talk, LENGTHS)
    lists.ask_backwards(talk)


def said_again(meaning) -> str:
    """What the user told, all of it, in the words that later answers have; nothing if he asked for something.

    The kind stands before its value there, whatever the order was: a later question only has to find its own words.
    """
    if any(name not in _RECALLED for name, *_ in meaning):
        return ""
    first, *others = (_RECALLED[name](*values) for name, *values in meaning)
    return " ".join((f"So {lower_first(first, keep=meaning[0][1:2])}", *others))


_RECALLED = {
    "tell": lambda kind, value: upper_first(FACTS[kind].recalled[0].format(v=value)),
    "pet": lambda kind, name: PET["name_recalled"].format(k=kind, v=name),
    "home": lambda person, city: upper_first(f"{person} lives in {city}."),
    "owner": lambda person, colour, thing: upper_first(
        f"{person} has a {f'{colour} {thing}'.strip()}."
    ),
    "object": lambda thing, place: f"The {thing} is in the {place}.",
    "spot": lambda thing, place: f"The {thing} is {place}.",
}  # what was told → how it is recalled


def _others(talk: Conversation, most: int):
    for _ in range(talk.rng.randint(0, most)):
        talk.rng.choice(OTHERS)(talk)


def _tell(talk: Conversation, kind: str | None = None, pets: float = 0.0) -> list[str]:
    """One to three facts in one message; the kinds of these. `pets` is how often a pet is told among them."""
    rng, kinds = talk.rng, [kind] if kind else []
    for _ in range(rng.choice((1, 1, 2, 3)) - len(kinds)):
        kinds.append(rng.choice(words.RELATIVES) if rng.random() < 0.3 else draw(rng))
    kinds = list(dict.fromkeys(kinds))
    told = [_statement(talk, kind) for kind in kinds]
    if rng.random() < pets:
        told.insert(rng.randrange(len(told) + 1), _pet(talk))
    noted = (
        told[0][1] if len(told) == 1 or rng.random() < 0.3 else "Thank you, I will remember that."
    )
    message = about_user.joined(talk, [sentence for sentence, _, _ in told])
    talk.say(message, noted, *(step for _, _, step in told))
    return kinds


def _statement(talk: Conversation, kind: str) -> tuple[str, str, tuple]:
    """As about_user's, oftener with the value first; a change may be told in the words of a first statement."""
    first, value = FIRST_TEXTS[kind] or FACTS[kind].told, ""
    if kind in BEGINNING and talk.rng.random() < 0.15:
        value = of_any_pieces(talk.rng, talk.held_out)
        value = talk.cased(value.title() if kind in PROPER else value)
    return about_user.statement(talk, kind, first if talk.rng.random() < FIRST else (), value)


def _ask_pet(talk: Conversation, kind: str):
    """The name of a pet, or that it was not told."""
    question, name = talk.one_of(PET["name_asked"], k=kind), talk.pets.get(kind)
    answer = (
        PET["name_recalled"].format(k=kind, v=name)
        if name
        else talk.one_of(PET["kind_missing"], k=kind)
    )
    talk.say(about_user.asked(talk, question), answer, ("ask pet", kind))


def _pet(talk: Conversation) -> tuple[str, str, tuple]:
    """A pet, its name oftener first than about_user tells it: what is said, what could be answered, what it means."""
    kind, name = about_user.animal(talk), talk.name()
    about_user.keep_pet(talk, kind, name)
    sentence = talk.one_of(PET_FIRST if talk.rng.random() < FIRST else PET["told"], k=kind, v=name)
    return (
        upper_first(sentence),
        upper_first(talk.one_of(PET["noted"], k=kind, v=name)),
        ("pet", kind, name),
    )
