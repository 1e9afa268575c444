"""Context parallel: a sequence over several ranks gives the logits of one process, and each rank keeps its share.

The oracle is transformers' model on the same weights, without a cache. The ranks are threads here (thread_ranks.py);
gloo and processes are in test_context_processes.py.
"""

import pytest
import torch

import nanokv
from nanokv import make_cache
from nanokv.attention import Causal, causal_attention, decode_attention
from nanokv.cache import BatchCache
from nanokv.cache.padded import PaddedCache
from nanokv.decoding.speculative import PromptLookup
from nanokv.engine.packed import prefill_packed
from nanokv.errors import CacheError, CapacityError, ParallelError, UnsupportedError
from nanokv.inference import decode, prefill, prefill_chunks, verify_draft
from nanokv.parallel.context import KINDS, ContextCache, Deal
from nanokv.parallel.group import Alone
from nanokv.parallel.merge import Split
from oracle import SHAPES, TOLERANCE, gap, pair, random_ids
from thread_ranks import on_ranks

FAMILIES = ["G2-untied-bias", "G3-yarn", "llama-G4-rope-bias", "qwen2-G2", "moe-every-2nd"]
OPTIONS = {"paged": {"page": 4}, "offloaded": {"to": "host"}}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request):
    return pair(**SHAPES[request.param])


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


def new(config, group, kind="dict", page=4, rows=1, capacity=64):
    return ContextCache(
        make_cache(kind, config, rows, capacity, **OPTIONS.get(kind, {})), group, page
    )


# --- which positions are whose --------------------------------------------------------------------------------------


def test_positions_are_dealt_out_page_by_page():
    deals = [Deal(rank, 2, 3) for rank in range(2)]
    assert [deal.positions(11).tolist() for deal in deals] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10]]
    assert [deal.count(4) for deal in deals] == [3, 1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("page", [1, 3, 16])
def test_every_position_is_one_ranks_and_shares_differ_by_a_page_at_most(ranks, page):
    deals = [Deal(rank, ranks, page) for rank in range(ranks)]
    for n in range(3 * ranks * page + 2):
        positions = [deal.positions(n) for deal in deals]
        counts = [deal.count(n) for deal in deals]
        assert torch.cat(positions).sort().values.tolist() == list(range(n))
        assert [len(own) for own in positions] == counts and max(counts) - min(counts) <= page
        assert all(own.tolist() == sorted(own.tolist()) for own in positions)
    for slots in range(1, 3 * page + 2):
        longest = deals[0].most(slots)
        assert (
            max(deal.count(longest) for deal in deals)
            == slots
            < max(deal.count(longest + 1) for deal in deals)
        )


# --- the logits of one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_chunks_turns_drafts_and_edits_give_transformers_logits(models, ranks):
    """A prompt in ragged chunks, tokens one by one, a rejected draft, a second turn, an edited first one."""
    reference, model = models
    ids, other = random_ids(1, 2, 40), random_ids(2, 2, 40)

    def work(group):
        cache, out = new(model.config, group, rows=2), []
        # The first chunks leave ranks without a position.
        for start, end in ((0, 1), (1, 8), (8, 10), (10, 23)):
            out.append((end, prefill(model, ids[:, start:end], cache, start)))
        for t in range(23, 29):
            out.append((t + 1, decode(model, ids[:, t : t + 1], cache, t)))
        verify_draft(model, other[:, 29:34], cache, 29)
        cache.truncate(29)
        draft = verify_draft(model, ids[:, 29:33], cache, 29)
        out += [(30 + i, draft[:, i]) for i in range(4)]
        out.append((40, prefill_chunks(model, ids[:, 33:], cache, 33, chunk=3)))
        cache.truncate(6)
        edited = prefill(model, other[:, 6:19], cache, 6)
        return out, edited, decode(model, other[:, 19:20], cache, 19)

    right = reference(ids).logits
    edited = reference(torch.cat((ids[:, :6], other[:, 6:20]), 1)).logits
    results = on_ranks(ranks, work)
    for out, after, last in results:
        assert max(gap(logits, right[:, end - 1]) for end, logits in out) <= TOLERANCE
        assert gap(after, edited[:, 18]) <= TOLERANCE and gap(last, edited[:, 19]) <= TOLERANCE
    # All ranks choose the same token.
    assert all(torch.equal(results[0][2], last) for _, _, last in results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_may_lie_in_any_cache_that_keeps_exact_values(model, kind):
    """Over pages that are not the share's own, with beams that change places and a fork that goes its own way."""
    ids = random_ids(3, 3, 30)

    def run(cache):
        out = [prefill(model, ids[:, :9], cache)]
        cache.reorder([2, 0, 1])
        out.append(decode(model, ids[:, 9:10], cache, 9))
        fork = cache.fork()
        out.append(verify_draft(model, ids[:, 10:25], cache, 10))
        cache.reorder([0, 0])
        out.append(decode(model, ids[:2, 25:26], cache, 25))
        out.append(prefill(model, ids[:, 20:30], fork, 10))
        return torch.cat([x.flatten() for x in out])

    right = run(make_cache("dict", model.config, 3))
    for got in on_ranks(3, lambda group: run(new(model.config, group, kind, 5, 3))):
        assert gap(got, right) <= TOLERANCE


@pytest.mark.parametrize("optimized", [False, True])
def test_generate_and_beams_run_as_on_one_process(model, optimized):
    this = nanokv.optimize(pair(**SHAPES["G2-untied-bias"])[1]) if optimized else model
    ids, settings = (
        random_ids(4, 1, 41)[0],
        {"max_new_tokens": 20, "eos_token_ids": [], "temperature": 1.0, "seed": 3},
    )

    def work(group):
        drawn = list(nanokv.generate(this, ids, new(model.config, group), **settings))
        beams = nanokv.beam_search(
            this,
            ids[:9],
            cache=new(model.config, group),
            beams=3,
            max_new_tokens=8,
            eos_token_ids=[],
        )
        return drawn, [beam.ids for beam in beams]

    one = make_cache("dict", model.config)
    drawn = list(nanokv.generate(this, ids, one, **settings))
    beams = nanokv.beam_search(this, ids[:9], beams=3, max_new_tokens=8, eos_token_ids=[])
    assert on_ranks(2, work) == [(drawn, [beam.ids for beam in beams])] * 2


def test_prompts_are_packed_and_guesses_are_checked_as_on_one_process(model):
    """The engine's prefill of several prompts in one forward, and speculative decoding."""
    ids = random_ids(12, 2, 30)
    prompts, settings = (
        [ids[0, :17].tolist(), ids[1, :6].tolist()],
        {"max_new_tokens": 20, "eos_token_ids": []},
    )

    def work(group):
        logits = prefill_packed(model, prompts, [new(model.config, group) for _ in prompts], [0, 0])
        guessed = nanokv.speculate(
            model, prompts[0], PromptLookup(), new(model.config, group), **settings
        )
        return logits, list(guessed)

    right = torch.cat([nanokv.score(model, [prompt])[:, -1] for prompt in prompts])
    for logits, tokens in on_ranks(2, work):
        assert gap(logits, right) <= TOLERANCE and tokens == list(
            nanokv.generate(model, prompts[0], **settings)
        )


def test_half_precision_stays_as_near_as_one_process(model):
    half = pair(**SHAPES["G2-untied-bias"])[1].to(torch.bfloat16)
    ids = random_ids(5, 1, 50)
    right, one = (
        nanokv.score(model, ids)[:, -1],
        prefill(half, ids, make_cache("dict", model.config)),
    )
    for got in on_ranks(2, lambda group: prefill(half, ids, new(model.config, group))):
        assert got.dtype == torch.bfloat16 and gap(got.float(), right) <= 1.5 * gap(
            one.float(), right
        )


def test_one_process_alone_is_a_group_too(model):
    ids = random_ids(6, 1, 12)
    cache = new(model.config, Alone())
    assert gap(prefill(model, ids, cache), nanokv.score(model, ids)[:, -1]) <= TOLERANCE
    assert cache.length == 12 and cache.nbytes == 12 * nanokv.costs.kv_bytes_per_token(
        model.config, 4
    )


# --- what a rank keeps and receives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_holds_its_share_and_a_page_at_most(model, kind, ranks):
    ids, each = random_ids(7, 1, 50), nanokv.costs.kv_bytes_per_token(model.config, 4)

    def work(group):
        cache, held = new(model.config, group, kind, page=4), []
        for start in range(0, 50, 5):
            prefill(model, ids[:, start : start + 5], cache, start)
            held.append(cache.nbytes)
        cache.truncate(17)
        return [*held, cache.nbytes], cache

    for held, cache in on_ranks(ranks, work):
        assert cache.length == 17
        if kind in ("dict", "offloaded", "paged"):  # a slab is as large as it was made, or doubles
            page = 4 * each
            for n, nbytes in zip([*range(5, 55, 5), 17], held, strict=True):
                assert abs(nbytes - n * each / ranks) <= page


def test_what_is_received_does_not_depend_on_the_length(model):
    """4·H·(D+1) bytes for each token, layer and other rank; and 24 + 4·H·T for the check, once for each forward."""
    ids, c = random_ids(8, 1, 40), model.config
    token = 4 * c.num_attention_heads * (c.head_dim + 1) * c.num_hidden_layers

    def work(group):
        cache, received = new(c, group), []
        for start, end in ((0, 1), (1, 2), (2, 38), (38, 39), (39, 40)):
            before = group.received
            prefill(model, ids[:, start:end], cache, start)
            received.append(group.received - before)
        return received, group.messages

    for received, messages in on_ranks(3, work):
        assert received == [
            2 * (24 + T * (token + 4 * c.num_attention_heads)) for T in (1, 1, 36, 1, 1)
        ]
        assert messages == 5 * (c.num_hidden_layers + 2)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sliding", "quantized", "prefix", "batch"])
def test_a_share_that_forgets_rounds_or_counts_is_refused(model, kind):
    with pytest.raises(UnsupportedError, match=f"cannot lie in a '{kind}' cache"):
        ContextCache(make_cache(kind, model.config), Alone())


def test_a_share_that_holds_something_and_a_wrong_page_are_refused(model):
    share = make_cache("dict", model.config)
    prefill(model, [[1, 2, 3]], share)
    with pytest.raises(
        CacheError, match="the share holds 3 tokens, but 0 of 0 are those of rank 0"
    ):
        ContextCache(share, Alone())
    with pytest.raises(CacheError, match="page is 0"):
        ContextCache(make_cache("dict", model.config), Alone(), page=0)


@pytest.mark.parametrize("attend", [Causal(), causal_attention, decode_attention, Split(None, 2)])
def test_another_attention_is_refused_and_does_not_take_a_share_for_the_whole(model, attend):
    """The logits of half of the keys are fluent nonsense."""

    def work(group):
        cache = new(model.config, group)
        prefill(model, [[1, 2, 3, 4, 5, 6, 7]], cache)
        with (
            pytest.raises(CacheError, match="keys of one rank's positions"),
            torch.inference_mode(),
        ):
            model(torch.tensor([[1]]), cache, 7, attend)

    on_ranks(2, work)


def test_rows_of_different_lengths_and_files_are_refused(model, tmp_path):
    with pytest.raises(UnsupportedError, match="rank 0 holds 0 of 0 positions"):
        cache = PaddedCache(new(model.config, Alone(), rows=2), [0, 1])
        prefill(model, [[1, 2]] * 2, cache, cache.length)
    with pytest.raises(UnsupportedError, match="a row of context: computes attention itself"):
        decode(model, [[1]], BatchCache([new(model.config, Alone())], model.config), 0)
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        new(model.config, Alone()).save(tmp_path / "cache")


def test_a_full_share_is_told_on_every_rank_before_anything_is_written(model):
    """Rank 0 fills first: the others would wait for it."""
    told = []

    def work(group):
        cache = new(model.config, group, "static", page=4, capacity=6)
        assert cache.capacity == 10
        prefill(model, [list(range(9))], cache)
        with pytest.raises(CapacityError, match="the ranks hold 9 of 10 tokens: 2 more do not fit"):
            prefill(model, [[1, 2]], cache, 9)
        told.append(group.rank)
        assert cache.length == 9
        return decode(model, [[9]], cache, 9)

    for got in on_ranks(2, work):
        assert gap(got, nanokv.score(model, [list(range(10))])[:, -1]) <= TOLERANCE
    assert sorted(told) == [0, 1]


@pytest.mark.parametrize("at", [0, 3, 299])
def test_ranks_that_are_fed_other_tokens_are_told(model, at):
    """One token of 300, on one rank of two."""
    prompt = random_ids(9, 1, 300)

    def work(group):
        mine = prompt.clone()
        mine[0, at] = (mine[0, at] + group.rank) % model.config.vocab_size
        prefill(model, mine, new(model.config, group))

    with pytest.raises(
        ParallelError, match=f"was fed another token than rank 0 at position {at}\n"
    ):
        on_ranks(2, work)


def test_ranks_that_sample_without_a_common_seed_are_told(model):
    def work(group):
        ids = random_ids(10, 1, 8)[0]
        return list(
            nanokv.generate(
                model,
                ids,
                new(model.config, group),
                temperature=5.0,
                eos_token_ids=[],
                max_new_tokens=20,
                seed=group.rank,
            )
        )

    with pytest.raises(ParallelError, match="sample with the same seed"):
        on_ranks(2, work)


def test_ranks_at_different_positions_are_told(model):
    def work(group):
        cache = new(model.config, group)
        prefill(model, [[1, 2, 3, 4, 5]], cache)
        cache.truncate(5 - group.rank)
        decode(model, [[1]], cache, cache.length)

    with pytest.raises(
        ParallelError,
        match="rank 1 was given 1 rows × 1 tokens at position 4, rank 0 1 rows × 1 tok",
    ):
        on_ranks(2, work)


@pytest.mark.parametrize("kind", ["dict", "static", "paged"])
def test_a_forward_that_failed_is_taken_back_and_repeated(model, kind):
    """An exception behind the second layer's append, on both ranks; truncate mends layers of different lengths."""

    def work(group):
        cache, ids = new(model.config, group, kind), random_ids(11, 1, 13)
        prefill(model, ids[:, :9], cache)
        layer = cache[2]
        layer.append = lambda k, v: 1 / 0
        with pytest.raises(ZeroDivisionError):
            prefill(model, ids[:, 9:], cache, 9)
        del layer.append
        with pytest.raises(CacheError, match="between 9 and 13 tokens"):
            prefill(model, ids[:, 9:], cache, 9)
        cache.truncate(9)
        return gap(prefill(model, ids[:, 9:], cache, 9), nanokv.score(model, ids)[:, -1])

    assert max(on_ranks(2, work)) <= TOLERANCE
