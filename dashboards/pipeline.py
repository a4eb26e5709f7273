"""The stages of a recorded pipeline on one clock: who does what when, and what that holds.

Each ``build`` gets the whole trace, all ranks together, and is None where no pipeline was recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import CATEGORY_COLORS
from memtrace.dashboards.sections import Section

from memtrace.analysis.peak import requested_bytes
from memtrace.analysis.ranks import fullest
from memtrace.analysis.timeline import select_plot_points
from memtrace.categories import CATEGORY_LABELS
from memtrace.errors import TraceError
from memtrace.pipeline.measured import Measured, measured
from memtrace.pipeline.recorded import clock_shift_ns
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes

if TYPE_CHECKING:
    from memtrace.pipeline.compare import Comparison
    from memtrace.pipeline.simulation.simulate import Simulation
    from memtrace.trace import Trace

MAX_ACTIONS: Final = 4000
MAX_WORKERS: Final = 32
MAX_POINTS: Final = 600
"""Of one worker's memory."""
KINDS: Final = (
    (FORWARD, "forward", "#0072b2"),
    (BACKWARD, "backward", "#e69f00"),
    (INPUT_BACKWARD, "backward of the input", "#d55e00"),
    (WEIGHT_BACKWARD, "backward of the weights", "#cc79a7"),
)
BUBBLE_COLOR: Final = "#8c929933"
LINES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c9299", "#f0e442")


def found_pipeline(trace: Trace) -> Measured | None:
    """The recorded pipeline; None where there is none."""
    found: Measured | None = trace.cached(_measured_or_none)
    return found


def _measured_or_none(trace: Trace) -> Measured | None:
    try:
        return measured(trace)
    except TraceError:
        return None


def recorded_figure(trace: Trace) -> go.Figure | None:
    """What every rank did in the last complete step, on one clock."""
    found = found_pipeline(trace)
    if found is None:
        return None
    rows = []
    for one in found.ranks[:MAX_WORKERS]:
        mine = np.flatnonzero(one.round == found.round)
        rows += [(f"rank {one.rank}", one.actions[i], one.start_ns[i], one.end_ns[i]) for i in mine]
    begin = min(row[2] for row in rows)
    return _schedule_figure([(who, action, start - begin, end - begin) for who, action, start, end in rows])


def predicted_schedule_figure(prediction: Comparison) -> go.Figure:
    """The same as it was simulated from the trace of one process."""
    return simulation_figure(prediction.simulation)


def simulation_figure(simulation: Simulation) -> go.Figure:
    """A simulated schedule: workers by time."""
    names = [f"worker {worker}" for worker, row in enumerate(simulation.schedule.rows) for _ in row]
    rows = zip(names, simulation.schedule.actions(), 1e9 * simulation.start_s, 1e9 * simulation.end_s, strict=True)
    shown = {f"worker {worker}" for worker in range(MAX_WORKERS)}
    return _schedule_figure([row for row in rows if row[0] in shown])


def _schedule_figure(rows: list[Any]) -> go.Figure:
    """Bars of (who, action, start, end in ns); what no bar covers is a bubble."""
    rows.sort(key=lambda row: row[2])
    shown = rows[:MAX_ACTIONS]
    end = max(row[3] for row in shown)
    divisor, unit = choose_time_unit(end)
    names = list(dict.fromkeys(sorted((row[0] for row in shown), key=lambda name: int(name.split()[1]))))
    figure = go.Figure(
        go.Bar(
            y=names,
            x=np.full(len(names), end / divisor),
            orientation="h",
            name="bubble",
            hoverinfo="skip",
            marker={"color": BUBBLE_COLOR, "line": {"width": 0}},
        )
    )
    for kind, label, color in KINDS:
        mine = [row for row in shown if row[1].kind == kind]
        if not mine:
            continue
        start = np.array([row[2] for row in mine]) / divisor
        figure.add_trace(
            go.Bar(
                y=[row[0] for row in mine],
                base=start,
                x=np.array([row[3] for row in mine]) / divisor - start,
                orientation="h",
                name=label,
                marker={"color": color, "line": {"width": 0.5, "color": "#ffffff"}},
                text=[str(row[1].microbatch) for row in mine] if len(shown) <= 400 else None,
                textposition="inside",
                insidetextanchor="middle",
                customdata=[f"stage {row[1].stage}, micro-batch {row[1].microbatch}" for row in mine],
                hovertemplate=f"%{{customdata}}<br>%{{x:.3g}} {unit} from %{{base:.3g}}",
            )
        )
    figure.update_layout(barmode="overlay", bargap=0.25, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text=unit)
    note = f"The first {len(shown):,} of {len(rows):,} actions." if len(shown) < len(rows) else ""
    figure.update_layout(meta={"note": note})
    return figure


def memory_figure(trace: Trace) -> go.Figure | None:
    """Live bytes of every rank over the last complete step, on the same clock."""
    found = found_pipeline(trace)
    if found is None:
        return None
    reference = trace.rank(trace.ranks[0]).manifest
    of_round = [one.round == found.round for one in found.ranks]
    begin = min(int(one.start_ns[mask].min()) for one, mask in zip(found.ranks, of_round, strict=True))
    end = max(int(one.end_ns[mask].max()) for one, mask in zip(found.ranks, of_round, strict=True))
    divisor, unit = choose_byte_unit(max(worker.peak_bytes for worker in found.workers))
    nanoseconds, time_name = choose_time_unit(end - begin)
    figure = go.Figure()
    for place, one in enumerate(found.ranks[:MAX_WORKERS]):
        single = trace.rank(one.rank)
        top = fullest(single)
        if top is None:
            continue
        live = requested_bytes(single, top.device)
        time = single.columns("events", "time_ns")["time_ns"][live.rows] + clock_shift_ns(single.manifest, reference)
        inside = np.flatnonzero((time >= begin) & (time <= end))
        inside = inside[select_plot_points(live.bytes[inside], MAX_POINTS)]
        figure.add_trace(
            go.Scatter(
                x=(time[inside] - begin) / nanoseconds,
                y=live.bytes[inside] / divisor,
                name=f"rank {one.rank}",
                mode="lines",
                line={"shape": "hv", "width": 1.5, "color": LINES[place % len(LINES)]},
                hovertemplate=f"%{{y:,.2f}} {unit}",
            )
        )
    figure.update_layout(hovermode="x unified", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_yaxes(title_text=unit, rangemode="tozero")
    figure.update_xaxes(title_text=time_name)
    return figure


def stages_figure(trace: Trace) -> go.Figure | None:
    """What each stage takes: weights, gradients, optimizer state, and activations times micro-batches in flight."""
    found = found_pipeline(trace)
    if found is None:
        return None
    stages = sorted(found.stages, key=lambda one: (one.pipeline, one.stage))
    names = [f"stage {one.stage}" + (f", pipeline {one.pipeline}" if one.pipeline else "") for one in stages]
    bars = {
        "parameter": [one.parameter_bytes for one in stages],
        "gradient": [one.gradient_bytes for one in stages],
        "optimizer_state": [one.optimizer_bytes for one in stages],
        "activation": [
            None if one.activation_bytes is None else one.activation_bytes * one.in_flight_peak for one in stages
        ],
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
                customdata=[f"rank {one.rank}, {one.in_flight_peak} in flight" for one in stages],
                hovertemplate=f"%{{y:,.2f}} {unit}<br>%{{customdata}}",
            )
        )
    figure.update_layout(barmode="stack", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_yaxes(title_text=unit)
    figure.update_layout(meta={"note": f"The highest peak of a worker is {found.imbalance:.2f} times the mean."})
    return figure


def predicted_figure(prediction: Comparison) -> go.Figure:
    """The peak of every worker as predicted from one process, beside the measured one."""
    workers = prediction.workers[:MAX_WORKERS]
    divisor, unit = choose_byte_unit(max(one.measured_peak_bytes for one in workers))
    names = [f"rank {one.rank}" for one in workers]
    figure = go.Figure()
    for label, color, values, flying in (
        ("measured", "#0072b2", [one.measured_peak_bytes for one in workers],
         [one.measured_in_flight for one in workers]),
        ("predicted", "#e69f00", [one.predicted_peak_bytes for one in workers],
         [one.predicted_in_flight for one in workers]),
    ):  # fmt: skip
        figure.add_trace(
            go.Bar(
                x=names,
                y=np.array(values) / divisor,
                name=label,
                marker={"color": color},
                text=[format_bytes(value) for value in values],
                customdata=flying,
                hovertemplate=f"%{{y:,.2f}} {unit}, %{{customdata}} micro-batches in flight",
            )
        )
    figure.update_layout(barmode="group", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_yaxes(title_text=unit)
    figure.update_layout(meta={"note": f"The largest error is {100 * prediction.largest_error:.1f} %."})
    return figure


SECTIONS: Final = (
    Section(
        "pipeline",
        "Pipeline schedule",
        "The last complete step of the pipeline. Each bar is the forward or backward of one micro-batch, numbered if "
        "there is room; gray areas are bubbles, in which the rank is idle. All ranks share one clock.",
        recorded_figure,
    ),
    Section(
        "stages",
        "Memory by pipeline stage",
        "Parameters, gradients, optimizer state, and the activations of all micro-batches in flight.",
        stages_figure,
    ),
    Section(
        "pipeline-memory",
        "Memory over time by rank",
        "Live bytes of every rank over the same step and on the same clock.",
        memory_figure,
    ),
)
"""Sections of all ranks together; each ``build`` gets the whole trace. Left out without a recorded pipeline."""
PREDICTION_SECTIONS: Final = (
    Section(
        "predicted",
        "Predicted and measured peaks",
        "The peak of every worker, and its prediction from a trace of one process that trained the whole model.",
        predicted_figure,
    ),
    Section(
        "predicted-pipeline",
        "Simulated pipeline schedule",
        "The same step simulated with the layer times of one process. Messages between workers take no time.",
        predicted_schedule_figure,
    ),
)
"""Sections of a prediction; each ``build`` gets the prediction."""
