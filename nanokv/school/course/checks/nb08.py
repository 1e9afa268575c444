"""Notebook 08, memory: the formula, units, an audit, savings and their baselines, what fits."""

from nanokv import costs
from nanokv.costs.memory import FAMILY, Estimate
from nanokv.lab.study.mla import deepseek_v2_savings, values_per_token
from nanokv.school.course.checking import Mistake, function, questions, sizes, value
from nanokv.school.course.claims.article1 import TABLE, kib_a_token
from nanokv.school.course.claims.shapes import LLAMA_2_70B, LLAMA_2_70B_MHA, shape

GB = 1e9
GIB = 2**30


def _per_token(C, L, H, Hk, D, itemsize):
    return costs.kv_bytes_per_token(shape(L, Hk, D, heads=H), itemsize)


def _sizes(rng):
    """(C, L, H, Hk, D, bytes per value) of a plausible model; D is rarely C / H."""
    Hk = rng.choice((1, 2, 4, 8))
    return (
        64 * rng.randint(4, 80),
        rng.randint(2, 80),
        Hk * rng.randint(2, 8),
        Hk,
        rng.choice((48, 64, 128)),
        rng.choice((1, 2, 4)),
    )


def _llama(case, config=LLAMA_2_70B, share=1.0):
    """(GB, GiB) of the model's cache."""
    size = costs.kv_bytes(config, case.tokens, case.batch, 2) * share
    return size / GB, size / GIB


def _table(case, share=1.0):
    """KiB per token of the four shapes in the article's table, which is for 2 bytes per value."""
    return tuple(kib_a_token(*row) * case.itemsize / 2 * share for row in TABLE)


def _savings(case, bits=None, layers=(60, 95), both=2):
    """Percent saved by the latent of DeepSeek-V2, against three baselines.

    They are the 67B model in 16 bits (the latent in `bits`), the 67B model in equal bits, and
    DeepSeek-V2 with full heads. The arguments change the computation for the known mistakes.
    """
    latent = layers[0] * values_per_token("mla")
    old = layers[1] * values_per_token("gqa") * both / 2
    own = 1 - values_per_token("mla") / (values_per_token("mha") * both / 2)
    return [
        100 * (1 - latent * (bits or case.bits) / (old * 16)),
        100 * (1 - latent / old),
        100 * own,
    ]


def _published(case):
    """The same, right, from nanokv.lab.study.mla; its first figure is for 6 bits."""
    few, equal, _, own, _ = deepseek_v2_savings().values()
    return 100 * (1 - (1 - few) * case.bits / 6), 100 * equal, 100 * own


def _given(case):
    """The sizes of a model, for a printed exam."""
    c = FAMILY[case.name]
    return {"parameters": costs.parameters(c)} | sizes(c, ("C", "L", "H", "Hk", "D"))


def _fitting(case, memory=None):
    estimate = Estimate(case.name, FAMILY[case.name], "bfloat16", case.tokens)
    if memory is None:
        return estimate.max_batch(case.gib * GIB)
    return estimate.max_batch(memory(case, estimate))


CHECKS = (
    function(
        "08.1",
        right=_per_token,
        inputs=_sizes,
        wrong=(
            Mistake(
                "derived head size",
                lambda C, L, H, Hk, D, itemsize: 2 * L * Hk * (C // H) * itemsize,
                "You derived the head size as C / H. It is a separate number in the config: D.",
            ),
            Mistake(
                "derived head size, not rounded",
                lambda C, L, H, Hk, D, itemsize: 2 * L * Hk * (C / H) * itemsize,
                "You derived the head size as C / H. It is a separate number in the config: D.",
            ),
            Mistake(
                "query heads",
                lambda C, L, H, Hk, D, itemsize: 2 * L * H * D * itemsize,
                "You counted query heads. Queries are not cached: use Hk.",
            ),
            Mistake(
                "hidden size",
                lambda C, L, H, Hk, D, itemsize: 2 * L * C * itemsize,
                "You took the hidden size for the width of keys and values. They are Hk heads of D "
                "numbers.",
            ),
            Mistake(
                "keys only",
                lambda C, L, H, Hk, D, itemsize: L * Hk * D * itemsize,
                "There are keys and values: twice that.",
            ),
            Mistake(
                "one layer",
                lambda C, L, H, Hk, D, itemsize: 2 * Hk * D * itemsize,
                "Every layer has its own cache.",
            ),
            Mistake(
                "numbers, not bytes",
                lambda C, L, H, Hk, D, itemsize: 2 * L * Hk * D,
                "That counts numbers; each takes itemsize bytes.",
            ),
        ),
    ),
    value(
        "08.2",
        right=_llama,
        parameters={"tokens": (8192, 4096, 2048), "batch": (32, 16, 24)},
        rel=5e-3,
        wrong=(
            Mistake(
                "a tenth",
                lambda c: _llama(c, share=0.1),
                "That is the article's slip: a factor of ten is lost.",
            ),
            Mistake(
                "query heads",
                lambda c: _llama(c, LLAMA_2_70B_MHA),
                "That counts a key for every query head. This model has 8 KV heads.",
            ),
            Mistake(
                "swapped",
                lambda c: _llama(c)[::-1],
                "Right numbers, wrong order: a GiB is the larger unit, so there are fewer of them.",
                alone=True,
            ),
            Mistake(
                "one unit",
                lambda c: (_llama(c)[0],) * 2,
                "The second number is in GiB: divide by 1024³.",
            ),
            Mistake(
                "keys only",
                lambda c: _llama(c, share=0.5),
                "There are keys and values: twice that.",
            ),
        ),
        otherwise=(
            "Bytes first: 2 · layers · KV heads · head size · bytes per number · tokens · "
            "sequences. Then divide; three digits are enough."
        ),
    ),
    value(
        "08.3",
        right=_table,
        parameters={"itemsize": (2, 4, 1)},
        rel=2e-3,
        wrong=(
            Mistake(
                "as printed",
                lambda c: list(TABLE.values()),
                "These are the printed numbers. Compute the first "
                "row by hand: 2 · 12 · 12 · 64 numbers.",
            ),
            Mistake(
                "keys only", lambda c: _table(c, 0.5), "There are keys and values: twice that."
            ),
            Mistake(
                "kB",
                lambda c: _table(c, 1024 / 1000),
                "That is in kB of 1000 bytes. A KiB has 1024.",
            ),
            Mistake("bytes", lambda c: _table(c, 1024), "That is in bytes; divide by 1024."),
        ),
        otherwise=(
            "2 · layers · KV heads · head size · bytes per number, divided by 1024; four rows in "
            "their order."
        ),
        given=lambda c: {"(layers, KV heads, head size)": ", ".join(map(str, TABLE))},
    ),
    value(
        "08.4",
        right=_published,
        parameters={"bits": (6, 8, 4)},
        rel=0,
        atol=0.1,
        wrong=(
            Mistake(
                "bits forgotten",
                lambda c: _savings(c, bits=16),
                "In (a) the new cache is stored in fewer bits than the old one: that counts too.",
            ),
            Mistake(
                "one layer each",
                lambda c: _savings(c, layers=(1, 1)),
                "The two models differ in their number of layers, and every layer has a cache.",
            ),
            Mistake(
                "keys only",
                lambda c: _savings(c, both=1),
                "With heads there are keys and values; the latent replaces both.",
            ),
            Mistake(
                "fractions",
                lambda c: [x / 100 for x in _published(c)],
                "Percent were asked for: times 100.",
            ),
            Mistake(
                "what remains",
                lambda c: [100 - x for x in _published(c)],
                "That is what remains; the saving is the rest up to 100.",
            ),
        ),
        otherwise=(
            "For each: numbers per token of both caches, over all layers, times bits; then 1 − new "
            "/ old."
        ),
    ),
    value(
        "08.5",
        right=_fitting,
        parameters={
            "name": ("Qwen/Qwen3-4B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"),
            "tokens": (8192, 4096),
            "gib": (24, 40),
        },
        wrong=(
            Mistake(
                "weights forgotten",
                lambda c: _fitting(c, lambda case, e: case.gib * GIB + e.weights),
                "The weights are in the same memory.",
            ),
            Mistake(
                "GB",
                lambda c: _fitting(c, lambda case, e: int(case.gib * GB)),
                "That is the answer for GB. A GiB is 1024³ bytes.",
            ),
            Mistake(
                "rounded up",
                lambda c: _fitting(c) + 1,
                "The last one does not fit completely: round down.",
            ),
        ),
        otherwise="Memory minus weights, divided by the bytes of one full sequence, rounded down.",
        given=_given,
    ),
)

QUESTIONS = questions("08")
