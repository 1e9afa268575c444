"""A request that is on its way while a test does something else."""

import contextlib
import threading

from serving import CHAT

LONG = "My name is Zorbla. What is my name? " * 12
ENDLESS = {"max_tokens": 400, "ignore_eos": True}


@contextlib.contextmanager
def asked(server, body, path=CHAT, headers=None):
    """In a thread: [] becomes [(status, JSON)] when the answer is there."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(server.post(path, body, headers)))
    thread.start()
    try:
        yield found
    finally:
        thread.join(20)
