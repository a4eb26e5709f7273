"""Pickles of long lists of dictionaries, encoded column by column: ``pickle`` would need all of them in memory.

Protocol 2 with the opcodes that PyTorch's own snapshots consist of, which its viewer knows. Texts and lists that many
dictionaries share are pickled first and then referred to.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from memtrace.exporters.byte_rows import ByteRows, constant, joined, little_endian, only_where
from memtrace.format.arrays import Array

START: Final = b"\x80\x02"
STOP: Final = b"."
EMPTY_DICT: Final = b"}"
EMPTY_LIST: Final = b"]"
MARK: Final = b"("
SET_ITEMS: Final = b"u"
APPENDS: Final = b"e"
_GET: Final = b"j"
_TEXT: Final = b"X"
_INT32: Final = b"J"
_LONG: Final = b"\x8a"
_BATCH: Final = 1000
"""Elements appended at a time, as ``pickle`` does it: the viewer passes them as arguments of one call."""
_PROTOCOL: Final = 2


class SharedObjects:
    """Objects that are pickled once, at the start, and referred to from everywhere else."""

    def __init__(self, *objects: Sequence[Any]) -> None:
        """Pickle the elements of ``objects``, each of which must be distinct."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, _PROTOCOL)
        pickler.dump(objects)
        memo = pickler.memo.copy()
        self.content = buffer.getvalue()[len(START) : -len(STOP)]
        """The pickle of a tuple of ``objects``, without start and end."""
        self.index = [np.array([memo[id(each)][0] for each in group], np.int64) for group in objects]
        """For each of ``objects`` the numbers of its elements in the memo."""


def plain_pickle(value: Any) -> bytes:
    """Return the pickle of a value, without start and end. It reuses the memo: nothing may refer to that afterwards."""
    return pickle.dumps(value, _PROTOCOL)[len(START) : -len(STOP)]


def text(value: str) -> bytes:
    """Return the opcodes that push a text."""
    content = value.encode()
    return _TEXT + len(content).to_bytes(4, "little") + content


def references(indices: Array) -> ByteRows:
    """Return the opcodes that push a shared object each."""
    return joined(constant(_GET, len(indices)), little_endian(indices, 4))


def integers(values: Array, *, unsigned: bool = False) -> ByteRows:
    """Return the opcodes that push an integer each.

    Args:
        values: the integers.
        unsigned: negative values are two's complements of addresses from 2**63 on.
    """
    if len(values) and int(values.min()) >= -(1 << 31) and int(values.max()) < 1 << 31 and not unsigned:
        return joined(constant(_INT32, len(values)), little_endian(values, 4))
    # Only the numbers that need it have a ninth byte: the viewer computes with those as with another type.
    is_long = (values < 0) & unsigned
    return joined(
        constant(_LONG, len(values)),
        little_endian(8 + is_long, 1),
        little_endian(values, 8),
        only_where(constant(b"\0", len(values)), is_long),
    )


def dictionaries(items: Mapping[int, ByteRows], num_rows: int) -> ByteRows:
    """Return the opcodes that push a dictionary each.

    Args:
        items: number of each key in the memo, and its values; a key is left out where its value has no bytes.
        num_rows: how many dictionaries there are.
    """
    columns = []
    for key, values in items.items():
        columns += [
            only_where(constant(_GET + key.to_bytes(4, "little"), num_rows), np.asarray(values.is_used.any(axis=1))),
            values,
        ]
    return joined(constant(EMPTY_DICT + MARK, num_rows), *columns, constant(SET_ITEMS, num_rows))


def append_all(chunks: Iterator[ByteRows]) -> Iterator[bytes]:
    """Yield the opcodes that append elements to the list on top of the stack."""
    for rows in chunks:
        count = np.arange(len(rows))
        is_last: Array = (count % _BATCH == _BATCH - 1) | (count == len(rows) - 1)
        mark = only_where(constant(MARK, len(rows)), count % _BATCH == 0)
        yield joined(mark, rows, only_where(constant(APPENDS, len(rows)), is_last)).to_bytes()
