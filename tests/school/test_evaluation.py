"""The evaluation itself: right answers by an independent reader, a judge that cannot be fooled, faults that are faults.

A stub that always knows reaches 100 %, one that says nothing 0 %, one that repeats all it heard next to nothing. The
bundled model is then held to the targets.
"""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import nanokv
import weights_loader
from corpus_checker import ACCENTS
from nanokv.apps import cli
from nanokv.cache import make_cache
from nanokv.config import GenerationConfig
from nanokv.inference import decode, prefill
from nanokv.school.training import acknowledgements, data, evaluate, firsts, judging, scripts, words
from nanokv.school.training.cache_questions import QUESTIONS, YES_OR_NO
from nanokv.school.training.evaluate import (
    TARGETS,
    TASKS,
    WRITTEN,
    Case,
    Judged,
    WrongPosition,
    broken_recall,
    cases,
    faults,
)
from nanokv.school.training.phrases import phrases
from nanokv.school.training.sums import LARGEST
from nanokv.school.training.trainer import Recipe, Trainer
from nanokv.text.tokenizer import Tokenizer
from small_training import SMALL, small_tokenizer

ROOT = Path(__file__).parents[2]
CASES = 150
RECALLED = ("recall", "introductions", "updates", "other assistants")
STRANGE = [  # cases of stranger_cases with patterns
    "facts without names",
    "nothing invented",
    "first sentences",
    "first sentences, new phrasing",
    "emoji and other scripts",
    "sizes of caches",
]
EXACT = [task for task in TASKS if task not in (*RECALLED, *STRANGE, "never told")]
ALL = (*TASKS, *WRITTEN)


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on matrices this small only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained small model, exported."""
    folder = tmp_path_factory.mktemp("models") / "untrained"
    Trainer(Recipe(), config=SMALL, tokenizer=small_tokenizer()).export(folder)
    return folder


# --- the cases are right ---------------------------------------------------------------------------------------------


def test_targets_are_the_promised_ones():
    assert TARGETS == {
        "recall": 0.97,
        "updates": 0.95,
        "never told": 0.95,
        "repeat": 0.97,
        "nth": 0.97,
        "reverse": 0.95,
        "count": 0.97,
        "sums": 0.97,
        "longer sums refused": 0.90,
        "cache questions": 0.97,
        "facts without names": 0.95,
        "other assistants": 0.95,
        "nothing invented": 0.95,
        "first sentences": 0.95,
        "emoji and other scripts": 0.95,
        "sizes of caches": 0.95,
        "natural": 0.80,
    }
    assert set(TARGETS) <= set(ALL)


def held(text: str, value: str) -> bool:
    """The value stands in the text as a word of its own."""
    return re.search(rf"(?<!\w){re.escape(value.casefold())}(?!\w)", text.casefold()) is not None


@pytest.mark.parametrize("task", ["repeat", "reverse"])
def test_expected_lists_are_right(task):
    """The user's words in their order, or in the other one, and no word besides."""
    for case in cases(task, CASES, seed=3):
        items, request = case.expected.split(", "), case.turns[-1]
        places = [re.search(rf"\b{re.escape(item)}\b", request).start() for item in items]
        assert all(a < b for a, b in pairwise(places if task == "repeat" else places[::-1])), case
        assert case.accepts(case.expected + ".") and not case.accepts(
            f"{case.expected}, {items[0]}"
        )
        assert not case.accepts(", ".join(items[1:]))


def test_expected_places_are_right():
    """The third is the third of the words that the request lists; the lists that are told apart by commas."""
    seen = 0
    for case in cases("nth", 4 * CASES, seed=3):
        found = re.search(r"([\w-]+(?:, [\w-]+){2,})", case.turns[-1])
        place = re.search(
            rf"\b({'|'.join(words.ORDINALS)}|last|\d(?:st|nd|rd|th))\b",
            case.turns[-1],
            re.IGNORECASE,
        )
        if not found or not place:
            continue
        items = [
            item
            for item in found[1].split(", ")
            if item.lower() not in ("what", "which", "tell", "give", "the")
        ]
        where = place[1].lower()
        if not held(found[1], case.expected) or " and " in case.turns[-1]:
            continue
        index = (
            -1
            if where == "last"
            else int(where[0]) - 1
            if where[0].isdigit()
            else words.ORDINALS.index(where)
        )
        assert items[index] == case.expected, case
        assert case.accepts(f"The {where} is {case.expected}.") and not case.accepts(found[1])
        seen += 1
    assert seen > 100


SPELLED = {words.number(n): n for n in range(LARGEST + 1)}


def test_expected_sums_are_right():
    """The two numbers of the request, in digits or in words, added here; every length of both comes up."""
    lengths = set()
    for case in cases("sums", 2 * CASES, seed=3):
        request = re.sub(
            r"(?<=ty) (?=(one|two|three|four|five|six|seven|eight|nine)\b)",
            "-",
            case.turns[-1].lower(),
        )
        spelled = re.findall(r"[a-z]+(?:-[a-z]+)?", request)
        numbers = [int(n) for n in re.findall(r"\d+", request)] or [
            SPELLED[w] for w in spelled if w in SPELLED
        ]
        a, b = numbers[-2:]
        assert max(a, b) <= LARGEST and case.expected == str(a + b), case
        assert case.accepts(f"{a} + {b} = {a + b}.") and not case.accepts(f"{a} + {b} = {a + b}0.")
        assert case.group == f"{len(str(a))} + {len(str(b))} digits"
        lengths.add(case.group)
    assert len(lengths) == 4


def test_expected_counts_are_right():
    """Neighbours differ by one, and the ends stand in the request."""
    forms = set()
    for case in cases("count", 2 * CASES, seed=3):
        said = case.expected.split(", ")
        numbers = [int(n) if n.isdigit() else SPELLED[n] for n in said]
        assert {b - a for a, b in pairwise(numbers)} in ({1}, {-1}), case
        assert held(case.turns[-1], said[-1]) or (
            numbers[-1] == 1 and held(case.turns[-1], said[0])
        ), case
        forms.add((said[0].isdigit(), numbers[0] < numbers[-1], held(case.turns[-1], said[0])))
    assert len(forms) >= 6


@pytest.mark.parametrize("task", RECALLED)
def test_expected_recalls_are_right(task):
    """The value stands in an earlier turn, after every older value; all else that was told makes an answer wrong."""
    for case in cases(task, 2 * CASES, seed=3):
        *earlier, question = case.turns
        told = [i for i, turn in enumerate(earlier) if held(turn, case.expected)]
        assert told and not held(question, case.expected), case
        assert all(held(" ".join(earlier), other) for other in case.others), case
        assert case.accepts(f"It is {case.expected.upper()}.") and not case.accepts("I don't know.")
        assert [other for other in case.others if case.accepts(f"{case.expected}, {other}")] == []
        assert task != "updates" or case.others  # at least the value that it had before


def test_what_was_never_told_is_not_in_the_turns():
    """Right is to say so; each value that was told, in the answer, makes it wrong."""
    for case in cases("never told", CASES, seed=3):
        assert case.accepts("I don't know. You have not told me.") and case.wrong
        assert not case.accepts("Your name is Zorbla.")
        for pattern in case.wrong:
            assert re.search(pattern, " ".join(case.turns), re.IGNORECASE), case
            value = pattern.removeprefix(r"(?<!\w)").removesuffix(r"(?!\w)").replace("\\", "")
            assert not case.accepts(f"You have not told me, {value}."), case


def test_expected_answers_to_cache_questions_are_right():
    by_answer = {answer.rstrip("."): phrasings for answer, phrasings in QUESTIONS + YES_OR_NO}
    for case in cases("cache questions", CASES, seed=3):
        bare = re.sub(r"\W", "", case.turns[-1]).lower()
        assert any(
            re.sub(r"\W", "", phrasing).lower() in bare
            for phrasing in by_answer[case.expected][:-1]
        ), case
    for case in cases("cache questions, new phrasing", CASES, seed=3):
        assert case.turns[-1] == by_answer[case.expected][-1]


def test_a_written_conversation_accepts_its_own_example():
    """Both files: the same conversations, line for line in other words, each with an answer that its judge takes."""
    rows = {}
    for name in WRITTEN.values():
        lines = (
            (ROOT / f"nanokv/school/training/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        )
        rows[name] = [json.loads(line) for line in lines]
        for row in rows[name]:
            judged = Judged(*(tuple(row[key]) for key in ("turns", "right", "wrong")))
            assert judged.right and judged.accepts(row["example"]), row
            assert not judged.accepts(""), row
    natural, paraphrased = rows.values()
    assert len(natural) == len(paraphrased) == 200
    assert [row["about"] for row in natural] == [row["about"] for row in paraphrased]
    pairs = zip(natural, paraphrased, strict=True)
    assert [row for row, other in pairs if set(row["turns"]) & set(other["turns"])] == []


def test_both_written_tasks_take_the_same_lines():
    natural, paraphrased = (cases(task, 50, seed=4) for task in WRITTEN)
    everything = [evaluate.written_cases(name) for name in WRITTEN.values()]
    assert [everything[0].index(case) for case in natural] == [
        everything[1].index(case) for case in paraphrased
    ]


def test_cases_use_words_that_training_never_drew():
    """Names, secret words and list words; colours, foods and cities are short lists that both halves share.

    A name gets its accent after it was drawn, so its letters count without.
    """
    for task in ("repeat", "reverse"):
        for case in cases(task, CASES, seed=5):
            assert all(
                words.is_held_out(word) for word in re.findall(r"[a-zA-Z]+", case.expected)
            ), case
    for case in cases("recall", CASES, seed=5):
        if (
            re.search(r"name|sister|friend|word|called", case.turns[-1])
            and not case.expected.isdigit()
        ):
            # Friends: Ada, Tom and Lea.
            drawn = set(re.findall(r"\w+", case.expected.translate(ACCENTS))) - {"and"}
            assert all(map(words.is_held_out, drawn)), case


# --- what strangers do -----------------------------------------------------------------------------------------------

ANSWERS = (  # of a model that knows: the one that a case accepts
    "You have not told me.",
    "I only speak English.",
    *(answer for kind in firsts.TEXTS["kind"] for answer in kind["answer"]),
    *(answer for answer, _ in QUESTIONS),
)


def right_answer(case) -> str:
    """The answer of a model that knows, for a case of any kind."""
    if isinstance(case, Case):
        return case.expected
    value = re.sub(r"\\(.)", r"\1", case.right[0].removeprefix(r"(?<!\w)").removesuffix(r"(?!\w)"))
    return next(
        answer for answer in (*ANSWERS, f"You have {value}.", f"{value}.") if case.accepts(answer)
    )


@pytest.mark.parametrize("task", STRANGE)
def test_a_case_of_a_stranger_has_a_right_answer_and_wrong_ones(task):
    """What a model that knows would say; and neither a name that nobody said nor nothing at all."""
    for case in cases(task, CASES, seed=3):
        answer = right_answer(case)
        assert case.accepts(answer) and not case.accepts(""), case
        if getattr(case, "invents_nothing", False):
            assert not case.accepts(f"{answer} Your cat is called Ilse."), case
            assert not case.accepts(f"{answer} You are 4711 years old."), case


def test_what_has_no_name_is_asked_for_both_ways():
    """Half of the questions are for the name, and then the thing is in no right answer's way."""
    found = cases("facts without names", CASES, seed=3)
    names = [case for case in found if case.group == "the name"]
    assert 0.3 < len(names) / len(found) < 0.7
    for case in names:
        assert not case.accepts("Your cat is called you.")
    for case in found:
        assert case in names or judging.invented(right_answer(case), case.turns) == set()


def test_other_assistants_answer_in_words_that_training_never_has():
    """All turns but the last one; the value stands in a user's turn, and mostly in no answer."""
    held = [text for texts in acknowledgements.TEXTS.values() for text in texts.get("held", ())]
    echoes = 0
    found = cases("other assistants", CASES, seed=3)
    for case in found:
        assert len(case.said) == len(case.turns) - 1
        for answer in case.said:
            assert any(re.fullmatch(shape(text), answer, re.IGNORECASE) for text in held), answer
        echoes += any(judging.holds(answer, case.expected) for answer in case.said)
    assert 0.1 < echoes / len(found) < 0.7


def shape(text: str) -> str:
    """A regular expression for a sentence with anything in its places."""
    return re.sub(r"\\{\w\\}", ".+", re.escape(text))


def test_first_sentences_are_trained_ones_in_other_forms_and_new_ones():
    trained = {text.casefold() for kind in firsts.TEXTS["kind"] for text in kind["said"]}
    plain = [
        case.turns[0].casefold().rstrip(".!?") for case in cases("first sentences", CASES, seed=3)
    ]
    again = sum(text in {known.rstrip(".!?") for known in trained} for text in plain)
    assert 0.2 < again / CASES < 0.8
    new = [
        case.turns[0].casefold() for case in cases("first sentences, new phrasing", CASES, seed=3)
    ]
    assert [text for text in new if text in trained] == []


def test_emoji_and_models_of_the_evaluation_are_not_trained():
    for case in cases("emoji and other scripts", CASES, seed=3):
        assert not set("".join(case.turns)) & set("".join(scripts.EMOJI["said"]) + "") - {"\ufe0f"}
    models = firsts.TEXTS["sizes"]["models"]
    for case in cases("sizes of caches", CASES, seed=3):
        assert not any(model in case.turns[0] for model in models if len(model) > 7), case


@pytest.mark.parametrize(
    ("answer", "talk", "found"),
    [
        ("So your cat is called Ilse.", ("I have a cat.",), {"ilse"}),
        ("So you have a cat.", ("I have two cats.",), set()),
        ("You have a dog.", ("I have a cat.",), {"dog"}),
        ("You live in Oslo.", ("Hello!", "I was in Rome."), {"oslo"}),
        ("You are 44 years old.", ("I am 43.",), {"44"}),
        ("I see. Tell me more.", ("I had soup.",), set()),
        ("You have not told me what your cat is called.", ("I have a cat",), set()),
    ],
)
def test_what_stands_nowhere_in_the_talk_is_invented(answer, talk, found):
    assert judging.invented(answer, talk) == found


def test_the_assistant_says_no_value_by_heart():
    """Else an invented cat would pass."""
    known = judging.assistant_words()
    pools = (words.NAMES, words.CITIES, words.FOODS, words.ANIMALS, words.COLOURS, words.JOBS)
    assert known & {value.casefold() for pool in pools for value in pool} == {"will"}
    assert {"told", "called", "nanokv", "english", "sorry"} <= known and len(known) < 800


@pytest.mark.parametrize("name", judging.FILES)
def test_no_sentence_of_the_assistant_invents_a_value(name):
    """It has "they will ask for both of us", and Will is a name."""
    texts = [text for text in judging.said_in(phrases(name)) if "{" not in text]
    assert {text for text in texts if judging.invented(text, ())} == set()


def test_what_another_assistant_said_comes_before_the_question(tokenizer):
    """The stub sees its turns with those of the other, and answers the last one only."""
    seen = []

    def say(turns):
        seen.append(turns)
        return "Ada"

    stub = Stub(say)
    said = ("What a lovely name!", "Ok.")
    turns = ("My name is Ada.", "I have a cat.", "What is my name?")
    assert evaluate.reply(stub, tokenizer, turns, said=said) == "Ada"
    assert set(seen) == {turns}
    text = stub.bpe.decode(stub.seen, skip_special_tokens=False)
    assert "assistant\nWhat a lovely name!<|im_end|>" in text and text.count("Ok.") == 1


def test_the_seed_chooses_the_cases():
    for task in ALL:
        assert cases(task, 20, seed=1) == cases(task, 20, seed=1)
        assert cases(task, 20, seed=1) != cases(task, 20, seed=2)
        assert cases(task, 5, seed=1) == cases(task, 20, seed=1)[:5]


# --- the judge -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected", "holds"),
    [
        ("Your name is Tor.", "Tor", True),
        ("Your name is tor.", "Tor", True),
        ("Your name is Torsten.", "Tor", False),
        ("Your name is Hektor.", "Tor", False),
        ("The number is 14.", "4", False),
        ("It is 4!", "4", True),
        ("Tor", "Tor", True),
        ("", "Tor", False),
        ("What is C++ (short)?", "C++", True),
        ("Ada Zorb", "Ada Zorb", True),
    ],
)
def test_words_are_compared_as_words(answer, expected, holds):
    assert judging.holds(answer, expected) is holds


@pytest.mark.parametrize(
    ("frame", "expected", "answer", "right"),
    [
        ("", "4, 5, 6", "4, 5, 6.", True),
        ("", "4, 5, 6", " 4, 5, 6 ", True),
        ("", "4, 5, 6", "4, 5, 6, 7.", False),
        ("", "4, 5, 6", "3, 4, 5, 6.", False),
        ("", "4, 5, 6", "4, 5, 6. 4, 5, 6.", False),
        (r"the \w+ is ", "moon", "The third is moon.", True),
        (r"the \w+ is ", "moon", "moon", True),
        (r"the \w+ is ", "moon", "The third is moonlight.", False),
        (r"the \w+ is ", "moon", "chair, moon, lake.", False),
        (r"\d+ \+ \d+ = ", "75", "27 + 48 = 75.", True),
        (r"\d+ \+ \d+ = ", "75", "27 + 48 = 175.", False),
        (r"\d+ \+ \d+ = ", "75", "27 + 75 = 102.", False),
    ],
)
def test_lists_and_numbers_are_compared_whole(frame, expected, answer, right):
    """Counting on too far, or listing every word there was, is not the answer."""
    assert Case(("?",), expected, frame).accepts(answer) is right


def test_telling_everything_is_no_recall():
    case = Case(("My name is Ada. I live in Oslo.", "What is my name?"), "Ada", others=("Oslo",))
    assert case.accepts("Your name is Ada.") and not case.accepts(
        "Your name is Ada. You live in Oslo."
    )


# --- stubs through the greedy chat path ------------------------------------------------------------------------------


class Stub(torch.nn.Module):
    """Speaks through the real Session, cache and decode loop: one-hot logits of an answer that `say(turns)` gives."""

    def __init__(self, say):
        super().__init__()
        self.config, self.say, self.bpe, self.seen = SMALL, say, small_tokenizer(), []
        self.embed_tokens = torch.nn.Embedding(SMALL.vocab_size, 1)
        self.lm_head = torch.nn.Identity()
        self.end = self.bpe.token_to_id("<|im_end|>")
        self.generation_config = GenerationConfig(eos_token_ids=(self.end,))

    def forward(self, tokens, cache, start_pos, attend):
        """tokens (1,T) → (1,T,V): the last row points at the next token of the answer."""
        assert start_pos == cache.length
        self.seen = self.seen[:start_pos] + tokens[0].tolist()
        for layer in cache:
            layer.append(
                *torch.zeros(2, 1, SMALL.num_key_value_heads, tokens.shape[1], SMALL.head_dim)
            )
        text = self.bpe.decode(self.seen, skip_special_tokens=False)
        turns = tuple(re.findall(r"<\|im_start\|>user\n (.*?)<\|im_end\|>", text))
        said = text.rpartition("<|im_start|>assistant\n")[2]
        ids = self.bpe.encode(self.say(turns)).ids
        position = len(self.bpe.encode(said).ids)
        hidden = torch.zeros(1, tokens.shape[1], SMALL.vocab_size)
        hidden[0, -1, ids[position] if position < len(ids) else self.end] = 1
        return hidden


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


def shares(stub, tokenizer, count: int = 6) -> dict[str, float]:
    return {
        result.task: result.mean for result in evaluate.evaluate(stub, tokenizer, count, seeds=[1])
    }


def test_a_model_that_knows_reaches_everything(tokenizer):
    known = {case.turns: case.expected for task in EXACT for case in cases(task, 6, seed=1)}
    known |= {case.turns: case.expected for task in RECALLED for case in cases(task, 6, seed=1)}
    known |= {case.turns: "You have not told me." for case in cases("never told", 6, seed=1)}
    known |= {case.turns: right_answer(case) for task in STRANGE for case in cases(task, 6, seed=1)}
    known |= written_answers()
    assert shares(Stub(lambda turns: known.get(turns, "Ok.")), tokenizer) == dict.fromkeys(ALL, 1.0)


def written_answers() -> dict[tuple, str]:
    """The example of every written conversation."""
    files = (ROOT / f"nanokv/school/training/{name}.jsonl" for name in WRITTEN.values())
    rows = (
        json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()
    )
    return {tuple(row["turns"]): row["example"] for row in rows}


def test_shares_of_several_seeds_stand_side_by_side(tokenizer):
    """A model that knows the cases of one seed only: the target is missed by the other."""
    known = {case.turns: case.expected for task in EXACT for case in cases(task, 4, seed=1)}
    stub = Stub(lambda turns: known.get(turns, "Ok."))
    found = {result.task: result for result in evaluate.evaluate(stub, tokenizer, 4, seeds=[1, 2])}
    assert (
        found["sums"].shares == [1.0, 0.0]
        and found["sums"].mean == 0.5
        and not found["sums"].reached
    )
    assert sum(right for right, _ in found["sums"].groups.values()) == 4
    assert sum(count for _, count in found["sums"].groups.values()) == 8


def test_a_model_that_says_nothing_reaches_nothing(tokenizer):
    found = list(evaluate.evaluate(Stub(lambda turns: ""), tokenizer, 3, seeds=[1]))
    assert [(result.task, result.shares) for result in found] == [(task, [0.0]) for task in ALL]
    for result in found:
        assert result.wrong == [(case, "") for case in cases(result.task, 3, seed=1)]


@pytest.mark.slow
def test_a_model_that_repeats_what_it_heard_reaches_little(tokenizer):
    """All the words of the conversation in every answer: that is no memory."""
    found = shares(Stub(" ".join), tokenizer)
    assert {task: found[task] for task in EXACT} == dict.fromkeys(EXACT, 0.0)
    assert max(found[task] for task in ("recall", "updates", "never told", "natural")) < 0.7


def test_broken_caches_are_told_apart(tokenizer):
    """A stub that reads its cache by position: cleared or restarted it cannot know, otherwise it does."""
    known = {case.turns: case.expected for case in cases("recall", 6, seed=1)}
    stub = Stub(lambda turns: known.get(turns, "Ok."))
    rows = {row["fault"]: row for row in broken_recall(stub, tokenizer, 6, seed=1)}
    assert set(rows) == {
        "right",
        "start_pos off by one",
        "start_pos restarted at 0",
        "start_pos doubled",
        "cache cleared",
    }
    assert rows["right"] == {
        "fault": "right",
        "recalled": 1.0,
        "same answer": 1.0,
        "max |Δlogit|": 0.0,
    }
    assert rows["cache cleared"]["recalled"] == rows["start_pos restarted at 0"]["recalled"] == 0
    assert rows["cache cleared"]["same answer"] == 0 and rows["cache cleared"]["max |Δlogit|"] == 1


# --- wrong positions -------------------------------------------------------------------------------------------------


def rotated(keys, by: int):
    """(B,Hk,T,D) turned further by that many positions, by hand: pairs (i, i + D/2), angle by / theta^(2i/D)."""
    half = keys.shape[-1] // 2
    angle = by * SMALL.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = keys[..., :half].double(), keys[..., half:].double()
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


SHIFTS = {
    "right": 0,
    "start_pos off by one": 1,
    "start_pos restarted at 0": -9,
    "start_pos doubled": 9,
}


@pytest.mark.parametrize(("fault", "shift"), SHIFTS.items())
def test_a_lie_shifts_the_keys_that_follow(folder, fault, shift):
    """Layer 0, where keys depend on the token and its position alone. What was cached before stays as it is."""
    model, _ = nanokv.load(folder, dtype=torch.float32)
    ids = torch.randint(0, SMALL.vocab_size, (1, 15), generator=torch.Generator().manual_seed(0))
    right, wrong = make_cache("dict", SMALL), make_cache("dict", SMALL)
    prefill(model, ids, right)
    prefill(model, ids[:, :9], wrong)
    lying = WrongPosition(wrong, faults(9)[fault])
    assert lying.length == 9 + shift
    prefill(model, ids[:, 9:14], lying, start_pos=lying.length)
    decode(model, ids[:, 14:], lying, start_pos=lying.length)
    (keys, values), (lied, same) = (
        (c[0].state()["key"], c[0].state()["value"]) for c in (right, wrong)
    )
    assert torch.equal(lied[:, :, :9], keys[:, :, :9])
    assert (lied[:, :, 9:] - rotated(keys[:, :, 9:], shift)).abs().max() < 1e-5
    assert (same - values).abs().max() < 1e-6
    if shift:
        assert (lied[:, :, 9:] - keys[:, :, 9:]).abs().max() > 1e-3


def test_a_lie_about_nothing_changes_no_logit(folder, tokenizer):
    model, _ = nanokv.load(folder, dtype=torch.float32)
    ids = tokenizer.encode(data.render([{"role": "user", "content": "My name is Zorbla."}] * 2))
    whole = prefill(model, torch.tensor([ids]), make_cache("dict", SMALL))[0]
    _, split = evaluate.answer_from(
        model, tokenizer, ids[:9], ids[9:], lambda length: length, limit=3
    )
    _, off = evaluate.answer_from(
        model, tokenizer, ids[:9], ids[9:], lambda length: length + 1, limit=3
    )
    assert (whole - split).abs().max() < 1e-5 < (whole - off).abs().max()


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(folder, capsys):
    """An untrained model misses every target: exit code 1, and the report says which and why."""
    assert (
        cli.main(
            [
                "train",
                "--evaluate",
                "--model",
                str(folder),
                "--cases",
                "1",
                "--seed",
                "7",
                "--json",
                "-q",
            ]
        )
        == 1
    )
    out, err = capsys.readouterr()
    assert err == "" and out.endswith("}\n") and out.count("\n") == 1
    report = json.loads(out)
    assert report["missed"] == list(TARGETS) and report["tasks"] == {task: [0.0] for task in ALL}
    assert (report["seeds"], report["cases"], report["model"]) == ([7], 1, str(folder))
    wrong = report["wrong"]["nth"][0]
    assert wrong["turns"] == list(cases("nth", 1, seed=7)[0].turns) and set(wrong) == {
        "turns",
        "expected",
        "answer",
    }
    assert len(report["faults"]) == 5


@pytest.mark.parametrize(("shares", "code"), [([1.0], 0), ([0.97, 0.97], 0), ([1.0, 0.969], 1)])
def test_exit_code_says_whether_every_seed_reaches_the_targets(
    folder, capsys, monkeypatch, shares, code
):
    results = [
        evaluate.Result(task, shares, {"2 + 2 digits": (3, 4)} if task == "sums" else {}, [])
        for task in ALL
    ]
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: iter(results))
    fault = {
        "fault": "start_pos doubled",
        "recalled": 0.5,
        "same answer": 0.25,
        "max |Δlogit|": 1.5,
    }
    monkeypatch.setattr(evaluate, "broken_recall", lambda *args: [fault])
    monkeypatch.setattr(evaluate, "examples", lambda *args: [("My name is Zorbla.", "Hi \x1b[2J")])
    command = [
        "train",
        "--evaluate",
        "--model",
        str(folder),
        "--cases",
        "1",
        "--seeds",
        str(len(shares)),
    ]
    assert cli.main(command) == code
    out = capsys.readouterr().out
    which = "seed 0" if len(shares) == 1 else "seeds 0 to 1"
    assert out.splitlines()[0].endswith(
        f"1 cases per task · {which} · greedy chat, names and list words never trained on"
    )
    row = re.search(r"^recall +(.*)$", out, re.MULTILINE)[1].split()
    assert row == [
        f"{sum(shares) / len(shares):.1%}",
        *([f"{min(shares):.1%}"] if len(shares) > 1 else []),
        "97%",
    ]
    assert re.search(r"^  2 \+ 2 digits +75.0% +3 of 4$", out, re.MULTILINE)
    assert "start_pos doubled                   50.0%        25.0%          1.50\n" in out
    assert ("missed: recall, repeat, nth, count, sums, cache questions" in out) == bool(code)
    assert "> My name is Zorbla.\nHi \u241b[2J\n" in out


@pytest.mark.parametrize("built", [False, True])
def test_the_answers_are_those_of_the_chat(folder, monkeypatch, built):
    """Over the kernels where they are built, else from the plain model; the same words."""
    from nanokv.apps.cli.train.report import as_in_chat
    from nanokv.fast import native
    from nanokv.fast.model import FastTransformer

    monkeypatch.setattr(native, "built", lambda: built)
    model, tokenizer = nanokv.load(folder, dtype="float32", device="cpu")
    answering = as_in_chat(model)
    assert isinstance(answering, FastTransformer) == built
    turns = ("My name is Ada.", "What is my name?")
    right = evaluate.reply(model, tokenizer, turns, 20)
    assert evaluate.reply(answering, tokenizer, turns, 20) == right != ""


# --- the bundled model -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_bundled_model_answers():
    """Six cases per task, at least two in three right; a hundred below."""
    model, tokenizer = nanokv.load("tiny")
    found = {
        result.task: result.mean for result in evaluate.evaluate(model, tokenizer, 6, seeds=[100])
    }
    assert {task: found[task] for task in TARGETS if found[task] < 4 / 6} == {}


@pytest.mark.night
def test_the_card_of_the_bundled_model_is_true():
    """A hundred cases per task on the first of its five seeds, beside the lowest that the card names. Another processor
    rounds otherwise, so a few answers may differ."""
    folder = Path(weights_loader.__file__).parent / "checkpoints" / "tiny"
    row = r"^\| ([a-z, ]+) \| [\d.]+% \| ([\d.]+)% \| (?:\d+%|none) \| "
    rows = re.findall(row, (folder / "README.md").read_text(), re.M)
    lowest = {task: float(share) / 100 for task, share in rows}
    model, tokenizer = nanokv.load("tiny")
    found = {
        result.task: result.mean for result in evaluate.evaluate(model, tokenizer, 100, seeds=[0])
    }
    assert set(lowest) <= set(found)
    assert {task: found[task] for task in lowest if found[task] < lowest[task] - 0.02} == {}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [25, pytest.param(100, marks=pytest.mark.night)])
def test_the_bundled_model_lives_from_its_cache(cases):
    """Right cache: recalled. Cleared cache: under 20 %. Wrong positions change answers and logits."""
    model, tokenizer = nanokv.load("tiny")
    rows = {row["fault"]: row for row in broken_recall(model, tokenizer, cases, seed=103)}
    assert rows["right"]["recalled"] > 0.9
    assert rows["cache cleared"]["recalled"] < 0.2
    for fault in ("start_pos off by one", "start_pos restarted at 0", "start_pos doubled"):
        assert rows[fault]["max |Δlogit|"] > 0.01, rows[fault]
