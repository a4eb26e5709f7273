"""A window of steps of a trace, whether its steps are marked or detected in the events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtrace.analysis.attribution import step_rows, steps_are_marked
from memtrace.errors import TraceError
from memtrace.format.encode import Text, make_table
from memtrace.format.schema import SPAN_KINDS
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa


def step_window(trace: Trace, first_step: int | None, last_step: int | None) -> Trace:
    """Return the part of a trace from the start of ``first_step`` to the end of ``last_step``.

    Marked steps are opened without reading the rest of the trace. Where no step is marked the whole trace is read and
    its steps are detected in the events; in the window they are marked, so that they keep their numbers.

    Args:
        trace: a trace of one rank, or of several whose steps are marked.
        first_step: number of the first step; None: the window begins with the trace.
        last_step: number of the last step, included; None: the window ends with the trace.

    Raises:
        TraceError: there is no such step; the message says which there are.
    """
    if len(trace.ranks) > 1 or steps_are_marked(trace):
        return trace.window(first_step, last_step)
    steps = step_rows(trace)
    if not len(steps.number):
        raise TraceError(
            f"{trace.path or 'The trace'} has no steps: none is marked and nothing repeats in the events. Mark them "
            "with rec.step() or rec.steps(loader)."
        )
    for step in (first_step, last_step):
        if step is not None and step not in steps.number:
            raise TraceError(
                f"{trace.path or 'The trace'} has no step {step}. It has steps {steps.number[0]} to "
                f"{steps.number[-1]}, detected in the events."
            )
    first = int(steps.number[0]) if first_step is None else first_step
    last = int(steps.number[-1]) if last_step is None else last_step
    first_row = 0 if first_step is None else int(steps.first_row[steps.number == first][0])
    end_row = trace.num_rows("events") if last_step is None else int(steps.end_row[steps.number == last][0])
    return trace.window_of_rows(first_row, end_row, _as_spans(trace, first, last))


def _as_spans(trace: Trace, first: int, last: int) -> pa.Table:
    """Return detected steps as rows of the table spans."""
    steps = step_rows(trace)
    inside = (steps.number >= first) & (steps.number <= last)
    num_steps = int(inside.sum())
    return make_table(
        "spans",
        num_steps,
        {
            "kind": Text((steps.number[inside] * 0 + SPAN_KINDS.index("step")), SPAN_KINDS),
            "start_ns": steps.start_ns[inside],
            "duration_ns": steps.duration_ns[inside],
            "index": steps.number[inside],
        },
    )
