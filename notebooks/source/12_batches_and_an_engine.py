# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Batches, and an engine of your own
#
# A server answers several people at once with one model. Their prompts have different lengths, but a tensor is a
# rectangle. In this notebook you put them into one tensor, and see the errors that a careless batch produces without
# any warning. Then you measure why servers batch: the rows of a batch share the weights that a step reads. At the end,
# the parts that you have written since notebook 01 become an engine that answers a chat.
#
# ## What you will be able to do
#
# - put prompts of different lengths into one [batch](glossary.md#batch), [padded](glossary.md#padding) on the left,
#   with the positions of every row counted from its first token;
# - say which bytes of a decode step all rows share, and which each row reads for itself;
# - put your own sampler, attention, cache and loop together into an engine that draws the same tokens as nanokv.
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
# The loop is the one from notebook 06, with a batch of four. How many of the four answers are the same as without a
# batch?

# %% tags=["exercise"]
unharmed = ...  # 0 to 4

# %% tags=["solution"]
unharmed = 4  # a common first guess: padding means nothing, so it does nothing

# %%
course.predict("12.a", unharmed, unit="answers")

# %% [markdown]
# Second: a decode step feeds one token. How many times as long does a step take that feeds one token of each of 32
# rows?

# %% tags=["exercise"]
longer = ...  # times

# %% tags=["solution"]
longer = 32  # a common first guess: 32 times the work

# %%
course.predict("12.b", longer, unit="times")

# %% [markdown]
# ## Experiment 1: rows of different lengths
#
# A batch is a rectangle, but prompts have different lengths. We fill it up in three ways: on the right; on the left,
# without a mask; and on the left with a mask and with positions that start at the first token of each row
# (`nanokv.generate_padded`).

# %%
questions = ["My name is Zorbla. What is my name?", "What is 12 + 30?",
             "Count from 3 to 9.", "Tell me a story."]
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
    """The loop of notebook 06 over a rectangle: (answers, logits that follow the
    prompts)."""
    cache, answers = nanokv.make_cache("dict", c, batch_size=B), [[] for _ in rows]
    logits = first = nanokv.prefill(model, rows, cache)
    for _ in range(n):
        token = logits.argmax(-1, keepdim=True)  # (B,1)
        for answer, id in zip(answers, token[:, 0].tolist()):
            answer.append(id)
        logits = nanokv.decode(model, token, cache, start_pos=cache.length)
    return [until_end(answer) for answer in answers], first


alone = [list(nanokv.generate(model, prompt, max_new_tokens=n)) for prompt in prompts]
# (B,V)
alone_logits = torch.cat([nanokv.score(model, [prompt])[:, -1] for prompt in prompts])

pads = [longest - len(prompt) for prompt in prompts]
on_the_right, right_logits = plain_loop([p + [pad] * k for p, k in zip(prompts, pads)])
on_the_left, left_logits = plain_loop([[pad] * k + p for p, k in zip(prompts, pads)])
padded = PaddedCache(nanokv.make_cache("dict", c, batch_size=B), pads)
masked_logits = nanokv.prefill(model, [[pad] * k + p for p, k in zip(prompts, pads)],
                               padded, start_pos=padded.length)
masked = nanokv.generate_padded(model, prompts, max_new_tokens=n)

same, moved = {}, {}
for name, answers, logits in (("padded right", on_the_right, right_logits),
                              ("left, no mask", on_the_left, left_logits),
                              ("left, masked", masked, masked_logits)):
    same[name] = sum(a == b for a, b in zip(answers, alone))
    moved[name] = float((logits - alone_logits).abs().max())
    print(f"{name:<14} {same[name]} of {B} answers as alone, logits off by "
          f"{moved[name]:.0e}: ",
          " | ".join(tokenizer.text_of(answer) for answer in answers))
course.reveal("12.a", same["padded right"])

# %% tags=["hide-input"]
course.figure("12.right", same["padded right"])
course.figure("12.leftsame", same["left, no mask"])
course.figure("12.left", moved["left, no mask"])
course.figure("12.masked", moved["left, masked"])
from matplotlib.colors import ListedColormap

fig, axes = course.subplots(1, 2, width=10, height=2.4)
for axis, side in zip(axes, ("right: what follows the padding is read",
                             "left: every row ends in the last column")):
    left = side.startswith("left")
    cells = torch.zeros(B, longest + 4)  # 0 padding, 1 prompt, 2 new
    cells[:, longest:] = 2
    for b, k in enumerate(pads):
        start = k if left else 0
        cells[b, start : start + len(prompts[b])] = 1
        for column in range(0, longest + 4, 3):
            position = column - k if left else column
            if position >= 0 and (left or column >= longest
                                  or column < len(prompts[b])):
                axis.text(column, b, position, ha="center", va="center", fontsize=7,
                          color="white")
    axis.imshow(cells, cmap=ListedColormap(["#D0D0D0", course.COLORS[0],
                                            course.COLORS[2]]), aspect="auto", vmin=0,
                vmax=2)
    axis.grid(False)
    axis.set(title=side, xlabel="column", yticks=range(B),
             yticklabels=[f"row {b}" for b in range(B)])
course.show(fig, alt=f"Two rectangles of {B} rows: prompts blue, padding grey, new "
            "tokens green, with positions written in some cells. Padded right, a gap "
            f"of up to {max(pads)} grey cells lies between prompt and answer, and all "
            "answers begin at the same position. Padded left, prompt and answer touch, "
            "and each row counts from its own first token.")

# %% [markdown]
# Padded on the right, <!--fig 12.right-->1<!--/fig--> of four answers stays the same, the one to the longest prompt. In
# all other rows the *last column* is padding, so the next token is chosen after the padding. Padded on the left without
# a mask, <!--fig 12.leftsame-->3<!--/fig--> answers are the same. That is worse, because the error is easy to miss: the
# logits are off by <!--fig 12.left-->1.8<!--/fig-->, since every token also sees the padding. (The shifted positions
# alone would do no harm: notebook 06.) With the padding masked the difference is
# rounding, <!--fig 12.masked x5-->1e-5<!--/fig-->.

# %% [markdown]
# The padding is computed and stored like tokens. `nanokv.generate_ragged` needs no padding: each row has its own cache,
# the rows are prefilled one by one, and they are decoded together. So why decode them together?

# %% [markdown]
# ## Experiment 2: what the rows share
#
# One model decodes 1, 2, 4 … rows, each with its own cache of the same length. Of several steps, the shortest time
# counts.

# %%
rows_at_once, rate, took = [1, 2, 4, 8, 16, 32], [], []
for rows in rows_at_once:
    cache = nanokv.make_cache("static", c, batch_size=rows, capacity=96)
    ids = torch.randint(0, c.vocab_size, (rows, course.sized(64, 8)))
    nanokv.prefill(model, ids, cache)
    seconds = []
    for _ in range(course.sized(24, 4)):
        begin = time.perf_counter()
        nanokv.decode(model, ids[:, :1], cache, start_pos=cache.length)
        seconds.append(time.perf_counter() - begin)
    took.append(min(seconds))
    rate.append(rows / min(seconds))
    print(f"{rows:>2} rows: {1000 * took[-1]:6.2f} ms per step, {rate[-1]:6.0f} tokens "
          "per second")
course.reveal("12.b", took[-1] / took[0])

# %% tags=["hide-input"]
fig, axis = course.subplots(width=6, height=2.6)
axis.bar([str(rows) for rows in rows_at_once], rate, 0.6)
axis.set(xlabel="rows decoded together", ylabel="tokens per second",
         title="one model, many rows")
course.show(fig, alt="Bars of tokens per second: "
            + ", ".join(f"{value:.0f} with {rows}"
                        for rows, value in zip(rows_at_once, rate)) + " rows decoded "
            "together.")
course.figure("12.batch", rate[-1] / rate[0])

# %% [markdown]
# Here <!--def-->32<!--/def--> rows give more than <!--fig 12.batch above-->3<!--/fig--> times as many tokens per second
# as one row: a step reads every weight once for all rows. The rows do *not* share their caches. So the gain ends when
# reading the caches takes as long as reading the weights. Exercise 12.3 computes this for a larger model.

# %% [markdown]
# ## What the articles say
#
# Here are two claims about a step with a cache, one for a single row and one for many. The other claims are on [the
# page of all claims](claims.md).

# %%
cache = nanokv.make_cache("dict", c)
first_mask = cache.mask(1)
nanokv.prefill(model, [prompts[0][:8]], cache)
course.claim("0.9", "misleading", found=f"a decode has mask {first_mask}, a chunk "
             f"{cache.mask(4).dtype}, four padded rows "
             f"{tuple(padded.mask(4).shape)}")

# %% tags=["hide-input"]
course.confirm("1.24", "right")
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
# **12.2** The cost of the rectangle. Prompts of these lengths are padded into one batch, and the batch is prefilled as
# a whole. How many percent of the tokens that are computed are padding?

# %%
case = course.case("12.2")
print(f"lengths = {case.lengths}")

# %% tags=["exercise"]
for_nothing = ...  # percent

# %% tags=["solution"]
computed = len(case.lengths) * max(case.lengths)
for_nothing = 100 * (computed - sum(case.lengths)) / computed

# %%
course.check("12.2", for_nothing)

# %% [markdown]
# **12.3** The bytes that rows share. A model has `W` bytes of weights. `B` rows are decoded together, and the cache of
# each row holds `S` tokens, with `kv` bytes per token. A step reads the weights and all the caches once. How many bytes
# does it read *per new token*?

# %%
case = course.case("12.3")
print(f"W = {case.W:,}, B = {case.B}, S = {case.S:,}, kv = {case.kv:,}")

# %% tags=["exercise"]
bytes_per_token = ...

# %% tags=["solution"]
bytes_per_token = case.W / case.B + case.S * case.kv

# %%
course.check("12.3", bytes_per_token)

# %% [markdown]
# ## Your own engine
#
# You have written most of a small engine by now: the sampler in 01, attention in 02, the shared heads in 03, the cache
# in 06, the pages in 10, the reuse of a chat in 11. When the check of such an answer was right, the answer was saved as
# a file in the folder `my`, beside the notebooks. You may open and edit these files. `course.mine` uses your own part
# if it still passes its check. Otherwise it uses nanokv's, and prints that.

# %%
top_p, cut = course.mine("sampler"), course.mine("stop")
attend, kv_head = course.mine("attention"), course.mine("heads")
MyCache, keep = course.mine("cache"), course.mine("prefix")
place_of, free = course.mine("page"), course.mine("free")
write = course.mine("loop")

# %% [markdown]
# The next cell puts them together. The engine uses the loaded model and its weights, without a second copy. The model
# gets two objects from outside: an attention object, which it calls with `q`, `k` and `v`, and a cache with one entry
# per layer. `MyAttention` calls the function of 02.2 once per query head. That function only works for a square of `T`
# queries and `T` keys. With a cache there are fewer queries than keys. So the rows of the old queries are filled with
# zeros, and their results are dropped. (This repeats the waste of notebook 05; nanokv's attention avoids it.)


# %%
class MyAttention:
    """The function of 02.2 for each query head; 03.4 says which KV head it reads."""

    def __call__(self, q, k, v):  # q (B,H,T,D), k and v (B,Hk,S,D), with B = 1
        H, Hk, T, S = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        old = q.new_zeros(1, H, S - T, q.shape[3])
        square = torch.cat((old, q), dim=2)  # (B,H,S,D): the last T of S are asked
        heads = []
        for h in range(H):
            g = kv_head(h, H, Hk)
            keys, values = k[0, g].clone(), v[0, g].clone()  # yours to change
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
        self.cache = nanokv.KVCache([self.layer() for _ in model.layers], c)
        self.held = []

    @torch.inference_mode()
    def feed(self, ids, start_pos):
        """ids go behind what is held → logits that follow the last one, (V,)."""
        hidden = model(torch.tensor([ids]), self.cache, start_pos, MyAttention())
        self.held = self.held + ids
        return model.lm_head(hidden[0, -1])  # hidden is (1,T,C)

    def draw(self, logits):
        """One of the tokens that 01.3 keeps; with a tiny p that is the likeliest."""
        chances = logits.double().softmax(-1)
        few = sorted(top_p(chances.tolist(), self.p))
        return few[int(torch.multinomial(chances[few], 1))]


# %% [markdown]
# One part is missing, the loop.
#
# **12.4** Write a turn. `engine` has `held`, `stop`, `clear()`, `feed(ids, start_pos)` and `draw(logits)`, as above.
# `ids` is a whole prompt, of the same chat or of another one. If the prompt begins with everything in `engine.held`,
# feed only the rest. Otherwise call `engine.clear()` and feed the whole prompt. (`keep` from 11.4 counts the common
# beginning.) Then draw tokens and feed them, until one of `engine.stop` is drawn or there are `most` tokens. Return the
# list of drawn tokens, including the end token. The last one is not fed. The check runs your turn in several chats, and
# counts the tokens that it feeds.


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
course.check("12.4", turn)

# %% [markdown]
# Now the engine answers a chat. The turns share one cache, so each turn prefills only the tokens that the cache does
# not hold yet. The drawn tokens must be the same as from `nanokv.generate`, which starts with an empty cache for every
# turn.

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
        print(f"{new:>3} tokens, {kept:>3} kept, {new - kept:>3} prefilled:  "
              f"{question}  {text}")
        messages.append({"role": "assistant", "content": text})
        turns.append((ids, answer))
    return turns


turns = chat(Engine(MyCache))
theirs = [list(nanokv.generate(model, ids, max_new_tokens=len(answer)))
          for ids, answer in turns]
equal = sum(answer == other for (_, answer), other in zip(turns, theirs))
ids, answer = turns[0]
# a list, a tensor or a generator
written = write(model, torch.tensor([ids]), len(answer))
alike = torch.hstack([torch.as_tensor(token).flatten()
                      for token in written]).tolist() == answer
print(f"the tokens of nanokv.generate: in {equal} of {len(turns)} turns")
print(f"the loop of 06.4 writes the same first answer: {alike}")

# %% tags=["hide-input"]
course.figure("12.equal", equal)
course.figure("12.turns", len(turns))

# %% [markdown]
# In <!--fig 12.equal-->3<!--/fig--> of <!--fig 12.turns-->3<!--/fig--> turns the engine draws the same tokens as
# nanokv. The cache is an argument, so it can be replaced by another one. `Pages` keeps a layer in pages of 16 tokens:
# your function of 10.4 finds token `i`, and that of 10.5 gives the pages back when the chat is over.


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
        # (B,Hk,S,D) ×2
        return self.pool[numbers, slots].permute(1, 2, 0, 3)[:, None].unbind(0)


engine = Engine(Pages)
in_pages = chat(engine)
layer = engine.cache[0]
pages_used, back = len(layer.table), len(free(layer.table, layer.owners,
                                              layer.free_pages))
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
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "a", "b", "c"

# %%
course.answer("12.q1", q1)
course.answer("12.q2", q2)
course.answer("12.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Yu and others, [Orca](https://www.usenix.org/conference/osdi22/presentation/yu): rows that enter and leave a running
#   batch, step by step.
# - Hugging Face, [Caching](https://huggingface.co/docs/transformers/main/en/cache_explanation), which one of the
#   articles recommends.
# - `nanokv/decoding/batching.py`, `nanokv/cache/padded.py`.
#
# ## Next
#
# Batching leaves the answers unchanged if it is done right. Notebook [13](13_what_a_cache_may_lose.ipynb) is about
# caches that always change the numbers, because they drop old tokens or store fewer bits, and about ways to notice it.

# %% tags=["skip"]
course.progress()
