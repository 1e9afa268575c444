"""Claims of article 1, an overview from the idea to serving systems."""

from nanokv import costs
from nanokv.costs.memory import Estimate
from nanokv.school.course.claims.claim import Claim
from nanokv.school.course.claims.shapes import KIB, LLAMA_2_70B, LLAMA_2_70B_MHA, QWEN, shape

TABLE = {  # claim 1.20: (layers, KV heads, head size) → printed KiB per token
    (12, 12, 64): 24.00,
    (12, 3, 64): 6.00,
    (32, 4, 128): 16.00,
    (12, 1, 64): 2.00,
}


def kib_a_token(layers: int, kv_heads: int, head_dim: int) -> float:
    """KiB of cache per token, at 2 bytes per value."""
    return costs.kv_bytes_per_token(shape(layers, kv_heads, head_dim), 2) / KIB


def profiled_rate(prefill: float, step: float, tokens: int = 50) -> float:
    """Tokens per second in the article's profiler, which times a second prefill as decode."""
    return (tokens - 1) / (prefill + (tokens - 2) * step)


def latent_saving() -> float:
    """Percent that DeepSeek-V2's latent (576 values per layer) saves against 128 heads of 128."""
    full = costs.kv_bytes_per_token(shape(60, 128, 128), 2)
    return 100 * (1 - 60 * 576 * 2 / full)


CLAIMS = (
    Claim(
        "1.1",
        "misleading",
        "Without a cache, a context of 4,000 means 4,000 matrix operations for each token.",
        "It is one forward with 4,000 rows: 4,000 token-projections a layer, in one "
        "multiplication.",
        "05",
        lambda: 1,
        4000,
        "forward per token",
    ),
    Claim(
        "1.2",
        "right",
        "Only the new token's projections are needed, because old keys and values do not change.",
        "True because attention is causal; see 2.7.",
        "05",
    ),
    Claim(
        "1.3",
        "wrong",
        "The example attention layer with a cache is complete.",
        "It has no causal mask: right for one token at a time, wrong for a prompt at once.",
        "07",
    ),
    Claim(
        "1.4",
        "right",
        "Feeding one vector at a time grows the cache from 1 to 10 tokens.",
        "It does; the vectors are random, nothing is generated.",
        "06",
    ),
    Claim(
        "1.5",
        "right",
        "Prefill is parallel and bound by arithmetic; time to first token and rate are two "
        "problems.",
        "Measured in notebook 09.",
        "09",
    ),
    Claim(
        "1.6",
        "misleading",
        "Decoding is bound by reading the cached tensors.",
        "It is bound by reading, but for one sequence mostly of the weights: the cache of "
        "Qwen3-0.6B weighs as much only from 10,395 tokens on.",
        "08",
        lambda: (Estimate("", QWEN, "bfloat16", 1).crossover or 0) + 1,  # never None for QWEN
        None,
        "tokens",
    ),
    Claim(
        "1.7",
        "wrong",
        "The given profiler times prefill and decode apart.",
        "Its decode part prefills the prompt again. With 1 s of prefill and 20 ms per step it "
        "reports half the rate.",
        "09",
        lambda: profiled_rate(1.0, 0.020),
        50,
        "tokens per second reported",
        implied=True,
    ),
    Claim(
        "1.8",
        "right",
        "Bytes are 2 · layers · KV heads · head size · tokens · batch · bytes per value.",
        "The formula of costs.kv_bytes.",
        "08",
        lambda: costs.kv_bytes(QWEN, 8192, 32, 2),
        2 * 28 * 8 * 128 * 8192 * 32 * 2,
        "B",
        implied=True,
    ),
    Claim(
        "1.9",
        "wrong",
        "Llama-2-70B at 8K context and batch 32 has a cache of 8.6 GB.",
        "Ten times that: 85.9 GB (80 GiB).",
        "08",
        lambda: costs.kv_bytes(LLAMA_2_70B, 8192, 32, 2),
        8.6e9,
        "B",
    ),
    Claim(
        "1.10",
        "wrong",
        "Without grouped queries it would be 68.7 GB.",
        "687.2 GB (640 GiB). The ratio of 8 is right. The model's own context ends at 4,096.",
        "08",
        lambda: costs.kv_bytes(LLAMA_2_70B_MHA, 8192, 32, 2),
        68.7e9,
        "B",
    ),
    Claim(
        "1.11",
        "misleading",
        "Caching may cause errors in training.",
        "It is of no use there: the whole text is known, so nothing is computed twice.",
        "13",
    ),
    Claim(
        "1.12",
        "right",
        "Giving each request its own growing buffer fragments memory.",
        "Notebook 10 shows the slots.",
        "10",
    ),
    Claim(
        "1.13",
        "right",
        "PagedAttention keeps the cache in blocks of fixed size from a shared pool.",
        "As an operating system does with memory.",
        "10",
    ),
    Claim(
        "1.14",
        "wrong",
        "The sketch of a paged cache gives pages back to the pool.",
        "It has no free(); an empty pool raises IndexError, and a prompt must be appended row by "
        "row.",
        "10",
    ),
    Claim(
        "1.15",
        "misleading",
        "With pages, the slots that a request does not use stay in the pool.",
        "All but the tail of the last page: 100 tokens take 7 pages of 16, so 12 slots stay empty.",
        "10",
        lambda: costs.cache_slots("paged", QWEN, 100, page=16) - 100,
        0,
        "slots wasted",
        implied=True,
    ),
    Claim(
        "1.16",
        "misleading",
        "Shared prefixes cut prefill by 50 to 80 percent.",
        "They cut it by shared length over total length, whatever that is.",
        "11",
    ),
    Claim(
        "1.17",
        "misleading",
        "int8 halves the cache, int4 quarters it.",
        "Scales and zeros count too: in fp16 for each group of 64, int8 is 8.5 bits per value.",
        "13",
        lambda: 16 / (8 + 2 * 16 / 64),
        2,
        "times smaller",
        implied=True,
    ),
    Claim(
        "1.18",
        "right",
        "32 query heads on 8 KV heads store a quarter.",
        "Bytes follow the KV heads alone.",
        "08",
        lambda: (
            costs.kv_bytes_per_token(shape(32, 32, 128), 2)
            / costs.kv_bytes_per_token(shape(32, 8, 128), 2)
        ),
        4,
        "times smaller",
    ),
    Claim(
        "1.19",
        "wrong",
        "DeepSeek-V2 saves 93.3 percent against full multi-head attention.",
        "That figure compares 6-bit storage with another model that has grouped queries. Against "
        "its own full heads it is 98.2 percent.",
        "08",
        latent_saving,
        93.3,
        "%",
    ),
    Claim(
        "1.20",
        "wrong",
        "The printed table of KiB per token follows from its own code.",
        "It does not: 36, 9, 64 and 3 KiB, not 24, 6, 16 and 2.",
        "08",
        lambda: kib_a_token(12, 12, 64),
        24.0,
        "KiB per token in the first row",
    ),
    Claim(
        "1.21", "right", "Offloading and prefix caching are active areas.", "nanokv has both.", "11"
    ),
    Claim(
        "1.22",
        "wrong",
        "In speculative decoding the cache grows only when a guess is accepted.",
        "Checking writes keys and values of all guesses; the rejected ones are cut off again.",
        "11",
    ),
    Claim(
        "1.23",
        "right",
        "Out of memory, slow first tokens and falling rates often point at the cache.",
        "Each is produced on purpose in the notebooks.",
        "09",
    ),
    Claim(
        "1.24",
        "right",
        "The reference list is worth reading.",
        "It is the further reading here too.",
        "12",
    ),
)
