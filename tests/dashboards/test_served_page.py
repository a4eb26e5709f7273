"""The served page in a browser: finer data where it is zoomed in, and a recording that is being written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from memtrace.dashboards.server import pages, payloads
from memtrace.dashboards.server.served import ServedTrace

from memtrace.analysis import indexed_trace
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import live_after
from memtrace.trace import load
from tests.dashboards.browser import TIMEOUT_MS, needs_chromium
from tests.dashboards.serving import served_in_thread
from tests.format.random_traces import RandomTrace, on_disk

ROOT = Path(__file__).parents[2]

pytestmark = needs_chromium


@contextmanager
def opened_at(browser: Any, address: str) -> Iterator[Any]:
    """A page of a server, in which no script fails and which requests nothing from elsewhere."""
    errors: list[str] = []
    requests: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    yield page
    base = address.partition("?")[0]
    context.close()
    assert not errors
    assert [url for url in requests if not url.startswith((base, "blob:"))] == []


def test_zooming_in_loads_the_blocks_of_the_range(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pages, "MAX_REPORT_EVENTS", 10)
    monkeypatch.setattr(indexed_trace, "MAX_EXACT_EVENTS", 150)
    monkeypatch.setattr(payloads, "MAX_BLOCKS", 5)
    rows = RandomTrace(7, num_steps=40).rows
    for row in (*rows["events"], *rows["ops"]):  # in µs, as the page shows them
        for name in ("time_ns", "start_ns", "duration_ns"):
            if row.get(name) is not None:
                row[name] *= 1000
    for row in rows["events"]:
        if row["kind"] == "baseline":
            row["kind"] = "alloc"  # a window does not know of older blocks that are first seen after it
    for row in rows["spans"]:
        row["start_ns"], row["duration_ns"] = 1000 * row["start_ns"], 1000 * row["duration_ns"]
    trace = on_disk(rows, tmp_path / "run.memtrace", list(range(0, len(rows["events"]), 60)))
    time_ns = trace.columns("events", "time_ns")["time_ns"]
    with (
        served_in_thread(ServedTrace([str(tmp_path / "run.memtrace")])) as address,
        opened_at(browser, address) as page,
    ):
        tracks = page.locator(".view:not([hidden]) .widget.tracks")
        tracks.locator("canvas").first.wait_for()
        assert tracks.get_attribute("data-exact") == "false"
        at = len(time_ns) // 2
        from_us = int(time_ns[at]) // 1000
        page.evaluate(
            """([from, to, at]) => { history.pushState(null, "", `#from=${from}&to=${to}&at=${at}`);
            dispatchEvent(new PopStateEvent("popstate")); }""",
            [from_us, from_us + 20, at],
        )
        page.wait_for_function(
            "() => document.querySelector('.view:not([hidden]) .widget.tracks').dataset.exact === 'true'"
        )
        device = "cuda:0" if "cuda" in page.locator(".view:not([hidden])").get_attribute("data-view") else "cpu"
        table = blocks(trace)
        live = live_after(table, trace.devices.index(device), at)
        live = live[table.size[live] > 0]
        page.wait_for_function(
            "bytes => document.querySelector('.view:not([hidden]) .widget.explorer [data-bytes]')?.dataset.bytes === bytes",
            arg=str(int(table.size[live].sum())),
        )
        explorer = page.locator(".view:not([hidden]) .widget.explorer [data-bytes]").first
        assert explorer.get_attribute("data-count") == str(len(live))
        assert f"event {at:,}" in page.locator(".view:not([hidden]) .explorer .headline").text_content()


RECORDING = """
import sys, torch, memtrace
from memtrace.recording import live_status
live_status.STATUS_SECONDS = 0.05
with memtrace.record(sys.argv[1], flush_seconds=0.2) as recording:
    print(recording.serve(capacity_bytes=1 << 40), flush=True)
    kept = []
    while not sys.stdin.read(0) and len(kept) < 100_000:
        kept.append(torch.zeros(1000))
        recording.step()
        if len(kept) % 20 == 0 and sys.stdin.readline().strip() == "stop":
            break
"""


def test_the_page_of_a_running_recording_updates_itself(browser: Any, tmp_path: Path) -> None:
    trace = tmp_path / "run.memtrace"
    process = subprocess.Popen(
        [sys.executable, "-c", RECORDING, str(trace)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()

        def train(line: str) -> None:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

        train("go")
        with opened_at(browser, address) as page:
            page.locator("#served-status[data-state=running]").wait_for()
            for _ in range(3):
                before = page.locator("#served-status").text_content()
                train("go")
                page.wait_for_function(
                    "text => document.getElementById('served-status').textContent !== text", arg=before
                )
            assert "per step" in page.locator("#served-status").text_content()
            page.locator(".view:not([hidden]) .widget.tracks canvas").first.wait_for()
            page.locator("#served-status").get_by_text("1.00 TiB").wait_for()
    finally:
        process.communicate("stop\n")
    assert load(trace).manifest.finished
