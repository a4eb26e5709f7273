"""A schedule as a drawing: for each action its worker, its interval, and the path of its micro-batch.

Source of the layout: the figures of Chimera (Li and Hoefler, SC 2021): a row for each worker, time to the right, the
micro-batch in each cell, and a color for each direction of the pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtrace.pipeline.schedules.actions import BACKWARD, INPUT_BACKWARD, Action
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.simulator import Simulation

_HALVES: Final = ("a", "b")


@dataclass(frozen=True, slots=True)
class ScheduleCell:
    """One action in the drawing of a schedule."""

    worker: int
    action: Action
    path: str
    """The path of the micro-batch: ``down``, ``up`` (numbered where there are several), a chunk of an interleaved
    schedule, or empty where all micro-batches take the same one."""
    start: float
    """Seconds, or the slot."""
    recomputed: float
    """Where the repeated forward ends that the action begins with; ``start`` without recomputation."""
    end: float
    """Seconds, or the slot after it."""
    lane: int | None = None
    """Of two actions that run together as one unit, 0 for the first and 1 for the second; None for all others."""

    @property
    def label(self) -> str:
        """Number of the micro-batch, with ``a`` or ``b`` for one half of it."""
        half = self.action.half
        return f"{self.action.microbatch}{'' if half is None else _HALVES[half]}"


def simulated_cells(simulation: Simulation) -> list[ScheduleCell]:
    """Return the cells of a simulated schedule, worker by worker; times are seconds since the start of the step."""
    schedule = simulation.schedule
    paths = name_paths(schedule)
    cells, number = [], 0
    for worker, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            start, end = float(simulation.start_s[number]), float(simulation.end_s[number])
            repeated = (end - start) * _repeated_share(simulation, action)
            path = paths[worker, action.pipeline, action.stage]
            cells.append(ScheduleCell(worker, action, path, start, start + repeated, end, _lane(row, place)))
            number += 1
    return cells


def slot_cells(schedule: Schedule) -> list[ScheduleCell]:
    """Return the cells of a schedule's table: every action takes one slot."""
    paths = name_paths(schedule)
    return [
        ScheduleCell(worker, action, paths[worker, action.pipeline, action.stage], slot, slot, slot + 1)
        for worker, (row, slots) in enumerate(zip(schedule.rows, schedule.slots, strict=True))
        for action, slot in zip(row, slots, strict=True)
    ]


def _lane(row: Sequence[Action], place: int) -> int | None:
    if row[place].overlapped:
        return 0
    return 1 if place and row[place - 1].overlapped else None


def name_paths(schedule: Schedule) -> dict[tuple[int, int, int], str]:
    """Return the path of the actions of each (worker, pipeline, stage), as in ``ScheduleCell.path``."""
    directions = _name_directions(schedule) if len(schedule.placement) > 1 else [""]
    paths: dict[tuple[int, int, int], str] = {}
    for pipeline, workers in enumerate(schedule.placement):
        chunks = Counter[int]()
        has_chunks = len(set(workers)) < len(workers)
        for stage, worker in enumerate(workers):
            chunk = f"chunk {chunks[worker]}" if has_chunks else ""
            paths[worker, pipeline, stage] = ", ".join(filter(None, (directions[pipeline], chunk)))
            chunks[worker] += 1
    return paths


def _name_directions(schedule: Schedule) -> list[str]:
    """Return ``down`` for each pipeline that starts at a lower worker than it continues on, else ``up``."""
    num_workers = schedule.num_workers
    names = []
    for workers in schedule.placement:
        distance = (workers[1] - workers[0]) % num_workers if len(workers) > 1 else 1
        is_down = workers[1] > workers[0] if num_workers == 2 and len(workers) > 1 else distance <= num_workers // 2
        names.append("down" if is_down else "up")
    counts, seen = Counter(names), Counter[str]()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if counts[name] == 1 else f"{name} {seen[name]}")
    return numbered


def _repeated_share(simulation: Simulation, action: Action) -> float:
    """Return the share of an action that repeats the forward of its stage."""
    if not simulation.recompute or action.kind not in (BACKWARD, INPUT_BACKWARD):
        return 0.0
    stage = simulation.stages[action.stage]
    backward_s = stage.input_backward_s + (stage.weight_backward_s if action.kind == BACKWARD else 0.0)
    total_s = stage.forward_s + backward_s
    return stage.forward_s / total_s if total_s else 0.0
