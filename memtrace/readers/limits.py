"""Limits on the memory and the processor time that reading a file may take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memtrace.machine_memory import available_memory_bytes
from memtrace.processors import count_cores
from memtrace.units import format_bytes

MIB: Final = 1 << 20
GIB: Final = 1 << 30
# A snapshot takes 4 to 6 bytes of memory for each byte of its pickle, JSON about 8.
_BASE_MEMORY_BYTES: Final = 256 * MIB
_MAX_MEMORY_PER_FILE_BYTE: Final = 12
_MIN_MEMORY_PER_FILE_BYTE: Final = 4
# The columns of a scanned snapshot and the tables that are made of them.
_MIN_MEMORY_PER_SCANNED_BYTE: Final = 1
_BASE_CPU_SECONDS: Final = 10
_FILE_BYTES_PER_CPU_SECOND: Final = 16 * MIB


@dataclass(frozen=True)
class ReadLimits:
    """Limits on reading one file."""

    memory_bytes: int
    """Memory beyond what the process uses when the limits are set."""
    cpu_seconds: int
    """Processor time of the process."""

    @classmethod
    def for_file_size(cls, size_bytes: int, num_processes: int = 1) -> ReadLimits:
        """Return limits that every valid file stays well within.

        Args:
            size_bytes: size of the file's content, decompressed.
            num_processes: number of files that are read at the same time.
        """
        wanted_bytes = _BASE_MEMORY_BYTES + _MAX_MEMORY_PER_FILE_BYTE * size_bytes
        free_bytes = available_memory_bytes()
        memory_bytes = wanted_bytes if free_bytes is None else min(wanted_bytes, free_bytes * 3 // 4 // num_processes)
        return cls(memory_bytes, _BASE_CPU_SECONDS + size_bytes // _FILE_BYTES_PER_CPU_SECOND)

    def impose(self) -> None:
        """Set the limits for this process if the operating system can. They cannot be lifted again."""
        try:
            import resource
        except ImportError:
            return
        used_bytes = _used_memory_bytes()
        if used_bytes is not None:
            address_space_bytes, data_bytes = used_bytes
            _lower_limit(resource.RLIMIT_DATA, data_bytes + self.memory_bytes)
            # Libraries reserve address space that they never touch.
            _lower_limit(resource.RLIMIT_AS, address_space_bytes + self.memory_bytes + 2 * GIB)
        _lower_limit(resource.RLIMIT_CPU, self.cpu_seconds)
        _lower_limit(resource.RLIMIT_CORE, 0)


def _lower_limit(resource_id: int, value: int) -> None:
    import resource

    _, hard_limit = resource.getrlimit(resource_id)
    soft_limit = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
    resource.setrlimit(resource_id, (soft_limit, hard_limit))


def _used_memory_bytes() -> tuple[int, int] | None:
    """Return the address space and the private data of this process in bytes; None if there is no /proc."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return int(fields[0]) * page_bytes, int(fields[5]) * page_bytes


def count_processes(largest_bytes: int) -> int:
    """Return how many files this machine can read at the same time: one per core that has enough memory.

    Args:
        largest_bytes: size of the largest file.
    """
    num_cores = count_cores()
    free_bytes = available_memory_bytes()
    if free_bytes is None:
        return num_cores
    return max(1, min(num_cores, free_bytes // (_BASE_MEMORY_BYTES + _MIN_MEMORY_PER_FILE_BYTE * largest_bytes)))


def describe_memory_shortage(size_bytes: int, *, is_scanned: bool = False) -> str | None:
    """Return why a pickle or JSON document cannot be loaded whole on this machine; None if it can.

    Args:
        size_bytes: size of the document, decompressed.
        is_scanned: a pickle is read by the scanner, which makes no Python objects.

    Returns:
        Text that follows the name of the file and a colon.
    """
    free_bytes = available_memory_bytes()
    needed_bytes = (_MIN_MEMORY_PER_SCANNED_BYTE if is_scanned else _MIN_MEMORY_PER_FILE_BYTE) * size_bytes
    if free_bytes is None or needed_bytes <= free_bytes:
        return None
    return (
        f"the file holds {format_bytes(size_bytes)}; reading it needs at least {format_bytes(needed_bytes)} of memory, "
        f"and this machine has {format_bytes(free_bytes)} free. Read it on a larger machine, or record with a smaller "
        "max_entries."
    )
