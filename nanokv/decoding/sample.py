"""From logits to a token: pure functions over (B,V), without state or global random numbers.

Each equals transformers' processor of the same name on the same fp32 logits, ties included (5.23:
generation/logits_process.py). `sample` applies them in transformers' order: repetition penalty,
temperature, top-k, top-p, min-p. With a generator seeded by s it draws the tokens that transformers
draws after set_seed(s). Temperature 0 is argmax.
"""

import math
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor

from nanokv.decoding.ranges import check_sampling
from nanokv.errors import GenerationError

FEW = 1024  # at most this many remaining logits are sorted by themselves, instead of all V


def temperature(logits: Tensor, t: float) -> Tensor:
    """Divide by t > 0: below 1 makes the distribution sharper, above 1 flatter."""
    check_sampling(temperature=t)
    if t == 0:
        raise GenerationError("temperature 0 is argmax and has no scaled logits: use sample()")
    return _scaled(logits, t)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k highest, and all that equal the k-th. 0 and -1 keep all."""
    check_sampling(top_k=k)
    return _highest(logits, k)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities sum to p or more.

    Nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).
    """
    check_sampling(top_p=p)
    return _nucleus(logits, p)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the likeliest (Nguyen et al., arXiv 2407.01082)."""
    check_sampling(min_p=p)
    return _likely_enough(logits, p)


def repetition_penalty(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Make tokens in ids (B,N) less likely; repeats count once (CTRL, arXiv 1909.05858)."""
    check_sampling(repetition_penalty=penalty)
    return penalized(logits, ids, penalty)


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    previous: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row: logits (B,V) of any float type → (B,) int64.

    `previous` (B,N) are the ids for the repetition penalty. Raises GenerationError for values out
    of range, for NaN or infinite logits, and if no token is left.
    """
    values: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    check_sampling(**values)
    return choose(logits, **values, previous=previous, generator=generator)


def probabilities(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    previous: Tensor | None = None,
) -> Tensor:
    """The distribution that `sample` draws from: logits (B,V) → (B,V) fp32, whose rows sum to 1.

    At temperature 0 the argmax has probability 1.
    """
    values: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    check_sampling(**values)
    return distribution(logits, **values, previous=previous)


# --- the same without checks, for every token: SamplingParams has checked its values ----------


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    previous: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """`sample`."""
    if temperature == 0:
        # The generator does not advance.
        return _likeliest(_prepared(logits, repetition_penalty, previous))[:, 0]
    chances = distribution(logits, temperature, top_k, top_p, min_p, repetition_penalty, previous)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]  # (B,)


def distribution(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    previous: Tensor | None = None,
) -> Tensor:
    """`probabilities`."""
    logits = _prepared(logits, repetition_penalty, previous)
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, _likeliest(logits), 1.0)
    _refuse_unusable(logits.amax(-1))
    probability = kept(logits, temperature, top_k, top_p, min_p).softmax(-1)
    if not math.isfinite(probability.sum()):
        raise GenerationError(
            f"temperature {temperature} is too small: the scaled logits leave fp32's range"
        )
    return probability


def kept(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """fp32 logits (B,V), divided by the temperature, −∞ for tokens that a filter removes."""
    logits = _scaled(logits, temperature)
    # On a GPU, sorting all V takes longer than the step, so only the few left by top-k are sorted.
    if not logits.is_cpu and 0 < top_k <= FEW and top_p < 1:
        logits = _nucleus_of_highest(logits, top_k, top_p)
        top_k = 0
        top_p = 1
    if top_k != 0:
        logits = _highest(logits, top_k)
    if top_p != 1:
        logits = _nucleus(logits, top_p)
    if min_p != 0:
        logits = _likely_enough(logits, min_p)
    return logits


def _prepared(logits: Tensor, penalty: float, previous: Tensor | None) -> Tensor:
    """fp32 like the reference, with the penalty: bf16 has 3 digits, too few for sums over V."""
    logits = logits.float()
    if penalty == 1 or previous is None or not previous.numel():
        return logits
    return penalized(logits, previous, penalty)


def _likeliest(logits: Tensor) -> Tensor:
    """(B,V) → (B,1): the first of equals."""
    if logits.is_cpu:  # NumPy's argmax takes a tenth of torch's time for one row of 151,936
        token = torch.from_numpy(logits.detach().numpy().argmax(-1, keepdims=True))
    else:
        token = logits.argmax(-1, keepdim=True)
    _refuse_unusable(logits.gather(-1, token))  # both argmaxes choose NaN over any number
    return token


def _scaled(logits: Tensor, t: float) -> Tensor:
    return logits / t


def _highest(logits: Tensor, k: int) -> Tensor:
    if k <= 0:
        return logits
    smallest = logits.topk(min(k, logits.shape[-1])).values[..., -1, None]  # (B,1)
    return logits.masked_fill(logits < smallest, -torch.inf)


def _nucleus(logits: Tensor, p: float) -> Tensor:
    if logits.is_cpu:  # on a GPU, counting the remaining logits would synchronise
        few = _nucleus_of_few(logits, p)
        if few is not None:
            return few
    ordered, index = logits.sort(descending=False)  # (B,V) ascending: the tail to drop comes first
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - p
    drop[..., -1] = False  # the likeliest always stays
    return logits.masked_fill(drop.scatter(1, index, drop), -torch.inf)


def _nucleus_of_few(logits: Tensor, p: float) -> Tensor | None:
    """`_nucleus` of one row in which top-k has left few logits; sorting all 151,936 takes 8 ms.

    None if the result could depend on the rounding of a sum over all V, or on the order of equals.
    """
    if logits.shape[0] != 1:
        return None
    index = (logits > -torch.inf).nonzero()[:, 1]  # (n,)
    if not 0 < len(index) <= FEW:
        return None
    ordered, order = logits[0, index].sort(descending=False)  # (n,) ascending
    below = ordered.softmax(-1).cumsum(-1) - (1 - p)
    dropped = min(int((below <= 0).sum()), len(index) - 1)
    if below.abs().min() < 1e-5 or (dropped and ordered[dropped - 1] == ordered[dropped]):
        return None
    return logits.index_fill(1, index[order[:dropped]], -torch.inf)


def _nucleus_of_highest(logits: Tensor, k: int, p: float) -> Tensor:
    """`_highest`, then `_nucleus`, sorting only k logits and without a GPU synchronisation.

    Unlike `_highest`, it keeps only k logits, even if others equal the k-th.
    """
    highest, index = logits.topk(min(k, logits.shape[-1]))  # (B,k) ×2, descending
    tail = highest.softmax(-1).flip(-1).cumsum(-1).flip(-1)  # (B,k): of each and all less likely
    drop = tail <= 1 - p
    drop[..., 0] = False  # the likeliest always stays
    left = torch.full_like(logits, -torch.inf)
    return left.scatter(-1, index, highest.masked_fill(drop, -torch.inf))


def _likely_enough(logits: Tensor, p: float) -> Tensor:
    probability = logits.softmax(-1)
    drop = probability < p * probability.amax(-1, keepdim=True)
    return logits.masked_fill(drop, -torch.inf)


def penalized(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """`repetition_penalty`."""
    seen = logits.gather(1, ids)  # (B,N)
    seen = torch.where(seen < 0, seen * penalty, seen / penalty)
    # A repeated token is written repeatedly, with the same value.
    return logits.scatter(1, ids, seen)


def logprob(logits: Tensor, token: Tensor) -> Tensor:
    """(B,) fp32 log-probability of token (B,) under the raw logits (B,V), before every setting."""
    # logsumexp takes eight times as long.
    return logits.float().log_softmax(-1).gather(-1, token[:, None])[:, 0]


def likeliest(logits: Tensor, k: int) -> list[tuple[tuple[int, float], ...]]:
    """For each row of the raw logits (B,V) the k likeliest (token, log-probability), best first."""
    rows = (x.tolist() for x in likeliest_rows(logits, k))
    return [tuple(zip(*row, strict=True)) for row in zip(*rows, strict=True)]


def likeliest_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`likeliest` as tensors: ids (B,k) int64 and their log-probabilities (B,k) fp32."""
    logits = logits.float()
    ids = logits.topk(min(k, logits.shape[-1])).indices  # (B,k)
    return ids, logits.log_softmax(-1).gather(-1, ids)


def _refuse_unusable(highest: Tensor) -> None:
    """GenerationError if one of the highest logits is NaN or infinite."""
    for value in filterfalse(math.isfinite, highest.flatten().tolist()):
        raise unusable(value)


def unusable(highest: float) -> GenerationError:
    """The error for logits whose highest value is NaN or infinite."""
    return GenerationError(
        f"the model's logits cannot be sampled: the highest is {highest}",
        "the weights or the cache hold NaN or infinity; fp32 (--dtype float32) rules out overflow",
    )
