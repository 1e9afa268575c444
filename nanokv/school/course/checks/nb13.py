"""Notebook 13: the keys that a window sees, the price of bits, and the capstone."""

from nanokv.school.course.checking import (
    RIGHT,
    Mistake,
    failing,
    judged,
    questions,
    result_of,
    value,
    wrong,
)
from nanokv.school.course.forms import misfit

# --- 13.1: a window -------------------------------------------------------------------------------


def _window(c):
    """(number of keys that query t sees, position of the oldest one that is not a sink).

    From the mask of nanokv's sliding cache.
    """
    from nanokv.cache import make_cache

    # Row t of the mask: the keys that query t sees, without sinks.
    rows = make_cache("sliding", c.config, window=c.w).mask(c.t + 1)  # (T,T)
    assert rows is not None
    seen = rows[c.t].nonzero().flatten().tolist()
    return len(set(seen) | set(range(c.s))), seen[0]


# --- 13.3: rounding -------------------------------------------------------------------------------

HALF = 0.5 * (1 + 1e-3)  # half a step, with room for rounding


def _judge_rounding(answer, case):
    import torch

    generator = torch.Generator().manual_seed(12)
    for bits, dim in ((4, 2), (2, 3), (8, 2), (4, 1)):
        shape = [4, 3, 10, 8]
        shape[dim] = 4 * 2**bits  # values in a line, many more than levels
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x[..., 3] *= 30  # one large channel
        given = result_of(answer, x.clone(), bits, dim)
        problem = misfit(given, x)
        if problem:
            return wrong(f"a tensor like x was asked for: {problem}", "shape")
        if given.is_floating_point() and given.element_size() < 4:
            return wrong(f"x is {x.dtype}, this is {given.dtype}: two bytes round the levels away")
        outcome = _rounding_outcome(x, given.double(), bits, dim)
        if outcome is not None:
            return outcome
    return RIGHT


def _rounding_outcome(x, given, bits, dim):
    low = x.amin(dim, keepdim=True)
    high = x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    off = (given - x) / step
    if bool(given.isnan().any()):
        return wrong(f"with bits={bits} and dim={dim} some values come back as NaN")
    if bool((off.abs() <= HALF).all()):
        most = max(
            len(line.unique())
            for line in given.movedim(dim, -1).reshape(-1, x.shape[dim]).round(decimals=9)
        )
        if most <= 2**bits:
            return None
        return wrong(
            f"with bits={bits} a group has {most} levels, and at most {2**bits} = 2**bits are "
            "allowed",
            "levels",
        )
    return (
        _codes_outcome(x, given, low, step)
        or _side_outcome(off)
        or _ends_outcome(x, given, bits, dim)
        or _steps_outcome(float(off.abs().max()), bits, dim)
    )


def _codes_outcome(x, given, low, step):
    """An Outcome if a part of the conversion to codes or back is missing."""

    def near(values) -> bool:
        return bool(((values - x).abs() <= 1.01 * step).all())

    if near(given * step + low):
        return wrong(
            "those are the codes, from 0 on: scale them back, times the step plus the smallest "
            "value",
            "codes",
        )
    if near((given - low) * step + low):
        return wrong("the codes were not multiplied by the step on the way back", "no step")
    if near(given + low):
        return wrong(
            "the smallest value was subtracted and not added again on the way back", "no low"
        )
    if bool((given == x.round()).all()):
        return wrong(
            "your step does not depend on the values: it is their range over 2**bits − 1",
            "fixed step",
        )
    return None


def _side_outcome(off):
    """An Outcome if all values are off to one side. `off`: differences in steps."""
    if bool((off.abs() <= 2 * HALF).all()):
        if bool((off <= 1e-3).all()):
            return wrong(
                "every value is moved down, by up to a whole step: round to the nearest, not down",
                "floor",
            )
        if bool((off >= -1e-3).all()):
            return wrong(
                "every value is moved up, by up to a whole step: round to the nearest", "ceil"
            )
    return None


def _steps_outcome(worst: float, bits, dim):
    """An Outcome for a wrong number of steps; the ends are right.

    `worst`: the largest difference of a value, in steps.
    """
    steps = 2**bits - 1
    if worst <= steps / (steps - 1) * HALF:
        return wrong(
            "nearly: 2**bits levels have 2**bits − 1 steps between them", "one step too few"
        )
    if worst <= steps / (2 ** (bits - 1) - 1) * HALF:
        return wrong(
            "those are 2**(bits − 1) levels, half of them: there is no bit for a sign here",
            "half the levels",
        )
    return wrong(f"with bits={bits} and dim={dim} a value is off by {worst:.2f} steps", "error")


def _same_ends(x, given, dim) -> bool:
    """Are the smallest and the largest value of every group unchanged?"""
    low = x.amin(dim)
    high = x.amax(dim)
    moved = (given.amin(dim) - low).abs() + (given.amax(dim) - high).abs()
    return bool((moved <= 1e-4 * (high - low)).all())


def _ends_outcome(x, given, bits, dim):
    """An Outcome if the lowest and highest levels are not the ends of the groups along dim."""
    if _same_ends(x, given, dim):
        return None
    for other in {0, 1, 2, 3} - {dim}:
        if _same_ends(x, given, other):
            return wrong(
                f"for dim={dim} you took the smallest and the largest along {other}", "dimension"
            )
    if _same_ends(x, given, (0, 1, 2, 3)) and len(given.unique()) <= 2**bits:
        return wrong(
            "one scale for all: each line along `dim` has its own smallest and largest value",
            "one scale",
        )
    groups = [t.movedim(dim, -1).flatten(0, -2) for t in (x, given)]  # (groups, values in one)
    worst = sum(
        (groups[0].aminmax(dim=1)[i] - groups[1].aminmax(dim=1)[i]).abs() for i in (0, 1)
    ).argmax()
    values, levels = (
        f"from {float(g[worst].min()):.3g} to {float(g[worst].max()):.3g}" for g in groups
    )
    return wrong(
        f"with bits={bits} the values of a group go {values}, and its levels {levels}: the lowest "
        "level has to be the smallest value, the highest the largest. One scale around 0 without a "
        "zero point cannot do that",
        "ends",
    )


# --- 13.4: the capstone ---------------------------------------------------------------------------


def _judge_capstone(answer, case):
    if not isinstance(answer, tuple | list) or len(answer) != 2 or answer[0] not in CAPSTONES:
        return wrong(f"hand in a pair: one of {', '.join(CAPSTONES)}, and your code", "form")
    return CAPSTONES[answer[0]](answer[1])


def _suite(make, model=None):
    """None, or an Outcome with the first case of the public suite that fails."""
    from nanokv.lab.study import equality

    found = failing(equality.check(make, model, stop=True))
    if not found:
        return None
    return wrong(f"it differs from the model without a cache: {found}", "equality")


def _judge_static(layer):
    from nanokv.cache import KVCache
    from nanokv.cache.capabilities import Made

    def make(config, batch_size, capacity):
        layers = [layer(capacity) for _ in range(config.num_hidden_layers)]
        for one in layers:
            if getattr(one, "capacity", None) is None:  # the suite reads how much it may feed
                one.capacity = capacity
        cache = KVCache(layers, config)
        cache.made = Made(batch_size=batch_size)
        return cache

    return _slab_outcome(layer(4)) or _suite(make) or RIGHT


def _slab_outcome(one):
    """An Outcome for a layer of 4 slots that does not do what a slab should."""
    import torch

    from nanokv.cache import LayerCache
    from nanokv.errors import CapacityError

    k = torch.randn(1, 2, 1, 6)  # (B,Hk,T,D)
    if {name for name in dir(LayerCache) if not name.startswith("_")} - set(dir(one)):
        return wrong(
            "write class MyLayer(nanokv.cache.LayerCache): masks and batches come from there",
            "no base",
        )
    given = [one.append(k, k)[0] for _ in range(4)]
    if [keys.shape[2] for keys in given] == [4] * 4:
        return wrong(
            "append returns the whole slab, with rows that are not filled yet: return the first "
            "`length` rows",
            "whole slab",
        )
    if len({keys.data_ptr() for keys in given}) > 1:
        return wrong(
            "the keys moved while tokens came: allocate the memory once, and write into it", "moved"
        )
    try:
        one.append(k, k)
    except CapacityError:
        if one.length != 4:
            return wrong(
                f"after the refusal length is {one.length}: check before you write", "late check"
            )
    else:
        return wrong("a fifth token went into 4 slots without a CapacityError", "no refusal")
    one.truncate(2)
    if one.length != 2 or one.append(k, k)[0].shape[2] != 3:
        return wrong("truncate(2) and one token more must give 3 tokens", "truncate")
    return None


def _judge_prefix(store):
    from nanokv.lab.study.equality import small_model

    model = small_model()
    a, b, c = ([token] * 3 + list(range(token, token + 6)) for token in (5, 20, 40))
    return (
        _reuse_outcome(store(model.config, 2), model, a, b)
        or _eviction_outcome(store, model, a, b, c)
        or _suite(lambda config, batch_size, capacity: store(config, 2).get([1, 2])[0])
        or RIGHT
    )


def _ask(store, model, tokens):
    """Run a request as a server would → (tokens found in the store, cache)."""
    import torch

    from nanokv.inference import prefill, score

    cache, n = store.get(tokens)
    if cache.length != n or not 0 <= n < len(tokens):
        raise ValueError(f"get of {len(tokens)} tokens gave n = {n} and a cache of {cache.length}")
    logits = prefill(model, [tokens[n:]], cache, start_pos=n)
    if not torch.allclose(logits, score(model, [tokens])[:, -1], atol=1e-3):
        raise ValueError(f"after {n} reused tokens the logits differ from those without a cache")
    store.put(tokens, cache)
    return n, cache


def _reuse_outcome(store, model, a, b):
    """An Outcome for an empty store of two places that does not reuse prompts as it should."""
    from nanokv.inference import prefill

    reused = tuple(_ask(store, model, tokens)[0] for tokens in (a, b, a))
    if reused != (0, 0, len(a) - 1):
        return wrong(
            f"two prompts and the first once more: {reused} reused, expected (0, 0, {len(a) - 1})",
            "reuse",
        )
    n, cache = _ask(store, model, [*a[:5], 1, 2])
    if n != 5:
        return wrong(f"a prompt that shares 5 tokens reused {n}", "common prefix")
    cache.truncate(2)  # the caller uses its cache; the stored one must not change
    prefill(model, [[3] * 6], cache, start_pos=2)
    try:
        _ask(store, model, [*a[:5], 1, 2, 9])
    except ValueError:
        return wrong("what a caller does with its cache changes the stored one: fork it", "shared")
    return None


def _eviction_outcome(store, model, a, b, c):
    """An Outcome for a store of two places that does not forget the least recently used prompt."""
    own = store(model.config, 2)
    for tokens in (a, b, a, c):
        _ask(own, model, tokens)
    if _ask(own, model, [*a, 7])[0] != len(a) or _ask(own, model, [*b, 7])[0] != 0:
        return wrong(
            "with room for two, a, b, a, c must forget b: the least recently used, not the oldest",
            "order",
        )
    own = store(model.config, 2)
    _ask(own, model, a)
    _ask(own, model, b)
    own.get([*a, 7])
    _ask(own, model, c)
    if _ask(own, model, [*a, 7])[0] != len(a):
        return wrong(
            "get is a use too: after put a, put b, get a, put c it is b that must be forgotten",
            "get no use",
        )
    return None


def _judge_mqa(convert):
    import torch

    from nanokv.lab.study.equality import small_model

    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = result_of(convert, model)
    if any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()):
        return wrong("the old model has changed: build a new one", "changed")
    config = model.config
    if made.config.num_key_value_heads != 1 or made.config.head_dim != config.head_dim:
        return wrong("the config must say one KV head, and the head size must stay", "config")
    for old, new in zip(model.layers, made.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            mean = (
                getattr(old.self_attn, name)
                .weight.view(config.num_key_value_heads, config.head_dim, -1)
                .mean(0)
            )
            given = getattr(new.self_attn, name).weight
            if given.shape != mean.shape:
                return wrong(
                    f"{name} is {tuple(given.shape)}, one head of it is {tuple(mean.shape)}",
                    "shape",
                )
            if not torch.allclose(given, mean, atol=1e-6):
                return wrong(f"{name} is not the mean of the old heads", "mean")
    unlike = _first_unlike(before, made.state_dict())
    if unlike:
        return wrong(f"the other weights must be those of the old model; {unlike} is not", "others")
    return _suite("dict", made) or RIGHT


def _first_unlike(before, after) -> str:
    """The first weight that differs between two state dicts, ignoring k_proj and v_proj; or ""."""
    import torch

    converted = ("k_proj.weight", "v_proj.weight")
    for name in sorted(before.keys() | after.keys()):
        kept = name in before and name in after and torch.equal(before[name], after[name])
        if not kept and not name.endswith(converted):
            return name
    return ""


CAPSTONES = {"static": _judge_static, "prefix": _judge_prefix, "mqa": _judge_mqa}

CHECKS = (
    value(
        "13.1",
        right=_window,
        parameters={"w": (16, 32, 24), "s": (4, 2, 6), "t": (100, 77, 150)},
        wrong=(
            Mistake("no sinks", lambda c: (c.w, c.t - c.w + 1), "The sinks are seen as well."),
            Mistake(
                "one too many",
                lambda c: (c.w + c.s + 1, c.t - c.w),
                "The window counts the query's own position.",
            ),
            Mistake(
                "oldest one off",
                lambda c: (c.w + c.s, c.t - c.w),
                "The count is right. From t down, w positions end at t − w + 1.",
                alone=True,
            ),
            Mistake("everything", lambda c: (c.t + 1, 0), "That is without a window."),
            Mistake(
                "oldest of all",
                lambda c: (c.w + c.s, 0),
                "The count is right. Position 0 is a sink; the question is for the oldest of the "
                "others.",
                alone=True,
            ),
            Mistake(
                "after the sinks",
                lambda c: (c.w + c.s, c.s),
                "The count is right. Position s was forgotten long ago: from t down, w positions "
                "end at t − w + 1.",
                alone=True,
            ),
            Mistake(
                "sinks in the window",
                lambda c: (c.w, c.t - c.w + c.s + 1),
                "Here the sinks come on top of the window. In some programs they are taken out of "
                "it.",
            ),
        ),
        otherwise="List the positions that it sees: t, t − 1, … and the sinks.",
    ),
    value(
        "13.2",
        right=lambda case: 16 / (case.bits + 2 * 16 / case.group),
        parameters={"bits": (4, 8, 2), "group": (64, 32, 128)},
        rel=5e-3,
        wrong=(
            Mistake(
                "no scales", lambda c: 16 / c.bits, "Every group has a scale and a zero point too."
            ),
            Mistake(
                "scale only",
                lambda c: 16 / (c.bits + 16 / c.group),
                "There is a zero point besides the scale.",
            ),
            Mistake(
                "per value", lambda c: 16 / (c.bits + 32), "The two are shared by the whole group."
            ),
            Mistake(
                "upside down",
                lambda c: (c.bits + 32 / c.group) / 16,
                "How many times smaller: a number above 1.",
            ),
        ),
        otherwise=(
            "How many bits does one value take, its share of scale and zero point included? To "
            "three digits."
        ),
    ),
    judged("13.3", _judge_rounding),
    judged("13.4", _judge_capstone),
)

QUESTIONS = questions("13")
