# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · Reuse and rollback
#
# A cache can do more than save time within one answer. You can fill it in pieces, pass it to the next request, keep it
# from one turn of a chat to the next, copy it for a second answer, and truncate it when a guess was wrong. All of that
# rests on one rule: **the cache holds exactly these tokens at exactly these positions.** You will use the rule five
# times, and see what happens if the count is wrong by one token.
#
# ## What you will be able to do
#
# - feed a prompt in [chunks](glossary.md#chunk), and write the [causal mask](glossary.md#causal-mask) that a chunk
#   needs;
# - say how much a shared [prefix](glossary.md#prefix) saves, and when it saves nothing;
# - find the part of the cache that a chat template makes unusable, with the [longest common
#   prefix](glossary.md#longest-common-prefix);
# - check guesses in one forward ([speculative decoding](glossary.md#speculative-decoding)) and
#   [truncate](glossary.md#truncate) the wrong ones, at the right place.
#
# Letters: `T` tokens that are fed at once, `P` tokens of the prompt ([all letters](glossary.md#letters)).

# %%
import time

import torch

import nanokv
from nanokv import course
from nanokv.cache.dict_cache import DictCache
from nanokv.inference import verify_draft
from nanokv.text.ids import common_prefix
from nanokv.decoding.speculative import EarlyExit, PromptLookup

model, tokenizer = course.start("11")
c = model.config


def prompt_of(*messages, tokenizer=tokenizer):
    """Ids of a chat: user first, then in turns."""
    roles = ("user", "assistant") * len(messages)
    said = [{"role": r, "content": m} for r, m in zip(roles, messages)]
    return tokenizer.encode(tokenizer.render(said))


# %% [markdown]
# ## Predict
#
# Two predictions. First: a chat of four turns with a model that thinks before it answers. The chat template drops the
# thinking of earlier turns, as Qwen3's template does. When the fourth prompt arrives, what percentage of the cached
# tokens can be kept?

# %% tags=["exercise"]
kept_percent = ...  # 0 to 100

# %% tags=["solution"]
# a common first guess: the first answer was rewritten, so nearly everything is lost
kept_percent = 10

# %%
course.predict("11.a", kept_percent, unit="percent")

# %% [markdown]
# Second: a cheap method guesses the next `4` tokens. The model checks them all in one forward, and accepts `2`. For how
# many tokens did that forward *write* keys and values?

# %% tags=["exercise"]
written = ...  # tokens

# %% tags=["solution"]
written = 2  # a common first guess: the accepted ones

# %%
course.predict("11.b", written, unit="tokens")

# %% [markdown]
# ## Experiment 1: a prompt in pieces
#
# `nanokv.prefill` continues from any `start_pos`. So a long prompt can be fed in chunks: each forward is small, and
# other requests can run in between. We feed one prompt in chunks of several sizes, and compare the logits with those of
# the whole prompt at once. We also try two wrong masks that occur in real code: one that begins in the *top left*
# corner (this is what `is_causal=True` means in PyTorch's attention), and no mask at all.


# %%
class TopLeft(DictCache):
    """Query t of the chunk sees keys 0 … t: right for the first chunk only."""

    def mask(self, T):
        return torch.ones(T, self.length + T,
                          dtype=torch.bool).tril() if T > 1 else None


class NoMask(DictCache):
    """Everything is visible: right for single tokens only."""

    def mask(self, T):
        return None


def in_chunks(kind, ids, size):
    """Logits after `ids`, fed `size` tokens at a time."""
    cache = nanokv.KVCache((kind() for _ in range(c.num_hidden_layers)), c)
    return nanokv.prefill_chunks(model, [ids], cache, chunk=size)


question = prompt_of("My name is Zorbla, and I have a red boat, a green hat and a cat "
                     "called Miso. What is my name?")
whole = nanokv.score(model, [question])[:, -1]
P = len(question)
sizes = [1, 4, 8, 16, P]
gaps = {
    kind.__name__: [float((in_chunks(kind, question, size) - whole).abs().max())
                    for size in sizes]
    for kind in (DictCache, TopLeft, NoMask)
}
print(f"{P} tokens; largest difference to the logits of one forward without a cache")
print("chunk size ", *(f"{size:>9}" for size in sizes))
for name, values in gaps.items():
    print(f"{name:<11}", *(f"{value:>9.1e}" for value in values))

MyCache = course.mine("cache")  # of 06.3
print(f"{'06.3':<11}",
      *(f"{float((in_chunks(MyCache, question, size) - whole).abs().max()):>9.1e}"
        for size in sizes))

# %%
held, T = 8, 4
cache = nanokv.make_cache("dict", c)
nanokv.prefill(model, [question[:held]], cache)
layer = cache[0]
masks = {
    "bottom right: right": layer.mask(T),
    "top left": TopLeft.mask(layer, T),
    "no mask": torch.ones(T, held + T, dtype=torch.bool),
}
truth = masks["bottom right: right"]

# %% tags=["hide-input"]
from matplotlib.colors import ListedColormap

course.figure("11.chunk", max(gaps["DictCache"]))
course.figure("11.topleft", min(gaps["TopLeft"][1:-1]))
course.figure("11.nomask", min(gaps["NoMask"][1:]))
fig, axes = course.subplots(1, 3, width=10, height=2.1)
colors = ListedColormap(["#E8E8E8", course.COLORS[0], course.COLORS[4],
                         course.COLORS[1]])
for axis, (name, mask) in zip(axes, masks.items()):
    # 0 hidden, 1 seen, 2 hidden by mistake, 3 seen by mistake
    kind = mask.long() + 2 * (mask != truth).long()
    axis.imshow(kind, cmap=colors, vmin=0, vmax=3)
    axis.grid(False)
    axis.set(title=name, xlabel="key", xticks=range(0, held + T, 2), yticks=range(T),
             yticklabels=range(held, held + T))
axes[0].set_ylabel("query")
hidden = int((truth & ~masks["top left"]).sum())
seen = int((masks["no mask"] & ~truth).sum())
course.show(fig, alt=f"Three masks for a chunk of {T} queries after {held} cached "
            "keys. Right: every query sees all cached keys, and in the chunk a lower "
            f"triangle. Top left: {hidden} cells that must be seen are hidden "
            f"(yellow), among them most of the cache. No mask: {seen} cells of the "
            "future are seen (orange).")

# %% [markdown]
# With the right mask every split gives the logits of the whole prompt, up to rounding
# (<!--fig 11.chunk x5-->2e-5<!--/fig-->). With the top-left mask, a token of a later chunk sees only the first few
# keys. It does not see most of the cache, nor itself: the logits are off
# by about <!--fig 11.topleft-->22<!--/fig--> or more. Without a mask they are off by
# about <!--fig 11.nomask x1.2-->2.1<!--/fig--> or more, because each token of a chunk sees the tokens after it. Both
# wrong masks pass a test that feeds one token at a time (the first column). The top-left mask also passes a test that
# feeds everything at once (the last column). So test a cache with *several* splits.

# %% [markdown]
# ## Experiment 2: the next request begins with the same words
#
# Many requests begin with the same text: a system prompt, a long document, a few examples. The keys and values of a
# token depend only on this token and those before it, so the next request can reuse them. `make_cache("prefix", …)`
# keeps full [pages](glossary.md#page) of 16 tokens after their request has ended, and looks them up by their tokens. We
# send prompts that share more and more tokens with an earlier one, and measure the prefill.

# %% tags=["hide-input"]
course.show(course.drawings.prefix_tree())

# %%
torch.manual_seed(0)
total, page = course.sized(448, 160), 16
longest = min(total, c.max_position_embeddings)
# which tokens they are does not matter for the time
draw = lambda n: torch.randint(0, c.vocab_size, (n,)).tolist()
first_prompt = draw(longest)
pool = nanokv.cache.PrefixPool(c, pages=4 * longest // page, page_size=page)
first = nanokv.make_cache("prefix", c, pool=pool)
nanokv.prefill(model, [first_prompt], first)
first.remember(first_prompt)


def prefill_sharing(tokens):
    """(tokens reused, seconds, logits) of a prompt that meets the pool as it is."""
    begin = time.perf_counter()
    cache = nanokv.make_cache("prefix", c, pool=pool)
    n = cache.reuse(tokens)
    logits = nanokv.prefill(model, [tokens[n:]], cache, start_pos=n)
    return n, time.perf_counter() - begin, logits


shares, computed, seconds = [0, 0.2, 0.4, 0.6, 0.8, 0.95], [], []
for share in shares:
    shared = int(share * longest)
    tokens = first_prompt[:shared] + draw(longest - shared)
    runs = [prefill_sharing(tokens) for _ in range(course.sized(7, 2))]
    gap = float((runs[0][2] - nanokv.score(model, [tokens])[:, -1]).abs().max())
    computed.append(longest - runs[0][0])
    seconds.append(min(run[1] for run in runs))  # the least disturbed
    print(f"{shared:>3} tokens shared: {runs[0][0]:>3} reused, {computed[-1]:>3} "
          f"computed, {1000 * seconds[-1]:5.1f} ms,  logits differ by {gap:.0e}")

# %% tags=["hide-input"]
course.figure("11.shared80", int(0.8 * longest))
course.figure("11.reused80", longest - computed[4])
course.figure("11.faster80", seconds[0] / seconds[4])
fig, (left, right) = course.subplots(1, 2, width=9.5)
percent = [100 * share for share in shares]
left.plot(percent, computed, "o-", label="measured")
left.plot([0, 100], [longest, 0], ":", color="gray", label="total − shared")
shared_label = "shared with an earlier prompt, percent"
left.set(title="tokens of the prompt that are computed", xlabel=shared_label,
         ylabel="tokens")
left.legend()
right.plot(percent, [1000 * s for s in seconds], "o-", color=course.COLORS[2])
right.set(title="time to the first logits", xlabel=shared_label, ylabel="milliseconds",
          ylim=0)
course.show(fig, alt=f"Left: a straight line from {computed[0]} computed tokens "
            f"without sharing to {computed[-1]} at {percent[-1]:.0f} percent. Right: "
            f"the time falls with it, from {1000 * seconds[0]:.0f} to "
            f"{1000 * seconds[-1]:.0f} milliseconds.")

# %% [markdown]
# The saving is the shared length divided by the total length. Of <!--fig 11.shared80-->358<!--/fig--> shared
# tokens <!--fig 11.reused80-->352<!--/fig--> are reused, because only full pages are kept. That makes the prefill more
# than <!--fig 11.faster80 above-->1.5<!--/fig--> times as fast. Two rules make reuse safe. First, the stored *tokens*
# are compared, not only a hash. Second, a page is identified by all tokens up to its end: the same words after a
# different beginning are a different page.

# %% [markdown]
# ## Experiment 3: the next turn of a chat
#
# Each turn of a chat renders the whole conversation again. The cache holds the ids of the last prompt and its answer.
# The chat template decides how much of that is still a prefix of the new prompt. This is often less than expected. We
# compare three chats with the same words:
#
# - **plain**: the template repeats every turn unchanged;
# - **thinking dropped**: each answer began with a `<think>` block, and the template leaves it out of earlier turns;
# - **clock**: the template writes the time into the first line.
#
# For each chat we keep the longest common prefix, truncate the cache to it, and prefill the rest. (The answers are
# given, so that all three chats have the same words.)

# %%
chatml = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT "
          "}}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
dropping = (
    "(m.content.split('</think>')[-1].lstrip('\n') "
    "if m.role == 'assistant' else m.content)"
)
templates = {
    "plain": chatml.replace("CONTENT", "m.content"),
    "thinking dropped": chatml.replace("CONTENT", dropping),
    "clock": "It is {{ 10 + messages | length }}:00.\n"
    + chatml.replace("CONTENT", "m.content"),
}
thought = (
    "<think>\nThe user tells me something. I answer in a short and friendly way.\n"
    "</think>\n\n"
)
talk = ["My name is Zorbla.", "Nice to meet you, Zorbla.", "I have a cat called Miso.",
        "A cat called Miso, how nice.",
        "What is 12 + 30?", "12 + 30 = 42.", "What is my name?", "Your name is Zorbla."]


def chat(name):
    """One (reused, computed, lost) a turn; the logits of every turn are compared
    with those without a cache."""
    own = nanokv.Tokenizer(tokenizer.backend, tokenizer.names, templates[name],
                           tokenizer.rows)
    cache, cached, turns = nanokv.make_cache("dict", c), [], []
    for i in range(0, len(talk), 2):
        said = [thought + m if j % 2 and name == "thinking dropped" else m
                for j, m in enumerate(talk)]
        new = prompt_of(*said[: i + 1], tokenizer=own)
        # one token at least must be fed, or there are no logits
        n = min(common_prefix(cached, new), len(new) - 1)
        turns.append((n, len(new) - n, len(cached) - n))
        was, now = (own.decode(ids[n : n + 8]) for ids in (cached, new))
        reason = f"token {n} is the first to differ: {was!r} is now {now!r}"
        reason = reason if n < len(cached) else "nothing was lost"
        cache.truncate(n)
        logits = nanokv.prefill(model, [new[n:]], cache, start_pos=n)
        assert torch.allclose(logits, nanokv.score(model, [new])[:, -1], atol=1e-3)
        reply = own.encode(said[i + 1])
        nanokv.prefill(model, [reply], cache, start_pos=len(new))
        cached = new + reply
    print(f"{name:<17}",
          "  ".join(f"turn {i}: {r:>3} kept {p:>3} fed"
                    for i, (r, p, _) in enumerate(turns, 1)))
    print(" " * 17, reason)
    return turns


chats = {name: chat(name) for name in templates}
last = {name: turns[-1] for name, turns in chats.items()}
survived = {name: 100 * kept / (kept + lost) for name, (kept, _, lost) in last.items()}
course.reveal("11.a", survived["thinking dropped"])

# %% tags=["hide-input"]
course.figure("11.plain", survived["plain"])
course.figure("11.think", survived["thinking dropped"])
course.figure("11.clock", last["clock"][0])
course.figure("11.clockfed", last["clock"][1])
fig, axes = course.subplots(1, 3, width=10, height=2.9, sharey=True)
for axis, (name, turns) in zip(axes, chats.items()):
    place = range(1, len(turns) + 1)
    kept, fed, lost = ([turn[i] for turn in turns] for i in range(3))
    axis.bar(place, kept, color=course.COLORS[0], label="kept")
    axis.bar(place, fed, bottom=kept, color=course.COLORS[2], label="fed")
    axis.bar(place, [-x for x in lost], color=course.COLORS[1], label="thrown away")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(title=name, xlabel="turn", xticks=list(place))
axes[0].set_ylabel("tokens")
axes[0].legend(loc="upper left", fontsize=8.5)
words = "; ".join(f"{name}: {kept} kept, {fed} fed, {lost} thrown away"
                  for name, (kept, fed, lost) in last.items())
course.show(fig, alt=f"Bars for four turns of three chats. In the fourth turn {words}.")

# %% [markdown]
# Plain: <!--fig 11.plain-->100<!--/fig--> percent of the cache is kept in each turn. Thinking dropped: in the last
# turn <!--fig 11.think-->67<!--/fig--> percent is kept. The first difference is where the *latest* answer begins. The
# older answers were rendered without their thinking one turn before, and are cached in that form. So each turn loses
# one answer, not the conversation. Clock: one changed digit near the beginning leaves <!--fig 11.clock-->4<!--/fig-->
# tokens, and all <!--fig 11.clockfed-->119<!--/fig--> others are fed, although most of their words were in the cache.
# The keys of a token depend on everything before it. So text that changes belongs at the end of a prompt.
#
# A chat that skips the comparison and appends the new turn to the cached tokens is fast and wrong: the model then reads
# a different text from the one that the template rendered.

# %% [markdown]
# ## Experiment 4: guess, check, truncate
#
# For a large model, a forward over five tokens takes much less than five times as long as one over a single token: the
# weights are read once in both cases (notebook 09). So a cheap method can guess tokens, and the model *checks* them:
# `verify_draft` gives the logits after each of the tokens. The guesses are kept up to the first one that differs from
# the model's own choice; from there the model's choice is used. Here we write the rounds by hand. The guesser is the
# model itself without its last layer.

# %% tags=["hide-input"]
course.show(course.drawings.speculation())


# %%
def rounds(ids, draft, n, crop):
    """Greedy text in rounds of guess, check and `crop(start, kept)` → (tokens,
    [(before, written, guessed, kept)])."""
    cache = nanokv.make_cache("dict", c)
    tokens, log = [int(nanokv.prefill(model, [ids], cache).argmax())], []
    certain = lambda logits, guesses: torch.nn.functional.one_hot(logits.argmax(-1),
                                                                  c.vocab_size).float()
    while len(tokens) < n:
        start = cache.length
        guesses, _ = draft.propose(ids + tokens, 4, certain, None)
        # one a token fed
        best = verify_draft(model, [[tokens[-1], *guesses]], cache,
                            start_pos=start)[0].argmax(-1).tolist()
        kept = common_prefix(guesses, best)
        log.append((start, cache.length - start, len(guesses), kept))
        cache.truncate(crop(start, kept))
        tokens += [*guesses[:kept], best[kept]]
    return tokens[:n], log


count = prompt_of("Count from 3 to 14.")
n = course.sized(40, 12)
right = lambda start, kept: start + 1 + kept  # the newest token was fed too
guesser = EarlyExit(model, c.num_hidden_layers - 1)
tokens, log = rounds(count, guesser, n, right)
plain = list(nanokv.generate(model, count, max_new_tokens=n, eos_token_ids=[]))
for start, wrote, guessed, kept in log[:6]:
    print(f"cache {start:>3} → written {wrote} → {start + wrote:>3}; {kept} of "
          f"{guessed} guesses kept → back to {right(start, kept)}")
print(repr(tokenizer.decode(tokens)))
print("the same tokens as without guesses:", tokens == plain,
      f" forwards: {len(log) + 1} instead of {n}")
course.reveal("11.b", log[0][1])

# %% tags=["hide-input"]
course.figure("11.written", log[0][1])
course.figure("11.forwards", len(log) + 1)

# %% [markdown]
# The check writes <!--fig 11.written-->5<!--/fig--> tokens in every round: the newest token, which had been drawn but
# not fed, and four guesses. At that point it is not yet known which guesses are right. (If you said four, you forgot
# the newest token. The line that truncates has to count it too.) Then exactly the wrong guesses have to be removed. The
# next cell removes one token too many, and one too few:

# %%
crops = {
    "right": right,
    # "the newest token is not a guess"
    "one too few": lambda start, kept: start + kept,
    # counts the token that was drawn but not yet fed
    "one too many": lambda start, kept: start + 2 + kept,
    "never": lambda start, kept: 10**9,
}
agree, texts = {}, {}
for name, crop in crops.items():
    tokens, _ = rounds(count, EarlyExit(model, c.num_hidden_layers - 1), n, crop)
    agree[name] = next((i for i, (a, b) in enumerate(zip(tokens, plain)) if a != b), n)
    texts[name] = tokenizer.decode(tokens)
    print(f"{name:<13} first {agree[name]:>2} tokens right: {texts[name]!r}")

# %% tags=["hide-input"]
course.figure("11.few", agree["one too few"])
course.figure("11.many", agree["one too many"])
course.figure("11.never", agree["never"])

# %% [markdown]
# No error is raised: `start_pos` is taken from the cache, so it agrees with the cache. But the cache does not match the
# text. With one row too few, the answer is wrong after <!--fig 11.few-->6<!--/fig--> tokens, with one too many
# after <!--fig 11.many-->6<!--/fig-->. Until then the wrong rows change the logits, but no word. If a speculative
# decoder gives different answers from the model alone, look for this bug.
#
# The output of correct speculative decoding is that of the model alone, for any guesser. A bad guesser costs time but
# never changes a word. The share of accepted guesses depends on the text:

# %%
most = course.sized(48, 12)  # tokens of an answer
tasks = {
    "count": prompt_of("Count from 3 to 14."),
    "answer": prompt_of("What is a KV cache?"),
    "story": prompt_of("Tell me a story."),
    "say it again": prompt_of("What is a KV cache?", tokenizer.decode(
        list(nanokv.generate(model, prompt_of("What is a KV cache?"),
                             max_new_tokens=most))[:-1]), "What is a KV cache?"),
}
alone = {task: list(nanokv.generate(model, ids, max_new_tokens=most))
         for task, ids in tasks.items()}
deep = c.num_hidden_layers
drafts = {
    "n-gram": (lambda: PromptLookup(max_ngram=3, tokens=4), 0),
    f"first {deep // 2} layers": (lambda: EarlyExit(model, deep // 2), deep // 2),
    f"first {deep - 1} layers": (lambda: EarlyExit(model, deep - 1), deep - 1),
}
kept_in, passes, same = {name: [] for name in drafts}, {}, True
for name, (make, layers) in drafts.items():
    work = plain_work = 0
    for task, ids in tasks.items():
        stream = nanokv.speculate(model, ids, make(), max_new_tokens=most)
        same &= list(stream) == alone[task]
        report = stream.report
        kept_in[name].append(report.rounds)
        # layers passed through, one after another
        work += len(report.rounds) * deep + report.proposed * layers
        plain_work += (len(report.tokens) - 1) * deep
    passes[name] = work / plain_work
    rates = [sum(k for _, k in r) / max(1, sum(g for g, _ in r)) for r in kept_in[name]]
    print(f"{name:<15} accepted:",
          "  ".join(f"{task} {rate:4.0%}" for task, rate in zip(tasks, rates)),
          f"   layer passes × {passes[name]:.2f}")
print("always the same tokens:", same)
again, story = kept_in["n-gram"][3], kept_in["n-gram"][2]

# %% tags=["hide-input"]
course.figure("11.again", 100 * sum(k for _, k in again)
              / max(1, sum(g for g, _ in again)))
course.figure("11.ngram", passes["n-gram"])
course.figure("11.deep", passes[f"first {deep - 1} layers"])
fig, axes = course.subplots(1, 3, width=10, height=2.7, sharey=True)
described = []
for axis, (name, by_task) in zip(axes, kept_in.items()):
    all_rounds = [kept for task in by_task for _, kept in task]
    shares_of = [all_rounds.count(k) / len(all_rounds) for k in range(5)]
    mean = sum(all_rounds) / len(all_rounds)
    described.append(f"{name}: mean {mean:.2f}, none in {shares_of[0]:.0%} of the "
                     f"rounds, four in {shares_of[4]:.0%}")
    axis.bar(range(5), shares_of, color=course.COLORS[0])
    axis.axvline(mean, color=course.COLORS[1], linestyle="--", linewidth=1.5)
    axis.set(title=f"{name}", xlabel="guesses kept in a round", xticks=range(5))
axes[0].set_ylabel("share of the rounds")
course.show(fig, alt="Three histograms of how many guesses a round keeps, with the "
            "mean as a dashed line: "
            + "; ".join(described) + ".")

# %% [markdown]
# When the model repeats its context, a guesser that looks up the earlier continuation is
# right <!--fig 11.again-->100<!--/fig--> percent of the time, and costs almost nothing. Over all four texts it
# takes <!--fig 11.ngram-->0.76<!--/fig--> of the layer passes of plain decoding. The guesser with all layers but one is
# right more often, but takes <!--fig 11.deep-->1.6<!--/fig--> times as many layer passes as plain decoding: its guesses
# cost nearly as much as the steps that they save. So a high acceptance rate is not enough; the cost of a guess matters
# too.

# %% [markdown]
# ## Experiment 5: several answers from one prompt
#
# [Beam search](glossary.md#beam-search) continues one prompt in different ways, and so do several answers to one
# question. `fork` gives an independent cache. With pages it copies only the table of pages: the pages of the prompt
# then have two owners. A branch that writes into a shared page copies that page first.

# %%
pool = nanokv.cache.PagePool(c, pages=64, page_size=page)
in_use = lambda: sum(owners > 0 for owners in pool.references)
prompt = (question * 8)[:100]
trunk = nanokv.make_cache("paged", c, pool=pool)
logits = nanokv.prefill(model, [prompt], trunk)
alone = in_use()
branches = [trunk.fork() for _ in range(4)]
forked = in_use()
gaps_of = []
for branch, token in zip(branches, logits[0].topk(4).indices.tolist()):
    after = nanokv.decode(model, [[token]], branch, start_pos=branch.length)
    direct = nanokv.score(model, [prompt + [token]])[:, -1]
    gaps_of.append(float((after - direct).abs().max()))
written_pages = in_use()
print(f"{len(prompt)} tokens: {alone} pages; after 4 forks {forked}; after a token in "
      f"each {written_pages}, where copies would take {5 * alone}")
print(f"each branch gives the logits of its own text, to {max(gaps_of):.0e}")
best = nanokv.beam_search(model, prompt_of("Tell me a story."), beams=4,
                          max_new_tokens=16, eos_token_ids=[])[0]
print("a beam search with 4 beams:", repr(tokenizer.decode(best.ids)))

# %% tags=["hide-input"]
course.figure("11.pages", alone)
course.figure("11.cow", written_pages)

# %% [markdown]
# One cache takes <!--fig 11.pages-->7<!--/fig--> pages, and five caches take the same <!--fig 11.pages-->7<!--/fig-->.
# After each branch has written a different token it is <!--fig 11.cow-->11<!--/fig-->: one copied page per fork.

# %% [markdown]
# ## What the articles say
#
# Here are three claims about reuse that are wrong or misleading. The other claims that this notebook checks are on [the
# page of all claims](claims.md).

# %%
offloaded = nanokv.make_cache("offloaded", c, to="host")
gap = float((nanokv.prefill(model, [question], offloaded) - whole).abs().max())
saved = [100 * (1 - tokens / longest) for tokens in computed]
course.claim("1.16", "misleading", found=f"{percent[1]:.0f} percent shared saved "
             f"{saved[1]:.0f} percent of the tokens, "
             f"{percent[5]:.0f} percent shared {saved[5]:.0f}")
course.claim("1.22", "wrong", found=f"{log[0][1]} tokens written, {log[0][3]} guesses "
             f"kept, in the first round")
course.claim("2.15", "misleading", found=f"{len(branches)} branches of one cache, each "
             f"with the logits of its own text")

# %% tags=["hide-input"]
course.confirm("0.10", "right", found=f"for {T} tokens after {held} cached ones it is "
               f"{tuple(layer.mask(T).shape)}")
course.confirm("1.21", "right", found=f"layers kept in host memory give the same "
               f"logits, to {gap:.0e}")
course.confirm("3.3", "misleading")

# %% [markdown]
# ## Exercises
#
# **11.1** Write the mask of a chunk: `cached` tokens are in the cache, and `T` new ones are fed. Return a bool tensor
# `(T, cached + T)`, True where a query may attend to a key. The check tries it on splits of 12 tokens.


# %% tags=["exercise"]
def chunk_mask(cached, T):
    return ...


# %% tags=["solution"]
def chunk_mask(cached, T):
    return torch.ones(T, cached + T, dtype=torch.bool).tril(cached)


# %%
course.check("11.1", chunk_mask)

# %% [markdown]
# **11.2** All requests of a service begin with the same system prompt. One request has been served. How many tokens
# does the prefill of the next request feed, with a prefix cache that keeps full pages? (The questions differ from their
# first token on.)

# %%
case = course.case("11.2")
print(f"system prompt {case.system} tokens, question {case.question} tokens, pages of "
      f"{case.page}")

# %% tags=["exercise"]
fed = ...

# %% tags=["solution"]
fed = case.system + case.question - case.system // case.page * case.page

# %%
course.check("11.2", fed)

# %% [markdown]
# **11.3** A round of speculative decoding. The cache holds `n` tokens; the newest token of the text has not been fed
# yet. There are `g` guesses, and the model keeps the first `k` of them. How many tokens are in the cache right after
# the check, and to how many must you truncate it? Answer with a pair.

# %%
case = course.case("11.3")
print(f"n = {case.n}, g = {case.g}, k = {case.k}")

# %% tags=["exercise"]
after_and_back = ..., ...

# %% tags=["solution"]
after_and_back = case.n + 1 + case.g, case.n + 1 + case.k

# %%
course.check("11.3", after_and_back)

# %% [markdown]
# **11.4** The next turn of a chat: `cached` are the ids in the cache, `new` those of the new prompt. To which length do
# you truncate the cache, so that you can prefill the rest and get logits?


# %% tags=["exercise"]
def keep(cached, new):
    return ...


# %% tags=["solution"]
def keep(cached, new):
    n = 0
    while n < min(len(cached), len(new) - 1) and cached[n] == new[n]:
        n += 1
    return n


# %%
course.check("11.4", keep)

# %% [markdown]
# **11.5** The check of the guesses, for greedy decoding. `guesses` are `g` ids. `best` are `g + 1` ids: the model's own
# choice after the newest token, after the first guess, and so on. Return the list of tokens that this round adds to the
# text.


# %% tags=["exercise"]
def accept(guesses, best):
    return ...


# %% tags=["solution"]
def accept(guesses, best):
    kept = 0
    while kept < len(guesses) and guesses[kept] == best[kept]:
        kept += 1
    return [*guesses[:kept], best[kept]]


# %%
course.check("11.5", accept)

# %% [markdown]
# ## Quiz

# %%
course.quiz("11")

# %% tags=["exercise"]
q1, q2, q3 = ..., ..., ...  # letters in quotes

# %% tags=["solution"]
q1, q2, q3 = "c", "b", "b"

# %%
course.answer("11.q1", q1)
course.answer("11.q2", q2)
course.answer("11.q3", q3)

# %% [markdown]
# ## Further reading
#
# - Leviathan and others, [Fast inference from transformers via speculative decoding](https://arxiv.org/abs/2211.17192):
#   why the result is exact with sampling too.
# - Zheng and others, [SGLang](https://arxiv.org/abs/2312.07104): a tree of shared prefixes for many requests.
# - `nanokv/chat/session.py`: a chat that keeps as much of its cache as it can, and reports why it could not keep more;
#   `nanokv/decoding/speculative.py`: the rounds, for any temperature; `nanokv/cache/prefix.py`: the index of pages.
#
# ## Next
#
# In notebook [12](12_batches_and_an_engine.ipynb) several texts share a model, and your parts become an engine.
# Notebook [13](13_what_a_cache_may_lose.ipynb) is about caches that drop old tokens or store numbers with fewer bits.

# %% tags=["skip"]
course.progress()
