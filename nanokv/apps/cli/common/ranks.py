"""`--tensor-parallel N`: the command on N ranks, started here or by torchrun.

Rank 0 runs the command and alone reads and prints. The others load their part of the model and do
what rank 0 tells them (nanokv/ranks/roles.py). No torch before it is needed: sizes that do not
divide, and flags that do not go together, are told by the one process that a user started.

A module with RANKS can be run so: "led" ones have one leader, "alike" ones do the same on every
rank. It has `command_options(args)` too, and `run(args, ranks)` takes the group.
"""

import json
import os
import time
from contextlib import contextmanager
from functools import partial

from nanokv.apps.cli.common import beams, loading, speculation, speed, terminal
from nanokv.apps.cli.common.arguments import environment, real
from nanokv.apps.cli.common.options import rank_options
from nanokv.errors import NanoKVError
from nanokv.parallel.group import Group
from nanokv.ranks.roles import Follower, follow, lead, leave_interrupts, rank, rank_count

TIMEOUT = "NANOKV_RANK_TIMEOUT"
FIRST_S = 1.0  # ranks that fail for one reason do so within this time
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


def run(module, args, words) -> int:
    """The command's exit code, whoever runs it."""
    if "tensor_parallel" not in args:
        return 0 if rank() else module.run(args)  # not of several ranks
    wanted, size = rank_options(args).tensor_parallel, rank_count()
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
        same = module.RANKS == "alike"
        return follow(ranks, partial(alike, ranks, work) if same else partial(led, ranks, given))


def options_of(module, args, count: int):
    """The command's options. Commands and flags whose forwards only one process knows of are refused."""
    if not hasattr(module, "RANKS"):
        name = module.__name__.rpartition(".")[2]
        raise NanoKVError(
            f"nanokv {name} runs in one process",
            "leave out torchrun and --tensor-parallel; generate, chat, batch, serve and bench take them",
        )
    given = module.command_options(args)
    if hasattr(module, "check_ranks"):
        module.check_ranks(given, count)
    return given


def hide_followers(words) -> None:
    """Rank 0 alone prints; --debug shows what the others have to say."""
    if rank() and "--debug" not in words:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)


def let_rank_0_speak() -> None:
    """torchrun ends all ranks as soon as one has failed. What rank 0 has to say, it says first."""
    if rank() and environment("TORCHELASTIC_RUN_ID"):
        time.sleep(FIRST_S)


def start(module, given, count: int, words) -> int:
    """Look at the model first, then start the ranks and wait for them."""
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


def alike(ranks: Group, work) -> int:
    """A command that every rank carries out; only rank 0 knows with which exit code it ended."""
    work()
    _, code = ranks.hear()
    return code


def led(ranks: Group, given) -> int:
    """Load this rank's part, make the same Generations as rank 0, and follow."""
    from nanokv.ranks.generation import Following

    loaded = loading.load_model(given.model, given.cache, given.output, ranks)
    if given.sampling.beams:
        make = beams.generation_type(given.sampling.beams, loaded)
    else:
        make = speculation.generation_type(given.model.speed.speculate, loaded)
    answers = Following(ranks, loaded.model, loaded.make_cache(), make)
    return Follower(ranks, loaded.model, answers).run()


@contextmanager
def joined():
    """Around the work of a rank: its group."""
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


def compare_flags(ranks: Group, args) -> None:
    """ParallelError where a rank has another flag than rank 0, and would compute a part of another answer: the sums
    would be fluent and wrong. How tokens are drawn is rank 0's alone."""
    given = vars(args)
    for name in ALIKE:
        value = json.dumps(given.get(name), sort_keys=True)
        flag = f"--{name.replace('_', '-')}"
        ranks.check_alike(flag, value, "the same flags on every rank")


def timeout() -> float:
    """Seconds that a rank may keep the others waiting in the middle of a forward."""
    from nanokv.parallel.group import TIMEOUT_S

    text = environment(TIMEOUT)
    try:
        return TIMEOUT_S if text is None else real(0, 86_400, above=True)(text)
    except Exception as error:
        raise NanoKVError(f"{TIMEOUT}: {error}", f"unset {TIMEOUT}") from None
