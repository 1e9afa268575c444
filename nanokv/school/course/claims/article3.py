"""Claims of article 3, an introduction with figures and questions."""

from nanokv import costs
from nanokv.school.course.claims.claim import Claim
from nanokv.school.course.claims.shapes import EXAMPLE_OF_ARTICLE_3, QWEN
from nanokv.school.course.work import rows_without_cache, scores_without_cache

CLAIMS = (
    Claim("3.1", "misleading", "Attention weights are scaled by the square root of the key size.",
          "Divided by it; the rest of the definition is right.", "02"),
    Claim("3.2", "right", "Queries seek, keys inform, values carry: a library with spines and books.",
          "A fair picture of one head.", "02"),
    Claim("3.3", "misleading", "A cache applies only when an autoregressive model is used, not trained.",
          "Too strict: encoder-decoder models cache what they attend to across, and reinforcement learning generates "
          "during training.", "11"),
    Claim("3.4", "right", "Eight steps feed the first token 8 times, the second 7 times, and so on.",
          "36 token-forwards in all, against 8 with a cache.", "05", lambda: rows_without_cache(1, 8), 36,
          "token-forwards", implied=True),
    Claim("3.5", "right", "The input of a layer is the embeddings or the output of the layer below.",
          "That is why keys of upper layers depend on what lower layers could see.", "05"),
    Claim("3.6", "right", "Attention at step 10 needs 1 query, 10 keys and 10 values: 21 vectors per head; then 23.",
          "2 · length + 1.", "05", lambda: 1 + 2 * 10, 21, "vectors at step 10",
          implied=True),
    Claim("3.7", "misleading", "Without a cache masked scores are computed, with one never.",
          "Kernels can skip the masked half without a cache; and a prefill has a mask with one.", "05"),
    Claim("3.8", "right", "Only the last row of the scores is needed for the next token.",
          "The other rows of that step are equal to what the last step had.", "05"),
    Claim("3.9", "right", "In the last layer old tokens need keys and values only, even without a cache.",
          "No query, no MLP, no logits.", "05"),
    Claim("3.10", "right", "With a cache one hidden state enters and leaves a layer.",
          "One for each new token; old tokens are present as keys and values only.", "06"),
    Claim("3.11", "right", "The price of a cache is memory.", "Bytes in notebook 08.", "08"),
    Claim("3.12", "right", "24 layers, 32 heads of 128, fp16, 4,096 tokens: 1.5 GiB.",
          "1,610,612,736 bytes; with 8 KV heads a quarter.", "08",
          lambda: costs.kv_bytes(EXAMPLE_OF_ARTICLE_3, 4096, 1, 2), 12_884_901_888 / 8, "B", implied=True),
    Claim("3.13", "misleading", "Contexts of a million tokens make the cache the bottleneck.",
          "It happens far earlier: at 40,960 tokens the cache of Qwen3-0.6B is 3.9 times its weights.", "08",
          lambda: costs.kv_bytes(QWEN, 40_960, 1, 2) / costs.weight_bytes(QWEN, 2), None, "times the weights"),
    Claim("3.14", "misleading", "A cache makes attention linear instead of quadratic.",
          "A step, yes. A whole generation is quadratic with a cache and cubic without: doubling N multiplies the "
          "scores by about 8.", "09",
          lambda: round(scores_without_cache(1, 4000) / scores_without_cache(1, 2000), 2), 4,
          "times the scores for twice the tokens, without a cache", implied=True),
    Claim("3.15", "misleading", "The OPT code shows the interface of transformers.",
          "The three phases are right; the argument cache_position is gone in 5.23.", "04"),
    Claim("3.16", "misleading", "In BERT the keys and values of a token change with every new token.",
          "In every layer but the first, where they depend on the token alone. The cause is the missing mask.", "05"),
    Claim("3.17", "right", "Training needs no cache.", "All positions are computed at once.", "12"),
    Claim("3.18", "right", "Queries are not cached because past queries are never used again.",
          "They would only cost memory.", "06"),
    Claim("3.19", "misleading", "A cache holds no attention weights, and the upper triangle is never computed.",
          "It holds none. In a prefill the kernel computes that triangle or skips it.", "12"),
    Claim("3.20", "right", "Memory grows with length and depth.",
          "Also with batch, KV heads, head size and bytes per value.", "08",
          lambda: costs.kv_bytes(QWEN, 2000, 1, 2) / costs.kv_bytes(QWEN, 1000, 1, 2), 2,
          "times for twice the text", implied=True),
)
