"""How good the bundled model is: tasks on words and seeds that training never used, through the greedy chat path.

Every case is a small conversation; the last answer is checked against what the user said before. The same cases are
then asked with a broken cache (cleared, or with a wrong start_pos), because a model that answers as well without its
memory would prove nothing.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nanokv.cache import KVCache, make_cache
from nanokv.chat.session import Session
from nanokv.inference import decode, prefill
from nanokv.training import corpus
from nanokv.training.cache_questions import HELD_OUT_WRAPPERS, QUESTIONS, ask
from nanokv.training.facts import FACTS

TARGETS = {
    "recall": 0.95, "repeat": 0.95, "nth": 0.95, "count": 0.95, "reverse": 0.90, "addition": 0.90,
    "cache questions": 0.95,
}
# kinds whose value is a word of its own
RECALLED = ("name", "city", "colour", "food", "friend", "sister", "number", "word")


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

    def accepts(self, answer: str) -> bool:
        """Is it right? Capitals, spaces around it and the last full stop do not matter."""
        if self.frame is not None:
            whole = rf"(?:{self.frame})?{re.escape(self.expected)}\.?"
            return re.fullmatch(whole, answer.strip(), re.IGNORECASE) is not None
        return _holds(answer, self.expected) and not any(_holds(answer, other) for other in self.others)


def _holds(answer: str, expected: str) -> bool:
    """The expected words stand in the answer, as words: `Tor` is not in `Torsten`, 4 is not in 14."""
    return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", answer, re.IGNORECASE) is not None


def _script(talk: corpus.Conversation) -> tuple[str, ...]:
    return tuple(m["content"] for m in talk.messages if m["role"] == "user")


def recall_case(rng: random.Random) -> Case:
    """One to three facts, up to two other turns between, then a question about one of them."""
    talk = corpus.Conversation(rng, held_out=True)
    kinds = rng.sample(RECALLED, rng.randint(1, 3))
    if rng.random() < 0.3:
        corpus.tell_pet(talk)
    for kind in kinds:
        value = FACTS[kind].value(rng, True)
        if kind not in talk.facts:
            talk.facts[kind] = value
            talk.say(rng.choice(FACTS[kind].told).format(v=value), "")
    for _ in range(rng.randint(0, 2)):
        rng.choice((corpus.add, corpus.count, corpus.cache_question, corpus.repeat, corpus.small_talk))(talk)
    if talk.pets and rng.random() < 0.5:
        ((kind, expected),) = talk.pets.items()
        question = f"What is my {kind} called?"
    else:
        kind = rng.choice(kinds)
        question, expected = rng.choice(FACTS[kind].asked), talk.facts[kind]
    others = (*talk.facts.values(), *talk.pets.values())
    others = tuple(value for value in others if not _holds(f"{question} {expected}", value))
    return Case((*_script(talk), question), expected, others=others)


def _whole(answer: str) -> str:
    return answer.rstrip(".")


def _from_segment(segment: Callable, expected: Callable[[str], str] = _whole, frame: str = ""):
    """The corpus' own generator, on held-out words: its last answer is the right one."""

    def make(rng: random.Random) -> Case:
        talk = corpus.Conversation(rng, held_out=True)
        if rng.random() < 0.3:
            corpus.small_talk(talk)
        segment(talk)
        return Case(_script(talk), expected(talk.messages[-1]["content"]), frame)

    return make


def two_digits(talk: corpus.Conversation):
    """What is a + b, both from 10 to 99."""
    a, b = talk.rng.randint(10, 99), talk.rng.randint(10, 99)
    talk.say(
        talk.rng.choice(("What is {} + {}?", "{} + {} = ?", "How much is {} plus {}?", "Add {} and {}.")).format(a, b),
        f"= {a + b}",
    )


def cache_case(rng: random.Random) -> Case:
    """A trained phrasing in words around it that training never used."""
    answer, phrasings = rng.choice(QUESTIONS)
    return Case((ask(rng, rng.choice(phrasings[:-1]), HELD_OUT_WRAPPERS),), _whole(answer), "")


def new_phrasing_case(rng: random.Random) -> Case:
    """A phrasing that training never used."""
    answer, phrasings = rng.choice(QUESTIONS)
    return Case((phrasings[-1],), _whole(answer), "")


TASKS = {
    "recall": recall_case,
    "repeat": _from_segment(corpus.repeat, frame="you said: "),
    "nth": _from_segment(corpus.nth, lambda answer: _whole(answer).split(" is ")[1], r"the \w+ is "),
    "count": _from_segment(corpus.count),
    "reverse": _from_segment(corpus.reverse, frame="reversed: "),
    "addition": _from_segment(two_digits, lambda answer: answer.split("= ")[1], r"\d+ \+ \d+ = "),
    "cache questions": cache_case,
    "cache questions, new phrasing": new_phrasing_case,
}


def cases(task: str, count: int, seed: int) -> list[Case]:
    """So many cases of a task; the seed changes the cases, never the half of the words that they come from."""
    return [TASKS[task](random.Random(f"evaluation:{seed}:{task}:{i}")) for i in range(count)]


def evaluate(model, tokenizer, count: int = 100, seed: int = 0,
             done=lambda: None) -> Iterator[tuple[str, float, list[tuple[Case, str]]]]:  # fmt: skip
    """(task, share answered right, the wrong ones with their answers) for every task, through Session's greedy chat.

    `done` is called after every case.
    """
    for task in TASKS:
        wrong = []
        for case in cases(task, count, seed):
            session = Session(model, tokenizer, params={"max_new_tokens": 100})
            for turn in case.turns:
                answer = session.ask(turn)
            if not case.accepts(answer):
                wrong.append((case, answer))
            done()
        yield task, (count - len(wrong)) / count, wrong


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


def broken_recall(model, tokenizer, count: int = 100, seed: int = 0, done=lambda: None) -> list[dict]:
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
        cached = len(session.prompt(session.messages, add_generation_prompt=False)) if session.messages else 0
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
    first = logits = prefill(model, torch.tensor([question]), cache, start_pos=cache.length)  # (1,V)
    ids: list[int] = []
    while (token := int(logits.argmax())) not in model.generation_config.eos_token_ids and len(ids) < limit:
        ids.append(token)
        logits = decode(model, torch.tensor([[token]]), cache, start_pos=cache.length)  # (1,V)
    return tokenizer.decode(ids), first[0]


def examples(model, tokenizer) -> list[tuple[str, str]]:
    """A fixed conversation, to see at a glance what the model says."""
    session = Session(model, tokenizer, params={"max_new_tokens": 60})
    turns = (
        "Hello!", "My name is Zorbla.", "I have a cat called Miso.", "What is my name?", "What is 27 + 48?",
        "What is a KV cache?", "What is my cat called?",
    )  # fmt: skip
    return [(turn, session.ask(turn)) for turn in turns]
