"""Infers under which rules a history was recorded, by replaying it under each candidate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memtrace.allocator.history import FREE_REQUESTED, AllocatorHistory, check_plausible
from memtrace.allocator.infer_waits import infer_waits
from memtrace.allocator.replay import PreparedHistory, ReplayResult, prepare_history, replay_history
from memtrace.allocator.rules import TORCH, TORCH_2_13, Rules
from memtrace.allocator.segment_order import infer_segment_order


def reproduce_history(history: AllocatorHistory) -> tuple[PreparedHistory, ReplayResult]:
    """Replay a history under the rules of the PyTorch version that recorded it.

    Returns:
        The first candidate of `candidate_rules` that replays exactly; where none does, the closest attempt.

    Raises:
        TraceError: the history has a size or an address that no device can have.
    """
    check_plausible(history)
    closest: tuple[PreparedHistory, ReplayResult] | None = None
    for rules in candidate_rules(history):
        for prepared in _all_interpretations(history, rules):
            result = replay_history(prepared)[0]
            if result.is_exact:
                return prepared, result
            if closest is None or result.num_allocations_exact > closest[1].num_allocations_exact:
                closest = prepared, result
    assert closest is not None
    return closest


def _all_interpretations(history: AllocatorHistory, rules: Rules) -> Iterator[PreparedHistory]:
    """Yield the interpretations with the estimated length of virtual ranges, then those without an estimate.

    The estimate is too small where a range older than the history begins below its lowest page in the history.
    """
    yield from _interpretations(history, rules)
    if (history.kind == FREE_REQUESTED).any():
        yield from _interpretations(history, rules, frees_wait=False)
    if history.device_bytes is None and history.estimated_device_bytes is not None:
        yield from _interpretations(replace(history, estimated_device_bytes=None), rules)


def _interpretations(history: AllocatorHistory, rules: Rules, *, frees_wait: bool = True) -> Iterator[PreparedHistory]:
    """Yield the ways to fill in what the history does not say, the most likely first."""
    prepared = prepare_history(history, rules, frees_wait=frees_wait)
    yield prepared
    if prepared.start.num_misplaced:
        return
    if rules.tie_break == "segment_age":
        prepared = replace(prepared, start=replace(prepared.start, segment_order=infer_segment_order(prepared)))
        yield prepared
    if frees_wait:
        prepared = infer_waits(prepared)
        yield prepared
    # Without stacks, an empty_cache directly before a request for a segment looks like a refusal of the device, whose
    # capacity then looks smaller than it is.
    if (history.by_program[prepared.releases.first] == -1).any() and not prepared.replays_refusals:
        yield replace(prepared, replays_refusals=True)


def candidate_rules(history: AllocatorHistory) -> tuple[Rules, ...]:
    """Return the rules to try, the most likely first: torch 2.13 changed how blocks of equal size are ordered."""
    version = (history.torch or "0").split("+")[0].split(".")
    numbers = tuple(int(part) for part in version[:2] if part.isdigit())
    return (TORCH_2_13, TORCH) if numbers >= (2, 12) else (TORCH, TORCH_2_13)
