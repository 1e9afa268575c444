"""`nanokv convert MODEL TARGET`: writes any model that can be loaded, as a folder or a GGUF file.

A target named .gguf is a file, any other name a Hugging Face folder. In a folder the quantized
blocks of a GGUF file become plain numbers, so the folder is larger than the file. transformers can
load both results, llama.cpp the file.
"""

import argparse
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path

from nanokv.apps.cli.common import terminal
from nanokv.apps.cli.common.arguments import nearest
from nanokv.apps.cli.common.files import add_force, ask_to_replace
from nanokv.apps.cli.common.options import (
    DTYPES,
    CacheOptions,
    ModelOptions,
    OutputOptions,
    dtype_name,
    output_options,
)
from nanokv.costs import ITEMSIZE, weight_bytes
from nanokv.costs.free_memory import available_memory
from nanokv.errors import NanoKVError

EXAMPLES = (
    "nanokv convert model.gguf ./model",
    "nanokv convert model.gguf ./model --dtype float32",
    "nanokv convert Qwen/Qwen3-0.6B ./qwen --dtype float16",
    "nanokv convert Qwen/Qwen3-0.6B qwen.gguf",
    "nanokv convert ./my-model my-model.gguf --type q4_k_m",
)
DESCRIPTION = (
    "Write a model as a Hugging Face folder: config.json, generation_config.json, "
    "model.safetensors and the tokenizer. Blocks of a GGUF file become plain numbers. float32 "
    "keeps each of them exactly. A TARGET named .gguf is written as one GGUF file, with the "
    "tokenizer and the chat template, for llama.cpp and others."
)
GGUF_TYPES = ("bf16", "f16", "f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k_m")
SAME_TYPES = {"bfloat16": "bf16", "float16": "f16", "fp16": "f16", "float32": "f32", "fp32": "f32"}


def add_arguments(parser: ArgumentParser) -> None:
    """Source, destination, dtype and type."""
    parser.add_argument(
        "source", metavar="MODEL", help="a GGUF file, a folder, tiny, or a name on the hub"
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        type=Path,
        help="folder for the files, created if it does not exist; or FILE.gguf",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="TYPE",
        type=dtype_name,
        help="of a folder: float32, bfloat16 or float16 (default: the checkpoint's own, bfloat16 "
        "for quantized GGUF)",
    )
    parser.add_argument(
        "--type",
        metavar="TYPE",
        type=gguf_type,
        help=f"of a GGUF file: {', '.join(GGUF_TYPES)} (default: the checkpoint's own dtype, bf16 "
        "for quantized GGUF)",
    )
    add_force(parser)
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub MODEL")
    parser.add_argument("--offline", action="store_true", help="never use the network")


def gguf_type(text: str) -> str:
    """An argparse type: one of GGUF_TYPES, in upper or lower case; fp16 is another name of f16."""
    name = SAME_TYPES.get(text.lower(), text.lower())
    if name in GGUF_TYPES:
        return name
    close = nearest(name, GGUF_TYPES)
    hint = f"; did you mean {close}?" if close else ""
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(GGUF_TYPES)}{hint}")


@dataclass(frozen=True)
class ConvertOptions:
    """What is written where. One of `dtype` and `type` is None: a target is a folder or a file."""

    model: ModelOptions
    target: Path
    dtype: str | None
    type: str | None
    force: bool
    output: OutputOptions


def run(args: Namespace) -> int:
    """Write a GGUF file or a folder, by the name of the target."""
    model = ModelOptions(
        args.source, args.revision, args.dtype or "auto", "cpu", offline=args.offline
    )
    given = ConvertOptions(
        model, args.target, args.dtype, args.type, args.force, output_options(args)
    )
    if given.target.suffix.lower() == ".gguf":
        check_file(given)
        return write_file(given)
    if given.type:
        raise NanoKVError(
            f"--type {given.type} is for a GGUF file, and {given.target} is a folder",
            f"nanokv convert {model.source} {given.target}.gguf --type {given.type}, or --dtype "
            "for a folder",
        )
    return write_folder(given)


def write_folder(given: ConvertOptions) -> int:
    """Plan, ask before replacing, load, write."""
    from nanokv.apps.cli.common.loading import check_address_space, check_memory, plan_model

    plan = plan_model(given.model, CacheOptions(context=2), given.output)
    if given.model.dtype == "auto":  # the stored dtype, not the one that is fastest here
        plan = replace(plan, dtype_name=plan.config.torch_dtype)
    check_memory(plan, available_memory("cpu"))
    ask_to_replace(given.force, given.target / "config.json")
    check_address_space()
    from nanokv.loading import load

    whole, tokenizer = load(plan.folder, dtype=plan.dtype_name, device="cpu")
    whole.save(given.target, tokenizer, force=True)
    size = weight_bytes(plan.config, ITEMSIZE[plan.dtype_name])
    report(plan.config.family.title, size, plan.dtype_name, given)
    return 0


def check_file(given: ConvertOptions) -> None:
    """NanoKVError for --dtype, and for a target that cannot become a file."""
    target = given.target
    if given.dtype:
        name = SAME_TYPES.get(given.dtype, "bf16")
        raise NanoKVError(
            f"--dtype {given.dtype} is for a folder, and {target} is a GGUF file",
            f"nanokv convert {given.model.source} {target} --type {name}",
        )
    if target.is_dir():
        raise NanoKVError(
            f"{target} is a folder; a GGUF file cannot replace it", "another name for the file"
        )
    if not target.parent.is_dir():
        raise NanoKVError(
            f"{target}: there is no folder {target.parent}", f"mkdir -p {target.parent}"
        )


def write_file(given: ConvertOptions) -> int:
    """Plan, ask before replacing, write tensor by tensor: the model is never in memory whole."""
    from nanokv.apps.cli.common.loading import check_address_space, plan_model

    plan = plan_model(given.model, CacheOptions(context=2), given.output)
    type_name = given.type or SAME_TYPES[plan.config.torch_dtype]
    ask_to_replace(given.force, given.target)
    check_address_space()
    from nanokv.export import export_gguf, quantized_types, unreadable_elsewhere

    already = quantized_types(plan.folder)
    if already:
        terminal.notice(
            f"{plan.name} is quantized already ({already}): what it lost stays lost", given.output
        )
    refused = unreadable_elsewhere(plan.config)
    if refused:
        terminal.notice(f"{refused}; nanokv opens it", given.output)
    with terminal.writing(given.target):
        size = export_gguf(plan.folder, plan.fields, given.target, type_name, plan.name)
    report(plan.config.family.title, size, type_name, given)
    return 0


def report(title: str, size: int, type_name: str, given: ConvertOptions) -> None:
    """One line on stderr with the size, and the target on stdout."""
    terminal.notice(f"{title}, {terminal.bytes_text(size)} in {type_name}", given.output)
    terminal.write_out(f"{given.target}\n")
