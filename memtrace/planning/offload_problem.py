"""The problem that an offload plan solves: what a step needs when, cut at the moments at which a plan can act."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import requested_bytes
from memtrace.format.arrays import Array
from memtrace.planning.offload_candidates import StepSaves
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace


@dataclass(frozen=True)
class OffloadProblem:
    """A step as a sequence of pieces, and the tensors that could be offloaded in it.

    Every piece but the first begins at a moment at which autograd saves or reads tensors: there the plan can let the
    program wait for a copy, or start one.
    """

    piece_ns: Array
    """Start of each piece since the start of the step; one element longer: the last is the end of the step."""
    piece_bytes: Array
    """Peak of each piece with nothing offloaded."""
    piece_node: Array
    """The autograd node that saves or reads tensors at the start of each piece; -1 for the first piece."""
    is_read: Array
    """Whether backward reads saved tensors at the start of each piece."""
    size: Array
    """Bytes of each tensor; tensors are in the order in which forward saves them."""
    group: Array
    """Tensors of the same group are offloaded together; numbered from 0."""
    node: Array
    """The autograd node that saves each tensor first."""
    read_node: Array
    """The autograd node that reads each tensor first."""
    ready: Array
    """The piece at whose start the copy of each tensor to the host can begin."""
    free: Array
    """The first piece in which nothing but saved tensors holds the tensor."""
    variable: Array
    """The first piece in which no variable of the program can hold the tensor, ``free`` or later."""
    back: Array
    """The piece at whose start backward reads the tensor."""

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return int(self.group.max(initial=-1)) + 1

    def intervals_ns(self) -> Array:
        """Return the access interval of each tensor between forward and backward."""
        return np.asarray(self.piece_ns[self.back] - self.piece_ns[self.ready])

    def level(self, tensor: Array, leave: Array, fetch: Array) -> Array:
        """Return the peak of each piece without the tensors that are absent from ``leave`` until before ``fetch``."""
        change = np.zeros(len(self.piece_bytes) + 1, np.int64)
        absent = leave < fetch
        np.add.at(change, leave[absent], -self.size[tensor[absent]])
        np.add.at(change, fetch[absent], self.size[tensor[absent]])
        return np.asarray(self.piece_bytes + np.cumsum(change)[:-1])

    def lowest_level(self, chosen: Array) -> Array:
        """Return the peak of each piece if the chosen tensors (a mask) were copied in no time."""
        tensor = np.flatnonzero(chosen & (self.free < self.back))
        return self.level(tensor, self.free[tensor], self.back[tensor])

    def prefetch_pieces(self) -> Array:
        """Return for each piece whether a copy back can be bound to its start.

        A plan names the autograd node at which the copy begins. It begins at the first read of that node or of one that
        forward ran before, so that only nodes count that come before all nodes that backward has run so far.
        """
        run = np.cumsum(~self.is_read)  # forward between two backward passes starts anew
        node = np.where(self.is_read, self.piece_node, np.iinfo(np.int64).max)
        can = np.zeros(len(node), bool)
        for number in np.unique(run[self.is_read]):
            of_run = np.flatnonzero(run == number)
            lowest = np.minimum.accumulate(node[of_run])
            before = np.concatenate([[np.iinfo(np.int64).max], lowest[:-1]])
            can[of_run] = self.is_read[of_run] & (node[of_run] < before)
        return can


def build_problem(
    trace: Trace, device: str, step: RecordedStep, saves: StepSaves, changed: ChangedStep | None = None
) -> OffloadProblem:
    """Return the offload problem of a recorded step, with changes if there are any."""
    moments, candidates = saves.moments, saves.candidates
    begin = np.concatenate([[step.first_row], np.maximum(moments.row, step.first_row)])
    return OffloadProblem(
        piece_ns=_piece_times(trace, step, begin) + (0.0 if changed is None else changed.added_ns(begin)),
        piece_bytes=_piece_peaks(trace, device, step, begin) if changed is None else changed.piece_peaks(begin),
        piece_node=np.concatenate([[-1], moments.node]),
        is_read=np.concatenate([[False], moments.is_read]),
        size=blocks(trace).size[candidates.block],
        group=np.unique(candidates.group, return_inverse=True)[1].reshape(-1),
        node=candidates.node,
        read_node=candidates.read_node,
        ready=np.searchsorted(begin, candidates.row + 1),
        free=np.searchsorted(begin, candidates.held_row),
        variable=np.searchsorted(begin, candidates.variable_row),
        back=np.searchsorted(begin, candidates.read_row, side="right") - 1,
    )


@dataclass(frozen=True)
class ChangedStep:
    """The memory and the time of a step with other changes than offloading."""

    positions: Array
    """Positions between rows of events at which the memory changes, ascending."""
    bytes: Array
    """Bytes after each of them."""
    delay_row: Array
    """Positions at which the step is delayed, ascending."""
    delay_ns: Array

    def piece_peaks(self, begin: Array) -> Array:
        """Return the highest level of each piece: the level at its start, and after each change in it."""
        first = np.maximum(np.searchsorted(self.positions, begin, side="left") - 1, 0)
        last = np.append(np.searchsorted(self.positions, begin[1:], side="left") - 1, len(self.positions) - 1)
        limits = np.stack([first, np.maximum(last, first) + 1], axis=1).reshape(-1)
        return np.asarray(np.maximum.reduceat(np.append(self.bytes, 0), limits)[::2])

    def added_ns(self, begin: Array) -> Array:
        """Return by how much the start of each piece is delayed, and the end of the step."""
        total = np.concatenate([[0], np.cumsum(self.delay_ns)])
        return np.append(total[np.searchsorted(self.delay_row, begin, side="left")], total[-1]).astype(np.float64)


def _piece_times(trace: Trace, step: RecordedStep, begin: Array) -> Array:
    time = trace.columns("events", "time_ns")["time_ns"]
    at = time[np.minimum(np.ceil(begin).astype(np.int64), len(time) - 1)] - step.start_ns
    # Times of different threads can be out of order.
    rising = np.concatenate([np.maximum.accumulate(np.clip(at, 0, step.duration_ns)), [step.duration_ns]])
    # The step was chosen for its peak. Its time can be unusual, and the prediction is about the median step.
    scale = 1.0 if not step.cost.step_ns or not step.duration_ns else step.cost.step_ns / step.duration_ns
    return rising * scale


def _piece_peaks(trace: Trace, device: str, step: RecordedStep, begin: Array) -> Array:
    """Return the highest level of each piece: the level at its start, and after each change in it."""
    live = requested_bytes(trace, device)
    level = np.concatenate([[live.start], live.bytes, [live.start]])
    # Change k - 1 leads to level k, so that the piece from row a to row b has the levels first to last.
    first = np.searchsorted(live.rows, begin)
    last = np.concatenate([first[1:], np.searchsorted(live.rows, [step.end_row])])
    # Every other result is that of a piece; the others lie between the end of a piece and the start of the next.
    limits = np.stack([first, last + 1], axis=1).reshape(-1)
    return np.asarray(np.maximum.reduceat(level, limits)[::2])
