"""Histories made by hand for what no public file shows: releases, refusals, streams, pools, contradictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memtrace.allocator.capacity import bracket, releases
from memtrace.allocator.history import (
    ALLOC,
    FREE,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Blocks,
    History,
    Segments,
)
from memtrace.allocator.infer_rules import reproduce
from memtrace.allocator.plan import plan_device
from memtrace.allocator.replay import Replay, prepare, replay
from memtrace.allocator.rules import TORCH
from memtrace.allocator.settings import MIB, Settings

A, B, C, D = (0x10000000 * n for n in (1, 2, 3, 4))  # addresses of segments
Entry = tuple[int, int, int] | tuple[int, int, int, int]  # kind, address, size, by_program


def made(entries: list[Entry], segments: list[tuple[int, int]], blocks: list[tuple[int, int, int]],
         settings: str = "", **columns: list[int]) -> History:  # fmt: skip
    rows = np.array([(*entry, -1)[:4] for entry in entries], np.int64).reshape(-1, 4).T
    held = np.array(segments, np.int64).reshape(-1, 2).T
    live = np.array(blocks, np.int64).reshape(-1, 3).T
    zeros = np.zeros(len(entries), np.int64)
    return History(
        device="cuda:0", kind=rows[0].astype(np.int8), address=rows[1], size=rows[2],
        stream=np.array(columns.get("stream", zeros)), pool=np.array(columns.get("pool", zeros)),
        by_program=rows[3].astype(np.int8), device_free=np.array(columns.get("device_free", zeros - 1)),
        time_ns=np.arange(len(entries)), settings=Settings.parse(settings),
        segments=Segments(
            address=held[0], size=held[1], stream=np.zeros(len(segments), np.int64),
            pool=np.zeros(len(segments), np.int64), small=held[1] == 2 * MIB, expandable=np.zeros(len(segments), bool),
        ),
        blocks=Blocks(address=live[0], size=live[1], requested=live[2]),
    )  # fmt: skip


def freed(address: int, size: int) -> list[Entry]:
    return [(FREE_REQUESTED, address, size), (FREE, address, size)]


def exact(history: History) -> Replay:
    result = reproduce(history)[1]
    assert result.is_exact, result.reason
    assert result.final_blocks_match
    return result


TWO: list[Entry] = [
    (SEGMENT_ALLOC, A, 20 * MIB),
    (ALLOC, A, 20 * MIB),
    (SEGMENT_ALLOC, B, 40 * MIB),
    (ALLOC, B, 40 * MIB),
    *freed(A, 20 * MIB),
]


@pytest.mark.parametrize("told", [1, -1])
def test_empty_cache_is_an_input(told: int) -> None:
    """Nothing needs the memory, so only the program can have given it back, stack or no stack."""
    history = made([*TWO, (SEGMENT_FREE, A, 20 * MIB, told)], [(B, 40 * MIB)], [(B, 40 * MIB, 40 * MIB)])
    assert releases(history).by_program.tolist() == [True]
    assert exact(history).segment_events == 3


def refused(told: int) -> History:
    """The device has 70 MiB: a request for 30 makes the allocator give 20 back."""
    return made(
        [*TWO, (SEGMENT_FREE, A, 20 * MIB, told), (SEGMENT_ALLOC, C, 30 * MIB), (ALLOC, C, 30 * MIB)],
        [(B, 40 * MIB), (C, 30 * MIB)],
        [(B, 40 * MIB, 40 * MIB), (C, 30 * MIB, 30 * MIB)],
    )


@pytest.mark.parametrize("told", [0, -1])
def test_a_refused_request_is_foretold_from_the_capacity(told: int) -> None:
    history = refused(told)
    runs = releases(history)
    assert runs.by_program.tolist() == [False]
    ends = bracket(history, runs)
    assert (ends.low, ends.high) == (70 * MIB, 90 * MIB)
    for capacity in (70 * MIB, 80 * MIB, 90 * MIB - 1):
        result, allocator = replay(prepare(history), capacity)
        assert result.is_exact and allocator is not None
        assert allocator.num_retries == 1
    assert not replay(prepare(history), 90 * MIB)[0].is_exact, "with more memory nothing would be refused"


def test_the_stack_is_believed_over_the_capacity() -> None:
    history = refused(1)
    assert releases(history).by_program.tolist() == [True]
    assert bracket(history, releases(history)).high is None
    exact(history)


def test_memory_that_would_have_served_the_request_was_given_back_by_the_program() -> None:
    history = made(
        [*TWO, (SEGMENT_FREE, A, 20 * MIB), (SEGMENT_ALLOC, C, 20 * MIB), (ALLOC, C, 20 * MIB)],
        [(B, 40 * MIB), (C, 20 * MIB)],
        [(B, 40 * MIB, 40 * MIB), (C, 20 * MIB, 20 * MIB)],
    )
    assert releases(history).by_program.tolist() == [True]
    exact(history)


def failed() -> History:
    """69 MiB of device: 2 MiB pin a segment of 20, so 50 more do not fit though only those 2 are in use."""
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 20 * MIB),
        (ALLOC, A, 20 * MIB),
        (SEGMENT_ALLOC, B, 20 * MIB),
        (ALLOC, B, 2 * MIB),
        *freed(A, 20 * MIB),
        (SEGMENT_FREE, A, 20 * MIB, 0),
        (OOM, -1, 50 * MIB),
    ]
    device_free = [-1] * (len(entries) - 1) + [49 * MIB]
    return made(entries, [(B, 20 * MIB)], [(B, 2 * MIB, 2 * MIB)], device_free=device_free)


def test_out_of_memory_brackets_the_capacity_and_asks_which_settings_would_have_fitted() -> None:
    history = failed()
    prepared, result = reproduce(history)
    assert result.is_exact, result.reason
    assert result.final_blocks_match
    assert (prepared.bracket.low, prepared.bracket.high) == (40 * MIB, 70 * MIB)
    assert prepared.bracket.estimate == 69 * MIB
    plan = plan_device(history)
    rows = {one.settings.name: one for one in plan.predictions}
    assert plan.failed_requests == (50 * MIB,)
    assert rows["default"].fits is False, "the recorded settings fail whatever the capacity within its bracket"
    assert rows["default"].num_ooms == 1
    # Expandable segments put 18 MiB behind those 2 to use: 40 more make 60 in all.
    assert rows["expandable_segments:True"].fits_at == (False, True)
    assert rows["expandable_segments:True"].fits is None


def test_with_the_capacity_given_the_setting_that_fits_is_named() -> None:
    plan = plan_device(failed(), capacity=69 * MIB)
    fits = {one.settings.name for one in plan.predictions if one.fits}
    assert "expandable_segments:True" in fits and "default" not in fits
    assert plan.best is not None
    assert plan.best.settings.ready_line == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_a_block_another_stream_uses_is_free_when_that_is_done() -> None:
    """Between the two entries of the first free a request of that size must get a new segment."""
    waits: list[Entry] = [
        (SEGMENT_ALLOC, A, 20 * MIB),
        (ALLOC, A, 20 * MIB),
        (FREE_REQUESTED, A, 20 * MIB),
        (SEGMENT_ALLOC, B, 20 * MIB),
        (ALLOC, B, 20 * MIB),
        (FREE, A, 20 * MIB),
        (ALLOC, A, 20 * MIB),
    ]
    history = made(waits, [(A, 20 * MIB), (B, 20 * MIB)], [(A, 20 * MIB, 20 * MIB), (B, 20 * MIB, 20 * MIB)])
    exact(history)
    assert not replay(prepare(history, replace(TORCH, free_at="requested")))[0].is_exact


def test_a_release_waits_for_the_streams() -> None:
    """The freed block is only found once the device has refused, so its completion stands before the release."""
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 20 * MIB),
        (ALLOC, A, 20 * MIB),
        (FREE_REQUESTED, A, 20 * MIB),
        (FREE, A, 20 * MIB),
        (SEGMENT_FREE, A, 20 * MIB, 0),
        (SEGMENT_ALLOC, B, 20 * MIB),
        (ALLOC, B, 20 * MIB),
    ]
    entries.insert(3, (SEGMENT_ALLOC, C, 2 * MIB))
    entries.insert(4, (ALLOC, C, 512))
    history = made(entries, [(B, 20 * MIB), (C, 2 * MIB)], [(B, 20 * MIB, 20 * MIB), (C, 512, 512)])
    exact(history)


def test_private_pools_are_apart() -> None:
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 20 * MIB),
        (ALLOC, A, 5 * MIB),
        *freed(A, 5 * MIB),
        (SEGMENT_ALLOC, B, 20 * MIB),
        (ALLOC, B, 5 * MIB),
    ]
    blocks = [(B, 5 * MIB, 5 * MIB)]
    history = made(entries, [(A, 20 * MIB), (B, 20 * MIB)], blocks, pool=[2, 2, 2, 2, 0, 0])
    history = replace(history, segments=replace(history.segments, pool=np.array([2, 0])))
    exact(history)
    assert not reproduce(replace(history, pool=np.zeros(6, np.int64)))[1].is_exact
    untold = replace(history, pool=np.full(6, -1))
    exact(untold)  # the pool of the segment an address falls in


def test_capacity_that_changed_meanwhile_is_said_so() -> None:
    """Refused at 60 MiB, later served 90: others had taken memory and gave it back."""
    entries: list[Entry] = [
        *TWO,
        (SEGMENT_FREE, A, 20 * MIB, 0),
        (SEGMENT_ALLOC, C, 22 * MIB),
        (ALLOC, C, 22 * MIB),
        (SEGMENT_ALLOC, D, 60 * MIB),
        (ALLOC, D, 60 * MIB),
    ]
    live = [(B, 40 * MIB), (C, 22 * MIB), (D, 60 * MIB)]
    history = made(entries, live, [(address, size, size) for address, size in live])
    plan = plan_device(history)
    assert plan.replay is not None and plan.replay.is_exact
    assert plan.bracket is None
    assert any("others used it" in note for note in plan.notes)


def test_blocks_over_each_other_are_refused() -> None:
    history = made([], [(A, 20 * MIB)], [(A, 5 * MIB, 5 * MIB), (A + 2 * MIB, 5 * MIB, 5 * MIB), (B, 512, 512)])
    result = reproduce(history)[1]
    assert result.reason is not None and "exclude each other: 2 blocks or segments" in result.reason
    assert plan_device(history).predictions == ()


def test_an_empty_history_is_no_error() -> None:
    result = exact(made([], [], []))
    assert (result.allocations, result.peak_reserved_bytes) == (0, 0)


def test_slack_of_an_older_block_is_read_off_the_gap_or_the_block_behind() -> None:
    near = made(freed(A, 20 * MIB - 512), [(A, 20 * MIB)], [])
    assert prepare(near).start.size.tolist() == [20 * MIB]
    # 13 MiB of request in a segment of 30: the next block lies half a mebibyte further than the request ends.
    behind = A + 13 * MIB + MIB // 2
    seen = made([(ALLOC, behind, 5 * MIB), *freed(A, 13 * MIB)], [(A, 30 * MIB)], [(behind, 5 * MIB, 5 * MIB)])
    assert prepare(seen).start.size.tolist() == [13 * MIB + MIB // 2]
    assert replay(prepare(seen))[0].is_exact
    assert not replay(prepare(seen, replace(TORCH, start_slack=False)))[0].is_exact
    unseen = made(freed(A, 13 * MIB), [(A, 30 * MIB)], [])
    assert prepare(unseen).start.size.tolist() == [13 * MIB]
