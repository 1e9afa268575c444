"""`nanokv verify`: equal checkpoints pass, sabotaged ones are named with layer and operation; the command's own rules.

A sabotaged checkpoint is compared with the good one: transformers would read the same wrong config and agree.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import nanokv.lab.verify
from cli_helpers import run_cli
from nanokv.apps.cli import main
from nanokv.lab.study.debug import OPERATIONS
from tiny_checkpoint import write_tiny_checkpoint
from verify_helpers import report_of, rows, verify_command  # noqa: F401 (the fixture `verify`)
from weights_loader import CheckpointError

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS = {
    "tied": {},
    "untied-bias": {"tie_word_embeddings": False, "attention_bias": True},
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 256, "num_key_value_heads": 1},
    "stored-bf16": {"dtype": torch.bfloat16},
    "no-groups": {"num_key_value_heads": 4, "seed": 3},
}


def edited(folder, target, **fields):
    """A copy of a checkpoint with other config fields; theta is set in both of its spellings."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    theta = fields.pop("rope_theta", None)
    if theta is not None:
        config["rope_parameters"]["rope_theta"] = theta
        config.pop("rope_theta", None)
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


# --- equal ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_written_by_transformers_is_equal(verify, tmp_path, kind):
    write_tiny_checkpoint(tmp_path / "it", **CHECKPOINTS[kind])
    code, out, err = verify(tmp_path / "it")
    found = rows(out)
    assert code == 0, out
    assert found.pop("published figures") == found.pop("hashes") == "skipped" and set(
        found.values()
    ) == {"ok"}
    assert set(nanokv.lab.verify.NEEDS_REFERENCE) < set(found), (
        "a check that is not run is not printed as skipped"
    )
    assert "reference: transformers 5.23.0" in out and out.endswith(
        "equal within tolerance (14 checks)\n"
    )
    assert err == "loading it …\nasking transformers 5.23.0 …\n"


def test_attn_factor_is_told_to_transformers_as_what_it_comes_to(verify, tiny_folder, tmp_path):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = edited(
        tiny_folder, tmp_path / "it", rope_parameters=rope | {"attn_factor": 0.8782488562869419}
    )
    code, out, _ = verify(folder, "-q")
    assert code == 0 and rows(out)["rope"] == rows(out)["logits"] == "ok", out


def test_a_sharded_checkpoint_is_equal(verify, tiny_folder, tmp_path):
    from transformers import Qwen3ForCausalLM

    shutil.copytree(
        tiny_folder, tmp_path / "shards", ignore=shutil.ignore_patterns("*.safetensors")
    )
    Qwen3ForCausalLM.from_pretrained(tiny_folder).save_pretrained(
        tmp_path / "shards", max_shard_size="150KB"
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert verify(tmp_path / "shards", "-q")[0] == 0


def test_bf16_is_compared_with_the_tolerance_of_bf16(verify, tiny_folder):
    report = report_of(verify, tiny_folder, "--dtype", "bfloat16")
    assert report["verdict"] == "equal" and report["dtype"] == "bfloat16"
    assert (
        next(s for s in report["operations"] if s["operation"] == "embed_tokens")["tolerance"]
        >= 1e-2
    )


def test_the_bundled_model_is_equal(verify):
    code, out, _ = verify("tiny")
    assert code == 0, out


@pytest.mark.slow
def test_published_vocabulary_and_head_shapes(verify, qwen3_files, tmp_path):
    """V 151,936 and H·D ≠ C with the published config, tokenizer and template; two narrow layers of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = json.loads((qwen3_files / "0.6B" / "config.json").read_text())
    fewer = {
        "num_hidden_layers": 2,
        "max_window_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 768,
    }
    config = Qwen3Config(**fields | fewer)
    folder = tmp_path / "Qwen3-0.6B"
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(qwen3_files / "tokenizer" / name, folder / name)
    code, out, _ = verify(folder)
    found = rows(out)
    assert code == 0, out
    assert found["published token ids"] == "ok" and found["chat template"] == "ok"
    assert found["published figures"] == "skipped" and "another hidden_size" in out


# --- three sabotaged checkpoints --------------------------------------------------------------------------------------


def test_another_rope_theta_is_found_at_the_rotation_of_layer_0(verify, tiny_folder, tmp_path):
    bad = edited(tiny_folder, tmp_path / "theta", rope_theta=500_000.0)
    assert verify(bad, "-q")[0] == 0, (
        "transformers reads the same wrong config: only another checkpoint can tell"
    )
    code, out, _ = verify(bad, "--against", tiny_folder)
    assert code == 1 and "first at layer 0, rope_k: " in out
    assert "config.json differs: rope_theta 500000.0 against 1000000.0" in out
    report = report_of(verify, bad, "--against", tiny_folder)
    inside = {s["operation"]: s["ok"] for s in report["operations"] if s["layer"] == 0}
    assert inside["q_norm"] and inside["k_norm"] and not inside["rope_q"] and not inside["rope_k"]
    assert report["status"]["rope"] == "differs" and report["status"]["tokenizer encode"] == "ok"
    assert report["reference"] == str(tiny_folder)


def test_another_eps_is_found_at_the_first_norm(verify, tiny_folder, tmp_path):
    bad = edited(tiny_folder, tmp_path / "eps", rms_norm_eps=1e-5)
    code, out, _ = verify(bad, "--against", tiny_folder)
    assert code == 1 and "first at layer 0, input_layernorm: " in out
    assert "config.json differs: rms_norm_eps 1e-05 against 1e-06" in out
    assert rows(out)["rope"] == "ok" and rows(out)["hidden states"] == "differs"


@pytest.mark.filterwarnings("ignore:.*lm_head.weight differs")
def test_another_head_leaves_every_layer_equal(verify, tiny_folder, tmp_path):
    bad = tmp_path / "head"
    shutil.copytree(tiny_folder, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][7] += 0.01
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = verify(bad, "--against", tiny_folder)
    found = rows(out)
    assert code == 1 and "first at lm_head: " in out
    assert "config.json differs: tie_word_embeddings False against True" in out
    assert found["hidden states"] == found["keys and values"] == found["config"] == "ok"
    assert found["logits"] == "differs"
    assert verify(bad, "-q")[0] == 0, "transformers keeps a stored head that differs, and so do we"


def test_a_change_below_the_tolerance_is_found_in_the_config(verify, tiny_folder, tmp_path):
    """1 % of eps moves nothing visible, but it is another model."""
    bad = edited(tiny_folder, tmp_path / "eps", rms_norm_eps=1.01e-6)
    report = report_of(verify, bad, "--against", tiny_folder)
    assert (
        report["first_divergence"] is None
        and report["first_unequal"]["operation"] == "input_layernorm"
    )
    assert [name for name, status in report["status"].items() if status == "differs"] == ["config"]


def test_a_checkpoint_equals_itself(verify, tiny_folder):
    report = report_of(verify, tiny_folder, "--against", tiny_folder)
    assert (
        report["verdict"] == "equal"
        and report["config_differences"] == {}
        and report["first_unequal"] is None
    )


@pytest.mark.slow
def test_checkpoints_of_other_sizes_are_compared_without_a_crash(verify, tiny_folder, tmp_path):
    """Another vocabulary, fewer layers: differences that have no number are inf, and null in JSON."""
    write_tiny_checkpoint(tmp_path / "other", num_hidden_layers=2, vocab_size=400, head_dim=16)
    for pair in ((tiny_folder, tmp_path / "other"), (tmp_path / "other", tiny_folder)):
        report = report_of(verify, pair[0], "--against", pair[1])
        assert {"vocab_size", "num_hidden_layers", "head_dim"} <= set(report["config_differences"])
        missing = [s for s in report["operations"] if s["layer"] == 2]
        assert {s["difference"] for s in missing} == {None} and "only one of the models" in missing[
            0
        ]["note"]
        assert verify(pair[0], "--against", pair[1])[0] == 1


# --- the command ------------------------------------------------------------------------------------------------------


def test_json_holds_every_operation_of_every_layer(verify, tiny_folder):
    report = report_of(verify, tiny_folder)
    assert len(report["operations"]) == 3 * len(OPERATIONS) + 3
    assert set(report["operations"][0]) == {
        "layer",
        "operation",
        "difference",
        "tolerance",
        "scale",
        "position",
        "note",
        "ok",
    }
    assert report["reference"] == "transformers 5.23.0" and report["first_divergence"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-model"], "no-such-model"),
        (["{tiny}", "--against", "no-such-model"], "no-such-model"),
        (["{tiny}", "--against", "{tiny}", "--alone"], "--alone and --against"),
        (["{tiny}", "-m", "{tiny}"], "two models"),
        (["{tiny}", "--dtype", "int8"], "--dtype"),
        (["{tiny}", "--strict"], "no flag --strict"),
    ],
)
def test_mistakes_leave_with_2_and_nothing_on_stdout(
    verify, tiny_folder, monkeypatch, argv, message
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = verify(*(word.format(tiny=tiny_folder) for word in argv), "--offline")
    assert (code, out) == (2, "") and "nanokv: error: " in err and message in err


def test_a_broken_checkpoint_leaves_with_2(verify, tiny_folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, out, err = verify(broken, "-q")
    assert (code, out) == (2, "") and "model.safetensors" in err


@pytest.mark.slow
def test_in_a_real_process_with_a_hostile_folder_name(tiny_folder, tmp_path):
    """stdout is the report, stderr the progress; the name reaches neither with its escape sequence."""
    folder = tmp_path / "evil\x1b[31mname"
    shutil.copytree(tiny_folder, folder)
    done = run_cli("verify", folder, "--color", "never")
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr and "evil␛[31mname".encode() in done.stdout
    assert done.stderr.decode().splitlines()[-1] == "asking transformers 5.23.0 …", (
        "no bars, no warnings of its"
    )


# --- weights that are no numbers --------------------------------------------------------------------------------------


def poisoned(folder, target, **values):
    """A copy whose tensors hold these values at their first places."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    for name, bad in values.items():
        tensors[name.replace("__", ".")].view(-1)[: len(bad)] = torch.tensor(bad)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


NAN, INF = float("nan"), float("inf")
Q_PROJ, K_NORM = (
    "model__layers__1__self_attn__q_proj__weight",
    "model__layers__0__self_attn__k_norm__weight",
)


@pytest.mark.parametrize(
    ("name", "values"), [(Q_PROJ, [NAN, NAN, -INF]), (K_NORM, [NAN]), (Q_PROJ, [INF])]
)
def test_weights_that_are_not_finite_are_named_and_counted(
    verify, tiny_folder, tmp_path, name, values
):
    """The plain model gave finite logits with NaN in q_proj: softmax makes numbers of it."""
    bad = poisoned(tiny_folder, tmp_path / "bad", **{name: values})
    nans = sum(x != x for x in values)
    words = f"{name.replace('__', '.')} holds {nans} NaN and {len(values) - nans} infinite of"
    code, out, err = verify(bad)
    assert (
        code == 1
        and rows(out)["finite weights"] == "differs"
        and words in out
        and not err.startswith("nanokv:")
    )
    assert rows(out)["logits"] == rows(out)["cached = uncached, logits"] == "skipped"
    assert nanokv.load(bad) and nanokv.load(tiny_folder, check_finite=True), (
        "nobody asked, and nothing to find"
    )
    with pytest.raises(CheckpointError, match=words):
        nanokv.load(bad, check_finite=True)
    with pytest.raises(CheckpointError, match=words):
        nanokv.load(bad, dtype=torch.bfloat16, check_finite=True)
    code, out, err = verify(tiny_folder, "--against", bad)
    assert code == 2 and words in err


def test_the_commands_that_load_a_model_can_look(tiny_folder, tmp_path, capsys):
    bad = poisoned(tiny_folder, tmp_path / "bad", **{Q_PROJ: [NAN]})
    for command in ("chat", "generate", "batch", "bench", "profile", "trace"):
        assert main([command, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "--check-finite refuse weights with NaN" in shown and "s per GB" in shown, command
    assert main(["profile", "-m", str(bad), "--check-finite"]) == 2
    assert "q_proj.weight holds 1 NaN and 0 infinite of 8,192 values" in capsys.readouterr().err


def test_a_hub_model_is_hashed_whole(verify, tiny_folder, tmp_path, monkeypatch):
    """Laid out as the hub's cache does it: the name of a blob is its hash."""
    import hashlib

    snapshot, blobs = (
        tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40),
        tmp_path / "models--org--tiny/blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in tiny_folder.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    code, out, _ = verify(snapshot, "--alone")
    assert (
        code == 0
        and "ok       hashes" in out
        and f"{len(list(tiny_folder.iterdir()))} files, sha256" in out
    )
    weights = (snapshot / "model.safetensors").resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, _, err = verify(snapshot, "--alone")
    assert code == 2 and "model.safetensors: its" in err and "it is removed from the cache" in err
    assert not weights.exists()
