"""Memory of every worker over time: the memory rules applied to a simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from memtrace.pipeline.memory_rules import (
    COMPONENTS,
    PAPER,
    Level,
    MemoryModel,
    WorkerChanges,
    change_order,
    component_bytes,
    in_flight_changes,
    worker_changes,
)
from memtrace.pipeline.simulation.simulator import Simulation

Integers = npt.NDArray[np.int64]
_NUM_END_POINTS: Final = 3


@dataclass(frozen=True)
class WorkerMemory:
    """One worker's memory: the level after each change, in the order in which the changes happen.

    Without a flush every update of the weights has a point of its own, before the end of the action that it follows.
    The last three points are the end of the step: merged outputs, optimizer step, and what stays for the next step.
    """

    worker: int
    time_s: npt.NDArray[np.float64]
    activation_bytes: Integers
    weight_bytes: Integers
    """Parameters with all copies and versions, gradients, optimizer state, and buffers that stay allocated."""
    temporary_bytes: Integers
    in_flight: Integers
    """Number of (stage, micro-batch) pairs in flight."""

    @cached_property
    def total_bytes(self) -> Integers:
        """Activations, weights and temporaries together."""
        return self.activation_bytes + self.weight_bytes + self.temporary_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest total."""
        return int(self.total_bytes.max())

    @property
    def weight_peak_bytes(self) -> int:
        """The highest level of ``weight_bytes``."""
        return int(self.weight_bytes.max())

    @property
    def activation_peak_bytes(self) -> int:
        """The highest level of ``activation_bytes``."""
        return int(self.activation_bytes.max())

    @property
    def in_flight_peak(self) -> int:
        """The largest number of (stage, micro-batch) pairs in flight."""
        return int(self.in_flight.max())


def simulate_memory(simulation: Simulation, model: MemoryModel = PAPER) -> list[WorkerMemory]:
    """Simulate the memory of every worker. It begins and ends with what stays allocated between steps."""
    return [_simulate_worker(simulation, worker, model) for worker in range(simulation.schedule.num_workers)]


def _simulate_worker(simulation: Simulation, worker: int, model: MemoryModel) -> WorkerMemory:
    row = simulation.schedule.rows[worker]
    begin, end = simulation.offsets[worker], simulation.offsets[worker + 1]
    changes = worker_changes(simulation.schedule, worker, model, recompute=simulation.recompute)
    order = change_order(row)
    times = np.stack([simulation.start_s[begin:end], simulation.end_s[begin:end]], axis=1).ravel()[order]
    in_flight = np.stack(in_flight_changes(row), axis=1).ravel()[order]
    sizes = component_bytes([simulation.stages[stage] for stage in changes.stages])
    # Where updates happen: before the ends of their actions, in the order of changes.
    points = np.sort(np.argsort(order)[2 * changes.updates + 1])
    running = np.cumsum(in_flight)
    return WorkerMemory(
        worker,
        np.concatenate([[0.0], np.insert(times, points, times[points]), [simulation.makespan_s] * _NUM_END_POINTS]),
        _level_bytes("activation", changes, sizes, order),
        _level_bytes("weight", changes, sizes, order),
        _level_bytes("temporary", changes, sizes, order),
        np.concatenate([[0], np.insert(running, points, running[points]), [0] * _NUM_END_POINTS]),
    )


def _level_bytes(level: Level, changes: WorkerChanges, sizes: Integers, order: Integers) -> Integers:
    """Bytes of the components of ``level`` at every point of a worker's memory."""
    sizes = sizes * np.array([component.level == level for component in COMPONENTS])
    of_action = sizes[changes.stage_of_action]
    deltas = np.stack([changes.at_start * of_action, changes.at_end * of_action], axis=1).sum(axis=2).ravel()[order]
    resident = int((changes.resident * sizes).sum())
    optimizer_step = (changes.optimizer_steps * sizes).sum(axis=(1, 2)).max(initial=0)
    end_points = [(changes.output_merge * sizes).sum(), optimizer_step, resident]
    levels = resident + np.cumsum(deltas)
    points = np.argsort(order)[2 * changes.updates + 1]
    updates = levels[points] + (changes.during_updates * of_action[changes.updates]).sum(axis=1)
    halves: Integers = np.concatenate([[resident], np.insert(levels, points, updates), end_points])
    # Counts are in halves; half of an odd number of bytes is rounded up.
    return -(-halves // 2)
