"""Lists of token ids. No torch, no tokenizer."""


def common_prefix(cached, new):
    """Number of leading ids that both lists share. O(n) integer compares, no model work."""
    for n, (a, b) in enumerate(zip(cached, new, strict=False)):
        if a != b:
            return n
    return min(len(cached), len(new))
