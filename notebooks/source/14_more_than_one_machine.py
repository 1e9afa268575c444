# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · One machine is not enough
#
# A model or its cache can be too large for one machine. Then both are cut into parts, and each part is placed on a
# different machine. The machines must exchange results before the next token is known. In this notebook two processes
# play the role of two machines. You cut a model, and then only its cache, count the bytes that are sent, and check that
# the logits stay the same. At the end one process computes a prompt and the other continues it.
#
# ## What you will be able to do
#
# - say how each part of a model is cut (by columns, rows, heads, words or positions), and why;
# - predict the bytes that a [rank](glossary.md#rank) sends per token, and measure them;
# - say why grouped-query attention limits the number of ranks;
# - merge attention over two parts of the keys by hand, with their [log-sum-exp](glossary.md#log-sum-exp);
# - compute when sending a [KV cache](glossary.md#kv-cache) is faster than computing it again.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `S` keys that a query may see, `C` numbers of a
# hidden state, `H` query heads, `Hk` KV heads, `D` numbers of a head, `L` layers, `V` entries of the vocabulary, and
# new: `n` ranks ([all letters](glossary.md#letters)).

# %%
import torch
import torch.nn.functional as F

import nanokv
from nanokv import costs, course
from nanokv.costs.memory import FAMILY
from nanokv.parallel.merge import merge, partial_attention
from nanokv.parallel.shards import Shard
from nanokv.school.course.ranks import on_ranks

model, tokenizer = course.start("14", model="tiny")  # each process loads it once more
c = model.config
ids = torch.randint(c.vocab_size, (1, 1200),
                    generator=torch.Generator().manual_seed(13))
qwen = FAMILY["Qwen/Qwen3-0.6B"]  # its published shape

# %% [markdown]
# ## Predict
#
# The bundled model is cut over two ranks: each has half of the heads, half of the width of every MLP, and half of the
# vocabulary. How often must they exchange results to compute *one* token?

# %% tags=["exercise"]
messages = ...

# %% tags=["solution"]
messages = 6  # a common first guess: once per layer

# %%
course.predict("14.a", messages, unit="messages")

# %% [markdown]
# Second: now each rank has all weights, and the *positions* of one long sequence are divided between the ranks. Each
# rank holds the keys and values of its own positions. When the sequence is ten times as long, how many times as many
# bytes does a rank receive per new token?

# %% tags=["exercise"]
growth = ...

# %% tags=["solution"]
growth = 10  # a common first guess: there are ten times as many keys

# %%
course.predict("14.b", growth, unit="times")

# %% [markdown]
# ## Experiment 1: cut a matrix
#
# An MLP multiplies a token with `gate` and `up`, `(width,C)` each, and the result with `down`, `(C,width)`. A weight
# matrix can be cut by rows, so that each rank computes some of the *outputs*. It can also be cut by columns, so that
# each rank reads some of the *inputs*. Then each rank computes a partial sum of every output, and the partial sums have
# to be added.

# %%
mlp = model.layers[0].mlp
# (B,T,C)
x = torch.randn(1, 4, c.hidden_size, generator=torch.Generator().manual_seed(0))
whole = mlp(x)  # (B,T,C)

# (width/2,C) ×2: outputs
gates, ups = mlp.gate_proj.weight.chunk(2, 0), mlp.up_proj.weight.chunk(2, 0)
downs = mlp.down_proj.weight.chunk(2, 1)  # (C,width/2) ×2: inputs


def half(rank):
    """What one rank computes, alone from the first line to the last. (B,T,C) →
    (B,T,C)"""
    hidden = F.silu(x @ gates[rank].T) * (x @ ups[rank].T)  # (B,T,width/2)
    return hidden @ downs[rank].T  # (B,T,C), a summand


added = half(0) + half(1)  # the only exchange
print(f"largest number {float(whole.abs().max()):.2f}")
print(f"cut and summed: off by {float((added - whole).abs().max()):.0e}")
print(f"one half alone is off by {float((half(0) - whole).abs().max()):.2f}")

# %% [markdown]
# The order of the cuts matters. `gate` and `up` are cut by outputs, `down` by inputs. Then each rank computes its part
# of the whole block alone, and one sum at the end is enough. If `down` were cut by outputs too, each rank would first
# need the other half of the hidden width: two messages instead of one. Attention is cut in the same way: `q`, `k`, `v`
# by heads, that is by outputs, and `o` by inputs. This is [tensor parallelism](glossary.md#tensor-parallelism). The
# table lists all its cuts:

# %% tags=["hide-input"]
course.show(course.drawings.cuts())

# %% [markdown]
# The experts of a mixture-of-experts model are not cut: each rank has some whole experts. For a token whose expert is
# on another rank, a rank contributes zeros, and the sum at the end of the block adds the result of the other rank.
#
# ## Experiment 2: two processes
#
# Now we use two real processes. `on_ranks` starts them and runs a function in each. They communicate through
# `torch.distributed`. `group.sum` adds a tensor over all ranks; `group.gather` collects one tensor from each. Each
# process cuts the model that it has loaded (`nanokv.parallel.shards.split`): the result is the same `nanokv/model.py`,
# with a config that has half of the heads. The cache is made from that config, so it holds half of the heads, without
# any change to its code.


# %%
def tensor_parallel(group, ids):
    """Logits of a prefill and a decode; per message of the decode its kind and
    bytes; bytes of cache and weights."""
    from nanokv.parallel.shards import split

    sent = []
    for kind in ("sum", "gather"):
        def noted(x, kind=kind, send=getattr(group, kind)):
            sent.append((kind, x.nbytes))
            return send(x)

        setattr(group, kind, noted)
    part = split(nanokv.load("tiny", device="cpu")[0], group)
    cache = nanokv.make_cache("dict", part.config)
    nanokv.prefill(part, torch.tensor(ids)[:, :-1], cache)
    sent.clear()
    # (B,V)
    logits = nanokv.decode(part, torch.tensor(ids)[:, -1:], cache, cache.length)
    weights = sum(weight.nbytes for weight in part.parameters())
    return {"logits": logits.tolist(), "sent": sent, "cache": cache.nbytes,
            "weights": weights}


few = ids[:, :60]
two = on_ranks(tensor_parallel, 2, ids=few.tolist())
right = nanokv.score(model, few)[:, -1]  # one process, no cache
cache = nanokv.make_cache("dict", c)
nanokv.prefill(model, few, cache)
off = max(float((torch.tensor(rank["logits"]) - right).abs().max()) for rank in two)
sums = [size for kind, size in two[0]["sent"] if kind == "sum"]
gathers = [size for kind, size in two[0]["sent"] if kind == "gather"]
print(f"logits off by {off:.0e}; the ranks agree to the bit: "
      f"{two[0]['logits'] == two[1]['logits']}")
print(f"weights per rank: {two[0]['weights']:,} of {model.nbytes:,} bytes")
print(f"cache per rank: {two[0]['cache']:,} of {cache.nbytes:,} bytes")
print(f"for one token: {len(sums)} sums of {set(sums)} bytes, {len(gathers)} gather of "
      f"{set(gathers)} bytes")
course.reveal("14.a", len(two[0]["sent"]))

# %% tags=["hide-input"]
course.figure("14.messages", len(two[0]["sent"]))
course.figure("14.off", off)
course.figure("14.cache", two[0]["cache"] / cache.nbytes)
course.figure("14.sum", sums[0])

# %% [markdown]
# Two sums per layer, one for the embedding, and one gather for the logits: <!--fig 14.messages-->14<!--/fig--> messages
# for one token. The cache of a rank is <!--fig 14.cache-->0.5<!--/fig--> of the whole, and the logits differ by
# rounding, about <!--fig 14.off x10-->1e-5<!--/fig-->, because a sum of two halves is rounded differently from one long
# sum.
#
# Each sum has only `C` numbers per token, here <!--fig 14.sum-->768<!--/fig--> bytes, however large the model's
# matrices are. So a decode on two machines is not slow because of the bytes. It is slow because of the waiting: the
# messages are sent one after another, and each has to wait for the computation before it. In a prefill of a thousand
# tokens each message is a thousand times as large, and then the bytes matter. In a ring of `n` ranks each rank sends
# `2·(n−1)/n` of the bytes that are summed: the values go round the ring once, in `n` parts, to be added, and a second
# time to distribute the sums.

# %%
# two sums per layer, in bf16
per_token = 2 * qwen.num_hidden_layers * qwen.hidden_size * 2
# if a message takes 20 µs from machine to machine
waiting = 2 * qwen.num_hidden_layers * 20e-6
sending = per_token * 8 / 10e9  # over a link of 10 Gbit/s
print(f"Qwen3-0.6B, a decode step on two machines: {per_token:,} bytes, "
      f"{1e6 * sending:.0f} µs to send them,")
print(f"{1e6 * waiting:.0f} µs of waiting for {2 * qwen.num_hidden_layers} messages of "
      "20 µs each")

# %% tags=["hide-input"]
course.figure("14.bytes", per_token)
course.figure("14.waiting", waiting / sending)

# %% [markdown]
# For Qwen3-0.6B a decode step sends <!--fig 14.bytes-->114,688<!--/fig--> bytes, and waits
# about <!--fig 14.waiting-->12<!--/fig--> times as long as the sending itself takes, if a message needs `20 µs` and the
# link has `10 Gbit/s`. So tensor parallelism is used inside one machine, where a message takes less time.

# %% [markdown]
# ## Experiment 3: why grouped heads limit the ranks
#
# A rank needs at least one whole KV head, because a single head cannot be cut by heads. Qwen3-0.6B has `Hk = 8` of them
# and `H = 16` query heads. With more than eight ranks, each KV head is stored on several ranks, with the same keys. If
# the cache is cut by positions instead, the part of each rank shrinks with every further rank.

# %%
tokens = qwen.max_position_embeddings
n_ranks = [1, 2, 4, 8, 16]
by_heads = [costs.kv_bytes(Shard(qwen, 0, n).local, tokens, 1, 2) / 2**20
            for n in n_ranks]
by_positions = [costs.kv_bytes(qwen, tokens, 1, 2) / n / 2**20 for n in n_ranks]
for n, heads, positions in zip(n_ranks, by_heads, by_positions):
    print(f"{n:>2} ranks: {heads:6.0f} MiB per rank by heads, {positions:6.0f} MiB by "
          "positions")

# %% tags=["hide-input"]
course.figure("14.heads16", by_heads[0] / by_heads[-1])
course.figure("14.positions16", by_positions[0] / by_positions[-1])
fig, axis = course.subplots(width=6, height=2.8)
axis.plot(n_ranks, by_heads, "o-", label="cut by heads", color=course.COLORS[1])
axis.plot(n_ranks, by_positions, "s--", label="cut by positions",
          color=course.COLORS[0])
axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="MiB per rank",
         title=f"cache of {tokens:,} tokens, Qwen3-0.6B")
axis.set_xticks(n_ranks, n_ranks)
axis.set_yticks(by_positions, [f"{size:,.0f}" for size in by_positions])
axis.minorticks_off()
axis.legend()
course.show(fig, alt=f"Cache per rank: cut by heads it falls from {by_heads[0]:.0f} "
            f"MiB on one rank to {by_heads[3]:.0f} on eight, and stays there on "
            "sixteen. Cut by positions it keeps falling, to "
            f"{by_positions[-1]:.0f} MiB on sixteen.")

# %% [markdown]
# On sixteen ranks the cache of a rank is <!--fig 14.heads16-->8<!--/fig--> times smaller by heads,
# and <!--fig 14.positions16-->16<!--/fig--> times by positions. Grouped-query attention makes the cache smaller, but
# leaves fewer KV heads to divide. Multi-head latent attention caches one vector per token for all heads, so its cache
# cannot be divided by heads at all.

# %% [markdown]
# ## Experiment 4: merge two parts by hand
#
# When the positions are cut, each rank attends to its own keys. Its softmax divides by the sum over these keys alone.
# So the outputs cannot simply be added. But each rank can also return its divisor, the sum of `exp(score)`, or better
# the logarithm of this sum, the log-sum-exp. (The sum itself may be too large for a float.) As an example, take two
# keys, one on each rank, with scores `ln 1` and `ln 3` and values `10` and `2`:

# %%
from math import exp, log

# rank 0: one key, so its output is the value, and its log-sum-exp the score
score_a, value_a = log(1), 10.0
score_b, value_b = log(3), 2.0  # rank 1
# what a softmax over both keys gives the first
share_a = exp(score_a) / (exp(score_a) + exp(score_b))
by_hand = share_a * value_a + (1 - share_a) * value_b
print(f"the first key weighs {share_a}, the second {1 - share_a}: {by_hand}")
print(f"the mean of the two outputs would be {(value_a + value_b) / 2}")

# %% tags=["hide-input"]
course.figure("14.hand", by_hand)
course.figure("14.mean", (value_a + value_b) / 2)

# %% [markdown]
# The answer is <!--fig 14.hand-->4<!--/fig-->, and not the mean, which is <!--fig 14.mean-->6<!--/fig-->. The next cell
# does the same with all heads and many keys: `partial_attention` gives outputs and log-sum-exps of a part, and `merge`
# combines any number of parts. A part may be empty, or hidden by the mask. Its log-sum-exp is then `−∞`, and its weight
# in the result is 0.

# %%
generator = torch.Generator().manual_seed(4)
H, Hk, D, S = c.num_attention_heads, c.num_key_value_heads, c.head_dim, 200
q = torch.randn(1, H, 1, D, generator=generator)  # one new token
k, v = torch.randn(2, 1, Hk, S, D, generator=generator)
# (B,H,1,D), torch's own
together = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
cut_at = 150
parts = [partial_attention(q, k[:, :, some], v[:, :, some])
         for some in (slice(cut_at), slice(cut_at, S))]
outputs, lse = (torch.stack(each) for each in zip(*parts))  # (2,B,H,1,D), (2,B,H,1)
mean = outputs.mean(0)
by_count = (cut_at * outputs[0] + (S - cut_at) * outputs[1]) / S
errors = {}
for name, answer in (("merged", merge(outputs, lse)), ("mean", mean),
                     ("weighted by the number of keys", by_count)):
    errors[name] = float((answer - together).abs().max())
    print(f"{name:<31} off by {errors[name]:.0e}")

# %% tags=["hide-input"]
course.figure("14.merged", errors["merged"])
course.figure("14.count", errors["weighted by the number of keys"])

# %% [markdown]
# The merged result equals that of torch, up to <!--fig 14.merged x10-->2e-7<!--/fig-->. A mean weighted by the number
# of keys is off by <!--fig 14.count x2-->0.04<!--/fig-->: the right weights depend on the size of the scores, not only
# on their number.

# %% [markdown]
# ## Experiment 5: positions on two ranks
#
# [Context parallelism](glossary.md#context-parallelism) does this for a whole model. Pages of 16 positions are assigned
# to the ranks in turn. Every rank computes each token, keeps the keys of its own positions, and attends to them.
# Outputs and log-sum-exps are gathered and merged in every layer. The model is whole and unchanged; only the cache and
# the attention object are special (`nanokv/parallel/context.py`). We measure the bytes that a rank receives for a token
# after 100 others, and after 1,000.


# %%
def context_parallel(group, ids):
    """Logits of the last step; bytes received per decode step behind 100 and 1,000
    tokens; bytes of the cache."""
    from nanokv.parallel.context import ContextCache

    received, gather = [], group.gather

    def counted(x):
        received.append((group.size - 1) * x.nbytes)
        return gather(x)

    group.gather = counted
    model = nanokv.load("tiny", device="cpu")[0]
    cache = ContextCache(nanokv.make_cache("dict", model.config), group, page=16)
    bytes_of = {}
    for length in (100, 1000):
        nanokv.prefill_chunks(model, torch.tensor(ids)[:, cache.length : length], cache,
                              cache.length, chunk=300)
        received.clear()
        logits = nanokv.decode(model, torch.tensor(ids)[:, length : length + 1], cache,
                               length)
        bytes_of[length] = sum(received)
    found = {"logits": logits.tolist(), "received": list(bytes_of.values())}
    return found | {"cache": cache.nbytes, "length": cache.length}


ranks = on_ranks(context_parallel, 2, ids=ids.tolist())
length = ranks[0]["length"]
right = nanokv.score(model, ids[:, :length])[:, -1]
off = max(float((torch.tensor(rank["logits"]) - right).abs().max()) for rank in ranks)
short, long = ranks[0]["received"]
whole = costs.kv_bytes(c, length, 1, 4)
print(f"logits off by {off:.0e}")
print(f"received per token: {short:,} bytes behind 100 tokens, {long:,} bytes behind "
      "1,000")
print(f"cache: {[rank['cache'] for rank in ranks]} bytes, of {whole:,} in one process")
course.reveal("14.b", long / short)

# %% tags=["hide-input"]
course.figure("14.cpoff", off)
course.figure("14.received", long)
course.figure("14.growth", long / short)
course.figure("14.unequal", max(rank["cache"] for rank in ranks) / (whole / 2))
course.figure("14.keys", whole / 2 / long)

# %% [markdown]
# A rank receives <!--fig 14.received-->7,104<!--/fig--> bytes per token, after a thousand tokens the same as after a
# hundred: the factor is <!--fig 14.growth-->1<!--/fig-->. It receives results, `H·(D+1)` numbers per layer and a few
# bytes for a check, and these do not grow with the sequence. Sending the keys and values of the other rank instead
# would take <!--fig 14.keys-->325<!--/fig--> times as many bytes at this length. One rank
# holds <!--fig 14.unequal-->1.01<!--/fig--> times half of the cache, because it can have one page more than the other.

# %% [markdown]
# ## Experiment 6: send a computed cache
#
# A prefill is bound by arithmetic, and a decode by memory bandwidth. So some servers prefill on one machine, send the
# cache to another, and decode there. The keys that arrive are bit for bit the keys that were computed. Here rank 0
# prefills and never decodes. Rank 1 decodes; it is fed only the last token of the prompt.


# %%
def hand_over(group, ids):
    """Rank 0: bytes that were sent. Rank 1: the tokens that it generated from the
    keys it was given."""
    from torch import distributed

    model = nanokv.load("tiny", device="cpu")[0]
    cache, c = nanokv.make_cache("dict", model.config), model.config
    prompt, sent = torch.tensor(ids), 0
    if group.rank == 0:
        nanokv.prefill(model, prompt[:, :-1], cache)
        for layer in cache:
            for tensor in layer.state().values():  # key and value, (B,Hk,S,D)
                distributed.send(tensor.contiguous(), 1)
                sent += tensor.nbytes
        return sent
    for layer in cache:
        key, value = (torch.empty(1, c.num_key_value_heads, prompt.shape[1] - 1,
                                  c.head_dim) for _ in "kv")
        distributed.recv(key, 0)
        distributed.recv(value, 0)
        layer.restore({"key": key, "value": value})
    return list(nanokv.generate(model, prompt[:, -1], cache, max_new_tokens=12,
                                eos_token_ids=[]))


asked = {"role": "user", "content": "What is a KV cache?"}
prompt = tokenizer.encode(tokenizer.render([asked]))
sent, answer = on_ranks(hand_over, 2, ids=[prompt])
alone = list(nanokv.generate(model, prompt, max_new_tokens=12, eos_token_ids=[]))
print(f"{sent:,} bytes were sent for {len(prompt) - 1} tokens; the same answer: "
      f"{answer == alone}")
print(tokenizer.text_of(answer))

# %% tags=["hide-input"]
course.figure("14.sent", sent / (len(prompt) - 1))
course.figure("14.same", int(answer == alone))

# %% [markdown]
# That was <!--fig 14.sent-->4,608<!--/fig--> bytes per token, as the formula of notebook 08 says. When is this faster
# than computing the prompt again on the other machine? Sending takes `T · bytes per token / link`, computing `2 ·
# weights · T / speed`, and a little more for attention. Both grow with `T`, so for short prompts `T` cancels out. The
# answer depends on the speed of the link and the speed of the arithmetic.

# %%
# Gbit/s: a slow line, a network cable, and what data centers have
links = [0.1, 1, 10, 100, 400]
T = 4000
# FLOPs per second, rounded
speeds = {"2 cores": 0.1e12, "a desktop GPU": 40e12, "a GPU of a data center": 400e12}
compute = {name: costs.prefill_flops(qwen, T) / speed for name, speed in speeds.items()}
send = [costs.kv_bytes(qwen, T, 1, 2) * 8 / (link * 1e9) for link in links]
for link, seconds in zip(links, send):
    faster = [name for name, again in compute.items() if seconds < again]
    print(f"{link:>5} Gbit/s: {seconds:7.3f} s; faster than a second prefill on: "
          f"{', '.join(faster) or 'none of them'}")
for name, seconds in compute.items():
    print(f"a prefill of {T:,} tokens on {name}: {seconds:.3f} s")

# %% tags=["hide-input"]
course.figure("14.cores", compute["2 cores"] / send[1])
course.figure("14.datacenter", send[2] / compute["a GPU of a data center"])
fig, axis = course.subplots(width=7, height=3)
axis.plot(links, send, "o-", label="send the cache", color=course.COLORS[0])
for (name, seconds), color in zip(compute.items(), course.COLORS[1:]):
    axis.axhline(seconds, linestyle="--", color=color, label=f"prefill on {name}")
axis.set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="seconds",
         title=f"{T:,} tokens of Qwen3-0.6B")
axis.set_xticks(links, links)
axis.minorticks_off()
axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
course.show(fig, alt=f"Seconds to send the cache fall from {send[0]:.0f} at {links[0]} "
            f"Gbit/s to {send[-1]:.3f} at {links[-1]}. Horizontal lines: a prefill "
            "takes " + ", ".join(f"{s:.2g} s on {n}" for n, s in compute.items()) + ".")

# %% [markdown]
# On two cores the prefill takes <!--fig 14.cores-->15<!--/fig--> times as long as sending the cache over `1 Gbit/s`. On
# a GPU of a data center it is the other way round: over `10 Gbit/s`, sending
# takes <!--fig 14.datacenter-->27<!--/fig--> times as long as computing. A larger model has more weights per byte of
# its cache, so sending its cache pays off even over a slower link. (These are rounded peak speeds, which no machine
# reaches in practice.)

# %% [markdown]
# ## What the articles say
#
# The five articles stay on one machine, so none of their [claims](claims.md) is executed here. One of them is worth a
# second look: grouped queries divide the size of the cache. That is right, but as Experiment 3 shows, they also limit
# the number of ranks.

# %% [markdown]
# ## Exercises
#
# **14.1** A model has `L` layers and a hidden size of `C`. It is cut over `n` ranks by heads, and the numbers that are
# summed take `itemsize` bytes each. How many bytes does each rank send per token for the sums after attention and MLP
# of all layers? A ring sends `2·(n−1)/n` of the bytes that are summed from each rank. Leave out embedding and logits.

# %%
case = course.case("14.1")
print(case)

# %% tags=["exercise"]
bytes_sent = ...

# %% tags=["solution"]
bytes_sent = 2 * case.L * case.C * case.itemsize * 2 * (case.n - 1) / case.n

# %%
course.check("14.1", bytes_sent)

# %% [markdown]
# **14.2** Which KV heads does a rank need? Rank `r` of `n` has consecutive query heads, from `r·H/n` on, and query head
# `h` reads KV head `h·Hk // H`. Write a function that gets `Hk`, `n` and the rank, and returns the list of numbers of
# its KV heads. Either `n` divides `Hk`, or `Hk` divides `n`.


# %% tags=["exercise"]
def kv_heads_of(Hk, n, rank):
    return ...


# %% tags=["solution"]
def kv_heads_of(Hk, n, rank):
    first = rank * Hk // n
    return list(range(first, first + max(1, Hk // n)))


# %%
course.check("14.2", kv_heads_of)

# %% [markdown]
# **14.3** Merge two parts. `a` and `b` are outputs, numbers here, and `la` and `lb` their log-sum-exps. Some
# log-sum-exps are as large as `1000`, where `exp` overflows: subtract the larger one from both first. One of them may
# be `−∞` (`float("-inf")`), if its part has no visible key.


# %% tags=["exercise"]
def merge_two(a, la, b, lb):
    return ...


# %% tags=["solution"]
def merge_two(a, la, b, lb):
    from math import exp

    top = max(la, lb)
    weight_a, weight_b = exp(la - top), exp(lb - top)
    return (weight_a * a + weight_b * b) / (weight_a + weight_b)


# %%
course.check("14.3", merge_two)

# %% [markdown]
# **14.4** A prompt of `T` tokens was computed on another machine. Its cache takes `kv` bytes per token, the link has
# `link` Gbit/s (`10⁹` bits). The model has `P` weights, and this machine computes `F` TFLOPs (`10¹²`) per second.
# Answer with a pair: the seconds to send the cache, and the seconds to compute it here, with two FLOPs per weight and
# token. Three digits are enough.

# %%
case = course.case("14.4")
print(case)

# %% tags=["exercise"]
to_send, to_compute = ..., ...

# %% tags=["solution"]
to_send = case.T * case.kv * 8 / (case.link * 1e9)
to_compute = 2 * case.P * case.T / (case.F * 1e12)

# %%
course.check("14.4", (to_send, to_compute))

# %% [markdown]
# ## Quiz

# %%
course.quiz("14")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "b", "b", "c"

# %%
course.answer("14.q1", q1)
course.answer("14.q2", q2)
course.answer("14.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Shoeybi and others, [Megatron-LM](https://arxiv.org/abs/1909.08053): the cuts of Experiment 1.
# - Milakov and Gimelshein, [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867): how to
#   correct a softmax when more scores arrive.
# - Yang and others, [Context Parallelism for Scalable Million-Token Inference](https://arxiv.org/abs/2411.01783).
# - Zhong and others, [DistServe](https://arxiv.org/abs/2401.09670): prefill and decode on separate machines.
# - `nanokv/parallel/`, with `merge` in `merge.py`.
#
# ## Next
#
# You now know which vectors a cache may keep and why. You built one, switched on every bug of notebook 07, counted the
# bytes of a cache, timed it, divided it into pages, shared it, and cut it over two processes. In notebook
# [15](15_an_engine_of_your_own.ipynb) you write an engine that serves many people with one cache.

# %% tags=["skip"]
course.progress()
