"""Quantized keys of a real model whose key projections have large biases: Qwen2.5-Coder-0.5B-Instruct, Q4_K_M.

No command fetches its 491,400,064 bytes: $NANOKV_QWEN25 is the path of the file. Without it these tests are skipped.
"""

import hashlib
import os
from functools import partial
from pathlib import Path

import pytest
import torch

import nanokv
from nanokv.lab.bench.recall import recalled, talk
from nanokv.lab.study.quality import measure_cache

pytestmark = pytest.mark.slow

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PROSE = Path(__file__).parents[1] / "facts" / "prose.txt"
TOKENS = 160
KEYS = "quantized:bits=4:values=exact:residual=0"


@pytest.fixture(scope="module")
def loaded():
    path = os.environ.get("NANOKV_QWEN25")
    if not path:
        pytest.skip("Qwen2.5-Coder-0.5B-Instruct is not here (set NANOKV_QWEN25 to its GGUF file)")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == SHA256, f"{path} has sha256 {found}, expected {SHA256}"
    return nanokv.load(path, dtype=torch.float32)


def test_its_first_keys_have_a_bias_of_hundreds(loaded):
    """What docs/quantization.md says of it."""
    norms = [layer.self_attn.k_proj.bias.norm().item() for layer in loaded[0].layers]
    assert norms[:3] == pytest.approx([392.7, 228.3, 149.2], abs=1)


def test_a_scale_per_channel_loses_little_and_a_rotation_much(loaded):
    """Mean change of a token's log-likelihood, nats."""
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer.encode(PROSE.read_text("utf-8"))[:TOKENS]])  # (1,T)
    found = {}
    for keys in ("channel", "token", "lloyd:seed=0"):
        cache = nanokv.make_cache(f"{KEYS}:keys={keys}", model.config)
        found[keys] = measure_cache(model, ids, cache).abs().mean().item()
    assert found["channel"] < 0.1
    assert found["token"] > 4 * found["channel"]
    assert found["lloyd:seed=0"] > 8 * found["channel"]


def test_told_facts_are_known_by_an_exact_cache_and_not_by_every_rotation(loaded):
    """Six talks: 2 of 12 answers are right by chance. docs/quantization.md has 24 talks."""
    model, tokenizer = loaded
    talks = [talk(tokenizer, seed) for seed in range(6)]
    found = {}
    for kind in ("dict", f"{KEYS}:keys=channel", f"{KEYS}:keys=lloyd:seed=2"):
        new = partial(nanokv.make_cache, kind, model.config)
        found[kind] = sum(recalled(model, talks, new)[:2])
    exact, channel, lloyd = found.values()
    assert exact >= 11 and channel >= 11
    assert lloyd < exact, found
