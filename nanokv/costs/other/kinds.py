"""What one layer keeps of the tokens it has seen, and its bytes.

A layer keeps parts: keys and values, a latent vector, indexer keys, the state of a recurrence or of
a convolution. A part is a number of values per row; `rows` says how many rows there are after a
number of tokens. `architectures.py` derives the layers of a model from its config.json.
"""

from dataclasses import dataclass

FP32 = 4  # bytes per value of a state that is kept in fp32, whatever the model's dtype


@dataclass(frozen=True)
class EveryToken:
    """One row per token: attention over all positions."""

    per_token = 1.0  # rows that a further token adds in the long run
    most = 0  # rows of a part that stops growing

    def __call__(self, tokens: int) -> int:
        return tokens


@dataclass(frozen=True)
class Last:
    """One row for each of the last `most` tokens: a window."""

    most: int
    per_token = 0.0

    def __call__(self, tokens: int) -> int:
        return min(tokens, self.most)


@dataclass(frozen=True)
class State:
    """One row after any number of tokens: a recurrence, a convolution."""

    per_token = 0.0
    most = 1

    def __call__(self, tokens: int) -> int:
        return 1


@dataclass(frozen=True)
class Compressed:
    """One row per `rate` tokens."""

    rate: int
    most = 0

    @property
    def per_token(self) -> float:
        return 1 / self.rate

    def __call__(self, tokens: int) -> int:
        return tokens // self.rate


@dataclass(frozen=True)
class Waiting:
    """One row for each token that a compressor has not used yet."""

    rate: int
    per_token = 0.0

    @property
    def most(self) -> int:
        return self.rate - 1

    def __call__(self, tokens: int) -> int:
        return tokens % self.rate


@dataclass(frozen=True)
class LastGroup:
    """The rows of the last complete group of `rate` tokens, none before it."""

    rate: int
    per_token = 0.0

    @property
    def most(self) -> int:
        return self.rate

    def __call__(self, tokens: int) -> int:
        return self.rate if tokens >= self.rate else 0


Rows = EveryToken | Last | State | Compressed | Waiting | LastGroup


@dataclass(frozen=True)
class Part:
    """One kind of tensor that a layer keeps: `values` numbers in each row."""

    name: str
    values: int
    rows: Rows = EveryToken()
    itemsize: int | None = None  # bytes per value; None: those of the model's dtype

    def size(self, itemsize: int) -> int:
        """Bytes of one row."""
        return self.values * (self.itemsize or itemsize)

    def bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of one sequence of `tokens` tokens."""
        return self.size(itemsize) * self.rows(tokens)


@dataclass(frozen=True)
class Otherwise:
    """The parts that another runtime keeps for the same layer, and why."""

    reason: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Layer:
    """What one layer keeps in transformers' cache, and what it would keep elsewhere."""

    kind: str
    parts: tuple[Part, ...] = ()
    otherwise: Otherwise | None = None

    def bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of one sequence of `tokens` tokens."""
        return sum(part.bytes(tokens, itemsize) for part in self.parts)

    def bytes_if(self, reason: str, tokens: int, itemsize: int) -> int:
        """The same in a runtime that does what `otherwise` says, if this is its reason."""
        if self.otherwise is None or self.otherwise.reason != reason:
            return self.bytes(tokens, itemsize)
        return sum(part.bytes(tokens, itemsize) for part in self.otherwise.parts)

    def per_token(self, itemsize: int) -> float:
        """Bytes that a further token adds in the long run."""
        return sum(part.size(itemsize) * part.rows.per_token for part in self.parts)

    def most(self, itemsize: int) -> int:
        """Bytes of the parts that stop growing, at their most: windows and states."""
        return sum(part.size(itemsize) * part.rows.most for part in self.parts)

    def state(self, itemsize: int) -> int:
        """Bytes that do not depend on the number of tokens."""
        return sum(part.size(itemsize) for part in self.parts if part.rows == State())


NOTHING = Layer("no cache")
SHARED = Layer("keys and values of an earlier layer")


def attention(heads: int, key: int, value: int) -> Layer:
    """Keys and values of every token: `heads` KV heads of `key` and `value` numbers."""
    return Layer("full attention", (Part("keys and values", heads * (key + value)),))


def window(heads: int, key: int, value: int, size: int, kind: str) -> Layer:
    """Keys and values of the last `size` - 1 tokens: the next token is the last of the window."""
    part = Part("keys and values", heads * (key + value), Last(size - 1))
    return Layer(f"{kind} of {size:,}", (part,))


def latent(rank: int, rope: int, expanded: int) -> Layer:
    """Multi-head latent attention (DeepSeek-V2): one latent vector and one rotated key per token.

    `expanded`: the numbers per token after the latent is expanded to all heads.
    """
    return Layer(
        "latent attention",
        (Part("latent", rank), Part("rotated key", rope)),
        Otherwise("keys and values expanded to every head", (Part("expanded", expanded),)),
    )


def convolution(channels: int, kernel: int, itemsize: int | None = None) -> tuple[Part, Part]:
    """The last inputs of a short convolution: (what transformers keeps, what the next token needs).

    transformers keeps `kernel` columns. The next token brings one of them.
    """
    return (
        Part("convolution", channels * kernel, State(), itemsize),
        Part("convolution", channels * (kernel - 1), State(), itemsize),
    )


def recurrent(kind: str, channels: int, kernel: int, state: int) -> Layer:
    """A linear attention or state space layer: its recurrent state in fp32 and a convolution."""
    kept, needed = convolution(channels, kernel)
    memory = Part("recurrent state", state, State(), FP32)
    return Layer(kind, (kept, memory), Otherwise(COLUMNS, (needed, memory)))


COLUMNS = "convolutions without the column that the next token replaces"


def both(first: Layer, second: Layer) -> Layer:
    """A layer with two mixers side by side or in turn (Falcon-H1, Zamba)."""
    other = None
    found = first.otherwise or second.otherwise
    if found:
        parts = [
            layer.otherwise.parts if layer.otherwise else layer.parts for layer in (first, second)
        ]
        other = Otherwise(found.reason, parts[0] + parts[1])
    return Layer(f"{first.kind} + {second.kind}", first.parts + second.parts, other)
