"""Annotated ranges of a program become spans: steps, waits for data, and plain ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import SPAN_KINDS
from memtrace.readers.tables import Names

if TYPE_CHECKING:
    import pyarrow as pa

_PROFILER_STEP: Final = re.compile(r"ProfilerStep#(\d{1,15})$")
_OPTIMIZER_STEP: Final = "Optimizer.step#"
_DATA_WAIT: Final = "enumerate(DataLoader)#"


class Range(NamedTuple):
    """A named stretch of time on the host, in nanoseconds since the trace began."""

    name: str
    start_ns: int
    end_ns: int


class Span(NamedTuple):
    """A row of the table ``spans``; -1 for null."""

    kind: str
    name: int
    start_ns: int
    end_ns: int
    number: int


def spans_of(ranges: Sequence[Range], names: Names, *, first_ns: int, last_ns: int) -> list[Span]:
    """The spans that the ranges tell of, of those that reach into the trace (``first_ns`` to ``last_ns``)."""
    ranges = sorted(ranges, key=lambda item: item.start_ns)
    spans = [Span("step", -1, start, end, number) for number, start, end in steps_of(ranges, first_ns=first_ns)]
    for item in ranges:
        if item.end_ns < first_ns or item.start_ns > last_ns or _PROFILER_STEP.match(item.name):
            continue
        if item.name.startswith(_DATA_WAIT):
            spans.append(Span("data_wait", -1, item.start_ns, item.end_ns, -1))
        else:
            spans.append(Span("range", names.text("range", item.name), item.start_ns, item.end_ns, -1))
    return spans


def steps_of(ranges: Sequence[Range], *, first_ns: int) -> list[tuple[int, int, int]]:
    """Number, start and end of each training iteration whose beginning is in the trace, from ranges in order of start.

    The profiler's own steps where there are any, by their own numbers. Else an iteration ends with an optimizer's
    step; the first begins with the trace, unless an earlier one ended before it: then its beginning is lost, and it is
    left out. Of several optimizers the one that steps last in the first iteration ends it.
    """
    marked = [(match, item) for item in ranges if (match := _PROFILER_STEP.match(item.name))]
    if marked:
        numbers = [int(match[1]) for match, _ in marked]
        if len(set(numbers)) < len(numbers):
            numbers = list(range(len(marked)))
        profiled = zip(numbers, (item for _, item in marked), strict=True)
        return [(number, item.start_ns, item.end_ns) for number, item in profiled if item.start_ns >= first_ns]
    optimizers = optimizer_steps(ranges)
    if not optimizers:
        return []
    closing = list(dict.fromkeys(item.name for item in optimizers))[-1]
    ends = [item.end_ns for item in optimizers if item.name == closing]
    starts = [first_ns, *ends[:-1]]
    rows = [(start, end) for start, end in zip(starts, ends, strict=True) if start >= first_ns and end > start]
    return [(number, start, end) for number, (start, end) in enumerate(rows)]


def optimizer_steps(ranges: Sequence[Range]) -> list[Range]:
    """The ranges in which an optimizer takes its step."""
    return [item for item in ranges if item.name.startswith(_OPTIMIZER_STEP)]


def spans_table(spans: Sequence[Span]) -> pa.Table:
    """The table ``spans``, in order of start."""
    rows = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    name, start, end, index = (np.array([row[place] for row in rows], np.int64) for place in range(1, 5))
    return make_table(
        "spans",
        len(rows),
        {
            "kind": Text(np.array([SPAN_KINDS.index(row.kind) for row in rows], np.int8), SPAN_KINDS),
            "name": Known(name, name >= 0),
            "start_ns": start,
            "duration_ns": end - start,
            "index": Known(index, index >= 0),
        },
    )
