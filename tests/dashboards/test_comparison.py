"""The page that compares runs: its figures show what the analysis found, for any number of runs with any names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from memtrace.cli import cli
from memtrace.dashboards.compared_runs import ComparedRuns
from memtrace.dashboards.comparison import SECTIONS, write_comparison
from memtrace.dashboards.run_curves import memory_by_step_figure, memory_by_time_figure
from memtrace.dashboards.run_differences import differences_figure, differences_table
from memtrace.dashboards.run_distributions import breakdown_figure, interval_cdf_figure, swap_figure

from memtrace.analysis.compare import compare_runs, match_runs
from memtrace.trace import Trace, load
from memtrace.units import choose_byte_unit
from tests.builders import event, op, step, trace_of
from tests.dashboards.browser import draw_everything, needs_chromium, opened
from tests.dashboards.test_page import HOSTILE, hostile_trace


def small_run(sizes: list[int], *, name: str = "module") -> Trace:
    """A trace with one step of 100 ns for each size, in which one block of that size is live."""
    events, spans = [], []
    for number, size in enumerate(sizes):
        events += [
            event("alloc", number, 100 * number + 10, size, op_id=number),
            event("free", number, 100 * number + 60, size),
        ]
        spans.append(step(number, 100 * number, 100))
    names = [{"id": 0, "kind": "module", "text": name}]
    return trace_of(
        events=events, ops=[op(n, "forward", module=0) for n in range(len(sizes))], names=names, spans=spans
    )


def compared(traces: list[Trace], labels: list[str]) -> ComparedRuns:
    runs = match_runs(traces, labels)
    return ComparedRuns(runs, compare_runs(runs))


def test_the_breakdown_shows_the_bytes_of_every_category_and_run(gpt_trace: Path) -> None:
    runs = compared([load(gpt_trace), small_run([5, 700])], ["gpt", "small"])
    divisor, _ = choose_byte_unit(max(run.peak_bytes for run in runs.comparison.runs))
    drawn = breakdown_figure(runs).data
    for place, run in enumerate(runs.comparison.runs):
        sizes = [bar.y[place] * divisor for bar in drawn if bar.xaxis == "x"]
        assert sum(sizes) == pytest.approx(run.peak_bytes)
        assert sum(bar.y[place] for bar in drawn if bar.xaxis == "x2") == pytest.approx(100)


def test_curves_of_a_step_lie_at_the_same_place(gpt_trace: Path) -> None:
    runs = compared([small_run([10, 20, 30]), small_run([3, 2, 1, 7])], ["a", "b"])
    by_step, by_time = memory_by_step_figure(runs), memory_by_time_figure(runs)
    assert by_step is not None and by_time is not None
    for figure in (by_step, by_time):
        assert [curve.name for curve in figure.data] == ["a", "b"]
        assert [max(curve.y) for curve in figure.data] == [30, 7]
    peaks = [curve.x[int(np.argmax(curve.y))] for curve in by_step.data]
    assert [int(position) for position in peaks] == [2, 3]


def test_bars_of_differences_are_signed_and_sorted() -> None:
    runs = compared([small_run([500]), small_run([200], name="other")], ["before", "after"])
    figure = differences_figure(runs, "module")
    assert figure is not None
    (bars,) = figure.data
    assert dict(zip(bars.y, bars.x, strict=True)) == {"module": -500, "other": 200}
    assert list(np.abs(bars.x)) == sorted(np.abs(bars.x), reverse=True)
    table = differences_table(runs)
    assert table is not None
    kinds = {row.cells[1]: row.cells[2] for row in table.rows if row.cells[0] == "module"}
    assert kinds == {"module": "gone", "other": "new"}


def test_more_than_two_runs_are_a_heat_map_against_the_first() -> None:
    figure = differences_figure(compared([small_run([500]), small_run([200]), small_run([900])], list("abc")), "module")
    assert figure is not None
    (cells,) = figure.data
    assert np.array(cells.z).tolist() == [[0, -300, 400]]
    assert list(cells.x) == ["a", "b", "c"]


def test_runs_without_accesses_have_no_distributions() -> None:
    runs = compared([small_run([1]), small_run([2])], ["a", "b"])
    assert interval_cdf_figure(runs) is None
    assert swap_figure(runs) is None


def test_the_page_of_many_runs_is_bounded_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    runs = [small_run([100 + number] * 40, name=f"module{number}") for number in range(210)]
    matched = match_runs(runs, [f"run {number}" for number in range(210)])
    page = write_comparison(matched, tmp_path / "many.html")
    assert page.stat().st_size < 12e6
    text = page.read_text()
    assert "10 more runs are not listed." in text
    assert "182 more runs are not drawn." in text
    assert "run 0, run 1, run 2 and 207 more" in text


def test_anchors_are_unique_and_explanations_are_sentences() -> None:
    assert len({section.anchor for section in SECTIONS}) == len(SECTIONS)
    for section in SECTIONS:
        assert section.title[0].isupper() and section.title[-1] not in ".?"
        assert section.explanation[0].isupper() and section.explanation.endswith(".")


@needs_chromium
def test_the_page_fits_a_phone_and_runs_no_script_of_a_trace(browser: Any, tmp_path: Path, gpt_trace: Path) -> None:
    runs = match_runs([hostile_trace(), load(gpt_trace)], [HOSTILE, f"b{HOSTILE}"])
    path = write_comparison(runs, tmp_path / "page.html")
    with opened(browser, path, width=390) as page:
        draw_everything(page)
        page.click("#theme")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.querySelectorAll('.figure .main-svg').length") >= 10


def test_the_commands_write_the_page(tmp_path: Path, gpt_trace: Path) -> None:
    for command in ("compare", "diff"):
        page = tmp_path / f"{command}.html"
        result = CliRunner().invoke(cli, [command, str(gpt_trace), str(gpt_trace), "-o", str(page)])
        assert result.exit_code == 0, result.output
        assert "Differences at the peak" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{trace}"], "Give at least two traces"),
        (["{trace}", "{trace}", "--label", "a"], "Give --label once for each of the 2 traces; 1 were given."),
        (["{trace}", "{trace}", "-o", "{trace}/none/x.html"], "does not exist. Create it"),
        (["{trace}", "{trace}", "--device", "cuda:7"], "has no device cuda:7"),
        (["{trace}", "missing.memtrace"], "missing.memtrace does not exist"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, gpt_trace: Path) -> None:
    result = CliRunner().invoke(cli, ["compare", *(text.format(trace=gpt_trace) for text in arguments)])
    assert result.exit_code != 0
    assert re.sub(r"\s+", " ", message) in re.sub(r"\s+", " ", f"{result.output} {result.exception}")
