"""The flags that `nanokv batch` and `nanokv serve` share: the engine's page pool and steps, and all of a request."""

from dataclasses import dataclass, replace

from nanokv.apps.cli.common import arguments, options
from nanokv.apps.cli.common.loading import PAGE, Loaded
from nanokv.apps.cli.common.options import CacheOptions
from nanokv.cache.options import check_options
from nanokv.costs import kv_bytes_per_token
from nanokv.costs.free_memory import available_memory
from nanokv.errors import NanoKVError


@dataclass(frozen=True)
class PoolOptions:
    """How much the engine takes at a time."""

    running: int = 16  # requests
    step_tokens: int | None = None  # tokens in a step; None: as many as the engine takes by itself


def add_arguments(parser, step_tokens: int | None = None) -> None:
    """How many requests at a time and tokens in a step (None: as many as the engine takes by itself); then what applies
    to all of them."""
    parser.add_argument(
        "--running",
        metavar="N",
        type=arguments.integer(1, 4096),
        default=16,
        help="requests at a time (default: 16)",
    )
    default = (
        f"{step_tokens}, so that no stream waits for long"
        if step_tokens
        else "a long prompt's chunk: 64 to 512"
    )
    parser.add_argument(
        "--step-tokens",
        metavar="N",
        type=arguments.integer(1),
        default=step_tokens,
        help=f"tokens per step (default: {default})",
    )
    options.add_thinking_argument(
        parser, "off: ask the model not to think; otherwise thoughts are in reasoning_content"
    )
    options.add_template_argument(parser)
    options.add_special_argument(parser, "control tokens spelled out in prompts are meant")
    options.add_model_arguments(parser, "prefix")
    options.add_speed_arguments(parser)
    options.add_sampling_arguments(parser)


def pool_options(args) -> PoolOptions:
    """Of the first two."""
    return PoolOptions(args.running, args.step_tokens)


def sized(cache: CacheOptions, command: str) -> CacheOptions:
    """--cache prefix:page=P:pages=N sizes the pool; the engine knows no other cache."""
    if cache.name != "prefix" or set(cache.options) - {"page", "pages"}:
        raise NanoKVError(
            f"--cache {cache.name} with {command}",
            f"{command} runs on a page pool: --cache prefix:page=16:pages=256",
        )
    check_options("prefix", cache.options)
    return replace(cache, options={"page": PAGE} | cache.options)


def affordable(loaded: Loaded, page: int) -> int | None:
    """Pages that half of the free memory holds, at least one; None = unknown."""
    free = available_memory(loaded.device)
    page_bytes = page * kv_bytes_per_token(loaded.config, loaded.dtype.itemsize)
    return None if free is None else max(1, free // 2 // loaded.ranks.local // page_bytes)
