"""The public figures, and the files that ``memtrace plot`` writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from click.testing import CliRunner
from memtrace.cli import cli
from memtrace.dashboards.images import find_browser, write_figure
from memtrace.dashboards.palette import THEMES

from memtrace import plots
from memtrace.analysis.peak import find_peak
from memtrace.errors import MemtraceError, TraceError
from memtrace.pipeline.plan import predict_schedule
from memtrace.pipeline.schedules.registry import build_schedule, parse_schedule_choice
from memtrace.trace import Trace, load
from memtrace.units import choose_byte_unit
from tests.analysis.test_compare import job, sized_trace
from tests.cli.runner import run_memtrace
from tests.dashboards.browser import needs_chromium, opened
from tests.pipeline.cases import uniform_layers


@pytest.fixture(scope="module")
def trace(gpt_trace: Path) -> Trace:
    return load(gpt_trace)


def test_every_figure_has_the_colors_of_its_theme(trace: Trace) -> None:
    prediction = predict_schedule(uniform_layers(4), 4, 4, parse_schedule_choice("chimera"))
    ranks = job({0: sized_trace([1, 2]), 1: sized_trace([2, 3])})
    for theme in ("light", "dark"):
        figures = [
            plots.timeline(trace, theme=theme),
            plots.categories(trace, theme=theme),
            plots.access_intervals(trace, trace, labels=["a", "b"], theme=theme),
            plots.steps(trace, theme=theme),
            plots.step_peaks(trace, theme=theme),
            plots.lifetimes(trace, theme=theme),
            plots.ranks(ranks, theme=theme),
            plots.pipeline(build_schedule("gpipe", 4, 4), theme=theme),
            plots.pipeline(prediction, theme=theme),
            plots.pipeline(prediction.simulation, theme=theme),
            plots.pipeline_memory(prediction, capacity_bytes=1000, theme=theme),
        ]
        for figure in figures:
            assert isinstance(figure, go.Figure) and figure.data
            assert figure.layout.template.layout.paper_bgcolor == THEMES[theme]["panel"]
            assert figure.layout.template.layout.font.color == THEMES[theme]["ink"]


def test_the_timeline_reaches_the_peak(trace: Trace) -> None:
    figure = plots.timeline(trace)
    peak = find_peak(trace, "cpu").requested.bytes
    divisor, _ = choose_byte_unit(peak)
    stacked = sum(np.array(area.y) for area in figure.data if area.stackgroup)
    assert max(stacked) * divisor == pytest.approx(peak)


def test_segments_show_live_and_free_memory(data: Path) -> None:
    snapshot = load(next((data / "snapshots").glob("*.pickle")))
    figure = plots.segments(snapshot)
    free, *blocks = figure.data
    unit, scale = figure.layout.xaxis.title.text[:-1].rpartition("(")[2], 1024
    assert unit in ("KiB", "MiB", "GiB") and scale
    ends = dict(zip(free.y, free.x, strict=True))
    for category in blocks:
        for row, start, length in zip(category.y, category.base, category.x, strict=True):
            assert start >= 0 and start + length <= ends[row] * 1.0001


def test_what_a_trace_lacks_is_an_error_that_says_so(trace: Trace) -> None:
    with pytest.raises(TraceError, match="has no segments, which this figure shows"):
        plots.segments(trace)
    with pytest.raises(TraceError, match="has a single rank"):
        plots.ranks(trace)
    with pytest.raises(TraceError, match="has no access intervals"):
        plots.access_intervals(sized_trace([5], step_ns=0))
    with pytest.raises(TraceError, match="has no device cuda:9"):
        plots.timeline(trace, "cuda:9")
    with pytest.raises(ValueError, match="unknown theme 'blue'"):
        plots.timeline(trace, theme="blue")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one trace"):
        plots.categories()


needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chrome or Chromium: apt-get install chromium-headless-shell"
)


@needs_browser
def test_images_are_written_in_the_format_of_the_suffix(gpt_trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("kaleido", reason="kaleido is missing: pip install 'memtrace[images]'")
    expected = {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}
    for suffix, magic in expected.items():
        path = tmp_path / f"figure.{suffix}"
        result = run_memtrace("plot", gpt_trace, "--figure", "categories", "-o", path)
        assert result.returncode == 0, result.stderr
        assert path.read_bytes().startswith(magic)
        assert "Wrote" in result.stdout and "Traceback" not in result.stderr
        assert not list(tmp_path.glob(".*"))


@needs_chromium
def test_the_html_file_works_offline(browser: Any, gpt_trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "figure.html"
    result = CliRunner().invoke(cli, ["plot", str(gpt_trace), "--theme", "dark", "-o", str(path)])
    assert result.exit_code == 0, result.output
    with opened(browser, path) as page:
        page.wait_for_selector(".main-svg")


def test_without_kaleido_or_a_browser_the_message_says_what_to_do(
    gpt_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = plots.categories(load(gpt_trace))
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(MemtraceError, match=r"pip install 'memtrace\[images\]'"):
        write_figure(figure, tmp_path / "x.png")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "kaleido", object())
    monkeypatch.setenv("BROWSER_PATH", "/nonexistent/browser")
    with pytest.raises(MemtraceError, match="BROWSER_PATH names /nonexistent/browser, which is no file"):
        write_figure(figure, tmp_path / "x.png")
    monkeypatch.delenv("BROWSER_PATH")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MemtraceError, match="apt-get install chromium-headless-shell"):
        write_figure(figure, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "x.bmp"], "unknown format. Use one of .png"),
        (["--figure", "ranks", "-o", "x.html"], "has a single rank"),
        (["--figure", "segments", "-o", "x.html"], "has no segments"),
        (["-o", "missing/x.html"], "the folder missing does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, gpt_trace: Path, tmp_path: Path
) -> None:
    result = run_memtrace("plot", gpt_trace, *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
