"""Cuts a model into shards of consecutive layers that fit a budget, from recorded costs of its layers.

Hydra's partitioner finds the cuts by running layers until the device is out of memory. Here the memory that a shard
needs follows from the recorded layers, so that nothing has to be tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import LayerCosts, StageCosts, combine_layers
from memtrace.units import format_bytes

LAYER_WORK_S: Final = (0.25e-3, 0.25e-3, 0.1e-3)
"""What the interpreter takes for a layer in forward, backward and update to move it and to repeat its forward. Measured
with torch 2.13 on an AMD EPYC; the device may compute at the same time, the interpreter does not."""
PARAMETER_WORK_S: Final = (0.03e-3, 0.08e-3, 0.06e-3)
"""The same for each parameter of a layer."""


@dataclass(frozen=True)
class SpillShard:
    """A shard: consecutive layers whose state is on the device at the same time. Bytes; times are in seconds."""

    layers: tuple[str, ...]
    """Qualified names of the modules."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    """Boundary activations: the input of the shard, which waits in host memory between forward and backward."""
    checkpoint_bytes: int
    """Inputs of all layers of the shard, from which backward repeats them; without recomputation 0."""
    forward_peak_bytes: int
    """Peak of the device in the forward of the shard, including everything that is never spilled."""
    backward_peak_bytes: int
    update_peak_bytes: int
    """Peak while the optimizer updates the shard."""
    forward_s: float
    backward_s: float
    """Including the repeated forward. All times include what the interpreter takes to move the shard."""
    update_s: float

    @property
    def peak_bytes(self) -> int:
        """The highest of the three peaks."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes, self.update_peak_bytes)

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class SpilledModel:
    """What the cutting of a model starts from."""

    layers: tuple[LayerCosts, ...]
    resident_bytes: int
    """Bytes of the device that are never spilled: batch, buffers, parameters outside the layers."""
    update_s: float
    """Duration of the optimizer step."""
    recompute: bool
    num_parameters: int = 0
    """Parameter tensors of all layers; 0: unknown, or the work of the interpreter does not count."""

    def make_shard(self, begin: int, end: int) -> SpillShard:
        """Return the shard of the layers ``begin`` to ``end`` - 1."""
        layers = self.layers
        costs = combine_layers(layers[begin:end], layers[begin - 1].output_bytes if begin else 0)
        inputs = [layers[place - 1].output_bytes if place else 0 for place in range(begin, end)]
        forward, backward = self._peaks_of_layers(begin, end)
        fixed = self.resident_bytes + costs.parameter_bytes
        total = max(sum(layer.parameter_bytes for layer in layers), 1)
        work_s = self._work_s(end - begin)
        return SpillShard(
            layers=tuple(layer.name for layer in layers[begin:end]),
            parameter_bytes=costs.parameter_bytes,
            gradient_bytes=costs.gradient_bytes,
            optimizer_bytes=costs.optimizer_bytes,
            input_bytes=inputs[0],
            checkpoint_bytes=sum(inputs) if self.recompute else 0,
            forward_peak_bytes=fixed + forward,
            backward_peak_bytes=fixed + backward,
            update_peak_bytes=fixed + _update_bytes(costs),
            forward_s=costs.forward_s + work_s[0],
            backward_s=costs.backward_s + (costs.forward_s if self.recompute else 0.0) + work_s[1],
            update_s=self.update_s * sum(layer.parameter_bytes for layer in layers[begin:end]) / total + work_s[2],
        )

    def _work_s(self, num_layers: int) -> tuple[float, ...]:
        """Return the time that the interpreter takes to move layers: in forward, backward and update."""
        if not self.num_parameters:
            return 0.0, 0.0, 0.0
        parameters = self.num_parameters / len(self.layers)
        phases = zip(LAYER_WORK_S, PARAMETER_WORK_S, strict=True)
        return tuple(num_layers * (layer_s + parameters * parameter_s) for layer_s, parameter_s in phases)

    def _peaks_of_layers(self, begin: int, end: int) -> tuple[int, int]:
        """Return the peaks of the layers in forward and backward, beside the parameters of the shard."""
        layers = self.layers
        kept = 0 if self.recompute else sum(layer.activation_bytes for layer in layers[:begin])
        # Gradients of weights that layers share grow during the whole backward.
        shared = sum(weights.gradient_bytes for weights in {w.number: w for x in layers for w in x.shared}.values())
        later_gradients = [
            sum(layer.gradient_bytes for layer in layers[place + 1 : end]) for place in range(begin, end)
        ]
        forward, backward = [], []
        for place, later in zip(range(begin, end), later_gradients, strict=True):
            layer = layers[place]
            received = layers[place - 1].output_bytes if place else 0
            below = kept + layer.activation_bytes + (received if self.recompute else 0)
            rise = layer.first_backward_temporary_bytes
            if rise is None:
                rise = layer.backward_temporary_bytes + layer.gradient_bytes
            if self.recompute:
                rise = max(rise, layer.forward_temporary_bytes)
            forward.append(below + layer.forward_temporary_bytes)
            backward.append(below + rise + later + shared)
            kept += 0 if self.recompute else layer.activation_bytes
        return max(forward), max(backward)


def _update_bytes(costs: StageCosts) -> int:
    temporary = costs.optimizer_temporary_bytes + costs.largest_optimizer_temporary_bytes
    return costs.gradient_bytes + costs.optimizer_bytes + temporary


def cut_shards(model: SpilledModel, capacity_bytes: int) -> tuple[SpillShard, ...]:
    """Return shards whose peak fits a capacity, each as long as possible.

    Args:
        model: The model.
        capacity_bytes: Bytes of the device for the shard that computes: the budget less the buffer.

    Raises:
        MemtraceError: A single layer does not fit.
    """
    shards: list[SpillShard] = []
    begin = 0
    while begin < len(model.layers):
        end = begin + 1
        shard = model.make_shard(begin, end)
        if shard.peak_bytes > capacity_bytes:
            raise MemtraceError(
                f"the layer {shard.layers[0]} alone needs {format_bytes(shard.peak_bytes)} on the device, and "
                f"{format_bytes(capacity_bytes)} are left for it. Raise the budget, make the buffer or the batch "
                "smaller, or choose smaller layers (--layer 'PATTERN')."
            )
        while end < len(model.layers):
            longer = model.make_shard(begin, end + 1)
            if longer.peak_bytes > capacity_bytes:
                break
            shard, end = longer, end + 1
        shards.append(shard)
        begin = end
    return tuple(shards)
