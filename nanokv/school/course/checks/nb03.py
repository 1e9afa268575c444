"""Notebook 03, inside a block: shapes of its weights, the norm, the rotation, shared KV heads."""

from dataclasses import replace

from nanokv.school.course import forms
from nanokv.school.course.checking import RIGHT, Mistake, function, judged, questions, value, wrong
from nanokv.school.course.forms import misfit
from nanokv.school.course.trials import tensor


def _shapes(case):
    """(out, in) of q_proj, k_proj and o_proj, from a real block without weights."""
    from nanokv.loading import skeleton
    from nanokv.school.course.claims.shapes import QWEN

    config = replace(
        QWEN,
        num_hidden_layers=1,
        hidden_size=case.C,
        num_attention_heads=case.H,
        num_key_value_heads=case.Hk,
        head_dim=case.D,
    )
    weights = skeleton(config).state_dict()
    names = ("q_proj", "k_proj", "o_proj")
    return tuple(tuple(weights[f"layers.0.self_attn.{name}.weight"].shape) for name in names)


def _derived(case):
    """The same shapes with a head size of C / H."""
    D = case.C // case.H
    return (case.H * D, case.C), (case.Hk * D, case.C), (case.C, case.H * D)


# --- 03.2: the rotation ---------------------------------------------------------------------------

# (cosine, sine) of some angles
TURNS = ((1.0, 0.0), (0.6, 0.8), (0.8, 0.6), (0.0, 1.0), (-0.6, 0.8), (0.6, -0.8))


def _rotation_inputs(rng):
    """x (B,H,T,D), cos and sin (T,D) with equal halves."""
    import torch

    B = rng.randint(1, 2)
    H = rng.randint(1, 3)
    T = rng.randint(1, 4)
    D = 2 * rng.randint(2, 4)
    rows = [[rng.choice(TURNS) for _ in range(D // 2)] for _ in range(T)]
    turns = torch.tensor(rows)  # (T,D/2,2)
    cos, sin = turns.repeat(1, 2, 1).unbind(-1)
    return tensor(rng, B, H, T, D), cos, sin


def _rotate(x, cos, sin):
    from nanokv.rope import apply_rope

    return apply_rope(x, (cos, sin))


def _rotate_neighbours(x, cos, sin):
    import torch

    half = x.shape[-1] // 2
    a = x[..., 0::2]
    b = x[..., 1::2]
    cos = cos[..., :half]
    sin = sin[..., :half]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def _rotate_back(x, cos, sin):
    return _rotate(x, cos, -sin)


def _mirror(x, cos, sin):
    import torch

    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((b, a), dim=-1) * sin


# --- 03.3: the norm -------------------------------------------------------------------------------


def _norm_inputs(rng):
    """x (T,C), with small rows in which eps matters; weight (C,); eps."""
    import torch

    T = rng.randint(2, 4)
    C = rng.randint(3, 6)
    size = torch.tensor([1.0, 1e-3] * T)[:T, None]
    return tensor(rng, T, C) * size + 0.5 * size, 1 + 0.25 * tensor(rng, C), 1e-6


def _rms_norm(x, weight, eps):
    import torch

    from nanokv.model import RMSNorm

    norm = RMSNorm(x.shape[-1], eps)
    with torch.no_grad():
        norm.weight.copy_(weight)
        return norm(x)


def _layer_norm(x, weight, eps):
    return _rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


def _no_weight(x, weight, eps):
    return _rms_norm(x, weight * 0 + 1, eps)


def _by_sum(x, weight, eps):
    return weight * x * (x.pow(2).sum(-1, keepdim=True) + eps).rsqrt()


def _eps_outside(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps)


# --- 03.4 and 03.5 --------------------------------------------------------------------------------


def _heads(rng):
    Hk = rng.randint(2, 6)
    G = rng.randint(2, 6)
    return rng.randrange(Hk * G), Hk * G, Hk


def _kv_head(h, H, Hk):
    """The KV head of query head h, from the grouping of attention: H viewed as (Hk,G)."""
    import torch

    return int((torch.arange(H).reshape(Hk, -1) == h).nonzero()[0, 0])


def _judge_weights(answer, case):
    """Does norm-then-rotate equal rotate-then-norm with these weights of the norm?"""
    import random

    import torch

    problem = "" if hasattr(answer, "tolist") else misfit(answer, [1.0])
    if problem:
        return wrong(problem)
    weight = torch.as_tensor(answer, dtype=torch.float32)  # (D,)
    if weight.shape != (8,):
        return wrong(
            f"eight numbers were asked for, these have the shape {tuple(weight.shape)}", "shape"
        )
    if not weight.isfinite().all() or (weight == 0).any():
        return wrong(
            "let every weight be finite and none zero: a norm that erases a dimension is too easy",
            "zero",
        )
    if torch.allclose(weight, weight[0], rtol=1e-3):
        return wrong("true, but that is the easy case: not all equal, please", "all equal")
    rng = random.Random("03.5")
    angle = tensor(rng, 4, 4).repeat(1, 2)
    cos = angle.cos()
    sin = angle.sin()
    x = tensor(rng, 1, 1, 4, 8)
    before = _rotate(_rms_norm(x, weight, 1e-6), cos, sin)
    after = _rms_norm(_rotate(x, cos, sin), weight, 1e-6)
    # The larger weight of each pair: the size of the numbers mixed into a dimension.
    pair = torch.maximum(weight.abs(), weight.roll(4).abs())  # (D,)
    if bool(((before - after).abs() <= 1e-5 * pair).all()):
        return RIGHT
    if torch.equal(weight[0::2], weight[1::2]):
        return wrong(
            "you made neighbours equal, but they are not a pair: dimension i turns with i + D/2",
            "neighbours",
        )
    return wrong(
        "the order still matters. Which two dimensions get mixed by the rotation?", "order matters"
    )


CHECKS = (
    value(
        "03.1",
        right=_shapes,
        parameters={"C": (192, 384, 96), "H": (6, 12), "Hk": (2, 3), "D": (48, 40)},
        wrong=(
            Mistake(
                "head size derived",
                _derived,
                "You derived the head size from the hidden size. It is a separate number: D is "
                "given.",
            ),
            Mistake(
                "swapped axes",
                lambda c: tuple(shape[::-1] for shape in _shapes(c)),
                "Right numbers, wrong order: a Linear's weight is (out, in).",
                alone=True,
            ),
            Mistake(
                "no grouping",
                lambda c: (_shapes(c)[0], _shapes(c)[0], _shapes(c)[2]),
                "Keys have Hk heads, not H: that is the grouping.",
            ),
            Mistake(
                "o like q",
                lambda c: (*_shapes(c)[:2], _shapes(c)[0]),
                "o_proj goes the other way: from all heads together back to the hidden size.",
            ),
        ),
        otherwise="The input has C numbers, the output has heads · D; o_proj goes back.",
    ),
    function(
        "03.2",
        right=_rotate,
        inputs=_rotation_inputs,
        use=forms.COMPUTED,
        rel=1e-4,
        atol=1e-5,
        wrong=(
            Mistake(
                "neighbours",
                _rotate_neighbours,
                "You paired 2i with 2i + 1. Here dimension i turns with i + D/2.",
            ),
            Mistake(
                "backwards",
                _rotate_back,
                "It turns the other way round: the minus belongs to the second half, which moves "
                "to the first.",
            ),
            Mistake(
                "no minus", _mirror, "Without the minus it is not a rotation: the length changes."
            ),
            Mistake(
                "sine for cosine",
                lambda x, cos, sin: _rotate(x, sin, cos),
                "cos and sin are exchanged: at angle 0, where cos is 1, x must stay as it is.",
            ),
        ),
    ),
    function(
        "03.3",
        right=_rms_norm,
        inputs=_norm_inputs,
        use=forms.COMPUTED,
        rel=1e-4,
        atol=1e-6,
        wrong=(
            Mistake("mean subtracted", _layer_norm, "You subtracted the mean. That is LayerNorm."),
            Mistake("no weight", _no_weight, "The learned weight is missing."),
            Mistake(
                "sum", _by_sum, "Divide by the root of the mean of the squares, not of their sum."
            ),
            Mistake(
                "eps outside",
                _eps_outside,
                "eps is added to the mean square, before the root. In tiny rows that is not the "
                "same.",
            ),
            Mistake(
                "no eps",
                lambda x, weight, eps: _rms_norm(x, weight, 0.0),
                "eps is missing. In tiny rows it is as large as the mean square.",
            ),
            Mistake(
                "no root",
                lambda x, weight, eps: weight * x / (x.pow(2).mean(-1, keepdim=True) + eps),
                "You divide by the mean square: its root is missing.",
            ),
        ),
    ),
    function(
        "03.4",
        right=_kv_head,
        inputs=_heads,
        use=forms.INDEX,
        wrong=(
            Mistake(
                "dealt out",
                lambda h, H, Hk: h % Hk,
                "That assigns the heads in turn. Neighbours share: the first G heads read KV head "
                "0.",
            ),
            Mistake(
                "divided by Hk",
                lambda h, H, Hk: h // Hk,
                "Divide by the group's size H / Hk, not by Hk.",
            ),
            Mistake(
                "within the group",
                lambda h, H, Hk: h % (H // Hk),
                "That is the place of h within its group.",
            ),
            Mistake(
                "not rounded",
                lambda h, H, Hk: h * Hk / H,
                "A head has a whole number: // rounds down.",
            ),
            Mistake(
                "to the nearest",
                lambda h, H, Hk: round(h * Hk / H),
                "You round to the nearest: the second half of a group would read the next KV head. "
                "Round down.",
            ),
            Mistake(
                "rounded up",
                lambda h, H, Hk: -(-h * Hk // H),
                "You round up. Only head 0 would read KV head 0.",
            ),
            Mistake(
                "counted from 1",
                lambda h, H, Hk: h * Hk // H + 1,
                "One too many: heads are counted from 0.",
            ),
            Mistake(
                "group size",
                lambda h, H, Hk: H // Hk,
                "That is the size of a group. Which group is h in?",
            ),
            Mistake(
                "first of the group",
                lambda h, H, Hk: h - h % (H // Hk),
                "That is the first query head of the group. Its KV head has the number of the "
                "group.",
            ),
            Mistake(
                "its own",
                lambda h, H, Hk: h,
                "Without grouping, yes. Here there are Hk KV heads, fewer than H.",
            ),
            Mistake(
                "the last ones shared",
                lambda h, H, Hk: min(h, Hk - 1),
                "Then all heads from Hk on read the last KV head. Every KV head has H / Hk "
                "readers.",
            ),
        ),
    ),
    judged("03.5", _judge_weights),
)

QUESTIONS = questions("03")
