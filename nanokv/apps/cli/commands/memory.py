"""`nanokv memory`: bytes of weights and cache with their formulas, and what fits into a memory.

Only config.json is needed. The configs of the Qwen3 family are built in, so these models need no
network, weights or torch. --check is the exception: it allocates every kind of cache and compares
`nbytes` with the formula; a mismatch is a bug of ours (exit code 1). The cache of a model that
nanokv does not run is counted by nanokv/costs/other.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from nanokv import costs
from nanokv.apps.cli.common import layout, speed, terminal
from nanokv.apps.cli.common.arguments import integer
from nanokv.apps.cli.common.files import add_force, ask_to_replace
from nanokv.apps.cli.common.loading import choose_dtype, display_name
from nanokv.apps.cli.common.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    add_model_arguments,
    cache_options,
    model_options,
    output_options,
)
from nanokv.apps.cli.common.plan import count_text
from nanokv.apps.cli.common.text import to_json
from nanokv.apps.cli.memory import other
from nanokv.cache.options import check_options
from nanokv.config import Config
from nanokv.costs.memory import (
    FAMILY,
    MIXTURES,
    SHORT,
    Estimate,
    binary,
    decimal,
    flop_text,
    parse_rate,
    parse_size,
)
from nanokv.costs.other import estimate as other_models
from nanokv.costs.other.estimate import Counted
from nanokv.errors import ConfigError, NanoKVError, UnimplementedError
from weights_loader.strict import UnknownModel, read_object

EXAMPLES = (
    "nanokv memory Qwen/Qwen3-0.6B --context 32768 --batch 4",
    "nanokv memory Qwen/Qwen3-8B --fits 24GiB --cache quantized:k_bits=8:v_bits=4",
    "nanokv memory tiny --check",
    "nanokv memory gpt_oss --context 131072 --fits 80GB",
)
DESCRIPTION = (
    "Bytes of weights and KV cache, from config.json alone. The Qwen3 family works offline. Of a "
    "model that nanokv does not run, the cache is counted layer by layer, as in transformers."
)


def add_arguments(parser: ArgumentParser) -> None:
    """The model as an argument, then the questions about it."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="MODEL",
        help="as -m; also the path of a config.json, or a model_type of transformers: gpt_oss",
    )
    parser.add_argument(
        "--batch", metavar="N", type=integer(1, 10**9), default=1, help="sequences (default: 1)"
    )
    parser.add_argument(
        "--fits",
        metavar="SIZE",
        help="the number of sequences and the context that fit into SIZE: 24GiB, 80GB",
    )
    parser.add_argument(
        "--link",
        metavar="SPEED",
        help="compare sending a cache with prefilling again, over 10Gb/s, 1.25GB/s",
    )
    parser.add_argument(
        "--check", action="store_true", help="allocate every cache and compare with the formula"
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw cache against context: .png, .svg or .pdf"
    )
    add_force(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_model_arguments(parser)


def run(args: Namespace) -> int:
    """Check the caches, print the report, draw the plot."""
    ask_to_replace(args.force, *filter(None, [args.plot]))
    memory = parse_size(args.fits) if args.fits else None
    link = parse_rate(args.link) if args.link else None
    model = replace(model_options(args), source=args.source or args.model)
    cache = cache_options(args)
    output = output_options(args)
    try:
        estimate = plan(model, cache, args.batch)
    except UnimplementedError as error:
        reason = error.args[0]
        counted = count_other(model, cache, args.batch)
        given = {"--check": args.check, "--link": link, "--plot": args.plot}
        given["--cache"] = cache.name != "dict" or cache.options
        other.refuse([flag for flag, value in given.items() if value], counted, reason)
        return print_other(counted, reason, memory, args.json, output)
    limit = estimate.config.max_position_embeddings
    if estimate.context > limit:
        terminal.warning(
            f"--context {estimate.context:,} is more than the model's {limit:,} positions"
        )
    checked = None
    if args.check:
        from nanokv.lab.study.allocation import check

        checked = check(estimate)
    if args.json:
        terminal.write_out(to_json(report(estimate, memory, checked, link)) + "\n")
    else:
        style = terminal.Style(sys.stdout, output.color)
        terminal.write_out(text(estimate, memory, checked, style))
        if link:
            terminal.write_out(link_text(estimate, link, style))
    if args.plot:
        plot(estimate, args.plot)
        terminal.notice(f"plot: {args.plot}", output)
    return 0


def plan(model: ModelOptions, cache: CacheOptions, batch: int) -> Estimate:
    """The Estimate of the flags. Downloads config.json if it is neither built in nor on disk."""
    check_options(cache.name, cache.options)
    config = find_config(model)
    context = cache.context or config.max_position_embeddings
    check_pool(cache.options, context, batch)
    device = "cpu" if model.device == "auto" else model.device
    dtype = choose_dtype(model, config, device)
    stored = stored_size(model, config, dtype)
    return Estimate(
        display_name(model.source), config, dtype, context, batch, cache.name, cache.options, stored
    )


def count_other(model: ModelOptions, cache: CacheOptions, batch: int) -> Counted:
    """The cache of a model that nanokv does not run, from its config.json."""
    name = display_name(model.source)
    if is_architecture(model.source):
        fields = {"model_type": model.source, "dtype": "bfloat16"}
        return other_models.count(name, fields, model.dtype, cache.context, batch)
    import weights_loader

    path = weights_loader.config_file(model.source, model.revision)
    fields = read_object(path, ConfigError)
    weights = other.weight_bytes(path.parent)
    return other_models.count(name, fields, model.dtype, cache.context, batch, weights)


def is_architecture(source: str) -> bool:
    """Whether a MODEL is neither on disk nor a model's name, but a model_type of transformers."""
    return source in other_models.known() and not os.path.exists(source)


def print_other(
    counted: Counted, reason: str, memory: int | None, json: bool, output: OutputOptions
) -> int:
    """The report of a model that is counted and not run."""
    if counted.limit and counted.context > counted.limit:
        terminal.warning(
            f"--context {counted.context:,} is more than the model's {counted.limit:,} positions"
        )
    if json:
        terminal.write_out(to_json(other.report(counted, reason, memory)) + "\n")
    else:
        style = terminal.Style(sys.stdout, output.color)
        terminal.write_out(other.text(counted, reason, memory, style))
    return 0


def stored_size(model: ModelOptions, config: Config, dtype: str) -> int | None:
    """Bytes of the weights of a GGUF file as kernels read them; None if they need plain numbers.

    --device auto counts as a CPU, so that the report does not depend on the machine.
    """
    on_cpu = model.device in ("auto", "cpu")
    if model.source in FAMILY | MIXTURES or dtype == "float16" or not on_cpu:
        return None
    if config.family.own_parts:
        return None
    import weights_loader

    path = weights_loader.config_file(model.source, model.revision)
    matrices = speed.blocks_in(path.parent)
    if not matrices:
        return None
    return speed.stored_bytes(matrices, config, costs.ITEMSIZE[dtype])


def check_pool(options: dict, context: int, batch: int) -> None:
    """NanoKVError if a pool of a fixed number of pages is too small for context and batch."""
    pages = options.get("pages")
    page = options.get("page", 16)
    needed = batch * -(-context // page)
    if pages and pages < needed:
        raise NanoKVError(
            f"{pages:,} pages of {page} hold {pages * page:,} tokens, not {batch:,} × {context:,}",
            f"pages={needed}, or --context {max(1, pages // batch * page)}",
        )


def find_config(model: ModelOptions) -> Config:
    """The Config from the built-in table, a file, a folder, or the hub."""
    if model.revision is None and model.source in FAMILY | MIXTURES:
        return (FAMILY | MIXTURES)[model.source]
    if model.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if is_architecture(model.source):
        raise UnimplementedError(f"these are the default sizes of {model.source} in transformers")
    import weights_loader

    try:
        path = weights_loader.config_file(model.source, model.revision)
    except UnknownModel as error:
        meant = similar_architecture(model.source)
        raise UnknownModel(str(error), f"did you mean {meant}?" if meant else error.hint) from None
    return Config.from_folder(path)


def similar_architecture(source: str) -> str | None:
    """The model_type that differs from `source` in case, `-` and `_` only: gpt-oss → gpt_oss."""
    names = {letters(name): name for name in other_models.known()}
    return names.get(letters(source))


def letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


# --- text -----------------------------------------------------------------------------------------


def text(
    estimate: Estimate, memory: int | None, checked: dict | None, style: terminal.Style
) -> str:
    """The rows with their formulas, then what fits, the check, and the table of the family."""
    width = layout.columns(sys.stdout)
    rows = estimate.rows()
    theirs = in_transformers(estimate)
    if theirs is not None:
        rows.append(("transformers", "its cache for the same tokens", theirs))
    sums = [("together", sum_text(estimate), estimate.total)]
    if estimate.stored is not None:
        numbers = dequantized(estimate)
        rows.insert(1, ("as stored", "blocks of the GGUF file, on a CPU", estimate.stored))
        sums.append(("dequantized", sum_text(numbers), numbers.total))
    found = formula_lines(rows + sums, width)
    note = layout.paragraph(crossover_text(estimate), width, " " * 13)
    lines = [*found[: len(rows)], note, *found[len(rows) :]]
    if memory is not None:
        lines += ["", layout.paragraph(fits_text(estimate, memory), width)]
        if estimate.stored is not None:
            said = fits_text(dequantized(estimate), memory)
            lines.append(layout.paragraph(f"Dequantized: {said}", width))
    if checked is not None:
        lines += ["", layout.paragraph(check_text(checked), width)]
    return "\n".join([*lines, "", *table(estimate, memory, style, width)]) + "\n"


def in_transformers(estimate: Estimate) -> int | None:
    """Bytes of transformers' cache, if layers have windows or states; None: as many as here.

    nanokv keeps 64 positions more in a full window, and one input less of a convolution.
    """
    config = estimate.config
    if not any(config.windows) and not config.states:
        return None
    counted = other_models.count(
        estimate.name, config.to_dict(), estimate.dtype, estimate.context, estimate.batch
    )
    return counted.cached(estimate.context, estimate.batch)


def dequantized(estimate: Estimate) -> Estimate:
    """The same with plain numbers for weights: --dequantize, --plain, or a GPU."""
    return replace(estimate, stored=None)


def weights_text(estimate: Estimate) -> str:
    return "the weights" if estimate.stored is None else "the weights as stored"


def crossover_text(estimate: Estimate) -> str:
    """At how many tokens the cache is as large as the weights."""
    if estimate.crossover is None:
        return f"never reaches {weights_text(estimate)}"
    return f"equals {weights_text(estimate)} at {estimate.crossover:,} tokens"


def sum_text(estimate: Estimate) -> str:
    """Bytes of the weights + bytes of the cache."""
    form = ", as stored" if estimate.stored is not None else ""
    return f"{estimate.held:,} + {estimate.total - estimate.held:,} B{form}"


def formula_lines(rows: list[tuple[str, str, int]], width: int) -> list[str]:
    """(name, formula, bytes) as text: one line each, or two if a formula is too long."""
    long = max(len(formula) for _, formula, _ in rows)
    lines = []
    for name, formula, count in rows:
        both = f"{decimal(count):<9}{binary(count):>11}"
        if 13 + long + 1 + len(both) <= width:
            lines.append(f"{name:<12} {formula:<{long}} {both}")
        else:
            lines.append(f"{name:<12} {both}\n" + layout.paragraph(formula, width, "  "))
    return lines


def fits_text(estimate: Estimate, memory: int) -> str:
    """`24.00 GiB hold …`, or how much is missing."""
    if estimate.held > memory:
        missing = estimate.held - memory
        return (
            f"{binary(memory)} does not hold {weights_text(estimate)}: "
            f"{decimal(missing)} ({binary(missing)}) are missing"
        )
    context = estimate.max_context(memory)
    limit = estimate.config.max_position_embeddings
    longest = "any context" if context is None else f"a context of {context:,}"
    if context is None or context > limit:
        longest += f" (the model is made for {limit:,})"
    return (
        f"{binary(memory)} hold {weights_text(estimate)} and {estimate.max_batch(memory):,} sequences of "
        f"{estimate.context:,} tokens, or {estimate.batch:,} of {longest}"
    )


def check_text(checked: dict) -> str:
    """The sentence about --check: the sizes and the caches that were compared."""
    names = ", ".join(checked["caches"])
    size = f"{checked['tokens']:,} tokens × {checked['batch']:,}"
    return f"checked with {size}: nbytes = formula for {names}"


def family(estimate: Estimate, models: dict[str, Config] = FAMILY) -> list[Estimate]:
    """Estimates of `models` with the same dtype, cache and sizes; before them this one if new."""
    same = (estimate.dtype, estimate.context, estimate.batch, estimate.cache, estimate.options)
    rows = [Estimate(name, config, *same) for name, config in models.items()]
    if estimate.config in models.values():
        stored = estimate.stored
        return [
            replace(row, stored=stored) if row.config == estimate.config else row for row in rows
        ]
    return [estimate, *rows]


def marked_name(row: Estimate, estimate: Estimate) -> str:
    """The name of a row in a table of the family; ▸ marks the requested model."""
    mark = "▸ " if row.config == estimate.config else "  "
    return mark + row.name.removeprefix("Qwen/")[:14]


def link_text(estimate: Estimate, link: float, style: terminal.Style) -> str:
    """--link: the time to transfer one sequence, beside that of a prefill; the family's table."""
    width = layout.columns(sys.stdout)
    speed = f"{decimal(int(link))}/s"
    about = (
        f"{estimate.context:,} tokens prefilled elsewhere are {decimal(estimate.sent)}, "
        f"{terminal.seconds_text(estimate.sent / link)} at {speed}; to prefill them here takes "
        f"{flop_text(estimate.prefill)}. A machine of {flop_text(estimate.break_even(link))}/s "
        "takes as long for both: a slower one gains by receiving the cache, a faster one by "
        "prefilling again"
    )
    head = ("", "KV sent", "in", "prefill", "equal at")
    rows = [
        (
            marked_name(row, estimate),
            decimal(row.sent),
            terminal.seconds_text(row.sent / link),
            flop_text(row.prefill),
            f"{flop_text(row.break_even(link))}/s",
        )
        for row in family(estimate, FAMILY | MIXTURES)
    ]
    note = (
        f"one sequence of {estimate.context:,} tokens, {SHORT[estimate.dtype]}, "
        f"{estimate.cache} cache, {speed}"
    )
    lines = [layout.paragraph(about, width), "", style.dim(layout.paragraph(note, width))]
    return "\n".join(["", *lines, *layout.table(head, rows, width)]) + "\n"


def table(estimate: Estimate, memory: int | None, style: terminal.Style, width: int) -> list[str]:
    """One line per model; the requested model is marked."""
    form = SHORT[estimate.dtype]
    if estimate.stored is not None:
        form += ", ▸ as stored"
    about = f"{form}, {estimate.cache} cache, {estimate.batch:,} × {estimate.context:,} tokens"
    columns = {
        "": lambda row: marked_name(row, estimate),
        "params": lambda row: count_text(costs.parameters(row.config)),
        "weights": lambda row: decimal(row.held),
        "KV / token": lambda row: decimal(row.per_token),
        "a sequence": lambda row: binary(row.cached(row.context, 1)),
        "all": lambda row: binary(row.cached(row.context, row.batch)),
        "= weights at": lambda row: "never" if row.crossover is None else f"{row.crossover:,}",
    }
    if memory:
        columns["batch fits"] = lambda row: f"{row.max_batch(memory):,}"
    rows = [[cell(row) for cell in columns.values()] for row in family(estimate)]
    return [style.dim(layout.paragraph(about, width)), *layout.table(columns, rows, width)]


# --- JSON -----------------------------------------------------------------------------------------


def report(
    estimate: Estimate, memory: int | None, checked: dict | None, link: float | None
) -> dict:
    """The same numbers as `text`, in bytes and tokens."""
    found = numbers(estimate)
    theirs = in_transformers(estimate)
    if theirs is not None:
        found["transformers_kv_bytes"] = theirs
    if memory is not None:
        found["fits"] = {"bytes": memory} | fitting(estimate, memory)
        if estimate.stored is not None:
            found["fits"]["dequantized"] = fitting(dequantized(estimate), memory)
    found["family"] = [numbers(row) for row in family(estimate)]
    if link is not None:
        found["link"] = {"bytes_per_second": link} | transfer(estimate, link)
        found["link"]["family"] = [
            {"model": row.name} | transfer(row, link) for row in family(estimate, FAMILY | MIXTURES)
        ]
    if checked is not None:
        found["check"] = checked
    return found


def fitting(estimate: Estimate, memory: int) -> dict:
    """The most sequences, and the longest context, in `memory` bytes."""
    return {
        "max_batch": estimate.max_batch(memory),
        "max_context": estimate.max_context(memory),
    }


def transfer(row: Estimate, link: float) -> dict:
    """The transfer of one sequence over a link of `link` bytes per second."""
    return {
        "bytes": row.sent,
        "seconds": row.sent / link,
        "prefill_flops": row.prefill,
        "break_even_flops_per_second": row.break_even(link),
    }


def numbers(row: Estimate) -> dict:
    """The numbers of one model."""
    return {
        "model": row.name,
        "parameters": costs.parameters(row.config),
        "dtype": row.dtype,
        "context": row.context,
        "batch": row.batch,
        "weights_bytes": row.weights,
        "stored_bytes": row.stored,
        "kv_bytes_per_token": row.per_token,
        "kv_bytes_per_sequence": row.exact // row.batch,
        "kv_bytes": row.exact,
        "cache": {
            "kind": row.cache,
            "options": row.options,
            "bytes": row.cached(row.context, row.batch),
            "bytes_per_sequence": row.cached(row.context, 1),
        },
        "total_bytes": row.total,
        "dequantized_total_bytes": dequantized(row).total,
        "crossover_tokens": row.crossover,
    }


# --- drawing --------------------------------------------------------------------------------------


def plot(estimate: Estimate, path: Path) -> None:
    """Plot cache (solid) and weights (dashed) of every model against tokens, on log axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    tokens = [2**i for i in range(8, 21)]
    for i, row in enumerate(family(estimate)):
        width = 2.5 if row.config == estimate.config else 1.2
        gigabytes = [row.cached(n, 1) / 1e9 for n in tokens]
        axes.plot(tokens, gigabytes, color=f"C{i}", lw=width, label=row.name)
        axes.axhline(row.held / 1e9, color=f"C{i}", lw=width / 2, ls="--")
    axes.set(
        xscale="log", yscale="log", xlabel="tokens in the cache, over all sequences", ylabel="GB"
    )
    axes.set_title(f"{estimate.cache} cache (solid) and weights (dashed), {SHORT[estimate.dtype]}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise NanoKVError(f"--plot {path}: {error}", "--plot memory.png") from error
