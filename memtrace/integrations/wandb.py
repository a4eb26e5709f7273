"""Weights & Biases: the memory of each training step as metrics of a run.

from memtrace.integrations.wandb import log_scalars

with wandb.init() as run, memtrace.record("run.memtrace") as recording:
    log_scalars(recording, run)
    train()
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from memtrace.integrations.scalars import PREFIX, ScalarStream, Sink

if TYPE_CHECKING:
    from memtrace.recording.session import Recording

STEP_METRIC: Final = f"{PREFIX}/step"
"""The metric with the number of the step, the x axis of all metrics of memtrace."""


def log_scalars(recording: Recording, run: Any, *, own_rows: bool = False) -> None:
    """Log the memory of each step of a recording: peak, peak by category, reserved bytes and growth, by device.

    Call it once, inside the ``with`` block of the recording. Steps are logged some seconds after their ends, and the
    last ones when the recording ends, so the run must not be finished then. The x axis is ``memtrace/step``.

    Args:
        recording: The running recording.
        run: The run that ``wandb.init`` returned.
        own_rows: Log one row of the run's history per training step. Not for programs that pass ``step=`` to
            ``run.log``: Weights & Biases drops a row whose step is lower than that of the row before it, and rows of
            memtrace count as steps. Default False: the highest values since the program's last row become part of its
            next row.
    """
    ScalarStream(recording, [run_sink(run, own_rows=own_rows)])


def run_sink(run: Any = None, *, own_rows: bool = False) -> Sink:
    """Return a sink for the callbacks of memtrace that logs to a run.

    Args:
        run: The run; None: the run that is active when a step is logged. Without one nothing is logged.
        own_rows: See ``log_scalars``.
    """
    return _RunSink(run, own_rows)


class _RunSink:
    def __init__(self, run: Any, own_rows: bool) -> None:
        self._run = run
        self._own_rows = own_rows
        self._defined_for: Any = None
        self._row = -1
        self._highest: dict[str, float] = {}

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        run = getattr(sys.modules.get("wandb"), "run", None) if self._run is None else self._run
        if run is None:
            return
        if self._defined_for is not run:
            run.define_metric(STEP_METRIC, hidden=True)
            run.define_metric(f"{PREFIX}/*", step_metric=STEP_METRIC)
            self._defined_for = run
        if self._own_rows:
            run.log({STEP_METRIC: step, **scalars})
            return
        if run.step != self._row:
            self._row, self._highest = run.step, {}
        for name, value in scalars.items():
            self._highest[name] = max(value, self._highest.get(name, value))
        run.log({STEP_METRIC: step, **self._highest}, commit=False)
