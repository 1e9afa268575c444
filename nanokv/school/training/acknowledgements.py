"""Answers of other assistants: other words for a fact that the user gave, or no answer.

A model that finds a fact only where its own answer repeated it loses the fact after another
assistant's answer. In six of ten conversations of the third stage another assistant gives some of
the answers. The model reads them but never learns them: their loss has weight 0.
"""

from random import Random

from nanokv.school.training import words
from nanokv.school.training.conversation import Conversation, upper_first
from nanokv.school.training.phrases import phrases

TEXTS = phrases("acknowledgements")
ACKNOWLEDGED = 0.9  # share of the statements that another assistant answers
ANSWERED = 0.15  # share of the questions that another assistant answers
SILENT = 0.15  # share of its answers to statements that are empty
GENERAL = 0.45  # share of its answers to statements that suit every statement
UNNAMED = {"have", "like", "have relative", "home of"}
STATEMENTS = {"tell", "pet", "home", "owner", "spot"} | UNNAMED
SECTIONS = {"name": "name", "friend": "person"}  # kind of a fact → section of its answers
SECTIONS |= dict.fromkeys(("city", "birthplace", "childhood", "workplace"), "city")
SECTIONS |= dict.fromkeys(words.RELATIVES, "person")


def otherwise(talk: Conversation, meaning: tuple, reply: dict) -> dict:
    """The reply, or the message of another assistant instead of it."""
    rng = talk.rng
    if {name for name, *_ in meaning} <= STATEMENTS:
        if rng.random() >= ACKNOWLEDGED:
            return reply
        if rng.random() < SILENT:
            return foreign("")
        return foreign(acknowledged(rng, meaning))
    if rng.random() >= ANSWERED or any(name == "list" for name, *_ in meaning):
        return reply
    around = rng.choice(TEXTS["around"]["said"])
    return foreign(around.format(a=reply["content"]))


def foreign(text: str) -> dict:
    """A message of another assistant. An empty one is left out where conversations are encoded."""
    return {"role": "assistant", "content": text, "foreign": True}


def acknowledged(rng: Random, meaning: tuple, half: str = "said") -> str:
    """The answer of another assistant to a statement.

    `half`: "said" for training, "held" for the evaluation.
    """
    name, *values = rng.choice(meaning)
    texts = TEXTS[section(name, values)][half]
    if name in UNNAMED or rng.random() < GENERAL:
        texts = TEXTS["any"][half]
    kind = values[0]
    return upper_first(rng.choice(texts).format(v=values[-1], k=kind))


def section(name: str, values: list[str]) -> str:
    """The section of acknowledgements.toml that answers a statement."""
    if name == "pet":
        return "pet"
    if name == "home":
        return "city"
    if name != "tell":
        return "any"
    return SECTIONS.get(values[0], "thing")
