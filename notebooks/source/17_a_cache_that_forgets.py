# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 · A cache that forgets on purpose
#
# All caches so far keep something of every token, or drop whole tokens. Newer models replace most of their caches by
# a [recurrent state](glossary.md#recurrent-state): a matrix of fixed size, into which every token is added. In
# Qwen3.5 three of four layers do this. You compute what such a state weighs, make one step of it by hand, measure how
# much it recalls, and find out why it cannot be cut, and what a server does about it.
#
# ## What you will be able to do
#
# - compute the bytes of a state, and of a [snapshot](glossary.md#snapshot), from a config;
# - make one step of the gated delta rule ([DeltaNet](glossary.md#deltanet)) by hand;
# - say how recall depends on the size of a state, and on the number of facts;
# - choose the distance between snapshots, by what it costs and what it loses.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `H` heads of a state, `Hk` KV heads, `D` numbers of
# a head, `Dk` and `Dv` numbers of a key and of a value, `S` the state, `(Dk,Dv)` per head, `K` inputs of the
# convolution ([all letters](glossary.md#letters)).

# %%
import random

import torch

import nanokv
from nanokv import costs, course, faults
from nanokv.config import Config
from nanokv.lab.faults.twins import with_states
from nanokv.recurrent import delta_keys, gated_delta_chunks, gated_delta_steps
from nanokv.school.course.checks.nb17 import recorded

# its answers are known
model, tokenizer = course.start("17", model="tiny")

# %% [markdown]
# ## Predict
#
# Qwen3.5's layers with attention keep keys and values of every token, the others one state. Somebody keeps a copy of
# all states, to come back to this place of the text later. The keys and values of how many tokens weigh as much as
# this one copy?

# %% tags=["exercise"]
tokens = ...

# %% tags=["solution"]
tokens = 64  # a common first guess: a state is small, that is why it was built

# %%
course.predict("17.a", tokens, unit="tokens")

# %% [markdown]
# Second: a small model with states of `8` by `8` numbers, two heads in each of two layers, is told `16` pairs of a
# key and a value, and is then asked for every key. What percentage of the values does it recall?

# %% tags=["exercise"]
percent = ...  # 0 to 100

# %% tags=["solution"]
percent = 90  # a common first guess: there are more numbers than facts

# %%
course.predict("17.b", percent, unit="percent")

# %% [markdown]
# ## Experiment 1: what a state weighs
#
# A layer with a state keeps two tensors per row. `S` has `H · Dk · Dv` numbers, in fp32, because every token rounds
# it. `conv` has the last `K − 1` inputs of a short convolution. Neither grows with the text. We compute the bytes by
# hand, from Qwen3.5's default sizes, and beside them those of `nanokv.costs`.

# %%
sizes = {
    "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "torch_dtype": "bfloat16",
}
qwen = Config.from_dict(sizes)
S_bytes = 4 * 32 * 128 * 128
conv_bytes = 2 * (2 * 16 * 128 + 32 * 128) * (4 - 1)
by_hand = 24 * (S_bytes + conv_bytes)
snapshot = costs.state_bytes(qwen, itemsize=2)
token = costs.kv_bytes_per_token(qwen, itemsize=2)
print(f"one layer: S {S_bytes:,} B, conv {conv_bytes:,} B")
print(f"24 layers: {by_hand:,} B by hand, {snapshot:,} B in nanokv.costs")
print(f"keys and values of a token, 8 layers: {token:,} B")
# transformers keeps K inputs of the convolution instead of the K − 1 that it needs
theirs = snapshot + 24 * conv_bytes // 3
print(f"a snapshot weighs as much as {snapshot / token:,.0f} tokens, "
      f"in transformers {theirs / token:,.0f}")
course.reveal("17.a", snapshot // token)

# LFM2-1.2B: 10 layers with a convolution over K = 3 inputs of 2,048 channels and no S,
# and 6 layers with 8 KV heads of 64 numbers
lfm_snapshot = 10 * 2 * 2048 * (3 - 1)
lfm_token = 2 * 6 * 8 * 64 * 2
print(f"LFM2-1.2B: snapshot {lfm_snapshot:,} B, {lfm_snapshot / lfm_token:.1f} tokens")

# %% tags=["hide-input"]
course.figure("17.tokens", snapshot // token)
course.figure("17.theirs", theirs / token)
course.figure("17.megabytes", snapshot / 1e6)
course.figure("17.lfm", lfm_snapshot / lfm_token)
contexts = [2**n for n in range(8, 16)]
every = [n * 4 * token / 1e6 for n in contexts]
hybrid = [(snapshot + n * token) / 1e6 for n in contexts]
fig, axis = course.subplots(width=7.5)
axis.plot(contexts, every, "o-", color=course.COLORS[1],
          label="attention in all layers")
axis.plot(contexts, hybrid, "s-", color=course.COLORS[0],
          label="a state in three of four")
axis.axhline(snapshot / 1e6, color=course.COLORS[2], linestyle="--",
             label="the states alone")
axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MB",
         title="the cache of one conversation")
axis.legend()
course.show(fig, alt="Bytes of the cache by tokens. The states alone are a level line "
            f"at {snapshot / 1e6:.1f} MB. The model with states begins on this line, "
            "and is a quarter of the other one for long texts; for the shortest it is "
            "larger.")

# %% [markdown]
# A snapshot weighs as much as the keys and values of <!--fig 17.tokens-->1572<!--/fig--> tokens, that
# is <!--fig 17.megabytes-->51.5<!--/fig--> MB. In transformers it is <!--fig 17.theirs-->1584<!--/fig--> tokens,
# because there the convolution keeps one input more than it needs. For a long text this is little: the cache of the whole
# model becomes a quarter. For a short one it is a lot. LFM2 makes another choice. It has convolutions only, without
# `S`, and a snapshot weighs as much as <!--fig 17.lfm-->6.7<!--/fig--> tokens; for recall it depends on its layers
# with attention.

# %% [markdown]
# ## Experiment 2: one step by hand
#
# The gated delta rule reads a state like a dictionary. Each token has a key `k` of length 1, a value `v`, and two
# numbers: a decay, and `beta`, the share that is written. First the state is multiplied by the decay. Then the value
# that it has at `k` is replaced by `v`, by this share. A query reads `Sᵀq`.

# %%
generator = torch.Generator().manual_seed(0)
T, Dk, Dv = 5, 4, 3
raw, v = torch.randn(1, 1, T, Dk, generator=generator), torch.randn(1, 1, T, Dv,
                                                                    generator=generator)
g = -torch.rand(1, 1, T, generator=generator)  # the logarithm of the decay
beta = torch.rand(1, 1, T, generator=generator)
q, k = delta_keys(raw, raw, H=1)  # unit vectors; q is divided by √Dk

S = torch.zeros(Dk, Dv)
for t in range(T):
    S = S * g[0, 0, t].exp()                     # forget
    found = S.T @ k[0, 0, t]                     # (Dv,): what is there at this key
    S = S + torch.outer(k[0, 0, t], beta[0, 0, t] * (v[0, 0, t] - found))
    print(f"token {t}: |S| {S.norm():.3f}, read at its key "
          f"{[round(x, 2) for x in (S.T @ k[0, 0, t]).tolist()]}")
empty = torch.zeros(1, 1, Dk, Dv)
steps, chunks = (rule(q, k, v, g, beta, empty)[1]
                 for rule in (gated_delta_steps, gated_delta_chunks))
off = max(float((S - other[0, 0]).abs().max()) for other in (steps, chunks))
print(f"largest difference to nanokv's steps and chunks: {off:.0e}")

# %% tags=["hide-input"]
course.figure("17.off", off + 1e-9)

# %% [markdown]
# nanokv's two forms differ from the loop by <!--fig 17.off x20-->1e-7<!--/fig-->, rounding. One goes token by token,
# for decoding. The other takes chunks of tokens in matrix products, for prompts and for training. Both begin with a
# state `S` and return the next one. (A real bug: the second form began with an empty one. It is in notebook
# [07](07_bug_hunt.ipynb).)

# %% [markdown]
# ## Experiment 3: recall against the size of a state
#
# Six small models were trained on one task, each for as many steps: pairs of a key and a value, then every key again
# in another order, and the value has to follow (the task of [Zoology](https://arxiv.org/abs/2312.04927)). In training
# there were up to `16` pairs. One model has attention. Its cache is tried whole, and as a
# [window](glossary.md#sliding-window) with the bytes of a state. The others have states of several sizes, and the
# last one three layers with the smallest state beside one with attention. The training takes minutes, so its
# table is read from a file. `tests/tools/hybrid_twin.py recall` writes it.

# %%
record = recorded()
rows = {row["name"]: row for row in record["table"]}
pairs = [int(n) for n in rows["attention"]["recall"]]
print(f"{record['steps']:,} steps with {record['pairs']} pairs; recalled, by pairs")
print(f"{'':<15}{'bytes':>9}", *(f"{n:>6}" for n in pairs))
for name, row in rows.items():
    print(f"{name:<15}{row['bytes']:>9,}",
          *(f"{x:>6.0%}" for x in row["recall"].values()))
course.reveal("17.b", 100 * rows["state 8x8"]["recall"]["16"])

# %% tags=["hide-input"]
course.figure("17.small", 100 * rows["state 4x4"]["recall"]["16"])
course.figure("17.eight", 100 * rows["state 8x8"]["recall"]["16"])
course.figure("17.large", 100 * rows["state 32x32"]["recall"]["16"])
course.figure("17.window", 100 * rows["window 14 + 2"]["recall"]["16"])
course.figure("17.hybrid", 100 * rows["hybrid"]["recall"]["16"])
course.figure("17.full", 100 * rows["attention"]["recall"]["16"])
fig, axis = course.subplots(width=8.5)
for i, (name, row) in enumerate(rows.items()):
    line = "o--" if "window" in name else "s-" if name == "hybrid" else "o-"
    axis.plot(pairs, [100 * x for x in row["recall"].values()], line, label=name,
              color=course.COLORS[i % len(course.COLORS)])
axis.set(xscale="log", xlabel="pairs that were told", ylabel="percent recalled",
         title="a state is full at some number of facts")
axis.minorticks_off()
axis.set_xticks(pairs, pairs)
axis.legend(ncols=2, fontsize=8)
course.show(fig, alt="Percent recalled by pairs. " + " ".join(
    f"{name}: {', '.join(f'{x:.0%}' for x in row['recall'].values())}."
    for name, row in rows.items()))

# %% [markdown]
# Of 16 pairs the states recall <!--fig 17.small-->18<!--/fig--> percent with 4 by 4
# numbers, <!--fig 17.eight-->51<!--/fig--> percent with 8 by 8, and <!--fig 17.large-->100<!--/fig--> percent with
# 32 by 32. The bytes do not say when a state is full: they are the same for two pairs and for thirty-two. The window
# with the bytes of the largest state recalls <!--fig 17.window-->19<!--/fig--> percent, because it has dropped the
# others. With one layer of attention beside three small states it is <!--fig 17.hybrid-->100<!--/fig--> percent, as
# with attention alone (<!--fig 17.full-->100<!--/fig-->). That is why hybrid models keep some layers with attention.

# %% [markdown]
# Is that so for talk too? Twins of the bundled model were trained on its own conversations, each with the first stage
# of its recipe. A talk tells up to six facts, each answered "Okay.", and asks for each. Counted are the facts of which
# the told value is the likeliest of six, so a model that knows nothing finds one of six. `3:1` twins have a state in
# three of four layers, as Qwen3.5. `tests/tools/hybrid_twin.py chat` trains and counts them.

# %%
talks = record["talks"]
twins = {row["name"]: row for row in talks["table"]}
print(f"{talks['steps']:,} steps; percent known, by facts that were told")
print(f"{'':<15}{'bytes':>9}", *(f"{n:>6}" for n in talks["told"]))
for name, row in twins.items():
    print(f"{name:<15}{row['bytes']:>9,}",
          *(f"{x:>6.0%}" for x in row["recall"].values()))

# %% tags=["hide-input"]
known = {name: 100 * row["recall"]["6"] for name, row in twins.items()}
course.figure("17.talk.small", known["state 8x12"])
course.figure("17.talk.large", known["state 32x48"])
course.figure("17.talk.mixed", known["3:1 8x12"])
course.figure("17.talk.both", known["3:1 32x48"])
course.figure("17.talk.full", known["attention"])
course.figure("17.talk.window", known["window 40 + 2"])
fig, axis = course.subplots(width=8.5)
for i, (name, row) in enumerate(twins.items()):
    line = "o--" if "window" in name else "s-" if "3:1" in name else "o-"
    percents = [100 * x for x in row["recall"].values()]
    axis.plot(talks["told"], percents, line, label=name,
              color=course.COLORS[i % len(course.COLORS)])
axis.axhline(100 / 6, color="gray", linewidth=0.8)
axis.set(xlabel="facts that were told", ylabel="percent known", ylim=(0, 105),
         title="twins of the bundled model, in talk; grey: by chance")
axis.set_xticks(talks["told"])
axis.legend(ncols=2, fontsize=8)
course.show(fig, alt="Percent known by facts that were told. " + " ".join(
    f"{name}: {', '.join(f'{x:.0%}' for x in row['recall'].values())}."
    for name, row in twins.items()))

# %% [markdown]
# With attention in every layer the twin knows <!--fig 17.talk.full-->76<!--/fig--> percent of six facts, and with a
# window that has the bytes of the largest states <!--fig 17.talk.window-->31<!--/fig--> percent. States alone
# know <!--fig 17.talk.large-->50<!--/fig--> percent with 32 by 48 numbers, and <!--fig 17.talk.small-->26<!--/fig-->
# with 8 by 12. Beside two layers with attention the small states suffice (<!--fig 17.talk.mixed-->88<!--/fig-->
# percent, with large ones <!--fig 17.talk.both-->78<!--/fig-->), in a cache of a third of the bytes. These are short
# trainings of one seed each, so ten percent more or less mean little.

# %% [markdown]
# ## Experiment 4: break the rollback, and mend it
#
# A rejected draft has to leave no trace ([speculative decoding](glossary.md#speculative-decoding)). Keys are cut off.
# A state is a sum, so there is nothing to cut. We put a layer with a small state before each layer of the model,
# which leaves its answers as they are, and feed six tokens that are taken back. One cache only pretends to: its
# length is right, and its state stays.

# %%
twin = with_states(model)
talk = [{"role": "user", "content": "My name is Zorbla."},
        {"role": "assistant", "content": "So your name is Zorbla."},
        {"role": "user", "content": "What is my name?"}]
ids = torch.tensor([tokenizer.encode(tokenizer.render(talk,
                                                      add_generation_prompt=True))])
draft = torch.tensor([tokenizer.encode(" green boats and a hat")])[:, :6]
P = ids.shape[1]
right = nanokv.score(twin, ids)[:, -1]


def after(take_back):
    """Logits of the newest token, after a draft that take_back(cache) has removed."""
    cache = nanokv.make_cache("dict", twin.config)
    nanokv.prefill(twin, ids[:, :-1], cache)
    kept = cache.fork()  # a snapshot: the tensors are shared, not copied
    nanokv.prefill(twin, draft, cache, start_pos=P - 1)
    cache = take_back(cache, kept)
    return nanokv.decode(twin, ids[:, -1:], cache, start_pos=P - 1), cache


def pretend(cache, kept):
    with faults.inject("draft_stays_in_state"):
        cache.truncate(P - 1)
    return cache


def replay(cache, kept):
    cache.truncate(P - 1)  # nanokv's: from a mark, by what the tokens have written
    return cache


gaps = {}
for name, way in (("pretend", pretend), ("snapshot", lambda cache, kept: kept),
                  ("truncate", replay)):
    logits, cache = after(way)
    gaps[name] = float((logits - right).abs().max())
    print(f"{name:<9} length {cache.length}, largest difference {gaps[name]:.0e}")

# %% tags=["hide-input"]
course.figure("17.pretend", gaps["pretend"])
course.figure("17.mended", max(gaps["snapshot"], gaps["truncate"]) + 1e-9)

# %% [markdown]
# The cache that pretends has the right length and the right keys, and its logits are off
# by <!--fig 17.pretend x1.5-->0.77<!--/fig-->. The two others differ by <!--fig 17.mended x20-->2e-5<!--/fig-->,
# rounding. One goes back to a snapshot. nanokv's `truncate` has a *mark*, an older state, and the numbers that each
# token since then has written: its key, value, decay and `beta`. It applies them again up to the right token, without
# the model. These numbers soon weigh more than the state, so there is a new mark after `64` tokens. Further back only
# snapshots help: the chat takes one at the end of each message (`cache.snapshot()`), an edited turn goes back to the
# nearest (`cache.nearest(n)`), and the tokens from there on are prefilled again.

# %% [markdown]
# ## Experiment 5: how far apart should snapshots be?
#
# A server keeps what it has computed, for prompts that begin in the same way. Keys can be reused up to the last full
# page of the common [prefix](glossary.md#prefix). A state can be reused only where there is a snapshot. We replay a
# day of made-up chats, without a model: each has the same system prompt, and each turn repeats all turns before it.
# How many of the prompts' tokens are reused, if there is a snapshot every `interval` tokens?

# %%
draw = random.Random(0)
PAGE, SYSTEM = 64, 1500
requests = []  # (tokens that match an earlier request, tokens of the prompt)
for chat in range(200):
    known = SYSTEM if chat else 0
    length = SYSTEM
    for turn in range(draw.randint(1, 8)):
        length += draw.randint(20, 400)
        requests.append((known, length))
        length += draw.randint(50, 600)  # the answer
        known = length
prompts = sum(length for _, length in requests)


def reused(interval):
    """Share of the tokens that are not computed again."""
    return sum(match // interval * interval for match, _ in requests) / prompts


intervals = [PAGE * 2**n for n in range(7)]
shares = {interval: reused(interval) for interval in intervals}
weight = {interval: snapshot / (interval * token) for interval in intervals}
for interval in intervals:
    print(f"every {interval:>5} tokens: {shares[interval]:>4.0%} reused, snapshots "
          f"weigh {weight[interval]:>6.2f} times the keys")

# %% tags=["hide-input"]
course.figure("17.fine", 100 * shares[64])
course.figure("17.coarse", 100 * shares[1024])
course.figure("17.coarsest", 100 * shares[4096])
course.figure("17.weight64", weight[64])
course.figure("17.weight1024", weight[1024])
fig, (left, right_) = course.subplots(1, 2, width=9.5)
left.plot(intervals, [100 * x for x in shares.values()], "o-", color=course.COLORS[0])
left.set(xscale="log", ylim=(0, 100), xlabel="tokens between snapshots",
         ylabel="percent reused", title="what a prompt need not compute")
right_.plot(intervals, list(weight.values()), "s-", color=course.COLORS[1])
right_.axhline(1, color="black", linestyle=":")
right_.set(xscale="log", yscale="log", xlabel="tokens between snapshots",
           title="bytes of snapshots, relative to keys")
course.show(fig, alt="Two lines by the distance of snapshots, 64 to 4,096 tokens. "
            f"Reuse falls from {shares[64]:.0%} to {shares[4096]:.0%}; the bytes of "
            f"snapshots, relative to the keys, fall from {weight[64]:.0f} to "
            f"{weight[4096]:.1f}.")

# %% [markdown]
# With a snapshot on every page of `64` tokens, <!--fig 17.fine-->92<!--/fig--> percent of the tokens are reused, and
# the snapshots weigh <!--fig 17.weight64-->25<!--/fig--> times as much as the keys. Every `1024` tokens it
# is <!--fig 17.coarse-->75<!--/fig--> percent for <!--fig 17.weight1024-->1.5<!--/fig--> times the weight, and every
# `4096` <!--fig 17.coarsest-->19<!--/fig--> percent.
# A server can also choose the places: prompts meet again at the end of the system prompt and at the end of a
# turn ([Marconi](https://arxiv.org/abs/2411.19379) keeps snapshots where prompts part).

# %% [markdown]
# ## What the articles say
#
# None of the [claims](claims.md) of the five articles is executed here: they are about keys and values.

# %% [markdown]
# ## Exercises
#
# **17.1** A model has `layers` layers with a state of `H` heads of `Dk` by `Dv` numbers in fp32, and a convolution
# over `K` inputs of `channels` channels in bf16. How many bytes has a snapshot?

# %%
case = course.case("17.1")
print(case.layers, case.H, case.Dk, case.Dv, case.channels, case.K)

# %% tags=["exercise"]
weighs = ...

# %% tags=["solution"]
weighs = case.layers * (4 * case.H * case.Dk * case.Dv
                        + 2 * case.channels * (case.K - 1))

# %%
course.check("17.1", weighs)

# %% [markdown]
# **17.2** One step: `S` `(Dk,Dv)`, `k` `(Dk,)`, `v` `(Dv,)`, the numbers `decay` and `beta`. Return the new state.


# %% tags=["exercise"]
def step(S, k, v, decay, beta):
    return ...


# %% tags=["solution"]
def step(S, k, v, decay, beta):
    S = decay * S
    return S + torch.outer(k, beta * (v - S.T @ k))


# %%
course.check("17.2", step)

# %% [markdown]
# **17.3** A prompt begins with `match` tokens of a stored one. There is a snapshot after every `interval` tokens.
# From which token on does the model compute?


# %% tags=["exercise"]
def computed_from(match, interval):
    return ...


# %% tags=["solution"]
def computed_from(match, interval):
    return match // interval * interval


# %%
course.check("17.3", computed_from)

# %% [markdown]
# **17.4** From which distance on do the snapshots weigh no more than the keys and values beside them? A snapshot has
# `snapshot` bytes, the keys and values of a token have `token` bytes. Answer in whole tokens.

# %%
case = course.case("17.4")
print(f"{case.snapshot:,} {case.token:,}")

# %% tags=["exercise"]
distance = ...

# %% tags=["solution"]
distance = -(-case.snapshot // case.token)

# %%
course.check("17.4", distance)

# %% [markdown]
# ## Quiz

# %%
course.quiz("17")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "b", "a", "c"

# %%
course.answer("17.q1", q1)
course.answer("17.q2", q2)
course.answer("17.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Yang and others, [Gated Delta Networks](https://arxiv.org/abs/2412.06464): the rule of Experiment 2.
# - Arora and others, [Zoology](https://arxiv.org/abs/2312.04927) and [Based](https://arxiv.org/abs/2402.18668): recall
#   against the size of a state.
# - Pan and others, [Marconi](https://arxiv.org/abs/2411.19379): which snapshots to keep.
# - `nanokv/recurrent.py`, `nanokv/hybrid.py`, `nanokv/cache/state.py`.
#
# ## Next
#
# This was the last notebook. You have written a cache, its pages, an engine and the kernels of its step, and a test
# for each. Now try them on another model: `NANOKV_MODEL=… make notebooks` uses your folder `my`.

# %% tags=["skip"]
course.progress()
