"""`nanokv train` on a model of 40 thousand parameters: the real command, in seconds.

Run as a script it is the command in a process of its own that can be killed at a chosen moment:
    python tests/support/small_training.py --die-at 9 --out D ...        SIGKILL before step 10
    python tests/support/small_training.py --die-in-save 8 --out D ...   SIGKILL in the middle of writing checkpoint-8
"""

import functools
import os
import signal
import sys

from nanokv.config import Config
from nanokv.school.training import data, trainer

SMALL = Config(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
STEPS, EVERY = 12, 4
FLAGS = (
    "--steps",
    STEPS,
    "--batch-tokens",
    256,
    "--checkpoint-every",
    EVERY,
    "--cases",
    1,
    "--threads",
    1,
)


@functools.cache
def small_tokenizer(seed: int = 0, vocab_size: int = SMALL.vocab_size):
    """From 60 conversations instead of 6,000."""
    return data.train_tokenizer(seed, vocab_size, conversations=60)


def shrink(setattr=setattr) -> None:
    """Let the command train SMALL; `setattr` may be monkeypatch's."""
    setattr(trainer, "TINY", SMALL)
    setattr(trainer, "train_tokenizer", small_tokenizer)


def die(*_) -> None:
    """As the power switch does it: nothing is flushed, nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: int) -> None:
    """Once `step` steps are done, the next one kills."""
    one_step = trainer.Trainer.train_step
    trainer.Trainer.train_step = lambda self: die() if self.step == step else one_step(self)


def die_in_save(step: int) -> None:
    """The weights of checkpoint-`step` are written, the optimizer and state.json are not: then dead."""
    save = trainer.Trainer.save

    def torn(self, folder):
        if self.step == step:
            self._optimizer_tensors = die
        save(self, folder)

    trainer.Trainer.save = torn


if __name__ == "__main__":
    from nanokv.apps import cli

    shrink()
    {"--die-at": die_at, "--die-in-save": die_in_save}[sys.argv[1]](int(sys.argv[2]))
    sys.argv[1:] = ["train", *sys.argv[3:]]
    sys.exit(cli.main())
