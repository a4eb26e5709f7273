"""Histories with several virtual ranges, ranges that were given up, and devices of unknown size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memtrace.allocator.history import ALLOC, OOM, SEGMENT_MAP, SEGMENT_UNMAP, AllocatorHistory, RecordedSegments
from memtrace.allocator.rules import LARGE_SEGMENT_BYTES, TORCH, device_size_of_range, virtual_range_size
from memtrace.allocator.settings import MIB, AllocatorSettings
from memtrace.allocator.virtual_ranges import estimate_device_bytes, walk_back
from tests.allocator.test_handmade import Entry, assert_exact, free_entries, make_history

GIB = 1 << 30
DEVICE = 8 * GIB
START = 0x300000000
LARGE_RANGE = virtual_range_size(DEVICE, 20 * MIB)
SECOND = START + LARGE_RANGE


def expandable_history(
    entries: list[Entry],
    segments: list[tuple[int, int, bool]],
    blocks: list[tuple[int, int, int]],
    device_bytes: int | None = DEVICE,
) -> AllocatorHistory:
    """Return a history under expandable segments; `segments` are address, size and whether they are small."""
    history = make_history(
        entries, [(address, size) for address, size, _ in segments], blocks, "expandable_segments:True"
    )
    columns = {name: getattr(history.segments, name) for name in ("address", "size", "stream", "pool")}
    small = np.array([small for _, _, small in segments], bool)
    held = RecordedSegments(**columns, small=small, expandable=np.ones(len(segments), bool))
    return replace(history, segments=held, device_bytes=device_bytes)


def two_ranges() -> tuple[list[Entry], list[tuple[int, int, bool]], list[tuple[int, int, int]]]:
    entries: list[Entry] = [
        (SEGMENT_MAP, START, 40 * MIB),
        (ALLOC, START, 30 * MIB),
        (SEGMENT_MAP, SECOND, 2 * MIB),
        (ALLOC, SECOND, 100),
    ]
    return entries, [(START, 40 * MIB, False), (SECOND, 2 * MIB, True)], [
        (START, 30 * MIB, 30 * MIB),
        (SECOND, 512, 100),
    ]  # fmt: skip


@pytest.mark.parametrize("device_bytes", [DEVICE, None])
def test_ranges_of_the_two_pools_follow_each_other(device_bytes: int | None) -> None:
    history = expandable_history(*two_ranges(), device_bytes)
    if device_bytes is None:
        ranges, _ = walk_back(history, TORCH)
        estimate = estimate_device_bytes([(found, 0, 1) for found in ranges], LARGE_SEGMENT_BYTES)
        assert estimate is not None and abs(DEVICE - estimate) < 20 * MIB
        history = replace(history, estimated_device_bytes=estimate)
    assert_exact(history)


def test_the_driver_hands_out_the_addresses_of_a_range_that_was_given_up() -> None:
    entries: list[Entry] = [
        (SEGMENT_MAP, START, 40 * MIB),
        (ALLOC, START, 30 * MIB),
        *free_entries(START, 30 * MIB),
        (SEGMENT_UNMAP, START, 40 * MIB, 1),
        (SEGMENT_MAP, START, 2 * MIB),
        (ALLOC, START, 100),
        (SEGMENT_MAP, START + GIB * 16, 20 * MIB),
        (ALLOC, START + GIB * 16, 15 * MIB),
    ]
    history = expandable_history(
        entries,
        [(START, 2 * MIB, True), (START + GIB * 16, 20 * MIB, False)],
        [(START, 512, 100), (START + GIB * 16, 15 * MIB, 15 * MIB)],
    )
    assert_exact(history)


def test_a_range_older_than_the_history_is_told_from_one_at_the_same_addresses_afterwards() -> None:
    """What was unmapped together belongs to the pool that mapped it, not to the pool of later requests nearby."""
    entries: list[Entry] = [
        *free_entries(START, 15 * MIB),
        (SEGMENT_UNMAP, START, 20 * MIB, 1),
        (SEGMENT_MAP, START, 2 * MIB),
        (ALLOC, START, 100),
        *free_entries(START, 100),
        (SEGMENT_UNMAP, START, 2 * MIB, 1),
        (SEGMENT_MAP, START, 20 * MIB),
        (ALLOC, START, 20 * MIB),
    ]
    history = expandable_history(entries, [(START, 20 * MIB, False)], [(START, 20 * MIB, 20 * MIB)])
    ranges, num_contradictions = walk_back(history, TORCH)
    assert num_contradictions == 0
    assert [(found.key[2], found.first) for found in ranges] == [(False, 8), (True, 3), (False, -1)]
    assert_exact(history)


def test_a_refused_request_gives_up_the_range_in_which_it_has_mapped_pages() -> None:
    """As torch did on the null device: the request fills a gap, is refused the rest, and tries again in a new range."""
    pages = [START + 20 * MIB * number for number in range(3)]
    entries: list[Entry] = [
        *(entry for page in pages for entry in ((SEGMENT_MAP, page, 20 * MIB), (ALLOC, page, 20 * MIB))),
        *free_entries(pages[1], 20 * MIB),
        (SEGMENT_UNMAP, pages[1], 20 * MIB, 1),
        *free_entries(pages[0], 20 * MIB),
        *free_entries(pages[2], 20 * MIB),
        (SEGMENT_MAP, pages[1], 20 * MIB),
        (SEGMENT_UNMAP, pages[0], 60 * MIB, 0),
        (OOM, -1, 300 * MIB),
        (SEGMENT_MAP, pages[0], 20 * MIB),
        (ALLOC, pages[0], 15 * MIB),
    ]
    assert_exact(expandable_history(entries, [(START, 20 * MIB, False)], [(START, 15 * MIB, 15 * MIB)]))


def test_a_refusal_bounds_the_capacity_where_garbage_could_be_collected() -> None:
    """Garbage collection never unmaps pages, so the device has refused the second request."""
    entries: list[Entry] = [
        (SEGMENT_MAP, START, 40 * MIB),
        (ALLOC, START, 30 * MIB),
        *free_entries(START, 30 * MIB),
        (SEGMENT_UNMAP, START, 40 * MIB, 0),
        (SEGMENT_MAP, SECOND, 2 * MIB),
        (ALLOC, SECOND, 100),
    ]
    settings = "expandable_segments:True,garbage_collection_threshold:0.5,per_process_memory_fraction:0.9"
    history = expandable_history(entries, [(SECOND, 2 * MIB, True)], [(SECOND, 512, 100)])
    assert_exact(replace(history, settings=AllocatorSettings.parse(settings)))


def test_pages_that_a_request_maps_before_it_is_refused_count_in_the_peak() -> None:
    pages = [START + 20 * MIB * number for number in range(3)]
    entries: list[Entry] = [
        *(entry for page in pages for entry in ((SEGMENT_MAP, page, 20 * MIB), (ALLOC, page, 20 * MIB))),
        *free_entries(pages[1], 20 * MIB),
        (SEGMENT_UNMAP, pages[1], 20 * MIB, 1),
        *free_entries(pages[2], 20 * MIB),
        (SEGMENT_MAP, SECOND, 2 * MIB),
        (ALLOC, SECOND, 100),
        (SEGMENT_MAP, pages[1], 20 * MIB),
        (SEGMENT_UNMAP, pages[1], 40 * MIB, 0),
        (OOM, -1, 300 * MIB),
    ]
    segments = [(START, 20 * MIB, False), (SECOND, 2 * MIB, True)]
    history = expandable_history(entries, segments, [(START, 20 * MIB, 20 * MIB), (SECOND, 512, 100)])
    assert history.peak_reserved == 62 * MIB
    assert_exact(history)


def test_ranges_that_did_not_exist_together_tell_nothing_about_the_device() -> None:
    ranges, _ = walk_back(expandable_history(*two_ranges()), TORCH)
    assert estimate_device_bytes([(ranges[0], 0, 5), (ranges[1], 5, 9)], LARGE_SEGMENT_BYTES) is None


@pytest.mark.parametrize("device_bytes", [GIB, 8 * GIB, 80 * GIB - 12345, 178 * GIB + 1])
@pytest.mark.parametrize("page", [2 * MIB, 12 * MIB, 20 * MIB, 40 * MIB])
def test_the_estimated_device_never_has_longer_ranges_than_seen(device_bytes: int, page: int) -> None:
    for distance in (virtual_range_size(device_bytes, page), virtual_range_size(device_bytes, page) + 30 * MIB):
        estimate = device_size_of_range(distance, page)
        assert distance - 2 * page < virtual_range_size(estimate, page) <= distance
