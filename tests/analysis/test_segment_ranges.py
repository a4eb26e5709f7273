"""Reserved ranges against a replay of every page of memory."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.segment_ranges import find_segment_ranges
from tests.builders import trace_of

PAGES = 12
PAGE = 2 << 20


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[set[int]], list[dict[str, Any]]]:
    """Reserved pages after each event, the first before any, and the events."""
    pages = draw(st.sets(st.integers(0, PAGES - 1)))
    states, events = [set(pages)], []
    for row in range(draw(st.integers(0, 12))):
        start = draw(st.integers(0, PAGES - 1))
        some = set(range(start, draw(st.integers(start + 1, PAGES))))
        is_map = not (some & pages)
        if not is_map and not some <= pages:
            continue
        pages = pages | some if is_map else pages - some
        kind = "segment_map" if is_map else "segment_unmap"
        events.append(
            {"kind": kind, "device": "cuda:0", "address": start * PAGE, "size": len(some) * PAGE, "time_ns": row}
        )
        states.append(set(pages))
    return states, events


@settings(max_examples=200, deadline=None)
@given(histories())
def test_reserved_ranges_are_those_of_a_replay_of_every_page(
    history: tuple[list[set[int]], list[dict[str, Any]]],
) -> None:
    states, events = history
    final = [
        {"device": "cuda:0", "address": page * PAGE, "size": PAGE, "expandable": True, "small": False, "stream": 0}
        for page in sorted(states[-1])
    ]
    anything = {"kind": "snapshot", "device": "cuda:0", "time_ns": 100, "size": 0}
    ranges = find_segment_ranges(trace_of(events=[*events, anything], segments=final), "cuda:0")
    for after in range(len(states)):
        covered: list[int] = []
        for address, size, begin, end in zip(
            ranges.address, ranges.size, ranges.begin_row, ranges.end_row, strict=True
        ):
            if begin < after <= end:
                covered += range(int(address) // PAGE, int(address + size) // PAGE)
        assert sorted(covered) == sorted(states[after]), f"after {after} events"
    assert ranges.is_expandable.all()


def test_a_segment_is_reserved_from_its_allocation_to_its_release() -> None:
    rows = [
        {"kind": kind, "device": "cuda:0", "address": address, "size": PAGE, "time_ns": row}
        for row, (kind, address) in enumerate(
            [("segment_free", 5 * PAGE), ("segment_alloc", PAGE), ("segment_free", PAGE), ("segment_alloc", PAGE)]
        )
    ]
    older = {"device": "cuda:0", "address": 9 * PAGE, "size": 3 * PAGE, "expandable": False, "small": False}
    last = {**older, "address": PAGE, "size": PAGE}
    ranges = find_segment_ranges(trace_of(events=rows, segments=[last, older]), "cuda:0")
    found = sorted(zip(ranges.address, ranges.size, ranges.begin_row, ranges.end_row, strict=True))
    assert found == [(PAGE, PAGE, 1, 2), (PAGE, PAGE, 3, 4), (5 * PAGE, PAGE, -1, 0), (9 * PAGE, 3 * PAGE, -1, 4)]
    assert not ranges.is_expandable.any()
