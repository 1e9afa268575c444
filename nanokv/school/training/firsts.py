"""Exchanges of the third stage: the usual first sentences of a chat, in several forms."""

import re
from random import Random

from nanokv.school.training import about_user, words
from nanokv.school.training.conversation import Conversation, lower_first, upper_first
from nanokv.school.training.facts import FACTS
from nanokv.school.training.phrases import phrases

TEXTS = phrases("firsts")
KINDS = {kind["name"]: kind for kind in TEXTS["kind"]}
WEIGHTS = dict.fromkeys(KINDS, 2.0)  # kind → how often
WEIGHTS |= {
    "greeting": 6.0,
    "who": 4.0,
    "skills": 4.0,
    "how": 4.0,
    "remark": 14.0,
    "unknown": 8.0,
    "impossible": 5.0,
    "sad": 4.0,
    "thanks": 3.0,
    "sizes": 0.0,  # has another exchange
}
MISSPELT = 0.12  # share of the sentences with a slip
LED = 0.1  # share with a greeting before them
TAILED = 0.12  # share with something behind them
CAPITAL = 0.4  # share that begins with a capital whatever the file has
GREETED = re.compile(r"(hi|hey|hello|hallo|good|ok|oh|yo)\b", re.IGNORECASE)


def first(talk: Conversation) -> None:
    """Hi! Who are you? I had soup for lunch."""
    name = talk.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    say(talk, name)


def sizes(talk: Conversation) -> None:
    """How big is the KV cache of Qwen3-8B? The answer names the command."""
    say(talk, "sizes")


def say(talk: Conversation, name: str, half: str = "said") -> None:
    """Add a sentence of this kind and its answer.

    `half` is said for the training, held for the evaluation.
    """
    rng, kind = talk.rng, KINDS[name]
    text = formed(rng, rng.choice(kind[half]))
    text = text.format(**values(talk, half))
    talk.say(text, rng.choice(kind["answer"]), ("first", name))


def values(talk: Conversation, half: str) -> dict[str, str]:
    """The values of a sentence. The models that the evaluation names are never trained on."""
    rng, texts = talk.rng, TEXTS["sizes"]
    held = half == "held"
    prefix = "held_" if held else ""
    model = rng.choice(texts[f"{prefix}models"])
    if rng.random() < 0.3:
        model = f"{words.invent(rng, held).capitalize()} {rng.randint(1, 99)}B"
    return {
        "k": rng.choice(words.ANIMALS),
        "r": rng.choice(words.RELATIVES),
        "t": about_user.new_thing(talk, ()),
        "f": rng.choice(words.FOODS),
        "n": talk.name(),
        "c": talk.cased(FACTS["city"].value(rng, talk.held_out)),
        "j": rng.choice(words.JOBS),
        "m": talk.cased(model),
        "z": rng.choice(texts[f"{prefix}contexts"]),
    }


def formed(rng: Random, text: str) -> str:
    """The sentence in one of its forms: with a slip, with words before or behind it."""
    if rng.random() < MISSPELT:
        text = misspelt(rng, text)
    if rng.random() < LED and not GREETED.match(text):
        lead = rng.choice(TEXTS["lead_ins"]["all"])
        return lead.format(l=lower_first(text), s=upper_first(text))
    if rng.random() < TAILED:
        tail = rng.choice(TEXTS["lead_ins"]["tails"])
        text = tail.format(s=text.rstrip(".?! "))
    if rng.random() < CAPITAL:
        return upper_first(text)
    return text


def misspelt(rng: Random, text: str) -> str:
    """One word of four letters or more with two letters swapped, one missing, or one twice."""
    found = list(re.finditer(r"(?<!{)[A-Za-z]{4,}", text))
    if not found:
        return text
    word = rng.choice(found)
    i = rng.randrange(word.start() + 1, word.end() - 1)
    slips = (
        text[:i] + text[i + 1] + text[i] + text[i + 2 :],
        text[:i] + text[i + 1 :],
        text[: i + 1] + text[i:],
    )
    return rng.choice(slips)


def introduce(talk: Conversation) -> None:
    """I'm Ada, and you?"""
    talk.say(*about_user.statement(talk, "name", TEXTS["names"]["told"]))
    if talk.rng.random() < 0.4:
        about_user.recall(talk, "name")
