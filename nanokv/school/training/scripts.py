"""Exchanges of the third stage with emoji, other scripts and other languages.

Emoji beside a sentence change nothing. A message that depends on them, or one in another script
or language, is answered with what the model can read.
"""

from collections.abc import Callable
from random import Random

from nanokv.school.training import about_user, firsts, hard, small_talk, strangers, sums, unnamed
from nanokv.school.training.conversation import Conversation, upper_first
from nanokv.school.training.phrases import phrases

TEXTS = phrases("scripts")
EMOJI = {"said": TEXTS["emoji"].split(), "held": TEXTS["emoji_held"].split()}
CHARS = {"said": TEXTS["chars"], "held": TEXTS["chars_held"]}
HELD_PHRASES = {phrase.rstrip("?!").capitalize() for phrase in TEXTS["languages_held"]}
Block = tuple[int, int]  # first and last code point
BLOCKS: tuple[Block, ...] = (  # of scripts that are not Latin
    (0x4E00, 0x9FA5),
    (0x4E00, 0x9FA5),
    (0x3042, 0x3093),
    (0x30A2, 0x30F3),
    (0xAC00, 0xD7A3),
    (0x0410, 0x044F),
    (0x03B1, 0x03C9),
    (0x0627, 0x064A),
    (0x05D0, 0x05EA),
    (0x0905, 0x0939),
    (0x0E01, 0x0E2E),
)
PICTURES: tuple[Block, ...] = (
    (0x1F300, 0x1F5FF),
    (0x1F600, 0x1F64F),
    (0x1F680, 0x1F6C5),
    (0x1F900, 0x1F9FF),
)
DECORATED: dict[Callable, float] = {  # exchange with emoji → how often
    firsts.first: 16,
    small_talk.small_talk: 5,
    about_user.tell: 5,
    about_user.recall: 5,
    hard.introduce: 1,
    sums.add: 2,
    small_talk.cache_question: 2,
    strangers.chat: 1,
    unnamed.animal: 2,
}


def decorated(talk: Conversation) -> None:
    """An exchange with emoji in the user's messages."""
    begin = len(talk.messages)
    talk.rng.choices(list(DECORATED), list(DECORATED.values()))[0](talk)
    for message in talk.messages[begin:]:
        if message["role"] == "user" and talk.rng.random() < 0.8:
            message["content"] = with_emoji(talk.rng, message["content"])


def with_emoji(rng: Random, text: str, half: str = "said") -> str:
    """The text with one to three emoji behind it or before it."""
    signs = emoji(rng, half)
    dice = rng.random()
    if dice < 0.15:
        return f"{signs} {text}"
    if dice < 0.35:
        return text + signs
    return f"{text} {signs}"


def emoji(rng: Random, half: str) -> str:
    """One emoji, or the same two or three times; the evaluation has others than the training."""
    sign = rng.choice(EMOJI[half])
    if half == "said" and rng.random() < 0.3:
        block = rng.choice(PICTURES)
        sign = chr(rng.randint(*block))
    return sign * rng.choice((1, 1, 1, 1, 1, 2, 3))


def word(rng: Random, half: str) -> str:
    """A word in another script; in half of those of the training the signs are drawn."""
    if half == "held" or rng.random() < 0.5:
        return rng.choice(CHARS[half])
    block = rng.choice(BLOCKS)
    return "".join(chr(rng.randint(*block)) for _ in range(rng.randint(1, 8)))


def of_one_language(rng: Random) -> str:
    """One to four words of a language, some with a capital and a mark: "Buona sera"."""
    known = rng.choice(TEXTS["vocabulary"]).split()
    begin = rng.randrange(len(known))
    count = rng.choice((1, 2, 2, 3, 4))
    chosen = known[begin : begin + count]  # neighbours, mostly a phrase
    if rng.random() < 0.5:
        chosen = rng.sample(known, count)
    text = " ".join(chosen)
    if text.capitalize() in HELD_PHRASES:
        return of_one_language(rng)
    # "man" and "me" are English words too.
    if len(text) < 5:
        text += f" {max(known, key=len)}"
    if rng.random() < 0.5:
        text = upper_first(text)
    return text + rng.choice(("", "", "", "?", "!", "."))


def unreadable(talk: Conversation, half: str = "said") -> None:
    """こんにちは, Guten Tag, "I like 🍕 and 日本語"."""
    rng = talk.rng
    dice = rng.random()
    suffix = "_held" if half == "held" else ""
    answer = TEXTS["answered"][0]
    if dice < 0.45:
        text = rng.choice(TEXTS[f"said{suffix}"])
        text = text.format(e=emoji(rng, half), w=word(rng, half))
        answer = TEXTS["unreadable"][0]
    elif dice < 0.75:
        text = " ".join(word(rng, half) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    elif half == "said" and dice < 0.87:
        text = of_one_language(rng)
    else:
        text = rng.choice(TEXTS[f"languages{suffix}"])
    talk.say(text, answer, ("unreadable",))
