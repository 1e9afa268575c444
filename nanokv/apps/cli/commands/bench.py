"""`nanokv bench`: runs nanokv/lab/bench and prints a table, JSON (--json) and a plot (--plot)."""

import itertools
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.bench.peers import Peers
from nanokv.apps.cli.commands.convert import GGUF_TYPES
from nanokv.apps.cli.common import layout, options, terminal
from nanokv.apps.cli.common.arguments import cache_name, integer, real
from nanokv.apps.cli.common.files import add_force, ask_to_replace
from nanokv.apps.cli.common.loading import load_model, plan_model
from nanokv.apps.cli.common.options import CacheOptions, ModelOptions, OutputOptions
from nanokv.apps.cli.common.plan import Loaded, threads_text
from nanokv.apps.cli.common.random_model import RANDOM, load_random
from nanokv.apps.cli.common.speed import code_text
from nanokv.apps.cli.common.text import read_prompt_bytes, to_json
from nanokv.config import Config
from nanokv.errors import NanoKVError
from nanokv.parallel.group import ALONE, Ranks

if TYPE_CHECKING:
    from nanokv.lab.bench.rotation import Rotation, Row
    from nanokv.lab.bench.runners import Ours

EXAMPLES = (
    "nanokv bench",
    "nanokv bench --weights plain,fast,int8 --contexts 128,512,1024 --plot bench.png",
    "nanokv bench -m qwen3-0.6b-random --dtype bf16 --against transformers,llama.cpp --json "
    "> bench.json",
    "nanokv bench -m model.gguf --contexts 512 --against llama.cpp:stored",
    "nanokv bench --requests 32 --against transformers",
    "nanokv bench --beside busy",
    "nanokv bench --quality --weights fast,int8,q8_0,q4_k_m",
    "nanokv bench --quality --text README.md --weights fast "
    "--caches dict,quantized:bits=4,sliding:window=256:sinks=4",
)
DESCRIPTION = (
    "Prefill and decode speed here, beside the memory bandwidth measured in the same run. With "
    "--tensor-parallel: of the model on several ranks; bytes, GB/s and bandwidth are then those of "
    "one rank."
)
RANKS = "alike"  # every rank measures the same; rank 0 decides when to stop, and prints
WRITTEN = ("q8_0", "q4_0", "q4_k_m")  # types of GGUF files that are written for the run
WEIGHTS = ("plain", "fast", "invariant", "int8", "int4", "stored", *WRITTEN)
LLAMA_CPP = tuple(f"llama.cpp:{kind}" for kind in ("stored", *WRITTEN))
AGAINST = ("transformers", "transformers:static", "llama.cpp", *LLAMA_CPP)
# A run is called noisy above this spread of decode times or bandwidth (as a fraction), or above
# this number of cores that other processes keep busy.
NOISY = 0.15


@dataclass(frozen=True)
class BenchOptions:
    """The options of this command."""

    contexts: str
    caches: str | None
    weights: str | None
    batch: str
    uncached: bool
    against: str | None
    through: str | None
    peer_timeout: float | None
    steps: int
    repeat: int
    requests: int | None
    quality: bool
    text: Path | None
    recall: int | None
    beside: str | None
    json: bool
    plot: str | None
    model: ModelOptions
    cache: CacheOptions
    output: OutputOptions


def add_arguments(parser: ArgumentParser) -> None:
    """What to measure, what to compare with, and the form of the report."""
    _add_own_runners(parser)
    _add_peers(parser)
    parser.add_argument(
        "--steps", type=integer(1), default=16, help="decode steps per measurement (default: 16)"
    )
    parser.add_argument(
        "--repeat",
        type=integer(1),
        default=5,
        help="rounds; medians are shown (default: %(default)s)",
    )
    _add_modes(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--plot", metavar="FILE", help="a picture as well: .png or .svg")
    add_force(parser)
    options.add_model_arguments(parser, options.CACHE)


def _add_own_runners(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--contexts", default="128,1024", metavar="N,N", help="cached tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--caches", metavar="KIND,KIND", help="cache kinds (default: the one of --cache)"
    )
    parser.add_argument(
        "--weights",
        metavar="W,W",
        help="plain = the model as loaded, fast = nanokv.optimize, invariant = fast with "
        "--batch-invariant, int8, int4, stored = the blocks "
        f"of a GGUF file; {', '.join(WRITTEN)} = as stored in such a file, written for the run "
        "(default: plain,fast; of a GGUF file stored,fast; on several ranks plain)",
    )
    parser.add_argument(
        "--batch", default="1", metavar="N,N", help="rows decoded together (default: %(default)s)"
    )
    parser.add_argument(
        "--uncached",
        action="store_true",
        help="also without a cache: every token again at every step",
    )


def _add_peers(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        metavar="X,X",
        help=f"other runtimes in the same rotation: {', '.join(AGAINST)}",
    )
    parser.add_argument(
        "--through",
        choices=("cli",),
        metavar="cli",
        help="also as `nanokv generate`, started anew for every measurement: a user's waiting time",
    )
    parser.add_argument(
        "--peer-timeout",
        type=real(0, above=True),
        metavar="S",
        help="end a runtime of --against that takes longer to load, or for one measurement "
        "(default: 10 minutes to load; 20 × the slowest measurement so far, at least 60 s)",
    )


def _add_modes(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        type=integer(1),
        metavar="N",
        help="instead: N prompts of 8 … the largest of --contexts tokens through the engine, "
        "--steps new ones each",
    )
    parser.add_argument(
        "--beside",
        choices=("busy",),
        metavar="busy",
        help="instead: decode tok/s alone, beside a process that keeps a core busy, and with one "
        "thread there",
    )
    parser.add_argument(
        "--quality",
        action="store_true",
        help="instead: the effect of each of --weights and --caches on the likelihood of a text; "
        f"--weights may also be types of a GGUF file ({', '.join(GGUF_TYPES)}), which is written "
        "for the run and read as stored",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="the text of --quality, up to --context tokens (default: conversations that are "
        "not in tiny's training corpus)",
    )
    parser.add_argument(
        "--recall",
        type=integer(1, 1000),
        metavar="N",
        help="with --quality and --caches: also N talks of two facts, asked for one after the other; "
        "known = of six values the told one is the likeliest",
    )


def command_options(args: Namespace) -> BenchOptions:
    """The options of the flags of add_arguments."""
    return BenchOptions(
        args.contexts,
        args.caches,
        args.weights,
        args.batch,
        args.uncached,
        args.against,
        args.through,
        args.peer_timeout,
        args.steps,
        args.repeat,
        args.requests,
        args.quality,
        args.text,
        args.recall,
        args.beside,
        args.json,
        args.plot,
        options.model_options(args),
        options.cache_options(args),
        options.output_options(args),
    )


def run(args: Namespace, ranks: Ranks = ALONE) -> int:
    """Measure and print. After Ctrl-C the rounds that are done are printed; exit code 130."""
    given = command_options(args)
    contexts, batches, weights, against = checked(given, ranks.size)
    if not ranks.rank:
        ask_to_replace(args.force, *filter(None, [given.plot]))
    loaded = load(given, ranks)
    weights = runnable(given, loaded, weights)
    if given.quality:
        return quality(given, loaded, weights)
    longest = loaded.context - given.steps
    if max(contexts) > longest:
        raise NanoKVError(
            f"--contexts {max(contexts):,} leaves no room for {given.steps} steps: "
            f"at most {longest:,}"
        )
    if given.requests:
        return serve(given, loaded, weights, against, given.requests, max(contexts))
    if given.beside:
        return beside(given, loaded, make_runners(given, loaded, weights, batches), contexts)
    return measure(given, loaded, contexts, batches, weights, against)


def load(given: BenchOptions, ranks: Ranks) -> Loaded:
    """Load a checkpoint, or a published shape with random weights."""
    if given.model.source in RANDOM:
        return load_random(given.model, given.cache, ranks)
    return load_model(given.model, given.cache, given.output, ranks)


def measure(
    given: BenchOptions,
    loaded: Loaded,
    contexts: list[int],
    batches: list[int],
    weights: list[str],
    against: list[str],
) -> int:
    """Measure every runner at every context, in rotation, and print the report."""
    from nanokv.lab.bench.machine import Others, gemm_peak
    from nanokv.lab.bench.rotation import Rotation

    with Peers(loaded, bool(against or given.through), given.peer_timeout) as peers:
        loaded = peers.loaded
        runners = make_runners(given, loaded, weights, batches)
        if given.through:
            runners += peers.commands(runners, given.cache.context)
        runners += peers.runners(against, max(contexts) + given.steps)
        peak = gemm_peak(loaded.dtype, loaded.device)
        others = Others([*peers.pids(), *rank_pids(loaded.ranks)])
        rotation = Rotation(
            runners, contexts, loaded.config.vocab_size, loaded.device, given.repeat, given.steps
        )
        # Before this line, Ctrl-C ends the program at once.
        stop = carry_out(rotation.run(), rotation.total, given.output, loaded.ranks, peers)
        busy = others.cores()
    if not loaded.ranks.rank:
        report(given, loaded, rotation, peak, busy)
    return exit_code(stop)


def exit_code(stop: terminal.Interrupt) -> int:
    """130 after Ctrl-C, else 0; raises Terminated after SIGTERM."""
    stop.finish()
    return 130 if stop.requested else 0


def checked(given: BenchOptions, ranks: int) -> tuple[list[int], list[int], list[str], list[str]]:
    """(contexts, batches, weights, against) of the flags, after all checks."""
    contexts = numbers("--contexts", given.contexts, "128,1024")
    batches = numbers("--batch", given.batch, "1,4")
    weights = weights_of(given, ranks)
    against = []
    if given.against:
        against = names("--against", given.against, AGAINST)
    check_flags(given, against)
    return contexts, batches, weights, against


def check_flags(given: BenchOptions, against: list[str]) -> None:
    """NanoKVError for flags that exclude each other, or a plot that could not be written."""
    if given.plot:
        check_plot(given.plot)
    modes = {"--quality": given.quality, "--requests": given.requests, "--beside": given.beside}
    mode = next((flag for flag, wanted in modes.items() if wanted), None)
    if mode == "--requests" and not set(against) <= {"transformers"}:
        raise NanoKVError(
            "--requests compares with transformers' generate_batch only",
            hint="--against transformers",
        )
    unused = {
        "--against": against and mode != "--requests",
        "--plot": given.plot and not (mode == "--quality" and given.caches),
        "--uncached": given.uncached,
        "--caches": given.caches and mode == "--requests",
        "--batch": given.batch != "1" and mode != "--beside",
        "--through": given.through,
    } | {flag: wanted and flag != mode for flag, wanted in modes.items()}
    for flag, wanted in unused.items():
        if mode and wanted:
            raise NanoKVError(f"{flag} means nothing to {mode}", hint=f"leave {flag} out")
    if given.text and not given.quality:
        raise NanoKVError(
            "--text is the text of --quality", hint="nanokv bench --quality --text FILE"
        )
    if given.recall and not (given.quality and given.caches):
        raise NanoKVError(
            "--recall counts what the caches of --quality recall",
            hint=f"nanokv bench --quality --caches dict,quantized:bits=4 --recall {given.recall}",
        )


def check_plot(path: str) -> None:
    """NanoKVError if no plot can be drawn or written to `path`."""
    if Path(path).suffix not in (".png", ".svg"):
        raise NanoKVError(f"--plot {path!r} does not end in .png or .svg", "--plot bench.png")
    folder = Path(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise NanoKVError(f"--plot {path!r}: no file can be written there", "--plot bench.png")
    from nanokv.lab.bench.plot import figure_class

    figure_class()  # raises NanoKVError if matplotlib is not installed


def weights_of(given: BenchOptions, ranks: int) -> list[str]:
    """The names of --weights. Kernels need whole weights, so several ranks default to plain."""
    usual = "plain" if ranks > 1 else "plain,fast"
    known: tuple[str, ...] = WEIGHTS
    if given.quality:
        known = tuple(dict.fromkeys((*WEIGHTS, *GGUF_TYPES)))
    return names("--weights", given.weights or usual, known)


def check_ranks(given: BenchOptions, ranks: int) -> None:
    """NanoKVError for flags that measure in one process, before ranks are started."""
    others = [f"--weights {name}" for name in weights_of(given, ranks) if name != "plain"]
    one_process = {
        "--against": given.against,
        "--requests": given.requests,
        "--quality": given.quality,
        "--through": given.through,
        "--beside": given.beside,
    } | dict.fromkeys(others, True)
    for flag in (flag for flag, wanted in one_process.items() if wanted):
        raise NanoKVError(
            f"{flag} with --tensor-parallel: it is measured in one process, this would be on "
            f"{ranks}",
            f"leave out {flag}",
        )
    checked(given, ranks)


def config_of(given: BenchOptions) -> Config:
    """The Config of the model that will be measured."""
    if given.model.source in RANDOM:
        return RANDOM[given.model.source]
    return plan_model(given.model, given.cache, given.output).config


def rank_pids(ranks: Ranks) -> list[int]:
    """The other ranks on this machine; their work does not count as that of other processes."""
    import torch

    everyone = ranks.gather(torch.tensor(os.getpid())).tolist()
    first = ranks.rank // ranks.local * ranks.local
    return [pid for pid in everyone[first : first + ranks.local] if pid != os.getpid()]


def serve(
    given: BenchOptions,
    loaded: Loaded,
    weights: list[str],
    against: list[str],
    count: int,
    longest: int,
) -> int:
    """--requests: `count` requests at once, by our engine and by transformers."""
    from nanokv.lab.bench import serving

    prompts = serving.requests_of(loaded.config.vocab_size, count, longest)
    tokens = sum(map(len, prompts))
    with Peers(loaded, bool(against), given.peer_timeout) as peers:
        loaded = peers.loaded
        served = []
        for name, model in made(loaded, weights).items():
            answer = serving.ours(model, prompts, given.steps)
            served.append(serving.Served(f"nanokv {name} engine", answer, tokens))
        if against:
            work = peers.checkpoint() | {"prompts": prompts, "tokens": given.steps}
            answer = serving.theirs(peers.start("generate_batch", work))
            served.append(serving.Served("transformers generate_batch", answer, tokens))
        total = (given.repeat + 1) * len(served)
        stop = carry_out(
            serving.rounds(served, given.repeat), total, given.output, loaded.ranks, peers
        )
    rows = [one.figures() for one in served if one.seconds]
    failed = [
        {"label": one.label, "rounds": len(one.seconds), "error": one.error}
        for one in served
        if one.error
    ]
    report_served(given, loaded, rows, failed)
    return exit_code(stop)


def report_served(
    given: BenchOptions, loaded: Loaded, rows: list[dict], failed: list[dict]
) -> None:
    """Print the table of --requests, or one JSON object."""
    if given.json:
        facts = facts_of(loaded) | {"requests": given.requests}
        terminal.write_out(to_json(facts | {"rows": rows, "failed": failed}) + "\n")
        return
    columns = {
        "": lambda row: row["label"],
        "prompt tokens": lambda row: f"{row['prompt_tokens']:,}",
        "new tokens": lambda row: f"{row['generated']:,}",
        "seconds": lambda row: f"{row['seconds']:.2f}",
        "new tok/s": lambda row: f"{row['tok_s']:,.1f}",
    }
    facts_line = [
        f"{loaded.name} {loaded.dtype_name}",
        where_text(loaded),
        f"{given.requests} requests",
    ]
    show(facts_line, columns, rows)
    show_failed((row["label"], row["error"], "") for row in failed)


def beside(given: BenchOptions, loaded: Loaded, runners: "list[Ours]", contexts: list[int]) -> int:
    """--beside: decode speed alone, beside a busy core, and there with one thread, in rotation."""
    from nanokv.lab.bench.beside import Beside

    if loaded.threads < 2 or loaded.device != "cpu":
        raise NanoKVError(
            "--beside busy compares several threads of a CPU with one",
            "--device cpu --threads 2, or more",
        )
    rows = [Beside(runner, context, given.steps) for context in contexts for runner in runners]

    def rounds() -> Iterator[None]:
        for turn in range(given.repeat + 1):
            for row in rows:
                row.measure(loaded.config.vocab_size, turn)
                yield

    stop = carry_out(rounds(), (given.repeat + 1) * len(rows), given.output)
    report_beside(given, loaded, [row.figures() for row in rows if row.alone])
    return exit_code(stop)


def report_beside(given: BenchOptions, loaded: Loaded, rows: list[dict]) -> None:
    """Print the table of --beside, or one JSON object."""
    if given.json:
        facts = facts_of(loaded) | {"beside": given.beside}
        terminal.write_out(to_json(facts | {"rows": rows}) + "\n")
        return
    columns = {
        "": lambda row: row["label"],
        "context": lambda row: f"{row['context']:,}",
        "alone": lambda row: f"{row['alone_tok_s']:,.1f}",
        "beside a busy core": lambda row: f"{row['beside_tok_s']:,.1f}",
        "one thread there": lambda row: f"{row['one_thread_tok_s']:,.1f}",
        "of one thread": lambda row: f"{row['ratio']:.0%}",
    }
    facts_line = [f"{loaded.name} {loaded.dtype_name}", ranks_text(loaded), "decode tok/s"]
    show(facts_line, columns, rows)


def quality(given: BenchOptions, loaded: Loaded, weights: list[str]) -> int:
    """--quality: changes of log-likelihood per token, perplexity, and bytes of weights or cache.

    The reference is the plain model in one forward pass.
    """
    if loaded.tokenizer is None:
        raise NanoKVError(
            "random weights make every text equally unlikely", hint="nanokv bench --quality -m tiny"
        )
    import torch

    from nanokv.cache.options import check_options
    from nanokv.lab.bench.facts import VALUES
    from nanokv.lab.bench.quality import Text, changes
    from nanokv.lab.bench.recall import talk

    caches = {}
    if given.caches:
        caches = {text: cache_name(text) for text in given.caches.split(",")}
    for name, how in caches.values():
        check_options(name, how)
    ids, source = text_ids(given.text, loaded)
    talks = [talk(loaded.tokenizer, seed) for seed in range(given.recall or 0)]
    text = Text(torch.tensor([ids], device=loaded.device), talks)
    measured = changes(loaded.model, made(loaded, weights), text, caches)
    rows: list[dict] = []
    stop = carry_out(map(rows.append, measured), len(weights) * max(1, len(caches)), given.output)
    if given.json:
        facts = facts_of(loaded) | {"text": source, "tokens": len(ids)}
        if talks:
            facts |= {"talks": len(talks), "chance": len(talks) / VALUES}
        terminal.write_out(to_json(facts | {"rows": rows}) + "\n")
    else:
        facts_line = [f"{loaded.name} {loaded.dtype_name}", f"{len(ids):,} tokens of {source}"]
        if talks:
            facts_line.append(f"known of {len(talks)} talks, chance: {len(talks) / VALUES:.3g}")
        quality_table(facts_line, rows, caches)
    if given.plot and rows:
        from nanokv.lab.bench.plot_quality import plot_quality

        plot_quality(rows, caches, f"{loaded.name}, {len(ids):,} tokens of {source}", given.plot)
    return exit_code(stop)


def quality_table(facts_line: list[str], rows: list[dict], caches: dict) -> None:
    """Print one row per model, or per model and cache."""
    columns = {"weights": lambda row: row["weights"]}
    left: tuple[int, ...] = (0,)
    if caches:
        columns["cache"] = lambda row: row["cache"]
        columns["B/token"] = lambda row: f"{row['kv_bytes_per_token']:,.0f}"
        columns["of exact"] = lambda row: f"{row['share']:.0%}"
        left = (0, 1)
    else:
        columns["MB/step"] = lambda row: f"{row['bytes'] / 1e6:.2f}"
    columns["mean |Δ log p|"] = lambda row: f"{row['mean_change']:.5f}"
    columns["mean Δ log p"] = lambda row: f"{row['bias']:.5f}"
    columns["perplexity"] = lambda row: f"{row['perplexity']:.4f}"
    if any("perplexities" in row for row in rows):
        columns["of 3 seeds"] = seeds_text
    if any("second" in row for row in rows):
        columns |= {name: itemgetter(name) for name in ("first", "second")}
    if any("known" in row for row in rows):
        columns["both, of 3 seeds"] = known_text
    if caches:
        columns["CPU ms/token"] = lambda row: f"{row['cpu_ms_per_token']:.1f}"
    show(facts_line, columns, rows, left)


def seeds_text(row: dict) -> str:
    """The lowest and the highest perplexity of the seeds; "" for a cache that draws nothing."""
    if "perplexities" not in row:
        return ""
    low, *_, high = row["perplexities"]
    return f"{low:.4g} to {high:.4g}"


def known_text(row: dict) -> str:
    """The fewest and the most facts known with a seed, at both questions."""
    if "known" not in row:
        return ""
    low, *_, high = row["known"]
    return f"{low} to {high}"


def text_ids(path: Path | None, loaded: Loaded) -> tuple[list[int], str]:
    """(ids, name) of --text, cut to the context.

    Without --text: of conversations that were held out from the bundled model's training.
    """
    if path:
        name = terminal.sanitize_line(str(path))
        text = read_prompt_bytes(path.read_bytes(), name)
        ids = loaded.tokenizer.encode(text, add_special_tokens=True)[: loaded.context]
        if len(ids) < 2:
            raise NanoKVError(f"{name} has {len(ids)} tokens: a likelihood needs at least 2")
        return ids, name
    import random

    from nanokv.school.training.corpus import conversation
    from nanokv.school.training.data import render

    text = ""
    for i in range(4):
        text += render(conversation(random.Random(f"bench:{i}"), 16, held_out=True))
    return loaded.tokenizer.encode(text)[: loaded.context], "held-out conversation"


def show(
    facts: Iterable[str], columns: Mapping[str, Callable], rows: Sequence, left: tuple = (0,)
) -> None:
    """Print the facts of the run, then a table of `rows`.

    `columns`: header → function from a row to the text of its cell. Those in `left` are aligned
    left.
    """
    width = layout.columns(sys.stdout)
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    lines = [layout.joined(facts, width), *layout.table(columns, cells, width, left)]
    terminal.write_out("\n".join(lines) + "\n")


def show_failed(rows: Iterable[tuple[str, str, str]]) -> None:
    """Print (label, reason, context) rows: one line per label and reason, with its contexts."""
    found: dict[tuple[str, str], list[str]] = {}
    for label, reason, context in rows:
        found.setdefault((label, reason), []).append(context)
    width = layout.columns(sys.stdout)
    for (label, reason), contexts in found.items():
        if any(contexts):
            label += f", context {', '.join(contexts)}"
        line = terminal.message_line(f"{label}: {reason}")
        terminal.write_out(layout.paragraph(line, width, rest="    ") + "\n")


def made(loaded: Loaded, weights: list[str]) -> dict:
    """Models by the name of their weights. Plain, fast and invariant weights share memory."""
    from nanokv.fast import batch_invariant, optimize, stored
    from nanokv.lab.bench import gguf

    models = {}
    for name in weights:
        if name == "plain":
            models[name] = loaded.model
        elif name == "fast":
            models[name] = optimize(loaded.model)
        elif name == "invariant":
            models[name] = batch_invariant(models.get("fast") or optimize(loaded.model))
        elif name == "stored":
            gguf.file_of(loaded.folder)
            models[name] = stored.read(
                loaded.folder, loaded.fields, loaded.dtype, loaded.model.embed_tokens.weight.device
            )
        elif name in GGUF_TYPES:
            models[name] = gguf.read_as(loaded.model, name, loaded.dtype)
        else:
            models[name] = optimize(loaded.model, name)
    return models


def runnable(given: BenchOptions, loaded: Loaded, weights: list[str]) -> list[str]:
    """The weights to run. The default has no "fast" on a GPU that has no kernels, and "stored"
    instead of "plain" for a GGUF file whose blocks have kernels here.

    If --weights names "fast" on such a GPU, `optimize` raises an error.
    """
    if given.weights:
        return weights
    own_parts = loaded.model.config.family.own_parts
    if not loaded.device.startswith("cuda"):
        from nanokv.fast import native
        from weights_loader import stored_matrices

        if loaded.device != "cpu" or loaded.ranks.size > 1 or native.kernels() is None:
            return weights
        if own_parts or not stored_matrices(loaded.folder):
            return weights
        return ["stored", "fast"]
    from nanokv.fast import gpu

    why = gpu.missing(loaded.device, loaded.dtype)
    if own_parts:
        why = f"no kernels for {loaded.model.config.family.title}"
    if why:
        terminal.warning(f"plain only: {why}")
        return ["plain"]
    return weights


def make_runners(
    given: BenchOptions, loaded: Loaded, weights: list[str], batches: list[int]
) -> list:
    """One runner per combination of batch, weights and cache; runners share the models."""
    from nanokv.lab.bench.runners import Ours, Uncached

    caches = [(given.cache.name, given.cache.options)]
    if given.caches:
        caches = [cache_name(text) for text in dict.fromkeys(given.caches.split(","))]
    models = made(loaded, weights)
    runners: list[Ours] = []
    for batch, name, (kind, how) in itertools.product(batches, weights, caches):
        runners.append(Ours(models[name], name, kind, how, batch, loaded.dtype))
    if given.uncached:
        runners += [Uncached(models[name], name, 1, loaded.dtype) for name in weights]
    return runners


def numbers(flag: str, text: str, example: str) -> list[int]:
    """ "128,1024" → [128, 1024]."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise NanoKVError(f"{flag} {text!r} is not a list of numbers ≥ 1", hint=f"{flag} {example}")
    return found


def names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """The names in a comma-separated list, each once; NanoKVError for an unknown name."""
    found = list(dict.fromkeys(text.split(",")))
    wrong = [name for name in found if name not in known]
    if wrong:
        raise NanoKVError(
            f"{flag}: {wrong[0]!r} is not one of {', '.join(known)}", hint=f"{flag} {known[0]}"
        )
    return found


def carry_out(
    rounds: Iterable,
    total: int,
    output: OutputOptions,
    ranks: Ranks = ALONE,
    peers: Peers | None = None,
) -> terminal.Interrupt:
    """Run all rounds, with a progress bar.

    Ctrl-C ends the loop after the current round, or at once while waiting for a peer. The returned
    Interrupt tells whether it came.
    """
    with terminal.Interrupt() as stop:
        if peers:
            for process in peers.processes:
                process.should_stop = stop
        began = time.perf_counter()
        try:
            for done, _ in enumerate(rounds, start=1):
                if not (output.quiet or ranks.rank):
                    progress(done, total, time.perf_counter() - began)
                if ranks.hear(stop.requested):
                    break
        except KeyboardInterrupt:  # raised by `should_stop` while waiting for a peer
            pass
    return stop


def progress(done: int, total: int, seconds: float) -> None:
    """Draw the progress bar and the remaining seconds on one line, on a terminal only."""
    if not terminal.is_tty(sys.stderr):
        return
    bar = "#" * (20 * done // total)
    left = seconds / done * (total - done)
    line = f"\r[{bar:<20}] {done}/{total} · {left:,.0f} s left "
    if done == total:
        line += "\n"
    terminal.write_err(line)


def report(
    given: BenchOptions, loaded: Loaded, rotation: "Rotation", flops: float, others: float | None
) -> None:
    """Print the table or JSON, and draw the plot."""
    from nanokv.lab.bench.machine import peak_memory

    rows = rotation.finished()
    through = []
    if given.through:
        from nanokv.lab.bench.command import comparison

        through = comparison(rows)
    noise = noise_of(rows, others, rotation.bandwidth.rates)
    head = head_of(loaded, rotation, rows, flops)
    peak = peak_memory(loaded.device)
    if given.json:
        facts = json_facts(loaded, rotation, flops, noise, peak)
        facts["rows"] = [row.figures() for row in rows]
        facts["failed"] = [row.failure() for row in rotation.failed()]
        if through:
            facts["through"] = through
        terminal.write_out(to_json(facts) + "\n")
    else:
        print_table(head, rows, noise, code_of(loaded, code_text), peak)
        print_through(through)
        show_failed((row.runner.label, row.error, f"{row.context:,}") for row in rotation.failed())
    if given.plot and rows:
        from nanokv.lab.bench.plot import plot

        plot(rows, head, given.plot)


def head_of(loaded: Loaded, rotation: "Rotation", rows: "list[Row]", flops: float) -> str:
    """The first line of the report: model, device, and the rates that were measured."""
    rates = f"read bandwidth {rotation.rate / 1e9:.1f} GB/s"
    if rows and rotation.bandwidth.bytes(rows[0].bytes) == rows[0].bytes // 4 * 4:
        rates += f", {rows[0].bandwidth / 1e9:.1f} GB/s of {rows[0].bytes / 1e6:.1f} MB"
    rates += f" · products {flops / 1e9:,.0f} GFLOP/s (measured now)"
    return f"{loaded.name} {loaded.dtype_name} · {where_text(loaded)} · {rates}"


def json_facts(
    loaded: Loaded, rotation: "Rotation", flops: float, noise: dict, peak: int | None
) -> dict:
    """The fields of --json that come before the rows."""
    from nanokv.fast import native

    return facts_of(loaded) | {
        "ranks": loaded.ranks.size,
        "bandwidth": rotation.rate,
        "bandwidths": rotation.bandwidth.rates,
        "gemm_flops": flops,
        "other_cores": noise["other_cores"],
        "noise": noise,
        "noisy": bool(noisy(noise)),
        "code": code_of(loaded, lambda: native.library()[1]),
        "peak_bytes": peak,
    }


def print_through(through: list[dict]) -> None:
    """The table of --through: the times of `nanokv generate`, beside those of the bench's rows."""
    if not through:
        return
    facts_line = [
        "load: from the start of the process",
        "first token: from there",
        "speeds: of the bench's own",
    ]
    columns = {
        "nanokv generate": lambda row: f"{row['weights']} {row['cache']}",
        "context": lambda row: f"{row['context']:,}",
        "load s": lambda row: f"{row['load_s']:.2f}",
        "first token s": lambda row: f"{row['ttft_s']:.2f}",
        "prefill": lambda row: f"{row['prefill_ratio']:.0%}",
        "decode": lambda row: f"{row['decode_ratio']:.0%}",
    }
    terminal.write_out("\n")
    show(facts_line, columns, through)


def ranks_text(loaded: Loaded) -> str:
    """1 thread, 2 threads, 2 ranks of 1 thread."""
    threads = threads_text(loaded.threads)
    if loaded.ranks.size == 1:
        return threads
    return f"{loaded.ranks.size} ranks of {threads}, bytes of one rank"


def where_text(loaded: Loaded) -> str:
    """The name of the GPU, or the threads of the CPU."""
    from nanokv.lab.bench.machine import device_name

    return device_name(loaded.device) or ranks_text(loaded)


def facts_of(loaded: Loaded) -> dict:
    """The first fields of every JSON object of this command."""
    from nanokv.lab.bench.machine import device_name

    return {
        "model": loaded.name,
        "dtype": loaded.dtype_name,
        "device": loaded.device,
        "device_name": device_name(loaded.device),
        "threads": loaded.threads,
    }


def code_of(loaded: Loaded, native: Callable[[], str]) -> str:
    """The code that ran the rows. native() returns the text for the kernels of a CPU."""
    from nanokv.lab.bench.machine import device_code

    if loaded.device.startswith("cuda"):
        return device_code(loaded.device)
    if loaded.ranks.size > 1:
        return "plain"
    return native()


def noise_of(rows: "Sequence[Row]", others: float | None, rates: Sequence[float]) -> dict:
    """Signs that this run was disturbed; None: unknown.

    decode_spread: the largest (slowest − fastest) / median of a row's decode times.
    bandwidth_spread: (fastest − slowest) / fastest of the bandwidth readings.
    other_cores: the cores that other processes kept busy.
    """
    spreads = [row.spread for row in rows if row.spread is not None]
    bandwidth_spread = None
    if len(rates) > 1:
        bandwidth_spread = (max(rates) - min(rates)) / max(rates)
    return {
        "decode_spread": max(spreads, default=None),
        "other_cores": others,
        "bandwidth_spread": bandwidth_spread,
    }


def noisy(noise: dict) -> list[str]:
    """A text for each sign above NOISY: small differences of this run mean nothing."""
    texts = {
        "decode_spread": lambda value: f"spread ±{value / 2:.0%}",
        "bandwidth_spread": lambda value: f"memory at times {value:.0%} slower",
        "other_cores": lambda value: f"others keep {value:.1f} cores busy",
    }
    return [text(noise[name]) for name, text in texts.items() if (noise[name] or 0) > NOISY]


def print_table(head: str, rows: "Sequence[Row]", noise: dict, code: str, peak: int | None) -> None:
    """Print one row per runner and context: tok/s, GB/s and the share of the limit."""
    facts = head.split(" · ")
    if peak:
        facts.append(f"peak memory {peak / 1e9:.1f} GB")
    if noisy(noise):
        facts.append(f"noisy: {', '.join(noisy(noise))}")
    facts.append(code)
    columns = {
        "": lambda row: row.runner.label,
        "context": lambda row: f"{row.context:,}",
        "prefill tok/s": lambda row: f"{row.figures()['prefill_tok_s']:,.0f}",
        "decode tok/s": lambda row: f"{row.figures()['decode_tok_s']:,.1f}",
        "ms/step": lambda row: f"{row.decode_s * 1e3:.2f}",
        "±": lambda row: "–" if row.spread is None else f"{row.spread / 2:.0%}",
        "MB/step": lambda row: f"{row.bytes / 1e6:,.1f}",
        "GB/s": lambda row: f"{row.figures()['gigabytes_per_second']:.2f}",
        "% of limit": lambda row: f"{row.share:.1%}",
    }
    show(facts, columns, rows)
