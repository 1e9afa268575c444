"""Sends bytes from one process to another, over torch.distributed or a TCP connection.

A link has two methods, `write` and `read`, both for whole tensors of bytes. They raise
HandoverError at once if the other process has ended, and after some seconds if it is silent. By
default gloo's timeout is 30 minutes, and a socket has none.
"""

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nanokv.errors import HandoverError

SILENCE_S = 30.0


class Link(Protocol):
    """A connection to one other process."""

    def write(self, data: Tensor) -> None:
        """Write all of data (N,) uint8."""

    def read(self, data: Tensor) -> None:
        """Fill data (N,) uint8."""


class GroupLink:
    """A link to rank `peer` of a torch.distributed group on gloo, with the timeout of the group."""

    def __init__(self, peer: int, group: dist.ProcessGroup | None = None):
        self.peer = peer
        self.group = group

    def write(self, data: Tensor) -> None:
        with self._lost("takes", data):
            dist.send(data, self.peer, self.group)

    def read(self, data: Tensor) -> None:
        with self._lost("sends", data):
            dist.recv(data, self.peer, self.group)

    @contextmanager
    def _lost(self, verb: str, data: Tensor) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the only error of gloo: the peer is gone, or late
            reason = str(error).splitlines()[0].split("] ")[-1]
            raise HandoverError(
                f"rank {self.peer} no longer {verb}, {len(data):,} bytes were to come: {reason}",
                "its own error says why it ended; one that is slow needs a longer timeout",
            ) from error


class SocketLink:
    """A link over a connected socket. Two threads may use the two directions at the same time."""

    def __init__(self, connection: socket.socket, silence_s: float = SILENCE_S):
        self.socket = connection
        self.silence_s = silence_s
        connection.settimeout(silence_s)  # per call: a slow transfer is not a silent one
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            # Send small messages at once.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, data: Tensor) -> None:
        self._each(self.socket.send, "take", data)

    def read(self, data: Tensor) -> None:
        self._each(self.socket.recv_into, "send", data)

    def _each(self, call: Callable[[Any], int], verb: str, data: Tensor) -> None:
        left = data.numpy().data
        size = len(data)
        while left:
            try:
                count = call(left)
            except TimeoutError:
                raise HandoverError(
                    f"the other process did not {verb} anything for {self.silence_s:g} seconds, "
                    f"after {size - len(left):,} of {size:,} bytes"
                ) from None
            except OSError:
                count = 0
            if not count:
                raise HandoverError(
                    f"the other process has gone after {size - len(left):,} of {size:,} bytes",
                    "its own error says why it ended",
                )
            left = left[count:]

    def wait(self) -> None:
        """Wait without a timeout until data comes or the other process ends."""
        select.select([self.socket], [], [])

    def close(self) -> None:
        """Close the connection. The other process and threads that wait here notice at once."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # no longer connected
            pass
        self.socket.close()


def as_bytes(data: bytes) -> Tensor:
    """The bytes as a tensor (N,) uint8, for `write`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
