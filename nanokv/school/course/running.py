"""Executes a notebook in a separate process: no network, limited time and memory, a log of events.

`run` is the parent's side. The child, `python -m nanokv.school.course.running FOLDER LIMIT
KEEP_GOING`, starts a Jupyter kernel and runs the cells in it. If the child exceeds a limit, it is
killed; the processes that it started are ended in any case (containing.py).
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.school.course import containing, log, offline

if TYPE_CHECKING:
    from resource import struct_rusage

TIME_LIMIT = 180.0  # seconds for a notebook
# Bytes for all processes of a run, so that an endless list does not fill the machine's memory.
MEMORY_LIMIT = 8 * 2**30
# Bytes of an executed notebook, with escaped output and pictures.
LARGEST = 200_000_000


@dataclass(frozen=True)
class _End:
    """How the child ended. `stopped`: the limit that it exceeded, or "". `tail`: as in `_ended`."""

    stopped: str
    code: int
    usage: "struct_rusage"  # with all its children
    peak: int  # resident bytes of the largest process, read ten times a second
    tail: str


@dataclass(frozen=True)
class Run:
    """The result of one execution.

    `notebook`: the executed notebook, None if there is none. `error`: "" if all cells ran.
    """

    notebook: dict | None
    events: list = field(default_factory=list)
    error: str = ""
    stderr: str = ""  # stderr output of the cells
    seconds: float = 0.0
    processor: float = 0.0  # seconds of processor time
    peak: int = 0  # resident bytes of the largest process, read ten times a second
    doubt: str = ""  # reasons to doubt the events; "" if there are none

    def states(self, event: str) -> dict[str, list[str]]:
        """{id: [state, …]} of the checks (event "check") or quiz answers ("answer"), in order."""
        found: dict[str, list[str]] = {}
        for entry in self.events:
            if entry["event"] == event:
                found.setdefault(str(entry.get("id")), []).append(str(entry.get("state")))
        return found

    def measured(self) -> dict[str, float]:
        """{id of a prediction: what was measured}."""
        return {e["id"]: e["value"] for e in self.events if e["event"] == "reveal"}

    def figures(self) -> dict[str, float]:
        return {e["id"]: e["value"] for e in self.events if e["event"] == "figure"}


def run(
    notebook: dict,
    limit: float = TIME_LIMIT,
    keep_going: bool = False,
    env: dict[str, str] | None = None,
) -> Run:
    """Execute a notebook (as a dict) within `limit` seconds.

    `keep_going`: run the cells after a failed one too. `env`: additional environment variables.
    """
    with tempfile.TemporaryDirectory(prefix="nanokv-course-") as name:
        folder = Path(name)
        key = secrets.token_bytes(32)
        (folder / "in.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        (folder / "key").write_bytes(key)
        work = folder / "work"
        work.mkdir()
        command = _command(folder, limit, keep_going)
        begin = time.monotonic()
        with containing.adopting() as left:
            end = _supervise(command, work, limit, _environment(folder, env or {}))
        seconds = time.monotonic() - begin
        events, strange = log.read_sealed(folder / "events.jsonl", key)
        executed = _load(folder / "out.ipynb")
    failed, stderr = _outputs(executed)
    if failed.startswith("KeyboardInterrupt:"):  # nbclient interrupts a cell after its time limit
        failed = f"a cell took longer than {_a_cell(limit)} s"
    if end.code or executed is None:
        failed = _ended(end.code, end.tail)
    return Run(
        notebook=executed,
        events=events,
        error=end.stopped or failed,
        stderr=stderr,
        seconds=seconds,
        processor=end.usage.ru_utime + end.usage.ru_stime,
        peak=end.peak,
        doubt=_doubt(strange, left),
    )


def _command(folder: Path, limit: float, keep_going: bool) -> list[str]:
    """The command line of the child."""
    program = [sys.executable, "-m", "nanokv.school.course.running"]
    return [*containing.namespace(), *program, str(folder), str(limit), str(int(keep_going))]


def _doubt(strange: int, left: list[str]) -> str:
    """Reasons to doubt the events, from the numbers of strange lines and of processes left."""
    found = []
    if strange:
        found.append(f"{strange} lines of its log were forged or are missing")
    if left:
        names = ", ".join(sorted(set(left)))[:80]
        found.append(f"it left {len(left)} processes running ({names}): ended")
    return "; ".join(found)


def _ended(code: int, tail: str) -> str:
    """Why there is no executed notebook.

    `tail`, the last line of stderr, is used only for exit code 1: it does not explain a signal.
    """
    if code < 0:
        name = signal.Signals(-code).name
        return f"the process that runs it was killed ({name}), by itself or for want of memory"
    if code == 1 and tail:
        return tail
    return f"the process that runs it ended with code {code}"


def _environment(folder: Path, extra: dict) -> dict:
    """The environment of the child: without secrets, and with Jupyter's files inside `folder`."""
    secret = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
    env = {k: v for k, v in os.environ.items() if not any(word in k.upper() for word in secret)}
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    model = env.get("NANOKV_MODEL", "")
    # The child has another working directory, so a path becomes absolute. "tiny" is not a path.
    if model not in ("", "tiny") and os.path.exists(model):
        env["NANOKV_MODEL"] = os.path.abspath(model)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        env[name] = str(folder / name.lower())
    course = {
        "PYTHONPATH": path,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        log.VARIABLE: str(folder / "events.jsonl"),
        log.KEY_FILE: str(folder / "key"),
    }
    return env | course | extra


def _supervise(command: list[str], work: Path, limit: float, env: dict[str, str]) -> _End:
    """Run the child within its limits, and kill every process of it that is left."""
    import psutil  # type: ignore[import-untyped]  # psutil has no types

    with open(work.parent / "stderr", "w+b") as stderr:
        child = subprocess.Popen(
            command,
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        kernels: dict[int, psutil.Process] = {}
        family: dict[int, psutil.Process] = {}
        stopped, status, usage, peak = _wait(child.pid, limit, kernels, family)
        child.returncode = os.waitstatus_to_exitcode(status)
        # On Linux `adopting` ends the other processes, and reports them.
        left_to_us = kernels if sys.platform == "linux" else family
        for process in left_to_us.values():  # a kernel has its own session and would live on
            try:
                process.kill()
            except psutil.Error:
                pass
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 4000))
        lines = stderr.read(4000).decode("utf-8", "replace").strip().splitlines()
    return _End(stopped, child.returncode, usage, peak, lines[-1] if lines else "")


def _wait(
    pid: int, limit: float, kernels: dict, family: dict
) -> "tuple[str, int, struct_rusage, int]":
    """Wait for the child, and kill it at a limit → (why it was killed or "", status, usage, peak).

    Collects its child processes in `kernels`, all its descendants in `family`, by process id.
    ru_maxrss of `usage` is not its peak: Linux counts the process that started it as well.
    """
    import psutil

    deadline = time.monotonic() + limit
    peak = 0
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return "", status, usage, peak
        kernels |= {process.pid: process for process in _children(psutil, pid, recursive=False)}
        family |= {process.pid: process for process in _children(psutil, pid)}
        memory = _memory(psutil, family.values())
        peak = max([peak, *memory])
        stopped = ""
        if time.monotonic() > deadline:
            stopped = f"stopped after {limit:g} s"
        elif sum(memory) > MEMORY_LIMIT:
            stopped = f"stopped at {MEMORY_LIMIT / 2**30:g} GiB of memory"
        if stopped:
            # Stop the child first: it must not start processes while its others are killed.
            os.kill(pid, signal.SIGSTOP)
            _end(psutil, pid)
            os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            return stopped, status, usage, peak
        time.sleep(0.1)


def _children(psutil, pid: int, recursive: bool = True) -> list:
    """The child processes of a process; `recursive`: all descendants."""
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.Error:
        return []


def _end(psutil, pid: int) -> None:
    """Kill all descendants of a process, with the processes that they start meanwhile."""
    for _ in range(20):
        alive = 0
        for process in _children(psutil, pid):
            try:
                alive += process.status() != psutil.STATUS_ZOMBIE
                process.kill()
            except psutil.Error:  # it has ended
                pass
        if not alive:
            return
        time.sleep(0.02)


def _memory(psutil, processes) -> list[int]:
    """Resident bytes of each process that still runs."""
    found = []
    for process in processes:
        try:
            found.append(process.memory_info().rss)
        except psutil.Error:
            pass
    return found


def _load(path: Path) -> dict | None:
    import nbformat

    try:
        text = log.contents(path, LARGEST).decode()
        notebook = nbformat.reads(text, as_version=4)  # joins the lists of lines in the file
    except (OSError, ValueError, RecursionError, nbformat.ValidationError):
        return None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = joined(cell.get("outputs", []))
    return notebook


def joined(outputs: list) -> list:
    """The outputs with neighbouring pieces of a stream joined: a kernel splits text anywhere."""
    found: list = []
    for output in outputs:
        if found and _continues(output, found[-1]):
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    return found


def _continues(output: dict, last: dict) -> bool:
    """Do both outputs belong to one stream?"""
    streams = output.get("output_type") == last.get("output_type") == "stream"
    return streams and output["name"] == last["name"]


def _outputs(notebook: dict | None) -> tuple[str, str]:
    """(the first error or "", all text on stderr) of an executed notebook."""
    if notebook is None:
        return "", ""
    outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", [])]
    errors = [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]
    stderr = "".join(o["text"] for o in outputs if o.get("name") == "stderr")
    return next(iter(errors), ""), stderr


# --- the child ------------------------------------------------------------------------------------


def _a_cell(limit: float) -> int:
    """Seconds for one cell with `keep_going`: an endless loop must leave time for other cells."""
    return max(5, int(limit / 4))


def _execute(folder: Path, limit: float, keep_going: bool) -> None:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(folder / "in.ipynb", as_version=4)
    a_cell = _a_cell(limit) if keep_going else int(limit)
    client = NotebookClient(
        notebook,
        timeout=a_cell,
        interrupt_on_timeout=keep_going,
        kernel_name="python3",
        allow_errors=keep_going,
        extra_arguments=[f"--IPKernelApp.extensions={offline.__name__}"],
        resources={"metadata": {"path": os.getcwd()}},
    )
    try:
        client.execute()
    except CellExecutionError:
        pass  # the error is in the outputs
    finally:
        nbformat.write(notebook, folder / "out.ipynb")


def _main(folder: str, limit: str, keep_going: str) -> None:
    import psutil

    containing.become_the_parent()
    try:
        _execute(Path(folder), float(limit), keep_going == "1")
    finally:
        _end(psutil, os.getpid())


if __name__ == "__main__":
    _main(*sys.argv[1:])
