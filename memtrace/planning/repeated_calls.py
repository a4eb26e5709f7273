"""What autograd saves in a step once module calls are recomputed: their inputs instead of what their operators save.

A checkpointed call saves its tensor arguments before it runs. What its operators save is kept by the checkpoint alone,
so that no other hook sees it, neither in forward nor in backward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.planning.offload_saves import PassAccesses, Saves
from memtrace.planning.recompute_calls import CheckpointableCalls
from memtrace.trace import Trace

BEFORE_REPETITION: Final = 0.6
"""The inputs of a call are read this far before the row of backward before which the call runs again."""


@dataclass(frozen=True)
class RepeatedCalls:
    """The module calls of a step that backward repeats, in the order of forward. Rows of events."""

    first_row: Array
    end_row: Array
    start_ns: Array
    repeat_row: Array
    """Row of backward before which each call runs again."""
    release_row: Array
    """Row of backward after which nothing needs the inputs of the call."""
    cost_ns: Array
    """Time that the repetition adds."""
    input_block: Array
    """Pairs of a block ..."""
    input_call: Array
    """... and a call that reads it although the block is older than the call."""

    def replace_saves(self, accesses: PassAccesses, saves: Saves) -> Saves:
        """Return what the step saves with the repetitions, in the order of forward."""
        if not len(self.first_row):
            return saves
        place = np.searchsorted(self.first_row, saves.row, side="right") - 1
        is_inside = (place >= 0) & (saves.row < self.end_row[np.maximum(place, 0)])
        others = saves.select(~is_inside)
        call = self.input_call
        added = Saves(
            block=self.input_block,
            node=self._last_nodes(accesses)[call],
            time_ns=self.start_ns[call],
            row=self.first_row[call] - 1,
            read_row=self.repeat_row[call] - BEFORE_REPETITION,
            last_read_row=self.release_row[call],
        )
        joined = Saves(
            *(np.concatenate([getattr(others, field.name), getattr(added, field.name)]) for field in fields(Saves))
        )
        return joined.select(np.argsort(joined.row, kind="stable"))

    def find_released_inputs(self, trace: Trace, accesses: PassAccesses) -> Array:
        """Return for each block of the trace whether it is an input that only the repetition keeps in memory.

        Backward does not use such a block in the recorded step, and it is freed before the repetition.
        """
        table = blocks(trace)
        released = np.zeros(len(table), bool)
        block, repeat = self.input_block, self.repeat_row[self.input_call]
        freed = (table.free_event[block] >= 0) & (table.free_event[block] < repeat)
        released[block[freed & (table.alloc_event[block] >= 0)]] = True
        released[accesses.block[accesses.in_backward]] = False
        return released

    def _last_nodes(self, accesses: PassAccesses) -> Array:
        """Return the last node that forward creates before each call: the call saves its inputs after it.

        Versions of torch that save them in a node of their own number all further nodes one higher, which begins
        copies back no earlier and ends copies out no later than planned.
        """
        rows, nodes = accesses.row[accesses.in_forward], accesses.node[accesses.in_forward]
        highest = np.concatenate([[int(nodes.min(initial=1 << 60)) - 1], np.maximum.accumulate(nodes)])
        last: Array = highest[np.searchsorted(rows, self.first_row)]
        return last


def repeat_calls(
    trace: Trace, found: CheckpointableCalls, on_device: Array, call: Array, cost_ns: Array
) -> RepeatedCalls:
    """Return the repetition of some calls.

    Args:
        trace: A single-rank trace.
        found: The module calls of a step.
        on_device: For each block of the trace whether it is on the device of the plan.
        call: Positions in ``found.calls``.
        cost_ns: Time that the repetition of each adds.
    """
    order = np.argsort(found.calls.first_row[call], kind="stable")
    call = call[order]
    number = np.full(len(found.calls), -1, np.int64)
    number[call] = np.arange(len(call))
    block, reader = found.inputs
    chosen = (number[reader] >= 0) & on_device[block] if len(block) else np.zeros(0, bool)
    return RepeatedCalls(
        first_row=found.calls.first_row[call],
        end_row=found.calls.end_row[call],
        start_ns=found.calls.start_ns[call],
        repeat_row=found.repeat_row[call],
        release_row=found.release_row[call],
        cost_ns=cost_ns[order],
        input_block=block[chosen],
        input_call=number[reader[chosen]],
    )
