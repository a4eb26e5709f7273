"""The memory that this machine has left for a process."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int | None:
    """Return the bytes of memory available without swapping; None where the operating system does not report them.

    In a container, that is at most what its limit leaves.
    """
    known = [size for size in (_machine_bytes(), _container_bytes()) if size is not None]
    return min(known, default=None)


def _machine_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return _free_page_bytes()


def _free_page_bytes() -> int | None:
    """Return the free pages of a system without /proc, which leaves out what caches would give up."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _container_bytes() -> int | None:
    """Return what the limit of this container (cgroup version 2) leaves; None without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        # Pages of files that have not been used for a while are given up first.
        return None if limit == "max" else max(0, int(limit) - used + int(fields["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return None
