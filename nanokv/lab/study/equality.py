"""Check any cache against the model without a cache, and report where it first differs.

    print(nanokv.equality.check(MyLayerCache))           # a LayerCache class with at least append
    print(nanokv.equality.check("paged"))                # one of nanokv.CACHES
    print(nanokv.equality.check(lambda config, batch_size, capacity: MyCache(...)))

Every case feeds tokens through a new cache and compares the logits of every position with those of
the model without a cache. For a case that differs, the report names the first layer and token. An
operation that raises UnsupportedError counts as not offered and not as a failure. The suite is for
caches that keep exact values: a cache that rounds or drops tokens fails.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nanokv.cache import CACHES, KVCache, LayerCache, make_cache
from nanokv.cache.capabilities import Made
from nanokv.config import Config
from nanokv.decoding.batching import generate_padded
from nanokv.decoding.generation import generate
from nanokv.errors import CacheError, CapacityError, NanoKVError, UnsupportedError
from nanokv.inference import decode, prefill, score, verify_draft
from nanokv.lab.study.debug import Pass, compare, earliest, watch
from nanokv.model import Transformer

TOLERANCE = 1e-4  # on fp32 logits of size 10; correct code on another path differs by 1e-5 at most
CAPACITY = 64  # tokens per row for which a case makes its cache, by default
LONG = 130  # tokens of the long text
LONGEST = 250  # tokens of the long text where no capacity was set


Make = Callable[[Config, int, int | None], KVCache]  # (config, batch_size, capacity)


@dataclass(frozen=True)
class Case:
    """One check. status: passed, failed or not offered. layer, token, delta: where and how much the
    cache differs.

    layer is None if only the logits differ, or if there was an error.
    """

    name: str
    status: str
    detail: str = ""
    layer: int | None = None
    token: int | None = None
    delta: float = 0.0
    # the exception, if the cache raised one
    raised: BaseException | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.status:<12} {self.name}{': ' * bool(self.detail)}{self.detail}"


@dataclass(frozen=True)
class Report:
    """All cases, in order."""

    cases: tuple[Case, ...]

    @property
    def passed(self) -> bool:
        """No case failed and at least one passed: a cache that offers nothing does not pass."""
        states = [case.status for case in self.cases]
        return "failed" not in states and "passed" in states

    @property
    def first_failure(self) -> Case | None:
        """The case to fix first: later cases are harder."""
        return next((case for case in self.cases if case.status == "failed"), None)

    def __str__(self) -> str:
        count = sum(case.status == "passed" for case in self.cases)
        offered = sum(case.status != "not offered" for case in self.cases)
        return "\n".join([*map(str, self.cases), f"{count} of {offered} cases passed"])


class Different(Exception):
    """Raised by a case at the first difference."""

    def __init__(
        self,
        detail: str,
        layer: int | None = None,
        token: int | None = None,
        delta: float = float("inf"),
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.layer = layer
        self.token = token
        self.delta = delta


def check(
    make: str | type | Make,
    model: Transformer | None = None,
    tolerance: float = TOLERANCE,
    stop: bool = False,
) -> Report:
    """Run every case.

    make: a name in nanokv.CACHES, a class for one layer, or make(config, batch_size, capacity).
    model: by default a small random one (about a second). Another model must have room for 250
        positions and be in fp32 or fp64, because rounding to half precision changes logits more
        than many bugs do.
    tolerance: largest |Δ logits| that passes.
    stop: stop at the first failure, if only `passed` matters.

    NanoKVError: the model is unsuitable, or the tolerance is not a finite number ≥ 0.
    """
    if model is None:
        model = small_model()
    lab = Lab(model, maker(make), tolerance)
    cases: list[Case] = []
    for case in CASES:
        if stop and cases and cases[-1].status == "failed":
            break
        name = (case.__doc__ or "").splitlines()[0].rstrip(".")
        try:
            case(lab)
            cases.append(Case(name, "passed"))
        except UnsupportedError as error:
            cases.append(Case(name, "not offered", str(error)))
        except Different as error:
            cases.append(Case(name, "failed", error.detail, error.layer, error.token, error.delta))
        except (Exception, SystemExit) as error:  # raised by the cache: the case's result
            detail = f"{type(error).__name__}: {error}"
            cases.append(Case(name, "failed", detail, delta=float("inf"), raised=error))
    return Report(tuple(cases))


def maker(make: str | type | Make) -> Make:
    """A function (config, batch_size, capacity) → KVCache, from a name, a class for one layer or
    such a function."""
    if isinstance(make, str):
        if make not in CACHES:
            raise CacheError(f"no cache is called {make!r}: the caches are {', '.join(CACHES)}")
        return partial(make_cache, make)
    if not callable(make):
        raise CacheError(
            f"{make!r:.60} makes no cache",
            hint="pass a name, a class for one layer, or a function that makes a cache",
        )
    if not isinstance(make, type):
        return make
    layer = make
    if not issubclass(make, LayerCache):
        layer = type(make.__name__, (make, LayerCache), {})

    def of_layers(config, batch_size, capacity):
        cache = KVCache((layer() for _ in range(config.num_hidden_layers)), config)
        cache.made = Made(batch_size=batch_size)
        return cache

    return of_layers


def small_model(seed: int = 0) -> Transformer:
    """A random Qwen3 whose logits depend on every part of it: H·D ≠ C, G = 2, random norms, weights
    far from zero."""
    config = Config.from_dict(
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
        }
    )
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5, generator=generator)
        else:
            weight.data.normal_(0, 0.3, generator=generator)
    return model.requires_grad_(False).eval()


class Lab:
    """A model, new caches, random ids and the comparison, for all cases."""

    def __init__(self, model: Transformer, make: Make, tolerance: float) -> None:
        dtype = model.embed_tokens.weight.dtype
        room = model.config.max_position_embeddings
        if dtype not in (torch.float32, torch.float64):
            raise NanoKVError(
                f"the model is in {dtype}, whose rounding can be larger than the effect of a bug",
                hint="model.float()",
            )
        if room < LONGEST:
            raise NanoKVError(
                f"the model has {room} positions, and the longest case takes {LONGEST}"
            )
        if not 0 <= tolerance < float("inf"):
            raise NanoKVError(f"the tolerance is {tolerance!r}: a number ≥ 0 was expected")
        self.model = model
        self.make = make
        self.tolerance = tolerance

    def cache(self, batch_size: int = 1, capacity: int = CAPACITY) -> KVCache:
        """A new, empty cache."""
        return self.make(self.model.config, batch_size, capacity)

    def ids(self, seed: int, batch_size: int, tokens: int) -> Tensor:
        """(B,T) int64."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(
            self.model.config.vocab_size, (batch_size, tokens), generator=generator
        )

    def feed(self, cache: KVCache, ids: Tensor, *parts: int, start: int = 0) -> None:
        """Feed ids (B,T) from position `start` on, in parts of the given sizes, and compare every
        logit."""
        for part in parts:
            path = decode if part == 1 else verify_draft
            self.step(path, cache, ids, start, start + part)
            start += part

    def step(self, path: Callable, cache: KVCache, ids: Tensor, start: int, end: int) -> None:
        """Call path(model, ids[:, start:end], cache). Raises Different if the logits or the cache's
        length are wrong."""
        with watch(self.model) as passes:
            logits = path(self.model, ids[:, start:end], cache, start_pos=start)
        if logits.dim() == 2:
            logits = logits[:, None]  # (B,t,V): the last t positions
        truth = score(self.model, ids[:, :end])[:, -logits.shape[1] :]
        delta = (logits - truth).abs().amax((0, 2))  # (t,)
        wrong = (~(delta <= self.tolerance)).nonzero().flatten().tolist()  # nan is wrong too
        if wrong:
            token = end - len(delta) + wrong[0]
            raise self.difference(ids[:, :end], passes[-1], start, token, float(delta.max()))
        if cache.length != end:
            raise Different(f"length is {cache.length} after {end} tokens", token=end - 1)

    def difference(self, ids: Tensor, one: Pass, start: int, token: int, delta: float) -> Different:
        """Find the first operation of the first layer at which a pass from `start` on differs
        from an uncached pass."""
        with watch(self.model) as passes:
            score(self.model, ids)
        truth = {key: value[:, start:] for key, value in passes[0].values.items()}
        steps = [step for step in compare(one.values, truth) if not step.ok]
        step = next((step for step in steps if step.layer is not None), None)
        if step is None:
            detail = f"logits at token {token}: max |Δ| {delta:.3g}"
            return Different(detail, token=token, delta=delta)
        first = earliest(one.values, truth, step)
        if first is not None:
            position, _ = first
            token = start + position
        detail = f"layer {step.layer}, token {token} ({step.operation}), max |Δ logits| {delta:.3g}"
        return Different(detail, step.layer, token, delta)


# --- the cases: the first line of each docstring is its name -----------------------------------


def token_by_token(lab: Lab) -> None:
    """Token by token from an empty cache."""
    lab.feed(lab.cache(), lab.ids(1, 1, 12), *[1] * 12)


def prefill_then_decode(lab: Lab) -> None:
    """Prefill, then decode."""
    ids = lab.ids(2, 1, 12)
    cache = lab.cache()
    lab.step(prefill, cache, ids, 0, 7)
    lab.feed(cache, ids, *[1] * 5, start=7)


def every_split(lab: Lab) -> None:
    """Every split of 12 tokens into two chunks, and some into three."""
    ids = lab.ids(3, 1, 12)
    in_two = [(a, 12 - a) for a in range(1, 12)]
    in_three = [(4, 4, 4), (1, 5, 6), (5, 1, 6), (2, 9, 1), (9, 2, 1)]
    for split in in_two + in_three:
        lab.feed(lab.cache(), ids, *split)


def long_text(lab: Lab) -> None:
    """130 tokens, or 250 without a capacity: no token is dropped."""
    ids = lab.ids(4, 1, LONGEST)
    cache = lab.cache(capacity=LONG)
    lab.feed(cache, ids, 20, 8, *[1] * 20, LONG - 50, 1, 1)
    if cache.capacity is None:
        lab.feed(cache, ids, LONGEST - LONG - 1, 1, start=LONG)


def batch_rows(lab: Lab) -> None:
    """Five rows at once."""
    lab.feed(lab.cache(5), lab.ids(5, 5, 12), 5, 3, *[1] * 4)


def padded_rows(lab: Lab) -> None:
    """Prompts of 9, 4 and 12 tokens in one padded batch have the same answers as alone."""
    prompts = [lab.ids(seed, 1, tokens)[0].tolist() for seed, tokens in ((6, 9), (7, 4), (8, 12))]
    together = generate_padded(lab.model, prompts, lab.cache(3), 12, eos_token_ids=[])
    for b, (prompt, answer) in enumerate(zip(prompts, together, strict=True)):
        if answer != list(generate(lab.model, prompt, lab.cache(), 12, eos_token_ids=[])):
            raise Different(f"row {b} of the batch has another answer than alone")


def truncate_and_go_on(lab: Lab) -> None:
    """Six tokens are truncated, and others follow."""
    ids = lab.ids(9, 1, 14)
    cache = lab.cache()
    lab.feed(cache, ids, 8)
    other = torch.cat((ids[:, :8], lab.ids(10, 1, 6)), dim=1)
    lab.feed(cache, other, 6, start=8)
    cache.truncate(8)
    lab.feed(cache, ids, 3, 1, 1, 1, start=8)


def second_request(lab: Lab) -> None:
    """A new cache has nothing of the previous request."""
    lab.feed(lab.cache(), lab.ids(11, 1, 12), 12)
    lab.feed(lab.cache(), lab.ids(12, 1, 9), 6, 1, 1, 1)


def emptied(lab: Lab) -> None:
    """After truncate(0), the same cache serves another request."""
    cache = lab.cache()
    lab.feed(cache, lab.ids(13, 1, 12), 12)
    cache.truncate(0)
    lab.feed(cache, lab.ids(14, 1, 9), 6, 1, 1, 1)


def two_at_once(lab: Lab) -> None:
    """Two requests at the same time."""
    a = lab.ids(14, 1, 12)
    b = lab.ids(15, 1, 12)
    mine = lab.cache()
    other = lab.cache()
    lab.feed(mine, a, 8)
    lab.feed(other, b, 9)
    for i in range(3):
        lab.feed(mine, a, 1, start=8 + i)
        lab.feed(other, b, 1, start=9 + i)


def fork(lab: Lab) -> None:
    """A fork gets other tokens, and the original does not change."""
    ids = lab.ids(16, 1, 12)
    other = lab.ids(17, 1, 12)
    other[:, :6] = ids[:, :6]
    cache = lab.cache()
    lab.feed(cache, ids, 6)
    copy = cache.fork()
    lab.feed(copy, other, 2, 1, start=6)
    lab.feed(cache, ids, 3, 1, start=6)
    lab.feed(copy, other, 1, start=9)


def fork_taken_back(lab: Lab) -> None:
    """Tokens truncated in a fork stay in the original, and vice versa."""
    ids = lab.ids(24, 1, 12)
    other = lab.ids(25, 1, 12)
    other[:, :4] = ids[:, :4]
    for which in ("original", "fork"):
        kept = lab.cache()
        lab.feed(kept, ids, 8)
        shortened = kept.fork()
        if which == "original":
            shortened, kept = kept, shortened
        shortened.truncate(4)
        lab.feed(shortened, other, 3, 1, start=4)
        lab.feed(kept, ids, 3, 1, start=8)
        lab.feed(shortened, other, 1, start=8)


def fork_reordered(lab: Lab) -> None:
    """Rows reordered in a fork keep their order in the original."""
    ids = lab.ids(26, 2, 10)
    cache = lab.cache(2)
    lab.feed(cache, ids, 6)
    copy = cache.fork()
    copy.reorder([1, 0])
    lab.feed(copy, ids[[1, 0]], 2, 1, start=6)
    lab.feed(cache, ids, 3, 1, start=6)


def reorder(lab: Lab) -> None:
    """Rows are reordered, as in beam search."""
    ids = lab.ids(18, 3, 10)
    cache = lab.cache(3)
    lab.feed(cache, ids, 6)
    cache.reorder([2, 0, 0])
    later = ids[[2, 0, 0]].clone()
    later[:, 6:] = lab.ids(19, 3, 4)
    lab.feed(cache, later, 3, 1, start=6)


def more_rows_and_fewer(lab: Lab) -> None:
    """One row becomes five, and five become one."""
    ids = lab.ids(23, 5, 12)
    ids[:, :6] = ids[0, :6]
    cache = lab.cache()
    lab.feed(cache, ids[:1], 6)
    cache.reorder([0] * 5)
    lab.feed(cache, ids, 2, 1, start=6)
    cache.reorder([3])
    lab.feed(cache, ids[3:4], 2, 1, start=9)


def save_and_load(lab: Lab) -> None:
    """A cache loaded from a file continues where the saved one was."""
    ids = lab.ids(20, 1, 12)
    cache = lab.cache()
    if not is_registered(cache, lab.model.config):
        raise UnsupportedError("loading needs a kind of cache that is in nanokv.CACHES")
    lab.feed(cache, ids, 7)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache")
        device = lab.model.embed_tokens.weight.device
        loaded = KVCache.load(Path(folder) / "cache", lab.model.config, device=device)
        lab.feed(loaded, ids, 3, 1, 1, start=7)


def is_registered(cache: KVCache, config: Config) -> bool:
    """True if the cache is of a kind in nanokv.CACHES, which KVCache.load can make by name."""
    name = cache.made.name
    return name in CACHES and type(cache[0]) is type(make_cache(name, config)[0])


def more_than_fits(lab: Lab) -> None:
    """Beyond its capacity, a cache grows or raises CapacityError, and never drops a token."""
    ids = lab.ids(21, 1, 12)
    cache = lab.cache(capacity=8)
    lab.feed(cache, ids, 8)
    try:
        lab.feed(cache, ids, 1, 1, 2, start=8)
    except CapacityError:
        if cache.length != 8:
            detail = f"length is {cache.length} after a CapacityError at 8 tokens"
            raise Different(detail, token=8) from None


def bytes_held(lab: Lab) -> None:
    """32 tokens take exactly the bytes of their keys and values."""
    config = lab.model.config
    cache = lab.cache(capacity=32)
    lab.feed(cache, lab.ids(22, 1, 32), 31, 1)
    if cache.nbytes == 0:
        raise UnsupportedError("no bytes are counted (nbytes)")
    width = lab.model.embed_tokens.weight.element_size()
    need = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 32 * width
    if cache.nbytes != need:
        raise Different(f"{cache.nbytes:,} bytes for 2·L·Hk·D·S values of {width} bytes = {need:,}")


CASES = (
    token_by_token,
    prefill_then_decode,
    every_split,
    long_text,
    batch_rows,
    padded_rows,
    truncate_and_go_on,
    second_request,
    emptied,
    two_at_once,
    fork,
    fork_taken_back,
    fork_reordered,
    reorder,
    more_rows_and_fewer,
    save_and_load,
    more_than_fits,
    bytes_held,
)
