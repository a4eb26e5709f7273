"""Compares the trace of a recording with torch's own history of the CUDA allocator and with its counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from memtrace.analysis.peak import find_peak
from memtrace.format.schema import EVENT_KINDS
from memtrace.trace import Trace

KINDS: Final = {
    "alloc": "alloc",
    "free_requested": "free_requested",
    "free_completed": "free",
    "segment_alloc": "segment_alloc",
    "segment_free": "segment_free",
    "segment_map": "segment_map",
    "segment_unmap": "segment_unmap",
    "oom": "oom",
}
"""Kind of event of each action of torch's history."""
COUNTERS: Final = ("requested", "allocated", "active", "reserved")


class HistoryEvent(NamedTuple):
    """One event of the allocator."""

    kind: str
    size: int
    address: int
    stream: int
    pool: int
    device_free: int


@dataclass
class TorchRecord:
    """What torch itself knows of a recorded program. Its history must be enabled."""

    first: list[Any] = field(default_factory=list)
    """Segments when the recording began; empty: it began before CUDA was initialised."""
    num_older: list[int] = field(default_factory=list)
    """Number of entries of each device's history when the recording began."""
    last: dict[str, Any] = field(default_factory=dict)
    """Snapshot when it ended."""
    readings: list[tuple[list[int], list[dict[str, int]]]] = field(default_factory=list)
    """At each mark: the number of entries of each device's history, and the counters of each device."""
    peaks: list[dict[str, int]] = field(default_factory=list)
    """Counters of each device when the recording ended."""

    def begin(self) -> None:
        """The recording begins now, and not with the process."""
        snapshot = torch.cuda.memory._snapshot()
        self.first, self.num_older, self.readings = snapshot["segments"], _num_entries(snapshot), []
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)

    def mark(self) -> None:
        """Read the counters of all devices."""
        self.readings.append((_num_entries(torch.cuda.memory._snapshot()), _counters()))

    def end(self) -> None:
        """The recording ends now: read the counters and the history."""
        self.peaks = _counters()
        self.last = torch.cuda.memory._snapshot()

    def older(self, device: int) -> int:
        """Return the number of entries of a device that are older than the recording."""
        return self.num_older[device] if self.num_older else 0


def enable_history() -> None:
    """Have torch keep a history of all allocations, without stacks."""
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**7)


def find_differences(trace: Trace, record: TorchRecord) -> list[str]:
    """Return the differences between a trace and torch's history, the first of each kind; empty: they are equal."""
    if (manifest := trace.manifest).source.observer != "native":
        return [f"recorded by the {manifest.source.observer} observer"]
    if manifest.coverage.lost_events != 0:
        return [f"{manifest.coverage.lost_events} events are lost"]
    return list(_differences(trace, record))


def _differences(trace: Trace, record: TorchRecord) -> Iterator[str]:
    for number, entries in enumerate(record.last["device_traces"]):
        device = f"cuda:{number}"
        entries = [entry for entry in entries[record.older(number) :] if entry["action"] in KINDS]
        if not entries and not any(segment["device"] == number for segment in record.last["segments"]):
            continue
        if device not in trace.devices:
            yield f"{device} is missing"
            continue
        rows = _device_rows(trace, device)
        yield from _event_differences(device, [_of_entry(entry) for entry in entries], rows)
        yield from _identity_differences(device, rows)
        yield from _block_differences(device, rows, record, number)
        yield from _counter_differences(device, rows, record, number)
        yield from _total_differences(trace, device, record, number)
        yield from _segment_differences(trace, device, record.last["segments"], number)


def _num_entries(snapshot: Mapping[str, Any]) -> list[int]:
    return [len(entries) for entries in snapshot["device_traces"]]


def _counters() -> list[dict[str, int]]:
    return [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]


def _pool_number(pool: tuple[int, int]) -> int:
    capture, user = pool
    return 2 * capture + 1 if capture else 2 * user


def _of_entry(entry: Mapping[str, Any]) -> HistoryEvent:
    is_oom = entry["action"] == "oom"
    return HistoryEvent(
        KINDS[entry["action"]], entry["size"], -1 if is_oom else entry["addr"], entry["stream"],
        _pool_number(entry["pool_id"]) if "pool_id" in entry else -1, entry["device_free"] if is_oom else -1,
    )  # fmt: skip


def _device_rows(trace: Trace, device: str) -> dict[str, list[Any]]:
    """Return the columns of the allocator's events of a device, baselines included."""
    kinds = [EVENT_KINDS.index(kind) for kind in (*KINDS.values(), "baseline")]
    names = ("kind", "device", "block_id", "size", "allocated_size", "address", "stream", "pool", "device_free")
    events = trace.columns("events", *names)
    rows = (events["device"] == trace.devices.index(device)) & np.isin(events["kind"], kinds)
    columns: dict[str, list[Any]] = {name: column[rows].tolist() for name, column in events.items()}
    columns["kind"] = [EVENT_KINDS[code] for code in columns["kind"]]
    return columns


def _event_differences(device: str, expected: Sequence[HistoryEvent], rows: dict[str, list[Any]]) -> Iterator[str]:
    columns = (rows[name] for name in HistoryEvent._fields)
    events = [HistoryEvent(*values) for values in zip(*columns, strict=True) if values[0] != "baseline"]
    for number, (wanted, event) in enumerate(zip(expected, events, strict=False)):
        if wanted.pool < 0:
            event = event._replace(pool=-1)
        if wanted != event:
            yield f"{device}, event {number} of {len(expected)}: expected {wanted}, recorded {event}"
            return
    if len(expected) != len(events):
        extra = expected[len(events)] if len(expected) > len(events) else events[len(expected)]
        yield f"{device}: expected {len(expected)} events, recorded {len(events)}; the first in one only: {extra}"


def _identity_differences(device: str, rows: dict[str, list[Any]]) -> Iterator[str]:
    """Every free must name the block that was last allocated at its address."""
    block_at: dict[int, int] = {}
    for kind, address, block in zip(rows["kind"], rows["address"], rows["block_id"], strict=True):
        if kind in ("alloc", "baseline"):
            block_at[address] = block
        elif kind in ("free", "free_requested") and block_at.get(address) != block:
            yield f"{device}: {kind} at {address:#x} names block {block}, not {block_at.get(address)}"
            return


def _live_blocks(segments: Iterable[Mapping[str, Any]], device: int) -> dict[int, tuple[int, int]]:
    """Return requested and allocated bytes by address, of blocks that are in use or wait for a stream."""
    return {
        block["address"]: (block["requested_size"], block["size"])
        for segment in segments
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }


def _block_differences(device: str, rows: dict[str, list[Any]], record: TorchRecord, number: int) -> Iterator[str]:
    older, live = {}, {}
    columns = (rows[name] for name in ("kind", "address", "size", "allocated_size"))
    for kind, address, requested, allocated in zip(*columns, strict=True):
        if kind == "baseline":
            older[address] = (requested, allocated)
        if kind in ("alloc", "baseline"):
            live[address] = (requested, allocated)
        elif kind == "free":
            live.pop(address, None)
    for when, recorded, segments in (("beginning", older, record.first), ("end", live, record.last["segments"])):
        expected = _live_blocks(segments, number)
        wrong = sorted(
            address for address in expected.keys() | recorded if expected.get(address) != recorded.get(address)
        )
        if wrong:
            address = wrong[0]
            yield (
                f"{device}, live blocks at the {when}: {len(wrong)} of {len(expected)} differ; {address:#x} has "
                f"(requested, allocated) bytes {expected.get(address)}, recorded {recorded.get(address)}"
            )


def _counter_differences(device: str, rows: dict[str, list[Any]], record: TorchRecord, number: int) -> Iterator[str]:
    """The events up to each mark must add up to the counters of the allocator at that mark."""
    entries = [entry["action"] in KINDS for entry in record.last["device_traces"][number]]
    totals = _running_totals(rows, record, number)
    for mark, (num_entries, counters) in enumerate(record.readings):
        num_events = sum(entries[record.older(number) : num_entries[number]])
        for name in COUNTERS:
            expected = counters[number][f"{name}_bytes.all.current"]
            recorded = totals[name][min(num_events, len(totals[name]) - 1)]
            if expected != recorded:
                yield f"{device}, mark {mark} (event {num_events}): {name} is {expected}, recorded {recorded}"
                return


def _running_totals(rows: dict[str, list[Any]], record: TorchRecord, number: int) -> dict[str, list[int]]:
    """Return each counter after every event, as the events of the trace and the older segments give it."""
    reserved = sum(segment["total_size"] for segment in record.first if segment["device"] == number)
    waiting = sum(
        block["size"] for segment in record.first if segment["device"] == number for block in segment["blocks"]
        if block["state"] == "active_pending_free"
    )  # fmt: skip
    now = dict.fromkeys(COUNTERS, 0) | {"reserved": reserved, "allocated": -waiting}
    totals: dict[str, list[int]] = {name: [] for name in COUNTERS}
    num_baselines = rows["kind"].count("baseline")
    columns = (rows[name] for name in ("kind", "size", "allocated_size"))
    for row, (kind, requested, allocated) in enumerate(zip(*columns, strict=True)):
        if row >= num_baselines:
            for name in COUNTERS:
                totals[name].append(now[name])
        sign = -1 if kind in ("free", "free_requested", "segment_free", "segment_unmap") else 1
        if kind in ("alloc", "baseline", "free"):
            now["requested"] += sign * requested
            now["active"] += sign * allocated
        if kind in ("alloc", "baseline", "free_requested"):
            now["allocated"] += sign * allocated
        if kind.startswith("segment"):
            now["reserved"] += sign * requested
    for name in COUNTERS:
        totals[name].append(now[name])
    return totals


def _total_differences(trace: Trace, device: str, record: TorchRecord, number: int) -> Iterator[str]:
    peak, stats = find_peak(trace, device), record.peaks[number]
    expected = {
        "requested bytes at the peak": (stats["requested_bytes.all.peak"], peak.requested.bytes),
        "allocated bytes at the peak": (
            stats["allocated_bytes.all.peak"],
            peak.allocated.bytes if peak.allocated else None,
        ),
        "reserved bytes at the peak": (
            stats["reserved_bytes.all.peak"],
            peak.reserved.bytes if peak.reserved else None,
        ),
        "requested bytes at the end": (stats["requested_bytes.all.current"], peak.end_bytes),
        "reserved bytes at the end": (stats["reserved_bytes.all.current"], peak.reserved_end_bytes),
    }
    for name, (wanted, recorded) in expected.items():
        if wanted != recorded:
            yield f"{device}: {name}: expected {wanted}, recorded {recorded}"


def _segment_differences(
    trace: Trace, device: str, segments: Iterable[Mapping[str, Any]], number: int
) -> Iterator[str]:
    names = ("device", "address", "size", "allocated_size", "active_size", "requested_size", "stream", "pool", "small",
             "expandable")  # fmt: skip
    table = trace.columns("segments", *names)
    rows = table["device"] == trace.devices.index(device)
    recorded = sorted(zip(*(table[name][rows].tolist() for name in names[1:]), strict=True))
    expected = sorted(
        (
            segment["address"], segment["total_size"], segment["allocated_size"], segment["active_size"],
            segment["requested_size"], segment["stream"], _pool_number(segment["segment_pool_id"]),
            segment["segment_type"] == "small", segment["is_expandable"],
        )
        for segment in segments
        if segment["device"] == number
    )  # fmt: skip
    for wanted, row in zip(expected, recorded, strict=False):
        if wanted != row:
            yield f"{device}, segments at the end: expected {wanted}, recorded {row}"
            return
    if len(expected) != len(recorded):
        yield f"{device}: expected {len(expected)} segments at the end, recorded {len(recorded)}"
