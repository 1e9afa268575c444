"""`nanokv convert MODEL FOLDER`: writes any model that can be loaded as a Hugging Face folder.

The quantized blocks of a GGUF file become plain numbers, so the folder is larger than the file.
transformers can load the result.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from nanokv.apps.cli.common import terminal
from nanokv.apps.cli.common.files import add_force, ask_to_replace
from nanokv.apps.cli.common.options import (
    DTYPES,
    CacheOptions,
    ModelOptions,
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
)
DESCRIPTION = (
    "Write a model as a Hugging Face folder: config.json, generation_config.json, "
    "model.safetensors and the tokenizer. Blocks of a GGUF file become plain numbers. float32 "
    "keeps each of them exactly."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Source, destination and dtype."""
    parser.add_argument(
        "source", metavar="MODEL", help="a GGUF file, a folder, tiny, or a name on the hub"
    )
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        help="folder for the files; created if it does not exist",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        metavar="TYPE",
        type=dtype_name,
        help="float32, bfloat16 or float16 (default: the checkpoint's own, bfloat16 for quantized "
        "GGUF)",
    )
    add_force(parser)
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub MODEL")
    parser.add_argument("--offline", action="store_true", help="never use the network")


def run(args: Namespace) -> int:
    """Plan, ask before replacing, load, write."""
    from nanokv.apps.cli.common.loading import check_address_space, check_memory, plan_model

    if args.folder.suffix.lower() == ".gguf":
        raise NanoKVError(
            f"{args.folder}: the result is a folder; nanokv reads GGUF and writes none",
            f"nanokv convert {args.source} {args.folder.with_suffix('')}",
        )
    model = ModelOptions(args.source, args.revision, args.dtype, "cpu", offline=args.offline)
    output = output_options(args)
    plan = plan_model(model, CacheOptions(context=2), output)
    if model.dtype == "auto":  # the stored dtype, not the one that is fastest here
        plan = replace(plan, dtype_name=plan.config.torch_dtype)
    check_memory(plan, available_memory("cpu"))
    ask_to_replace(args.force, args.folder / "config.json")
    check_address_space()
    from nanokv.loading import load

    whole, tokenizer = load(plan.folder, dtype=plan.dtype_name, device="cpu")
    whole.save(args.folder, tokenizer, force=True)
    size = terminal.bytes_text(weight_bytes(plan.config, ITEMSIZE[plan.dtype_name]))
    terminal.notice(f"{plan.config.family.title}, {size} in {plan.dtype_name}", output)
    terminal.write_out(f"{args.folder}\n")
    return 0
