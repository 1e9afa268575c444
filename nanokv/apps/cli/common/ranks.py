"""`--tensor-parallel N`: the command on N ranks, started here or by torchrun.

Rank 0 runs the command and alone reads and prints. The others load their part of the model and do what rank 0 tells
them: answers (nanokv/ranks/generation.py) and steps of the engine (nanokv/ranks/engine.py). No torch before it is
needed: sizes that do not divide, and flags that do not go together, are told by the one process that a user started.
"""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager

from nanokv.apps.cli.common import beams, loading, speculation, speed, terminal
from nanokv.apps.cli.common.arguments import environment, real
from nanokv.errors import NanoKVError, ParallelError
from weights_loader import CheckpointError

TIMEOUT = "NANOKV_RANK_TIMEOUT"
FIRST_S = 1.0  # ranks that fail for one reason do so within this time
ALIKE = (  # flags that shape a forward
    "cache", "dtype", "context", "speculate", "beams", "length_penalty",
    "contexts", "caches", "weights", "batch", "uncached", "steps", "repeat",
)  # fmt: skip


def run(module, args, words) -> int:
    """The command's exit code, whoever runs it."""
    wanted, size = getattr(args, "tensor_parallel", None), rank_count()
    if not hasattr(args, "tensor_parallel"):
        return 0 if rank() else module.run(args)  # not of several ranks
    if size == 1:
        return module.run(args) if (wanted or 1) == 1 else start(module, args, words)
    if wanted not in (None, size):
        raise NanoKVError(f"--tensor-parallel {wanted}, but {size} ranks were started", "leave out --tensor-parallel")
    check_command(module, args)
    return follow(module, args) if rank() else lead(module, args)


def rank_count() -> int:
    """As torchrun, or launch.py, says; 1 where neither has started this process."""
    there = all(environment(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    text = environment("WORLD_SIZE") or "1"
    return int(text) if there and text.isdecimal() else 1


def rank() -> int:
    """Of this process."""
    return int(environment("RANK") or 0) if rank_count() > 1 else 0


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


def check_command(module, args) -> None:
    """Commands and flags whose forwards only one process knows of."""
    if not hasattr(module, "RANKS"):
        name = module.__name__.rpartition(".")[2]
        raise NanoKVError(f"nanokv {name} runs in one process",
                          "leave out torchrun and --tensor-parallel; generate, chat, batch, serve and bench take them",
                          )  # fmt: skip
    if hasattr(module, "check_ranks"):
        module.check_ranks(args)
    if getattr(args, "prefill_worker", False):
        raise NanoKVError("--prefill-worker sends the pages of a whole model, and with --tensor-parallel each rank has "
                          "pages for its own heads", "leave one of them out")  # fmt: skip


def start(module, args, words) -> int:
    """Look at the model first, then start the ranks and wait for them."""
    from nanokv.parallel.launch import launch, this_program
    from nanokv.parallel.sizes import check_sizes

    check_command(module, args)
    speed.check(args)
    timeout()
    config = module.config_of(args) if hasattr(module, "config_of") else loading.plan_model(args).config
    check_sizes(config, args.tensor_parallel)
    return launch(this_program(words), args.tensor_parallel, args.debug)


# --- in a rank --------------------------------------------------------------------------------------------------------


def lead(module, args) -> int:
    """Rank 0: the command itself. When it is done the others are told; should it fail, they find it gone."""
    with joined(args):
        try:
            code = module.run(args) or 0
        except KeyboardInterrupt:
            args.ranks.stopped()
            raise
        args.ranks.hear(["end", code])
        return code


def follow(module, args) -> int:
    """Another rank: until rank 0 says that it is over."""
    leave_interrupts()
    with joined(args):
        try:
            return alike(module, args) if module.RANKS == "alike" else Follower(args).run()
        except ParallelError:
            raise
        except Exception as error:
            known = isinstance(error, NanoKVError | CheckpointError)
            args.ranks.last_words(str(error) if known else f"{type(error).__name__}: {error}")
            raise


def leave_interrupts() -> None:
    """Rank 0 decides what Ctrl-C means. What another rank gets goes on to it, through the program that started both;
    torchrun is told nothing, it would end all ranks at once. In a thread of its own: this one may wait in gloo."""
    from nanokv.parallel.group import LAUNCHED

    if not environment(LAUNCHED):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the threads of torch
    parent = os.getppid()

    def pass_on():
        while signal.sigwait({signal.SIGINT}) and os.getppid() == parent:
            os.kill(parent, signal.SIGINT)

    threading.Thread(target=pass_on, name="nanokv-interrupts", daemon=True).start()


def alike(module, args) -> int:
    """A command that every rank carries out; only rank 0 knows with which exit code it ended."""
    module.run(args)
    _, code = args.ranks.hear()
    return code


@contextmanager
def joined(args):
    """Around the work of a rank: `args.ranks` is its group."""
    with terminal.loading():
        loading.check_address_space()
        from nanokv.parallel import group

        if environment(group.LAUNCHED) or environment("TORCHELASTIC_RUN_ID"):
            group.end_with_parent()
        args.ranks = group.start(timeout())
        compare_flags(args)
    try:
        yield
    finally:
        args.ranks.close()


def compare_flags(args) -> None:
    """ParallelError where a rank has another flag than rank 0, and would compute a part of another answer: the sums
    would be fluent and wrong. How tokens are drawn is rank 0's alone."""
    for name in ALIKE:
        value = json.dumps(getattr(args, name, None), sort_keys=True)
        args.ranks.check_alike(f"--{name.replace('_', '-')}", value, "the same flags on every rank")


def timeout() -> float:
    """Seconds that a rank may keep the others waiting in the middle of a forward."""
    from nanokv.parallel.group import TIMEOUT_S

    text = environment(TIMEOUT)
    try:
        return TIMEOUT_S if text is None else real(0, 86_400, above=True)(text)
    except Exception as error:
        raise NanoKVError(f"{TIMEOUT}: {error}", f"unset {TIMEOUT}") from None


class Follower:
    """A rank that is told what to do."""

    def __init__(self, args):
        self.args, self.ranks, self.engine, self.answers = args, args.ranks, None, None
        self.loaded = loading.load_model(args)

    def run(self) -> int:
        """What rank 0 says, one thing after the other → the exit code that it had."""
        while True:
            kind, *values = self.heard()
            if kind == "end":
                return values[0]
            if kind in ("answer", "save", "load"):
                self.answers = self.answers or self.following()
                getattr(self.answers, kind)(values[0])
            elif kind == "engine":
                from nanokv.ranks.engine import FollowingEngine

                self.engine = FollowingEngine(self.loaded.model, *values[0])
            elif kind == "step":
                self.engine.follow(values[0])

    def heard(self) -> list:
        """The next word of rank 0, which may have ended an answer."""
        if self.answers is not None and self.answers.unheard:
            word, self.answers.unheard = self.answers.unheard, None
            return word
        return self.ranks.hear()

    def following(self):
        """Who makes the same Generations as rank 0."""
        from nanokv.ranks.generation import Following

        args, loaded = self.args, self.loaded
        if getattr(args, "beams", None):
            make = beams.generation_type(args, loaded)
        else:
            make = speculation.generation_type(getattr(args, "speculate", None), loaded)
        return Following(self.ranks, loaded.model, loaded.make_cache(), make)
