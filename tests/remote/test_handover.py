"""A cache goes from one process to another: two real processes on the loopback, every cache, to the bit.

The truth is one process: the same scenario is computed in this one, and what it goes on to answer must be equal in
every bit. The other process is started once for this file.
"""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import handover_peer as other
import nanokv
from cli_helpers import HOME, environment
from matrix import CACHES_TRIED
from nanokv.cache import CACHES, PagePool, PrefixPool, make_cache
from nanokv.cache.saving import fingerprint
from nanokv.errors import CacheError, CapacityError, HandoverError
from nanokv.inference import prefill
from nanokv.remote import handover
from nanokv.remote.handover import receive, send
from nanokv.remote.link import SocketLink, as_bytes

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def model(loaded):
    torch.set_num_threads(1)
    return loaded[0]


@pytest.fixture(scope="module")
def peer(tiny_folder, model):
    with other.Peer(tiny_folder) as peer:
        yield peer


@pytest.fixture
def ends():
    """Two ends of a connection in this process."""
    pair = [SocketLink(end, 2.0) for end in tcp_pair()]
    yield pair
    for end in pair:
        end.close()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        return one, door.accept()[0]


def specs(scenario):
    """Rows of different lengths need a cache for each."""
    return {
        spec: options
        for spec, options in CACHES_TRIED.items()
        if scenario != "ragged" or spec.startswith("batch")
    }


def same(mine, theirs) -> bool:
    states = [[layer.state() for layer in cache] for cache in (mine, theirs)]
    return all(
        one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for one, two in zip(*states, strict=True)
    )


def in_thread(work):
    """work() beside; the returned function waits for it and gives its result, or its error."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(20)
        assert found, "it does not end"
        return found[0]

    return result


# --- equal to one process -------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["gloo", "tcp", "file"])
@pytest.mark.parametrize("scenario", other.SCENARIOS)
def test_every_cache_goes_on_as_in_one_process(peer, model, scenario, way, tmp_path):
    wrong = []
    for spec, options in specs(scenario).items():
        name = spec.partition(":")[0]
        mine, tokens = other.filled(model, scenario, name, options)
        more = {"salt": options["salt"]} if "salt" in options else {}  # a secret, which is not sent
        if way == "file":
            path = tmp_path / "cache.safetensors"
            peer.prefill(str(path), scenario, name, options)
            theirs = nanokv.KVCache.load(path, model.config, fingerprint(model), **more)
        else:
            link = peer.prefill(way, scenario, name, options)
            theirs, got = receive(link, model.config, fingerprint(model), torch.float32, **more)
            count, seconds = peer.said()
            if got.nbytes != count or not 0 < got.seconds <= seconds + 1 or got.rate <= 0:
                wrong.append(f"{spec}: {got} arrived of {count:,} bytes in {seconds} s")
        if (theirs.tokens, theirs.made.name) != (tokens, name) or not same(mine, theirs):
            wrong.append(f"{spec}: another cache arrived")
        if not torch.equal(other.go_on(model, theirs), other.go_on(model, mine)):
            wrong.append(f"{spec}: goes on differently")
    assert not wrong, "\n".join(wrong)


def test_all_caches_are_tried():
    assert {spec.partition(":")[0] for spec in CACHES_TRIED} == set(CACHES)


@pytest.mark.parametrize("spec", ["quantized", "quantized:bits=4", "sliding:window=6", "dict"])
def test_what_is_sent_is_what_is_held(peer, model, spec):
    """Codes go as codes: the bytes are those of the cache, and a header."""
    name, options = spec.partition(":")[0], CACHES_TRIED[spec]
    theirs, got = receive(peer.prefill("tcp", "chunked", name, options), model.config)
    peer.said()
    assert 0 < got.nbytes - theirs.nbytes < 6_000
    exact = make_cache("dict", model.config)
    prefill(model, other.ids(2, 1, 21), exact)
    assert theirs.nbytes < exact.nbytes or name == "dict"


def test_a_rate_is_in_bytes_per_second():
    assert handover.Receipt(6, 1.5).rate == 4


@pytest.mark.parametrize("kind", handover.EXACT)
def test_the_receiver_may_keep_it_in_another_kind_of_cache(peer, model, kind):
    """Pages of another size, too: rows are sent."""
    mine, tokens = other.filled(model, "turns", "paged", {"page": 3})
    pool = PrefixPool(model.config, 9, 5) if kind == "prefix" else PagePool(model.config, 9, 5)
    more = {"pool": pool} if kind in ("paged", "prefix") else {}
    theirs, _ = receive(
        peer.prefill("tcp", "turns", "paged", {"page": 3}), model.config, kind=kind, **more
    )
    peer.said()
    assert (theirs.made.name, theirs.tokens) == (kind, tokens)
    assert torch.equal(other.go_on(model, theirs), other.go_on(model, mine))


# --- refused, on both sides -----------------------------------------------------------------------------------------


def refused(peer, words, *args, scenario="whole", name="dict", options=None, **more):
    """Both sides raise it, and the link works afterwards."""
    link = peer.prefill("tcp", scenario, name, options or {})
    with pytest.raises(CacheError, match=words) as raised:
        receive(link, *args, **more)
    told = peer.said()
    assert isinstance(told, str) and str(raised.value) in told
    return raised.value


def test_another_model_is_refused_before_a_key_is_sent(peer, model):
    deep = replace(model.config, num_hidden_layers=4)
    refused(
        peer, "the cache that was sent belongs to another model: num_hidden_layers differ", deep
    )
    refused(peer, "belongs to other weights: .{12}, not 0123", model.config, "0123456789abcdef")
    error = refused(
        peer,
        "has keys in float32, this model computes in bfloat16",
        model.config,
        dtype=torch.bfloat16,
    )
    assert error.hint == "load the model with the same dtype in both processes"
    refused(
        peer,
        "a quantized cache cannot be received as a paged one",
        model.config,
        kind="paged",
        name="quantized",
    )
    theirs, _ = receive(peer.prefill("tcp", "whole", "dict", {}), model.config)
    assert theirs.length == 13 and peer.said()[0] > 0


def test_too_few_pages_and_too_small_a_slab_are_told_with_their_numbers(peer, model):
    pool = PagePool(model.config, 3, 4)
    taken = make_cache("paged", model.config, pool=pool)
    prefill(model, other.ids(1, 1, 5), taken)
    refused(
        peer,
        "the page pool is exhausted: 4 pages of 4 tokens wanted, 1 of 3 free",
        model.config,
        kind="paged",
        pool=pool,
    )
    assert len(pool.free) == 1 and taken.length == 5
    error = refused(peer, "13 more do not fit", model.config, name="static", capacity=12)
    assert isinstance(error, CapacityError) and "capacity=13" in error.hint


def test_wrong_ids_are_refused_by_the_sender(model, ends):
    cache, tokens = other.filled(model, "whole", "dict", {})
    with pytest.raises(CacheError, match="12 tokens were passed for a cache that holds 13"):
        send(ends[0], cache, tokens[:12])
    with pytest.raises(CacheError, match="without a config"):
        send(ends[0], nanokv.cache.KVCache(), ())


def test_who_is_refused_sends_no_key(model, ends):
    """The receiver's no has come before the first tensor goes."""
    (sender, receiver), config = ends, replace(model.config, num_hidden_layers=4)
    cache, tokens = other.filled(model, "whole", "dict", {})
    told = in_thread(lambda: receive(receiver, config))
    with pytest.raises(HandoverError, match="the receiver has refused: "):
        send(sender, cache, tokens)
    assert "num_hidden_layers differ" in str(told())
    receiver.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        receiver.socket.recv(1)


def changed(model, ends, change):
    """What a receiver says to a message of which `change(data)` is left; the sender then closes."""

    class Kept:
        def __init__(self):
            self.data = b""

        def write(self, data):
            self.data += bytes(data.tolist())

        def read(self, data):
            data[:] = as_bytes(handover.MAGIC + bytes(8))  # the receiver wants it

    cache, tokens = other.filled(model, "whole", "paged", {"page": 4})
    kept = Kept()
    send(kept, cache, tokens)
    data = change(kept.data)
    sender, receiver = ends

    def play():
        sender.socket.sendall(data)
        sender.socket.shutdown(socket.SHUT_WR)

    done = in_thread(play)
    began = time.monotonic()
    with pytest.raises(CacheError) as raised:
        receive(receiver, model.config)
    assert time.monotonic() - began < 5
    done()
    return str(raised.value)


@pytest.mark.parametrize("keep", [0, 7, 16, 40, -1, -900])
def test_a_torn_message_ends_the_receiver(model, ends, keep):
    """The sender has died at any byte."""
    assert "the other process has gone after" in changed(model, ends, lambda data: data[:keep])


def edited(data, change):
    """With another header."""
    size = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16 : 16 + size])
    change(header)
    words = json.dumps(header).encode()
    return handover.MAGIC + len(words).to_bytes(8, "little") + words + data[16 + size :]


def test_what_was_changed_on_the_way_is_told(model, ends):
    assert "checksum differs" in changed(
        model, ends, lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: header["meta"].update(length="12"), "bytes|checksum"),
        (
            lambda header: header["meta"].update(format="nanokv-cache-9"),
            "has the format 'nanokv-cache-9'",
        ),
        (
            lambda header: header["tensors"][0].__setitem__(2, [1, 2, 1 << 40, 32]),
            "bytes for 1 × 13 tokens: at most",
        ),
        (
            lambda header: header["tensors"][0].__setitem__(1, "complex64"),
            "cannot be read: KeyError",
        ),
        (lambda header: header["tensors"][0].__setitem__(2, [-1]), "cannot be read: ValueError"),
        (lambda header: header.pop("meta"), "cannot be read: KeyError"),
        (lambda header: header["meta"].pop("config"), "is not what send writes"),
    ],
)
def test_a_header_that_says_something_else_is_refused_before_memory_is_taken(
    model, ends, change, words
):
    assert re.search(words, changed(model, ends, lambda data: edited(data, change)))


def test_another_protocol_is_no_cache(model, ends):
    assert "begins no message of nanokv" in changed(
        model, ends, lambda data: b"GET / HTTP/1.1\r\nHost: nowhere\r\n"
    )
    assert "begins no message" in changed(
        model, tcp_links(), lambda data: data[:8] + b"\xff" * 8 + data[16:]
    )


def tcp_links():
    return [SocketLink(end, 2.0) for end in tcp_pair()]


def test_one_who_is_silent_is_waited_for_so_many_seconds(model):
    sender, receiver = tcp_pair()
    began = time.monotonic()
    with sender, receiver:
        link = SocketLink(receiver, 0.3)
        sender.sendall(handover.MAGIC + (1000).to_bytes(8, "little") + b"abc")
        with pytest.raises(
            HandoverError, match=r"did not send anything for 0\.3 seconds, after 3 of 1,000 bytes"
        ):
            receive(link, model.config)
        full = SocketLink(sender, 0.3)
        with pytest.raises(HandoverError, match=r"did not take anything for 0\.3 seconds"):
            full.write(torch.zeros(1 << 25, dtype=torch.uint8))
    assert time.monotonic() - began < 5


DIES = """
import os, sys, torch
import handover_peer as other
from nanokv.remote.link import GroupLink
from nanokv.remote import handover
rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
import nanokv
from cli_helpers import HOME, environment
model, _ = nanokv.load(folder)
group = other.joined(rank, port)
print("joined", flush=True)
if rank == 0:
    cache, tokens = other.filled(model, "whole", "dict", {})
    meta, tensors = handover.saving.contents(cache, tokens)
    link = GroupLink(1)
    handover.write_header(link, meta, tensors)
    handover.read_verdict(link)
    link.write(next(iter(tensors.values())).flatten().view(torch.uint8))
    os.kill(os.getpid(), 9)  # in the middle of the tensors
handover.receive(GroupLink(0), model.config)
"""


@pytest.mark.slow
def test_a_sender_that_is_killed_ends_the_receiver_within_seconds(tiny_folder):
    """Over gloo, whose own timeout would be 30 minutes."""
    port = other.parallel.free_port()
    env = environment() | {"PYTHONPATH": f"{HOME}:{SUPPORT}"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", DIES, str(rank), str(port), str(tiny_folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "joined\n"
    began = time.monotonic()
    said = both[1].communicate(timeout=30)[1]
    assert time.monotonic() - began < 10 and both[0].wait(10) == -9
    assert "HandoverError: rank 0 no longer sends, " in said and " bytes were to come: " in said


@pytest.mark.slow
def test_the_example_of_the_docs_runs_as_it_stands(tmp_path):
    text = (Path(HOME) / "docs/handover.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(import nanokv, torch\n.*?)```", text, re.DOTALL)[1]
    (tmp_path / "two.py").write_text(code)
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(other.parallel.free_port()),
        "two.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    sent, got = (int(count) for count in re.findall(r"Receipt\(nbytes=(\d+), ", done.stdout))
    assert sent == got > 10_000 and "<PagedCache 'paged': 6 layers × " in done.stdout
