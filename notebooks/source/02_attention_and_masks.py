# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Attention, masks and why the formula matters
#
# `softmax(q·kᵀ / √D + M)·v` is one line. One of the five articles that this course checks gets it wrong twice: the mask
# in its formula is wrong, and the square root is missing in its code. You will run both errors on a trained model.
# Without the root, the loss rises at once. With the wrong mask, you hardly see any change. So the wrong mask is the
# more dangerous error.
#
# ## What you will be able to do
#
# - write attention with a [causal mask](glossary.md#causal-mask), and read an attention map;
# - say why a mask is added and not multiplied, and what a multiplied mask does to a model that is *trained* with it;
# - test whether a model sees the future, without reading its code;
# - say what the square root of the [head size](glossary.md#head-size) is for.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `H` query heads, `Hk` KV heads, `D` numbers of a
# head, `L` layers, `V` entries of the vocabulary ([all letters](glossary.md#letters)).

# %%
import math
import random
from dataclasses import replace

import torch
from matplotlib.colors import PowerNorm
from torch.nn.functional import cross_entropy

import nanokv
from nanokv import course
from nanokv.attention import Causal
from nanokv.cache import NoCache
from nanokv.model import Qwen3
from nanokv.lab.study.quality import log_likelihood
from nanokv.school.training import corpus
from nanokv.school.training.trainer import initialise

model, tokenizer = course.start("02")
config = model.config
layers = config.num_hidden_layers

question = tokenizer.render([{"role": "user",
                              "content": "My name is Zorbla. What is my name?"}])
ids = torch.tensor([tokenizer.encode(question)])  # (1,T), short: for looking



def conversation(seed):
    """(1,160): a talk with words that the model never saw."""
    talk = corpus.conversation(random.Random(seed), 8, held_out=True)
    text = tokenizer.render(talk, add_generation_prompt=False)
    return torch.tensor([tokenizer.encode(text)])[:, :160]


text = conversation(1)  # for measuring

# %% [markdown]
# ## Predict
#
# The mask says which tokens a token may see: itself and the tokens before it. In one article the mask is a matrix of
# ones and zeros that *multiplies* the scores. Where it is 0, the score becomes 0. Use that mask in a trained model and
# feed it a text of two dozen tokens. The first token may see only itself. How many percent of its attention go to later
# tokens, in the first layer?

# %% tags=["exercise"]
guess = ...  # percent

# %% tags=["solution"]
guess = 0  # a common first guess: what is multiplied by zero is gone

# %%
course.predict("02.a", guess, unit="percent")

# %% [markdown]
# ## Experiment 1: which token attends to which
#
# A [query](glossary.md#query) says what a token looks for. A [key](glossary.md#key) says what a token offers. A
# [value](glossary.md#value) is what a token passes on to the tokens that attend to it. The fast kernel that nanokv
# calls does not return the attention weights. So we write the formula out, with a choice of masks and a factor on the
# scores. First question: does it compute the same as the kernel?

# %%
def weights(q, k, mask="added", factor=1.0):
    """How much each query takes of each key: q (B,H,T,D), k (B,Hk,T,D) → (B,H,T,T),
    rows that sum to 1."""
    # (B,H,T,D): neighbouring query heads share a KV head
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = factor * (q @ k.transpose(2, 3)) / q.shape[-1] ** 0.5  # (B,H,T,T)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask == "added":
        # M: 0 or −∞
        scores = scores + torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    elif mask == "multiplied":
        scores = scores * visible  # 1 or 0
    return scores.softmax(-1)  # mask "none": everything is visible


def attention(mask="added", factor=1.0, keep=None):
    """An attention function for the model; `keep` collects the weights of each
    layer."""

    def attend(q, k, v):
        w = weights(q, k, mask, factor)
        if keep is not None:
            keep.append(w[0])  # (H,T,T)
        return w @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B,H,T,D)

    return attend


@torch.inference_mode()
def logits_with(attend, ids):
    """(1,T) → (1,T,V): the model with another attention function."""
    return model.lm_head(model(ids, NoCache(layers), 0, attend))


maps = []
# (1,T), the name comes next
begun = torch.tensor([tokenizer.encode(question + "Your name is")])
gap = float((logits_with(attention(keep=maps),
                         begun) - nanokv.score(model, begun)).abs().max())
print(f"the formula and the kernel agree: max |Δ| of the logits {gap:.0e}")

# %% [markdown]
# It does. Now we look for the heads that copy the name. The answer is written up to `Your name is`, so the name comes
# next. In such a head the last token attends to the first piece of `Zorbla`.

# %% tags=["hide-input"]
pieces = tokenizer.pieces(begun[0].tolist())
starts = [len("".join(pieces[:i])) for i in range(len(pieces) + 1)]
# the token that holds the Z
name = max(i for i in range(len(pieces)) if starts[i] <= question.index("Zorbla"))
# (L,H): how much the last token takes of the name
looks = torch.stack(maps)[:, :, -1, name]
best = [divmod(int(i), config.num_attention_heads)
        for i in looks.flatten().topk(2).indices]
plain = divmod(int(looks.flatten().argmin()), config.num_attention_heads)
fig, axes = course.subplots(1, 3, width=12, height=5.2, sharey=True)
shown = [piece.replace("\n", "\\n") for piece in pieces]
for axis, (i, h) in zip(axes, [*best, plain]):
    axis.grid(False)
    axis.imshow(maps[i][h], vmin=0, vmax=1)
    axis.set(title=f"layer {i}, head {h}: {100 * looks[i, h]:.0f} % on the name",
             xlabel="key of")
    axis.set_xticks(range(len(shown)), shown, rotation=90, fontsize=6.5)
    axis.set_yticks(range(len(shown)), shown, fontsize=6.5)
axes[0].set_ylabel("query of")
reader, most = "layer {}, head {}".format(*best[0]), 100 * float(looks[best[0]])
course.figure("02.most", most)
course.show(fig, alt=f"Three attention maps, nothing above the diagonal. In {reader} "
            f"the last row has one bright cell: {most:.0f} percent on "
            f"{pieces[name]!r}. The second head gives it {100 * looks[best[1]]:.0f} "
            "percent; the third looks at other tokens.")

# %% [markdown]
# One head takes <!--fig 02.most-->99<!--/fig--> percent of its mix from the first piece of the name. The output of a
# head is a weighted mean: this head puts most of its weight on one token, and other heads spread it. The dark triangle
# above the diagonal is hidden by the mask.

# %% [markdown]
# ## Experiment 2: the multiplied mask
#
# `e⁰ = 1`. A score of 0 does not mean "forbidden". It is an ordinary score, higher than every negative one. How much
# attention goes to later tokens, in the first layer, averaged over the heads?

# %%
def future(w):
    """(H,T,T) → (T,): the share of each row that goes to later tokens, mean over the
    heads."""
    return w.triu(1).sum(-1).mean(0)


masks = ("added", "multiplied", "none")
kept, longer = {mask: [] for mask in masks}, {mask: [] for mask in masks}
for mask in masks:
    logits_with(attention(mask, keep=kept[mask]), ids)
    logits_with(attention(mask, keep=longer[mask]), text)
first = {mask: float(future(kept[mask][0])[0]) for mask in masks}
print(f"first token of {ids.shape[1]}: {100 * first['multiplied']:.0f} percent, "
      f"of {text.shape[1]}: {100 * future(longer['multiplied'][0])[0]:.0f} percent")
course.reveal("02.a", 100 * first["multiplied"])

# %% tags=["hide-input"]
course.figure("02.first", 100 * first["multiplied"])
course.figure("02.first.longer", 100 * future(longer["multiplied"][0])[0])
fig, axes = course.subplots(1, 3, width=11, height=3.7, sharey=True)
for axis, mask in zip(axes, masks):
    axis.grid(False)
    # so that faint ones show
    picture = axis.imshow(kept[mask][0].mean(0), norm=PowerNorm(0.4, 0, 0.5))
    axis.set(title=f"mask {mask}: first row {100 * first[mask]:.0f} % ahead",
             xlabel="key")
axes[0].set_ylabel("query")
fig.colorbar(picture, ax=axes, label="weight, mean of the heads")
course.show(fig, alt="Three attention maps of layer 0. Mask added: nothing above the "
            "diagonal. Multiplied: the upper right is filled, faintly and row by row; "
            f"the first row has {100 * first['multiplied']:.0f} percent there. No "
            f"mask: filled, with {100 * first['none']:.0f} percent of the first row.")

# %% [markdown]
# Here <!--fig 02.first-->24<!--/fig--> percent of the attention of the first token goes to later tokens. In a text of
# 160 tokens it is <!--fig 02.first.longer-->60<!--/fig-->, because every forbidden token adds its `e⁰`. How does the
# leak affect the model? We measure the loss on a conversation with words that the model never saw, count the first
# choices that stay the same, and read the answer.

# %%
truth = nanokv.score(model, text)


def loss_of(logits, text):
    """Mean loss of the text's tokens, in nats."""
    return -float(log_likelihood(logits, text).mean())


def answer(attend, n=12):
    """Greedy, with the whole text fed at every step."""
    written = ids
    for _ in range(n):
        written = torch.cat((written, logits_with(attend, written)[:, -1:].argmax(-1)),
                            dim=1)
    return tokenizer.decode(written[0, ids.shape[1] :].tolist()).split("<|im_end|>")[0]


losses, choices = {}, {}
for mask in masks:
    logits = logits_with(attention(mask), text)
    losses[mask] = loss_of(logits, text)
    choices[mask] = 100 * float((logits.argmax(-1) == truth.argmax(-1)).float().mean())
    print(f"mask {mask:<11} loss {losses[mask]:.3f}   same first choice "
          f"{choices[mask]:3.0f} of 100   {answer(attention(mask))!r}")

# %% tags=["hide-input"]
course.figure("02.loss", losses["added"])
course.figure("02.loss.multiplied", losses["multiplied"])
course.figure("02.loss.none", losses["none"])
course.figure("02.choices", choices["multiplied"])

# %% [markdown]
# The loss goes from <!--fig 02.loss-->2.307<!--/fig-->
# to <!--fig 02.loss.multiplied-->2.313<!--/fig-->, <!--fig 02.choices-->98<!--/fig--> of 100 first choices are the
# same, and so is the answer. The first token gives most of its attention to later ones; few other tokens leak much.
# With no mask at all the name is right too, and the loss even falls, to <!--fig 02.loss.none-->1.850<!--/fig-->,
# because each token of the text sees the one that it has to predict.
#
# How can you notice such a leak? In a causal model an *earlier* output cannot depend on a later input. So change the
# last token of the text, and see whether any earlier logits change.

# %%
changed = text.clone()
changed[0, -1] = (changed[0, -1] + 1) % config.vocab_size
moves = {}
for mask in masks:
    # (T,V)
    before, after = (logits_with(attention(mask), each)[0] for each in (text, changed))
    moves[mask] = (after - before).abs().amax(-1)  # (T,)
    print(f"mask {mask:<11} earlier logits move by up to "
          f"{float(moves[mask][:-1].max()):.1e}")

# %% tags=["hide-input"]
course.figure("02.leak", float(moves["multiplied"][:-1].max()))

# %% [markdown]
# With the right mask no earlier logit changes at all. With the multiplied mask, logits change by up
# to <!--fig 02.leak x2-->0.02<!--/fig-->, although the text before them is the same. This test takes two lines and
# needs no knowledge of the model's code. It distinguishes the three masks here. It is not enough for *every* model,
# because the leak may be elsewhere. Exercise 02.4 has a model whose leak it misses.

# %% [markdown]
# ## Experiment 3: train with it
#
# A leak hardly affects a model that is already trained. During training it lets the model cheat: the answer is in the
# input. We train two small models of two layers on *random* tokens, 16 different ones. Nothing can be learned from
# random tokens. The best possible loss is that of guessing evenly, `ln 16`. A model with a lower loss is cheating.

# %%
V, T = 16, 8
small = replace(
    config, vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
)


def loss_on_noise(net, attend, rows=32):
    """Mean loss of `net` on fresh random tokens."""
    noise = torch.randint(V, (rows, T))
    logits = net.lm_head(net(noise, NoCache(2), 0, attend))  # (B,T,V)
    return cross_entropy(logits[:, :-1].flatten(0, 1), noise[:, 1:].flatten())


def train(attend, steps=300):
    """(the model, its loss at each step)."""
    torch.manual_seed(0)
    net = initialise(Qwen3(small))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    history = []
    for _ in range(steps):
        loss = loss_on_noise(net, attend)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return net, history


honest, honest_history = train(attention("added"))
cheat, cheat_history = train(attention("multiplied"))
with torch.no_grad():
    # as in generation: there is no future yet
    used = float(loss_on_noise(cheat, Causal(), rows=512))
reached = sum(cheat_history[-20:]) / 20
floor = math.log(V)
print(f"best possible {floor:.2f}   mask added {sum(honest_history[-20:]) / 20:.2f}   "
      f"multiplied {reached:.2f}   the latter when it generates {used:.2f}")

# %% tags=["hide-input"]
course.figure("02.floor", floor)
course.figure("02.cheat", reached)
course.figure("02.used", used)
fig, (left, right) = course.subplots(1, 2, width=10.5, height=3.5)
colors = dict(zip(masks, (course.COLORS[0], course.COLORS[1], course.COLORS[3])))
for mask in masks:
    most_moved = float(moves[mask][:-1].max())
    left.plot(moves[mask][:-1].clamp(min=1e-8), color=colors[mask], label="mask "
              f"{mask}: up to {most_moved:.2g}")
left.set(yscale="log", xlabel="position", ylabel="change of its logits (log)",
         title="the last token is changed")
left.legend(loc="center", bbox_to_anchor=(0.5, 0.3))
right.plot(honest_history, color=colors["added"], label="mask added")
right.plot(cheat_history, color=colors["multiplied"], label="mask multiplied")
right.axhline(floor, color="gray", linestyle=":", label="best possible")
right.plot([len(cheat_history)], [used], "X", color=colors["multiplied"],
           label="the same when it generates")
right.set(xlabel="training step", ylabel="loss (nats)",
          title="trained on random tokens")
right.legend(loc="center left", fontsize=9, bbox_to_anchor=(0.02, 0.68))
course.show(fig, alt="Left, on a log scale: with the mask added no earlier logit "
            "moves; multiplied, they move by up to "
            f"{float(moves['multiplied'][:-1].max()):.2g}; without a mask by up to "
            f"{float(moves['none'][:-1].max()):.2g}. Right: on random tokens the loss "
            f"with the mask added stays at {floor:.2f}; multiplied it falls to "
            f"{reached:.2f}. A cross marks the same model in use: {used:.1f}.")

# %% [markdown]
# The model with the right mask stays at <!--fig 02.floor-->2.77<!--/fig-->. The other model
# reaches <!--fig 02.cheat x3-->0.3<!--/fig-->: it reads the tokens that it has to predict. When it generates, there are
# no later tokens to read, and its loss is about <!--fig 02.used x1.5-->6<!--/fig-->, far worse than guessing. Such a
# bug is often found only weeks later, when a training curve looks too good.

# %% [markdown]
# ## Experiment 4: the square root
#
# The product of a query and a key is a sum of `D` terms. If the terms are independent and of size 1, the sum has size
# `√D`. The cell applies softmax to 16 random scores, with and without the division:

# %%
torch.manual_seed(0)
print("   D   size of q·k   largest of 16 weights, without and with the division")
divided = []
for D in (4, 16, 64, 256):
    q, k = torch.randn(2000, 1, D), torch.randn(2000, 16, D)
    scores = (q @ k.transpose(1, 2)).squeeze(1)  # (2000,16)
    sharp, soft = (s.softmax(-1).amax(-1).mean() for s in (scores, scores / D**0.5))
    divided.append(float(soft))
    print(f"{D:4}   {scores.std():11.2f}   {sharp:.2f}   {soft:.2f}")


def spread(w):
    """(H,T,T) → how many tokens a row is spread over: e to the entropy, mean over
    rows and heads."""
    return float(torch.special.entr(w).sum(-1).exp().mean())


def measured(factor, text=text):
    """Loss on the text and spread, with all scores times `factor`."""
    keep = []
    loss = loss_of(logits_with(attention(factor=factor, keep=keep), text), text)
    return loss, sum(spread(w) for w in keep) / layers


right_loss, right_spread = measured(1.0)
print(f"\nthe model as it is: a token spreads its attention over {right_spread:.1f} "
      f"tokens, loss {right_loss:.3f}")

# %% tags=["hide-input"]
course.figure("02.sharp", sharp)
course.figure("02.soft", min(divided))
course.figure("02.soft.most", max(divided))
course.figure("02.spread", right_spread)

# %% [markdown]
# Without the division the largest of 16 weights grows with `D`, to <!--fig 02.sharp-->0.92<!--/fig--> at `D = 256`.
# With the division it stays between <!--fig 02.soft-->0.24<!--/fig--> and <!--fig 02.soft.most-->0.25<!--/fig-->.
# Without it, softmax would choose a single token, and its gradient would be nearly zero.
#
# In the bundled model a token spreads its attention over <!--fig 02.spread-->15<!--/fig--> tokens. One of the articles
# leaves the division out. Over how many tokens does a token spread its attention then?

# %% tags=["exercise"]
tokens = ...

# %% tags=["solution"]
# a guess: as many times fewer as the factor says
tokens = right_spread / config.head_dim**0.5

# %%
course.predict("02.b", tokens, unit="tokens")

# %%
root = config.head_dim**0.5
factors = [1 / config.head_dim, 1 / root, 0.5, 0.8, 1.0, 1.25, 2.0, root,
           config.head_dim]
points = [measured(factor) for factor in factors]
for factor, (loss, tokens_read) in zip(factors, points):
    print(f"scores times {factor:6.3f}: loss {loss:.3f}, spread over "
          f"{tokens_read:4.1f} tokens")
loss_without, spread_without = points[factors.index(root)]
talks = [conversation(seed) for seed in range(2, 32)]
better = sum(measured(0.8, talk)[0] < measured(1.0, talk)[0] for talk in talks)
print(f"scores times 0.8 give a lower loss than times 1 in {better} of {len(talks)} "
      "other texts")
course.reveal("02.b", spread_without)
print("without the division the model says", repr(answer(attention(factor=root))))

# %% tags=["hide-input"]
course.figure("02.loss.half", points[factors.index(0.5)][0])
course.figure("02.loss.double", points[factors.index(2.0)][0])
course.figure("02.loss.root", loss_without)
course.figure("02.loss.less", points[factors.index(0.8)][0])
course.figure("02.talks", len(talks))
course.figure("02.better", better)
course.figure("02.spread.root", spread_without)
fig, (left, right) = course.subplots(1, 2, width=10, height=3.3)
left.plot(factors, [loss for loss, _ in points], "o-", color=course.COLORS[0])
right.plot(factors, [tokens_read for _, tokens_read in points], "o-",
           color=course.COLORS[2])
for axis, title, words in ((left, "loss", "nats per token"),
                           (right, "spread", "tokens a row is spread over")):
    axis.set(xscale="log", title=title, xlabel="scores times (log)", ylabel=words)
    axis.axvline(root, color="gray", linestyle=":")
left.text(root * 1.1, right_loss, "no division", fontsize=9, color="gray")
course.show(fig, alt="Two curves over the factor on the scores. The loss is low around "
            f"1, with {right_loss:.2f}; without the division it is {loss_without:.2f}, "
            f"and on the other side it rises to {points[0][0]:.1f}. The spread falls "
            f"from {points[0][1]:.0f} tokens to {points[-1][1]:.1f}, and is "
            f"{spread_without:.1f} without the division.")

# %% [markdown]
# It is <!--fig 02.spread.root-->1.7<!--/fig--> tokens: attention almost selects a single token. The loss
# is <!--fig 02.loss.root-->3.06<!--/fig-->. A model needs roughly the scale with which it was trained. At `0.8` the
# loss is hardly higher, <!--fig 02.loss.less-->2.313<!--/fig-->, and for <!--fig 02.better x1.3-->13<!--/fig-->
# of <!--fig 02.talks-->30<!--/fig--> other texts it is lower than with the right scale. Too small a scale does more
# harm than too large a one: with half the scores the loss is <!--fig 02.loss.half-->2.70<!--/fig-->, with double
# scores <!--fig 02.loss.double-->2.57<!--/fig-->.
#
# A missing root shows in the loss at once, so it gets found. A multiplied mask does not.

# %% [markdown]
# ## What the articles say
#
# Five articles on the KV cache were checked, claim by claim; [this page](claims.md) lists every claim with its verdict.
# Here are the claims about the formula that are wrong or misleading. The two wrong ones are in the same article. Its
# example has five tokens of ten numbers each; we draw a thousand random examples of that size.

# %%
torch.manual_seed(0)
x = torch.randn(1000, 5, 10)
q, k = (x @ torch.randn(1000, 10, 10) for _ in range(2))  # (1000,5,10)
scores, visible = q @ k.transpose(1, 2), torch.ones(5, 5).tril()
ahead = (scores * visible / 10**0.5).softmax(-1).triu(1).sum(-1).mean(0)  # (5,)
masked = scores.masked_fill(visible == 0, -torch.inf)
by_root_of_ten = (masked / 10**0.5).softmax(-1)
apart = float((masked.softmax(-1) - by_root_of_ten).abs().amax((1, 2)).mean())
course.claim("2.3", "wrong", found=f"the first row gives {100 * ahead[0]:.0f} percent "
             f"to the future on average, "
             f"the first four on average {100 * ahead[:4].mean():.0f}")
course.claim("2.4", "wrong", found=f"the largest difference of a weight is {apart:.2f} "
             f"on average")
course.claim("3.1", "misleading", found=f"multiplied by the root instead, the loss "
             f"here is {points[-1][0]:.2f}")

# %% tags=["hide-input"]
course.confirm("3.2", "right", found=f"{reader} looks up the name with {most:.0f} "
               f"percent")

# %% [markdown]
# ## Exercises
#
# **02.1** A row of three scores, of which the mask forbids the last: `ln a`, `ln b`, `ln c`, with the numbers below.
# What are the three weights? By hand: `e` to the `ln a` is `a`.

# %%
case = course.case("02.1")
print(f"a = {case.a}, b = {case.b}, c = {case.c}")

# %% tags=["exercise"]
three = ..., ..., ...

# %% tags=["solution"]
three = case.a / (case.a + case.b), case.b / (case.a + case.b), 0

# %%
course.check("02.1", three)

# %% [markdown]
# **02.2** Write causal attention for one head: `q`, `k` and `v` are `(T,D)`, and so is the result. It is compared with
# nanokv's on random inputs.


# %% tags=["exercise"]
def attend(q, k, v):
    return ...


# %% tags=["solution"]
def attend(q, k, v):
    scores = q @ k.T / q.shape[-1] ** 0.5
    visible = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


# %%
course.check("02.2", attend)

# %% [markdown]
# **02.3** By which number does *this* model multiply `q·k`? You need one of its sizes.

# %% tags=["exercise"]
scale = ...

# %% tags=["solution"]
scale = 1 / math.sqrt(config.head_dim)

# %%
course.check("02.3", scale)

# %% [markdown]
# **02.4** Write the leak test. `forward(ids)` gives logits `(1,T,V)` for ids `(1,T)`; `V` is the size of the
# vocabulary. Return True if the model sees the future. The check runs your test on models that leak, each in a
# different way, and on models that do not leak. One of the models without a leak has rounding noise of about `1e-6`.


# %% tags=["exercise"]
def leaks(forward, ids, V):
    return ...


# %% tags=["solution"]
def leaks(forward, ids, V):
    before = forward(ids)
    for place in range(1, ids.shape[1]):
        changed = ids.clone()
        changed[0, place] = (changed[0, place] + 1) % V
        if not torch.allclose(forward(changed)[:, :place], before[:, :place],
                              atol=1e-4):
            return True
    return False


# %%
course.check("02.4", leaks)

# %% [markdown]
# ## Quiz

# %%
course.quiz("02")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "a", "c", "b"

# %%
course.answer("02.q1", q1)
course.answer("02.q2", q2)
course.answer("02.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Vaswani and others, [Attention is all you need](https://arxiv.org/abs/1706.03762), section 3.2.1: the formula, and a
#   footnote on why there is a root.
# - `nanokv/attention.py`: attention for a prompt and for a single token, and a mask for [chunks](glossary.md#chunk).
# - Holtzman and others, [The curious case of neural text degeneration](https://arxiv.org/abs/1904.09751): how a token
#   is chosen after the last layer; see notebook 01.
#
# ## Next
#
# Attention is one line of a block. [03](03_inside_a_block.ipynb) takes the rest apart: norms, rotation, shared heads.

# %% tags=["skip"]
course.progress()
