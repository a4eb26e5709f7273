"""Peaks: how much was live at most, when, and what held it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.attribution import KIND, op_column, phase_rows, rows_at, step_rows
from memtrace.analysis.blocks import Blocks, blocks, blocks_table
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES, COUNTERS, PHASES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Maximum:
    """The maximum over time of one way to count: bytes, and the event after which it was reached (-1: the start)."""

    bytes: int
    event: int


@dataclass(frozen=True)
class Peak:
    """The peaks of one device. ``allocated`` and ``reserved`` are None where the trace cannot tell them.

    ``requested``, ``baseline_bytes`` and ``end_bytes`` are of requested bytes, or, where ``is_requested`` is False, of
    the allocator's.
    """

    device: str
    is_requested: bool
    requested: Maximum
    allocated: Maximum | None
    reserved: Maximum | None
    time_ns: int | None
    step: int | None
    phase: str | None
    live: Array
    """The blocks live at the requested peak, by number."""
    baseline_bytes: int
    end_bytes: int
    reserved_end: int | None


@dataclass(frozen=True)
class LiveBytes:
    """The running sum of one device: ``start``, and after each of ``rows`` of events ``bytes`` are live."""

    rows: Array
    bytes: Array
    start: int


def live_bytes(trace: Trace, device: str, sizes: Array) -> LiveBytes:
    """The bytes live on a device over its allocations and frees, counted in ``sizes`` (a column of ``Blocks``)."""
    found = blocks(trace)
    events = trace.columns("events", "kind", "block_id")
    here = found.device == trace.devices.index(device)
    start = int(sizes[here & (found.alloc_event < 0)].sum())
    rows = np.concatenate(
        [found.alloc_event[here & (found.alloc_event >= 0)], found.free_event[here & (found.free_event >= 0)]]
    )
    rows.sort()
    change = sizes[events["block_id"][rows]]
    change = np.where(events["kind"][rows] == KIND["free"], -change, change)
    return LiveBytes(rows, start + np.cumsum(change), start)


def requested_bytes(trace: Trace, device: str) -> LiveBytes:
    """The running sum of requested bytes, worked out once."""
    return trace.cached(_requested_bytes, device)


def _requested_bytes(trace: Trace, device: str) -> LiveBytes:
    return live_bytes(trace, device, blocks(trace).size)


def reserved_bytes(trace: Trace, device: str) -> LiveBytes | None:
    """The running sum of the device's segments, or the file's own count; None where it tells neither (the CPU)."""
    return trace.cached(_reserved_bytes, device)


def _reserved_bytes(trace: Trace, device: str) -> LiveBytes | None:
    events = trace.columns("events", "kind", "device", "size")
    grows = (events["kind"] == KIND["segment_alloc"]) | (events["kind"] == KIND["segment_map"])
    shrinks = (events["kind"] == KIND["segment_free"]) | (events["kind"] == KIND["segment_unmap"])
    code = trace.devices.index(device)
    rows = np.flatnonzero((grows | shrinks) & (events["device"] == code))
    segments = trace.columns("segments", "device", "size")
    final = segments["device"] == code
    if not len(rows) and not final.any():
        return counted_bytes(trace, device, "reserved")
    change = np.where(grows[rows], events["size"][rows], -events["size"][rows])
    # The segments at the end, where they are told, give what there was at the start.
    start = int(segments["size"][final].sum()) - int(change.sum()) if trace.num_rows("segments") else 0
    return LiveBytes(rows, start + np.cumsum(change), start)


def counted_bytes(trace: Trace, device: str, counter: str) -> LiveBytes | None:
    """A total of the file's own count over time; None where it has none. ``start`` is the first that was read."""
    counters = trace.columns("counters", "time_ns", "device", "name", "value")
    mine = (counters["device"] == trace.devices.index(device)) & (counters["name"] == COUNTERS.index(counter))
    if not mine.any():
        return None
    value = counters["value"][mine]
    return LiveBytes(rows_at(trace, counters["time_ns"][mine] + 1) - 1, value, int(value[0]))


def level_at(live: LiveBytes, rows: Array) -> Array:
    """What is live once each of ``rows`` of events has happened; row -1 is the start."""
    level = np.concatenate([[live.start], live.bytes])
    return level[np.searchsorted(live.rows, rows, side="right")]


def _maximum(live: LiveBytes) -> Maximum:
    if not len(live.rows) or int(live.bytes.max()) <= live.start:
        return Maximum(live.start, -1)
    place = int(live.bytes.argmax())
    return Maximum(int(live.bytes[place]), int(live.rows[place]))


def _allocated(trace: Trace, device: str, found: Blocks) -> Maximum | None:
    counted = counted_bytes(trace, device, "allocated")
    if counted is not None:
        return _maximum(counted)
    here = found.device == trace.devices.index(device)
    if (found.allocated_size[here] < 0).any():
        return None
    same = np.array_equal(found.allocated_size[here], found.size[here])
    return _maximum(requested_bytes(trace, device) if same else live_bytes(trace, device, found.allocated_size))


def live_after(found: Blocks, device: int, event: int) -> Array:
    """The blocks of a device that are live once a row of events has happened (-1: at the start)."""
    live = (
        (found.device == device) & (found.alloc_event <= event) & ((found.free_event < 0) | (found.free_event > event))
    )
    return np.flatnonzero(live)


def peak(trace: Trace, device: str) -> Peak:
    """The peaks of one device and what was live at the requested one; worked out once."""
    return trace.cached(_peak, device)


def _peak(trace: Trace, device: str) -> Peak:
    found, live = blocks(trace), requested_bytes(trace, device)
    top, reserved = _maximum(live), reserved_bytes(trace, device)
    row = np.array([max(top.event, 0)])
    step = int(step_rows(trace).of_rows(row)[0])
    return Peak(
        device=device,
        is_requested=bool(found.size_is_requested[found.device == trace.devices.index(device)].all()),
        requested=top,
        allocated=_allocated(trace, device, found),
        reserved=_maximum(reserved) if reserved is not None else None,
        time_ns=_time_of(trace, top.event),
        step=step if step >= 0 else None,
        phase=_phase_at(trace, row) if top.event >= 0 else None,
        live=live_after(found, trace.devices.index(device), top.event),
        baseline_bytes=live.start,
        end_bytes=_end_bytes(trace, device, live),
        reserved_end=_last(reserved) if reserved is not None else None,
    )


def _time_of(trace: Trace, event: int) -> int | None:
    return int(trace.columns("events", "time_ns")["time_ns"][event]) if event >= 0 and trace.has_times else None


def _last(live: LiveBytes) -> int:
    return int(live.bytes[-1]) if len(live.bytes) else live.start


def _end_bytes(trace: Trace, device: str, live: LiveBytes) -> int:
    """What the segments say is live at the end, where they do: a history that was edited may say otherwise."""
    segments = trace.columns("segments", "device", "requested_size")
    told = segments["requested_size"][segments["device"] == trace.devices.index(device)]
    return int(told.sum()) if len(told) and (told >= 0).all() else _last(live)


def _phase_at(trace: Trace, row: Array) -> str | None:
    code = int(op_column(trace, trace.columns("events", "op_id")["op_id"][row], "phase")[0])
    spans = phase_rows(trace)
    if code < 0 and spans is not None:
        code = int(spans.phase[spans.pieces(row)][0])
    return PHASES[code] if code >= 0 else None


def sums(keys: Array, sizes: Array) -> list[tuple[int, int, int]]:
    """(key, bytes, number of blocks) for every key, the most bytes first."""
    values, inverse = np.unique(keys, return_inverse=True)
    # Exact in float64 up to 2**53 bytes.
    total = np.bincount(inverse, weights=sizes, minlength=len(values)).astype(np.int64)
    number = np.bincount(inverse, minlength=len(values))
    order = np.argsort(-total, kind="stable")
    return [(int(values[i]), int(total[i]), int(number[i])) for i in order]


def _grouped(
    trace: Trace, live: Array, column: str, text: Callable[[int], str | None]
) -> list[tuple[str | None, int, int]]:
    found = blocks(trace)
    merged: dict[str | None, tuple[int, int]] = {}
    for key, size, number in sums(getattr(found, column)[live], found.size[live]):
        name = text(key)
        before = merged.get(name, (0, 0))
        merged[name] = (before[0] + size, before[1] + number)
    return sorted(((name, *both) for name, both in merged.items()), key=lambda row: -row[1])


def by_category(trace: Trace, live: Array) -> list[tuple[str | None, int, int]]:
    """(category, requested bytes, blocks) of some blocks, the most bytes first."""
    return _grouped(trace, live, "category", lambda code: CATEGORIES[code])


def owners(trace: Trace, chosen: Array) -> tuple[list[str | None], Array]:
    """The distinct modules that own some blocks (None: unknown), and for each block the place of its own.

    The module is the one that allocated the block; parameters, gradients and optimizer state belong to the module
    that owns the parameter, which their names tell.
    """
    found = blocks(trace)
    codes = [CATEGORIES.index(name) for name in ("parameter", "gradient", "optimizer_state")]
    named = np.isin(found.category[chosen], codes) & (found.name[chosen] >= 0)
    name = np.where(named, found.name[chosen], found.module[chosen]).astype(np.int64)
    keys, place = np.unique(2 * name + named, return_inverse=True)
    texts = [_owner(trace.name(key // 2)) if key % 2 else trace.name(key // 2) for key in keys.tolist()]
    modules = list(dict.fromkeys(texts))
    at = {text: number for number, text in enumerate(modules)}
    return modules, np.array([at[text] for text in texts], np.int64)[place]


def by_owner(trace: Trace, live: Array) -> list[tuple[str | None, str, int, int]]:
    """(module or None, category, requested bytes, blocks) of some blocks, the most bytes first; see ``owners``."""
    found, (modules, owner) = blocks(trace), owners(trace, live)
    rows = sums(owner * len(CATEGORIES) + found.category[live], found.size[live])
    return [
        (modules[key // len(CATEGORIES)], CATEGORIES[key % len(CATEGORIES)], size, number) for key, size, number in rows
    ]


def by_module_pattern(trace: Trace, live: Array) -> list[tuple[str | None, int, int]]:
    """As ``by_owner`` without the category, the like modules of a stack of layers as one: ``GPT.blocks.*.mlp``."""
    merged: dict[str | None, tuple[int, int]] = {}
    for name, _, size, number in by_owner(trace, live):
        before = merged.get(_pattern(name), (0, 0))
        merged[_pattern(name)] = (before[0] + size, before[1] + number)
    return sorted(((name, *both) for name, both in merged.items()), key=lambda row: -row[1])


def _owner(name: str | None) -> str | None:
    """The module in a name such as blocks.0.weight or, of optimizer state, blocks.0.weight.exp_avg."""
    if name is None:
        return None
    parts = name.split(".")
    if parts[-1] in _STATE_NAMES:
        parts.pop()
    return ".".join(parts[:-1]) or None


_STATE_NAMES = (
    "step",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "sum",
    "acc_delta",
)


def _pattern(name: str | None) -> str | None:
    return name and ".".join("*" if part.isdigit() else part for part in name.split("."))


def by_site(trace: Trace, live: Array) -> list[tuple[str | None, int, int]]:
    """(the user's own line or None, requested bytes, blocks) of some blocks, the most bytes first."""
    return _grouped(trace, live, "stack", lambda stack: allocation_site(trace, stack))


def live_at(trace: Trace, device: str, time_ns: int) -> pd.DataFrame:
    """The blocks live on a device at a time (ns), the largest first: rows of ``Trace.blocks``."""
    row = int(rows_at(trace, np.array([time_ns + 1]))[0]) - 1
    live = live_after(blocks(trace), trace.devices.index(device), row)
    frame: pd.DataFrame = blocks_table(trace).iloc[live].sort_values("size", ascending=False, kind="stable")
    return frame
