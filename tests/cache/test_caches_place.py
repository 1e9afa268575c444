"""Keys and values where they lie: `pages` of caches in place, and many requests over one pool as one batch.

The attention here reads pages one token at a time, as a kernel would; the reference is the dense `append`.
"""

import math
import os

import pytest
import torch

import nanokv
from nanokv.attention import decode_attention
from nanokv.cache import CACHES, BatchCache, make_cache
from nanokv.cache.batch import BatchLayer
from nanokv.cache.paged_batch import PagedBatch, PagedBatchLayer
from nanokv.cache.pool import ElasticPool, PagePool
from nanokv.errors import CacheError, CapacityError
from nanokv.inference import decode, prefill, score
from oracle import SHAPES, TOLERANCE, gap, pair, put, random_ids, whole_again

pytestmark = pytest.mark.sampled

PAGE = 4


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


@pytest.fixture
def pool(model):
    """24 pages of 4 tokens."""
    with whole_again(PagePool(model.config, 24, PAGE)) as pool:
        yield pool


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read_pages(q, pages):
    """(B,H,1,D) and Pages → (B,H,1,D): every key looked up on its own."""
    size, G, out = pages.keys.shape[2], q.shape[1] // pages.keys.shape[1], []
    for b, length in enumerate(pages.lengths.tolist()):
        row = [b] if pages.table is None else pages.table[b].tolist()
        places = [(row[s // size], s % size) for s in range(length)]
        # (Hk,S,D).
        k, v = (
            torch.stack([x[p, :, slot] for p, slot in places], 1)
            for x in (pages.keys, pages.values)
        )
        k, v = (x.repeat_interleave(G, 0) for x in (k, v))  # (H,S,D)
        out.append((q[b] @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)
    return torch.stack(out)


def fill(model, pool, lengths, name="paged"):
    rows = []
    for b, length in enumerate(lengths):
        rows.append(make_cache(name, model.config, pool=pool))
        if length:
            prefill(model, random_ids(b, 1, length), rows[-1])
    return rows


def state_of(rows):
    return [{name: x.clone() for name, x in layer.state().items()} for row in rows for layer in row]


def equal(a, b):
    return all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        for x, y in zip(a, b, strict=True)
    )


def test_pages_are_append_without_the_copy(model, pool):
    """Over page boundaries and in shared pages: same content, same lengths, and the table says where."""
    one = make_cache("paged", model.config, batch_size=2, pool=pool)
    prefill(model, random_ids(0, 2, 6), one)
    two = one.fork()
    for step in range(5):
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            k, v = randn(step * 9 + i, 2, 2, 1, 32), randn(step * 9 + i + 5, 2, 2, 1, 32)
            keys, values = a.append(k, v)
            pages = put(b, k, v)
            assert pages.lengths.tolist() == [6 + step + 1] * 2
            assert pages.table.dtype == torch.int32
            assert pages.keys.data_ptr() == pool.keys[i].data_ptr()  # where they lie, not a copy
            q = randn(99, 2, 4, 1, 32)
            assert gap(read_pages(q, pages), decode_attention(q, keys, values)) <= TOLERANCE
        assert two.length == one.length
    assert equal(state_of([one]), state_of([two]))


def test_the_tables_are_made_once_a_page_and_not_once_a_layer(model, pool):
    cache = make_cache("paged", model.config, pool=pool)
    prefill(model, random_ids(0, 1, 5), cache)
    k = randn(1, 1, 2, 1, 32)
    first = [put(layer, k, k) for layer in cache]
    assert (
        len({id(pages.table) for pages in first})
        == len({id(pages.lengths) for pages in first})
        == 1
    )
    again = [put(layer, k, k) for layer in cache]
    # So what a kernel made of them can be kept.
    assert all(a is b for a, b in zip(first, again, strict=True))
    for _ in range(2):
        last = [put(layer, k, k) for layer in cache]
    # 9 tokens: a third page, in a table that has room for it.
    assert last[0] is first[0] and last[0].table[0, :3].tolist() == cache.tables[0]
    for _ in range(64):
        last = [put(layer, k, k) for layer in cache]
    assert last[0] is not first[0] and last[0].table[0, :19].tolist() == cache.tables[0]


def test_pages_equal_the_rows_own_appends(model, pool):
    """What a kernel does: it writes key and value to the last place of each row itself."""
    rows = fill(model, pool, (7, 3))
    other = [row.fork() for row in rows]
    for batch, write in (
        (PagedBatch(rows, model.config), put),
        (BatchCache(other, model.config), BatchLayer.append),
    ):
        for step in range(6):
            for i, layer in enumerate(batch):
                write(layer, randn(step * 9 + i, 2, 2, 1, 32), randn(step * 9 + i + 5, 2, 2, 1, 32))
    assert [row.length for row in rows] == [13, 9]
    assert equal(state_of(rows), state_of(other))


@pytest.mark.parametrize("lengths", [(5, 14, 1, 8), (6, 6, 6), (3,), (0, 4)], ids=str)
def test_a_paged_batch_equals_the_dense_batch(model, pool, lengths):
    rows = fill(model, pool, lengths)
    dense, paged = (
        BatchCache([row.fork() for row in rows], model.config),
        PagedBatch(rows, model.config),
    )
    B = len(lengths)
    for step in range(6):
        mask = dense.mask(1)
        for i, (a, b) in enumerate(zip(dense, paged, strict=True)):
            k, v, q = (
                randn(step * 9 + i, B, 2, 1, 32),
                randn(step * 9 + i + 5, B, 2, 1, 32),
                randn(7, B, 4, 1, 32),
            )
            keys, values = a.append(k, v)
            assert (
                gap(read_pages(q, put(b, k, v)), decode_attention(q, keys, values, mask))
                <= TOLERANCE
            )
        assert torch.equal(torch.as_tensor(paged.length), torch.as_tensor(dense.length))
    assert equal(state_of(rows), state_of(dense.rows))
    assert paged.nbytes >= dense[0].nbytes


@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("lengths", [(5, 14, 1, 8), (6, 6, 6), (0, 4)], ids=str)
def test_the_plain_model_runs_over_a_paged_batch(model, pool, lengths, T):
    rows = fill(model, pool, lengths)
    dense, paged = (
        BatchCache([row.fork() for row in rows], model.config),
        PagedBatch(rows, model.config),
    )
    a, b = dense.mask(T), paged.mask(T)
    assert (a is None) == (b is None)
    assert a is None or torch.equal(
        a.expand(len(lengths), 1, *a.shape[-2:]), b.expand(len(lengths), 1, *a.shape[-2:])
    )
    ids, step = random_ids(40, len(lengths), T), decode if T == 1 else prefill
    expected = step(model, ids, dense, dense.length)
    assert gap(step(model, ids, paged, paged.length), expected) <= TOLERANCE
    assert equal(state_of(rows), state_of(dense.rows))


@pytest.mark.parametrize("path", [put, PagedBatchLayer.append], ids=["pages", "append"])
def test_a_paged_batch_takes_pages_for_all_rows_or_for_none(model, path):
    pool = PagePool(model.config, 5, PAGE)
    rows = fill(model, pool, (8, 4, 4))  # 4 of 5 pages, all full: three more are needed
    batch, before = (
        PagedBatch(rows, model.config),
        (list(pool.references), [list(row.tables[0]) for row in rows]),
    )
    k = randn(0, 3, 2, 1, 32)
    with pytest.raises(CapacityError, match="3 pages of 4 tokens wanted, 1 of 5 free"):
        path(batch[0], k, k)
    assert (list(pool.references), batch.tables) == before
    assert [row.length for row in rows] == [8, 4, 4]


def test_a_failed_step_is_undone_by_truncating_each_row(model, pool, monkeypatch):
    """Two layers have the new token, one has not; afterwards pages, lengths and answers are as without the failure."""
    rows = fill(model, pool, (7, 4, 12))
    clean = BatchCache([row.fork() for row in rows], model.config)
    batch, k, books = PagedBatch(rows, model.config), randn(0, 3, 2, 1, 32), None
    for layer in list(batch)[:2]:
        put(layer, k, k)
    with pytest.raises(CacheError, match="failed half-way"):
        _ = batch.length
    for row, n in zip(rows, (7, 4, 12), strict=True):
        row.truncate(n)
    books = [len(row.tables[0]) for row in rows]
    assert books == [2, 1, 3]
    assert batch.length.tolist() == [7, 4, 12]
    ids = random_ids(50, 3, 1)
    assert (
        gap(decode(model, ids, batch, batch.length), decode(model, ids, clean, clean.length))
        <= TOLERANCE
    )


def test_rows_of_a_paged_batch_that_share_pages_copy_before_they_write(model, pool):
    """Both rows stand in the middle of one page: one of them must get a copy, and only one."""
    row = fill(model, pool, (6,))[0]
    batch, k = PagedBatch([row, row.fork()], model.config), randn(0, 2, 2, 1, 32)
    pages = [put(layer, k, k) for layer in batch]
    assert len(pool.free) == 24 - 3
    assert pages[0].table[0, 0] == pages[0].table[1, 0]
    for layer in batch:
        for b, part in enumerate(layer.parts):
            assert torch.equal(part.state()["key"][0, :, -1], k[b, :, 0])


def test_rows_come_and_go(model, pool):
    """Continuous batching: a batch is made anew for each step, and from rows that moved on alone in between."""
    rows = fill(model, pool, (7, 4, 12))
    alone = [row.fork() for row in rows]
    for members in ([0, 1, 2], [2, 0], [1], [0, 1, 2]):
        batch, ids = (
            PagedBatch([rows[b] for b in members], model.config),
            random_ids(60 + len(members), 3, 1),
        )
        logits = decode(model, ids[members], batch, batch.length)
        for i, b in enumerate(members):
            expected = decode(model, ids[b : b + 1], alone[b], alone[b].length)
            assert gap(logits[i : i + 1], expected) <= TOLERANCE
    batch = PagedBatch(rows, model.config).fork()
    batch.reorder([1, 1])
    assert type(batch) is PagedBatch and batch.length == rows[1].length
    decode(model, random_ids(70, 2, 1), batch, batch.length)
    assert rows[1].length + 1 == batch.length


def test_what_is_no_paged_row_over_the_same_pool_is_refused(model, pool):
    row = fill(model, pool, (3,))[0]
    for other in (
        make_cache("dict", model.config),
        make_cache("paged", model.config, page=PAGE),
        make_cache("paged", model.config, batch_size=2, pool=pool),
    ):
        with pytest.raises(CacheError, match="one sequence over one pool"):
            PagedBatch([row, other], model.config)
    with pytest.raises(CacheError, match="two rows"):
        PagedBatch([row, row], model.config)


def test_a_pool_that_grows_under_a_view_moves_the_view(model):
    """Another cache takes pages, all memory moves, and the next step must not write where the pages were."""
    pool = ElasticPool(model.config, 2, PAGE)
    cache, other = (make_cache("paged", model.config, pool=pool) for _ in range(2))
    k = randn(0, 1, 2, 1, 32)
    for layer in cache:
        put(layer, k, k)
    prefill(model, random_ids(1, 1, 40), other)
    pages = [put(layer, 2 * k, 2 * k) for layer in cache]
    assert pages[0].keys.data_ptr() == pool.keys[0].data_ptr()
    assert torch.equal(cache[2].state()["key"], torch.cat((k, 2 * k), 2))


def test_a_view_made_in_inference_mode_serves_outside(model, pool):
    rows = fill(model, pool, (3, 5))
    batch, ids = PagedBatch(rows, model.config), random_ids(80, 2, 1)
    decode(model, ids, batch, batch.length)
    k = randn(0, 2, 2, 1, 32)
    for layer in batch:
        put(layer, k, k)
    assert batch.length.tolist() == [5, 7]


def test_in_place_kinds_say_so(model, pool):
    one, two = torch.empty(1, 2, 1, 32), torch.empty(2, 2, 1, 32)
    for name in CACHES:
        cache = make_cache(name, model.config, batch_size=2, capacity=16)
        assert (cache.pages(two) is not None) == (
            name in ("paged", "prefix", "static", "growing")
        ), name
        assert (cache[0].pages(two) is not None) == (
            name in ("paged", "prefix", "static", "growing")
        ), name
    rows = [make_cache("paged", model.config, pool=pool) for _ in range(2)]
    assert len(PagedBatch(rows, model.config).pages(two)) == 3, (
        "a batch of paged rows is read where it lies"
    )
    assert len(rows[0].pages(one)) == 3


@pytest.mark.parametrize("where", ["a layer of a row", "a layer of the batch"])
def test_a_wrapped_layer_of_a_paged_batch_is_not_passed_by(model, pool, where):
    rows = fill(model, pool, (7, 3))
    clean, calls = BatchCache([row.fork() for row in rows], model.config), []
    batch = PagedBatch(rows, model.config)
    layer = batch[1].parts[0] if where == "a layer of a row" else batch[1]
    layer.append = lambda k, v, right=layer.append: calls.append(len(k)) or right(k, v)
    assert batch.pages(torch.empty(2, 2, 1, 32)) is None and batch.length.tolist() == [7, 3]
    ids, fast = random_ids(50, 2, 1), nanokv.optimize(pair(**SHAPES["G2-untied-bias"])[1])
    assert (
        gap(decode(fast, ids, batch, batch.length), decode(model, ids, clean, clean.length))
        <= TOLERANCE
    )
    assert calls == [1 if where == "a layer of a row" else 2]


@pytest.mark.parametrize("to", ["disk", "host"])
def test_an_offloaded_cache_keeps_its_tokens_when_its_store_grows(model, to):
    """The host's store begins with 64 tokens and doubles."""
    ids, cache = random_ids(9, 1, 140), make_cache("offloaded", model.config, to=to)
    expected = score(model, ids)
    for start, end in ((0, 60), (60, 70), (70, 130), (130, 140)):
        assert (
            gap(prefill(model, ids[:, start:end], cache, start_pos=start), expected[:, end - 1])
            <= TOLERANCE
        )


def test_an_offloaded_cache_where_a_file_has_one_position_only(model, monkeypatch):
    """Windows has neither os.pwrite nor os.preadv."""
    for name in ("pwrite", "preadv"):
        monkeypatch.delattr(os, name)
    ids, cache = random_ids(9, 1, 12), make_cache("offloaded", model.config, to="disk")
    expected = score(model, ids)
    for start, end in ((0, 9), (9, 10), (10, 12)):
        assert (
            gap(prefill(model, ids[:, start:end], cache, start_pos=start), expected[:, end - 1])
            <= TOLERANCE
        )
