"""Messages between the event loop and the engine's thread; all are values.

    to the engine       Submit, Embed, Cancel, Snapshot, Count, Arrived, End
    to the event loop   Pieces, Ended, Failed, Taken, Stopped

`ticket` is the number of an answer's place (ticket.py), `question` that of a Snapshot or a Count.
"""

from dataclasses import dataclass

from torch import Tensor

from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.embeddings import Embedding
from nanokv.apps.serve.api.prompts import Job
from nanokv.errors import ParallelError

# --- to the engine --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """Start an answer. From now on the engine's thread owns the contents of `job`."""

    ticket: int
    job: Job
    param: str  # the request field to name if the engine refuses the job
    tab: str  # of the web page that sent the request, or ""
    opened: float  # perf_counter when the request arrived

    @property
    def client(self) -> str:
        """Who asks."""
        return str(self.job.settings["client"])


@dataclass(frozen=True)
class Embed:
    """Compute embeddings. From now on the engine's thread owns `embedding`, until the Ended."""

    ticket: int
    embedding: Embedding
    client: str
    opened: float


@dataclass(frozen=True)
class Cancel:
    """Drop an answer, whether it waits, is prefilled or runs."""

    ticket: int


@dataclass(frozen=True)
class Snapshot:
    """Ask for requests and pages (snapshot.py)."""

    question: int


@dataclass(frozen=True)
class Count:
    """Ask for the counts of the engine and of the prefill process for /metrics."""

    question: int


@dataclass(frozen=True)
class Arrived:
    """The prefill process has sent `size` bytes, which took `seconds` to arrive."""

    meta: dict
    tensors: dict[str, Tensor]
    size: int
    seconds: float


@dataclass(frozen=True)
class End:
    """The last message: the thread must end."""


# --- to the event loop ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Tokens so far: of the prompt, those of it found in the cache, of the answer, and of thoughts.

    The answer's tokens include its thoughts.
    """

    prompt: int = 0
    reused: int = 0
    new: int = 0
    thought: int = 0


@dataclass(frozen=True)
class Pieces:
    """What a step added to an answer; `pieces` may be empty."""

    ticket: int
    pieces: tuple[Piece, ...]
    usage: Usage


@dataclass(frozen=True)
class Ended:
    """An answer is complete. All of its pieces have been sent."""

    ticket: int
    reason: str  # finish_reason of the engine's request
    stop: str | int | None  # the stop string or token id of the request that ended it
    calls: int  # of tools
    metrics: dict  # Request.metrics()


@dataclass(frozen=True)
class Failed:
    """An answer has ended with an error for its client."""

    ticket: int
    error: Exception
    reason: str = "cancelled"  # the label in /metrics


@dataclass(frozen=True)
class Taken:
    """The reply to a question, or the error that prevented it."""

    question: int
    found: dict | Exception


@dataclass(frozen=True)
class Stopped:
    """The last message: the thread has ended, because of `lost` if a rank no longer answers."""

    lost: ParallelError | None


ToEngine = Submit | Embed | Cancel | Snapshot | Count | Arrived | End
FromEngine = Pieces | Ended | Failed | Taken | Stopped
