"""Changes beside recomputation that ``plan auto`` considers, and their effect on the memory of a step.

``memtrace.apply`` does not carry these out: each comes with the lines that the user adds to the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import PHASE, SPAN, op_column, phase_rows
from memtrace.analysis.block_accesses import group_accesses_by_block
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.format.arrays import Array
from memtrace.planning.recompute_options import AFTER_ROW, NEVER
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace
from memtrace.units import format_bytes

OPTIMIZER_CALL_NS: Final = 60_000
"""Time that a call of an optimizer adds for each parameter that it updates alone."""
OPTIMIZER_IN_BACKWARD: Final = """\
# in place of optimizer.step() and optimizer.zero_grad(), with your optimizer and its options:
optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}
def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)"""


@dataclass(frozen=True)
class ProgramChange:
    """A change of the program that the user makes."""

    name: str
    instruction: str
    """What to add to the program, as Python or as a line of the shell."""
    cost_ns: int | None
    """Time that it adds to the step; None: unknown."""
    note: str
    """What the prediction rests on."""


@dataclass(frozen=True)
class LevelChange:
    """How a change of the program alters the memory of a step that recomputation does not affect."""

    change: ProgramChange
    positions: Array
    """Positions on the timeline of ``RecomputeModel``."""
    bytes: Array
    """Change of the level at each."""

    @classmethod
    def of_intervals(cls, change: ProgramChange, begin: Array, end: Array, size: Array) -> LevelChange:
        """Return the change that adds (or, if negative, removes) bytes between two positions; ``NEVER``: no end."""
        ends = end < NEVER
        return cls(change, np.concatenate([begin, end[ends]]), np.concatenate([size, -size[ends]]).astype(np.int64))


def optimizer_in_backward(trace: Trace, step: RecordedStep, device: str) -> LevelChange | None:
    """Return the effect of updating every parameter as soon as its gradient is complete; None where it cannot be done.

    Gradients are then freed one by one, and the optimizer needs temporary memory for one parameter at a time.
    """
    if trace.manifest.world_size > 1 or _num_backwards(trace, step) != 1:
        return None
    table = blocks(trace)
    on_device = table.device == trace.devices.index(device)
    gradient = np.flatnonzero(on_device & (table.category == CATEGORY["gradient"]) & _in_step(trace, step))
    if not len(gradient):
        return None
    begin, end = _limits(trace, step, gradient)
    complete = _last_use_in_backward(trace, step, gradient) + AFTER_ROW
    is_computed = complete > begin
    size = table.size[gradient].astype(np.int64)
    temporary = np.flatnonzero(_is_optimizer_temporary(trace, step) & on_device)
    temporary_begin, temporary_end = _limits(trace, step, temporary)
    temporary_size = table.size[temporary].astype(np.int64)
    transient = _temporary_bytes(trace, step, temporary, size)
    new_end = np.where(is_computed, np.minimum(complete, end), begin)
    at = new_end[is_computed]
    change = ProgramChange(
        "optimizer in backward",
        OPTIMIZER_IN_BACKWARD,
        OPTIMIZER_CALL_NS * int(is_computed.sum()),
        "Optimizer in backward excludes gradient clipping, gradient accumulation and loss scaling.",
    )
    return LevelChange.of_intervals(
        change,
        np.concatenate([new_end, temporary_begin, at - AFTER_ROW / 2]),
        np.concatenate([end, temporary_end, at]),
        np.concatenate([-size, -temporary_size, transient[is_computed]]),
    )


def shard_optimizer_state(
    trace: Trace, step: RecordedStep, device: str, num_ranks: int, link_bytes_per_s: float
) -> LevelChange | None:
    """Return the effect of sharding the optimizer state over data-parallel ranks (ZeRO 1); None without such state."""
    table = blocks(trace)
    on_device = (table.device == trace.devices.index(device)) & _in_step(trace, step)
    state = np.flatnonzero(on_device & (table.category == CATEGORY["optimizer_state"]))
    if not len(state) or num_ranks < 2:
        return None
    parameter_bytes = int(table.size[on_device & (table.category == CATEGORY["parameter"])].sum())
    begin, end = _limits(trace, step, state)
    saved = table.size[state] - -(-table.size[state] // num_ranks)
    seconds = parameter_bytes * (num_ranks - 1) / num_ranks / link_bytes_per_s
    change = ProgramChange(
        f"optimizer state sharded over {num_ranks} ranks",
        "optimizer = torch.distributed.optim.ZeroRedundancyOptimizer(\n"
        "    model.parameters(), optimizer_class=torch.optim.AdamW)  # your optimizer and its options",
        round(seconds * 1e9),
        f"Sharding gathers {format_bytes(parameter_bytes)} of parameters in every step at "
        f"{format_bytes(round(link_bytes_per_s))}/s, without overlap.",
    )
    return LevelChange.of_intervals(change, begin, end, -saved)


def _in_step(trace: Trace, step: RecordedStep) -> Array:
    table = blocks(trace)
    ends_before = (table.free_event >= 0) & (table.free_event < step.first_row)
    result: Array = (table.alloc_event < step.end_row) & ~ends_before
    return result


def _limits(trace: Trace, step: RecordedStep, block: Array) -> tuple[Array, Array]:
    """Return the positions on the timeline at which blocks begin and end."""
    table = blocks(trace)
    free = table.free_event[block]
    begin = np.maximum(table.alloc_event[block], step.first_row - 1).astype(np.float64)
    return begin, np.where((free >= 0) & (free < step.end_row), free, NEVER).astype(np.float64)


def _last_use_in_backward(trace: Trace, step: RecordedStep, block: Array) -> Array:
    """Return the last row at which backward allocates or accesses each block in a step; -1: none."""
    table, accesses, phases = blocks(trace), group_accesses_by_block(trace), phase_rows(trace)
    last = np.full(len(table), -1, np.int64)
    inside = (accesses.event >= step.first_row) & (accesses.event < step.end_row)
    in_backward = op_column(trace, accesses.op, "phase") == PHASE["backward"]
    if phases is not None:
        in_backward |= phases.phase[phases.pieces(accesses.event)] == PHASE["backward"]
    np.maximum.at(last, accesses.block[inside & in_backward], accesses.event[inside & in_backward])
    allocated = (table.alloc_event >= step.first_row) & (table.phase == PHASE["backward"])
    last[allocated] = np.maximum(last[allocated], table.alloc_event[allocated])
    return last[block]


def _is_optimizer_temporary(trace: Trace, step: RecordedStep) -> Array:
    table = blocks(trace)
    state = [CATEGORY[name] for name in ("parameter", "gradient", "optimizer_state")]
    inside = (table.alloc_event >= step.first_row) & (table.alloc_event < step.end_row) & (table.free_event >= 0)
    result: Array = inside & (table.phase == PHASE["optimizer"]) & ~np.isin(table.category, state)
    return result


def _temporary_bytes(trace: Trace, step: RecordedStep, temporary: Array, gradient_size: Array) -> Array:
    """Return the bytes that the optimizer needs beside the state to update each parameter alone."""
    table = blocks(trace)
    if not len(temporary) or not len(gradient_size):
        return np.zeros(len(gradient_size), np.int64)
    begin, end = _limits(trace, step, temporary)
    rows = np.concatenate([begin, end])
    change = np.concatenate([table.size[temporary], -table.size[temporary]])
    peak = int(np.cumsum(change[np.lexsort((change, rows))]).max())
    names = {trace.name(int(number)) or "" for number in np.unique(table.op_name[temporary])}
    updates_all = any("_foreach_" in name or "_fused_" in name for name in names)
    basis = int(gradient_size.sum()) if updates_all else int(gradient_size.max())
    return -(-gradient_size * peak // max(basis, 1))


def _num_backwards(trace: Trace, step: RecordedStep) -> int:
    """Return the number of backward passes of a step."""
    spans = trace.columns("spans", "kind", "name", "start_ns")
    inside = (spans["start_ns"] >= step.start_ns) & (spans["start_ns"] < step.start_ns + step.duration_ns)
    chosen = np.flatnonzero((spans["kind"] == SPAN["phase"]) & inside)
    return sum(trace.name(int(number)) == "backward" for number in spans["name"][chosen].tolist())
