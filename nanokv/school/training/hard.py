"""Exchanges of the second stage: more of what a small model finds hard.

Values at the beginning of a message, before the reader knows what they are; many facts in one
message; introductions; facts that change and are asked for much later; long lists.

Each docstring of an exchange gives an example: "message of the user" → "answer". Statements are
answered by said_again, whatever answer the exchange itself has.
"""

import re
from collections.abc import Callable, Sequence
from random import Random

from nanokv.school.training import about_user, lists, small_talk, sums, words
from nanokv.school.training.about_user import REMEMBERED, Statement
from nanokv.school.training.conversation import Conversation, Step, lower_first, upper_first
from nanokv.school.training.facts import CODES, FACTS, PET, draw
from nanokv.school.training.phrases import phrases

Ask = Callable[[Conversation, str], None]
SENTENCES = " ".join(str(phrases(name)) for name in ("facts", "requests", "nearby"))
# Pieces of these make words such as "withme", which begin with tokens that words of lists lack.
EVERY_WORD = sorted(set(re.findall("[a-z]{4,}", SENTENCES.lower())))
ASKED_LATER = phrases("requests")["remembered"]["nth"]
OTHERS = (  # exchanges about something else
    sums.add,
    sums.count,
    small_talk.cache_question,
    lists.repeat,
    small_talk.small_talk,
    small_talk.unknown,
)
LENGTHS = (3, 4, 5, 5, 6, 6, 7, 7, 8, 8)
FIRST = 0.55  # share of statements that begin with their value, where the kind permits it
FIRST_TEXTS = {  # kind → the phrasings that begin with the value
    kind: [text for text in (*fact.told, *fact.changed) if text.startswith("{v}")]
    for kind, fact in FACTS.items()
    if kind not in CODES
}
INTRODUCTION = phrases("introductions")
UNKNOWN = 0.25  # share of rounds of questions in which one asks for something unknown
PET_FIRST = [text for text in PET["told"] if text.startswith("{v}")]
INTRODUCED = ["This is {v}.", "It's {v} here, by the way.", *FIRST_TEXTS["name"]]
PROPER = {  # kinds whose values begin with a capital
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
POOLED = ("age", "number", "friends", "season")  # kinds whose values are no single words
BEGINNING = [kind for kind, texts in FIRST_TEXTS.items() if texts and kind not in POOLED]


def remember(talk: Conversation) -> None:
    """Facts and pets in one to three messages, other exchanges, then questions about some of them.

    "What is my name?" → "Your name is Ada."
    """
    rng = talk.rng
    before = dict(talk.pets)
    kinds: list[str] = []
    for _ in range(rng.randint(1, 3)):
        kinds += _tell(talk, pets=0.3)
    _others(talk, 2)
    kinds = _unique(kinds)
    questions = rng.sample(kinds, min(len(kinds), rng.choice((1, 2, 2, 3))))
    if rng.random() < UNKNOWN:
        questions.insert(rng.randrange(len(questions) + 1), draw(rng, talk.facts))
    for kind in questions:
        about_user.recall(talk, kind)
    pets = [kind for kind, name in talk.pets.items() if before.get(kind) != name]
    if not pets:
        return
    if rng.random() < UNKNOWN:
        pets = [kind for kind in words.ANIMALS if kind not in talk.pets]
    _ask_pet(talk, rng.choice(pets))


def remember_all(talk: Conversation) -> None:
    """As remember, but then a question for each of up to four facts and pets, in any order.

    So most answers of the conversation are values that no earlier answer has.
    """
    rng = talk.rng
    facts = dict(talk.facts)
    pets = dict(talk.pets)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            about_user.tell(talk)
        else:
            _tell(talk, pets=0.3)
    if rng.random() < 0.3:
        talk.say(*_pet(talk))
    _others(talk, 1)
    told: list[tuple[Ask, str]] = [
        (about_user.recall, kind) for kind, it in talk.facts.items() if facts.get(kind) != it
    ]
    told += [(_ask_pet, kind) for kind, it in talk.pets.items() if pets.get(kind) != it]
    questions = rng.sample(told, min(len(told), 4))
    if rng.random() < UNKNOWN:
        unknown = draw(rng, talk.facts)
        questions.insert(rng.randrange(len(questions) + 1), (about_user.recall, unknown))
    for ask, kind in questions:
        ask(talk, kind)


def _unique(kinds: list[str]) -> list[str]:
    """The kinds without repetitions, in their order."""
    return list(dict.fromkeys(kinds))


def begin(talk: Conversation) -> None:
    """The user states a fact or a pet with a made-up word first, and may ask for it at once.

    "Teavou is my favourite drink." → "So your favourite drink is teavou."
    """
    rng = talk.rng
    if rng.random() < 0.25:
        kind = about_user.animal(talk)
        name = talk.cased(_new_value(talk).title())
        about_user.keep_pet(talk, kind, name)
        message = upper_first(talk.one_of(PET_FIRST, k=kind, v=name))
        talk.say(message, f"{name} the {kind}.", ("pet", kind, name))
        return
    kind = rng.choice(BEGINNING)
    value = _as_value_of(talk, kind, _new_value(talk))
    talk.say(*about_user.statement(talk, kind, FIRST_TEXTS[kind], value))
    if rng.random() < 0.3:
        about_user.recall(talk, kind)


def _as_value_of(talk: Conversation, kind: str, value: str) -> str:
    """The value with capitals where the kind has them, as this user types it."""
    if kind in PROPER:
        value = value.title()
    return talk.cased(value)


def introduce(talk: Conversation) -> None:
    """The user says who they are, alone or beside another fact; later they ask for their name.

    "This is Ada. I live in Oslo." → "So your name is Ada. You live in Oslo."
    """
    rng = talk.rng
    told = [about_user.statement(talk, "name", INTRODUCED)]
    if rng.random() < 0.5:
        place = rng.randrange(2)
        told.insert(place, _statement(talk, draw(rng, ("name",))))
    message = about_user.joined(talk, [each.sentence for each in told])
    talk.say(message, told[0].answer, *(each.step for each in told))
    _others(talk, 1)
    about_user.recall(talk, "name")


def introduce_at_once(talk: Conversation) -> None:
    """The user says their name and several facts in one sentence, and may ask for some of them.

    "I'm Ada, a nurse from Oslo." → "So your name is Ada. You work as a nurse. You live in Oslo."
    """
    kinds = tell_at_once(talk)
    _others(talk, 1)
    for kind in talk.rng.sample(kinds, min(len(kinds), talk.rng.choice((0, 1, 1, 2)))):
        about_user.recall(talk, kind)


def tell_at_once(talk: Conversation) -> list[str]:
    """The first exchange of introduce_at_once. Returns the kinds of its facts."""
    sentence = talk.rng.choice(INTRODUCTION["told"])
    texts = {}
    steps = {}
    for place in re.findall(r"{(\w+)}", sentence):
        texts[place], steps[place] = _clause(talk, place)
    message = talk.rng.choice(INTRODUCTION["hello"]) + sentence.format(**texts)
    message = re.sub(r"(?:^|[.!] )\w", lambda first: first[0].upper(), message)
    talk.say(message, REMEMBERED, *steps.values())
    return [kind for name, kind, _ in steps.values() if name == "tell"]


def _clause(talk: Conversation, place: str) -> tuple[str, Step]:
    """The words for one place {name} of an introduction, and their meaning."""
    if place == "pet":
        kind = about_user.animal(talk)
        name = talk.name()
        about_user.keep_pet(talk, kind, name)
        return talk.one_of(INTRODUCTION["pet"], k=kind, v=name), ("pet", kind, name)
    kind = place
    if place == "other":
        kind = draw(talk.rng, ("name", "city", "age", "job", "friends"))
    value = about_user.told_value(talk, kind)
    about_user.keep(talk, kind, value)
    texts = ["{v}"]
    if place == "name":
        texts = INTRODUCTION["name"]
    elif place == "other":
        texts = FACTS[kind].told[:3]
    text = talk.one_of(texts, v=value).rstrip(".")
    if place == "other":
        text = lower_first(text, talk.capitals)
    return text, ("tell", kind, value)


def friends(talk: Conversation) -> None:
    """The user names several friends, gives a list of words, and asks for the friends.

    "Who are my friends?" → "Your friends are Leo, Mia and Tom."
    """
    talk.say(*about_user.statement(talk, "friends"))
    talk.rng.choice((lists.repeat, lists.reverse, lists.nth, lists.remember))(talk)
    about_user.recall(talk, "friends")


def _new_value(talk: Conversation) -> str:
    """One or two made-up words."""
    rng = talk.rng
    make = rng.choice((words.splice, of_any_pieces, words.invent))
    values = words.distinct(rng, rng.choice((1, 1, 1, 2)), lambda: make(rng, talk.held_out))
    return " ".join(values)


def of_any_pieces(rng: Random, held_out: bool) -> str:
    """A word made of pieces of any words of the corpus: secrai, withme, favouton."""
    return words.splice(rng, held_out, EVERY_WORD)


def word(rng: Random, held_out: bool) -> str:
    """A word for a list, now and then made of pieces that nouns do not have."""
    if rng.random() < 0.15:
        return of_any_pieces(rng, held_out)
    return words.varied_word(rng, held_out)


def change(talk: Conversation) -> None:
    """A fact, perhaps others, then one or two changes of the first; other exchanges lie between.

    "Where do I live?" → "You live in Rome.", the newest city
    """
    kind = draw(talk.rng)
    _tell(talk, kind)
    kept = []
    if talk.rng.random() < 0.5:
        kept = _tell(talk)
    for _ in range(talk.rng.choice((1, 1, 1, 2))):
        _others(talk, 1)
        talk.say(*_statement(talk, kind))
    _others(talk, 1)
    about_user.recall(talk, kind)
    if kept and talk.rng.random() < 0.5:
        about_user.recall(talk, talk.rng.choice(kept))


def places(talk: Conversation) -> None:
    """The user asks for one item of a long list, then for up to two others.

    "What was the fifth word?" → "The fifth is lamp."
    """
    lists.new_list(talk, LENGTHS)
    lists.ask_place(talk)
    for _ in range(talk.rng.choice((0, 1, 2))):
        where, item = lists.position(talk.rng, talk.list)
        question = talk.one_of(ASKED_LATER, o=lists.digits(talk.rng, where))
        talk.say(question, f"The {where} is {item}.", ("nth", where))


def backwards(talk: Conversation) -> None:
    """The user asks to reverse a long list.

    "Reverse: moon, chair, lamp" → "Reversed: lamp, chair, moon."
    """
    lists.new_list(talk, LENGTHS)
    lists.ask_backwards(talk)


def said_again(meaning: Sequence[Step]) -> str:
    """The answer to a message that only states things: all of it again, in the words of a recall.

    "So your name is Ada. You live in Oslo." An empty string if the message asks for something.

    These words put the kind before the value, whatever the user's order was. So a later question
    only has to find its own words in the conversation.
    """
    sentences = [_recalled(step) for step in meaning]
    if "" in sentences:
        return ""
    first, *others = sentences
    return " ".join((f"So {lower_first(first, keep=meaning[0][1:2])}", *others))


def _recalled(step: Step) -> str:
    """The sentence that recalls one statement; empty for a step that states nothing."""
    match step:
        case ("tell", kind, value):
            return upper_first(FACTS[kind].recalled[0].format(v=value))
        case ("pet", kind, name):
            return PET["name_recalled"].format(k=kind, v=name)
        case ("home", person, city):
            return upper_first(f"{person} lives in {city}.")
        case ("owner", person, colour, thing):
            coloured = f"{colour} {thing}".strip()
            return upper_first(f"{person} has a {coloured}.")
        case ("object", thing, place):
            return f"The {thing} is in the {place}."
        case ("spot", thing, place):
            return f"The {thing} is {place}."
    return ""


def _others(talk: Conversation, most: int) -> None:
    """Up to `most` exchanges about something else."""
    for _ in range(talk.rng.randint(0, most)):
        talk.rng.choice(OTHERS)(talk)


def _tell(talk: Conversation, kind: str | None = None, pets: float = 0.0) -> list[str]:
    """The user states one to three facts in one message. Returns their kinds.

    `kind` is the first of them. With probability `pets`, the message mentions a pet too.
    """
    rng = talk.rng
    kinds: list[str] = []
    if kind:
        kinds.append(kind)
    for _ in range(rng.choice((1, 1, 2, 3)) - len(kinds)):
        if rng.random() < 0.3:
            kinds.append(rng.choice(words.RELATIVES))
        else:
            kinds.append(draw(rng))
    kinds = _unique(kinds)
    told = [_statement(talk, each) for each in kinds]
    if rng.random() < pets:
        place = rng.randrange(len(told) + 1)
        told.insert(place, _pet(talk))
    answer = REMEMBERED
    if len(told) == 1 or rng.random() < 0.3:
        answer = told[0].answer
    message = about_user.joined(talk, [each.sentence for each in told])
    talk.say(message, answer, *(each.step for each in told))
    return kinds


def _statement(talk: Conversation, kind: str) -> Statement:
    """As about_user.statement, but more often with the value first, and now and then made up.

    A change of a fact may have the words of a first statement.
    """
    value = ""
    if kind in BEGINNING and talk.rng.random() < 0.15:
        value = _as_value_of(talk, kind, of_any_pieces(talk.rng, talk.held_out))
    texts: Sequence[str] = ()
    if talk.rng.random() < FIRST:
        texts = FIRST_TEXTS[kind] or FACTS[kind].told
    return about_user.statement(talk, kind, texts, value)


def _ask_pet(talk: Conversation, kind: str) -> None:
    """The user asks for the name of a pet, which may be unknown.

    "What is my dog called?" → "Your dog is called Miso."
    """
    question = talk.one_of(PET["name_asked"], k=kind)
    name = talk.pets.get(kind)
    if name:
        answer = PET["name_recalled"].format(k=kind, v=name)
    else:
        answer = talk.one_of(PET["kind_missing"], k=kind)
    talk.say(about_user.asked(talk, question), answer, ("ask pet", kind))


def _pet(talk: Conversation) -> Statement:
    """A statement about a new pet, more often with its name first than in about_user."""
    kind = about_user.animal(talk)
    name = talk.name()
    about_user.keep_pet(talk, kind, name)
    texts = PET["told"]
    if talk.rng.random() < FIRST:
        texts = PET_FIRST
    sentence = talk.one_of(texts, k=kind, v=name)
    answer = talk.one_of(PET["noted"], k=kind, v=name)
    return Statement(upper_first(sentence), upper_first(answer), ("pet", kind, name))
