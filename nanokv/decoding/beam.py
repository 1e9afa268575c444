"""Beam search: keep the k likeliest continuations instead of one, and return the best that ended.

The prompt is prefilled once, as one row; then the cache is forked and its row is repeated k times
(transformers prefills k copies of the prompt). After that, a step is one decode of k rows and a
reorder of the cache: a beam that lost is replaced by a copy of a beam that won. The caller's cache
keeps only the prompt, so it can be used again; BeamGeneration, for a conversation, also feeds the
winner into it.

Sequences and scores equal transformers' `generate(num_beams=k, do_sample=False)` (5.23:
generation/utils.py, `_beam_search`). Its rules are followed exactly, because they decide with many
eos ids, a length penalty or ties. In transformers one beam is greedy decoding, and so it is here:
the repetition penalty applies to the logits, and the first eos ends the answer.
"""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanokv.cache import KVCache, make_cache
from nanokv.checkpoint import Model
from nanokv.decoding.generation import EosIds, Generation, SamplingParams, Step, never
from nanokv.decoding.sample import logprob
from nanokv.decoding.sample import repetition_penalty as penalise
from nanokv.errors import GenerationError
from nanokv.inference import decode, verify_draft
from nanokv.support.habits import hinted
from nanokv.text.ids import Ids

NEVER = -1e9  # the score of a beam that does not exist; finite, because -inf × 0 is NaN
EARLY = (False, True, "never")
REPLAY = 32  # tokens of the winner per forward, whose logits are REPLAY·V values


class Beam(NamedTuple):
    """New tokens, eos included, and their summed log-probability / length^length_penalty."""

    ids: list[int]
    score: float


@hinted
def beam_search(
    model: Model,
    ids: Ids,
    beams: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos_token_ids: EosIds = None,
    num_return: int = 1,
    cache: KVCache | None = None,
    repetition_penalty: float = 1.0,
    chunk: int | None = None,
    should_stop: Callable[[], bool] = never,
) -> list[Beam]:
    """The `num_return` best of `beams` continuations of ids, best first.

    ids: a list, (T,) or (1,T), not yet in the cache. Scores are divided by length^length_penalty,
    so a value above 0 favours long answers. early_stopping: True ends the search when `beams`
    answers have ended; False goes on while the best running beam, at its present length, beats
    one of them; "never" goes on while any length could make it beat one. The cache has one row
    and can fork and reorder; a paged cache needs pages for `beams` rows. Costs one prefill of one
    row, then at most max_new_tokens − 1 decodes of k rows. `should_stop` is called before each of
    these; if it returns True, the best beams so far are returned, or none during the prefill.
    """
    if cache is None:
        cache = make_cache("dict", model.config)
    params = SamplingParams(repetition_penalty=repetition_penalty)
    search = BeamGeneration(
        model,
        ids,
        cache,
        params,
        max_new_tokens,
        eos_token_ids,
        should_stop=should_stop,
        chunk=chunk,
        beams=beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    if type(num_return) is not int or not 1 <= num_return <= beams:
        raise GenerationError(
            f"num_return is {num_return!r}: it must be an integer from 1 to beams = {beams}"
        )
    return search.find()[:num_return]


class BeamGeneration(Generation):
    """The best beam as a Generation: its tokens come all at once, when the search is over.

    The search draws nothing: it uses only the repetition penalty of the params, and no seed. Like
    every Generation it leaves its answer in the cache, so the winner is fed again after the prompt,
    in a few forwards.
    """

    def __init__(
        self,
        *args: Any,
        beams: int = 4,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self.seed = None
        eos = torch.tensor(sorted(set(self.eos_token_ids)), dtype=torch.int64)
        _check(self.model.config.vocab_size, beams, length_penalty, early_stopping, len(eos))
        self.search = Search(
            beams, min(self.max_new_tokens, self.room), float(length_penalty), early_stopping, eos
        )

    def find(self) -> list[Beam]:
        """All beams, best first; the cache keeps only the prompt."""
        with self._stopping():
            logits = self._prefill()
            if logits is not None:
                self._explore(logits)
        return self.search.best()

    @torch.inference_mode()
    def _explore(self, logits: Tensor) -> None:
        """Run the search from the logits (1,V) after the prompt."""
        search = self.search
        penalty = self.params.repetition_penalty
        prompt = torch.tensor([self._history + self.ids])  # (1,N)
        rows = self.cache.fork()
        rows.reorder([0] * search.beams)
        logits = logits.repeat(search.beams, 1)  # (1,V) → (k,V)
        with self._stopping():
            while True:
                seen = torch.cat((prompt.repeat(search.beams, 1), search.tokens), 1)  # (k,N+n)
                parents = search.step(penalised_log_probs(logits, seen, penalty))  # (k,)
                if search.ended:
                    return
                if self.should_stop():
                    self.finish_reason = "interrupted"
                    return
                if parents.tolist() != list(range(search.beams)):
                    rows.reorder(parents)
                with self._listening():
                    logits = decode(
                        self.model, search.tokens[:, -1:], rows, start_pos=rows.length
                    )  # (k,V)

    def _answer(self, logits: Tensor, began: float) -> Iterator[Step]:
        self._explore(logits)
        ids = self.search.best()[0].ids
        logprobs = self._feed(logits, ids)
        self.timings.first_token_seconds = perf_counter() - began
        self.timings.decode_seconds = (
            self.timings.first_token_seconds - self.timings.prefill_seconds
        )
        try:
            for token, score in zip(ids, logprobs, strict=True):
                self.tokens.append(token)
                self.logprobs.append(score)
                self.finish_reason = self.finish_reason or self._reason_to_end()
                yield Step(token, score)
        finally:  # also if the caller stops early
            self._forget_the_rest()

    def _feed(self, logits: Tensor, ids: list[int]) -> list[float]:
        """Feed all ids but the last → the log-probability of each. logits (1,V): the prompt's."""
        prompt = self.cache.length
        tokens = torch.tensor(ids, device=logits.device)  # (n,)
        scores = logprob(logits, tokens[:1]).tolist()
        for start in range(0, len(ids) - 1, REPLAY):
            part = tokens[start : min(start + REPLAY, len(ids) - 1)]  # (t,)
            logits = self._forward(verify_draft, part[None], back_to=prompt)[0]  # (t,V)
            scores += logprob(logits, tokens[start + 1 : start + 1 + len(part)]).tolist()
        return scores

    def _forget_the_rest(self) -> None:
        """Truncate the tokens that the caller has not taken."""
        self._go_back(self.fed if self.tokens else self.prefilled)


def penalised_log_probs(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """logits (k,V), ids so far (k,N) → log-probabilities (k,V), fp32 like the reference.

    As in the reference, beam search penalises log-probabilities and greedy decoding logits. The two
    orders let different tokens win.
    """
    logits = logits.float().to("cpu")
    if penalty == 1:
        return logits.log_softmax(-1)
    if len(logits) == 1:
        return penalise(logits, seen, penalty).log_softmax(-1)
    return penalise(logits.log_softmax(-1), seen, penalty)


class Search:
    """The arithmetic without the model: k running beams, and the k best answers that have ended.

    `tokens` (k,n) and `running` (k,) are the ids and scores of the running beams; `answers`,
    `scores` (k,) and `done` (k,) belong to the answers, of which only the `done` ones exist.
    """

    def __init__(
        self, beams: int, most: int, length_penalty: float, early_stopping: bool | str, eos: Tensor
    ):
        self.beams = beams
        self.most = most  # tokens per answer
        self.length_penalty = length_penalty
        self.early_stopping = True if beams == 1 else early_stopping  # greedy: one answer is enough
        self.eos = eos
        self.ended = False
        self.tokens = torch.empty(beams, 0, dtype=torch.int64)
        self.running = torch.full((beams,), NEVER)
        # All rows are the same prompt: if all existed, the first step would pick k equal beams.
        self.running[0] = 0.0
        self.answers: list[list[int]] = [[] for _ in range(beams)]
        self.scores = torch.full((beams,), NEVER)
        self.done = torch.zeros(beams, dtype=torch.bool)

    def step(self, log_probs: Tensor) -> Tensor:
        """Add a token to every beam: log_probs (k,V) → (k,) the row that each beam continues."""
        k, vocabulary = log_probs.shape
        # Enough candidates that k of them remain even if every beam ends in every eos.
        keep = max(2, 1 + len(self.eos)) * k
        totals = (log_probs + self.running[:, None]).flatten()  # (k·V,)
        best, where = totals.topk(keep)  # (K,)
        if not best[0].isfinite():
            raise GenerationError(
                f"the model's logits cannot be searched: the best score is {best[0].item()}",
                "the weights or the cache hold NaN or infinity; "
                "fp32 (--dtype float32) rules out overflow",
            )
        parent = where // vocabulary  # (K,)
        token = where % vocabulary  # (K,)
        grown = torch.cat((self.tokens[parent], token[:, None]), 1)  # (K,n+1)
        ends = torch.isin(token, self.eos) | (grown.shape[1] == self.most)  # (K,)
        self.collect(grown, best, ends)
        best = best + ends * NEVER
        chosen = best.topk(k).indices  # (k,)
        self.tokens = grown[chosen]
        self.running = best[chosen]
        self.ended = bool(ends.all()) or not self.can_improve()
        return parent[chosen]

    def collect(self, grown: Tensor, best: Tensor, ends: Tensor) -> None:
        """Add the answers among the first k candidates, and keep the k best answers.

        The other K − k candidates can only become running beams.
        """
        ends = ends & (torch.arange(len(ends)) < self.beams)  # (K,)
        new = best / grown.shape[1] ** self.length_penalty + ~ends * NEVER  # (K,)
        scores = torch.cat((self.scores, new))  # (k+K,)
        done = torch.cat((self.done, ends))  # (k+K,)
        kept = scores.topk(self.beams).indices  # (k,)
        answers = self.answers + grown.tolist()
        self.answers = [answers[i] for i in kept.tolist()]
        self.scores = scores[kept]
        self.done = done[kept]

    def can_improve(self) -> bool:
        """True if a running beam may still beat the worst of k answers."""
        if not self.done.all():
            return True
        if self.early_stopping is True:
            return False
        length = self.tokens.shape[1]
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.most  # the length with the best score
        return bool(self.running[0] / length**self.length_penalty > self.scores.min())

    def best(self) -> list[Beam]:
        """Best first: the answers that have ended and, during the search, the running beams."""
        ended = zip(self.answers, self.scores.tolist(), self.done.tolist(), strict=True)
        found = [Beam(ids, score) for ids, score, done in ended if done]
        if not self.ended:
            scores = self.running / max(1, self.tokens.shape[1]) ** self.length_penalty
            growing = zip(self.tokens.tolist(), scores.tolist(), strict=True)
            found += [Beam(ids, score) for ids, score in growing if ids and score > NEVER / 2]
        return sorted(found, key=lambda beam: beam.score, reverse=True)[: self.beams]


def _check(
    vocabulary: int, beams: object, length_penalty: object, early_stopping: object, eos: int
) -> None:
    """GenerationError for a value out of its range; `eos` is the number of eos ids."""
    if type(beams) is not int or beams < 1:
        raise GenerationError(f"beams is {beams!r}: it must be an integer ≥ 1")
    if not isinstance(length_penalty, int | float) or not abs(length_penalty) <= 5:  # NaN fails too
        raise GenerationError(
            f"length_penalty is {length_penalty!r}: it must be a number from -5 to 5"
        )
    if not any(early_stopping is value or early_stopping == value == "never" for value in EARLY):
        raise GenerationError(
            f"early_stopping is {early_stopping!r}: it must be False, True or 'never'"
        )
    if max(2, 1 + eos) > vocabulary:
        raise GenerationError(
            f"{eos} eos ids leave no token of a vocabulary of {vocabulary} to go on with"
        )
