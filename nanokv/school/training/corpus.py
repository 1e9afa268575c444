"""A seeded generator of conversations: what the bundled model is trained and tested on.

Every answer depends on earlier tokens: names, pets, lists and numbers that the user said. That makes the cache
visible: break it, and the answers break. The same generator makes the held-out conversations of the evaluation, from
the half of the words that training never uses.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from nanokv.school.training import (
    about_user,
    hard,
    lists,
    nearby,
    small_talk,
    strangers,
    sums,
    words,
)
from nanokv.school.training.cache_questions import LATER_WRAPPERS, WRAPPERS
from nanokv.school.training.conversation import Conversation


@dataclass(frozen=True)
class Stage:
    """What a part of the training draws from: how often each exchange comes, words of lists, ways to ask and answer.

    `noted` makes the answer to a message that only tells something; without it, the exchange has its own.
    """

    segments: dict
    word: Callable
    wrappers: tuple
    again: str = "{}."
    backwards: str = "{}."
    noted: Callable | None = None


SEGMENTS = {  # exchange → how often
    about_user.tell: 12,
    about_user.update: 5,
    about_user.recall: 24,
    about_user.tell_and_ask: 2,
    about_user.tell_before: 2,
    about_user.confirm: 3,
    about_user.everything: 1,
    about_user.tell_pet: 3,
    about_user.recall_pet: 7,
    about_user.tell_owner: 1.5,
    about_user.recall_owner: 2.5,
    about_user.tell_home: 2,
    about_user.recall_home: 2,
    about_user.tell_object: 1.5,
    about_user.recall_object: 2,
    lists.repeat: 4,
    lists.reverse: 6,
    lists.nth: 7,
    lists.length: 1,
    lists.remember: 3,
    lists.edit: 2,
    lists.ask: 7,
    sums.count: 5,
    sums.neighbour: 1,
    sums.add: 14,
    sums.refuse: 3,
    small_talk.cache_question: 12,
    small_talk.story: 1,
    small_talk.small_talk: 6,
    small_talk.unknown: 5,
}
FIRST = Stage(SEGMENTS, words.list_word, WRAPPERS)
# What strangers type, what resembles something else, what is hard; the order too decides what is
# drawn.
EVERYTHING = {
    about_user.tell: 16,
    about_user.update: 18,
    about_user.recall: 44,
    about_user.tell_and_ask: 2,
    about_user.tell_before: 2,
    about_user.confirm: 8,
    about_user.everything: 3,
    about_user.tell_pet: 3,
    about_user.recall_pet: 22,
    about_user.tell_owner: 2,
    about_user.recall_owner: 12,
    about_user.tell_home: 3,
    about_user.recall_home: 4,
    lists.repeat: 22,
    lists.reverse: 45,
    lists.nth: 75,
    lists.length: 4,
    lists.remember: 6,
    lists.edit: 2,
    lists.ask: 10,
    sums.count: 15,
    sums.neighbour: 1,
    sums.add: 50,
    sums.refuse: 8,
    small_talk.cache_question: 50,
    small_talk.story: 4,
    small_talk.small_talk: 15,
    small_talk.unknown: 15,
    strangers.tell_late: 8,
    strangers.recall_late: 14,
    strangers.correct: 12,
    strangers.together: 6,
    strangers.form: 2,
    strangers.titled: 6,
    strangers.chat: 18,
    strangers.ask_name: 8,
    strangers.follow_up: 8,
    strangers.two_pets: 12,
    strangers.relative_home: 8,
    strangers.ask_relative: 8,
    strangers.of_others: 2,
    strangers.tell_spots: 5,
    strangers.recall_spot: 10,
    strangers.count: 14,
    strangers.add: 6,
    strangers.list_at_once: 20,
    strangers.list_later: 10,
    strangers.story: 3,
    strangers.goodbye: 1,
    hard.remember: 150,
    hard.begin: 55,
    hard.change: 40,
    hard.places: 36,
    hard.friends: 14,
    hard.introduce: 16,
    hard.backwards: 75,
    nearby.codes: 45,
    nearby.moved: 36,
    nearby.count: 70,
    nearby.refuse: 14,
    nearby.edit: 45,
    nearby.yes_or_no: 60,
    hard.introduce_at_once: 80,
}
SECOND = Stage(
    EVERYTHING,
    hard.word,
    WRAPPERS + LATER_WRAPPERS,
    # " tower" may be one token where "tower" is three that the model has never seen together: an answer that begins
    # with other words lets every item keep its leading space, so that copying needs no spelling.
    again="You said: {}.",
    backwards="Reversed: {}.",
    noted=hard.said_again,
)


def begin(rng: random.Random, held_out: bool = False, stage: Stage = FIRST) -> Conversation:
    """A conversation without exchanges; now and then with a system prompt."""
    said = Conversation(rng, held_out, stage)
    if rng.random() < 0.12:
        said.messages.append({"role": "system", "content": rng.choice(small_talk.SYSTEM_PROMPTS)})
    return said


def grow(said: Conversation, exchanges: int):
    """Go on until there are so many exchanges, or one or two more."""
    while len(said.log) < exchanges:
        rng, segments = said.rng, said.stage.segments
        rng.choices(list(segments), list(segments.values()))[0](said)


def talk(
    rng: random.Random, exchanges: int, held_out: bool = False, stage: Stage = FIRST
) -> Conversation:
    """A conversation with so many exchanges, its words and what they mean."""
    said = begin(rng, held_out, stage)
    grow(said, exchanges)
    return said


def conversation(
    rng: random.Random, exchanges: int, held_out: bool = False, stage: Stage = FIRST
) -> list[dict]:
    """The messages of one conversation."""
    return talk(rng, exchanges, held_out, stage).messages


def plain_story(rng: random.Random) -> str:
    """A story outside of any chat: what a user gets who continues a text."""
    names = [words.name(rng, held_out=False) for _ in range(2)]
    return small_talk.tale(rng, *names)


if __name__ == "__main__":
    for message in conversation(random.Random(), 12):
        print(f"{message['role']:>9}: {message['content']}")
