"""Prediction of a recorded pipeline from the trace of one process that trained the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrace.display import Displayed
from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import LayerCosts, combine_layers, partition_costs
from memtrace.pipeline.layer_costs import MeasuredLayers
from memtrace.pipeline.measured import MeasuredPipeline, measure_pipeline
from memtrace.pipeline.memory_rules import torch_pipelining_model
from memtrace.pipeline.recorded import RankActions, first_pipeline, recorded_actions
from memtrace.pipeline.recorded_versions import recorded_schedule_with_updates
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.simulator import Simulation, simulate_schedule
from memtrace.pipeline.simulation.worker_memory import WorkerMemory, simulate_memory
from memtrace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class WorkerComparison:
    """Measured and predicted memory of one worker."""

    rank: int
    measured_peak_bytes: int
    predicted_peak_bytes: int
    error: float | None
    """(predicted - measured) / measured peak; None without memory events."""
    measured_in_flight: int
    """Peak number of (stage, micro-batch) pairs in flight."""
    predicted_in_flight: int


@dataclass(frozen=True, kw_only=True)
class PipelineComparison:
    """Measured and predicted memory of all workers, and the predicted step."""

    workers: tuple[WorkerComparison, ...]
    largest_error: float | None
    """The largest absolute error of a worker; None without memory events."""
    step_time_s: float
    """Predicted seconds per step, with free messages and one machine per worker."""
    bubble_ratio: float
    """Predicted idle share of the workers' time."""
    first_layers: tuple[int, ...]
    """The partition: index of the first layer of every stage."""


@dataclass(frozen=True)
class PipelinePrediction:
    """A prediction of a recorded pipeline, with the simulation behind it."""

    comparison: PipelineComparison
    simulation: Simulation
    memories: Sequence[WorkerMemory]
    """One entry per worker of the simulated schedule."""


@dataclass(frozen=True, kw_only=True)
class PipelineReport(Displayed):
    """A recorded pipeline, and what a single-process trace predicts for it."""

    measured: MeasuredPipeline
    predicted: PipelineComparison | None
    """None without a single-process trace."""


def predict_recorded_pipeline(
    trace: Trace,
    single_process: MeasuredLayers,
    *,
    schedule: Schedule | None = None,
    first_layers: Sequence[int] | None = None,
) -> PipelinePrediction:
    """Predict the peak of every worker of a recorded pipeline, and compare it with the measured peak.

    Args:
        trace: all ranks of the recorded pipeline.
        single_process: layer costs from one process that trained the whole model on one micro-batch per step.
        schedule: the schedule that was meant to run; None: the recorded order of actions, with the weight versions that
            the recording shows.
        first_layers: index of the first layer of every stage; None: inferred from the parameters of the stages.

    Raises:
        MemtraceError: the schedule or the partition does not match the recorded pipeline.
    """
    ranks, measured = recorded_actions(trace), measure_pipeline(trace)
    schedule = schedule or recorded_schedule_with_updates(trace)
    num_workers = len(first_pipeline(ranks))
    if schedule.num_workers != num_workers:
        raise MemtraceError(
            f"schedule {schedule.name} has {schedule.num_workers} workers, but the recorded pipeline has {num_workers}"
        )
    if first_layers is None:
        first_layers = infer_first_layers(measured, single_process.layers)
    _check_first_layers(first_layers, schedule, len(single_process.layers))
    simulation = simulate_schedule(schedule, partition_costs(single_process.layers, first_layers))
    model = single_process.model
    if measured.torch_schedule is not None:
        model = torch_pipelining_model(model, measured.torch_schedule, measured.kept_outputs)
    memories = simulate_memory(simulation, model)
    workers = _compare_workers(measured, ranks, memories)
    errors = [abs(worker.error) for worker in workers if worker.error is not None]
    comparison = PipelineComparison(
        workers=workers,
        largest_error=max(errors, default=None),
        step_time_s=simulation.step_time_s,
        bubble_ratio=simulation.bubble_ratio,
        first_layers=tuple(first_layers),
    )
    return PipelinePrediction(comparison, simulation, memories)


def _check_first_layers(first_layers: Sequence[int], schedule: Schedule, num_layers: int) -> None:
    text = ",".join(map(str, first_layers))
    if len(first_layers) != schedule.num_stages:
        raise MemtraceError(
            f"partition {text} has {len(first_layers)} stages, but the {schedule.name} schedule has "
            f"{schedule.num_stages}. Give the first layer of each of its stages."
        )
    if list(first_layers) != sorted({0, *first_layers}) or first_layers[-1] >= num_layers:
        raise MemtraceError(f"partition {text}: layers must begin with 0 and ascend to at most {num_layers - 1}")


def _compare_workers(
    measured: MeasuredPipeline, ranks: Sequence[RankActions], memories: Sequence[WorkerMemory]
) -> tuple[WorkerComparison, ...]:
    """One entry per rank; data-parallel ranks are compared with the same simulated worker."""
    stage_copies = [rank.stage_copies for rank in first_pipeline(ranks)]
    comparisons = []
    for worker, rank in zip(measured.workers, ranks, strict=True):
        memory = memories[stage_copies.index(rank.stage_copies)]
        comparisons.append(
            WorkerComparison(
                rank=worker.rank,
                measured_peak_bytes=worker.peak_bytes,
                predicted_peak_bytes=memory.peak_bytes,
                error=memory.peak_bytes / worker.peak_bytes - 1 if worker.peak_bytes else None,
                measured_in_flight=worker.in_flight_peak,
                predicted_in_flight=memory.in_flight_peak,
            )
        )
    return tuple(comparisons)


def infer_first_layers(measured: MeasuredPipeline, layers: Sequence[LayerCosts]) -> list[int]:
    """Infer the first layer of every stage from the bytes of parameters that each recorded stage holds.

    Raises:
        MemtraceError: no consecutive layers have the parameters of a stage: the traces are of different models, or the
            partition must be given.
    """
    recorded_bytes = {stage.stage: stage.parameter_bytes for stage in measured.stages}
    first_layers, layer = [], 0
    for stage in range(len(recorded_bytes)):
        first_layers.append(layer)
        stage_bytes, begin = 0, layer
        while layer < len(layers) and (layer == begin or stage_bytes < (recorded_bytes.get(stage) or 0)):
            layer += 1
            stage_bytes = combine_layers(layers[begin:layer]).parameter_bytes
        if stage_bytes != recorded_bytes.get(stage):
            raise MemtraceError(
                f"cannot infer the partition: no layers from layer {begin} on have the {recorded_bytes.get(stage)} "
                f"bytes of parameters of stage {stage}. Check that both traces are of the same model, or give the "
                "partition."
            )
    # Layers without parameters after the last layer with parameters belong to the last stage.
    if any(rest.parameter_bytes for rest in layers[layer:]):
        raise MemtraceError(
            "cannot infer the partition: the model has more layers with parameters than the recorded stages. Check "
            "that both traces are of the same model, or give the partition."
        )
    return first_layers
