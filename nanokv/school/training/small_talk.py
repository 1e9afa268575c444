"""Exchanges that need no memory of the conversation: KV caches, stories, small talk, refusals.

Each docstring of an exchange gives an example: "message of the user" → "answer".
"""

import re
from random import Random

from nanokv.school.training import words
from nanokv.school.training.about_user import asked
from nanokv.school.training.cache_questions import QUESTIONS, ask_in
from nanokv.school.training.conversation import Conversation, upper_first
from nanokv.school.training.phrases import phrases

_TEXTS = phrases("stories")
PARTS = tuple(_TEXTS["parts"].values())  # a sentence of each makes a story
TALK = [(talk["said"], talk["answered"]) for talk in _TEXTS["talk"]]  # (messages, answers)
GREETINGS = _TEXTS["greetings"]
ARITHMETIC = _TEXTS["arithmetic"]
SYSTEM_PROMPTS = _TEXTS["system"]["prompts"]
STRANGERS = ("a fox", "an owl", "a small bear", "a friend")
PLACES = (*words.PLACES, "river", "forest", "market", "harbour", "lake", "hill")


def cache_question(talk: Conversation) -> None:
    """The user asks about KV caches, in any phrasing but the last: that one is held out.

    "What is a KV cache?" → an answer of cache_questions.toml
    """
    answer, phrasings = talk.rng.choice(QUESTIONS)
    phrasing = talk.rng.choice(phrasings[:-1])
    talk.say(ask_in(talk, phrasing), answer, ("cache", answer))


def size_of_caches(talk: Conversation) -> None:
    """The user asks how large a KV cache is, without the name of a model."""
    sizes = [question for question in QUESTIONS if question[0].startswith("Two times")]
    answer, phrasings = sizes[0]
    phrasing = talk.rng.choice(phrasings[:-1])
    talk.say(ask_in(talk, phrasing), answer, ("cache", answer))


def story(talk: Conversation) -> None:
    """The user asks for a story, mostly with one or two characters that they name.

    "Tell me a story about Ada and Leo." → five sentences about Ada and Leo
    """
    rng = talk.rng
    kind = rng.random()
    a, b = words.distinct(rng, 2, lambda: _character(talk))
    if kind < 0.6:
        request = talk.one_of(_TEXTS["requests"]["two"], a=a, b=b)
    elif kind < 0.75:
        request = talk.one_of(_TEXTS["requests"]["one"], a=a)
        b = rng.choice(STRANGERS)
    else:
        a, b = rng.sample(("Mira", "Tom", "the fox", "the owl", "Lina", "the old bear"), 2)
        request = talk.one_of(_TEXTS["requests"]["open"])
    talk.say(request, tale(rng, a, b), ("story", a, b))


def _character(talk: Conversation) -> str:
    """A name or an animal: Ada, the fox."""
    if talk.rng.random() < 0.7:
        return talk.name()
    return f"the {talk.rng.choice(words.ANIMALS)}"


def tale(rng: Random, a: str, b: str) -> str:
    """The story of a and b. "a fox" is "the fox" after its first sentence."""
    form = {"p": rng.choice(PLACES), "t": rng.choice(words.NOUNS)}
    sentences = []
    for part in PARTS:
        sentence = rng.choice(part).format(a=a, b=b, **form)
        sentences.append(upper_first(sentence))
        b = re.sub("^an? ", "the ", b)
    # A sentence of a part may be two.
    text = " ".join(sentences).split(". ")
    return ". ".join(map(upper_first, text))


def small_talk(talk: Conversation) -> None:
    """The user greets, gives thanks, asks who the assistant is.

    "Hi!" → "Hello, Ada!"
    """
    if talk.rng.random() < 0.15:
        name = talk.facts.get("name")
        answers = GREETINGS["answered"]
        if name:
            answers = GREETINGS["by_name"]
        answer = talk.one_of(answers, v=name)
        talk.say(talk.one_of(GREETINGS["said"]), answer, ("greet",))
        return
    said, answers = talk.rng.choice(TALK)
    talk.say(talk.rng.choice(said), talk.rng.choice(answers), ("talk",))


def unknown(talk: Conversation) -> None:
    """The user asks for something that a very small model does not know or cannot do.

    "What is the capital of Oslo?" → "I don't know that. I am a very small model."
    """
    rng = talk.rng
    if rng.random() < 0.5:
        city = rng.choice(words.CITIES)
    else:
        city = words.invent(rng, talk.held_out).capitalize()
    form = {
        "c": talk.cased(city),
        "n": talk.name(),
        "w": words.invent(rng, talk.held_out),
        "t": rng.choice(words.NOUNS),
        "f": rng.choice(words.FOODS),
    }
    section = "impossible"
    if rng.random() < 0.75:
        section = "unknown"
    request = talk.one_of(_TEXTS[section]["asked"], **form)
    talk.say(asked(talk, request), talk.one_of(_TEXTS[section]["answered"]), ("refuse", section))
