"""The overview of the ranks of a job: figures, links to the views of ranks, and commands for the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memtrace.dashboards.page import MAX_VIEWS, render, report
from memtrace.dashboards.ranks import (
    MAX_ROWS,
    categories_figure,
    devices_figure,
    ranks_table,
    sections,
    step_peaks_figure,
)
from memtrace.dashboards.sections import Link

from memtrace.analysis.rank_overview import survey_ranks
from memtrace.trace import Trace, load
from tests.analysis.test_compare import job, sized_trace
from tests.builders import copied_job, event, trace_of
from tests.dashboards.browser import needs_chromium, opened


@pytest.fixture(scope="module")
def many_ranks() -> Trace:
    """A job of 30 ranks with four steps each; rank 21 has twice the memory of the others."""
    return job({rank: sized_trace([1000, 2000 * (1 + (rank == 21)), 1500, 1500]) for rank in range(30)})


def test_the_heat_maps_show_the_bytes_of_every_rank(many_ranks: Trace) -> None:
    by_category, by_step = categories_figure(many_ranks), step_peaks_figure(many_ranks)
    assert by_category is not None and by_step is not None
    (cells,) = by_category.data
    assert list(cells.y) == ["peak memory", "temporaries"]
    assert np.array(cells.z)[0].tolist() == [100 if rank == 21 else 50 for rank in range(30)]
    assert cells.text[0][21] == "3.91 KiB"
    (cells,) = by_step.data
    assert list(cells.y) == [f"rank {rank}" for rank in range(30)]
    peaks = np.array(cells.z) * 1024
    assert peaks[0] == pytest.approx([1000, 2000, 1500, 1500], rel=1e-6)
    assert peaks[21] == pytest.approx([1000, 4000, 1500, 1500], rel=1e-6)


def test_the_rank_that_stands_out_comes_first_and_links_to_its_view(many_ranks: Trace) -> None:
    table = ranks_table(many_ranks, shown={(21, "cpu")})
    assert table is not None
    first, second = table.rows[:2]
    assert first.cells[0] == Link("21", "view=21-cpu")
    assert "inspect first" in str(first.cells[5])
    assert second.cells[0] == Link("0")
    assert second.cells[6] == "memtrace report TRACE... --rank 0"
    assert "18 more ranks not listed" in table.note


def test_a_single_rank_has_no_overview() -> None:
    trace = sized_trace([1, 2])
    assert all(section.build(trace) is None for section in sections(set()) if callable(section.build))


def test_devices_are_shown_where_a_rank_has_several() -> None:
    pair = trace_of(events=[event("alloc", 0, 1, 7, device="cuda:0"), event("alloc", 1, 2, 5)])
    alone = trace_of(events=[event("alloc", 0, 1, 9, device="cuda:0")])
    figure = devices_figure(job({0: pair, 1: alone}))
    assert figure is not None
    (cells,) = figure.data
    assert list(cells.y) == ["cuda:0", "cpu"]
    assert np.array(cells.z, np.float64)[0].tolist() == [7, 9]
    assert np.array(cells.z, np.float64)[1][0] == 5 and np.isnan(np.array(cells.z, np.float64)[1][1])
    assert devices_figure(job({0: alone, 1: alone})) is None


def test_the_page_of_a_job_begins_with_the_overview_and_names_what_it_leaves_out(many_ranks: Trace) -> None:
    page = render(many_ranks)
    overview = page.index("Peak memory by rank and category")
    assert page.index("Verdict: rank 21, cpu") < overview < page.index('class="view"')
    views = re.findall(r'class="view" id="[^"]*" data-view="([^"]+)"', page)
    assert len(views) == MAX_VIEWS and views[0] == "21-cpu"
    assert '<a href="#view=21-cpu">21</a>' in page
    assert "--rank 7" in page
    assert f"This page leaves out {30 - MAX_VIEWS} more ranks or devices." in page


@needs_chromium
def test_a_link_of_the_overview_opens_the_view_of_a_rank(browser: Any, tmp_path: Path, gpt_trace: Path) -> None:
    trace = load(copied_job(gpt_trace, tmp_path / "job.memtrace", 6))
    assert survey_ranks(trace).comparison.outliers == ()
    with opened(browser, report(trace, tmp_path / "page.html")) as page:
        assert page.locator(".view:not([hidden])").get_attribute("data-view") == "0-cpu"
        page.click("#ranks td a >> text=3")
        page.wait_for_function("() => document.querySelector('.view:not([hidden])').dataset.view === '3-cpu'")
        assert page.locator("#ranks tbody tr").count() == 6
        assert page.locator("#ranks").inner_text().count("memtrace report job.memtrace --rank") == 2


def test_the_table_is_bounded() -> None:
    trace = job({rank: sized_trace([1000 * (1 + rank // 60)]) for rank in range(100)})
    table = ranks_table(trace, shown=set())
    assert table is not None
    assert len(table.rows) == MAX_ROWS
    assert len(survey_ranks(trace).comparison.outliers) > MAX_ROWS
