"""Columns that a part stores in a shorter form, and how they are restored when the part is read.

The same steps run again and again, so values that are equal in every step compress to almost nothing: the distance of a
block from the newest one instead of its number, the time between two operator calls instead of the time of day. A form
is used in a part only where it gives back exactly the same values; other parts store the column itself. The schema
(``Column.stored``) says what the stored columns mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.format import arrays
from memtrace.format.arrays import Array
from memtrace.format.encode import encode_numbers
from memtrace.format.keyframes import find_rows
from memtrace.format.schema import COPIES, EVENT_KINDS, find_column, stored_schema

if TYPE_CHECKING:
    import pyarrow as pa

Keyframe = Mapping[str, Array]
"""The columns ``block_id`` and ``address`` of the table ``live``."""
NEWEST_BLOCK_KEY: Final = b"memtrace.newest_block"
"""Key in the metadata of a file of ``events``: the largest block_id before the part, -1 where there is none."""
COPIES_KEY: Final = b"memtrace.copies"
"""Key in the metadata of a file: names of columns that equal another one (``schema.COPIES``), separated by commas."""
_FREE: Final = EVENT_KINDS.index("free")
_BEGINNINGS: Final = tuple(EVENT_KINDS.index(kind) for kind in ("alloc", "baseline"))
_SOURCES: Final = {
    ("events", "time_ns"): ("elapsed_ns",),
    ("events", "block_id"): ("block_reference",),
    ("events", "address"): ("first_address", "kind", "block_id"),
    ("ops", "start_ns"): ("gap_ns", "duration_ns"),
}
"""What a column is restored from: the column that stands for it, and others of its table."""


@dataclass(frozen=True)
class EventValues:
    """Columns of ``events`` that have a shorter form.

    Attributes:
        kind: codes of EVENT_KINDS, int8.
        time_ns: None where a time is null.
        block_id: -1 where ``block_is_known`` is False.
        address: anything where ``address_is_known`` is False.
    """

    kind: Array
    time_ns: Array | None
    block_id: Array
    block_is_known: Array
    address: Array
    address_is_known: Array


@dataclass(frozen=True)
class EventForms:
    """What a part stores in the place of columns of ``events``; None: the column itself.

    Attributes:
        elapsed_ns: in the place of ``time_ns``.
        block_reference: in the place of ``block_id``, int32 or int64.
        address_is_stored: the rows in which ``first_address`` is not null.
    """

    elapsed_ns: Array | None
    block_reference: Array | None
    address_is_stored: Array | None


FindEventForms = Callable[[EventValues, int, Keyframe], EventForms]
"""``find_event_forms``, or a faster function with the same results."""


def shorten(
    table: str,
    rows: pa.Table,
    newest_block: int,
    keyframe: Keyframe,
    find_forms: FindEventForms | None = None,
) -> tuple[pa.Table, dict[bytes, bytes]]:
    """Return the rows of a part as they are stored, and metadata of the file.

    Args:
        table: name of the table.
        rows: the rows; columns that are null in every row may be absent.
        newest_block: largest block_id of all rows before the part, -1 where there is none.
        keyframe: of the part.
        find_forms: finds the stored forms of columns of ``events``; None: ``find_event_forms``.
    """
    metadata: dict[bytes, bytes] = {}
    rows = _without_copies(table, _without_null_columns(table, rows), metadata)
    if table == "events":
        rows = _shorten_events(rows, newest_block, keyframe, find_forms or find_event_forms, metadata)
    elif table == "ops":
        rows = _shorten_starts(rows)
    return rows, metadata


def sources(table: str, column: str, present: set[str], metadata: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Return the columns of a file that a column is read from; none where it is null in every row.

    Args:
        table: name of the table.
        column: name of the column.
        present: names of the columns that the file has.
        metadata: of the file.
    """
    if column in present:
        return (column,)
    if column in _copies(metadata) and (original := COPIES.get((table, column))) is not None:
        return sources(table, original, present, metadata)
    stands_for, *others = _SOURCES.get((table, column), ("",))
    if stands_for not in present:
        return ()
    return (stands_for, *(name for other in others for name in sources(table, other, present, metadata)))


class StoredRows:
    """The rows of one part as its file has them.

    Args:
        table: name of the table.
        rows: the columns that were read.
        metadata: of the file.
        read_keyframe: reads columns of the keyframe of the part.
    """

    def __init__(
        self,
        table: str,
        rows: pa.Table,
        metadata: Mapping[bytes, bytes],
        read_keyframe: Callable[[tuple[str, ...]], pa.Table],
    ) -> None:
        self._table = table
        self._rows = rows
        self._metadata = metadata
        self._read_keyframe = read_keyframe
        self._restored: dict[str, pa.ChunkedArray] = {}

    def column(self, name: str) -> pa.ChunkedArray | None:
        """Return a column as the schema describes it; None where it is null in every row.

        Raises:
            ValueError: the metadata that it is restored with is missing.
            TraceError: a kind of event is unknown.
        """
        import pyarrow as pa

        if name in self._rows.column_names:
            return self._rows.column(name)
        if name not in self._restored:
            values = self._restore(name)
            if values is None:
                return None
            self._restored[name] = values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])
        return self._restored[name]

    def _restore(self, name: str) -> pa.Array | pa.ChunkedArray | None:
        if name in _copies(self._metadata):
            return self.column(COPIES[self._table, name])
        stands_for = _SOURCES.get((self._table, name), ("",))[0]
        if stands_for not in self._rows.column_names:
            return None
        restore = {
            "time_ns": self._times,
            "block_id": self._block_ids,
            "address": self._addresses,
            "start_ns": self._starts,
        }[name]
        return restore(self._rows.column(stands_for))

    def _times(self, elapsed: pa.ChunkedArray) -> pa.Array:
        import pyarrow as pa

        values, known = _values(elapsed)
        return encode_numbers(np.cumsum(values), known if elapsed.null_count else None, pa.int64())

    def _block_ids(self, references: pa.ChunkedArray) -> pa.Array:
        import pyarrow as pa

        values, known = _values(references)
        newest = int(self._metadata[NEWEST_BLOCK_KEY]) + np.cumsum((values == 0) & known, dtype=np.int64)
        block = np.where(values < 0, -1 - values.astype(np.int64), newest - np.maximum(values - 1, 0))
        return encode_numbers(block, known if references.null_count else None, pa.int64())

    def _addresses(self, stored: pa.ChunkedArray) -> pa.Array:
        import pyarrow as pa

        values, known = _values(stored)
        kinds, blocks = self.column("kind"), self.column("block_id")
        if kinds is not None and blocks is not None and stored.null_count:
            keyframe = self._read_keyframe(("block_id", "address"))
            frees = np.flatnonzero((_kind_codes(kinds) == _FREE) & ~known)
            first, is_known = _first_addresses(
                _kind_codes(kinds), arrays.integers([blocks], np.int64), values, known, frees,
                {name: arrays.integers([keyframe.column(name)], np.int64) for name in ("block_id", "address")},
            )  # fmt: skip
            values, known = values.copy(), known.copy()
            values[frees], known[frees] = first, is_known
        return encode_numbers(values, known, pa.int64())

    def _starts(self, gaps: pa.ChunkedArray) -> pa.Array:
        import pyarrow as pa

        gap, known = _values(gaps)
        durations = self.column("duration_ns")
        if durations is None:
            raise ValueError("it lacks the column duration_ns")
        duration, has_duration = _values(durations)
        start = np.cumsum(gap) + np.cumsum(duration) - duration
        is_known = known & has_duration
        return encode_numbers(start, None if bool(is_known.all()) else is_known, pa.int64())


def _without_null_columns(table: str, rows: pa.Table) -> pa.Table:
    """Leave out optional columns that are null in every row."""
    kept = [
        name
        for name in rows.column_names
        if find_column(table, name).is_required or rows.column(name).null_count < rows.num_rows
    ]
    return rows if len(kept) == rows.num_columns else rows.select(kept)


def _without_copies(table: str, rows: pa.Table, metadata: dict[bytes, bytes]) -> pa.Table:
    """Leave out columns that are equal to another one in every row."""
    copies = [
        copy
        for (of_table, copy), original in COPIES.items()
        if of_table == table and copy in rows.column_names and _are_equal(rows.column(copy), rows.column(original))
    ]
    if copies:
        metadata[COPIES_KEY] = ",".join(copies).encode()
        rows = rows.drop_columns(copies)
    return rows


def _are_equal(first: pa.ChunkedArray, second: pa.ChunkedArray) -> bool:
    if _places(first) == _places(second):
        return True  # the same memory
    if first.null_count != second.null_count:
        return False
    (a, known_a), (b, known_b) = _values(first), _values(second)
    return bool(np.array_equal(known_a, known_b) and np.array_equal(a[known_a], b[known_b]))


def find_event_forms(events: EventValues, newest_block: int, keyframe: Keyframe) -> EventForms:
    """Return how the rows of a part store columns of ``events``.

    Args:
        events: the rows.
        newest_block: largest block_id of all rows before the part, -1 where there is none.
        keyframe: of the part.
    """
    return EventForms(
        None if events.time_ns is None else np.diff(events.time_ns, prepend=0),
        _block_references(events, newest_block),
        _stored_addresses(events, keyframe),
    )


def _block_references(events: EventValues, newest_block: int) -> Array | None:
    block, known = events.block_id, events.block_is_known
    newest = np.maximum.accumulate(np.where(known, np.maximum(block, newest_block), newest_block))
    growth = np.diff(newest, prepend=newest_block)
    if not len(block) or growth.max() > 1 or (block[known] < 0).any() or newest[-1] >= arrays.NARROW_LIMIT:
        return None  # not numbered in the order of the rows
    reference: Array = np.where(block > newest_block, newest - block + 1, -1 - block)
    reference[growth == 1] = 0
    return reference


def _stored_addresses(events: EventValues, keyframe: Keyframe) -> Array | None:
    address, known = events.address, events.address_is_known
    is_free = events.kind == _FREE
    frees = np.flatnonzero(is_free)
    first, has_first = _first_addresses(events.kind, events.block_id, address, known & ~is_free, frees, keyframe)
    if bool((has_first & ~known[frees]).any()):
        return None  # a block whose address is known lacks it where it is freed
    is_stored: Array = known.copy()
    is_stored[frees[has_first & (first == address[frees])]] = False
    return is_stored


def _first_addresses(
    kind: Array, block: Array, address: Array, known: Array, frees: Array, keyframe: Keyframe
) -> tuple[Array, Array]:
    """Return the address at which the block of each free began, in the part or in its keyframe, and whether it did."""
    begins = np.flatnonzero(np.isin(kind, _BEGINNINGS) & (block >= 0))
    rows, in_part = find_rows(block[begins], block[frees])
    first, is_known = np.full(len(frees), -1, np.int64), np.zeros(len(frees), bool)
    first[in_part] = address[begins[rows[in_part]]]
    is_known[in_part] = known[begins[rows[in_part]]]
    older = np.flatnonzero(~in_part & (block[frees] >= 0))
    rows, found = find_rows(keyframe["block_id"], block[frees[older]])
    older, rows = older[found], rows[found]
    first[older] = keyframe["address"][rows]
    is_known[older] = first[older] != -1
    return first, is_known


def _places(column: pa.ChunkedArray) -> list[tuple[int, int, list[int]]]:
    """Return where in memory a column is."""
    return [
        (chunk.offset, len(chunk), [0 if buffer is None else buffer.address for buffer in chunk.buffers()])
        for chunk in column.chunks
    ]


def _shorten_events(
    rows: pa.Table, newest_block: int, keyframe: Keyframe, find_forms: FindEventForms, metadata: dict[bytes, bytes]
) -> pa.Table:
    import pyarrow as pa

    time_ns, times_are_known = _values(rows.column("time_ns"))
    block_id, block_is_known = _values(rows.column("block_id"))
    if rows.column("block_id").null_count:
        block_id = np.where(block_is_known, block_id, -1)
    if has_addresses := "address" in rows.column_names:
        address, address_is_known = _values(rows.column("address"))
    else:
        address, address_is_known = np.zeros(len(block_id), np.int64), np.zeros(len(block_id), bool)
    kind = _kind_codes(rows.column("kind"))
    times = time_ns if bool(times_are_known.all()) else None
    forms = find_forms(
        EventValues(kind, times, block_id, block_is_known, address, address_is_known), newest_block, keyframe
    )
    if forms.elapsed_ns is not None:
        rows = _replace(rows, "events", "time_ns", encode_numbers(forms.elapsed_ns, None, pa.int64()))
    if forms.block_reference is not None:
        metadata[NEWEST_BLOCK_KEY] = str(newest_block).encode()
        known = block_is_known if rows.column("block_id").null_count else None
        rows = _replace(rows, "events", "block_id", encode_numbers(forms.block_reference, known, pa.int32()))
    if has_addresses and forms.address_is_stored is not None:
        rows = _replace(rows, "events", "address", encode_numbers(address, forms.address_is_stored, pa.int64()))
    return rows


def _shorten_starts(rows: pa.Table) -> pa.Table:
    import pyarrow as pa

    if "duration_ns" not in rows.column_names:
        return rows
    start, duration = rows.column("start_ns"), rows.column("duration_ns")
    if start.null_count or duration.null_count:
        return rows
    start_ns, duration_ns = _values(start)[0], _values(duration)[0]
    gap_ns = start_ns.copy()
    gap_ns[1:] -= (start_ns + duration_ns)[:-1]
    return _replace(rows, "ops", "start_ns", encode_numbers(gap_ns, None, pa.int64()))


def _replace(rows: pa.Table, table: str, name: str, stored: pa.Array) -> pa.Table:
    """Store another column in the place of one."""
    column = find_column(table, name).stored
    assert column is not None
    field = stored_schema(table, (column.name,)).field(0)
    return rows.set_column(rows.column_names.index(name), field, stored)


def _values(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """Return the values of a column of integers, anything where it is null, and where it is not null."""
    chunks = column.chunks
    values = [arrays.raw_numbers(chunk) for chunk in chunks]
    known = [arrays.valid(chunk) for chunk in chunks]
    if len(chunks) == 1:
        return values[0], known[0]
    return (np.concatenate(values), np.concatenate(known)) if chunks else (np.empty(0, np.int64), np.empty(0, bool))


def _kind_codes(kinds: pa.ChunkedArray) -> Array:
    return arrays.codes([kinds], arrays.vocabulary_coder(EVENT_KINDS, "kind"))


def _copies(metadata: Mapping[bytes, bytes]) -> list[str]:
    return metadata.get(COPIES_KEY, b"").decode(errors="replace").split(",")
