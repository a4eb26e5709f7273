"""Tensor parallelism in one, two and three dimensions: local shapes of a linear layer, and the timeline of one rank.

For Y = X A on P ranks:

* 1-D (Megatron-LM): pairs of layers. The first is split by columns, the second by rows; what lies between them is
  split, what goes in and comes out is on every rank.
* 2-D (SUMMA), P = q^2: everything is stored as 1/q^2; blocks of X and A of that size are received for each product.
* 3-D (Agarwal), P = q^3: everything is stored as 1/q^3; X and A are gathered for each product, and its result is
  reduced: three transient tensors of 1/q^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from memtrace.analysis.attribution import op_column
from memtrace.analysis.blocks import blocks
from memtrace.analysis.event_codes import PHASE
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.operator_graph import is_compute_bound
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.sharding import shard_update
from memtrace.planning.step_accesses import StepAccesses, step_accesses
from memtrace.planning.timeline import TICKS_PER_ROW, Timeline
from memtrace.planning.timeline_moments import Interval, StepMoments
from memtrace.planning.timeline_parameters import find_parameters, state_of_parameters
from memtrace.trace import Trace

Kind = Literal["1d", "2d", "3d"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Shape = tuple[int, int]


@dataclass(frozen=True)
class LocalShapes:
    """The shapes that one rank holds for a linear layer with ``batch`` rows of input."""

    weight: Shape
    """Inputs by outputs."""
    input: Shape
    output: Shape
    transients: tuple[Shape, ...]
    """Tensors that are received or reduced during a product, all live at once."""


def local_shapes(
    kind: Kind, num_ranks: int, batch: int, num_inputs: int, num_outputs: int, *, splits_rows: bool = False
) -> LocalShapes:
    """Return the shapes that one rank holds for a linear layer.

    Args:
        kind: the dimensions of the grid of ranks.
        num_ranks: q^2 for ``2d``, q^3 for ``3d``.
        batch: rows of the input: samples, times positions of a sequence.
        num_inputs: features of the input.
        num_outputs: features of the output.
        splits_rows: for ``1d``: the layer is the second of a pair, whose weight is split by inputs.

    Raises:
        MemtraceError: the ranks form no such grid, or do not divide the layer.
    """
    q = grid_side(kind, num_ranks)
    if kind == "1d" and splits_rows:
        part = _divide(num_inputs, q)
        return LocalShapes((part, num_outputs), (batch, part), (batch, num_outputs), ())
    if kind == "1d":
        part = _divide(num_outputs, q)
        return LocalShapes((num_inputs, part), (batch, num_inputs), (batch, part), ())
    inputs, outputs = _divide(num_inputs, q), _divide(num_outputs, q)
    if kind == "2d":
        rows = _divide(batch, q)
        return LocalShapes((inputs, outputs), (rows, inputs), (rows, outputs), ((rows, inputs), (inputs, outputs)))
    rows, gathered = _divide(batch, q * q), _divide(batch, q)
    return LocalShapes(
        (inputs, _divide(num_outputs, q * q)),
        (rows, inputs),
        (rows, outputs),
        ((gathered, inputs), (inputs, outputs), (gathered, outputs)),
    )


def grid_side(kind: Kind, num_ranks: int) -> int:
    """Return q, the ranks on one side of the grid; MemtraceError where they form none."""
    power = KINDS.index(kind) + 1
    q: int = round(max(num_ranks, 0) ** (1 / power))
    if num_ranks < 1 or q**power != num_ranks:
        examples = ", ".join(str(side**power) for side in (2, 3, 4))
        raise MemtraceError(f"{kind} tensor parallelism needs {examples}, ... ranks, not {num_ranks}.")
    return int(q)


def _divide(whole: int, parts: int) -> int:
    if whole % parts:
        raise MemtraceError(f"{whole} cannot be split evenly over {parts} ranks.")
    return whole // parts


# -- on a recorded step ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A module whose forward is a product of its input and its weight."""

    name: str
    input_bytes: int
    weight_bytes: int
    output_bytes: int
    forward: Interval
    backward: Interval | None
    """None: the layer is not trained."""


def split_tensors(
    trace: Trace, timeline: Timeline, step: RecordedStep, moments: StepMoments, kind: Kind, num_ranks: int
) -> Timeline:
    """Return the timeline of one rank of a tensor-parallel job.

    Raises:
        MemtraceError: the ranks form no such grid, or the step has no layers with a weight.
    """
    q = grid_side(kind, num_ranks)
    layers = find_layers(trace, timeline, step, moments)
    if num_ranks == 1:
        return timeline
    if kind == "1d":
        return _split_pairs(trace, timeline, moments, layers, num_ranks)
    parameters = find_parameters(trace, timeline)
    state = state_of_parameters(trace, timeline, parameters.name)
    stored = timeline.resize(state, 1 / num_ranks).scale_batch(1 / num_ranks)
    stored = shard_update(trace, stored, moments, num_ranks)
    return _add_transients(stored, layers, q * q, reduces=kind == "3d")


def find_layers(trace: Trace, timeline: Timeline, step: RecordedStep, moments: StepMoments) -> list[Layer]:
    """Return the layers of a step whose operators are products with a parameter, in the order of their forward.

    Raises:
        MemtraceError: there are none.
    """
    accesses = step_accesses(trace, step)
    phase, name = op_column(trace, accesses.op_id, "phase"), op_column(trace, accesses.op_id, "name")
    module = op_column(trace, accesses.op_id, "module")
    products = {number for number in np.unique(name).tolist() if is_compute_bound(trace.name(number) or "")}
    is_product = np.isin(name, list(products)) & (phase == PHASE["forward"]) & (module >= 0)
    parameters = find_parameters(trace, timeline)
    largest = {
        owner: int(parameters.size[np.array([other == owner for other in parameters.module], bool)].max())
        for owner in set(parameters.module)
    }
    grown = np.zeros(len(blocks(trace)), np.int64)
    recorded = timeline.block >= 0
    grown[timeline.block[recorded]] = (timeline.size - timeline.constant)[recorded]
    layers = []
    for number in dict.fromkeys(module[is_product].tolist()):
        owner = trace.name(number) or ""
        forward = moments.find("forward", (owner,))
        if owner in largest and forward is not None:
            inputs, outputs = _operand_bytes(accesses, is_product & (module == number), grown)
            layers.append(Layer(owner, inputs, largest[owner], outputs, forward, moments.find("backward", (owner,))))
    if not layers:
        raise MemtraceError("the step has no layers with a weight that tensor parallelism could split.")
    return sorted(layers, key=lambda layer: layer.forward.begin)


def _operand_bytes(accesses: StepAccesses, of_layer: Array, grown: Array) -> tuple[int, int]:
    """Return the bytes of the largest input and output of some calls that grow with the batch."""
    used = of_layer[accesses.call]
    return (
        int(grown[accesses.block[used & accesses.is_read]].max(initial=0)),
        int(grown[accesses.block[used & accesses.is_alloc]].max(initial=0)),
    )


def _split_pairs(
    trace: Trace, timeline: Timeline, moments: StepMoments, layers: list[Layer], num_ranks: int
) -> Timeline:
    """Split pairs of layers, and what is computed between them."""
    names = tuple(layer.name for layer in layers)
    of_layers = [name for name in find_parameters(trace, timeline).name if name.rpartition(".")[0] in names]
    split = timeline.resize(state_of_parameters(trace, timeline, of_layers), 1 / num_ranks)
    split = shard_update(trace, split, moments, num_ranks)
    between = np.zeros(len(split), bool)
    for first, second in zip(layers[::2], layers[1::2], strict=False):
        between |= (split.begin >= first.forward.begin) & (split.begin < second.forward.begin)
        if first.backward is not None and second.backward is not None:
            between |= (split.begin >= second.backward.begin) & (split.begin < first.backward.begin)
    grows = between & (split.constant < split.size)
    return split.resize(grows, 1 / num_ranks)


def _add_transients(timeline: Timeline, layers: list[Layer], parts: int, *, reduces: bool) -> Timeline:
    """Insert what each product of each layer receives and, if ``reduces``, the result before its reduction."""
    rows = []
    for layer in layers:
        grown = layer.input_bytes + (layer.output_bytes if reduces else 0)
        for runs in (layer.forward, layer.backward):
            if runs is not None:
                end = runs.end + TICKS_PER_ROW
                rows += [(grown // parts, runs.begin, end, True), (layer.weight_bytes // parts, runs.begin, end, False)]
    for grows in (True, False):
        size, begin, end = np.array([row[:3] for row in rows if row[3] == grows], np.int64).T
        timeline = timeline.insert(size, begin, end, "temporary", grows_with_batch=grows)
    return timeline
