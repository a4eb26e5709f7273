"""What checkpointing would save in a forward pass that ran out of memory.

Plans start from a recorded step. A program that runs out of memory in its first forward has none, but the calls that
had returned by then show what they kept.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.block_groups import module_pattern
from memtrace.analysis.blocks import blocks
from memtrace.analysis.event_codes import PHASE
from memtrace.analysis.operators import op_column
from memtrace.format.arrays import Array
from memtrace.planning.module_calls import ModuleCalls, find_module_calls
from memtrace.trace import Trace

MIN_CALLS = 2
"""Least calls that make modules the layers of a stack."""


@dataclass(frozen=True)
class CheckpointEstimate:
    """What the layers of a stack keep that checkpointing each of them would not."""

    modules: str
    """The layers, such as ``GPT.blocks.*``."""
    num_calls: int
    """Calls that had returned when the allocation failed."""
    saved_bytes: int
    """Bytes that these calls kept, without their outputs, which the next layer reads."""


def estimate_checkpointing(trace: Trace, device: str, failure_row: int) -> CheckpointEstimate | None:
    """Return the layers whose checkpointing would have saved most when an allocation failed; None: no layers were run.

    Args:
        trace: A single-rank recording.
        device: The device.
        failure_row: Row of the failed allocation in the events table.
    """
    waiting = _waiting_blocks(trace, device, failure_row)
    if not len(waiting):
        return None
    time_ns = trace.columns("events", "time_ns")["time_ns"]
    calls = find_module_calls(trace, int(time_ns[_end_of_last_backward(trace, failure_row)]), int(time_ns[failure_row]))
    saved: defaultdict[str, int] = defaultdict(int)
    num_calls: defaultdict[str, int] = defaultdict(int)
    for call in np.flatnonzero(calls.end_row <= failure_row).tolist():
        pattern = module_pattern(trace.name(int(calls.module[call])))
        if pattern is not None and "*" in pattern:
            saved[pattern] += _kept_by_call(trace, calls, call, waiting)
            num_calls[pattern] += 1
    stacks = [pattern for pattern in saved if num_calls[pattern] >= MIN_CALLS and saved[pattern] > 0]
    if not stacks:
        return None
    best = max(stacks, key=lambda pattern: saved[pattern])
    return CheckpointEstimate(best, num_calls[best], saved[best])


def _waiting_blocks(trace: Trace, device: str, failure_row: int) -> Array:
    """Return the activations of the forward that failed, in order of allocation."""
    table = blocks(trace)
    on_device = table.device == trace.devices.index(device)
    is_live = (table.alloc_event <= failure_row) & ((table.free_event < 0) | (table.free_event > failure_row))
    found = np.flatnonzero(table.waits_for_backward & on_device & is_live)
    return found[np.argsort(table.alloc_event[found])]


def _end_of_last_backward(trace: Trace, failure_row: int) -> int:
    phase = op_column(trace, trace.columns("events", "op_id")["op_id"][:failure_row], "phase")
    return int(np.flatnonzero(phase == PHASE["backward"]).max(initial=0))


def _kept_by_call(trace: Trace, calls: ModuleCalls, call: int, waiting: Array) -> int:
    """Return the bytes of the activations that a call made, without the last one: its output."""
    table = blocks(trace)
    first, end = np.searchsorted(table.alloc_event[waiting], [calls.first_row[call], calls.end_row[call]])
    return int(table.size[waiting[first : max(end - 1, first)]].sum())
