"""Converts the annotated ranges of a program to spans: steps, waits for data, and plain ranges."""

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
    """An annotated range on the host; times are nanoseconds since the trace began."""

    name: str
    start_ns: int
    end_ns: int


class Span(NamedTuple):
    """A row of the table ``spans``."""

    kind: str
    name: int
    """Id in the table ``names``; -1 for none."""
    start_ns: int
    end_ns: int
    number: int
    """Number of the step; -1 for other kinds."""


class _Step(NamedTuple):
    number: int
    start_ns: int
    end_ns: int


def ranges_to_spans(ranges: Sequence[Range], names: Names, *, first_ns: int, last_ns: int) -> list[Span]:
    """Return the spans of the ranges that overlap the trace.

    Args:
        ranges: the annotated ranges in any order.
        names: the table that receives the names of the ranges.
        first_ns: beginning of the trace.
        last_ns: end of the trace.
    """
    ranges = sorted(ranges, key=lambda item: item.start_ns)
    steps = _find_steps(ranges, first_ns=first_ns)
    spans = [Span("step", -1, step.start_ns, step.end_ns, step.number) for step in steps]
    for item in ranges:
        if item.end_ns < first_ns or item.start_ns > last_ns or _PROFILER_STEP.match(item.name):
            continue
        if item.name.startswith(_DATA_WAIT):
            spans.append(Span("data_wait", -1, item.start_ns, item.end_ns, -1))
        else:
            spans.append(Span("range", names.text("range", item.name), item.start_ns, item.end_ns, -1))
    return spans


def _find_steps(ranges: Sequence[Range], *, first_ns: int) -> list[_Step]:
    """Return each training step whose beginning is in the trace.

    The steps of torch.profiler are taken with their own numbers if there are any. Otherwise a step ends with the step
    of an optimizer, and the first step begins with the trace. If an optimizer stepped before the trace began, the
    beginning of the first step is unknown, and that step is left out. With several optimizers, the one that steps last
    in the first iteration ends the steps.

    Args:
        ranges: the annotated ranges in order of their start.
        first_ns: beginning of the trace.
    """
    marked = [(match, item) for item in ranges if (match := _PROFILER_STEP.match(item.name))]
    if marked:
        numbers = [int(match[1]) for match, _ in marked]
        if len(set(numbers)) < len(numbers):
            numbers = list(range(len(marked)))
        profiled = zip(numbers, (item for _, item in marked), strict=True)
        return [_Step(number, item.start_ns, item.end_ns) for number, item in profiled if item.start_ns >= first_ns]
    optimizers = optimizer_steps(ranges)
    if not optimizers:
        return []
    last_optimizer = list(dict.fromkeys(item.name for item in optimizers))[-1]
    ends = [item.end_ns for item in optimizers if item.name == last_optimizer]
    starts = [first_ns, *ends[:-1]]
    times = [(start, end) for start, end in zip(starts, ends, strict=True) if start >= first_ns and end > start]
    return [_Step(number, start, end) for number, (start, end) in enumerate(times)]


def optimizer_steps(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges of optimizer steps."""
    return [item for item in ranges if item.name.startswith(_OPTIMIZER_STEP)]


def spans_table(spans: Sequence[Span]) -> pa.Table:
    """Build the table ``spans``, in order of start."""
    rows = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    name, start, end, index = (np.array([row[field] for row in rows], np.int64) for field in range(1, 5))
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
