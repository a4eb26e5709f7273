"""Parameters, gradients and optimizer state of every layer, measured in a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, phase_rows, rows_at, step_rows
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.format.arrays import Array
from memtrace.pipeline.costs import SharedWeights
from memtrace.pipeline.layer_passes import MicrobatchPass
from memtrace.trace import Trace


@dataclass(frozen=True)
class ModelState:
    """Bytes of each layer; temporaries of the optimizer are distributed to layers by their parameters."""

    parameter_bytes: Array
    gradient_bytes: Array
    largest_gradient_bytes: Array
    optimizer_bytes: Array
    optimizer_temporary_bytes: Array
    """Temporaries of an optimizer that updates all parameters at once, else 0."""
    largest_optimizer_temporary_bytes: Array
    """Temporaries of an optimizer that updates one parameter at a time, else 0."""
    fresh_gradients: bool
    """Whether the step allocated its gradients."""
    shared_parameters: dict[int, tuple[int, ...]]
    """Blocks of parameters that several layers use -> these layers, ascending."""
    shared: dict[tuple[int, ...], SharedWeights]
    """Layers that share weights -> the bytes of these weights, which count for the first of the layers."""

    def shared_of(self, layer: int) -> tuple[SharedWeights, ...]:
        """The shared weights of one layer, as in ``LayerCosts.shared``."""
        return tuple(
            weights if layer > users[0] else SharedWeights(weights.number)
            for users, weights in self.shared.items()
            if layer in users
        )

    def allocated_gradient_bytes(self) -> Array:
        """Gradients by the layer whose backward allocates them: the last layer that uses the parameter."""
        allocated: Array = self.gradient_bytes.copy()
        for users, weights in self.shared.items():
            allocated[users[0]] -= weights.gradient_bytes
            allocated[users[-1]] += weights.gradient_bytes
        return allocated


def measure_model_state(trace: Trace, last: MicrobatchPass) -> ModelState:
    """Measure the state of every layer at the end of the pass's step."""
    of_rank = blocks(trace)
    count = len(last.names)
    begin, backward, end = (
        int(row)
        for row in rows_at(trace, np.array([last.starts_ns[0], last.backward_start_ns, last.backward_end_ns + 1]))
    )
    readers = _first_readers(trace, last, begin, backward, len(of_rank))
    parameter = np.flatnonzero((of_rank.category == CATEGORY["parameter"]) & _live(of_rank, backward))
    read = parameter[readers[parameter] >= 0]
    layer_of_name = _LayerByName(
        {trace.name(int(of_rank.name[block])): int(readers[block]) for block in read}, last.names
    )

    def layers_of(chosen: Array) -> Array:
        named = [layer_of_name(trace.name(int(of_rank.name[block]))) for block in chosen]
        return np.where(readers[chosen] >= 0, readers[chosen], np.array(named, dtype=np.int64))

    def per_layer(chosen: Array) -> Array:
        # Parameters of other models in the process have no layer.
        at = layers_of(chosen)
        mine = at >= 0
        return np.bincount(at[mine], weights=of_rank.size[chosen[mine]], minlength=count)

    gradient = np.flatnonzero((of_rank.category == CATEGORY["gradient"]) & _live(of_rank, end - 1))
    gradient = gradient[layers_of(gradient) >= 0]
    step_end = _step_end(trace, last, end)
    optimizer = np.flatnonzero((of_rank.category == CATEGORY["optimizer_state"]) & _live(of_rank, step_end - 1))
    parameter_bytes = per_layer(parameter)
    users = _shared_parameters(trace, last, of_rank)
    largest = _largest_gradients(trace, of_rank, gradient, layers_of(gradient), users, count)
    temporary, num_blocks = _optimizer_temporary(trace, of_rank, end, step_end)
    # Fewer temporaries than gradients: the optimizer updates one parameter at a time (foreach=False, the CPU default).
    is_sequential = num_blocks < len(gradient)
    per_parameter_byte = temporary / max(parameter_bytes.sum(), 1)
    per_layer_alone = np.ceil(temporary * largest / max(largest.max(initial=0), 1))
    return ModelState(
        parameter_bytes=parameter_bytes,
        gradient_bytes=per_layer(gradient),
        largest_gradient_bytes=largest,
        optimizer_bytes=per_layer(optimizer),
        optimizer_temporary_bytes=np.zeros(count) if is_sequential else np.ceil(per_parameter_byte * parameter_bytes),
        largest_optimizer_temporary_bytes=per_layer_alone if is_sequential else np.zeros(count),
        fresh_gradients=bool((of_rank.alloc_event[gradient] >= begin).all()),
        shared_parameters=users,
        shared=_shared(trace, of_rank, users, gradient, optimizer, 0.0 if is_sequential else per_parameter_byte),
    )


def _largest_gradients(
    trace: Trace,
    of_rank: Blocks,
    gradient: Array,
    layers: Array,
    users: dict[int, tuple[int, ...]],
    count: int,
) -> Array:
    """Bytes of the largest gradient of every layer; that of a shared parameter counts for all its layers."""
    largest = np.zeros(count)
    np.maximum.at(largest, layers, of_rank.size[gradient])
    shared = _LayerByName({trace.name(int(of_rank.name[block])): block for block in users}, ())
    for block in gradient:
        for layer in users.get(shared(trace.name(int(of_rank.name[block]))), ()):
            largest[layer] = max(largest[layer], of_rank.size[block])
    return largest


def _live(of_rank: Blocks, row: int) -> Array:
    """Which blocks are live after a row of events."""
    known = (of_rank.size >= 0) & (of_rank.alloc_event <= row)
    return known & ((of_rank.free_event < 0) | (of_rank.free_event > row))


def _step_end(trace: Trace, last: MicrobatchPass, end: int) -> int:
    """The row at which the pass's step ends."""
    steps = step_rows(trace)
    place: Array = np.flatnonzero(steps.number == (-1 if last.step is None else last.step))
    return max(end, int(steps.end_row[place[0]])) if len(place) else trace.num_rows("events")


def _first_readers(trace: Trace, last: MicrobatchPass, begin: int, backward: int, count: int) -> Array:
    """The first layer whose forward reads each block; -1: none."""
    events = trace.columns("events", "kind", "block_id", "time_ns")
    rows = np.arange(begin, backward)
    rows = rows[(events["kind"][rows] == KIND["read"]) & (events["block_id"][rows] >= 0)]
    first = np.full(count, -1, dtype=np.int64)
    # In reverse order, so that the first read is written last.
    first[events["block_id"][rows[::-1]]] = last.layers_at(events["time_ns"][rows[::-1]])
    return first


def _shared_parameters(trace: Trace, last: MicrobatchPass, of_rank: Blocks) -> dict[int, tuple[int, ...]]:
    """Parameters that several layers read -> these layers, ascending."""
    events = trace.columns("events", "kind", "block_id", "time_ns")
    begin, end = (int(row) for row in rows_at(trace, np.array([last.starts_ns[0], last.model_end_ns])))
    rows = np.arange(begin, end)
    rows = rows[(events["kind"][rows] == KIND["read"]) & (events["block_id"][rows] >= 0)]
    rows = rows[of_rank.category[events["block_id"][rows]] == CATEGORY["parameter"]]
    pairs = np.unique(np.stack([events["block_id"][rows], last.layers_at(events["time_ns"][rows])], axis=1), axis=0)
    users: dict[int, tuple[int, ...]] = {}
    for block, layer in pairs.tolist():
        users[block] = (*users.get(block, ()), layer)
    return {block: layers for block, layers in users.items() if len(layers) > 1}


def _shared(
    trace: Trace,
    of_rank: Blocks,
    users: dict[int, tuple[int, ...]],
    gradient: Array,
    optimizer: Array,
    temporary_share: float,
) -> dict[tuple[int, ...], SharedWeights]:
    """Layers that share parameters -> the bytes of these parameters."""
    by_layers = {layers: number for number, layers in enumerate(sorted(set(users.values())))}
    named = _LayerByName(
        {trace.name(int(of_rank.name[block])): by_layers[layers] for block, layers in users.items()}, ()
    )
    total = np.zeros((len(by_layers), 3), dtype=np.int64)
    for block, layers in users.items():
        total[by_layers[layers], 0] += of_rank.size[block]
    for place, blocks_of in enumerate((gradient, optimizer), 1):
        for block in blocks_of:
            number = named(trace.name(int(of_rank.name[block])))
            if number >= 0:
                total[number, place] += of_rank.size[block]
    return {
        layers: SharedWeights(number, parameters, gradients, states, math.ceil(temporary_share * parameters))
        for (layers, number), (parameters, gradients, states) in zip(by_layers.items(), total.tolist(), strict=True)
    }


def _optimizer_temporary(trace: Trace, of_rank: Blocks, end: int, step_end: int) -> tuple[int, int]:
    """Peak bytes of the optimizer's temporaries after the backward, and the number of blocks at that peak."""
    phases = phase_rows(trace)
    allocated = (
        (of_rank.alloc_event >= end)
        & (of_rank.alloc_event < step_end)
        & (of_rank.category != CATEGORY["optimizer_state"])
    )
    chosen = np.flatnonzero(allocated)
    if phases is not None and len(chosen):
        inside = phases.phase[phases.pieces(of_rank.alloc_event[chosen])] == PHASE["optimizer"]
        chosen = chosen[inside]
    if not len(chosen):
        return 0, 0
    free = np.where(of_rank.free_event[chosen] < 0, step_end, np.minimum(of_rank.free_event[chosen], step_end))
    change = np.zeros(step_end - end + 1)
    np.add.at(change, of_rank.alloc_event[chosen] - end, of_rank.size[chosen])
    np.add.at(change, free - end, -of_rank.size[chosen])
    level = np.cumsum(change)
    highest = end + int(level.argmax())
    return int(level.max()), int(((of_rank.alloc_event[chosen] <= highest) & (free > highest)).sum())


class _LayerByName:
    """The layer of a tensor by its name: that of its parameter, else that of its module; -1: unknown."""

    def __init__(self, parameters: dict[str | None, int], layers: tuple[str, ...]) -> None:
        self._parameters, self._layers = parameters, layers

    def __call__(self, name: str | None) -> int:
        if name is None:
            return -1
        text = name
        # Optimizer state is named parameter.key: without its last part the name is that of the parameter.
        while text and text not in self._parameters:
            text = text.rpartition(".")[0]
        if text:
            return self._parameters[text]
        inside = (at for at, layer in enumerate(self._layers) if name.startswith(f"{layer}."))
        return next(inside, -1)
