"""The page of a planned pipeline: the schedules side by side, then the table and the memory of the best ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import plotly.graph_objects as go
from memtrace.dashboards.figure_page import FigurePage, write_figure_page
from memtrace.dashboards.palette import VERMILION, series_line
from memtrace.dashboards.schedules import memory_figure, peaks_figure, simulation_figure
from memtrace.dashboards.sections import Column, Row, Section, Table
from memtrace.dashboards.text import figure_text, name_text

from memtrace.format.storage import AnyPath
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.pipeline.plan import SchedulePrediction

MAX_SCHEDULES: Final = 8
"""Largest number of schedules that are drawn with all their actions."""
MAX_COMPARED: Final = 30
"""Largest number of schedules in the figures that compare them."""
MAX_ROWS: Final = 60
"""Largest number of schedules in the table."""
_NAME_CHARS: Final = 48


@dataclass(frozen=True)
class PlannedSchedule:
    """A prediction, under the name that the page shows."""

    name: str
    prediction: SchedulePrediction


@dataclass(frozen=True)
class PlannedPipeline:
    """Schedules of one plan, best first: the argument of the build functions."""

    schedules: tuple[PlannedSchedule, ...]
    capacity_bytes: int | None
    """Memory of one worker; None: unlimited."""


def write_planned_pipeline(
    schedules: Sequence[PlannedSchedule],
    output: str | AnyPath,
    *,
    capacity_bytes: int | None = None,
    notes: Sequence[str] = (),
) -> AnyPath:
    """Write the page of a planned pipeline, and return its path.

    Args:
        schedules: predictions of a plan or a search, best first; at least one.
        output: path of the HTML file.
        capacity_bytes: memory of one worker; None: unlimited.
        notes: sentences about what the predictions rest on.

    Raises:
        OSError: The file cannot be written.
    """
    planned = PlannedPipeline(tuple(schedules), capacity_bytes)
    page = FigurePage(
        title="Pipeline plan",
        heading="Predicted schedules",
        sentences=tuple(_describe(planned)),
        sections=[*((section, planned) for section in SECTIONS), *_schedule_sections(planned)],
        warnings=tuple(notes),
    )
    return write_figure_page(page, output)


def _describe(planned: PlannedPipeline) -> Iterator[str]:
    best, *others = planned.schedules
    step, peak = format_duration(1e9 * best.prediction.step_time_s), format_bytes(best.prediction.peak_bytes)
    fit = "" if planned.capacity_bytes is None or best.prediction.fits else ", which does not fit"
    bubbles = format_share(best.prediction.bubble_ratio)
    memory = f"{peak} on the fullest worker{fit}"
    yield f"{best.name} is predicted to be fastest: {step} per step, {bubbles} bubbles, {memory}."
    if others:
        least = min(planned.schedules, key=lambda schedule: schedule.prediction.peak_bytes)
        yield (
            f"Of {format_count(len(planned.schedules), 'schedule')}, {least.name} needs the least memory: "
            f"{format_bytes(least.prediction.peak_bytes)} on the fullest worker, "
            f"{format_duration(1e9 * least.prediction.step_time_s)} per step."
        )


def schedules_table(planned: PlannedPipeline) -> Table:
    """Return the predicted schedules, best first."""
    columns = (Column("schedule", "code"), Column("workers", "number"), Column("step", "number"),
               Column("bubbles", "share"), Column("highest peak", "number"), Column("lowest peak", "number"),
               Column("in flight", "number"), Column("recomputes"), Column("fits"))  # fmt: skip
    rows = [
        Row(
            (
                name_text(schedule.name),
                str(schedule.prediction.schedule.num_workers),
                format_duration(1e9 * schedule.prediction.step_time_s),
                schedule.prediction.bubble_ratio,
                format_bytes(schedule.prediction.peak_bytes),
                format_bytes(min(memory.peak_bytes for memory in schedule.prediction.memories)),
                str(max(memory.in_flight_peak for memory in schedule.prediction.memories)),
                "yes" if schedule.prediction.recompute else "no",
                "yes" if schedule.prediction.fits else "no",
            )
        )
        for schedule in planned.schedules[:MAX_ROWS]
    ]
    hidden = len(planned.schedules) - MAX_ROWS
    note = "Peaks are those of the fullest and the emptiest worker. In flight: most micro-batches on a worker."
    if hidden > 0:
        note += f" {format_count(hidden, 'more schedule')} not listed; memtrace plan pipeline --json has all of them."
    return Table(columns, tuple(rows), note)


def distribution_figure(planned: PlannedPipeline) -> go.Figure:
    """Return the peaks of the workers of each schedule."""
    shown = planned.schedules[:MAX_COMPARED]
    names = _axis_names(shown)
    figure = peaks_figure(
        [(name, schedule.prediction.memories) for name, schedule in zip(names, shown, strict=True)],
        planned.capacity_bytes,
    )
    figure.layout.meta = {**figure.layout.meta, "note": _left_out(planned)}
    return figure


def trade_off_figure(planned: PlannedPipeline) -> go.Figure | None:
    """Return the step time of each schedule against its peak; None for a single schedule."""
    shown = planned.schedules[:MAX_COMPARED]
    if len(shown) < 2:
        return None
    divisor, unit = choose_byte_unit(max([*(s.prediction.peak_bytes for s in shown), planned.capacity_bytes or 0]))
    nanoseconds, time_unit = choose_time_unit(1e9 * max(schedule.prediction.step_time_s for schedule in shown))
    figure = go.Figure()
    for number, (name, schedule) in enumerate(zip(_axis_names(shown), shown, strict=True)):
        prediction = schedule.prediction
        figure.add_trace(
            go.Scatter(
                x=[prediction.peak_bytes / divisor],
                y=[prediction.step_time_s * 1e9 / nanoseconds],
                mode="markers",
                name=name,
                marker={
                    "size": 11,
                    "color": series_line(number)["color"],
                    "symbol": ("circle", "diamond", "square", "cross", "x")[number // 7 % 5],
                },
                customdata=[f"{format_bytes(prediction.peak_bytes)}, "
                            f"{format_duration(1e9 * prediction.step_time_s)} per step"],
                hovertemplate="%{customdata}",
            )
        )  # fmt: skip
    if planned.capacity_bytes is not None:
        figure.add_vline(
            planned.capacity_bytes / divisor,
            line={"color": VERMILION, "dash": "dash", "width": 1.5},
            annotation={"text": f"capacity {format_bytes(planned.capacity_bytes)}", "showarrow": False},
        )
    figure.update_layout(
        showlegend=True,
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
        xaxis={"title": {"text": f"peak memory of the fullest worker ({unit})"}, "rangemode": "tozero"},
        yaxis={"title": {"text": f"step time ({time_unit})"}, "rangemode": "tozero"},
        meta={"note": _left_out(planned)},
    )
    return figure


def _schedule_sections(planned: PlannedPipeline) -> list[tuple[Section, Any]]:
    """Return the sections of the best schedules: the table and the memory of each."""
    sections: list[tuple[Section, Any]] = []
    for number, schedule in enumerate(planned.schedules[:MAX_SCHEDULES]):
        name = name_text(schedule.name, _NAME_CHARS)
        sections += [
            (Section(f"schedule-{number}", f"Schedule: {name}", _explain(schedule), draw_schedule), schedule),
            (
                Section(
                    f"memory-{number}",
                    f"Memory over time: {name}",
                    "Parameters with all copies and versions, gradients, optimizer state, activations and temporaries "
                    "of every worker over the same step.",
                    lambda each: memory_figure(each.prediction.memories, planned.capacity_bytes),
                    height=360,
                ),
                schedule,
            ),
        ]
    return sections


def draw_schedule(schedule: PlannedSchedule) -> go.Figure:
    """Return the actions of a planned schedule."""
    return simulation_figure(schedule.prediction.simulation)


def _explain(schedule: PlannedSchedule) -> str:
    prediction = schedule.prediction
    text = "A row for each worker; each cell is the forward or backward of one micro-batch, numbered if there is room."
    if len(prediction.schedule.placement) > 1:
        text += " Hues tell the directions of the pipelines apart."
    elif prediction.schedule.num_stages > prediction.schedule.num_workers:
        text += " Hues tell the chunks of a worker apart."
    text += " Backwards are darker than forwards, and gray areas are bubbles."
    if prediction.recompute:
        text += " Hatched: the forward that a backward repeats."
    if prediction.reduces_gradients:
        text += " Narrow bars are all-reduces of gradients."
    if prediction.schedule.asynchronous:
        text += " Several batches follow each other without a flush."
    return text


def _axis_names(schedules: Sequence[PlannedSchedule]) -> list[str]:
    """Return names for axes and legends: bounded in length, and different from each other."""
    names = [figure_text(schedule.name, _NAME_CHARS) for schedule in schedules]
    return [name if names.count(name) == 1 else f"{number + 1}: {name}" for number, name in enumerate(names)]


def _left_out(planned: PlannedPipeline) -> str:
    hidden = len(planned.schedules) - MAX_COMPARED
    return f"{format_count(hidden, 'slower schedule')} not drawn." if hidden > 0 else ""


SECTIONS: Final = (
    Section(
        "schedules",
        "Schedules",
        "Predicted time and memory of each schedule with its best partition; those that fit come first.",
        schedules_table,
    ),
    Section(
        "distribution",
        "Peak memory over the workers",
        "Each dot is the peak of one worker; the box holds the middle half of the workers. The wider a schedule "
        "spreads, the less evenly its workers share the memory.",
        distribution_figure,
    ),
    Section(
        "trade-off",
        "Step time against memory",
        "Schedules at the lower left are fast and need little memory.",
        trade_off_figure,
        height=460,
    ),
)
"""Sections that compare the schedules; each ``build`` gets the ``PlannedPipeline``."""
