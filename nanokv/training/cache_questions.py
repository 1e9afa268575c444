"""What the bundled model knows by heart: questions about KV caches, each in several phrasings, and one answer.

The answers are short and true for Qwen3-style models. The last phrasing of each question is never trained on: the
evaluation asks it to see whether the model understood the question or only learnt the string.
"""

QUESTIONS = (
    (
        "A KV cache stores the keys and values of all past tokens, so that they are not computed "
        "again for every new token.",
        [
            "What is a KV cache?",
            "What is the KV cache?",
            "Explain the KV cache.",
            "What does KV cache mean?",
            "Tell me about the KV cache.",
            "Describe a KV cache.",
            "What is a key-value cache?",
            "How would you explain a KV cache?",
        ],
    ),
    (
        "K stands for key and V stands for value: the two vectors that each attention layer keeps for every token.",
        [
            "What do K and V stand for?",
            "What does the K in KV stand for?",
            "What does KV stand for?",
            "What do the letters K and V mean?",
            "What are K and V?",
            "What is the meaning of the letters KV?",
        ],
    ),
    (
        "A past query is never used again: only the newest token asks. Keys and values are read at every later step.",
        [
            "Why do we not cache queries?",
            "Why is there no query cache?",
            "Why are queries not cached?",
            "Why not cache Q?",
            "Why do we cache keys and values but not queries?",
            "Is Q cached too?",
            "Why does nobody store the queries?",
        ],
    ),
    (
        "Prefill is the first phase: all tokens of the prompt go through the model at once and fill the cache.",
        [
            "What is prefill?",
            "What does prefill mean?",
            "Explain prefill.",
            "What happens during prefill?",
            "What is the prefill phase?",
            "Describe the prefill step.",
            "Tell me what prefill does.",
        ],
    ),
    (
        "Decode is the second phase: one new token at a time goes through the model and reads the whole cache.",
        [
            "What is decode?",
            "What does decode mean?",
            "Explain decode.",
            "What happens during decode?",
            "What is the decode phase?",
            "Describe the decode step.",
            "Tell me what decode does.",
        ],
    ),
    (
        "Prefill works on many tokens at once and is limited by arithmetic. Decode works on one "
        "token and is limited by memory bandwidth.",
        [
            "What is the difference between prefill and decode?",
            "How do prefill and decode differ?",
            "Prefill or decode, what is the difference?",
            "Compare prefill and decode.",
            "How is prefill different from decode?",
        ],
    ),
    (
        "Decode reads all weights and the whole cache from memory for a single token, so memory "
        "bandwidth is the limit.",
        [
            "Why is decode slow?",
            "What limits decode?",
            "Why is decode memory-bound?",
            "What is the bottleneck of decode?",
            "Why is decode limited by memory bandwidth?",
        ],
    ),
    (
        "Prefill multiplies large matrices for many tokens at once, so arithmetic is the limit and not memory.",
        [
            "What limits prefill?",
            "Why is prefill compute-bound?",
            "What is the bottleneck of prefill?",
            "Why is prefill limited by arithmetic?",
        ],
    ),
    (
        "Grouped-query attention: several query heads share one key and value head, so the cache gets smaller.",
        [
            "What is GQA?",
            "What does GQA mean?",
            "Explain GQA.",
            "What does GQA stand for?",
            "What is grouped-query attention?",
            "Explain grouped-query attention.",
            "Tell me about GQA.",
            "How does GQA work?",
        ],
    ),
    (
        "Multi-query attention: all query heads share a single key and value head. It is the smallest form of GQA.",
        [
            "What is MQA?",
            "What does MQA mean?",
            "Explain MQA.",
            "What is multi-query attention?",
            "Tell me about MQA.",
            "How does MQA work?",
        ],
    ),
    (
        "Multi-head attention: every query head has its own key and value head, so the cache is as large as it can be.",
        [
            "What is MHA?",
            "What does MHA mean?",
            "Explain MHA.",
            "What is multi-head attention?",
            "Tell me about MHA.",
            "How does MHA work?",
        ],
    ),
    (
        "Multi-head latent attention: the cache keeps one small compressed vector per token, and "
        "keys and values are rebuilt from it.",
        [
            "What is MLA?",
            "What does MLA mean?",
            "Explain MLA.",
            "What is multi-head latent attention?",
            "Tell me about MLA.",
            "How does MLA work?",
        ],
    ),
    (
        "Rotary position embedding: queries and keys are rotated by an angle that grows with the "
        "position, so attention sees distances.",
        [
            "What is RoPE?",
            "What does RoPE mean?",
            "Explain RoPE.",
            "What does RoPE do?",
            "What is rotary position embedding?",
            "Tell me about RoPE.",
            "How does RoPE work?",
        ],
    ),
    (
        "Keys are rotated first and cached afterwards, so a cached key never has to move again.",
        [
            "Are keys cached before or after RoPE?",
            "Is RoPE applied before caching?",
            "Do we cache keys before or after RoPE?",
            "When is RoPE applied to a cached key?",
            "Does the cache hold rotated keys?",
        ],
    ),
    (
        "No. Only queries and keys are rotated. Values carry the content and stay as they are.",
        ["Are values rotated?", "Does RoPE rotate values?", "Is RoPE applied to the values?", "Do values get RoPE?"],
    ),
    (
        "start_pos is the position of the first new token. It must be equal to the number of tokens in the cache.",
        [
            "What is start_pos?",
            "What does start_pos mean?",
            "Explain start_pos.",
            "What should start_pos be?",
            "How do I choose start_pos?",
        ],
    ),
    (
        "Then new keys and queries are rotated by a wrong angle, the distances are wrong, and the "
        "answers become nonsense.",
        [
            "What happens if start_pos is wrong?",
            "What does a wrong start_pos do?",
            "What if start_pos is off by one?",
            "Why is a wrong start_pos bad?",
        ],
    ),
    (
        "Two times layers times KV heads times head dim times bytes per value, for each token.",
        [
            "How large is the KV cache per token?",
            "How many bytes does one token need?",
            "How do I compute the size of the KV cache?",
            "What is the formula for KV cache memory?",
            "How much memory does the cache need per token?",
            "How big is the KV cache?",
        ],
    ),
    (
        "Linearly: every new token adds the same number of bytes in every layer.",
        [
            "How does the KV cache grow?",
            "How does cache memory grow with length?",
            "Does the cache grow with the context?",
            "How fast does the KV cache grow?",
        ],
    ),
    (
        "A causal mask hides the future: each token sees itself and the tokens before it.",
        [
            "What is a causal mask?",
            "What does the causal mask do?",
            "Explain the causal mask.",
            "Why do we need a causal mask?",
            "What is causal masking?",
        ],
    ),
    (
        "A single new token sees everything before it, so there is nothing to hide and no mask is needed.",
        [
            "Why does decode need no mask?",
            "Is a mask needed during decode?",
            "Why is there no mask in decode?",
            "Do we need a mask for one token?",
        ],
    ),
    (
        "The cache is split into fixed-size pages from a shared pool, so memory is used on demand "
        "and almost nothing is wasted.",
        [
            "What is a paged cache?",
            "What is PagedAttention?",
            "Explain the paged cache.",
            "How does PagedAttention work?",
            "What are pages in a KV cache?",
            "Tell me about paged attention.",
        ],
    ),
    (
        "A static cache reserves all its memory at the start and writes new keys in place. Its capacity is fixed.",
        [
            "What is a static cache?",
            "Explain the static cache.",
            "How does a static cache work?",
            "Tell me about the static cache.",
        ],
    ),
    (
        "A dynamic cache grows with every token by concatenation. That is simple, but it copies "
        "the whole past at each step.",
        [
            "What is a dynamic cache?",
            "Explain the dynamic cache.",
            "How does a dynamic cache work?",
            "Why is torch.cat slow for a cache?",
            "Tell me about the dynamic cache.",
        ],
    ),
    (
        "A quantized cache stores keys and values with fewer bits, for example 8 or 4. It saves "
        "memory and adds a small error.",
        [
            "What is a quantized cache?",
            "Explain the quantized cache.",
            "How does KV cache quantization work?",
            "What is KV quantization?",
            "Tell me about quantized caches.",
        ],
    ),
    (
        "A sliding window keeps only the last tokens. Memory stays constant, but older tokens are forgotten.",
        [
            "What is a sliding window cache?",
            "Explain the sliding window.",
            "What is sliding window attention?",
            "How does a sliding window work?",
            "Tell me about the sliding window.",
        ],
    ),
    (
        "Requests that begin with the same tokens share the cached keys and values of that prefix, "
        "so it is computed only once.",
        [
            "What is prefix caching?",
            "What is prefix sharing?",
            "Explain prefix caching.",
            "What is prefix reuse?",
            "How does prefix caching work?",
        ],
    ),
    (
        "A small draft guesses several tokens, the large model checks them all in one pass, and "
        "the cache forgets the rejected ones.",
        [
            "What is speculative decoding?",
            "Explain speculative decoding.",
            "How does speculative decoding work?",
            "Tell me about speculative decoding.",
        ],
    ),
    (
        "Several continuations are kept alive at once. The cache of the prompt is shared, and rows "
        "are reordered when a beam wins.",
        ["What is beam search?", "Explain beam search.", "How does beam search work?", "Tell me about beam search."],
    ),
    (
        "A token is a piece of text, such as a word or a part of a word. The model reads and writes tokens.",
        [
            "What is a token?",
            "What are tokens?",
            "Explain tokens.",
            "What does token mean?",
            "Tell me what a token is.",
        ],
    ),
    (
        "Each query is compared with all keys, and the values are mixed by how well their keys match.",
        [
            "What is attention?",
            "How does attention work?",
            "Explain attention.",
            "What does attention do?",
            "Tell me about attention.",
        ],
    ),
    (
        "The past does not change: keys and values of a token depend only on the tokens before it, "
        "so they can be kept.",
        [
            "Why does the KV cache work?",
            "Why can keys and values be cached?",
            "Why is caching allowed?",
            "Why is it correct to cache keys and values?",
        ],
    ),
    (
        "Then every step would compute keys and values of the whole text again: the same answer, but much slower.",
        [
            "What happens without a KV cache?",
            "What if there is no KV cache?",
            "Can a model run without a cache?",
            "What would happen without the cache?",
        ],
    ),
    (
        "No. The cache saves work and memory traffic, but the logits stay the same up to rounding.",
        [
            "Does the cache change the answer?",
            "Does a KV cache change the output?",
            "Is the answer different with a cache?",
            "Does caching change the logits?",
        ],
    ),
    (
        "Time to first token: how long you wait for the first token. Mostly it is the time of the prefill.",
        [
            "What is TTFT?",
            "What does TTFT mean?",
            "What is time to first token?",
            "Explain TTFT.",
            "Tell me about TTFT.",
        ],
    ),
    (
        "The context window is the largest number of tokens that the model can see at once: prompt "
        "and answer together.",
        [
            "What is the context window?",
            "What is the context length?",
            "Explain the context window.",
            "What does context length mean?",
            "Tell me about the context window.",
        ],
    ),
    (
        "A simple layer norm: it divides a vector by its root mean square and multiplies it with a learned weight.",
        [
            "What is RMSNorm?",
            "Explain RMSNorm.",
            "What does RMSNorm do?",
            "How does RMSNorm work?",
            "Tell me about RMSNorm.",
        ],
    ),
    (
        "A feed-forward layer with a gate: one projection decides how much of the other one passes.",
        [
            "What is SwiGLU?",
            "Explain SwiGLU.",
            "What does SwiGLU do?",
            "How does SwiGLU work?",
            "Tell me about SwiGLU.",
        ],
    ),
    (
        "Logits are the raw scores of all tokens for the next position. Softmax turns them into probabilities.",
        ["What are logits?", "Explain logits.", "What is a logit?", "What does logits mean?", "Tell me about logits."],
    ),
    (
        "Temperature divides the logits before softmax. A low value makes the choice sure, a high value makes it wild.",
        [
            "What is temperature?",
            "Explain temperature.",
            "What does temperature do?",
            "What is the sampling temperature?",
            "Tell me about temperature.",
        ],
    ),
    (
        "Greedy decoding always takes the token with the highest score. It is the same as temperature 0.",
        [
            "What is greedy decoding?",
            "Explain greedy decoding.",
            "What does greedy mean?",
            "How does greedy decoding work?",
            "Tell me about greedy decoding.",
        ],
    ),
    (
        "In training all tokens are known and computed in one pass, so there is nothing to cache.",
        [
            "Is the KV cache used in training?",
            "Do we need a KV cache for training?",
            "Why is there no cache in training?",
            "Is there a cache during training?",
        ],
    ),
)

WRAPPERS = (  # how people ask: {q} is the question as it stands, {l} with a small first letter and no full stop
    "{q}",
    "{q}",
    "{q}",
    "{q}",
    "{q}",
    "{l}",
    "{l}",
    "Hey, {l}",
    "Please tell me: {l}",
    "I have a question. {q}",
    "Quick question: {l}",
    "Next question: {l}",
    "And now: {l}",
    "Do you know this? {q}",
    "Ok. {q}",
    "{q} Please be brief.",
)
LATER_WRAPPERS = (
    "{q} Thank you.",
    "{q} I want to know.",
    "{q} Please explain.",
    "{q} Just curious.",
    "I wonder: {l}",
    "Tell me, {l}",
    "Question: {l}",
)
HELD_OUT_WRAPPERS = ("One more thing: {l}", "So, {l}", "Let me ask you: {l}", "{q} Thanks.")


def ask(rng, phrasing: str, wrappers=WRAPPERS) -> str:
    """A phrasing as somebody would type it."""
    lowered = (
        phrasing
        if phrasing[:2].isupper() or phrasing.split()[0] in ("K", "GQA")
        else phrasing[0].lower() + phrasing[1:]
    )
    if phrasing.endswith(".") and rng.random() < 0.5:
        lowered = lowered[:-1]
    return rng.choice(wrappers).format(q=phrasing, l=lowered)
