"""Attention over parts of the keys, merged by log-sum-exp: equal to torch's attention over all keys at once.

The oracle for the outputs is torch's scaled_dot_product_attention, for the log-sum-exp torch's flash kernel, and for
both one case by hand.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import nanokv.parallel.merge
from nanokv.attention import causal_mask
from nanokv.errors import CacheError
from nanokv.parallel.merge import Split, merge, partial_attention

HEADS = [(4, 4), (6, 2), (4, 1)]
D = 16


def qkv(H, Hk, T, S, B=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(H * 1000 + T * 100 + S)
    return [
        torch.randn(B, h, n, D, generator=generator).to(dtype)
        for h, n in ((H, T), (Hk, S), (Hk, S))
    ]


def torchs(q, k, v, mask=None):
    """torch's own, over all keys at once, every KV head repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def gap(a, b) -> float:
    return float((a - b).abs().max())


def ragged(T, S, B=3):
    """(B,1,T,S): causal, and row b does not see its first 3·b keys."""
    hidden = torch.arange(S) < 3 * torch.arange(B)[:, None, None, None]  # (B,1,1,S)
    return torch.ones(T, S, dtype=torch.bool).tril(S - T) & ~hidden


def merged(q, k, v, mask, sets):
    """The keys dealt out to `sets` of positions, each attended to alone."""
    some = [(k[:, :, at], v[:, :, at], None if mask is None else mask[..., at]) for at in sets]
    return merge(
        *map(torch.stack, zip(*(partial_attention(q, *part) for part in some), strict=True))
    )


def test_two_numbers_by_hand():
    """Scores ln 1 and ln 3, values 10 and 2: the weights are 1/4 and 3/4, so the whole is 4."""
    outputs, lse = (
        torch.tensor([10.0, 2.0]).view(2, 1, 1, 1, 1),
        torch.tensor([1.0, 3.0]).log().view(2, 1, 1, 1),
    )
    assert merge(outputs, lse).item() == pytest.approx(4)
    # two parts of several keys each: weights 1 and 2 on 30 and 3, then 4 and 5 on 0 and 9, of 12 in all
    outputs = torch.tensor([(1 * 30 + 2 * 3) / 3, (4 * 0 + 5 * 9) / 9]).view(2, 1, 1, 1, 1)
    lse = torch.tensor([math.log(3), math.log(9)]).view(2, 1, 1, 1)
    assert merge(outputs, lse).item() == pytest.approx((30 + 6 + 45) / 12)


@pytest.mark.parametrize(("H", "Hk"), HEADS)
@pytest.mark.parametrize(("T", "S"), [(1, 23), (5, 23), (7, 7)])
def test_the_log_sum_exp_is_the_one_of_torchs_flash_kernel(H, Hk, T, S):
    q, k, v = qkv(H, Hk, T, S)
    whole = [x.repeat_interleave(H // Hk, 1) for x in (k, v)]
    outputs, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *whole, 0.0, False)
    ours = partial_attention(q, k, v)
    assert gap(ours[0], outputs) <= 1e-6 and gap(ours[1], lse) <= 2e-6


@pytest.mark.parametrize(("H", "Hk"), HEADS)
@pytest.mark.parametrize(("T", "S"), [(1, 23), (5, 23), (7, 7)])
@pytest.mark.parametrize("mask", [None, causal_mask, ragged], ids=["all", "causal", "ragged"])
@pytest.mark.parametrize("n", [1, 2, 5, 40])  # 40: more parts than keys, some are empty
def test_parts_are_the_whole(H, Hk, T, S, mask, n):
    q, k, v = qkv(H, Hk, T, S)
    mask = mask and mask(T, S)
    if mask is not None and mask.dim() == 4 and T == S:
        # A query that sees nothing has a test of its own.
        mask = mask | torch.eye(T, dtype=torch.bool)
    assert gap(Split(mask, n)(q, k, v), torchs(q, k, v, mask)) <= 1e-6


@pytest.mark.parametrize(("H", "Hk"), HEADS)
def test_the_positions_may_be_dealt_out_in_any_order(H, Hk):
    """As context parallelism does, page by page; one of the ranks has none, another one late positions only."""
    q, k, v = qkv(H, Hk, 6, 20)
    mask, order = ragged(6, 20), torch.randperm(20, generator=torch.Generator().manual_seed(1))
    sets = [order[:3], order[3:3], order[3:12], order[12:]]
    right = torchs(q, k, v, mask)
    assert gap(merged(q, k, v, mask, sets), right) <= 1e-6
    assert gap(merged(q, k, v, mask, sets[::-1]), right) <= 1e-6
    late = [torch.arange(16), torch.arange(16, 20)]  # the first queries see none of 17 … 19
    assert gap(merged(q, k, v, mask, late), right) <= 1e-6


def test_a_part_that_is_hidden_from_everybody_counts_nothing():
    q, k, v = qkv(4, 2, 3, 12)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[:, 4:8] = False
    v[:, :, 4:8] = 1e30  # what a page holds that nobody has written
    assert gap(Split(mask, 3)(q, k, v), torchs(q, k, v, mask)) <= 1e-6
    outputs, lse = partial_attention(q, k[:, :, 4:8], v[:, :, 4:8], mask[:, 4:8])
    assert outputs.abs().max() == 0 and (lse == -torch.inf).all()


def test_a_query_that_sees_nothing_gets_zero_as_from_torch():
    q, k, v = qkv(4, 2, 3, 12)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1] = False
    ours, right = Split(mask, 3)(q, k, v), torchs(q, k, v, mask)
    assert (
        ours[:, :, 1].abs().max() == 0
        and right[:, :, 1].abs().max() == 0
        and gap(ours, right) <= 1e-6
    )


def test_a_part_without_keys_may_come_with_any_output():
    """Other people's kernels give NaN there."""
    outputs, lse = torch.tensor([torch.nan, 7.0]), torch.tensor([-torch.inf, 0.5])
    assert merge(outputs.view(2, 1, 1, 1, 1), lse.view(2, 1, 1, 1)).item() == 7


def test_large_scores_do_not_overflow():
    """exp(200) is no float32: only differences may be taken to the power."""
    q, k, v = qkv(4, 2, 1, 9)
    assert gap(Split(None, 3)(100 * q, k, v), torchs(100 * q, k, v)) <= 1e-5


@pytest.mark.parametrize("mask", [None, causal_mask, ragged], ids=["all", "causal", "ragged"])
def test_many_queries_go_in_blocks(mask, monkeypatch):
    """So that the scores of a long prompt are never in memory all at once."""
    q, k, v = qkv(6, 2, 11, 23)
    mask = mask and mask(11, 23)
    sizes = []

    def small_blocks(q, S):
        sizes.append(q.shape[2])
        return [(0, 4), (4, 8), (8, 11)] if q.shape[2] == 11 else [(0, q.shape[2])]

    monkeypatch.setattr(nanokv.parallel.merge, "row_blocks", small_blocks)
    assert gap(partial_attention(q, k, v, mask)[0], torchs(q, k, v, mask)) <= 1e-6 and sizes == [
        11,
        4,
        4,
        3,
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_fp32_and_rounded_once(dtype):
    q, k, v = qkv(4, 2, 5, 23, dtype=dtype)
    ours, right = (
        Split(causal_mask(5, 23), 4)(q, k, v),
        torchs(q.float(), k.float(), v.float(), causal_mask(5, 23)),
    )
    assert ours.dtype == dtype
    assert gap(ours.float(), right) <= torch.finfo(dtype).eps * float(right.abs().max())


def test_what_does_not_fit_is_refused():
    q, k, v = qkv(4, 2, 3, 12)
    with pytest.raises(CacheError, match="got 12 keys, but the mask has 11 columns"):
        Split(causal_mask(3, 11), 2)(q, k, v)
    for n in (0, -1, 2.0, True):
        with pytest.raises(CacheError, match=f"n is {n}"):
            Split(None, n)
