# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Inside a Qwen3 block
#
# A Qwen3 model runs one small piece of code, the block, once per layer, each time with different weights. The block is
# short enough to learn by heart. A port of it can be wrong without an error message in four places: the pairs of the
# rotation, its base, the norm of queries and keys, and the order of norm and rotation. You will make each of these
# mistakes on purpose, and measure how visible it is.
#
# ## What you will be able to do
#
# - derive the shape of every weight of a block from six numbers of the config;
# - write [RMSNorm](glossary.md#rmsnorm) and [RoPE](glossary.md#rope) from memory, and say in which order they run;
# - say which [KV head](glossary.md#kv-head) a query head reads;
# - recognise a wrong port even when its text is fluent.
#
# Keep `nanokv/model.py` open beside this page: it is the whole architecture, and every cell here runs it.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `C` numbers of a hidden state, `H` query heads, `Hk`
# KV heads, `D` numbers of a head, `V` entries of the vocabulary ([all letters](glossary.md#letters)).

# %%
import random
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import nn

import nanokv
from nanokv import course
from nanokv.attention import causal_attention
from nanokv.cache import NoCache
from nanokv.rope import apply_rope, rope_angles, rope_frequencies
from nanokv.lab.study.quality import log_likelihood
from nanokv.school.training import corpus

model, tokenizer = course.start("03")
c = model.config

# with words that the bundled model never saw
talk = corpus.conversation(random.Random(1), 8, held_out=True)
rendered = tokenizer.render(talk, add_generation_prompt=False)
text = torch.tensor([tokenizer.encode(rendered)])[:, :160]  # (1,T)
seen = nanokv.debug.record(model, text)  # what every operation of a forward gave
truth = nanokv.score(model, text)  # (1,T,V)
print(f"\na conversation of {text.shape[1]} tokens, which begins: "
      f"{tokenizer.decode(text[0, :24].tolist())!r}")

# %% [markdown]
# ## Predict
#
# The line at the top gives the hidden size `C`, the number of query heads and the head size `D`. The query projection
# `q_proj` takes the `C` numbers of a token. How many numbers does it return?

# %% tags=["exercise"]
guess = ...  # numbers

# %% tags=["solution"]
guess = c.hidden_size  # a common first guess: as many as go in

# %%
course.predict("03.a", guess, unit="numbers")

# %% [markdown]
# ## Experiment 1: the shapes
#
# The cell prints every operation of the first block, in the order in which they run, with the shape of its output for
# one token.

# %% tags=["hide-input"]
course.show(course.drawings.block())

# %%
for name in nanokv.debug.OPERATIONS:
    print(f"{name:<26}{tuple(seen[0, name].shape[2:])}")

wide = model.layers[0].self_attn.q_proj.out_features
course.reveal("03.a", wide)

# %% tags=["hide-input"]
course.figure("03.qproj", wide)
course.figure("03.hidden", c.hidden_size)
course.figure("03.derived", c.hidden_size / c.num_attention_heads)
course.figure("03.head", c.head_dim)

# %% [markdown]
# It is <!--fig 03.qproj-->288<!--/fig-->, and not the <!--fig 03.hidden-->192<!--/fig--> of the hidden size. The [head
# size](glossary.md#head-size) `D` is a separate entry of the config, here <!--fig 03.head-->48<!--/fig-->. Hidden size
# divided by heads would be <!--fig 03.derived-->32<!--/fig-->. In older models the two numbers were equal, and much
# code still computes `D` by this division. For Qwen3-0.6B such code gets `1024 / 16 = 64`, but the config says `128`.
# One of the articles makes this mistake in a shape and in a size in bytes. `o_proj` turns the output of all heads back
# into `C` numbers, so the [residual stream](glossary.md#residual-stream) keeps its width.
#
# Which parts hold the parameters?

# %%
parts = {"embedding": model.embed_tokens}
for kind, name in (("attention", "self_attn"), ("MLP", "mlp")):
    parts[kind] = nn.ModuleList(getattr(layer, name) for layer in model.layers)
sizes = {name: sum(p.numel() for p in part.parameters())
         for name, part in parts.items()}
total = sum(p.numel() for p in model.parameters())  # a shared tensor counts once
shared = model.lm_head.weight is model.embed_tokens.weight
head = 0 if shared else model.lm_head.weight.numel()
sizes["other norms"] = total - sum(sizes.values()) - head
print(", ".join(f"{name} {size:,}" for name, size in sizes.items()))
print(f"all together {total:,}; the head is the embedding: {shared}")

# %% tags=["hide-input"]
course.figure("03.total", total)
course.figure("03.mlp_share", 100 * sizes["MLP"] / total)
course.figure("03.embedding", sizes["embedding"])

# %% [markdown]
# The model has <!--fig 03.total-->3,050,496<!--/fig--> parameters; <!--fig 03.mlp_share-->58<!--/fig--> percent of them
# are in the MLPs. The embedding has <!--fig 03.embedding-->393,216<!--/fig--> and is used twice. At the bottom, its
# rows turn ids into hidden states. At the top, the last hidden state is multiplied by the same rows, which gives the
# [logits](glossary.md#logits). This is called a *tied* head: one tensor for both. The larger Qwen3 models have two
# tensors.

# %% [markdown]
# ## Experiment 2: the norm
#
# A block only *adds* to the hidden state, so the hidden state grows. Attention and MLP read it through RMSNorm, which
# divides it by its root mean square and multiplies it by a learned weight. Many texts call this layer normalisation.
# Layer normalisation also subtracts the mean; RMSNorm subtracts nothing. A test shows the difference: add a constant to
# the input.

# %%
norm = model.layers[0].input_layernorm
x = seen[None, "embed_tokens"][0, 1]  # (C,)
layer_norm = nn.LayerNorm(c.hidden_size, c.rms_norm_eps, elementwise_affine=False)
with torch.inference_mode():
    moved = {
        name: float((f(x + 1) - f(x)).norm() / f(x).norm())
        for name, f in (("RMSNorm", norm), ("LayerNorm", layer_norm))
    }
for name, change in moved.items():
    print(f"{name:<10} changes by {100 * change:8.3f} percent when 1 is added to every "
          "entry")


def rms(x):
    """(1,T,C) → (T,)"""
    return x[0].float().pow(2).mean(-1).sqrt()


stream = [rms(seen[None, "embed_tokens"])]
stream += [rms(seen[i, "mlp_residual"]) for i in range(len(model.layers))]
normed = [rms(seen[i, "input_layernorm"])
          for i in range(len(model.layers))] + [rms(seen[None, "norm"])]

# %% tags=["hide-input"]
blue, orange = course.COLORS[:2]
fig, axis = course.subplots(width=7.5, height=3.4)
for values, name, color in ((stream, "the residual stream", orange),
                            (normed, "after the norm", blue)):
    low, middle, high = torch.stack(values).quantile(torch.tensor([0.0, 0.5, 1.0]),
                                                     dim=1)
    axis.fill_between(range(len(values)), low, high, color=color, alpha=0.2,
                      linewidth=0)
    axis.plot(range(len(values)), middle, "o-", color=color, label=name)
axis.set(yscale="log", xlabel="layer that reads it (the last one is the head)",
         ylabel="root mean square (log)",
         title="size of a token: median and range")
axis.legend()
first, last = float(stream[0].median()), float(stream[-1].median())
low, high = min(float(n.median())
                for n in normed[:-1]), max(float(n.median()) for n in normed[:-1])
course.figure("03.grow", last / first)
course.show(fig, alt="Two lines over the layers, on a log scale. The residual stream "
            f"grows from {first:.2f} to {last:.1f}. After the norm, what the layers "
            f"read stays between {low:.2f} and {high:.2f} in the median.")

# %% [markdown]
# The hidden state grows by a factor of <!--fig 03.grow-->24<!--/fig--> from the first layer to the last. The first
# layer alone makes it several times as large. This growth does not reach the input of attention and MLP: after the
# norm, the size of their input depends only on the norm's weights, for every token.

# %% [markdown]
# ## Experiment 3: rotation
#
# Attention compares a query with a [key](glossary.md#key). The result has to depend on the order of the words. So both
# vectors are rotated first, by an angle that grows with their [position](glossary.md#position). The `D` numbers form
# `D/2` pairs, dimension `i` with `i + D/2`. Each pair rotates at its own speed. Left: how many tokens a full turn
# takes. Right: the product of one real query and one real key, for all distances between them, with the key at position
# 0 and at 1,000.

# %%
speed, _ = rope_frequencies(c)  # (D/2,) radians per token
turn = 2 * torch.pi / speed
context = c.max_position_embeddings
slow = int((turn > context).sum())
layer, head = len(model.layers) // 2, 0
# (D,) each, before the rotation
q, k = seen[layer, "q_norm"][0, 40, head], seen[layer, "k_norm"][0, 12, 0]
distances = torch.arange(200)


def products(start):
    """q·k / sqrt(D) with the key at `start` and the query at start + distance, for
    all distances."""
    key = apply_rope(k.view(1, 1, 1, -1),
                     rope_angles(c, torch.tensor([start]), k.dtype))
    queries = apply_rope(q.expand(1, 1, len(distances), -1),
                         rope_angles(c, start + distances, q.dtype))
    return (queries @ key.transpose(2, 3)).flatten() / c.head_dim**0.5


here, there = products(0), products(1000)
apart = float((here - there).abs().max())

# %% tags=["hide-input"]
fig, (left, right) = course.subplots(1, 2, width=9.5)
left.bar(range(len(turn)), turn, color=[orange if t > context else blue for t in turn])
left.axhline(context, color="gray", linestyle=":")
left.set(yscale="log", title="tokens for a full turn", xlabel="pair",
         ylabel="tokens (log)")
left.text(0, context * 1.3, f"context {context:,}", fontsize=9)
right.plot(distances, here, color=blue, linewidth=4, alpha=0.4, label="key at "
           "position 0")
right.plot(distances, there, color=course.COLORS[6], linewidth=1, linestyle="--",
           label="key at position 1,000")
right.set(title="one query times one key", xlabel="distance in tokens", ylabel="score")
right.legend()
course.figure("03.slow", slow)
course.figure("03.pairs", len(turn))
course.figure("03.apart", apart)
course.show(fig, alt=f"Left: bars on a log scale, from {turn[0]:.1f} tokens for a full "
            f"turn of pair 0 to {turn[-1]:,.0f} for the last; {slow} of {len(turn)} "
            f"pairs need more than the context of {context:,}. Right: a curve that "
            f"swings between {here.min():.1f} and {here.max():.1f} over 200 tokens; a "
            "second one, for positions 1,000 higher, lies on it.")

# %% [markdown]
# The two curves differ by <!--fig 03.apart x9-->3e-5<!--/fig-->: only the distance counts. That is why a
# [cache](glossary.md#kv-cache) can keep rotated keys without changing them later. The fast pairs distinguish
# neighbouring positions. Of the <!--fig 03.pairs-->24<!--/fig--> pairs, <!--fig 03.slow-->13<!--/fig--> slow ones do
# not complete one turn within the context; they hardly depend on the position at all.

# %% [markdown]
# ## Experiment 4: four ways to get it wrong
#
# Now we make four mistakes. Each of them occurs in real ports, and none of them raises an error or changes a shape:
#
# - the pairs: dimension `2i` with `2i + 1`, as in one of the articles, instead of `i` with `i + D/2`;
# - the base of the speeds: `10,000`, the default of other models, instead of the config's;
# - the norm of queries and keys after the rotation instead of before;
# - no norm of queries and keys.
#
# Predict the effect of the first mistake. At every position of the conversation the model has a first choice for the
# next token. With the wrong pairs, how many of 100 first choices stay the same?

# %% tags=["exercise"]
kept = ...  # 0 to 100

# %% tags=["solution"]
kept = 5  # a common guess: hardly any

# %%
course.predict("03.b", kept, unit="of 100")


# %%
def interleaved(x, rope):
    """RoPE with neighbours as pairs, (x_2i, x_2i+1)."""
    cos, sin = (part[..., : x.shape[-1] // 2] for part in rope)  # (T,D/2)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def changed_model(**parts):
    """The model with another apply_rope or rope_angles, inside a `with` block."""
    return patch.multiple(nanokv.model, **parts)


@contextmanager
def without_norms():
    """The model without q_norm and k_norm, inside a `with` block; gives the pairs
    that were taken out."""
    norms = [(layer.self_attn.q_norm, layer.self_attn.k_norm) for layer in model.layers]
    with ExitStack() as stack:
        for layer in model.layers:
            for name in ("q_norm", "k_norm"):
                stack.enter_context(patch.object(layer.self_attn, name, nn.Identity()))
        yield norms


@torch.inference_mode()
def norm_after_rotation():
    with without_norms() as norms:
        each = iter(norms)

        def attend(q, k, v):  # attention gets q and k rotated: the norms come last here
            q_norm, k_norm = next(each)
            return causal_attention(q_norm(q), k_norm(k), v)

        return model.lm_head(model(text, NoCache(len(model.layers)), 0, attend))


variants = {}


def base_10_000(config, *rest):
    return rope_angles(replace(config, rope_theta=1e4), *rest)


def shifted(config, positions, dtype):
    return rope_angles(config, positions + 1000, dtype)


with changed_model(apply_rope=interleaved):
    variants["neighbours as pairs"] = nanokv.score(model, text)
with changed_model(rope_angles=base_10_000):
    variants["base 10,000"] = nanokv.score(model, text)
with without_norms():
    variants["no q/k norm"] = nanokv.score(model, text)
variants["norm after rotation"] = norm_after_rotation()
with changed_model(rope_angles=shifted):
    variants["all positions + 1,000"] = nanokv.score(model, text)

losses = {"right": -float(log_likelihood(truth, text).mean())}
same, gap = {}, {}
for name, logits in variants.items():
    gap[name] = (logits - truth)[0].abs().amax(-1)  # (T,)
    same[name] = 100 * float((logits.argmax(-1) == truth.argmax(-1)).float().mean())
    losses[name] = -float(log_likelihood(logits, text).mean())
print(f"{'':<24}position 0   position 1   largest   same first choice   loss (right: "
      f"{losses['right']:.3f})")
for name in variants:
    print(f"{name:<24}{gap[name][0]:10.0e}   {gap[name][1]:10.0e}   "
          f"{gap[name].max():7.0e}   {same[name]:13.0f} of 100   {losses[name]:.3f}")
pairs, late = "neighbours as pairs", "norm after rotation"
shift = "all positions + 1,000"
course.reveal("03.b", same["neighbours as pairs"])

# %% tags=["hide-input"]
course.figure("03.pairs.same", same[pairs])
course.figure("03.pairs.loss", losses[pairs])
course.figure("03.late.same", same[late])
course.figure("03.late.loss", losses[late])
course.figure("03.late.gap", gap[late].max())
course.figure("03.shift.gap", gap[shift].max())
course.figure("03.loss", losses["right"])
fig, axis = course.subplots(width=8.5, height=3.8)
window = 9  # a running median, so that the lines can be told apart
colors = dict(zip(variants, (1, 4, 3, 2, 0)))
for name, values in gap.items():
    smooth = values.unfold(0, window, 1).median(-1).values
    place = range(window // 2, window // 2 + len(smooth))
    axis.plot(place, smooth, color=course.COLORS[colors[name]], label=name)
    axis.plot(range(1, 4), values[1:4], ".", color=course.COLORS[colors[name]],
              markersize=4)
axis.set(yscale="log", ylim=(1e-6, 60), xlabel="position in the text",
         ylabel="largest change of a logit (log)",
         title="what each mistake does, by position")
axis.legend(loc="center right", bbox_to_anchor=(1, 0.42), ncols=2, fontsize=9)
at_end = {name: float(values[-window:].median()) for name, values in gap.items()}
course.show(fig, alt="Lines over the positions of the text, on a log scale. At "
            "position 0 nothing differs. Near the end the logits are off by "
            + ", ".join(f"{value:.1g} ({name})" for name, value in at_end.items())
            + ". The last of these is rounding.")

# %% [markdown]
# The wrong pairs keep <!--fig 03.pairs.same-->43<!--/fig--> of 100 first choices. Many tokens are determined by their
# neighbours, and at a small distance the wrong rotation is still close to the right one. The loss shows the
# damage: <!--fig 03.pairs.loss-->3.94<!--/fig--> instead of <!--fig 03.loss-->2.31<!--/fig-->. At position 0 every
# variant is exact, because the first token attends only to itself. So a test with a single token passes.
#
# The norm after the rotation is the hardest to notice. Its logits are off
# by <!--fig 03.late.gap-->8.7<!--/fig--> in the worst case, but <!--fig 03.late.same-->87<!--/fig--> of 100 choices
# stay, and the loss hardly changes (<!--fig 03.late.loss-->2.31<!--/fig-->). Hardly any generated text shows this
# mistake; a comparison of logits does. Exercise 03.5 asks why its effect is so small.
#
# The last line of the table is not a mistake: with all positions shifted by 1,000 the logits move
# by <!--fig 03.shift.gap x10-->3e-4<!--/fig-->. That is the rounding of large angles.
#
# Can you see the wrong pairs in an answer?

# %%
asked = {"role": "user", "content": "My name is Zorbla. What is my name?"}
question = tokenizer.encode(tokenizer.render([asked]))


def answer():
    """What the model says now."""
    return tokenizer.text_of(list(nanokv.generate(model, question, max_new_tokens=24)))


print("right:              ", answer())
with changed_model(apply_rope=interleaved):
    print("neighbours as pairs:", answer())
with changed_model(rope_angles=base_10_000):
    print("base 10,000:        ", answer())

# %% [markdown]
# With the wrong pairs the bundled model forgets the name and writes broken English. With the wrong base it answers this
# question correctly, so one right answer does not prove that a port is right.

# %% [markdown]
# ## Experiment 5: shared KV heads, and the effect of each part
#
# There are fewer KV heads than query heads. Which query heads read the last KV head? We set its values to zero in one
# layer and look for the query heads whose output changes.

# %%
H, Hk = c.num_attention_heads, c.num_key_value_heads
# (B,H,T,D), (B,Hk,T,D) ×2
q, k, v = (seen[layer, name].transpose(1, 2)
           for name in ("rope_q", "rope_k", "cached_v"))
without = v.clone()
without[:, Hk - 1] = 0
apart = causal_attention(q, k, without) - causal_attention(q, k, v)  # (B,H,T,D)
moved_heads = apart.abs().amax((0, 2, 3)) > 0
print(f"KV head {Hk - 1} is read by the query heads",
      [h for h in range(H) if moved_heads[h]], f"of 0 … {H - 1}")

gates = torch.cat([nn.functional.silu(seen[i, "gate_proj"]).flatten()
                   for i in range(len(model.layers))])
closed = 100 * float((gates.abs() < 0.1).float().mean())
print(f"MLP gates that let through less than a tenth: {closed:.0f} percent")

# %% tags=["hide-input"]
course.figure("03.closed", closed)
course.figure("03.readers", int(moved_heads.sum()))

# %% [markdown]
# It is a group of <!--fig 03.readers-->3<!--/fig--> neighbouring query heads, `G = H / Hk`. Head `h` reads KV head
# `h // G`. So a cache can be `G` times smaller than the number of query heads suggests.
#
# Your own attention of 02.2 can do this layer's work, one query head at a time. (`course.mine` uses your answer if it
# passed its check. Otherwise it uses nanokv's, and prints that.)

# %%
attend = course.mine("attention")
G = H // Hk
# (T,D) each
heads = [attend(q[0, h].clone(), k[0, h // G].clone(), v[0, h // G].clone())
         for h in range(H)]
print("largest difference to nanokv's: "
      f"{float((torch.stack(heads) - causal_attention(q, k, v)[0]).abs().max()):.0e}")

# %% [markdown]
# The MLP processes each token separately. It computes two vectors; one of them is a gate. `silu(gate)` decides, for
# each unit and each token, how much of the other vector passes. In <!--fig 03.closed-->32<!--/fig--> percent of the
# cases it lets less than a tenth pass. This form is called SwiGLU.
#
# Attention and MLP only add to the residual stream. So you can leave one of them out, and the rest still runs. How much
# worse does the model get?

# %%
def loss_without(part):
    """The loss when this module adds nothing to the residual stream."""
    silent = lambda module, inputs, output: torch.zeros_like(output)
    hook = part.register_forward_hook(silent)
    try:
        return -float(log_likelihood(nanokv.score(model, text), text).mean())
    finally:
        hook.remove()


worth = {
    name: [loss_without(getattr(layer, name)) - losses["right"]
           for layer in model.layers]
    for name in ("self_attn", "mlp")
}

# %% tags=["hide-input"]
fig, axis = course.subplots(width=7.5)
place = torch.arange(len(model.layers))
for bars, name, words in ((-0.2, "self_attn", "without its attention"),
                          (0.2, "mlp", "without its MLP")):
    drawn = axis.bar(place + bars, worth[name], 0.4, label=words)
    axis.bar_label(drawn, fmt="%.2f", fontsize=8)
axis.set(xlabel="layer", ylabel="loss added (nats per token)",
         title="one part taken out", xticks=place)
axis.legend()
dear = max((value, name, i) for name, values in worth.items()
           for i, value in enumerate(values))
course.figure("03.dear", dear[0])
course.figure("03.uniform", torch.tensor(float(c.vocab_size)).log())
course.show(fig, alt="Bars for each layer: the loss that is added when its attention "
            f"or its MLP is left out. The largest is {dear[0]:.1f} nats, for "
            f"{'the MLP' if dear[1] == 'mlp' else 'the attention'} of layer {dear[2]}; "
            f"the smallest is {min(min(values) for values in worth.values()):.3f}.")

# %% [markdown]
# One part matters most: without the first MLP the loss rises by <!--fig 03.dear-->5.3<!--/fig--> nats. The loss is then
# as high as that of guessing evenly (<!--fig 03.uniform-->7.6<!--/fig--> nats). The upper layers were trained on the
# output of the first MLP; they cannot use the embedding alone. In the middle, some parts hardly change the loss. So even a
# port that lacks a whole part may still write good text.

# %% [markdown]
# ## What the articles say
#
# Two claims about the block are wrong or misleading. The right ones are on [the page of all claims](claims.md).

# %%
calls = []
with changed_model(rope_angles=lambda *arguments: calls.append(1)
                   or rope_angles(*arguments)):
    nanokv.score(model, text)

from nanokv.school.course.claims.shapes import QWEN

# dimension 0 of a head of Qwen3-0.6B
one = torch.eye(QWEN.head_dim)[0].view(1, 1, 1, -1)
turned = apply_rope(one, rope_angles(QWEN, torch.tensor([1]), one.dtype)).flatten()
course.claim("0.8", "wrong", found=int(turned[1:].abs().argmax()) + 1)
course.claim("0.11", "misleading",
             found=f"adding 1 changes RMSNorm by {100 * moved['RMSNorm']:.0f} percent, "
             f"LayerNorm by {100 * moved['LayerNorm']:.0f}")
by_hand = apply_rope(seen[0, "k_norm"].transpose(1, 2),
                     rope_angles(c, torch.arange(text.shape[1]), torch.float32))
gap_to_cache = float((by_hand - seen[0, "rope_k"].transpose(1, 2)).abs().max())

# %% tags=["hide-input"]
course.confirm("0.7", "right",
               found=f"{len(calls)} computation for {len(model.layers)} layers")
course.confirm("0.12", "right", found=f"normed, then rotated: the {by_hand.shape[1]} "
               f"cached heads to {gap_to_cache:.0e}")

# %% [markdown]
# ## Exercises
#
# **03.1** Give the shapes of the weights of `q_proj`, `k_proj` and `o_proj` for the numbers below. PyTorch stores them
# as (outputs, inputs). Answer with three pairs.

# %%
case = course.case("03.1")
print(f"C = {case.C}, H = {case.H}, Hk = {case.Hk}, D = {case.D}")

# %% tags=["exercise"]
q_k_o = ..., ..., ...

# %% tags=["solution"]
q_k_o = (case.H * case.D, case.C), (case.Hk * case.D, case.C), (case.C, case.H * case.D)

# %%
course.check("03.1", q_k_o)

# %% [markdown]
# **03.2** Write the rotation. `x` is `(B,H,T,D)`; `cos` and `sin` are `(T,D)`; their two halves are equal. Pair `i` is
# `(x[i], x[i + D/2])`, and `(a, b)` becomes `(a·cos − b·sin, b·cos + a·sin)`.


# %% tags=["exercise"]
def rotate(x, cos, sin):
    return ...


# %% tags=["solution"]
def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


# %%
course.check("03.2", rotate)

# %% [markdown]
# **03.3** Write RMSNorm over the last axis: `x` is `(T,C)`, `weight` is `(C,)`. Add the small number `eps` to the mean
# square before you take the root.


# %% tags=["exercise"]
def rms_norm(x, weight, eps):
    return ...


# %% tags=["solution"]
def rms_norm(x, weight, eps):
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


# %%
course.check("03.3", rms_norm)

# %% [markdown]
# **03.4** Which KV head does query head `h` read, of `H` query heads and `Hk` KV heads?


# %% tags=["exercise"]
def kv_head(h, H, Hk):
    return ...


# %% tags=["solution"]
def kv_head(h, H, Hk):
    return h // (H // Hk)


# %%
course.check("03.4", kv_head)

# %% [markdown]
# **03.5** The order of norm and rotation matters only because of the norm's *weight*. Find eight weights, not all
# equal, for which the order does not matter, with `D = 8`. (A rotation does not change the length of a pair.)

# %% tags=["exercise"]
weight = ...  # eight numbers

# %% tags=["solution"]
weight = [1, 2, 3, 4, 1, 2, 3, 4]  # both of a pair are scaled alike

# %%
course.check("03.5", weight)

# %% [markdown]
# ## Quiz

# %%
course.quiz("03")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "b", "c", "a"

# %%
course.answer("03.q1", q1)
course.answer("03.q2", q2)
course.answer("03.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Su and others, [RoFormer](https://arxiv.org/abs/2104.09864): the rotation.
# - Zhang and Sennrich, [Root mean square layer normalization](https://arxiv.org/abs/1910.07467): why nothing needs
#   to be subtracted.
# - Ainslie and others, [GQA](https://arxiv.org/abs/2305.13245): sharing keys between query heads.
# - Shazeer, [GLU variants improve transformer](https://arxiv.org/abs/2002.05202): the MLP with a gate.
#
# ## Next
#
# You have seen that a wrong block can write good text. Notebook [04](04_same_logits.ipynb) compares a model with
# another implementation of the same weights, operation by operation, and finds the first operation that differs.

# %% tags=["skip"]
course.progress()
