"""Memory that recordings leave out: the host memory that a plan moves tensors to, where the device is the CPU.

It is not allocated by torch. Without this, an observer would count it as memory of the CPU when it first sees a tensor
in it, like a NumPy array.
"""

from __future__ import annotations

import bisect
import sys
import threading

_lock = threading.Lock()
_begins: list[int] = []
_ends: list[int] = []


def exclude_memory(address: int, num_bytes: int) -> None:
    """Leave the memory from ``address`` on out of this process's recordings, also of one that runs."""
    with _lock:
        place = bisect.bisect(_begins, address)
        _begins.insert(place, address)
        _ends.insert(place, address + num_bytes)
        _tell_native()


def include_memory(address: int) -> None:
    """Undo ``exclude_memory``; to be called before the memory is freed."""
    with _lock:
        place = _begins.index(address)
        del _begins[place], _ends[place]
        _tell_native()


def is_excluded(address: int) -> bool:
    """Return whether an address lies in excluded memory."""
    place = bisect.bisect(_begins, address)
    return place > 0 and address < _ends[place - 1]


def excluded_ranges() -> list[tuple[int, int]]:
    """Return the excluded memory as ascending ranges [begin, end)."""
    return list(zip(_begins, _ends, strict=True))


def _tell_native() -> None:
    native = sys.modules.get("memtrace_native")
    if native is not None:
        native.exclude_memory(excluded_ranges())
