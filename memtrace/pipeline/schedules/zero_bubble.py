"""Schedules with a split backward: ZB-H1, ZB-H2 and ZB-V (Zero Bubble Pipeline Parallelism, Qi et al., ICLR 2024).

Other workers wait only for input gradients (I). A worker computes weight gradients (W) when it would be idle otherwise.
"""

from __future__ import annotations

from collections import deque

from memtrace.pipeline.schedules.actions import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action
from memtrace.pipeline.schedules.dependencies import align_schedule
from memtrace.pipeline.schedules.schedule import Placement, Schedule
from memtrace.pipeline.schedules.unidirectional import straight_placement


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: the memory of 1F1B. Stage s has up to D - s micro-batches in flight and postpones up to s weight
    gradients."""
    return _handcrafted("zb-h1", num_stages, num_microbatches, 1)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2: about twice the memory. Stage s has up to 2 (D - s) - 1 micro-batches in flight and postpones up to 2s
    weight gradients."""
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
            # After the last forward the worker would be idle between two input gradients: W fills the gap.
            if m + 1 - done > lag or m + ahead >= num_microbatches:
                row.append(Action(WEIGHT_BACKWARD, stage, done))
                done += 1
            if m + ahead < num_microbatches:
                row.append(Action(FORWARD, stage, m + ahead))
        row += [Action(WEIGHT_BACKWARD, stage, m) for m in range(done, num_microbatches)]
        rows.append(row)
    return align_schedule(name, num_stages, num_microbatches, placement=straight_placement(num_stages), rows=rows)


def v_placement(num_workers: int) -> Placement:
    """Place two chunks per worker, down through the workers and back: worker 0 holds the first and the last stage."""
    return ((*range(num_workers), *reversed(range(num_workers))),)


class ChunkRow:
    """The row of a worker with two chunks, built action by action; weight gradients wait in a queue."""

    def __init__(self, stages: tuple[int, int], pipelines: tuple[int, int] = (0, 0)) -> None:
        self.actions: list[Action] = []
        self._stages, self._pipelines = stages, pipelines
        self._next: dict[tuple[str, int], int] = {}
        self._first = {0: 0, 1: 0}
        self._pending: deque[Action] = deque()

    def begin_at(self, chunk: int, microbatch: int) -> None:
        """Number the micro-batches of ``chunk`` from ``microbatch`` on."""
        self._first[chunk] = microbatch

    def add(self, kind: str, chunk: int, *, overlapped: bool = False) -> None:
        """Append the next action of ``kind`` for ``chunk``; an input backward queues its weight backward."""
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
        """The number of forwards, or of backwards except W, that ``chunk`` has."""
        return self._next.get((FORWARD if kind == FORWARD else INPUT_BACKWARD, chunk), 0)

    def add_weight(self, chunk: int | None = None) -> None:
        """Append the oldest queued weight backward of ``chunk``, or of any chunk; an empty queue is ignored."""
        for action in self._pending:
            if chunk is None or action.stage == self._stages[chunk]:
                self.actions.append(action)
                self._pending.remove(action)
                return

    def add_all_weights(self, chunk: int | None = None) -> None:
        """Append every queued weight backward, of ``chunk`` or of any chunk."""
        before = -1
        while len(self.actions) != before:
            before = len(self.actions)
            self.add_weight(chunk)


def zb_v(num_workers: int, num_microbatches: int) -> Schedule:
    """ZB-V: two chunks per worker in a V, without bubbles if F, I and W take equally long.

    ``num_workers`` is p: there are 2p stages. Fewer than 2p - 1 micro-batches run as the first ones of 2p - 1.
    """
    rows = []
    for worker in range(num_workers):
        row = _zb_v_row(worker, num_workers, max(num_microbatches, 2 * num_workers - 1))
        rows.append([action for action in row if action.microbatch < num_microbatches])
    placement = v_placement(num_workers)
    return align_schedule("zb-v", 2 * num_workers, num_microbatches, placement=placement, rows=rows)


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
