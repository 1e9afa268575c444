# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · The bridge: attention with two numbers
#
# This notebook is for you if you know Python and school mathematics, and have never opened a transformer. It takes
# about half an hour. You compute attention by hand, with lists of two numbers. Then you do the same with a cache. Most
# words and letters of the later notebooks are introduced here; the [glossary](glossary.md) has the others. If you know
# what q, k and v are, begin with [01](01_from_text_to_next_token.ipynb). For a first look, run `nanokv live --open`:
# the same model answers in your browser, and you can watch its cache grow.
#
# ## What you will be able to do
#
# - follow a text through attention: [token](glossary.md#token), id, [embedding](glossary.md#embedding), q, k, v,
#   scores, [softmax](glossary.md#softmax), mix;
# - compute each of these steps on paper;
# - say which vectors a [KV cache](glossary.md#kv-cache) keeps, and which are still computed when a token arrives;
# - read the letters B, T, C, H, D and V.

# %%
import math
import random

import torch

from nanokv import course

model, tokenizer = course.start("00")

# %% [markdown]
# The cell above has loaded a small language model and printed some of its sizes. By the end of this notebook you will
# know most of the words it used.

# %% [markdown]
# ## Predict
#
# A language model reads a text in pieces, called tokens. For each token it computes three short lists of numbers. A
# text of `100` tokens has been read, and one more token arrives. The model keeps what it can still use. How many of
# these lists does it compute for the new token's step? Write down a number. A wrong guess costs nothing; the experiment
# below shows the right one.

# %% tags=["exercise"]
guess = ...  # lists

# %% tags=["solution"]
guess = 303  # a common first guess: three for each of the 101 tokens

# %%
course.predict("00.a", guess, unit="lists")

# %% [markdown]
# ## Step 1: text becomes ids
#
# A model computes with numbers only. So the *tokenizer* cuts the text into tokens. Each token has a number in a fixed
# list, its *id*. `T` is the number of tokens of a text. Here `T = 3`. A space belongs to the token after it.

# %%
text = "The fox asked"
ids = tokenizer.encode(text)[:3]
for token, id in zip(tokenizer.pieces(ids), ids):
    print(f"{token:<8} id {id}")

# %% [markdown]
# ## Step 2: an id becomes a list of numbers
#
# An id is a label, not a quantity: id 20 is not twice id 10. So the model has a table with one row for each id. The row
# is the token's [embedding](glossary.md#embedding). Its numbers were learned in training. A list of numbers is also
# called a *vector*.
#
# `V` is the number of rows, one per id. `C` is the number of columns, that is, of numbers in a row. This is the table
# of the bundled model:

# %%
table = model.embed_tokens.weight
V, C = table.shape
print(f"V = {V:,} rows, C = {C} columns")
print(f"the row of id {ids[1]} begins with",
      [round(number, 2) for number in table[ids[1], :4].tolist()])

# %% tags=["hide-input"]
course.figure("00.rows", V)
course.figure("00.columns", C)

# %% [markdown]
# It has <!--fig 00.rows-->2,048<!--/fig--> rows of <!--fig 00.columns-->192<!--/fig--> numbers. That is too much for
# paper. From here on we use a small made-up table with `C = 2`. Its numbers are chosen so that you can compute
# everything in your head. The steps are the same as in the real model.

# %%
embedding = {ids[0]: [1, 0], ids[1]: [0, 1], ids[2]: [1, 1]}
for token, id in zip(tokenizer.pieces(ids), ids):
    print(f"{token:<8} x = {embedding[id]}")

# %% [markdown]
# ## Step 3: q, k and v
#
# In attention, tokens exchange information. For that, the model computes three vectors for each token. Each is computed
# from the token's embedding alone.
#
# | vector | name | what it is for |
# |---|---|---|
# | `q` | [query](glossary.md#query) | what this token looks for in other tokens |
# | `k` | [key](glossary.md#key) | what this token offers to be found by |
# | `v` | [value](glossary.md#value) | what this token passes on when it is found |
#
# `D` is the length of each of these vectors. Here `D = 2`. The tool for all three is the *dot product*: multiply two
# vectors number by number, and add up. `[1, 1] · [0, 1] = 1·0 + 1·1 = 1`.
#
# A [projection](glossary.md#projection) is a small table with `D` rows. Each row gives one number of the result: the
# dot product of that row with the embedding. There are three tables, one for q, one for k, one for v. Their numbers
# were also learned in training.


# %%
def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def project(table, x):
    return [dot(row, x) for row in table]


q_table = [[1, 1], [0, 1]]
k_table = [[0, 1], [1, 0]]
v_table = [[10, 0], [0, 10]]
for token, id in zip(tokenizer.pieces(ids), ids):
    x = embedding[id]
    q, k, v = project(q_table, x), project(k_table, x), project(v_table, x)
    print(f"{token:<8} x = {x}   q = {q}   k = {k}   v = {v}")

# %% [markdown]
# Check one of them on paper. The embedding of `fox` is `[0, 1]`. The first row of the table for q is `[1, 1]`, and
# `[1, 1] · [0, 1] = 1`. The second row is `[0, 1]`, and `[0, 1] · [0, 1] = 1`. So its q is `[1, 1]`.

# %% [markdown]
# ## Step 4: scores
#
# Take the text `The fox`. What does `fox` take from the tokens that it can see? It sees itself and the token before it.
# A token never sees a later one: when the model generates text, the later ones do not exist yet.
#
# The q of `fox` is compared with each k. The dot product of q and k is a *score*. It is large when the key fits the
# query.

# %%
x_the, x_fox, x_asked = (embedding[id] for id in ids)
q = project(q_table, x_fox)
keys = [project(k_table, x_the), project(k_table, x_fox)]
scores = [dot(q, k) for k in keys]
print(f"q of fox {q},  keys {keys}")
print("scores", scores)

# %% [markdown]
# Both scores are `1`. A real model now divides each score by `√D`. Here that would be `√2`, and the numbers below would
# be hard to compute by hand. So we leave the division out. Notebook 02 shows what it is for.

# %% [markdown]
# ## Step 5: softmax makes weights of scores
#
# Scores can be any numbers. To mix the values we need *weights*: positive numbers that add up to 1.
# [Softmax](glossary.md#softmax) makes them. It takes `e` to the power of each score, with `e = 2.718…`, and divides
# each result by the sum of all results. A larger score gets a larger weight. Equal scores get equal weights.


# %%
def softmax(scores):
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


weights = softmax(scores)
print("scores", scores, "→ weights", [round(w, 3) for w in weights])
print("scores [1, 2] → weights", [round(w, 3) for w in softmax([1, 2])])

# %% tags=["hide-input"]
course.figure("00.larger", softmax([1, 2])[1])

# %% [markdown]
# To compute it on paper you need three numbers: `e⁰ = 1`, `e¹ = 2.72`, `e² = 7.39`. Scores of 1 and 2 give the second
# token `7.39 / (2.72 + 7.39)`, which is a weight of <!--fig 00.larger-->0.73<!--/fig-->.

# %% [markdown]
# ## Step 6: the mix of the values
#
# The result of attention is the mix of the values with these weights. Each value is multiplied by its weight, and the
# products are added. The result is a new vector for `fox`, which now contains a part of `The`.


# %%
def mix(weights, values):
    return [dot(weights, column) for column in zip(*values)]


values = [project(v_table, x_the), project(v_table, x_fox)]
print(f"weights {[round(w, 2) for w in weights]},  values {values}")
print("mix", [round(number, 2) for number in mix(weights, values)])

# %% [markdown]
# Half of `[10, 0]` and half of `[0, 10]` is `[5, 5]`. This is attention. Everything else in a transformer works on each
# token separately. At the end, the last token's vector is turned into one number for each of the `V` ids, the
# [logits](glossary.md#logits). The largest logit belongs to the most likely next token. Notebook 01 continues from
# there.

# %% [markdown]
# ## Step 7: a token arrives, and the cache helps
#
# Now the text grows: `The`, then `fox`, then `asked`. What must be computed when a token arrives?
#
# The q, k and v of `asked` are new. Its q needs the k and the v of *all* tokens. The k and v of the old tokens were
# computed when those tokens arrived, from their own embeddings, and they have not changed. So we keep them in two
# lists. This is a [KV cache](glossary.md#kv-cache). The old q are not kept: each was used once, for its own token, and
# is never needed again.

# %% tags=["hide-input"]
course.show(course.drawings.token_arrives())

# %%
computed = 0  # how many vectors were projected


def arrive(x, cache):
    """One token with the embedding x; `cache` holds the k and v of the tokens before
    it, and receives its own."""
    global computed
    q, k, v = project(q_table, x), project(k_table, x), project(v_table, x)
    computed += 3
    cache["k"].append(k)
    cache["v"].append(v)
    return mix(softmax([dot(q, key) for key in cache["k"]]), cache["v"])


cache = {"k": [], "v": []}
for token, id in zip(tokenizer.pieces(ids), ids):
    before, known = computed, len(cache["k"])
    y = arrive(embedding[id], cache)
    print(f"{token:<8} computed {computed - before}, read {2 * known}   mix "
          f"{[round(number, 2) for number in y]}")
print("the cache holds k", cache["k"], "and v", cache["v"])

# %% [markdown]
# `fox` gets `[5, 5]` again, as without a cache. With `asked` the scores are `1`, `2` and `3`: compute them on paper.
# Then your prediction, with `100` tokens in the cache:

# %%
rng = random.Random(0)
long = {"k": [], "v": []}
for _ in range(100):
    arrive([rng.random(), rng.random()], long)
before = computed
arrive([rng.random(), rng.random()], long)
course.reveal("00.a", computed - before)

# %% tags=["hide-input"]
course.figure("00.lists", computed - before)

# %% [markdown]
# It is <!--fig 00.lists-->3<!--/fig-->, however long the text is. Only the reading grows: each new q is compared with
# all keys. A real model has many layers, one above the other, and you might expect an old token's k to change in the
# upper layers. It does not. Notebook 05 shows why.

# %% [markdown]
# ## The letters
#
# A real model does all this for `B` texts at once, and in each layer `H` times in parallel. Each of the `H` *heads* has
# a separate table for its q, so each head can look for something different. (Some heads share their k and v; see
# notebook 03.) The shapes of the bundled model:

# %%
attention = model.layers[0].self_attn
H, D = model.config.num_attention_heads, model.config.head_dim
with torch.inference_mode():
    x = table[torch.tensor([ids])]  # one text
    q = attention.q_proj(x).view(1, len(ids), H, D)
print("x, the embeddings  (B,T,C)  ", tuple(x.shape))
print("q, the queries     (B,T,H,D)", tuple(q.shape))

# %% [markdown]
# | letter | what it counts or names | by hand | where it came up |
# |---|---|---|---|
# | `T` | tokens of the text, or of the part that is fed | 3 | step 1 |
# | `V` | ids that exist: rows of the embedding | `3` in our table | step 2 |
# | `C` | numbers of an embedding | 2 | step 2 |
# | `q` `k` `v` | query, key, value of a token | two numbers each | step 3 |
# | `D` | numbers of one q, k or v | 2 | step 3 |
# | `B` | texts at once, the batch | 1 | here |
# | `H` | heads: how many times attention runs in parallel in a layer | 1 | here |
#
# The bundled model's own sizes, printed above, are larger: `C` is 192, `H` is 6 and `D` is 48. Later pages add `L` for
# the layers, `Hk` for the heads that have a k and a v, and `S` for all tokens that can be seen, those in the cache and
# the new ones.

# %% [markdown]
# ## What the articles say
#
# This course audits five articles on the KV cache, claim by claim. Most of them assume that the reader knows q, k and
# v, so none of their claims is checked here. You now know enough to read them. `nanokv course claims` prints all
# verdicts.

# %% [markdown]
# ## Exercises
#
# Do them on paper first.
#
# **00.1** The dot product of `a` and `b`: one number.

# %%
case = course.case("00.1")
print(f"a = {case.a}, b = {case.b}")

# %% tags=["exercise"]
product = ...

# %% tags=["solution"]
product = dot(case.a, case.b)

# %%
course.check("00.1", product)

# %% [markdown]
# **00.2** A token sees two tokens. Its scores are `s` and `t`. Which weights does softmax give? Answer with a pair, to
# three digits.

# %%
case = course.case("00.2")
print(f"s = {case.s}, t = {case.t}")

# %% tags=["exercise"]
pair = ...  # (…, …)

# %% tags=["solution"]
pair = softmax([case.s, case.t])

# %%
course.check("00.2", pair)

# %% [markdown]
# **00.3** Tokens are counted from 0. The cache holds the tokens before token number `n`, and now that one arrives.
# Which vectors are computed in this step? Answer with a set of names, such as `{"q0", "v1"}`: the letter and the number
# of the token.

# %%
case = course.case("00.3")
print(f"n = {case.n}")

# %% tags=["exercise"]
new = ...

# %% tags=["solution"]
new = {f"{letter}{case.n}" for letter in "qkv"}

# %%
course.check("00.3", new)

# %% [markdown]
# **00.4** A vector q, k or v has `D` numbers. Each of them is a dot product with an embedding of `C` numbers: `C`
# multiplications. There are `n` tokens, and one more arrives. Without a cache, q, k and v of all tokens are computed
# again in this step. How many multiplications for q, k and v does the cache save?

# %%
case = course.case("00.4")
print(f"n = {case.n}, C = {case.C}, D = {case.D}")

# %% tags=["exercise"]
saved = ...

# %% tags=["solution"]
saved = 3 * case.n * case.C * case.D

# %%
course.check("00.4", saved)

# %% [markdown]
# ## Quiz

# %%
course.quiz("00")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "b", "a", "b"

# %%
course.answer("00.q1", q1)
course.answer("00.q2", q2)
course.answer("00.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Vaswani and others, [Attention is all you need](https://arxiv.org/abs/1706.03762): section 3.2 is steps 4 to 6 of
#   this page, in four lines.
# - The [glossary](glossary.md) of this course: each term once, in a sentence or two.
#
# ## Next
#
# [01](01_from_text_to_next_token.ipynb) looks at both ends: how a text is cut into tokens, and how the logits become
# the next one. If you have only one more hour, do parts of [05](05_the_waste.ipynb) and [06](06_build_the_cache.ipynb):
# the paths of the course, in README.md beside the notebooks, list them with minutes.

# %% tags=["skip"]
course.progress()
