"""Payloads: spans in rows that do not overlap, and columns that fit into the room that they have."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.dashboards.lanes import nesting_rows
from memtrace.dashboards.payload import build_payload

from tests.analysis.test_memory_curve import random_history
from tests.dashboards.test_page import hostile_trace

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(SPANS)
def test_spans_of_a_row_do_not_overlap_and_inner_ones_are_below_outer_ones(spans: list[tuple[int, int]]) -> None:
    start = np.array([begin for begin, _ in spans], np.int64)
    end = start + np.array([length for _, length in spans], np.int64)
    row = nesting_rows(start, end)
    for one in range(len(spans)):
        for other in range(len(spans)):
            is_inside = start[one] <= start[other] and end[other] <= end[one] and spans[one] != spans[other]
            if is_inside and start[other] < end[one]:
                assert row[other] > row[one]
            if one != other and row[one] == row[other]:
                assert end[one] <= start[other] or end[other] <= start[one]


@pytest.mark.parametrize("max_chars", [40_000, 150_000])
def test_a_payload_fits_into_its_room(max_chars: int) -> None:
    for trace in (hostile_trace(3000), random_history(2, 20_000)):
        payload = build_payload(trace, trace.devices[0], max_chars)
        assert payload is not None
        assert len(json.dumps(payload.packed)) <= 1.1 * max_chars
    assert "The curve has" in payload.notes["tracks"] and " of " in payload.notes["tracks"]
