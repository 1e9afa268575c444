"""The training conversations: repeatable, right in every answer, clean, and without the words of the evaluation.

A wrong answer in the corpus is a wrong answer that the model learns, so an independent reader (corpus_checker.py) works
out tens of thousands of them again from the text of the conversation.
"""

import random
import re
from collections import Counter
from itertools import chain

import pytest

from corpus_checker import Reader, WrongAnswer, check
from nanokv.training import corpus, words
from nanokv.training.cache_questions import HELD_OUT_WRAPPERS, QUESTIONS, ask

CONVERSATIONS, EXCHANGES = 400, 20
REMEMBERED = (  # kinds of exchange whose answer depends on earlier turns, and how often they must have come up
    "recall", "recall missing", "pet", "pet missing", "everything", "owner", "object", "list again", "list backwards",
    "list length", "list member", "list next", "list which",
)  # fmt: skip
AT_ONCE = ("add", "count", "repeat", "reverse", "nth", "remember", "cache", "story", "told", "pet told", "unknown")


def talks(held_out: bool, name: str = "test", stage=corpus.FIRST):
    return [corpus.conversation(random.Random(f"{name}:{i}"), EXCHANGES, held_out, stage) for i in range(CONVERSATIONS)]


@pytest.fixture(scope="module")
def train():
    return talks(held_out=False)


@pytest.fixture(scope="module")
def second():
    """The later part of the training."""
    return talks(held_out=False, stage=corpus.SECOND)


@pytest.fixture(scope="module")
def third():
    """The last part."""
    return talks(held_out=False, stage=corpus.THIRD)


@pytest.fixture(scope="module")
def held_out():
    return talks(held_out=True)


@pytest.fixture(scope="module")
def readings(train, second, third, held_out):
    """split → (kinds of exchange with their numbers, all values that were drawn); raises at the first wrong answer."""
    found = {}
    for split, conversations in (("train", train), ("second", second), ("third", third), ("held_out", held_out)):
        kinds: list[str] = []
        drawn = set(chain.from_iterable(check(talk, kinds.append).drawn for talk in conversations))
        found[split] = Counter(kinds), drawn
    return found


def users(conversations):
    return [m["content"] for talk in conversations for m in talk if m["role"] == "user"]


# --- the same seed, the same words --------------------------------------------------------------------------------


def test_the_seed_decides_everything(train):
    """Whatever was drawn before: batch i of a resumed run must be batch i."""
    random.seed(1)
    assert talks(held_out=False)[-20:] == train[-20:]
    assert talks(held_out=False, name="other")[0] != train[0]


def test_conversations_differ():
    """A generator that forgot to advance would repeat itself."""
    first = [tuple(users([talk])) for talk in talks(held_out=False)]
    assert len(set(first)) == len(first)


def test_shape_of_a_conversation(train):
    for talk in train:
        roles = [m["role"] for m in talk]
        assert roles[roles[0] == "system" :] == ["user", "assistant"] * (len(roles) // 2)
        assert len(roles) // 2 >= EXCHANGES
    assert 0.05 < sum(talk[0]["role"] == "system" for talk in train) / len(train) < 0.25


# --- every answer is right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "second", "third", "held_out"])
def test_every_answer_follows_from_the_conversation(split, readings):
    """8,000 exchanges a split, each understood and each answer worked out again."""
    kinds, _ = readings[split]
    assert sum(kinds.values()) >= CONVERSATIONS * EXCHANGES
    assert {kind: kinds[kind] for kind in REMEMBERED if kinds[kind] < 10} == {}
    assert {kind: kinds[kind] for kind in AT_ONCE if kinds[kind] < 100} == {}


def tampered(talk, kinds, rng):
    """Every memory-bound answer of a conversation with one of its last words changed: (kind, changed conversation)."""
    start = talk[0]["role"] == "system"
    for i, kind in enumerate(kinds):
        at = start + 2 * i + 1
        answer = talk[at]["content"]
        found = rng.choice(list(re.finditer(r"[A-Za-z]+|\d+", answer))[-2:])
        wrong = answer[: found.start()] + ("7777" if found[0].isdigit() else "xyzzy") + answer[found.end() :]
        yield kind, [*talk[:at], {"role": "assistant", "content": wrong}, *talk[at + 1 :]]


def test_the_checker_can_fail(train):
    """One changed word in any answer that depends on memory or arithmetic is noticed."""
    rng, noticed, missed = random.Random(0), Counter(), []
    for talk in train[:25]:
        kinds: list[str] = []
        check(talk, kinds.append)
        for kind, changed in tampered(talk, kinds, rng):
            if kind not in REMEMBERED + ("add", "count", "repeat", "reverse", "nth", "cache"):
                continue
            try:
                check(changed)
                missed.append((kind, changed))
            except WrongAnswer:
                noticed[kind] += 1
    assert missed == []
    assert sum(noticed.values()) > 200


@pytest.mark.parametrize(
    ("user", "answer"),
    [
        ("What is 27 + 48?", "27 + 48 = 65."),
        ("Count from 3 to 6.", "3, 4, 5, 6, 7."),
        ("Count down from 6 to 3.", "3, 4, 5, 6."),
        ("Reverse: moon, chair", "moon, chair."),
        ("Which is the 2nd: moon, chair, lake?", "The second is lake."),
        ("What is my name?", "Your name is Ada."),
        ("What is my cat called?", "Your cat is called Miso."),
        ("What is on my list?", "moon, chair."),
        ("Where is the box?", "The box is in the hall."),
        ("What is RoPE?", "Logits are the raw scores of all tokens for the next position."),
        ("Tell me a story about Ada and Tom.", "Tom went home. He ate. He slept. The end."),
    ],
)
def test_the_checker_knows_wrong_from_right(user, answer):
    with pytest.raises((WrongAnswer, KeyError)):
        Reader().exchange(user, answer)


# --- the words of the evaluation ----------------------------------------------------------------------------------


def test_training_draws_no_held_out_word(readings):
    """Names, secret words, list items, things: what the evaluation asks for was never one of these in training."""
    drawn, tested = readings["train"][1] | readings["second"][1] | readings["third"][1], readings["held_out"][1]
    assert len(drawn) > 2000 and len(tested) > 500
    assert [word for word in drawn if words.is_held_out(word)] == []
    assert [word for word in tested if not words.is_held_out(word)] == []


def test_training_says_no_held_out_name(train, second):
    """Not only as a value: a held-out name is nowhere, in no story, no question and no greeting."""
    said = set(re.findall(r"[A-Z][a-z]+", " ".join(m["content"] for talk in train + second for m in talk)))
    hidden = {name for name in words.NAMES if words.is_held_out(name)}
    assert len(hidden) >= 15 and said & hidden == set()


def test_the_halves_are_both_usable():
    """About one word in eight is held out; a pool with an empty half would loop for ever."""
    for pool in (words.NAMES, words.NOUNS, words.FOODS + words.ANIMALS):
        hidden = sum(map(words.is_held_out, pool))
        assert 0 < hidden < len(pool) / 4
    rng = random.Random(0)
    invented = [words.invent(rng, held_out=True) for _ in range(2000)]
    assert len(set(invented)) > 500 and all(3 <= len(word) <= 12 and word.isalpha() for word in invented)


def test_training_asks_no_held_out_phrasing(train, second):
    """The last phrasing of each cache question, in any wrapping and spelling, and the wrappers of the evaluation."""
    lines = [line.casefold() for line in users(train + second)]
    hidden = "|".join(re.escape(phrasings[-1].casefold().rstrip(".?")) for _, phrasings in QUESTIONS)
    assert re.search(rf"\b(?:{hidden})\b", "tell me about rope?") is None
    assert re.search(rf"\b(?:{hidden})\b", "hey, how does rope work?")
    assert [line for line in lines if re.search(rf"\b(?:{hidden})\b", line)] == []
    trained = [p for _, phrasings in QUESTIONS for p in phrasings[:-1]]
    wrapped = {
        w.format(q=p, l=small).casefold().rstrip(".?")
        for w in HELD_OUT_WRAPPERS for p in trained for small in (p[0].lower() + p[1:], p)
    }  # fmt: skip
    assert [line for line in lines if line.rstrip(".?") in wrapped] == []
    assert set(corpus.FIRST.wrappers + corpus.SECOND.wrappers + corpus.THIRD.wrappers) & set(HELD_OUT_WRAPPERS) == set()


def test_all_trained_phrasings_come_up():
    """Every question in every trained wording, and only those, is within reach of training."""
    rng = random.Random(0)
    asked = Counter()
    for _ in range(6000):
        talk = corpus.Conversation(rng)
        corpus.cache_question(talk)
        asked[talk.messages[1]["content"]] += 1
    assert set(asked) == {answer for answer, _ in QUESTIONS}
    assert ask(random.Random(0), "What is RoPE?", ("{l}",)) == "what is RoPE?"


def test_the_last_stage_frames_its_lists(third):
    """There a list is never the first thing said, so that every item has the leading space that its token has."""
    answers = [m["content"] for talk in third for m in talk if m["role"] == "assistant"]
    assert sum(text.startswith("You said: ") for text in answers) > 200
    assert sum(text.startswith("Reversed: ") for text in answers) > 200
    assert [text for text in answers if re.fullmatch(r"[a-z]+(?:, \w+)+\.", text)] == []


def test_no_phrasing_has_two_answers():
    """Then no model could be right."""
    owners = Counter(phrasing.casefold().rstrip(".?") for _, phrasings in QUESTIONS for phrasing in phrasings)
    assert [phrasing for phrasing, count in owners.items() if count > 1] == []
    assert all(len(phrasings) >= 4 for _, phrasings in QUESTIONS)


# --- clean English ------------------------------------------------------------------------------------------------


def test_texts_are_clean(train, second, held_out):
    """ASCII, one line, single spaces, no template braces, answers that end like sentences."""
    for message in chain.from_iterable(train + second + held_out):
        text = message["content"]
        assert text.isascii() and text.isprintable() and "  " not in text and not re.search(r"[{}<>|]", text), text
        assert text[0] != " " and not re.search(r"\s[,.!?]|[,.!?]{2}", text.replace("= ?", "=")), text
        if message["role"] != "user":
            assert text[-1] in ".!?" and not re.search(r"\b(\w\w+) \1\b", text), text


def test_articles_agree_nearly_always(train):
    """`a engineer` and an `a` before a thing with a vowel slip through; they must stay rare."""
    answers = [m["content"] for talk in train for m in talk]
    wrong = [text for text in answers if re.search(r"\b(?:a [aeio]|an [^aeiou\s])", text)]
    assert len(wrong) / len(answers) < 0.002, wrong[:5]


def test_numbers_stay_in_range(train):
    numbers = [int(n) for line in users(train) for n in re.findall(r"\d+", line)]
    assert min(numbers) == 0 and max(numbers) <= 999
