"""The pages of the server: that of the traces, and that of a range of one."""

from __future__ import annotations

import json
from typing import Any, Final

from memtrace.dashboards.contents import DEVICE_SECTIONS
from memtrace.dashboards.overview import Card, CoverageBox, Overview
from memtrace.dashboards.page import fill_template, make_widget_panel, render, render_device_panel, view_id
from memtrace.dashboards.server.served import ServedRank, ServedTrace
from memtrace.dashboards.text import name_text

from memtrace.analysis.indexed_trace import IndexedTrace
from memtrace.units import format_bytes, format_count, format_duration

MAX_REPORT_EVENTS: Final = 1_000_000
"""Events up to which the server shows the page of ``memtrace report`` itself."""
INDEX_WAIT_SECONDS: Final = 3.0
"""A page waits this long for the index; after that it shows how far the index is."""
PEAK_SECTIONS: Final = ("modules", "categories", "sites", "blocks")
"""Anchors of the sections that a page shows of the part in which the peak is."""


def render_start(served: ServedTrace) -> str:
    """Return the page of the traces: that of ``memtrace report`` where they are small and complete."""
    served.is_indexed.wait(INDEX_WAIT_SECONDS)
    if not served.follow:
        ranks = served.ranks.values()
        indexed = [rank.current for rank in ranks if rank.current is not None]
        num_events = sum(each.index.num_events for each in indexed)
        if len(indexed) == len(ranks) and num_events <= MAX_REPORT_EVENTS:
            return served.cached_page(render)
    views = [_view(rank, device) for rank in served.ranks.values() for device in rank.views().values()]
    state = {"follow": served.follow, "ranks": sorted(served.ranks)}
    return fill_template(name_text(served.name), views, served=json.dumps(state))


def _view(rank: ServedRank, device: str) -> dict[str, Any]:
    with rank.lock:
        current = rank.current
        has_peak = current is not None and device in current.index.devices
        panels = [
            make_widget_panel(section) if isinstance(section.build, str) else panel
            for section in DEVICE_SECTIONS
            if isinstance(section.build, str)
            or (has_peak and current is not None and (panel := _peak_panel(current, device, section)) is not None)
        ]
        overview = _overview(current, device) if has_peak and current is not None else _EMPTY
    return {
        "id": view_id(rank.rank, device),
        "label": f"rank {rank.rank}, {device}",
        "group": f"rank {rank.rank}",
        "panels": panels,
        "payload": None,
        **vars(overview),
    }


_EMPTY: Final = Overview(CoverageBox("", (), ()), (), "", (), ())


def _peak_panel(indexed: IndexedTrace, device: str, section: Any) -> Any:
    """Return a section about the peak; None for other sections, and where the peak is at the start."""
    part = indexed.peak_part(device) if section.anchor in PEAK_SECTIONS else None
    if part is None or device not in part.devices:
        return None
    panel = render_device_panel(section, part, device)
    return panel if panel.has_content else None


def _overview(indexed: IndexedTrace, device: str) -> Overview:
    index, top = indexed.index, indexed.peak(device)
    steps, events = format_count(len(index.spans.steps.index), "step"), format_count(index.num_events, "event")
    peak_bytes = int(top.levels[0][0])
    moment = format_duration(int(top.time_ns[0]))
    step = index.spans.step_at(int(top.time_ns[0]))
    where = f"at {moment}" + (f" (step {step})" if step is not None else "")
    return Overview(
        coverage=CoverageBox(f"{events} over {format_duration(index.end_ns)}, {steps}.", (), ()),
        cards=(
            Card("Peak requested", format_bytes(peak_bytes), where),
            Card("Events", f"{index.num_events:,}", f"{index.num_blocks[device]:,} blocks"),
        ),
        verdict=f"{device}: the peak is {format_bytes(peak_bytes)}, {where}.",
        fixes=(),
        sentences=(
            "Zoom in to see all events. Findings, steps and predictions are computed for a range of the trace:",
        ),
    )
