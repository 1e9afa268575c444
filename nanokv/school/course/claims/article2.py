"""Claims of article 2, a cache added to a small vision-language model."""

from nanokv import costs
from nanokv.school.course.claims.claim import Claim
from nanokv.school.course.claims.shapes import SMOLLM2_135M, SMOLLM2_135M_MHA

CLAIMS = (
    Claim(
        "2.1",
        "misleading",
        "The cache made generation 38 percent faster.",
        "Of what? 38 percent less time is 1.61 times the rate; 38 percent more rate is 1.38 times. "
        "Say which, for which prompt, length and machine.",
        "09",
        lambda: 1 / (1 - 0.38),
        1.38,
        "times the rate",
        implied=True,
    ),
    Claim(
        "2.2",
        "misleading",
        "Each token costs a forward pass that is quadratic in the length.",
        "Attention scores are; projections and MLP, most of the work in a short text, are linear.",
        "05",
    ),
    Claim(
        "2.3",
        "wrong",
        "Attention multiplies the scores by a 0/1 mask before softmax.",
        "A score of 0 is not forbidden. The mask adds −∞, or selects.",
        "02",
    ),
    Claim(
        "2.4",
        "wrong",
        "The minimal PyTorch version is the formula.",
        "It leaves out the division by the square root of the head size.",
        "02",
    ),
    Claim(
        "2.5",
        "right",
        "Keys and values of old tokens stay equal when a token is added.",
        "So do the queries; they are not kept because they are not needed again.",
        "05",
    ),
    Claim(
        "2.6", "right", "Computing them again is redundant work.", "Notebook 05 counts it.", "05"
    ),
    Claim(
        "2.7",
        "misleading",
        "Comparing projections of the embeddings confirms it.",
        "The first layer would pass that test even without a causal mask. Above it only causality "
        "keeps old keys as they are.",
        "05",
    ),
    Claim(
        "2.8",
        "misleading",
        "Cached tensors have shape (batch, heads, tokens, head size).",
        "KV heads, not query heads: its own model has 3 of 9.",
        "06",
        lambda: costs.kv_bytes_per_token(SMOLLM2_135M, 2),
        costs.kv_bytes_per_token(SMOLLM2_135M_MHA, 2),
        "B per token",
        implied=True,
    ),
    Claim(
        "2.9",
        "wrong",
        "In the picture of 5×5 growing to 6×6, the new row and column are recomputed in vain.",
        "They are the new part. What is computed again in vain is the old 5×5.",
        "05",
    ),
    Claim(
        "2.10",
        "right",
        "The attention block rotates, concatenates on the token axis and returns the cache.",
        "It keeps rotated keys.",
        "06",
    ),
    Claim(
        "2.11",
        "wrong",
        "The language model can be called with kv_cache=None.",
        "Its loop then indexes None. The list needs one entry per layer first.",
        "06",
    ),
    Claim(
        "2.12",
        "right",
        "start_pos keeps the rotation in step with the cache.",
        "A wrong one moves the logits. Shifting all positions alike does not: RoPE is relative.",
        "06",
    ),
    Claim(
        "2.13",
        "misleading",
        "The generation loop prefills and then decodes N times.",
        "N tokens need N−1 decodes; the position has to advance, and the loop has to stop at an "
        "end token.",
        "06",
    ),
    Claim(
        "2.14",
        "right",
        "A step with a cache costs attention over the length, no longer its square.",
        "A step, yes. The sum over a whole generation is still quadratic (3.14).",
        "09",
    ),
    Claim(
        "2.15",
        "misleading",
        "A cache restricts beam search.",
        "Beams work: rows of the cache are forked and reordered.",
        "11",
    ),
)
