"""Dependencies between the actions of a schedule, and the earliest times that they allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import FORWARD, WEIGHT_BACKWARD, Action
from memtrace.pipeline.schedules.schedule import FLUSH, Placement, Schedule

Rows = Sequence[Sequence[Action]]
_HALVES = (0, 1)


class ResultProducers:
    """Which action produces which result.

    Attributes:
        forward: (stage, micro-batch) -> number of its forward; actions are numbered row by row from 0.
        input_gradient: (stage, micro-batch, half) -> number of the action that computes the input gradient.
    """

    def __init__(self, rows: Rows) -> None:
        self.forward: dict[tuple[int, int], int] = {}
        self.input_gradient: dict[tuple[int, int, int], int] = {}
        for number, action in enumerate(action for row in rows for action in row):
            kind, stage, microbatch, _, half, _ = action
            if kind == FORWARD:
                self.forward[stage, microbatch] = number
            elif kind != WEIGHT_BACKWARD:
                for part in _HALVES if half is None else (half,):
                    self.input_gradient[stage, microbatch, part] = number

    def inputs_of(self, action: Action, num_stages: int) -> tuple[int, ...]:
        """The numbers of the actions whose results ``action`` uses; KeyError where the table has no such action."""
        kind, stage, microbatch, _, half, _ = action
        if kind == FORWARD:
            return (self.forward[stage - 1, microbatch],) if stage else ()
        parts = _HALVES if half is None else (half,)
        if kind == WEIGHT_BACKWARD:
            return tuple({self.input_gradient[stage, microbatch, part] for part in parts})
        own = (self.forward[stage, microbatch],)
        if stage == num_stages - 1:
            return own
        first = self.input_gradient[stage + 1, microbatch, parts[0]]
        last = self.input_gradient[stage + 1, microbatch, parts[-1]]
        return (*own, first) if first == last else (*own, first, last)


def action_dependencies(rows: Rows, num_stages: int) -> list[tuple[int, ...]]:
    """For every action, numbered row by row, the numbers of the actions that it waits for.

    Raises:
        MemtraceError: an action needs a result that no action of the table produces.
    """
    producers = ResultProducers(rows)
    try:
        return [producers.inputs_of(action, num_stages) for row in rows for action in row]
    except KeyError as error:
        stage, microbatch, *_ = error.args[0]
        raise MemtraceError(
            f"incomplete schedule: no action computes the result of stage {stage} for micro-batch {microbatch}"
        ) from None


def earliest_times(
    rows: Rows, num_stages: int, durations: Sequence[float], delays: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Start and end of every action if each worker keeps its order and starts every action as early as possible.

    An overlapped action and the next one start when both can, and end together after the sum of their durations. Takes
    time proportional to the number of actions.

    Args:
        rows: the actions of every worker in order.
        num_stages: stages of the model.
        durations: duration of every action, numbered row by row.
        delays: for every action the time between its start and the end of an action of another worker that it uses.

    Returns:
        Starts and ends, in the unit of the durations.

    Raises:
        MemtraceError: the schedule deadlocks.
    """
    needs = action_dependencies(rows, num_stages)
    flat = [action for row in rows for action in row]
    worker_of = [worker for worker, row in enumerate(rows) for _ in row]
    start: list[float] = [-1.0] * len(flat)
    end: list[float] = [-1.0] * len(flat)

    def earliest(unit: tuple[int, ...], begin: float) -> tuple[float, int]:
        """When the unit can begin, and an action that it still waits for or -1."""
        for number in unit:
            for needed in needs[number]:
                if end[needed] < 0:
                    return begin, needed
                delay = delays[number] if worker_of[needed] != worker_of[number] else 0.0
                begin = max(begin, end[needed] + delay)
        return begin, -1

    offsets = _offsets(rows)
    head, free = offsets[:-1], [0.0] * len(rows)
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(rows)))
    while runnable:
        worker = runnable.pop()
        while head[worker] < offsets[worker + 1]:
            first = head[worker]
            unit = (first, first + 1) if flat[first].overlapped else (first,)
            begin, missing = earliest(unit, free[worker])
            if missing >= 0:
                waiting.setdefault(missing, []).append(worker)
                break
            finish = begin + sum(durations[number] for number in unit)
            for number in unit:
                start[number], end[number] = begin, finish
                runnable.extend(waiting.pop(number, ()))
            free[worker], head[worker] = finish, unit[-1] + 1
    _check_all_ran(rows, offsets, head)
    return start, end


def _offsets(rows: Rows) -> list[int]:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return offsets


def _check_all_ran(rows: Rows, offsets: Sequence[int], head: Sequence[int]) -> None:
    stuck = [
        f"worker {worker} at {row[head[worker] - offsets[worker]]}"
        for worker, row in enumerate(rows)
        if head[worker] < offsets[worker + 1]
    ]
    if stuck:
        raise MemtraceError(f"the schedule deadlocks: {', '.join(stuck[:8])} wait for each other")


def align_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    placement: Placement,
    rows: Iterable[Iterable[Action]],
    options: Mapping[str, str] | None = None,
    update: str = FLUSH,
    update_every: int | None = None,
) -> Schedule:
    """Make a schedule of these rows, with every action in the earliest slot if each action takes one slot."""
    table = tuple(tuple(row) for row in rows)
    num_actions = sum(map(len, table))
    start, _ = earliest_times(table, num_stages, [1.0] * num_actions, [0.0] * num_actions)
    slots, number = [], 0
    for row in table:
        row_slots = []
        for index in range(len(row)):
            # The second action of an overlapped unit starts with the first, but has a column of its own.
            shift = 1 if index and row[index - 1].overlapped else 0
            row_slots.append(int(start[number]) + shift)
            number += 1
        slots.append(tuple(row_slots))
    return Schedule(
        name,
        num_stages,
        num_microbatches,
        placement,
        table,
        tuple(slots),
        options or {},
        update,
        update_every,
    )
