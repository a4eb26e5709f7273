"""Costs of every run of layers at once: what the search for a cut looks up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memtrace.planning.pipeline.costs import Layer
from memtrace.planning.pipeline.profile import WorkerProfile

Floats = npt.NDArray[np.float64]


class RangeCosts:
    """Square tables, one row and column more than layers: entry [i, j] is of the stage of layers i to j - 1.

    Entries with j <= i mean nothing.
    """

    def __init__(self, layers: Sequence[Layer], *, recompute: bool, boundaries: bool) -> None:
        self.num_layers = len(layers)
        again = 2 if recompute else 1
        self._seconds = self._sums([again * layer.forward_s + layer.backward_s for layer in layers])
        activation = self._sums([layer.activation_bytes for layer in layers])
        received = np.array([0, *(layer.output_bytes for layer in layers)], dtype=np.float64)[:, None]
        inputs = np.broadcast_to(received, activation.shape)
        self._weight_kept = self._sums(
            [
                layer.activation_bytes if layer.weight_activation_bytes is None else layer.weight_activation_bytes
                for layer in layers
            ]
        )
        unsaved = np.array([0, *(layer.unsaved_output_bytes for layer in layers)], dtype=np.float64)[None, :]
        self._kept = inputs if recompute else activation + (inputs + unsaved if boundaries else 0)
        self._parameters = self._sums([layer.parameter_bytes for layer in layers])
        self._other_state = self._sums([layer.gradient_bytes + layer.optimizer_bytes for layer in layers])
        self._temporary = self._excess(layers) + (activation if recompute else 0)

    def _sums(self, values: Sequence[float]) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
        sums: Floats = total[None, :] - total[:, None]
        return sums

    def _excess(self, layers: Sequence[Layer]) -> Floats:
        """How far a forward or a backward rises above the activations kept at its end or start."""
        kept = np.concatenate([[0], np.cumsum([layer.activation_bytes for layer in layers])])
        forward = np.array([layer.forward_temporary_bytes for layer in layers])
        backward = np.array([layer.backward_temporary_bytes + layer.largest_gradient_bytes for layer in layers])
        highest = kept[1:] + np.maximum(forward, backward)
        size = self.num_layers + 1
        excess = np.zeros((size, size))
        for begin in range(self.num_layers):
            excess[begin, begin + 1 :] = np.maximum.accumulate(highest[begin:]) - kept[begin + 1 :]
        return np.maximum(excess, 0)

    def seconds(self) -> Floats:
        """Forward and backward seconds of one micro-batch, recomputation included."""
        return self._seconds

    def _state(self, worker: WorkerProfile, index: int, at: Any = ...) -> Floats:
        state: Floats = worker.copies[index] * self._parameters[at] + worker.replicas[index] * self._other_state[at]
        return state

    def _activations(self, worker: WorkerProfile, index: int, load: Floats, at: Any = ...) -> Floats:
        kept: Floats = load[index] * self._kept[at] + load[len(worker.stages) + index] * self._weight_kept[at]
        return kept

    def peak(self, worker: WorkerProfile, index: int) -> Floats:
        """Peak bytes that the ``index``-th stage of ``worker`` brings, on its own."""
        loads = [self._activations(worker, index, load) for load in worker.load]
        peak: Floats = self._state(worker, index) + np.maximum.reduce(loads) + self._temporary
        return peak

    def pair_peak(self, worker: WorkerProfile, begin: int, end: int) -> Floats:
        """Peak bytes of a worker with two stages, layers [begin, i) and [j, end), for i and j from begin + 1 to
        end - 1."""
        inner = slice(begin + 1, end)
        left, right = (begin, inner), (inner, end)
        loads = [
            self._activations(worker, 0, load, left)[:, None] + self._activations(worker, 1, load, right)[None, :]
            for load in worker.load
        ]
        state = self._state(worker, 0, left)[:, None] + self._state(worker, 1, right)[None, :]
        temporary = np.maximum(self._temporary[left][:, None], self._temporary[right][None, :])
        peak: Floats = state + np.maximum.reduce(loads) + temporary
        return peak
