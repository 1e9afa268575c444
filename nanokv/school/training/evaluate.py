"""How good the bundled model is: tasks on words and seeds that training never used, through the greedy chat path.

Every case is a small conversation; the last answer is checked against what the user said before. The same cases are
then asked with a broken cache (cleared, or with a wrong start_pos), because a model that answers as well without its
memory would prove nothing.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files

import torch

from nanokv.cache import KVCache, make_cache
from nanokv.chat.session import Session
from nanokv.inference import decode, prefill
from nanokv.school.training import (
    about_user,
    corpus,
    facts,
    hard,
    lists,
    nearby,
    small_talk,
    sums,
    words,
)
from nanokv.school.training.cache_questions import HELD_OUT_WRAPPERS, QUESTIONS, YES_OR_NO, ask
from nanokv.school.training.conversation import Conversation, upper_first
from nanokv.school.training.facts import FACTS

TARGETS = {
    "recall": 0.97,
    "updates": 0.95,
    "never told": 0.95,
    "repeat": 0.97,
    "nth": 0.97,
    "reverse": 0.95,
    "count": 0.97,
    "sums": 0.97,
    "cache questions": 0.97,
    "natural": 0.80,
}


@dataclass(frozen=True)
class Case:
    """What the user says, turn by turn, and what makes the last answer right.

    With `frame` the answer is the expected words and nothing else, save what that regular expression allows before
    them: counting on too far is wrong. Without, the words have to be in it, and none of `others`: telling everything
    that the user ever said is no recall.
    """

    turns: tuple[str, ...]
    expected: str
    frame: str | None = None
    others: tuple[str, ...] = ()
    group: str = ""  # what this case is one of, for a line of its own

    def accepts(self, answer: str) -> bool:
        """Is it right? Capitals, spaces around it and the last full stop do not matter."""
        if self.frame is not None:
            whole = rf"(?:{self.frame})?{re.escape(self.expected)}\.?"
            return re.fullmatch(whole, answer.strip(), re.IGNORECASE) is not None
        return _holds(answer, self.expected) and not any(
            _holds(answer, other) for other in self.others
        )


def _holds(answer: str, expected: str) -> bool:
    """The expected words stand in the answer, as words: `Tor` is not in `Torsten`, 4 is not in 14."""
    return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", answer, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Judged:
    """A conversation typed by somebody who had not seen the corpus, and the patterns that his judge looks for."""

    turns: tuple[str, ...]
    right: tuple[str, ...]  # regular expressions: all are found in the last answer
    wrong: tuple[str, ...]  # none is
    group: str = ""

    @property
    def expected(self) -> str:
        """For reports: what is looked for."""
        return " and ".join(self.right)

    def accepts(self, answer: str) -> bool:
        """All that is right is there, and nothing wrong; capitals do not matter."""
        found = (re.search(pattern, answer, re.IGNORECASE) for pattern in self.right)
        return all(found) and not any(
            re.search(pattern, answer, re.IGNORECASE) for pattern in self.wrong
        )


NOT_TOLD = "not told|don't know"
FILLERS = (
    sums.add,
    sums.count,
    small_talk.cache_question,
    lists.repeat,
    small_talk.small_talk,
    small_talk.unknown,
)


def _talk(rng) -> Conversation:
    return Conversation(rng, held_out=True, stage=corpus.FIRST)


def _script(talk: Conversation) -> tuple[str, ...]:
    return tuple(m["content"] for m in talk.messages if m["role"] == "user")


def _told(talk: Conversation) -> list[str]:
    """Every value that the user told, those too that changed."""
    return [step[-1] for exchange in talk.log for step in exchange if step[0] in ("tell", "pet")]


def _fill(talk: Conversation, most: int = 2):
    """Up to so many turns about other things."""
    for _ in range(talk.rng.randint(0, most)):
        talk.rng.choice(FILLERS)(talk)


def _recall(talk: Conversation, expected: str) -> Case:
    """The last question is about one value; naming another one that was told is wrong."""
    *_, question = turns = _script(talk)
    others = (value for value in _told(talk) if not _holds(f"{question} {expected}", value))
    return Case(turns, expected, others=tuple(others))


def recall_case(rng: random.Random) -> Case:
    """One to three messages with facts, up to two other turns between, then a question about one of them."""
    talk = _talk(rng)
    for _ in range(rng.randint(1, 3)):
        about_user.tell(talk, facts.draw(rng, talk.facts))
    if rng.random() < 0.4:
        about_user.tell_pet(talk)
    _fill(talk)
    if talk.pets and rng.random() < 0.4:
        kind = rng.choice(list(talk.pets))
        talk.say(
            about_user.asked(talk, talk.one_of(facts.PET["name_asked"], k=kind)),
            "?",
            ("ask pet", kind),
        )
        return _recall(talk, talk.pets[kind])
    kind = rng.choice(list(talk.facts))
    talk.say(about_user.asked(talk, talk.one_of(FACTS[kind].asked)), "?", ("ask", kind))
    return _recall(talk, talk.facts[kind])


def update_case(rng: random.Random) -> Case:
    """A fact, others, then a change of the first; the newest counts, and the old value in the answer is wrong."""
    talk = _talk(rng)
    kind = facts.draw(rng)
    about_user.tell(talk, kind)
    if rng.random() < 0.5:
        about_user.tell(talk, facts.draw(rng, talk.facts))
    _fill(talk, 1)
    about_user.change(talk, kind)
    _fill(talk, 1)
    talk.say(about_user.asked(talk, talk.one_of(FACTS[kind].asked)), "?", ("ask", kind))
    return _recall(talk, talk.facts[kind])


def introduction_case(rng: random.Random) -> Case:
    """Who the user is and more, told in one message; then a question about one of it."""
    talk = _talk(rng)
    kinds = hard.tell_at_once(talk)
    _fill(talk, 1)
    kind = rng.choice(kinds)
    talk.say(about_user.asked(talk, talk.one_of(FACTS[kind].asked)), "?", ("ask", kind))
    return _recall(talk, talk.facts[kind])


def codes_case(rng: random.Random) -> Case:
    """Two or three numbers with names, one of them asked for; another one in the answer is wrong."""
    talk = _talk(rng)
    kinds = rng.sample(list(facts.CODES), rng.choice((2, 3)))
    for kind in kinds:
        talk.say(*about_user.statement(talk, kind))
    _fill(talk, 1)
    kind = rng.choice(kinds)
    talk.say(about_user.asked(talk, talk.one_of(FACTS[kind].asked)), "?", ("ask", kind))
    return _recall(talk, talk.facts[kind])


def before_and_now_case(rng: random.Random) -> Case:
    """A sentence that names what was and what is: what was is wrong."""
    talk = _talk(rng)
    kind = rng.choice(nearby.MOVING)
    while (old := talk.cased(FACTS[kind].value(rng, True))) == (
        new := talk.cased(FACTS[kind].value(rng, True))
    ):
        pass
    talk.say(
        upper_first(talk.one_of(nearby.before_and_now(kind), v=new, w=old, x=kind)),
        "?",
        ("tell", kind, new),
    )
    _fill(talk, 1)
    talk.say(about_user.asked(talk, talk.one_of(FACTS[kind].asked)), "?", ("ask", kind))
    return Case(_script(talk), new, others=(old,))


def never_told_case(rng: random.Random) -> Judged:
    """Facts and pets, then a question about something else: lending it one of them is wrong."""
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
    *_, question = turns = _script(talk)
    told = (value for value in _told(talk) if not _holds(question, value))
    return Judged(turns, (NOT_TOLD,), tuple(rf"(?<!\w){re.escape(value)}(?!\w)" for value in told))


def _whole(answer: str) -> str:
    return answer.rstrip(".")


def _from_segment(
    segment: Callable,
    expected: Callable = _whole,
    frame: str = "",
    group: Callable = lambda step: "",
):
    """The corpus' own generator, on held-out words: its last answer is the right one."""

    def make(rng: random.Random) -> Case:
        talk = _talk(rng)
        if rng.random() < 0.3:
            small_talk.small_talk(talk)
        segment(talk)
        return Case(
            _script(talk),
            expected(talk.messages[-1]["content"]),
            frame,
            group=group(talk.log[-1][-1]),
        )

    return make


def digits(step: tuple) -> str:
    """How long the numbers of a sum are: 1 + 2 digits."""
    return f"{len(str(step[1]))} + {len(str(step[2]))} digits"


def cache_case(rng: random.Random) -> Case:
    """A trained phrasing in words around it that training never used."""
    answer, phrasings = rng.choice(QUESTIONS + YES_OR_NO)
    return Case((ask(rng, rng.choice(phrasings[:-1]), HELD_OUT_WRAPPERS),), _whole(answer), "")


def new_phrasing_case(rng: random.Random) -> Case:
    """A phrasing that training never used."""
    answer, phrasings = rng.choice(QUESTIONS + YES_OR_NO)
    return Case((phrasings[-1],), _whole(answer), "")


def written_cases(name: str) -> list[Judged]:
    """The conversations of a file, which nobody who made the corpus wrote."""
    lines = (
        (files("nanokv.school.training") / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    )
    rows = map(json.loads, lines)
    return [
        Judged(*(tuple(row[key]) for key in ("turns", "right", "wrong")), row["about"])
        for row in rows
    ]


TASKS: dict[str, Callable] = {
    "recall": recall_case,
    "introductions": introduction_case,
    "updates": update_case,
    "before and now": before_and_now_case,
    "codes": codes_case,
    "never told": never_told_case,
    "repeat": _from_segment(lists.repeat, frame="you said: "),
    "nth": _from_segment(lists.nth, lambda answer: _whole(answer).split(" is ")[1], r"the \w+ is "),
    "reverse": _from_segment(lists.reverse, frame="reversed: "),
    "edited lists": _from_segment(nearby.edit_once, frame="your list is now: "),
    "count": _from_segment(sums.count),
    "other counts": _from_segment(nearby.count),
    "sums": _from_segment(
        sums.add, lambda answer: _whole(answer).split("= ")[1], r"\d+ \+ \d+ = ", digits
    ),
    "other arithmetic refused": _from_segment(sums.refuse),
    "cache questions": cache_case,
    "cache questions, new phrasing": new_phrasing_case,
}
# Tokens of an answer, where 100 are not enough: a count to 100 takes 300.
LONGEST = {"other counts": 400}
WRITTEN = {"natural": "natural", "natural, paraphrased": "paraphrased"}  # task → file


def cases(task: str, count: int, seed: int) -> list[Case | Judged]:
    """So many cases of a task; the seed changes the cases, never the half of the words that they come from.

    Of a file that was written by hand the seed chooses which; of two such files it chooses the same lines.
    """
    if task in WRITTEN:
        written = written_cases(WRITTEN[task])
        return random.Random(f"evaluation:{seed}").sample(written, min(count, len(written)))
    return [TASKS[task](random.Random(f"evaluation:{seed}:{task}:{i}")) for i in range(count)]


@dataclass
class Result:
    """What became of one task: the share that was right for each seed, how the groups did, and the wrong answers."""

    task: str
    shares: list[float]
    groups: dict[str, tuple[int, int]]  # group → (right, cases), over all seeds
    wrong: list[tuple[Case | Judged, str]]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.shares) / len(self.shares)

    @property
    def reached(self) -> bool:
        """Every seed has to reach the target."""
        return min(self.shares) >= TARGETS.get(self.task, 0)


def evaluate(model, tokenizer, count: int = 100, seeds=(0,), done=lambda: None) -> Iterator[Result]:
    """A Result for every task, through Session's greedy chat. `done` is called after every case."""
    for task in (*TASKS, *WRITTEN):
        result = Result(task, [], {}, [])
        for seed in seeds:
            chosen, wrong = cases(task, count, seed), len(result.wrong)
            for case in chosen:
                answer = reply(model, tokenizer, case.turns, LONGEST.get(task, 100))
                right = case.accepts(answer)
                result.wrong += [] if right else [(case, answer)]
                if case.group:
                    before = result.groups.get(case.group, (0, 0))
                    result.groups[case.group] = before[0] + right, before[1] + 1
                done()
            result.shares.append(1 - (len(result.wrong) - wrong) / len(chosen))
        yield result


def reply(model, tokenizer, turns, limit: int = 100) -> str:
    """The greedy answer to the last of these messages."""
    session = Session(model, tokenizer, params={"max_new_tokens": limit})
    for turn in turns:
        answer = session.ask(turn)
    return answer


# --- a broken cache must break the answers -------------------------------------------------------------------------


class WrongPosition(KVCache):
    """A cache that lies about its length, so that the model rotates by a wrong angle.

    `lie` maps the true length to the one that is told; mask and stored rows stay right.
    """

    def __init__(self, cache: KVCache, lie: Callable[[int], int]):
        super().__init__(cache, cache.config)
        self.lie = lie

    @property
    def length(self) -> int:
        return self.lie(super().length)


def faults(cached: int) -> dict[str, Callable[[int], int]]:
    """Wrong positions for the tokens that follow `cached` right ones."""
    return {
        "right": lambda length: length,
        "start_pos off by one": lambda length: length + 1,
        "start_pos restarted at 0": lambda length: length - cached,
        "start_pos doubled": lambda length: length + cached,
    }


def broken_recall(
    model, tokenizer, count: int = 100, seed: int = 0, done=lambda: None
) -> list[dict]:
    """The recall cases, asked with a right cache, a cleared one, and wrong positions.

    One row a fault: share recalled, share of answers that stay the same to the letter, and the median over cases of
    max |Δlogit| of the first answer token. Earlier turns are always cached right: only the last one is disturbed.
    """
    rows: dict[str, dict[str, list[float]]] = {}
    for case in cases("recall", count, seed):
        session = Session(model, tokenizer, params={"max_new_tokens": 40})
        for turn in case.turns[:-1]:
            session.ask(turn)
        ids = session.prompt([*session.messages, {"role": "user", "content": case.turns[-1]}])
        cached = (
            len(session.prompt(session.messages, add_generation_prompt=False))
            if session.messages
            else 0
        )
        full, question = ids[:cached], ids[cached:]
        reference = answer_from(model, tokenizer, full, question, lambda length: length)
        trials = {name: (full, lie) for name, lie in faults(cached).items()}
        trials["cache cleared"] = ([], lambda length: length)
        for name, (context, lie) in trials.items():
            answer, logits = answer_from(model, tokenizer, context, question, lie)
            row = rows.setdefault(name, {"recalled": [], "same answer": [], "logits": []})
            row["recalled"].append(case.accepts(answer))
            row["same answer"].append(answer == reference[0])
            row["logits"].append((logits - reference[1]).abs().max().item())
        done()
    return [
        {
            "fault": name,
            "recalled": sum(row["recalled"]) / count,
            "same answer": sum(row["same answer"]) / count,
            "max |Δlogit|": sorted(row["logits"])[count // 2],
        }
        for name, row in rows.items()
    ]


def answer_from(model, tokenizer, context, question, lie, limit: int = 40):
    """(greedy answer, logits of its first token) when `context` is cached right and `question` follows with a lie."""
    cache = make_cache("dict", model.config)
    if context:
        prefill(model, torch.tensor([context]), cache, start_pos=0)
    cache = WrongPosition(cache, lie)
    first = logits = prefill(
        model, torch.tensor([question]), cache, start_pos=cache.length
    )  # (1,V)
    ids: list[int] = []
    while (token := int(logits.argmax())) not in model.generation_config.eos_token_ids and len(
        ids
    ) < limit:
        ids.append(token)
        logits = decode(model, torch.tensor([[token]]), cache, start_pos=cache.length)  # (1,V)
    return tokenizer.decode(ids), first[0]


def examples(model, tokenizer) -> list[tuple[str, str]]:
    """A fixed conversation, to see at a glance what the model says."""
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
