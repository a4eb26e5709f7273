"""The best width, depth and micro-batch size for a number of workers and a mini-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Layer, scaled
from memtrace.pipeline.plan import Prediction, Setting, plan
from memtrace.pipeline.schedules.registry import Choice


@dataclass(frozen=True)
class Configuration:
    """One way to use all workers: ``width`` pipelines of ``depth`` workers each."""

    width: int
    depth: int
    microbatch_size: int
    num_microbatches: int
    """Of one pipeline in one step."""
    batch: int
    prediction: Prediction

    @property
    def samples_per_s(self) -> float:
        """Throughput of all workers together."""
        return self.batch / self.prediction.step_time_s if self.prediction.step_time_s else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """The shape of one entry of "configurations" in ``memtrace plan pipeline --workers --json``."""
        return {
            "width": self.width,
            "stages": self.depth,
            "microbatch_size": self.microbatch_size,
            "microbatches": self.num_microbatches,
            "samples_per_s": self.samples_per_s,
            **self.prediction.as_dict(),
        }


def search(
    layers: Sequence[Layer],
    num_workers: int,
    batch: int,
    *,
    choices: Callable[[int, int], Iterable[Choice]],
    microbatch_sizes: Sequence[int],
    measured_size: int = 1,
    recompute: Iterable[bool] = (False,),
    setting: Setting | None = None,
) -> list[Configuration]:
    """Every (W, D, B) with W x D = ``num_workers`` that splits ``batch`` evenly, the best first.

    Args:
        layers: costs of a micro-batch of ``measured_size`` samples; time and activations of other sizes are
            taken in proportion, which flatters small ones.
        num_workers: all of them are used.
        batch: samples in one step over all workers.
        choices: the schedules to try, from the depth and the number of micro-batches.
        microbatch_sizes: samples in a micro-batch to try.
        measured_size: see ``layers``.
        recompute: with it, without it or both.
        setting: network, capacity and so on; its width is replaced.

    Those that fit come first, each group by step time. MemtraceError where nothing can be built at all.
    """
    base, tried = setting or Setting(), list(recompute)
    found: list[Configuration] = []
    reasons: list[str] = []
    for width, depth, size, count in _splits(num_workers, batch, microbatch_sizes):
        result = plan(
            scaled(layers, size / measured_size),
            depth,
            count,
            choices=choices(depth, count),
            recompute=tried,
            setting=dataclasses.replace(base, width=width),
        )
        found += [Configuration(width, depth, size, count, batch, one) for one in result.predictions]
        reasons += [reason for _, reason in result.skipped]
    if not found:
        why = reasons[0] if reasons else f"no micro-batch size of {list(microbatch_sizes)} splits {batch} evenly"
        raise MemtraceError(f"no pipeline over {num_workers} workers can be built: {why}")
    found.sort(key=_rank)
    return found


def _rank(configuration: Configuration) -> tuple[bool, float, int]:
    prediction = configuration.prediction
    return not prediction.fits, prediction.step_time_s, prediction.peak_bytes


def _splits(num_workers: int, batch: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(width, depth, micro-batch size, micro-batches a pipeline)."""
    for width in range(1, num_workers + 1):
        if num_workers % width == 0:
            for size in sizes:
                if batch % (width * size) == 0:
                    yield width, num_workers // width, size, batch // (width * size)


def largest_microbatches(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Chimera's rule: of each width and depth only the largest micro-batch that fits, the best of them
    first."""
    fitting = [one for one in configurations if one.prediction.fits]
    largest: dict[tuple[int, int], int] = {}
    for one in fitting:
        key = one.width, one.depth
        largest[key] = max(largest.get(key, 0), one.microbatch_size)
    kept = [one for one in fitting if one.microbatch_size == largest[one.width, one.depth]]
    return sorted(kept, key=_rank)
