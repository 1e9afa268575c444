"""first_divergence names the layer and the operation that was broken, and nothing when nothing is.

Each fault is put into a copy of a random model; transformers' model with the same weights is the other side.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanokv.attention import prefill_attention
from nanokv.cache import make_cache
from nanokv.errors import CapacityError
from nanokv.inference import decode, prefill, verify_draft
from nanokv.lab.study import debug
from nanokv.rope import apply_rope
from oracle import SHAPES, pair, pair_from_disk, random_ids, tiny_reference

IDS = random_ids(7, 2, 12)
PLACES = {name: place for name, place in debug.OPERATIONS.items() if place}
WEIGHTS = [
    name
    for name, (module, side) in PLACES.items()
    if module not in ("", "mlp") and side == "output"
]


@pytest.fixture(scope="module")
def models():
    return pair(3, tie_word_embeddings=False)


def operations(config, layer: int) -> list[str]:
    """Those that this layer has: norms of q and k or none, an MLP or experts."""
    absent = (
        {"gate_proj", "up_proj", "swiglu", "down_proj"} if config.experts_of(layer) else {"experts"}
    )
    absent |= set() if config.qk_norm else {"q_norm", "k_norm"}
    *others, last = debug.OPERATIONS
    return [name for name in (*others, "experts", last) if name not in absent]


def broken(model, fault):
    """A deep copy with one fault; the original stays whole."""
    model = copy.deepcopy(model)
    fault(model)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_models_have_no_divergence_and_every_operation_was_compared(shape):
    """A recorder that misses an operation would call a broken one equal."""
    reference, ours = pair(1, **SHAPES[shape])
    steps = debug.compare(debug.record(ours, IDS), debug.record(reference, IDS))
    layers = range(ours.config.num_hidden_layers)
    names = [
        (None, "embed_tokens"),
        *((i, name) for i in layers for name in operations(ours.config, i)),
    ]
    assert [(s.layer, s.operation) for s in steps] == [*names, (None, "norm"), (None, "lm_head")]
    assert [str(s) for s in steps if not s.ok] == []
    assert max(s.difference for s in steps) < 1e-5


def test_what_is_recorded_is_what_the_forward_computes(models):
    """The recorded k after RoPE is the cached one, q is rotated, and the last entry is the logits."""
    reference, ours = models
    found = debug.record(ours, IDS)
    theirs = reference(IDS, use_cache=True)
    assert torch.allclose(found[None, "lm_head"], theirs.logits, atol=1e-5)
    assert torch.allclose(
        found[2, "rope_k"].transpose(1, 2), theirs.past_key_values.layers[2].keys, atol=1e-6
    )
    assert torch.allclose(
        found[2, "cached_v"].transpose(1, 2), theirs.past_key_values.layers[2].values, atol=1e-6
    )
    position_ids = torch.arange(12)[None]
    cos, sin = reference.model.rotary_emb(torch.zeros(1), position_ids)
    rotated = apply_rope(found[1, "q_norm"].transpose(1, 2), (cos, sin))
    assert torch.allclose(found[1, "rope_q"].transpose(1, 2), rotated, atol=1e-6)


def test_in_bf16_the_tolerance_is_that_of_bf16(tmp_path):
    reference, ours = pair_from_disk(tmp_path, 2)
    assert debug.first_divergence(ours, reference, IDS) is None
    step = debug.first_divergence(ours, tiny_reference(2), IDS, tolerance=1e-5)
    assert (step.layer, step.operation) == (None, "embed_tokens"), (
        "the weights were rounded, so everything differs"
    )
    wrong = broken(
        ours, lambda model: setattr(model, "config", replace(model.config, rope_theta=1e4))
    )
    assert debug.first_divergence(wrong, reference, IDS).place == "layer 0, rope_k", (
        "far more than rounding"
    )


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_wrong_weight_names_its_layer_and_operation(models, name):
    """q_proj of layer 1 is not to be found as "layer 1", nor as q_norm, where it shows too."""
    reference, ours = models

    def fault(model):
        model.layers[1].get_submodule(debug.OPERATIONS[name][0]).weight.data[0] += 0.01

    step = debug.first_divergence(broken(ours, fault), reference, IDS)
    assert (step.layer, step.operation) == (1, name)


@pytest.mark.parametrize("name", ["embed_tokens", "norm", "lm_head"])
def test_a_wrong_weight_outside_the_layers_is_named(models, name):
    reference, ours = models
    step = debug.first_divergence(
        broken(ours, lambda m: m.get_submodule(name).weight.data.mul_(1.01)), reference, IDS
    )
    assert (step.layer, step.operation) == (None, name)


def test_rope_theta_is_found_at_the_rotation(models):
    """The norms before it agree; position 0 is not rotated, so the first wrong position is a later one."""
    reference, ours = models

    def fault(model):
        model.config = replace(model.config, rope_theta=model.config.rope_theta * 2)

    step = debug.first_divergence(broken(ours, fault), reference, IDS)
    assert (step.layer, step.operation) == (0, "rope_k") and step.position > 0


def test_rms_norm_eps_is_found_at_the_first_norm(models):
    reference, ours = models

    def fault(model):
        for module in model.modules():
            if hasattr(module, "eps"):
                module.eps = 1e-5

    step = debug.first_divergence(broken(ours, fault), reference, IDS)
    assert (step.layer, step.operation) == (0, "input_layernorm")


def test_a_missing_causal_mask_is_found_at_attention(models, monkeypatch):
    reference, ours = models
    # Without a mask it sees the future.
    monkeypatch.setattr(debug, "Causal", lambda: prefill_attention)
    step = debug.first_divergence(ours, reference, IDS)
    assert (step.layer, step.operation) == (0, "attention")


def test_the_wrong_activation_is_found_at_swiglu(models):
    reference, ours = models

    def fault(model):
        mlp = model.layers[2].mlp
        mlp.forward = lambda x: mlp.down_proj(F.gelu(mlp.gate_proj(x)) * mlp.up_proj(x))

    step = debug.first_divergence(broken(ours, fault), reference, IDS)
    assert (step.layer, step.operation) == (2, "swiglu")


def test_a_lost_residual_is_found_where_it_is_lost(models):
    reference, ours = models

    def no_second(model):
        layer = model.layers[1]
        layer.forward = lambda x, rope, cache, attend: layer.mlp(
            layer.post_attention_layernorm(
                x + layer.self_attn(layer.input_layernorm(x), rope, cache, attend)
            )
        )

    def no_first(model):
        layer = model.layers[1]

        def forward(x, rope, cache, attend):
            x = layer.self_attn(layer.input_layernorm(x), rope, cache, attend)
            return x + layer.mlp(layer.post_attention_layernorm(x))

        layer.forward = forward

    for fault, name in ((no_first, "attention_residual"), (no_second, "mlp_residual")):
        step = debug.first_divergence(broken(ours, fault), reference, IDS)
        assert (step.layer, step.operation) == (1, name)


def test_nan_is_a_difference(models):
    """max |nan| compares false with everything: it must not pass for equal, not even when both sides have it."""
    reference, ours = models

    def fault(model):
        model.layers[0].mlp.up_proj.weight.data[3] = float("nan")

    bad = broken(ours, fault)
    for other in (reference, bad):
        step = debug.first_divergence(bad, other, IDS)
        assert (step.layer, step.operation, step.ok) == (0, "up_proj", False)


def test_a_small_error_beside_a_huge_value_is_seen():
    """Trained models have a first token a thousand times larger than the rest: the scale is that of each position."""
    a = torch.zeros(1, 3, 4)
    a[0, 0, 0] = 10_000
    b = a.clone()
    b[0, 2, 1] = 1e-3
    record = {(None, "embed_tokens"): a}
    [step] = debug.compare(record, {(None, "embed_tokens"): b})
    assert not step.ok and step.position == 2 and step.scale == 1.0
    b[0, 2, 1], b[0, 0, 0] = 0, 10_000.01
    assert debug.compare(record, {(None, "embed_tokens"): b})[0].ok


def test_other_shapes_and_missing_layers_are_named(models):
    ours = models[1]

    def fault(model):
        mlp = model.layers[0].mlp
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.weight.data = (
                torch.zeros(128, 64) if linear is not mlp.down_proj else torch.zeros(64, 128)
            )

    wide = broken(ours, fault)
    step = debug.first_divergence(wide, ours, IDS)
    assert (step.operation, step.difference) == ("gate_proj", float("inf")) and "128" in step.note
    shorter = broken(ours, lambda model: model.layers.__delitem__(2))
    shorter.config = replace(shorter.config, num_hidden_layers=2)
    step = debug.first_divergence(shorter, ours, IDS)
    assert (step.layer, step.operation) == (2, "input_layernorm") and "only one" in step.note


def test_tolerance_zero_finds_the_first_operation_that_is_not_bit_equal(models):
    ours = models[1]

    def fault(model):
        weight = model.layers[1].self_attn.k_norm.weight.data
        weight.copy_(torch.nextafter(weight, weight + 1))

    slightly = broken(ours, fault)
    assert debug.first_divergence(slightly, ours, IDS) is None
    step = debug.first_divergence(slightly, ours, IDS, tolerance=0)
    assert (step.layer, step.operation) == (1, "k_norm")
    assert debug.first_divergence(ours, ours, IDS, tolerance=0) is None


def test_recording_leaves_no_hook_behind(models):
    """Also not when the forward fails."""
    for model in models:
        debug.record(model, IDS)
        with pytest.raises(IndexError):
            debug.record(model, torch.full((1, 4), 10**6))
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        assert sum(hooks) == 0


def test_a_step_reads_as_one_sentence(models):
    reference, ours = models
    step = debug.first_divergence(
        broken(ours, lambda m: m.norm.weight.data.mul_(2)), reference, IDS
    )
    assert (
        str(step).startswith("norm: max |Δ| ")
        and "at position" in str(step)
        and "tolerance 2.9e-05" in str(step)
    )
    assert step.place == "norm" and replace(step, layer=4).place == "layer 4, norm"


# --- watching a run with a cache -------------------------------------------------------------------------------------


def passes_of(model, cut, wrong=lambda layer: None):
    """Prefill of `cut` tokens, then one decode a token, all of it watched."""
    cache = make_cache("dict", model.config, len(IDS))
    for layer in cache:
        wrong(layer)
    with debug.watch(model) as passes:
        verify_draft(model, IDS[:, :cut], cache, start_pos=0)
        for i in range(cut, IDS.shape[1]):
            decode(model, IDS[:, i : i + 1], cache, start_pos=i)
    return passes


def joined(passes):
    """The passes of one sequence as one record."""
    return {key: torch.cat([one.values[key] for one in passes], dim=1) for key in passes[0].values}


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_cached_run_is_recorded_like_an_uncached_one(models, cut):
    """Every operation of every token: a watched prefill and its decodes, end to end, are what `record` gives."""
    ours = models[1]
    passes, whole = passes_of(ours, cut), debug.record(ours, IDS)
    assert [one.start for one in passes] == [0, *range(cut, 12)] and passes[0].tokens.shape == (
        2,
        cut,
    )
    steps = debug.compare(joined(passes), whole)
    assert len(steps) == len(whole) and [str(step) for step in steps if not step.ok] == []


def test_the_first_wrong_layer_and_token_of_a_cached_run_are_found(models):
    """Layer 1 loses the key of token 6 in row 1, and no other."""
    ours, seen = models[1], []

    def forget(layer):
        seen.append(layer)
        if len(seen) == 2:
            append = layer.append

            def wrong(k, v):
                if layer.length == 6:
                    k = k.clone()
                    k[1] = 0
                return append(k, v)

            layer.append = wrong

    passes = passes_of(ours, 3, forget)
    cached, whole = joined(passes), debug.record(ours, IDS)
    step = next(step for step in debug.compare(cached, whole) if not step.ok)
    assert (step.layer, step.operation) == (1, "rope_k") and debug.earliest(
        cached, whole, step
    ) == (6, 1)


def test_the_first_difference_is_not_the_largest():
    a = torch.zeros(2, 4, 3)
    b = a.clone()
    b[0, 3], b[1, 1] = 9, 1
    a, b = ({(None, "embed_tokens"): x} for x in (a, b))
    [step] = debug.compare(a, b)
    assert debug.earliest(a, b, step) == (1, 1) and step.position == 3
    assert debug.earliest(a, a, debug.compare(a, a)[0]) is None
    other = {(None, "embed_tokens"): torch.zeros(2, 5, 3)}
    assert debug.earliest(a, other, debug.compare(a, other)[0]) is None


def test_logits_of_the_last_position_and_a_failed_pass_are_watched_too(models):
    ours, cache = models[1], make_cache("static", models[1].config, 2, capacity=6)
    with debug.watch(ours) as passes:
        logits = prefill(ours, IDS[:, :6], cache, start_pos=0)
        with pytest.raises(CapacityError):
            decode(ours, IDS[:, 6:7], cache, start_pos=6)
    assert torch.equal(passes[0].values[None, "lm_head"], logits[:, None])
    assert (0, "v_proj") in passes[1].values and (0, "attention") not in passes[1].values
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in ours.modules()) == 0
