"""The group of ranks of one computation, on torch.distributed: joining it, and its messages.

    group = start()                        rank, size and address from the environment
    group.sum(x)                           x summed over the ranks, the same bits on every rank
    group.gather(x)                        (n,*x.shape)
    group.broadcast({"ids": [1, 2]})       the value of rank 0, on every rank; any JSON value
    group.check_alike("the config", text)  ParallelError on every rank if they differ

If a rank ends, its connections close and the ranks that wait for it get ParallelError at once. A
rank that does not answer is given `timeout` seconds. Only `hear` and `meet` wait without a limit,
for example for the next line that a person types. Values are sent as JSON, never as pickles.
`Alone()` has the same methods for a single process and sends nothing.
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

# Between two collectives a rank computes at most one layer of one chunk of a prompt
# (inference.prefill_chunk).
TIMEOUT_S = 30.0
JOIN_S = 60.0  # for all ranks to import torch and join
FOREVER = timedelta(days=365)
REPORT = 400  # bytes of a line in `reports`
INLINE = 248  # bytes of JSON that fit into the first message of a broadcast
LAUNCHED = "NANOKV_LAUNCHED"  # set by launch.py
# The descriptor of a socket that the launcher has bound for rank 0, so that no other program can
# take the port.
STORE_FD = "NANOKV_STORE_FD"
OTHER_PORT = "another MASTER_PORT (torchrun --master-port)"
ANSWER_S = 5.0  # for the first answer of a store
INTERRUPTED = "Ctrl-C"  # the last words of a rank that a person has interrupted
LAST_WORDS_S = 1.0  # for the reason why a rank ends to reach the other ranks


class Alone:
    """A single process: the methods of Group for one rank, without torch.distributed."""

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
    """The ranks 0 … size−1, made by `start`. All ranks call the same methods in the same order."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, backend: str):
        import torch.distributed as dist

        self.dist = dist
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        # The number of ranks on this machine, which share its memory.
        self.local = number("LOCAL_WORLD_SIZE", size)
        within = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=within)
        self.words = None  # None: the default group, which is on gloo already
        if backend != "gloo":
            self.words = dist.new_group(backend="gloo", timeout=within)
        self.patient = dist.new_group(backend="gloo", timeout=FOREVER)

    def sum(self, x: "Tensor") -> "Tensor":
        """x of any shape, summed over the ranks, in place if x is contiguous.

        A ring all-reduce sends 2·(n−1)/n · x.nbytes from each rank.
        """
        x = x.contiguous()
        with self._answered("all_reduce"):
            self.dist.all_reduce(x, group=self._reaching(x))
        return x

    def gather(self, x: "Tensor") -> "Tensor":
        """x of every rank, all of the same shape → (n,*x.shape). Receives (n−1)·x.nbytes."""
        out = x.new_empty(self.size, *x.shape)
        with self._answered("all_gather"):
            self.dist.all_gather(list(out.unbind(0)), x.contiguous(), group=self._reaching(x))
        return out

    def broadcast(self, value: Any = None) -> Any:
        """The JSON value of rank 0, on every rank. The values of the other ranks are ignored."""
        return self._send(value, self.words)

    def hear(self, value: Any = None) -> Any:
        """`broadcast` without a timeout, for values that rank 0 may have to wait for.

        It fails only if a rank ends.
        """
        return self._send(value, self.patient)

    def meet(self) -> None:
        """Wait for all ranks without a timeout, for example while they read from slow disks."""
        import torch

        with self._answered("a barrier"):
            self.dist.all_reduce(torch.zeros(1), group=self.patient)

    def check_alike(self, what: str, value: str, hint: str = "") -> None:
        """ParallelError on every rank, naming the ranks that differ, unless all are equal."""
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
        """A line from every rank, in order, cut to REPORT bytes. Waits without a timeout."""
        import torch

        own = byte_tensor(text.encode()[:REPORT].ljust(REPORT, b"\0"))  # (REPORT,)
        lines = [torch.empty(REPORT, dtype=torch.uint8) for _ in range(self.size)]
        with self._answered("all_gather"):
            self.dist.all_gather(lines, own, group=self.patient)
        return [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in lines]

    def last_words(self, text: str) -> None:
        """Publish why this rank ends. The other ranks include it in their own error."""
        self._ask_store(lambda: self.store.set(f"ended/{self.rank}", text))
        time.sleep(LAST_WORDS_S)

    def stopped(self) -> None:
        """A person has interrupted this rank: end the others with KeyboardInterrupt as well."""
        self.last_words(INTERRUPTED)

    def close(self) -> None:
        """Leave the group without waiting for the other ranks."""
        with suppress(Exception):
            self.words = self.patient = None
            self.dist.destroy_process_group()

    def _reaching(self, x: "Tensor") -> Any:
        """The process group for x: NCCL sends only GPU tensors. None: the default group."""
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
        """Turn an error of gloo or NCCL into ParallelError with the last words of the failed rank.

        KeyboardInterrupt if a person has interrupted that rank.
        """
        try:
            yield
        except RuntimeError as error:
            # The frames hold the group, and its connections close with its last reference.
            clear_frames(error.__traceback__)
            reason = self._reason(what, str(error))
            self.close()  # ranks that wait for this one fail at once, not after `timeout`
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
        """The last words of the first rank that left any within LAST_WORDS_S, or ""."""
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
        """ask(), or None if it fails or takes longer than 2 · LAST_WORDS_S.

        The store is on the host of rank 0. If the cable to it is cut, a request gets neither an
        answer nor an error.
        """
        try:
            answers = in_time(ask, 2 * LAST_WORDS_S)
        except Exception:
            return None
        return next(iter(answers), None)


Ranks = Group | Alone
ALONE = Alone()


def start(timeout: float = TIMEOUT_S, backend: str = "gloo") -> Group:
    """Join the group that torchrun describes in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    `timeout`: seconds that one rank may keep the others waiting. ParallelError if the address
    cannot be used, or if not all ranks join within a minute. On one machine gloo stays on the
    loopback interface. Each rank computes with one thread unless OMP_NUM_THREADS is set.
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
    except RuntimeError as error:  # the base class of all errors of torch.distributed
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise ParallelError(f"port {port} of {host} is in use", OTHER_PORT) from error
        reason = str(error).strip().splitlines()[0][:200]
        raise ParallelError(
            f"rank {rank} of {size} could not join at {host}:{port}: {reason}",
            "all ranks must run, and reach that address",
        ) from error


def join_store(host: str, port: int, rank: int, size: int) -> Any:
    """The TCPStore through which the ranks find each other, run by rank 0 or by torchrun's agent.

    ParallelError if another program listens at that address, because it might never answer.
    """
    import torch.distributed as dist

    within = timedelta(seconds=JOIN_S)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listening: dict[str, Any] = {}
        if STORE_FD in os.environ:
            listening = {"master_listen_fd": number(STORE_FD), "use_libuv": True}
        return dist.TCPStore(host, port, size, True, within, **listening)
    # launch.py has bound the socket for rank 0, which answers as soon as it has imported torch.
    if LAUNCHED in os.environ:
        return dist.TCPStore(host, port, size, False, within)
    wait_for_listener(host, port)
    stores = in_time(lambda: dist.TCPStore(host, port, size, False, within), ANSWER_S)
    if not stores:
        raise ParallelError(
            f"rank {rank} of {size}: another program listens at {host}:{port}, and does not answer",
            OTHER_PORT,
        )
    return stores[0]


def wait_for_listener(host: str, port: int) -> None:
    """Return once a program listens at the address, after JOIN_S, or if the host name is unknown.

    In the last two cases TCPStore raises the error.
    """
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
    """[work()], or [] if it takes longer than `seconds`. Raises the exceptions of `work`.

    `work` runs in a daemon thread. After the timeout the thread continues, and its result is
    dropped.
    """
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
    """The bytes as a tensor (N,) uint8."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def number(name: str, default: int | None = None) -> int:
    """An environment variable as a number ≥ 0; `default` if it is not set, else ParallelError."""
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
    """The environment variables of a rank on this machine. `port`: of the store on the loopback."""
    fields = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in fields.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """A free port of the loopback. Another program may take it before the caller binds it.

    A launcher that holds the store itself (TCPStore with port 0) avoids this race.
    """
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def loopback() -> str:
    """The name of the loopback interface: lo, or lo0 on macOS."""
    import socket

    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def end_with_parent(grace: float = 2.0) -> None:
    """End this rank when its parent process has ended, which may have been killed.

    `grace`: seconds between SIGTERM and the hard exit.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)  # an orderly end, if possible
        time.sleep(grace)
        os._exit(2)

    threading.Thread(target=watch, name="nanokv-parent", daemon=True).start()
