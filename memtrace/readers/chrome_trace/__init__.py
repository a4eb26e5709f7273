"""Chrome traces of torch.profiler with ``profile_memory=True``: from 2021 on, for CPU, CUDA, HIP and other devices.

On a GPU, the bytes of an event are those of the allocator's block, including rounding. They become ``allocated_size``,
and the requested size is unknown. On the CPU both sizes are the same. The totals in the file become ``counters``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from memtrace.errors import TraceError
from memtrace.format.encode import empty_tables
from memtrace.format.manifest import DeviceInfo, Manifest
from memtrace.readers.annotations import Range, Span, ranges_to_spans, spans_table
from memtrace.readers.chrome_trace.collect import Collector
from memtrace.readers.chrome_trace.memory import MemoryEvents, counters_table, events_table
from memtrace.readers.chrome_trace.operators import find_operator_calls, module_calls
from memtrace.readers.content import Content
from memtrace.readers.rank import ReadRank
from memtrace.readers.tables import Names, clean, new_manifest
from memtrace.readers.wording import format_clause

# Times after September 2001 belong to a clock that counts from the Unix epoch.
_MIN_EPOCH_NS: Final = 10**18


def read_chrome_trace(collector: Collector, properties: Mapping[str, Any], content: Content) -> ReadRank:
    """Convert a Chrome trace to a trace.

    Args:
        collector: the trace events.
        properties: the other members of the file.
        content: the file.

    Raises:
        TraceError: the file contains no memory events.
    """
    memory = MemoryEvents.of(collector)
    if not len(memory):
        raise TraceError(
            f"{content.path}: the Chrome trace contains no memory events. Record it with "
            "torch.profiler.profile(profile_memory=True)."
        )
    names = Names()
    t0_ns, last_ns = _time_range(collector, memory)
    calls = find_operator_calls(collector, memory.thread, memory.time_ns, names, t0_ns=t0_ns)
    spans = ranges_to_spans(_annotated_ranges(collector, t0_ns), names, first_ns=0, last_ns=last_ns)
    spans += [
        Span("module", names.text("module", call.module), call.start_ns - t0_ns, call.end_ns - t0_ns, -1)
        for call in module_calls(collector)
    ]
    events, notes = events_table(memory, calls.of_event, t0_ns=t0_ns)
    manifest = new_manifest("chrome_trace", content.path.name, _epoch_ns(properties, t0_ns))
    manifest = replace(_with_rank(manifest, properties), devices=_devices(properties, memory.devices))
    tables = empty_tables() | {
        "events": events,
        "ops": calls.table,
        "spans": spans_table(spans),
        "counters": counters_table(memory, t0_ns=t0_ns),
        "names": names.table(),
    }
    return ReadRank(manifest.with_notes(*notes, *_notes(collector)), tables)


def _time_range(collector: Collector, memory: MemoryEvents) -> tuple[int, int]:
    """Return the time at which the trace begins, and the time of the last memory event since then."""
    starts = [slices.start_ns for slices in (collector.operators, collector.functions, collector.annotations)]
    t0_ns = min([int(memory.time_ns[0]), *(min(times) for times in starts if times)])
    return t0_ns, int(memory.time_ns[-1]) - t0_ns


def _annotated_ranges(collector: Collector, t0_ns: int) -> list[Range]:
    texts = collector.names
    name, start, end, _, _ = collector.annotations.columns()
    return [
        Range(texts[item[0]], item[1] - t0_ns, item[2] - t0_ns)
        for item in zip(name.tolist(), start.tolist(), end.tolist(), strict=True)
    ]


def _notes(collector: Collector) -> list[str]:
    """Return sentences on what the file does not contain."""
    notes = []
    if collector.num_invalid:
        was_ignored = "without a valid time or size was ignored"
        were_ignored = "without a valid time or size were ignored"
        notes.append(format_clause(collector.num_invalid, "event", was_ignored, were_ignored))
    if not len(collector.operators.names):
        notes.append("The file contains no operators, so the operator that allocated a block is unknown")
    elif not len(collector.functions.names):
        notes.append(
            "The file contains no Python functions, so allocation sites and modules are unknown; record with "
            "with_stack=True to get them"
        )
    else:
        notes.append(
            "Allocation sites show the first line of a function: torch.profiler does not record the line that allocated"
        )
    return notes


def _epoch_ns(properties: Mapping[str, Any], t0_ns: int) -> int | None:
    """Return the Unix time at which the trace begins; None if the file does not reveal it.

    Newer files state the base of their clock, older ones count from 1970.
    """
    base_ns = properties.get("baseTimeNanoseconds")
    if isinstance(base_ns, int) and 0 <= base_ns < 1 << 62:
        return base_ns + t0_ns
    return t0_ns if t0_ns >= _MIN_EPOCH_NS else None


def _with_rank(manifest: Manifest, properties: Mapping[str, Any]) -> Manifest:
    """Return the manifest with the rank that the file states."""
    info = properties.get("distributedInfo")
    if not isinstance(info, dict):
        return manifest
    rank, size = info.get("rank"), info.get("world_size")
    if isinstance(rank, int) and 0 <= rank < 1 << 20:
        world_size = max(size, rank + 1) if isinstance(size, int) and size < 1 << 20 else rank + 1
        return replace(manifest, rank=rank, rank_is_known=True, world_size=world_size)
    return manifest


def _devices(properties: Mapping[str, Any], device_names: list[str]) -> dict[str, DeviceInfo]:
    """Return the model and the memory of each device that has events, None where the file does not state them."""
    listed = properties.get("deviceProperties")
    entries = {}
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            entries[entry["id"]] = entry
    devices: dict[str, DeviceInfo] = {}
    for device in device_names:
        number = device.partition(":")[2]
        entry = entries.get(int(number)) if number else None
        total = entry.get("totalGlobalMem") if entry else None
        devices[device] = DeviceInfo(
            name=clean(entry["name"]) if entry and isinstance(entry.get("name"), str) else None,
            total_bytes=total if isinstance(total, int) and 0 < total < 1 << 60 else None,
        )
    return devices
