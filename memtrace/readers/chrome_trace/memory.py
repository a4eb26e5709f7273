"""Builds the tables ``events`` and ``counters`` from the memory events of a Chrome trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import COUNTERS, EVENT_KINDS
from memtrace.readers.chrome_trace.collect import Collector
from memtrace.readers.lifetimes import ALLOC, FREE, Lifetimes, assign_slots, describe_contradictions, find_lifetimes
from memtrace.readers.tables import Array
from memtrace.units import format_bytes, format_count

if TYPE_CHECKING:
    import pyarrow as pa

_BASELINE: Final = np.int8(EVENT_KINDS.index("baseline"))
_OOM: Final = np.int8(EVENT_KINDS.index("oom"))
_CPU: Final = "cpu"


@dataclass(frozen=True)
class MemoryEvents:
    """Allocations, frees and out-of-memory events in order of time; each array has one element per event."""

    devices: list[str]
    """Names of the devices."""
    time_ns: Array
    thread: Array
    device: Array
    """Index into ``devices``."""
    size: Array
    """Bytes, not negative."""
    kind: Array
    """Index into ``EVENT_KINDS``."""
    address: Array
    allocated: Array
    """The file's own total of allocated bytes on the device after the event."""
    reserved: Array
    """The file's own total of reserved bytes on the device after the event."""
    has_address: Array
    has_totals: Array

    def __len__(self) -> int:
        return len(self.time_ns)

    @classmethod
    def of(cls, collector: Collector) -> MemoryEvents:
        """Sort the collected events by time; events at the same time keep the order of the file."""
        rows = collector.memory + [(*oom[:3], oom[3], 0, 0, 0, 0, 0) for oom in collector.out_of_memory]
        table = np.array(rows, np.int64).reshape(-1, 9)
        kind = np.where(table[:, 3] > 0, ALLOC, FREE)
        kind[len(collector.memory) :] = _OOM
        order = np.argsort(table[:, 0], kind="stable")
        time, thread, device, size, address, allocated, reserved, has_address, has_totals = table[order].T
        return cls(
            collector.devices,
            time,
            thread,
            device,
            np.abs(size),
            kind[order],
            address,
            allocated,
            reserved,
            has_address.astype(bool),
            has_totals.astype(bool),
        )


def events_table(memory: MemoryEvents, op: Array, *, t0_ns: int) -> tuple[pa.Table, list[str]]:
    """Build the table ``events``, with the blocks that are older than the trace first.

    Args:
        memory: the memory events.
        op: for each event its row in the table ``ops``, -1 for none.
        t0_ns: time at which the trace begins.

    Returns:
        The table, and sentences on what is unknown.
    """
    notes: list[str] = []
    lives = _find_blocks(memory, notes)
    older = np.flatnonzero(~lives.allocated)
    first_row = lives.first_row[older]
    merged_device, merged_size = _merged_older_blocks(memory, first_row, notes)
    num_merged = len(merged_size)
    num_older = len(older) + num_merged
    allocated = np.flatnonzero(lives.allocated)
    allocated = allocated[np.argsort(lives.first_row[allocated])]
    number = np.full(len(lives) + 1, -1, np.int64)
    number[older] = np.arange(len(older))
    number[allocated] = num_older + np.arange(len(allocated))
    device = np.concatenate([memory.device[first_row], merged_device, memory.device])
    block = np.concatenate([np.arange(num_older), number[lives.of_row]])
    size = np.concatenate([memory.size[first_row], merged_size, memory.size])
    kind = np.concatenate([np.full(num_older, _BASELINE), memory.kind])
    address = np.concatenate([memory.address[first_row], np.zeros(num_merged, np.int64), memory.address])
    has_address = np.concatenate([memory.has_address[first_row], np.zeros(num_merged, bool), memory.has_address])
    op = np.concatenate([np.full(num_older, -1, np.int64), op])
    thread = np.concatenate([np.full(num_older, -1, np.int64), memory.thread])
    on_cpu = np.array([name == _CPU for name in memory.devices], bool)[device]
    time = np.concatenate([np.full(num_older, memory.time_ns[0]), memory.time_ns]) - t0_ns
    table = make_table(
        "events",
        len(kind),
        {
            "time_ns": time,
            "kind": Text(kind, EVENT_KINDS),
            "device": Text(device.astype(np.int8), memory.devices),
            "block_id": Known(block, block >= 0),
            "size": Known(size, on_cpu | (kind == _OOM)),
            "allocated_size": Known(size, kind != _OOM),
            "address": Known(address, has_address & (kind != _OOM)),
            "op_id": Known(op, op >= 0),
            "thread": Known(thread, thread >= 0),
        },
    )
    if not on_cpu.all():
        notes.append("Sizes on GPUs are those of allocator blocks, including rounding; requested sizes are unknown")
    return table, notes


def _find_blocks(memory: MemoryEvents, notes: list[str]) -> Lifetimes:
    """Find the blocks by their addresses; without addresses, a free ends the youngest block of its size."""
    address = memory.address
    of_block = memory.kind != _OOM
    if not memory.has_address[of_block].all():
        group = memory.device[of_block] * (np.int64(1) << 50) + memory.size[of_block]
        address = np.zeros(len(memory), np.int64)
        address[of_block] = assign_slots(group, memory.kind[of_block])
        notes.append(
            "Events have no addresses, so memtrace assumes that a free ends the youngest block of its size; totals are "
            "exact"
        )
    lives = find_lifetimes(memory.kind, memory.device, address, memory.size)
    contradictions = describe_contradictions(lives)
    if contradictions:
        notes.append(f"Events are missing or wrong: {'; '.join(contradictions)}")
    return lives


def _merged_older_blocks(memory: MemoryEvents, freed_older: Array, notes: list[str]) -> tuple[Array, Array]:
    """Merge the blocks that are older than the trace and never freed in it into one block per device.

    With them, the sums of the blocks equal the totals in the file.

    Args:
        memory: the memory events.
        freed_older: the first row of each block that is older than the trace and freed in it.
        notes: receives sentences on what is unknown.

    Returns:
        The device and the size of each merged block.
    """
    devices, sizes = [], []
    for number, name in enumerate(memory.devices):
        rows = np.flatnonzero((memory.device == number) & memory.has_totals)
        freed_bytes = int(memory.size[freed_older][memory.device[freed_older] == number].sum())
        if freed_bytes:
            notes.append(f"Blocks of {format_bytes(freed_bytes)} on {name} are older than the trace and freed in it")
        if not len(rows):
            notes.append(
                f"The file has no totals for {name}, so memory that was allocated before the trace began and not freed "
                "in it is unknown"
            )
            continue
        totals, signed = memory.allocated[rows], np.where(memory.kind[rows] == FREE, -1, 1) * memory.size[rows]
        num_jumps = int((np.diff(totals) != signed[1:]).sum())
        if num_jumps:
            notes.append(
                f"Events are missing: the total of allocated memory on {name} jumps {format_count(num_jumps, 'time')}"
            )
        initial_bytes = int(totals[0] - signed[0])
        if name == _CPU:
            notes.append(
                "CPU memory that was allocated before the recording began (such as parameters) and not freed in it is "
                "unknown and not counted, because torch.profiler counts CPU memory from the beginning of the recording"
            )
            continue
        if initial_bytes > freed_bytes:
            devices.append(number)
            sizes.append(initial_bytes - freed_bytes)
            notes.append(
                f"{format_bytes(initial_bytes - freed_bytes)} on {name} were allocated before the trace began and "
                "never freed; the file does not list their blocks, so memtrace shows them as one block"
            )
        elif initial_bytes < freed_bytes:
            notes.append(
                f"The total of allocated memory on {name} begins below the size of the older blocks that are freed"
            )
    return np.array(devices, np.int64), np.array(sizes, np.int64)


def counters_table(memory: MemoryEvents, *, t0_ns: int) -> pa.Table:
    """Build the table ``counters`` from the totals in the file, with a row wherever a total changes.

    Totals of the CPU are left out where they fall below 0 (because blocks older than the recording were freed), and so
    is its reserved total, which does not exist.
    """
    times, devices, names, values = [], [], [], []
    for number, name in enumerate(memory.devices):
        rows = np.flatnonzero((memory.device == number) & memory.has_totals)
        for code, totals in enumerate((memory.allocated[rows], memory.reserved[rows])):
            if not len(rows) or totals.min() < 0 or (name == _CPU and COUNTERS[code] == "reserved"):
                continue
            changes = np.ones(len(rows), bool)
            changes[1:] = totals[1:] != totals[:-1]
            times.append(memory.time_ns[rows[changes]] - t0_ns)
            devices.append(np.full(int(changes.sum()), number, np.int8))
            names.append(np.full(int(changes.sum()), code, np.int8))
            values.append(totals[changes])
    if not times:
        return make_table("counters", 0, {})
    time = np.concatenate(times)
    order = np.argsort(time, kind="stable")
    return make_table(
        "counters",
        len(time),
        {
            "time_ns": time[order],
            "device": Text(np.concatenate(devices)[order], memory.devices),
            "name": Text(np.concatenate(names)[order], COUNTERS),
            "value": np.concatenate(values)[order],
        },
    )
