"""What the peak memory and the time of a recorded step would be with changes to the training program.

    plan = plan_whatif(memtrace.load("run.memtrace"), [ScaleBatch(2), Shard("optimizer_state", 8)])

Memory is predicted by replaying the timeline of the step (`timeline`), time on its operator graph (`operator_graph`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memtrace.display import Displayed
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.batch_size import STATE, constant_bytes_by_law, constant_bytes_by_role
from memtrace.planning.batch_size_law import BatchLaw, LargestBatch, find_batch_law, find_largest_batch
from memtrace.planning.operator_graph import build_graph
from memtrace.planning.plan import StepCost
from memtrace.planning.recorded_step import RecordedStep, choose_step, main_device
from memtrace.planning.sharding import METHODS
from memtrace.planning.timeline import Timeline, build_timeline
from memtrace.planning.timeline_moments import find_moments
from memtrace.planning.whatif_changes import Change, Shard, StepState
from memtrace.trace import Trace


@dataclass(frozen=True)
class WhatIfRow:
    """The step after one change and all before it."""

    change: str
    """The change as text."""
    cost: StepCost
    """What the step costs then."""
    bytes_by_category: dict[str, int]
    """Bytes at the peak, by category; categories without bytes are left out."""
    assumptions: tuple[str, ...]
    """What this change adds to what the prediction rests on."""


@dataclass(frozen=True)
class WhatIf(Displayed):
    """What a step would cost with changes."""

    device: str
    """Device whose peak is predicted, such as ``cpu`` or ``cuda:0``."""
    step: int
    """Number of the recorded step."""
    recorded: StepCost
    """The recorded step."""
    recorded_bytes_by_category: dict[str, int]
    """Bytes at its peak, by category."""
    rows: tuple[WhatIfRow, ...]
    """The step after each change."""
    predicted: StepCost
    """The step with all changes."""
    assumptions: tuple[str, ...]
    """What the prediction rests on, one sentence each."""
    batch_law: BatchLaw
    """How the peak depends on the batch, with all changes."""
    largest_batch: LargestBatch | None
    """The largest batch that fits; None: no capacity was given."""


def plan_whatif(
    trace: Trace,
    changes: Sequence[Change] = (),
    *,
    device: str | None = None,
    batch: int | None = None,
    others: Mapping[int, Trace] | None = None,
    capacity_bytes: int | None = None,
) -> WhatIf:
    """Predict peak memory and time of a step with changes, which are made in the given order.

    Args:
        trace: a trace of one rank with steps.
        changes: the changes.
        device: whose peak is predicted; None: the device with the highest peak.
        batch: the batch size of the trace; None: unknown, batches are then given as multiples of it.
        others: traces of the same program at other batch sizes, by batch size. They show exactly which blocks grow
            with the batch.
        capacity_bytes: memory of the device, to find the largest batch that fits.

    Raises:
        MemtraceError: the trace has no steps or no blocks, or lacks what a change needs.
    """
    if not trace.has_blocks:
        raise MemtraceError("the trace has no blocks, only totals: a what-if needs a recording or a CUDA snapshot.")
    others = others or {}
    if others and batch is None:
        raise MemtraceError("traces of other batch sizes need the batch size of the first trace.")
    device = device or main_device(trace)
    step = choose_step(trace, device)
    constant, origin = _constant_bytes(trace, device, step, batch, others)
    timeline = build_timeline(trace, device, step, constant)
    has_times = step.cost.step_ns is not None
    first = StepState(
        trace, device, step, find_moments(trace, step), timeline, build_graph(trace, step) if has_times else None
    )
    reasons = [origin, *([] if has_times else ["The trace has no real times: time is not predicted."])]
    first = first.assuming(*reasons)
    _check_shards(changes)
    state, rows = first, []
    for change in changes:
        before, state = state.assumptions, change.apply(state)
        rows.append(
            WhatIfRow(
                change.describe(),
                step_cost(state, first),
                _categories(state.timeline),
                tuple(sentence for sentence in state.assumptions if sentence not in before),
            )
        )
    law = find_batch_law(
        state.timeline, batch, _measured(device, batch, step, others, unchanged=not changes), state.batch_factor
    )
    return WhatIf(
        device,
        step.number,
        step.cost,
        _categories(timeline),
        tuple(rows),
        step_cost(state, first),
        state.assumptions,
        law,
        None if capacity_bytes is None else find_largest_batch(state.timeline, law, capacity_bytes),
    )


def _check_shards(changes: Sequence[Change]) -> None:
    """Refuse changes that split the same state twice."""
    methods = [change.what for change in changes if isinstance(change, Shard)]
    whole = [what for what in methods if what in METHODS]
    if len(whole) > 1 or len(set(methods)) < len(methods) or (whole and set(methods) & set(STATE)):
        raise MemtraceError(
            f"the state cannot be split by {' and '.join(methods)} at once: choose one of {', '.join(METHODS)}, or "
            "different categories."
        )


def _constant_bytes(
    trace: Trace, device: str, step: RecordedStep, batch: int | None, others: Mapping[int, Trace]
) -> tuple[Array, str]:
    """Return the bytes that do not grow with the batch, and a sentence about where this is known from."""
    if not others:
        return constant_bytes_by_role(trace, step), (
            "Which blocks grow with the batch follows from what computes them; a trace of another batch size "
            "(--batch-trace) makes it exact."
        )
    assert batch is not None
    # The farthest batch size shows the growth most clearly; the others are left to test the law.
    other = max(others, key=lambda size: abs(size - batch))
    other_step = choose_step(others[other], device)
    constant = constant_bytes_by_law(trace, step, batch, others[other], other_step, other)
    return constant, f"Which blocks grow with the batch follows from the traces of batch {batch} and {other}."


def _measured(
    device: str, batch: int | None, step: RecordedStep, others: Mapping[int, Trace], *, unchanged: bool
) -> dict[int, int]:
    """Return the recorded peaks by batch size, which test the law; none where the step is changed."""
    if batch is None or not unchanged:
        return {}
    peaks = {batch: step.cost.peak_bytes}
    return peaks | {size: choose_step(other, device).cost.peak_bytes for size, other in others.items()}


def _categories(timeline: Timeline) -> dict[str, int]:
    return timeline.bytes_by_category(timeline.peak_position)


def step_cost(state: StepState, first: StepState) -> StepCost:
    """Return the cost of a changed step; its time relative to the median step, as the recorded one varies."""
    step_ns = None
    if state.graph is not None and first.graph is not None and first.step.cost.step_ns is not None:
        share = state.graph.simulate() / max(first.graph.simulate(), 1)
        step_ns = round(first.step.cost.step_ns * share)
    return StepCost(state.timeline.peak_bytes, step_ns)
