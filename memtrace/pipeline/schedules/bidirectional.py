"""Schedules over two mirrored copies of the model: GEMS and Chimera with 2f pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, Action
from memtrace.pipeline.schedules.dependencies import aligned
from memtrace.pipeline.schedules.schedule import Placement, Schedule

METHODS: Final = ("direct", "doubling", "halving")

Cell = tuple[int, int, Action]
"""(worker, slot, action) of an overlaid pipeline."""


def two_ways(num_workers: int, num_pairs: int = 1) -> Placement:
    """``num_pairs`` pipelines down, stage s on worker s + i D/f (mod D), then as many in reverse order."""
    shift = num_workers // num_pairs
    down = tuple(
        tuple((stage + pair * shift) % num_workers for stage in range(num_workers)) for pair in range(num_pairs)
    )
    return (*down, *(tuple(reversed(workers)) for workers in down))


def gems(num_stages: int, num_microbatches: int) -> Schedule:
    """Micro-batches alternate between a copy going down and one going up, one in flight a worker (GEMS).

    The forward of the next micro-batch follows the backward of the one before along the workers.
    """
    placement = two_ways(num_stages)
    rows: list[list[Action]] = [[] for _ in range(num_stages)]
    for m in range(num_microbatches):
        pipeline = m % 2
        for stage, worker in enumerate(placement[pipeline]):
            rows[worker] += [Action(kind, stage, m, pipeline) for kind in (FORWARD, BACKWARD)]
    return aligned("gems", num_stages, num_microbatches, placement=placement, rows=rows)


def chimera(num_stages: int, num_microbatches: int, *, f: int = 1, method: str = "direct") -> Schedule:
    """Chimera (Li and Hoefler, SC'21): f pipelines down and f up, overlaid without conflict.

    Up to D micro-batches make one unit. More are several units one behind the other, joined by ``method``:
    ``direct`` (units of D), ``doubling`` (units of 2D, every forward slot takes two micro-batches; what is
    left over runs direct) or ``halving`` (units of D, every backward runs on half a micro-batch).

    Raises MemtraceError for odd D, for f that does not divide D/2 and for unknown methods.
    """
    if num_stages % 2:
        raise MemtraceError(f"chimera needs an even number of stages, not {num_stages}")
    if f < 1 or (num_stages // 2) % f:
        raise MemtraceError(f"chimera's f must divide half the stages: {f} does not divide {num_stages // 2}")
    if method not in METHODS:
        raise MemtraceError(f"chimera knows no method {method!r}: choose {', '.join(METHODS)}")
    grid = _overlay(_units(num_stages, num_microbatches, f, method), num_stages)
    return Schedule(
        "chimera",
        num_stages,
        num_microbatches,
        two_ways(num_stages, f),
        tuple(tuple(action for _, action in row) for row in grid),
        tuple(tuple(slot for slot, _ in row) for row in grid),
        {"f": str(f), "method": method},
    )


def _units(num_stages: int, num_microbatches: int, f: int, method: str) -> Iterator[Cell]:
    """All cells of all units, each unit shifted behind the one before."""
    unit: Callable[[int, Sequence[Sequence[int]], int], Iterator[Cell]]
    # Beside doubled slots, which are two columns wide, a plain one takes two columns too.
    columns = 2 if method == "doubling" else 1
    first, shift = 0, 0
    while first < num_microbatches:
        left = num_microbatches - first
        if method == "doubling" and left >= 2 * num_stages:
            unit, size, width = _doubled_unit, 2 * num_stages, 6 * num_stages
        elif method == "halving" and left >= num_stages:
            unit, size, width = _halved_unit, num_stages, 3 * num_stages
        else:
            unit = partial(_plain_unit, columns=columns)
            size, width = min(left, num_stages), 2 * num_stages * columns
        for worker, slot, action in unit(num_stages, _shares(first, size, f), f):
            yield worker, slot + shift, action
        first, shift = first + size, shift + width


def _shares(first: int, size: int, f: int) -> list[list[int]]:
    """The micro-batches of every pipeline: as even as can be, the first f pipelines going down."""
    base, extra = divmod(size, 2 * f)
    shares = []
    for turn in range(2 * f):
        count = base + (turn < extra)
        shares.append(list(range(first, first + count)))
        first += count
    # What is uneven goes to the two directions in turn, so that two micro-batches take both.
    return [shares[2 * pair] for pair in range(f)] + [shares[2 * pair + 1] for pair in range(f)]


def _cells(num_stages: int, f: int, slots: Callable[[int, int], Iterator[tuple[int, Action]]]) -> Iterator[Cell]:
    for pipeline, workers in enumerate(two_ways(num_stages, f)):
        for stage, worker in enumerate(workers):
            for slot, action in slots(pipeline, stage):
                yield worker, slot, action


def _plain_unit(num_stages: int, shares: Sequence[Sequence[int]], f: int, *, columns: int) -> Iterator[Cell]:
    """1F1B in every pipeline: F(s, j) in slot s + 2j, B(s, j) in slot 2D - 1 - s + 2j."""

    def slots(pipeline: int, stage: int) -> Iterator[tuple[int, Action]]:
        for j, m in enumerate(shares[pipeline]):
            yield columns * (stage + 2 * j), Action(FORWARD, stage, m, pipeline)
            backward_slot = 2 * num_stages - 1 - stage + 2 * j
            yield columns * backward_slot, Action(BACKWARD, stage, m, pipeline)

    return _cells(num_stages, f, slots)


def _backward_slot(num_stages: int, f: int, stage: int, k: int) -> int:
    """The slot of the k-th of 2 D/(2f) backwards of a stage where twice as many backwards as forwards run.

    The unit takes 3D + D/f - 2 slots. Read from its end, the backwards are a pipeline in which a micro-batch
    waits 2 D/f slots longer whenever it has passed D/f stages: this keeps the f pipelines of a direction
    apart.
    """
    group = num_stages // f
    return 3 * num_stages + group - 3 - (stage + (stage // group) * group) - 2 * (group - 1 - k)


def _doubled_unit(num_stages: int, shares: Sequence[Sequence[int]], f: int) -> Iterator[Cell]:
    """Two micro-batches in every forward slot, one in every backward slot; both slots are two columns
    wide."""

    def slots(pipeline: int, stage: int) -> Iterator[tuple[int, Action]]:
        for k, m in enumerate(shares[pipeline]):
            yield 2 * (stage + 2 * (k // 2)) + k % 2, Action(FORWARD, stage, m, pipeline)
            yield 2 * _backward_slot(num_stages, f, stage, k), Action(BACKWARD, stage, m, pipeline)

    return _cells(num_stages, f, slots)


def _halved_unit(num_stages: int, shares: Sequence[Sequence[int]], f: int) -> Iterator[Cell]:
    """One micro-batch in every forward slot, half of one in every backward slot."""

    def slots(pipeline: int, stage: int) -> Iterator[tuple[int, Action]]:
        for j, m in enumerate(shares[pipeline]):
            yield stage + 2 * j, Action(FORWARD, stage, m, pipeline)
            for half in (0, 1):
                slot = _backward_slot(num_stages, f, stage, 2 * j + half)
                yield slot, Action(BACKWARD, stage, m, pipeline, half)

    return _cells(num_stages, f, slots)


def _overlay(cells: Iterator[Cell], num_workers: int) -> list[list[tuple[int, Action]]]:
    rows: list[dict[int, Action]] = [{} for _ in range(num_workers)]
    for worker, slot, action in cells:
        other = rows[worker].setdefault(slot, action)
        assert other is action, f"{action} and {other} share slot {slot} of worker {worker}"
    return [sorted(row.items()) for row in rows]
