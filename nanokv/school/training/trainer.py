"""The training loop of the bundled model: seeded, resumable, on a GPU if there is one, else on the CPU.

Hidden matrices are trained with Muon (Jordan et al. 2024, torch.optim.Muon), tables and norms with AdamW. Batch i and
the learning rate of step i depend on i alone, so a run that was killed and resumed ends in the same weights.
A checkpoint is weights, the optimizers' state and the recipe (run_folder.py); `export` writes the Hugging Face folder.
"""

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanokv.attention import Causal
from nanokv.cache import NoCache
from nanokv.config import Config
from nanokv.errors import NanoKVError
from nanokv.model import Transformer
from nanokv.school.training.corpus import SECOND
from nanokv.school.training.data import Rows, save_tokenizer, train_tokenizer
from nanokv.school.training.run_folder import (
    checkpoints,
    damaged,
    drop_old,
    new_checkpoint,
    read_state,
    saving,
)
from weights_loader import writing

VOCAB_SIZE = 2048
BLOCK = 128  # queries whose scores are in memory at once
COMPILED_FROM = 500  # steps of a run for which a minute of compiling pays
# head_dim · heads = 288 ≠ hidden 192 on purpose: code that derives one from the other fails loudly.
TINY = Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=48,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome of a run, besides the code and the machine's arithmetic."""

    steps: int = 6300
    seed: int = 0
    tokens_per_batch: int = 8192
    learning_rate: float = 3e-3
    warmup: int = 75
    weight_decay: float = 0.1
    clip: float = 1.0
    long_rows_from: int = 1100  # step from which rows of more than 512 tokens appear
    second_from: int = 1500  # step from which conversations have every exchange: corpus.SECOND

    def rate(self, step: int) -> float:
        """Factor of the learning rate: linear warm-up, then a straight line to zero (Defazio et al. 2023,
        arXiv:2310.07831)."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return (self.steps - step) / (self.steps - self.warmup)

    def scaled(self, steps: int) -> "Recipe":
        """The same schedule for a shorter or longer run."""
        moved = ("warmup", "long_rows_from", "second_from")
        at = {name: round(getattr(self, name) * steps / self.steps) for name in moved}
        return replace(self, steps=steps, **at)


class Trainer:
    """Model, optimizers and step number. `train_step()` does one step, `save` and `resume` move between folders.

    A tokenizer that is given must be the one that the recipe's seed makes; without it, it is trained first.
    """

    def __init__(self, recipe: Recipe, device: str = "cpu", config: Config = TINY, tokenizer=None):
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.config, self.step = recipe, device, config, 0
        self.tokenizer = tokenizer or train_tokenizer(recipe.seed, config.vocab_size)
        self.model = initialise(Transformer(config)).to(device).train()
        self.cross_entropy = cross_entropy
        self.attend = causal_in_blocks if torch.device(device).type == "cpu" else Causal()
        self.optimizers = self._new_optimizers()
        rows = partial(Rows, self.tokenizer, recipe.seed, recipe.tokens_per_batch)
        self.short, self.long = rows(longest=512), rows()
        # step from which → what is drawn from
        self.sources = {
            0: self.short,
            recipe.long_rows_from: self.long,
            recipe.second_from: rows(stage=SECOND),
        }

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [
            p
            for name, p in self.model.named_parameters()
            if p.dim() == 2 and name != "embed_tokens.weight"
        ]
        rest = [
            p
            for name, p in self.model.named_parameters()
            if p.dim() != 2 or name == "embed_tokens.weight"
        ]
        rate, decay = self.recipe.learning_rate, self.recipe.weight_decay
        return [
            torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def compile(self) -> bool:
        """Fuse what each layer does between its products, and the loss, with torch.compile; says whether that works.

        A step takes a fifth less time on a CPU; GPUs are left alone, nobody has measured them. Every length of row is
        compiled once, 5 to 15 s each. Without a C++ compiler layers stay as they are, and only rounding differs.
        """
        if torch.device(self.device).type != "cpu":
            return False
        torch._dynamo.config.cache_size_limit = 64  # six lengths, for each of six layers
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.cross_entropy = torch.compile(cross_entropy, dynamic=True)
        try:
            self.loss(*self.short.held_out(2, 16)).backward()
        except torch._dynamo.exc.TorchDynamoException:  # no compiler, no headers
            for layer in self.model.layers:
                layer._compiled_call_impl = None
            self.cross_entropy = cross_entropy
            return False
        finally:
            self.model.zero_grad(set_to_none=True)
        return True

    def loss(self, inputs, targets, counts):
        """Mean cross entropy of the targets that count, in nats per token; bf16 autocast, logits in fp32."""
        inputs, targets, counts = (t.to(self.device) for t in (inputs, targets, counts))
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            hidden = self.model(
                inputs, NoCache(self.config.num_hidden_layers), 0, self.attend
            )  # (B,T,C)
            logits = self.model.lm_head(hidden[counts])  # (N,V), only where somebody looks
        return self.cross_entropy(logits, targets[counts])

    def train_step(self) -> float:
        """One batch, one update. Returns the loss."""
        loss = self.loss(*self.rows().batch(self.step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.learning_rate * self.recipe.rate(self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy on the CPU, by name."""
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def rows(self) -> Rows:
        """Where this step's batch comes from."""
        return self.sources[max(first for first in self.sources if first <= self.step)]

    @torch.no_grad()
    def validate(self) -> float:
        """Loss on conversations whose names and words were never trained on; what the assistant says counts."""
        return self.loss(*self.rows().held_out(8)).item()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder):
        """Write checkpoint-STEP next to its predecessors, complete or not at all; keep the last two."""
        folder, name = Path(folder), f"checkpoint-{self.step}"
        # The same step of the same run has the same bits.
        if folder / name not in checkpoints(folder):
            with new_checkpoint(folder, name) as temporary:
                save_file(self.weights(), temporary / "weights.safetensors")
                save_file(self._optimizer_tensors(), temporary / "optimizer.safetensors")
                state = {
                    "step": self.step,
                    "recipe": asdict(self.recipe),
                    "config": self.config.to_dict(),
                }
                (temporary / "state.json").write_text(json.dumps(state, indent=1))
        drop_old(folder)

    def resume(self, folder):
        """Continue from the newest checkpoint in `folder`; the recipe must be the one that it was started with."""
        newest = newest_checkpoint(folder)
        if (recipe := stored_recipe(newest)) != self.recipe:
            mine = asdict(self.recipe)
            differ = [
                f"{key} {value}, not {mine[key]}"
                for key, value in asdict(recipe).items()
                if value != mine[key]
            ]
            raise NanoKVError(f"{newest} was made with another recipe: {', '.join(differ)}")
        state = read_state(newest)
        if state["config"] != json.loads(json.dumps(self.config.to_dict())):
            raise NanoKVError(f"{newest} was made with another model: {state['config']}")
        try:
            weights = load_file(newest / "weights.safetensors", device=self.device)
            optimizers = load_file(newest / "optimizer.safetensors", device=self.device)
        except (OSError, SafetensorError) as error:
            raise damaged(newest, error) from error
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        self._load_optimizers(optimizers)
        self.step = state["step"]

    def _optimizer_tensors(self) -> dict:
        tensors = {}
        for i, optimizer in enumerate(self.optimizers):
            for j, state in optimizer.state_dict()["state"].items():
                tensors |= {
                    f"{i}.{j}.{key}": torch.as_tensor(value).cpu().clone()
                    for key, value in state.items()
                }
        return tensors

    def _load_optimizers(self, tensors: dict):
        for i, optimizer in enumerate(self.optimizers):
            full = optimizer.state_dict()
            state: dict = {}
            for key, tensor in tensors.items():
                which, index, name = key.split(".", 2)
                if int(which) == i:
                    state.setdefault(int(index), {})[name] = tensor
            optimizer.load_state_dict(full | {"state": state})

    def export(self, folder):
        """The finished model as an ordinary Hugging Face folder, weights in bf16."""
        folder = Path(folder)
        with (
            saving(folder),
            writing.new_files(folder, writing.CHECKPOINT + writing.TOKENIZER, force=True) as new,
        ):
            self._write_model(new)

    def _write_model(self, folder: Path):
        tensors = {name: weight.bfloat16() for name, weight in self.weights().items()}
        end, pad = (self.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
        config = self.config.to_dict() | {"eos_token_id": end, "pad_token_id": pad}
        generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
        writing.write_checkpoint(folder, config, tensors, generation)
        save_tokenizer(self.tokenizer, folder)


def cross_entropy(logits, targets):
    """Mean over N positions in nats, logits (N,V) in bf16, targets (N). Compiled, it writes no copy of N·V in fp32."""
    return F.cross_entropy(logits.float(), targets)


def causal_in_blocks(q, k, v):
    """Causal attention of whole rows as plain products, q (B,H,T,D), k and v (B,Hk,T,D) → (B,H,T,D).

    128 queries at a time, whose scores stay in the processor's cache. Forward and backward on a CPU take a quarter (128
    tokens) to six tenths (2,048) of the time of the fused kernel, which reads bf16 slowly there.
    """
    B, H, T, D = q.shape
    mixed = []
    # Which would make a copy of the scores in fp32.
    with torch.autocast(q.device.type, enabled=False):
        grouped, k = (
            (q * D**-0.5).to(v.dtype).reshape(B, k.shape[1], -1, T, D),
            k.to(v.dtype),
        )  # (B,Hk,G,T,D)
        for start in range(0, T, BLOCK):
            end = min(T, start + BLOCK)
            # A group shares its keys.
            queries = grouped[:, :, :, start:end].flatten(2, 3)  # (B,Hk,G·N,D)
            hidden = torch.full(
                (end - start, end), -torch.inf, dtype=v.dtype, device=v.device
            ).triu(start + 1)
            scores = (queries @ k[:, :, :end].transpose(-1, -2)).unflatten(
                2, (-1, end - start)
            ) + hidden
            mixed.append(scores.softmax(-1).flatten(2, 3) @ v[:, :, :end])  # (B,Hk,G·N,D)
    blocks = [
        block.unflatten(2, (H // k.shape[1], -1)).flatten(1, 2) for block in mixed
    ]  # (B,H,N,D) each
    return torch.cat(blocks, dim=2)


def initialise(model: Transformer) -> Transformer:
    """Normal(0, 0.02); the two projections that write to the residual stream smaller by sqrt(2L) (GPT-2)."""
    shrink = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(
                    0,
                    0.02 * (shrink if name.endswith(("o_proj.weight", "down_proj.weight")) else 1),
                )
    return model


def newest_checkpoint(folder) -> Path:
    """Where --resume continues."""
    if not (found := checkpoints(folder)):
        raise NanoKVError(
            f"{folder} holds no checkpoint to resume from", hint="start without --resume"
        )
    return found[-1]


def stored_recipe(checkpoint: Path) -> Recipe:
    """The recipe that a checkpoint was started with."""
    try:
        return Recipe(**read_state(checkpoint)["recipe"])
    except (KeyError, TypeError) as error:
        raise damaged(
            checkpoint, f"its recipe is not one that this version knows ({error})"
        ) from error


def estimate_speed(trainer: Trainer, seconds: float = 6.0) -> float:
    """Tokens per second of a throw-away copy of the run, after one warm-up step."""
    probe = Trainer(trainer.recipe, trainer.device, trainer.config, trainer.tokenizer)
    probe.train_step()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        probe.train_step()
        done += probe.recipe.tokens_per_batch
    return done / (time.perf_counter() - start)
