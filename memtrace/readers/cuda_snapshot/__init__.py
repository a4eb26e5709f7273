"""CUDA memory snapshots of ``torch.cuda.memory._dump_snapshot``, torch 2.0 and later.

The history (``device_traces``) becomes events, the blocks that are older than the history become ``baseline`` events at
its beginning, and the final state (``segments``) becomes the table ``segments``. Sizes are requested bytes. The
allocator's size of a block is given where the file states it or where it follows from the rules of the allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final

from memtrace.errors import TraceError
from memtrace.format.encode import empty_tables
from memtrace.format.manifest import FileCoverage
from memtrace.readers.annotations import optimizer_steps, ranges_to_spans, spans_table
from memtrace.readers.content import Content
from memtrace.readers.cuda_snapshot.blocks import Snapshot, match_blocks
from memtrace.readers.cuda_snapshot.entries import (
    KIND,
    NS_PER_US,
    complete_frees,
    read_entries,
    read_ranges,
    times_ns,
)
from memtrace.readers.cuda_snapshot.events import events_table, labels_table, segment_stacks, segments_table
from memtrace.readers.cuda_snapshot.notes import describe_gaps, has_history
from memtrace.readers.cuda_snapshot.ops import read_ops
from memtrace.readers.cuda_snapshot.phases import phase_spans
from memtrace.readers.cuda_snapshot.segments import read_segments
from memtrace.readers.cuda_snapshot.settings import plain_settings
from memtrace.readers.cuda_snapshot.stacks import StackTable
from memtrace.readers.lifetimes import find_lifetimes
from memtrace.readers.limits import describe_memory_shortage
from memtrace.readers.pickle_scanner import Scanner, TruncatedPickle, UnsupportedPickle, find_scanner, scan
from memtrace.readers.rank import ReadRank
from memtrace.readers.rows import FieldError, Rows, dicts_of
from memtrace.readers.tables import Names, new_manifest
from memtrace.readers.unpickle import load_plain

_PROTOCOLS: Final = (2, 3, 4, 5)


class PickledSnapshot:
    """Reads a pickled snapshot."""

    def __init__(self) -> None:
        # Kept alive with the reader, see memtrace.readers.isolated.
        self._kept: list[Any] = []

    def recognises(self, content: Content) -> bool:
        """Return whether the file is a pickle of protocol 2 to 5, by its first opcode."""
        return content.head[:1] == b"\x80" and len(content.head) > 1 and content.head[1] in _PROTOCOLS

    def read(self, content: Content) -> list[ReadRank]:
        """Read the one rank in the file."""
        return [read_pickled(content.open, content, self._kept)]


def read_pickled(open_pickle: Callable[[], BinaryIO], content: Content, kept: list[Any]) -> ReadRank:
    """Read a pickled snapshot: with the scanner where there is one, and otherwise in Python.

    Args:
        open_pickle: opens the pickle; called once or twice.
        content: the file that contains the pickle.
        kept: receives objects that take long to free.

    Raises:
        TraceError: the pickle is damaged, needs too much memory, or is not a memory snapshot.
    """
    scanner = find_scanner(content.size_bytes)
    if scanner is not None:
        _check_memory(content, is_scanned=True)
        with suppress(UnsupportedPickle), open_pickle() as stream:
            return read_scanned(scanner, stream, content)
    _check_memory(content, is_scanned=False)
    with open_pickle() as stream:
        kept.append(load_plain(stream, content.path))
    return read_snapshot(kept[-1], content)


def _check_memory(content: Content, *, is_scanned: bool) -> None:
    shortage = describe_memory_shortage(content.size_bytes, is_scanned=is_scanned)
    if shortage is not None:
        raise TraceError(f"{content.path}: {shortage}")


def read_scanned(scanner: Scanner, stream: BinaryIO, content: Content) -> ReadRank:
    """Read a pickled snapshot without making objects of its entries.

    Args:
        scanner: the compiled scanner.
        stream: the pickle.
        content: the file.

    Raises:
        UnsupportedPickle: the pickle contains what the scanner does not know, and may be valid.
        TraceError: the pickle is truncated, or its value is not a memory snapshot.
    """
    try:
        value = scan(scanner, stream, tables=("segments",), lists_of_tables=("device_traces",))
    except TruncatedPickle:
        raise TraceError(f"{content.path}: the pickle is truncated. Copy the file again, or dump it again.") from None
    return read_snapshot(value, content)


def read_snapshot(value: Any, content: Content) -> ReadRank:
    """Convert a loaded snapshot to a trace.

    Args:
        value: a snapshot, or the bare list of segments that ``torch.cuda.memory_snapshot`` returns; its lists of dicts
            can be rows that were scanned.
        content: the file.

    Raises:
        TraceError: the value is not a memory snapshot.
    """
    try:
        return _convert(_SnapshotParts.of(value), content.path.name)
    except FieldError as error:
        raise TraceError(
            f"{content.path}: not a valid CUDA memory snapshot ({error}). Dump it again with "
            "torch.cuda.memory._dump_snapshot."
        ) from None


@dataclass(frozen=True)
class _SnapshotParts:
    """The parts of a snapshot that memtrace reads."""

    segments: object
    traces: object
    settings: Mapping[str, Any]
    annotations: Sequence[Mapping[str, Any]]
    has_host_memory: bool
    """Whether the snapshot contains pinned host memory."""
    overflowed: bool
    """Whether the ring buffer of the history overflowed."""

    @classmethod
    def of(cls, value: Any) -> _SnapshotParts:
        if isinstance(value, list | Rows):
            value = {"segments": value}
        if not isinstance(value, dict) or not ("segments" in value or "device_traces" in value):
            raise FieldError("it contains neither 'segments' nor 'device_traces'")
        settings = value.get("allocator_settings")
        settings = settings if isinstance(settings, dict) else {}
        flags = [container.get("trace_alloc_overflowed") for container in (value, settings)]
        return cls(
            value.get("segments") or [],
            value.get("device_traces") or [],
            settings,
            dicts_of(value.get("external_annotations") or [], "'external_annotations'"),
            bool(value.get("host_traces") or value.get("host_segments")),
            any(_is_set(flag) for flag in flags),
        )

    def close(self) -> None:
        """Give back the memory of rows that were scanned, once they are columns."""
        traces = self.traces if isinstance(self.traces, list | tuple) else ()
        for rows in (self.segments, *traces):
            if isinstance(rows, Rows):
                rows.close()


def _is_set(flag: object) -> bool:
    """Return whether a flag is set, which can be a single value or have one value per device in a list or a dict."""
    values = flag.values() if isinstance(flag, dict) else flag if isinstance(flag, list | tuple) else [flag]
    return any(value is True or value == 1 for value in values)


def _convert(parts: _SnapshotParts, file: str) -> ReadRank:
    segments, live = read_segments(parts.segments)
    entries, frees_at_request = complete_frees(read_entries(parts.traces), live.address[live.pending])
    parts.close()
    lives = find_lifetimes(entries.kind, entries.device, entries.address, entries.size)
    snapshot = Snapshot(entries, segments, live, lives, match_blocks(entries, lives, live), parts.settings)
    times = times_ns(entries)
    t0_us = int(entries.time_us[0]) if entries.time_us is not None else None
    names = Names()
    stacks = StackTable(names)
    ranges = [] if t0_us is None else read_ranges(parts.annotations, t0_us=t0_us, last_ns=int(times.max()))
    ops = read_ops(entries, live.frames, optimizer_steps(ranges), times, stacks, names)
    spans = ranges_to_spans(ranges, names, first_ns=0, last_ns=int(times.max())) if ranges else []
    allocs = entries.kind == KIND["alloc"]
    spans += phase_spans(ops.phase[allocs], times[allocs], names)
    manifest = new_manifest("cuda_snapshot", file, None if t0_us is None else t0_us * NS_PER_US)
    notes = describe_gaps(snapshot, ops, overflowed=parts.overflowed, frees_at_request=frees_at_request)
    if parts.has_host_memory:
        notes.append("The history of pinned host memory in the snapshot was not read")
    if parts.annotations and t0_us is None:
        notes.append("The annotations in the snapshot were not read, because its entries have no times")
    coverage = FileCoverage(has_times=t0_us is not None and has_history(snapshot), notes=tuple(notes))
    manifest = replace(manifest, allocator_settings=plain_settings(parts.settings), coverage=coverage)
    tables = empty_tables() | {
        "segments": segments_table(segments, segment_stacks(segments, stacks)),
        "events": events_table(snapshot, ops, times),
        "ops": ops.table,
        "spans": spans_table(spans),
        "labels": labels_table(snapshot, ops),
        "names": names.table(),
    }
    return ReadRank(manifest, tables)
