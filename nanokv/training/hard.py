"""Exchanges of the last stage, more of what is hard: values that a message begins with, before the reader knows what
they are; facts that change and are asked for after other talk; places in long lists.
"""

from nanokv.training import about_user, lists, small_talk, sums, words
from nanokv.training.conversation import Conversation, upper_first
from nanokv.training.facts import FACTS, PET, draw
from nanokv.training.phrases import phrases

ASKED_LATER = phrases("requests")["remembered"]["nth"]
OTHERS = (sums.add, sums.count, small_talk.cache_question, lists.repeat, small_talk.small_talk, small_talk.unknown)
LENGTHS = (3, 4, 5, 5, 6, 6, 7, 7, 8, 8)
FIRST = 0.55  # how often a statement begins with its value, where it can


def remember(talk: Conversation):
    """One to six facts in one to three messages, perhaps a pet, other talk, then questions about some of them."""
    kinds = [kind for _ in range(talk.rng.randint(1, 3)) for kind in _tell(talk)]
    pet = _tell_pet(talk) if talk.rng.random() < 0.35 else None
    _others(talk, 2)
    kinds = list(dict.fromkeys(kinds))
    for kind in talk.rng.sample(kinds, min(len(kinds), talk.rng.choice((1, 2, 2, 3)))):
        about_user.recall(talk, kind)
    if pet:
        question = talk.one_of(PET["name_asked"], k=pet)
        answer = PET["name_recalled"].format(k=pet, v=talk.pets[pet])
        talk.say(about_user.asked(talk, question), answer, ("ask pet", pet))


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
    talk.list = words.distinct(talk.rng, talk.rng.choice(LENGTHS), talk.word)
    lists.ask_place(talk)
    for _ in range(talk.rng.choice((0, 1, 2))):
        where, item = lists.position(talk.rng, talk.list)
        question = talk.one_of(ASKED_LATER, o=lists.digits(talk.rng, where))
        talk.say(question, f"The {where} is {item}.", ("nth", where))


def _others(talk: Conversation, most: int):
    for _ in range(talk.rng.randint(0, most)):
        talk.rng.choice(OTHERS)(talk)


def _tell(talk: Conversation, kind: str | None = None) -> list[str]:
    """One to three facts in one message; their kinds."""
    rng, kinds = talk.rng, [kind] if kind else []
    for _ in range(rng.choice((1, 1, 2, 3)) - len(kinds)):
        kinds.append(rng.choice(words.RELATIVES) if rng.random() < 0.3 else draw(rng))
    kinds = list(dict.fromkeys(kinds))
    told = [_statement(talk, kind) for kind in kinds]
    noted = told[0][1] if len(told) == 1 or rng.random() < 0.3 else "Thank you, I will remember that."
    message = about_user.joined(talk, [sentence for sentence, _, _ in told])
    talk.say(message, noted, *(step for _, _, step in told))
    return kinds


def _statement(talk: Conversation, kind: str) -> tuple[str, str, tuple]:
    """As about_user's, oftener with the value first; a change may be told in the words of a first statement."""
    fact = FACTS[kind]
    first = [text for text in (*fact.told, *fact.changed) if text.startswith("{v}")] or fact.told
    return about_user.statement(talk, kind, first if talk.rng.random() < FIRST else ())


def _tell_pet(talk: Conversation) -> str:
    """A pet, its name oftener first than about_user tells it; its kind."""
    kind, name = about_user.animal(talk), talk.name()
    first = [text for text in PET["told"] if text.startswith("{v}")]
    talk.pets.pop(kind, None)
    talk.pets[kind] = name
    sentence = talk.one_of(first if talk.rng.random() < FIRST else PET["told"], k=kind, v=name)
    talk.say(upper_first(sentence), upper_first(talk.one_of(PET["noted"], k=kind, v=name)), ("pet", kind, name))
    return kind
