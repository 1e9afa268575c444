"""From the model flags to a loaded model: plan without torch, announce, check memory, load.

The plan needs only config.json and arithmetic. So the banner appears before torch is imported, and
a model that does not fit is refused before any of it is allocated. `nanokv.loading` does the work.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import speculation, speed
from nanokv.apps.cli.common.arguments import environment, integer
from nanokv.apps.cli.common.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    SpeedOptions,
    TemplateOptions,
)
from nanokv.apps.cli.common.plan import Choice, Loaded, Plan, make_cache
from nanokv.apps.cli.common.terminal import bytes_text, loading, notice, sanitize_line
from nanokv.cache.options import check_options
from nanokv.config import Config
from nanokv.costs import ITEMSIZE, cache_bytes, kv_bytes_per_token, weight_bytes
from nanokv.costs.free_memory import available_memory, free_address_space
from nanokv.costs.memory import SHORT, most_tokens
from nanokv.errors import ConfigError, ContextError, NanoKVError
from nanokv.parallel.group import ALONE, Ranks
from nanokv.support.clock import stamp
from nanokv.support.neighbours import watch
from nanokv.text import render_process
from nanokv.text.chat_templates import names, read_template
from weights_loader import default_dtype
from weights_loader.strict import quote, read_object

if TYPE_CHECKING:
    import torch

    from nanokv.loading import Read
    from nanokv.model import Transformer
    from nanokv.text.tokenizer import Tokenizer
    from weights_loader.prefetch import Prefetch

PAGE = 16  # tokens per page if --cache gives no page size
# Bytes of weights per thread and step. With fewer, a thread waits about as long as it works.
SHARE = 2_000_000
TORCH_BYTES = 600_000_000  # address space that importing torch takes; measured, CPU, torch 2.13
NOTHING_FITS = "no context fits; -m tiny does"


def load_model(
    model: ModelOptions,
    cache: CacheOptions,
    output: OutputOptions,
    ranks: Ranks = ALONE,
    announce: Callable[[Plan], object] | None = None,
) -> Loaded:
    """Load the model. `announce(plan)` is called before torch is imported, where possible."""
    with loading():
        return _load_model(model, cache, output, ranks, announce)


def _load_model(
    model: ModelOptions,
    cache: CacheOptions,
    output: OutputOptions,
    ranks: Ranks,
    announce: Callable[[Plan], object] | None,
) -> Loaded:
    start = time.perf_counter()
    speed.check(model.speed, ranks.size)
    speed.check_invariant(model.speed, cache)
    ranks.hear()  # the other ranks wait here until rank 0 has a prompt
    plan = plan_model(model, cache, output, ranks)
    early = model.device == "cpu" or (model.device == "auto" and not _gpu_possible())
    if early:
        plan = decide(plan, model.speed, output, announce)
    prefetched = speed.prefetch(plan)
    if model.template and not ranks.rank:  # start the process that will render templates
        render_process.start()
    check_address_space()
    if early:
        watch(plan.threads)
    stamp("plan")
    import torch  # takes about 2 seconds

    stamp("torch")
    device = find_device(model.device)
    plan = replace(plan, device=device, dtype_name=choose_dtype(model, plan.config, device))
    compare(plan)
    if not early:
        plan = decide(plan, model.speed, output, announce)
    dtype = getattr(torch, plan.dtype_name)
    # A cache that does not suit the model is refused before weights are read. It is empty: 0 bytes.
    make_cache(plan, dtype)
    torch.set_num_threads(plan.threads)
    plan = replace(plan, code=speed.confirmed(plan.code, output))
    plain, tokenizer = _read(plan, model, dtype, prefetched, ranks)
    made = speed.optimized(plain, plan.code, output)
    stamp("kernels")
    return carried_out(plan, plain, made, tokenizer, dtype, time.perf_counter() - start)


def _read(
    plan: Plan,
    model: ModelOptions,
    dtype: "torch.dtype",
    prefetched: "Prefetch | None",
    ranks: Ranks,
) -> "tuple[Transformer, Tokenizer]":
    """(model, tokenizer) of the plan's folder; with several ranks, only this rank's part."""
    from nanokv.loading import load_folder

    stamp("code")
    found = load_folder(
        plan.folder,
        plan.fields,
        dtype,
        plan.device,
        model.check_finite,
        prefetched,
        read_of(ranks, plan.code, model.check_finite),
        partial(choose_template, model.template),
    )
    ranks.meet()
    stamp("weights")
    return found


def carried_out(
    plan: Plan,
    plain: "Transformer",
    made: "Transformer",
    tokenizer: "Tokenizer",
    dtype: "torch.dtype",
    seconds: float,
) -> Loaded:
    """The Loaded of a plan: `plain` is the model as read, `made` the one that speed.py returned."""
    code = plan.code
    if made is plain and code.fast and not code.as_stored:  # a draft model is then plain as well
        code = Choice(False, "plain (kernels cannot be loaded)")
    # `made.config`, because only the tensors show whether the head is tied.
    changes = {"config": made.config, "code": code}
    if made is not plain and not plan.code.quantize:
        changes["plain"] = plain
    return Loaded(
        **vars(plan) | changes, model=made, tokenizer=tokenizer, dtype=dtype, load_s=seconds
    )


def choose_template(template: TemplateOptions | None, tokenizer: "Tokenizer") -> None:
    """Apply --chat-template, which replaces the checkpoint's template."""
    if template is None or template.choice is None:
        return
    choice = template.choice
    if choice not in tokenizer.chat_templates and os.path.isfile(choice):
        tokenizer.chat_template = read_template(Path(choice))
    elif choice in tokenizer.chat_templates:
        tokenizer.chat_template = tokenizer.chat_templates[choice]
    else:
        known = names(tokenizer.chat_templates) or "none"
        what = f"--chat-template {quote(choice)} is neither a file nor a template of this model"
        raise NanoKVError(what, f"it has {known}")
    tokenizer.template()  # raises now if the template is broken


def compare(plan: Plan) -> None:
    """ParallelError if the ranks have different configs or dtypes. ranks.py compares flags."""
    plan.ranks.meet()  # a rank may have had to download the model
    for what, value in (("config.json", plan.fields), ("the dtype", plan.dtype_name)):
        plan.ranks.check_alike(
            what, json.dumps(value, sort_keys=True), "the same files and devices on every rank"
        )


def read_of(ranks: Ranks, code: Choice, check_finite: bool) -> "Read | None":
    """The reader of one rank's part of the weights, or of blocks as stored; None: the usual one."""
    if code.as_stored:
        from nanokv.fast import stored

        return partial(stored.read, check_finite=check_finite)
    if ranks.size == 1:
        return None
    from nanokv.parallel.reading import reader

    return reader(ranks)


def decide(
    plan: Plan,
    wanted: SpeedOptions | None,
    output: OutputOptions,
    announce: Callable[[Plan], object] | None,
) -> Plan:
    """The plan with its `code` chosen. Prints the banner, or a notice if a build begins.

    Raises NanoKVError if the model and its cache do not fit into memory.
    """
    available = available_memory(plan.device)
    drafting = 0
    if wanted is not None:
        drafting = speculation.memory(wanted, plan)
    itemsize = ITEMSIZE[plan.dtype_name]
    matrices = speed.stored_matrices(plan, wanted)
    if matrices:
        plan = replace(plan, stored=speed.stored_bytes(matrices, plan.config, itemsize))
    taken = weights_memory(plan) + cache_memory(plan) + drafting

    def fits(more: int) -> bool:
        return available is None or taken + more <= available

    plan = replace(plan, code=speed.choose(plan, wanted, fits))
    if not plan.code.as_stored:
        plan = replace(plan, stored=None)
    elif others := speed.without_kernels(matrices):
        counts = ", ".join(f"{count} of {kind}" for kind, count in others.items())
        notice(f"{counts}: matrices without kernels, which become {plan.dtype_name}", output)
    if announce:
        announce(plan)
    elif speed.NEXT_START in plan.code.text:
        notice(plan.code.text, output)
    flags = {}
    if drafting:
        flags["--speculate"] = drafting
    if plan.code.requested and not plan.code.as_stored:
        flags["--fast"] = speed.fusing_bytes(plan)
    check_memory(plan, available, flags)
    return plan


def plan_model(
    model: ModelOptions, cache: CacheOptions, output: OutputOptions, ranks: Ranks = ALONE
) -> Plan:
    """The plan from flags, environment and config.json."""
    if model.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported
    check_device(model.device)
    check_options(cache.name, cache.options)
    thread_count(ranks.size)  # check the environment variables before anything is downloaded
    import weights_loader

    with loader_notices(output):
        folder = Path(weights_loader.resolve(model.source, revision=model.revision))
    fields = read_object(folder / "config.json", ConfigError)
    config = Config.from_dict(fields)
    dtype_name = choose_dtype(model, config, "cpu")
    threads = model.threads or thread_count(ranks.size, weight_bytes(config, ITEMSIZE[dtype_name]))
    return Plan(
        model.source,
        display_name(model.source),
        folder,
        config,
        dtype_name,
        threads,
        "cpu",
        choose_context(cache.context, config),
        cache.name,
        cache.options,
        fields=fields,
        ranks=ranks,
    )


class Notices(logging.Handler):
    """Prints each log record as a notice."""

    def __init__(self, output: OutputOptions):
        super().__init__()
        self.output = output

    def emit(self, record: logging.LogRecord) -> None:
        notice(record.getMessage(), self.output)


@contextmanager
def loader_notices(output: OutputOptions) -> Iterator[None]:
    """A context in which log records of weights_loader, such as a download, become notices."""
    logger = logging.getLogger("weights_loader")
    handler = Notices(output)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def check_device(name: str) -> None:
    """Check the form of a device's name. Only torch knows whether the device exists."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise NanoKVError(
            f"--device {name!r} is not auto, cpu, cuda, cuda:N or mps", "--device auto"
        )


def display_name(source: str) -> str:
    """The last part of a path, or the name as given; sanitized."""
    if os.path.exists(source):
        source = Path(source).resolve().name
    return sanitize_line(source)


def choose_context(wanted: int | None, config: Config) -> int:
    """--context; ContextError if it is more than the model's positions."""
    limit = config.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ContextError(
            f"--context {wanted:,} is more than the model's {limit:,} positions",
            f"--context {limit}, or less",
        )
    return wanted or limit


def choose_dtype(model: ModelOptions, config: Config, device: str) -> str:
    """--dtype; auto means the same as in nanokv.load."""
    if model.dtype == "auto":
        return default_dtype(model.source, config.torch_dtype, device)
    return model.dtype


def thread_count(ranks: int = 1, weights: int | None = None) -> int:
    """NANOKV_THREADS, else OMP_NUM_THREADS, else 1 with several ranks, else the usable cores.

    Of the cores, at most one per SHARE bytes of `weights` is used.
    """
    text = environment("NANOKV_THREADS")
    if text is not None:
        try:
            return integer(1, 4096)(text)
        except Exception as error:
            raise NanoKVError(f"NANOKV_THREADS: {error}", "unset NANOKV_THREADS") from None
    text = environment("OMP_NUM_THREADS")
    if text is not None:
        return _omp_threads(text)
    if ranks > 1:
        return 1
    cores = _usable_cores()
    if weights is None:
        return cores
    return min(cores, max(1, weights // SHARE))


def _omp_threads(text: str) -> int:
    first = text.split(",")[0].strip()  # "4,2": 4 for the outer level of parallelism
    if not re.fullmatch("0*[1-9][0-9]{0,5}", first):
        raise NanoKVError(
            f"OMP_NUM_THREADS: {text[:40]!r} is not a number of threads", "unset OMP_NUM_THREADS"
        )
    return int(first)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- devices and memory ---------------------------------------------------------------------------


def _gpu_possible() -> bool:
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd") or os.name == "nt"


def find_device(wanted: str) -> str:
    """The device that `wanted` means on this machine; NanoKVError if there is no such device."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = wanted.partition(":")
    count = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }[kind]
    if int(index or 0) >= count:
        raise NanoKVError(
            f"--device {wanted}: there are {count} {kind} devices here", "--device cpu"
        )
    return wanted


def check_address_space() -> None:
    """NanoKVError if there is too little address space to import torch.

    Without this check some of torch's libraries abort the process.
    """
    free = free_address_space()
    if free is not None and free < TORCH_BYTES:
        raise NanoKVError(
            f"torch takes about {bytes_text(TORCH_BYTES)} of address space, "
            f"ulimit -v leaves {bytes_text(max(0, free))}",
            "ulimit -v unlimited",
        )


def check_memory(plan: Plan, available: int | None, flags: dict[str, int] | None = None) -> None:
    """NanoKVError, before anything is allocated, if the plan does not fit into `available` bytes.

    The plan needs the weights, the cache of a full context, and the bytes of `flags` (flag →
    bytes). With several ranks only the parts on this machine count. If `available` is None
    (unknown), nothing is checked.
    """
    flags = flags or {}
    if available is None:
        return
    ranks = plan.ranks
    weights = weights_memory(plan) * ranks.local // ranks.size
    cached = cache_memory(plan) * ranks.local // ranks.size
    more = sum(flags.values())
    if weights + cached + more <= available:
        return
    holder = f"the cache of {plan.context:,} tokens"
    if pages := plan.cache_options.get("pages"):
        holder = f"a pool of {pages:,} pages"
    needs = [f"{bytes_text(weights)} for weights", f"{bytes_text(cached)} for {holder}"]
    needs += [f"{bytes_text(count)} for {flag}" for flag, count in flags.items()]
    hint = memory_hint(plan, available - more)
    if not hint:
        hint = f"leave out {' and '.join(flags)}" if flags else NOTHING_FITS
    raise NanoKVError(
        f"{plan.name} needs {' + '.join(needs)} in {SHORT[plan.dtype_name]}; "
        f"{bytes_text(available)} are free",
        hint,
    )


def weights_memory(plan: Plan) -> int:
    """Bytes of the weights: as stored, or in the dtype of the plan."""
    if plan.stored is not None:
        return plan.stored
    return weight_bytes(plan.config, ITEMSIZE[plan.dtype_name])


def cache_memory(plan: Plan, tokens: int | None = None) -> int:
    """Bytes of the cache of --cache with `tokens` tokens (default: a full context).

    A pool of a given size counts as a whole. An offloaded cache keeps only two layers in this
    memory.
    """
    if tokens is None:
        tokens = plan.context
    config = plan.config
    itemsize = ITEMSIZE[plan.dtype_name]
    name = plan.cache_name
    options = dict(plan.cache_options)
    if name == "batch":  # it holds one cache per row
        name = options.pop("of", "dict")
    if options.get("pages"):
        return options["pages"] * options.get("page", PAGE) * kv_bytes_per_token(config, itemsize)
    if name == "offloaded" and (options.get("to", "disk") == "disk" or plan.device != "cpu"):
        config = replace(config, num_hidden_layers=min(2, config.num_hidden_layers))
    return cache_bytes(name, config, tokens, 1, itemsize, capacity=tokens, **options)


def memory_hint(plan: Plan, available: int) -> str:
    """The nearest flags that fit, or "": a smaller context or pool, this dtype or bfloat16."""
    fits = []
    for dtype in dict.fromkeys((plan.dtype_name, "bfloat16")):
        if ITEMSIZE[dtype] > ITEMSIZE[plan.dtype_name]:
            continue
        other = replace(plan, dtype_name=dtype)
        room = available - weights_memory(other)
        if plan.cache_options.get("pages"):
            size = smaller_pool(other, room)
        else:
            size = smaller_context(other, room)
        if size is None:
            continue
        flags = [size]
        if dtype != plan.dtype_name:
            flags.insert(0, f"--dtype {dtype}")
        fits.append(" ".join(filter(None, flags)))
    return " or ".join(dict.fromkeys(fits))


def smaller_context(plan: Plan, room: int) -> str | None:
    """`--context N` that fits into `room` bytes; "" if the full one fits, None if none fits."""
    most = most_tokens(lambda tokens: cache_memory(plan, tokens) <= room)
    if most is None or most >= plan.context:
        return ""
    if most < 2:
        return None
    if most >= 64:  # a round number
        most = most // 64 * 64
    return f"--context {most}"


def smaller_pool(plan: Plan, room: int) -> str | None:
    """`--cache` with a smaller pool that fits; "" if the given one fits, None if none fits."""
    options = plan.cache_options
    pages = room * options["pages"] // cache_memory(plan)
    if pages < 1:
        return None
    if pages >= options["pages"]:
        return ""
    values = "".join(f":{key}={value}" for key, value in (options | {"pages": pages}).items())
    return f"--cache {plan.cache_name}{values}"
