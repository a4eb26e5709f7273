"""Pipeline plans as plain values: the result of ``memtrace plan pipeline``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrace.display import Displayed
from memtrace.pipeline.costs import LayerCosts, partition_costs
from memtrace.pipeline.microbatch_costs import Basis, MicrobatchCosts, MicrobatchEfficiency
from memtrace.pipeline.plan import PipelinePlan, PlanSettings, SchedulePrediction, SkippedSchedule
from memtrace.pipeline.plan_assumptions import plan_assumptions
from memtrace.pipeline.search import PipelineConfiguration


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """One stage of a partition. Times and activation bytes are for one micro-batch, the others for one copy."""

    stage: int
    first_layer: int
    """Index of the stage's first layer."""
    layers: tuple[str, ...]
    """Names of the stage's layers."""
    forward_s: float
    backward_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    input_bytes: int
    """Message from the previous stage."""
    output_bytes: int
    """Message to the next stage."""

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class WorkerSummary:
    """Predicted memory of one worker."""

    peak_bytes: int
    weight_bytes: int
    """Peak of parameters with all copies and versions, gradients and optimizer state."""
    activation_peak_bytes: int
    in_flight_peak: int
    """Peak number of (stage, micro-batch) pairs in flight."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSummary:
    """Predicted time and memory of one schedule."""

    schedule: str
    """Name of the schedule."""
    options: dict[str, int | str]
    """Options of the schedule."""
    recompute: bool
    """Whether stages keep only their inputs and repeat their forward."""
    data_parallel: int
    """Data-parallel degree: copies of the pipeline."""
    num_workers: int
    """Workers of one pipeline."""
    num_microbatches: int
    """Micro-batches of one pipeline per step."""
    microbatch_size: int | None
    """Samples per micro-batch; None: unknown."""
    costs_basis: Basis
    """Where the costs of this micro-batch size come from."""
    samples_per_s: float | None
    """Throughput of all workers together; None: unknown."""
    step_time_s: float
    makespan_s: float | None
    """Seconds from the first action to the end of the last one; None for a schedule without a flush."""
    bubble_ratio: float
    """Idle share of the workers' time."""
    asynchronous: bool
    """Whether steps follow each other without a flush."""
    free_running: bool
    """Whether each worker begins its next step when its own work is done."""
    reduces_gradients: bool
    """Whether several workers hold a stage, so that its gradients are all-reduced."""
    fits: bool
    """Whether every worker's peak is within the capacity."""
    workers: tuple[WorkerSummary, ...]
    first_layers: tuple[int, ...]
    """The partition: index of the first layer of every stage."""
    exact: bool
    """Whether no other partition is better."""

    @property
    def name(self) -> str:
        """The schedule with its options, as users write it."""
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.schedule}{':' if options else ''}{options}"

    @property
    def max_peak_bytes(self) -> int:
        """The peak of the fullest worker."""
        return max(worker.peak_bytes for worker in self.workers)

    @property
    def min_peak_bytes(self) -> int:
        """The peak of the emptiest worker."""
        return min(worker.peak_bytes for worker in self.workers)


@dataclass(frozen=True, kw_only=True)
class PipelinePlanReport(Displayed):
    """Ranked pipeline schedules for a model."""

    schedules: tuple[ScheduleSummary, ...]
    """Schedules that fit the capacity first, each group by step time."""
    stages: tuple[StageSummary, ...]
    """Stages of the best schedule with one stage per worker (if none has, of the best schedule); empty for a search."""
    skipped: tuple[SkippedSchedule, ...]
    """Schedules that cannot be built for the given sizes."""
    efficiency: tuple[MicrobatchEfficiency, ...]
    """Costs per sample by micro-batch size, for the measured sizes and those of the search."""
    notes: tuple[str, ...]
    """What limits the accuracy of the layer costs."""
    assumptions: tuple[str, ...]
    """What the ranking rests on: costs that were not given or not measured."""


def report_plan(
    plan: PipelinePlan,
    num_microbatches: int,
    settings: PlanSettings,
    costs: MicrobatchCosts,
    *,
    microbatch_size: int | None = None,
    notes: Sequence[str] = (),
) -> PipelinePlanReport:
    """Summarize a plan for ``num_microbatches`` micro-batches.

    Args:
        plan: the plan, for layers of ``costs``.
        num_microbatches: micro-batches per step.
        settings: the settings of the plan.
        costs: layer costs by micro-batch size.
        microbatch_size: samples per micro-batch; None: unknown, and the only one of ``costs``.
        notes: what limits the accuracy of the layer costs.
    """
    size = microbatch_size or costs.sizes[0]
    degree = settings.data_parallel
    typical = plan.typical
    return PipelinePlanReport(
        schedules=tuple(
            _summarize(
                prediction,
                degree,
                num_microbatches,
                basis=costs.basis(size),
                microbatch_size=microbatch_size,
                batch_size=None if microbatch_size is None else size * num_microbatches * degree,
            )
            for prediction in plan.predictions
        ),
        stages=() if typical is None else summarize_stages(plan.layers, typical.partition.first_layers),
        skipped=tuple(plan.skipped),
        efficiency=costs.efficiency([size]),
        notes=tuple(notes),
        assumptions=tuple(
            plan_assumptions([(prediction, degree) for prediction in plan.predictions], settings, costs, [size])
        ),
    )


def report_search(
    configurations: Sequence[PipelineConfiguration],
    settings: PlanSettings,
    costs: MicrobatchCosts,
    notes: Sequence[str] = (),
) -> PipelinePlanReport:
    """Summarize the result of ``search.search_configurations``."""
    sizes = sorted({configuration.microbatch_size for configuration in configurations})
    ranked = [(configuration.prediction, configuration.data_parallel) for configuration in configurations]
    return PipelinePlanReport(
        schedules=tuple(
            _summarize(
                configuration.prediction,
                configuration.data_parallel,
                configuration.num_microbatches,
                basis=costs.basis(configuration.microbatch_size),
                microbatch_size=configuration.microbatch_size,
                batch_size=configuration.batch_size,
            )
            for configuration in configurations
        ),
        stages=(),
        skipped=(),
        efficiency=costs.efficiency(sizes),
        notes=tuple(notes),
        assumptions=tuple(plan_assumptions(ranked, settings, costs, sizes)),
    )


def summarize_stages(layers: Sequence[LayerCosts], first_layers: Sequence[int]) -> tuple[StageSummary, ...]:
    """The stages of a partition of ``layers``."""
    bounds = [*first_layers, len(layers)]
    return tuple(
        StageSummary(
            stage=stage,
            first_layer=bounds[stage],
            layers=tuple(layer.name for layer in layers[bounds[stage] : bounds[stage + 1]]),
            forward_s=costs.forward_s,
            backward_s=costs.backward_s,
            parameter_bytes=costs.parameter_bytes,
            gradient_bytes=costs.gradient_bytes,
            optimizer_bytes=costs.optimizer_bytes,
            activation_bytes=costs.activation_bytes,
            input_bytes=costs.input_bytes,
            output_bytes=costs.output_bytes,
        )
        for stage, costs in enumerate(partition_costs(layers, first_layers))
    )


def _summarize(
    prediction: SchedulePrediction,
    data_parallel: int,
    num_microbatches: int,
    *,
    basis: Basis,
    microbatch_size: int | None = None,
    batch_size: int | None = None,
) -> ScheduleSummary:
    schedule, step_time_s = prediction.schedule, prediction.step_time_s
    return ScheduleSummary(
        schedule=prediction.choice.family.name,
        options=dict(prediction.choice.options),
        recompute=prediction.recompute,
        data_parallel=data_parallel,
        num_workers=schedule.num_workers,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        costs_basis=basis,
        samples_per_s=None if batch_size is None or not step_time_s else batch_size / step_time_s,
        step_time_s=step_time_s,
        makespan_s=None if schedule.asynchronous else prediction.simulation.makespan_s,
        bubble_ratio=prediction.bubble_ratio,
        asynchronous=schedule.asynchronous,
        free_running=prediction.choice.family.free_running,
        reduces_gradients=prediction.reduces_gradients,
        fits=prediction.fits,
        workers=tuple(
            WorkerSummary(
                peak_bytes=memory.peak_bytes,
                weight_bytes=memory.weight_peak_bytes,
                activation_peak_bytes=memory.activation_peak_bytes,
                in_flight_peak=memory.in_flight_peak,
            )
            for memory in prediction.memories
        ),
        first_layers=prediction.partition.first_layers,
        exact=prediction.partition.exact,
    )
