# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · How much memory?
#
# A cache saves time and takes memory. How much memory? It follows exactly from a few numbers in the config of the
# model. The formula is simple, and yet published tables and calculators are wrong by factors of two, four and ten. You
# will compute the bytes, measure real tensors to test the formula, and then check published numbers.
#
# ## What you will be able to do
#
# - compute the bytes of a [KV cache](glossary.md#kv-cache) from a config, and say which sizes of the model do *not*
#   matter;
# - tell [GB from GiB](glossary.md#gb-and-gib), and say when it matters;
# - say at how many tokens a cache takes more bytes than the weights;
# - compare ways to make a cache smaller: fewer [KV heads](glossary.md#kv-head), a
#   [latent](glossary.md#latent-attention), fewer bits;
# - check a published number in two minutes.
#
# Letters: `L` layers, `H` query heads, `Hk` KV heads, `D` numbers of a head, `C` numbers of a hidden state ([all of
# them](glossary.md#letters)).

# %%
import gc
from dataclasses import replace

import torch

import nanokv
from nanokv import costs, course
from nanokv.school.course.claims.article1 import TABLE
from nanokv.school.course.claims.shapes import (
    EXAMPLE_OF_ARTICLE_3,
    LLAMA_2_70B,
    LLAMA_2_70B_MHA,
    shape,
)
from nanokv.lab.study.mla import LatentCache, deepseek_v2_savings, with_kv_heads
from nanokv.costs.memory import FAMILY, Estimate, binary, decimal, parse_size
from nanokv.lab.study.quality import log_likelihood

model, tokenizer = course.start("08")
c = model.config
# only its published shape: no weights are needed to count or to weigh
qwen = FAMILY["Qwen/Qwen3-0.6B"]

# %% [markdown]
# ## Predict
#
# Qwen3-0.6B has `596` million parameters, `1.19` GB of weights in bf16. One person chats with it, and the text grows.
# After how many *tokens* does the cache take as many bytes as the weights?

# %% tags=["exercise"]
guess = ...  # tokens

# %% tags=["solution"]
# a common first guess: only book-long contexts can matter beside the weights
guess = 1_000_000

# %%
course.predict("08.a", guess, unit="tokens")

# %% [markdown]
# ## Experiment 1: measure the bytes
#
# The formula is short. Each token has a key and a value (`2`) in every layer (`L`) and every KV head (`Hk`). Each is
# `D` numbers long, and each number takes `itemsize` bytes. `nanokv.costs.cache_bytes` computes it for every kind of
# cache.
#
# To test the formula we need a measurement that does not use it. So we write a scale that contains no formula: it finds
# all tensors in this process and adds up the memory behind them, each piece once. The tensors that exist after a cache
# was filled, and did not exist before, are the cache.


# %%
def alive():
    """Bytes behind all tensors of this process; two tensors on the same memory count
    once."""
    gc.collect()
    memory = (t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor)
    return sum({piece.data_ptr(): piece.nbytes() for piece in memory}.values())


prompt = torch.randint(c.vocab_size, (1, 200))
kinds = [("dict", {}), ("static", {}), ("growing", {}), ("paged", {}),
         ("sliding", {"window": 64}),
         ("quantized", {"bits": 8}), ("quantized", {"bits": 4})]
weighed, computed = {}, {}
for kind, options in kinds:
    before = alive()
    cache = nanokv.make_cache(kind, c, capacity=256, **options)
    nanokv.prefill(model, prompt, cache, start_pos=0)
    for _ in range(8):
        nanokv.decode(model, prompt[:, :1], cache, start_pos=cache.length)
    label = " ".join([kind, *(f"{name}={value}" for name, value in options.items())])
    weighed[label] = alive() - before
    computed[label] = costs.cache_bytes(kind, c, cache.length, itemsize=4, capacity=256,
                                        **options)
    print(f"{label:<18} {cache.length} tokens   formula {computed[label]:>11,} B   "
          f"scale {weighed[label]:>11,} B")
    del cache
worst = max(abs(weighed[label] - computed[label]) for label in weighed)

# %% tags=["hide-input"]
course.figure("08.tokens", prompt.shape[1] + 8)
course.figure("08.worst", worst)
course.figure("08.dict", weighed["dict"] / (prompt.shape[1] + 8))

# %% [markdown]
# All agree. (The pages of `paged` come with a small table that says what each page
# holds: <!--fig 08.worst-->84<!--/fig--> bytes, the largest difference of all.) For the bundled model in fp32 the scale
# measures <!--fig 08.dict-->4,608<!--/fig--> bytes per token, and nothing besides.
#
# Now we measure a cache in the shape of Qwen3-0.6B, in bf16. A cache can be filled without a model, with any tensors of
# the right shape.


# %%
def weigh(config, tokens=1, kind="dict", dtype=torch.bfloat16, **options):
    """Bytes that a cache of this shape takes, found by filling one."""
    cache = nanokv.make_cache(kind, config, **options)
    # all but one at once, then one more, as in a decode
    for count in (tokens - 1, 1) if tokens > 1 else (1,):
        for layer in cache:
            layer.append(*torch.randn(2, 1, config.num_key_value_heads, count,
                                      config.head_dim).to(dtype))
    return cache.nbytes


per_token = weigh(qwen)
print(f"one token of Qwen3-0.6B: {per_token:,} B = {binary(per_token)}")
print(f"the formula:  2 × {qwen.num_hidden_layers} × {qwen.num_key_value_heads} × "
      f"{qwen.head_dim} × 2 B = {costs.kv_bytes_per_token(qwen, 2):,} B")

# %% tags=["hide-input"]
course.figure("08.qwen", per_token)
course.figure("08.qwen_kib", per_token / 1024)

# %% [markdown]
# It is <!--fig 08.qwen-->114,688<!--/fig--> bytes, <!--fig 08.qwen_kib-->112<!--/fig--> KiB, for one token, which is
# about four letters of text. The product has four factors besides the 2: layers, KV heads, head size, bytes per number.
# The hidden size, the number of query heads, the width of the MLP, the vocabulary and the number of parameters are not
# in it.

# %% [markdown]
# ## Experiment 2: the head size
#
# Many calculators, and one of the articles, do not read the head size from the config. They divide the hidden size by
# the number of query heads. That was right for GPT-2, and it is right for some of the Qwen3 models.

# %%
true, derived = {}, {}
for long_name, config in FAMILY.items():
    name = long_name.removeprefix("Qwen/")
    quotient = config.hidden_size // config.num_attention_heads
    true[name] = costs.kv_bytes_per_token(config, 2)
    derived[name] = costs.kv_bytes_per_token(replace(config, head_dim=quotient), 2)
    print(f"{name:<11} C / H = {config.hidden_size:>4} / {config.num_attention_heads} "
          f"= {quotient:>3}, D = {config.head_dim}:  derived {derived[name]:>7,} B, "
          f"true {true[name]:>7,} B per token")
wrong = [name for name in true if true[name] != derived[name]]

# %% tags=["hide-input"]
course.figure("08.wrong", len(wrong))
course.figure("08.half", true["Qwen3-0.6B"] / derived["Qwen3-0.6B"])
fig, axis = course.subplots(width=8.5)
place = torch.arange(len(true))
axis.bar(place - 0.2, [size / 1024 for size in true.values()], 0.4, label="D from the "
         "config")
axis.bar(place + 0.2, [size / 1024 for size in derived.values()], 0.4,
         label="D derived as C / H")
axis.set_xticks(place, [name.removeprefix("Qwen3-") for name in true])
axis.set(title="cache of one token, bf16", xlabel="Qwen3", ylabel="KiB")
axis.grid(axis="x", visible=False)
axis.legend(loc="upper left")
course.show(fig, alt="Pairs of bars for six Qwen3 models, KiB per token with the true "
            "and with a derived head size. They agree for "
            f"{', '.join(name for name in true if name not in wrong)}; too low for "
            f"{', '.join(wrong)}: "
            + ", ".join(f"{derived[name] / 1024:.0f} instead of {true[name] / 1024:.0f}"
                        for name in wrong) + ".")

# %% [markdown]
# The division is wrong for <!--fig 08.wrong-->3<!--/fig--> of six models. For the smallest, which most people try
# first, it is wrong by a factor of <!--fig 08.half-->2<!--/fig-->. A test with Qwen3-8B does not find this bug, because
# there the division is right. The head size of the bundled model differs from `C / H` on purpose, so that code with
# this mistake fails at once.

# %% [markdown]
# ## Experiment 3: GB is not GiB
#
# `1 GB` is `1000³` bytes, `1 GiB` is `1024³`. Disks and articles count in GB. Memory chips are sized in GiB, and many
# programs compute GiB and print "GB". How large is the difference?

# %%
for power, (small, large) in enumerate((("kB", "KiB"), ("MB", "MiB"), ("GB", "GiB"),
                                        ("TB", "TiB")), 1):
    print(f"1 {large} = {1024**power / 1000**power:.3f} {small}")
whole = costs.kv_bytes(qwen, 4096, 1, 2)
gap = parse_size("24GiB") - parse_size("24GB")
print(f"4,096 tokens of Qwen3-0.6B: {whole:,} B = {decimal(whole)} = {binary(whole)}")
print(f"24 GiB − 24 GB = {decimal(gap)}: {gap // per_token:,} tokens of Qwen3-0.6B")

# %% tags=["hide-input"]
course.figure("08.giga", 100 * (1024**3 / 1000**3 - 1))
course.figure("08.gap", gap / 1e9)
course.figure("08.gap_tokens", gap / per_token)

# %% [markdown]
# GiB and GB differ by <!--fig 08.giga-->7.4<!--/fig--> percent, and the difference grows with every prefix. On a card
# of "24 gigabytes" it is <!--fig 08.gap-->1.77<!--/fig--> GB, enough for <!--fig 08.gap_tokens-->15,431<!--/fig-->
# tokens of the small model. In this course GB means GB and GiB means GiB, and `nanokv memory` prints both.

# %% [markdown]
# ## Experiment 4: cache against weights
#
# Now the case of your prediction. The weights are stored once, while the cache grows with every token of every
# sequence.

# %%
estimates = {name: Estimate(name, FAMILY[f"Qwen/{name}"], "bfloat16", 40_960)
             for name in true}
small = estimates["Qwen3-0.6B"]
for name, e in estimates.items():
    print(f"{name:<11} weights {decimal(e.weights):>8}   a token "
          f"{binary(e.per_token):>8}   equal at {e.crossover:>8,}")
course.reveal("08.a", small.crossover)

# %% tags=["hide-input"]
course.figure("08.crossover", small.crossover)
course.figure("08.full", costs.kv_bytes(qwen, qwen.max_position_embeddings, 1,
                                        2) / small.weights)
course.figure("08.cross32", estimates["Qwen3-32B"].crossover)
fig, (left, right) = course.subplots(1, 2, width=9.5, height=3.6)
tokens = [2**i for i in range(8, 18)]
for sequences, color in ((1, course.COLORS[0]), (16, course.COLORS[5])):
    name = "cache, 1 sequence" if sequences == 1 else f"cache, {sequences} sequences"
    left.plot(tokens, [costs.kv_bytes(qwen, n, sequences, 2) / 1e9 for n in tokens],
              color=color, label=name)
left.axhline(small.weights / 1e9, color=course.COLORS[1], label="weights")
left.plot([small.crossover], [small.weights / 1e9], "o", color="black", markersize=5)
left.annotate(f"{small.crossover:,}", (small.crossover, small.weights / 1e9), (14, -16),
              textcoords="offset points")
left.set(xscale="log", yscale="log", title="Qwen3-0.6B in bf16",
         xlabel="tokens per sequence", ylabel="GB")
left.legend(loc="upper left")
right.barh(list(estimates), [e.crossover for e in estimates.values()],
           color=course.COLORS[0])
right.axvline(qwen.max_position_embeddings, color=course.COLORS[1], linestyle="--")
right.text(qwen.max_position_embeddings * 1.06, 0, "their context",
           color=course.COLORS[1], va="center")
right.set(xscale="log", xlim=(3e3, 6e5), title="tokens at which cache = weights",
          xlabel="tokens, over all sequences")
right.invert_yaxis()
right.grid(axis="y", visible=False)
course.show(fig, alt="Left: the cache of Qwen3-0.6B rises in proportion to the tokens "
            f"and crosses the line of its weights, {small.weights / 1e9:.2f} GB, at "
            f"{small.crossover:,} tokens; with 16 sequences at "
            f"{small.crossover // 16:,} each. Right: the same crossing for six models, "
            f"from {small.crossover:,} to {estimates['Qwen3-32B'].crossover:,} tokens; "
            f"a line marks their context of {small.context:,}.")

# %% [markdown]
# It is <!--fig 08.crossover-->10,394<!--/fig--> tokens, about one long document. At its full context, the cache of the
# small model takes <!--fig 08.full-->3.9<!--/fig--> times the bytes of its weights. A large model has more weights per
# byte of cache; for the 32B the two are equal at <!--fig 08.cross32-->249,955<!--/fig--> tokens. But these are the
# tokens of *all sequences together*, and a server with many users holds more than that. So the answer depends on the
# use. For one short conversation, the weights take most of the memory and most of the bytes that a step reads. On a
# server with many users, the cache takes most of both.

# %% [markdown]
# ## Experiment 5: fewer heads
#
# The cache holds `Hk` heads, so fewer KV heads make a smaller cache. We rebuild the loaded model with different numbers
# of KV heads: as many as query heads (multi-head attention, MHA), its own number (grouped queries, GQA), and one for
# all (multi-query, MQA). To get more heads we copy them, to get fewer we average them. Does the model still remember
# the name from the prompt? (The nats in the output are the mean loss per token of the right text; less is better.)

# %%
words = ("My name is Zorbla.", "So your name is Zorbla.", "What is my name?",
         "Your name is Zorbla.")
whole_talk = [{"role": role, "content": text}
              for role, text in zip(("user", "assistant") * 2, words, strict=True)]
asked = torch.tensor([tokenizer.encode(tokenizer.render(whole_talk[:-1]))])
rendered = tokenizer.render(whole_talk, add_generation_prompt=False)
told = torch.tensor([tokenizer.encode(rendered)])
H, Hk = c.num_attention_heads, c.num_key_value_heads
original = nanokv.score(model, told)
moved, sizes, surprise = {}, {}, {}
for heads in sorted({H, Hk, 1}, reverse=True):
    config, state = with_kv_heads(c, model.state_dict(), heads)
    other = nanokv.loading.build(config, state)
    other.generation_config = model.generation_config
    cache = nanokv.make_cache("dict", config)
    answer = tokenizer.decode(list(nanokv.generate(other, asked, cache,
                                                   max_new_tokens=16)))
    logits = nanokv.score(other, told)
    moved[heads] = float((logits - original).abs().max())
    sizes[heads] = cache.nbytes / cache.length
    surprise[heads] = float(-log_likelihood(logits, told).mean())
    print(f"KV heads {heads}: {sizes[heads]:>6,.0f} B per token, logits move by "
          f"{moved[heads]:4.1f}, {surprise[heads]:.2f} nats a token of the talk, says "
          f"{answer!r}")

# %% tags=["hide-input"]
course.figure("08.up", sizes[H] / sizes[Hk])
course.figure("08.down", sizes[Hk] / sizes[1])
course.figure("08.moved_up", moved[H])
course.figure("08.moved_down", moved[1])
course.figure("08.talk", surprise[Hk])
course.figure("08.talk_down", surprise[1])

# %% [markdown]
# Copied heads change no result: the logits change by <!--fig 08.moved_up-->0<!--/fig-->, and the cache
# takes <!--fig 08.up-->3<!--/fig--> times the bytes. So a cache that stores keys for *query* heads gives right answers
# and wastes memory. A comparison of answers cannot find this mistake; a measurement of bytes can. Averaged heads
# take <!--fig 08.down-->2<!--/fig--> times fewer bytes, but the result is a different model: the logits change
# by <!--fig 08.moved_down-->20<!--/fig-->, and the loss of the talk rises from <!--fig 08.talk-->0.59<!--/fig-->
# to <!--fig 08.talk_down-->0.81<!--/fig-->. The name may still be right, so one right answer does not show that the
# model is the same. The number of KV heads is chosen *before* training. A change later requires some more training, as
# Ainslie and others showed.

# %% [markdown]
# ## Experiment 6: a latent, and fewer bits
#
# DeepSeek-V2 does not cache keys and values. Per token and layer it caches one [latent](glossary.md#latent-attention)
# of `512` numbers, from which every head computes its own keys and values, and one key of `64` numbers that carries the
# position. We measure one layer with its `128` heads of size `128`, in bf16:

# %%
latent = LatentCache()
latent.append(torch.randn(1, 1, 512).bfloat16(), torch.randn(1, 1, 64).bfloat16())
a_layer = {
    "MHA, 128 heads": weigh(shape(1, 128, 128)),
    "GQA, 8 heads": weigh(shape(1, 8, 128)),
    "latent": latent.nbytes,
    "MQA, 1 head": weigh(shape(1, 1, 128)),
}
for name, size in a_layer.items():
    print(f"{name:<15} {size:>7,} B per token and layer   "
          f"{a_layer['MHA, 128 heads'] / size:>6.1f} times less than MHA")
length = 512
exact = weigh(qwen, length)
bits = {"bf16": exact} | {f"{n} bits": weigh(qwen, length, "quantized", bits=n)
                          for n in (8, 4)}
for name, size in bits.items():
    print(f"Qwen3-0.6B, {length} tokens, {name:<7} {size:>11,} B   {exact / size:.2f} "
          "times less")

# %% tags=["hide-input"]
course.figure("08.latent", a_layer["MHA, 128 heads"] / a_layer["latent"])
course.figure("08.latent_mqa", a_layer["latent"] / a_layer["MQA, 1 head"])
course.figure("08.int8", exact / bits["8 bits"])
course.figure("08.int4", exact / bits["4 bits"])
fig, (left, right) = course.subplots(1, 2, width=9.5, height=2.9)
for axis, data, title, label in (
    (left, a_layer, "one layer, 128 query heads of 128", "bytes per token (log)"),
    (right, {name: size / length / 1024 for name, size in bits.items()}, "Qwen3-0.6B, "
     f"{length} tokens", "KiB per token"),
):
    bars = axis.barh(list(data), list(data.values()),
                     color=[course.COLORS[1]] + [course.COLORS[0]] * (len(data) - 1))
    axis.bar_label(bars, fmt="{:,.0f}", padding=3)
    axis.set(title=title, xlabel=label, xlim=(1, 6e5) if axis is left else (0, 135))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
left.set_xscale("log")
course.show(fig, alt="Left, bytes per token and layer, log scale: "
            + ", ".join(f"{n} {s:,}" for n, s in a_layer.items())
            + ". Right, KiB per token: "
            + ", ".join(f"{n} {s / length / 1024:.0f}" for n, s in bits.items()) + ".")

# %% [markdown]
# The latent takes <!--fig 08.latent-->57<!--/fig--> times fewer bytes than full heads,
# and <!--fig 08.latent_mqa-->2.25<!--/fig--> times *more* than one shared head. It is not the smallest cache, but every
# head still gets its own keys. Eight bits make the cache <!--fig 08.int8-->1.68<!--/fig--> times smaller, not twice.
# Four bits make it <!--fig 08.int4-->2.65<!--/fig--> times smaller, not four times. The scales have to be stored as
# well, and the newest tokens stay exact. (Notebook 13 measures how much quality is lost with fewer bits.)
#
# What about the well-known "93.3 percent less"? `deepseek_v2_savings` computes five savings from published shapes:

# %%
for against, saving in deepseek_v2_savings().items():
    print(f"{100 * saving:>7.1f} %   {against}")
savings = [100 * saving for saving in deepseek_v2_savings().values()]
published, equal_bits, one_layer, full_heads, shared_head = savings

# %% tags=["hide-input"]
course.figure("08.published", published)
course.figure("08.bits", equal_bits)
course.figure("08.layer", one_layer)
course.figure("08.mha", full_heads)
course.figure("08.mqa", shared_head)

# %% [markdown]
# The same cache
# saves <!--fig 08.published-->93.3<!--/fig-->, <!--fig 08.bits-->82.2<!--/fig-->, <!--fig 08.layer-->71.9<!--/fig-->, <!--fig 08.mha-->98.2<!--/fig-->
# or <!--fig 08.mqa-->−125<!--/fig--> percent. All five are correct, each relative to a different baseline. The
# published number compares two different models with different numbers of layers, one stored in six bits, the other in
# sixteen. **A saving has no meaning without its baseline.**

# %% [markdown]
# ## Experiment 7: what fits?
#
# Take a card of `24 GiB` and Qwen3-8B in bf16. Every user has a context of `8192` tokens, and the memory holds nothing
# but weights and caches. How many such sequences fit at a time?

# %% tags=["exercise"]
sequences = ...

# %% tags=["solution"]
sequences = 21  # a common first guess: 24 GiB divided by the cache of one sequence

# %%
course.predict("08.b", sequences, unit="sequences")

# %%
memory = parse_size("24GiB")
eight = replace(estimates["Qwen3-8B"], context=8192)
alone = memory // eight.cached(8192, 1)
print(f"weights {binary(eight.weights)}, one sequence {binary(eight.cached(8192, 1))}: "
      f"{eight.max_batch(memory)} fit beside the weights ({alone} without them)")
course.reveal("08.b", eight.max_batch(memory))

# %% tags=["hide-input"]
course.figure("08.fit", eight.max_batch(memory))
course.figure("08.alone", alone)
course.figure("08.int8fit",
              replace(eight, cache="quantized", options={"bits": 8}).max_batch(memory))
fig, axis = course.subplots(width=8, height=3.6)
contexts = [2**i for i in range(8, 16)]
words = []
for name, color in (("Qwen3-0.6B", course.COLORS[0]), ("Qwen3-8B", course.COLORS[2])):
    for label, kind, options, style in (("bf16", "dict", {}, "o-"),
                                        ("8 bits", "quantized", {"bits": 8}, "o--")):
        e = replace(estimates[name], cache=kind, options=options)
        fits = [replace(e, context=n).max_batch(memory) for n in contexts]
        axis.plot(contexts, fits, style, markersize=3, color=color, label=f"{name}, "
                  f"cache in {label}")
        words.append(f"{name} with its cache in {label} {fits[contexts.index(8192)]}")
axis.set(xscale="log", yscale="log", ylim=0.7, xlabel="tokens per sequence",
         ylabel="sequences",
         title="full sequences beside the weights in 24 GiB")
axis.set_xticks(contexts, [f"{n:,}" for n in contexts])
axis.minorticks_off()
axis.legend(fontsize=9)
course.show(fig, alt="Four lines on log axes: twice the context, half the sequences. "
            "At 8,192 tokens: "
            + ", ".join(words) + ".")

# %% [markdown]
# It is <!--fig 08.fit-->7<!--/fig-->. The weights take memory too; a calculation that forgets them
# gives <!--fig 08.alone-->21<!--/fig-->. With a cache in eight bits it is <!--fig 08.int8fit-->14<!--/fig-->. A real
# server fits a few fewer, because a prefill also needs memory for its activations.

# %% [markdown]
# ## What the articles say
#
# Now we check the articles. The method is always the same: measure the bytes of *one* token of the shape in question,
# multiply by the number of tokens and of sequences, and compare with the printed number. Here are three wrong claims.
# The other claims that this notebook checks are on [the page of all claims](claims.md).

# %%
one = weigh(LLAMA_2_70B), weigh(LLAMA_2_70B_MHA)
print(f"Llama-2-70B, one token: {one[0]:,} B, with 64 KV heads {one[1]:,} B")
for (layers, heads, size), printed in TABLE.items():
    print(f"{layers} layers, {heads:>2} KV heads of {size:>3}: printed {printed:>2g} "
          f"KiB, weighed {weigh(shape(layers, heads, size)) / 1024:g} KiB")

course.claim("0.4", "wrong", found=qwen.head_dim)
course.claim("1.9", "wrong", found=one[0] * 8192 * 32)
course.claim("1.20", "wrong", found=weigh(shape(12, 12, 64)) / 1024)

# %% tags=["hide-input"]
course.confirm("0.5", "wrong", found=per_token)
# one token more, and the cache is the larger one
course.confirm("1.6", "misleading", found=small.crossover + 1)
course.confirm("1.8", "right", found=per_token * 8192 * 32)
course.confirm("1.10", "wrong", found=one[1] * 8192 * 32)
course.confirm("1.18", "right",
               found=weigh(shape(32, 32, 128)) / weigh(shape(32, 8, 128)))
course.confirm("1.19", "wrong",
               found=100 * (1 - a_layer["latent"] / a_layer["MHA, 128 heads"]))
course.confirm("3.11", "right", found=f"{per_token:,} B for every token of Qwen3-0.6B")
course.confirm("3.12", "right", found=weigh(EXAMPLE_OF_ARTICLE_3) * 4096)
course.confirm("3.13", "misleading",
               found=per_token * qwen.max_position_embeddings / small.weights)
course.confirm("3.20", "right", found=weigh(qwen, 200) / weigh(qwen, 100))

# %% [markdown]
# ## Exercises
#
# **08.1** Write the calculator: bytes of cache per token, from the sizes in a config. The check tries it on 50 random
# shapes. (`C` hidden size, `L` layers, `H` query heads, `Hk` KV heads, `D` head size.)


# %% tags=["exercise"]
def bytes_per_token(C, L, H, Hk, D, itemsize):
    return ...


# %% tags=["solution"]
def bytes_per_token(C, L, H, Hk, D, itemsize):
    return 2 * L * Hk * D * itemsize


# %%
course.check("08.1", bytes_per_token)

# %% [markdown]
# **08.2** The article's Llama-2-70B: `80` layers, `64` query heads, `8` KV heads of size `128`, two bytes per number.
# What is the right size of the cache for the tokens and sequences below? Answer with a pair: in GB and in GiB.

# %%
case = course.case("08.2")
print(f"{case.tokens} tokens, {case.batch} sequences")

# %% tags=["exercise"]
gb_and_gib = ...  # (…, …)

# %% tags=["solution"]
whole = 2 * 80 * 8 * 128 * 2 * case.tokens * case.batch
gb_and_gib = whole / 1e9, whole / 2**30

# %%
course.check("08.2", gb_and_gib)

# %% [markdown]
# **08.3** Correct the table of the article: KiB per token for its four shapes, each `(layers, KV heads, head size)`.
# Answer with four numbers.

# %%
case = course.case("08.3")
print(f"(12, 12, 64), (12, 3, 64), (32, 4, 128), (12, 1, 64); {case.itemsize} bytes "
      "per number")

# %% tags=["exercise"]
repaired = ...  # (…, …, …, …)

# %% tags=["solution"]
repaired = [2 * a * b * d * case.itemsize / 1024
            for a, b, d in ((12, 12, 64), (12, 3, 64), (32, 4, 128), (12, 1, 64))]

# %%
course.check("08.3", repaired)

# %% [markdown]
# **08.4** Three savings of one cache. The new model has `60` layers, `128` query heads of size `128`, and a latent
# cache of `576` numbers per layer. The old model has `95` layers, `8` KV heads of size `128`, and sixteen bits. How
# many percent does the new cache save per token, to a tenth of a percent: (a) against the old model's cache, if the new
# cache is stored in the few bits given below; (b) against the old model's cache, both in sixteen bits; (c) against a
# cache of all `128` heads of the new model, in equal bits?

# %%
case = course.case("08.4")
print(f"(a) stored in {case.bits} bits")

# %% tags=["exercise"]
percents = ...  # (a, b, c)

# %% tags=["solution"]
new, old, own = 60 * 576, 95 * 2 * 8 * 128, 60 * 2 * 128 * 128
percents = [100 * (1 - share)
            for share in (new * case.bits / (old * 16), new / old, new / own)]

# %%
course.check("08.4", percents)

# %% [markdown]
# **08.5** How many full sequences fit beside the weights? Weights and cache in bf16. `costs.parameters(config)` counts
# the parameters; the other numbers are below.

# %%
case = course.case("08.5")
config = FAMILY[case.name]
print(f"{case.name}, {case.tokens} tokens per sequence, {case.gib} GiB of memory; "
      f"{config}")

# %% tags=["exercise"]
fitting = ...

# %% tags=["solution"]
room = case.gib * 2**30 - 2 * costs.parameters(config)
fitting = room // (costs.kv_bytes_per_token(config, 2) * case.tokens)

# %%
course.check("08.5", fitting)

# %% [markdown]
# ## Quiz

# %%
course.quiz("08")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "b", "c", "a"

# %%
course.answer("08.q1", q1)
course.answer("08.q2", q2)
course.answer("08.q3", q3)

# %% [markdown]
# ## Further reading
#
# - `nanokv memory --help`: this notebook as a command, for any model, context, batch, cache and card; `nanokv memory
#   --check` measures every cache.
# - Ainslie and others, [GQA](https://arxiv.org/abs/2305.13245): fewer KV heads for a model that was trained with many.
# - DeepSeek-AI, [DeepSeek-V2](https://arxiv.org/abs/2405.04434), section 2.1 and its table 1: the latent, and what it
#   is compared with. `nanokv/lab/study/mla.py` runs it.
# - Hugging Face, [Cache strategies](https://huggingface.co/docs/transformers/main/en/kv_cache): what transformers
#   offers to save memory.
#
# ## Next
#
# You know how many bytes a cache takes. How much time does it save? Notebook [09](09_measure_honestly.ipynb) measures
# that, and shows how easy it is to measure the wrong thing.

# %% tags=["skip"]
course.progress()
