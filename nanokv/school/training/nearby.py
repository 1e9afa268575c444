"""Exchanges of the second stage: requests that resemble older ones and mean something else.

Several codes at once, facts with what they were before, counts to one number, downwards, by steps or below zero, lists
that change, numbers in words that are too large to add, and questions about caches for yes or no.
"""

from nanokv.school.training import about_user, lists, sums, words
from nanokv.school.training.about_user import asked
from nanokv.school.training.cache_questions import YES_OR_NO, ask
from nanokv.school.training.conversation import Conversation, upper_first
from nanokv.school.training.facts import CODES, FACTS
from nanokv.school.training.hard import OTHERS
from nanokv.school.training.phrases import phrases
from nanokv.school.training.small_talk import ARITHMETIC

_TEXTS = phrases("nearby")
MOVED, SETTLING, COUNTING, EDITS = (
    _TEXTS[name] for name in ("moved", "settling", "counting", "edits")
)
MOVING = (
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
STEPS = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}


# --- facts ---------------------------------------------------------------------------------------------------------


def codes(talk: Conversation):
    """Two or three codes in one message or in several, then one or two of them; one in five was never told."""
    rng = talk.rng
    kinds = rng.sample(list(CODES), rng.choice((1, 2, 2, 3, 3)))
    if len(kinds) > 1 and rng.random() < 0.4:
        _two_codes(talk, *kinds[:2])
    else:
        talk.say(*about_user.statement(talk, kinds[0]))
        kinds[1:2] = [_tell(talk, kind) for kind in kinds[1:2]]
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


def _tell(talk: Conversation, kind: str) -> str:
    talk.say(*about_user.statement(talk, kind))
    return kind


def _two_codes(talk: Conversation, one: str, other: str):
    x, y = about_user.told_value(talk, one), about_user.told_value(talk, other)
    about_user.keep(talk, one, x)
    about_user.keep(talk, other, y)
    told = upper_first(talk.one_of(_TEXTS["codes"]["told"], a=one, x=x, b=other, y=y))
    talk.say(told, f"Ok, your {one} is {x}.", ("tell", one, x), ("tell", other, y))


def moved(talk: Conversation):
    """I moved from Lima to Turin. What was before may have been told or not; what is now counts."""
    rng = talk.rng
    kind = rng.choice(MOVING)
    if rng.random() < 0.55:
        _tell(talk, kind)
        _others(talk, 0.4)
    if kind == "city" and rng.random() < 0.2:
        value = about_user.told_value(talk, kind)
        sentence = talk.one_of(SETTLING["told"], v=value)
    else:
        old = talk.facts.get(kind) or _fresh(talk, kind)
        while (value := _fresh(talk, kind)) == old:
            pass
        sentence = talk.one_of(before_and_now(kind), v=value, w=old, x=kind)
    about_user.keep(talk, kind, value)
    talk.say(upper_first(sentence), "Noted.", ("tell", kind, value))
    _others(talk, 0.4)
    about_user.recall(talk, kind)


def before_and_now(kind: str) -> list[str]:
    """The sentences that name what a fact was and what it is."""
    return MOVED.get(kind) or MOVED["sibling" if kind in words.RELATIVES else "favourite"]


def _fresh(talk: Conversation, kind: str) -> str:
    """A value that is no other fact's."""
    while (value := talk.cased(FACTS[kind].value(talk.rng, talk.held_out))) in talk.facts.values():
        pass
    return value


def _others(talk: Conversation, share: float):
    """Now and then an exchange about something else."""
    if talk.rng.random() < share:
        talk.rng.choice(OTHERS)(talk)


# --- numbers -------------------------------------------------------------------------------------------------------


def count(talk: Conversation):
    """From 12 to 4, from 5 to 5, to 1, to 50, from -3 to 3, by fives to 40."""
    rng, dice = talk.rng, talk.rng.random()
    if dice < 0.25:
        return _count_steps(talk)
    in_words = rng.random() < 0.45
    said = words.number if in_words else str
    if dice < 0.5:  # from 1
        last = rng.choice(ROUND) if rng.random() < 0.4 else rng.randint(1, 40)
        numbers = list(range(1, min(last, 40 if in_words else last) + 1))
        down = rng.random() < 0.2
        numbers = numbers[::-1] if down else numbers
        request = rng.choice(sums.NUMBERS["down_from" if down else "up_to"]).format(
            said(numbers[0 if down else -1])
        )
    else:
        lowest = -10 if dice > 0.9 and not in_words else 0
        first = rng.randint(lowest, rng.choice((5, 20, 20, 90)))
        last = (
            first
            if rng.random() < 0.2
            else min(max(lowest, first + rng.randint(-15, 15)), 99 if in_words else 105)
        )
        numbers = list(range(first, last + 1)) or list(range(first, last - 1, -1))
        request = rng.choice(COUNTING["either"]).format(a=said(first), b=said(last))
    talk.say(
        upper_first(request), f"{', '.join(map(said, numbers))}.", ("count", *map(said, numbers))
    )


def _count_steps(talk: Conversation):
    """By twos, in steps of 5."""
    rng = talk.rng
    step = rng.choice(list(STEPS))
    length = rng.randint(2, 12)
    named = {"s": rng.choice((STEPS[step], STEPS[step], f"{step}s")), "n": step}
    if rng.random() < 0.6:
        first, how = step, "steps_to"
    else:
        first, how = rng.randint(0, 20), "steps"
    numbers = [str(first + i * step) for i in range(length)]
    request = rng.choice(COUNTING[how]).format(a=numbers[0], b=numbers[-1], **named)
    talk.say(request, f"{', '.join(numbers)}.", ("steps", *numbers))


def refuse(talk: Conversation):
    """One hundred plus one, 99 + 100: sums just too large, in words and in digits."""
    rng = talk.rng
    large = rng.choice((100, 100, 101, rng.randint(100, 199), rng.randint(100, 999)))
    both = [large, rng.choice((rng.randint(0, 99), rng.randint(0, 9), 99, 100))]
    rng.shuffle(both)
    said = hundreds if rng.random() < 0.5 else str
    a, b = map(said, both)
    talk.say(
        rng.choice(sums.BIG).format(a=a, b=b), ARITHMETIC["answered"][0], ("refuse", "arithmetic")
    )


def hundreds(n: int) -> str:
    """0 to 999 in words: one hundred and five."""
    if n < 100:
        return words.number(n)
    rest = f" and {words.number(n % 100)}" if n % 100 else ""
    return f"{words.number(n // 100)} hundred{rest}"


# --- lists ---------------------------------------------------------------------------------------------------------


def edit(talk: Conversation):
    """A list to remember, one to three changes of it, then, at times, a place of it or all of it."""
    rng = talk.rng
    edit_once(talk)
    for _ in range(rng.choice((0, 0, 1, 2))):
        _change(talk)
    if rng.random() < 0.6:
        how, filled, answer, meaning = rng.choice(lists.QUESTIONS)(talk)
        request = rng.choice(lists.REQUESTS["remembered"][how]).format(
            *filled, o=filled[0] if filled else ""
        )
        talk.say(asked(talk, request), answer, meaning)


def edit_once(talk: Conversation):
    """A list to remember and a change of it."""
    lists.remember(talk)
    _change(talk)


def _change(talk: Conversation):
    rng, items, new = talk.rng, talk.list, _new_item(talk)
    where, item = lists.position(rng, items)
    other = rng.choice(items)
    longer = [
        ("append", {"v": new}, [*items, new], ("add_item", new)),
        ("put_first", {"v": new}, [new, *items], ("put_first", new)),
    ]
    shorter = [
        ("remove_word", {"w": other}, _without(items, other), ("remove_item", other)),
        (
            "remove_place",
            {"o": lists.digits(rng, where)},
            _without(items, item),
            ("remove_place", where),
        ),
    ]
    changed = [new if word == other else word for word in items]
    replaced = ("replace_item", {"w": other, "v": new}, changed, ("replace_item", other, new))
    options = [
        replaced,
        *(longer if len(items) < lists.LONGEST else []),
        *(shorter if len(items) > 2 else []),
    ]
    how, filled, talk.list, meaning = rng.choice(options)
    request = upper_first(rng.choice(EDITS[how]).format(**filled))
    talk.say(request, f"Your list is now: {', '.join(talk.list)}.", meaning)


def _without(items: list[str], gone: str) -> list[str]:
    return [word for word in items if word != gone]


def _new_item(talk: Conversation) -> str:
    while (item := talk.word()) in talk.list:
        pass
    return item


# --- caches --------------------------------------------------------------------------------------------------------


def yes_or_no(talk: Conversation):
    """Does batch size change the cache size?"""
    answer, phrasings = talk.rng.choice(YES_OR_NO)
    talk.say(
        ask(talk.rng, talk.rng.choice(phrasings[:-1]), talk.stage.wrappers),
        answer,
        ("cache", answer),
    )
