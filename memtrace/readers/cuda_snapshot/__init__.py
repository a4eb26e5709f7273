"""CUDA memory snapshots: what ``torch.cuda.memory._dump_snapshot`` writes, of torch 2.0 to today.

The history (``device_traces``) becomes events; blocks older than it become ``baseline`` events at its very start; the
final state (``segments``) becomes the table ``segments``. Sizes are requested bytes; the allocator's own size of a
block is given where the file tells it or its rules leave no doubt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from memtrace.errors import TraceError
from memtrace.format.encode import empty_tables
from memtrace.format.manifest import FileCoverage
from memtrace.readers.annotations import optimizer_steps, spans_of, spans_table
from memtrace.readers.content import Content
from memtrace.readers.cuda_snapshot.blocks import Snapshot, number_blocks
from memtrace.readers.cuda_snapshot.entries import KIND, NS_PER_US, read_entries, read_ranges, times_ns, with_frees
from memtrace.readers.cuda_snapshot.events import events_table, labels_table, segment_stacks, segments_table
from memtrace.readers.cuda_snapshot.notes import ONE_MOMENT, notes_on
from memtrace.readers.cuda_snapshot.ops import read_ops
from memtrace.readers.cuda_snapshot.phases import phase_spans
from memtrace.readers.cuda_snapshot.segments import read_segments
from memtrace.readers.cuda_snapshot.settings import plain_settings
from memtrace.readers.cuda_snapshot.stacks import Stacks
from memtrace.readers.fields import FieldError, rows_of
from memtrace.readers.lifetimes import lifetimes
from memtrace.readers.limits import too_large
from memtrace.readers.tables import Names, new_manifest
from memtrace.readers.unpickle import load_plain

if TYPE_CHECKING:
    from memtrace.readers.registry import Rank

_PROTOCOLS: Final = (2, 3, 4, 5)


class PickledSnapshot:
    """Reads a snapshot in a pickle."""

    def recognises(self, content: Content) -> bool:
        """Pickle protocols 2 to 5 begin with an opcode that nothing else begins with."""
        return content.head[:1] == b"\x80" and len(content.head) > 1 and content.head[1] in _PROTOCOLS

    def read(self, content: Content) -> list[Rank]:
        """The one rank in the file."""
        reason = too_large(content.size)
        if reason is not None:
            raise TraceError(f"{content.path} {reason}.")
        with content.open() as stream:
            self._value = load_plain(stream, content.path)
        return [snapshot_tables(self._value, content)]


def snapshot_tables(value: Any, content: Content) -> Rank:
    """Manifest and tables of a loaded snapshot: a dict, or the bare list of ``torch.cuda.memory_snapshot``.

    Raises TraceError where it is no snapshot of an allocator.
    """
    try:
        return _tables(_Parts.of(value), content.path.name)
    except FieldError as error:
        raise TraceError(f"{content.path} is no memory snapshot that torch wrote: {error}.") from None


@dataclass(frozen=True)
class _Parts:
    """The parts of a snapshot that are read."""

    segments: object
    traces: object
    settings: Mapping[str, Any]
    annotations: Sequence[Mapping[str, Any]]
    has_host: bool
    overflowed: bool

    @classmethod
    def of(cls, value: Any) -> _Parts:
        if isinstance(value, list):
            value = {"segments": value}
        if not isinstance(value, dict) or not ("segments" in value or "device_traces" in value):
            raise FieldError("it has neither 'segments' nor 'device_traces'")
        settings = value.get("allocator_settings")
        settings = settings if isinstance(settings, dict) else {}
        flags = [place.get("trace_alloc_overflowed") for place in (value, settings)]
        return cls(
            value.get("segments") or [],
            value.get("device_traces") or [],
            settings,
            rows_of(value.get("external_annotations") or [], "'external_annotations'"),
            bool(value.get("host_traces") or value.get("host_segments")),
            any(_is_set(flag) for flag in flags),
        )


def _is_set(flag: object) -> bool:
    """A flag may stand alone, or once a device in a list or a dict."""
    several = flag.values() if isinstance(flag, dict) else flag if isinstance(flag, list | tuple) else [flag]
    return any(item is True or item == 1 for item in several)


def _tables(parts: _Parts, file: str) -> Rank:
    segments, live = read_segments(parts.segments)
    entries, frees_at_request = with_frees(read_entries(parts.traces), live.address[live.pending])
    lives = lifetimes(entries.kind, entries.device, entries.address, entries.size)
    blocks = number_blocks(entries, lives, live)
    times = times_ns(entries)
    t0_us = int(entries.time_us[0]) if entries.time_us is not None else None
    names = Names()
    stacks = Stacks(names)
    ranges = [] if t0_us is None else read_ranges(parts.annotations, t0_us=t0_us, last_ns=int(times.max()))
    ops = read_ops(entries, live.frames, optimizer_steps(ranges), times, stacks, names)
    spans = spans_of(ranges, names, first_ns=0, last_ns=int(times.max())) if ranges else []
    allocs = entries.kind == KIND["alloc"]
    spans += phase_spans(ops.phase[allocs], times[allocs], names)
    segment_table = segments_table(segments, segment_stacks(segments, stacks))
    found = Snapshot(entries, segments, live, lives, blocks, parts.settings)
    manifest = new_manifest("cuda_snapshot", file, None if t0_us is None else t0_us * NS_PER_US)
    notes = [
        *notes_on(found, ops, overflowed=parts.overflowed, frees_at_request=frees_at_request),
        *(["its history of pinned host memory is not read"] if parts.has_host else []),
        *(["its annotations are not read: its entries have no times"] if parts.annotations and t0_us is None else []),
    ]
    tables = empty_tables() | {
        "events": events_table(found, ops, times),
        "ops": ops.table,
        "spans": spans_table(spans),
        "labels": labels_table(found, ops),
        "segments": segment_table,
        "names": names.table(),
    }
    coverage = FileCoverage(has_times=t0_us is not None and len(entries) > ONE_MOMENT, notes=tuple(notes))
    return replace(manifest, allocator_settings=plain_settings(parts.settings), coverage=coverage), tables
