"""How much memory and time a foreign file may cost, and how the operating system is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30
# A snapshot takes 4 to 6 bytes of memory for each byte of its pickle, JSON about 8.
_BASE_BYTES: Final = 256 * MIB
_BYTES_PER_BYTE: Final = 12
_LEAST_PER_BYTE: Final = 4
_BASE_SECONDS: Final = 10
_BYTES_PER_SECOND: Final = 16 * MIB


@dataclass(frozen=True)
class Limits:
    """Bounds on reading one file: memory on top of what the process has, and processor time."""

    memory_bytes: int
    cpu_seconds: int

    @classmethod
    def for_size(cls, size: int) -> Limits:
        """Bounds that every real file of ``size`` bytes (unzipped) stays well within."""
        wanted = _BASE_BYTES + _BYTES_PER_BYTE * size
        free = available_bytes()
        memory = wanted if free is None else min(wanted, free * 3 // 4)
        return cls(memory, _BASE_SECONDS + size // _BYTES_PER_SECOND)

    def impose(self) -> None:
        """Hold this process to the bounds, where the system can; there is no way back."""
        try:
            import resource
        except ImportError:
            return
        in_use = _bytes_in_use()
        if in_use is not None:
            mapped, data = in_use
            _lower(resource.RLIMIT_DATA, data + self.memory_bytes)
            # Libraries reserve address space that they never touch.
            _lower(resource.RLIMIT_AS, mapped + self.memory_bytes + 2 * GIB)
        _lower(resource.RLIMIT_CPU, self.cpu_seconds)
        _lower(resource.RLIMIT_CORE, 0)


def _lower(which: int, value: int) -> None:
    import resource

    _, hard = resource.getrlimit(which)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (soft, hard))


def _bytes_in_use() -> tuple[int, int] | None:
    """Address space and private data of this process; None where /proc is not there."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return int(fields[0]) * page, int(fields[5]) * page


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def too_large(size: int) -> str | None:
    """Why a pickle or JSON document of ``size`` bytes cannot be loaded whole here; None where it can."""
    free = available_bytes()
    needed = _LEAST_PER_BYTE * size
    if free is None or needed <= free:
        return None
    return (
        f"holds {size / GIB:.1f} GiB; reading it needs at least {needed / GIB:.0f} GiB of memory and this machine has "
        f"{free / GIB:.0f} GiB free. Read it on a larger machine, or record with a smaller max_entries"
    )
