"""Columns that are read from rows equal the values in the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.format.schema import MAX_BYTES
from memtrace.readers.fields import addresses, sizes
from memtrace.readers.rows import FieldError, columns

KEYS = ("action", "addr", "frames")


@given(
    rows=st.lists(st.dictionaries(st.sampled_from([*KEYS, "other"]), st.integers(), max_size=4), max_size=20),
    times=st.integers(1, 40),
)
def test_a_column_contains_the_value_of_each_row(rows: list[dict[str, int]], times: int) -> None:
    rows = rows * times
    assert columns(rows, KEYS, "the history") == {key: [row.get(key) for row in rows] for key in KEYS}


@pytest.mark.parametrize("row", [None, "action addr", ["action"], 7])
def test_a_row_that_is_not_a_dict_is_reported(row: object) -> None:
    with pytest.raises(FieldError, match=f"an element of the history has type {type(row).__name__} instead of dict"):
        columns([{"action": "alloc"}] * 300 + [row], KEYS, "the history")


@pytest.mark.parametrize("read_numbers", [addresses, sizes])
def test_a_missing_number_is_reported(read_numbers: Callable[..., Any]) -> None:
    with pytest.raises(FieldError, match="entry 1 has no 'addr'"):
        read_numbers([1, None, 2], "addr", "entry {}")


def test_a_missing_address_is_reported_beside_addresses_above_63_bits() -> None:
    with pytest.raises(FieldError, match="entry 1 has no 'addr'"):
        addresses([2**63, None], "addr", "entry {}")


def test_a_size_is_limited_unless_it_is_that_of_a_failed_request() -> None:
    values, is_failed = [5, 1 << 62, 7], np.array([False, True, False])
    assert sizes(values, "size", "entry {}", is_failed_request=is_failed).tolist() == values
    for value in (-1, MAX_BYTES + 1):
        with pytest.raises(FieldError, match=f"entry 2 has size {value}, which an allocator never writes"):
            sizes([*values[:2], value], "size", "entry {}", is_failed_request=is_failed)
    with pytest.raises(FieldError, match="entry 1 has size"):
        sizes(values, "size", "entry {}")
