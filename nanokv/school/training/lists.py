"""Exchanges about lists of words: answered at once, or remembered and asked for later.

Each docstring of an exchange gives an example: "message of the user" → "answer". The words around
the answers are those of the second stage ("You said: ...", "Reversed: ..."); the first stage
answers with the words alone.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from nanokv.school.training import words
from nanokv.school.training.about_user import REQUESTS, asked
from nanokv.school.training.conversation import Conversation, Step

LENGTHS = (2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7, 8)
LONGEST = len(words.ORDINALS)


class Question(NamedTuple):
    """A question about the remembered list.

    `how` is its section in requests.toml, `filled` the words for the places {} of the phrasing.
    """

    how: str
    filled: tuple[str, ...]
    answer: str
    step: Step


def typed(rng: Random, items: Sequence[str]) -> str:
    """The list as people type it: with commas, with spaces, or with an "and" before the last."""
    style = rng.random()
    if style < 0.7:
        return ", ".join(items)
    if style < 0.85:
        return " ".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def new_list(talk: Conversation, lengths: Sequence[int] = LENGTHS) -> list[str]:
    """Draw a list of one of these lengths. It replaces the list of the conversation."""
    talk.list = words.distinct(talk.rng, talk.rng.choice(lengths), talk.word)
    return talk.list


def new_item(talk: Conversation) -> str:
    """A word that is not on the list."""
    while True:
        item = talk.word()
        if item not in talk.list:
            return item


def without(items: list[str], gone: str) -> list[str]:
    """The items but for one."""
    return [item for item in items if item != gone]


def _ask(talk: Conversation, how: str, answer: str, meaning: Step) -> None:
    """Add an exchange whose request contains the list."""
    listed = typed(talk.rng, talk.list)
    request = talk.rng.choice(REQUESTS["list"][how]).format(listed)
    talk.say(request, answer, ("list", *talk.list), meaning)


def again(talk: Conversation) -> str:
    """The answer with the list as it is: You said: moon, chair."""
    return talk.stage.again.format(", ".join(talk.list))


def backwards(talk: Conversation) -> str:
    """The answer with the list reversed: Reversed: chair, moon."""
    return talk.stage.backwards.format(", ".join(talk.list[::-1]))


def repeat(talk: Conversation) -> None:
    """The user asks to repeat a list.

    "Repeat: moon, chair" → "You said: moon, chair."
    """
    new_list(talk)
    _ask(talk, "repeat", again(talk), ("again",))


def reverse(talk: Conversation) -> None:
    """The user asks to reverse a list.

    "Reverse: moon, chair" → "Reversed: chair, moon."
    """
    new_list(talk)
    ask_backwards(talk)


def ask_backwards(talk: Conversation) -> None:
    """As reverse, with the list of the conversation."""
    _ask(talk, "reverse", backwards(talk), ("backwards",))


def nth(talk: Conversation) -> None:
    """The user asks for one item of a list.

    "Which is the second: moon, chair?" → "The second is chair."
    """
    new_list(talk)
    ask_place(talk)


def ask_place(talk: Conversation) -> None:
    """As nth, with the list of the conversation."""
    where, item = position(talk.rng, talk.list)
    place = digits(talk.rng, where)
    listed = typed(talk.rng, talk.list)
    request = talk.rng.choice(REQUESTS["list"]["nth"]).format(l=listed, o=place)
    talk.say(request, f"The {where} is {item}.", ("list", *talk.list), ("nth", where))


def length(talk: Conversation) -> None:
    """The user asks for the number of items.

    "How many words are in moon, chair?" → "There are two."
    """
    new_list(talk)
    _ask(talk, "length", f"There are {words.number(len(talk.list))}.", ("length",))


def remember(talk: Conversation) -> None:
    """The user gives a list, to ask for it later.

    "My list is moon, chair." → "I will remember these two words."
    """
    new_list(talk)
    answers = (
        f"Ok, I will remember {', '.join(talk.list)}.",
        f"I will remember these {words.number(len(talk.list))} words.",
        "Ok, I will remember the list.",
    )
    _ask(talk, "remember", talk.one_of(answers), ("remember",))


def edit(talk: Conversation) -> None:
    """The user adds an item to the remembered list, or removes one.

    "Add lamp to my list." → "Your list is now: moon, chair, lamp."
    """
    how, item = add_or_remove(talk, 0.4)
    request = talk.rng.choice(REQUESTS["list"][how]).format(item)
    talk.say(request, now(talk), (how, item))


def add_or_remove(talk: Conversation, remove: float) -> tuple[str, str]:
    """Change the list. Returns "add_item" or "remove_item", and the item.

    `remove` is how often an item is removed. Lists of two are never shortened, and the longest
    never lengthened.
    """
    rng = talk.rng
    if (len(talk.list) > 2 and rng.random() < remove) or len(talk.list) >= LONGEST:
        item = rng.choice(talk.list)
        talk.list = without(talk.list, item)
        return "remove_item", item
    item = new_item(talk)
    talk.list = [*talk.list, item]
    return "add_item", item


def now(talk: Conversation) -> str:
    """The answer to a change of the list."""
    return f"Your list is now: {', '.join(talk.list)}."


def position(rng: Random, items: Sequence[str]) -> tuple[str, str]:
    """An ordinal and its item: ("third", "lamp"). The end of the list may be called "last"."""
    i = rng.randrange(len(items))
    if i == len(items) - 1 and rng.random() < 0.5:
        return "last", items[i]
    return words.ORDINALS[i], items[i]


def digits(rng: Random, where: str) -> str:
    """The ordinal as the user types it: third, or now and then 3rd."""
    if where == "last" or rng.random() < 0.8:
        return where
    n = words.ORDINALS.index(where) + 1
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n, "th")
    return f"{n}{ending}"


def ask(talk: Conversation) -> None:
    """The user asks something about the remembered list.

    "What comes after moon?" → "After moon comes chair."
    """
    if not talk.list and talk.rng.random() < 0.7:
        remember(talk)
    if not talk.list:
        request = talk.rng.choice(REQUESTS["remembered"]["unknown"])
        talk.say(request, "You have not given me a list yet.", ("no list",))
        return
    ask_remembered(talk)


def ask_remembered(talk: Conversation) -> None:
    """As ask, when there is a list."""
    question = talk.rng.choice(QUESTIONS)(talk)
    first = ""
    if question.filled:
        first = question.filled[0]
    request = talk.rng.choice(REQUESTS["remembered"][question.how])
    request = request.format(*question.filled, o=first)
    talk.say(asked(talk, request), question.answer, question.step)


def _ask_nth(talk: Conversation) -> Question:
    """One item: "Which is the second?" or "What is the 2nd?"."""
    where, item = position(talk.rng, talk.list)
    return Question("nth", (digits(talk.rng, where),), f"The {where} is {item}.", ("nth", where))


def _ask_member(talk: Conversation) -> Question:
    """Whether a word is on the list, half of the time one that is: "Is moon on my list?"."""
    if talk.rng.random() < 0.5:
        probe = talk.rng.choice(talk.list)
    else:
        probe = talk.word()
    answer = f"No, {probe} is not on the list."
    if probe in talk.list:
        answer = f"Yes, {probe} is on the list."
    return Question("member", (probe,), answer, ("member", probe))


def _ask_next(talk: Conversation) -> Question:
    """The item after or before another: "What comes after moon?"."""
    if len(talk.list) == 1:
        return Question("length", (), "There is one.", ("length",))
    i = talk.rng.randrange(len(talk.list) - 1)
    this, after = talk.list[i : i + 2]
    if talk.rng.random() < 0.6:
        return Question("next", (this,), f"After {this} comes {after}.", ("next", this))
    return Question("before", (after,), f"Before {after} comes {this}.", ("before", after))


def _ask_length(talk: Conversation) -> Question:
    """The number of items: "How many words are on my list?"."""
    count = len(talk.list)
    answer = f"There are {words.number(count)}."
    if count == 1:
        answer = "There is one."
    return Question("length", (), answer, ("length",))


def _ask_again(talk: Conversation) -> Question:
    """The whole list: "Repeat my list."."""
    return Question("again", (), again(talk), ("again",))


def _ask_backwards(talk: Conversation) -> Question:
    """The whole list, reversed: "Say my list backwards."."""
    return Question("backwards", (), backwards(talk), ("backwards",))


QUESTIONS: tuple[Callable[[Conversation], Question], ...] = (
    _ask_nth,  # twice: drawn twice as often
    _ask_nth,
    _ask_member,
    _ask_next,
    _ask_length,
    _ask_again,
    _ask_backwards,
)
