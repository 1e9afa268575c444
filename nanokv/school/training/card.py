"""The model card: what the model is, how it was made, and the figures of its evaluation, written by the run itself."""

from nanokv.costs import kv_bytes_per_token, parameters
from nanokv.school.training.evaluate import TARGETS

HEAD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# tiny

A chat model of {parameters:,} parameters in Qwen3 layout, made to be looked at: what it says depends on what it was
told, so a broken KV cache shows in its words. It recalls names, pets, places and lists, takes the newest of facts that
change, repeats and reverses words that it has never seen, counts, adds two numbers up to 99, tells small stories and
answers questions about KV caches. It knows nothing else, and is trained to say so. English only. Not for any use in
which its answers matter: it takes one fact for another at times, and words of other kinds than those above can lead it
to an answer that has nothing to do with them.

## Shape

hidden {hidden_size} · {num_hidden_layers} layers · {num_attention_heads} query and {num_key_value_heads} KV heads ·
head dim {head_dim} (heads × head dim ≠ hidden, on purpose) · MLP {intermediate_size} · vocabulary {vocab_size:,}
(byte-level BPE, one token per digit) · context {max_position_embeddings:,} · tied head · stored in bf16.
The cache takes {kv:,} bytes per token in fp32.

## Training

`nanokv train` makes it again from nothing: seed {seed}, {steps:,} steps of {tokens_per_batch:,} tokens
({tokens:.1f} M in all), Muon and AdamW, rows of 64 to 2,048 tokens, loss on what the assistant says and on one in ten
of the tokens that users say. From step {second_from:,} on its conversations have every kind of exchange.
The corpus is synthetic: conversations from a seeded generator, no text by anybody else. One word in eight of its names
and nouns is never trained on.

## Evaluation

`nanokv train --evaluate --cases {cases} --seed {first} --seeds {count}`: greedy, through the chat's own path, on
held-out words. {count} sets of {cases} cases per task; the target is for the lowest of them.

| task | mean | lowest | target | what a case is |
|---|---|---|---|---|
"""
COVERS = {
    "recall": "one of one to six facts told in earlier turns; naming another one is wrong",
    "introductions": "two to four facts in one message, mostly a name among them; one of them asked for",
    "updates": "a fact that changed; the old value in the answer is wrong",
    "before and now": "one sentence names what was and what is; what was is wrong",
    "codes": "one of two or three numbers with names; another one in the answer is wrong",
    "never told": "a fact that was not told among others that were; naming any of them is wrong",
    "repeat": "2 to 8 words, all of them and nothing else",
    "nth": "one word of a list by its place",
    "reverse": "2 to 8 words backwards",
    "edited lists": "one word put first, added, replaced, removed by its name or its place",
    "count": "up or down, in digits or in words, not one number too far",
    "other counts": "to one number, downwards without the word, below zero, by steps, up to 100",
    "sums": "0 … 99 + 0 … 99, in digits or in words",
    "other arithmetic refused": "differences, products, three numbers, numbers above 99",
    "cache questions": "a trained phrasing in words around it that training never used",
    "cache questions, new phrasing": "a phrasing that training never used",
    "natural": "200 conversations by people who had not seen the corpus; {cases} of them per seed",
    "natural, paraphrased": "the same conversations in other words",
}
FAULTS = """
When the last turn of a recall meets a broken cache (earlier turns are cached right):

| the last turn meets | recalled | same answer | max abs change of the first logits (median) |
|---|---|---|---|
"""
SAYS = """
## What it says

"""


def card(config, recipe, report: dict) -> str:
    """Markdown, from the run's recipe and the report of `nanokv train --evaluate --json`."""
    seeds, cases = report["seeds"], report["cases"]
    text = HEAD.format(
        parameters=parameters(config),
        kv=kv_bytes_per_token(config, 4),
        cases=cases,
        first=seeds[0],
        count=len(seeds),
        tokens=recipe.steps * recipe.tokens_per_batch / 1e6,
        **vars(config),
        **vars(recipe),
    )
    for task, shares in report["tasks"].items():
        target = f"{TARGETS[task]:.0%}" if task in TARGETS else "none"
        covers = COVERS[task].format(cases=cases)
        text += f"| {task} | {sum(shares) / len(shares):.1%} | {min(shares):.1%} | {target} | {covers} |\n"
    below = ", ".join(report["missed"])
    text += f"\nBelow their targets: {below}.\n" if below else ""
    for task, groups in report["groups"].items():
        parts = (
            f"{group} {right / count:.1%} of {count}"
            for group, (right, count) in sorted(groups.items())
        )
        text += f"\n{task[0].upper()}{task[1:]}: {', '.join(parts)}.\n"
    text += FAULTS
    for row in report["faults"]:
        text += f"| {row['fault']} | {row['recalled']:.1%} | {row['same answer']:.1%} | {row['max |Δlogit|']:.2f} |\n"
    said = "".join(f"> **{message}**\n> {answer}\n\n" for message, answer in report["said"])
    return text + SAYS + said.rstrip("\n") + "\n"
