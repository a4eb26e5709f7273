"""Layer costs measured in the trace of one process that trained the whole model.

Times are host times: on a CUDA device they are correct only where the program waits for the device. The batch of the
recorded step (with gradient accumulation its first micro-batch) counts as one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.analysis import compute_coverage
from memtrace.analysis.attribution import KIND, PHASE, rows_at
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.format.arrays import Array
from memtrace.pipeline.costs import LayerCosts
from memtrace.pipeline.layer_passes import MicrobatchPass, find_passes
from memtrace.pipeline.layer_state import ModelState, measure_model_state
from memtrace.pipeline.memory_rules import TORCH, MemoryModel
from memtrace.trace import Trace
from memtrace.units import format_bytes


@dataclass(frozen=True)
class MeasuredLayers:
    """Layer costs measured in a trace."""

    layers: list[LayerCosts]
    model: MemoryModel
    """What counts as memory of a worker with these layers."""
    step: int | None
    """The step whose bytes were measured; None where the trace has no steps."""
    num_timed_steps: int
    """Number of steps of which times are medians."""
    notes: tuple[str, ...] = ()
    """What limits the accuracy of the costs."""


def measure_layer_costs(trace: Trace, layers: Sequence[str] = ()) -> MeasuredLayers:
    """Measure the costs of every layer of the model that a single-rank trace trained.

    Bytes are those of the last complete step, times are medians over the last steps:

    - forward: from the start of a layer's module call to the start of the next one; the loss, and operators between two
      calls, count for the layer before them.
    - backward: a backward operator, with the wait after it, belongs to the layer of the forward operator with its
      sequence number.
    - activations: blocks allocated in the layer's forward that are live when the backward begins, and that the backward
      reads or frees.
    - output: blocks allocated up to the layer and read by a later layer.
    - parameters: counted for the first layer that reads them; a stage with other layers that read them holds a copy.

    Source: spans (steps, module calls), ops (start, duration, phase, module, sequence_nr), events (reads), blocks with
    categories and names.

    Args:
        trace: a single-rank trace.
        layers: module patterns, as in ``layer_passes.find_passes``.

    Raises:
        TraceError: the trace has no step with module calls and a backward.
    """
    passes = find_passes(trace, layers)
    last = passes[-1]
    forward_s = np.median([_forward_seconds(each) for each in passes], axis=0)
    backward_s = np.median([_backward_seconds(trace, each) for each in passes], axis=0)
    state = measure_model_state(trace, last)
    pass_blocks = _PassBlocks(trace, last, state)
    kept, output, unsaved = pass_blocks.kept_bytes(), *pass_blocks.output_bytes()
    rises = pass_blocks.temporaries(state.allocated_gradient_bytes())
    model_output, batch = pass_blocks.model_output(), pass_blocks.batch_bytes()
    measured = [
        LayerCosts(
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
            **(model_output if n == len(last.names) - 1 else {}),
            **{field: int(rise[n]) for field, rise in rises.items()},
        )
        for n, name in enumerate(last.names)
    ]
    model = TORCH if state.fresh_gradients else MemoryModel(boundaries=True)
    return MeasuredLayers(measured, model, last.step, len(passes), tuple(_notes(trace, last, measured, state)))


def _notes(trace: Trace, last: MicrobatchPass, layers: Sequence[LayerCosts], state: ModelState) -> Iterator[str]:
    yield from compute_coverage(trace).notes
    ranks = trace.manifest.world_size
    if ranks > 1:
        yield f"The trace is of one of {ranks} ranks: what it holds (a shard, a stage) counts as the whole model."
    untimed = [layer.name for layer in layers if layer.gradient_bytes and not layer.backward_s]
    if untimed:
        yield (
            f"No backward operator could be attributed to {', '.join(untimed)}, as under reentrant checkpointing: "
            "their backward time counts for later layers. Do not rely on step times or on partitions balanced by time."
        )
    events = trace.columns("events", "kind", "address")
    if not (events["address"][events["kind"] == KIND["alloc"]] >= 0).any():
        yield "The tensors have no addresses (fake tensors): times are Python overhead. Do not rank schedules by them."
    for users, shared in state.shared.items():
        if shared.gradient_bytes:
            first, *others = (last.names[layer] for layer in users)
            yield (
                f"{_join_names(others)} {'shares' if len(others) == 1 else 'share'} "
                f"{format_bytes(shared.parameter_bytes)} of parameters with {first}: a stage with "
                f"{'it' if len(others) == 1 else 'one of them'} and without {first} holds a copy with gradients and "
                "optimizer state. The all-reduce of these gradients between stages takes no time in the simulation."
            )


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} layers)"


def _forward_seconds(each: MicrobatchPass) -> Array:
    return np.diff(np.append(each.starts_ns, each.forward_end_ns)) / 1e9


def _backward_ops(trace: Trace, each: MicrobatchPass) -> tuple[Array, Array]:
    """Starts (ns) and layers of the backward operators of the pass, in order of time."""
    ops = trace.columns("ops", "start_ns", "phase", "sequence_nr", "recompute")
    start, phase, sequence = ops["start_ns"], ops["phase"], ops["sequence_nr"]
    during_forward = (phase == PHASE["forward"]) & (start >= each.starts_ns[0]) & (start < each.backward_start_ns)
    forward = np.flatnonzero(during_forward & (sequence >= 0))
    during_backward = (start >= each.backward_start_ns) & (start <= each.backward_end_ns)
    backward = np.flatnonzero(during_backward & ((phase == PHASE["backward"]) | ops["recompute"]))
    backward = backward[np.argsort(start[backward], kind="stable")]
    by_sequence = np.argsort(sequence[forward], kind="stable")
    numbers = sequence[forward][by_sequence]
    layers = each.layers_at(start[forward])[by_sequence]
    if not len(numbers):
        return start[backward], np.zeros(len(backward), dtype=np.int64)
    place = np.minimum(np.searchsorted(numbers, sequence[backward]), len(numbers) - 1)
    known = numbers[place] == sequence[backward]
    # An operator without a known forward operator belongs to the layer of the previous one; the first to the loss.
    where = np.maximum.accumulate(np.where(known, np.arange(len(backward)), -1))
    return start[backward], np.where(where >= 0, layers[place[where]], len(each.names) - 1)


def _backward_seconds(trace: Trace, each: MicrobatchPass) -> Array:
    starts, layers = _backward_ops(trace, each)
    duration = np.diff(np.append(starts, each.backward_end_ns))
    return np.bincount(layers, weights=duration, minlength=len(each.names)) / 1e9


class _PassBlocks:
    """The blocks allocated between the start of the forward and the end of the backward, by rows of events."""

    def __init__(self, trace: Trace, last: MicrobatchPass, state: ModelState) -> None:
        self._trace, self._pass, self._blocks = trace, last, blocks(trace)
        edges = np.array([*last.starts_ns, last.backward_start_ns, last.backward_end_ns + 1], dtype=np.int64)
        rows = rows_at(trace, edges)
        self._layer_rows, self._backward_row, self._end = rows[:-2], int(rows[-2]), int(rows[-1])
        of_rank = self._blocks
        allocated = (of_rank.alloc_event >= self._layer_rows[0]) & (of_rank.alloc_event < self._end)
        of_state = [CATEGORY[name] for name in ("parameter", "gradient", "optimizer_state")]
        self._of_state = np.isin(of_rank.category, of_state)
        self._free = np.where(of_rank.free_event < 0, np.iinfo(np.int64).max, of_rank.free_event)
        partial = self._partial_gradients(state)
        self._gradient = allocated & ((of_rank.category == CATEGORY["gradient"]) | partial)
        self._mine = np.flatnonzero(allocated & ~self._of_state & ~partial)
        self._last_reader, self._read_in_backward = self._reads(of_rank)

    def _partial_gradients(self, state: ModelState) -> Array:
        """Gradients of shared parameters that a later layer allocates and the first layer adds to.

        To a stage without the first layer they are the gradients.
        """
        of_rank, partial = self._blocks, np.zeros(len(self._blocks), dtype=bool)
        edges = self._backward_edges()
        for parameter, users in state.shared_parameters.items():
            begin = edges[len(self._pass.names) - 1 - users[0]]
            live = (of_rank.alloc_event >= self._backward_row) & (of_rank.alloc_event < begin) & (self._free >= begin)
            partial |= live & (of_rank.size == of_rank.size[parameter]) & ~self._of_state
        return partial

    def _reads(self, of_rank: Blocks) -> tuple[Array, Array]:
        """The last layer that reads each block in the forward (-1: none), and whether the backward reads it."""
        events = self._trace.columns("events", "kind", "block_id", "time_ns")
        rows = np.arange(self._layer_rows[0], self._end)
        rows = rows[(events["kind"][rows] == KIND["read"]) & (events["block_id"][rows] >= 0)]
        forward, backward = rows[rows < self._backward_row], rows[rows >= self._backward_row]
        last = np.full(len(of_rank), -1, dtype=np.int64)
        np.maximum.at(last, events["block_id"][forward], self._layer_of(forward))
        read = np.zeros(len(of_rank), dtype=bool)
        read[events["block_id"][backward]] = True
        return last, read

    def _layer_of(self, rows: Array) -> Array:
        place = np.searchsorted(self._layer_rows, rows, side="right") - 1
        return np.clip(place, 0, len(self._pass.names) - 1)

    def _kept(self) -> Array:
        """The blocks that the forward keeps for the backward."""
        mine = self._mine
        alive = (self._blocks.alloc_event[mine] < self._backward_row) & (self._free[mine] >= self._backward_row)
        # A block that a variable of the program holds, and the backward neither reads nor frees, is no activation.
        used = self._read_in_backward[mine] | (self._free[mine] < self._end)
        return mine[alive & used]

    def kept_bytes(self) -> Array:
        """Bytes that each layer's forward keeps for the backward."""
        kept = self._kept()
        return self._per_layer(kept)

    def _per_layer(self, chosen: Array) -> Array:
        layers = self._layer_of(self._blocks.alloc_event[chosen])
        return np.bincount(layers, weights=self._blocks.size[chosen], minlength=len(self._pass.names))

    def output_bytes(self) -> tuple[Array, Array]:
        """For each layer the bytes that cross its end, and the part of them that no backward keeps."""
        forward = self._mine[self._blocks.alloc_event[self._mine] < self._backward_row]
        allocating, read = self._layer_of(self._blocks.alloc_event[forward]), self._last_reader[forward]
        crossing = read > allocating
        unsaved = crossing & ~np.isin(forward, self._kept())
        return self._crossings(forward, allocating, read, crossing), self._crossings(forward, allocating, read, unsaved)

    def model_output(self) -> dict[str, int]:
        """Fields of ``LayerCosts``: model output, the part of it that no backward keeps, and loss."""
        row = int(rows_at(self._trace, np.array([self._pass.model_end_ns]))[0])
        allocated = self._blocks.alloc_event[self._mine]
        live = self._mine[(allocated >= self._layer_rows[-1]) & (allocated < row) & (self._free[self._mine] >= row)]
        unsaved = np.setdiff1d(live, self._kept())
        # Of the blocks that the backward keeps, the loss reads only outputs.
        outputs = np.union1d(unsaved, np.intersect1d(live, self._read_blocks(row, self._backward_row)))
        sizes = self._blocks.size
        return {
            "model_output_bytes": int(sizes[outputs].sum()),
            "unsaved_model_output_bytes": int(sizes[unsaved].sum()),
            "loss_bytes": self._loss_bytes(row),
        }

    def _loss_bytes(self, model_end_row: int) -> int:
        """Bytes of the block that is read last before the backward, if it was allocated after the model's call.

        ``backward`` reads the loss to allocate a gradient of its shape.
        """
        events = self._trace.columns("events", "kind", "block_id")
        rows = np.arange(model_end_row, self._backward_row)
        read = events["block_id"][rows[(events["kind"][rows] == KIND["read"]) & (events["block_id"][rows] >= 0)]]
        is_loss = len(read) and self._blocks.alloc_event[read[-1]] >= model_end_row
        return int(self._blocks.size[read[-1]]) if is_loss else 0

    def batch_bytes(self) -> Array:
        """Bytes that the first and the last layer read, allocated before the forward and no state of the model."""
        total = np.zeros(len(self._pass.names), dtype=np.int64)
        edges = np.append(self._layer_rows, self._backward_row)
        for layer in {0, len(total) - 1}:
            read = self._read_blocks(int(edges[layer]), int(edges[layer + 1]))
            read = read[(self._blocks.alloc_event[read] < self._layer_rows[0]) & ~self._of_state[read]]
            total[layer] = self._blocks.size[read[self._blocks.size[read] > 0]].sum()
        return total

    def _read_blocks(self, begin: int, end: int) -> Array:
        """The blocks that the rows ``begin`` to ``end`` - 1 read."""
        events = self._trace.columns("events", "kind", "block_id")
        read = events["block_id"][begin:end][events["kind"][begin:end] == KIND["read"]]
        return np.unique(read[read >= 0])

    def _crossings(self, chosen: Array, allocating: Array, read: Array, mask: Array) -> Array:
        """Bytes that cross the end of each layer: a block of layer a, last read in layer b, crosses a to b - 1."""
        change = np.zeros(len(self._pass.names) + 1)
        np.add.at(change, allocating[mask], self._blocks.size[chosen[mask]])
        np.add.at(change, read[mask], -self._blocks.size[chosen[mask]])
        return np.cumsum(change)[:-1]

    def temporaries(self, gradient_bytes: Array) -> dict[str, Array]:
        """Peak of each layer above what is kept: fields of ``LayerCosts``."""
        through = np.cumsum(self.kept_bytes())
        level = self._levels(self._mine)
        edges = self._backward_edges()
        new = self._mine[self._blocks.alloc_event[self._mine] >= self._backward_row]
        gradients = self._levels(np.flatnonzero(self._gradient))
        later_gradients = np.append(np.cumsum(gradient_bytes[::-1])[::-1], 0)[1:]
        rises = {
            "forward_temporary_bytes": self._highest(level, np.append(self._layer_rows, self._backward_row)) - through,
            "backward_temporary_bytes": self._highest(level, edges)[::-1] - through,
            "input_backward_temporary_bytes": self._highest(self._levels(new), edges)[::-1],
            "first_backward_temporary_bytes": self._highest(level + gradients, edges)[::-1] - through - later_gradients,
        }
        return {field: np.maximum(rise, 0) for field, rise in rises.items()}

    def _levels(self, chosen: Array) -> Array:
        """Live bytes of ``chosen`` after each row of events, from the start of the forward on."""
        first = self._layer_rows[0]
        change = np.zeros(self._end - first + 1)
        allocated, size = self._blocks.alloc_event[chosen], self._blocks.size[chosen]
        free = np.minimum(self._free[chosen], self._end)
        # A variable of the program may hold a block that a pipeline worker would have freed.
        held = (allocated < self._backward_row) & (free >= self._backward_row) & ~np.isin(chosen, self._kept())
        free = np.where(held, self._backward_row, free)
        np.add.at(change, allocated - first, size)
        np.add.at(change, free - first, -size)
        return np.cumsum(change)

    def _highest(self, level: Array, edges: Array) -> Array:
        """The highest level between each pair of neighbouring edges (rows), including the level at the first."""
        first = self._layer_rows[0]
        begins = np.maximum(edges[:-1] - first, 0)
        return np.array(
            [
                level[max(begin - 1, 0) : max(end - first, begin + 1)].max()
                for begin, end in zip(begins, edges[1:], strict=True)
            ]
        )

    def _backward_edges(self) -> Array:
        """Rows at which the backward of each layer begins, the last layer first, and the end of the backward."""
        starts, layers = _backward_ops(self._trace, self._pass)
        # Where layers interleave, the part of a layer begins with its first operator or that of an earlier layer.
        reached = np.minimum.accumulate(layers)
        count = len(self._pass.names)
        begin = np.searchsorted(-reached, -np.arange(count - 1, -1, -1), side="left")
        times = np.append(starts, self._pass.backward_end_ns + 1)[begin]
        edges = rows_at(self._trace, times)
        edges[0] = self._backward_row
        return np.append(edges, self._end)
