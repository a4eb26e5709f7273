"""What a snapshot cannot tell and where it contradicts itself, as sentences for ``coverage``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from memtrace.readers.cuda_snapshot.blocks import Snapshot
from memtrace.readers.cuda_snapshot.entries import KIND
from memtrace.readers.cuda_snapshot.ops import Ops
from memtrace.readers.tables import Array, amount

# The history of one moment is only torch's own check point.
ONE_MOMENT: Final = 1


def notes_on(found: Snapshot, ops: Ops, *, overflowed: bool, frees_at_request: bool) -> list[str]:
    """Sentences on what is missing and what is wrong, the gravest first."""
    notes = [*_contradictions(found), *_beginning(found, overflowed=overflowed), *found.entries.notes]
    if len(found.entries) > ONE_MOMENT:
        notes += _missing(found, ops)
        if frees_at_request:
            notes.append("it holds no completed frees: a block counts as free from the request on")
    pending = found.live.pending
    if pending.any():
        held = amount(int(found.live.requested[pending].sum()))
        notes.append(
            f"{int(pending.sum())} blocks ({held}) were freed and wait for a stream at the dump; they count as live"
        )
    return notes


def _beginning(found: Snapshot, *, overflowed: bool) -> Iterator[str]:
    """How far back the history reaches."""
    entries = found.entries
    if len(entries) <= ONE_MOMENT:
        yield "it holds no history, only the state at the dump: no peak and no order of allocations can be told"
        return
    if not len(found.segments):
        yield (
            "it holds no segments: blocks older than its history and never freed in it are unknown, and so is what was "
            "reserved"
        )
    if overflowed:
        yield f"its history is a ring of {len(entries)} entries that overflowed: what came before is lost"
    elif _cut_within_a_free(found):
        yield (
            "its history begins between the request and the completion of a free: it was cut, as by a ring that wrapped"
        )
    older = found.blocks.num_baseline
    if older:
        freed = int((~found.lives.allocated & found.lives.ended).sum())
        yield (
            f"its history begins in mid-run: {older} blocks are older ({freed} of them are freed in it, "
            f"{older - freed} stay); "
            "what was freed before is unknown"
        )


def _cut_within_a_free(found: Snapshot) -> bool:
    """Whether the first block entry completes a free whose request, which others have, is not there."""
    kinds = found.entries.kind[found.blocks.of_row >= 0]
    return bool(len(kinds)) and kinds[0] == KIND["free"] and bool((kinds == KIND["free_requested"]).any())


def _missing(found: Snapshot, ops: Ops) -> Iterator[str]:
    """Times and frames that the entries lack."""
    entries = found.entries
    if entries.time_us is None:
        yield "its entries have no usable times: the number of the entry stands for the time"
    elif bool((np.diff(entries.time_us) < 0).any()):
        yield "its clock runs backwards in places: the order of the entries is kept"
    allocs = entries.kind == KIND["alloc"]
    total, bare = int(allocs.sum()), int((allocs & ~ops.has_stack).sum())
    if bare == total > 0:
        yield "its allocations have no stacks: which line made a block cannot be told"
    elif bare:
        taken = f"; {ops.num_taken} of them are taken for the backward's, whose threads run no Python"
        yield f"{bare} of its {total} allocations have no stack{taken if ops.num_taken else ''}"


def _contradictions(found: Snapshot) -> Iterator[str]:
    """Where history and segments cannot both be what an allocator saw."""
    lives, entries = found.lives, found.entries
    wrong = [
        (int((lives.over_live).sum()), "allocations at an address still in use"),
        (int((lives.again).sum()), "frees of what was free"),
        (int((lives.size_changed).sum()), "blocks freed with another size than they were allocated with"),
        (_outside(found), "allocations outside of every segment"),
        (found.segments.num_unfilled, "segments of another size than their blocks add up to"),
        (_overlapping(found), "segments that lie within others"),
        (_resized(found), "live blocks whose size differs between history and segments"),
    ]
    faults = [f"{count} {what}" for count, what in wrong if count]
    segments, live = found.segments, found.live
    summed = np.bincount(live.segment, weights=live.requested, minlength=len(segments)).astype(np.int64)
    told = segments.requested >= 0
    if (summed[told] != segments.requested[told]).any():
        faults.append(
            f"segments that claim {amount(int(segments.requested[told].sum()))} requested while the blocks in them "
            "add up "
            f"to {amount(int(summed[told].sum()))}"
        )
    if faults:
        yield f"it contradicts itself, so torch's allocator did not write it as it is: {'; '.join(faults)}"
    lost = np.flatnonzero(lives.allocated & ~lives.ended & ~np.isin(np.arange(len(lives)), _survivors(found)))
    if len(lost) and len(segments):
        held = amount(int(entries.size[lives.first_row[lost]].sum()))
        yield (
            f"{len(lost)} blocks ({held}) that its history leaves live are not in its segments: entries at the end "
            "of the "
            "history were cut away, or the file was edited"
        )


def _survivors(found: Snapshot) -> Array:
    """The lifetimes that are found again in the final state."""
    return found.blocks.lifetime[(found.blocks.live >= 0) & (found.blocks.lifetime >= 0)]


def _resized(found: Snapshot) -> int:
    joined = (found.blocks.live >= 0) & (found.blocks.lifetime >= 0)
    rows = found.lives.first_row[found.blocks.lifetime[joined]]
    return int((found.entries.size[rows] != found.live.requested[found.blocks.live[joined]]).sum())


def _overlapping(found: Snapshot) -> int:
    segments = found.segments
    order = np.lexsort((segments.address, segments.device))
    device, start, size = segments.device[order], segments.address[order], segments.size[order]
    return int(((device[1:] == device[:-1]) & (start[1:] < start[:-1] + size[:-1])).sum())


def _outside(found: Snapshot) -> int:
    """Allocations in no segment that there is at the dump or that the history speaks of."""
    entries, segments = found.entries, found.segments
    if not len(segments):
        return 0
    of_segment = np.isin(
        entries.kind, [KIND[kind] for kind in ("segment_alloc", "segment_free", "segment_map", "segment_unmap")]
    )
    outside = 0
    for number in np.unique(entries.device).tolist():
        mine, here = of_segment & (entries.device == number), segments.device == number
        start = np.concatenate([entries.address[mine], segments.address[here]])
        end = start + np.concatenate([entries.size[mine], segments.size[here]])
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order])
        allocs = (entries.device == number) & (entries.kind == KIND["alloc"])
        place = np.searchsorted(start, entries.address[allocs], side="right") - 1
        covered = (place >= 0) & (entries.address[allocs] < reach[np.maximum(place, 0)]) if len(start) else False
        outside += int(np.count_nonzero(~np.broadcast_to(covered, (int(allocs.sum()),))))
    return outside
