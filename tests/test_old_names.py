"""Names of version 0.1.0: modules that have moved are found under their old names, and are the same modules."""

import importlib
import subprocess
import sys
import warnings

import pytest

import nanokv

IMPORTS = """
from nanokv import costs, course, debug, equality, faults
from nanokv.attention import causal_attention, causal_mask, decode_attention, prefill_attention
from nanokv.cache import NoCache
from nanokv.cache.dict_cache import DictCache
from nanokv.cache.padded import PaddedCache
from nanokv.generation import Generation, SamplingParams
from nanokv.inference import verify
from nanokv.kinds import KINDS, check_options
from nanokv.latent import LatentCache, deepseek_v2_savings, with_kv_heads
from nanokv.memory import FAMILY, Estimate, binary, decimal, parse_size
from nanokv.prefix import common_prefix
from nanokv.quality import Scheme, log_likelihood, measure, measure_cache
from nanokv.sample import probabilities
from nanokv.skeleton import skeleton
from nanokv.speculative import EarlyExit, PromptLookup
from nanokv.tokenizer import StreamDecoder
"""  # what its notebooks and readers import


def python(code: str, *flags: str):
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("old", sorted(nanokv._MOVED))
def test_an_old_name_is_another_name_of_the_module(old):
    new = importlib.import_module(nanokv._MOVED[old])
    sys.modules.pop(f"nanokv.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"nanokv.{old} is now {new.__name__}"):
        assert importlib.import_module(f"nanokv.{old}") is new
    assert new.__spec__.name == new.__name__ == nanokv._MOVED[old]


def test_the_imports_of_the_first_release_work():
    done = python(IMPORTS)
    assert done.returncode == 0, done.stderr


def test_public_names_warn_of_nothing():
    """`nanokv.tokenizer.Tokenizer` is public: no warning, and no import of what is not asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in dir(nanokv):
            assert getattr(nanokv, name) is not None
    assert nanokv.tokenizer.Tokenizer is nanokv.Tokenizer
    done = python("import sys, nanokv; print([m for m in sys.modules if m.startswith(('torch', 'nanokv.'))])")
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_options_of_caches_and_costs_need_no_torch():
    code = "import sys, nanokv.cache.options, nanokv.costs, nanokv.costs.memory; print('torch' in sys.modules)"
    done = python(code)
    assert done.stdout == "False\n", done.stdout + done.stderr


def test_what_has_no_old_name_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nanokv.kind")
