"""The explorer of the page: the blocks that it shows are those of the analysis, whatever is chosen."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memtrace.dashboards.explorer import encode_blocks, find_kinds
from memtrace.dashboards.page import report
from memtrace.dashboards.payload import build_payload

from memtrace.analysis.block_catalog import catalog_blocks, sum_left_out
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, requested_bytes
from memtrace.format.schema import PHASES
from memtrace.trace import Trace
from memtrace.units import format_bytes
from tests.builders import event, op, step, trace_of
from tests.dashboards.browser import needs_chromium, opened
from tests.dashboards.test_page import HOSTILE, hostile_trace

NUM_INSTANTS = 50
STEP_NS = 40_000
NUM_STEPS = 10
MAX_ROWS_IN_SIGHT = 30
"""Rows of the table that are in the document at least."""
CATCH_FILES = """() => {
  URL.createObjectURL = (file) => { window.saved = file.text(); return ""; };
  HTMLAnchorElement.prototype.click = () => {};
}"""
"""Keeps what the page saves as a file, instead of downloading it."""
SHOWN = """explorer => [{...explorer.dataset}, [...explorer.querySelectorAll('tbody tr[data-block]')].map(row => row.dataset.block),
  location.hash]"""
MODULES = ("GPT", "GPT.blocks.3", "GPT.blocks.3.mlp", "GPT.blocks.30")


def random_trace(num_events: int = 400) -> Trace:
    """Allocations, frees and accesses in random order, of blocks before and within the trace; few are live at once."""
    chance = random.Random(3)
    names = [{"id": number, "kind": "module", "text": text} for number, text in enumerate(MODULES)]
    names += [{"id": 10 + n, "kind": "operator", "text": text} for n, text in enumerate(("aten::mm", "aten::add"))]
    for n in range(4):
        names.append({"id": 20 + n, "kind": "frame", "text": f"/home/me/train.py\t{n + 1}\tmain"})
        names.append({"id": 30 + n, "kind": "stack", "text": "", "frames": [20 + n, 20]})
    events = [event("baseline", number, 0, chance.randrange(1, 9999)) for number in range(5)]
    ops, live = [], list(range(5))
    for row in range(len(events), num_events):
        time, call = 1000 * (row + 1), len(ops)
        if live and chance.random() < 0.03 * len(live):
            events.append(event("free", live.pop(chance.randrange(len(live))), time, op_id=chance.choice([None, call])))
        elif live and chance.random() < 0.2:
            events.append(event(chance.choice(["read", "write"]), chance.choice(live), time, op_id=call))
        else:
            block = sum(item["kind"] in ("alloc", "baseline") for item in events)
            address = 4096 * chance.randrange(1, 30)
            events.append(event("alloc", block, time, chance.randrange(1, 99_999), address=address, op_id=call))
            live.append(block)
        ops.append(op(call, chance.choice(PHASES), name=chance.choice([10, 11]), module=chance.choice([0, 1, 2, 3, None]),
                      stack=chance.choice([30, 31, 32, 33, None])))  # fmt: skip
    spans = [step(index, index * STEP_NS, STEP_NS) for index in range(NUM_STEPS)]
    return trace_of(events=events, ops=ops, names=names, spans=spans)


def live_after(trace: Trace, row: int) -> set[int]:
    table = blocks(trace)
    is_live = (table.alloc_event <= row) & ((table.free_event < 0) | (table.free_event > row))
    return set(np.flatnonzero(is_live).tolist())


def test_the_catalog_has_the_live_bytes_of_every_instant() -> None:
    trace = random_trace()
    catalog, levels = catalog_blocks(trace, "cpu", 10_000), requested_bytes(trace, "cpu")
    for row, level in zip(levels.rows.tolist(), levels.bytes.tolist(), strict=True):
        is_live = (catalog.begin_row <= row) & (catalog.end_row > row)
        assert int(catalog.size[is_live].sum()) == level
    assert len(catalog) == catalog.num_blocks


def test_a_bounded_catalog_keeps_the_largest_blocks_and_sums_up_the_others() -> None:
    trace = random_trace()
    catalog, table = catalog_blocks(trace, "cpu", 20), blocks(trace)
    assert len(catalog) == 20 and catalog.num_blocks == len(table)
    assert sorted(catalog.size.tolist()) == sorted(table.size.tolist())[-20:]
    assert (np.diff(catalog.begin_row) >= 0).all()
    rows = np.array([0, 7, 100, 399])
    left_out = sum_left_out(trace, "cpu", catalog, rows)
    for place, row in enumerate([-1, *rows.tolist()]):
        others = live_after(trace, row) - set(catalog.place.tolist())
        assert left_out.num_live[place] == len(others)
        assert left_out.live_bytes[place] == sum(int(table.size[block]) for block in others)
        allocated = set(np.flatnonzero((table.alloc_event >= 0) & (table.alloc_event <= row)).tolist())
        allocated -= set(catalog.place.tolist())
        assert left_out.num_allocated[place] == len(allocated)
        assert left_out.allocated_bytes[place] == sum(int(table.size[block]) for block in allocated)


def test_the_catalog_names_what_freed_a_block() -> None:
    names = [{"id": 1, "kind": "operator", "text": "aten::add"}, {"id": 2, "kind": "module", "text": "GPT.head"},
             {"id": 3, "kind": "operator", "text": "aten::record_stream"}]  # fmt: skip
    events = [event("alloc", 0, 10, 8, op_id=0), event("alloc", 1, 11, 8, op_id=0), event("alloc", 2, 12, 8, op_id=0),
              event("free", 0, 120, op_id=1), event("free_requested", 1, 121, op_id=2), event("free", 1, 130)]  # fmt: skip
    ops = [op(0, "forward", name=1), op(1, "backward", name=1, module=2), op(2, "optimizer", name=3)]
    trace = trace_of(events=events, ops=ops, names=names, spans=[step(0, 0, 100), step(1, 100, 100)])
    catalog = catalog_blocks(trace, "cpu", 10)
    assert [catalog.operators[index] for index in catalog.free_operator] == ["aten::add", "aten::record_stream", None]
    assert [catalog.modules[index] for index in catalog.free_module] == ["GPT.head", None, None]
    assert catalog.free_phase.tolist() == [PHASES.index("backward"), PHASES.index("optimizer"), -1]
    assert catalog.free_step.tolist() == [1, 1, -1]


def test_blocks_of_a_window_keep_the_ids_of_the_whole_trace() -> None:
    trace = random_trace()
    whole, window = (catalog_blocks(part, "cpu", 10_000) for part in (trace, trace.window(4, 6)))
    sizes = dict(zip(whole.block.tolist(), whole.size.tolist(), strict=True))
    assert 0 < len(window) < len(whole)
    assert {block: sizes[block] for block in window.block.tolist()} == dict(
        zip(window.block.tolist(), window.size.tolist(), strict=True)
    )


def test_kinds_are_the_distinct_rows_in_the_order_of_their_first_place() -> None:
    columns = {"a": np.array([3, 1, 3, 3, 1]), "b": np.array([0, 0, 1, 0, 0])}
    first, kind = find_kinds(columns)
    assert first.tolist() == [0, 1, 2]
    assert kind.tolist() == [0, 1, 2, 0, 1]


def test_the_payload_names_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrace.dashboards.explorer.MAX_BLOCKS", 7)
    assert encode_blocks(random_trace(), "cpu").note.startswith("The blocks are the 7 largest of ")
    assert build_payload(trace_of(events=[event("oom", None, 0, 5)]), "cpu") is None


def test_the_payload_has_fewer_blocks_and_accesses_where_they_do_not_fit() -> None:
    chance = np.random.default_rng(1)
    events = []
    for number in range(3000):
        size, address = (int(value) for value in chance.integers(1, 1 << 40, 2))
        events += [event("alloc", number, 10 * number, size, address=address), event("read", number, 10 * number + 1)]
    trace = trace_of(events=events)
    sizes = [
        sum(len(table.get("data", table.get("json"))) for table in encode_blocks(trace, "cpu", limit).packed.values())
        for limit in (10_000_000, 20_000)
    ]
    assert sizes[0] > 40_000 and 5_000 < sizes[1] < 20_000


@pytest.fixture(scope="module")
def open_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = report(random_trace(), tmp_path_factory.mktemp("explorer") / "page.html")
    with opened(browser, path) as page:
        draw_explorer(page)
        yield page


@pytest.fixture
def page(open_page: Any) -> Any:
    """The page of the random trace as it opens; all tests share it."""
    open_page.evaluate("location.hash = '#at='")
    return open_page


def draw_explorer(page: Any) -> None:
    page.locator(".explorer").scroll_into_view_if_needed()
    page.wait_for_selector(".explorer[data-drawn=true]")


def shown_blocks(page: Any) -> set[int]:
    """The blocks that the explorer lists, as it saves them."""
    page.evaluate(CATCH_FILES)
    page.get_by_role("button", name="Save as CSV").click()
    rows = list(csv.DictReader(page.evaluate("window.saved").splitlines()))
    assert sum(int(row["size_bytes"]) for row in rows) == int(page.locator(".explorer").get_attribute("data-bytes"))
    return {int(row["block"]) for row in rows}


@needs_chromium
def test_a_click_shows_the_live_blocks_of_the_analysis(page: Any) -> None:
    trace, chance, rows = random_trace(), random.Random(5), []
    table, explorer = blocks(trace), page.locator(".explorer")
    canvas = page.locator(".tracks canvas[aria-label=Memory]")
    canvas.scroll_into_view_if_needed()
    bounds = canvas.bounding_box()
    for _ in range(NUM_INSTANTS):
        page.mouse.click(bounds["x"] + chance.uniform(70, bounds["width"] - 20), bounds["y"] + bounds["height"] / 2)
        state, ids, fragment = explorer.evaluate(SHOWN)
        row, live = int(state["row"]), live_after(trace, int(state["row"]))
        assert f"at={row}" in fragment
        assert int(state["bytes"]) == int(table.size[list(live)].sum())
        assert int(state["count"]) == len(live) <= MAX_ROWS_IN_SIGHT
        assert {int(block) for block in ids} == live
        rows.append(row)
    assert len(set(rows)) > NUM_INSTANTS // 2
    page.go_back()
    page.wait_for_function(f"document.querySelector('.explorer').dataset.row !== '{rows[-1]}'")


@needs_chromium
def test_ranges_steps_and_modules_filter_every_widget(page: Any) -> None:
    table = blocks(random_trace())
    first, last = 100_000, 200_000
    begins, ends = table.alloc_ns // 1000 * 1000, np.where(table.free_ns >= 0, table.free_ns, np.iinfo(np.int64).max)
    in_range = (table.alloc_event >= 0) & (begins >= first) & (begins <= last)
    expected = {"range": in_range, "churn": in_range & (ends <= last), "kept": in_range & (ends > last)}
    for show, is_shown in expected.items():
        page.evaluate(f"location.hash = '#show={show}&from={first // 1000}&to={last // 1000}'")
        assert shown_blocks(page) == set(np.flatnonzero(is_shown).tolist()), show
    page.evaluate("location.hash = '#show=range&step=3'")
    assert shown_blocks(page) == set(np.flatnonzero(table.step == 3).tolist())
    trace = random_trace()
    catalog = catalog_blocks(trace, "cpu", 10_000)
    modules = [catalog.modules[index] or "" for index in catalog.module]
    for module in ("GPT.blocks.3", "GPT"):
        page.evaluate(f"location.hash = '#show=range&module={module}'")
        inside = {
            int(block)
            for block, name, row in zip(catalog.block, modules, catalog.begin_row, strict=True)
            if row >= 0 and (name == module or name.startswith(f"{module}."))
        }
        assert shown_blocks(page) == inside
        assert page.locator(".chip", has_text=f"in module {module}").count() == 1
    page.get_by_role("button", name="Remove the filter GPT").click()
    assert "module=" not in page.url


@needs_chromium
def test_the_flame_graph_zooms_and_the_back_button_returns(page: Any) -> None:
    page.evaluate("location.hash = '#show=range&group=stack&frames=all&graph=flame'")
    explorer = page.locator(".explorer")
    canvas = explorer.locator("canvas")
    canvas.focus()
    for key in ("ArrowUp", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    assert "zoom=" in page.url
    assert explorer.locator(".crumbs button").all_inner_texts()[0] == "all"
    assert "me/train.py:1 main" in explorer.locator(".crumbs").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert "zoom=" not in page.url
    page.go_back()
    page.wait_for_function("location.hash.includes('zoom=')")
    explorer.get_by_role("searchbox", name="Highlight").fill("train.py:2 ")
    assert " % of the bytes." in explorer.locator(".tip").inner_text()


@needs_chromium
def test_the_explorer_works_with_the_keyboard_alone(page: Any) -> None:
    explorer = page.locator(".explorer")
    explorer.get_by_role("button", name="allocated", exact=True).focus()
    page.keyboard.press("Enter")
    assert explorer.locator("th.col-time").get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert explorer.locator("th.col-time").get_attribute("aria-sort") == "ascending"
    assert explorer.locator("th.col-size").get_attribute("aria-sort") == "none"
    explorer.locator("tbody tr[tabindex='0']").focus()
    for key in ("ArrowDown", "End", "Home", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    chosen = explorer.locator("tr.chosen")
    assert chosen.get_attribute("aria-rowindex") == "3"
    assert f"block={chosen.get_attribute('data-block')}" in page.url
    assert explorer.locator(".detail h3").inner_text().startswith("Block ")
    explorer.get_by_role("button", name="Close the block").click()
    assert explorer.locator(".detail").is_hidden()


@needs_chromium
def test_a_search_that_cannot_be_read_is_reported(page: Any) -> None:
    page.get_by_role("searchbox", name="Search blocks").fill("size:>large")
    assert page.get_by_role("status").filter(has_text="size needs bytes such as >1MiB").is_visible()
    page.get_by_role("searchbox", name="Search blocks").fill("no such block")
    assert page.get_by_text("No block matches.").is_visible()
    assert page.locator(".explorer .headline").inner_text().endswith("0 B in 0 blocks that match the filters.")


@needs_chromium
def test_the_sums_of_blocks_that_the_page_leaves_out_complete_the_totals(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memtrace.dashboards.explorer.MAX_BLOCKS", 40)
    trace = random_trace()
    table, peak = blocks(trace), find_peak(trace, "cpu").requested
    path = report(trace, tmp_path / "page.html")
    with opened(browser, path) as page:
        draw_explorer(page)
        explorer = page.locator(".explorer")
        catalog = catalog_blocks(trace, "cpu", 40)
        left_out = live_after(trace, peak.event) - set(catalog.place.tolist())
        rest = f"{format_bytes(int(table.size[list(left_out)].sum()))} in {len(left_out)} smaller block"
        assert f" and {rest}" in explorer.locator(".headline").inner_text()
        explorer.locator("canvas").hover(position={"x": 5, "y": 5})
        assert f"{format_bytes(peak.bytes)} in {len(live_after(trace, peak.event))} blocks, 100 %" in (
            explorer.locator(".tooltip").inner_text()
        )


@needs_chromium
def test_the_explorer_shows_hostile_names_as_text(browser: Any, tmp_path: Path) -> None:
    trace = hostile_trace()
    path = report(trace, tmp_path / "page.html")
    with opened(browser, path) as page:
        draw_explorer(page)
        explorer = page.locator(".explorer")
        assert explorer.get_attribute("data-bytes") == str(find_peak(trace, "cpu").requested.bytes)
        at_peak = int(explorer.get_attribute("data-count"))
        explorer.locator("tbody tr[data-place]").first.click()
        detail = explorer.locator(".detail")
        assert HOSTILE.splitlines()[0][:40] in detail.inner_text()
        search = explorer.get_by_role("searchbox", name="Search blocks")
        search.fill("parameters")
        assert explorer.get_attribute("data-count") == "1"
        search.fill("")
        detail.get_by_role("button", name="Show only blocks with this operator").click()
        assert explorer.get_attribute("data-count") == str(at_peak), "all blocks have the same hostile operator"
        assert HOSTILE[:20] in explorer.locator(".chip").inner_text()
        explorer.get_by_label("Color").select_option("site")
        explorer.get_by_label("Group by").select_option("callee")
        assert page.evaluate("window.hacked") is None
        assert page.locator(".explorer :is(script, img, b)").count() == 0
