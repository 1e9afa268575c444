"""The model card: what the model is, how it was made, and the figures of its evaluation, written by the run itself."""

from nanokv.costs import kv_bytes_per_token, parameters
from nanokv.training.evaluate import TARGETS

HEAD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# tiny

A chat model of {parameters:,} parameters in Qwen3 layout, made to be looked at: what it says depends on what it was
told, so a broken KV cache shows in its words. It recalls names, pets, places and lists, repeats and reverses words
that it has never seen, counts, adds two numbers, tells small stories and answers questions about KV caches. It knows
nothing else, and is trained to say so. English only. Not for any use in which its answers matter.

## Shape

hidden {hidden_size} · {num_hidden_layers} layers · {num_attention_heads} query and {num_key_value_heads} KV heads ·
head dim {head_dim} (heads × head dim ≠ hidden, on purpose) · MLP {intermediate_size} · vocabulary {vocab_size:,}
(byte-level BPE, one token a digit) · context {max_position_embeddings:,} · tied head · stored in bf16.
The cache takes {kv:,} bytes per token in fp32.

## Training

`nanokv train` makes it again from nothing: seed {seed}, {steps:,} steps of {tokens_per_batch:,} tokens
({tokens:.1f} M in all), Muon and AdamW, rows of 64 to 2,048 tokens, loss on what the assistant says (and a tenth of it
on what users say). The corpus is synthetic: conversations from a seeded generator, no text by anybody else. One word in
eight of its names and nouns is never trained on.

## Evaluation

`nanokv train --evaluate --cases {cases} --seed {case_seed}`: greedy, through the chat's own path, on held-out words.

| task | right | target |
|---|---|---|
"""
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
    text = HEAD.format(
        parameters=parameters(config), kv=kv_bytes_per_token(config, 4),
        cases=report["cases"], case_seed=report["seed"],
        tokens=recipe.steps * recipe.tokens_per_batch / 1e6, **vars(config), **vars(recipe),
    )  # fmt: skip
    for task, share in report["tasks"].items():
        text += f"| {task} | {share:.1%} | {f'{TARGETS[task]:.0%}' if task in TARGETS else 'none'} |\n"
    text += FAULTS
    for row in report["faults"]:
        text += f"| {row['fault']} | {row['recalled']:.1%} | {row['same answer']:.1%} | {row['max |Δlogit|']:.2f} |\n"
    said = "".join(f"> **{message}**\n> {answer}\n\n" for message, answer in report["said"])
    return text + SAYS + said.rstrip("\n") + "\n"
