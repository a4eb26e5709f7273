"""Kernels on arrays agree with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.format.arrays import distinct, stable_sort

INT64S = st.integers(-(2**63), 2**63 - 1)
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
