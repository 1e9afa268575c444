"""What the bundled model knows by heart: questions about KV caches, each in several phrasings, and one answer.

The answers are short and true for Qwen3-style models. The last phrasing of each question is never trained on: the
evaluation asks it to see whether the model understood the question or only learnt the string.
"""

from nanokv.school.training.phrases import phrases

_TEXTS = phrases("cache_questions")
QUESTIONS = tuple((question["answer"], question["asked"]) for question in _TEXTS["question"])
# Do, not Does.
PLURAL = ("more ", "fewer ", "many ", "twice ", "half ", "larger heads", "smaller heads")
WRAPPERS, LATER_WRAPPERS, HELD_OUT_WRAPPERS = map(tuple, _TEXTS["wrappers"].values())


def depending() -> dict[str, list[str]]:
    """Answer → ways to ask it: on what the size of the cache depends, and whether more or less of that changes it."""
    depends = phrases("nearby")["depends"]
    return {
        thing["answer"]: [
            way.format(**{letter: value, "do": "Do" if value.startswith(PLURAL) else "Does"})
            for letter, ways in (
                ("x", depends["on"]),
                ("m", depends["more"]),
                ("l", depends["less"]),
            )
            for value in thing[letter]
            for way in ways
        ]
        for thing in depends["thing"]
    }


def yes_or_no() -> tuple[tuple[str, list[str]], ...]:
    """Questions of the second stage: the written ways, and before the last one those of `depending`."""
    written = {question["answer"]: question["asked"] for question in phrases("nearby")["question"]}
    taken = {way.lower() for _, ways in (*QUESTIONS, *written.items()) for way in ways}
    for answer, ways in depending().items():
        new = [way for way in dict.fromkeys(ways) if way.lower() not in taken]
        old = written.get(answer, [])
        written[answer] = [*old[:-1], *new, *old[-1:]]
    return tuple(written.items())


YES_OR_NO = yes_or_no()


def ask(rng, phrasing: str, wrappers=WRAPPERS) -> str:
    """A phrasing as somebody would type it."""
    # RoPE, KV, GQA.
    keep = sum(letter.isupper() for letter in phrasing.split()[0]) > 1 or phrasing.split()[0] == "K"
    lowered = phrasing if keep else phrasing[0].lower() + phrasing[1:]
    if phrasing.endswith(".") and rng.random() < 0.5:
        lowered = lowered[:-1]
    return rng.choice(wrappers).format(q=phrasing, l=lowered)
