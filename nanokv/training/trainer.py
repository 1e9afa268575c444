"""The training loop of the bundled model: seeded, resumable, on a GPU if there is one, else on the CPU.

Hidden matrices are trained with Muon (Jordan et al. 2024, torch.optim.Muon), tables and norms with AdamW. Batch i and
the learning rate of step i depend on i alone, so a run that was killed and resumed ends in the same weights.
A checkpoint is weights, the optimizers' state and the recipe (run_folder.py); `export` writes the Hugging Face folder.
"""

import json
import math
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
from nanokv.training.corpus import FIFTH, FOURTH, SECOND, SEVENTH, SIXTH, THIRD
from nanokv.training.data import Rows, save_tokenizer, train_tokenizer
from nanokv.training.run_folder import checkpoints, damaged, drop_old, new_checkpoint, read_state, saving
from weights_loader import writing

VOCAB_SIZE = 2048
BLOCK = 128  # queries whose scores are in memory at once
COMPILED_FROM = 500  # steps of a run for which a minute of compiling pays
TINY = Config(  # head_dim · heads = 288 ≠ hidden 192 on purpose: code that derives one from the other fails loudly
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

    steps: int = 8800
    seed: int = 0
    tokens_per_batch: int = 8192
    learning_rate: float = 3e-3
    warmup: int = 75
    weight_decay: float = 0.1
    clip: float = 1.0
    long_rows_from: int = 1100  # step from which rows of more than 512 tokens appear
    horizon: int = 4500  # where the cosine of the first stage would reach zero
    second_stage_from: int = 3000  # step from which lists hold stranger words (corpus.SECOND)
    second_rate: float = 0.4  # factor of the learning rate there; it falls to zero in a straight line
    third_stage_from: int = 4500  # step from which list answers begin with a word or two (corpus.THIRD)
    third_rate: float = 0.3  # as above
    fourth_stage_from: int = 5400  # step from which users type as strangers do (corpus.FOURTH)
    fourth_rate: float = 0.5  # as above
    kept: float = 0.35  # share of the weights before the fourth stage in those that it ends with
    fifth_stage_from: int = 6700  # step from which there is more of what is hard (corpus.FIFTH)
    fifth_rate: float = 0.45  # as above
    kept_at_fifth: float = 0.25  # share of the weights before the fifth stage in those that it ends with
    sixth_stage_from: int = 7500  # step from which there is more of what the fifth costs (corpus.SIXTH)
    sixth_rate: float = 0.4  # as above
    kept_at_sixth: float = 0.6  # share of the weights before the sixth stage in those that it ends with
    seventh_stage_from: int = 8000  # step from which there is what resembles something older (corpus.SEVENTH)
    seventh_rate: float = 0.4  # as above
    kept_at_last: float = 0.12  # share of the weights before the seventh stage in the finished model

    def rate(self, step: int) -> float:
        """Factor of the learning rate: linear warm-up, a cosine, then six straight lines to zero."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if step < self.second_stage_from:
            return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.horizon - self.warmup)))
        stages = (self.second_stage_from, self.third_stage_from, self.fourth_stage_from, self.fifth_stage_from,
                  self.sixth_stage_from, self.seventh_stage_from)  # fmt: skip
        ends = (*stages, self.steps)
        stage = max(i for i, first in enumerate(ends[:-1]) if step >= first)
        rates = (self.second_rate, self.third_rate, self.fourth_rate, self.fifth_rate, self.sixth_rate,
                 self.seventh_rate)  # fmt: skip
        return rates[stage] * (ends[stage + 1] - step) / (ends[stage + 1] - ends[stage])

    def scaled(self, steps: int) -> "Recipe":
        """The same schedule for a shorter or longer run."""
        names = ("warmup", "long_rows_from", "horizon", "second_stage_from", "third_stage_from",
                 "fourth_stage_from", "fifth_stage_from", "sixth_stage_from", "seventh_stage_from")  # fmt: skip
        return replace(self, steps=steps, **{name: round(getattr(self, name) * steps / self.steps) for name in names})


class Trainer:
    """Model, optimizers and step number. `train_step()` does one step, `save` and `resume` move between folders.

    A tokenizer that is given must be the one that the recipe's seed makes; without it, it is trained first.
    """

    def __init__(self, recipe: Recipe, device: str = "cpu", config: Config = TINY, tokenizer=None):
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.config, self.step = recipe, device, config, 0
        self.tokenizer = tokenizer or train_tokenizer(recipe.seed, config.vocab_size)
        self.model = initialise(Transformer(config)).to(device).train()
        self.attend = causal_in_blocks if torch.device(device).type == "cpu" else Causal()
        self.optimizers = self._new_optimizers()
        rows = partial(Rows, self.tokenizer, recipe.seed, recipe.tokens_per_batch)
        self.short, self.long = rows(longest=512), rows()
        stages = {recipe.second_stage_from: SECOND, recipe.third_stage_from: THIRD, recipe.fourth_stage_from: FOURTH}
        stages |= {recipe.fifth_stage_from: FIFTH, recipe.sixth_stage_from: SIXTH, recipe.seventh_stage_from: SEVENTH}
        later = {first: rows(stage=stage) for first, stage in stages.items()}
        self.before: dict[str, torch.Tensor] = {}  # weights at the beginning of a stage, from the fourth on
        self.sources = {0: self.short, recipe.long_rows_from: self.long} | later  # step from which → what is drawn from

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and name != "embed_tokens.weight"]
        rest = [p for name, p in self.model.named_parameters() if p.dim() != 2 or name == "embed_tokens.weight"]
        rate, decay = self.recipe.learning_rate, self.recipe.weight_decay
        return [
            torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def compile(self) -> bool:
        """Fuse what each layer does between its products, with torch.compile; says whether that works here.

        A step takes a sixth less time on a CPU. Every length of row is compiled once, 5 to 15 s each. Without a C++
        compiler, layers stay as they are: the losses are those of another machine, not of another recipe.
        """
        torch._dynamo.config.cache_size_limit = 64  # six lengths, for each of six layers
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        try:
            self.loss(*self.short.held_out(2, 16)).backward()
        except Exception:  # no compiler, no headers: torch has an exception for each, and none for all of them
            for layer in self.model.layers:
                layer._compiled_call_impl = None
            return False
        finally:
            self.model.zero_grad(set_to_none=True)
        return True

    def loss(self, inputs, targets, counts):
        """Mean cross entropy of the targets that count, in nats per token; bf16 autocast, logits in fp32."""
        inputs, targets, counts = (t.to(self.device) for t in (inputs, targets, counts))
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            hidden = self.model(inputs, NoCache(self.config.num_hidden_layers), 0, self.attend)  # (B,T,C)
            logits = self.model.lm_head(hidden[counts])  # (N,V), only where somebody looks
        return F.cross_entropy(logits.float(), targets[counts])

    def train_step(self) -> float:
        """One batch, one update. Returns the loss."""
        if self.step == self.recipe.fourth_stage_from:
            self.before = self.weights()
        recipe = self.recipe
        if self.step in (recipe.fifth_stage_from, recipe.sixth_stage_from, recipe.seventh_stage_from):
            self.begin_anew()
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

    def begin_anew(self):
        """Go on from what would be exported here, with optimizers that know nothing of the way there."""
        self.before = self.finished()
        self.load(self.before)
        self.optimizers = self._new_optimizers()

    def load(self, weights: dict[str, torch.Tensor]):
        """Copy weights, by name, into the model."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy on the CPU, by name."""
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def finished(self) -> dict[str, torch.Tensor]:
        """The weights that a stage ends with: with a share of the earlier ones, it costs less of what was learned
        before it (Wortsman et al. 2022, arXiv:2109.01903)."""
        now, recipe, kept = self.weights(), self.recipe, self.recipe.kept
        if self.step > recipe.fifth_stage_from:
            kept = recipe.kept_at_sixth if self.step > recipe.sixth_stage_from else recipe.kept_at_fifth
        if self.step > recipe.seventh_stage_from:
            kept = recipe.kept_at_last
        return {name: now[name].lerp(self.before[name], kept) for name in now} if self.before else now

    def rows(self) -> Rows:
        """Where this step's batch comes from."""
        return self.sources[max(first for first in self.sources if first <= self.step)]

    @torch.no_grad()
    def validate(self) -> float:
        """Loss on conversations whose names and words were never trained on; what the assistant says counts."""
        return self.loss(*self.long.held_out(8)).item()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder):
        """Write checkpoint-STEP next to its predecessors, complete or not at all; keep the last two."""
        folder, name = Path(folder), f"checkpoint-{self.step}"
        if folder / name not in checkpoints(folder):  # the same step of the same run has the same bits
            with new_checkpoint(folder, name) as temporary:
                save_file(self.weights(), temporary / "weights.safetensors")
                if self.before:
                    save_file(self.before, temporary / "before.safetensors")
                save_file(self._optimizer_tensors(), temporary / "optimizer.safetensors")
                state = {"step": self.step, "recipe": asdict(self.recipe), "config": self.config.to_dict()}
                (temporary / "state.json").write_text(json.dumps(state, indent=1))
        drop_old(folder)

    def resume(self, folder):
        """Continue from the newest checkpoint in `folder`; the recipe must be the one that it was started with."""
        newest = newest_checkpoint(folder)
        if (recipe := stored_recipe(newest)) != self.recipe:
            mine = asdict(self.recipe)
            differ = [f"{key} {value}, not {mine[key]}" for key, value in asdict(recipe).items() if value != mine[key]]
            raise NanoKVError(f"{newest} was made with another recipe: {', '.join(differ)}")
        state = read_state(newest)
        if state["config"] != json.loads(json.dumps(self.config.to_dict())):
            raise NanoKVError(f"{newest} was made with another model: {state['config']}")
        try:
            weights = load_file(newest / "weights.safetensors", device=self.device)
            optimizers = load_file(newest / "optimizer.safetensors", device=self.device)
            late = state["step"] > self.recipe.fourth_stage_from
            before = load_file(newest / "before.safetensors") if late else {}
        except (OSError, SafetensorError) as error:
            raise damaged(newest, error) from error
        self.load(weights)
        self.before = before
        self._load_optimizers(optimizers)
        self.step = state["step"]

    def _optimizer_tensors(self) -> dict:
        tensors = {}
        for i, optimizer in enumerate(self.optimizers):
            for j, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{i}.{j}.{key}": torch.as_tensor(value).cpu().clone() for key, value in state.items()}
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
        with saving(folder), writing.new_files(folder, writing.CHECKPOINT + writing.TOKENIZER, force=True) as new:
            self._write_model(new)

    def _write_model(self, folder: Path):
        tensors = {name: weight.bfloat16() for name, weight in self.finished().items()}
        end, pad = (self.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
        config = self.config.to_dict() | {"eos_token_id": end, "pad_token_id": pad}
        generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
        writing.write_checkpoint(folder, config, tensors, generation)
        save_tokenizer(self.tokenizer, folder)


def causal_in_blocks(q, k, v):
    """Causal attention of whole rows as plain products, q (B,H,T,D), k and v (B,Hk,T,D) → (B,H,T,D).

    128 queries at a time, whose scores stay in the processor's cache. Forward and backward on a CPU take a quarter (128
    tokens) to six tenths (2,048) of the time of the fused kernel, which reads bf16 slowly there.
    """
    B, H, T, D = q.shape
    mixed = []
    with torch.autocast(q.device.type, enabled=False):  # which would make a copy of the scores in fp32
        grouped, k = (q * D**-0.5).to(v.dtype).reshape(B, k.shape[1], -1, T, D), k.to(v.dtype)  # (B,Hk,G,T,D)
        for start in range(0, T, BLOCK):
            end = min(T, start + BLOCK)
            queries = grouped[:, :, :, start:end].flatten(2, 3)  # (B,Hk,G·N,D): a group shares its keys
            hidden = torch.full((end - start, end), -torch.inf, dtype=v.dtype, device=v.device).triu(start + 1)
            scores = (queries @ k[:, :, :end].transpose(-1, -2)).unflatten(2, (-1, end - start)) + hidden
            mixed.append(scores.softmax(-1).flatten(2, 3) @ v[:, :, :end])  # (B,Hk,G·N,D)
    blocks = [block.unflatten(2, (H // k.shape[1], -1)).flatten(1, 2) for block in mixed]  # (B,H,N,D) each
    return torch.cat(blocks, dim=2)


def initialise(model: Transformer) -> Transformer:
    """Normal(0, 0.02); the two projections that write to the residual stream smaller by sqrt(2L) (GPT-2)."""
    shrink = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02 * (shrink if name.endswith(("o_proj.weight", "down_proj.weight")) else 1))
    return model


def newest_checkpoint(folder) -> Path:
    """Where --resume continues."""
    if not (found := checkpoints(folder)):
        raise NanoKVError(f"{folder} holds no checkpoint to resume from", hint="start without --resume")
    return found[-1]


def stored_recipe(checkpoint: Path) -> Recipe:
    """The recipe that a checkpoint was started with."""
    try:
        return Recipe(**read_state(checkpoint)["recipe"])
    except (KeyError, TypeError) as error:
        raise damaged(checkpoint, f"its recipe is not one that this version knows ({error})") from error


def estimate_speed(trainer: Trainer, seconds: float = 6.0) -> float:
    """Tokens per second of a throw-away copy of the run, after one warm-up step."""
    probe = Trainer(trainer.recipe, trainer.device, trainer.config, trainer.tokenizer)
    probe.train_step()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        probe.train_step()
        done += probe.recipe.tokens_per_batch
    return done / (time.perf_counter() - start)
