"""The page's scripts against brute force, in Node.js: unpacking, times, and the highest value of every pixel column."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.dashboards.delta_encoding import MAX_VALUE, encode_columns, encode_to_fit

TEMPLATES = Path(__file__).parents[2] / "dashboards" / "templates"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is missing")


def run_scripts(names: tuple[str, ...], expression: str, arguments: Any) -> Any:
    """Return the value of a JavaScript expression, in which `input` is the arguments, after some scripts of the page."""
    sources = "".join((TEMPLATES / name).read_text() for name in names)
    program = (
        "const self = {};\n"
        + sources
        + "const input = JSON.parse(require('fs').readFileSync(0, 'utf-8'));\n"
        + f"(async () => console.log(JSON.stringify(await ({expression}))))();"
    )
    result = subprocess.run(
        ["node", "-e", program], input=json.dumps(arguments), capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(result.stdout)


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


@needs_node
@settings(max_examples=15, deadline=None)
@given(st.lists(curves(), min_size=1, max_size=4))
def test_every_pixel_column_shows_the_highest_value_of_its_interval(drawn: list[dict[str, Any]]) -> None:
    highest = run_scripts(
        ("format.js", "axis.js"),
        "input.map(({positions, values, a, b, count}) => "
        "[...highestPerColumn(positions, values, a, b, count)].map((place) => values[place]))",
        drawn,
    )
    assert highest == [highest_by_brute_force(curve) for curve in drawn]


@needs_node
@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.integers(0, 12).flatmap(
            lambda length: st.lists(
                st.lists(
                    st.one_of(
                        st.integers(-300, 300),
                        st.integers(-MAX_VALUE, MAX_VALUE),
                        st.integers(-99, 99).map(lambda n: 512 * n),
                    ),
                    min_size=length,
                    max_size=length,
                ),
                min_size=1,
                max_size=3,
            )
        ),
        min_size=1,
        max_size=3,
    )
)
def test_columns_are_unpacked_as_they_were_packed(tables: list[list[list[int]]]) -> None:
    columns = [{str(n): np.array(column, np.int64) for n, column in enumerate(table)} for table in tables]
    unpacked = run_scripts(
        ("worker.js",),
        "Promise.all(input.map(unpackColumns)).then((tables) => tables.map((table) => "
        "Object.values(table).map((column) => [...column])))",
        [encode_columns(table) for table in columns],
    )
    assert unpacked == tables


@needs_node
@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=30).map(sorted), min_size=1, max_size=4))
def test_times_of_one_microsecond_are_spread_over_it(times: list[list[int]]) -> None:
    spread = run_scripts(("format.js", "axis.js"), "input.map((times) => [...spreadTimes(times)])", times)
    assert [[int(time) for time in row] for row in spread] == times
    assert all((np.diff(row) > 0).all() for row in spread)


@needs_node
@pytest.mark.parametrize(
    ("us", "step", "largest", "text"),
    [
        (0, 1e6, 9e6, "0 s"),
        (8_628_262, 2, 8_628_270, "8.628262 s"),
        (1500, 500, 2500, "1.5 ms"),
        (7.25, 0.05, 9, "7.25 µs"),
    ],
)
def test_ticks_have_the_digits_that_tell_them_apart(us: float, step: float, largest: float, text: str) -> None:
    assert run_scripts(("format.js", "axis.js"), "formatTick(...input)", [us, step, largest]) == text


def test_as_many_items_are_encoded_as_fit() -> None:
    values = np.random.default_rng(0).integers(0, 2**40, 5000)
    whole = len(encode_columns({"value": values})["data"])
    packed, allowed = encode_to_fit(lambda count: encode_columns({"value": values[:count]}), 10_000, whole // 3)
    assert whole // 6 < len(packed["data"]) <= whole // 3
    assert packed["length"] == allowed < 5000
    everything, _ = encode_to_fit(lambda count: encode_columns({"value": values[:count]}), 10_000, whole)
    assert everything["length"] == 5000
