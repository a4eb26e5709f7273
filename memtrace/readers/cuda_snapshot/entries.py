"""Reads the history of a CUDA snapshot (``device_traces``) into columns, in the order of the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, repeat
from typing import Any, Final

import numpy as np

from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.annotations import Range
from memtrace.readers.fields import FieldError, Row, addresses, column, columns, integers, rows_of, sizes
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
NS_PER_US: Final = 1000
MAX_DEVICES: Final = 127
_MAX_TIME_RANGE_US: Final = 30 * 365 * 86_400 * 1_000_000
_MAX_NAMED_ACTIONS: Final = 5
_COLUMNS: Final = ("kind", "device", "address", "size", "stream", "device_free", "pool")


@dataclass(frozen=True)
class SnapshotEntries:
    """The entries of all devices; each array has one element per entry."""

    raw: Mapping[str, list[Any]]
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
    parts = [_device_entries(trace, number) for number, trace in enumerate(traces)]
    parts = [part for part in parts if len(part)]
    if not parts:
        return _device_entries([], 0)
    return parts[0] if len(parts) == 1 else _merged(parts)


def _device_entries(trace: object, device: int) -> SnapshotEntries:
    history = f"the history of device {device}"
    what = f"entry {{}} of device {device}"
    if not isinstance(trace, list | tuple):
        rows_of(trace, history)
    rows: Sequence[Row] = trace  # type: ignore[assignment]
    fields = columns(rows, _KEYS, history)
    kind, notes = _kinds(fields["action"], device)
    keep = kind >= 0
    if not keep.all():
        chosen = keep.tolist()
        rows = list(compress(rows, chosen))
        fields = {key: list(compress(values, chosen)) for key, values in fields.items()}
        kind = kind[keep]
    has_address = ~np.isin(kind, [KIND["oom"], KIND["snapshot"]])
    address = np.zeros(len(rows), np.int64)
    address[has_address] = addresses(list(compress(fields["addr"], has_address.tolist())), "addr", what)
    return SnapshotEntries(
        raw={key: fields[key] for key in RAW_KEYS},
        kind=kind,
        device=np.full(len(rows), device, np.int16),
        address=address,
        size=sizes(fields["size"], "size", what, is_failed_request=kind == KIND["oom"]),
        stream=_streams(fields["stream"], what),
        device_free=_device_free(rows, kind, what),
        pool=_entry_pools(fields["pool_id"], kind),
        time_us=_times(fields["time_us"], what),
        notes=notes,
    )


def _kinds(actions: Sequence[Any], device: int) -> tuple[Array, tuple[str, ...]]:
    """Return the kind of each entry, -1 for actions that are not the allocator's, and notes on ignored entries."""
    try:
        kind = np.fromiter(map(_ACTIONS.get, actions, repeat(-1)), np.int8, len(actions))
    except TypeError:
        raise FieldError(f"an entry of device {device} has an 'action' that is not a string") from None
    names = {actions[row] for row in np.flatnonzero(kind < 0).tolist()}
    if None in names:
        raise FieldError(f"an entry of device {device} has no 'action'")
    unknown = sorted(ascii(name)[:40] for name in names - _ANNOTATION_ACTIONS)
    if not unknown:
        return kind, ()
    return kind, (f"Entries with unknown actions were ignored: {', '.join(unknown[:_MAX_NAMED_ACTIONS])}",)


def _streams(values: Sequence[Any], what: str) -> Array:
    try:
        distinct = set(values)
    except TypeError:
        distinct = set()
    if len(distinct) == 1:
        # Most programs use one stream, so that it need not be checked for every entry.
        return np.full(len(values), addresses([distinct.pop() or 0], "stream", what)[0])
    return addresses([value or 0 for value in values], "stream", what)


def _device_free(rows: Sequence[Row], kind: Array, what: str) -> Array:
    free = np.full(len(rows), -1, np.int64)
    for row in np.flatnonzero(kind == KIND["oom"]).tolist():
        if "device_free" in rows[row]:
            free[row] = sizes([rows[row]["device_free"]], "device_free", what.format(row))[0]
    return free


def _entry_pools(values: Sequence[Any], kind: Array) -> Array:
    """Return the pool of each entry, -1 for frees, which repeat the pool of their allocation."""
    pool = np.full(len(values), -1, np.int64)
    if any(values):
        is_read = ~np.isin(kind, [KIND["free_requested"], KIND["free"], KIND["snapshot"]])
        chosen = list(compress(values, is_read.tolist()))
        pool[is_read] = pool_numbers(chosen, len(chosen))
    return pool


def pool_numbers(values: Sequence[Any] | None, num_rows: int) -> Array:
    """Return the numbers of memory pools as in the schema for torch's pairs; -1 for values that are not such pairs."""
    if values is None:
        return np.full(num_rows, -1, np.int64)
    known: dict[int, int] = {}
    return np.fromiter(
        (known.get(id(value)) or known.setdefault(id(value), _pool_number(value)) for value in values),
        np.int64,
        num_rows,
    )


def _pool_number(pair: object) -> int:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return -1
    owner, number = pair
    if not (isinstance(owner, int) and isinstance(number, int) and 0 <= owner < 2**60 and 0 <= number < 2**60):
        return -1
    # One of the two numbers is 0 in every pool that torch creates.
    return 2 * number if owner == 0 else 2 * owner + 1 if number == 0 else -1


def _times(values: Sequence[Any], what: str) -> Array | None:
    if not values or None in values:
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
    raw = {key: list(chain.from_iterable(part.raw[key] for part in parts)) for key in RAW_KEYS}
    return SnapshotEntries(
        raw={key: [values[row] for row in order.tolist()] for key, values in raw.items()},
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
    times = integers(column(annotations, "time_us", "annotation {}"), "time_us", "annotation {}")
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
