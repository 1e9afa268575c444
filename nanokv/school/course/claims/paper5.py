"""Claims of paper 5, the abstract of TurboQuant."""

from nanokv.cache.codes import lloyd_max_error
from nanokv.school.course.claims.claim import Claim

CLAIMS = (
    Claim(
        "5.1",
        "right",
        "The squared error is at most about 2.7 times the lower bound 4^−b of b bits.",
        "2.43 times with 4 bits, and less with fewer.",
        "13",
        lambda: lloyd_max_error(4) * 4**4,
        unit="times the bound",
    ),
    Claim(
        "5.2",
        "right",
        "Levels of the least squared error bias inner products; a second stage removes the bias.",
        "Over many seeds no bias is left. The squared error grows: π/2 times that of one bit less.",
        "13",
    ),
    Claim(
        "5.3",
        "misleading",
        "Quality is neutral with 3.5 bits per channel.",
        "Not with every model: where keys have a large constant part, 4 bits without outlier "
        "channels raise the perplexity from 72 to 100 and more (docs/quantization.md).",
        "13",
    ),
)
