"""Search for the best data-parallel degree, pipeline depth and micro-batch size for a number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memtrace.errors import MemtraceError
from memtrace.pipeline.microbatch_costs import MicrobatchCosts
from memtrace.pipeline.plan import PlanSettings, SchedulePrediction, plan_pipeline
from memtrace.pipeline.schedules.registry import ScheduleChoice


@dataclass(frozen=True)
class PipelineConfiguration:
    """One way to use all workers: ``data_parallel`` pipelines of ``pipeline_workers`` workers each."""

    data_parallel: int
    pipeline_workers: int
    microbatch_size: int
    """Samples per micro-batch."""
    num_microbatches: int
    """Micro-batches of one pipeline per step."""
    batch_size: int
    """Samples per step over all workers."""
    prediction: SchedulePrediction


def search_configurations(
    costs: MicrobatchCosts,
    num_workers: int,
    batch_size: int,
    *,
    choices: Callable[[int, int], Iterable[ScheduleChoice]],
    microbatch_sizes: Sequence[int],
    recompute: Iterable[bool] = (False,),
    settings: PlanSettings | None = None,
) -> list[PipelineConfiguration]:
    """Try every combination of degree, depth and micro-batch size that uses all workers and divides the batch.

    Args:
        costs: costs of the model's layers by micro-batch size.
        num_workers: number of workers; all of them are used.
        batch_size: samples per step over all workers.
        choices: the schedules to try, given the depth and the number of micro-batches.
        microbatch_sizes: the micro-batch sizes to try, in samples.
        recompute: whether to try recomputation, no recomputation, or both.
        settings: hardware and preferences; ``data_parallel`` is ignored.

    Returns:
        Configurations that fit the capacity first, each group by step time.

    Raises:
        MemtraceError: no configuration can be built.
    """
    base, recompute_options = settings or PlanSettings(), list(recompute)
    configurations: list[PipelineConfiguration] = []
    reasons: list[str] = []
    for degree, depth, size, count in _combinations(num_workers, batch_size, microbatch_sizes):
        plan = plan_pipeline(
            costs.at(size),
            depth,
            count,
            choices=choices(depth, count),
            recompute=recompute_options,
            settings=dataclasses.replace(base, data_parallel=degree),
        )
        configurations += [
            PipelineConfiguration(degree, depth, size, count, batch_size, prediction) for prediction in plan.predictions
        ]
        reasons += [skipped.reason for skipped in plan.skipped]
    if not configurations:
        sizes = ", ".join(map(str, microbatch_sizes))
        reason = reasons[0] if reasons else f"a batch of {batch_size} does not divide into micro-batches of {sizes}"
        raise MemtraceError(f"no pipeline over {num_workers} workers can be built: {reason}")
    return sorted(configurations, key=lambda configuration: configuration.prediction.rank_key)


def _combinations(
    num_workers: int, batch_size: int, microbatch_sizes: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """(data-parallel degree, depth, micro-batch size, micro-batches per pipeline)."""
    for degree in range(1, num_workers + 1):
        if num_workers % degree == 0:
            for size in microbatch_sizes:
                if batch_size % (degree * size) == 0:
                    yield degree, num_workers // degree, size, batch_size // (degree * size)


def largest_microbatches(configurations: Iterable[PipelineConfiguration]) -> list[PipelineConfiguration]:
    """Apply Chimera's rule: of every degree and depth keep the largest micro-batch that fits, best step time first.

    The rule needs no model of how efficient small micro-batches are. Every schedule has a largest micro-batch of its
    own. As in the measurements of the paper it leaves at least as many micro-batches as stages (N >= D) where that is
    possible, and recomputes only where nothing fits without.

    Source: Chimera (Li and Hoefler, SC 2021), section 3.4 and figure 13.
    """
    fitting = [configuration for configuration in configurations if configuration.prediction.fits]
    largest: dict[Any, PipelineConfiguration] = {}
    for configuration in fitting:
        key = configuration.data_parallel, configuration.pipeline_workers, str(configuration.prediction.choice)
        largest[key] = max(largest.get(key, configuration), configuration, key=_rule_preference)
    return sorted(largest.values(), key=lambda configuration: configuration.prediction.rank_key)


def _rule_preference(configuration: PipelineConfiguration) -> tuple[bool, bool, int]:
    keeps_stages_busy = configuration.num_microbatches >= configuration.pipeline_workers
    return keeps_stages_busy, not configuration.prediction.recompute, configuration.microbatch_size
