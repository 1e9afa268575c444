"""The evaluation itself: right answers by an independent reader, a judge that cannot be fooled, faults that are faults.

A stub that always knows reaches 100 %, one that says nothing 0 %, one that repeats all it heard next to nothing. The
bundled model is then held to the targets.
"""

import json
import re

import pytest
import torch

import nanokv
from corpus_checker import BETWEEN, FRAMES, NOTED, ORD, ORDINALS, SHORT_ORDINALS, Reader
from nanokv import cli
from nanokv.cache import make_cache
from nanokv.config import GenerationConfig
from nanokv.inference import decode, prefill
from nanokv.text.tokenizer import Tokenizer
from nanokv.training import data, evaluate, stories, words
from nanokv.training.cache_questions import QUESTIONS
from nanokv.training.evaluate import TARGETS, TASKS, Case, WrongPosition, broken_recall, cases, faults
from nanokv.training.trainer import Recipe, Trainer
from small_training import SMALL, small_tokenizer

CASES = 150
EXACT = [task for task in TASKS if task != "recall"]


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
        "recall": 0.95, "repeat": 0.95, "nth": 0.95, "count": 0.95, "reverse": 0.9, "addition": 0.9,
        "cache questions": 0.95,
    }  # fmt: skip
    assert set(TARGETS) <= set(TASKS)


def answer_in_full(case: Case, task: str) -> str:
    """What the corpus would say, so that the reader can verify it."""
    if task != "nth":
        return case.expected + "."
    ordinal = re.search(rf"\b{ORD}\b", case.turns[-1])[1]
    number = (ORDINALS if ordinal in ORDINALS else SHORT_ORDINALS).index(ordinal) if ordinal != "last" else None
    return f"The {ordinal if number is None else ORDINALS[number]} is {case.expected}."


@pytest.mark.parametrize("task", ["repeat", "nth", "count", "reverse", "cache questions"])
def test_expected_answers_are_right(task):
    """Worked out again from the user's line by the reader of the corpus tests."""
    kind = {"cache questions": "cache"}.get(task, task)
    for case in cases(task, CASES, seed=3):
        assert Reader().exchange(case.turns[-1], answer_in_full(case, task)) == kind
        assert case.accepts(answer_in_full(case, task)) and case.accepts(case.expected)
        if frame := FRAMES.get(task):
            assert case.accepts(frame + case.expected + ".") and not case.accepts(f"{frame}{frame}{case.expected}")


def test_expected_sums_are_right():
    for case in cases("addition", CASES, seed=3):
        a, b = map(int, re.findall(r"\d+", case.turns[-1]))
        assert 10 <= min(a, b) and max(a, b) <= 99 and case.expected == str(a + b)
        assert case.accepts(f"{a} + {b} = {a + b}.") and not case.accepts(f"{a} + {b} = {a + b}0.")
        assert not case.accepts(f"{a} + {b} = {a + b - 1}.")


def test_expected_answers_to_new_phrasings_are_right():
    for case in cases("cache questions, new phrasing", CASES, seed=3):
        ((answer, phrasings),) = [(a, p) for a, p in QUESTIONS if case.turns[-1] == p[-1]]
        assert case.expected == answer.rstrip(".") and case.turns[-1] not in phrasings[:-1]


def listen(turns) -> Reader:
    """What the user told; small talk such as `I am sad.` tells nothing."""
    reader = Reader()
    empty = {text.rstrip(".?!") for said, _ in stories.TALK for text in said} | set(stories.GREETINGS)
    for turn in turns:
        if turn.rstrip(".?!") not in empty and BETWEEN.sub("", turn, count=1):
            try:
                reader.statement(turn, NOTED[0])
            except AssertionError as error:
                raise AssertionError(turn) from error
    return reader


def test_expected_recalls_are_right():
    """What was told last about what is asked; everything else that was told makes an answer wrong."""
    kinds = set()
    for case in cases("recall", 3 * CASES, seed=3):
        reader, question = listen(case.turns[:-1]), case.turns[-1]
        pet = re.fullmatch(r"What is my (\w+) called\?", question)
        if pet and pet[1] in reader.pets:
            kind, value = "pet", reader.pets[pet[1]]
        else:
            kind = reader._kind_asked(question)
            value = reader.facts[kind]
        kinds.add(kind)
        assert value.casefold() == case.expected.casefold(), (case, value)
        assert case.accepts(f"It is {value.upper()}.") and not case.accepts("I don't know.")
        assert [other for other in case.others if case.accepts(f"{value}, {other}")] == []
    assert len(kinds) == 9


def test_cases_use_words_that_training_never_drew():
    """Names, secret words and list words; colours, foods and cities are short lists that both halves share."""
    for task in ("repeat", "reverse"):
        for case in cases(task, CASES, seed=5):
            assert all(words.is_held_out(word) for word in re.findall(r"[a-zA-Z]+", case.expected)), case
    for case in cases("recall", CASES, seed=5):
        if re.search(r"name|sister|friend|word|called", case.turns[-1]) and not case.expected.isdigit():
            assert all(words.is_held_out(word) for word in case.expected.split()), case


def test_the_seed_chooses_the_cases():
    for task in TASKS:
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
    assert evaluate._holds(answer, expected) is holds


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
    assert case.accepts("Your name is Ada.") and not case.accepts("Your name is Ada. You live in Oslo.")


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
            layer.append(*torch.zeros(2, 1, SMALL.num_key_value_heads, tokens.shape[1], SMALL.head_dim))
        text = self.bpe.decode(self.seen, skip_special_tokens=False)
        turns = tuple(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text))
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
    return {task: share for task, share, _ in evaluate.evaluate(stub, tokenizer, count, seed=1)}


def test_a_model_that_knows_reaches_everything(tokenizer):
    known = {case.turns: case.expected for task in TASKS for case in cases(task, 6, seed=1)}
    assert shares(Stub(lambda turns: known.get(turns, "Ok.")), tokenizer) == dict.fromkeys(TASKS, 1.0)


def test_a_model_that_says_nothing_reaches_nothing(tokenizer):
    found = list(evaluate.evaluate(Stub(lambda turns: ""), tokenizer, 3, seed=1))
    assert [(task, share) for task, share, _ in found] == [(task, 0.0) for task in TASKS]
    for task, _, wrong in found:
        assert wrong == [(case, "") for case in cases(task, 3, seed=1)]


def test_a_model_that_repeats_what_it_heard_reaches_little(tokenizer):
    """All the words of the conversation in every answer: that is no memory."""
    found = shares(Stub(" ".join), tokenizer)
    assert {task: found[task] for task in EXACT} == dict.fromkeys(EXACT, 0.0)
    assert found["recall"] < 0.7


def test_broken_caches_are_told_apart(tokenizer):
    """A stub that reads its cache by position: cleared or restarted it cannot know, otherwise it does."""
    known = {case.turns: case.expected for case in cases("recall", 6, seed=1)}
    stub = Stub(lambda turns: known.get(turns, "Ok."))
    rows = {row["fault"]: row for row in broken_recall(stub, tokenizer, 6, seed=1)}
    assert set(rows) == {
        "right", "start_pos off by one", "start_pos restarted at 0", "start_pos doubled", "cache cleared",
    }  # fmt: skip
    assert rows["right"] == {"fault": "right", "recalled": 1.0, "same answer": 1.0, "max |Δlogit|": 0.0}
    assert rows["cache cleared"]["recalled"] == rows["start_pos restarted at 0"]["recalled"] == 0
    assert rows["cache cleared"]["same answer"] == 0 and rows["cache cleared"]["max |Δlogit|"] == 1


# --- wrong positions -------------------------------------------------------------------------------------------------


def rotated(keys, by: int):
    """(B,Hk,T,D) turned further by that many positions, by hand: pairs (i, i + D/2), angle by / theta^(2i/D)."""
    half = keys.shape[-1] // 2
    angle = by * SMALL.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = keys[..., :half].double(), keys[..., half:].double()
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


SHIFTS = {"right": 0, "start_pos off by one": 1, "start_pos restarted at 0": -9, "start_pos doubled": 9}


@pytest.mark.parametrize(("fault", "shift"), SHIFTS.items())
def test_a_lie_shifts_the_keys_that_follow(folder, fault, shift):
    """Layer 0, where keys depend on the token and its position alone. What was cached before stays as it is."""
    model, _ = nanokv.load(folder)
    ids = torch.randint(0, SMALL.vocab_size, (1, 15), generator=torch.Generator().manual_seed(0))
    right, wrong = make_cache("dict", SMALL), make_cache("dict", SMALL)
    prefill(model, ids, right)
    prefill(model, ids[:, :9], wrong)
    lying = WrongPosition(wrong, faults(9)[fault])
    assert lying.length == 9 + shift
    prefill(model, ids[:, 9:14], lying, start_pos=lying.length)
    decode(model, ids[:, 14:], lying, start_pos=lying.length)
    (keys, values), (lied, same) = ((c[0].state()["key"], c[0].state()["value"]) for c in (right, wrong))
    assert torch.equal(lied[:, :, :9], keys[:, :, :9])
    assert (lied[:, :, 9:] - rotated(keys[:, :, 9:], shift)).abs().max() < 1e-5
    assert (same - values).abs().max() < 1e-6
    if shift:
        assert (lied[:, :, 9:] - keys[:, :, 9:]).abs().max() > 1e-3


def test_a_lie_about_nothing_changes_no_logit(folder, tokenizer):
    model, _ = nanokv.load(folder)
    ids = tokenizer.encode(data.render([{"role": "user", "content": "My name is Zorbla."}] * 2))
    whole = prefill(model, torch.tensor([ids]), make_cache("dict", SMALL))[0]
    _, split = evaluate.answer_from(model, tokenizer, ids[:9], ids[9:], lambda length: length, limit=3)
    _, off = evaluate.answer_from(model, tokenizer, ids[:9], ids[9:], lambda length: length + 1, limit=3)
    assert (whole - split).abs().max() < 1e-5 < (whole - off).abs().max()


# --- the command -----------------------------------------------------------------------------------------------------


def test_json_is_one_object_and_nothing_else(folder, capsys):
    """An untrained model misses every target: exit code 1, and the report says which and why."""
    assert cli.main(["train", "--evaluate", "--model", str(folder), "--cases", "1", "--seed", "7", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "" and out.endswith("}\n") and out.count("\n") == 1
    report = json.loads(out)
    assert report["missed"] == list(TARGETS) and report["tasks"] == dict.fromkeys(TASKS, 0.0)
    assert (report["seed"], report["cases"], report["model"]) == (7, 1, str(folder))
    wrong = report["wrong"]["nth"][0]
    assert wrong["turns"] == list(cases("nth", 1, seed=7)[0].turns) and set(wrong) == {"turns", "expected", "answer"}
    assert len(report["faults"]) == 5


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (0.95, 0), (0.949, 1)])
def test_exit_code_says_whether_targets_are_reached(folder, capsys, monkeypatch, share, code):
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: iter([(task, share, []) for task in TASKS]))
    fault = {"fault": "start_pos doubled", "recalled": 0.5, "same answer": 0.25, "max |Δlogit|": 1.5}
    monkeypatch.setattr(evaluate, "broken_recall", lambda *args: [fault])
    monkeypatch.setattr(evaluate, "examples", lambda *args: [("My name is Zorbla.", "Hi \x1b[2J")])
    assert cli.main(["train", "--evaluate", "--model", str(folder), "--cases", "1"]) == code
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("1 cases a task · seed 0 · greedy chat, names and list words never trained on")
    assert f"recall                            {share:>6.1%}" in out
    assert "start_pos doubled                   50.0%        25.0%          1.50\n" in out
    assert ("missed: recall, repeat, nth, count, cache questions" in out) == bool(code)
    assert "> My name is Zorbla.\nHi \u241b[2J\n" in out


# --- the bundled model -----------------------------------------------------------------------------------------------


def test_the_bundled_model_answers():
    """Six cases per task, at most one wrong; four times a hundred below."""
    model, tokenizer = nanokv.load("tiny")
    found = {task: share for task, share, _ in evaluate.evaluate(model, tokenizer, 6, seed=100)}
    assert {task: found[task] for task in TARGETS if found[task] < 5 / 6} == {}


@pytest.mark.slow
def test_the_bundled_model_reaches_its_targets():
    """400 cases a task over four seeds: with 100, one lucky or unlucky draw in two is worth two points."""
    model, tokenizer = nanokv.load("tiny")
    runs = [{task: share for task, share, _ in evaluate.evaluate(model, tokenizer, 100, seed)} for seed in range(4)]
    found = {task: sum(run[task] for run in runs) / len(runs) for task in TARGETS}
    assert {task: found[task] for task, target in TARGETS.items() if found[task] < target} == {}


@pytest.mark.slow
def test_the_bundled_model_lives_from_its_cache():
    """Right cache: recalled. Cleared cache: under 20 %. Wrong positions change answers and logits."""
    model, tokenizer = nanokv.load("tiny")
    rows = {row["fault"]: row for row in broken_recall(model, tokenizer, 100, seed=103)}
    assert rows["right"]["recalled"] >= TARGETS["recall"]
    assert rows["cache cleared"]["recalled"] < 0.2
    for fault in ("start_pos off by one", "start_pos restarted at 0", "start_pos doubled"):
        assert rows[fault]["max |Δlogit|"] > 0.01, rows[fault]
