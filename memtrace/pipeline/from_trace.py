"""The costs of every layer of a model from the trace of one process that trained it.

Seconds are of the host's clock: on a CUDA device they are true only where the program waits for the device.
The batch of the recorded step (the first micro-batch where gradients are accumulated) is what counts as one
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.analysis import compute_coverage
from memtrace.analysis.attribution import KIND, PHASE, rows_at
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.format.arrays import Array
from memtrace.pipeline.costs import Layer
from memtrace.pipeline.simulation.memory import TORCH, MemoryModel
from memtrace.pipeline.trace_passes import Pass, passes
from memtrace.pipeline.trace_state import State, state_of_layers
from memtrace.trace import Trace


@dataclass(frozen=True)
class TraceCosts:
    """Layers measured in a trace."""

    layers: list[Layer]
    model: MemoryModel
    """How memory is to be counted with them."""
    step: int | None
    """The step whose bytes they are; None where the trace has no steps."""
    num_timed_steps: int
    """Steps whose medians the seconds are."""
    notes: tuple[str, ...] = ()
    """What to know before believing figures made from them."""


def trace_costs(trace: Trace, layers: Sequence[str] = ()) -> TraceCosts:
    """The layers of the model that a single-rank trace trained, with the fields of ``costs.Layer``.

    Source columns: spans (steps, module calls), ops (start, duration, phase, module, sequence_nr), events
    (reads), blocks with categories and names. Bytes are of the last complete step, seconds medians over the
    last ones:

    - forward: from the start of a layer's module call to that of the next; loss and what lies between to the
      layer before it.
    - backward: a backward operator, with the wait behind it, belongs to the layer of the forward operator
      with its sequence number.
    - activations: blocks made in the layer's forward, alive when backward begins and read or freed in it.
    - output: blocks made up to the layer and read by a later one.
    - parameters: by the first layer that reads them; a stage with other layers that do holds a copy.

    ``layers`` as in ``trace_passes.passes``. Raises TraceError where the trace has no such step.
    """
    found = passes(trace, layers)
    last = found[-1]
    forward_s = np.median([_forward_seconds(one) for one in found], axis=0)
    backward_s = np.median([_backward_seconds(trace, one) for one in found], axis=0)
    state = state_of_layers(trace, last)
    window = _Window(trace, last, state)
    kept, output, unsaved = window.kept_bytes(), *window.output_bytes()
    rises = window.temporaries(state.made_gradient_bytes())
    handed, batch = window.handed_bytes(), window.batch_bytes()
    made = [
        Layer(
            name=name,
            forward_s=float(forward_s[n]),
            backward_s=float(backward_s[n]),
            parameter_bytes=int(state.parameter_bytes[n]),
            gradient_bytes=int(state.gradient_bytes[n]),
            optimizer_bytes=int(state.optimizer_bytes[n]),
            optimizer_temporary_bytes=int(state.optimizer_temporary_bytes[n]),
            largest_optimizer_temporary_bytes=int(state.largest_optimizer_temporary_bytes[n]),
            largest_gradient_bytes=int(state.largest_gradient_bytes[n]),
            activation_bytes=int(kept[n]),
            output_bytes=int(output[n]),
            unsaved_output_bytes=int(unsaved[n]),
            batch_bytes=int(batch[n]),
            shared=state.shared_of(n),
            **(handed if n == len(last.names) - 1 else {}),
            **{field: int(rise[n]) for field, rise in rises.items()},
        )
        for n, name in enumerate(last.names)
    ]
    model = TORCH if state.fresh_gradients else MemoryModel(boundaries=True)
    return TraceCosts(made, model, last.step, len(found), tuple(_notes(trace, last, made, state)))


def _notes(trace: Trace, one: Pass, layers: Sequence[Layer], state: State) -> Iterator[str]:
    yield from compute_coverage(trace).notes
    ranks = trace.manifest.world_size
    if ranks > 1:
        yield f"it is of one of {ranks} ranks: what this one held (a shard, a stage) is taken for the whole model"
    untimed = [layer.name for layer in layers if layer.gradient_bytes and not layer.backward_s]
    if untimed:
        yield (
            f"no operator of the backward could be told to be of {', '.join(untimed)} (reentrant checkpoints lose it): "
            "its seconds are counted at later layers, so cuts and steps by time are not to be trusted"
        )
    events = trace.columns("events", "kind", "address")
    if not (events["address"][events["kind"] == KIND["alloc"]] >= 0).any():
        yield "its tensors have no addresses: seconds are those of Python alone and rank no schedules"
    for users, shared in state.shared.items():
        if shared.gradient_bytes:
            first, *others = (one.names[layer] for layer in users)
            yield (
                f"{_several(others)} {'uses' if len(others) == 1 else 'use'} {shared.parameter_bytes:,} bytes of "
                f"parameters of {first}: each stage with one of them and without {first} holds a copy, which counts "
                "with gradients and optimizer state; the sum of their gradients over stages takes no time here"
            )


def _several(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} layers)"


def _forward_seconds(one: Pass) -> Array:
    return np.diff(np.append(one.starts_ns, one.forward_end_ns)) / 1e9


def _backward_ops(trace: Trace, one: Pass) -> tuple[Array, Array]:
    """Starts and layers of the backward operators of the pass, in order of time."""
    ops = trace.columns("ops", "start_ns", "phase", "sequence_nr", "recompute")
    start, phase, sequence = ops["start_ns"], ops["phase"], ops["sequence_nr"]
    during_forward = (phase == PHASE["forward"]) & (start >= one.starts_ns[0]) & (start < one.backward_start_ns)
    forward = np.flatnonzero(during_forward & (sequence >= 0))
    during_backward = (start >= one.backward_start_ns) & (start <= one.backward_end_ns)
    backward = np.flatnonzero(during_backward & ((phase == PHASE["backward"]) | ops["recompute"]))
    backward = backward[np.argsort(start[backward], kind="stable")]
    by_sequence = np.argsort(sequence[forward], kind="stable")
    numbers = sequence[forward][by_sequence]
    layers = one.layers_at(start[forward])[by_sequence]
    if not len(numbers):
        return start[backward], np.zeros(len(backward), dtype=np.int64)
    place = np.minimum(np.searchsorted(numbers, sequence[backward]), len(numbers) - 1)
    known = numbers[place] == sequence[backward]
    # An operator without a known forward one belongs where the one before it does; the first are of the loss.
    where = np.maximum.accumulate(np.where(known, np.arange(len(backward)), -1))
    return start[backward], np.where(where >= 0, layers[place[where]], len(one.names) - 1)


def _backward_seconds(trace: Trace, one: Pass) -> Array:
    starts, layers = _backward_ops(trace, one)
    lasting = np.diff(np.append(starts, one.backward_end_ns))
    return np.bincount(layers, weights=lasting, minlength=len(one.names)) / 1e9


class _Window:
    """What the blocks do between the start of the forward and the end of the backward, by rows of events."""

    def __init__(self, trace: Trace, one: Pass, state: State) -> None:
        self._trace, self._pass, self._blocks = trace, one, blocks(trace)
        edges = np.array([*one.starts_ns, one.backward_start_ns, one.backward_end_ns + 1], dtype=np.int64)
        rows = rows_at(trace, edges)
        self._layer_rows, self._turn, self._end = rows[:-2], int(rows[-2]), int(rows[-1])
        found = self._blocks
        born = (found.alloc_event >= self._layer_rows[0]) & (found.alloc_event < self._end)
        of_state = [CATEGORY[name] for name in ("parameter", "gradient", "optimizer_state")]
        self._of_state = np.isin(found.category, of_state)
        self._free = np.where(found.free_event < 0, np.iinfo(np.int64).max, found.free_event)
        partial = self._partial_gradients(state)
        self._gradient = born & ((found.category == CATEGORY["gradient"]) | partial)
        self._mine = np.flatnonzero(born & ~self._of_state & ~partial)
        self._last_reader, self._read_in_backward = self._reads(found)

    def _partial_gradients(self, state: State) -> Array:
        """What later users of shared parameters make and the first one adds to: to a stage without that one these are
        the gradients."""
        found, partial = self._blocks, np.zeros(len(self._blocks), dtype=bool)
        edges = self._backward_edges()
        for parameter, users in state.shared_parameters.items():
            begin = edges[len(self._pass.names) - 1 - users[0]]
            born = (found.alloc_event >= self._turn) & (found.alloc_event < begin) & (self._free >= begin)
            partial |= born & (found.size == found.size[parameter]) & ~self._of_state
        return partial

    def _reads(self, found: Blocks) -> tuple[Array, Array]:
        """The last layer that reads each block in forward, -1 for none; whether the backward reads it."""
        events = self._trace.columns("events", "kind", "block_id", "time_ns")
        rows = np.arange(self._layer_rows[0], self._end)
        rows = rows[(events["kind"][rows] == KIND["read"]) & (events["block_id"][rows] >= 0)]
        forward, backward = rows[rows < self._turn], rows[rows >= self._turn]
        last = np.full(len(found), -1, dtype=np.int64)
        np.maximum.at(last, events["block_id"][forward], self._layer_of(forward))
        read = np.zeros(len(found), dtype=bool)
        read[events["block_id"][backward]] = True
        return last, read

    def _layer_of(self, rows: Array) -> Array:
        place = np.searchsorted(self._layer_rows, rows, side="right") - 1
        return np.clip(place, 0, len(self._pass.names) - 1)

    def _kept(self) -> Array:
        """The blocks that the forward leaves for the backward."""
        mine = self._mine
        alive = (self._blocks.alloc_event[mine] < self._turn) & (self._free[mine] >= self._turn)
        # What a variable of the program holds but backward neither reads nor frees is no activation.
        used = self._read_in_backward[mine] | (self._free[mine] < self._end)
        return mine[alive & used]

    def kept_bytes(self) -> Array:
        """Bytes that each layer's forward leaves for the backward."""
        kept = self._kept()
        return self._per_layer(kept)

    def _per_layer(self, chosen: Array) -> Array:
        layers = self._layer_of(self._blocks.alloc_event[chosen])
        return np.bincount(layers, weights=self._blocks.size[chosen], minlength=len(self._pass.names))

    def output_bytes(self) -> tuple[Array, Array]:
        """For each layer the bytes that cross its end, and of these the bytes that no backward keeps
        anyway."""
        forward = self._mine[self._blocks.alloc_event[self._mine] < self._turn]
        made, read = self._layer_of(self._blocks.alloc_event[forward]), self._last_reader[forward]
        crossing = read > made
        unsaved = crossing & ~np.isin(forward, self._kept())
        return self._crossings(forward, made, read, crossing), self._crossings(forward, made, read, unsaved)

    def handed_bytes(self) -> dict[str, int]:
        """What the model hands to the loss, what of it no backward keeps, and the loss, by the fields of Layer."""
        row = int(rows_at(self._trace, np.array([self._pass.model_end_ns]))[0])
        born = self._blocks.alloc_event[self._mine]
        left = self._mine[(born >= self._layer_rows[-1]) & (born < row) & (self._free[self._mine] >= row)]
        result = np.setdiff1d(left, self._kept())
        # Of what the backward keeps, the loss reads outputs only.
        handed = np.union1d(result, np.intersect1d(left, self._read_blocks(row, self._turn)))
        sizes = self._blocks.size
        return {
            "handed_bytes": int(sizes[handed].sum()),
            "result_bytes": int(sizes[result].sum()),
            "loss_bytes": self._loss_bytes(row),
        }

    def _loss_bytes(self, model_end_row: int) -> int:
        """The block made behind the model that is read last: ``backward`` makes a gradient of its shape."""
        events = self._trace.columns("events", "kind", "block_id")
        rows = np.arange(model_end_row, self._turn)
        read = events["block_id"][rows[(events["kind"][rows] == KIND["read"]) & (events["block_id"][rows] >= 0)]]
        made = len(read) and self._blocks.alloc_event[read[-1]] >= model_end_row
        return int(self._blocks.size[read[-1]]) if made else 0

    def batch_bytes(self) -> Array:
        """What the first and the last layer read that was there before the forward and is no state of the model."""
        total = np.zeros(len(self._pass.names), dtype=np.int64)
        edges = np.append(self._layer_rows, self._turn)
        for layer in {0, len(total) - 1}:
            read = self._read_blocks(int(edges[layer]), int(edges[layer + 1]))
            read = read[(self._blocks.alloc_event[read] < self._layer_rows[0]) & ~self._of_state[read]]
            total[layer] = self._blocks.size[read[self._blocks.size[read] > 0]].sum()
        return total

    def _read_blocks(self, begin: int, end: int) -> Array:
        """The blocks that the rows from ``begin`` on, before ``end``, read."""
        events = self._trace.columns("events", "kind", "block_id")
        read = events["block_id"][begin:end][events["kind"][begin:end] == KIND["read"]]
        return np.unique(read[read >= 0])

    def _crossings(self, chosen: Array, made: Array, read: Array, mask: Array) -> Array:
        """Bytes over each boundary: a block made in layer a and last read in layer b crosses those of a to b
        - 1."""
        change = np.zeros(len(self._pass.names) + 1)
        np.add.at(change, made[mask], self._blocks.size[chosen[mask]])
        np.add.at(change, read[mask], -self._blocks.size[chosen[mask]])
        return np.cumsum(change)[:-1]

    def temporaries(self, gradient_bytes: Array) -> dict[str, Array]:
        """How far each layer rises above what is kept, by the fields of Layer that say so."""
        through = np.cumsum(self.kept_bytes())
        level = self._levels(self._mine)
        edges = self._backward_edges()
        new = self._mine[self._blocks.alloc_event[self._mine] >= self._turn]
        gradients = self._levels(np.flatnonzero(self._gradient))
        made_behind = np.append(np.cumsum(gradient_bytes[::-1])[::-1], 0)[1:]
        rises = {
            "forward_temporary_bytes": self._highest(level, np.append(self._layer_rows, self._turn)) - through,
            "backward_temporary_bytes": self._highest(level, edges)[::-1] - through,
            "input_backward_temporary_bytes": self._highest(self._levels(new), edges)[::-1],
            "first_backward_temporary_bytes": self._highest(level + gradients, edges)[::-1] - through - made_behind,
        }
        return {field: np.maximum(rise, 0) for field, rise in rises.items()}

    def _levels(self, chosen: Array) -> Array:
        """Bytes of ``chosen`` alive behind each row of events from the start of the forward on."""
        first = self._layer_rows[0]
        change = np.zeros(self._end - first + 1)
        born, size = self._blocks.alloc_event[chosen], self._blocks.size[chosen]
        free = np.minimum(self._free[chosen], self._end)
        # A variable of the program may hold a block that a pipeline's worker would have let go.
        held = (born < self._turn) & (free >= self._turn) & ~np.isin(chosen, self._kept())
        free = np.where(held, self._turn, free)
        np.add.at(change, born - first, size)
        np.add.at(change, free - first, -size)
        return np.cumsum(change)

    def _highest(self, level: Array, edges: Array) -> Array:
        """The highest level between each pair of neighbouring edges (rows), the level at its start
        included."""
        first = self._layer_rows[0]
        begins = np.maximum(edges[:-1] - first, 0)
        return np.array(
            [
                level[max(begin - 1, 0) : max(end - first, begin + 1)].max()
                for begin, end in zip(begins, edges[1:], strict=True)
            ]
        )

    def _backward_edges(self) -> Array:
        """Rows at which the backward of the last layer, of the one before it and so on begin, and the end."""
        starts, layers = _backward_ops(self._trace, self._pass)
        # Where layers interleave, a layer's part begins when none behind it has begun later.
        reached = np.minimum.accumulate(layers)
        count = len(self._pass.names)
        begin = np.searchsorted(-reached, -np.arange(count - 1, -1, -1), side="left")
        times = np.append(starts, self._pass.backward_end_ns + 1)[begin]
        edges = rows_at(self._trace, times)
        edges[0] = self._turn
        return np.append(edges, self._end)
