"""Figures of a simulated pipeline schedule: the table as in Chimera's figures, and the memory of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import BUBBLE_COLOR, PATH_HUES, SYNC_COLOR, VERMILION, mix_colors, series_line

from memtrace.analysis.timeline import select_plot_points
from memtrace.pipeline.schedule_table import ScheduleCell, simulated_cells, slot_cells
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.pipeline.schedules.schedule import Schedule
    from memtrace.pipeline.simulation.all_reduce import AllReduce
    from memtrace.pipeline.simulation.simulator import Simulation
    from memtrace.pipeline.simulation.worker_memory import WorkerMemory

MAX_CELLS: Final = 4_000
"""Largest number of actions in one figure."""
MAX_WORKERS: Final = 64
"""Largest number of workers in one figure."""
MAX_LABELED_CELLS: Final = 1_200
"""Largest number of actions that are labeled with their micro-batch."""
MAX_POINTS: Final = 600
"""Largest number of points in the memory curve of one worker."""
MAX_MEMORY_CURVES: Final = 28
"""Largest number of workers whose memory is drawn; their lines differ."""
_LEGEND_ABOVE: Final = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
_ROW_HEIGHT: Final = 0.88
"""Height of the bars of a worker; 1 is the distance between two workers."""
_WHITE, _BLACK = "#ffffff", "#000000"
_KINDS: Final = {
    FORWARD: ("forward", _WHITE, 0.55),
    BACKWARD: ("backward", _BLACK, 0.15),
    INPUT_BACKWARD: ("input backward", _BLACK, 0.15),
    WEIGHT_BACKWARD: ("weight backward", _BLACK, 0.45),
}
"""Name of each kind of action, and how the hue of its path is changed: mixed with white or black by a share."""


def simulation_figure(simulation: Simulation) -> go.Figure:
    """Return the actions and all-reduces of every worker over the time of the simulated step."""
    cells = simulated_cells(simulation)
    end_s = max(simulation.step_time_s, *(cell.end for cell in cells)) if cells else simulation.step_time_s
    divisor, unit = choose_time_unit(1e9 * end_s)
    per_unit = divisor / 1e9
    figure = _draw_cells(cells, simulation.schedule.num_workers, end_s, per_unit, lambda s: format_duration(1e9 * s))
    _add_all_reduces(figure, simulation.all_reduces, per_unit)
    figure.update_xaxes(title_text=f"time ({unit})")
    return figure


def slot_figure(schedule: Schedule) -> go.Figure:
    """Return the table of a schedule in which every action takes one slot."""
    figure = _draw_cells(slot_cells(schedule), schedule.num_workers, schedule.num_slots, 1.0, lambda n: f"{n:g}")
    figure.update_xaxes(title_text="slot")
    return figure


def _draw_cells(
    cells: Sequence[ScheduleCell], num_workers: int, end: float, per_unit: float, format_time: Any
) -> go.Figure:
    shown = [cell for cell in cells if cell.worker < MAX_WORKERS]
    if len(shown) > MAX_CELLS:
        shown = sorted(shown, key=lambda cell: cell.start)[:MAX_CELLS]
    workers = [f"worker {worker}" for worker in range(min(num_workers, MAX_WORKERS))]
    figure = go.Figure(
        go.Bar(y=workers, x=np.full(len(workers), end / per_unit), orientation="h", name="bubble", hoverinfo="skip",
               marker={"color": BUBBLE_COLOR, "line": {"width": 0}}, width=_ROW_HEIGHT, offset=-_ROW_HEIGHT / 2)
    )  # fmt: skip
    paths = list(dict.fromkeys(cell.path for cell in sorted(cells, key=lambda cell: cell.action.pipeline)))
    has_labels = len(shown) <= MAX_LABELED_CELLS
    for number, path in enumerate(paths):
        for kind in _KINDS:
            chosen = [cell for cell in shown if cell.path == path and cell.action.kind == kind]
            if chosen:
                hue = PATH_HUES[number % len(PATH_HUES)]
                _add_actions(figure, chosen, hue, per_unit, format_time, has_labels=has_labels)
    repeated = [cell for cell in shown if cell.recomputed > cell.start]
    if repeated:
        figure.add_trace(_recomputation(repeated, per_unit, format_time))
    notes = [f"Shows the first {len(shown):,} of {len(cells):,} actions."] if len(shown) < len(cells) else []
    if num_workers > MAX_WORKERS:
        notes.append(f"{format_count(num_workers - MAX_WORKERS, 'more worker')} not drawn.")
    figure.update_layout(
        barmode="overlay",
        bargap=0.12,
        legend=_LEGEND_ABOVE,
        height=150 + 34 * len(workers),
        uniformtext={"minsize": 7, "mode": "hide"},
        meta={"note": " ".join(notes), "min_width": min(320 + 12 * max(len(shown) // max(len(workers), 1), 1), 1600)},
    )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(range=[0, end / per_unit], showgrid=False)
    return figure


def _add_actions(
    figure: go.Figure, cells: Sequence[ScheduleCell], hue: str, per_unit: float, format_time: Any, *, has_labels: bool
) -> None:
    """Add the actions of one kind on one path."""
    kind, other, share = _KINDS[cells[0].action.kind]
    name = f"{cells[0].path}: {kind}" if cells[0].path else kind
    start = np.array([cell.recomputed for cell in cells]) / per_unit
    figure.add_trace(
        go.Bar(
            y=[f"worker {cell.worker}" for cell in cells],
            base=start,
            x=np.array([cell.end for cell in cells]) / per_unit - start,
            orientation="h",
            name=name,
            **_lanes(cells),
            marker={"color": mix_colors(hue, other, share), "line": {"width": 0.6, "color": _WHITE}},
            text=[cell.label for cell in cells] if has_labels else None,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            textfont={"size": 11},
            customdata=[_hover(cell, format_time) for cell in cells],
            hovertemplate=f"{name}, %{{customdata}}<extra></extra>",
        )
    )


def _lanes(cells: Sequence[ScheduleCell]) -> dict[str, Any]:
    """Return widths and offsets of bars: actions that run together share the height of the row."""
    lanes = np.array([-1 if cell.lane is None else cell.lane for cell in cells])
    half = _ROW_HEIGHT / 2
    return {"width": np.where(lanes < 0, _ROW_HEIGHT, half), "offset": np.where(lanes == 1, 0.0, -half)}


def _recomputation(cells: Sequence[ScheduleCell], per_unit: float, format_time: Any) -> go.Bar:
    start = np.array([cell.start for cell in cells]) / per_unit
    return go.Bar(
        y=[f"worker {cell.worker}" for cell in cells],
        base=start,
        x=np.array([cell.recomputed for cell in cells]) / per_unit - start,
        orientation="h",
        name="recomputation",
        **_lanes(cells),
        marker={
            "color": "#c9d0d7",
            "line": {"width": 0.6, "color": _WHITE},
            "pattern": {"shape": "/", "fgcolor": "#4a545e", "size": 5},
        },
        customdata=[_hover(cell, format_time) for cell in cells],
        hovertemplate="recomputation, %{customdata}<extra></extra>",
    )


def _hover(cell: ScheduleCell, format_time: Any) -> str:
    return (
        f"stage {cell.action.stage}, micro-batch {cell.label}<br>worker {cell.worker}, "
        f"from {format_time(cell.start)} to {format_time(cell.end)}"
    )


def _add_all_reduces(figure: go.Figure, reductions: Sequence[AllReduce], per_unit: float) -> None:
    """Add a narrow bar below the actions of each worker that takes part in an all-reduce."""
    rows = [(worker, reduction) for reduction in reductions for worker in reduction.workers if worker < MAX_WORKERS]
    rows = [row for row in rows if row[1].end_s > row[1].start_s]
    if not rows:
        return
    start = np.array([reduction.start_s for _, reduction in rows]) / per_unit
    figure.add_trace(
        go.Bar(
            y=[f"worker {worker}" for worker, _ in rows],
            base=start,
            x=np.array([reduction.end_s for _, reduction in rows]) / per_unit - start,
            orientation="h",
            name="all-reduce of gradients",
            width=0.12,
            offset=0.34,
            marker={"color": SYNC_COLOR, "line": {"width": 0}},
            customdata=[
                f"stage {reduction.stage}, from {format_duration(1e9 * reduction.start_s)} to "
                f"{format_duration(1e9 * reduction.end_s)}"
                for _, reduction in rows
            ],
            hovertemplate="all-reduce of gradients, %{customdata}<extra></extra>",
        )
    )


def memory_figure(memories: Sequence[WorkerMemory], capacity_bytes: int | None = None) -> go.Figure:
    """Return the memory of every worker over the time of the simulated step.

    Args:
        memories: memory of each worker, as ``SchedulePrediction.memories``.
        capacity_bytes: memory that a worker has, drawn as a line; None: unlimited.
    """
    shown = memories[:MAX_MEMORY_CURVES]
    divisor, unit = choose_byte_unit(max([*(memory.peak_bytes for memory in memories), capacity_bytes or 0]))
    nanoseconds, time_unit = choose_time_unit(1e9 * max(float(memory.time_s[-1]) for memory in memories))
    figure = go.Figure()
    for number, memory in enumerate(shown):
        kept = select_plot_points(memory.total_bytes, MAX_POINTS)
        figure.add_trace(
            go.Scatter(
                x=memory.time_s[kept] * 1e9 / nanoseconds,
                y=memory.total_bytes[kept] / divisor,
                name=f"worker {memory.worker}",
                mode="lines",
                line={**series_line(number), "shape": "hv", "width": 1.5},
                hovertemplate=f"%{{y:,.4~r}} {unit}",
            )
        )
    _add_capacity(figure, capacity_bytes, divisor, is_vertical=False)
    hidden = len(memories) - len(shown)
    figure.update_layout(
        hovermode="x unified",
        legend=_LEGEND_ABOVE,
        showlegend=True,
        xaxis={"title": {"text": f"time ({time_unit})"}},
        yaxis={"title": {"text": unit}, "rangemode": "tozero"},
        meta={"note": f"{format_count(hidden, 'more worker')} not drawn." if hidden > 0 else ""},
    )
    return figure


def peaks_figure(
    named_memories: Sequence[tuple[str, Sequence[WorkerMemory]]], capacity_bytes: int | None = None
) -> go.Figure:
    """Return how the peaks are distributed over the workers of each schedule, as in Chimera's figure 9.

    Args:
        named_memories: name of each schedule, and the memory of its workers.
        capacity_bytes: memory that a worker has, drawn as a line; None: unlimited.
    """
    peaks = [np.array([memory.peak_bytes for memory in memories]) for _, memories in named_memories]
    divisor, unit = choose_byte_unit(max([*(int(values.max()) for values in peaks), capacity_bytes or 0]))
    figure = go.Figure()
    for number, ((name, memories), values) in enumerate(zip(named_memories, peaks, strict=True)):
        color = series_line(number)["color"]
        figure.add_trace(
            go.Box(
                x=values / divisor,
                name=name,
                boxpoints="all",
                jitter=0.6,
                pointpos=0,
                marker={"color": color, "size": 6, "opacity": 0.75},
                line={"color": color, "width": 1.2},
                customdata=[_worker_text(memory) for memory in memories],
                hovertemplate="%{customdata}<extra></extra>",
                hoveron="points",
            )
        )
    _add_capacity(figure, capacity_bytes, divisor, is_vertical=True)
    figure.update_layout(
        showlegend=False,
        height=110 + 42 * len(named_memories),
        margin={"l": 10, "t": 40},
        xaxis={"title": {"text": f"peak memory of a worker ({unit})"}, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False},
        meta={"min_width": 520},
    )
    return figure


def _worker_text(memory: WorkerMemory) -> str:
    return (
        f"worker {memory.worker}: {format_bytes(memory.peak_bytes)}<br>weights and state "
        f"{format_bytes(memory.weight_peak_bytes)} ({format_share(memory.weight_peak_bytes, memory.peak_bytes)})<br>"
        f"activations {format_bytes(memory.activation_peak_bytes)}, "
        f"{format_count(memory.in_flight_peak, 'micro-batch', 'micro-batches')} in flight"
    )


def _add_capacity(figure: go.Figure, capacity_bytes: int | None, divisor: int, *, is_vertical: bool) -> None:
    if capacity_bytes is None:
        return
    draw = figure.add_vline if is_vertical else figure.add_hline
    draw(
        capacity_bytes / divisor,
        line={"color": VERMILION, "dash": "dash", "width": 1.5},
        annotation={"text": f"capacity {format_bytes(capacity_bytes)}", "showarrow": False},
    )
