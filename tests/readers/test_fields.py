"""Columns out of rows, against the rows themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.readers.fields import FieldError, addresses, columns, sizes

KEYS = ("action", "addr", "frames")


@given(
    rows=st.lists(st.dictionaries(st.sampled_from([*KEYS, "other"]), st.integers(), max_size=4), max_size=20),
    times=st.integers(1, 40),
)
def test_a_column_is_what_each_row_says(rows, times):
    rows = rows * times
    assert columns(rows, KEYS, "the history") == {key: [row.get(key) for row in rows] for key in KEYS}


@pytest.mark.parametrize("stranger", [None, "action addr", ["action"], 7])
def test_a_row_that_is_no_dict_is_named(stranger):
    with pytest.raises(FieldError, match=f"an entry of the history is no record but of type {type(stranger).__name__}"):
        columns([{"action": "alloc"}] * 300 + [stranger], KEYS, "the history")


@pytest.mark.parametrize("numbers", [addresses, sizes])
def test_a_number_that_is_not_there_is_said_to_be_absent(numbers):
    with pytest.raises(FieldError, match="entry 1 has no 'addr'"):
        numbers([1, None, 2], "addr", "entry {}")


def test_addresses_above_two_to_the_63_do_not_hide_an_absent_one():
    with pytest.raises(FieldError, match="entry 1 has no 'addr'"):
        addresses([2**63, None], "addr", "entry {}")
