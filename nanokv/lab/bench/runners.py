"""The runtimes that the bench can measure, all with the same two methods: `start` prefills a
prompt, `step` decodes one more token.

All decode greedily: a step ends with the most likely token, which is the input of the next step.
The runners of other libraries run in a separate process (peer.py), which remote.py controls.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from nanokv import costs
from nanokv.cache import make_cache
from nanokv.cache.options import kind_text
from nanokv.config import Config
from nanokv.errors import NanoKVError
from nanokv.inference import decode, prefill_chunk, prefill_chunks
from nanokv.lab.bench.machine import now
from nanokv.model import MixtureOfExperts, Transformer
from nanokv.support import installing
from weights_loader.names import to_hugging_face


@dataclass
class Runner:
    """A runtime with its weights and its cache. A decode step reads `weight_bytes` once and
    `kv_bytes` per token in the cache."""

    engine: str  # nanokv, transformers, llama.cpp
    weights: str  # plain, bf16, int8, …
    cache: str  # as --cache spells it: quantized:bits=4
    batch: int
    weight_bytes: int
    kv_bytes: int  # bytes per token of one row

    device: str | torch.device = "cpu"
    patience = 0.0  # seconds that a measurement may take; used by runners in another process

    @property
    def label(self) -> str:
        """A name that is unique within a run."""
        rows = f" × {self.batch}" if self.batch > 1 else ""
        return f"{self.engine} {self.weights} {self.cache}{rows}"

    def step_bytes(self, context: int) -> int:
        """Bytes that a decode step must read when every row holds `context` tokens."""
        return self.weight_bytes + self.batch * context * self.kv_bytes

    def measure(self, vocab_size: int, context: int, steps: int, seed: int) -> tuple[float, float]:
        """(seconds to prefill a random prompt, seconds per decode step), by this process's
        clock."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab_size, (self.batch, context), generator=generator).to(self.device)
        began = now(self.device)
        self.start(ids, steps)
        prefilled = now(self.device)
        for _ in range(steps):
            self.step()
        return prefilled - began, (now(self.device) - prefilled) / steps

    def start(self, ids: Tensor, room: int) -> None:
        """Prefill ids (B,T) into a cache with room for `room` more tokens."""
        raise NotImplementedError

    def step(self) -> None:
        """Decode one token per row."""
        raise NotImplementedError


def table_bytes(config: Config, itemsize: int) -> int:
    """Bytes of an untied embedding table, of which a decode step reads one row per token; 0 if it
    is tied, because it is then read in full as the head."""
    if config.tie_word_embeddings:
        return 0
    return config.vocab_size * config.hidden_size * itemsize


def unread_bytes(model: Transformer, batch: int) -> int:
    """Bytes of the experts that a decode step leaves out, if no two rows choose the same."""
    total = 0
    for part in model.modules():
        if not isinstance(part, MixtureOfExperts):
            continue
        tensors = *part.experts.parameters(), *part.experts.buffers()
        E = part.sizes.num_experts
        chosen = min(E, batch * part.sizes.num_experts_per_tok)
        total += sum(tensor.nbytes for tensor in tensors) * (E - chosen) // E
    return total


class Ours(Runner):
    """One of our models over one of our caches."""

    def __init__(
        self,
        model: Transformer,
        weights: str,
        cache: str,
        options: dict,
        batch: int,
        dtype: torch.dtype,
    ) -> None:
        tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
        read = sum(tensor.nbytes for tensor in tensors.values())
        # A step reads one row of the embedding table; a table that is the head is read in full.
        table = model.embed_tokens.weight
        if model.lm_head.weight.data_ptr() != table.data_ptr():
            read -= table.nbytes
        read -= unread_bytes(model, batch)
        kv = costs.kv_bytes_per_token(model.config, dtype.itemsize)
        super().__init__("nanokv", weights, kind_text(cache, options), batch, read, kv)
        self.model = model
        self.kind = cache
        self.options = options
        self.device = table.device

    def start(self, ids: Tensor, room: int) -> None:
        self.store = make_cache(
            self.kind,
            self.model.config,
            batch_size=self.batch,
            capacity=ids.shape[1] + room,
            **self.options,
        )
        # in chunks, as every command prefills
        chunk = prefill_chunk(self.model, self.batch)
        logits = prefill_chunks(self.model, ids, self.store, chunk=chunk)
        self.token = logits.argmax(-1, keepdim=True)  # (B,1)

    def step(self) -> None:
        logits = decode(self.model, self.token, self.store, self.store.length)
        self.token = logits.argmax(-1, keepdim=True)  # (B,1)


class Uncached(Ours):
    """The same model without a cache: every step computes every token again."""

    def __init__(self, model: Transformer, weights: str, batch: int, dtype: torch.dtype) -> None:
        super().__init__(model, weights, "dict", {}, batch, dtype)
        self.cache = "none"
        self.kv_bytes = 0

    def start(self, ids: Tensor, room: int) -> None:
        self.ids = ids
        self.step()

    def step(self) -> None:
        # A new cache that is dropped after the step, as if there were none.
        cache = make_cache("dict", self.model.config)
        logits = prefill_chunks(self.model, self.ids, cache, chunk=self.ids.shape[1])
        token = logits.argmax(-1, keepdim=True)  # (B,1)
        self.ids = torch.cat((self.ids, token), 1)


class Transformers(Runner):
    """transformers' model of the same shapes and weights, with its dynamic or static cache."""

    def __init__(self, model: Transformer, cache: str, batch: int) -> None:
        try:
            import transformers
        except ImportError:
            raise NanoKVError(
                "transformers is not installed", installing.hint(["transformers"])
            ) from None
        family = model.config.family
        if family.experts:  # transformers stores a layer's experts in one tensor
            raise NanoKVError(
                f"transformers is compared on dense models only, this one is a {family.title}",
                "leave out --against",
            )
        fields = {**model.config.to_dict(), "dtype": None}
        config = transformers.AutoConfig.for_model(**fields)
        own = model.embed_tokens.weight
        with torch.device("meta"):
            self.model = transformers.AutoModelForCausalLM.from_config(config)
        names = {name: p for name, p in model.state_dict().items() if name != "lm_head.weight"}
        kind = model.config.model_type
        state = {to_hugging_face(name, kind): tensor for name, tensor in names.items()}
        self.model.load_state_dict(state | {"lm_head.weight": model.lm_head.weight}, assign=True)
        self.device = own.device
        rotary = type(self.model.model.rotary_emb)
        # The buffers of the first one are on the meta device, and no checkpoint has them.
        self.model.model.rotary_emb = rotary(config).to(own.device)
        self.model.requires_grad_(False).eval()
        held = costs.weight_bytes(model.config, own.itemsize)
        read = held - table_bytes(model.config, own.itemsize)
        kv = costs.kv_bytes_per_token(model.config, own.itemsize)
        weights = str(own.dtype).removeprefix("torch.")
        super().__init__("transformers", weights, cache, batch, read, kv)

    @torch.inference_mode()
    def start(self, ids: Tensor, room: int) -> None:
        import transformers

        if self.cache == "dynamic":
            self.store: transformers.Cache = transformers.DynamicCache(config=self.model.config)
        else:
            length = ids.shape[1] + room
            self.store = transformers.StaticCache(self.model.config, max_cache_len=length)
        self.forward(ids)

    @torch.inference_mode()
    def step(self) -> None:
        self.forward(self.token)

    def forward(self, ids: Tensor) -> None:
        logits = self.model(
            ids, past_key_values=self.store, use_cache=True, logits_to_keep=1
        ).logits  # (B,1,V)
        self.token = logits[:, -1].argmax(-1, keepdim=True)


class LlamaCpp(Runner):
    """llama.cpp over a GGUF file of the same weights, through llama-cpp-python."""

    def __init__(
        self, config: Config, path: Path, weights: str, context: int, threads: int
    ) -> None:
        from llama_cpp import Llama  # type: ignore[import-not-found]  # optional

        self.llama = Llama(
            str(path),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=512,
            verbose=False,
        )
        self.vocab_size = config.vocab_size
        kv = costs.kv_bytes_per_token(config, 2)  # fp16
        super().__init__("llama.cpp", weights, "fp16", 1, path.stat().st_size, kv)

    def start(self, ids: Tensor, room: int) -> None:
        self.llama.reset()
        self.feed(ids[0].tolist())

    def step(self) -> None:
        self.feed([self.token])

    def feed(self, ids: list[int]) -> None:
        """Evaluate ids and keep the most likely next token."""
        self.llama.eval(ids)
        # a view of llama.cpp's buffer, no copy
        self.logits = numpy.ctypeslib.as_array(self.llama._ctx.get_logits(), (self.vocab_size,))
        self.token = int(self.logits.argmax())
