"""Hand-made histories for what no public file contains: releases, refusals, streams, pools and contradictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memtrace.allocator.device_capacity import bound_capacity, find_cache_releases
from memtrace.allocator.history import (
    ALLOC,
    FREE,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    AllocatorHistory,
    RecordedBlocks,
    RecordedSegments,
)
from memtrace.allocator.infer_rules import reproduce_history
from memtrace.allocator.plan import plan_device
from memtrace.allocator.replay import ReplayResult, prepare_history, replay_history
from memtrace.allocator.requests import read_device_history
from memtrace.allocator.rules import TORCH
from memtrace.allocator.settings import MIB, AllocatorSettings
from tests.builders import event, op, trace_of

A, B, C, D = (0x10000000 * n for n in (1, 2, 3, 4))  # addresses of segments
Entry = tuple[int, int, int] | tuple[int, int, int, int]  # kind, address, size, by_program


def make_history(entries: list[Entry], segments: list[tuple[int, int]], blocks: list[tuple[int, int, int]],
         settings: str = "", **columns: list[int]) -> AllocatorHistory:  # fmt: skip
    rows = np.array([(*entry, -1)[:4] for entry in entries], np.int64).reshape(-1, 4).T
    held = np.array(segments, np.int64).reshape(-1, 2).T
    live = np.array(blocks, np.int64).reshape(-1, 3).T
    zeros = np.zeros(len(entries), np.int64)
    return AllocatorHistory(
        device="cuda:0", kind=rows[0].astype(np.int8), address=rows[1], size=rows[2],
        stream=np.array(columns.get("stream", zeros)), pool=np.array(columns.get("pool", zeros)),
        by_program=rows[3].astype(np.int8), device_free=np.array(columns.get("device_free", zeros - 1)),
        time_ns=np.arange(len(entries)), settings=AllocatorSettings.parse(settings),
        segments=RecordedSegments(
            address=held[0], size=held[1], stream=np.zeros(len(segments), np.int64),
            pool=np.zeros(len(segments), np.int64), small=held[1] == 2 * MIB, expandable=np.zeros(len(segments), bool),
        ),
        blocks=RecordedBlocks(address=live[0], size=live[1], requested=live[2]),
    )  # fmt: skip


def free_entries(address: int, size: int) -> list[Entry]:
    return [(FREE_REQUESTED, address, size), (FREE, address, size)]


def assert_exact(history: AllocatorHistory) -> ReplayResult:
    result = reproduce_history(history)[1]
    assert result.is_exact, result.reason
    assert result.final_blocks_match
    return result


TWO_SEGMENTS: list[Entry] = [
    (SEGMENT_ALLOC, A, 20 * MIB),
    (ALLOC, A, 20 * MIB),
    (SEGMENT_ALLOC, B, 40 * MIB),
    (ALLOC, B, 40 * MIB),
    *free_entries(A, 20 * MIB),
]


@pytest.mark.parametrize("by_program", [1, -1])
def test_empty_cache_is_recognized_with_and_without_a_stack(by_program: int) -> None:
    """No request needs the memory, so only the program can have released it."""
    history = make_history(
        [*TWO_SEGMENTS, (SEGMENT_FREE, A, 20 * MIB, by_program)], [(B, 40 * MIB)], [(B, 40 * MIB, 40 * MIB)]
    )
    assert find_cache_releases(history).by_program.tolist() == [True]
    assert assert_exact(history).num_segment_events == 3


def refused_request(by_program: int = -1) -> AllocatorHistory:
    """The device has 70 MiB: a request for 30 MiB makes the allocator release 20 MiB."""
    return make_history(
        [*TWO_SEGMENTS, (SEGMENT_FREE, A, 20 * MIB, by_program), (SEGMENT_ALLOC, C, 30 * MIB), (ALLOC, C, 30 * MIB)],
        [(B, 40 * MIB), (C, 30 * MIB)],
        [(B, 40 * MIB, 40 * MIB), (C, 30 * MIB, 30 * MIB)],
    )


@pytest.mark.parametrize("by_program", [0, -1])
def test_retry_after_a_refusal_follows_from_the_capacity(by_program: int) -> None:
    history = refused_request(by_program)
    releases = find_cache_releases(history)
    assert releases.by_program.tolist() == [False]
    bounds = bound_capacity(history, releases)
    assert (bounds.low_bytes, bounds.refused_bytes) == (70 * MIB, 90 * MIB)
    for capacity in (70 * MIB, 80 * MIB, 90 * MIB - 1):
        result, allocator = replay_history(prepare_history(history), capacity)
        assert result.is_exact and allocator is not None
        assert allocator.num_retries == 1
    assert not replay_history(prepare_history(history), 90 * MIB)[0].is_exact, (
        "with more memory, the device refuses nothing"
    )


def test_the_stack_takes_precedence_over_the_capacity() -> None:
    history = refused_request(1)
    assert find_cache_releases(history).by_program.tolist() == [True]
    assert bound_capacity(history, find_cache_releases(history)).refused_bytes is None
    assert_exact(history)


def test_a_release_that_would_have_served_the_next_request_was_made_by_the_program() -> None:
    history = make_history(
        [*TWO_SEGMENTS, (SEGMENT_FREE, A, 20 * MIB), (SEGMENT_ALLOC, C, 20 * MIB), (ALLOC, C, 20 * MIB)],
        [(B, 40 * MIB), (C, 20 * MIB)],
        [(B, 40 * MIB, 40 * MIB), (C, 20 * MIB, 20 * MIB)],
    )
    assert find_cache_releases(history).by_program.tolist() == [True]
    assert_exact(history)


def failed_request() -> AllocatorHistory:
    """69 MiB of device: 2 MiB pin a segment of 20 MiB, so 50 MiB do not fit although only 2 MiB are in use."""
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 20 * MIB),
        (ALLOC, A, 20 * MIB),
        (SEGMENT_ALLOC, B, 20 * MIB),
        (ALLOC, B, 2 * MIB),
        *free_entries(A, 20 * MIB),
        (SEGMENT_FREE, A, 20 * MIB, 0),
        (OOM, -1, 50 * MIB),
    ]
    device_free = [-1] * (len(entries) - 1) + [49 * MIB]
    return make_history(entries, [(B, 20 * MIB)], [(B, 2 * MIB, 2 * MIB)], device_free=device_free)


def test_a_failed_request_bounds_the_capacity_and_is_tried_under_other_settings() -> None:
    history = failed_request()
    prepared, result = reproduce_history(history)
    assert result.is_exact, result.reason
    assert result.final_blocks_match
    assert (prepared.capacity.low_bytes, prepared.capacity.refused_bytes) == (40 * MIB, 70 * MIB)
    assert prepared.capacity.estimate_bytes == 69 * MIB
    plan = plan_device(history)
    rows = {prediction.setting: prediction for prediction in plan.predictions}
    assert plan.failed_request_bytes == (50 * MIB,)
    assert rows["default"].fits is False, "the recorded settings fail at every capacity within the bounds"
    assert rows["default"].num_ooms == 1
    # Expandable segments can use the 18 MiB behind those 2 MiB: 40 MiB more make 60 MiB in all.
    expandable = rows["expandable_segments:True"]
    assert (expandable.fits_at_low, expandable.fits_at_high) == (False, True)
    assert rows["expandable_segments:True"].fits is None


def test_with_a_stated_capacity_the_setting_that_fits_is_suggested() -> None:
    plan = plan_device(failed_request(), capacity=69 * MIB)
    fits = {prediction.setting for prediction in plan.predictions if prediction.fits}
    assert "expandable_segments:True" in fits and "default" not in fits
    assert plan.suggestion is not None
    assert plan.suggestion.environment_setting == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_a_block_used_by_another_stream_becomes_free_at_completion() -> None:
    """Between free_requested and free, a request of the same size must get a new segment."""
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 20 * MIB),
        (ALLOC, A, 20 * MIB),
        (FREE_REQUESTED, A, 20 * MIB),
        (SEGMENT_ALLOC, B, 20 * MIB),
        (ALLOC, B, 20 * MIB),
        (FREE, A, 20 * MIB),
        (ALLOC, A, 20 * MIB),
    ]
    history = make_history(entries, [(A, 20 * MIB), (B, 20 * MIB)], [(A, 20 * MIB, 20 * MIB), (B, 20 * MIB, 20 * MIB)])
    assert_exact(history)
    assert not replay_history(prepare_history(history, replace(TORCH, frees_at="request")))[0].is_exact


def test_deferred_frees_complete_with_the_release_of_the_cache() -> None:
    """The allocator completes the free only after the device has refused, so the entry precedes the release."""
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
    history = make_history(entries, [(B, 20 * MIB), (C, 2 * MIB)], [(B, 20 * MIB, 20 * MIB), (C, 512, 512)])
    assert_exact(history)


def test_private_pools_do_not_share_memory() -> None:
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 20 * MIB),
        (ALLOC, A, 5 * MIB),
        *free_entries(A, 5 * MIB),
        (SEGMENT_ALLOC, B, 20 * MIB),
        (ALLOC, B, 5 * MIB),
    ]
    blocks = [(B, 5 * MIB, 5 * MIB)]
    history = make_history(entries, [(A, 20 * MIB), (B, 20 * MIB)], blocks, pool=[2, 2, 2, 2, 0, 0])
    history = replace(history, segments=replace(history.segments, pool=np.array([2, 0])))
    assert_exact(history)
    assert not reproduce_history(replace(history, pool=np.zeros(6, np.int64)))[1].is_exact
    without_pools = replace(history, pool=np.full(6, -1))
    assert_exact(without_pools)  # the pool is that of the segment at the address


def test_a_capacity_that_changed_during_the_recording_is_noted() -> None:
    """Refused at 60 MiB and served at 90 MiB later: another process had used memory and released it."""
    entries: list[Entry] = [
        *TWO_SEGMENTS,
        (SEGMENT_FREE, A, 20 * MIB, 0),
        (SEGMENT_ALLOC, C, 22 * MIB),
        (ALLOC, C, 22 * MIB),
        (SEGMENT_ALLOC, D, 60 * MIB),
        (ALLOC, D, 60 * MIB),
    ]
    live = [(B, 40 * MIB), (C, 22 * MIB), (D, 60 * MIB)]
    history = make_history(entries, live, [(address, size, size) for address, size in live])
    plan = plan_device(history)
    assert plan.replay is not None and plan.replay.is_exact
    assert plan.capacity.low_bytes is None and plan.capacity.high_bytes is None
    assert any("other processes used the device" in note for note in plan.notes)


def test_overlapping_blocks_are_rejected() -> None:
    history = make_history([], [(A, 20 * MIB)], [(A, 5 * MIB, 5 * MIB), (A + 2 * MIB, 5 * MIB, 5 * MIB), (B, 512, 512)])
    result = reproduce_history(history)[1]
    assert result.reason is not None and "2 blocks or segments overlap" in result.reason
    assert plan_device(history).predictions == ()


def test_an_empty_history_replays() -> None:
    result = assert_exact(make_history([], [], []))
    assert (result.num_allocations, result.peak_reserved_bytes) == (0, 0)


def test_slack_of_an_older_block_is_inferred_from_the_gap_or_the_next_block() -> None:
    small_gap = make_history(free_entries(A, 20 * MIB - 512), [(A, 20 * MIB)], [])
    assert prepare_history(small_gap).start.size.tolist() == [20 * MIB]
    # A request for 13 MiB in a segment of 30 MiB: the next block starts 0.5 MiB behind the end of the request.
    behind = A + 13 * MIB + MIB // 2
    observed = make_history(
        [(ALLOC, behind, 5 * MIB), *free_entries(A, 13 * MIB)], [(A, 30 * MIB)], [(behind, 5 * MIB, 5 * MIB)]
    )
    assert prepare_history(observed).start.size.tolist() == [13 * MIB + MIB // 2]
    assert replay_history(prepare_history(observed))[0].is_exact
    assert not replay_history(prepare_history(observed, replace(TORCH, infers_slack=False)))[0].is_exact
    unobserved = make_history(free_entries(A, 13 * MIB), [(A, 30 * MIB)], [])
    assert prepare_history(unobserved).start.size.tolist() == [13 * MIB]


def test_a_pool_that_is_given_up_leaves_the_cache_of_the_other_pools() -> None:
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 20 * MIB),
        (ALLOC, A, 20 * MIB),
        (SEGMENT_ALLOC, B, 40 * MIB),
        (ALLOC, B, 40 * MIB),
        *free_entries(A, 20 * MIB),
        *free_entries(B, 40 * MIB),
        (SEGMENT_FREE, A, 20 * MIB, 1),
        (ALLOC, B, 40 * MIB),
    ]
    pool = [2, 2, 0, 0, 2, 2, 0, 0, 2, 0]
    assert_exact(make_history(entries, [(B, 40 * MIB)], [(B, 40 * MIB, 40 * MIB)], pool=pool))


@pytest.mark.parametrize("first_size", [30, 32])
def test_large_blocks_are_released_before_the_allocator_waits_for_the_streams(first_size: int) -> None:
    """The free of A completes when the request begins, the free of B when the allocator waits for the streams."""
    first, second = first_size * MIB, 30 * MIB
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, first),
        (ALLOC, A, first),
        (SEGMENT_ALLOC, B, second),
        (ALLOC, B, second),
        (SEGMENT_ALLOC, D, 2 * MIB),
        (ALLOC, D, 512),
        (FREE_REQUESTED, B, second),
        (FREE_REQUESTED, A, first),
        (SEGMENT_ALLOC, D + 2 * MIB, 20 * MIB),
        (ALLOC, D + 2 * MIB, 5 * MIB),
        (FREE, A, first),
        (SEGMENT_FREE, A, first, 0),
        (FREE, B, second),
        (SEGMENT_FREE, B, second, 0),
        (SEGMENT_ALLOC, C, 60 * MIB),
        (ALLOC, C, 60 * MIB),
    ]
    segments = [(C, 60 * MIB), (D, 2 * MIB), (D + 2 * MIB, 20 * MIB)]
    blocks = [(C, 60 * MIB, 60 * MIB), (D, 512, 512), (D + 2 * MIB, 5 * MIB, 5 * MIB)]
    assert_exact(make_history(entries, segments, blocks, "max_split_size_mb:21"))


COLLECTS = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"  # of 200 MiB: 50 MiB and 100 MiB


@pytest.mark.parametrize("waiting", [20 * MIB, 110 * MIB])
def test_the_second_release_for_a_request_is_told_from_that_of_the_program_without_stacks(waiting: int) -> None:
    """What is reserved after the first release would suffice for the request, and so would the block that was freed
    while the allocator waited; but the device had refused, and the search for a free block was over."""
    end = D + 2 * MIB
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 60 * MIB),
        (ALLOC, A, 60 * MIB),
        (SEGMENT_ALLOC, B, 40 * MIB),
        (ALLOC, B, 40 * MIB),
        (SEGMENT_ALLOC, C, waiting),
        (ALLOC, C, waiting),
        *free_entries(A, 60 * MIB),
        *free_entries(B, 40 * MIB),
        (FREE_REQUESTED, C, waiting),
        (SEGMENT_ALLOC, D, 2 * MIB),
        (ALLOC, D, 512),
        (SEGMENT_FREE, A, 60 * MIB),
        (SEGMENT_FREE, B, 40 * MIB),
        (FREE, C, waiting),
        (SEGMENT_FREE, C, waiting),
        (SEGMENT_ALLOC, A, 110 * MIB),
        (ALLOC, A, 110 * MIB),
        (SEGMENT_ALLOC, end, 36 * MIB),
        (ALLOC, end, 36 * MIB),
    ]
    live = [(A, 110 * MIB, 110 * MIB), (D, 512, 512), (end, 36 * MIB, 36 * MIB)]
    segments = [(A, 110 * MIB), (D, 2 * MIB), (end, 36 * MIB)]
    assert_exact(make_history(entries, segments, live, "max_split_size_mb:32"))


def test_where_the_limit_refuses_a_request_frees_complete_after_the_search_for_a_block() -> None:
    """The freed block would serve the request, had it been free when the allocator looked for one."""
    entries: list[Entry] = [
        (SEGMENT_ALLOC, A, 90 * MIB),
        (ALLOC, A, 90 * MIB),
        (FREE_REQUESTED, A, 90 * MIB),
        (FREE, A, 90 * MIB),
        (SEGMENT_FREE, A, 90 * MIB, 0),
        (SEGMENT_ALLOC, B, 20 * MIB),
        (ALLOC, B, 5 * MIB),
    ]
    history = make_history(entries, [(B, 20 * MIB)], [(B, 5 * MIB, 5 * MIB)], COLLECTS)
    assert_exact(replace(history, device_bytes=200 * MIB))


def test_what_the_cache_still_holds_tells_garbage_collection_from_a_release_of_the_cache() -> None:
    """The reserved memory and the request exceed the limit; but a release of the cache would have taken C as well."""
    entries: list[Entry] = [
        (SEGMENT_ALLOC, C, 2 * MIB),
        (ALLOC, C, MIB),
        *free_entries(C, MIB),
        (SEGMENT_ALLOC, A, 60 * MIB),
        (ALLOC, A, 60 * MIB),
        *free_entries(A, 60 * MIB),
        (SEGMENT_FREE, A, 60 * MIB, 0),
        (SEGMENT_ALLOC, B, 70 * MIB),
        (ALLOC, B, 70 * MIB),
        (ALLOC, C, MIB),
    ]
    blocks = [(B, 70 * MIB, 70 * MIB), (C, MIB, MIB)]
    history = make_history(entries, [(B, 70 * MIB), (C, 2 * MIB)], blocks, COLLECTS)
    history = replace(history, device_bytes=200 * MIB)
    assert not replay_history(prepare_history(history))[0].is_exact, "the entries alone do not tell"
    assert_exact(history)


def test_a_release_outside_the_operator_of_the_next_request_was_made_by_the_program() -> None:
    trace = trace_of(
        events=[
            event("segment_alloc", None, 0, 20 * MIB, device="cuda:0", address=A, op_id=0),
            event("alloc", 0, 1, 20 * MIB, device="cuda:0", address=A, op_id=0),
            event("free", 0, 2, 20 * MIB, device="cuda:0", address=A),
            event("segment_free", None, 3, 20 * MIB, device="cuda:0", address=A),
            event("segment_alloc", None, 4, 40 * MIB, device="cuda:0", address=B, op_id=1),
            event("alloc", 1, 5, 40 * MIB, device="cuda:0", address=B, op_id=1),
        ],
        ops=[op(0, "forward"), op(1, "forward")],
    )
    history = read_device_history(trace, "cuda:0")
    assert isinstance(history, AllocatorHistory)
    assert history.by_program.tolist() == [-1, -1, -1, 1, -1, -1]
