"""How much a generation computes, counted step by step: the references behind exercises and claims.

P tokens of prompt, N tokens generated. The last token is never fed, so there are N forwards either way.
"""


def rows_without_cache(P: int, N: int) -> int:
    """Token-forwards when every step feeds the whole text so far: P, P+1, … P+N−1."""
    return sum(P + step for step in range(N))


def rows_with_cache(P: int, N: int) -> int:
    """Token-forwards with a cache: the prompt once, then one token for each of the N − 1 decodes."""
    return P + sum(1 for _ in range(N - 1))


def scores_without_cache(P: int, N: int) -> int:
    """Entries of q·kᵀ of one head in one layer, full squares (a kernel that skips the masked half does half of it)."""
    return sum((P + step) ** 2 for step in range(N))


def scores_with_cache(P: int, N: int) -> int:
    """The same with a cache: one square for the prompt, then one row per step."""
    return P**2 + sum(P + step for step in range(1, N))


def copied_by_cat(tokens: int) -> int:
    """Rows copied while a cache grows by torch.cat from 1 to `tokens`, one token at a time: every append copies all
    that is there."""
    return sum(range(1, tokens))


def prefilled_after_prefix(shared: int, own: int, page: int) -> int:
    """Tokens that a prompt feeds when `shared` of them were computed before and full pages of those are kept."""
    kept = sum(page for end in range(page, shared + 1, page) if end < shared + own)
    return shared + own - kept
