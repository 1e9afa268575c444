# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · cat, preallocate, page
#
# Your cache of notebook 06 is right, but it wastes work on memory: `torch.cat` makes a new tensor in every step and
# copies everything into it. You will count those copies. Then you will reserve the memory in advance, and measure the
# cost of that. Last, you will divide the memory into [pages](glossary.md#page), as servers do to hold many requests in
# one memory.
#
# ## What you will be able to do
#
# - say how many bytes a generation copies with `cat`, with a [slab](glossary.md#slab) and with pages, and measure it;
# - name the advantages and the costs of a fixed capacity;
# - explain [fragmentation](glossary.md#fragmentation), and show it in a picture;
# - write the two main functions of a paged cache: where is token `i`, and which pages become free when a request ends?
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `Hk` KV heads, `D` numbers of a head, `P` tokens of
# the prompt ([all letters](glossary.md#letters)).

# %%
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanokv
from nanokv import costs, course
from nanokv.attention import decode_attention
from nanokv.costs.memory import FAMILY

model, tokenizer = course.start("10")
c = model.config

# %% [markdown]
# ## Predict
#
# A cache grows from empty to `1,000` tokens, one token at a time, by `torch.cat`. How many times is each token
# *copied*, on average?

# %% tags=["exercise"]
copies = ...  # times, on average

# %% tags=["solution"]
copies = 2  # a common first guess: once or twice

# %%
course.predict("10.a", copies, unit="times")

# %% [markdown]
# Second prediction. A server has memory for a few hundred tokens. The length of an answer is not known in advance, so
# each request reserves memory in one piece, for its prompt and for 64 tokens of answer. Now give out the memory in
# pages of 16 tokens instead, when they are needed. How many times as many requests run at once?

# %% tags=["exercise"]
more_at_once = ...  # times as many

# %% tags=["solution"]
more_at_once = 1.1  # a common first guess: a little less waste

# %%
course.predict("10.b", more_at_once, unit="times as many")

# %% [markdown]
# ## Experiment 1: count what is copied
#
# PyTorch lets us watch every operation. The counter below adds up the bytes that are written to memory: new keys and
# values, and old ones that are moved. We feed one token at a time, as decoding does, to one cache of each kind.

# %%
WRITES = {  # operation → how many bytes it writes
    "cat": lambda arguments, result: result.nbytes,
    "clone": lambda arguments, result: result.nbytes,
    # a copy of the rows that were asked for
    "index": lambda arguments, result: result.nbytes,
    "copy_": lambda arguments, result: result.nbytes,
    "index_put_": lambda arguments, result: arguments[2].nbytes,
}


class WriteCounter(TorchDispatchMode):
    """Bytes written by the operations that happen while it is open."""

    bytes = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        name = operation._schema.name.removeprefix("aten::")
        if name in WRITES:
            self.bytes += WRITES[name](arguments, result)
        return result


def append(cache, k):
    for layer in cache:
        layer.append(k, k)


def write_in_place(cache, k):
    """As a kernel does: the cache says where its pages are, and the new token is
    written there."""
    for pages in cache.pages(k):  # one for each layer
        page, slot = divmod(int(pages.lengths[0]) - 1, 16)
        pages.keys[pages.table[0, page].item(), :, slot] = k[0, :, 0]
        pages.values[pages.table[0, page].item(), :, slot] = k[0, :, 0]


longest, every = 512, 32
# (B,Hk,T,D): which numbers they are does not matter
k = torch.randn(1, c.num_key_value_heads, 1, c.head_dim)
token_bytes = costs.kv_bytes_per_token(c, 4)
pages = {"pages": longest // 16, "page": 16}
kinds = {"dict (cat)": ("dict", append, {}),
         "growing (doubles)": ("growing", append, {}),
         "static slab": ("static", append, {}),
         "pages, gathered": ("paged", append, pages),
         "pages, read in place": ("paged", write_in_place, pages)}
written = {}
for name, (kind, write_token, options) in kinds.items():
    cache = nanokv.make_cache(kind, c, capacity=longest, **options)
    with WriteCounter() as counter:
        written[name] = [0]
        for i in range(longest):
            write_token(cache, k)
            if (i + 1) % every == 0:
                written[name].append(counter.bytes)
    print(f"{name:<21} holds {cache.nbytes / 2**20:5.2f} MiB, wrote "
          f"{counter.bytes / 2**20:8.1f} MiB: every byte "
          f"{counter.bytes / (longest * token_bytes):6.1f} times")
times = {name: sums[-1] / (longest * token_bytes) for name, sums in written.items()}

# %% tags=["hide-input"]
course.figure("10.cat", times["dict (cat)"])
course.figure("10.growing", times["growing (doubles)"])
course.figure("10.static", times["static slab"])
course.figure("10.gather", times["pages, gathered"])
course.figure("10.place", times["pages, read in place"])
fig, (left, right) = course.subplots(1, 2, width=9.5)
tokens = range(0, longest + 1, every)
styles = (("-", 1, 1.8), ("-", 4, 1.8), ("-", 0, 1.8), ("--", 3, 1.8), (":", 2, 4))
for (line, color, width), (name, sums) in zip(styles, written.items()):
    for axis in (left, right):
        mib = [size / 2**20 for size in sums]
        axis.plot(tokens, mib, line, color=course.COLORS[color], linewidth=width,
                  label=name)
top = 3 * longest * token_bytes / 2**20
left.set(title="bytes written, in all", xlabel="tokens in the cache", ylabel="MiB")
right.set(title="the same, the lowest part", xlabel="tokens in the cache",
          ylim=(0, top))
left.legend(fontsize=8.5)
ends = ", ".join(f"{name} {value:.0f}" for name, value in times.items())
course.show(fig, alt="Bytes written against tokens held. cat and gathered pages bend "
            "upwards, the others are straight or stepped lines near the bottom. At "
            f"{longest} tokens each byte was written so many times: {ends}.")

# %% [markdown]
# With `cat` every byte was written <!--fig 10.cat-->256<!--/fig--> times, half the length: the lengths of all steps add
# up to S²/2. A slab writes each byte once. A slab that doubles when it is full writes each
# byte <!--fig 10.growing-->2.0<!--/fig--> times, and needs no capacity in advance. Pages also write each byte once,
# *if* attention reads the pages in place. The plain path of nanokv does not: its attention expects one tensor, so the
# cache first gathers the pages into one. Then every token is copied again in every step, as with
# `cat`: <!--fig 10.gather-->265<!--/fig--> times. Pages save memory, not copies. Experiment 4 shows how.
#
# Now your own cache of 06.3, or nanokv's if you have not written one:

# %%
MyCache = course.mine("cache")
layers = [MyCache() for _ in range(c.num_hidden_layers)]
with WriteCounter() as counter:
    for _ in range(longest):
        append(layers, k)
print(f"every byte was written {counter.bytes / (longest * token_bytes):.1f} times")

# %% [markdown]
# Your prediction was for 1,000 tokens:

# %%
cache, moved, counts = nanokv.make_cache("dict", c), 0, []
for i in range(1000):
    with WriteCounter() as counter:
        append(cache, k)
    new = token_bytes if i else 0  # the first append keeps what it is given
    moved += counter.bytes - new  # what was in the cache already
    if i < 4 or 996 <= i:
        counts.append((i, (counter.bytes - new) // token_bytes))
course.reveal("10.a", moved / (1000 * token_bytes))
print("step: old rows copied  ", "  ".join(f"{i}: {rows}" for i, rows in counts))
QWEN = FAMILY["Qwen/Qwen3-0.6B"]
step_bytes = costs.kv_bytes(QWEN, 4096, 1, 2)
all_bytes = costs.kv_bytes_per_token(QWEN, 2) * sum(range(1, 4096))

# %% tags=["hide-input"]
course.figure("10.qwenstep", step_bytes / 1e6)
course.figure("10.qwenall", all_bytes / 1e9)

# %% [markdown]
# It is half of the length. For Qwen3-0.6B in bf16 at 4,096 tokens, `cat` copies <!--fig 10.qwenstep-->469.8<!--/fig-->
# MB in the last step, and <!--fig 10.qwenall-->962<!--/fig--> GB in all. (In a small cache the time of these copies is
# not noticeable: up to some hundred tokens they take less time than the Python code around them. You can time the loop
# above.)

# %% [markdown]
# ## Experiment 2: fixed addresses
#
# A slab has a second advantage: its address never changes. A GPU can record a whole decode step once and repeat it (a
# CUDA graph), as long as every tensor stays at its address. With `cat` the address and the shape change in every step.

# %%
def addresses(kind, steps=8):
    """Where the keys of the first layer lie, step by step."""
    cache, seen = nanokv.make_cache(kind, c, capacity=64), []
    for _ in range(steps):
        keys, _ = [layer.append(k, k) for layer in cache][0]
        seen.append((keys.data_ptr(), keys.shape[2]))
    return seen


moves = {}
for kind in ("dict", "static"):
    seen = addresses(kind)
    moves[kind] = sum(a[0] != b[0] for a, b in zip(seen, seen[1:]))
    print(f"{kind:<7} the keys moved {moves[kind]} times in {len(seen) - 1} steps, "
          f"lengths {[n for _, n in seen]}")

graphs = []


def counting_backend(graph, example):
    """A compiler that compiles nothing and counts how often it is called."""
    graphs.append(graph)
    return graph.forward


grow = torch.compile(lambda old, new: torch.cat((old, new), dim=2),
                     backend=counting_backend, dynamic=True)
old = k.repeat(1, 1, 3, 1)
for _ in range(20):
    old = grow(old, k)
print(f"compiled for 20 lengths: {len(graphs)} graph")

# %% tags=["hide-input"]
course.figure("10.moves-dict", moves["dict"])
course.figure("10.moves-static", moves["static"])
course.figure("10.graphs", len(graphs))

# %% [markdown]
# The keys of the dict cache moved <!--fig 10.moves-dict-->7<!--/fig--> times in 7 steps, those of the
# slab <!--fig 10.moves-static-->0<!--/fig--> times. A *compiler* can handle the growing shape: with `dynamic=True` it
# made <!--fig 10.graphs-->1<!--/fig--> graph for all lengths. Only a recording with fixed addresses needs the slab.

# %% [markdown]
# ## Experiment 3: the costs of a slab
#
# A slab has three disadvantages. The first is memory: it takes its full capacity for every request. The second is time,
# if shapes must be fixed too: attention then runs over *all* slots, with a mask over the empty ones. The third is that
# the mask does not protect against every value in an empty slot. We measure one attention of this model, with 64 tokens
# in the cache.

# %%
held = 64
torch.manual_seed(0)
q = torch.randn(1, c.num_attention_heads, 1, c.head_dim)
keys, values = (torch.randn(1, c.num_key_value_heads, held, c.head_dim) for _ in "kv")
exact = decode_attention(q, keys, values)


def slab_of(capacity, rest):
    """Both slabs, `held` slots filled and the others set to `rest`."""
    slabs = [torch.full((1, c.num_key_value_heads, capacity, c.head_dim), rest)
             for _ in "kv"]
    slabs[0][:, :, :held], slabs[1][:, :, :held] = keys, values
    return slabs


def fastest(call, times=30):
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


capacities, micro = [64, 256, 1024, 4096], []
for capacity in capacities:
    # (1,capacity)
    slabs, mask = slab_of(capacity, 0.0), (torch.arange(capacity) < held)[None]
    gap = float((decode_attention(q, *slabs, mask=mask) - exact).abs().max())
    attend = lambda slabs=slabs, mask=mask: decode_attention(q, *slabs, mask=mask)
    micro.append(1e6 * fastest(attend))
    print(f"{capacity:>5} slots, {held} in use: same result to {gap:.0e}, "
          f"{micro[-1]:7.1f} µs, {capacity * token_bytes / 2**20:6.2f} MiB for all "
          "layers")
poisoned = decode_attention(q, *slab_of(256, float("nan")),
                            mask=(torch.arange(256) < held)[None])
print("empty slots hold NaN, all of them masked: the result is",
      poisoned[0, 0, 0, :3].tolist())

# %% tags=["hide-input"]
course.figure("10.slower", micro[-1] / micro[0])

# %% [markdown]
# 4,096 slots for 64 tokens make this attention more than <!--fig 10.slower above-->3<!--/fig--> times slower, with the
# same result. Memory that has not been written yet can hold any value. A masked slot gets the weight 0, but 0 times NaN
# is NaN. So code that attends over a whole slab has to clear it first. nanokv's `StaticCache` gives attention a view of
# the used part, which avoids both problems. Only a compiled step (`nanokv/fast/compiled.py`) reads the whole slab; it
# first sets the unused slots to zero, and then masks them.

# %% [markdown]
# ## Experiment 4: many requests, one memory
#
# Now ten requests of different lengths share one memory of 320 slots. *In one piece*: each request reserves adjacent
# slots for its prompt plus 64 tokens, in the first hole that is large enough, until it ends. *In pages*:
# `nanokv.Engine` gives out pages of 16 tokens as they are needed. The lengths are realistic: the model writes the
# answers.

# %% tags=["hide-input"]
course.show(course.drawings.pages())

# %%
questions = ["Tell me a story.", "What is a KV cache?", "Count from 3 to 14.",
             "What is 12 + 30?", "My name is Zorbla.",
             "Reverse the list: apple, pear, plum.", "What is prefill?",
             "I have a cat called Miso.",
             "Tell me a story, please.", "Count from 1 to 6."]
prompts = [tokenizer.encode(tokenizer.render([{"role": "user", "content": text}]))
           for text in questions]
answers = [list(nanokv.generate(model, prompt, max_new_tokens=64))
           for prompt in prompts]
page, slots = 16, 320
# of a model with longer tokens: more
slots = max(slots, page * -(-3 * max(len(p) + 64 for p in prompts) // page))
print("prompt + answer:",
      "  ".join(f"{len(p)}+{len(a)}" for p, a in zip(prompts, answers)),
      f"  slots: {slots}")


def in_one_piece(capacity):
    """First fit → one row per step: the owner of each slot (−1 free), and whether it
    holds a token."""
    taken, waiting, running, owner, filled = {}, list(range(len(prompts))), {}, [], []
    while waiting or running:
        while waiting:
            need, start = len(prompts[waiting[0]]) + 64, 0
            for low, high in sorted(taken.values()):
                if low - start >= need:
                    break
                start = high
            if start + need > capacity:
                break  # no hole is large enough: it waits, and those behind it too
            taken[waiting[0]] = start, start + need
            running[waiting.pop(0)] = 0
        owner.append([-1] * capacity)
        filled.append([False] * capacity)
        for b in list(running):
            running[b] += 1
            low, high = taken[b]
            # the newest token is not fed yet
            end = low + len(prompts[b]) + running[b] - 1
            owner[-1][low:high] = [b] * (high - low)
            filled[-1][low:end] = [True] * (end - low)
            if running[b] == len(answers[b]):
                del running[b], taken[b]
    return torch.tensor(owner), torch.tensor(filled)


def in_pages(capacity):
    """The same from the engine, and the answers."""
    engine = nanokv.Engine(model, pages=capacity // page, page_size=page,
                           step_tokens=capacity)
    requests, owner, filled = [engine.submit(prompt, max_new_tokens=64)
                               for prompt in prompts], [], []
    while not engine.idle:
        held = {r.number: (r.cache.tables[0], r.cache.length)
                for r in engine.scheduler.running}
        drawn = {request.number for request, _ in engine.step()}
        held |= {r.number: (list(r.cache.tables[0]), r.cache.length)
                 for r in engine.scheduler.running}
        owner.append([-1] * capacity)
        filled.append([False] * capacity)
        for number, (table, length) in held.items():
            for i, p in enumerate(table if number in drawn else ()):
                owner[-1][p * page : (p + 1) * page] = [number] * page
                used = max(0, min(page, length - i * page))
                filled[-1][p * page : p * page + used] = [True] * used
    tokens = [r.tokens for r in requests]
    return torch.tensor(owner), torch.tensor(filled), tokens, engine.metrics


piece_owner, piece_filled = in_one_piece(slots)
page_owner, page_filled, paged_answers, metrics = in_pages(slots)
at_once = lambda owner: sum(len(set(row) - {-1}) for row in owner.tolist()) / len(owner)
maps = {"in one piece": (piece_owner, piece_filled),
        "in pages": (page_owner, page_filled)}
for name, (owner, filled) in maps.items():
    print(f"{name:<13} {len(owner):>3} steps, {at_once(owner):.1f} requests at once; "
          f"slots reserved {(owner >= 0).float().mean():.0%}, with a token "
          f"{filled.float().mean():.0%}")
print("the answers are those of each request alone:", paged_answers == answers)
print("requests that lost their pages and had to begin again:", metrics.preemptions)
course.reveal("10.b", at_once(page_owner) / at_once(piece_owner))

# %% tags=["hide-input"]
course.figure("10.piece", at_once(piece_owner))
course.figure("10.paged", at_once(page_owner))
course.figure("10.piecesteps", len(piece_owner))
course.figure("10.pagesteps", len(page_owner))
course.figure("10.piecefull",
              100 * float(piece_filled.float().sum() / (piece_owner >= 0).sum()))
course.figure("10.pagefull",
              100 * float(page_filled.float().sum() / (page_owner >= 0).sum()))
from matplotlib.colors import to_rgb

colors = torch.tensor([to_rgb(color)
                       for color in (*course.COLORS[:6], "#7F7F7F", "#8C564B",
                                     "#BCBD22", "#4B0082")])
fig, axes = course.subplots(1, 2, width=10, height=3.8, sharey=True, sharex=True)
for axis, (name, (owner, filled)) in zip(axes, maps.items()):
    full = colors[owner.clamp(min=0)]  # (steps,slots,3)
    pale = 1 - (1 - full) * 0.25  # reserved, no token in it
    picture = torch.where(filled[..., None], full, pale)
    picture[owner < 0] = 1.0
    axis.imshow(picture.transpose(0, 1).numpy(), aspect="auto", origin="lower",
                interpolation="nearest")
    axis.grid(False)
    axis.set(title=name, xlabel="step")
axes[0].set(ylabel="slot", xlim=(-0.5, max(len(piece_owner), len(page_owner)) - 0.5))
words = "; ".join(f"{name}: {len(owner)} steps, {at_once(owner):.1f} requests at once, "
                  f"{filled.sum() / (owner >= 0).sum():.0%} of what is reserved holds "
                  "a token"
                  for name, (owner, filled) in maps.items())
course.show(fig, alt="Maps of the memory, slots upwards and steps to the right, one "
            "colour a request, pale where a slot is reserved and empty, white where it "
            f"is free. {words}. In pages a request lies in strips that need not touch.")

# %% [markdown]
# In one piece, <!--fig 10.piece-->2.0<!--/fig--> requests run at once, and the ten
# take <!--fig 10.piecesteps-->138<!--/fig--> steps. Only <!--fig 10.piecefull-->47<!--/fig--> percent of the reserved
# slots hold a token. The pale parts were reserved for answers that turned out shorter. The white parts are holes that
# are too small for the next waiting request; towards the end no request is waiting. In
# pages, <!--fig 10.paged-->3.66<!--/fig--> requests run at once, they take <!--fig 10.pagesteps-->77<!--/fig--> steps,
# and <!--fig 10.pagefull-->84<!--/fig--> percent of the slots hold a token. The answers are the same, token for token.
# A server runs many requests at once because each step reads all weights once for all of them.
#
# The pages can run out in the middle of an answer. Then the youngest request gives its pages back and starts again
# later. That did not happen here. It never happens to a request that reserved its memory in one piece. It is the price
# of starting more requests than the memory can hold at their full length.
#
# Before memory and speed count, a cache has to be right. `nanokv.equality` feeds a cache token by token, in
# [chunks](glossary.md#chunk) and in batches; it forks it, truncates it and loads it from a file. It compares every
# result with the model without a cache:

# %%
report = nanokv.equality.check("paged")
print(report)

# %% tags=["hide-input"]
course.figure("10.cases", sum(case.status == "passed" for case in report.cases))

# %% [markdown]
# ## What the articles say
#
# Here are three wrong claims about where the bytes are stored. The other claims that this notebook checks are on [the
# page of all claims](claims.md).

# %%
course.claim("0.15", "wrong", found=step_bytes)
course.claim("0.18", "wrong", found=4 + 10)
reserved_used = piece_filled.sum() / (piece_owner >= 0).sum()
course.claim("1.14", "wrong")

# %% tags=["hide-input"]
course.confirm("0.16", "misleading", found=all_bytes)
course.confirm("0.17", "misleading", found=f"{len(graphs)} graph for 20 lengths")
course.confirm("0.19", "right", found=f"{capacities[-1]} slots for {held} tokens: "
               f"{micro[-1] / micro[0]:.0f} times slower")
course.confirm("1.12", "right", found=f"{reserved_used:.0%} of what was reserved held "
               f"a token")
course.confirm("1.13", "right")
course.confirm("1.15", "misleading",
               found=costs.cache_slots("paged", QWEN, 100, page=16) - 100)

# %% [markdown]
# ## Exercises
#
# **10.1** A cache grows by `cat` from empty to `N` tokens, one at a time. How many *old* rows does it copy in all, in
# one layer? (The new row of each step does not count, and the first append copies nothing.)

# %%
case = course.case("10.1")
print(f"N = {case.N}")

# %% tags=["exercise"]
old_rows = ...

# %% tags=["solution"]
old_rows = case.N * (case.N - 1) // 2

# %%
course.check("10.1", old_rows)

# %% [markdown]
# **10.2** A prompt of `P` tokens is prefilled. In decode step `n` (the first decode is step 1): for how many tokens
# does `cat` allocate memory, and how many old tokens does it copy? Answer with a pair. One of the articles shows this
# in a diagram.

# %%
case = course.case("10.2")
print(f"P = {case.P}, n = {case.n}")

# %% tags=["exercise"]
taken_and_copied = ..., ...

# %% tags=["solution"]
taken_and_copied = case.P + case.n, case.P + case.n - 1

# %%
course.check("10.2", taken_and_copied)

# %% [markdown]
# **10.3** A request uses `used` tokens. How many slots are wasted with a slab of `capacity`, and how many with pages of
# `page` tokens? Answer with a pair.

# %%
case = course.case("10.3")
print(f"used {case.used}, capacity {case.capacity}, page {case.page}")

# %% tags=["exercise"]
wasted = ..., ...

# %% tags=["solution"]
wasted = case.capacity - case.used, -case.used % case.page

# %%
course.check("10.3", wasted)

# %% [markdown]
# **10.4** Where is token `i`? The `table` of a request lists its pages, oldest first; a page holds `page` tokens.
# Return the number of its page in the pool, and its slot in that page.


# %% tags=["exercise"]
def place_of(table, i, page):
    return ..., ...


# %% tags=["solution"]
def place_of(table, i, page):
    return table[i // page], i % page


# %%
course.check("10.4", place_of)

# %% [markdown]
# **10.5** The paged cache of the article never gives a page back. Write `free`. `owners[p]` is the number of tables
# that hold page `p` (a page of a shared prefix is in several); `free_pages` lists the pages that are in no table. When
# a request ends, it gives up each page of its `table`. Change `owners`, `free_pages` and `table` in place, and return
# `free_pages`.


# %% tags=["exercise"]
def free(table, owners, free_pages):
    return ...


# %% tags=["solution"]
def free(table, owners, free_pages):
    for p in table:
        owners[p] -= 1
        if owners[p] == 0:
            free_pages.append(p)
    table.clear()
    return free_pages


# %%
course.check("10.5", free)

# %% [markdown]
# ## Quiz

# %%
course.quiz("10")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "b", "a", "c"

# %%
course.answer("10.q1", q1)
course.answer("10.q2", q2)
course.answer("10.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Kwon and others, [PagedAttention](https://arxiv.org/abs/2309.06180): figure 2 shows how much memory servers wasted
#   before.
# - `nanokv/cache/static.py`, `nanokv/cache/pool.py`, `nanokv/cache/paged.py`: slab, pool and pages, each on a page or
#   two.
# - `nanokv/engine/scheduler.py`: which request gets pages, and which has to give them back.
#
# ## Next
#
# Pages can have several owners. Notebook [11](11_reuse_and_rollback.ipynb) shares prefixes in this way, and removes
# rejected guesses from a cache.

# %% tags=["skip"]
course.progress()
