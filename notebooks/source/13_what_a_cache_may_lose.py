# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 · What a cache may lose
#
# This notebook is about two ways to serve more requests from the same memory: drop old tokens, and store numbers with
# fewer bits. Both always change the numbers that a model reads, so you need a way to notice the damage. At the end you
# build a cache, a store or a model yourself, and it is tested by the suite that tested every cache of this course.
#
# ## What you will be able to do
#
# - say which tokens a [sliding window](glossary.md#sliding-window) keeps and loses, and which measurement does not show
#   the loss;
# - choose how keys and values are [quantized](glossary.md#quantization), and say why keys and values need different
#   methods;
# - say what a mean over all tokens hides, and find the worst token instead;
# - choose a tolerance and justify it.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `S` keys that a query may see, the cached ones
# included, `H` query heads, `Hk` KV heads, `D` numbers of a head, `V` entries of the
# vocabulary ([all letters](glossary.md#letters)).

# %%
import torch

import nanokv
from nanokv import course
from nanokv.lab.study.quality import Scheme, log_likelihood, measure, measure_cache

model, tokenizer = course.start("13")
c = model.config


def chat_ids(*messages, open=True):
    """Ids of a conversation, user first; open: the assistant is to speak next."""
    roles = ("user", "assistant") * len(messages)
    said = [{"role": role, "content": text} for role, text in zip(roles, messages)]
    return tokenizer.encode(tokenizer.render(said, add_generation_prompt=open))


# %% [markdown]
# ## Predict
#
# In a conversation of some 340 tokens, a name is given at the beginning and asked for at the end. One cache keeps only
# the last 64 tokens, another only the last 256. By how many percent is the longer window better, in
# [perplexity](glossary.md#perplexity) over the whole conversation?

# %% tags=["exercise"]
better = ...  # percent

# %% tags=["solution"]
better = 30  # a common first guess: four times the memory must be worth something

# %%
course.predict("13.a", better, unit="percent", signed=True)

# %% [markdown]
# Second: keys and values are stored in 2 bits instead of 32. By how many percent does the perplexity of the
# conversation rise?

# %% tags=["exercise"]
worse = ...  # percent

# %% tags=["solution"]
worse = 50  # a common first guess: four steps cannot be enough

# %%
course.predict("13.b", worse, unit="percent", signed=True)

# %% [markdown]
# ## Experiment 1: drop old tokens
#
# The sliding cache keeps the last `window` positions, so its memory stops growing. With `sinks` it also keeps the first
# few tokens: large models put much of their attention there, and fail without them. Here is a conversation in which a
# name is given at the very beginning and asked for at the very end. We make the window smaller and observe two things:
# the perplexity of the conversation, and the name.

# %%
talk = [
    "My name is Zorbla.", "So your name is Zorbla.", "I have a cat called Miso.",
    "So your cat is called Miso.",
    "What is 12 + 30?", "12 + 30 = 42.", "Count from 3 to 14.",
    "3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14.",
    "Tell me a story.", "The fox had a dream about a shed and told the owl. They "
    "wanted a cork, but it was high up in a tree. The fox asked the owl for help. Then "
    "the cork began to shine, and all was well.",
    "What is a KV cache?", "A KV cache stores the keys and values of all past tokens, "
    "so that they are not computed again "
    "for every new token.",
    "Reverse the list: apple, pear, plum.", "Reversed: plum, pear, apple.",
    "What is my name?", "Your name is Zorbla.",
]
# a large model takes a second for each reading of the whole
talk = talk[: 2 * course.sized(7, 2)] + talk[-2:]
# (1,T)
whole = torch.tensor([chat_ids(*talk, open=False)])[:, : c.max_position_embeddings]
last_question = chat_ids(*talk[:-1])[-c.max_position_embeddings + 16 :]
T = whole.shape[1]
# nats per token
base = -float(log_likelihood(nanokv.score(model, whole), whole).mean())


def perplexity(cache):
    return float(torch.tensor(base - float(measure_cache(model, whole,
                                                         cache).mean())).exp())


full = perplexity(nanokv.make_cache("dict", c))
windows = [*(window for window in (16, 32, 64, 128, 256) if window < T), T]
ppl, bytes_held, recalled = {0: [], 4: []}, [], []
for window in windows:
    for sinks in ppl:
        cache = nanokv.make_cache("sliding", c, window=window, sinks=sinks)
        ppl[sinks].append(perplexity(cache))
    bytes_held.append(cache.nbytes)
    cache = nanokv.make_cache("sliding", c, window=window)
    answer = tokenizer.text_of(list(nanokv.generate(model, last_question, cache,
                                                    max_new_tokens=12)))
    recalled.append("Zorbla" in answer)
    print(f"window {window:>3}: perplexity {ppl[0][-1]:6.3f}, with 4 sinks "
          f"{ppl[4][-1]:6.3f}, {bytes_held[-1] / 2**20:5.2f} MiB, {answer!r}")
gain = 100 * (1 - ppl[0][-2] / ppl[0][2])  # from 64 to 256
course.reveal("13.a", gain)

# %% tags=["hide-input"]
course.figure("13.tokens", T)
course.figure("13.full", full)
course.figure("13.w64", ppl[0][2])
course.figure("13.w256", ppl[0][-2])
course.figure("13.w16", ppl[0][0])
course.figure("13.w16sinks", ppl[4][0])
course.figure("13.gain", abs(gain))
course.figure("13.recalled", sum(recalled[:-1]))
course.figure("13.whole", sum(recalled[-1:]))
fig, (left, right) = course.subplots(1, 2, width=9.5)
for sinks, mark in ((0, "o-"), (4, "s--")):
    left.plot(windows, ppl[sinks], mark, label=f"{sinks} sinks",
              color=course.COLORS[sinks and 3])
for window, known, value in zip(windows, recalled, ppl[0]):
    left.annotate("name known" if known else "forgotten", (window, value),
                  textcoords="offset points",
                  xytext=(0, -15 if known else 9), ha="center", fontsize=7,
                  color=course.COLORS[2] if known else course.COLORS[1])
left.set(xscale="log", title="how well the conversation is predicted",
         xlabel="window, tokens", ylabel="perplexity",
         ylim=(0.8 * full, 1.15 * max(ppl[0] + ppl[4])))
left.set_xticks(windows[:-1], windows[:-1])
left.minorticks_off()
left.legend()
right.plot(windows, [size / 2**20 for size in bytes_held], "o-", color=course.COLORS[0])
right.set(title="bytes at the end", xlabel="window, tokens", ylabel="MiB", ylim=0)
known = [window for window, yes in zip(windows, recalled) if yes]
course.show(fig, alt=f"Left: perplexity falls from {ppl[0][0]:.2f} at a window of "
            f"{windows[0]} to {ppl[0][2]:.2f} at {windows[2]}, moves little until "
            f"{windows[-2]} ({ppl[0][-2]:.2f}), and is {full:.2f} without a window. "
            f"The name is recalled with windows {known} only. Right: the bytes are "
            "proportional to the window.")

# %% [markdown]
# The conversation has <!--fig 13.tokens-->340<!--/fig--> tokens. From a window of 64 to one of 256, memory grows four
# times. Perplexity goes from <!--fig 13.w64-->2.58<!--/fig--> to <!--fig 13.w256-->2.43<!--/fig-->, a change
# of <!--fig 13.gain-->5.6<!--/fig--> percent. That looks as if the earlier text mattered little. But it
# contains the name: <!--fig 13.whole-->1<!--/fig--> window recalls it, the one that reaches the first line,
# and <!--fig 13.recalled-->0<!--/fig--> of the smaller ones do. With the smaller ones, the model answers fluently and
# politely that it does not know the name. Perplexity falls further, to <!--fig 13.full-->2.14<!--/fig-->, only without
# a window. The perplexities of the smaller windows do not show that the name was lost. So test a cache that drops
# tokens with questions about the dropped text.
#
# Sinks hardly help this model: at a window of 16, perplexity is <!--fig 13.w16-->3.32<!--/fig--> without them
# and <!--fig 13.w16sinks-->3.27<!--/fig--> with them. Papers report a large gain for large models, which were trained
# for long on long texts. SmolLM2-135M behaves as in the papers: on English prose, a window of 64 with four sinks is
# better than one of 256 without (docs/real-models.md has the command). So measure such methods on your own model.

# %% [markdown]
# ## Experiment 2: fewer bits
#
# To store a group of numbers in 4 bits, take the smallest and the largest of the group, divide the range between them
# into 15 steps, and store the nearest step of each number. Which numbers should form a group? For keys `(B,Hk,T,D)`
# there are two choices: all channels of one *token*, or one *channel* of several tokens. `nanokv.lab.study.quality`
# rounds keys or values before attention reads them. It measures two things: the error of the numbers, and how much the
# log-likelihood of each token changes.

# %%
bits = (8, 4, 2)
schemes = {
    "keys, a scale per "
    "channel": lambda b, **more: Scheme(k_bits=b, v_bits=8, k_scale="channel", **more),
    "keys, a scale per "
    "token": lambda b, **more: Scheme(k_bits=b, v_bits=8, k_scale="token", **more),
    "values, a scale per token": lambda b, **more: Scheme(k_bits=8, v_bits=b, **more),
}
error, shift, planted = {}, {}, {}
for name, scheme in schemes.items():
    plain = [measure(model, whole, scheme(b)) for b in bits]
    with_outlier = [measure(model, whole, scheme(b, outliers=(3,))) for b in bits]
    error[name] = [sum(q.values if name[0] == "v" else q.keys) / c.num_hidden_layers
                   for q in plain]
    shift[name] = [q.mean_abs for q in plain]
    planted[name] = [q.mean_abs for q in with_outlier]
    numbers = zip(bits, error[name], shift[name])
    print(f"{name:<24}",
          "  ".join(f"{b} bits: error {e:5.1%} moves {s:.4f}" for b, e, s in numbers))
k_channel, k_token, v_token = schemes

# %% tags=["hide-input"]
course.figure("13.k8", 100 * error[k_channel][0])
course.figure("13.kt8", 100 * error[k_token][0])
course.figure("13.v8", 100 * error[v_token][0])
course.figure("13.move8", shift[k_channel][0])
course.figure("13.move4", shift[k_channel][1])
course.figure("13.move2", shift[k_channel][2])
course.figure("13.planted", planted[k_token][1] / planted[k_channel][1])
fig, axes = course.subplots(1, 3, width=10.5, height=3.1)
titles = (
    "relative error of the numbers",
    "nats that a token moves",
    "one large channel planted",
)
for axis, values, title in zip(axes, (error, shift, planted), titles):
    for i, (name, line) in enumerate(values.items()):
        axis.plot(range(3), line, "os^"[i] + "-", color=course.COLORS[(0, 1, 2)[i]],
                  label=name)
    axis.set(yscale="log", title=title, xlabel="bits")
    axis.set_xticks(range(3), bits)
axes[2].set_ylim(axes[1].get_ylim()[0], 2 * max(max(line) for line in planted.values()))
axes[1].set_ylim(axes[2].get_ylim())
axes[0].legend(fontsize=8)
course.show(fig, alt="Three plots against bits, log scale. Error: "
            + "; ".join(f"{name} {line[0]:.1%}, {line[1]:.1%}, {line[2]:.0%}"
                        for name, line in error.items())
            + ". At 4 bits a token moves by "
            + ", ".join(f"{line[1]:.3f}" for line in shift.values()) + " nats. With "
            "one channel of the keys made 20 times larger it moves by "
            f"{planted[k_token][1]:.2f} with a scale per token, by "
            f"{planted[k_channel][1]:.3f} with a scale per channel.")

# %% [markdown]
# In 8 bits, keys are off by <!--fig 13.k8-->0.3<!--/fig--> percent with a scale per channel and
# by <!--fig 13.kt8-->0.55<!--/fig--> with a scale per token; values are off by <!--fig 13.v8-->0.5<!--/fig-->. With a
# scale per channel, the log-likelihood of a token changes on average by <!--fig 13.move8 x1.5-->0.0012<!--/fig--> nats
# if keys have 8 bits, by <!--fig 13.move4 x1.5-->0.012<!--/fig--> with 4, and
# by <!--fig 13.move2 x1.5-->0.07<!--/fig--> with 2. In large models a few channels of the keys are far larger than the
# rest. The third panel adds one such channel. Now the scale of a *token* is the scale of its largest channel, and too
# few steps are left for the other channels. At 4 bits, log-likelihoods change <!--fig 13.planted x1.5-->10<!--/fig-->
# times as much as with a scale per channel, which the large channel does not affect. Values have no such channels. So
# keys are quantized by channel and values by token. A block of keys can be rounded only when it is complete, so the
# newest tokens stay exact.

# %% [markdown]
# So far every number was rounded. A real cache keeps its newest tokens exact: 32 tokens, and the block that is not yet
# full. In a conversation as short as this one they are a large part. So we compare two caches for each number of bits:
# the usual one, and one with `residual=0`, which rounds every block as soon as it is full. The last two columns are
# about one token, the one with the largest change.

# %%
exact_log_p = log_likelihood(nanokv.score(model, whole), whole)
total, saved, moved = {}, {}, {}
for b in bits:
    for residual in (32, 0):
        cache = nanokv.make_cache("quantized", c, bits=b, residual=residual)
        change = measure_cache(model, whole, cache)[0]  # (T-1,) nats
        total[b, residual] = float((-(exact_log_p + change)).mean().exp())
        saved[b, residual] = nanokv.costs.kv_bytes(c, T, 1, 4) / cache.nbytes
        moved[b, residual] = float(change.abs().max())
        print(f"{b} bits, newest exact: {residual:>2}   perplexity "
              f"{total[b, residual]:.3f} (exact {full:.3f})   worst token "
              f"{moved[b, residual]:.3f} nats   {saved[b, residual]:4.1f} times "
              "smaller")
rise = 100 * (total[2, 0] / full - 1)
course.reveal("13.b", rise)

# %% tags=["hide-input"]
course.figure("13.rise", abs(rise))
course.figure("13.smaller", saved[4, 32])
course.figure("13.usual2", moved[2, 32])
course.figure("13.worst8", moved[8, 0])
course.figure("13.worst2", moved[2, 0])
course.figure("13.unlikely", float(torch.tensor(moved[2, 0]).exp()))
fig, axes = course.subplots(1, 2, width=9.5, height=2.9)
for residual, mark in ((32, "o-"), (0, "s--")):
    name = f"{residual} newest exact" if residual else "every full block rounded"
    for axis, values in zip(axes, (total, moved)):
        axis.plot(range(3), [values[b, residual] for b in bits], mark, label=name)
axes[0].axhline(full, color="gray", linestyle=":")
axes[0].set(title="perplexity: a mean of all tokens", ylim=(0.9 * full, 1.1 * full))
axes[1].set(title="the token that moved most", ylabel="nats", yscale="log")
for axis in axes:
    axis.set(xlabel="bits")
    axis.set_xticks(range(3), bits)
axes[1].legend(fontsize=8)
course.show(fig, alt="Two plots against 8, 4 and 2 bits. Left: perplexity stays near "
            "the dotted line of the exact cache, "
            + ", ".join(f"{total[b, 0]:.2f}" for b in bits) + f" against {full:.2f}. "
            f"Right, on a log scale: the token that "
            "moved most, " + ", ".join(f"{moved[b, 0]:.2f}" for b in bits)
            + " nats if every full block is rounded and "
            + ", ".join(f"{moved[b, 32]:.3f}" for b in bits) + " if the newest tokens "
            "are exact.")

# %% [markdown]
# In the mean, even 2 bits seem to cost little: perplexity changes by less than <!--fig 13.rise below-->3<!--/fig-->
# percent. Some tokens became more likely and some less likely, and in the mean these changes cancel. A single token
# shows the damage: its log-likelihood changed by <!--fig 13.worst2 x1.5-->4.9<!--/fig--> nats, that is, its probability
# by a factor of <!--fig 13.unlikely x1.5-->130<!--/fig-->. In 8 bits the worst token changes
# by <!--fig 13.worst8 x2-->0.028<!--/fig-->. With the newest 32 tokens exact it
# is <!--fig 13.usual2 x1.5-->1.2<!--/fig--> for 2 bits: most of the attention goes to recent tokens, and that is why
# such caches keep them exact. Such a cache in 4 bits is <!--fig 13.smaller-->3.6<!--/fig--> times smaller than in 32.
# It is not eight times smaller, because the scales take memory and the newest tokens are exact.
#
# So 2 bits do have a cost, but the mean hardly shows it, just as perplexity did not show the lost name in
# Experiment 1.

# %% [markdown]
# ## Experiment 3: a rotation instead of a scale
#
# A scale must be found and stored. TurboQuant does without: it rotates each vector at random, and after that the
# numbers of *every* vector look like draws from a bell curve. So the best levels are known in advance (Lloyd and Max),
# and only the norm is stored. In nanokv it is `--cache quantized:keys=lloyd`. First: how large is the error on random
# vectors of length 1? Then we take the keys of layer 0 from a cache and add the same vector to all of them, a *bias*,
# larger and larger. It carries no information, because it shifts all scores of a query alike. We print the error in
# parts of what the keys were before.

# %%
from nanokv.cache.codes import lloyd_max_error
from nanokv.cache.schemes import Channel, Lloyd, Token


def round_trip_of(scheme, x):
    """Keys (1,Hk,T,D) as they come back from the codes, a block of 32 tokens each."""
    blocks = x.unflatten(2, (-1, 32))  # (1,Hk,blocks,32,D)
    codes, *scales = scheme.encode(blocks)
    per_token = []  # a row per token, also of the scales of a block
    for scale in scales:
        per_token.append(scale.repeat_interleave(x.shape[2] // scale.shape[2], dim=2))
    return scheme.decode(codes, *per_token)


random = torch.Generator().manual_seed(0)
units = torch.randn(1, 1, 4096, 64, generator=random)
units = units / units.norm(dim=-1, keepdim=True)
lloyd_error = {}
for b in (1, 2, 3, 4):
    rounded = round_trip_of(Lloyd(b, seed=0), units)
    lloyd_error[b] = float((rounded - units).square().sum(-1).mean())
    print(f"{b} bits: squared error {lloyd_error[b]:.4f}, in theory "
          f"{lloyd_max_error(b):.4f}")

filled = nanokv.make_cache("dict", c)
nanokv.prefill(model, whole, filled)
keys = filled[0]["key"].float()[:, :, : T // 32 * 32]  # (1,Hk,T,D), whole blocks
direction = torch.randn(c.head_dim, generator=random)
direction = direction / direction.norm()
norms = (0, 1, 3, 10, 30)  # of the bias, in norms of a key
four_bits = {"a scale per channel": Channel(4), "a scale per token": Token(4),
             "rotated (lloyd)": Lloyd(4, seed=0)}
damage = {name: [] for name in four_bits}
for norm in norms:
    bias = direction * norm * keys.norm(dim=-1).mean()
    for name, scheme in four_bits.items():
        lost = round_trip_of(scheme, keys + bias) - bias - keys
        damage[name].append(float(lost.norm() / keys.norm()))
for name, line in damage.items():
    print(f"{name:<20}", "  ".join(f"bias {norm:>2}: {100 * value:6.1f} %"
                                   for norm, value in zip(norms, line)))

# %% tags=["hide-input"]
course.figure("13.lloyd4", lloyd_error[4])
course.figure("13.rotated", 100 * damage["rotated (lloyd)"][0])
course.figure("13.rotated30", 100 * damage["rotated (lloyd)"][-1])
course.figure("13.channel30", 100 * damage["a scale per channel"][-1])
course.figure("13.token30", 100 * damage["a scale per token"][-1])
fig, axis = course.subplots(width=7, height=3)
for i, (name, line) in enumerate(damage.items()):
    axis.plot(range(len(norms)), line, "os^"[i] + "-", label=name,
              color=course.COLORS[(0, 1, 3)[i]])
axis.set(yscale="log", xlabel="bias of all keys, in norms of a key",
         ylabel="error ÷ keys without bias", title="keys in 4 bits, and a bias")
axis.set_xticks(range(len(norms)), norms)
axis.legend(fontsize=8)
course.show(fig, alt="Three lines on a log scale against the size of a bias, from none "
            f"to {norms[-1]} times a key. "
            + "; ".join(f"{name}: {line[0]:.2g} to {line[-1]:.2g}"
                        for name, line in damage.items()) + ".")

# %% [markdown]
# On random vectors the squared error is what theory says, <!--fig 13.lloyd4-->0.0091<!--/fig--> with 4 bits. On the
# keys without a bias, the rotation loses <!--fig 13.rotated-->9.7<!--/fig--> percent. But its error is a fixed part of
# the *norm*, and the norm now contains the bias. With a bias of 30 norms the error
# is <!--fig 13.rotated30 x1.5-->260<!--/fig--> percent of the keys: nothing is left of them. A scale per token
# loses <!--fig 13.token30 x1.5-->240<!--/fig--> percent, because its range covers the whole bias. A scale per channel
# loses <!--fig 13.channel30-->5.0<!--/fig--> percent, as without a bias: its offset takes the bias away. Such models
# exist. The key projections of Qwen2.5 have biases with norms up to 390. There, `lloyd` in 4 bits raises the perplexity
# from 72 to 100 and more, and a scale per channel does not change it (docs/quantization.md). So a small error on random
# vectors says little about your model.

# %% [markdown]
# ## Experiment 4: which difference is a bug?
#
# Every cache of nanokv reads the same conversation in [chunks](glossary.md#chunk) of eight. How much does the
# log-likelihood of the worst token change, and how many bytes does the cache save?

# %%
kinds = {name: {} for name in nanokv.CACHES if name not in ("sliding", "quantized")}
kinds |= {"quantized, 8 bits": {"bits": 8}, "quantized, 4 bits": {"bits": 4},
          "quantized, 2 bits": {"bits": 2}, "sliding, 64": {"window": 64}}
worst = {}
for name, options in kinds.items():
    cache = nanokv.make_cache(name.split(",")[0], c, capacity=T, **options)
    worst[name] = float(measure_cache(model, whole, cache).abs().max())
    print(f"{name:<18} largest change {worst[name]:8.1e} nats   "
          f"{cache.nbytes / 2**20:5.2f} MiB")
exact_kinds = [name for name in worst if "," not in name]

# %% tags=["hide-input"]
course.figure("13.exact", max(worst[name] for name in exact_kinds))
course.figure("13.q8", worst["quantized, 8 bits"])
fig, axis = course.subplots(width=7.5, height=3.3)
axis.barh(list(worst), list(worst.values()),
          color=[course.COLORS[0 if name in exact_kinds else 1] for name in worst])
axis.axvline(nanokv.equality.TOLERANCE, color="gray", linestyle=":")
axis.set(xscale="log", xlabel="largest change of a token's log-likelihood, nats (log)",
         title="exact, rounded, forgetful")
axis.invert_yaxis()
axis.grid(axis="y", visible=False)
course.show(fig, alt="Bars on a log scale. All caches that keep exact values stay "
            f"below {1.1 * max(worst[name] for name in exact_kinds):.1e}; " + ", ".join(
            f"{name}: {worst[name]:.0e}" for name in worst if name not in exact_kinds)
            + f". The dotted line at {nanokv.equality.TOLERANCE:.0e} is the tolerance "
            "of the equality suite.")

# %% [markdown]
# There is a wide gap. Sums in a different order change the log-likelihood by at
# most <!--fig 13.exact x10-->1e-5<!--/fig-->. Caches that change the stored *values* change it by at
# least <!--fig 13.q8 x2-->2e-2<!--/fig-->. The tolerance must lie in this gap, here `1e-4`: small enough to catch a
# wrong position, large enough to accept a different order of sums. For a cache that rounds its values there is no such
# tolerance. For such a cache, measure the likelihood, and check the answers that matter to you.

# %% [markdown]
# ## What the articles say
#
# Here are two misleading claims of articles, and one of the abstract of TurboQuant. The other claims that this notebook checks are on [the page of all claims](claims.md).

# %%
cache = nanokv.make_cache("dict", c)
nanokv.prefill(model, whole[:, :8], cache)
kept = sorted(cache[0])
course.claim("1.17", "misleading", found=16 / (8 + 2 * 16 / 64))
course.claim("3.19", "misleading",
             found=f"a layer of the cache holds {' and '.join(kept)}")
course.claim("5.3", "misleading",
             found=f"at a bias of {norms[-1]} norms, rotated keys in 4 bits are off by "
             f"{damage['rotated (lloyd)'][-1]:.1f} times their size")

# %% tags=["hide-input"]
course.confirm("1.11", "misleading")
course.confirm("3.17", "right", found="the perplexity of the whole conversation took "
               "one forward and no cache")
course.confirm("5.1", "right", found=lloyd_max_error(4) * 4**4)
course.confirm("5.2", "right", found="tests/cache/test_cache_schemes.py, 200 seeds")
course.confirm("6.1", "right", found=f"damage {damage}")
course.confirm("6.2", "misleading", found=f"a token moved by {moved[2, 0]:.2f} nats")

# %% [markdown]
# ## Exercises
#
# **13.1** A sliding window has `w` positions and `s` sinks. The query at position `t` (counted from 0) sees its own
# position, the positions before it in the window, and the sinks. How many keys does it see? Which is the oldest
# position that it sees *besides* the sinks? Answer with a pair.

# %%
case = course.case("13.1")
print(f"w = {case.w}, s = {case.s}, t = {case.t}")

# %% tags=["exercise"]
count_and_oldest = ..., ...

# %% tags=["solution"]
count_and_oldest = case.w + case.s, case.t - case.w + 1

# %%
course.check("13.1", count_and_oldest)

# %% [markdown]
# **13.2** Values of 16 bits are stored in `bits` bits, with a scale and a zero point of 16 bits each for every group of
# `group` values. How many times smaller is the cache?

# %%
case = course.case("13.2")
print(f"bits = {case.bits}, group = {case.group}")

# %% tags=["exercise"]
smaller = ...

# %% tags=["solution"]
smaller = 16 / (case.bits + 2 * 16 / case.group)

# %%
course.check("13.2", smaller)

# %% [markdown]
# **13.3** Round a tensor to `2**bits` levels and back. Each line along the dimension `dim` is a group. Its smallest
# value becomes the lowest level, its largest value the highest. (For keys `(B,Hk,T,D)` and a scale per channel:
# `dim=2`.) No value may be off by more than half a step. No group here is constant.


# %% tags=["exercise"]
def round_trip(x, bits, dim):
    return ...


# %% tags=["solution"]
def round_trip(x, bits, dim):
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return ((x - low) / step).round() * step + low


# %%
course.check("13.3", round_trip)

# %% [markdown]
# ## Capstone
#
# **13.4** Pick one of three tasks, and hand in a pair: its name and your code. It has to pass `nanokv.equality` and a
# few checks of that task.
#
# - `("static", MyLayer)`: a class for one layer, derived from `nanokv.cache.LayerCache` and called as
#   `MyLayer(capacity)`, with `append`, `length` and `truncate`. It allocates its memory once: the keys of the first
#   layer must not move while tokens are added. Beyond the capacity it raises `nanokv.errors.CapacityError` before
#   anything is written.
# - `("prefix", MyStore)`: `MyStore(config, entries)` keeps at most `entries` caches and drops the least recently used
#   one first. `store.put(tokens, cache)` adds one. `store.get(tokens)` returns `(cache, n)`: an independent cache for
#   the caller, with the longest beginning of `tokens` that any entry shares, `n` tokens long, and at most all tokens
#   but one. If no entry shares a token, the cache is empty and `n = 0`.
# - `("mqa", convert)`: `convert(model)` returns a new model with *one* KV head, whose `k_proj` and `v_proj` are the
#   mean of the old ones over the heads. The old model stays unchanged. (The new model will give bad answers, because it
#   would need training. The suite only compares it with and without a cache.)

# %% tags=["exercise"]
my_work = ..., ...  # a name and your code

# %% tags=["solution"]
class MyLayer(nanokv.cache.LayerCache):
    def __init__(self, capacity):
        self.capacity, self.length, self.slabs = capacity, 0, None

    def append(self, k, v):
        end = self.length + k.shape[2]
        if end > self.capacity:
            message = f"{end} tokens do not fit into {self.capacity} slots"
            raise nanokv.errors.CapacityError(message)
        if self.slabs is None:
            B, Hk, _, D = k.shape
            self.slabs = [k.new_empty(B, Hk, self.capacity, D) for _ in "kv"]
        for slab, new in zip(self.slabs, (k, v)):
            slab[:, :, self.length : end] = new
        self.length = end
        return tuple(slab[:, :, :end] for slab in self.slabs)  # views

    def truncate(self, n):
        # what lies behind is written again before it is read
        self.length = min(n, self.length)


my_work = "static", MyLayer

# %%
course.check("13.4", my_work)

# %% [markdown]
# ## Quiz

# %%
course.quiz("13")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "c", "b", "a"

# %%
course.answer("13.q1", q1)
course.answer("13.q2", q2)
course.answer("13.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Xiao and others, [StreamingLLM](https://arxiv.org/abs/2309.17453): attention sinks, and the models that need them.
# - Liu and others, [KIVI](https://arxiv.org/abs/2402.02750): keys by channel, values by token.
# - Zandieh and others, [TurboQuant](https://arxiv.org/abs/2504.19874): rotate, then round to known levels.
# - Hugging Face, [KV cache quantization](https://huggingface.co/blog/kv-cache-quantization), which one of the articles
#   recommends.
# - `nanokv/cache/sliding.py`, `nanokv/cache/quantized.py`, `nanokv/lab/study/quality.py`.
#
# ## Next
#
# Even a smaller cache may be too large for one machine. In notebook [14](14_more_than_one_machine.ipynb) a model, its
# cache and a prompt are divided among several machines.

# %% tags=["skip"]
course.progress()
