"""Parameters, gradients and optimizer state of every layer, from the labels and accesses of a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, phase_rows, rows_at, step_rows
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.format.arrays import Array
from memtrace.pipeline.costs import Shared
from memtrace.pipeline.trace_passes import Pass
from memtrace.trace import Trace


@dataclass(frozen=True)
class State:
    """Bytes of each layer; the temporaries of the optimizer are given to layers by their parameters."""

    parameter_bytes: Array
    gradient_bytes: Array
    largest_gradient_bytes: Array
    optimizer_bytes: Array
    optimizer_temporary_bytes: Array
    """Of an optimizer that takes all parameters at once, else 0."""
    largest_optimizer_temporary_bytes: Array
    """Of one that takes them one after another, else 0."""
    fresh_gradients: bool
    """Whether the step allocated its gradients anew."""
    shared_parameters: dict[int, tuple[int, ...]]
    """The blocks of parameters that several layers use, with these layers in order."""
    shared: dict[tuple[int, ...], Shared]
    """What they take, by these layers; the bytes of the first of them have them."""

    def shared_of(self, layer: int) -> tuple[Shared, ...]:
        """The entries of one layer."""
        return tuple(
            one if layer > users[0] else Shared(one.number) for users, one in self.shared.items() if layer in users
        )

    def made_gradient_bytes(self) -> Array:
        """Gradients by the layer whose backward makes them: the last user of a parameter."""
        made: Array = self.gradient_bytes.copy()
        for users, one in self.shared.items():
            made[users[0]] -= one.gradient_bytes
            made[users[-1]] += one.gradient_bytes
        return made


def state_of_layers(trace: Trace, one: Pass) -> State:
    """The state of every layer at the end of the pass's step."""
    found = blocks(trace)
    count = len(one.names)
    begin, turn, end = (
        int(row) for row in rows_at(trace, np.array([one.starts_ns[0], one.backward_start_ns, one.backward_end_ns + 1]))
    )
    readers = _first_readers(trace, one, begin, turn, len(found))
    parameter = np.flatnonzero((found.category == CATEGORY["parameter"]) & _alive(found, turn))
    read = parameter[readers[parameter] >= 0]
    home = _ByName({trace.name(int(found.name[block])): int(readers[block]) for block in read}, one.names)

    def homes(chosen: Array) -> Array:
        named = [home(trace.name(int(found.name[block]))) for block in chosen]
        return np.where(readers[chosen] >= 0, readers[chosen], np.array(named, dtype=np.int64))

    def per_layer(chosen: Array) -> Array:
        # Other models of the same process have no layer here.
        at = homes(chosen)
        mine = at >= 0
        return np.bincount(at[mine], weights=found.size[chosen[mine]], minlength=count)

    gradient = np.flatnonzero((found.category == CATEGORY["gradient"]) & _alive(found, end - 1))
    gradient = gradient[homes(gradient) >= 0]
    step_end = _step_end(trace, one, end)
    optimizer = np.flatnonzero((found.category == CATEGORY["optimizer_state"]) & _alive(found, step_end - 1))
    parameter_bytes = per_layer(parameter)
    largest = np.zeros(count)
    np.maximum.at(largest, homes(gradient), found.size[gradient])
    users = _shared_parameters(trace, one, found)
    shared_gradients = _ByName({trace.name(int(found.name[block])): block for block in users}, ())
    for block in gradient:
        for layer in users.get(shared_gradients(trace.name(int(found.name[block]))), ()):
            largest[layer] = max(largest[layer], found.size[block])
    temporary, num_blocks = _optimizer_temporary(trace, found, end, step_end)
    share = temporary / max(parameter_bytes.sum(), 1)
    alone = temporary * largest / max(largest.max(initial=0), 1)
    # Fewer temporaries than gradients: they are of one parameter at a time (foreach=False, torch's default on a CPU).
    one_by_one = num_blocks < len(gradient)
    return State(
        parameter_bytes,
        per_layer(gradient),
        largest,
        per_layer(optimizer),
        np.zeros(count) if one_by_one else np.ceil(share * parameter_bytes),
        np.ceil(alone) if one_by_one else np.zeros(count),
        bool((found.alloc_event[gradient] >= begin).all()),
        users,
        _shared(trace, found, users, gradient, optimizer, 0.0 if one_by_one else share),
    )


def _alive(found: Blocks, row: int) -> Array:
    """Which blocks are alive just behind a row of events."""
    known = (found.size >= 0) & (found.alloc_event <= row)
    return known & ((found.free_event < 0) | (found.free_event > row))


def _step_end(trace: Trace, one: Pass, end: int) -> int:
    """The row at which the pass's step ends."""
    steps = step_rows(trace)
    place: Array = np.flatnonzero(steps.number == (-1 if one.step is None else one.step))
    return max(end, int(steps.end_row[place[0]])) if len(place) else trace.num_rows("events")


def _first_readers(trace: Trace, one: Pass, begin: int, turn: int, count: int) -> Array:
    """The first layer whose forward reads each block, -1 for none."""
    events = trace.columns("events", "kind", "block_id", "time_ns")
    rows = np.arange(begin, turn)
    rows = rows[(events["kind"][rows] == KIND["read"]) & (events["block_id"][rows] >= 0)]
    first = np.full(count, -1, dtype=np.int64)
    # Backwards, so that the first read is written last.
    first[events["block_id"][rows[::-1]]] = one.layers_at(events["time_ns"][rows[::-1]])
    return first


def _shared_parameters(trace: Trace, one: Pass, found: Blocks) -> dict[int, tuple[int, ...]]:
    """The parameters that several layers read, with these layers in order."""
    events = trace.columns("events", "kind", "block_id", "time_ns")
    begin, end = (int(row) for row in rows_at(trace, np.array([one.starts_ns[0], one.model_end_ns])))
    rows = np.arange(begin, end)
    rows = rows[(events["kind"][rows] == KIND["read"]) & (events["block_id"][rows] >= 0)]
    rows = rows[found.category[events["block_id"][rows]] == CATEGORY["parameter"]]
    pairs = np.unique(np.stack([events["block_id"][rows], one.layers_at(events["time_ns"][rows])], axis=1), axis=0)
    users: dict[int, tuple[int, ...]] = {}
    for block, layer in pairs.tolist():
        users[block] = (*users.get(block, ()), layer)
    return {block: layers for block, layers in users.items() if len(layers) > 1}


def _shared(
    trace: Trace,
    found: Blocks,
    users: dict[int, tuple[int, ...]],
    gradient: Array,
    optimizer: Array,
    temporary_share: float,
) -> dict[tuple[int, ...], Shared]:
    """What the parameters take that the same layers share, by these layers."""
    by_layers = {layers: number for number, layers in enumerate(sorted(set(users.values())))}
    named = _ByName({trace.name(int(found.name[block])): by_layers[layers] for block, layers in users.items()}, ())
    total = np.zeros((len(by_layers), 3), dtype=np.int64)
    for block, layers in users.items():
        total[by_layers[layers], 0] += found.size[block]
    for place, blocks_of in enumerate((gradient, optimizer), 1):
        for block in blocks_of:
            number = named(trace.name(int(found.name[block])))
            if number >= 0:
                total[number, place] += found.size[block]
    return {
        layers: Shared(number, parameters, gradients, states, math.ceil(temporary_share * parameters))
        for (layers, number), (parameters, gradients, states) in zip(by_layers.items(), total.tolist(), strict=True)
    }


def _optimizer_temporary(trace: Trace, found: Blocks, end: int, step_end: int) -> tuple[int, int]:
    """The most bytes that the optimizer's own temporaries take at once after the backward, in how many blocks."""
    phases = phase_rows(trace)
    born = (found.alloc_event >= end) & (found.alloc_event < step_end) & (found.category != CATEGORY["optimizer_state"])
    chosen = np.flatnonzero(born)
    if phases is not None and len(chosen):
        inside = phases.phase[phases.pieces(found.alloc_event[chosen])] == PHASE["optimizer"]
        chosen = chosen[inside]
    if not len(chosen):
        return 0, 0
    free = np.where(found.free_event[chosen] < 0, step_end, np.minimum(found.free_event[chosen], step_end))
    change = np.zeros(step_end - end + 1)
    np.add.at(change, found.alloc_event[chosen] - end, found.size[chosen])
    np.add.at(change, free - end, -found.size[chosen])
    level = np.cumsum(change)
    highest = end + int(level.argmax())
    return int(level.max()), int(((found.alloc_event[chosen] <= highest) & (free > highest)).sum())


class _ByName:
    """The layer of a tensor by its name: that of the parameter it belongs to, else of the module it lies in.

    -1 where the name tells neither.
    """

    def __init__(self, parameters: dict[str | None, int], layers: tuple[str, ...]) -> None:
        self._parameters, self._layers = parameters, layers

    def __call__(self, name: str | None) -> int:
        if name is None:
            return -1
        text = name
        # Optimizer state is called parameter.key: the parameter is what is left without its last part.
        while text and text not in self._parameters:
            text = text.rpartition(".")[0]
        if text:
            return self._parameters[text]
        inside = (at for at, layer in enumerate(self._layers) if name.startswith(f"{layer}."))
        return next(inside, -1)
