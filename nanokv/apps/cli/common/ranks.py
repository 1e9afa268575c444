"""`--tensor-parallel N`: the command on N ranks, started here or by torchrun.

Rank 0 runs the command; only rank 0 reads input and prints. The others load their part of the model
and follow rank 0's calls (nanokv/ranks/roles.py). Sizes that do not divide, and flags that exclude
each other, are refused before torch is imported, by the process that the user started.

A command module that supports ranks defines RANKS: "led" means that rank 0 leads the others,
"alike" that every rank does the same. It also defines `command_options(args)`, and its
`run(args, ranks)` takes the group.
"""

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from nanokv.apps.cli.common import beams, loading, speculation, speed, terminal
from nanokv.apps.cli.common.arguments import environment, real
from nanokv.apps.cli.common.options import rank_options
from nanokv.errors import NanoKVError
from nanokv.parallel.group import Group
from nanokv.ranks.roles import Follower, follow, lead, leave_interrupts, rank, rank_count

TIMEOUT = "NANOKV_RANK_TIMEOUT"
FIRST_S = 1.0  # ranks that fail for the same reason do so within this time
ALIKE = (  # flags that shape a forward
    "cache",
    "dtype",
    "context",
    "speculate",
    "beams",
    "length_penalty",
    "contexts",
    "caches",
    "weights",
    "batch",
    "uncached",
    "steps",
    "repeat",
)


def run(module: ModuleType, args: Namespace, words: list[str]) -> int:
    """Run the command, in this process or on several ranks, and return its exit code."""
    if "tensor_parallel" not in args:
        if rank():  # a command without this flag runs on rank 0 only
            return 0
        return module.run(args)
    wanted = rank_options(args).tensor_parallel
    size = rank_count()
    count = max(wanted or 1, size)
    if count == 1:
        return module.run(args)
    if size > 1 and wanted not in (None, size):
        raise NanoKVError(
            f"--tensor-parallel {wanted}, but {size} ranks were started",
            "leave out --tensor-parallel",
        )
    given = options_of(module, args, count)
    if size == 1:
        return start(module, given, count, words)
    if rank():
        leave_interrupts()
    with joined() as ranks:
        compare_flags(ranks, args)
        work = partial(module.run, args, ranks)
        if not ranks.rank:
            return lead(ranks, work)
        if module.RANKS == "alike":
            return follow(ranks, partial(alike, ranks, work))
        return follow(ranks, partial(led, ranks, given))


def options_of(module: ModuleType, args: Namespace, count: int) -> Any:
    """The command's options; NanoKVError if the command or a flag of it runs in one process."""
    if not hasattr(module, "RANKS"):
        name = module.__name__.rpartition(".")[2]
        raise NanoKVError(
            f"nanokv {name} runs in one process",
            "leave out torchrun and --tensor-parallel; "
            "generate, chat, batch, serve and bench take them",
        )
    given = module.command_options(args)
    if hasattr(module, "check_ranks"):
        module.check_ranks(given, count)
    return given


def hide_followers(words: list[str]) -> None:
    """Discard the output of all ranks but 0, unless --debug is given."""
    if rank() and "--debug" not in words:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)


def let_rank_0_speak() -> None:
    """Delay the exit of the other ranks: torchrun ends all ranks as soon as one has failed.

    Rank 0 needs that time to print the error.
    """
    if rank() and environment("TORCHELASTIC_RUN_ID"):
        time.sleep(FIRST_S)


def start(module: ModuleType, given: Any, count: int, words: list[str]) -> int:
    """Check flags and the model's sizes, then start the ranks and wait for them."""
    from nanokv.parallel.launch import launch, this_program
    from nanokv.parallel.sizes import check_sizes

    speed.check(given.model.speed, count)
    timeout()
    if hasattr(module, "config_of"):
        config = module.config_of(given)
    else:
        config = loading.plan_model(given.model, given.cache, given.output).config
    check_sizes(config, count)
    return launch(this_program(words), count, given.output.debug)


# --- in a rank ------------------------------------------------------------------------------------


def alike(ranks: Group, work: Callable[[], int]) -> int:
    """Run a command that every rank carries out; the exit code is rank 0's."""
    work()
    _, code = ranks.hear()
    return code


def led(ranks: Group, given: Any) -> int:
    """Load this rank's part, make the same Generations as rank 0, and follow."""
    from nanokv.ranks.generation import Following

    loaded = loading.load_model(given.model, given.cache, given.output, ranks)
    if given.sampling.beams:
        make = beams.generation_type(given.sampling.beams, loaded)
    else:
        make = speculation.generation_type(given.model.speculate, loaded)
    answers = Following(ranks, loaded.model, loaded.make_cache(), make)
    return Follower(ranks, loaded.model, answers).run()


@contextmanager
def joined() -> Iterator[Group]:
    """A context for the work of a rank; yields its Group."""
    with terminal.loading():
        loading.check_address_space()
        from nanokv.parallel import group

        if environment(group.LAUNCHED) or environment("TORCHELASTIC_RUN_ID"):
            group.end_with_parent()
        ranks = group.start(timeout())
    try:
        yield ranks
    finally:
        ranks.close()


def compare_flags(ranks: Group, args: Namespace) -> None:
    """ParallelError if a rank has other values of the ALIKE flags than rank 0.

    Such ranks would compute parts of different answers, and their sums would be fluent but wrong.
    Sampling flags are not compared: only rank 0 samples.
    """
    given = vars(args)
    for name in ALIKE:
        value = json.dumps(given.get(name), sort_keys=True)
        flag = f"--{name.replace('_', '-')}"
        ranks.check_alike(flag, value, "the same flags on every rank")


def timeout() -> float:
    """Seconds that a rank may keep the others waiting in the middle of a forward."""
    from nanokv.parallel.group import TIMEOUT_S

    text = environment(TIMEOUT)
    if text is None:
        return TIMEOUT_S
    try:
        return real(0, 86_400, above=True)(text)
    except Exception as error:
        raise NanoKVError(f"{TIMEOUT}: {error}", f"unset {TIMEOUT}") from None
