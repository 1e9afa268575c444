"""Log-probabilities in OpenAI's two formats, for answers and for echoed prompts.

Values are log_softmax of the raw logits: before temperature, filters and grammars. For an answer
they are recorded as its tokens are drawn (Step). For a prompt they need the logits of every row,
which prefill skips. `Echo` therefore runs the prompt a second time, in chunks with a bounded number
of logits and a separate cache. This costs one more prefill, and V·C multiplications per token
instead of per prompt.
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

LOGITS = 8_000_000  # per chunk: 32 MB in fp32, or 52 tokens of a vocabulary of 151,936
UNLIKELIEST = -9999.0  # OpenAI's substitute for minus infinity, which JSON lacks
Shown = Callable[[Sequence[Placed], int], dict | None]


def none(tokens: Sequence[Placed], before: int) -> None:
    """No log-probabilities were requested."""


class Content:
    """Chat format: the content's tokens. A token may hold part of a character, hence `bytes`."""

    def __init__(self, tokenizer: Tokenizer, top: int):
        self.tokenizer = tokenizer
        self.top = top

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
    """Completion format: four lists. `top_logprobs` always includes the token that was drawn."""

    def __init__(self, tokenizer: Tokenizer, top: int):
        self.tokenizer = tokenizer
        self.top = top

    def __call__(self, tokens: Sequence[Placed], before: int) -> dict:
        """`before`: characters of the echoed prompt, which precede the generated text."""
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
        likely = (*step.top[: self.top], (step.token, step.logprob))
        # Reversed: where two tokens have one name, the likelier one wins.
        return {self._name(token): bounded(value) for token, value in reversed(likely)}

    def _name(self, token: int) -> str:
        """The token's text. Bytes that are not UTF-8 become `bytes:\\xf0\\x9f`, as at OpenAI."""
        piece = self.tokenizer.token_bytes(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def bounded(value: float) -> float:
    """Replace minus infinity, which JSON lacks, by OpenAI's UNLIKELIEST."""
    return max(value, UNLIKELIEST)


class Echo:
    """A prompt that precedes its answers, with its log-probabilities; shared by these answers."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int], top: int | None):
        decoder = StreamDecoder(tokenizer)
        pieces = [decoder.put(id) for id in ids]
        self.text = "".join(pieces) + decoder.flush()
        self.ids = ids
        self.top = top
        self._at = [0, *accumulate(map(len, pieces))]
        self._steps: list[Step] = []
        self._rest: Iterator[list[Step]] | None = None

    def advance(self, model: Model) -> bool:
        """Compute the next chunk, in the engine's thread; True once all are computed."""
        if self.top is not None and len(self._steps) < len(self.ids):
            self._rest = self._rest or prompt_steps(model, self.ids, self.top)
            self._steps += next(self._rest)
        return self.top is None or len(self._steps) == len(self.ids)

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were computed so far."""
        return len(self._steps)

    def piece(self) -> Piece:
        """The whole prompt."""
        return Piece("prompt", self.text, tuple(zip(self._steps, self._at, strict=False)))


@torch.inference_mode()
def prompt_steps(model: Model, ids: list[int], top: int) -> Iterator[list[Step]]:
    """Yield a prompt's tokens with their log-probabilities, chunk by chunk; the first has None."""
    # The first token follows nothing, so it has no probability.
    yield [Step(ids[0], None)]  # type: ignore[arg-type]  # a drawn token has a float
    size = max(1, min(prefill_chunk(model), LOGITS // model.config.vocab_size))
    cache = make_cache("static", model.config, capacity=len(ids))
    for start in range(0, len(ids) - 1, size):
        end = min(start + size, len(ids) - 1)
        part = ids[start:end]
        follow = ids[start + 1 : end + 1]
        # Row i holds the logits of the token after part[i].
        logits = verify_draft(model, [part], cache, start)[0]  # (T,V)
        values = logprob(logits, torch.tensor(follow, device=logits.device)).tolist()
        tops: Iterable = [()] * len(part)
        if top:
            tops = likeliest(logits, top)
        yield [Step(*step) for step in zip(follow, values, tops, strict=True)]
