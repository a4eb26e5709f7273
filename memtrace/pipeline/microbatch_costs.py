"""Layer costs as a function of the micro-batch size, from one or several measurements.

With one measurement times and activations are taken in proportion to the size, which makes small micro-batches look
faster than they are: kernels have a fixed cost, and small ones use less of a device. With several measurements every
cost is interpolated between the two nearest sizes, and extrapolated along the line through the two sizes at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import (
    PROPORTIONAL_BYTES,
    PROPORTIONAL_SECONDS,
    LayerCosts,
    scale_microbatch,
)

Basis = Literal["measured", "interpolated", "extrapolated", "proportional"]
"""Where the costs of a micro-batch size come from: a measurement of this size, the two measurements around it, the two
nearest ones on one side of it, or a single measurement of another size."""
_Measurement = tuple[str, int, Sequence[LayerCosts]]
MAX_BATCH_DEVIATION: Final = 0.05
"""Largest relative difference between the bytes per sample in the batches of two measurements."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchEfficiency:
    """Costs per sample of the whole model for one micro-batch size."""

    microbatch_size: int
    seconds_per_sample: float
    """Forward and backward of all layers."""
    efficiency: float | None
    """Samples per second relative to the most efficient of the listed sizes; None without times."""
    activation_bytes_per_sample: float
    basis: Basis


@dataclass(frozen=True)
class MicrobatchCosts:
    """The layers of a model, measured for one or several micro-batch sizes (samples)."""

    sizes: tuple[int, ...]
    """Ascending."""
    layers: tuple[Sequence[LayerCosts], ...]
    """The layers for each of ``sizes``."""

    def basis(self, size: int) -> Basis:
        """Where the costs of a micro-batch of ``size`` samples come from."""
        if size in self.sizes:
            return "measured"
        if len(self.sizes) == 1:
            return "proportional"
        return "interpolated" if self.sizes[0] < size < self.sizes[-1] else "extrapolated"

    def at(self, size: int) -> list[LayerCosts]:
        """The layers for a micro-batch of ``size`` samples."""
        if size in self.sizes:
            return list(self.layers[self.sizes.index(size)])
        if len(self.sizes) == 1:
            return scale_microbatch(self.layers[0], size / self.sizes[0])
        above = next((place for place, measured in enumerate(self.sizes) if measured > size), len(self.sizes) - 1)
        place = max(above, 1)
        (smaller, larger), bounds = self.layers[place - 1 : place + 1], self.sizes[place - 1 : place + 1]
        return [_on_line(low, high, bounds, size) for low, high in zip(smaller, larger, strict=True)]

    def efficiency(self, sizes: Iterable[int] = ()) -> tuple[MicrobatchEfficiency, ...]:
        """Costs per sample for the measured and the given sizes, ascending."""
        shown = sorted({*self.sizes, *sizes})
        costs = [self.at(size) for size in shown]
        seconds = [
            math.fsum(layer.forward_s + layer.backward_s for layer in layers) / size
            for layers, size in zip(costs, shown, strict=True)
        ]
        fastest = min((value for value in seconds if value), default=None)
        return tuple(
            MicrobatchEfficiency(
                microbatch_size=size,
                seconds_per_sample=value,
                efficiency=None if fastest is None or not value else fastest / value,
                activation_bytes_per_sample=sum(layer.activation_bytes for layer in layers) / size,
                basis=self.basis(size),
            )
            for size, value, layers in zip(shown, seconds, costs, strict=True)
        )


def combine_microbatch_sizes(measurements: Sequence[_Measurement]) -> MicrobatchCosts:
    """Combine measurements of one model with different micro-batch sizes.

    Args:
        measurements: the name of the file, the samples per micro-batch, and the layers of each measurement.

    Raises:
        MemtraceError: two measurements have the same size, or are of different models.
    """
    ordered = sorted(measurements, key=lambda measurement: measurement[1])
    for earlier, later in pairwise(ordered):
        (first_name, first_size, first_layers), (name, size, layers) = earlier, later
        if size == first_size:
            raise MemtraceError(
                f"{first_name} and {name} both have micro-batches of {size} samples. Give one of them only."
            )
        if _state_of(layers) != _state_of(first_layers):
            raise MemtraceError(
                f"{first_name} and {name} have different layers or parameters. Give traces of one model that differ in "
                "the micro-batch size only."
            )
        _check_batches(earlier, later)
    return MicrobatchCosts(tuple(size for _, size, _ in ordered), tuple(layers for _, _, layers in ordered))


def _state_of(layers: Sequence[LayerCosts]) -> list[tuple[str, int]]:
    return [(layer.name, layer.parameter_bytes) for layer in layers]


def _check_batches(first: _Measurement, second: _Measurement) -> None:
    """Raise an error if the batches that two measurements read do not have the sizes that the user gave."""
    per_sample = [layers[0].batch_bytes / size for _, size, layers in (first, second)]
    if min(per_sample) and max(per_sample) / min(per_sample) > 1 + MAX_BATCH_DEVIATION:
        actual = first[1] * second[2][0].batch_bytes / first[2][0].batch_bytes
        raise MemtraceError(
            f"{second[0]}: given as micro-batches of {second[1]} samples, but its batch is as large as {actual:.3g} "
            f"samples of {first[0]}. Give --measured-size in the order of the traces, for samples of one length."
        )


def _on_line(low: LayerCosts, high: LayerCosts, sizes: Sequence[int], size: int) -> LayerCosts:
    """A layer on the line through two measurements.

    Beyond the larger size no cost falls; below the smaller one a cost neither grows nor falls faster than in proportion
    to the size. Noise between two measurements is thus not extrapolated to times of 0 or below.
    """
    share = (size - sizes[0]) / (sizes[1] - sizes[0])
    changes: dict[str, Any] = {}
    for name in (*PROPORTIONAL_SECONDS, *PROPORTIONAL_BYTES, "first_backward_temporary_bytes"):
        before, after = getattr(low, name), getattr(high, name)
        if before is None or after is None:
            changes[name] = None
            continue
        value = before + share * (after - before)
        if share > 1:
            value = max(value, after)
        elif share < 0:
            value = min(max(value, before * size / sizes[0]), before)
        changes[name] = value if name in PROPORTIONAL_SECONDS else math.ceil(round(value, 6))
    return dataclasses.replace(low, **changes)
