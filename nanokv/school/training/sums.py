"""Exchanges about numbers: counting, neighbours, sums of two numbers up to 99.

Any other arithmetic is refused. Each docstring of an exchange gives an example: "message of the
user" → "answer".
"""

from collections.abc import Callable
from random import Random

from nanokv.school.training import words
from nanokv.school.training.about_user import REQUESTS, asked
from nanokv.school.training.conversation import Conversation
from nanokv.school.training.small_talk import ARITHMETIC

NUMBERS = REQUESTS["numbers"]
# Sums that are too large are asked for in the words of sums that are not.
BIG = [
    *ARITHMETIC["big"],
    *(request.replace("{}", "{a}", 1).replace("{}", "{b}", 1) for request in NUMBERS["add"]),
]
LARGEST = 99  # summand


def speller(in_words: bool) -> Callable[[int], str]:
    """How numbers are written: "twenty-one" or "21"."""
    if in_words:
        return words.number
    return str


def count(talk: Conversation) -> None:
    """The user asks to count up or down; the answer is in words if the request is.

    "Count from three to five." → "three, four, five."
    """
    rng = talk.rng
    in_words = rng.random() < 0.3
    down = rng.random() < 0.2
    from_one = rng.random() < 0.3
    length = rng.randint(3, 20)
    if from_one:
        numbers = list(range(1, length + 1))
    else:
        largest = 20
        if not in_words:
            largest = rng.choice((20, 110))
        first = rng.randint(0, largest)
        numbers = list(range(first, first + rng.randint(2, length)))
    if down:
        numbers.reverse()
    how, ends = request_for(numbers, down, from_one)
    said = speller(in_words)
    request = rng.choice(NUMBERS[how]).format(*map(said, ends))
    counted = list(map(said, numbers))
    talk.say(request, ", ".join(counted) + ".", ("count", *counted))


def request_for(numbers: list[int], down: bool, from_one: bool) -> tuple[str, list[int]]:
    """How to ask for these numbers: the section of requests.toml, and the numbers it mentions.

    Requests that begin or end with 1 leave it out: "Count to 5."
    """
    if from_one and down:
        return "down_from", [numbers[0]]
    if from_one:
        return "up_to", [numbers[-1]]
    ends = [numbers[0], numbers[-1]]
    if down:
        return "down", ends
    return "up", ends


def neighbour(talk: Conversation) -> None:
    """The user asks for the number after or before another.

    "Which number comes after 41?" → "After 41 comes 42."
    """
    number = talk.rng.randint(1, talk.rng.choice((20, 100, 999)))
    if talk.rng.random() < 0.6:
        request = talk.rng.choice(NUMBERS["next_number"])
        answer = f"After {number} comes {number + 1}."
        name = "after"
    else:
        request = talk.rng.choice(NUMBERS["previous_number"])
        answer = f"Before {number} comes {number - 1}."
        name = "before"
    talk.say(request.format(number), answer, (name, number))


def summand(rng: Random) -> int:
    """0 to 99; a third of them have one digit."""
    if rng.random() < 0.25:
        return rng.randint(0, 9)
    return rng.randint(0, LARGEST)


def add(talk: Conversation) -> None:
    """The user asks for the sum of two numbers up to 99, now and then in words.

    "What is 27 + 48?" → "27 + 48 = 75."
    """
    rng = talk.rng
    a = summand(rng)
    b = summand(rng)
    in_words = rng.random() < 0.12
    said = speller(in_words)
    request = rng.choice(NUMBERS["add"]).format(said(a), said(b))
    if in_words and rng.random() < 0.3:
        request = request.replace("-", " ")
    if rng.random() < 0.2:
        request = asked(talk, request)
    talk.say(request, f"{a} + {b} = {a + b}.", ("add", a, b))


def refuse(talk: Conversation) -> None:
    """The user asks for a difference, a product, three summands, or a summand above 99.

    "What is 7 - 4?" → "I can only add two numbers up to 99."
    """
    rng = talk.rng
    if rng.random() < 0.35:
        smallest, largest = rng.choice(((100, 999), (100, 9999), (0, 99)))
        a = rng.randint(smallest, largest)
        b = rng.randint(100, 999)
        if rng.random() < 0.5:
            request = rng.choice(BIG).format(a=b, b=a)
        else:
            request = rng.choice(BIG).format(a=a, b=b)
    else:
        a, b, c = (rng.randint(0, rng.choice((12, 99, 999))) for _ in range(3))
        request = talk.one_of(ARITHMETIC["asked"], a=a, b=b, c=c)
    talk.say(request, ARITHMETIC["answered"][0], ("refuse", "arithmetic"))
