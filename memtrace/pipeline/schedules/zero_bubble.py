"""Schedules that split the backward: ZB-H1, ZB-H2 and ZB-V (Qi et al., Zero Bubble Pipeline Parallelism).

The gradients of a stage's weights (W) wait until a worker has nothing better to do; only the gradients of
inputs (I) hold up other workers.
"""

from __future__ import annotations

from collections import deque

from memtrace.pipeline.schedules.actions import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action
from memtrace.pipeline.schedules.dependencies import aligned
from memtrace.pipeline.schedules.schedule import Placement, Schedule
from memtrace.pipeline.schedules.unidirectional import straight


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """The memory of 1F1B: stage s runs D - s micro-batches ahead and leaves up to s weight gradients
    behind."""
    return _handcrafted("zb-h1", num_stages, num_microbatches, 1)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """About twice the memory: stage s runs 2 (D - s) - 1 ahead and leaves up to 2s weight gradients
    behind."""
    return _handcrafted("zb-h2", num_stages, num_microbatches, 2)


def _handcrafted(name: str, num_stages: int, num_microbatches: int, depth: int) -> Schedule:
    rows = []
    for stage in range(num_stages):
        ahead = min(depth * (num_stages - stage - 1) + 1, num_microbatches)
        lag = depth * stage
        row = [Action(FORWARD, stage, m) for m in range(ahead)]
        done = 0
        for m in range(num_microbatches):
            row.append(Action(INPUT_BACKWARD, stage, m))
            # Once no forward is left the worker would idle between two input gradients: W goes there.
            if m + 1 - done > lag or m + ahead >= num_microbatches:
                row.append(Action(WEIGHT_BACKWARD, stage, done))
                done += 1
            if m + ahead < num_microbatches:
                row.append(Action(FORWARD, stage, m + ahead))
        row += [Action(WEIGHT_BACKWARD, stage, m) for m in range(done, num_microbatches)]
        rows.append(row)
    return aligned(name, num_stages, num_microbatches, placement=straight(num_stages), rows=rows)


def v_shape(num_workers: int) -> Placement:
    """Two chunks a worker: down through the workers and back, so that first and last stage are neighbours."""
    return ((*range(num_workers), *reversed(range(num_workers))),)


class ChunkRow:
    """The row of a worker that holds two chunks, built action by action; weight gradients queue up."""

    def __init__(self, stages: tuple[int, int], pipelines: tuple[int, int] = (0, 0)) -> None:
        self.actions: list[Action] = []
        self._stages, self._pipelines = stages, pipelines
        self._next: dict[tuple[str, int], int] = {}
        self._first = {0: 0, 1: 0}
        self._pending: deque[Action] = deque()

    def begin_at(self, chunk: int, microbatch: int) -> None:
        """Number the micro-batches of ``chunk`` from ``microbatch``."""
        self._first[chunk] = microbatch

    def add(self, kind: str, chunk: int, *, overlapped: bool = False) -> None:
        """The next action of ``kind`` for ``chunk``; an input backward queues its weight backward."""
        direction = FORWARD if kind == FORWARD else INPUT_BACKWARD
        number = self._next.get((direction, chunk), 0)
        self._next[direction, chunk] = number + 1
        action = Action(
            kind,
            self._stages[chunk],
            self._first[chunk] + number,
            self._pipelines[chunk],
            overlapped=overlapped,
        )
        self.actions.append(action)
        if kind == INPUT_BACKWARD:
            self._pending.append(action._replace(kind=WEIGHT_BACKWARD))

    def count(self, kind: str, chunk: int) -> int:
        """How many forwards, or backwards of any kind but W, ``chunk`` has had."""
        return self._next.get((FORWARD if kind == FORWARD else INPUT_BACKWARD, chunk), 0)

    def add_weight(self, chunk: int | None = None) -> None:
        """The weight backward that waits longest, of ``chunk`` or of any; nothing where none waits."""
        for action in self._pending:
            if chunk is None or action.stage == self._stages[chunk]:
                self.actions.append(action)
                self._pending.remove(action)
                return

    def add_all_weights(self, chunk: int | None = None) -> None:
        """Every weight backward that waits, of ``chunk`` or of any."""
        before = -1
        while len(self.actions) != before:
            before = len(self.actions)
            self.add_weight(chunk)


def zb_v(num_workers: int, num_microbatches: int) -> Schedule:
    """Two chunks a worker in a V and no bubbles when F, I and W take equally long (ZB-V).

    ``num_workers`` is p: there are 2p stages. Fewer than 2p - 1 micro-batches run as the first of so many.
    """
    rows = []
    for worker in range(num_workers):
        row = _zb_v_row(worker, num_workers, max(num_microbatches, 2 * num_workers - 1))
        rows.append([action for action in row if action.microbatch < num_microbatches])
    placement = v_shape(num_workers)
    return aligned("zb-v", 2 * num_workers, num_microbatches, placement=placement, rows=rows)


def _zb_v_row(worker: int, num_workers: int, num_microbatches: int) -> list[Action]:
    row = ChunkRow((worker, 2 * num_workers - 1 - worker))
    for _ in range(2 * (num_workers - worker) - 1):
        row.add(FORWARD, 0)
    for _ in range(worker):
        row.add(FORWARD, 1)
        row.add(FORWARD, 0)
    for _ in range(num_workers - worker):
        row.add(FORWARD, 1)
        row.add(INPUT_BACKWARD, 1)
        row.add_weight()
    while row.count(FORWARD, 1) < num_microbatches:
        if row.count(FORWARD, 0) < num_microbatches:
            row.add(FORWARD, 0)
        row.add(INPUT_BACKWARD, 0)
        row.add_weight()
        row.add(FORWARD, 1)
        row.add(INPUT_BACKWARD, 1)
        row.add_weight()
    for _ in range(worker):
        row.add(INPUT_BACKWARD, 0)
        row.add(INPUT_BACKWARD, 1)
    for _ in range(num_workers - worker):
        row.add(INPUT_BACKWARD, 0)
        row.add_weight(0)
    row.add_all_weights(1)
    row.add_all_weights(0)
    return row.actions
