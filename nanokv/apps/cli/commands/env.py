"""`nanokv env`: the settings that apply, each with its origin; for bug reports.

It downloads nothing and loads no weights. For the model it shows the tokens that end an answer,
each with the files that define it. Access tokens and passwords are never printed, only whether they
are set.
"""

import importlib.metadata
import os
import platform
import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nanokv import __version__
from nanokv.apps.cli.common import layout, speed, terminal
from nanokv.apps.cli.common.arguments import environment
from nanokv.apps.cli.common.loading import (
    check_address_space,
    check_device,
    display_name,
    thread_count,
)
from nanokv.apps.cli.common.options import (
    CACHE,
    CacheOptions,
    ModelOptions,
    OutputOptions,
    add_model_arguments,
    cache_options,
    model_options,
    output_options,
)
from nanokv.cache.options import check_options
from nanokv.costs.free_memory import available_memory
from weights_loader.strict import UnknownModel

EXAMPLES = (
    "nanokv env",
    "nanokv env -m ./folder",
    "nanokv env --json",
    "NANOKV_THREADS=1 nanokv env",
)
DESCRIPTION = (
    "Print versions, paths and settings, each with its origin, and the tokens that end an answer "
    "of the model, each with the files that define it."
)
PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "jinja2",
    "rich",
    "prompt_toolkit",
    "transformers",
)
OPTIONAL = {"transformers": "optional: nanokv verify"}
VARIABLES = (
    "NANOKV_MODEL",
    "NANOKV_THREADS",
    "NANOKV_NO_HISTORY",
    "NANOKV_DEBUG",
    "NANOKV_KERNELS",
    "NANOKV_CACHE",
    "CXX",
    "NANOKV_STAMPS",
    "NANOKV_API_KEY",
    "NANOKV_RANK_TIMEOUT",
    "NANOKV_LAUNCHED",
    "NANOKV_STORE_FD",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NO_COLOR",
    "FORCE_COLOR",
    "TERM",
    "COLUMNS",
    "PYTHONIOENCODING",
    "VISUAL",
    "EDITOR",
    "XDG_STATE_HOME",
    "XDG_CACHE_HOME",
    "LOCALAPPDATA",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "TQDM_POSITION",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
)
MAKE = ("PYTHON", "ARGS", "OUT", "JOBS", "TORCH")  # variables that the Makefile reads
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")


def add_arguments(parser: ArgumentParser) -> None:
    """--json, and the model flags, to see what they would select."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: {section: {name: [value, origin]}}"
    )
    add_model_arguments(parser, CACHE)


def run(args: Namespace) -> int:
    """Print the sections, as tables or as JSON."""
    model = model_options(args)
    cache = cache_options(args)
    output = output_options(args)
    check_options(cache.name, cache.options)
    check_device(model.device)
    sections = {
        "versions": versions(),
        "settings": settings(model, cache, output),
        "ends of an answer": ends(model.source),
        "paths": paths(),
        "environment": {name: (shown(name), "") for name in VARIABLES},
        "environment of make": {name: (shown(name), "") for name in MAKE},
    }
    if args.json:
        from nanokv.apps.cli.common.text import to_json

        terminal.write_out(to_json(sections) + "\n")
        return 0
    style = terminal.Style(sys.stdout, output.color)
    width = layout.columns(sys.stdout)
    column = max(len(name) for rows in sections.values() for name in rows) + 4
    for title, rows in sections.items():
        texts = [(name, row_text(*row)) for name, row in rows.items()]
        lines = layout.definitions(texts, width, column=column)
        terminal.write_out("\n".join([style.bold(title), *lines]) + "\n")
    return 0


def row_text(value: str, origin: str) -> str:
    """`value   (origin)`, or the value alone if the origin is ""."""
    text = terminal.sanitize_line(value)
    if origin:
        text += f"   ({terminal.sanitize_line(origin)})"
    return text


def versions() -> dict:
    """Installed versions, from the packages' metadata: no package is imported."""
    rows = {
        "nanokv": (__version__, ""),
        "python": (platform.python_version(), sys.executable),
        "system": (f"{platform.system()} {platform.release()} {platform.machine()}", ""),
    }
    for name in PACKAGES:
        try:
            rows[name] = (importlib.metadata.version(name), "")
        except importlib.metadata.PackageNotFoundError:
            rows[name] = ("not installed", OPTIONAL.get(name, "required"))
    return rows


def settings(model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> dict:
    """name → (value, origin) of each setting: from a flag, the environment or a default."""
    device, device_origin = device_in_use(model.device)
    rows = {
        "model": (display_name(model.source), model_origin(model.source)),
        "dtype": (model.dtype, dtype_origin(model.dtype)),
        "device": (device, device_origin),
        "threads": threads(model.threads),
        "kernels": kernels(device),
        "cache": (cache.name, cache_origin(cache)),
        "sampling": (
            "temperature, top_k, top_p, min_p, repetition_penalty",
            "flag > the checkpoint's generation_config > greedy",
        ),
        "free memory": free_memory(),
    }
    if device.startswith("cuda"):
        rows["GPU memory"] = gpu_memory(device)
    rows["colour on stdout"] = (
        str(terminal.use_color(sys.stdout, output.color)).lower(),
        "--color, NO_COLOR, FORCE_COLOR, TERM, tty",
    )
    rows["history"] = ("on", "built-in")
    if environment("NANOKV_NO_HISTORY"):
        rows["history"] = ("off", "NANOKV_NO_HISTORY")
    rows["network"] = ("allowed", "built-in")
    if model.offline or hub_offline():
        rows["network"] = ("offline", "flag or HF_HUB_OFFLINE")
    return rows


def first_set(*names: str, default: str = "built-in") -> str:
    """The first of these variables that is set, or `default`."""
    return next((name for name in names if environment(name)), default)


def model_origin(source: str) -> str:
    """The origin of -m."""
    if source != (environment("NANOKV_MODEL") or "tiny"):
        return "flag"
    return first_set("NANOKV_MODEL")


def dtype_origin(dtype: str) -> str:
    """The origin of --dtype."""
    if dtype != "auto":
        return "flag"
    return "the checkpoint's own; on a CPU float32 for tiny and float16"


def cache_origin(cache: CacheOptions) -> str:
    """The origin of --cache."""
    if (cache.name, cache.options) != (CACHE, {}):
        return "flag"
    return "built-in"


def threads(flag: int | None) -> tuple[str, str]:
    """(threads, origin) for --threads."""
    if flag:
        return str(flag), "flag"
    origin = first_set("NANOKV_THREADS", "OMP_NUM_THREADS", default="cores this process may use")
    return str(thread_count()), origin


def free_memory() -> tuple[str, str]:
    """(free memory of the CPU, how it is found)."""
    how = "smallest of RAM, container, ulimit"
    free = available_memory("cpu")
    if free is None:
        return "unknown", how
    return terminal.bytes_text(free), how


def ends(model: str) -> dict:
    """Token → (id, the files that make it end an answer), for a model on this disk.

    Raises UnknownModel for a name that no model has.
    """
    try:
        from nanokv.text import endings
        from nanokv.text.tokenizer import Tokenizer
        from weights_loader import inventory

        folder = inventory.find(model)
        if folder is None:
            return {"unknown": ("not on this disk", "nothing is downloaded for this table")}
        found = endings.of_folder(folder, Tokenizer.from_folder(folder))
    except UnknownModel:
        raise
    except Exception as error:  # a damaged file or a broken installation
        return {"unknown": ("cannot be read", str(error) or type(error).__name__)}
    names = {end: terminal.sanitize_line(end.text)[:40] or f"id {end.id}" for end in found}
    rows = {name: (str(end.id), ", ".join(end.sources)) for end, name in names.items()}
    return rows or {"none": ("", "answers end at their length")}


def device_in_use(wanted: str) -> tuple[str, str]:
    """(device, origin) for --device. If torch cannot be imported, the origin is the error."""
    if wanted in ("cpu", "mps"):
        return wanted, "flag"
    try:
        check_address_space()
        import torch
    # A broken installation can raise any exception; this command has to report it.
    except Exception as error:
        return "none", f"torch cannot be imported: {terminal.sanitize_line(str(error))}"
    if torch.cuda.is_available():
        device = "cuda" if wanted == "auto" else wanted
        if int(device.partition(":")[2] or 0) < torch.cuda.device_count():
            return device, torch.cuda.get_device_name(device)
    if wanted == "auto":
        return "cpu", "torch sees no GPU"
    return wanted, "torch sees no GPU of this number"


def kernels(device: str) -> tuple[str, str]:
    """(code, reason) for this device, if no flag chooses another."""
    if device in ("cpu", "none"):
        return speed.setting()
    return gpu_kernels(device)


def gpu_kernels(device: str) -> tuple[str, str]:
    """The same for a device other than the CPU."""
    kind = device.partition(":")[0]
    if kind != "cuda":
        return "torch's", f"native kernels are for CPUs, this is {kind}"
    import torch

    from nanokv.fast import gpu

    if why := gpu.missing(device, torch.bfloat16):
        return "torch's", f"plain: {why}"
    return speed.GRAPHS, "recorded decode steps, kernels in Triton"


def gpu_memory(device: str) -> tuple[str, str]:
    """(free memory, total memory) of the GPU."""
    import torch

    try:
        free, whole = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:  # no GPU, or a broken driver
        return "unknown", terminal.sanitize_line(str(error))
    return terminal.bytes_text(free), f"of {terminal.bytes_text(whole)}"


def hub_offline() -> bool:
    """HF_HUB_OFFLINE, parsed as huggingface_hub does."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def paths() -> dict:
    """name → (path, origin) of the folders that nanokv reads or writes."""
    home = os.path.expanduser("~")  # stays "~" if this user has no home folder
    cache = environment("XDG_CACHE_HOME") or f"{home}/.cache"
    hugging_face = environment("HF_HOME") or str(Path(cache) / "huggingface")
    hub = environment("HF_HUB_CACHE") or str(Path(hugging_face) / "hub")
    state = environment("XDG_STATE_HOME") or environment("LOCALAPPDATA") or f"{home}/.local/state"
    built = environment("NANOKV_CACHE") or cache
    return {
        "package": (str(Path(__file__).resolve().parents[3]), ""),
        "downloads": (hub, first_set("HF_HUB_CACHE", "HF_HOME")),
        "sessions": (
            str(Path(state) / "nanokv" / "sessions"),
            first_set("XDG_STATE_HOME", "LOCALAPPDATA"),
        ),
        "kernels": (
            str(Path(built) / "nanokv"),
            first_set("NANOKV_CACHE", "XDG_CACHE_HOME"),
        ),
    }


def shown(name: str) -> str:
    """A variable's value for display: without secrets, and without passwords in URLs."""
    value = os.environ.get(name)
    if value is None:
        return "not set"
    if SECRET.search(name):
        return "set (not shown)"
    return re.sub(r"//[^/@]*@", "//***@", value)
