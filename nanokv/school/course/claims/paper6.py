"""Claims of paper 6, the abstract of KIVI."""

from nanokv.school.course.claims.claim import Claim

CLAIMS = (
    Claim(
        "6.1",
        "right",
        "Keys are to be quantized per channel and values per token.",
        "For keys it was best on both models measured; values are easy in every way.",
        "13",
    ),
    Claim(
        "6.2",
        "misleading",
        "With 2 bits quality is almost the same.",
        "In the mean. A model of 135 million parameters goes from perplexity 52 to 65 "
        "(docs/real-models.md), and single tokens move most.",
        "13",
    ),
)
