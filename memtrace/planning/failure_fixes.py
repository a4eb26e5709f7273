"""Fixes for an out-of-memory error, from the step that it interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.oom import OutOfMemory
from memtrace.analysis.options import AnalysisOptions
from memtrace.planning.auto_changes import OPTIMIZER_IN_BACKWARD
from memtrace.planning.fix import NO_COST, Fix, Shortfall
from memtrace.planning.fixes import (
    FUSE,
    IN_BACKWARD_COST,
    allocator_fixes,
    line_fixes,
    select_useful,
    step_fixes,
)
from memtrace.planning.unfinished_step import BatchEstimate, CheckpointEstimate, estimate_batch, estimate_checkpointing
from memtrace.planning.unfinished_update import UpdateEstimate, estimate_update
from memtrace.trace import Trace
from memtrace.units import format_bytes, format_count, format_share

LIST_PROCESSES: Final = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"


def failure_fixes(trace: Trace, failure: OutOfMemory, options: AnalysisOptions) -> list[Fix]:
    """Return the fixes for an out-of-memory error, in no particular order.

    Args:
        trace: A single-rank trace.
        failure: The failed allocation.
        options: Thresholds.
    """
    if failure.cause == "request too large":
        return [_smaller_request(failure)]
    if failure.cause == "outside memory":
        return [_less_outside_memory(failure)]
    room = failure.room
    shortfall = Shortfall(room.lacking_bytes, room.certain_bytes) if room and failure.cause == "capacity" else None
    fixes = [*_update_fixes(estimate_update(trace, failure)), *line_fixes(trace, failure.device, shortfall, options)]
    fixes += _pass_fixes(trace, failure, shortfall)
    # In a first step that is cut short by lack of memory, more requests would follow than a setting makes fit.
    if failure.cause == "fragmentation" or len(step_rows(trace).number):
        fixes += allocator_fixes(
            trace, failure.device, has_failed=True, capacity_bytes=known_capacity(failure, options)
        )
    return select_useful(fixes, shortfall)


def known_capacity(failure: OutOfMemory, options: AnalysisOptions) -> int | None:
    """Return the memory that the device gave to the allocator: as stated, or as the driver reported at the failure."""
    if options.capacity_bytes is not None or failure.room is None or failure.device_free_bytes is None:
        return options.capacity_bytes
    return failure.room.state.reserved_bytes + failure.device_free_bytes


def _smaller_request(failure: OutOfMemory) -> Fix:
    assert failure.room is not None
    obtainable = failure.room.state.reserved_bytes + (failure.device_free_bytes or 0)
    where = f" at {failure.site}" if failure.site else ""
    return Fix(
        f"Check the shape of the tensor{where}: this process can have {format_bytes(obtainable)} of the device for "
        "everything.",
        None,
        failure.asked_bytes - obtainable,
        "if the shape is right, the computation has to be split",
        None,
    )


def _less_outside_memory(failure: OutOfMemory) -> Fix:
    assert failure.room is not None
    return Fix(
        f"Stop the other processes on {failure.device}, or run on another device: the command lists them. Libraries of "
        "this process can hold a part as well.",
        LIST_PROCESSES,
        failure.room.outside_excess_bytes,
        NO_COST,
        True,
    )


def _update_fixes(estimate: UpdateEstimate | None) -> Iterator[Fix]:
    if estimate is None:
        return
    if estimate.has_fused and estimate.temporary_bytes:
        temporary = format_bytes(estimate.temporary_bytes)
        yield Fix(
            f"Use the fused implementation of the optimizer, which needs none of the {temporary} of temporary tensors.",
            FUSE,
            estimate.temporary_bytes,
            NO_COST,
            estimate.fused_is_enough,
        )
    yield Fix(
        "Update each parameter in backward, as soon as its gradient is complete: gradients and temporary tensors then "
        "exist for one parameter at a time.",
        OPTIMIZER_IN_BACKWARD,
        estimate.in_backward_saved_bytes,
        IN_BACKWARD_COST,
        estimate.in_backward_is_enough,
    )


def _pass_fixes(trace: Trace, failure: OutOfMemory, shortfall: Shortfall | None) -> Iterator[Fix]:
    """Yield fixes for the activations: from complete steps if there are any, else from the step that failed."""
    layers = estimate_checkpointing(trace, failure)
    planned = list(step_fixes(trace, failure.device, shortfall))
    if layers is not None and not any(fix.is_enough for fix in planned):
        yield _checkpointing(layers)
    yield from planned
    batch = estimate_batch(trace, failure, layers)
    if batch is not None:
        yield _micro_batches(batch)


def _checkpointing(layers: CheckpointEstimate) -> Fix:
    of_all = f" of {layers.num_layers}" if layers.num_layers is not None else ""
    return Fix(
        f"Recompute {layers.modules} in backward: {layers.num_calls}{of_all} calls had returned and kept "
        f"{format_bytes(layers.kept_bytes)} for it beside their outputs.",
        "from torch.utils.checkpoint import checkpoint\n"
        "x = checkpoint(module, x, use_reentrant=False)  # instead of x = module(x)",
        layers.saved_bytes,
        "their forward runs twice",
        layers.is_enough,
    )


def _micro_batches(batch: BatchEstimate) -> Fix:
    count = batch.num_micro_batches
    share, at_least = format_share(batch.share), "" if batch.is_whole_step else "at least "
    fits = f"about {share} of the batch fits at once" if batch.is_whole_step else "more than this request may follow"
    return Fix(
        f"Split the batch into {at_least}{format_count(count, 'micro-batch', 'micro-batches')} and accumulate their "
        f"gradients: {fits}.",
        f"for x_part, y_part in zip(x.chunk({count}), y.chunk({count})):\n"
        f"    (loss_function(model(x_part), y_part) / {count}).backward()",
        batch.saved_bytes,
        f"{count} smaller passes per step; batch normalization sees fewer samples",
        True if batch.is_whole_step else None,
    )
