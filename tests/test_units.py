from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.units import (
    format_bytes,
    format_count,
    format_duration,
    format_long_duration,
    format_names,
    format_share,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (12_999_999, "12.4 MiB"),
        (123 << 20, "123 MiB"), ((1 << 30) - 1, "1.00 GiB"), (-(3 << 30), "-3.00 GiB"), (None, "unknown"),
        (math.nan, "unknown"), (5 << 60, "5,120 PiB"),
    ],
)  # fmt: skip
def test_bytes_have_three_significant_digits_and_a_binary_unit(num_bytes: float | None, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1500, "1.50 µs"), (4_310_000, "4.31 ms"), (61_000_000_000, "61.0 s"), (None, "-")],
)
def test_durations_have_three_significant_digits_and_a_decimal_unit(duration_ns: float | None, text: str) -> None:
    assert format_duration(duration_ns, unknown="-") == text


def test_shares_are_whole_percentages_and_extremes_are_exact() -> None:
    assert [format_share(1, 3), format_share(1, 300), format_share(0, 3)] == ["33 %", "< 1 %", "0 %"]
    assert [format_share(996, 1000), format_share(1), format_share(994, 1000)] == ["> 99 %", "100 %", "99 %"]
    assert [format_share(1, 0), format_share(None)] == ["unknown", "unknown"]


def test_counts_have_a_noun_in_the_right_number() -> None:
    assert [format_count(1, "block"), format_count(1204, "block")] == ["1 block", "1,204 blocks"]
    assert format_count(2, "micro-batch", "micro-batches") == "2 micro-batches"


def test_long_lists_of_names_are_abbreviated() -> None:
    assert format_names(["a"]) == "a"
    assert format_names(["a", "b", "c", "d"]) == "a, b, c, d"
    assert format_names([f"layers.{number}" for number in range(12)]) == "layers.0, layers.1, layers.2 and 9 more"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 << 30),
        ("24g", 24 << 30),
        ("24GB", 24 * 10**9),
        (" 1.5 MiB ", 3 << 19),
        ("0", 0),
        ("512 B", 512),
        (str(1 << 20), 1 << 20),
    ],
)
def test_sizes_are_parsed_in_binary_and_decimal_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "1 XiB", "1e9", "nan", "20", "1048575"])
def test_text_that_is_not_a_size_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(ValueError, match="invalid size"):
        parse_bytes(text)


@given(st.integers(0, 1 << 49))
def test_a_formatted_size_parses_back_within_half_a_digit(num_bytes: int) -> None:
    printed = format_bytes(num_bytes).replace(",", "")
    assert parse_bytes(printed) == pytest.approx(num_bytes, rel=6e-3, abs=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "500 ms"), (59, "59.0 s"), (60, "1 min"), (89, "1 min"), (3600, "1 h"), (12_000, "3 h 20 min"),
        (86_400, "1 d"), (2 * 86_400 + 3 * 3600 + 60, "2 d 3 h"), (3599, "1 h"),
    ],
)  # fmt: skip
def test_long_durations_have_minutes_hours_and_days(seconds: float, text: str) -> None:
    assert format_long_duration(seconds * 1e9) == text


def test_an_unknown_long_duration_is_unknown() -> None:
    assert format_long_duration(None) == "unknown"
