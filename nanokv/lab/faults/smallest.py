"""The smallest test that catches each fault: it passes on correct code and fails while the fault is
injected.

Each test is a function of a model that uses only public names and is short enough to read at a
glance (`inspect.getsource(nanokv.faults.smallest_test(name))`). Eighteen tests catch all faults,
because a test needs the situation in which a bug shows, and several bugs share one. The ids are
arbitrary.
"""

from collections.abc import Callable
from typing import Any

import torch

import nanokv
from nanokv.checkpoint import Model
from nanokv.lab.faults.injection import find
from nanokv.lab.faults.sinks import SinkCache
from nanokv.lab.faults.twins import sharing_keys, with_states


def decode_equals_score(model: Model) -> None:
    """Decoding with a cache gives the logits that the model gives without one."""
    ids = torch.arange(2, 14)[None]  # (1,12)
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :10], cache, start_pos=0)
    nanokv.decode(model, ids[:, 10:11], cache, start_pos=10)
    logits = nanokv.decode(model, ids[:, 11:], cache, start_pos=11)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def decode_equals_score_far_out(model: Model) -> None:
    """The same at position 40, which a short test never reaches."""
    ids = torch.arange(2, 43)[None]  # (1,41)
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :40], cache, start_pos=0)
    logits = nanokv.decode(model, ids[:, 40:], cache, start_pos=40)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def two_chunks_equal_score(model: Model) -> None:
    """The second chunk attends to all of the first one, and causally to itself."""
    ids = torch.arange(2, 14)[None]
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :7], cache, start_pos=0)
    logits = nanokv.prefill(model, ids[:, 7:], cache, start_pos=7)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def rows_answer_as_alone(model: Model) -> None:
    """Prompts of different lengths, in one batch and one by one; the longest is not the first."""
    prompts = [[2, 3, 4], [5, 6, 7, 8, 9, 10], [11]]
    together = nanokv.generate_padded(model, prompts, max_new_tokens=12, eos_token_ids=[])
    for prompt, answer in zip(prompts, together, strict=True):
        alone = nanokv.generate(model, prompt, max_new_tokens=12, eos_token_ids=[])
        assert answer == list(alone)


def rows_change_places(model: Model) -> None:
    """After reorder, each row continues from the cache of the row that it was assigned."""
    ids = torch.tensor([[2, 3, 4, 5], [6, 7, 8, 9]])
    cache = nanokv.make_cache("dict", model.config, batch_size=2)
    nanokv.prefill(model, ids[:, :3], cache, start_pos=0)
    cache.reorder([1, 0])
    logits = nanokv.decode(model, ids[[1, 0], 3:], cache, start_pos=3)
    assert torch.allclose(logits, nanokv.score(model, ids[[1, 0]])[:, -1], atol=1e-3)


def second_request_equals_score(model: Model) -> None:
    """A new cache has nothing of the previous request."""
    for ids in (torch.arange(2, 8)[None], torch.arange(20, 26)[None]):
        cache = nanokv.make_cache("dict", model.config)
        logits = nanokv.prefill(model, ids, cache, start_pos=0)
        assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def two_requests_at_once(model: Model) -> None:
    """A request continues correctly after another request was prefilled."""
    ids = torch.arange(2, 8)[None]
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :5], cache, start_pos=0)
    another = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, torch.arange(20, 26)[None], another, start_pos=0)
    logits = nanokv.decode(model, ids[:, 5:], cache, start_pos=5)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def truncate_forgets(model: Model) -> None:
    """Truncated tokens have no effect on later logits."""
    ids = torch.arange(2, 8)[None]
    guess = torch.arange(20, 24)[None]
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :5], cache, start_pos=0)
    nanokv.prefill(model, guess, cache, start_pos=5)
    cache.truncate(5)
    logits = nanokv.decode(model, ids[:, 5:], cache, start_pos=5)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def full_cache_refuses(model: Model) -> None:
    """One token more than the capacity raises CapacityError and is not dropped."""
    cache = nanokv.make_cache("static", model.config, capacity=6)
    nanokv.prefill(model, torch.arange(2, 8)[None], cache, start_pos=0)
    try:
        nanokv.decode(model, torch.tensor([[8]]), cache, start_pos=6)
    except nanokv.errors.CapacityError:
        return
    raise AssertionError("a full cache took another token")


def bytes_equal_the_formula(model: Model) -> None:
    """The cache holds exactly 2·L·Hk·D values per token."""
    config = model.config
    cache = nanokv.make_cache("dict", config)
    nanokv.prefill(model, torch.arange(2, 12)[None], cache, start_pos=0)
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 10
    assert cache.nbytes == values * model.embed_tokens.weight.element_size()


def forgotten_tokens_count(model: Model) -> None:
    """The position after 12 tokens is 12, although the cache keeps 8 of them."""
    cache = nanokv.make_cache("evicting", model.config, budget=8)
    nanokv.prefill(model, torch.arange(2, 14)[None], cache, start_pos=0)
    assert cache.length == 12


def parts_do_not_matter(model: Model) -> None:
    """Attention with a sink over one part of the keys, and over four."""
    ids = torch.arange(2, 14)[None]
    whole = SinkCache(nanokv.make_cache("dict", model.config), model.config, parts=1)
    split = SinkCache(nanokv.make_cache("dict", model.config), model.config, parts=4)
    expected = nanokv.prefill(model, ids, whole, start_pos=0)
    logits = nanokv.prefill(model, ids, split, start_pos=0)
    assert torch.allclose(logits, expected, atol=1e-3)


def a_state_forgets_a_draft(model: Model) -> None:
    """Truncated tokens have no effect on a recurrent state."""
    twin = with_states(model)
    ids = torch.arange(2, 8)[None]
    cache = nanokv.make_cache("dict", twin.config)
    nanokv.prefill(twin, ids[:, :5], cache, start_pos=0)
    nanokv.prefill(twin, torch.arange(20, 24)[None], cache, start_pos=5)
    cache.truncate(5)
    logits = nanokv.decode(twin, ids[:, 5:], cache, start_pos=5)
    assert torch.allclose(logits, nanokv.score(twin, ids)[:, -1], atol=1e-3)


def a_state_goes_on(model: Model) -> None:
    """The second chunk starts from the recurrent state after the first one."""
    twin = with_states(model)
    ids = torch.arange(2, 14)[None]
    cache = nanokv.make_cache("dict", twin.config)
    nanokv.prefill(twin, ids[:, :7], cache, start_pos=0)
    logits = nanokv.prefill(twin, ids[:, 7:], cache, start_pos=7)
    assert torch.allclose(logits, nanokv.score(twin, ids)[:, -1], atol=1e-3)


def shared_keys_equal_score(model: Model) -> None:
    """Layers that share keys give the same logits with a cache and without one."""
    twin = sharing_keys(model)
    ids = torch.arange(2, 14)[None]
    cache = nanokv.make_cache("dict", twin.config)
    logits = nanokv.prefill(twin, ids, cache, start_pos=0)
    assert torch.allclose(logits, nanokv.score(twin, ids)[:, -1], atol=1e-3)


def adapters_share_no_pages(model: Model) -> None:
    """The tokens that one adapter computed are not found for another one."""
    ids = torch.arange(2, 14)
    mine: Any = nanokv.make_cache("prefix", model.config, page=4, salt="one adapter")
    nanokv.prefill(model, ids[None], mine, start_pos=0)
    mine.remember(ids)
    other: Any = nanokv.make_cache("prefix", model.config, pool=mine.pool, salt="another")
    assert other.reuse(ids) == 0


def twins_keep_their_pages(model: Model) -> None:
    """Of two requests that computed one prompt, the second goes on while a third begins."""
    ids = torch.arange(2, 11)[None]
    first: Any = nanokv.make_cache("prefix", model.config, page=4)
    second: Any = nanokv.make_cache("prefix", model.config, pool=first.pool)
    third = nanokv.make_cache("prefix", model.config, pool=first.pool)
    for cache in (first, second):
        nanokv.prefill(model, ids[:, :8], cache, start_pos=0)
    for cache in (first, second):
        cache.remember(ids[0, :8])
    nanokv.prefill(model, torch.arange(20, 28)[None], third, start_pos=0)
    logits = nanokv.decode(model, ids[:, 8:], second, start_pos=8)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def known_beginning_is_found(model: Model) -> None:
    """Of 12 stored tokens, a prompt that begins with 10 of them finds two pages of 4."""
    ids = torch.arange(2, 14)
    first: Any = nanokv.make_cache("prefix", model.config, page=4)
    nanokv.prefill(model, ids[None], first, start_pos=0)
    first.remember(ids)
    second: Any = nanokv.make_cache("prefix", model.config, pool=first.pool)
    assert second.reuse(ids[:10]) == 8


SMALLEST = {  # decode_equals_score catches all other faults
    "rope_table_too_short": decode_equals_score_far_out,
    "square_mask": two_chunks_equal_score,
    "top_left_mask": two_chunks_equal_score,
    "no_mask_on_chunk": two_chunks_equal_score,
    "right_padding": rows_answer_as_alone,
    "offset_advanced_in_place": rows_answer_as_alone,
    "mask_of_row_0": rows_answer_as_alone,
    "reorder_ignored": rows_change_places,
    "not_cleared": second_request_equals_score,
    "shared_between_requests": two_requests_at_once,
    "truncate_keeps_rows": truncate_forgets,
    "static_overflow": full_cache_refuses,
    "entries_as_position": forgotten_tokens_count,
    "sink_per_part": parts_do_not_matter,
    "draft_stays_in_state": a_state_forgets_a_draft,
    "chunk_from_empty_state": a_state_goes_on,
    "shared_keys_rotated_twice": shared_keys_equal_score,
    "page_key_without_adapter": adapters_share_no_pages,
    "page_freed_in_use": twins_keep_their_pages,
    "prefix_never_eligible": known_beginning_is_found,
    "cached_queries": bytes_equal_the_formula,
    "repeated_before_caching": bytes_equal_the_formula,
}


def smallest_test(name: str) -> Callable[[Model], None]:
    """The test of a fault: a function of a model that raises AssertionError, or the error of the
    broken code."""
    return SMALLEST.get(find(name).name, decode_equals_score)
