"""Replays a recorded history through the model and compares. Every prediction for other settings relies on this check.

The model receives requests and frees with their streams. Recorded addresses only say where new segments lie and which
block a free refers to. Anything but exact equality is an error, of the file or of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from memtrace.allocator.blocks import Block
from memtrace.allocator.consistency_checks import find_violations
from memtrace.allocator.device_capacity import (
    CacheReleases,
    CapacityBounds,
    bound_capacity,
    find_cache_releases,
    refused_requests,
)
from memtrace.allocator.device_memory import SegmentEvent
from memtrace.allocator.history import (
    ALLOC,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    AllocatorHistory,
    Bools,
    Int64s,
    resolve_pools,
)
from memtrace.allocator.history_operations import extract_operations
from memtrace.allocator.model import CachingAllocator, FreeListFactory
from memtrace.allocator.operations import OperationSequence, PlacedBlocks, run_operations
from memtrace.allocator.restored_state import restore_state
from memtrace.allocator.rules import TORCH, Rules
from memtrace.allocator.simulated_devices import FIRST_SYNTHETIC_ADDRESS, RecordedDeviceAlloc, ReplayDevice
from memtrace.allocator.start_state import StartState, reconstruct_start
from memtrace.units import format_bytes, format_count

_SEGMENT_KINDS: Final = (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """How exactly the model reproduces a history."""

    is_exact: bool
    """Every allocation, every segment event and the peak are as recorded."""
    reason: str | None
    """Why the replay is not exact; None: it is."""
    num_allocations: int
    num_allocations_exact: int
    """Allocations at their recorded address."""
    num_segment_events: int
    """segment_* and oom entries of the history."""
    num_segment_events_exact: int
    """Segment events that the model predicts at the same moment, in the same order, with the same address and size."""
    num_segment_events_extra: int
    """Predicted segment events that are not in the history."""
    peak_reserved_bytes: int
    """Peak of reserved memory in the replay."""
    recorded_peak_reserved_bytes: int
    final_blocks_match: bool
    """Segments and live blocks after the replay equal those at the end of the file."""
    tie_break: Literal["address", "segment_age", "highest_address"]
    """Order of free blocks of equal size in the version of PyTorch that recorded the history (`Rules.tie_break`)."""


@dataclass(frozen=True, slots=True)
class PreparedHistory:
    """A history with everything that a replay needs."""

    history: AllocatorHistory
    start: StartState
    releases: CacheReleases
    capacity: CapacityBounds
    operations: OperationSequence
    rules: Rules
    replays_refusals: bool = False
    """The device refuses where the history says so, because no single capacity explains its refusals."""


def prepare_history(history: AllocatorHistory, rules: Rules = TORCH, *, frees_wait: bool = True) -> PreparedHistory:
    """Reconstruct the start state, the operations and the capacity behind a history.

    Args:
        history: the history.
        rules: the allocator's rules.
        frees_wait: as in `extract_operations`.
    """
    start = reconstruct_start(history, rules)
    releases = find_cache_releases(history)
    operations = extract_operations(history, start, releases, rules, frees_wait=frees_wait)
    capacity = bound_capacity(history, releases)
    return PreparedHistory(
        history, start, releases, capacity, operations, rules, replays_refusals=not capacity.is_consistent
    )


def replay_allocator(
    prepared: PreparedHistory, capacity: int | None = None, make_list: FreeListFactory | None = None
) -> CachingAllocator:
    """Return an empty allocator whose device answers as the recorded one did; `restore_state` adds the start state.

    Args:
        prepared: the history.
        capacity: bytes that the device gives; None: the smallest capacity that the history allows.
        make_list: creates the free lists; None: those of the rules.
    """
    history, bounds = prepared.history, prepared.capacity
    refused: frozenset[int] = frozenset()
    if prepared.replays_refusals:
        refused = frozenset(refused_requests(history, prepared.releases).tolist())
    elif capacity is None and bounds.refused_bytes is not None:
        capacity = bounds.low_bytes
    device = ReplayDevice(_device_allocs(history), capacity, refused, history.device_bytes, history.range_device_bytes)
    settings = history.settings if history.device_bytes else replace(history.settings, memory_fraction=None)
    return CachingAllocator(settings, device, prepared.rules, make_list=make_list)


def replay_history(
    prepared: PreparedHistory, capacity: int | None = None
) -> tuple[ReplayResult, CachingAllocator | None]:
    """Replay a history and compare.

    Args:
        prepared: the history.
        capacity: bytes that the device gives; None: the smallest capacity that the history allows.

    Returns:
        The comparison, and the allocator at the end of the replay; None where the start state is impossible.
    """
    if prepared.start.num_misplaced:
        return _impossible_start(prepared), None
    allocator, placed = run_history(prepared, capacity)
    return _compare(prepared, allocator, placed.address), allocator


def run_history(
    prepared: PreparedHistory, capacity: int | None = None, make_list: FreeListFactory | None = None
) -> tuple[CachingAllocator, PlacedBlocks]:
    """Replay a history; arguments as those of `replay_allocator`.

    Returns:
        The allocator at the end of the replay, and where the model places each block (numbered as in
        `OperationSequence`).
    """
    allocator = replay_allocator(prepared, capacity, make_list)
    return allocator, run_operations(prepared.operations, allocator, restore_state(allocator, prepared.start))


def _device_allocs(history: AllocatorHistory) -> list[RecordedDeviceAlloc]:
    rows = np.flatnonzero((history.kind == SEGMENT_ALLOC) | (history.kind == SEGMENT_MAP))
    request = history.request_numbers()[rows] + 1
    mapped = history.kind[rows] == SEGMENT_MAP
    pools = resolve_pools(history)[rows]
    columns = (request, mapped, history.address[rows], history.size[rows], history.stream[rows], pools)
    return [RecordedDeviceAlloc(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def recorded_segment_events(prepared: PreparedHistory) -> list[SegmentEvent]:
    """Return the segment events of a history in the form in which the model logs them."""
    history, releases = prepared.history, prepared.releases
    rows = np.flatnonzero(np.isin(history.kind, _SEGMENT_KINDS))
    change = np.zeros(len(history) + 1, np.int64)
    np.add.at(change, releases.first[releases.by_program], 1)
    np.add.at(change, releases.end[releases.by_program], -1)
    # An event that is neither a failure nor part of an empty_cache call belongs to the request that follows it.
    belongs_to_next = (np.cumsum(change)[rows] == 0) & (history.kind[rows] != OOM)
    address = np.where(history.kind[rows] == OOM, 0, history.address[rows])
    request = history.request_numbers()[rows] + belongs_to_next
    columns = (request, history.kind[rows], address, history.size[rows])
    return [SegmentEvent(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _compare(prepared: PreparedHistory, allocator: CachingAllocator, addresses: Int64s) -> ReplayResult:
    history, operations = prepared.history, prepared.operations
    allocs = np.flatnonzero(history.kind == ALLOC)
    replayed = addresses[operations.num_older : operations.num_older + len(allocs)]
    exact = replayed == history.address[allocs]
    expected, predicted = _with_place(recorded_segment_events(prepared)), _with_place(allocator.log)
    num_common = len(expected & predicted)
    result = ReplayResult(
        is_exact=True,
        reason=None,
        num_allocations=len(allocs),
        num_allocations_exact=int(exact.sum()),
        num_segment_events=len(expected),
        num_segment_events_exact=num_common,
        num_segment_events_extra=len(predicted) - num_common,
        peak_reserved_bytes=allocator.peak_reserved,
        recorded_peak_reserved_bytes=history.peak_reserved,
        final_blocks_match=_final_blocks_match(history, allocator),
        tie_break=prepared.rules.tie_break,
    )
    reason = _inexact_reason(result) or _address_reason(prepared, exact, replayed)
    if reason is not None:
        reason += _unknown_ages(prepared)
    return replace(result, is_exact=reason is None, reason=reason)


def _with_place(log: list[SegmentEvent]) -> set[tuple[int, SegmentEvent]]:
    """Pair each event with its place among those of the same request, so that a comparison of sets respects order."""
    place, last_request, events = 0, -1, set()
    for event in log:
        place = place + 1 if event.request == last_request else 0
        last_request = event.request
        events.add((place, event))
    return events


def _final_blocks_match(history: AllocatorHistory, allocator: CachingAllocator) -> bool:
    segments = [
        (blocks[0].address, sum(b.size for b in blocks), blocks[0].free_list.stream, blocks[0].free_list.pool.small)
        for blocks in allocator.segments()
    ]
    final = history.segments
    columns = (final.address, final.size, final.stream, final.small)
    recorded = zip(*(column.tolist() for column in columns), strict=True)
    blocks = history.blocks
    live = zip(blocks.address.tolist(), blocks.size.tolist(), blocks.requested.tolist(), strict=True)
    return sorted(segments) == sorted(recorded) and sorted(map(_block_row, allocator.live)) == sorted(live)


def _block_row(block: Block) -> tuple[int, int, int]:
    return block.address, block.size, block.requested


def _address_reason(prepared: PreparedHistory, exact: Bools, replayed: Int64s) -> str | None:
    """Return a sentence about the first allocation at another address; None where there is none."""
    if exact.all():
        return None
    history, num_contradictions = prepared.history, prepared.start.num_contradictions
    first = int(np.argmin(exact))
    row = int(np.flatnonzero(history.kind == ALLOC)[first])
    problems = find_violations(history, prepared.rules)
    if num_contradictions:
        problems.append(
            f"{format_count(num_contradictions, 'entry contradicts', 'entries contradict')} the final state"
        )
    return (
        f"{int(exact.sum()):,} of {len(exact):,} allocations replay at their recorded address. The first that differs "
        f"is entry {row} ({format_bytes(int(history.size[row]))}): recorded at {history.address[row]:#x}, "
        f"replayed at {_format_address(int(replayed[first]))}."
        + (f" The file is inconsistent: {'; '.join(problems)}." if problems else "")
    )


def _inexact_reason(result: ReplayResult) -> str | None:
    """Return a sentence about segment events or a peak that differ although all addresses agree, if any does."""
    if result.num_allocations_exact < result.num_allocations:
        return None
    if result.num_segment_events_exact < result.num_segment_events or result.num_segment_events_extra:
        return (
            f"{result.num_segment_events_exact:,} of {result.num_segment_events:,} segment events are predicted, and "
            f"{result.num_segment_events_extra:,} predicted events are not in the file."
        )
    if result.peak_reserved_bytes != result.recorded_peak_reserved_bytes:
        return (
            f"The recorded peak is {result.recorded_peak_reserved_bytes:,} bytes, "
            f"the replayed peak {result.peak_reserved_bytes:,} bytes."
        )
    return None


def _unknown_ages(prepared: PreparedHistory) -> str:
    """Return a sentence about free segments whose age garbage collection used and the history lacks; "": none."""
    history, start = prepared.history, prepared.start
    if not history.settings.collects_garbage or not prepared.releases.by_garbage_collection.any():
        return ""
    segments = start.segments
    used = segments.containing(start.address)
    is_free = ~segments.small & ~segments.expandable & ~np.isin(np.arange(len(segments)), used)
    if is_free.sum() < 2:
        return ""
    return (
        f" Garbage collection releases segments by age, and the ages of {format_count(int(is_free.sum()), 'segment')} "
        "that were free when the recording started are unknown: start it before the first allocation."
    )


def _format_address(address: int) -> str:
    if address < 0:
        return "no address (out of memory)"
    return hex(address) if address < FIRST_SYNTHETIC_ADDRESS else "an address in a new segment"


def _impossible_start(prepared: PreparedHistory) -> ReplayResult:
    history, num_misplaced = prepared.history, prepared.start.num_misplaced
    return ReplayResult(
        is_exact=False,
        reason=f"The segments contradict the entries: {num_misplaced:,} blocks or segments overlap or lie outside "
        "every segment, which no allocator state can contain.",
        num_allocations=int((history.kind == ALLOC).sum()),
        num_allocations_exact=0,
        num_segment_events=int(np.isin(history.kind, _SEGMENT_KINDS).sum()),
        num_segment_events_exact=0,
        num_segment_events_extra=0,
        peak_reserved_bytes=0,
        recorded_peak_reserved_bytes=history.peak_reserved,
        final_blocks_match=False,
        tie_break=prepared.rules.tie_break,
    )
