"""Costs of every range of consecutive layers at once: lookup tables for the partition search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memtrace.pipeline.costs import (
    LARGEST_FIELDS,
    LAST_LAYER_FIELDS,
    SUMMED_FIELDS,
    WEIGHT_FIELDS,
    LayerCosts,
    backward_rises,
    layer_cost,
)
from memtrace.pipeline.memory_rules import COST_FIELDS
from memtrace.pipeline.peak_moments import PeakMoments

Floats = npt.NDArray[np.float64]


class LayerRangeCosts:
    """Tables of the costs of a stage made of layers i to j - 1, at ``[i, j]``.

    The tables are square, with one row and column more than there are layers. Entries with j <= i mean nothing.
    """

    def __init__(self, layers: Sequence[LayerCosts], *, recompute: bool) -> None:
        self.num_layers = len(layers)
        num_forwards = 2 if recompute else 1
        self.seconds = self._sums([num_forwards * layer.forward_s + layer.backward_s for layer in layers])
        """Seconds of forward and backward of one micro-batch, recomputation included."""
        self._tables = self._tables_of(layers)

    @property
    def fields(self) -> tuple[str, ...]:
        """The cost fields that are not zero everywhere."""
        return tuple(field for field in COST_FIELDS if self._tables[field].any())

    def moment_bytes(self, worker: PeakMoments, place: int) -> Floats:
        """``[moment, i, j]``: bytes of the stage ``worker.stages[place]`` at every moment."""
        levels = np.zeros((len(worker.counts), self.num_layers + 1, self.num_layers + 1))
        for column, field in enumerate(COST_FIELDS):
            counts = worker.counts[:, place, column]
            if counts.any():
                levels += counts[:, None, None] * self._tables[field]
        return levels

    def _tables_of(self, layers: Sequence[LayerCosts]) -> dict[str, Floats]:
        """One table for each of ``COST_FIELDS``, equal to what ``costs.combine_layers`` gives for the range."""

        def values(field: str) -> list[int]:
            return [layer_cost(layer, field) for layer in layers]

        tables = {field: self._sums(values(field)) for field in SUMMED_FIELDS}
        tables |= {field: self._sums(values(field)) + self._shared_copies(layers, field) for field in WEIGHT_FIELDS}
        tables |= {field: self._largest(values(field)) for field in LARGEST_FIELDS}
        tables |= {field: self._of_last_layer(values(field)) for field in LAST_LAYER_FIELDS}
        backward = self._backward_rises(layers, allocates_gradients=False)
        first_backward = self._backward_rises(layers, allocates_gradients=True)
        return tables | {
            # A stage receives the output of the layer before it.
            "input_bytes": tables["output_bytes"].T,
            "forward_temporary_bytes": self._forward_rises(layers),
            "backward_temporary_bytes": backward,
            "first_gradient_rise_bytes": np.maximum(0, first_backward - backward),
        }

    def _sums(self, values: Sequence[float]) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
        sums: Floats = total[None, :] - total[:, None]
        return sums

    def _of_last_layer(self, values: Sequence[float]) -> Floats:
        return np.tile(np.array([0, *values], dtype=np.float64), (self.num_layers + 1, 1))

    def _shared_copies(self, layers: Sequence[LayerCosts], field: str) -> Floats:
        """Bytes of shared weights whose first layer lies before the range."""
        copies = np.zeros((self.num_layers + 1, self.num_layers + 1))
        for begin in range(1, self.num_layers):
            sizes: dict[int, int] = {}
            for place, layer in enumerate(layers[begin:], begin):
                for weights in layer.shared:
                    sizes.setdefault(weights.number, getattr(weights, field))
                copies[begin, place + 1] = sum(sizes.values())
        return copies

    def _forward_rises(self, layers: Sequence[LayerCosts]) -> Floats:
        """Peak of the forward above what the range keeps at its end."""
        kept = np.concatenate([[0], np.cumsum([layer.activation_bytes for layer in layers])])
        highest = self._largest(kept[1:] + np.array([layer.forward_temporary_bytes for layer in layers]))
        rises: Floats = np.maximum(highest - kept[None, :], 0)
        return rises

    def _backward_rises(self, layers: Sequence[LayerCosts], *, allocates_gradients: bool) -> Floats:
        """Peak of the backward above what the range keeps at its start."""
        rises = np.zeros((self.num_layers + 1, self.num_layers + 1))
        for end in range(1, self.num_layers + 1):
            rises[:end, end] = [*backward_rises(layers[:end], allocates_gradients=allocates_gradients)][::-1]
        return rises

    def _largest(self, values: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
        """The largest of the values i to j - 1."""
        array = np.asarray(values)
        largest = np.zeros((self.num_layers + 1, self.num_layers + 1))
        for begin in range(self.num_layers):
            largest[begin, begin + 1 :] = np.maximum.accumulate(array[begin:])
        return largest
