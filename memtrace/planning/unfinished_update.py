"""What would have helped an optimizer that ran out of memory: in its first step, or while it updates parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.event_codes import PHASE
from memtrace.analysis.oom import OutOfMemory
from memtrace.analysis.operators import op_column
from memtrace.analysis.peak import live_after
from memtrace.format.arrays import Array
from memtrace.frames import is_optimizer_base_frame, is_optimizer_frame, normalize_path
from memtrace.planning.whatif_optimizer import OPTIMIZERS, default_implementation, temporary_bytes
from memtrace.trace import Trace


@dataclass(frozen=True)
class UpdateEstimate:
    """What the update of an optimizer needs that ran out of memory. Bytes."""

    optimizer: str
    """Name in ``OPTIMIZERS``."""
    state_bytes: int
    """All state that the optimizer keeps for the parameters that have gradients."""
    missing_state_bytes: int
    """The part of it that did not exist when the allocation failed."""
    temporary_bytes: int
    """Temporary tensors of an update of all parameters at once."""
    missing_bytes: int
    """By how much the memory was too small for the update as a whole."""
    has_fused: bool
    """Whether torch has a fused update, which allocates no temporary tensors."""
    fused_is_enough: bool
    """Whether a fused update would have fitted."""
    in_backward_saved_bytes: int
    """What is saved if each parameter is updated in backward, as soon as its gradient is complete."""
    in_backward_is_enough: bool
    """Whether that would have fitted, in this step and beside the state in the next one."""


def estimate_update(trace: Trace, failure: OutOfMemory) -> UpdateEstimate | None:
    """Return what the update that ran out of memory needs; None where memory did not run out in a known optimizer.

    Args:
        trace: A single-rank recording.
        failure: The failed allocation.
    """
    if failure.room is None or failure.cause != "capacity" or failure.phase != "optimizer":
        return None
    name = _optimizer_name(trace, failure)
    table, device = blocks(trace), trace.devices.index(failure.device)
    live = live_after(table, device, failure.event)
    of_category = {each: table.size[live[table.category[live] == CATEGORY[each]]] for each in ("gradient", "parameter")}
    # Files of other tools name no gradients: one of each parameter exists then.
    gradients = of_category["gradient"] if len(of_category["gradient"]) else of_category["parameter"]
    if name is None or not len(gradients):
        return None
    memory, implementation = OPTIMIZERS[name], default_implementation(failure.device)
    state = memory.state * int(gradients.sum())
    missing_state = max(state - failure.live_bytes_by_category.get("optimizer_state", 0), 0)
    of_update = live[(table.phase[live] == PHASE["optimizer"]) & (table.category[live] != CATEGORY["optimizer_state"])]
    held_bytes = int(table.size[of_update].sum())
    all_at_once = temporary_bytes(memory, implementation, gradients)
    one_at_a_time = temporary_bytes(memory, implementation, gradients[np.argmax(gradients) :][:1])
    # What is reserved and unused may be in pieces: only what the device has free is counted as room.
    room = (failure.device_free_bytes or 0) + held_bytes
    largest = int(gradients.max())
    saved = int(gradients.sum()) - largest + all_at_once - one_at_a_time
    beside_state = _peak_of_passes(trace, device, failure.event) + state + largest
    return UpdateEstimate(
        name,
        state,
        missing_state,
        all_at_once,
        missing_state + all_at_once - held_bytes - failure.room.available_bytes,
        memory.has_fused,
        memory.has_fused and missing_state <= room,
        saved,
        missing_state + all_at_once - saved <= room
        and beside_state + one_at_a_time <= failure.live_bytes + (failure.device_free_bytes or 0),
    )


def _optimizer_name(trace: Trace, failure: OutOfMemory) -> str | None:
    """Return the optimizer whose code made the request, by its file in torch; None: unknown."""
    op = trace.columns("events", "op_id")["op_id"][[failure.event]]
    stack = int(op_column(trace, op, "stack")[0])
    frames = trace.frames(stack) if stack >= 0 else []
    files = [normalize_path(f.file) for f in frames if is_optimizer_frame(f) and not is_optimizer_base_frame(f)]
    name = files[0].rpartition("/")[2].removesuffix(".py") if files else ""
    return name if name in OPTIMIZERS and OPTIMIZERS[name].state else None


def _peak_of_passes(trace: Trace, device: int, failure_row: int) -> int:
    """Return the peak of what forward and backward held so far, without gradients and what the optimizer made."""
    table = blocks(trace)
    is_gradient = table.category == CATEGORY["gradient"]
    is_gradient |= (table.category == CATEGORY["unknown"]) & (table.phase == PHASE["backward"])
    others = ~is_gradient & (table.category != CATEGORY["optimizer_state"])
    counted = np.flatnonzero((table.device == device) & others & (table.phase != PHASE["optimizer"]))
    counted = counted[table.alloc_event[counted] <= failure_row]
    ended = counted[(table.free_event[counted] >= 0) & (table.free_event[counted] <= failure_row)]
    rows = np.concatenate([table.alloc_event[counted], table.free_event[ended]])
    change: Array = np.concatenate([table.size[counted], -table.size[ended]])
    return int(np.cumsum(change[np.argsort(rows, kind="stable")]).max(initial=0))
