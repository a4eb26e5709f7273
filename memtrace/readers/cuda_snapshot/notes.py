"""Describes what is missing from a snapshot and where the snapshot contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memtrace.format.arrays import distinct
from memtrace.readers.cuda_snapshot.blocks import Snapshot
from memtrace.readers.cuda_snapshot.entries import KIND
from memtrace.readers.cuda_snapshot.ops import SnapshotOps
from memtrace.readers.lifetimes import describe_contradictions, is_one_of
from memtrace.readers.tables import Array
from memtrace.readers.wording import format_clause
from memtrace.units import format_bytes, format_count


def has_history(snapshot: Snapshot) -> bool:
    """Return whether the snapshot has a history; the entry that torch adds when it takes the snapshot is not one."""
    return len(snapshot.entries) > 1


def describe_gaps(snapshot: Snapshot, ops: SnapshotOps, *, overflowed: bool, frees_at_request: bool) -> list[str]:
    """Return sentences on what is missing or wrong, the most important ones first.

    Args:
        snapshot: the snapshot.
        ops: its operator calls.
        overflowed: whether the snapshot states that its ring buffer overflowed.
        frees_at_request: whether requested frees were taken for completed frees.
    """
    notes = [*_contradictions(snapshot), *_beginning(snapshot, overflowed=overflowed), *snapshot.entries.notes]
    if has_history(snapshot):
        notes += _missing_fields(snapshot, ops)
        if frees_at_request:
            notes.append(
                "The history contains no completed frees, so a block counts as free when its free is requested"
            )
    pending = snapshot.live.pending
    if pending.any():
        blocks = _format_blocks(int(pending.sum()), int(snapshot.live.requested[pending].sum()))
        notes.append(f"Freed blocks that still wait for a stream when the snapshot was taken count as live: {blocks}")
    return notes


def _format_blocks(number: int, num_bytes: int) -> str:
    return f"{format_count(number, 'block')} ({format_bytes(num_bytes)})"


def _beginning(snapshot: Snapshot, *, overflowed: bool) -> Iterator[str]:
    """Describe how far back the history reaches."""
    if not has_history(snapshot):
        yield (
            "The snapshot has no history, only the state when it was taken: peak memory and the order of allocations "
            "are unknown"
        )
        return
    if not len(snapshot.segments):
        yield (
            "The snapshot has no segments, so reserved memory is unknown, and so are blocks that are older than the "
            "history and never freed in it"
        )
    if overflowed:
        entries = format_count(len(snapshot.entries), "entry", "entries")
        yield f"The ring buffer of the history overflowed: it holds the last {entries}, and earlier events are lost"
    elif _begins_within_free(snapshot):
        yield (
            "The history begins between the request and the completion of a free, so earlier events are lost (the ring "
            "buffer probably wrapped around)"
        )
    num_older = snapshot.blocks.num_baseline
    if num_older:
        num_freed = int((~snapshot.lives.allocated & snapshot.lives.ended).sum())
        if num_freed == 0:
            freed = "none of them was freed"
        elif num_freed == num_older:
            freed = "all of them were freed later"
        else:
            freed = f"{num_freed:,} of them {'was' if num_freed == 1 else 'were'} freed later"
        yield f"Recording started mid-run: {format_count(num_older, 'block')} already existed, {freed}"


def _begins_within_free(snapshot: Snapshot) -> bool:
    """Return whether the first block entry completes a free whose request is missing although others have one."""
    kinds = snapshot.entries.kind[snapshot.blocks.of_row >= 0]
    return bool(len(kinds)) and kinds[0] == KIND["free"] and bool((kinds == KIND["free_requested"]).any())


def _missing_fields(snapshot: Snapshot, ops: SnapshotOps) -> Iterator[str]:
    """Describe missing times and call stacks."""
    entries = snapshot.entries
    if entries.time_us is None:
        yield "The entries of the history have no valid times, so memtrace uses the number of each entry as its time"
    elif bool((np.diff(entries.time_us) < 0).any()):
        yield "The clock of the history runs backwards in places; events keep the order of the history"
    allocs = entries.kind == KIND["alloc"]
    num_allocs, num_without_stack = int(allocs.sum()), int((allocs & ~ops.has_stack).sum())
    if num_without_stack == num_allocs > 0:
        yield "The allocations have no call stacks, so allocation sites are unknown"
    elif num_without_stack:
        inferred = ""
        if ops.num_inferred_backward:
            inferred = (
                f"; memtrace assigned {ops.num_inferred_backward:,} of them to the backward pass, whose threads run no "
                "Python"
            )
        yield f"{num_without_stack:,} of {format_count(num_allocs, 'allocation')} have no call stack{inferred}"


def _contradictions(snapshot: Snapshot) -> Iterator[str]:
    """Describe where the history and the segments cannot both come from an allocator."""
    lives, entries, segments = snapshot.lives, snapshot.entries, snapshot.segments
    clauses = (
        (_num_outside(snapshot), "allocation", "is outside of all segments", "are outside of all segments"),
        (
            segments.num_size_mismatches,
            "segment",
            "differs in size from the sum of its blocks",
            "differ in size from the sum of their blocks",
        ),
        (_num_overlapping(snapshot), "segment", "overlaps another segment", "overlap other segments"),
        (
            _num_resized(snapshot),
            "live block",
            "has different sizes in the history and in its segment",
            "have different sizes in the history and in their segments",
        ),
    )
    contradictions = describe_contradictions(lives)
    contradictions += [format_clause(*clause) for clause in clauses if clause[0]]
    summed = np.bincount(snapshot.live.segment, weights=snapshot.live.requested, minlength=len(segments)).astype(
        np.int64
    )
    is_stated = segments.requested >= 0
    if (summed[is_stated] != segments.requested[is_stated]).any():
        stated = format_bytes(int(segments.requested[is_stated].sum()))
        actual = format_bytes(int(summed[is_stated].sum()))
        contradictions.append(f"segments state {stated} of requested memory, but their blocks add up to {actual}")
    if contradictions:
        yield f"The snapshot contradicts itself, so PyTorch did not write it in this form: {'; '.join(contradictions)}"
    lost = np.flatnonzero(lives.allocated & ~lives.ended & ~_is_surviving(snapshot))
    if len(lost) and len(segments):
        blocks = _format_blocks(len(lost), int(entries.size[lives.first_row[lost]].sum()))
        yield (
            f"The segments lack blocks that are live at the end of the history: {blocks}. The last entries of the "
            "history are missing, or the file was edited"
        )


def _is_surviving(snapshot: Snapshot) -> Array:
    """Return for each lifetime whether its block is in the final state."""
    survives = np.zeros(len(snapshot.lives), bool)
    survives[snapshot.blocks.lifetime[(snapshot.blocks.live >= 0) & (snapshot.blocks.lifetime >= 0)]] = True
    return survives


def _num_resized(snapshot: Snapshot) -> int:
    in_both = (snapshot.blocks.live >= 0) & (snapshot.blocks.lifetime >= 0)
    rows = snapshot.lives.first_row[snapshot.blocks.lifetime[in_both]]
    return int((snapshot.entries.size[rows] != snapshot.live.requested[snapshot.blocks.live[in_both]]).sum())


def _num_overlapping(snapshot: Snapshot) -> int:
    segments = snapshot.segments
    order = np.lexsort((segments.address, segments.device))
    device, start, size = segments.device[order], segments.address[order], segments.size[order]
    return int(((device[1:] == device[:-1]) & (start[1:] < start[:-1] + size[:-1])).sum())


def _num_outside(snapshot: Snapshot) -> int:
    """Count the allocations that are in no segment of the final state and of the history."""
    entries, segments = snapshot.entries, snapshot.segments
    if not len(segments):
        return 0
    is_segment_entry = is_one_of(
        entries.kind, [KIND[kind] for kind in ("segment_alloc", "segment_free", "segment_map", "segment_unmap")]
    )
    num_outside = 0
    for number in distinct(entries.device).tolist():
        in_history, in_state = is_segment_entry & (entries.device == number), segments.device == number
        start = np.concatenate([entries.address[in_history], segments.address[in_state]])
        end = start + np.concatenate([entries.size[in_history], segments.size[in_state]])
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order])
        allocs = (entries.device == number) & (entries.kind == KIND["alloc"])
        index = np.searchsorted(start, entries.address[allocs], side="right") - 1
        covered = (index >= 0) & (entries.address[allocs] < reach[np.maximum(index, 0)]) if len(start) else False
        num_outside += int(np.count_nonzero(~np.broadcast_to(covered, (int(allocs.sum()),))))
    return num_outside
