"""Records of a binary format, encoded column by column: a Python loop over millions of records would take minutes.

    rows = joined(constant(b"K", len(sizes)), varints(sizes))   # one record for each size
    rows.to_bytes()

Fields of varying length (varints, optional fields) leave bytes unused in some rows; ``to_bytes`` drops those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.format.arrays import Array

CHUNK_ROWS: Final = 1 << 15
"""Records encoded at a time, so that the memory needed does not depend on the size of the trace."""
_BITS_PER_BYTE: Final = 7


@dataclass(frozen=True)
class ByteRows:
    """Equally many bytes for each record, of which some are unused."""

    data: Array
    """Bytes, records by positions."""
    is_used: Array
    """Whether the byte belongs to the record, records by positions."""

    def __len__(self) -> int:
        return len(self.data)

    def lengths(self) -> Array:
        """Return the number of bytes of each record."""
        lengths: Array = np.count_nonzero(self.is_used, axis=1)
        return lengths

    def to_bytes(self) -> bytes:
        """Return the records one after another."""
        content: bytes = self.data[self.is_used].tobytes()
        return content


def constant(content: bytes, num_rows: int) -> ByteRows:
    """Return the same bytes for every record."""
    data = np.broadcast_to(np.frombuffer(content, np.uint8), (num_rows, len(content)))
    return ByteRows(data, np.ones(data.shape, bool))


def little_endian(values: Array, num_bytes: int) -> ByteRows:
    """Return integers as ``num_bytes`` bytes each, lowest byte first; negative ones as two's complement."""
    data = values.astype("<i8").view(np.uint8).reshape(len(values), 8)[:, :num_bytes]
    return ByteRows(data, np.ones(data.shape, bool))


def varints(values: Array) -> ByteRows:
    """Return integers as the varints of protocol buffers; negative ones as two's complement of 64 bits."""
    unsigned = values.astype(np.int64).view(np.uint64)
    largest = int(unsigned.max(initial=0))
    width = max(1, -(-largest.bit_length() // _BITS_PER_BYTE))
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(_BITS_PER_BYTE)
    groups = unsigned[:, None] >> shifts
    is_used = groups != 0
    is_used[:, 0] = True
    data = (groups & np.uint64(0x7F)).astype(np.uint8)
    # All but the last group of a number have the highest bit set.
    data[:, :-1] |= is_used[:, 1:].astype(np.uint8) << 7
    return ByteRows(data, is_used)


def joined(*columns: ByteRows) -> ByteRows:
    """Return records that consist of a piece of each column, in this order."""
    return ByteRows(
        np.concatenate([column.data for column in columns], axis=1),
        np.concatenate([column.is_used for column in columns], axis=1),
    )


def only_where(rows: ByteRows, is_present: Array) -> ByteRows:
    """Return the records, empty where ``is_present`` is False."""
    return ByteRows(rows.data, rows.is_used & is_present[:, None])
