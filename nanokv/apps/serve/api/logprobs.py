"""Log-probabilities in OpenAI's two forms, and those of a prompt's own tokens.

They are the model's own, log_softmax of the raw logits: before temperature, filters and grammars. Those of an answer
are noted as its tokens are drawn (Step). Those of a prompt need the logits of all its rows, which a prefill leaves out:
`Echo` computes the prompt a second time, in chunks of a bounded number of logits, with a cache of its own. Its price is
that of a prefill, and of V·C products for each token, in which the engine's own prefill has but one per prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch

from nanokv.apps.serve.api.answer import Piece, Placed
from nanokv.cache import make_cache
from nanokv.checkpoint import Model
from nanokv.decoding.draw import Step
from nanokv.decoding.sample import likeliest, logprob
from nanokv.inference import prefill_chunk, verify_draft
from nanokv.text.tokenizer import StreamDecoder, Tokenizer

LOGITS = 8_000_000  # of one chunk: 32 MB in fp32, 52 tokens of a vocabulary of 151,936
UNLIKELIEST = -9999.0  # OpenAI's number for what JSON cannot say
Shown = Callable[[Sequence[Placed], int], dict | None]


def none(tokens: Sequence[Placed], before: int) -> None:
    """Nobody has asked for them."""


class Content:
    """Of a chat: the tokens of the content. Bytes tell what `token` cannot: a part of a character."""

    def __init__(self, tokenizer: Tokenizer, top: int):
        self.tokenizer, self.top = tokenizer, top

    def __call__(self, tokens: Sequence[Placed], before: int) -> dict:
        return {"content": [self._entry(step) for step, _ in tokens], "refusal": None}

    def _entry(self, step: Step) -> dict:
        top = [self._token(token, value) for token, value in step.top[: self.top]]
        return self._token(step.token, step.logprob) | {"top_logprobs": top}

    def _token(self, token: int, value: float) -> dict:
        piece = self.tokenizer.token_bytes(token)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": bounded(value),
            "bytes": list(piece),
        }


class Legacy:
    """Of a completion: four lists. `top_logprobs` has the token that was drawn too, however unlikely it was."""

    def __init__(self, tokenizer: Tokenizer, top: int):
        self.tokenizer, self.top = tokenizer, top

    def __call__(self, tokens: Sequence[Placed], before: int) -> dict:
        """`before`: characters of the prompt, where it is repeated, in front of what was generated."""
        steps = [step for step, _ in tokens]
        return {
            "tokens": [self._name(step.token) for step in steps],
            "token_logprobs": [
                None if step.logprob is None else bounded(step.logprob) for step in steps
            ],
            "top_logprobs": [self._top(step) for step in steps],
            "text_offset": [before + at for _, at in tokens],
        }

    def _top(self, step: Step) -> dict | None:
        if step.logprob is None:
            return None
        likely = [
            (token, value) for token, value in (*step.top[: self.top], (step.token, step.logprob))
        ]
        # Of one name the likeliest.
        return {self._name(token): bounded(value) for token, value in reversed(likely)}

    def _name(self, token: int) -> str:
        """Its text; bytes that are no text as OpenAI has them, `bytes:\\xf0\\x9f`, so that two do not get one name."""
        piece = self.tokenizer.token_bytes(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def bounded(value: float) -> float:
    """JSON has no infinity."""
    return max(value, UNLIKELIEST)


class Echo:
    """A prompt that is repeated before its answers, and what the model thinks of its tokens. Shared by its answers."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int], top: int | None):
        decoder = StreamDecoder(tokenizer)
        pieces = [decoder.put(id) for id in ids]
        self.text, self.ids, self.top = "".join(pieces) + decoder.flush(), ids, top
        self._at = [0, *accumulate(map(len, pieces))]
        self._steps: list[Step] = []
        self._rest: Iterator[list[Step]] | None = None

    def advance(self, model: Model) -> bool:
        """Compute the next chunk; True if all is there. In the engine's thread."""
        if self.top is not None and len(self._steps) < len(self.ids):
            self._rest = self._rest or prompt_steps(model, self.ids, self.top)
            self._steps += next(self._rest)
        return self.top is None or len(self._steps) == len(self.ids)

    def piece(self) -> Piece:
        """All of it."""
        return Piece("prompt", self.text, tuple(zip(self._steps, self._at, strict=False)))


@torch.inference_mode()
def prompt_steps(model: Model, ids: list[int], top: int) -> Iterator[list[Step]]:
    """Each token of a prompt with its log-probability after those before it, a chunk at a time; the first has None."""
    yield [Step(ids[0], None)]  # type: ignore[arg-type]  # nothing stands before it
    size = max(1, min(prefill_chunk(model), LOGITS // model.config.vocab_size))
    cache = make_cache("static", model.config, capacity=len(ids))
    for start in range(0, len(ids) - 1, size):
        part, follow = (
            ids[start : min(start + size, len(ids) - 1)],
            ids[start + 1 : start + size + 1],
        )
        # Each row knows what follows its token.
        logits = verify_draft(model, [part], cache, start)[0]  # (T,V)
        values = logprob(logits, torch.tensor(follow, device=logits.device)).tolist()
        tops: Iterable = likeliest(logits, top) if top else [()] * len(part)
        yield [Step(*step) for step in zip(follow, values, tops, strict=True)]
