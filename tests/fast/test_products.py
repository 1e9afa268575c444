"""Fast products under the blocks of other families. tests/test_matrix.py has their logits over all caches."""

import pytest
import torch

from nanokv.errors import ConfigError
from nanokv.fast import optimize
from nanokv.fast.products import Product, ProductTransformer
from nanokv.fast.weights import Dense, Int8
from nanokv.inference import score
from oracle import HYBRID, LAYERED, gap, pair, random_ids

SHAPES = {name: (LAYERED | HYBRID)[f"{name}-G2"] for name in ("smollm3", "gptoss", "qwen35")}
IDS = random_ids(3, 1, 20)


@pytest.fixture(params=SHAPES)
def plain(request):
    return pair(**SHAPES[request.param])[1]


def test_no_weight_is_stored_twice(plain):
    """The plain model computes the same as before; a change of its weights in place reaches the fast one."""
    before = score(plain, IDS)
    fast = optimize(plain)
    assert isinstance(fast, ProductTransformer) and fast.weights == "fp32"
    assert gap(score(plain, IDS), before) <= 3e-5
    mine = {tensor.data_ptr() for tensor in plain.parameters()}
    assert {tensor.data_ptr() for tensor in fast.parameters()} <= mine
    with torch.no_grad():
        for weight in plain.parameters():
            if weight.dim() > 1:  # biases are copies
                weight *= 0.9
    assert gap(score(fast, IDS), score(plain, IDS)) <= 3e-5 < gap(score(plain, IDS), before)


def test_a_saved_plain_model_has_its_shapes(plain):
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    optimize(plain)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_all_linear_layers_are_products_in_the_format(plain):
    """But those that choose experts or forget a state keep their dtype."""
    fast = optimize(plain, "int8")
    parts = dict(fast.layers.named_modules())
    assert not any(type(part) is torch.nn.Linear for part in parts.values())
    for name, part in parts.items():
        if isinstance(part, Product):
            kept = name.endswith(("router", "in_proj_a", "in_proj_b"))
            assert type(part.matrix) is (Dense if kept else Int8), name
    assert type(fast.lm_head) is Int8


def test_a_prompt_of_many_rows_goes_to_torch(plain):
    ids = random_ids(4, 1, 200)
    assert gap(score(optimize(plain), ids), score(plain, ids)) <= 3e-5


def test_what_a_copy_cannot_keep_is_refused(plain):
    handle = plain.layers[1].register_forward_hook(lambda *given: None)
    with pytest.raises(ConfigError, match=r"layers\.1 is a \w+ with a custom forward or hooks"):
        optimize(plain)
    handle.remove()
    with pytest.raises(ConfigError, match="optimized already"):
        optimize(optimize(plain))
    with pytest.raises(ConfigError, match="one of: fp32, int8, int4"):
        optimize(plain, "bf16")
    with pytest.raises(ConfigError, match="no kernels for a model in float16"):
        optimize(plain.half())
