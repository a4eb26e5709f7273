"""Live bytes of runs on one axis: by time since warm-up, and by step, so that equal steps lie side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.compare import Run
from memtrace.analysis.peak import requested_bytes
from memtrace.analysis.steps import device_step_peaks, step_columns
from memtrace.analysis.timeline import select_plot_points
from memtrace.analysis.warm_up import steps_after_warm_up
from memtrace.format.arrays import Array

if TYPE_CHECKING:
    import pandas as pd


def aligned_curve(run: Run, max_points: int) -> pd.DataFrame:
    """Return the live bytes of the run's device at up to ``max_points`` instants, the peak always included.

    Columns: time_ns (since the start of the first step after warm-up, or of the recording where the trace has no steps;
    negative before that), step_position (number of the step, plus the share of the step that has passed; NA outside the
    steps), and bytes (requested bytes that are live).
    """
    import pandas as pd

    live = requested_bytes(run.trace, run.device)
    kept = select_plot_points(live.bytes, max_points)
    time_ns = run.trace.columns("events", "time_ns")["time_ns"][live.rows[kept]]
    steps = step_columns(run.trace)
    compared = np.flatnonzero(np.isin(steps.step, steps_after_warm_up(run.trace)))
    origin_ns = int(steps.start_ns[compared[0]]) if len(compared) else 0
    position = step_positions(time_ns, steps.step, steps.start_ns, steps.duration_ns)
    frame: pd.DataFrame = pd.DataFrame(
        {
            "time_ns": time_ns - origin_ns,
            "step_position": pd.array(position, dtype="Float64"),
            "bytes": live.bytes[kept],
        }
    )
    return frame


def step_positions(time_ns: Array, step: Array, start_ns: Array, duration_ns: Array) -> Array:
    """Return the position of each time on an axis of steps, NaN before the first step and after the last one.

    A step ``n`` takes the interval from ``n`` to ``n + 1`` of the axis, whatever it lasts.

    Args:
        time_ns: times.
        step: numbers of the steps, in order of time.
        start_ns: starts of the steps.
        duration_ns: durations of the steps.
    """
    position = np.full(len(time_ns), np.nan)
    if not len(step):
        return position
    place = np.searchsorted(start_ns, time_ns, side="right") - 1
    after_start = place >= 0
    place = np.maximum(place, 0)
    elapsed = (time_ns - start_ns[place]) / np.maximum(duration_ns[place], 1)
    # What happens between two steps is drawn at the end of the earlier one.
    inside = after_start & ((place < len(step) - 1) | (elapsed <= 1))
    position[inside] = step[place[inside]] + np.clip(elapsed[inside], 0, 1)
    return position


def aligned_step_peaks(run: Run, max_points: int) -> pd.DataFrame:
    """Return the step peaks of the run's device, of at most ``max_points`` steps; the highest is always included.

    Columns: step (its number), peak_bytes.
    """
    import pandas as pd

    peaks = device_step_peaks(run.trace, run.device)
    kept = select_plot_points(peaks, max_points)
    frame: pd.DataFrame = pd.DataFrame({"step": step_columns(run.trace).step[kept], "peak_bytes": peaks[kept]})
    return frame
