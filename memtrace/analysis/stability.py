"""Step-to-step stability: how much of each step matches the usual step, and which blocks differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND, steps_are_marked
from memtrace.analysis.block_signatures import assign_signatures, describe_signature, median_by_group, select_steps
from memtrace.analysis.blocks import blocks
from memtrace.analysis.thresholds import MIN_STEPS_FOR_ALLOCATION_FIT, MIN_USUAL_SHARE, WARM_UP_STEPS
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.trace import Trace

MAX_DIFFERENCES: Final = 10
"""Number of differences that are reported, largest blocks first."""
MAX_COMPARED_SIGNATURES: Final = 200
"""Number of signatures, largest first, from which the reported differences are collected; bounds the run time."""


@dataclass(frozen=True)
class AllocationFit:
    """Number of allocations after n steps: ``constant`` + ``per_step`` * n."""

    constant: int
    per_step: int
    """Allocations of the median step after warm-up."""
    is_exact: bool
    """Whether every step after warm-up allocates exactly ``per_step`` blocks."""


@dataclass(frozen=True)
class BlockDifference:
    """Blocks that are not the same in every step after warm-up. The tuples hold step numbers."""

    site: str
    """``file:line function, operator`` of the allocation."""
    size_bytes: int | None
    """Median size of one block; None where no step after warm-up allocates it."""
    num_blocks: int
    """Blocks per step with the same site and size that differ in the same steps."""
    missing_in: tuple[int, ...]
    """Steps without the block, of a block that most steps allocate."""
    only_in: tuple[int, ...]
    """Steps with the block, of a block that most steps do not allocate."""
    other_size_in: tuple[int, ...]
    """Steps in which the block does not have its median size."""
    other_accesses_in: tuple[int, ...]
    """Steps in which the number of accesses is not the median."""


@dataclass(frozen=True)
class Stability(Displayed):
    """How much of each step matches the usual step: shares from 0 to 1, one element per step."""

    step: Array
    """Step numbers, in order of time."""
    matching_blocks: Array
    """Share of the blocks whose signature, size and number of accesses are the usual ones."""
    matching_bytes: Array
    """The same share, weighted by size."""
    matching_events: Array
    """The same share, weighted by the number of allocations, frees and accesses."""
    num_warm_up_steps: int
    """Steps at the start that are excluded from the usual step and from the medians."""
    median_matching_blocks: float | None
    """Median of ``matching_blocks`` after warm-up; None with fewer than two steps."""
    median_matching_bytes: float | None
    """Median of ``matching_bytes`` after warm-up; None with fewer than two steps."""
    median_matching_events: float | None
    """Median of ``matching_events`` after warm-up; None with fewer than two steps."""
    differences: tuple[BlockDifference, ...]
    """The blocks that differ between steps, largest first, at most ``MAX_DIFFERENCES``."""


def measure_stability(trace: Trace, *, from_events: bool = False) -> Stability:
    """Return how similar the steps of a single-rank trace are.

    The usual step has every block signature that at least half of the steps after warm-up have, with its median size
    and its median number of accesses. A usual block that is missing from a step counts as not matching.

    Args:
        trace: a single-rank trace.
        from_events: use the detected steps even if steps are marked.
    """
    return trace.cached(_measure_stability, from_events and steps_are_marked(trace))


def num_warm_up_steps(num_steps: int) -> int:
    """Return how many of ``num_steps`` steps count as warm-up: none in a trace too short to spare them."""
    return WARM_UP_STEPS if num_steps > 2 * WARM_UP_STEPS else 0


@dataclass(frozen=True)
class _UsualStep:
    """The usual step, and how the blocks of all steps compare with it. Per signature, then per block of a step."""

    size: Array
    num_accesses: Array
    is_usual: Array
    signature: Array
    step: Array
    is_same_size: Array
    has_same_accesses: Array

    @property
    def matches(self) -> Array:
        """Whether each block is part of the usual step and has the usual size and number of accesses."""
        return self.is_usual[self.signature] & self.is_same_size & self.has_same_accesses


def _measure_stability(trace: Trace, from_events: bool) -> Stability:
    signatures, table = assign_signatures(trace, from_events=from_events), blocks(trace)
    numbers = select_steps(trace, from_events=from_events).number
    members = np.flatnonzero(signatures.of_block >= 0)
    signature, step, size = signatures.of_block[members], signatures.step_index[members], table.size[members]
    num_accesses = (table.num_reads + table.num_writes)[members].astype(np.int64)
    num_events = num_accesses + 1 + (table.free_event[members] >= 0)
    warm_up = num_warm_up_steps(len(numbers))
    steady = step >= warm_up
    count = len(signatures)
    usual_size = median_by_group(signature[steady], size[steady], count)
    usual_accesses = median_by_group(signature[steady], num_accesses[steady], count)
    num_steps = np.bincount(signature[steady], minlength=count)
    usual = _UsualStep(
        size=usual_size,
        num_accesses=usual_accesses,
        is_usual=num_steps >= max(1, MIN_USUAL_SHARE * (len(numbers) - warm_up)),
        signature=signature,
        step=step,
        is_same_size=size == usual_size[signature],
        has_same_accesses=num_accesses == usual_accesses[signature],
    )
    usual_events = np.where(usual_accesses >= 0, usual_accesses + 2, 0)
    by_blocks = _matching_share(usual, np.ones(len(members)), np.ones(count), len(numbers))
    by_bytes = _matching_share(usual, size, usual_size, len(numbers))
    by_events = _matching_share(usual, num_events, usual_events, len(numbers))
    return Stability(
        step=numbers,
        matching_blocks=by_blocks,
        matching_bytes=by_bytes,
        matching_events=by_events,
        num_warm_up_steps=warm_up,
        median_matching_blocks=_median(by_blocks[warm_up:]),
        median_matching_bytes=_median(by_bytes[warm_up:]),
        median_matching_events=_median(by_events[warm_up:]),
        differences=_differences(trace, usual, numbers, warm_up, from_events),
    )


def _matching_share(usual: _UsualStep, weight: Array, usual_weight: Array, num_steps: int) -> Array:
    """Return for each step the share of the weight of its blocks, and of the usual blocks it lacks, that matches.

    Args:
        usual: the usual step and the comparison with it.
        weight: weight of each block of a step.
        usual_weight: weight of each signature.
        num_steps: number of steps.
    """
    matches, is_usual = usual.matches, usual.is_usual[usual.signature]
    matching = np.bincount(usual.step[matches], weight[matches], minlength=num_steps)
    present = np.bincount(usual.step, weight, minlength=num_steps)
    present_usual = np.bincount(usual.step[is_usual], usual_weight[usual.signature[is_usual]], minlength=num_steps)
    missing = np.maximum(usual_weight[usual.is_usual].sum() - present_usual, 0)
    share: Array = np.round(matching / np.maximum(present + missing, 1), 6)
    return share


def _median(values: Array) -> float | None:
    """Return the median; None for a single step, which has no others to match."""
    return float(np.median(values)) if len(values) > 1 else None


def _differences(
    trace: Trace, usual: _UsualStep, numbers: Array, warm_up: int, from_events: bool
) -> tuple[BlockDifference, ...]:
    """Return the differences between steps, one for all signatures that have the same difference."""
    signatures = assign_signatures(trace, from_events=from_events)
    steady_steps = np.arange(warm_up, len(numbers))
    steady = usual.step >= warm_up
    num_present = np.bincount(usual.signature[steady], minlength=len(usual.size))
    incomplete = np.flatnonzero(usual.is_usual & (num_present < len(steady_steps)))
    different = np.union1d(usual.signature[steady & ~usual.matches], incomplete)
    different = different[np.argsort(-usual.size[different], kind="stable")][:MAX_COMPARED_SIGNATURES]
    order = np.argsort(usual.signature, kind="stable")
    first = np.searchsorted(usual.signature[order], np.arange(len(usual.size) + 1))

    def step_numbers(steps: Array) -> tuple[int, ...]:
        return tuple(numbers[np.intersect1d(steps, steady_steps)].tolist())

    num_blocks: dict[BlockDifference, int] = {}
    for signature in different.tolist():
        members = order[first[signature] : first[signature + 1]]
        steps, is_usual = usual.step[members], bool(usual.is_usual[signature])
        size = int(usual.size[signature])
        difference = BlockDifference(
            site=describe_signature(trace, signatures, signature),
            size_bytes=size if size >= 0 else None,
            num_blocks=1,
            missing_in=step_numbers(np.setdiff1d(steady_steps, steps)) if is_usual else (),
            only_in=() if is_usual else step_numbers(steps),
            other_size_in=step_numbers(steps[~usual.is_same_size[members]]) if is_usual else (),
            other_accesses_in=step_numbers(steps[~usual.has_same_accesses[members]]) if is_usual else (),
        )
        num_blocks[difference] = num_blocks.get(difference, 0) + 1
    differences = [replace(difference, num_blocks=number) for difference, number in num_blocks.items()]
    return tuple(differences[:MAX_DIFFERENCES])


def fit_allocations(trace: Trace, *, from_events: bool = False) -> AllocationFit | None:
    """Return the fit of the number of allocations to the number of steps; None with fewer than four steps.

    Args:
        trace: a single-rank trace.
        from_events: use the detected steps even if steps are marked.
    """
    steps = select_steps(trace, from_events=from_events)
    if len(steps.number) < MIN_STEPS_FOR_ALLOCATION_FIT:
        return None
    total = np.concatenate([[0], np.cumsum(trace.columns("events", "kind")["kind"] == KIND["alloc"])])
    num_allocations = total[steps.end_row] - total[steps.first_row]
    steady = num_allocations[num_warm_up_steps(len(num_allocations)) :]
    per_step = int(np.median(steady))
    constant = int(total[steps.end_row[-1]]) - per_step * len(num_allocations)
    return AllocationFit(constant, per_step, bool((steady == per_step).all()))
