"""First pass over the parts of a rank: the marked steps, the waits for data, and the garbage collections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from memtrace.analysis.attribution import SPAN
from memtrace.analysis.outside_memory import find_outside_readings
from memtrace.analysis.retained_memory import GC_RANGE
from memtrace.format.arrays import Array
from memtrace.trace import Trace

BEFORE_ALL = int(np.iinfo(np.int64).min)
AFTER_ALL = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Intervals:
    """Intervals of time, in the order in which they were written or of their start."""

    start_ns: Array
    duration_ns: Array
    number: Array
    """Number of a step; -1 for others."""

    @property
    def end_ns(self) -> Array:
        """The end of each interval."""
        end: Array = self.start_ns + self.duration_ns
        return end

    def take(self, chosen: Array) -> Intervals:
        """Return some of the intervals."""
        return Intervals(self.start_ns[chosen], self.duration_ns[chosen], self.number[chosen])

    def joined(self, later: Intervals) -> Intervals:
        """Return these intervals, then others."""
        return Intervals(
            np.concatenate([self.start_ns, later.start_ns]),
            np.concatenate([self.duration_ns, later.duration_ns]),
            np.concatenate([self.number, later.number]),
        )

    def by_start(self) -> Intervals:
        """Return the intervals in order of their start."""
        return self.take(np.argsort(self.start_ns, kind="stable"))


NO_INTERVALS = Intervals(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class SpanFacts:
    """What a run of parts holds of the spans that later passes need."""

    numbers: tuple[int, ...]
    """The parts of the run."""
    order_ns: tuple[int, ...]
    """For each part the largest time of all events before it."""
    num_first_live: int
    """Rows of the first keyframe."""
    steps: Intervals
    waits: Intervals
    collections: Intervals
    """Runs of the garbage collector."""
    has_phases: bool
    """Whether there are spans of phases."""
    outside_bytes: Mapping[str, int]
    """Largest memory in use outside torch's allocator, by device."""
    devices: frozenset[str]
    """The devices of the readings of the allocator's and the driver's totals, and of operators that a GPU timed."""


def gc_names(trace: Trace) -> frozenset[int]:
    """Return the ids of the name under which runs of the garbage collector are recorded."""
    return frozenset(trace.name_ids(GC_RANGE))


def read_spans(trace: Trace, numbers: tuple[int, ...], names_of_gc: frozenset[int]) -> SpanFacts:
    """Return the facts about the spans of some parts of a single-rank trace, which follow each other."""
    steps = waits = collections = NO_INTERVALS
    has_phases = False
    for number in numbers:
        stored = trace.stored_columns(number, {"spans": ("kind", "name", "start_ns", "duration_ns", "index")})
        spans = stored.columns["spans"]
        everything = Intervals(spans["start_ns"], spans["duration_ns"], spans["index"])
        kind = spans["kind"]
        has_phases = has_phases or bool((kind == SPAN["phase"]).any())
        steps = steps.joined(everything.take(np.flatnonzero(kind == SPAN["step"])))
        waits = waits.joined(everything.take(np.flatnonzero(kind == SPAN["data_wait"])))
        if names_of_gc:
            is_collection = (kind == SPAN["range"]) & np.isin(spans["name"], list(names_of_gc))
            collections = collections.joined(everything.take(np.flatnonzero(is_collection)))
    outside: dict[str, int] = {}
    devices: set[str] = set()
    for number in numbers:
        stored = trace.stored_columns(number, {"counters": ("time_ns", "device", "name", "value")})
        devices.update(stored.devices)
        devices.update(trace.stored_columns(number, {"device_times": ("device",)}).devices)
        readings = find_outside_readings(stored.columns["counters"])
        for code in np.unique(readings.device).tolist():
            name, highest = stored.devices[code], int(readings.bytes[readings.device == code].max())
            outside[name] = max(outside.get(name, highest), highest)
    live = trace.stored_columns(numbers[0], {"live": ("kind",)}).columns["live"]["kind"]
    order = tuple(BEFORE_ALL if (at := trace.order_ns(number)) is None else at for number in numbers)
    return SpanFacts(numbers, order, len(live), steps, waits, collections, has_phases, outside, frozenset(devices))


def join_spans(earlier: SpanFacts, later: SpanFacts) -> SpanFacts:
    """Return the facts of two runs of parts that follow each other."""
    outside = dict(earlier.outside_bytes)
    for name, highest in later.outside_bytes.items():
        outside[name] = max(outside.get(name, highest), highest)
    return SpanFacts(
        earlier.numbers + later.numbers,
        earlier.order_ns + later.order_ns,
        earlier.num_first_live,
        earlier.steps.joined(later.steps),
        earlier.waits.joined(later.waits),
        earlier.collections.joined(later.collections),
        earlier.has_phases or later.has_phases,
        outside,
        earlier.devices | later.devices,
    )


@dataclass(frozen=True)
class Cuts:
    """The steps and collections that overlap a run of parts, by which it is cut."""

    first_step: int
    """Place of the first of ``steps`` among all steps of the trace."""
    num_steps: int
    """Number of all steps of the trace."""
    steps: Intervals
    collections: Intervals
    order_ns: int
    """Largest time of all events before the run: what starts or ends up to then does so in an earlier part."""


@dataclass(frozen=True)
class RankSpans:
    """The spans of a whole rank, in order of their start."""

    facts: SpanFacts

    @property
    def steps(self) -> Intervals:
        """The marked steps."""
        return self.facts.steps

    def cuts(self, first: int, end: int) -> Cuts:
        """Return by what to cut the parts from one place in ``numbers`` up to another."""
        order = self.facts.order_ns
        low, high = BEFORE_ALL if first == 0 else order[first], order[end] if end < len(order) else AFTER_ALL
        steps = self.facts.steps
        low_step = int(np.searchsorted(steps.end_ns, low, side="right"))
        high_step = int(np.searchsorted(steps.start_ns, high, side="right"))
        collections = self.facts.collections
        inside = np.flatnonzero((collections.end_ns > low) & (collections.start_ns <= high))
        chosen = np.arange(low_step, max(low_step, high_step))
        return Cuts(low_step, len(steps.start_ns), steps.take(chosen), collections.take(inside), low)


def order_spans(facts: SpanFacts) -> RankSpans | None:
    """Return the spans of a rank by their start; None where no step is marked, or steps overlap."""
    steps = facts.steps.by_start()
    if not len(steps.start_ns) or bool((steps.end_ns[:-1] > steps.start_ns[1:]).any()):
        return None
    waits, collections = facts.waits.by_start(), facts.collections.by_start()
    ordered = replace(facts, steps=steps, waits=waits, collections=collections)
    return RankSpans(ordered)


def open_part(trace: Trace, number: int, *, has_phases: bool) -> Trace:
    """Return a part of a trace with marked steps, in which what lies outside all steps and phases is known to.

    Args:
        trace: a single-rank trace.
        number: the part.
        has_phases: whether the trace has spans of phases, which tell the phase of what lies between them.
    """
    kinds = [SPAN["step"], *([SPAN["phase"]] if has_phases else [])]
    nowhere = np.full(len(kinds), -1)
    return trace.part(number).with_spans(
        {"kind": np.array(kinds), "start_ns": nowhere, "duration_ns": np.zeros(len(kinds), np.int64)}
    )
