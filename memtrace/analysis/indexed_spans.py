"""The steps and phases of a trace in an index, which grow with the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.event_codes import SPAN
from memtrace.format.arrays import Array
from memtrace.trace import Trace

MAX_SPANS: Final = 500_000
"""Most steps, and most phases, that are kept: the longest."""


@dataclass(frozen=True)
class Spans:
    """Steps or phases in the order of their starts."""

    start_ns: Array
    end_ns: Array
    index: Array
    """Number of the step; id of the phase's name in the table names."""

    @staticmethod
    def empty() -> Spans:
        """Return no spans."""
        return Spans(*(np.empty(0, np.int64) for _ in range(3)))

    def select(self, chosen: Array) -> Spans:
        """Return the spans that a mask or row numbers select."""
        return Spans(self.start_ns[chosen], self.end_ns[chosen], self.index[chosen])

    def between(self, start_ns: int | None, end_ns: int | None) -> Spans:
        """Return the spans that overlap a window; None is an open end."""
        inside = np.ones(len(self.index), bool)
        if start_ns is not None:
            inside &= self.end_ns > start_ns
        if end_ns is not None:
            inside &= self.start_ns < end_ns
        return self.select(inside)

    def joined(self, other: Spans) -> Spans:
        """Return these spans and those of another, the longest ``MAX_SPANS`` of them."""
        names = ("start_ns", "end_ns", "index")
        return Spans(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names)).longest(
            MAX_SPANS
        )

    def longest(self, count: int) -> Spans:
        """Return the longest spans, in the order of their starts."""
        rows = np.argsort(self.start_ns - self.end_ns, kind="stable")[:count]
        return self.select(rows[np.argsort(self.start_ns[rows], kind="stable")])


class SpanIndex:
    """The steps and phases of a trace so far.

    Attributes:
        steps: the marked steps.
        phases: the phases of the steps.
    """

    def __init__(self) -> None:
        self.steps = self.phases = Spans.empty()
        self._last_part = -1

    def extend(self, trace: Trace) -> None:
        """Add what the trace has more than before."""
        self._last_part, spans = trace.spans_after(self._last_part)
        is_step = spans["kind"] == SPAN["step"]
        restarts = np.flatnonzero(is_step & (spans["index"] == 0))
        if len(restarts):
            # Steps before the last step 0 came from optimizers, until the program marked its own.
            self.steps = Spans.empty()
            is_step[: restarts[-1]] = False
        self.steps = self.steps.joined(_spans(spans, is_step, spans["index"]))
        self.phases = self.phases.joined(_spans(spans, spans["kind"] == SPAN["phase"], spans["name"]))

    def step_at(self, time_ns: int) -> int | None:
        """Return the number of the step at a time; None outside all steps."""
        at = self.steps.between(time_ns, time_ns + 1)
        inside = at.index[(at.start_ns <= time_ns) & (time_ns < at.end_ns)]
        return int(inside[0]) if len(inside) else None

    def drop_before(self, time_ns: int) -> None:
        """Forget spans that ended before a time."""
        self.steps, self.phases = self.steps.between(time_ns, None), self.phases.between(time_ns, None)

    def to_arrays(self) -> dict[str, Array]:
        """Return the content as arrays."""
        arrays = {"spans.last": np.array([self._last_part])}
        for name, spans in (("steps", self.steps), ("phases", self.phases)):
            arrays |= {f"{name}.{column}": values for column, values in vars(spans).items()}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> SpanIndex:
        """Return what ``to_arrays`` gave."""
        index = cls()
        index._last_part = int(arrays["spans.last"][0])
        index.steps, index.phases = (
            Spans(*(arrays[f"{name}.{column}"] for column in ("start_ns", "end_ns", "index")))
            for name in ("steps", "phases")
        )
        return index


def _spans(spans: Mapping[str, Array], chosen: Array, index: Array) -> Spans:
    start = spans["start_ns"][chosen]
    return Spans(start, start + np.maximum(spans["duration_ns"][chosen], 0), index[chosen].astype(np.int64))
