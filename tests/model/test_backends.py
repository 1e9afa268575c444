"""Which kernel of a GPU computes attention, decided where there is no GPU: what torch would be told, and the values.

A CPU stands in: `chooses` says yes, what torch answers about its kernels is given, and its two operators for a GPU are
plain products. That the real operators take these arguments is seen on the meta device. Their speed needs a GPU.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda

from nanokv import attention, backends
from nanokv.attention import (
    Causal,
    Masked,
    causal_mask,
    decode_attention,
    prefill_attention,
)
from nanokv.fast.compiled import Compiled
from nanokv.inference import decode, prefill, score
from nanokv.lab.trace.recorder import attention_weights
from oracle import SHAPES, TOLERANCE, gap, pair, random_ids

GPU = torch.device("cuda")


def qkv(T, S, H=4, Hk=2, D=8, B=2, **how):
    generator = None if "device" in how else torch.Generator().manual_seed(T * S)
    shapes = (B, H, T, D), (B, Hk, S, D), (B, Hk, S, D)
    return [torch.randn(*shape, generator=generator, **how) for shape in shapes]


def flags():
    """All that torch keeps about this choice."""
    enabled = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    return enabled, torch._C._get_sdp_priority_order()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's choices on a CPU. `calls`: what was computed by which kernel; `flash`, `efficient`: what they take."""
    seen = SimpleNamespace(calls=[], flash=True, efficient=True)

    def sdpa(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        seen.calls.append(("torch chooses", attn_mask is not None, enable_gqa, flags()))
        return right(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)

    def last(q, k, v):
        mask = causal_mask(q.shape[2], k.shape[2])
        return right(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    def flash(q, k, v, dropout, is_causal):
        assert dropout == 0 and is_causal and q.shape[-1] % 8 == 0
        seen.calls.append(("flash", k.shape[1]))
        return last(q, k, v), None

    def efficient(q, k, v, *nothing):
        *nothing, dropout, kind, _ = nothing
        assert nothing == [None] * 5 and dropout == 0 and kind == 2
        assert q.shape[2] == k.shape[2] == v.shape[2]  # (B,T,H,D): it knows no groups
        seen.calls.append(("efficient", k.shape[2]))
        return last(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), None

    right = F.scaled_dot_product_attention
    monkeypatch.setattr(attention, "F", SimpleNamespace(scaled_dot_product_attention=sdpa))
    monkeypatch.setattr(backends, "chooses", lambda device: True)
    monkeypatch.setattr(backends, "can_use_flash_attention", lambda params: seen.flash)
    monkeypatch.setattr(backends, "can_use_efficient_attention", lambda params: seen.efficient)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient)
    return seen


def expected(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def test_a_gpu_takes_flash_then_efficient_and_never_cudnn():
    before = flags()
    with backends.chosen(GPU):
        assert flags() != before and not cuda.cudnn_sdp_enabled() and cuda.math_sdp_enabled()
        assert flags()[1][:3] == [int(kind) for kind in backends.ORDER]
    assert flags() == before
    with pytest.raises(ZeroDivisionError), backends.chosen(GPU):
        1 / 0  # noqa: B018
    assert flags() == before


def test_what_the_caller_had_chosen_is_put_back():
    cuda.enable_flash_sdp(False)
    try:
        with backends.chosen(GPU):
            assert cuda.flash_sdp_enabled()
        assert not cuda.flash_sdp_enabled()
    finally:
        cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("device", ["cpu", "mps", "meta"])
def test_other_devices_have_no_choice(device):
    before = flags()
    with backends.chosen(torch.device(device)):
        assert flags() == before
    q, k, v = qkv(3, 5)
    assert (
        backends.takes_groups(q, k, v, causal_mask(3, 5)) and backends.lower_right(q, k, v) is None
    )


def test_threads_take_turns_and_leave_what_they_found():
    """A takes the flags, B takes A's, A puts back the first, B puts back A's: cuDNN would stay out for good."""
    before, entered, leave = flags(), threading.Event(), threading.Event()

    def first():
        with backends.chosen(GPU):
            entered.set()
            assert leave.wait(10)

    def second():
        with backends.chosen(GPU):
            pass

    a, b = threading.Thread(target=first), threading.Thread(target=second)
    a.start()
    assert entered.wait(10)
    b.start()
    b.join(0.1)
    assert b.is_alive()  # waiting
    leave.set()
    a.join(10)
    b.join(10)
    assert flags() == before


def test_every_call_is_made_under_the_choice(gpu):
    q, k, v = qkv(5, 5)
    for call in (
        lambda: Causal()(q, k, v),
        lambda: Masked(causal_mask(5, 5))(q, k, v),
        lambda: prefill_attention(q, k, v),
        lambda: decode_attention(q[:, :, :1], k, v),
    ):
        call()
    assert len(gpu.calls) == 4
    for _, _, _, (enabled, order) in gpu.calls:
        assert enabled == (True, True, False, True) and order[0] == int(backends.ORDER[0])


@pytest.mark.parametrize("mask", [causal_mask(3, 9), causal_mask(3, 9).expand(2, 1, 3, 9), None])
@pytest.mark.parametrize("flash", [True, False])
def test_groups_go_to_the_flash_kernel_and_are_repeated_for_the_others(gpu, mask, flash):
    """With `enable_gqa` and a mask, or in fp32, torch would go to plain products with T×S scores."""
    gpu.flash, (q, k, v) = flash, qkv(3, 9)
    assert gap(prefill_attention(q, k, v, mask), expected(q, k, v, mask)) <= 1e-6
    ((_, masked, grouped, _),) = gpu.calls
    assert masked == (mask is not None)
    assert grouped == (flash and mask is None)


def test_heads_of_their_own_are_not_repeated(gpu, monkeypatch):
    monkeypatch.setattr(backends, "repeated", None)
    q, k, v = qkv(3, 9, H=2, Hk=2)
    assert (
        gap(prefill_attention(q, k, v, causal_mask(3, 9)), expected(q, k, v, causal_mask(3, 9)))
        == 0
    )
    q, k, v = qkv(1, 9)
    assert gap(decode_attention(q, k, v), expected(q, k, v, None)) <= 1e-6
    assert not gpu.calls[-1][2]  # they are folded


@pytest.mark.parametrize(
    ("flash", "efficient", "D", "kernel"),
    [
        (True, True, 8, ("flash", 2)),
        (False, True, 8, ("efficient", 4)),
        (False, False, 8, None),
        (True, True, 12, None),  # the flash kernel takes eighths
    ],
)
def test_a_later_chunk_needs_no_mask_where_a_kernel_aligns_it(
    gpu, monkeypatch, flash, efficient, D, kernel
):
    gpu.flash, gpu.efficient = flash, efficient
    q, k, v = qkv(3, 9, D=D)
    right = expected(q, k, v, causal_mask(3, 9))
    if kernel:
        monkeypatch.setattr(attention, "causal_mask", None)
    assert gap(Causal(keys=9)(q, k, v), right) <= 1e-6
    if kernel:
        assert gpu.calls == [kernel]
    else:
        assert [call[:3] for call in gpu.calls] == [("torch chooses", True, False)]


def test_a_whole_prompt_and_a_single_query_need_no_mask_either(gpu, monkeypatch):
    monkeypatch.setattr(attention, "causal_mask", None)
    q, k, v = qkv(5, 5)
    assert gap(Causal()(q, k, v), expected(q, k, v, causal_mask(5, 5))) <= 1e-6
    q, k, v = qkv(1, 5)
    assert gap(Causal()(q, k, v), expected(q, k, v, None)) <= 1e-6
    assert [call[:3] for call in gpu.calls] == [("torch chooses", False, True)] * 2


def test_who_watches_torch_s_functions_sees_the_attention_of_a_chunk(gpu):
    """The recorder of a trace and the spies of `debug`."""
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if getattr(function, "__name__", "") == "scaled_dot_product_attention":
                found.append(attention_weights(out, *args, **(kwargs or {})))
            return out

    found, (q, k, v) = [], qkv(3, 9)
    with Watch():
        Causal()(q, k, v)
    ((weights, error),) = found
    assert error <= 1e-6 and bool((weights[:, 0, 7:] == 0).all())


@pytest.mark.parametrize("flash", [True, False])
def test_torch_s_operators_take_what_they_are_given(monkeypatch, flash):
    """On the meta device, where they compute shapes."""
    monkeypatch.setattr(backends, "chooses", lambda device: True)
    monkeypatch.setattr(backends, "can_use_flash_attention", lambda params: flash)
    monkeypatch.setattr(backends, "can_use_efficient_attention", lambda params: True)
    q, k, v = qkv(3, 9, device="meta", dtype=torch.bfloat16)
    y = backends.lower_right(q, k, v)
    assert y.shape == q.shape and y.dtype == q.dtype


def test_the_number_of_the_mask_is_torch_s():
    from torch.nn.attention.bias import CausalVariant

    assert int(CausalVariant.LOWER_RIGHT) == backends.LOWER_RIGHT


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: Masked(causal_mask(3, 9))(q, k, v),
        lambda q, k, v: Causal(keys=9)(q, k, v),
        lambda q, k, v: decode_attention(q[:, :, :1], k, v, causal_mask(3, 9)[:1]),
    ],
    ids=["masked", "causal", "decode"],
)
def test_torch_compile_follows_the_choice_in_one_piece(monkeypatch, call):
    q, k, v = qkv(3, 9)
    right = call(q, k, v)
    monkeypatch.setattr(backends, "chooses", lambda device: True)
    before = flags()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)
    assert gap(compiled(q, k, v), right) <= 1e-6
    assert flags() == before


@pytest.mark.slow
def test_torch_compile_is_not_imported_for_it():
    import subprocess
    import sys

    code = (
        "import sys, nanokv.attention, nanokv.backends; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_compiled_model_keeps_the_choice(monkeypatch):
    """Its layers are a region that is compiled once, in which the choice stands too."""
    model, ids = pair(**SHAPES["G2-tied"])[1], random_ids(1, 1, 30)
    right = score(model, ids)
    monkeypatch.setattr(backends, "chooses", lambda device: True)
    fast, before = Compiled(model, 64, backend="aot_eager"), flags()
    cache = fast.make_cache()
    assert gap(prefill(fast, ids[:, :20], cache), right[:, 19]) <= TOLERANCE
    assert gap(decode(fast, ids[:, 20:21], cache, 20), right[:, 20]) <= TOLERANCE
    assert fast.compiles == [32, 1] and flags() == before
