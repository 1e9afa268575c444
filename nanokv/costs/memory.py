"""How much memory a model and its cache take, and how many tokens or sequences fit.

Arithmetic over a Config with the counts of formulas.py; no torch, no weights, no network. `nanokv
memory` prints it; with --check it allocates every cache and compares. Activations (a chunk of a
prefill) and the program itself are not counted.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nanokv.config import Config, Experts
from nanokv.costs import formulas as costs
from nanokv.errors import NanoKVError

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
UNITS = (
    {"B": 1}
    | {f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}
    | {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
)
LARGEST = 1e24  # bytes: a yottabyte is certainly a typing error
MOST_TOKENS = 1 << 40  # the upper end of the search for how many tokens fit


def _qwen3(C: int, width: int, L: int, H: int, tied: bool) -> Config:
    """A dense Qwen3 model: V 151,936, 8 KV heads of 128, 40,960 positions, bf16."""
    return Config(
        vocab_size=151_936,
        hidden_size=C,
        intermediate_size=width,
        num_hidden_layers=L,
        num_attention_heads=H,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        torch_dtype="bfloat16",
    )


FAMILY = {  # from the published config.json files
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25_600, 64, 64, False),
}
MIXTURES = {  # 30 B weights, 3 B of them active per token
    "Qwen/Qwen3-30B-A3B": replace(
        _qwen3(2048, 6144, 48, 32, False),
        num_key_value_heads=4,
        model_type="qwen3_moe",
        experts=Experts(128, 8, 768, norm_topk_prob=True),
    ),
}


@dataclass(frozen=True)
class Estimate:
    """One model, dtype, cache, context and batch; its properties are the numbers of the report."""

    name: str
    config: Config
    dtype: str  # a key of SHORT
    context: int
    batch: int = 1
    cache: str = "dict"
    options: dict[str, Any] = field(default_factory=dict)
    stored: int | None = None  # bytes of a GGUF file's weights, if kernels read them as stored

    @property
    def itemsize(self) -> int:
        return costs.ITEMSIZE[self.dtype]

    @property
    def weights(self) -> int:
        """Bytes of the weights as plain numbers."""
        return costs.weight_bytes(self.config, self.itemsize)

    @property
    def held(self) -> int:
        """Bytes of the weights in memory: as stored if kernels read them so."""
        if self.stored is None:
            return self.weights
        return self.stored

    @property
    def per_token(self) -> int:
        """Bytes per token of one sequence in an exact cache, once every window is full."""
        return costs.kv_bytes_per_token(self.config, self.itemsize)

    def cached(self, tokens: int, batch: int) -> int:
        """Bytes of this kind of cache, whose capacity is `tokens`."""
        return costs.cache_bytes(
            self.cache, self.config, tokens, batch, self.itemsize, capacity=tokens, **self.options
        )

    @property
    def exact(self) -> int:
        """Bytes of an exact cache without spare slots: "KV total" in the report."""
        return costs.kv_bytes(self.config, self.context, self.batch, self.itemsize)

    @property
    def total(self) -> int:
        """Bytes of the weights and this cache at full context."""
        return self.held + self.cached(self.context, self.batch)

    @property
    def crossover(self) -> int | None:
        """The most tokens in total whose cache is no larger than the weights; None: no limit."""
        return most_tokens(lambda tokens: self.cached(tokens, 1) <= self.held)

    @property
    def sent(self) -> int:
        """Bytes to send one full sequence: no empty slots, and quantized tokens stay packed."""
        whole = costs.kv_bytes(self.config, self.context, 1, self.itemsize)
        return min(self.cached(self.context, 1), whole)

    @property
    def prefill(self) -> int:
        """FLOPs to prefill one full sequence."""
        return costs.prefill_flops(self.config, self.context)

    def break_even(self, link: float) -> float:
        """FLOP/s at which a prefill takes as long as the transfer at `link` bytes per second."""
        return costs.break_even_flops(self.config, self.context, self.sent, link)

    def max_batch(self, memory: int) -> int:
        """How many full sequences of this context fit beside the weights."""
        each = max(1, self.cached(self.context, 1))  # a window of one token keeps nothing
        return max(0, memory - self.held) // each

    def max_context(self, memory: int) -> int | None:
        """Tokens per sequence that fit beside the weights with this batch; None: no limit.

        The model's context may be shorter.
        """
        room = memory - self.held
        return most_tokens(lambda tokens: self.cached(tokens, self.batch) <= room)

    def rows(self) -> list[tuple[str, str, int]]:
        """(name, formula with numbers, bytes) of each row of the report."""
        c = self.config
        size = self.itemsize
        fixed = costs.fixed_bytes(c, self.context, size)
        total = f"{self.per_token:,} × {self.context:,}"
        if fixed:
            total = f"({total} + {fixed:,})"
        heads = f"{c.num_key_value_heads} KV heads × {c.head_dim} × {size} B"
        rows = [
            ("weights", f"{costs.parameters(c):,} × {size} B ({SHORT[self.dtype]})", self.weights),
            ("KV / token", f"2 × {costs.full_layers(c)} layers × {heads}", self.per_token),
            ("KV total", f"{total} × {self.batch:,}", self.exact),
        ]
        windows = costs.window_bytes(c, self.context, size)
        if windows:
            count = c.layer_types.count("sliding_attention")
            held = windows // costs.position_bytes(c, size) // count
            rows.insert(2, ("windows", f"2 × {count} layers × {held:,} tokens × {heads}", windows))
        if c.states:
            states = costs.state_bytes(c, size)
            back = costs.rollback_bytes(c, self.context, size)
            alike = f"= KV of {states // self.per_token:,} tokens" if self.per_token else ""
            rows[2:2] = [
                ("states", f"{c.states} layers × {states // c.states:,} B", states),
                ("going back", "to each of the last 64 tokens", back),
                ("a snapshot", f"the states once more {alike}", states),
            ]
        if self.cache != "dict":
            rows.append((self.cache, self.formula(), self.cached(self.context, self.batch)))
        return rows

    def formula(self) -> str:
        """The formula, with numbers, for the bytes of this cache."""
        name = self.cache
        options = dict(self.options)
        if name == "batch":
            name = options.pop("of", "dict")
        L, Hk = self.config.num_kv_layers, self.config.num_key_value_heads
        if name == "evicting":
            entries, each, bounds = costs.evicting_parts(
                self.config, self.context, self.itemsize, self.context, **options
            )
            return f"{L} × {Hk} × {self.batch:,} × ({entries:,} × {each:,} B + {bounds:,} bounds)"
        if name == "quantized":
            keys, values, exact = costs.quantized_parts(
                self.config, self.context, self.itemsize, **options
            )
            L = costs.full_layers(self.config)
            return f"{L} × {Hk} × {self.batch:,} × ({keys:,} K + {values:,} V + {exact:,} exact)"
        slots = costs.cache_slots(name, self.config, self.context, self.context, **options)
        if name in costs.EVERY_POSITION:
            each = (L - self.config.states) * costs.position_bytes(self.config, self.itemsize)
            if self.config.states:
                states = costs.held_states(self.config, self.context, self.itemsize)
                return f"({each:,} × {slots:,} slots + {states:,}) × {self.batch:,}"
            return f"{each:,} × {slots:,} slots × {self.batch:,}"
        fixed = costs.fixed_bytes(self.config, self.context, self.itemsize)
        if fixed:
            row = f"{self.per_token:,} × {slots:,} slots + {fixed:,}"
            return f"({row}) × {self.batch:,}"
        return f"{self.per_token:,} × {slots:,} slots × {self.batch:,}"


def most_tokens(fits: Callable[[int], bool]) -> int | None:
    """The largest number of tokens for which `fits` holds; 0 if none does, None if all do."""
    if fits(MOST_TOKENS):
        return None
    low = 0
    high = MOST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def parse_size(text: str) -> int:
    """24GiB, 24 GB, 512MiB → bytes. A bare G is refused: 24 G is 24.0 or 25.8 billion bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    size = 0.0
    if found and found[2].lower() in units:
        size = float(found[1]) * units[found[2].lower()]
    if not 1 <= size < LARGEST:
        raise NanoKVError(f"{text!r} is not an amount of memory", "24GiB (1024³) or 24GB (1000³)")
    return int(size)


def parse_rate(text: str) -> float:
    """10Gb/s, 10Gbit/s, 1.25 GB/s → bytes per second; b is a bit, B a byte, a bare G an error."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(b|bit|B)(?:/s|ps)\s*", text)
    rate = 0.0
    if found:
        number, prefix, unit = found.groups()
        rate = float(number) * 1000.0 ** ("", "k", "M", "G", "T").index(prefix)
        if unit != "B":  # bits
            rate /= 8
    if not 1 <= rate < LARGEST:
        raise NanoKVError(
            f"{text!r} is not the speed of a link", "10Gb/s (bits) or 1.25GB/s (bytes)"
        )
    return rate


def flop_text(count: float) -> str:
    """880.8 MFLOP, 28.86 TFLOP; the caller may add "/s"."""
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    return _scaled(int(count), 1000, units)


def decimal(count: int) -> str:
    """114,688 B below a MB, then four digits: 1.192 GB, 15.03 GB."""
    if count < 10**6:
        return f"{count:,} B"
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def binary(count: int) -> str:
    """112 KiB, 1.110 GiB, 14.00 GiB."""
    if count and count < 2**20 and count % 1024 == 0:
        return f"{count // 1024} KiB"
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(count: int, base: int, units: tuple[str, ...]) -> str:
    """Four digits and the largest unit that fits."""
    if count < base:
        return f"{count} B"
    power = 0
    value = float(count)
    while value >= base * 0.99995 and power < len(units) - 1:
        value /= base
        power += 1
    digits = max(0, 4 - len(str(int(value + 0.5))))
    return f"{value:.{digits}f} {units[power]}"
