"""The memory rules of a pipeline worker: what it keeps, and which action allocates and frees it.

This module is the only home of these rules. ``simulation.worker_memory`` multiplies them with the bytes of every stage
and orders them in time; ``peak_moments`` derives from them which combinations can be a peak, for the partition search.

A worker keeps, for each stage that it holds:

- always: one version of the parameters of every copy, the optimizer state, and the gradients unless every step
  allocates them anew;
- per micro-batch in flight, from its forward to its (input) backward: the activations, the received input and the
  output of the stage. Under recomputation only the received input, and the activations again during the backward;
- per micro-batch between input backward and weight backward: the activations that weight gradients need;
- during an action: its temporaries, the gradient of the stage's output, and in the first backward of a step the
  gradients as they are allocated;
- without a flush: further versions of the parameters (``schedules.weight_versions``), and during every update of the
  weights the complete gradients and the temporaries of the optimizer;
- under torch.distributed.pipelining: receive buffers, sent messages and model outputs (see ``MemoryModel``);
- at the end of a step with a flush: merged outputs, then the temporaries of the optimizer.

Sources: GPipe (Huang et al., 2019), PipeDream-2BW (Narayanan et al., ICML 2021), Chimera (Li and Hoefler, SC 2021),
Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024); torch/distributed/pipelining/{stage,schedules}.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from memtrace.pipeline.costs import StageCosts
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.schedules.weight_versions import VersionChanges, resident_versions, version_changes

Integers = npt.NDArray[np.int64]
Level = Literal["activation", "weight", "temporary"]

KeptOutputs = Literal["none", "microbatches", "merged"]
"""Model outputs that the last stage keeps: none; those of all micro-batches until the step ends, where torch merges
them and returns the result; or these and the merged result of the previous step, which the program still holds."""
SentMessages = Literal["none", "last", "all"]
"""Sent messages that are kept until the step ends: none, the last one in each direction, or all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """What counts as memory of a worker besides parameters, optimizer state and activations."""

    fresh_gradients: bool = False
    """The first backward of a step allocates the gradients and the end of the step frees them (``zero_grad`` of
    PyTorch), without a flush every update; False: they are always allocated."""
    boundaries: bool = False
    """A stage keeps its received input and its output until its backward, and the gradient of its output during the
    backward. Under recomputation the input is kept in any case and the output is not."""
    optimizer_step: bool = False
    """The temporaries of the optimizer count: at the end of the step, without a flush in every update."""
    receive_buffers: bool = False
    """Every stage has a buffer for each message of a step, the first and the last stage have the whole batch, and the
    last stage keeps the model outputs until the backward and the losses until the next step
    (torch.distributed.pipelining)."""
    kept_outputs: KeptOutputs = "none"
    sent_messages: SentMessages = "none"


PAPER: Final = MemoryModel()
"""The way papers count: weights of the stage plus activations of the micro-batches in flight."""
TORCH: Final = MemoryModel(fresh_gradients=True, boundaries=True, optimizer_step=True)
"""What a PyTorch process allocates when it runs a pipeline."""
TORCH_SCHEDULES_WITH_LAST_MESSAGE: Final = ("Schedule1F1B",)
"""Schedules of torch.distributed.pipelining that keep the last sent message; others keep all until the step ends."""


def torch_pipelining_model(model: MemoryModel, torch_schedule: str, kept_outputs: KeptOutputs) -> MemoryModel:
    """``model`` with what the schedule class ``torch_schedule`` of torch.distributed.pipelining keeps in addition."""
    return MemoryModel(
        fresh_gradients=model.fresh_gradients,
        boundaries=model.boundaries,
        optimizer_step=model.optimizer_step,
        receive_buffers=True,
        kept_outputs=kept_outputs,
        sent_messages="last" if torch_schedule in TORCH_SCHEDULES_WITH_LAST_MESSAGE else "all",
    )


class Component(NamedTuple):
    """One kind of memory that a worker holds for a stage."""

    name: str
    level: Level
    costs_field: str
    """The attribute of ``StageCosts`` with its bytes."""


COMPONENTS: Final = (
    Component("activation", "activation", "activation_bytes"),
    Component("weight_activation", "activation", "weight_activation_bytes"),
    Component("received_input", "activation", "input_bytes"),
    Component("unsaved_output", "activation", "unsaved_output_bytes"),
    Component("output_gradient", "activation", "output_bytes"),
    Component("unsaved_model_output", "activation", "unsaved_model_output_bytes"),
    Component("kept_model_output", "activation", "model_output_bytes"),
    Component("kept_loss", "activation", "loss_bytes"),
    Component("sent_output", "activation", "output_bytes"),
    Component("sent_input_gradient", "activation", "input_bytes"),
    Component("parameter", "weight", "parameter_bytes"),
    Component("gradient", "weight", "gradient_bytes"),
    Component("optimizer_state", "weight", "optimizer_bytes"),
    Component("input_buffer", "weight", "input_bytes"),
    Component("output_gradient_buffer", "weight", "output_bytes"),
    Component("batch", "weight", "batch_bytes"),
    Component("previous_model_output", "weight", "model_output_bytes"),
    Component("forward_temporary", "temporary", "forward_temporary_bytes"),
    Component("backward_temporary", "temporary", "backward_temporary_bytes"),
    Component("input_backward_temporary", "temporary", "input_backward_temporary_bytes"),
    Component("first_gradients", "temporary", "first_gradient_rise_bytes"),
    Component("merged_model_output", "temporary", "model_output_bytes"),
    Component("optimizer_temporary", "temporary", "optimizer_temporary_bytes"),
    Component("largest_optimizer_temporary", "temporary", "largest_optimizer_temporary_bytes"),
)
COST_FIELDS: Final = tuple(dict.fromkeys(component.costs_field for component in COMPONENTS))
"""The attributes of ``StageCosts`` that memory is made of."""
WHOLE: Final = 2
"""Counts of components are in halves, because a backward may run on half a micro-batch."""
_COLUMN: Final = {component.name: column for column, component in enumerate(COMPONENTS)}


@dataclass(frozen=True, slots=True)
class WorkerChanges:
    """How the actions of one worker change what it holds. All counts are in halves (see ``WHOLE``)."""

    stages: tuple[int, ...]
    """The stages that the worker holds, ascending."""
    stage_of_action: Integers
    """For every action the index of its stage in ``stages``."""
    resident: Integers
    """``[stage, component]``: held before the first action and after the step."""
    at_start: Integers
    """``[action, component]``: change for the stage of the action when the action starts."""
    at_end: Integers
    """``[action, component]``: change for the stage of the action when the action ends."""
    output_merge: Integers
    """``[stage, component]``: held when the step has ended and model outputs are merged."""
    optimizer_steps: Integers
    """``[moment, stage, component]``: held during the optimizer step at the end of the step, while it updates the
    largest parameter of each stage in turn."""
    updates: Integers
    """The actions that an update of the weights of their stage follows; empty with a flush."""
    during_updates: Integers
    """``[update, component]``: what the update holds for its stage in addition to what is held after its action."""


def component_bytes(costs: Sequence[StageCosts]) -> Integers:
    """``[stage, component]``: bytes of one (whole) component of every stage in ``costs``."""
    return np.array(
        [[getattr(stage, component.costs_field) for component in COMPONENTS] for stage in costs], dtype=np.int64
    ).reshape(len(costs), len(COMPONENTS))


def in_flight_changes(actions: Sequence[Action]) -> tuple[Integers, Integers]:
    """Change of the number of micro-batches in flight at the start and at the end of every action.

    A micro-batch is in flight on a stage from the start of its forward to the end of its (input) backward; where the
    backward runs in two halves, to the end of the second half.
    """
    begins = np.array([action.kind == FORWARD for action in actions], dtype=np.int64)
    ends = np.array(
        [action.kind in (BACKWARD, INPUT_BACKWARD) and action.half != 0 for action in actions], dtype=np.int64
    )
    return begins, -ends


def change_order(actions: Sequence[Action]) -> Integers:
    """The order in which 2 x ``len(actions)`` changes happen: 2i is the start of action i, 2i + 1 its end.

    Of two overlapped actions both start before the first one ends.
    """
    order = np.arange(2 * len(actions))
    for index in np.flatnonzero([action.overlapped for action in actions]):
        order[[2 * index + 1, 2 * index + 2]] = order[[2 * index + 2, 2 * index + 1]]
    return order


def worker_changes(
    schedule: Schedule, worker: int, model: MemoryModel = PAPER, *, recompute: bool = False
) -> WorkerChanges:
    """What each action of ``worker`` allocates and frees under ``schedule``.

    Args:
        schedule: the schedule.
        worker: row of the schedule.
        model: what counts as memory.
        recompute: the stage keeps only its input and repeats its forward before the backward.
    """
    row = schedule.rows[worker]
    copies = {stage: len(pipelines) for (owner, stage), pipelines in schedule.replicas.items() if owner == worker}
    stages = tuple(sorted(copies))
    actions, versions = _ActionColumns(schedule, row), version_changes(schedule, worker)
    at_start, at_end = (np.zeros((len(row), len(COMPONENTS)), dtype=np.int64) for _ in range(2))
    _keep_activations(at_start, at_end, actions, recompute)
    _keep_boundaries(at_start, at_end, actions, model, recompute)
    _add_temporaries(at_start, at_end, actions)
    _keep_gradients(at_start, at_end, versions, model)
    _keep_sent_messages(at_end, actions, model)
    at_start[:, _COLUMN["parameter"]] += WHOLE * np.array(versions.at_start, dtype=np.int64)
    at_end[:, _COLUMN["parameter"]] += WHOLE * np.array(versions.at_end, dtype=np.int64)
    index = {stage: place for place, stage in enumerate(stages)}
    stage_of_action = np.array([index[action.stage] for action in row], dtype=np.int64)
    resident = _resident(schedule, copies, stages, model)
    final = resident.copy()
    np.add.at(final, stage_of_action, at_start + at_end)
    final[:, [_COLUMN["sent_output"], _COLUMN["sent_input_gradient"]]] = 0
    merge = final.copy()
    merge[:, _COLUMN["merged_model_output"]] = final[:, _COLUMN["kept_model_output"]]
    updates = np.flatnonzero(versions.is_update)
    return WorkerChanges(
        stages,
        stage_of_action,
        resident,
        at_start,
        at_end,
        merge,
        final[None] if schedule.asynchronous else _optimizer_steps(final, [copies[stage] for stage in stages], model),
        updates,
        _during_updates(len(updates), model),
    )


class _ActionColumns:
    """The actions of a worker as columns of 0 and 1, and how much of a micro-batch each works on."""

    def __init__(self, schedule: Schedule, row: Sequence[Action]) -> None:
        def column(values: Sequence[Any]) -> Integers:
            return np.array(values, dtype=np.int64)

        self.forward = column([action.kind == FORWARD for action in row])
        self.backward = column([action.kind == BACKWARD for action in row])
        self.input_backward = column([action.kind == INPUT_BACKWARD for action in row])
        self.weight_backward = column([action.kind == WEIGHT_BACKWARD for action in row])
        self.units = column([WHOLE if action.half is None else WHOLE // 2 for action in row])
        self.stage = column([action.stage for action in row])
        self.pipeline = column([action.pipeline for action in row])
        self.on_last_stage = (self.stage == schedule.num_stages - 1).astype(np.int64)
        self.receives_input = column([_receives_input(schedule, action) for action in row])


def _receives_input(schedule: Schedule, action: Action) -> bool:
    """Whether the input of the action's stage is new to the worker; the output of its own stage is no copy."""
    workers = schedule.placement[action.pipeline]
    return action.stage == 0 or workers[action.stage - 1] != workers[action.stage]


def _keep_activations(at_start: Integers, at_end: Integers, actions: _ActionColumns, recompute: bool) -> None:
    """Activations live from forward to backward; under recomputation during each of the two only."""
    first_backward = actions.backward + actions.input_backward
    activation = _COLUMN["activation"]
    at_start[:, activation] += (actions.forward + recompute * first_backward) * actions.units
    at_end[:, activation] -= (recompute * actions.forward + first_backward) * actions.units
    at_end[:, _COLUMN["weight_activation"]] += (actions.input_backward - actions.weight_backward) * actions.units


def _keep_boundaries(
    at_start: Integers, at_end: Integers, actions: _ActionColumns, model: MemoryModel, recompute: bool
) -> None:
    """Input and output of the stage live from forward to backward, the gradient of the output during the backward."""
    every = np.ones_like(actions.stage)
    keeps_input = every if recompute else actions.receives_input * model.boundaries
    kept = {
        "received_input": keeps_input * (not model.receive_buffers),
        "unsaved_output": every * (model.boundaries and not recompute),
        "unsaved_model_output": every * model.receive_buffers,
    }
    first_backward = actions.backward + actions.input_backward
    for name, is_kept in kept.items():
        at_start[:, _COLUMN[name]] += actions.forward * is_kept * actions.units
        at_end[:, _COLUMN[name]] -= first_backward * is_kept * actions.units
    # A receive buffer holds the gradient of the output already.
    arrives = (model.boundaries and not model.receive_buffers) * actions.units
    at_start[:, _COLUMN["output_gradient"]] += first_backward * arrives
    at_end[:, _COLUMN["output_gradient"]] -= (actions.backward + actions.weight_backward) * arrives
    last_backward = first_backward * actions.on_last_stage * actions.units
    at_end[:, _COLUMN["kept_model_output"]] += last_backward * (model.kept_outputs != "none")
    at_end[:, _COLUMN["kept_loss"]] += last_backward * model.receive_buffers


def _add_temporaries(at_start: Integers, at_end: Integers, actions: _ActionColumns) -> None:
    """Temporaries live during their action."""
    during = {
        "forward_temporary": WHOLE * actions.forward,
        "input_backward_temporary": WHOLE * actions.input_backward,
        # Half a micro-batch needs half of the temporaries, but the gradients of the weights are whole.
        "backward_temporary": (actions.backward + actions.weight_backward) * actions.units,
    }
    for name, counts in during.items():
        at_start[:, _COLUMN[name]] += counts
        at_end[:, _COLUMN[name]] -= counts


def _keep_gradients(at_start: Integers, at_end: Integers, versions: VersionChanges, model: MemoryModel) -> None:
    """The first backward of a batch allocates the gradients of its copy; an update without a flush frees them."""
    if not model.fresh_gradients:
        return
    allocates = WHOLE * np.array(versions.begins_batch, dtype=np.int64)
    at_start[:, _COLUMN["first_gradients"]] += allocates
    at_end[:, _COLUMN["first_gradients"]] -= allocates
    at_end[:, _COLUMN["gradient"]] += allocates - WHOLE * np.array(versions.is_update, dtype=np.int64)


def _keep_sent_messages(at_end: Integers, actions: _ActionColumns, model: MemoryModel) -> None:
    """Sent messages stay after the backward of their micro-batch; until then the stage keeps its output anyway."""
    if model.sent_messages == "none":
        return
    backwards = np.flatnonzero(actions.backward + actions.input_backward)
    if model.sent_messages == "last":
        backwards = backwards[:1]
    at_end[backwards, _COLUMN["sent_input_gradient"]] += WHOLE
    # 1F1B keeps one output of its warm-up: it waits for the others together with the next message.
    sends = backwards[(actions.on_last_stage[backwards] == 0) & ((model.sent_messages == "all") | (backwards > 1))]
    at_end[sends, _COLUMN["sent_output"]] += WHOLE


def _resident(schedule: Schedule, copies: dict[int, int], stages: Sequence[int], model: MemoryModel) -> Integers:
    """``[stage, component]``: the weights of every copy, and what torch.distributed.pipelining keeps allocated."""
    resident = np.zeros((len(stages), len(COMPONENTS)), dtype=np.int64)
    last_stage, num_messages = schedule.num_stages - 1, WHOLE * schedule.num_microbatches
    for place, stage in enumerate(stages):
        counts = {
            "parameter": WHOLE * copies[stage] * resident_versions(schedule),
            "optimizer_state": WHOLE * copies[stage],
            "gradient": 0 if model.fresh_gradients else WHOLE * copies[stage],
        }
        if model.receive_buffers:
            counts |= {"input_buffer": num_messages, "batch": num_messages}
            counts["output_gradient_buffer"] = num_messages if stage < last_stage else 0
        if model.kept_outputs == "merged" and stage == last_stage:
            counts["previous_model_output"] = num_messages
        for name, count in counts.items():
            resident[place, _COLUMN[name]] = count
    return resident


def _optimizer_steps(final: Integers, copies: Sequence[int], model: MemoryModel) -> Integers:
    """``[moment, stage, component]``: one moment for each stage with the largest parameter being updated."""
    moments = np.repeat(final[None], len(copies), axis=0)
    if model.optimizer_step:
        moments[:, :, _COLUMN["optimizer_temporary"]] = WHOLE * np.array(copies)
        places = np.arange(len(copies))
        moments[places, places, _COLUMN["largest_optimizer_temporary"]] = WHOLE
    return moments


def _during_updates(num_updates: int, model: MemoryModel) -> Integers:
    """``[update, component]``: gradients and temporaries; without a flush a stage has one copy."""
    held = np.zeros((num_updates, len(COMPONENTS)), dtype=np.int64)
    if model.fresh_gradients:
        held[:, _COLUMN["gradient"]] = WHOLE
    if model.optimizer_step:
        held[:, _COLUMN["optimizer_temporary"]] = WHOLE
        held[:, _COLUMN["largest_optimizer_temporary"]] = WHOLE
    return held
