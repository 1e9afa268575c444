"""Two hosts on one machine: network namespaces joined by a cable (a veth pair), each with one torchrun.

    in_two_hosts("measure", folder)   → what this file printed, run as a program inside of `unshare`: one JSON object

Everything happens in a user, network, mount and PID namespace of its own, so it needs no rights, changes nothing
outside, and leaves no process behind: the kernel ends all of them with the first. Addresses are 10.0.0.1 and 10.0.0.2.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNSHARE = ["unshare", "-Urnm", "--pid", "--fork", "--kill-child", "--mount-proc"]
ADDRESSES = ("10.0.0.1", "10.0.0.2")
WITHIN_S = 40


# --- outside --------------------------------------------------------------------------------------------------------


def missing() -> str:
    """Why there can be no two hosts here; "" if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if absent := [name for name in ("unshare", "ip", "tc") if not find(name)]:
        return f"needs {', '.join(absent)}: apt-get install iproute2 util-linux"
    tried = subprocess.run(
        [*UNSHARE, sys.executable, __file__, "connect"], capture_output=True, text=True
    )
    return (
        ""
        if tried.returncode == 0
        else f"namespaces are not allowed here: {tried.stderr.strip()[-200:]}"
    )


def find(name: str) -> str | None:
    """Also where only root looks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def in_two_hosts(scenario: str, *words) -> dict:
    command = [*UNSHARE, sys.executable, __file__, scenario, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WITHIN_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# --- inside ---------------------------------------------------------------------------------------------------------


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def connect() -> None:
    """host0 and host1, each with a loopback and its end of the cable, eth0."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")  # where ip keeps the names
    for host in ("host0", "host1"):
        run("ip", "netns", "add", host)
        run("ip", "-n", host, "link", "set", "lo", "up")
    run(
        "ip",
        "-n",
        "host0",
        "link",
        "add",
        "eth0",
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        "host1",
    )
    for host, address in zip(("host0", "host1"), ADDRESSES, strict=True):
        run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", host, "link", "set", "eth0", "up")
    run(
        "tc",
        "-n",
        "host0",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "1gbit",
        "burst",
        "1mb",
        "latency",
        "1s",
    )
    # Shaping works, or it is told here.
    run("tc", "-n", "host0", "qdisc", "del", "dev", "eth0", "root")


def torchruns(*words) -> list[subprocess.Popen]:
    """`torchrun --nnodes 2 … WORDS` on each host, which meet at host0 over the cable.

    By torchrun's static rendezvous. With `--rdzv-backend c10d` a rank ends as fast, but the torchrun of host1 goes on
    waiting for the store behind the cut cable, for more than 40 s.
    """
    started = []
    for number, address in enumerate(ADDRESSES):
        command = [
            "ip",
            "netns",
            "exec",
            f"host{number}",
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--node-rank",
            str(number),
            "--local-addr",
            address,
            "--master-addr",
            ADDRESSES[0],
            "--master-port",
            "29400",
            *map(str, words),
        ]
        env = os.environ | {
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE.parents[1]),
        }
        files = {name: open(f"/run/{name}{number}", "w+") for name in ("stdout", "stderr")}
        started.append(subprocess.Popen(command, env=env, cwd=HERE.parents[1], **files))
    return started


def ended(hosts: list[subprocess.Popen], within: float = WITHIN_S) -> dict:
    """When all have ended, or time is over: exit codes, output, seconds, the commands of processes that are left."""
    begin = time.monotonic()
    for host in hosts:
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(max(0.1, within - (time.monotonic() - begin)))
    said = {
        name: [Path(f"/run/{name}{n}").read_text() for n in range(2)]
        for name in ("stdout", "stderr")
    }
    seconds = time.monotonic() - begin
    return {
        "codes": [host.returncode for host in hosts],
        **said,
        "seconds": seconds,
        "left": others(),
    }


def others() -> list[str]:
    """Commands of all processes here but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        if int(path.name) != os.getpid() and words:
            found.append(words)
    return found


def measure(folder: str) -> dict:
    """Sums and context parallelism over the cable, at full speed and slow; see two_hosts_rank.py."""
    return ended(torchruns(HERE / "two_hosts_rank.py", "measure", folder))


def cut(folder: str) -> dict:
    """The cable is cut while both sum; `seconds` are those from the cut on."""
    hosts = torchruns(HERE / "two_hosts_rank.py", "for_ever", folder)
    until = time.monotonic() + WITHIN_S
    while not all("summed" in Path(f"/run/stdout{n}").read_text() for n in range(2)):
        assert time.monotonic() < until and all(host.poll() is None for host in hosts), ended(
            hosts, 1
        )
        time.sleep(0.05)
    run("ip", "-n", "host0", "link", "set", "eth0", "down")
    return ended(hosts)


def command(*words: str) -> dict:
    """`torchrun … -m nanokv WORDS` on both."""
    return ended(torchruns("-m", "nanokv", *words))


if __name__ == "__main__":
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    connect()
    if sys.argv[1] != "connect":
        print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
