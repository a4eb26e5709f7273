"""The memory events of a Chrome trace as the tables ``events`` and ``counters``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import COUNTERS, EVENT_KINDS
from memtrace.readers.chrome_trace.collect import Collector
from memtrace.readers.lifetimes import ALLOC, FREE, Lifetimes, lifetimes, slots
from memtrace.readers.tables import Array, amount

if TYPE_CHECKING:
    import pyarrow as pa

_BASELINE: Final = np.int8(EVENT_KINDS.index("baseline"))
_OOM: Final = np.int8(EVENT_KINDS.index("oom"))
_CPU: Final = "cpu"


@dataclass(frozen=True)
class MemoryEvents:
    """Allocations, frees and out-of-memory events in order of time."""

    devices: list[str]
    time_ns: Array
    thread: Array
    device: Array
    size: Array
    kind: Array
    address: Array
    allocated: Array
    reserved: Array
    has_address: Array
    has_totals: Array

    def __len__(self) -> int:
        return len(self.time_ns)

    @classmethod
    def of(cls, found: Collector) -> MemoryEvents:
        """The collected events. Files are not always in order of time; equal times keep the file's order."""
        rows = found.memory + [(*oom[:3], oom[3], 0, 0, 0, 0, 0) for oom in found.out_of_memory]
        table = np.array(rows, np.int64).reshape(-1, 9)
        kind = np.where(table[:, 3] > 0, ALLOC, FREE)
        kind[len(found.memory) :] = _OOM
        order = np.argsort(table[:, 0], kind="stable")
        time, thread, device, size, address, allocated, reserved, has_address, has_totals = table[order].T
        return cls(
            found.devices,
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
    """The table ``events``, blocks older than the trace first, and what is to be said about it."""
    notes: list[str] = []
    lives = _lifetimes(memory, notes)
    older = np.flatnonzero(~lives.allocated)
    first = lives.first_row[older]
    rest_device, rest_size = _unseen(memory, first, notes)
    young = np.flatnonzero(lives.allocated)
    young = young[np.argsort(lives.first_row[young])]
    number = np.full(len(lives) + 1, -1, np.int64)
    number[older] = np.arange(len(older))
    count = len(older) + len(rest_size)
    number[young] = count + np.arange(len(young))
    device = np.concatenate([memory.device[first], rest_device, memory.device])
    block = np.concatenate([np.arange(count), number[lives.of_row]])
    size = np.concatenate([memory.size[first], rest_size, memory.size])
    kind = np.concatenate([np.full(count, _BASELINE), memory.kind])
    address = np.concatenate([memory.address[first], np.zeros(len(rest_size), np.int64), memory.address])
    addressed = np.concatenate([memory.has_address[first], np.zeros(len(rest_size), bool), memory.has_address])
    op = np.concatenate([np.full(count, -1, np.int64), op])
    thread = np.concatenate([np.full(count, -1, np.int64), memory.thread])
    on_cpu = np.array([name == _CPU for name in memory.devices], bool)[device]
    time = np.concatenate([np.full(count, memory.time_ns[0]), memory.time_ns]) - t0_ns
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
            "address": Known(address, addressed & (kind != _OOM)),
            "op_id": Known(op, op >= 0),
            "thread": Known(thread, thread >= 0),
        },
    )
    if not on_cpu.all():
        notes.append("its bytes on GPUs are the allocator's, rounding included: what was requested is not told")
    return table, notes


def _lifetimes(memory: MemoryEvents, notes: list[str]) -> Lifetimes:
    """The blocks, by their addresses; where there are none, a free ends the youngest block of its size."""
    place = memory.address
    blocks = memory.kind != _OOM
    if not memory.has_address[blocks].all():
        group = memory.device[blocks] * (np.int64(1) << 50) + memory.size[blocks]
        place = np.zeros(len(memory), np.int64)
        place[blocks] = slots(group, memory.kind[blocks])
        notes.append(
            "its events have no addresses: which of several blocks of one size a free ends is not told, and the "
            "youngest is "
            "assumed; totals are exact"
        )
    lives = lifetimes(memory.kind, memory.device, place, memory.size)
    wrong = [
        (int(lives.over_live.sum()), "allocations at an address still in use"),
        (int(lives.again.sum()), "frees of what was free"),
        (int(lives.size_changed.sum()), "blocks freed with another size than they were allocated with"),
    ]
    faults = [f"{count} {what}" for count, what in wrong if count]
    if faults:
        notes.append(f"events are missing or wrong: {'; '.join(faults)}")
    return lives


def _unseen(memory: MemoryEvents, older: Array, notes: list[str]) -> tuple[Array, Array]:
    """Per device the bytes allocated before the first event beyond the blocks (``older``) whose free the trace holds.

    They stand as one block, so that sums agree with the totals in the file.
    """
    devices, sizes = [], []
    for number, name in enumerate(memory.devices):
        rows = np.flatnonzero((memory.device == number) & memory.has_totals)
        known = int(memory.size[older][memory.device[older] == number].sum())
        if known:
            notes.append(f"blocks older than the trace and freed in it on {name}: {amount(known)}")
        if not len(rows):
            notes.append(
                f"it holds no totals for {name}: what was allocated before it began and not freed in it is unknown"
            )
            continue
        totals, signed = memory.allocated[rows], np.where(memory.kind[rows] == FREE, -1, 1) * memory.size[rows]
        jumps = int((np.diff(totals) != signed[1:]).sum())
        if jumps:
            notes.append(f"the total allocated on {name} jumps at {jumps} places: events are missing there")
        before = int(totals[0] - signed[0])
        if name == _CPU:
            notes.append(
                "torch counts the CPU's total from the beginning of the recording: what was allocated before "
                "(parameters, say) and not freed in it is unknown, and in no figure"
            )
            continue
        if before > known:
            devices.append(number)
            sizes.append(before - known)
            notes.append(
                f"{amount(before - known)} were allocated on {name} before the trace began and stay to its end: "
                "which blocks "
                "they are is not told, so they stand as one"
            )
        elif before < known:
            notes.append(f"the total allocated on {name} begins below the blocks that it later frees")
    return np.array(devices, np.int64), np.array(sizes, np.int64)


def counters_table(memory: MemoryEvents, *, t0_ns: int) -> pa.Table:
    """The table ``counters``: the file's own totals wherever they change. The CPU's are left out where they fall below
    0 (it frees what was there before), and its reserved total, which does not exist."""
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
