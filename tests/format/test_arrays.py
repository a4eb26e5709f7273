"""Kernels on arrays agree with numpy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.format.arrays import NARROW_LIMIT, distinct, integers, narrowest, outlier, stable_sort

INT64S = st.integers(-(2**63), 2**63 - 1)
INT32S = st.integers(-(2**31), 2**31 - 1)
ADDRESSES = st.integers(0, 40).map(lambda number: 0x7F0000000000 + 512 * number)


@given(values=st.lists(st.integers(-3, 3)) | st.lists(ADDRESSES) | st.lists(INT64S))
def test_a_stable_sort_is_that_of_numpy(values: list[int]) -> None:
    array = np.array(values, np.int64)
    order, ordered = stable_sort(array)
    assert order.tolist() == np.argsort(array, kind="stable").tolist()
    assert ordered.tolist() == sorted(values)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_narrow_integers_are_sorted_and_distinguished(dtype: type[np.signedinteger]) -> None:  # type: ignore[type-arg]
    ends = [np.iinfo(dtype).max, np.iinfo(dtype).min, 0, np.iinfo(dtype).max]
    array = np.array(ends, dtype)
    assert stable_sort(array)[1].tolist() == sorted(ends)
    assert distinct(array).tolist() == sorted(set(ends))
    assert distinct(array[:1]).tolist() == ends[:1]
    assert distinct(array[:0]).tolist() == []


def column(chunks: list[list[tuple[int, bool]]], dtype: pa.DataType) -> pa.ChunkedArray:
    """A column of which each row has a number and whether it is known. The numbers of the others lie under nulls."""
    arrays = []
    for chunk in chunks:
        numbers = pa.array([number for number, _ in chunk], dtype)
        validity = pa.array([known for _, known in chunk], pa.bool_()).buffers()[1]
        arrays.append(pa.Array.from_buffers(dtype, len(chunk), [validity, numbers.buffers()[1]]))
    return pa.chunked_array(arrays, dtype)


def known_numbers(chunks: list[list[tuple[int, bool]]]) -> list[int]:
    return [number for chunk in chunks for number, known in chunk if known]


def chunks_of(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[tuple[int, bool]]]]:
    return st.lists(st.lists(st.tuples(numbers, st.booleans()), min_size=1), min_size=1, max_size=3)


@settings(deadline=None)
@given(chunks=chunks_of(INT64S))
def test_null_becomes_minus_one_whatever_lies_under_it(chunks: list[list[tuple[int, bool]]]) -> None:
    expected = [number if known else -1 for chunk in chunks for number, known in chunk]
    assert integers([column(chunks, pa.int64())], np.int64).tolist() == expected


@settings(deadline=None)
@given(chunks=chunks_of(INT32S), start=st.integers(0, 3))
def test_integers_change_their_width_and_begin_anywhere(chunks: list[list[tuple[int, bool]]], start: int) -> None:
    expected = [number if known else -1 for chunk in chunks for number, known in chunk][start:]
    rows = column(chunks, pa.int64()).slice(start)
    assert integers([rows], np.int32).tolist() == expected
    assert integers([column(chunks, pa.int32()).slice(start)], np.int64).tolist() == expected


@settings(deadline=None)
@given(chunks=chunks_of(st.integers(-6, 6)), low=st.integers(-5, 0), high=st.integers(0, 5))
def test_an_outlier_is_a_number_out_of_range_that_is_not_null(
    chunks: list[list[tuple[int, bool]]], low: int, high: int
) -> None:
    wrong = [number for number in known_numbers(chunks) if not low <= number <= high]
    found = outlier(column(chunks, pa.int16()), low, high)
    assert found in wrong if wrong else found is None


@settings(deadline=None)
@given(chunks=chunks_of(st.sampled_from([0, -1, NARROW_LIMIT, NARROW_LIMIT + 1, 2**62])))
def test_integers_are_narrow_where_every_one_that_is_not_null_fits(chunks: list[list[tuple[int, bool]]]) -> None:
    fits = max(known_numbers(chunks), default=0) <= NARROW_LIMIT
    assert narrowest([column(chunks, pa.int64())]) is (np.int32 if fits else np.int64)
