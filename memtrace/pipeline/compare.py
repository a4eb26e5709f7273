"""A recorded pipeline beside what one process that trained the whole model predicts for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Layer, cut_costs, stage_costs
from memtrace.pipeline.from_trace import TraceCosts
from memtrace.pipeline.measured import Measured
from memtrace.pipeline.recorded import one_pipeline, recorded_schedule
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.memory import LAST_SENT, MemoryModel, WorkerMemory, memory
from memtrace.pipeline.simulation.simulate import Simulation, simulate
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


_KEPT: WeakKeyDictionary[Trace, Comparison] = WeakKeyDictionary()


@dataclass(frozen=True)
class WorkerComparison:
    """One worker. Bytes."""

    rank: int
    measured_peak_bytes: int
    predicted_peak_bytes: int
    measured_in_flight: int
    predicted_in_flight: int

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found."""

    workers: tuple[WorkerComparison, ...]
    simulation: Simulation
    memories: Sequence[WorkerMemory]

    @property
    def largest_error(self) -> float:
        """The error of the worker that was predicted worst, without its sign."""
        return max(abs(worker.error) for worker in self.workers)

    def as_dict(self) -> dict[str, Any]:
        """The entry "predicted" of ``memtrace pipeline --json``."""
        return {
            "workers": [{**asdict(worker), "error": worker.error} for worker in self.workers],
            "largest_error": self.largest_error,
            "step_time_s": self.simulation.step_time_s,
            "bubble_ratio": self.simulation.bubble_ratio,
        }

    def table(self) -> pd.DataFrame:
        """One row a worker: the fields of ``WorkerComparison`` and error."""
        import pandas as pd

        table: pd.DataFrame = pd.DataFrame(self.as_dict()["workers"])
        return table


def compare(
    found: Measured, costs: TraceCosts, schedule: Schedule | None = None, cut: Sequence[int] | None = None
) -> Comparison:
    """Predict every worker's peak from the layers of one process and set it beside the recorded one.

    Args:
        found: the recorded pipeline.
        costs: of the trace of one process that trained the whole model on one micro-batch a step.
        schedule: what the pipeline was to run; without it the order of actions is the recorded one.
        cut: the first layer of every stage; without it, where the parameters of the stages say it is.
    """
    planned = schedule or recorded_schedule(found.ranks)
    places = [one.places for one in one_pipeline(found.ranks)]
    if planned.num_workers != len(places):
        raise MemtraceError(f"{planned.name} has {planned.num_workers} workers, the trace {len(places)}")
    first_layers = list(cut) if cut is not None else recorded_cut(found, costs.layers)
    if len(first_layers) != planned.num_stages:
        raise MemtraceError(f"the cut has {len(first_layers)} stages, {planned.name} has {planned.num_stages}")
    if first_layers != sorted({0, *first_layers}) or first_layers[-1] >= len(costs.layers):
        raise MemtraceError(f"the cut {first_layers} must begin with 0 and rise, below the {len(costs.layers)} layers")
    simulation = simulate(planned, cut_costs(costs.layers, first_layers))
    memories = memory(simulation, _as_run(costs.model, found))
    predicted = [memories[places.index(one.places)] for one in found.ranks]
    workers = tuple(
        WorkerComparison(
            measured.rank, measured.peak_bytes, one.peak_bytes, measured.in_flight_peak, one.in_flight_peak
        )
        for measured, one in zip(found.workers, predicted, strict=True)
    )
    return Comparison(workers, simulation, memories)


def keep_comparison(trace: Trace, comparison: Comparison) -> None:
    """Lay a comparison beside the trace that it is of, for the page."""
    _KEPT[trace] = comparison


def kept_comparison(trace: Trace) -> Comparison | None:
    """What ``keep_comparison`` laid there; None where nothing was."""
    return _KEPT.get(trace)


def _as_run(model: MemoryModel, found: Measured) -> MemoryModel:
    """The memory model with what torch's stages keep besides, where torch ran the pipeline."""
    if found.torch_schedule is None:
        return model
    sent: Literal["last", "all"] = "last" if found.torch_schedule in LAST_SENT else "all"
    return replace(model, receive_buffers=True, sent=sent, outputs=found.outputs)


def recorded_cut(found: Measured, layers: Sequence[Layer]) -> list[int]:
    """The first layer of every stage, such that each stage has the parameters that were recorded of it.

    MemtraceError where no run of layers has them: then it was another model, or the cut must be told.
    """
    wanted = {stage.stage: stage.parameter_bytes for stage in found.stages}
    first_layers, layer = [], 0
    for stage in range(len(wanted)):
        first_layers.append(layer)
        held, begin = 0, layer
        while layer < len(layers) and (layer == begin or held < (wanted.get(stage) or 0)):
            layer += 1
            held = stage_costs(layers[begin:layer]).parameter_bytes
        if held != wanted.get(stage):
            raise MemtraceError(
                f"no run of layers from {begin} on has the {wanted.get(stage)} bytes of parameters of stage {stage}: "
                "give the cut, and the trace of the same model"
            )
    # Layers without parameters behind the last that has some belong to the last stage.
    if any(one.parameter_bytes for one in layers[layer:]):
        raise MemtraceError("the model has more layers with parameters than the recorded stages")
    return first_layers
