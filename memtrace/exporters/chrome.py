"""Chrome traces with the memory events of torch.profiler, for Perfetto, chrome://tracing and tools that read those.

Allocations and frees are ``[memory]`` events, steps ``ProfilerStep#N``, operators ``cpu_op`` and modules ``nn.Module``
slices, as ``torch.profiler`` writes them. A counter stacks the categories of each device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any, Final

import numpy as np

from memtrace.analysis.attribution import KIND, step_rows
from memtrace.analysis.blocks import allocated_sizes, blocks
from memtrace.analysis.peak import level_at, reserved_bytes
from memtrace.analysis.timeline import compute_timeline
from memtrace.exporters.byte_rows import CHUNK_ROWS
from memtrace.exporters.memory_events import event_times, failed_allocations
from memtrace.exporters.process_names import process_ids, rank_title, thread_names
from memtrace.exporters.slices import OPERATORS, SliceTrack, slice_tracks, window_start_ns
from memtrace.exporters.snapshot_entries import distinct_addresses
from memtrace.format.arrays import Array
from memtrace.format.device_types import DEVICE_TYPES
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

_MAX_COUNTER_POINTS: Final = 20_000
_FIRST_PROCESS_TRACK: Final = 1 << 20
"""Numbers of the tracks that belong to no thread begin here."""
_EVENT_CATEGORIES: Final = {"steps": "user_annotation", "modules": "python_function", OPERATORS: "cpu_op"}
_TYPE_NUMBERS: Final = {name: number for number, name in DEVICE_TYPES.items()}
_OTHER_DEVICE: Final = _TYPE_NUMBERS["privateuseone"]


def write_chrome_trace(trace: Trace, file: IO[bytes]) -> None:
    """Write a single-rank trace as a Chrome trace."""
    manifest = trace.manifest
    header: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceName": rank_title(trace)}
    if manifest.t0_epoch_ns is not None:
        header["baseTimeNanoseconds"] = manifest.t0_epoch_ns
    if manifest.rank_is_known:
        header["distributedInfo"] = {"rank": manifest.rank, "world_size": manifest.world_size}
    file.write(json.dumps(header)[:-1].encode("ascii") + b', "traceEvents": [\n')
    separator = b""
    for events in _event_chunks(trace):
        if events:
            file.write(separator + ",\n".join(events).encode("ascii"))
            separator = b",\n"
    file.write(b"\n]}\n")


def _event_chunks(trace: Trace) -> Iterator[list[str]]:
    """Yield events as JSON. Names are escaped to ASCII once; the rest of an event is numbers."""
    pid = process_ids(trace)[trace.ranks[0]]
    yield [_metadata("process_name", pid, 0, rank_title(trace))]
    yield [_metadata("thread_name", pid, thread, name) for thread, name in thread_names(trace).items()]
    num_process_tracks = 0
    for slices in slice_tracks(trace):
        tid = slices.thread
        if tid < 0:
            tid = _FIRST_PROCESS_TRACK + num_process_tracks
            num_process_tracks += 1
            yield [_metadata("thread_name", pid, tid, slices.name)]
        yield from _slices(trace, slices, pid, tid)
    for device in trace.devices:
        yield from _memory(trace, device, pid)
        yield _failures(trace, device, pid)
        yield _categories(trace, device, pid)


def _metadata(kind: str, pid: int, tid: int, name: str) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})


def _slices(trace: Trace, slices: SliceTrack, pid: int, tid: int) -> Iterator[list[str]]:
    names = slices.texts
    if slices.name == "modules":
        names = [f"nn.Module: {name}" for name in names]
    elif slices.name == "steps":
        names = [f"ProfilerStep#{number}" for number in step_rows(trace).number.tolist()]
    category = _EVENT_CATEGORIES.get(slices.name, slices.name.removesuffix("s"))
    heads = [f'{{"ph":"X","cat":"{category}","name":{json.dumps(name)},"pid":{pid},"tid":{tid},' for name in names]
    for rows in _chunks(len(slices)):
        columns = (slices.text[rows], slices.start_ns[rows], slices.duration_ns[rows])
        yield [
            f'{heads[text]}"ts":{_us(start)},"dur":{_us(duration)}}}'
            for text, start, duration in zip(*(column.tolist() for column in columns), strict=True)
        ]


def _memory(trace: Trace, device: str, pid: int) -> Iterator[list[str]]:
    """Yield the allocations and frees of a device, with the totals after each."""
    row, block, change, total = _changes(trace, device)
    reserved = reserved_bytes(trace, device)
    events = trace.columns("events", "thread")
    table, time_ns, start_ns = blocks(trace), trace.cached(event_times), window_start_ns(trace)
    device_fields = _device_fields(device)
    address = distinct_addresses(table, table.device == trace.devices.index(device))
    for rows in _chunks(len(row)):
        chosen = row[rows]
        columns = (
            np.where(chosen >= 0, np.maximum(events["thread"][chosen], 0), 0),
            np.where(chosen >= 0, time_ns[chosen], start_ns),
            address[block[rows]],
            change[rows],
            total[rows],
            level_at(reserved, chosen) if reserved is not None else np.zeros(len(chosen), np.int64),
            table.category[block[rows]],
        )
        yield [
            f'{{"ph":"i","cat":"cpu_instant_event","s":"t","name":"[memory]","pid":{pid},"tid":{tid},"ts":{_us(time)},'
            f'"args":{{{device_fields},"Addr":{address},"Bytes":{num_bytes},"Total Allocated":{allocated},'
            f'"Total Reserved":{held},"Category":"{CATEGORIES[category]}"}}}}'
            for tid, time, address, num_bytes, allocated, held, category in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]


def _changes(trace: Trace, device: str) -> tuple[Array, Array, Array, Array]:
    """Return the rows of allocations and frees, their blocks, the changes in bytes, and the totals after them.

    Bytes are those that the allocator counts, where all of them are known: torch.profiler has no others of a GPU. A
    block ends when the program frees it, even if a stream still uses it. The format has no blocks that are older than
    the file, so those are allocated at its start (row -1).
    """
    table = blocks(trace)
    on_device = (table.device == trace.devices.index(device)) & (table.size > 0)
    is_counted = device != "cpu" and not bool((allocated_sizes(trace)[on_device] < 0).any())
    sizes = allocated_sizes(trace) if is_counted else table.size
    events = trace.columns("events", "kind", "block_id")
    released = np.flatnonzero((events["kind"] == KIND["free_requested"]) & (events["block_id"] >= 0))
    free = table.free_event.copy()
    free[events["block_id"][released]] = released
    allocated, freed = np.flatnonzero(on_device), np.flatnonzero(on_device & (free >= 0))
    row = np.concatenate([table.alloc_event[allocated], free[freed]])
    block = np.concatenate([allocated, freed])
    change = np.concatenate([sizes[allocated], -sizes[freed]])
    order = np.argsort(row, kind="stable")
    return row[order], block[order], change[order], np.cumsum(change[order])


def _failures(trace: Trace, device: str, pid: int) -> list[str]:
    times, num_bytes = failed_allocations(trace, device)
    return [
        f'{{"ph":"i","cat":"cpu_instant_event","s":"t","name":"[OutOfMemory]","pid":{pid},"tid":0,"ts":{_us(time)},'
        f'"args":{{{_device_fields(device)},"Bytes":{requested}}}}}'
        for time, requested in zip(times.tolist(), num_bytes.tolist(), strict=True)
    ]


def _categories(trace: Trace, device: str, pid: int) -> list[str]:
    """Return the counter of a device: the bytes of each category, stacked, at the most telling moments."""
    timeline = compute_timeline(trace, device, _MAX_COUNTER_POINTS)
    used = [name for name in CATEGORIES if bool(timeline[name].any())]
    times = trace.cached(event_times)[timeline["event"].to_numpy()] if len(timeline) else np.zeros(0, np.int64)
    name = json.dumps(f"{device} memory by category")
    columns = [timeline[category].to_numpy().tolist() for category in used]
    events = []
    for time, *values in zip(times.tolist(), *columns, strict=True):
        arguments = ",".join(f'"{category}":{value}' for category, value in zip(used, values, strict=True))
        events.append(f'{{"ph":"C","name":{name},"pid":{pid},"tid":0,"ts":{_us(time)},"args":{{{arguments}}}}}')
    return events


def _device_fields(device: str) -> str:
    stem, _, number = device.partition(":")
    device_id = int(number) if number.isdecimal() else -1
    return f'"Device Type":{_TYPE_NUMBERS.get(stem, _OTHER_DEVICE)},"Device Id":{device_id}'


def _us(time_ns: int) -> str:
    """Return a time or duration in microseconds, exactly."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _chunks(num_rows: int) -> Iterator[slice]:
    return (slice(first, first + CHUNK_ROWS) for first in range(0, num_rows, CHUNK_ROWS))
