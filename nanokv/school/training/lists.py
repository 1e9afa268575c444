"""Exchanges on lists of words: given and answered at once, or remembered and asked for later."""

from nanokv.school.training import words
from nanokv.school.training.about_user import REQUESTS, asked
from nanokv.school.training.conversation import Conversation

LENGTHS = (2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7, 8)
LONGEST = len(words.ORDINALS)


def typed(rng, items) -> str:
    """A list as people type it."""
    style = rng.random()
    if style < 0.7:
        return ", ".join(items)
    if style < 0.85:
        return " ".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def new_list(talk: Conversation, lengths=LENGTHS) -> list[str]:
    """`The list` is always the latest one that the user gave."""
    talk.list = words.distinct(talk.rng, talk.rng.choice(lengths), talk.word)
    return talk.list


def _ask(talk: Conversation, how: str, answer: str, meaning: tuple, **place):
    """Say the request with the list in it; where the request names a place too, it calls the list {l}."""
    listed = typed(talk.rng, talk.list)
    request = talk.rng.choice(REQUESTS["list"][how])
    request = request.format(l=listed, **place) if place else request.format(listed)
    talk.say(request, answer, ("list", *talk.list), meaning)


def again(talk: Conversation) -> str:
    """You said: moon, chair."""
    return talk.stage.again.format(", ".join(talk.list))


def backwards(talk: Conversation) -> str:
    """Reversed: chair, moon."""
    return talk.stage.backwards.format(", ".join(talk.list[::-1]))


def repeat(talk: Conversation):
    """Repeat these words."""
    new_list(talk)
    _ask(talk, "repeat", again(talk), ("again",))


def reverse(talk: Conversation):
    """Say them backwards."""
    new_list(talk)
    ask_backwards(talk)


def ask_backwards(talk: Conversation):
    """Say the list and ask for it from its end."""
    _ask(talk, "reverse", backwards(talk), ("backwards",))


def nth(talk: Conversation):
    """Which is the third?"""
    new_list(talk)
    ask_place(talk)


def ask_place(talk: Conversation):
    """Say the list and ask for one of its places."""
    where, item = position(talk.rng, talk.list)
    _ask(talk, "nth", f"The {where} is {item}.", ("nth", where), o=digits(talk.rng, where))


def length(talk: Conversation):
    """How many are there?"""
    new_list(talk)
    _ask(talk, "length", f"There are {words.number(len(talk.list))}.", ("length",))


def remember(talk: Conversation):
    """A list to be asked for later."""
    new_list(talk)
    all_of_it = f"Ok, I will remember {', '.join(talk.list)}."
    count = f"I will remember these {words.number(len(talk.list))} words."
    _ask(
        talk,
        "remember",
        talk.one_of((all_of_it, count, "Ok, I will remember the list.")),
        ("remember",),
    )


def edit(talk: Conversation):
    """One item more, or one less."""
    rng = talk.rng
    if (len(talk.list) > 2 and rng.random() < 0.4) or len(talk.list) >= LONGEST:
        item, how = rng.choice(talk.list), "remove_item"
        talk.list = [other for other in talk.list if other != item]
    else:
        while (item := talk.word()) in talk.list:
            pass
        talk.list, how = [*talk.list, item], "add_item"
    request = talk.rng.choice(REQUESTS["list"][how]).format(item)
    talk.say(request, f"Your list is now: {', '.join(talk.list)}.", (how, item))


def position(rng, items) -> tuple[str, str]:
    i = rng.randrange(len(items))
    return (
        ("last", items[-1])
        if i == len(items) - 1 and rng.random() < 0.5
        else (words.ORDINALS[i], items[i])
    )


def digits(rng, where: str) -> str:
    """third, or now and then 3rd."""
    if where == "last" or rng.random() < 0.8:
        return where
    n = words.ORDINALS.index(where) + 1
    return f"{n}{('st', 'nd', 'rd')[n - 1] if n < 4 else 'th'}"


def ask(talk: Conversation):
    """Something about the remembered list."""
    if not talk.list and talk.rng.random() < 0.7:
        remember(talk)
    if not talk.list:
        request = talk.rng.choice(REQUESTS["remembered"]["unknown"])
        return talk.say(request, "You have not given me a list yet.", ("no list",))
    how, filled, answer, meaning = talk.rng.choice(QUESTIONS)(talk)
    request = talk.rng.choice(REQUESTS["remembered"][how]).format(
        *filled, o=filled[0] if filled else ""
    )
    talk.say(asked(talk, request), answer, meaning)


def _ask_nth(talk):
    where, item = position(talk.rng, talk.list)
    return "nth", (digits(talk.rng, where),), f"The {where} is {item}.", ("nth", where)


def _ask_member(talk):
    inside = talk.rng.random() < 0.5
    probe = talk.rng.choice(talk.list) if inside else talk.word()
    answer = (
        f"Yes, {probe} is on the list."
        if probe in talk.list
        else f"No, {probe} is not on the list."
    )
    return "member", (probe,), answer, ("member", probe)


def _ask_next(talk):
    i = talk.rng.randrange(len(talk.list) - 1) if len(talk.list) > 1 else 0
    if len(talk.list) == 1:
        return "length", (), "There is one.", ("length",)
    this, after = talk.list[i : i + 2]
    if talk.rng.random() < 0.6:
        return "next", (this,), f"After {this} comes {after}.", ("next", this)
    return "before", (after,), f"Before {after} comes {this}.", ("before", after)


def _ask_length(talk):
    count = len(talk.list)
    return (
        "length",
        (),
        f"There are {words.number(count)}." if count > 1 else "There is one.",
        ("length",),
    )


QUESTIONS = (  # positions twice as often as the others
    _ask_nth,
    _ask_nth,
    _ask_member,
    _ask_next,
    _ask_length,
    lambda talk: ("again", (), again(talk), ("again",)),
    lambda talk: ("backwards", (), backwards(talk), ("backwards",)),
)
