"""What the bundled model knows by heart: questions about KV caches, each in several phrasings, and one answer.

The answers are short and true for Qwen3-style models. The last phrasing of each question is never trained on: the
evaluation asks it to see whether the model understood the question or only learnt the string.
"""

from nanokv.training.phrases import phrases

_TEXTS = phrases("cache_questions")
QUESTIONS = tuple((question["answer"], question["asked"]) for question in _TEXTS["question"])
YES_OR_NO = tuple((question["answer"], question["asked"]) for question in phrases("nearby")["question"])
WRAPPERS, LATER_WRAPPERS, HELD_OUT_WRAPPERS = map(tuple, _TEXTS["wrappers"].values())


def ask(rng, phrasing: str, wrappers=WRAPPERS) -> str:
    """A phrasing as somebody would type it."""
    keep = sum(letter.isupper() for letter in phrasing.split()[0]) > 1 or phrasing.split()[0] == "K"  # RoPE, KV, GQA
    lowered = phrasing if keep else phrasing[0].lower() + phrasing[1:]
    if phrasing.endswith(".") and rng.random() < 0.5:
        lowered = lowered[:-1]
    return rng.choice(wrappers).format(q=phrasing, l=lowered)
