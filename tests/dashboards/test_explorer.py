"""The explorer of the page: the blocks that it shows are those of the analysis, at every instant."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memtrace.dashboards.explorer import encode_blocks
from memtrace.dashboards.page import report
from memtrace.dashboards.payload import build_payload

from memtrace.analysis.block_catalog import catalog_blocks
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, requested_bytes
from memtrace.trace import Trace
from tests.builders import event, trace_of
from tests.dashboards.browser import draw_everything, needs_chromium, opened
from tests.dashboards.test_page import HOSTILE, hostile_trace

NUM_INSTANTS = 50
SHOWN_BLOCKS = "[...document.querySelectorAll('.explorer tbody tr')].map(row => row.dataset.block)"


def random_trace(num_events: int = 400) -> Trace:
    """Allocations and frees in random order, of blocks before and within the trace."""
    chance = random.Random(3)
    events = [event("baseline", number, 0, chance.randrange(1, 9999)) for number in range(5)]
    live = list(range(5))
    for row in range(num_events):
        if live and chance.random() < 0.45:
            events.append(event("free", live.pop(chance.randrange(len(live))), 1000 * (row + 1)))
        else:
            block = sum(item["kind"] != "free" for item in events)
            events.append(event("alloc", block, 1000 * (row + 1), chance.randrange(1, 99_999)))
            live.append(block)
    return trace_of(events=events)


def test_the_catalog_has_the_live_bytes_of_every_instant() -> None:
    trace = random_trace()
    catalog, levels = catalog_blocks(trace, "cpu", 10_000), requested_bytes(trace, "cpu")
    for row, level in zip(levels.rows.tolist(), levels.bytes.tolist(), strict=True):
        is_live = (catalog.begin_row <= row) & (catalog.end_row > row)
        assert int(catalog.size[is_live].sum()) == level
    assert len(catalog) == catalog.num_blocks


def test_a_bounded_catalog_keeps_the_largest_blocks_in_the_order_of_their_allocation() -> None:
    trace = random_trace()
    catalog = catalog_blocks(trace, "cpu", 20)
    assert len(catalog) == 20 and catalog.num_blocks == len(blocks(trace))
    assert sorted(catalog.size.tolist()) == sorted(blocks(trace).size.tolist())[-20:]
    assert (np.diff(catalog.begin_row) >= 0).all()


def test_the_section_names_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrace.dashboards.explorer.MAX_BLOCKS", 7)
    assert encode_blocks(random_trace(), "cpu").note.startswith("The blocks are the 7 largest of ")
    assert build_payload(trace_of(events=[event("oom", None, 0, 5)]), "cpu") is None


@needs_chromium
def test_the_browser_shows_the_live_blocks_of_random_instants(browser: Any, tmp_path: Path) -> None:
    trace = random_trace()
    path, levels = report(trace, tmp_path / "page.html"), requested_bytes(trace, "cpu")
    chance = random.Random(5)
    with opened(browser, path) as page:
        draw_everything(page)
        for place in chance.sample(range(len(levels.rows)), NUM_INSTANTS):
            row = int(levels.rows[place])
            page.evaluate(f"location.hash = '#at={row}'")
            page.wait_for_function(
                f"document.querySelector('.explorer').dataset.bytes === '{levels.bytes[place]}'", timeout=20_000
            )
            shown = {int(block) for block in page.evaluate(SHOWN_BLOCKS)}
            table = blocks(trace)
            is_live = (table.alloc_event <= row) & ((table.free_event < 0) | (table.free_event > row))
            assert shown <= set(np.flatnonzero(is_live).tolist())
            assert len(shown) == min(100, int(is_live.sum()))
        page.go_back()
        page.wait_for_function(
            f"document.querySelector('.explorer').dataset.bytes !== '{levels.bytes[place]}'", timeout=20_000
        )


@needs_chromium
def test_the_explorer_searches_zooms_sorts_and_shows_hostile_names_as_text(browser: Any, tmp_path: Path) -> None:
    trace = hostile_trace()
    path = report(trace, tmp_path / "page.html")
    with opened(browser, path) as page:
        draw_everything(page)
        explorer = page.locator(".explorer")
        assert explorer.get_attribute("data-bytes") == str(find_peak(trace, "cpu").requested.bytes)
        at_peak = int(explorer.get_attribute("data-count") or 0)
        explorer.locator("tbody tr").first.click()
        assert HOSTILE.splitlines()[0][:40] in explorer.locator(".detail").inner_text()
        explorer.get_by_role("searchbox").fill("parameters")
        assert explorer.get_attribute("data-count") == "1"
        explorer.get_by_role("searchbox").fill("no such thing")
        assert explorer.get_attribute("data-count") == "0"
        explorer.get_by_role("searchbox").fill("")
        explorer.locator("select").nth(1).select_option("category")
        explorer.locator("canvas").click(position={"x": 20, "y": 30})
        zoomed = int(explorer.get_attribute("data-count") or 0)
        assert 0 < zoomed < at_peak
        explorer.get_by_role("button", name="all", exact=True).click()
        assert explorer.get_attribute("data-count") == str(at_peak)
        explorer.get_by_role("button", name="size", exact=True).click()
        assert explorer.locator("th").first.get_attribute("aria-sort") == "ascending"
        explorer.get_by_role("button", name="event ▶").click()
        assert f"at={find_peak(trace, 'cpu').requested.event + 1}" in page.url
        explorer.locator("select").first.select_option("range")
        assert explorer.get_attribute("data-count") == str(len(blocks(trace)))
        assert page.evaluate("window.hacked") is None
