"""The two passes over the parts of a rank, each as ``partial``, ``merge`` and ``finish``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from memtrace.analysis.by_part.events import EventFacts, read_events
from memtrace.analysis.by_part.spans import Cuts, RankSpans, SpanFacts, gc_names, join_spans, order_spans, read_spans
from memtrace.analysis.thresholds import WARM_UP_STEPS
from memtrace.trace import Trace

MAX_PARTS_PER_TASK: Final = 16
MIN_TASKS: Final = 24
"""Tasks into which even a short trace is divided, so that all workers have work until the end."""


def divide(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return runs of parts of about equal length that follow each other."""
    size = max(1, min(MAX_PARTS_PER_TASK, -(-len(numbers) // MIN_TASKS)))
    return [tuple(numbers[first : first + size]) for first in range(0, len(numbers), size)]


@dataclass(frozen=True)
class SpanPass:
    """Finds the marked steps of a rank, the waits and the garbage collections."""

    names_of_gc: frozenset[int]
    is_quick: ClassVar[bool] = True

    @classmethod
    def of(cls, trace: Trace) -> SpanPass:
        """Return the pass over a single-rank trace."""
        return cls(gc_names(trace))

    def tasks(self, trace: Trace) -> list[tuple[tuple[int, ...], frozenset[int]]]:
        """Return what ``partial`` is called with."""
        return [(numbers, self.names_of_gc) for numbers in divide(trace.part_numbers)]

    @staticmethod
    def partial(trace: Trace, task: tuple[tuple[int, ...], frozenset[int]]) -> SpanFacts:
        """Return the facts of a run of parts."""
        return read_spans(trace, *task)

    @staticmethod
    def merge(earlier: SpanFacts, later: SpanFacts) -> SpanFacts:
        """Return the facts of two runs that follow each other."""
        return join_spans(earlier, later)

    @staticmethod
    def finish(state: SpanFacts) -> RankSpans | None:
        """Return the spans of the rank; None where no step is marked, or steps overlap."""
        return order_spans(state)


@dataclass(frozen=True)
class EventTask:
    """A run of parts, with what each is cut by."""

    numbers: tuple[int, ...]
    cuts: tuple[Cuts, ...]
    num_ends: int
    """Number of step ends of the trace, without those of warm-up steps."""


@dataclass(frozen=True)
class EventPass:
    """Measures levels, steps and retained memory of a rank."""

    spans: RankSpans
    is_quick: ClassVar[bool] = False

    @property
    def num_ends(self) -> int:
        """Number of step ends of the trace, without those of warm-up steps."""
        return max(len(self.spans.steps.start_ns) - WARM_UP_STEPS, 0)

    def tasks(self, trace: Trace) -> list[EventTask]:
        """Return what ``partial`` is called with."""
        tasks, place = [], 0
        for numbers in divide(trace.part_numbers):
            cuts = tuple(self.spans.cuts(at, at + 1) for at in range(place, place + len(numbers)))
            tasks.append(EventTask(numbers, cuts, self.num_ends))
            place += len(numbers)
        return tasks

    @staticmethod
    def partial(trace: Trace, task: EventTask) -> EventFacts:
        """Return the facts of a run of parts.

        Raises:
            NotDivisibleError: the trace must be analyzed whole.
        """
        facts: EventFacts | None = None
        for number, cuts in zip(task.numbers, task.cuts, strict=True):
            part = read_events(trace, number, cuts)
            facts = part if facts is None else facts.joined(part, task.num_ends)
        assert facts is not None
        return facts

    def merge(self, earlier: EventFacts, later: EventFacts) -> EventFacts:
        """Return the facts of two runs that follow each other."""
        return earlier.joined(later, self.num_ends)

    @staticmethod
    def finish(state: EventFacts) -> EventFacts:
        """Return the facts of the rank."""
        return state
