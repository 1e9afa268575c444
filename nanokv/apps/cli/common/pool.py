"""The flags that `nanokv batch` and `nanokv serve` share: the engine's page pool and steps, and all of a request."""

from dataclasses import dataclass, field, replace

from nanokv.apps.cli.common import arguments, options
from nanokv.apps.cli.common.loading import PAGE, Loaded
from nanokv.apps.cli.common.options import CacheOptions
from nanokv.cache.options import check_options
from nanokv.costs import kv_bytes_per_token
from nanokv.costs.free_memory import available_memory
from nanokv.errors import NanoKVError

# Requests at a time: a GPU reads its weights once for all of them, and hundreds are none too many.
RUNNING = {"cpu": 16, "cuda": 256}
# Tokens in a step of a server: no stream waits longer than one takes, a tenth of a second.
SHORT_STEPS = {"cpu": 256, "cuda": 2048}


@dataclass(frozen=True)
class PoolOptions:
    """How much the engine takes at a time; None = what suits the device (`on`)."""

    running: int | None = None  # requests
    step_tokens: int | None = None  # tokens in a step; None after `on`: as many as the engine takes
    steps: dict[str, int] = field(default_factory=dict)  # by device, of who has short ones

    def on(self, device: str) -> "PoolOptions":
        """With the numbers of this device."""
        kind = device.partition(":")[0]
        running = self.running or RUNNING.get(kind, RUNNING["cpu"])
        short = self.steps.get(kind, self.steps.get("cpu"))
        return PoolOptions(running, self.step_tokens or short, self.steps)


def add_arguments(parser, steps: str) -> None:
    """How many requests at a time and tokens in a step (`steps` says the default); then what applies to all of them."""
    parser.add_argument(
        "--running",
        metavar="N",
        type=arguments.integer(1, 4096),
        help=f"requests at a time (default: {RUNNING['cpu']}, on a GPU {RUNNING['cuda']})",
    )
    parser.add_argument(
        "--step-tokens",
        metavar="N",
        type=arguments.integer(1),
        help=f"tokens per step (default: {steps})",
    )
    options.add_thinking_argument(
        parser, "off: ask the model not to think; otherwise thoughts are in reasoning_content"
    )
    options.add_template_argument(parser)
    options.add_special_argument(parser, "control tokens spelled out in prompts are meant")
    options.add_model_arguments(parser, "prefix")
    options.add_speed_arguments(parser)
    options.add_sampling_arguments(parser)


def pool_options(args, steps: dict[str, int] | None = None) -> PoolOptions:
    """Of the first two."""
    return PoolOptions(args.running, args.step_tokens, steps or {})


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
