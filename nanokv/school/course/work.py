"""How much a generation computes, counted step by step: references for exercises and claims.

P tokens of prompt, N tokens generated. The last token is never fed, so both ways take N forwards.
"""


def rows_without_cache(P: int, N: int) -> int:
    """Token-forwards when every step feeds the whole text so far: P, P+1, … P+N−1."""
    return sum(P + step for step in range(N))


def rows_with_cache(P: int, N: int) -> int:
    """Token-forwards with a cache: the prompt once, then one token in each of the N − 1 decodes."""
    return P + sum(1 for _ in range(N - 1))


def scores_without_cache(P: int, N: int) -> int:
    """Entries of q·kᵀ of one head in one layer, as full squares.

    A kernel that skips the masked half computes half as many.
    """
    return sum((P + step) ** 2 for step in range(N))


def scores_with_cache(P: int, N: int) -> int:
    """The same with a cache: one square for the prompt, then one row per step."""
    return P**2 + sum(P + step for step in range(1, N))


def copied_by_cat(tokens: int) -> int:
    """Rows copied while torch.cat grows a cache from 1 to `tokens` tokens, one at a time.

    Every append copies all rows that are in the cache already.
    """
    return sum(range(1, tokens))


def prefilled_after_prefix(shared: int, own: int, page: int) -> int:
    """Tokens that a prompt of shared + own tokens feeds, if the full pages of `shared` are cached.

    At least one token is fed: its logits are needed.
    """
    kept = sum(page for end in range(page, shared + 1, page) if end < shared + own)
    return shared + own - kept
