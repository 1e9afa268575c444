"""The attention of a decode step by a kernel: windows, sinks, rows of different lengths, keys in place."""

import pytest
import torch

from nanokv.attention import Causal, Decode
from nanokv.cache import make_cache
from nanokv.fast import native, optimize
from nanokv.fast.attention import KernelDecode, by_kernel
from nanokv.inference import decode, prefill
from nanokv.sinks import with_sinks
from nanokv.windows import within
from oracle import LAYERED, gap, pair, random_ids
from small_model import needs_kernels

pytestmark = needs_kernels
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def inputs(B, H, Hk, S, D, dtype=torch.float32):
    """Keys with room behind them, as in a growing cache; sinks as large as scores."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(B, H, 1, D, generator=random).to(dtype)
    k, v = torch.randn(2, B, Hk, S + 9, D, generator=random).to(dtype)[:, :, :, :S]
    return q, k, v, torch.randn(H, generator=random) + 1


def expected(q, k, v, sinks, seen):
    """By hand, in fp64; seen: how many of the last keys each row sees."""
    y = torch.zeros(q.shape, dtype=torch.float64)
    G = q.shape[1] // k.shape[1]
    for b, n in enumerate(seen):
        for h in range(q.shape[1]):
            keys, values = k[b, h // G, -n:].double(), v[b, h // G, -n:].double()
            weights = (keys @ q[b, h, 0].double() / q.shape[3] ** 0.5).exp()
            extra = 0.0 if sinks is None else float(sinks[h].double().exp())
            y[b, h, 0] = weights @ values / (weights.sum() + extra)
    return y


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("width", [None, 1, 7, 300, 5000])
@pytest.mark.parametrize("rows", [None, [700, 2, 301]])
@pytest.mark.parametrize("sizes", [(4, 2, 32), (6, 1, 20), (2, 2, 16)])
def test_window_and_sinks_over_several_parts(sizes, rows, width, dtype):
    """700 keys are three parts: a sink that counted once per part would be seen."""
    H, Hk, D = sizes
    q, k, v, sinks = inputs(3, H, Hk, 700, D, dtype)
    attend = by_kernel(Decode(rows=None if rows is None else torch.tensor(rows)))
    assert type(attend) is KernelDecode
    seen = [min(n, width or n) for n in rows or [700] * 3]
    for sink in (None, sinks):
        own = attend if sink is None else with_sinks(attend, sink)
        own = own if width is None else within(own, width)
        assert type(own) is KernelDecode
        y = own(q, k, v)
        assert y.dtype == dtype and gap(y, expected(q, k, v, sink, seen)) <= ALLOWED[dtype]


def test_a_layer_that_kept_fewer_keys_than_rows_have():
    """A cache that drops what is older than the window returns its newest keys alone."""
    q, k, v, sinks = inputs(2, 4, 2, 40, 32)
    attend = within(with_sinks(by_kernel(Decode(rows=torch.tensor([90, 12]))), sinks), 30)
    assert gap(attend(q, k, v), expected(q, k, v, sinks, [30, 12])) <= 1e-5


def test_what_the_kernel_does_not_read_goes_to_torch(monkeypatch):
    q, k, v, _ = inputs(2, 4, 2, 30, 32)
    right = Decode()(q, k, v)
    monkeypatch.setattr(native.kernels(), "attend_step", None)
    attend = by_kernel(Decode())
    scattered = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    assert torch.equal(attend(q, *scattered), right)
    with pytest.raises(RuntimeError, match="same dtype"):
        attend(q, k.double(), v.double())
    with pytest.raises(RuntimeError):  # more keys than the rows have
        by_kernel(Decode(rows=torch.tensor([29, 3])))(q, k, v)
    mask = torch.ones(2, 1, 1, 30, dtype=torch.bool)
    for other in (Causal(), Decode(mask), lambda q, k, v: q):
        assert by_kernel(other) is other


@pytest.mark.parametrize("family", ["gptoss-G2", "gemma3-G2"])
@pytest.mark.parametrize("kind", ["dict", "static", "growing", "paged"])
def test_a_step_of_the_model_calls_the_kernel_in_every_layer(family, kind, monkeypatch):
    plain = pair(**LAYERED[family])[1]
    fast, ids = optimize(plain), random_ids(3, 1, 20)
    calls, right = [], native.kernels().attend_step
    monkeypatch.setattr(
        native.kernels(), "attend_step", lambda *given: (calls.append(1), right(*given))
    )
    logits = []
    for model in (plain, fast):
        cache = make_cache(kind, model.config, 1, 32)
        prefill(model, ids, cache)
        logits.append(decode(model, ids[:, :1], cache, 20))
    assert len(calls) == plain.config.num_hidden_layers and gap(*logits) <= 3e-5
