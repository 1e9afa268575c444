"""What prompts cost at a provider that charges reused tokens less, in dollars per million tokens."""

from dataclasses import dataclass

from nanokv.lab.replay.simulation import Result

# Claude Sonnet 5: input, cache read, cache write for 5 minutes. platform.claude.com/docs/en/
# about-claude/pricing, as it was in September 2026. Prices change: pass those of today.
INPUT = 2.00
CACHED = 0.20
WRITE = 2.50
DATED = "Claude Sonnet 5, September 2026"


@dataclass(frozen=True)
class Prices:
    """Dollars per million prompt tokens."""

    input: float = INPUT
    cached: float = CACHED
    write: float = WRITE  # of a token that was not in the cache and is put into it

    def with_cache(self, result: Result) -> float:
        """Dollars if every prompt is read from the cache as far as possible, and written to it."""
        missed = result.tokens - result.hit_tokens
        return (result.hit_tokens * self.cached + missed * self.write) / 1e6

    def without(self, result: Result) -> float:
        """Dollars if nothing is cached."""
        return result.tokens * self.input / 1e6
