"""Pipeline plans: every schedule partitioned, simulated, and ranked under a memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import LayerCosts, Network, StageCosts, partition_costs
from memtrace.pipeline.memory_rules import PAPER, MemoryModel
from memtrace.pipeline.partition import EQUAL, MEMORY, TIME, Partition, balance_partition
from memtrace.pipeline.schedules.registry import ScheduleChoice
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.schedules.weight_versions import microbatches_per_update
from memtrace.pipeline.simulation.all_reduce import EAGER
from memtrace.pipeline.simulation.simulator import Simulation, simulate_schedule
from memtrace.pipeline.simulation.worker_memory import WorkerMemory, simulate_memory

NUM_SIMULATED_BATCHES: Final = 4
"""Batches simulated of a schedule without a flush; the last one is taken as the steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Hardware and preferences that apply to every schedule of a plan."""

    network: Network = field(default_factory=Network)
    capacity_bytes: int | None = None
    """Memory of one worker; None: unlimited."""
    data_parallel: int = 1
    """Data-parallel degree: copies of the whole pipeline."""
    sync: str = EAGER
    """When gradients are all-reduced: one of ``all_reduce.SYNC_MODES``."""
    overlap: float = 1.0
    """Time of an overlapped forward and backward as a share of the sum of both."""
    objective: str = TIME
    """What the partition balances first: one of ``partition.OBJECTIVES``."""
    model: MemoryModel = PAPER


@dataclass(frozen=True)
class SchedulePrediction:
    """Time and memory of one schedule with its partition."""

    choice: ScheduleChoice
    recompute: bool
    partition: Partition
    simulation: Simulation
    memories: Sequence[WorkerMemory]
    """One entry per worker."""
    step_time_s: float
    """Seconds from one step to the next: in the steady state of a schedule without a flush; of a free-running schedule
    (``ScheduleFamily.free_running``) the longest span of a worker; else until all workers are done."""
    bubble_ratio: float
    """Idle share of the workers' time in that step, without waiting for all-reduces."""
    fits: bool
    """Whether the peak of every worker is within the capacity; true without a capacity."""

    @property
    def schedule(self) -> Schedule:
        """The simulated schedule."""
        return self.simulation.schedule

    @property
    def reduces_gradients(self) -> bool:
        """Whether several workers hold a stage, so that its gradients are all-reduced."""
        return bool(self.simulation.all_reduces)

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest worker."""
        return max(memory.peak_bytes for memory in self.memories)

    @property
    def rank_key(self) -> tuple[bool, float, int]:
        """Sort key of a ranking: predictions that fit first, then by step time, then by peak."""
        return not self.fits, self.step_time_s, self.peak_bytes


@dataclass(frozen=True)
class SkippedSchedule:
    """A schedule that cannot be built for the given sizes."""

    schedule: str
    reason: str


@dataclass(frozen=True)
class PipelinePlan:
    """The schedules of a plan, best first."""

    layers: Sequence[LayerCosts]
    predictions: Sequence[SchedulePrediction]
    """Predictions that fit the capacity first, each group by step time."""
    skipped: Sequence[SkippedSchedule]

    @property
    def typical(self) -> SchedulePrediction | None:
        """The best prediction with as many stages as workers, else the best one; None without predictions."""
        simple = [
            prediction
            for prediction in self.predictions
            if prediction.schedule.num_stages == prediction.schedule.num_workers
        ]
        return next(iter(simple or self.predictions), None)


def plan_pipeline(
    layers: Sequence[LayerCosts],
    num_workers: int,
    num_microbatches: int,
    *,
    choices: Iterable[ScheduleChoice],
    recompute: Iterable[bool] = (False,),
    settings: PlanSettings | None = None,
) -> PipelinePlan:
    """Partition, simulate and rank schedules.

    Args:
        layers: costs of the model's layers for one micro-batch.
        num_workers: workers of one pipeline.
        num_microbatches: micro-batches of one pipeline per step.
        choices: the schedules to try.
        recompute: whether to try recomputation, no recomputation, or both.
        settings: hardware and preferences; None: the defaults.
    """
    predictions: list[SchedulePrediction] = []
    skipped: list[SkippedSchedule] = []
    recompute_options = list(recompute)
    for choice in choices:
        outcome = _predict_or_skip(layers, num_workers, num_microbatches, choice, recompute_options, settings)
        if isinstance(outcome, SkippedSchedule):
            skipped.append(outcome)
        else:
            predictions += outcome
    predictions.sort(key=lambda prediction: prediction.rank_key)
    return PipelinePlan(layers, predictions, skipped)


def _predict_or_skip(
    layers: Sequence[LayerCosts],
    num_workers: int,
    num_microbatches: int,
    choice: ScheduleChoice,
    recompute_options: Iterable[bool],
    settings: PlanSettings | None,
) -> list[SchedulePrediction] | SkippedSchedule:
    try:
        return [
            predict_schedule(layers, num_workers, num_microbatches, choice, recompute=recomputes, settings=settings)
            for recomputes in recompute_options
        ]
    except MemtraceError as error:
        return SkippedSchedule(str(choice), str(error))


def predict_schedule(
    layers: Sequence[LayerCosts],
    num_workers: int,
    num_microbatches: int,
    choice: ScheduleChoice,
    *,
    recompute: bool = False,
    settings: PlanSettings | None = None,
) -> SchedulePrediction:
    """Partition ``layers`` for one schedule and simulate it.

    Where no partition keeps every worker within the capacity, the result has the partition with the lowest peak, and
    ``fits`` is False.

    Raises:
        MemtraceError: the schedule does not exist for these sizes, or the model has too few layers.
    """
    settings = settings or PlanSettings()
    schedule = _build_batches(
        choice, num_workers, num_microbatches, _num_batches(choice, num_workers, num_microbatches)
    )
    partition = _find_partition(layers, schedule, recompute, settings)
    stages = partition_costs(layers, partition.first_layers)
    simulation, step_s, bubble_ratio = _simulate_step(choice, schedule, stages, recompute, settings)
    memories = simulate_memory(simulation, settings.model)
    capacity = settings.capacity_bytes
    fits = capacity is None or all(memory.peak_bytes <= capacity for memory in memories)
    return SchedulePrediction(choice, recompute, partition, simulation, memories, step_s, bubble_ratio, fits)


def step_time_with(prediction: SchedulePrediction, settings: PlanSettings) -> float:
    """The step time of a prediction, in seconds, with another network, synchronization or data-parallel degree."""
    simulation = prediction.simulation
    _, step_s, _ = _simulate_step(
        prediction.choice, simulation.schedule, simulation.stages, prediction.recompute, settings
    )
    return step_s


def _num_batches(choice: ScheduleChoice, num_workers: int, num_microbatches: int) -> int:
    return NUM_SIMULATED_BATCHES if choice.build(num_workers, num_microbatches).asynchronous else 1


def _simulate_step(
    choice: ScheduleChoice, schedule: Schedule, stages: Sequence[StageCosts], recompute: bool, settings: PlanSettings
) -> tuple[Simulation, float, float]:
    """The simulation, and the step time and the idle share of the workers' time in a step."""
    simulation = _simulate(schedule, stages, recompute, settings)
    if schedule.asynchronous:
        num_microbatches = schedule.num_microbatches // NUM_SIMULATED_BATCHES
        shorter = _build_batches(choice, schedule.num_workers, num_microbatches, NUM_SIMULATED_BATCHES - 1)
        step = _steady_state(simulation, _simulate(shorter, stages, recompute, settings), settings.network)
    elif choice.family.free_running:
        step = _free_running_step(simulation)
    else:
        step = simulation.step_time_s, simulation.bubble_ratio
    return simulation, *step


def _build_batches(choice: ScheduleChoice, num_workers: int, num_microbatches: int, num_batches: int) -> Schedule:
    if choice.family.name == "pipedream-2bw" and "update_every" not in choice.options:
        choice = ScheduleChoice(choice.family, {**choice.options, "update_every": num_microbatches})
    return choice.build(num_workers, num_microbatches * num_batches)


def _find_partition(
    layers: Sequence[LayerCosts], schedule: Schedule, recompute: bool, settings: PlanSettings
) -> Partition:
    """The best partition within the capacity, else the one with the lowest peak (of equal stages the only one)."""

    def balance(objective: str, capacity_bytes: int | None) -> Partition | None:
        return balance_partition(
            layers,
            schedule,
            objective=objective,
            capacity_bytes=capacity_bytes,
            recompute=recompute,
            model=settings.model,
        )

    lowest = EQUAL if settings.objective == EQUAL else MEMORY
    partition = balance(settings.objective, settings.capacity_bytes) or balance(lowest, None)
    assert partition is not None
    return partition


def _simulate(schedule: Schedule, stages: Sequence[StageCosts], recompute: bool, settings: PlanSettings) -> Simulation:
    return simulate_schedule(
        schedule,
        stages,
        network=settings.network,
        recompute=recompute,
        overlap=settings.overlap,
        data_parallel=settings.data_parallel,
        sync=settings.sync,
    )


def _free_running_step(simulation: Simulation) -> tuple[float, float]:
    """The longest span of a worker, and the idle share of all workers' time if a step takes that long."""
    span_s = float(simulation.span_s.max())
    waiting_s = simulation.step_time_s - simulation.makespan_s
    num_workers = simulation.schedule.num_workers
    busy_s = float(simulation.busy_s.sum())
    return span_s + waiting_s, max(0.0, 1.0 - busy_s / (span_s * num_workers)) if span_s else 0.0


def _steady_state(longer: Simulation, shorter: Simulation, network: Network) -> tuple[float, float]:
    """Seconds and idle share of one more batch; all-reduces overlap computation, one after another per worker."""
    schedule = longer.schedule
    computing_s = longer.makespan_s - shorter.makespan_s
    reducing_s, launching_s = np.zeros(schedule.num_workers), np.zeros(schedule.num_workers)
    num_updates = schedule.num_microbatches // NUM_SIMULATED_BATCHES // microbatches_per_update(schedule)
    for reduction in longer.all_reduces:
        reducing_s[list(reduction.workers)] += num_updates * (reduction.end_s - reduction.start_s)
        launching_s[list(reduction.workers)] += num_updates * network.all_reduce_launch_s
    busy_s = float((longer.busy_s - shorter.busy_s).sum())
    slowest_s = computing_s + float((network.all_reduce_share * reducing_s + launching_s).max(initial=0.0))
    bubble_ratio = max(0.0, 1.0 - busy_s / (slowest_s * schedule.num_workers)) if slowest_s else 0.0
    return max(slowest_s, float(reducing_s.max(initial=0.0))), bubble_ratio
