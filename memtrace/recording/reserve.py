"""Address space that a recording keeps for itself."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

WORK_BYTES: Final = 128 << 20
END_BYTES: Final = 128 << 20


class AddressSpaceReserve:
    """Address space that is reserved, but never touched, and given back while Arrow works.

    Arrow aborts the process when the program has used up all of the address space (``ulimit -v``): with the reserve it
    always finds some. One part is given back for each piece of work; the program can take it in that time. The other
    part is kept until the recording ends, so that its last events, often an out-of-memory error, can be written.
    """

    def __init__(self) -> None:
        self._for_work: mmap.mmap | None = None
        self._for_end: mmap.mmap | None = None
        self._is_closed = False

    def acquire(self) -> None:
        """Reserve the address space.

        Raises:
            MemoryError: there is not so much left.
        """
        if self._is_closed:
            return
        try:
            self._for_end = self._for_end or _reserve(END_BYTES)
            self._for_work = self._for_work or _reserve(WORK_BYTES)
        except (OSError, ValueError, MemoryError):
            raise MemoryError("the process is close to its limit of address space (ulimit -v)") from None

    def release(self) -> None:
        """Give back the part for a piece of work."""
        block, self._for_work = self._for_work, None
        _free(block)

    def close(self) -> None:
        """Give back all of the address space for good."""
        self._is_closed = True
        self.release()
        block, self._for_end = self._for_end, None
        _free(block)


def _reserve(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)


def _free(block: mmap.mmap | None) -> None:
    if block is not None:
        with suppress(OSError, ValueError):
            block.close()
