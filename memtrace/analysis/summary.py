"""The summary of a trace: what ``memtrace summary`` prints and ``--json`` gives."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from memtrace.analysis.access import swappable_at_peak
from memtrace.analysis.attribution import steps_are_marked
from memtrace.analysis.blocks import blocks
from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.findings import findings
from memtrace.analysis.fragmentation import fragmentation
from memtrace.analysis.growth import growth
from memtrace.analysis.leaks import leaks
from memtrace.analysis.oom import OutOfMemory, out_of_memory
from memtrace.analysis.peak import Peak, by_category, by_module_pattern, by_site, peak
from memtrace.analysis.sites import site
from memtrace.analysis.stability import stability
from memtrace.analysis.steps import step_columns, tells_waits
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

TOP = 8
MAX_PATTERN_EVENTS = 500_000
"""Of larger traces ``memtrace steps`` and ``access`` tell what takes them seconds: the summary stays quick."""


def summary(trace: Trace) -> dict[str, Any]:
    """What held the memory, when and where from, as plain JSON values; unknown is None. Bytes and ns.

    ``coverage`` (see ``Coverage``); ``source`` (kind, observer, command); ``steps``: count (None: a file of totals),
    source ("marks", "events": found in the events alone, None: no steps), median_duration_ns, median_peak_bytes,
    max_peak_bytes, median_allocated_bytes, data_wait_share, growth_bytes_per_step and growth_sources (None with too few
    steps); ``devices``: a list of device, peak (requested_bytes, allocated_bytes, reserved_bytes, time_ns, event (row
    of events; -1: the start), step, phase, by_category, top_sites, top_modules, top_blocks), baseline_requested_bytes,
    live_requested_bytes_at_end, reserved_bytes_at_end, fragmentation (see ``Fragmentation``; None without segments);
    ``patterns``: iterative, stability_bytes (share of a usual step's bytes that match the others),
    swappable_bytes_at_peak, leak_bytes_per_step, leak_site, finding (the ``Finding`` whose mending would save most);
    ``out_of_memory``: a list (see ``OutOfMemory``, with ``site`` for each stack). Requested is what the program asked
    for, allocated what the allocator counts; each has its own maximum over time. What is grouped is live at the
    requested peak (where requests are not told, at the peak of the blocks' own sizes, and in those).
    """
    manifest = trace.manifest
    return {
        "coverage": asdict(compute_coverage(trace)),
        "source": {
            **asdict(manifest.source),
            "command": list(manifest.command),
            "rank": manifest.rank,
        },
        "steps": _steps(trace),
        "devices": [_device(trace, peak(trace, device)) for device in trace.devices],
        "patterns": _patterns(trace),
        "out_of_memory": [failure_as_dict(trace, failure) for failure in out_of_memory(trace)],
    }


def _patterns(trace: Trace) -> dict[str, Any]:
    small = trace.num_rows("events") <= MAX_PATTERN_EVENTS and trace.has_blocks
    grows = leaks(trace, with_outliving=False)
    return {
        "iterative": bool(len(step_columns(trace)["step"])),
        "stability_bytes": stability(trace).usual_bytes if small else None,
        "swappable_bytes_at_peak": swappable_at_peak(trace) if small else None,
        "leak_bytes_per_step": grows.bytes_per_step,
        "leak_site": grows.leaks[0].site if grows.leaks else None,
        "finding": _best_finding(trace) if small else None,
    }


def _best_finding(trace: Trace) -> dict[str, Any] | None:
    """Of all devices the finding whose mending would save most, where a line mends it and anything is saved."""
    told = [one for device in trace.devices for one in findings(trace, device).findings if not one.needs_mechanism]
    best = max(told, key=lambda one: one.saved_bytes, default=None)
    return best.as_dict() if best is not None and best.saved_bytes > 0 else None


def _median(values: Array) -> int | None:
    return int(np.median(values)) if len(values) else None


def _steps(trace: Trace) -> dict[str, Any]:
    columns, grows = step_columns(trace), growth(trace)
    made = {name: _median(columns[name]) if trace.has_blocks else None for name in ("allocated_bytes", "num_allocs")}
    total = int(columns["duration_ns"].sum())
    return {
        "count": len(columns["step"]) if trace.has_blocks else None,
        "source": ("marks" if steps_are_marked(trace) else "events") if len(columns["step"]) else None,
        "median_duration_ns": _median(columns["duration_ns"]) if trace.has_times else None,
        "median_peak_bytes": _median(columns["peak_bytes"]),
        "max_peak_bytes": int(columns["peak_bytes"].max()) if len(columns["step"]) else None,
        "median_allocated_bytes": made["allocated_bytes"],
        "median_allocations": made["num_allocs"],
        "data_wait_share": int(columns["data_wait_ns"].sum()) / total if total and tells_waits(trace) else None,
        "growth_bytes_per_step": grows.bytes_per_step if grows else None,
        "growth_sources": [{"site": text, "bytes_per_step": size} for text, size in grows.sources] if grows else None,
    }


def _device(trace: Trace, found: Peak) -> dict[str, Any]:
    categories = {name: size for name, size, _ in by_category(trace, found.live)}
    broken = fragmentation(trace, found.device)
    return {
        "device": found.device,
        "peak": {
            "requested_bytes": found.requested.bytes if found.is_requested else None,
            "allocated_bytes": found.allocated.bytes if found.allocated else None,
            "reserved_bytes": found.reserved.bytes if found.reserved else None,
            "time_ns": found.time_ns,
            "event": found.requested.event,
            "step": found.step,
            "phase": found.phase,
            "by_category": {name: categories[name] for name in CATEGORIES if name in categories},
            "top_sites": [_row("site", row) for row in by_site(trace, found.live)[:TOP]],
            "top_modules": [_row("module", row) for row in by_module_pattern(trace, found.live)[:TOP]],
            "top_blocks": _top_blocks(trace, found.live),
        },
        "baseline_requested_bytes": found.baseline_bytes if found.is_requested else None,
        "live_requested_bytes_at_end": found.end_bytes if found.is_requested else None,
        "reserved_bytes_at_end": found.reserved_end,
        "fragmentation": broken.as_dict() if broken else None,
    }


def failure_as_dict(trace: Trace, failure: OutOfMemory) -> dict[str, Any]:
    """``OutOfMemory`` as plain JSON values, with ``site`` for each stack."""
    told = failure.as_dict() | {"site": site(trace, failure.stack)}
    held: dict[str | None, tuple[int, int]] = {}
    for holder in failure.holders:  # several stacks may lead to one line
        size, number = held.get(where := site(trace, holder.stack), (0, 0))
        held[where] = size + holder.requested_bytes, number + holder.num_blocks
    rows = sorted(((where, *both) for where, both in held.items()), key=lambda row: -row[1])
    told["holders"] = [_row("site", row) for row in rows[:TOP]]
    return told


def _row(name: str, row: tuple[str | None, int, int]) -> dict[str, Any]:
    return {name: row[0], "bytes": row[1], "blocks": row[2]}


def _top_blocks(trace: Trace, live: Array) -> list[dict[str, Any]]:
    found = blocks(trace)
    largest = live[np.argsort(-found.size[live], kind="stable")][:TOP]
    return [
        {
            "block_id": int(block),
            "bytes": int(found.size[block]),
            "category": CATEGORIES[found.category[block]],
            "name": trace.name(int(found.name[block])),
            "module": trace.name(int(found.module[block])),
            "operator": trace.name(int(found.op_name[block])),
            "site": site(trace, int(found.stack[block])),
        }
        for block in largest
    ]
