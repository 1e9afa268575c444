"""Speculative decoding: a cheap draft guesses some tokens, the model checks all in one forward.

A guess x is accepted with probability min(1, p(x)/q(x)), where p is the model's distribution and q
the draft's. The first rejected guess is replaced by a draw from max(p − q, 0); if all are accepted,
one more token is drawn from p. The result is distributed exactly as p (Leviathan et al. 2022, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318). At temperature 0, where p puts everything on the
argmax, the text is the same as without speculation.

A forward of T rows equals T decodes up to rounding, so tokens can differ if two logits tie within
rounding: not seen in fp32, occasionally in bf16. Drafts are short enough (cache.sizes.max_rollback)
that truncate undoes rejected guesses exactly, also in caches that quantize or forget.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanokv.cache import KVCache, make_cache
from nanokv.checkpoint import Model
from nanokv.decoding.generation import (
    EosIds,
    Generation,
    SamplingParams,
    Step,
    Tokens,
    context_limit,
)
from nanokv.decoding.ranges import check_sampling
from nanokv.decoding.sample import distribution, logprob
from nanokv.errors import CapacityError, GenerationError
from nanokv.inference import decode, prefill_chunk, prefill_chunks, verify_draft
from nanokv.loading import skeleton
from nanokv.model import Transformer
from nanokv.support.habits import hinted
from nanokv.text.ids import Ids, common_prefix

Distribution = Callable[[Tensor, list[int]], Tensor]  # logits (1,V), guesses so far → (1,V)


class Guess(NamedTuple):
    """n ids, and the distributions q (n,V) that they were drawn from; None: they were certain."""

    ids: list[int]
    q: Tensor | None


class Round(NamedTuple):
    """The counts of one forward after the prefill."""

    proposed: int
    accepted: int


class Draft:
    """Guesses tokens. `vocab_size` None fits any model."""

    vocab_size: int | None = None

    def propose(
        self,
        ids: list[int],
        count: int,
        distribution: Distribution,
        generator: torch.Generator | None,
    ) -> Guess:
        """At most `count` guesses that continue ids; a plain pair (ids, q) will do.

        `distribution(logits (1,V), guesses so far)` applies the model's temperature, filters and
        penalty.
        """
        raise NotImplementedError


class PromptLookup(Draft):
    """Guesses what followed the same last tokens earlier in the text.

    Searches for the leftmost earlier match of the last `max_ngram` tokens, then of fewer.
    Reference: transformers' PromptLookupCandidateGenerator (A. Saxena 2023, prompt lookup
    decoding).
    """

    def __init__(self, max_ngram: int = 2, tokens: int = 10):
        check_sampling(max_ngram=max_ngram, tokens=tokens)
        self.max_ngram = max_ngram
        self.tokens = tokens

    def propose(
        self,
        ids: list[int],
        count: int,
        distribution: Distribution | None = None,
        generator: torch.Generator | None = None,
    ) -> Guess:
        for size in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            newest = ids[-size:]
            # end < len(ids), so the newest tokens do not match themselves.
            for end in range(size, len(ids)):
                if ids[end - size : end] == newest:
                    return Guess(ids[end : end + min(count, self.tokens)], None)
        return Guess([], None)


class DraftModel(Draft):
    """Another model guesses `tokens` tokens, one decode each; its cache keeps the common prefix."""

    def __init__(self, model: Model, cache: KVCache | None = None, tokens: int = 4):
        check_sampling(tokens=tokens)
        if cache is None:
            cache = make_cache("growing", model.config)
        self.model = model
        self.tokens = tokens
        self.vocab_size = model.config.vocab_size
        self.cache = cache
        self.fed: list[int] = []  # ids that the cache certainly holds, even after a failure

    def propose(
        self,
        ids: list[int],
        count: int,
        distribution: Distribution,
        generator: torch.Generator | None,
    ) -> Guess:
        room = context_limit(self.model, self.cache) - len(ids) + 1  # the last guess is never fed
        guesses: list[int] = []
        chances: list[Tensor] = []
        for _ in range(min(count, self.tokens, room)):
            q = distribution(self._logits(ids + guesses), guesses)  # (1,V)
            chances.append(q)
            guesses.append(int(torch.multinomial(q, 1, generator=generator)))
        return Guess(guesses, torch.cat(chances) if chances else None)  # q (n,V)

    def _logits(self, ids: list[int]) -> Tensor:
        """(1,V) after ids; computes only the tokens that the cache does not hold."""
        keep = min(common_prefix(self.fed, ids), len(ids) - 1)
        self.fed = self.fed[:keep]
        self.cache.truncate(keep)  # also repairs the cache after a failed forward
        if keep == len(ids) - 1:
            logits = decode(self.model, [ids[keep:]], self.cache, start_pos=keep)
        else:
            logits = prefill_chunks(
                self.model, [ids[keep:]], self.cache, keep, chunk=prefill_chunk(self.model)
            )
        self.fed = list(ids)
        return logits


class EarlyExit(DraftModel):
    """The first `layers` layers of the model, then its norm and head; all weights are shared."""

    def __init__(
        self, model: Transformer, layers: int, cache: KVCache | None = None, tokens: int = 4
    ):
        super().__init__(first_layers(model, layers), cache, tokens)


def first_layers(model: Transformer, layers: int) -> Transformer:
    """A model of the first `layers` layers, which shares the parameters of `model`."""
    check_sampling(layers=layers)
    deep = model.config.num_hidden_layers
    if layers >= deep:
        raise GenerationError(
            f"an early exit after {layers} of {deep} layers: 1 to {deep - 1} is possible"
        )
    view = skeleton(replace(model.config, num_hidden_layers=layers))
    view.embed_tokens = model.embed_tokens
    view.norm = model.norm
    view.lm_head = model.lm_head
    view.layers = nn.ModuleList(model.layers[:layers])
    return view


def speculative_sample(
    guesses: list[int], q: Tensor | None, p: Tensor, generator: torch.Generator | None = None
) -> tuple[int, int]:
    """(how many guesses are kept, the token after them).

    guesses: n ids; q (n,V), or None if they were certain; p (n+1,V).
    """
    n = len(guesses)
    guessed = torch.tensor(guesses, dtype=torch.int64, device=p.device)  # (n,)
    if q is None:
        q = F.one_hot(guessed, p.shape[-1]).to(p)  # (n,V)
    row = torch.arange(n, device=p.device)
    ratio = p[row, guessed] / q[row, guessed]  # (n,); q > 0 for a token that was drawn from it
    refused = torch.rand(n, generator=generator, device=p.device) >= ratio  # (n,)
    kept = n
    rest = p[n]  # (V,)
    if refused.any():
        kept = int(refused.nonzero()[0])
        rest = (p[kept] - q[kept]).clamp(min=0)  # (V,)
    if not rest.sum() > 0:  # p and q are equal up to rounding
        rest = p[kept]
    # multinomial normalises `rest`.
    return kept, int(torch.multinomial(rest, 1, generator=generator))


@hinted
def speculate(
    model: Model,
    ids: Ids,
    draft: Draft,
    cache: KVCache | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    eos_token_ids: EosIds = None,
) -> "Tokens[Speculation]":
    """nanokv.generate with guesses from `draft`: same arguments, errors and greedy tokens.

    Returns an iterator of ids; its `.report` (a Speculation) counts rounds, guesses and saved
    forwards. The cache may be ahead of the ids taken from the iterator: exhaust or close() it
    before you use the cache.
    """
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    if cache is None:
        cache = make_cache("growing", model.config)
    return Tokens(
        Speculation(model, ids, cache, params, max_new_tokens, eos_token_ids, draft=draft)
    )


class Speculation(Generation):
    """A Generation with a Draft. `rounds` has an entry per forward after the prefill."""

    def __init__(self, *args: Any, draft: Draft, history: list[int] | None = None, **options: Any):
        # `args` end before history.
        super().__init__(*args, history=history, **options)  # type: ignore[misc]
        self.draft = draft
        self.rounds: list[Round] = []
        self._text = list(history or ()) + self.ids
        size = self.model.config.vocab_size
        if draft.vocab_size not in (None, size):
            raise GenerationError(
                f"the draft's vocabulary has {draft.vocab_size:,} tokens, the model's {size:,}"
            )

    @property
    def proposed(self) -> int:
        """Guesses that the model has checked."""
        return sum(each.proposed for each in self.rounds)

    @property
    def accepted(self) -> int:
        """Guesses that were kept."""
        return sum(each.accepted for each in self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """accepted / proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def forwards_saved(self) -> int:
        """How many fewer forwards than the N−1 that plain decoding runs after the prefill."""
        return max(0, len(self.tokens) - 1 - len(self.rounds))

    @property
    def speculation(self) -> dict[str, float]:
        """The four numbers above, for a status line."""
        names = ("proposed", "accepted", "acceptance_rate", "forwards_saved")
        return {name: getattr(self, name) for name in names}

    def _run(self) -> Generator[Step, None, None]:
        try:
            yield from super()._run()
        finally:  # eos or close in the middle of a round, or a failure
            self._forget_the_rest()

    def finish(self, reason: str) -> None:
        super().finish(reason)
        self._forget_the_rest()  # again, because the first call may have been interrupted

    def _forget_the_rest(self) -> None:
        """Truncate accepted tokens that the caller has not taken."""
        if self.tokens:
            self.cache.truncate(self.fed)

    def _round(self) -> list[Step]:
        """Guess, check, truncate rejected guesses → one Step more than guesses were kept."""
        start = self.cache.length
        guess = self._guess(start)
        guesses, logits = self._verify(guess.ids)
        steps = self._accept(logits, guesses, guess.q)
        # Keep the token that was fed and the accepted guesses.
        self.cache.truncate(start + len(steps))
        self.rounds.append(Round(len(guesses), len(steps) - 1))
        return steps

    def _guess(self, start: int) -> Guess:
        """The draft's guesses, as many as answer, context and cache allow, up to the first eos."""
        room = min(self.max_new_tokens - len(self.tokens), self.context - start)
        rollback = self.cache.sizes.max_rollback
        if rollback is not None:
            room = min(room, rollback)
        if room < 2:  # the newest token takes one place
            return Guess([], None)
        with self._listening():
            guesses, q = self.draft.propose(
                self._text + self.tokens, room - 1, self._distribution, self.generator
            )
        for i, token in enumerate(guesses, 1):
            if token in self.eos_token_ids:
                return Guess(guesses[:i], None if q is None else q[:i])
        return Guess(guesses, q)

    def _verify(self, guesses: list[int]) -> tuple[list[int], Tensor]:
        """(guesses, logits (n+1,V)) after the newest token and each guess."""
        ids = [self.tokens[-1], *guesses]
        tokens = torch.tensor([ids], device=self.generator.device)  # (1,n+1)
        path = verify_draft if guesses else decode
        try:
            logits = self._forward(path, tokens, back_to=self.cache.length)
        except CapacityError:
            if not guesses:
                raise
            return self._verify([])  # a shared page pool may still have room for one token
        return guesses, logits.flatten(0, -2)

    def _accept(self, logits: Tensor, guesses: list[int], q: Tensor | None) -> list[Step]:
        p = self._distribution(logits, guesses)  # (n+1,V)
        kept, token = speculative_sample(guesses, q if guesses else None, p, self.generator)
        tokens = [*guesses[:kept], token]
        scores = logprob(logits[: kept + 1], torch.tensor(tokens, device=logits.device))
        return [Step(token, score) for token, score in zip(tokens, scores.tolist(), strict=True)]

    def _distribution(self, logits: Tensor, guesses: list[int]) -> Tensor:
        """(T,V) for the last T positions of text + guesses, each penalised for its past."""
        previous = None
        if self.values["repetition_penalty"] != 1:
            text = self._text + self.tokens + guesses
            # Rows are filled up with the first id, because a repeated id counts once.
            fills = reversed(range(logits.shape[0]))
            rows = [text[: len(text) - i] + text[:1] * i for i in fills]
            previous = torch.tensor(rows, device=logits.device)  # (T,N)
        return distribution(logits, **self.values, previous=previous)
