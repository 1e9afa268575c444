"""The evaluation of the bundled model, through the greedy chat path.

The tasks have words and seeds that training never draws. Each case is a small conversation; the
last answer is checked against the user's earlier messages. Recall is then asked again with a
broken cache (cleared, or with a wrong start_pos): a model that does not need its cache would answer
as well.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import torch
from torch import Tensor

from nanokv.cache import KVCache, make_cache
from nanokv.chat.session import Session
from nanokv.inference import decode, prefill
from nanokv.model import Transformer
from nanokv.school.training import (
    about_user,
    corpus,
    facts,
    hard,
    lists,
    nearby,
    small_talk,
    stranger_cases,
    sums,
    words,
)
from nanokv.school.training.cache_questions import HELD_OUT_WRAPPERS, QUESTIONS, YES_OR_NO, ask
from nanokv.school.training.conversation import Conversation, upper_first
from nanokv.school.training.facts import FACTS
from nanokv.school.training.judging import NOT_TOLD, Case, Judged, holds, word
from nanokv.school.training.stranger_cases import script
from nanokv.text.tokenizer import Tokenizer

TARGETS = {
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
FILLERS = (
    sums.add,
    sums.count,
    small_talk.cache_question,
    lists.repeat,
    small_talk.small_talk,
    small_talk.unknown,
)


def _talk(rng: random.Random) -> Conversation:
    return Conversation(rng, held_out=True, stage=corpus.FIRST)


def _values(talk: Conversation) -> list[str]:
    """Each value in the user's statements, also those that changed."""
    return [step[-1] for exchange in talk.log for step in exchange if step[0] in ("tell", "pet")]


def _fill(talk: Conversation, most: int = 2) -> None:
    """At most `most` turns about other things."""
    for _ in range(talk.rng.randint(0, most)):
        talk.rng.choice(FILLERS)(talk)


def _ask(talk: Conversation, kind: str) -> None:
    """The question for a fact."""
    question = talk.one_of(FACTS[kind].asked)
    talk.say(about_user.asked(talk, question), "?", ("ask", kind))


def _recall(talk: Conversation, expected: str) -> Case:
    """The last question is about one value; an answer with another one is wrong."""
    turns = script(talk)
    known = f"{turns[-1]} {expected}"
    others = tuple(value for value in _values(talk) if not holds(known, value))
    return Case(turns, expected, others=others)


def recall_case(rng: random.Random) -> Case:
    """One to three messages with facts, up to two other turns, a question about one fact."""
    talk = _talk(rng)
    for _ in range(rng.randint(1, 3)):
        about_user.tell(talk, facts.draw(rng, talk.facts))
    if rng.random() < 0.4:
        about_user.tell_pet(talk)
    _fill(talk)
    if talk.pets and rng.random() < 0.4:
        kind = rng.choice(list(talk.pets))
        question = talk.one_of(facts.PET["name_asked"], k=kind)
        talk.say(about_user.asked(talk, question), "?", ("ask pet", kind))
        return _recall(talk, talk.pets[kind])
    kind = rng.choice(list(talk.facts))
    _ask(talk, kind)
    return _recall(talk, talk.facts[kind])


def update_case(rng: random.Random) -> Case:
    """A fact, in half of the cases another one, a change of the first; its old value is wrong."""
    talk = _talk(rng)
    kind = facts.draw(rng)
    about_user.tell(talk, kind)
    if rng.random() < 0.5:
        about_user.tell(talk, facts.draw(rng, talk.facts))
    _fill(talk, 1)
    about_user.change(talk, kind)
    _fill(talk, 1)
    _ask(talk, kind)
    return _recall(talk, talk.facts[kind])


def introduction_case(rng: random.Random) -> Case:
    """Two to four facts in one message, mostly with a name; then a question about one of them."""
    talk = _talk(rng)
    kinds = hard.tell_at_once(talk)
    _fill(talk, 1)
    kind = rng.choice(kinds)
    _ask(talk, kind)
    return _recall(talk, talk.facts[kind])


def codes_case(rng: random.Random) -> Case:
    """Two or three numbers with names, then one name; another number in the answer is wrong."""
    talk = _talk(rng)
    kinds = rng.sample(list(facts.CODES), rng.choice((2, 3)))
    for kind in kinds:
        talk.say(*about_user.statement(talk, kind))
    _fill(talk, 1)
    kind = rng.choice(kinds)
    _ask(talk, kind)
    return _recall(talk, talk.facts[kind])


def before_and_now_case(rng: random.Random) -> Case:
    """A sentence with the old and the new value of a fact; the old one is wrong."""
    talk = _talk(rng)
    kind = rng.choice(nearby.MOVING)
    old = new = ""
    while old == new:
        old = talk.cased(FACTS[kind].value(rng, True))
        new = talk.cased(FACTS[kind].value(rng, True))
    told = talk.one_of(nearby.before_and_now(kind), v=new, w=old, x=kind)
    talk.say(upper_first(told), "?", ("tell", kind, new))
    _fill(talk, 1)
    _ask(talk, kind)
    return Case(script(talk), new, others=(old,))


def never_told_case(rng: random.Random) -> Judged:
    """Facts and pets, then a question about another fact; any of their values is wrong."""
    talk = _talk(rng)
    for _ in range(rng.randint(1, 3)):
        about_user.tell(talk, facts.draw(rng, talk.facts))
    if rng.random() < 0.3:
        about_user.tell_pet(talk)
    _fill(talk, 1)
    if rng.random() < 0.25:
        kind = rng.choice([kind for kind in words.ANIMALS if kind not in talk.pets])
        question = talk.one_of(facts.PET["name_asked"], k=kind)
    else:
        question = talk.one_of(FACTS[facts.draw(rng, talk.facts)].asked)
    talk.say(about_user.asked(talk, question), "?")
    turns = script(talk)
    wrong = tuple(word(value) for value in _values(talk) if not holds(turns[-1], value))
    return Judged(turns, (NOT_TOLD,), wrong)


def _whole(answer: str) -> str:
    return answer.rstrip(".")


def _behind(mark: str) -> Callable[[str], str]:
    """The part of an answer behind a mark, without the full stop."""
    return lambda answer: _whole(answer).split(mark)[1]


def _no_group(step: tuple) -> str:
    return ""


Make = Callable[[random.Random], Case | Judged]


def _from_segment(
    segment: Callable[[Conversation], object],
    expected: Callable[[str], str] = _whole,
    frame: str = "",
    group: Callable[[tuple], str] = _no_group,
) -> Make:
    """An exchange of the corpus on held-out words; the corpus has the right answer."""

    def make(rng: random.Random) -> Case:
        talk = _talk(rng)
        if rng.random() < 0.3:
            small_talk.small_talk(talk)
        segment(talk)
        answer = expected(talk.messages[-1]["content"])
        return Case(script(talk), answer, frame, group=group(talk.log[-1][-1]))

    return make


def digits(step: tuple) -> str:
    """The lengths of the numbers of a sum: 1 + 2 digits."""
    return f"{len(str(step[1]))} + {len(str(step[2]))} digits"


def cache_case(rng: random.Random) -> Case:
    """A trained phrasing between words that training never puts around it."""
    answer, phrasings = rng.choice(QUESTIONS + YES_OR_NO)
    return Case((ask(rng, rng.choice(phrasings[:-1]), HELD_OUT_WRAPPERS),), _whole(answer), "")


def new_phrasing_case(rng: random.Random) -> Case:
    """A phrasing that is not in the training."""
    answer, phrasings = rng.choice(QUESTIONS + YES_OR_NO)
    return Case((phrasings[-1],), _whole(answer), "")


def written_cases(name: str) -> list[Judged]:
    """The conversations of a file. Their authors did not know the corpus."""
    file = files("nanokv.school.training") / f"{name}.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        Judged(tuple(row["turns"]), tuple(row["right"]), tuple(row["wrong"]), row["about"])
        for row in rows
    ]


def _stranger(make: Callable[[Conversation], Case | Judged]) -> Make:
    """A case of stranger_cases, from a conversation of the evaluation."""
    return lambda rng: make(_talk(rng))


TASKS: dict[str, Make] = {
    "recall": recall_case,
    "introductions": introduction_case,
    "updates": update_case,
    "before and now": before_and_now_case,
    "codes": codes_case,
    "never told": never_told_case,
    "repeat": _from_segment(lists.repeat, frame="you said: "),
    "nth": _from_segment(lists.nth, _behind(" is "), r"the \w+ is "),
    "reverse": _from_segment(lists.reverse, frame="reversed: "),
    "edited lists": _from_segment(nearby.edit_once, frame="your list is now: "),
    "count": _from_segment(sums.count),
    "other counts": _from_segment(nearby.count),
    "sums": _from_segment(sums.add, _behind("= "), r"\d+ \+ \d+ = ", digits),
    "other arithmetic refused": _from_segment(sums.refuse),
    "longer sums refused": _from_segment(nearby.refuse_many),
    "cache questions": cache_case,
    "cache questions, new phrasing": new_phrasing_case,
    "facts without names": _stranger(stranger_cases.unnamed_case),
    "other assistants": _stranger(stranger_cases.foreign_case),
    "nothing invented": _stranger(stranger_cases.invention_case),
    "first sentences": _stranger(stranger_cases.first_case),
    "first sentences, new phrasing": _stranger(stranger_cases.new_first_case),
    "emoji and other scripts": _stranger(stranger_cases.script_case),
    "sizes of caches": _stranger(stranger_cases.size_case),
}
# Tokens of an answer, where 100 are too few: a count to 100 takes 300.
LONGEST = {"other counts": 400}
WRITTEN = {"natural": "natural", "natural, paraphrased": "paraphrased"}  # task → file


def cases(task: str, count: int, seed: int) -> list[Case | Judged]:
    """`count` cases of a task. Each seed has other cases, from the same half of the words.

    From a file that authors wrote the seed draws the cases, the same lines of both files.
    """
    if task in WRITTEN:
        written = written_cases(WRITTEN[task])
        rng = random.Random(f"evaluation:{seed}")
        return list(rng.sample(written, min(count, len(written))))
    return [TASKS[task](random.Random(f"evaluation:{seed}:{task}:{i}")) for i in range(count)]


@dataclass
class Result:
    """The outcome of one task."""

    task: str
    shares: list[float]  # right answers, for each seed
    groups: dict[str, tuple[int, int]]  # group → (right, cases), over all seeds
    wrong: list[tuple[Case | Judged, str]]  # and the wrong answers

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.shares) / len(self.shares)

    @property
    def reached(self) -> bool:
        """Does every seed reach the target?"""
        return min(self.shares) >= TARGETS.get(self.task, 0)

    def add(self, case: Case | Judged, answer: str) -> bool:
        """Count an answer. Returns whether it is right."""
        right = case.accepts(answer)
        if not right:
            self.wrong.append((case, answer))
        if case.group:
            before, count = self.groups.get(case.group, (0, 0))
            self.groups[case.group] = (before + right, count + 1)
        return right


def nothing() -> None:
    """For callers that show no progress."""


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    count: int = 100,
    seeds: Iterable[int] = (0,),
    done: Callable[[], object] = nothing,
) -> Iterator[Result]:
    """A Result for every task, through the greedy chat. `done` is called after every case."""
    for task in (*TASKS, *WRITTEN):
        result = Result(task, [], {}, [])
        for seed in seeds:
            chosen = cases(task, count, seed)
            right = 0
            for case in chosen:
                limit = LONGEST.get(task, 100)
                answer = reply(model, tokenizer, case.turns, limit, case.said)
                right += result.add(case, answer)
                done()
            result.shares.append(right / len(chosen))
        yield result


def reply(
    model: Transformer,
    tokenizer: Tokenizer,
    turns: Sequence[str],
    limit: int = 100,
    said: Sequence[str] = (),
) -> str:
    """The greedy answer to the last of these messages.

    `said`: the answers of another assistant to the first ones.
    """
    session = Session(model, tokenizer, params={"max_new_tokens": limit})
    messages = []
    for turn, answer in zip(turns, said, strict=False):
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer})
    if messages:
        session.replace(messages)
    answer = ""
    for turn in turns[len(said) :]:
        answer = session.ask(turn)
    return answer


# --- broken caches --------------------------------------------------------------------------------

Lie = Callable[[int], int]  # true length → stated length


class WrongPosition(KVCache):
    """A cache with a wrong length, so that the model rotates by a wrong angle.

    Its mask and stored rows are right.
    """

    def __init__(self, cache: KVCache, lie: Lie):
        super().__init__(cache, cache.config)
        self.lie = lie

    @property
    def length(self) -> int:
        return self.lie(super().length)


def truth(length: int) -> int:
    """The true length."""
    return length


def faults(cached: int) -> dict[str, Lie]:
    """Wrong positions for the tokens that follow `cached` right ones."""
    return {
        "right": truth,
        "start_pos off by one": lambda length: length + 1,
        "start_pos restarted at 0": lambda length: length - cached,
        "start_pos doubled": lambda length: length + cached,
    }


@dataclass
class Trial:
    """The answers under one fault, case by case."""

    recalled: list[bool] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)  # as with a right cache, to the letter?
    logits: list[float] = field(default_factory=list)  # max |Δlogit| of the first answer token

    def row(self, fault: str) -> dict:
        """The row of the report: shares, and the median over the cases."""
        count = len(self.recalled)
        return {
            "fault": fault,
            "recalled": sum(self.recalled) / count,
            "same answer": sum(self.same) / count,
            "max |Δlogit|": sorted(self.logits)[count // 2],
        }


def broken_recall(
    model: Transformer,
    tokenizer: Tokenizer,
    count: int = 100,
    seed: int = 0,
    done: Callable[[], object] = nothing,
) -> list[dict]:
    """The recall cases with a right cache, a cleared one, and wrong positions: a row per fault.

    Earlier turns are cached right; the fault is in the last one.
    """
    trials: dict[str, Trial] = {}
    for case in cases("recall", count, seed):
        context, question = _last_turn(model, tokenizer, case.turns)
        right, logits = answer_from(model, tokenizer, context, question, truth)
        settings = {name: (context, lie) for name, lie in faults(len(context)).items()}
        settings["cache cleared"] = ([], truth)
        for name, (known, lie) in settings.items():
            answer, changed = answer_from(model, tokenizer, known, question, lie)
            trial = trials.setdefault(name, Trial())
            trial.recalled.append(case.accepts(answer))
            trial.same.append(answer == right)
            trial.logits.append((changed - logits).abs().max().item())
        done()
    return [trial.row(name) for name, trial in trials.items()]


def _last_turn(
    model: Transformer, tokenizer: Tokenizer, turns: Sequence[str]
) -> tuple[list[int], list[int]]:
    """The ids of all earlier turns, with the model's answers, and those of the last one."""
    session = Session(model, tokenizer, params={"max_new_tokens": 40})
    for turn in turns[:-1]:
        session.ask(turn)
    ids = session.prompt([*session.messages, {"role": "user", "content": turns[-1]}])
    cached = 0
    if session.messages:
        cached = len(session.prompt(session.messages, add_generation_prompt=False))
    return ids[:cached], ids[cached:]


def answer_from(
    model: Transformer,
    tokenizer: Tokenizer,
    context: list[int],
    question: list[int],
    lie: Lie,
    limit: int = 40,
) -> tuple[str, Tensor]:
    """The greedy answer and the logits of its first token (V).

    `context` is cached right; `question` follows with wrong positions.
    """
    cache = make_cache("dict", model.config)
    if context:
        prefill(model, torch.tensor([context]), cache, start_pos=0)
    cache = WrongPosition(cache, lie)
    first = prefill(model, torch.tensor([question]), cache, start_pos=cache.length)  # (1,V)
    logits = first
    ids: list[int] = []
    while len(ids) < limit:
        token = int(logits.argmax())
        if token in model.generation_config.eos_token_ids:
            break
        ids.append(token)
        logits = decode(model, torch.tensor([[token]]), cache, start_pos=cache.length)  # (1,V)
    return tokenizer.decode(ids), first[0]


def examples(model: Transformer, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """A fixed conversation, as examples of the model's answers."""
    session = Session(model, tokenizer, params={"max_new_tokens": 60})
    turns = (
        "Hello!",
        "My name is Zorbla.",
        "I have a cat called Miso.",
        "What is my name?",
        "What is 27 + 48?",
        "What is a KV cache?",
        "What is my cat called?",
    )
    return [(turn, session.ask(turn)) for turn in turns]
