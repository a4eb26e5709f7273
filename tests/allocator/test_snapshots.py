"""Real histories recorded by others: every one must be reproduced exactly, and by no other rules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from memtrace.allocator.history import SEGMENT_ALLOC, SEGMENT_MAP, History
from memtrace.allocator.infer_rules import reproduce
from memtrace.allocator.layout import lay_out
from memtrace.allocator.model import Allocator
from memtrace.allocator.plan import plan_device
from memtrace.allocator.program import run
from memtrace.allocator.replay import Prepared, fresh_allocator, prepare, replay
from memtrace.allocator.requests import read_device
from memtrace.allocator.rules import TORCH
from memtrace.allocator.settings import MIB
from memtrace.allocator.states import state_at_peak
from memtrace.trace import load
from tests.allocator.recorded import COLUMNS, cut

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "snapshots"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the recorded snapshots are not beside the repository")

# allocations, segment events, reserved peak in MiB
WHOLE = {
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
LONG = [name for name, (allocations, *_) in WHOLE.items() if allocations]


@cache
def history(name: str) -> History:
    trace = load(DATA / f"{name}.pickle")
    found = read_device(trace, trace.devices[0])
    assert isinstance(found, History)
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_every_allocation_segment_event_and_byte(name: str) -> None:
    allocations, events, peak = WHOLE[name]
    prepared, result = reproduce(history(name))
    assert result.is_exact, result.reason
    assert (result.allocations, result.allocations_exact) == (allocations, allocations)
    assert (result.segment_events, result.segment_events_exact, result.segment_events_extra) == (events, events, 0)
    assert result.peak_reserved_bytes == result.recorded_peak_reserved_bytes == peak * MIB
    assert result.final_blocks_match
    assert prepared.start.num_contradictions == prepared.start.num_misplaced == 0


def test_the_trimmed_file_replays_but_its_end_is_not_its_segments() -> None:
    _, result = reproduce(history("trimmed"))
    assert (result.allocations_exact, result.segment_events_exact) == (28, 14)
    assert result.is_exact and not result.final_blocks_match
    assert any("cut or changed" in note for note in plan_device(history("trimmed")).notes)


def test_the_synthetic_file_is_refused_with_its_reason() -> None:
    plan = plan_device(history("synthetic"))
    assert plan.replay is not None and plan.replay.reason is not None
    assert "0 of 520 allocations" in plan.replay.reason
    assert "in no segment the file tells of" in plan.replay.reason
    assert plan.predictions == ()


BROKEN = {
    "ties by the highest address": (replace(TORCH, tie="highest"), "complete_windows"),
    "first fit by address": (replace(TORCH, fit="first"), "complete_windows"),
    "no merging": (replace(TORCH, merge=False), "complete_windows"),
    "large blocks are never split": (replace(TORCH, split_large=False), "complete_windows"),
    "large blocks are split when 512 bytes are left": (
        replace(TORCH, min_large_remainder_bytes=512), "complete_forward_backward"),
    "1 MiB goes to the large pool": (replace(TORCH, small_limit_bytes=MIB - 1), "complete_forward_backward"),
    "segments are not rounded to 2 MiB": (replace(TORCH, segment_round_bytes=512), "complete_windows"),
    "requests are rounded to 256": (replace(TORCH, round_bytes=256), "transformer_training_step"),
}  # fmt: skip
"""Each with a file that shows it; the rules that no file here exercises are broken in test_golden.py."""


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found_out(rule: str) -> None:
    rules, name = BROKEN[rule]
    result = replay(prepare(history(name), rules))[0]
    assert not result.is_exact
    assert result.allocations_exact < result.allocations
    assert result.reason is not None and "the first that differs is entry" in result.reason


def forward_state(whole: Prepared, rows: int) -> Allocator:
    """The allocator after the first entries of a history."""
    kept = whole.program.entry < rows
    columns = {name: getattr(whole.program, name)[kept] for name in ("operation", "number", "entry")}
    allocator = fresh_allocator(whole)
    run(replace(whole.program, **columns), allocator, lay_out(allocator, whole.start))
    return allocator


def blocks_of(allocator: Allocator) -> list[tuple[int, int, int, bool]]:
    blocks = [block for segment in allocator.segments() for block in segment]
    return [(b.address, b.size, b.requested if b.live else 0, b.live) for b in blocks]


@pytest.mark.parametrize("name", LONG)
def test_a_cut_history_starts_where_it_was_and_replays_exactly(name: str) -> None:
    whole = prepare(history(name))
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        first = int(share * len(whole.history))
        while whole.history.kind[first - 1] in (SEGMENT_ALLOC, SEGMENT_MAP):
            first -= 1  # not between a segment and the request it is for
        part = prepare(cut(whole.history, first))
        rebuilt = fresh_allocator(part)
        lay_out(rebuilt, part.start)
        assert blocks_of(rebuilt) == blocks_of(forward_state(whole, first)), share
        result = replay(part)[0]
        assert result.is_exact, (share, result.reason)
        assert result.final_blocks_match


def test_a_history_may_end_anywhere() -> None:
    """The columns can be cut at the end too; the file's last state is then not theirs."""
    whole = history("complete_windows")
    head = replace(whole, **{name: getattr(whole, name)[:9000] for name in COLUMNS})
    result = replay(prepare(head))[0]
    assert not result.final_blocks_match


def test_the_state_at_the_peak_adds_up() -> None:
    prepared, result = reproduce(history("complete_windows"))
    state = state_at_peak(prepared)
    assert state["size_bytes"].sum() == result.peak_reserved_bytes
    holes = state[~state["live"]]
    ends = set(zip(holes["segment"], holes["address"] + holes["size_bytes"], strict=True))
    assert ends.isdisjoint(zip(holes["segment"], holes["address"], strict=True)), "holes that touch are one"
