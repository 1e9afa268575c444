"""Exchanges that need no memory but the model's own: KV caches, stories, small talk, and an honest "I don't know"."""

import re

from nanokv.school.training import words
from nanokv.school.training.about_user import asked
from nanokv.school.training.cache_questions import QUESTIONS, ask
from nanokv.school.training.conversation import Conversation, upper_first
from nanokv.school.training.phrases import phrases

_TEXTS = phrases("stories")
PARTS = tuple(_TEXTS["parts"].values())
# (what users say, what nanokv answers).
TALK = [(talk["said"], talk["answered"]) for talk in _TEXTS["talk"]]
GREETINGS, ARITHMETIC, SYSTEM_PROMPTS = (
    _TEXTS["greetings"],
    _TEXTS["arithmetic"],
    _TEXTS["system"]["prompts"],
)
STRANGERS = ("a fox", "an owl", "a small bear", "a friend")
PLACES = (*words.PLACES, "river", "forest", "market", "harbour", "lake", "hill")


def cache_question(talk: Conversation):
    """A question about KV caches; the last phrasing of each is kept for the evaluation."""
    answer, phrasings = talk.rng.choice(QUESTIONS)
    talk.say(
        ask(talk.rng, talk.rng.choice(phrasings[:-1]), talk.stage.wrappers),
        answer,
        ("cache", answer),
    )


def story(talk: Conversation):
    """Five sentences with the characters that the user names."""
    rng, kind = talk.rng, talk.rng.random()
    a, b = words.distinct(
        rng, 2, lambda: talk.name() if rng.random() < 0.7 else f"the {rng.choice(words.ANIMALS)}"
    )
    if kind < 0.6:
        request = talk.one_of(_TEXTS["requests"]["two"], a=a, b=b)
    elif kind < 0.75:
        request, b = talk.one_of(_TEXTS["requests"]["one"], a=a), rng.choice(STRANGERS)
    else:
        a, b = rng.sample(("Mira", "Tom", "the fox", "the owl", "Lina", "the old bear"), 2)
        request = talk.one_of(_TEXTS["requests"]["open"])
    talk.say(request, tale(rng, a, b), ("story", a, b))


def tale(rng, a: str, b: str) -> str:
    """The story of a and b; the second is "a fox" at first and "the fox" from then on."""
    form = {"p": rng.choice(PLACES), "t": rng.choice(words.NOUNS)}
    later = re.sub("^an? ", "the ", b)
    sentences = [
        rng.choice(part).format(a=a, b=later if i else b, **form) for i, part in enumerate(PARTS)
    ]
    return ". ".join(
        upper_first(sentence) for sentence in " ".join(map(upper_first, sentences)).split(". ")
    )


def small_talk(talk: Conversation):
    """Who are you, thank you, hello."""
    if talk.rng.random() < 0.15:
        name = talk.facts.get("name")
        answer = talk.one_of(GREETINGS["by_name" if name else "answered"], v=name)
        return talk.say(talk.one_of(GREETINGS["said"]), answer, ("greet",))
    said, answers = talk.rng.choice(TALK)
    talk.say(talk.rng.choice(said), talk.rng.choice(answers), ("talk",))


def unknown(talk: Conversation):
    """An honest "I don't know that", or that it cannot do it."""
    rng = talk.rng
    city = (
        rng.choice(words.CITIES)
        if rng.random() < 0.5
        else words.invent(rng, talk.held_out).capitalize()
    )
    form = {"c": talk.cased(city), "n": talk.name(), "w": words.invent(rng, talk.held_out)}
    form |= {"t": rng.choice(words.NOUNS), "f": rng.choice(words.FOODS)}
    section = "unknown" if rng.random() < 0.75 else "impossible"
    request = talk.one_of(_TEXTS[section]["asked"], **form)
    talk.say(asked(talk, request), talk.one_of(_TEXTS[section]["answered"]), ("refuse", section))
