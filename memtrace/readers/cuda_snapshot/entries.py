"""Reads the history of a CUDA snapshot (``device_traces``) into columns, in the order of the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final

import numpy as np

from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.annotations import Range
from memtrace.readers.fields import addresses, integers, sizes
from memtrace.readers.lifetimes import is_one_of
from memtrace.readers.rows import Coded, FieldError, Row, Rows, rows_of
from memtrace.readers.tables import Array

KIND: Final = {kind: np.int8(code) for code, kind in enumerate(EVENT_KINDS)}
# Early versions of torch wrote `free` instead of `free_completed`.
_ACTIONS: Final = {
    "alloc": KIND["alloc"],
    "free_requested": KIND["free_requested"],
    "free_completed": KIND["free"],
    "free": KIND["free"],
    "segment_alloc": KIND["segment_alloc"],
    "segment_free": KIND["segment_free"],
    "segment_map": KIND["segment_map"],
    "segment_unmap": KIND["segment_unmap"],
    "oom": KIND["oom"],
    "snapshot": KIND["snapshot"],
}
# Annotations of the program, which are not events of the allocator.
_ANNOTATION_ACTIONS: Final = frozenset({"annotate", "user_defined"})
# Fields that are kept as the file contains them.
RAW_KEYS: Final = ("frames", "forward_frames", "user_metadata", "compile_context")
_KEYS: Final = ("action", "addr", "size", "stream", "time_us", "pool_id", *RAW_KEYS)
ADDRESSLESS: Final = (KIND["oom"], KIND["snapshot"])
"""Kinds of entries whose address means nothing."""
NS_PER_US: Final = 1000
MAX_DEVICES: Final = 127
_MAX_TIME_RANGE_US: Final = 30 * 365 * 86_400 * 1_000_000
_MAX_NAMED_ACTIONS: Final = 5
_COLUMNS: Final = ("kind", "device", "address", "size", "stream", "device_free", "pool")


@dataclass(frozen=True)
class SnapshotEntries:
    """The entries of all devices; each array has one element per entry."""

    raw: Mapping[str, Coded]
    """The fields ``RAW_KEYS`` as the file contains them; None where an entry does not have the field."""
    kind: Array
    """Index into ``EVENT_KINDS``."""
    device: Array
    """Number of the CUDA device."""
    address: Array
    """0 for the kinds oom and snapshot."""
    size: Array
    """Bytes."""
    stream: Array
    device_free: Array
    """Bytes free on the device for the kind oom, -1 for the others."""
    pool: Array
    """Number of the memory pool as in the schema, -1 where the entry does not state it."""
    time_us: Array | None
    """Microseconds since the Unix epoch; None if the file has no valid times."""
    notes: tuple[str, ...]
    """Sentences on what was ignored."""

    def __len__(self) -> int:
        return len(self.kind)


def read_entries(traces: object) -> SnapshotEntries:
    """Read ``device_traces``.

    Raises:
        FieldError: a value is not a list of entries of an allocator.
    """
    if not isinstance(traces, list | tuple):
        raise FieldError(f"'device_traces' has type {type(traces).__name__} instead of list")
    if len(traces) > MAX_DEVICES:
        raise FieldError(f"'device_traces' has {len(traces)} devices; the limit is {MAX_DEVICES}")
    histories = [rows_of(trace, f"the history of device {number}", _KEYS) for number, trace in enumerate(traces)]
    parts = [_device_entries(rows, number) for number, rows in enumerate(histories) if len(rows)]
    parts = [part for part in parts if len(part)]
    if not parts:
        return _device_entries(rows_of([], "the history of device 0"), 0)
    return parts[0] if len(parts) == 1 else _merged(parts)


def _device_entries(rows: Rows, device: int) -> SnapshotEntries:
    what = f"entry {{}} of device {device}"
    kind, notes = _kinds(rows.coded("action"), device)
    rows, kind = rows.take(kind >= 0), kind[kind >= 0]
    has_address = ~is_one_of(kind, ADDRESSLESS)
    address = np.zeros(len(rows), np.int64)
    address[np.flatnonzero(has_address)] = addresses(rows.take(has_address).numbers("addr"), "addr", what)
    return SnapshotEntries(
        raw={key: rows.coded(key) for key in RAW_KEYS},
        kind=kind,
        device=np.full(len(rows), device, np.int16),
        address=address,
        size=sizes(rows.numbers("size"), "size", what, is_failed_request=kind == KIND["oom"]),
        stream=_streams(rows.coded("stream"), what),
        device_free=_device_free(rows, kind, what),
        pool=_entry_pools(rows.coded("pool_id"), kind),
        time_us=_times(rows.numbers("time_us"), what),
        notes=notes,
    )


def _kinds(actions: Coded, device: int) -> tuple[Array, tuple[str, ...]]:
    """Return the kind of each entry, -1 for actions that are not the allocator's, and notes on ignored entries."""
    try:
        kinds = np.fromiter(map(_ACTIONS.get, actions.values, repeat(-1)), np.int8, len(actions.values))
    except TypeError:
        raise FieldError(f"an entry of device {device} has an 'action' that is not a string") from None
    kind = actions.spread(kinds)
    names = {actions.values[index] for index in np.flatnonzero(kinds < 0).tolist()}
    if None in names:
        raise FieldError(f"an entry of device {device} has no 'action'")
    unknown = sorted(ascii(name)[:40] for name in names - _ANNOTATION_ACTIONS)
    if not unknown:
        return kind, ()
    return kind, (f"Entries with unknown actions were ignored: {', '.join(unknown[:_MAX_NAMED_ACTIONS])}",)


def _streams(streams: Coded, what: str) -> Array:
    try:
        return streams.spread(addresses([value or 0 for value in streams.values], "stream", what))
    except FieldError:
        # For the number of the row in the message.
        return addresses([value or 0 for value in streams.rows()], "stream", what)


def _device_free(rows: Rows, kind: Array, what: str) -> Array:
    if not (kind == KIND["oom"]).any():
        return np.broadcast_to(np.int64(-1), len(rows))  # takes no memory
    free = np.full(len(rows), -1, np.int64)
    for number in np.flatnonzero(kind == KIND["oom"]).tolist():
        row = rows.row(number)
        if "device_free" in row:
            free[number] = sizes([row["device_free"]], "device_free", what.format(number))[0]
    return free


def _entry_pools(pools: Coded, kind: Array) -> Array:
    """Return the pool of each entry, -1 for frees, which repeat the pool of their allocation."""
    if not any(pools.values):
        return np.broadcast_to(np.int64(-1), len(pools))
    is_read = ~is_one_of(kind, (KIND["free_requested"], KIND["free"], KIND["snapshot"]))
    return np.where(is_read, pool_numbers(pools), -1)


def pool_numbers(pools: Coded) -> Array:
    """Return the numbers of memory pools as in the schema for torch's pairs; -1 for values that are not such pairs."""
    known: dict[int, int] = {}
    numbers = (known.get(id(value)) or known.setdefault(id(value), _pool_number(value)) for value in pools.values)
    return pools.spread(np.fromiter(numbers, np.int64, len(pools.values)))


def _pool_number(pair: object) -> int:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return -1
    owner, number = pair
    if not (isinstance(owner, int) and isinstance(number, int) and 0 <= owner < 2**60 and 0 <= number < 2**60):
        return -1
    # One of the two numbers is 0 in every pool that torch creates.
    return 2 * number if owner == 0 else 2 * owner + 1 if number == 0 else -1


def _times(values: Sequence[Any] | Array, what: str) -> Array | None:
    if not len(values) or (not isinstance(values, np.ndarray) and None in values):
        return None
    times = integers(values, "time_us", what)
    return times if int(times.max()) - int(times.min()) < _MAX_TIME_RANGE_US else None


def _merged(parts: list[SnapshotEntries]) -> SnapshotEntries:
    """Merge the entries of several devices: by time if all have times, otherwise one device after another."""
    times = [part.time_us for part in parts]
    merged_time = None
    order = np.arange(sum(map(len, parts)))
    if all(time is not None for time in times):
        merged_time = np.concatenate([time for time in times if time is not None])
        # Within a device, the order of the list is that of the events even if the clock runs backwards.
        rising = np.concatenate([np.maximum.accumulate(time) for time in times if time is not None])
        order = np.argsort(rising, kind="stable")
        merged_time = merged_time[order]
        if int(merged_time.max()) - int(merged_time.min()) >= _MAX_TIME_RANGE_US:
            merged_time = None
    return SnapshotEntries(
        raw={key: Coded.joined([part.raw[key] for part in parts]).take(order) for key in RAW_KEYS},
        time_us=merged_time,
        notes=tuple(note for part in parts for note in part.notes),
        **{name: _joined(parts, name)[order] for name in _COLUMNS},
    )


def _joined(parts: list[SnapshotEntries], name: str) -> Array:
    return np.concatenate([getattr(part, name) for part in parts])


def complete_frees(entries: SnapshotEntries, pending: Array) -> tuple[SnapshotEntries, bool]:
    """Treat requested frees as completed if the recording left out completed frees (``skip_actions``).

    Args:
        entries: the history.
        pending: addresses of the blocks that wait for a stream when the snapshot is taken.

    Returns:
        The history, and whether requested frees were changed to completed frees.
    """
    requested = entries.kind == KIND["free_requested"]
    if (entries.kind == KIND["free"]).any() or np.isin(entries.address[requested], pending).all():
        return entries, False
    return replace(entries, kind=np.where(requested, KIND["free"], entries.kind)), True


def times_ns(entries: SnapshotEntries) -> Array:
    """Return the nanoseconds since the first entry, or the numbers of the entries if the file has no times."""
    if entries.time_us is None:
        return np.arange(len(entries), dtype=np.int64)
    times: Array = (entries.time_us - entries.time_us[0]) * NS_PER_US
    return times


def read_ranges(annotations: Sequence[Row], *, t0_us: int, last_ns: int) -> list[Range]:
    """Read the annotated ranges.

    An end belongs to the latest start with the same name on the same device.

    Args:
        annotations: ``external_annotations`` of the snapshot.
        t0_us: microseconds since the Unix epoch at which the trace begins.
        last_ns: end of the trace, which also ends ranges without an end.
    """
    times = integers([row.get("time_us") for row in annotations], "time_us", "annotation {}")
    open_starts: dict[tuple[str, object], list[int]] = {}
    ranges = []
    for row, time in zip(annotations, times.tolist(), strict=True):
        name, stage, device = row.get("name"), row.get("stage"), row.get("device")
        if not isinstance(name, str) or abs(time - t0_us) >= _MAX_TIME_RANGE_US:
            continue
        starts = open_starts.setdefault((name, device if isinstance(device, int) else None), [])
        time_ns = (time - t0_us) * NS_PER_US
        if stage == "START":
            starts.append(time_ns)
        elif stage == "END" and starts:
            start = starts.pop()
            ranges.append(Range(name, start, max(start, time_ns)))
    for (name, _), starts in open_starts.items():
        ranges.extend(Range(name, start, max(start, last_ns)) for start in starts)
    return ranges
