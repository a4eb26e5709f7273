"""The page: offline, bounded, safe with hostile names, and alive in a browser."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from memtrace.dashboards.delta_encoding import pack
from memtrace.dashboards.lifetimes import packed_addresses
from memtrace.dashboards.page import render, report

from tests.builders import event, op, step, trace_of

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028'\"`<b>x</b>"
CHROMIUM = next((found for name in ("chromium-headless-shell", "chromium") if (found := shutil.which(name))), None)


def hostile_trace(blocks: int = 60):
    frames = [
        {"id": 0, "kind": "operator", "text": HOSTILE},
        {"id": 1, "kind": "module", "text": f"A.{HOSTILE}"},
        {"id": 2, "kind": "frame", "text": f"/x/{HOSTILE}.py\t3\t{HOSTILE}"},
        {"id": 3, "kind": "stack", "frames": [2]},
        {"id": 4, "kind": "tensor", "text": f"{HOSTILE}.weight"},
    ]
    events = []
    for number in range(blocks):
        events.append(event("alloc", number, 10 * number, 1000 + number, address=4096 * (1 + number % 7), op_id=number))
        if number % 3:
            events.append(event("free", number, 10 * number + 9, 1000 + number))
    ops = [op(number, "forward", name=0, module=1, stack=3) for number in range(blocks)]
    return trace_of(events=events, ops=ops, names=frames, labels=[{"block_id": 0, "category": "parameter", "name": 4}],
                    spans=[step(n, n * 100, 100) for n in range(6)])  # fmt: skip


def test_the_page_loads_nothing_and_carries_no_markup_of_a_trace():
    page = render(hostile_trace())
    own = page[: page.index("plotly.js v")] + page[page.rindex("themes") :]
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", own)
    assert "<script>window.hacked" not in page
    assert "<img src=x" not in page
    assert "default-src &#39;none&#39;" in page


def test_the_page_leaves_out_what_there_is_nothing_of():
    page = render(hostile_trace())
    assert "Largest blocks at the peak" in page
    assert "Reserved without use" not in page and "Out of memory" not in page


def test_the_page_is_bounded_and_written_whole(tmp_path):
    small, large = (report(hostile_trace(count), tmp_path / f"{count}.html").stat().st_size for count in (60, 20_000))
    assert large - small < 4_000_000
    assert not list(tmp_path.glob(".*"))


def test_packed_columns_are_undone_by_running_sums():
    import base64
    import zlib

    values = {"a": np.array([5, 3, 2**40, -7]), "b": np.array([0, 0, 1, 1])}
    packed = pack(values)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.uint8).astype(object)
    start = 0
    for name, width in packed["columns"]:
        coded = sum(planes[start + 4 * plane : start + 4 * plane + 4] * 256**plane for plane in range(width))
        start += 4 * width
        assert np.cumsum([c // 2 if c % 2 == 0 else -(c + 1) // 2 for c in coded]).tolist() == values[name].tolist()


def test_packed_addresses_keep_order_sizes_and_overlaps():
    address, size = np.array([10_000, 100, 120, 50_000]), np.array([10, 50, 10, 5])
    packed, height = packed_addresses(address, size)
    assert packed.tolist() == [50, 0, 20, 60]
    assert height == 65


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium-headless-shell")
def test_the_page_draws_offline_and_runs_no_script_of_a_trace(tmp_path):
    from playwright.sync_api import sync_playwright

    page_path = report(hostile_trace(), tmp_path / "page.html")
    asked, errors = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-sync",
                "--no-first-run",
            ],
        )
        page = browser.new_context(offline=True).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(page_path.as_uri())
        for figure in page.query_selector_all(".figure"):
            figure.scroll_into_view_if_needed()
            page.wait_for_function("element => element.dataset.drawn === 'true'", arg=figure, timeout=20_000)
        page.click("button[aria-controls]")
        page.click("#theme")
        page.click("text=Step of the peak")
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.querySelectorAll('.figure .main-svg').length") >= 4
        browser.close()
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
