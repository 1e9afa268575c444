# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · An engine of your own
#
# The engine of notebook 12 answers one chat. A server has many requests at once. They arrive at any time, their prompts
# and answers have any length, and their caches share one memory. Which of them does the next forward compute? The
# scheduler of the server decides this, and in this notebook you write one. It decides which requests start, how many
# tokens each gets per step, and which request gives its memory back. At the end your engine answers several people at
# once over HTTP, token by token, and you compare its speed with nanokv's.
#
# ## What you will be able to do
#
# - say why [continuous batching](glossary.md#continuous-batching) needs fewer steps than a fixed batch, and how many
#   fewer;
# - cut long prompts into chunks, so that other requests do not have to wait for the whole prompt ([chunked
#   prefill](glossary.md#chunked-prefill));
# - write admission and [preemption](glossary.md#preemption) so that no request waits forever;
# - stream several answers from one engine;
# - test an engine: the same tokens as each request alone;
# - write a sum that is the same to the bit, however many rows are computed beside it.
#
# Letters: `B` rows of the batch, `T` tokens that are fed at once, `V` entries of the vocabulary
# ([all letters](glossary.md#letters)).

# %%
import inspect
import time
from statistics import median
from threading import Thread
from urllib.parse import quote
from urllib.request import urlopen

import torch

import nanokv
from nanokv import course
from nanokv.cache.paged import PagedCache
from nanokv.cache.paged_batch import PagedBatch
from nanokv.cache.pool import PagePool
from nanokv.errors import CapacityError, ConfigError
from nanokv.school.course.own_engine import Engine, Request
from nanokv.school.course.own_server import Server

model, tokenizer = course.start("15")
c = model.config


def ids_of(question):
    """Ids of a chat with one question."""
    said = [{"role": "user", "content": question}]
    return tokenizer.encode(tokenizer.render(said))


questions = [
    "Tell me a story.", "What is 12 + 30?", "My name is Zorbla.", "What is prefill?",
    "Count from 3 to 14.", "I have a cat called Miso.", "What is a KV cache?",
    "Reverse the list: apple, pear, plum.",
]
prompts = [ids_of(question) for question in questions]
longest = course.sized(64, 12)
alone = [list(nanokv.generate(model, p, max_new_tokens=longest)) for p in prompts]
sizes = [f"{len(prompt)}+{len(answer)}" for prompt, answer in zip(prompts, alone)]
print("prompt + answer:", "  ".join(sizes))

# %% [markdown]
# ## Predict
#
# There are eight requests, and four places in the batch. A *fixed* batch takes the first four, answers them all, and
# then takes the next four. A *continuous* batch gives a place to the next request as soon as an answer ends. How many
# times as many steps does the fixed batch need?

# %% tags=["exercise"]
more_steps = ...

# %% tags=["solution"]
more_steps = 2  # a common first guess: half of the places are empty

# %%
course.predict("15.a", more_steps, unit="times as many steps")

# %% [markdown]
# Second: three people are reading their answers, one token per step, when a fourth person sends a prompt of 600 tokens.
# The prompt is fed in one piece. How many times as long as usual do the three wait for their next token?

# %% tags=["exercise"]
pause = ...

# %% tags=["solution"]
pause = 200  # a common first guess: it has 200 times as many tokens as the three

# %%
course.predict("15.b", pause, unit="times as long")

# %% [markdown]
# Third: your engine runs eight requests at once. How many times as many tokens per second does it write as when the
# requests run one after the other?

# %% tags=["exercise"]
faster = ...

# %% tags=["solution"]
faster = 8  # a common first guess: eight at once

# %%
course.predict("15.c", faster, unit="times as many tokens per second")

# %% [markdown]
# Fourth: a kernel for 8 cores adds up the numbers of one row, four times: alone, and as one of `2`, `4` and `8` rows.
# The numbers of the row do not change. How many different sums are there?

# %% tags=["exercise"]
different = ...

# %% tags=["solution"]
different = 1  # a common first guess: the numbers are the same

# %%
course.predict("15.d", different, unit="different sums")

# %% [markdown]
# ## Experiment 1: fixed and continuous batches
#
# The lengths of the answers are the ones printed above. We only count steps: in each step, every request that has a
# place gets one token.


# %%
def fixed(lengths, places):
    """Groups of `places`, one after the other → who gets a token, step by step."""
    steps = []
    for first in range(0, len(lengths), places):
        group = range(first, min(first + places, len(lengths)))
        for t in range(max(lengths[b] for b in group)):
            steps.append({b for b in group if t < lengths[b]})
    return steps


def continuous(lengths, places):
    """A place that is free goes to the next."""
    left, queue, running, steps = list(lengths), list(range(len(lengths))), [], []
    while queue or running:
        while queue and len(running) < places:
            running.append(queue.pop(0))
        steps.append(set(running))
        for b in running:
            left[b] -= 1
        running = [b for b in running if left[b]]
    return steps


places, lengths = 4, [len(answer) for answer in alone]
plans = {"fixed": fixed(lengths, places), "continuous": continuous(lengths, places)}
busy = {}
for name, steps in plans.items():
    busy[name] = sum(map(len, steps)) / (places * len(steps))
    print(f"{name:<11} {len(steps)} steps, {busy[name]:.0%} of the places in use")
course.reveal("15.a", len(plans["fixed"]) / len(plans["continuous"]))

# %% tags=["hide-input"]
course.figure("15.fixed", len(plans["fixed"]))
course.figure("15.continuous", len(plans["continuous"]))
course.figure("15.fixedbusy", 100 * busy["fixed"])
course.figure("15.continuousbusy", 100 * busy["continuous"])
fig, axes = course.subplots(1, 2, width=10, height=2.6, sharey=True, sharex=True)
for axis, (name, steps) in zip(axes, plans.items()):
    for b in range(len(lengths)):
        at = [t for t, step in enumerate(steps) if b in step]
        axis.barh(b, len(at), left=at[0], height=0.7, color=course.COLORS[b % places])
    axis.set(title=f"{name}: {len(steps)} steps", xlabel="step")
    axis.set(yticks=range(len(lengths)))
axes[0].set(ylabel="request")
axes[0].invert_yaxis()
course.show(
    fig,
    alt=f"Two charts of {len(lengths)} requests, a bar for each from its first step to "
    "its last. Fixed: the second four begin when the longest of the first four ends, "
    f"{len(plans['fixed'])} steps in all. Continuous: each begins when a place is "
    f"free, {len(plans['continuous'])} steps.",
)

# %% [markdown]
# The fixed batch needs <!--fig 15.fixed-->105<!--/fig--> steps, with <!--fig 15.fixedbusy-->48<!--/fig--> percent of
# the places in use: a place whose answer has ended stays empty until the longest answer of its group ends. The
# continuous batch needs <!--fig 15.continuous-->64<!--/fig--> steps. With more waiting requests, all its places would
# stay in use. Orca (2022) proposed continuous batching; all common LLM servers do it today.

# %% [markdown]
# ## Experiment 2: a long prompt
#
# `nanokv.Engine` runs a continuous batch with paged caches. `step_tokens` is the largest number of tokens that one step
# feeds. Three requests decode. After some steps a fourth request with a long prompt arrives. In the first run a step
# may feed the whole prompt. In the second run a step feeds only 48 tokens, the decodes included. We measure the seconds
# of each step.

# %%
long = torch.randint(c.vocab_size, (course.sized(600, 60),)).tolist()


def steps_of(step_tokens):
    """Seconds of each step from the fifth on; the late request arrives in step 15."""
    engine = nanokv.Engine(model, pages=128, step_tokens=step_tokens)
    for prompt in prompts[:3]:
        engine.submit(prompt, max_new_tokens=60, eos_token_ids=[])
    seconds, late = [], None
    while len(seconds) < 45:
        if len(seconds) == 20:
            late = engine.submit(long, max_new_tokens=4, eos_token_ids=[])
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
        if late and late.tokens:
            break
    return seconds[5:]  # the first ones are prompts


def quiet(step_tokens):
    """Three runs have the same steps: the least seconds of each step."""
    return [min(same) for same in zip(*(steps_of(step_tokens) for _ in range(3)))]


runs = {"in one piece": quiet(1024), "in chunks": quiet(48)}
usual = median(runs["in one piece"][:15])
pauses, took = {}, {}
for name, seconds in runs.items():
    pauses[name], took[name] = max(seconds[15:]) / usual, len(seconds) - 15
    late = [1e3 * s for s in seconds[15:]]  # ms
    print(f"{name:<13} usual step {1e3 * usual:.1f} ms, longest {max(late):.1f} ms")
    print(f"{'':<13} the long prompt: {took[name]} of them, {sum(late):.0f} ms")
course.reveal("15.b", pauses["in one piece"])

# %% tags=["hide-input"]
course.figure("15.pause", pauses["in one piece"])
course.figure("15.gain", pauses["in one piece"] / pauses["in chunks"])
course.figure("15.chunks", took["in chunks"])
fig, axis = course.subplots(width=8, height=2.6)
for (name, seconds), mark in zip(runs.items(), ("o-", "s--")):
    axis.plot([1e3 * s for s in seconds], mark, label=name, markersize=4)
axis.axvline(15, color="#7F7F7F", linewidth=1)
axis.set(xlabel="step", ylabel="ms", ylim=0, title="a long prompt arrives in step 15")
axis.legend()
course.show(
    fig,
    alt=f"Milliseconds of each step. Usual steps take {1e3 * usual:.1f}. In one piece, "
    f"one step takes {pauses['in one piece']:.0f} times as long. In chunks, "
    f"{took['in chunks']} steps take up to {pauses['in chunks']:.0f} times as long.",
)

# %% [markdown]
# With the prompt in one piece, the three readers wait more than <!--fig 15.pause above-->3<!--/fig--> times as long as
# usual: a prefill takes much arithmetic (notebook 09). In chunks the prompt takes <!--fig 15.chunks-->14<!--/fig-->
# steps, and the longest pause is shorter. The budget is a compromise: a small one shortens the pauses of the readers, a
# large one shortens the wait for a first token. It changes no answer, because each chunk attends to all tokens that
# were fed before it.

# %% [markdown]
# ## Experiment 3: do other requests change an answer?
#
# We run the same request once alone, and once in a batch with seven others. It never attends to the keys of the others,
# because each row has its own pages. Can anything else differ?

# %%
pool = PagePool(c, pages=256, page_size=16)
caches = [PagedCache(pool) for _ in prompts]
for cache, prompt in zip(caches, prompts):
    nanokv.prefill(model, [prompt], cache)
newest = torch.tensor([answer[:1] for answer in alone])  # (B,T), T = 1
single = caches[0].fork()
by_itself = nanokv.decode(model, newest[:1], single, single.length)  # (1,V)
batch = PagedBatch(caches, c)
in_company = nanokv.decode(model, newest, batch, batch.length)[:1]  # (1,V)
moved = float((in_company - by_itself).abs().max())
largest = float(by_itself.abs().max())
print(f"the logits, up to {largest:.0f}, differ by up to {moved:.0e}")
print("the same bits:", torch.equal(in_company, by_itself))
print("the same next token:", int(in_company.argmax()) == int(by_itself.argmax()))

# %% tags=["hide-input"]
course.figure("15.moved", moved + 1e-12)

# %% [markdown]
# The logits differ by less than <!--fig 15.moved below-->0.0001<!--/fig-->, and perhaps not at all. The products of one
# row and of eight may be computed by different kernels, which add in different orders. If no number depends on the
# other requests, to the bit, an engine is [batch invariant](glossary.md#batch-invariance); it needs special kernels for
# that. In a greedy answer, rounding matters only where the two best tokens are almost equally likely. So the test of an
# engine is: each request in a batch must get the same tokens as alone.
#
# Almost equal tokens are not rare enough for that. The next cell answers <!--def-->120<!--/def--> questions twice at
# temperature 0, with the faster kernels in bf16: each alone, and all in one engine.

# %%
names = ["Zorbla", "Anna", "Miso", "Tarik", "Lena", "Bo", "Quill", "Ines"]
things = ["a cat", "a red car", "two dogs", "a blue boat", "an old piano"]
ends = ["What is my name?", "What do I have?", "Tell me a story about it."]
asked = [ids_of(f"My name is {name}. I have {thing}. {end}")
         for name in names for thing in things for end in ends]
asked = asked[:course.sized(120, 6)]


def changed(fast):
    """How many greedy answers are not the same alone and together."""
    engine = nanokv.Engine(fast, pages=1024)
    requests = [engine.submit(ids, 48, temperature=0.0) for ids in asked]
    engine.run()
    single = [list(nanokv.generate(fast, ids, max_new_tokens=48, temperature=0.0))
              for ids in asked]
    return sum(request.tokens != answer for request, answer in zip(requests, single))


fast = nanokv.optimize(nanokv.load("tiny", dtype=torch.bfloat16)[0])
usual = changed(fast)
print(f"{usual} of {len(asked)} answers have other words in company")
try:
    one_order = changed(nanokv.batch_invariant(fast))
    print(f"{one_order} of {len(asked)}, if each row has one order of sums")
except ConfigError as error:
    print(error)  # there is no C++ compiler

# %% [markdown]
# Temperature 0 takes the largest logit, and which logit is largest is what the company changed. From there on the text
# is another one. So the load of a server decides what it answers, and the same request gives another answer at another
# time. `nanokv.batch_invariant` and `--batch-invariant` give each row one order of sums, whatever is computed beside it
# and in whatever chunks: then no answer changes. That costs time, most of it in long prompts: `docs/batch-invariance.md` has
# the figures.

# %% [markdown]
# ## What the articles say
#
# The five articles answer one request at a time, so none of their [claims](claims.md) is executed here. One of their
# sentences is worth a second look: the size of the cache limits the number of users of a server. In this notebook,
# `admit` is the function that applies this limit.

# %% [markdown]
# ## Exercises
#
# The model, the pages and one forward are given. This is the class of a request:

# %%
print(inspect.getsource(Request))

# %% [markdown]
# An `engine` has these attributes and methods. `waiting` and `running` are lists of requests in order of arrival.
# `budget`: tokens per step. `most`: the number of requests that may run at once. `size`: tokens per page. `free`: pages
# that no request holds. `promised`: pages that the running requests will still take. `stop`: the end tokens. `start()`
# moves the first waiting request to `running`, with an empty cache. `finish(request)` removes a request that is
# answered. `feed(work)` is the forward. You write the rest.
#
# **15.1** Which waiting requests start? `known` has the number of known tokens (prompt and answer so far) of each
# waiting request, in order of arrival. A request starts only if enough pages for its known tokens are free, in addition
# to the pages that are `promised` to others. Requests start in order of arrival: if one does not fit, all later ones
# wait too. A request that starts is promised its pages and one more, because it is going to grow; this extra page need
# not be free yet. At most `room` requests may start. Return how many do.


# %% tags=["exercise"]
def admit(known, promised, free, size, room):
    return ...


# %% tags=["solution"]
def admit(known, promised, free, size, room):
    moved = 0
    for tokens in known[:room]:
        pages = -(-tokens // size)  # rounded up
        if promised + pages > free:
            break
        promised += pages + 1
        moved += 1
    return moved


# %%
course.check("15.1", admit)

# %% [markdown]
# **15.2** How many tokens does each request get? `pending` has the number of pending tokens of each running request,
# the oldest first. A request with one pending token is in the middle of its answer; these requests are served first.
# The rest of the `budget` goes to the others, the oldest first. Each gets all its pending tokens, or as many as the
# budget still allows. Return a list with the tokens of each request, in the order of `pending`, with 0 for a request
# that gets none.


# %% tags=["exercise"]
def share(pending, budget):
    return ...


# %% tags=["solution"]
def share(pending, budget):
    given = [0] * len(pending)
    for decodes in (True, False):
        for i, tokens in enumerate(pending):
            if (tokens == 1) == decodes:
                given[i] = min(tokens, budget)
                budget -= given[i]
    return given


# %%
course.check("15.2", share)

# %% [markdown]
# **15.3** More requests have started than the memory can hold at their full length. So the pages can run out, and one
# request has to be preempted. Write the function that does it. Free its pages (`request.cache.free()`) and set its
# `cache` to `None`. Move it from `engine.running` to `engine.waiting`, to its place in order of arrival: every running
# request arrived before all waiting ones. Its answer so far is kept. When it runs again, prompt and answer are both fed
# once more. Return nothing.


# %% tags=["exercise"]
def preempt(engine, request):
    return ...


# %% tags=["solution"]
def preempt(engine, request):
    request.cache.free()
    request.cache = None
    engine.running.remove(request)
    engine.waiting.insert(0, request)  # it came before all that wait


# %%
course.check("15.3", preempt)

# %% [markdown]
# From here on your functions call each other. `course.mine` uses your function if it has passed its check, and nanokv's
# otherwise.

# %%
preempt = course.mine("preempt")

# %% [markdown]
# **15.4** Get pages for the next `tokens` of a request. `request.cache.reserve(start, end)` takes the pages for the
# positions from `start` to `end − 1`; if there are too few, it raises `CapacityError` and takes none. In that case
# preempt the youngest running request and try again. The youngest may be this request itself. Return `True` if the
# request has its pages, and `False` if it was preempted.


# %% tags=["exercise"]
def reserve(engine, request, tokens):
    return ...


# %% tags=["solution"]
def reserve(engine, request, tokens):
    while request in engine.running:
        try:
            request.cache.reserve(request.fed, request.fed + tokens)
            return True
        except CapacityError:
            preempt(engine, engine.running[-1])
    return False


# %%
course.check("15.4", reserve)

# %%
admit, share = course.mine("admit"), course.mine("share")
reserve = course.mine("reserve")

# %% [markdown]
# **15.5** Write the step. `admit` returns how many requests start; call `engine.start()` for each. `share` returns how
# many tokens each running request gets; `reserve` pages for them, the oldest request first. Leave out requests that get
# no tokens or were preempted. `engine.feed(work)` takes a list of `(request, tokens)` and returns logits, one row
# `(V,)` per request, in that order. One forward feeds all of them: it treats a decode as a chunk of one token. Then,
# for each request without pending tokens, append the most likely token to its `answer`, as an int. If this token is in
# `engine.stop`, or the answer has `request.most` tokens, call `engine.finish(request)`. Return a list of `(request,
# token)` for the requests that got a token.


# %% tags=["exercise"]
def step(engine):
    return ...


# %% tags=["solution"]
def step(engine):
    known = [len(request.known) for request in engine.waiting]
    room = engine.most - len(engine.running)
    for _ in range(admit(known, engine.promised, engine.free, engine.size, room)):
        engine.start()

    running = list(engine.running)  # reserve takes some out of engine.running
    sizes = share([request.pending for request in running], engine.budget)
    work = []
    for request, tokens in zip(running, sizes):
        if request in engine.running and tokens and reserve(engine, request, tokens):
            work.append((request, tokens))

    drawn = []
    for (request, _), row in zip(work, engine.feed(work)):
        if request.pending == 0:
            token = int(row.argmax())
            request.answer.append(token)
            drawn.append((request, token))
            if token in engine.stop or len(request.answer) == request.most:
                engine.finish(request)
    return drawn


# %%
course.check("15.5", step)

# %% [markdown]
# ## Your own engine
#
# The engine is complete. The next cell runs the eight requests in a memory of 11 pages, with at most 40 tokens per
# step. The output has one row per request and one column per step: `.` waiting, `P` prompt, `d` decode, `-` no tokens
# left in the budget, `x` preempted.

# %%
step = course.mine("step")
pages = 11 * -(-max(map(len, prompts)) // 30)  # of a model with longer tokens: more
engine = Engine(model, step, pages=pages, budget=40)
requests = [engine.submit(prompt, longest) for prompt in prompts]
engine.run()
print(engine.timeline())
same = sum(request.answer == answer for request, answer in zip(requests, alone))
again = engine.computed - sum(len(r.known) - 1 for r in requests)
print(f"answers as alone: {same} of {len(requests)}")
print(f"free pages: {engine.free} of {pages}")
print(f"tokens that were computed again: {again}")

# %% tags=["hide-input"]
course.figure("15.same", same)
course.figure("15.requests", len(requests))
course.figure("15.again", again)
from matplotlib.colors import ListedColormap

kinds = ["", "queued", "prefill", "decode", "waits", "no pages"]
blue, orange, green = course.COLORS[:3]
colors = ["#FFFFFF", "#E4E4E4", blue, green, "#A0A0A0", orange]
cells = [[kinds.index(s.get(r.number, "")) for s in engine.steps] for r in requests]
fig, axis = course.subplots(width=10, height=2.8)
look = dict(cmap=ListedColormap(colors), vmin=0, vmax=5, interpolation="nearest")
axis.imshow(cells, aspect="auto", **look)
axis.grid(False)
axis.set(xlabel="step", ylabel="request", title="what each step did")
axis.set(yticks=range(len(requests)))
for kind, color in zip(kinds[1:], colors[1:]):
    axis.barh([0], [0], color=color, label=kind)
axis.legend(ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25))
lost = sum("no pages" in step.values() for step in engine.steps)
course.show(
    fig,
    alt=f"Rows of {len(requests)} requests over {len(engine.steps)} steps. Each is "
    "grey while it waits, blue while its prompt is fed, green while it decodes; in "
    f"{lost} steps a request has lost its pages, orange.",
)

# %% [markdown]
# In the engine, <!--fig 15.same-->8<!--/fig--> of <!--fig 15.requests-->8<!--/fig--> requests get the same answer as
# alone. The oldest request is never preempted. Preempted requests computed their tokens
# again, <!--fig 15.again-->40<!--/fig--> in all. That is the cost of starting requests before it is known that their
# whole length fits. Notebook 10 shows the cost of reserving the whole length in advance.
#
# **15.6** Now the answers go to the readers, each token as soon as it is drawn. Write the stream of one request, with
# `yield`: yield its tokens as they appear in `request.answer`, call `engine.step()` when there is no new one, and end
# when `request.done` is true. There may be several streams, which are read in turn. Each step draws a token for every
# request, so a step that another stream has called may already have drawn your next token.


# %% tags=["exercise"]
def stream(engine, request):
    return ...


# %% tags=["solution"]
def stream(engine, request):
    sent = 0
    while sent < len(request.answer) or not request.done:
        if sent < len(request.answer):
            yield request.answer[sent]
            sent += 1
        else:
            engine.step()


# %%
course.check("15.6", stream)

# %% [markdown]
# ## Serve
#
# `Server` is a hundred lines around Python's own `http.server`. Each reader has a thread, each thread reads its own
# stream, and a lock prevents two threads from running a step at the same time. Four people ask at the same time. Their
# answers are printed as they arrive.

# %%
engine = Engine(model, step, pages=pages, budget=40)
server = Server(engine, course.mine("stream"), ids_of, tokenizer.text_of, most=longest)
got, pieces = {}, []


def read(question):
    with urlopen(f"{server.address}ask?q={quote(question)}") as answer:
        while piece := answer.read1().decode():
            pieces.append(question)
            got[question] = got.get(question, "") + piece


readers = [Thread(target=read, args=(question,)) for question in questions[:4]]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
turns = sum(a != b for a, b in zip(pieces, pieces[1:]))
for question in questions[:4]:
    print(f"{question} → {got[question]}")
print(f"{len(pieces)} pieces came; {turns} times the next was for another reader")
print(engine.timeline())
served = [got[q] == tokenizer.text_of(a) for q, a in zip(questions[:4], alone)]
print("the same texts as alone:", all(served))

# %% [markdown]
# The engine keeps running as long as this notebook's kernel. It has a web page, where you can ask several questions at
# once and watch the steps:

# %%
print("open in your browser:", server.address)

# %% [markdown]
# ## How fast is it?
#
# We run eight requests one after the other with `nanokv.generate`, then all at once in your engine, then in nanokv's.
# The prompts are the same in all three runs, and so are the tokens.

# %%
new = course.sized(24, 8)


def one_by_one():
    alike = dict(max_new_tokens=new, eos_token_ids=[])
    return [list(nanokv.generate(model, prompt, **alike)) for prompt in prompts]


def yours():
    own = Engine(model, step, pages=64, budget=128)
    own.stop = ()
    asked = [own.submit(prompt, new) for prompt in prompts]
    own.run()
    return [request.answer for request in asked]


def nanokvs():
    other = nanokv.Engine(model, pages=64, step_tokens=128)
    asked = [other.submit(p, max_new_tokens=new, eos_token_ids=[]) for p in prompts]
    other.run()
    return [request.tokens for request in asked]


seconds, answers = {}, {}
for _ in range(course.sized(2, 1)):  # in turn, so that a busy moment meets all three
    for serve in (one_by_one, yours, nanokvs):
        begin = time.perf_counter()
        answers[serve.__name__] = serve()
        took = time.perf_counter() - begin
        seconds[serve.__name__] = min(took, seconds.get(serve.__name__, took))
rates = {name: len(prompts) * new / took for name, took in seconds.items()}
for name, rate in rates.items():
    print(f"{name:<11} {rate:6.0f} tokens per second")
alike = answers["one_by_one"] == answers["yours"] == answers["nanokvs"]
print("the same tokens:", alike)
course.reveal("15.c", rates["yours"] / rates["one_by_one"])

# %% tags=["hide-input"]
course.figure("15.faster", rates["yours"] / rates["one_by_one"])
course.figure("15.beside", rates["nanokvs"] / rates["yours"])
fig, axis = course.subplots(width=6, height=2.2)
names = {"one_by_one": "one by one", "yours": "your engine", "nanokvs": "nanokv.Engine"}
axis.barh([names[name] for name in rates], rates.values(), 0.6, color=course.COLORS[0])
axis.invert_yaxis()
axis.set(xlabel="tokens per second")
axis.set(title=f"{len(prompts)} requests, {new} tokens each")
ends = ", ".join(f"{names[name]} {rate:.0f}" for name, rate in rates.items())
course.show(fig, alt=f"Bars of tokens per second, of three ways to serve: {ends}.")

# %% [markdown]
# Eight at once give more than <!--fig 15.faster above-->1.2<!--/fig--> times as many tokens per second, but not eight
# times: with this small model a large part of a step is spent in Python and on starting operations, and attention still
# reads each row's own cache. nanokv's engine gives less than <!--fig 15.beside below-->3<!--/fig--> times as many as
# yours. It admits requests, shares the budget and preempts by the same rules; you will recognise them in
# `nanokv/engine/scheduler.py`. nanokv's engine can do more: it draws with a temperature, reuses the pages of known
# prefixes, reports times, and survives an interrupt in any line.

# %% [markdown]
# ## One order of sums
#
# Why do the bits of a row depend on the other rows? A matrix product adds up products. Many rows give each core whole
# rows to add. With few rows some cores would be idle, so each row is cut into parts, one per core, and the sums of the
# parts are added at the end. `by_cores` adds in the same order as such a kernel. We give it one row alone, and then the
# same row with others.


# %%
def by_cores(products, cores=8):
    """The sum of each row (B,n) → (B,). The fewer rows, the more parts per row."""
    B = len(products)
    parts = products.view(B, max(1, cores // B), -1)  # (B,parts,n / parts)
    return sum(sum(parts.unbind(2)).unbind(1))  # Python's sum adds from left to right


eight = torch.rand(8, 64, generator=torch.Generator().manual_seed(12)) - 0.5
lone = by_cores(eight[:1])[0]
seen = set()
for B in (1, 2, 4, 8):
    row = by_cores(eight[:B])[0]
    seen.add(float(row))
    equal, close = torch.equal(row, lone), torch.allclose(row, lone)
    print(f"one of {B} rows: {row:.9f}   equal: {equal!s:<5}   allclose: {close}")
course.reveal("15.d", len(seen))

# %% tags=["hide-input"]
course.figure("15.orders", len(seen))

# %% [markdown]
# The orders of additions give <!--fig 15.orders-->4<!--/fig--> different sums; of another row, two may be rounded to the
# same number. `torch.allclose` accepts all of them, because it allows for rounding. So it cannot test batch invariance;
# `torch.equal` can.
#
# **15.7** Write the sums with one order. `products` is `(B,n)` in fp32. Cut each row into blocks of `size` numbers; the
# last block may be shorter. Add the numbers of each block from left to right, then the sums of the blocks from left to
# right. Add with `+`: `torch.sum` and `@` choose an order of their own. Return the sums, `(B,)` in fp32. Rows may be
# computed together, but no row may get other bits than alone.


# %% tags=["exercise"]
def sums(products, size):
    return ...


# %% tags=["solution"]
def sums(products, size):
    total = 0
    for block in products.split(size, dim=1):  # (B,size)
        part = 0
        for column in block.unbind(1):  # (B,)
            part = part + column
        total = total + part
    return total


# %%
course.check("15.7", sums)

# %% [markdown]
# The blocks can still be divided among the cores, because where a block begins does not depend on the number of rows.
# The kernels of `nanokv.batch_invariant` add in such an order: attention, for instance, in parts of `256` keys.

# %%
course.whose()

# %% [markdown]
# ## Quiz

# %%
course.quiz("15")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters

# %% tags=["solution"]
q1, q2, q3 = "a", "b", "c"

# %%
course.answer("15.q1", q1)
course.answer("15.q2", q2)
course.answer("15.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Yu and others, [Orca](https://www.usenix.org/conference/osdi22/presentation/yu): continuous batching, there called
#   iteration-level scheduling.
# - Agrawal and others, [Sarathi-Serve](https://arxiv.org/abs/2403.02310): chunked prefill.
# - Zheng and others, [SGLang](https://arxiv.org/abs/2312.07104): a [radix tree](glossary.md#radix-tree) of known
#   prefixes. Providers sell such reuse as [prompt caching](glossary.md#prompt-caching).
# - `nanokv/engine/scheduler.py` and `nanokv/engine/engine.py`: the engine of a real server.
#
# ## Next
#
# Your engine decides what a step computes. In notebook [16](16_the_step_on_a_gpu.ipynb) you write the code with which a
# GPU computes it.

# %% tags=["skip"]
course.progress()
