"""Claims of article 4, a short course note."""

from nanokv.school.course.claims.claim import Claim
from nanokv.school.course.work import rows_with_cache, rows_without_cache

CLAIMS = (
    Claim("4.1", "right", "Plain decoding rebuilds queries, keys and values in every layer and head.",
          "A cache changes the work, not what a token may see.", "05"),
    Claim("4.2", "misleading", "With a cache a step costs one constant unit.",
          "Its projections do. Attention still reads a key and a value for every past token.", "05"),
    Claim("4.3", "right", "A step makes fresh q, k and v, appends k and v, attends and mixes.",
          "In this order: the new token sees itself.", "06"),
    Claim("4.4", "misleading", "The head axis of the cache has H entries.",
          "Hk, the KV heads, which is H only without grouped queries.", "06"),
    Claim("4.5", "misleading", "cache_k has t_so_far rows and scores t_so_far + 1.",
          "Before and after the append are mixed: after it both have t + 1.", "06"),
    Claim("4.6", "right", "For one new token the mask is trivial, and wrong positions misbehave in right shapes.",
          "Chunks and padded batches do need a mask.", "06"),
    Claim("4.7", "misleading", "A class with k and v that grow on axis 2 is the cache.",
          "One of them; the model needs one for each layer.", "06"),
    Claim("4.8", "wrong", "Appending on another axis scrambles the layout.",
          "Two of the wrong axes crash. Axis 0 runs without an error and gives wrong scores.", "07"),
    Claim("4.9", "right", "Four steps cost 1+2+3+4 units without a cache and 4 with one: 60 percent less.",
          "True for the projections of this toy.", "05",
          lambda: 100 * (1 - rows_with_cache(1, 4) / rows_without_cache(1, 4)), 60, "%"),
    Claim("4.10", "right", "Four usual bugs: not cleared, wrong axis, wrong positions, caching queries.",
          "The last one costs memory but gives right answers.", "07"),
    Claim("4.11", "right", "generate(), vLLM, TensorRT-LLM, llama.cpp and MLX all do this.",
          "With different storage.", "12"),
    Claim("4.12", "right", "A cache helps decoding and not training; it holds keys and values, no logits.",
          "The form of its questions, with the common wrong answer, is that of the quizzes here.", "06"),
    Claim("4.13", "right", "Exercise: shapes at step 5 for batch 2, 4 heads of 16.",
          "q [2,4,1,16], keys [2,4,5,16], scores [2,4,1,5].", "06", lambda: 2 * 4 * 1 * 5, 40, "scores", implied=True),
    Claim("4.14", "right", "A cache saves work and takes memory from the first token on.", "The next notebook.", "06"),
)
