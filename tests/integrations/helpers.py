"""What the tests of integrations share."""

from __future__ import annotations

from memtrace.trace import Trace


def range_names(trace: Trace) -> list[str]:
    """The names of the ranges of a trace, in order of time."""
    spans = trace.spans
    return [str(trace.name(name)) for name in spans[spans["kind"] == "range"].sort_values("start_ns")["name"]]


def steps_overlap_ranges(trace: Trace, name: str) -> bool:
    """Whether a step overlaps a range of this name."""
    spans = trace.spans
    steps = spans[spans["kind"] == "step"]
    ranges = spans[(spans["kind"] == "range") & spans["name"].map(trace.name).eq(name)]
    return any(
        start < step.start_ns + step.duration_ns and step.start_ns < start + duration
        for start, duration in zip(ranges["start_ns"], ranges["duration_ns"], strict=True)
        for step in steps.itertuples()
    )
