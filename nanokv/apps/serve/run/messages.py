"""What passes between the event loop and the engine's thread: values, in both directions.

    to the engine       Submit, Cancel, Snapshot, Count, Arrived, End
    to the event loop   Pieces, Ended, Failed, Taken, Stopped

`ticket` is the number of an answer's place (ticket.py), `question` that of a Snapshot or a Count.
"""

from dataclasses import dataclass

from torch import Tensor

from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.prompts import Job
from nanokv.errors import ParallelError

# --- to the engine --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """An answer is wanted. What the job holds belongs to the engine's thread from now on."""

    ticket: int
    job: Job
    param: str  # the field that is named where the engine refuses what prompts.py has checked
    tab: str  # of the page that asks, or ""
    opened: float  # perf_counter at the arrival of the request


@dataclass(frozen=True)
class Cancel:
    """An answer is not wanted any more, whether it waits, is prefilled or runs."""

    ticket: int


@dataclass(frozen=True)
class Snapshot:
    """Requests and pages are to be told (snapshot.py)."""

    question: int


@dataclass(frozen=True)
class Count:
    """What /metrics shows of the engine and of the prefill process is to be told."""

    question: int


@dataclass(frozen=True)
class Arrived:
    """The prefill process has said something; `size` bytes took so many seconds to arrive."""

    meta: dict
    tensors: dict[str, Tensor]
    size: int
    seconds: float


@dataclass(frozen=True)
class End:
    """The last message: the thread is to end."""


# --- to the event loop ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Tokens by now: of the prompt, those of them that were reused, those of the answer."""

    prompt: int = 0
    reused: int = 0
    new: int = 0


@dataclass(frozen=True)
class Pieces:
    """What a step has added to an answer, which may be nothing that can be shown."""

    ticket: int
    pieces: tuple[Piece, ...]
    usage: Usage


@dataclass(frozen=True)
class Ended:
    """An answer is complete. All of its pieces have been sent."""

    ticket: int
    reason: str  # finish_reason of the engine's request
    stop: str | int | None  # a stop string or token id of the request that ended it
    calls: int  # of tools
    metrics: dict  # Request.metrics()


@dataclass(frozen=True)
class Failed:
    """An answer has ended with an error for its client."""

    ticket: int
    error: Exception
    reason: str = "cancelled"  # in /metrics


@dataclass(frozen=True)
class Taken:
    """What was asked for, or why it could not be told."""

    question: int
    found: dict | Exception


@dataclass(frozen=True)
class Stopped:
    """The last message: the thread has ended; `lost`: because a rank no longer answers."""

    lost: ParallelError | None


ToEngine = Submit | Cancel | Snapshot | Count | Arrived | End
FromEngine = Pieces | Ended | Failed | Taken | Stopped
