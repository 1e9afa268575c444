# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · Measure it honestly
#
# A count is exact; a time is not. A measured time includes everything that the machine did in between: the slow first
# call, another program, a second prefill hidden in a call. One of the articles offers a profiler that looks reasonable
# and times the wrong thing. You will time a model in four ways, find out what limits each phase, and find the error of
# that profiler.
#
# ## What you will be able to do
#
# - measure [time to first token](glossary.md#time-to-first-token) and [time between
#   tokens](glossary.md#time-between-tokens) separately, with a warm-up, with medians, and with the candidates taking
#   turns;
# - say how many bytes a step has to read and how much it has to compute, and compare its time with the least time that
#   the machine allows;
# - explain why a tiny model gains less from a cache than the count suggests, and why a large model processes a batch
#   much faster than its rows one by one;
# - read a benchmark and say which information is missing.
#
# Letters: `S` keys that a query may see, the cached ones included, `C` numbers of a hidden state, `V` entries of the
# vocabulary ([all letters](glossary.md#letters)).

# %%
import statistics
import time
from dataclasses import replace

import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import nanokv
from nanokv import costs, course
from nanokv.lab.bench.machine import Bandwidth, Others, gemm_peak
from nanokv.lab.bench.profile import phases
from nanokv.lab.bench.rotation import Rotation
from nanokv.lab.bench.runners import Ours, Uncached
from nanokv.school.course.claims.article1 import profiled_rate
from nanokv.school.course.work import scores_with_cache, scores_without_cache
from nanokv.fast import optimize
from nanokv.loading import build
from nanokv.costs.memory import FAMILY
from nanokv.loading import skeleton

model, tokenizer = course.start("09")
c = model.config
# two threads wait for each other when others use the machine: one is slower and
# steadier
torch.set_num_threads(1)
others = Others()  # counts the processor time that other programs take while we measure

# %% [markdown]
# ## Predict
#
# Without a cache, a step after a text of `512` tokens feeds `512` rows; with a cache it feeds one. You counted that in
# notebook 05. Now measure time, with the loaded model: how many *times* as fast is a step with a cache?

# %% tags=["exercise"]
guess = ...  # times as fast

# %% tags=["solution"]
guess = 512  # a common first guess: as many times as there are rows

# %%
course.predict("09.a", guess, unit="times as fast")

# %% [markdown]
# ## Experiment 1: one measurement is not enough
#
# We time the same decode step many times. Before that, we compare the very first prefill of this process with the next
# ones.

# %%
def seconds(run):
    """How long it takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def fresh_prefill(tokens=32):
    cache = nanokv.make_cache("static", c, capacity=tokens + 64)
    ids = torch.randint(c.vocab_size, (1, tokens))
    return cache, nanokv.prefill(model, ids, cache,
                                 start_pos=0).argmax(-1, keepdim=True)


first, later = seconds(fresh_prefill), [seconds(fresh_prefill) for _ in range(9)]
print(f"prefill of 32 tokens: the first {1e3 * first:.1f} ms, the median of the next "
      f"nine {1e3 * statistics.median(later):.1f} ms")

cache, token = fresh_prefill()
steps = [seconds(lambda: nanokv.decode(model, token, cache, start_pos=cache.length))
         for _ in range(60)]
mean, median = statistics.mean(steps), statistics.median(steps)
kept = sorted(steps)[:-1]
print(f"60 decode steps: fastest {1e3 * min(steps):.2f}, median {1e3 * median:.2f}, "
      f"mean {1e3 * mean:.2f}, slowest {1e3 * max(steps):.2f} ms")
print("without the slowest one the mean moves by "
      f"{100 * (1 - statistics.mean(kept) / mean):.1f} %, the median by "
      f"{100 * (1 - statistics.median(kept) / median):.1f} %")

# %% tags=["hide-input"]
fig, axis = course.subplots(width=8, height=2.8)
axis.plot([1e3 * value for value in steps], "o", markersize=3.5, color=course.COLORS[0],
          label="a step")
axis.axhline(1e3 * median, color=course.COLORS[2], label="median")
axis.axhline(1e3 * mean, color=course.COLORS[1], linestyle="--", label="mean")
axis.set(title="sixty times the same work", xlabel="step", ylabel="ms")
axis.set_ylim(bottom=0)
axis.legend(ncols=3, fontsize=9, loc="upper right")
course.show(fig, alt=f"Sixty dots, a decode step each, from {1e3 * min(steps):.1f} to "
            f"{1e3 * max(steps):.1f} ms; lines at the median {1e3 * median:.1f} and "
            f"the mean {1e3 * mean:.1f} ms. Disturbed steps lie above the rest.")

# %% [markdown]
# Other programs can only make a step slower, never faster. So a single time is not reliable, a mean includes all
# disturbances, and a median is affected by them much less. If the machine is busy all the time, even the median is too
# high. Then only comparisons are valid, and only if both candidates ran in the same minutes. From here on we use a
# **warm-up** that does not count, **medians**, and **rotation**: the candidates take turns. `nanokv.lab.bench.rotation`
# does this; the command is `nanokv bench`.

# %% [markdown]
# ## Experiment 2: with and without, at growing length
#
# We compare two candidates: the model with a cache, and the same model that feeds the whole text at every step. Both
# get prompts of several lengths, in rotation.

# %%
# without a cache a large model takes seconds for each of these steps
longest = course.sized(1024, 256)
contexts = sorted(n for n in {32, longest // 8, longest // 2, longest}
                  if n + 64 <= c.max_position_embeddings)
with_cache = Ours(model, "fp32", "static", {}, 1, torch.float32)
without = Uncached(model, "fp32", 1, torch.float32)
rotation = Rotation([with_cache, without], contexts, c.vocab_size, repeat=3, steps=3)
for _ in rotation.run():
    pass  # one measurement each time around
rows = {(row.runner.cache, row.context): row for row in rotation.finished()}
for n in contexts:
    lean, full = rows["static", n], rows["none", n]
    print(f"{n:>5} tokens: prefill {1e3 * lean.prefill_s:>7.1f} ms, then "
          f"{1e3 * lean.decode_s:>6.2f} ms per step with a cache, "
          f"{1e3 * full.decode_s:>7.1f} ms without: "
          f"{full.decode_s / lean.decode_s:.1f} times")
chosen = min(contexts, key=lambda n: abs(n - 512))
ratio = rows["none", chosen].decode_s / rows["static", chosen].decode_s
few = rows["none", contexts[0]].decode_s / rows["static", contexts[0]].decode_s
course.reveal("09.a", ratio)

# %% tags=["hide-input"]
course.figure("09.ratio", ratio)
course.figure("09.few", few)
fig, (left, right) = course.subplots(1, 2, width=9.5, height=3.4)
step_ms = {kind: [1e3 * rows[kind, n].decode_s for n in contexts]
           for kind in ("none", "static")}
left.plot(contexts, step_ms["none"], "o-", color=course.COLORS[1],
          label="without a cache")
left.plot(contexts, step_ms["static"], "o-", color=course.COLORS[0],
          label="with a cache")
left.set(xscale="log", yscale="log", title="one more token", xlabel="tokens before it",
         ylabel="ms (log)")
rates = {"prefill": [n / rows["static", n].prefill_s for n in contexts],
         "decode": [1 / rows["static", n].decode_s for n in contexts]}
for (label, values), color in zip(rates.items(), (course.COLORS[2], course.COLORS[0])):
    right.plot(contexts, values, "o-", color=color, label=label)
right.set(xscale="log", yscale="log", title="tokens per second, with a cache",
          xlabel="prompt", ylabel="(log)")
for axis in (left, right):
    axis.set_xticks(contexts, [f"{n:,}" for n in contexts])
    axis.minorticks_off()
    axis.legend(fontsize=9)
prefill_rate, decode_rate = (rates[phase][contexts.index(chosen)]
                             for phase in ("prefill", "decode"))
course.figure("09.phases", prefill_rate / decode_rate)
course.show(fig, alt="Left, on log axes: without a cache a step takes "
            f"{step_ms['none'][0]:.0f} ms at {contexts[0]} tokens and "
            f"{step_ms['none'][-1]:.0f} at {contexts[-1]:,}; with a cache "
            f"{step_ms['static'][0]:.1f} and {step_ms['static'][-1]:.1f}. Right: "
            f"prefill handles {prefill_rate:,.0f} tokens per second at {chosen} "
            f"tokens, decode {decode_rate:,.0f}.")

# %% [markdown]
# After `512` tokens, a step with a cache is more than <!--fig 09.ratio above-->4<!--/fig--> times as fast. Your own
# number is printed above. It depends on the machine, and it is far from `512`. The left end of the curve explains why.
# There the full forward has `32` rows, but it takes less than <!--fig 09.few below-->8<!--/fig--> times as long as one
# row. A part of the time of a step does not depend on the number of rows.
#
# The right picture shows why a single number for "speed" is not enough. In the prefill the same model processes more
# than <!--fig 09.phases above-->5<!--/fig--> times as many tokens per second as in the decode. A user notices both: the
# prefill determines the time to the first token, the decode the pace after it.

# %% [markdown]
# ## Experiment 3: the wrong profiler
#
# An article offers a profiler for the two phases. It has only one function, `write(prompt, n)`, which returns the
# prompt and `n` new tokens. It calls `write(prompt, 1)` and takes that time as the time of the prefill. Then it calls
# `write` with the result, for the other `n − 1` tokens. It divides `n − 1` by that time and calls the result the decode
# rate. Is that right?
#
# Suppose the prefill takes `1` s and a step `20` ms, so the true rate is `50` tokens per second, and `n = 50`. Which
# rate does the profiler report?

# %% tags=["exercise"]
reported = ...  # tokens per second

# %% tags=["solution"]
reported = 50

# %%
course.predict("09.b", reported, unit="tokens per second")


# %%
def write(ids, n):
    """The prompt and n more tokens, as other libraries' generate returns them; a
    cache of its own in every call."""
    new = list(nanokv.generate(model, ids, max_new_tokens=n, eos_token_ids=[]))
    return torch.cat((ids, torch.tensor([new])), dim=1)


def two_calls(prompt, n):
    """The article's idea → (seconds of prefill, tokens per second)."""
    began = time.perf_counter()
    text = write(prompt, 1)
    between = time.perf_counter()
    write(text, n - 1)
    return between - began, (n - 1) / (time.perf_counter() - between)


def stamps(prompt, n):
    """A time stamp at every token as it comes out → (seconds to the first, tokens
    per second after it)."""
    began = time.perf_counter()
    at = [time.perf_counter() - began
          for _ in nanokv.generate(model, prompt, max_new_tokens=n, eos_token_ids=[])]
    return at[0], 1 / statistics.median(b - a for a, b in zip(at, at[1:]))


n = 12
prompt = torch.randint(c.vocab_size, (1, contexts[-1]))
found = {two_calls: [], stamps: []}
for turn in range(5):
    for measure in found:
        result = measure(prompt, n)
        if turn:  # the first turn warms up
            found[measure].append(result)
(prefill, claimed), (ttft, rate) = ([statistics.median(column) for column in zip(*runs)]
                                    for runs in found.values())
explained = profiled_rate(ttft, 1 / rate, tokens=n)
print(f"prompt of {prompt.shape[1]:,} tokens, {n} new ones")
print(f"two calls:  prefill {1e3 * prefill:.0f} ms, {claimed:.1f} tokens per second")
print(f"stamps:     first token {1e3 * ttft:.0f} ms, {rate:.1f} tokens per second: "
      f"{rate / claimed:.1f} times as many")
print(f"if the second call prefills again, the profiler has to say {explained:.1f}")
course.reveal("09.b", profiled_rate(1.0, 0.020))

# %% tags=["hide-input"]
course.figure("09.under", rate / claimed)
course.figure("09.reported", profiled_rate(1.0, 0.020))
fig, axis = course.subplots(width=8, height=2.6)
names = ["stamps: the truth", "two calls: reported", "two calls: explained"]
bars = axis.barh(names, [rate, claimed, explained],
                 color=[course.COLORS[0], course.COLORS[1], course.COLORS[4]])
axis.bar_label(bars, fmt="{:.0f}", padding=3)
axis.set(title=f"decode rate behind a prompt of {prompt.shape[1]:,} tokens",
         xlabel="tokens per second")
axis.invert_yaxis()
axis.grid(axis="y", visible=False)
course.show(fig, alt=f"Three bars, tokens per second: {rate:.0f} by time stamps, "
            f"{claimed:.0f} as reported by two calls, {explained:.0f} computed for a "
            "second call that prefills again.")

# %% [markdown]
# The true rate is more than <!--fig 09.under above-->1.5<!--/fig--> times the reported rate. The second call has no
# cache from the first. So it begins with a prefill of the whole prompt and the new token, and the profiler counts that
# prefill as decoding. The third bar tests this explanation: with the true times, the formula gives the reported rate,
# except for noise. In the article's own setting, `50` true tokens per second
# become <!--fig 09.reported-->25<!--/fig-->. The longer the prompt, the larger the error.
#
# The profiler has more faults. It has no warm-up and no median. It does not wait for a GPU, which may still be
# computing after the call has returned. And if the model ends its answer early, the profiler counts tokens that were
# not written.

# %% [markdown]
# ## Experiment 4: where a step spends its time
#
# A decode step has to read every weight once. Divide these bytes by the measured [memory
# bandwidth](glossary.md#memory-bandwidth) of the machine. The result is the floor, the least time that a step can take.
# `nanokv.lab.bench.profile` splits a step into parts. We compare the loaded model with a large one: the width of
# Qwen3-0.6B, two of its layers, random weights. Each model also has an optimized twin, in which a step is a few calls
# into compiled code.

# %%
torch.manual_seed(0)
wide = replace(FAMILY["Qwen/Qwen3-0.6B"], num_hidden_layers=2, vocab_size=1024)
state = {name: torch.empty(p.shape).normal_(0, 0.02) if p.dim() > 1
         else torch.ones(p.shape)
         for name, p in skeleton(wide).named_parameters()}
large = build(wide, state)
print(f"weights: {costs.weight_bytes(c, 4) / 1e6:.0f} MB and "
      f"{costs.weight_bytes(wide, 4) / 1e6:.0f} MB")
candidates = {"loaded, plain": model, "large, plain": large,
              "loaded, optimized": optimize(model), "large, optimized": optimize(large)}
profiles, floors = {}, {}
for _ in range(3):  # in rotation; of step and floor the least disturbed of three
    for name, candidate in candidates.items():
        size = costs.weight_bytes(candidate.config, 4)
        _, step = phases(candidate, "static", {}, 16, size, torch.float32)
        profiles[name] = min(step, profiles.get(name, step),
                             key=lambda phase: phase.seconds)
        floors[name] = min(step.floor, floors.get(name, step.floor))
share_of = {name: floors[name] / step.seconds for name, step in profiles.items()}
for name, step in profiles.items():
    print(f"{name:<18} {1e3 * step.seconds:>7.2f} ms per step, floor "
          f"{1e3 * floors[name]:>6.2f} ms = {100 * share_of[name]:>3.0f} %")
ms = {name: {part.name: 1e3 * part.seconds for part in step.parts if part.seconds}
      for name, step in profiles.items()}
beside = {name: 1 - parts["weights"] / sum(parts.values())
          for name, parts in ms.items()}

# %% tags=["hide-input"]
course.figure("09.nearer", share_of["large, plain"] / share_of["loaded, plain"])
course.figure("09.beside", beside["loaded, plain"] / beside["large, plain"])
kinds = {"weights": 0, "attention": 2, "cache update": 4, "norms, rotation, gates": 3,
         "the rest": 1}
fig, axes = course.subplots(1, 2, width=9.5, height=2.5)
for axis, which in zip(axes, ("loaded", "large")):
    rows_of = [f"{which}, plain", f"{which}, optimized"]
    for place, name in enumerate(rows_of):
        left = 0.0
        for part, width in ms[name].items():
            axis.barh(place, width, left=left, color=course.COLORS[kinds[part]])
            left += width
        axis.plot(1e3 * floors[name], place, "|", color="black", markersize=26,
                  markeredgewidth=1.5)
    axis.set_yticks(range(2), ["plain", "optimized"])
    axis.set(title=f"a decode step of the {which} model", xlabel="ms")
    axis.invert_yaxis()
    axis.grid(visible=False)
drawn = [kind for kind in kinds if any(kind in parts for parts in ms.values())]
handles = [Patch(color=course.COLORS[kinds[kind]], label=kind) for kind in drawn]
handles.append(Line2D([], [], color="black", marker="|", linestyle="", markersize=12,
                      label="floor"))
fig.legend(handles=handles, ncols=len(handles), fontsize=9, loc="outside lower center")
course.show(fig, alt="Two pictures with two bars each, split into the parts of a "
            "decode step. " + " ".join(
    f"{name}: " + ", ".join(f"{part} {value:.2f} ms" for part, value in parts.items())
    + f"; floor {1e3 * floors[name]:.2f} ms." for name, parts in ms.items()))

# %% [markdown]
# The plain step of the large model is more than <!--fig 09.nearer above-->1.3<!--/fig--> times as near to its floor as
# the plain step of the loaded model. The large model spends most of the step reading its weights. The loaded model also
# waits for Python and torch, which have to start some hundred small operations. This cost is in two of the parts: in
# "the rest", and in "weights", which is the time of the products *including* the start of each one.
#
# The time outside the products is a larger part of the plain step of the loaded model: more
# than <!--fig 09.beside above-->1.2<!--/fig--> times the part that it is in the large model. This time does not depend
# on the number of rows. That is why a tiny model gains less from a cache than the count of rows suggests: the cache
# reduces the number of rows, but most of the time does not depend on it.
#
# Where a C++ compiler is installed, the optimized twin also removes these calls, and the same step is several times as
# fast. The large model gains less from it, because its weights still have to be read. (Compare milliseconds here, not
# percentages. The optimized step is much shorter, so a part can take fewer milliseconds than before and still be a
# larger percentage.)
#
# (The floor depends on which bandwidth is used. A model of a few megabytes fits into the caches of the processor, from
# which it can be read faster than from memory. So we measure the bandwidth with a buffer as large as the bytes that a
# step reads, and take the best of several readings.)

# %% [markdown]
# ## Experiment 5: several rows at a time
#
# If a step spends its time on reading weights, several rows can share one reading. The large model, optimized, decodes
# one, two, four and eight rows at a time, in rotation.

# %%
batches = (1, 2, 4, 8)
runners = [Ours(candidates["large, optimized"], "fp32", "static", {}, batch,
                torch.float32) for batch in batches]
rotation = Rotation(runners, [16], wide.vocab_size, repeat=5, steps=4)
for _ in rotation.run():
    pass
batch_s = {row.runner.batch: row.decode_s for row in rotation.finished()}
for batch, value in batch_s.items():
    print(f"rows: {batch}  {1e3 * value:>6.1f} ms per step, {batch / value:>6.1f} "
          "tokens per second together")

# %% tags=["hide-input"]
course.figure("09.eight", batch_s[8] / batch_s[1])
fig, (left, right) = course.subplots(1, 2, width=9, height=2.7)
place = range(len(batches))
left.bar(place, [1e3 * batch_s[batch] for batch in batches], color=course.COLORS[0])
left.set(title="a step", xlabel="rows", ylabel="ms")
right.bar(place, [batch / batch_s[batch] for batch in batches], color=course.COLORS[2],
          label="measured")
right.plot(place, [batch / batch_s[1] for batch in batches], "_", color="black",
           markersize=24, label="free rows")
right.set(title="all rows together", xlabel="rows", ylabel="tokens per second")
right.legend(fontsize=9)
for axis in (left, right):
    axis.set_xticks(place, batches)
    axis.grid(axis="x", visible=False)
course.show(fig, alt="Left: a step takes "
            + ", ".join(f"{1e3 * batch_s[b]:.0f} ms for {b}" for b in batches)
            + " rows. Right: together "
            + ", ".join(f"{b / batch_s[b]:.0f}" for b in batches)
            + " tokens per second, less and less of what free rows would give.")

# %% [markdown]
# Eight rows take less than <!--fig 09.eight below-->6<!--/fig--> times as long as one row, not eight times. So eight
# rows together get more tokens per second than one row alone. This is why servers batch. The gain has a limit, which
# the next experiment computes. Memory is another limit, because each row has its own cache, as notebook 08 showed.

# %% [markdown]
# ## Experiment 6: bytes and FLOPs, on paper
#
# How many FLOPs does a forward compute per byte that it reads? Compare that with the balance of the machine: the FLOPs
# that it can compute in the time in which it reads one byte. A forward with more FLOPs per byte than the balance is
# bound by arithmetic; a forward with fewer is bound by memory. `nanokv.costs` counts FLOPs and bytes, and we measure
# the balance of this machine.

# %%
qwen = FAMILY["Qwen/Qwen3-0.6B"]
bandwidth = Bandwidth()
for _ in range(5):
    bandwidth.probe()
here = gemm_peak(torch.float32) / bandwidth.best()  # FLOPs per byte
h100 = 989e12 / 3.35e12  # from its data sheet: bf16, dense
fed = [2**i for i in range(12)]
read = [costs.weight_bytes(qwen, 2) + costs.kv_bytes(qwen, T, 1, 2) for T in fed]
intensity = [costs.prefill_flops(qwen, T) / size for T, size in zip(fed, read)]

# FLOPs of attention for one visible token
a_key = costs.decode_flops(qwen, 1) - costs.decode_flops(qwen, 0)
equal_flops = costs.decode_flops(qwen, 0) / a_key
equal_bytes = costs.weight_bytes(qwen, 2) / costs.kv_bytes_per_token(qwen, 2)
print(f"one row: {intensity[0]:.2f} FLOPs per byte; {fed[-1]:,} rows: "
      f"{intensity[-1]:,.0f}; balance here: {here:.0f}")
print(f"attention = weights in FLOPs at {equal_flops:,.0f} tokens, in bytes at "
      f"{equal_bytes:,.0f}")

# %% tags=["hide-input"]
course.figure("09.flops", equal_flops)
course.figure("09.bytes", equal_bytes)
course.figure("09.one", intensity[0])
fig, (left, right) = course.subplots(1, 2, width=9.5, height=3.4)
left.plot(fed, intensity, "o-", markersize=3, color=course.COLORS[0])
for level, color in ((here, course.COLORS[2]), (h100, course.COLORS[1])):
    left.axhline(level, color=color, linestyle="--")
left.text(fed[-1], here / 1.25, "this machine, fp32", color=course.COLORS[2],
          fontsize=9, ha="right", va="top")
left.text(1, h100 * 1.25, "an H100, bf16", color=course.COLORS[1], fontsize=9)
left.set(xscale="log", yscale="log", title="FLOPs per byte, Qwen3-0.6B",
         xlabel="rows in one forward", ylabel="(log)")
texts = [2**i for i in range(8, 18)]
for label, weights, each, color in (
    ("of the FLOPs", costs.decode_flops(qwen, 0), a_key, course.COLORS[1]),
    ("of the bytes", costs.weight_bytes(qwen, 2), costs.kv_bytes_per_token(qwen, 2),
     course.COLORS[0]),
):
    right.plot(texts, [100 * each * S / (weights + each * S) for S in texts],
               color=color, label=label)
    right.plot([weights / each], [50], "o", color=color)
right.axhline(50, color="gray", linestyle=":", linewidth=1)
right.set(xscale="log", ylim=(0, 100), title="the cache's part of a decode step",
          xlabel="tokens", ylabel="percent")
right.legend(fontsize=9)
course.show(fig, alt=f"Left: {intensity[0]:.1f} FLOPs per byte for one row, rising in "
            f"proportion to the rows up to {intensity[-1]:,.0f}; dashed lines mark the "
            f"balance of this machine, about {here:.0f}, and of an H100, {h100:.0f}. "
            "Right: the cache's part of a step is half of the FLOPs at "
            f"{equal_flops:,.0f} tokens and half of the bytes at {equal_bytes:,.0f}.")

# %% [markdown]
# One row computes <!--fig 09.one-->1.0<!--/fig--> FLOP per byte. That is below the balance of every machine, so
# decoding is bound by memory. A prompt of several hundred rows is above it, so the prefill is bound by arithmetic.
# Prefill and decode therefore need different optimizations.
#
# How large is the share of the cache in a step? It reaches half of the FLOPs at <!--fig 09.flops-->5,197<!--/fig-->
# tokens and half of the bytes at <!--fig 09.bytes-->10,394<!--/fig-->. For shorter texts, "decoding is slow because of
# the cache" is wrong.

# %% [markdown]
# ## What the articles say
#
# Three claims about time are wrong or misleading; [the page of all claims](claims.md) has the others. For the last one
# we count the scores of a whole generation, and of one of twice the length.

# %%
double = [count(1, 4000) / count(1, 2000)
          for count in (scores_without_cache, scores_with_cache)]
print(f"twice the length: {double[0]:.2f} times the scores without a cache, "
      f"{double[1]:.2f} times with one")
growth = [rows["static", n].decode_s / rows["static", contexts[0]].decode_s
          for n in contexts]

course.claim("1.7", "wrong", found=profiled_rate(1.0, 0.020))
course.claim("2.1", "misleading", found=1 / (1 - 0.38))
course.claim("3.14", "misleading", found=double[0])

# %% tags=["hide-input"]
course.figure("09.cubic", double[0])
course.figure("09.quadratic", double[1])
course.confirm("1.5", "right", found=f"at {chosen} tokens {prefill_rate:,.0f} tokens "
               f"per second in the prefill, "
             f"{decode_rate:,.0f} in the decode")
first_grows = (rows["static", contexts[-1]].prefill_s
               / rows["static", contexts[0]].prefill_s)
course.confirm("1.23", "right", found=f"from {contexts[0]} to {contexts[-1]:,} tokens, "
               f"the first token takes {first_grows:.0f} times as long, each later one "
               f"{growth[-1]:.1f} times")
course.confirm("2.14", "right", found=f"{c.num_attention_heads} heads × "
               f"{contexts[-1]:,} scores in a layer for one step")

# %% [markdown]
# A whole generation of twice the length computes <!--fig 09.quadratic-->4.0<!--/fig--> times the scores with a cache,
# and <!--fig 09.cubic-->8.0<!--/fig--> times without: quadratic and cubic. Only a single step with a cache is linear.

# %% [markdown]
# ## Exercises
#
# **09.1** The profiler of the article again, with the numbers below: its second call begins with a prefill and returns
# `n − 1` tokens. Which decode rate does it report, and what is the true rate? Answer with a pair, in tokens per second.

# %%
case = course.case("09.1")
print(f"prefill {case.prefill} s, a step {case.step} s, n = {case.n}")

# %% tags=["exercise"]
reported_and_true = ...  # (…, …)

# %% tags=["solution"]
reported = (case.n - 1) / (case.prefill + (case.n - 2) * case.step)
reported_and_true = reported, 1 / case.step

# %%
course.check("09.1", reported_and_true)

# %% [markdown]
# **09.2** Write a correct profiler. `start()` begins a new generation and returns an iterator over its tokens: the
# first `next` runs the prefill, each later one a decode step. `clock()` is the time in seconds. Return two numbers: the
# time to the first token, and the typical time between the tokens after it (`None` if there is only one token). The
# first generation is slower than all others and must not count. Now and then another program slows a step down. (The
# check passes its own simulated clock, so the result does not depend on how busy this machine is.)


# %% tags=["exercise"]
def profile(start, clock):
    return ...


# %% tags=["solution"]
def profile(start, clock):
    for _ in start():
        pass  # the warm-up
    began = clock()
    at = [clock() - began for _ in start()]
    gaps = [b - a for a, b in zip(at, at[1:])]
    return at[0], statistics.median(gaps) if gaps else None


# %%
course.check("09.2", profile)

# %% [markdown]
# **09.3** At which length of the text does attention in a decode step compute as many FLOPs as all weights together?
# Answer for the model below, to a percent. A multiplication with a weight is two FLOPs per weight. The
# embedding is looked up and not multiplied; the output head is a matrix of `V · C`. Attention is two FLOPs per number
# of a visible key and two per number of a visible value, in every query head.

# %%
case = course.case("09.3")
config = FAMILY[case.name]
print(case.name, config)

# %% tags=["exercise"]
length = ...

# %% tags=["solution"]
C, D, H, Hk, L = (config.hidden_size, config.head_dim, config.num_attention_heads,
                  config.num_key_value_heads,
                  config.num_hidden_layers)
in_a_layer = 2 * C * H * D + 2 * C * Hk * D + 3 * C * config.intermediate_size
length = 2 * (L * in_a_layer + config.vocab_size * C) / (4 * L * H * D)

# %%
course.check("09.3", length)

# %% [markdown]
# **09.4** The maximum rate. A server decodes `batch` sequences at a time, with `context` tokens in each cache.
# `weights` are the bytes of all weights, `per_token` those of one token of cache, `bandwidth` the bytes per second. At
# most how many tokens per second can it write, for all sequences together? The check tries it on 50 random servers.


# %% tags=["exercise"]
def speed_limit(weights, per_token, context, batch, bandwidth):
    return ...


# %% tags=["solution"]
def speed_limit(weights, per_token, context, batch, bandwidth):
    return batch * bandwidth / (weights + batch * context * per_token)


# %%
course.check("09.4", speed_limit)

# %% [markdown]
# **09.5** The gain of a tiny model. A forward takes `a` ms for any number of rows, and `b` ms more per row. The text
# has `S` tokens, including the new one. How many times as fast is a step with a cache?

# %%
case = course.case("09.5")
print(f"a = {case.a} ms, b = {case.b} ms per row, S = {case.S}")

# %% tags=["exercise"]
times_as_fast = ...

# %% tags=["solution"]
times_as_fast = (case.a + case.b * case.S) / (case.a + case.b)

# %%
course.check("09.5", times_as_fast)

# %% [markdown]
# ## Quiz

# %%
course.quiz("09")
busy = others.cores()
print("While this notebook ran, other programs kept", "?" if busy is None
      else f"{busy:.1f}", "cores busy.")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "c", "a", "b"

# %%
course.answer("09.q1", q1)
course.answer("09.q2", q2)
course.answer("09.q3", q3)

# %% [markdown]
# ## Further reading
#
# - `nanokv bench --help` and `nanokv profile --help`: these experiments as commands, beside transformers and llama.cpp
#   if they are installed.
# - Williams, Waterman and Patterson, [Roofline](https://doi.org/10.1145/1498765.1498785): FLOPs per byte, and what they
#   say about the limit of a program.
# - Pope and others, [Efficiently scaling transformer inference](https://arxiv.org/abs/2211.05102): the same arithmetic
#   for large models on many chips.
# - Hoefler and Belli, [Scientific benchmarking of parallel computing systems](https://doi.org/10.1145/2807591.2807644):
#   twelve rules for measurements that others can rely on.
#
# ## Next
#
# The dict cache copies everything it holds each time it grows. In notebook [10](10_cat_preallocate_page.ipynb) you
# count these copies, and lay out the memory so that there are none.

# %% tags=["skip"]
course.progress()
