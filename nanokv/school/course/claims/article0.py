"""Claims of article 0, on DynamicCache and Qwen3-0.6B."""

from nanokv import costs
from nanokv.school.course.claims.claim import Claim
from nanokv.school.course.claims.shapes import QWEN
from nanokv.school.course.work import copied_by_cat


def _slots_after(prompt: int, decodes: int) -> int:
    """The length of a real cache that grew by torch.cat: a prompt, then single tokens."""
    import torch

    from nanokv.cache import make_cache

    layer = make_cache("dict", QWEN)[0]
    for tokens in [prompt] + [1] * decodes:
        layer.append(*torch.zeros(2, 1, QWEN.num_key_value_heads, tokens, QWEN.head_dim))
    return layer.length


CLAIMS = (
    Claim(
        "0.1",
        "right",
        "Keys and values of past tokens are stored once, in one object that all layers share.",
        "One object goes through every forward; each layer uses its own part of it.",
        "06",
    ),
    Claim(
        "0.2",
        "wrong",
        "cache[layer] gives a layer's part of DynamicCache.",
        "In transformers 5.23 that raises TypeError; it is cache.layers[layer].",
        "04",
    ),
    Claim(
        "0.3",
        "right",
        "The cache is made on the first forward, and its tensors when the first keys arrive.",
        "An empty cache holds no tensor; the first append decides shape, dtype and device.",
        "06",
    ),
    Claim(
        "0.4",
        "wrong",
        "Keys of Qwen3-0.6B have shape [batch, 8, S, 64].",
        "The head size is a separate number in the config, 128, not hidden size over heads, "
        "1024/16.",
        "08",
        lambda: QWEN.head_dim,
        64,
        "values per head",
    ),
    Claim(
        "0.5",
        "wrong",
        "A token takes 57,344 bytes of cache in bf16.",
        "2 · 28 layers · 8 heads · 128 · 2 bytes: twice that, 112 KiB.",
        "08",
        lambda: costs.kv_bytes_per_token(QWEN, 2),
        57_344,
        "B",
    ),
    Claim(
        "0.6",
        "misleading",
        "Positions go on from the number of cached tokens; their shape is [batch, seq].",
        "The count is right. They are made as [1, seq] for all rows, so left-padded rows need "
        "their own.",
        "06",
    ),
    Claim(
        "0.7",
        "right",
        "cos and sin are computed once per forward and shared by all layers.",
        "They depend on positions only. For Qwen3 their scale is 1.",
        "03",
    ),
    Claim(
        "0.8",
        "wrong",
        "RoPE rotates dimension 2i together with 2i+1.",
        "It pairs i with i + D/2. The angles are right; the base of Qwen3 is 1,000,000.",
        "03",
        lambda: QWEN.head_dim // 2,
        1,
        "= partner of dimension 0",
        implied=True,
    ),
    Claim(
        "0.9",
        "misleading",
        "The causal mask is added: 0 where allowed, −∞ where forbidden.",
        "Depends on the kernel: none at all for a first prefill, bool for a later chunk, the "
        "smallest finite number instead of −∞ in the plain version.",
        "12",
    ),
    Claim(
        "0.10",
        "right",
        "The mask is as wide as everything cached, not only the new tokens.",
        "T rows, S columns, aligned at the bottom right.",
        "11",
    ),
    Claim(
        "0.11",
        "misleading",
        "Queries and keys are layer-normalised.",
        "RMSNorm subtracts no mean and has no bias. It acts on each head, before RoPE; values are "
        "neither normed nor rotated.",
        "03",
    ),
    Claim(
        "0.12",
        "right",
        "A layer projects and norms, rotates, updates the cache, attends: in this order.",
        "So keys are cached after they are rotated, and before the KV heads are repeated for the "
        "query heads.",
        "03",
    ),
    Claim(
        "0.13",
        "right",
        "update() concatenates along the token axis and returns old and new together.",
        "torch.cat on the last axis but one.",
        "06",
    ),
    Claim(
        "0.14",
        "misleading",
        "The model returns logits for every position: [batch, seq, 151936].",
        "It can, but generating needs the last row only: at 4,096 tokens all rows take 1.2 GB in "
        "bf16.",
        "04",
        lambda: 4096 * QWEN.vocab_size * 2,
        None,
        "B",
    ),
    Claim(
        "0.15",
        "wrong",
        "At 4,096 tokens torch.cat copies about 225 MB per step.",
        "With the true head size 469.8 MB (448 MiB) are copied, so twice that is read and written.",
        "10",
        lambda: costs.kv_bytes(QWEN, 4096, 1, 2),
        225e6,
        "B",
    ),
    Claim(
        "0.16",
        "misleading",
        "Those bytes are allocated, copied and freed on every step.",
        "One tensor at a time, 8 MiB each. The problem is the sum: growing to 4,096 tokens copies "
        "962 GB.",
        "10",
        lambda: costs.kv_bytes_per_token(QWEN, 2) * copied_by_cat(4096),
        None,
        "B",
    ),
    Claim(
        "0.17",
        "misleading",
        "A growing shape cannot be compiled.",
        "Dynamic shapes do compile; it is CUDA graphs that need fixed shapes and addresses.",
        "10",
    ),
    Claim(
        "0.18",
        "wrong",
        "After a prompt of 4, step N allocates N+1 slots and copies N.",
        "It allocates N+4 and copies N+3.",
        "10",
        lambda: _slots_after(4, 10),
        11,
        "slots at step 10",
        implied=True,
    ),
    Claim(
        "0.19",
        "right",
        "A static cache is one slab per layer, written in place, with a capacity chosen "
        "beforehand.",
        "And it has a price: attention runs over the whole slab with a mask.",
        "10",
    ),
)
