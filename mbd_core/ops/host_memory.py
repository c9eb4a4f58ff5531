"""The host's memory that is still free for this process."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Bytes that this process can still take: the machine's, or less where a container (cgroup v2) has a limit.

    Of the container's memory what only caches files is free: the kernel gives it back when it is needed.
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return min(available, limit - used + int(statistics["inactive_file"]))
    except (OSError, ValueError):  # no such file, or "max"
        return available
