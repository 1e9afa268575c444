"""The model card of the bundled model, from the run's recipe and the report of its evaluation."""

from nanokv.config import Config
from nanokv.costs import kv_bytes_per_token, parameters
from nanokv.school.training.evaluate import TARGETS
from nanokv.school.training.trainer import Recipe

HEAD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# tiny

A chat model of {parameters:,} parameters in Qwen3 layout, made for looking at caches: its answers
depend on earlier messages, so a broken KV cache shows in its words. It recalls names, pets, places
and lists, gives the newest value of a fact that changed, repeats and reverses words that it has
never seen, counts, adds two numbers up to 99, tells small stories and answers questions about KV
caches. It knows nothing else, and is trained to say so. It speaks only English. Do not use it where
answers matter: it sometimes confuses two facts, and a message of any other kind may get an
unrelated answer.

## Shape

hidden {hidden_size} · {num_hidden_layers} layers · {num_attention_heads} query and
{num_key_value_heads} KV heads · head dim {head_dim} (heads × head dim ≠ hidden, on purpose) ·
MLP {intermediate_size} · vocabulary {vocab_size:,} (byte-level BPE, one token per digit) ·
context {max_position_embeddings:,} · tied head · stored in bf16.
The cache takes {kv:,} bytes per token in fp32.

## Training

`nanokv train` {makes} from scratch: seed {seed}, {steps:,} steps of {tokens_per_batch:,}
tokens ({tokens:.1f} M in all), Muon and AdamW, rows of 64 to 2,048 tokens, loss on the answers and
on one in ten of the users' tokens. From step {second_from:,} on the conversations have every kind
of exchange. From step {third_from:,} on they also have the usual first sentences of a chat, facts
without names, emoji and other scripts, and answers of other assistants. Those answers do not count
in the loss. Of the users' tokens three in a hundred do. From step {last_from:,} on lists, codes and
changed facts come more often, and questions about caches less.
The corpus is synthetic: a seeded generator writes all conversations, without text by other authors.
One in eight of its names and nouns is held out of training.
{made}
## Evaluation

`nanokv train --evaluate --cases {cases} --seed {first} --seeds {count}`: greedy, through the chat's
own path, on held-out words. {count} sets of {cases} cases per task; the lowest of
them has to reach the target.

| task | mean | lowest | target | a case |
|---|---|---|---|---|
"""
COVERS = {
    "recall": "one of one to six facts from earlier turns; an answer with another one is wrong",
    "introductions": "two to four facts in one message, mostly with a name; one of them",
    "updates": "a fact that changed; the old value in the answer is wrong",
    "before and now": "one sentence has the old and the new value; the old one is wrong",
    "codes": "one of two or three numbers with names; another one in the answer is wrong",
    "never told": "a fact that the user never gave, among others; each of those is wrong",
    "repeat": "2 to 8 words, all of them and nothing else",
    "nth": "one word of a list by its place",
    "reverse": "2 to 8 words backwards",
    "edited lists": "one word put first, added, replaced or removed, by its name or its place",
    "count": "up or down, in digits or in words, not one number too far",
    "other counts": "to one number, downwards without the word, below zero, by steps, up to 100",
    "sums": "0 … 99 + 0 … 99, in digits or in words",
    "other arithmetic refused": "differences, products, three numbers, numbers above 99",
    "longer sums refused": "of three or four numbers, in digits or in words",
    "cache questions": "a trained phrasing, inside words that never surround it in training",
    "cache questions, new phrasing": "a phrasing that is not in the training",
    "facts without names": "“I have a cat”: its name is unknown, the cat is known; new phrasings",
    "other assistants": "recall; another assistant answered all earlier turns, in new words",
    "nothing invented": "one or two sentences without a name; each new value is wrong",
    "first sentences": "a trained sentence as the first message; misspelt, or with other words",
    "first sentences, new phrasing": "a first message that is not in the training",
    "emoji and other scripts": "emoji beside a sentence; other scripts and languages; new signs",
    "sizes of caches": "how big is the cache of a model? New models and phrasings",
    "natural": "200 conversations of authors who did not know the corpus; {cases} of them per seed",
    "natural, paraphrased": "the same conversations in other words",
}
FAULTS = """
Recall when the last turn runs with a broken cache (earlier turns are cached correctly):

| cache of the last turn | recalled | same answer | max abs change of the first logits (median) |
|---|---|---|---|
"""
SAYS = """
## Answers

"""


def card(config: Config, recipe: Recipe, report: dict, made: str = "") -> str:
    """Markdown, from the recipe and the report of `nanokv train --evaluate --json`.

    `made`: a paragraph on a run that was not `nanokv train` from nothing.
    """
    text = _head(config, recipe, report, made)
    for task, shares in report["tasks"].items():
        text += _row(task, shares, report["cases"])
    if report["missed"]:
        text += f"\nBelow their targets: {', '.join(report['missed'])}.\n"
    for task, groups in report["groups"].items():
        text += _groups(task, groups)
    text += FAULTS
    for row in report["faults"]:
        shares = f"{row['recalled']:.1%} | {row['same answer']:.1%}"
        text += f"| {row['fault']} | {shares} | {row['max |Δlogit|']:.2f} |\n"
    said = "".join(f"> **{message}**\n> {answer}\n\n" for message, answer in report["said"])
    return text + SAYS + said.rstrip("\n") + "\n"


def _head(config: Config, recipe: Recipe, report: dict, made: str) -> str:
    makes = "reproduces it"
    if made:
        makes = "makes such a model"
        made = f"\n{made}\n"
    return HEAD.format(
        makes=makes,
        parameters=parameters(config),
        kv=kv_bytes_per_token(config, 4),
        cases=report["cases"],
        first=report["seeds"][0],
        count=len(report["seeds"]),
        tokens=recipe.steps * recipe.tokens_per_batch / 1e6,
        made=made,
        **vars(config),
        **vars(recipe),
    )


def _row(task: str, shares: list[float], cases: int) -> str:
    """Mean, lowest seed, target."""
    target = "none"
    if task in TARGETS:
        target = f"{TARGETS[task]:.0%}"
    figures = f"{sum(shares) / len(shares):.1%} | {min(shares):.1%} | {target}"
    return f"| {task} | {figures} | {COVERS[task].format(cases=cases)} |\n"


def _groups(task: str, groups: dict[str, tuple[int, int]]) -> str:
    """Sums: 1 + 1 digits 100.0% of 53, ..."""
    parts = [f"{group} {right / count:.1%} of {count}" for group, (right, count) in groups.items()]
    return f"\n{task[0].upper()}{task[1:]}: {', '.join(sorted(parts))}.\n"
