"""Columns of records encode to the bytes that a record alone would have."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.exporters.byte_rows import only_where, varints
from memtrace.exporters.pickle_rows import (
    EMPTY_LIST,
    START,
    STOP,
    SharedObjects,
    append_all,
    dictionaries,
    integers,
    references,
)
from memtrace.exporters.protobuf import fixed64_rows, int_field, int_rows, message_rows
from memtrace.exporters.slices import assign_lanes, bracket_order

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
SLICES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12)


@settings(deadline=None)
@given(st.lists(INT64, min_size=1, max_size=20))
def test_columns_of_varints_are_the_varints_of_each_number(values: list[int]) -> None:
    one_by_one = b"".join(int_field(1, value)[1:] for value in values)
    assert varints(np.array(values, np.int64)).to_bytes() == one_by_one


@settings(deadline=None)
@given(st.lists(st.tuples(INT64, INT64), min_size=1, max_size=20))
def test_a_protobuf_library_reads_columns_of_messages(pairs: list[tuple[int, int]]) -> None:
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from google.protobuf.internal import decoder

    numbers, fixed = np.array(pairs, np.int64).T
    content = message_rows(3, int_rows(1, numbers), fixed64_rows(2, fixed)).to_bytes()
    offset, seen = 0, []
    while offset < len(content):
        assert content[offset] == 3 << 3 | 2
        _, offset = decoder._DecodeVarint(content, offset + 1)
        assert content[offset] == 1 << 3
        number, offset = decoder._DecodeVarint(content, offset + 1)
        assert content[offset] == 2 << 3 | 1
        seen.append((number, int.from_bytes(content[offset + 1 : offset + 9], "little")))
        offset += 9
    assert seen == [(number % (1 << 64), value % (1 << 64)) for number, value in pairs]


@settings(deadline=None)
@given(st.lists(INT64, min_size=1, max_size=30), st.booleans())
def test_pickled_columns_of_integers_load_as_the_integers(values: list[int], unsigned: bool) -> None:
    rows = integers(np.array(values, np.int64), unsigned=unsigned)
    content = START + EMPTY_LIST + b"".join(append_all(iter([rows]))) + STOP
    assert pickle.loads(content) == [value % (1 << 64) if unsigned else value for value in values]


def test_pickled_dictionaries_share_their_keys_and_values_and_leave_out_what_is_unknown() -> None:
    frames: list[dict[str, Any]] = [{"line": 1}, {"line": 2}]
    shared = SharedObjects(("name", "size"), frames)
    keys, frame = shared.index
    count = 2500
    numbers = np.arange(count)
    has_size = numbers % 2 == 0
    rows = dictionaries(
        {
            int(keys[0]): references(frame[numbers % 2]),
            int(keys[1]): only_where(integers(numbers), has_size),
        },
        count,
    )
    head = START + b"(" + shared.content + EMPTY_LIST
    loaded = pickle.loads(head + b"".join(append_all(iter([rows]))) + b"t" + STOP)[1]
    assert loaded == [
        {"name": frames[number % 2], **({"size": number} if number % 2 == 0 else {})} for number in range(count)
    ]
    assert loaded[0]["name"] is loaded[2]["name"]


@settings(deadline=None)
@given(SLICES)
def test_slices_of_a_lane_are_disjoint_or_contain_one_another(slices: list[tuple[int, int]]) -> None:
    start, duration = np.array(slices, np.int64).reshape(-1, 2).T
    lane = assign_lanes(start, duration)
    end = start + duration
    overlap = (start[:, None] < start) & (start < end[:, None]) & (end[:, None] < end)
    assert not (overlap & (lane[:, None] == lane)).any()
    if not overlap.any():
        assert not lane.any()


@settings(deadline=None)
@given(SLICES)
def test_a_viewer_that_pairs_ends_with_the_last_open_slice_gets_every_slice_back(
    slices: list[tuple[int, int]],
) -> None:
    start, duration = np.array(slices, np.int64).reshape(-1, 2).T
    lane = assign_lanes(start, duration)
    for number in np.unique(lane).tolist():
        first, end = start[lane == number], (start + duration)[lane == number]
        brackets = bracket_order(first, end)
        times = np.where(brackets.is_end, end[brackets.row], first[brackets.row])
        assert (np.diff(times) >= 0).all()
        open_slices: list[int] = []
        paired = []
        for row, is_end, time in zip(brackets.row.tolist(), brackets.is_end.tolist(), times.tolist(), strict=True):
            if is_end:
                paired.append((int(first[open_slices.pop()]), time))
            else:
                open_slices.append(row)
        assert not open_slices
        assert sorted(paired) == sorted(zip(first.tolist(), end.tolist(), strict=True))
