"""The history of a CUDA snapshot (``device_traces``) as columns, in the order of what happened."""

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
# `free` is what very old versions wrote for free_completed.
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
# Actions that say nothing of memory: notes of the program.
_REMARKS: Final = frozenset({"annotate", "user_defined"})
# What is kept of an entry as the file has it.
SAID: Final = ("frames", "forward_frames", "user_metadata", "compile_context")
_KEYS: Final = ("action", "addr", "size", "stream", "time_us", "pool_id", *SAID)
NS_PER_US: Final = 1000
MAX_DEVICES: Final = 127
_YEARS_US: Final = 30 * 365 * 86_400 * 1_000_000


@dataclass(frozen=True)
class Entries:
    """The entries of all devices, one a row."""

    said: Mapping[str, list[Any]]
    """Frames, forward_frames, user_metadata, compile_context as the file has them; None where an entry has none."""
    kind: Array
    device: Array
    address: Array
    """0 for oom and snapshot."""
    size: Array
    stream: Array
    device_free: Array
    """-1 for all but oom."""
    pool: Array
    """As in the schema, -1 where the entry does not say."""
    time_us: Array | None
    """Microseconds of the Unix epoch; None where the file has no usable times."""
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kind)


def read_entries(traces: object) -> Entries:
    """The entries of ``device_traces``. FieldError where they are no entries of an allocator."""
    if not isinstance(traces, list | tuple):
        raise FieldError(f"'device_traces' is no list but of type {type(traces).__name__}")
    if len(traces) > MAX_DEVICES:
        raise FieldError(f"'device_traces' has {len(traces)} devices")
    parts = [_device_entries(trace, number) for number, trace in enumerate(traces)]
    parts = [part for part in parts if len(part)]
    if not parts:
        return _device_entries([], 0)
    return parts[0] if len(parts) == 1 else _merged(parts)


def _device_entries(trace: object, device: int) -> Entries:
    history = f"the history of device {device}"
    what = f"entry {{}} of device {device}"
    if not isinstance(trace, list | tuple):
        rows_of(trace, history)
    rows: Sequence[Row] = trace  # type: ignore[assignment]
    said = columns(rows, _KEYS, history)
    kind, notes = _kinds(said["action"], device)
    keep = kind >= 0
    if not keep.all():
        chosen = keep.tolist()
        rows = list(compress(rows, chosen))
        said = {key: list(compress(values, chosen)) for key, values in said.items()}
        kind = kind[keep]
    placed = ~np.isin(kind, [KIND["oom"], KIND["snapshot"]])
    address = np.zeros(len(rows), np.int64)
    address[placed] = addresses(list(compress(said["addr"], placed.tolist())), "addr", what)
    return Entries(
        said={key: said[key] for key in SAID},
        kind=kind,
        device=np.full(len(rows), device, np.int16),
        address=address,
        size=sizes(said["size"], "size", what),
        stream=_streams(said["stream"], what),
        device_free=_device_free(rows, kind, what),
        pool=_entry_pools(said["pool_id"], kind),
        time_us=_times(said["time_us"], what),
        notes=notes,
    )


def _kinds(actions: Sequence[Any], device: int) -> tuple[Array, tuple[str, ...]]:
    """The kind of each entry, -1 for an action that is none of the allocator's, and a note of what was left out."""
    try:
        kind = np.fromiter(map(_ACTIONS.get, actions, repeat(-1)), np.int8, len(actions))
    except TypeError:
        raise FieldError(f"an entry of device {device} has an action that is no text") from None
    names = {actions[place] for place in np.flatnonzero(kind < 0).tolist()}
    if None in names:
        raise FieldError(f"an entry of device {device} has no 'action'")
    unknown = sorted(ascii(name)[:40] for name in names - _REMARKS)
    return kind, (f"entries of unknown actions left out: {', '.join(unknown[:5])}",) if unknown else ()


def _streams(values: Sequence[Any], what: str) -> Array:
    try:
        distinct = set(values)
    except TypeError:
        distinct = set()
    if len(distinct) == 1:
        # One stream, as in most programs: no need to look at that of every entry.
        return np.full(len(values), addresses([distinct.pop() or 0], "stream", what)[0])
    return addresses([value or 0 for value in values], "stream", what)


def _device_free(rows: Sequence[Row], kind: Array, what: str) -> Array:
    free = np.full(len(rows), -1, np.int64)
    for place in np.flatnonzero(kind == KIND["oom"]).tolist():
        if "device_free" in rows[place]:
            free[place] = sizes([rows[place]["device_free"]], "device_free", what.format(place))[0]
    return free


def _entry_pools(values: Sequence[Any], kind: Array) -> Array:
    """The pools of what begins or ends a block or a segment. Free entries repeat what their alloc said."""
    pool = np.full(len(values), -1, np.int64)
    if any(values):
        telling = ~np.isin(kind, [KIND["free_requested"], KIND["free"], KIND["snapshot"]])
        chosen = list(compress(values, telling.tolist()))
        pool[telling] = pools(chosen, len(chosen))
    return pool


def pools(values: Sequence[Any] | None, num_rows: int) -> Array:
    """Pool numbers as in the schema for torch's pairs; -1 where there is none or it is no such pair."""
    if values is None:
        return np.full(num_rows, -1, np.int64)
    known: dict[int, int] = {}
    return np.fromiter(
        (known.get(id(value)) or known.setdefault(id(value), _pool(value)) for value in values), np.int64, num_rows
    )


def _pool(pair: object) -> int:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return -1
    owner, number = pair
    if not (isinstance(owner, int) and isinstance(number, int) and 0 <= owner < 2**60 and 0 <= number < 2**60):
        return -1
    # One of the two is 0 in every pool that torch makes.
    return 2 * number if owner == 0 else 2 * owner + 1 if number == 0 else -1


def _times(values: Sequence[Any], what: str) -> Array | None:
    if not values or None in values:
        return None
    times = integers(values, "time_us", what)
    return times if int(times.max()) - int(times.min()) < _YEARS_US else None


def _merged(parts: list[Entries]) -> Entries:
    """Several devices in one order: by time where all have it, else one device behind the other."""
    times = [part.time_us for part in parts]
    together = None
    order = np.arange(sum(map(len, parts)))
    if all(time is not None for time in times):
        together = np.concatenate([time for time in times if time is not None])
        # Within a device the order of the list is the truth, whatever the clock says.
        rising = np.concatenate([np.maximum.accumulate(time) for time in times if time is not None])
        order = np.argsort(rising, kind="stable")
        together = together[order]
        if int(together.max()) - int(together.min()) >= _YEARS_US:
            together = None
    said = {key: list(chain.from_iterable(part.said[key] for part in parts)) for key in SAID}
    return Entries(
        said={key: [values[place] for place in order.tolist()] for key, values in said.items()},
        time_us=together,
        notes=tuple(note for part in parts for note in part.notes),
        **{name: _joined(parts, name)[order] for name in _COLUMNS},
    )


_COLUMNS: Final = ("kind", "device", "address", "size", "stream", "device_free", "pool")


def _joined(parts: list[Entries], name: str) -> Array:
    return np.concatenate([getattr(part, name) for part in parts])


def with_frees(entries: Entries, pending: Array) -> tuple[Entries, bool]:
    """Where completed frees were left out of the recording (``skip_actions``), requests take their part: then True.

    ``pending`` are the addresses of blocks that truly wait for a stream at the dump.
    """
    requested = entries.kind == KIND["free_requested"]
    if (entries.kind == KIND["free"]).any() or np.isin(entries.address[requested], pending).all():
        return entries, False
    return replace(entries, kind=np.where(requested, KIND["free"], entries.kind)), True


def times_ns(entries: Entries) -> Array:
    """Nanoseconds since the first entry; the number of the entry where there are no times."""
    if entries.time_us is None:
        return np.arange(len(entries), dtype=np.int64)
    times: Array = (entries.time_us - entries.time_us[0]) * NS_PER_US
    return times


def read_ranges(annotations: Sequence[Row], *, t0_us: int, last_ns: int) -> list[Range]:
    """The annotated ranges; times since ``t0_us``. An end belongs to the latest start of its name on its device; a
    range without an end lasts until ``last_ns``."""
    times = integers(column(annotations, "time_us", "annotation {}"), "time_us", "annotation {}")
    begun: dict[tuple[str, object], list[int]] = {}
    ranges = []
    for row, time in zip(annotations, times.tolist(), strict=True):
        name, stage, device = row.get("name"), row.get("stage"), row.get("device")
        if not isinstance(name, str) or abs(time - t0_us) >= _YEARS_US:
            continue
        starts = begun.setdefault((name, device if isinstance(device, int) else None), [])
        when = (time - t0_us) * NS_PER_US
        if stage == "START":
            starts.append(when)
        elif stage == "END" and starts:
            start = starts.pop()
            ranges.append(Range(name, start, max(start, when)))
    for (name, _), starts in begun.items():
        ranges.extend(Range(name, start, max(start, last_ns)) for start in starts)
    return ranges
