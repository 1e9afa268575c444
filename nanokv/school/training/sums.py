"""Exchanges on numbers: counting in digits and in words, sums of two numbers up to 99, no to other arithmetic."""

from nanokv.school.training import words
from nanokv.school.training.about_user import REQUESTS, asked
from nanokv.school.training.conversation import Conversation
from nanokv.school.training.small_talk import ARITHMETIC

NUMBERS = REQUESTS["numbers"]
# a sum is asked for in the same words, whatever its size
BIG = [
    *ARITHMETIC["big"],
    *(request.replace("{}", "{a}", 1).replace("{}", "{b}", 1) for request in NUMBERS["add"]),
]
LARGEST = 99  # of two numbers that are added


def count(talk: Conversation):
    """Count from a to b, up or down; in words where the user writes words."""
    rng = talk.rng
    in_words = rng.random() < 0.3
    down, from_one = rng.random() < 0.2, rng.random() < 0.3
    length = rng.randint(3, 20)
    if from_one:
        numbers = list(range(1, length + 1))
    else:
        first = rng.randint(0, 20 if in_words else rng.choice((20, 110)))
        numbers = list(range(first, first + rng.randint(2, length)))
    if down:
        numbers.reverse()
    how = ("down_from" if from_one else "down") if down else ("up_to" if from_one else "up")
    ends = {"up": (numbers[0], numbers[-1]), "down": (numbers[0], numbers[-1])}
    ends |= {"up_to": (numbers[-1],), "down_from": (numbers[0],)}
    said = words.number if in_words else str
    request = rng.choice(NUMBERS[how]).format(*map(said, ends[how]))
    talk.say(request, ", ".join(map(said, numbers)) + ".", ("count", *map(said, numbers)))


def neighbour(talk: Conversation):
    """Which number comes after 41?"""
    number, after = talk.rng.randint(1, talk.rng.choice((20, 100, 999))), talk.rng.random() < 0.6
    request = talk.rng.choice(NUMBERS["next_number" if after else "previous_number"]).format(number)
    answer = (
        f"After {number} comes {number + 1}." if after else f"Before {number} comes {number - 1}."
    )
    talk.say(request, answer, ("after" if after else "before", number))


def summand(rng) -> int:
    """0 to 99, numbers of one digit more often than chance has them."""
    return rng.randint(0, 9) if rng.random() < 0.25 else rng.randint(0, LARGEST)


def add(talk: Conversation):
    """Two numbers of at most two digits, now and then in words."""
    rng, a, b = talk.rng, summand(talk.rng), summand(talk.rng)
    said = words.number if rng.random() < 0.12 else str
    request = rng.choice(NUMBERS["add"]).format(said(a), said(b))
    if said is words.number and rng.random() < 0.3:
        request = request.replace("-", " ")
    talk.say(
        asked(talk, request) if rng.random() < 0.2 else request,
        f"{a} + {b} = {a + b}.",
        ("add", a, b),
    )


def refuse(talk: Conversation):
    """Differences, products, three summands, numbers above 99."""
    rng = talk.rng
    if rng.random() < 0.35:
        a, b = rng.choice(((100, 999), (100, 9999), (0, 99))), (100, 999)
        a, b = rng.randint(*a), rng.randint(*b)
        if rng.random() < 0.5:
            a, b = b, a
        request = rng.choice(BIG).format(a=a, b=b)
    else:
        a, b, c = (rng.randint(0, rng.choice((12, 99, 999))) for _ in range(3))
        request = talk.one_of(ARITHMETIC["asked"], a=a, b=b, c=c)
    talk.say(request, ARITHMETIC["answered"][0], ("refuse", "arithmetic"))
