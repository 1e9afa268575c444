"""The training conversations: repeatable, right in every answer, clean, and without the words of the evaluation.

A wrong answer in the corpus is a wrong answer that the model learns, so an independent reader (corpus_checker.py) works
out tens of thousands of them again from what every exchange means, and compares the meaning with the user's words.
"""

import json
import random
import re
from collections import Counter, defaultdict
from importlib.resources import files
from itertools import chain, pairwise

import pytest

from corpus_checker import (
    ACCENTS,
    BELONGING,
    HOME,
    Reader,
    WrongAnswer,
    check,
    introduces,
    kind_of,
    plain,
    says,
)
from nanokv.school.training import corpus, small_talk, words
from nanokv.school.training.cache_questions import HELD_OUT_WRAPPERS, QUESTIONS, YES_OR_NO, ask
from nanokv.school.training.conversation import STYLES, Conversation
from nanokv.school.training.phrases import phrases

CONVERSATIONS, EXCHANGES = 800, 20
STAGES = {"first": corpus.FIRST, "second": corpus.SECOND}
FEWER = {"second": 0.05}  # of the older exchanges: most is what is hard
ADDED = {"second": {"put_first", "remove_place", "replace_item", "steps"}}  # what comes often there
SPLITS = (*STAGES, "held_out")
OFTEN = (  # kinds of exchange, as kind_of calls them: at least 100 of 16,000 in every split
    "tell",
    "ask",
    "pet",
    "ask pet",
    "object",
    "owner",
    "ask object",
    "list again",
    "list backwards",
    "list nth",
    "list remember",
    "confirm",
    "add",
    "count",
    "refuse",
    "cache",
    "talk",
    "nth",
    "home",
    "ask home",
    "ask owner",
)
AT_TIMES = (  # at least 10
    "everything",
    "list length",
    "length",
    "again",
    "backwards",
    "member",
    "before",
    "add_item",
    "remove_item",
    "next",
    "after",
    "story",
    "greet",
    "no list",
    "confirm pet",
    "ask animal",
    "no owner",
    "owns nothing",
)
# In one stage only.
OLD, NEW = {"object", "ask object"}, {"spot", "ask spot", "ask relative", "of others"}
# No pool has these.
NAMES = {"name", "friend", "friends", "word", "song", "book", "film", "band", *words.RELATIVES}
POOLS = set("job hobby colour food drink animal sport fruit flower instrument game subject".split())
POOLED = {
    word.lower()
    for pool in (
        words.COLOURS,
        words.CITIES,
        words.FOODS,
        words.DRINKS,
        words.ANIMALS,
        words.JOBS,
        words.HOBBIES,
        words.PLACES,
        words.SPORTS,
        words.SEASONS,
        words.FRUITS,
        words.FLOWERS,
        words.INSTRUMENTS,
        words.GAMES,
        words.SUBJECTS,
        words.LANGUAGES,
    )
    for word in pool
}


def talks(split: str, name: str = "test", count: int = CONVERSATIONS) -> list[Conversation]:
    """Conversations of a stage of the training or of the held-out half."""
    stage, held_out = STAGES.get(split, corpus.FIRST), split == "held_out"
    return [
        corpus.talk(random.Random(f"{name}:{split}:{i}"), EXCHANGES, held_out, stage)
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def all_talks():
    return {split: talks(split) for split in SPLITS}


@pytest.fixture(scope="module")
def trained(all_talks):
    return [talk for split in STAGES for talk in all_talks[split]]


def exchanges(found):
    """(user, assistant, meaning, conversation) of every exchange."""
    for talk in found:
        said = talk.messages[talk.messages[0]["role"] == "system" :]
        for user, assistant, steps in zip(said[::2], said[1::2], talk.log, strict=True):
            yield user["content"], assistant["content"], steps, talk


def users(found) -> list[str]:
    return [user for user, *_ in exchanges(found)]


# --- the same seed, the same words --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_the_seed_decides_everything(stage, all_talks):
    """Whatever was drawn before: batch i of a resumed run must be batch i."""
    random.seed(1)
    for i in (7, 3):
        again = corpus.conversation(
            random.Random(f"test:{stage}:{i}"), EXCHANGES, stage=STAGES[stage]
        )
        assert again == all_talks[stage][i].messages
    assert talks(stage, name="other", count=1)[0].messages != all_talks[stage][0].messages


def test_conversations_differ(all_talks):
    """A generator that forgot to advance would repeat itself."""
    first = [tuple(users([talk])) for talk in all_talks["first"]]
    assert len(set(first)) == len(first)


def test_shape_of_a_conversation(trained):
    for talk in trained:
        roles = [m["role"] for m in talk.messages]
        assert roles[roles[0] == "system" :] == ["user", "assistant"] * len(talk.log)
        assert len(talk.log) >= EXCHANGES
    assert (
        0.08 < sum(talk.messages[0]["role"] == "system" for talk in trained) / len(trained) < 0.16
    )


# --- every answer is right ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_follows_from_the_conversation(split, all_talks):
    """16,000 exchanges a split: each says what it means, and each answer is worked out again."""
    kinds = Counter(
        chain.from_iterable(
            check(talk.messages, talk.log, f"{split} {i}", split == "second")
            for i, talk in enumerate(all_talks[split])
        )
    )
    assert sum(kinds.values()) >= CONVERSATIONS * EXCHANGES
    often = {*OFTEN, *NEW} - OLD if split == "second" else {*OFTEN}
    often |= ADDED.get(split, set())
    share = FEWER.get(split, 1)
    assert {kind: kinds[kind] for kind in often if kinds[kind] < 100 * share} == {}
    assert {kind: kinds[kind] for kind in AT_TIMES if kinds[kind] < 10 * share} == {}
    assert set(kinds) == {*often, *AT_TIMES}


def is_family(user, one, other) -> bool:
    """Does one sentence tell of these two relatives?"""
    if {one[0], other[0]} != {"tell"} or not {one[1], other[1]} <= set(words.RELATIVES):
        return False
    return says(
        user, phrases("facts")["family"]["told"], a=one[1], x=one[2], b=other[1], y=other[2]
    )


@pytest.mark.parametrize("split", SPLITS)
def test_what_the_kinds_do_not_show(split, all_talks):
    """Several names at once, two relatives in a sentence, things handed on, values that no pool has, accents."""
    seen = Counter()
    for user, answer, steps, _ in exchanges(all_talks[split]):
        seen["accent"] += answer != answer.translate(ACCENTS)
        seen["family"] += any(is_family(user, *pair) for pair in pairwise(steps))
        for name, *values in steps:
            said = plain(str(values[-1])) if values else ""
            seen["friends"] += name in ("tell", "ask", "confirm") and values[0] == "friends"
            seen["several owners"] += (
                name == "owner" and sum(step[0] == "owner" for step in steps) > 1
            )
            seen["no colour"] += name == "owner" and not values[1]
            seen["handed on"] += name == "owner" and says(
                user, BELONGING["moved"], p=values[0], t=values[2]
            )
            seen["moved"] += name == "home" and says(
                user, HOME["changed"], p=values[0], v=values[1]
            )
            seen["strange value"] += name == "tell" and values[0] in POOLS and said not in POOLED
            seen["two words"] += name == "tell" and values[0] in POOLS and " " in said
            seen["strange place"] += (
                name in ("object", "spot") and said.split(" the ")[-1] not in words.PLACES
            )
            seen["strange animal"] += name == "pet" and values[0] not in words.ANIMALS
    few = {what for what, count in seen.items() if count < (5 if split == "second" else 10)}
    # Few live where they lived.
    assert len(seen) == 11 and few <= ({"moved"} if split == "second" else set()), seen


@pytest.mark.parametrize("split", SPLITS)
def test_what_was_never_told_is_often_asked(split, all_talks):
    """Of facts and of pets, in conversations in which others were told."""
    missed, told = Counter(), defaultdict(set)
    for _, answer, steps, talk in exchanges(all_talks[split]):
        told[id(talk)] |= {step[1] for step in steps if step[0] in ("tell", "pet")}
        for name, *values in steps:
            if name in ("ask", "ask pet") and values[0] not in told[id(talk)]:
                assert "ou have not told me" in answer, answer
                missed[name, bool(told[id(talk)])] += 1
    assert missed["ask", False] > 20
    assert min(missed["ask", True], missed["ask pet", True]) > (20 if split == "second" else 60)


@pytest.mark.parametrize("split", SPLITS)
def test_the_newest_value_counts(split, all_talks):
    """Read from the answers alone: after a change the new value is in it, none of the old ones is."""
    seen, values = 0, defaultdict(list)
    for _, answer, steps, talk in exchanges(all_talks[split]):
        for name, kind, *value in (step for step in steps if step[0] in ("tell", "ask")):
            history = values[id(talk), kind]
            if name == "tell":
                history.append(value[0])
            elif len(history) > 1 and len([step for step in steps if step[0] == "ask"]) == 1:
                newest, spoken = set(plain(history[-1]).split()), set(plain(answer).split())
                older = set(plain(" ".join(history[:-1])).split()) - newest
                assert newest <= spoken and not older & spoken, (history, answer)
                seen += 1
    assert seen > 50


# --- the reader can fail ------------------------------------------------------------------------------------------


def noticed(messages, log, says_again: bool = False) -> bool:
    try:
        check(messages, log, says_again=says_again)
    except WrongAnswer:
        return True
    return False


@pytest.mark.slow
def test_a_wrong_answer_is_noticed(all_talks):
    """One of the last two words of any answer changed; only a story may go on as it likes."""
    rng, seen, missed = random.Random(0), Counter(), []
    for split, talk in ((stage, talk) for stage in STAGES for talk in all_talks[stage][:50]):
        assert not noticed(talk.messages, talk.log, split == "second")
        start = talk.messages[0]["role"] == "system"
        for i, (_, answer, steps, _) in enumerate(exchanges([talk])):
            found = rng.choice(list(re.finditer(r"[A-Za-z]+|\d+", answer))[-2:])
            wrong = (
                answer[: found.start()]
                + ("7777" if found[0].isdigit() else "xyzzy")
                + answer[found.end() :]
            )
            at = start + 2 * i + 1
            changed = [
                *talk.messages[:at],
                {"role": "assistant", "content": wrong},
                *talk.messages[at + 1 :],
            ]
            seen[kind_of(steps)] += 1
            if not noticed(changed, talk.log, split == "second") and kind_of(steps) != "story":
                missed.append((steps, wrong))
    assert missed == []
    assert sum(seen.values()) >= 2000 and len(seen) > 25


@pytest.mark.slow
def test_a_wrong_meaning_is_noticed(all_talks):
    """Any one part of a meaning replaced by the same part of another exchange; items in another order."""
    rng, pool = random.Random(0), defaultdict(set)
    for _, _, steps, _ in exchanges(all_talks["first"]):
        for name, *values in steps:
            for place, value in enumerate(values):
                pool[name, place].add(value)
    pool = {key: sorted(values, key=str) for key, values in pool.items()}
    missed, seen = [], 0
    for talk in all_talks["first"][:50]:
        for i, steps in enumerate(talk.log):
            for j, (name, *values) in enumerate(steps):
                for place, value in enumerate(values):
                    other = rng.choice(
                        [v for v in pool[name, place] if plain(str(v)) != plain(str(value))]
                    )
                    wrong = (name, *values[:place], other, *values[place + 1 :])
                    log = [*talk.log[:i], [*steps[:j], wrong, *steps[j + 1 :]], *talk.log[i + 1 :]]
                    seen += 1
                    if not noticed(talk.messages, log):
                        missed.append((steps, wrong))
                if name in ("list", "count"):
                    log = [
                        *talk.log[:i],
                        [*steps[:j], (name, *values[::-1]), *steps[j + 1 :]],
                        *talk.log[i + 1 :],
                    ]
                    assert noticed(talk.messages, log), steps
    assert missed == [] and seen > 1000


@pytest.mark.parametrize(
    ("user", "answer", "step"),
    [
        ("What is 27 + 48?", "27 + 48 = 65.", ("add", 27, 48)),
        ("What is 27 + 49?", "27 + 48 = 75.", ("add", 27, 48)),
        ("Count from 3 to 6.", "3, 4, 5, 6, 7.", ("count", "3", "4", "5", "6")),
        ("Count from 3 to 6.", "3, 4, 6.", ("count", "3", "4", "6")),
        ("Count down from 6 to 3.", "3, 4, 5, 6.", ("count", "6", "5", "4", "3")),
        ("Which number comes after 9?", "After 9 comes 11.", ("after", 9)),
        ("What is my name?", "Your name is Ada.", ("ask", "name")),
        ("What is my cat called?", "Your cat is called Miso.", ("ask pet", "cat")),
        ("Is my name Ada?", "Yes, your name is Ada.", ("confirm", "name", "Ada")),
        ("My name is Ada.", "Nice to meet you, Ida.", ("tell", "name", "Ada")),
        ("My name is Ada.", "Say hello to Ada.", ("tell", "friend", "Ada")),
        ("I live in Oslo.", "Oslo sounds nice.", ("tell", "city", "Osl")),
        ("What is on my list?", "moon, chair.", ("again",)),
        ("Where is the box?", "The box is in the hall.", ("ask object", "box")),
        (
            "My friends are Ada and Tom.",
            "Say hello to Ada and Tim.",
            ("tell", "friends", "Ada and Tom"),
        ),
        ("Who are my friends?", "Your friends are Ada and Tom.", ("ask", "friends")),
        ("What is Rex?", "Rex is a dog.", ("ask animal", "Rex")),
        ("Ada has a lamp.", "Good for Ada.", ("owner", "Ada", "red", "lamp")),
        ("Ada has the lamp now.", "Good for Tom.", ("owner", "Ada", "", "lamp")),
        ("Who has the lamp?", "Ada has the lamp.", ("no owner", "lamp")),
        ("What does Ada have?", "Ada has a lamp.", ("owns nothing", "Ada")),
        ("Tom lives in Oslo.", "So Tom lives in Rome.", ("home", "Tom", "Oslo")),
        ("Where does Tom live?", "Tom lives in Oslo.", ("ask home", "Tom")),
        ("Who lives in Oslo?", "You have not told me where Tom lives.", ("ask home", "Tom")),
        (
            "What is RoPE?",
            "Logits are the raw scores of all tokens for the next position.",
            ("cache", "RoPE"),
        ),
        (
            "Tell me a story about Ada and Tom.",
            "Tom went home. He ate. He slept. The end.",
            ("story", "Ada", "Tom"),
        ),
        ("What is 300 + 4?", "300 + 4 = 304.", ("refuse", "arithmetic")),
        ("One hundred plus one", "100 + 1 = 101.", ("refuse", "arithmetic")),
        (
            "Count from 12 to 4.",
            "12, 13, 14.",
            ("count", "12", "11", "10", "9", "8", "7", "6", "5", "4"),
        ),
        ("Count from 5 to 5.", "5, 6.", ("count", "5")),
        ("Count by twos to 8.", "2, 4, 6.", ("steps", "2", "4", "6")),
        ("Count by threes to 8.", "2, 4, 6, 8.", ("steps", "2", "4", "6", "8")),
        ("My PIN is 4821, my door code 7733.", "Ok, your PIN is 4821.", ("tell", "PIN", "7733")),
        ("I moved from Lima to Turin.", "So you live in Lima.", ("tell", "city", "Lima")),
        ("My name isn't Ada, it's Leo.", "Nice to meet you, Ada.", ("tell", "name", "Ada")),
        ("Hello!", "Hello, Ada!", ("greet",)),
    ],
)
def test_the_reader_knows_wrong_from_right(user, answer, step):
    with pytest.raises(WrongAnswer):
        Reader().exchange(user, answer, [step])


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("So your name is Ada. Your cat is called Leo. You live in Rome.", True),
        ("So your name is Ada. You live in Rome. Your cat is called Leo.", False),
        ("So your name is Ada. You live in Rome.", False),
        ("Your name is Ada. Your cat is called Leo. You live in Rome.", False),
        ("Nice to meet you, Ada.", False),
    ],
)
def test_what_is_told_is_said_again_whole_and_in_its_order(answer, right):
    """In the second stage, which says so."""
    steps = [("tell", "name", "Ada"), ("pet", "cat", "Leo"), ("tell", "city", "Rome")]
    talk = [
        {"role": "user", "content": "I'm Ada, my cat is called Leo and I live in Rome."},
        {"role": "assistant", "content": answer},
    ]
    assert noticed(talk, [steps], says_again=True) == (not right)
    assert noticed(talk, [steps]) == (answer != "Nice to meet you, Ada.")


INTRODUCED = [
    ("tell", "name", "Ada"),
    ("tell", "age", "29"),
    ("tell", "job", "nurse"),
    ("tell", "city", "Oslo"),
]


@pytest.mark.parametrize(
    ("user", "steps", "told"),
    [
        ("Hi, I'm Ada, 29, a nurse from Oslo.", INTRODUCED, True),
        ("hi im ada 29 a nurse from oslo", INTRODUCED, True),
        ("I'm Ada, 29, a nurse from Rome.", INTRODUCED, False),
        ("I'm Ada, a nurse from Oslo.", INTRODUCED, False),
        ("I'm Ada, 29, a nurse from Oslo.", INTRODUCED[:3], False),
        ("I'm Ada, 29, from Oslo.", [*INTRODUCED[:2], INTRODUCED[3]], True),
        ("I'm Ada from Oslo.", INTRODUCED[:3:2], False),
        ("My name is Ada and my cat is called Leo.", [INTRODUCED[0], ("pet", "cat", "Leo")], True),
        ("My name is Ada and my cat is called Leo.", [INTRODUCED[0], ("pet", "dog", "Leo")], False),
        ("I'm Ada and my hobby is chess.", [INTRODUCED[0], ("tell", "hobby", "chess")], True),
    ],
)
def test_the_reader_knows_who_introduces_himself(user, steps, told):
    """Everything that is told stands in the sentence, and it tells nothing else."""
    assert introduces(user, steps) == told


def test_an_introduction_tells_two_facts_and_more(all_talks):
    """The second stage has many of them, and after most of them something that they told is asked for."""
    for sentence in phrases("introductions")["told"]:
        places = re.findall(r"{(\w+)}", sentence)
        assert len(set(places)) == len(places) >= 2, sentence
        assert set(places) <= {"name", "city", "age", "job", "hobby", "other", "pet"}, sentence
    found, asked = [], 0
    for talk in all_talks["second"]:
        said = list(exchanges([talk]))
        for i, (user, _, steps, _) in enumerate(said):
            if len(steps) > 1 and introduces(user, steps):
                later = {step for _, _, later, _ in said[i + 1 : i + 4] for step in later}
                found, asked = (
                    [*found, steps],
                    asked + bool(later & {("ask", kind) for _, kind, _ in steps}),
                )
    assert len(found) > 400 and max(map(len, found)) == 4 and asked > len(found) / 2


FAMILY = (
    "I have a son called Leo and an aunt called Mia.",
    [("tell", "son", "Leo"), ("tell", "aunt", "Mia")],
)
TWO_THINGS = (
    "Ada has a red lamp. Tom owns the boat.",
    [("owner", "Ada", "red", "lamp"), ("owner", "Tom", "", "boat")],
)
HOMES = (
    "Tom lives in Oslo and Ada moved to Rome.",
    [("home", "Tom", "Oslo"), ("home", "Ada", "Rome")],
)
PETS = (
    "My dog is called Rex. I have a cat named Rex.",
    [("pet", "dog", "Rex"), ("pet", "cat", "Rex")],
)
HANDED_ON = "Eva has the lamp now.", "Good for Eva."


@pytest.mark.parametrize(
    ("told", "noted", "user", "right", "wrong", "step"),
    [
        (
            FAMILY,
            "Say hello to Leo and Mia.",
            "Who is my aunt?",
            "{aunt} Mia.",
            "{aunt} Leo.",
            ("ask", "aunt"),
        ),
        (
            TWO_THINGS,
            "Good for Tom.",
            "Whose boat is it?",
            "Tom has the boat.",
            "Ada has the boat.",
            ("ask owner", "who", "Tom"),
        ),
        (
            TWO_THINGS,
            "Good for Tom.",
            "What does Ada have?",
            "Ada has a red lamp.",
            "Ada has a lamp.",
            ("ask owner", "what", "Ada"),
        ),
        (TWO_THINGS, "Good for Tom.", *HANDED_ON, "Good for Ada.", ("owner", "Eva", "red", "lamp")),
        # It is still red.
        (TWO_THINGS, "Good for Tom.", *HANDED_ON, None, ("owner", "Eva", "", "lamp")),
        (
            HOMES,
            "Noted: Ada lives in Rome.",
            "Who lives in Oslo?",
            "Tom lives in Oslo.",
            "Ada lives in Oslo.",
            ("ask home", "Tom"),
        ),
        (
            HOMES,
            "Noted: Ada lives in Rome.",
            "Tom has moved to Bonn.",
            "So Tom lives in Bonn.",
            "So Tom lives in Oslo.",
            ("home", "Tom", "Bonn"),
        ),
        (
            PETS,
            "Say hello to Rex.",
            "What kind of pet is Rex?",
            "Rex is a dog.",
            None,
            ("ask animal", "Rex"),
        ),
    ],
)
def test_the_reader_remembers_other_people(told, noted, user, right, wrong, step):
    """None as the wrong answer: there is no right one."""
    said = {"aunt": "Your aunt is called"}
    for answer, passes in ((right, wrong is not None), (wrong or right, False)):
        reader = Reader()
        reader.exchange(told[0], noted, told[1])
        if passes:
            reader.exchange(user, answer.format(**said), [step])
        else:
            with pytest.raises(WrongAnswer):
                reader.exchange(user, answer.format(**said), [step])


@pytest.mark.parametrize(
    ("user", "step", "right", "wrong"),
    [
        (
            "Replace chair with lamp.",
            ("replace_item", "chair", "lamp"),
            "moon, lamp, drum",
            "moon, drum, lamp",
        ),
        ("Remove the second one.", ("remove_place", "second"), "moon, drum", "chair, drum"),
        ("Take the last one off.", ("remove_place", "last"), "moon, chair", "moon, chair, drum"),
        (
            "Put lamp first.",
            ("put_first", "lamp"),
            "lamp, moon, chair, drum",
            "moon, chair, drum, lamp",
        ),
        (
            "Put lamp last.",
            ("add_item", "lamp"),
            "moon, chair, drum, lamp",
            "lamp, moon, chair, drum",
        ),
    ],
)
def test_the_reader_edits_lists(user, step, right, wrong):
    for items, passes in ((right, True), (wrong, False)):
        reader = Reader()
        reader.list = ["moon", "chair", "drum"]
        if passes:
            reader.exchange(user, f"Your list is now: {items}.", [step])
        else:
            with pytest.raises(WrongAnswer):
                reader.exchange(user, f"Your list is now: {items}.", [step])


def test_a_statement_says_nothing_else():
    """Another value in the same message would be a fact that nobody noted."""
    reader = Reader()
    reader.exchange("My name is Zorbla.", "Welcome, Zorbla.", [("tell", "name", "Zorbla")])
    with pytest.raises(WrongAnswer, match="also says"):
        reader.exchange("Zorbla says: I live in Oslo.", "Noted: Oslo.", [("tell", "city", "Oslo")])


def test_slips_and_marks_are_read():
    assert says("teh nmae's Bob", ["The name's {v}."], v="bob") and says(
        "u r Bob!", ["You are {v}"], v="Bob"
    )
    assert says("whats twenty-one plus 3", ["What's {} plus {}?"], "twenty one", 3)
    assert not says("27 - 48", ["{} + {}"], 27, 48) and not says(
        "I am Bobby", ["I am {v}."], v="Bob"
    )


# --- the words of the evaluation ----------------------------------------------------------------------------------


def drawn(found) -> set[str]:
    """Names, secret words, list items, things, and values of no pool: what must be new in the evaluation.

    A name gets its accent after it was drawn, so its letters count without.
    """
    new: set[str] = set()
    for step in chain.from_iterable(chain.from_iterable(talk.log for talk in found)):
        name, *values = step
        if name in ("list", "member", "add_item", "no owner", "owns nothing", "ask home"):
            new.update(values)
        elif name in ("tell", "confirm", "pet", "confirm pet", "owner", "home", "object"):
            skipped = 1 if name in ("tell", "confirm") else 0  # the kind of fact
            parts = set(" ".join(values[skipped:]).replace(",", "").split()) - {"and"}
            always = name in ("tell", "confirm") and values[0] in NAMES
            new.update(
                part for part in parts if part.isalpha() and (always or part.lower() not in POOLED)
            )
    return {word.translate(ACCENTS) for word in new}


def test_training_draws_no_held_out_word(trained, all_talks):
    """What the evaluation asks for was never a name, a secret word or a list item in training."""
    taught, tested = drawn(trained), drawn(all_talks["held_out"])
    assert len(taught) > 4000 and len(tested) > 500
    assert [word for word in taught if words.is_held_out(word)] == []
    assert [word for word in tested if not words.is_held_out(word)] == []


def test_training_says_no_held_out_name(trained):
    """Not only as a value: a held-out name is nowhere, in no story, no question and no greeting."""
    texts = " ".join(m["content"] for talk in trained for m in talk.messages)
    # A painting, and Mona is held out.
    said = set(re.findall(r"[A-Z][^\W\d_]+", texts.replace("Mona Lisa", "")))
    hidden = {name for name in words.NAMES if words.is_held_out(name)}
    assert len(hidden) >= 15 and said & hidden == set()


def test_the_halves_are_both_usable():
    """About one word in eight is held out; a pool with an empty half would loop for ever."""
    for pool in (words.NAMES, words.NOUNS, words.FOODS + words.ANIMALS):
        hidden = sum(map(words.is_held_out, pool))
        assert 0 < hidden < len(pool) / 4
    rng = random.Random(0)
    invented = [words.invent(rng, held_out=True) for _ in range(2000)]
    assert len(set(invented)) > 500 and all(
        3 <= len(word) <= 12 and word.isalpha() for word in invented
    )


def test_training_asks_no_held_out_phrasing(trained):
    """The last phrasing of each cache question is never typed, in any wrapping and spelling."""
    hidden = [f" {plain(asked[-1])} " for _, asked in QUESTIONS + YES_OR_NO]
    lines = [f" {plain(line)} " for line in users(trained)]
    assert [line for line in lines if any(phrasing in line for phrasing in hidden)] == []
    assert " how does rope work " in hidden


def test_training_wraps_no_question_as_the_evaluation_does(trained):
    assert not set(corpus.FIRST.wrappers + corpus.SECOND.wrappers) & set(HELD_OUT_WRAPPERS)
    phrasings, wrapped = {plain(p) for _, asked in QUESTIONS + YES_OR_NO for p in asked}, []
    for line, _, steps, _ in exchanges(trained):
        if steps[-1][0] == "cache":
            for phrasing in (p for p in phrasings if p in plain(line)):
                wrapped += [
                    line for w in HELD_OUT_WRAPPERS if says(line, [w], q=phrasing, l=phrasing)
                ]
    assert wrapped == []


def test_all_trained_phrasings_come_up():
    """Every question in every trained wording, and only those, is within reach of training."""
    rng, asked = random.Random(0), Counter()
    for _ in range(3000):
        talk = Conversation(rng, held_out=False, stage=corpus.FIRST)
        small_talk.cache_question(talk)
        asked[talk.messages[1]["content"]] += 1
    assert set(asked) == {answer for answer, _ in QUESTIONS} and min(asked.values()) > 20
    assert ask(random.Random(0), "What is RoPE?", ("{l}",)) == "what is RoPE?"


def test_the_second_stage_frames_its_lists(all_talks):
    """There a list is never the first thing said, so that every item has the leading space that its token has."""
    answers = [answer for _, answer, *_ in exchanges(all_talks["second"])]
    assert sum(text.startswith("You said: ") for text in answers) > 400
    assert sum(text.startswith("Reversed: ") for text in answers) > 400
    named = [
        answer
        for _, answer, steps, _ in exchanges(all_talks["second"])
        if steps[-1][0] in ("again", "backwards")
    ]
    assert [text for text in named if not text.startswith(("You said: ", "Reversed: "))] == []


def test_no_phrasing_has_two_answers():
    """Then no model could be right."""
    owners = Counter(
        plain(phrasing) for _, phrasings in QUESTIONS + YES_OR_NO for phrasing in phrasings
    )
    assert [phrasing for phrasing, count in owners.items() if count > 1] == []
    assert all(len(phrasings) >= 4 for _, phrasings in QUESTIONS + YES_OR_NO)


# --- numbers ------------------------------------------------------------------------------------------------------


def test_sums_are_of_two_numbers_up_to_99(trained):
    """A third and more has a number of one digit, which chance would give to one sum in five."""
    added = [
        step[1:] for _, _, steps, _ in exchanges(trained) for step in steps if step[0] == "add"
    ]
    assert min(min(pair) for pair in added) == 0 and max(max(pair) for pair in added) == 99
    assert sum(min(pair) < 10 for pair in added) > len(added) / 3
    assert {a for a, _ in added} | {b for _, b in added} == set(range(100))


SUMS = [
    *phrases("stories")["arithmetic"]["big"],
    *(
        text.replace("{}", "{a}", 1).replace("{}", "{b}", 1)
        for text in phrases("requests")["numbers"]["add"]
    ),
]


def is_small_sum(line: str) -> bool:
    """Read from the digits: it ends with a question for the sum of its two numbers up to 99."""
    numbers = re.findall(r"\d+", line)
    if len(numbers) != 2 or max(map(int, numbers)) > 99:
        return False
    forms = [plain(text).format(a=a, b=b) for text in SUMS for a, b in (numbers, numbers[::-1])]
    ends = [form for form in forms if f" {plain(line)}".endswith(f" {form}")]
    return bool(ends) and not plain(line).endswith(f"- {max(ends, key=len)}")


def test_only_other_arithmetic_is_refused(trained):
    assert (
        is_small_sum("ok, whats 3 plus 99")
        and not is_small_sum("-3 + 99")
        and not is_small_sum("3 + 99 - 1")
    )
    refused, added = [], []
    for line, answer, steps, _ in exchanges(trained):
        is_refused = steps[-1] == ("refuse", "arithmetic")
        assert is_refused == answer.startswith("I can only add two numbers"), line
        if is_refused or steps[-1][0] == "add":
            (refused if is_refused else added).append(is_small_sum(line))
    assert len(refused) > 400 and not any(refused)
    # The rest is in words, or goes on after the question.
    assert len(added) > 1500 and sum(added) > 0.6 * len(added)


def test_numbers_stay_in_range(trained):
    """No more than six digits, and none below zero."""
    numbers = [int(n) for line in users(trained) for n in re.findall(r"\d+", line)]
    assert min(numbers) == 0 and 100_000 < max(numbers) <= 999_999


# --- how users type, and clean English ----------------------------------------------------------------------------


def test_users_type_in_all_styles(trained):
    """In their shares; each style is what it says."""
    styles = Counter(talk.style for talk in trained)
    for style, weight in STYLES.items():
        assert abs(styles[style] / len(trained) - weight / sum(STYLES.values())) < 0.05, styles
    assert 0.25 < sum(talk.american for talk in trained) / len(trained) < 0.35
    ends = defaultdict(list)
    for line, _, _, talk in exchanges(trained):
        ends[talk.style].append(line[-1] in ".?!")
        if talk.style == "small":
            assert line == line.lower()
        if talk.style == "casual":
            assert set(re.findall(r"[^\W\d_]*[A-Z][^\W\d_]*", line)) <= talk.capitals, line
        assert not (talk.american and "favourite" in line.casefold()), line
    shares = {style: sum(marks) / len(marks) for style, marks in ends.items()}
    assert shares["no mark"] == 0 and shares["written"] > 0.7 and 0.15 < shares["casual"] < 0.4


def test_slips_are_there_and_rare(trained):
    lines = [line for line, _, _, talk in exchanges(trained) if talk.style in ("casual", "small")]
    slips = sum(bool(re.search(r"\b(?:u|ur|waht|teh|wich|nmae|thx|pls)\b", line)) for line in lines)
    assert 0.02 < slips / len(lines) < 0.2
    neat = [line for line, _, _, talk in exchanges(trained) if talk.style in ("written", "no mark")]
    assert [
        line for line in neat if re.search(r"\b(?:waht|teh|wich|nmae|remeber|lsit)\b", line)
    ] == []


@pytest.mark.parametrize("split", SPLITS)
def test_texts_are_clean(split, all_talks):
    """One line, single spaces, no template braces; answers end like sentences, and all but their accents is ASCII."""
    for message in chain.from_iterable(talk.messages for talk in all_talks[split]):
        text = message["content"]
        assert (
            text.strip()
            and text.isprintable()
            and "  " not in text
            and not re.search(r"[{}<>|]", text)
        ), text
        assert text == text.strip(), text
        marks = text.replace("= ?", "=").replace("...", "")
        assert not re.search(r"\S\s[,.!?]|[,.!?]{2}", marks), text
        if message["role"] != "user":
            assert text.translate(ACCENTS).isascii() and text[-1] in ".!?", text


def test_answers_begin_with_a_capital(trained):
    """Lists and names apart; and the names of a user who types everything small."""
    plain_start = [
        (steps, answer)
        for _, answer, steps, talk in exchanges(trained)
        if answer[0].islower()
        and not answer.startswith(("nanokv", "start_pos"))
        and talk.style != "small"
        and steps[-1][0] not in ("again", "backwards", "count")
    ]
    assert plain_start == []


def test_articles_agree(trained):
    """Always in what the assistant says; users write "an LLM" as it is spoken, and little that is wrong."""
    wrong = re.compile(
        r"\b[Aa] (?!uni|one\b|eu|use)[aeiou]|\b[Aa]n (?![aeiouAEIOU]|[A-Z]{2}|hour|honest)"
    )
    answers = [answer for _, answer, *_ in exchanges(trained)]
    assert [text for text in answers if wrong.search(text)] == []
    typed = [line for line in users(trained) if wrong.search(line)]
    assert len(typed) < 0.002 * len(answers), typed[:5]


# --- conversations that nobody who made the corpus wrote ----------------------------------------------------------


@pytest.fixture(params=["natural", "paraphrased"])
def written(request):
    """The rows of a file of 200 conversations."""
    lines = (
        (files("nanokv.school.training") / f"{request.param}.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return [json.loads(line) for line in lines]


def test_the_written_examples_pass_their_own_rules(written):
    """Each conversation has an answer that its patterns accept; they do not accept just anything."""
    assert len(written) == 200 and all(
        row["turns"] and row["right"] and all(row["turns"]) for row in written
    )
    for row in written:
        assert all(re.search(pattern, row["example"], re.IGNORECASE) for pattern in row["right"]), (
            row
        )
        assert not any(
            re.search(pattern, row["example"], re.IGNORECASE) for pattern in row["wrong"]
        ), row
        assert not all(re.search(pattern, "xyzzy", re.IGNORECASE) for pattern in row["right"]), row


def leaves(texts):
    """Every sentence of a file."""
    if isinstance(texts, str):
        return [texts]
    return [
        text
        for part in (texts.values() if isinstance(texts, dict) else texts)
        for text in leaves(part)
    ]


def test_written_turns_are_not_in_the_corpus(written):
    """A whole turn of more than five words that stands in both is chance; these three do."""
    turns = {plain(turn) for row in written for turn in row["turns"] if len(turn.split()) > 5}
    corpus_texts = {
        plain(text)
        for name in ("facts", "requests", "stories", "cache_questions")
        for text in leaves(phrases(name))
    }
    known = {"What do I do for work?", "What do I need to buy?", "Tell me what a token is."}
    assert len(turns) > 150 and len(corpus_texts) > 2000
    assert turns & corpus_texts <= set(map(plain, known))
