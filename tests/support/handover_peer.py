"""The other process in tests of a handover: it prefills what it is asked for, and sends it, or writes it to a file.

    with Peer(folder) as peer:
        link = peer.prefill("gloo", "turns", "paged", {"page": 3})     what it has computed comes over this link

`SCENARIOS` fill a cache, in the one process as in the other, and `go_on` continues. Nothing here imports transformers:
a process of this file is ready in two seconds.
"""

import json
import multiprocessing
import os
import socket
import sys
import time

import torch

import nanokv
from nanokv.cache import make_cache
from nanokv.cache.saving import fingerprint
from nanokv.errors import NanoKVError, UnsupportedError
from nanokv.inference import decode, prefill, prefill_chunks, verify_draft
from nanokv.parallel import group as parallel
from nanokv.remote.handover import send, write_words
from nanokv.remote.link import GroupLink, SocketLink

CAPACITY, PATIENCE_S = 48, 20.0


def ids(seed: int, rows: int, tokens: int):
    """(rows, tokens) int64 of the tiny checkpoint's vocabulary."""
    return torch.randint(3, 300, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# --- what fills a cache: fill(model, cache) → the ids in it -----------------------------------------------------------


def whole(model, cache):
    """One prompt at once."""
    prompt = ids(1, 1, 13)
    prefill(model, prompt, cache)
    return prompt[0].tolist()


def chunked(model, cache):
    """Part by part, of which the last is one token."""
    prompt = ids(2, 1, 21)
    prefill_chunks(model, prompt, cache, chunk=5)
    return prompt[0].tolist()


def turns(model, cache):
    """A prompt, an answer of three tokens, another prompt."""
    talk = ids(3, 1, 19)
    prefill(model, talk[:, :9], cache)
    for t in range(9, 12):
        decode(model, talk[:, t : t + 1], cache, cache.length)
    prefill(model, talk[:, 12:], cache, cache.length)
    return talk[0].tolist()


def truncated(model, cache):
    """A turn that is taken back, inside of a page and of a quantized block; a window begins again."""
    prompt = ids(4, 1, 23)
    prefill_chunks(model, prompt, cache, chunk=7)
    try:
        cache.truncate(14)
    except UnsupportedError:
        cache.truncate(0)
        prefill(model, prompt[:, :14], cache)
    return prompt[0, :14].tolist()


def rows(model, cache):
    """Three prompts of equal length."""
    prompts = ids(5, 3, 11)
    prefill(model, prompts, cache)
    return prompts.tolist()


def ragged(model, cache):
    """Three prompts of different lengths, a row each."""
    prompts = [ids(6 + b, 1, n) for b, n in enumerate((4, 17, 9))]
    for row, prompt in zip(cache.rows, prompts, strict=True):
        prefill(model, prompt, row)
    return [prompt[0].tolist() for prompt in prompts]


SCENARIOS = {
    "whole": (whole, 1),
    "chunked": (chunked, 1),
    "turns": (turns, 1),
    "truncated": (truncated, 1),
    "rows": (rows, 3),
    "ragged": (ragged, 3),
}


def filled(model, scenario: str, name: str, options: dict):
    """(cache, its ids)"""
    fill, count = SCENARIOS[scenario]
    cache = make_cache(name, model.config, count, CAPACITY, **options)
    return cache, fill(model, cache)


def go_on(model, cache):
    """Logits of three steps and of a draft of two tokens."""
    count = cache.sizes.batch_size
    steps = [decode(model, ids(20 + t, count, 1), cache, cache.length) for t in range(3)]
    return torch.stack(
        [*steps, *verify_draft(model, ids(30, count, 2), cache, cache.length).unbind(1)]
    )


# --- the process ------------------------------------------------------------------------------------------------------


class Peer:
    """Rank 0 of two; the process of the test is rank 1, and keeps the other end of each link."""

    def __init__(self, folder):
        self.control, theirs = multiprocessing.Pipe()
        port = parallel.free_port()
        with socket.create_server(("127.0.0.1", 0)) as door:
            arguments = theirs, str(folder), port, door.getsockname()[1]
            self.process = multiprocessing.get_context("spawn").Process(
                target=main, args=arguments, daemon=True
            )
            self.process.start()
            door.settimeout(PATIENCE_S)
            tcp = door.accept()[0]
        self.group = joined(1, port)
        self.links = {"gloo": GroupLink(0), "tcp": SocketLink(tcp, PATIENCE_S)}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.group.close()
        self.control.close()
        self.process.join(PATIENCE_S)
        self.process.kill()

    def prefill(self, way: str, scenario: str, name: str, options: dict, **more):
        """The link over which it comes; `way` may be the path of a file, which is complete then."""
        self.control.send((way, scenario, name, options, more))
        return self.links[way] if way in self.links else self.said()

    def said(self):
        """How its last work has ended: (bytes, seconds), or the words of an error."""
        assert self.control.poll(PATIENCE_S), "the other process says nothing"
        return self.control.recv()


def joined(rank: int, port: int):
    """A group on the loopback, whose timeout is seconds."""
    before = dict(os.environ)
    os.environ.update(parallel.environment(rank, 2, port))
    try:
        return parallel.start(timeout=5.0)
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(control, folder: str, port: int, tcp: int) -> None:
    torch.set_num_threads(1)
    connection = SocketLink(socket.create_connection(("127.0.0.1", tcp), PATIENCE_S), PATIENCE_S)
    joined(0, port)
    model, _ = nanokv.load(folder)
    links = {"gloo": GroupLink(1), "tcp": connection}
    while True:
        try:
            way, scenario, name, options, more = control.recv()
        except EOFError:
            return
        try:
            cache, tokens = filled(model, scenario, name, options)
            if way in links:
                receipt = send(links[way], cache, tokens, more.get("weights", fingerprint(model)))
                control.send((receipt.nbytes, receipt.seconds))
            else:
                cache.save(way, tokens, fingerprint(model))
                control.send((os.path.getsize(way), 0.0))
        except NanoKVError as error:
            control.send(str(error))


# --- models of a process that prefills for a server -------------------------------------------------------------------


def load(folder, slow_s: float = 0.0):
    """(model, fingerprint) for PrefillProcess; `slow_s`: a pause in each forward."""
    torch.set_num_threads(1)
    model, _ = nanokv.load(folder)
    weights = fingerprint(model)
    if slow_s:
        model.register_forward_pre_hook(lambda *_: time.sleep(slow_s))
    return model, weights


def fails(words: str):
    """One that cannot be loaded."""
    raise NanoKVError(words, "a hint")


def ends(code: int):
    """One whose process ends."""
    sys.exit(code)


LIES = {  # what is said instead of a prompt's rows: lie(words, meta, tensors)
    "one row more": lambda words, meta, tensors: words.say(
        meta, tensors | {"keys": wider(tensors["keys"])}
    ),
    "an exabyte": lambda words, meta, tensors: say_raw(words, [["keys", "float32", [1 << 58]]]),
}


def wider(x):
    """One row more, (L,Hk,T+1,D)."""
    return torch.cat((x, x[:, :, :1]), 2)


def say_raw(words, tensors: list) -> None:
    """A header that says what it wants."""
    write_words(words.link, json.dumps({"meta": {}, "tensors": tensors}).encode())


def lies(folder, lie: str):
    """One whose process says something else instead of what it has computed."""
    from nanokv.remote import prefill_process

    def hand_over(self, told, request, logits):
        found = prefill_process.taken(request.cache, request.prompt, told["start"])
        meta = {"done": told["prefill"], "start": found.start, "reused": request.reused_tokens}
        tensors = {"keys": found.keys, "values": found.values, "logits": logits}
        self.outbox.submit(LIES[lie], self.words, meta, tensors)

    prefill_process.Prefiller.hand_over = hand_over
    return load(folder)
