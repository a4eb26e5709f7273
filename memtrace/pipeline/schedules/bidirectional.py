"""Schedules over two mirrored copies of the model: GEMS and Chimera with 2f pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, Action
from memtrace.pipeline.schedules.dependencies import align_schedule
from memtrace.pipeline.schedules.schedule import Placement, Schedule

CHIMERA_METHODS: Final = ("direct", "doubling", "halving")

Cell = tuple[int, int, Action]
"""(worker, slot, action): one entry of the table while pipelines are overlaid."""


def bidirectional_placement(num_workers: int, num_pairs: int = 1) -> Placement:
    """Place ``num_pairs`` pipelines down, stage s of pipeline i on worker s + i D/f (mod D), and as many up."""
    shift = num_workers // num_pairs
    down = tuple(
        tuple((stage + pair * shift) % num_workers for stage in range(num_workers)) for pair in range(num_pairs)
    )
    return (*down, *(tuple(reversed(workers)) for workers in down))


def gems(num_stages: int, num_microbatches: int) -> Schedule:
    """GEMS: micro-batches alternate between a copy going down and a copy going up, with one in flight per worker.

    The forward of a micro-batch follows the backward of the previous one from worker to worker.
    """
    placement = bidirectional_placement(num_stages)
    rows: list[list[Action]] = [[] for _ in range(num_stages)]
    for m in range(num_microbatches):
        pipeline = m % 2
        for stage, worker in enumerate(placement[pipeline]):
            rows[worker] += [Action(kind, stage, m, pipeline) for kind in (FORWARD, BACKWARD)]
    return align_schedule("gems", num_stages, num_microbatches, placement=placement, rows=rows)


def chimera(num_stages: int, num_microbatches: int, *, f: int = 1, method: str = "direct") -> Schedule:
    """Chimera (Li and Hoefler, SC 2021): f pipelines down and f up, overlaid without conflict.

    Up to D micro-batches form one unit; more micro-batches form several units in a row.

    Args:
        num_stages: number of stages and of workers, D.
        num_microbatches: micro-batches per step.
        f: pipelines per direction.
        method: how units are joined: ``direct`` (units of D), ``doubling`` (units of 2D in which every forward slot
            takes two micro-batches; the remainder runs direct) or ``halving`` (units of D in which every backward runs
            on half a micro-batch).

    Raises:
        MemtraceError: D is odd, f does not divide D/2, or the method is unknown.
    """
    if num_stages % 2:
        raise MemtraceError(f"chimera needs an even number of stages, got {num_stages}")
    if f < 1 or (num_stages // 2) % f:
        raise MemtraceError(f"chimera: f must divide half the number of stages; {f} does not divide {num_stages // 2}")
    if method not in CHIMERA_METHODS:
        raise MemtraceError(f"chimera: unknown method {method!r}; choose one of {', '.join(CHIMERA_METHODS)}")
    grid = _overlay(_units(num_stages, num_microbatches, f, method), num_stages)
    return Schedule(
        "chimera",
        num_stages,
        num_microbatches,
        bidirectional_placement(num_stages, f),
        tuple(tuple(action for _, action in row) for row in grid),
        tuple(tuple(slot for slot, _ in row) for row in grid),
        {"f": str(f), "method": method},
    )


def _units(num_stages: int, num_microbatches: int, f: int, method: str) -> Iterator[Cell]:
    """All cells of all units, each unit shifted behind the previous one."""
    unit: Callable[[int, Sequence[Sequence[int]], int], Iterator[Cell]]
    # Doubled slots are two columns wide, so plain slots beside them take two columns too.
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
    """Distribute micro-batches evenly over the pipelines, of which the first f go down."""
    base, extra = divmod(size, 2 * f)
    shares = []
    for turn in range(2 * f):
        count = base + (turn < extra)
        shares.append(list(range(first, first + count)))
        first += count
    # The remainder alternates between the directions, so that two micro-batches use both.
    return [shares[2 * pair] for pair in range(f)] + [shares[2 * pair + 1] for pair in range(f)]


def _cells(num_stages: int, f: int, slots: Callable[[int, int], Iterator[tuple[int, Action]]]) -> Iterator[Cell]:
    for pipeline, workers in enumerate(bidirectional_placement(num_stages, f)):
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

    The unit takes 3D + D/f - 2 slots. Read from its end, the backwards are a pipeline in which a micro-batch waits
    2 D/f slots longer whenever it has passed D/f stages: this keeps the f pipelines of a direction apart.
    """
    group = num_stages // f
    return 3 * num_stages + group - 3 - (stage + (stage // group) * group) - 2 * (group - 1 - k)


def _doubled_unit(num_stages: int, shares: Sequence[Sequence[int]], f: int) -> Iterator[Cell]:
    """Two micro-batches in every forward slot, one in every backward slot; both slots are two columns wide."""

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
