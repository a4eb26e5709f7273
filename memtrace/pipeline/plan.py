"""Which schedule to train with: every schedule cut, simulated and ranked under a memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Layer, Network, StageCosts, cut_costs
from memtrace.pipeline.partition import MEMORY, TIME, Cut, balanced_cut
from memtrace.pipeline.schedules.registry import Choice
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.memory import PAPER, MemoryModel, WorkerMemory, memory
from memtrace.pipeline.simulation.simulate import Simulation, simulate
from memtrace.pipeline.simulation.sync import EAGER

BATCHES: Final = 4
"""Batches simulated of a schedule without a flush; the last one is taken as the steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What holds for every schedule of a plan."""

    network: Network = field(default_factory=Network)
    capacity_bytes: int | None = None
    """Memory of one worker; None: no limit."""
    width: int = 1
    """Copies of the whole pipeline."""
    sync: str = EAGER
    overlap: float = 1.0
    """Time of an overlapped forward and backward as a share of the sum of both."""
    objective: str = TIME
    """What the cut balances first: time (under the capacity) or memory."""
    model: MemoryModel = PAPER


@dataclass(frozen=True)
class Prediction:
    """One schedule with its cut, under one setting."""

    choice: Choice
    recompute: bool
    cut: Cut
    simulation: Simulation
    memories: Sequence[WorkerMemory]
    step_time_s: float
    """Seconds from one step to the next: of a schedule without a flush once it runs steadily, of a
    free-running one (``Family.free_running``) the longest time that a worker is at it, else until all are
    done."""
    bubble_ratio: float
    """Idle share of the workers' time in that step, waiting for all-reduce left out."""
    fits: bool
    """Whether every worker's peak stays within the capacity; true without one."""

    @property
    def schedule(self) -> Schedule:
        """The table that was simulated."""
        return self.simulation.schedule

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest worker."""
        return max(memory.peak_bytes for memory in self.memories)

    def as_dict(self) -> dict[str, Any]:
        """The shape of one entry of "schedules" in ``memtrace plan pipeline --json``."""
        return {
            "schedule": self.choice.family.name,
            "options": {**self.choice.options, "recompute": self.recompute},
            "step_time_s": self.step_time_s,
            "makespan_s": None if self.schedule.asynchronous else self.simulation.makespan_s,
            "bubble_ratio": self.bubble_ratio,
            "asynchronous": self.schedule.asynchronous,
            "fits": self.fits,
            "workers": [
                {
                    "peak_bytes": memory.peak_bytes,
                    "weight_bytes": memory.weight_peak_bytes,
                    "activation_peak_bytes": memory.activation_peak_bytes,
                    "in_flight_peak": memory.in_flight_peak,
                }
                for memory in self.memories
            ],
            "cut": list(self.cut.first_layers),
            "cut_exact": self.cut.exact,
        }


@dataclass(frozen=True)
class Plan:
    """What ``plan`` found."""

    layers: Sequence[Layer]
    predictions: Sequence[Prediction]
    """Those that fit first, each group by step time."""
    skipped: Sequence[tuple[Choice, str]]
    """What could not be built for these sizes, and why."""

    @property
    def typical(self) -> Prediction | None:
        """The best prediction that cuts the model into as many stages as there are workers, else the best."""
        simple = [one for one in self.predictions if one.schedule.num_stages == one.schedule.num_workers]
        return next(iter(simple or self.predictions), None)

    def as_dict(self) -> dict[str, Any]:
        """The shape of ``memtrace plan pipeline --json``; "stages" is the cut of ``typical``."""
        shown = self.typical
        return {
            "stages": [] if shown is None else stage_dicts(self.layers, shown.cut.first_layers),
            "schedules": [prediction.as_dict() for prediction in self.predictions],
            "skipped": [
                {"schedule": choice.family.name, "options": dict(choice.options), "reason": reason}
                for choice, reason in self.skipped
            ],
        }


def stage_dicts(layers: Sequence[Layer], first_layers: Sequence[int]) -> list[dict[str, Any]]:
    """One entry a stage: its layers, seconds and bytes of one micro-batch and of one copy of the weights."""
    bounds = [*first_layers, len(layers)]
    entries = []
    for stage, costs in enumerate(cut_costs(layers, first_layers)):
        begin, end = bounds[stage], bounds[stage + 1]
        entries.append(
            {
                "stage": stage,
                "first_layer": begin,
                "num_layers": end - begin,
                "layers": [layer.name for layer in layers[begin:end]],
                "forward_s": costs.forward_s,
                "backward_s": costs.backward_s,
                "parameter_bytes": costs.parameter_bytes,
                "gradient_bytes": costs.gradient_bytes,
                "optimizer_bytes": costs.optimizer_bytes,
                "activation_bytes": costs.activation_bytes,
                "input_bytes": costs.input_bytes,
                "output_bytes": costs.output_bytes,
            }
        )
    return entries


def plan(
    layers: Sequence[Layer],
    num_workers: int,
    num_microbatches: int,
    *,
    choices: Iterable[Choice],
    recompute: Iterable[bool] = (False,),
    setting: Setting | None = None,
) -> Plan:
    """Cut, simulate and rank ``choices`` over ``num_workers`` workers, with and without recomputation as
    asked."""
    found: list[Prediction] = []
    skipped: list[tuple[Choice, str]] = []
    tried = list(recompute)
    for choice in choices:
        outcome = _predictions(layers, num_workers, num_microbatches, choice, tried, setting)
        if isinstance(outcome, str):
            skipped.append((choice, outcome))
        else:
            found += outcome
    found.sort(key=lambda prediction: (not prediction.fits, prediction.step_time_s, prediction.peak_bytes))
    return Plan(layers, found, skipped)


def _predictions(
    layers: Sequence[Layer],
    num_workers: int,
    num_microbatches: int,
    choice: Choice,
    recompute: Iterable[bool],
    setting: Setting | None,
) -> list[Prediction] | str:
    """One prediction with and one without recomputation as asked, or why there is none."""
    try:
        return [
            predict(layers, num_workers, num_microbatches, choice, recompute=again, setting=setting)
            for again in recompute
        ]
    except MemtraceError as error:
        return str(error)


def predict(
    layers: Sequence[Layer],
    num_workers: int,
    num_microbatches: int,
    choice: Choice,
    *,
    recompute: bool = False,
    setting: Setting | None = None,
) -> Prediction:
    """Cut ``layers`` for one schedule and simulate it.

    Where no cut keeps every worker within the capacity, the cut with the lowest peak is shown, as not
    fitting. Raises MemtraceError where the schedule does not exist for these sizes or the model has too few
    layers.
    """
    setting = setting or Setting()
    asynchronous = choice.build(num_workers, num_microbatches).asynchronous
    batches = BATCHES if asynchronous else 1
    schedule = _several_batches(choice, num_workers, num_microbatches, batches)
    cut = _fitting_cut(layers, schedule, recompute, setting)
    stages = cut_costs(layers, cut.first_layers)
    simulation = _simulate(schedule, stages, recompute, setting)
    memories = memory(simulation, setting.model)
    if asynchronous:
        shorter = _several_batches(choice, num_workers, num_microbatches, batches - 1)
        step_s, bubbles = _steady_state(simulation, _simulate(shorter, stages, recompute, setting))
    elif choice.family.free_running:
        step_s, bubbles = _free_running(simulation)
    else:
        step_s, bubbles = simulation.step_time_s, simulation.bubble_ratio
    limit = setting.capacity_bytes
    fits = limit is None or all(memory.peak_bytes <= limit for memory in memories)
    return Prediction(choice, recompute, cut, simulation, memories, step_s, bubbles, fits)


def _several_batches(choice: Choice, num_workers: int, num_microbatches: int, batches: int) -> Schedule:
    if choice.family.name == "pipedream-2bw" and "update_every" not in choice.options:
        choice = Choice(choice.family, {**choice.options, "update_every": num_microbatches})
    return choice.build(num_workers, num_microbatches * batches)


def _fitting_cut(layers: Sequence[Layer], schedule: Schedule, recompute: bool, setting: Setting) -> Cut:
    def cut(objective: str, capacity_bytes: int | None) -> Cut | None:
        return balanced_cut(
            layers,
            schedule,
            objective=objective,
            capacity_bytes=capacity_bytes,
            recompute=recompute,
            model=setting.model,
        )

    found = cut(setting.objective, setting.capacity_bytes) or cut(MEMORY, None)
    assert found is not None
    return found


def _simulate(schedule: Schedule, stages: Sequence[StageCosts], recompute: bool, setting: Setting) -> Simulation:
    return simulate(
        schedule,
        stages,
        network=setting.network,
        recompute=recompute,
        overlap=setting.overlap,
        width=setting.width,
        sync=setting.sync,
    )


def _free_running(simulation: Simulation) -> tuple[float, float]:
    """The longest span of a worker and the idle share of all workers' time if a step takes that long."""
    span = float(simulation.span_s.max())
    waiting = simulation.step_time_s - simulation.makespan_s
    workers = simulation.schedule.num_workers
    busy = float(simulation.busy_s.sum())
    return span + waiting, max(0.0, 1.0 - busy / (span * workers)) if span else 0.0


def _steady_state(longer: Simulation, shorter: Simulation) -> tuple[float, float]:
    """Seconds and idle share of one more batch; all-reduces run beside it, one after another."""
    computing = longer.makespan_s - shorter.makespan_s
    reducing = np.zeros(longer.schedule.num_workers)
    schedule = longer.schedule
    batch = schedule.num_microbatches // BATCHES
    updates = batch // (schedule.update_every or 1)
    for sync in longer.synchronisations:
        reducing[list(sync.workers)] += updates * (sync.end_s - sync.start_s)
    busy = float((longer.busy_s - shorter.busy_s).sum())
    bubbles = max(0.0, 1.0 - busy / (computing * schedule.num_workers)) if computing else 0.0
    return max(computing, float(reducing.max(initial=0.0))), bubbles
