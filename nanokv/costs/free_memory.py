"""How many bytes this process can still allocate, in RAM or on a GPU.

Imports torch only for a GPU.
"""

import re
from pathlib import Path


def available_memory(device: str) -> int | None:
    """Bytes that can still be allocated: the least of free RAM, container limit and ulimit -v.

    For a GPU: its free memory, and the memory that torch has reserved in this process but does not
    use. None = unknown.
    """
    if device.startswith("cuda"):
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    limits = _free_ram(), _free_cgroup(), free_address_space()
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    return max(0, min(known))


def _free_ram() -> int | None:
    return _proc_kb("/proc/meminfo", "MemAvailable")


def _proc_kb(path: str, field: str) -> int | None:
    """Bytes of a field that a file in /proc gives in kB; None without the file or the field."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    if not found:
        return None
    return int(found[1]) * 1024


CGROUPS = (  # (limit, used) of versions 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def _free_cgroup() -> int | None:
    """Bytes that the limit of the container leaves; None without a limit."""
    for limit, used in CGROUPS:
        try:
            free = int(Path(limit).read_text()) - int(Path(used).read_text())
            return free + _cgroup_cache(Path(limit).parent)
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


def _cgroup_cache(folder: Path) -> int:
    """Bytes of page cache, which the kernel counts as used but frees on demand."""
    text = (folder / "memory.stat").read_text()
    found = re.search(r"^(?:total_)?inactive_file (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def free_address_space() -> int | None:
    """Bytes that `ulimit -v` leaves this process; None = no limit, or unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _proc_kb("/proc/self/status", "VmSize")
    if soft == resource.RLIM_INFINITY or used is None:
        return None
    return soft - used
