"""Memory snapshots as ``torch.cuda.memory._dump_snapshot`` writes them, for https://pytorch.org/memory_viz.

Every device of the trace becomes a device of the snapshot, the CPU too. Steps become the ranges ``ProfilerStep#N``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import IO, Any, Final

import numpy as np

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import blocks
from memtrace.exporters.byte_rows import CHUNK_ROWS, ByteRows, only_where
from memtrace.exporters.memory_events import event_times
from memtrace.exporters.pickle_rows import (
    APPENDS,
    EMPTY_DICT,
    EMPTY_LIST,
    MARK,
    SET_ITEMS,
    START,
    STOP,
    SharedObjects,
    append_all,
    dictionaries,
    integers,
    plain_pickle,
    references,
    text,
)
from memtrace.exporters.snapshot_entries import ACTIONS, DeviceHistory, Entries, device_history
from memtrace.exporters.snapshot_segments import final_segments, live_size, pool_pair
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.frames import Frame
from memtrace.trace import Trace

_NS_PER_US: Final = 1000
_KEYS: Final = (
    "action",
    "addr",
    "size",
    "stream",
    "time_us",
    "frames",
    "category",
    "pool_id",
    "device_free",
)
_SHARED: Final = "memtrace_shared"
"""An entry of the snapshot that its readers ignore: it holds what the other entries refer to."""


def device_numbers(trace: Trace) -> dict[str, int]:
    """Return the number of each device in the snapshot: GPUs keep theirs, other devices get the next free ones."""
    numbers = {
        name: int(name.removeprefix("cuda:"))
        for name in trace.devices
        if name.startswith("cuda:") and name.removeprefix("cuda:").isdecimal()
    }
    for name in trace.devices:
        if name not in numbers:
            numbers[name] = max(numbers.values(), default=-1) + 1
    return numbers


def write_snapshot(trace: Trace, file: IO[bytes]) -> None:
    """Write a single-rank trace as a memory snapshot."""
    _SnapshotWriter(trace, file).write()


class _SnapshotWriter:
    """Writes the parts of the snapshot in an order in which whatever is referred to comes first."""

    def __init__(self, trace: Trace, file: IO[bytes]) -> None:
        self._trace = trace
        self._file = file
        # One element more than there are blocks: entries without a block have the number -1.
        self._stack_of_block = np.append(blocks(trace).stack, -1)
        self._category_of_block = np.append(blocks(trace).category, CATEGORIES.index("unknown"))
        self._stacks = np.unique(self._stack_of_block)
        self._frames = _frame_lists(trace, self._stacks.tolist())
        self._pools = np.unique(trace.columns("events", "pool")["pool"])
        self._shared = SharedObjects(
            _KEYS, ACTIONS, CATEGORIES, self._frames, [pool_pair(number) for number in self._pools.tolist()]
        )
        keys, self._action, self._category, self._stack, self._pool = self._shared.index
        self._key = dict(zip(_KEYS, keys.tolist(), strict=True))

    def write(self) -> None:
        numbers = device_numbers(self._trace)
        histories = {number: device_history(self._trace, device) for device, number in numbers.items()}
        write = self._file.write
        write(START + EMPTY_DICT + MARK)
        write(text(_SHARED) + self._shared.content)
        write(text("device_traces") + EMPTY_LIST + MARK)
        for number in range(max(histories, default=-1) + 1):
            write(EMPTY_LIST)
            for content in append_all(self._entry_chunks(histories[number])) if number in histories else ():
                write(content)
        write(APPENDS)
        # What follows is small. It is pickled with a memo of its own, so it comes last.
        rest = {
            "segments": [
                segment
                for number, history in histories.items()
                for segment in final_segments(self._trace, history, number, self._frames_of)
            ],
            "allocator_settings": dict(self._trace.manifest.allocator_settings or {}),
            "external_annotations": self._annotations(),
        }
        for name, value in rest.items():
            write(text(name) + plain_pickle(value))
        write(SET_ITEMS + STOP)

    def _frames_of(self, stack: int) -> list[dict[str, Any]]:
        """Return the frames of a stack; an empty list for -1."""
        place = int(np.searchsorted(self._stacks, stack))
        return self._frames[place] if stack >= 0 else []

    def _entry_chunks(self, history: DeviceHistory) -> Iterator[ByteRows]:
        entries = history.entries
        for first in range(0, len(entries), CHUNK_ROWS):
            rows = slice(first, first + CHUNK_ROWS)
            yield self._entry_rows(Entries(*(getattr(entries, field.name)[rows] for field in fields(Entries))))
        yield self._last_entry(history)

    def _entry_rows(self, entries: Entries) -> ByteRows:
        block, action = entries.block, entries.action
        is_oom = action == ACTIONS.index("oom")
        has_address = ~is_oom & (action != ACTIONS.index("snapshot"))
        events = self._trace.columns("events", "stream", "pool")
        stack = np.where((block >= 0) & (action == ACTIONS.index("alloc")), self._stack_of_block[block], -1)
        place = np.searchsorted(self._stacks, stack)
        pool = events["pool"][entries.row]
        items = {
            "action": references(self._action[action]),
            "addr": only_where(integers(np.where(is_oom, 0, entries.address), unsigned=True), ~is_oom),
            "size": integers(np.maximum(entries.size, 0)),
            "stream": integers(np.maximum(events["stream"][entries.row], 0)),
            "category": only_where(references(self._category[self._category_of_block[block]]), block >= 0),
            "frames": only_where(references(self._stack[place]), stack >= 0),
            "pool_id": only_where(
                references(self._pool[np.searchsorted(self._pools, pool)]), (pool >= 0) & has_address
            ),
            "device_free": only_where(integers(np.maximum(entries.device_free, 0)), is_oom),
        }
        if self._trace.manifest.coverage.has_times:
            items["time_us"] = integers(self._times_us(entries.row))
        return dictionaries({self._key[name]: rows for name, rows in items.items()}, len(entries))

    def _last_entry(self, history: DeviceHistory) -> ByteRows:
        """Return the entry of the snapshot itself.

        It names the category ``unknown``: PyTorch's viewer fails on histories with categories but without that one.
        """
        last_row = np.array([self._trace.num_rows("events") - 1])
        items = {
            "action": references(self._action[[ACTIONS.index("snapshot")]]),
            "addr": integers(np.zeros(1, np.int64)),
            "size": integers(np.array([live_size(self._trace, history)])),
            "stream": integers(np.zeros(1, np.int64)),
            "category": references(self._category[[CATEGORIES.index("unknown")]]),
        }
        if self._trace.manifest.coverage.has_times and last_row[0] >= 0:
            items["time_us"] = integers(self._times_us(last_row))
        return dictionaries({self._key[name]: rows for name, rows in items.items()}, 1)

    def _times_us(self, rows: Array) -> Array:
        epoch_ns = self._trace.manifest.t0_epoch_ns or 0
        times: Array = (self._trace.cached(event_times)[rows] + epoch_ns) // _NS_PER_US
        return times

    def _annotations(self) -> list[dict[str, Any]]:
        """Return the steps as the ranges that torch.profiler marks."""
        if not self._trace.manifest.coverage.has_times:
            return []
        epoch_ns = self._trace.manifest.t0_epoch_ns or 0
        steps = step_rows(self._trace)
        ends = steps.start_ns + steps.duration_ns
        return [
            {"name": f"ProfilerStep#{number}", "stage": stage, "device": 0, "time_us": (time + epoch_ns) // _NS_PER_US}
            for number, start, end in zip(steps.number.tolist(), steps.start_ns.tolist(), ends.tolist(), strict=True)
            for stage, time in (("START", start), ("END", end))
        ]


def _frame_lists(trace: Trace, stacks: list[int]) -> list[list[dict[str, Any]]]:
    """Return the frames of each stack as a snapshot has them, innermost first; equal frames are one object."""
    known: dict[Frame, dict[str, Any]] = {}

    def as_dict(frame: Frame) -> dict[str, Any]:
        if frame not in known:
            known[frame] = {"filename": sys.intern(frame.file), "line": frame.line, "name": sys.intern(frame.function)}
        return known[frame]

    return [[as_dict(frame) for frame in trace.frames(stack)] for stack in stacks]
