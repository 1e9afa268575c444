"""The smallest test that catches each fault: passes on right code and fails while the fault is injected.

Each is a function of a model that uses nothing but public names, short enough to read at a glance
(`inspect.getsource(nanokv.faults.smallest_test(name))`). Ten tests catch all faults: what a bug needs is not a test of
its own but the situation in which it shows. The ids mean nothing; any would do.
"""

import torch

import nanokv
from nanokv.lab.faults.injection import find


def decode_equals_score(model):
    """The path from the cache gives the logits that the model gives without one."""
    ids = torch.arange(2, 14)[None]  # (1,12)
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :10], cache, start_pos=0)
    nanokv.decode(model, ids[:, 10:11], cache, start_pos=10)
    logits = nanokv.decode(model, ids[:, 11:], cache, start_pos=11)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def decode_equals_score_far_out(model):
    """The same, at a position that a short test never reaches."""
    ids = torch.arange(2, 43)[None]  # (1,41)
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :40], cache, start_pos=0)
    logits = nanokv.decode(model, ids[:, 40:], cache, start_pos=40)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def two_chunks_equal_score(model):
    """A chunk that comes after another one sees all of it, and nothing of its own future."""
    ids = torch.arange(2, 14)[None]
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :7], cache, start_pos=0)
    logits = nanokv.prefill(model, ids[:, 7:], cache, start_pos=7)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def rows_answer_as_alone(model):
    """Prompts of different lengths, in one batch and one by one; the longest is not the first."""
    prompts = [[2, 3, 4], [5, 6, 7, 8, 9, 10], [11]]
    options = {"max_new_tokens": 12, "eos_token_ids": []}
    alone = [list(nanokv.generate(model, prompt, **options)) for prompt in prompts]
    assert nanokv.generate_padded(model, prompts, **options) == alone


def rows_change_places(model):
    """After reorder, each row goes on with the past of the row that it became."""
    ids = torch.tensor([[2, 3, 4, 5], [6, 7, 8, 9]])
    cache = nanokv.make_cache("dict", model.config, batch_size=2)
    nanokv.prefill(model, ids[:, :3], cache, start_pos=0)
    cache.reorder([1, 0])
    logits = nanokv.decode(model, ids[[1, 0], 3:], cache, start_pos=3)
    assert torch.allclose(logits, nanokv.score(model, ids[[1, 0]])[:, -1], atol=1e-3)


def second_request_equals_score(model):
    """A new cache knows nothing of the request before."""
    for ids in (torch.arange(2, 8)[None], torch.arange(20, 26)[None]):
        cache = nanokv.make_cache("dict", model.config)
        logits = nanokv.prefill(model, ids, cache, start_pos=0)
        assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def two_requests_at_once(model):
    """One request goes on after another one was read."""
    ids = torch.arange(2, 8)[None]
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :5], cache, start_pos=0)
    another = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, torch.arange(20, 26)[None], another, start_pos=0)
    logits = nanokv.decode(model, ids[:, 5:], cache, start_pos=5)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def truncate_forgets(model):
    """Tokens that were taken back leave no trace."""
    ids = torch.arange(2, 8)[None]
    guess = torch.arange(20, 24)[None]
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, ids[:, :5], cache, start_pos=0)
    nanokv.prefill(model, guess, cache, start_pos=5)
    cache.truncate(5)
    logits = nanokv.decode(model, ids[:, 5:], cache, start_pos=5)
    assert torch.allclose(logits, nanokv.score(model, ids)[:, -1], atol=1e-3)


def full_cache_refuses(model):
    """One token more than fits is an error, not a token less."""
    cache = nanokv.make_cache("static", model.config, capacity=6)
    nanokv.prefill(model, torch.arange(2, 8)[None], cache, start_pos=0)
    try:
        nanokv.decode(model, torch.tensor([[8]]), cache, start_pos=6)
    except nanokv.errors.CapacityError:
        return
    raise AssertionError("a full cache took another token")


def bytes_equal_the_formula(model):
    """2·L·Hk·D values per token, and not one more."""
    config = model.config
    cache = nanokv.make_cache("dict", config)
    nanokv.prefill(model, torch.arange(2, 12)[None], cache, start_pos=0)
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 10
    assert cache.nbytes == values * model.embed_tokens.weight.element_size()


SMALLEST = {  # the rest are caught by decode_equals_score
    "rope_table_too_short": decode_equals_score_far_out,
    "square_mask": two_chunks_equal_score,
    "top_left_mask": two_chunks_equal_score,
    "no_mask_on_chunk": two_chunks_equal_score,
    "right_padding": rows_answer_as_alone,
    "mask_of_row_0": rows_answer_as_alone,
    "reorder_ignored": rows_change_places,
    "not_cleared": second_request_equals_score,
    "shared_between_requests": two_requests_at_once,
    "truncate_keeps_rows": truncate_forgets,
    "static_overflow": full_cache_refuses,
    "cached_queries": bytes_equal_the_formula,
    "repeated_before_caching": bytes_equal_the_formula,
}


def smallest_test(name: str):
    """The test of a fault, as a function of a model that raises AssertionError or whatever the broken code raises."""
    return SMALLEST.get(find(name).name, decode_equals_score)
