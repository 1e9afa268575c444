# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Batches, eviction, fewer bits
#
# This notebook is about three ways to serve more from the same memory: answer several people at once, drop old
# tokens, and store numbers with fewer bits. Batching leaves the answers unchanged, if it is done right. The other two
# always change the numbers, and the question is how you would notice. At the end you build something of your own. The
# suite that tested every cache of this course then tests yours. And the parts that you wrote since notebook 01 become an
# engine that answers a chat.
#
# ## What you will be able to do
#
# - put prompts of different lengths into one [batch](glossary.md#batch), with the [padding](glossary.md#padding) on the
#   right side and every row at its own positions;
# - say what a [sliding window](glossary.md#sliding-window) keeps, what it loses, and which measurement does not show
#   the loss;
# - choose how keys and values are [quantized](glossary.md#quantization), and say why the two need different ways;
# - choose a tolerance and justify it;
# - put your own sampler, attention, cache and loop together into an engine that draws the tokens of nanokv.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `S` keys that a query may see, the cached ones
# included, `C` numbers of a hidden state, `H` query heads, `Hk` KV heads, `D` numbers of a head, `V` entries of the
# vocabulary ([all letters](glossary.md#letters)).

# %%
import time

import torch

import nanokv
from nanokv import course
from nanokv.cache.padded import PaddedCache
from nanokv.lab.study.quality import Scheme, log_likelihood, measure, measure_cache

model, tokenizer = course.start("12")
c = model.config


def chat_ids(*messages, open=True):
    """Ids of a conversation, user first; open: the assistant is to speak next."""
    roles = ("user", "assistant") * len(messages)
    said = [{"role": role, "content": text} for role, text in zip(roles, messages)]
    return tokenizer.encode(tokenizer.render(said, add_generation_prompt=open))


# %% [markdown]
# ## Predict
#
# Four prompts of different lengths share one tensor: the short ones are filled up with a padding token on the *right*.
# The loop is that of notebook 06, with a batch of four. How many of the four answers are the same as without a batch?

# %% tags=["exercise"]
unharmed = ...  # 0 to 4

# %% tags=["solution"]
unharmed = 4  # a common first guess: padding means nothing, so it does nothing

# %%
course.predict("12.a", unharmed, unit="answers")

# %% [markdown]
# Second: keys and values are stored in 4 bits instead of 32. By how many percent does the
# [perplexity](glossary.md#perplexity) of a conversation rise?

# %% tags=["exercise"]
worse = ...  # percent

# %% tags=["solution"]
worse = 20  # a common first guess: sixteen steps cannot be enough

# %%
course.predict("12.b", worse, unit="percent", signed=True)

# %% [markdown]
# ## Experiment 1: rows of different lengths
#
# A batch is a rectangle, but prompts have different lengths. We fill it up in three ways: on the right; on the left,
# without a mask; and on the left with a mask and with positions that begin where each row begins
# (`nanokv.generate_padded`).

# %%
questions = ["My name is Zorbla. What is my name?", "What is 12 + 30?", "Count from 3 to 9.", "Tell me a story."]
prompts = [chat_ids(question) for question in questions]
B, n = len(prompts), 12
pad = 0
longest = max(map(len, prompts))
ends = model.generation_config.eos_token_ids


def until_end(tokens):
    """Up to and with the first end token."""
    end = next((i for i, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:end]


def plain_loop(rows):
    """The loop of notebook 06 over a rectangle: (answers, logits that follow the prompts)."""
    cache, answers = nanokv.make_cache("dict", c, batch_size=B), [[] for _ in rows]
    logits = first = nanokv.prefill(model, rows, cache)
    for _ in range(n):
        token = logits.argmax(-1, keepdim=True)  # (B,1)
        for answer, id in zip(answers, token[:, 0].tolist()):
            answer.append(id)
        logits = nanokv.decode(model, token, cache, start_pos=cache.length)
    return [until_end(answer) for answer in answers], first


alone = [list(nanokv.generate(model, prompt, max_new_tokens=n)) for prompt in prompts]
alone_logits = torch.cat([nanokv.score(model, [prompt])[:, -1] for prompt in prompts])  # (B,V)

pads = [longest - len(prompt) for prompt in prompts]
on_the_right, right_logits = plain_loop([p + [pad] * k for p, k in zip(prompts, pads)])
on_the_left, left_logits = plain_loop([[pad] * k + p for p, k in zip(prompts, pads)])
padded = PaddedCache(nanokv.make_cache("dict", c, batch_size=B), pads)
masked_logits = nanokv.prefill(model, [[pad] * k + p for p, k in zip(prompts, pads)], padded, start_pos=padded.length)
masked = nanokv.generate_padded(model, prompts, max_new_tokens=n)

same, moved = {}, {}
for name, answers, logits in (("padded right", on_the_right, right_logits), ("left, no mask", on_the_left, left_logits),
                              ("left, masked", masked, masked_logits)):
    same[name] = sum(a == b for a, b in zip(answers, alone))
    moved[name] = float((logits - alone_logits).abs().max())
    print(f"{name:<14} {same[name]} of {B} answers as alone, logits off by {moved[name]:.0e}: ",
          " | ".join(tokenizer.text_of(answer) for answer in answers))
course.reveal("12.a", same["padded right"])

# %% tags=["hide-input"]
course.figure("12.right", same["padded right"])
course.figure("12.leftsame", same["left, no mask"])
course.figure("12.left", moved["left, no mask"])
course.figure("12.masked", moved["left, masked"])
from matplotlib.colors import ListedColormap

fig, axes = course.subplots(1, 2, width=10, height=2.4)
for axis, side in zip(axes, ("right: what follows the padding is read", "left: every row ends in the last column")):
    left = side.startswith("left")
    cells = torch.zeros(B, longest + 4)  # 0 padding, 1 prompt, 2 new
    cells[:, longest:] = 2
    for b, k in enumerate(pads):
        start = k if left else 0
        cells[b, start : start + len(prompts[b])] = 1
        for column in range(0, longest + 4, 3):
            position = column - k if left else column
            if position >= 0 and (left or column >= longest or column < len(prompts[b])):
                axis.text(column, b, position, ha="center", va="center", fontsize=7, color="white")
    axis.imshow(cells, cmap=ListedColormap(["#D0D0D0", course.COLORS[0], course.COLORS[2]]), aspect="auto", vmin=0, vmax=2)
    axis.grid(False)
    axis.set(title=side, xlabel="column", yticks=range(B), yticklabels=[f"row {b}" for b in range(B)])
course.show(fig, alt=f"Two rectangles of {B} rows: prompts blue, padding grey, new tokens green, with positions written "
            f"in some cells. Padded right, a gap of up to {max(pads)} grey cells lies between prompt and answer, and all "
            "answers begin at the same position. Padded left, prompt and answer touch, and each row counts from its own "
            "first token.")

# %% [markdown]
# Padded on the right, <!--fig 12.right-->1<!--/fig--> of four answers stays the same, that of the longest prompt. In
# all other rows the *last column* is padding, so the next token is chosen after the padding. Padded on the left without
# a mask, <!--fig 12.leftsame-->3<!--/fig--> answers are the same. That is worse, because the error is easily
# missed: the logits are off by <!--fig 12.left-->1.3<!--/fig-->, because every token also sees the padding. (The shifted positions alone would do no harm: notebook 06.) With the padding masked the difference is
# rounding, <!--fig 12.masked x5-->1e-5<!--/fig-->.
#
# The padding is computed and stored like tokens. `nanokv.generate_ragged` needs no padding: each row has its own cache,
# the rows are prefilled one by one, and they are decoded together. Why decode them together at all?

# %%
rows_at_once, rate = [1, 2, 4, 8, 16, 32], []
for rows in rows_at_once:
    cache = nanokv.make_cache("static", c, batch_size=rows, capacity=96)
    ids = torch.randint(0, c.vocab_size, (rows, course.sized(64, 8)))
    nanokv.prefill(model, ids, cache)
    seconds = []
    for _ in range(course.sized(24, 4)):
        begin = time.perf_counter()
        nanokv.decode(model, ids[:, :1], cache, start_pos=cache.length)
        seconds.append(time.perf_counter() - begin)
    rate.append(rows / min(seconds))

# %% tags=["hide-input"]
fig, axis = course.subplots(width=6, height=2.6)
axis.bar([str(rows) for rows in rows_at_once], rate, 0.6)
axis.set(xlabel="rows decoded together", ylabel="tokens per second", title="one model, many rows")
course.show(fig, alt="Bars of tokens per second: "
            + ", ".join(f"{value:.0f} with {rows}" for rows, value in zip(rows_at_once, rate)) + " rows decoded together.")
course.figure("12.batch", rate[-1] / rate[0])

# %% [markdown]
# Here <!--def-->32<!--/def--> rows give more than <!--fig 12.batch above-->3<!--/fig--> times as many tokens per second
# as one row: a step reads every weight once for all rows. The rows do *not* share their caches.

# %% [markdown]
# ## Experiment 2: drop what is old
#
# The sliding cache keeps the last `window` positions, so its memory stops growing. With `sinks` it also keeps the first
# few tokens: large models put much of their attention there, and fail without them. Here is a conversation in which a
# name is told at the very beginning and asked for at the very end. Make the window smaller and watch two things: the
# perplexity of the conversation, and the name.

# %%
talk = [
    "My name is Zorbla.", "So your name is Zorbla.", "I have a cat called Miso.", "So your cat is called Miso.",
    "What is 12 + 30?", "12 + 30 = 42.", "Count from 3 to 14.", "3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14.",
    "Tell me a story.", "The fox had a dream about a shed and told the owl. They wanted a cork, but it was high up in a "
    "tree. The fox asked the owl for help. Then the cork began to shine, and all was well.",
    "What is a KV cache?", "A KV cache stores the keys and values of all past tokens, so that they are not computed again "
    "for every new token.",
    "Reverse the list: apple, pear, plum.", "Reversed: plum, pear, apple.",
    "What is my name?", "Your name is Zorbla.",
]
talk = talk[: 2 * course.sized(7, 2)] + talk[-2:]  # a large model takes a second for each reading of the whole
whole = torch.tensor([chat_ids(*talk, open=False)])[:, : c.max_position_embeddings]  # (1,T)
last_question = chat_ids(*talk[:-1])[-c.max_position_embeddings + 16 :]
T = whole.shape[1]
base = -float(log_likelihood(nanokv.score(model, whole), whole).mean())  # nats per token


def perplexity(cache):
    return float(torch.tensor(base - float(measure_cache(model, whole, cache).mean())).exp())


full = perplexity(nanokv.make_cache("dict", c))
windows = [*(window for window in (16, 32, 64, 128, 256) if window < T), T]
ppl, bytes_held, recalled = {0: [], 4: []}, [], []
for window in windows:
    for sinks in ppl:
        cache = nanokv.make_cache("sliding", c, window=window, sinks=sinks)
        ppl[sinks].append(perplexity(cache))
    bytes_held.append(cache.nbytes)
    cache = nanokv.make_cache("sliding", c, window=window)
    answer = tokenizer.text_of(list(nanokv.generate(model, last_question, cache, max_new_tokens=12)))
    recalled.append("Zorbla" in answer)
    print(f"window {window:>3}: perplexity {ppl[0][-1]:6.3f}, with 4 sinks {ppl[4][-1]:6.3f}, "
          f"{bytes_held[-1] / 2**20:5.2f} MiB, {answer!r}")

# %% tags=["hide-input"]
course.figure("12.tokens", T)
course.figure("12.full", full)
course.figure("12.w64", ppl[0][2])
course.figure("12.w256", ppl[0][-2])
course.figure("12.w16", ppl[0][0])
course.figure("12.w16sinks", ppl[4][0])
course.figure("12.gain", abs(100 * (1 - ppl[0][-2] / ppl[0][2])))
course.figure("12.recalled", sum(recalled[:-1]))
course.figure("12.whole", sum(recalled[-1:]))
fig, (left, right) = course.subplots(1, 2, width=9.5)
for sinks, mark in ((0, "o-"), (4, "s--")):
    left.plot(windows, ppl[sinks], mark, label=f"{sinks} sinks", color=course.COLORS[sinks and 3])
for window, known, value in zip(windows, recalled, ppl[0]):
    left.annotate("name known" if known else "forgotten", (window, value), textcoords="offset points",
                  xytext=(0, -15 if known else 9), ha="center", fontsize=7, color=course.COLORS[2] if known else course.COLORS[1])
left.set(xscale="log", title="how well the conversation is predicted", xlabel="window, tokens", ylabel="perplexity",
         ylim=(0.8 * full, 1.15 * max(ppl[0] + ppl[4])))
left.set_xticks(windows[:-1], windows[:-1])
left.minorticks_off()
left.legend()
right.plot(windows, [size / 2**20 for size in bytes_held], "o-", color=course.COLORS[0])
right.set(title="bytes at the end", xlabel="window, tokens", ylabel="MiB", ylim=0)
known = [window for window, yes in zip(windows, recalled) if yes]
course.show(fig, alt=f"Left: perplexity falls from {ppl[0][0]:.2f} at a window of {windows[0]} to {ppl[0][2]:.2f} at "
            f"{windows[2]}, hardly moves until {windows[-2]} ({ppl[0][-2]:.2f}), and is {full:.2f} without a window. The "
            f"name is recalled with windows {known} only. Right: the bytes are proportional to the window.")

# %% [markdown]
# The conversation has <!--fig 12.tokens-->340<!--/fig--> tokens. From a window of 64 to one of 256, memory grows four
# times. Perplexity goes from <!--fig 12.w64-->2.34<!--/fig--> to <!--fig 12.w256-->2.31<!--/fig-->, a change
# of <!--fig 12.gain-->1.4<!--/fig--> percent. That looks as if nothing important stood further back. But the name
# stands there: <!--fig 12.whole-->1<!--/fig--> window recalls it, the one that reaches the first line,
# and <!--fig 12.recalled-->0<!--/fig--> of the smaller ones do. With those, the model answers fluently and politely that
# it was not told. Perplexity falls further, to <!--fig 12.full-->1.97<!--/fig-->, only without a window. The figures of
# the smaller windows do not say which of them lost the name. So test a cache that drops tokens with questions about what it
# may have dropped.
#
# Sinks do not help this model: at a window of 16, perplexity is <!--fig 12.w16-->2.9<!--/fig--> without them
# and <!--fig 12.w16sinks-->3.3<!--/fig--> with them. Papers report the opposite for large models, which were trained
# for long on long texts. SmolLM2-135M behaves as in the papers: on English prose, a window of 64 with four sinks is
# better than one of 256 without (docs/real-models.md has the command). So measure on your own model what helps another
# one.

# %% [markdown]
# ## Experiment 3: fewer bits
#
# To store a group of numbers in 4 bits, take the smallest and the largest of the group, divide the range between them
# into 15 steps, and store the nearest step of each number. Which numbers should form a group? For keys `(B,Hk,T,D)`
# there are two choices: all channels of one *token*, or one *channel* of several tokens. `nanokv.lab.study.quality` rounds
# keys or values before attention reads them. It measures two things: the error of the numbers, and how much the
# log-likelihood of each token moves.

# %%
bits = (8, 4, 2)
schemes = {
    "keys, a scale per channel": lambda b, **more: Scheme(k_bits=b, v_bits=8, k_scale="channel", **more),
    "keys, a scale per token": lambda b, **more: Scheme(k_bits=b, v_bits=8, k_scale="token", **more),
    "values, a scale per token": lambda b, **more: Scheme(k_bits=8, v_bits=b, **more),
}
error, shift, planted = {}, {}, {}
for name, scheme in schemes.items():
    plain = [measure(model, whole, scheme(b)) for b in bits]
    with_outlier = [measure(model, whole, scheme(b, outliers=(3,))) for b in bits]
    error[name] = [sum(q.values if name[0] == "v" else q.keys) / c.num_hidden_layers for q in plain]
    shift[name], planted[name] = [q.mean_abs for q in plain], [q.mean_abs for q in with_outlier]
    numbers = zip(bits, error[name], shift[name])
    print(f"{name:<24}", "  ".join(f"{b} bits: error {e:5.1%} moves {s:.4f}" for b, e, s in numbers))
k_channel, k_token, v_token = schemes

# %% tags=["hide-input"]
course.figure("12.k8", 100 * error[k_channel][0])
course.figure("12.kt8", 100 * error[k_token][0])
course.figure("12.v8", 100 * error[v_token][0])
course.figure("12.planted", planted[k_token][1] / planted[k_channel][1])
fig, axes = course.subplots(1, 3, width=10.5, height=3.1)
titles = "relative error of the numbers", "nats that a token moves", "one large channel planted"
for axis, values, title in zip(axes, (error, shift, planted), titles):
    for i, (name, line) in enumerate(values.items()):
        axis.plot(range(3), line, "os^"[i] + "-", color=course.COLORS[(0, 1, 2)[i]], label=name)
    axis.set(yscale="log", title=title, xlabel="bits")
    axis.set_xticks(range(3), bits)
axes[2].set_ylim(axes[1].get_ylim()[0], 2 * max(max(line) for line in planted.values()))
axes[1].set_ylim(axes[2].get_ylim())
axes[0].legend(fontsize=8)
course.show(fig, alt="Three plots against bits, log scale. Error: "
            + "; ".join(f"{name} {line[0]:.1%}, {line[1]:.1%}, {line[2]:.0%}" for name, line in error.items())
            + ". At 4 bits a token moves by " + ", ".join(f"{line[1]:.3f}" for line in shift.values()) + " nats. "
            "With one channel of the keys made 20 times larger it moves by "
            f"{planted[k_token][1]:.2f} with a scale per token, by {planted[k_channel][1]:.3f} with a scale per channel.")

# %% [markdown]
# In 8 bits, keys are off by <!--fig 12.k8-->0.3<!--/fig--> percent with a scale per channel and
# by <!--fig 12.kt8-->0.6<!--/fig--> with a scale per token; values are off by <!--fig 12.v8-->0.5<!--/fig-->. In this
# small model all of them work down to 4 bits. In large models a few channels of the keys are far larger than the rest.
# The third panel adds one such channel. Now the scale of a *token* is the scale of its largest channel, and too few
# steps are left for the other channels. At 4 bits, tokens move <!--fig 12.planted x1.5-->11<!--/fig--> times as much as
# with a scale per channel, which the large channel does not affect. Values have no such channels. So keys are quantized
# by channel and values by token. A block of keys can be rounded only when all its tokens are there, so the newest
# tokens stay exact.

# %%
total, saved = {}, {}
for b in bits:
    cache = nanokv.make_cache("quantized", c, bits=b)
    total[b] = perplexity(cache)
    saved[b] = nanokv.costs.kv_bytes(c, T, 1, 4) / cache.nbytes
    print(f"{b} bits: perplexity {total[b]:.4f} (exact {full:.4f}), {saved[b]:.1f} times smaller than fp32")
rise = 100 * (total[4] / full - 1)
course.reveal("12.b", rise)

# %% tags=["hide-input"]
course.figure("12.rise", abs(rise))
course.figure("12.smaller", saved[4])

# %% [markdown]
# Perplexity changes by less than <!--fig 12.rise below-->0.2<!--/fig--> percent, for a cache that
# is <!--fig 12.smaller-->3.6<!--/fig--> times smaller. It is not eight times smaller, because the scales take memory
# and the newest tokens are exact; in a short text these are a large part. The exact tokens are also one reason why the
# loss is so small. But this is a mean, as in experiment 2. The next experiment looks at the worst token.

# %% [markdown]
# ## Experiment 4: which difference is a bug?
#
# Every cache of nanokv reads the same conversation in [chunks](glossary.md#chunk) of eight. How far does the
# log-likelihood of the worst token move, and how many bytes does the cache save?

# %%
kinds = {name: {} for name in nanokv.CACHES if name not in ("sliding", "quantized")}
kinds |= {"quantized, 8 bits": {"bits": 8}, "quantized, 4 bits": {"bits": 4}, "sliding, 64": {"window": 64}}
worst = {}
for name, options in kinds.items():
    cache = nanokv.make_cache(name.split(",")[0], c, capacity=T, **options)
    worst[name] = float(measure_cache(model, whole, cache).abs().max())
    print(f"{name:<18} largest change {worst[name]:8.1e} nats   {cache.nbytes / 2**20:5.2f} MiB")
exact_kinds = [name for name in worst if "," not in name]

# %% tags=["hide-input"]
course.figure("12.exact", max(worst[name] for name in exact_kinds))
course.figure("12.q8", worst["quantized, 8 bits"])
fig, axis = course.subplots(width=7.5, height=3.3)
axis.barh(list(worst), list(worst.values()), color=[course.COLORS[0 if name in exact_kinds else 1] for name in worst])
axis.axvline(nanokv.equality.TOLERANCE, color="gray", linestyle=":")
axis.set(xscale="log", xlabel="largest change of a token's log-likelihood, nats (log)", title="exact, rounded, forgetful")
axis.invert_yaxis()
axis.grid(axis="y", visible=False)
course.show(fig, alt="Bars on a log scale. All caches that keep exact values stay below "
            f"{1.1 * max(worst[name] for name in exact_kinds):.1e}; " + ", ".join(
            f"{name}: {worst[name]:.0e}" for name in worst if name not in exact_kinds)
            + f". The dotted line at {nanokv.equality.TOLERANCE:.0e} is the tolerance of the equality suite.")

# %% [markdown]
# There is a wide gap. The rounding of sums in another order ends at <!--fig 12.exact x10-->1e-5<!--/fig-->. The
# smallest change of the *values* begins at <!--fig 12.q8 x2-->3e-3<!--/fig-->. The tolerance must lie in this gap, here
# `1e-4`: small enough to catch a wrong position, large enough to accept another order of sums. For a cache that rounds
# its values there is no such tolerance. There you measure the likelihood, and the answers that matter to you.

# %% [markdown]
# ## What the articles say
#
# The last three misleading claims. The other claims that this notebook checks are on
# [the page of all claims](claims.md).

# %%
cache = nanokv.make_cache("dict", c)
first_mask = cache.mask(1)
nanokv.prefill(model, whole[:, :8], cache)
kept = sorted(cache[0])
course.claim("0.9", "misleading", found=f"a decode has mask {first_mask}, a chunk {cache.mask(4).dtype}, four padded rows "
             f"{tuple(padded.mask(4).shape)}")
course.claim("1.17", "misleading", found=16 / (8 + 2 * 16 / 64))
course.claim("3.19", "misleading", found=f"a layer of the cache holds {' and '.join(kept)}")

# %% tags=["hide-input"]
course.confirm("1.11", "misleading")
course.confirm("1.24", "right")
course.confirm("3.17", "right", found="the perplexity of the whole conversation took one forward and no cache")
course.confirm("4.11", "right", found=f"nanokv stores it in {len(nanokv.CACHES)} ways")

# %% [markdown]
# ## Exercises
#
# **12.1** Make the rectangle. `prompts` is a list of lists of ids. Return the rows, all of the same length, and for
# each row the number of padding columns (use `0` as the padding id). The check feeds them to the model and compares
# every row with the same prompt alone.


# %% tags=["exercise"]
def rectangle(prompts):
    rows, pads = ..., ...
    return rows, pads


# %% tags=["solution"]
def rectangle(prompts):
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    return [[0] * k + prompt for k, prompt in zip(pads, prompts)], pads


# %%
course.check("12.1", rectangle)

# %% [markdown]
# **12.2** A sliding window has `w` positions and `s` sinks. The query at position `t` (counted from 0) sees its own
# position, the positions before it in the window, and the sinks. How many keys does it see? Which is the oldest
# position that it sees *besides* the sinks? Answer with a pair.

# %%
case = course.case("12.2")
print(f"w = {case.w}, s = {case.s}, t = {case.t}")

# %% tags=["exercise"]
count_and_oldest = ..., ...

# %% tags=["solution"]
count_and_oldest = case.w + case.s, case.t - case.w + 1

# %%
course.check("12.2", count_and_oldest)

# %% [markdown]
# **12.3** Values of 16 bits are stored in `bits` bits, with a scale and a zero point of 16 bits each for every group of
# `group` values. How many times smaller is the cache?

# %%
case = course.case("12.3")
print(f"bits = {case.bits}, group = {case.group}")

# %% tags=["exercise"]
smaller = ...

# %% tags=["solution"]
smaller = 16 / (case.bits + 2 * 16 / case.group)

# %%
course.check("12.3", smaller)

# %% [markdown]
# **12.4** Round a tensor to `2**bits` levels and back. Each line along the dimension `dim` is a group. Its smallest
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
course.check("12.4", round_trip)

# %% [markdown]
# ## Capstone
#
# **12.5** Pick one of three tasks, and hand in a pair: its name and your code. It has to pass `nanokv.equality` and a
# few checks of its own.
#
# - `("static", MyLayer)`: a class for one layer, derived from `nanokv.cache.LayerCache` and called as
#   `MyLayer(capacity)`, with `append`, `length` and `truncate`. It allocates its memory once: the keys of the first
#   layer must not move while tokens come. Beyond the capacity it raises `nanokv.errors.CapacityError` before anything
#   is written.
# - `("prefix", MyStore)`: `MyStore(config, entries)` keeps at most `entries` caches and drops the least recently used
#   one first. `store.put(tokens, cache)` keeps one. `store.get(tokens)` returns `(cache, n)`: a cache of its own for
#   the caller, with the longest beginning of `tokens` that any entry shares, `n` tokens long, and at most all tokens
#   but one. If no entry shares a token, the cache is empty and `n = 0`.
# - `("mqa", convert)`: `convert(model)` returns a new model with *one* KV head, whose `k_proj` and `v_proj` are the
#   mean of the old ones over the heads. The old model stays unchanged. (The answers of the new one will be bad: it
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
            raise nanokv.errors.CapacityError(f"{end} tokens do not fit into {self.capacity} slots")
        if self.slabs is None:
            B, Hk, _, D = k.shape
            self.slabs = [k.new_empty(B, Hk, self.capacity, D) for _ in "kv"]
        for slab, new in zip(self.slabs, (k, v)):
            slab[:, :, self.length : end] = new
        self.length = end
        return tuple(slab[:, :, :end] for slab in self.slabs)  # views

    def truncate(self, n):
        self.length = min(n, self.length)  # what lies behind is written again before it is read


my_work = "static", MyLayer

# %%
course.check("12.5", my_work)

# %% [markdown]
# ## Your own engine
#
# You have written most of a small engine by now: the sampler in 01, attention in 02, the shared heads in 03, the cache
# in 06, the pages in 10, the reuse of a chat in 11. Each of these answers was kept as a file in the folder `my`, beside
# the notebooks, when its check was right. You may open and edit these files. `course.mine` takes your own part if it
# still passes its check. Where you have none, it takes nanokv's, and says so.

# %%
top_p, cut = course.mine("sampler"), course.mine("stop")
attend, kv_head = course.mine("attention"), course.mine("heads")
MyCache, keep = course.mine("cache"), course.mine("prefix")
place_of, free = course.mine("page"), course.mine("free")
write = course.mine("loop")

# %% [markdown]
# Here they are put together. The weights are the model's, and there is no second copy of it. The model takes two things
# from outside: an attention object, which it calls with `q`, `k` and `v`, and a cache with one entry per layer.
# `MyAttention` calls the function of 02.2 once per query head. That function knows a square of `T` queries and `T` keys
# only. With a cache there are fewer queries than keys. So the rows of the old queries are filled with zeros, and their
# results are dropped. (That is the waste of notebook 05 once more; nanokv's attention does without.)


# %%
class MyAttention:
    """The function of 02.2 for each query head; 03.4 says which KV head it reads."""

    def __call__(self, q, k, v):  # q (B,H,T,D), k and v (B,Hk,S,D), with B = 1
        H, Hk, T, S = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        old = q.new_zeros(1, H, S - T, q.shape[3])
        square = torch.cat((old, q), dim=2)  # (B,H,S,D): the T queries are the last of S
        heads = []
        for h in range(H):
            g = kv_head(h, H, Hk)
            keys, values = k[0, g].clone(), v[0, g].clone()  # your function may write into its own
            heads.append(attend(square[0, h], keys, values)[-T:])
        return torch.stack(heads)[None]  # (B,H,T,D)


class Engine:
    """One model, one chat at a time. `layer` makes the cache of one layer."""

    def __init__(self, layer, p=1e-6):
        self.layer, self.p = layer, p
        self.stop = list(model.generation_config.eos_token_ids)
        self.clear()

    def clear(self):
        """An empty cache. `held` are the ids in it."""
        self.cache = nanokv.KVCache((self.layer() for _ in range(c.num_hidden_layers)), c)
        self.held = []

    @torch.inference_mode()
    def feed(self, ids, start_pos):
        """ids go behind what the cache holds → logits that follow the last one, (V,)."""
        hidden = model(torch.tensor([ids]), self.cache, start_pos, MyAttention())  # (1,T,C)
        self.held = self.held + ids
        return model.lm_head(hidden[0, -1])

    def draw(self, logits):
        """One of the tokens that 01.3 keeps; with a tiny p that is the likeliest."""
        chances = logits.double().softmax(-1)
        few = sorted(top_p(chances.tolist(), self.p))
        return few[int(torch.multinomial(chances[few], 1))]


# %% [markdown]
# One part is missing, the loop.
#
# **12.6** Write a turn. `engine` has `held`, `stop`, `clear()`, `feed(ids, start_pos)` and `draw(logits)`, as above.
# `ids` is a whole prompt, of the same chat or of another one. Keep what the cache holds if the prompt begins with it
# (`keep` of 11.4 is at hand); a cache that cannot be truncated has to be cleared otherwise. Feed the rest. Then draw
# tokens and feed them, until one of `engine.stop` comes or there are `most`. Return the list of drawn tokens, the end
# token included. The last one is not fed. The check gives your turn to several chats, and counts what it feeds.


# %% tags=["exercise"]
def turn(engine, ids, most):
    return ...


# %% tags=["solution"]
def turn(engine, ids, most):
    n = keep(engine.held, ids)
    if n < len(engine.held):  # another chat
        engine.clear()
        n = 0
    said = [engine.draw(engine.feed(ids[n:], n))]
    while len(said) < most and said[-1] not in engine.stop:
        said.append(engine.draw(engine.feed(said[-1:], len(engine.held))))
    return said


# %%
course.check("12.6", turn)

# %% [markdown]
# Now the engine answers a chat. The turns share one cache, so each turn prefills only what the cache does not hold. The
# tokens must be those of `nanokv.generate`, which starts with an empty cache for every turn.

# %%
reply = course.mine("turn")


def chat(engine, most=course.sized(40, 12)):
    """A chat of three turns → (prompt, answer) of each."""
    messages, turns = [], []
    for question in ("My name is Zorbla.", "What is my name?", "What is 12 + 30?"):
        messages.append({"role": "user", "content": question})
        ids = tokenizer.encode(tokenizer.render(messages))
        before = engine.held
        answer = [int(token) for token in reply(engine, ids, most)]
        ended = [*answer, engine.stop[0]]  # 01.5 wants a stream that ends
        text = tokenizer.decode(cut(ended, engine.stop))
        new = len(ids)
        kept = len(before) if engine.held[: len(before)] == before else 0
        print(f"{new:>3} tokens, {kept:>3} kept, {new - kept:>3} prefilled:  {question}  {text}")
        messages.append({"role": "assistant", "content": text})
        turns.append((ids, answer))
    return turns


turns = chat(Engine(MyCache))
theirs = [list(nanokv.generate(model, ids, max_new_tokens=len(answer))) for ids, answer in turns]
equal = sum(answer == other for (_, answer), other in zip(turns, theirs))
ids, answer = turns[0]
written = write(model, torch.tensor([ids]), len(answer))  # a list, a tensor or a generator
alike = torch.hstack([torch.as_tensor(token).flatten() for token in written]).tolist() == answer
print(f"the tokens of nanokv.generate: in {equal} of {len(turns)} turns")
print(f"the loop of 06.4 writes the same first answer: {alike}")

# %% tags=["hide-input"]
course.figure("12.equal", equal)
course.figure("12.turns", len(turns))

# %% [markdown]
# In <!--fig 12.equal-->3<!--/fig--> of <!--fig 12.turns-->3<!--/fig--> turns the engine draws the tokens of nanokv. The
# cache is an argument, so another one can take its place. `Pages` keeps a layer in pages of 16 tokens: 10.4 says where
# token `i` is, and 10.5 gives the pages back when the chat is over.


# %%
class Pages(nanokv.cache.LayerCache):
    """The cache of one layer in pages from a pool of its own."""

    def __init__(self, page=16, pages=64):
        self.page, self.length, self.table = page, 0, []
        self.owners, self.free_pages, self.pool = [0] * pages, list(range(pages)), None

    def append(self, k, v):  # (B,Hk,T,D) each, B = 1
        both = torch.stack((k[0], v[0]))  # (2,Hk,T,D)
        if self.pool is None:
            shape = len(self.owners), self.page, 2, k.shape[1], k.shape[3]
            self.pool = both.new_empty(shape)  # (pages,page,2,Hk,D)
        for t in range(k.shape[2]):
            if self.length == len(self.table) * self.page:  # the last page is full
                self.table.append(self.free_pages.pop())
                self.owners[self.table[-1]] += 1
            number, slot = place_of(self.table, self.length, self.page)
            self.pool[number, slot] = both[:, :, t]
            self.length += 1
        places = [place_of(self.table, i, self.page) for i in range(self.length)]
        numbers, slots = (list(part) for part in zip(*places))
        return self.pool[numbers, slots].permute(1, 2, 0, 3)[:, None].unbind(0)  # (B,Hk,S,D) ×2


engine = Engine(Pages)
in_pages = chat(engine)
layer = engine.cache[0]
pages_used, back = len(layer.table), len(free(layer.table, layer.owners, layer.free_pages))
print(f"the same tokens: {in_pages == turns}")
print(f"a layer used {pages_used} pages; now {back} of {len(layer.owners)} are free")

# %% [markdown]
# Your engine, part by part:

# %%
course.whose()

# %% [markdown]
# ## Quiz

# %%
course.quiz("12")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters

# %% tags=["solution"]
q1, q2, q3 = "a", "c", "b"

# %%
course.answer("12.q1", q1)
course.answer("12.q2", q2)
course.answer("12.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Xiao and others, [StreamingLLM](https://arxiv.org/abs/2309.17453): attention sinks, and the models that need them.
# - Liu and others, [KIVI](https://arxiv.org/abs/2402.02750): keys by channel, values by token.
# - Hugging Face, [KV cache quantization](https://huggingface.co/blog/kv-cache-quantization), from the reading list of
#   an article; and [Caching](https://huggingface.co/docs/transformers/main/en/cache_explanation).
# - `nanokv/decoding/batching.py`, `nanokv/cache/sliding.py`, `nanokv/cache/quantized.py`, `nanokv/lab/study/quality.py`.
#
# ## Next
#
# Now you have an engine on one machine. In notebook [14](14_more_than_one_machine.ipynb) a model, its cache and a prompt are
# divided among several.

# %% tags=["skip"]
course.progress()
