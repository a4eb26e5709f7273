"""The simulator for every schedule: when each action runs, and how long workers are idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, StageCosts
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, KINDS, WEIGHT_BACKWARD
from memtrace.pipeline.schedules.dependencies import earliest_times
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.all_reduce import (
    EAGER,
    AllReduce,
    all_reduce_delays,
    choose_eager_stages,
    schedule_all_reduces,
)

if TYPE_CHECKING:
    import pandas as pd

Seconds = npt.NDArray[np.float64]
FREE_NETWORK = Network()
MAX_ROUNDS: Final = 200
"""Largest number of rounds in which times with all-reduces beside computation are refined."""
TOLERANCE: Final = 1e-7
"""Change of a duration, as a share of the makespan, at which the times count as final."""


@dataclass(frozen=True)
class Simulation:
    """A schedule simulated with given costs. Arrays have one entry per action, worker by worker
    (``schedule.actions()``)."""

    schedule: Schedule
    stages: Sequence[StageCosts]
    recompute: bool
    start_s: Seconds
    end_s: Seconds
    duration_s: Seconds
    """Seconds of computation; an action takes longer where an all-reduce runs beside it."""
    all_reduces: tuple[AllReduce, ...]

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """``offsets[w]:offsets[w + 1]`` are the actions of worker w."""
        return np.concatenate([[0], np.cumsum([len(row) for row in self.schedule.rows])])

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first action to the end of the last one, without all-reduces."""
        return float(self.end_s.max(initial=0.0))

    @property
    def step_time_s(self) -> float:
        """Seconds until all actions and all-reduces have ended."""
        return max([self.makespan_s, *(reduction.end_s for reduction in self.all_reduces)])

    @cached_property
    def busy_s(self) -> Seconds:
        """Seconds of computation of every worker."""
        total = np.concatenate([[0.0], np.cumsum(self.duration_s)])
        busy: Seconds = np.diff(total[self.offsets])
        return busy

    @cached_property
    def span_s(self) -> Seconds:
        """Seconds from the start of every worker's first action to the end of its last one; 0 without actions."""
        spans = np.zeros(self.schedule.num_workers)
        for worker, (begin, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            if end > begin:
                spans[worker] = self.end_s[end - 1] - self.start_s[begin]
        return spans

    @property
    def bubble_ratio(self) -> float:
        """Idle share of all workers' time within the makespan."""
        whole = self.makespan_s * self.schedule.num_workers
        return max(0.0, 1.0 - float(self.busy_s.sum()) / whole) if whole else 0.0

    @property
    def span_bubble_s(self) -> float:
        """Idle seconds of the worker with the longest span, within that span.

        The bubble as the Zero Bubble paper counts it: a worker starts its next step as soon as it is done.
        """
        worker = int(np.argmax(self.span_s))
        return float(self.span_s[worker] - self.busy_s[worker])

    def to_dataframe(self) -> pd.DataFrame:
        """One row per action.

        Columns: worker, slot, kind (F, B, I or W), stage, microbatch, pipeline, half (0, 1 or NA), start_s, end_s.
        """
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for worker, (row, slots) in enumerate(zip(self.schedule.rows, self.schedule.slots, strict=True)):
            for slot, action in zip(slots, row, strict=True):
                rows.append({"worker": worker, "slot": slot, **action._asdict()})
        columns = ["worker", "slot", "kind", "stage", "microbatch", "pipeline", "half"]
        frame: pd.DataFrame = pd.DataFrame(rows, columns=columns).astype({"half": "Int8"})
        frame["start_s"], frame["end_s"] = self.start_s, self.end_s
        return frame


def simulate_schedule(
    schedule: Schedule,
    stages: Sequence[StageCosts],
    *,
    network: Network = FREE_NETWORK,
    recompute: bool = False,
    overlap: float = 1.0,
    data_parallel: int = 1,
    sync: str = EAGER,
) -> Simulation:
    """Simulate ``schedule``: every worker keeps its order and starts each action as early as possible.

    Args:
        schedule: the schedule.
        stages: the costs of every stage of the schedule.
        network: cost of messages and all-reduces; messages do not occupy the workers, all-reduces beside computation
            take a share of it.
        recompute: stages keep only their inputs and repeat their forward before the backward.
        overlap: time of an overlapped forward and backward as a share of the sum of both.
        data_parallel: data-parallel degree: copies of the whole pipeline, which take part in the all-reduces.
        sync: when gradients are all-reduced: one of ``all_reduce.SYNC_MODES``.

    Raises:
        MemtraceError: the schedule deadlocks, or ``stages`` has another number of stages.
    """
    if len(stages) != schedule.num_stages:
        raise MemtraceError(
            f"schedule {schedule.name} has {schedule.num_stages} stages, but costs were given for {len(stages)}"
        )
    duration = _durations(schedule, stages, recompute, overlap)
    start, end, all_reduces = _simulate_times(schedule, stages, duration, network, data_parallel, sync)
    return Simulation(schedule, stages, recompute, np.array(start), np.array(end), duration, all_reduces)


def _simulate_times(
    schedule: Schedule,
    stages: Sequence[StageCosts],
    duration: Seconds,
    network: Network,
    data_parallel: int,
    sync: str,
) -> tuple[list[float], list[float], tuple[AllReduce, ...]]:
    """Starts and ends of all actions, and the all-reduces.

    All-reduces lengthen the actions beside them, which moves the actions and all-reduces behind them. The times are
    repeated until every action is exactly as much longer as the all-reduces beside it require.
    """
    delays = _delays(schedule, stages, network)
    longer = np.zeros(len(duration))
    eager_stages = choose_eager_stages(schedule, sync)
    for _ in range(MAX_ROUNDS):
        start, end = earliest_times(schedule.rows, schedule.num_stages, (duration + longer).tolist(), delays)
        all_reduces = schedule_all_reduces(
            schedule, stages, end, network=network, data_parallel=data_parallel, eager_stages=eager_stages
        )
        if not (network.all_reduce_share or network.all_reduce_launch_s):
            break
        required = np.array(all_reduce_delays(schedule, start, end, all_reduces, network))
        change = np.abs(required - longer).max(initial=0.0)
        longer = required
        if change <= TOLERANCE * max(end, default=0.0):
            break
    return start, end, all_reduces


def _durations(schedule: Schedule, stages: Sequence[StageCosts], recompute: bool, overlap: float) -> Seconds:
    again = np.array([stage.forward_s if recompute else 0.0 for stage in stages])
    forward = np.array([stage.forward_s for stage in stages])
    by_input = np.array([stage.input_backward_s for stage in stages])
    by_weight = np.array([stage.weight_backward_s for stage in stages])
    seconds = {
        FORWARD: forward,
        BACKWARD: again + by_input + by_weight,
        INPUT_BACKWARD: again + by_input,
        WEIGHT_BACKWARD: by_weight,
    }
    table = np.stack([seconds[kind] for kind in KINDS])
    actions = list(schedule.actions())
    kinds = np.array([KINDS.index(action.kind) for action in actions], dtype=np.int64)
    numbers = np.array([action.stage for action in actions], dtype=np.int64)
    share = np.array([1.0 if action.half is None else 0.5 for action in actions])
    if overlap != 1.0:
        overlapped = np.array([action.overlapped for action in actions], dtype=bool)
        share[overlapped | np.roll(overlapped, 1)] *= overlap
    duration: Seconds = table[kinds, numbers] * share
    return duration


def _delays(schedule: Schedule, stages: Sequence[StageCosts], network: Network) -> list[float]:
    """Seconds of the message to every action: activations for a forward, their gradients for a backward."""
    whole = [network.message_s(stage.output_bytes) for stage in stages]
    half = [network.message_s(stage.output_bytes / 2) for stage in stages]
    delays = []
    for action in schedule.actions():
        if action.kind == FORWARD:
            delays.append(whole[action.stage - 1] if action.stage else 0.0)
        else:
            delays.append((whole if action.half is None else half)[action.stage])
    return delays
