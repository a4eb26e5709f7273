"""The tracks in a browser: what they draw, how they are moved, and that all views follow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
from memtrace.dashboards.page import report

from memtrace.analysis.peak import find_peak, requested_bytes
from memtrace.trace import Trace
from tests.builders import event, op, step, trace_of
from tests.dashboards.browser import needs_chromium, opened
from tests.dashboards.test_page import HOSTILE, hostile_trace

NUM_RANGES = 40
DRAWS = "Number(document.querySelector('.tracks').dataset.draws)"
CURVE = "document.querySelectorAll('.tracks canvas')[1]"
pytestmark = needs_chromium


def busy_trace(num_events: int = 3000) -> Trace:
    """Allocations and frees in random order, with steps, modules and nested operators."""
    chance = random.Random(7)
    events, live, num_blocks = [], [], 0
    for row in range(num_events):
        if live and chance.random() < 0.48:
            events.append(event("free", live.pop(chance.randrange(len(live))), 1000 * (row + 1)))
        else:
            size = chance.randrange(1, 1 << 20)
            events.append(event("alloc", num_blocks, 1000 * (row + 1), size, address=(num_blocks % 97) << 20))
            live.append(num_blocks)
            num_blocks += 1
    names = [{"id": 0, "kind": "module", "text": "net.layers.0"}, {"id": 1, "kind": "operator", "text": "aten::mm"}]
    span = {"kind": "module", "name": 0, "start_ns": 100_000, "duration_ns": 300_000, "thread": 0}
    return trace_of(
        events=events,
        names=names,
        ops=[op(number, "forward", name=1, thread=0) | {"start_ns": 1000 * number} for number in range(9)],
        spans=[step(number, number * 600_000, 600_000) for number in range(5)] + [span],
    )


PEAK_BYTES = find_peak(busy_trace(), "cpu").requested.bytes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(busy_trace(), tmp_path_factory.mktemp("tracks") / "page.html")


@pytest.fixture(scope="module")
def open_page(browser: Any, path: Path) -> Iterator[Any]:
    with opened(browser, path) as page:
        yield page


@pytest.fixture
def page(open_page: Any) -> Any:
    """The page with everything visible and nothing chosen, and with the pointer over its tracks."""
    open_page.evaluate("location.hash = 'view='")
    open_page.wait_for_function(f"() => {CURVE}.dataset.highest === '{PEAK_BYTES}'")
    open_page.hover(".tracks .area", position={"x": 500, "y": 150})
    return open_page


def address(page: Any, key: str) -> str | None:
    """A field of the state in the address, which has every choice at once."""
    return parse_qs(page.evaluate("location.hash.slice(1)")).get(key, [None])[0]


def after_drawing(page: Any, act: Callable[[], object]) -> None:
    before = page.evaluate(DRAWS)
    act()
    page.wait_for_function(f"() => {DRAWS} > {before}")


def shown_range(page: Any) -> tuple[float, float] | None:
    """The drawn range in µs; None: everything."""
    text = page.get_attribute(".tracks", "data-range")
    return tuple(map(float, text.split(".."))) if text else None


def press(page: Any, key: str) -> tuple[float, float] | None:
    """Press a key and return the range that is drawn then."""
    after_drawing(page, lambda: page.keyboard.press(key))
    return shown_range(page)


def highest_in(trace: Trace, first_us: float, last_us: float) -> int:
    """The highest level of a range of time by brute force, including the level with which it begins."""
    levels = requested_bytes(trace, "cpu")
    time_us = trace.columns("events", "time_ns")["time_ns"][levels.rows] // 1000
    inside = levels.bytes[(time_us >= first_us) & (time_us < last_us)]
    before = levels.bytes[time_us < first_us] if first_us > time_us[0] else levels.bytes[time_us <= first_us]
    return int(max([*before[-1:], *inside, 0]))


def test_no_drawn_maximum_differs_from_that_of_the_data(page: Any) -> None:
    trace, chance = busy_trace(), random.Random(3)
    for _ in range(NUM_RANGES):
        first = chance.uniform(1, 2900)
        last = first + 10 ** chance.uniform(0.5, 3)
        after_drawing(page, lambda: page.evaluate(f"location.hash = 'from={first:.3f}&to={last:.3f}'"))  # noqa: B023
        assert page.evaluate(f"Number({CURVE}.dataset.highest)") == highest_in(trace, round(first, 3), round(last, 3))


def test_every_pixel_column_is_as_high_as_the_data(page: Any) -> None:
    trace = busy_trace()
    page.evaluate("location.hash = 'from=610&to=810&color=category'")
    page.wait_for_function(f"() => Number({CURVE}.dataset.highest) === {highest_in(trace, 610, 810)}")
    tops = page.evaluate(
        f"""() => {{
          const canvas = {CURVE}, pen = canvas.getContext("2d"), left = 84, tops = [];
          const {{ data, width, height }} = pen.getImageData(left, 0, canvas.width - left - 2, canvas.height);
          for (let x = 0; x < width; x++) {{
            let y = 0; // unknown blocks are #8c9299
            while (y < height && !(data[4 * (y * width + x)] === 0x8c && data[4 * (y * width + x) + 1] === 0x92)) y++;
            tops.push(y);
          }}
          return {{ tops, height, limit: Number(canvas.dataset.limit) }};
        }}"""
    )
    columns = np.linspace(610, 810, len(tops["tops"]) + 1)
    for place, top in enumerate(tops["tops"]):
        drawn = (tops["height"] - top) / tops["height"] * tops["limit"]
        expected = highest_in(trace, columns[place] + 1e-9 * (place > 0), columns[place + 1])
        assert abs(drawn - expected) <= 4 * tops["limit"] / tops["height"], f"pixel column {place}"


def test_wheel_keys_and_buttons_move_the_view_and_the_back_button_undoes_it(page: Any) -> None:
    first, last = press(page, "w") or (0, 0)
    assert 0 < first < last < 3000 and last - first == pytest.approx(0.6 * 3000, rel=0.01)
    page.wait_for_function("() => location.hash.includes('from=')")
    assert (press(page, "d") or (0, 0))[0] > first
    assert (press(page, "a") or (0, 0))[0] == pytest.approx(first, abs=1)
    after_drawing(page, lambda: page.mouse.wheel(0, -300))
    zoomed = shown_range(page) or (0, 9999)
    assert zoomed[1] - zoomed[0] < last - first
    assert press(page, "0") is None
    assert press(page, "]") == (0, 600)
    assert press(page, "]") == (600, 1200)
    after_drawing(page, page.go_back)
    assert shown_range(page) == (0, 600)
    peak = find_peak(busy_trace(), "cpu")
    first, last = press(page, "p") or (0, 0)
    assert address(page, "at") == str(peak.requested.event)
    assert first < (peak.time_ns or 0) / 1000 < last
    page.dblclick(".tracks .area", position={"x": 500, "y": 100})
    page.wait_for_function("() => document.querySelector('.tracks').dataset.range === ''")


def test_a_zoom_moves_every_view(page: Any) -> None:
    canvases = "[...document.querySelectorAll('.tracks canvas')].map((canvas) => canvas.toDataURL())"
    whole = page.evaluate(canvases)
    press(page, "]")
    assert all(before != after for before, after in zip(whole, page.evaluate(canvases), strict=True))
    after_drawing(page, lambda: page.locator(".tracks select").first.select_option("event"))
    assert address(page, "axis") == "event"
    assert shown_range(page) == (0, 600), "the range is the same on an axis of events"


def test_a_dragged_range_lists_what_is_allocated_in_it(page: Any) -> None:
    box = page.locator(".tracks .area").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 150)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 150, steps=3)
    page.mouse.up()
    first, last = map(float, str(address(page, "brush")).split(".."))
    trace = busy_trace()
    events = trace.columns("events", "kind", "time_ns", "size")
    time_us = events["time_ns"] / 1000
    allocated = events["size"][(events["kind"] == 0) & (time_us > first) & (time_us <= last)]
    page.wait_for_function(f"() => document.querySelector('.explorer').dataset.count === '{len(allocated)}'")
    assert page.get_attribute(".explorer", "data-bytes") == str(allocated.sum())
    assert page.is_visible(".tracks .selection")
    assert press(page, "f") == pytest.approx((first, last), abs=2)
    press(page, "Escape")
    assert address(page, "brush") is None


def test_a_click_chooses_an_instant_a_step_a_module_or_a_block(page: Any) -> None:
    after_drawing(page, lambda: page.click(".tracks .area", position={"x": 600, "y": 100}))
    assert page.is_visible(".tracks .instant") and int(address(page, "at") or 0) > 0
    lanes = page.locator(".tracks canvas").nth(2)
    lanes.click(position={"x": 100, "y": 8})
    assert address(page, "step") == "0"
    module_row = page.evaluate("document.querySelectorAll('.tracks canvas')[2].clientHeight") - 19 - 11
    lanes.click(position={"x": 84 + 200 / 3000 * 1100, "y": module_row})
    assert address(page, "module") == "net.layers.0"
    press(page, "Escape")
    assert address(page, "module") is None
    blocks = page.locator(".tracks canvas").nth(3)
    for y in range(10, 270, 8):
        blocks.click(position={"x": 700, "y": y})
        if address(page, "block"):
            break
    assert address(page, "block")


def test_the_legend_hides_areas_and_the_height_can_fit_the_range(page: Any) -> None:
    whole = page.evaluate(f"Number({CURVE}.dataset.limit)")
    page.evaluate("location.hash = 'from=10&to=60'")
    page.wait_for_function(f"() => Number({CURVE}.dataset.highest) === {highest_in(busy_trace(), 10, 60)}")
    after_drawing(page, lambda: page.get_by_role("button", name="Fit height").click())
    assert page.evaluate(f"Number({CURVE}.dataset.limit)") < whole
    buttons = page.locator(".tracks .legend button")
    for place in range(buttons.count()):
        after_drawing(page, lambda: buttons.nth(place).click())  # noqa: B023
    assert address(page, "hide") == ",".join(map(str, range(buttons.count())))
    assert page.evaluate(f"Number({CURVE}.dataset.highest)") == 0


def test_hostile_names_are_text_in_tooltips(browser: Any, tmp_path: Path) -> None:
    with opened(browser, report(hostile_trace(), tmp_path / "page.html"), color_scheme="dark") as page:
        page.locator(".tracks select").nth(1).select_option("site")
        texts = []
        box = page.locator(".tracks canvas").nth(3).bounding_box()
        for y in range(8, 272, 12):
            page.mouse.move(box["x"] + 900, box["y"] + y)
            texts.append(page.inner_text(".tracktip"))
        assert any(HOSTILE.splitlines()[0][:40] in text for text in texts)
        assert HOSTILE.splitlines()[0][:20] in page.inner_text(".tracks .legend")
        assert page.evaluate("window.hacked") is None


DAMAGED = ("from=x&to=9", "from=9&to=3", "brush=5..", "at=1e99&hide=99,-1&color=none", "block=7&axis=event&step=99")


def test_a_damaged_address_leaves_a_page_that_works(page: Any) -> None:
    for fragment in DAMAGED:
        page.evaluate(f"location.hash = '{fragment}&section=live'")
        page.hover(".tracks .area", position={"x": 500, "y": 150})
        page.keyboard.press("0")
        page.wait_for_function(f"() => {CURVE}.dataset.highest === '{PEAK_BYTES}'")
