"""What the ranking of a pipeline plan rests on: costs that were not given, and costs that were not measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from memtrace.pipeline.costs import Network
from memtrace.pipeline.microbatch_costs import MicrobatchCosts
from memtrace.pipeline.plan import PlanSettings, SchedulePrediction, step_time_with
from memtrace.pipeline.simulation.all_reduce import AFTER
from memtrace.units import format_bytes, format_share

SLOWEST_BYTES_PER_S: Final = 1.0
FASTEST_BYTES_PER_S: Final = 1e13
"""Range of bandwidths that ``break_even_bandwidth`` searches."""
NUM_BISECTIONS: Final = 20

Ranked = tuple[SchedulePrediction, int]
"""A prediction and its data-parallel degree."""


def plan_assumptions(
    ranked: Sequence[Ranked], settings: PlanSettings, costs: MicrobatchCosts, sizes: Iterable[int] = ()
) -> Iterator[str]:
    """What the ranking rests on, one sentence or two for each assumption.

    Args:
        ranked: the predictions, best first.
        settings: the settings of the plan.
        costs: the layer costs by micro-batch size.
        sizes: the micro-batch sizes that the predictions have.
    """
    yield from _network_assumptions(ranked, settings)
    yield from _size_assumptions(costs, sizes)
    if any(action.half is not None for prediction, _ in ranked for action in prediction.schedule.rows[0]):
        yield (
            "Chimera with method=halving is simulated with half the time of a micro-batch for half of its samples. "
            "Small micro-batches are less efficient than that."
        )


def _network_assumptions(ranked: Sequence[Ranked], settings: PlanSettings) -> Iterator[str]:
    reducing = [prediction for prediction, _ in ranked if prediction.reduces_gradients]
    network = settings.network
    if network.seconds_per_byte:
        if reducing and settings.sync != AFTER:
            yield (
                "An all-reduce of gradients beside computation takes "
                f"{format_share(network.all_reduce_share)} of a worker's speed from it (--all-reduce-share), which is "
                "an assumption about the workers."
            )
        return
    if reducing:
        copies = [each.choice.family.name for each in reducing if len(each.schedule.placement) > 1]
        names = f" ({', '.join(dict.fromkeys(copies))})" if copies else ""
        text = (
            "No --bandwidth was given, so the all-reduce of gradients is free. The ranking favors schedules with "
            f"several copies of the model{names} and high data-parallel degrees."
        )
        yield text + _describe_break_even(ranked, settings)
    elif any(prediction.schedule.num_workers > 1 for prediction, _ in ranked):
        yield (
            "No --bandwidth was given, so messages between workers are free. The ranking favors deep pipelines and "
            "several stages per worker."
        )


def _describe_break_even(ranked: Sequence[Ranked], settings: PlanSettings) -> str:
    """How fast the network must be for the first of the ranking, if it reduces gradients and another one does not."""
    best, degree = ranked[0]
    rival = next((each for each in ranked if each[0].fits == best.fits and not each[0].reduces_gradients), None)
    if not best.reduces_gradients or rival is None:
        return ""
    bandwidth = break_even_bandwidth((best, degree), rival, settings)
    if bandwidth is None:
        return ""
    return (
        f" {best.choice} is faster than {rival[0].choice}, which reduces none, only above "
        f"{format_bytes(round(bandwidth))} per second between workers."
    )


def break_even_bandwidth(best: Ranked, rival: Ranked, settings: PlanSettings) -> float | None:
    """The bandwidth in bytes per second from which on ``best`` is at least as fast as ``rival``, within 1 %.

    None where one of the two is faster at every bandwidth from ``SLOWEST_BYTES_PER_S`` to ``FASTEST_BYTES_PER_S``.
    """

    def is_faster(log_bandwidth: float) -> bool:
        network = Network(**(dataclasses.asdict(settings.network) | {"seconds_per_byte": math.exp(-log_bandwidth)}))
        times = [
            step_time_with(prediction, dataclasses.replace(settings, network=network, data_parallel=degree))
            for prediction, degree in (best, rival)
        ]
        return times[0] <= times[1]

    low, high = math.log(SLOWEST_BYTES_PER_S), math.log(FASTEST_BYTES_PER_S)
    if is_faster(low) or not is_faster(high):
        return None
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return math.exp(high)


def _size_assumptions(costs: MicrobatchCosts, sizes: Iterable[int]) -> Iterator[str]:
    by_basis: dict[str, list[int]] = {}
    for size in sorted(set(sizes)):
        by_basis.setdefault(costs.basis(size), []).append(size)
    measured = ", ".join(map(str, costs.sizes))
    if "proportional" in by_basis:
        yield (
            f"Times and activations of micro-batches of {_list(by_basis['proportional'])} samples are taken in "
            f"proportion to those of the measured {measured}. Small micro-batches look faster than they are; traces of "
            "several micro-batch sizes show how much."
        )
    if "extrapolated" in by_basis:
        yield (
            f"Costs of micro-batches of {_list(by_basis['extrapolated'])} samples are extrapolated from the measured "
            f"sizes {measured}."
        )


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
