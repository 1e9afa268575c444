"""The training loop of the bundled model, on the CPU or a GPU.

Muon (muon.py) trains the hidden matrices, AdamW tables and norms. The batch and the learning rate
of a step depend on its number alone, so a killed and resumed run ends in the same weights. A
checkpoint is the weights, the state of the optimizers and the recipe (run_folder.py). `export`
writes the Hugging Face folder.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from nanokv.attention import Causal
from nanokv.cache import NoCache
from nanokv.config import Config, Linear
from nanokv.errors import NanoKVError
from nanokv.layer_kinds import OnePlusNorm
from nanokv.model import Transformer
from nanokv.recurrent import GatedDeltaNet, gated_delta_chunks
from nanokv.school.training.corpus import LAST, SECOND, THIRD
from nanokv.school.training.data import Rows, save_tokenizer, train_tokenizer
from nanokv.school.training.muon import Muon
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
SHORTEST = 64  # tokens per row, and the fewest per batch
BLOCK = 128  # queries whose scores are in memory at once
COMPILED_FROM = 500  # steps of a run for which a minute of compiling pays
# head_dim · heads = 288, not hidden 192: code that derives one from the other fails.
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

# Its twin with a recurrent state in three of four layers (Qwen3.5's pattern, hybrid.py).
HYBRID = replace(
    TINY,
    model_type="qwen3_5_text",
    num_hidden_layers=8,
    layer_types=(*["linear_attention"] * 3, "full_attention") * 2,
    linear=Linear(
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=48,
        linear_conv_kernel_dim=4,
    ),
)


@dataclass(frozen=True)
class Recipe:
    """The settings of a run. With the code and the machine's arithmetic they decide the weights."""

    steps: int = 16000
    seed: int = 0
    tokens_per_batch: int = 4096
    learning_rate: float = 3e-3
    warmup: int = 75
    weight_decay: float = 0.1
    clip: float = 1.0
    long_rows_from: int = 1500  # first step with rows of more than 512 tokens
    second_from: int = 2000  # first step of the second stage (corpus.SECOND)
    third_from: int = 5000  # first step of the third stage (corpus.THIRD)
    last_from: int = 13000  # first step with the shares of corpus.LAST

    def rate(self, step: int) -> float:
        """Factor of the learning rate.

        A linear warm-up, then a straight line to zero (Defazio et al. 2023, arXiv:2310.07831).
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        return (self.steps - step) / (self.steps - self.warmup)

    def scaled(self, steps: int) -> "Recipe":
        """The same schedule for a shorter or longer run."""
        moved = ("warmup", "long_rows_from", "second_from", "third_from", "last_from")
        at = {name: round(getattr(self, name) * steps / self.steps) for name in moved}
        return replace(self, steps=steps, **at)


class Trainer:
    """Model, optimizers and step number.

    `tokenizer` is the one of the recipe's seed; without it, the trainer makes it first.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: str = "cpu",
        config: Config = TINY,
        tokenizer: Tokenizer | None = None,
    ):
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        self.config = config
        self.step = 0
        self.tokenizer = tokenizer or train_tokenizer(recipe.seed, config.vocab_size)
        self.model = initialise(Transformer(config)).to(device).train()
        self.cross_entropy = cross_entropy
        self.mixed = multiplies_bf16(device)
        for layer in self.model.modules():
            if isinstance(layer, GatedDeltaNet):
                layer.more_tokens = in_fp32
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = Causal()
        if torch.device(device).type == "cpu":
            self.attend = causal_in_blocks
        products = torch.float32
        if self.mixed:
            products = torch.bfloat16
        rate, decay = recipe.learning_rate, recipe.weight_decay
        self.optimizers = new_optimizers(self.model, rate, decay, products)
        rows = partial(Rows, self.tokenizer, recipe.seed, recipe.tokens_per_batch)
        self.short = rows(longest=512)
        self.long = rows()
        self.sources = {  # first step → source of the batches from there on
            0: self.short,
            recipe.long_rows_from: self.long,
            recipe.second_from: rows(stage=SECOND),
            recipe.third_from: rows(stage=THIRD),
            recipe.last_from: rows(stage=LAST),
        }

    def compile(self) -> bool:
        """Compile the layers and the loss with torch.compile. Returns whether that works.

        A step takes a fifth less time on a CPU. GPUs were not measured and stay as they are, and so
        do models with states: their chunks are a loop in Python, with a triangular solver that the
        compiler does not fuse. Each
        length of row is compiled once, 5 to 15 s each. Without a C++ compiler the layers stay as
        they are. Only rounding differs.
        """
        if torch.device(self.device).type != "cpu" or self.config.states:
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

    def loss(self, inputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        """Mean cross entropy of the targets that count, in nats per token; each argument (B,T).

        Products in bf16 where the machine multiplies bf16, else in fp32; logits in fp32.
        """
        inputs, targets, counts = (t.to(self.device) for t in (inputs, targets, counts))
        cache = NoCache(self.config.num_hidden_layers)
        kind = torch.device(self.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self.mixed):
            hidden = self.model(inputs, cache, 0, self.attend)  # (B,T,C)
            logits = self.model.lm_head(hidden[counts])  # (N,V), of the targets that count
        return self.cross_entropy(logits, targets[counts])

    def train_step(self) -> float:
        """Train on one batch. Returns its loss."""
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
        """The source of this step's batch."""
        return self.sources[max(first for first in self.sources if first <= self.step)]

    @torch.no_grad()
    def validate(self) -> float:
        """Loss of the answers in conversations whose names and words are never trained on."""
        return self.loss(*self.rows().held_out(8)).item()

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write checkpoint-STEP, complete or not at all, and keep the last two."""
        folder = Path(folder)
        name = f"checkpoint-{self.step}"
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

    def resume(self, folder: str | Path) -> None:
        """Continue from the newest checkpoint in `folder`. It must have the same recipe."""
        newest = newest_checkpoint(folder)
        recipe = stored_recipe(newest)
        if recipe != self.recipe:
            differ = ", ".join(differences(recipe, self.recipe))
            raise NanoKVError(f"{newest} was made with another recipe: {differ}")
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

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for i, optimizer in enumerate(self.optimizers):
            for j, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"{i}.{j}.{key}"] = torch.as_tensor(value).cpu().clone()
        return tensors

    def _load_optimizers(self, tensors: dict[str, Tensor]) -> None:
        for i, optimizer in enumerate(self.optimizers):
            full = optimizer.state_dict()
            state: dict[int, dict[str, Tensor]] = {}
            for key, tensor in tensors.items():
                which, index, name = key.split(".", 2)
                if int(which) == i:
                    state.setdefault(int(index), {})[name] = tensor
            optimizer.load_state_dict(full | {"state": state})

    def export(self, folder: str | Path) -> None:
        """Write the finished model as a Hugging Face folder, weights in bf16."""
        folder = Path(folder)
        files = writing.CHECKPOINT + writing.TOKENIZER
        with saving(folder), writing.new_files(folder, files, force=True) as new:
            self._write_model(new)

    def _write_model(self, folder: Path) -> None:
        tensors = {name: weight.bfloat16() for name, weight in self.weights().items()}
        end = self.tokenizer.token_to_id("<|im_end|>")
        pad = self.tokenizer.token_to_id("<|endoftext|>")
        config = self.config.to_dict() | {"eos_token_id": end, "pad_token_id": pad}
        generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
        writing.write_checkpoint(folder, config, tensors, generation)
        save_tokenizer(self.tokenizer, folder)


def new_optimizers(
    model: Transformer, rate: float, decay: float, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Muon in `dtype` for the matrices of the layers, AdamW for everything else."""
    matrices = []
    rest = []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "embed_tokens.weight":
            matrices.append(parameter)
        else:
            rest.append(parameter)
    return [
        Muon(matrices, rate, decay, dtype),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def differences(stored: Recipe, wanted: Recipe) -> Iterator[str]:
    """Each setting in which a stored recipe is not the wanted one."""
    mine = asdict(wanted)
    for key, value in asdict(stored).items():
        if value != mine[key]:
            yield f"{key} {value}, not {mine[key]}"


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over N positions in nats, logits (N,V) in bf16 or fp32, targets (N).

    Compiled, it writes no copy of N·V in fp32.
    """
    return F.cross_entropy(logits.float(), targets)


def causal_in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole rows, q (B,H,T,D), k and v (B,Hk,T,D) → (B,H,T,D).

    The scores of 128 queries at a time stay in the processor's cache. Forward and backward on a CPU
    take a quarter (128 tokens) to six tenths (2,048) of the time of the fused kernel, which reads
    bf16 slowly there.
    """
    B, H, T, D = q.shape
    Hk = k.shape[1]
    mixed = []
    with torch.autocast(q.device.type, enabled=False):  # it would copy the scores to fp32
        grouped = (q * D**-0.5).to(v.dtype).reshape(B, Hk, -1, T, D)  # (B,Hk,G,T,D)
        k = k.to(v.dtype)
        for start in range(0, T, BLOCK):
            end = min(T, start + BLOCK)
            # A group of query heads shares its keys.
            queries = grouped[:, :, :, start:end].flatten(2, 3)  # (B,Hk,G·N,D)
            hidden = torch.full((end - start, end), -torch.inf, dtype=v.dtype, device=v.device)
            hidden = hidden.triu(start + 1)  # (N,end)
            scores = queries @ k[:, :, :end].transpose(-1, -2)  # (B,Hk,G·N,end)
            scores = scores.unflatten(2, (-1, end - start)) + hidden  # (B,Hk,G,N,end)
            mixed.append(scores.softmax(-1).flatten(2, 3) @ v[:, :, :end])  # (B,Hk,G·N,D)
    # (B,H,N,D) each
    blocks = [block.unflatten(2, (H // Hk, -1)).flatten(1, 2) for block in mixed]
    return torch.cat(blocks, dim=2)


def in_fp32(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """gated_delta_chunks, whose state adds up the rounding of a whole row, without autocast."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        return gated_delta_chunks(*tensors)


def multiplies_bf16(device: str) -> bool:
    """Is bf16 faster there? A CPU without bf16 instructions takes twice as long as in fp32."""
    if torch.device(device).type != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported()


def initialise(model: Transformer) -> Transformer:
    """Normal(0, 0.02); the two projections to the residual stream smaller by sqrt(2L) (GPT-2)."""
    for module in model.modules():
        if isinstance(module, OnePlusNorm):
            nn.init.zeros_(module.weight)  # it scales by 1 + w
        if isinstance(module, GatedDeltaNet):
            initialise_decay(module)
    shrink = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() != 2:
                continue
            deviation = 0.02
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                deviation *= shrink
            parameter.normal_(0, deviation)
    return model


@torch.no_grad()
def initialise_decay(layer: GatedDeltaNet) -> None:
    """Heads that keep between 20 % and 99.9 % of their state per token, as in Mamba 2 and fla.

    The decay of a token is exp(−A·dt): A uniform in 1 … 16, dt log-uniform in 0.001 … 0.1.
    """
    layer.A_log.uniform_(1, 16).log_()
    dt = torch.empty_like(layer.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
    layer.dt_bias.copy_(dt.expm1().log())  # softplus gives dt again


def newest_checkpoint(folder: str | Path) -> Path:
    """The checkpoint from which --resume continues."""
    found = checkpoints(folder)
    if not found:
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
    start = time.perf_counter()
    done = 0
    while time.perf_counter() - start < seconds:
        probe.train_step()
        done += probe.recipe.tokens_per_batch
    return done / (time.perf_counter() - start)
