# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Same logits as transformers
#
# You get three copies of a model. Each is wrong in one place. A wrong model may write nonsense, and then you notice at
# once. It may also write exactly the same words as the right one. How do you find out that it is wrong, and how do you
# find the place? You compare its numbers with those of a program that you trust, operation by operation. And you need
# to know how large a difference is allowed.
#
# ## What you will be able to do
#
# - say what is in a [checkpoint](glossary.md#checkpoint), and read a tensor from the file by hand;
# - compare two implementations layer by layer, and find the first operation that differs;
# - tell [rounding](glossary.md#rounding) from a bug, and justify a [tolerance](glossary.md#tolerance);
# - explain why equal words do not prove that two models are equal.
#
# Letters: `T` tokens that are fed at once, `L` layers, `C` numbers of a hidden state, `V` entries of the vocabulary
# ([all letters](glossary.md#letters)).

# %%
import os

import torch

import nanokv
import weights_loader
from nanokv import course
from nanokv.lab.study import debug
from nanokv.school.course import reference
from nanokv.school.course.checks.nb04 import CAUSES, mystery

model, tokenizer = course.start("04")
c = model.config
source = os.environ.get("NANOKV_MODEL") or "tiny"
folder = weights_loader.resolve(source)


def chat(question):
    """A question in the model's own template, (1,T)."""
    asked = tokenizer.render([{"role": "user", "content": question}])
    return torch.tensor([tokenizer.encode(asked)])


ids = chat(reference.QUESTION)
print(f"the prompt is {reference.QUESTION!r}: {ids.shape[1]} tokens")

# %% [markdown]
# ## Predict
#
# Two questions. First: `float32` keeps 24 bits of a number, `bfloat16` keeps 8. The same model runs in both. How many
# *times* as large is the rounding error of the logits in bf16?
#
# Second: three checkpoints are wrong in one place each. In the first, RoPE uses a `theta` that is a hundredth of the
# right one. In the second, the norms use an `eps` that is ten times too large. In the third, the head is a random
# matrix, because a loader did not know that it is [tied](glossary.md#tied-head) to the embedding. How many of the three
# will answer *What is my name?* with different words?

# %% tags=["exercise"]
ratio = ...  # how many times as large?
other_words = ...  # 0 to 3

# %% tags=["solution"]
ratio = 2  # a common first guess: half the bits, twice the error
other_words = 3  # a common first guess: wrong is wrong

# %%
course.predict("04.a", ratio, unit="times as large")
course.predict("04.b", other_words, unit="of three")

# %% [markdown]
# ## Experiment 1: what is in the file
#
# A checkpoint is a folder: `config.json` with the sizes, a tokenizer, and the weights as `safetensors`. A `safetensors`
# file is a list of named tensors and nothing else. (The older pickle format can contain code, which runs when the file
# is read. nanokv refuses it.)

# %%
# headers only
stored = {name: entry.shape
          for name, entry in weights_loader.shards.read_entries(folder).items()}
first = [name for name in stored if ".layers.0." in name]
for name in [name for name in stored if ".layers." not in name] + first:
    print(f"{name:<48} {str(stored[name]):<14} → "
          f"{weights_loader.names.to_nanokv(name)}")
print(f"{len(stored)} tensors, {len(first)} of them in layer 0; lm_head is stored: "
      f"{'lm_head.weight' in stored}")

# %% tags=["hide-input"]
course.figure("04.tensors", len(stored))
course.figure("04.a_layer", len(first))

# %% [markdown]
# There are <!--fig 04.a_layer-->11<!--/fig--> tensors per layer, <!--fig 04.tensors-->68<!--/fig--> in all. The names
# in `nanokv/model.py` are those of the file without the prefix `model.`, so no table of names is needed. One name is
# missing: `lm_head.weight`. The config says `tie_word_embeddings`, so the head *is* the embedding. Some loaders treat
# the two as separate parameters and only warn about the missing tensor, so the head stays random. The loader of nanokv
# raises an error for a missing tensor, an extra tensor, or a wrong shape:

# %%
weights = {name: value for name, value in model.state_dict().items()
           if name != "lm_head.weight"}
if not c.tie_word_embeddings:
    weights["lm_head.weight"] = model.lm_head.weight
incomplete = {name: value for name, value in weights.items()
              if "layers.0.self_attn.k_proj" not in name}
try:
    nanokv.loading.build(c, incomplete)
except RuntimeError as error:
    print("RuntimeError:", " ".join(str(error).split())[:120])

# %% [markdown]
# ## Experiment 2: the same numbers?
#
# `nanokv.debug.record` runs a model once and keeps the output of every operation, 18 per layer. It works with nanokv
# and with transformers. `compare` compares two records. If transformers is installed, we run it here. If it is not, we
# use its numbers for the last token of this prompt, which are shipped with nanokv.

# %%
theirs = reference.in_transformers(source)  # None where it is not installed
kept = reference.stored(model)
ours = debug.record(model, ids)
if theirs is not None:
    who = f"transformers {reference.oracle.version()}, run here"
    steps = debug.compare(ours, debug.record(theirs, ids))
elif kept is not None and torch.equal(kept[0], ids):
    who = f"{kept[2]}, stored, last token only"
    steps = debug.compare(reference.last_token(ours), kept[1])
else:
    who = ("nobody: transformers is not installed, and no numbers are stored for this "
           "model")
    steps = []
print("compared with", who)
for step in steps:
    if step.layer in (None, c.num_hidden_layers - 1):
        print(f"    {step.place:<34} max |Δ| {step.difference:.1e}   values up to "
              f"{step.scale:7.2f}")
different = [step for step in steps if not step.ok]
print(f"{len(steps)} operations compared, "
      f"{sum(step.difference == 0 for step in steps)} equal to the last bit, "
      f"{len(different)} differ by more than rounding")

# %% [markdown]
# We compare every operation of every layer, not only the end. You may see zeros. Both programs call the same library
# for the same products in the same order, so on one machine every bit may agree. No test should demand that: on another
# processor, with another number of threads or with another attention kernel, the sums are computed in a different
# order.

# %% [markdown]
# ## Experiment 3: how equal is equal enough?
#
# How much may the numbers of correct code differ? We measure it. We feed the same tokens to the same model in two ways:
# all at once, and one by one through a cache. In exact arithmetic nothing would differ. Then we compare fp32 with bf16.

# %%
half = nanokv.load(source, dtype="bfloat16", device="cpu")[0]
alone, alone_half = reference.one_by_one(model, ids), reference.one_by_one(half, ids)
ours_half = debug.record(half, ids)


def logit_gap(a, b):
    """Largest difference of a logit, over all positions."""
    return float((a[None, "lm_head"].float() - b[None, "lm_head"].float()).abs().max())


noise, noise_half = logit_gap(alone, ours), logit_gap(alone_half, ours_half)
to_half = logit_gap(ours_half, ours)
print(f"logits go up to {float(ours[None, 'lm_head'].abs().max()):.0f}")
print(f"fp32, one by one against at once: {noise:.1e}")
print(f"bf16, one by one against at once: {noise_half:.1e}")
print(f"bf16 against fp32:                {to_half:.1e}")
if theirs is not None:
    theirs_half = debug.record(reference.in_transformers(source, torch.bfloat16), ids)
    print("transformers' bf16 against its own fp32: "
          f"{logit_gap(theirs_half, debug.record(theirs, ids)):.1e}")
course.reveal("04.a", noise_half / noise)

# %% tags=["hide-input"]
course.figure("04.noise", noise)
course.figure("04.noise_half", noise_half)
course.figure("04.to_half", to_half)
course.figure("04.ratio", noise_half / noise)

# %% [markdown]
# In fp32, rounding moves the logits by about <!--fig 04.noise x4-->2e-5<!--/fig-->, in bf16
# by <!--fig 04.noise_half x4-->0.14<!--/fig-->: about <!--fig 04.ratio x5-->8,200<!--/fig--> times as much. For a
# single number, sixteen bits fewer make the rounding error `2**16 = 65,536` times as large. How much of this factor
# reaches the logits depends on the sums in between.
#
# Two rules follow. First, a tolerance belongs to a dtype: a difference that is a bug in fp32 may be rounding in bf16.
# Second, in bf16, compare your difference with the difference between the reference in bf16 and *the same reference* in
# fp32. No implementation can be expected to come closer than that.

# %% [markdown]
# ## Experiment 4: three wrong checkpoints
#
# These are the three checkpoints of your prediction. First we print their words for two questions, then we compare
# their logits.

# %%
wrong = reference.sabotaged(model)  # the same weights; one thing wrong in each
sums = chat("What is 12 plus 30?")


def say(model, ids):
    return tokenizer.text_of(list(nanokv.generate(model, ids, max_new_tokens=24)))


names = {"right": model, **wrong}
answers = {name: (say(one, ids), say(one, sums)) for name, one in names.items()}
for name, (first, second) in answers.items():
    print(f"{name:<6} {first[:44]!r:<48} {second[:30]!r}")
records = {name: debug.record(one, ids) for name, one in wrong.items()}
gaps = {name: logit_gap(record, ours) for name, record in records.items()}
print("logits move by", ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items()))
words = sum(answers[name][0] != answers["right"][0] for name in wrong)
course.reveal("04.b", words)

# %% tags=["hide-input"]
course.figure("04.words", words)
course.figure("04.more_words", sum(answers[name] != answers["right"] for name in wrong))
course.figure("04.theta", gaps["theta"])
course.figure("04.eps", gaps["eps"])

# %% [markdown]
# For the first question, <!--fig 04.words-->1<!--/fig--> of the three writes different words. For the second question
# it is still <!--fig 04.more_words-->1<!--/fig-->. The wrong theta changes the logits
# by <!--fig 04.theta-->8.7<!--/fig-->, and both its answers are right. The wrong eps writes no wrong word here either,
# but its logits change by <!--fig 04.eps-->0.007<!--/fig-->. That is more than a hundred times the rounding of fp32,
# and a fraction of the rounding of bf16. In bf16 you could not see this error.
#
# The plot shows the errors layer by layer, beside the rounding of both types:

# %% tags=["hide-input"]
depth = c.num_hidden_layers
records_to_show = {"wrong theta": records["theta"], "rounding of bf16": ours_half,
                   "wrong eps": records["eps"],
                   "rounding of fp32": alone}
marks = {"wrong theta": (4, "-D"), "rounding of bf16": (5, ":o"),
         "wrong eps": (1, "-s"), "rounding of fp32": (0, ":o")}
fig, axis = course.subplots(width=8.5, height=3.6)
paths = {}
for name, record in records_to_show.items():
    steps = debug.compare(record, ours)
    after = [s.difference / s.scale
             for s in steps if s.operation in ("mlp_residual", "lm_head")]
    paths[name] = after
    color, mark = marks[name]
    axis.plot(range(depth + 1), after, mark, color=course.COLORS[color], label=name)
axis.set(yscale="log", xticks=range(depth + 1),
         ylabel="difference ÷ largest value (log)", xlabel="after layer",
         title="rounding and bugs on their way through the model")
axis.set_xticklabels([*range(depth), "logits"])
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
course.show(fig, alt="Four lines on a log scale, from the first layer to the logits. "
            f"Lowest, rounding in fp32, {paths['rounding of fp32'][0]:.0e} to "
            f"{max(paths['rounding of fp32']):.0e}; then the wrong eps, between "
            f"{min(paths['wrong eps']):.0e} and {max(paths['wrong eps']):.0e}; above "
            f"it rounding in bf16, up to {max(paths['rounding of bf16']):.0e}; on top "
            f"the wrong theta, up to {max(paths['wrong theta']):.1g}.")

# %% [markdown]
# The line of the wrong eps runs between the two levels of rounding: far above that of fp32, below that of bf16. The
# most useful question is the next one: *where* does the error begin?

# %%
trusted = theirs if theirs is not None else model  # Experiment 2 showed that they agree
for name, one in wrong.items():
    print(f"{name:<6} first:   {debug.first_divergence(one, trusted, ids)}")
    steps = debug.compare(records[name], ours)
    print(f"       largest: {max(steps, key=lambda step: step.difference)}")

# %% [markdown]
# Each time, the first operation that differs is the one that uses the wrong number. A wrong theta does not change
# projections and head norms; the first difference is in the first rotation. With a wrong eps it is in the very first
# norm, and with a wrong head only in the head. The *largest* difference is misleading: for theta and for eps it is in a
# later layer, because every operation after a wrong value passes the error on. Orange frames mark the first operation
# that differs:

# %%
import numpy as np

rows = list(debug.OPERATIONS)
FLOOR = 1e-8  # stands for "equal to the last bit" on a log scale


def table_of(record):
    """(operations + 1, layers): difference ÷ largest value of the token; the last
    row is the head."""
    table = np.full((len(rows) + 1, depth), np.nan)
    for step in debug.compare(record, ours):
        ratio = max(step.difference / step.scale, FLOOR)
        if step.layer is not None:
            table[rows.index(step.operation), step.layer] = ratio
        elif step.operation == "lm_head":
            table[-1] = ratio
    return table

# %% tags=["hide-input"]
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle

fig, axes = course.subplots(1, 4, width=11, height=4.6, sharey=True)
starts = {}
for axis, (name, record) in zip(axes, {"rounding (fp32)": alone, **records}.items()):
    image = axis.imshow(table_of(record), norm=LogNorm(FLOOR, 10), aspect="auto")
    axis.grid(False)
    axis.axhline(len(rows) - 0.5, color="white", linewidth=2)
    axis.set(title=name, xlabel="layer", xticks=range(0, depth, max(1, depth // 6)))
    step = next((step for step in debug.compare(record, ours) if not step.ok), None)
    if step is not None:
        starts[name] = step.place
        corner, size = (-0.5, len(rows) - 0.5), (depth, 1)
        if step.layer is not None:
            corner, size = (step.layer - 0.5, rows.index(step.operation) - 0.5), (1, 1)
        axis.add_patch(Rectangle(corner, *size, fill=False, edgecolor=course.COLORS[1],
                                 linewidth=3, clip_on=False))
axes[0].set_yticks(range(len(rows) + 1), [*rows, "lm_head"], fontsize=8)
fig.colorbar(image, ax=axes, label="difference ÷ largest value of the token")
course.show(fig, alt="Four tables, one row an operation and one column a layer, "
            "coloured by the difference. Rounding: dark everywhere. In the others a "
            "frame marks where the difference begins, and nearly all that comes after "
            "it is brighter: "
            + "; ".join(f"{name} at {place}" for name, place in starts.items()) + ".")

# %% [markdown]
# ## What the articles say
#
# These claims about the transformers library are wrong or misleading. The [page of all claims](claims.md) has the
# others.

# %%
if theirs is None:
    in_words = subscript = "transformers is not installed here"
else:
    import inspect

    from transformers import DynamicCache

    try:
        subscript = type(DynamicCache()[0]).__name__
    except TypeError as error:
        subscript = f"TypeError: {error}"
    found = "cache_position" in inspect.signature(theirs.forward).parameters
    in_words = f"cache_position is an argument of forward: {found}"
last_row = nanokv.prefill(model, ids, nanokv.make_cache("dict", c), start_pos=0)
print(f"all rows of logits: {tuple(nanokv.score(model, ids).shape)}; what a prefill "
      f"gives: {tuple(last_row.shape)}")
course.claim("0.2", "wrong", found=subscript)
# all rows of Qwen3-0.6B at 4,096 tokens, in bf16
course.claim("0.14", "misleading", found=4096 * 151_936 * 2)
course.claim("3.15", "misleading", found=in_words)

# %% [markdown]
# ## Exercises
#
# **04.1** How many tensors does the file of a Qwen3 with `L` layers hold if the head is tied (`tied=True`), and how
# many if it is not? Experiment 1 printed one example; count the tensors by kind.


# %% tags=["exercise"]
def tensors(L, tied):
    return ...


# %% tags=["solution"]
def tensors(L, tied):
    return 11 * L + (2 if tied else 3)


# %%
course.check("04.1", tensors)

# %% [markdown]
# **04.2** Read a tensor without the library. A `.safetensors` file begins with `8` bytes: a whole number `n`, the
# lowest byte first. Then come `n` bytes of JSON,
# `{"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, …}`, then the data. Offsets are in bytes
# and count from the end of the JSON. `torch.frombuffer(bytearray(…), dtype=…)` makes a flat tensor from bytes.

# %%
import json
from pathlib import Path

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


# %% tags=["exercise"]
def read_tensor(path, name):
    data = Path(path).read_bytes()
    return ...


# %% tags=["solution"]
def read_tensor(path, name):
    data = Path(path).read_bytes()
    n = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + n])[name]
    begin, end = entry["data_offsets"]
    raw = bytearray(data[8 + n + begin : 8 + n + end])
    return torch.frombuffer(raw, dtype=DTYPES[entry["dtype"]]).view(entry["shape"])


# %%
course.check("04.2", read_tensor)

# %% [markdown]
# **04.3** You write the test for a port of this model, in fp32: the largest difference of a logit must stay below
# `atol`. Choose a number that you can justify: correct code must pass on another machine too, and each of the three
# checkpoints must fail.

# %% tags=["exercise"]
atol = ...

# %% tags=["solution"]
atol = 10 * noise  # far above the rounding, far below the smallest of the three

# %%
course.check("04.3", atol)

# %% [markdown]
# **04.4** Here is one more wrong checkpoint. You do not get its weights, only the record of one run. In which layer is
# the mistake, and which of the causes is it? Answer with a pair such as `(0, "a")`.

# %%
case = course.case("04.4")
# the record of the wrong one; `ours` is that of the right one
seen = mystery(case, ids)
for letter, cause in CAUSES.items():
    print(f"{letter}) {cause}")

# %% tags=["exercise"]
layer_and_cause = ..., ...

# %% tags=["solution"]
begins = next(step for step in debug.compare(seen, ours) if not step.ok)
touches = {"gate_proj": "a", "q_norm": "b", "q_proj": "c", "down_proj": "d",
           "o_proj": "e", "input_layernorm": "f"}
layer_and_cause = begins.layer, touches[begins.operation]

# %%
course.check("04.4", layer_and_cause)

# %% [markdown]
# **04.5** You have the three checkpoints only in bf16. For which of `"theta"`, `"eps"` and `"head"` do the logits
# change no more than by the rounding of bf16 itself? Answer with a set.

# %% tags=["exercise"]
hidden = ...

# %% tags=["solution"]
hidden = {name for name, gap in gaps.items() if gap <= to_half}

# %%
course.check("04.5", hidden)

# %% [markdown]
# ## Quiz

# %%
course.quiz("04")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "c", "b", "a"

# %%
course.answer("04.q1", q1)
course.answer("04.q2", q2)
course.answer("04.q3", q3)

# %% [markdown]
# ## Further reading
#
# - `nanokv/lab/study/debug.py`: the tool of this notebook. `nanokv verify MODEL` runs it, and much more, on your own
#   checkpoint.
# - Hugging Face, [safetensors](https://huggingface.co/docs/safetensors/index): the format that you have read by hand.
# - Goldberg, [What every computer scientist should know about floating-point
#   arithmetic](https://docs.oracle.com/cd/E19957-01/806-3568/ncg_goldberg.html).
#
# ## Next
#
# You can now show that the model is right. In notebook [05](05_the_waste.ipynb) you count how often it computes the
# same numbers.

# %% tags=["skip"]
course.progress()
