"""Facts that a user tells in a conversation, and two questions about them at its end."""

from collections.abc import Callable, Sequence
from typing import Protocol

from nanokv.cache import KVCache
from nanokv.chat.session import Session
from nanokv.checkpoint import Model
from nanokv.text.tokenizer import Tokenizer

LONGEST = 40  # tokens of an answer


class Case(Protocol):
    """Messages of a user, and which answers to the last one are right."""

    @property
    def turns(self) -> Sequence[str]: ...

    def accepts(self, answer: str) -> bool: ...


class Talks:
    """Conversations with two questions: a case for the first, and one for both.

    The model reads all turns before the first question in one append with it, as a prompt is. The
    answers in there are those that it gives over an exact cache.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, pairs: Sequence[tuple[Case, Case]]):
        self.tokenizer = tokenizer
        self.pairs = list(pairs)
        self.told = [self.answered(model, second.turns[:-2]) for _, second in self.pairs]

    def answered(self, model: Model, turns: Sequence[str]) -> list[dict]:
        """The messages of a conversation with these turns."""
        session = self.session(model, None)
        for turn in turns:
            session.ask(turn)
        return session.messages

    def session(self, model: Model, cache: KVCache | None) -> Session:
        return Session(model, self.tokenizer, cache, params={"max_new_tokens": LONGEST})

    def asked(self, model: Model, new: Callable[[], KVCache]) -> tuple[int, int, list[KVCache]]:
        """(right first answers, right second answers, the caches)."""
        right = [0, 0]
        caches = []
        for told, pair in zip(self.told, self.pairs, strict=True):
            session = self.session(model, new())
            session.replace(told)
            for i, case in enumerate(pair):
                right[i] += case.accepts(session.ask(case.turns[-1]))
            caches.append(session.cache)
        first, second = right
        return first, second, caches
