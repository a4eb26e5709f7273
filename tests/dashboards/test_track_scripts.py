"""The page's scripts against brute force, in Node.js: unpacking, times, and the highest value of every pixel column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.dashboards.delta_encoding import MAX_VALUE, encode_columns, encode_to_fit

from tests.dashboards.scripts import Scripts, running_scripts


def answers(names: tuple[str, ...], function: str) -> Iterator[Scripts]:
    with running_scripts(names, f"const answer = {function};") as scripts:
        yield scripts


@pytest.fixture(scope="module")
def columns() -> Iterator[Scripts]:
    """Asks for the highest value of each pixel column."""
    yield from answers(
        ("format.js", "axis.js"),
        "({positions, values, a, b, count}) => "
        "[...highestPerColumn(positions, values, a, b, count)].map((place) => values[place])",
    )


@pytest.fixture(scope="module")
def unpacked() -> Iterator[Scripts]:
    """Asks for the columns of a packed table."""
    yield from answers(
        ("worker.js",),
        """({ length, columns, data }) => {
          const planes = require("zlib").inflateSync(Buffer.from(data, "base64"));
          let start = 0;
          return columns.map(([, width, factor, fits]) => {
            start += width * length;
            return [...unpackColumn(planes, start - width * length, length, width, factor, fits)];
          });
        }""",
    )


@pytest.fixture(scope="module")
def times() -> Iterator[Scripts]:
    """Asks for spread times, or for the text of a tick."""
    yield from answers(
        ("format.js", "axis.js"), "(asked) => (asked.tick ? formatTick(...asked.tick) : [...spreadTimes(asked.times)])"
    )


@st.composite
def curves(draw: st.DrawFn) -> dict[str, Any]:
    """A step function, and a range of it in pixel columns."""
    steps = draw(st.lists(st.integers(1, 50), min_size=1, max_size=40))
    positions = np.cumsum(steps).tolist()
    values = draw(st.lists(st.integers(0, 2**40), min_size=len(steps), max_size=len(steps)))
    a = draw(st.integers(positions[0], positions[-1]))
    b = draw(st.integers(a + 1, positions[-1] + 100))
    return {"positions": positions, "values": values, "a": a, "b": b, "count": draw(st.integers(1, 60))}


def highest_by_brute_force(curve: dict[str, Any]) -> list[int]:
    positions, values = np.array(curve["positions"], np.float64), np.array(curve["values"])
    width = (curve["b"] - curve["a"]) / curve["count"]
    highest = []
    for column in range(curve["count"]):
        first, edge = curve["a"] + column * width, curve["a"] + (column + 1) * width
        carried = np.flatnonzero(positions < first if column else positions <= first)[-1]
        inside = values[(positions >= first) & (positions < edge)]
        highest.append(int(max([values[carried], *inside])))
    return highest


@settings(max_examples=100, deadline=None)
@given(curves())
def test_every_pixel_column_shows_the_highest_value_of_its_interval(columns: Scripts, curve: dict[str, Any]) -> None:
    assert columns.ask(curve) == highest_by_brute_force(curve)


_NUMBERS: Final = st.one_of(
    st.integers(-300, 300), st.integers(-MAX_VALUE, MAX_VALUE), st.integers(-99, 99).map(lambda count: 512 * count)
)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 40).flatmap(
        lambda length: st.lists(st.lists(_NUMBERS, min_size=length, max_size=length), min_size=1, max_size=4)
    )
)
def test_columns_are_unpacked_as_they_were_packed(unpacked: Scripts, table: list[list[int]]) -> None:
    packed = encode_columns({str(number): np.array(column, np.int64) for number, column in enumerate(table)})
    assert unpacked.ask(packed) == table


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=60).map(sorted))
def test_times_of_one_microsecond_are_spread_over_it(times: Scripts, rising: list[int]) -> None:
    spread = times.ask({"times": rising})
    assert [int(time) for time in spread] == rising
    assert (np.diff(spread) > 0).all()


@pytest.mark.parametrize(
    ("us", "step", "largest", "text"),
    [
        (0, 1e6, 9e6, "0 s"),
        (8_628_262, 2, 8_628_270, "8.628262 s"),
        (1500, 500, 2500, "1.5 ms"),
        (7.25, 0.05, 9, "7.25 µs"),
    ],
)
def test_ticks_have_the_digits_that_tell_them_apart(
    times: Scripts, us: float, step: float, largest: float, text: str
) -> None:
    assert times.ask({"tick": [us, step, largest]}) == text


def test_as_many_items_are_encoded_as_fit() -> None:
    values = np.random.default_rng(0).integers(0, 2**40, 5000)
    whole = len(encode_columns({"value": values})["data"])
    packed, allowed = encode_to_fit(lambda count: encode_columns({"value": values[:count]}), 10_000, whole // 3)
    assert whole // 6 < len(packed["data"]) <= whole // 3
    assert packed["length"] == allowed < 5000
    everything, _ = encode_to_fit(lambda count: encode_columns({"value": values[:count]}), 10_000, whole)
    assert everything["length"] == 5000
