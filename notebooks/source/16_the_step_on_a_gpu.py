# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 · The step on a GPU
#
# A GPU reads memory a hundred times as fast as your processor, and yet the plain model writes its tokens there hardly
# faster than here. The reason is that each step consists of a few hundred small operations, and Python starts them one
# by one. In this notebook you write the operations of a decode step as [kernels](glossary.md#kernel), in Triton, and
# record a whole step so that one command starts it. No GPU is needed: Triton's interpreter runs each kernel on the CPU,
# slowly but with the same results. At the end your kernels write an answer, and you compare them with the kernels that
# nanokv runs on a real GPU.
#
# ## What you will be able to do
#
# - count the operations that a plain step starts, and compute their cost on a GPU;
# - write a kernel: say which program reads which numbers, and why it needs a mask;
# - read keys in place, in their pages, and compute a softmax block by block;
# - divide one row among many programs ([split-K](glossary.md#split-k)) and merge the parts;
# - say what a recorded step stores, and put everything that changes into tensors with fixed addresses.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `C` numbers of a hidden state, `H` query heads, `Hk`
# KV heads, `D` numbers of a head, `N` numbers of a tensor ([all letters](glossary.md#letters)).

# %%
import inspect
from functools import partial

import torch
import torch.nn.functional as F

import nanokv
from nanokv import course
from nanokv.cache.paged import PagedCache
from nanokv.cache.pool import PagePool
from nanokv.costs.memory import FAMILY
from nanokv.model import RMSNorm
from nanokv.rope import rope_angles
from nanokv.school.course import own_kernels
from nanokv.school.course.own_inputs import Inputs
from nanokv.school.course.own_kernels import Recording, here, launch, tl, triton

model, tokenizer = course.start("16", model="tiny")  # the interpreter is slow
c = model.config
if not here:
    print(own_kernels.WHY_NOT)

# %% [markdown]
# ## Predict
#
# The bundled model has 6 layers. How many operations does PyTorch start for *one* decode step of it?

# %% tags=["exercise"]
starts = ...

# %% tags=["solution"]
starts = 60  # a common first guess: about ten per layer

# %%
course.predict("16.a", starts, unit="operations")

# %% [markdown]
# Second: `RMSNorm` of `N` numbers must read them once and write the result once, which is `2·N`. The plain line reads
# and writes more, because each of its operations reads its input from memory and writes its output there. How many
# times `2·N` is that?

# %% tags=["exercise"]
passes = ...

# %% tags=["solution"]
passes = 2  # a common first guess: once for the squares, once for the result

# %%
course.predict("16.b", passes, unit="times")

# %% [markdown]
# ## Experiment 1: the operations of a step
#
# `Recording` writes down every operation that PyTorch starts, with its arguments. On a GPU each of them is a launch of
# a kernel, or of several. (Views are in the list too. They start no kernel, so we leave them out.)


# %%
def started(function):
    """(name, numbers read and written) of each operation that computes something."""
    with torch.inference_mode(), Recording() as recording:
        function()
    found = []
    for operation, arguments, _, result in recording.starts:
        inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
        out = result if isinstance(result, torch.Tensor) else result[0]
        if not any(a.data_ptr() == out.data_ptr() for a in inputs if a.numel()):
            moved = sum(a.numel() for a in inputs) + out.numel()
            found.append((operation._schema.name.removeprefix("aten::"), moved))
    return found


said = [{"role": "user", "content": "What is 12 + 30?"}]
prompt = tokenizer.encode(tokenizer.render(said))
cache = nanokv.make_cache("dict", c)
first = int(nanokv.prefill(model, [prompt], cache).argmax())


def plain_step():
    """One decode, by the plain model: its layers, its norm, its last matrix."""
    x = model.embed_tokens(torch.tensor([[first]]))  # (B,T,C), T = 1
    rope = rope_angles(c, torch.tensor([[cache.length]]), x.dtype)
    attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
    x = model.run_layers(x, rope, cache, attend)
    return model.lm_head(model.norm(x))


step_starts = started(plain_step)
counts = {}
for name, _ in step_starts:
    counts[name] = counts.get(name, 0) + 1
common = sorted(counts.items(), key=lambda pair: -pair[1])[:8]
frequent = ", ".join(f"{name} {number}" for name, number in common)
print(f"{len(step_starts)} operations; the most frequent: {frequent}")
course.reveal("16.a", len(step_starts))

qwen = FAMILY["Qwen/Qwen3-0.6B"]  # 28 layers
qwen_starts = len(step_starts) * qwen.num_hidden_layers / c.num_hidden_layers
starting = qwen_starts * 10e-6  # if Python needs 10 µs to start one
reading = 1.19e9 / 3.35e12  # its weights in bf16, at the bandwidth of an H100
print(f"Qwen3-0.6B: {qwen_starts:.0f} starts, {1e3 * starting:.0f} ms to start them, "
      f"{1e3 * reading:.2f} ms to read the weights")

# %% tags=["hide-input"]
course.figure("16.starts", len(step_starts))
course.figure("16.qwen", qwen_starts)
course.figure("16.waits", starting / reading)
fig, axis = course.subplots(width=7, height=2.6)
names = [name for name, _ in common][::-1]
axis.barh(names, [counts[name] for name in names], 0.6, color=course.COLORS[1])
axis.set(xlabel="starts per decode step")
axis.set(title=f"{len(step_starts)} operations for one token")
course.show(
    fig,
    alt=f"Bars of the most frequent of {len(step_starts)} operations of a decode step: "
    f"{frequent}.",
)

# %% [markdown]
# One token takes <!--fig 16.starts x1.3-->308<!--/fig--> operations. Nearly all of them work on a few hundred numbers.
# For Qwen3-0.6B it is more than <!--fig 16.qwen above-->900<!--/fig-->. If Python needs `10 µs` to start one, the GPU
# waits more than <!--fig 16.waits above-->20<!--/fig--> times as long as it reads. There are two remedies: fewer and
# larger operations, for which you write your own kernels, and one command that starts all of them, for which you record
# the step.

# %% [markdown]
# ## Experiment 2: a first kernel
#
# A kernel is a function that many *programs* run at the same time. They differ only in their number,
# `tl.program_id(0)`. A program computes with blocks of numbers, whose size is a power of two and is fixed when the
# kernel is compiled (`tl.constexpr`). The arguments are addresses: `x + 5` is the address of element 5, `tl.load` reads
# from an address, `tl.store` writes to it. Where the mask is false, nothing is read or written. Here is a kernel that
# doubles the rows of a tensor, with one program per row. The grid is the number of programs.


# %%
@triton.jit
def double_kernel(x, y, C, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # 0, 1, … BLOCK − 1
    inside = column < C
    numbers = tl.load(x + row * C + column, inside, 0)  # 0 where the mask is off
    tl.store(y + row * C + column, 2 * numbers, inside)


if here:
    x = torch.arange(15.0).view(3, 5)
    y = torch.empty_like(x)
    launch(double_kernel, (3,), x, y, 5, 8)  # kernel, grid, arguments: C = 5, BLOCK = 8
    print(y)

# %% [markdown]
# Without the mask, each program would write three numbers past the end of its row: into the next row, or into memory of
# another tensor. Neither the interpreter nor a GPU stops it.
#
# Now we count the bytes. The plain `RMSNorm` is a line of six operations:

# %%
rows = torch.randn(4096, c.hidden_size)  # (B,C)
norm = model.layers[0].input_layernorm
norm_starts = started(lambda: norm(rows))
needed = 2 * rows.numel() + norm.weight.numel()
moved = sum(size for _, size in norm_starts)
print(", ".join(f"{name} {size / rows.numel():.0f}·N" for name, size in norm_starts))
course.reveal("16.b", moved / needed)

# %% tags=["hide-input"]
course.figure("16.moved", moved / needed)

# %% [markdown]
# The plain line reads and writes <!--fig 16.moved-->3.5<!--/fig--> times the minimum, in six operations. A kernel reads
# the row once, keeps it in registers, and writes the result once. You write this kernel in 16.1.

# %% [markdown]
# ## Experiment 3: one row, many programs
#
# In a decode step a row has one query per head, and its attention reads the whole cache of the row. With one program
# per row and KV head, a single row of Qwen3-0.6B gives 8 programs, but an H100 has 132 processors. So the tokens of a
# row are divided into parts. Each program attends to its part and stores the [log-sum-exp](glossary.md#log-sum-exp); a
# second kernel merges the parts, as the ranks did in notebook 14. Here is the first kernel in its simplest form, with
# one program per row, *query* head and part. Two lines of it are missing, and you write them as functions: `place`
# finds the page and the slot of a token, and `fold` updates a softmax block by block.

# %%
attention_kernel = own_kernels.attention_kernel
print(inspect.getsource(attention_kernel.fn if here else attention_kernel))

# %% [markdown]
# The kernel never stores all scores of a part, only one block at a time. It keeps the highest score so far, the sum of
# `exp(score − highest)`, and the sum of the values with these weights. We compare it with the plain line, for a row of
# 41 tokens in pages of 16:

# %%
generator = torch.Generator().manual_seed(16)
H, Hk, D, SIZE = c.num_attention_heads, c.num_key_value_heads, c.head_dim, 16
keys, values = torch.randn(2, 9, Hk, SIZE, D, generator=generator)  # nine pages
q = torch.randn(1, H, D, generator=generator)
table = torch.tensor([[3, 1, 7]], dtype=torch.int32)
lengths = torch.tensor([41], dtype=torch.int32)


def dense(pages):
    """The pages of the row, one after the other: (1,Hk,41,D)."""
    return pages[table[0].long()].transpose(0, 1).flatten(1, 2)[None, :, :41]


plain = F.scaled_dot_product_attention(
    q[:, :, None], dense(keys), dense(values), enable_gqa=True
)[:, :, 0]
errors = {}
for splits in (1, 2, 4) if here else ():
    parts, sums = own_kernels.attention(
        own_kernels.place, own_kernels.fold, q, keys, values, table, lengths, splits
    )
    merged = own_kernels.merge(own_kernels.merge_kernel, parts, sums)  # (1,H,D)
    errors[splits] = float((merged - plain).abs().max())
    print(f"parts: {splits}, programs: {H * splits}, off by {errors[splits]:.0e}")

# %% tags=["hide-input"]
course.figure("16.off", max(errors.values(), default=0) + 1e-9)
parts_of = {n: [min(k * -(-41 // n), 41) for k in range(n + 1)] for n in (1, 2, 4)}
fig, axis = course.subplots(width=8, height=2)
for y, (n, ends) in enumerate(parts_of.items()):
    for k in range(n):
        color = course.COLORS[k]
        width = ends[k + 1] - ends[k]
        axis.barh(y, width, left=ends[k], color=color, edgecolor="white")
axis.set(xlabel="token of the row", title="41 tokens, and which program reads them")
axis.set(yticks=range(3), yticklabels=["1 part", "2 parts", "4 parts"])
axis.grid(False)
course.show(
    fig,
    alt="Three bars of 41 tokens: read by one program, by two (21 and 20 tokens), and "
    "by four (11, 11, 11 and 8). Each colour is a program; their results are merged.",
)

# %% [markdown]
# A part may end anywhere, even in the middle of a page. The result is that of the plain line, up
# to <!--fig 16.off x20-->2e-7<!--/fig-->.

# %% [markdown]
# ## Experiment 4: the contents of a recording
#
# A [CUDA graph](glossary.md#cuda-graph) is a recording of launches. One command repeats them all, without Python. It
# contains each kernel with its arguments at the time of recording: for a tensor its *address*, for a number its
# *value*. There may be no GPU here, so `Recording` imitates it: it lists the operations that are started, and `replay`
# starts them again, with the same addresses and the same numbers. (This is not faster, because Python still starts each
# operation.)
#
# There are two ways to attend to the first `n` tokens of a slab: `n` as a Python number, or as a tensor. We record both
# with `n = 5`, then set `n = 9` and replay.

# %%
slab = torch.randn(1, 1, 32, 8, generator=generator)  # keys, and values too
query = torch.randn(1, 1, 1, 8, generator=generator)
n, held = 5, torch.tensor([5])


def by_number():
    return F.scaled_dot_product_attention(query, slab[:, :, :n], slab[:, :, :n])


def by_tensor():
    mask = (torch.arange(32) < held)[None]  # computed anew in each replay
    return F.scaled_dot_product_attention(query, slab, slab, attn_mask=mask)


stale = {}
for way in (by_number, by_tensor):
    n = 5
    held.fill_(5)
    with torch.inference_mode(), Recording() as recording:
        answer = way()
    n = 9
    held.fill_(9)
    recording.replay()
    right = F.scaled_dot_product_attention(query, slab[:, :, :9], slab[:, :, :9])
    stale[way.__name__] = float((answer - right).abs().max())
    print(f"{way.__name__}: replayed with 9 tokens, off by {stale[way.__name__]:.0e}")

# %% tags=["hide-input"]
course.figure("16.stale", stale["by_number"])
course.figure("16.fresh", stale["by_tensor"] + 1e-9)

# %% [markdown]
# The number was recorded with its value: the replay still attends to five tokens, and is off
# by <!--fig 16.stale x3-->1<!--/fig-->, without an error. The tensor was read again, and the answer is right. A value
# that Python itself has to read cannot be recorded at all, because during a recording nothing has been computed yet:

# %%
try:
    with torch.inference_mode(), Recording():
        held.item()
except RuntimeError as error:
    print(error)

# %% [markdown]
# So the tokens, their positions, the page tables and the lengths are tensors with fixed addresses, which are filled
# before each replay. Shapes, grids and the number of parts may be numbers. The keys must not move in memory. That is
# why a step with a cache that grows by `cat` cannot be recorded (notebook 10), and a step with pages can.

# %% [markdown]
# ## What the articles say
#
# One of the five says that compilers cannot work with a cache that grows. Notebook 10 tested this claim; none of the
# [claims](claims.md) is executed here. Experiment 4 explains what the articles say about fixed addresses.

# %% [markdown]
# ## Exercises
#
# Kernels run in Triton's interpreter. `print(numbers)` in a kernel shows a block of numbers, once per program.
#
# **16.1** `y = weight · x / √(mean(x²) + eps)`, for each row of `x`, with a program per row. `x` and `y` are `(B,C)`,
# `weight` is `(C,)`, and `C` need not be a power of two. `tl.sum`, `tl.sqrt` and `+ - * /` are all you need (Triton has
# no `**`). The plain line that it replaces is `RMSNorm.forward` in `nanokv/model.py`.


# %% tags=["exercise"]
@triton.jit
def norm_kernel(x, weight, y, C, eps, BLOCK: tl.constexpr):
    ...


# %% tags=["solution"]
@triton.jit
def norm_kernel(x, weight, y, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < C
    numbers = tl.load(x + row * C + column, inside, 0)
    scale = 1 / tl.sqrt(tl.sum(numbers * numbers) / C + eps)
    w = tl.load(weight + column, inside, 0)
    tl.store(y + row * C + column, w * numbers * scale, inside)


# %%
course.check("16.1", norm_kernel)

# %% [markdown]
# **16.2** A GPU has `processors` processors. A batch has `B` rows, the model `H` query heads and `Hk` KV heads. A
# kernel on a real GPU has one program per row and KV head, so that the query heads of a KV head read its keys only
# once. How many programs is that? Into how many parts does each row have to be divided, so that there are at least as
# many programs as processors? Take the smallest power of two. Answer with a pair.

# %%
case = course.case("16.2")
print(f"B = {case.B}, H = {case.H}, Hk = {case.Hk}, processors = {case.processors}")

# %% tags=["exercise"]
programs_and_parts = ..., ...

# %% tags=["solution"]
programs = case.B * case.Hk
parts = 1
while programs * parts < case.processors:
    parts *= 2
programs_and_parts = programs, parts

# %%
course.check("16.2", programs_and_parts)

# %% [markdown]
# **16.3** Find the page and the slot of each token: `place_of` of 10.4, for a block of tokens at once. `table` is the
# address of the row's page table (int32), `token` is a block of positions, and `SIZE` tokens fit into a page. Load the
# pages with the mask `seen`, because the table has no entries after the end of a row. Return the pages and the slots.


# %% tags=["exercise"]
@triton.jit
def place(table, token, seen, SIZE: tl.constexpr):
    return ..., ...


# %% tags=["solution"]
@triton.jit
def place(table, token, seen, SIZE: tl.constexpr):
    page = tl.load(table + token // SIZE, seen, 0)
    return page, token % SIZE


# %%
course.check("16.3", place)

# %% [markdown]
# **16.4** A softmax, block by block. For the blocks so far, `highest` is the highest score, `total` is the sum of
# `exp(score − highest)`, and `mixed`, `(WIDTH,)`, is the sum of `exp(score − highest) · v`. The next block has
# `scores`, `(BLOCK,)`, and values `v`, `(BLOCK, WIDTH)`. Return the three updated quantities. If the block has a higher
# score, the earlier sums have to be scaled down. (`tl.maximum(a, b)`, `tl.max(x, 0)`, `tl.exp`, `tl.sum(x, 0)`, `x[:,
# None]`. A masked score is −∞, which needs no special case.)


# %% tags=["exercise"]
@triton.jit
def fold(highest, total, mixed, scores, v):
    return ..., ..., ...


# %% tags=["solution"]
@triton.jit
def fold(highest, total, mixed, scores, v):
    higher = tl.maximum(highest, tl.max(scores, 0))
    shrink = tl.exp(highest - higher)
    share = tl.exp(scores - higher)
    total = total * shrink + tl.sum(share, 0)
    mixed = mixed * shrink + tl.sum(share[:, None] * v, 0)
    return higher, total, mixed


# %%
course.check("16.4", fold)

# %% [markdown]
# **16.5** Merge the parts, with a program per row and query head. For each program, `parts` has the outputs `(SPLITS,
# D)` and `sums` the log-sum-exps `(SPLITS,)`; those of the next program follow in memory. `WIDTH` is a power of two, at
# least `D`. Write the merged row to `y`. The log-sum-exps can be large, and −∞ for a part without tokens (at least one
# part has tokens).


# %% tags=["exercise"]
@triton.jit
def merge_kernel(parts, sums, y, D, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    ...


# %% tags=["solution"]
@triton.jit
def merge_kernel(parts, sums, y, D, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    lse = tl.load(sums + row * SPLITS + s)
    share = tl.exp(lse - tl.max(lse, 0))
    share = share / tl.sum(share, 0)
    at = parts + (row * SPLITS + s[:, None]) * D + d[None, :]  # (SPLITS, WIDTH)
    part = tl.load(at, d[None, :] < D, 0)
    tl.store(y + row * D + d, tl.sum(part * share[:, None], 0), d < D)


# %%
course.check("16.5", merge_kernel)

# %% [markdown]
# **16.6** The inputs of a recorded step. They are tensors, allocated once for `inputs.rows` rows:

# %%
print(inspect.getsource(Inputs))

# %% [markdown]
# Write the function that fills them before a replay. `tokens` and `positions` are lists with one number per request,
# for the token that is fed, and `tables` has the list of pages of each request. There may be fewer requests than rows:
# the unused rows must see no token, whatever the previous step has left in them. `lengths` include the token that is
# fed. Return nothing.


# %% tags=["exercise"]
def fill(inputs, tokens, positions, tables):
    return ...


# %% tags=["solution"]
def fill(inputs, tokens, positions, tables):
    b = len(tokens)
    inputs.tokens[:b] = torch.tensor(tokens)
    inputs.positions[:b] = torch.tensor(positions)
    inputs.lengths.zero_()
    inputs.lengths[:b] = torch.tensor(positions) + 1
    for row, table in enumerate(tables):
        inputs.table[row, : len(table)] = torch.tensor(table)


# %%
course.check("16.6", fill)

# %% [markdown]
# ## Your own step
#
# Now the parts come together. PyTorch computes the products and the model's code the rotation; the norms, the attention
# over pages and the merge are your kernels. nanokv prefills the prompt into pages. Then one decode step is recorded,
# and replayed for each further token, after a call of your `fill`.

# %%
norm_kernel, merge_kernel = course.mine("row_norm"), course.mine("merge")
place, fold = course.mine("place"), course.mine("fold")
fill = course.mine("fill")


class Layer:
    """The pages of one layer. Each replay computes where the new token goes."""

    def __init__(self, keys, values, inputs):  # (pages, Hk, SIZE, D) each
        self.keys, self.values, self.inputs = keys, values, inputs

    def append(self, k, v):  # (B,Hk,T,D), T = 1
        last = self.inputs.lengths.long() - 1
        page = self.inputs.table.long().gather(1, (last // SIZE)[:, None])[:, 0]
        self.keys[page, :, last % SIZE] = k[:, :, 0]
        self.values[page, :, last % SIZE] = v[:, :, 0]
        return self.keys, self.values


def attend_to(inputs, splits, q, keys, values):
    """What the model calls as its attention: q (B,H,T,D) → the same, T = 1."""
    parts, sums = own_kernels.attention(
        place, fold, q[:, :, 0], keys, values, inputs.table, inputs.lengths, splits
    )
    return own_kernels.merge(merge_kernel, parts, sums)[:, :, None]


def step(inputs, layers):
    """One decode step → logits (B,V)."""
    x = model.embed_tokens(inputs.tokens[:, None])  # (B,T,C)
    rope = rope_angles(c, inputs.positions[:, None], x.dtype)
    x = model.run_layers(x, rope, layers, partial(attend_to, inputs, 1))
    return model.lm_head(model.norm(x))[:, -1]


def answer_of(prompt, n):
    """n tokens: of the prefill, of the step that is recorded, and of its replays."""
    pool = PagePool(c, pages=8, page_size=SIZE)
    cache = PagedCache(pool)
    tokens = [int(nanokv.prefill(model, [prompt], cache).argmax())]
    cache.reserve(len(prompt), len(prompt) + n)  # pages for all of it: its table stays
    inputs = Inputs(rows=1, pages=8)
    layers = [Layer(*pages, inputs) for pages in zip(pool.keys, pool.values)]
    recording = None
    while len(tokens) < n:
        fill(inputs, tokens[-1:], [len(prompt) + len(tokens) - 1], cache.tables)
        if recording is None:
            with torch.inference_mode(), Recording() as recording:
                logits = step(inputs, layers)
        else:
            recording.replay()
        tokens.append(int(logits.argmax()))
    return tokens, recording


if here:
    norms = [one for one in model.modules() if isinstance(one, RMSNorm)]
    norms = [one for one in norms if len(one.weight) == c.hidden_size]  # not of heads
    yours = partial(own_kernels.norm, norm_kernel)
    for one in norms:
        one.forward = partial(yours, weight=one.weight, eps=one.eps)
    tokens, recording = answer_of(prompt, 5)
    for one in norms:
        del one.forward  # the plain line again
    kernels = sum(function is launch for function, *_ in recording.starts)
    alone = list(nanokv.generate(model, prompt, max_new_tokens=5))
    print(f"recorded: {len(recording.starts)} starts, including views")
    print(f"starts of your kernels: {kernels}")
    print(f"{tokenizer.text_of(tokens)!r}, as with nanokv.generate: {tokens == alone}")
else:
    tokens = alone = kernels = 0

# %% tags=["hide-input"]
course.figure("16.same", int(tokens == alone))
course.figure("16.kernels", kernels)

# %% [markdown]
# The answer has five tokens. The last three come from replays, without a call of the Python code of the step. A replay
# contains <!--fig 16.kernels-->25<!--/fig--> launches of your kernels among the operations of PyTorch. If you replace
# your `fill` by one that makes new tensors, the replays write the same token forever.
#
# nanokv does the same on a real GPU (`nanokv/fast/gpu`), with more work in each kernel: the norm is part of the product
# that follows it, all query heads of a KV head share a program, and head norms, rotation and the write into the pages
# are one launch. A layer takes seven launches. These kernels also run in the interpreter, so we can compare them with
# yours:

# %%
beside = {}
if here:
    from nanokv.fast.gpu import kernels as theirs

    x = torch.randn(5, c.hidden_size, generator=generator)
    weight = model.layers[0].input_layernorm.weight.detach()
    eps = c.rms_norm_eps
    mine = own_kernels.norm(norm_kernel, x, weight, eps)
    others = {
        "the plain line": model.layers[0].input_layernorm(x),
        "nanokv's kernel": theirs.rms_norm(x, weight, eps),
    }
    for name, other in others.items():
        beside[name] = float((mine - other).abs().max())
        print(f"yours and {name} differ by {beside[name]:.0e}")
    print(inspect.getsource(theirs.rms_norm_kernel.fn))

# %% tags=["hide-input"]
course.figure("16.beside", max(beside.values(), default=0) + 1e-9)

# %% [markdown]
# The results agree, up to <!--fig 16.beside x20-->5e-7<!--/fig-->. nanokv's kernel also adds the residual, and rounds
# where the plain line rounds, so that bf16 gives the same bits.

# %%
course.whose()

# %% [markdown]
# ## Quiz

# %%
course.quiz("16")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters

# %% tags=["solution"]
q1, q2, q3 = "c", "b", "a"

# %%
course.answer("16.q1", q1)
course.answer("16.q2", q2)
course.answer("16.q3", q3)

# %% [markdown]
# ## Further reading
#
# - [Triton](https://triton-lang.org/main/getting-started/tutorials/index.html), its tutorials: from an addition to
#   attention.
# - Milakov and Gimelshein, [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867): 16.4.
# - Dao and others, [Flash-Decoding](https://crfm.stanford.edu/2023/10/12/flashdecoding.html): Experiment 3.
# - `nanokv/fast/gpu/attention.py`, `nanokv/fast/gpu/kernels.py`, `nanokv/fast/gpu/recorded.py`: nanokv's kernels and
#   its recording.
# - Layers that keep no keys at all, such as [DeltaNet](glossary.md#deltanet), and models that guess several tokens
#   themselves ([MTP](glossary.md#mtp)) change the operations of a step. [Eviction](glossary.md#eviction) decides what a
#   cache drops, and when.
#
# ## Next
#
# A layer need not keep keys at all. In notebook [17](17_a_cache_that_forgets.ipynb) a state of fixed size takes their
# place, and can neither grow nor be cut.

# %% tags=["skip"]
course.progress()
