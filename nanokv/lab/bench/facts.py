"""Facts that a user tells, and whether a model knows one: of six values, the told is the likeliest.

The question is followed by the beginning of its answer, so that a model need not find the form. A
model that knows nothing finds one of six.
"""

import random
from dataclasses import dataclass

from torch import Tensor

from nanokv.errors import NanoKVError
from nanokv.text.tokenizer import Tokenizer

TELLS = (  # told, asked, the beginning of the answer, values; words of different first tokens
    ("My name is", "What is my name?", "Your name is", "Ada Ben Clara David Emma Felix"),
    ("I live in", "Where do I live?", "You live in", "Oslo Paris Rome Madrid Berlin Dublin"),
    *(
        (
            f"My favourite {thing} is",
            f"What is my favourite {thing}?",
            f"Your favourite {thing} is",
            values,
        )
        for thing, values in {
            "colour": "red blue green yellow black white",
            "animal": "cat dog horse bear fox owl",
            "drink": "tea coffee milk water juice lemonade",
            "sport": "tennis football chess golf rugby hockey",
        }.items()
    ),
)
VALUES = 6  # of each fact
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
ACKNOWLEDGED = "Thank you."
OTHER = "-m NAME of another model"


@dataclass(frozen=True)
class Fact:
    """A message, a question, the beginning of its answer; all values, and which of them is told."""

    begin: str
    asked: str
    opening: str
    values: tuple[str, ...]
    right: int

    @property
    def told(self) -> str:
        return f"{self.begin} {self.values[self.right]}."

    @property
    def answer(self) -> str:
        return f"{self.opening} {self.values[self.right]}."


@dataclass(frozen=True)
class Question:
    """Ids that end with the beginning of the answer; the first token of each value, and which of
    them is right."""

    ids: list[int]
    values: list[int]
    right: int

    def answered(self, logits: Tensor) -> tuple[bool, float]:
        """(whether the right value is the likeliest of the six, log p of its first token).

        logits (V,): those that follow `ids`.
        """
        likely = logits.float().log_softmax(-1)[self.values]  # (6,)
        return int(likely.argmax()) == self.right, float(likely[self.right])


def drawn(draw: random.Random, count: int = len(TELLS)) -> list[Fact]:
    """Different facts in an order and with values that are drawn."""
    kinds = draw.sample(TELLS, count)
    return [
        Fact(begin, asked, opening, tuple(values.split()), draw.randrange(VALUES))
        for begin, asked, opening, values in kinds
    ]


def question(tokenizer: Tokenizer, text: str, fact: Fact) -> Question:
    """The question that ends this text. NanoKVError if two values begin with the same token."""
    firsts = [tokenizer.encode(f" {value}")[0] for value in fact.values]
    if len(set(firsts)) < len(firsts):
        raise NanoKVError(f"two of {' '.join(fact.values)} begin with the same token", OTHER)
    return Question(tokenizer.encode(text), firsts, fact.right)


def exchange(said: str, answer: str) -> list[dict]:
    """A message of the user and its answer."""
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
