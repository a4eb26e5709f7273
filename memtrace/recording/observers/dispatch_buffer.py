"""Rows and names that the dispatch observer has recorded and the writer has not taken yet."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Hashable
from operator import itemgetter
from typing import Final

import numpy as np

from memtrace.format.schema import EVENT_KINDS, NAME_KINDS
from memtrace.recording.observers import COLUMN_DTYPES, Batch

_STACK: Final = NAME_KINDS.index("stack")
_BEGINNINGS: Final = tuple(EVENT_KINDS.index(kind) for kind in ("alloc", "baseline"))
_KIND, _BLOCK = (list(COLUMN_DTYPES["events"]).index(column) for column in ("kind", "block_id"))
_event_time = itemgetter(list(COLUMN_DTYPES["events"]).index("time_ns"))


class RecordBuffer:
    """Collects rows of the trace's tables and the names they refer to.

    Attributes:
        lock: guards all rows; recursive, so that several rows can be added as one.
        rows: rows by table, in the column order of COLUMN_DTYPES; hold ``lock`` to change them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.rows: dict[str, list[tuple[int, ...]]] = {table: [] for table in COLUMN_DTYPES}
        self._new_names: list[tuple[int, int, str, list[int]]] = []
        self._name_ids: dict[Hashable, int] = {}

    def add(self, table: str, row: tuple[int, ...]) -> None:
        """Append a row to a table."""
        with self.lock:
            self.rows[table].append(row)

    def name_id(self, kind: int, text: str) -> int:
        """See ``Observer.name_id``."""
        return self._intern((kind, text), kind, text, [])

    def stack_id(self, key: tuple[object, ...]) -> int | None:
        """The id of a known stack; None if it is new."""
        return self._name_ids.get(key)

    def add_stack(self, key: tuple[object, ...], frames: list[int]) -> int:
        """The id of a stack, which ``key`` identifies from now on. ``frames`` are the ids of its frames."""
        return self._intern(key, _STACK, "", frames)

    def _intern(self, key: Hashable, kind: int, text: str, frames: list[int]) -> int:
        with self.lock:
            known = self._name_ids.get(key)
            if known is None:
                known = self._name_ids[key] = len(self._name_ids)
                self._new_names.append((known, kind, text, frames))
            return known

    def drain(self, until_ns: int | None = None) -> Batch:
        """Return and remove rows and new names.

        Args:
            until_ns: later events stay, with the labels of the blocks that begin with them; events are then in the
                order of time. None: everything is removed.
        """
        with self.lock:
            rows, self.rows = self.rows, {table: [] for table in COLUMN_DTYPES}
            names, self._new_names = self._new_names, []
            if until_ns is not None:
                self._keep_later(rows, until_ns)
        return self._encode(rows, names)

    def _keep_later(self, rows: dict[str, list[tuple[int, ...]]], until_ns: int) -> None:
        events = sorted(rows["events"], key=_event_time)
        first_later = bisect.bisect_right(events, until_ns, key=_event_time)
        rows["events"], self.rows["events"] = events[:first_later], events[first_later:]
        later_blocks = {row[_BLOCK] for row in self.rows["events"] if row[_KIND] in _BEGINNINGS}
        self.rows["labels"] = [row for row in rows["labels"] if row[0] in later_blocks]
        rows["labels"] = [row for row in rows["labels"] if row[0] not in later_blocks]

    def _encode(self, rows: dict[str, list[tuple[int, ...]]], names: list[tuple[int, int, str, list[int]]]) -> Batch:
        batch: Batch = {"names": names}
        for table, columns in COLUMN_DTYPES.items():
            values = list(zip(*rows[table], strict=True)) or [()] * len(columns)
            # Rows may leave out the last columns of a table, which are null then.
            for (column, dtype), data in zip(columns.items(), values, strict=False):
                batch[f"{table}.{column}"] = np.array(data, dtype).tobytes()
        return batch
