"""Address space that a recording keeps for itself."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

RESERVED_BYTES: Final = 256 << 20


class AddressSpaceReserve:
    """Address space that is reserved, but never touched, and given back while Arrow works.

    Arrow aborts the process when the program has used up all of the address space (``ulimit -v``): with the reserve it
    always finds some. ``acquire`` fails first, and the recording ends.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._is_closed = False

    def acquire(self) -> None:
        """Reserve the address space.

        Raises:
            MemoryError: there is not so much left.
        """
        if self._block is None and not self._is_closed:
            try:
                self._block = mmap.mmap(
                    -1, RESERVED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
                )
            except (OSError, ValueError, MemoryError):
                raise MemoryError("the process is close to its limit of address space (ulimit -v)") from None

    def release(self) -> None:
        """Give the address space back."""
        block, self._block = self._block, None
        if block is not None:
            with suppress(OSError, ValueError):
                block.close()

    def close(self) -> None:
        """Give the address space back for good."""
        self._is_closed = True
        self.release()
