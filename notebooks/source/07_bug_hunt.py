# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · Bug hunt
#
# Your cache of the last notebook is right. This notebook has a collection of bugs in caches. They occurred in real
# programs; for most of them the public issue or question is linked. Each bug can be switched on inside a `with` block.
# You predict which bugs change the words, learn to find a bug from the first number that differs, and write a test. The
# test is graded by the number of bugs that it notices.
#
# ## What you will be able to do
#
# - say how many bugs of a cache can be seen in the text of a model: about half;
# - find a bug from the first number that differs: which layer, which token, which operation;
# - choose the *situation* that a test needs, and grade a test by [mutation](glossary.md#mutation);
# - find and fix the bugs of a cache that you have never seen.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `H` query heads, `Hk` KV heads, `D` numbers of a
# head, `P` tokens of the prompt ([all letters](glossary.md#letters)).

# %%
import copy

import torch

import nanokv
from nanokv import course, faults
from nanokv.lab.study import debug
from nanokv.lab.study import equality
from nanokv.school.course.checks.nb07 import SUSPECTS, WANTED, trace
from nanokv.lab.faults.diagnosis import random_prompts
from nanokv.rope import apply_rope, rope_angles

# hundreds of answers are compared: too slow with a large one
model, tokenizer = course.start("07", model="tiny")
c = model.config
print(f"\n{len(faults.FAULTS)} bugs:")
for name, fault in faults.FAULTS.items():
    print(f"  {name:<25} {fault.title}")

# %% [markdown]
# ## Predict
#
# With each bug switched on, the model is asked a question such as *What is my name?*, in a situation in which the bug
# has an effect. Which bugs leave the answer **word for word right**, without an error and without an odd word? Put
# their names into a set. The titles are enough to decide. (These words in them are in the glossary:
# [adapter](glossary.md#adapter), [beams](glossary.md#beam-search), [chunk](glossary.md#chunk),
# [draft](glossary.md#speculative-decoding), [learned sink](glossary.md#learned-sink), [page](glossary.md#page),
# [prefix](glossary.md#prefix), [recurrent state](glossary.md#recurrent-state) and [reordered](glossary.md#reorder).)

# %% tags=["exercise"]
bet = ...  # {"…", "…"}

# %% tags=["solution"]
# a common bet: only what changes no value much
bet = {"rounded_to_bf16", "cached_queries", "repeated_before_caching"}

# %% [markdown]
# Second, predict a number. A simple test checks only that, after a prefill and a decode, keys and values have the right
# shapes and the cache has the right length. How many of the bugs does it notice?

# %% tags=["exercise"]
noticed = ...

# %% tags=["solution"]
noticed = 8

# %%
bets = course.chosen(bet, faults.FAULTS)
course.predict("07.a", ... if bets is None else len(bets), unit="silent bugs")
course.predict("07.b", noticed, unit="bugs noticed")

# %% [markdown]
# ## Experiment 1: read the answers
#
# `faults.diagnose` runs the situation of a bug twice, with the right code and with the bug. It compares the words, the
# logits, the bytes of the cache and the number of tokens that were computed. Both runs are fed the same tokens, so the logits can be compared position by
# position.

# %%
found = {name: faults.diagnose(name, model, tokenizer) for name in faults.FAULTS}
bets = bets or set()
for name, one in found.items():
    heard = one.error or next((w for r, w in zip(one.right, one.wrong) if w != r),
                              "(every word is right)")
    print(f"{name:<25} {'*' if name in bets else ' '} {one.seen_by:<7} "
          f"{' '.join(heard.split())[:60]}")
silent = {name for name, one in found.items()
          if one.seen_by in ("logits", "bytes", "tokens", "nothing")}
print(f"* = your bet: {len(bets & silent)} of {len(bets)} are silent, and "
      f"{len(silent - bets)} others are silent too")
count = {kind: sum(one.seen_by == kind for one in found.values())
         for kind in ("words", "error", "logits", "bytes", "tokens")}
course.reveal("07.a", len(silent))

# %% tags=["hide-input"]
course.figure("07.all", len(found))
course.figure("07.silent", len(silent))
course.figure("07.words", count["words"])
course.figure("07.errors", count["error"])
course.figure("07.bytes", count["bytes"])
course.figure("07.tokens", count["tokens"])

# %% [markdown]
# Of <!--fig 07.all-->31<!--/fig--> bugs, <!--fig 07.errors-->2<!--/fig--> stop with an error
# and <!--fig 07.words-->13<!--/fig--> change words. Some of these answers are still correct sentences, for example one
# with a different name. With the other <!--fig 07.silent-->16<!--/fig--> every word is right. Some of these change no
# value at all: <!--fig 07.bytes-->2<!--/fig--> only cost memory, and <!--fig 07.tokens-->1<!--/fig--> only costs time,
# because a known prefix is computed again. The plot shows how much the logits change, for all bugs except the ones in
# batches and beams and the ones that stop with an error:

# %% tags=["hide-input"]
single = {name: one for name, one in found.items() if one.deltas
          and one.fault.scenario not in ("batch", "beams")}
order = sorted(single, key=lambda name: (max(single[name].deltas), name))
steps = max(len(single[name].deltas) for name in order)
table = torch.full((len(order), steps), float("nan"))
for row, name in enumerate(order):
    deltas = torch.tensor(single[name].deltas)
    table[row, : len(deltas)] = deltas.clamp(min=1e-4)

from matplotlib.colors import LogNorm

orange, blue = course.COLORS[1], course.COLORS[0]
fig, axis = course.subplots(width=9.5, height=5.6)
image = axis.imshow(table, norm=LogNorm(1e-4, 100), aspect="auto")
axis.grid(False)
axis.set(xlabel="logits of step (0 = those after the prompt)",
         title="how far the logits move (blue name: words are right)")
axis.set_yticks(range(len(order)), order, fontsize=8.5)
for label, name in zip(axis.get_yticklabels(), order):
    label.set_color(blue if name in silent else orange)
fig.colorbar(image, label="max |Δ| (log)")
loudest = max((name for name in order if name in silent),
              key=lambda name: max(single[name].deltas))
quietest = min((name for name in order if name not in silent),
               key=lambda name: max(single[name].deltas))
course.show(fig, alt="One row per bug, one column per step of the answer, brighter "
            "where logits move further, sorted by size. The loudest bug with right "
            f"words is {loudest}, which moves logits by "
            f"{max(single[loudest].deltas):.0f}; the quietest one that changes a word "
            f"is {quietest}, with {max(single[quietest].deltas):.0f}. Many rows are "
            "dark at step 0 and bright after it: the prompt was right.")
course.figure("07.loudest", max(single[loudest].deltas))

# %% [markdown]
# In the plot, the worst bug without a wrong word changes a logit by <!--fig 07.loudest-->17<!--/fig-->. Every word is
# still right, because the largest logit stayed the largest. If two logits were closer together, the word would change.
# So do not judge a cache by its text. Compare its logits with those of a run without a cache.

# %% [markdown]
# ## Experiment 2: read the first difference
#
# A wrong number makes all later numbers wrong, so look for the *first* one. `diagnose` gives its layer, its token and
# its operation. Together they narrow down the cause:

# %%
places = {}
for name, one in found.items():
    places.setdefault((one.layer, one.token, one.operation), []).append(name)
for (layer, token, operation), names in sorted(places.items(), key=str):
    # the embedding belongs to no layer
    place = "before layer 0" if layer is None else f"layer {layer}"
    where = f"{place}, token {token}, {operation}"
    where = "nothing differs" if token is None else where
    print(f"{where:<42} {', '.join(names)}")
prompt = len(faults.diagnosis.talk(tokenizer)[0])
print(f"(the prompt of the first conversation is tokens 0 to {prompt - 1})")

# %% [markdown]
# - **Which token.** Token 0: the error is there from the start. Either wrong numbers are stored, or the cache was not
#   empty. The first token after the prompt: the prompt was right, and decoding is wrong. The first token of the second
#   chunk: the positions or the mask of a later chunk are wrong. (With `reorder_ignored` it is the first token after two
#   prompts.)
# - **Which operation.** `rope_k`: the key that reaches attention is wrong. Its position is wrong, or it was stored
#   wrongly. `rope_q`: the key is right, and the query is rotated to another position. `attention`: query, key and value of the new token are right and the output is wrong, so the error is in
#   the numbers read from the *cache*, or in the mask. `attention_residual`: the sum after a layer without keys is wrong, so
#   its recurrent state is. `embed_tokens`: the [embedding](glossary.md#embedding) of the
#   token differs, so a different token was fed at this position. `the pass that failed`: the run ended there, with an
#   error.
# - **Which layer.** Nearly always layer 0, because a wrong cache is wrong in every layer. Later layers inherit the
#   error. `before layer 0`: the input of the layers differs. With `right_padding` the tokens of a short prompt are in
#   different columns of the batch, because the padding comes after them.
#
# To look at a first difference, record the same run twice, without and with the bug. Run this in a terminal in the
# folder of the project, with the name of a bug:
#
# ```bash
# .venv/bin/nanokv trace "My name is Zorbla. What is my name?" --fault start_pos_restarts -o fault.html --open
# ```
#
# The page opens at the first key, value or attention weight that differs, and a button goes to the next one. Bugs that
# need another situation, such as a batch or a chunk, cannot be recorded; the command lists the bugs that can.
#
# In exercise 07.2 you name a bug from its trace alone.

# %% [markdown]
# ## Experiment 3: the situation that shows a bug
#
# We try every bug in every situation, with a small random model. Its words have no meaning, but the comparison does not
# need meaning. Which bugs are visible in the logits, in an error, in the bytes, or in the tokens that were computed?

# %%
small = equality.small_model()
prompts = random_prompts(small)
for name, run in faults.SCENARIOS.items():
    print(f"{name:<13} {run.__doc__.splitlines()[0]}")


def outcome(run, forced=None):
    """What a situation gives: an Outcome, or the error."""
    try:
        return run(small, prompts, forced)
    except Exception as error:
        return error


def difference(right, wrong):
    """0 nothing, 1 bytes or computed tokens, 2 logits, 3 an error where there should be
    none, or none where there should be one."""
    if isinstance(right, Exception) or isinstance(wrong, Exception):
        return 0 if type(right) is type(wrong) else 3
    if float((right.logits - wrong.logits).abs().max()) > 1e-3:
        return 2
    return int((right.bytes, right.computed) != (wrong.bytes, wrong.computed))


answer = [[7] * 12]  # the same 12 tokens are fed after every prompt
truth = {name: outcome(run, answer) for name, run in faults.SCENARIOS.items()}
shows = {name: [] for name in faults.FAULTS}
for name, row in shows.items():
    for situation, run in faults.SCENARIOS.items():
        with faults.inject(name):  # anew for each, as some bugs keep state
            row.append(difference(truth[situation], outcome(run, answer)))
columns = {situation: sum(row[i] > 0 for row in shows.values())
           for i, situation in enumerate(faults.SCENARIOS)}
print("bugs seen in a situation:", columns)

# %% tags=["hide-input"]
course.figure("07.solo", columns["solo"])
course.figure("07.chunked", columns["chunked"])
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

palette = ["#ECECEC", course.COLORS[5], orange, "black"]
fig, axis = course.subplots(width=9.5, height=6.0)
axis.imshow(list(shows.values()), cmap=ListedColormap(palette), vmin=0, vmax=3,
            aspect="auto")
axis.grid(False)
axis.set_yticks(range(len(shows)), list(shows), fontsize=8.5)
axis.set_xticks(range(len(columns)), list(columns), fontsize=8.5, rotation=40,
                ha="right", rotation_mode="anchor")
for i in range(len(shows) + 1):
    axis.axhline(i - 0.5, color="white", linewidth=1)
for i in range(len(columns) + 1):
    axis.axvline(i - 0.5, color="white", linewidth=3)
axis.set_title("where a bug shows")
kinds = ["not at all", "in bytes or tokens", "in logits",
         "by an error, or one that is missing"]
axis.legend([Patch(color=color) for color in palette], kinds, loc="upper left",
            bbox_to_anchor=(0, -0.17), ncols=4)
only = {situation: [name for name in shows if shows[name][i]
                    and sum(map(bool, shows[name])) == 1]
        for i, situation in enumerate(columns)}
course.show(fig, alt="A table of bugs and situations. About half of the bugs show "
            "nearly everywhere. The others show in one or two columns: "
            + "; ".join(f"only {situation}: {', '.join(names)}"
                        for situation, names in only.items() if names) + ".")

# %% [markdown]
# One prompt and one answer (`solo`) reveal <!--fig 07.solo-->12<!--/fig--> of the bugs, if you compare logits and
# bytes. Reading the prompt in chunks reveals <!--fig 07.chunked-->15<!--/fig-->. The others are visible only with a
# second request, a batch, beams, an undone turn, a full buffer, a cache that forgets, stored pages, attention in
# parts, recurrent states or shared keys. So a test must create the situation in which a bug has an effect.

# %% [markdown]
# ## Experiment 4: grade the tests
#
# How good is a test? Count the bugs that it notices. `faults.grade` runs it on right code, where it must pass; once
# under every bug, where it should fail; and on right code again. We grade three tests in the same situation: the simple
# one of your prediction, one that compares words, and one that compares logits.

# %%
# (1,P): my name is Zorbla … what is my name?
ids = torch.tensor(faults.diagnosis.talk(tokenizer)[:1])


def shapes_are_right(model):
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :-1], cache, start_pos=0)
    logits = nanokv.decode(model, ids[:, -1:], cache, start_pos=cache.length)
    assert logits.shape == (1, model.config.vocab_size) and torch.isfinite(logits).all()
    assert cache.length == ids.shape[1] and len(cache) == model.config.num_hidden_layers
    for layer in cache:
        shape = (1, model.config.num_key_value_heads, ids.shape[1],
                 model.config.head_dim)
        assert layer["key"].shape == layer["value"].shape == shape


def words_are_right(model):
    cached = list(nanokv.generate(model, ids, max_new_tokens=8, eos_token_ids=[]))
    text = ids
    for _ in range(8):
        new = nanokv.score(model, text)[:, -1].argmax(-1, keepdim=True)
        text = torch.cat((text, new), dim=1)
    assert text[0, ids.shape[1] :].tolist() == cached


def logits_are_right(model):
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :-2], cache, start_pos=0)
    nanokv.decode(model, ids[:, -2:-1], cache, start_pos=cache.length)
    logits = nanokv.decode(model, ids[:, -1:], cache, start_pos=cache.length)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


grades = {test.__name__: faults.grade(test, model)
          for test in (shapes_are_right, words_are_right, logits_are_right)}
for name, grade in grades.items():
    print(f"{name:<17} kills {len(grade.kills):>2} of {len(faults.FAULTS)}: "
          f"{', '.join(grade.kills)}\n")
shapes, words, logits = (len(grade.kills) for grade in grades.values())
course.reveal("07.b", shapes)

# %% tags=["hide-input"]
course.figure("07.shapes", shapes)
course.figure("07.word_test", words)
course.figure("07.logit_test", logits)

# %% [markdown]
# Checking shapes notices <!--fig 07.shapes-->1<!--/fig--> of them, comparing words <!--fig 07.word_test-->7<!--/fig-->,
# comparing logits <!--fig 07.logit_test-->10<!--/fig-->. In this one situation a comparison of logits cannot notice
# more. A passing test proves something only if it fails on wrong code. The survivors, the bugs that a test missed, show
# which test to write next:

# %%
print(grades["logits_are_right"])

# %% [markdown]
# ## Experiment 5: test your own cache
#
# For your own cache there is a suite of situations, `nanokv.equality`. It compares each run with the model without a
# cache, and it finds the layer and the token of the first difference. Here is a cache written for speed: one block of
# memory, written in place, so that a new token copies nothing. Its author tried a short prompt, and it worked.


# %%
class SlabCache(nanokv.cache.LayerCache):
    """Keys and values of one layer in a block with 32 places."""

    def __init__(self):
        self.length, self.keys, self.values = 0, None, None

    def append(self, k, v):
        B, Hk, T, D = k.shape
        if self.keys is None:
            self.keys = k.new_zeros(B, Hk, 32, D)
            self.values = v.new_zeros(B, Hk, 32, D)
        end = self.length + T
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def truncate(self, n):
        self.length = min(n, self.length)

    def fork(self):
        return copy.copy(self)

    def reorder(self, index):
        if self.keys is not None:
            self.keys = self.keys[index]


report = equality.check(SlabCache)
print(report)
failed = [case for case in report.cases if case.status == "failed"]

# %% tags=["hide-input"]
course.figure("07.failed", len(failed))
course.figure("07.token", failed[0].token)

# %% [markdown]
# Here <!--fig 07.failed-->6<!--/fig--> cases fail. The first one differs from token <!--fig 07.token-->32<!--/fig-->
# on, without an error. A single new token is written after the end of the block, into an empty slice. torch allows
# that: it broadcasts a row of length one to a slice of length zero. The position is still increased, and the newest
# tokens are lost. (The case "Beyond its capacity" passes, because it feeds fewer tokens than the slab can hold.) One of
# the five articles has the same bug in its contiguous cache.

# %% [markdown]
# ## What the articles say
#
# Two claims about bugs are wrong. We test them. The right one is on [the page of all claims](claims.md).

# %%
generator = torch.Generator().manual_seed(0)
# (B,H,T,D) each: ten tokens, one head
q, k, v = torch.randn(3, 1, 1, 10, 8, generator=generator)
# without a mask, as in the article
at_once = nanokv.attention.prefill_attention(q, k, v)
stepwise = torch.cat([nanokv.attention.prefill_attention(q[:, :, t : t + 1],
                                                         k[:, :, : t + 1],
                                                         v[:, :, : t + 1])
                      for t in range(10)], dim=2)
rows = (at_once - stepwise).abs().amax((0, 1, 3))  # (T,)
print("no mask, prompt at once against token by token:",
      " ".join(f"{float(gap):.2f}" for gap in rows))

H, D, t = 8, 16, 5
results = []
for axis_ in range(4):
    try:
        cached = torch.cat([torch.randn(1, H, 1, D) for _ in range(t)], dim=axis_)
        scores = torch.randn(1, H, 1, D) @ cached.transpose(-1, -2)
        results.append(f"axis {axis_}: scores {tuple(scores.shape)}")
    except RuntimeError as error:
        results.append(f"axis {axis_}: {type(error).__name__}")
print("; ".join(results))
usual = {name: found[name].seen_by
         for name in ("not_cleared", "wrong_axis", "start_pos_off_by_one",
                      "cached_queries")}
course.claim("1.3", "wrong",
             found=f"without a mask row 0 moves by {float(rows[0]):.2f}, the last by "
             f"{float(rows[-1]):.0e}")
course.claim("4.8", "wrong", found="; ".join(results))

# %% tags=["hide-input"]
course.confirm("4.10", "right", found="seen by: "
               + ", ".join(f"{name} {by}" for name, by in usual.items()))

# %% [markdown]
# ## Exercises
#
# **07.1** First, a tool for the hunt. `key` is a key before rotation, `rotated` is the same key as a cache stores it,
# both `(1,1,1,D)`. Which position does the key have? The position is below `100`. `rope_angles(config,
# torch.tensor([p]), key.dtype)` gives the angles of position `p`, and `apply_rope(key, angles)` rotates.


# %% tags=["exercise"]
def position_of(config, key, rotated):
    return ...


# %% tags=["solution"]
def position_of(config, key, rotated):
    def error(p):
        return float((apply_rope(key, rope_angles(config, torch.tensor([p]),
                                                  key.dtype)) - rotated).abs().max())

    return min(range(100), key=error)


# %%
course.check("07.1", position_of)

# %% [markdown]
# **07.2** A cache has a bug, and you have the trace of a run: a small random model reads a prompt of `24` tokens in
# chunks of `8`, then single tokens. `right` holds the forward passes of the right code, `seen` the passes with the
# broken cache. Which bug is it? Begin with the printed table. `gap(i, layer, operation)` gives the difference of every
# token of pass `i`. `seen[i].values[layer, "k_norm"]` and `"rope_k"`, both `(B,T,Hk,D)`, are the keys before and after
# rotation.

# %%
case = course.case("07.2")
right, seen = trace(case)


def gap(i, layer, operation):
    """max |Δ| of every token of pass i; inf where the broken run never came to this
    operation."""
    # (B,T,…)
    a, b = seen[i].values.get((layer, operation)), right[i].values[layer, operation]
    if a is None:
        return [float("inf")] * b.shape[1]
    return (a - b).flatten(2).abs().amax((0, 2)).tolist()


print("suspects:", ", ".join(SUSPECTS), "\n")
for i in range(len(right)):
    for operation in ("rope_k", "cached_v", "attention"):
        print(f"tokens from {right[i].start:>2}, layer 0, {operation:<10}",
              " ".join(f"{x:.0e}" for x in gap(i, 0, operation)))

# %% tags=["exercise"]
culprit = ...

# %% tags=["solution"]
# keys are right; all tokens of a later chunk are wrong but its last; single ones are
# right
culprit = "no_mask_on_chunk"

# %%
course.check("07.2", culprit)

# %% [markdown]
# **07.3** Two bugs change no value, but cost memory. A layer has `H` query heads and `Hk` KV heads. By which factor do the bytes of a
# cache grow, first, if queries are cached too, and second, if KV heads are repeated for all query heads before they are
# cached? Return both.


# %% tags=["exercise"]
def times_the_bytes(H, Hk):
    return ..., ...


# %% tags=["solution"]
def times_the_bytes(H, Hk):
    return (H + 2 * Hk) / (2 * Hk), H / Hk


# %%
course.check("07.3", times_the_bytes)
print("measured:", *(found[name].bytes[1] / found[name].bytes[0]
                     for name in ("cached_queries", "repeated_before_caching")))

# %% [markdown]
# **07.4** Write a test that notices more bugs. It gets a small random model and raises an error if something is wrong.
# It may use every public function, such as `nanokv.score`, `make_cache`, `prefill`, `decode`, `cache.truncate`,
# `cache.nbytes`, `generate_padded`. The score lists the survivors, and for each the situation in which it is visible. A
# test that fails on the right code raises a false alarm and scores 0.

# %%
print(f"wanted: {WANTED} of {len(faults.FAULTS)}")


# %% tags=["exercise"]
def my_test(model):
    return ...


# %% tags=["solution"]
def my_test(model):
    def equal(logits, ids):
        assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)

    for seed in (0, 20):  # the second request must not see the first
        ids = torch.arange(40)[None] + seed % 7 + 2  # (1,40): more than 32 positions
        cache, other = (nanokv.make_cache("dict", model.config) for _ in range(2))
        equal(nanokv.prefill(model, ids[:, :7], cache, start_pos=0), ids[:, :7])
        # a chunk after another
        equal(nanokv.prefill(model, ids[:, 7:30], cache, start_pos=7), ids[:, :30])
        # another request in between
        nanokv.prefill(model, ids[:, 5:15], other, start_pos=0)
        nanokv.prefill(model, ids[:, :4], cache, start_pos=30)  # a guess, taken back
        cache.truncate(30)
        for at in range(30, 40):
            equal(nanokv.decode(model, ids[:, at : at + 1], cache, start_pos=at),
                  ids[:, : at + 1])
        c = model.config
        values = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 40
        assert cache.nbytes == values * model.embed_tokens.weight.element_size()


# %%
course.check("07.4", my_test)

# %% [markdown]
# **07.5** Fix the cache of Experiment 5. It must still write in place, truncate, fork and reorder. The check runs the
# suite.

# %% tags=["exercise"]
Mended = ...  # class Mended(SlabCache): …


# %% tags=["solution"]
class Mended(SlabCache):
    def append(self, k, v):
        end = self.length + k.shape[2]
        # a block of twice the size
        while self.keys is not None and end > self.keys.shape[2]:
            self.keys, self.values = (torch.cat((x, torch.zeros_like(x)), dim=2)
                                      for x in (self.keys, self.values))
        return super().append(k, v)

    def fork(self):
        other = copy.copy(self)
        if self.keys is not None:
            other.keys, other.values = self.keys.clone(), self.values.clone()
        return other

    def reorder(self, index):
        if self.keys is not None:
            self.keys, self.values = self.keys[index], self.values[index]


# %%
course.check("07.5", Mended)

# %% [markdown]
# ## Quiz

# %%
course.quiz("07")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "b", "a", "c"

# %%
course.answer("07.q1", q1)
course.answer("07.q2", q2)
course.answer("07.q3", q3)

# %% [markdown]
# ## Further reading
#
# - `nanokv/lab/faults/catalogue.py`: every bug as code, with a link to its public thread;
#   `nanokv/lab/faults/smallest.py`: the shortest test for each bug. `nanokv/lab/study/equality.py`: the suite.
# - DeMillo, Lipton and Sayward, [Hints on test data selection](https://doi.org/10.1109/C-M.1978.218136): the origin of
#   grading tests by mutants.
#
# ## Next
#
# A cache that is right still costs memory. In notebook [08](08_how_much_memory.ipynb) you compute its bytes exactly.

# %% tags=["skip"]
course.progress()
