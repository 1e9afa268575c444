"""A process without a network: only this machine can be reached. For running notebooks that are not one's own.

An audit hook, which Python code cannot take away again. It sees Python's own sockets; a program that is started from
here, or native code, goes past it: where that matters, run the whole thing in a container.
"""

import ipaddress
import sys

EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request")


def block() -> None:
    """Refuse every connection and name lookup beyond this machine, for the rest of the process."""
    sys.addaudithook(_hook)


def _hook(event: str, args: tuple) -> None:
    if event not in EVENTS:
        return
    if event == "urllib.Request":
        raise ConnectionRefusedError(f"no network here: {args[0]}")
    address = args[1] if event in ("socket.connect", "socket.sendto") else args[:1]
    if isinstance(address, tuple) and address and not is_local(address[0]):
        raise ConnectionRefusedError(f"no network here: {address[0]}")


def is_local(host) -> bool:
    """localhost, 127.0.0.0/8, ::1, and no host at all (every address of this machine)."""
    host = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host or "localhost")
    if host in ("localhost", "0.0.0.0"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
