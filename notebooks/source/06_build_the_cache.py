# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Build the cache: a dict per layer
#
# The cache that saves the work of the last notebook is a dictionary with two entries per layer. You will inspect it
# while a model writes, compute one of its keys by hand, use it with wrong positions and for the wrong user, and then
# write it yourself. The cache itself takes three lines. The rest of this notebook is about using it correctly.
#
# ## What you will be able to do
#
# - run a model in two phases, [prefill](glossary.md#prefill) and [decode](glossary.md#decode), with a cache that you
#   wrote yourself;
# - say which shape every tensor of a step has, and why;
# - say what [start_pos](glossary.md#start_pos) is for, and what happens when it is wrong;
# - test a cache by its numbers, not by the text that a model writes.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `S` keys that a query may see, the cached ones
# included, `C` numbers of a hidden state, `H` query heads, `Hk` KV heads, `D` numbers of a head, `L` layers, `V`
# entries of the vocabulary, `P` tokens of the prompt ([all letters](glossary.md#letters)).

# %%
import torch

import nanokv
from nanokv import course
from nanokv.attention import causal_attention, causal_mask
from nanokv.cache.dict_cache import DictCache
from nanokv.rope import rope_angles

model, tokenizer = course.start("06")
c = model.config

talk = [{"role": "user", "content": "My name is Zorbla. What is my name?"}]
ids = torch.tensor([tokenizer.encode(tokenizer.render(talk))])  # (1,P)
P = ids.shape[1]
print(f"the prompt has {P} tokens")

# %% [markdown]
# ## Predict
#
# The line printed at the top gives the sizes of the model: layers, hidden size `C`, query heads, KV heads, head size
# `D`. How many *numbers* does the cache keep per token? Write your guess down.

# %% tags=["exercise"]
guess = ...  # numbers per token

# %% tags=["solution"]
# a common first guess: one key and one value as wide as the hidden state
guess = 2 * c.hidden_size

# %%
course.predict("06.a", guess, unit="numbers")

# %% [markdown]
# ## Experiment 1: look inside
#
# `make_cache("dict", …)` makes one dict per layer. We print the dict of the first layer after every step. Watch which
# number grows.

# %%
cache = nanokv.make_cache("dict", c)
print("before the first forward:", dict(cache[0]), "length", cache.length)
# (1,V): the logits that follow the last token
logits = nanokv.prefill(model, ids, cache, start_pos=0)
print(f"prefill of {P:>2}: key {tuple(cache[0]['key'].shape)}  value "
      f"{tuple(cache[0]['value'].shape)}  length {cache.length}")

answer, sizes = [], [cache.nbytes]
for _ in range(8):
    token = logits.argmax(-1, keepdim=True)  # (1,1)
    answer.append(int(token))
    logits = nanokv.decode(model, token, cache, start_pos=cache.length)
    sizes.append(cache.nbytes)
    print(f"decode {tokenizer.decode(answer[-1:])!r:>9}: key "
          f"{tuple(cache[0]['key'].shape)}  length {cache.length}")

numbers = cache[0]["key"][0, :, 0].numel() * 2 * len(cache)
course.reveal("06.a", numbers)

# %% tags=["hide-input"]
course.figure("06.numbers", numbers)
course.figure("06.hidden", c.hidden_size)

# %% [markdown]
# Only the third axis grows, by one per step, in every layer. For each token the cache
# keeps <!--fig 06.numbers-->1,152<!--/fig--> numbers: a key and a value (`2`) in every layer (`L`) and every KV head
# (`Hk`), each of `D` numbers. The hidden size, <!--fig 06.hidden-->192<!--/fig-->, does not appear in that product, and
# neither does the number of query heads. Three of the articles get this wrong.
#
# There is an interactive page for the picture below, with a tour. On it you can move from step to step, see the token
# of each column, and open a cell to see the numbers of its key and value. Run this in a terminal in the folder of the
# project:
#
# ```bash
# .venv/bin/nanokv trace "My name is Zorbla. What is my name?" -o cache.html --open
# ```

# %% tags=["hide-input"]
fig, (left, right) = course.subplots(1, 2, width=9.5, height=3.4)
left.bar(range(len(sizes)), [size / 1024 for size in sizes], color=course.COLORS[0])
left.set(title="bytes in the cache", xlabel="step (0 = prefill)", ylabel="KiB")
# (L,S): mean over the KV heads
norms = torch.stack([layer["key"][0].norm(dim=-1).mean(0) for layer in cache])
picture = right.imshow(norms, aspect="auto")
right.grid(False)
right.axvline(P - 0.5, color="white", linestyle=":")
right.set(title="size of the cached keys", xlabel="token", ylabel="layer")
fig.colorbar(picture, ax=right, label="mean norm")
low, high = float(norms.min()), float(norms.max())
course.show(fig, alt=f"Left: {sizes[0] / 1024:.0f} KiB after the prefill of {P} "
            f"tokens, then {(sizes[1] - sizes[0]) / 1024:.1f} KiB more with every "
            "step. Right: one cell for each layer and token, the mean size of the "
            f"cached keys, between {low:.1f} and {high:.1f}; a dotted line separates "
            "the prompt from the answer, and nothing changes there.")

# %% [markdown]
# ## Experiment 2: one key by hand
#
# What exactly is stored? Take the first layer and one token of the prompt, and follow the code of `nanokv/model.py`:
# [embed](glossary.md#embedding), [norm](glossary.md#rmsnorm), [project](glossary.md#projection), split into [KV
# heads](glossary.md#kv-head), norm each head, rotate to the token's position ([RoPE](glossary.md#rope)). The glossary
# explains each step; notebook 03 shows them one by one. The rotation is the one you wrote in 03.2, or nanokv's if you
# have not done that exercise.

# %%
rotate = course.mine("rotation")
place = P // 2
layer = model.layers[0]
with torch.inference_mode():
    x = layer.input_layernorm(model.embed_tokens(ids[:, place]))  # (1,C)
    # (B,Hk,T,D) with T = 1
    k = layer.self_attn.k_proj(x).view(1, c.num_key_value_heads, 1, c.head_dim)
    normed = layer.self_attn.k_norm(k)
    rotated = rotate(normed.clone(), *rope_angles(c, torch.tensor([place]), k.dtype))

stored = cache[0]["key"][:, :, place : place + 1]
for name, mine in (("as projected", k), ("normed", normed),
                   ("normed and rotated", rotated)):
    print(f"{name:<20} max |Δ| to the cached key "
          f"{float((mine - stored).abs().max()):.1e}")

# %% [markdown]
# Cached keys are normed *and rotated*: a key is rotated once, to the angle of its position, and never changes
# afterwards. A value is stored as the projection returns it. (In the layers above, `x` comes from the layer below and
# has been through attention, so a key there cannot be computed from its token alone.)

# %% [markdown]
# ## Experiment 3: is it right?
#
# Fluent text does not prove that a cache is right. A cache is right if every number is the same as without a cache. So
# at each step we compare the logits with those of a full forward over the whole text. At the end we compare every key
# in every layer.

# %%
cache = nanokv.make_cache("dict", c)
text, gaps = ids, []
logits = nanokv.prefill(model, ids, cache, start_pos=0)
for _ in range(12):
    full = nanokv.score(model, text)[:, -1]  # every token again, no cache
    gaps.append(float((logits - full).abs().max()))
    token = logits.argmax(-1, keepdim=True)
    text = torch.cat((text, token), dim=1)
    logits = nanokv.decode(model, token, cache, start_pos=cache.length)

whole = nanokv.make_cache("dict", c)
nanokv.prefill(model, text, whole, start_pos=0)  # all at once
keys = [float((a["key"] - b["key"]).abs().max()) for a, b in zip(cache, whole)]
size = float(full.abs().max())
print("logits, step by step:", " ".join(f"{gap:.0e}" for gap in gaps),
      f"  (the logits go up to {size:.0f})")
print("keys, layer by layer:", " ".join(f"{gap:.0e}" for gap in keys))

# %% tags=["hide-input"]
course.figure("06.gap", max(gaps))
course.figure("06.size", size)

# %% [markdown]
# The largest difference is about <!--fig 06.gap x5-->1e-5<!--/fig-->, on logits of up
# to <!--fig 06.size-->16<!--/fig-->. That is rounding: products of matrices of a different shape are summed in a
# different order. A test that demands a difference of zero fails although the cache is right. A test that compares only
# texts passes although a cache may be wrong. `nanokv.equality` has a whole suite of such comparisons; exercise 06.3
# uses it.

# %% [markdown]
# ## Experiment 4: a wrong position
#
# nanokv refuses a `start_pos` that is not the length of the cache:

# %%
try:
    nanokv.decode(model, token, cache, start_pos=0)
except ValueError as error:
    print("ValueError:", error)

# %% tags=["hide-input"]
course.show(course.drawings.ruler())

# %% [markdown]
# To see why, we make a cache that reports a wrong length. The model then rotates new queries and keys to the wrong
# angle, while all shapes stay right. Predict first: the decode position is *one too high* for a whole answer. How many
# of its first `8` tokens will differ?

# %% tags=["exercise"]
different = ...  # 0 to 8

# %% tags=["solution"]
different = 8  # a common guess: garbage from the first token on

# %%
course.predict("06.b", different, unit="tokens")


# %%
class WrongLength(DictCache):
    """A layer that holds S tokens and says that it holds S + offset. Its mask is
    right."""

    offset = 0

    @property
    def length(self):
        return super().length + self.offset

    def mask(self, T):
        return causal_mask(T, super().length + T)


def talk_with(offset, before=0, n=8):
    """Positions of the prompt shifted by `before`, those of the answer by `offset` →
    tokens, logits of each step."""
    cache = nanokv.KVCache((WrongLength() for _ in range(c.num_hidden_layers)), c)
    for layer in cache:
        layer.offset = before
    logits, tokens, seen = nanokv.prefill(model, ids, cache, start_pos=before), [], []
    for layer in cache:
        layer.offset = offset
    for _ in range(n):
        tokens.append(int(logits.argmax()))
        logits = nanokv.decode(model, truth[len(tokens) - 1], cache,
                               start_pos=cache.length)
        seen.append(logits[0])
    return tokens, torch.stack(seen)


# all variants are fed the same tokens, so steps can be compared
truth = [torch.tensor([[token]]) for token in answer]
right_tokens, right_logits = talk_with(0)
shifts = {  # what is added to the positions of the answer, and to those of the prompt
    "right": (0, 0), "all + 1000": (1000, 1000), "one too high": (1, 0),
          "one too low": (-1, 0),
    # the P tokens of the prompt are counted twice: the answer begins at 2 · P
    "double": (P, 0),
    "from 0 again": (-P, 0),  # they are not counted: the answer begins at 0
}
moved, differ = {}, {}
for name, (offset, before) in shifts.items():
    tokens, seen = talk_with(offset, before)
    moved[name] = float((seen - right_logits).abs().max())
    differ[name] = sum(a != b for a, b in zip(tokens, right_tokens))
    print(f"{name:<13} logits move by {moved[name]:8.1e}   tokens that differ: "
          f"{differ[name]} of {len(tokens)}   {tokenizer.decode(tokens)!r}")
course.reveal("06.b", differ["one too high"])

# %% tags=["hide-input"]
course.figure("06.one", moved["one too high"])
course.figure("06.low", moved["one too low"])
course.figure("06.restart", differ["from 0 again"])
course.figure("06.differ", differ["one too high"])
fig, axis = course.subplots(width=7.5, height=2.8)
names = [name for name in shifts if name != "right"]
axis.barh(names, [moved[name] for name in names],
          color=[course.COLORS[0]] + [course.COLORS[1]] * (len(names) - 1))
axis.set(xscale="log", xlim=(1e-6, 100), xlabel="largest change of a logit (log)",
         title="what a wrong position does")
axis.invert_yaxis()
axis.grid(axis="y", visible=False)
course.show(fig, alt="Bars on a log scale. Shifting all positions by 1000 moves the "
            f"logits by {moved['all + 1000']:.0e}, which is rounding. Wrong positions "
            f"of the answer alone move them: one too high {moved['one too high']:.2f}, "
            f"one too low {moved['one too low']:.2f}, double {moved['double']:.2f}, "
            f"from 0 again {moved['from 0 again']:.2f}.")

# %% [markdown]
# RoPE tells the model about positions: it rotates each query and each key by angles that grow with the position of its
# token (notebook 03). Shifting *all* positions by 1000 changes almost nothing: queries and keys are rotated by the same
# extra angle, and only the distance between them counts. Shifting the answer relative to its prompt does change the
# logits: by <!--fig 06.one-->2.3<!--/fig--> if the position is one too high, by <!--fig 06.low-->2.0<!--/fig--> if it
# is one too low. One too low means that the first new token has the position of the last prompt token.
#
# Does the text change? With a position one too high, <!--fig 06.differ-->0<!--/fig--> of the choices differ. Positions
# that restart at 0 move the logits much more, and change <!--fig 06.restart-->2<!--/fig--> of the tokens. A bug that
# you cannot see in this text still changes every probability, and it can change the words of another prompt or of a
# longer answer. That is why the caller states the position *and* nanokv checks it against the cache.

# %% [markdown]
# ## Experiment 5: another user's cache
#
# A cache belongs to one request. Suppose the next request gets the same cache by mistake, with positions that match it.
# The first user has given their name; the second user asks for their own name.

# %%
def ask(question, cache):
    """Prefill a question after whatever the cache holds, and write until the model
    ends its turn."""
    asked = tokenizer.render([{"role": "user", "content": question}])
    prompt = torch.tensor([tokenizer.encode(asked)])
    return tokenizer.decode(list(nanokv.generate(model, prompt, cache,
                                                 max_new_tokens=24)))


used, fresh = nanokv.make_cache("dict", c), nanokv.make_cache("dict", c)
print("first user: ", ask("My name is Zorbla.", used))
leaked, alone = ask("What is my name?", used), ask("What is my name?", fresh)
print("second user, used cache: ", leaked)
print("second user, fresh cache:", alone)
print("the name of a stranger came out:", "Zorbla" in leaked and "Zorbla" not in alone)

# %% [markdown]
# There is no error, no wrong shape, and the text is fluent; but one user reads the private words of another. A cache is
# valid only for the weights, the tokens and the positions with which it was filled, and for one request. So a program
# also has to create and discard caches at the right time.

# %% [markdown]
# ## What the articles say
#
# Three claims about building the cache are wrong or misleading. The other claims that this notebook checks are on [the
# page of all claims](claims.md).

# %%
# 30 layers, 3 KV heads of 64, 2 bytes
course.claim("2.8", "misleading", found=2 * 30 * 3 * 64 * 2)
course.claim("2.11", "wrong")
course.claim("4.5", "misleading")

# %% tags=["hide-input"]
course.confirm("0.1", "right", found=f"one object, {len(cache)} layers")
course.confirm("0.3", "right", found="before the first forward the dict of a layer was "
               "empty")
course.confirm("0.6", "misleading", found=f"positions went on from {P}")
course.confirm("0.13", "right")
course.confirm("1.4", "right")
course.confirm("2.10", "right",
               found="rotated key: max |Δ| "
               f"{float((rotated - stored).abs().max()):.0e}")
course.confirm("2.12", "right", found=f"one off: {moved['one too high']:.2f}; all "
               f"shifted: {moved['all + 1000']:.0e}")
course.confirm("2.13", "misleading")
course.confirm("3.10", "right")
course.confirm("3.18", "right")
course.confirm("4.3", "right")
course.confirm("4.4", "misleading", found=f"{cache[0]['key'].shape[1]} KV heads, "
               f"{c.num_attention_heads} query heads")
course.confirm("4.6", "right")
course.confirm("4.7", "misleading")
course.confirm("4.12", "right")
course.confirm("4.13", "right", found=torch.zeros(2, 4, 1, 5).numel())
course.confirm("4.14", "right", found=f"{sizes[0]:,} bytes after the prefill of {P} "
               f"tokens")

# %% [markdown]
# ## Exercises
#
# **06.1** One decode step, after the append: give the shapes of the query, of the cached keys and of the scores of one
# layer. The new token is the `t`-th of the text, counted from 1. Answer with three tuples.

# %%
case = course.case("06.1")
print(f"B = {case.B}, H = {case.H}, Hk = {case.Hk}, D = {case.D}, t = {case.t}")

# %% tags=["exercise"]
query_keys_scores = ..., ..., ...

# %% tags=["solution"]
query_keys_scores = (
    (case.B, case.H, 1, case.D),
    (case.B, case.Hk, case.t, case.D),  # KV heads; the new key is in it
    (case.B, case.H, 1, case.t),
)

# %%
course.check("06.1", query_keys_scores)

# %% [markdown]
# **06.2** A chat. The first prompt had `P` tokens, and the model wrote `N` tokens with as few forwards as possible. Now
# the user adds `M` tokens. With which `start_pos` does the next prefill begin, and how many tokens does it feed?

# %%
case = course.case("06.2")
print(f"P = {case.P}, N = {case.N}, M = {case.M}")

# %% tags=["exercise"]
start_and_count = ..., ...

# %% tags=["solution"]
# the last token of the answer has not been fed yet
start_and_count = case.P + case.N - 1, case.M + 1

# %%
course.check("06.2", start_and_count)

# %% [markdown]
# **06.3** Write the cache of one layer. `append` gets the keys and values of the new tokens, `(B,Hk,T,D)` each, and
# returns those of all tokens so far, `(B,Hk,S,D)`, oldest first. `length` is the number of tokens seen. The check runs
# it through `nanokv.equality`: step by step, in [chunks](glossary.md#chunk), in batches, two requests at once.


# %% tags=["exercise"]
class MyCache(nanokv.cache.LayerCache):
    def __init__(self):
        self.length = 0

    def append(self, k, v):
        return ...


# %% tags=["solution"]
class MyCache(nanokv.cache.LayerCache):
    def __init__(self):
        self.length = 0
        self.key = self.value = None

    def append(self, k, v):
        if self.key is not None:
            k, v = torch.cat((self.key, k), dim=2), torch.cat((self.value, v), dim=2)
        self.key, self.value, self.length = k, v, k.shape[2]
        return k, v


# %%
course.check("06.3", MyCache)

# %% [markdown]
# **06.4** Write the loop: `n` greedy tokens after the prompt `ids` `(1,P)`, as a list of ints, with one prefill and as
# few decodes as possible. (No stop token here.) The check counts the rows that you feed.


# %% tags=["exercise"]
def write(model, ids, n):
    cache = nanokv.make_cache("dict", model.config)
    return ...


# %% tags=["solution"]
def write(model, ids, n):
    cache = nanokv.make_cache("dict", model.config)
    logits = nanokv.prefill(model, ids, cache, start_pos=0)
    tokens = [int(logits.argmax())]
    while len(tokens) < n:
        logits = nanokv.decode(model, torch.tensor([tokens[-1:]]), cache,
                               start_pos=cache.length)
        tokens.append(int(logits.argmax()))
    return tokens


# %%
course.check("06.4", write)

# %% [markdown]
# ## Quiz

# %%
course.quiz("06")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "c", "a", "b"

# %%
course.answer("06.q1", q1)
course.answer("06.q2", q2)
course.answer("06.q3", q3)

# %% [markdown]
# ## Further reading
#
# - `nanokv/cache/dict_cache.py`: the cache that you wrote, with checks; `nanokv/cache/base.py`: the interface of every
#   cache, and `nanokv/cache/capabilities.py`: its optional operations.
# - Su and others, [RoFormer](https://arxiv.org/abs/2104.09864): why a rotation makes attention depend on distance.
# - Hugging Face, [Caching](https://huggingface.co/docs/transformers/main/en/cache_explanation): the same object in
#   transformers.
#
# ## Next
#
# Your cache is right. Notebook [07](07_bug_hunt.ipynb) has many caches with bugs. With half of them the model still
# writes the right words.

# %% tags=["skip"]
course.progress()
