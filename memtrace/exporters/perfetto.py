"""The trace format of Perfetto (``.pftrace``), for https://ui.perfetto.dev and ``trace_processor``.

One process per rank. It has counters of each device and category, slices for steps, phases, modules and operators, and
an instant for each allocation and each free, with a flow (an arrow) from one to the other. The numbers of the fields
are those of ``protos/perfetto/trace`` in Perfetto's repository. The file is written by ``byte_rows`` instead of the
package ``perfetto``, which needs a Python call for every packet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, Final

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.block_groups import find_owning_modules
from memtrace.analysis.blocks import blocks
from memtrace.analysis.rank_clocks import clock_shift_ns
from memtrace.exporters.byte_rows import CHUNK_ROWS, ByteRows, constant, only_where
from memtrace.exporters.memory_events import Counter, block_events, counters, failed_allocations
from memtrace.exporters.process_names import process_ids, rank_title, thread_names
from memtrace.exporters.protobuf import bytes_field, fixed64_rows, int_field, int_rows, message_rows, text_field
from memtrace.exporters.slices import OPERATORS, SliceTrack, assign_lanes, bracket_order, slice_tracks
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

_PACKET: Final = 1  # Trace.packet
# TracePacket
_CLOCK_SNAPSHOT: Final = 6
_TIMESTAMP: Final = 8
_SEQUENCE_ID: Final = 10
_TRACK_EVENT: Final = 11
_INTERNED_DATA: Final = 12
_SEQUENCE_FLAGS: Final = 13
_TRACK_DESCRIPTOR: Final = 60
_FLAG_STATE_CLEARED: Final = 1
_FLAG_NEEDS_STATE: Final = 2
# ClockSnapshot
_CLOCKS: Final = 1
_PRIMARY_CLOCK: Final = 2
_CLOCK_ID: Final = 1
_CLOCK_TIME: Final = 2
_REALTIME: Final = 1
_BOOTTIME: Final = 6
# TrackDescriptor
_UUID: Final = 1
_TRACK_NAME: Final = 2
_PROCESS: Final = 3
_THREAD: Final = 4
_PARENT_UUID: Final = 5
_COUNTER: Final = 8
_CHILD_ORDERING: Final = 11
_ORDER_RANK: Final = 12
_EXPLICIT_ORDER: Final = 3
_PID: Final = 1
_TID: Final = 2
_THREAD_NAME: Final = 5
_PROCESS_NAME: Final = 6
_UNIT: Final = 3
_UNIT_BYTES: Final = 3
# TrackEvent
_DEBUG_ANNOTATION: Final = 4
_EVENT_TYPE: Final = 9
_NAME_IID: Final = 10
_TRACK_UUID: Final = 11
_COUNTER_VALUE: Final = 30
_FLOW_ID: Final = 47
_TERMINATING_FLOW_ID: Final = 48
_SLICE_BEGIN: Final = 1
_SLICE_END: Final = 2
_INSTANT: Final = 3
_COUNTER_EVENT: Final = 4
# InternedData, and the messages EventName, DebugAnnotationName and InternedString in it
_EVENT_NAMES: Final = 2
_ANNOTATION_NAMES: Final = 3
_ANNOTATION_TEXTS: Final = 29
_IID: Final = 1
_TEXT: Final = 2
# DebugAnnotation
_ANNOTATION_NAME: Final = 1
_ANNOTATION_INT: Final = 4
_ANNOTATION_TEXT: Final = 17


def write_perfetto(trace: Trace, file: IO[bytes]) -> None:
    """Write a trace of one or several ranks as a Perfetto trace."""
    reference = trace.rank(trace.ranks[0]).manifest
    shifts = {rank: clock_shift_ns(trace.rank(rank).manifest, reference) for rank in trace.ranks}
    # The clock of the file begins with the earliest rank: Perfetto has no negative times.
    base_ns = -min(shifts.values())
    file.write(_clock_packet(base_ns, reference.t0_epoch_ns))
    process_id = process_ids(trace)
    for index, rank in enumerate(trace.ranks):
        writer = _RankWriter(trace.rank(rank), file, index, process_id[rank], base_ns + shifts[rank])
        writer.write()


def _clock_packet(time_ns: int, epoch_ns: int | None) -> bytes:
    """Return the packet that names the clock of all times, and ties it to the wall clock where that is known."""
    clocks = _clock(_BOOTTIME, time_ns)
    if epoch_ns is not None:
        clocks += _clock(_REALTIME, epoch_ns)
    snapshot = bytes_field(_CLOCK_SNAPSHOT, clocks + int_field(_PRIMARY_CLOCK, _BOOTTIME))
    return bytes_field(_PACKET, int_field(_TIMESTAMP, time_ns) + snapshot + int_field(_SEQUENCE_ID, 1))


def _clock(clock: int, time_ns: int) -> bytes:
    return bytes_field(_CLOCKS, int_field(_CLOCK_ID, clock) + int_field(_CLOCK_TIME, time_ns))


class _RankWriter:
    """Writes one rank as a process. Its tracks, names and flows have numbers of their own."""

    def __init__(self, trace: Trace, file: IO[bytes], index: int, process_id: int, offset_ns: int) -> None:
        self._trace = trace
        self._file = file
        self._offset_ns = offset_ns
        self._sequence = int_field(_SEQUENCE_ID, index + 2)
        self._first_id = (index + 1) << 40
        """Numbers of tracks and flows are unique in the file."""
        self._num_tracks = 0
        self._pid = process_id
        self._iids: dict[tuple[int, str], int] = {}

    def write(self) -> None:
        trace = self._trace
        cleared = int_field(_SEQUENCE_FLAGS, _FLAG_STATE_CLEARED)
        self._file.write(bytes_field(_PACKET, self._sequence + cleared))
        process = int_field(_PID, self._pid) + text_field(_PROCESS_NAME, rank_title(trace))
        root = self._add_track(bytes_field(_PROCESS, process) + int_field(_CHILD_ORDERING, _EXPLICIT_ORDER))
        for device in trace.devices:
            for counter in counters(trace, device):
                self._write_counter(counter, root)
        self._write_slices(root)
        for device in trace.devices:
            self._write_block_events(device, root)
            self._write_failures(device, root)

    # -- tracks ------------------------------------------------------------------------------------------------

    def _add_track(self, descriptor: bytes, name: str | None = None, parent: int | None = None) -> int:
        self._num_tracks += 1
        uuid = self._first_id + self._num_tracks
        content = int_field(_UUID, uuid) + descriptor + int_field(_ORDER_RANK, self._num_tracks)
        if name is not None:
            content += text_field(_TRACK_NAME, name)
        if parent is not None:
            content += int_field(_PARENT_UUID, parent)
        self._file.write(bytes_field(_PACKET, bytes_field(_TRACK_DESCRIPTOR, content) + self._sequence))
        return uuid

    def _write_counter(self, counter: Counter, root: int) -> None:
        unit = bytes_field(_COUNTER, int_field(_UNIT, _UNIT_BYTES))
        track = self._add_track(unit, f"{counter.device} {counter.name}", root)
        for rows in _chunks(len(counter.time_ns)):
            values = int_rows(_COUNTER_VALUE, counter.bytes[rows])
            self._write_events(_COUNTER_EVENT, track, counter.time_ns[rows], values)

    def _write_slices(self, root: int) -> None:
        threads: dict[int, int] = {}
        names = thread_names(self._trace)
        for slices in slice_tracks(self._trace):
            parent = root
            if slices.thread >= 0:
                if slices.thread not in threads:
                    threads[slices.thread] = self._add_thread(slices.thread, names.get(slices.thread))
                parent = threads[slices.thread]
            lane = assign_lanes(slices.start_ns, slices.duration_ns)
            for number in range(int(lane.max(initial=0)) + 1):
                # The operators of a thread are drawn on the thread's own track.
                is_main = slices.name == OPERATORS and slices.thread >= 0 and not number
                name = slices.name if not number else f"{slices.name} (overlapping)"
                track = parent if is_main else self._add_track(b"", name, parent)
                self._write_track(slices, np.flatnonzero(lane == number), track)

    def _add_thread(self, number: int, name: str | None) -> int:
        # Thread ids of the operating system are not recorded. Perfetto takes the id of the process for a main thread.
        thread = int_field(_PID, self._pid) + int_field(_TID, self._pid + number)
        thread += text_field(_THREAD_NAME, name or f"thread {number}")
        return self._add_track(bytes_field(_THREAD, thread))

    def _write_track(self, slices: SliceTrack, chosen: Array, track: int) -> None:
        iids = self._intern(_EVENT_NAMES, slices.texts)[slices.text[chosen]]
        start = slices.start_ns[chosen]
        end = start + slices.duration_ns[chosen]
        brackets = bracket_order(start, end)
        for rows in _chunks(len(brackets.row)):
            row, is_end = brackets.row[rows], brackets.is_end[rows]
            event_type = np.where(is_end, _SLICE_END, _SLICE_BEGIN)
            name = only_where(int_rows(_NAME_IID, iids[row]), ~is_end)
            self._write_events(event_type, track, np.where(is_end, end[row], start[row]), name)

    # -- allocations and frees ---------------------------------------------------------------------------------

    def _write_block_events(self, device: str, root: int) -> None:
        trace, table = self._trace, blocks(self._trace)
        allocs, frees = (block_events(trace, device, frees=frees) for frees in (False, True))
        if not len(allocs.block) and not len(frees.block):
            return
        track = self._add_track(b"", f"{device} allocations and frees", root)
        names = self._intern(_EVENT_NAMES, [f"{verb} {name}" for verb in ("alloc", "free") for name in CATEGORIES])
        of_device = np.unique(np.concatenate([allocs.block, frees.block]))
        modules, module = find_owning_modules(trace, of_device)
        sites, site = allocation_sites(trace, table.stack[of_device])
        module_iid, site_iid = (
            self._intern(_ANNOTATION_TEXTS, [text or "" for text in texts]) for texts in (modules, sites)
        )
        keys = self._intern(_ANNOTATION_NAMES, ["bytes", "block", "module", "allocation site"]).tolist()
        has_flow = (table.alloc_event >= 0) & (table.free_event >= 0)
        for events, first_name, flow_field in (
            (allocs, 0, _FLOW_ID),
            (frees, len(CATEGORIES), _TERMINATING_FLOW_ID),
        ):
            for rows in _chunks(len(events.block)):
                block = events.block[rows]
                place = np.searchsorted(of_device, block)
                self._write_events(
                    _INSTANT,
                    track,
                    events.time_ns[rows],
                    int_rows(_NAME_IID, names[first_name + table.category[block]]),
                    _annotation(keys[0], int_rows(_ANNOTATION_INT, table.size[block])),
                    _annotation(keys[1], int_rows(_ANNOTATION_INT, self._block_ids(block))),
                    _text_annotation(
                        keys[2], module_iid[module[place]], [text is not None for text in modules], module[place]
                    ),
                    _text_annotation(keys[3], site_iid[site[place]], [text is not None for text in sites], site[place]),
                    only_where(fixed64_rows(flow_field, self._first_id + block), has_flow[block]),
                )

    def _block_ids(self, block: Array) -> Array:
        ids = self._trace.block_ids
        return block if ids is None else ids[block]

    def _write_failures(self, device: str, root: int) -> None:
        time_ns, num_bytes = failed_allocations(self._trace, device)
        if not len(time_ns):
            return
        track = self._add_track(b"", f"{device} out of memory", root)
        name = self._intern(_EVENT_NAMES, ["out of memory"])
        key = self._intern(_ANNOTATION_NAMES, ["requested bytes"])
        requested = _annotation(int(key[0]), int_rows(_ANNOTATION_INT, num_bytes))
        self._write_events(_INSTANT, track, time_ns, int_rows(_NAME_IID, np.repeat(name, len(time_ns))), requested)

    # -- packets -----------------------------------------------------------------------------------------------

    def _intern(self, field: int, texts: Sequence[str]) -> Array:
        """Return the number of each text, and write the numbers of new texts."""
        new = []
        for text in dict.fromkeys(texts):
            if (field, text) not in self._iids:
                self._iids[field, text] = iid = len(self._iids) + 1
                new.append(bytes_field(field, int_field(_IID, iid) + text_field(_TEXT, text)))
        flags = int_field(_SEQUENCE_FLAGS, _FLAG_NEEDS_STATE)
        for first in range(0, len(new), CHUNK_ROWS):
            data = bytes_field(_INTERNED_DATA, b"".join(new[first : first + CHUNK_ROWS]))
            self._file.write(bytes_field(_PACKET, data + self._sequence + flags))
        return np.array([self._iids[field, text] for text in texts], np.int64)

    def _write_events(self, event_type: Array | int, track: int, time_ns: Array, *fields: ByteRows) -> None:
        num_rows = len(time_ns)
        kind = (
            int_rows(_EVENT_TYPE, event_type)
            if isinstance(event_type, np.ndarray)
            else constant(int_field(_EVENT_TYPE, event_type), num_rows)
        )
        event = message_rows(_TRACK_EVENT, kind, constant(int_field(_TRACK_UUID, track), num_rows), *fields)
        sequence = self._sequence + int_field(_SEQUENCE_FLAGS, _FLAG_NEEDS_STATE)
        time = int_rows(_TIMESTAMP, time_ns + self._offset_ns)
        self._file.write(message_rows(_PACKET, time, event, constant(sequence, num_rows)).to_bytes())


def _annotation(key: int, value: ByteRows) -> ByteRows:
    return message_rows(_DEBUG_ANNOTATION, constant(int_field(_ANNOTATION_NAME, key), len(value)), value)


def _text_annotation(key: int, iids: Array, is_known: Iterable[bool], index: Array) -> ByteRows:
    known = np.fromiter(is_known, bool)
    return only_where(_annotation(key, int_rows(_ANNOTATION_TEXT, iids)), known[index])


def _chunks(num_rows: int) -> Iterable[slice]:
    return (slice(first, first + CHUNK_ROWS) for first in range(0, num_rows, CHUNK_ROWS))
