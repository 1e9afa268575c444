"""The ranks of one computation, on torch.distributed: join them, and what they say to each other.

    group = start()                       # rank, size and address from the environment, as torchrun sets it
    group.sum(x)                          # x of all ranks added, in place: the same bits on every rank
    group.gather(x)                       # (n,*x.shape)
    group.broadcast({"ids": [1, 2]})      # what rank 0 said, on every rank; any JSON value
    group.check_alike("the config", text) # ParallelError on every rank where they differ

A rank that ends closes its connections, and whoever waits for it gets ParallelError at once; one that is stuck is given
`timeout` seconds. Only `hear` waits for ever: for the next line of a person, say. Values travel as JSON, never as
pickles. One process alone is `Alone()`, which has the same methods and sends nothing.
"""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from nanokv.errors import ParallelError

if TYPE_CHECKING:
    from torch import Tensor

# Between two collectives lies at most one layer of one chunk of a prompt (inference.prefill_chunk).
TIMEOUT_S = 30.0
JOIN_S = 60.0  # until the last rank has imported torch
FOREVER = timedelta(days=365)
REPORT = 400  # bytes of a line in `reports`
INLINE = 248  # bytes of JSON that fit into the first message of a broadcast
LAUNCHED = "NANOKV_LAUNCHED"  # set by launch.py
# A socket that the launcher has bound for rank 0: no other program can take its port.
STORE_FD = "NANOKV_STORE_FD"
OTHER_PORT = "another MASTER_PORT (torchrun --master-port)"
ANSWER_S = 5.0  # until a store says its first word
INTERRUPTED = "Ctrl-C"  # the last words of a rank that a person has stopped
LAST_WORDS_S = 1.0  # a rank that fails says why before it ends: so long the others look for it


class Alone:
    """One process: what a Group of one rank would answer, without torch.distributed."""

    rank = 0
    size = 1
    local = 1

    def sum(self, x: "Tensor") -> "Tensor":
        return x

    def gather(self, x: "Tensor") -> "Tensor":
        return x[None]

    def broadcast(self, value: Any = None) -> Any:
        return value

    def hear(self, value: Any = None) -> Any:
        return value

    def meet(self) -> None:
        pass

    def check_alike(self, what: str, value: str, hint: str = "") -> None:
        pass

    def reports(self, text: str) -> list[str]:
        return [text]

    def close(self) -> None:
        pass


class Group:
    """The ranks 0 … size−1. Every rank calls the same methods in the same order; made by `start`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, backend: str):
        import torch.distributed as dist

        self.dist = dist
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        # Ranks on this machine, which share its memory.
        self.local = number("LOCAL_WORLD_SIZE", size)
        within = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=within)
        self.words = None  # the group of all ranks
        if backend != "gloo":
            self.words = dist.new_group(backend="gloo", timeout=within)
        self.patient = dist.new_group(backend="gloo", timeout=FOREVER)

    def sum(self, x: "Tensor") -> "Tensor":
        """x of any shape, added over the ranks, in place where it is contiguous.

        A ring sends 2·(n−1)/n · x.nbytes from each rank.
        """
        x = x.contiguous()
        with self._answered("all_reduce"):
            self.dist.all_reduce(x, group=self._reaching(x))
        return x

    def gather(self, x: "Tensor") -> "Tensor":
        """x of every rank, all of one shape → (n,*x.shape), by rank. Receives (n−1)·x.nbytes."""
        out = x.new_empty(self.size, *x.shape)
        with self._answered("all_gather"):
            self.dist.all_gather(list(out.unbind(0)), x.contiguous(), group=self._reaching(x))
        return out

    def broadcast(self, value: Any = None) -> Any:
        """The JSON value of rank 0, on every rank; what the others pass is not looked at."""
        return self._send(value, self.words)

    def hear(self, value: Any = None) -> Any:
        """`broadcast` of what may take rank 0 any time to know. It ends in an error only if a rank ends."""
        return self._send(value, self.patient)

    def meet(self) -> None:
        """Wait until all ranks are here, however long that takes: for disks, which may be slow."""
        import torch

        with self._answered("a barrier"):
            self.dist.all_reduce(torch.zeros(1), group=self.patient)

    def check_alike(self, what: str, value: str, hint: str = "") -> None:
        """ParallelError on every rank, naming who differs, unless all say the same."""
        import torch

        mark = hashlib.sha256(value.encode()).digest()[:8]
        own = byte_tensor(mark)  # (8,)
        marks = [torch.empty_like(own) for _ in range(self.size)]
        with self._answered("all_gather"):
            self.dist.all_gather(marks, own, group=self.words)
        others = [str(rank) for rank, found in enumerate(marks) if not torch.equal(found, marks[0])]
        if others:
            raise ParallelError(
                f"{what} of rank {', '.join(others)} differs from that of rank 0", hint
            )

    def reports(self, text: str) -> list[str]:
        """A line of every rank, by rank, cut to REPORT bytes. Waits as long as their disks take."""
        import torch

        own = byte_tensor(text.encode()[:REPORT].ljust(REPORT, b"\0"))  # (REPORT,)
        lines = [torch.empty(REPORT, dtype=torch.uint8) for _ in range(self.size)]
        with self._answered("all_gather"):
            self.dist.all_gather(lines, own, group=self.patient)
        return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines]

    def last_words(self, text: str) -> None:
        """Why this rank ends: the others, who will miss it, put it into their own error."""
        self._ask_store(lambda: self.store.set(f"ended/{self.rank}", text))
        time.sleep(LAST_WORDS_S)

    def stopped(self) -> None:
        """A person has stopped this rank: the others end with KeyboardInterrupt as well."""
        self.last_words(INTERRUPTED)

    def close(self) -> None:
        """Leave. Waits for nobody."""
        with suppress(Exception):
            self.words = self.patient = None
            self.dist.destroy_process_group()

    def _reaching(self, x: "Tensor") -> Any:
        """NCCL sends what lies on a GPU only; None: the group of all ranks."""
        if x.device.type != "cpu":
            return None
        return self.words

    def _send(self, value: Any, group: Any) -> Any:
        data = b""
        if self.rank == 0:
            data = json.dumps(value).encode()
        message = len(data).to_bytes(8, "little") + data[:INLINE]
        first = byte_tensor(message.ljust(8 + INLINE, b"\0"))  # (8+INLINE,)
        with self._answered("broadcast"):
            self.dist.broadcast(first, 0, group=group)
            length = int.from_bytes(bytes(first[:8].tolist()), "little")
            whole = first[8:]
            if length > INLINE:
                whole = byte_tensor(data.ljust(length, b"\0"))
                self.dist.broadcast(whole, 0, group=group)
        return json.loads(bytes(whole[:length].tolist()))

    @contextmanager
    def _answered(self, what: str) -> Iterator[None]:
        """What gloo or NCCL says about a rank that is gone becomes one error, with that rank's own words if it left
        any."""
        try:
            yield
        except RuntimeError as error:
            # They hold the group, whose connections end with its last reference.
            clear_frames(error.__traceback__)
            reason = self._reason(what, str(error))
            self.close()  # whoever waits for this rank is told at once, and not after `timeout`
            if reason.endswith(f": {INTERRUPTED}"):
                raise KeyboardInterrupt from error
            raise ParallelError(reason, "start all ranks again") from error

    def _reason(self, what: str, text: str) -> str:
        said = self._ask_store(self._words_of_others)
        if said:
            return said
        how = "has ended"
        if "imed out" in text:
            how = f"did not answer within {self.timeout:g} s"
        return f"a rank of {self.size} {how}; rank {self.rank} waited for it in {what}"

    def _words_of_others(self) -> str:
        """The last words of the first rank that left any, looked for during LAST_WORDS_S; "" if none did."""
        until = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < until:
            for rank in range(self.size):
                key = f"ended/{rank}"
                if rank != self.rank and self.store.check([key]):
                    words = self.store.get(key).decode()
                    return f"rank {rank} of {self.size} has ended: {words}"
            time.sleep(0.05)
        return ""

    def _ask_store(self, ask: Callable[[], Any]) -> Any:
        """ask(), or None if it fails or takes longer than the last words may: the store is on the host of rank 0, and
        where the cable to it is cut, a question gets no answer and no error."""
        try:
            answers = in_time(ask, 2 * LAST_WORDS_S)
        except Exception:
            return None
        return next(iter(answers), None)


Ranks = Group | Alone
ALONE = Alone()


def start(timeout: float = TIMEOUT_S, backend: str = "gloo") -> Group:
    """Join the group that the environment names: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them.

    `timeout`: seconds that one rank may keep the others waiting. ParallelError if the address cannot be had, or not all
    ranks come within a minute. On one machine gloo stays on the loopback; each rank computes with one thread unless
    OMP_NUM_THREADS says otherwise.
    """
    import torch

    rank = number("RANK")
    size = number("WORLD_SIZE")
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = number("MASTER_PORT")
    if number("LOCAL_WORLD_SIZE", size) == size:  # all on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        return Group(join_store(host, port, rank, size), rank, size, timeout, backend)
    except RuntimeError as error:  # all errors of torch.distributed are
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise ParallelError(f"port {port} of {host} is in use", OTHER_PORT) from error
        reason = str(error).strip().splitlines()[0][:200]
        raise ParallelError(
            f"rank {rank} of {size} could not join at {host}:{port}: {reason}",
            "all ranks must run, and reach that address",
        ) from error


def join_store(host: str, port: int, rank: int, size: int) -> Any:
    """The TCPStore at which the ranks meet: rank 0 has it, or the agent of torchrun.

    ParallelError where another program listens at that address: it would be asked, and might never answer.
    """
    import torch.distributed as dist

    within = timedelta(seconds=JOIN_S)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listening: dict[str, Any] = {}
        if STORE_FD in os.environ:
            listening = {"master_listen_fd": number(STORE_FD), "use_libuv": True}
        return dist.TCPStore(host, port, size, True, within, **listening)
    # Its socket is bound for rank 0, which answers as soon as it has imported torch.
    if LAUNCHED in os.environ:
        return dist.TCPStore(host, port, size, False, within)
    wait_for_listener(host, port)
    stores = in_time(lambda: dist.TCPStore(host, port, size, False, within), ANSWER_S)
    if not stores:
        raise ParallelError(
            f"rank {rank} of {size}: at {host}:{port} listens another program, which does not answer",
            OTHER_PORT,
        )
    return stores[0]


def wait_for_listener(host: str, port: int) -> None:
    """Until somebody listens there; after JOIN_S, or where the name is unknown, TCPStore says what is wrong."""
    import socket

    until = time.monotonic() + JOIN_S
    while time.monotonic() < until:
        try:
            socket.create_connection((host, port), timeout=ANSWER_S).close()
            return
        except socket.gaierror:
            return
        except OSError:
            time.sleep(0.1)


def in_time(work: Callable[[], Any], seconds: float) -> list[Any]:
    """[work()], or [] if it takes longer: then it goes on in a thread that nobody waits for. What it raises is raised
    here."""
    found: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="nanokv-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return found


def byte_tensor(data: bytes) -> "Tensor":
    """(N,) uint8, to send."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def number(name: str, default: int | None = None) -> int:
    """A number of the environment."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    text = text or ""
    if not text.isdecimal():
        raise ParallelError(
            f"{name} is {text!r}: a number was expected", "torchrun --nproc-per-node 2 -m nanokv …"
        )
    return int(text)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What a rank on this machine finds in its environment; `port`: of a store on the loopback, see `free_port`."""
    fields = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in fields.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """A port of the loopback that nobody uses now. Another program may take it before it is bound: a launcher that
    holds the store itself (TCPStore with port 0) has no such race."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def loopback() -> str:
    """lo, or lo0 on macOS."""
    import socket

    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def end_with_parent(grace: float = 2.0) -> None:
    """End this rank when the process that started it is gone, killed for instance: nobody else would end it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)  # in good order, if that can be had
        time.sleep(grace)
        os._exit(2)

    threading.Thread(target=watch, name="nanokv-parent", daemon=True).start()
