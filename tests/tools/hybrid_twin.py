"""What a recurrent state recalls: twins with states, with attention, and with both, on one task and for as many steps.

    python tests/tools/hybrid_twin.py recall [--out FILE]    8 min of one thread: the first table of notebook 17
    python tests/tools/hybrid_twin.py chat --models FOLDER [--out FILE]    3 hours of one thread: the second

`recall` is multi-query associative recall (Arora et al. 2023, Zoology, arXiv 2312.04927): N pairs of a key and a value,
then every key again in another order, each followed by its value. Counted are the values that the model gives the
largest logit. A state has Dk·Dv numbers per head whatever N is; the keys and values of attention grow with N.

    state DkxDv    two layers with a recurrent state of two heads (GatedDeltaNet, hybrid.py)
    hybrid         three layers with the smallest of these states, and one with attention
    attention      two layers; its full cache, and caches of the bytes of each state: a window with two sinks

`chat` trains larger twins on the conversations of the first stage of `nanokv train`, 1,800 steps. A talk tells one to
six facts, each answered "Okay.", and asks for each. Counted are the facts of which the told value is the likeliest of
six (nanokv/lab/bench/facts.py); chance is one of six.

    3:1 DkxDv      the bundled model with a state in three of four layers (trainer.HYBRID)
    state DkxDv    the same with a state in every layer
    attention      the shape of the bundled model; its full cache, and windows
"""

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

import nanokv
from nanokv import costs
from nanokv.attention import Causal
from nanokv.cache import NoCache, make_cache
from nanokv.config import Config, Linear
from nanokv.inference import prefill, verify_draft
from nanokv.lab.bench.facts import Question, drawn, exchange, question
from nanokv.model import Transformer
from nanokv.school.training import run_folder
from nanokv.school.training.trainer import (
    HYBRID,
    TINY,
    Recipe,
    Trainer,
    initialise,
    new_optimizers,
)
from nanokv.text.tokenizer import Tokenizer

KEYS = VALUES = 32
PAIRS = (2, 4, 8, 16)  # trained on, in turn
TESTED = (2, 4, 8, 16, 32)
SIZES = ((4, 4), (8, 8), (16, 16), (32, 32))  # Dk, Dv of a state
TOKENS = 2048  # per step
SINKS = 2
RATE = 1e-2
ATTENTION = Config(
    vocab_size=KEYS + VALUES,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


def with_state(Dk: int, Dv: int, kinds: tuple[str, ...]) -> Config:
    """The sizes of ATTENTION, with these kinds of layers."""
    return replace(
        ATTENTION,
        model_type="qwen3_5_text",
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        linear=Linear(
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=Dk,
            linear_value_head_dim=Dv,
            linear_conv_kernel_dim=4,
        ),
    )


def twins() -> dict[str, Config]:
    """All models by name."""
    states = {f"state {Dk}x{Dv}": with_state(Dk, Dv, ("linear_attention",) * 2) for Dk, Dv in SIZES}
    mixed = with_state(*SIZES[0], (*("linear_attention",) * 3, "full_attention"))
    return {"attention": ATTENTION, **states, "hybrid": mixed}


# --- the task -------------------------------------------------------------------------------------


def pairs(N: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """(B,4·N): N keys with their values, then the same pairs in another order."""
    found = []
    for _ in range(rows):
        keys = torch.randperm(KEYS, generator=generator)[:N]
        values = torch.randint(VALUES, (N,), generator=generator) + KEYS
        told = torch.stack((keys, values), 1)  # (N,2)
        asked = told[torch.randperm(N, generator=generator)]
        found.append(torch.cat((told, asked)).flatten())
    return torch.stack(found)


def answers(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits at the second occurrence of every key (B,N,V), and the values that follow (B,N)."""
    half = ids.shape[1] // 2
    return logits[:, half::2], ids[:, half + 1 :: 2]


# --- training and counting ------------------------------------------------------------------------


def trained(config: Config, steps: int, seed: int = 0) -> Transformer:
    """Muon and AdamW with a warm-up and a straight line to zero, as in the recipe of `nanokv train`."""
    torch.manual_seed(seed)
    model = initialise(Transformer(config)).train()
    optimizers = new_optimizers(model, rate=1.0, decay=0.0, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    cache = NoCache(config.num_hidden_layers)
    for step in range(steps):
        rate = RATE * min((step + 1) / 50, 1 - step / steps)
        N = PAIRS[step % len(PAIRS)]
        ids = pairs(N, TOKENS // (4 * N), generator)
        logits, values = answers(model.lm_head(model(ids, cache, 0, Causal())), ids)
        loss = F.cross_entropy(logits.flatten(0, 1), values.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99:
            print(f"  step {step + 1:,}, {N} pairs, loss {loss.item():.3f}", flush=True)
    return model.requires_grad_(False).eval()


def recall(model: Transformer, cache: str, N: int, rows: int = 128) -> float:
    """Share of values that are the largest logit, with the keys read once and a cache of this kind."""
    ids = pairs(N, rows, torch.Generator().manual_seed(1000 + N))
    held = make_cache(cache, model.config, rows)
    logits, values = answers(verify_draft(model, ids, held, 0), ids)
    return float((logits.argmax(-1) == values).float().mean())


def state_bytes(Dk: int, Dv: int) -> int:
    """What S takes in two layers of two heads."""
    return 2 * 2 * Dk * Dv * 4


def rows_of(name: str, model: Transformer) -> list[dict]:
    """A row per model and cache: its bytes after the largest test, and the recall for each N."""
    caches = {"dict": name}
    if name == "attention":
        per_token = costs.kv_bytes_per_token(model.config, 4)
        for Dk, Dv in SIZES:
            window = state_bytes(Dk, Dv) // per_token - SINKS
            if window > 0:
                caches[f"sliding:window={window}:sinks={SINKS}"] = f"window {window} + {SINKS}"
    found = []
    for cache, title in caches.items():
        held = make_cache(cache, model.config)
        verify_draft(model, pairs(TESTED[-1], 1, torch.Generator()), held, 0)
        counted = {N: round(recall(model, cache, N), 3) for N in TESTED}
        found.append({"name": title, "bytes": bytes_of(model.config, held), "recall": counted})
    return found


def bytes_of(config: Config, cache) -> int:
    """S and the keys and values; without the marks that truncate needs, and without conv."""
    keys = sum(layer.nbytes for i, layer in enumerate(cache) if not config.has_state(i))
    return bytes_of_states(config) + keys


def bytes_of_states(config: Config) -> int:
    """S of all layers, in fp32."""
    if not config.linear:
        return 0
    sizes = config.linear
    numbers = sizes.linear_key_head_dim * sizes.linear_value_head_dim
    return config.states * sizes.linear_num_value_heads * numbers * 4


def run_recall(given) -> None:
    table = []
    for name, config in twins().items():
        began = time.process_time()
        print(f"{name}: {costs.parameters(config):,} parameters", flush=True)
        model = trained(config, given.steps)
        spent = time.process_time() - began
        for row in rows_of(name, model):
            table.append(row)
            print(
                f"{row['name']:<14} {row['bytes']:>7,} B  {row['recall']}  {spent:.0f} s",
                flush=True,
            )
        if given.out:
            keep(given.out, {"steps": given.steps, "pairs": PAIRS, "table": table})


# --- talks ----------------------------------------------------------------------------------------

FIRST_STAGE = Recipe(
    steps=1800, tokens_per_batch=4096, long_rows_from=1800, second_from=1800, third_from=1800
)
SMALL, LARGE = (8, 12), (32, 48)  # Dk, Dv; LARGE is that of HYBRID
TOLD = (1, 2, 4, 6)
TALKS = 48
HEARD = "Okay."  # an answer that does not repeat the fact


def chat_twins() -> dict[str, Config]:
    """All models by name; those with less to train first."""
    found = {"attention": TINY}
    for Dk, Dv in (SMALL, LARGE):
        sized = replace(HYBRID.linear, linear_key_head_dim=Dk, linear_value_head_dim=Dv)
        mixed = replace(HYBRID, linear=sized)
        found[f"3:1 {Dk}x{Dv}"] = mixed
        found[f"state {Dk}x{Dv}"] = replace(mixed, layer_types=("linear_attention",) * 8)
    return found


def train_on_talks(name: str, config: Config, folder: Path) -> None:
    """Train and write FOLDER/NAME, from the newest checkpoint if there is one."""
    runs = folder / f"{name} checkpoints"
    runs.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(FIRST_STAGE, config=config)
    trainer.compile()
    if run_folder.checkpoints(runs):
        trainer.resume(runs)
    while trainer.step < FIRST_STAGE.steps:
        loss = trainer.train_step()
        if trainer.step % 100 == 0:
            print(f"  {name}: step {trainer.step:,}, loss {loss:.3f}", flush=True)
            trainer.save(runs)
    trainer.export(folder / name)


def told(tokenizer: Tokenizer, N: int, seed: int) -> list[Question]:
    """A talk with N facts, and the question for each of them."""
    facts = drawn(random.Random(seed), N)
    messages = [message for fact in facts for message in exchange(fact.told, HEARD)]
    asked = []
    for fact in facts:
        text = tokenizer.render([*messages, {"role": "user", "content": fact.asked}])
        asked.append(question(tokenizer, text + fact.opening, fact))
    return asked


def known(model: Transformer, tokenizer: Tokenizer, cache: str, N: int) -> float:
    """Share of the facts that a model knows with a cache of this kind."""
    answered = []
    for seed in range(TALKS):
        for one in told(tokenizer, N, seed):
            held = make_cache(cache, model.config)
            logits = prefill(model, torch.tensor([one.ids]), held)[0]  # (V,)
            answered.append(one.answered(logits)[0])
    return sum(answered) / len(answered)


def chat_rows(name: str, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """A row per model and cache: its bytes after the longest talk, and the share known by N."""
    caches = {"dict": name}
    if name == "attention":
        per_token = costs.kv_bytes_per_token(model.config, 4)
        window = max(bytes_of_states(config) for config in chat_twins().values()) // per_token
        for width in (window, 2 * window):
            caches[f"sliding:window={width - SINKS}:sinks={SINKS}"] = (
                f"window {width - SINKS} + {SINKS}"
            )
    found = []
    for cache, title in caches.items():
        held = make_cache(cache, model.config)
        prefill(model, torch.tensor([told(tokenizer, TOLD[-1], 0)[0].ids]), held)
        shares = {N: round(known(model, tokenizer, cache, N), 3) for N in TOLD}
        found.append({"name": title, "bytes": bytes_of(model.config, held), "recall": shares})
    return found


def run_chat(given) -> None:
    folder = Path(given.models)
    table = []
    for name, config in chat_twins().items():
        if given.only not in (None, name):
            continue
        print(f"{name}: {costs.parameters(config):,} parameters", flush=True)
        if not (folder / name).exists():
            train_on_talks(name, config, folder)
        model, tokenizer = nanokv.load(str(folder / name), dtype="float32")
        for row in chat_rows(name, model, tokenizer):
            table.append(row)
            print(f"{row['name']:<14} {row['bytes']:>9,} B  {row['recall']}", flush=True)
    if given.out and not given.only:
        keep(given.out, {"talks": {"steps": FIRST_STAGE.steps, "told": TOLD, "table": table}})


def keep(file: str, more: dict) -> None:
    """Write these entries of a record; the others stay."""
    path = Path(file)
    record = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(record | more, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    table = commands.add_parser("recall")
    table.add_argument("--steps", type=int, default=1200)
    table.add_argument("--out")
    table.set_defaults(run=run_recall)
    chat = commands.add_parser("chat")
    chat.add_argument("--models", required=True)
    chat.add_argument("--only", metavar="NAME", help="this model alone; --out writes nothing then")
    chat.add_argument("--out")
    chat.set_defaults(run=run_chat)
    torch.set_num_threads(1)
    given = parser.parse_args()
    given.run(given)
