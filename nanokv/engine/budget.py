"""How many prompt tokens may share a step with decodes, measured while the engine runs.

A stream waits for its next token as long as the whole step takes, so a long prompt beside it is fed
in chunks. Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310) calls this stall-free batching: its
token budget per step follows from a bound on the time between tokens and is profiled once for each
model and device. vLLM does the same with a fixed number, `max_num_batched_tokens`. Here the bound
is relative, and the two times behind it are running means:

    d = seconds of a step that only decodes
    c = seconds per prompt token by which a step takes longer
    budget = 1.5·d / c, at least half a page, at most step_tokens, rounded down to a power of two

so a step with prompts takes about 2.5·d.
"""

LONGER = 1.5
NEWEST = 0.25  # weight of the newest step in a mean
FIRST_PAGES = 2  # per step, until c is known
IN_A_ROW = 16  # steps with prompts; after them one step only decodes, because d changes


class StepBudget:
    """`prompt_tokens`: the most prompt tokens of the next step, if it also decodes.

    0 while d is not known, and after IN_A_ROW steps with prompts: that step measures d.
    """

    def __init__(self, page_size: int, step_tokens: int):
        self.page_size = page_size
        self.step_tokens = step_tokens
        self.decode_s: float | None = None  # d
        # c is the first sum over the second: a chunk of few tokens has little weight.
        self.longer_s = 0.0
        self.tokens = 0.0
        self.in_a_row = 0

    def note(self, seconds: float, prompt_tokens: int, decodes: int) -> None:
        """Learn from a step. One without decodes says nothing: no stream has waited for it."""
        if not decodes:
            return
        if not prompt_tokens:
            self.in_a_row = 0
            before = seconds if self.decode_s is None else self.decode_s
            self.decode_s = before + NEWEST * (seconds - before)
        elif self.decode_s is not None:
            self.in_a_row += 1
            longer = max(0.0, seconds - self.decode_s)
            self.longer_s += longer - NEWEST * self.longer_s
            self.tokens += prompt_tokens - NEWEST * self.tokens

    @property
    def prompt_tokens(self) -> int:
        """The budget: 0, or a power of two."""
        if self.decode_s is None or self.in_a_row >= IN_A_ROW:
            return 0
        return power_of_two(
            min(self.step_tokens, max((self.page_size + 1) // 2, self._affordable(self.decode_s)))
        )

    def _affordable(self, decode_s: float) -> int:
        """1.5·d / c."""
        if not self.tokens:
            return FIRST_PAGES * self.page_size
        if not self.longer_s:
            return self.step_tokens
        return int(min(self.step_tokens, LONGER * decode_s * self.tokens / self.longer_s))


def power_of_two(number: int) -> int:
    """The largest power of two ≤ number: few different lengths, so caches of kernels stay small."""
    return 1 << number.bit_length() - 1
