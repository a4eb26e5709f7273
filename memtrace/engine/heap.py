"""Settings of the heap for processes that do nothing but analyze traces."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_M_TRIM_THRESHOLD: Final = -1  # malloc.h of glibc
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""The largest value that glibc accepts on 64-bit systems."""
_TRIM_THRESHOLD_BYTES: Final = 1 << 30


def keep_freed_memory() -> None:
    """Have this process reuse the memory that it frees instead of returning it to the operating system.

    NumPy and Arrow allocate and free arrays of some MiB all the time. By default each is mapped anew, and the kernel
    zeroes its pages again. The setting is for processes of memtrace's own, never for one that runs a user's program.
    Without glibc it does nothing.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    # Either setting also ends the adjustment of both at run time, so one alone would be worse than none.
    if mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES):
        import pyarrow as pa

        pa.set_memory_pool(pa.system_memory_pool())
