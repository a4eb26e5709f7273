"""Chrome traces of ``torch.profiler`` with ``profile_memory=True``: 2021 to today, CPU, CUDA, HIP and others.

On a GPU the bytes of an event are those of the allocator's block, rounding included: they become ``allocated_size``,
and what was requested is unknown. On the CPU both are the same. The totals in the file become ``counters``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from memtrace.errors import TraceError
from memtrace.format.encode import empty_tables
from memtrace.format.manifest import DeviceInfo, Manifest
from memtrace.readers.annotations import Range, Span, spans_of, spans_table
from memtrace.readers.chrome_trace.collect import Collector
from memtrace.readers.chrome_trace.memory import MemoryEvents, counters_table, events_table
from memtrace.readers.chrome_trace.operators import module_spans, operator_calls
from memtrace.readers.content import Content
from memtrace.readers.tables import Names, clean, new_manifest

if TYPE_CHECKING:
    from memtrace.readers.registry import Rank

# Microseconds since 2001 or later: a clock that counts from the Unix epoch.
_EPOCH_NS: Final = 10**18


def chrome_tables(found: Collector, about: Mapping[str, Any], content: Content) -> Rank:
    """Manifest and tables from the collected events and the other members (``about``) of the file."""
    memory = MemoryEvents.of(found)
    if not len(memory):
        raise TraceError(
            f"{content.path} is a Chrome trace without memory events. Record it with "
            "torch.profiler.profile(profile_memory=True)."
        )
    starts = [slices.start_ns for slices in (found.operators, found.functions, found.annotations)]
    t0 = min([int(memory.time_ns[0]), *(min(times) for times in starts if times)])
    last = int(memory.time_ns[-1]) - t0
    names = Names()
    calls = operator_calls(found, memory.thread, memory.time_ns, names, t0_ns=t0)
    texts = found.names
    name, start, end, _, _ = found.annotations.columns()
    ranges = [
        Range(texts[item[0]], item[1] - t0, item[2] - t0)
        for item in zip(name.tolist(), start.tolist(), end.tolist(), strict=True)
    ]
    spans = spans_of(ranges, names, first_ns=0, last_ns=last)
    spans += [
        Span("module", names.text("module", text), begin - t0, finish - t0, -1)
        for text, begin, finish, _ in module_spans(found)
    ]
    events, notes = events_table(memory, calls.of_event, t0_ns=t0)
    manifest = new_manifest("chrome_trace", content.path.name, _epoch(about, t0))
    manifest = replace(_with_rank(manifest, about), devices=_devices(about, memory.devices))
    if found.num_odd:
        notes.append(f"{found.num_odd} events without a usable time or size were left out")
    if not len(found.operators.names):
        notes.append("it holds no operators: which one made a block cannot be told")
    elif not len(found.functions.names):
        notes.append("it holds no Python functions (record with_stack=True): lines and modules cannot be told")
    else:
        notes.append("its lines are those on which functions begin: which line within allocated is not told")
    return manifest.with_notes(*notes), empty_tables() | {
        "events": events,
        "ops": calls.table,
        "spans": spans_table(spans),
        "counters": counters_table(memory, t0_ns=t0),
        "names": names.table(),
    }


def _epoch(about: Mapping[str, Any], t0_ns: int) -> int | None:
    """The Unix time of the trace's beginning: newer files give the base of their clock, older ones count from 1970."""
    base = about.get("baseTimeNanoseconds")
    if isinstance(base, int) and 0 <= base < 1 << 62:
        return base + t0_ns
    return t0_ns if t0_ns >= _EPOCH_NS else None


def _with_rank(manifest: Manifest, about: Mapping[str, Any]) -> Manifest:
    info = about.get("distributedInfo")
    if not isinstance(info, dict):
        return manifest
    rank, size = info.get("rank"), info.get("world_size")
    if isinstance(rank, int) and 0 <= rank < 1 << 20:
        world_size = max(size, rank + 1) if isinstance(size, int) and size < 1 << 20 else rank + 1
        return replace(manifest, rank=rank, rank_is_known=True, world_size=world_size)
    return manifest


def _devices(about: Mapping[str, Any], seen: list[str]) -> dict[str, DeviceInfo]:
    """Name and memory of the devices that have events, as the file tells them."""
    properties = about.get("deviceProperties")
    told = {}
    for entry in properties if isinstance(properties, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            told[entry["id"]] = entry
    devices: dict[str, DeviceInfo] = {}
    for device in seen:
        number = device.partition(":")[2]
        entry = told.get(int(number)) if number else None
        total = entry.get("totalGlobalMem") if entry else None
        devices[device] = DeviceInfo(
            name=clean(entry["name"]) if entry and isinstance(entry.get("name"), str) else None,
            total_bytes=total if isinstance(total, int) and 0 < total < 1 << 60 else None,
        )
    return devices
