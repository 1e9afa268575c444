"""The flags that `nanokv batch` and `nanokv serve` share: the engine's page pool and steps, and all of a request."""

from nanokv.apps.cli.common import arguments
from nanokv.apps.cli.common.answer import add_thinking_argument
from nanokv.apps.cli.common.loading import PAGE, Loaded
from nanokv.cache.options import check_options
from nanokv.costs import kv_bytes_per_token
from nanokv.costs.free_memory import available_memory
from nanokv.errors import NanoKVError


def add_arguments(parser, step_tokens: int | None = None) -> None:
    """How many requests at a time and tokens in a step (None: as many as the engine takes by itself); then what applies
    to all of them."""
    parser.add_argument(
        "--running", metavar="N", type=arguments.integer(1, 4096), default=16, help="requests at a time (default: 16)"
    )
    default = f"{step_tokens}, so that no stream waits for long" if step_tokens else "a long prompt's chunk: 64 to 512"
    parser.add_argument(
        "--step-tokens", metavar="N", type=arguments.integer(1), default=step_tokens,
        help=f"tokens per step (default: {default})",
    )  # fmt: skip
    add_thinking_argument(parser, "off: ask the model not to think; otherwise thoughts are in reasoning_content")
    arguments.add_template_argument(parser)
    parser.add_argument("--allow-special", action="store_true", help="control tokens spelled out in prompts are meant")
    arguments.add_model_arguments(parser, "prefix")
    arguments.add_speed_arguments(parser)
    arguments.add_sampling_arguments(parser)


def options(args, command: str) -> None:
    """--cache prefix:page=P:pages=N sizes the pool; the engine knows no other cache."""
    name, options = args.cache
    if name != "prefix" or set(options) - {"page", "pages"}:
        raise NanoKVError(
            f"--cache {name} with {command}", f"{command} runs on a page pool: --cache prefix:page=16:pages=256"
        )
    check_options("prefix", options)
    args.cache = ("prefix", {"page": PAGE} | options)


def affordable(loaded: Loaded, page: int) -> int | None:
    """Pages that half of the free memory holds, at least one; None = unknown."""
    free = available_memory(loaded.device)
    page_bytes = page * kv_bytes_per_token(loaded.config, loaded.dtype.itemsize)
    return None if free is None else max(1, free // 2 // loaded.ranks.local // page_bytes)
