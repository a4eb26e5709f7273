"""Costs of every run of layers at once: what the search for a cut looks up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memtrace.pipeline.costs import Layer, backward_rises
from memtrace.pipeline.profile import PARTS, WorkerProfile

Floats = npt.NDArray[np.float64]


class RangeCosts:
    """Square tables, one row and column more than layers: entry [i, j] is of the stage of layers i to j - 1.

    Entries with j <= i mean nothing.
    """

    def __init__(self, layers: Sequence[Layer], *, recompute: bool) -> None:
        self.num_layers = len(layers)
        again = 2 if recompute else 1
        self.seconds = self._sums([again * layer.forward_s + layer.backward_s for layer in layers])
        """Forward and backward seconds of one micro-batch, recomputation included."""
        self._parts = self._of_parts(layers)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that have bytes."""
        return tuple(name for name in PARTS if self._parts[name].any())

    def levels(self, worker: WorkerProfile, place: int) -> Floats:
        """Bytes that the stage at ``place`` of a worker's stages brings to each moment: entry [moment, i, j]."""
        levels = np.zeros((len(worker.moments), self.num_layers + 1, self.num_layers + 1))
        for number, name in enumerate(PARTS):
            counts = worker.moments[:, place, number]
            if counts.any():
                levels += counts[:, None, None] * self._parts[name]
        return levels

    def _of_parts(self, layers: Sequence[Layer]) -> dict[str, Floats]:
        """The tables by the names of PARTS, of StageCosts' fields."""

        def sums(field: str) -> Floats:
            return self._sums([getattr(layer, field) for layer in layers]) + self._copies(layers, field)

        def per_end(values: Sequence[int]) -> Floats:
            return np.tile(np.array([0, *values], dtype=np.float64), (len(values) + 1, 1))

        kept = [layer.activation_bytes for layer in layers]
        of_weights = [
            layer.activation_bytes if layer.weight_activation_bytes is None else layer.weight_activation_bytes
            for layer in layers
        ]
        outputs = per_end([layer.output_bytes for layer in layers])
        of_inputs = [
            layer.backward_temporary_bytes
            if layer.input_backward_temporary_bytes is None
            else layer.input_backward_temporary_bytes
            for layer in layers
        ]
        backward, first = (self._rises(layers, fresh_gradients=fresh) for fresh in (False, True))
        return {
            "activation": self._sums(kept),
            "weight_activation": self._sums(of_weights),
            "input": outputs.T,
            "unsaved_output": per_end([layer.unsaved_output_bytes for layer in layers]),
            "output": outputs,
            "forward_temporary": self._forward_excess(layers),
            "backward_temporary": backward,
            "input_backward_temporary": self._largest(of_inputs),
            "first_gradients": np.maximum(0, first - backward),
            "parameter": sums("parameter_bytes"),
            "gradient": sums("gradient_bytes"),
            "optimizer": sums("optimizer_bytes"),
            "optimizer_temporary": sums("optimizer_temporary_bytes"),
            "largest_optimizer_temporary": self._largest([one.largest_optimizer_temporary_bytes for one in layers]),
        }

    def _sums(self, values: Sequence[float]) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
        sums: Floats = total[None, :] - total[:, None]
        return sums

    def _copies(self, layers: Sequence[Layer], field: str) -> Floats:
        """What stages hold of shared weights whose first user lies before them."""
        copies = np.zeros((self.num_layers + 1, self.num_layers + 1))
        for begin in range(1, self.num_layers):
            found: dict[int, int] = {}
            for place, layer in enumerate(layers[begin:], begin):
                for one in layer.shared:
                    found.setdefault(one.number, getattr(one, field))
                copies[begin, place + 1] = sum(found.values())
        return copies

    def _forward_excess(self, layers: Sequence[Layer]) -> Floats:
        """How far a forward rises above what is kept at its end."""
        kept = np.concatenate([[0], np.cumsum([layer.activation_bytes for layer in layers])])
        highest = self._running(kept[1:] + np.array([layer.forward_temporary_bytes for layer in layers]))
        excess: Floats = np.maximum(highest - kept[None, :], 0)
        return excess

    def _rises(self, layers: Sequence[Layer], *, fresh_gradients: bool) -> Floats:
        """How far a backward rises above what is kept at its start."""
        rises = np.zeros((self.num_layers + 1, self.num_layers + 1))
        for end in range(1, self.num_layers + 1):
            rises[:end, end] = [*backward_rises(layers[:end], fresh_gradients=fresh_gradients)][::-1]
        return rises

    def _largest(self, values: Sequence[int]) -> Floats:
        return self._running(np.array(values))

    def _running(self, values: npt.NDArray[np.int64]) -> Floats:
        """The largest of the values i to j - 1; 0 where there are none."""
        size = self.num_layers + 1
        largest = np.zeros((size, size))
        for begin in range(self.num_layers):
            largest[begin, begin + 1 :] = np.maximum.accumulate(values[begin:])
        return largest
