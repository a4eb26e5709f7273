"""What the index of a rank lacks, and what summarizes it: this process, unless the caller passes something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from memtrace.analysis.part_summary import PartSummary, summarize_part
from memtrace.analysis.trace_index import TraceIndex
from memtrace.trace import Trace


class PartSummarizer(Protocol):
    """Summarizes parts of a trace, in this process or in others."""

    def __call__(self, trace: Trace, numbers: Sequence[int]) -> Iterator[PartSummary]:
        """Yield the summaries of parts of a single-rank trace, in their order.

        Raises:
            MemtraceError: a part cannot be read.
        """
        ...


def missing_parts(index: TraceIndex, trace: Trace) -> list[int]:
    """Return the parts of a trace that an index lacks."""
    last = index.parts[-1].number if index.parts else -1
    return [number for number in trace.part_numbers if number > last]


def summarize_here(trace: Trace, numbers: Sequence[int]) -> Iterator[PartSummary]:
    """Yield the summaries of parts of a single-rank trace, made in this process."""
    return (summarize_part(trace, number) for number in numbers)
