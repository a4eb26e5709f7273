"""Timelines with changes against a replay of one position after another."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrace.analysis.blocks import CATEGORY
from memtrace.errors import MemtraceError
from memtrace.planning.batch_size_law import find_batch_law, find_largest_batch
from memtrace.planning.plan import StepCost
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.timeline import TICKS_PER_ROW, Timeline, build_timeline
from memtrace.planning.timeline_selection import matches_module, parse_selection
from tests.builders import event, trace_of

START, STOP = 95, 200
QUICK = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
"""Other processes on the machine must not make a test fail."""


def replayed_peak(timeline: Timeline) -> int:
    """The most bytes at any position, by looking at each of them."""
    return max(
        int(timeline.size[timeline.live_at(position)].sum()) for position in range(timeline.start, timeline.stop)
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 1000), st.integers(0, 1000), st.integers(60, 220), st.integers(0, 90),
                st.sampled_from(["parameter", "gradient", "activation", "temporary"]),
            ),
            max_size=20,
        )
    )  # fmt: skip
    size = np.array([row[0] for row in rows], np.int64)
    begin = np.array([row[2] for row in rows], np.int64)
    return Timeline(
        START,
        STOP,
        np.arange(len(rows)),
        size,
        np.minimum(size, np.array([row[1] for row in rows], np.int64)),
        begin,
        begin + np.array([row[3] for row in rows], np.int64),
        np.array([CATEGORY[row[4]] for row in rows], np.int8),
    )


@QUICK
@given(timelines())
def test_peak_is_that_of_a_replay(timeline: Timeline) -> None:
    assert timeline.peak_bytes == replayed_peak(timeline)
    at_peak = timeline.bytes_by_category(timeline.peak_position)
    assert sum(at_peak.values()) == timeline.peak_bytes


@QUICK
@given(timelines(), st.integers(1, 5), st.integers(0, 120), st.integers(60, 220), st.integers(-40, 40), st.data())
def test_changed_timelines_are_those_of_a_replay(
    timeline: Timeline, divisor: int, length: int, position: int, ticks: int, data: st.DataObject
) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(timeline), max_size=len(timeline))), bool)
    changed = [
        timeline.remove(mask),
        timeline.resize(mask, 1 / divisor),
        timeline.cut(mask, begin=position),
        timeline.cut(mask, end=position),
        timeline.extend(mask, begin=position, end=position + length),
        timeline.shift(mask, ticks),
        timeline.insert([length], [position], [position + length], "workspace"),
    ]
    for each in changed:
        assert each.peak_bytes == replayed_peak(each)
    # What is not selected stays as it was, and each change does what it says to the rest.
    removed, resized, begun, ended, _, shifted, inserted = changed
    assert removed.size.tolist() == timeline.size[~mask].tolist()
    assert resized.size[mask].tolist() == (-(-timeline.size[mask] // divisor)).tolist()
    assert resized.size[~mask].tolist() == timeline.size[~mask].tolist()
    assert (begun.begin[mask] >= position).all() and (ended.begin == timeline.begin).all()
    assert (shifted.end - shifted.begin).tolist() == (timeline.end - timeline.begin).tolist()
    assert len(inserted) == len(timeline) + 1 and inserted.block[-1] == -1


@QUICK
@given(timelines(), st.integers(0, 12))
def test_scaled_batch_grows_what_depends_on_it_and_nothing_else(timeline: Timeline, factor: int) -> None:
    scaled = timeline.scale_batch(factor)
    expected = timeline.constant + factor * (timeline.size - timeline.constant)
    assert scaled.size.tolist() == expected.tolist()
    assert find_batch_law(timeline, None, {}).peak_bytes(factor) == replayed_peak(scaled)


@QUICK
@given(timelines(), st.integers(1, 30), st.integers(0, 40000))
def test_the_largest_batch_fits_and_one_more_does_not(timeline: Timeline, batch: int, capacity: int) -> None:
    law = find_batch_law(timeline, batch, {})
    largest = find_largest_batch(timeline, law, capacity)
    if largest.batch is None:
        assert timeline.scale_batch(1000).peak_bytes <= capacity
    elif largest.peak_bytes > capacity:
        assert largest.batch == 0 and timeline.scale_batch(0).peak_bytes == largest.peak_bytes
    else:
        count = int(largest.batch)
        assert count == largest.batch
        assert timeline.scale_batch(count / batch).peak_bytes <= capacity
        assert timeline.scale_batch((count + 1) / batch).peak_bytes > capacity


@QUICK
@given(timelines(), st.integers(1, 30))
def test_pieces_of_the_law_are_convex_and_begin_at_zero(timeline: Timeline, batch: int) -> None:
    pieces = find_batch_law(timeline, batch, {}).pieces
    assert pieces[0].from_batch == 0
    assert all(one.from_batch < two.from_batch for one, two in pairwise(pieces))
    assert all(one.bytes_per_batch < two.bytes_per_batch for one, two in pairwise(pieces))


def test_a_timeline_of_a_step_has_the_recorded_peak() -> None:
    trace = trace_of(
        events=[
            event("baseline", 0, 0, 100),
            event("alloc", 1, 1, 1000),
            event("free", 1, 2, 1000),
            event("alloc", 2, 3, 40),
            event("alloc", 3, 4, 30),
            event("free", 2, 5, 40),
            event("free", 3, 6, 30),
            event("alloc", 4, 7, 5000),
        ]
    )
    step = RecordedStep(0, 3, 7, 3, 4, StepCost(170, None))
    timeline = build_timeline(trace, "cpu", step, np.zeros(5, np.int64))
    assert timeline.block.tolist() == [0, 2, 3]
    assert timeline.peak_bytes == replayed_peak(timeline) == 170
    assert timeline.peak_position == 4 * TICKS_PER_ROW
    # A block of the same position as the end of another does not overlap it.
    assert replace(timeline, end=timeline.end - 0).live_at(6 * TICKS_PER_ROW).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("name", "pattern", "matches"),
    [
        ("blocks.0.mlp.up", "blocks.*", True),
        ("blocks.0", "blocks.*", True),
        ("blocks", "blocks.*", False),
        ("blocks.10", "blocks.1", False),
        ("encoder.blocks.0", "blocks.*", False),
        ("a.b.mlp", "*.*.mlp", True),
        ("a+b", "a+b", True),
    ],
)
def test_patterns_of_modules_match_whole_parts_of_names(name: str, pattern: str, matches: bool) -> None:
    assert matches_module(name, pattern) is matches


@pytest.mark.parametrize("text", ["", "color=red", "category=", "min=big", "min=1,min=2", "activations", "module"])
def test_what_does_not_select_blocks_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(MemtraceError, match=r"^'?[^\n]+$"):
        parse_selection(text)


def test_a_bare_word_selects_a_category() -> None:
    assert parse_selection("activation").category == "activation"
    assert parse_selection("module=blocks.*,max=1KiB").max_bytes == 1024
