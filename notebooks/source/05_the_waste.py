# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · The waste
#
# A model writes one token at a time. Without a cache it processes the whole text to produce a token, and then the whole
# text again, plus one token, to produce the next. You will count how often the same token goes through the same layers.
# You will also see why nearly all of that work gives the same numbers every time.
#
# ## What you will be able to do
#
# - count the work of a generation without and with a [KV cache](glossary.md#kv-cache), in
#   [token-forwards](glossary.md#token-forward);
# - show, on a trained model, which numbers stay the same when a token is added;
# - explain the reason, [causality](glossary.md#causal-mask), and what breaks without it.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `C` numbers of a hidden state, `Hk` KV heads, `D`
# numbers of a head, `L` layers, `V` entries of the vocabulary, `P` tokens of the prompt, `N` tokens of the answer ([all
# of them](glossary.md#letters)).

# %%
import time

import torch

import nanokv
from nanokv import course
from nanokv.attention import Causal, Masked

model, tokenizer = course.start("05")
layers = model.config.num_hidden_layers

# %% [markdown]
# ## Predict
#
# Take a prompt of `P = 64` tokens and an answer of `N = 64`. One token that passes through the layers once counts as
# one token-forward. Compare two ways: feed the whole text at every step, or feed every token just once. How many
# *times* as many token-forwards does the first way take? Write down a number before you read on. A wrong guess is
# useful: you will remember the difference.

# %% tags=["exercise"]
guess = ...  # how many times as many?

# %% tags=["solution"]
guess = 2  # a common first guess: "about double"

# %%
course.predict("05.a", guess, unit="times as many")

# %% [markdown]
# ## Experiment 1: count it
#
# A hook on the key projection of the first layer counts every row that goes through it. We let the model write eight
# tokens twice: once it gets the whole text at every step (`nanokv.score` has no cache), once it uses a cache.


# %%
class RowCounter:
    """Counts the token rows that enter the first layer while it is open."""

    def __enter__(self):
        self.rows = []
        hook = lambda module, inputs: self.rows.append(inputs[0].shape[1])  # (B,T,C)
        self.handle = model.layers[0].self_attn.k_proj.register_forward_pre_hook(hook)
        return self

    def __exit__(self, *error):
        self.handle.remove()


def write_without_cache(ids, n):
    for _ in range(n):
        # (B,T,V) → (B,1)
        token = nanokv.score(model, ids)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, token), dim=1)
    return ids


def write_with_cache(ids, n):
    cache = nanokv.make_cache("dict", model.config)
    logits = nanokv.prefill(model, ids, cache, start_pos=0)
    for i in range(n):
        token = logits.argmax(-1, keepdim=True)
        ids = torch.cat((ids, token), dim=1)
        if i < n - 1:  # what would follow the last token is not asked for
            logits = nanokv.decode(model, token, cache, start_pos=cache.length)
    return ids


one = torch.tensor([tokenizer.encode("Once")[:1]])  # a prompt of a single token
with RowCounter() as without:
    a = write_without_cache(one, 8)
with RowCounter() as cached:
    b = write_with_cache(one, 8)
print("rows per step, without a cache:", without.rows, "sum", sum(without.rows))
print("rows per step, with a cache:   ", cached.rows, "sum", sum(cached.rows))
print("same tokens:", torch.equal(a, b))
naive8, cached8 = sum(without.rows), sum(cached.rows)

# %% tags=["hide-input"]
course.figure("05.naive8", naive8)
course.figure("05.cached8", cached8);

# %% [markdown]
# The same eight tokens take <!--fig 05.naive8-->36<!--/fig--> token-forwards without a cache
# and <!--fig 05.cached8-->8<!--/fig--> with one. The first token alone went through the model eight times.
#
# Now the case of your prediction, a prompt of 64 tokens:

# %%
P = N = 64
torch.manual_seed(0)
# which tokens they are does not matter for the count
prompt = torch.randint(0, model.config.vocab_size, (1, P))
with RowCounter() as without:
    begin = time.perf_counter()
    write_without_cache(prompt, N)
    seconds_without = time.perf_counter() - begin
with RowCounter() as cached:
    begin = time.perf_counter()
    write_with_cache(prompt, N)
    seconds_cached = time.perf_counter() - begin
naive, lean = sum(without.rows), sum(cached.rows)
print(f"token-forwards {naive:,} and {lean:,};  seconds {seconds_without:.2f} and "
      f"{seconds_cached:.2f}")
course.reveal("05.a", naive / lean)

# %% tags=["hide-input"]
course.figure("05.naive64", naive)
course.figure("05.cached64", lean)
course.figure("05.ratio64", naive / lean)
course.figure("05.speedup", seconds_without / seconds_cached)

# %% [markdown]
# It is <!--fig 05.naive64-->6,112<!--/fig--> against <!--fig 05.cached64-->127<!--/fig-->: a factor
# of <!--fig 05.ratio64-->48<!--/fig-->. The ratio of the seconds, printed above, is smaller. A step with one row takes
# more than a sixty-fourth of the time of a step with 64 rows: a small model spends much of a step on starting
# operations, a large model on reading its weights. Notebook 09 measures time; here we count work.
#
# You can walk through such a run step by step. This command, in a terminal in the folder of the project, records one
# and writes it as a web page:
#
# ```bash
# .venv/bin/nanokv trace "What is a KV cache?" -o waste.html --open
# ```
#
# Its tour explains the page. Its tab *Cost* counts the tokens and the time of each step, with the cache and without.

# %% [markdown]
# ## Experiment 2: how it grows
#
# The plot shows the counts for a prompt of 16 tokens and answers of growing length. The dots are counted in the running
# model. The lines are the formula that you will derive in exercise 05.2.

# %%
lengths = [1, 4, 8, 16, 32, 48]
counts = {"without a cache": [], "with a cache": []}
for n in lengths:
    for name, write in (("without a cache", write_without_cache),
                        ("with a cache", write_with_cache)):
        with RowCounter() as counter:
            write(prompt[:, :16], n)
        counts[name].append(sum(counter.rows))

# %% tags=["hide-input"]
fig, (left, right) = course.subplots(1, 2, width=9.5)
every = list(range(1, 49))
lines = {"without a cache": [sum(16 + i for i in range(n)) for n in every],
         "with a cache": [16 + n - 1 for n in every]}
orange, blue = course.COLORS[1], course.COLORS[0]
for (name, line), mark, color in zip(lines.items(), "os", (orange, blue)):
    left.plot(every, line, label=name, color=color)
    left.plot(lengths, counts[name], mark, color=color)
left.set(title="token-forwards of an answer", xlabel="tokens written",
         ylabel="token-forwards")
left.legend()
# the first step brings the prompt: all of it is new
done_before = [0] + [16 + step - 2 for step in every[1:]]
right.bar(every, done_before, 1, color=orange, label="done before")
right.bar(every, [16] + [1] * 47, 1, bottom=done_before, color=blue, label="new")
right.set(title="rows fed at each step without a cache", xlabel="step", ylabel="rows")
right.legend(loc="upper left")
last = counts["without a cache"][-1], counts["with a cache"][-1]
repeated = 1 - last[1] / last[0]
course.figure("05.repeated", 100 * repeated)
course.show(fig, alt=f"Left: without a cache the count curves upward to {last[0]:,} "
            "token-forwards at 48 tokens, with a cache it is a straight line to "
            f"{last[1]}. Right: after the first step, which brings the prompt, all "
            "rows of a step but one were fed before.")

# %% [markdown]
# For an answer of 48 tokens, <!--fig 05.repeated-->97<!--/fig--> percent of the token-forwards are repetitions.

# %% [markdown]
# ## Experiment 3: why old keys may be kept
#
# Repeated work is waste only if it gives the same result. So we compare the keys that every layer computes for the
# first 12 tokens: once in a text that ends there, once in a text that continues. Then we repeat this without the
# [causal mask](glossary.md#causal-mask), so that every token sees every other. Before you run it: in how many of the
# layers will the keys of the old tokens change when there is no mask?

# %% tags=["exercise"]
changing_layers = ...  # a number between 0 and the number of layers

# %% tags=["solution"]
changing_layers = layers  # a common first guess: all of them

# %%
course.predict("05.b", changing_layers, unit="layers")


# %%
def keys_of(ids, attend):
    """The keys of every layer, (B,Hk,T,D) each, as attention sees them."""
    cache = nanokv.make_cache("dict", model.config)
    with torch.inference_mode():
        model(ids, cache, 0, attend)
    return [layer["key"] for layer in cache]


def drift(attend, short=12):
    """How far the keys of the first tokens move when the text goes on, relative to
    their size; one number per layer."""
    before, after = keys_of(text[:, :short], attend), keys_of(text, attend)
    return [float((a[:, :, :short] - b).norm() / b.norm())
            for a, b in zip(after, before)]


talk = [{"role": "user", "content": "My name is Zorbla. What is my name?"}]
text = torch.tensor([tokenizer.encode(tokenizer.render(talk))])
masked = drift(Causal())
unmasked = drift(Masked(None))  # no mask: every query sees every key, the future too
for i, (with_mask, without_mask) in enumerate(zip(masked, unmasked)):
    print(f"layer {i}: with the mask {with_mask:.1e}   without {without_mask:.1e}")
changed = sum(value > 1e-4 for value in unmasked)
course.reveal("05.b", changed)

# %% tags=["hide-input"]
course.figure("05.changed", changed)
course.figure("05.drift", 100 * unmasked[-1])
fig, axis = course.subplots(width=7.5)
place = torch.arange(layers)
axis.bar(place - 0.2, [max(value, 1e-9) for value in masked], 0.4, label="causal")
axis.bar(place + 0.2, [max(value, 1e-9) for value in unmasked], 0.4, label="no mask")
axis.axhline(1e-4, color="gray", linestyle=":", linewidth=1)
axis.set(yscale="log", ylim=(1e-9, 2), xlabel="layer", ylabel="relative change (log)",
         title="how far old keys move when the text goes on")
axis.legend()
course.show(fig, alt="Bars for each layer on a log scale. Causal: no bar rises above "
            f"{max(masked):.0e}, which is rounding. No mask: nothing in layer 0, then "
            f"up to {max(unmasked):.2f} in the layers above.")

# %% [markdown]
# With the mask, the keys differ only by rounding: products with 12 rows and with 24 rows are summed in a different
# order, so the last bits differ. Without the mask, the keys change in <!--fig 05.changed-->5<!--/fig--> of the layers,
# in the last one by <!--fig 05.drift-->15<!--/fig--> percent.
#
# The keys of layer 0 never change. Each is computed from the embedding of one token, without any influence of other
# tokens. So the usual demonstration, which compares projections of *embeddings*, proves nothing about the cache: it
# would also succeed for a model whose tokens see the future. One layer higher, a key is computed from a hidden state
# that went through attention. It stays the same only if that attention could not see later tokens. The same holds in
# every layer above. **A cache is correct only because attention is causal.**

# %% [markdown]
# ## Experiment 4: which scores are new
#
# The scores of a head form a square: one row per query, one column per key. When the text grows from 5 tokens to 6, the
# square grows by one row *and* one column. Which of its cells does the next token need? We compute both squares in the
# middle layer of the model and compare them.

# %%
middle = layers // 2


def scores(ids):
    """q·kᵀ / sqrt(D) of the first query head and its KV head in the middle layer,
    (T,T)."""
    seen = nanokv.debug.record(model, ids)
    q, k = seen[middle, "rope_q"][0, :, 0], seen[middle, "rope_k"][0, :, 0]  # (T,D)
    return q @ k.T / model.config.head_dim**0.5


line = torch.tensor([tokenizer.encode("My name is Zorbla, and yours?")])[:, :6]
small, large = scores(line[:, :5]), scores(line)
same = torch.zeros(6, 6, dtype=torch.bool)
same[:5, :5] = torch.isclose(small, large[:5, :5], rtol=1e-3, atol=1e-4)
visible = torch.ones(6, 6, dtype=torch.bool).tril()
kind = torch.zeros(6, 6)  # 0 masked
kind[visible & same] = 1
kind[visible & ~same] = 2
again, new, hidden = [int((kind == i).sum()) for i in (1, 2, 0)]

# %% tags=["hide-input"]
from matplotlib.colors import ListedColormap

course.figure("05.again", again)
course.figure("05.new", new)
fig, axis = course.subplots(width=4.6, height=3.8)
axis.grid(False)
axis.imshow(kind, cmap=ListedColormap(["#E8E8E8", orange, blue]), vmin=0, vmax=2)
words = [repr(tokenizer.decode([i])) for i in line[0].tolist()]
axis.set(xlabel="key of", ylabel="query of", title="scores of 6 tokens")
axis.set_xticks(range(6), words, fontsize=8)
axis.set_yticks(range(6), words, fontsize=8)
for row in range(6):
    for column in range(6):
        axis.text(column, row, ["masked", "again", "new"][int(kind[row, column])],
                  ha="center", va="center",
                  fontsize=7.5, color="black" if kind[row, column] == 0 else "white")
course.show(fig, alt=f"A square of 6 by 6 scores. Lower left, {again} cells that the "
            f"five-token square had already, to the same value. The last row, {new} "
            f"cells, is new. The {hidden} cells above the diagonal are masked, and the "
            "new column is among them but for its last cell.")

# %% [markdown]
# The next token needs the last row: <!--fig 05.new-->6<!--/fig--> scores. The <!--fig 05.again-->15<!--/fig--> cells
# above it were computed already. The new column is masked, except for its last cell. A cache keeps no scores. It keeps
# the *keys* (for the columns) and the *values* (for the mix), because every later row needs all of them again. It keeps
# no queries, because no later step uses an old query.

# %% tags=["hide-input"]
course.show(course.drawings.token_arrives())

# %% [markdown]
# ## What the articles say
#
# Five articles on the KV cache were checked, claim by claim. Compare these three claims about the waste with what you
# have just measured. The other claims that this notebook checks are on [the page of all claims](claims.md).

# %%
# how many forwards had exactly P rows: one
course.claim("1.1", "misleading", found=without.rows.count(P))
course.claim("2.7", "misleading", found=f"without a mask layer 0 moves by "
             f"{unmasked[0]:.0e}, the last by {unmasked[-1]:.2f}")
course.claim("2.9", "wrong", found=f"{again} cells known, {new} new, {hidden} masked")

# %% tags=["hide-input"]
course.confirm("1.2", "right")
course.confirm("2.2", "misleading")
course.confirm("2.5", "right", found=f"keys move by at most {max(masked):.0e}, which "
               f"is rounding")
course.confirm("2.6", "right", found=f"{100 * repeated:.0f} percent of the rows at 48 "
               f"tokens were repetitions")
course.confirm("3.4", "right", found=naive8)
course.confirm("3.5", "right")
course.confirm("3.6", "right", found=1 + 2 * 10)
course.confirm("3.7", "misleading")
course.confirm("3.8", "right", found=f"the other rows differ by at most "
               f"{float((small - large[:5, :5]).abs().max()):.0e}")
course.confirm("3.9", "right")
course.confirm("3.16", "misleading", found=f"{changed} of {layers} layers change "
               f"without the mask")
course.confirm("4.1", "right")
course.confirm("4.2", "misleading")
course.confirm("4.9", "right", found=100 * (1 - 4 / sum(range(1, 5))))

# %% [markdown]
# ## Exercises
#
# **05.1** A prompt has `P` tokens and an answer has `N` (your numbers are below). How many token-forwards does the
# generation take without a cache, and how many with one? Answer with a pair, by hand.

# %%
case = course.case("05.1")
print(f"P = {case.P}, N = {case.N}")

# %% tags=["exercise"]
without_and_with = ...  # (…, …)

# %% tags=["solution"]
without_and_with = (sum(case.P + i for i in range(case.N)), case.P + case.N - 1)

# %%
course.check("05.1", without_and_with)

# %% [markdown]
# **05.2** Write the formula for the token-forwards without a cache, without a loop. The check tries it on 50 random
# pairs.


# %% tags=["exercise"]
def token_forwards(P, N):
    return ...


# %% tags=["solution"]
def token_forwards(P, N):
    return N * P + N * (N - 1) // 2


# %%
course.check("05.2", token_forwards)

# %% [markdown]
# **05.3** A text of `n` tokens grows by one token. In one head of one layer: how many scores does a full forward
# compute if it computes the masked cells too, and how many does the next token need?

# %%
case = course.case("05.3")
print(f"n = {case.n}")

# %% tags=["exercise"]
computed_and_needed = ...  # (…, …)

# %% tags=["solution"]
computed_and_needed = ((case.n + 1) ** 2, case.n + 1)

# %%
course.check("05.3", computed_and_needed)

# %% [markdown]
# **05.4** Even *without* a cache some work can be saved. A [layer](glossary.md#layer) is attention and then an
# [MLP](glossary.md#mlp). Attention reads other tokens; the MLP processes each token separately, one row per token.
# After the last layer only the [hidden state](glossary.md#hidden-state) of the newest token is read. So which parts of
# the last layer have to be computed for the old tokens? Return the number of MLP rows that the next token needs, in all
# `L` layers together, for a text of `S` tokens.


# %% tags=["exercise"]
def mlp_rows(L, S):
    return ...


# %% tags=["solution"]
def mlp_rows(L, S):
    # old tokens of the last layer need keys and values, and no MLP
    return (L - 1) * S + 1


# %%
course.check("05.4", mlp_rows)

# %% [markdown]
# **05.5** Which of `"Q"`, `"K"` and `"V"` keep their values for old tokens when a token is added to a causal model?
# Look before you answer: `nanokv.debug.record(model, ids)` gives every operation of a forward, among them `(layer,
# "rope_q")`, `(layer, "rope_k")` and `(layer, "cached_v")`. These are the [query](glossary.md#query) and the
# [key](glossary.md#key) after their rotation to the token's position ([RoPE](glossary.md#rope)), and the
# [value](glossary.md#value). Answer with a set, such as `{"Q"}`.

# %% tags=["exercise"]
unchanged = ...

# %% tags=["solution"]
before = nanokv.debug.record(model, text[:, :12])
after = nanokv.debug.record(model, text)
names = {"Q": "rope_q", "K": "rope_k", "V": "cached_v"}
unchanged = {
    letter
    for letter, name in names.items()
    if all(torch.allclose(before[i, name], after[i, name][:, :12], rtol=1e-3, atol=1e-4)
           for i in range(layers))
}

# %%
course.check("05.5", unchanged)

# %% [markdown]
# ## Quiz

# %%
course.quiz("05")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "b", "c", "a"

# %%
course.answer("05.q1", q1)
course.answer("05.q2", q2)
course.answer("05.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Vaswani and others, [Attention is all you need](https://arxiv.org/abs/1706.03762), section 3.2.3: the causal mask.
# - Shazeer, [Fast transformer decoding](https://arxiv.org/abs/1911.02150): why decoding with a cache is then bound by
#   memory.
# - `nanokv/inference.py`: `score`, `prefill` and `decode` side by side, with what each costs.
#
# ## Next
#
# You now know which vectors can be kept and why. In notebook [06](06_build_the_cache.ipynb) you build the cache that
# keeps them: one dict per layer.

# %% tags=["skip"]
course.progress()
