"""The flags that `nanokv batch` and `nanokv serve` share: the engine's limits and the request's."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nanokv.apps.cli.common import arguments, options
from nanokv.apps.cli.common.loading import PAGE
from nanokv.apps.cli.common.options import CacheOptions
from nanokv.apps.cli.common.plan import Loaded
from nanokv.cache.options import check_options
from nanokv.costs import kv_bytes_per_token
from nanokv.costs.free_memory import available_memory
from nanokv.errors import NanoKVError

# Concurrent requests. A step reads the weights once for all of them, so a GPU gains from hundreds.
RUNNING = {"cpu": 16, "cuda": 256}
# Tokens per step of a server. A stream waits for at most one step, about 0.1 s.
SHORT_STEPS = {"cpu": 256, "cuda": 2048}


class Limits(NamedTuple):
    """Limits of an engine on one device."""

    running: int  # concurrent requests
    step_tokens: int | None  # tokens per step; None: the engine's default


@dataclass(frozen=True)
class PoolOptions:
    """The flags for the limits of the engine; None: the default of the device."""

    running: int | None = None
    step_tokens: int | None = None
    steps: dict[str, int] = field(default_factory=dict)  # default step_tokens per device kind

    def on(self, device: str) -> Limits:
        """The limits on this device."""
        kind = device.partition(":")[0]
        running = self.running or RUNNING.get(kind, RUNNING["cpu"])
        short = self.steps.get(kind, self.steps.get("cpu"))
        return Limits(running, self.step_tokens or short)


def add_arguments(parser: ArgumentParser, steps: str) -> None:
    """The engine's limits (`steps` is the help text of a default), then the flags of a request."""
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
    options.add_special_argument(parser, "control tokens written in prompts become control tokens")
    options.add_model_arguments(parser, "prefix")
    options.add_speed_arguments(parser)
    options.add_sampling_arguments(parser)


def pool_options(args: Namespace, steps: dict[str, int] | None = None) -> PoolOptions:
    """The PoolOptions of --running and --step-tokens."""
    return PoolOptions(args.running, args.step_tokens, steps or {})


def sized(cache: CacheOptions, command: str) -> CacheOptions:
    """Check --cache, which makes the pool: prefix:page=P:pages=N:index=radix. NanoKVError for other
    caches."""
    if cache.name != "prefix":
        raise NanoKVError(
            f"--cache {cache.name} with {command}",
            f"{command} runs on a page pool: --cache prefix:page=16:pages=256",
        )
    check_options("prefix", cache.options)
    if "salt" in cache.options:
        raise NanoKVError(f"--cache prefix:salt=… with {command}", "leave salt= out")
    return replace(cache, options={"page": PAGE} | cache.options)


def affordable(loaded: Loaded, page: int) -> int | None:
    """Pages that fit into half of the free memory, at least 1; None: free memory is unknown."""
    free = available_memory(loaded.device)
    if free is None:
        return None
    page_bytes = page * kv_bytes_per_token(loaded.config, loaded.dtype.itemsize)
    return max(1, free // 2 // loaded.ranks.local // page_bytes)
