"""Exchanges of the second stage: requests that resemble those of the first and mean something else.

Several codes at once; facts with their old value; counts to one number, downwards, in steps or
below zero; lists that change; numbers that are too large to add; yes-or-no questions about caches.

Each docstring of an exchange gives an example: "message of the user" → "answer". Statements are
answered by hard.said_again, whatever answer the exchange itself has.
"""

from collections import Counter
from random import Random
from typing import Any, NamedTuple

from nanokv.school.training import about_user, lists, sums, words
from nanokv.school.training.cache_questions import YES_OR_NO, ask_in
from nanokv.school.training.conversation import Conversation, Step, upper_first
from nanokv.school.training.facts import CODES, FACTS
from nanokv.school.training.hard import OTHERS
from nanokv.school.training.phrases import phrases
from nanokv.school.training.small_talk import ARITHMETIC

_TEXTS = phrases("nearby")
MOVED = _TEXTS["moved"]
SETTLING = _TEXTS["settling"]
COUNTING = _TEXTS["counting"]
EDITS = _TEXTS["edits"]
MOVING = (  # kinds of facts that change; a kind that is here twice is drawn twice as often
    "city",
    "city",
    "city",
    "name",
    "name",
    "job",
    "job",
    "hobby",
    "colour",
    "food",
    "drink",
    "animal",
    "sport",
    "sister",
    "brother",
    "game",
    "instrument",
)
ROUND = (20, 25, 30, 40, 50, 60, 100)
# Words that the names of two codes or more have.
_WORDS = Counter(word for name in CODES for word in name.split())
SHARED = [word for word, names in _WORDS.items() if names > 1]
STEPS = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}


# --- facts ----------------------------------------------------------------------------------------


def codes(talk: Conversation) -> None:
    """The user gives one to three codes and asks for some of them, now and then for an unknown one.

    "My PIN is 4821." → "So your PIN is 4821."
    """
    rng = talk.rng
    _give_and_ask(talk, rng.sample(list(CODES), rng.choice((1, 2, 2, 3, 3))))


def codes_alike(talk: Conversation) -> None:
    """As codes, but the names of two or three share a word, such as locker code and locker number.

    "My locker code is 4821." → "So your locker code is 4821."
    """
    rng = talk.rng
    word = rng.choice(SHARED)
    kinds = [kind for kind in CODES if word in kind.split()]
    _give_and_ask(talk, rng.sample(kinds, min(len(kinds), rng.choice((2, 2, 3)))))


def _give_and_ask(talk: Conversation, kinds: list[str]) -> None:
    """The user gives these codes and asks for some of them, now and then for an unknown one."""
    rng = talk.rng
    if len(kinds) > 1 and rng.random() < 0.4:
        _two_codes(talk, *kinds[:2])
    else:
        for kind in kinds[:2]:
            _tell(talk, kind)
    for kind in kinds[2:]:
        _tell(talk, kind)
    if rng.random() < 0.2:
        about_user.recall(talk, rng.choice(kinds))
        _tell(talk, rng.choice(kinds))  # it changed
    _others(talk, 0.3)
    for kind in rng.sample(kinds, rng.randint(1, len(kinds))):
        about_user.recall(talk, kind)
    if rng.random() < 0.25:
        about_user.recall(talk, rng.choice([kind for kind in CODES if kind not in talk.facts]))


def _tell(talk: Conversation, kind: str) -> None:
    """The user states one fact, for the first time or again."""
    talk.say(*about_user.statement(talk, kind))


def _two_codes(talk: Conversation, one: str, other: str) -> None:
    """The user gives two codes in one message.

    "My PIN is 4821 and my door code is 770." → "So your PIN is 4821. Your door code is 770."
    """
    x = about_user.told_value(talk, one)
    y = about_user.told_value(talk, other)
    about_user.keep(talk, one, x)
    about_user.keep(talk, other, y)
    message = upper_first(talk.one_of(_TEXTS["codes"]["told"], a=one, x=x, b=other, y=y))
    talk.say(message, f"Ok, your {one} is {x}.", ("tell", one, x), ("tell", other, y))


def moved(talk: Conversation) -> None:
    """The user gives the old and the new value of a fact, and asks for it. The new value counts.

    "I moved from Lima to Turin." → "So you live in Turin."
    """
    rng = talk.rng
    kind = rng.choice(MOVING)
    if rng.random() < 0.55:  # the old value is known already
        _tell(talk, kind)
        _others(talk, 0.4)
    if kind == "city" and rng.random() < 0.2:
        value = about_user.told_value(talk, kind)
        sentence = talk.one_of(SETTLING["told"], v=value)
    else:
        old = talk.facts.get(kind) or _fresh(talk, kind)
        while True:
            value = _fresh(talk, kind)
            if value != old:
                break
        sentence = talk.one_of(before_and_now(kind), v=value, w=old, x=kind)
    about_user.keep(talk, kind, value)
    talk.say(upper_first(sentence), "Noted.", ("tell", kind, value))
    _others(talk, 0.4)
    about_user.recall(talk, kind)


def before_and_now(kind: str) -> list[str]:
    """The phrasings that give the old and the new value of a fact."""
    if kind in MOVED:
        return MOVED[kind]
    if kind in words.RELATIVES:
        return MOVED["sibling"]
    return MOVED["favourite"]


def _fresh(talk: Conversation, kind: str) -> str:
    """A value that no known fact has."""
    while True:
        value = talk.cased(FACTS[kind].value(talk.rng, talk.held_out))
        if value not in talk.facts.values():
            return value


def _others(talk: Conversation, share: float) -> None:
    """With probability `share`, an exchange about something else."""
    if talk.rng.random() < share:
        talk.rng.choice(OTHERS)(talk)


# --- numbers --------------------------------------------------------------------------------------


def count(talk: Conversation) -> None:
    """The user asks to count in one of many ways.

    "Count from 12 to 9." → "12, 11, 10, 9."
    """
    rng = talk.rng
    dice = rng.random()
    if dice < 0.25:
        _count_steps(talk)
        return
    in_words = rng.random() < 0.45
    if dice < 0.5:
        request, numbers = _from_one(rng, in_words)
    else:
        lowest = 0
        if dice > 0.9 and not in_words:
            lowest = -10
        request, numbers = _from_any(rng, in_words, lowest)
    counted = list(map(sums.speller(in_words), numbers))
    talk.say(upper_first(request), f"{', '.join(counted)}.", ("count", *counted))


def _from_one(rng: Random, in_words: bool) -> tuple[str, list[int]]:
    """A count from 1 to a number, or back to 1: the request and the numbers."""
    if rng.random() < 0.4:
        largest = rng.choice(ROUND)
    else:
        largest = rng.randint(1, 40)
    if in_words:
        largest = min(largest, 40)
    numbers = list(range(1, largest + 1))
    how = "up_to"
    if rng.random() < 0.2:
        numbers.reverse()
        how = "down_from"
    said = sums.speller(in_words)
    return rng.choice(sums.NUMBERS[how]).format(said(largest)), numbers


def _from_any(rng: Random, in_words: bool, lowest: int) -> tuple[str, list[int]]:
    """A count up or down between two numbers, which may be equal: the request and the numbers."""
    first = rng.randint(lowest, rng.choice((5, 20, 20, 90)))
    last = first
    if rng.random() >= 0.2:
        largest = 105
        if in_words:
            largest = 99
        last = max(lowest, first + rng.randint(-15, 15))
        last = min(last, largest)
    if first <= last:
        numbers = list(range(first, last + 1))
    else:
        numbers = list(range(first, last - 1, -1))
    said = sums.speller(in_words)
    return rng.choice(COUNTING["either"]).format(a=said(first), b=said(last)), numbers


def _count_steps(talk: Conversation) -> None:
    """The user asks to count in steps.

    "Count by fives to 20." → "5, 10, 15, 20."
    """
    rng = talk.rng
    step = rng.choice(list(STEPS))
    length = rng.randint(2, 12)
    named = rng.choice((STEPS[step], STEPS[step], f"{step}s"))
    if rng.random() < 0.6:
        first = step
        how = "steps_to"
    else:
        first = rng.randint(0, 20)
        how = "steps"
    numbers = [str(first + i * step) for i in range(length)]
    request = rng.choice(COUNTING[how]).format(a=numbers[0], b=numbers[-1], s=named, n=step)
    talk.say(request, f"{', '.join(numbers)}.", ("steps", *numbers))


def refuse(talk: Conversation) -> None:
    """The user asks for a sum that is too large, in words or in digits.

    "One hundred plus one" → "I can only add two numbers up to 99."
    """
    rng = talk.rng
    large = rng.choice((100, 100, 101, rng.randint(100, 199), rng.randint(100, 999)))
    both = [large, rng.choice((rng.randint(0, 99), rng.randint(0, 9), 99, 100))]
    rng.shuffle(both)
    if rng.random() < 0.5:
        a, b = map(hundreds, both)
    else:
        a, b = map(str, both)
    request = rng.choice(sums.BIG).format(a=a, b=b)
    talk.say(request, ARITHMETIC["answered"][0], ("refuse", "arithmetic"))


def refuse_many(talk: Conversation) -> None:
    """The user asks for the sum of three numbers, now and then of four, or in words.

    "What is 7 + 1 + 46?" → "I can only add two numbers up to 99."
    """
    rng = talk.rng
    largest = rng.choice((9, 20, 99))
    said = sums.speller(rng.random() < 0.1)
    *first, last = (said(rng.randint(0, largest)) for _ in range(rng.choice((3, 3, 3, 4))))
    if rng.random() < 0.3:
        request = rng.choice(ARITHMETIC["listed"]).format(s=", ".join(first), z=last)
    else:
        request = rng.choice(ARITHMETIC["many"]).format(s=" + ".join(first), z=last)
        request = request.replace(" + ", rng.choice((" + ", "+", " plus ")))
    talk.say(request, ARITHMETIC["answered"][0], ("refuse", "arithmetic"))


def hundreds(n: int) -> str:
    """0 to 999 in words: one hundred and five."""
    if n < 100:
        return words.number(n)
    whole = f"{words.number(n // 100)} hundred"
    if n % 100 == 0:
        return whole
    return f"{whole} and {words.number(n % 100)}"


# --- lists ----------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A change of the list.

    `how` is its section in nearby.toml, `filled` the values of the request, `items` the new list.
    """

    how: str
    filled: dict[str, Any]
    items: list[str]
    step: Step


def edit(talk: Conversation) -> None:
    """The user gives a list, changes it one to three times, and often asks something about it.

    "Put lamp first." → "Your list is now: lamp, moon, chair."
    """
    rng = talk.rng
    edit_once(talk)
    for _ in range(rng.choice((0, 0, 1, 2))):
        _change(talk)
    if rng.random() < 0.6:
        lists.ask_remembered(talk)


def edit_once(talk: Conversation) -> None:
    """The user gives a list and changes it once."""
    lists.remember(talk)
    _change(talk)


def _change(talk: Conversation) -> None:
    """The user changes the list in one of five ways that its length permits."""
    change = talk.rng.choice(_changes(talk))
    talk.list = change.items
    request = upper_first(talk.rng.choice(EDITS[change.how]).format(**change.filled))
    talk.say(request, lists.now(talk), change.step)


def _changes(talk: Conversation) -> list[Change]:
    """One change of each kind: a new item takes another's place, or is added; an item goes."""
    items = talk.list
    new = lists.new_item(talk)
    where, item = lists.position(talk.rng, items)
    other = talk.rng.choice(items)
    place = lists.digits(talk.rng, where)

    replaced = [new if word == other else word for word in items]
    step = ("replace_item", other, new)
    found = [Change("replace_item", {"w": other, "v": new}, replaced, step)]
    if len(items) < lists.LONGEST:
        found += [
            Change("append", {"v": new}, [*items, new], ("add_item", new)),
            Change("put_first", {"v": new}, [new, *items], ("put_first", new)),
        ]
    if len(items) > 2:
        without_other = lists.without(items, other)
        without_item = lists.without(items, item)
        found += [
            Change("remove_word", {"w": other}, without_other, ("remove_item", other)),
            Change("remove_place", {"o": place}, without_item, ("remove_place", where)),
        ]
    return found


# --- caches ---------------------------------------------------------------------------------------


def yes_or_no(talk: Conversation) -> None:
    """The user asks a yes-or-no question about KV caches, in any phrasing but the last.

    "Does the batch size change the cache size?" → an answer of nearby.toml
    """
    answer, phrasings = talk.rng.choice(YES_OR_NO)
    phrasing = talk.rng.choice(phrasings[:-1])
    talk.say(ask_in(talk, phrasing), answer, ("cache", answer))
