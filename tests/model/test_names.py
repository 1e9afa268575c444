"""The public names of nanokv: `nanokv.NAME`, `import nanokv.NAME` and what is below it are the module itself."""

import importlib
import importlib.util
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
from nanokv.costs.memory import FAMILY, Estimate, binary, decimal, parse_size
from nanokv.course import check
from nanokv.course.checks.nb07 import SUSPECTS
from nanokv.debug import first_divergence
from nanokv.faults import FAULTS, inject
from nanokv.faults.diagnosis import random_prompts
from nanokv.generation import Generation, SamplingParams
from nanokv.sample import probabilities
from nanokv.speculative import EarlyExit, PromptLookup
from nanokv.study.quality import Scheme, log_likelihood, measure, measure_cache
from nanokv.tokenizer import StreamDecoder
import nanokv.faults.catalogue as catalogue
assert catalogue.__name__ == "nanokv.lab.faults.catalogue", catalogue
"""  # what notebooks, docs and readers import


def python(code: str, *flags: str):
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", sorted(nanokv._ENTRANCES))
def test_an_entrance_is_the_module_itself(name):
    home = importlib.import_module(nanokv._ENTRANCES[name])
    sys.modules.pop(f"nanokv.{name}", None)
    assert importlib.import_module(f"nanokv.{name}") is home is getattr(nanokv, name)
    assert home.__spec__.name == home.__name__ == nanokv._ENTRANCES[name]


def test_the_imports_that_readers_have_work():
    done = python(IMPORTS)
    assert done.returncode == 0, done.stderr


def test_public_names_warn_of_nothing():
    """`nanokv.tokenizer.Tokenizer` is public: no warning, and no import of what is not asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in dir(nanokv):
            assert getattr(nanokv, name) is not None
    assert nanokv.tokenizer.Tokenizer is nanokv.Tokenizer
    done = python(
        "import sys, nanokv; print([m for m in sys.modules if m.startswith(('torch', 'nanokv.'))])"
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_options_of_caches_and_costs_need_no_torch():
    code = "import sys, nanokv.cache.options, nanokv.costs, nanokv.costs.memory; print('torch' in sys.modules)"
    done = python(code)
    assert done.stdout == "False\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["nanokv.kind", "nanokv.faults.fault", "nanokv.course.checks.nb99"]
)
def test_what_there_is_not_is_not_found(name):
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)
    assert importlib.util.find_spec(name) is None


def test_an_entrance_is_found_by_tools_that_look_at_files():
    """pydoc, runpy and inspect ask the spec and its loader, not the module."""
    spec = importlib.util.find_spec("nanokv.course.checks.nb07")
    assert spec.origin.endswith("school/course/checks/nb07.py")
    assert "CHECKS" in spec.loader.get_source(spec.name)
    done = subprocess.run(
        [sys.executable, "-m", "pydoc", "nanokv.faults.inject"], capture_output=True, text=True
    )
    assert "nanokv.faults.inject = inject(name" in done.stdout, done.stdout + done.stderr
