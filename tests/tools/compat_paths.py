"""The public paths, once each, with the torch of the environment that runs this: `make compat` starts it in several.

    python tests/tools/compat_paths.py        needs nanokv and its dependencies, and tests/support/hub_server.py

Prints a line for every path. Leaves with 1 if one of them failed or answered something else.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

# Triton's kernels run on a CPU; read when it is imported, and a torch with CUDA imports it.
os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch

import nanokv
from nanokv.errors import UnsupportedError
from nanokv.fast import native
from weights_loader import BUNDLED

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from hub_server import HubServer

QUESTION = "What is a KV cache?"
TURNS = ("My name is Zorbla.", "What is my name?")


class Paths:
    """One model for all of them; each method that begins with `try_` is a path."""

    def __init__(self) -> None:
        self.model, self.tokenizer = nanokv.load("tiny", dtype=torch.float32, device="cpu")
        prompt = self.tokenizer.render([{"role": "user", "content": QUESTION}])
        self.ids = self.tokenizer.encode(prompt)
        self.answer = self.generate(self.model, nanokv.make_cache("dict", self.model.config))

    def generate(self, model, cache) -> list[int]:
        return list(nanokv.generate(model, self.ids, cache, max_new_tokens=24))

    def try_answer(self) -> None:
        assert "key" in self.tokenizer.text_of(self.answer), self.tokenizer.text_of(self.answer)

    def try_logits(self) -> None:
        """Cached equals uncached."""
        ids = torch.tensor([self.ids])
        whole = nanokv.score(self.model, ids)[:, -1]
        cache = nanokv.make_cache("dict", self.model.config)
        parts = nanokv.prefill(self.model, ids[:, :-1], cache)
        parts = nanokv.decode(self.model, ids[:, -1:], cache, start_pos=cache.length)
        assert (whole - parts).abs().max() <= 1e-5 * whole.abs().max()

    def try_gpu(self) -> None:
        """The kernels of a GPU, in Triton's interpreter: prefill and two steps over pages."""
        if importlib.util.find_spec("triton") is None:
            raise UnsupportedError("there is no Triton")
        from nanokv.fast.gpu import model, products

        take_arrays_of_one()
        products.PROGRAMS, model.PROCESSORS = 8, 4  # each takes a millisecond
        plain, _ = nanokv.load("tiny", dtype=torch.float32, device="cpu")
        caches = [nanokv.make_cache("paged", plain.config) for _ in "ab"]
        models = self.model, model.recorded(plain)
        for ids in (self.ids[:5], self.ids[5:6], self.ids[6:7]):
            run = nanokv.prefill if len(ids) > 1 else nanokv.decode
            right, found = (
                run(one, torch.tensor([ids]), cache, start_pos=cache.length)
                for one, cache in zip(models, caches, strict=True)
            )
            assert (right - found).abs().max() <= 1e-5 * right.abs().max()
        assert set(models[1].steps.recorded) == {1}

    def try_caches(self) -> None:
        for name in nanokv.CACHES:
            assert (
                self.generate(self.model, nanokv.make_cache(name, self.model.config)) == self.answer
            ), name

    def try_saved_cache(self) -> None:
        cache = nanokv.make_cache("dict", self.model.config)
        nanokv.prefill(self.model, [self.ids], cache)
        with tempfile.TemporaryDirectory() as folder:
            cache.save(Path(folder) / "cache")
            again = nanokv.KVCache.load(Path(folder) / "cache", self.model.config)
        assert again.length == cache.length and torch.equal(again[0]["key"], cache[0]["key"])

    def try_bfloat16(self) -> None:
        model, _ = nanokv.load("tiny", dtype=torch.bfloat16)
        assert "key" in self.tokenizer.text_of(
            self.generate(model, nanokv.make_cache("dict", model.config))
        )

    def try_kernels(self) -> None:
        fast = nanokv.optimize(nanokv.load("tiny", dtype=torch.float32)[0])
        if native.kernels() is None:
            raise UnsupportedError("no compiler here: torch's operators ran")
        assert self.generate(fast, nanokv.make_cache("growing", fast.config)) == self.answer

    def try_int8(self) -> None:
        fast = nanokv.optimize(nanokv.load("tiny", dtype=torch.float32)[0], weights="int8")
        assert "key" in self.tokenizer.text_of(
            self.generate(fast, nanokv.make_cache("growing", fast.config))
        )

    def try_compile(self) -> None:
        """The graph alone, run by Python: a compiler for the CPU is another question."""
        from nanokv.fast.compiled import Compiled

        model = Compiled(self.model, 256, backend="eager")
        assert self.generate(model, model.make_cache()) == self.answer and model.compiles

    def try_session(self) -> None:
        session = nanokv.Session(self.model, self.tokenizer)
        said = [session.ask(text) for text in TURNS]
        assert "Zorbla" in said[1] and session.last and session.last.reused > 0, said

    def try_engine(self) -> None:
        engine = nanokv.Engine(self.model, pages=64)
        requests = [engine.submit(self.ids, max_new_tokens=24) for _ in range(2)]
        engine.run()
        assert all(request.tokens == self.answer for request in requests)

    def try_beams(self) -> None:
        assert (
            nanokv.beam_search(self.model, self.ids, beams=1, max_new_tokens=24)[0].ids
            == self.answer
        )

    def try_speculation(self) -> None:
        draft = nanokv.speculative.PromptLookup()
        assert list(nanokv.speculate(self.model, self.ids, draft, max_new_tokens=24)) == self.answer

    def try_sampling(self) -> None:
        drawn = [
            list(nanokv.generate(self.model, self.ids, temperature=1, top_k=20, top_p=0.9, seed=1))
            for _ in "12"
        ]
        assert drawn[0] == drawn[1]

    def try_save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.model.save(Path(folder) / "copy", self.tokenizer)
            again, _ = nanokv.load(Path(folder) / "copy", dtype=torch.float32)
            assert torch.equal(
                nanokv.score(again, [self.ids]), nanokv.score(self.model, [self.ids])
            )

    def try_gguf(self) -> None:
        """SmolLM2, where its package is installed."""
        from weights_loader import installed

        if installed.location("smollm2") is None:
            raise UnsupportedError(f"{installed.PACKAGES['smollm2'].distribution} is not installed")
        session = nanokv.Session.from_pretrained("smollm2", params={"max_new_tokens": 12})
        assert "Paris" in session.ask("What is the capital of France?")

    def try_download(self) -> None:
        """By the hub's client of this environment, from a server on this machine; some optional files are not there."""
        with tempfile.TemporaryDirectory() as folder, HubServer(folder) as hub:
            shutil.copytree(BUNDLED["tiny"], Path(folder) / "org" / "tiny")
            variables = {
                "HF_HOME": str(Path(folder) / "home"),
                "HF_ENDPOINT": hub.url,
                "NO_PROXY": "*",
            }
            for name, offline, code, word in (
                ("org/tiny", "0", 0, "key"),
                ("org/tiny", "1", 0, "key"),
                ("org/none", "0", 2, "no model"),
                ("org/none", "1", 2, "offline"),
            ):
                argv = [sys.executable, "-m", "nanokv", "generate", QUESTION, "-m", name]
                environment = os.environ | variables | {"HF_HUB_OFFLINE": offline}
                done = subprocess.run(argv, env=environment, text=True, capture_output=True)
                assert done.returncode == code and word in done.stdout + done.stderr, (
                    argv,
                    done.stdout,
                    done.stderr,
                )
            assert hub.gets("model.safetensors")

    def try_commands(self) -> None:
        for argv in (
            ["generate", QUESTION, "-q"],
            ["chat", "-q"],
            ["memory", "tiny"],
            ["models"],
            ["env"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "nanokv", *argv],
                input="hi\n",
                text=True,
                capture_output=True,
            )
            assert done.returncode == 0 and done.stdout, (argv, done.stderr)


class Whole(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class Int(metaclass=Whole):
    """int, which takes an array of one number too, as NumPy allowed before 2.4."""

    def __new__(cls, value: object = 0) -> int:
        return int(value.item() if isinstance(value, numpy.ndarray) else value)


def take_arrays_of_one() -> None:
    """Triton's interpreter up to 3.6 makes int of such arrays."""
    from triton.runtime import interpreter

    interpreter.int = Int


def outcome(path: Callable[[], None]) -> str:
    """ok, not here (why), or what failed."""
    try:
        path()
    except UnsupportedError as error:
        return f"not here: {error}"
    except Exception:
        return f"FAILED\n{traceback.format_exc()}"
    return "ok"


def main() -> int:
    """Every path in turn."""
    print(
        f"python {sys.version.split()[0]} · torch {torch.__version__} · numpy {numpy.__version__}"
    )
    paths = Paths()
    found = {
        name[4:]: outcome(getattr(paths, name)) for name in dir(paths) if name.startswith("try_")
    }
    print("".join(f"{name:<12} {what}\n" for name, what in found.items()), end="")
    return int(any(what.startswith("FAILED") for what in found.values()))


if __name__ == "__main__":
    sys.exit(main())
