"""Scans a pickle and offers its lists of dicts as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO, Final

import numpy as np

from memtrace.readers.pickle_scanner.library import Scan, Scanner
from memtrace.readers.rows import Coded, DictRows, Row, Rows
from memtrace.readers.tables import Array

_CHUNK_BYTES: Final = 1 << 18


class TruncatedPickle(Exception):
    """The stream ends before the pickle does."""


def scan(scanner: Scanner, stream: BinaryIO, tables: Sequence[str], lists_of_tables: Sequence[str]) -> Any:
    """Return the pickled value with rows in place of lists of dicts.

    Args:
        scanner: the compiled scanner.
        stream: the pickle.
        tables: keys of the outermost dict whose values become rows if they are lists of dicts.
        lists_of_tables: keys whose values are lists of such lists. An outermost list becomes rows too.

    Raises:
        UnsupportedPickle: the pickle contains what the scanner does not know.
        TruncatedPickle: the stream ends before the pickle does.
    """
    pickled = Scan(scanner)
    root = _feed(pickled, stream)
    if pickled.is_dict(root):
        return {
            key: _convert(pickled, word, key, tables, lists_of_tables) for key, word in pickled.members(root).items()
        }
    return _rows_or_objects(pickled, root) if pickled.is_list(root) else _object(pickled, root)


def _feed(pickled: Scan, stream: BinaryIO) -> int:
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    view = memoryview(buffer)  # type: ignore[arg-type]
    while (root := pickled.result()) is None:
        # At most one read, so that bytes after the pickle matter as little as they do to the Python reader.
        num_bytes = stream.readinto1(view)  # type: ignore[attr-defined]
        if not num_bytes:
            raise TruncatedPickle
        pickled.feed(buffer[:num_bytes])
    return root


def _convert(pickled: Scan, word: int, key: str, tables: Sequence[str], lists_of_tables: Sequence[str]) -> Any:
    if key in tables:
        return _rows_or_objects(pickled, word)
    items = pickled.items(word) if key in lists_of_tables else None
    if items is None:
        return _object(pickled, word)
    return [_rows_or_objects(pickled, item) for item in items.tolist()]


def _rows_or_objects(pickled: Scan, word: int) -> Any:
    dicts = pickled.dicts(word)
    return _object(pickled, word) if dicts is None else ScannedRows(pickled, dicts)


def _object(pickled: Scan, word: int) -> Any:
    return pickled.objects(np.array([word], np.uint64))[0]


class ScannedRows(Rows):
    """Rows of a scanned pickle.

    Args:
        pickled: the pickle.
        dicts: the numbers of the dicts.
    """

    def __init__(self, pickled: Scan, dicts: Array) -> None:
        self._pickled = pickled
        self._dicts = dicts

    def __len__(self) -> int:
        return len(self._dicts)

    def values(self, key: str) -> Sequence[Any]:
        """Return the value of each row; None for a row without the key."""
        return self.coded(key).rows()

    def numbers(self, key: str) -> Sequence[Any] | Array:
        """Return the values as int64 if all of them are integers of 64 bits, otherwise as Python objects."""
        numbers = self._pickled.int64(self._dicts, key)
        return self.values(key) if numbers is None else numbers

    def coded(self, key: str) -> Coded:
        """Return a column; lists of the same elements have the same code."""
        codes, distinct = self._pickled.codes(self._dicts, key)
        return Coded(self._pickled.objects(distinct), codes)

    def row(self, number: int) -> Row:
        """Return one row as a dict."""
        row: Row = self._dicts_as_objects(self._dicts[number : number + 1])[0]
        return row

    def take(self, selected: Array) -> ScannedRows:
        """Return the rows that a mask selects."""
        return self if selected.all() else ScannedRows(self._pickled, self._dicts[selected])

    def children(self, key: str, row: str, what: str) -> tuple[Rows, Array]:
        """Return the rows of the lists under a key; see ``Rows.children``."""
        lists = [self._pickled.dicts(word) for word in self._pickled.words(self._dicts, key).tolist()]
        if any(dicts is None for dicts in lists):
            # Not valid: the rows as dicts give the message.
            return DictRows(self._dicts_as_objects(self._dicts)).children(key, row, what)
        valid = [dicts for dicts in lists if dicts is not None]
        joined = np.concatenate([np.zeros(0, np.uint32), *valid])
        return ScannedRows(self._pickled, joined), np.array(list(map(len, valid)), np.int64)

    def close(self) -> None:
        """Free all values of the pickle."""
        self._pickled.close()

    def _dicts_as_objects(self, dicts: Array) -> list[Any]:
        return self._pickled.objects(self._pickled.dict_words(dicts))
