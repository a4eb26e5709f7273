"""Public snapshots: each must replay exactly, and only under the true rules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from memtrace.allocator.history import ALLOC, SEGMENT_ALLOC, SEGMENT_MAP, AllocatorHistory
from memtrace.allocator.infer_rules import reproduce_history
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.operations import run_operations
from memtrace.allocator.plan import plan_device
from memtrace.allocator.replay import PreparedHistory, prepare_history, replay_allocator, replay_history, run_history
from memtrace.allocator.requests import read_device_history
from memtrace.allocator.restored_state import restore_state
from memtrace.allocator.rules import TORCH
from memtrace.allocator.settings import MIB
from memtrace.allocator.state_tables import block_map_at_peak
from memtrace.trace import load
from tests.allocator.recorded import COLUMNS, drop_first_entries

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "snapshots"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the recorded snapshots are not beside the repository")

# allocations, segment events, reserved peak in MiB
SNAPSHOTS = {
    "complete_small": (36, 9, 3606),
    "complete_windows": (7946, 61, 1810),
    "complete_forward_backward": (3853, 65, 750),
    "transformer_training_step": (6526, 0, 6900),
    "expandable_segments": (1704, 0, 13122),
    "wrapped_ring_25000": (7455, 0, 20532),
    "missing_frames": (1721, 0, 13524),
    "no_history_pending_free": (0, 0, 24976),
    "torch20_block_history": (0, 0, 11296),
}
WITH_HISTORY = [name for name, (allocations, *_) in SNAPSHOTS.items() if allocations]


@cache
def history(name: str) -> AllocatorHistory:
    trace = load(DATA / f"{name}.pickle")
    recorded = read_device_history(trace, trace.devices[0])
    assert isinstance(recorded, AllocatorHistory)
    return recorded


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_snapshot_replays_exactly(name: str) -> None:
    allocations, events, peak = SNAPSHOTS[name]
    prepared, result = reproduce_history(history(name))
    assert result.is_exact, result.reason
    assert (result.num_allocations, result.num_allocations_exact) == (allocations, allocations)
    assert (result.num_segment_events, result.num_segment_events_exact, result.num_segment_events_extra) == (
        events,
        events,
        0,
    )
    assert result.peak_reserved_bytes == result.recorded_peak_reserved_bytes == peak * MIB
    assert result.final_blocks_match
    assert prepared.start.num_contradictions == prepared.start.num_misplaced == 0


@pytest.mark.parametrize("name", ["complete_windows", "complete_forward_backward"])
def test_certain_sizes_of_older_blocks_are_those_of_the_whole_history(name: str) -> None:
    whole = history(name)
    prepared, _ = reproduce_history(whole)
    size_of_alloc = np.full(len(whole), -1, np.int64)
    allocs = np.flatnonzero(whole.kind == ALLOC)
    size_of_alloc[allocs] = run_history(prepared)[1].size[: len(allocs)]
    num_certain = num_uncertain = 0
    for first in np.linspace(0, len(whole), 12).astype(int)[1:-1].tolist():
        start = prepare_history(drop_first_entries(whole, first), prepared.rules).start
        last_alloc = dict(
            zip(
                whole.address[allocs[allocs < first]].tolist(),
                size_of_alloc[allocs[allocs < first]].tolist(),
                strict=True,
            )
        )
        true_size = np.array([last_alloc[address] for address in start.address.tolist()])
        is_certain = start.is_size_certain & (start.freed_by >= 0)
        assert start.size[is_certain].tolist() == true_size[is_certain].tolist()
        num_certain += int(is_certain.sum())
        num_uncertain += int((~start.is_size_certain).sum())
    assert num_certain > 100 and num_uncertain > 0


def test_a_trimmed_file_replays_but_its_final_blocks_do_not_match() -> None:
    _, result = reproduce_history(history("trimmed"))
    assert (result.num_allocations_exact, result.num_segment_events_exact) == (28, 14)
    assert result.is_exact and not result.final_blocks_match
    assert any("truncated or edited" in note for note in plan_device(history("trimmed")).notes)


def test_a_synthetic_file_is_rejected_with_the_reason() -> None:
    plan = plan_device(history("synthetic"))
    assert plan.replay is not None and plan.replay.reason is not None
    assert "0 of 520 allocations" in plan.replay.reason
    assert "outside every segment in the file" in plan.replay.reason
    assert plan.predictions == ()


BROKEN = {
    "equal blocks: highest address": (replace(TORCH, tie_break="highest_address"), "complete_windows"),
    "first fit by address": (replace(TORCH, fit="first"), "complete_windows"),
    "no merging": (replace(TORCH, merges_neighbours=False), "complete_windows"),
    "large blocks are never split": (replace(TORCH, splits_large=False), "complete_windows"),
    "large blocks are split for a remainder of 512 bytes": (
        replace(TORCH, min_large_remainder_bytes=512), "complete_forward_backward"),
    "1 MiB goes to the large pool": (replace(TORCH, small_request_bytes=MIB - 1), "complete_forward_backward"),
    "segments are not rounded to 2 MiB": (replace(TORCH, round_large_bytes=512), "complete_windows"),
    "requests are rounded to 256": (replace(TORCH, min_block_bytes=256), "transformer_training_step"),
}  # fmt: skip
"""Each rule with a file that exercises it; test_golden.py changes the rules that no file exercises."""


@pytest.mark.parametrize("rule", BROKEN)
def test_changing_a_rule_breaks_the_replay(rule: str) -> None:
    rules, name = BROKEN[rule]
    result = replay_history(prepare_history(history(name), rules))[0]
    assert not result.is_exact
    assert result.num_allocations_exact < result.num_allocations
    assert result.reason is not None and "The first that differs is entry" in result.reason


def state_after(whole: PreparedHistory, rows: int) -> CachingAllocator:
    """Return the allocator after the first entries of a history."""
    kept = whole.operations.entry < rows
    columns = {name: getattr(whole.operations, name)[kept] for name in ("operation", "number", "entry")}
    allocator = replay_allocator(whole)
    run_operations(replace(whole.operations, **columns), allocator, restore_state(allocator, whole.start))
    return allocator


def block_rows(allocator: CachingAllocator) -> list[tuple[int, int, int, bool]]:
    blocks = [block for segment in allocator.segments() for block in segment]
    return [(b.address, b.size, b.requested if b.live else 0, b.live) for b in blocks]


@pytest.mark.parametrize("name", WITH_HISTORY)
def test_partial_history_starts_in_the_true_state_and_replays_exactly(name: str) -> None:
    whole = prepare_history(history(name))
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        first = int(share * len(whole.history))
        while whole.history.kind[first - 1] in (SEGMENT_ALLOC, SEGMENT_MAP):
            first -= 1  # not between a segment and the request that needed it
        part = prepare_history(drop_first_entries(whole.history, first))
        rebuilt = replay_allocator(part)
        restore_state(rebuilt, part.start)
        assert block_rows(rebuilt) == block_rows(state_after(whole, first)), share
        result = replay_history(part)[0]
        assert result.is_exact, (share, result.reason)
        assert result.final_blocks_match


def test_a_history_may_end_before_the_recorded_state() -> None:
    """Without its last entries a history does not lead to the final state of the file."""
    whole = history("complete_windows")
    head = replace(whole, **{name: getattr(whole, name)[:9000] for name in COLUMNS})
    result = replay_history(prepare_history(head))[0]
    assert not result.final_blocks_match


def test_block_map_at_the_peak_adds_up() -> None:
    prepared, result = reproduce_history(history("complete_windows"))
    state = block_map_at_peak(prepared)
    assert state["size_bytes"].sum() == result.peak_reserved_bytes
    free = state[~state["live"]]
    ends = set(zip(free["segment"], free["address"] + free["size_bytes"], strict=True))
    assert ends.isdisjoint(zip(free["segment"], free["address"], strict=True)), "adjacent free blocks are merged"
