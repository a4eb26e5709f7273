"""The memory of every worker over time under a simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

from memtrace.pipeline.costs import StageCosts
from memtrace.pipeline.schedules.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    Action,
)
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.simulate import Simulation
from memtrace.pipeline.simulation.versions import version_changes

if TYPE_CHECKING:
    pass

Integers = npt.NDArray[np.int64]


Outputs = Literal["gone", "kept", "held"]
"""Nothing; the outputs of all micro-batches until the next step, and merged ones that the end of the step makes (a
schedule of torch that returns them); the same where the program holds the merged ones until the next are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """What counts besides activations and state."""

    fresh_gradients: bool = False
    """Gradients are allocated by the first backward of a step and freed after it (``zero_grad`` of PyTorch);
    else they are always there."""
    boundaries: bool = False
    """A stage keeps its received input and its own output beside its activations until the backward, and the
    gradient of its output during it; under recomputation the input is always kept, the output never."""
    optimizer_step: bool = False
    """The optimizer's temporaries at the end of the step count."""
    receive_buffers: bool = False
    """Each stage has a buffer for every message of a step all the time, the first and the last one the whole batch,
    and the last one keeps what it hands to the loss until the backward and losses until the next step:
    torch.distributed.pipelining."""
    outputs: Outputs = "gone"
    """What is left of what the last stage handed to the loss once a backward has ended."""
    sent: Literal["gone", "last", "all"] = "gone"
    """What is left of messages that were sent, until the step ends: nothing, the last one each way, all."""


PAPER: Final = MemoryModel()
"""As papers count: state of the stage plus activations of the micro-batches in flight."""
TORCH: Final = MemoryModel(fresh_gradients=True, boundaries=True, optimizer_step=True)
"""As a process that runs a pipeline in PyTorch shows."""
LAST_SENT: Final = ("Schedule1F1B",)
"""The schedules of torch.distributed.pipelining that keep the last message; the others keep all until the step ends."""


@dataclass(frozen=True)
class WorkerMemory:
    """One worker's memory: the level after each change, in the order in which the changes happen."""

    worker: int
    time_s: npt.NDArray[np.float64]
    activation_bytes: Integers
    weight_bytes: Integers
    """Parameters with all copies and versions, gradients and optimizer state."""
    temporary_bytes: Integers
    in_flight: Integers
    """(stage, micro-batch) pairs whose forward has begun and whose (input) backward has not ended."""

    @cached_property
    def total_bytes(self) -> Integers:
        """All of it."""
        return self.activation_bytes + self.weight_bytes + self.temporary_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest total."""
        return int(self.total_bytes.max())

    @property
    def weight_peak_bytes(self) -> int:
        """The most that weights, gradients and optimizer state take together."""
        return int(self.weight_bytes.max())

    @property
    def activation_peak_bytes(self) -> int:
        """The most that activations take."""
        return int(self.activation_bytes.max())

    @property
    def in_flight_peak(self) -> int:
        """The most micro-batches in flight, counted for every stage of the worker."""
        return int(self.in_flight.max())


def memory(simulation: Simulation, model: MemoryModel = PAPER) -> list[WorkerMemory]:
    """The memory of every worker. Begins and ends with the state alone (the newest weights of each copy)."""
    return [_worker_memory(simulation, worker, model) for worker in range(simulation.schedule.num_workers)]


_DELTAS = ("activation", "weight", "temporary", "in_flight")


def _worker_memory(simulation: Simulation, worker: int, model: MemoryModel) -> WorkerMemory:
    row = simulation.schedule.rows[worker]
    begin, end = simulation.offsets[worker], simulation.offsets[worker + 1]
    at_start, at_end = _changes(simulation, worker, model)
    # Every action changes levels at its start and at its end; of an overlapped pair both start first.
    order = np.arange(2 * len(row))
    for index in np.flatnonzero([action.overlapped for action in row]):
        order[[2 * index + 1, 2 * index + 2]] = order[[2 * index + 2, 2 * index + 1]]
    times = np.stack([simulation.start_s[begin:end], simulation.end_s[begin:end]], axis=1).ravel()[order]
    levels = {}
    for name in _DELTAS:
        deltas = np.stack([at_start[name], at_end[name]], axis=1).ravel()[order]
        levels[name] = np.concatenate([[0], np.cumsum(deltas)])
    weights = levels["weight"] + _resident_bytes(simulation, worker, model)
    optimizer = _optimizer_bytes(simulation, worker) if model.optimizer_step else 0
    # At the end of the step outputs are merged and the optimizer runs; then the gradients made in the step are given
    # back.
    outputs, left = _outputs_bytes(simulation, worker, model)
    return WorkerMemory(
        worker,
        np.concatenate([[0.0], times, [simulation.makespan_s] * 3]),
        np.append(levels["activation"], [left, left, 0]),
        np.append(weights, [weights[-1], weights[-1], weights[0]]),
        np.append(levels["temporary"], [outputs, optimizer, 0]),
        np.append(levels["in_flight"], [0, 0, 0]),
    )


def _outputs_bytes(simulation: Simulation, worker: int, model: MemoryModel) -> tuple[int, int]:
    """The merged outputs at the end of the step, and what else the step's backwards left."""
    last, count = simulation.schedule.num_stages - 1, simulation.schedule.num_microbatches
    if (worker, last) not in simulation.schedule.replicas:
        return 0, 0
    merged = 0 if model.outputs == "gone" else simulation.stages[last].handed_bytes
    return count * merged, count * _left_of_outputs(simulation.stages[last], model)


def _left_of_outputs(costs: StageCosts, model: MemoryModel) -> int:
    """Bytes that a backward of the last stage leaves of what was handed to the loss, and of the loss."""
    outputs = 0 if model.outputs == "gone" else costs.handed_bytes
    return outputs + (costs.loss_bytes if model.receive_buffers else 0)


def _optimizer_bytes(simulation: Simulation, worker: int) -> int:
    """What the optimizer's step takes besides its state."""
    held = [
        (simulation.stages[stage], len(pipelines))
        for (holder, stage), pipelines in simulation.schedule.replicas.items()
        if holder == worker
    ]
    together = sum(copies * costs.optimizer_temporary_bytes for costs, copies in held)
    return together + max((costs.largest_optimizer_temporary_bytes for costs, _ in held), default=0)


def _resident_bytes(simulation: Simulation, worker: int, model: MemoryModel) -> int:
    """State that is there all the time: one version of every copy."""
    total = _outputs_bytes(simulation, worker, model)[0] if model.outputs == "held" else 0
    for (holder, stage), pipelines in simulation.schedule.replicas.items():
        if holder == worker:
            costs = simulation.stages[stage]
            gradients = 0 if model.fresh_gradients else costs.gradient_bytes
            total += len(pipelines) * (costs.parameter_bytes + costs.optimizer_bytes + gradients)
            if model.receive_buffers:
                backwards = costs.output_bytes if stage < simulation.schedule.num_stages - 1 else 0
                total += simulation.schedule.num_microbatches * (costs.input_bytes + backwards + costs.batch_bytes)
    return total


def _changes(
    simulation: Simulation, worker: int, model: MemoryModel
) -> tuple[dict[str, Integers], dict[str, Integers]]:
    """By how much each action of the worker changes each level, at its start and at its end."""
    row = simulation.schedule.rows[worker]
    at_start = {name: np.zeros(len(row), dtype=np.int64) for name in _DELTAS}
    at_end = {name: np.zeros(len(row), dtype=np.int64) for name in _DELTAS}
    with_gradients: set[tuple[int, int]] = set()
    left = _left_of_messages(simulation, worker, model)
    last_stage = simulation.schedule.num_stages - 1
    for index, action in enumerate(row):
        costs = simulation.stages[action.stage]
        up, down = _activation_change(action, costs, input_comes(simulation.schedule, action), simulation, model)
        at_start["activation"][index], at_end["activation"][index] = up, left[index] - down
        if action.stage == last_stage and action.kind in (BACKWARD, INPUT_BACKWARD):
            at_end["activation"][index] += _left_of_outputs(costs, model)
        copy = action.stage, action.pipeline
        makes_gradients = action.kind in (BACKWARD, WEIGHT_BACKWARD)
        first = makes_gradients and model.fresh_gradients and copy not in with_gradients
        if first:
            with_gradients.add(copy)
            at_end["weight"][index] = costs.gradient_bytes
        temporary = _temporary(action, costs, first)
        at_start["temporary"][index], at_end["temporary"][index] = temporary, -temporary
        if action.kind == FORWARD:
            at_start["in_flight"][index] = 1
        elif action.kind in (BACKWARD, INPUT_BACKWARD) and action.half != 0:
            at_end["in_flight"][index] = -1
    version_start, version_end = version_changes(simulation.schedule, worker)
    parameters = np.array([simulation.stages[action.stage].parameter_bytes for action in row], dtype=np.int64)
    at_start["weight"] += version_start * parameters
    at_end["weight"] += version_end * parameters
    return at_start, at_end


def input_comes(schedule: Schedule, action: Action) -> bool:
    """Whether the input of the action's stage is new to the worker; from a stage of its own it is no copy."""
    workers = schedule.placement[action.pipeline]
    return action.stage == 0 or workers[action.stage - 1] != workers[action.stage]


def _activation_change(
    action: Action, costs: StageCosts, input_comes: bool, simulation: Simulation, model: MemoryModel
) -> tuple[int, int]:
    """Bytes that come at the start of the action and go at its end."""
    recompute = simulation.recompute
    received = costs.input_bytes if recompute or (model.boundaries and input_comes) else 0
    if model.receive_buffers:
        received = costs.result_bytes
    if model.boundaries and not recompute:
        received += costs.unsaved_output_bytes
    kept = costs.activation_bytes
    until_weights = costs.weight_activation_bytes
    again = kept if recompute else 0
    # The gradient of the stage's output, which comes as a message, stays until the stage's backward is done.
    gradient = costs.output_bytes if model.boundaries and not model.receive_buffers else 0
    changes = {
        FORWARD: (received + kept, again),
        BACKWARD: (again + gradient, received + kept + gradient),
        INPUT_BACKWARD: (again + gradient, received + kept - until_weights),
        WEIGHT_BACKWARD: (0, until_weights + gradient),
    }
    up, down = changes[action.kind]
    if action.half is None:
        return up, down
    return (up // 2, down // 2) if action.half == 0 else (up - up // 2, down - down // 2)


def _left_of_messages(simulation: Simulation, worker: int, model: MemoryModel) -> Integers:
    """Bytes of sent messages that are still there when each action has ended, beyond those that were there before.

    The output of a stage is kept for its backward anyway, so it counts from then on.
    """
    row = simulation.schedule.rows[worker]
    left = np.zeros(len(row), dtype=np.int64)
    if model.sent == "gone":
        return left
    backwards = [index for index, action in enumerate(row) if action.kind in (BACKWARD, INPUT_BACKWARD)]
    for index in backwards if model.sent == "all" else backwards[:1]:
        stage = row[index].stage
        costs = simulation.stages[stage]
        # Of 1F1B's outputs only one of the warm-up stays: the others are waited for together with what comes next.
        output = stage < simulation.schedule.num_stages - 1 and (model.sent == "all" or index > 1)
        left[index] = costs.input_bytes + (costs.output_bytes if output else 0)
    return left


def _temporary(action: Action, costs: StageCosts, first: bool) -> int:
    if action.kind == FORWARD:
        return costs.forward_temporary_bytes
    if action.kind == INPUT_BACKWARD:
        return costs.input_backward_temporary_bytes
    # Half a micro-batch needs half of the temporaries, but the gradients of the weights are whole.
    part = costs.backward_temporary_bytes // (1 if action.half is None else 2)
    gradients = max(0, costs.first_backward_temporary_bytes - costs.backward_temporary_bytes)
    return part + gradients if first else part
