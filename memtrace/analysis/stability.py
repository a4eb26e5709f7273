"""Stability: how alike the steps are, which of them and which roles differ, and how; the law of allocations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memtrace.analysis.attribution import KIND, StepRows, detected_step_rows, step_rows, steps_are_marked
from memtrace.analysis.block_signatures import WARM_UP_STEPS, middle_by, role_text, roles
from memtrace.analysis.blocks import blocks
from memtrace.analysis.detection import Detection, detect
from memtrace.format.arrays import Array
from memtrace.trace import Trace

TOP = 10


@dataclass(frozen=True)
class Law:
    """allocations after n steps = ``constant`` + ``per_step`` * n; ``exact``: every step after warm-up fits."""

    constant: int
    per_step: int
    exact: bool


@dataclass(frozen=True)
class Difference:
    """A role that not every step after warm-up has alike. ``bytes``: its usual size; the lists are step numbers."""

    role: int
    site: str
    bytes: int
    missing: list[int]
    extra: list[int]
    other_size: list[int]
    other_accesses: list[int]


@dataclass(frozen=True)
class Stability:
    """Shares from 0 to 1 by step: of roles, bytes and events that match the usual step. ``usual_*`` are the medians
    after warm-up (None with too few steps); ``differences`` the roles that differ, those of most bytes first."""

    step: Array
    roles: Array
    bytes: Array
    events: Array
    usual_roles: float | None
    usual_bytes: float | None
    usual_events: float | None
    differences: tuple[Difference, ...]


def stability(trace: Trace) -> Stability:
    """How alike the steps of a trace are, worked out once.

    The usual step has every role that is in at least half of the steps after warm-up, with its median size and number
    of accesses. A block matches when its role, size and number of accesses are the usual ones; what is missing from a
    step counts as not matching. Its events are its allocation, free and accesses.
    """
    return trace.cached(_compute)


def _compute(trace: Trace) -> Stability:
    found, told, numbers = roles(trace), blocks(trace), step_rows(trace).number
    mine = np.flatnonzero(found.of_block >= 0)
    role, size = found.of_block[mine], told.size[mine]
    step = np.searchsorted(numbers, told.step[mine])
    accesses = (told.num_reads + told.num_writes)[mine].astype(np.int64)
    steady = step >= _warm_up(len(numbers))
    count = len(found)
    usual_size = middle_by(role[steady], size[steady], count)
    usual_accesses = middle_by(role[steady], accesses[steady], count)
    in_steps = np.bincount(role[steady], minlength=count)
    is_usual = in_steps >= max(1, (len(numbers) - _warm_up(len(numbers))) / 2)
    same_size = size == usual_size[role]
    same_accesses = accesses == usual_accesses[role]
    matches = is_usual[role] & same_size & same_accesses

    def share(weight: Array, usual_weight: Array) -> Array:
        matching = np.bincount(step[matches], weight[matches], minlength=len(numbers))
        present = np.bincount(step, weight, minlength=len(numbers))
        present_usual = np.bincount(step[is_usual[role]], usual_weight[role[is_usual[role]]], minlength=len(numbers))
        missing = np.maximum(usual_weight[is_usual].sum() - present_usual, 0)
        shares: Array = np.round(matching / np.maximum(present + missing, 1), 6)
        return shares

    events = accesses + 1 + (told.free_event[mine] >= 0)
    usual_events = np.where(usual_accesses >= 0, usual_accesses + 2, 0)
    by_roles = share(np.ones(len(mine)), np.ones(count))
    by_bytes = share(size.astype(np.float64), usual_size.astype(np.float64))
    by_events = share(events.astype(np.float64), usual_events.astype(np.float64))
    first = _warm_up(len(numbers))
    medians = (_median(by_roles[first:]), _median(by_bytes[first:]), _median(by_events[first:]))
    differs = (steady & ~matches, same_size, same_accesses, is_usual)
    differences = _differences(trace, role, step, usual_size, *differs)
    return Stability(numbers, by_roles, by_bytes, by_events, *medians, differences)


def _warm_up(num_steps: int) -> int:
    return WARM_UP_STEPS if num_steps > 2 * WARM_UP_STEPS else 0


def _median(values: Array) -> float | None:
    """None for a single step: it has no others to match."""
    return float(np.median(values)) if len(values) > 1 else None


def _differences(
    trace: Trace, role: Array, step: Array, usual_size: Array, differs: Array, same_size: Array, same_accesses: Array,
    is_usual: Array,
) -> tuple[Difference, ...]:  # fmt: skip
    numbers = step_rows(trace).number
    steady = np.arange(_warm_up(len(numbers)), len(numbers))
    here = np.bincount(role[step >= _warm_up(len(numbers))], minlength=len(usual_size))
    incomplete = np.flatnonzero(is_usual & (here < len(steady)))
    odd = np.union1d(role[differs], incomplete)
    odd = odd[np.argsort(-usual_size[odd], kind="stable")][:TOP]
    found = []
    for one in odd.tolist():
        mine = role == one
        in_steps = step[mine]

        def told(places: Array) -> list[int]:
            return [int(number) for number in numbers[np.intersect1d(places, steady)]]

        found.append(
            Difference(
                one,
                role_text(trace, one),
                int(usual_size[one]),
                missing=told(np.setdiff1d(steady, in_steps)) if is_usual[one] else [],
                extra=[] if is_usual[one] else told(in_steps),
                other_size=told(in_steps[~same_size[mine]]) if is_usual[one] else [],
                other_accesses=told(in_steps[~same_accesses[mine]]) if is_usual[one] else [],
            )
        )
    return tuple(found)


def law(trace: Trace) -> Law | None:
    """The law of allocations; None with fewer than four steps."""
    found = step_rows(trace)
    if len(found.number) < 4:
        return None
    total = np.concatenate([[0], np.cumsum(trace.columns("events", "kind")["kind"] == KIND["alloc"])])
    made = total[found.end_row] - total[found.first_row]
    steady = made[_warm_up(len(made)) :]
    per_step = int(np.median(steady))
    constant = int(total[found.end_row[-1]]) - per_step * len(made)
    return Law(constant, per_step, bool((steady == per_step).all()))


@dataclass(frozen=True)
class StepPattern:
    """What ``memtrace steps`` tells: where steps begin and end and how sure that is; see ``as_dict``."""

    source: str
    rows: StepRows
    detection: Detection
    agreement: float | None
    """Share of the marked steps whose end was also found in the events alone; None without marks."""
    shift_events: int | None
    """How many events later than marked (frees not counted; below 0: earlier) the most ends were found. None: nothing
    to compare."""
    shifted_agreement: float | None
    """The share of the marked steps whose end was found just so much later."""


def step_pattern(trace: Trace, from_events: bool = False) -> StepPattern:
    """The steps: the marks where there are any (checked against the events), else what the events tell.

    ``source``: 'marks', 'events' or 'none'. Boundaries are equal when only frees lie between them.
    """
    detection = detect(trace)
    marked = steps_are_marked(trace)
    check = _check(trace, step_rows(trace).end_row, detection) if marked else (None, None, None)
    if marked and not from_events:
        return StepPattern("marks", step_rows(trace), detection, *check)
    source = "events" if detection.num_steps else "none"
    return StepPattern(source, detected_step_rows(trace), detection, *check)


def _check(trace: Trace, ends: Array, detection: Detection) -> tuple[float, int | None, float | None]:
    """The share of the ends that were found, the usual shift of those found, and the share found with that shift."""
    if not len(ends) or not detection.num_steps:
        return 0.0, None, None
    kind = trace.columns("events", "kind")["kind"]
    frees = (kind == KIND["free"]) | (kind == KIND["free_requested"])
    acted = np.concatenate([[0], np.cumsum(~frees)])
    marked, found = acted[ends], acted[detection.rows[1:]]
    after = np.minimum(np.searchsorted(found, marked), len(found) - 1)
    before = np.maximum(after - 1, 0)
    nearest = np.where(np.abs(found[after] - marked) <= np.abs(found[before] - marked), after, before)
    shifts, number = np.unique(found[nearest] - marked, return_counts=True)
    usual = np.lexsort((np.abs(shifts), -number))[0]
    return float(np.isin(marked, found).mean()), int(shifts[usual]), float(number[usual] / len(marked))


def _confidence(trace: Trace, found: StepPattern) -> float | None:
    if not trace.has_blocks:
        return None
    return 1.0 if found.source == "marks" else found.detection.confidence


def pattern_as_dict(trace: Trace, from_events: bool = False) -> dict[str, Any]:
    """What ``memtrace steps --json`` prints. Times in ns, shares from 0 to 1, unknown None.

    ``source``, ``iterative`` (None for a file of totals, as ``confidence``), ``num_steps``, ``boundaries_ns`` (each
    step's start, and the last one's end; none without times), ``boundaries_events`` (the same as rows of events),
    ``period_events`` (median events of a step), ``confidence`` (of the detection; 1 for marks), ``method``,
    ``agreement``, ``shift_events`` and ``shifted_agreement`` (see ``StepPattern``), ``stability`` (the usual share of
    events, bytes and roles, and by step), ``differences`` (see ``Difference``), ``law`` (see ``Law``), all of the steps
    told.
    """
    found = step_pattern(trace, from_events)
    told = trace
    if from_events and found.agreement is not None:
        told = trace.without_marks()
    rows, even, grows = found.rows, stability(told), law(told)
    ends = rows.start_ns + rows.duration_ns
    boundaries = np.append(rows.start_ns, ends[-1:])
    period = int(np.median(rows.end_row - rows.first_row)) if len(rows.number) else None
    by_step = [
        {"step": int(number), "events": float(e), "bytes": float(b), "roles": float(r)}
        for number, e, b, r in zip(even.step, even.events, even.bytes, even.roles, strict=True)
    ]
    return {
        "source": found.source,
        "iterative": bool(len(rows.number)) if trace.has_blocks else None,
        "num_steps": len(rows.number),
        "boundaries_ns": boundaries.tolist() if trace.has_times else [],
        "boundaries_events": np.append(rows.first_row, rows.end_row[-1:]).tolist(),
        "period_events": period,
        "confidence": _confidence(trace, found),
        "method": found.detection.method,
        "agreement": found.agreement,
        "shift_events": found.shift_events,
        "shifted_agreement": found.shifted_agreement,
        "stability": {
            "events": even.usual_events,
            "bytes": even.usual_bytes,
            "roles": even.usual_roles,
            "by_step": by_step,
        },
        "differences": [asdict(one) for one in even.differences],
        "law": asdict(grows) if grows else None,
    }
