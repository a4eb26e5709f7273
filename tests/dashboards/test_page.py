"""The page: offline, bounded in size, safe against hostile names, and working in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memtrace.dashboards.contents import DEVICE_SECTIONS
from memtrace.dashboards.delta_encoding import encode_columns
from memtrace.dashboards.page import render, report
from memtrace.dashboards.pipeline import PREDICTION_SECTIONS, SECTIONS

from memtrace.analysis.block_lifetimes import close_address_gaps
from memtrace.planning.verdict import find_verdict
from memtrace.trace import Trace
from memtrace.units import format_bytes
from tests.builders import event, op, step, trace_of
from tests.dashboards.browser import draw_everything, needs_chromium, opened

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028'\"`<b>x</b>"
# The section is below the sticky header: its top is where the browser's scroll-padding puts it, or the page ends there.
IS_AT_THE_TOP = """anchor => {
  const top = document.getElementById(anchor).getBoundingClientRect().top;
  const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
  return (top >= 0 && top < 120) || (atEnd && top >= 0 && top < innerHeight);
}"""
TEMPLATES = Path(__file__).parents[2] / "dashboards" / "templates"


def hostile_trace(num_blocks: int = 60) -> Trace:
    """A trace whose names are all ``HOSTILE``."""
    names = [
        {"id": 0, "kind": "operator", "text": HOSTILE},
        {"id": 1, "kind": "module", "text": f"A.{HOSTILE}"},
        {"id": 2, "kind": "frame", "text": f"/x/{HOSTILE}.py\t3\t{HOSTILE}"},
        {"id": 3, "kind": "stack", "frames": [2]},
        {"id": 4, "kind": "tensor", "text": f"{HOSTILE}.weight"},
    ]
    events = []
    for number in range(num_blocks):
        events.append(
            event("alloc", number, 10_000 * number, 1000 + number, address=4096 * (1 + number % 7), op_id=number)
        )
        if number % 3:
            events.append(event("free", number, 10_000 * number + 9000, 1000 + number))
    ops = [op(number, "forward", name=0, module=1, stack=3) for number in range(num_blocks)]
    labels = [{"block_id": 0, "category": "parameter", "name": 4}]
    return trace_of(
        events=events, ops=ops, names=names, labels=labels, spans=[step(n, n * 100_000, 100_000) for n in range(6)]
    )


@pytest.fixture(scope="module")
def page() -> str:
    return render(hostile_trace())


def test_the_page_fetches_nothing_and_contains_no_markup_of_a_trace(page: str) -> None:
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "<script>window.hacked" not in page
    assert "<img src=x" not in page
    assert "default-src &#39;none&#39;" in page


def test_the_page_leaves_out_sections_without_content(page: str) -> None:
    assert "Peak memory by category" in page
    assert "Reserved but unused" not in page and "Out-of-memory errors" not in page


def test_the_page_begins_with_the_verdict_of_the_summary(page: str) -> None:
    sentences = find_verdict(hostile_trace(), "cpu").sentences
    assert sentences[0].startswith("Peak 21.1 KiB at 590 µs (step 5, forward); blocks of unknown category hold 95 %")
    assert f'<p class="verdict">{sentences[0]}' in page


def test_the_page_explains_every_category_and_term(page: str) -> None:
    glossary = page[page.index('id="glossary-title"') :]
    assert all(f">{term}</dt>" in glossary for term in ("segment", "allocation site", "optimizer state", "workspaces"))


def test_sections_have_unique_anchors_and_explanations_in_sentences() -> None:
    sections = [*DEVICE_SECTIONS, *SECTIONS, *PREDICTION_SECTIONS]
    assert len({section.anchor for section in sections}) == len(sections)
    for section in sections:
        assert section.title[0].isupper() and section.title[-1] not in ".?"
        assert section.explanation[0].isupper() and section.explanation.endswith(".")


def test_the_size_of_the_page_is_bounded_and_the_file_is_replaced_whole(tmp_path: Path) -> None:
    small, large = (report(hostile_trace(count), tmp_path / f"{count}.html").stat().st_size for count in (60, 20_000))
    assert large - small < 4_000_000
    assert not list(tmp_path.glob(".*"))


def test_columns_of_different_lengths_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="column 'b' has 1 values and the first column 2"):
        encode_columns({"a": np.array([1, 2]), "b": np.array([1])})


def test_closing_address_gaps_keeps_order_sizes_and_overlaps() -> None:
    address, size = np.array([10_000, 100, 120, 50_000]), np.array([10, 50, 10, 5])
    assert close_address_gaps(address, size).tolist() == [50, 0, 20, 60]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is missing")
def test_the_page_formats_bytes_as_the_terminal_does() -> None:
    sizes = [0, 1, 999, 1023, 1024, 1536, 10_234, 102_348, (1 << 20) - 1, 12_999_999, 123 << 20, (1 << 30) - 1,
             1022 << 30, (1 << 40) - 60 * (1 << 20), 5 << 60]  # fmt: skip
    script = (TEMPLATES / "format.js").read_text() + f"\nconsole.log(JSON.stringify({sizes}.map(formatBytes)))"
    result = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [format_bytes(size) for size in sizes]


@needs_chromium
def test_the_page_draws_offline_and_runs_no_script_of_a_trace(browser: Any, tmp_path: Path) -> None:
    with opened(browser, report(hostile_trace(), tmp_path / "page.html")) as page:
        draw_everything(page)
        page.click("button[aria-controls]")
        page.click("#theme")
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.querySelectorAll('.figure .main-svg').length") >= 4


@needs_chromium
@pytest.mark.parametrize("anchor", ["steps", "growth"])
def test_a_link_to_a_section_lands_there_before_and_after_figures_are_drawn(
    browser: Any, tmp_path: Path, anchor: str
) -> None:
    with opened(browser, report(hostile_trace(), tmp_path / "page.html")) as page:
        for drawn_before in (False, True):
            page.get_by_role("link", name=page.inner_text(f"#{anchor} h2"), exact=True).click()
            page.wait_for_function(f"() => document.querySelector('#{anchor} .figure')?.dataset.drawn === 'true'")
            page.wait_for_function(IS_AT_THE_TOP, arg=anchor)
            assert page.url.endswith(f"section={anchor}")
            draw_everything(page)
            page.evaluate("scrollTo(0, 0)")
            if not drawn_before:
                page.go_back()


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_nothing_is_wider_than_the_window(browser: Any, tmp_path: Path, width: int) -> None:
    with opened(browser, report(hostile_trace(), tmp_path / "page.html"), width=width) as page:
        draw_everything(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_no_accessibility_violation(browser: Any, tmp_path: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, report(hostile_trace(), tmp_path / "page.html"), color_scheme=scheme) as page:
        draw_everything(page)
        result = Axe().run(page)
        assert result.violations_count == 0, result.generate_report()


@needs_chromium
def test_printing_finds_every_figure_drawn_in_the_light_theme(browser: Any, tmp_path: Path) -> None:
    with opened(browser, report(hostile_trace(), tmp_path / "page.html"), color_scheme="dark") as page:
        page.wait_for_function("() => [...document.querySelectorAll('.figure, .widget')].every(e => e.dataset.drawn)")
        assert page.evaluate("scrollY < document.documentElement.scrollHeight / 2"), (
            "nobody scrolled to the last figure"
        )
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
