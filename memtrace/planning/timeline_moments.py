"""When the modules of a step run forward and backward, and when its optimizer runs, in positions of a timeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import op_column
from memtrace.analysis.event_codes import PHASE
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.timeline import TICKS_PER_ROW
from memtrace.planning.timeline_selection import module_mask
from memtrace.trace import Trace


@dataclass(frozen=True)
class Interval:
    """The first and the last position of what runs."""

    begin: int
    end: int


@dataclass(frozen=True)
class StepMoments:
    """The events of a step that belong to operator calls, one element per event, in order."""

    trace: Trace
    position: Array
    module: Array
    """Module of the operator (names.id)."""
    phase: Array

    def find(self, phase: str, modules: tuple[str, ...] | None = None) -> Interval | None:
        """Return when operators of a phase run; None where there are none.

        Args:
            phase: one of ``schema.PHASES``.
            modules: patterns of modules; None: all operators, also those outside all modules.
        """
        chosen = self.phase == PHASE[phase]
        if modules is not None:
            chosen = chosen & module_mask(self.trace, self.module, modules)
        where = np.flatnonzero(chosen)
        return Interval(int(self.position[where[0]]), int(self.position[where[-1]])) if len(where) else None

    def require(self, phase: str) -> Interval:
        """Return when a phase runs; MemtraceError where the step has no operators of it."""
        interval = self.find(phase)
        if interval is None:
            raise MemtraceError(
                f"the step has no operators of the phase {phase}, which this change needs: record training with "
                "memtrace.record or memtrace record."
            )
        return interval

    def within_module(self, phase: str) -> Interval | None:
        """Return when operators of a phase that belong to any module run; None where there are none."""
        where = np.flatnonzero((self.phase == PHASE[phase]) & (self.module >= 0))
        return Interval(int(self.position[where[0]]), int(self.position[where[-1]])) if len(where) else None


def find_moments(trace: Trace, step: RecordedStep) -> StepMoments:
    """Return the moments of a recorded step."""
    op = trace.columns("events", "op_id")["op_id"][step.first_row : step.end_row]
    rows = np.flatnonzero(op >= 0)
    return StepMoments(
        trace,
        (rows + step.first_row) * TICKS_PER_ROW,
        op_column(trace, op[rows], "module"),
        op_column(trace, op[rows], "phase"),
    )
