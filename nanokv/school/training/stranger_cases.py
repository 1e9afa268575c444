"""Cases of the evaluation from the first talk with a new user.

Facts without a name, answers of another assistant, first sentences, emoji and other scripts,
sizes of caches. Where a file has sentences for the evaluation, the cases use those.
"""

import re

from nanokv.school.training import (
    about_user,
    acknowledgements,
    cache_questions,
    facts,
    firsts,
    lists,
    scripts,
    small_talk,
    sums,
    unnamed,
    words,
)
from nanokv.school.training.conversation import Conversation
from nanokv.school.training.facts import FACTS, PET
from nanokv.school.training.judging import NOT_TOLD, Case, Judged, holds, word

FILLERS = (sums.add, sums.count, lists.repeat, small_talk.small_talk, small_talk.cache_question)
UNNAMED = ("animal", "animal", "animal", "relative", "home", "like", "thing")
THE_NAME, THE_FACT = "the name", "the fact"  # groups of questions about facts without a name


def script(talk: Conversation) -> tuple[str, ...]:
    """The user's messages."""
    return tuple(message["content"] for message in talk.messages if message["role"] == "user")


def exactly(texts: list[str]) -> str:
    """A regular expression for an answer that is one of these."""
    return "^(?:" + "|".join(re.escape(text) for text in texts) + ")$"


def _fill(talk: Conversation) -> None:
    for _ in range(talk.rng.randint(0, 1)):
        talk.rng.choice(FILLERS)(talk)


# --- facts without a name -------------------------------------------------------------------------


def unnamed_case(talk: Conversation) -> Judged:
    """I have a cat. Then a question for its name, which is unknown, or for the cat."""
    rng = talk.rng
    section = rng.choice(UNNAMED)
    if section == "animal":
        return _animal_case(talk)
    if section in ("relative", "home"):
        return _relative_case(talk, section)
    texts = unnamed.TEXTS[section]
    value = unnamed.a(about_user.new_thing(talk, ()))
    if section == "like":
        value = unnamed.liked(talk)
    talk.say(rng.choice(texts["held"]).format(v=value, a=value), "?", ("like", value))
    _fill(talk)
    talk.say(about_user.asked(talk, rng.choice(texts["asked"])), "?", ("ask",))
    return _judged(talk, word(value), THE_FACT)


def _animal_case(talk: Conversation) -> Judged:
    rng = talk.rng
    kind = unnamed.tell_animal(talk, "held")
    what = talk.unnamed[kind]
    _fill(talk)
    if rng.random() < 0.5:
        unnamed.ask_name(talk, kind)
        return _judged(talk, NOT_TOLD, THE_NAME)
    question = rng.choice(unnamed.ANIMAL["asked"])
    talk.say(about_user.asked(talk, question), "?", ("ask",))
    return _judged(talk, word(what.removeprefix("a ").removeprefix("an ")), THE_FACT)


def _relative_case(talk: Conversation, section: str) -> Judged:
    rng, kind = talk.rng, talk.rng.choice(words.RELATIVES)
    city = ""
    if section == "home":
        city = unnamed.tell_relative_home(talk, kind, "held")
    else:
        told = rng.choice(unnamed.TEXTS["relative"]["held"]).format(r=kind)
        talk.say(told, "?", ("have relative", kind))
    _fill(talk)
    if city and rng.random() < 0.5:
        question = talk.one_of(unnamed.HOME_ASKED, r=kind)
        talk.say(about_user.asked(talk, question), "?", ("ask",))
        return _judged(talk, word(city), THE_FACT)
    talk.say(about_user.asked(talk, talk.one_of(FACTS[kind].asked)), "?", ("ask",))
    return _judged(talk, NOT_TOLD, THE_NAME)


def _judged(talk: Conversation, right: str, group: str) -> Judged:
    return Judged(script(talk), (right,), group=group, invents_nothing=True)


# --- other assistants -----------------------------------------------------------------------------


def foreign_case(talk: Conversation) -> Case:
    """One to three facts, each answered by another assistant, then a question for one of them."""
    rng = talk.rng
    for _ in range(rng.randint(1, 3)):
        about_user.tell(talk, facts.draw(rng, talk.facts))
    if rng.random() < 0.4:
        about_user.tell_pet(talk)
    said = tuple(acknowledgements.acknowledged(rng, tuple(meaning), "held") for meaning in talk.log)
    told = [step[-1] for meaning in talk.log for step in meaning]
    if talk.pets and rng.random() < 0.4:
        kind = rng.choice(list(talk.pets))
        question = talk.one_of(PET["name_asked"], k=kind)
        expected = talk.pets[kind]
    else:
        kind = rng.choice(list(talk.facts))
        question = talk.one_of(FACTS[kind].asked)
        expected = talk.facts[kind]
    talk.say(about_user.asked(talk, question), "?", ("ask", kind))
    turns = script(talk)
    others = tuple(value for value in told if not holds(f"{turns[-1]} {expected}", value))
    return Case(turns, expected, others=others, said=said)


# --- nothing invented -----------------------------------------------------------------------------


def invention_case(talk: Conversation) -> Judged:
    """One or two sentences without a name; in half of the cases then a question for one."""
    rng = talk.rng
    for _ in range(rng.randint(1, 2)):
        if rng.random() < 0.5:
            firsts.say(talk, rng.choice(("remark", "remark", "sad", "fine")), "held")
        else:
            _tell_unnamed(talk)
    if rng.random() < 0.5:
        return _judged(talk, r"\w", "statements")
    if rng.random() < 0.4:
        kind = rng.choice([kind for kind in words.ANIMALS if kind not in talk.unnamed])
        question = talk.one_of(PET["name_asked"], k=kind)
    else:
        question = talk.one_of(FACTS[facts.draw(rng, talk.unnamed)].asked)
    talk.say(about_user.asked(talk, question), "?", ("ask",))
    return _judged(talk, NOT_TOLD, "questions")


def _tell_unnamed(talk: Conversation) -> None:
    rng = talk.rng
    half = rng.choice(("told", "held"))
    if rng.random() < 0.6:
        unnamed.tell_animal(talk, half)
        return
    kind = rng.choice(words.RELATIVES)
    talk.unnamed[kind] = unnamed.a(kind)
    told = rng.choice(unnamed.TEXTS["relative"][half]).format(r=kind)
    talk.say(told, "?", ("have relative", kind))


# --- first sentences ------------------------------------------------------------------------------


def first_case(talk: Conversation, half: str = "said") -> Judged:
    """A first sentence of any kind, in a form that the seed makes."""
    name = talk.rng.choices(list(firsts.WEIGHTS), list(firsts.WEIGHTS.values()))[0]
    firsts.say(talk, name, half)
    return _judged(talk, exactly(firsts.KINDS[name]["answer"]), "")


def new_first_case(talk: Conversation) -> Judged:
    """A first sentence that is not in the training."""
    return first_case(talk, "held")


def size_case(talk: Conversation) -> Judged:
    """How big is the KV cache of a model? Neither model nor sentence is in the training."""
    firsts.say(talk, "sizes", "held")
    return _judged(talk, "nanokv memory", "")


# --- emoji and other scripts ----------------------------------------------------------------------


def script_case(talk: Conversation) -> Judged | Case:
    """Emoji beside a sentence, or a message in another script or language; none in the training."""
    rng = talk.rng
    dice = rng.random()
    if dice < 0.4:
        scripts.unreadable(talk, "held")
        return _judged(talk, "English", "unreadable")
    if dice < 0.7:
        case = first_case(talk)
        turns = (scripts.with_emoji(rng, case.turns[0], "held"),)
        return Judged(turns, case.right, group="emoji", invents_nothing=True)
    if dice < 0.8:
        answer, phrasings = rng.choice(cache_questions.QUESTIONS)
        question = cache_questions.ask(rng, rng.choice(phrasings[:-1]))
        turns = (scripts.with_emoji(rng, question, "held"),)
        return Judged(turns, (exactly([answer]),), group="emoji")
    about_user.tell(talk, facts.draw(rng))
    kind = rng.choice(list(talk.facts))
    talk.say(talk.one_of(FACTS[kind].asked), "?", ("ask", kind))
    asked = tuple(scripts.with_emoji(rng, turn, "held") for turn in script(talk))
    return Case(asked, talk.facts[kind], group="recall")
