"""The timeline of a step recorded in float32 as it would be under ``torch.autocast``.

Matrix products and convolutions compute in half precision: their inputs are cast, their weights are cast once and kept
until forward has ended and backward has used them, and their outputs are half as large. Other operators keep the type
of what they read; some cast it to float32. A node of backward computes all of its gradients in half precision and
releases what it saved; then each gradient is cast to the type of its operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from memtrace.analysis.attribution import op_column
from memtrace.analysis.block_accesses import number_operator_calls
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.event_codes import PHASE
from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.operator_graph import is_compute_bound
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.step_accesses import StepAccesses, step_accesses
from memtrace.planning.timeline import TICKS_PER_ROW, Timeline
from memtrace.trace import Trace

HALF: Final = 0.5
_FLOAT32_ON_GPU: Final = ("softmax", "layer_norm", "group_norm", "loss", "norm", "pow", "exp", "log", "sum", "cumsum",
                          "prod", "softplus", "cosine_similarity", "cdist", "dist", "renorm")  # fmt: skip
"""Words in the names of operators that autocast runs in float32 on GPUs."""
_FLOAT32_ON_CPU: Final = ("loss", "log_softmax", "prod", "quantile", "grid_sampler", "fft", "polar", "linalg")
"""The same on the CPU; the log_softmax is that of cross_entropy_loss, whose parts a trace shows."""
_RELEASE_TICKS: Final = 1
"""A node of backward releases what it saved this many positions after its last event."""
_CAST_TICKS: Final = 2
"""Positions from the cast of one gradient of a node to that of the next."""
_FIRST_CAST_TICKS: Final = 12
"""The first cast lies this many positions before the first event of the node that follows."""


@dataclass(frozen=True)
class _Call:
    """An operator call of the step."""

    name: str
    phase: int
    sequence: int
    begin: int
    """Position of its first event."""
    end: int
    """Position after its last event."""
    reads: list[int]
    allocs: list[int]


class _Autocast:
    """One pass over the operators of a step."""

    def __init__(self, trace: Trace, timeline: Timeline, step: RecordedStep, device: str) -> None:
        self.timeline = timeline
        self.calls = _read_calls(trace, step)
        if not self.calls:
            raise MemtraceError("the step has no operators: what autocast changes is not known.")
        self.float32_words = _FLOAT32_ON_CPU if device == "cpu" else _FLOAT32_ON_GPU
        count = len(blocks(trace))
        self.place = np.full(count, -1, np.int64)
        recorded = np.flatnonzero(timeline.block >= 0)
        self.place[timeline.block[recorded]] = recorded
        self.factor = np.ones(len(timeline))
        self.is_parameter = timeline.of_category("parameter")
        self.is_gradient = timeline.of_category("gradient")
        self.is_workspace = timeline.of_category("workspace")
        self.grows = timeline.constant < timeline.size
        self.begin = timeline.begin.copy()
        self.node_end, self.next_begin = self._find_node_ends()
        self.readers = {
            (block, call.sequence) for call in self.calls if call.phase == PHASE["backward"] for block in call.reads
        }
        self.casts: list[tuple[int, int, int, bool]] = []
        self.weights: dict[tuple[int, int], tuple[int, int]] = {}
        """Begin and end of the cast of each parameter in each pass of forward."""
        self.saved_casts: set[tuple[int, int]] = set()
        self.num_casts: dict[int, int] = {}
        self.forward_ends = self._find_forward_ends()

    def _find_node_ends(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the end of each node of backward, and the position of the first event of the call after it."""
        ends: dict[int, int] = {}
        following: dict[int, int] = {}
        begins = [*(call.begin for call in self.calls[1:]), self.timeline.stop]
        for call, next_begin in zip(self.calls, begins, strict=True):
            if call.phase == PHASE["backward"] and call.end >= ends.get(call.sequence, 0):
                ends[call.sequence], following[call.sequence] = call.end, max(next_begin, call.end)
        return ends, following

    def _find_forward_ends(self) -> Array:
        """Return the ends of the passes of forward: autocast forgets its casts of parameters there."""
        phases = np.array([call.phase for call in self.calls])
        is_last = (phases == PHASE["forward"]) & np.append(phases[1:] != PHASE["forward"], True)
        return np.array([call.end for call in self.calls], np.int64)[np.flatnonzero(is_last)]

    def run(self) -> Timeline:
        """Return the timeline under autocast."""
        forward_calls: dict[int, _Call] = {}
        for call in self.calls:
            if call.phase == PHASE["forward"]:
                self._run_forward(call)
                if call.sequence >= 0:
                    forward_calls.setdefault(call.sequence, call)
            elif call.phase == PHASE["backward"]:
                self._run_backward(call, forward_calls.get(call.sequence))
        timeline = self.timeline.cut(np.ones(len(self.timeline), bool), begin=self.begin, end=self._shorten())
        halved = timeline.resize(self.factor < 1, HALF)
        for (place, _), (begin, stop) in self.weights.items():
            self.casts.append((round(int(self.timeline.size[place]) * HALF), begin, stop, False))
        for grows in (True, False):
            rows = np.array([cast[:3] for cast in self.casts if cast[3] == grows], np.int64).reshape(-1, 3)
            size, begins, ends = rows.T
            halved = halved.insert(size, begins, ends, "temporary", grows_with_batch=grows)
        return halved

    def _run_forward(self, call: _Call) -> None:
        data = [place for place in self._places(call.reads) if self.grows[place]]
        outputs = self._places(call.allocs)
        if is_compute_bound(call.name):
            for block in call.reads:
                self._cast_operand(call, block)
            self.factor[[place for place in outputs if self.grows[place] or self.is_workspace[place]]] = HALF
        elif self._is_float32(call):
            for block in call.reads:
                place = int(self.place[block])
                if place >= 0 and self.grows[place] and self.factor[place] < 1:
                    self.casts.append((int(self.timeline.size[place]), call.begin, self._release_of(call, block), True))
                    self.saved_casts.add((block, call.sequence))
        elif data and all(self.factor[place] < 1 for place in data):
            size = self.timeline.size
            values = [place for place in outputs if not _holds_indices(call, place, outputs, size)]
            self.factor[[place for place in values if self.grows[place]]] = HALF

    def _places(self, block_ids: list[int]) -> list[int]:
        """Return the positions in the timeline of those of some blocks that it has."""
        return [int(self.place[block]) for block in block_ids if self.place[block] >= 0]

    def _cast_operand(self, call: _Call, block: int) -> None:
        """Insert the cast of an operand of a product, which backward keeps instead of the operand."""
        place = int(self.place[block])
        if place < 0 or self.factor[place] < 1:
            return
        end = self._release_of(call, block)
        if self.is_parameter[place]:
            run = int(np.searchsorted(self.forward_ends, call.end))
            begin, stop = self.weights.get((place, run), (call.begin, int(self.forward_ends[run])))
            self.weights[place, run] = (begin, max(stop, end))
        elif self.grows[place]:
            self.casts.append((round(int(self.timeline.size[place]) * HALF), call.begin, end, True))
            self.saved_casts.add((block, call.sequence))

    def _is_float32(self, call: _Call) -> bool:
        """Return whether autocast casts what an operator reads to float32."""
        return any(word in call.name for word in self.float32_words)

    def _release_of(self, call: _Call, block: int) -> int:
        """Return when a call, or the node that it creates, no longer needs the cast of a block."""
        if (block, call.sequence) not in self.readers:
            return call.end
        return max(call.end, self.node_end[call.sequence] - TICKS_PER_ROW + _RELEASE_TICKS)

    def _run_backward(self, call: _Call, forward: _Call | None) -> None:
        # The gradient of what a call of forward reads has the same type as that.
        operands = self._places(call.reads if forward is None else forward.reads)
        data = [place for place in operands if self.grows[place]]
        is_half = bool(data) and all(self.factor[place] < 1 for place in data)
        is_product = is_compute_bound(call.name) or (forward is not None and is_compute_bound(forward.name))
        is_float32 = forward is not None and self._is_float32(forward)
        for place in self._places(call.allocs):
            is_result = self.grows[place] or self.is_gradient[place]
            if is_result and self.timeline.end[place] <= self.node_end[call.sequence]:
                # It does not leave the node.
                self.factor[place] = HALF if is_product or (is_half and not is_float32) else 1.0
            elif self.grows[place] and is_half and not is_float32:
                self.factor[place] = HALF
            elif is_result and (is_product or (is_half and is_float32)):
                self._cast_gradient(call, place, computed=HALF if is_product else 1.0)
            elif is_product and self.is_workspace[place]:
                self.factor[place] = HALF

    def _cast_gradient(self, call: _Call, place: int, computed: float) -> None:
        """Let a node compute a gradient in one type, which is cast to the other one when the node has run.

        Args:
            call: An operator call of the node.
            place: The gradient.
            computed: Its size as computed, as a share of its size in float32.
        """
        order = self.num_casts.get(call.sequence, 0)
        self.num_casts[call.sequence] = order + 1
        ticks = min(order * _CAST_TICKS, _FIRST_CAST_TICKS - _CAST_TICKS)
        cast_at = self.next_begin[call.sequence] - _FIRST_CAST_TICKS + ticks
        size = round(int(self.timeline.size[place]) * computed)
        self.casts.append((size, int(self.timeline.begin[place]), cast_at + 1, bool(self.grows[place])))
        self.begin[place] = max(int(self.begin[place]), min(cast_at, int(self.timeline.end[place])))
        if computed == 1.0:
            self.factor[place] = HALF

    def _shorten(self) -> Array:
        """Return the ends of the blocks, which backward no longer keeps where it keeps a cast."""
        end: Array = self.timeline.end.copy()
        kept: dict[int, int] = {}
        shortened = {block for block, _ in self.saved_casts}
        for call in self.calls:
            for block in (*call.reads, *call.allocs):
                is_cast = call.phase == PHASE["backward"] and (block, call.sequence) in self.saved_casts
                if block in shortened and not is_cast:
                    kept[block] = call.end + TICKS_PER_ROW
        for block in shortened:
            place = int(self.place[block])
            if self.timeline.category[place] == CATEGORY["activation"]:
                end[place] = min(int(end[place]), kept.get(block, int(end[place])))
        return end


def autocast(trace: Trace, timeline: Timeline, step: RecordedStep, device: str) -> Timeline:
    """Return the timeline of a step under ``torch.autocast``, which was recorded without.

    Takes time in proportion to the operators of the step.
    """
    return _Autocast(trace, timeline, step, device).run()


def _holds_indices(call: _Call, place: int, outputs: list[int], size: Array) -> bool:
    """Return whether an output holds the 64-bit indices of a pooling operator: the larger of its two."""
    is_larger = any(size[place] > size[other] for other in outputs)
    return "with_indices" in call.name and is_larger


def _read_calls(trace: Trace, step: RecordedStep) -> list[_Call]:
    accesses = step_accesses(trace, step)
    numbers = number_operator_calls(trace)
    op = trace.columns("events", "op_id")["op_id"]
    rows = np.flatnonzero(op[step.first_row : step.end_row] >= 0) + step.first_row
    # The last row of each call wins in both directions.
    order = {int(identity): place for place, identity in enumerate(accesses.op_id.tolist())}
    call_of = {int(identity): int(numbers.number[row]) for identity, row in zip(op[rows].tolist(), rows, strict=True)}
    names = op_column(trace, accesses.op_id, "name").tolist()
    phases = op_column(trace, accesses.op_id, "phase").tolist()
    sequences = op_column(trace, accesses.op_id, "sequence_nr").tolist()
    reads, allocs = _by_call(accesses, accesses.is_read), _by_call(accesses, accesses.is_alloc)
    return [
        _Call(
            trace.name(names[place]) or "",
            phases[place],
            sequences[place],
            int(numbers.first[call_of[identity]]) * TICKS_PER_ROW,
            (int(numbers.last[call_of[identity]]) + 1) * TICKS_PER_ROW,
            reads[place],
            allocs[place],
        )
        for identity, place in order.items()
    ]


def _by_call(accesses: StepAccesses, mask: Array) -> list[list[int]]:
    """Return the blocks of some accesses for each call."""
    order = np.argsort(accesses.call[mask], kind="stable")
    block = accesses.block[mask][order]
    bounds = np.searchsorted(accesses.call[mask][order], np.arange(len(accesses.op_id) + 1)).tolist()
    return [block[first:last].tolist() for first, last in pairwise(bounds)]
