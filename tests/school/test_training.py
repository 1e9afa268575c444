"""The training command: data as the chat will see it, runs that survive kills to the bit, a model that others read.

All but the last, slow test train a model of 40 thousand parameters (small_training.py) through the real command.
"""

import io
import json
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

import nanokv
from cli_helpers import HOME, environment, run_cli
from nanokv.apps import cli
from nanokv.apps.cli.common import terminal
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.attention import Causal
from nanokv.config import Linear
from nanokv.errors import NanoKVError
from nanokv.recurrent import delta_keys, gated_delta_chunks
from nanokv.school.training import corpus, data, run_folder, trainer
from nanokv.school.training.run_folder import checkpoints
from nanokv.school.training.trainer import Recipe, Trainer
from nanokv.text.tokenizer import Tokenizer
from small_training import EVERY, FLAGS, SMALL, STEPS, shrink, small_tokenizer
from weights_loader import BUNDLED

MESSAGES = (
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "My name is Zorbla."},
    {"role": "assistant", "content": "Nice to meet you, Zorbla."},
    {"role": "user", "content": "What is 27 + 48?"},
    {"role": "assistant", "content": "27 + 48 = 75."},
)


def trainer_rng(i):
    return random.Random(f"training test {i}")


@pytest.fixture(autouse=True)
def one_thread():
    """The order of sums depends on the number of threads; --threads 1 sets it for good, so put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def no_evaluation(given, name, seeds) -> dict:
    """An empty report: the model card has something to print."""
    report = {"cases": 1, "seeds": seeds, "tasks": {}, "groups": {}, "wrong": {}}
    return report | {"faults": [], "said": [], "missed": []}


@pytest.fixture
def small(monkeypatch):
    """The command trains SMALL; what it makes is not evaluated (that has tests of its own)."""
    monkeypatch.setattr("nanokv.apps.cli.commands.train.evaluate", no_evaluation)
    shrink(monkeypatch.setattr)
    return monkeypatch


@pytest.fixture
def picture():
    """Asked for by the test that looks at loss.png."""


@pytest.fixture(autouse=True)
def _no_picture(request, monkeypatch):
    """It is drawn for nobody else: that takes longer than a small run."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr("nanokv.apps.cli.train.log.plot", lambda out, output: None)


def train(out, *more) -> int:
    return cli.main([str(word) for word in ("train", "--out", out, *more)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 12 steps that nothing disturbed. Read only: copy it first."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanokv.apps.cli.commands.train.evaluate", no_evaluation)
        shrink(patch.setattr)
        before = torch.get_num_threads()
        assert train(out, *FLAGS, "-q") == 0
        torch.set_num_threads(before)
    return out


def assert_same_run(one: Path, other: Path):
    """Every file that depends on the arithmetic, byte for byte; the metrics as records."""
    tensors = ("weights.safetensors", "optimizer.safetensors")
    names = [f"checkpoint-{STEPS}/{name}" for name in (*tensors, "state.json")]
    names += [f"model/{path.name}" for path in (one / "model").iterdir()]
    assert [
        name for name in names if (one / name).read_bytes() != (other / name).read_bytes()
    ] == []
    assert run_folder.records(one / "metrics.jsonl") == run_folder.records(other / "metrics.jsonl")


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small tokenizer as the export writes it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    data.save_tokenizer(small_tokenizer(), folder)
    (folder / "config.json").write_text(json.dumps(SMALL.to_dict()))
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_training_text_is_the_chat_template(folder, theirs):
    """A model trained on other text than the chat renders would see its first strange token in every chat."""
    ours = Tokenizer.from_folder(folder)
    for n in range(1, len(MESSAGES) + 1):
        text = data.render(MESSAGES[:n])
        assert ours.render(list(MESSAGES[:n]), add_generation_prompt=False) == text
        assert theirs.apply_chat_template(list(MESSAGES[:n]), tokenize=False) == text
        prompt = text + "<|im_start|>assistant\n"
        assert ours.render(list(MESSAGES[:n]), add_generation_prompt=True) == prompt
        assert (
            theirs.apply_chat_template(
                list(MESSAGES[:n]), tokenize=False, add_generation_prompt=True
            )
            == prompt
        )


def test_the_tokenizer_means_the_same_everywhere(folder, theirs):
    """Trainer, nanokv and transformers: the same ids, and the same text back."""
    ours, trained = Tokenizer.from_folder(folder), small_tokenizer()
    texts = ["It's 07:45,  ok?\n\nna\u00efve \u65e5\u672c \U0001f680", data.render(MESSAGES)]
    texts += [m["content"] for i in range(20) for m in corpus.conversation(trainer_rng(i), 10)]
    for text in texts:
        ids = trained.encode(text).ids
        assert ours.encode(text) == ids and theirs(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids) == text if "<|" not in text else True


def test_every_digit_is_a_token(folder):
    """27 + 48 can only be learnt digit by digit."""
    ours = Tokenizer.from_folder(folder)
    vocabulary = small_tokenizer().get_vocab()
    assert [token for token in vocabulary if sum(c.isdigit() for c in token) > 1] == []
    assert [ours.decode([i]) for i in ours.encode("1234567890")] == list("1234567890")
    assert len(vocabulary) == SMALL.vocab_size


def spans_of_answers(messages) -> list[bool]:
    """For every character of the rendered text: is it said by the assistant? Its <|im_end|> is, the line break not."""
    marks = []
    for message in messages:
        header = f"<|im_start|>{message['role']}\n" + " " * (message["role"] == "user")
        said = message["role"] == "assistant"
        marks += [False] * len(header) + [said] * len(message["content"] + "<|im_end|>") + [False]
    return marks


def said_by_the_assistant(ids) -> list[bool]:
    """By a walk over the tokens: from a header of the assistant to the end of the message."""
    tokenizer, said, answering = small_tokenizer(), [], False
    header, end = (
        tokenizer.encode("<|im_start|>assistant\n").ids,
        tokenizer.token_to_id("<|im_end|>"),
    )
    for i, token in enumerate(ids):
        said.append(answering)
        answering = (
            token != end if answering else ids[max(0, i - len(header) + 1) : i + 1] == header
        )
    return said


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_exactly_what_the_assistant_says(seed):
    """Compared by character offsets of the whole text; `encode` counts the tokens of each message."""
    tokenizer = small_tokenizer()
    messages = list(MESSAGES) if seed == 0 else corpus.conversation(trainer_rng(seed), 12)
    encoded, marks = tokenizer.encode(data.render(messages)), spans_of_answers(messages)
    ids, said = data.Rows(tokenizer, 0, 512).encode(messages)
    assert ids == encoded.ids and said == [marks[start] for start, _ in encoded.offsets]
    assert {True, False} == set(said)


def test_all_answers_count_and_a_tenth_of_the_rest():
    """Another tenth in every row: no token of a user is left out for ever, none is learnt by heart."""
    quiet = replace(corpus.FIRST, user_share=0)
    rows, answers = (
        data.Rows(small_tokenizer(), 0, 1024, stage=stage) for stage in (corpus.FIRST, quiet)
    )
    rest = []
    stages = corpus.FIRST, corpus.SECOND, corpus.THIRD, corpus.LAST
    assert [stage.user_share for stage in stages] == [0.1, 0.1, 0.03, 0.03]
    for i in range(40):
        ids, counts = rows.row(random.Random(i), 512)
        same, said = answers.row(random.Random(i), 512)
        assert len(ids) == len(counts) == 513 and same == ids and any(said)
        assert all(counted for counted, answered in zip(counts, said, strict=True) if answered)
        rest += [counted for counted, answered in zip(counts, said, strict=True) if not answered]
    assert len(rest) > 5000 and 0.08 < sum(rest) / len(rest) < 0.12


def test_a_few_rows_are_stories_without_a_chat(monkeypatch):
    """Whole stories, each with its end, every token counted; never in what is held out."""
    tokenizer, rng = small_tokenizer(), random.Random(0)
    rows = data.Rows(tokenizer, 0, 1024)
    assert data.PLAIN_SHARE == 0.03
    monkeypatch.setattr(data, "PLAIN_SHARE", 0.4)
    drawn = [rows.row(rng, 64) for _ in range(100)]
    stories = [(ids, counts) for ids, counts in drawn if rows.assistant[0] not in ids]
    assert 25 < len(stories) < 55 and all(
        len(ids) == len(counts) == 65 and all(counts) for ids, counts in stories
    )
    told = tokenizer.decode(rows.plain_row(rng, 1024)[0], skip_special_tokens=False).split(
        "<|endoftext|>"
    )
    assert len(told) > 2 and all(part[-1] in ".!" for part in told[:-1])
    monkeypatch.setattr(data, "PLAIN_SHARE", 1.0)
    inputs, _, _ = rows.held_out(5, 64)
    assert all(rows.assistant[0] in row for row in inputs.tolist())


def test_targets_are_the_inputs_shifted_by_one():
    """The end of the header predicts the first token of the answer, and that counts; what comes before does not."""
    rows = data.Rows(small_tokenizer(), 0, 1024)
    for inputs, targets, counts in (rows.batch(3), rows.held_out(4, 256)):
        assert inputs.shape == targets.shape == counts.shape and counts.dtype == torch.bool
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    header, text = rows.assistant, inputs[0].tolist()
    first = (
        next(i for i in range(len(text)) if text[i : i + len(header)] == header) + len(header) - 1
    )
    assert counts[0, first] and not counts[0, :first].any()


def test_batches_depend_on_their_number_alone():
    """A resumed run starts in the middle; a seed makes another run."""
    rows = data.Rows(small_tokenizer(), 0, 512)
    forwards = [rows.batch(step) for step in range(6)]
    again = data.Rows(small_tokenizer(), 0, 512)
    backwards = [again.batch(step) for step in reversed(range(6))][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    other_seed = data.Rows(small_tokenizer(), 1, 512).batch(0)
    assert other_seed[0].shape != forwards[0][0].shape or not torch.equal(
        other_seed[0], forwards[0][0]
    )
    assert {inputs.numel() for inputs, _, _ in forwards} == {512}


BOUNDS = ("long_rows_from", "second_from", "third_from", "last_from")


def other_rows_every(steps, tokens_per_batch):
    """A recipe whose five kinds of rows take so many steps each."""
    bounds = {name: i * steps for i, name in enumerate(BOUNDS, start=1)}
    return Recipe(steps=5 * steps, tokens_per_batch=tokens_per_batch, **bounds)


def test_rows_are_short_at_first_and_long_later():
    """Curriculum: rows up to 512 tokens; the whole context; every exchange; the third stage; its last shares."""
    recipe = other_rows_every(2, tokens_per_batch=2048)
    run = Trainer(recipe, config=SMALL, tokenizer=small_tokenizer())
    assert {length for length, _ in run.short.lengths} == {64, 128, 256, 512}
    sources = [rows for _, rows in sorted(run.sources.items())]
    assert sources[:2] == [run.short, run.long] and sources[2].lengths == run.long.lengths
    assert 2048 in dict(run.long.lengths)
    assert [rows.stage for rows in sources[:3]] == [corpus.FIRST, corpus.FIRST, corpus.SECOND]
    assert sources[3].stage is corpus.THIRD and sources[4].stage is corpus.LAST
    assert {rows.tokens_per_batch for rows in sources} == {2048}
    assert sources[3].lengths == list(corpus.THIRD.lengths)
    used, batch = [], run.short.batch(0)
    for i, rows in enumerate(sources):
        rows.batch = lambda step, i=i: used.append((i, step)) or batch
    run.loss = lambda *batch: sum(p.sum() for p in run.model.parameters())
    for _ in range(10):
        run.train_step()
    assert used == [(step // 2, step) for step in range(10)]


def test_what_another_assistant_says_is_read_and_never_learnt():
    """Its tokens never count, not even in the tenth; one that says nothing has no message."""
    tokenizer = small_tokenizer()
    rows = data.Rows(tokenizer, 0, 1024, stage=corpus.THIRD)
    messages = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "What a lovely name!", "foreign": True},
        {"role": "user", "content": "I have a cat."},
        {"role": "assistant", "content": "", "foreign": True},
        {"role": "user", "content": "What is my name?"},
        {"role": "assistant", "content": "Your name is Ada."},
    ]
    ids, said = rows.encode(messages)
    spoken = [message for message in messages if message["content"]]
    assert ids == tokenizer.encode(data.render(spoken)).ids
    other = len(tokenizer.encode(data.render(messages[1:2])).ids)
    assert said.count(None) == other and {True, False, None} == set(said)
    silent = [i for i, mark in enumerate(said) if mark is None]
    assert silent == list(range(silent[0], silent[0] + other))
    foreign = counted = 0
    for i in range(60):
        _, counts = rows.row(random.Random(i), 256)
        talk = corpus.begin(random.Random(i), stage=corpus.THIRD)
        foreign += talk.foreign
        counted += any(counts)
    assert 26 < foreign < 46 and counted > 50


def test_no_token_of_another_assistant_counts(monkeypatch):
    """Rows in which every user token counts: what is left out is what others say, and headers."""
    monkeypatch.setattr(data, "PLAIN_SHARE", 0.0)
    rows = data.Rows(small_tokenizer(), 0, 1024, stage=replace(corpus.THIRD, user_share=1.0))
    shares = []
    for i in range(60):
        _, counts = rows.row(random.Random(f"others:{i}"), 256)
        shares.append(sum(counts) / len(counts))
    whole = [share for share in shares if share == 1]
    assert 15 < len(whole) < 36 and min(shares) < 0.9


def test_validation_uses_held_out_words(monkeypatch):
    """The curve must show what the model can do with words that it never saw."""
    asked, tokenizer = [], small_tokenizer()  # made of conversations too
    original = data.begin

    def spy(rng, held_out, stage):
        asked.append(held_out)
        return original(rng, held_out, stage)

    monkeypatch.setattr(data, "begin", spy)
    run = Trainer(Recipe(steps=2, tokens_per_batch=256), config=SMALL, tokenizer=tokenizer)
    first = run.validate()
    assert asked and all(asked)
    assert (
        run.validate() == first
        and run.step == 0
        and all(p.grad is None for p in run.model.parameters())
    )
    run.train_step()
    assert asked[-1] is False and run.validate() != first


def test_validation_draws_from_the_stage_that_is_trained():
    """The answers of a later stage have other words: on those of the first, the loss of a good model rises."""
    recipe = other_rows_every(1, tokens_per_batch=256)
    run = Trainer(recipe, config=SMALL, tokenizer=small_tokenizer())
    losses = []
    for run.step in range(5):  # the same weights
        losses.append(run.validate())
    stages = (corpus.FIRST, corpus.FIRST, corpus.SECOND, corpus.THIRD, corpus.LAST)
    rows = [data.Rows(run.tokenizer, 0, 256, stage=stage).held_out(8) for stage in stages]
    with torch.no_grad():
        assert losses == [run.loss(*batch) for batch in rows]
    assert len(set(losses)) == 4


def test_validation_counts_what_the_assistant_says():
    """A user's words are not predictable; they must not hide what the answers do."""
    run = Trainer(Recipe(steps=2, tokens_per_batch=256), config=SMALL, tokenizer=small_tokenizer())
    seen = []
    run.loss = lambda *batch: seen.append(batch) or torch.tensor(0.0)
    run.validate()
    ((inputs, targets, counts),) = seen
    rows = torch.cat([inputs[:, :1], targets], 1).tolist()
    assert counts.tolist() == [said_by_the_assistant(ids)[1:] for ids in rows]


def test_the_loss_is_the_mean_over_what_counts():
    """A target that does not count may be any token; one that counts may not."""
    run = Trainer(Recipe(steps=2, tokens_per_batch=256), config=SMALL, tokenizer=small_tokenizer())
    inputs, targets, counts = run.long.held_out(2, 64)
    loss, apart = run.loss(inputs, targets, counts), []
    for row in range(2):
        apart.append(run.loss(inputs[row : row + 1], targets[row : row + 1], counts[row : row + 1]))
    weights = counts.sum(1) / counts.sum()
    assert loss.item() == pytest.approx(
        sum(w * part for w, part in zip(weights, apart, strict=True)).item(), abs=0.01
    )
    assert run.loss(inputs, targets.where(counts, 7), counts) == loss
    assert run.loss(inputs, targets.where(~counts, 7), counts) != loss


# --- attention in blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("T", [1, 2, 3, 7, 64, 127, 128, 129, 255, 256, 257, 600])
def test_attention_in_blocks_is_causal_attention(T, groups):
    """Values and gradients of q, k and v, as the attention of the library gives them."""
    generator = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, heads, T, 16, generator=generator) for heads in (2 * groups, 2, 2))
    upstream = torch.randn(2, 2 * groups, T, 16, generator=generator)
    results = []
    for attend in (trainer.causal_in_blocks, Causal()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        mixed = attend(*leaves)
        mixed.backward(upstream)
        results.append([mixed, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 1e-5


def test_attention_in_blocks_keeps_the_type_of_autocast():
    """q and k leave RoPE in fp32, v is bf16: the answer is bf16, and close."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 64, 16, generator=generator) for heads in (6, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        ours = trainer.causal_in_blocks(q, k, v.bfloat16())
    assert ours.dtype == torch.bfloat16 and (ours - Causal()(q, k, v)).abs().max() < 0.05


def test_the_loss_is_the_mean_of_minus_the_log_probabilities():
    """Of logits in bf16, as by hand in fp64."""
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(50) % 33
    exact = logits.double()
    by_hand = (
        sum(exact[i].exp().sum().log() - exact[i, token] for i, token in enumerate(targets)) / 50
    )
    assert trainer.cross_entropy(logits, targets).item() == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.night
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_learn_the_same():
    """Loss within 1e-3 and gradients within 2 % of their norm, for a short and a longer row."""
    runs = [
        Trainer(Recipe(tokens_per_batch=512), config=SMALL, tokenizer=small_tokenizer())
        for _ in range(2)
    ]
    assert runs[1].compile() and runs[1].cross_entropy is not trainer.cross_entropy
    for length in (64, 300):
        batch = runs[0].short.held_out(4, length)
        losses = [run.loss(*batch) for run in runs]
        for loss in losses:
            loss.backward()
        assert abs(losses[0] - losses[1]) < 1e-3
        pairs = zip(*(run.model.parameters() for run in runs), strict=True)
        assert all((a.grad - b.grad).norm() < 0.02 * a.grad.norm() for a, b in pairs)
        for run in runs:
            run.model.zero_grad()
    assert list(runs[1].weights()) == list(runs[0].weights())


def test_without_a_compiler_layers_stay_as_they_are(monkeypatch):
    run = Trainer(Recipe(tokens_per_batch=512), config=SMALL, tokenizer=small_tokenizer())
    expected = run.loss(*run.short.held_out(2, 64))

    def missing(*args, **kwargs):
        raise torch._dynamo.exc.TorchDynamoException("no compiler")

    for layer in run.model.layers:
        monkeypatch.setattr(
            layer,
            "compile",
            lambda layer=layer, **_: setattr(layer, "_compiled_call_impl", missing),
        )
    assert not run.compile() and run.loss(*run.short.held_out(2, 64)) == expected
    assert run.cross_entropy is trainer.cross_entropy


# --- learning --------------------------------------------------------------------------------------------------------


def test_sixty_steps_on_one_batch_learn_it():
    """Loss down to a tenth: gradients, both optimizers and the choice of what counts work together."""
    # Its first 60 steps: all of them short rows.
    recipe = Recipe(tokens_per_batch=256, warmup=5, learning_rate=0.02)
    run = Trainer(recipe, config=SMALL, tokenizer=small_tokenizer())
    batch = run.short.batch(0)
    run.short.batch = lambda step: batch
    losses = [run.train_step() for _ in range(60)]
    # Ln 384 = 5.95: a fresh model knows nothing and is not sure of anything.
    assert 5.5 < losses[0] < 6.5
    assert losses[-1] < losses[0] / 10


def test_every_parameter_is_trained_by_exactly_one_optimizer():
    run = Trainer(
        Recipe(steps=4, tokens_per_batch=256, warmup=1), config=SMALL, tokenizer=small_tokenizer()
    )
    owned = [
        p
        for optimizer in run.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert {id(p) for p in owned} == {id(p) for p in run.model.parameters()} and len(owned) == len(
        set(map(id, owned))
    )
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train_step()
    assert [name for name, p in run.model.named_parameters() if torch.equal(p, before[name])] == []


@pytest.mark.parametrize("steps", [Recipe.steps, 20_000, 700])
def test_the_rate_warms_up_and_ends_near_zero(steps):
    """Up, then down in one straight line through all stages; a run of any length looks alike."""
    recipe = Recipe().scaled(steps)
    rates = [recipe.rate(step) for step in range(steps)]
    warm = recipe.warmup
    assert rates[0] == 1 / warm and max(rates) == rates[warm] == 1
    assert rates[-1] == 1 / (steps - warm)
    assert [one - other for one, other in pairwise(rates[warm:])] == pytest.approx(
        [rates[-1]] * (steps - warm - 1)
    )
    assert [other - one for one, other in pairwise(rates[:warm])] == pytest.approx(
        [rates[0]] * (warm - 1)
    )
    for name in ("warmup", *BOUNDS):
        assert abs(getattr(recipe, name) / steps - getattr(Recipe, name) / Recipe.steps) < 1e-3


@pytest.mark.parametrize("steps", range(1, 8))
def test_the_shortest_runs_have_a_rate_too(steps):
    recipe = Recipe().scaled(steps)
    assert [step for step in range(steps) if not 0 < recipe.rate(step) <= 1] == []


# --- a run that is stopped ends in the same weights ------------------------------------------------------------------


def spawn_and_die(out, *moment):
    script = Path(HOME) / "tests" / "support" / "small_training.py"
    argv = [str(word) for word in (sys.executable, script, *moment, "--out", out, *FLAGS)]
    done = subprocess.run(argv, env=environment(), capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "left", "done"),
    [(("--die-at", 10), [4, 8], 10), (("--die-in-save", 8), [4], 8)],
    ids=["step", "save"],
)
def test_a_killed_run_ends_in_the_same_bits(tmp_path, small, finished, moment, left, done):
    """SIGKILL between two checkpoints, and in the middle of writing one."""
    spawn_and_die(tmp_path, *moment)
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in left]
    assert (tmp_path / "checkpoint.tmp").exists() == (moment[0] == "--die-in-save")
    steps = [record["step"] for record in run_folder.records(tmp_path / "metrics.jsonl")]
    # The resumed run must not write those after `left` twice.
    assert steps == list(range(1, done + 1))
    assert train(tmp_path, "--resume", "--checkpoint-every", EVERY, "--threads", 1, "-q") == 0
    assert_same_run(finished, tmp_path)
    assert not (tmp_path / "checkpoint.tmp").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_stopped_run_is_saved_and_ends_in_the_same_bits(
    tmp_path, small, finished, picture, capsys, number, code
):
    """Ctrl-C, SIGTERM, a closed terminal: the step is finished, saved, and its plot is there."""
    one_step = Trainer.train_step

    def signalled(self):
        if self.step == 5:
            signal.raise_signal(number)
        return one_step(self)

    small.setattr(Trainer, "train_step", signalled)
    forget_presses()
    assert train(tmp_path, *FLAGS) == code
    said = capsys.readouterr().err
    assert "saving" in said and "stopped at step 6 of 12" in said and "--resume" in said
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "loss.png").exists() and not (tmp_path / "model").exists()
    small.setattr(Trainer, "train_step", one_step)
    assert train(tmp_path, "--resume", "--checkpoint-every", EVERY, "--threads", 1, "-q") == 0
    assert_same_run(finished, tmp_path)


def forget_presses():
    """A press within half a second of the last one belongs to it: the tests' own are no bounces."""
    terminal._presses.update(last=-60.0, term=-60.0)


def test_a_second_ctrl_c_leaves_without_saving(tmp_path, small, capsys):
    """Whoever presses again wants out now; the older checkpoint stays whole."""
    one_step = Trainer.train_step
    small.setattr(
        Trainer,
        "train_step",
        lambda self: (self.step == 5 and signal.raise_signal(2), one_step(self))[1],
    )
    save = Trainer.save
    small.setattr(
        Trainer,
        "save",
        lambda self, out: (self.step == 6 and signal.raise_signal(2), save(self, out))[1],
    )
    forget_presses()
    assert train(tmp_path, *FLAGS) == 130
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]
    assert "again = leave without" in capsys.readouterr().err


def test_checkpoints_do_not_change_the_run(tmp_path, small, finished):
    """How often it is saved and validated is no part of the recipe."""
    flags = [*FLAGS[:4], "--checkpoint-every", 5, *FLAGS[6:]]
    assert train(tmp_path, *flags, "-q") == 0
    final = f"checkpoint-{STEPS}/weights.safetensors"
    assert (tmp_path / final).read_bytes() == (finished / final).read_bytes()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-12"]


def test_the_seed_makes_another_run(tmp_path, small, finished):
    assert train(tmp_path, *FLAGS, "--seed", 1, "-q") == 0
    final = f"checkpoint-{STEPS}/weights.safetensors"
    ours, other = load_file(tmp_path / final), load_file(finished / final)
    assert all(not torch.equal(ours[name], other[name]) for name in ours)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, small, finished, capsys):
    """The write fails for real (RLIMIT_FSIZE); one error, exit code 2, and the run goes on from before."""
    one_step = Trainer.train_step
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def filled(self):
        if self.step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        return one_step(self)

    small.setattr(Trainer, "train_step", filled)
    try:
        code = train(tmp_path, *FLAGS, "-q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert (
        code == 2
        and "checkpoint-8 was not saved" in said
        and "MB are free" in said
        and "hint:" in said
    )
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]
    assert not (tmp_path / "checkpoint.tmp").exists()
    small.setattr(Trainer, "train_step", one_step)
    assert train(tmp_path, "--resume", "--checkpoint-every", EVERY, "--threads", 1, "-q") == 0
    assert_same_run(finished, tmp_path)


# --- the run's folder ------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(finished):
    """Two checkpoints, a line a step, a plot, a model; nothing temporary."""
    assert sorted(path.name for path in finished.iterdir()) == [
        "checkpoint-12",
        "checkpoint-8",
        "loss.png",
        "metrics.jsonl",
        "model",
    ]
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in lines] == list(range(256, STEPS * 256 + 1, 256))
    assert [line["step"] for line in lines if "validation" in line] == [4, 8, 12]
    picture = (finished / "loss.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 10_000


def test_resumed_metrics_drop_what_is_done_again(tmp_path, small, finished):
    """Steps after the checkpoint are done again; a line that the kill has cut is dropped too."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-12")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"loss": 4.1, "st')
    assert (
        train(tmp_path / "run", "--resume", "--checkpoint-every", EVERY, "--threads", 1, "-q") == 0
    )
    assert_same_run(finished, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (
        finished / "metrics.jsonl"
    ).read_text()


def test_resuming_a_finished_run_changes_nothing(tmp_path, small, finished):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    assert train(tmp_path / "run", "--resume", "--threads", 1, "-q") == 0
    assert_same_run(finished, tmp_path / "run")


def test_incomplete_checkpoints_are_ignored(tmp_path, small, finished):
    """A half deleted one, one by another hand: the newest whole one counts."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoint-12", tmp_path / "run" / "checkpoint-90")
    (tmp_path / "run" / "checkpoint-90" / "state.json").unlink()
    shutil.copytree(tmp_path / "run" / "checkpoint-12", tmp_path / "run" / "checkpoint-old")
    assert [path.name for path in checkpoints(tmp_path / "run")] == [
        "checkpoint-8",
        "checkpoint-12",
    ]
    assert train(tmp_path / "run", "--resume", "--threads", 1, "-q") == 0


REFUSED = {
    "no --out": ([], "--out is missing", "--evaluate"),
    "not empty": (
        ["--out", "RUN"],
        "is not empty",
        "--resume continues that run, --force throws it away",
    ),
    "a file": (["--out", "FILE"], "is a file, not a folder", "another --out"),
    "nothing to resume": (
        ["--out", "NEW", "--resume"],
        "holds no checkpoint to resume from",
        "without --resume",
    ),
    "other steps": (
        ["--out", "RUN", "--resume", "--steps", "13"],
        "a run with --steps 12, not 13",
        "--steps",
    ),
    "other batch": (
        ["--out", "RUN", "--resume", "--batch-tokens", "512"],
        "--batch-tokens 256, not 512",
        "leave out",
    ),
    "other seed": (
        ["--out", "RUN", "--resume", "--seed", "4"],
        "--seed 0, not 4",
        "leave out --seed",
    ),
    "other length": (
        ["--out", "RUN", "--resume", "--minutes", "4"],
        "a run of 12 steps",
        "leave out --minutes",
    ),
    "both": (["--out", "RUN", "--resume", "--force"], "not allowed with", "--help"),
    "foreign files": (
        ["--out", "HOME", "--force"],
        "holds letters.txt: not part of a training run",
        "another --out",
    ),
    "foreign, not forced": (
        ["--out", "HOME"],
        "holds letters.txt: not part of a training run",
        "another --out",
    ),
    "no model yet": (["--out", "NEW", "--evaluate"], "holds no finished model", "new makes one"),
    "no GPU": (["--out", "NEW", "--device", "cuda"], "sees no GPU", "--device cpu"),
    "no such device": (["--out", "NEW", "--device", "tpu"], "invalid choice: 'tpu'", "--help"),
    "no steps": (
        ["--out", "NEW", "--steps", "0"],
        "0 is not a whole number of at least 1",
        "--help",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason_and_a_way_out(tmp_path, small, finished, capsys, name):
    """Exit code 2, and nothing was touched."""
    flags, message, hint = REFUSED[name]
    places = {
        "RUN": finished,
        "FILE": tmp_path / "file",
        "HOME": tmp_path / "home",
        "NEW": tmp_path / "new",
    }
    places["FILE"].write_text("x")
    places["HOME"].mkdir()
    (places["HOME"] / "letters.txt").write_text("dear")
    small.setattr(torch.cuda, "is_available", lambda: False)
    before = sorted(finished.rglob("*"))
    assert cli.main(["train", *(str(places.get(flag, flag)) for flag in flags)]) == 2
    said = capsys.readouterr().err
    assert message in said and hint in said.split("hint:")[1]
    assert (
        sorted(finished.rglob("*")) == before
        and (places["HOME"] / "letters.txt").read_text() == "dear"
    )
    assert not places["NEW"].exists()


def test_force_starts_anew(tmp_path, small, finished):
    shutil.copytree(finished, tmp_path / "run")
    assert (
        train(tmp_path / "run", "--force", "--steps", 2, "--batch-tokens", 64, "--threads", 1, "-q")
        == 0
    )
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert len(run_folder.records(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("weights.safetensors", lambda data: data[:1000]),
        ("optimizer.safetensors", lambda data: b""),
        ("state.json", lambda data: b"{"),
        ("state.json", lambda data: data.replace(b'"steps"', b'"stairs"')),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path, small, finished, capsys, name, damage):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint-12" / name
    path.write_bytes(damage(path.read_bytes()))
    assert train(tmp_path / "run", "--resume", "-q") == 2
    said = capsys.readouterr().err
    assert "checkpoint-12 is damaged" in said and "continues from the one before it" in said
    shutil.rmtree(path.parent)
    assert train(tmp_path / "run", "--resume", "--threads", 1, "-q") == 0


def test_a_checkpoint_of_another_model_is_refused(tmp_path, finished):
    run = Trainer(
        replace(Recipe(), tokens_per_batch=256).scaled(STEPS),
        config=SMALL,
        tokenizer=small_tokenizer(),
    )
    state = finished / "checkpoint-12" / "state.json"
    other = tmp_path / "checkpoint-12" / "state.json"
    shutil.copytree(finished / "checkpoint-12", tmp_path / "checkpoint-12")
    other.write_text(state.read_text().replace('"rope_theta": 1000000.0', '"rope_theta": 10000.0'))
    with pytest.raises(NanoKVError, match="another model"):
        run.resume(tmp_path)
    other.write_text(state.read_text().replace('"clip": 1.0', '"clip": 2.0'))
    with pytest.raises(NanoKVError, match=r"another recipe: clip 2\.0, not 1\.0"):
        run.resume(tmp_path)


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_lines_without_a_terminal(tmp_path, small, capsys):
    """Parameters, steps and tokens first; then a line and a sample answer an evaluation, not one a step."""
    assert train(tmp_path, *FLAGS) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and "\x1b" not in err
    count = sum(p.numel() for p in nanokv.load(tmp_path / "model")[0].parameters())
    assert (
        lines[0]
        == f"{count:,} parameters · 12 steps of 256 tokens · cpu · from step 0 · {tmp_path}"
    )
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(" ·")[0] for line in steps] == [
        "step 1/12",
        "step 4/12",
        "step 8/12",
        "step 12/12",
    ]
    number = r"\d+\.\d{3}"
    assert (
        re.fullmatch(rf"step 1/12 · loss {number} · [\d.]+k tok/s · ETA \d+ min", steps[0])
        and "nan" not in err
    )
    assert re.fullmatch(
        rf"step 8/12 · loss {number} · val {number} · [\d.]+k tok/s · ETA \d+ min", steps[2]
    )
    assert sum(" → " in line for line in lines) == 3 and len(lines) == 1 + 4 + 3


def test_quiet_says_nothing(tmp_path, small, capsys):
    assert train(tmp_path, *FLAGS, "-q") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("steps", "cases"), [(1, 5), (8, 5), (1600, 10), (8000, 50), (16000, 100), (17000, 100)]
)
def test_a_short_run_is_evaluated_shortly(steps, cases):
    from nanokv.apps.cli.commands.train import cases_after

    assert cases_after(steps) == cases


@pytest.mark.slow
def test_evaluation_gets_the_cases_of_the_run_unless_they_are_given_and_can_be_left_out(
    tmp_path, small, capsys
):
    asked = []
    noted = lambda given, *rest: asked.append(given.cases) or no_evaluation(given, *rest)  # noqa: E731
    small.setattr("nanokv.apps.cli.commands.train.evaluate", noted)
    assert (
        train(tmp_path / "a", *FLAGS[:6], "-q") == 0
        and train(tmp_path / "b", *FLAGS[:6], "--cases", 7, "-q") == 0
    )
    assert asked == [5, 7] and (tmp_path / "a" / "model" / "README.md").exists()
    assert train(tmp_path / "c", *FLAGS[:6], "--no-evaluate") == 0
    assert asked == [5, 7] and not (tmp_path / "c" / "model" / "README.md").exists()
    assert "--evaluate measures it" in capsys.readouterr().err
    assert cli.main(["train", "--evaluate", "--no-evaluate"]) == 2


def test_the_time_left_is_told_by_the_latest_steps(monkeypatch, capsys):
    """The first step compiles for 200 s, the others take 2: after 60 of 90 steps a minute is left, not four."""
    from nanokv.apps.cli.train import log as train_log

    clock = iter([0, *range(200, 400, 2)])
    monkeypatch.setattr(train_log.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(train_log, "EVERY_S", -1)
    run = SimpleNamespace(step=0, recipe=Recipe(steps=90, tokens_per_batch=2000))
    progress = train_log.Progress(OutputOptions(color="never"), 100, run)
    for step in range(1, 61):
        progress.show({"step": step, "loss": 1.0})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1/90 · loss 1.000 · 0.0k tok/s · ETA 297 min"
    assert lines[-1] == "step 60/90 · loss 1.000 · 1.0k tok/s · ETA 1 min"


@pytest.mark.parametrize("tty", [True, False])
def test_the_evaluation_shows_how_far_it_is(monkeypatch, tty):
    """On a terminal a line that is taken away again; elsewhere at most one every ten seconds."""
    from nanokv.apps.cli.train import log as train_log

    screen, clock = io.StringIO(), iter(range(0, 1000, 3))
    screen.isatty = lambda: tty
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(train_log.time, "monotonic", lambda: next(clock))
    progress = train_log.EvaluationProgress(False, 8)
    for _ in range(8):
        progress()
    progress.clear()
    said = screen.getvalue()
    assert "evaluating · 4/8 conversations · 12 s left" in said and said.count("evaluating") == (
        8 if tty else 2
    )
    assert said.endswith("\r\x1b[K" if tty else "\n")


def test_a_bar_on_a_terminal(tmp_path, small, monkeypatch):
    """One bar that is redrawn; sample answers stand above it as lines of their own."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    assert train(tmp_path, *FLAGS) == 0
    said = screen.getvalue()
    assert (
        "step 12/12 · loss" in said
        and "ETA" in said
        and "What is a KV cache? → " not in said.split("\n")[0]
    )
    assert said.count(" → ") == 3 and "━" in said


def test_minutes_become_steps(tmp_path, small):
    """1,000 tokens per second for 0.05 minutes are 11 steps of 256."""
    small.setattr(trainer, "estimate_speed", lambda run: 1000.0)
    assert train(tmp_path, "--minutes", 0.05, *FLAGS[2:], "-q") == 0
    state = json.loads((checkpoints(tmp_path)[-1] / "state.json").read_text())
    assert state["step"] == state["recipe"]["steps"] == 11


def test_measuring_the_speed_disturbs_nothing():
    run = Trainer(Recipe(steps=4, tokens_per_batch=256), config=SMALL, tokenizer=small_tokenizer())
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    assert trainer.estimate_speed(run, seconds=0.1) > 0
    assert run.step == 0 and all(
        torch.equal(p, before[name]) for name, p in run.model.named_parameters()
    )


# --- the finished model ----------------------------------------------------------------------------------------------


def test_the_export_is_the_checkpoint_in_bf16(finished):
    weights = load_file(finished / "checkpoint-12" / "weights.safetensors")
    exported = load_file(finished / "model" / "model.safetensors")
    assert {f"model.{name}" for name in weights} == set(exported)
    assert all(
        torch.equal(exported[f"model.{name}"], w.to(torch.bfloat16)) for name, w in weights.items()
    )
    assert sorted(path.name for path in (finished / "model").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_export_is_an_ordinary_hugging_face_folder(finished):
    """nanokv.load and transformers read the same model out of it: logits, ids, template, eos."""
    model, tokenizer = nanokv.load(finished / "model", dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        finished / "model", dtype=torch.float32
    ).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(finished / "model")
    assert type(reference).__name__ == "Qwen3ForCausalLM"
    text = tokenizer.render(list(MESSAGES), add_generation_prompt=True)
    assert text == theirs.apply_chat_template(
        list(MESSAGES), tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer.encode(text)])
    assert theirs(text)["input_ids"] == ids[0].tolist()
    with torch.inference_mode():
        gap = (nanokv.score(model, ids) - reference(ids).logits).abs().max().item()
    assert gap <= 1e-5
    assert set(reference.generation_config.eos_token_id) == set(
        model.generation_config.eos_token_ids
    )
    assert (
        theirs.eos_token_id
        == theirs.convert_tokens_to_ids("<|im_end|>")
        in model.generation_config.eos_token_ids
    )


def test_the_export_can_be_talked_to(finished):
    """Session, the path of the chat: some answer, and a cache that holds the conversation."""
    session = nanokv.Session(
        *nanokv.load(finished / "model", dtype=torch.float32), params={"max_new_tokens": 5}
    )
    session.ask("My name is Zorbla.")
    session.ask("What is my name?")
    assert session.last.reused > 0 and session.cache.length > 20


# --- the real thing --------------------------------------------------------------------------------------------------


def test_the_help_and_the_card_have_the_recipe(capsys):
    """Steps, tokens per step and bounds of the stages are those of Recipe()."""
    assert train("unused", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    recipe = Recipe()
    assert f"(default: {recipe.steps:,}, three stages)" in shown
    assert f"tokens per step (default: {recipe.tokens_per_batch:,})" in shown
    card = (BUNDLED["tiny"] / "README.md").read_text()
    told = " ".join(card.split())
    assert f"{recipe.steps:,} steps of {recipe.tokens_per_batch:,} tokens (65.5 M in all)" in told
    assert f"From step {recipe.second_from:,} on the conversations have every kind" in told
    assert f"From step {recipe.third_from:,} on they also have" in told
    assert f"From step {recipe.last_from:,} on lists" in told


def test_the_size_of_the_bundled_model():
    """About 3 M parameters, at most 12 MB; heads times head dim is not the hidden size."""
    assert trainer.TINY.num_attention_heads * trainer.TINY.head_dim != trainer.TINY.hidden_size
    count = sum(p.numel() for p in trainer.Transformer(trainer.TINY).parameters())
    assert 2_500_000 < count < 3_500_000 and 2 * count < 12_000_000


@pytest.mark.slow
def test_smoke_run_of_the_real_command(tmp_path):
    """Four steps of the bundled model's own recipe, from nothing to the evaluation's table, in its own process."""
    flags = (
        "--steps",
        4,
        "--batch-tokens",
        512,
        "--checkpoint-every",
        2,
        "--cases",
        1,
        "--threads",
        1,
    )
    done = run_cli("train", "--out", tmp_path / "run", *flags, "--json", timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert (
        set(report["missed"]) <= set(report["tasks"])
        and report["cases"] == 1
        and len(report["faults"]) == 5
    )
    size = sum(path.stat().st_size for path in (tmp_path / "run" / "model").iterdir())
    assert size < 12_000_000
    model, tokenizer = nanokv.load(tmp_path / "run" / "model", dtype=torch.float32)
    assert (
        model.config.to_dict() == trainer.TINY.to_dict()
        and tokenizer.vocab_size == trainer.VOCAB_SIZE
    )
    stored = json.loads((tmp_path / "run" / "model" / "tokenizer.json").read_text())
    assert stored == json.loads(data.train_tokenizer(0, trainer.VOCAB_SIZE).to_str())


# --- the hybrid twin --------------------------------------------------------------------------------------------------

STATES = replace(
    SMALL,
    model_type="qwen3_5_text",
    num_hidden_layers=4,
    layer_types=(*["linear_attention"] * 3, "full_attention"),
    linear=Linear(
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
    ),
)


def test_a_model_with_states_is_trained_and_reloaded(tmp_path):
    """Through gated_delta_chunks: every weight has a gradient, the loss falls, a checkpoint goes on to the bit."""
    recipe = Recipe(tokens_per_batch=256).scaled(40)
    run = Trainer(recipe, config=STATES, tokenizer=small_tokenizer())
    assert not run.compile(), "eager, as documented"
    run.loss(*run.rows().batch(0)).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in run.model.parameters())
    run.model.zero_grad(set_to_none=True)
    losses = [run.train_step() for _ in range(20)]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5]), losses
    run.save(tmp_path / "run")
    again = Trainer(recipe, config=STATES, tokenizer=small_tokenizer())
    again.resume(tmp_path / "run")
    assert again.train_step() == run.train_step()
    run.export(tmp_path / "model")
    model, _ = nanokv.load(tmp_path / "model", dtype="float32")
    ids = torch.arange(2, 80)[None]
    ours = run.model.requires_grad_(False).bfloat16().float()
    assert model.config == STATES and torch.equal(nanokv.score(model, ids), nanokv.score(ours, ids))


def test_the_delta_rule_of_a_training_step_stays_in_fp32():
    """In a step with bf16 products, its y and S are those without autocast to the bit, in all layers with a state."""
    run = Trainer(Recipe(tokens_per_batch=256), config=STATES, tokenizer=small_tokenizer())
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(2, 1, 2, 100, 8, generator=generator)
    q, k = delta_keys(*raw, H=2)
    v = torch.randn(1, 2, 100, 8, generator=generator)
    g, beta = (
        -torch.rand(1, 2, 100, generator=generator),
        torch.rand(1, 2, 100, generator=generator),
    )
    given = q, k, v, g, beta, torch.zeros(1, 2, 8, 8)
    exact = gated_delta_chunks(*given)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gated_delta_chunks(*given)
        for layer in run.model.layers[:3]:
            trained = layer.linear_attn.more_tokens(*given)
            assert all(map(torch.equal, trained, exact))
    assert not torch.equal(rounded[0].float(), exact[0]), "autocast rounds the rule of inference"


def test_states_are_initialised_between_forgetting_and_keeping():
    """The decay per token is that of Mamba 2 and fla; norms that scale by 1 + w begin at 1."""
    run = Trainer(Recipe(tokens_per_batch=256), config=STATES, tokenizer=small_tokenizer())
    layer = run.model.layers[0].linear_attn
    kept = (-layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias)).exp()
    assert ((kept > 0.2) & (kept < 0.9991)).all()
    assert not run.model.norm.weight.any() and not run.model.layers[3].self_attn.k_norm.weight.any()
    assert (layer.norm.weight == 1).all()


def test_the_twin_of_the_bundled_model_has_three_states_to_one_attention():
    config = trainer.HYBRID
    assert (config.states, config.num_hidden_layers, config.hidden_size) == (6, 8, 192)
    assert [config.has_state(i) for i in range(4)] == [True, True, True, False]
