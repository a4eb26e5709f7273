"""Page sections for a recorded pipeline: schedule, memory and prediction of all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import (
    BLUE,
    BUBBLE_COLOR,
    CATEGORY_COLORS,
    ORANGE,
    PURPLE,
    SERIES_COLORS,
    SYNC_COLOR,
    VERMILION,
)
from memtrace.dashboards.schedules import simulation_figure
from memtrace.dashboards.sections import Section

from memtrace.categories import CATEGORY_LABELS
from memtrace.errors import TraceError
from memtrace.pipeline.measured import MeasuredPipeline, measure_pipeline, measure_ranks
from memtrace.pipeline.recorded import recorded_actions, step_interval_ns
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes, format_count, format_share

if TYPE_CHECKING:
    from memtrace.pipeline.prediction import PipelinePrediction
    from memtrace.trace import Trace

MAX_ACTIONS: Final = 4000
"""Largest number of actions in one figure."""
MAX_WORKERS: Final = 32
"""Largest number of workers in one figure."""
MAX_LABELED_ACTIONS: Final = 400
"""Largest number of actions that are labeled with their micro-batch."""
KINDS: Final = (
    (FORWARD, "forward", BLUE),
    (BACKWARD, "backward", ORANGE),
    (INPUT_BACKWARD, "input backward", VERMILION),
    (WEIGHT_BACKWARD, "weight backward", PURPLE),
)
_LEGEND_ABOVE: Final = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}


@dataclass(frozen=True)
class ScheduleBar:
    """One action in a schedule figure."""

    row: int
    """Rank or worker."""
    action: Action
    start_ns: float
    end_ns: float


@dataclass(frozen=True)
class SyncBar:
    """The gradient synchronization of one stage in a schedule figure."""

    rank: int
    stage: int | None
    num_reductions: int
    start_ns: float
    end_ns: float


def _measured_pipeline(trace: Trace) -> MeasuredPipeline | None:
    """The recorded pipeline; None where no pipeline actions were recorded."""
    try:
        return measure_pipeline(trace)
    except TraceError:
        return None


def recorded_schedule_figure(trace: Trace, device: str = "") -> go.Figure | None:
    """The actions of every rank in the last complete step; None without a recorded pipeline."""
    measured = _measured_pipeline(trace)
    if measured is None:
        return None
    ranks = recorded_actions(trace)
    begin, _ = step_interval_ns(ranks, measured.step)
    bars = [
        ScheduleBar(rank.rank, rank.actions[i], rank.start_ns[i] - begin, rank.end_ns[i] - begin)
        for rank in ranks[:MAX_WORKERS]
        for i in np.flatnonzero(rank.step == measured.step)
    ]
    figure = _schedule_figure(bars, "rank", num_hidden=len(ranks) - MAX_WORKERS)
    syncs = [
        SyncBar(rank.worker.rank, sync.stage, sync.num_reductions, sync.start_ns - begin, sync.end_ns - begin)
        for rank in measure_ranks(trace)[:MAX_WORKERS]
        for sync in rank.syncs
    ]
    return _add_syncs(figure, syncs, max(bar.end_ns for bar in bars))


def _add_syncs(figure: go.Figure, syncs: list[SyncBar], end_ns: float) -> go.Figure:
    """Add a narrow bar below the actions for every gradient synchronization."""
    if not syncs:
        return figure
    divisor, unit = choose_time_unit(end_ns)
    start = np.array([sync.start_ns for sync in syncs]) / divisor
    return figure.add_trace(
        go.Bar(
            y=[f"rank {sync.rank}" for sync in syncs],
            base=start,
            x=np.array([sync.end_ns for sync in syncs]) / divisor - start,
            orientation="h",
            name="gradient synchronization",
            width=0.12,
            offset=0.28,
            marker={"color": SYNC_COLOR, "line": {"width": 0}},
            customdata=[
                f"{'unknown stage' if sync.stage is None else f'stage {sync.stage}'}, "
                f"{format_count(sync.num_reductions, 'all-reduce')}"
                for sync in syncs
            ],
            hovertemplate=(
                f"gradient synchronization: %{{customdata}}<br>%{{x:.3g}} {unit} until a reduced gradient is used, "
                f"starts at %{{base:.3g}} {unit}"
            ),
        )
    )


def simulated_schedule_figure(prediction: PipelinePrediction) -> go.Figure:
    """The actions of every worker in the simulated step."""
    return simulation_figure(prediction.simulation)


def _schedule_figure(bars: list[ScheduleBar], row_noun: str, *, num_hidden: int) -> go.Figure:
    """Bars by row and time on a background that shows bubbles where no bar covers it."""
    shown = sorted(bars, key=lambda bar: bar.start_ns)[:MAX_ACTIONS]
    end_ns = max(bar.end_ns for bar in shown)
    divisor, unit = choose_time_unit(end_ns)
    names = [f"{row_noun} {row}" for row in sorted({bar.row for bar in shown})]
    figure = go.Figure(
        go.Bar(
            y=names,
            x=np.full(len(names), end_ns / divisor),
            orientation="h",
            name="bubble",
            hoverinfo="skip",
            marker={"color": BUBBLE_COLOR, "line": {"width": 0}},
        )
    )
    for kind, label, color in KINDS:
        of_kind = [bar for bar in shown if bar.action.kind == kind]
        if of_kind:
            style = _BarStyle(label, color, divisor, unit, is_labeled=len(shown) <= MAX_LABELED_ACTIONS)
            figure.add_trace(_action_bars(of_kind, row_noun, style))
    figure.update_layout(barmode="overlay", bargap=0.25, legend=_LEGEND_ABOVE)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text=f"time since the start of the step ({unit})")
    notes = [f"Shows the first {len(shown):,} of {len(bars):,} actions."] if len(shown) < len(bars) else []
    notes += [f"{num_hidden} more {row_noun}s are not shown."] if num_hidden > 0 else []
    figure.update_layout(meta={"note": " ".join(notes)})
    return figure


@dataclass(frozen=True)
class _BarStyle:
    label: str
    color: str
    unit_ns: int
    unit: str
    is_labeled: bool


def _action_bars(bars: list[ScheduleBar], row_noun: str, style: _BarStyle) -> go.Bar:
    """The bars of one kind of action."""
    start = np.array([bar.start_ns for bar in bars]) / style.unit_ns
    return go.Bar(
        y=[f"{row_noun} {bar.row}" for bar in bars],
        base=start,
        x=np.array([bar.end_ns for bar in bars]) / style.unit_ns - start,
        orientation="h",
        name=style.label,
        marker={"color": style.color, "line": {"width": 0.5, "color": "#ffffff"}},
        text=[str(bar.action.microbatch) for bar in bars] if style.is_labeled else None,
        textposition="inside",
        insidetextanchor="middle",
        customdata=[f"stage {bar.action.stage}, micro-batch {bar.action.microbatch}" for bar in bars],
        hovertemplate=(
            f"{style.label}: %{{customdata}}<br>%{{x:.3g}} {style.unit}, starts at %{{base:.3g}} {style.unit}"
        ),
    )


def rank_memory_figure(trace: Trace, device: str = "") -> go.Figure | None:
    """Live bytes of every rank over the last complete step; None without a recorded pipeline."""
    measured = _measured_pipeline(trace)
    if measured is None:
        return None
    ranks = recorded_actions(trace)
    begin, end = step_interval_ns(ranks, measured.step)
    divisor, unit = choose_byte_unit(max(worker.peak_bytes for worker in measured.workers))
    nanoseconds, time_name = choose_time_unit(end - begin)
    figure = go.Figure()
    memories = [rank.memory for rank in measure_ranks(trace) if rank.memory is not None]
    for place, memory in enumerate(memories[:MAX_WORKERS]):
        figure.add_trace(
            go.Scatter(
                x=memory.time_ns / nanoseconds,
                y=memory.live_bytes / divisor,
                name=f"rank {memory.rank}",
                mode="lines",
                line={"shape": "hv", "width": 1.5, "color": SERIES_COLORS[place % len(SERIES_COLORS)]},
                hovertemplate=f"%{{y:,.2f}} {unit}",
            )
        )
    figure.update_layout(hovermode="x unified", legend=_LEGEND_ABOVE)
    figure.update_yaxes(title_text=f"live bytes ({unit})", rangemode="tozero")
    figure.update_xaxes(title_text=f"time since the start of the step ({time_name})")
    return figure


def stage_memory_figure(trace: Trace, device: str = "") -> go.Figure | None:
    """Parameters, gradients, optimizer state and in-flight activations by stage; None without a recorded pipeline."""
    measured = _measured_pipeline(trace)
    if measured is None:
        return None
    stages = sorted(measured.stages, key=lambda stage: (stage.pipeline, stage.stage))
    names = [f"stage {stage.stage}" + (f", pipeline {stage.pipeline}" if stage.pipeline else "") for stage in stages]
    bars = {
        "parameter": [stage.parameter_bytes for stage in stages],
        "gradient": [stage.gradient_bytes for stage in stages],
        "optimizer_state": [stage.optimizer_bytes for stage in stages],
        "activation": [stage.in_flight_bytes for stage in stages],
    }
    divisor, unit = choose_byte_unit(max((value or 0 for values in bars.values() for value in values), default=0))
    figure = go.Figure()
    for category, values in bars.items():
        figure.add_trace(
            go.Bar(
                x=names,
                y=[None if value is None else value / divisor for value in values],
                name=CATEGORY_LABELS[category],
                marker={"color": CATEGORY_COLORS[category]},
                customdata=[f"rank {stage.rank}, {stage.in_flight_peak} micro-batches in flight" for stage in stages],
                hovertemplate=f"{CATEGORY_LABELS[category]}: %{{y:,.2f}} {unit}<br>%{{customdata}}",
            )
        )
    figure.update_layout(barmode="stack", legend=_LEGEND_ABOVE)
    figure.update_yaxes(title_text=f"memory ({unit})")
    if measured.imbalance is not None:
        note = f"The highest peak of a worker is {measured.imbalance:.2f} times the mean peak."
        figure.update_layout(meta={"note": note})
    return figure


def predicted_peaks_figure(prediction: PipelinePrediction) -> go.Figure:
    """Measured and predicted peak of every worker."""
    workers = prediction.comparison.workers[:MAX_WORKERS]
    divisor, unit = choose_byte_unit(max(worker.measured_peak_bytes for worker in workers))
    measured = [(worker.measured_peak_bytes, worker.measured_in_flight) for worker in workers]
    predicted = [(worker.predicted_peak_bytes, worker.predicted_in_flight) for worker in workers]
    figure = go.Figure()
    for label, color, values in (("measured", BLUE, measured), ("predicted", ORANGE, predicted)):
        figure.add_trace(
            go.Bar(
                x=[f"rank {worker.rank}" for worker in workers],
                y=np.array([num_bytes for num_bytes, _ in values]) / divisor,
                name=label,
                marker={"color": color},
                text=[format_bytes(num_bytes) for num_bytes, _ in values],
                customdata=[in_flight for _, in_flight in values],
                hovertemplate=f"{label} peak: %{{y:,.2f}} {unit}<br>%{{customdata}} micro-batches in flight",
            )
        )
    figure.update_layout(barmode="group", legend=_LEGEND_ABOVE)
    figure.update_yaxes(title_text=f"peak memory ({unit})")
    error = format_share(prediction.comparison.largest_error)
    figure.update_layout(meta={"note": f"Largest prediction error: {error} of the measured peak."})
    return figure


SECTIONS: Final = (
    Section(
        "pipeline",
        "Pipeline schedule",
        "The last complete step of the pipeline. Each bar is the forward or backward of one micro-batch, numbered if "
        "there is room; gray areas are bubbles, in which the rank is idle. Narrow green bars are all-reduces of "
        "gradients, from their launch to the first use of a reduced gradient. All ranks share one clock.",
        recorded_schedule_figure,
    ),
    Section(
        "stages",
        "Memory by pipeline stage",
        "Parameters, gradients, optimizer state, and the activations of all micro-batches in flight.",
        stage_memory_figure,
    ),
    Section(
        "pipeline-memory",
        "Memory over time by rank",
        "Live bytes of every rank over the same step and on the same clock.",
        rank_memory_figure,
    ),
)
"""Sections of all ranks together; each ``build`` gets the whole trace. Left out without a recorded pipeline."""
PREDICTION_SECTIONS: Final = (
    Section(
        "predicted",
        "Predicted and measured peaks",
        "The peak of every worker, and its prediction from a trace of one process that trained the whole model.",
        predicted_peaks_figure,
    ),
    Section(
        "predicted-pipeline",
        "Simulated pipeline schedule",
        "The same step simulated with the layer times of one process. Messages between workers take no time.",
        simulated_schedule_figure,
    ),
)
"""Sections of a prediction; each ``build`` gets the ``PipelinePrediction``."""
